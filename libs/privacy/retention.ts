/**
 * Retention: personal data of a payment is erased some years after the payment's newest event, if its account has a retention. A worker looks once a
 * day, and reads the index by pages of keys. It never reads all payments.
 */
import { type Directory, retentionsOf } from '#accounts';
import { Conflict, type EventStore, execute, load, readStreams } from '#eventstore';
import { type Clock, type Ids, timestamp } from '#kernel';
import { paymentIdOf } from '#payments';
import { hashedUuid, type Logger, type Queryable } from '#platform';
import { ERASURE_STREAM, subjectGroups } from './erasure.js';
import { destroyed, type DestroyPorts } from './erasures.js';
import { type AgedPlace, agedPayments, PAGE_PAYMENTS } from './personal-use.js';
import { judge } from './subjects.js';

export interface RetentionPorts extends DestroyPorts {
  readonly store: EventStore;
  readonly db: Queryable;
  readonly directory: Pick<Directory, 'accounts'>;
  readonly clock: Clock;
  readonly ids: Ids;
}

/** The time before which everything is too old. RFC 3339. `now`: ms since the epoch. */
export const cutoffOf = (now: number, years: number): string => {
  const cutoff = new Date(now);
  cutoff.setUTCFullYear(cutoff.getUTCFullYear() - years);
  return timestamp(cutoff.getTime());
};

/** The cutoff of each account that has a retention. */
export const cutoffs = async ({ store, directory, clock }: Pick<RetentionPorts, 'store' | 'directory' | 'clock'>): Promise<Cutoffs> => {
  const accounts = await directory.accounts();
  const years = await retentionsOf(
    store,
    accounts.map(({ accountId }) => accountId),
  );
  return new Map([...years].map(([accountId, after]) => [accountId, cutoffOf(clock.now(), after)]));
};
export type Cutoffs = ReadonlyMap<string, string>;

/**
 * Pages of payments whose newest event is older than the cutoff of their account. The index finds those that began before it. Their streams say when
 * the newest event was.
 */
export const overduePayments = async function* (
  { store, db }: Pick<RetentionPorts, 'store' | 'db'>,
  of: Cutoffs,
): AsyncGenerator<readonly string[], void, void> {
  if (of.size === 0) return;
  const newest = [...of.values()].reduce((one, other) => (one > other ? one : other));
  const ranges = [...[...of].map(([accountId, before]) => ({ accountId, before })), { accountId: null, before: newest }];
  for (const range of ranges)
    for (let after: AgedPlace | null = null; ;) {
      const page: readonly AgedPlace[] = await agedPayments(db, range, after, PAGE_PAYMENTS);
      const streams = [...new Set(page.map(({ stream }) => stream))];
      const events = await readStreams(store, streams);
      const overdue = streams.filter((_, index) => {
        const [first, last] = [events[index]!.at(0), events[index]!.at(-1)];
        const { accountId = null } = (first?.data ?? {}) as { readonly accountId?: string | null };
        const cutoff = accountId === null ? undefined : of.get(accountId);
        return cutoff !== undefined && last!.meta.recordedAt < cutoff;
      });
      if (overdue.length > 0) yield overdue.map(paymentIdOf);
      if (page.length < PAGE_PAYMENTS) break;
      after = page.at(-1)!;
    }
};

/** {@link countOverdue} stops at this number. */
export const MAX_COUNTED = 10_000;

/** Payments of one account that would be erased tonight under a retention of so many years; at most {@link MAX_COUNTED} and a page. */
export const countOverdue = async (ports: RetentionPorts, accountId: string, years: number): Promise<number> => {
  const payments = new Set<string>();
  const now = ports.clock.now();
  for await (const page of overduePayments(ports, new Map([[accountId, cutoffOf(now, years)]]))) {
    for (const { paymentId, subjects } of await judge(ports, page, now)) if (subjects.length > 0) payments.add(paymentId);
    if (payments.size >= MAX_COUNTED) break;
  }
  return payments.size;
};

/** At most this many payments a second are erased, so that requests are not held up. */
const PAYMENTS_A_SECOND = 500;

/** The daily erasure of a worker. Several workers may run it at once. */
export interface Retention {
  /** Does nothing if this process has completed the present day (UTC). Ends early if `stop` aborts. Returns the number of erased payments. */
  round(stop: AbortSignal): Promise<number>;
}

export const createRetention = (ports: RetentionPorts, log: Pick<Logger, 'info'>): Retention => {
  let completed = '';
  return {
    round: async (stop) => {
      const day = timestamp(ports.clock.now()).slice(0, 10);
      if (day === completed) return 0;
      const { erased, isWhole } = await eraseOverdue(ports, day, stop);
      if (erased > 0) log.info({ day, payments: erased }, 'personal data was erased, because its retention is over');
      if (isWhole) completed = day;
      return erased;
    },
  };
};

const RETENTION_ACTOR = { type: 'system', id: 'retention' } as const;

/**
 * All workers append to the one stream of the day, at the revision that they know. So only one of them goes on. The others try again in their next
 * round, and find nothing left.
 */
const eraseOverdue = async (ports: RetentionPorts, day: string, stop: AbortSignal): Promise<{ erased: number; isWhole: boolean }> => {
  const { store, clock, ids } = ports;
  const erasureId = hashedUuid('erasure', 'retention', day);
  let loaded = await load(store, ERASURE_STREAM, erasureId);
  let erased = 0;
  const before = await cutoffs(ports);
  // The time to find a page counts, too.
  let begun = clock.monotonic();
  for await (const page of overduePayments(ports, before)) {
    // What is recorded so far, by any worker, is destroyed before the next page is judged. So nothing is recorded twice.
    if (loaded.position !== null) await destroyed(ports, loaded.position);
    const judged = (await judge(ports, page, clock.now())).filter(({ subjects }) => subjects.length > 0);
    for (const subjects of subjectGroups(judged)) {
      if (stop.aborted) return { erased, isWhole: false };
      try {
        const command = { type: 'Erase', erasureId, cause: 'retention', reasonCode: 'retention', subjects } as const;
        loaded = await execute(ports, ERASURE_STREAM, loaded, [command], { actor: RETENTION_ACTOR, correlationId: ids.uuid() });
      } catch (error) {
        if (error instanceof Conflict) return { erased, isWhole: false };
        throw error;
      }
    }
    erased += judged.length;
    await clock.sleep(Math.max(0, (page.length / PAYMENTS_A_SECOND) * 1_000 - (clock.monotonic() - begun)), stop);
    begun = clock.monotonic();
  }
  return { erased, isWhole: !stop.aborted };
};
