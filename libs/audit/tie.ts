/**
 * The tie: the line-item register and the journal are two folds over the same events, so they say the same of each account. Both are summed over the
 * same positions of the log, and compared by account, rule and booked day. Neither changes at these positions, so the service may go on.
 */
import { checkpointOf } from '#eventstore';
import { journalModel, lineRegisterModel, type LineSums, linePostings, partsOf } from '#ledger';
import type { Queryable } from '#platform';

/** The sums of one account in the journal and in the register, debits less credits. */
export interface TieRow {
  readonly account: string;
  readonly journalCents: number;
  readonly linesCents: number;
  readonly differenceCents: number;
}

/** The position up to which register and journal have both applied the log. '': one of them has applied nothing. */
export const levelPosition = async (db: Queryable): Promise<string> => {
  const { rows } = await db.query<{ position: string }>('select position from projection_checkpoint where name = any($1::text[])', [
    [journalModel, lineRegisterModel].map(checkpointOf),
  ]);
  return rows.length < 2 ? '' : rows.map(({ position }) => position).sort()[0]!;
};

/** Rows of the register, added up. Memory grows with the number of accounts, not with the rows. */
export class LineTally {
  private readonly sums = new Map<string, { -readonly [Name in keyof LineSums]: LineSums[Name] }>();

  add(row: LineSums): void {
    const { movement, rule, merchantAccount, portalId, ledgerAccount, principalCents, feeCents, processorFeeCents } = row;
    const key = `${movement} ${rule} ${merchantAccount} ${portalId} ${ledgerAccount}`;
    const sum = this.sums.get(key);
    if (!sum) {
      this.sums.set(key, { ...row });
      return;
    }
    sum.principalCents += principalCents;
    sum.feeCents += feeCents;
    sum.processorFeeCents += processorFeeCents;
  }

  byAccount(): Map<string, number> {
    const accounts = new Map<string, number>();
    for (const sum of this.sums.values())
      for (const { account, cents } of linePostings(sum)) accounts.set(account, (accounts.get(account) ?? 0) + cents);
    return accounts;
  }
}

/** The comparison of all accounts that either of both names, by name. */
export const tieOf = (journal: ReadonlyMap<string, number>, lines: ReadonlyMap<string, number>): TieRow[] =>
  [...new Set([...journal.keys(), ...lines.keys()])].sort().map((account) => {
    const [journalCents, linesCents] = [journal.get(account) ?? 0, lines.get(account) ?? 0];
    return { account, journalCents, linesCents, differenceCents: linesCents - journalCents };
  });

export interface TieRange {
  /** After this position of the log, up to that one. */
  readonly after: string;
  readonly until: string;
  /** Booked from `from` (inclusive) to `to` (exclusive), and recorded by `asOf`. RFC 3339. null: no limit. */
  readonly from: string | null;
  readonly to: string | null;
  readonly asOf: string | null;
}

/** Number of entries, or of rows, that one statement of a check sums. */
const PIECE_ROWS = 20_000;

type Table = 'journal_entry' | 'line_movement';

/** The position at which a whole piece of a table ends. null: fewer rows are left. */
const endOfPiece = async (db: Queryable, table: Table, after: string, until: string): Promise<string | null> => {
  const { rows } = await db.query<{ position: string }>(
    `select position from ${table} where position > $1 and position <= $2 order by position, number offset $3::int limit 1`,
    [after, until, PIECE_ROWS - 1],
  );
  return rows[0]?.position ?? null;
};

/** Journal entries of a piece. `offset 0` keeps Postgres from using another index than that of the positions. */
const ENTRIES = 'from (select * from journal_entry where position > $1 and position <= $2 offset 0) as e cross join unnest(e.accounts, e.cents) as p (account, cents)'; // prettier-ignore

/** Number of entries that one statement sums for an export. Requests run beside it. */
const EXPORTED_ENTRIES = 2_000;
/** Number of an entry that is larger than any other. */
const MAX_NUMBER = 2_147_483_647;

interface SummedPiece {
  readonly sums: Readonly<Record<string, string>> | null;
  readonly count: string;
  readonly position: string | null;
  readonly number: number | null;
}

interface EntryPlace {
  readonly position: string;
  readonly number: number;
}

/** Sums the next entries after a place, up to a position. */
const summedPiece = async (db: Queryable, place: EntryPlace, last: string, { from, to, asOf }: TieRange): Promise<SummedPiece> => {
  const { rows } = await db.query<SummedPiece>({
    name: 'tie-journal',
    text: `
      with piece as (
        select * from journal_entry where (position, number) > ($1, $2::int) and position <= $3 order by position, number limit ${EXPORTED_ENTRIES})
      select count(*) as count, (array_agg(position order by position desc, number desc))[1] as position,
        (array_agg(number order by position desc, number desc))[1] as number,
        (select json_object_agg(account, cents::text) from (
           select p.account, sum(p.cents) as cents from piece e cross join unnest(e.accounts, e.cents) as p (account, cents)
           where e.booked_at >= $4::timestamptz and e.booked_at < $5::timestamptz and e.recorded_at <= $6::timestamptz group by p.account) as summed) as sums
      from piece`,
    values: [place.position, place.number, last, from ?? '-infinity', to ?? 'infinity', asOf ?? 'infinity'],
  });
  return rows[0]!;
};

/** The sums of the journal's entries by account, debits less credits. Only the parts of the journal are read in which such entries lie. */
export const journalSums = async (db: Queryable, range: TieRange): Promise<Map<string, number>> => {
  const { after, until, from, to } = range;
  const sums = new Map<string, number>();
  const parts = from === null && to === null ? [{ first: after, last: until }] : await partsOf(db, from, to);
  for (const { first, last } of parts) {
    let place: EntryPlace | null = first > after ? { position: first, number: -1 } : { position: after, number: MAX_NUMBER };
    while (place !== null) {
      const piece: SummedPiece = await summedPiece(db, place, last < until ? last : until, range);
      for (const [account, cents] of Object.entries(piece.sums ?? {})) sums.set(account, (sums.get(account) ?? 0) + Number(cents));
      place = Number(piece.count) < EXPORTED_ENTRIES ? null : { position: piece.position!, number: piece.number! };
    }
  }
  return sums;
};

// ------------------------------------------------------------------------------------------------------------------------------------
// The check of a part of the log.

export interface WrongTie {
  readonly message: string;
  /** Log position of the first event at which both differ. */
  readonly position: string | null;
}

export interface TiePage {
  /** Everything up to here is compared. */
  readonly position: string;
  readonly wrong: readonly WrongTie[];
}

/** At most this many differences of one piece are named. */
const NAMED_DIFFERENCES = 100;

/** Compares register and journal after one position up to another. Yields a page after each piece. */
export const checkTie = async function* (db: Queryable, after: string, until: string): AsyncGenerator<TiePage, void, void> {
  let place = after;
  while (place < until) {
    const ends = [await endOfPiece(db, 'journal_entry', place, until), await endOfPiece(db, 'line_movement', place, until)];
    const next = ends.reduce<string>((least, end) => (end !== null && end < least ? end : least), until);
    yield { position: next, wrong: await wrongIn(db, place, next) };
    place = next;
  }
};

/** Sums by name. A name holds account, rule and day. */
type Sums = Map<string, number>;

const nameOf = (account: string, rule: string, day: string): string => `${account}\t${rule}\t${day}`;

const summedEntries = async (db: Queryable, after: string, until: string): Promise<Sums> => {
  const { rows } = await db.query<{ account: string; rule: string; day: string; cents: string }>(
    `select p.account, e.rule, e.booked_at::date::text as day, sum(p.cents) as cents ${ENTRIES} group by 1, 2, 3`,
    [after, until],
  );
  return new Map(rows.map(({ account, rule, day, cents }) => [nameOf(account, rule, day), Number(cents)]));
};

type SummedRow = Record<'movement' | 'rule' | 'day' | 'principal' | 'fee' | 'processor_fee', string> &
  Record<'merchant_account' | 'portal_id' | 'ledger_account', string | null>;

const summedLines = async (db: Queryable, after: string, until: string): Promise<Sums> => {
  const { rows } = await db.query<SummedRow>(
    `select movement, rule, merchant_account, portal_id, ledger_account, booked_at::date::text as day,
       sum(principal_cents) as principal, sum(fee_cents) as fee, sum(processor_fee_cents) as processor_fee
     from (select * from line_movement where position > $1 and position <= $2 offset 0) as m group by 1, 2, 3, 4, 5, 6`,
    [after, until],
  );
  const sums: Sums = new Map();
  for (const row of rows)
    for (const { account, rule, cents } of linePostings({
      movement: row.movement as LineSums['movement'],
      rule: row.rule as LineSums['rule'],
      merchantAccount: row.merchant_account,
      portalId: row.portal_id,
      ledgerAccount: row.ledger_account,
      principalCents: Number(row.principal),
      feeCents: Number(row.fee),
      processorFeeCents: Number(row.processor_fee),
    })) {
      const name = nameOf(account, rule, row.day);
      sums.set(name, (sums.get(name) ?? 0) + cents);
    }
  return sums;
};

const differing = async (db: Queryable, after: string, until: string): Promise<{ name: string; journal: number; lines: number }[]> => {
  const [journal, lines] = await Promise.all([summedEntries(db, after, until), summedLines(db, after, until)]);
  return [...new Set([...journal.keys(), ...lines.keys()])]
    .map((name) => ({ name, journal: journal.get(name) ?? 0, lines: lines.get(name) ?? 0 }))
    .filter((one) => one.journal !== one.lines);
};

const wrongIn = async (db: Queryable, after: string, until: string): Promise<WrongTie[]> => {
  const found = await differing(db, after, until);
  if (found.length === 0) return [];
  const position = await firstWrong(db, after, until);
  return found.slice(0, NAMED_DIFFERENCES).map(({ name, journal, lines }) => {
    const [account, rule, day] = name.split('\t');
    return { position, message: `${account}, ${rule}, booked on ${day}: the journal has ${journal} cents, the lines have ${lines} cents` };
  });
};

/** The first position at which a piece differs, by halving it. */
const firstWrong = async (db: Queryable, after: string, until: string): Promise<string> => {
  const { rows } = await db.query<{ position: string }>(
    `select position from journal_entry where position > $1 and position <= $2
     union select position from line_movement where position > $1 and position <= $2 order by position`,
    [after, until],
  );
  const positions = rows.map((row) => row.position);
  let [low, high] = [0, positions.length - 1];
  while (low < high) {
    const middle = (low + high) >>> 1;
    if ((await differing(db, after, positions[middle]!)).length > 0) high = middle;
    else low = middle + 1;
  }
  return positions[low]!;
};
