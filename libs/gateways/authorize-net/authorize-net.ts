/**
 * The adapter of Authorize.Net, over its JSON API.
 *
 * - A charge carries our reference as invoice number, and the longest window for duplicates. So the vendor executes a reference once. If it answers
 *   "duplicate", the transaction of our reference is read, and never taken for a decline.
 * - The vendor has no question for one reference. A lost answer is found in its lists ({@link Scans}).
 * - That a charge was never made is certain only after its batch has closed and is settled ({@link decidedBy}). No byte of a charge is sent later than
 *   55 s after its intent; `never` rests on this.
 * - A void carries no reference of ours. The charge's own state says whether it was voided.
 *
 * `outcomes.ts` says what each answer means. An answer that repeats the card number or the transaction key is unreadable, and is not quoted.
 */
import { type Cents, MAX_AMOUNT_CENTS, timestamp } from '#kernel';
import type {
  AccountDescription,
  ChargeTxn,
  Finalized,
  GatewayCapabilities,
  LookedUp,
  NamedTransaction,
  Op,
  Outcome,
  PaymentGateway,
  ReferenceCall,
  ReversalTxn,
} from '#payments';
import { clockProblems } from '../transport/clocks.js';
import { type Exchange, LIST_ANSWER_BYTES, MONEY_ANSWER_BYTES } from '../transport/exchange.js';
import { type GatewayOptions, latestCharge, latestOf, transportOf } from '../transport/options.js';
import { createPace } from '../transport/pace.js';
import { type Fields, idOf, isOk, messageCode, plainTextOf, readAnswer, textOf } from './answers.js';
import { type CutOff, decidedBy, type Decision } from './cut-off.js';
import { DUPLICATE, MAY_STAND, REFUSALS, TEST_MODE } from './codes.js';
import {
  chargeAnswer,
  chargeFromDetails,
  detailsOf,
  isOfTestMode,
  rawOf,
  readTransaction,
  type TransactionAnswer,
  type TransactionDetails,
} from './outcomes.js';
import { type Credentials, requestsOf } from './requests.js';
import { type Scan, type ScanAnswer, type ScanQuestion, Scans } from './scans.js';
import { OUR_REF, settledBatches } from './settlements.js';

/** The whole URL of the vendor's API. */
export const AUTHORIZE_NET_ENDPOINTS = {
  sandbox: 'https://apitest.authorize.net/xml/v1/request.api',
  production: 'https://api.authorize.net/xml/v1/request.api',
} as const;

const MINUTE_MS = 60_000;
const HOUR_MS = 60 * MINUTE_MS;
/** The window for duplicates is 8 h. The rest is for clocks that differ. */
const REFUND_REPEAT_MS = 7.5 * HOUR_MS;
/** While lists are refused, a charge asks for them again after this long. */
const PROBE_MS = 30_000;
/** If a scan cannot decide because a batch is late, the answer names a time this much later. Recovery keeps the first time that was named. */
const LATE_BATCH_MS = 30 * MINUTE_MS;

const DETAILS_API_OFF = 'E00011';
const NOT_FOUND = 'E00040';
/** Voided already, captured already, not found. */
const VOID_NEEDS_DETAILS: readonly number[] = [16, 310, 311];
/** The vendor cannot refund it, or not that much. */
const CREDITS_EXCEED = 55;
const REFUND_NEEDS_DETAILS: readonly number[] = [54, CREDITS_EXCEED];

export const DETAILS_API_PROBLEM =
  'The setting "Transaction Details API" is off: turn it on in the merchant interface under Account > Settings > Security Settings > General Security Settings.';

export interface AuthorizeNetOptions extends GatewayOptions {
  readonly credentials: Credentials;
  /** When the day's batch closes. null: not known. */
  readonly cutOff: CutOff | null;
  /** True: the newest full check has shown that the window for duplicates covers refunds (guarantee g8). Default false. */
  readonly refundsOnce?: boolean;
}

/** The vendor did not answer a question, or its answer could not be read. */
export class AuthorizeNetUnreachable extends Error {
  constructor(what: string) {
    super(`Authorize.Net did not answer: ${what}`);
    this.name = 'AuthorizeNetUnreachable';
  }
}

/** The vendor refused a question. `code`: such as E00007 or E00040. */
export class AuthorizeNetRefused extends Error {
  constructor(
    readonly code: string,
    message = `Authorize.Net refused the question: ${code}`,
  ) {
    super(message);
    this.name = 'AuthorizeNetRefused';
  }
}

type Lookup = { readonly kind: 'details'; readonly details: TransactionDetails } | { readonly kind: 'none' } | { readonly kind: 'unreadable' };

/** The adapter of one merchant account. `endpoint`: the whole URL of the API. */
export const createAuthorizeNetGateway = (options: AuthorizeNetOptions): PaymentGateway => {
  const { endpoint, account, clock, credentials, cutOff, refundsOnce = false, log = () => undefined } = options;
  const { onRefusedCredentials, onRefusedLists, onTestMode } = options;
  const transport = transportOf(options);
  const requests = requestsOf(credentials);
  const url = new URL(endpoint);
  const path = url.pathname + url.search;
  /** Since when lists have been refused, and when they were asked for last (monotonic). null: they are answered. */
  let listsRefused: { probedAt: number } | null = null;

  const alarm = (message: string, fields: object = {}) => log(message, { merchantAccount: account.merchantAccount, ...fields });
  const noteRefusal = (code: string) => {
    if (code === TEST_MODE) noteTestMode();
    if (REFUSALS[code]?.of !== 'account') return;
    alarm('Authorize.Net refuses the credentials of a merchant account');
    onRefusedCredentials?.({ isWhole: true });
  };
  const noteTestMode = () => {
    alarm('Authorize.Net answers in test mode, so no money moves');
    onTestMode?.();
  };

  const send = (body: string, signal: AbortSignal, maxAnswerBytes: number, notAfterMs?: number): Promise<Exchange> =>
    transport.exchange({ method: 'POST', path, headers: {}, body, signal, maxAnswerBytes, ...(notAfterMs !== undefined && { notAfterMs }) });

  /** The answer as JSON. null: it is none, or it repeats a secret. */
  const readableAnswer = (text: string, secrets: readonly string[]): Fields | null =>
    [credentials.transactionKey, ...secrets].some((secret) => secret !== '' && text.includes(secret)) ? null : readAnswer(text);

  /** Asks a question that changes nothing. Throws {@link AuthorizeNetUnreachable} or {@link AuthorizeNetRefused}. */
  const askWithHeaders = async (body: string, signal: AbortSignal): Promise<{ readonly answer: Fields; readonly date: string | undefined }> => {
    const exchanged = await send(body, signal, LIST_ANSWER_BYTES);
    if (exchanged.kind !== 'answer') throw new AuthorizeNetUnreachable(exchanged.raw);
    const answer = exchanged.status === 200 ? readableAnswer(exchanged.text, []) : null;
    if (!answer) throw new AuthorizeNetUnreachable(`HTTP ${exchanged.status}, unreadable`);
    if (isOk(answer)) return { answer, date: exchanged.headers.date };
    const code = messageCode(answer);
    noteRefusal(code);
    throw /^[EI]\d{5}$/.test(code) ? new AuthorizeNetRefused(code) : new AuthorizeNetUnreachable('an answer without a code');
  };
  const ask = async (body: string, signal: AbortSignal): Promise<Fields> => (await askWithHeaders(body, signal)).answer;

  /** Asks for a list, and remembers whether the vendor answers lists at all. */
  const list = async (body: string, signal: AbortSignal): Promise<Fields> => {
    try {
      const answer = await ask(body, signal);
      listsRefused = null;
      return answer;
    } catch (error) {
      if (error instanceof AuthorizeNetRefused && error.code === NOT_FOUND) listsRefused = null;
      if (error instanceof AuthorizeNetRefused && error.code === DETAILS_API_OFF) {
        if (!listsRefused) alarm(`No new charges: ${DETAILS_API_PROBLEM}`);
        listsRefused = { probedAt: clock.monotonic() };
        onRefusedLists?.();
      }
      throw error;
    }
  };
  const pace = createPace(clock, options.listGapMs);
  const inTurn = async (body: string, signal: AbortSignal): Promise<Fields> => {
    await pace(signal);
    return list(body, signal);
  };
  const lists = {
    unsettled: (page: number, signal: AbortSignal) => inTurn(requests.unsettled(page), signal),
    batches: (fromMs: number, toMs: number, signal: AbortSignal) => inTurn(requests.batches(fromMs, toMs), signal),
    batch: (batchId: string, page: number, signal: AbortSignal) => inTurn(requests.batch(batchId, page), signal),
  };
  const scans = new Scans(lists, clock);

  /** The transaction of an id. Throws if the vendor cannot be asked. null: it has no such transaction. */
  const find = async (transactionId: string, signal: AbortSignal): Promise<TransactionDetails | null> => {
    if (idOf(transactionId) === null) return null;
    try {
      const details = detailsOf(await list(requests.details(transactionId), signal), transactionId);
      if (!details) throw new AuthorizeNetUnreachable('the details of a transaction cannot be read');
      return details;
    } catch (error) {
      if (error instanceof AuthorizeNetRefused && error.code === NOT_FOUND) return null;
      throw error;
    }
  };
  const detailsOrThrow = async (transactionId: string, signal: AbortSignal): Promise<TransactionDetails> => {
    const details = await find(transactionId, signal);
    if (!details) throw new AuthorizeNetUnreachable(`it shows no details of transaction ${transactionId}`);
    return details;
  };
  const detailsInTurn = async (transactionId: string, signal: AbortSignal): Promise<TransactionDetails> => {
    await pace(signal);
    return detailsOrThrow(transactionId, signal);
  };
  const look = async (transactionId: string, signal: AbortSignal): Promise<Lookup> => {
    try {
      const details = await find(transactionId, signal);
      return details ? { kind: 'details', details } : { kind: 'none' };
    } catch {
      return { kind: 'unreadable' };
    }
  };

  const last4Of = async (transactionId: string, signal: AbortSignal): Promise<string | null> => {
    const found = await look(transactionId, signal);
    return found.kind === 'details' ? found.details.last4 : null;
  };

  /**
   * The transaction that a scan found for a reference. If there are several, one that moved money goes first. That must never happen, so it is an
   * alarm. Throws if the vendor cannot be asked.
   */
  const ofRef = async (ref: string, op: 'charge' | 'refund', transactionIds: readonly string[], signal: AbortSignal): Promise<TransactionDetails> => {
    const all: TransactionDetails[] = [];
    for (const transactionId of transactionIds) {
      const details = await detailsOrThrow(transactionId, signal);
      if (details.ref === ref && details.op === op) all.push(details);
    }
    const moved = all.filter(({ state }) => state !== 'declined' && state !== 'voided');
    if (moved.length > 1)
      alarm('Authorize.Net shows two transactions under one reference', { transactionIds: moved.map((one) => one.transactionId) });
    const found = moved[0] ?? all[0];
    if (!found) throw new AuthorizeNetUnreachable('a transaction of another reference');
    return found;
  };

  /** A refund may be repeated until {@link REFUND_REPEAT_MS} after its begin. Then the batch after the last repeat decides. */
  const decisionOn = (op: Op, begunMs: number): Decision => decidedBy(cutOff, op === 'refund' && refundsOnce ? begunMs + REFUND_REPEAT_MS : begunMs);

  const question = (ref: string, op: Op, begunAt: string, decides: boolean): ScanQuestion => {
    const begunMs = Date.parse(begunAt);
    const { untilMs } = decisionOn(op, begunMs);
    return { ref, begunMs, decidesAfterMs: decides && clock.now() >= untilMs ? untilMs : null };
  };

  /** As {@link Scans.ask}, but waits for scans that are under way until the signal aborts. */
  const scanFully = async (asked: ScanQuestion, signal: AbortSignal): Promise<ScanAnswer> => {
    for (;;) {
      const answer = await scans.ask(asked, signal);
      if (answer.kind !== 'in_flight' || signal.aborted) return answer;
      await clock.sleep(Math.max(0, Math.min(answer.untilMs - clock.now(), 1_000)), signal);
    }
  };

  /** What became of our reference, after the vendor has said that the transaction is a duplicate. null: it cannot be read. */
  const original = async (
    ref: string,
    op: 'charge' | 'refund',
    begunAt: string,
    originalId: string | null,
    signal: AbortSignal,
  ): Promise<TransactionDetails | 'another' | null> => {
    try {
      const named = originalId === null ? null : await find(originalId, signal);
      if (named) return named.ref === ref && named.op === op ? named : 'another';
      const answer = await scanFully(question(ref, op, begunAt, false), signal);
      return answer.kind === 'found' ? await ofRef(ref, op, answer.transactionIds, signal) : null;
    } catch {
      return null;
    }
  };

  /** Sends a call that moves money. The result is the transaction in its answer, or the outcome without one. */
  const execute = async (
    ref: string,
    body: string,
    secrets: readonly string[],
    signal: AbortSignal,
    notAfterMs: number | undefined,
  ): Promise<TransactionAnswer | Outcome<never>> => {
    const exchanged = await send(body, signal, MONEY_ANSWER_BYTES, notAfterMs);
    if (exchanged.kind === 'not_sent') return { kind: 'not_processed', answered: false, raw: exchanged.raw };
    if (exchanged.kind === 'unknown') return exchanged;
    const { status, text } = exchanged;
    const answer = status === 200 ? readableAnswer(text, secrets) : null;
    if (!answer) return { kind: 'unknown', cause: status >= 500 ? 'http_5xx' : 'unreadable', raw: `HTTP ${status}` };
    const found = readTransaction(answer, ref);
    switch (found.kind) {
      case 'transaction':
        if (!isOfTestMode(found.transaction)) return found.transaction;
        noteTestMode();
        return { kind: 'not_processed', answered: false, raw: 'test mode' };
      case 'unreadable':
        return { kind: 'unknown', cause: 'unreadable', raw: found.raw };
      case 'refused':
        noteRefusal(found.code);
        return { kind: 'not_processed', answered: false, raw: found.code };
    }
  };

  /**
   * True: the vendor refuses lists, so an unknown outcome could never be resolved. Asks for a list from time to time. In the service, `mayCharge` refuses
   * a charge earlier; this is for callers that do not ask it.
   */
  const isBlind = async (signal: AbortSignal): Promise<boolean> => {
    if (!listsRefused) return false;
    if (clock.monotonic() - listsRefused.probedAt >= PROBE_MS) {
      listsRefused = { probedAt: clock.monotonic() };
      await list(requests.unsettled(1, 1), signal).catch(() => undefined);
    }
    return listsRefused !== null;
  };

  const capabilities: GatewayCapabilities = {
    rawCard: true,
    cardToken: false,
    tokenReusable: false,
    maxCardDigits: 16,
    minAmountCents: 1,
    maxAmountCents: MAX_AMOUNT_CENTS,
    partialVoid: false,
    refundUnsettled: false,
    voids: 'until_batch',
    finalize: 'after_batch',
    finalizeReversal: 'later',
    repeatSafeMs: { void: Number.POSITIVE_INFINITY, refund: refundsOnce ? REFUND_REPEAT_MS : 0 },
    settlement: 'batches',
    lateAfterDays: 4,
    disputes: 'none',
  };

  /** A held transaction cannot be voided. It is declined instead. */
  const declineHeld = async (
    ref: string,
    transactionId: string,
    signal: AbortSignal,
    notAfterMs: number | undefined,
  ): Promise<Outcome<ReversalTxn>> => {
    const answered = await execute(ref, requests.declineHeld(ref, transactionId), [], signal, notAfterMs);
    if ('kind' in answered) return answered;
    if (answered.code === 1 && answered.isOk) return { kind: 'approved', txn: { transactionId } };
    const now = await look(transactionId, signal);
    if (now.kind === 'details' && (now.details.state === 'voided' || now.details.state === 'declined'))
      return { kind: 'approved', txn: { transactionId } };
    return { kind: 'unknown', cause: 'unreadable', raw: rawOf(answered) };
  };

  /** What became of a charge that could not be voided. */
  const afterRefusedVoid = async (
    ref: string,
    transactionId: string,
    raw: string,
    signal: AbortSignal,
    notAfterMs: number | undefined,
  ): Promise<Outcome<ReversalTxn>> => {
    const now = await look(transactionId, signal);
    if (now.kind === 'unreadable') return { kind: 'unknown', cause: 'unreadable', raw };
    if (now.kind === 'none') return { kind: 'rejected', why: 'not_found', raw };
    switch (now.details.state) {
      // A held transaction that was declined is `declined`.
      case 'voided':
      case 'declined':
        return { kind: 'approved', txn: { transactionId, before: true } };
      case 'settling':
      case 'settled':
        return { kind: 'rejected', why: 'already_settled', raw };
      case 'settlement_rejected':
        return { kind: 'rejected', why: 'settlement_rejected', raw };
      case 'held':
        return declineHeld(ref, transactionId, signal, notAfterMs);
      case 'approved':
        return { kind: 'unknown', cause: 'unreadable', raw };
    }
  };

  const finalizeReversal = async (chargeTransactionId: string, signal: AbortSignal): Promise<Finalized<ReversalTxn>> => {
    const now = await look(chargeTransactionId, signal);
    if (now.kind === 'unreadable') return { kind: 'cannot_tell', why: 'unreachable' };
    if (now.kind === 'none') return { kind: 'cannot_tell', why: 'not_visible' };
    switch (now.details.state) {
      case 'voided':
      case 'declined':
        return { kind: 'executed', result: { kind: 'approved', txn: { transactionId: chargeTransactionId } } };
      case 'settling':
      case 'settled':
      case 'settlement_rejected':
        return { kind: 'never' };
      case 'held':
        return { kind: 'cannot_tell', why: 'held' };
      case 'approved':
        // A void that is on its way could still arrive. The caller may repeat it, since a void is executed once.
        return { kind: 'cannot_tell', why: 'not_visible' };
    }
  };

  /** True: the scan has shown that the batch of that time is settled, and that nothing of that time still waits. */
  const isDecided = (scan: Scan, { untilMs, cutOffMs }: Decision): boolean =>
    scan.isWhole && scan.begunMs >= untilMs && !scan.hasPendingBatch && scan.oldestWaitingMs >= cutOffMs;

  const finalizeByScan = async (
    { ref, op, begunAt, amountCents }: ReferenceCall,
    signal: AbortSignal,
  ): Promise<Finalized<ChargeTxn | ReversalTxn>> => {
    const begunMs = Date.parse(begunAt);
    if (Number.isNaN(begunMs)) return { kind: 'cannot_tell', why: 'unreachable' };
    const kind = op === 'charge' ? 'charge' : 'refund';
    const answer = await scans.ask(question(ref, op, begunAt, true), signal);
    switch (answer.kind) {
      case 'in_flight':
        return { kind: 'cannot_tell', why: 'in_flight', until: timestamp(answer.untilMs) };
      case 'absent': {
        const decision = decisionOn(op, begunMs);
        if (isDecided(answer.scan, decision)) return { kind: 'never' };
        const untilMs = clock.now() < decision.untilMs ? decision.untilMs : clock.now() + LATE_BATCH_MS;
        return {
          kind: 'cannot_tell',
          why: 'not_visible',
          until: timestamp(untilMs),
          ...(op === 'charge' && cutOff !== null && { voidableUntil: timestamp(decision.cutOffMs) }),
        };
      }
      case 'found': {
        const details = await ofRef(ref, kind, answer.transactionIds, signal);
        if (kind === 'refund' && details.state === 'held') return { kind: 'cannot_tell', why: 'held' };
        if (kind === 'charge' && details.state === 'voided') return { kind: 'undone', transactionId: details.transactionId };
        const result = kind === 'charge' ? chargeFromDetails(details, amountCents) : refundFromDetails(details, amountCents);
        if (result) return { kind: 'executed', result };
        alarm('Authorize.Net shows another amount under our reference', { transactionId: details.transactionId });
        return { kind: 'cannot_tell', why: 'unreachable' };
      }
    }
  };

  return {
    capabilities,
    endpoint,

    mayCharge: () => listsRefused === null,

    async charge(call, signal): Promise<Outcome<ChargeTxn>> {
      const { ref, instrument, amountCents, begunAt } = call;
      if (instrument.type !== 'card') return { kind: 'rejected', why: 'unsupported', raw: 'Authorize.Net takes no token of ours' };
      if (await isBlind(signal)) return { kind: 'not_processed', answered: false, raw: DETAILS_API_OFF };
      const secrets = [instrument.number.reveal()];
      const answered = await execute(ref, requests.charge(call, instrument), secrets, signal, latestCharge(begunAt));
      if ('kind' in answered) return answered;
      const outcome = chargeAnswer(answered, amountCents, (what) => alarm(what, { raw: rawOf(answered) }));
      if (outcome.kind !== 'duplicate') return outcome;
      const raw = rawOf(answered);
      const before = await original(ref, 'charge', begunAt, outcome.originalId, signal);
      if (before === 'another') return { kind: 'not_processed', answered: true, raw };
      return (before && chargeFromDetails(before, amountCents)) ?? { kind: 'unknown', cause: 'unreadable', raw };
    },

    async void(call, signal): Promise<Outcome<ReversalTxn>> {
      const { ref, chargeTransactionId } = call;
      if (idOf(chargeTransactionId) === null) return { kind: 'rejected', why: 'not_found' };
      const notAfterMs = latestOf(call.notAfter);
      const answered = await execute(ref, requests.void(call), [], signal, notAfterMs);
      if ('kind' in answered) return answered;
      const { code, reason } = answered;
      const raw = rawOf(answered);
      if (VOID_NEEDS_DETAILS.includes(reason)) return afterRefusedVoid(ref, chargeTransactionId, raw, signal, notAfterMs);
      if (code === 1 && answered.isOk && answered.transactionId === chargeTransactionId)
        return { kind: 'approved', txn: { transactionId: chargeTransactionId } };
      return refusedReversal(code, reason);
    },

    async refund(call, signal): Promise<Outcome<ReversalTxn>> {
      const { ref, chargeTransactionId, amountCents, begunAt } = call;
      if (idOf(chargeTransactionId) === null) return { kind: 'rejected', why: 'not_found' };
      const last4 = /^\d{4}$/.test(call.last4) ? call.last4 : await last4Of(chargeTransactionId, signal);
      if (!last4) return { kind: 'not_processed', answered: false, raw: 'the last four digits of the card are not known' };
      const answered = await execute(ref, requests.refund(call, last4), [], signal, latestOf(call.notAfter));
      if ('kind' in answered) return answered;
      const { code, reason, transactionId } = answered;
      const raw = rawOf(answered);
      if (reason === DUPLICATE && code !== 1) {
        const before = await original(ref, 'refund', begunAt, transactionId, signal);
        if (before === 'another') return { kind: 'not_processed', answered: true, raw };
        return (before && refundFromDetails(before, amountCents)) ?? { kind: 'unknown', cause: 'unreadable', raw };
      }
      if (REFUND_NEEDS_DETAILS.includes(reason) && code !== 1) {
        const now = await look(chargeTransactionId, signal);
        if (now.kind === 'none') return { kind: 'rejected', why: 'not_found', raw };
        if (now.kind === 'unreadable') return { kind: 'rejected', why: 'other', raw };
        return { kind: 'rejected', why: whyNoRefund(now.details, reason), raw };
      }
      if (code === 1 && reason === 1 && answered.isOk && transactionId !== null && transactionId !== chargeTransactionId)
        return { kind: 'approved', txn: { transactionId } };
      return refusedReversal(code, reason);
    },

    async finalize(call, signal): Promise<Finalized<ChargeTxn | ReversalTxn>> {
      const { op, chargeTransactionId } = call;
      try {
        if (op === 'charge' || op === 'refund') return await finalizeByScan(call, signal);
        // A void needs the id of its charge, so without one none was sent.
        return chargeTransactionId === null ? { kind: 'never' } : await finalizeReversal(chargeTransactionId, signal);
      } catch {
        return { kind: 'cannot_tell', why: 'unreachable' };
      }
    },

    async lookup({ ref, op, begunAt, chargeTransactionId }, signal): Promise<LookedUp | { readonly found: 'cannot_tell' }> {
      let details: TransactionDetails | null;
      if (op === 'charge' || op === 'refund') {
        const answer = await scanFully(question(ref, op, begunAt, false), signal);
        if (answer.kind === 'in_flight') return { found: 'cannot_tell' };
        details = answer.kind === 'absent' ? null : await ofRef(ref, op, answer.transactionIds, signal);
      } else details = chargeTransactionId === null ? null : await find(chargeTransactionId, signal);
      if (!details) return { found: false };
      const { state, transactionId, amountCents, batchId, authCode } = details;
      return { found: true, state, transactionId, amountCents, ...(batchId !== null && { batchId }), ...(authCode !== '' && { authCode }) };
    },

    async transaction(transactionId, signal): Promise<NamedTransaction | null> {
      const details = await find(transactionId, signal);
      if (!details) return null;
      const { ref, op, state, amountCents, chargeTransactionId } = details;
      return { transactionId, ref: OUR_REF.test(ref) ? ref : null, op, state, amountCents, chargeTransactionId };
    },

    settlements: (cursor, signal) => settledBatches({ lists, details: detailsInTurn, clock }, cursor, signal),

    async describe(signal): Promise<AccountDescription> {
      const { answer, date } = await askWithHeaders(requests.merchant(), signal);
      const externalId = idOf(answer.gatewayId);
      if (externalId === null) throw new AuthorizeNetUnreachable('the description of the account cannot be read');
      const problems: string[] = [];
      for (const body of [requests.unsettled(1, 1), requests.details('1')])
        try {
          await list(body, signal);
        } catch (error) {
          if (!(error instanceof AuthorizeNetRefused)) throw error;
          if (error.code === DETAILS_API_OFF && !problems.includes(DETAILS_API_PROBLEM)) problems.push(DETAILS_API_PROBLEM);
        }
      const currencies = answer.currencies;
      if (Array.isArray(currencies) && !currencies.includes('USD')) problems.push('The account takes no USD.');
      problems.push(...clockProblems('Authorize.Net', date, clock));
      const timeZone = textOf(answer.merchantTimeZone);
      return {
        externalId,
        name: plainTextOf(answer.merchantName),
        environment: environmentOf(url.hostname) ?? account.environment,
        testMode: textOf(answer.isTestMode) === 'true' || answer.isTestMode === true,
        ...(timeZone !== '' && { timeZone }),
        problems,
      };
    },

    close: () => {
      scans.close();
      transport.close();
    },
  };
};

/** The vendor's answers do not name the environment, so its host does. null: no host of the vendor, such as a double. */
const environmentOf = (host: string): 'sandbox' | 'production' | null => {
  if (host === 'apitest.authorize.net') return 'sandbox';
  return host === 'api.authorize.net' || host === 'api2.authorize.net' ? 'production' : null;
};

/** The outcome of a void or refund that the vendor did not approve. */
const refusedReversal = (code: number, reason: number): Outcome<never> => {
  const raw = rawOf({ code, reason });
  if (code === 3 && MAY_STAND[reason] === undefined) return { kind: 'not_processed', answered: true, raw };
  return code === 2 ? { kind: 'rejected', why: 'other', raw } : { kind: 'unknown', cause: 'unreadable', raw };
};

/** The outcome of a refund that the vendor shows. null: its amount is another one, or it is held. */
const refundFromDetails = (details: TransactionDetails, amountCents: Cents): Outcome<ReversalTxn> | null => {
  const { transactionId, state } = details;
  const raw = rawOf(details);
  if (state === 'declined') return { kind: 'rejected', why: 'other', raw };
  if (state === 'voided') return { kind: 'rejected', why: 'already_reversed', raw };
  if (state === 'settlement_rejected') return { kind: 'rejected', why: 'settlement_rejected', raw };
  return state !== 'held' && details.amountCents === amountCents ? { kind: 'approved', txn: { transactionId } } : null;
};

/** Why the vendor does not refund a charge. */
const whyNoRefund = ({ state }: TransactionDetails, reason: number) => {
  switch (state) {
    case 'approved':
    case 'settling':
    case 'held':
      return 'not_settled';
    case 'voided':
    case 'declined':
      return 'already_reversed';
    case 'settlement_rejected':
      return 'settlement_rejected';
    case 'settled':
      return reason === CREDITS_EXCEED ? 'exceeds' : 'not_refundable';
  }
};
