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
import { Agent } from 'node:http';
import { urlToHttpOptions } from 'node:url';
import { isCents, type Cents } from '#kernel';
import { maskCardNumbers } from '#platform';
import {
  DECLINE_CODES,
  type ChargeTxn,
  type Check,
  type DeclineCode,
  type Finalized,
  type GatewayAccount,
  type GatewayCapabilities,
  type LookedUp,
  type NamedTransaction,
  type Outcome,
  type PaymentGateway,
  type PaymentInstrument,
  type Ref,
  GATEWAY_SLOTS,
  type ReferenceCall,
  type RejectionReason,
  type ReversalTxn,
  type SettlementRecord,
  UnknownCursor,
} from '#payments';
import { exchange, type Exchange } from '../transport/exchange.js';

/** Connections for batches and look-ups, which take no slot. */
const OTHER_CONNECTIONS = 16;
/** Every slot has its connection. If all connections are in use, a call waits for a free one until its deadline. */
const MAX_CONNECTIONS = GATEWAY_SLOTS.partners.slots + GATEWAY_SLOTS.house.slots + OTHER_CONNECTIONS;
/** The simulator closes idle connections after 65 s. We close them earlier: if a connection closes during a request, the outcome is unknown. */
const IDLE_CONNECTION_MS = 15_000;
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
const STATES = ['approved', 'declined', 'voided', 'settling', 'settled', 'settlement_rejected'] as const;
const STATUS_OF_KIND: Readonly<Record<string, number>> = { approved: 200, declined: 402, rejected: 422, not_processed: 502 };
/** Longer than any call that moves money may take. */
const SILENCE_MS = 30_000;
const TRANSACTION = /^[0-9A-Za-z_-]{1,64}$/;
const RFC_3339 = /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/;

export interface SimulatorGatewayOptions {
  /** Where the simulator listens, `http://host:port`. */
  readonly url: string;
  /** Must equal the simulator's own setting; default true. */
  readonly partialVoid?: boolean;
  /** Must equal the simulator's own setting; default false. */
  readonly refundUnsettled?: boolean;
  /** Milliseconds by which business time is ahead. Each call carries them. Default: 0. */
  readonly aheadMs?: () => number;
  readonly maxConnections?: number;
  /** A call ends if no data arrives for this long, even without an abort. Default 30 s. */
  readonly silenceMs?: number;
}

export interface ClosedBatch {
  readonly batchId: string;
  readonly count: number;
  /** Gross cents of the accepted lines, less refunds. */
  readonly amountCents: number;
}

export interface SimulatorGateway extends PaymentGateway {
  /** Sandbox only: closes the open batch of the account. null: the batch was empty. Throws if the simulator does not answer. */
  closeBatch(account: GatewayAccount, signal: AbortSignal): Promise<ClosedBatch | null>;
  /** Closes idle connections. */
  close(): void;
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
    const value: unknown = JSON.parse(text);
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

/** A gateway that calls the simulator at `url`. A call ends when its signal aborts, or after `silenceMs` without any data. */
export const createSimulatorGateway = (options: SimulatorGatewayOptions): SimulatorGateway => {
  const { partialVoid = true, refundUnsettled = false, maxConnections = MAX_CONNECTIONS, silenceMs = SILENCE_MS, aheadMs = () => 0 } = options;
  const { protocol, hostname, port } = urlToHttpOptions(new URL(options.url));
  const agent = new Agent({
    keepAlive: true,
    maxSockets: maxConnections,
    maxFreeSockets: maxConnections,
    timeout: IDLE_CONNECTION_MS,
    scheduling: 'lifo',
  });

  const send = (account: GatewayAccount, method: 'GET' | 'POST', path: string, body: object | null, signal: AbortSignal): Promise<Exchange> =>
    exchange(
      { agent, protocol, hostname, port },
      path,
      method,
      { ...authorizationOf(account), ...timeOf(aheadMs()) },
      body && JSON.stringify(body),
      signal,
      silenceMs,
    );

  /**
   * Sends a request and returns the fields of its answer. Throws {@link GatewayUnreachable} if the HTTP status is not 200, or the answer cannot be
   * read.
   */
  const ask = async (account: GatewayAccount, method: 'GET' | 'POST', path: string, body: object | null, signal: AbortSignal): Promise<Fields> => {
    const exchanged = await send(account, method, path, body, signal);
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
    partialVoid,
    refundUnsettled,
    settlement: 'batches',
  };

  const finalize = async ({ ref, account, op }: ReferenceCall, signal: AbortSignal): Promise<Finalized<ChargeTxn | ReversalTxn>> => {
    const answer = await ask(account, 'POST', `/v1/references/${encodeURIComponent(ref)}/finalize`, { op }, signal);
    if (answer.ref !== ref) return { kind: 'cannot_tell' };
    if (answer.finalized === 'never') return { kind: 'never' };
    if (answer.finalized !== 'executed' || typeof answer.status !== 'number') return { kind: 'cannot_tell' };
    const result = outcomeOf<ChargeTxn | ReversalTxn>(answer.outcome, answer.status, (outcome) =>
      isCents(outcome.amountCents) ? (op === 'charge' ? chargeTxn(outcome, outcome.amountCents) : reversalTxn(outcome, undefined)) : null,
    );
    return result ? { kind: 'executed', result } : { kind: 'cannot_tell' };
  };

  return {
    capabilities,
    endpoint: options.url,

    async charge({ ref, leg, account, amountCents, instrument, postalCode }, signal) {
      const revealed = instrumentFields(instrument);
      const body = { ref, leg, amountCents, instrument: revealed, ...(postalCode !== undefined && { postalCode }) };
      const exchanged = await send(account, 'POST', '/v1/charges', body, signal);
      const secrets = instrument.type === 'card' ? [instrument.number.reveal()] : [instrument.token.reveal()];
      return outcomeOfExchange(exchanged, ref, secrets, (outcome) => chargeTxn(outcome, amountCents));
    },

    async void({ ref, leg, account, chargeTransactionId, amountCents, askedBy }, signal) {
      const body = { ref, leg, chargeTransactionId, askedBy, ...(amountCents !== undefined && { amountCents }) };
      return outcomeOfExchange(await send(account, 'POST', '/v1/voids', body, signal), ref, [], (outcome) => reversalTxn(outcome, amountCents));
    },

    async refund({ ref, leg, account, chargeTransactionId, amountCents }, signal) {
      const body = { ref, leg, chargeTransactionId, amountCents };
      return outcomeOfExchange(await send(account, 'POST', '/v1/refunds', body, signal), ref, [], (outcome) => reversalTxn(outcome, amountCents));
    },

    async finalize(call, signal) {
      try {
        return await finalize(call, signal);
      } catch {
        return { kind: 'cannot_tell' };
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

    async transaction(account, transactionId, signal): Promise<NamedTransaction | null> {
      // This gateway gives no such id, and the id may not fit into a path.
      if (!isTransaction(transactionId)) return null;
      const { found, ...answer } = await ask(account, 'GET', `/v1/transactions/${transactionId}`, null, signal);
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
      return { transactionId, ref, op, state, amountCents, chargeTransactionId };
    },

    async *settlements(account, cursor, signal): AsyncIterable<SettlementRecord> {
      let after = cursor;
      for (;;) {
        const page = await ask(account, 'GET', `/v1/batches${after === null ? '' : `?after=${encodeURIComponent(after)}`}`, null, signal).catch(
          (error: unknown) => {
            throw cursor !== null && after === cursor && error instanceof GatewayUnreachable && error.status === 404
              ? new UnknownCursor(cursor)
              : error;
          },
        );
        for (const batch of listOf(page.batches)) {
          const { batchId } = batch;
          if (!isTransaction(batchId)) throw unreadableBatch();
          for (let from = 0; ;) {
            const lines = await ask(account, 'GET', `/v1/batches/${batchId}?from=${from}`, null, signal);
            const records = listOf(lines.lines).map((line) => settlementRecord(batch, line));
            yield* records;
            from += records.length;
            if (lines.more !== true || records.length === 0) break;
          }
          after = batchId;
        }
        if (page.more !== true) return;
      }
    },

    async closeBatch(account, signal) {
      const { batch } = await ask(account, 'POST', '/v1/batches/close', {}, signal);
      if (batch === null) return null;
      if (!isFields(batch) || !isTransaction(batch.batchId) || !isWhole(batch.count) || !isWhole(batch.grossCents)) throw unreadableBatch();
      return { batchId: batch.batchId, count: batch.count, amountCents: batch.grossCents };
    },

    close: () => agent.destroy(),
  };
};

const unreadableBatch = () => new GatewayUnreachable('the simulator answered with a batch that cannot be read');

const listOf = (value: unknown): readonly Fields[] => {
  if (!Array.isArray(value) || !value.every(isFields)) throw unreadableBatch();
  return value;
};

const settlementRecord = ({ batchId, closedAt, fundedOn }: Fields, line: Fields): SettlementRecord => {
  const { transactionId, ref, type, accepted, grossCents, feeCents, netCents } = line;
  const whole =
    isTransaction(batchId) &&
    typeof closedAt === 'string' &&
    RFC_3339.test(closedAt) &&
    isTransaction(transactionId) &&
    isTransaction(ref) &&
    isOneOf(type, ['sale', 'refund'] as const) &&
    typeof accepted === 'boolean' &&
    isWhole(grossCents) &&
    isWhole(feeCents) &&
    isWhole(netCents);
  if (!whole) throw unreadableBatch();
  return { batchId, closedAt, transactionId, ref, type, accepted, grossCents, feeCents, netCents, ...(typeof fundedOn === 'string' && { fundedOn }) };
};
