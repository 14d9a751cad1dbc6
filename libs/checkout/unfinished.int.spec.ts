/** Runs the contract of unfinished checkouts (test/support/unfinished-rows.contract.ts) on Postgres. */
import { createPool } from '#platform';
import { freshDatabase, makeTables } from '../../test/support/postgres.js';
import { unfinishedRowsContract } from '../../test/support/unfinished-rows.contract.js';
import { checkoutUnfinishedModel, postgresUnfinishedRows } from './unfinished.js';

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
