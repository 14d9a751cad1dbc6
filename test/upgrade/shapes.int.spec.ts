/**
 * The rows that each read model makes from the frozen history must not change. `shapes.json` has a SHA-256 of these rows for each model and shape. If
 * rows change, the shape must change too. Otherwise old and new rows would be mixed. Instructions: docs/changing.md#a-read-model.
 */
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import pg from 'pg';
import { checkpointOf, openEventStore, prepareReadModels, ReadModels, schemaOf, searchPathOf } from '#eventstore';
import { systemClock } from '#kernel';
import { createLogger, createPool, migrate, type Pool } from '#platform';
import { MIGRATIONS, READ_MODELS } from '../../apps/services.js';
import { freshDatabase } from '../support/postgres.js';
import { folderOf, loadRows } from './frozen.js';

/** The frozen release whose events are used here. It never changes, so the digests stay the same. */
const HISTORY = '0.1.0';
const KNOWN = JSON.parse(readFileSync(join(folderOf('.'), 'shapes.json'), 'utf8')) as Readonly<Record<string, string>>;

let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
beforeAll(async () => {
  database = await freshDatabase();
  const client = new pg.Client({ connectionString: database.url });
  await client.connect();
  await loadRows(client, HISTORY);
  await client.end();
  pool = createPool(database.url, { name: 'spec', max: 6, searchPath: searchPathOf(READ_MODELS) });
  const log = createLogger('silent', 'spec');
  await migrate(pool, MIGRATIONS);
  const store = await openEventStore(null, database.url, log);
  await prepareReadModels(pool, READ_MODELS, store);
  const models = new ReadModels(READ_MODELS, { store, pool, clock: systemClock, log });
  const head = (await store.head())!;
  for (const model of models.all()) await model.runUntil(head, { timeoutMs: 20_000 });
  await store.close();
});
afterAll(async () => {
  await pool?.end();
  await database?.drop();
});

const digestOf = async (schema: string, tables: readonly string[]): Promise<string> => {
  const hash = createHash('sha256');
  const client = await pool.connect();
  // Postgres writes times in the time zone of the session.
  await client.query(`set timezone to 'UTC'`);
  for (const table of tables) {
    const { rows } = await client.query<{ row: string }>(
      `select row_to_json(t)::text as row from ${schema}.${table} t order by row_to_json(t)::text collate "C"`,
    );
    hash.update(`${table}\n${rows.map(({ row }) => row).join('\n')}\n`);
  }
  client.release();
  return hash.digest('hex');
};

test.each(READ_MODELS.map((model) => [checkpointOf(model), model] as const))('%s makes the rows that it made before', async (shape, model) => {
  const digest = await digestOf(schemaOf(model), model.tables);
  const found = KNOWN[shape] ?? 'none';
  if (found === digest) return;
  throw new Error(
    `${shape} makes other rows than test/upgrade/shapes.json says: raise the shape of the model, then add "${shape.split('@')[0]}@<shape>": "${digest}" (docs/changing.md, A read model)`,
  );
});

test('there is no digest of a shape that was never', () => {
  const now = new Map(READ_MODELS.map(({ name, shape }) => [name, shape]));
  expect(Object.keys(KNOWN).filter((shape) => Number(shape.split('@')[1]) > (now.get(shape.split('@')[0]!) ?? 0))).toEqual([]);
});
