/**
 * The place of a database in its own history. It shows whether a database was set back to an earlier state, or exchanged for another one
 * ({@link follows}).
 */
import { isRefused } from './errors.js';
import type { Queryable } from './pool.js';

export interface DatabasePlace {
  /** The id that Postgres gave to the cluster when it was created. */
  readonly systemId: string;
  /** Rises when a standby is promoted, and when a backup is restored up to a point in time. */
  readonly timeline: string;
  /** Bytes of the write-ahead log that are on disk. Every commit that waited for the disk and was acknowledged lies before this position. */
  readonly position: string;
}

/** The timeline is read from the name of the current file of the write-ahead log, because the control file shows a promotion only later. */
const PLACE = `
  select (select system_identifier::text from pg_control_system()) as "systemId",
         case when not pg_is_in_recovery() then left(pg_walfile_name(pg_current_wal_lsn()), 8) end as timeline,
         case when not pg_is_in_recovery() then (pg_current_wal_flush_lsn() - '0/0')::text end as position`;

/**
 * `standby`: the server replays the log of another server. `hidden`: this user may not call the functions of the query, or the server does not have
 * them.
 */
export const databasePlace = async (db: Queryable): Promise<DatabasePlace | 'standby' | 'hidden'> => {
  try {
    const { rows } = await db.query<DatabasePlace & { timeline: string | null }>({ name: 'database-place', text: PLACE });
    return rows[0]!.timeline === null ? 'standby' : rows[0]!;
  } catch (error) {
    if (isRefused(error)) return 'hidden';
    throw error;
  }
};

/** True if a database that was at `earlier` can be at `later` now. */
export const follows = (later: DatabasePlace, earlier: DatabasePlace): boolean =>
  later.systemId === earlier.systemId && later.timeline === earlier.timeline && BigInt(later.position) >= BigInt(earlier.position);
