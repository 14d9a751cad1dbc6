/** The place of a database in its own history: a database that went back, or that is another one, does not follow the place that was seen before. */
import { isRefused } from './errors.js';
import type { Queryable } from './pool.js';

export interface DatabasePlace {
  /** Of the cluster, drawn when it was made. */
  readonly systemId: string;
  /** Rises when a standby is promoted, or a backup is restored up to a point in time. */
  readonly timeline: string;
  /** Bytes of the write-ahead log that are on the disk. No commit that was acknowledged lies beyond it. */
  readonly position: string;
}

/** The control file lags behind a promotion, so the timeline comes from the name of the present file of the write-ahead log. */
const PLACE = `
  select (select system_identifier::text from pg_control_system()) as "systemId",
         case when not pg_is_in_recovery() then left(pg_walfile_name(pg_current_wal_lsn()), 8) end as timeline,
         case when not pg_is_in_recovery() then (pg_current_wal_flush_lsn() - '0/0')::text end as position`;

/** `standby`: the server replays the log of another one. `hidden`: the server lets this user not ask. */
export const databasePlace = async (db: Queryable): Promise<DatabasePlace | 'standby' | 'hidden'> => {
  try {
    const { rows } = await db.query<DatabasePlace & { timeline: string | null }>({ name: 'database-place', text: PLACE });
    return rows[0]!.timeline === null ? 'standby' : rows[0]!;
  } catch (error) {
    if (isRefused(error)) return 'hidden';
    throw error;
  }
};

/** True if a database at `later` may be the one that was at `earlier`. */
export const follows = (later: DatabasePlace, earlier: DatabasePlace): boolean =>
  later.systemId === earlier.systemId && later.timeline === earlier.timeline && BigInt(later.position) >= BigInt(earlier.position);
