/**
 * Sends money back to the card, for a settlement exception (C75): the money of a settled sale, or of a refund that has failed.
 *
 * 1. For a sale with a payment: the payment's stream records that it can no longer succeed. Then the reversal of the leg is finalised. For a failed
 *    refund: the gateway must show it as failed.
 * 2. The exception's stream records the intent.
 * 3. The gateway is called once, under a reference of its own.
 * 4. The exception's stream records the outcome.
 * 5. A payment of unknown outcome is voided.
 * 6. The exception is resolved.
 *
 * {@link createRefundRecovery} goes on after any step from the intent on, and never sends.
 */
import { load, type Origin, StoreIncident } from '#eventstore';
import { ageMs, type Cents, Deadline, ServiceError, timestamp } from '#kernel';
import {
  aboutLeg,
  type Awaiting,
  callGateway,
  cents,
  disputedCents,
  finalizeReference,
  GatewayCannotTell,
  type GatewayAccount,
  gatewayRef,
  type Leg,
  type Outcome,
  type Payment,
  type PaymentGateway,
  RECOVERY_SCHEDULE_MS,
  RECOVERY_STARTS_AFTER_MS,
  refuseClearText,
  type RefundCall,
  remaining,
  REQUEST_DEADLINE_MS,
  resolvePayment,
  returnOf,
  retryingConflicts,
  type ReversalTxn,
  standing,
  transactionOf,
  undoneCharges,
} from '#payments';
import type { Queryable } from '#platform';
import { linesOf, type RecordedLine } from './batch.js';
import { EXCEPTION_STREAM } from './events.js';
import { type ExceptionRefund, type OpenedException, settlementException } from './exception.js';
import { changeCase } from './case.js';
import { batchOf, type SettlementPorts } from './record.js';

export interface SendRequest {
  readonly exceptionId: string;
  readonly reason: string;
  readonly by: string;
  /** The card's last four digits. null: those of the payment, if one belongs to the exception. */
  readonly last4: string | null;
}

export interface SentRefund {
  readonly exceptionId: string;
  readonly status: 'resolved';
  readonly transactionId: string;
  readonly amountCents: number;
  readonly paymentId: string | null;
}

/**
 * Sends the refund. Throws PAYMENT_TIMEOUT if the outcome is unknown, or if the money went back and the gateway cannot tell about the rest of the
 * payment. Then a worker ends the exception. Throws another ServiceError if nothing was returned.
 */
export const sendRefund = async (ports: SettlementPorts, request: SendRequest, origin: Origin): Promise<SentRefund> => {
  const { payments, store } = ports;
  const { clock, ids, slots } = payments;
  const { exceptionId, reason, by, last4 } = request;
  refuseClearText('reason', reason);
  const at = () => timestamp(clock.now());
  const deadline = new Deadline(clock, REQUEST_DEADLINE_MS);
  const { state } = await load(store, EXCEPTION_STREAM, exceptionId);
  if (!state) throw new ServiceError('VALIDATION_ERROR', 'There is no such exception.', {}, { status: 404 });
  const { opened } = state;
  const { paymentId } = opened;
  const leg = opened.leg ?? 'combined';
  const attemptId = ids.uuid();
  const { account, gateway } = await gatewayOf(ports, opened);
  const source = opened.kind === 'REFUND_FAILED' ? await failedRefund(ports, opened) : await acceptedSale(ports, opened);
  const refund: ExceptionRefund = {
    attemptId,
    ref: gatewayRef(attemptId, leg, 'refund'),
    account,
    leg,
    chargeTransactionId: source.chargeTransactionId,
    amountCents: opened.suspenseCents,
    last4: last4 ?? (source.last4 || (await last4Of(ports, paymentId))),
    paymentId,
    reason,
    by,
  };
  const command = { type: 'RequestRefund', at: at(), by, refund } as const;
  // Refuse before the gateway is asked and before the payment's stream changes. The append of the intent decides again.
  settlementException.decide(state, command);
  if (source.failed !== null) await refuseStandingRefund(ports, gateway, source, source.failed, deadline);
  else if (paymentId === null) await refuseChargeOfPayment(ports, gateway, account, source.chargeTransactionId, deadline);
  else await requestReturn(ports, exceptionId, refund, paymentId, origin, deadline);

  const begunAt = at();
  const outcome = await slots.inHouse(account.gateway, opened.merchantAccount, deadline, async () => {
    const intent = await changeCase(ports, exceptionId, { ...command, at: begunAt }, origin);
    return callGateway(payments, deadline, intent.position, (signal) => gateway.refund(refundCall(command.refund, begunAt), signal)).catch(
      (error: unknown): Outcome<ReversalTxn> => {
        if (!(error instanceof StoreIncident)) throw error;
        return { kind: 'unknown', cause: 'disconnected' };
      },
    );
  });
  if (outcome === null)
    throw new ServiceError('PAYMENT_GATEWAY_ERROR', 'There was no connection to the gateway in time; nothing was sent. Try again.');
  const ended = endOf(outcome);
  if (ended) await changeCase(ports, exceptionId, { type: 'EndRefund', at: at(), by, attemptId, ...ended }, origin);
  // The call was perhaps never sent. If the gateway promises that, the exception is free again at once.
  else await findOutcome(ports, exceptionId, { ...command.refund, requestedAt: begunAt }, origin, deadline).catch(() => undefined);
  const found = (await load(store, EXCEPTION_STREAM, exceptionId)).state?.refund;
  if (found?.attemptId !== attemptId)
    throw new ServiceError(
      'INVALID_STATE',
      `The gateway did not refund (${outcome.kind === 'rejected' ? outcome.why : outcome.kind}); nothing was returned, and the exception stays open.`,
    );
  if (found.transactionId === null)
    throw new ServiceError('PAYMENT_TIMEOUT', 'The outcome of the refund is unknown. A worker finds it and ends the exception; do not send another.');
  await complete(ports, exceptionId, origin).catch((error: unknown) => {
    if (!(error instanceof GatewayCannotTell)) throw error;
    throw new ServiceError(
      'PAYMENT_TIMEOUT',
      `The money went back (${found.transactionId}). The gateway cannot tell about the rest of the payment; a worker asks again and ends the exception.`,
    );
  });
  return { exceptionId, status: 'resolved', transactionId: found.transactionId, amountCents: found.amountCents, paymentId };
};

const refundCall = ({ ref, leg, account, chargeTransactionId, amountCents, last4 }: ExceptionRefund, begunAt: string): RefundCall => ({
  ref,
  leg,
  account,
  begunAt,
  chargeTransactionId,
  amountCents,
  last4: last4 ?? '',
});

/** The money that goes back. */
interface Source {
  /** The charge that is refunded. */
  readonly chargeTransactionId: string;
  /** The card's last four digits. Empty: not known here. */
  readonly last4: string;
  /** The transaction of the refund that has failed. null: the money is that of a sale. */
  readonly failed: string | null;
}

/** The line of the exception, if it is of this type and the processor accepted it. */
const lineOf = async (
  { store }: SettlementPorts,
  { gateway, merchantAccount, batchId, line, transactionId }: OpenedException,
  type: RecordedLine['type'],
): Promise<RecordedLine | null> => {
  const lines = batchId === null ? [] : linesOf(await batchOf(store, { gateway, merchantAccount, batchId }));
  const found = lines.find((one) => one.number === line && one.transactionId === transactionId);
  return found?.type === type && found.accepted ? found : null;
};

/** The sale of the exception's line. The processor must have accepted it. */
const acceptedSale = async (ports: SettlementPorts, opened: OpenedException): Promise<Source> => {
  const sale = await lineOf(ports, opened, 'sale');
  if (!sale)
    throw new ServiceError(
      'INVALID_STATE',
      'A refund is sent only for a sale that the processor has accepted in a batch, or for a refund that has failed.',
    );
  return { chargeTransactionId: sale.transactionId, last4: '', failed: null };
};

/** A refund that was made here. */
interface Made extends Pick<Source, 'chargeTransactionId' | 'last4'> {
  readonly amountCents: Cents;
}

/**
 * The failed refund of the exception's line. It must be recorded here as made. Only then its money counts as returned, and nobody can return it by
 * another refund of the payment.
 */
const failedRefund = async (ports: SettlementPorts, opened: OpenedException): Promise<Source> => {
  const { register, payments, store } = ports;
  const refuse = (message: string) => new ServiceError('INVALID_STATE', `${message}; nothing was sent.`);
  await register.caughtUp();
  const line = await lineOf(ports, opened, 'refund_failure');
  if (!line) throw refuse('The batch no longer lists this refund as failed');
  const { transactionId } = line;
  await refuseOtherFailure(ports, opened, transactionId);
  const known = (await register.transactions(opened.gateway, [transactionId], [])).find(
    (one) => one.op === 'refund' && one.transactionId === transactionId && one.merchantAccount === opened.merchantAccount,
  );
  const payment = opened.paymentId === null ? null : (await payments.streams.load(opened.paymentId)).payment;
  let made: Made | null = null;
  if (known && known.exceptionId !== null) {
    // That refund was itself sent for an exception.
    const sent = (await load(store, EXCEPTION_STREAM, known.exceptionId)).state?.refund;
    if (sent && sent.transactionId === transactionId) made = { ...sent, last4: sent.last4 ?? '' };
  } else if (known && payment) made = madeOn(payment, known.leg, transactionId);
  if (!made) throw refuse(`Refund ${transactionId} is not recorded here as made, so its money does not count as returned`);
  if (opened.suspenseCents > made.amountCents)
    throw refuse(`Refund ${transactionId} has ${made.amountCents} cents, and ${opened.suspenseCents} cents lie in suspense`);
  // An open or lost dispute takes the money from the merchant. The payer would get it twice.
  if (payment?.phase === 'charged') {
    const { principal, fee } = remaining(payment);
    const isTaken = standing(payment.disputes).some(({ leg, excessCents = 0 }) => leg === known?.leg && excessCents > 0);
    if (isTaken || disputedCents(payment) > principal + fee) throw refuse('A dispute of this payment takes the money of this refund');
  }
  return { chargeTransactionId: made.chargeTransactionId, last4: made.last4, failed: transactionId };
};

/** The refund of a payment, as its stream has it. null: the stream does not have it. */
const madeOn = (payment: Payment, leg: Leg, transactionId: string): Made | null => {
  if (payment.phase === 'charged') {
    const charge = payment.legs.find((one) => one.leg === leg);
    const refund = returnOf(payment, { leg, transactionId });
    return charge && refund ? { chargeTransactionId: charge.transactionId, last4: charge.card?.last4 ?? '', amountCents: cents(refund) } : null;
  }
  const undone = undoneCharges(payment).find((one) => one.leg === leg && one.refundTransactionId === transactionId);
  return undone ? { ...undone, last4: '' } : null;
};

/**
 * Lines of several batches may say that the same refund has failed. Its money is sent for the first of them, and only if nothing was done for another
 * one. An exception that was superseded can never send, so it does not count.
 */
const refuseOtherFailure = async ({ register, store }: SettlementPorts, opened: OpenedException, transactionId: string): Promise<void> => {
  const failures = await register.exceptionsOf(opened, transactionId, ['REFUND_FAILED']);
  const own = failures.findIndex(({ exceptionId }) => exceptionId === opened.exceptionId);
  if (own < 0 || failures[own]!.superseded)
    throw new ServiceError('INVALID_STATE', 'A correction has changed the line of this exception; nothing was sent.');
  for (const [index, { exceptionId, superseded }] of failures.entries()) {
    if (index === own) continue;
    const { state } = await load(store, EXCEPTION_STREAM, exceptionId);
    // A superseded line without an exception can get none that sends: see above.
    const stands = state === null ? !superseded : state.status !== 'superseded';
    if (state?.refund || state?.status === 'resolved' || (index < own && stands))
      throw new ServiceError('INVALID_STATE', `Exception ${exceptionId} is about the same refund ${transactionId}; nothing was sent.`);
  }
};

/** A refund that is on its way, or has arrived, must not be sent again. Only the gateway's own answer proves that it has failed. */
const refuseStandingRefund = async (
  { payments }: SettlementPorts,
  gateway: PaymentGateway,
  { chargeTransactionId }: Source,
  transactionId: string,
  deadline: Deadline,
): Promise<void> => {
  const shown = await transactionOf(payments, gateway, transactionId, deadline);
  if (shown === 'cannot_tell')
    throw new ServiceError('INVALID_STATE', `The gateway cannot tell whether refund ${transactionId} has failed; nothing was sent. Try again.`);
  if (shown?.op === 'refund' && shown.state === 'declined' && (shown.chargeTransactionId ?? chargeTransactionId) === chargeTransactionId) return;
  throw new ServiceError(
    'INVALID_STATE',
    `The gateway does not show refund ${transactionId} as failed${shown ? `, but as ${shown.state}` : ''}; nothing was sent.`,
  );
};

const gatewayOf = async (
  { register, payments }: SettlementPorts,
  opened: OpenedException,
): Promise<{ account: GatewayAccount; gateway: PaymentGateway }> => {
  const account = (await register.accounts()).find((one) => one.gateway === opened.gateway && one.merchantAccount === opened.merchantAccount);
  const gateway = account && payments.gateways.find(account);
  if (!gateway) throw new ServiceError('GATEWAY_NOT_CONFIGURED', 'The gateway account of this exception is not configured any more.');
  return { account, gateway };
};

/**
 * The line of this sale named no reference of ours, but the sale may still be the charge of a payment. Then it is refused: that payment could still
 * be resolved as succeeded.
 */
const refuseChargeOfPayment = async (
  { register, payments }: SettlementPorts,
  gateway: PaymentGateway,
  account: GatewayAccount,
  transactionId: string,
  deadline: Deadline,
): Promise<void> => {
  await register.caughtUp();
  const shown = await transactionOf(payments, gateway, transactionId, deadline);
  if (shown === 'cannot_tell')
    throw new ServiceError('INVALID_STATE', 'The gateway cannot tell whether this sale is the charge of a payment; nothing was sent.');
  const refs = shown?.ref ? [shown.ref] : [];
  const charge = (await register.transactions(account.gateway, [transactionId], refs)).find(
    ({ op, paymentId }) => op === 'charge' && paymentId !== null,
  );
  if (charge)
    throw new ServiceError(
      'INVALID_STATE',
      `Transaction ${transactionId} is the charge of payment ${charge.paymentId}; nothing was sent. Resolve that payment, or refund it.`,
    );
};

const last4Of = async ({ payments }: SettlementPorts, paymentId: string | null): Promise<string | null> => {
  const payment = paymentId === null ? null : (await payments.streams.load(paymentId)).payment;
  return payment && 'terms' in payment ? payment.terms.paymentMethod.last4 : null;
};

/**
 * Records in the payment's stream that its money goes back. After that the payment cannot be resolved as succeeded. Then finalises the reversal of
 * the leg, so that recovery can never void the same charge.
 */
const requestReturn = async (
  { payments }: SettlementPorts,
  exceptionId: string,
  { leg: name, chargeTransactionId }: ExceptionRefund,
  paymentId: string,
  origin: Origin,
  deadline: Deadline,
): Promise<void> => {
  const { streams, clock, gateways } = payments;
  const { payment } = await retryingConflicts(async () => {
    const loaded = await streams.load(paymentId);
    return streams.execute(loaded, [{ type: 'RequestReturn', at: timestamp(clock.now()), exceptionId }], origin, deadline);
  });
  const leg = 'terms' in payment ? payment.terms.legs.find((one) => one.leg === name) : undefined;
  const gateway = leg && gateways.find(leg.account);
  if (!leg || !gateway) throw new ServiceError('GATEWAY_NOT_CONFIGURED', 'The gateway account that charged this payment is not configured any more.');
  const found = await finalizeReference(payments, gateway, aboutLeg(payment as Awaiting, leg, 'reversal', chargeTransactionId), deadline);
  if (found.kind === 'cannot_tell')
    throw new ServiceError('INVALID_STATE', 'The gateway cannot tell whether the charge was undone; nothing was sent. Try again.');
  if (found.kind === 'executed' && (found.result.kind === 'approved' || found.result.kind === 'unknown'))
    throw new ServiceError('INVALID_STATE', 'The gateway shows the charge as undone; nothing was sent.');
};

type Ended = { readonly outcome: 'refunded' | 'refused' | 'never_executed'; readonly transactionId: string | null };

/** The end of an attempt with this outcome. null: the reference may still be executed, or was finalised by another process. */
const endOf = (outcome: Outcome<ReversalTxn>): Ended | null => {
  if (outcome.kind === 'approved') return { outcome: 'refunded', transactionId: outcome.txn.transactionId };
  if (outcome.kind === 'unknown' || (outcome.kind === 'rejected' && outcome.why === 'finalised')) return null;
  return outcome.kind === 'not_processed' && !outcome.answered ? null : { outcome: 'refused', transactionId: null };
};

/** The end of an attempt whose whole refund is in a batch. null: no batch has it. */
const settledEnd = async ({ register }: SettlementPorts, { account, ref, amountCents }: ExceptionRefund): Promise<Ended | null> => {
  const line = await register.settledRefund(account, ref, amountCents);
  return line && { outcome: 'refunded', transactionId: line.transactionId };
};

/**
 * Asks the gateway about the reference, and records the outcome. If the gateway cannot tell, the refund's line in a batch decides. If there is no
 * such line, the attempt stays open.
 */
const findOutcome = async (
  ports: SettlementPorts,
  exceptionId: string,
  refund: ExceptionRefund & { readonly requestedAt: string },
  origin: Origin,
  deadline: Deadline,
): Promise<void> => {
  const { account, ref, leg, attemptId, by, amountCents, chargeTransactionId, last4, requestedAt: begunAt } = refund;
  const gateway = ports.payments.gateways.find(account);
  const call = { ref, op: 'refund', leg, account, begunAt, amountCents, chargeTransactionId, last4 } as const;
  const found = gateway ? await finalizeReference(ports.payments, gateway, call, deadline) : null;
  const ended =
    found === null || found.kind === 'cannot_tell' || found.kind === 'undone'
      ? await settledEnd(ports, refund)
      : found.kind === 'never'
        ? ({ outcome: 'never_executed', transactionId: null } as const)
        : endOf(found.result);
  if (ended) await changeCase(ports, exceptionId, { type: 'EndRefund', at: timestamp(ports.payments.clock.now()), by, attemptId, ...ended }, origin);
};

/** After the money went back: voids the payment, then resolves the exception. Safe to repeat. Throws {@link GatewayCannotTell}. */
const complete = async (ports: SettlementPorts, exceptionId: string, origin: Origin): Promise<void> => {
  const { store, payments } = ports;
  const { state } = await load(store, EXCEPTION_STREAM, exceptionId);
  if (!state?.refund || state.refund.transactionId === null || state.status === 'resolved') return;
  const { paymentId, reason, by } = state.refund;
  if (paymentId !== null) await voidPayment(ports, paymentId, `refunded for exception ${exceptionId}`, by);
  const at = timestamp(payments.clock.now());
  const resolve = { type: 'Resolve', at, resolution: 'refund', reason, by, portalId: null, feeCents: 0, refunded: true } as const;
  await changeCase(ports, exceptionId, resolve, origin).catch((error: unknown) => {
    // Another process has resolved it meanwhile.
    if (!(error instanceof ServiceError && error.code === 'INVALID_STATE')) throw error;
  });
};

/**
 * Voids the payment if every leg is undone. If another leg still stands, the payment stays unknown, with its task for staff. If the gateway cannot
 * tell about another leg, throws {@link GatewayCannotTell}.
 */
const voidPayment = async ({ payments, register }: SettlementPorts, paymentId: string, evidence: string, by: string): Promise<void> => {
  const { payment } = await payments.streams.load(paymentId);
  if (payment.phase !== 'unknown') return;
  try {
    await resolvePayment(payments, register, { paymentId, as: 'voided', evidence, by, force: false, transactions: {} });
  } catch (error) {
    if (!(error instanceof ServiceError && error.code === 'INVALID_STATE') || error instanceof GatewayCannotTell) throw error;
    payments.log.error(
      { paymentId, err: error },
      'money of an unknown payment went back, but another part of it is not undone; staff decide about it',
    );
  }
};

/** Most refunds of one round. */
const RECOVERED_PER_ROUND = 50;
/** Time limit for one refund. */
const RECOVERY_MS = 40_000;
/** If a refund has not ended its exception after this time, an error is logged. */
const UNKNOWN_FOR_LONG_MS = 3_600_000;

export interface RefundRecovery {
  /** Ends refunds whose command died or got no answer. Sends nothing. Returns the number of exceptions that were looked at. */
  round(stop?: AbortSignal): Promise<number>;
}

/** The pauses between the tries of one refund are those of payments. A new process begins them again. */
export const createRefundRecovery = (ports: SettlementPorts, db: Queryable): RefundRecovery => {
  const { payments, store } = ports;
  const { clock, ids, log } = payments;
  const tried = new Map<string, { readonly tries: number; readonly nextTryAt: number }>();
  const warned = new Set<string>();

  /** True: the exception has ended, or is too young for a try. */
  const recover = async (exceptionId: string): Promise<boolean> => {
    const origin: Origin = { actor: { type: 'recovery', id: 'recovery' }, correlationId: ids.uuid() };
    const stateOf = async () => (await load(store, EXCEPTION_STREAM, exceptionId)).state;
    const refund = (await stateOf())?.refund;
    // A younger refund may still be running.
    if (!refund || ageMs(clock, refund.requestedAt) < RECOVERY_STARTS_AFTER_MS) return true;
    if (refund.transactionId === null) await findOutcome(ports, exceptionId, refund, origin, new Deadline(clock, RECOVERY_MS));
    await complete(ports, exceptionId, origin);
    const after = await stateOf();
    if (!after?.refund || after.status === 'resolved') return true;
    if (ageMs(clock, refund.requestedAt) >= UNKNOWN_FOR_LONG_MS && !warned.has(exceptionId)) {
      warned.add(exceptionId);
      log.error({ exceptionId, ref: refund.ref }, 'the refund of an exception has no end for an hour; recovery goes on');
    }
    return false;
  };

  return {
    round: async (stop) => {
      const now = clock.now();
      const waiting = [...tried].filter(([, { nextTryAt }]) => nextTryAt > now).map(([exceptionId]) => exceptionId);
      const { rows } = await db.query<{ exception_id: string }>(
        `select exception_id from settlement_case where sending and exception_id <> all($2::uuid[]) order by changed_at, exception_id limit $1`,
        [RECOVERED_PER_ROUND, waiting],
      );
      for (const { exception_id: exceptionId } of rows) {
        if (stop?.aborted) break;
        const done = await recover(exceptionId).catch((error: unknown) => {
          log.warn({ exceptionId, err: error }, 'recovery could not end the refund of an exception');
          return false;
        });
        if (done) tried.delete(exceptionId);
        else {
          const tries = (tried.get(exceptionId)?.tries ?? 0) + 1;
          tried.set(exceptionId, { tries, nextTryAt: clock.now() + RECOVERY_SCHEDULE_MS[Math.min(tries, RECOVERY_SCHEDULE_MS.length - 1)]! });
        }
      }
      return rows.length;
    },
  };
};
