/** The rows of the processors' feeds, in a real Postgres. */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import type { GatewayAccount } from '#payments';
import { createPool, migrate, type Pool } from '#platform';
import { freshDatabase } from '../../test/support/postgres.js';
import { type FeedEnd, type FeedRows, feedsOf, forgetFeeds, gatewayFeedMigration, pauseAfter, postgresFeedRows } from './feeds.js';

const MINUTE_MS = 60_000;
const account = (gateway: string, merchantAccount: string): GatewayAccount => ({
  gateway,
  merchantAccount,
  credentialsRef: `merchant-account:${merchantAccount}`,
  environment: 'sandbox',
});
const WATER = account('stripe', 'water');

let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
let feeds: FeedRows;
beforeAll(async () => {
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'spec', max: 4 });
  await migrate(pool, [gatewayFeedMigration]);
  feeds = postgresFeedRows(pool);
});
afterAll(async () => {
  await pool.end();
  await database.drop();
});

/** Minutes from now until a worker reads the feed. */
const minutesToNext = async (): Promise<number> => {
  const [feed] = await feedsOf(pool, WATER.merchantAccount);
  return Math.round((Date.parse(feed!.nextAt) - Date.now()) / MINUTE_MS);
};

test('of many workers that come at once, one gets a feed; a person gets it always', async () => {
  const claims = await Promise.all(Array.from({ length: 8 }, () => feeds.claim(WATER, 'settlement', false)));
  expect(claims.filter((claim) => claim !== null)).toEqual([{ cursor: null, failures: 0, row: expect.any(String) }]);
  expect(await feeds.claim(WATER, 'settlement', false)).toBeNull();
  expect(await feeds.claim(WATER, 'settlement', true)).toEqual({ cursor: null, failures: 0, row: expect.any(String) });
  // Another feed and another account have turns of their own.
  expect(await feeds.claim(WATER, 'disputes', false)).not.toBeNull();
  expect(await feeds.claim(account('stripe', 'parks'), 'settlement', false)).not.toBeNull();
  await pool.query(`delete from gateway_feed where feed = 'disputes' or merchant_account = 'parks'`);
});

test('a claim of a worker that died ends by itself', async () => {
  await pool.query(`update gateway_feed set next_at = clock_timestamp() - interval '1 second'`);
  expect(await feeds.claim(WATER, 'settlement', false)).not.toBeNull();
});

test('the place is kept; failures lengthen the pause, and a reading to the end shortens it again', async () => {
  let claimed = (await feeds.claim(WATER, 'settlement', true))!;
  await feeds.passed(WATER, 'settlement', claimed, 'place-1');
  const pauses: number[] = [];
  for (let failure = 0; failure < 7; failure++) {
    await feeds.ended(WATER, 'settlement', claimed, { kind: 'failed', why: 'it is down' });
    pauses.push(await minutesToNext());
    claimed = (await feeds.claim(WATER, 'settlement', true))!;
  }
  expect(pauses).toEqual([15, 30, 60, 120, 240, 360, 360]);
  expect(claimed).toMatchObject({ cursor: 'place-1', failures: 7 });
  expect((await feedsOf(pool, 'water'))[0]).toMatchObject({ feed: 'settlement', lastOkAt: null, error: 'it is down' });
  await feeds.ended(WATER, 'settlement', claimed, { kind: 'read' });
  expect(await minutesToNext()).toBe(15);
  expect((await feedsOf(pool, null))[0]).toMatchObject({ merchantAccount: 'water', lastOkAt: expect.any(String), error: null });
  expect((await feeds.claim(WATER, 'settlement', true))!.failures).toBe(0);
});

describe('the pause', () => {
  const simulator = account('simulator', 'fake');
  const none = { cursor: null, failures: 0, row: '' };
  const often = { cursor: null, failures: 9, row: '' };
  test.each<[string, GatewayAccount, 'settlement' | 'disputes', FeedEnd, number]>([
    ['batches of a processor', WATER, 'settlement', { kind: 'read' }, 15 * MINUTE_MS],
    ['disputes', WATER, 'disputes', { kind: 'read' }, 60 * MINUTE_MS],
    ['batches of the simulator', simulator, 'settlement', { kind: 'read' }, 20_000],
    ['a batch that waits for a payment', WATER, 'settlement', { kind: 'waiting', why: 'w' }, MINUTE_MS],
    ['the same at the simulator', simulator, 'settlement', { kind: 'waiting', why: 'w' }, 20_000],
    ['a simulator that was away', simulator, 'settlement', { kind: 'failed', why: 'w' }, 20_000],
  ])('%s', (_, of, feed, end, ms) => expect(pauseAfter(of, feed, of === simulator ? often : none, end)).toBe(ms));
});

test('disputes that are open are remembered until they are decided', async () => {
  await feeds.disputeSeen(WATER, 'du_2', true);
  await feeds.disputeSeen(WATER, 'du_1', true);
  await feeds.disputeSeen(account('stripe', 'parks'), 'du_3', true);
  expect(await feeds.openDisputes(WATER)).toEqual(['du_1', 'du_2']);
  await feeds.disputeSeen(WATER, 'du_1', false);
  expect(await feeds.openDisputes(WATER)).toEqual(['du_2']);
});

test('after all feeds are forgotten, each begins anew', async () => {
  const before = (await feeds.claim(WATER, 'settlement', true))!;
  await forgetFeeds(pool);
  expect(await feeds.claim(WATER, 'settlement', false)).toMatchObject({ cursor: null, failures: 0 });
  // A worker that claimed the feed before cannot move the new place.
  await feeds.passed(WATER, 'settlement', before, 'place-9');
  expect((await feeds.claim(WATER, 'settlement', true))!.cursor).toBeNull();
});
