/**
 * The vendor's codes, with its published text and what each means for us. docs/processors.md shows the same table, and
 * codes.unit.spec.ts compares the two.
 *
 * Sources: the list of response codes (developer.authorize.net/api/reference/responseCodes.html) and AnetApiSchema.xsd.
 */
import type { DeclineCode, NamedTransaction } from '#payments';

/**
 * Refusals of a whole request: nothing was executed, if the answer names no transaction. `account`: a fault of the account, so no other charge can
 * pass.
 *
 * Any other code may come after an execution. E00001 and E00053 are faults of the server, and E00049 is a time limit. E00101 to E00103 and E00141 are
 * about a customer profile, which the vendor makes after the transaction. The published lists that we have seen do not explain E00155.
 */
export const REFUSALS: Readonly<Record<string, { readonly text: string; readonly of: 'request' | 'account' | 'vendor' }>> = {
  E00002: { text: 'The content-type specified is not supported.', of: 'request' },
  E00003: { text: 'An error occurred while parsing the XML request.', of: 'request' },
  E00004: { text: 'The name of the requested API method is invalid.', of: 'request' },
  E00005: { text: 'The transaction key or API key is invalid or not present.', of: 'account' },
  E00006: { text: 'The API user name is invalid or not present.', of: 'account' },
  E00007: { text: 'User authentication failed due to invalid authentication values.', of: 'account' },
  E00008: { text: 'User authentication failed. The account or API user is inactive.', of: 'account' },
  E00009: { text: 'The payment gateway account is in Test Mode. The request cannot be processed.', of: 'account' },
  E00010: { text: 'User authentication failed. You do not have the appropriate permissions.', of: 'account' },
  E00011: { text: 'Access denied. You do not have the appropriate permissions.', of: 'request' },
  E00013: { text: 'The field is invalid.', of: 'request' },
  E00014: { text: 'A required field is not present.', of: 'request' },
  E00015: { text: 'The field length is invalid.', of: 'request' },
  E00016: { text: 'The field type is invalid.', of: 'request' },
  E00045: { text: 'The root node does not reference a valid XML namespace.', of: 'request' },
  E00104: { text: 'Server in maintenance', of: 'vendor' },
  E00124: { text: 'The provided access token is invalid', of: 'account' },
};

/** The account approves charges and moves no money. */
export const TEST_MODE = 'E00009';

/** Reasons of response code 3 whose text is about the card, and of response code 2. Every other reason of code 2 is a general decline. */
export const DECLINES: Readonly<Record<number, DeclineCode>> = {
  27: 'postal_code_mismatch',
  45: 'postal_code_mismatch',
  127: 'postal_code_mismatch',
  44: 'cvv_mismatch',
  65: 'cvv_mismatch',
  78: 'cvv_mismatch',
  8: 'expired_card',
  317: 'expired_card',
  6: 'generic_decline',
  7: 'generic_decline',
  17: 'generic_decline',
  28: 'generic_decline',
  37: 'generic_decline',
  315: 'generic_decline',
  316: 'generic_decline',
};

/**
 * Reasons of response code 3 after an authorisation that may stand. Under response code 2 the vendor has declined the transaction all the same, and
 * never settles it.
 */
export const MAY_STAND: Readonly<Record<number, string>> = {
  36: 'The authorization was approved but settlement failed.',
  52: 'The transaction was authorized but the client could not be notified; it will not be settled.',
  120: 'The system-generated void for the original timed-out transaction failed.',
  121: 'The system-generated void for the original errored transaction failed.',
  122: 'The system-generated void for the original errored transaction failed.',
  127: 'The system-generated void for the original AVS-rejected transaction failed.',
  141: 'The system-generated void for the original FraudScreen-rejected transaction failed.',
  145: 'The system-generated void for the original card code-rejected and AVS-rejected transaction failed.',
  152: 'The system-generated void for the original transaction failed.',
  165: 'System void failed.',
  181: 'The system-generated void for the original invalid transaction failed.',
};

/** Reasons of a transaction that waits for a review. */
export const HELD_REASONS: readonly number[] = [193, 252, 253];
export const DUPLICATE = 11;
/** "The amount of this request was only partially approved on the given prepaid card." */
export const PARTLY_APPROVED = 295;

type State = NamedTransaction['state'];
/**
 * What a line of a batch is by its status. `rejected`: only the details of the transaction say what it was. `pending`: the line is not final.
 * `adjustment`: money that no sale and no refund explains. `nothing`: no money has moved.
 */
type LineMeaning = 'sale' | 'refund' | 'rejected' | 'chargeback' | 'chargeback_reversal' | 'pending' | 'adjustment' | 'nothing';

/**
 * transactionStatusEnum of the schema, in its order: the state of the transaction, and what a line of a batch with this status is. `couldNotVoid`: the
 * vendor's own void failed, so the charge may stand. `returnedItem` belongs to electronic checks, so a line with it is of no payment of ours. A status
 * that is missing here is an unreadable state, and a line of its own kind.
 */
export const STATUSES: Readonly<Record<string, readonly [state: State, line: LineMeaning]>> = {
  authorizedPendingCapture: ['approved', 'adjustment'],
  capturedPendingSettlement: ['approved', 'pending'],
  communicationError: ['declined', 'nothing'],
  refundSettledSuccessfully: ['settled', 'refund'],
  refundPendingSettlement: ['approved', 'pending'],
  approvedReview: ['approved', 'adjustment'],
  declined: ['declined', 'nothing'],
  couldNotVoid: ['approved', 'adjustment'],
  expired: ['declined', 'nothing'],
  generalError: ['declined', 'nothing'],
  pendingFinalSettlement: ['settling', 'pending'],
  pendingSettlement: ['settling', 'pending'],
  failedReview: ['declined', 'nothing'],
  settledSuccessfully: ['settled', 'sale'],
  settlementError: ['settlement_rejected', 'rejected'],
  underReview: ['held', 'adjustment'],
  updatingSettlement: ['settling', 'pending'],
  voided: ['voided', 'nothing'],
  FDSPendingReview: ['held', 'adjustment'],
  FDSAuthorizedPendingReview: ['held', 'adjustment'],
  returnedItem: ['settled', 'adjustment'],
  chargeback: ['settled', 'chargeback'],
  chargebackReversal: ['settled', 'chargeback_reversal'],
  authorizedPendingRelease: ['approved', 'adjustment'],
};

/** transactionTypeEnum of the schema. A continued transaction belongs to an order that several cards pay. */
export const OPERATIONS: Readonly<Record<string, 'charge' | 'refund'>> = {
  authCaptureTransaction: 'charge',
  authOnlyTransaction: 'charge',
  captureOnlyTransaction: 'charge',
  priorAuthCaptureTransaction: 'charge',
  authOnlyContinueTransaction: 'charge',
  authCaptureContinueTransaction: 'charge',
  refundTransaction: 'refund',
};
