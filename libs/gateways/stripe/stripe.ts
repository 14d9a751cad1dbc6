/**
 * The adapter of Stripe: one object for each merchant account. For each call that returns, only this file decides the outcome.
 *
 * A charge has two steps. The first one creates a payment intent under the reference; a second creation under the same key gives the same intent. The
 * second one confirms it. No money moves before, so a lost answer to the first step means that nothing happened.
 *
 * | event | charge, second step | refund |
 * |---|---|---|
 * | no byte was sent | `not_processed`, answered false | the same |
 * | `succeeded` in full, of this intent and reference | `approved` | `approved`; if `pending` or `requires_action`, with `pending` |
 * | an error of the card, and an intent that has not succeeded and is not processing | `declined` | |
 * | the method of payment is unknown, expired or used, and no charge was tried | `declined`, `invalid_token` | |
 * | the intent was canceled, or the key was used up, by `finalize` | `rejected`, finalised | the same |
 * | another refusal of the request | `not_processed`, answered true | `rejected` |
 * | refused credentials | `not_processed`, answered false, and a line in the log | the same |
 * | 429, whatever its code, after three tries | `not_processed`, answered false | the same |
 * | one of the tries got 409, so a request under the same key was in progress, and the last one was refused | `unknown` | the same |
 * | processing, no answer, 5xx, and anything else | `unknown` | the same |
 *
 * A key lives for at least 24 hours at Stripe and is bound to the endpoint of its first use. `finalize` rests on both.
 */
import type { Cents } from '#kernel';
import { timestamp } from '#kernel';
import type {
  ChargeCall,
  ChargeTxn,
  Check,
  DeclineCode,
  Finalized,
  GatewayCapabilities,
  LookedUp,
  NamedTransaction,
  Outcome,
  PaymentGateway,
  Ref,
  ReferenceCall,
  RefundCall,
  ReversalTxn,
  TransactionState,
  VoidCall,
} from '#payments';
import { type GatewayOptions, latestCharge, latestOf, transportOf } from '../transport/options.js';
import { createPace } from '../transport/pace.js';
import { type Answered, type CallTerms, createStripeClient, type Refusal, type StripeCall } from './client.js';
import { createFeeds, MAX_PAGES, StripeUnanswered } from './feeds.js';
import { type Fields, fieldsOf, idOf, isFields, textOf, wholeOf } from './fields.js';

export const STRIPE_ENDPOINT = 'https://api.stripe.com';

const HOUR_MS = 3_600_000;
/** Stripe keeps a key for at least 24 hours. */
const KEY_KEPT_MS = 24 * HOUR_MS;
/** Until then, a request under a key counts on the key. The rest is for clocks that differ and for slow calls. */
const KEY_SAFE_MS = 23 * HOUR_MS;
/** From then on, a request under a key counts as the first one under it. The rest is as above. */
const KEY_GONE_MS = 25 * HOUR_MS;
/** Stripe creates its intent at most this long before or after our own intent, by the two clocks. The check compares the clocks (g1). */
const CREATED_WITHIN_MS = HOUR_MS;
/** Pauses before the second and the third try of a request that was refused only for now. */
const PAUSES_MS = [250, 1_000] as const;
/** Of one list. Stripe's maximum. */
const PAGE = 100;

/** Stripe's words, as partners know them. Every other word is `generic_decline`. */
const DECLINES: Readonly<Record<string, DeclineCode>> = {
  insufficient_funds: 'insufficient_funds',
  card_velocity_exceeded: 'card_limit_exceeded',
  withdrawal_count_limit_exceeded: 'card_limit_exceeded',
  expired_card: 'expired_card',
  invalid_expiry_month: 'expired_card',
  invalid_expiry_year: 'expired_card',
  incorrect_cvc: 'cvv_mismatch',
  invalid_cvc: 'cvv_mismatch',
  incorrect_zip: 'postal_code_mismatch',
  incorrect_address: 'postal_code_mismatch',
};
/** Stripe took the refund and has not carried it out. */
const PENDING: readonly string[] = ['pending', 'requires_action'];
const CHECKS: Readonly<Record<string, Check>> = { pass: 'match', fail: 'no_match' };

const CAPABILITIES: GatewayCapabilities = {
  rawCard: false,
  cardToken: true,
  tokenReusable: false,
  maxCardDigits: 19,
  minAmountCents: 50,
  maxAmountCents: 99_999_999,
  partialVoid: false,
  refundUnsettled: true,
  voids: 'none',
  finalize: 'at_once',
  finalizeReversal: 'at_once',
  repeatSafeMs: { void: 0, refund: KEY_SAFE_MS },
  settlement: 'payouts',
  lateAfterDays: 10,
  disputes: 'poll',
};

export interface StripeGatewayOptions extends GatewayOptions {
  readonly credentials: { readonly secretKey: string };
  /**
   * False: a check has found that this account's keys are not bound to the endpoint of their first use. Then `finalize` of a refund waits until the
   * key is gone. Default true.
   */
  readonly keysAreBound?: boolean;
}

/** The answer of the last try. `keyInUse`: a request under the same key was in progress during one of the tries. */
interface Tried {
  readonly answered: Answered;
  readonly keyInUse: boolean;
}

const KEY_IN_USE = 'idempotency_key_in_use';
/** A refusal that holds only for now: nothing was executed. */
const isBusy = (answered: Answered): boolean => answered.kind === 'refused' && (answered.status === 429 || isKeyInUse(answered));
/** 409 Conflict: "perhaps due to using the same idempotent key". Older answers have no code. */
const isKeyInUse = ({ status, code }: Refusal): boolean => status === 409 || code === KEY_IN_USE;
const isOfCredentials = ({ status }: Refusal): boolean => status === 401 || status === 403;
const isOfKey = (refusal: Refusal): boolean => refusal.type === 'idempotency_error' && !isKeyInUse(refusal);
/** The token names no card that can be charged: it is unknown, expired or used. */
const isOfToken = ({ code, param, isUsedUp }: Refusal): boolean =>
  TOKEN_CODES.includes(code) || (code === 'resource_missing' && param === 'payment_method') || isUsedUp;
const TOKEN_CODES: readonly string[] = ['token_already_used', 'expired_payment_method', 'payment_method_unexpected_state'];
/** States of an intent that has taken no money. */
const NOTHING_TAKEN: readonly string[] = ['requires_payment_method', 'canceled'];

const rawOf = ({ status, type, code, declineCode }: Refusal): string => declineCode || code || type || `HTTP ${status}`;

const refOf = (thing: Fields): string | null => textOf(fieldsOf(thing.metadata).payfold_ref) || null;

const declineOf = (code: string, declineCode: string): { code: DeclineCode; raw?: string } => ({
  code: DECLINES[declineCode] ?? DECLINES[code] ?? 'generic_decline',
  ...((declineCode || code) && { raw: declineCode || code }),
});

const checksOf = (charge: Fields): Pick<ChargeTxn, 'avs' | 'cvv'> => {
  const checks = fieldsOf(fieldsOf(fieldsOf(charge.payment_method_details).card).checks);
  const check = (value: unknown): Check => CHECKS[textOf(value)] ?? 'not_checked';
  return { avs: check(checks.address_postal_code_check), cvv: check(checks.cvc_check) };
};

const txnOf = (intentId: string, charge: Fields): ChargeTxn => {
  const card = fieldsOf(fieldsOf(charge.payment_method_details).card);
  const [brand, last4, authCode] = [textOf(card.brand).toLowerCase(), textOf(card.last4), textOf(card.authorization_code)];
  return {
    transactionId: intentId,
    // Some networks give no code, and older versions of the API do not show it.
    authCode: /^[0-9A-Za-z]{1,32}$/.test(authCode) ? authCode : '',
    ...checksOf(charge),
    ...(/^\d{4}$/.test(last4) && { card: { brand: /^[a-z_]{1,32}$/.test(brand) ? brand : 'unknown', last4 } }),
  };
};

export const createStripeGateway = (options: StripeGatewayOptions): PaymentGateway => {
  const { endpoint, account, clock, credentials, keysAreBound = true, log = () => undefined, onRefusedCredentials } = options;
  const client = createStripeClient(endpoint, credentials.secretKey, transportOf(options));
  const isLive = account.environment === 'production';

  /** Makes a call, and repeats it twice while it is refused only for now. */
  const patiently = async (make: StripeCall, terms: CallTerms): Promise<Tried> => {
    let keyInUse = false;
    for (let tried = 0; ; tried += 1) {
      const answered = await client.call(make, terms);
      const busy = isBusy(answered);
      keyInUse ||= answered.kind === 'refused' && isKeyInUse(answered);
      if (answered.kind === 'refused' && isOfCredentials(answered)) {
        log('Stripe refuses the credentials of a merchant account', { merchantAccount: account.merchantAccount, status: answered.status });
        // 403: the key lacks one permission, and the calls that need others go on.
        onRefusedCredentials?.({ isWhole: answered.status === 401 });
      }
      const pauseMs = PAUSES_MS[tried];
      if (!busy || pauseMs === undefined) return { answered, keyInUse };
      await clock.sleep(pauseMs, terms.signal);
      if (terms.signal.aborted) return { answered, keyInUse };
    }
  };

  /** The outcome of a refusal that is the same for charges and refunds. null: the caller must judge it. */
  const refusedOf = (tried: Tried): Outcome<never> | null => {
    const { answered, keyInUse } = tried;
    if (answered.kind === 'ok') return null;
    if (answered.kind === 'unknown') return answered;
    // A request in progress under our key may still be executed. So no try after it can promise that nothing happened.
    const nothing = (raw: string): Outcome<never> =>
      keyInUse ? { kind: 'unknown', cause: 'timeout', raw: KEY_IN_USE } : { kind: 'not_processed', answered: false, raw };
    if (answered.kind === 'not_sent') return nothing(answered.raw);
    return isBusy(answered) || isOfCredentials(answered) ? nothing(rawOf(answered)) : null;
  };

  // ---- Charges ------------------------------------------------------------------------------------------------------------------

  const create =
    (ref: Ref, amountCents: Cents): StripeCall =>
    (stripe, terms) =>
      stripe.paymentIntents.create(
        // The same reference and amount must always give the same body: Stripe compares it with the first one under the key.
        { amount: amountCents, currency: 'usd', allowed_payment_method_types: ['card'], capture_method: 'automatic', metadata: { payfold_ref: ref } },
        terms,
      );

  const retrieve =
    (intentId: string): StripeCall =>
    (stripe, terms) =>
      stripe.paymentIntents.retrieve(intentId, { expand: ['latest_charge'] }, terms);

  /** True if the intent is of this reference and amount. */
  const isOf = (intent: Fields, ref: Ref, amountCents: Cents): boolean =>
    textOf(intent.object) === 'payment_intent' &&
    idOf(intent.id) !== null &&
    refOf(intent) === ref &&
    wholeOf(intent.amount) === amountCents &&
    textOf(intent.currency) === 'usd' &&
    (typeof intent.livemode !== 'boolean' || intent.livemode === isLive);

  /** The transaction of an intent that has succeeded. null: it cannot be read, or less than the amount was received. */
  const succeededOf = (intent: Fields, ref: Ref, amountCents: Cents): ChargeTxn | null => {
    const id = idOf(intent.id);
    const charge = fieldsOf(intent.latest_charge);
    const isWhole =
      isOf(intent, ref, amountCents) &&
      textOf(intent.status) === 'succeeded' &&
      wholeOf(intent.amount_received) === amountCents &&
      idOf(intent.latest_charge) !== null &&
      (charge.status === undefined || (charge.status === 'succeeded' && wholeOf(charge.amount) === amountCents));
    return isWhole && id !== null ? txnOf(id, charge) : null;
  };

  const charge = async ({ ref, amountCents, instrument, begunAt }: ChargeCall, signal: AbortSignal): Promise<Outcome<ChargeTxn>> => {
    if (instrument.type !== 'card_token') return { kind: 'not_processed', answered: false, raw: 'this gateway takes tokens only' };
    const token = instrument.token.reveal();
    const notAfterMs = latestCharge(begunAt);

    const { answered: created, keyInUse } = await patiently(create(ref, amountCents), { signal, key: ref, notAfterMs });
    // Somebody else charges under this reference, so this call cannot say that nothing happens.
    if (keyInUse && created.kind !== 'ok') return { kind: 'unknown', cause: 'timeout', raw: KEY_IN_USE };
    if (created.kind === 'refused' && isOfKey(created)) return { kind: 'rejected', why: 'other', raw: rawOf(created) };
    if (created.kind === 'refused' && !isBusy(created) && !isOfCredentials(created))
      return { kind: 'not_processed', answered: true, raw: rawOf(created) };
    // This call confirms nothing, so nothing has happened, whatever became of this request.
    if (created.kind === 'refused') return { kind: 'not_processed', answered: false, raw: rawOf(created) };
    if (created.kind !== 'ok') return { kind: 'not_processed', answered: false, raw: created.raw };
    const intentId = idOf(created.value.id);
    if (!isOf(created.value, ref, amountCents) || intentId === null)
      return { kind: 'not_processed', answered: false, raw: 'the created intent cannot be read' };

    const confirm: StripeCall = (stripe, terms) =>
      stripe.paymentIntents.confirm(intentId, { payment_method: token, error_on_requires_action: true, expand: ['latest_charge'] }, terms);
    const tried = await patiently(confirm, { signal, key: `${ref}-confirm`, notAfterMs });
    return refusedOf(tried) ?? confirmedOf(tried.answered, intentId, ref, amountCents);
  };

  const confirmedOf = (answered: Answered, intentId: string, ref: Ref, amountCents: Cents): Outcome<ChargeTxn> => {
    if (answered.kind === 'ok') {
      const txn = idOf(answered.value.id) === intentId ? succeededOf(answered.value, ref, amountCents) : null;
      if (txn) return { kind: 'approved', txn };
      const isProcessing = answered.value.status === 'processing';
      return { kind: 'unknown', cause: isProcessing ? 'timeout' : 'unreadable', raw: isProcessing ? 'processing' : 'an intent that cannot be read' };
    }
    if (answered.kind !== 'refused') return { kind: 'unknown', cause: 'unreadable', raw: answered.raw };
    const { status, type, code, declineCode, intent } = answered;
    const isOfIntent = intent === null || idOf(intent.id) === intentId;
    const state = intent === null ? '' : textOf(intent.status);
    if (!isOfIntent) return { kind: 'unknown', cause: 'unreadable', raw: 'an error of another intent' };
    // An error of the card beside an intent that took or may take the money is a contradiction.
    const tookNothing = intent === null || NOTHING_TAKEN.includes(state);
    if (status === 402 && type === 'card_error' && tookNothing)
      return { kind: 'declined', decline: declineOf(code, declineCode), transactionId: intentId };
    if (state === 'canceled') return { kind: 'rejected', why: 'finalised', raw: code };
    // An intent that waits for a method has moved no money.
    const isIdle = intent === null ? code !== 'payment_intent_unexpected_state' : state === 'requires_payment_method';
    const isUntried = isIdle && textOf(intent?.latest_charge) === '';
    if (type === 'invalid_request_error' && isUntried && isOfToken(answered))
      return { kind: 'declined', decline: { code: 'invalid_token', raw: rawOf(answered) } };
    if (type === 'invalid_request_error' && isIdle) return { kind: 'not_processed', answered: true, raw: rawOf(answered) };
    return { kind: 'unknown', cause: 'unreadable', raw: rawOf(answered) };
  };

  // ---- Refunds ------------------------------------------------------------------------------------------------------------------

  const makeRefund =
    (ref: Ref, intentId: string, amountCents: Cents | undefined): StripeCall =>
    (stripe, terms) =>
      stripe.refunds.create(
        { payment_intent: intentId, ...(amountCents !== undefined && { amount: amountCents }), metadata: { payfold_ref: ref } },
        terms,
      );

  /** A key that was used only at this time can be used anew. false if it is no time. */
  const isGone = (begunMs: number): boolean => clock.now() - begunMs > KEY_GONE_MS;

  /** The outcome that a refund shows. null: it cannot be read. */
  const refundedOf = (refund: Fields, ref: Ref, intentId: string, amountCents: Cents | undefined): Outcome<ReversalTxn> | null => {
    const id = idOf(refund.id);
    const isWhole =
      id !== null &&
      refOf(refund) === ref &&
      idOf(refund.payment_intent) === intentId &&
      (amountCents === undefined ? wholeOf(refund.amount) !== null : wholeOf(refund.amount) === amountCents);
    if (!isWhole) return null;
    const status = textOf(refund.status);
    if (status === 'succeeded' || PENDING.includes(status))
      return { kind: 'approved', txn: { transactionId: id, ...(status !== 'succeeded' && { pending: true }) } };
    return status === 'failed' || status === 'canceled' ? { kind: 'rejected', why: 'other', raw: `refund ${status}` } : null;
  };

  const outcomeOfRefund = (tried: Tried, ref: Ref, intentId: string, amountCents: Cents | undefined): Outcome<ReversalTxn> => {
    const common = refusedOf(tried);
    if (common) return common;
    const { answered } = tried;
    const unreadable = { kind: 'unknown', cause: 'unreadable', raw: 'a refund that cannot be read' } as const;
    if (answered.kind === 'ok') return refundedOf(answered.value, ref, intentId, amountCents) ?? unreadable;
    if (answered.kind !== 'refused') return unreadable;
    const { type, code, param } = answered;
    const rejected = (why: Extract<Outcome<never>, { kind: 'rejected' }>['why']) => ({ kind: 'rejected', why, raw: rawOf(answered) }) as const;
    if (isOfKey(answered)) return rejected('finalised');
    if (type !== 'invalid_request_error') return { ...unreadable, raw: rawOf(answered) };
    if (code === 'charge_already_refunded') return rejected('already_reversed');
    if (code === 'resource_missing') return rejected('not_found');
    // Stripe gives no code for more than what is left. It names the parameter.
    return rejected(param === 'amount' ? 'exceeds' : 'other');
  };

  const refund = async (
    {
      ref,
      chargeTransactionId,
      amountCents,
      begunAt,
      notAfter,
    }: Pick<RefundCall, 'ref' | 'chargeTransactionId' | 'begunAt' | 'notAfter'> & { readonly amountCents?: Cents },
    signal: AbortSignal,
  ): Promise<Outcome<ReversalTxn>> => {
    // Without its key a refund would return the money twice. So none is sent when the key may be gone. NaN, and so never, if `begunAt` is no time.
    const notAfterMs = Math.min(Date.parse(begunAt) + KEY_SAFE_MS, latestOf(notAfter) ?? Infinity);
    const tried = await patiently(makeRefund(ref, chargeTransactionId, amountCents), { signal, key: ref, notAfterMs });
    return outcomeOfRefund(tried, ref, chargeTransactionId, amountCents);
  };

  const asReversal = (outcome: Outcome<ReversalTxn>): Outcome<ReversalTxn> =>
    outcome.kind === 'approved' ? { ...outcome, txn: { ...outcome.txn, means: 'refund' } } : outcome;

  /**
   * The taking back of a charge has one reference for ever, and recovery may come to it days later. From {@link KEY_GONE_MS} after the payment began, the
   * refunds of the charge show first whether the money went back before. If it did not, the key is used anew. If the key is newer than the payment and
   * still lives, Stripe repeats the answer to its first use.
   */
  const takeBack = async (call: VoidCall, signal: AbortSignal): Promise<Outcome<ReversalTxn>> => {
    const { ref, chargeTransactionId, amountCents } = call;
    if (!isGone(Date.parse(call.begunAt))) return asReversal(await refund(call, signal));
    // Taken before the list is read, and the refund is sent within 23 hours of it. So if `finalize` uses the key up after the list, Stripe still knows that.
    const begunAt = timestamp(clock.now());
    try {
      const found = await refundOf(ref, chargeTransactionId, signal);
      const before = found && refundedOf(found, ref, chargeTransactionId, amountCents);
      if (before) return asReversal(before);
      if (found) return { kind: 'not_processed', answered: false };
    } catch (error) {
      if (error instanceof StripeUnanswered) return { kind: 'not_processed', answered: false };
      throw error;
    }
    // `finalize` could not use this key up. So it is never used anew, and a person must decide.
    if (!keysAreBound) return { kind: 'rejected', why: 'other', raw: 'the key is gone' };
    return asReversal(await refund({ ...call, begunAt }, signal));
  };

  // A charge is captured at once, so only a refund can undo it.
  const voided = async (call: VoidCall, signal: AbortSignal): Promise<Outcome<ReversalTxn>> =>
    call.askedBy === 'reversal' ? takeBack(call, signal) : { kind: 'rejected', why: 'already_settled', raw: 'this gateway has no voids' };

  // ---- What became of a reference -------------------------------------------------------------------------------------------------

  const unreachable = { kind: 'cannot_tell', why: 'unreachable' } as const;
  const inFlight = { kind: 'cannot_tell', why: 'in_flight' } as const;
  const notVisible = (untilMs: number): Finalized<never> => ({ kind: 'cannot_tell', why: 'not_visible', until: timestamp(untilMs) });
  /** The reference shows no trace. It can show none any more when its key is gone. */
  const absent = (begunMs: number): Finalized<never> => (clock.now() - begunMs > KEY_KEPT_MS ? { kind: 'never' } : notVisible(begunMs + KEY_KEPT_MS));

  /** Searches a list for our reference. null: it is not there. Throws {@link StripeUnanswered}. */
  const search = async (ref: Ref, list: (after: string | undefined) => StripeCall, signal: AbortSignal): Promise<Fields | null> => {
    let after: string | undefined;
    for (let page = 1; page <= MAX_PAGES; page += 1) {
      const { answered } = await patiently(list(after), { signal, isList: true });
      const data = answered.kind === 'ok' ? answered.value.data : undefined;
      if (answered.kind !== 'ok' || !(data === null || data === undefined || Array.isArray(data))) throw new StripeUnanswered('a list', answered);
      const items = (data ?? []).filter(isFields);
      const found = items.find((item) => refOf(item) === ref);
      if (found) return found;
      const last = idOf(items.at(-1)?.id);
      if (answered.value.has_more !== true) return null;
      if (last === null || last === after) throw new StripeUnanswered('a list without an end', answered);
      after = last;
    }
    throw new StripeUnanswered(`a list of at most ${MAX_PAGES} pages`, null);
  };
  const intentOf = (ref: Ref, begunMs: number, signal: AbortSignal): Promise<Fields | null> =>
    search(
      ref,
      (after) => (stripe, terms) =>
        stripe.paymentIntents.list(
          {
            limit: PAGE,
            created: { gte: Math.floor((begunMs - CREATED_WITHIN_MS) / 1_000), lte: Math.ceil((begunMs + CREATED_WITHIN_MS) / 1_000) },
            expand: ['data.latest_charge'],
            ...(after !== undefined && { starting_after: after }),
          },
          terms,
        ),
      signal,
    );
  const refundOf = (ref: Ref, intentId: string, signal: AbortSignal): Promise<Fields | null> =>
    search(
      ref,
      (after) => (stripe, terms) =>
        stripe.refunds.list({ limit: PAGE, payment_intent: intentId, ...(after !== undefined && { starting_after: after }) }, terms),
      signal,
    );

  const finalizeCharge = async ({ ref, amountCents }: ReferenceCall, begunMs: number, signal: AbortSignal): Promise<Finalized<ChargeTxn>> => {
    const keySafeUntilMs = begunMs + KEY_SAFE_MS;
    if (clock.now() <= keySafeUntilMs) {
      // Gives the intent of this reference. If there was none, it leaves one that nobody can confirm.
      const { answered } = await patiently(create(ref, amountCents), { signal, key: ref, notAfterMs: keySafeUntilMs });
      if (isBusy(answered)) return inFlight;
      if (answered.kind === 'ok') {
        const id = idOf(answered.value.id);
        return isOf(answered.value, ref, amountCents) && id !== null ? cancel(id, ref, amountCents, signal) : unreachable;
      }
      // A stored 500 is repeated until the key is gone. The list may still show the intent.
      const mayBeListed = answered.kind === 'refused' ? !isOfCredentials(answered) : answered.kind === 'unknown' && answered.cause === 'http_5xx';
      if (!mayBeListed) return unreachable;
    }
    const found = await intentOf(ref, begunMs, signal);
    if (!found) return absent(begunMs);
    const id = idOf(found.id);
    return id !== null && isOf(found, ref, amountCents) ? cancel(id, ref, amountCents, signal) : unreachable;
  };

  /** Cancels an intent without a key: under a key, a 500 would be repeated for 24 hours. */
  const cancel = async (intentId: string, ref: Ref, amountCents: Cents, signal: AbortSignal): Promise<Finalized<ChargeTxn>> => {
    const { answered } = await patiently((stripe, terms) => stripe.paymentIntents.cancel(intentId, {}, terms), { signal });
    if (isBusy(answered)) return inFlight;
    if (answered.kind === 'ok') return endOf(answered.value, intentId, ref, amountCents);
    if (answered.kind !== 'refused' || answered.code !== 'payment_intent_unexpected_state') return unreachable;
    const now = await patiently(retrieve(intentId), { signal });
    return now.answered.kind === 'ok' ? endOf(now.answered.value, intentId, ref, amountCents) : unreachable;
  };

  const endOf = (intent: Fields, intentId: string, ref: Ref, amountCents: Cents): Finalized<ChargeTxn> => {
    if (idOf(intent.id) !== intentId || !isOf(intent, ref, amountCents)) return unreachable;
    switch (textOf(intent.status)) {
      case 'canceled': {
        const error = intent.last_payment_error;
        if (!isFields(error) || Object.keys(error).length === 0) return { kind: 'never' };
        const decline = declineOf(textOf(error.code), textOf(error.decline_code));
        return { kind: 'executed', result: { kind: 'declined', decline, transactionId: intentId } };
      }
      case 'succeeded': {
        const txn = succeededOf(intent, ref, amountCents);
        return txn ? { kind: 'executed', result: { kind: 'approved', txn } } : unreachable;
      }
      default:
        return inFlight;
    }
  };

  /**
   * Uses the key of a refund up, at another endpoint. If that is accepted, the key can never refund. If the key is bound to the refund already, the
   * same refund under the same key gives its stored answer.
   *
   * The key of a taking back is used anew when it is gone (see `takeBack`). So if there is no refund, only a used-up key promises that none follows.
   */
  const finalizeRefund = async (call: ReferenceCall, intentId: string, begunMs: number, signal: AbortSignal): Promise<Finalized<ReversalTxn>> => {
    const { ref, op, amountCents } = call;
    const executed = (outcome: Outcome<ReversalTxn>): Finalized<ReversalTxn> => ({
      kind: 'executed',
      result: op === 'reversal' ? asReversal(outcome) : outcome,
    });
    const anew = op === 'reversal' && isGone(begunMs);
    const before = anew ? await refundOf(ref, intentId, signal) : null;
    const keySafeUntilMs = (anew ? clock.now() : begunMs) + KEY_SAFE_MS;
    if (keysAreBound && !before && clock.now() <= keySafeUntilMs) {
      const keyed = { signal, key: ref, notAfterMs: keySafeUntilMs };
      const close: StripeCall = (stripe, terms) => stripe.paymentIntents.update(intentId, { metadata: { payfold_closed: ref } }, terms);
      const { answered } = await patiently(close, keyed);
      if (isBusy(answered)) return inFlight;
      if (answered.kind === 'ok')
        return idOf(answered.value.id) === intentId && textOf(fieldsOf(answered.value.metadata).payfold_closed) === ref
          ? { kind: 'never' }
          : unreachable;
      if (answered.kind !== 'refused' || !isOfKey(answered)) return unreachable;
      // The key is bound to the refund, so this cannot be its first execution.
      const again = await patiently(makeRefund(ref, intentId, amountCents), keyed);
      if (isBusy(again.answered) || again.keyInUse) return inFlight;
      const outcome = outcomeOfRefund(again, ref, intentId, amountCents);
      const isFinal = outcome.kind === 'approved' || (outcome.kind === 'rejected' && outcome.why !== 'finalised');
      if (isFinal) return executed(outcome);
      // The stored answer is a 500, or the refund had other parameters. The list shows whether it was made.
    }
    const found = before ?? (await refundOf(ref, intentId, signal));
    if (!found) {
      if (op !== 'reversal' || !keysAreBound) return absent(begunMs);
      // The key is bound and gave no final answer, so it was used in the last 24 hours. When Stripe has forgotten it, it can be used up.
      return notVisible(anew ? clock.now() + KEY_GONE_MS : begunMs + KEY_GONE_MS);
    }
    const outcome = refundedOf(found, ref, intentId, amountCents);
    return outcome ? executed(outcome) : unreachable;
  };

  const finalize = async (call: ReferenceCall, signal: AbortSignal): Promise<Finalized<ChargeTxn | ReversalTxn>> => {
    const begunMs = Date.parse(call.begunAt);
    if (Number.isNaN(begunMs)) return unreachable;
    try {
      if (call.op === 'charge') return await finalizeCharge(call, begunMs, signal);
      // A void makes no call, and without a charge there is nothing to refund.
      if (call.op === 'void' || call.chargeTransactionId === null) return { kind: 'never' };
      return await finalizeRefund(call, call.chargeTransactionId, begunMs, signal);
    } catch (error) {
      if (error instanceof StripeUnanswered) return unreachable;
      throw error;
    }
  };

  /** `latest_charge` of the intent is expanded. */
  const stateOf = (intent: Fields): TransactionState | null => {
    const hasFailed = isFields(intent.last_payment_error) && Object.keys(intent.last_payment_error).length > 0;
    switch (textOf(intent.status)) {
      case 'succeeded': {
        // A charge that was refunded in full counts as undone.
        const refunded = wholeOf(fieldsOf(intent.latest_charge).amount_refunded) ?? 0;
        return refunded > 0 && refunded === wholeOf(intent.amount) ? 'voided' : 'approved';
      }
      case 'canceled':
      case 'requires_payment_method':
        return hasFailed ? 'declined' : null;
      default:
        return null;
    }
  };
  const stateOfRefund = (one: Fields): TransactionState | null =>
    ['succeeded', ...PENDING].includes(textOf(one.status)) ? 'approved' : ['failed', 'canceled'].includes(textOf(one.status)) ? 'declined' : null;

  const lookup = async (call: ReferenceCall, signal: AbortSignal): Promise<LookedUp | { readonly found: 'cannot_tell' }> => {
    const { ref, op, begunAt, chargeTransactionId } = call;
    const begunMs = Date.parse(begunAt);
    if (op === 'void' || (op !== 'charge' && chargeTransactionId === null)) return { found: false };
    if (Number.isNaN(begunMs)) throw new StripeUnanswered('a look-up without a time', null);
    const thing = op === 'charge' ? await intentOf(ref, begunMs, signal) : await refundOf(ref, chargeTransactionId!, signal);
    if (!thing) return { found: false };
    const [id, amountCents] = [idOf(thing.id), wholeOf(thing.amount)];
    if (id === null || amountCents === null) throw new StripeUnanswered('a transaction that cannot be read', null);
    const state = op === 'charge' ? stateOf(thing) : stateOfRefund(thing);
    if (state !== null) return { found: true, state, transactionId: id, amountCents };
    // An intent that was never confirmed is no transaction.
    return ['canceled', 'requires_payment_method', 'requires_confirmation'].includes(textOf(thing.status))
      ? { found: false }
      : { found: 'cannot_tell' };
  };

  const transaction = async (transactionId: string, signal: AbortSignal): Promise<NamedTransaction | null> => {
    const isCharge = /^pi_/.test(transactionId);
    if (idOf(transactionId) === null || !(isCharge || /^(re|pyr)_/.test(transactionId))) return null;
    const { answered } = await patiently(isCharge ? retrieve(transactionId) : (stripe, terms) => stripe.refunds.retrieve(transactionId, {}, terms), {
      signal,
    });
    if (answered.kind === 'refused' && answered.code === 'resource_missing') return null;
    const thing = answered.kind === 'ok' ? answered.value : {};
    const amountCents = wholeOf(thing.amount);
    if (idOf(thing.id) !== transactionId || amountCents === null) throw new StripeUnanswered('a transaction', answered);
    const state = isCharge ? stateOf(thing) : stateOfRefund(thing);
    if (state === null) {
      if (isCharge && textOf(thing.status) !== 'processing') return null;
      throw new StripeUnanswered('a transaction that is being processed', answered);
    }
    return {
      transactionId,
      ref: refOf(thing),
      op: isCharge ? 'charge' : 'refund',
      state,
      amountCents,
      chargeTransactionId: isCharge ? null : idOf(thing.payment_intent),
      ...(!isCharge && PENDING.includes(textOf(thing.status)) && { pending: true }),
    };
  };

  return {
    capabilities: keysAreBound ? CAPABILITIES : { ...CAPABILITIES, finalizeReversal: 'later' },
    endpoint,
    charge,
    void: voided,
    refund,
    finalize,
    lookup,
    transaction,
    ...createFeeds({
      clock,
      pace: createPace(clock, options.listGapMs),
      patiently: async (make, terms) => (await patiently(make, terms)).answered,
      merchantAccount: account.merchantAccount,
      log,
    }),
    close: () => client.close(),
  };
};
