/** Actions of partners and staff on payments. An action that moves money runs once for each key (C12–C20). */
import { ageMs, canonicalJson, type Cents, Deadline, fold, isCents, isUuid, MAX_AMOUNT_CENTS, ServiceError } from '#kernel';
import type { Logger } from '#platform';
import { charge, chargeAnswer, type ChargeRequest, type PaymentPorts, reconciliationRequired } from './charge.js';
import { serviceFee } from './fee.js';
import { REQUEST_DEADLINE_MS } from './gateway/call.js';
import type { Claims } from './keys/claims.js';
import type { IdempotencyStore, Operation, RequestText } from './keys/key-store.js';
import { type AnswerEncoder, type Answered, type KeyedWork, onceByKey, type Result, storeIncident } from './keys/once-by-key.js';
import type { PaymentListPorts, PaymentRow } from './list.js';
import { isVisible, openOf, payment as decider, type Payment, type PaymentEvent } from './payment.js';
import { type PaymentView, paymentView, type ReversalView } from './payment.view.js';
import { type Recovery, RECOVERY_STARTS_AFTER_MS } from './recovery.js';
import { reverse, type ReverseRequest } from './reverse.js';
import { refuseStaffText, staff } from './staff.js';
import { paymentEvents } from './stream.js';
import { type Origin, StoreIncident } from '#eventstore';

/** Dependencies of these functions. The process that composes them provides it. */
export interface PaymentServices {
  readonly ports: PaymentPorts;
  readonly idempotency: IdempotencyStore;
  readonly claims: Claims;
  /** One encoding for every process: a worker stores an answer for a key, and the API replays it. */
  readonly answers: AnswerEncoder;
  readonly list: PaymentListPorts;
  readonly recovery: Recovery;
  readonly log: Logger;
}

/** How a request arrived: its key, the text that the key is bound to, and the correlation id of its events. */
export interface Received extends RequestText {
  readonly idempotencyKey: string | null;
  readonly requestId: string;
}

/** Charges at most once per key. */
export const chargeOnce = (services: PaymentServices, request: ChargeRequest, received: Received): Promise<Answered<PaymentView>> => {
  const { ports } = services;
  const origin = partner(request.accountId, received);
  const deadline = new Deadline(ports.clock, REQUEST_DEADLINE_MS);
  return keyed(services, request.accountId, 'create', received, {
    run: async (owned) => {
      const attempt = owned ?? { paymentId: ports.ids.uuid(), attemptId: ports.ids.uuid() };
      const idempotency = owned?.recorded ?? null;
      return { view: await charge(ports, request, { ...attempt, idempotency }, origin, deadline), replayed: false };
    },
    takeOver: (owned) => finishCreate(ports, owned, request.accountId, origin, deadline),
    reconciliationRequired: async (paymentId) => {
      // If the log cannot be read now, nothing is known about the payment. The answer asks the caller to read it.
      const { payment } = await ports.streams.load(paymentId).catch(() => ({ payment: null }));
      if (payment?.phase !== 'none') return reconciliationRequired(paymentId, payment);
      // The stream may be lost. "Nothing was charged" is said only of a log that is whole.
      return (await mayBeLost(ports).catch(() => true)) || ports.ownLog.incident ? storeIncident() : reconciliationRequired(paymentId, payment);
    },
  });
};

/**
 * Finishes the key of a create whose owner vanished (T7). If the outcome is recorded, the result is made again from the events up to it. Else the
 * stream is fenced, so that the owner can never begin or finish, and the key stays reserved.
 */
export const finishCreate = async (
  ports: PaymentPorts,
  { paymentId, attemptId }: { paymentId: string; attemptId: string },
  accountId: string,
  origin: Origin,
  deadline: Deadline,
): Promise<Result<PaymentView> | 'reserved'> => {
  const recorded = await ports.streams.events(paymentId);
  const events = recorded.map(paymentEvents.read);
  const found = createResult(paymentId, events);
  if (found) return found;
  const loaded = { paymentId, payment: fold(decider, events), revision: recorded.at(-1)?.revision ?? null };
  const at = new Date(ports.clock.now()).toISOString();
  if (loaded.revision === null) {
    // An absent stream may be a lost one.
    await ports.ownLog.verified(null);
    const reason = 'the request vanished before it began';
    await ports.streams.execute(loaded, [{ type: 'Abandon', at, attemptId, accountId, reason }], origin, deadline);
  } else if (loaded.payment.phase === 'pending')
    await ports.streams.execute(loaded, [{ type: 'StartReconciliation', at, attemptId }], origin, deadline);
  return 'reserved';
};

/** The answer of C15 that the stream of a create holds, as its request made it. null: it holds none. */
export const createResult = (paymentId: string, events: readonly PaymentEvent[]): Result<PaymentView> | null => {
  const outcome = events[1];
  return outcome?.type === 'PaymentCreated' || outcome?.type === 'PaymentDeclined'
    ? resultOf(() => chargeAnswer(paymentId, fold(decider, events.slice(0, 2))))
    : null;
};

const resultOf = (view: () => PaymentView): Result<PaymentView> => {
  try {
    return { view: view() };
  } catch (error) {
    if (error instanceof ServiceError) return { error };
    throw error;
  }
};

/** Refunds or voids at most once per key. */
export const reverseOnce = (
  services: PaymentServices,
  request: ReverseRequest & { accountId: string },
  received: Received,
): Promise<Answered<ReversalView>> => reverseKeyed(services, request, received, request.accountId, partner(request.accountId, received));

/** Keys of staff are kept apart from every account's. No account has the nil UUID. */
const STAFF_KEY_SPACE = '00000000-0000-0000-0000-000000000000';

export type StaffReverseRequest = Pick<ReverseRequest, 'operation' | 'paymentId' | 'amountCents' | 'includeFee'> & {
  readonly reason: string;
  /** The actor, recorded with every event. */
  readonly by: string;
};

/** The same for staff, on any account's payment: same rules, same answers, and a webhook (C56). A request without a key is matched by C18. */
export const reverseByStaff = async (
  services: PaymentServices,
  { by, ...request }: StaffReverseRequest,
  idempotencyKey: string | null,
): Promise<Answered<ReversalView>> => {
  const { operation, amountCents, includeFee, reason } = request;
  const origin = staff(by, services.ports.ids.uuid());
  refuseStaffText('reason', reason);
  if (amountCents !== null && !isCents(amountCents)) throw new ServiceError('VALIDATION_ERROR', `amountCents must be 1 to ${MAX_AMOUNT_CENTS}.`);
  const text = `STAFF\n${operation} ${request.paymentId.toLowerCase()}\n${canonicalJson({ amountCents, includeFee, reason })}`;
  const received: Received = { idempotencyKey, fingerprintText: text, loggedText: text, requestId: origin.correlationId };
  return reverseKeyed(services, { ...request, accountId: null, initiatedBy: 'staff' }, received, STAFF_KEY_SPACE, origin);
};

const reverseKeyed = (
  services: PaymentServices,
  request: ReverseRequest,
  received: Received,
  keySpace: string,
  origin: Origin,
): Promise<Answered<ReversalView>> => {
  const { ports } = services;
  const paymentId = request.paymentId.toLowerCase();
  const deadline = new Deadline(ports.clock, REQUEST_DEADLINE_MS);
  // No payment can have such an id, so none is kept with the key: the path may hold characters that no column can. The key is claimed before the 404
  // (C63).
  const named = isUuid(paymentId) ? paymentId : '';
  return keyed(services, keySpace, `${request.operation}:${named}`, received, {
    run: async (owned) => {
      if (!isUuid(paymentId)) throw notFound();
      return reverse(ports, { ...request, paymentId }, owned, origin, deadline);
    },
  });
};

const keyed = <View>(
  { ports, idempotency, claims, answers, log }: PaymentServices,
  accountId: string,
  operation: Operation,
  { idempotencyKey: key, fingerprintText, loggedText, requestId }: Received,
  work: KeyedWork<View>,
): Promise<Answered<View>> =>
  onceByKey(
    { idempotency, claims, answers, ownLog: ports.ownLog, ids: ports.ids, log: log.child({ requestId }) },
    { accountId, key, operation, fingerprintText, loggedText },
    work,
  );

const partner = (accountId: string, { requestId }: Received): Origin => ({ actor: { type: 'partner', id: accountId }, correlationId: requestId });

const notFound = () => new ServiceError('PAYMENT_NOT_FOUND', 'Payment not found.');

/**
 * Folds the stream, so it shows everything that an earlier answer mentioned (C48). Throws PAYMENT_NOT_FOUND, also for the payment of another account.
 * A payment that may be lost is never called absent (C76).
 */
export const findPayment = async (services: PaymentServices, accountId: string, paymentId: string): Promise<PaymentView> => {
  const { ports, recovery } = services;
  if (!isUuid(paymentId)) throw notFound();
  const id = paymentId.toLowerCase();
  const isHis = (payment: Payment) => isVisible(payment) && payment.terms.accountId === accountId;
  const inIncident = ports.ownLog.incident !== null;
  let { payment } = inIncident ? await furthest(services, id) : await ports.streams.load(id);
  if (!isHis(payment) && !inIncident && (await mayBeLost(ports))) ({ payment } = await furthest(services, id));
  if (!isVisible(payment) || !isHis(payment)) throw ports.ownLog.incident ? storeIncident() : notFound();
  if (ports.ownLog.incident) return paymentView(id, payment);
  // If the payment is open, resolve it now. The answer still comes from the stream (docs/contract.md#recovery).
  const open = openOf(payment);
  if (open && ageMs(ports.clock, open.since) >= RECOVERY_STARTS_AFTER_MS) recovery.look(id);
  return paymentView(id, payment);
};

/** True if a check finds that the log is not whole. Throws the error of a store that cannot be asked. */
const mayBeLost = async ({ ownLog }: PaymentPorts): Promise<boolean> => {
  if (ownLog.incident) return true;
  try {
    await ownLog.verified(null);
    return false;
  } catch (error) {
    if (error instanceof StoreIncident) return true;
    throw error;
  }
};

/** The payment as its stream or its row shows it, whichever is further. Either may have been lost, or be of another log. */
const furthest = async ({ ports, list }: PaymentServices, paymentId: string): Promise<{ readonly payment: Payment }> => {
  const none: { payment: Payment; revision: bigint | null } = { payment: { phase: 'none' }, revision: null };
  const [stream, [row = none]] = await Promise.all([
    ports.streams.load(paymentId).catch(() => none),
    list.rows.read([paymentId]).catch((): PaymentRow[] => []),
  ]);
  return (row.revision ?? -1n) > (stream.revision ?? -1n) ? row : stream;
};

export interface FeeQuote {
  readonly portalId: string;
  readonly amountCents: Cents;
  readonly serviceFeeCents: Cents;
  readonly totalChargedCents: Cents;
  readonly currency: 'USD';
}

export interface QuoteRequest {
  readonly accountId: string;
  readonly portalId: string;
  readonly amountCents: Cents;
}

/** The fee of a charge, by the same function (C49). Reserves nothing. Throws PORTAL_ACCESS_DENIED. */
export const quoteFee = async ({ ports }: PaymentServices, { accountId, portalId, amountCents }: QuoteRequest): Promise<FeeQuote> => {
  const { portal, access } = await ports.directory.chargeTerms(accountId, portalId, null);
  if (!portal || access !== 'granted') throw new ServiceError('PORTAL_ACCESS_DENIED', 'The portal is unknown or may not be used by this account.');
  const serviceFeeCents = serviceFee(amountCents, portal.fee);
  return { portalId, amountCents, serviceFeeCents, totalChargedCents: amountCents + serviceFeeCents, currency: 'USD' };
};
