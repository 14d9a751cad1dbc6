/**
 * Balances and movements of the books, from the sums that the journal keeps beside its entries.
 *
 * Sums are kept for whole UTC days. If a query begins or ends within a day, the entries of that day are read. What lies before a closed period is
 * read from the period's trial balance.
 */
import type { Queryable } from '#platform';
import type { AccountBalance } from './adjustment.js';
import { dayOf, firstDayFrom } from './days.js';

export interface Balance extends AccountBalance {
  /** Debits less credits. */
  readonly balanceCents: number;
}

export interface BalanceQuery {
  /** Only entries that were recorded by this time (RFC 3339, inclusive). null: all entries. */
  readonly asOf: string | null;
  /** Only entries that took effect before this time (exclusive). null: no limit. */
  readonly effectiveTo: string | null;
}

/** Which entries count: those that are booked from `from` (inclusive) to `to` (exclusive), and recorded by `asOf`. RFC 3339. null: no limit. */
export interface BookedQuery {
  readonly from: string | null;
  readonly to: string | null;
  readonly asOf: string | null;
}

/** Sums of one account that come from one posting rule. */
export interface Movement extends AccountBalance {
  readonly rule: string;
}

export interface DayMovement extends Movement {
  /** The day on which the entries are booked, YYYY-MM-DD. */
  readonly day: string;
}

type SumRow = { account: string; debit: string; credit: string };

const MAX_SAFE = BigInt(Number.MAX_SAFE_INTEGER);

const sumsOf = ({ account, debit, credit }: SumRow): AccountBalance => {
  const [debitCents, creditCents] = [BigInt(debit), BigInt(credit)];
  if (debitCents > MAX_SAFE || creditCents > MAX_SAFE) throw new Error(`${account}: a sum beyond what a number can say`);
  return { account, debitCents: Number(debitCents), creditCents: Number(creditCents) };
};

const balanceOf = (sums: AccountBalance): Balance => ({ ...sums, balanceCents: sums.debitCents - sums.creditCents });

/** Balances as of `asOf`, `effectiveTo`, or both, sorted by account. */
export const balances = async (db: Queryable, { asOf, effectiveTo }: BalanceQuery): Promise<Balance[]> => {
  if (effectiveTo !== null) return (await effectiveBalances(db, asOf, effectiveTo)).map(balanceOf);
  if (asOf !== null) return (await balancesBefore(db, null, asOf)).map(balanceOf);
  const { rows } = await db.query<SumRow>(
    'select account, debit_cents as debit, credit_cents as credit from journal_balance order by account collate "C"',
  );
  return rows.map((row) => balanceOf(sumsOf(row)));
};

const effectiveBalances = async (db: Queryable, asOf: string | null, effectiveTo: string): Promise<AccountBalance[]> => {
  const { rows } = await db.query<SumRow>(
    `select account, sum(debit) as debit, sum(credit) as credit from (
       select account, debit_cents as debit, credit_cents as credit from journal_total where recorded_on < $1::date and effective_on < $2::date
       union all
       select p.account, greatest(p.cents, 0), greatest(-p.cents, 0)
       from journal_entry e cross join unnest(e.accounts, e.cents) as p (account, cents)
       where (e.recorded_at >= $1::timestamptz or e.effective_at >= $2::timestamptz)
         and e.recorded_at <= $3::timestamptz and e.effective_at < $4::timestamptz) as postings
     group by account order by account collate "C"`,
    [asOf === null ? 'infinity' : dayOf(asOf), dayOf(effectiveTo), asOf ?? 'infinity', effectiveTo],
  );
  return rows.map(sumsOf);
};

/**
 * A trial balance holds all entries that were recorded before its period was closed. A query as of a time uses it only if it was recorded this long
 * before, since the clocks of two processes may differ.
 */
const CLOCKS_DIFFER = '1 day';

/** The pattern of every account. */
const ALL = ['%'];

/** Sums of all entries that are booked before `to` (exclusive; null: no limit), sorted by account. `accounts`: patterns of SQL's `like`. */
export const balancesBefore = async (
  db: Queryable,
  to: string | null,
  asOf: string | null,
  accounts: readonly string[] = ALL,
): Promise<AccountBalance[]> => {
  const { rows: closed } = await db.query<{ closed_to: Date }>(
    `select closed_to from journal_closing where closed_to <= $1::timestamptz and recorded_at <= $2::timestamptz - interval '${CLOCKS_DIFFER}'
     order by closed_to desc limit 1`,
    [to ?? 'infinity', asOf ?? 'infinity'],
  );
  const from = closed[0]?.closed_to.toISOString() ?? null;
  const { rows } = await db.query<SumRow>(
    `select account, sum(debit) as debit, sum(credit) as credit from (
       select account, debit, credit from (${BOOKED}) as booked
       union all
       select account, debit_cents, credit_cents from journal_closing where closed_to = $7::timestamptz) as sums
     where account like any($8::text[]) group by account order by account collate "C"`,
    [...bookedValues({ from, to, asOf }), from, accounts],
  );
  return rows.map(sumsOf);
};

/** Sums by account and rule. `accounts`: patterns of SQL's `like`. */
export const movements = async (db: Queryable, query: BookedQuery, accounts: readonly string[] = ALL): Promise<Movement[]> => {
  const { rows } = await db.query<SumRow & { rule: string }>(
    `select account, rule, sum(debit) as debit, sum(credit) as credit from (${BOOKED}) as booked where account like any($7::text[]) group by account, rule`,
    [...bookedValues(query), accounts],
  );
  return rows.map((row) => ({ ...sumsOf(row), rule: row.rule }));
};

/** Sums by account, rule and booked day. `accounts`: patterns of SQL's `like`. */
export const movementsByDay = async (db: Queryable, query: BookedQuery, accounts: readonly string[]): Promise<DayMovement[]> => {
  const { rows } = await db.query<SumRow & { rule: string; day: string }>(
    `select account, rule, booked_on::text as day, sum(debit) as debit, sum(credit) as credit from (${BOOKED}) as booked
     where account like any($7::text[]) group by account, rule, booked_on`,
    [...bookedValues(query), accounts],
  );
  return rows.map((row) => ({ ...sumsOf(row), rule: row.rule, day: row.day }));
};

/**
 * SQL for the sums of the entries of a {@link BookedQuery}. Whole days come from the totals. The entries of three parts are read: of the first day
 * and of the last day, if the query begins or ends within them, and those of whole days that were recorded on the day of `asOf`. Each part has its
 * own range of an index. The first condition of a part is false if the part is empty. Then Postgres reads no index for it.
 */
const BOOKED = `
  select account, rule, booked_on, debit_cents as debit, credit_cents as credit from journal_total
  where booked_on >= $3::date and booked_on < $4::date and recorded_on < $6::date
  union all
  select p.account, e.rule, e.booked_at::date, greatest(p.cents, 0), greatest(-p.cents, 0)
  from (
    select rule, booked_at, accounts, cents from journal_entry
    where $1::timestamptz < $3::timestamptz and booked_at >= $1::timestamptz and booked_at < least($3::timestamptz, $2::timestamptz)
      and recorded_at <= $5::timestamptz
    union all
    select rule, booked_at, accounts, cents from journal_entry
    where $4::timestamptz < $2::timestamptz and booked_at >= greatest($4::timestamptz, $3::timestamptz) and booked_at < $2::timestamptz
      and recorded_at <= $5::timestamptz
    union all
    select rule, booked_at, accounts, cents from journal_entry
    where $6::timestamptz < 'infinity' and recorded_at >= $6::timestamptz and recorded_at <= $5::timestamptz
      and booked_at >= $3::timestamptz and booked_at < $4::timestamptz
  ) as e cross join unnest(e.accounts, e.cents) as p (account, cents)`;

/** $1 to $6 of {@link BOOKED}: from, to, the first and the last of the whole days between them (exclusive), asOf and its day. */
const bookedValues = ({ from, to, asOf }: BookedQuery): string[] => {
  const firstDay = from === null ? '-infinity' : firstDayFrom(from);
  const lastDay = to === null ? 'infinity' : dayOf(to);
  const recordedDay = asOf === null ? 'infinity' : dayOf(asOf);
  return [from ?? '-infinity', to ?? 'infinity', firstDay, lastDay, asOf ?? 'infinity', recordedDay];
};

/** Money in suspense, in cents: the sum of the absolute balances of all merchant accounts. */
export const suspenseCents = async (db: Queryable): Promise<number> => {
  const { rows } = await db.query<{ cents: string }>(
    `select coalesce(sum(abs(debit_cents - credit_cents)), 0) as cents from journal_balance where account like 'liabilities:suspense:%'`,
  );
  return Number(rows[0]!.cents);
};

/** Invariant 2. */
export const bookSumCents = (rows: readonly Balance[]): number => rows.reduce((sum, { balanceCents }) => sum + balanceCents, 0);
