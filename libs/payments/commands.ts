/** Actions of partners and staff on payments. An action that moves money runs once for each key (C12–C20). */
import { ageMs, canonicalJson, type Cents, CLOSED, Deadline, fold, isCents, isUuid, MAX_AMOUNT_CENTS, type Reveal, ServiceError } from '#kernel';
import type { Logger, Slot } from '#platform';
import { charge, chargeAnswer, type ChargeRequest, type PaymentPorts, reconciliationRequired } from './charge.js';
import { serviceFee } from './fee.js';
import { REQUEST_DEADLINE_MS } from './gateway/call.js';
import { awayAtGateway } from './gateway/slots.js';
import type { Claims } from './keys/claims.js';
import type { IdempotencyStore, KeyAttempt, Operation, RequestText } from './keys/key-store.js';
import { type AnswerEncoder, type Answered, atStableTime, type KeyedWork, onceByKey, type Result, storeIncident } from './keys/once-by-key.js';
import type { PaymentListPorts } from './list.js';
import { finishEmptyCreate, VANISHED } from './lost.js';
import { isVisible, openOf, payment as decider, type Payment, type PaymentEvent, type VisiblePayment } from './payment.js';
import { type PaymentView, paymentView, type ReversalView } from './payment.view.js';
import { keyOfText, openPayment } from './personal.js';
import { type Recovery, RECOVERY_STARTS_AFTER_MS } from './recovery.js';
import { reversalAgain, type ReversalEffect, reversalEffect, reverse, type ReverseRequest } from './reverse.js';
import { staff, staffTextFaults } from './staff.js';
import { paymentEvents } from './stream.js';
import { type Origin, StoreIncident } from '#eventstore';

/** The dependencies of the functions below. Each process provides them. */
export interface PaymentServices {
  readonly ports: PaymentPorts;
  readonly idempotency: IdempotencyStore;
  readonly claims: Claims;
  /** Must be the same in every process: the API may replay an answer that a worker stored. */
  readonly answers: AnswerEncoder;
  readonly list: PaymentListPorts;
  readonly recovery: Recovery;
  readonly log: Logger;
}

/** How a request arrived: its key, the text that the key is bound to, and the correlation id of its events. */
export interface Received extends RequestText {
  readonly idempotencyKey: string | null;
  readonly requestId: string;
  /** The slot of this process that the request holds. Default: none. */
  readonly slot?: Slot;
  /**
   * The refusal by a rule that is younger than the rows of keys. It comes after the look at the key (E7, C63): what was done under the old rule gets its
   * answer. Default: none.
   */
  readonly refusal?: ServiceError | null;
}

/** Charges at most once per key. */
export const chargeOnce = (services: PaymentServices, request: ChargeRequest, received: Received): Promise<Answered<PaymentView>> => {
  const ports = awayAtGateway(services.ports, received.slot);
  const origin = partner(request.accountId, received);
  const deadline = requestDeadline(ports, received.slot);
  return keyed(services, request.accountId, 'create', received, {
    run: async (owned) => {
      const attempt = owned ?? { paymentId: ports.ids.uuid(), attemptId: ports.ids.uuid() };
      const idempotency = owned?.recorded ?? null;
      return { ...(await charge(ports, request, { ...attempt, idempotency }, origin, deadline)), replayed: false };
    },
    takeOver: (owned) => finishCreate(ports, owned, request.accountId, origin, deadline),
    viewAgain: async ({ paymentId }) => {
      const found = createResult(paymentId, (await ports.streams.events(paymentId)).map(paymentEvents.read), CLOSED);
      if (!found || 'error' in found) throw new Error(`${paymentId}: the stream does not hold the payment that was answered`);
      return found.view;
    },
    reconciliationRequired: async (bound) => {
      const { paymentId } = bound;
      // If the log cannot be read now, the answer asks the caller to check the payment.
      const loaded = await ports.streams.load(paymentId).catch(() => null);
      const payment = loaded && loaded.payment;
      if (ports.ownLog.incident) return payment && isVisible(payment) ? reconciliationRequired(paymentId, payment) : storeIncident();
      if (payment?.phase !== 'none') return reconciliationRequired(paymentId, payment);
      // An empty stream may be a lost one. The answer says that nothing was charged only if the log is whole, and if no call has begun.
      const ended = await finishEmptyCreate(ports, loaded!, { ...bound, accountId: request.accountId }, VANISHED, origin, deadline).catch(() => null);
      return ended === null ? storeIncident() : reconciliationRequired(paymentId, ended === 'lost' ? null : payment);
    },
  });
};

/**
 * Decides how the key of a create ends if its owner vanished (T7). If the stream holds PaymentCreated or PaymentDeclined, the answer is made again
 * from the events up to it. Otherwise the key becomes reserved. If the stream holds no outcome, it is fenced first, so that the owner can no longer
 * begin or finish. If the stream is empty, the gateway may have to be asked first ({@link finishEmptyCreate}).
 */
export const finishCreate = async (
  ports: PaymentPorts,
  bound: KeyAttempt,
  accountId: string,
  origin: Origin,
  deadline: Deadline,
): Promise<Result<PaymentView> | 'reserved'> => {
  const { paymentId, attemptId } = bound;
  const readAt = ports.clock.realNow();
  const recorded = await ports.streams.events(paymentId);
  const events = recorded.map(paymentEvents.read);
  const payment = fold(decider, events);
  const opened = await openPayment(ports, payment);
  const found = createResult(paymentId, events, opened);
  if (found) return 'error' in found ? found : { ...found, key: isVisible(payment) ? keyOfText(opened, payment.terms.personal) : null };
  const loaded = { paymentId, payment, revision: recorded.at(-1)?.revision ?? null, readAt };
  const at = new Date(ports.clock.now()).toISOString();
  if (loaded.revision === null) await finishEmptyCreate(ports, loaded, { ...bound, accountId }, VANISHED, origin, deadline);
  else if (loaded.payment.phase === 'pending')
    await ports.streams.execute(loaded, [{ type: 'StartReconciliation', at, attemptId }], origin, deadline);
  return 'reserved';
};

/** Makes the answer of a create again from its stream (C15). null: the stream holds no PaymentCreated and no PaymentDeclined. */
export const createResult = (
  paymentId: string,
  events: readonly PaymentEvent[],
  reveal: Reveal,
): { readonly view: PaymentView } | { readonly error: ServiceError } | null => {
  const outcome = events[1];
  return outcome?.type === 'PaymentCreated' || outcome?.type === 'PaymentDeclined'
    ? resultOf(() => chargeAnswer(paymentId, fold(decider, events.slice(0, 2)), reveal))
    : null;
};

const resultOf = (view: () => PaymentView) => {
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

/** Keys of staff are stored under this account id. No account has the nil UUID, so keys of staff and of accounts never collide. */
const STAFF_KEY_SPACE = '00000000-0000-0000-0000-000000000000';

export type StaffReverseRequest = Pick<ReverseRequest, 'operation' | 'paymentId' | 'amountCents' | 'includeFee'> & {
  readonly reason: string;
  /** The actor, recorded with every event. */
  readonly by: string;
  /**
   * True: another refund or void, even if staff completed an equal one a short time ago. False: then it is refused. Absent: it is refused if the
   * request has no key.
   */
  readonly again?: boolean;
};

/**
 * Refunds or voids for staff, on a payment of any account. Rules, answers and webhooks are the same as for a partner (C56). A request without a key
 * may count as a repeat of an earlier request (C18).
 */
export const reverseByStaff = async (
  services: PaymentServices,
  asked: StaffReverseRequest,
  idempotencyKey: string | null,
): Promise<Answered<ReversalView>> => {
  const origin = staff(asked.by, services.ports.ids.uuid());
  const request = requestOfStaff(asked, idempotencyKey);
  const { operation, amountCents, includeFee, reason } = request;
  const { later } = staffTextFaults('reason', reason);
  const text = `STAFF\n${operation} ${request.paymentId.toLowerCase()}\n${canonicalJson({ amountCents, includeFee, reason })}`;
  const received: Received = { idempotencyKey, fingerprintText: text, loggedText: text, requestId: origin.correlationId, refusal: later };
  return reverseKeyed(services, request, received, STAFF_KEY_SPACE, origin);
};

/** What a refund or void by staff would do now. Throws its refusals, but does not know what its key was used for. */
export const effectByStaff = ({ ports }: PaymentServices, asked: StaffReverseRequest, idempotencyKey: string | null): Promise<ReversalEffect> =>
  reversalEffect(ports, requestOfStaff(asked, idempotencyKey));

const requestOfStaff = (
  { operation, paymentId, amountCents, includeFee, reason, again }: StaffReverseRequest,
  idempotencyKey: string | null,
): ReverseRequest & { readonly reason: string } => {
  const { now } = staffTextFaults('reason', reason);
  if (now) throw now;
  if (amountCents !== null && !isCents(amountCents)) throw new ServiceError('VALIDATION_ERROR', `amountCents must be 1 to ${MAX_AMOUNT_CENTS}.`);
  const refusesRepeat = again === undefined ? idempotencyKey === null : !again;
  return { operation, paymentId, amountCents, includeFee, reason, refusesRepeat, accountId: null, initiatedBy: 'staff' };
};

const reverseKeyed = (
  services: PaymentServices,
  request: ReverseRequest,
  received: Received,
  keySpace: string,
  origin: Origin,
): Promise<Answered<ReversalView>> => {
  const ports = awayAtGateway(services.ports, received.slot);
  const paymentId = request.paymentId.toLowerCase();
  const deadline = requestDeadline(ports, received.slot);
  // If the path holds no UUID, its text is not stored with the key: a column may refuse its characters. The key is claimed before the 404 is answered
  // (C63).
  const named = isUuid(paymentId) ? paymentId : '';
  return keyed(services, keySpace, `${request.operation}:${named}`, received, {
    run: async (owned) => {
      if (!isUuid(paymentId)) throw notFound();
      return reverse(ports, { ...request, paymentId }, owned, origin, deadline);
    },
    viewAgain: ({ attemptId }) => reversalAgain(ports, paymentId, attemptId),
  });
};

const keyed = <View>(
  { ports, idempotency, claims, answers, log }: PaymentServices,
  accountId: string,
  operation: Operation,
  { idempotencyKey: key, fingerprintText, loggedText, requestId, refusal }: Received,
  asked: KeyedWork<View>,
): Promise<Answered<View>> => {
  // A key that was taken over is bound to an attempt that an older release may have begun (C17).
  const run: KeyedWork<View>['run'] = async (owner) => {
    if (refusal && !owner?.tookOver) throw refusal;
    return asked.run(owner);
  };
  const work = { ...asked, run };
  return atStableTime(ports, () =>
    onceByKey(
      { idempotency, claims, answers, personal: ports.personal, ownLog: ports.ownLog, ids: ports.ids, log: log.child({ requestId }) },
      { accountId, key, operation, fingerprintText, loggedText },
      work,
    ),
  );
};

/** The deadline of a request (C42). Its wait for a slot counts. */
export const requestDeadline = ({ clock }: Pick<PaymentPorts, 'clock'>, slot: Slot | undefined): Deadline =>
  new Deadline(clock, REQUEST_DEADLINE_MS - (slot?.waitedMs ?? 0));

const partner = (accountId: string, { requestId }: Received): Origin => ({ actor: { type: 'partner', id: accountId }, correlationId: requestId });

const notFound = () => new ServiceError('PAYMENT_NOT_FOUND', 'Payment not found.');

/**
 * Reads a payment from its stream. The view is never older than an earlier answer (C48).
 *
 * Throws PAYMENT_NOT_FOUND, also for a payment of another account. If the payment may be lost, throws the error of an incident instead (C76).
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
  const view = async (shown: VisiblePayment) => paymentView(id, shown, await openPayment(ports, shown));
  if (ports.ownLog.incident) return view(payment);
  // If the payment has been open for a while, recovery tries to resolve it in the background (docs/contract.md#recovery).
  const open = openOf(payment);
  if (open && ports.sandboxTime?.isOpen !== false && ageMs(ports.clock, open.since) >= RECOVERY_STARTS_AFTER_MS) recovery.look(id);
  return view(payment);
};

/** True if a check finds that the log is not whole. Throws the store's error if the store cannot be asked. */
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

/**
 * The payment from its stream or from its row in the list: the one with the higher revision. The stream and the row may be lost, or belong to another
 * log. If one of them cannot be read, throws the error of an incident, because the other one may be older than an earlier answer (C48).
 */
const furthest = async ({ ports, list }: PaymentServices, paymentId: string): Promise<{ readonly payment: Payment }> => {
  const [stream, [row]] = await Promise.all([ports.streams.load(paymentId), list.rows.read([paymentId])]).catch(() => {
    throw storeIncident();
  });
  return row && row.revision > (stream.revision ?? -1n) ? row : stream;
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

/** The fee of a charge, computed by the function that charges use (C49). Reserves nothing. Throws PORTAL_ACCESS_DENIED. */
export const quoteFee = async ({ ports }: PaymentServices, { accountId, portalId, amountCents }: QuoteRequest): Promise<FeeQuote> => {
  const { portal, access } = await ports.directory.chargeTerms(accountId, portalId, null);
  if (!portal || access !== 'granted') throw new ServiceError('PORTAL_ACCESS_DENIED', 'The portal is unknown or may not be used by this account.');
  const serviceFeeCents = serviceFee(amountCents, portal.fee);
  return { portalId, amountCents, serviceFeeCents, totalChargedCents: amountCents + serviceFeeCents, currency: 'USD' };
};
