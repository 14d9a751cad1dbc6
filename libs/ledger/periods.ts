/**
 * Closes periods. After a closing, no entry is booked before the period's end. A later fact with an earlier effective time is booked at the first
 * instant after the closed periods.
 *
 * The closing also records the trial balance before the period and at its end, and a digest of the period's entries. Every later verification
 * compares them with the journal.
 */
import { createHash } from 'node:crypto';
import { isDeepStrictEqual } from 'node:util';
import { append, change, Conflict, type EventStore, execute, load, type Origin, type Position, retryOnConflict } from '#eventstore';
import { type Clock, type Ids, ServiceError, timestamp } from '#kernel';
import { staff } from '#payments';
import type { Queryable } from '#platform';
import { type AccountBalance, adjust, type ManualAdjustment, type PeriodEvent, type RuleVersions } from './adjustment.js';
import { ADJUSTMENT_STREAM, periodEvents, PERIODS, PERIODS_ID, PERIODS_STREAM, POSTING_RULES_ID, POSTING_RULES_STREAM } from './events.js';
import { JOURNAL_START, journalPage, type JournalPlace } from './journal.js';
import { POSTING_RULES, type PostingRules } from './postings.js';
import { journalText } from './text.js';

export interface PeriodPorts {
  readonly store: EventStore;
  readonly db: Queryable;
  readonly clock: Clock;
  readonly ids: Ids;
  /** Brings the journal up to a position of the log. */
  readonly journalReached: (position: Position) => Promise<void>;
}

export type Balance = Extract<PeriodEvent, { type: 'TrialBalanceRecorded' }>['data'];

const PAGE_ENTRIES = 2_000;

/**
 * Closes the books up to `to`, and returns the trial balance. A repeated call completes the missing steps of an earlier one. Throws VALIDATION_ERROR
 * or INVALID_STATE.
 */
export const closePeriod = async (ports: PeriodPorts, to: string, by: string): Promise<Balance> => {
  const { store, clock, ids } = ports;
  const origin = staff(by, ids.uuid());
  const now = () => timestamp(clock.now());
  for (;;) {
    const { state, balance } = await retryOnConflict(async () => {
      const before = await load(store, PERIODS_STREAM, PERIODS_ID);
      // An earlier closing without a trial balance is completed first.
      const command = { type: 'ClosePeriod', at: now(), to: before.state.open?.to ?? to, by } as const;
      const closed = await execute(ports, PERIODS_STREAM, before, [command], origin);
      const { open } = closed.state;
      if (!open) return { state: closed.state, balance: null };
      // The closing is the newest event of the stream until its trial balance is recorded. So `closed.position` is its position.
      await ports.journalReached(closed.position!);
      const balance = await periodBalance(ports.db, open.from, open.to, closed.position!);
      await execute(ports, PERIODS_STREAM, closed, [{ type: 'RecordTrialBalance', at: now(), balance }], origin);
      return { state: closed.state, balance };
    }, busy);
    if (balance?.to === to) return balance;
    if (!state.open) return (await recordedBalances(store)).find((one) => one.to === to)!;
  }
};

const busy = () => new ServiceError('INVALID_STATE', 'Somebody else is closing periods; try again.');

const recordedBalances = async (store: EventStore): Promise<readonly Balance[]> => {
  const balances: Balance[] = [];
  for await (const recorded of store.read(PERIODS)) {
    const event = periodEvents.read(recorded);
    if (event.type === 'TrialBalanceRecorded') balances.push(event.data);
  }
  return balances;
};

/** Balances of the entries that are booked before `to`. Only events up to the position `until` count (null: all). */
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
  const text = journalText('ndjson');
  let entries = 0;
  for (let after: JournalPlace = JOURNAL_START; ;) {
    const page = await journalPage(db, after, { from, to, until }, PAGE_ENTRIES);
    for (const entry of page) digest.update(text(entry));
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

/** One finding of a verification. */
export interface Check {
  readonly name: string;
  readonly ok: boolean;
  readonly detail: string;
}

/** Checks that every closed period still has the balances and the digest that were recorded. */
export const verifyPeriods = async ({ store, db }: Pick<PeriodPorts, 'store' | 'db'>): Promise<Check> => {
  const recorded = await recordedBalances(store);
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

export type Adjustment = ManualAdjustment['data'];

/**
 * Posts an adjustment by hand. After an unknown outcome, the caller can repeat the call with the same id. Throws VALIDATION_ERROR for invalid
 * postings, and INVALID_STATE if another adjustment has the same id.
 */
export const adjustBooks = async (ports: PeriodPorts, { adjustmentId, postings, effectiveAt, reason, by }: Adjustment): Promise<void> => {
  const { clock, ids, store } = ports;
  const origin = staff(by, ids.uuid());
  const event = adjust(timestamp(clock.now()), { adjustmentId, postings, effectiveAt, reason, by });
  const nothing = { id: adjustmentId, state: null, revision: null, position: null };
  const posted = await append(ports, ADJUSTMENT_STREAM, nothing, [event], origin).catch(async (error: unknown) => {
    if (!(error instanceof Conflict)) throw error;
    const before = await load(store, ADJUSTMENT_STREAM, adjustmentId);
    if (isDeepStrictEqual(before.state?.data.postings, postings)) return before;
    throw new ServiceError('INVALID_STATE', `Another adjustment has the id ${adjustmentId}.`);
  });
  await ports.journalReached(posted.position!);
};

/**
 * Puts the newest version of every posting rule in force, from this point of the log on. Appends nothing if no rule has a newer version. The journal
 * of an older release stops at this event, so no older process may run any more.
 *
 * Returns the versions of all rules that ever changed, and the position of the last change (null: there is none).
 */
export const changePostingRules = async (
  { store, clock, ids }: Pick<PeriodPorts, 'store' | 'clock' | 'ids'>,
  origin: Origin,
  table: PostingRules = POSTING_RULES,
): Promise<{ readonly versions: RuleVersions; readonly position: Position | null }> => {
  const newest = Object.fromEntries(Object.entries(table).map(([rule, versions]) => [rule, versions.length]));
  const command = { at: timestamp(clock.now()), newest };
  const busy = () => new ServiceError('INVALID_STATE', 'Another command is changing the posting rules; try again.');
  const { state, position } = await change({ store, clock, ids }, POSTING_RULES_STREAM, POSTING_RULES_ID, command, origin, busy);
  return { versions: state, position };
};
