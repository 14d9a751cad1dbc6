/** Looking for drift while the database goes away: the caller is told once, and nothing is left that nobody catches, which would end the worker. */
import { afterEach, beforeEach, expect, test } from '@jest/globals';
import { memoryEventStore } from '#eventstore';
import { createPool, migrate, type Pool } from '#platform';
import { MIGRATIONS } from '../../apps/services.js';
import { freshDatabase } from '../../test/support/postgres.js';
import { checkPayments } from './drift.js';

let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
beforeEach(async () => {
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'drift', max: 4 });
});
afterEach(async () => {
  await pool.end();
  await database.drop();
});

test('of several reads at once that all fail, none is left unhandled', async () => {
  await migrate(pool, MIGRATIONS);
  await pool.query('drop table payment_list, journal_payment, journal_entry, gateway_transaction cascade');
  const ids = ['01890000-0000-7000-8000-000000000000'];
  await expect(checkPayments({ store: memoryEventStore(), db: pool, now: () => Date.now() }, ids)).rejects.toThrow('does not exist');
  // Jest fails a test on a rejection that nobody catches; the others come within moments of the first.
  for (let turn = 0; turn < 3; turn++) await pool.query('select pg_sleep(0.02)');
});
