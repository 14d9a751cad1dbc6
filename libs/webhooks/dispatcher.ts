/**
 * The dispatcher is a loop in each worker. It claims due deliveries, signs and posts them, and records how the attempts ended. A lease gives each
 * delivery to only one dispatcher (deliveries.ts). No transaction is open during a request to a receiver.
 *
 * Due times, leases and the signature's `t` follow the database's clock. Between two answers of the database, the worker adds the time of its
 * monotonic clock. The wall clock of a worker may be wrong.
 */
import { createHash } from 'node:crypto';
import type { Clock } from '#kernel';
import { batched, type KeyRing, type Logger } from '#platform';
import type { Claimed, Deliveries, Ended } from './deliveries.js';
import type { DueSignal } from './due.js';
import { openWebhookSecret } from './endpoint.js';
import { bodyToSend, type PayloadPorts } from './payload.js';
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
  readonly payloads: PayloadPorts;
  readonly keys: KeyRing;
  readonly clock: Clock;
  readonly log: Logger;
  readonly watch: DispatcherWatch;
  readonly retrySeconds: number;
  /** If this returns true, the dispatcher claims nothing. Default: never paused. */
  readonly paused?: () => boolean;
}

export interface DispatcherOptions {
  /** Maximum number of attempts in flight in this process. */
  readonly slots?: number;
  /** A lease is ended only after this process has seen it expired for this long. */
  readonly leaseGraceMs?: number;
  /** Maximum time between two reads of the table. */
  readonly idleMs?: number;
  readonly leaseLookMs?: number;
  readonly tidyEveryMs?: number;
}

export interface Dispatcher {
  start(): void;
  /** Stops claiming and gives back deliveries that were just claimed. Waits up to 12 s for attempts in flight. */
  stop(): Promise<void>;
}

/** Limits memory and sockets. */
const SLOTS = 128;
/** Maximum time between two reads of the table. A notification, or the end of an attempt, starts a read earlier. */
const IDLE_MS = 1_000;
/** The loop waits this long before each claim. Attempts that end together then share one claim. */
const CLAIM_EVERY_MS = 5;
const LEASE_LOOK_MS = 1_000;
const TIDY_EVERY_MS = 5_000;
const AFTER_FAILURE_MS = 1_000;
const DRAIN_MS = 12_000;
/** If the body cannot be read or signed, no attempt is counted. The delivery is due again after this time. */
const UNSENDABLE_WAIT_MS = 60_000;
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

  /** Waits until `ring` is called, at most `ms`. Returns at once if `ring` was called since the last wait. */
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
        // Without a listener, deliveries start a little later: the claim loop still polls the table.
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
      // In tests, retries may be due sooner than `idleMs`.
      await this.wait(Math.min(this.options.idleMs, this.ports.retrySeconds * 1_000));
      // If several attempts end together, one claim then fills all their slots.
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
    const { sender, clock, log, watch, retrySeconds, deliveries, payloads } = this.ports;
    const { deliveryId, token, eventId, type, endpointId, url, secretId, round, consecutiveFailures } = delivery;
    let secret: string;
    let body: Buffer;
    try {
      secret = this.secretOf(delivery);
      body = await bodyToSend(payloads, delivery);
    } catch (error) {
      log.error({ err: error, endpointId, deliveryId }, 'the secret or the body of a webhook cannot be opened');
      return deliveries.release([delivery], UNSENDABLE_WAIT_MS);
    }
    const begun = clock.monotonic();
    const startedAtMs = delivery.claimedAtMs + (begun - claimedAt);
    const headers = headersOf({ id: eventId, type, body }, secret, Math.floor(startedAtMs / 1000));
    const posted: Posted = await sender.post({ url, endpointId, headers, body });
    const durationMs = Math.round(clock.monotonic() - begun);
    const attempt = delivery.attempts + 1;
    const succeeded = posted.outcome === 'ok';
    const fate = fateOf({ attempt, succeeded, chance: delivery.chance }, retrySeconds);
    watch.attempted({ outcome: posted.outcome, seconds: durationMs / 1000 });
    const sent = { secretId, bodySha256: createHash('sha256').update(body).digest(), startedAtMs, durationMs };
    const counted = await this.written({ deliveryId, token, fate, ...posted, ...sent }, claimedAt);
    const fields = { eventId, deliveryId, endpointId, round, attempt, outcome: posted.outcome, ms: durationMs };
    if (!counted) return this.lost(fields);
    if (fate.state === 'held') log.error(fields, 'a webhook delivery is held after its last attempt');
    else log[succeeded ? 'debug' : 'warn'](fields, succeeded ? 'a webhook was delivered' : 'a webhook delivery failed; it is tried again');
    // Record a failure only in the first round, and a success only after failures.
    if (succeeded ? consecutiveFailures > 0 : round === 1)
      await this.recordHealth({ endpointId, succeeded }).catch((error: unknown) =>
        log.warn({ err: error }, 'the health of a webhook endpoint was not recorded'),
      );
  }

  /**
   * Records the end of an attempt. If the database fails, the statement is repeated until the lease has certainly expired. Another worker then claims
   * the delivery, and the receiver may get it twice.
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

  /** Ends the leases of dead workers, and calls `tidy` from time to time. */
  private async tidyLoop(signal: AbortSignal): Promise<void> {
    const { deliveries, clock, log, watch, retrySeconds } = this.ports;
    /** For the token of each expired lease: when this process first saw it expired. */
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
