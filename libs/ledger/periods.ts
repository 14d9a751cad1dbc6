/**
 * Closes periods. After a closing, no entry is booked before the period's end. A later fact with an earlier effective time is booked at the first
 * instant after the closed periods.
 *
 * The closing also records the trial balance before the period and at its end, and a digest of the period's entries. Every later verification
 * compares them with the journal.
 */
import { createHash } from 'node:crypto';
import { isDeepStrictEqual } from 'node:util';
import { append, change, checkpointOf, Conflict, type EventStore, execute, load, type Origin, type Position, retryOnConflict } from '#eventstore';
import { type Clock, type Ids, refuseWrongDate, ServiceError, timestamp } from '#kernel';
import { refuseClearText, staff } from '#payments';
import type { Queryable } from '#platform';
import { type AccountBalance, adjust, type ManualAdjustment, type PeriodEvent, type RuleVersions } from './adjustment.js';
import { ADJUSTMENT_STREAM, periodEvents, PERIODS, PERIODS_ID, PERIODS_STREAM, POSTING_RULES_ID, POSTING_RULES_STREAM } from './events.js';
import { JOURNAL_START, type JournalEntry, journalModel, journalPages, type JournalPlace } from './journal.js';
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

/** The figures of one period: the sums before it and at its end, and a digest of its entries. Entries are added in the order of the log. */
class PeriodFigures {
  private readonly digest = createHash('sha256');
  private readonly text = journalText('ndjson');
  private readonly sums = new Map<string, { debitCents: number; creditCents: number }>();
  private entries = 0;
  private place: JournalPlace = JOURNAL_START;

  constructor(
    private readonly from: string | null,
    private readonly to: string,
    /** The sums of all entries that are booked before the period. */
    private readonly opening: readonly AccountBalance[],
  ) {
    for (const { account, debitCents, creditCents } of opening) this.sums.set(account, { debitCents, creditCents });
  }

  /** Adds the entries that were not added yet, up to a position of the log. null: all entries. `goOn` is awaited after each page. */
  async addUntil(db: Queryable, until: string | null, goOn?: () => Promise<void>): Promise<void> {
    for await (const page of journalPages(db, this.place, { from: this.from, to: this.to, until })) {
      for (const entry of page) this.add(entry);
      this.place = page.at(-1)!;
      await goOn?.();
    }
  }

  private add(entry: JournalEntry): void {
    this.digest.update(this.text(entry));
    this.entries += 1;
    for (const { account, cents } of entry.postings) {
      let sum = this.sums.get(account);
      if (!sum) this.sums.set(account, (sum = { debitCents: 0, creditCents: 0 }));
      if (cents > 0) sum.debitCents += cents;
      else sum.creditCents -= cents;
    }
  }

  /** `position`: that of the closing. */
  balance(position: string): Balance {
    const closing = [...this.sums].map(([account, sums]) => ({ account, ...sums })).sort((one, other) => (one.account < other.account ? -1 : 1));
    return { to: this.to, position, opening: this.opening, closing, entries: this.entries, digest: this.digest.copy().digest('hex') };
  }
}

/**
 * Closes the books up to `to`, and returns the trial balance. A repeated call completes the missing steps of an earlier one. Throws VALIDATION_ERROR
 * or INVALID_STATE.
 *
 * The figures are made before the closing is appended. So a closing whose figures cannot be made is not appended. After that, only the entries up to
 * the place of the closing are added.
 */
export const closePeriod = async (ports: PeriodPorts, to: string, by: string): Promise<Balance> => {
  const { store, db, clock, ids } = ports;
  const origin = staff(by, ids.uuid());
  const now = () => timestamp(clock.now());
  for (;;) {
    const { state, balance } = await retryOnConflict(async () => {
      const before = await load(store, PERIODS_STREAM, PERIODS_ID);
      // An earlier closing without a trial balance is completed first.
      const command = { type: 'ClosePeriod', at: now(), to: before.state.open?.to ?? to, by } as const;
      PERIODS_STREAM.decider.decide(before.state, command);
      const figures = new PeriodFigures(before.state.open ? before.state.open.from : before.state.closedTo, command.to, before.state.closing);
      const head = await store.head();
      if (!before.state.open && head !== null) {
        await ports.journalReached(head);
        await figures.addUntil(db, head);
      }
      const closed = await execute(ports, PERIODS_STREAM, before, [command], origin);
      if (!closed.state.open) return { state: closed.state, balance: null };
      // The closing is the newest event of the stream until its trial balance is recorded. So `closed.position` is its position.
      await ports.journalReached(closed.position!);
      await figures.addUntil(db, closed.position);
      const balance = figures.balance(closed.position!);
      await execute(ports, PERIODS_STREAM, closed, [{ type: 'RecordTrialBalance', at: now(), balance }], origin);
      return { state: closed.state, balance };
    }, busy);
    if (balance?.to === to) return balance;
    if (!state.open) return (await recordedBalances(store)).find(({ balance: one }) => one.to === to)!.balance;
  }
};

const busy = () => new ServiceError('INVALID_STATE', 'Somebody else is closing periods; try again.');

/** The recorded trial balances, each with the position of its event. */
export const recordedBalances = async (store: EventStore): Promise<readonly { readonly balance: Balance; readonly position: Position }[]> => {
  const balances: { balance: Balance; position: Position }[] = [];
  for await (const recorded of store.read(PERIODS)) {
    const event = periodEvents.read(recorded);
    if (event.type === 'TrialBalanceRecorded') balances.push({ balance: event.data, position: recorded.position });
  }
  return balances;
};

/** The balances at the end of a closed period that the journal keeps for reports. */
const keptBalances = async (db: Queryable, to: string): Promise<AccountBalance[]> => {
  const { rows } = await db.query<{ account: string; debit: string; credit: string }>(
    `select account, debit_cents as debit, credit_cents as credit from journal_closing where closed_to = $1::timestamptz order by account collate "C"`,
    [to],
  );
  return rows.map(({ account, debit, credit }) => ({ account, debitCents: Number(debit), creditCents: Number(credit) }));
};

/** One finding of a verification. */
export interface Check {
  readonly name: string;
  readonly ok: boolean;
  readonly detail: string;
}

/**
 * Checks that every closed period still has the balances and the digest that were recorded, and that the journal keeps these balances for reports.
 * `after`: leaves out periods that were closed up to this position of the log. `goOn` is awaited after each page of entries.
 */
export const verifyPeriods = async (
  { store, db }: Pick<PeriodPorts, 'store' | 'db'>,
  { after = '', goOn = () => Promise.resolve() }: { after?: string; goOn?: () => Promise<void> } = {},
): Promise<Check> => {
  const { rows } = await db.query<{ position: string }>('select position from projection_checkpoint where name = $1', [checkpointOf(journalModel)]);
  const applied = rows[0]?.position ?? '';
  const recorded = await recordedBalances(store);
  const changed: string[] = [];
  let [from, opening]: [string | null, readonly AccountBalance[]] = [null, []];
  for (const { balance, position } of recorded) {
    if (balance.position <= after) {
      [from, opening] = [balance.to, balance.closing];
      continue;
    }
    const figures: PeriodFigures = new PeriodFigures(from, balance.to, opening);
    await figures.addUntil(db, null, goOn);
    const now: Balance = figures.balance(balance.position);
    if (JSON.stringify(now) !== JSON.stringify(balance))
      changed.push(
        `the period to ${balance.to} holds ${now.entries} entries of digest ${now.digest} instead of ${balance.entries} of ${balance.digest}`,
      );
    else if (position <= applied && !isDeepStrictEqual(await keptBalances(db, balance.to), balance.closing))
      changed.push(`the journal keeps other balances of the period to ${balance.to} than those that were recorded`);
    [from, opening] = [balance.to, now.closing];
  }
  return {
    name: 'periods',
    ok: changed.length === 0,
    detail: changed.length === 0 ? `${recorded.length} closed periods are what they were` : changed.join('; '),
  };
};

export type Adjustment = ManualAdjustment['data'];

/**
 * Posts an adjustment by hand. `old`: it may have taken effect long ago. After an unknown outcome, the caller can repeat the call with the same id. Throws VALIDATION_ERROR for invalid
 * postings or a reason that must not stay in clear, and INVALID_STATE if another adjustment has the same id.
 */
export const adjustBooks = async (
  ports: PeriodPorts,
  { adjustmentId, postings, effectiveAt, reason, by }: Adjustment,
  old = false,
): Promise<void> => {
  refuseClearText('reason', reason);
  const { clock, ids, store } = ports;
  refuseWrongDate('effectiveAt', effectiveAt, clock.now(), { old });
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
