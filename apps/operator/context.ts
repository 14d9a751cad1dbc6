/**
 * Opens the stores for one command and closes them after it, even if no service runs.
 *
 * `DATABASE_URL` names the database. Without it, the command uses the database of the running service. If no service runs, the command starts the
 * embedded Postgres and stops it at its end. A lock on `DATA_DIR` prevents a second start at the same time.
 */
import { existsSync } from 'node:fs';
import { mkdir } from 'node:fs/promises';
import { join } from 'node:path';
import { Administration, apiKeyUseMigration, type Directory, directoryModel, openSigningSecret, postgresDirectory } from '#accounts';
import {
  eventStoreMigrations,
  INSTALLATION_STREAM,
  openOwnLog,
  type OwnLog,
  type Position,
  prepareReadModels,
  ReadModels,
  searchPathOf,
  withAddress,
} from '#eventstore';
import { type Clock, type Ids, orStopped, systemClock } from '#kernel';
import {
  type Config,
  createLogger,
  createPersonalKeys,
  createPool,
  type KeyRing,
  type Logger,
  migrate,
  type Migration,
  missingMigrations,
  type PersonalKeys,
  personalKeyMigration,
  type Pool,
  postgresPersonalKeyRows,
  processMigration,
  readConfig,
  refuseMovedTime,
  readKeyRing,
  readOrCreateKeyRing,
  SandboxTime,
  sandboxTimeMigration,
  startEmbeddedPostgres,
  systemIds,
} from '#platform';
import { readRuntime, type Runtime, tryLockDataDir } from '../data-dir.js';
import type { Services } from '../services.js';
import { onInterrupt } from './interrupt.js';
import { loginName } from './terminal.js';

/** How long a command waits for another process that is starting or stopping in the same `DATA_DIR`. */
const DATA_DIR_WAIT_MS = 60_000;
const DATA_DIR_POLL_MS = 200;
/** How long a command waits until its change counts in every process. */
const PROJECT_TIMEOUT_MS = 30_000;
/** Number of tries to read the key ring, because another process may be writing it. */
const KEY_RING_TRIES = 20;
const KEY_RING_RETRY_MS = 50;

export interface Context {
  readonly config: Config;
  readonly logger: Logger;
  readonly clock: Clock;
  /** null: production. */
  readonly sandboxTime: SandboxTime | null;
  readonly ids: Ids;
  readonly keys: KeyRing;
  readonly databaseUrl: string;
  readonly pool: Pool;
  readonly store: OwnLog;
  /** The service that runs on the same `DATA_DIR`. null: none runs, or `DATABASE_URL` was given. */
  readonly runtime: Runtime | null;
  readonly directory: Directory;
  readonly personal: PersonalKeys;
  /** Applies all migrations of the release if the database lacks one of these. */
  readonly prepare: (migrations: readonly Migration[]) => Promise<void>;
  readonly administration: Administration;
  /** Waits until an event of this command counts for the next request in every process. null: an earlier command recorded the change. */
  readonly inForce: (position: Position | null) => Promise<void>;
  /** Brings the directory (the read model of accounts, keys and portals) up to the end of the log. */
  readonly caughtUp: () => Promise<void>;
  /**
   * Opens the modules of the whole service. Loading them takes most of a second. `withGateway`: opens the sandbox processor too. If no processor
   * runs, one is started until the command ends. `mends`: also opens a restored database that still has erased keys.
   */
  readonly services: (options?: { withGateway?: boolean; mends?: boolean }) => Promise<Services>;
  /** For a command that runs until it is stopped. From this call on, Ctrl-C and SIGTERM only abort the signal, and the command must end by itself. */
  readonly untilInterrupted: () => AbortSignal;
  /** Throws the error of an open incident of the event store. */
  readonly refuse: () => void;
  readonly close: () => Promise<void>;
}

/**
 * Opens the stores. `command`: the noun and verb, for the lock. If this fails, throws ConfigError or an error with a one-line message, and leaves
 * nothing open.
 */
export const openContext = async (command: string, env: Readonly<Record<string, string | undefined>> = process.env): Promise<Context> => {
  const config = readConfig(env);
  const logger = createLogger(config.logLevel, 'operator');
  const closers: Closers = [];
  let closing: Promise<void> | null = null;
  // Close the last resource first. If a resource fails to close, continue with the next.
  const close = () =>
    (closing ??= (async () => {
      for (const closer of closers.reverse()) await closer().catch((error: unknown) => logger.warn({ err: error }, 'could not close'));
    })());

  // An interrupted command stops everything that it started, even a resource that is still starting.
  const { signal: stop, untilInterrupted, ignore } = onInterrupt(() => opening.then(close, close));
  closers.push(async () => ignore());
  const opening = open(command, config, logger, closers, stop);
  try {
    return { ...(await opening), untilInterrupted, close };
  } catch (error) {
    await close();
    throw error;
  }
};

type Closers = (() => Promise<unknown>)[];
type Opened = Omit<Context, 'untilInterrupted' | 'close'>;

const open = async (command: string, config: Config, logger: Logger, closers: Closers, stop: AbortSignal): Promise<Opened> => {
  await mkdir(config.dataDir, { recursive: true, mode: 0o711 });
  const found = await findDatabase(config, command, stop);
  closers.push(found.release);
  return openStores(config, logger, closers, stop, found).catch((error: unknown) => {
    throw withAddress(error, config.kurrentdbUrl, found.url);
  });
};

const openStores = async (
  config: Config,
  logger: Logger,
  closers: Closers,
  stop: AbortSignal,
  { url: databaseUrl, runtime }: FoundDatabase,
): Promise<Opened> => {
  const pool = createPool(databaseUrl, { name: 'operator', max: 4, searchPath: searchPathOf([directoryModel]) });
  closers.push(() => pool.end());
  // A command has the time of the sandbox. Like a role, it begins no work that moves money while the time is being moved.
  const sandboxTime = config.environment === 'sandbox' ? new SandboxTime(null) : null;
  const clock = sandboxTime?.clock ?? systemClock;
  const ids = systemIds(() => clock.realNow());
  const prepare = (migrations: readonly Migration[]) => prepareSchema(pool, config, migrations, stop);
  const opening = openOwnLog({
    kurrentdbUrl: config.kurrentdbUrl,
    databaseUrl,
    marksDir: config.marksDir,
    pool,
    clock,
    newId: () => ids.uuid(),
    process: { id: ids.uuid(), name: 'command', pid: process.pid },
    log: logger,
    reportsIncident: false,
    // Only a log of release 0.1.0 needs the audit's code, so load it only here.
    sealedEnd: async (db) => (await import('#audit')).sealedEnd(db),
    prepare: () => prepare([...eventStoreMigrations, processMigration, sandboxTimeMigration, apiKeyUseMigration, personalKeyMigration]),
    stop,
  });
  const store = await orStopped(opening, stop);
  closers.push(() => store.close());
  closers.push(() => store.keepMarks());
  if (sandboxTime) {
    await sandboxTime.begin(pool, stop);
    closers.push(() => sandboxTime.stop());
  } else await refuseMovedTime(pool);
  if (config.migrate === 'start' && store.incident === null) await orStopped(prepareReadModels(pool, [directoryModel], store), stop);

  const directory = postgresDirectory(pool);
  const keys = await orStopped(openKeyRing(config, store), stop);
  await orStopped(requireRightKeyRing(config, keys, directory), stop);

  const models = new ReadModels([directoryModel], { store, pool, clock, ownLog: store });
  // Few commands need a key, so each is written when it is needed.
  const personal = createPersonalKeys(postgresPersonalKeyRows(pool), { keys, ids, clock, log: logger, block: 1 });
  const inForce = async (recorded: Position | null) => {
    const position = recorded ?? (await store.head());
    if (position !== null) await models.inForce(directoryModel, position, PROJECT_TIMEOUT_MS);
  };
  const { environment, cardInTextCheck } = config;
  const actor = { type: 'operator', id: loginName() } as const;
  const openAll = async (withGateway: boolean, mends: boolean): Promise<Services> => {
    const { openServices } = await import('../services.js');
    const known = config.simulatorUrl ?? runtime?.simulatorUrl ?? null;
    const simulatorUrl = known ?? (withGateway && config.environment === 'sandbox' ? await startSimulator(config, closers, stop) : null);
    const services = await openServices(config, { databaseUrl, simulatorUrl }, keys, logger, { stop, mends, ...(sandboxTime && { sandboxTime }) });
    closers.push(() => services.close());
    return services;
  };
  /** A command that asks before it acts needs them twice. */
  const opened = new Map<string, Promise<Services>>();
  return {
    config,
    logger,
    clock,
    sandboxTime,
    ids,
    keys,
    databaseUrl,
    pool,
    store,
    runtime,
    directory,
    prepare,
    refuse: () => store.refuse(),
    personal,
    administration: new Administration({ store, clock, ids, keys, personal, environment, cardInTextCheck, actor }),
    inForce,
    caughtUp: async () => {
      const head = await store.head();
      if (head !== null) await models.of(directoryModel).runUntil(head, { timeoutMs: PROJECT_TIMEOUT_MS });
    },
    services: ({ withGateway = false, mends = false } = {}) => {
      const name = `${withGateway} ${mends}`;
      const services = opened.get(name) ?? openAll(withGateway, mends);
      opened.set(name, services);
      return services;
    },
  };
};

/**
 * Applies all migrations if the database lacks one that this command needs. With MIGRATE=prepare, throws instead. If none is missing, the list of all
 * migrations is not loaded, which saves a second.
 */
const prepareSchema = async (pool: Pool, { migrate: when }: Config, needed: readonly Migration[], stop: AbortSignal) => {
  const missing = await missingMigrations(pool, needed);
  if (missing.length === 0) return;
  if (when === 'prepare')
    throw new Error(`the database is not prepared for this release (${missing.join(', ')}); run payfold upgrade prepare, or set MIGRATE=start`);
  await migrate(pool, (await import('../services.js')).MIGRATIONS, { stop });
};

/**
 * Opens the key ring. At the first use of a sandbox, the command or the service creates it. Throws if the log already holds data, because that data
 * needs the ring that wrote it.
 */
const openKeyRing = async ({ masterKeyFile, masterKeyMayBeCreated }: Config, store: OwnLog): Promise<KeyRing> => {
  if (!masterKeyMayBeCreated) return readKeyRing(masterKeyFile);
  const existed = existsSync(masterKeyFile);
  if (!existed && (await holdsData(store)))
    throw new Error(
      `the database holds data but ${masterKeyFile} is missing; restore it, or set DATA_DIR to the folder that belongs to the database`,
    );
  for (let tries = 1; ; tries++) {
    try {
      return readOrCreateKeyRing(masterKeyFile);
    } catch (error) {
      // Another process may be writing the key ring now.
      if (existed || tries >= KEY_RING_TRIES) throw error;
      await systemClock.sleep(KEY_RING_RETRY_MS);
    }
  }
};

/** False for a log that is empty or holds only the event of its installation. */
const holdsData = async (store: OwnLog): Promise<boolean> => {
  for await (const events of store.readAll(null, { max: 2 })) if (events.some(({ stream }) => stream !== INSTALLATION_STREAM)) return true;
  return false;
};

/** Throws if the key ring does not belong to this database. The API would refuse every key that is issued under the wrong ring. */
const requireRightKeyRing = async ({ masterKeyFile }: Config, keys: KeyRing, directory: Directory) => {
  const portal = (await directory.portals()).at(-1);
  if (!portal) return;
  try {
    openSigningSecret(keys, portal);
  } catch {
    throw new Error(`${masterKeyFile} is not the master key of this database; set DATA_DIR or MASTER_KEY_FILE to the one that belongs to it`);
  }
};

interface FoundDatabase {
  readonly url: string;
  readonly runtime: Runtime | null;
  readonly release: () => Promise<unknown>;
}

/** Finds the database of this configuration. If no service runs, starts the database until the command ends. */
export const findDatabase = async (
  { databaseUrl, dataDir }: Pick<Config, 'databaseUrl' | 'dataDir'>,
  command: string,
  stop: AbortSignal,
): Promise<FoundDatabase> => {
  if (databaseUrl) return { url: databaseUrl, runtime: null, release: async () => undefined };
  const deadline = systemClock.monotonic() + DATA_DIR_WAIT_MS;
  for (;;) {
    stop.throwIfAborted();
    const runtime = readRuntime(dataDir);
    if (runtime && (await answers(runtime.databaseUrl))) return { url: runtime.databaseUrl, runtime, release: async () => undefined };
    const lock = tryLockDataDir(dataDir, command);
    if ('release' in lock) return startDatabase(dataDir, lock.release, stop);
    const { pid, command: other } = lock.holder;
    if (systemClock.monotonic() > deadline)
      throw new Error(`${other === null ? '' : `the command "${other}" of `}process ${pid} holds ${dataDir} but offers no database; wait for it, or stop it`); // prettier-ignore
    await systemClock.sleep(DATA_DIR_POLL_MS, stop);
  }
};

const startDatabase = async (dataDir: string, unlock: () => void, stop: AbortSignal): Promise<FoundDatabase> => {
  try {
    const postgres = await startEmbeddedPostgres(join(dataDir, 'postgres'), { stop });
    return { url: postgres.url, runtime: null, release: () => postgres.stop().finally(unlock) };
  } catch (error) {
    unlock();
    throw error;
  }
};

/** The address of the simulator on the same `DATA_DIR`. If none runs, starts one until the command ends. */
const startSimulator = async (
  { dataDir, simulatorPort, simulatorBatchClose: closeBatchesAt, logLevel }: Config,
  closers: Closers,
  stop: AbortSignal,
): Promise<string> => {
  const { findSimulator } = await import('../simulator/server.js');
  const running = await findSimulator(join(dataDir, 'simulator'));
  if (running) return running;
  const { startSimulatorProcess } = await import('../simulator/child.js');
  const simulator = await startSimulatorProcess({ dataDir, port: simulatorPort, logLevel, closeBatchesAt, stop });
  closers.push(() => simulator.stop());
  return simulator.url;
};

const answers = async (url: string): Promise<boolean> => {
  const pool = createPool(url, { name: 'operator', max: 1 });
  try {
    await pool.query('select');
    return true;
  } catch {
    return false;
  } finally {
    await pool.end();
  }
};
