/** Staff: the names of actors, the rules for their texts, and how a task that only a person may decide is raised and ended. */
import { isDeepStrictEqual } from 'node:util';
import { change, Conflict, type DecidedStreamType, defineEvents, type EventStore, execute, load, type Origin } from '#eventstore';
import { type Json, ServiceError } from '#kernel';
import { cardInText, contactInText, controlsInText, DIGITS_ONLY, hashedUuid, NUL_OR_LONE_SURROGATE } from '#platform';
import type { PaymentPorts } from './charge.js';
import { openOf, type Payment, standing } from './payment.js';

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

/** Texts of staff that may have tabs and line breaks. */
const MULTILINE: readonly string[] = ['reason', 'evidence'];

/**
 * The faults of a text of staff (C8, C9). `now`: it is empty or too long, or holds a NUL, a lone surrogate or a card number. `later`: it breaks a younger
 * rule, which comes after the look at a key.
 */
export const staffTextFaults = (
  field: string,
  text: string,
  most = MAX_STAFF_TEXT_CHARACTERS,
): { readonly now: ServiceError | null; readonly later: ServiceError | null } => {
  const refusal = (fault: string | null) => (fault === null ? null : new ServiceError('VALIDATION_ERROR', `${field} ${fault}.`));
  const now =
    text.trim() === '' || text.length > most
      ? `must have 1 to ${most} characters`
      : NUL_OR_LONE_SURROGATE.test(text)
        ? 'must not hold a NUL or a lone surrogate'
        : cardInText(text, DIGITS_ONLY);
  return { now: refusal(now), later: refusal(controlsInText(text, { multiline: MULTILINE.includes(field) }) ?? cardInText(text)) };
};

/** Throws VALIDATION_ERROR if a text of staff has a fault. The log keeps such texts for ever. */
export const refuseStaffText = (field: string, text: string, most = MAX_STAFF_TEXT_CHARACTERS): void => {
  const { now, later } = staffTextFaults(field, text, most);
  const fault = now ?? later;
  if (fault) throw fault;
};

/**
 * As {@link refuseStaffText}, for a text about the books or about a decision, which the log keeps in clear. Also refuses e-mail addresses and telephone
 * numbers, since no erasure reaches them.
 */
export const refuseClearText = (field: string, text: string, most = MAX_STAFF_TEXT_CHARACTERS): void => {
  refuseStaffText(field, text, most);
  const contact = contactInText(text);
  if (contact) throw new ServiceError('VALIDATION_ERROR', `${field} ${contact}.`);
};

export type StaffTaskReason =
  /** Recovery found money at the gateway that it must not undo (C29). */
  | 'charge_cannot_be_undone'
  /** The processor's batch settled a payment of unknown outcome (C29). */
  | 'settled_while_unknown'
  /** C67. */
  | 'settlement_rejected'
  /** A batch accepted a sale whose settlement had been rejected before. */
  | 'settled_after_rejection'
  /** A refund has failed after it was settled. The payer has not got the money. */
  | 'refund_failed'
  /** The gateway lists a dispute that no payment can have. If the payment is unknown, the id is that of the dispute. */
  | 'gateway_dispute_unmatched'
  /** A dispute takes more than remained of the payment: money was returned before (C30). */
  | 'dispute_after_return'
  /** The gateway should have been able to tell about an attempt a day ago, and still cannot. The evidence names the attempt. */
  | 'outcome_overdue';

/** Tasks about money that a batch or a bank has decided. A person ends them by an acknowledgement; nothing else can. */
export const ACKNOWLEDGED_TASKS = [
  'settlement_rejected',
  'settled_after_rejection',
  'refund_failed',
  'gateway_dispute_unmatched',
  'dispute_after_return',
] as const satisfies readonly StaffTaskReason[];
export type AcknowledgedTask = (typeof ACKNOWLEDGED_TASKS)[number];

/** A person's word that a task is dealt with. */
export interface Acknowledgement {
  readonly reason: string;
  readonly by: string;
}

/**
 * A task about an unknown outcome is open while the payment is unknown, and a task about an overdue one while the attempt is open. A task about a
 * batch is open until a person acknowledges it.
 */
export const isTaskOpen = (reason: StaffTaskReason, payment: Payment, { evidence, acknowledged }: StaffTaskState): boolean => {
  if (reason === 'outcome_overdue') {
    const open = openOf(payment);
    return open !== null && open.attemptId === evidence.at(-1)?.attemptId;
  }
  const { phase } = payment;
  if (reason === 'charge_cannot_be_undone' || reason === 'settled_while_unknown') return phase === 'unknown';
  // The refund of an undone charge fails on a payment that was never charged, and a dispute may be of no payment.
  return acknowledged === null && (reason === 'refund_failed' || reason === 'gateway_dispute_unmatched' || phase === 'charged');
};

type Evidence = Readonly<Record<string, Json>>;

type StaffTaskEvent =
  | { readonly type: 'StaffTaskRaised'; readonly data: { readonly paymentId: string; readonly reason: StaffTaskReason; readonly evidence: Evidence } }
  | {
      readonly type: 'StaffTaskAcknowledged';
      readonly data: { readonly paymentId: string; readonly task: AcknowledgedTask } & Acknowledgement;
    };

/** Upcast to a version that knows more reasons. */
const asItWas = <Data>(data: Data): Data => data;

export const staffTaskEvents = defineEvents<StaffTaskEvent>({
  StaffTaskRaised: [asItWas, asItWas],
  StaffTaskAcknowledged: [asItWas, asItWas],
});

interface StaffTaskState {
  /** The evidence of each time that the task was raised, oldest first. */
  readonly evidence: readonly Evidence[];
  /** null: the task waits, or was raised again. */
  readonly acknowledged: Acknowledgement | null;
}

type StaffTaskCommand =
  | { readonly type: 'Raise'; readonly paymentId: string; readonly reason: StaffTaskReason; readonly evidence: Evidence }
  | ({ readonly type: 'Acknowledge'; readonly paymentId: string; readonly task: AcknowledgedTask } & Acknowledgement);

/** The stream of a task. A payment has at most one task of each reason. */
export const STAFF_TASK_STREAM: DecidedStreamType<StaffTaskState, StaffTaskCommand, StaffTaskEvent> = {
  prefix: 'staff-task-',
  events: staffTaskEvents,
  decider: {
    initial: { evidence: [], acknowledged: null },
    evolve: (state, { type, data }) =>
      type === 'StaffTaskRaised'
        ? { evidence: [...state.evidence, data.evidence], acknowledged: null }
        : { ...state, acknowledged: { reason: data.reason, by: data.by } },
    decide: ({ evidence, acknowledged }, command) => {
      if (command.type === 'Raise') {
        const { paymentId, reason } = command;
        // Recovery and settlement find the same facts again and again. Only other facts raise an acknowledged task again.
        // A task about an overdue attempt has ended with it, so a later attempt raises it again.
        const isOverdue = reason === 'outcome_overdue';
        const isSame = (earlier: Evidence) =>
          isOverdue ? earlier.attemptId === command.evidence.attemptId : isDeepStrictEqual(earlier, command.evidence);
        if (evidence.some(isSame) || (!isOverdue && evidence.length > 0 && acknowledged === null)) return [];
        return [{ type: 'StaffTaskRaised', data: { paymentId, reason, evidence: command.evidence } }];
      }
      if (evidence.length === 0) throw new ServiceError('VALIDATION_ERROR', 'The payment has no such task.', {}, { status: 404 });
      const { paymentId, task, reason, by } = command;
      return acknowledged === null ? [{ type: 'StaffTaskAcknowledged', data: { paymentId, task, reason, by } }] : [];
    },
  },
};

export const staffTaskId = (paymentId: string, reason: StaffTaskReason): string => hashedUuid('staff-task', paymentId, reason);

/**
 * Logs an error as an alarm, and records a task. true: it was not raised before. Does nothing if the task waits already, or was acknowledged with the same evidence. Throws the errors
 * of the store.
 */
export const raiseStaffTask = async (
  { clock, ids, log }: Pick<PaymentPorts, 'clock' | 'ids' | 'log'>,
  store: EventStore,
  paymentId: string,
  reason: StaffTaskReason,
  evidence: Evidence,
  origin: Origin,
): Promise<boolean> => {
  const loaded = await load(store, STAFF_TASK_STREAM, staffTaskId(paymentId, reason));
  const command: StaffTaskCommand = { type: 'Raise', paymentId, reason, evidence };
  if (STAFF_TASK_STREAM.decider.decide(loaded.state, command).length === 0) return false;
  // The line comes before the event. So a process that is killed in between loses no alarm.
  log.error({ paymentId, reason }, 'a payment needs a decision by staff');
  await execute({ store, clock, ids }, STAFF_TASK_STREAM, loaded, [command], origin).catch((error: unknown) => {
    // Another process has raised it.
    if (!(error instanceof Conflict)) throw error;
  });
  return true;
};

/** The excess of the payment's disputes (C30), and the returns of those legs. null: there is no excess. */
export const excessEvidence = (payment: Payment): Evidence | null => {
  if (payment.phase !== 'charged') return null;
  const disputes = payment.disputes.flatMap((dispute) =>
    standing([dispute]).flatMap(({ leg, excessCents }) => (excessCents === undefined ? [] : [{ dispute: dispute.disputeId, leg, excessCents }])),
  );
  if (disputes.length === 0) return null;
  const returns = payment.attempts.flatMap(({ attemptId, returned }) =>
    returned.flatMap(({ leg, transactionId, principalCents, feeCents }) =>
      disputes.some((one) => one.leg === leg) ? [{ attemptId, leg, transactionId, cents: principalCents + feeCents }] : [],
    ),
  );
  return { disputes, returns };
};

/** The evidence of each time that a task of a payment was raised, oldest first. Empty: it never was. Throws the errors of the store. */
export const staffTaskEvidence = async (store: EventStore, paymentId: string, reason: StaffTaskReason): Promise<readonly Evidence[]> =>
  (await load(store, STAFF_TASK_STREAM, staffTaskId(paymentId, reason))).state.evidence;

export interface AcknowledgeRequest extends Acknowledgement {
  readonly paymentId: string;
  readonly task: AcknowledgedTask;
}

/**
 * Ends a task about a batch, with the reason of a person. It moves no money. A task that was acknowledged before stays as it was; the earlier
 * acknowledgement is returned. Throws VALIDATION_ERROR, and the errors of the store.
 */
export const acknowledgeStaffTask = async (
  { clock, ids }: Pick<PaymentPorts, 'clock' | 'ids'>,
  store: EventStore,
  { paymentId, task, reason, by }: AcknowledgeRequest,
): Promise<AcknowledgeRequest> => {
  refuseClearText('reason', reason);
  const origin = staff(by, ids.uuid());
  const busy = () => new ServiceError('INVALID_STATE', 'The task is being changed; try again.');
  const command = { type: 'Acknowledge', paymentId, task, reason, by: origin.actor.id } as const;
  const { state } = await change({ store, clock, ids }, STAFF_TASK_STREAM, staffTaskId(paymentId, task), command, origin, busy);
  return { paymentId, task, ...state.acknowledged! };
};
