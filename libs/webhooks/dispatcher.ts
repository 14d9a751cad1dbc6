/**
 * The dispatcher: claims due deliveries, signs, posts and records them, as a loop of each worker. Any number of dispatchers run beside each other;
 * the leases in the table keep them apart (deliveries.ts). No transaction is open during the request to a receiver.
 *
 * There is one clock: due times, leases and the signature's `t` follow the database's clock. Between its answers a monotonic clock carries it on. A
 * worker's own clock may be wrong.
 */
import type { Clock } from '#kernel';
import { batched, type KeyRing, type Logger } from '#platform';
import type { Claimed, Deliveries, Ended } from './deliveries.js';
import type { DueSignal } from './due.js';
import { openWebhookSecret } from './endpoint.js';
import type { Outcome, Posted, Sender } from './safe-request.js';
import { ATTEMPT_BUDGET_MS, FAILING_AFTER, fateOf, LEASE_GRACE_MS, LEASE_MS } from './schedule.js';
import { headersOf } from './signature.js';

/** For metrics. */
export interface DispatcherWatch {
  attempted(attempt: { readonly outcome: Outcome; readonly seconds: number }): void;
  leaseLost(): void;
}

export interface DispatcherPorts {
  readonly deliveries: Deliveries;
  readonly sender: Pick<Sender, 'post' | 'close'>;
  readonly due: DueSignal;
  readonly keys: KeyRing;
  readonly clock: Clock;
  readonly log: Logger;
  readonly watch: DispatcherWatch;
  readonly retrySeconds: number;
  /** Claims nothing while it says true. Default: never. */
  readonly paused?: () => boolean;
}

export interface DispatcherOptions {
  /** Attempts in flight at once in this process. */
  readonly slots?: number;
  /** How long a lease must have run out before it is taken away. */
  readonly leaseGraceMs?: number;
  /** How often the table is read without a notification. */
  readonly idleMs?: number;
  readonly leaseLookMs?: number;
  readonly tidyEveryMs?: number;
}

export interface Dispatcher {
  start(): void;
  /** Stops: claims nothing more, lets attempts in flight end for up to 12 s, and gives back deliveries that were not begun. */
  stop(): Promise<void>;
}

/** This bounds memory and sockets, also with many waiting deliveries. */
const SLOTS = 128;
/** Without a notification the table is read this often. A notification, or the end of an attempt, is quicker. */
const IDLE_MS = 1_000;
/** Attempts that end within this time share one claim. */
const CLAIM_EVERY_MS = 5;
const LEASE_LOOK_MS = 1_000;
const TIDY_EVERY_MS = 5_000;
const AFTER_FAILURE_MS = 1_000;
const DRAIN_MS = 12_000;
/** If the signing secret cannot be opened, the fault is ours. It does not count as an attempt, and the delivery is due again after this time. */
const UNSIGNED_WAIT_MS = 60_000;
const COMPLETIONS = { maxItems: 200, inFlight: 2 } as const;
const MAX_KNOWN_SECRETS = 10_000;

export const createDispatcher = (ports: DispatcherPorts, options: DispatcherOptions = {}): Dispatcher => new LeasingDispatcher(ports, options);

class LeasingDispatcher implements Dispatcher {
  private readonly options: Required<DispatcherOptions>;
  private readonly flying = new Set<Promise<void>>();
  private readonly secrets = new Map<string, string>();
  private readonly complete: (ended: Ended) => Promise<boolean>;
  private readonly recordHealth: (result: { endpointId: string; succeeded: boolean }) => Promise<null>;
  private bell = new AbortController();
  private rung = false;
  private running: { readonly stop: AbortController; readonly done: Promise<unknown> } | null = null;

  constructor(
    private readonly ports: DispatcherPorts,
    options: DispatcherOptions,
  ) {
    this.options = {
      slots: SLOTS,
      leaseGraceMs: LEASE_GRACE_MS,
      idleMs: IDLE_MS,
      leaseLookMs: LEASE_LOOK_MS,
      tidyEveryMs: TIDY_EVERY_MS,
      ...options,
    };
    this.complete = batched((ended: readonly Ended[]) => ports.deliveries.complete(ended), COMPLETIONS);
    this.recordHealth = batched(
      async (results: readonly { endpointId: string; succeeded: boolean }[]) => {
        for (const { endpointId, before, after } of await ports.deliveries.recordHealth(results)) {
          if (before < FAILING_AFTER && after >= FAILING_AFTER)
            ports.log.error({ endpointId, failures: after }, 'a webhook endpoint keeps failing; it gets one attempt at a time');
          if (before >= FAILING_AFTER && after === 0) ports.log.info({ endpointId, failures: before }, 'a webhook endpoint has recovered');
        }
        return results.map(() => null);
      },
      { maxItems: COMPLETIONS.maxItems, inFlight: 1 },
    );
  }

  start(): void {
    if (this.running) return;
    const stop = new AbortController();
    this.running = { stop, done: Promise.all([this.claimLoop(stop.signal), this.tidyLoop(stop.signal), this.listenLoop(stop.signal)]) };
  }

  async stop(): Promise<void> {
    const { running } = this;
    if (!running) return;
    this.running = null;
    running.stop.abort();
    this.ring();
    await running.done;
    const late = new AbortController();
    await Promise.race([Promise.all(this.flying), this.ports.clock.sleep(DRAIN_MS, late.signal)]);
    late.abort('done');
    this.ports.sender.close();
  }

  // ---- waking up

  private ring(): void {
    this.rung = true;
    this.bell.abort('rung');
  }

  /** Waits for a notification, at most `ms`. One that came since the last wait counts. */
  private async wait(ms: number): Promise<void> {
    if (!this.rung) await this.ports.clock.sleep(ms, this.bell.signal);
    this.rung = false;
    if (this.bell.signal.aborted) this.bell = new AbortController();
  }

  private async listenLoop(signal: AbortSignal): Promise<void> {
    const { due, clock } = this.ports;
    while (!signal.aborted) {
      try {
        await due.listen(() => this.ring(), signal);
      } catch {
        // Without a listener the table is still polled. It is only slower.
      }
      if (!signal.aborted) await clock.sleep(AFTER_FAILURE_MS, signal);
    }
  }

  // ---- claiming and delivering

  private async claimLoop(signal: AbortSignal): Promise<void> {
    const { deliveries, clock, log } = this.ports;
    while (!signal.aborted) {
      const free = this.options.slots - this.flying.size;
      if (free > 0 && !this.ports.paused?.()) {
        try {
          const claimed = await deliveries.claimDue(free);
          const claimedAt = clock.monotonic();
          if (signal.aborted) {
            await deliveries.release(claimed, 0);
            return;
          }
          for (const delivery of claimed) this.fly(delivery, claimedAt);
        } catch (error) {
          log.warn({ err: error }, 'webhook deliveries cannot be claimed');
          await clock.sleep(AFTER_FAILURE_MS, signal);
          continue;
        }
      }
      // In tests, deliveries may be due sooner than that.
      await this.wait(Math.min(this.options.idleMs, this.ports.retrySeconds * 1_000));
      // Several attempts that end together free their places for one claim.
      if (!signal.aborted) await clock.sleep(CLAIM_EVERY_MS, signal);
    }
  }

  private fly(delivery: Claimed, claimedAt: number): void {
    const flight = this.deliver(delivery, claimedAt)
      .catch((error: unknown) =>
        this.ports.log.error({ err: error, deliveryId: delivery.deliveryId }, 'a webhook delivery could not be written down'),
      )
      .finally(() => {
        this.flying.delete(flight);
        this.ring();
      });
    this.flying.add(flight);
  }

  private async deliver(delivery: Claimed, claimedAt: number): Promise<void> {
    const { sender, clock, log, watch, retrySeconds, deliveries } = this.ports;
    const { deliveryId, token, eventId, type, payload, endpointId, url, secretId, round, consecutiveFailures } = delivery;
    const begun = clock.monotonic();
    const startedAtMs = delivery.claimedAtMs + (begun - claimedAt);
    let secret: string;
    try {
      secret = this.secretOf(delivery);
    } catch (error) {
      log.error({ err: error, endpointId, deliveryId }, 'a webhook secret cannot be opened');
      return deliveries.release([delivery], UNSIGNED_WAIT_MS);
    }
    const headers = headersOf({ id: eventId, type, body: payload }, secret, Math.floor(startedAtMs / 1000));
    const posted: Posted = await sender.post({ url, endpointId, headers, body: payload });
    const durationMs = Math.round(clock.monotonic() - begun);
    const attempt = delivery.attempts + 1;
    const succeeded = posted.outcome === 'ok';
    const fate = fateOf({ attempt, succeeded, chance: delivery.chance }, retrySeconds);
    watch.attempted({ outcome: posted.outcome, seconds: durationMs / 1000 });
    const counted = await this.written({ deliveryId, token, fate, ...posted, secretId, startedAtMs, durationMs }, claimedAt);
    const fields = { eventId, deliveryId, endpointId, round, attempt, outcome: posted.outcome, ms: durationMs };
    if (!counted) return this.lost(fields);
    if (fate.state === 'held') log.error(fields, 'a webhook delivery is held after its last attempt');
    else log[succeeded ? 'debug' : 'warn'](fields, succeeded ? 'a webhook was delivered' : 'a webhook delivery failed; it is tried again');
    // Health is recorded for a failure in the first round, and for a success after failures. A failed redelivery is not recorded.
    if (succeeded ? consecutiveFailures > 0 : round === 1)
      await this.recordHealth({ endpointId, succeeded }).catch((error: unknown) =>
        log.warn({ err: error }, 'the health of a webhook endpoint was not recorded'),
      );
  }

  /**
   * Records the end of an attempt, and repeats that until the lease is surely over. After that another worker has the delivery, and the receiver gets
   * it twice.
   */
  private async written(ended: Ended, claimedAt: number): Promise<boolean> {
    const { clock } = this.ports;
    for (;;) {
      try {
        return await this.complete(ended);
      } catch (error) {
        if (clock.monotonic() - claimedAt > LEASE_MS + ATTEMPT_BUDGET_MS) throw error;
        await clock.sleep(AFTER_FAILURE_MS);
      }
    }
  }

  private lost(fields: object): void {
    this.ports.watch.leaseLost();
    this.ports.log.warn(fields, 'a webhook attempt ended after its lease; it does not count');
  }

  private secretOf({ secretId, sealed }: Claimed): string {
    const known = this.secrets.get(secretId);
    if (known !== undefined) return known;
    const secret = openWebhookSecret(this.ports.keys, secretId, sealed);
    if (this.secrets.size >= MAX_KNOWN_SECRETS) this.secrets.clear();
    this.secrets.set(secretId, secret);
    return secret;
  }

  // ---- tasks that follow from time

  /** Takes over from workers that died, and keeps the table in order. */
  private async tidyLoop(signal: AbortSignal): Promise<void> {
    const { deliveries, clock, log, watch, retrySeconds } = this.ports;
    /** Tokens of leases that have run out, and the time at which this process first saw them so. */
    let seen = new Map<string, number>();
    let tidiedAt = Number.NEGATIVE_INFINITY;
    while (!signal.aborted) {
      try {
        const expired = await deliveries.expired();
        const now = clock.monotonic();
        seen = new Map(expired.map(({ token }) => [token, seen.get(token) ?? now]));
        const over = expired.filter(({ token }) => now - seen.get(token)! >= this.options.leaseGraceMs);
        if (over.length > 0) {
          const reaped = await deliveries.reap(over);
          for (const { deliveryId, held } of reaped) {
            watch.leaseLost();
            log[held ? 'error' : 'warn'](
              { deliveryId },
              held ? 'a webhook delivery lost too many workers; it is held' : 'a webhook delivery lost its worker',
            );
          }
          if (reaped.length > 0) this.ring();
        }
        if (now - tidiedAt >= this.options.tidyEveryMs) {
          await deliveries.tidy(retrySeconds);
          tidiedAt = now;
        }
      } catch (error) {
        log.warn({ err: error }, 'webhook leases cannot be looked at');
      }
      await clock.sleep(this.options.leaseLookMs, signal);
    }
  }
}
