/** Refused attempts: which refusals make a row, how many, and that no answer waits for them. */
import { afterAll, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { createPool, migrate, newKeyRing, type Pool, PURGE_BATCH, systemIds } from '#platform';
import { eventually } from '../../test/support/eventually.js';
import { CARDS, type Ground, type House, openGround, openHouse, refused } from '../../test/support/payments.js';
import { freshDatabase } from '../../test/support/postgres.js';
import { MovableClock } from '../../test/support/clock.js';
import { Secret } from './gateway/gateway.js';
import { listRefusals, MAX_BUFFERED, postgresRefusals, purgeRefusals, refusalMigration, type RefusalQuery, REFUSALS_KEPT_DAYS, ROWS_A_SECOND } from './refusals.js'; // prettier-ignore

const ALL: RefusalQuery = { portalId: null, referenceId: null, from: null, to: null, after: null, limit: 1_000 };
const DAY_MS = 86_400_000;
const SOON = { timeoutMs: 5_000 };

describe('a charge', () => {
  let ground: Ground;
  let house: House;
  beforeAll(async () => {
    ground = await openGround();
  });
  afterAll(() => ground.close());
  beforeEach(async () => {
    house = await openHouse(ground);
  });

  const rows = async () => (await listRefusals(ground.pool, { ...ALL, portalId: house.portalId })).refusals;
  const shown = async (count: number) => {
    await eventually(async () => (await rows()).length >= count, SOON);
    return rows();
  };
  const ruled = async (change: Parameters<House['administration']['setRules']>[1]) => {
    await house.administration.setRules(house.portalId, change);
    await house.project();
  };
  const restricted = async (kind: 'block' | 'hold') => {
    await house.administration.restrictCase({ portalId: house.portalId, referenceId: 'CASE-1', kind, until: null, reason: null });
    await house.project();
  };
  const limited = async (limit: { attempts: number | null; declines: number | null; blockSeconds: number | null }) => {
    await house.administration.setLimits(house.portalId, 'card', { windowSeconds: 600, ...limit });
    await house.project();
  };

  test.each([
    ['PAYMENT_BLOCKED', () => restricted('block'), 0],
    ['PAYMENT_HELD', () => restricted('hold'), 0],
    ['PAYMENT_NOT_ALLOWED', () => ruled({ minCents: 99_000 }), 0],
    ['VELOCITY_LIMIT', () => limited({ attempts: 1, declines: null, blockSeconds: null }), 1],
    ['DECLINE_BLOCKED', () => limited({ attempts: null, declines: 1, blockSeconds: 60 }), 1],
  ] as const)('%s leaves a row with portal, code, reference, hash of the card and time', async (code, arrange, before) => {
    await arrange();
    const asked = { referenceId: 'CASE-1', card: code === 'DECLINE_BLOCKED' ? CARDS.declined : CARDS.approved, zip: '90001' };
    for (let count = 0; count < before; count++) await house.charge(asked).catch(() => undefined);
    const at = house.clock.now();
    expect((await refused(house.charge(asked))).code).toBe(code);
    const [row, ...others] = await shown(1);
    expect(others).toEqual([]);
    expect(row).toEqual({
      refusedAt: expect.any(String),
      portalId: house.portalId,
      code,
      referenceId: 'CASE-1',
      cardHash: expect.stringMatching(/^[0-9a-f]{64}$/),
      attempts: 1,
    });
    expect(Math.abs(Date.parse(row!.refusedAt) - at)).toBeLessThan(1_000);
    const { rows: stored } = await ground.pool.query<{ text: string }>('select r::text as text from refused_attempt r');
    for (const { text } of stored) expect(text).not.toMatch(/90001|4242424242|4000000000000002/);
  });

  test('the hash is that of the card on this portal: equal for the same card, and for no other card or portal', async () => {
    await ruled({ maxCents: 1 });
    for (const card of [CARDS.approved, CARDS.approved, CARDS.declined]) await refused(house.charge({ card }));
    const hashes = (await shown(3)).map(({ cardHash }) => cardHash!).sort();
    expect(new Set(hashes).size).toBe(2);
    // The one that two rows have is the hash of the card that was sent twice.
    const one = hashes[1]!;
    house = await openHouse(ground);
    await ruled({ maxCents: 1 });
    await refused(house.charge({ card: CARDS.approved }));
    expect((await shown(1))[0]!.cardHash).not.toBe(one);
  });

  test('other refusals, a decline, a success and a replay leave none', async () => {
    const key = house.key();
    expect((await house.chargeWithKey(key, { referenceId: 'CASE-1' })).status).toBe(200);
    await refused(house.charge({ card: CARDS.declined }));
    await refused(house.charge({ expiry: { month: 1, year: 2020 } }));
    await refused(house.charge({ portalId: house.ids.uuid() }));
    house.setCredentials(false);
    expect((await refused(house.charge())).code).toBe('GATEWAY_NOT_CONFIGURED');
    house.setCredentials(true);
    await restricted('block');
    // The stored answer is replayed, although the case is blocked now.
    expect(await house.chargeWithKey(key, { referenceId: 'CASE-1' })).toMatchObject({ status: 200, replayed: true });
    // The next row is the only one: those before it would be written with it, or earlier.
    await refused(house.charge({ referenceId: 'CASE-1' }));
    expect((await shown(1)).map(({ code }) => code)).toEqual(['PAYMENT_BLOCKED']);
  });

  test('each refusal of a key that was given back is an attempt of its own', async () => {
    await restricted('block');
    const key = house.key();
    for (let round = 0; round < 2; round++) expect((await house.chargeWithKey(key, { referenceId: 'CASE-1' })).status).toBe(403);
    expect(await shown(2)).toHaveLength(2);
  });

  test('the answer waits neither for a locked table nor for its failure', async () => {
    await ruled({ maxCents: 1 });
    const holder = await ground.pool.connect();
    try {
      await holder.query('begin; lock table refused_attempt in access exclusive mode');
      for (let round = 0; round < 3; round++) expect((await refused(house.charge())).code).toBe('PAYMENT_NOT_ALLOWED');
      await eventually(async () => (await ground.pool.query(`select from pg_locks where relation = 'refused_attempt'::regclass and not granted`)).rowCount === 1, SOON); // prettier-ignore
      expect((await refused(house.charge())).code).toBe('PAYMENT_NOT_ALLOWED');
    } finally {
      await holder.query('rollback');
      holder.release();
    }
    expect(await shown(4)).toHaveLength(4);
    await ground.pool.query('alter table refused_attempt rename to away');
    try {
      expect((await refused(house.charge())).code).toBe('PAYMENT_NOT_ALLOWED');
      await eventually(() => house.logged.some((line) => line.includes('refused attempts could not be written') && line.includes('"attempts":1')), SOON); // prettier-ignore
    } finally {
      await ground.pool.query('alter table away rename to refused_attempt');
    }
    // Later ones are written again.
    await refused(house.charge());
    expect(await shown(5)).toHaveLength(5);
  });
});

describe('rows', () => {
  let database: Awaited<ReturnType<typeof freshDatabase>>;
  let pool: Pool;
  const keys = newKeyRing();
  beforeAll(async () => {
    database = await freshDatabase();
    pool = createPool(database.url, { name: 'spec', max: 10 });
    await migrate(pool, [refusalMigration]);
  });
  afterAll(async () => {
    await pool.end();
    await database.drop();
  });
  beforeEach(async () => {
    await pool.query('truncate refused_attempt');
  });

  const warned: object[] = [];
  const START = '2026-03-01T10:00:00.000Z';
  /** A clock that stands still until it is moved, so that a second holds as many attempts as the spec wants. */
  const still = (startAt = START) => {
    let now = Date.parse(startAt);
    const clock = new MovableClock(startAt);
    return Object.assign(Object.create(clock) as MovableClock, {
      now: () => now,
      sleep: clock.sleep.bind(clock),
      to: (ms: number) => (now = Date.parse(startAt) + ms),
    });
  };
  const recorder = (clock = still()) => {
    const ids = systemIds(() => clock.now());
    const refusals = postgresRefusals(pool, keys, clock, ids, { warn: (fields: object) => void warned.push(fields) });
    const note = (portalId: string, code: Parameters<typeof refusals.note>[1] = 'VELOCITY_LIMIT', referenceId: string | null = 'CASE-1') =>
      refusals.note({ portalId, referenceId, instrument: { type: 'card_token', token: new Secret('tok_1') } }, code);
    return { note, stop: () => refusals.stop(), clock, ids };
  };
  const all = async (query: Partial<RefusalQuery> = {}) => (await listRefusals(pool, { ...ALL, ...query })).refusals;
  const times = (count: number, work: () => void) => {
    for (let round = 0; round < count; round++) work();
  };

  test('in a second, 10 attempts of a portal get a row each; the others are counted in one row for each code', async () => {
    const { note, stop, clock, ids } = recorder();
    const [busy, quiet] = [ids.uuid(), ids.uuid()];
    times(ROWS_A_SECOND, () => note(busy));
    times(20, () => note(busy));
    times(5, () => note(busy, 'PAYMENT_BLOCKED'));
    note(quiet);
    clock.to(1_000);
    note(busy);
    await stop();
    const rows = await all({ portalId: busy });
    expect(rows.filter(({ cardHash }) => cardHash !== null).map(({ refusedAt, attempts }) => [refusedAt, attempts])).toEqual([
      ['2026-03-01T10:00:01.000Z', 1],
      ...Array<unknown>(ROWS_A_SECOND).fill([START, 1]),
    ]);
    const counted = rows.filter(({ cardHash }) => cardHash === null);
    expect(counted.map(({ code, attempts, referenceId, refusedAt }) => [code, attempts, referenceId, refusedAt]).sort()).toEqual([
      ['PAYMENT_BLOCKED', 5, null, START],
      ['VELOCITY_LIMIT', 20, null, START],
    ]);
    expect(await all({ portalId: quiet })).toHaveLength(1);
  });

  test('the limit holds for all processes together, and for a second that is written in two parts', async () => {
    const [one, other] = [recorder(), recorder()];
    const portal = one.ids.uuid();
    times(8, () => one.note(portal));
    times(8, () => other.note(portal));
    await Promise.all([one.stop(), other.stop()]);
    const later = recorder();
    times(3, () => later.note(portal));
    await later.stop();
    const rows = await all({ portalId: portal });
    expect(rows.filter(({ cardHash }) => cardHash !== null)).toHaveLength(ROWS_A_SECOND);
    expect(rows.reduce((sum, { attempts }) => sum + attempts, 0)).toBe(19);
  });

  test('the buffer is bounded: further attempts are lost, and a warning has their number', async () => {
    warned.length = 0;
    const { note, stop, ids } = recorder();
    times(MAX_BUFFERED + 3, () => note(ids.uuid()));
    await stop();
    expect(await all({ limit: MAX_BUFFERED + 3 })).toHaveLength(MAX_BUFFERED);
    expect(warned).toEqual([{ attempts: 3 }]);
  });

  test('after the stop nothing is noted', async () => {
    const { note, stop, ids } = recorder();
    await stop();
    note(ids.uuid());
    await stop();
    expect(await all()).toEqual([]);
  });

  test('the list: newest first, by portal, reference and time, page by page', async () => {
    const { note, stop, clock, ids } = recorder();
    const [one, other] = [ids.uuid(), ids.uuid()];
    for (let second = 0; second < 7; second++) {
      clock.to(second * 1_000);
      note(second % 2 === 0 ? one : other, 'PAYMENT_HELD', `CASE-${second % 3}`);
    }
    await stop();
    const second = (number: number) => new Date(Date.parse(START) + number * 1_000).toISOString();
    const seconds = async (query: Partial<RefusalQuery>) =>
      (await all(query)).map(({ refusedAt }) => (Date.parse(refusedAt) - Date.parse(START)) / 1_000);
    expect(await seconds({})).toEqual([6, 5, 4, 3, 2, 1, 0]);
    expect(await seconds({ portalId: one })).toEqual([6, 4, 2, 0]);
    expect(await seconds({ referenceId: 'CASE-0' })).toEqual([6, 3, 0]);
    expect(await seconds({ portalId: other, referenceId: 'CASE-0' })).toEqual([3]);
    expect(await seconds({ from: second(2), to: second(5) })).toEqual([4, 3, 2]);
    const pages: number[] = [];
    let after: RefusalQuery['after'] = null;
    do {
      const page: Awaited<ReturnType<typeof listRefusals>> = await listRefusals(pool, { ...ALL, limit: 3, after });
      pages.push(page.refusals.length);
      after = page.next;
    } while (after);
    expect(pages).toEqual([3, 3, 1]);
  });

  test('rows older than 90 days are purged in pieces; younger rows stay', async () => {
    const now = Date.parse(START);
    await pool.query(
      `insert into refused_attempt (refused_at, id, portal_id, code)
       select $1::timestamptz - make_interval(secs => n), gen_random_uuid(), gen_random_uuid(), 'PAYMENT_HELD' from generate_series(-1, $2) as n`,
      [new Date(now - REFUSALS_KEPT_DAYS * DAY_MS).toISOString(), PURGE_BATCH + 1],
    );
    expect(await purgeRefusals(pool, now)).toBe(PURGE_BATCH + 1);
    expect(await all()).toHaveLength(2);
    // A purge that must stop ends after its piece.
    expect(await purgeRefusals(pool, now + DAY_MS, AbortSignal.abort())).toBe(2);
  });
});
