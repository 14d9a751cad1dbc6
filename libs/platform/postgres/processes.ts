/** The processes that use a database. Each process records its release and its read models, for `payfold upgrade`. */
import { hostname } from 'node:os';
import type { Clock } from '#kernel';
import { RELEASE } from '../release.js';
import type { Migration } from './schema.js';
import type { Queryable } from './pool.js';

export const processMigration: Migration = {
  name: '0012-process',
  sql: `
create table payfold_process (
  id uuid primary key,
  role text not null,
  release text not null,
  host text not null,
  pid int not null,
  -- Checkpoints of the read models that the process reads.
  read_models text[] not null,
  started_at timestamptz not null default clock_timestamp(),
  seen_at timestamptz not null default clock_timestamp()
);
`,
};

const HEARTBEAT_MS = 10_000;
/** A process that was not seen for this long counts as gone. */
const LIVES_SECONDS = 30;
const FORGOTTEN_AFTER = '1 day';

export interface LivingProcess {
  readonly id: string;
  readonly role: string;
  readonly release: string;
  readonly host: string;
  readonly pid: number;
  readonly readModels: readonly string[];
}

export interface ProcessRecord {
  /** Ends the heartbeat and deletes the record of the process. */
  stop(): Promise<void>;
}

export interface ProcessFacts {
  readonly id: string;
  readonly role: string;
  readonly pid: number;
  /** Checkpoints of the read models that the process reads. */
  readonly readModels: readonly string[];
  readonly clock: Clock;
  readonly release?: string;
}

/** Records this process, now and every 10 s. A failed heartbeat is ignored. */
export const recordProcess = async (db: Queryable, { id, role, pid, readModels, clock, release = RELEASE }: ProcessFacts): Promise<ProcessRecord> => {
  const beat = () =>
    db.query(
      `insert into payfold_process as p (id, role, release, host, pid, read_models) values ($1, $2, $3, $4, $5, $6)
       on conflict (id) do update set seen_at = clock_timestamp()`,
      [id, role, release, hostname(), pid, readModels],
    );
  await beat();
  await db.query(`delete from payfold_process where seen_at < clock_timestamp() - interval '${FORGOTTEN_AFTER}'`);
  const stopped = new AbortController();
  const beating = (async () => {
    for (;;) {
      await clock.sleep(HEARTBEAT_MS, stopped.signal);
      if (stopped.signal.aborted) return;
      await beat().catch(() => undefined);
    }
  })();
  return {
    stop: async () => {
      stopped.abort();
      await beating;
      await db.query('delete from payfold_process where id = $1', [id]).catch(() => undefined);
    },
  };
};

/**
 * Processes that were seen within the last 30 s, oldest release first. With `since`, a time of the database: processes that were seen later than 30 s
 * before `since`.
 */
export const livingProcesses = async (db: Queryable, since: Date | null = null): Promise<readonly LivingProcess[]> => {
  const { rows } = await db.query<LivingProcess>(
    `select id, role, release, host, pid, read_models as "readModels" from payfold_process
     where seen_at > coalesce($2, clock_timestamp()) - $1::int * interval '1 second' order by string_to_array(release, '.')::int[], started_at`,
    [LIVES_SECONDS, since],
  );
  return rows;
};

/** The time of the database, for {@link livingProcesses}. */
export const databaseTime = async (db: Queryable): Promise<Date> => {
  const { rows } = await db.query<{ now: Date }>('select clock_timestamp() as now');
  return rows[0]!.now;
};
