/** Staff: the names of actors, the rules for their texts, and how a task that only a person may decide is raised. */
import { defineEvents, type EventStore, type Origin, recordOnce } from '#eventstore';
import { type Json, ServiceError } from '#kernel';
import { cardInText, hashedUuid, NUL_OR_LONE_SURROGATE } from '#platform';
import type { PaymentPorts } from './charge.js';
import type { Payment } from './payment.js';

export const MAX_STAFF_NAME_CHARACTERS = 200;
/** The same limit as for a partner's refund reason (C8). */
export const MAX_STAFF_TEXT_CHARACTERS = 1_000;

/** Makes the origin of a person's command. Throws VALIDATION_ERROR if the name cannot be recorded. */
const person =
  (type: 'staff' | 'operator') =>
  (name: string, correlationId: string): Origin => {
    refuseStaffText('by', name, MAX_STAFF_NAME_CHARACTERS);
    return { actor: { type, id: name.trim() }, correlationId };
  };
/** People who decide about payments, cases, settlement and the books. */
export const staff = person('staff');
/** People who run the installation: accounts, portals, keys, webhooks. */
export const operator = person('operator');

/**
 * Throws VALIDATION_ERROR if a text of staff is empty or too long, or holds a NUL, a lone surrogate or a card number (C8, C9). The log keeps such
 * texts for ever.
 */
export const refuseStaffText = (field: string, text: string, most = MAX_STAFF_TEXT_CHARACTERS): void => {
  const refuse = (message: string) => new ServiceError('VALIDATION_ERROR', `${field} ${message}.`);
  if (text.trim() === '' || text.length > most) throw refuse(`must have 1 to ${most} characters`);
  if (NUL_OR_LONE_SURROGATE.test(text)) throw refuse('must not hold a NUL or a lone surrogate');
  const card = cardInText(text);
  if (card) throw refuse(card);
};

export type StaffTaskReason =
  /** Recovery found money at the gateway that it must not undo (C29). */
  | 'charge_cannot_be_undone'
  /** The processor's batch settled a payment of unknown outcome (C29). */
  | 'settled_while_unknown'
  /** C67. */
  | 'settlement_rejected'
  /** A batch accepted a sale whose settlement had been rejected before. */
  | 'settled_after_rejection';

/**
 * A task about an unknown outcome is open while the payment is unknown. A task about a rejected settlement of a charged payment stays open for ever,
 * since the books no longer expect the money.
 */
export const isTaskOpen = (reason: StaffTaskReason, { phase }: Payment): boolean =>
  reason === 'charge_cannot_be_undone' || reason === 'settled_while_unknown' ? phase === 'unknown' : phase === 'charged';

interface StaffTaskRaised {
  readonly type: 'StaffTaskRaised';
  readonly data: { readonly paymentId: string; readonly reason: StaffTaskReason; readonly evidence: Readonly<Record<string, Json>> };
}

export const staffTaskEvents = defineEvents<StaffTaskRaised>({ StaffTaskRaised: [] });

/** The stream of a task. A payment has at most one task of each reason. */
export const staffTaskStream = (paymentId: string, reason: StaffTaskReason): string => `staff-task-${taskIdOf(paymentId, reason)}`;
const taskIdOf = (paymentId: string, reason: StaffTaskReason): string => hashedUuid('staff-task', paymentId, reason);

/**
 * Logs an error as an alarm, and records a task. If the same task was recorded before, does nothing: recovery finds the same payment again and again.
 * Throws the errors of the store.
 */
export const raiseStaffTask = async (
  { clock, log }: Pick<PaymentPorts, 'clock' | 'log'>,
  store: EventStore,
  paymentId: string,
  reason: StaffTaskReason,
  evidence: Readonly<Record<string, Json>>,
  origin: Origin,
): Promise<void> => {
  const stream = staffTaskStream(paymentId, reason);
  for await (const _ of store.read(stream, 0n, 1)) return;
  // The line comes before the event. So a process that is killed in between loses no alarm.
  log.error({ paymentId, reason }, 'a payment needs a decision by staff');
  const event: StaffTaskRaised = { type: 'StaffTaskRaised', data: { paymentId, reason, evidence } };
  await recordOnce({ store, clock }, staffTaskEvents, stream, event, taskIdOf(paymentId, reason), origin);
};
