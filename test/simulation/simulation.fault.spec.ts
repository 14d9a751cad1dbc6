/**
 * The short version of the proofs: some seeds, every single crash point, and some canaries. The long versions are `npm run sim`, `npm run crash` and
 * `npm run canaries`. Runs that failed once are played every time.
 *
 * A process of its own does the work. Inside of Jest, it would take more than twice as long.
 */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import type { ChildProcess } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { CANARIES } from './canaries.js';
import { SCENARIOS } from './scenarios.js';
import { again, type Finding, type Piece } from './work.js';
import { doPiece, startWorker } from './workers.js';

const SEEDS = 100;
/** Enough seeds to find the rarest canary of QUICK. `npm run canaries` looks for all canaries. */
const CANARY_SEEDS = 240;
const LONG_MS = 900_000;

const regressions = JSON.parse(readFileSync(join(import.meta.dirname, 'regressions.json'), 'utf8')) as Finding[];

let worker: ChildProcess;
beforeAll(() => {
  worker = startWorker();
});
afterAll(() => worker.disconnect());
const work = (piece: Piece) => doPiece(worker, piece);

test(
  `${SEEDS} seeds: no violation`,
  async () => {
    const { findings, statistics, answers } = await work({ kind: 'seeds', from: 1, to: 1 + SEEDS, twice: false });
    expect(findings).toEqual([]);
    // Check that each kind of fault has happened. Seeds without faults prove nothing.
    for (const fault of [statistics.drops, statistics.lost, statistics.late, statistics.outages, statistics.crashes, statistics.pauses])
      expect(fault).toBeGreaterThan(50);
    for (const code of [
      'OK',
      'OK (replayed)',
      'PAYMENT_DECLINED',
      'PAYMENT_TIMEOUT',
      'PARTIAL_REFUND_PENDING',
      'IDEMPOTENCY_RECONCILIATION_REQUIRED',
    ])
      expect(answers[code]).toBeGreaterThan(0);
  },
  LONG_MS,
);

test(
  'the same seed is the same history',
  async () => {
    const { nondeterministic } = await work({ kind: 'seeds', from: 100_000, to: 100_030, twice: true });
    expect(nondeterministic).toEqual([]);
  },
  LONG_MS,
);

test.each(Object.keys(SCENARIOS))(
  'a crash before and after every port call: %s',
  async (scenario) => {
    const { findings, runs } = await work({ kind: 'singles', scenario });
    expect(findings).toEqual([]);
    expect(runs).toBeGreaterThan(15);
  },
  LONG_MS,
);

test(
  'seeds that failed once',
  async () => {
    for (const finding of regressions) expect({ ...finding, violations: (await again(finding)).violations }).toEqual({ ...finding, violations: [] });
  },
  LONG_MS,
);

describe('planted bugs are found', () => {
  const QUICK = [
    'no intent: money moves before anything is on disk',
    'recovery fences when it is done, not when it begins',
    'a takeover executes again, as a new payment',
    'after a 5xx on create the key is given back',
    'no answer to a reversal counts as reversed',
    'a retry draws new references',
    'the gateway keeps no tombstone',
    'no answer counts as not processed',
    'the checkpoint moves outside of the rows’ transaction',
    'the log does not compare revisions',
    'a second form begins a second attempt',
    'nobody finishes what a payer left',
    'a sixth attempt',
    'the outbox passes over a fact',
  ];
  test.each(QUICK)(
    '%s',
    async (canary) => {
      expect(CANARIES.map(({ name }) => name)).toContain(canary);
      const { foundAfter } = await work({ kind: 'canary', canary, from: 1, to: 1 + CANARY_SEEDS });
      expect(foundAfter).toEqual(expect.any(Number));
    },
    LONG_MS,
  );
});
