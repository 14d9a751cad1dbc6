/** Runs the contract of unfinished checkouts (test/support/unfinished-rows.contract.ts) on Postgres, and tests their figures. */
import { expect, test } from '@jest/globals';
import { randomUUID } from 'node:crypto';
import { paymentListModel, staffWorkModel } from '#payments';
import { createPool } from '#platform';
import { freshDatabase, makeTables } from '../../test/support/postgres.js';
import { unfinishedRowsContract } from '../../test/support/unfinished-rows.contract.js';
import { checkoutUnfinishedModel, postgresUnfinishedRows, unfinishedSessions } from './unfinished.js';

unfinishedRowsContract('Postgres’', async () => {
  const { url, drop } = await freshDatabase();
  const pool = createPool(url, { name: 'spec', max: 2 });
  await makeTables(pool, checkoutUnfinishedModel);
  return {
    rows: postgresUnfinishedRows(pool),
    close: async () => {
      await pool.end();
      await drop();
    },
  };
});

test('sessions whose payment waits for staff are not counted', async () => {
  const { url, drop } = await freshDatabase();
  const pool = createPool(url, { name: 'spec', max: 2 });
  for (const model of [checkoutUnfinishedModel, paymentListModel, staffWorkModel]) await makeTables(pool, model);
  const [withoutPayment, open, stuck] = [randomUUID(), randomUUID(), randomUUID()];
  await pool.query(
    `insert into payment_list (payment_id, account_id, portal_id, created_at, status, open_since, revision, state)
     select id, gen_random_uuid(), gen_random_uuid(), now(), 'unknown', now(), 1, '{}' from unnest($1::uuid[]) as id`,
    [[open, stuck]],
  );
  await pool.query(`insert into staff_task (payment_id, reason, raised_at) values ($1, 'charge_cannot_be_undone', now())`, [stuck]);
  const since = (secondsAgo: number) => new Date(Date.now() - secondsAgo * 1_000).toISOString();
  await postgresUnfinishedRows(pool).write([
    { checkoutId: 'a', paymentId: withoutPayment, since: since(10) },
    { checkoutId: 'b', paymentId: open, since: since(100) },
    { checkoutId: 'c', paymentId: stuck, since: since(100_000) },
  ]);
  const { count, oldestSeconds } = await unfinishedSessions(pool, Date.now());
  expect([count, Math.floor(oldestSeconds / 100)]).toEqual([2, 1]);
  await pool.end();
  await drop();
});
