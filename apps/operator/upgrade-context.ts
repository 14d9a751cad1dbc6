/** The stores of `payfold upgrade`: the database and the event store, whichever release used them last. Opening them changes nothing. */
import { mkdir } from 'node:fs/promises';
import { type EventStore, openEventStore, ReadModels, searchPathOf } from '#eventstore';
import { systemClock } from '#kernel';
import { createLogger, createPool, type Pool, readConfig } from '#platform';
import { READ_MODELS } from '../services.js';
import { findDatabase } from './context.js';
import type { Opened } from './terminal.js';

/** Three load, two follow, one swaps, one answers questions. */
const CONNECTIONS = 7;

export interface UpgradeContext extends Opened {
  readonly pool: Pool;
  readonly store: EventStore;
  readonly readModels: ReadModels;
}

export const openUpgrade = async (): Promise<UpgradeContext> => {
  const config = readConfig();
  const logger = createLogger(config.logLevel, 'operator');
  await mkdir(config.dataDir, { recursive: true, mode: 0o711 });
  const { url, release } = await findDatabase(config);
  const pool = createPool(url, { name: 'upgrade', max: CONNECTIONS, statementTimeoutMs: 0, searchPath: searchPathOf(READ_MODELS) });
  try {
    const store = await openEventStore(config.kurrentdbUrl, url, pool, logger);
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
    return { pool, store, readModels, close };
  } catch (error) {
    await pool.end();
    await release();
    throw error;
  }
};
