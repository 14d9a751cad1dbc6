/** Tests the list (C44–C46): its pages show the newest payments first, and a cursor is valid only for its own list. */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { randomBytes } from 'node:crypto';
import { EVERYTHING, isInScope, MemoryDirectory, type Scope } from '#accounts';
import { memoryEventStore, type NewEvent, type Recorded } from '#eventstore';
import { type Json, systemClock } from '#kernel';
import { collect, createPool, KeyRing, type Pool, systemIds, transaction } from '#platform';
import { freshDatabase, makeTables } from '../../test/support/postgres.js';
import {
  ACCOUNT,
  abandoned,
  charged,
  declined,
  feeless,
  initiated,
  PORTAL,
  principals,
  refundRequested,
  returned,
  ended,
  move,
  unknown,
} from '../../test/support/given.js';
import { listRowsContract } from '../../test/support/list-rows.contract.js';
import { ownLogOver } from '../../test/support/mark-book.js';
import { refused } from '../../test/support/payments.js';
import { memoryPersonalKeys } from '../../test/support/personal-keys.js';
import { openCursor } from './cursor.js';
import {
  listPayments,
  type ListPlace,
  listPlaces,
  MAX_PAGE,
  type PaymentListPorts,
  paymentListModel,
  paymentScopeCondition,
  postgresListRows,
} from './list.js';
import { type ListFilters, NO_FILTERS } from './list-filters.js';
import type { PaymentEvent } from './payment.js';
import { paymentStream } from './stream.js';

const ids = systemIds(() => systemClock.now());
const old = randomBytes(32);
const ring = new KeyRing('k1', new Map([['k1', old]]));
const OTHER_ACCOUNT = ids.uuid();
const personal = memoryPersonalKeys();

let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
const store = memoryEventStore();
const ownLog = await ownLogOver(memoryEventStore(), systemClock);
beforeAll(async () => {
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'spec', max: 4 });
  await makeTables(pool, paymentListModel);
});
afterAll(async () => {
  await pool.end();
  await database.drop();
});

/** Every account had access to PORTAL, and lost it. Any other portal is unknown. */
const directory = new (class extends MemoryDirectory {
  override async grant(_: string, portalId: string) {
    return portalId === PORTAL ? ('revoked' as const) : null;
  }
})();
const ports = (keys = ring): PaymentListPorts => ({
  rows: postgresListRows(pool),
  ownLog,
  keys,
  directory,
  personal,
  head: () => store.head(),
  caughtUpTo: async () => true,
});
const list = async (
  cursor: string | null = null,
  filters: Partial<ListFilters> = {},
  limit: number | null = null,
  accountId = ACCOUNT,
  keys = ring,
) => (await listPayments(ports(keys), { accountId, filters: { ...NO_FILTERS, ...filters }, cursor, limit })).page;

const asNew = (facts: readonly PaymentEvent[], at?: string): NewEvent[] =>
  facts.map(({ type, at: told, data }) => ({
    id: ids.uuid(),
    type,
    v: 1,
    data: data as unknown as Json,
    meta: { recordedAt: at ?? told, actor: { type: 'system', id: 'spec' }, correlationId: 'spec' },
  }));
const record = async (facts: readonly PaymentEvent[], id = ids.uuid(), at?: string) => {
  await store.append(paymentStream(id), 'no_stream', asNew(facts, at));
  const recorded: Recorded[] = [];
  for await (const event of store.read(paymentStream(id))) recorded.push(event);
  await transaction(pool, (client) => paymentListModel.apply(client, recorded));
  return id;
};

describe('pages', () => {
  let newestFirst: string[];
  beforeAll(async () => {
    // Every three payments share one millisecond, so their ids decide the order.
    const made: [string, string][] = [];
    for (let index = 0; index < 30; index++) {
      const at = new Date(Date.UTC(2026, 0, 5, 10) + Math.floor(index / 3)).toISOString();
      made.push([at, await record(charged(), ids.uuid(), at)]);
    }
    newestFirst = made.sort(([a, x], [b, y]) => (a === b ? (x < y ? 1 : -1) : a < b ? 1 : -1)).map(([, id]) => id);
    await record([abandoned], ids.uuid());
    await record([initiated({ ...feeless, accountId: OTHER_ACCOUNT })]);
  });
  const walk = async (limit: number | null, filters: Partial<ListFilters> = {}) => {
    const seen: string[] = [];
    let pages = 0;
    for (let cursor: string | null = null; pages === 0 || cursor !== null; pages++) {
      const page = await list(cursor, filters, limit);
      expect(page.payments.length).toBeLessThanOrEqual(limit ?? 25);
      seen.push(...page.payments.map(({ id }) => id));
      cursor = page.nextCursor;
    }
    return { seen, pages };
  };

  test.each([
    [1, 30],
    [3, 10],
    [7, 5],
    [29, 2],
    [30, 1],
    [MAX_PAGE, 1],
    [null, 2],
  ])('of %p: every payment once, newest first, the last page without a cursor', async (limit, pages) =>
    expect(await walk(limit)).toEqual({ seen: newestFirst, pages }),
  );

  test('a payment that arrives while pages are read moves none of the older ones', async () => {
    const first = await list(null, {}, 10);
    const late = await record(charged(), ids.uuid(), '2026-01-05T11:00:00.000Z');
    const rest = await list(first.nextCursor, {}, 100);
    expect([...first.payments, ...rest.payments].map(({ id }) => id)).toEqual(newestFirst);
    expect((await list(null, {}, 1)).payments[0]!.id).toBe(late);
    newestFirst = [late, ...newestFirst];
  });
  test('from is inclusive, to exclusive', async () => {
    const at = Date.UTC(2026, 0, 5, 10) + 4;
    expect((await list(null, { from: at, to: at + 1 })).payments).toHaveLength(3);
    expect((await list(null, { from: at, to: at })).payments).toHaveLength(0);
    expect((await list(null, { to: at }, 100)).payments).toHaveLength(12);
    expect((await list(null, { from: at + 6 })).payments).toHaveLength(1);
  });
  test('only the caller’s payments; abandoned streams are none (C64)', async () => {
    expect((await list(null, {}, null, OTHER_ACCOUNT)).payments).toHaveLength(1);
    expect((await list(null, {}, null, ids.uuid())).payments).toEqual([]);
    expect((await list(null, {}, 100)).payments).toHaveLength(newestFirst.length);
  });
  test('by status and by portal; a portal that was never granted is refused, one that was once is read (C46)', async () => {
    const account = { accountId: ids.uuid() };
    const terms = { ...feeless, ...account };
    const of = (status: ListFilters['status']) =>
      list(null, { status }, null, account.accountId).then(({ payments }) => payments.map(({ id }) => id));
    const [pending, failed, doubtful, good] = [
      await record([initiated(terms)]),
      await record([initiated(terms), declined]),
      await record([initiated(terms), unknown]),
      await record(charged(terms)),
    ];
    const refunded = await record([
      ...charged(terms),
      refundRequested('018f0000-0000-7000-8000-0000000000f1', { legs: [move('A', 'principal', 10_000, 0)], lines: principals(10_000) }),
      returned('018f0000-0000-7000-8000-0000000000f1', 'principal', 10_000, 0),
      ended('018f0000-0000-7000-8000-0000000000f1', { outcome: 'completed' }),
    ]);
    expect([await of('pending'), await of('failed'), await of('unknown'), await of('succeeded'), await of('refunded'), await of('voided')]).toEqual([
      [pending],
      [failed],
      [doubtful],
      [good],
      [refunded],
      [],
    ]);
    expect((await list(null, { portalId: PORTAL }, null, account.accountId)).payments).toHaveLength(5);
    expect((await refused(list(null, { portalId: ids.uuid() }))).code).toBe('PORTAL_ACCESS_DENIED');
  });
});

test('250 payments in two batches, their events mixed; the second batch begins with old events', async () => {
  const made = Array.from({ length: 250 }, () => ids.uuid());
  const before = await store.head();
  const [begun, ...rest] = charged({ ...feeless, accountId: ids.uuid() });
  for (const facts of [[begun!], rest]) for (const id of made) await store.append(paymentStream(id), 'any', asNew(facts));
  const events = (await collect(store.readAll(before))).flat();
  for (const batch of [events.slice(0, 400), events.slice(200)]) await transaction(pool, (client) => paymentListModel.apply(client, batch));
  const rows = await postgresListRows(pool).read(made);
  expect(rows.map(({ revision, payment }) => [revision, payment.phase])).toEqual(made.map(() => [BigInt(rest.length), 'charged']));
});

describe('the cursor of a page (C45)', () => {
  const cursorOf = async (filters: Partial<ListFilters> = {}) => (await list(null, filters, 5)).nextCursor!;
  const invalid = async (call: Promise<unknown>) => {
    expect(await refused(call)).toMatchObject({ code: 'VALIDATION_ERROR', status: 400, message: expect.stringMatching(/cursor/) });
  };
  test('is bound to the account', async () => invalid(list(await cursorOf(), {}, 5, OTHER_ACCOUNT)));
  test.each<[string, Partial<ListFilters>]>([
    ['portal', { portalId: PORTAL }],
    ['from', { from: 0 }],
    ['to', { to: Date.UTC(2030, 0, 1) }],
    ['status', { status: 'succeeded' }],
  ])('is bound to the filters: %s', async (_, filters) => {
    await invalid(list(await cursorOf(), filters, 5));
    await invalid(list(await cursorOf(filters), {}, 5));
    expect((await list(await cursorOf(filters), filters, 5)).payments).toHaveLength(5);
  });
  test('is not bound to the limit', async () => expect((await list(await cursorOf(), {}, 7)).payments).toHaveLength(7));
  test('lives on when the key ring is rotated, and ends with its key', async () => {
    const cursor = await cursorOf();
    const rotated = new KeyRing('k2', new Map([['k1', old], ['k2', randomBytes(32)]])); // prettier-ignore
    expect((await list(cursor, {}, 5, ACCOUNT, rotated)).payments).toHaveLength(5);
    await invalid(list(cursor, {}, 5, ACCOUNT, new KeyRing('k2', new Map([['k2', randomBytes(32)]]))));
  });
  test('names the place of the last payment shown', async () => {
    const { payments, nextCursor } = await list(null, {}, 5);
    const last = payments.at(-1)!;
    expect(openCursor(ring, ACCOUNT, NO_FILTERS, nextCursor!)).toEqual({ createdAt: Date.parse(last.createdAt), id: last.id });
  });
});

describe('places in the scope of an audit key', () => {
  interface Made {
    readonly id: string;
    readonly createdAt: string;
    readonly accountId: string;
    readonly portalId: string;
    readonly status: 'succeeded' | 'failed';
  }
  const [ONE, TWO, P, Q] = [ids.uuid(), ids.uuid(), ids.uuid(), ids.uuid()];
  const made: Made[] = [];
  beforeAll(async () => {
    for (let index = 0; index < 24; index++) {
      const at = new Date(Date.UTC(2026, 1, 1) + Math.floor(index / 4)).toISOString();
      const [accountId, portalId] = [[ONE, TWO][index % 2]!, [P, Q][Math.floor(index / 2) % 2]!];
      const terms = { ...feeless, accountId, portalId };
      const status = index % 3 === 0 ? 'failed' : 'succeeded';
      const id = await record(status === 'failed' ? [initiated(terms), declined] : charged(terms), ids.uuid(), at);
      made.push({ id, createdAt: at, accountId, portalId, status });
    }
  });
  const SCOPES: readonly Scope[] = [
    { accounts: [ONE], portals: [] },
    { accounts: [], portals: [Q] },
    { accounts: [ONE], portals: [P] },
    { accounts: [ONE, TWO], portals: [P, Q] },
    { accounts: [], portals: [] },
    { accounts: [ids.uuid()], portals: [ids.uuid()] },
  ];
  const newest = (one: ListPlace, other: ListPlace) =>
    one.createdAt === other.createdAt ? (one.id < other.id ? 1 : -1) : one.createdAt < other.createdAt ? 1 : -1;

  test.each(SCOPES)('are those of the scope, each once, newest first, under every filter: %j', async (scope) => {
    const middle = Date.parse(made[12]!.createdAt);
    for (const accountId of [null, ONE, TWO])
      for (const portalId of [null, P])
        for (const status of [null, 'failed'] as const)
          for (const from of [null, middle])
            for (const after of [null, made[17]!]) {
              const filters = { portalId, status, from, to: null };
              const expected = made
                .filter((one) => isInScope(scope, one))
                .filter((one) => (accountId === null || one.accountId === accountId) && (portalId === null || one.portalId === portalId))
                .filter((one) => (status === null || one.status === status) && (from === null || Date.parse(one.createdAt) >= from))
                .filter((one) => after === null || newest(one, after) > 0)
                .sort(newest)
                .map(({ createdAt, id }) => ({ createdAt, id }));
              const asked = JSON.stringify({ accountId, filters, after });
              expect([asked, await listPlaces(pool, scope, accountId, filters, after, 100)]).toEqual([asked, expected]);
              expect(await listPlaces(pool, scope, accountId, filters, after, 3)).toEqual(expected.slice(0, 3));
            }
  });
  test.each(SCOPES)('a payment fits the condition if it is in scope: %j', async (scope) => {
    const values: unknown[] = [[...made.map(({ id }) => id), ids.uuid(), null]];
    const condition = paymentScopeCondition(scope, 'named.id', (value) => `$${values.push(value)}`);
    const { rows } = await pool.query<{ id: string }>(`select id from unnest($1::uuid[]) as named (id) where ${condition}`, values);
    expect(rows.map(({ id }) => id)).toEqual(made.filter((one) => isInScope(scope, one)).map(({ id }) => id));
  });
  test('without limits, every payment fits, also one that is unknown', () => {
    expect(paymentScopeCondition(EVERYTHING, 'named.id', () => '$1')).toBe('true');
  });
});

listRowsContract('Postgres’', async () => ({ rows: postgresListRows(pool), close: async () => undefined }), 40);
