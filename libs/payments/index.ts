export {
  charge,
  chargeAnswer,
  type ChargeRequest,
  gatewayAccountsOf,
  gatewayRef,
  type PaymentPorts,
  refuseByTerms,
  refuseExpiredCard,
} from './charge.js';
export {
  chargeOnce,
  type FeeQuote,
  findPayment,
  type PaymentServices,
  type QuoteRequest,
  type Received,
  reverseByStaff,
  reverseOnce,
  finishCreate,
  requestDeadline,
  type StaffReverseRequest,
} from './commands.js';
export { openCursor } from './cursor.js';
export { serviceFee } from './fee.js';
export { callGateway, REQUEST_DEADLINE_MS } from './gateway/call.js';
export { type GatewayCall, GatewayCalls } from './gateway/calls.js';
export { awayAtGateway, GATEWAY_SLOTS, type GatewaySlotLimits, GatewaySlots } from './gateway/slots.js';
export {
  type ChargeCall,
  type ChargeTxn,
  type Check,
  DECLINE_CODES,
  type DeclineCode,
  type Finalized,
  type GatewayAccount,
  type GatewayCapabilities,
  type Gateways,
  type Leg,
  type LookedUp,
  type NamedTransaction,
  type Op,
  type Outcome,
  type PaymentGateway,
  type PaymentInstrument,
  type Ref,
  type ReferenceCall,
  type RefundCall,
  type RejectionReason,
  type ReversalTxn,
  Secret,
  type SettlementRecord,
  UnknownCursor,
  type VoidCall,
} from './gateway/gateway.js';
export {
  type Claim,
  type ClaimRequest,
  type FoundKey,
  type IdempotencyStore,
  KEEP_HOURS,
  type KeyName,
  keyNameOf,
  type KeyRows,
  LEASE_SECONDS,
  type Operation,
  type Owned,
  type RequestText,
  type RestoredKey,
  type StoredAnswer,
} from './keys/key-store.js';
export {
  type ComparedKeys,
  compareKeys,
  keysFromLog,
  type KeysFromLogPorts,
  KEYS_FROM_LOG,
  keysFromLogMigration,
  rebuildKeys,
} from './keys/from-log.js';
export { abandon, type EmptyCreate, emptyCreates, endedCreates, unborne, type Unborne } from './incident.js';
export { type Answered, type AnswerEncoder, atStableTime, idempotencyUnavailable, storeIncident } from './keys/once-by-key.js';
export { idempotencyMigrations, postgresIdempotency, postgresKeyRows, recordedKey } from './keys/postgres.js';
export { type Claims, type ClaimsDatabase, ClaimsGate, claimsMigration, type KeptPlace } from './keys/claims.js';
export { purgeKeys, sweepKeys } from './keys/sweep.js';
export { type ListFilters, NO_FILTERS } from './list-filters.js';
export {
  applyPaymentList,
  DEFAULT_PAGE,
  listPayments,
  type ListPlace,
  listPlaces,
  type ListRequest,
  MAX_PAGE,
  openAttempts,
  paymentListModel,
  paymentListRow,
  PAGE_BYTES,
  type PaymentListRows,
  type PaymentPage,
  type PaymentRow,
  paymentScopeCondition,
  postgresListRows,
} from './list.js';
export {
  cents,
  type Charge,
  type Charged,
  type ChargedLeg,
  type Coding,
  type Dispute,
  DISPUTE_STATUSES,
  disputeContext,
  disputedCents,
  type DisputeStatus,
  type Initiator,
  type Intent,
  isVisible,
  keysOfPayment,
  type LegMove,
  type LegReturned,
  type LegTerms,
  type LineItem,
  type LineTexts,
  type Means,
  openAttempt,
  type Payer,
  payment,
  type Payment,
  PAYMENT_STATUSES,
  type PaymentCommand,
  type PaymentEvent,
  type PaymentStatus,
  type PaymentTerms,
  type PaymentTexts,
  personalIn,
  type Reason,
  reasonContext,
  type RecordedKey,
  remaining,
  type RequestRefund,
  type RequestVoid,
  type ReversalEnd,
  type ReversalRequest,
  SETTLEMENT_STATUSES,
  statusOf,
  termsContext,
  type VisiblePayment,
} from './payment.js';
export { type LineItemView, type PaymentView, paymentView, reasonOf, type RefundView, type VoidView } from './payment.view.js';
export { keyForPayment, openPayment } from './personal.js';
export {
  createRecovery,
  postgresRecoveryWork,
  purgeTries,
  type Recovery,
  RECOVERY_STARTS_AFTER_MS,
  RECOVERY_SCHEDULE_MS,
  recoveryMigration,
  type RecoveryWork,
  type Resolution,
} from './recovery.js';
export { GatewayCannotTell, resolvePayment, type ResolveRequest, transactionOf } from './resolve.js';
export { finalizeReference, reverse, type ReverseRequest } from './reverse.js';
export {
  ACKNOWLEDGED_TASKS,
  type AcknowledgedTask,
  acknowledgeStaffTask,
  type AcknowledgeRequest,
  operator,
  raiseStaffTask,
  refuseClearText,
  refuseStaffText,
  staff,
  type StaffTaskReason,
} from './staff.js';
export { OPEN_STAFF_TASKS, openStaffTasks, type OpenStaffTasks, staffTasks, staffWorkModel, WAITS_FOR_STAFF } from './staff-work.js';
export { type LoadedPayment, paymentEvents, paymentIdOf, paymentStream, PaymentStreams, retryingConflicts, shownEvent, textOf } from './stream.js';
export {
  listRefusals,
  postgresRefusals,
  purgeRefusals,
  refusalMigration,
  REFUSALS_KEPT_DAYS,
  type RefusalPlace,
  type RefusalQuery,
  type Refusals,
  type RefusedAttempt,
} from './refusals.js';
export { postgresVelocity, purgeVelocity, type Velocity, velocityMigration } from './velocity.js';
