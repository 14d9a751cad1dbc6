/**
 * The adapter of the sandbox processor (`apps/simulator`), over a real socket. For each call that returns, only this file decides the outcome
 * (docs/contract.md#gateway):
 *
 * | event | outcome |
 * |---|---|
 * | name not found, connection refused, deadline before a connection: no byte was sent | `not_processed`, answered false |
 * | a complete answer for this reference | the outcome that the answer names |
 * | a clear refusal (`{error}`: wrong key, malformed call, processing disabled): nothing was executed or stored | `not_processed`, answered false |
 * | the connection was reset or closed after the first byte, also a kept-alive one | `unknown`, disconnected |
 * | the deadline passed after the first byte | `unknown`, timeout |
 * | a 5xx without a readable outcome | `unknown`, http_5xx |
 * | anything else: no JSON, missing fields, another reference or amount, more than 64 KiB | `unknown`, unreadable |
 *
 * No request is sent twice. Card data goes only into the bytes of the request, never into an error. An answer that repeats the card number or the
 * token counts as unreadable.
 */
import { isCents, MAX_AMOUNT_CENTS, type Cents } from '#kernel';
import { maskCardNumbers, parseExactly } from '#platform';
import {
  type AccountDescription,
  DECLINE_CODES,
  type ChargeTxn,
  type Check,
  type DeclineCode,
  type Finalized,
  type GatewayAccount,
  type GatewayCapabilities,
  lateAfterDays,
  type LookedUp,
  type NamedTransaction,
  type Outcome,
  type PaymentGateway,
  type PaymentInstrument,
  type Ref,
  type ReferenceCall,
  type RejectionReason,
  type ReversalTxn,
  type SettledBatch,
  type SettlementRecord,
  type TransactionState,
  UnknownCursor,
} from '#payments';
import { type Exchange, LIST_ANSWER_BYTES, MONEY_ANSWER_BYTES, type Transport } from '../transport/exchange.js';
import { type GatewayOptions, latestCharge, latestOf, transportOf } from '../transport/options.js';

const MAX_RAW_CHARACTERS = 200;

const REJECTIONS = [
  'already_settled',
  'not_settled',
  'already_reversed',
  'exceeds',
  'not_found',
  'finalised',
  'unsupported',
  'settlement_rejected',
  'other',
] as const satisfies readonly RejectionReason[];
const CHECKS = ['match', 'no_match', 'not_checked'] as const satisfies readonly Check[];
const STATES = ['approved', 'declined', 'voided', 'settling', 'settled', 'settlement_rejected'] as const satisfies readonly TransactionState[];
const STATUS_OF_KIND: Readonly<Record<string, number>> = { approved: 200, declined: 402, rejected: 422, not_processed: 502 };
/** Looked up to see whether the simulator answers. No attempt has this reference. */
/** Pages of one list. A list that goes on, or an empty page that promises more, is a fault; the next reading goes on at the cursor. */
const MAX_PAGES = 10_000;
const NO_REF: Ref = '0'.repeat(20);
const TRANSACTION = /^[0-9A-Za-z_-]{1,64}$/;
const RFC_3339 = /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/;

/** `endpoint`: where the simulator listens, `http://host:port`. */
export interface SimulatorGatewayOptions extends GatewayOptions {
  /** Must equal the simulator's own setting; default true. */
  readonly partialVoid?: boolean;
  /** Must equal the simulator's own setting; default false. */
  readonly refundUnsettled?: boolean;
  /** Milliseconds by which business time is ahead. Each call carries them. Default: 0. */
  readonly aheadMs?: () => number;
  /** Connections to `endpoint` that several accounts share. Their owner closes them. Default: connections of its own. */
  readonly transport?: Transport;
}

export interface ClosedBatch {
  readonly batchId: string;
  readonly count: number;
  /** Gross cents of the accepted lines, less refunds. */
  readonly amountCents: number;
}

export interface SimulatorGateway extends PaymentGateway {
  /** Sandbox only: closes the open batch of the account. null: the batch was empty. Throws if the simulator does not answer. */
  closeBatch(signal: AbortSignal): Promise<ClosedBatch | null>;
}

/** The simulator did not answer, or its answer could not be read. */
export class GatewayUnreachable extends Error {
  /** `status`: the HTTP status of the answer. null: there was no answer, or the status is not the cause of the error. */
  constructor(
    message: string,
    readonly status: number | null = null,
  ) {
    super(message);
    this.name = 'GatewayUnreachable';
  }
}

/** Other references are of transactions that somebody made at the simulator without this service. */
const OUR_REF = /^[0-9A-HJKMNP-TV-Z]{20}$/;

type Fields = Readonly<Record<string, unknown>>;

const isFields = (value: unknown): value is Fields => value !== null && typeof value === 'object' && !Array.isArray(value);
const isOneOf = <T extends string>(value: unknown, allowed: readonly T[]): value is T => (allowed as readonly unknown[]).includes(value);
const isTransaction = (value: unknown): value is string => typeof value === 'string' && TRANSACTION.test(value);
const isWhole = (value: unknown): value is number => Number.isSafeInteger(value);

/** The gateway's message, without card numbers and short enough to store. */
const rawOf = (message: unknown): { raw?: string } =>
  typeof message === 'string' && message !== '' ? { raw: maskCardNumbers(message).slice(0, MAX_RAW_CHARACTERS) } : {};

const parse = (text: string): Fields | null => {
  try {
    const value = parseExactly(text);
    return isFields(value) ? value : null;
  } catch {
    return null;
  }
};

const chargeTxn = (outcome: Fields, amountCents: Cents): ChargeTxn | null => {
  const { transactionId, authCode, avs, cvv } = outcome;
  if (!isTransaction(transactionId) || !isTransaction(authCode) || outcome.amountCents !== amountCents) return null;
  if ((avs !== undefined && !isOneOf(avs, CHECKS)) || (cvv !== undefined && !isOneOf(cvv, CHECKS))) return null;
  return { transactionId, authCode, ...(avs !== undefined && { avs }), ...(cvv !== undefined && { cvv }) };
};

/** `amountCents` undefined: the call asked for all that remained, so any amount is accepted. */
const reversalTxn = (outcome: Fields, amountCents: Cents | undefined): ReversalTxn | null => {
  const { transactionId } = outcome;
  const amountFits = amountCents === undefined ? isCents(outcome.amountCents) : outcome.amountCents === amountCents;
  return isTransaction(transactionId) && amountFits ? { transactionId } : null;
};

/** The outcome in an answer. null: the outcome is unreadable, or does not fit the HTTP status. */
const outcomeOf = <T>(outcome: unknown, status: number, txnOf: (outcome: Fields) => T | null): Outcome<T> | null => {
  if (!isFields(outcome) || typeof outcome.kind !== 'string' || STATUS_OF_KIND[outcome.kind] !== status) return null;
  const raw = rawOf(outcome.message);
  switch (outcome.kind) {
    case 'approved': {
      const txn = txnOf(outcome);
      return txn && { kind: 'approved', txn };
    }
    case 'declined': {
      const { avs, cvv, transactionId } = outcome;
      if (typeof outcome.code !== 'string') return null;
      // An unknown decline code is still a decline: no money moved.
      const code: DeclineCode = isOneOf(outcome.code, DECLINE_CODES) ? outcome.code : 'generic_decline';
      return {
        kind: 'declined',
        decline: { code, ...raw, ...(isOneOf(avs, CHECKS) && { avs }), ...(isOneOf(cvv, CHECKS) && { cvv }) },
        ...(isTransaction(transactionId) && { transactionId }),
      };
    }
    case 'rejected':
      return typeof outcome.why === 'string' ? { kind: 'rejected', why: isOneOf(outcome.why, REJECTIONS) ? outcome.why : 'other', ...raw } : null;
    case 'not_processed':
      return { kind: 'not_processed', answered: true, ...raw };
    default:
      return null;
  }
};

/** True if the answer is `{error: {code, message}}` with one of these statuses. The simulator has then executed and stored nothing. */
const isRefusal = (status: number, answer: Fields): answer is { error: { code: string; message?: unknown } } =>
  [400, 401, 403, 404, 415, 503].includes(status) && isFields(answer.error) && typeof answer.error.code === 'string';

const outcomeOfExchange = <T>(exchanged: Exchange, ref: Ref, secrets: readonly string[], txnOf: (outcome: Fields) => T | null): Outcome<T> => {
  if (exchanged.kind === 'not_sent') return { kind: 'not_processed', answered: false, raw: exchanged.raw };
  if (exchanged.kind === 'unknown') return exchanged;
  const { status, text } = exchanged;
  const answer = secrets.some((secret) => text.includes(secret)) ? null : parse(text);
  if (answer && isRefusal(status, answer))
    return { kind: 'not_processed', answered: false, ...rawOf(`${answer.error.code}: ${String(answer.error.message)}`) };
  const outcome = answer?.ref === ref ? outcomeOf(answer.outcome, status, txnOf) : null;
  if (outcome) return outcome;
  // `raw` does not quote the body, since the body may hold card data.
  return { kind: 'unknown', cause: status >= 500 ? 'http_5xx' : 'unreadable', raw: `HTTP ${status}` };
};

const instrumentFields = (instrument: PaymentInstrument) =>
  instrument.type === 'card_token'
    ? { token: instrument.token.reveal() }
    : { number: instrument.number.reveal(), expiryMonth: instrument.expiry.month, expiryYear: instrument.expiry.year, cvv: instrument.cvv.reveal() };

/** The sandbox key of a merchant account. The key is no secret: the sandbox moves no money. */
const authorizationOf = ({ merchantAccount }: GatewayAccount) => ({ authorization: `Sandbox ${merchantAccount}:sk_sandbox_${merchantAccount}` });

const timeOf = (aheadMs: number): Record<string, string> => (aheadMs > 0 ? { 'sandbox-ahead-ms': String(aheadMs) } : {});

/** A gateway that calls the simulator. A call ends when its signal aborts, or after `silenceMs` without any data. */
export const createSimulatorGateway = (options: SimulatorGatewayOptions): SimulatorGateway => {
  const { account: own, partialVoid = true, refundUnsettled = false, aheadMs = () => 0 } = options;
  const transport = options.transport ?? transportOf(options);

  const send = (
    account: GatewayAccount,
    method: 'GET' | 'POST',
    path: string,
    body: object | null,
    signal: AbortSignal,
    { notAfterMs, maxAnswerBytes = MONEY_ANSWER_BYTES }: { notAfterMs?: number | undefined; maxAnswerBytes?: number } = {},
  ): Promise<Exchange> =>
    transport.exchange({
      method,
      path,
      headers: { ...authorizationOf(account), ...timeOf(aheadMs()) },
      body: body && JSON.stringify(body),
      maxAnswerBytes,
      ...(notAfterMs !== undefined && { notAfterMs }),
      signal,
    });

  /**
   * Sends a request and returns the fields of its answer. Throws {@link GatewayUnreachable} if the HTTP status is not 200, or the answer cannot be
   * read.
   */
  const ask = async (account: GatewayAccount, method: 'GET' | 'POST', path: string, body: object | null, signal: AbortSignal): Promise<Fields> => {
    const maxAnswerBytes = path.startsWith('/v1/batches') ? LIST_ANSWER_BYTES : MONEY_ANSWER_BYTES;
    const exchanged = await send(account, method, path, body, signal, { maxAnswerBytes });
    const answer = exchanged.kind === 'answer' ? parse(exchanged.text) : null;
    if (exchanged.kind === 'answer' && exchanged.status === 200 && answer) return answer;
    throw new GatewayUnreachable(
      `the simulator did not answer ${method} ${path.split('?')[0]}: ${exchanged.kind === 'answer' ? `HTTP ${exchanged.status}` : exchanged.raw}`,
      exchanged.kind === 'answer' ? exchanged.status : null,
    );
  };

  const capabilities: GatewayCapabilities = {
    rawCard: true,
    cardToken: true,
    tokenReusable: true,
    maxCardDigits: 19,
    minAmountCents: 1,
    maxAmountCents: MAX_AMOUNT_CENTS,
    partialVoid,
    refundUnsettled,
    voids: 'until_batch',
    finalize: 'at_once',
    finalizeReversal: 'at_once',
    // The simulator keeps the answer of each reference.
    repeatSafeMs: { void: Number.POSITIVE_INFINITY, refund: Number.POSITIVE_INFINITY },
    settlement: 'batches',
    lateAfterDays: lateAfterDays(own.gateway),
    disputes: 'none',
  };

  const cannotTell = { kind: 'cannot_tell', why: 'unreachable' } as const;

  const linesOf = async function* (batchId: string, signal: AbortSignal): AsyncIterable<SettlementRecord> {
    let from = 0;
    for (let page = 1; page <= MAX_PAGES; page += 1) {
      const { lines, more } = await ask(own, 'GET', `/v1/batches/${batchId}?from=${from}`, null, signal);
      const records = listOf(lines).map(settlementRecord);
      yield* records;
      from += records.length;
      if (more !== true) return;
      if (records.length === 0) break;
    }
    throw unreadableBatch();
  };

  const finalize = async ({ ref, account, op }: ReferenceCall, signal: AbortSignal): Promise<Finalized<ChargeTxn | ReversalTxn>> => {
    const answer = await ask(account, 'POST', `/v1/references/${encodeURIComponent(ref)}/finalize`, { op }, signal);
    if (answer.ref !== ref) return cannotTell;
    if (answer.finalized === 'never') return { kind: 'never' };
    if (answer.finalized !== 'executed' || typeof answer.status !== 'number') return cannotTell;
    const result = outcomeOf<ChargeTxn | ReversalTxn>(answer.outcome, answer.status, (outcome) =>
      isCents(outcome.amountCents) ? (op === 'charge' ? chargeTxn(outcome, outcome.amountCents) : reversalTxn(outcome, undefined)) : null,
    );
    return result ? { kind: 'executed', result } : cannotTell;
  };

  return {
    capabilities,
    endpoint: options.endpoint,

    async charge({ ref, leg, account, amountCents, instrument, payer, begunAt }, signal) {
      const revealed = instrumentFields(instrument);
      const postalCode = payer?.address?.zip;
      const body = { ref, leg, amountCents, instrument: revealed, ...(postalCode !== undefined && { postalCode }) };
      const exchanged = await send(account, 'POST', '/v1/charges', body, signal, { notAfterMs: latestCharge(begunAt) });
      const secrets = instrument.type === 'card' ? [instrument.number.reveal()] : [instrument.token.reveal()];
      return outcomeOfExchange(exchanged, ref, secrets, (outcome) => chargeTxn(outcome, amountCents));
    },

    async void({ ref, leg, account, chargeTransactionId, amountCents, askedBy, notAfter }, signal) {
      const body = { ref, leg, chargeTransactionId, askedBy, ...(amountCents !== undefined && { amountCents }) };
      const exchanged = await send(account, 'POST', '/v1/voids', body, signal, { notAfterMs: latestOf(notAfter) });
      return outcomeOfExchange(exchanged, ref, [], (outcome) => reversalTxn(outcome, amountCents));
    },

    async refund({ ref, leg, account, chargeTransactionId, amountCents, notAfter }, signal) {
      const body = { ref, leg, chargeTransactionId, amountCents };
      const exchanged = await send(account, 'POST', '/v1/refunds', body, signal, { notAfterMs: latestOf(notAfter) });
      return outcomeOfExchange(exchanged, ref, [], (outcome) => reversalTxn(outcome, amountCents));
    },

    async finalize(call, signal) {
      try {
        return await finalize(call, signal);
      } catch {
        return cannotTell;
      }
    },

    async lookup({ ref, account, op }, signal): Promise<LookedUp | { readonly found: 'cannot_tell' }> {
      const answer = await ask(account, 'GET', `/v1/references/${encodeURIComponent(ref)}?op=${op}`, null, signal);
      const { found, state, transactionId, amountCents, batchId, authCode } = answer;
      if (answer.ref === ref && found === false) return { found };
      if (answer.ref === ref && found === 'cannot_tell') return { found };
      const whole = answer.ref === ref && found === true && isOneOf(state, STATES) && isTransaction(transactionId) && isCents(amountCents);
      if (!whole) throw new GatewayUnreachable('the simulator answered a look-up with something else');
      return { found, state, transactionId, amountCents, ...(isTransaction(batchId) && { batchId }), ...(isTransaction(authCode) && { authCode }) };
    },

    async transaction(transactionId, signal): Promise<NamedTransaction | null> {
      // This gateway gives no such id, and the id may not fit into a path.
      if (!isTransaction(transactionId)) return null;
      const { found, ...answer } = await ask(own, 'GET', `/v1/transactions/${transactionId}`, null, signal);
      if (found === false) return null;
      const { ref, op, state, amountCents, chargeTransactionId } = answer;
      const whole =
        found === true &&
        answer.transactionId === transactionId &&
        isTransaction(ref) &&
        isOneOf(op, ['charge', 'refund'] as const) &&
        isOneOf(state, STATES) &&
        isCents(amountCents) &&
        (chargeTransactionId === null || isTransaction(chargeTransactionId)) &&
        (op === 'charge') === (chargeTransactionId === null);
      if (!whole) throw new GatewayUnreachable('the simulator answered the look-up of a transaction with something else');
      return { transactionId, ref: OUR_REF.test(ref) ? ref : null, op, state, amountCents, chargeTransactionId };
    },

    async *settlements(cursor, signal): AsyncIterable<SettledBatch> {
      let after = cursor;
      for (let count = 1; count <= MAX_PAGES; count += 1) {
        const page = await ask(own, 'GET', `/v1/batches${after === null ? '' : `?after=${encodeURIComponent(after)}`}`, null, signal).catch(
          (error: unknown) => {
            throw cursor !== null && after === cursor && error instanceof GatewayUnreachable && error.status === 404
              ? new UnknownCursor(cursor)
              : error;
          },
        );
        for (const batch of listOf(page.batches)) {
          const { batchId, closedAt, fundedOn } = batch;
          if (!isTransaction(batchId) || typeof closedAt !== 'string' || !RFC_3339.test(closedAt)) throw unreadableBatch();
          yield { batchId, closedAt, ...(typeof fundedOn === 'string' && { fundedOn }), cursor: batchId, lines: linesOf(batchId, signal) };
          after = batchId;
        }
        if (page.more !== true) return;
        if (listOf(page.batches).length === 0) break;
      }
      throw unreadableBatch();
    },

    async describe(signal): Promise<AccountDescription> {
      await ask(own, 'GET', `/v1/references/${NO_REF}?op=charge`, null, signal);
      const { merchantAccount, environment } = own;
      return { externalId: merchantAccount, name: merchantAccount, environment, testMode: false, timeZone: 'UTC', problems: [] };
    },

    async closeBatch(signal) {
      const { batch } = await ask(own, 'POST', '/v1/batches/close', {}, signal);
      if (batch === null) return null;
      if (!isFields(batch) || !isTransaction(batch.batchId) || !isWhole(batch.count) || !isWhole(batch.grossCents)) throw unreadableBatch();
      return { batchId: batch.batchId, count: batch.count, amountCents: batch.grossCents };
    },

    close: () => {
      if (!options.transport) transport.close();
    },
  };
};

const unreadableBatch = () => new GatewayUnreachable('the simulator answered with a batch that cannot be read');

const listOf = (value: unknown): readonly Fields[] => {
  if (!Array.isArray(value) || !value.every(isFields)) throw unreadableBatch();
  return value;
};

const settlementRecord = (line: Fields): SettlementRecord => {
  const { transactionId, ref, type, accepted, grossCents, feeCents, netCents } = line;
  const whole =
    isTransaction(transactionId) &&
    isTransaction(ref) &&
    isOneOf(type, ['sale', 'refund'] as const) &&
    typeof accepted === 'boolean' &&
    isWhole(grossCents) &&
    isWhole(feeCents) &&
    isWhole(netCents);
  if (!whole) throw unreadableBatch();
  return { transactionId, ...(OUR_REF.test(ref) && { ref }), type, accepted, grossCents, feeCents, netCents };
};
