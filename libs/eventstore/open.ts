/** Which event store a process uses, and the tables of this lib. */
import type { Logger, Migration, Queryable } from '#platform';
import { projectionCheckpointMigration, requireOwnStore } from './checkpoint.js';
import type { EventStore } from './event-store.js';
import { createKurrentDbEventStore } from './kurrentdb.js';
import { createPostgresEventStore, eventStoreMigration } from './postgres.js';
import { readModelMigration } from './read-model.js';

/** Tables of this lib, for `migrate`. */
export const eventStoreMigrations: readonly Migration[] = [eventStoreMigration, projectionCheckpointMigration, readModelMigration];

/**
 * Opens KurrentDB if its address is configured, else Postgres. Every process and command chooses here. Call it before the migrations, so that a
 * refused store leaves `db` unchanged.
 */
export const openEventStore = async (
  kurrentdbUrl: string | null,
  databaseUrl: string,
  db: Queryable,
  log: Pick<Logger, 'warn' | 'error'>,
): Promise<EventStore> => {
  const store =
    kurrentdbUrl === null
      ? createPostgresEventStore(databaseUrl)
      : await createKurrentDbEventStore(kurrentdbUrl, {
          onTrouble: (message, error) => log.warn({ err: error }, message),
          onForeign: (stream) => log.error({ stream }, 'another program writes to the event store; its events are passed over'),
        });
  try {
    await requireOwnStore(db, store, kurrentdbUrl !== null);
    return store;
  } catch (error) {
    await store.close();
    throw error;
  }
};
