/**
 * Resolving an unknown charge by a person (C29, C69): the one way from `unknown` to `succeeded`. The stream is fenced, the reference under which recovery would
 * undo the charge is finalised, and the gateway is asked about every leg; evidence that contradicts the decision refuses it.
 */
import { Deadline, ServiceError, timestamp } from '#kernel';
import type { PaymentPorts } from './charge.js';
import { bounded, GATEWAY_CALL_MS } from './gateway/call.js';
import type { Leg, LookedUp, PaymentGateway } from './gateway/gateway.js';
import { type Awaiting, type Charge, isVisible, type LegTerms, statusOf } from './payment.js';
import { paymentView, type PaymentView } from './payment.view.js';
import { finalizeReference } from './reverse.js';
import { refuseStaffText, staff } from './staff.js';
import { type Owner, retryingConflicts } from './stream.js';

export interface ResolveRequest {
  readonly paymentId: string;
  readonly as: 'succeeded' | 'voided' | 'failed';
  /** Why the person is sure; for the record. */
  readonly evidence: string;
  readonly by: string;
  /** Decides although the gateway cannot be asked, or cannot tell. Never against what it shows. */
  readonly force: boolean;
  /** Transactions of the charge by leg, from the processor's own records: needed where the gateway cannot tell of a charge that succeeded. */
  readonly transactions: Readonly<Partial<Record<Leg, string>>>;
}

/** Several gateway calls, one after the other. */
const RESOLVE_MS = 60_000;

/** What the gateway shows of one leg. */
type LegEvidence =
  | { readonly shows: 'charged'; readonly transactionId: string; readonly authCode: string }
  | { readonly shows: 'undone' | 'declined' | 'never' | 'cannot_tell' };

const AGREES: Readonly<Record<ResolveRequest['as'], readonly LegEvidence['shows'][]>> = {
  succeeded: ['charged'],
  voided: ['undone', 'never'],
  failed: ['declined', 'never', 'undone'],
};
const IN_WORDS: Readonly<Record<LegEvidence['shows'], string>> = {
  charged: 'charged',
  undone: 'charged and undone',
  declined: 'declined',
  never: 'never charged',
  cannot_tell: 'uncertain',
};

/** Resolves a payment that is pending or unknown. Refuses with VALIDATION_ERROR, PAYMENT_NOT_FOUND, INVALID_STATE. */
export const resolvePayment = async (ports: PaymentPorts, request: ResolveRequest): Promise<PaymentView> => {
  refuseStaffText('evidence', request.evidence);
  const owner = staff(request.by, ports.ids.uuid());
  return retryingConflicts(() => resolveOnce(ports, request, owner));
};

const resolveOnce = async (ports: PaymentPorts, request: ResolveRequest, owner: Owner): Promise<PaymentView> => {
  const { clock, streams, ids, log } = ports;
  const { paymentId, as, evidence, by, force } = request;
  const at = () => timestamp(clock.now());
  const deadline = new Deadline(clock, RESOLVE_MS);
  let loaded = await streams.load(paymentId);
  if (!isVisible(loaded.payment)) throw new ServiceError('PAYMENT_NOT_FOUND', 'Payment not found.');
  if (loaded.payment.phase !== 'pending' && loaded.payment.phase !== 'unknown')
    throw new ServiceError('INVALID_STATE', `The payment is ${statusOf(loaded.payment)}: only one with an unknown outcome can be resolved.`);
  loaded = await streams.execute(loaded, [{ type: 'StartReconciliation', at: at(), attemptId: loaded.payment.attemptId }], owner, deadline);
  const { terms } = loaded.payment as Awaiting;

  const found: { terms: LegTerms; evidence: LegEvidence }[] = [];
  for (const leg of terms.legs) found.push({ terms: leg, evidence: await legEvidence(ports, leg, as, deadline) });
  for (const { terms: leg, evidence: shown } of found)
    if (shown.shows !== 'cannot_tell' && !AGREES[as].includes(shown.shows))
      throw new ServiceError(
        'INVALID_STATE',
        `The gateway shows the ${leg.leg} leg as ${IN_WORDS[shown.shows]}; the payment cannot be resolved as ${as}.`,
      );
  if (as === 'failed' && found.every(({ evidence: shown }) => shown.shows === 'undone'))
    throw new ServiceError('INVALID_STATE', 'The gateway shows the charge as made and undone; resolve it as voided.');
  const uncertain = found.filter(({ evidence: shown }) => shown.shows === 'cannot_tell').map(({ terms: { leg } }) => leg);
  if (uncertain.length > 0) {
    if (!force)
      throw new ServiceError(
        'INVALID_STATE',
        `The gateway cannot tell about the ${uncertain.join(' and the ')} leg; with other proof, resolve it with --force.`,
      );
    log.error({ paymentId, as, by, legs: uncertain }, 'an unknown payment is resolved by force, without word of the gateway');
  }

  const charge = as === 'succeeded' ? chargeOf(found, request.transactions, ids.confirmationNumber()) : null;
  const command = { type: 'Resolve', at: at(), as, charge, evidence, by, forced: uncertain.length > 0 } as const;
  const { payment } = await streams.execute(loaded, [command], owner, deadline);
  if (!isVisible(payment)) throw new Error('a resolved payment is visible');
  return paymentView(paymentId, payment);
};

/**
 * Looks one leg up. A decision against the charge finalises its reference, so that it can never be executed after; a decision for it finalises the reference
 * that would undo it.
 */
const legEvidence = async (ports: PaymentPorts, leg: LegTerms, as: ResolveRequest['as'], deadline: Deadline): Promise<LegEvidence> => {
  const gateway = ports.gateways.find(leg.account);
  if (!gateway) return { shows: 'cannot_tell' };
  const { account, references } = leg;
  const reversal = await finalizeReference(ports, gateway, { ref: references.reversal, account, op: 'reversal' }, deadline);
  if (reversal.kind === 'cannot_tell') return { shows: 'cannot_tell' };
  if (reversal.kind === 'executed' && reversal.result.kind === 'approved') return { shows: 'undone' };
  if (as === 'succeeded') return lookedUp(await lookup(ports, gateway, leg, deadline));

  const charge = await finalizeReference(ports, gateway, { ref: references.charge, account, op: 'charge' }, deadline);
  if (charge.kind === 'cannot_tell') return { shows: 'cannot_tell' };
  if (charge.kind === 'never') return { shows: 'never' };
  switch (charge.result.kind) {
    case 'approved': {
      // Executed once; whether it stands only the look-up shows.
      const now = lookedUp(await lookup(ports, gateway, leg, deadline));
      return now.shows === 'never' ? { shows: 'cannot_tell' } : now;
    }
    case 'declined':
      return { shows: 'declined' };
    case 'unknown':
      return { shows: 'cannot_tell' };
    default:
      return { shows: 'never' };
  }
};

const lookup = ({ clock }: PaymentPorts, gateway: PaymentGateway, { account, references }: LegTerms, deadline: Deadline) => {
  const cannotTell = { found: 'cannot_tell' } as const;
  return bounded<LookedUp | { readonly found: 'cannot_tell' }>(
    clock,
    Math.max(1, Math.min(GATEWAY_CALL_MS, deadline.leftMs)),
    (signal) => gateway.lookup({ ref: references.charge, account, op: 'charge' }, signal).catch(() => cannotTell),
    () => cannotTell,
  );
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
