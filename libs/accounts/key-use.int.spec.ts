import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { createPool, migrate, type Pool } from '#platform';
import { eventually } from '../../test/support/eventually.js';
import { freshDatabase } from '../../test/support/postgres.js';
import { apiKeyUseMigration, lastKeyUses, postgresKeyUse } from './key-use.js';

const START = Date.parse('2026-01-05T10:00:00.000Z');
const KEY = '018f0000-0000-7000-8000-000000000001';

let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
beforeAll(async () => {
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'spec', max: 2 });
  await migrate(pool, [apiKeyUseMigration]);
});
afterAll(async () => {
  await pool.end();
  await database.drop();
});

test('the last use of a key is written at most once a minute, by all replicas together', async () => {
  const time = { ms: START };
  const clock = { realNow: () => time.ms };
  let writes = 0;
  const counted = { query: ((...args: [string, unknown[]]) => ((writes += 1), pool.query(...args))) as unknown as Pool['query'] };
  const [one, other] = [postgresKeyUse(counted, clock), postgresKeyUse(counted, clock)];
  const lastUse = async () => (await lastKeyUses(pool, [KEY])).get(KEY);

  expect(await lastUse()).toBeUndefined();
  one.used(KEY);
  await eventually(async () => (await lastUse()) === '2026-01-05T10:00:00.000Z');
  time.ms += 59_999;
  one.used(KEY);
  expect(writes).toBe(1);
  other.used(KEY);
  await eventually(() => writes === 2);
  expect(await lastUse()).toBe('2026-01-05T10:00:00.000Z');
  time.ms = START + 60_000;
  one.used(KEY);
  await eventually(async () => (await lastUse()) === '2026-01-05T10:01:00.000Z');
});

test('a write that fails has no effect on the request', async () => {
  const errors: Error[] = [];
  const away = { query: (async () => Promise.reject(new Error('away'))) as unknown as Pool['query'] };
  postgresKeyUse(away, { realNow: () => START }, (error) => errors.push(error)).used(KEY);
  await eventually(() => errors.length === 1);
});
