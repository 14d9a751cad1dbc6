/**
 * Partners that keep the contract. They repeat a request with its key if no answer came, or if a 409 says that the request is in progress. If an
 * outcome is unknown, they read the payment. They charge again with a new key only if it is `failed` or `voided`. An answer that the contract does
 * not allow is a violation.
 */
import { Agent, request } from 'node:http';
import { setTimeout as sleep } from 'node:timers/promises';
import type { PaymentView } from '#payments';
import type { Random } from '../../apps/demo/city.js';
import { CARD, paymentOf } from '../support/service.js';

export interface Reply {
  readonly status: number;
  readonly text: string;
  readonly replayed: boolean;
  readonly code: string | null;
  /** `details.id`, or null. */
  readonly paymentId: string | null;
  readonly retryable: boolean;
  readonly retryAfterMs: number;
  readonly data: Readonly<Record<string, unknown>>;
}

/** A key, its request, and every answer. */
export interface KeyUse {
  readonly key: string;
  readonly path: string;
  readonly body: object;
  readonly answers: Reply[];
}

/** One bill that a partner wants to pay once. It may need several keys. */
export interface Charge {
  /** Also the `referenceId` of each of its payments. */
  readonly intention: string;
  readonly uses: KeyUse[];
  readonly lines: readonly number[];
  state: 'open' | 'paid' | 'declined';
  /** The newest view of the payment. null: no payment yet. */
  payment: PaymentView | null;
  /** Cents that refunds and voids have returned, according to their answers. */
  toldReturnedCents: number;
  voided: boolean;
  /** The return in progress. A charge has at most one. */
  returning: Return | null;
}

export interface Return {
  readonly charge: Charge;
  readonly operation: 'refund' | 'void';
  readonly use: KeyUse;
  state: 'open' | 'returned' | 'refused';
}

/** `ended`: the request has its outcome. `unknown`: the payment needs recovery. `parked`: the partner continues later. */
type Pursuit = 'ended' | 'unknown' | 'parked';

/** Cards whose charge cannot be undone are left out: after a fault, staff would have to decide. The simulation covers them. */
const CARDS: readonly string[] = [
  ...Array.from({ length: 14 }, () => CARD.approved),
  CARD.declined,
  CARD.unreadable,
  CARD.gatewayError,
  CARD.neverReached,
  CARD.feeDeclined,
  CARD.feeVoidFailsOnce,
  CARD.feeRefundFailsOnce,
];

const PAUSE_MS = { least: 50, most: 400 } as const;
/** How many times a clerk sends one request at a stretch. */
const TRIES = 8;
/** Enough tries to outlast the owner of a key. A living owner answers within its deadline of 28 s. The lease of a dead owner ends after 60 s. */
const SETTLE_TRIES = 160;
const LIST_LIMIT = 50;
/** An instance that did not answer gets no requests for this long, as behind a load balancer. */
const AVOID_MS = 1_500;

export class Partners {
  readonly charges: Charge[] = [];
  readonly returns: Return[] = [];
  readonly violations: string[] = [];
  readonly figures = { requests: 0, answers: 0, unanswered: 0, rateLimited: 0, replays: 0, reads: 0, lists: 0 };
  /** Called for each answer. `kind`: GET, list, payments, refund or void. `ms`: from the first byte sent. */
  onAnswered: (kind: string, ms: number, status: number) => void = () => undefined;
  private readonly agent = new Agent({ keepAlive: true });
  /** False: a request without an outcome is parked after its next answer. */
  private open = true;
  private count = 0;
  private readonly silentUntil: number[] = [];

  constructor(
    private readonly urls: readonly string[],
    private readonly apiKey: string,
    private readonly portalId: string,
    private readonly name: string,
    private readonly timeoutMs: number,
  ) {}

  // ----------------------------------------------------------------------------------------------------------------------------------
  // During faults: many clerks work. A clerk does not wait for a request that stays without an outcome.

  async work(clerks: number, random: Random): Promise<void> {
    this.open = true;
    await Promise.all(Array.from({ length: clerks }, () => this.clerk(random)));
  }

  close(): void {
    this.open = false;
  }

  private async clerk(random: Random): Promise<void> {
    while (this.open) {
      const draw = random.next();
      const idle = draw < 0.45 ? this.idlePayment(random) : null;
      if (idle && draw < 0.3) await this.pursueReturn(this.beginReturn(idle, random), random, TRIES);
      else if (idle && draw < 0.42) await this.read(idle, random);
      else if (idle) await this.list(random);
      else await this.pursueCharge(this.beginCharge(random), random, TRIES);
    }
  }

  /** Continues all requests without an outcome. Returns how many still have none. */
  async settle(random: Random): Promise<number> {
    this.open = true;
    const charges = this.charges.filter(({ state }) => state === 'open').map((charge) => () => this.pursueCharge(charge, random, SETTLE_TRIES));
    const returns = this.returns.filter(({ state }) => state === 'open').map((one) => () => this.pursueReturn(one, random, SETTLE_TRIES));
    const ends: Pursuit[] = [];
    await inParallel([...charges, ...returns], 32, async (pursue) => void ends.push(await pursue()));
    return ends.filter((end) => end !== 'ended').length;
  }

  // ----------------------------------------------------------------------------------------------------------------------------------
  // Charges.

  beginCharge(random: Random, number = random.pick(CARDS)): Charge {
    this.count += 1;
    const intention = `${this.name}-${this.count}`;
    // Each payment has a different amount. So a missing payment and an extra one cannot cancel out in the sums.
    const lines = [100 + this.count, 50];
    const charge: Charge = { intention, uses: [], lines, state: 'open', payment: null, toldReturnedCents: 0, voided: false, returning: null };
    this.charges.push(charge);
    this.newKey(charge, number);
    return charge;
  }

  private newKey(charge: Charge, number: string): void {
    const { intention, lines, uses } = charge;
    const body = paymentOf(this.portalId, { lines: [...lines], number, referenceId: intention });
    uses.push({ key: `${intention}-key-${uses.length + 1}`, path: 'payments', body, answers: [] });
  }

  async pursueCharge(charge: Charge, random: Random, tries: number): Promise<Pursuit> {
    for (let left = tries; left > 0; left--) {
      const use = charge.uses.at(-1)!;
      // One new request in ten goes to both instances at once.
      const reply = await this.ask(use, random, use.answers.length === 0 && random.next() < 0.1);
      if (reply?.status === 200) {
        charge.payment = reply.data as unknown as PaymentView;
        charge.state = 'paid';
      } else if (reply?.status === 402) charge.state = 'declined';
      else if (reply && isUnsettled(reply) && reply.paymentId !== null) {
        const looked = await this.look(charge, reply.paymentId, random);
        if (looked !== 'ended') return looked;
        if (charge.state === 'open') continue;
      } else if (reply?.code === 'IDEMPOTENCY_RECONCILIATION_REQUIRED') {
        // No payment began under this key, and none can begin later.
        this.newKey(charge, CARD.approved);
        continue;
      } else if (reply && reply.status < 500 && !isBusy(reply)) {
        this.violation(`${use.key}: a create was answered ${reply.text}`);
        charge.state = 'declined';
      }
      if (charge.state !== 'open') return 'ended';
      if (!this.open) return 'parked';
      await this.pause(random, reply);
    }
    return 'parked';
  }

  /** Reads the payment before charging again (specification, Errors, rule 1). */
  private async look(charge: Charge, paymentId: string, random: Random): Promise<Pursuit> {
    const reply = await this.send('GET', `payments/${paymentId}`, null, null, random);
    if (reply === null || reply.status >= 500 || isBusy(reply)) return 'parked';
    const status = reply.data.status as string | undefined;
    if (reply.status !== 200) this.violation(`${paymentId}: an answer named it, and GET says ${reply.text}`);
    else if (status === 'pending' || status === 'unknown') return 'unknown';
    else if (status === 'failed' || status === 'voided') this.newKey(charge, CARD.approved);
    else {
      // The outcome was recorded, but its answer was lost (C29).
      charge.payment = reply.data as unknown as PaymentView;
      charge.state = 'paid';
    }
    return 'ended';
  }

  // ----------------------------------------------------------------------------------------------------------------------------------
  // Returns, reads, lists.

  /** A payment of which something can be returned. null: none was found in a few tries. */
  idlePayment(random: Random): Charge | null {
    for (let tries = 0; tries < 5 && this.charges.length > 0; tries++) {
      const charge = random.pick(this.charges);
      if (charge.state === 'paid' && charge.returning === null && !charge.voided && this.leftOf(charge) > 0) return charge;
    }
    return null;
  }

  private leftOf({ payment, toldReturnedCents }: Charge): number {
    return payment === null ? 0 : payment.totalChargedCents - toldReturnedCents;
  }

  beginReturn(charge: Charge, random: Random, operation?: 'refund' | 'void'): Return {
    const payment = charge.payment!;
    const untouched = charge.toldReturnedCents === 0;
    const chosen = operation ?? (untouched && random.next() < 0.4 ? 'void' : 'refund');
    const partial = untouched && random.next() < 0.5;
    const body = chosen === 'void' ? {} : partial ? { amountCents: random.int(1, payment.amountCents - 1) } : { feeType: 'include_fee' };
    const path = `payments/${payment.id}/${chosen}`;
    const one: Return = {
      charge,
      operation: chosen,
      use: { key: `${charge.intention}-${chosen}-${random.int(0, 1e9)}`, path, body, answers: [] },
      state: 'open',
    };
    charge.returning = one;
    this.returns.push(one);
    return one;
  }

  async pursueReturn(one: Return, random: Random, tries: number): Promise<Pursuit> {
    const { charge, use } = one;
    for (let left = tries; left > 0; left--) {
      const reply = await this.ask(use, random, use.answers.length === 0 && random.next() < 0.1);
      if (reply?.status === 200) {
        charge.toldReturnedCents += reply.data.amountCents as number;
        charge.voided = one.operation === 'void';
        one.state = 'returned';
      } else if (reply?.code === 'VOID_FAILED' && !reply.retryable) {
        // The payment has settled. An earlier void may have returned a part of it, so read the returned amount.
        const seen = await this.send('GET', `payments/${charge.payment!.id}`, null, null, random);
        if (seen?.status !== 200) return 'parked';
        charge.toldReturnedCents = seen.data.refundedAmountCents as number;
        one.state = 'refused';
      } else if (reply?.code === 'INVALID_STATE' && /in progress|being reconciled/.test(reply.text)) return 'unknown';
      else if (reply?.status === 504) return 'unknown';
      else if (reply && reply.status < 500 && !isBusy(reply) && reply.code !== 'VOID_FAILED') {
        this.violation(`${use.key}: ${use.path} ${JSON.stringify(use.body)} was answered ${reply.text}`);
        one.state = 'refused';
      }
      if (one.state !== 'open') {
        charge.returning = null;
        return 'ended';
      }
      if (!this.open) return 'parked';
      await this.pause(random, reply);
    }
    return 'parked';
  }

  /** Checks that GET shows the amounts of the earlier answers, unless a return is running. false: a 5xx, a 429 or no answer. */
  async read(charge: Charge, random: Random): Promise<boolean> {
    this.figures.reads += 1;
    const told = charge.toldReturnedCents;
    const { id, totalChargedCents } = charge.payment!;
    const reply = await this.send('GET', `payments/${id}`, null, null, random);
    if (reply === null || reply.status >= 500 || isBusy(reply)) return false;
    if (charge.returning !== null || charge.toldReturnedCents !== told) return true;
    const { refundedAmountCents, capturedAmountCents } = reply.data;
    if (reply.status !== 200 || refundedAmountCents !== told || capturedAmountCents !== totalChargedCents)
      this.violation(`${id}: was told to be charged ${totalChargedCents} and returned ${told}, and reads ${reply.text}`);
    return true;
  }

  async list(random: Random): Promise<void> {
    this.figures.lists += 1;
    const reply = await this.send('GET', `payments?limit=${LIST_LIMIT}`, null, null, random);
    if (reply === null || reply.status >= 500 || isBusy(reply)) return;
    const payments = (reply.data.payments ?? []) as PaymentView[];
    const order = payments.map(({ createdAt, id }) => `${createdAt} ${id}`);
    if (reply.status !== 200 || new Set(payments.map(({ id }) => id)).size !== payments.length || order.join() !== [...order].sort().reverse().join())
      this.violation(`a list is out of order, or names a payment twice: ${reply.text.slice(0, 500)}`);
  }

  // ----------------------------------------------------------------------------------------------------------------------------------
  // Requests.

  /** Sends a request with a key, and checks its answer against the earlier ones. null: no answer. */
  async ask(use: KeyUse, random: Random, twice = false): Promise<Reply | null> {
    const replies = await Promise.all((twice ? [0, 1] : [null]).map((instance) => this.send('POST', use.path, use.body, use.key, random, instance)));
    for (const reply of replies) if (reply !== null) this.note(use, reply);
    return replies.find((reply) => reply?.status === 200) ?? replies.find((reply) => reply !== null) ?? null;
  }

  /** The same as {@link ask}, on a given instance. */
  async askOn(instance: number, use: KeyUse, random: Random): Promise<Reply | null> {
    const reply = await this.send('POST', use.path, use.body, use.key, random, instance);
    if (reply !== null) this.note(use, reply);
    return reply;
  }

  private note({ key, path, answers }: KeyUse, reply: Reply): void {
    const before = answers.filter(isStored);
    if (isStored(reply)) {
      // A7: all stored answers of one key are equal, byte for byte. At most one answer to a create is not a replay. A refund may have several: if its
      // key was not finished in time, the service answers from the stream.
      if (before.some(({ text }) => text !== reply.text)) this.violation(`${key}: was answered ${before[0]!.text}, and later ${reply.text}`);
      if (path === 'payments' && !reply.replayed && before.some(({ replayed }) => !replayed)) this.violation(`${key}: was executed twice`);
      // A12: after a 5xx with an open outcome, a create never executes again.
      if (path === 'payments' && !reply.replayed && answers.some(isUnsettled)) this.violation(`${key}: was executed after it had been answered 5xx`);
      if (reply.replayed) this.figures.replays += 1;
    } else if (before.length > 0 && reply.code === 'IDEMPOTENCY_RECONCILIATION_REQUIRED')
      this.violation(`${key}: had an answer, and must be reconciled later`);
    answers.push(reply);
  }

  /** null: no answer, or an incomplete one. */
  send(method: string, path: string, body: object | null, key: string | null, random: Random, instance: number | null = null): Promise<Reply | null> {
    this.figures.requests += 1;
    const chosen = instance ?? this.choose(random);
    const url = this.urls[chosen]!;
    const sent = performance.now();
    return new Promise<Reply | null>((resolve) => {
      const text = body && JSON.stringify(body);
      const headers = {
        authorization: `ApiKey ${this.apiKey}`,
        ...(text !== null && { 'content-type': 'application/json', 'content-length': String(Buffer.byteLength(text)) }),
        ...(key !== null && { 'idempotency-key': key }),
      };
      const call = request(`${url}/${path}`, { agent: this.agent, method, headers }, (response) => {
        let received = '';
        response.setEncoding('utf8').on('data', (chunk: string) => (received += chunk));
        response.once('error', () => resolve(null));
        response.once('end', () => {
          if (!response.complete) return resolve(null);
          const { data = {}, details = {} } = JSON.parse(received) as { data?: Record<string, unknown>; details?: Record<string, unknown> };
          resolve({
            status: response.statusCode!,
            text: received,
            replayed: response.headers['idempotent-replayed'] === 'true',
            code: (details.code as string | undefined) ?? null,
            paymentId: (details.id as string | undefined) ?? null,
            retryable: details.retryable === true,
            retryAfterMs: Number(response.headers['retry-after'] ?? 0) * 1_000,
            data,
          });
        });
      });
      // One time limit for the whole answer, also for a server that sends one byte at a time.
      const timer = setTimeout(() => call.destroy(new Error('no answer')), this.timeoutMs);
      call.once('close', () => {
        clearTimeout(timer);
        resolve(null);
      });
      call.once('error', () => resolve(null)).end(text ?? undefined);
    }).then((reply) => {
      this.figures[reply === null ? 'unanswered' : 'answers'] += 1;
      if (reply?.code === 'RATE_LIMITED') this.figures.rateLimited += 1;
      if (reply !== null) this.onAnswered(kindOf(method, path), performance.now() - sent, reply.status);
      if (reply === null) this.silentUntil[chosen] = performance.now() + AVOID_MS;
      return reply;
    });
  }

  /** Picks an instance. Avoids instances that have just failed to answer, if another one is left. */
  private choose(random: Random): number {
    const first = random.int(0, this.urls.length - 1);
    const silent = (instance: number) => (this.silentUntil[instance] ?? 0) > performance.now();
    const other = silent(first) ? this.urls.findIndex((_, instance) => !silent(instance)) : -1;
    return other === -1 ? first : other;
  }

  private async pause(random: Random, reply: Reply | null): Promise<void> {
    // A clerk obeys Retry-After, but waits at most a second. The other instance may have the outcome by then.
    await sleep(Math.min(Math.max(reply?.retryAfterMs ?? 0, random.int(PAUSE_MS.least, PAUSE_MS.most)), 1_000));
  }

  violation(text: string): void {
    this.violations.push(text);
  }

  end(): void {
    this.agent.destroy();
  }
}

const kindOf = (method: string, path: string): string =>
  method === 'GET' ? (path.includes('?') ? 'list' : 'GET') : path.slice(path.lastIndexOf('/') + 1);

/** True if the service stores this answer under the key and replays it (C15). */
export const isStored = ({ status, code, retryable }: Reply): boolean => status === 200 || status === 402 || (code === 'VOID_FAILED' && !retryable);

/** True if nothing began for this request: another one holds its key, or its account holds too many slots. The same request may succeed later. */
const isBusy = ({ code }: Reply): boolean => code === 'IDEMPOTENCY_IN_PROGRESS' || code === 'RATE_LIMITED';

/** True if a create with this answer may have charged. Its key then never executes again (C16). */
const isUnsettled = ({ status, code }: Reply): boolean =>
  code === 'IDEMPOTENCY_RECONCILIATION_REQUIRED' || (status >= 500 && code !== 'IDEMPOTENCY_UNAVAILABLE' && code !== 'GATEWAY_NOT_CONFIGURED');

/** Runs `work` for each item, at most `atOnce` at a time. */
export const inParallel = async <T>(items: readonly T[], atOnce: number, work: (item: T) => Promise<unknown>): Promise<void> => {
  const queue = [...items];
  await Promise.all(
    Array.from({ length: Math.min(atOnce, queue.length) }, async () => {
      for (let item = queue.shift(); item !== undefined; item = queue.shift()) await work(item);
    }),
  );
};
