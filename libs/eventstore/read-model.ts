/**
 * Read models: projections whose rows can be made again from the log.
 *
 * A change of the tables or of `apply` raises the number `shape`. The tables of each shape are in a schema of their own. So two releases with
 * different shapes can run side by side. How to add or change a model: docs/changing.md.
 */
import { createHash } from 'node:crypto';
import { type Clock, orStopped, ServiceError } from '#kernel';
import {
  type Client,
  databaseTime,
  livingProcesses,
  type Migration,
  type Pool,
  type Queryable,
  RELEASE,
  transaction,
  transactionOn,
  withoutLimits,
} from '#platform';
import { dropCheckpoint, lockCheckpoint, postgresCheckpoint, resetCheckpoint } from './checkpoint.js';
import type { EventStore, Mark, Position, Recorded } from './event-store.js';
import type { LogGate } from './own-log.js';
import {
  createSubscriber,
  eventsBetween,
  isTransient,
  type Projection,
  projectionPlace,
  readAhead,
  type Subscriber,
  type SubscriberOptions,
} from './subscriber.js';

export interface ReadModel extends Projection {
  /** Rises by one with every change of the tables, or of the rows that `apply` makes from the same events. */
  readonly shape: number;
  readonly tables: readonly string[];
  /** SQL that makes the tables, with unqualified names. Indexes, which make loading slow, belong in `createIndexes`. */
  readonly createTables: string;
  readonly createIndexes: string;
  /** True: `apply` also reads or changes other tables, so a rebuild never goes on from an earlier one. */
  readonly rebuildsAnew?: boolean;
  /** Fills the tables of a rebuild faster than `apply`, before they have indexes. Default: `apply` gets every event. */
  readonly load?: Load;
}

/** A rebuild reads the log in parts. Each part is one transaction, so that a rebuild can go on after the last whole part. */
export interface Load {
  /** Adds the events of one part to the rows of the parts before. Returns the number of events that it put aside for `addLate`. */
  add(client: Client, part: AsyncIterable<readonly Recorded[]>): Promise<number>;
  /**
   * Does work that needs the indexes, such as applying events that were put aside. Called after the indexes are made, each time in a transaction,
   * until it returns 0. Returns the number of events that it applied.
   */
  addLate?(client: Client): Promise<number>;
}

/** The shapes of a database, and whether each is built. */
export const readModelMigration: Migration = {
  name: '0013-read-model',
  sql: `
create table read_model (
  name text not null,
  shape int not null,
  -- Of the statements that made the tables.
  sha256 text not null,
  -- null: its first way through the log is not over.
  built_at timestamptz,
  used_at timestamptz not null default clock_timestamp(),
  primary key (name, shape)
);
`,
};

/** Drops tables and checkpoints of read models that release 0.1.0 made. This release ignores them. */
export const dropReadModelsOf010: Migration = {
  name: '0014-drop-read-models-of-0.1.0',
  phase: 'contract',
  sql: `
drop table if exists public.directory_account, public.directory_api_key, public.directory_portal, public.directory_grant, public.directory_case,
  public.payment_list, public.gateway_account, public.gateway_transaction, public.dispute, public.settlement_batch, public.settlement_begun,
  public.settlement_exception, public.checkout_unfinished, public.journal_entry, public.journal_payment, public.journal_period, public.journal_total,
  public.audit_key, public.settlement_case;
delete from projection_checkpoint
  where name in ('directory', 'payment-list', 'payment-register', 'checkout-unfinished', 'journal', 'audit-keys', 'exceptions');
delete from projection_failure
  where name in ('directory', 'payment-list', 'payment-register', 'checkout-unfinished', 'journal', 'audit-keys', 'exceptions');
`,
};

type Named = Pick<ReadModel, 'name' | 'shape'>;

export const schemaOf = ({ name, shape }: Named): string => `rm_${name.replaceAll('-', '_')}_${shape}`;
export const checkpointOf = ({ name, shape }: Named): string => `${name}@${shape}`;
/** Schema and checkpoint of the tables that a rebuild makes. */
const rebuildSchemaOf = (model: Named): string => `${schemaOf(model)}_new`;
const rebuildCheckpointOf = (model: Named): string => `${checkpointOf(model)} (rebuild)`;

/** `search_path` of a pool that reads these models. */
export const searchPathOf = (models: readonly Named[]): readonly string[] => [...models.map(schemaOf), 'public'];

const sha256Of = ({ createTables, createIndexes }: ReadModel): string =>
  createHash('sha256').update(`${createTables};${createIndexes}`).digest('hex');

const PREPARE_LOCK = 7_205_112;

/** Makes the empty tables of missing shapes. If the database has a shape with other SQL under the same number, throws and changes nothing. */
export const prepareReadModels = async (pool: Pool, models: readonly ReadModel[], store: Pick<EventStore, 'head'>): Promise<void> => {
  if ((await missingShapes(pool, models)).length === 0) return;
  const isEmpty = (await store.head()) === null;
  await transaction(pool, async (client) => {
    await client.query('select pg_advisory_xact_lock($1)', [PREPARE_LOCK]);
    for (const model of await missingShapes(client, models)) {
      const schema = schemaOf(model);
      await client.query(
        `create schema ${schema}; set local search_path = ${schema}; ${model.createTables}; ${model.createIndexes}; set local search_path = public`,
      );
      await client.query('insert into read_model (name, shape, sha256, built_at) values ($1, $2, $3, case when $4 then clock_timestamp() end)', [
        model.name,
        model.shape,
        sha256Of(model),
        isEmpty,
      ]);
    }
  });
};

/** Shapes that the database does not have. Throws if the SQL of an existing shape differs. */
export const missingShapes = async (db: Queryable, models: readonly ReadModel[]): Promise<readonly ReadModel[]> => {
  const { rows } = await db.query<{ name: string; shape: number; sha256: string }>('select name, shape, sha256 from public.read_model');
  return models.filter((model) => {
    const found = rows.find(({ name, shape }) => name === model.name && shape === model.shape);
    if (found && found.sha256 !== sha256Of(model))
      throw new Error(
        `read model ${model.name}: the database holds shape ${model.shape} with other tables; raise the number of the shape (docs/changing.md); nothing was changed`,
      );
    return !found;
  });
};

export interface ShapeStatus {
  readonly name: string;
  readonly shape: number;
  readonly isBuilt: boolean;
  readonly position: Position | null;
  /** RFC 3339: the last time at which a process used the shape, exact to the hour. */
  readonly usedAt: string;
}

/** Every shape of the database, those of other releases included. */
export const shapeStatus = async (db: Queryable): Promise<readonly ShapeStatus[]> => {
  const { rows } = await db.query<{ name: string; shape: number; is_built: boolean; position: string | null; used_at: Date }>(
    `select m.name, m.shape, m.built_at is not null as is_built, nullif(c.position, '') as position, m.used_at
     from public.read_model m left join projection_checkpoint c on c.name = m.name || '@' || m.shape order by m.name, m.shape`,
  );
  return rows.map(({ name, shape, is_built: isBuilt, position, used_at: usedAt }) => ({
    name,
    shape,
    isBuilt,
    position: position as Position | null,
    usedAt: usedAt.toISOString(),
  }));
};

/** A shape that no process has used for this long is dropped. */
const KEEP_UNUSED_DAYS = 7;

/** Drops shapes that no process has used for 7 days, except those of this release. Returns their schemas. */
export const dropUnusedShapes = async (pool: Pool, models: readonly ReadModel[]): Promise<readonly string[]> => {
  await pool.query(
    `update public.read_model set used_at = clock_timestamp()
     where name || '@' || shape = any ($1::text[]) or name || '@' || shape in (select unnest(read_models) from public.payfold_process)`,
    [models.map(checkpointOf)],
  );
  return transaction(pool, async (client) => {
    const { rows } = await client.query<{ name: string; shape: number }>(
      `delete from public.read_model where used_at < clock_timestamp() - $1::int * interval '1 day' returning name, shape`,
      [KEEP_UNUSED_DAYS],
    );
    for (const shape of rows) {
      await client.query(`drop schema if exists ${schemaOf(shape)} cascade; drop schema if exists ${rebuildSchemaOf(shape)} cascade`);
      for (const checkpoint of [checkpointOf(shape), rebuildCheckpointOf(shape)]) await dropCheckpoint(client, checkpoint);
    }
    return rows.map(schemaOf);
  });
};

/** A shape that is less than this time behind the log counts as built. */
const READY_LAG_MS = 2_000;
/** A model with `load` that lacks more events than this is rebuilt with `load`. */
const LOAD_FROM_EVENTS = 10_000;
const BUILD_RETRY_MS = 1_000;
const TELL_EVERY_MS = 10_000;
const OTHER_SHAPES_POLL_MS = 100;

export interface ReadModelsOptions extends Omit<SubscriberOptions, 'checkpoint'> {
  /** The pool for reads and writes of the models. Its `search_path` must name their schemas ({@link searchPathOf}). */
  readonly pool: Pool;
  readonly clock: Clock;
  /** Reports the progress of a build. `total`: events of all streams; null for KurrentDB, whose positions do not count events. */
  readonly onBuild?: (building: {
    readonly name: string;
    readonly shape: number;
    readonly events: number;
    readonly total: number | null;
    readonly secondsLeft: number | null;
  }) => void;
}

/** The read models of a process, each with its subscriber. */
export class ReadModels {
  private readonly subscribers: ReadonlyMap<string, Subscriber>;
  private built = false;

  constructor(
    readonly models: readonly ReadModel[],
    private readonly options: ReadModelsOptions,
  ) {
    this.subscribers = new Map(
      models.map((model) => [model.name, createSubscriber(model, { ...options, checkpoint: postgresCheckpoint(options.pool, checkpointOf(model)) })]),
    );
  }

  of({ name }: Pick<ReadModel, 'name'>): Subscriber {
    return this.subscribers.get(name)!;
  }

  all(): readonly Subscriber[] {
    return [...this.subscribers.values()];
  }

  /**
   * Builds missing shapes one after the other, and starts the subscriber of each model. Resolves when all shapes are built, or when `stop` aborts. If
   * several processes do this at the same time, one builds and the others wait.
   */
  async follow(stop: AbortSignal): Promise<void> {
    for (const model of this.models) {
      await this.loadIfFar(model, stop);
      if (stop.aborted) return;
      this.of(model).start();
    }
    while (!stop.aborted && !(await orStopped(this.areBuilt(), stop).catch(() => false))) await this.options.clock.sleep(BUILD_RETRY_MS, stop);
  }

  /** True if every shape is built, which means that it once was less than {@link READY_LAG_MS} behind the log. */
  async areBuilt(): Promise<boolean> {
    if (this.built) return true;
    const { pool } = this.options;
    const shapes = await shapeStatus(pool);
    let all = true;
    for (const model of this.models) {
      if (shapes.find(({ name, shape }) => name === model.name && shape === model.shape)?.isBuilt) continue;
      const { lagMs } = await this.of(model).status();
      if (lagMs !== null && lagMs < READY_LAG_MS) await markBuilt(pool, model);
      else all = false;
    }
    return (this.built = all);
  }

  /** Brings a model up to the present head and returns the head. null: the log is empty. Throws when the time is up. */
  async caughtUp(model: Pick<ReadModel, 'name'>, timeoutMs: number): Promise<Position | null> {
    const head = await this.options.store.head();
    if (head !== null) await this.of(model).runUntil(head, { timeoutMs });
    return head;
  }

  /**
   * Brings a model up to the position of a change, so that the next request reads the change. Also waits for processes of another release, which read
   * another shape. When the time is up, throws INVALID_STATE and names the process that still reads the old state. The change stays recorded. A
   * process that hangs during the wait still counts as alive.
   */
  async inForce(model: ReadModel, position: Position, timeoutMs: number): Promise<void> {
    const { pool, clock } = this.options;
    const until = clock.monotonic() + timeoutMs;
    const since = await databaseTime(pool);
    await this.of(model)
      .runUntil(position, { timeoutMs })
      .catch((error: unknown) => {
        throw new ServiceError('INVALID_STATE', `The change is recorded, but requests still read the state before it: ${(error as Error).message}.`);
      });
    for (;;) {
      const [behind] = await readersBehind(pool, model, position, since);
      if (!behind) return;
      if (clock.monotonic() >= until)
        throw new ServiceError(
          'INVALID_STATE',
          `The change is recorded, but process ${behind.pid} on ${behind.host} (${behind.role}, release ${behind.release}) still reads the state before it (${behind.checkpoint}). Start a worker of that release, or stop the process.`,
        );
      await clock.sleep(OTHER_SHAPES_POLL_MS);
    }
  }

  private async loadIfFar(model: ReadModel, stop: AbortSignal): Promise<void> {
    if (!model.load) return;
    const { store, pool, clock, onBuild } = this.options;
    while (!stop.aborted) {
      try {
        const shape = (await orStopped(shapeStatus(pool), stop)).find(({ name, shape: number }) => name === model.name && number === model.shape);
        const { lagEvents } = await orStopped(projectionPlace(store, postgresCheckpoint(pool, checkpointOf(model))), stop);
        if (!shape || shape.isBuilt || (lagEvents ?? Number.POSITIVE_INFINITY) <= LOAD_FROM_EVENTS) return;
        const started = clock.monotonic();
        let told = started;
        /** Events of an interrupted rebuild, which took none of this time. */
        let before: number | null = null;
        await rebuild(model, {
          store,
          pool,
          ...(this.options.ownLog && { ownLog: this.options.ownLog }),
          now: () => clock.realNow(),
          stop,
          onProgress: ({ events, total }) => {
            before ??= events;
            if (clock.monotonic() - told < TELL_EVERY_MS) return;
            told = clock.monotonic();
            const secondsLeft = total === null ? null : Math.ceil((((told - started) / 1_000) * (total - events)) / Math.max(1, events - before));
            onBuild?.({ name: model.name, shape: model.shape, events, total, secondsLeft });
          },
        });
        return;
      } catch (error) {
        if (stop.aborted) return;
        if (!(error instanceof RebuildRunning)) this.options.onError?.(error as Error, { name: model.name, retrying: true });
        await clock.sleep(BUILD_RETRY_MS, stop);
      }
    }
  }
}

/** The processes that read another shape of this model, which has not reached `position` yet. Only processes that were alive at `since` or later count. */
const readersBehind = async (db: Queryable, model: ReadModel, position: Position, since: Date) => {
  const others = (await livingProcesses(db, since)).flatMap((one) =>
    one.readModels
      .filter((checkpoint) => checkpoint.startsWith(`${model.name}@`) && checkpoint !== checkpointOf(model))
      .map((checkpoint) => ({ ...one, checkpoint })),
  );
  if (others.length === 0) return [];
  const { rows } = await db.query<{ name: string }>('select name from projection_checkpoint where name = any ($1::text[]) and position >= $2', [
    others.map(({ checkpoint }) => checkpoint),
    position,
  ]);
  return others.filter(({ checkpoint }) => !rows.some(({ name }) => name === checkpoint));
};

const markBuilt = (db: Queryable, { name, shape }: Named) =>
  db.query('update public.read_model set built_at = clock_timestamp() where name = $1 and shape = $2 and built_at is null', [name, shape]);

export interface RebuildReport {
  readonly name: string;
  readonly position: Position | null;
  readonly events: number;
  readonly seconds: number;
  /** Events of all streams between `position` and the head at the time of the swap. null for KurrentDB, whose positions do not count events. */
  readonly lagEvents: number | null;
  /** Rows of each table, live before the swap and rebuilt. Different numbers mean that the live rows were wrong. */
  readonly rows: readonly { readonly table: string; readonly live: number; readonly rebuilt: number }[];
}

/** If the last catch-up took no longer than this, the swap begins. The live projection waits during the swap, so few events may remain. */
const SWAP_LAG_MS = 1_000;
const CATCH_UP_MS = 10 * 60_000;
const SWAP_MS = 60_000;
const REBUILD_LOCK = 7_205_111;

/** Another process is rebuilding a read model of this database. */
export class RebuildRunning extends Error {
  constructor() {
    super('another rebuild is running');
    this.name = 'RebuildRunning';
  }
}

export interface RebuildOptions {
  store: EventStore;
  pool: Pool;
  now: () => number;
  /** The guard of the log. During an incident it refuses the begin and the swap. */
  ownLog?: LogGate;
  stop?: AbortSignal;
  /** A part ends with the batch that reaches this number of events. */
  partEvents?: number;
  /** Called after each transaction. `total`: events of all streams when the rebuild began; null for KurrentDB, whose positions do not count events. */
  onProgress?: (done: { events: number; position: Position; total: number | null }) => void;
}

/**
 * Builds the shape again beside the live one. The same handlers run from the start of the log into tables of another schema. When these tables have
 * caught up, they replace the live ones in one short transaction. Readers see the old rows or the new ones, never a mixture.
 *
 * The rebuild reads up to the head of the log, even if the live checkpoint lies beyond the head.
 *
 * Only one rebuild runs at a time per database ({@link RebuildRunning}). After an error, or after `stop` has aborted, the live tables are unchanged.
 * After a stop, a kill or a lost connection, the new tables stay, and the next rebuild of the shape goes on after their last whole part.
 */
export const rebuild = async (model: ReadModel, options: RebuildOptions): Promise<RebuildReport> => {
  const { pool, ownLog } = options;
  await ownLog?.verified(null);
  const guard = await pool.connect();
  // A connection that ends while it is idle only says so here.
  guard.on('error', () => undefined);
  try {
    const { rows } = await guard.query<{ free: boolean }>('select pg_try_advisory_lock($1) as free', [REBUILD_LOCK]);
    if (!rows[0]!.free) throw new RebuildRunning();
    try {
      return await rebuildAlone(model, options, guard);
    } finally {
      // The server notices a closed connection only later. So the lock is released first.
      await guard.query('select pg_advisory_unlock($1)', [REBUILD_LOCK]).catch(() => undefined);
    }
  } finally {
    guard.release(true);
  }
};

/** `guard`: a connection for short statements. It holds the lock of rebuilds. */
const rebuildAlone = async (model: ReadModel, options: RebuildOptions, guard: Client): Promise<RebuildReport> => {
  const { store, pool, now, ownLog, stop } = options;
  const live = schemaOf(model);
  const schema = rebuildSchemaOf(model);
  const checkpoint = checkpointOf(model);
  const shadow = rebuildCheckpointOf(model);
  const searchPath = `${schema}, public`;
  const started = now();
  const connections: Client[] = [];
  const sessions: number[] = [];
  const connect = async (path: string): Promise<Client> => {
    const connection = await pool.connect();
    connections.push(connection);
    await withoutLimits(connection);
    await connection.query(`set search_path = ${path}`);
    sessions.push(await sessionOf(connection));
    return connection;
  };
  let isClean = false;
  let goesOn = false;
  const unlessStopped = <T>(work: Promise<T>): Promise<T> => orStopped(work, stop);
  try {
    const client = await connect(searchPath);
    const head = await unlessStopped(store.head());
    const before = model.rebuildsAnew ? null : await unlessStopped(progressOf(client, model, { schema, shadow, head, ownLog }));
    const begun = before ?? (await unlessStopped(begin(client, model, schema)));
    const { events } = await fill(client, model, options, { begun, head, shadow });

    const follower = createSubscriber(model, { store, checkpoint: postgresCheckpoint(pool, shadow, { searchPath }), ...(ownLog && { ownLog }) });
    for (let lagMs = Number.POSITIVE_INFINITY; lagMs > SWAP_LAG_MS;) {
      const target = await unlessStopped(store.head());
      if (target === null) break;
      const before = now();
      await follower.runUntil(target, { timeoutMs: CATCH_UP_MS, stop });
      lagMs = now() - before;
    }

    // A connection that was idle during the load may be broken.
    const swapping = transactionOn(await connect('public'), async (swap) => {
      // This lock stops the live projection. Then the new tables get every event that the live projection has applied.
      const before = await lockCheckpoint(swap, checkpoint);
      const end = await unlessStopped(store.head());
      const reached = before?.position ?? null;
      if (reached !== null && end !== null) await follower.runUntil(reached < end ? reached : end, { timeoutMs: SWAP_MS, stop });
      const rebuilt = await lockCheckpoint(swap, shadow);
      const position = rebuilt?.position ?? head;
      const rows = [];
      for (const table of model.tables)
        rows.push({ table, live: await count(swap, `${live}.${table}`), rebuilt: await count(swap, `${schema}.${table}`) });
      await ownLog?.verified(null);
      await swap.query(
        `set local lock_timeout = '5s'; drop schema ${live} cascade; drop table ${schema}.${PROGRESS}; alter schema ${schema} rename to ${live}`,
      );
      await resetCheckpoint(swap, checkpoint, position, rebuilt?.last ?? null);
      await dropCheckpoint(swap, shadow);
      await markBuilt(swap, model);
      return { rows, position, lagEvents: end === null ? 0 : eventsBetween(position, end) };
    });
    const swapped = await unlessStopped(swapping);
    isClean = true;
    return { name: model.name, ...swapped, events, seconds: (now() - started) / 1000 };
  } catch (error) {
    // After another error, the next rebuild would meet it again. So it begins anew.
    goesOn = stop?.aborted === true || error instanceof RebuildRunning || isTransient(error);
    throw error;
  } finally {
    // After a stop or a failure, a COPY or the build of an index may still run and hold locks. The server would notice a closed connection only at
    // the end of the statement, so the sessions are terminated.
    if (!isClean) await guard.query('select pg_terminate_backend(pid) from unnest($1::int[]) pid', [sessions]).catch(() => undefined);
    for (const connection of connections) connection.release(true);
    if (!isClean && !goesOn) await guard.query(`drop schema if exists ${schema} cascade`).catch(() => undefined);
  }
};

/** The table of {@link Progress}, in the schema of the new tables. */
const PROGRESS = 'rebuild_progress';
/** Default of {@link RebuildOptions.partEvents}. A load may hold the events of a part in memory. */
const PART_EVENTS = 20_000;

/**
 * How far a rebuild came. `rows`: it reads the log. `late`: it applies the events that were put aside. `level`: a subscriber applies newer events and
 * moves the checkpoint.
 */
interface Progress {
  readonly stage: 'rows' | 'late' | 'level';
  /** The last event that was read. null: none yet. */
  readonly last: Mark | null;
  /** Number of events that were applied before stage `level`. */
  readonly events: number;
}

/** Makes the new tables. Drops those of a rebuild that cannot go on. */
const begin = (client: Client, model: ReadModel, schema: string): Promise<Progress> =>
  transactionOn(client, async () => {
    await client.query(
      `drop schema if exists ${schema} cascade; create schema ${schema}; ${model.createTables}; ${model.load ? '' : model.createIndexes};
       create table ${PROGRESS} (release text not null, sha256 text not null, stage text not null, position text collate "C", id uuid, events bigint not null)`,
    );
    await client.query(`insert into ${PROGRESS} values ($1, $2, 'rows', null, null, 0)`, [RELEASE, sha256Of(model)]);
    return { stage: 'rows', last: null, events: 0 };
  });

/** Where an interrupted rebuild of the same release and tables goes on. null: there is none, or it read events that this log does not hold. */
const progressOf = async (
  client: Client,
  model: ReadModel,
  { schema, shadow, head, ownLog }: { readonly schema: string; readonly shadow: string; readonly head: Position | null; readonly ownLog?: LogGate },
): Promise<Progress | null> => {
  const { rowCount } = await client.query('select where to_regclass($1) is not null', [`${schema}.${PROGRESS}`]);
  if (rowCount === 0) return null;
  const { rows } = await client.query<{
    stage: Progress['stage'];
    position: Position | null;
    id: string | null;
    events: string;
    reached: string | null;
  }>(
    `select stage, position, id, events, (select c.position from projection_checkpoint c where c.name = $2) as reached from ${PROGRESS}
     where release = $1 and sha256 = $3`,
    [RELEASE, shadow, sha256Of(model)],
  );
  if (!rows[0]) return null;
  const { stage, position, id, events, reached } = rows[0];
  const last = position === null ? null : { position, id: id! };
  const furthest = stage === 'level' ? reached : position;
  if (stage === 'level' && reached === null) return null;
  if (furthest !== null && (head === null || furthest > head)) return null;
  if (last && ownLog && !(await ownLog.verifiedRead(last))) return null;
  return { stage, last, events: Number(events) };
};

/**
 * Fills the new tables in parts and makes their indexes. If it begins in stage `rows`, it reads up to `head`. Then the checkpoint `shadow` records the
 * progress. Returns the progress.
 */
const fill = async (
  client: Client,
  model: ReadModel,
  { store, stop, partEvents = PART_EVENTS, onProgress }: RebuildOptions,
  { begun, head, shadow }: { readonly begun: Progress; readonly head: Position | null; readonly shadow: string },
): Promise<Progress> => {
  const total = head === null ? null : eventsBetween(null, head);
  const load = model.load ?? { add: (one: Client, part: AsyncIterable<readonly Recorded[]>) => applyAll(model, one, part) };
  let now = begun;
  /**
   * Runs `work` in one transaction and saves the progress that it returns. If `work` fails, a COPY may be open, and a rollback would wait for it. So
   * the server rolls back when the session ends.
   */
  const step = async (work: () => Promise<Progress>): Promise<void> => {
    const done = async () => {
      await client.query('begin');
      await ownStep();
      const then = await work();
      const { stage, last, events } = then;
      await client.query(`update ${PROGRESS} set stage = $1, position = $2, id = $3, events = $4`, [stage, last?.position, last?.id, events]);
      await client.query('commit');
      return then;
    };
    now = await orStopped(done(), stop);
    if (now.last) onProgress?.({ events: now.events, position: now.last.position, total });
  };

  /**
   * Locks the progress for this transaction. Another rebuild may have moved it: the lock of rebuilds ends with its connection, and a commit of a process
   * that was killed may still be under way.
   */
  const ownStep = async (): Promise<void> => {
    const { rowCount } = await client.query(
      `select from ${PROGRESS} where stage = $1 and position is not distinct from $2 and events = $3 for update`,
      [now.stage, now.last?.position, now.events],
    );
    if (rowCount !== 1) throw new RebuildRunning();
  };

  if (now.stage === 'rows' && head !== null) {
    const prefixes = model.streamPrefixes ? { streamPrefixes: model.streamPrefixes } : {};
    const source = readAhead(store.readAll(now.last?.position ?? null, { until: head, ...prefixes }), stop);
    try {
      for (let ended = false; !ended;)
        await step(async () => {
          let { last } = now;
          let read = 0;
          const part = async function* () {
            while (read < partEvents) {
              const next = await source.next();
              if (next.done) {
                ended = true;
                return;
              }
              const events = next.value;
              read += events.length;
              last = { position: events.at(-1)!.position, id: events.at(-1)!.id };
              // The fold of a batch does not yield to the event loop. This pause lets the request for the next page go out first.
              await new Promise((turned) => setImmediate(turned));
              yield events;
            }
          };
          const aside = await load.add(client, part());
          return { stage: 'rows', last, events: now.events + read - aside };
        });
    } finally {
      const closed = source.return();
      // After a stop, a read may be in flight. It ends by its own time limit.
      if (stop?.aborted) closed.catch(() => undefined);
      else await closed;
    }
  }
  if (now.stage === 'rows')
    await step(async () => {
      if (model.load) await client.query(model.createIndexes);
      return { ...now, stage: 'late' };
    });
  for (let applied = Number.POSITIVE_INFINITY; load.addLate && now.stage === 'late' && applied > 0;)
    await step(async () => {
      applied = await load.addLate!(client);
      return { ...now, events: now.events + applied };
    });
  if (now.stage === 'late') {
    await orStopped(client.query(`analyze ${model.tables.join(', ')}`), stop);
    await step(async () => {
      // The rows of a rebuild that goes on here may end before `head`.
      await resetCheckpoint(client, shadow, begun.stage === 'rows' ? head : (now.last?.position ?? null), now.last);
      return { ...now, stage: 'level' };
    });
  }
  return now;
};

const applyAll = async (model: ReadModel, client: Client, part: AsyncIterable<readonly Recorded[]>): Promise<number> => {
  for await (const events of part) await model.apply(client, events);
  return 0;
};

const sessionOf = async (client: Client): Promise<number> => (await client.query<{ pid: number }>('select pg_backend_pid() as pid')).rows[0]!.pid;

const count = async (client: Client, table: string): Promise<number> => {
  const { rows } = await client.query<{ count: string }>(`select count(*) as count from ${table}`);
  return Number(rows[0]!.count);
};
