/** Liveness and readiness of a process. */
import { monitorEventLoopDelay } from 'node:perf_hooks';
import type { LogGate } from '#eventstore';
import { type Clock, within } from '#kernel';
import type { Claims } from '#payments';
import type { Config } from '#platform';

export interface HealthReport {
  readonly ok: boolean;
  readonly checks: Readonly<Record<string, string>>;
  /** Set only if webhooks may be sent to private addresses. */
  readonly webhookPrivateTargets?: true;
  /** Set only while an incident of the event store is open. The process then stays ready and answers by C76. */
  readonly storeIncident?: true;
  /** Set only while claims are closed. Requests with a new key then get 503 (C76). */
  readonly claimsClosed?: true;
}

/** A check throws if payments cannot use the part that it checks. */
export type ReadinessChecks = Readonly<Record<string, () => Promise<void>>>;

const DRAINING: HealthReport = { ok: false, checks: { shutdown: 'draining' } };
export const NOT_STARTED: HealthReport = { ok: false, checks: { start: 'not complete' } };
const MAX_LOOP_DELAY_MS = 2_000;
const CHECK_TIMEOUT_MS = 2_000;

/** Runs all checks. The result of a check is `ok`, `failing` or `no answer`. */
export const checkAll = (checks: ReadinessChecks, clock: Clock): Promise<[name: string, result: string][]> =>
  Promise.all(
    Object.entries(checks).map(async ([name, check]): Promise<[string, string]> => {
      try {
        await within(clock, CHECK_TIMEOUT_MS, check(), () => new Error('no answer'));
        return [name, 'ok'];
      } catch (error) {
        // This report is public. The driver's message may name hosts and users, so the report leaves it out.
        return [name, error instanceof Error && error.message === 'no answer' ? 'no answer' : 'failing'];
      }
    }),
  );

export interface HealthParts {
  readonly readiness: ReadinessChecks;
  readonly clock: Clock;
  readonly config: Pick<Config, 'webhooks'>;
  readonly ownLog: Pick<LogGate, 'incident'>;
  readonly claims: Pick<Claims, 'isOpen'>;
}

export class Health {
  private draining = false;
  private held = false;
  private readonly loop = monitorEventLoopDelay({ resolution: 100 });

  constructor(private readonly parts: HealthParts) {
    this.loop.enable();
  }

  /** Makes the readiness check fail from now on. */
  drain(): void {
    this.draining = true;
  }

  /** Makes the readiness check fail until {@link open}: the start goes on. */
  hold(): void {
    this.held = true;
  }

  open(): void {
    this.held = false;
  }

  live(): HealthReport {
    const delayMs = this.loop.max / 1e6;
    this.loop.reset();
    const ok = delayMs < MAX_LOOP_DELAY_MS;
    return {
      ok,
      checks: { eventLoop: ok ? 'ok' : `blocked for ${Math.round(delayMs)} ms` },
      ...(this.parts.config.webhooks.privateTargets.length > 0 && { webhookPrivateTargets: true }),
    };
  }

  async ready(): Promise<HealthReport> {
    return this.held ? NOT_STARTED : this.checked();
  }

  /** The result of the checks, also before {@link open}. */
  async checked(): Promise<HealthReport> {
    if (this.draining) return DRAINING;
    const results = await checkAll(this.parts.readiness, this.parts.clock);
    // The drain may have begun during the checks.
    if (this.draining) return DRAINING;
    const report = { ok: results.every(([, result]) => result === 'ok'), checks: Object.fromEntries(results) };
    return {
      ...report,
      ...(this.parts.ownLog.incident && { storeIncident: true }),
      ...(!this.parts.claims.isOpen && { claimsClosed: true }),
    };
  }
}
