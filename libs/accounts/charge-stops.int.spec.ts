/** The stops of new charges, in a real Postgres. */
import { expect, test } from '@jest/globals';
import { createPool, migrate } from '#platform';
import { freshDatabase } from '../../test/support/postgres.js';
import { chargeStopMigration, postgresChargeStops } from './charge-stops.js';

test('a stop is kept once for each account, until it ends', async () => {
  const database = await freshDatabase();
  const pool = createPool(database.url, { name: 'spec', max: 2 });
  try {
    await migrate(pool, [chargeStopMigration]);
    const stops = postgresChargeStops(pool);
    const [water, parks] = (['water', 'parks'] as const).map((merchantAccount) => ({ gateway: 'authorize-net', merchantAccount }) as const);
    for (const account of [water!, parks!, water!]) await stops.stop(account);
    expect(await stops.all()).toEqual(expect.arrayContaining([water, parks]));
    await stops.end(water!);
    await stops.end(water!);
    expect(await stops.all()).toEqual([parks]);
  } finally {
    await pool.end();
    await database.drop();
  }
});
