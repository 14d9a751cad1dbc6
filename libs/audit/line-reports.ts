/**
 * The reports over the line-item register: `line-items` with every movement of a line, and `deposits` with the settled lines of each deposit.
 *
 * `line-items` is read in the order of the log. Without `after` it holds each movement once. With `after`, a place of the log, it holds what came
 * since: new movements, and again the movements of a batch that was funded since. A reader keeps rows by `movement_id`.
 */
import { type Scope, scopeCondition } from '#accounts';
import { checkpointOf } from '#eventstore';
import { FIRST_FUNDING, lineRegisterModel, type LineSums } from '#ledger';
import type { Queryable } from '#platform';
import type { ReportPage, ReportPorts, ReportQuery } from './exports.js';
import { afterOf, type Column, keyOf, notAPlace, PAGE_ROWS, pagesByKey, parsed, SPELLED } from './pages.js';
import { journalSums, levelPosition, LineTally, tieOf } from './tie.js';

const LINE_COLUMNS: readonly Column[] = [
  ['movement_id', 'text', 'm.movement_id'],
  ['position', 'text', 'm.position'],
  ['movement', 'text', 'm.movement'],
  ['family', 'text', 'm.family'],
  ['account_id', 'text', 'm.account_id'],
  ['portal_id', 'text', 'm.portal_id'],
  ['payment_id', 'text', 'm.payment_id'],
  ['line_id', 'text', 'm.line_id'],
  ['line_number', 'text', 'm.line_number'],
  ['reference_id', 'text', 'm.reference_id'],
  ['payment_reference_id', 'text', 'm.payment_reference_id'],
  // Filled for a reader who may open it.
  ['description', 'text', 'null'],
  ['coding', 'text', 'm.coding'],
  ['leg', 'text', 'm.leg'],
  ['principal_cents', 'cents', 'm.principal_cents'],
  ['fee_cents', 'cents', 'm.fee_cents'],
  ['processor_fee_cents', 'cents', 'm.processor_fee_cents'],
  ['merchant_account', 'text', 'm.merchant_account'],
  ['transaction_id', 'text', 'm.transaction_id'],
  ['auth_code', 'text', 'm.auth_code'],
  ['brand', 'text', 'm.brand'],
  ['last4', 'text', 'm.last4'],
  ['confirmation_number', 'text', 'm.confirmation_number'],
  ['batch_id', 'text', 'm.batch_id'],
  ['deposit_id', 'text', 'd.deposit_id'],
  ['deposited_on', 'day', 'd.deposited_on'],
  ['initiated_by', 'text', 'm.initiated_by'],
  ['recorded_at', 'time', 'm.recorded_at'],
  ['effective_at', 'time', 'm.effective_at'],
  ['booked_at', 'time', 'm.booked_at'],
];
export const LINE_ITEM_COLUMNS = LINE_COLUMNS.map(([name]) => name);
/** In incremental mode: why the row is in the answer. */
export const CAUSE_COLUMN = 'cause';

const DEPOSIT_ROW: readonly Column[] = [
  ['deposit_id', 'text', 'd.deposit_id'],
  ['deposited_on', 'day', 'd.deposited_on'],
  ['gateway', 'text', 'd.gateway'],
  ['merchant_account', 'text', 'd.merchant_account'],
  ['batch_id', 'text', 'd.batch_id'],
  ['movement_id', 'text', 'm.movement_id'],
  ['movement', 'text', 'm.movement'],
  ['account_id', 'text', 'm.account_id'],
  ['portal_id', 'text', 'm.portal_id'],
  ['payment_id', 'text', 'm.payment_id'],
  ['line_id', 'text', 'm.line_id'],
  ['line_number', 'text', 'm.line_number'],
  ['reference_id', 'text', 'm.reference_id'],
  ['payment_reference_id', 'text', 'm.payment_reference_id'],
  ['coding', 'text', 'm.coding'],
  ['leg', 'text', 'm.leg'],
  ['principal_cents', 'cents', 'd.sign * m.principal_cents'],
  ['fee_cents', 'cents', 'd.sign * m.fee_cents'],
  ['processor_fee_cents', 'cents', 'd.sign * m.processor_fee_cents'],
  ['net_cents', 'cents', 'd.sign * (m.principal_cents + m.fee_cents + m.processor_fee_cents)'],
  ['transaction_id', 'text', 'm.transaction_id'],
  ['confirmation_number', 'text', 'm.confirmation_number'],
];
export const DEPOSIT_COLUMNS = DEPOSIT_ROW.map(([name]) => name);

/** Number of rows in a page. A row is small, so a page of these reports has more rows than others. */
const LINES_PER_PAGE = 1_000;

const selected = (columns: readonly Column[]): string => columns.map(([, kind, sql]) => SPELLED[kind](sql)).join(', ');

/** Columns that the text does not show: the rest of the row's place, its rule, and its account in the books. */
const HIDDEN = 'm.at, m.number::text, m.rule, m.ledger_account';
/** The last column: true if the row is in scope. A row out of scope is read only for its place. */
const isInside = (row: LineRow): boolean => row.at(-1) === 'true';
const SHOWN = LINE_COLUMNS.length;
const CELL = Object.fromEntries(LINE_ITEM_COLUMNS.map((name, index) => [name, index]));

type LineRow = readonly (string | null)[];
const hidden = (row: LineRow, index: number): string => row[SHOWN + index]!;
/** The place under which a row is listed. */
const placeOfRow = (row: LineRow): Place => [hidden(row, 0), row[CELL.position!]!, hidden(row, 1)];

/**
 * The deposit of a row: the last funding of its batch, unless it was withdrawn. Of the rows after the first funding, only those of a funding itself have
 * a deposit. `$1`: fundings up to this position count.
 */
const DEPOSIT = `left join lateral (
    select d.deposit_id, d.deposited_on, d.sign from line_deposit d
    where d.batch_id = m.batch_id and d.merchant_account = m.merchant_account and d.gateway = m.gateway and d.position <= $1
      and (m.position <= ${FIRST_FUNDING} or m.position = d.position)
    order by d.position desc limit 1) as d on m.batch_id is not null and d.sign = 1`;

/**
 * A place in the report. `at`: position of the event that a row is listed under: its own event, or the funding of its batch. `position` and `number`:
 * of the row.
 */
type Place = readonly [at: string, position: string, number: string];
/** After every row that is listed under this position. */
const LAST = '~';
const afterAll = (position: string): Place => [position, LAST, '0'];

const textOf = (place: Place): string => place.join('/');
const PLACE = /^([\d:]{0,41})(?:\/([\d:]{1,41})\/(\d{1,9}))?$/;
const placeOf = (text: string): Place => {
  const found = PLACE.exec(text);
  if (found === null) throw notAPlace();
  const [, position, row, number] = found;
  return row === undefined ? afterAll(position!) : [position!, row, number!];
};

/** Parts of the register in which all rows lie that are booked in a period, in log order. Parts do not overlap. */
const partsOfDays = async (db: Queryable, from: string | null, to: string | null): Promise<readonly { first: string; last: string }[]> => {
  const { rows } = await db.query<{ first: string; last: string }>(
    `select first_position as first, last_position as last from line_day
     where booked_on >= $1::timestamptz::date and booked_on < $2::timestamptz order by first_position`,
    [from ?? '-infinity', to ?? 'infinity'],
  );
  const parts: { first: string; last: string }[] = [];
  for (const { first, last } of rows) {
    const before = parts.at(-1);
    if (before === undefined || first > before.last) parts.push({ first, last });
    else if (last > before.last) before.last = last;
  }
  return parts;
};

/** Number of a row that is larger than any other. */
const MAX_NUMBER = 2_147_483_647;
/** Number of a row that is smaller than any other. */
const BEFORE_FIRST = -1;

/**
 * Pages of movements in log order. `rows`: a statement that selects them by `(position, number) > ($2, $3::int)`, in order, with `at`, the position that
 * they are listed under. `$1`: fundings up to this position count. `bounds`: its values from `$4` on.
 */
const linePages = (db: Queryable, scope: Scope, name: string, rows: string, until: string, place: Place, bounds: readonly unknown[]) =>
  pagesByKey<LineRow>(
    place,
    placeOfRow,
    async (after) => {
      const [, position, number] = after as unknown as Place;
      const values: unknown[] = [until, position, number, ...bounds];
      const inside = scopeCondition(scope, 'm', (value) => `$${values.push(value)}`);
      const { rows: page } = await db.query<(string | null)[]>({
        name: scope === null ? name : `${name}-in-scope`,
        text: `select ${selected(LINE_COLUMNS)}, ${HIDDEN}, (${inside})::text
               from (${rows} order by position, number limit ${LINES_PER_PAGE}) as m ${DEPOSIT} order by m.position, m.number`,
        values,
        rowMode: 'array',
      });
      return page;
    },
    LINES_PER_PAGE,
  );

/** Pages of movements, each once and under its own event, after a row and up to the row `(last, number)`. */
const newRows = (db: Queryable, scope: Scope, until: string, after: Place, last: string, number = MAX_NUMBER) =>
  linePages(
    db,
    scope,
    'line-items-new',
    'select *, position as at from line_movement where (position, number) > ($2, $3::int) and (position, number) <= ($4, $5::int)',
    until,
    after[1] === LAST ? [after[0], after[0], `${MAX_NUMBER}`] : after,
    [last, number],
  );

interface Deposit {
  readonly position: string;
  readonly batch_id: string;
  readonly merchant_account: string;
  readonly gateway: string;
}

/** Pages of the movements of a funded batch, under its funding, after a row. */
const depositedRows = (db: Queryable, scope: Scope, until: string, after: Place, deposit: Deposit) =>
  linePages(
    db,
    scope,
    'line-items-deposited',
    `select *, $4::text as at from line_movement where batch_id = $5 and merchant_account = $6 and gateway = $7
     and (position, number) > ($2, $3::int) and position < $4
     and position <= (select min(d.position) from line_deposit d where d.batch_id = $5 and d.merchant_account = $6 and d.gateway = $7)`,
    until,
    after,
    [deposit.position, deposit.batch_id, deposit.merchant_account, deposit.gateway],
  );

/** The deposits from a position on, in log order. */
const depositsFrom = async function* (db: Queryable, from: string, until: string): AsyncGenerator<Deposit, void, void> {
  const read = async (place: readonly string[] | null) => {
    const { rows } = await db.query<Deposit>(
      `select position, batch_id, merchant_account, gateway from line_deposit
       where position ${place === null ? '>=' : '>'} $1 and position <= $2 order by position limit ${PAGE_ROWS}`,
      [place?.[0] ?? from, until],
    );
    return rows;
  };
  for await (const rows of pagesByKey<Deposit>(null, ({ position }) => [position], read)) yield* rows;
};

/** A place within a batch becomes the one before the new rows of its funding. */
const behindBatch = (place: Place): Place => (place[1] < place[0] ? [place[0], place[0], `${BEFORE_FIRST}`] : place);

/**
 * Pages of what came after a place: new movements, and the movements of each batch that was funded. Those of a batch stand before the new rows of its
 * funding.
 */
const changedRows = async function* (db: Queryable, scope: Scope, begin: Place, until: string): AsyncGenerator<readonly LineRow[], void, void> {
  let place = begin;
  for await (const deposit of depositsFrom(db, begin[0], until)) {
    if (deposit.position > place[0]) {
      yield* newRows(db, scope, until, behindBatch(place), deposit.position, BEFORE_FIRST);
      place = [deposit.position, '', `${BEFORE_FIRST}`];
    }
    yield* depositedRows(db, scope, until, place, deposit);
    place = behindBatch(place);
  }
  yield* newRows(db, scope, until, behindBatch(place), until);
};

const sumsOf = (row: LineRow): LineSums => ({
  movement: row[CELL.movement!] as LineSums['movement'],
  rule: hidden(row, 2) as LineSums['rule'],
  merchantAccount: row[CELL.merchant_account!]!,
  portalId: row[CELL.portal_id!]!,
  ledgerAccount: hidden(row, 3),
  principalCents: Number(row[CELL.principal_cents!]),
  feeCents: Number(row[CELL.fee_cents!]),
  processorFeeCents: Number(row[CELL.processor_fee_cents!]),
});

/**
 * The pages of `line-items`. The last page holds no row, but the place of the log up to which the report is complete, and the tie of all new rows to
 * the journal.
 */
export const lineItemPages = async function* ({ db, store }: ReportPorts, scope: Scope, query: ReportQuery): AsyncGenerator<ReportPage, void, void> {
  const { from, to, asOf, after } = query;
  const begin = after === null ? afterAll('') : placeOf(after);
  const head = await store.head();
  if (begin[0] > (head ?? '')) throw notAPlace();
  const level = query.until ?? (await levelPosition(db));
  const until = level > begin[0] ? level : begin[0];
  // In the form of the cells, so that times are compared as text.
  const [first, end, known] = [from, to, asOf].map((time) => (time === null ? null : new Date(time).toISOString()));
  const inWindow = (row: LineRow): boolean => {
    const [booked, recorded] = [row[CELL.booked_at!]!, row[CELL.recorded_at!]!];
    return (first === null || booked >= first!) && (end === null || booked < end!) && (known === null || recorded <= known!);
  };
  const tally = new LineTally();
  const pageOf = (rows: readonly LineRow[]): ReportPage => {
    const shown: ReportPage['rows'][number][] = [];
    for (const row of rows) {
      if (!isInside(row) || !inWindow(row)) continue;
      const [listed, position] = placeOfRow(row);
      const isNew = listed === position;
      // If the report goes on within an event, the tie begins with the next one.
      if (isNew && listed > begin[0]) tally.add(sumsOf(row));
      const cells = LINE_COLUMNS.map(([, kind], index) => parsed(kind, row[index]!));
      shown.push(after === null ? cells : [...cells, isNew ? 'new' : 'deposit']);
    }
    const last = rows.findLast(isInside);
    return { rows: shown, after: last ? textOf(placeOfRow(last)) : null };
  };
  if (after !== null) for await (const rows of changedRows(db, scope, begin, until)) yield pageOf(rows);
  else {
    for (const part of await partsOfDays(db, from, to)) {
      // Numbers begin with 0.
      const place: Place = [part.first, part.first, `${BEFORE_FIRST}`];
      for await (const rows of newRows(db, scope, until, place, part.last < until ? part.last : until)) yield pageOf(rows);
    }
  }
  // The journal is not divided by account and portal, and its sums are those of all. So the rows of a scope have no tie.
  if (scope !== null) return yield { rows: [], after: until, until };
  const journal = await journalSums(db, { after: begin[0], until, from, to, asOf });
  yield { rows: [], after: until, until, tie: tieOf(journal, tally.byAccount()) };
};

/** The pages of `deposits`: the rows of each funded batch that were there when it was funded, by day. */
export const depositPages = async function* ({ db }: ReportPorts, scope: Scope, query: ReportQuery): AsyncGenerator<ReportPage, void, void> {
  const { from, to, asOf, after } = query;
  const until = query.until ?? (await registerPosition(db));
  const read = async (place: readonly string[] | null) => {
    const [day, position, row, number] = place ?? ['-infinity', '', '', '-1'];
    const values: unknown[] = [until, from ?? '-infinity', to ?? 'infinity', asOf ?? 'infinity', day, position, row, number];
    const inside = scopeCondition(scope, 'm', (value) => `$${values.push(value)}`);
    const { rows } = await db.query<(string | null)[]>({
      text: `select ${selected(DEPOSIT_ROW)}, d.deposited_on::text, d.position, m.position, m.number::text, (${inside})::text
             from line_deposit d cross join lateral (
               select * from line_movement l
               where l.batch_id = d.batch_id and l.merchant_account = d.merchant_account and l.gateway = d.gateway and l.position < ${FIRST_FUNDING}
                 and ((d.deposited_on, d.position) > ($5::date, $6) or (l.position, l.number) > ($7, $8::int))
               order by l.position, l.number limit ${LINES_PER_PAGE}) as m
             where (d.deposited_on, d.position) >= ($5::date, $6) and d.position <= $1
               and d.deposited_on >= $2::timestamptz and d.deposited_on < $3::timestamptz and d.recorded_at <= $4::timestamptz
             order by d.deposited_on, d.position, m.position, m.number limit ${LINES_PER_PAGE}`,
      values,
      rowMode: 'array',
    });
    return rows;
  };
  const keyOfRow = (row: LineRow) => row.slice(DEPOSIT_ROW.length, -1) as string[];
  for await (const rows of pagesByKey<LineRow>(after === null ? null : keyOf(after, 4), keyOfRow, read, LINES_PER_PAGE)) {
    const inside = rows.filter(isInside);
    const last = inside.at(-1);
    yield {
      rows: inside.map((row) => DEPOSIT_ROW.map(([, kind], index) => parsed(kind, row[index]!))),
      after: last ? afterOf(keyOfRow(last)) : null,
    };
  }
};

const registerPosition = async (db: Queryable): Promise<string> => {
  const { rows } = await db.query<{ position: string }>('select position from projection_checkpoint where name = $1', [
    checkpointOf(lineRegisterModel),
  ]);
  return rows[0]?.position ?? '';
};
