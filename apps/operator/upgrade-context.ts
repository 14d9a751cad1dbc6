/** The stores of `payfold upgrade`: the database and the event store, whichever release used them last. Opening them changes nothing. */
import { mkdir } from 'node:fs/promises';
import { sealedEnd } from '#audit';
import { type EventStore, guardLog, openEventStore, type OwnLog, ReadModels, searchPathOf } from '#eventstore';
import { systemClock } from '#kernel';
import { createLogger, createPool, type Pool, readConfig, systemIds } from '#platform';
import { READ_MODELS } from '../services.js';
import { findDatabase } from './context.js';
import type { Opened } from './terminal.js';

/** Three load, two follow, one swaps, one answers questions. */
const CONNECTIONS = 7;

export interface UpgradeContext extends Opened {
  readonly pool: Pool;
  readonly store: EventStore;
  readonly readModels: ReadModels;
  /** The log, if it is that of the database and whole. Otherwise throws one line. `prepare`: brings the schema up to this release. */
  readonly ownLog: (prepare?: () => Promise<void>) => Promise<OwnLog>;
}

export const openUpgrade = async (): Promise<UpgradeContext> => {
  const config = readConfig();
  const logger = createLogger(config.logLevel, 'operator');
  await mkdir(config.dataDir, { recursive: true, mode: 0o711 });
  const { url, release } = await findDatabase(config);
  const pool = createPool(url, { name: 'upgrade', max: CONNECTIONS, statementTimeoutMs: 0, searchPath: searchPathOf(READ_MODELS) });
  try {
    const store = await openEventStore(config.kurrentdbUrl, url, logger);
    const readModels = new ReadModels(READ_MODELS, {
      store,
      pool,
      clock: systemClock,
      log: logger,
      onBuild: (building) => logger.info(building, 'a read model is being built'),
      onError: (error, { name }) => logger.warn({ err: error, projection: name }, 'a projection is retrying'),
    });
    const close = async () => {
      await store.close();
      await pool.end();
      await release();
    };
    const ids = systemIds(() => systemClock.now());
    const ownLog = async (prepare = async () => undefined as void) => {
      const log = await guardLog(store, {
        kurrentdbUrl: config.kurrentdbUrl,
        databaseUrl: url,
        marksDir: config.marksDir,
        pool,
        clock: systemClock,
        newId: () => ids.uuid(),
        process: { id: ids.uuid(), name: 'upgrade', pid: process.pid },
        log: logger,
        sealedEnd,
        prepare,
      });
      log.refuse();
      return log;
    };
    return { pool, store, readModels, ownLog, close };
  } catch (error) {
    await pool.end();
    await release();
    throw error;
  }
};
