/**
 * Closing a period: from a place of the log on nothing is booked before its end any more. What comes late is booked at the first open instant and keeps its effective
 * time. The trial balance before the period and at its end, and a digest of its entries, are recorded with it, and verified ever after.
 */
import { createHash } from 'node:crypto';
import { isDeepStrictEqual } from 'node:util';
import { appendAgain, Conflict, type EventStore, type Position, type Recorded } from '#eventstore';
import { type Clock, type Ids, type Json, ServiceError, timestamp } from '#kernel';
import { type Owner, staff } from '#payments';
import type { Queryable } from '#platform';
import {
  type AccountBalance,
  adjust,
  adjustmentStream,
  type AdjustmentEvent,
  periods,
  type PeriodEvent,
  type Periods,
  PERIODS_STREAM,
} from './adjustment.js';
import { JOURNAL_START, journalPage, type JournalPlace, toAdjustmentEvent } from './journal.js';
import { journalText } from './text.js';
import type { Check } from './verify.js';

export interface PeriodPorts {
  readonly store: EventStore;
  readonly db: Queryable;
  readonly clock: Clock;
  readonly ids: Ids;
  /** Brings the journal up to a place of the log. */
  readonly journalReached: (position: Position) => Promise<void>;
}

type Balance = Extract<PeriodEvent, { type: 'TrialBalanceRecorded' }>['data'];

const MAX_ROUNDS = 5;
const PAGE_ENTRIES = 2_000;

/** Closes the books to `to`; closed before, it completes what was left to do and is the same. Refuses with VALIDATION_ERROR, INVALID_STATE. */
export const closePeriod = async (ports: PeriodPorts, to: string, by: string): Promise<Balance> => {
  const { store, clock, ids } = ports;
  const owner = staff(by, ids.uuid());
  for (let round = 1; ; round++) {
    try {
      const before = await loadPeriods(store);
      // One that was closed and whose balance nobody recorded comes first.
      const command = { type: 'ClosePeriod', at: timestamp(clock.now()), to: before.state.open?.to ?? to, by } as const;
      await append(ports, before.revision, periods.decide(before.state, command), owner);
      const { state, revision, closings, recorded } = await loadPeriods(store);
      if (state.open) {
        const closing = closings.at(-1)!;
        await ports.journalReached(closing.position);
        const balance = await periodBalance(ports.db, state.open.from, state.open.to, closing.position);
        await append(ports, revision, periods.decide(state, { type: 'RecordTrialBalance', at: timestamp(clock.now()), balance }), owner);
        if (state.open.to === to) return balance;
        continue;
      }
      return recorded.find((one) => one.to === to)!;
    } catch (error) {
      if (!(error instanceof Conflict) || round >= MAX_ROUNDS) throw error;
    }
  }
};

const loadPeriods = async (store: EventStore) => {
  let [state, revision]: [Periods, bigint | null] = [periods.initial, null];
  const closings: Recorded[] = [];
  const recorded: Balance[] = [];
  for await (const one of store.read(PERIODS_STREAM)) {
    const event = toAdjustmentEvent(one) as PeriodEvent;
    state = periods.evolve(state, event);
    revision = one.revision;
    if (event.type === 'PeriodClosed') closings.push(one);
    else recorded.push(event.data);
  }
  return { state, revision, closings, recorded };
};

const append = async (
  { store, clock, ids }: PeriodPorts,
  revision: bigint | null,
  events: readonly AdjustmentEvent[],
  { actor, correlationId }: Owner,
  stream = PERIODS_STREAM,
): Promise<Position | null> => {
  if (events.length === 0) return null;
  const written = events.map(({ type, at, data }) => {
    const effectiveAt = type === 'ManualAdjustment' ? { effectiveAt: data.effectiveAt } : {};
    return { id: ids.uuid(), type, v: 1, data: data as unknown as Json, meta: { recordedAt: at, ...effectiveAt, actor, correlationId } };
  });
  return (await appendAgain(store, clock, stream, revision ?? 'no_stream', written)).position;
};

/** Balances before `to`, of what had been posted up to a place (null: everything). */
const balancesBefore = async (db: Queryable, to: string | null, until: string | null): Promise<AccountBalance[]> => {
  if (to === null) return [];
  const { rows } = await db.query<{ account: string; debit: string; credit: string }>(
    `select p.account, sum(greatest(p.cents, 0)) as debit, sum(greatest(-p.cents, 0)) as credit
     from journal_entry e cross join unnest(e.accounts, e.cents) as p (account, cents)
     where e.booked_at < $1::timestamptz and ($2::text is null or e.position <= $2) group by p.account order by p.account collate "C"`,
    [to, until],
  );
  return rows.map(({ account, debit, credit }) => ({ account, debitCents: Number(debit), creditCents: Number(credit) }));
};

const periodBalance = async (db: Queryable, from: string | null, to: string, position: string, until: string | null = position): Promise<Balance> => {
  const digest = createHash('sha256');
  let entries = 0;
  for (let after: JournalPlace = JOURNAL_START; ;) {
    const page = await journalPage(db, after, { from, to, until }, PAGE_ENTRIES);
    for (const entry of page) digest.update(journalText('ndjson', entry));
    entries += page.length;
    if (page.length < PAGE_ENTRIES) break;
    after = page.at(-1)!;
  }
  return {
    to,
    position,
    opening: await balancesBefore(db, from, until),
    closing: await balancesBefore(db, to, until),
    entries,
    digest: digest.digest('hex'),
  };
};

/** Every closed period is still what was recorded with it. */
export const verifyPeriods = async ({ store, db }: Pick<PeriodPorts, 'store' | 'db'>): Promise<Check> => {
  const { recorded } = await loadPeriods(store);
  const changed: string[] = [];
  for (const [index, balance] of recorded.entries()) {
    const now = await periodBalance(db, recorded[index - 1]?.to ?? null, balance.to, balance.position, null);
    if (JSON.stringify({ ...now, position: balance.position }) !== JSON.stringify(balance))
      changed.push(
        `the period to ${balance.to} holds ${now.entries} entries of digest ${now.digest} instead of ${balance.entries} of ${balance.digest}`,
      );
  }
  return {
    name: 'periods',
    ok: changed.length === 0,
    detail: changed.length === 0 ? `${recorded.length} closed periods are what they were` : changed.join('; '),
  };
};

/**
 * Posts an adjustment by hand, once under its id: whoever does not know what became of one repeats it. Refuses with VALIDATION_ERROR what does not balance or names no
 * account of the chart, and with INVALID_STATE another adjustment under an id that is taken.
 */
export const adjustBooks = async (
  ports: PeriodPorts,
  { adjustmentId, postings, effectiveAt, reason, by }: Extract<AdjustmentEvent, { type: 'ManualAdjustment' }>['data'],
): Promise<void> => {
  const { clock, ids, store } = ports;
  const owner = staff(by, ids.uuid());
  const event = adjust(timestamp(clock.now()), { adjustmentId, postings, effectiveAt, reason, by });
  const stream = adjustmentStream(adjustmentId);
  const position = await append(ports, null, [event], owner, stream).catch(async (error: unknown) => {
    if (!(error instanceof Conflict)) throw error;
    for await (const { data, position: posted } of store.read(stream))
      if (isDeepStrictEqual((data as { postings: unknown }).postings, postings)) return posted;
    throw new ServiceError('INVALID_STATE', `Another adjustment has the id ${adjustmentId}.`);
  });
  await ports.journalReached(position!);
};
