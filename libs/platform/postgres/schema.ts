/**
 * Migrations make the tables that cannot be rebuilt from the log. Each lib has the migrations of its own tables. Read models have no migrations
 * (libs/eventstore/read-model.ts). How to add a migration: docs/changing.md.
 */
import { createHash } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import { compareReleases, RELEASE } from '../release.js';
import { isLockTimeout } from './errors.js';
import { type Client, type Pool, type Queryable, withoutLimits } from './pool.js';

/** Migrations run in the order of their names (`0010-event-store`). Name and SQL of a released migration must never change. */
export interface Migration {
  readonly name: string;
  readonly sql: string;
  /**
   * `expand` (default): runs at the start of a process, beside older processes. `contract`: runs only in `payfold upgrade finish`, when no older
   * process is alive.
   */
  readonly phase?: 'expand' | 'contract';
  /** The oldest release that works with the migrated database. Default: {@link FIRST_RELEASE}. */
  readonly needs?: string;
  /**
   * `transaction` (default): the SQL runs in one transaction. `concurrently`: one statement outside of a transaction, for `create index concurrently
   * if not exists`. `batches`: one statement that changes a bounded number of rows, repeated until it changes none.
   */
  readonly run?: 'transaction' | 'concurrently' | 'batches';
}

/** The oldest release that can be upgraded without a stop. */
const FIRST_RELEASE = '0.2.0';

/** Migrations of 0.1.0 that made tables of read models. This release ignores those tables; `payfold upgrade finish` drops them. */
const READ_MODELS_OF_0_1_0 = [
  '0020-directory',
  '0060-payment-list',
  '0070-payment-register',
  '0090-checkout-unfinished',
  '0100-journal',
  '0103-audit-key',
  '0104-settlement-case',
];

const MIGRATION_LOCK = 7_205_110;
const MIGRATION_LOCK_POLL_MS = 20;
/** Longest wait of a migration for a lock. Meanwhile every later statement on that table waits too. */
const LOCK_TIMEOUT = '2s';
const LOCK_TRIES = 30;
const LOCK_PAUSE_MS = 1_000;

export interface MigrateOptions {
  /** `expand` (default): only migrations of this phase run. `contract`: migrations of both phases run. */
  readonly phase?: 'expand' | 'contract';
  readonly release?: string;
  /** Ends the waits for locks and for another process that migrates. `migrate` then throws the reason of the signal. */
  readonly stop?: AbortSignal | undefined;
}

/**
 * Applies each migration once. The next run completes an interrupted run. Throws, and changes nothing, if the database needs a newer release, or if
 * the SQL of a migration differs from the applied SQL.
 */
export const migrate = async (
  pool: Pool,
  migrations: readonly Migration[],
  { phase = 'expand', release = RELEASE, stop }: MigrateOptions = {},
): Promise<void> => {
  const client = await pool.connect();
  try {
    // Unqualified table names mean `public`, whatever search path the pool has.
    await client.query('set search_path = public; set lock_timeout = 0');
    await lockMigrations(client, stop);
    await withoutLimits(client);
    await client.query(
      `create table if not exists payfold_migration (name text primary key, sha256 text not null, applied_at timestamptz not null default now());
       alter table payfold_migration add column if not exists needs text`,
    );
    const missing = missingOf(await appliedMigrations(client), migrations, release);
    for (const migration of missing) if (phase === 'contract' || migration.phase !== 'contract') await apply(client, migration, stop);
  } finally {
    // The connection is closed, because the lock and the settings of its session must not reach the next user.
    client.release(true);
  }
};

/**
 * Takes the lock that lets one process migrate at a time. Polls, because a waiting statement would block `create index concurrently` of the process
 * with the lock: a deadlock.
 */
const lockMigrations = async (client: Client, stop: AbortSignal | undefined): Promise<void> => {
  for (;;) {
    stop?.throwIfAborted();
    const { rows } = await client.query<{ locked: boolean }>('select pg_try_advisory_lock($1) as locked', [MIGRATION_LOCK]);
    if (rows[0]!.locked) return;
    await sleep(MIGRATION_LOCK_POLL_MS);
  }
};

interface Applied {
  readonly sha256: string;
  readonly needs: string | null;
}

const sha256Of = (sql: string): string => createHash('sha256').update(sql).digest('hex');

/** Migrations that are not applied yet, in order. Throws for a database that this release cannot use. */
const missingOf = (applied: ReadonlyMap<string, Applied>, migrations: readonly Migration[], release: string): readonly Migration[] => {
  const names = new Set([...migrations.map(({ name }) => name), ...READ_MODELS_OF_0_1_0]);
  for (const [name, { needs }] of applied)
    if (!names.has(name) && (needs === null || compareReleases(needs, release) > 0))
      throw new Error(
        `the database was written by a newer version of Payfold (migration ${name} is unknown here${needs === null ? '' : ` and needs release ${needs}`}); nothing was changed`,
      );
  for (const { name, sql } of migrations)
    if ((applied.get(name)?.sha256 ?? sha256Of(sql)) !== sha256Of(sql))
      throw new Error(
        `migration ${name} differs from the one that this database was made with; nothing was changed; a released migration never changes (docs/changing.md, A migration)`,
      );
  return [...migrations].sort((a, b) => (a.name < b.name ? -1 : 1)).filter(({ name }) => !applied.has(name));
};

const apply = async (
  client: Client,
  { name, sql, needs = FIRST_RELEASE, run = 'transaction' }: Migration,
  stop: AbortSignal | undefined,
): Promise<void> => {
  stop?.throwIfAborted();
  const record = () => client.query('insert into payfold_migration (name, sha256, needs) values ($1, $2, $3)', [name, sha256Of(sql), needs]);
  if (run === 'transaction')
    return withLockRetries(async () => {
      await client.query('begin');
      try {
        await client.query(`set local lock_timeout = '${LOCK_TIMEOUT}'`);
        await client.query(sql);
        await record();
        await client.query('commit');
      } catch (error) {
        await client.query('rollback');
        throw error;
      }
    }, stop);
  if (run === 'batches') while (((await client.query(sql)).rowCount ?? 0) > 0) stop?.throwIfAborted();
  else {
    await dropInvalidIndexes(client);
    await client.query(sql);
  }
  await record();
};

/** Drops the invalid indexes of interrupted builds. `create index if not exists` would treat such an index as finished. */
const dropInvalidIndexes = async (client: Client): Promise<void> => {
  const { rows } = await client.query<{ name: string }>(
    `select indexrelid::regclass::text as name from pg_index join pg_class c on c.oid = indexrelid where not indisvalid and c.relnamespace = 'public'::regnamespace`,
  );
  for (const { name } of rows) await client.query(`drop index concurrently if exists ${name}`);
};

const withLockRetries = async (work: () => Promise<void>, stop: AbortSignal | undefined): Promise<void> => {
  for (let tries = 1; ; tries++) {
    try {
      return await work();
    } catch (error) {
      if (!isLockTimeout(error) || tries >= LOCK_TRIES) throw error;
      await sleep(LOCK_PAUSE_MS, undefined, { signal: stop });
    }
  }
};

/** Names of the given migrations of one phase that are not applied yet. */
export const missingMigrations = async (
  db: Queryable,
  migrations: readonly Migration[],
  phase: 'expand' | 'contract' = 'expand',
): Promise<readonly string[]> => {
  const { rows } = await db.query<{ found: boolean }>(`select to_regclass('public.payfold_migration') is not null as found`);
  const applied = rows[0]!.found ? await appliedNames(db) : new Set<string>();
  return migrations.filter((migration) => (migration.phase ?? 'expand') === phase && !applied.has(migration.name)).map(({ name }) => name);
};

/** For readiness: true if every given migration of the phase `expand` is applied. */
export const isMigrated = async (db: Queryable, migrations: readonly Migration[]): Promise<boolean> =>
  (await missingMigrations(db, migrations)).length === 0;

const appliedNames = async (db: Queryable): Promise<ReadonlySet<string>> => {
  const { rows } = await db.query<{ name: string }>('select name from public.payfold_migration');
  return new Set(rows.map(({ name }) => name));
};

const appliedMigrations = async (db: Queryable): Promise<ReadonlyMap<string, Applied>> => {
  const { rows } = await db.query<Applied & { name: string }>('select name, sha256, needs from payfold_migration order by name');
  return new Map(rows.map((row) => [row.name, row]));
};
