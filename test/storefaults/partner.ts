/** A partner that sends creates with keys, and stores the start and the answer of each request. */
import { setTimeout as sleep } from 'node:timers/promises';
import type { Truth } from '../../apps/simulator/processor.js';
import { newKey } from '../support/processes.js';
import { paymentOf, PAYMENTS } from '../support/service.js';

export interface Sent {
  /** Milliseconds since 1970, as in the bank's records. */
  readonly begunAt: number;
  readonly endedAt: number;
  /** null: no answer. */
  readonly status: number | null;
  readonly code: string | null;
  readonly replayed: boolean;
  readonly retryAfter: string | null;
  readonly paymentId: string | null;
  readonly text: string;
}

/** One payment: its key, its body, and all its requests. No other payment has the same amount. */
export interface Create {
  readonly key: string;
  readonly amountCents: number;
  readonly body: object;
  readonly sent: Sent[];
}

export interface Access {
  readonly url: string;
  readonly apiKey: string;
  readonly portalId: string;
}

const FIRST_AMOUNT = 10_000;
const AT_ONCE = 4;
const PAUSE_MS = 20;
/** Longer than the deadline of the service. */
const TIMEOUT_MS = 60_000;

export class Partner {
  readonly creates: Create[] = [];
  private going: Promise<unknown> | null = null;
  private stopping = false;

  constructor(private readonly access: () => Access) {}

  get sent(): Sent[] {
    return this.creates.flatMap(({ sent }) => sent);
  }

  /** Creates that were answered 200 at least once. */
  get paid(): Create[] {
    return this.creates.filter(({ sent }) => sent.some(({ status }) => status === 200));
  }

  async create(): Promise<Create> {
    const amountCents = FIRST_AMOUNT + this.creates.length;
    const create = { key: newKey(), amountCents, body: paymentOf(this.access().portalId, { lines: [amountCents] }), sent: [] };
    this.creates.push(create);
    await this.again(create);
    return create;
  }

  /** Sends the create again under its key. */
  async again(create: Create): Promise<Sent> {
    const sent = await this.send('POST', PAYMENTS, create.body, create.key);
    create.sent.push(sent);
    return sent;
  }

  async find(paymentId: string): Promise<Sent> {
    return this.send('GET', `${PAYMENTS}/${paymentId}`);
  }

  async send(method: string, path: string, body?: object, key?: string): Promise<Sent> {
    const { url, apiKey } = this.access();
    const begunAt = Date.now();
    const none = { begunAt, status: null, code: null, replayed: false, retryAfter: null, paymentId: null };
    try {
      const answer = await fetch(`${url}${path}`, {
        method,
        headers: {
          authorization: `ApiKey ${apiKey}`,
          ...(body && { 'content-type': 'application/json' }),
          ...(key !== undefined && { 'idempotency-key': key }),
        },
        ...(body && { body: JSON.stringify(body) }),
        signal: AbortSignal.timeout(TIMEOUT_MS),
      });
      const text = await answer.text();
      const { data, details } = JSON.parse(text) as { data?: { id?: string }; details?: { id?: string; code?: string } };
      return {
        begunAt,
        endedAt: Date.now(),
        status: answer.status,
        code: details?.code ?? null,
        replayed: answer.headers.get('idempotent-replayed') === 'true',
        retryAfter: answer.headers.get('retry-after'),
        paymentId: data?.id ?? details?.id ?? null,
        text,
      };
    } catch (error) {
      return { ...none, endedAt: Date.now(), text: String(error) };
    }
  }

  /** Keeps some requests in flight until {@link stop}. */
  start(): void {
    this.stopping = false;
    const clerk = async () => {
      while (!this.stopping) {
        await this.create();
        await sleep(PAUSE_MS);
      }
    };
    this.going = Promise.all(Array.from({ length: AT_ONCE }, clerk));
  }

  /** Sends no new requests, and waits for the answers to those of {@link start}. */
  async stop(): Promise<void> {
    this.stopping = true;
    await this.going;
  }
}

/** A span of time in which no money may move, except for requests from before the span. */
export interface Window {
  readonly from: number;
  readonly to: number;
}

/**
 * Compares the bank with the requests. In `window`, the bank may have no refund, no void, and no charge for a request that began in it. No key may
 * have two charges. Each violation is one line.
 */
export const judgeMoney = (truth: readonly Truth[], { creates }: Partner, window: Window): string[] => {
  const violations: string[] = [];
  const charges = truth.filter(({ op, leg, result }) => op === 'charge' && leg !== 'fee' && result === 'approved');
  const during = ({ at }: Truth) => Date.parse(at) >= window.from && Date.parse(at) < window.to;
  for (const create of creates) {
    const { key, amountCents, sent } = create;
    const mine = charges.filter((charge) => charge.amountCents === amountCents);
    if (mine.length > 1) violations.push(`${key}: was charged ${mine.length} times, at ${mine.map(({ at }) => at).join(', ')}`);
    const begun = Math.min(...sent.map(({ begunAt }) => begunAt));
    for (const { at } of mine.filter(during))
      if (begun >= window.from) violations.push(`${key}: began ${begun - window.from} ms after the exchange and was charged at ${at}`);
  }
  for (const { op, at, ref, askedBy } of truth.filter(during))
    if (op === 'void' || op === 'refund')
      violations.push(`a ${op} (${ref}, asked by ${askedBy}) at ${at}, ${Date.parse(at) - window.from} ms after the exchange`);
  const known = new Set(creates.map(({ amountCents }) => amountCents));
  for (const { amountCents, ref } of charges) if (!known.has(amountCents!)) violations.push(`${ref}: a charge that nobody asked for`);
  return violations;
};

/** Checks the answers after the exchange by C76. Returns one line for each violation. */
export const judgeAnswers = (sent: readonly Sent[], window: Window, noticedAt: number): string[] =>
  sent
    .filter(({ endedAt, begunAt }) => endedAt >= window.from && begunAt < window.to)
    .flatMap(({ begunAt, endedAt, status, code, replayed, retryAfter, text }) => {
      const when = `${begunAt - window.from} to ${endedAt - window.from} ms after the exchange`;
      const wrong = [`${when}: ${status} ${text.slice(0, 300)}`];
      // A 200 is right only as a replay, or for a request from before the exchange.
      if (status === 200) return replayed || begunAt < window.from ? [] : wrong;
      if (begunAt >= noticedAt) return status === 503 && code === 'IDEMPOTENCY_UNAVAILABLE' && retryAfter === '60' ? [] : wrong;
      // The exchange also breaks the connection to the log. Until the exchange is noticed, the answers of an outage are right: 503, or 504 with the
      // id of the payment.
      if (status === 503 && code === 'IDEMPOTENCY_UNAVAILABLE') return [];
      return status === 504 && text.includes('"id"') ? [] : wrong;
    });
