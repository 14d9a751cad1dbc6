/**
 * Settlement exceptions: differences between the processor's records and our books. Pure functions.
 *
 * Each exception has a stream `exception-<id>`. A person assigns, explains and resolves it. If money is in suspense, the resolution says where the
 * money belongs (R16). If the difference no longer exists, the exception is superseded automatically.
 */
import { type Cents, type Decider, ServiceError, unreachable } from '#kernel';
import type { GatewayAccount, Leg, Ref } from '#payments';

/**
 * All results of a line except `MATCHED`, and kinds that follow from time limits or sums.
 *
 * - `REFUND_FAILED`: a settled refund has failed, and its money is back at the merchant.
 * - `RETURNED_ELSEWHERE`: money of a payment went back at the processor's own page. The payment does not record it yet.
 * - `SUSPENSE_MISMATCH`: a line was corrected after its exception was resolved. The resolution took a wrong amount out of suspense.
 * - `SOURCE_MISMATCH`: the processor's interface contradicts the recorded batch.
 */
export const EXCEPTION_KINDS = [
  'MISSING_AT_GATEWAY',
  'MISSING_HERE',
  'AMOUNT_MISMATCH',
  'STATUS_MISMATCH',
  'DUPLICATE_AT_GATEWAY',
  'WRONG_ACCOUNT',
  'REFUND_FAILED',
  'RETURNED_ELSEWHERE',
  'FEE_MISMATCH',
  'LATE',
  'FUNDING_MISMATCH',
  'SUSPENSE_MISMATCH',
  'SOURCE_MISMATCH',
] as const;
export type ExceptionKind = (typeof EXCEPTION_KINDS)[number];

type Fact<Type extends string, Data> = { readonly type: Type; readonly at: string; readonly data: Data };

export interface OpenedException {
  readonly exceptionId: string;
  readonly kind: ExceptionKind;
  readonly gateway: string;
  readonly merchantAccount: string;
  readonly batchId: string | null;
  readonly line: number | null;
  readonly transactionId: string | null;
  readonly ref: string | null;
  readonly paymentId: string | null;
  readonly leg: Leg | null;
  /** The processor's amount, signed. null: the processor reported none. */
  readonly grossCents: number | null;
  /** The expected amount, if it differs. */
  readonly expectedCents: number | null;
  /** Amount in suspense until the exception is resolved (R15). */
  readonly suspenseCents: number;
}

export const RESOLUTIONS = ['settles', 'refund', 'adopt', 'no_posting'] as const;
/**
 * - `settles`: the money belongs to a payment that is unsettled here.
 * - `refund`: the money goes back to the cardholder through the processor.
 * - `adopt`: the money belongs to an agency. A part may be the service fee. Of `RETURNED_ELSEWHERE`: the payment records the return.
 * - `no_posting`: nothing is in suspense, or an adjustment took it out.
 */
export type Resolution = (typeof RESOLUTIONS)[number];

/** The intent to send the money of a sale, or of a failed refund, back to the card. */
export interface ExceptionRefund {
  readonly attemptId: string;
  /** Our reference, used for this refund only. */
  readonly ref: Ref;
  readonly account: GatewayAccount;
  /** The payment's leg. If no payment belongs to the exception: `combined`. */
  readonly leg: Leg;
  /** The charge whose money goes back. */
  readonly chargeTransactionId: string;
  readonly amountCents: Cents;
  readonly last4: string | null;
  readonly paymentId: string | null;
  readonly reason: string;
  readonly by: string;
}

export type ExceptionEvent =
  | Fact<'ExceptionOpened', OpenedException>
  | Fact<'ExceptionAssigned', { readonly to: string; readonly by: string }>
  | Fact<'ExceptionExplained', { readonly reason: string; readonly by: string }>
  | Fact<'ExceptionRefundRequested', ExceptionRefund>
  /** `transactionId` null: no money went back. The exception is then as before the intent. */
  | Fact<
      'ExceptionRefundEnded',
      { readonly attemptId: string; readonly outcome: 'refunded' | 'refused' | 'never_executed'; readonly transactionId: string | null }
    >
  /** The cause is gone: a corrected file removed or changed the line, or the missing transaction has settled. */
  | Fact<'ExceptionSuperseded', { readonly reason: string; readonly by: string }>
  | Fact<
      'ExceptionResolved',
      {
        readonly resolution: Resolution;
        readonly reason: string;
        readonly by: string;
        readonly merchantAccount: string;
        readonly suspenseCents: number;
        readonly paymentId: string | null;
        readonly portalId: string | null;
        readonly feeCents: Cents;
      }
    >;

export const EXCEPTION_STATUSES = ['opened', 'assigned', 'explained', 'resolved', 'superseded'] as const;
export type ExceptionStatus = (typeof EXCEPTION_STATUSES)[number];
/** The statuses of exceptions that nobody has resolved yet. */
export const OPEN_STATUSES: readonly ExceptionStatus[] = ['opened', 'assigned', 'explained'];

/** True if the exception can no longer change. */
export const isEnded = (status: ExceptionStatus): boolean => status === 'resolved' || status === 'superseded';

export interface SettlementCase {
  readonly opened: OpenedException;
  readonly status: ExceptionStatus;
  /** null: nobody has resolved it. */
  readonly resolution: Resolution | null;
  /** The refund that was sent. null: none, or the last one returned no money. `transactionId` null: its outcome is not recorded yet. */
  readonly refund: (ExceptionRefund & { readonly requestedAt: string; readonly transactionId: string | null }) | null;
}

export type ExceptionCommand =
  | { readonly type: 'Open'; readonly at: string; readonly opened: OpenedException }
  | { readonly type: 'Assign'; readonly at: string; readonly to: string; readonly by: string }
  | { readonly type: 'Explain'; readonly at: string; readonly reason: string; readonly by: string }
  | { readonly type: 'Supersede'; readonly at: string; readonly reason: string; readonly by: string }
  | { readonly type: 'RequestRefund'; readonly at: string; readonly by: string; readonly refund: ExceptionRefund }
  | {
      readonly type: 'EndRefund';
      readonly at: string;
      readonly by: string;
      readonly attemptId: string;
      readonly outcome: 'refunded' | 'refused' | 'never_executed';
      readonly transactionId: string | null;
    }
  | {
      readonly type: 'Resolve';
      readonly at: string;
      readonly resolution: Resolution;
      readonly reason: string;
      readonly by: string;
      readonly portalId: string | null;
      readonly feeCents: Cents;
      /** True: the money of the refund that was sent went back. If a refund was sent, only this resolves the exception. */
      readonly refunded?: true;
      /** True: the payment records the return. Only this adopts a return that was made elsewhere. */
      readonly recorded?: true;
    };

const evolve = (state: SettlementCase | null, event: ExceptionEvent): SettlementCase => {
  if (event.type === 'ExceptionOpened') {
    if (state) throw new Error('impossible history: an exception opened twice');
    return { opened: event.data, status: 'opened', resolution: null, refund: null };
  }
  if (!state || isEnded(state.status)) throw new Error(`impossible history: ${event.type} of an exception that is not open`);
  switch (event.type) {
    case 'ExceptionAssigned':
      return { ...state, status: 'assigned' };
    case 'ExceptionExplained':
      return { ...state, status: 'explained' };
    case 'ExceptionRefundRequested':
      if (state.refund) throw new Error('impossible history: two refunds of one exception');
      return { ...state, refund: { ...event.data, requestedAt: event.at, transactionId: null } };
    case 'ExceptionRefundEnded': {
      const { attemptId, transactionId } = event.data;
      if (state.refund?.attemptId !== attemptId || state.refund.transactionId !== null)
        throw new Error('impossible history: the end of a refund that is not under way');
      return { ...state, refund: transactionId === null ? null : { ...state.refund, transactionId } };
    }
    case 'ExceptionSuperseded':
      return { ...state, status: 'superseded' };
    case 'ExceptionResolved':
      return { ...state, status: 'resolved', resolution: event.data.resolution };
    default:
      return unreachable(event);
  }
};

const decide = (state: SettlementCase | null, command: ExceptionCommand): readonly ExceptionEvent[] => {
  if (command.type === 'Open') return state ? [] : [{ type: 'ExceptionOpened', at: command.at, data: command.opened }];
  if (!state) throw new ServiceError('VALIDATION_ERROR', 'There is no such exception.', {}, { status: 404 });
  const { at, by } = command;
  // The money of a refund may be on its way, so only the outcome of the refund ends the exception.
  if (command.type === 'Supersede')
    return isEnded(state.status) || state.refund ? [] : [{ type: 'ExceptionSuperseded', at, data: { reason: command.reason, by } }];
  if (isEnded(state.status)) throw new ServiceError('INVALID_STATE', `The exception is ${state.status}.`);
  switch (command.type) {
    case 'Assign':
      return [{ type: 'ExceptionAssigned', at, data: { to: command.to, by } }];
    case 'Explain':
      return [{ type: 'ExceptionExplained', at, data: { reason: command.reason, by } }];
    case 'RequestRefund':
      if (state.refund) throw underWay();
      if (state.opened.suspenseCents <= 0) throw new ServiceError('INVALID_STATE', 'A refund is sent only for money that lies in suspense.');
      return [{ type: 'ExceptionRefundRequested', at, data: command.refund }];
    case 'EndRefund': {
      const { attemptId, outcome, transactionId } = command;
      if (state.refund?.attemptId !== attemptId || state.refund.transactionId !== null) return [];
      return [{ type: 'ExceptionRefundEnded', at, data: { attemptId, outcome, transactionId } }];
    }
    case 'Resolve': {
      const { resolution, reason, portalId, feeCents } = command;
      const { merchantAccount, suspenseCents, paymentId } = state.opened;
      if (state.refund && (!command.refunded || state.refund.transactionId === null)) throw underWay();
      if (state.opened.kind === 'RETURNED_ELSEWHERE' && resolution === 'adopt' && !command.recorded)
        throw new ServiceError('INVALID_STATE', 'The payment does not record this return yet.');
      if (resolution !== 'no_posting' && suspenseCents === 0 && !command.recorded)
        throw new ServiceError('INVALID_STATE', 'Nothing of this exception lies in suspense: resolve it with no_posting, or adjust the books.');
      if (resolution === 'adopt' && portalId === null) throw new ServiceError('VALIDATION_ERROR', 'Money is adopted for an agency: name its portal.');
      if (resolution !== 'adopt' && (portalId !== null || feeCents !== 0))
        throw new ServiceError('VALIDATION_ERROR', 'A portal and a fee belong to adopt only.');
      if (!Number.isSafeInteger(feeCents) || feeCents < 0 || feeCents > Math.abs(suspenseCents))
        throw new ServiceError('VALIDATION_ERROR', 'The fee must be a part of the amount in suspense.');
      // A negative amount in suspense is money that went out, for example in an unexplained refund. The fee is then negative too.
      const fee = suspenseCents < 0 && feeCents > 0 ? -feeCents : feeCents;
      return [
        { type: 'ExceptionResolved', at, data: { resolution, reason, by, merchantAccount, suspenseCents, paymentId, portalId, feeCents: fee } },
      ];
    }
    default:
      return unreachable(command);
  }
};

const underWay = () =>
  new ServiceError('INVALID_STATE', 'A refund of this exception was sent. A worker ends the exception as soon as it knows the outcome.');

export const settlementException: Decider<SettlementCase | null, ExceptionCommand, ExceptionEvent> = { initial: null, decide, evolve };
