/**
 * Returns that were made at the processor's own page (C75). They are found in the feed, or by a refused call (libs/payments/reverse.ts). Staff then
 * adopt or dismiss them. Until then, the payment refuses refunds and voids.
 *
 * A transaction counts once. Its line in a batch lies in suspense, as an exception of its own. So the adoption first settles that exception, which then
 * can book nothing else, and only then records the return in the payment's stream. Every step can be repeated.
 */
import { load, type Origin } from '#eventstore';
import { Deadline, ServiceError, timestamp } from '#kernel';
import {
  type AdoptReturn,
  attemptOf,
  cents,
  type Charged,
  elsewhereOf,
  type ElsewhereReturn,
  gatewayRef,
  keyForPayment,
  type Leg,
  type NamedTransaction,
  payment as decider,
  type PaymentCommand,
  type PaymentGateway,
  reasonContext,
  type GatewayAccount,
  REQUEST_DEADLINE_MS,
  retryingConflicts,
  transactionOf,
  unreturned,
} from '#payments';
import { hashedUuid } from '#platform';
import { changeCase } from './case.js';
import { EXCEPTION_STREAM } from './events.js';
import { type ExceptionKind, isEnded, type Resolution } from './exception.js';
import type { SettlementPorts } from './record.js';

/** A charge that is in no batch after a day was voided, or its batch is late. */
const IN_A_BATCH_AFTER_MS = 86_400_000;
/** Look-ups of one round of an account: of charges and of refunds each. The next round goes on. */
const LOOKED_UP = 50;
const LOOK_UP_MS = 60_000;
/** The kinds of a line whose refund is not known here. */
export const LINE_KINDS: readonly ExceptionKind[] = ['MISSING_HERE', 'STATUS_MISMATCH'];

/** Asks the gateway about charges that are in no batch, and about refunds that no payment here has. Notes the money that went back elsewhere. */
export const findReturns = async ({ payments, register }: SettlementPorts, account: GatewayAccount, gateway: PaymentGateway): Promise<void> => {
  const { clock, streams } = payments;
  const deadline = new Deadline(clock, LOOK_UP_MS);
  for (const { transactionId, charge } of await register.unexplained(account, timestamp(clock.now() - IN_A_BATCH_AFTER_MS), LOOKED_UP)) {
    // A gateway without voids lists the refund.
    if (charge && gateway.capabilities.voids === 'none') continue;
    const shown = await transactionOf(payments, gateway, transactionId, deadline);
    if (shown === null || shown === 'cannot_tell') continue;
    const at = charge ? (shown.state === 'voided' ? charge : null) : await chargeOf({ register }, account, shown);
    if (!at) continue;
    const returnId = hashedUuid('returned-elsewhere', account.gateway, account.merchantAccount, transactionId);
    const note = { type: 'NoteReturn', at: timestamp(clock.now()), returnId, leg: at.leg, transactionId } as const;
    // Read after the look-up: a return of our own is then open or recorded, and nothing is noted.
    await retryingConflicts(async () => streams.execute(await streams.load(at.paymentId), [note], SYSTEM, new Deadline(clock, REQUEST_DEADLINE_MS)));
  }
};

const SYSTEM: Origin = { actor: { type: 'system', id: 'settlement' }, correlationId: 'settlement' };

/** The leg whose money a refund returned, if no call of ours made that refund. null: there is none. */
const chargeOf = async (
  { register }: Pick<SettlementPorts, 'register'>,
  account: GatewayAccount,
  refund: NamedTransaction,
): Promise<{ readonly paymentId: string; readonly leg: Leg } | null> => {
  if (whyNoReturn(refund) !== null || refund.chargeTransactionId === null) return null;
  const found = await register.transactions(account.gateway, [refund.chargeTransactionId], []);
  const charge = found.find(({ op, merchantAccount }) => op === 'charge' && merchantAccount === account.merchantAccount);
  return charge && charge.paymentId !== null ? { paymentId: charge.paymentId, leg: charge.leg } : null;
};

/** Why a transaction is not a return that was made elsewhere. null: it is one. */
const whyNoReturn = ({ op, ref, state }: NamedTransaction): string | null => {
  if (op !== 'refund') return `is a ${op}, not a refund`;
  if (ref !== null) return 'carries a reference of ours';
  return ['declined', 'voided', 'settlement_rejected', 'held'].includes(state) ? `moved no money: the gateway shows it as ${state}` : null;
};

interface Decision {
  readonly resolution: Resolution;
  readonly reason: string;
  readonly by: string;
  readonly portalId: string | null;
  readonly feeCents: number;
  readonly transactionId?: string | null;
}

/** Ends a RETURNED_ELSEWHERE: `adopt` records the return, `no_posting` dismisses it. false: the exception is of another kind. */
export const decideElsewhere = async (ports: SettlementPorts, exceptionId: string, decision: Decision, origin: Origin): Promise<boolean> => {
  const { payments, store } = ports;
  const { resolution, reason, by, portalId, feeCents } = decision;
  const { state } = await load(store, EXCEPTION_STREAM, exceptionId);
  // The decider of the exception refuses these.
  if (state?.opened.kind !== 'RETURNED_ELSEWHERE' || isEnded(state.status) || (resolution !== 'adopt' && resolution !== 'no_posting')) return false;
  if (portalId !== null || feeCents !== 0)
    throw new ServiceError('VALIDATION_ERROR', 'The payment names the agency and the fee of this return: give no portal and no fee.');
  const paymentId = state.opened.paymentId!;
  const { payment } = await payments.streams.load(paymentId);
  if (payment.phase !== 'charged') throw new Error(`${paymentId}: a return of a payment that is not charged`);
  const at = timestamp(payments.clock.now());
  const execute = (command: PaymentCommand) =>
    retryingConflicts(async () =>
      payments.streams.execute(await payments.streams.load(paymentId), [command], origin, new Deadline(payments.clock, REQUEST_DEADLINE_MS)),
    );
  if (resolution === 'no_posting') {
    // An adoption died half way, or staff settled the line by hand. Without the adoption, the books would wait for this money for ever.
    for (const found of elsewhereOf(payment).filter(({ returnId }) => returnId === exceptionId))
      if ((await linesOf(ports, payment, found)).some((line) => line.resolution === 'settles'))
        throw new ServiceError('INVALID_STATE', 'Its line in a batch is settled with this return already: adopt it.');
    await execute({ type: 'DismissReturn', at, returnId: exceptionId });
  }
  // A command that died after its append is repeated here.
  else if (!attemptOf(payment, exceptionId)) {
    const shown = await shownReturns(ports, payment, exceptionId, decision.transactionId ?? null);
    const references = (leg: Leg) => ({ void: gatewayRef(exceptionId, leg, 'void'), refund: gatewayRef(exceptionId, leg, 'refund') });
    const adopt: AdoptReturn = { type: 'AdoptReturn', at, returnId: exceptionId, ...shown, personal: null, references };
    // Refuse before anything changes. The append decides again.
    decider.decide(payment, adopt);
    if (shown.means === 'refund')
      for (const one of shown.returns) {
        // If this command dies, a dismissal must know the transaction.
        await execute({ type: 'NoteReturn', at, returnId: exceptionId, leg: one.leg, transactionId: one.transactionId });
        await settleLines(ports, payment, paymentId, one, origin);
      }
    const key = await keyForPayment(payments, payment);
    await execute({ ...adopt, personal: key.seal({ reason }, reasonContext(paymentId, exceptionId)) });
  }
  const recorded = resolution === 'adopt' ? { recorded: true as const, portalId: payment.terms.portalId } : { portalId };
  await endCase(ports, exceptionId, { type: 'Resolve', at, resolution, reason, by, feeCents, ...recorded }, origin);
  return true;
};

/** Resolves an exception, if nothing else has ended it meanwhile. */
const endCase = async (ports: SettlementPorts, exceptionId: string, command: Parameters<typeof changeCase>[2], origin: Origin): Promise<void> => {
  await changeCase(ports, exceptionId, command, origin).catch(async (error: unknown) => {
    const { state } = await load(ports.store, EXCEPTION_STREAM, exceptionId);
    if (!(error instanceof ServiceError) || !state || !isEnded(state.status)) throw error;
  });
};

/** The money in suspense of a refund line belongs to the refund that the payment records. */
export const settleLineOf = (ports: SettlementPorts, exceptionId: string, paymentId: string, origin: Origin): Promise<void> => {
  const at = timestamp(ports.payments.clock.now());
  const reason = `adopted as a return of payment ${paymentId}`;
  const command = { type: 'Resolve', at, resolution: 'settles', reason, by: origin.actor.id, portalId: null, feeCents: 0 } as const;
  return endCase(ports, exceptionId, command, origin);
};

interface Shown {
  readonly leg: Leg;
  readonly amountCents: number;
  readonly transactionId: string;
  readonly pending?: true | undefined;
}

/** The exceptions of the lines of a refund. A line without an exception gets one that {@link closeAdopted} ends. */
const linesOf = async (
  { register, store }: SettlementPorts,
  { legs }: Charged,
  { leg: name, transactionId }: Pick<ElsewhereReturn, 'leg' | 'transactionId'>,
) => {
  const charge = legs.find(({ leg }) => leg === name)!;
  const isRefund = transactionId !== null && transactionId !== charge.transactionId;
  const lines = isRefund ? await register.exceptionsOf(charge.account, transactionId, LINE_KINDS) : [];
  const states = await Promise.all(lines.map(async (line) => ({ ...line, ...(await load(store, EXCEPTION_STREAM, line.exceptionId)).state })));
  return states.filter(({ opened, superseded }) => opened && !superseded);
};

/** Settles the lines of a refund, so that nothing else can book their money. Throws INVALID_STATE if it is booked already. */
const settleLines = async (ports: SettlementPorts, payment: Charged, paymentId: string, refund: Shown, origin: Origin): Promise<void> => {
  for (const { exceptionId } of await linesOf(ports, payment, refund)) await settleLineOf(ports, exceptionId, paymentId, origin);
  const other = (await linesOf(ports, payment, refund)).find(({ status, resolution }) => status === 'resolved' && resolution !== 'settles');
  if (other)
    throw new ServiceError(
      'INVALID_STATE',
      `Transaction ${refund.transactionId} was resolved with exception ${other.exceptionId}; nothing was decided.`,
    );
};

/** What the gateway shows of the return. Throws INVALID_STATE if it is not one that was made elsewhere, or if the gateway cannot tell. */
const shownReturns = async (
  { payments, register }: SettlementPorts,
  payment: Charged,
  returnId: string,
  named: string | null,
): Promise<Pick<AdoptReturn, 'means' | 'returns'>> => {
  const deadline = new Deadline(payments.clock, REQUEST_DEADLINE_MS);
  const refuse = (what: string) => new ServiceError('INVALID_STATE', `${what}; nothing was decided.`);
  const found = elsewhereOf(payment).find((one) => one.returnId === returnId);
  const leg = payment.legs.find((one) => one.leg === found?.leg);
  if (!found || !leg) throw refuse('The payment has no such return');
  const ask = async (account: GatewayAccount, transactionId: string) => {
    const gateway = payments.gateways.find(account);
    const shown = await transactionOf(payments, gateway, transactionId, deadline);
    if (shown === 'cannot_tell') throw refuse(`The gateway cannot tell about transaction ${transactionId} now: try again later`);
    if (shown === null) throw refuse(`Transaction ${transactionId} is unknown to the gateway: look its id up at the processor`);
    return { shown, mayVoid: gateway!.capabilities.voids !== 'none' };
  };
  if (named !== null && found.transactionId !== null && named !== found.transactionId)
    throw refuse(`The exception is of transaction ${found.transactionId}`);
  const transactionId = named ?? found.transactionId ?? leg.transactionId;
  const { shown, mayVoid } = await ask(leg.account, transactionId);
  if (transactionId !== leg.transactionId) {
    const why = whyNoReturn(shown) ?? (shown.chargeTransactionId === leg.transactionId ? null : `returns another charge than the ${leg.leg} leg`);
    if (why !== null) throw refuse(`Transaction ${transactionId} ${why}`);
    await register.caughtUp();
    if ((await register.transactions(leg.account.gateway, [transactionId], [])).length > 0)
      throw refuse(`Transaction ${transactionId} is recorded already`);
    return { means: 'refund', returns: [{ leg: leg.leg, amountCents: shown.amountCents, transactionId, pending: shown.pending }] };
  }
  if (!mayVoid || shown.state !== 'voided')
    throw refuse(`The gateway shows the charge ${transactionId} as ${shown.state}: name the refund that was made of it (--transaction)`);
  // Each leg is a charge of its own. Those that were voided together are adopted together.
  const returns: Shown[] = [];
  for (const one of payment.legs) {
    const amountCents = cents(unreturned(one));
    if (amountCents > 0 && (one === leg || (await ask(one.account, one.transactionId)).shown.state === 'voided'))
      returns.push({ leg: one.leg, amountCents, transactionId: one.transactionId });
  }
  return { means: 'void', returns };
};
