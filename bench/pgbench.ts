/** The yardstick: pgbench (Debian's package) doing durable single-row inserts with the event table's own shape and indexes, on the same Postgres, in the same minute. */
import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { Pool } from '#platform';

const CLIENTS = [16, 64];
const BATCHES_AT_ONCE = 2;
const SECONDS = 5;
const PAYLOAD_CHARACTERS = 700;

export interface Yardstick {
  readonly clients: number;
  readonly perSecond: number;
}

/** Figures without fsync are no figures. */
export const refuseWithoutFsync = async (pool: Pool): Promise<void> => {
  const { rows } = await pool.query<{ fsync: string; commit: string }>(
    `select current_setting('fsync') as fsync, current_setting('synchronous_commit') as commit`,
  );
  if (rows[0]!.fsync !== 'on' || rows[0]!.commit !== 'on') throw new Error('fsync or synchronous_commit is off; nothing measured here would be true');
};

export const printSettings = async (pool: Pool): Promise<void> => {
  const { rows } = await pool.query<{ version: string; fsync: string; commit: string; events: string }>(
    `select current_setting('server_version') as version, current_setting('fsync') as fsync, current_setting('synchronous_commit') as commit, (select count(*) from es.events) as events`,
  );
  const { version, fsync, commit, events } = rows[0]!;
  console.log(`Postgres ${version}, fsync ${fsync}, synchronous_commit ${commit}, ${events} events stored, Node ${process.version}\n`);
};

/** Best of 16 and 64 clients, one row to a commit; null, and a line that says so, where pgbench is missing. */
export const pgbenchBest = async (databaseUrl: string, pool: Pool): Promise<Yardstick | null> => {
  if (spawnSync('pgbench', ['--version']).status !== 0) {
    console.log('pgbench is not installed here (Debian: postgresql-contrib); no ratio');
    return null;
  }
  const results = [];
  for (const clients of CLIENTS) results.push({ clients, perSecond: await pgbench(databaseUrl, pool, clients, 1) });
  return results.reduce((best, one) => (one.perSecond > best.perSecond ? one : best));
};

/** Rows a second where `rows` share a commit, as those of a batch of appends or claims do. */
export const pgbenchTogether = (databaseUrl: string, pool: Pool, rows: number): Promise<number> => pgbench(databaseUrl, pool, BATCHES_AT_ONCE, rows);

/** Rows a second. */
const pgbench = async (databaseUrl: string, pool: Pool, clients: number, rowsPerCommit: number): Promise<number> => {
  await pool.query(`
    create table if not exists bench_insert (
      position bigint generated always as identity primary key, stream_id text not null, revision bigint not null, event_id uuid not null,
      type text not null, data json not null, meta json not null, stored_at timestamptz not null default clock_timestamp(), unique (stream_id, revision))`);
  const folder = mkdtempSync(join(tmpdir(), 'payfold-pgbench-'));
  try {
    const script = join(folder, 'insert.sql');
    const data = JSON.stringify({ text: 'x'.repeat(PAYLOAD_CHARACTERS - 12) });
    writeFileSync(
      script,
      `insert into bench_insert (stream_id, revision, event_id, type, data, meta) select 'payment-' || gen_random_uuid(), 0, gen_random_uuid(), 'PaymentCreated', '${data}', '{}' from generate_series(1, ${rowsPerCommit});\n`,
    );
    const run = spawnSync('pgbench', ['-n', '-M', 'prepared', '-c', String(clients), '-j', '2', '-T', String(SECONDS), '-f', script, databaseUrl], {
      encoding: 'utf8',
    });
    const perSecond = Number(/tps = ([\d.]+)/.exec(run.stdout)?.[1]);
    if (!perSecond) throw new Error(`pgbench: ${run.stderr}`);
    return perSecond * rowsPerCommit;
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
};
