import { expect, test } from '@jest/globals';
import { createPool } from '#platform';
import { freshDatabase } from './postgres.js';

test('a spec gets a database of its own', async () => {
  const database = await freshDatabase();
  const pool = createPool(database.url, { name: 'spec', max: 1 });
  const { rows } = await pool.query('select 1 as one');
  expect(rows).toEqual([{ one: 1 }]);
  await pool.end();
  await database.drop();
});
