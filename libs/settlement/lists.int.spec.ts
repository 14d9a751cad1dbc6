/** Tests lists of settlement that are longer than a page, on Postgres. No row is missing or comes twice, and the order holds across pages. */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { EVERYTHING } from '#accounts';
import { memoryEventStore, type Position, prepareReadModels, type ReadModel, type Recorded, searchPathOf } from '#eventstore';
import { systemClock, timestamp } from '#kernel';
import { PaymentStreams, type SettlementRecord } from '#payments';
import { collect, createPool, migrate, PAGE_ROWS, type Pool, systemIds, transaction } from '#platform';
import { MIGRATIONS, READ_MODELS } from '../../apps/services.js';
import { freshDatabase } from '../../test/support/postgres.js';
import { registerConnections, watchStatements } from '../../test/support/statements.js';
import {
  batchesAsOf,
  exceptionModel,
  exceptionRows,
  openExceptions,
  paymentRegisterModel,
  postgresRegister,
  type Register,
  type SettlementPorts,
} from './index.js';
import { changeCase } from './case.js';
import { recordBatch } from './record.js';

let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
let register: Register;
/** Two full pages and one row. */
const ROWS = 2 * PAGE_ROWS + 1;
const NOW = Date.parse('2026-06-01T00:00:00Z');

beforeAll(async () => {
  registerConnections();
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'lists', max: 4, searchPath: searchPathOf(READ_MODELS) });
  await migrate(pool, MIGRATIONS);
  await prepareReadModels(pool, READ_MODELS, memoryEventStore());
  register = postgresRegister(pool, async () => undefined);
  // Seven rows have the same time, so a page can end between two rows of one time.
  await pool.query(
    `insert into settlement_case (exception_id, kind, status, gateway, merchant_account, suspense_cents, opened_at, changed_at)
     select gen_random_uuid(), 'LATE', s.status, 'simulator', 'mid', 0, at, at
     from (values ('opened'), ('resolved')) s (status), generate_series(1, $1) n, lateral (select '2026-01-01'::timestamptz + n / 7 * interval '1.000001 s' as at) t`,
    [ROWS],
  );
  await pool.query(`insert into gateway_account values ('simulator', 'mid', 'sandbox', 'sandbox')`);
  await pool.query(
    `insert into settlement_batch (gateway, merchant_account, batch_id, closed_at, funded_on, line_count, gross_cents, fee_cents, net_cents, funded, recorded_at)
     select 'simulator', 'mid', 'b' || n, '2026-01-01'::timestamptz + n / 7 * interval '1.000001 s', '2026-01-02'::date + n % 3, 1, 100, 2, 98, false, '2026-01-03'
     from generate_series(1, $1) n`,
    [ROWS],
  );
  await pool.query(
    `insert into dispute (dispute_id, payment_id, status, stage, reason_code, disputed_amount_cents, opened_on, due_date, updated_at)
     select gen_random_uuid(), gen_random_uuid(), (array['debited', 'in_dispute', 'lost', 'recovered'])[1 + n % 4], 'chargeback', '10.4', n, '2026-01-01',
       '2026-02-01'::date + n / 7 % 300, '2026-01-01' from generate_series(1, $1) n`,
    [ROWS],
  );
});
afterAll(async () => {
  await pool.end();
  await database.drop();
});

const isSorted = <T>(rows: readonly T[], key: (row: T) => string) => rows.every((row, index) => index === 0 || key(rows[index - 1]!) <= key(row));

describe('every row of a list, once', () => {
  test.each([null, 'resolved'])('exceptions of status %s, oldest first', async (status) => {
    const rows = await collect(exceptionRows(pool, EVERYTHING, { status, now: NOW }));
    expect([rows.length, new Set(rows.map(({ exceptionId }) => exceptionId)).size]).toEqual([ROWS, ROWS]);
    expect(isSorted(rows, ({ openedAt }) => openedAt)).toBe(true);
    expect(new Set(rows.map((row) => row.status))).toEqual(new Set([status ?? 'opened']));
  });

  test('batches, by the time of their closing', async () => {
    const rows = await collect(batchesAsOf(pool, null, NOW));
    expect([rows.length, new Set(rows.map(({ batchId }) => batchId)).size]).toEqual([ROWS, ROWS]);
    expect(isSorted(rows, ({ closedAt }) => closedAt)).toBe(true);
    expect(await collect(batchesAsOf(pool, '2026-01-02T00:00:00.000Z', NOW))).toEqual([]);
  });

  test('batches due for funding, by their day', async () => {
    const rows = await register.fundable('2026-06-01');
    expect([rows.length, new Set(rows.map(({ batchId }) => batchId)).size]).toEqual([ROWS, ROWS]);
    expect(isSorted(rows, ({ fundedOn }) => fundedOn)).toBe(true);
    expect(new Set((await register.fundable('2026-01-02')).map(({ fundedOn }) => fundedOn))).toEqual(new Set(['2026-01-02']));
  });

  test('disputes, open ones first, then by due date; one of them by its id', async () => {
    const rows = await register.disputes();
    expect([rows.length, new Set(rows.map(({ disputeId }) => disputeId)).size]).toEqual([ROWS, ROWS]);
    const isClosed = (status: string) => (['debited', 'in_dispute'].includes(status) ? 0 : 1);
    expect(isSorted(rows, ({ status, dueDate, disputeId }) => `${isClosed(status)} ${dueDate} ${disputeId}`)).toBe(true);
    expect(await register.dispute(rows.at(-1)!.disputeId)).toEqual(rows.at(-1));
    expect(await register.dispute('01890000-0000-7000-8000-000000000000')).toBeNull();
  });
});

describe('exceptions are opened until none is left', () => {
  const LINES = 1_201;
  const store = memoryEventStore();
  const ids = systemIds(() => NOW);
  /** Applies new events of the log to a read model. */
  const follower = ({ apply }: Pick<ReadModel, 'apply'>) => {
    let seen: Position | null = null;
    return {
      caughtUp: async () => {
        for await (const events of store.readAll(seen, { streamPrefixes: ['exception-'] })) {
          await transaction(pool, (client) => apply(client, events));
          seen = events.at(-1)!.position;
        }
      },
    };
  };
  const cases = follower(exceptionModel);
  const ports = { store, payments: { clock: systemClock, ids }, register: follower(paymentRegisterModel) } as unknown as SettlementPorts;
  /** Rows of exceptions that a round reads when nothing is due. */
  const readWhenIdle = async () => {
    // As autovacuum does. Without statistics, the planner may read the whole table.
    await pool.query('vacuum analyze settlement_exception');
    const watched = await watchStatements();
    try {
      expect(await openExceptions(ports, pool, cases)).toBe(0);
      return watched.take().reduce((sum, { read }) => sum + (read.get('settlement_exception') ?? 0), 0);
    } finally {
      await watched.stop();
    }
  };

  test('more lines than one round detects, in one call', async () => {
    await pool.query('truncate settlement_case');
    await pool.query(
      `insert into settlement_exception (exception_id, gateway, merchant_account, batch_id, line, kind, type, transaction_id, gross_cents, suspense_cents, recorded_at, position)
       select gen_random_uuid(), 'simulator', 'mid', 'late', n, 'LATE', 'sale', 't' || n, 100, 0, $2, n from generate_series(1, $1) n`,
      [LINES, timestamp(NOW)],
    );
    expect(await openExceptions(ports, pool, cases)).toBe(LINES);
    expect(await collect(exceptionRows(pool, EVERYTHING, { status: null, now: NOW }))).toHaveLength(LINES);
    expect(await readWhenIdle()).toBe(0);
  });

  test('and superseded likewise; a signal ends the work after a round', async () => {
    await pool.query('update settlement_exception set superseded = true');
    await openExceptions(ports, pool, cases, AbortSignal.abort());
    const left = (await collect(exceptionRows(pool, EVERYTHING, { status: null, now: NOW }))).length;
    expect(left).toBeGreaterThan(0);
    expect(left).toBeLessThan(LINES);
    await openExceptions(ports, pool, cases);
    expect(await collect(exceptionRows(pool, EVERYTHING, { status: null, now: NOW }))).toEqual([]);
    expect(await readWhenIdle()).toBe(0);
  });
});

test('while a batch of unknown lines is recorded, the register catches up after the first 200 lines and then once in 5,000', async () => {
  const LINES = 10_600;
  const store = memoryEventStore();
  const ids = systemIds(() => NOW);
  let caughtUp = 0;
  const ports = {
    store,
    // The time stands still, since the register also catches up after some seconds.
    payments: { clock: { ...systemClock, monotonic: () => 0 }, ids, streams: new PaymentStreams(store, systemClock, ids) },
    register: postgresRegister(pool, async () => void (caughtUp += 1)),
  } as unknown as SettlementPorts;
  const lines = async function* (): AsyncIterable<SettlementRecord> {
    for (let n = 0; n < LINES; n++)
      yield { transactionId: `unknown-${n}`, type: 'sale', accepted: true, grossCents: 100, feeCents: 0, netCents: 100 };
  };
  const account = { gateway: 'simulator', merchantAccount: 'mid', credentialsRef: 'sandbox', environment: 'sandbox' } as const;
  const incoming = { batchId: 'many', closedAt: timestamp(NOW), fundedOn: null, lines: lines() };
  expect(await recordBatch(ports, account, incoming, null, new AbortController().signal)).toMatchObject({ count: LINES, corrected: 0 });
  // After 200, 5,200 and 10,200 lines.
  expect(caughtUp).toBe(3);
});

test('exceptions that are opened and changed in turn: the same rows, whether events come one by one or together', async () => {
  const store = memoryEventStore();
  const ports = { store, payments: { clock: systemClock, ids: systemIds(() => NOW) } } as unknown as SettlementPorts;
  const [a, b, c] = [1, 2, 3].map((n) => `01890000-0000-7000-8000-00000000000${n}`) as [string, string, string];
  const at = timestamp(NOW);
  const staff = { actor: { type: 'operator', id: 'spec' }, correlationId: 'spec' } as const;
  const open = (exceptionId: string, line: number) => {
    const of = {
      gateway: 'simulator',
      merchantAccount: 'mid',
      batchId: 'turns',
      line,
      transactionId: `t${line}`,
      ref: null,
      paymentId: null,
      leg: null,
    };
    const opened = { ...of, exceptionId, kind: 'MISSING_HERE', grossCents: 100, expectedCents: null, suspenseCents: 100 } as const;
    return changeCase(ports, exceptionId, { type: 'Open', at, opened }, staff);
  };
  await open(a, 1);
  await changeCase(ports, a, { type: 'Assign', at, to: 'Ann', by: 'spec' }, staff);
  await open(b, 2);
  await changeCase(ports, a, { type: 'Resolve', at, resolution: 'no_posting', reason: 'small', by: 'spec', portalId: null, feeCents: 0 }, staff);
  await open(c, 3);
  const events = (await collect(store.readAll(null))).flat();
  const rowsAfter = async (groups: readonly (readonly Recorded[])[]) => {
    await pool.query('truncate settlement_case, settlement_exception');
    await pool.query(
      `insert into settlement_exception (exception_id, gateway, merchant_account, batch_id, line, kind, type, transaction_id, gross_cents, suspense_cents, recorded_at, position)
       select id, 'simulator', 'mid', 'turns', n, 'MISSING_HERE', 'sale', 't' || n, 100, 100, $2, n from unnest($1::uuid[]) with ordinality u (id, n)`,
      [[a, b, c], at],
    );
    for (const group of groups)
      for (const model of [exceptionModel, paymentRegisterModel]) await transaction(pool, (client) => model.apply(client, group));
    const { rows: cases } = await pool.query('select * from settlement_case order by exception_id');
    const { rows: lines } = await pool.query('select * from settlement_exception order by exception_id');
    return { cases, lines };
  };
  const together = await rowsAfter([events]);
  expect(together).toEqual(await rowsAfter(events.map((event) => [event])));
  expect(together.cases.map(({ status }) => status)).toEqual(['resolved', 'opened', 'opened']);
  expect(together.lines.map(({ opened, ended, resolved_cents: cents }) => [opened, ended, Number(cents)])).toEqual([
    [true, true, 100],
    [true, false, 0],
    [true, false, 0],
  ]);
});
