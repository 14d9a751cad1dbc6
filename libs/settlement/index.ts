export {
  type BatchName,
  batchStreamId,
  isSettledLine,
  isSettlementStream,
  type LineCorrection,
  linesOf,
  type RecordedLine,
  type SettlementEvent,
} from './batch.js';
export { type DisputeFacts, type DisputeTerms, openDispute, updateDispute } from './dispute.js';
export { exceptionEvents, settlementEvents, settlementFileEvents } from './events.js';
export { EXCEPTION_STATUSES, type ExceptionEvent, type ExceptionStatus, OPEN_STATUSES, type Resolution, settlementException } from './exception.js';
export { batchFigures, exceptionFigures } from './figures.js';
export {
  batchesAsOf,
  changeException,
  type ExceptionChange,
  exceptionModel,
  type ExceptionRow,
  exceptionRows,
  type FileImported,
  importSettlementFile,
  openExceptions,
} from './matching.js';
export { createRefundRecovery, type SentRefund, sendRefund, type SendRequest } from './send.js';
export { type Feed, type FeedRows, feedsOf, forgetFeeds, gatewayFeedMigration, pauseAfter, postgresFeedRows } from './feeds.js';
export { fundingsIn } from './file.js';
export { findReturns } from './elsewhere.js';
export { batchOf, type BatchSummary, type Funding, recordAnnouncedFunding, recordBatch, type SettlementPorts } from './record.js';
export { recordDisputes, recordSettlements, type RoundOptions } from './rounds.js';
export { paymentRegisterModel, postgresRegister, type Register, type RegisteredDispute, type RegisteredTransaction } from './register.js';
