/** Commands of staff on disputes: open a dispute on a charged payment, and change its status and stage. Each change is one event (C30, C57). */
import { Deadline, isDay, isUuid, ServiceError, timestamp } from '#kernel';
import {
  type Charged,
  type Dispute,
  DISPUTE_STATUSES,
  type DisputeStatus,
  type PaymentCommand,
  type PaymentPorts,
  refuseStaffText,
  REQUEST_DEADLINE_MS,
  retryingConflicts,
} from '#payments';
import type { Origin } from '#eventstore';
import type { Register } from './register.js';

/** Limit of C57. */
export const MAX_STAGE_CHARACTERS = 64;
export const MAX_REASON_CODE_CHARACTERS = 64;

/** Opens a dispute. A repetition with the same id and terms changes nothing. Throws VALIDATION_ERROR, PAYMENT_NOT_FOUND or INVALID_STATE. */
export const openDispute = async (ports: PaymentPorts, paymentId: string, dispute: Dispute, origin: Origin): Promise<Dispute> => {
  refuseWrongWords(dispute);
  if (!isUuid(dispute.disputeId)) throw invalid('disputeId must be a UUID.');
  if (!isDay(dispute.openedOn) || !isDay(dispute.dueDate)) throw invalid('openedOn and dueDate must be days like 2026-01-31.');
  if (dispute.dueDate < dispute.openedOn) throw invalid('dueDate must not lie before openedOn.');
  return execute(ports, paymentId, { type: 'OpenDispute', at: timestamp(ports.clock.now()), dispute }, dispute.disputeId, origin);
};

/** null keeps the present value. */
export interface DisputeChange {
  readonly status: DisputeStatus | null;
  readonly stage: string | null;
}

/** Changes the status or the stage of a dispute. Unknown dispute → VALIDATION_ERROR. */
export const updateDispute = async (
  ports: PaymentPorts,
  register: Register,
  disputeId: string,
  change: DisputeChange,
  origin: Origin,
): Promise<Dispute & { readonly paymentId: string }> => {
  refuseWrongWords(change);
  await register.caughtUp();
  const found = isUuid(disputeId) ? await register.dispute(disputeId.toLowerCase()) : null;
  if (!found) throw invalid('There is no such dispute.');
  const command = { type: 'UpdateDispute', at: timestamp(ports.clock.now()), disputeId: found.disputeId, ...change } as const;
  return { ...(await execute(ports, found.paymentId, command, found.disputeId, origin)), paymentId: found.paymentId };
};

const execute = (ports: PaymentPorts, paymentId: string, command: PaymentCommand, disputeId: string, origin: Origin): Promise<Dispute> =>
  retryingConflicts(async () => {
    const loaded = await ports.streams.load(paymentId);
    const { payment } = await ports.streams.execute(loaded, [command], origin, new Deadline(ports.clock, REQUEST_DEADLINE_MS));
    return (payment as Charged).disputes.find((dispute) => dispute.disputeId === disputeId)!;
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
