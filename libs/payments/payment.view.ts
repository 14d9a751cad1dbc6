/**
 * The resources of the specification that show a payment. They depend only on the folded state and on what `reveal` may show, since the same state
 * must give the same text. So nothing here reads the time.
 */
import { type Cents, type Json, type Reveal, sumCents } from '#kernel';
import {
  attemptOf,
  cardOf,
  cents,
  type Charged,
  type Payer,
  type PaymentStatus,
  personalIn,
  reasonContext,
  type ReversalAttempt,
  remaining,
  type ReturnedLeg,
  type Settlement,
  settlementOf,
  statusOf,
  termsContext,
  type VisiblePayment,
} from './payment.js';

export interface PaymentView {
  readonly id: string;
  readonly status: PaymentStatus;
  readonly captureMode: 'sale';
  readonly currency: 'USD';
  readonly amountCents: Cents;
  readonly serviceFeeCents: Cents;
  readonly totalChargedCents: Cents;
  readonly refundedAmountCents: Cents;
  readonly remainingRefundableAmountCents: Cents;
  readonly authorizedAmountCents: 0;
  readonly capturedAmountCents: Cents;
  readonly confirmationNumber: string | null;
  readonly portalId: string;
  readonly referenceId: string | null;
  readonly payer: Payer | null;
  readonly paymentMethod: { readonly type: string; readonly brand: string; readonly last4: string };
  readonly gateway: { readonly transactionId: string | null; readonly authCode: string | null };
  readonly lineItems: readonly LineItemView[];
  /** null: the payment is not charged (C73). */
  readonly settlement: Settlement | null;
  readonly expiresAt: null;
  readonly capturedAt: string | null;
  readonly createdAt: string;
  readonly updatedAt: string;
  /** When personal data of the payment was erased (RFC 3339). Absent: never. */
  readonly personalDataErasedAt?: string;
}

export interface LineItemView {
  readonly id: string;
  readonly amountCents: Cents;
  readonly serviceFeeCents: Cents;
  readonly status: PaymentStatus;
  readonly refundedAmountCents: Cents;
  readonly remainingRefundableAmountCents: Cents;
  readonly referenceId: string;
  readonly description: string | null;
  readonly metadata: Readonly<Record<string, Json>> | null;
}

/** The specification's PaymentGroupResponse. In every status captured = refunded + remaining (docs/contract.md#money-and-states). */
export const paymentView = (id: string, payment: VisiblePayment, reveal: Reveal): PaymentView => {
  const { terms } = payment;
  const texts = reveal.content(terms.personal, termsContext(id));
  const erasedAt = reveal.erasedAt(personalIn(payment));
  const charge = payment.phase === 'charged' ? payment : null;
  const status = statusOf(payment);
  const totalCents = terms.amountCents + terms.serviceFeeCents;
  const left = charge ? remaining(charge) : { principal: 0, fee: 0 };
  const remainingCents = left.principal + left.fee;
  // The payment shows the transaction and authorization code of its principal leg (C41), or of its only leg in combined mode.
  const leg = charge?.legs.find((candidate) => candidate.leg !== 'fee');
  return {
    id,
    status,
    captureMode: 'sale',
    currency: 'USD',
    amountCents: terms.amountCents,
    serviceFeeCents: terms.serviceFeeCents,
    totalChargedCents: totalCents,
    refundedAmountCents: charge ? totalCents - remainingCents : 0,
    remainingRefundableAmountCents: remainingCents,
    authorizedAmountCents: 0,
    capturedAmountCents: charge ? totalCents : 0,
    confirmationNumber: charge?.confirmationNumber ?? null,
    portalId: terms.portalId,
    referenceId: terms.referenceId,
    payer: texts?.payer ?? null,
    paymentMethod: cardOf(payment),
    gateway: { transactionId: leg?.transactionId ?? null, authCode: leg?.authCode ?? null },
    lineItems: terms.lineItems.map((line, index) => {
      const back = charge?.lines[index];
      const refunded = back ? back.principalReturnedCents + back.feeReturnedCents : 0;
      return {
        id: line.id,
        amountCents: line.amountCents,
        serviceFeeCents: line.serviceFeeCents,
        status: lineStatus(status, charge, refunded, line.amountCents + line.serviceFeeCents),
        refundedAmountCents: refunded,
        remainingRefundableAmountCents: charge ? line.amountCents + line.serviceFeeCents - refunded : 0,
        referenceId: line.referenceId,
        description: texts?.lines[index]!.description ?? null,
        metadata: texts?.lines[index]!.metadata ?? null,
      };
    }),
    settlement: charge ? settlementOf(charge) : null,
    expiresAt: null,
    capturedAt: charge?.capturedAt ?? null,
    createdAt: payment.createdAt,
    updatedAt: payment.updatedAt,
    ...(erasedAt !== null && { personalDataErasedAt: erasedAt }),
  };
};

/** The status of a line (C28). Without a refund, it is the status of the payment. Otherwise it follows from the line's amounts. */
const lineStatus = (payment: PaymentStatus, charge: Charged | null, refundedCents: Cents, totalCents: Cents): PaymentStatus => {
  if (!charge || payment === 'voided' || payment === 'succeeded') return payment;
  if (refundedCents === 0) return 'succeeded';
  return refundedCents === totalCents ? 'refunded' : 'partially_refunded';
};

/** Money that went back, by its transaction. */
export interface ReturnView extends Pick<ReturnedLeg, 'leg' | 'means' | 'transactionId'> {
  readonly attemptId: string;
  readonly amountCents: Cents;
  readonly status: 'succeeded' | 'pending' | 'failed';
}

/** A payment as staff and auditors see it. */
export interface AuditedPayment extends PaymentView {
  readonly accountId: string;
  readonly returns: readonly ReturnView[];
}

export const auditedPayment = (id: string, payment: VisiblePayment, reveal: Reveal): AuditedPayment => ({
  ...paymentView(id, payment, reveal),
  accountId: payment.terms.accountId,
  returns: (payment.phase === 'charged' ? payment.attempts : []).flatMap(({ attemptId, returned }) =>
    returned.map((one) => {
      const { leg, means, transactionId } = one;
      return { attemptId, leg, means, transactionId, amountCents: cents(one), status: returnStatus(one) };
    }),
  ),
});

/** A refund that was pending counts as pending until it is known to have failed. No processor says that it has arrived. */
export const returnStatus = ({ pending, failed }: ReturnedLeg): ReturnView['status'] => (failed ? 'failed' : pending ? 'pending' : 'succeeded');

export interface RefundView {
  readonly id: string;
  readonly target: 'group';
  readonly reversalType: 'void' | 'refund';
  readonly amountCents: Cents;
  readonly currency: 'USD';
  readonly reason: string | null;
  /** Of this refund, as it was when its request was answered (C38). */
  readonly status: 'succeeded' | 'pending';
  readonly remainingRefundableAmountCents: Cents;
  readonly gateway: { readonly transactionId: string };
  readonly createdAt: string;
}

/** The result of a completed refund. If a later attempt completed it, both attempts are one refund, with principal and fee together (C38). */
export const refundView = (id: string, payment: Charged, attempt: ReversalAttempt, reveal: Reveal): RefundView => {
  const parts = partsOf(payment, attempt);
  const last = parts.at(-1)!;
  const moved = parts.flatMap((part) => part.returned);
  if (!last.ended || moved.length === 0) throw new Error('a refund result without a refund');
  return {
    id,
    target: 'group',
    reversalType: moved.some(({ means }) => means === 'refund') ? 'refund' : 'void',
    amountCents: sumCents(moved, (leg) => leg.principalCents + leg.feeCents),
    currency: 'USD',
    reason: reasonOf(id, attempt, reveal),
    status: moved.some(({ pending }) => pending) ? 'pending' : 'succeeded',
    remainingRefundableAmountCents: last.ended.remainingRefundableCents,
    gateway: { transactionId: (moved.find(({ leg }) => leg !== 'fee') ?? moved[0]!).transactionId },
    createdAt: last.ended.at,
  };
};

export interface VoidView {
  readonly id: string;
  readonly amountCents: Cents;
  readonly currency: 'USD';
  readonly reason: string | null;
  readonly status: 'voided';
  readonly voidedLineItems: readonly { readonly id: string; readonly amountCents: Cents }[];
  readonly voidedServiceFeeCents: Cents;
  readonly gateway: { readonly transactionId: string };
  readonly createdAt: string;
}

export type ReversalView = RefundView | VoidView;

/** The result of a completed void. The view always shows the whole payment, even if a retry voided only the fee (C27, C38). */
export const voidView = (id: string, payment: Charged, attempt: ReversalAttempt, reveal: Reveal): VoidView => {
  const parts = partsOf(payment, attempt);
  const moved = parts.flatMap((part) => part.returned);
  const ended = parts.at(-1)!.ended;
  if (!ended || moved.length === 0) throw new Error('a void result without a void');
  const lines = parts.flatMap((part) => part.lines);
  const voidedLineItems = payment.terms.lineItems.map((line) => ({
    id: line.id,
    amountCents: sumCents(
      lines.filter(({ lineItemId }) => lineItemId === line.id),
      ({ principalCents }) => principalCents,
    ),
  }));
  const voidedServiceFeeCents = sumCents(moved, ({ feeCents }) => feeCents);
  return {
    id,
    amountCents: sumCents(voidedLineItems, ({ amountCents }) => amountCents) + voidedServiceFeeCents,
    currency: 'USD',
    reason: reasonOf(id, attempt, reveal),
    status: 'voided',
    voidedLineItems,
    voidedServiceFeeCents,
    gateway: { transactionId: (moved.find(({ leg }) => leg !== 'fee') ?? moved[0]!).transactionId },
    createdAt: ended.at,
  };
};

/** The reason of an attempt. null: it has none, or the reader must not see it. */
export const reasonOf = (id: string, { attemptId, personal }: Pick<ReversalAttempt, 'attemptId' | 'personal'>, reveal: Reveal): string | null =>
  reveal.content(personal, reasonContext(id, attemptId))?.reason ?? null;

/** The attempts of one refund or void, in order: the one that began it, and the one that completed it, if there is one. */
const partsOf = (payment: Charged, attempt: ReversalAttempt): ReversalAttempt[] => {
  const first = attempt.completes ? (attemptOf(payment, attempt.completes) ?? attempt) : attempt;
  const completion = first.completedBy ? attemptOf(payment, first.completedBy) : undefined;
  // The completion plans the missing fee a second time. So only the principal may be summed over the lines of both attempts.
  return completion && completion !== first ? [first, completion] : [first];
};
