export {
  type AttemptRow,
  bringForward,
  type Claimed,
  type Deliveries,
  deliveryFigures,
  type DeliveryRow,
  type DeliveryState,
  type Ended,
  findDelivery,
  listDeliveries,
  noDelivery,
  postgresDeliveries,
  purgeAttempts,
  purgeDelivered,
  redeliver,
  redeliverAllHeld,
} from './deliveries.js';
export { createDispatcher, type Dispatcher, type DispatcherOptions, type DispatcherPorts, type DispatcherWatch } from './dispatcher.js';
export { type DueSignal, postgresDueSignal } from './due.js';
export { type Endpoint, Endpoints, type EndpointSecret, type EndpointStatus, type StaffDeps } from './endpoint.js';
export { type Forwarded, listenSecretOf, listenTo } from './listen.js';
export { webhookMigrations } from './migrations.js';
export { notificationOf } from './notification.js';
export { applyOutbox, type OutboxEvent, type OutboxRows, WEBHOOK_OUTBOX, webhookOutbox } from './outbox.js';
export { forgetResponses } from './responses.js';
export { bodyToSend, type PayloadPorts } from './payload.js';
export { createSender, type Outcome, type Posted, type Sender } from './safe-request.js';
export { ATTEMPT_BUDGET_MS, FAILING_AFTER, type Fate, LEASE_MS, MAX_ATTEMPTS, MAX_LEASE_LOSSES, RETRY_SECONDS, RETRY_SPREAD } from './schedule.js';
export { headersOf } from './signature.js';
export { postgresStaffTables, type StaffRows, type StaffTables } from './staff-rows.js';
export { checkUrl, createResolve, Refused } from './target.js';
