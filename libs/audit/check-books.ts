/**
 * Checks the journal as a whole: its entries, and the sums that it keeps beside them.
 *
 * The entries are read in pieces. The last piece is read in one snapshot with the sums, because the journal goes on.
 */
import { type Balance, balances, bookSumCents, JOURNAL_END, JOURNAL_START } from '#ledger';
import { type Pool, type Queryable, transaction } from '#platform';

export interface WrongBooks {
  readonly message: string;
  /** Log position of the entry. null: the fault is in a sum. */
  readonly position: string | null;
}

/**
 * Checks that all accounts sum to 0, that every entry balances, that the number of entries up to the log position `until` is right, and that the sums
 * by day and by account are those of the entries. Names at most `most` entries that do not balance.
 */
export const checkBooks = async (db: Pool, until: string, expectedEntries: number, most: number): Promise<WrongBooks[]> => {
  const pieces = new SummedPieces(until, most);
  let place = JOURNAL_START.position;
  for (let next = await endOfPiece(db, place); next; next = await endOfPiece(db, place)) {
    await pieces.add(db, place, next);
    place = next;
  }
  const kept = await transaction(db, async (client) => {
    await client.query('set transaction isolation level repeatable read, read only');
    await pieces.add(client, place, JOURNAL_END.position);
    return { totals: await totalsOf(client), balances: await balances(client, { asOf: null, effectiveTo: null }) };
  });
  const sum = bookSumCents(kept.balances);
  const wrong = (message: string): WrongBooks => ({ message, position: null });
  return [
    ...(sum === 0 ? [] : [wrong(`the books sum to ${sum} cents instead of 0`)]),
    ...pieces.unbalanced.slice(0, most).map(({ id, position }) => ({ message: `entry ${id} does not balance`, position })),
    ...(pieces.unbalanced.length > most ? [wrong('more entries do not balance')] : []),
    ...(pieces.count === expectedEntries ? [] : [wrong(`the journal holds ${pieces.count} entries, the events post ${expectedEntries}`)]),
    ...pieces.differing(kept.totals, kept.balances).map(wrong),
  ];
};

/** Number of entries whose sums one statement makes. */
const PIECE_ENTRIES = 20_000;

/** The position of the last entry of a whole piece. null: fewer entries are left. */
const endOfPiece = async (db: Queryable, after: string): Promise<string | null> => {
  const { rows } = await db.query<{ position: string }>(
    'select position from journal_entry where position > $1 order by position, number offset $2::int limit 1',
    [after, PIECE_ENTRIES - 1],
  );
  return rows[0]?.position ?? null;
};

interface SumRow {
  readonly account: string;
  readonly rule: string;
  /** The days on which the entries were recorded, took effect, and are booked. */
  readonly days: string;
  readonly debit: string;
  readonly credit: string;
}

const totalsOf = async (db: Queryable): Promise<readonly SumRow[]> => {
  const { rows } = await db.query<SumRow>(
    `select account, rule, concat_ws(' ', recorded_on, effective_on, booked_on) as days, debit_cents as debit, credit_cents as credit from journal_total`,
  );
  return rows;
};

/** The sums of entries, piece by piece. Memory grows with the number of sums that the journal keeps, not with its entries. */
class SummedPieces {
  count = 0;
  readonly unbalanced: { id: string; position: string }[] = [];
  private readonly byDay = new Map<string, [debit: number, credit: number]>();

  constructor(
    private readonly until: string,
    private readonly most: number,
  ) {}

  /** Adds the entries after one position of the log up to another. */
  async add(db: Queryable, after: string, to: string): Promise<void> {
    const values = [after, to];
    const piece = 'from journal_entry where position > $1 and position <= $2';
    const { rows: sums } = await db.query<SumRow>(
      `select p.account, rule, concat_ws(' ', recorded_at::date, effective_at::date, booked_at::date) as days, sum(greatest(p.cents, 0)) as debit,
              sum(greatest(-p.cents, 0)) as credit
       from (select * ${piece}) as e cross join unnest(e.accounts, e.cents) as p (account, cents) group by 1, 2, 3`,
      values,
    );
    for (const { account, rule, days, debit, credit } of sums) {
      const name = `${account} ${rule} ${days}`;
      const [d, c] = this.byDay.get(name) ?? [0, 0];
      this.byDay.set(name, [d + Number(debit), c + Number(credit)]);
    }
    const { rows: counted } = await db.query<{ count: string }>(`select count(*) filter (where position <= $3) as count ${piece}`, [
      ...values,
      this.until,
    ]);
    this.count += Number(counted[0]!.count);
    const { rows: unbalanced } = await db.query<{ id: string; position: string }>(
      `select entry_id as id, position ${piece}
         and (cardinality(cents) < 2 or cardinality(cents) <> cardinality(accounts) or (select sum(c) from unnest(cents) as c) <> 0)
       order by position, number limit $3::int`,
      [...values, this.most + 1],
    );
    this.unbalanced.push(...unbalanced.slice(0, this.most + 1 - this.unbalanced.length));
  }

  /** A line for each account whose kept sums are not those of its entries. */
  differing(totals: readonly SumRow[], kept: readonly Balance[]): string[] {
    const wrong = new Map<string, string>();
    const left = new Map(this.byDay);
    for (const { account, rule, days, debit, credit } of totals) {
      const name = `${account} ${rule} ${days}`;
      const [d, c] = left.get(name) ?? [0, 0];
      left.delete(name);
      if (d !== Number(debit) || c !== Number(credit))
        wrong.set(account, `the day totals of ${account} are not those of its entries (${rule}, ${days})`);
    }
    const sums = new Map<string, [number, number]>();
    for (const [name, [debit, credit]] of this.byDay) {
      const account = name.split(' ', 1)[0]!;
      if (left.has(name)) wrong.set(account, `the day totals of ${account} are not those of its entries (${name.slice(account.length + 1)})`);
      const [d, c] = sums.get(account) ?? [0, 0];
      sums.set(account, [d + debit, c + credit]);
    }
    const balances = new Map(kept.map(({ account, debitCents, creditCents }) => [account, [debitCents, creditCents] as const]));
    for (const account of new Set([...sums.keys(), ...balances.keys()])) {
      const [[d, c], [debit, credit]] = [sums.get(account) ?? [0, 0], balances.get(account) ?? [0, 0]];
      if (d !== debit || c !== credit) wrong.set(account, `the balance of ${account} is not the sum of its entries`);
    }
    return [...wrong.values()];
  }
}
