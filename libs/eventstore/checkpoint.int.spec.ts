/** The contract of checkpoints, on Postgres. */
import { systemClock } from '#kernel';
import { createPool, migrate } from '#platform';
import { checkpointContract } from '../../test/support/checkpoint.contract.js';
import { freshDatabase } from '../../test/support/postgres.js';
import { postgresCheckpoint } from './checkpoint.js';
import { eventStoreMigrations } from './index.js';

checkpointContract(
  'Postgres’',
  async () => {
    const { url, drop } = await freshDatabase();
    const pool = createPool(url, { name: 'spec', max: 12 });
    await migrate(pool, eventStoreMigrations);
    await pool.query('create table written (nth bigserial, name text not null, entry text not null)');
    return {
      checkpoint: (name) => postgresCheckpoint(pool, name),
      write: (client, name, row) => client.query('insert into written (name, entry) values ($1, $2)', [name, row]),
      rows: async (name) =>
        (await pool.query<{ entry: string }>('select entry from written where name = $1 order by nth', [name])).rows.map(({ entry }) => entry),
      pass: (ms) => pool.query(`update projection_checkpoint set lease_until = lease_until - $1::int * interval '1 millisecond'`, [ms]),
      wait: (ms) => systemClock.sleep(ms),
      close: async () => {
        await pool.end();
        await drop();
      },
    };
  },
  25,
);
