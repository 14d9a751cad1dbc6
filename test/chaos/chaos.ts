/**
 * Chaos: partners pay and return money while processes are killed and stopped, links go bad, and clocks jump. After each round all faults are healed,
 * recovery runs, and all records are compared. The seed decides the faults. The exact moment of a fault depends on the machine.
 */
import { setTimeout as sleep } from 'node:timers/promises';
import { DatabaseUnavailable } from '#platform';
import { Random } from '../../apps/demo/city.js';
import { eventually } from '../support/eventually.js';
import { CARD } from '../support/service.js';
import { type Installation, LINKS, type RolePart, ROLES, startInstallation } from './installation.js';
import { bringToEnd, judge, type Verdict } from './judge.js';
import { Partners } from './partners.js';
import type { Toxic } from './proxy.js';

const APIS = ['api 1', 'api 2'] as const;
/** Fail points (libs/platform/failpoints.ts) that the requests of these partners reach. */
const OFTEN = ['claim', 'append.PaymentInitiated', 'charge.principal', 'charge.fee', 'append.PaymentCreated', 'finish'] as const;
const SELDOM = [
  'append.PaymentDeclined',
  'append.PaymentFailed',
  'append.PaymentOutcomeUnknown',
  'append.RefundRequested',
  'append.VoidRequested',
  'void.principal',
  'append.PaymentVoided',
  'void.fee',
  'refund.principal',
  'append.PaymentRefunded',
  'refund.fee',
  'append.FeeRefunded',
  'append.ReversalEnded',
  'append.ReconciliationStarted',
  'renewAttempt',
] as const;
/** Few requests reach a point of SELDOM. So two of three draws give a point of OFTEN. */
const API_POINTS = [...SELDOM, ...Array.from({ length: 5 }, () => OFTEN).flat()] as const;
/** Fail points of the worker's loops. These loops handle work that is older than a minute, so only a long round reaches them. */
const WORKER_POINTS = [
  'finalize.charge',
  'finalize.reversal',
  'append.ReconciliationStarted',
  'append.PaymentVoided',
  'void.principal',
  'finish',
] as const;

/** How long a partner waits for one answer. */
const PATIENCE_MS = 8_000;
const CLERKS = 16;
/** Pause between two faults. */
const CALM_MS = { least: 150, most: 1_500 } as const;
const TOXIC_MS = { least: 300, most: 5_000 } as const;
const PAUSE_MS = { least: 1_000, most: 200_000 } as const;
/** How long the faults of a round last. Every {@link LONG_EVERY}th round lasts longer than a lease, and longer than recovery waits at first. */
const ROUND_MS = { least: 20_000, most: 60_000 } as const;
const LONG_ROUND_MS = 100_000;
const LONG_EVERY = 8;
const COMPARISONS = 5;
/**
 * The jumps of an API's clock. With a clock hours back or 25 h ahead, running requests look abandoned to recovery. Jumps of some minutes ahead are
 * left out: recovery would start minutes later than a run waits.
 */
const CLOCK_JUMPS_MS = [-25 * 3_600_000, -2 * 3_600_000, -60_000, 5_000, 25 * 3_600_000] as const;

export interface ChaosReport extends Verdict {
  readonly rounds: number;
  readonly intentions: number;
  readonly returns: number;
  readonly requests: Partners['figures'];
  readonly kills: { readonly random: number; readonly atFailpoints: number; readonly postgres: number; readonly simulator: number };
  readonly faults: Readonly<Record<string, number>>;
  readonly resolvedByRecovery: number;
}

export interface ChaosOptions {
  readonly milliseconds: number;
  /** Maximum number of rounds. Default: as many as fit in the time. */
  readonly rounds?: number;
  readonly roundMs?: number;
  /** A difference that the comparison must report: a charge without a request, or a payment that was acknowledged and lost. */
  readonly plant?: Plant | null;
  readonly onProgress?: (line: string) => void;
}

export const runChaos = async (
  random: Random,
  { milliseconds, rounds = Number.POSITIVE_INFINITY, roundMs, plant = null, onProgress = () => undefined }: ChaosOptions,
): Promise<ChaosReport> => {
  const end = performance.now() + milliseconds;
  const installation = await startInstallation(random);
  const { parts } = installation;
  const faults = new Faults(installation, new Random(random.int(0, 2 ** 31)));
  const partners = new Partners(installation.urls, installation.apiKey, installation.portalId, 'chaos', PATIENCE_MS);
  let [round, resolvedByRecovery] = [0, 0];
  let verdict: Verdict | null = null;
  let removed = false;
  try {
    while (round < rounds && (round === 0 || performance.now() < end) && (verdict?.violations.length ?? 0) === 0) {
      round += 1;
      const begun = performance.now();
      const times: number[] = [];
      const since = { charges: partners.charges.length };
      const length = roundMs ?? (round % LONG_EVERY === 0 ? LONG_ROUND_MS : random.int(ROUND_MS.least, ROUND_MS.most));
      const working = partners.work(CLERKS, random);
      await faults.strike(Math.min(length, Math.max(1_000, end - performance.now())));
      times.push(performance.now());
      partners.close();
      // One stopped API may stay stopped during recovery. It resumes later without its leases and connections. The other API does the work.
      const sleepers = APIS.filter((part) => parts[part].isPaused).slice(0, 1);
      await installation.heal(sleepers);
      await working;
      times.push(performance.now());
      const stuck: string[] = [];
      try {
        resolvedByRecovery += await bringToEnd(installation, partners, random);
        for (const part of sleepers) parts[part].resume();
        await Promise.all(ROLES.map((part) => parts[part].ready()));
        // A resumed API continues its old requests. Recovery may have to finish their payments.
        if (sleepers.length > 0) resolvedByRecovery += await bringToEnd(installation, partners, random);
      } catch (error) {
        stuck.push((error as Error).message);
      }
      times.push(performance.now());
      if (plant !== null) await planted[plant](installation, partners);
      verdict = await patiently(() => judge(installation, partners, since));
      times.push(performance.now());
      verdict = { ...verdict, violations: [...stuck, ...installation.faults(), ...partners.violations, ...verdict.violations] };
      // No payment is open now, so the batches may close. The next round then refunds these payments instead of voiding them.
      if (random.next() < 0.5) await installation.bank.closeBatches();
      const [struck, healed, settled, judged] = times.map((time, n) => ((time - (times[n - 1] ?? begun)) / 1_000).toFixed(0));
      onProgress(
        `round ${round} (${struck} s of faults, healed in ${healed} s, at rest in ${settled} s, compared in ${judged} s): ${partners.charges.length} intentions, ${verdict.payments} payments, ${verdict.violations.length} violations`,
      );
    }
    partners.end();
    const roles = ROLES.map((part) => parts[part].deaths);
    const sum = (values: readonly number[]) => values.reduce((all, one) => all + one, 0);
    const report: ChaosReport = {
      ...verdict!,
      rounds: round,
      intentions: partners.charges.length,
      returns: partners.returns.length,
      requests: partners.figures,
      kills: {
        random: sum(roles.map(({ killed }) => killed)),
        atFailpoints: sum(roles.map(({ atFailpoint }) => atFailpoint)),
        postgres: parts.postgres.deaths.killed,
        simulator: parts.simulator.deaths.killed,
      },
      faults: faults.counts,
      resolvedByRecovery,
    };
    await installation.remove();
    removed = true;
    const left = await eventually(() => installation.leftovers().length === 0, { timeoutMs: 10_000, everyMs: 200 }).then(
      () => [],
      () => installation.leftovers(),
    );
    return { ...report, violations: [...report.violations, ...left.map((one) => `a process was left behind: ${one}`)] };
  } finally {
    partners.end();
    if (!removed) await installation.remove();
  }
};

/** If Postgres was too busy to answer in time, compares again, at most COMPARISONS times in all. */
const patiently = async (compare: () => Promise<Verdict>): Promise<Verdict> => {
  for (let tries = 1; ; tries++) {
    try {
      return await compare();
    } catch (error) {
      if (tries >= COMPARISONS || !(error instanceof DatabaseUnavailable)) throw error;
    }
  }
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Faults.

class Faults {
  readonly counts: Record<string, number> = {};
  private striking = false;

  constructor(
    private readonly installation: Installation,
    private readonly random: Random,
  ) {}

  async strike(milliseconds: number): Promise<void> {
    this.striking = true;
    const ending = sleep(milliseconds).then(() => (this.striking = false));
    const { random } = this;
    const running: Promise<void>[] = [];
    this.armFailpoints();
    // Kill one API at once. It starts again with a fail point.
    this.killed(random.pick(APIS));
    while (this.striking) {
      await sleep(random.int(CALM_MS.least, CALM_MS.most));
      if (this.striking) running.push(this.one());
      this.armFailpoints();
    }
    await Promise.all([ending, ...running]);
  }

  /** Gives a fail point for the next start to each role process that has none. */
  private armFailpoints(): void {
    const { parts } = this.installation;
    for (const part of ROLES) {
      if (parts[part].failpoint !== null) continue;
      const point = this.random.pick<string>(part === 'worker' ? WORKER_POINTS : API_POINTS);
      parts[part].failpoint = `${point}:${this.random.pick(['before', 'after'])}`;
    }
  }

  private async one(): Promise<void> {
    const { random } = this;
    const draw = random.next();
    if (draw < 0.16) this.killed(random.pick([...APIS, ...APIS, 'worker'] as const));
    else if (draw < 0.27) this.killed('postgres');
    else if (draw < 0.3) this.killed('simulator');
    else if (draw < 0.36) await this.pause(random.pick([...ROLES, 'simulator'] as const));
    else if (draw < 0.4) await this.jump(random.pick(APIS));
    else await this.toxic();
  }

  private killed(part: keyof Installation['parts']): void {
    if (this.installation.parts[part].kill()) this.count(`kill ${part}`);
  }

  /** Stops a process for 1 to 200 s. The logarithm of the time is uniform. */
  private async pause(part: RolePart | 'simulator'): Promise<void> {
    const one = this.installation.parts[part];
    if (!one.isRunning || one.isPaused) return;
    this.count(`stop ${part}`);
    one.pause();
    await this.during(PAUSE_MS.least * (PAUSE_MS.most / PAUSE_MS.least) ** this.random.next());
    // If the round has ended, runChaos resumes or kills the stopped process.
    if (this.striking) one.resume();
  }

  private async jump(part: RolePart): Promise<void> {
    this.count('clock jump');
    await this.installation.jump(part, this.random.pick(CLOCK_JUMPS_MS));
    await this.during(this.random.int(TOXIC_MS.least, TOXIC_MS.most));
    await this.installation.jump(part, 0);
  }

  private async toxic(): Promise<void> {
    const { random } = this;
    const link = random.pick(LINKS);
    const proxy = random.pick(this.installation.links[link]);
    const toxic = drawToxic(random);
    this.count(`${toxic.kind} ${link}`);
    proxy.poison(toxic, { direction: random.pick(['upstream', 'downstream', 'both']), share: random.pick([0.3, 1]) });
    await this.during(random.int(TOXIC_MS.least, TOXIC_MS.most));
    proxy.heal();
  }

  /** Waits this long, or until the round ends. */
  private async during(milliseconds: number): Promise<void> {
    const until = performance.now() + milliseconds;
    while (this.striking && performance.now() < until) await sleep(Math.min(50, Math.max(1, until - performance.now())));
  }

  private count(name: string): void {
    this.counts[name] = (this.counts[name] ?? 0) + 1;
  }
}

const drawToxic = (random: Random): Toxic =>
  random.pick<() => Toxic>([
    () => ({ kind: 'latency', latencyMs: random.int(10, 1_500), jitterMs: random.int(0, 500) }),
    () => ({ kind: 'bandwidth', bytesPerSecond: random.int(500, 50_000) }),
    () => ({ kind: 'slicer', averageBytes: random.int(1, 200), delayMs: random.int(0, 10) }),
    () => ({ kind: 'timeout' }),
    () => ({ kind: 'reset_peer', afterMs: random.int(0, 1_000) }),
    () => ({ kind: 'slow_close', delayMs: random.int(100, 3_000) }),
    () => ({ kind: 'limit_data', bytes: random.int(1, 20_000) }),
    () => ({ kind: 'down' }),
  ])();

// ----------------------------------------------------------------------------------------------------------------------------------
// Planted differences, which the comparison must notice.

export const PLANTS = ['charge', 'loss'] as const;
export type Plant = (typeof PLANTS)[number];

const planted: Readonly<Record<Plant, (installation: Installation, partners: Partners) => Promise<void> | void>> = {
  /** The bank makes one more charge on the merchant account of its newest operation. */
  charge: async ({ simulatorUrl, bank }) => {
    const { merchantAccount } = (await bank.truth()).at(-1)!;
    const answer = await fetch(`${simulatorUrl}/v1/charges`, {
      method: 'POST',
      headers: { authorization: `Sandbox ${merchantAccount}:sk_sandbox_${merchantAccount}`, 'content-type': 'application/json' },
      body: JSON.stringify({
        ref: 'planted',
        leg: 'principal',
        amountCents: 1,
        instrument: { number: CARD.approved.replaceAll(' ', ''), expiryMonth: 12, expiryYear: 2040, cvv: '123' },
      }),
    });
    if (answer.status !== 200) throw new Error(`nothing was planted: ${await answer.text()}`);
  },
  /** The partners' books get a payment that the log does not have. */
  loss: (_, partners) => {
    const [paid] = partners.charges.filter(({ payment }) => payment !== null);
    if (!paid) throw new Error('no payment to plant another one beside');
    // The planted payment has no returns. So the sum of the partners' books must differ from the bank's.
    const payment = { ...paid.payment!, id: '00000000-0000-7000-8000-000000000000' };
    partners.charges.push({ ...paid, intention: 'planted', payment, toldReturnedCents: 0 });
  },
};
