/**
 * Refunds and voids, for partners and staff. Each appends its intent, calls the gateway for each leg, and appends its end.
 *
 * If a request vanished, a retry under its key makes the same calls again. Any other refund or void first resolves the vanished attempt: it finalises
 * every reference that the attempt may have used (C17, C18, C61).
 */
import { Conflict, type Origin, OutcomeUnknown, type Position, StoreIncident, Unavailable } from '#eventstore';
import { ageMs, type Cents, CLOSED, Deadline, keysIn, type Personal, type Reveal, ServiceError, sumCents, timestamp } from '#kernel';
import { hashedUuid, OpenedKeys, type PersonalKey, type Slot } from '#platform';
import { gatewayRef, type PaymentPorts } from './charge.js';
import type { HoldsKey, KeyAttempt } from './keys/key-store.js';
import { restoreReversal } from './lost.js';
import type { Executed } from './keys/once-by-key.js';
import { beginning, bounded, duringOf, callGateway, GATEWAY_CALL_MS, isVerified, REQUEST_DEADLINE_MS } from './gateway/call.js';
import type {
  ChargeTxn,
  Finalized,
  GatewayCapabilities,
  Leg,
  Outcome,
  PaymentGateway,
  ReferenceCall,
  RejectionReason,
  ReversalTxn,
} from './gateway/gateway.js';
import {
  attemptOf,
  cents,
  completedMeanwhile,
  type Charged,
  type ChargedLeg,
  type Initiator,
  type Intent,
  type IntentEvent,
  isVisible,
  last4Of,
  type LegMove,
  type Means,
  openAttempt,
  payment as decider,
  type PaymentCommand,
  type Reason,
  reasonContext,
  type RecordedKey,
  remaining,
  type RequestRefund,
  type RequestVoid,
  resultOf,
  RETURNED_ELSEWHERE,
  type ReversalAttempt,
  untoldAttempt,
  unsettledMeans,
  voidFailed,
} from './payment.js';
import { refundView, type ReversalView, voidView } from './payment.view.js';
import { keyForPayment, keyOfText } from './personal.js';
import { CONFLICT_ROUNDS, FENCE, INTENT, type LoadedPayment, retryingConflicts } from './stream.js';

/** How long a request waits for a running refund or void of the same payment (C31). */
const WAIT_FOR_OTHER_MS = 10_000;
const POLL_OTHER_MS = 100;
/** No request works longer than this on an attempt: the deadline of a request, plus a margin for the append of the outcome. */
export const ABANDONED_AFTER_MS = REQUEST_DEADLINE_MS + 7_000;

export interface ReverseRequest {
  readonly operation: Means;
  readonly paymentId: string;
  /** null: the request is from staff. Staff may act on the payment of any account. */
  readonly accountId: string | null;
  readonly initiatedBy: Initiator;
  /** Principal in cents. null: everything that remains. Refund only. */
  readonly amountCents: Cents | null;
  readonly includeFee: boolean;
  readonly reason: string | null;
  /** True: an equal refund or void that staff completed a short time ago refuses this one. */
  readonly refusesRepeat?: boolean;
}

/** The attempt that a key is bound to. `renew` binds the key to a new attempt, before that attempt begins (C17). */
export interface KeyBinding extends Pick<KeyAttempt, 'attemptId' | 'claimedAt' | 'begun'> {
  /** The key, as the intent of each attempt records it. */
  readonly recorded: RecordedKey;
  renew(): Promise<string>;
  readonly holds: HoldsKey | null;
}

/** Gives money back, and resolves to the result. If the request repeats an earlier one, resolves to the result of that one. Throws the specification's errors. */
export const reverse = async (
  ports: PaymentPorts,
  request: ReverseRequest,
  key: KeyBinding | null,
  origin: Origin,
  deadline: Deadline,
): Promise<Executed<ReversalView>> => {
  const { streams, clock, ids } = ports;
  const executed = (result: Told): Executed<ReversalView> => ({ ...result, replayed: false });
  const at = () => timestamp(clock.now());
  const waitUntil = clock.monotonic() + WAIT_FOR_OTHER_MS;
  let attemptId = key?.attemptId ?? ids.uuid();
  let renewed = key === null;

  for (;;) {
    // Taken before the load: no attempt that this load shows as open was fenced earlier. See {@link NOTHING_IS_SENT_AFTER_MS}.
    const notAfter = endOf(ports, deadline);
    const loaded = await streams.load(request.paymentId);
    const { payment } = loaded;
    let renews = false;
    const begunAt = at();
    const unsealed = (when: string) => command(ports, request, loaded, { attemptId, idempotency: key?.recorded ?? null }, when);
    if (!isVisible(payment) || (request.accountId !== null && payment.terms.accountId !== request.accountId)) {
      // The log may have lost the payment, so the log is checked before the 404 (C76).
      await ports.ownLog.verified(null);
      throw notFound();
    }
    if (payment.phase === 'charged') {
      for (const { account } of payment.legs) if (!ports.gateways.find(account)) await ports.gateways.load?.(account);
      for (const leg of payment.legs) gatewayOf(ports, leg);

      const own = renewed ? undefined : resultOf(payment, attemptId);
      // The owner of the attempt vanished. The same calls are made again, and the gateway executes each reference only once. An older attempt is
      // resolved like any open one: the gateway could execute its references twice.
      if (own && !own.ended && !own.fenced && mayRepeat(ports, payment, own)) {
        const opened = await ports.personal.open(keysIn([own.personal]));
        const slot = await resumed(ports, request, payment, deadline);
        if (!slot) throw timeout(request.paymentId);
        try {
          return executed(await run(ports, loaded, own.attemptId, opened, origin, deadline, notAfter, true));
        } finally {
          slot.release();
        }
      }
      // The key's attempt is complete, so its result is the answer, even if another attempt is running. A refusal could make the caller ask again
      // under a new key. If the caller got a 5xx before, this answer is the first one and no replay.
      if (own && isComplete(own)) {
        const replayed = !own.fenced || own.acknowledged;
        return { ...(await tell(ports, request, own.attemptId, origin, deadline, 'again'))!, replayed };
      }
      // A void that the gateway rejected is final (C15), even without a stored answer. A second call might get another answer, for example after a
      // new dispute.
      if (own?.operation === 'void' && own.ended?.outcome === 'rejected' && !payment.legs.some((leg) => leg.settlementRejected)) throw rejectedVoid();

      const open = openAttempt(payment);
      if (open) {
        if (!open.fenced && open !== own && ageMs(clock, open.requestedAt) < ABANDONED_AFTER_MS) {
          if (clock.monotonic() >= waitUntil || deadline.leftMs < POLL_OTHER_MS)
            throw new ServiceError('INVALID_STATE', 'Another refund or void of this payment is in progress.');
          await clock.sleep(POLL_OTHER_MS);
        } else {
          const resolving = resolveReversal(ports, request.paymentId, open.attemptId, origin, deadline);
          if ((await (own ? resolving.catch(unknownIfStoreFails(request.paymentId)) : resolving)) !== 'resolved')
            throw own
              ? timeout(request.paymentId)
              : new ServiceError('INVALID_STATE', 'An earlier refund or void of this payment is being reconciled; try later.');
        }
        continue;
      }

      // The log lacks the intent of the key's attempt, and its calls may have begun. So the attempt is resolved before anything is sent.
      if (key && !renewed && !own && key.begun !== false) {
        const lost = key.begun ?? (decider.decide(payment, unsealed(key.claimedAt))[0] as IntentEvent);
        await restoreReversal(ports, loaded, lost, origin, deadline).catch((error: unknown) => {
          if (!(error instanceof Conflict)) throw error;
        });
        if ((await resolveReversal(ports, request.paymentId, attemptId, origin, deadline)) !== 'resolved') throw timeout(request.paymentId);
        const { payment: found } = await streams.load(request.paymentId);
        if (attemptOf(found, attemptId)?.returned.length)
          await ports.ownLog.report(`it does not hold a ${request.operation} of payment ${request.paymentId}, which the gateway has executed`);
        continue;
      }

      const repeated = (key === null ? untold(payment, request, timestamp(clock.realNow())) : undefined) ?? finishedMeanwhile(payment, request);
      if (repeated) {
        const repeat = await tell(ports, request, repeated.attemptId, origin, deadline, { as: key && { attemptId, idempotency: key.recorded } });
        if (repeat) return executed(repeat);
        continue;
      }
      renews = !!own?.ended;
    }
    const intent = (sealing: PersonalKey | null) => ({ ...unsealed(begunAt), personal: sealedReason(request, attemptId, sealing) });
    // Throws the refusals of C63 before the wait for a slot.
    decider.decide(payment, intent(null));
    const sealing = request.reason === null ? null : await keyForPayment(ports, payment);
    const slot = await reserved(ports, request, payment as Charged, deadline);
    try {
      if (renews) {
        // The key's attempt ended as never executed, rejected or partial. A new attempt returns the missing part. The key is bound to it before it
        // begins.
        attemptId = await key!.renew();
        renewed = true;
      }
      const next = await streams.execute(loaded, [intent(sealing)], origin, deadline, INTENT);
      const opened = new OpenedKeys(new Map(sealing ? [[sealing.id, sealing]] : []));
      const [kept] = decider.decide(payment, intent(sealing)) as readonly IntentEvent[];
      const calls = beginning(ports, { paymentId: request.paymentId, intent: kept! }, key?.holds ?? null);
      return executed(await run(calls, next, attemptId, opened, origin, deadline, notAfter, false));
    } catch (error) {
      // Another request changed the payment first. This request has made no call yet, so it decides again.
      if (error instanceof Conflict && deadline.leftMs > 0) continue;
      // The intent was sent, and the log may hold it.
      if (error instanceof OutcomeUnknown) throw timeout(request.paymentId);
      throw error;
    } finally {
      slot.release();
    }
  }
};

/** What a refund or void would do. */
export interface ReversalEffect {
  readonly accountId: string;
  /** Empty with `earlier`. */
  readonly legs: readonly Pick<LegMove, 'leg' | 'means' | 'principalCents' | 'feeCents'>[];
  /** Cents of the service fee that stay charged. */
  readonly feeKeptCents: Cents;
  /**
   * The attempt that the request meets first. `isOpen`: it is brought to its end, and only then is it known what remains to do. Otherwise it is
   * complete, its result is the answer, and no money moves. null: there is none.
   */
  readonly earlier: { readonly operation: Means; readonly requestedAt: string; readonly isOpen: boolean } | null;
}

/** Computes the effect of a request now, without an append and without a call of a gateway. Throws the refusals of the request. */
export const reversalEffect = async (ports: PaymentPorts, request: ReverseRequest): Promise<ReversalEffect> => {
  const loaded = await ports.streams.load(request.paymentId);
  const { payment } = loaded;
  const intent = { attemptId: ports.ids.uuid(), idempotency: null };
  const decided = () => decider.decide(payment, command(ports, request, loaded, intent, timestamp(ports.clock.now())));
  if (payment.phase !== 'charged') throw new Error(`${request.paymentId}: not refused although ${payment.phase}: ${decided().length}`);
  for (const { account } of payment.legs) if (!ports.gateways.find(account)) await ports.gateways.load?.(account);
  const open = openAttempt(payment);
  const met = open ?? untold(payment, request, timestamp(ports.clock.realNow())) ?? finishedMeanwhile(payment, request);
  const legs = met ? [] : decided().flatMap((event) => ('legs' in event.data ? (event.data.legs as readonly LegMove[]) : []));
  return {
    accountId: payment.terms.accountId,
    legs,
    feeKeptCents: remaining(payment).fee - sumCents(legs, ({ feeCents }) => feeCents),
    earlier: met ? { operation: met.operation, requestedAt: met.requestedAt, isOpen: met === open } : null,
  };
};

/** The result of an attempt, and the key that seals it where it is stored. */
type Told = Pick<Executed<ReversalView>, 'view' | 'key'>;

const sealedReason = ({ paymentId, reason }: ReverseRequest, attemptId: string, key: PersonalKey | null): Personal<Reason> =>
  key === null || reason === null ? null : key.seal({ reason }, reasonContext(paymentId, attemptId));

/**
 * The end of the work by the wall clock, RFC 3339. No call is sent later. The deadline alone is not enough: the monotonic clock stops while a machine
 * is suspended, and recovery takes a leg as not sent some time after the fence.
 */
export const endOf = ({ clock }: PaymentPorts, deadline: Deadline): string => timestamp(clock.now() + Math.max(0, deadline.leftMs));

/** True if every call of the attempt can be sent again without being executed twice. */
const mayRepeat = (ports: PaymentPorts, payment: Charged, attempt: ReversalAttempt): boolean =>
  attempt.legs
    .filter((move) => !attempt.returned.some(({ leg }) => leg === move.leg))
    .every((move) => {
      const { capabilities } = gatewayOf(
        ports,
        payment.legs.find(({ leg }) => leg === move.leg)!,
      );
      return meansOf(attempt).every((means) => isRepeatSafe(ports, attempt, capabilities, means));
    });

/** True if the call of an attempt can be sent again without being executed twice. A gateway without voids refuses them and sends nothing. */
const isRepeatSafe = (
  { clock }: PaymentPorts,
  { requestedAt }: ReversalAttempt,
  { repeatSafeMs, voids }: GatewayCapabilities,
  means: Means,
): boolean =>
  (means === 'void' && voids === 'none') || repeatSafeMs[means] === Number.POSITIVE_INFINITY || ageMs(clock, requestedAt) < repeatSafeMs[means];

/** The operations that an attempt may use. A refund may need a void instead (C24). */
const meansOf = ({ operation }: ReversalAttempt): readonly Means[] => (operation === 'void' ? ['void'] : ['void', 'refund']);

/** Reserves a slot at the gateway for a new attempt. Throws RATE_LIMITED, before anything has begun. */
const reserved = async (ports: PaymentPorts, request: ReverseRequest, payment: Charged, deadline: Deadline): Promise<Slot> => {
  if (request.initiatedBy === 'staff') return (await resumed(ports, request, payment, deadline)) ?? tooManyOfStaff();
  return ports.slots.reserve(payment.legs[0]!.account.gateway, payment.terms.accountId, 'reversal', deadline, ports.during);
};

/** Waits for a slot for an attempt that has begun, or for an attempt of staff, who have a share of their own. null: no call can be sent in time. */
const resumed = (
  { slots, during }: PaymentPorts,
  { initiatedBy }: ReverseRequest,
  { legs, terms }: Charged,
  deadline: Deadline,
): Promise<Slot | null> => slots[initiatedBy === 'staff' ? 'ofHouse' : 'resume'](legs[0]!.account.gateway, terms.accountId, deadline, during);

const tooManyOfStaff = (): never => {
  throw new ServiceError('RATE_LIMITED', 'Too many payments are being resolved; nothing was begun. Try again later.', {}, { retryAfterSeconds: 5 });
};

const untold = (payment: Charged, request: ReverseRequest, at: string) =>
  untoldAttempt(payment, request.operation, request.initiatedBy, askedOf(request), at);

const finishedMeanwhile = (payment: Charged, request: ReverseRequest) =>
  completedMeanwhile(payment, request.operation, request.initiatedBy, askedOf(request));

const askedOf = ({ operation, amountCents, includeFee }: ReverseRequest) =>
  operation === 'void' ? { amountCents: null, includeFee: true } : { amountCents, includeFee };

const isComplete = (attempt: ReversalAttempt) => attempt.ended?.outcome === 'completed' || attempt.completedBy !== null;

/**
 * Records that a caller gets the result of a successful attempt, then returns the result. null: another caller has got it already.
 *
 * `again`: the caller's key owns the result. `as`: the caller's key and the attempt that the key is bound to; null: the caller has no key. Of the
 * callers without the attempt's key, only the first gets the result (C18).
 */
const tell = (
  ports: PaymentPorts,
  request: ReverseRequest,
  attemptId: string,
  origin: Origin,
  deadline: Deadline,
  how: 'again' | { readonly as: Intent | null },
): Promise<Told | null> =>
  retryingConflicts(async () => {
    const loaded = await ports.streams.load(request.paymentId);
    const { acknowledged, personal } = attemptOf(loaded.payment, attemptId)!;
    if (how !== 'again' && acknowledged) return null;
    const opened = await ports.personal.open(keysIn([personal]));
    const toldAs = how === 'again' ? null : how.as;
    const acknowledge: PaymentCommand = { type: 'AcknowledgeReversal', at: timestamp(ports.clock.now()), attemptId, toldAs };
    const { payment } = await ports.streams.execute(loaded, [acknowledge], origin, deadline);
    return told(request.paymentId, payment as Charged, attemptId, opened);
  }).catch(unknownIfStoreFails(request.paymentId));

/** The answer for an attempt that succeeded. */
export const reversalResult = (paymentId: string, payment: Charged, attemptId: string, reveal: Reveal): ReversalView => {
  const attempt = attemptOf(payment, attemptId)!;
  return attempt.operation === 'void' ? voidView(paymentId, payment, attempt, reveal) : refundView(paymentId, payment, attempt, reveal);
};

const told = (paymentId: string, payment: Charged, attemptId: string, opened: OpenedKeys): Told => ({
  view: reversalResult(paymentId, payment, attemptId, opened),
  key: keyOfText(opened, attemptOf(payment, attemptId)!.personal),
});

/** The result that belongs to the key of `attemptId`, made again without its reason. Throws if the payment has no such result. */
export const reversalAgain = async ({ streams }: PaymentPorts, paymentId: string, attemptId: string): Promise<ReversalView> => {
  const { payment } = await streams.load(paymentId);
  const result = payment.phase === 'charged' ? resultOf(payment, attemptId) : undefined;
  if (payment.phase !== 'charged' || !result) throw new Error(`${paymentId}: the stream does not hold the attempt that was answered`);
  return reversalResult(paymentId, payment, result.attemptId, CLOSED);
};

const command = (
  ports: PaymentPorts,
  request: ReverseRequest,
  { payment }: LoadedPayment,
  intent: Intent,
  at: string,
): RequestVoid | RequestRefund => {
  const { initiatedBy, refusesRepeat = false } = request;
  const references = (leg: Leg) => ({ void: gatewayRef(intent.attemptId, leg, 'void'), refund: gatewayRef(intent.attemptId, leg, 'refund') });
  const common = { at, ...intent, initiatedBy, refusesRepeat, personal: null, references };
  if (request.operation === 'void') return { type: 'RequestVoid', ...common };
  const capabilities = (leg: Leg) =>
    gatewayOf(
      ports,
      (payment as Charged).legs.find((charge) => charge.leg === leg)!,
    ).capabilities;
  return { type: 'RequestRefund', ...common, amountCents: request.amountCents, includeFee: request.includeFee, capabilities };
};

/** Money is returned through the gateway account that charged it, even if the portal has another one now (C68). */
const gatewayOf = (ports: PaymentPorts, leg: ChargedLeg): PaymentGateway => {
  const gateway = ports.gateways.find(leg.account);
  if (!gateway) throw new ServiceError('GATEWAY_NOT_CONFIGURED', 'The gateway account that charged this payment is not configured any more.');
  return gateway;
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Running an attempt: the money of each leg that is not returned yet is returned, principal first.

/**
 * `opened`: the key of the attempt's reason. `notAfter`: see {@link endOf}. `again`: an earlier request may have made the same calls without recording
 * their outcome.
 */
const run = async (
  ports: PaymentPorts,
  begun: LoadedPayment,
  attemptId: string,
  opened: OpenedKeys,
  origin: Origin,
  deadline: Deadline,
  notAfter: string,
  again: boolean,
): Promise<Told> => {
  const { paymentId } = begun;
  const at = () => timestamp(ports.clock.now());
  let loaded = begun;
  const intent = begun.appendedAt ?? null;
  const attempt = attemptOf(begun.payment, attemptId)!;
  for (const move of attempt.legs) {
    const payment = loaded.payment as Charged;
    const current = attemptOf(payment, attemptId)!;
    if (current.returned.some(({ leg }) => leg === move.leg)) continue;
    const { capabilities } = gatewayOf(
      ports,
      payment.legs.find((charge) => charge.leg === move.leg)!,
    );
    const maySend = (means: Means) => !again || isRepeatSafe(ports, attempt, capabilities, means);
    const moved = await moveLeg(ports, payment, attempt, move, intent, deadline, notAfter, maySend).catch((error: unknown) => {
      // The intent may be lost, or a call may have been made already (C76). In both cases the outcome is unknown.
      throw error instanceof StoreIncident ? timeout(paymentId) : error;
    });
    const { means } = moved;
    const outcome = certain(moved.outcome, again, capabilities);

    if (outcome.kind === 'approved') {
      const last = current.returned.length + 1 === attempt.legs.length;
      const commands: PaymentCommand[] = [
        {
          type: 'RecordLegReturned',
          at: at(),
          attemptId,
          leg: move.leg,
          means: outcome.txn.means ?? means,
          transactionId: outcome.txn.transactionId,
          pending: outcome.txn.pending,
        },
      ];
      if (last) commands.push({ type: 'EndReversal', at: at(), attemptId });
      loaded = await record(ports, loaded, attemptId, commands, origin, deadline);
      continue;
    }
    // Recovery or a later request finalised the reference before this call, and resolves the attempt now (docs/contract.md#gateway).
    if (outcome.kind === 'rejected' && outcome.why === 'finalised') throw timeout(paymentId);
    if (outcome.kind === 'rejected' || (outcome.kind === 'not_processed' && outcome.answered) || outcome.kind === 'declined') {
      const unfinished = outcome.kind === 'rejected' ? 'rejected' : 'never_executed';
      const commands: PaymentCommand[] = [{ type: 'EndReversal', at: at(), attemptId, unfinished }];
      const { leg } = move;
      if (isReturnedElsewhere(outcome))
        commands.push({ type: 'NoteReturn', at: at(), returnId: hashedUuid('returned-elsewhere', attemptId, leg), leg, transactionId: null });
      loaded = await record(ports, loaded, attemptId, commands, origin, deadline);
    } else {
      // The fence lets the next request resolve the attempt without waiting for this request (C18).
      loaded = await record(ports, loaded, attemptId, [{ type: 'StartReconciliation', at: at(), attemptId }], origin, deadline).catch(
        (error: unknown) => {
          ports.log.warn({ paymentId, attemptId, err: error }, 'an open reversal could not be marked');
          return loaded;
        },
      );
    }
    // Another request under the same key may have run this attempt and recorded this leg. If the attempt is fenced, recovery decides about the other
    // legs. An attempt does not end while its references may still be executed (C61).
    const meanwhile = attemptOf(loaded.payment, attemptId)!;
    if (meanwhile.returned.some(({ leg }) => leg === move.leg)) {
      if (meanwhile.fenced && meanwhile.ended === null) throw timeout(paymentId);
      continue;
    }
    throw failure(ports, paymentId, loaded.payment as Charged, attempt, move, outcome);
  }
  return told(paymentId, loaded.payment as Charged, attemptId, opened);
};

/**
 * The outcome of a call, or `unknown` if the call may still return the money. `again`: an earlier request may have made the same call. Then a call that
 * was not sent now may have been sent, and a refusal may mean that the money is gone already. Recovery, too, may send a call that was not sent (C72).
 * A charge that was voided before the first call was voided elsewhere.
 */
const certain = (outcome: Outcome<ReversalTxn>, again: boolean, { finalizeReversal }: GatewayCapabilities): Outcome<ReversalTxn> => {
  if (!again && outcome.kind === 'approved' && outcome.txn.before) return { kind: 'rejected', why: 'already_reversed' };
  const isRefusedAgain = again && outcome.kind === 'rejected' && mayBeOwn(outcome.why);
  const isUnsent = outcome.kind === 'not_processed' && !outcome.answered && (again || finalizeReversal === 'later');
  return isRefusedAgain || isUnsent ? { kind: 'unknown', cause: 'disconnected' } : outcome;
};

/** True if a repeated call may be refused because its first sending has returned the money. */
const mayBeOwn = (why: RejectionReason): boolean => why === 'exceeds' || why === 'already_reversed' || why === 'not_refundable';

/** True if the gateway says that less is left of the charge than our record says. Never of a repeated call: see {@link certain}. */
const isReturnedElsewhere = (outcome: Outcome<ReversalTxn>): boolean =>
  outcome.kind === 'rejected' && (outcome.why === 'exceeds' || outcome.why === 'already_reversed');

/**
 * Voids or refunds one leg. If a refund was requested and the gateway requires the other operation, sends that operation (C23, C24). `notAfter`: see
 * {@link endOf}. `maySend`: false for a call that the gateway could execute twice by now.
 */
const moveLeg = async (
  ports: PaymentPorts,
  payment: Charged,
  attempt: ReversalAttempt,
  move: LegMove,
  intent: Position | null,
  deadline: Deadline,
  notAfter: string,
  maySend: (means: Means) => boolean,
): Promise<{ outcome: Outcome<ReversalTxn>; means: Means }> => {
  const leg = payment.legs.find((charge) => charge.leg === move.leg)!;
  const gateway = gatewayOf(ports, leg);
  const amountCents = cents(move);
  const common = {
    leg: leg.leg,
    account: leg.account,
    begunAt: attempt.requestedAt,
    chargeTransactionId: leg.transactionId,
    notAfter,
  };
  const last4 = last4Of(payment, leg);
  const send = async (means: Means): Promise<Outcome<ReversalTxn>> => {
    if (!maySend(means)) return { kind: 'not_processed', answered: false, raw: 'must not be sent again' };
    return callGateway(ports, deadline, intent, (signal) =>
      means === 'void'
        ? gateway.void({ ...common, ref: move.references.void, amountCents, askedBy: attempt.operation }, signal)
        : gateway.refund({ ...common, ref: move.references.refund, amountCents, last4 }, signal),
    );
  };

  const first = await send(move.means);
  if (attempt.operation === 'void' || first.kind !== 'rejected') return { outcome: first, means: move.means };
  if (move.means === 'void' && first.why === 'already_settled') return { outcome: await send('refund'), means: 'refund' };
  if (move.means === 'refund' && first.why === 'not_settled' && unsettledMeans(leg, move, gateway.capabilities) === 'void')
    return { outcome: await send('void'), means: 'void' };
  return { outcome: first, means: move.means };
};

/**
 * Appends at the loaded revision, or after an unrelated event of another writer. Appends nothing if the attempt was fenced
 * (docs/contract.md#streams-and-appends).
 */
const record = async (
  ports: PaymentPorts,
  loaded: LoadedPayment,
  attemptId: string,
  commands: readonly PaymentCommand[],
  origin: Origin,
  deadline: Deadline,
): Promise<LoadedPayment> => {
  let current = loaded;
  for (let round = 1; ; round++) {
    try {
      return await ports.streams.execute(current, commands, origin, deadline);
    } catch (error) {
      if (!(error instanceof Conflict) || round === CONFLICT_ROUNDS) {
        ports.log.warn(
          { paymentId: loaded.paymentId, attemptId, err: error },
          'the outcome of a reversal could not be recorded; recovery resolves it',
        );
        if (error instanceof OutcomeUnknown) void markUntold(ports, loaded.paymentId, attemptId, origin);
        throw timeout(loaded.paymentId);
      }
      current = await ports.streams.load(loaded.paymentId).catch(unknownIfStoreFails(loaded.paymentId));
      // Recovery or a later request has fenced the attempt, and may have ended it. After the 504, a repeated request can get the result (C18).
      if (attemptOf(current.payment, attemptId)?.fenced) throw timeout(loaded.paymentId);
    }
  }
};

/** Time limit of {@link markUntold}, and the wait between two of its appends. */
const MARK_UNTOLD_MS = 600_000;
const MARK_UNTOLD_EVERY_MS = 100;

/**
 * Records that the caller got a 504, although the attempt may have ended in the log. A repeat without a key then gets the result (C18).
 *
 * The append is tried for at most {@link MARK_UNTOLD_MS}. If the process crashes before the append, such a repeat counts as a new request.
 */
const markUntold = async (ports: PaymentPorts, paymentId: string, attemptId: string, origin: Origin): Promise<void> => {
  const { clock, streams } = ports;
  const deadline = new Deadline(clock, MARK_UNTOLD_MS);
  while (deadline.leftMs > 0) {
    try {
      const loaded = await streams.load(paymentId);
      await streams.execute(loaded, [{ type: 'StartReconciliation', at: timestamp(clock.now()), attemptId, untold: true }], origin, deadline, {
        forMs: () => 1,
      });
      return;
    } catch {
      await clock.sleep(MARK_UNTOLD_EVERY_MS);
    }
  }
};

/** The error for a leg that was not returned (C26, C27, C40, C62). */
const failure = (
  ports: PaymentPorts,
  paymentId: string,
  payment: Charged,
  attempt: ReversalAttempt,
  move: LegMove,
  outcome: Exclude<Outcome<ReversalTxn>, { kind: 'approved' }>,
): ServiceError => {
  const first = attempt.legs[0]!.leg === move.leg;
  if (attempt.operation === 'void') {
    if (!first)
      return new ServiceError('VOID_FAILED', 'The principal was voided; the service fee is not confirmed. Retry the void.', {
        retryable: true,
        suggestedAction: 'retry_void',
      });
    if (outcome.kind === 'rejected' && outcome.why === 'settlement_rejected') return settlementRejected();
    if (outcome.kind === 'rejected') return rejectedVoid();
  } else {
    if (!first || attempt.completes) {
      const left = remaining(payment);
      return new ServiceError('PARTIAL_REFUND_PENDING', 'The principal was refunded; the service fee is not confirmed. Retry the refund.', {
        retryable: true,
        suggestedAction: 'refund',
        remainingRefundableAmountCents: left.principal + left.fee,
      });
    }
    if (outcome.kind === 'rejected') {
      if (outcome.why === 'not_settled')
        return new ServiceError('INVALID_STATE', 'The batch has not settled: a partial refund is possible after settlement.'); // C23
      ports.log.error({ paymentId, attemptId: attempt.attemptId, why: outcome.why }, 'the gateway refused a refund');
      if (isReturnedElsewhere(outcome)) return new ServiceError('INVALID_STATE', `The gateway refused the refund: ${RETURNED_ELSEWHERE}.`);
      return outcome.why === 'settlement_rejected' ? settlementRejected() : new ServiceError('INVALID_STATE', 'The gateway refused the refund.');
    }
  }
  if (outcome.kind === 'unknown' || outcome.kind === 'held') return timeout(paymentId);
  return new ServiceError('PAYMENT_GATEWAY_ERROR', 'The gateway did not process the request; nothing was returned.', { id: paymentId });
};

const timeout = (id: string) =>
  new ServiceError('PAYMENT_TIMEOUT', 'The outcome of the request is unknown; retry it with the same Idempotency-Key.', { id });
/** Money was returned, or may have been. So a failure of the event store becomes PAYMENT_TIMEOUT. */
const unknownIfStoreFails =
  (paymentId: string) =>
  (error: unknown): never => {
    throw error instanceof Unavailable || error instanceof OutcomeUnknown ? timeout(paymentId) : error;
  };
/** The final answer to a void that the gateway rejected (C15). */
export const rejectedVoid = () => voidFailed('The gateway rejected the void; refund the payment instead.');
/** The error of C67. The gateway may report the rejected settlement before our stream has recorded it. */
const settlementRejected = () => new ServiceError('INVALID_STATE', 'The settlement of this payment was rejected.');
const notFound = () => new ServiceError('PAYMENT_NOT_FOUND', 'Payment not found.');

// ------------------------------------------------------------------------------------------------------------------------------------
// Resolving an attempt that was left open: by the next request, or by recovery.

/** Why an attempt stays open. The times are those of {@link Finalized}. */
export type StillOpen = Omit<Extract<Finalized<never>, { kind: 'cannot_tell' }>, 'kind'>;

/** Calls of a request are not sent this long after the attempt was fenced: they carry the end of their request. */
const NOTHING_IS_SENT_AFTER_MS = 2 * 60_000;

/**
 * Fences the attempt, finalises every reference that it may have used, records the executed calls, and ends the attempt. `StillOpen`: the gateway or
 * the store cannot tell now, so the attempt stays open.
 *
 * If the gateway cannot tell about the leg that was under way at the fence, its call is sent under its reference, and the gateway takes it once (C72).
 * If its void came too late, this call is the refund that its request sends next. No other void and no other refund is ever sent (C61).
 */
export const resolveReversal = async (
  ports: PaymentPorts,
  paymentId: string,
  attemptId: string,
  origin: Origin,
  deadline: Deadline,
): Promise<'resolved' | StillOpen> => {
  const { payment } = await ports.streams.load(paymentId);
  if (payment.phase !== 'charged') return 'resolved';
  const work = () => resolveWithSlot(ports, paymentId, attemptId, origin, deadline);
  return (await ports.slots.inHouse(payment.legs[0]!.account.gateway, payment.terms.accountId, deadline, work, ports.during)) ?? UNREACHABLE;
};

export const UNREACHABLE: StillOpen = { why: 'unreachable' };

const resolveWithSlot = async (
  ports: PaymentPorts,
  paymentId: string,
  attemptId: string,
  origin: Origin,
  deadline: Deadline,
): Promise<'resolved' | StillOpen> => {
  const { clock, streams } = ports;
  const at = () => timestamp(clock.now());
  for (let round = 1; round <= CONFLICT_ROUNDS; round++) {
    let loaded = await streams.load(paymentId);
    const before = attemptOf(loaded.payment, attemptId);
    if (!before || before.ended) return 'resolved';
    try {
      loaded = await streams.execute(loaded, [{ type: 'StartReconciliation', at: at(), attemptId }], origin, deadline, FENCE);
      const payment = loaded.payment as Charged;
      const attempt = attemptOf(payment, attemptId)!;
      const commands: PaymentCommand[] = [];
      let rejected = false;
      const open = attempt.legs.filter((move) => !attempt.returned.some(({ leg }) => leg === move.leg));
      for (const [index, move] of open.entries()) {
        // Legs are sent one after the other, and each waits for the recorded return of the one before. So only the first open leg can be under way.
        const found = await findMove(ports, paymentId, payment, attempt, move, index === 0, deadline);
        if ('why' in found) return found;
        if (found.outcome === 'rejected') rejected = true;
        if (found.outcome === 'returned') {
          const { outcome: _, ...returned } = found;
          commands.push({ type: 'RecordLegReturned', at: at(), attemptId, leg: move.leg, ...returned });
        }
      }
      commands.push({ type: 'EndReversal', at: at(), attemptId, unfinished: rejected ? 'rejected' : 'never_executed' });
      await streams.execute(loaded, commands, origin, deadline);
      return 'resolved';
    } catch (error) {
      if (!(error instanceof Conflict)) throw error;
    }
  }
  return UNREACHABLE;
};

type FoundMove =
  ({ readonly outcome: 'returned' } & ReversalTxn & { readonly means: Means }) | { readonly outcome: 'rejected' | 'never' } | StillOpen;

/** When the attempt was fenced, RFC 3339. null: it was not. */
const fencedSince = async ({ streams }: PaymentPorts, paymentId: string, { attemptId }: ReversalAttempt): Promise<string | null> => {
  const fence = (await streams.events(paymentId)).find(
    ({ type, data }) => type === 'ReconciliationStarted' && (data as { readonly attemptId?: unknown }).attemptId === attemptId,
  );
  return fence?.meta.recordedAt ?? null;
};

/** Finds out what became of one leg of a fenced attempt. `isUnderWay`: a request may have sent it. */
const findMove = async (
  ports: PaymentPorts,
  paymentId: string,
  payment: Charged,
  attempt: ReversalAttempt,
  move: LegMove,
  isUnderWay: boolean,
  deadline: Deadline,
): Promise<FoundMove> => {
  const leg = payment.legs.find((charge) => charge.leg === move.leg)!;
  const gateway = gatewayOf(ports, leg);
  let rejected = false;
  let returned: FoundMove | null = null;
  let open: StillOpen | null = null;
  const unseen: Means[] = [];
  // A reference that the operation cannot use was never sent, and never will be.
  for (const means of meansOf(attempt)) {
    const found = await finalizeReference(ports, gateway, aboutMove(payment, attempt, leg, move, means), deadline);
    if (found.kind === 'undone') returned = { outcome: 'returned', means, transactionId: found.transactionId };
    else if (found.kind === 'cannot_tell') {
      // Only where the gateway shows no trace may the call be sent again, or taken as not sent.
      if (found.why !== 'not_visible') return stillOpen(found);
      open = stillOpen(found);
      unseen.push(means);
    } else if (found.kind === 'executed') {
      const { result } = found;
      // The other reference is finalised all the same (C61).
      if (result.kind === 'approved') returned = returnedBy(means, result.txn);
      else if (result.kind === 'rejected') rejected = true;
      else if (result.kind === 'unknown' || result.kind === 'held') return UNREACHABLE;
    }
  }
  if (returned !== null) return returned;
  if (open === null) return { outcome: rejected ? 'rejected' : 'never' };
  if (!isUnderWay) {
    const fencedAt = await fencedSince(ports, paymentId, attempt);
    return fencedAt !== null && ageMs(ports.clock, fencedAt) >= NOTHING_IS_SENT_AFTER_MS ? { outcome: 'never' } : open;
  }
  // A reference that the gateway has promised never to execute must not be sent either.
  const maySend = (means: Means) => unseen.includes(means) && isRepeatSafe(ports, attempt, gateway.capabilities, means);
  // If the batch closed before the void, the request went on with a refund. It never goes from a refund to a void: a void returns the whole charge.
  const isRefunding = move.means === 'void' && !unseen.includes('void');
  return repeatMove(ports, payment, attempt, isRefunding ? { ...move, means: 'refund' } : move, open, maySend, deadline);
};

export const stillOpen = ({ kind: _, ...open }: Extract<Finalized<unknown>, { kind: 'cannot_tell' }>): StillOpen => open;

const returnedBy = (means: Means, txn: ReversalTxn) => ({ outcome: 'returned', means, ...txn }) as const;

/** Sends the call of the leg again, under its reference (C72). */
const repeatMove = async (
  ports: PaymentPorts,
  payment: Charged,
  attempt: ReversalAttempt,
  move: LegMove,
  open: StillOpen,
  maySend: (means: Means) => boolean,
  deadline: Deadline,
): Promise<FoundMove> => {
  const { outcome, means } = await moveLeg(ports, payment, attempt, move, null, deadline, endOf(ports, deadline), maySend);
  switch (outcome.kind) {
    case 'approved':
      return returnedBy(means, outcome.txn);
    case 'rejected':
      // The first call may have returned the money, although the gateway does not show it yet.
      return outcome.why === 'finalised' || mayBeOwn(outcome.why) ? open : { outcome: 'rejected' };
    case 'declined':
      return { outcome: 'never' };
    case 'not_processed':
      return outcome.answered ? { outcome: 'never' } : open;
    default:
      return open;
  }
};

/** The call that asks about the void or refund of a leg. */
const aboutMove = (payment: Charged, { requestedAt }: ReversalAttempt, charge: ChargedLeg, move: LegMove, means: Means): ReferenceCall => ({
  ref: move.references[means],
  op: means,
  leg: charge.leg,
  account: charge.account,
  begunAt: requestedAt,
  amountCents: cents(move),
  chargeTransactionId: charge.transactionId,
  last4: last4Of(payment, charge) || null,
});

/**
 * Finalises a reference within the deadline and the time limit of one gateway call. Checks the log first, since the caller decides by events that it
 * read from the log. Throws {@link StoreIncident} if events are lost.
 */
export const finalizeReference = async (
  ports: PaymentPorts,
  gateway: PaymentGateway,
  call: ReferenceCall,
  deadline: Deadline,
): Promise<Finalized<ChargeTxn | ReversalTxn>> => {
  const cannotTell: Finalized<never> = { kind: 'cannot_tell', why: 'unreachable' };
  if (!(await isVerified(ports, deadline, null))) return cannotTell;
  const limit = Math.min(GATEWAY_CALL_MS, deadline.leftMs);
  return limit <= 0
    ? cannotTell
    : duringOf(ports)(() =>
        bounded(
          ports.clock,
          limit,
          (signal) => gateway.finalize(call, signal),
          () => cannotTell,
        ),
      );
};
