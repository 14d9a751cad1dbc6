/** The stores of `payfold upgrade`: the database and the event store, as any release may have left them. Opening them changes nothing. */
import { existsSync } from 'node:fs';
import { mkdir } from 'node:fs/promises';
import { sealedEnd } from '#audit';
import { type EventStore, guardLog, openEventStore, type OwnLog, ReadModels, searchPathOf, storeAddress, withAddress } from '#eventstore';
import { orStopped, systemClock } from '#kernel';
import { type Config, createLogger, createPool, openKeys, type Pool, readConfig, systemIds } from '#platform';
import { READ_MODELS, readModelsWith } from '../services.js';
import { findDatabase } from './context.js';
import { onInterrupt } from './interrupt.js';
import type { Opened } from './terminal.js';

/** Three connections load, two follow the log, one swaps the tables, one runs other queries. */
const CONNECTIONS = 7;

export interface UpgradeContext extends Opened {
  readonly config: Config;
  readonly databaseUrl: string;
  /** The variable that names the event store, and the store's hosts. */
  readonly where: string;
  readonly pool: Pool;
  readonly store: EventStore;
  readonly readModels: ReadModels;
  /** Makes read models that read the log through its guard. */
  readonly guardedReadModels: (guard: OwnLog) => ReadModels;
  /**
   * Opens the log. If it does not belong to the database, or is not whole, throws an error with a one-line message. `prepare` brings the schema up to
   * this release.
   */
  readonly ownLog: (prepare?: () => Promise<void>) => Promise<OwnLog>;
  /** As in `Context`. */
  readonly untilInterrupted: () => AbortSignal;
}

export const openUpgrade = async (command: string): Promise<UpgradeContext> => {
  const config = readConfig();
  const logger = createLogger(config.logLevel, 'operator');
  const closers: (() => Promise<unknown>)[] = [];
  let closing: Promise<void> | null = null;
  const close = () =>
    (closing ??= (async () => {
      for (const closer of closers.reverse()) await closer();
    })());
  const { signal: stop, untilInterrupted, ignore } = onInterrupt(() => opening.then(close, close));
  closers.push(async () => ignore());
  let databaseUrl = config.databaseUrl ?? '';
  const open = async () => {
    await mkdir(config.dataDir, { recursive: true, mode: 0o711 });
    const { url, release } = await findDatabase(config, command, stop);
    databaseUrl = url;
    closers.push(release);
    const pool = createPool(url, { name: 'upgrade', max: CONNECTIONS, statementTimeoutMs: 0, searchPath: searchPathOf(READ_MODELS) });
    closers.push(() => pool.end());
    const store = await orStopped(openEventStore(config.kurrentdbUrl, url, logger), stop);
    closers.push(() => store.close());
    // An upgrade may come before the first key file. Then there is no personal data either.
    const models = existsSync(config.masterKeyFile) ? readModelsWith(openKeys(config), config) : READ_MODELS;
    const readModelsOver = (over: EventStore, guard?: OwnLog) =>
      new ReadModels(models, {
        store: over,
        pool,
        clock: systemClock,
        log: logger,
        ...(guard && { ownLog: guard }),
        onBuild: (building) => logger.info(building, 'a read model is being built'),
        onError: (error, { name }) => logger.warn({ err: error, projection: name }, 'a projection is retrying'),
      });
    const ids = systemIds(() => systemClock.realNow());
    const ownLog = async (prepare = async () => undefined as void) => {
      const guarded = guardLog(store, {
        kurrentdbUrl: config.kurrentdbUrl,
        databaseUrl: url,
        marksDir: config.marksDir,
        pool,
        clock: systemClock,
        newId: () => ids.uuid(),
        process: { id: ids.uuid(), name: 'upgrade', pid: process.pid },
        log: logger,
        // The command itself reports the incident.
        reportsIncident: false,
        sealedEnd,
        prepare,
      });
      const log = await orStopped(guarded, stop).catch((error: unknown) => {
        throw withAddress(error, config.kurrentdbUrl, url);
      });
      log.refuse();
      return log;
    };
    return {
      config,
      databaseUrl: url,
      where: storeAddress(config.kurrentdbUrl, url),
      pool,
      store,
      readModels: readModelsOver(store),
      guardedReadModels: (guard: OwnLog) => readModelsOver(guard, guard),
      ownLog,
    };
  };
  const opening = open();
  try {
    return { ...(await opening), untilInterrupted, close };
  } catch (error) {
    await close().catch(() => undefined);
    throw withAddress(error, config.kurrentdbUrl, databaseUrl);
  }
};
