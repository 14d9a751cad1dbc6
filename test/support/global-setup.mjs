/**
 * One real Postgres for the whole run, in a directory of its own; every spec makes its own database in it.
 * Jest loads this file without its module mapper, so it takes the built code (`npm test` builds first).
 */
import { mkdtemp } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { startEmbeddedPostgres } from '../../dist/libs/platform/postgres/embedded.js';

export default async function setup() {
  // A run of many short ones (mutation testing) brings its own Postgres.
  if (process.env.TEST_POSTGRES_URL) return;
  const directory = await mkdtemp(join(tmpdir(), 'payfold-test-'));
  // Specs of crashes start clusters of their own with fsync on. These databases are needed only for this run.
  const postgres = await startEmbeddedPostgres(join(directory, 'postgres'), { settings: { fsync: 'off' } });
  process.env.TEST_POSTGRES_URL = postgres.url;
  globalThis.testPostgres = { postgres, directory };
}
