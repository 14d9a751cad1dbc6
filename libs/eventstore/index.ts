import type { Migration } from '#platform';
import { eventStoreMigration } from './postgres.js';
import { projectionCheckpointMigration } from './subscriber.js';

export * from './event-store.js';
export * from './memory.js';
export * from './rebuild.js';
export * from './subscriber.js';
export * from './upcasters.js';
export { createKurrentDbEventStore, type KurrentDbOptions } from './kurrentdb.js';
export { createPostgresEventStore, postgresEventStore, type EventStorePools } from './postgres.js';

/** Tables of this lib, for `migrate`. */
export const eventStoreMigrations: readonly Migration[] = [eventStoreMigration, projectionCheckpointMigration];
