/** The log of the installation, its schema and its read models, for Nest (`#eventstore/module`). */
import { pid } from 'node:process';
import { type DynamicModule, Global, Module } from '@nestjs/common';
import {
  cardInTextCheck,
  createPersonalKeys,
  OPENED_KEYS_KEPT_MS,
  migrate,
  type Migration,
  missingMigrations,
  type PersonalKeys,
  type Pool,
  postgresPersonalKeyRows,
  type Queryable,
  recordProcess,
  refuseMovedTime,
} from '#platform';
import { ProcessContext } from '#platform/module';
import { postgresCheckpoint } from './checkpoint.js';
import { type EventStore, OutcomeUnknown, Unavailable } from './event-store.js';
import type { SealedPlace } from './installation.js';
import { openOwnLog } from './open.js';
import type { OwnLog } from './own-log.js';
import { checkpointOf, missingShapes, prepareReadModels, type ReadModel, ReadModels, searchPathOf } from './read-model.js';
import { createSubscriber, type Projection, type Subscriber } from './subscriber.js';

/**
 * Connections for the reads and writes of requests. Projections and idempotency keys have pools of their own. Slow list requests cannot use up those
 * connections.
 */
const POOL_CONNECTIONS = 20;
const PROJECTION_POOL_CONNECTIONS = 8;
const CHECK_POOL_CONNECTIONS = 2;
/** Keys of personal data have connections of their own, so that slow lists do not hold up a create that needs a block. */
const PERSONAL_POOL_CONNECTIONS = 4;

export const EVENT_STORE = Symbol('event store');
/** The pool for requests. Its database has the schema of this release. */
export const POOL = Symbol('pool');
/** Makes the subscriber of a reactor. The effects of a reactor cannot be made again from the log. */
export const REACTOR = Symbol('reactor');
/** The keys of personal data of this process, with the number of keys that it found missing. */
export const PERSONAL_KEYS = Symbol('personal keys');
export type CountedPersonalKeys = PersonalKeys & { readonly missing: number };
export type OpenReactor = (projection: Projection) => Subscriber;

/** The time of this process's last append with the error Unavailable or OutcomeUnknown, on the monotonic clock. */
export class Appends {
  failedAt = Number.NEGATIVE_INFINITY;
}

interface Storage {
  readonly pool: Pool;
  readonly log: OwnLog;
}
const STORAGE = Symbol('storage');
/** The guard of the log. It refuses work while the log is not ours or not whole. */
export const LOG_GATE = Symbol('log gate');

export interface Schema {
  readonly migrations: readonly Migration[];
  readonly readModels: readonly ReadModel[];
  /** The last event that the seal covers. */
  readonly sealedEnd: (db: Queryable) => Promise<SealedPlace | null>;
  /** The last event that the newest signed head covers. */
  readonly signedEnd: (context: ProcessContext, pool: Pool) => Promise<SealedPlace | null>;
}

@Global()
@Module({})
export class EventStoreModule {
  static of(schema: Schema): DynamicModule {
    const providers = [
      Appends,
      {
        provide: STORAGE,
        inject: [ProcessContext],
        useFactory: (context: ProcessContext) => open(context, schema),
      },
      { provide: POOL, inject: [STORAGE], useFactory: ({ pool }: Storage) => pool },
      { provide: LOG_GATE, inject: [STORAGE], useFactory: ({ log }: Storage) => log },
      {
        provide: EVENT_STORE,
        inject: [ProcessContext, STORAGE, Appends],
        useFactory: ({ clock }: ProcessContext, { log }: Storage, appends: Appends) =>
          watchAppends(log, () => (appends.failedAt = clock.monotonic())),
      },
      {
        provide: PERSONAL_KEYS,
        inject: [ProcessContext, STORAGE],
        useFactory: (context: ProcessContext) => openPersonalKeys(context),
      },
      {
        provide: SUBSCRIBING,
        inject: [ProcessContext, EVENT_STORE, LOG_GATE],
        useFactory: (context: ProcessContext, store: EventStore, log: OwnLog) => subscribing(context, store, log, schema),
      },
      {
        provide: ReadModels,
        inject: [SUBSCRIBING, ProcessContext],
        useFactory: (options: Subscribing, { log }: ProcessContext) =>
          new ReadModels(schema.readModels, { ...options, onBuild: (building) => log.info(building, 'a read model is being built') }),
      },
      {
        provide: REACTOR,
        inject: [SUBSCRIBING],
        useFactory:
          ({ pool, ...options }: Subscribing): OpenReactor =>
          (projection) =>
            createSubscriber(projection, { ...options, checkpoint: postgresCheckpoint(pool, projection.name) }),
      },
    ];
    return { module: EventStoreModule, providers, exports: [Appends, POOL, EVENT_STORE, LOG_GATE, PERSONAL_KEYS, ReadModels, REACTOR] };
  }
}

const SUBSCRIBING = Symbol('subscribing');
type Subscribing = ReturnType<typeof subscribing>;

/**
 * Opens pool and log, and brings the schema to this release. With MIGRATE=prepare the schema must be up to date already. During an incident of the
 * event store, the tables of read models are not made.
 */
const open = async (context: ProcessContext, schema: Schema): Promise<Storage> => {
  const { config, places, log: logger, clock, ids, options } = context;
  const { migrations, readModels } = schema;
  cardInTextCheck.on = config.cardInTextCheck;
  const pool = context.pool({ name: 'main', max: POOL_CONNECTIONS, searchPath: searchPathOf(readModels) });
  const id = ids.uuid();
  const log = await openOwnLog({
    kurrentdbUrl: config.kurrentdbUrl,
    databaseUrl: places.databaseUrl,
    marksDir: config.marksDir,
    pool,
    checkPool: context.pool({ name: 'log check', max: CHECK_POOL_CONNECTIONS, byKey: true }),
    clock,
    newId: () => ids.uuid(),
    process: { id, name: options.role ?? 'command', pid },
    log: logger,
    // A command has no role. It reports the incident in its own error line.
    reportsIncident: options.role !== undefined,
    sealedEnd: schema.sealedEnd,
    signedHead: () => schema.signedEnd(context, pool),
    prepare: () => (config.migrate === 'start' ? migrate(pool, migrations, { stop: options.stop }) : requirePrepared(pool, schema)),
    wrap: (store) => context.guarded(store),
    stop: options.stop,
  });
  context.atEnd(() => log.close());
  await followTime(context, pool);
  const stop = new AbortController();
  const checking = log.run(stop.signal);
  context.atEnd(() => {
    stop.abort();
    return checking;
  });
  if (config.migrate === 'start' && log.incident === null) await prepareReadModels(pool, readModels, log);
  if (options.role !== undefined) {
    const recorded = await recordProcess(pool, { id, role: options.role, pid, readModels: readModels.map(checkpointOf), clock });
    context.atEnd(() => recorded.stop());
  }
  return { pool, log };
};

/** A command takes one key at a time, since most commands need none. */
const openPersonalKeys = (context: ProcessContext): CountedPersonalKeys => {
  const { keys, ids, clock, log, options } = context;
  const pool = context.pool({ name: 'personal keys', max: PERSONAL_POOL_CONNECTIONS, byKey: true });
  let missing = 0;
  const durable = createPersonalKeys(context.guarded(postgresPersonalKeyRows(pool)), {
    keys,
    ids,
    clock,
    log,
    ...(options.role === undefined && { block: 1 }),
    onMissing: (count) => (missing += count),
  });
  // Of the roles, only the API seals new text.
  if (options.role === 'api') durable.warm();
  const expiring = setInterval(() => durable.expire(), OPENED_KEYS_KEPT_MS).unref();
  context.atEnd(() => {
    clearInterval(expiring);
    return durable.stop();
  });
  return {
    take: () => durable.take(),
    open: (keyIds) => durable.open(keyIds),
    erasures: (keyIds) => durable.erasures(keyIds),
    discard: (keyIds) => durable.discard(keyIds),
    forget: (keyIds, erasure) => durable.forget(keyIds, erasure),
    get missing() {
      return missing;
    },
  };
};

/** A process must know the time of its sandbox before it serves. */
const followTime = async (context: ProcessContext, pool: Pool): Promise<void> => {
  const { sandboxTime, options } = context;
  if (sandboxTime === null) return refuseMovedTime(pool);
  if (options.sandboxTime) return;
  await sandboxTime.begin(context.pool({ name: 'sandbox time', max: 1 }), options.stop);
  context.atEnd(() => sandboxTime.stop());
};

const requirePrepared = async (pool: Pool, { migrations, readModels }: Pick<Schema, 'migrations' | 'readModels'>): Promise<void> => {
  const missing = await missingMigrations(pool, migrations);
  const shapes = missing.length === 0 ? await missingShapes(pool, readModels) : [];
  if (missing.length + shapes.length > 0)
    throw new Error(
      `the database is not prepared for this release (${[...missing, ...shapes.map(checkpointOf)].join(', ')}); run payfold upgrade prepare, or set MIGRATE=start`,
    );
};

/** Every method is listed, because `...store` would not copy the methods of a class. */
const watchAppends = (store: EventStore, onFailure: () => void): EventStore => ({
  append: async (stream, expected, events, options) => {
    try {
      return await store.append(stream, expected, events, options);
    } catch (error) {
      if (error instanceof Unavailable || error instanceof OutcomeUnknown) onFailure();
      throw error;
    }
  },
  read: (stream, from, max) => store.read(stream, from, max),
  readAll: (after, options) => store.readAll(after, options),
  ...(store.readStreams && { readStreams: (streams) => store.readStreams!(streams) }),
  subscribe: (after, options) => store.subscribe(after, options),
  head: () => store.head(),
  missing: (marks) => store.missing(marks),
  eventAt: (position) => store.eventAt(position),
  close: () => store.close(),
});

const subscribing = (context: ProcessContext, store: EventStore, guard: OwnLog, { readModels }: Schema) => {
  const { clock, log, options } = context;
  return {
    store,
    ownLog: guard,
    clock,
    log,
    pool: context.pool({ name: 'projections', max: PROJECTION_POOL_CONNECTIONS, byKey: true, searchPath: searchPathOf(readModels) }),
    onError: (error: Error, { name, retrying }: { name: string; retrying: boolean }) =>
      log[retrying ? 'warn' : 'error']({ err: error, projection: name }, retrying ? 'a projection is retrying' : 'a projection stopped'),
    ...(options.leaseOwner !== undefined && { owner: options.leaseOwner }),
  };
};
