/**
 * Starts one real Postgres for the whole run. Every spec makes its own database in it. Jest loads this file without its module mapper, so it imports
 * the built code (`npm test` builds first).
 */
import { mkdtemp } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { startEmbeddedPostgres } from '../../dist/libs/platform/postgres/embedded.js';

export default async function setup() {
  // Mutation testing starts jest many times and has its own Postgres for all of these runs.
  if (process.env.TEST_POSTGRES_URL) return;
  const directory = await mkdtemp(join(tmpdir(), 'payfold-test-'));
  // The databases are needed only for this run, so fsync is off. Specs of crashes start their own Postgres with fsync on.
  // Three files at once may start a dozen processes, each with pools of its own, so 400 connections are allowed.
  const postgres = await startEmbeddedPostgres(join(directory, 'postgres'), { settings: { fsync: 'off', max_connections: '400' } });
  process.env.TEST_POSTGRES_URL = postgres.adminUrl;
  globalThis.testPostgres = { postgres, directory };
}
