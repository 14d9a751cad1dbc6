/**
 * The work of the three commands, in pieces: a range of seeds, the crash points of a scenario, or a canary. Pieces are independent, so any process
 * can do any piece.
 */
import { CANARIES, type Canary } from './canaries.js';
import { drawKeyFault } from './key-loss.js';
import { drawLogFault } from './loss.js';
import { type Counts, type RunResult, simulate } from './run.js';
import { pairs, playNamed, singles } from './scenarios.js';
import type { Seams } from './service.js';
import { type CrashPoint, type Statistics, withoutRealTime } from './simulator.js';

/** The stores that a seed can lose a part of. */
export type LosingStore = 'log' | 'keys';

const LOSES: Readonly<Record<LosingStore, (seed: number) => boolean>> = {
  log: (seed) => drawLogFault(seed) !== null,
  keys: (seed) => drawKeyFault(seed) !== null,
};

export const isLosingStore = (text: string): text is LosingStore => text in LOSES;

/** One piece of work. `lost`: only the seeds with this fault are run. */
export type Piece =
  | {
      readonly kind: 'seeds';
      readonly from: number;
      readonly to: number;
      readonly twice: boolean;
      readonly lost?: LosingStore | undefined;
      readonly planted?: string;
    }
  | { readonly kind: 'singles'; readonly scenario: string }
  | { readonly kind: 'pairs'; readonly scenario: string; readonly every: number }
  | { readonly kind: 'canary'; readonly canary: string; readonly from: number; readonly to: number };

/** A run with violations, and the data to repeat it. */
export interface Finding {
  readonly seed: number | null;
  readonly scenario: string | null;
  readonly crashes: readonly CrashPoint[];
  /** The name of the bug that was planted with `--plant`. */
  readonly planted?: string;
  readonly violations: readonly string[];
}

export interface Done extends Counts {
  readonly runs: number;
  /** Processor time. Other programs change it less than the elapsed time. */
  readonly cpuMs: number;
  /** Seeds that were run twice and gave different histories. */
  readonly nondeterministic: readonly number[];
  readonly findings: readonly Finding[];
  /** Only for a canary: how many seeds were run until it was found. null: it was not found. */
  readonly foundAfter?: number | null;
}

const NO_STATISTICS: Statistics = {
  calls: 0,
  drops: 0,
  lost: 0,
  late: 0,
  outages: 0,
  crashes: 0,
  pauses: 0,
  exchanges: 0,
  incidents: 0,
  keyLosses: 0,
};

export const NOTHING: Done = {
  runs: 0,
  statistics: NO_STATISTICS,
  checks: 0,
  payments: 0,
  events: 0,
  deliveries: 0,
  arrivals: 0,
  simulatedMs: 0,
  cpuMs: 0,
  answers: {},
  nondeterministic: [],
  findings: [],
};

const addRecords = <Key extends string>(a: Readonly<Record<Key, number>>, b: Readonly<Record<Key, number>>): Record<Key, number> => {
  const sum = { ...a } as Record<Key, number>;
  for (const [name, count] of Object.entries(b) as [Key, number][]) sum[name] = (sum[name] ?? 0) + count;
  return sum;
};

export const together = (a: Done, b: Done): Done => ({
  runs: a.runs + b.runs,
  statistics: addRecords<keyof Statistics>(a.statistics, b.statistics),
  checks: a.checks + b.checks,
  payments: a.payments + b.payments,
  events: a.events + b.events,
  deliveries: a.deliveries + b.deliveries,
  arrivals: a.arrivals + b.arrivals,
  simulatedMs: a.simulatedMs + b.simulatedMs,
  cpuMs: a.cpuMs + b.cpuMs,
  answers: addRecords(a.answers, b.answers),
  nondeterministic: [...a.nondeterministic, ...b.nondeterministic],
  findings: [...a.findings, ...b.findings],
});

const counted = ({ statistics, checks, payments, events, deliveries, arrivals, simulatedMs, answers }: RunResult): Done => {
  const counts: Counts = { statistics, checks, payments, events, deliveries, arrivals, simulatedMs, answers };
  return { ...NOTHING, ...counts, runs: 1 };
};

const canaryOf = (planted: string): Canary => {
  const canary = CANARIES.find(({ name }) => name === planted);
  if (!canary) throw new Error(`no such canary: ${planted}`);
  return canary;
};

const seamsOf = (planted: string | undefined): Seams => (planted === undefined ? {} : canaryOf(planted).seams);

/** Does one piece. `onRun` is called after every run. */
export const work = async (piece: Piece, onRun: () => void = () => undefined): Promise<Done> => {
  const before = process.cpuUsage();
  const done = await withoutRealTime(() => workOn(piece, onRun));
  const { user, system } = process.cpuUsage(before);
  return { ...done, cpuMs: (user + system) / 1000 };
};

const workOn = async (piece: Piece, onRun: () => void): Promise<Done> => {
  let done = NOTHING;
  const add = (result: RunResult, finding: Omit<Finding, 'violations'>) => {
    const { violations } = result;
    done = together(done, { ...counted(result), findings: violations.length > 0 ? [{ ...finding, violations }] : [] });
    onRun();
  };
  switch (piece.kind) {
    case 'seeds':
      for (let seed = piece.from; seed < piece.to; seed++) {
        const { planted } = piece;
        if (piece.lost && !LOSES[piece.lost](seed)) continue;
        const result = await simulate(seed, seamsOf(planted));
        add(result, { seed, scenario: null, crashes: [], ...(planted !== undefined && { planted }) });
        if (piece.twice && (await simulate(seed, seamsOf(planted))).hash !== result.hash)
          done = { ...done, nondeterministic: [...done.nondeterministic, seed] };
      }
      return done;
    case 'singles':
    case 'pairs': {
      const { scenario } = piece;
      for await (const { crashes, result } of piece.kind === 'singles' ? singles(scenario) : pairs(scenario, piece.every))
        add(result, { seed: null, scenario, crashes });
      return done;
    }
    case 'canary': {
      const { seams, lost } = canaryOf(piece.canary);
      for (let seed = piece.from; seed < piece.to; seed++) {
        if (lost && !LOSES[lost](seed)) continue;
        const result = await simulate(seed, seams);
        done = together(done, counted(result));
        onRun();
        if (result.violations.length === 0) continue;
        // If the seed also fails without the canary, the product has a bug. Then this seed does not count.
        const { violations } = await simulate(seed);
        if (violations.length === 0) return { ...done, foundAfter: seed - piece.from + 1 };
        done = { ...done, findings: [...done.findings, { seed, scenario: null, crashes: [], violations }] };
      }
      return { ...done, foundAfter: null };
    }
  }
};

/** Plays the run of a finding again, for its story. */
export const again = ({ seed, scenario, crashes, planted }: Omit<Finding, 'violations'>): Promise<RunResult> =>
  withoutRealTime(() => (seed !== null ? simulate(seed, seamsOf(planted)) : playNamed(scenario!, crashes, seamsOf(planted))));
