export { type Checkpoint, HandlerFault, type Lease, Moved, type Place, postgresCheckpoint, resetCheckpoint, runHandler } from './checkpoint.js';
export { LogGap, NotInTheLog } from './codec.js';
export {
  type Actor,
  Conflict,
  type EventStore,
  type Expected,
  type Mark,
  MAX_APPEND_BYTES,
  MAX_EVENTS_PER_APPEND,
  type NewEvent,
  OutcomeUnknown,
  type Position,
  ReadOnly,
  readStreams,
  type Recorded,
  StoreIncident,
  type Subscription,
  type SubscriptionItem,
  Unavailable,
  UnreadableStream,
} from './event-store.js';
export { type Examined, examineLog, isWhole, unheldMarks } from './examine.js';
export { defineEvents, type DomainEvent, type EventTypes, UnreadableEvent } from './events.js';
export { hostsOf, storeAddress, withAddress } from './hosts.js';
export { INSTALLATION_STREAM, installationEvents, installationIn, type SealedPlace } from './installation.js';
export {
  closeIncident,
  type Finding,
  type Incident,
  type KeptIntent,
  keptIntents,
  type Known,
  type KnownMark,
  type MarkBook,
  type MarkBookOptions,
  type OwnMarks,
  postgresMarkBook,
} from './marks.js';
export { memoryEventStore } from './memory.js';
export { eventStoreMigrations, guardLog, type GuardOptions, openEventStore, openOwnLog } from './open.js';
export { foundWhole, type LogGate, OwnLog, type OwnLogOptions } from './own-log.js';
export { createPostgresEventStore } from './postgres.js';
export {
  checkpointOf,
  dropReadModelsOf010,
  dropUnusedShapes,
  type Load,
  missingShapes,
  prepareReadModels,
  type ReadModel,
  ReadModels,
  rebuild,
  schemaOf,
  searchPathOf,
  shapeStatus,
} from './read-model.js';
export {
  append,
  type AppendOptions,
  change,
  type DecidedStreamType,
  execute,
  load,
  type Loaded,
  type Origin,
  recordOnce,
  retryOnConflict,
  type StreamType,
} from './streams.js';
export {
  createSubscriber,
  eventsBetween,
  type Projection,
  ProjectionFailed,
  type ProjectionLog,
  projectionPlace,
  readAhead,
  type Subscriber,
  watchProjection,
} from './subscriber.js';
