/**
 * The journal keeps more than its entries, in the same transaction: sums by account, rule and day, balances by account, the trial balances of closed
 * periods, and the parts of the journal in which the entries of a day lie. So no report adds up all entries (docs/decisions/0034-sums-by-day.md).
 */
import type { Queryable } from '#platform';
import type { AccountBalance } from './adjustment.js';
import { dayOf } from './days.js';
import type { JournalEntry } from './journal.js';

/** Adds entries to the sums and to the parts of days. */
export const writeSums = async (client: Queryable, entries: readonly JournalEntry[]): Promise<void> => {
  if (entries.length === 0) return;
  await writeTotals(client, entries);
  await writeDays(client, entries);
};

/** The sums of the entries that agree in the first five fields. */
interface Total {
  readonly account: string;
  readonly rule: string;
  readonly recordedOn: string;
  readonly effectiveOn: string;
  readonly bookedOn: string;
  debitCents: number;
  creditCents: number;
}

const addTotals = (entries: readonly JournalEntry[]): Total[] => {
  const totals = new Map<string, Total>();
  for (const { rule, recordedAt, effectiveAt, bookedAt: booked, postings } of entries)
    for (const { account, cents } of postings) {
      const [recordedOn, effectiveOn, bookedOn] = [dayOf(recordedAt), dayOf(effectiveAt), dayOf(booked)];
      const key = `${account} ${rule} ${recordedOn} ${effectiveOn} ${bookedOn}`;
      let total = totals.get(key);
      if (!total) totals.set(key, (total = { account, rule, recordedOn, effectiveOn, bookedOn, debitCents: 0, creditCents: 0 }));
      if (cents > 0) total.debitCents += cents;
      else total.creditCents -= cents;
    }
  return [...totals.values()];
};

const writeTotals = async (client: Queryable, entries: readonly JournalEntry[]): Promise<void> => {
  const rows = addTotals(entries);
  await client.query({
    name: 'journal-total',
    text: `
      with added as (
        select * from unnest($1::text[], $2::text[], $3::date[], $4::date[], $5::date[], $6::numeric[], $7::numeric[])
          as a (account, rule, recorded_on, effective_on, booked_on, debit_cents, credit_cents)),
      summed as (
        insert into journal_balance as b (account, debit_cents, credit_cents)
        select account, sum(debit_cents), sum(credit_cents) from added group by account
        on conflict (account) do update
          set debit_cents = b.debit_cents + excluded.debit_cents, credit_cents = b.credit_cents + excluded.credit_cents)
      insert into journal_total as t (account, rule, recorded_on, effective_on, booked_on, debit_cents, credit_cents) select * from added
      on conflict (account, rule, recorded_on, effective_on, booked_on) do update
        set debit_cents = t.debit_cents + excluded.debit_cents, credit_cents = t.credit_cents + excluded.credit_cents`,
    values: [
      rows.map(({ account }) => account),
      rows.map(({ rule }) => rule),
      rows.map(({ recordedOn }) => recordedOn),
      rows.map(({ effectiveOn }) => effectiveOn),
      rows.map(({ bookedOn }) => bookedOn),
      rows.map(({ debitCents }) => debitCents),
      rows.map(({ creditCents }) => creditCents),
    ],
  });
};

/** Writes between which positions the entries lie that are booked on one day and recorded on one day. A late entry widens only its own row. */
const writeDays = async (client: Queryable, entries: readonly JournalEntry[]): Promise<void> => {
  const days = new Map<string, { bookedOn: string; recordedOn: string; first: string; last: string }>();
  for (const { bookedAt: booked, recordedAt, position } of entries) {
    const [bookedOn, recordedOn] = [dayOf(booked), dayOf(recordedAt)];
    const day = days.get(`${bookedOn} ${recordedOn}`);
    if (day) day.last = position;
    else days.set(`${bookedOn} ${recordedOn}`, { bookedOn, recordedOn, first: position, last: position });
  }
  const rows = [...days.values()];
  await client.query({
    name: 'journal-day',
    text: `
      insert into journal_day as d (booked_on, recorded_on, first_position, last_position)
      select * from unnest($1::date[], $2::date[], $3::text[], $4::text[])
      on conflict (booked_on, recorded_on) do update set last_position = excluded.last_position where d.last_position < excluded.last_position`,
    values: [
      rows.map(({ bookedOn }) => bookedOn),
      rows.map(({ recordedOn }) => recordedOn),
      rows.map(({ first }) => first),
      rows.map(({ last }) => last),
    ],
  });
};

/** The sums of all entries that are booked before `to`. */
export interface Closing {
  readonly to: string;
  readonly recordedAt: string;
  readonly sums: readonly AccountBalance[];
}

export const writeClosings = async (client: Queryable, closings: readonly Closing[]): Promise<void> => {
  for (const { to, recordedAt, sums } of closings)
    await client.query(
      `insert into journal_closing (closed_to, recorded_at, account, debit_cents, credit_cents)
       select $1::timestamptz, $2::timestamptz, s.* from unnest($3::text[], $4::numeric[], $5::numeric[]) as s (account, debit_cents, credit_cents)`,
      [to, recordedAt, sums.map(({ account }) => account), sums.map(({ debitCents }) => debitCents), sums.map(({ creditCents }) => creditCents)],
    );
};

/** A part of the journal, by the positions of its first and last entry. */
interface JournalPart {
  readonly first: string;
  readonly last: string;
}

/** The parts of the journal in which all entries lie that are booked in a period, in log order. Parts do not overlap. */
export const partsOf = async (db: Queryable, from: string | null, to: string | null): Promise<readonly JournalPart[]> => {
  const { rows } = await db.query<JournalPart>(
    `select first_position as first, last_position as last from journal_day
     where booked_on >= $1::timestamptz::date and booked_on < $2::timestamptz order by first_position`,
    [from ?? '-infinity', to ?? 'infinity'],
  );
  const parts: JournalPart[] = [];
  for (const { first, last } of rows) {
    const before = parts.at(-1);
    if (before === undefined || first > before.last) parts.push({ first, last });
    else if (last > before.last) parts[parts.length - 1] = { first: before.first, last };
  }
  return parts;
};
