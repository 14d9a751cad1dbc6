/** The whole database schema: what every process brings the database to before it uses it. A database that holds more was written by a newer version. */
import { directorySchema } from '#accounts';
import { eventStoreMigrations } from '#eventstore';
import { recoveryMigration, velocityMigration } from '#payments';
import type { Migration } from '#platform';
import { idempotencyMigration } from '#platform/http';

export const MIGRATIONS: readonly Migration[] = [
  ...eventStoreMigrations,
  directorySchema,
  idempotencyMigration,
  velocityMigration,
  recoveryMigration,
];
