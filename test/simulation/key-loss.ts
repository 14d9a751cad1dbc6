/**
 * A fault of the keys' database. It goes back to an earlier copy: a standby without the last commits is promoted, or the server loses its last commits
 * at a restart. Rows of keys, the checkpoint of the subscriber `keys` and the notice of an earlier loss go back together. The log stays as it is.
 */
import { drawLogFault } from './loss.js';
import type { Outside } from './partners.js';
import { loggedKeyName } from './service.js';
import { Rng } from './simulator.js';

/** The share of seeds with such a fault. */
const SHARE = 0.08;
const DOWN_MS = [2_000, 15_000] as const;
/** The share of these faults in which the server only seems to have been started again. */
const RESTARTED = 0.35;
/** After the loss, clients repeat every known key in some rounds. Together the rounds last longer than claims are closed. */
const ROUNDS = 8;
const ROUND_MS = [5_000, 30_000] as const;
/** Pause before the first round after a restart: shorter than the subscriber `keys` takes. */
const AT_ONCE_MS = [0, 300] as const;
const REPEATED = 0.6;
/** How often, and how many times, the fault looks for a key that is claimed and whose intent is not recorded. */
const CLAIM_LOOK_MS = 5;
const CLAIM_TRIES = 6_000;

export interface KeyFault {
  /** When the copy is made, from the start of the run. */
  readonly copiedAtMs: number;
  /** How much later the database goes back to the copy. */
  readonly laterMs: number;
  /** All processes are stopped before the fault and started after it. So only their files tell them that the database went back. */
  readonly stopped: boolean;
  /** The database goes back when a lost key is claimed and its intent is not recorded. */
  readonly atClaim: boolean;
  /** One process is paused or frozen for this time when the database goes back. null: none. */
  readonly pause: { readonly ms: number; readonly frozen: boolean } | null;
  readonly how: 'promoted' | 'restarted';
}

/** null: this seed has no such fault. A seed with a fault of the log has none: then log and keys may be lost together, which nothing could notice. */
export const drawKeyFault = (seed: number): KeyFault | null => {
  const rng = new Rng(seed ^ 0x38b34ae5);
  if (!rng.chance(SHARE) || drawLogFault(seed) !== null) return null;
  return {
    copiedAtMs: rng.int(500, 60_000),
    laterMs: rng.int(500, 60_000),
    stopped: rng.chance(0.2),
    atClaim: rng.chance(0.7),
    pause: rng.chance(0.6) ? { ms: rng.int(60_000, 300_000), frozen: rng.chance(0.7) } : null,
    how: rng.chance(RESTARTED) ? 'restarted' : 'promoted',
  };
};

/** The rows that changed between these times are lost. */
export interface KeyLoss {
  readonly copiedAt: number;
  readonly wentBackAt: number;
  readonly how: KeyFault['how'];
}

/** Plays the fault, and then repeats every known key again and again. */
export const playKeyFault = async (outside: Outside, { copiedAtMs, laterMs, stopped, atClaim, pause, how }: KeyFault): Promise<void> => {
  const { world, oracle } = outside;
  const { sim } = world;
  await sim.wait(copiedAtMs);
  const copiedAt = sim.now;
  const goBack = world.copiedKeys();
  sim.note('keys', 'A COPY IS MADE');
  await sim.wait(laterMs);
  const hasClaim = () =>
    [...world.keys.rows.values()].some(
      ({ accountId, keyHash, createdAt, state }) =>
        state === 'in_progress' && createdAt > copiedAt && !world.loggedKeys.has(loggedKeyName(accountId, keyHash.toString('hex'))),
    );
  for (let tries = 0; atClaim && !hasClaim() && tries < CLAIM_TRIES; tries++) await sim.wait(CLAIM_LOOK_MS);
  if (stopped) for (const { process } of world.replicas) sim.crash(process, sim.rng.int(...DOWN_MS));
  sim.note('keys', how === 'promoted' ? 'THE DATABASE GOES BACK' : 'THE DATABASE LOSES ITS LAST COMMITS');
  sim.statistics.keyLosses += 1;
  goBack(how);
  if (pause) sim.pause(sim.rng.pick(world.replicas).process, pause.ms, pause.frozen);
  world.keyLoss = { copiedAt, wentBackAt: sim.now, how };
  for (let round = 1; round <= ROUNDS; round++) {
    const [least, most] = how === 'restarted' && round === 1 ? AT_ONCE_MS : ROUND_MS;
    await sim.wait(sim.rng.int(least, most));
    const repeated = oracle.firstUses().filter(() => sim.rng.chance(REPEATED));
    await Promise.all(repeated.map(({ intention, ask }) => outside.send(intention, ask)));
  }
};
