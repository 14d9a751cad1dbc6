/**
 * A person resolves an unknown charge (C29, C69). This is the only way from `unknown` to `succeeded`.
 *
 * First the stream is fenced, and the gateway is asked about every leg. If the evidence contradicts the decision, the command is refused. No call has
 * changed anything at the gateway by then, so recovery can still undo the charge.
 *
 * If the evidence agrees, references are finalised. For `succeeded`: those that could still undo the charge. For any other decision: also those that
 * could still make the charge.
 */
import { type Cents, CLOSED, Deadline, ServiceError, timestamp } from '#kernel';
import { aboutLeg, type PaymentPorts } from './charge.js';
import { bounded, GATEWAY_CALL_MS } from './gateway/call.js';
import type { Leg, LookedUp, NamedTransaction, PaymentGateway } from './gateway/gateway.js';
import { type Awaiting, cents, type Charge, isVisible, lacksAmounts, type LegTerms, refuseReturned, statusOf } from './payment.js';
import { paymentView, type PaymentView } from './payment.view.js';
import { finalizeReference } from './reverse.js';
import { refuseClearText, staff } from './staff.js';
import { retryingConflicts } from './stream.js';
import type { Origin } from '#eventstore';

export interface ResolveRequest {
  readonly paymentId: string;
  readonly as: 'succeeded' | 'voided' | 'failed';
  /** The person's reason. It is recorded with the event. */
  readonly evidence: string;
  readonly by: string;
  /**
   * True: resolve the payment even if the gateway cannot tell. A decision that contradicts the gateway's answer is still refused, except for legs
   * that `transactions` names as returned.
   */
  readonly force: boolean;
  /**
   * Transaction ids by leg, from the processor's own records. For `succeeded`: the transactions of the charge, if the gateway cannot tell. For
   * `voided` with `force`: the transactions that returned money which the gateway could not undo. An example is a settled principal whose fee was
   * never charged.
   */
  readonly transactions: Readonly<Partial<Record<Leg, string>>>;
}

/** Time limit for several gateway calls, one after the other. The decision must be appended soon after the stream was read. */
const RESOLVE_MS = 50_000;

/** The evidence about one leg, from the gateway or from a batch that settled the leg. */
type LegEvidence =
  | { readonly shows: 'charged'; readonly transactionId: string; readonly authCode: string; readonly settled?: true }
  | { readonly shows: 'undone' | 'declined' | 'held' | 'never' | 'cannot_tell' };

const AGREES: Readonly<Record<ResolveRequest['as'], readonly LegEvidence['shows'][]>> = {
  succeeded: ['charged'],
  voided: ['undone', 'never'],
  failed: ['declined', 'never', 'undone'],
};
const IN_WORDS: Readonly<Record<LegEvidence['shows'], string>> = {
  charged: 'charged',
  undone: 'charged and undone',
  declined: 'declined',
  held: 'held for review',
  never: 'never charged',
  cannot_tell: 'uncertain',
};

/** Charges that a processor has settled, from the register of settlement. */
export interface SettledCharges {
  /** Resolves as soon as the register includes every event that was in the log before the call. */
  caughtUp(): Promise<void>;
  /** The transaction of each leg that a batch settled while the payment was not known to be charged. */
  settledUnknown(paymentId: string): Promise<Readonly<Partial<Record<Leg, string>>>>;
  /** Cents of each leg that went back to the card by refunds for settlement exceptions (C75). */
  sentBack(paymentId: string): Promise<Readonly<Partial<Record<Leg, Cents>>>>;
}

/** The gateway cannot tell about a leg. Nothing contradicts the decision, and the same call may succeed later. */
export class GatewayCannotTell extends ServiceError {
  constructor(legs: readonly Leg[]) {
    super('INVALID_STATE', `The gateway cannot tell about the ${legs.join(' and the ')} leg; with other proof, resolve it with --force.`);
  }
}

/** Resolves a payment that is pending or unknown. Throws VALIDATION_ERROR, PAYMENT_NOT_FOUND, INVALID_STATE or {@link GatewayCannotTell}. */
export const resolvePayment = async (ports: PaymentPorts, settled: SettledCharges, request: ResolveRequest): Promise<PaymentView> => {
  refuseClearText('evidence', request.evidence);
  const origin = staff(request.by, ports.ids.uuid());
  await settled.caughtUp();
  const { paymentId } = request;
  return retryingConflicts(async () =>
    resolveOnce(ports, request, await settled.settledUnknown(paymentId), await settled.sentBack(paymentId), origin),
  );
};

/**
 * `settled`: the transactions of legs that a batch has settled. They count even if the gateway cannot tell. `sentBack`: the cents of
 * each leg that refunds for exceptions returned. A leg whose whole amount went back counts as undone.
 */
const resolveOnce = async (
  ports: PaymentPorts,
  request: ResolveRequest,
  settled: ResolveRequest['transactions'],
  sentBack: Readonly<Partial<Record<Leg, Cents>>>,
  origin: Origin,
): Promise<PaymentView> => {
  const { clock, streams, ids, log } = ports;
  const { paymentId, as, evidence, by, force } = request;
  const at = () => timestamp(clock.now());
  const deadline = new Deadline(clock, RESOLVE_MS);
  let loaded = await streams.load(paymentId);
  if (!isVisible(loaded.payment)) throw new ServiceError('PAYMENT_NOT_FOUND', 'Payment not found.');
  if (loaded.payment.phase !== 'pending' && loaded.payment.phase !== 'unknown')
    throw new ServiceError('INVALID_STATE', `The payment is ${statusOf(loaded.payment)}: only one with an unknown outcome can be resolved.`);
  refuseReturned(loaded.payment, as);
  if (as === 'succeeded' && lacksAmounts(loaded.payment))
    throw new ServiceError(
      'INVALID_STATE',
      'The log has lost the amounts of this payment. Return the money at the processor, then resolve it as voided with --force and --transaction.',
    );
  loaded = await streams.execute(loaded, [{ type: 'StartReconciliation', at: at(), attemptId: loaded.payment.attemptId }], origin, deadline);
  const asked = loaded.payment as Awaiting;
  const { terms } = asked;

  const returned = (leg: Leg) => as === 'voided' && force && request.transactions[leg] !== undefined;
  const found: { terms: LegTerms; evidence: LegEvidence }[] = [];
  for (const leg of terms.legs)
    found.push({
      terms: leg,
      evidence:
        cents(leg) > 0 && (sentBack[leg.leg] ?? 0) >= cents(leg)
          ? { shows: 'undone' }
          : evidenceOf(await lookup(ports, asked, leg, deadline), settled[leg.leg]),
    });
  for (const { terms: leg, evidence: shown } of found) if (!(shown.shows === 'charged' && returned(leg.leg))) refuseContradiction(as, leg, shown);
  if (as === 'failed' && found.every(({ evidence: shown }) => shown.shows === 'undone'))
    throw new ServiceError('INVALID_STATE', 'The gateway shows the charge as made and undone; resolve it as voided.');
  const uncertain = found.filter(({ evidence: shown }) => shown.shows === 'cannot_tell').map(({ terms: { leg } }) => leg);
  refuseUncertain(uncertain, force);
  const unchecked = await refuseOtherTransactions(ports, request, found, deadline);
  const charge = as === 'succeeded' ? chargeOf(found, request.transactions, ids.confirmationNumber()) : null;

  for (const { terms: leg, evidence: shown } of found)
    if (!returned(leg.leg) && !(await promised(ports, asked, leg, request, shown, deadline))) uncertain.push(leg.leg);
  refuseUncertain(uncertain, force);
  const taken = found.filter(({ terms: { leg }, evidence: shown }) => shown.shows === 'charged' && returned(leg)).map(({ terms: { leg } }) => leg);
  const forced = uncertain.length + taken.length > 0;
  if (forced)
    log.error(
      { paymentId, as, by, legs: [...new Set([...uncertain, ...taken])] },
      'an unknown payment is resolved by force, without word of the gateway',
    );

  const said = [
    ...taken.map((leg) => `${leg} returned by ${request.transactions[leg]}`),
    ...unchecked.map((leg) => `${request.transactions[leg]} was not checked at the gateway`),
  ];
  const command = { type: 'Resolve', at: at(), as, charge, evidence: [evidence, ...said].join('; '), by, forced } as const;
  const { payment } = await streams.execute(loaded, [command], origin, deadline);
  if (!isVisible(payment)) throw new Error('a resolved payment is visible');
  // Staff see no personal data here.
  return paymentView(paymentId, payment, CLOSED);
};

const refuseContradiction = (as: ResolveRequest['as'], { leg }: LegTerms, evidence: LegEvidence): void => {
  const { shows } = evidence;
  if (shows === 'held')
    throw new ServiceError(
      'INVALID_STATE',
      `The gateway holds the charge of the ${leg} leg for review; the payment cannot be resolved as ${as}. Recovery voids such a charge; if it cannot, decline the charge at the processor first.`,
    );
  if (shows === 'charged' && evidence.settled && !AGREES[as].includes(shows))
    throw new ServiceError(
      'INVALID_STATE',
      `A batch has settled the ${leg} leg (${evidence.transactionId}); the payment cannot be resolved as ${as} unless that money was returned: name the transaction that did.`,
    );
  if (shows !== 'cannot_tell' && !AGREES[as].includes(shows))
    throw new ServiceError('INVALID_STATE', `The gateway shows the ${leg} leg as ${IN_WORDS[shows]}; the payment cannot be resolved as ${as}.`);
};

/**
 * Refuses a named transaction that is not the one of its leg, also with `force` (C75). `force` covers only a gateway that cannot be asked. Returns the
 * legs whose transaction it therefore could not check.
 */
const refuseOtherTransactions = async (
  ports: PaymentPorts,
  { as, transactions }: ResolveRequest,
  found: readonly { terms: LegTerms; evidence: LegEvidence }[],
  deadline: Deadline,
): Promise<Leg[]> => {
  const named = Object.entries(transactions) as [Leg, string][];
  if (named.length > 0 && as === 'failed') throw new ServiceError('VALIDATION_ERROR', 'A payment that failed has no transaction; name none.');
  const unchecked: Leg[] = [];
  for (const [name, transactionId] of named) {
    const leg = found.find(({ terms: { leg: one } }) => one === name);
    if (!leg)
      throw new ServiceError('VALIDATION_ERROR', `The payment has no ${name} leg; it has: ${found.map(({ terms }) => terms.leg).join(', ')}.`);
    const refuse = (what: string) => new ServiceError('INVALID_STATE', `Transaction ${transactionId} ${what}; nothing was decided.`);
    const { terms, evidence } = leg;
    if (as === 'succeeded' && evidence.shows === 'charged' && evidence.transactionId !== transactionId)
      throw refuse(`is not the charge of the ${name} leg, which is ${evidence.transactionId}`);
    const known = await transactionOf(ports, ports.gateways.find(terms.account), transactionId, deadline);
    if (known === 'cannot_tell') unchecked.push(name);
    else if (known === null) throw refuse('is unknown to the gateway');
    else {
      const op = as === 'succeeded' ? 'charge' : 'refund';
      if (known.op !== op) throw refuse(`is a ${known.op}, not a ${op}`);
      const amountCents = cents(terms);
      if (amountCents > 0 && known.amountCents !== amountCents) throw refuse(`has ${known.amountCents} cents, the ${name} leg has ${amountCents}`);
      if (op === 'charge' && known.ref !== terms.references.charge)
        throw refuse(`belongs to another payment or leg than the ${name} leg of this one`);
      if (op === 'refund' && !(await returns(ports, terms, evidence, known.chargeTransactionId, deadline)))
        throw refuse(`returns another charge than the ${name} leg of this payment`);
      if (known.state === 'declined' || known.state === 'voided' || known.state === 'settlement_rejected')
        throw refuse(`moved no money: the gateway shows it as ${known.state}`);
    }
  }
  return unchecked;
};

/** True if this charge is the leg's. If the gateway could not tell about the leg by its reference, it is asked about the charge by its id. */
const returns = async (
  ports: PaymentPorts,
  terms: LegTerms,
  evidence: LegEvidence,
  chargeTransactionId: string | null,
  deadline: Deadline,
): Promise<boolean> => {
  if (chargeTransactionId === null) return false;
  if (evidence.shows === 'charged') return evidence.transactionId === chargeTransactionId;
  const charge = await transactionOf(ports, ports.gateways.find(terms.account), chargeTransactionId, deadline);
  return charge !== null && charge !== 'cannot_tell' && charge.ref === terms.references.charge;
};

/** Asks the gateway about a transaction by its own id. null: the gateway knows none. */
export const transactionOf = async (
  { clock }: Pick<PaymentPorts, 'clock'>,
  gateway: PaymentGateway | null,
  transactionId: string,
  deadline: Deadline,
): Promise<NamedTransaction | null | 'cannot_tell'> => {
  if (!gateway?.transaction) return 'cannot_tell';
  const ask = gateway.transaction.bind(gateway);
  return bounded<NamedTransaction | null | 'cannot_tell'>(
    clock,
    Math.max(1, Math.min(GATEWAY_CALL_MS, deadline.leftMs)),
    (signal) => ask(transactionId, signal).catch(() => 'cannot_tell' as const),
    () => 'cannot_tell',
  );
};

const refuseUncertain = (legs: readonly Leg[], force: boolean): void => {
  if (legs.length > 0 && !force) throw new GatewayCannotTell(legs);
};

/**
 * Makes the gateway promise that the decision stays true for a leg. false: there is no such promise. Throws INVALID_STATE if the leg was charged or
 * undone since the lookup.
 */
const promised = async (
  ports: PaymentPorts,
  payment: Awaiting,
  leg: LegTerms,
  { as, transactions }: ResolveRequest,
  evidence: LegEvidence,
  deadline: Deadline,
): Promise<boolean> => {
  const { shows } = evidence;
  // If the gateway cannot tell, staff have named the charge. Without it, a gateway that closes no references promises nothing about the reversal.
  const named = as === 'succeeded' ? (transactions[leg.leg] ?? null) : null;
  const transactionId = evidence.shows === 'charged' ? evidence.transactionId : named;
  const gateway = ports.gateways.find(leg.account);
  if (!gateway) return false;
  if (as !== 'succeeded') {
    const charge = await finalizeReference(ports, gateway, aboutLeg(payment, leg, 'charge'), deadline);
    if (charge.kind === 'cannot_tell') return shows === 'undone' || shows === 'declined';
    if (charge.kind === 'executed' && charge.result.kind === 'approved' && shows === 'never')
      refuseContradiction(as, leg, { shows: 'charged', ...charge.result.txn, authCode: '' });
    if (charge.kind === 'executed' && charge.result.kind === 'held' && shows !== 'undone') refuseContradiction(as, leg, { shows: 'held' });
    if (shows === 'undone') return true;
  }
  const reversal = await finalizeReference(ports, gateway, aboutLeg(payment, leg, 'reversal', transactionId), deadline);
  if (reversal.kind === 'executed' && reversal.result.kind === 'approved') refuseContradiction(as, leg, { shows: 'undone' });
  return reversal.kind !== 'cannot_tell';
};

const lookup = async ({ clock, gateways }: PaymentPorts, payment: Awaiting, leg: LegTerms, deadline: Deadline) => {
  const cannotTell = { found: 'cannot_tell' } as const;
  const gateway = gateways.find(leg.account);
  if (!gateway) return cannotTell;
  return bounded<LookedUp | { readonly found: 'cannot_tell' }>(
    clock,
    Math.max(1, Math.min(GATEWAY_CALL_MS, deadline.leftMs)),
    (signal) => gateway.lookup(aboutLeg(payment, leg, 'charge'), signal).catch(() => cannotTell),
    () => cannotTell,
  );
};

/**
 * A leg in a settled batch was charged, even if the gateway cannot tell or no longer knows the charge. Only the gateway knows whether the charge was
 * undone.
 */
const evidenceOf = (found: Parameters<typeof lookedUp>[0], settled: string | undefined): LegEvidence => {
  const shown = lookedUp(found);
  if (settled === undefined || shown.shows === 'charged' || shown.shows === 'undone') return shown;
  return { shows: 'charged', transactionId: settled, authCode: '', settled: true };
};

const lookedUp = (found: LookedUp | { readonly found: 'cannot_tell' }): LegEvidence => {
  if (found.found === 'cannot_tell') return { shows: 'cannot_tell' };
  if (!found.found) return { shows: 'never' };
  const { state, transactionId, authCode = '' } = found;
  switch (state) {
    case 'declined':
      return { shows: 'declined' };
    case 'voided':
      return { shows: 'undone' };
    case 'held':
      return { shows: 'held' };
    default:
      return { shows: 'charged', transactionId, authCode };
  }
};

const chargeOf = (
  found: readonly { terms: LegTerms; evidence: LegEvidence }[],
  given: ResolveRequest['transactions'],
  confirmationNumber: string,
): Charge => ({
  confirmationNumber,
  legs: found.map(({ terms: { leg }, evidence }) => {
    if (evidence.shows === 'charged') return { leg, transactionId: evidence.transactionId, authCode: evidence.authCode, avs: null, cvv: null };
    const transactionId = given[leg];
    if (transactionId === undefined)
      throw new ServiceError('VALIDATION_ERROR', `The gateway cannot name the transaction of the ${leg} leg; give it with --transaction ${leg}=ID.`);
    return { leg, transactionId, authCode: '', avs: null, cvv: null };
  }),
});
