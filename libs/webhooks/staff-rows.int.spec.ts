/** Runs the contract of the rows of webhooks (test/support/webhook-rows.contract.ts) on Postgres. */
import { eventStoreMigrations } from '#eventstore';
import { systemClock } from '#kernel';
import { createPool, migrate, transaction } from '#platform';
import { freshDatabase } from '../../test/support/postgres.js';
import { webhookRowsContract } from '../../test/support/webhook-rows.contract.js';
import { postgresDeliveries } from './deliveries.js';
import { postgresDueSignal } from './due.js';
import { webhookMigrations } from './migrations.js';
import { postgresOutboxRows } from './outbox.js';
import { postgresStaffTables } from './staff-rows.js';

webhookRowsContract('Postgres’', async () => {
  const { url, drop } = await freshDatabase();
  const pool = createPool(url, { name: 'spec', max: 6 });
  await migrate(pool, [...eventStoreMigrations, ...webhookMigrations]);
  return {
    tables: postgresStaffTables(pool),
    deliveries: postgresDeliveries(pool, 'spec'),
    due: postgresDueSignal(pool),
    outbox: (work) => transaction(pool, (client) => work(postgresOutboxRows(client))),
    eventIds: async () => (await pool.query<{ id: string }>('select id from webhook_event order by number')).rows.map(({ id }) => id),
    rows: async () => {
      const { rows } = await pool.query<{ id: string; eventId: string; endpointId: string; state: string; round: number }>(
        'select id::text as id, event_id as "eventId", endpoint_id as "endpointId", state, round from webhook_delivery d order by d.id',
      );
      return rows;
    },
    wait: (ms) => systemClock.sleep(ms),
    close: async () => {
      await pool.end();
      await drop();
    },
  };
});
