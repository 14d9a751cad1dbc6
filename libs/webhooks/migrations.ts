import type { Migration } from '#platform';
import {
  webhookAttemptBrinMigration,
  webhookAttemptHashMigration,
  webhookAttemptTimeMigration,
  webhookDeliveryListMigration,
  webhookDeliveryMigration,
} from './deliveries.js';
import { webhookEndpointMigration } from './endpoint.js';
import { webhookEventCreatedMigration, webhookEventMigration, webhookPurgeMigration } from './outbox.js';

/** Tables of this lib, for `migrate`. */
export const webhookMigrations: readonly Migration[] = [
  webhookEndpointMigration,
  webhookEventMigration,
  webhookDeliveryMigration,
  webhookPurgeMigration,
  webhookEventCreatedMigration,
  webhookAttemptTimeMigration,
  webhookAttemptBrinMigration,
  webhookDeliveryListMigration,
  webhookAttemptHashMigration,
];
