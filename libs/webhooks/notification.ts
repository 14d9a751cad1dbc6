/**
 * Decides which events of a payment become notifications, and makes the exact body (specification, Events).
 *
 * A reversal becomes a notification if staff initiated the attempt. Requests of the partner, timeout reversals and `payments resolve` send nothing
 * (C56).
 */
import type { DisputeStatus, Means, PaymentEvent } from '#payments';

export type Notification =
  | {
      readonly type: 'payment.refunded';
      readonly data: {
        /** The payment. */
        readonly id: string;
        readonly reversalType: Means;
        /** Cents that this attempt returned, including the fee. */
        readonly amountCents: number;
        readonly currency: 'USD';
        readonly reason: string;
        readonly initiatedBy: 'staff';
      };
    }
  | {
      readonly type: 'payment.disputed';
      readonly data: {
        /** The payment. */
        readonly id: string;
        readonly disputeId: string;
        readonly status: DisputeStatus;
        readonly stage: string;
        readonly reasonCode: string;
        readonly reason: string;
        readonly disputedAmountCents: number;
        readonly currency: 'USD';
        /** YYYY-MM-DD. */
        readonly openedOn: string;
        readonly dueDate: string;
      };
    };

/** Types of events that may become a notification. */
export const NOTIFYING_EVENTS: readonly PaymentEvent['type'][] = ['ReversalEnded', 'PaymentDisputed'];

/**
 * The notification of an event. null: there is none. A change of both status and stage is one event, so it makes one notification (C57). In the
 * specification, `reason` is a string: empty if there is no reason, or if it is erased.
 */
export const notificationOf = (paymentId: string, event: PaymentEvent, reason: string): Notification | null => {
  if (event.type === 'ReversalEnded') {
    const { initiatedBy, reversalType, amountCents } = event.data;
    if (initiatedBy !== 'staff' || reversalType === null || amountCents === 0) return null;
    const data = { id: paymentId, reversalType, amountCents, currency: 'USD', reason, initiatedBy } as const;
    return { type: 'payment.refunded', data };
  }
  // A dispute that a return has overtaken is as it was told before.
  if (event.type === 'PaymentDisputed' && event.data.overtakenBy === undefined) {
    const { disputeId, status, stage, reasonCode, disputedAmountCents, openedOn, dueDate } = event.data;
    const data = { id: paymentId, disputeId, status, stage, reasonCode, reason, disputedAmountCents, currency: 'USD', openedOn, dueDate } as const;
    return { type: 'payment.disputed', data };
  }
  return null;
};

/** Makes the body of an event. The body is stored, and every attempt sends the same bytes. `createdAt`: RFC 3339 with milliseconds (C2). */
export const bodyOf = (id: string, createdAt: string, { type, data }: Notification): string => JSON.stringify({ id, type, createdAt, data });
