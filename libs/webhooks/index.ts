import type { Migration } from '#platform';
import { webhookDeliveryMigration } from './deliveries.js';
import { webhookEndpointMigration } from './endpoint.js';
import { webhookEventMigration } from './outbox.js';

export * from './deliveries.js';
export * from './dispatcher.js';
export * from './endpoint.js';
export * from './listen.js';
export * from './notification.js';
export * from './outbox.js';
export * from './safe-request.js';
export * from './schedule.js';
export * from './signature.js';
export * from './target.js';

/** Tables of this lib, for `migrate`. */
export const webhookMigrations: readonly Migration[] = [webhookEndpointMigration, webhookEventMigration, webhookDeliveryMigration];
