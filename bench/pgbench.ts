/**
 * The yardstick of the benchmarks: pgbench (Debian's package) inserts single rows durably. It uses the columns and indexes of the event table, on the
 * same Postgres and in the same minute.
 */
import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { NewEvent } from '#eventstore';
import type { Pool } from '#platform';

/** pgbench runs with each of these numbers of clients, and the better result counts. Often pgbench is faster with more clients than cores. */
export const CLIENTS = [16, 64] as const;
const BATCHES_AT_ONCE = 2;
const SECONDS = 5;

/** About 700 bytes of JSON, the size of a PaymentInitiated. */
export const SAMPLE: Pick<NewEvent, 'data' | 'meta'> = {
  data: {
    paymentId: '0190c1f2-8f52-7b3e-9c61-2f0d8a6b7c11',
    confirmationNumber: '7K3M-Q9ZD-4T',
    portalId: '0190c1f2-8f52-7b3e-9c61-2f0d8a6b7c12',
    referenceId: 'CASE-2026-000123',
    lines: [
      { lineId: '1', description: 'Citation 4471-A', amountCents: 12_500 },
      { lineId: '2', description: 'Late fee', amountCents: 2_500 },
    ],
    principalCents: 15_000,
    feeCents: 425,
    chargeMode: 'separate',
    feeVersion: 3,
    card: { brand: 'visa', last4: '4242', expiry: '2029-04' },
    references: { principal: 'c-0190c1f2-principal-1', fee: 'c-0190c1f2-fee-1' },
  },
  meta: {
    recordedAt: '2026-01-02T03:04:05.678Z',
    actor: { type: 'partner', id: '0190c1f2-8f52-7b3e-9c61-2f0d8a6b7c13' },
    correlationId: '0190c1f2-8f52-7b3e-9c61-2f0d8a6b7c14',
  },
};
const META = JSON.stringify({ v: 1, ...SAMPLE.meta });
export const SAMPLE_BYTES = Buffer.byteLength(JSON.stringify(SAMPLE.data)) + Buffer.byteLength(META);

export interface Yardstick {
  readonly clients: number;
  readonly perSecond: number;
}

/** Throws if Postgres does not fsync. Its figures would mean nothing. */
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

/** The better result of 16 and 64 clients, with one row per commit. null if pgbench is missing. */
export const pgbenchBest = async (databaseUrl: string, pool: Pool): Promise<Yardstick | null> => {
  let best: Yardstick | null = null;
  for (const clients of CLIENTS) {
    const perSecond = await pgbench(databaseUrl, pool, { clients });
    if (perSecond === null) {
      console.log('pgbench is not installed here (Debian: postgresql-contrib); no ratio');
      return null;
    }
    if (!best || perSecond > best.perSecond) best = { clients, perSecond };
  }
  return best;
};

/** Rows per second with `rows` rows per commit, as in a batch of appends or claims. null if pgbench is missing. */
export const pgbenchTogether = (databaseUrl: string, pool: Pool, rows: number): Promise<number | null> =>
  pgbench(databaseUrl, pool, { clients: BATCHES_AT_ONCE, rowsPerCommit: rows });

/**
 * Rows per second. null if pgbench is missing. A row has the columns, indexes and size of an event. Its position comes from a sequence, the cheapest
 * source in Postgres.
 */
export const pgbench = async (
  databaseUrl: string,
  pool: Pool,
  { clients, rowsPerCommit = 1, seconds = SECONDS }: { clients: number; rowsPerCommit?: number; seconds?: number },
): Promise<number | null> => {
  await pool.query(`
    create table if not exists public.bench_insert (
      position bigint generated always as identity primary key, stream_id text collate "C" not null, revision bigint not null, event_id uuid not null,
      type text not null, data json not null, meta json not null, stored_at timestamptz not null default clock_timestamp(), unique (stream_id, revision))`);
  const folder = mkdtempSync(join(tmpdir(), 'payfold-pgbench-'));
  try {
    const script = join(folder, 'insert.sql');
    // pgbench reads a colon before a letter as the start of a variable. This script has no colon before a letter.
    writeFileSync(
      script,
      `insert into public.bench_insert (stream_id, revision, event_id, type, data, meta) select 'payment-' || gen_random_uuid(), 0, gen_random_uuid(), 'PaymentInitiated', '${JSON.stringify(SAMPLE.data)}', '${META}' from generate_series(1, ${rowsPerCommit});\n`,
    );
    const run = spawnSync('pgbench', ['-n', '-M', 'prepared', '-c', String(clients), '-j', '2', '-T', String(seconds), '-f', script, databaseUrl], {
      encoding: 'utf8',
    });
    const failure: NodeJS.ErrnoException | undefined = run.error;
    if (failure?.code === 'ENOENT') return null;
    const perSecond = Number(/tps = ([\d.]+)/.exec(run.stdout)?.[1]);
    if (!perSecond) throw new Error(`pgbench: ${run.stderr}`);
    return perSecond * rowsPerCommit;
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
};
