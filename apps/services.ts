/** What every process is made of: stores, ports and read models, opened from the configuration in one place. Composition only. */
import { join } from 'node:path';
import {
  AccessTokens,
  apiKeyUseMigration,
  directoryModel,
  openSigningSecret,
  postgresDirectory,
  postgresKeyUse,
  type AuthenticationDeps,
  type Directory,
} from '#accounts';
import { checkoutUnfinishedModel, type CheckoutPorts, CheckoutSessions } from '#checkout';
import {
  checkpointOf,
  createSubscriber,
  dropReadModelsOf010,
  type EventStore,
  eventStoreMigrations,
  openEventStore,
  OutcomeUnknown,
  missingShapes,
  postgresCheckpoint,
  prepareReadModels,
  type Projection,
  type ReadModel,
  ReadModels,
  searchPathOf,
  type Subscriber,
  Unavailable,
  watchProjection,
} from '#eventstore';
import { type Clock, type Ids, systemClock } from '#kernel';
import { auditKeyModel, driftMigration, logSeal, logSealMigration, type ProvePorts, resumeSeal } from '#audit';
import { exceptionModel, openExceptions, paymentRegisterModel, postgresRegister, type SettlementPorts } from '#settlement';
import { journalModel } from '#ledger';
import {
  createRecovery,
  type Gateways,
  idempotencyMigrations,
  paymentListModel,
  type PaymentPorts,
  type PaymentServices,
  PaymentStreams,
  postgresIdempotency,
  postgresListRows,
  postgresRecoveryWork,
  postgresVelocity,
  recoveryMigration,
  velocityMigration,
} from '#payments';
import { createSimulatorGateway } from '#gateways';
import {
  cardInTextCheck,
  type Config,
  createPool,
  isMigrated,
  type KeyRing,
  type Logger,
  migrate,
  type Migration,
  missingMigrations,
  type Pool,
  processMigration,
  recordProcess,
  systemIds,
} from '#platform';
import {
  createDispatcher,
  createResolve,
  createSender,
  type Dispatcher,
  type DispatcherWatch,
  postgresDeliveries,
  postgresDueSignal,
  webhookMigrations,
  webhookOutbox,
} from '#webhooks';
import { answerEncoder } from './answers.js';
import { withFailpoint } from './failpoints.js';

export const MIGRATIONS: readonly Migration[] = [
  ...eventStoreMigrations,
  processMigration,
  apiKeyUseMigration,
  ...idempotencyMigrations,
  velocityMigration,
  recoveryMigration,
  ...webhookMigrations,
  logSealMigration,
  driftMigration,
  dropReadModelsOf010,
];

/** Every read model of the service: a new one is a line here. A worker builds them in this order. */
export const READ_MODELS: readonly ReadModel[] = [
  directoryModel,
  auditKeyModel,
  checkoutUnfinishedModel,
  paymentListModel,
  paymentRegisterModel,
  exceptionModel,
  journalModel,
];

/** The configuration with the addresses filled in that were found or started. */
export interface Places {
  readonly databaseUrl: string;
  readonly simulatorUrl: string | null;
}

export interface Services {
  readonly config: Config;
  readonly log: Logger;
  readonly clock: Clock;
  readonly ids: Ids;
  readonly keys: KeyRing;
  readonly pool: Pool;
  readonly store: EventStore;
  readonly directory: Directory;
  readonly authentication: AuthenticationDeps;
  readonly payments: PaymentServices;
  readonly checkout: CheckoutPorts;
  readonly settlement: SettlementPorts;
  /** Opens an exception for everything of settlement that does not match; resolves with how many. */
  readonly openExceptions: (stop?: AbortSignal) => Promise<number>;
  readonly readModels: ReadModels;
  /** Subscribers whose effects the log cannot make again: they are never rebuilt. */
  readonly reactors: { readonly webhookOutbox: Subscriber; readonly logSeal: Subscriber };
  /** Webhooks: what a worker runs, and who counts what it does. */
  readonly webhooks: { readonly dispatcher: Dispatcher; watch(watcher: DispatcherWatch): void };
  /** The sealed log: its tiles, and where its signed heads go. */
  readonly seal: ProvePorts;
  /** Throws when something that payments need cannot be used. */
  readonly readiness: Readonly<Record<string, () => Promise<void>>>;
  close(): Promise<void>;
}

/** Reads and writes of requests and projections share this many connections; keys have their own few, so that lists cannot starve them. */
const POOL_CONNECTIONS = 20;
const KEY_POOL_CONNECTIONS = 6;
const PROJECTION_POOL_CONNECTIONS = 8;
/** Attempts of one case or card wait for each other: where many do, they shall not hold what everybody needs. */
const VELOCITY_POOL_CONNECTIONS = 4;
/** A claim, two that write down, one that listens, one that looks after leases. */
const WEBHOOK_POOL_CONNECTIONS = 5;
const KEY_STATEMENT_TIMEOUT_MS = 2_000;
const KEY_LOCK_TIMEOUT_MS = 1_000;
/** How long the register may take to pass the head of the log; a first start after an upgrade reads all of it. */
const REGISTER_TIMEOUT_MS = 120_000;
/** An append that failed this recently makes the process not ready. */
const APPEND_FAILURE_WINDOW_MS = 10_000;

export interface OpenOptions {
  /** A test may replace it. */
  readonly clock?: Clock;
  /** The role of a process that stays: it is recorded, so that `payfold upgrade` knows that it lives. */
  readonly role?: string;
  /** Of the leases on projections; see `createSubscriber`. */
  readonly leaseOwner?: string;
}

export const openServices = async (
  config: Config,
  { databaseUrl, simulatorUrl }: Places,
  keys: KeyRing,
  log: Logger,
  { clock = systemClock, role, leaseOwner }: OpenOptions = {},
): Promise<Services> => {
  const ids = systemIds(() => clock.now());
  cardInTextCheck.on = config.cardInTextCheck;
  const searchPath = searchPathOf(READ_MODELS);
  const pool = createPool(databaseUrl, { name: 'main', max: POOL_CONNECTIONS, searchPath });
  const projectionPool = createPool(databaseUrl, { name: 'projections', max: PROJECTION_POOL_CONNECTIONS, byKey: true, searchPath });
  const keySettings = { max: KEY_POOL_CONNECTIONS, statementTimeoutMs: KEY_STATEMENT_TIMEOUT_MS, lockTimeoutMs: KEY_LOCK_TIMEOUT_MS, byKey: true };
  const keyPool = createPool(databaseUrl, { name: 'keys', ...keySettings });
  // A claim must survive a crash of Postgres that its owner survives: lost, the key would charge again. A settlement need not: the takeover makes it
  // again from the stream (T7).
  const settlePool = createPool(databaseUrl, { name: 'keys, settled', ...keySettings, synchronousCommit: 'off' });
  const velocityPool = createPool(databaseUrl, { name: 'velocity', max: VELOCITY_POOL_CONNECTIONS, byKey: true });
  const webhookPool = createPool(databaseUrl, { name: 'webhooks', max: WEBHOOK_POOL_CONNECTIONS, byKey: true });
  const opened = [pool, projectionPool, keyPool, settlePool, velocityPool, webhookPool].map(
    (one): (() => Promise<unknown>) =>
      () =>
        one.end(),
  );
  const close = async () => {
    for (const one of [...opened].reverse()) await one();
  };
  try {
    const bare = await openEventStore(config.kurrentdbUrl, databaseUrl, pool, log);
    opened.push(() => bare.close());
    if (config.migrate === 'start') await migrate(pool, MIGRATIONS);
    else await requirePrepared(pool);
    const heads = { db: pool, keys, folder: join(config.dataDir, 'heads'), now: () => clock.now() };
    await resumeSeal(heads);
    if (config.migrate === 'start') await prepareReadModels(pool, READ_MODELS, bare);
    const appends = { failedAt: Number.NEGATIVE_INFINITY };
    const store = withFailpoint(config.failpoint, watchAppends(bare, clock, appends));
    const directory = postgresDirectory(pool);
    await requireRightKeys(config, keys, directory);
    const gateways = openGateways(config, simulatorUrl);
    const streams = new PaymentStreams(store, clock, ids);
    const ports: PaymentPorts = {
      clock,
      ids,
      streams,
      gateways: withFailpoint(config.failpoint, gateways),
      directory,
      velocity: postgresVelocity(velocityPool, keys, clock),
      log,
    };
    const idempotency = withFailpoint(config.failpoint, postgresIdempotency(keyPool, keys, ids, { settlements: settlePool }));
    const onError = (error: Error, what: { name: string; retrying: boolean }) =>
      log[what.retrying ? 'warn' : 'error'](
        { err: error, projection: what.name },
        what.retrying ? 'a projection is retrying' : 'a projection stopped',
      );
    const subscribing = { store, clock, log, onError, ...(leaseOwner !== undefined && { owner: leaseOwner }) };
    const readModels = new ReadModels(READ_MODELS, {
      ...subscribing,
      pool: projectionPool,
      onBuild: (building) => log.info(building, 'a read model is being built'),
    });
    const reactor = (projection: Projection) =>
      createSubscriber(projection, { ...subscribing, checkpoint: postgresCheckpoint(projectionPool, projection.name) });
    const reactors = { webhookOutbox: reactor(webhookOutbox(store)), logSeal: reactor(logSeal) };
    // A process that runs the projection hears of its own progress at once; another looks at the checkpoint.
    const watch = watchProjection(postgresCheckpoint(pool, checkpointOf(paymentListModel)), clock);
    const list = readModels.of(paymentListModel);
    const caughtUp = (projection: Subscriber) => async () => {
      const head = await store.head();
      if (head !== null) await projection.runUntil(head, { timeoutMs: REGISTER_TIMEOUT_MS });
    };
    const settlement = { payments: ports, store, register: postgresRegister(pool, caughtUp(readModels.of(paymentRegisterModel))) };
    const payments: PaymentServices = {
      ports,
      idempotency,
      answers: answerEncoder,
      list: {
        rows: postgresListRows(pool),
        keys,
        directory,
        head: () => store.head(),
        caughtUpTo: (position, timeoutMs) => (list.state === 'active' ? list : watch).caughtUpTo(position, timeoutMs),
      },
      recovery: createRecovery(ports, store, postgresRecoveryWork(pool)),
      log,
    };
    if (role !== undefined) {
      const recorded = await recordProcess(pool, { id: ids.uuid(), role, pid: process.pid, readModels: READ_MODELS.map(checkpointOf), clock });
      opened.push(() => recorded.stop());
    }
    const watchers = new Set<DispatcherWatch>();
    const dispatcher = createDispatcher({
      deliveries: withFailpoint(config.failpoint, postgresDeliveries(webhookPool, ids.uuid())),
      sender: withFailpoint(
        config.failpoint,
        createSender({ settings: config.webhooks, resolve: createResolve(config.webhooks.dnsServers, clock), clock }),
      ),
      due: postgresDueSignal(webhookPool),
      keys,
      clock,
      log,
      watch: {
        attempted: (attempt) => watchers.forEach((watcher) => watcher.attempted(attempt)),
        leaseLost: () => watchers.forEach((watcher) => watcher.leaseLost()),
      },
      retrySeconds: config.webhooks.retrySeconds,
    });
    if (config.webhooks.privateTargets.length > 0)
      log.warn({ targets: config.webhooks.privateTargets.map(targetText) }, 'webhooks may be sent to private addresses');
    return {
      config,
      log,
      clock,
      ids,
      keys,
      pool,
      store,
      directory,
      authentication: {
        keyUse: postgresKeyUse(pool, clock),
        directory,
        keys,
        tokens: new AccessTokens(keys, config.environment, clock),
        environment: config.environment,
      },
      payments,
      seal: { store, ...heads },
      settlement,
      openExceptions: (stop) => openExceptions(settlement, pool, { caughtUp: caughtUp(readModels.of(exceptionModel)) }, stop),
      checkout: { payments: ports, sessions: new CheckoutSessions(store, clock, ids), directory },
      readModels,
      reactors,
      webhooks: { dispatcher, watch: (watcher) => void watchers.add(watcher) },
      readiness: {
        idempotency: async () => {
          if (!(await idempotency.ping())) throw new Error('keys cannot be written');
        },
        readModels: async () => {
          // Once they were built, a worker that is away takes no API down.
          if (!(await readModels.areBuilt())) throw new Error('read models are being built');
        },
        schema: async () => {
          if (!(await isMigrated(pool, MIGRATIONS))) throw new Error('the schema is not ours');
        },
        eventStore: async () => {
          await store.head();
          if (clock.monotonic() - appends.failedAt < APPEND_FAILURE_WINDOW_MS) throw new Error('an append failed just now');
        },
      },
      close,
    };
  } catch (error) {
    await close().catch(() => undefined);
    throw error;
  }
};

/** With MIGRATE=prepare only `payfold upgrade prepare` changes the schema. */
const requirePrepared = async (pool: Pool): Promise<void> => {
  const missing = await missingMigrations(pool, MIGRATIONS);
  const shapes = missing.length === 0 ? await missingShapes(pool, READ_MODELS) : [];
  if (missing.length + shapes.length > 0)
    throw new Error(
      `the database is not prepared for this release (${[...missing, ...shapes.map(checkpointOf)].join(', ')}); run payfold upgrade prepare, or set MIGRATE=start`,
    );
};

const targetText = ({ host, port, network }: Config['webhooks']['privateTargets'][number]) => `${host}:${port}=${network.address}/${network.prefix}`;

/** Under another ring every API key would be refused and no secret could be opened; that is better said here than by 401s later. */
const requireRightKeys = async ({ masterKeyFile }: Config, keys: KeyRing, directory: Directory): Promise<void> => {
  const portal = (await directory.portals()).at(-1);
  if (!portal) return;
  try {
    openSigningSecret(keys, portal);
  } catch {
    throw new Error(`${masterKeyFile} is not the master key of this database; set DATA_DIR or MASTER_KEY_FILE to the one that belongs to it`);
  }
};

/** Notes when an append last failed. Every method is named: an adapter may be a class, whose methods a spread would lose. */
const watchAppends = (store: EventStore, clock: Clock, appends: { failedAt: number }): EventStore => ({
  append: async (stream, expected, events, options) => {
    try {
      return await store.append(stream, expected, events, options);
    } catch (error) {
      if (error instanceof Unavailable || error instanceof OutcomeUnknown) appends.failedAt = clock.monotonic();
      throw error;
    }
  },
  read: (stream, from, max) => store.read(stream, from, max),
  readAll: (after, options) => store.readAll(after, options),
  ...(store.readStreams && { readStreams: (streams) => store.readStreams!(streams) }),
  subscribe: (after, options) => store.subscribe(after, options),
  head: () => store.head(),
  ...(store.foreignStream && { foreignStream: () => store.foreignStream!() }),
  close: () => store.close(),
});

/** The adapters of this process. The sandbox's accounts are good for the simulator; elsewhere there is none. */
const openGateways = (config: Config, simulatorUrl: string | null): Gateways => {
  const simulator = simulatorUrl ? createSimulatorGateway({ url: simulatorUrl }) : null;
  return { find: ({ gateway, environment }) => (gateway === 'simulator' && environment === config.environment ? simulator : null) };
};

/** A role of its own needs the addresses of what it does not start itself. */
export const requirePlaces = ({ databaseUrl, simulatorUrl, environment }: Config): Places => {
  const missing = [databaseUrl ? null : 'DATABASE_URL', simulatorUrl || environment === 'production' ? null : 'SIMULATOR_URL'].filter(Boolean);
  if (!databaseUrl || missing.length > 0) throw new Error(`this role needs ${missing.join(' and ')}; npm start runs everything in one process tree`);
  return { databaseUrl, simulatorUrl };
};
