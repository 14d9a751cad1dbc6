/** What liveness and readiness look at. */
import { monitorEventLoopDelay } from 'node:perf_hooks';
import { type Clock, within } from '#kernel';

export interface HealthReport {
  readonly ok: boolean;
  readonly checks: Readonly<Record<string, string>>;
  /** Only where it is so: webhooks may be sent to private addresses. */
  readonly webhookPrivateTargets?: true;
}

/** Each resolves when all is well and throws what is not. */
export type ReadinessChecks = Readonly<Record<string, () => Promise<void>>>;

const DRAINING: HealthReport = { ok: false, checks: { shutdown: 'draining' } };
const MAX_LOOP_DELAY_MS = 2_000;
const CHECK_TIMEOUT_MS = 2_000;

export class Health {
  private draining = false;
  private readonly loop = monitorEventLoopDelay({ resolution: 100 });

  constructor(
    private readonly checks: ReadinessChecks,
    private readonly clock: Clock,
    private readonly flags: Pick<HealthReport, 'webhookPrivateTargets'> = {},
  ) {
    this.loop.enable();
  }

  /** From now on not ready: a load balancer sends nothing new. */
  drain(): void {
    this.draining = true;
  }

  live(): HealthReport {
    const delayMs = this.loop.max / 1e6;
    this.loop.reset();
    const ok = delayMs < MAX_LOOP_DELAY_MS;
    return { ok, checks: { eventLoop: ok ? 'ok' : `blocked for ${Math.round(delayMs)} ms` }, ...this.flags };
  }

  async ready(): Promise<HealthReport> {
    if (this.draining) return DRAINING;
    const results = await Promise.all(
      Object.entries(this.checks).map(async ([name, check]): Promise<[string, string]> => {
        try {
          await within(this.clock, CHECK_TIMEOUT_MS, check(), () => new Error('no answer'));
          return [name, 'ok'];
        } catch (error) {
          // A message of a driver may name hosts and users; readiness is open to everybody.
          return [name, error instanceof Error && error.message === 'no answer' ? 'no answer' : 'failing'];
        }
      }),
    );
    // It may have begun while we looked.
    if (this.draining) return DRAINING;
    return { ok: results.every(([, result]) => result === 'ok'), checks: Object.fromEntries(results) };
  }
}
