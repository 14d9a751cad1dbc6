/**
 * Decides which events of a payment become notifications, and makes the exact body that is signed and sent (specification, Events).
 *
 * A reversal becomes a notification if staff initiated the attempt. It does not matter which process recorded the end of the attempt. Requests of the
 * partner, timeout reversals and `payments resolve` send nothing (C56).
 */
import type { DisputeStatus, Means, PaymentEvent } from '#payments';

export type Notification =
  | {
      readonly type: 'payment.refunded';
      readonly data: {
        /** The payment. */
        readonly id: string;
        readonly reversalType: Means;
        /** The cents that this attempt returned, including the fee. The sum over all notifications of a payment is the money that staff returned. */
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

/** The events that may become a notification. The outbox ignores all others. */
export const NOTIFYING_EVENTS: readonly PaymentEvent['type'][] = ['ReversalEnded', 'PaymentDisputed'];

/**
 * The notification of an event. null: there is none. An event makes at most one notification. A change of both status and stage is one event (C57).
 */
export const notificationOf = (paymentId: string, event: PaymentEvent): Notification | null => {
  if (event.type === 'ReversalEnded') {
    const { initiatedBy, reversalType, amountCents, reason } = event.data;
    if (initiatedBy !== 'staff' || reversalType === null || amountCents === 0) return null;
    // The body's `reason` is a string in the specification. Without a reason it is empty.
    const data = { id: paymentId, reversalType, amountCents, currency: 'USD', reason: reason ?? '', initiatedBy } as const;
    return { type: 'payment.refunded', data };
  }
  if (event.type === 'PaymentDisputed') {
    const { disputeId, status, stage, reasonCode, reason, disputedAmountCents, openedOn, dueDate } = event.data;
    const data = { id: paymentId, disputeId, status, stage, reasonCode, reason, disputedAmountCents, currency: 'USD', openedOn, dueDate } as const;
    return { type: 'payment.disputed', data };
  }
  return null;
};

/**
 * Makes the body of an event. It is made once and stored, and every attempt and redelivery sends the same bytes. `createdAt` is RFC 3339 with
 * milliseconds (C2).
 */
export const bodyOf = (id: string, createdAt: string, { type, data }: Notification): string => JSON.stringify({ id, type, createdAt, data });
