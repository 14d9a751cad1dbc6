/** Commands of staff on disputes: open a dispute on a charged payment, and change its status and stage. Each change is one event (C30, C57). */
import {
  type Cents,
  Deadline,
  DUE_AHEAD_DAYS,
  inClear,
  isBox,
  isDay,
  isUuid,
  type Personal,
  refuseWrongDate,
  ServiceError,
  timestamp,
} from '#kernel';
import {
  type Charged,
  type Dispute,
  DISPUTE_STATUSES,
  disputeContext,
  type DisputeStatus,
  keyForPayment,
  type Payment,
  type PaymentCommand,
  type PaymentPorts,
  type Reason,
  refuseStaffText,
  REQUEST_DEADLINE_MS,
  retryingConflicts,
} from '#payments';
import type { PersonalKey } from '#platform';
import type { Origin } from '#eventstore';
import type { Register } from './register.js';

/** Limit of C57. */
export const MAX_STAGE_CHARACTERS = 64;
export const MAX_REASON_CODE_CHARACTERS = 64;

/** A dispute without its reason, which lies in a box. */
export type DisputeFacts = Omit<Dispute, 'personal'>;

/** A dispute as staff name it. */
export type DisputeTerms = DisputeFacts & Reason;

/**
 * Opens a dispute. A repetition with the same id and terms changes nothing. If the reason of the first one is erased, the repetition is compared
 * without it. Throws VALIDATION_ERROR, PAYMENT_NOT_FOUND or INVALID_STATE.
 */
export const openDispute = async (
  ports: PaymentPorts,
  paymentId: string,
  terms: DisputeTerms,
  origin: Origin,
  old = false,
): Promise<DisputeFacts> => {
  const { reason, ...dispute } = terms;
  refuseWrongWords(terms);
  if (!isUuid(dispute.disputeId)) throw invalid('disputeId must be a UUID.');
  if (!isDay(dispute.openedOn) || !isDay(dispute.dueDate)) throw invalid('openedOn and dueDate must be days like 2026-01-31.');
  if (dispute.dueDate < dispute.openedOn) throw invalid('dueDate must not lie before openedOn.');
  const open = async (payment: Payment): Promise<PaymentCommand> => {
    refuseWrongDisputeDates(payment, dispute, ports.clock.now(), old);
    const personal = await sealedReason(ports, paymentId, payment, dispute.disputeId, reason);
    return { type: 'OpenDispute', at: timestamp(ports.clock.now()), dispute: { ...dispute, personal } };
  };
  return execute(ports, paymentId, open, dispute.disputeId, origin);
};

/** Dates of a dispute that is recorded already are not looked at again. */
const refuseWrongDisputeDates = (payment: Payment, { disputeId, openedOn, dueDate }: DisputeFacts, now: number, old: boolean): void => {
  if (payment.phase !== 'charged' || payment.disputes.some((one) => one.disputeId === disputeId)) return;
  refuseWrongDate('openedOn', openedOn, now, { notBefore: { date: payment.createdAt, what: 'the payment' }, old });
  refuseWrongDate('dueDate', dueDate, now, { aheadDays: DUE_AHEAD_DAYS, old });
};

/** The reason, sealed under the key of the dispute's first reason, so that equal reasons make equal boxes. */
const sealedReason = async (
  ports: PaymentPorts,
  paymentId: string,
  payment: Payment,
  disputeId: string,
  reason: string,
): Promise<Personal<Reason>> => {
  // The decider refuses this dispute.
  if (payment.phase !== 'charged') return null;
  const seal = (key: PersonalKey) => key.seal({ reason }, disputeContext(paymentId, disputeId));
  const before = payment.disputes.find((dispute) => dispute.disputeId === disputeId)?.personal ?? null;
  if (before === null) return seal(await keyForPayment(ports, payment));
  if (!isBox(before)) return inClear({ reason });
  const key = (await ports.personal.open([before.key])).key(before.key);
  // If the first reason is erased, it counts as equal.
  return key ? seal(key) : before;
};

/** null keeps the present value. */
export interface DisputeChange {
  readonly status: DisputeStatus | null;
  readonly stage: string | null;
  /** A corrected amount. Absent: the amount is as before. */
  readonly amountCents?: Cents;
}

/** Changes the status, the stage or the amount of a dispute. Unknown dispute → VALIDATION_ERROR. */
export const updateDispute = async (
  ports: PaymentPorts,
  register: Register,
  disputeId: string,
  change: DisputeChange,
  origin: Origin,
): Promise<DisputeFacts & { readonly paymentId: string }> => {
  refuseWrongWords(change);
  await register.caughtUp();
  const found = isUuid(disputeId) ? await register.dispute(disputeId.toLowerCase()) : null;
  if (!found) throw invalid('There is no such dispute.');
  const command = { type: 'UpdateDispute', at: timestamp(ports.clock.now()), disputeId: found.disputeId, ...change } as const;
  return { ...(await execute(ports, found.paymentId, () => Promise.resolve(command), found.disputeId, origin)), paymentId: found.paymentId };
};

const execute = (
  ports: PaymentPorts,
  paymentId: string,
  commandFor: (payment: Payment) => Promise<PaymentCommand>,
  disputeId: string,
  origin: Origin,
): Promise<DisputeFacts> =>
  retryingConflicts(async () => {
    const loaded = await ports.streams.load(paymentId);
    const command = await commandFor(loaded.payment);
    const { payment, revision } = await ports.streams.execute(loaded, [command], origin, new Deadline(ports.clock, REQUEST_DEADLINE_MS));
    if (revision === loaded.revision) await ports.streams.raiseExcess(paymentId, payment, origin);
    const { personal: _, ...facts } = (payment as Charged).disputes.find((dispute) => dispute.disputeId === disputeId)!;
    return facts;
  });

const refuseWrongWords = (words: { status: string | null; stage: string | null; reasonCode?: string; reason?: string }): void => {
  const { status, stage, reasonCode, reason } = words;
  if (status !== null && !(DISPUTE_STATUSES as readonly string[]).includes(status))
    throw invalid(`status must be one of ${DISPUTE_STATUSES.join(', ')}.`);
  if (stage !== null) refuseStaffText('stage', stage, MAX_STAGE_CHARACTERS);
  if (reasonCode !== undefined) refuseStaffText('reasonCode', reasonCode, MAX_REASON_CODE_CHARACTERS);
  if (reason !== undefined) refuseStaffText('reason', reason);
};

const invalid = (message: string) => new ServiceError('VALIDATION_ERROR', message);
