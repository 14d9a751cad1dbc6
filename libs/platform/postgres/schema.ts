/** The database schema: ordered migrations, contributed by the lib that owns the tables, applied once under a lock. */
import { createHash } from 'node:crypto';
import { type Pool, type Queryable, transaction } from './pool.js';

/** `name` orders and identifies (`0010-event-store`); the SQL of a shipped migration never changes. */
export interface Migration {
  readonly name: string;
  readonly sql: string;
}

const MIGRATION_LOCK = 7_205_110;

/**
 * Brings the database to the given migrations. Refuses, changing nothing, a database that was written by a newer version or whose
 * applied migrations differ from ours.
 */
export const migrate = async (pool: Pool, migrations: readonly Migration[]): Promise<void> => {
  await transaction(pool, async (client) => {
    await client.query('select pg_advisory_xact_lock($1)', [MIGRATION_LOCK]);
    await client.query(
      'create table if not exists payfold_migration (name text primary key, sha256 text not null, applied_at timestamptz not null default now())',
    );
    const applied = await appliedMigrations(client);
    const ordered = [...migrations].sort((a, b) => (a.name < b.name ? -1 : 1));
    for (const name of applied.keys())
      if (!ordered.some((migration) => migration.name === name))
        throw new Error(`the database was written by a newer version of Payfold (migration ${name} is unknown here); nothing was changed`);
    for (const { name, sql } of ordered) {
      const sha256 = createHash('sha256').update(sql).digest('hex');
      const found = applied.get(name);
      if (found === sha256) continue;
      if (found !== undefined) throw new Error(`migration ${name} differs from the one that this database was made with; nothing was changed`);
      await client.query(sql);
      await client.query('insert into payfold_migration (name, sha256) values ($1, $2)', [name, sha256]);
    }
  });
};

/** True when every given migration has been applied; for readiness. */
export const isMigrated = async (db: Queryable, migrations: readonly Migration[]): Promise<boolean> => {
  const applied = await appliedMigrations(db);
  return migrations.every(({ name }) => applied.has(name));
};

const appliedMigrations = async (db: Queryable): Promise<Map<string, string>> => {
  const { rows } = await db.query<{ name: string; sha256: string }>('select name, sha256 from payfold_migration order by name');
  return new Map(rows.map((row) => [row.name, row.sha256]));
};
