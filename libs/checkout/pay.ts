/**
 * A payment in a session. The attempt is recorded in the session, and `charge` of the partner API charges the card (C66). Then the outcome is read
 * from the payment's stream and recorded in the session.
 *
 * The request, a waiting page, and the worker after a crash all read the payment's stream in the same way ({@link follow}).
 */
import { type Directory, gatewaysOfPortal, type Portal } from '#accounts';
import { Conflict, type Origin, StoreIncident } from '#eventstore';
import { isReadOnly, type Slot } from '#platform';
import { ageMs, type Cents, Deadline, type ErrorCode, nothingBegun, ServiceError, unreachable } from '#kernel';
import {
  atStableTime,
  charge,
  type ChargeRequest,
  type EmptyCreate,
  finishEmptyCreate,
  gatewayAccountsOf,
  isVisible,
  openPayment,
  type Payment,
  awayAtGateway,
  type PaymentPorts,
  type PaymentView,
  paymentView,
  requestDeadline,
  serviceFee,
  storeIncident,
} from '#payments';
import type { Attempt, CheckoutContent, CheckoutPayer, CheckoutTerms, Refusal } from './checkout.js';
import type { CheckoutSessions, Session } from './sessions.js';

/**
 * An attempt that has no payment after this time is abandoned. Requests end earlier (C42). If one still runs, the fence on the payment's stream stops
 * it.
 */
export const ABANDONED_AFTER_MS = 60_000;
/** Time for asking about one payment whose stream is empty, and for fencing it. */
const FENCE_MS = 40_000;

export interface CheckoutPorts {
  readonly payments: PaymentPorts;
  readonly sessions: CheckoutSessions;
  readonly directory: Directory;
}

/** Amounts that the payer sees before paying. */
export interface Quote {
  readonly amountCents: Cents;
  readonly serviceFeeCents: Cents;
  readonly totalCents: Cents;
}

/** The amounts with the present fee. The charge uses the same function (C49). */
export const quoteOf = ({ amountCents }: Pick<CheckoutTerms, 'amountCents'>, portal: Portal): Quote => {
  const serviceFeeCents = serviceFee(amountCents, portal.fee);
  return { amountCents, serviceFeeCents, totalCents: amountCents + serviceFeeCents };
};

export interface PayRequest {
  readonly attemptId: string;
  /** The name of the portal's gateway. null: the portal has none. */
  readonly gateway: string | null;
  /** The slot of this process that the request holds. Default: none. */
  readonly slot?: Slot;
  readonly quotedTotalCents: Cents;
  readonly instrument: ChargeRequest['instrument'];
  /** The payer's data as entered in the form. */
  readonly payer: CheckoutPayer;
  /** As {@link ChargeRequest.payerIp}. */
  readonly payerIp?: string;
}

/**
 * Makes one attempt. Returns the session after it: paid, open again, unknown, or processing. In the last case, the outcome could not be recorded yet,
 * and the worker records it later.
 *
 * Throws Conflict or ServiceError INVALID_STATE if no attempt began. Then load the session again and show its page. Throws RATE_LIMITED, and
 * IDEMPOTENCY_UNAVAILABLE while the time of a sandbox is being moved. Both come before an attempt begins, so they use up no attempt of the payer.
 */
export const pay = (ports: CheckoutPorts, session: Session, request: PayRequest, origin: Origin): Promise<Session> =>
  atStableTime(ports.payments, async () => {
    const deadline = requestDeadline(ports.payments, request.slot);
    const payments = awayAtGateway(ports.payments, request.slot);
    const { accountId } = session.checkout.terms;
    const slot = request.gateway === null ? null : await payments.slots.reserve(request.gateway, accountId, 'payer', deadline, payments.during);
    try {
      return await payWithSlot({ ...ports, payments }, session, request, slot, origin, deadline);
    } finally {
      slot?.release();
    }
  });

const payWithSlot = async (
  ports: CheckoutPorts,
  session: Session,
  request: PayRequest,
  slot: Slot | null,
  origin: Origin,
  deadline: Deadline,
): Promise<Session> => {
  const { payments, sessions } = ports;
  const { checkout, content, key } = session;
  if (content === null) throw new ServiceError('INVALID_STATE', 'The content of the checkout is gone.');
  const { attemptId } = request;
  const paymentId = payments.ids.uuid();
  const begun = await sessions.execute(session, { type: 'StartAttempt', attemptId, paymentId }, origin).catch(refuseUnwritten);
  let refused: Refusal | null = null;
  try {
    const attempt = { paymentId, attemptId, idempotency: null, slot, personalKey: key };
    await charge(payments, chargeRequestOf(checkout.terms, content, request), attempt, origin, deadline);
  } catch (error) {
    // The gateway got no call. The worker ends the attempt when the log takes writes again.
    if (error instanceof StoreIncident || isReadOnly(error)) return refuseUnwritten(error);
    if (!(error instanceof ServiceError))
      payments.log.error({ requestId: origin.correlationId, paymentId, err: error }, 'a checkout attempt was cut short');
    else if (REFUSED_BEFORE_THE_INTENT.has(error.code)) refused = refusalOf(error);
  }
  return retold(ports, begun, origin, (latest) =>
    // If the payment was refused before its intent, it can never begin: its id was made here.
    refused ? sessions.execute(latest, { type: 'RecordDeclined', attemptId, ...refused }, origin) : follow(ports, latest, origin),
  );
};

/** An incident of the log becomes the error of C76, and a log without writes that of C19. */
const refuseUnwritten = (error: unknown): never => {
  if (error instanceof StoreIncident) throw storeIncident();
  throw isReadOnly(error) ? nothingBegun() : error;
};

/** Records the outcome in the session. If that fails, the present session is returned without an error. The worker records the outcome later. */
const retold = async (ports: CheckoutPorts, session: Session, origin: Origin, tell: (latest: Session) => Promise<Session>): Promise<Session> => {
  try {
    return await tell(session);
  } catch (error) {
    if (!(error instanceof Conflict))
      ports.payments.log.warn({ requestId: origin.correlationId, err: error }, 'a checkout cannot repeat an outcome yet; the worker does it');
    return (await ports.sessions.load(session.checkoutId).catch(() => null)) ?? session;
  }
};

/** Error codes that `charge` throws only before it writes the intent (E7 to E11). */
const REFUSED_BEFORE_THE_INTENT: ReadonlySet<ErrorCode> = new Set<ErrorCode>([
  'VALIDATION_ERROR',
  'PORTAL_ACCESS_DENIED',
  'GATEWAY_NOT_CONFIGURED',
  'PAYMENT_BLOCKED',
  'PAYMENT_HELD',
  'PAYMENT_NOT_ALLOWED',
  'DECLINE_BLOCKED',
  'VELOCITY_LIMIT',
  'RATE_LIMITED',
]);

const refusalOf = ({ code, details }: ServiceError): Refusal => ({ code, declineCode: details.reason === 'fee_changed' ? 'fee_changed' : null });

const chargeRequestOf = (
  { accountId, portalId, amountCents }: CheckoutTerms,
  { referenceId, lineItems }: CheckoutContent,
  { instrument, payer, payerIp, quotedTotalCents }: PayRequest,
): ChargeRequest => {
  const { firstName, lastName, email, phone, line1, line2, city, state, zip } = payer;
  const named = <T extends object>(fields: T) =>
    Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined && value !== ''));
  const address = named({ line1, line2, city, state, zip });
  const known = {
    ...named({ firstName, lastName, email, phone }),
    ...(Object.keys(address).length > 0 ? { address: { ...address, country: 'US' } } : {}),
  };
  return {
    accountId,
    portalId,
    referenceId,
    amountCents,
    lineItems,
    payer: Object.keys(known).length > 0 ? known : null,
    instrument,
    quotedTotalCents,
    ...(payerIp !== undefined && { payerIp }),
  };
};

/**
 * Records the outcome of the last attempt's payment in the session. Charges nothing. Abandons an attempt that has had no payment for
 * `abandonedAfterMs`. Returns the new session, or the same one if the outcome is not known yet. Throws Conflict if another writer was first, and the
 * errors of the store.
 */
export const follow = async (
  ports: CheckoutPorts,
  session: Session,
  origin: Origin,
  { abandonedAfterMs = ABANDONED_AFTER_MS }: { abandonedAfterMs?: number } = {},
): Promise<Session> => {
  const { sessions, payments } = ports;
  const { checkout } = session;
  if (checkout.phase !== 'processing' && checkout.phase !== 'unknown') return session;
  const { attempt } = checkout;
  const loaded = await payments.streams.load(attempt.paymentId);
  const { payment } = loaded;
  const deadline = new Deadline(payments.clock, FENCE_MS);
  const declined = (refusal: Refusal) => sessions.execute(session, { type: 'RecordDeclined', attemptId: attempt.attemptId, ...refusal }, origin);
  switch (payment.phase) {
    case 'charged':
      return sessions.execute(session, { type: 'RecordPaid' }, origin);
    case 'failed':
      return declined(
        payment.declineCode ? { code: 'PAYMENT_DECLINED', declineCode: payment.declineCode } : { code: 'PAYMENT_GATEWAY_ERROR', declineCode: null },
      );
    case 'voided':
      return declined({ code: 'PAYMENT_TIMEOUT', declineCode: null });
    case 'unknown':
      return sessions.execute(session, { type: 'RecordUnknown' }, origin);
    case 'pending':
      return session;
    case 'abandoned':
      return declined({ code: 'PAYMENT_GATEWAY_ERROR', declineCode: null });
    case 'none':
      if (ageMs(payments.clock, attempt.startedAt) < abandonedAfterMs) return session;
      // The event store may have lost the payment's stream, and no row of a key tells whether a call has begun. So the gateway is asked. If the
      // payment begins at this moment, the append conflicts, and the payment is read again.
      return (await finishEmptyCreate(payments, loaded, await emptyAttempt(ports, checkout.terms, attempt), VANISHED, origin, deadline)) === 'lost'
        ? sessions.execute(session, { type: 'RecordUnknown' }, origin)
        : declined({ code: 'PAYMENT_GATEWAY_ERROR', declineCode: null });
    default:
      return unreachable(payment);
  }
};

const VANISHED = 'the checkout request vanished before it began';

const emptyAttempt = async (
  { directory, payments }: CheckoutPorts,
  { accountId, portalId }: CheckoutTerms,
  { attemptId, paymentId, startedAt: claimedAt }: Attempt,
): Promise<EmptyCreate> => {
  // The portal may have got another gateway since the attempt.
  const present = (await directory.portal(portalId))?.gateway ?? [];
  const accounts = (await gatewaysOfPortal(payments.streams.store, portalId)).concat(present).flatMap(gatewayAccountsOf);
  return { paymentId, attemptId, accountId, claimedAt, begun: accounts.length > 0 ? null : false, portal: { portalId, accounts } };
};

/** {@link follow}, repeated once if another writer was first. */
export const followNow = async (
  ports: CheckoutPorts,
  session: Session,
  origin: Origin,
  options: { abandonedAfterMs?: number } = {},
): Promise<Session> => {
  try {
    return await follow(ports, session, origin, options);
  } catch (error) {
    if (!(error instanceof Conflict)) throw error;
    const latest = await ports.sessions.load(session.checkoutId);
    if (!latest) throw new Error('a checkout stream has vanished', { cause: error });
    return follow(ports, latest, origin, options);
  }
};

/** The payment of an attempt, as the partner sees it. null: no payment is visible. */
export const paymentOf = async ({ payments }: CheckoutPorts, { paymentId }: Attempt): Promise<PaymentView | null> => {
  const { payment }: { payment: Payment } = await payments.streams.load(paymentId);
  return isVisible(payment) ? paymentView(paymentId, payment, await openPayment(payments, payment)) : null;
};
