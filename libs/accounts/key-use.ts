/**
 * The time at which each API key was last used, for operators. The time is not exact: it is written at most once a minute, and no request waits for
 * the write.
 */
import type { Clock } from '#kernel';
import type { Migration, Queryable } from '#platform';

/** `if not exists`, because release 0.1.0 created this table in another migration. */
export const apiKeyUseMigration: Migration = {
  name: '0021-api-key-use',
  sql: 'create table if not exists api_key_use (key_id uuid primary key, last_used_at timestamptz not null)',
};

/** The shortest time between two writes for one key. */
export const KEY_USE_WRITE_MS = 60_000;

/** Called after every successful authentication with an API key. Must neither throw nor wait. */
export interface KeyUse {
  used(keyId: string): void;
}

/** Writes to Postgres. A failed write is passed to `onError` and not repeated. */
export const postgresKeyUse = (db: Queryable, clock: Pick<Clock, 'realNow'>, onError: (error: Error) => void = () => undefined): KeyUse => {
  const written = new Map<string, number>();
  return {
    used: (keyId) => {
      const now = clock.realNow();
      if (now - (written.get(keyId) ?? Number.NEGATIVE_INFINITY) < KEY_USE_WRITE_MS) return;
      written.set(keyId, now);
      // For each key, `written` limits this process to one write a minute. The `where` limits all processes together.
      db.query(
        `insert into api_key_use as k (key_id, last_used_at) values ($1::uuid, $2::timestamptz)
         on conflict (key_id) do update set last_used_at = excluded.last_used_at
         where k.last_used_at <= excluded.last_used_at - $3::int * interval '1 millisecond'`,
        [keyId, new Date(now).toISOString(), KEY_USE_WRITE_MS],
      ).catch(onError);
    },
  };
};

/** The last use of each key, RFC 3339, by key id. Keys that were never used are missing. */
export const lastKeyUses = async (db: Queryable, keyIds: readonly string[]): Promise<ReadonlyMap<string, string>> => {
  const { rows } = await db.query<{ key_id: string; last_used_at: Date }>(
    'select key_id, last_used_at from api_key_use where key_id = any ($1::uuid[])',
    [keyIds],
  );
  return new Map(rows.map(({ key_id, last_used_at }) => [key_id, last_used_at.toISOString()]));
};
