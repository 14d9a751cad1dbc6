export { type Alert, ALERT_NAMES, type AlertPorts, findAlerts } from './alerts.js';
export { columnsOf } from './columns.js';
export {
  type AuditCaller,
  auditKeyModel,
  type AuditKeyPorts,
  type AuditRole,
  authenticateAudit,
  issueAuditKey,
  type KeyTerms,
  listAuditKeys,
  revokeAuditKey,
} from './audit-key.js';
export {
  checkPayments,
  type Difference,
  driftFigures,
  driftAgainMigration,
  driftFollowMigration,
  driftFound,
  driftMigration,
  driftPassMigration,
  type DriftReport,
  findDrift,
  isWarning,
  paymentIdsAfter,
  sweepDrift,
} from './drift.js';
export { openPlace, sealPlace } from './cursor.js';
export { exceptionsFor } from './exceptions.js';
export { isReport, outOfScope, refuseReport, type ReportName, reportOf, REPORTS } from './exports.js';
export { changedPayments, eventPage, feedTypes, FeedWaits, isPlaceIn, MAX_WAIT_SECONDS } from './feed.js';
export {
  FIND_PARAMETERS,
  type FindBy,
  findFaults,
  type FindParameter,
  findPayments,
  type FindQuery,
  nameHashesOf,
  nameHashOf,
  NOTHING_KNOWN,
  paymentFindModel,
  searchPayments,
} from './find.js';
export { ForgedHead, headFiles, headKeys, openHead, readHeadFile, signHead, signManifest } from './head.js';
export { eventHash, rootOf } from './merkle.js';
export { dayIn } from './month.js';
export { beginPass, passChecks, type PassPorts, runPass, type PassState } from './pass.js';
export { type ExportManifest, exportReport, projectionDigest, reportText, writePack } from './pack.js';
export { proveConsistency, provePayment } from './prove.js';
export { listAsOf, type ListThenQuery, paymentAsOf, type Reader, readerOf, timeline, withoutStaffNames } from './replay.js';
export {
  BrokenPromise,
  LOG_SEAL,
  logSeal,
  logSealMigration,
  logState,
  type ProvePorts,
  resumeSeal,
  sealedEnd,
  signedEnd,
  signLog,
  storedTiles,
  unsignedEvents,
} from './seal.js';
export { nextPass, passFigures, type PassName, runDuePasses, verifyPassMigration } from './scheduled-passes.js';
export { type Statement, statementCsv, statementItems, statementOf } from './statement.js';
export { find, type Findings, trustedHead, UntrustedHead, verifyLog } from './verify.js';
