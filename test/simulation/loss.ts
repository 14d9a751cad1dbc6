/**
 * Faults of the log. An earlier copy replaces the log, so its last events are lost, and other events may follow. Or an empty or a foreign log
 * replaces it. In some runs the right log comes back.
 *
 * LossWatch checks the product during the loss: money may move only after a check of the log that began before the loss.
 */
import { type EventStore, INSTALLATION_STREAM, installationEvents, type LogGate, type NewEvent, type Position } from '#eventstore';
import { timestamp } from '#kernel';
import type { PaymentGateway } from '#payments';
import { hashedUuid } from '#platform';
import { earlierCopy, type ExchangeableStore, exchangeableStore } from '../support/exchangeable-store.js';
import type { World } from './service.js';
import { type Process, Rng } from './simulator.js';
import { collect } from './stores.js';

/** The share of seeds with such a fault. */
const SHARE = 0.08;

export interface LogFault {
  /** `earlier`: the log loses its last events. `grown`: it also gets other events after that. */
  readonly kind: 'earlier' | 'grown' | 'empty' | 'foreign';
  /** When the fault begins, in ms from the start of the run. */
  readonly atMs: number;
  /** The right log comes back after this time. null: it never comes back. */
  readonly backAfterMs: number | null;
  /** All processes are down when the log is replaced. Only data outside of the log can then reveal the loss. */
  readonly stopped: boolean;
  /** The fault removes the newest event with a mark, and this many events before it. */
  readonly more: number;
  /** A grown or foreign log has this many more events than the right log. */
  readonly beyond: number;
  /** All other faults end when this one begins. */
  readonly calm: boolean;
}

/** null: this seed has no such fault. */
export const drawLogFault = (seed: number): LogFault | null => {
  const rng = new Rng(seed ^ 0x1b873593);
  if (!rng.chance(SHARE)) return null;
  return {
    kind: rng.pick(['earlier', 'earlier', 'earlier', 'grown', 'empty', 'foreign']),
    atMs: rng.int(2_000, 90_000),
    backAfterMs: rng.chance(0.4) ? rng.int(200, 90_000) : null,
    stopped: rng.chance(0.3),
    more: rng.pick([0, 0, 0, 1, 2, 5, 20]),
    beyond: rng.int(1, 10),
    calm: rng.chance(0.5),
  };
};

/** The time during which the wrong log is in use. `until` null: it is still in use. */
export interface Loss {
  readonly from: number;
  until: number | null;
}

export class LossWatch {
  loss: Loss | null = null;
  /** Staff found that events are missing from the log, and gave up. */
  isGivenUp = false;
  /** True once a command during the loss got status 200. Its events may be lost later: appends do not wait for a check of the log. */
  isTold = false;
  /** For each gateway reference, the first request that recorded it in an intent. */
  readonly requestOf = new Map<string, string>();
  readonly log: EventStore;
  private readonly store: ExchangeableStore;
  /** Each change of the log in use, with its time. */
  private readonly uses: { readonly from: number; readonly log: EventStore }[];
  private readonly good = new Map<Process, { readonly began: number; readonly ended: number }>();

  constructor(
    private readonly world: World,
    readonly right: EventStore,
  ) {
    this.store = exchangeableStore(right);
    this.uses = [{ from: Number.NEGATIVE_INFINITY, log: right }];
    this.log = { ...this.store, append: (...given) => this.append(this.store, ...given) };
  }

  get isLost(): boolean {
    return this.loss !== null && this.loss.until === null;
  }

  /** True if any part of the loss lies between `from` and `to`. */
  overlaps(from: number, to: number): boolean {
    const { loss } = this;
    return loss !== null && to >= loss.from && (loss.until === null || from <= loss.until);
  }

  exchange(by: EventStore, what: string): void {
    const { sim } = this.world;
    sim.note('log', what);
    this.store.exchange(by);
    this.uses.push({ from: sim.now, log: by });
  }

  /**
   * The log that was in use at a time. An append that was sent to it never reaches another log, because its connection ends with the server. Otherwise
   * a late append of a dead process could put a lost event back at its place, and the loss could not be noticed.
   */
  inUseAt(time: number): Pick<EventStore, 'append'> {
    const { log } = this.uses.findLast(({ from }) => from <= time)!;
    return { append: (...given) => this.append(log, ...given) };
  }

  private append(log: EventStore, ...given: Parameters<EventStore['append']>): ReturnType<EventStore['append']> {
    for (const { type, data, meta } of given[2])
      if (type === 'PaymentInitiated' || type === 'VoidRequested' || type === 'RefundRequested')
        for (const { references } of (data as unknown as { legs: readonly { references: Record<string, string> }[] }).legs)
          for (const reference of Object.values(references)) if (!this.requestOf.has(reference)) this.requestOf.set(reference, meta.correlationId);
    return log.append(...given);
  }

  // ---- the product's calls during the loss

  gate(process: Process, inner: LogGate): LogGate {
    const { sim } = this.world;
    const watched = async (check: () => Promise<void>) => {
      const began = sim.now;
      await check();
      this.good.set(process, { began, ended: sim.now });
    };
    return {
      get incident() {
        return inner.incident;
      },
      verified: (intent, kept) => watched(() => inner.verified(intent, kept)),
      verifiedRead: (last) => inner.verifiedRead(last),
      report: (message) => inner.report(message),
      refuse: () => inner.refuse(),
    };
  }

  /**
   * Watches the gateway calls that move money or finalise a reference. During the loss, such a call needs a check of the log that ended at this
   * instant and began before the loss.
   */
  gateway(process: Process, inner: PaymentGateway): PaymentGateway {
    const judged = (what: string) => {
      const { world, loss } = this;
      if (!loss || !this.isLost) return;
      const good = this.good.get(process);
      const isOld = good?.ended === world.sim.now && good.began <= loss.from;
      world.check(isOld, `C76: a ${what} although the log was lost before its check began`);
    };
    return {
      ...inner,
      charge: (call, signal) => {
        judged('charge');
        return inner.charge(call, signal);
      },
      void: (call, signal) => {
        judged(call.askedBy === 'reversal' ? 'reversal' : 'void');
        return inner.void(call, signal);
      },
      refund: (call, signal) => {
        judged('refund');
        return inner.refund(call, signal);
      },
      finalize: (call, signal) => {
        judged(`finalise of a ${call.op}`);
        return inner.finalize(call, signal);
      },
    };
  }

  /** Reads the bank's records. During the loss, no money may move for a request that was sent after the loss began. */
  auditBank(sentAt: (requestId: string) => number): void {
    const { world, loss } = this;
    if (!loss) return;
    const { charges, reversals } = world.bank;
    for (const { ref, at, amountCents } of [...charges.values(), ...reversals.values()]) {
      const requestId = this.requestOf.get(ref);
      if (requestId === undefined || at < loss.from || (loss.until !== null && at > loss.until)) continue;
      world.check(sentAt(requestId) <= loss.from, `C76: ${amountCents} cents moved for a request that came after the log was lost`);
    }
  }
}

// ------------------------------------------------------------------------------------------------------------------------------------
// The fault itself.

const WAIT_FOR_MARKS_MS = 1_000;
const WAIT_TRIES = 180;
/** For this many tries, wait for a checkpoint that is ahead of all marks. */
const PLACE_TRIES = 60;
const DOWN_MS = [2_000, 15_000] as const;

/** Plays the fault. false: in time, nothing outside of the log named a lost event, so the fault was not played. Such a loss could not be noticed. */
export const playLogFault = async (world: World, fault: LogFault): Promise<boolean> => {
  const { sim, watch } = world;
  await sim.wait(fault.atMs);
  const keep = await eventsToKeep(world, fault);
  if (keep === null) return false;
  const other = await otherLog(world, fault, keep);
  if (fault.calm) sim.faultsOn = false;
  if (fault.stopped) for (const { process } of world.replicas) sim.crash(process, sim.rng.int(...DOWN_MS));
  sim.statistics.exchanges += 1;
  watch!.loss = { from: sim.now, until: null };
  watch!.exchange(other, `THE LOG IS EXCHANGED: ${fault.kind}, ${keep} events kept`);
  if (fault.backAfterMs === null) return true;
  await sim.wait(fault.backAfterMs);
  watch!.exchange(watch!.right, 'THE RIGHT LOG IS BACK');
  watch!.loss.until = sim.now;
  return true;
};

const numberOf = (positions: readonly Position[]): number => positions.reduce((most, position) => Math.max(most, Number(position)), 0);

/** How many events the log keeps. Waits until a mark or a checkpoint names an event that will be lost. null: none did in time. */
const eventsToKeep = async (world: World, { kind, stopped, calm, more }: LogFault): Promise<number | null> => {
  if (kind === 'empty' || kind === 'foreign') return 0;
  for (let tries = 1; tries <= WAIT_TRIES; tries++) {
    const { marks, checkpoints } = await world.marks.bookOf('staff').read();
    const marked = numberOf(marks.map(({ mark }) => mark.position));
    const reached = numberOf(checkpoints.map(({ position }) => position));
    const byPlace = stopped && calm && kind === 'earlier' && tries <= PLACE_TRIES;
    // No call may be under way: a new event at the lost position would hide the loss from the checkpoint.
    if (byPlace && reached > marked && marked > 0 && world.sim.underway === 0) return reached - 1;
    if (!byPlace && marked > 1) return Math.max(1, marked - 1 - more);
    await world.sim.wait(WAIT_FOR_MARKS_MS);
  }
  return null;
};

/** Makes the log that replaces the right one. A foreign log has copies of our events, but for other payments. */
const otherLog = async ({ log, sim }: World, { kind, beyond }: LogFault, keep: number): Promise<EventStore> => {
  const other = await earlierCopy(log, keep);
  if (kind === 'earlier' || kind === 'empty') return other;
  const events = (await collect(log.readAll(null))).flat();
  let length = keep;
  if (kind === 'foreign') {
    const meta = { recordedAt: timestamp(sim.now), actor: { type: 'system', id: 'foreign' }, correlationId: 'foreign' } as const;
    const created = { type: 'InstallationCreated', data: { installationId: hashedUuid('foreign'), createdAt: meta.recordedAt } } as const;
    await other.append(INSTALLATION_STREAM, 'no_stream', [installationEvents.write(created, hashedUuid('foreign'), meta)]);
    length += 1;
  }
  for (let round = 1; length < events.length + beyond; round++)
    for (const { id, type, v, data, meta, stream, revision } of events) {
      if (length++ >= events.length + beyond) break;
      const twin = stream.startsWith('payment-') ? `payment-${hashedUuid('twin', round, stream)}` : `twin-${round}-${stream}`;
      const event: NewEvent = { id: hashedUuid('twin', round, id), type, v, data, meta };
      await other.append(twin, revision === 0n ? 'no_stream' : revision - 1n, [event]);
    }
  return other;
};
