/** The log of a process whose database goes away and comes back. */
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { Random } from '../../../apps/demo/city.js';
import { type Proxy, startProxy } from '../../../test/chaos/proxy.js';
import { eventually } from '../../../test/support/eventually.js';
import { freshDatabase } from '../../../test/support/postgres.js';
import { createLogger } from '../logging.js';
import { createPool, type Pool } from './pool.js';

let database: Awaited<ReturnType<typeof freshDatabase>>;
let proxy: Proxy;
let pool: Pool;
const lines: Record<string, unknown>[] = [];
const log = createLogger('info', 'spec', { write: (line) => lines.push(JSON.parse(line) as Record<string, unknown>) });
beforeAll(async () => {
  database = await freshDatabase();
  const url = new URL(database.url);
  proxy = await startProxy(Number(url.port), new Random(1));
  url.port = String(proxy.port);
  pool = createPool(url.href, { name: 'spec', max: 3 });
});
afterAll(async () => {
  await pool.end();
  await proxy.close();
  await database.drop();
});

/** Asks the database, as loops and requests do, and logs a failure. */
const tried = async (fields: object, message: string) => {
  try {
    await pool.query('select 1');
    return true;
  } catch (err) {
    log.warn({ ...fields, err: new Error('the work failed', { cause: err }) }, message);
    return false;
  }
};

test('one line when it goes, one when it is back, and every line about a payment', async () => {
  expect(await tried({}, 'a loop')).toBe(true);
  proxy.poison({ kind: 'down' });
  proxy.cut();
  for (let round = 0; round < 20; round += 1) await tried({}, 'a loop');
  expect(await tried({ paymentId: 'p1' }, 'a charge')).toBe(false);
  log.error({ err: new Error('a number is wrong') }, 'something else');
  proxy.heal();
  await eventually(async () => (await tried({}, 'a loop')) && lines.some(({ msg }) => msg === 'the database is back'), { timeoutMs: 10_000 });
  expect(lines.map(({ msg }) => msg)).toEqual(['the database is away', 'a charge', 'something else', 'the database is back']);
  expect(lines.at(-1)).toMatchObject({ seconds: expect.any(Number), leftOut: expect.any(Number) });
  expect(lines.at(-1)!.leftOut).toBeGreaterThanOrEqual(20);

  // A log of errors only hears of it, too.
  lines.length = 0;
  log.level = 'error';
  proxy.poison({ kind: 'down' });
  proxy.cut();
  await pool.query('select 1').catch((err: unknown) => log.error({ err }, 'a loop'));
  proxy.heal();
  await eventually(async () => (await tried({}, 'a loop')) && lines.some(({ msg }) => msg === 'the database is back'), { timeoutMs: 10_000 });
  expect(lines.map(({ msg }) => msg)).toEqual(['the database is away', 'the database is back']);
  log.level = 'info';

  // A statement that takes too long says nothing about the server.
  lines.length = 0;
  const slow = createPool(database.url, { name: 'spec', max: 1, statementTimeoutMs: 50 });
  await slow.query('select pg_sleep(1)').catch((err: unknown) => log.warn({ err }, 'too slow'));
  await slow.end();
  expect(lines.map(({ msg }) => msg)).toEqual(['too slow']);
});
