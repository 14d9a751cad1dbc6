/** Tests velocity (C53, C70): exact windows on real Postgres, with a clock that the test moves. */
import { afterAll, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import type { VelocityLimits } from '#accounts';
import { createPool, migrate, newKeyRing, type Pool, PURGE_BATCH, systemIds } from '#platform';
import { CARDS, type Ground, openGround, openHouse, refused } from '../../test/support/payments.js';
import { freshDatabase } from '../../test/support/postgres.js';
import { Secret } from './gateway/gateway.js';
import { postgresVelocity, purgeVelocity, type Velocity, velocityMigration } from './velocity.js';

const START = Date.parse('2026-03-01T10:00:00.000Z');
let now: number;
const clock = { now: () => now, realNow: () => now, monotonic: () => now, sleep: async () => undefined };
const ids = systemIds(() => now);
const keys = newKeyRing();

let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
let velocity: Velocity;
beforeAll(async () => {
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'spec', max: 10 });
  await migrate(pool, [velocityMigration]);
  velocity = postgresVelocity(pool, keys, clock);
});
afterAll(async () => {
  await pool.end();
  await database.drop();
});
let portalId: string;
beforeEach(() => {
  now = START;
  portalId = ids.uuid();
});

const card = (number: string = CARDS.approved) =>
  ({ type: 'card', number: new Secret(number), expiry: { month: 12, year: 2040 }, cvv: new Secret('987') }) as const;
const token = (text: string) => ({ type: 'card_token', token: new Secret(text) }) as const;
type Instrument = ReturnType<typeof card> | ReturnType<typeof token>;
const subject = (change: { referenceId?: string | null; instrument?: Instrument; portalId?: string } = {}) => ({
  portalId,
  referenceId: 'CASE-1',
  instrument: card() as Instrument,
  ...change,
});
const limit = (change: Partial<VelocityLimits>): VelocityLimits => ({
  attempts: null,
  declines: null,
  windowSeconds: 600,
  blockSeconds: null,
  ...change,
});
type Limits = Parameters<Velocity['admit']>[1];
const onCard = (change: Partial<VelocityLimits>): Limits => ({ card: limit(change), case: null });
const onCase = (change: Partial<VelocityLimits>): Limits => ({ card: null, case: limit(change) });

const admit = (limits: Limits, who = subject()) => velocity.admit(who, limits, ids.uuid());
const decline = (limits: Limits, who = subject()) => velocity.recordDecline(who, limits, ids.uuid());
const after = (seconds: number) => {
  now = START + Math.round(seconds * 1000);
};
const at = (seconds: number) => new Date(START + seconds * 1000).toISOString();
const entries = async () => (await pool.query<Record<string, unknown>>('select * from velocity_entry where portal_id = $1', [portalId])).rows;

test('limits are off by default: nothing is asked, nothing kept', async () => {
  for (let round = 0; round < 20; round++) await admit({ card: null, case: null });
  await decline({ card: null, case: null });
  expect(await entries()).toEqual([]);
});

describe.each([
  ['card', onCard],
  ['case', onCase],
] as const)('attempts of scope %s', (scope, on) => {
  const limits = on({ attempts: 3 });
  test('3 pass, the next is refused until the oldest leaves the window, to the millisecond', async () => {
    for (const seconds of [0, 100, 200]) {
      after(seconds);
      await admit(limits);
    }
    after(250);
    const refusal = await refused(admit(limits));
    expect(refusal).toMatchObject({ code: 'VELOCITY_LIMIT', status: 429, details: { scope, windowSeconds: 600, retryAt: at(600) } });
    after(599.999);
    expect((await refused(admit(limits))).details.retryAt).toBe(at(600));
    after(600);
    await admit(limits);
    expect((await refused(admit(limits))).details.retryAt).toBe(at(700));
    after(700);
    await admit(limits);
  });
  test('Retry-After are whole seconds, rounded up, at least 1', async () => {
    for (let round = 0; round < 3; round++) await admit(limits);
    after(0.5);
    await expect(admit(limits)).rejects.toMatchObject({ options: { retryAfterSeconds: 600 } });
    after(599.999);
    await expect(admit(limits)).rejects.toMatchObject({ options: { retryAfterSeconds: 1 } });
  });
  test('a refused attempt does not count: waiting for retryAt is enough', async () => {
    for (let round = 0; round < 3; round++) await admit(limits);
    for (let round = 0; round < 10; round++) await refused(admit(limits));
    after(600);
    await admit(limits);
  });
  test('20 at once at the limit: exactly 3 are admitted', async () => {
    const outcomes = await Promise.allSettled(Array.from({ length: 20 }, () => admit(limits)));
    expect(outcomes.filter(({ status }) => status === 'fulfilled')).toHaveLength(3);
    expect(await entries()).toHaveLength(3);
  });
  test('the last place is given once, also over two replicas', async () => {
    const other = createPool(database.url, { name: 'replica', max: 5 });
    const replicas = [velocity, postgresVelocity(other, keys, clock)];
    await admit(limits);
    await admit(limits);
    const outcomes = await Promise.allSettled(Array.from({ length: 10 }, (_, index) => replicas[index % 2]!.admit(subject(), limits, ids.uuid())));
    expect(outcomes.filter(({ status }) => status === 'fulfilled')).toHaveLength(1);
    await other.end();
  });
  test('another portal counts for itself', async () => {
    for (let round = 0; round < 3; round++) await admit(limits);
    await admit(limits, subject({ portalId: ids.uuid() }));
  });
});

describe('the counted subjects', () => {
  test('scope card: the number, for any case; a token as itself', async () => {
    const limits = onCard({ attempts: 1 });
    await admit(limits, subject({ referenceId: 'A' }));
    expect((await refused(admit(limits, subject({ referenceId: 'B' })))).code).toBe('VELOCITY_LIMIT');
    await admit(limits, subject({ instrument: card('5555555555554444') }));
    await admit(limits, subject({ instrument: token('tok_1') }));
    expect((await refused(admit(limits, subject({ instrument: token('tok_1') })))).code).toBe('VELOCITY_LIMIT');
    await admit(limits, subject({ instrument: token('tok_2') }));
  });
  test('scope case: the payment-level referenceId, for any card; without one nothing is counted', async () => {
    const limits = onCase({ attempts: 1 });
    await admit(limits, subject());
    expect((await refused(admit(limits, subject({ instrument: card('5555555555554444') })))).code).toBe('VELOCITY_LIMIT');
    await admit(limits, subject({ referenceId: 'CASE-2' }));
    for (let round = 0; round < 3; round++) await admit(limits, subject({ referenceId: null }));
  });
  test('a case named like a card is not that card', async () => {
    const limits = { card: limit({ attempts: 1 }), case: limit({ attempts: 1 }) };
    await admit(limits, subject({ referenceId: CARDS.approved, instrument: token('x') }));
    await admit(limits, subject({ referenceId: 'CASE-9' }));
  });
  test('both scopes: refused by one, counted by none', async () => {
    const limits = { card: limit({ attempts: 1 }), case: limit({ attempts: 5 }) };
    await admit(limits);
    await refused(admit(limits));
    expect((await entries()).map(({ scope }) => scope).sort()).toEqual(['card', 'case']);
  });
});

describe('declines', () => {
  test.each([
    ['case', onCase],
    ['card', onCard],
  ] as const)('of scope %s without a block → VELOCITY_LIMIT until the oldest leaves the window', async (scope, on) => {
    const limits = on({ declines: 2 });
    await decline(limits);
    await admit(limits);
    after(100);
    await decline(limits);
    expect(await refused(admit(limits))).toMatchObject({ code: 'VELOCITY_LIMIT', details: { scope, windowSeconds: 600, retryAt: at(600) } });
    after(600);
    await admit(limits);
  });
  test('of a card with a block: 2 in the window → DECLINE_BLOCKED for 900 s from the last, then free', async () => {
    const limits = onCard({ declines: 2, blockSeconds: 900 });
    await decline(limits);
    after(500);
    await admit(limits);
    await decline(limits);
    after(501);
    const refusal = await refused(admit(limits));
    expect(refusal).toMatchObject({ code: 'DECLINE_BLOCKED', status: 409, details: { retryAt: at(1_400) } });
    expect(refusal.details).not.toHaveProperty('windowSeconds');
    await expect(admit(limits)).rejects.toMatchObject({ options: { retryAfterSeconds: 899 } });
    // Both declines have left the window of 600 s, but the block has not ended.
    after(1_399.999);
    expect((await refused(admit(limits))).code).toBe('DECLINE_BLOCKED');
    after(1_400);
    await admit(limits);
  });
  test('of a card with a block: declines further apart than the window never block', async () => {
    const limits = onCard({ declines: 2, blockSeconds: 900 });
    await decline(limits);
    after(600);
    await decline(limits);
    await admit(limits);
    after(1_199);
    await decline(limits);
    expect((await refused(admit(limits))).details.retryAt).toBe(at(2_099));
  });
  test('a block shorter than the window ends on its own; one more decline blocks again', async () => {
    const limits = onCard({ declines: 2, blockSeconds: 60 });
    await decline(limits);
    await decline(limits);
    expect((await refused(admit(limits))).details.retryAt).toBe(at(60));
    after(60);
    await admit(limits);
    await decline(limits);
    expect((await refused(admit(limits))).details.retryAt).toBe(at(120));
  });
  test('a decline of one card does not block another; scope case counts both', async () => {
    const limits = { card: limit({ declines: 1, blockSeconds: 60 }), case: limit({ declines: 2 }) };
    await decline(limits);
    await admit(limits, subject({ instrument: card('5555555555554444') }));
    await decline(limits, subject({ instrument: card('5555555555554444') }));
    expect((await refused(admit(limits, subject({ instrument: card('6011111111111117') })))).code).toBe('VELOCITY_LIMIT');
  });
  test('DECLINE_BLOCKED comes before VELOCITY_LIMIT', async () => {
    const limits = { card: limit({ attempts: 1, declines: 1, blockSeconds: 60 }), case: limit({ attempts: 1 }) };
    await admit(limits);
    await decline(limits);
    expect((await refused(admit(limits))).code).toBe('DECLINE_BLOCKED');
    after(60);
    expect((await refused(admit(limits))).code).toBe('VELOCITY_LIMIT');
  });
  test('a counter that cannot be written is reported', async () => {
    const away = createPool('postgres://nobody@127.0.0.1:1/none', { name: 'away', max: 1 });
    await expect(postgresVelocity(away, keys, clock).recordDecline(subject(), onCard({ declines: 1 }), ids.uuid())).rejects.toThrow('ECONNREFUSED');
    await away.end();
  });
});

describe('the content of the table (docs/contract.md#card-data)', () => {
  test('a keyed hash: no number, no last four, no token, no reference, no payment', async () => {
    const limits = { card: limit({ attempts: 5, declines: 5 }), case: limit({ attempts: 5 }) };
    const entryId = ids.uuid();
    await velocity.admit(subject({ referenceId: 'CASE-SECRET' }), limits, entryId);
    await decline(limits, subject({ instrument: token('tok_secret') }));
    const { rows } = await pool.query<{ row: string }>('select v::text as row from velocity_entry v where portal_id = $1', [portalId]);
    expect(rows.length).toBeGreaterThan(2);
    for (const { row } of rows) {
      expect(row).not.toMatch(/CASE-SECRET|tok_secret|4242/);
      for (const text of ['CASE-SECRET', 'tok_secret', CARDS.approved]) expect(row).not.toContain(Buffer.from(text).toString('hex'));
    }
    const { rows: columns } = await pool.query<{ column_name: string }>(
      `select column_name from information_schema.columns where table_name = 'velocity_entry' order by 1`,
    );
    expect(columns.map(({ column_name: name }) => name)).toEqual(['at', 'entry_id', 'expires_at', 'kid', 'kind', 'portal_id', 'scope', 'subject']);
  });
  test('the hash is keyed, and of this portal only', async () => {
    const hashes = async (ring: typeof keys, portal: string) => {
      await postgresVelocity(pool, ring, clock).admit(subject({ portalId: portal }), onCard({ attempts: 5 }), ids.uuid());
      return (await pool.query<{ subject: Buffer }>('select subject from velocity_entry where portal_id = $1', [portal])).rows[0]!.subject.toString(
        'hex',
      );
    };
    const all = await Promise.all([hashes(keys, ids.uuid()), hashes(keys, ids.uuid()), hashes(newKeyRing(), ids.uuid())]);
    expect(new Set(all).size).toBe(3);
  });
  test('rows that no window needs are purged, block included; the others stay', async () => {
    const count = async () => (await entries()).length;
    now = Date.now() - 700_000;
    await admit(onCard({ attempts: 5 }));
    await admit(onCard({ attempts: 5, declines: 5, blockSeconds: 900 }));
    now = Date.now();
    await admit(onCard({ attempts: 5 }));
    expect(await count()).toBe(3);
    await purgeVelocity(pool);
    expect(await count()).toBe(2);
  });
});

test('many expired entries are purged in batches; a signal ends the purge after one', async () => {
  const many = 2 * PURGE_BATCH + 1;
  await pool.query('truncate velocity_entry');
  await pool.query(
    `insert into velocity_entry (portal_id, scope, subject, kid, kind, entry_id, at, expires_at)
     select $1, 'card', '\\x00', 'k', 'attempt', gen_random_uuid(), now(), now() - interval '1 s' from generate_series(1, $2)`,
    [portalId, many],
  );
  await pool.query(
    `insert into velocity_entry select portal_id, scope, subject, kid, kind, gen_random_uuid(), at, now() + interval '1 h' from velocity_entry limit 1`,
  );
  expect(await purgeVelocity(pool, AbortSignal.abort())).toBe(PURGE_BATCH);
  expect(await purgeVelocity(pool)).toBe(many - PURGE_BATCH);
  expect((await pool.query('select from velocity_entry')).rowCount).toBe(1);
});

describe('in a charge', () => {
  let ground: Ground;
  beforeAll(async () => {
    ground = await openGround();
  });
  afterAll(() => ground.close());
  const housed = async (limits: { card?: Partial<VelocityLimits>; case?: Partial<VelocityLimits> }) => {
    const house = await openHouse(ground);
    for (const scope of ['card', 'case'] as const)
      if (limits[scope]) await house.administration.setLimits(house.portalId, scope, limit(limits[scope]));
    await house.project();
    return house;
  };
  test('declines count with the outcome, and block before the next is sent (Errors 3)', async () => {
    const house = await housed({ card: { declines: 2, blockSeconds: 60 } });
    for (let round = 0; round < 2; round++) expect((await refused(house.charge({ card: CARDS.declined }))).code).toBe('PAYMENT_DECLINED');
    const sent = (await house.truth()).length;
    expect((await refused(house.charge({ card: CARDS.declined }))).code).toBe('DECLINE_BLOCKED');
    expect((await house.truth()).length).toBe(sent);
    expect((await house.charge({ card: CARDS.approved })).status).toBe('succeeded');
    house.clock.advance(60_000);
    expect((await refused(house.charge({ card: CARDS.declined }))).code).toBe('PAYMENT_DECLINED');
  });
  test('a refusal of steps 7 to 10 is no attempt; a replay never is', async () => {
    const house = await housed({ case: { attempts: 2 } });
    await house.administration.setRules(house.portalId, { minCents: 500 });
    await house.project();
    const referenceId = 'CASE-1';
    for (let round = 0; round < 3; round++) expect((await refused(house.charge({ referenceId, lines: [499] }))).code).toBe('PAYMENT_NOT_ALLOWED');
    const key = house.key();
    for (let round = 0; round < 3; round++) expect((await house.chargeWithKey(key, { referenceId })).status).toBe(200);
    expect((await house.charge({ referenceId })).status).toBe('succeeded');
    expect((await refused(house.charge({ referenceId }))).code).toBe('VELOCITY_LIMIT');
  });
  test('a refusal leaves no payment, and gives the key back (C15)', async () => {
    const house = await housed({ card: { attempts: 1 } });
    const first = await house.charge();
    const key = house.key();
    expect((await house.chargeWithKey(key)).status).toBe(429);
    house.clock.advance(600_000);
    expect((await house.chargeWithKey(key)).status).toBe(200);
    const streams = new Set<string>();
    for await (const events of house.store.readAll(null, { streamPrefixes: ['payment-'] })) events.forEach(({ stream }) => streams.add(stream));
    expect(streams.size).toBe(2);
    expect(streams).toContain(`payment-${first.id}`);
  });
});
