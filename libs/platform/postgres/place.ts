/**
 * The place of a database in its own history. Two places show whether the database was restored to an earlier state or exchanged ({@link follows}).
 */
import { isRefused } from './errors.js';
import type { Queryable } from './pool.js';

export interface DatabasePlace {
  /** The id that Postgres gave to the cluster when it was created. */
  readonly systemId: string;
  /** Changes when a standby is promoted, and when a backup is restored up to a point in time. */
  readonly timeline: string;
  /** Number of bytes of the write-ahead log that are on disk. Every acknowledged commit that waited for the disk is among these bytes. */
  readonly position: string;
  /** When the server started, as Postgres writes it. A restart does not end the history of a database, but may lose its last commits. */
  readonly startedAt: string;
}

/** The timeline comes from the name of the current WAL file, because the control file shows a promotion only later. */
const PLACE = `
  select (select system_identifier::text from pg_control_system()) as "systemId",
         case when not pg_is_in_recovery() then left(pg_walfile_name(pg_current_wal_lsn()), 8) end as timeline,
         case when not pg_is_in_recovery() then (pg_current_wal_flush_lsn() - '0/0')::text end as position,
         pg_postmaster_start_time()::text as "startedAt"`;

/** `standby`: the server is a standby. `hidden`: this user may not call the functions of the query, or the server does not have them. */
export const databasePlace = async (db: Queryable): Promise<DatabasePlace | 'standby' | 'hidden'> => {
  try {
    const { rows } = await db.query<DatabasePlace & { timeline: string | null }>({ name: 'database-place', text: PLACE });
    return rows[0]!.timeline === null ? 'standby' : rows[0]!;
  } catch (error) {
    if (isRefused(error)) return 'hidden';
    throw error;
  }
};

/** True if the database can have moved from `earlier` to `later` without a restore, an exchange or a failover. */
export const follows = (later: DatabasePlace, earlier: DatabasePlace): boolean =>
  later.systemId === earlier.systemId && later.timeline === earlier.timeline && BigInt(later.position) >= BigInt(earlier.position);
