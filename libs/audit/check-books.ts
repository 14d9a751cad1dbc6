/**
 * Checks the whole journal: the number of entries, the balance of each entry, and the sums and parts of days that are stored beside the entries.
 *
 * The sums of a day are compared with the entries that were recorded on that day. The entries are read in pieces. The last piece of a day is read in
 * one snapshot with the day's sums, because the journal adds entries meanwhile. The balances of all accounts are compared with the sums of all days.
 */
import { bookSumCents, balances, JOURNAL_END } from '#ledger';
import { type Pool, type Queryable, transaction } from '#platform';

export interface WrongBooks {
  readonly message: string;
  /** Log position of the entry. null: the fault is in a sum. */
  readonly position: string | null;
}

export interface BooksQuery {
  /** Counts the entries after this position of the log, and compares the days from the day of this position on. '': all. */
  readonly after: string;
  /** Entries up to this position are counted. */
  readonly until: string;
  /** Number of entries that follow from the events between these positions. */
  readonly expected: number;
  /** False: the balances of accounts are not compared with the sums of all days. */
  readonly full: boolean;
  /** The place at which an earlier check stopped. The check goes on there. Default: from the start. */
  readonly place?: BooksPlace;
}

/** The progress of a check: entries counted up to a position, then the days that were compared. */
export interface BooksPlace {
  readonly counted: { readonly position: string; readonly entries: number };
  /** The last day that was compared. null: not all entries are counted yet. '': no day was compared yet. {@link ALL_DAYS}: nothing is left. */
  readonly day: string | null;
}

export interface BooksPage {
  /** null: a day is not compared to its end. A later check begins this day again. */
  readonly place: BooksPlace | null;
  readonly wrong: readonly WrongBooks[];
}

/** Greater than every day. */
const ALL_DAYS = '~';
/** At most this many entries of one day that do not balance are named. */
const NAMED_ENTRIES = 100;
/** Number of entries that one statement counts or sums. */
const PIECE_ENTRIES = 20_000;
/** Entries of two processes may have times that differ from their order in the log. */
const CLOCKS_DIFFER = '10 minutes';

const wrongSum = (message: string): WrongBooks => ({ message, position: null });

/** Yields a page after each piece of entries. */
export const checkBooks = async function* (db: Pool, query: BooksQuery): AsyncGenerator<BooksPage, void, void> {
  const { after, until, expected, full } = query;
  let place: BooksPlace = query.place ?? { counted: { position: after, entries: 0 }, day: null };
  while (place.day === null) {
    const { position, entries } = place.counted;
    const next = (await endOfPiece(db, position, until)) ?? until;
    const { rows } = await db.query<{ count: string; outside: string | null }>(
      `select count(*) as count, min(position) filter (where d.booked_on is null) as outside
       from journal_entry e left join journal_day d on d.booked_on = e.booked_at::date and d.recorded_on = e.recorded_at::date
         and e.position between d.first_position and d.last_position
       where position > $1 and position <= $2`,
      [position, next],
    );
    const { outside } = rows[0]!;
    const counted = { position: next, entries: entries + Number(rows[0]!.count) };
    const isLast = next >= until;
    place = { counted, day: isLast ? '' : null };
    const right = !isLast || counted.entries === expected;
    const wrong = right ? [] : [wrongSum(countMessage(after, counted.entries, expected))];
    if (outside !== null) wrong.push({ message: 'an entry lies outside of the part of the journal that is read for its day', position: outside });
    yield { place, wrong };
  }
  for (const day of await daysToCompare(db, after, full)) {
    if (day <= place.day!) continue;
    const sums = new DaySums(db, day, full);
    for await (const _ of sums.pieces()) yield { place: null, wrong: [] };
    place = { ...place, day };
    yield { place, wrong: sums.wrong };
  }
  if (place.day === ALL_DAYS) return;
  const sum = bookSumCents(await balances(db, { asOf: null, effectiveTo: null }));
  yield {
    place: { ...place, day: ALL_DAYS },
    wrong: [...(sum === 0 ? [] : [wrongSum(`the books sum to ${sum} cents instead of 0`)]), ...(full ? (await wrongBalances(db)).map(wrongSum) : [])],
  };
};

const countMessage = (after: string, found: number, expected: number): string =>
  after === ''
    ? `the journal holds ${found} entries, the events post ${expected}`
    : `the journal holds ${found} entries after position ${after}, the events post ${expected}`;

/** The position of the last entry of a whole piece, up to `until`. null: fewer entries are left. */
const endOfPiece = async (db: Queryable, after: string, until: string): Promise<string | null> => {
  const { rows } = await db.query<{ position: string }>(
    'select position from journal_entry where position > $1 and position <= $2 order by position, number offset $3::int limit 1',
    [after, until, PIECE_ENTRIES - 1],
  );
  return rows[0]?.position ?? null;
};

/** The days to compare, ascending. `after` '': all days that have sums. Else the days from the first entry after `after` on. */
const daysToCompare = async (db: Queryable, after: string, full: boolean): Promise<string[]> => {
  const { rows } = full
    ? await db.query<{ day: string }>(
        'select recorded_on::text as day from journal_total union select recorded_on::text from journal_day order by day',
      )
    : await db.query<{ day: string }>(
        `select day::date::text as day from generate_series(
           (select (recorded_at - interval '${CLOCKS_DIFFER}')::date from journal_entry where position > $1 order by position, number limit 1),
           (select (recorded_at + interval '${CLOCKS_DIFFER}')::date from journal_entry order by position desc, number desc limit 1), '1 day') as day`,
        [after],
      );
  return rows.map(({ day }) => day);
};

/** The ledger accounts with a balance other than the sum of all days. One statement reads both, so they are of one moment. */
const wrongBalances = async (db: Queryable): Promise<string[]> => {
  const { rows } = await db.query<{ account: string }>(
    `select account from (select account, sum(debit_cents) as debit, sum(credit_cents) as credit from journal_total group by account) t
     full join journal_balance b using (account)
     where (coalesce(debit, 0), coalesce(credit, 0)) is distinct from (coalesce(debit_cents, 0), coalesce(credit_cents, 0)) order by account`,
  );
  return rows.map(({ account }) => `the balance of ${account} is not the sum of its days`);
};

interface SumRow {
  readonly account: string;
  readonly rule: string;
  /** Recorded, effective and booked day, as one text. */
  readonly days: string;
  readonly booked: string;
  readonly debit: string;
  readonly credit: string;
}

/**
 * The entries of one day in a range of positions. The cast keeps Postgres from using the index on `recorded_at`, because the range of positions has
 * fewer rows.
 */
const PIECE = 'from journal_entry where position > $1 and position <= $2 and (recorded_at::date) = $3::date';

/** The sums of the entries that were recorded on one day. Memory grows with the number of sums of the day, not with its entries. */
class DaySums {
  readonly wrong: WrongBooks[] = [];
  private readonly sums = new Map<string, { debit: number; credit: number; readonly booked: string }>();

  constructor(
    private readonly db: Pool,
    private readonly day: string,
    private readonly full: boolean,
  ) {}

  /** Yields after each piece but the last one. After that, `wrong` is complete. */
  async *pieces(): AsyncGenerator<void, void, void> {
    const { db, day } = this;
    const { first, last } = await this.part();
    let place = first;
    for (let next = await endOfPiece(db, place, last); next; next = await endOfPiece(db, place, last)) {
      await Promise.all([this.add(db, place, next), this.addUnbalanced(place, next)]);
      place = next;
      yield;
    }
    const kept = await transaction(db, async (client) => {
      await client.query('set transaction isolation level repeatable read, read only');
      await this.add(client, place, last);
      const { rows } = await client.query<SumRow>(
        `select account, rule, concat_ws(' ', recorded_on, effective_on, booked_on) as days, booked_on::text as booked, debit_cents as debit, credit_cents as credit
         from journal_total where recorded_on = $1::date and ($2::date[] is null or booked_on = any($2::date[]))`,
        [day, this.full ? null : [...new Set([...this.sums.values()].map(({ booked }) => booked))]],
      );
      return rows;
    });
    await this.addUnbalanced(place, last);
    this.compare(kept);
  }

  /** The positions between which the day's entries lie. `first` is exclusive. */
  private async part(): Promise<{ first: string; last: string }> {
    // Each statement reads an hour, so that none takes long. The range of times has its own index.
    let [first, last]: [string | null, string] = [null, ''];
    for (let hour = 0; hour < 24; hour++) {
      const { rows } = await this.db.query<{ first: string | null; last: string | null; goes_on: boolean }>(
        `select min(position) as first, max(position) as last, count(*), $1::date >= current_date - 1 as goes_on from journal_entry
         where recorded_at >= ($1::date + $2::int * interval '1 hour')::timestamptz
           and recorded_at < ($1::date + ($2::int + 1) * interval '1 hour')::timestamptz`,
        [this.day, hour],
      );
      const [found] = rows;
      if (found?.first && (first === null || found.first < first)) ({ first } = found);
      if (found?.last && found.last > last) ({ last } = found);
      // Entries of this day may still be added.
      if (found?.goes_on) last = JOURNAL_END.position;
    }
    if (first === null) return { first: '', last: '' };
    const { rows } = await this.db.query<{ before: string | null }>('select max(position) as before from journal_entry where position < $1', [first]);
    return { first: rows[0]?.before ?? '', last };
  }

  /** Adds the day's entries after one position of the log up to another. */
  private async add(db: Queryable, after: string, to: string): Promise<void> {
    const { rows: sums } = await db.query<SumRow>(
      // The days become text only after the sums are made. To make text for each entry took a third of the time.
      `select account, rule, concat_ws(' ', recorded_on, effective_on, booked_on) as days, booked_on::text as booked, debit, credit
       from (select p.account, rule, recorded_at::date as recorded_on, effective_at::date as effective_on, booked_at::date as booked_on,
               sum(greatest(p.cents, 0)) as debit, sum(greatest(-p.cents, 0)) as credit
             from (select * ${PIECE}) as e cross join unnest(e.accounts, e.cents) as p (account, cents) group by 1, 2, 3, 4, 5) as sums`,
      [after, to, this.day],
    );
    for (const { account, rule, days, booked, debit, credit } of sums) {
      const name = `${account} ${rule} ${days}`;
      const sum = this.sums.get(name) ?? { debit: 0, credit: 0, booked };
      this.sums.set(name, { booked, debit: sum.debit + Number(debit), credit: sum.credit + Number(credit) });
    }
  }

  /** Finds entries of this piece that do not balance. */
  private async addUnbalanced(after: string, to: string): Promise<void> {
    const { rows } = await this.db.query<{ id: string; position: string }>(
      `select entry_id as id, position ${PIECE}
         and (cardinality(cents) < 2 or cardinality(cents) <> cardinality(accounts) or (select sum(c) from unnest(cents) as c) <> 0)
       order by position, number limit ${NAMED_ENTRIES}`,
      [after, to, this.day],
    );
    for (const { id, position } of rows) this.wrong.push({ message: `entry ${id} does not balance`, position });
  }

  /** A line for each account whose kept sums are not those of its entries. */
  private compare(kept: readonly SumRow[]): void {
    const wrong = new Map<string, string>();
    const left = new Map(this.sums);
    for (const { account, rule, days, debit, credit } of kept) {
      const name = `${account} ${rule} ${days}`;
      const sum = left.get(name);
      left.delete(name);
      if (sum?.debit !== Number(debit) || sum.credit !== Number(credit)) wrong.set(account, `${rule}, ${days}`);
    }
    for (const name of left.keys()) {
      const [account, rule, ...days] = name.split(' ') as [string, string, ...string[]];
      wrong.set(account, `${rule}, ${days.join(' ')}`);
    }
    for (const [account, which] of wrong) this.wrong.push(wrongSum(`the day totals of ${account} are not those of its entries (${which})`));
  }
}
