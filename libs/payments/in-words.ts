/** What happened to a payment, for people: its refunds and voids, and a sentence for each event. */
import { dollars, type Reveal, sumCents, unreachable } from '#kernel';
import { cents, type Charged, type Initiator, type LegReturned, type Means, type PaymentEvent, type ReversalEnd, type ReversalRequest } from './payment.js'; // prettier-ignore
import { reasonOf, returnStatus, type ReturnView } from './payment.view.js';

/** A refund or void with what came of it. */
export interface ReversalInWords {
  readonly attemptId: string;
  readonly operation: Means;
  readonly initiatedBy: Initiator;
  /** `open`: it has not ended. */
  readonly outcome: ReversalEnd['outcome'] | 'open';
  /** null: it has none, or the reader must not see it. */
  readonly reason: string | null;
  readonly requestedAt: string;
  readonly endedAt: string | null;
  readonly amountCents: number;
  readonly legs: readonly { readonly leg: string; readonly means: Means; readonly amountCents: number; readonly transactionId: string; readonly status: ReturnView['status'] }[]; // prettier-ignore
}

/** All refunds and voids of a payment, the oldest first. */
export const reversalsOf = (id: string, payment: Charged, reveal: Reveal): readonly ReversalInWords[] =>
  payment.attempts.map((attempt) => ({
    attemptId: attempt.attemptId,
    operation: attempt.operation,
    initiatedBy: attempt.initiatedBy,
    outcome: attempt.ended?.outcome ?? 'open',
    reason: reasonOf(id, attempt, reveal),
    requestedAt: attempt.requestedAt,
    endedAt: attempt.ended?.at ?? null,
    amountCents: sumCents(attempt.returned, cents),
    legs: attempt.returned.map((one) => {
      const { leg, means, transactionId } = one;
      return { leg, means, amountCents: cents(one), transactionId, status: returnStatus(one) };
    }),
  }));

const words = (name: string): string => name.replaceAll('_', ' ');
const chargeOf = (leg: string | null): string => (leg === null || leg === 'combined' ? 'the charge' : `the ${leg} charge`);

const requested = (operation: Means, { legs, initiatedBy, completes }: ReversalRequest): string => {
  const parts = legs.map((leg) => `${dollars(cents(leg))} of ${chargeOf(leg.leg)} by ${leg.means}`);
  return `${initiatedBy} asked for a ${operation}${completes === null ? '' : ' that completes an earlier one'}: ${parts.join(', ')}`;
};

const went = (how: string, { leg, transactionId, ...part }: LegReturned): string =>
  transactionId === null ? `${chargeOf(leg)} was never made` : `${dollars(cents(part))} of ${chargeOf(leg)} ${how}, transaction ${transactionId}`;

const ENDS: Readonly<Record<ReversalEnd['outcome'], string>> = {
  completed: 'is complete',
  partial: 'is not complete',
  rejected: 'was refused by the processor',
  never_executed: 'was not executed by the processor',
};

/** What an event says, without personal data. */
export const eventInWords = ({ type, data }: PaymentEvent): string => {
  switch (type) {
    case 'PaymentInitiated': {
      const { amountCents, serviceFeeCents, paymentMethod } = data;
      const total = dollars(amountCents + serviceFeeCents);
      return `a charge of ${total} was asked for: ${dollars(amountCents)} and a service fee of ${dollars(serviceFeeCents)}, ${paymentMethod.brand} ${paymentMethod.last4}`; // prettier-ignore
    }
    case 'PaymentCreated': {
      const named = data.legs.map(({ leg, transactionId }) => `${leg} ${transactionId}`).join(', ');
      return `charged; confirmation number ${data.confirmationNumber}; transactions: ${named}`;
    }
    case 'PaymentDeclined':
      return `${chargeOf(data.leg)} was declined: ${words(data.declineCode)}`;
    case 'PaymentFailed':
      return `not charged: ${data.reason}`;
    case 'PaymentOutcomeUnknown':
      return `the processor gave no clear answer about ${chargeOf(data.leg)} (${words(data.cause)})`;
    case 'PaymentAbandoned':
      return `the request ended before it began: ${data.reason}`;
    case 'PaymentLost':
      return 'the log has lost the end of this charge: its result is unknown, and staff decide about it';
    case 'ReconciliationStarted':
      return 'the processor is asked what became of the request';
    case 'VoidRequested':
      return requested('void', data);
    case 'RefundRequested':
      return requested('refund', data);
    case 'PaymentVoided':
      return went('was voided', data);
    case 'PaymentRefunded':
    case 'FeeRefunded':
      return went('was refunded', data);
    case 'RefundFailed':
      return `the refund of ${chargeOf(data.leg)} failed later: the money has not arrived, transaction ${data.transactionId}`;
    case 'ReturnedElsewhere':
      return `a return of ${chargeOf(data.leg)} at the processor’s own page is ${data.status}${data.transactionId === null ? '' : `, transaction ${data.transactionId}`}`;
    case 'ReversalEnded':
      return `the ${data.operation} ${ENDS[data.outcome]}: ${dollars(data.amountCents)} went back`;
    case 'ReversalAcknowledged':
      return 'a repeated request got the result';
    case 'PaymentSettled':
      return `${chargeOf(data.leg)} settled in batch ${data.batchId}, closed ${data.closedAt}: ${dollars(data.grossCents)}, of it ${dollars(data.feeCents)} for the processor`; // prettier-ignore
    case 'SettlementRejected':
      return `batch ${data.batchId} did not accept ${chargeOf(data.leg)}`;
    case 'SettlementWithdrawn':
      return `a corrected file takes ${chargeOf(data.leg)} out of batch ${data.batchId}`;
    case 'PaymentDisputed':
      return `dispute of ${dollars(data.disputedAmountCents)}: ${words(data.status)}, stage ${data.stage}, reason code ${data.reasonCode}, answer due ${data.dueDate}`; // prettier-ignore
    case 'ReturnRequested':
      return `staff send the settled money back to the card, for exception ${data.exceptionId}`;
    case 'PaymentResolved':
      return `${data.by} decided that it ${data.as}${data.forced ? ', by force' : ''}: ${data.evidence}`;
    default:
      return unreachable(type);
  }
};
