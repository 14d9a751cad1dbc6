/**
 * A payment, from its request to the last cent returned.
 *
 * Order of this file: events; state and `evolve`; the status and the money that follow from the state; commands; `decide`. Nothing here calls a
 * gateway, a clock or a database: commands bring times, ids, references and gateway outcomes. GET, list, answers and audit all use this `evolve`.
 */
import {
  canonicalJson,
  type Cents,
  decimal,
  type Decider,
  isSamePersonal,
  type Json,
  keysIn,
  type Personal,
  proRata,
  ServiceError,
  sumCents,
  unreachable,
} from '#kernel';
import type { ChargedCard, Check, DeclineCode, GatewayAccount, Leg, Ref } from './gateway/gateway.js';
import { overtaken, sharedByTotal, type Taken, takingOf } from './taking.js';

// ------------------------------------------------------------------------------------------------------------------------------------
// Events. Each is a fact in the past tense, with amounts in whole cents, and never holds card data. `at` is the event's recordedAt (RFC 3339,
// milliseconds).

type Fact<Type extends string, Data> = { readonly type: Type; readonly at: string; readonly data: Data };

export type PaymentEvent =
  | Fact<'PaymentInitiated', PaymentTerms & Intent>
  | Fact<'PaymentCreated', { readonly attemptId: string } & ApprovedCharge>
  | Fact<
      'PaymentDeclined',
      {
        readonly attemptId: string;
        readonly leg: Leg;
        readonly declineCode: DeclineCode;
        readonly transactionId: string | null;
        readonly raw: string | null;
        readonly takenBack?: readonly TakenBack[];
      } & Checks
    >
  | Fact<'PaymentFailed', { readonly attemptId: string; readonly reason: string; readonly takenBack?: readonly TakenBack[] }>
  | Fact<'PaymentOutcomeUnknown', { readonly attemptId: string; readonly leg: Leg; readonly cause: string }>
  | Fact<'PaymentAbandoned', { readonly attemptId: string; readonly accountId: string; readonly reason: string }>
  /**
   * The log has lost the end of this payment's create, and the gateway has charged it or cannot tell. Its caller may have been told that it succeeded,
   * so it is never undone by itself. The intent comes before this event if it was kept outside of the log.
   */
  | Fact<'PaymentLost', LostCreate>
  | Fact<'ReconciliationStarted', { readonly attemptId: string }>
  | Fact<'VoidRequested', ReversalRequest & Intent>
  | Fact<'RefundRequested', ReversalRequest & Intent>
  /** `undone`: the charge of an unknown payment was undone by a refund. The processor settles both transactions. Absent: nothing of the leg settles. */
  | Fact<'PaymentVoided', LegReturned & { readonly undone?: Undone }>
  | Fact<'PaymentRefunded', LegReturned & Pending>
  | Fact<'FeeRefunded', LegReturned & Pending>
  /** A refund that was made here has failed later. The cents stay returned: only staff send them again (C75). */
  | Fact<'RefundFailed', { readonly leg: Leg; readonly transactionId: string }>
  | Fact<'ReturnedElsewhere', ElsewhereReturn>
  | Fact<'ReversalEnded', ReversalEnd>
  /**
   * A caller gets the result of the attempt `attemptId`. `toldAs`: the attempt that the caller's key is bound to, if it is another one. That attempt
   * moved no money, and no newer intent names the key. So this event names it.
   */
  | Fact<'ReversalAcknowledged', { readonly attemptId: string; readonly toldAs?: string; readonly idempotency: RecordedKey | null }>
  | Fact<
      'PaymentSettled',
      { readonly leg: Leg; readonly batchId: string; readonly closedAt: string; readonly grossCents: Cents; readonly feeCents: Cents }
    >
  | Fact<'SettlementRejected', { readonly leg: Leg; readonly batchId: string; readonly closedAt: string }>
  /**
   * Cancels the PaymentSettled of the leg, with the same amounts. A corrected file says that the leg is not in the batch, or has other amounts there.
   */
  | Fact<
      'SettlementWithdrawn',
      { readonly leg: Leg; readonly batchId: string; readonly closedAt: string; readonly grossCents: Cents; readonly feeCents: Cents }
    >
  /** `overtakenBy`: the dispute is as before. The return of this attempt was under way, and took a part of the same cents. */
  | Fact<'PaymentDisputed', Dispute & { readonly overtakenBy?: string }>
  /** Staff send settled money of an unknown payment back to the card, for this settlement exception. From now on the payment cannot succeed. */
  | Fact<'ReturnRequested', { readonly exceptionId: string }>
  | Fact<
      'PaymentResolved',
      {
        readonly as: 'succeeded' | 'voided' | 'failed';
        readonly charge: Charge | null;
        readonly evidence: string;
        readonly by: string;
        readonly forced: boolean;
      }
    >;

/** `portalId`: the nil UUID if it is not known. `references`: those that the attempt may have used, by leg and merchant account. */
export interface LostCreate {
  readonly paymentId: string;
  readonly attemptId: string;
  readonly accountId: string;
  readonly portalId: string;
  readonly references: readonly Pick<LegTerms, 'leg' | 'account' | 'references'>[];
}

/** An event that announces gateway calls, without texts about people. */
export type IntentEvent = Extract<PaymentEvent, { readonly type: 'PaymentInitiated' | 'VoidRequested' | 'RefundRequested' }>;

/** An event that names the key of a request and binds the key to an attempt. */
export type KeyedEvent = Extract<PaymentEvent, { readonly data: { readonly idempotency: RecordedKey | null } }>;

/** The attempt that an event announces, and the key of its request. `idempotency` null: a request without a key. */
export interface Intent {
  readonly attemptId: string;
  readonly idempotency: RecordedKey | null;
}

/**
 * The key of a request, as the log keeps it. A key store that has lost a row makes the row again from this record. The record holds only keyed
 * hashes, as hex, since the log is never deleted. The fingerprint uses the card's last four digits instead of its number.
 */
export interface RecordedKey {
  /** The account, or the key space of staff. */
  readonly keySpace: string;
  readonly keyHash: string;
  readonly fingerprint: string;
  /** Id of the master key that made the fingerprint. */
  readonly kid: string;
  readonly operation: string;
}

export interface LineItem {
  readonly id: string;
  readonly amountCents: Cents;
  /** This line's share of the service fee, in cents (C33). */
  readonly serviceFeeCents: Cents;
  readonly referenceId: string;
  /** Codes for the general ledger, from the metadata. null: the portal named no key, or the line has none of them. */
  readonly coding: Coding | null;
}

export type Coding = Readonly<Record<string, string>>;

/** The texts of a create: the payer, and what the lines say. They lie in a box. `lines`: in the order of the line items. */
export interface PaymentTexts {
  readonly payer: Payer | null;
  readonly lines: readonly LineTexts[];
}

export interface LineTexts {
  readonly description: string | null;
  readonly metadata: Readonly<Record<string, Json>> | null;
}

/** Why money was returned or disputed, in words. */
export interface Reason {
  readonly reason: string;
}

// Contexts of the boxes of a payment: its stream and the field.
export const termsContext = (paymentId: string): string => `payment-${paymentId}/terms`;
export const reasonContext = (paymentId: string, attemptId: string): string => `payment-${paymentId}/reason:${attemptId}`;
export const disputeContext = (paymentId: string, disputeId: string): string => `payment-${paymentId}/dispute:${disputeId}`;

export interface Payer {
  readonly firstName?: string;
  readonly lastName?: string;
  readonly email?: string;
  readonly phone?: string;
  readonly address?: {
    readonly line1?: string;
    readonly line2?: string;
    readonly city?: string;
    readonly state?: string;
    readonly zip?: string;
    readonly country?: string;
  };
}

/** One money movement of the charge, with every gateway reference that this attempt may ever use for it (C61). */
export interface LegTerms {
  readonly leg: Leg;
  readonly principalCents: Cents;
  readonly feeCents: Cents;
  readonly account: GatewayAccount;
  readonly references: { readonly charge: Ref; readonly reversal: Ref };
}

export interface PaymentTerms {
  readonly accountId: string;
  readonly portalId: string;
  readonly referenceId: string | null;
  readonly amountCents: Cents;
  readonly serviceFeeCents: Cents;
  /** Version of the portal's fee configuration that gave this fee. The fee is never computed again (C32). */
  readonly feeVersion: number;
  readonly chargeMode: 'separate' | 'combined';
  readonly lineItems: readonly LineItem[];
  readonly personal: Personal<PaymentTexts>;
  readonly paymentMethod: { readonly type: 'card' | 'card_token'; readonly brand: string; readonly last4: string };
  readonly legs: readonly LegTerms[];
}

/** The answers of the card's bank about the address (AVS) and the security code (CVV). null: no answer. The code itself is never stored. */
export interface Checks {
  readonly avs: Check | null;
  readonly cvv: Check | null;
}

export const checksOf = ({ avs = null, cvv = null }: Partial<Checks>): Checks => ({ avs, cvv });

export interface Charge {
  readonly confirmationNumber: string;
  readonly legs: readonly ({
    readonly leg: Leg;
    readonly transactionId: string;
    readonly authCode: string;
  } & Checks)[];
}

/** A charge as its request saw it. `card`: the card behind a token, as the gateway named it. Absent: the terms name the card, or nobody does. */
export type ApprovedCharge = Omit<Charge, 'legs'> & { readonly legs: readonly (Charge['legs'][number] & { readonly card?: ChargedCard })[] };

/**
 * A leg that was charged and then voided by the same request, because the other leg failed (C41). The processor has both transactions. The field
 * `takenBack` is absent if no leg was voided.
 */
export interface TakenBack {
  readonly leg: Leg;
  readonly amountCents: Cents;
  readonly transactionId: string;
  readonly voidTransactionId: string;
  /** Absent: a void. */
  readonly means?: Means;
}

/** How the charge of a leg was undone, if the processor settles both the charge and what undid it. */
export interface Undone {
  readonly means: 'refund';
  readonly chargeTransactionId: string;
}

export type Initiator = 'partner' | 'staff';
export type Means = 'void' | 'refund';

/** The intent to return money: the request, and for each leg the amounts, the operation and the references. */
export interface ReversalRequest {
  readonly attemptId: string;
  readonly initiatedBy: Initiator;
  readonly personal: Personal<Reason>;
  /** The amount and the fee as they were requested. They identify a repeat without a key (C18). */
  readonly asked: { readonly amountCents: Cents | null; readonly includeFee: boolean };
  readonly legs: readonly LegMove[];
  readonly lines: readonly { readonly lineItemId: string; readonly principalCents: Cents; readonly feeCents: Cents }[];
  /** The partial refund or incomplete void that this attempt completes (C27, C38). */
  readonly completes: string | null;
}

export interface LegMove {
  readonly leg: Leg;
  readonly principalCents: Cents;
  readonly feeCents: Cents;
  /** The operation that is tried first. The gateway may require the other one (C24). */
  readonly means: Means;
  readonly references: { readonly void: Ref; readonly refund: Ref };
}

/** The money of one leg was returned. `leg` null: the charge was never executed, so no money had to move. */
export interface LegReturned {
  readonly attemptId: string;
  readonly leg: Leg | null;
  readonly principalCents: Cents;
  readonly feeCents: Cents;
  readonly transactionId: string | null;
}

/** `pending`: the processor took the refund and had not carried it out yet. Absent: it had, as far as it said. */
interface Pending {
  readonly pending?: true;
}

/**
 * The processor shows that money of a leg went back, and no call of ours did that. While it is `found`, refunds and voids are refused: staff decide.
 * `adopted`: the payment records the return. `dismissed`: it stays as it was.
 */
export interface ElsewhereReturn {
  /** Also the id of its settlement exception, and of the attempt that records it. */
  readonly returnId: string;
  readonly leg: Leg;
  /** The processor's id of the refund, or of the charge that was voided. null: the processor refused a call, and named none. */
  readonly transactionId: string | null;
  readonly status: 'found' | 'adopted' | 'dismissed';
}

export interface ReversalEnd {
  readonly attemptId: string;
  readonly operation: Means;
  readonly outcome: 'completed' | 'partial' | 'rejected' | 'never_executed';
  /** How the gateway returned the money. null: no money moved (C24). */
  readonly reversalType: Means | null;
  /** Cents that this attempt returned, fee included. */
  readonly amountCents: Cents;
  /** Copied from the request. */
  readonly personal: Personal<Reason>;
  readonly initiatedBy: Initiator;
}

export const DISPUTE_STATUSES = ['debited', 'in_dispute', 'lost', 'recovered'] as const;
export type DisputeStatus = (typeof DISPUTE_STATUSES)[number];

export interface Dispute {
  readonly disputeId: string;
  readonly status: DisputeStatus;
  /** The processor's own word for the latest step, at most 64 characters (C57). */
  readonly stage: string;
  readonly reasonCode: string;
  readonly personal: Personal<Reason>;
  readonly disputedAmountCents: Cents;
  /**
   * What the dispute takes, by leg. While it is recovered: what it gave back. Absent in events of older releases, which shared the dispute by
   * {@link sharedByTotal}.
   */
  readonly taken?: readonly Taken[];
  /** The leg whose charge the processor named. Absent if it named none. The books take the merchant account from this leg. */
  readonly leg?: Leg;
  /** Where the processor lists it. Absent if staff recorded it. */
  readonly source?: DisputeSource;
  /** YYYY-MM-DD. */
  readonly openedOn: string;
  readonly dueDate: string;
}

export interface DisputeSource {
  readonly gateway: string;
  readonly merchantAccount: string;
  /** The processor's id of the dispute. */
  readonly externalId: string;
}

// ------------------------------------------------------------------------------------------------------------------------------------
// State. Each phase has only the fields that it needs. The state is plain JSON, since the list's projection stores it.

interface Known {
  readonly terms: PaymentTerms;
  readonly attemptId: string;
  readonly createdAt: string;
  readonly updatedAt: string;
}

export type Payment =
  | { readonly phase: 'none' }
  /** The stream holds only the fence of a create that never began: there is no payment (C64). */
  | { readonly phase: 'abandoned'; readonly accountId: string }
  | Awaiting
  | (Known & { readonly phase: 'failed'; readonly declineCode: DeclineCode | null; readonly undone?: readonly UndoneCharge[] })
  /** The payment was pending or unknown. Its charge was reversed, or was never processed. Nothing was captured. */
  | (Known & { readonly phase: 'voided'; readonly undone?: readonly UndoneCharge[] })
  | Charged;

/**
 * `fenced`: recovery owns the attempt. A late outcome of the request then conflicts and is refused. `returns`: the settlement exceptions whose refund
 * staff have begun to send. Absent: none. `lost`: the log has lost the end of the create, so nothing is undone by itself.
 */
export type Awaiting = Known & {
  readonly phase: 'pending' | 'unknown';
  readonly fenced: boolean;
  readonly returns?: readonly string[];
  readonly lost?: true;
};

export type Charged = Known & {
  readonly phase: 'charged';
  readonly confirmationNumber: string;
  readonly capturedAt: string;
  readonly legs: readonly ChargedLeg[];
  readonly lines: readonly { readonly principalReturnedCents: Cents; readonly feeReturnedCents: Cents }[];
  /**
   * The operation that returned money last. It decides between `voided` and `refunded`, and between `succeeded` and `partially_refunded` (C21, C22,
   * C27).
   */
  readonly lastReturnedBy: Means | null;
  readonly attempts: readonly ReversalAttempt[];
  readonly disputes: readonly Dispute[];
  /** Returns that were made at the processor's own page. Absent: none. */
  readonly elsewhere?: readonly ElsewhereReturn[];
};

/** A charge and the refund that undid it. Both settle, although the payment was never charged. Cents: of each of them. */
export interface UndoneCharge {
  readonly leg: Leg;
  readonly chargeTransactionId: string;
  readonly refundTransactionId: string;
  readonly amountCents: Cents;
}

/** The charges of a payment that were undone by a refund. Only a failed or voided payment has any. */
export const undoneCharges = (payment: Payment): readonly UndoneCharge[] => ('undone' in payment && payment.undone) || [];

export interface ChargedLeg {
  readonly leg: Leg;
  readonly account: GatewayAccount;
  readonly transactionId: string;
  readonly authCode: string;
  /** Absent: the terms of the payment name the card, or nobody does. */
  readonly card?: ChargedCard;
  readonly principalCents: Cents;
  readonly feeCents: Cents;
  readonly principalReturnedCents: Cents;
  readonly feeReturnedCents: Cents;
  /** A leg on which a refund was made is never voided afterwards (C24). */
  readonly refunded: boolean;
  readonly settledBatchId: string | null;
  /** RFC 3339: when that batch closed. null: the leg is not settled. */
  readonly settledAt: string | null;
  /** The amounts of the leg in its batch. null: the leg is not settled. */
  readonly settledGrossCents: Cents | null;
  readonly settledFeeCents: Cents | null;
  readonly settlementRejected: boolean;
}

export interface ReturnedLeg extends Pending {
  readonly leg: Leg;
  readonly means: Means;
  readonly principalCents: Cents;
  readonly feeCents: Cents;
  readonly transactionId: string;
  /** True: the refund has failed later. Absent: no processor has said so. */
  readonly failed?: true;
}

export interface ReversalAttempt extends ReversalRequest {
  readonly operation: Means;
  readonly requestedAt: string;
  /** The request of this attempt got a 5xx, or vanished. The next request resolves the attempt (C18). */
  readonly fenced: boolean;
  readonly returned: readonly ReturnedLeg[];
  readonly ended:
    (Pick<ReversalEnd, 'outcome' | 'reversalType' | 'amountCents'> & { readonly at: string; readonly remainingRefundableCents: Cents }) | null;
  /** The attempt was left open after a part of the money was returned. The caller got PARTIAL_REFUND_PENDING or retry_void. */
  readonly toldPartial: boolean;
  /** A repeated request has got the result of this attempt (C18). */
  readonly acknowledged: boolean;
  /** The other attempt whose key got this result; null: no such key. From then on the result belongs to that key (specification, Idempotency 1). */
  readonly toldAs: string | null;
  /** The attempt that completed this partial one. */
  readonly completedBy: string | null;
}

const initial: Payment = { phase: 'none' };

export const evolve = (payment: Payment, event: PaymentEvent): Payment => {
  const { at } = event;
  switch (event.type) {
    case 'PaymentInitiated': {
      if (payment.phase !== 'none') throw impossible(payment, event);
      const { attemptId, idempotency: _, ...terms } = event.data;
      return { phase: 'pending', terms, attemptId, createdAt: at, updatedAt: at, fenced: false };
    }
    case 'PaymentAbandoned':
      if (payment.phase !== 'none') throw impossible(payment, event);
      return { phase: 'abandoned', accountId: event.data.accountId };
    case 'PaymentLost': {
      const before = payment.phase === 'none' ? lostTerms(event.data, at) : pending(payment, event);
      return { ...before, phase: 'unknown', fenced: true, lost: true, updatedAt: at };
    }
    case 'PaymentCreated':
      return charged(pending(payment, event), event.data, at);
    case 'PaymentDeclined':
      return { ...known(awaiting(payment, event), at), phase: 'failed', declineCode: event.data.declineCode, ...takenBackByRefund(event.data) };
    case 'PaymentFailed':
      return { ...known(pending(payment, event), at), phase: 'failed', declineCode: null, ...takenBackByRefund(event.data) };
    case 'PaymentOutcomeUnknown': {
      const before = pending(payment, event);
      return { ...before, phase: 'unknown', updatedAt: at };
    }
    case 'ReconciliationStarted':
      if (payment.phase === 'charged') {
        // An attempt that has ended may be fenced, too. Its request got a 5xx, because the log's answer to the last append was lost (C18).
        if (attemptOf(payment, event.data.attemptId)?.fenced) throw impossible(payment, event);
        return withAttempt(payment, event, at, (attempt) => ({
          ...attempt,
          fenced: true,
          toldPartial: !attempt.ended && attempt.returned.length > 0,
        }));
      }
      return { ...awaiting(payment, event), phase: 'unknown', fenced: true, updatedAt: at };
    case 'ReturnRequested': {
      const before = awaiting(payment, event);
      if (before.phase !== 'unknown' || !before.fenced) throw impossible(payment, event);
      return { ...before, updatedAt: at, returns: [...(before.returns ?? []), event.data.exceptionId] };
    }
    case 'PaymentResolved': {
      const before = awaiting(payment, event);
      if (before.phase !== 'unknown') throw impossible(payment, event);
      if (event.data.as === 'succeeded' && event.data.charge) return charged(before, event.data.charge, at);
      return event.data.as === 'failed' ? { ...known(before, at), phase: 'failed', declineCode: null } : { ...known(before, at), phase: 'voided' };
    }
    case 'VoidRequested':
    case 'RefundRequested': {
      const before = asCharged(payment, event);
      if (openAttempt(before) || attemptOf(before, event.data.attemptId)) throw impossible(payment, event);
      const { legs, lines } = event.data;
      if (
        sumCents(legs, (leg) => leg.principalCents) !== sumCents(lines, (line) => line.principalCents) ||
        sumCents(legs, (leg) => leg.feeCents) !== sumCents(lines, (line) => line.feeCents)
      )
        throw new Error(`${event.type}: the lines do not sum to the legs`);
      const operation = event.type === 'VoidRequested' ? 'void' : 'refund';
      const { idempotency: _, ...request } = event.data;
      const attempt: ReversalAttempt = {
        ...request,
        operation,
        requestedAt: at,
        fenced: false,
        toldPartial: false,
        returned: [],
        ended: null,
        acknowledged: false,
        toldAs: null,
        completedBy: null,
      };
      return { ...before, updatedAt: at, attempts: [...before.attempts, attempt] };
    }
    case 'PaymentVoided':
      // For an unknown payment, this event says that the charge was undone or never made. A pending payment must be fenced first, because its charge may
      // still succeed.
      if (payment.phase === 'voided') return { ...payment, updatedAt: at, ...withUndone(payment.undone, undoneBy(event.data)) };
      if (payment.phase === 'unknown') return { ...known(payment, at), phase: 'voided', ...withUndone([], undoneBy(event.data)) };
      if (payment.phase !== 'charged') throw impossible(payment, event);
      return returned(payment, event, 'void');
    case 'PaymentRefunded':
    case 'FeeRefunded':
      return returned(asCharged(payment, event), event, 'refund');
    case 'RefundFailed': {
      const before = asCharged(payment, event);
      const failed = returnOf(before, event.data);
      if (!failed) throw impossible(payment, event);
      const attempts = before.attempts.map((attempt) => ({
        ...attempt,
        returned: attempt.returned.map((one) => (one === failed ? { ...one, failed: true as const } : one)),
      }));
      return { ...before, updatedAt: at, attempts };
    }
    case 'ReversalEnded': {
      const { attemptId, outcome, reversalType, amountCents } = event.data;
      const before = asCharged(payment, event);
      if (attemptOf(before, attemptId)?.ended) throw impossible(payment, event);
      const left = remaining(before);
      const ended = { outcome, reversalType, amountCents, at, remainingRefundableCents: left.principal + left.fee };
      const after = withAttempt(before, event, at, (attempt) => ({ ...attempt, ended }));
      const { completes } = attemptOf(after, attemptId)!;
      if (outcome !== 'completed' || !completes) return after;
      return {
        ...after,
        attempts: after.attempts.map((attempt) => (attempt.attemptId === completes ? { ...attempt, completedBy: attemptId } : attempt)),
      };
    }
    case 'ReturnedElsewhere': {
      const before = asCharged(payment, event);
      const others = elsewhereOf(before).filter(({ returnId }) => returnId !== event.data.returnId);
      return { ...before, updatedAt: at, elsewhere: [...others, event.data] };
    }
    case 'ReversalAcknowledged':
      return withAttempt(asCharged(payment, event), event, at, (attempt) => ({
        ...attempt,
        acknowledged: true,
        toldAs: event.data.toldAs ?? null,
      }));
    case 'PaymentSettled':
      return withLeg(asCharged(payment, event), event, at, (leg) => ({
        ...leg,
        settledBatchId: event.data.batchId,
        settledAt: event.data.closedAt,
        settledGrossCents: event.data.grossCents,
        settledFeeCents: event.data.feeCents,
      }));
    case 'SettlementWithdrawn':
      return withLeg(asCharged(payment, event), event, at, (leg) => {
        const { batchId, grossCents, feeCents } = event.data;
        if (leg.settledBatchId !== batchId || leg.settledGrossCents !== grossCents || leg.settledFeeCents !== feeCents)
          throw impossible(payment, event);
        return { ...leg, settledBatchId: null, settledAt: null, settledGrossCents: null, settledFeeCents: null };
      });
    case 'SettlementRejected':
      return withLeg(asCharged(payment, event), event, at, (leg) => ({ ...leg, settlementRejected: true }));
    case 'PaymentDisputed': {
      const before = asCharged(payment, event);
      const { overtakenBy: _, ...dispute } = event.data;
      const known = before.disputes.find(({ disputeId }) => disputeId === dispute.disputeId);
      const taken = dispute.taken ?? known?.taken ?? sharedByTotal(before.legs, standing(before.disputes), dispute);
      return { ...before, updatedAt: at, disputes: [...before.disputes.filter((one) => one !== known), { ...dispute, taken }] };
    }
    default:
      return unreachable(event);
  }
};

const withUndone = (before: readonly UndoneCharge[] = [], more: readonly UndoneCharge[]): { undone?: readonly UndoneCharge[] } =>
  before.length + more.length > 0 ? { undone: [...before, ...more] } : {};

/** The charge that this event says was undone by a refund. */
export const undoneBy = ({ leg, principalCents, feeCents, transactionId, undone }: LegReturned & { readonly undone?: Undone }): UndoneCharge[] => {
  if (!undone || leg === null || transactionId === null) return [];
  return [{ leg, chargeTransactionId: undone.chargeTransactionId, refundTransactionId: transactionId, amountCents: principalCents + feeCents }];
};

/** The charges that the request itself took back by refunds. */
export const undoneByRequest = ({ takenBack = [] }: { readonly takenBack?: readonly TakenBack[] }): UndoneCharge[] =>
  takenBack
    .filter(({ means }) => means === 'refund')
    .map(({ leg, amountCents, transactionId, voidTransactionId }) => ({
      leg,
      chargeTransactionId: transactionId,
      refundTransactionId: voidTransactionId,
      amountCents,
    }));

const takenBackByRefund = (data: { readonly takenBack?: readonly TakenBack[] }) => withUndone([], undoneByRequest(data));

/** A create whose intent is lost. Amounts, lines and card are not known. */
const lostTerms = ({ attemptId, accountId, portalId, references }: LostCreate, at: string): Known => ({
  terms: {
    accountId,
    portalId,
    referenceId: null,
    amountCents: 0,
    serviceFeeCents: 0,
    feeVersion: 0,
    chargeMode: references.some(({ leg }) => leg === 'combined') ? 'combined' : 'separate',
    lineItems: [],
    personal: null,
    paymentMethod: { type: 'card', brand: 'unknown', last4: '' },
    legs: references.map((reference) => ({ ...reference, principalCents: 0, feeCents: 0 })),
  },
  attemptId,
  createdAt: at,
  updatedAt: at,
});

/** True if the log holds no amounts of the payment. */
export const lacksAmounts = ({ terms }: Known): boolean => terms.amountCents === 0;

const known = ({ terms, attemptId, createdAt }: Known, at: string): Known => ({ terms, attemptId, createdAt, updatedAt: at });

const charged = (before: Awaiting, charge: ApprovedCharge, at: string): Charged => ({
  ...known(before, at),
  phase: 'charged',
  confirmationNumber: charge.confirmationNumber,
  capturedAt: at,
  legs: before.terms.legs.map(({ leg, account, principalCents, feeCents }) => {
    const txn = charge.legs.find((candidate) => candidate.leg === leg);
    if (!txn) throw new Error(`a charge without its ${leg} leg`);
    const { transactionId, authCode, card } = txn;
    return {
      leg,
      account,
      transactionId,
      authCode,
      ...(card && { card }),
      principalCents,
      feeCents,
      principalReturnedCents: 0,
      feeReturnedCents: 0,
      refunded: false,
      settledBatchId: null,
      settledAt: null,
      settledGrossCents: null,
      settledFeeCents: null,
      settlementRejected: false,
    };
  }),
  lines: before.terms.lineItems.map(() => ({ principalReturnedCents: 0, feeReturnedCents: 0 })),
  lastReturnedBy: null,
  attempts: [],
  disputes: [],
});

/** Applies the return of one leg. Leg and lines change together, so the lines always sum to the payment. */
const returned = (before: Charged, event: PaymentEvent & { data: LegReturned & Pending }, means: Means): Charged => {
  const { attemptId, leg, principalCents, feeCents, transactionId, pending } = event.data;
  const attempt = attemptOf(before, attemptId);
  const move = attempt?.legs.find((candidate) => candidate.leg === leg);
  if (!attempt || attempt.ended || !move || leg === null || transactionId === null || attempt.returned.some((done) => done.leg === leg))
    throw impossible(before, event);
  if (move.principalCents !== principalCents || move.feeCents !== feeCents)
    throw new Error(`${event.type}: ${leg} returned other cents than were requested`);
  const after = withAttempt(before, event, event.at, () => ({
    ...attempt,
    returned: [...attempt.returned, { leg, means, principalCents, feeCents, transactionId, ...(pending && { pending }) }],
  }));
  const share = new Map(attempt.lines.map((line) => [line.lineItemId, line]));
  return {
    ...after,
    lastReturnedBy: attempt.operation,
    legs: after.legs.map((charge) =>
      charge.leg !== leg
        ? charge
        : {
            ...charge,
            principalReturnedCents: within(charge.principalReturnedCents + principalCents, charge.principalCents),
            feeReturnedCents: within(charge.feeReturnedCents + feeCents, charge.feeCents),
            refunded: charge.refunded || means === 'refund',
          },
    ),
    lines: after.lines.map((line, index) => {
      const { id, amountCents, serviceFeeCents } = before.terms.lineItems[index]!;
      const moved = share.get(id);
      return {
        principalReturnedCents: within(line.principalReturnedCents + (principalCents > 0 ? (moved?.principalCents ?? 0) : 0), amountCents),
        feeReturnedCents: within(line.feeReturnedCents + (feeCents > 0 ? (moved?.feeCents ?? 0) : 0), serviceFeeCents),
      };
    }),
  };
};

const within = (cents: Cents, limit: Cents): Cents => {
  if (cents > limit) throw new Error(`${cents} cents returned of ${limit}`);
  return cents;
};

const withAttempt = (
  payment: Charged,
  event: PaymentEvent & { data: { attemptId: string } },
  at: string,
  change: (attempt: ReversalAttempt) => ReversalAttempt,
): Charged => {
  if (!attemptOf(payment, event.data.attemptId)) throw impossible(payment, event);
  return {
    ...payment,
    updatedAt: at,
    attempts: payment.attempts.map((attempt) => (attempt.attemptId === event.data.attemptId ? change(attempt) : attempt)),
  };
};

const withLeg = (payment: Charged, event: PaymentEvent & { data: { leg: Leg } }, at: string, change: (leg: ChargedLeg) => ChargedLeg): Charged => {
  const { leg } = event.data;
  if (!payment.legs.some((charge) => charge.leg === leg)) throw impossible(payment, event);
  return { ...payment, updatedAt: at, legs: payment.legs.map((charge) => (charge.leg === leg ? change(charge) : charge)) };
};

/** Throws unless the payment is pending. Only then may its request record an outcome. An unknown payment waits for recovery (C29). */
const pending = (payment: Payment, event: PaymentEvent): Awaiting => {
  if (payment.phase !== 'pending') throw impossible(payment, event);
  return payment;
};

const awaiting = (payment: Payment, event: PaymentEvent): Awaiting => {
  if (payment.phase !== 'pending' && payment.phase !== 'unknown') throw impossible(payment, event);
  return payment;
};

const asCharged = (payment: Payment, event: PaymentEvent): Charged => {
  if (payment.phase !== 'charged') throw impossible(payment, event);
  return payment;
};

/** The error for an impossible history: a fault of ours, or tampering. */
const impossible = (payment: Payment, event: PaymentEvent) => new Error(`impossible history: ${event.type} while ${payment.phase}`);

// ------------------------------------------------------------------------------------------------------------------------------------
// Values that follow from the state. The status is derived from the money and is no part of the state (C21).

export type PaymentStatus = 'pending' | 'authorized' | 'succeeded' | 'failed' | 'voided' | 'refunded' | 'partially_refunded' | 'unknown';
export const PAYMENT_STATUSES: readonly PaymentStatus[] = [
  'pending',
  'authorized',
  'succeeded',
  'failed',
  'voided',
  'refunded',
  'partially_refunded',
  'unknown',
];

/** A payment that readers can see (C64). */
export type VisiblePayment = Exclude<Payment, { phase: 'none' | 'abandoned' }>;
export const isVisible = (payment: Payment): payment is VisiblePayment => payment.phase !== 'none' && payment.phase !== 'abandoned';

/** Cents that are not returned yet, principal and fee apart. */
export const remaining = (payment: Charged): { principal: Cents; fee: Cents } => ({
  principal: sumCents(payment.legs, (leg) => leg.principalCents - leg.principalReturnedCents),
  fee: sumCents(payment.legs, (leg) => leg.feeCents - leg.feeReturnedCents),
});

export const statusOf = (payment: VisiblePayment): PaymentStatus => {
  if (payment.phase !== 'charged') return payment.phase;
  const left = remaining(payment);
  if (payment.lastReturnedBy === null) return 'succeeded';
  if (left.principal + left.fee === 0) return payment.lastReturnedBy === 'void' ? 'voided' : 'refunded';
  // A void that succeeded in part leaves the payment succeeded until the void is complete (C27).
  return payment.lastReturnedBy === 'void' ? 'succeeded' : 'partially_refunded';
};

export type SettlementStatus = 'unsettled' | 'settled' | 'rejected';
export const SETTLEMENT_STATUSES: readonly SettlementStatus[] = ['unsettled', 'settled', 'rejected'];

/** The settlement of the charge, from the processor's batches. `settledAt`: when the batch of the first settled leg closed; null: no leg is settled. */
export interface Settlement {
  readonly status: SettlementStatus;
  readonly settledAt: string | null;
}

/** One rejected leg makes the settlement rejected; otherwise one settled leg makes it settled. Legs that were fully voided do not count (C73). */
export const settlementOf = (payment: Charged): Settlement => {
  const legs = payment.legs.filter((leg) => leg.refunded || cents(unreturned(leg)) > 0);
  const settledAt = legs.reduce<string | null>(
    (first, leg) => (leg.settledAt !== null && (first === null || leg.settledAt < first) ? leg.settledAt : first),
    null,
  );
  if (legs.some((leg) => leg.settlementRejected)) return { status: 'rejected', settledAt };
  return { status: settledAt === null ? 'unsettled' : 'settled', settledAt };
};

/** The card of a payment. For a token, the gateway may have named it with the charge. */
export const cardOf = (payment: VisiblePayment): PaymentTerms['paymentMethod'] => {
  const { paymentMethod } = payment.terms;
  const card = payment.phase === 'charged' ? payment.legs.find((leg) => leg.card)?.card : undefined;
  return card ? { ...paymentMethod, ...card } : paymentMethod;
};

/** The last four digits of the card of a leg. Empty: they are not known. */
export const last4Of = ({ terms }: Pick<Charged, 'terms'>, leg: ChargedLeg): string => leg.card?.last4 ?? terms.paymentMethod.last4;

/** Cents of open and lost disputes (C30). */
export const disputedCents = (payment: Charged): Cents =>
  sumCents(
    payment.disputes.filter(({ status }) => status !== 'recovered'),
    ({ disputedAmountCents }) => disputedAmountCents,
  );

/** What these disputes take now. A recovered dispute takes nothing. */
export const standing = (disputes: readonly Dispute[], except?: Pick<Dispute, 'disputeId'>): readonly Taken[] =>
  disputes.flatMap(({ status, disputeId, taken = [] }) => (status === 'recovered' || disputeId === except?.disputeId ? [] : taken));

/** Cents that can be refunded now: what remains, less what disputes take of it (C30). */
export const refundable = (payment: Charged): { principal: Cents; fee: Cents } => {
  const left = remaining(payment);
  const taken = standing(payment.disputes);
  return {
    principal: Math.max(0, left.principal - sumCents(taken, ({ principalCents }) => principalCents)),
    fee: Math.max(0, left.fee - sumCents(taken, ({ feeCents }) => feeCents)),
  };
};

export const elsewhereOf = ({ elsewhere = [] }: Charged): readonly ElsewhereReturn[] => elsewhere;

/** Every text about a person that the payment holds. */
export const personalIn = (payment: Payment): readonly Personal<unknown>[] => {
  if (!isVisible(payment)) return [];
  const { terms } = payment;
  if (payment.phase !== 'charged') return [terms.personal];
  return [terms.personal, ...payment.attempts.map(({ personal }) => personal), ...payment.disputes.map(({ personal }) => personal)];
};

/** The ids of the keys of these texts, that of the create first. */
export const keysOfPayment = (payment: Payment): readonly string[] => keysIn(personalIn(payment));

export const attemptOf = (payment: Payment, attemptId: string): ReversalAttempt | undefined =>
  payment.phase === 'charged' ? payment.attempts.find((attempt) => attempt.attemptId === attemptId) : undefined;

/** The refund of a leg with this transaction that was made here. undefined: there is none. */
export const returnOf = (payment: Charged, { leg, transactionId }: Pick<ReturnedLeg, 'leg' | 'transactionId'>): ReturnedLeg | undefined =>
  payment.attempts
    .flatMap((attempt) => attempt.returned)
    .find((one) => one.leg === leg && one.means === 'refund' && one.transactionId === transactionId);

/** The attempt whose result belongs to the key of `attemptId`. This is another attempt if the key got its result, otherwise `attemptId` itself. */
export const resultOf = (payment: Charged, attemptId: string): ReversalAttempt | undefined =>
  payment.attempts.find(({ toldAs }) => toldAs === attemptId) ?? attemptOf(payment, attemptId);

/** The one reversal that has not ended. It is in progress, or its request ended with an unknown outcome. */
export const openAttempt = (payment: Charged): ReversalAttempt | undefined => payment.attempts.find((attempt) => attempt.ended === null);

/** Work for recovery: a charge without outcome, or a reversal without end. */
export const openOf = (payment: Payment): { attemptId: string; since: string } | null => {
  if (payment.phase === 'pending' || payment.phase === 'unknown') return { attemptId: payment.attemptId, since: payment.createdAt };
  const attempt = payment.phase === 'charged' ? openAttempt(payment) : undefined;
  return attempt ? { attemptId: attempt.attemptId, since: attempt.requestedAt } : null;
};

/** The refund that returned the principal but not the fee (PARTIAL_REFUND_PENDING), if the fee can still be returned. */
export const partialRefund = (payment: Charged, initiatedBy: Initiator): ReversalAttempt | undefined =>
  remaining(payment).fee === 0
    ? undefined
    : payment.attempts.find(
        ({ operation, ended, completedBy, initiatedBy: by }) =>
          operation === 'refund' && ended?.outcome === 'partial' && !completedBy && by === initiatedBy,
      );

/**
 * A refund or void that was completed after its caller was told that the fee is not returned yet. The first retry gets the whole result, under any
 * key or none. No money is returned a second time (C27, C38).
 */
export const completedMeanwhile = (
  payment: Charged,
  operation: Means,
  initiatedBy: Initiator,
  asked: ReversalRequest['asked'],
): ReversalAttempt | undefined =>
  payment.attempts.find(
    (attempt) =>
      attempt.operation === operation &&
      attempt.toldPartial &&
      attempt.ended?.outcome === 'completed' &&
      !attempt.acknowledged &&
      attempt.initiatedBy === initiatedBy &&
      asked.includeFee &&
      (asked.amountCents === null || asked.amountCents === principalOf(attempt)),
  );

/** A repeat without a key may get the result of an attempt that is at most this old (C18). */
const KEYLESS_REPEAT_MS = 24 * 3_600_000;

/** The attempt that a request without a key repeats (C18). It succeeded after its own caller got a 5xx, and no caller has got its result since. */
export const untoldAttempt = (
  payment: Charged,
  operation: Means,
  initiatedBy: Initiator,
  asked: ReversalRequest['asked'],
  at: string,
): ReversalAttempt | undefined =>
  payment.attempts.find(
    (attempt) =>
      attempt.operation === operation &&
      attempt.initiatedBy === initiatedBy &&
      attempt.asked.amountCents === asked.amountCents &&
      attempt.asked.includeFee === asked.includeFee &&
      attempt.fenced &&
      attempt.ended?.outcome === 'completed' &&
      !attempt.acknowledged &&
      Date.parse(at) - Date.parse(attempt.requestedAt) <= KEYLESS_REPEAT_MS,
  );

// ------------------------------------------------------------------------------------------------------------------------------------
// Commands. The caller provides times, ids, references, and the capabilities of the gateways.

export type PaymentCommand =
  | ({ readonly type: 'Initiate'; readonly at: string; readonly terms: PaymentTerms } & Intent)
  | { readonly type: 'RecordChargeOutcome'; readonly at: string; readonly attemptId: string; readonly outcome: ChargeOutcome }
  | { readonly type: 'Abandon'; readonly at: string; readonly attemptId: string; readonly accountId: string; readonly reason: string }
  /** Appends an intent again that the log has lost. */
  | { readonly type: 'RestoreIntent'; readonly intent: IntentEvent }
  | ({ readonly type: 'MarkLost'; readonly at: string } & LostCreate)
  /** `untold`: the attempt may have ended in the log, but its request answered 5xx without knowing that. */
  | { readonly type: 'StartReconciliation'; readonly at: string; readonly attemptId: string; readonly untold?: boolean }
  | { readonly type: 'RecordChargeFindings'; readonly at: string; readonly attemptId: string; readonly findings: readonly ChargeFinding[] }
  | RequestVoid
  | RequestRefund
  | {
      readonly type: 'RecordLegReturned';
      readonly at: string;
      readonly attemptId: string;
      readonly leg: Leg;
      readonly means: Means;
      readonly transactionId: string;
      readonly pending?: true | undefined;
    }
  | { readonly type: 'RecordRefundFailed'; readonly at: string; readonly leg: Leg; readonly transactionId: string }
  | ({ readonly type: 'NoteReturn'; readonly at: string } & Omit<ElsewhereReturn, 'status'>)
  | AdoptReturn
  | { readonly type: 'DismissReturn'; readonly at: string; readonly returnId: string }
  | { readonly type: 'EndReversal'; readonly at: string; readonly attemptId: string; readonly unfinished?: 'rejected' | 'never_executed' }
  /** `toldAs`: the caller's key, and the attempt that this key is bound to. null: the caller has no key, or its key owns the result. */
  | { readonly type: 'AcknowledgeReversal'; readonly at: string; readonly attemptId: string; readonly toldAs: Intent | null }
  | {
      readonly type: 'RecordSettlement';
      readonly at: string;
      readonly leg: Leg;
      readonly batchId: string;
      readonly closedAt: string;
      readonly accepted: boolean;
      readonly grossCents: Cents;
      readonly feeCents: Cents;
    }
  | { readonly type: 'WithdrawSettlement'; readonly at: string; readonly leg: Leg; readonly batchId: string }
  | { readonly type: 'RequestReturn'; readonly at: string; readonly exceptionId: string }
  | { readonly type: 'OpenDispute'; readonly at: string; readonly dispute: Dispute }
  /** `status` and `stage` null: unchanged. `amountCents`: a corrected amount. Absent: unchanged. */
  | {
      readonly type: 'UpdateDispute';
      readonly at: string;
      readonly disputeId: string;
      readonly status: DisputeStatus | null;
      readonly stage: string | null;
      readonly amountCents?: Cents;
    }
  | {
      readonly type: 'Resolve';
      readonly at: string;
      readonly as: 'succeeded' | 'voided' | 'failed';
      readonly charge: Charge | null;
      readonly evidence: string;
      readonly by: string;
      readonly forced: boolean;
    };

export type ChargeOutcome =
  | ({ readonly kind: 'charged' } & ApprovedCharge)
  | ({
      readonly kind: 'declined';
      readonly leg: Leg;
      readonly code: DeclineCode;
      readonly transactionId: string | null;
      readonly raw: string | null;
      readonly takenBack?: readonly TakenBack[];
    } & Checks)
  | { readonly kind: 'failed'; readonly reason: string; readonly takenBack?: readonly TakenBack[] }
  | { readonly kind: 'unknown'; readonly leg: Leg; readonly cause: string };

/** Recovery's finding about one leg of a charge, after it finalised the leg's references. `reversed`: the charge was executed, then undone. */
export type ChargeFinding = { readonly leg: Leg } & (
  | { readonly found: 'reversed'; readonly transactionId: string; readonly undone?: Undone }
  | ({ readonly found: 'declined'; readonly code: DeclineCode; readonly transactionId: string | null } & Checks)
  | { readonly found: 'never' }
);

interface ReversalCommand extends Intent {
  readonly at: string;
  readonly initiatedBy: Initiator;
  /** True: an equal refund or void that staff completed within {@link STAFF_REPEAT_MS} refuses this one. */
  readonly refusesRepeat?: boolean;
  readonly personal: Personal<Reason>;
  readonly references: (leg: Leg) => { readonly void: Ref; readonly refund: Ref };
}
export interface RequestVoid extends ReversalCommand {
  readonly type: 'RequestVoid';
}
export interface RequestRefund extends ReversalCommand {
  readonly type: 'RequestRefund';
  readonly amountCents: Cents | null;
  readonly includeFee: boolean;
  /** The capabilities of each leg's gateway before settlement (C23). */
  readonly capabilities: (leg: Leg) => { readonly partialVoid: boolean; readonly refundUnsettled: boolean };
}

/** Records a return that was made at the processor's own page, as one attempt of staff. */
export interface AdoptReturn extends Omit<ReversalCommand, 'attemptId' | 'idempotency' | 'initiatedBy'> {
  readonly type: 'AdoptReturn';
  readonly returnId: string;
  readonly means: Means;
  readonly returns: readonly {
    readonly leg: Leg;
    readonly amountCents: Cents;
    readonly transactionId: string;
    readonly pending?: true | undefined;
  }[];
}

type Ask<Type extends PaymentCommand['type']> = Extract<PaymentCommand, { type: Type }>;

// ------------------------------------------------------------------------------------------------------------------------------------
// Decisions: one function for each command. Refusals come first, in the documented order. A repeated command that changes nothing returns [].

export const decide = (payment: Payment, command: PaymentCommand): readonly PaymentEvent[] => {
  switch (command.type) {
    case 'Initiate':
      return initiate(payment, command);
    case 'RecordChargeOutcome':
      return recordChargeOutcome(payment, command);
    case 'Abandon': {
      const { at, attemptId, accountId, reason } = command;
      return payment.phase === 'none' ? [{ type: 'PaymentAbandoned', at, data: { attemptId, accountId, reason } }] : [];
    }
    case 'RestoreIntent':
      return mayRestore(payment, command.intent) ? [command.intent] : [];
    case 'MarkLost': {
      const { type: _, at, ...data } = command;
      return payment.phase === 'none' || payment.phase === 'pending' ? [{ type: 'PaymentLost', at, data }] : [];
    }
    case 'StartReconciliation':
      return startReconciliation(payment, command);
    case 'RecordChargeFindings':
      return recordChargeFindings(payment, command);
    case 'RequestReturn':
      return requestReturn(payment, command);
    case 'RequestVoid':
      return requestVoid(payment, command);
    case 'RequestRefund':
      return requestRefund(payment, command);
    case 'RecordLegReturned':
      return recordLegReturned(payment, command);
    case 'RecordRefundFailed': {
      const { at, leg, transactionId } = command;
      const made = payment.phase === 'charged' ? returnOf(payment, command) : undefined;
      return made && !made.failed ? [{ type: 'RefundFailed', at, data: { leg, transactionId } }] : [];
    }
    case 'NoteReturn':
      return noteReturn(payment, command);
    case 'AdoptReturn':
      return adoptReturn(payment, command);
    case 'DismissReturn': {
      const found = payment.phase === 'charged' ? elsewhereOf(payment).find((one) => one.returnId === command.returnId) : undefined;
      return found?.status === 'found' ? [{ type: 'ReturnedElsewhere', at: command.at, data: { ...found, status: 'dismissed' } }] : [];
    }
    case 'EndReversal':
      return endReversal(payment, command);
    case 'AcknowledgeReversal': {
      const { at, attemptId, toldAs } = command;
      const attempt = attemptOf(payment, attemptId);
      if (!attempt || (!attempt.fenced && !attempt.ended) || attempt.acknowledged) return [];
      const receiver = toldAs === null ? { idempotency: null } : { toldAs: toldAs.attemptId, idempotency: toldAs.idempotency };
      return [{ type: 'ReversalAcknowledged', at, data: { attemptId, ...receiver } }];
    }
    case 'RecordSettlement':
      return recordSettlement(payment, command);
    case 'WithdrawSettlement':
      return withdrawSettlement(payment, command);
    case 'OpenDispute':
      return openDispute(payment, command);
    case 'UpdateDispute':
      return updateDispute(payment, command);
    case 'Resolve':
      return resolve(payment, command);
    default:
      return unreachable(command);
  }
};

/** True if the intent is missing. A refund or void has no place beside one that is open. */
const mayRestore = (payment: Payment, { type, data }: IntentEvent): boolean => {
  if (type === 'PaymentInitiated') return payment.phase === 'none';
  return payment.phase === 'charged' && !attemptOf(payment, data.attemptId) && !openAttempt(payment);
};

const initiate = (payment: Payment, { at, attemptId, idempotency, terms }: Ask<'Initiate'>): PaymentEvent[] => {
  if (payment.phase !== 'none') throw new Error('the payment was begun before');
  // Our own code made these sums from validated input. A difference is a fault of ours, not a refusal.
  if (sumCents(terms.lineItems, (line) => line.amountCents) !== terms.amountCents) throw new Error('the lines do not sum to the principal');
  if (sumCents(terms.lineItems, (line) => line.serviceFeeCents) !== terms.serviceFeeCents)
    throw new Error('the fee was not shared out to the last cent');
  if (sumCents(terms.legs, (leg) => leg.principalCents + leg.feeCents) !== terms.amountCents + terms.serviceFeeCents)
    throw new Error('the legs do not sum to the charge');
  return [{ type: 'PaymentInitiated', at, data: { attemptId, ...terms, idempotency } }];
};

const recordChargeOutcome = (payment: Payment, { at, attemptId, outcome }: Ask<'RecordChargeOutcome'>): PaymentEvent[] => {
  // Only the request that began the attempt may record its outcome, and only until recovery has taken over.
  if (payment.phase !== 'pending' || payment.attemptId !== attemptId) return [];
  switch (outcome.kind) {
    case 'charged':
      return [{ type: 'PaymentCreated', at, data: { attemptId, confirmationNumber: outcome.confirmationNumber, legs: outcome.legs } }];
    case 'declined': {
      const { leg, code: declineCode, transactionId, raw, avs, cvv } = outcome;
      return [{ type: 'PaymentDeclined', at, data: { attemptId, leg, declineCode, transactionId, raw, avs, cvv, ...takenBackOf(outcome) } }];
    }
    case 'failed':
      return [{ type: 'PaymentFailed', at, data: { attemptId, reason: outcome.reason, ...takenBackOf(outcome) } }];
    case 'unknown':
      return [{ type: 'PaymentOutcomeUnknown', at, data: { attemptId, leg: outcome.leg, cause: outcome.cause } }];
    default:
      return unreachable(outcome);
  }
};

const takenBackOf = ({ takenBack = [] }: { takenBack?: readonly TakenBack[] }) => (takenBack.length > 0 ? { takenBack } : {});

const startReconciliation = (payment: Payment, { at, attemptId, untold = false }: Ask<'StartReconciliation'>): PaymentEvent[] => {
  const fence: PaymentEvent = { type: 'ReconciliationStarted', at, data: { attemptId } };
  if (payment.phase === 'pending' || payment.phase === 'unknown') return payment.fenced ? [] : [fence];
  const attempt = attemptOf(payment, attemptId);
  return attempt && !attempt.fenced && (!attempt.ended || (untold && !attempt.acknowledged)) ? [fence] : [];
};

/** An unknown payment becomes voided (the charge was undone, or never processed) or failed (declined). It never becomes succeeded (C29). */
const recordChargeFindings = (payment: Payment, { at, attemptId, findings }: Ask<'RecordChargeFindings'>): PaymentEvent[] => {
  if (payment.phase !== 'unknown' || payment.attemptId !== attemptId) return [];
  if (payment.terms.legs.some(({ leg }) => !findings.some((finding) => finding.leg === leg))) throw new Error('a leg was not looked at');
  const undone = findings.flatMap((finding) => (finding.found === 'reversed' ? [finding] : []));
  if (undone.length > 0)
    return undone.map(({ leg, transactionId, undone: by }) => {
      const { principalCents, feeCents } = payment.terms.legs.find((candidate) => candidate.leg === leg)!;
      return { type: 'PaymentVoided', at, data: { attemptId, leg, principalCents, feeCents, transactionId, ...(by && { undone: by }) } };
    });
  const declined = findings.find((finding) => finding.found === 'declined');
  if (declined?.found === 'declined') {
    const { leg, code: declineCode, transactionId, avs, cvv } = declined;
    return [{ type: 'PaymentDeclined', at, data: { attemptId, leg, declineCode, transactionId, raw: null, avs, cvv } }];
  }
  return [{ type: 'PaymentVoided', at, data: { attemptId, leg: null, principalCents: 0, feeCents: 0, transactionId: null } }];
};

const requestVoid = (payment: Payment, command: RequestVoid): PaymentEvent[] => {
  const target = reversible(payment, 'voided', command.initiatedBy);
  if (statusOf(target) !== 'succeeded') throw new ServiceError('INVALID_STATE', `${named(target)} cannot be voided.`); // C25
  if (disputedCents(target) > 0) throw new ServiceError('INVALID_STATE', 'A disputed payment cannot be voided.'); // C30
  const legs = target.legs.filter((leg) => cents(unreturned(leg)) > 0);
  if (legs.some((leg) => leg.settledBatchId !== null || leg.refunded)) throw voidFailed('The batch has settled; refund the payment instead.'); // C24, C27
  const moves = legs.map((leg): LegMove => ({ leg: leg.leg, ...unreturned(leg), means: 'void', references: command.references(leg.leg) }));
  const begun = target.attempts.find(({ operation, ended }) => operation === 'void' && ended?.outcome === 'partial');
  const asked = { amountCents: null, includeFee: true };
  if (!begun) refuseRepeat(target, 'void', command, asked);

  return [{ type: 'VoidRequested', at: command.at, data: request(target, command, asked, moves, begun?.attemptId ?? null) }];
};

const requestRefund = (payment: Payment, command: RequestRefund): PaymentEvent[] => {
  const asked = { amountCents: command.amountCents, includeFee: command.includeFee };
  const begun = payment.phase === 'charged' && command.includeFee ? partialRefund(payment, command.initiatedBy) : undefined;
  const completes = begun && (asked.amountCents === null || asked.amountCents === principalOf(begun)) ? begun : undefined; // C38
  const target = reversible(payment, 'refunded', command.initiatedBy);
  const left = remaining(target);
  const free = refundable(target);

  const principalCents = completes ? 0 : (asked.amountCents ?? left.principal);
  const feeCents = asked.includeFee ? left.fee : 0;
  if (principalCents > left.principal) throw exceeds(free.principal); // C37
  if (asked.includeFee && !completes && asked.amountCents !== null && asked.amountCents < left.principal)
    throw new ServiceError(
      'VALIDATION_ERROR',
      'feeType include_fee refunds everything that remains: leave amountCents out, or ask for the whole remaining principal.',
    ); // C36
  if (principalCents + feeCents === 0) throw exceeds(0); // C37
  if (principalCents > free.principal) throw exceeds(free.principal); // C30
  if (feeCents > free.fee) throw exceeds(free.principal, '; a dispute takes the service fee'); // C30
  if (!completes) refuseRepeat(target, 'refund', command, asked);

  const moves = target.legs.flatMap((leg): LegMove[] => {
    const part = { principalCents: leg.principalCents > 0 ? principalCents : 0, feeCents: leg.feeCents > 0 ? feeCents : 0 };
    if (cents(part) === 0) return [];
    return [{ leg: leg.leg, ...part, means: meansFor(leg, part, command.capabilities(leg.leg)), references: command.references(leg.leg) }];
  });
  return [{ type: 'RefundRequested', at: command.at, data: request(target, command, asked, moves, completes?.attemptId ?? null) }];
};

/** The operation that returns a part of a leg, decided before the gateway is called (C23, C24). Never a void that returns more than was requested. */
const meansFor = (leg: ChargedLeg, part: Part, capability: { partialVoid: boolean; refundUnsettled: boolean }): Means => {
  // After a refund on this leg, the gateway has settled it or accepts refunds before settlement. The stream may not know the batch yet.
  if (leg.settledBatchId !== null || leg.refunded) return 'refund';
  const means = unsettledMeans(leg, part, capability);
  if (!means) throw new ServiceError('INVALID_STATE', 'The batch has not settled: a partial refund is possible after settlement.');
  return means;
};

/** The operation that can return a part of an unsettled leg. null: none can. */
export const unsettledMeans = (leg: ChargedLeg, part: Part, capability: { partialVoid: boolean; refundUnsettled: boolean }): Means | null => {
  const whole = cents(part) === cents(unreturned(leg));
  if (!leg.refunded && (whole || capability.partialVoid)) return 'void';
  return capability.refundUnsettled ? 'refund' : null;
};

const request = (
  payment: Charged,
  command: ReversalCommand,
  asked: ReversalRequest['asked'],
  legs: readonly LegMove[],
  completes: string | null,
): ReversalRequest & Intent => {
  const principalCents = sumCents(legs, (leg) => leg.principalCents);
  const feeCents = sumCents(legs, (leg) => leg.feeCents);
  // Principal and fee are shared out in proportion to what remains of them on the lines (C34). We return a fee only whole: each line then gets the rest of
  // its share.
  const principalByLine = proRata(
    principalCents,
    payment.terms.lineItems.map((line, index) => line.amountCents - payment.lines[index]!.principalReturnedCents),
  );
  const feeByLine = proRata(
    feeCents,
    payment.terms.lineItems.map((line, index) => line.serviceFeeCents - payment.lines[index]!.feeReturnedCents),
  );
  const lines = payment.terms.lineItems.map((line, index) => ({
    lineItemId: line.id,
    principalCents: principalByLine[index]!,
    feeCents: feeByLine[index]!,
  }));
  const { attemptId, initiatedBy, personal, idempotency } = command;
  return { attemptId, initiatedBy, personal, asked, legs, lines, completes, idempotency };
};

const recordLegReturned = (payment: Payment, { at, attemptId, leg, means, transactionId, pending }: Ask<'RecordLegReturned'>): PaymentEvent[] => {
  const attempt = attemptOf(payment, attemptId);
  const move = attempt?.legs.find((candidate) => candidate.leg === leg);
  if (!attempt || !move) throw new Error(`no attempt to return the ${leg} leg`);
  if (attempt.ended || attempt.returned.some((done) => done.leg === leg)) return [];
  const data: LegReturned = { attemptId, leg, principalCents: move.principalCents, feeCents: move.feeCents, transactionId };
  const overtaken = overtakenBy(payment as Charged, data, at);
  if (means === 'void') return [...overtaken, { type: 'PaymentVoided', at, data }];
  return [...overtaken, { type: leg === 'fee' ? 'FeeRefunded' : 'PaymentRefunded', at, data: { ...data, ...(pending && { pending }) } }];
};

/**
 * A dispute may come while a return is under way, and take the same cents. Both are facts. So the cents of both become excess of the
 * dispute, those of the newest dispute first.
 */
const overtakenBy = ({ legs, disputes }: Charged, { attemptId, leg: name, principalCents, feeCents }: LegReturned, at: string): PaymentEvent[] => {
  const leg = legs.find((one) => one.leg === name)!;
  const before = unreturned(leg);
  const left = { leg: leg.leg, principalCents: before.principalCents - principalCents, feeCents: before.feeCents - feeCents };
  const events: PaymentEvent[] = [];
  let now = disputes;
  for (const dispute of [...disputes].reverse()) {
    if (dispute.status === 'recovered') continue;
    const taken = overtaken(dispute.taken!, left, standing(now, dispute));
    if (canonicalJson(taken) === canonicalJson(dispute.taken!)) continue;
    now = now.map((one) => (one === dispute ? { ...dispute, taken } : one));
    events.push({ type: 'PaymentDisputed', at, data: { ...dispute, taken, overtakenBy: attemptId } });
  }
  return events;
};

const endReversal = (payment: Payment, { at, attemptId, unfinished }: Ask<'EndReversal'>): PaymentEvent[] => {
  const attempt = attemptOf(payment, attemptId);
  if (!attempt) throw new Error('no attempt to end');
  if (attempt.ended) return [];
  const missing = attempt.legs.length - attempt.returned.length;
  if (missing > 0 && !unfinished) throw new Error('an attempt ends unfinished only for a reason');
  const outcome = missing === 0 ? 'completed' : attempt.returned.length > 0 ? 'partial' : unfinished!;
  const reversalType = attempt.returned.length === 0 ? null : attempt.returned.some(({ means }) => means === 'refund') ? 'refund' : 'void';
  const amountCents = sumCents(attempt.returned, cents);
  const { operation, personal, initiatedBy } = attempt;
  return [{ type: 'ReversalEnded', at, data: { attemptId, operation, outcome, reversalType, amountCents, personal, initiatedBy } }];
};

/**
 * While an attempt is open, the return may be its own, so nothing is noted. A leg has at most one return that waits for a decision. A transaction that
 * is recorded here, or that staff have dismissed, does not wait for one.
 */
const noteReturn = (payment: Payment, { at, returnId, leg: name, transactionId }: Ask<'NoteReturn'>): PaymentEvent[] => {
  if (payment.phase !== 'charged' || openAttempt(payment)) return [];
  const leg = payment.legs.find((one) => one.leg === name);
  if (!leg || leg.settlementRejected || cents(unreturned(leg)) === 0) return [];
  const known = [...payment.attempts.flatMap((attempt) => attempt.returned), ...elsewhereOf(payment)];
  if (transactionId !== null && known.some((one) => one.leg === name && one.transactionId === transactionId)) return [];
  const open = elsewhereOf(payment).find((one) => one.leg === name && one.status === 'found');
  if (open && (transactionId === null || open.transactionId !== null)) return [];
  return [{ type: 'ReturnedElsewhere', at, data: { returnId: open?.returnId ?? returnId, leg: name, transactionId, status: 'found' } }];
};

/** The intent, the money and the end at once: the return has happened already. The principal of a leg goes first, then its fee. */
const adoptReturn = (payment: Payment, command: AdoptReturn): PaymentEvent[] => {
  const { at, returnId, means, returns, personal, references } = command;
  if (attemptOf(payment, returnId)) return [];
  const found = payment.phase === 'charged' ? elsewhereOf(payment).find((one) => one.returnId === returnId) : undefined;
  // The gateway shows the return, so an adoption wins over a dismissal at the same time. It has settled the line already.
  if (payment.phase !== 'charged' || !found || found.status === 'adopted')
    throw new ServiceError('INVALID_STATE', 'The payment has no such return that waits for a decision.');
  if (openAttempt(payment)) throw new ServiceError('INVALID_STATE', 'An earlier refund or void of this payment is in progress; try later.');
  const moves = returns.map(({ leg: name, amountCents, transactionId }): LegMove => {
    const leg = payment.legs.find((one) => one.leg === name)!;
    const left = unreturned(leg);
    if (means === 'refund' && returnOf(payment, { leg: name, transactionId }))
      throw new ServiceError('INVALID_STATE', `Refund ${transactionId} is recorded already; nothing was decided.`);
    if (leg.settlementRejected || amountCents > cents(left) || (means === 'void' && (leg.settledBatchId !== null || leg.refunded)))
      throw new ServiceError(
        'INVALID_STATE',
        `A ${means} of ${amountCents} cents does not fit the ${name} leg: ${cents(left)} cents remain, and the settlement is ${leg.settlementRejected ? 'rejected' : leg.settledBatchId === null ? 'open' : 'made'}.`,
      );
    const principalCents = Math.min(amountCents, left.principalCents);
    return { leg: name, principalCents, feeCents: amountCents - principalCents, means, references: references(name) };
  });
  const isWholeVoid = means === 'void' && statusOf(payment) === 'succeeded' && sumCents(moves, cents) === sumCents(payment.legs, (leg) => cents(unreturned(leg))); // prettier-ignore
  const intent = { at, attemptId: returnId, idempotency: null, initiatedBy: 'staff', personal, references } as const;
  const asked = { amountCents: sumCents(moves, (move) => move.principalCents), includeFee: moves.some(({ feeCents }) => feeCents > 0) };
  const data = request(payment, intent, asked, moves, null);
  const events: PaymentEvent[] = [{ type: isWholeVoid ? 'VoidRequested' : 'RefundRequested', at, data }];
  const now = () => events.reduce<Payment>(evolve, payment);
  for (const { leg, transactionId, pending } of returns)
    events.push(...recordLegReturned(now(), { type: 'RecordLegReturned', at, attemptId: returnId, leg, means, transactionId, pending }));
  events.push(...endReversal(now(), { type: 'EndReversal', at, attemptId: returnId }));
  const decided = elsewhereOf(payment).filter((one) => (one === found || one.status === 'found') && returns.some(({ leg }) => leg === one.leg));
  const transactionOf = (leg: Leg) => returns.find((one) => one.leg === leg)!.transactionId;
  for (const one of decided)
    events.push({ type: 'ReturnedElsewhere', at, data: { ...one, transactionId: transactionOf(one.leg), status: 'adopted' } });
  return events;
};

/** A leg settles in one batch. Later amounts from the same batch replace the first ones. A report of another batch changes nothing. */
const recordSettlement = (payment: Payment, command: Ask<'RecordSettlement'>): PaymentEvent[] => {
  const { at, leg: name, batchId, closedAt, accepted, grossCents, feeCents } = command;
  const leg = payment.phase === 'charged' ? payment.legs.find((candidate) => candidate.leg === name) : undefined;
  if (!leg) throw new Error(`no charged ${name} leg to settle`);
  if (leg.settlementRejected || (leg.settledBatchId !== null && leg.settledBatchId !== batchId)) return [];
  const isSame =
    leg.settledBatchId === batchId && leg.settledAt === closedAt && leg.settledGrossCents === grossCents && leg.settledFeeCents === feeCents;
  if (accepted && isSame) return [];
  const withdrawn = withdrawSettlement(payment, { type: 'WithdrawSettlement', at, leg: name, batchId });
  if (!accepted) return [...withdrawn, { type: 'SettlementRejected', at, data: { leg: name, batchId, closedAt } }];
  return [...withdrawn, { type: 'PaymentSettled', at, data: { leg: name, batchId, closedAt, grossCents, feeCents } }];
};

/**
 * Makes the leg unsettled again, as in the books. The gateway then decides again between void and refund (C24). If the leg did not settle in this
 * batch, nothing happens.
 */
const withdrawSettlement = (payment: Payment, { at, leg: name, batchId }: Ask<'WithdrawSettlement'>): PaymentEvent[] => {
  const leg = payment.phase === 'charged' ? payment.legs.find((candidate) => candidate.leg === name) : undefined;
  if (!leg || leg.settledBatchId !== batchId) return [];
  return [
    {
      type: 'SettlementWithdrawn',
      at,
      // The time of the settlement, so that the books take it back where they posted it.
      data: { leg: name, batchId, closedAt: leg.settledAt!, grossCents: leg.settledGrossCents!, feeCents: leg.settledFeeCents! },
    },
  ];
};

/**
 * Opens a dispute on a charged payment. Its amount is at least 1 cent, and at most the captured amount of the named leg or of all legs (C30). A
 * second opening with the same terms changes nothing. Its reason is sealed under the key of the first one, so equal reasons are equal boxes.
 */
const openDispute = (payment: Payment, { at, dispute }: Ask<'OpenDispute'>): PaymentEvent[] => {
  const target = disputable(payment);
  refuseAmount(target, dispute);
  const before = target.disputes.find(({ disputeId }) => disputeId === dispute.disputeId);
  if (!before) return [{ type: 'PaymentDisputed', at, data: { ...dispute, taken: isTaking(dispute) ? taking(target, dispute) : [] } }];
  const termsOf = ({ status: _, stage: __, personal: ___, taken: ____, ...terms }: Dispute) => canonicalJson(terms);
  if (!isSamePersonal(before.personal, dispute.personal) || termsOf(before) !== termsOf(dispute))
    throw new ServiceError('INVALID_STATE', 'A dispute with this id was opened with other terms.');
  return [];
};

const refuseAmount = ({ legs }: Charged, { leg: named, disputedAmountCents }: Dispute): void => {
  const disputed = named === undefined ? legs : legs.filter(({ leg }) => leg === named);
  if (disputed.length === 0)
    throw new ServiceError('VALIDATION_ERROR', `The payment has no ${named} charge; it has: ${legs.map(({ leg }) => leg).join(', ')}.`);
  const captured = sumCents(disputed, cents);
  if (!Number.isSafeInteger(disputedAmountCents) || disputedAmountCents < 1 || disputedAmountCents > captured)
    throw new ServiceError('VALIDATION_ERROR', `The disputed amount must be 1 to ${captured} cents.`);
};

const isTaking = ({ status }: Pick<Dispute, 'status'>): boolean => status !== 'recovered';

/** What a dispute takes, if it takes it now. Nothing remains of a leg whose settlement was rejected (C67). */
const taking = ({ legs, disputes }: Charged, dispute: Dispute): readonly Taken[] => {
  const left = legs.map((leg) => ({ leg: leg.leg, ...(leg.settlementRejected ? { principalCents: 0, feeCents: 0 } : unreturned(leg)) }));
  return takingOf(legs, left, standing(disputes, dispute), dispute);
};

/**
 * A dispute may change from any status to any other (C30). One event carries a change of status, stage, amount or all of them. Without a change there
 * is no event (C57). If the dispute takes money again, or another amount, its shares are made again.
 */
const updateDispute = (payment: Payment, { at, disputeId, status, stage, amountCents }: Ask<'UpdateDispute'>): PaymentEvent[] => {
  const target = disputable(payment);
  const before = target.disputes.find((dispute) => dispute.disputeId === disputeId);
  if (!before) throw new ServiceError('INVALID_STATE', 'The payment has no such dispute.');
  const after = {
    ...before,
    status: status ?? before.status,
    stage: stage ?? before.stage,
    disputedAmountCents: amountCents ?? before.disputedAmountCents,
  };
  const isOtherAmount = after.disputedAmountCents !== before.disputedAmountCents;
  if (isOtherAmount) refuseAmount(target, after);
  if (after.status === before.status && after.stage === before.stage && !isOtherAmount) return [];
  const takes = isTaking(after) && (!isTaking(before) || isOtherAmount);
  return [{ type: 'PaymentDisputed', at, data: takes ? { ...after, taken: taking(target, after) } : after }];
};

const disputable = (payment: Payment): Charged => {
  if (!isVisible(payment)) throw new ServiceError('PAYMENT_NOT_FOUND', 'Payment not found.');
  if (payment.phase !== 'charged') throw new ServiceError('INVALID_STATE', 'A dispute is opened on a charged payment only.');
  return payment;
};

/** Announces that staff send money of an unknown payment back. Also fences the attempt, since from now on it must not succeed. */
const requestReturn = (payment: Payment, { at, exceptionId }: Ask<'RequestReturn'>): PaymentEvent[] => {
  if (payment.phase !== 'unknown')
    throw new ServiceError(
      'INVALID_STATE',
      isVisible(payment)
        ? `The payment is ${statusOf(payment)}: a refund is sent only for one with an unknown outcome.`
        : 'There is no such payment.',
    );
  if (payment.returns?.includes(exceptionId)) return [];
  const fence = startReconciliation(payment, { type: 'StartReconciliation', at, attemptId: payment.attemptId });
  return [...fence, { type: 'ReturnRequested', at, data: { exceptionId } }];
};

/** Throws if staff send the payment's money back: then it must not succeed. */
export const refuseReturned = (payment: Awaiting, as: 'succeeded' | 'voided' | 'failed'): void => {
  if (as === 'succeeded' && payment.returns)
    throw new ServiceError(
      'INVALID_STATE',
      `A refund of this payment was begun for exception ${payment.returns.join(', ')}; it cannot be resolved as succeeded any more.`,
    );
};

/** A person decides an outcome that recovery must not decide (C29, C69). */
const resolve = (payment: Payment, { at, as, charge, evidence, by, forced }: Ask<'Resolve'>): PaymentEvent[] => {
  if (payment.phase !== 'unknown') throw new ServiceError('INVALID_STATE', 'Only a payment with an unknown outcome can be resolved.');
  refuseReturned(payment, as);
  if (as === 'succeeded' && !charge) throw new ServiceError('INVALID_STATE', 'Resolving as succeeded needs the transactions of the charge.');
  return [{ type: 'PaymentResolved', at, data: { as, charge: as === 'succeeded' ? charge : null, evidence, by, forced } }];
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Helpers.

interface Part {
  readonly principalCents: Cents;
  readonly feeCents: Cents;
}
export const cents = (part: Part): Cents => part.principalCents + part.feeCents;

export const unreturned = (leg: ChargedLeg): Part => ({
  principalCents: leg.principalCents - leg.principalReturnedCents,
  feeCents: leg.feeCents - leg.feeReturnedCents,
});

const principalOf = (attempt: ReversalAttempt): Cents => sumCents(attempt.legs, (leg) => leg.principalCents);

/** The payment with its status, in words for an error message. */
const named = (payment: Parameters<typeof statusOf>[0]): string => {
  const status = statusOf(payment).replace('_', ' ');
  return `${status === 'unknown' ? 'An' : 'A'} ${status} payment`;
};

/**
 * Limits on attempts: every attempt is part of the state, and a large state makes each read slow. MAX_REVERSALS counts attempts that returned money.
 * MAX_ATTEMPTS counts all attempts, and staff may exceed it.
 */
export const MAX_REVERSALS = 100;
export const MAX_ATTEMPTS = 1_000;

const reversible = (payment: Payment, done: 'voided' | 'refunded', initiatedBy: Initiator): Charged => {
  if (!isVisible(payment)) throw new ServiceError('PAYMENT_NOT_FOUND', 'Payment not found.');
  if (payment.phase !== 'charged') throw new ServiceError('INVALID_STATE', `${named(payment)} cannot be ${done}.`);
  if (openAttempt(payment)) throw new ServiceError('INVALID_STATE', 'An earlier refund or void of this payment is in progress.'); // C31
  if (elsewhereOf(payment).some(({ status }) => status === 'found'))
    throw new ServiceError('INVALID_STATE', `The payment cannot be ${done}: ${RETURNED_ELSEWHERE}.`);
  if (payment.legs.some((leg) => leg.settlementRejected)) throw new ServiceError('INVALID_STATE', 'The settlement of this payment was rejected.'); // C67
  // Attempts that returned no money, such as those during an outage of the gateway, do not count. A partial attempt may always be completed
  // (specification, Refund 5).
  const returned = payment.attempts.filter((attempt) => attempt.returned.length > 0);
  if (returned.length >= MAX_REVERSALS && !returned.some(({ ended, completedBy }) => ended?.outcome === 'partial' && !completedBy))
    throw new ServiceError('INVALID_STATE', `A payment takes at most ${MAX_REVERSALS} refunds and voids.`);
  if (payment.attempts.length >= MAX_ATTEMPTS && initiatedBy === 'partner')
    throw new ServiceError('INVALID_STATE', 'Too many refunds and voids of this payment have failed; ask support to return the money.');
  return payment;
};

/** A person repeats a command by mistake within minutes. Later, an equal refund is taken as another one. */
export const STAFF_REPEAT_MS = 10 * 60_000;

/** The refusal of a refund or void that staff completed a short time ago. The caller may ask again and say that it means another one. */
export class RepeatRefused extends ServiceError {
  override readonly name = 'RepeatRefused';
}

/** Throws {@link RepeatRefused}. Only completed attempts count: to complete or repeat an unfinished one is never refused (C17, C18). */
const refuseRepeat = (payment: Charged, operation: Means, { at, refusesRepeat }: ReversalCommand, asked: ReversalRequest['asked']): void => {
  const done = payment.attempts.findLast(
    (attempt) =>
      attempt.operation === operation &&
      attempt.initiatedBy === 'staff' &&
      attempt.ended?.outcome === 'completed' &&
      attempt.asked.amountCents === asked.amountCents &&
      attempt.asked.includeFee === asked.includeFee &&
      Date.parse(at) - Date.parse(attempt.ended.at) < STAFF_REPEAT_MS,
  );
  if (refusesRepeat && done?.ended)
    throw new RepeatRefused('INVALID_STATE', `The same ${operation}, of ${decimal(done.ended.amountCents)}, was completed at ${done.ended.at}.`);
};

/** Staff must decide first (C75). */
export const RETURNED_ELSEWHERE = 'money was returned at the processor; staff must record it';

const exceeds = (leftCents: Cents, why = '') =>
  new ServiceError('INVALID_STATE', `Refund exceeds remaining principal: ${leftCents} cents remain${why}`);

/** The gateway will never accept this void, so only a refund can return the money (C26). */
export const voidFailed = (message: string) => new ServiceError('VOID_FAILED', message, { retryable: false, suggestedAction: 'refund' });

export const payment: Decider<Payment, PaymentCommand, PaymentEvent> = { initial, decide, evolve };
