export { batched, Convoy, shared } from './batch.js';
export { brandOf, cardInText, cardInTextCheck, DIGITS_ONLY, holdsCardNumber, maskCardNumbers, passesLuhn } from './card-text.js';
export { contactInText } from './contact-text.js';
export { comparableEmail, isEmail, MAX_EMAIL_LENGTH, unseenInEmail } from './email.js';
export { controlsInText, withEscapes } from './controls.js';
export { type AlertThresholds, type Config, ConfigError, isLoopback, type Network, readConfig, type WebhookSettings } from './config.js';
// Exported here and not from #platform/http, which would load the HTTP server and its validators into every process.
export { type Answer, errorAnswer, internalErrorAnswer, openAnswer, successAnswer } from './http/envelope.js';
export { NUL_OR_LONE_SURROGATE, parseExactly } from './http/strict-json.js';
export { crockford, hashedUuid, systemIds, uuidTime, uuidV5, uuidV7 } from './ids.js';
export { createKeyFile, KeyRing, newKeyRing, openKeys, readKeyRing, readOrCreateKeyRing } from './keys.js';
export { createLogger, type Logger, maskedLines } from './logging.js';
export { appendOwnFile, NotOurs, readOwnFile, requireOwnFolder, requireOwnFolderOrNone, writeOwnFile } from './own-file.js';
export { copyInto } from './postgres/copy.js';
export { type EmbeddedPostgres, freePort, levelOfLine, startEmbeddedPostgres } from './postgres/embedded.js';
export { collect, everyRow, PAGE_ROWS } from './postgres/pages.js';
export {
  boxAsText,
  boxInText,
  createPersonalKeys,
  OPENED_KEYS_KEPT_MS,
  type Erasure,
  OpenedKeys,
  type Opening,
  type Openings,
  PersonalKey,
  type PersonalKeyRows,
  type PersonalKeys,
  personalKeyMigration,
  postgresOpenings,
  postgresPersonalKeyRows,
  type WrappedKey,
} from './personal.js';
export { type DatabasePlace, databasePlace, follows } from './postgres/place.js';
export { DatabaseUnavailable, isDataException, isReadOnly, isRolledBack, READ_ONLY, StatementTimeout } from './postgres/errors.js';
export {
  ALL_AS_TEXT,
  type Client,
  createPool,
  endConnections,
  onUnlimited,
  type Pool,
  type PoolOptions,
  type Queryable,
  transaction,
  transactionOn,
  withoutLimits,
} from './postgres/pool.js';
export { databaseTime, livingProcesses, processMigration, recordProcess } from './postgres/processes.js';
export { purge, PURGE_BATCH } from './postgres/purge.js';
export { advanceSandboxTime, clockOf, type MovedTime, refuseMovedTime, SandboxTime, sandboxTimeMigration } from './postgres/sandbox-time.js';
export { isMigrated, migrate, type Migration, missingMigrations } from './postgres/schema.js';
export { compareReleases, RELEASE } from './release.js';
export { type Slot, type SlotRefusal, Slots, type SlotsOptions, type Waiting } from './slots.js';
