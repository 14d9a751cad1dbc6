import type { Migration } from '#platform';
import type { EventStore } from './event-store.js';
import { createKurrentDbEventStore, type KurrentDbOptions } from './kurrentdb.js';
import { createPostgresEventStore, eventStoreMigration } from './postgres.js';
import { projectionCheckpointMigration } from './subscriber.js';

export * from './event-store.js';
export * from './memory.js';
export * from './rebuild.js';
export * from './subscriber.js';
export * from './upcasters.js';
export { createKurrentDbEventStore, type KurrentDbOptions } from './kurrentdb.js';
export { createPostgresEventStore } from './postgres.js';

/** Tables of this lib, for `migrate`. */
export const eventStoreMigrations: readonly Migration[] = [eventStoreMigration, projectionCheckpointMigration];

/** KurrentDB where an address of it is configured, else Postgres: the one choice, for every process and command. */
export const openEventStore = async (
  kurrentdbUrl: string | null,
  databaseUrl: string,
  onTrouble: NonNullable<KurrentDbOptions['onTrouble']>,
): Promise<EventStore> => (kurrentdbUrl === null ? createPostgresEventStore(databaseUrl) : createKurrentDbEventStore(kurrentdbUrl, { onTrouble }));
