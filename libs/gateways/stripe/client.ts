/**
 * Calls Stripe through its own package, over our transport. The package makes the requests and reads the answers. Only the transport knows whether a
 * byte was sent, so it decides how a call ended.
 *
 * The package repeats a request whose connection was closed, even with `maxNetworkRetries: 0`. Our HTTP client never shows it such an error. So no
 * request is sent twice.
 */
import { createRequire } from 'node:module';
import type Stripe from 'stripe';
import { parseExactly } from '#platform';
import { type Exchange, LIST_ANSWER_BYTES, MONEY_ANSWER_BYTES, type Transport } from '../transport/exchange.js';
import { type Fields, isFields, textOf } from './fields.js';

/** The version of the API that this adapter was written for. The account's own version does not count. */
const API_VERSION = '2026-10-28.endive';

/** An answer with an error. `code` and `declineCode`: words of the vendor, empty if it gave none. */
export interface Refusal {
  readonly kind: 'refused';
  readonly status: number;
  readonly type: string;
  readonly code: string;
  readonly declineCode: string;
  readonly param: string;
  /** True: the text says that the method of payment cannot be used again. Stripe has no code for it, and the text is not kept. */
  readonly isUsedUp: boolean;
  /** The intent that the error names. null: none. */
  readonly intent: Fields | null;
}

/** How a call ended. `ok`: an answer with HTTP 200 that is a JSON object without an error. `date`: Stripe's time, as its header says. */
export type Answered =
  { readonly kind: 'ok'; readonly value: Fields; readonly date: string | undefined } | Refusal | Exclude<Exchange, { kind: 'answer' }>;

export interface CallTerms {
  readonly signal: AbortSignal;
  /** Idempotency key. Absent: the request is not idempotent, or it is a GET. */
  readonly key?: string;
  /** No byte is sent later, by business time in milliseconds since the epoch. Default: no limit. */
  readonly notAfterMs?: number;
  /** True: the answer is a list. */
  readonly isList?: boolean;
}

interface Call extends CallTerms {
  exchanged?: Exchange;
}

/** A call as the package makes it, with the options that it must be given. */
export type StripeCall = (stripe: Stripe, options: Stripe.RequestOptions) => Promise<unknown>;

/** Words of the vendor that may be logged and stored. Free text may quote what was sent. */
const WORD = /^[a-z0-9_.[\]-]{1,64}$/i;
const wordOf = (value: unknown): string => {
  const word = textOf(value);
  return WORD.test(word) ? word : '';
};

/** The call ended without an answer. The package must not see the cause, since it would repeat the request. */
class NoAnswer extends Error {}

/** Loads the package. That takes a fifth of a second, so only a process with an account of Stripe does it. */
const loadStripe = (): typeof Stripe => createRequire(import.meta.url)('stripe') as typeof Stripe;

/** The HTTP client that the package is given. `calls`: the calls under way, by the headers of their request. */
const httpClientOf = ({ HttpClient }: typeof Stripe, transport: Transport, calls: WeakMap<object, Call>, secretKey: string): Stripe.HttpClient => {
  class Http extends HttpClient {
    override getClientName(): string {
      return 'payfold';
    }

    override async makeRequest(
      ...[, , path, method, headers, body]: Parameters<Stripe.HttpClient['makeRequest']>
    ): Promise<Stripe.HttpClientResponse> {
      const call = calls.get(headers);
      if (!call) throw new NoAnswer('no call');
      // The package's own headers are not sent. They hold a diagnosis of this host, and an idempotency key also for requests that have none.
      const sent = {
        accept: 'application/json',
        'user-agent': 'payfold',
        authorization: `Bearer ${secretKey}`,
        'stripe-version': API_VERSION,
        ...(method !== 'GET' && { 'content-type': 'application/x-www-form-urlencoded' }),
        ...(call.key !== undefined && { 'idempotency-key': call.key }),
      };
      const exchanged = await transport.exchange({
        method: method as 'GET' | 'POST',
        path,
        headers: sent,
        body: method === 'GET' ? null : String(body),
        maxAnswerBytes: call.isList === true ? LIST_ANSWER_BYTES : MONEY_ANSWER_BYTES,
        ...(call.notAfterMs !== undefined && { notAfterMs: call.notAfterMs }),
        signal: call.signal,
      });
      call.exchanged = exchanged;
      if (exchanged.kind !== 'answer') throw new NoAnswer('no answer');
      const { status, text } = exchanged;
      // An answer that repeats the secret key is not read.
      const json = text.includes(secretKey) ? '' : text.replace(/^\ufeff/, '');
      return {
        getStatusCode: () => status,
        // The package prints what a header `stripe-notice` says, so it gets no headers.
        getHeaders: () => ({}),
        getRawResponse: () => ({}),
        toStream: () => null,
        toJSON: () => Promise.resolve().then(() => parseExactly(json)),
      };
    }
  }
  return new Http();
};

/**
 * Runs the beginning of a call without stack traces. The package takes one for every request, and nothing reads it. With source maps that costs a third
 * of the call's time.
 */
const withoutStack = <T>(begin: () => T): T => {
  const { stackTraceLimit } = Error;
  Error.stackTraceLimit = 0;
  try {
    return begin();
  } finally {
    Error.stackTraceLimit = stackTraceLimit;
  }
};

export interface StripeClient {
  /** Never rejects. */
  call(call: StripeCall, terms: CallTerms): Promise<Answered>;
  close(): void;
}

const refusalOf = (status: number, error: Fields): Refusal => ({
  kind: 'refused',
  status,
  type: wordOf(error.type),
  code: wordOf(error.code),
  declineCode: wordOf(error.decline_code),
  param: wordOf(error.param),
  isUsedUp: /\bmay not be used again\b/i.test(textOf(error.message)),
  intent: isFields(error.payment_intent) ? error.payment_intent : null,
});

export const createStripeClient = (endpoint: string, secretKey: string, transport: Transport): StripeClient => {
  const { protocol, hostname, port } = new URL(endpoint);
  const calls = new WeakMap<object, Call>();
  const Package = loadStripe();
  const stripe = new Package(secretKey, {
    apiVersion: API_VERSION,
    httpClient: httpClientOf(Package, transport, calls, secretKey),
    host: hostname,
    ...(port !== '' && { port }),
    protocol: protocol === 'http:' ? 'http' : 'https',
    maxNetworkRetries: 0,
    telemetry: false,
  });
  // For each request, the package builds a header about itself, which is never sent. That took a sixteenth of a call's time.
  stripe.getClientUserAgent = (tell) => tell('{}');

  return {
    async call(make, terms) {
      const call: Call = { ...terms };
      const options: Stripe.RequestOptions = {
        // The package hands the headers of this request to its HTTP client. So the client finds the call by them.
        authenticator: (request) => {
          calls.set(request.headers, call);
          return Promise.resolve();
        },
      };
      let value: unknown;
      let thrown: unknown;
      try {
        value = await withoutStack(() => make(stripe, options));
      } catch (error) {
        thrown = error;
      }
      const { exchanged } = call;
      if (!exchanged) return { kind: 'not_sent', raw: 'the request cannot be made' };
      if (exchanged.kind !== 'answer') return exchanged;
      const { status } = exchanged;
      if (status === 200 && thrown === undefined && isFields(value)) return { kind: 'ok', value, date: exchanged.headers.date };
      if (status >= 400 && status < 500 && thrown instanceof Package.errors.StripeError && isFields(thrown.raw)) {
        const refused = refusalOf(status, thrown.raw);
        if (refused.type !== '') return refused;
      }
      return { kind: 'unknown', cause: status >= 500 ? 'http_5xx' : 'unreadable', raw: `HTTP ${status}` };
    },
    close: () => transport.close(),
  };
};
