/**
 * The reports over the line-item register on a real Postgres: whole and incremental exports, windows of booked time, deposits, and the tie to the
 * journal, which finds any change of a row.
 */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import {
  checkpointOf,
  createSubscriber,
  type EventStore,
  memoryEventStore,
  postgresCheckpoint,
  prepareReadModels,
  type Projection,
  rebuild,
  type Recorded,
  searchPathOf,
  Unavailable,
} from '#eventstore';
import { EVERYTHING, type Scope } from '#accounts';
import { type Json, type ServiceError, systemClock } from '#kernel';
import { journalModel, lineRegisterModel } from '#ledger';
import { createPool, migrate, type Pool, systemIds } from '#platform';
import { MIGRATIONS, READ_MODELS } from '../../apps/services.js';
import { freshDatabase } from '../../test/support/postgres.js';
import { memoryPersonalKeys } from '../../test/support/personal-keys.js';
import { findDrift } from './drift.js';
import { type ReportName, reportOf, type ReportPage, type ReportQuery } from './exports.js';
import { LINE_ITEM_COLUMNS } from './line-reports.js';
import { exportReport } from './pack.js';
import { PAGE_ROWS } from './pages.js';
import { checkTie, levelPosition, type TieRow } from './tie.js';

const ALL: ReportQuery = { from: null, to: null, asOf: null, after: null };
const [PORTAL, ACCOUNT] = ['01890000-0000-7000-8000-000000000001', '01890000-0000-7000-8000-00000000000a'];
const BATCH = { gateway: 'simulator', merchantAccount: 'mid', closedAt: '2026-03-03T05:00:00.000Z' };
/** More rows than a page of the report: a payment with many lines, charged apart. */
const MANY_LINES = 620;

/** The store's time. Each event is a minute later than the one before. */
let now = Date.parse('2026-03-01T10:00:00.000Z');
const ids = systemIds(() => now);
const store = memoryEventStore({ now: () => now });
let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
beforeAll(async () => {
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'lines', max: 6, searchPath: searchPathOf(READ_MODELS) });
  await migrate(pool, MIGRATIONS);
  await prepareReadModels(pool, READ_MODELS, memoryEventStore());
});
afterAll(async () => {
  await pool.end();
  await database.drop();
});

const revisions = new Map<string, bigint>();
const VERSIONS: Readonly<Record<string, number>> = { PaymentInitiated: 3, RefundRequested: 2 };
const append = async (stream: string, type: string, data: object): Promise<void> => {
  now += 60_000;
  const meta = { recordedAt: new Date(now).toISOString(), actor: { type: 'partner' as const, id: 'spec' }, correlationId: 'spec' };
  const before = revisions.get(stream);
  await store.append(stream, before ?? 'no_stream', [{ id: ids.uuid(), type, v: VERSIONS[type] ?? 1, data: data as Json, meta }]);
  revisions.set(stream, (before ?? -1n) + 1n);
};

const FEE_CENTS = 3;
interface Paid {
  readonly stream: string;
  readonly paymentId: string;
  readonly cents: number;
}
/** A charged payment of lines with 100 cents each, principal and fee charged apart. */
const pay = async (lines: number): Promise<Paid> => {
  const paymentId = ids.uuid();
  const stream = `payment-${paymentId}`;
  const leg = (name: string, principalCents: number, feeCents: number) => ({
    leg: name,
    principalCents,
    feeCents,
    account: { gateway: 'simulator', merchantAccount: 'mid', credentialsRef: 'sandbox', environment: 'sandbox' },
    references: { charge: ids.uuid(), reversal: ids.uuid() },
  });
  await append(stream, 'PaymentInitiated', {
    attemptId: 'a0',
    idempotency: null,
    accountId: ACCOUNT,
    portalId: PORTAL,
    referenceId: null,
    amountCents: 100 * lines,
    serviceFeeCents: FEE_CENTS * lines,
    feeVersion: 1,
    chargeMode: 'separate',
    lineItems: Array.from({ length: lines }, (_, index) => ({
      id: ids.uuid(),
      amountCents: 100,
      serviceFeeCents: FEE_CENTS,
      referenceId: `INV-${index}`,
      description: index === 0 ? '=1+1, "quoted"' : null,
      metadata: null,
      coding: { fund: '402' },
    })),
    payer: null,
    paymentMethod: { type: 'card', brand: 'visa', last4: '4242' },
    legs: [leg('principal', 100 * lines, 0), leg('fee', 0, FEE_CENTS * lines)],
  });
  const legs = ['principal', 'fee'].map((name) => ({ leg: name, transactionId: `${paymentId}-${name}`, authCode: 'A1', avs: null, cvv: null }));
  await append(stream, 'PaymentCreated', { attemptId: 'a0', confirmationNumber: 'ABCD-EFGH-JK', legs });
  return { stream, paymentId, cents: 100 * lines };
};
const settle = ({ stream, cents }: Paid, batchId: string, type = 'PaymentSettled') =>
  append(stream, type, { leg: 'principal', batchId, closedAt: BATCH.closedAt, grossCents: cents, feeCents: 7 });
const fund = (batchId: string, fundedOn: string, netCents: number) =>
  append(`settlement-simulator-mid-${batchId}`, 'BatchFunded', { gateway: 'simulator', merchantAccount: 'mid', batchId, fundedOn, netCents });
const lines = (batchId: string, ...given: readonly object[]) =>
  append(`settlement-simulator-mid-${batchId}`, 'SettlementLinesRecorded', { ...BATCH, batchId, lines: given });
const UNKNOWN_SALE = { number: 0, transactionId: 't', ref: null, type: 'sale', accepted: true, grossCents: 500, feeCents: 9, netCents: 491, result: 'MISSING_HERE', paymentId: null, leg: null, expectedCents: null }; // prettier-ignore

const follow = async (...models: readonly Projection[]) => {
  const head = (await store.head())!;
  for (const model of models.length > 0 ? models : [journalModel, lineRegisterModel]) {
    const checkpoint = postgresCheckpoint(pool, checkpointOf(model as typeof journalModel));
    await createSubscriber(model, { store, checkpoint, clock: systemClock }).runUntil(head, { timeoutMs: 20_000 });
  }
  return head;
};

type Row = Readonly<Record<string, string | number | null>>;
interface Read {
  readonly rows: readonly Row[];
  readonly after: string;
  readonly tie: readonly TieRow[];
}
const read = async (report: ReportName, query: Partial<ReportQuery> = {}): Promise<Read> => {
  const { pieces, manifest } = exportReport({ store, db: pool }, EVERYTHING, report, 'ndjson', { ...ALL, ...query }, null);
  let text = '';
  for await (const piece of pieces) text += piece;
  const { after, tie } = await manifest();
  return { rows: text === '' ? [] : text.trimEnd().split('\n').map((line) => JSON.parse(line) as Row), after: after!, tie: tie ?? [] }; // prettier-ignore
};
const byId = (rows: readonly Row[]) => new Map(rows.map(({ cause: _, ...row }) => [row.movement_id, row]));
const sum = (rows: readonly Row[], column: string) => rows.reduce((total, row) => total + Number(row[column]), 0);
const sorted = (rows: Iterable<Row>) => [...rows].map((row) => JSON.stringify(row)).sort();

const pagesOf = async (query: Partial<ReportQuery>) => {
  const pages: ReportPage[] = [];
  for await (const page of reportOf('line-items').pages({ store, db: pool }, EVERYTHING, { ...ALL, ...query })) pages.push(page);
  return pages;
};
/** The accounts in which the rows of these pages differ from the journal. */
const differencesOf = (pages: readonly ReportPage[]) => pages.at(-1)!.tie!.filter(({ differenceCents }) => differenceCents !== 0);

/** The rows that `read` gave between the steps of the history, each from the end of the one before. */
const changes: Row[] = [];
let place = '';
let first: Paid;
let large: Paid;
let small: Paid;
beforeAll(async () => {
  const follows = async () => {
    await follow();
    const { rows, after } = await read('line-items', { after: place });
    changes.push(...rows);
    place = after;
  };
  first = await pay(2);
  await follows();
  large = await pay(MANY_LINES);
  await settle(first, 'b1');
  await settle(large, 'b1');
  small = await pay(1);
  await follows();
  await lines('b1', UNKNOWN_SALE);
  await settle(small, 'b2');
  await fund('b1', '2026-03-05', 62_677);
  await follows();
  // Nothing happened since.
  await follows();
  await settle(small, 'b2', 'SettlementWithdrawn');
  await fund('b2', '2026-03-06', 1);
  await append('adjustment-periods', 'PeriodClosed', { from: null, to: '2026-03-07T00:00:00.000Z', by: 'Dana' });
  await append(`remittance-${PORTAL}`, 'AgencyRemitted', { remittanceId: '1', portalId: PORTAL, cents: 200, reference: 'W1', on: '2026-03-04', advance: false, by: 'Dana' }); // prettier-ignore
  // These lines come after the funding, so they are not in the deposit.
  await append('settlement-simulator-mid-b1', 'SettlementLinesCorrected', { ...BATCH, batchId: 'b1', fundedOn: '2026-03-05', fileId: 'f', reference: null, corrections: [{ before: UNKNOWN_SALE, after: { ...UNKNOWN_SALE, grossCents: 600, netCents: 591 } }] }); // prettier-ignore
  await follows();
}, 60_000);

describe('a history, exported step by step', () => {
  test('each movement comes once as new, and again when its deposit came; by id the rows are those of one full export', async () => {
    const full = await read('line-items');
    expect(sorted(byId(changes).values())).toEqual(sorted(byId(full.rows).values()));
    const fresh = changes.filter(({ cause }) => cause === 'new');
    expect(new Set(fresh.map((row) => row.movement_id)).size).toBe(fresh.length);
    expect(fresh.length).toBe(full.rows.length);
    for (const column of ['principal_cents', 'fee_cents', 'processor_fee_cents']) expect(sum(fresh, column)).toBe(sum(full.rows, column));
    const again = changes.filter(({ cause }) => cause === 'deposit');
    expect(again.length).toBe(2 + MANY_LINES + 1 + 2);
    expect(again.every((row) => row.deposit_id !== null && /^(settled|settlement_withdrawn|unexplained)$/.test(String(row.movement)))).toBe(true);
    expect(full.after).toBe(place);
    expect(place).toBe(await store.head());
  });

  test('a full export ties to the journal in every account; so does each change of it', async () => {
    const { tie, rows } = await read('line-items');
    expect(tie.map(({ account }) => account)).toEqual([
      'assets:bank:operating',
      'assets:processor:mid:in_transit',
      'assets:processor:mid:unsettled',
      'expense:processing:mid',
      `liabilities:agency:${PORTAL}:payable`,
      'liabilities:suspense:mid',
      `revenue:service_fee:${PORTAL}`,
    ]);
    expect(tie.every(({ differenceCents, journalCents, linesCents }) => differenceCents === 0 && journalCents === linesCents)).toBe(true);
    const { rows: totals } = await pool.query<{ account: string; cents: string }>('select account, debit_cents - credit_cents as cents from journal_balance order by account collate "C"'); // prettier-ignore
    expect(tie.map(({ account, journalCents }) => [account, journalCents])).toEqual(totals.map(({ account, cents }) => [account, Number(cents)]));
    expect(tie[4]!.journalCents).toBe(0 - sum(rows.filter(({ family }) => family === 'owed'), 'principal_cents')); // prettier-ignore
    const later = await read('line-items', { after: String(rows[5]!.position) });
    expect(later.tie.length).toBeGreaterThan(0);
  });

  test('a position with more rows than a page goes on by position and number, within the new rows and within a deposit', async () => {
    const all = (after: string | null) => pagesOf({ after });
    const whole = await all('');
    const rows = whole.flatMap((page) => page.rows);
    // The rows are those of before. New rows now show their deposit at once.
    const named = (row: readonly unknown[]) => `${row[0] as string} ${row.at(-1) as string}`;
    expect(rows.map((row) => named(row as unknown[])).sort()).toEqual(changes.map((row) => named(Object.values(row))).sort());
    const places = whole.map(({ after }) => after);
    expect(places.filter((place) => place!.includes('/')).length).toBeGreaterThan(2);
    let read = 0;
    for (const page of whole) {
      read += page.rows.length;
      const rest = await all(page.after);
      expect(rest.flatMap((one) => one.rows)).toEqual(rows.slice(read));
      expect(differencesOf(rest)).toEqual([]);
    }
    // Any row of the large event, and of the deposit that repeats it, is a place.
    const number = MANY_LINES + 5;
    const position = changes.filter(({ payment_id: id, movement }) => id === large.paymentId && movement === 'charge')[0]!.position as string;
    const rest = await all(`${position}/${position}/${number}`);
    expect(rest[0]!.rows.length + number + 1).toBeGreaterThan(2 * MANY_LINES);
    expect((rest[0]!.rows[0] as unknown[])[8]).toBe(String(number + 1 - MANY_LINES + 1));
    const cell = (row: readonly unknown[], name: string) => row[LINE_ITEM_COLUMNS.indexOf(name)];
    const deposited = rows.findIndex((row) => row.at(-1) === 'deposit' && cell(row, 'payment_id') === large.paymentId);
    const funded = rows.find((row) => cell(row, 'movement') === 'funded')!;
    const restOfDeposit = await all(`${cell(funded, 'position') as string}/${cell(rows[deposited]!, 'position') as string}/5`);
    expect(restOfDeposit.flatMap((page) => page.rows)).toEqual(rows.slice(deposited + 6));
  });

  test('deposits: the rows of each batch that were there when it was funded', async () => {
    const { rows } = await read('deposits');
    expect(rows.length).toBe(2 + MANY_LINES + 1 + 2);
    const of = (batchId: string) => rows.filter((row) => row.batch_id === batchId);
    expect(sum(of('b1'), 'net_cents')).toBe(62_677);
    expect(of('b1').every((row) => row.deposited_on === '2026-03-05')).toBe(true);
    expect(sum(of('b2'), 'net_cents')).toBe(0);
    expect(new Set(rows.map((row) => row.deposit_id)).size).toBe(2);
    const { rows: items } = await read('line-items');
    const shown = byId(items);
    for (const row of rows) expect(shown.get(row.movement_id ?? null)).toMatchObject({ deposit_id: row.deposit_id, deposited_on: row.deposited_on });
    expect(items.filter((row) => row.deposit_id !== null && row.movement !== 'funded').length).toBe(rows.length);
    const late = items.filter(({ movement, effective_at: time }) => movement === 'unexplained' && time === BATCH.closedAt).slice(1);
    expect(late.map(({ principal_cents: cents, deposit_id: deposit }) => [cents, deposit])).toEqual([
      [-500, null],
      [600, null],
    ]);
    expect((await read('deposits', { from: '2026-03-06T00:00:00.000Z' })).rows).toEqual(of('b2'));
    expect((await read('deposits', { to: '2026-03-06T00:00:00.000Z' })).rows).toEqual(of('b1'));
    expect((await read('deposits', { asOf: '2026-03-01T10:00:00.000Z' })).rows).toEqual([]);
  });

  test('deposits go on after any page', async () => {
    const report = reportOf('deposits');
    const rows: unknown[] = [];
    let after: string | null = null;
    for (let read = 1; read > 0;) {
      read = 0;
      for await (const page of report.pages({ store, db: pool }, EVERYTHING, { ...ALL, after })) {
        rows.push(...page.rows);
        read = page.rows.length;
        ({ after } = page);
        break;
      }
    }
    expect(rows).toEqual((await read('deposits')).rows.map((row) => Object.values(row)));
  });

  test.each([
    ['2026-03-01T00:00:00.000Z', '2026-03-02T00:00:00.000Z'],
    ['2026-03-02T00:00:00.000Z', '2026-03-05T00:00:00.000Z'],
    ['2026-03-01T10:03:00.000Z', '2026-03-03T05:00:00.000Z'],
    ['2026-03-03T05:00:00.000Z', null],
    [null, '2026-03-07T00:00:00.000Z'],
    ['2026-03-07T00:00:00.000Z', '2026-03-08T00:00:00.000Z'],
    ['2026-04-01T00:00:00.000Z', null],
  ])('the movements booked from %s to %s, with their tie', async (from, to) => {
    const { rows, tie } = await read('line-items', { from, to });
    const { rows: all } = await read('line-items');
    const inside = all.filter(({ booked_at: time }) => (from === null || String(time) >= from) && (to === null || String(time) < to));
    expect(rows).toEqual(inside);
    expect(tie.every(({ differenceCents }) => differenceCents === 0)).toBe(true);
    expect(tie.length > 0).toBe(inside.length > 0);
    const changed = await read('line-items', { from, to, after: '' });
    expect(sorted(byId(changed.rows).values())).toEqual(sorted(byId(inside).values()));
  });

  test('as it was known at a time', async () => {
    const { rows: all } = await read('line-items');
    const asOf = String(all[3]!.recorded_at);
    const { rows, tie } = await read('line-items', { asOf });
    expect(rows.map((row) => row.movement_id)).toEqual(all.slice(0, 4).map((row) => row.movement_id));
    expect(tie.map(({ journalCents }) => journalCents)).toContain(206);
  });

  test('rows up to a position of the log, while the read models are ahead', async () => {
    const { rows: all } = await read('line-items');
    const pages = await pagesOf({ until: String(all[3]!.position) });
    const rows = pages.flatMap((page) => page.rows);
    const last = pages.at(-1)!;
    expect(rows.length).toBe(4);
    // Only incremental rows name their cause.
    expect(rows[0]!.length).toBe(LINE_ITEM_COLUMNS.length);
    expect(last).toMatchObject({ after: all[3]!.position, until: all[3]!.position });
    expect(differencesOf(pages)).toEqual([]);
    const day = { from: '2026-03-01T00:00:00.000Z', to: '2026-03-02T00:00:00.000Z' };
    const ofDay = await pagesOf({ ...day, until: String(all[3]!.position) });
    expect(ofDay.flatMap((page) => page.rows).length).toBe(4);
    expect(differencesOf(ofDay)).toEqual([]);
  });

  test('a report that goes on after a place that the read models have not reached stays there', async () => {
    const { rows: all } = await read('line-items');
    const after = String(all.at(-1)!.position);
    expect(await pagesOf({ after, until: String(all[0]!.position) })).toEqual([{ rows: [], after, until: after, tie: [] }]);
  });

  test('a scope sees its own rows only, and no tie', async () => {
    const seen = async (scope: Scope, report: ReportName) => {
      const rows: (readonly unknown[])[] = [];
      let tie: unknown = 'none';
      for await (const page of reportOf(report).pages({ store, db: pool }, scope, ALL)) {
        rows.push(...page.rows);
        if ('tie' in page) ({ tie } = page);
      }
      return { rows: rows.length, tie };
    };
    const [items, deposits] = [await read('line-items'), await read('deposits')];
    const owned = ({ rows }: Read, column: string) => rows.filter((row) => row[column] !== null).length;
    expect(await seen({ accounts: [ACCOUNT], portals: [] }, 'line-items')).toEqual({ rows: owned(items, 'account_id'), tie: 'none' });
    expect(await seen({ accounts: [], portals: [PORTAL] }, 'line-items')).toEqual({ rows: owned(items, 'portal_id'), tie: 'none' });
    expect((await seen({ accounts: [], portals: [PORTAL] }, 'deposits')).rows).toBe(owned(deposits, 'portal_id'));
    for (const report of ['line-items', 'deposits'] as const) expect((await seen({ accounts: [PORTAL], portals: [ACCOUNT] }, report)).rows).toBe(0);
  });

  test('a place that is none is refused', async () => {
    for (const after of ['nonsense', '1/2', '1/2/x', '99999999999999999999', `${'9'.repeat(50)}`, '-1'])
      expect(await read('line-items', { after }).catch((error: unknown) => (error as ServiceError).code)).toBe('VALIDATION_ERROR');
    for (const after of ['nonsense', Buffer.from('["x","1","1","y"]').toString('base64url')])
      expect(await read('deposits', { after }).catch((error: unknown) => (error as ServiceError).code)).toBe('VALIDATION_ERROR');
  });

  test.each([20_000, 1])('a rebuild in parts of %i events makes the same rows, also after an interruption', async (partEvents) => {
    const tables = async () =>
      (await Promise.all(lineRegisterModel.tables.map((table) => pool.query(`select to_json(t)::text as row from ${table} t order by 1`)))).map(({ rows }) => rows); // prettier-ignore
    const before = await tables();
    expect(before.every((rows) => rows.length > 0)).toBe(true);
    const from = (most: number): EventStore => ({ ...store, readAll: (...asked) => eachAlone(store.readAll(...asked), most) });
    const again = (most: number) => rebuild(lineRegisterModel, { store: from(most), pool, now: () => now, partEvents });
    for (const most of [3, 7]) await expect(again(most)).rejects.toThrow('the log is away');
    await again(Number.POSITIVE_INFINITY);
    expect(await tables()).toEqual(before);
  });
});

/** Each event as a batch of its own. After `most` events the log is away. */
const eachAlone = async function* (batches: AsyncIterable<readonly Recorded[]>, most: number): AsyncGenerator<readonly Recorded[], void, void> {
  let left = most;
  for await (const batch of batches)
    for (const event of batch) {
      if (left-- <= 0) throw new Unavailable('the log is away');
      yield [event];
    }
};

describe('the tie finds', () => {
  const check = async (after = '') => {
    const wrong: { message: string; position: string | null }[] = [];
    for await (const page of checkTie(pool, after, (await store.head())!)) wrong.push(...page.wrong);
    return wrong;
  };
  const tampered = async <T>(table: string, change: string, work: () => Promise<T>): Promise<T> => {
    await pool.query(`create table kept as table ${table}`);
    try {
      expect((await pool.query(change)).rowCount).toBeGreaterThan(0);
      return await work();
    } finally {
      await pool.query(`begin; truncate ${table}; insert into ${table} table kept; drop table kept; commit`);
    }
  };
  test('no difference in an honest register', async () => expect(await check()).toEqual([]));

  test.each([
    ['a cent of a line', 'line_movement', 'update line_movement set principal_cents = principal_cents + 1 where position = $p and number = 1', /payable, R1, booked on 2026-03-01/],
    ['a cent that went from the principal to the fee', 'line_movement', 'update line_movement set principal_cents = principal_cents - 1, fee_cents = fee_cents + 1 where position = $p and number = 1', /service_fee.*, R2/],
    ['a missing row', 'line_movement', 'delete from line_movement where position = $p and number = 0', /payable/],
    ['a row of another portal', 'line_movement', `update line_movement set portal_id = gen_random_uuid() where position = $p and number = 0`, /payable/],
    ['a row of another day', 'line_movement', `update line_movement set booked_at = booked_at + interval '1 day' where position = $p and number = 0`, /booked on 2026-03-02/],
    ['another movement', 'line_movement', `update line_movement set movement = 'dispute_reopened', rule = 'R12''''' where position = $p and number = 0`, /disputes/],
    ['an entry of the journal', 'journal_entry', 'update journal_entry set cents = array[cents[1] + 1, cents[2] - 1] where position = $p and number = 0', /payable, R1/],
    ['a missing entry', 'journal_entry', 'delete from journal_entry where position = $p', /payable, R1/],
  ] as const)('%s', async (_name, table, change, message) => {
    const position = String((await read('line-items')).rows.find((row) => row.payment_id === small.paymentId)!.position);
    await tampered(table, change.replaceAll('$p', `'${position}'`), async () => {
      const wrong = await check();
      expect(wrong.map((one) => one.message).join('\n')).toMatch(message);
      expect(new Set(wrong.map((one) => one.position))).toEqual(new Set([position]));
      // Nothing before the place is read again.
      expect(await check(position)).toEqual([]);
      const drift = await findDrift({ store, db: pool, now: () => now });
      expect(drift.differences.filter(({ kind }) => kind === 'lines').map((one) => one.message)).toEqual(wrong.map((one) => one.message));
      // An export with a difference fails: whole, and since a place before it; not since a place after it.
      const fails = (query: Partial<ReportQuery>) => read('line-items', query).then(() => 'ok', (error: unknown) => (error as ServiceError).code); // prettier-ignore
      const day = { from: '2026-03-01T00:00:00.000Z', to: '2026-03-02T00:00:00.000Z' };
      expect(await fails(day)).toBe('INVALID_STATE');
      expect(await fails({ ...day, after: '' })).toBe('INVALID_STATE');
      expect(await fails({ ...day, after: position })).toBe('ok');
    });
  }); // prettier-ignore

  test('each of 20,000 entries, in parts', async () => {
    const { rows } = await read('line-items');
    const position = String(rows.find((row) => row.payment_id === small.paymentId)!.position);
    const copies = `insert into journal_entry
      select position, 1000 + n, gen_random_uuid(), event_id, rule, part, payment_id, recorded_at, effective_at, booked_at, accounts, cents
      from journal_entry cross join generate_series(1, 20000) n where position = '${position}' and number = 0`;
    await tampered('journal_entry', copies, async () => {
      const of = (differences: readonly TieRow[]) =>
        differences.map(({ account, differenceCents }) => [account.replace(/:.*:/, ' '), differenceCents]);
      const whole = [
        ['assets unsettled', -20_000 * 100],
        ['liabilities payable', 20_000 * 100],
      ];
      expect(of(differencesOf(await pagesOf({})))).toEqual(whole);
      expect(of(differencesOf(await pagesOf({ from: '2026-03-01T00:00:00.000Z', to: '2026-03-02T00:00:00.000Z' })))).toEqual(whole);
      const head = (await store.head())!;
      const pages = [];
      for await (const page of checkTie(pool, '', head)) pages.push(page);
      expect(pages.map((page) => page.position)).toEqual([position, head]);
      expect(pages.map(({ wrong }) => wrong.length)).toEqual([2, 0]);
    });
  });

  test('nothing before both have begun', async () => {
    for (const model of [journalModel, lineRegisterModel] as const) {
      const client = await pool.connect();
      try {
        await client.query('begin');
        await client.query('delete from projection_checkpoint where name = $1', [checkpointOf(model)]);
        expect(await levelPosition(client)).toBe('');
      } finally {
        await client.query('rollback');
        client.release();
      }
    }
  });

  test('no difference while one of both is behind: the part that both have applied is compared', async () => {
    await pay(1);
    await follow(journalModel);
    expect((await read('line-items')).tie.length).toBeGreaterThan(0);
    await follow();
    const before = await read('line-items');
    await pay(1);
    await follow(lineRegisterModel);
    const { tie, after } = await read('line-items', { after: before.after });
    expect([tie, after]).toEqual([[], before.after]);
    const drift = await findDrift({ store, db: pool, now: () => now });
    expect(drift.differences.filter(({ kind }) => kind === 'lines')).toEqual([]);
    await follow();
    const caught = await read('line-items', { after });
    expect(caught.rows.map(({ movement, cause }) => [movement, cause])).toEqual([
      ['charge', 'new'],
      ['charge', 'new'],
    ]);
    expect(caught.tie.length).toBe(3);
  });
});

test('more deposits than one statement reads: each row of them comes again', async () => {
  const { after } = await read('line-items');
  const paid = await pay(1);
  await settle(paid, 'b3');
  for (let number = 0; number <= PAGE_ROWS; number++) await fund(`e${number}`, '2026-03-08', 0);
  await fund('b3', '2026-03-08', 93);
  await follow();
  const { rows } = await read('line-items', { after });
  expect(rows.filter(({ cause }) => cause === 'deposit').map((row) => row.batch_id)).toEqual(['b3']);
});

test('a CSV of changes has a heading of its own; a whole one has exactly the columns of the report', async () => {
  const text = async (after: string | null, opened = {}) => {
    let found = '';
    for await (const piece of exportReport({ store, db: pool, ...opened }, EVERYTHING, 'line-items', 'csv', { ...ALL, after }, null).pieces)
      found += piece;
    return found.split('\r\n');
  };
  const COLUMNS = 'movement_id,position,movement,family,account_id,portal_id,payment_id,line_id,line_number,reference_id,payment_reference_id,description,coding,leg,principal_cents,fee_cents,processor_fee_cents,merchant_account,transaction_id,auth_code,brand,last4,confirmation_number,batch_id,deposit_id,deposited_on,initiated_by,recorded_at,effective_at,booked_at'; // prettier-ignore
  const [heading, row] = await text(null, { personal: memoryPersonalKeys() });
  expect(heading).toBe(COLUMNS);
  expect(row).toContain(`'=1+1, ""quoted""`);
  // Without an opening, descriptions stay out.
  expect((await text(null))[1]).not.toContain('1+1');
  expect((await text(''))[0]).toBe(`${COLUMNS},cause`);
});
