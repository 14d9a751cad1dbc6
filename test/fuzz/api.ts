/**
 * Fuzzes the API from its own document: `npm run fuzz:api -- --minutes M`. The fuzzer reads `/openapi.json` of a running service. It sends requests
 * that the document allows, requests that the document forbids, and a partner's usual sequences. It checks every answer. New operations of the
 * document are included automatically.
 *
 * Checks:
 *
 * - a 5xx only if the sandbox card explains it
 * - every status, content type and body as documented
 * - an allowed request is accepted, a forbidden one is refused with 400
 * - a request without credentials gets 401, an undocumented method 405
 * - an answered payment can be read and listed
 * - a voided payment cannot be refunded
 * - a replay has the same bytes as the first answer
 * - captured = refunded + remaining, and lines sum to the payment
 * - no card number in any answer
 * - at the end the bank's books equal ours
 */
import { createHash, randomBytes } from 'node:crypto';
import { Agent, type IncomingMessage, request as httpRequest } from 'node:http';
import fc from 'fast-check';
import type { PaymentView } from '#payments';
import type { SimulatorControl } from '../../apps/simulator/control.js';
import { createOpenApiJudge, type OpenApiJudge, withKnownWords } from '../support/openapi.js';
import { allowed, forbidden, type Resolve, resolverOf, type Schema } from './generate.js';

interface Parameter {
  readonly in: 'path' | 'query' | 'header';
  readonly name: string;
  readonly required?: boolean;
  readonly schema: Schema;
}
interface Operation {
  readonly method: string;
  readonly path: string;
  readonly parameters: readonly Parameter[];
  readonly body: Schema | null;
  readonly secured: boolean;
}
type Document = Parameters<typeof createOpenApiJudge>[0] & {
  readonly paths: Readonly<
    Record<
      string,
      Readonly<
        Record<
          string,
          {
            readonly parameters?: readonly Parameter[];
            readonly requestBody?: { readonly content: Readonly<Record<string, { readonly schema: Schema }>> };
            readonly security?: readonly unknown[];
          }
        >
      >
    >
  >;
};

export interface Target {
  readonly url: string;
  /** A key of the account that owns the portal. */
  readonly apiKey: string;
  readonly portalId: string;
  readonly bank: SimulatorControl;
}

export interface FuzzOptions {
  readonly seed: number;
  /** The run ends after this many requests or after `milliseconds`. */
  readonly requests: number;
  readonly milliseconds: number;
  /** How many requests run at the same time. */
  readonly parallel: number;
  /** Makes the document wrong, so that the fuzzer must find a violation. */
  readonly planted?: boolean;
  readonly onProgress?: (requests: number) => void;
}

export interface Violation {
  readonly check: string;
  readonly what: string;
  readonly request: string;
  readonly answer: string;
}

export interface FuzzReport {
  readonly requests: number;
  readonly seed: number;
  readonly statuses: Readonly<Record<string, number>>;
  readonly checks: Readonly<Record<string, number>>;
  readonly violations: readonly Violation[];
}

interface Sent {
  readonly method: string;
  readonly path: string;
  readonly headers: readonly (readonly [string, string])[];
  readonly body: string | Buffer | null;
}
interface Answer {
  readonly status: number;
  readonly headers: Readonly<Record<string, string | string[] | undefined>>;
  readonly text: string;
}

/** Sandbox cards. `statuses`: the HTTP statuses that a create with this card may return. */
const CARDS: readonly { readonly number: string; readonly statuses: readonly number[] }[] = [
  { number: '4242 4242 4242 4242', statuses: [200] },
  { number: '5555555555554444', statuses: [200] },
  { number: '4000 0077 7000 0000 205', statuses: [200] },
  { number: '4000007770002001', statuses: [200] },
  { number: '4000007770004221', statuses: [200] },
  { number: '4000007770004320', statuses: [200] },
  { number: '4000000000000002', statuses: [402] },
  { number: '4000000000009995', statuses: [402] },
  { number: '4000007770004023', statuses: [402, 200] },
  { number: '4111111111111111', statuses: [200] },
  { number: '4000007770005020', statuses: [502] },
  { number: '4000007770005046', statuses: [504] },
];
const PAN = /(?<!\d)(?:\d[ -]?){13,19}(?!\d)/g;
const digitsOf = (number: string) => number.replaceAll(/\D/g, '');
const CARD_DIGITS = new Set(CARDS.map(({ number }) => digitsOf(number)));
const CREATE = 'POST /api/partner/v1/payments';
/** The 5xx statuses that any POST may get. Some sandbox cards simulate trouble at the gateway. */
const GATEWAY_TROUBLE = [502, 504];
const MAX_KEPT_VIOLATIONS = 50;
const KEPT_PAYMENTS = 200;
/** The prefix of the `referenceId` of payments that belong to a sequence. */
const OWN = 'sequence of ';
/** One of this many payments is also looked up in the list. */
const LIST_EVERY = 5;
const PAGE = 25;

export const fuzzApi = async (target: Target, options: FuzzOptions): Promise<FuzzReport> => {
  const served = withKnownWords((await (await fetch(`${target.url}/openapi.json`)).json()) as Document);
  const document = options.planted ? harmed(served) : served;
  const fuzzer = new Fuzzer(target, options, document);
  await fuzzer.run();
  await fuzzer.compareWithBank();
  return fuzzer.report();
};

/** A wrong copy of the document, without the status `succeeded`. */
const harmed = (document: Document): Document =>
  JSON.parse(JSON.stringify(document), (key, value: unknown) =>
    key === 'enum' && Array.isArray(value) ? value.filter((word) => word !== 'succeeded') : value,
  ) as Document;

class Fuzzer {
  private readonly judge: OpenApiJudge;
  private readonly resolve: Resolve;
  private readonly operations: readonly Operation[];
  private readonly agent: Agent;
  private readonly statuses: Record<string, number> = {};
  private readonly checks: Record<string, number> = {};
  private readonly violations: Violation[] = [];
  private readonly known: { id: string }[] = [];
  private readonly bodies: ReadonlyMap<Operation, fc.Arbitrary<unknown>>;
  private count = 0;
  private draws = 0;
  private readonly name = randomBytes(4).toString('hex');

  constructor(
    private readonly target: Target,
    private readonly options: FuzzOptions,
    document: Document,
  ) {
    this.judge = createOpenApiJudge(document);
    this.resolve = resolverOf(document.components.schemas);
    this.agent = new Agent({ keepAlive: true, maxSockets: options.parallel });
    this.operations = Object.entries(document.paths).flatMap(([path, methods]) =>
      Object.entries(methods)
        .filter(() => path.startsWith('/api/partner/'))
        .map(([method, operation]) => ({
          method: method.toUpperCase(),
          path,
          parameters: operation.parameters ?? [],
          body: operation.requestBody?.content['application/json']?.schema ?? null,
          secured: (operation.security?.length ?? 0) > 0,
        })),
    );
    if (this.operations.length === 0) throw new Error('the document names no operation');
    this.bodies = new Map(this.operations.flatMap((one) => (one.body ? [[one, allowed(one.body, this.resolve)] as const] : [])));
  }

  async run(): Promise<void> {
    const end = performance.now() + this.options.milliseconds;
    const more = () => this.count < this.options.requests && performance.now() < end && this.violations.length < MAX_KEPT_VIOLATIONS;
    const worker = async () => {
      while (more()) {
        const kind = this.pick([
          ...Array<'allowed'>(5).fill('allowed'),
          ...Array<'forbidden'>(5).fill('forbidden'),
          ...Array<'sequence'>(3).fill('sequence'),
          'authority',
          'method',
          'transport',
        ] as const);
        await this[kind]();
        this.options.onProgress?.(this.count);
      }
    };
    await Promise.all(Array.from({ length: this.options.parallel }, worker));
    this.agent.destroy();
  }

  report(): FuzzReport {
    const { seed } = this.options;
    return { requests: this.count, seed, statuses: this.statuses, checks: this.checks, violations: this.violations };
  }

  // ---- random choices, each with its own seed, derived from the run's seed

  private sample<T>(arbitrary: fc.Arbitrary<T>): T {
    this.draws += 1;
    return fc.sample(arbitrary, { seed: this.options.seed + this.draws * 7919, numRuns: 1 })[0]!;
  }
  private integer(below: number): number {
    this.draws += 1;
    return createHash('sha256').update(`${this.options.seed}:${this.draws}`).digest().readUInt32BE(0) % below;
  }
  private pick<T>(from: readonly T[]): T {
    return from[this.integer(from.length)]!;
  }

  // ---- kinds of steps

  /** Sends a request that the document allows. It is adjusted to rules that the document cannot express (sums, cards, our portal). */
  private async allowed(): Promise<void> {
    const operation = this.pick(this.operations);
    const { sent, card } = this.requestFor(operation);
    const answer = await this.send(sent);
    const name = `${operation.method} ${operation.path}`;
    this.checked('allowed is accepted');
    if (answer.status === 400) return this.violation('allowed is accepted', 'refused as invalid', sent, answer);
    if (name === CREATE && card && !card.statuses.includes(answer.status) && answer.status !== 501)
      return this.violation('the card decides', `a card of ${card.statuses.join(', ')}`, sent, answer);
    if (name === CREATE && answer.status === 200) await this.available(answer, sent);
  }

  private async forbidden(): Promise<void> {
    const withBody = this.operations.filter(({ body, path }) => body && !path.endsWith('/vault'));
    const operation = this.pick(withBody);
    const { sent, body } = this.requestFor(operation, false);
    const mutation = this.pick(forbidden(operation.body!, this.resolve, body));
    const harmedRequest: Sent = { ...sent, body: mutation.body };
    const answer = await this.send(harmedRequest);
    this.checked('forbidden is refused');
    if (answer.status !== 400) this.violation('forbidden is refused', mutation.name, harmedRequest, answer);
  }

  /** Every operation that needs credentials must answer 401 to missing or invalid ones. */
  private async authority(): Promise<void> {
    const operation = this.pick(this.operations.filter(({ secured }) => secured));
    const { sent } = this.requestFor(operation);
    const key = this.target.apiKey;
    const no = this.pick([
      null,
      '',
      'ApiKey',
      'ApiKey ',
      `ApiKey ${key.slice(0, -1)}`,
      `ApiKey ${key}x`,
      `apikeys ${key}`,
      `Bearer ${key}`,
      'Bearer eyJhbGciOiJub25lIn0.e30.',
      `Basic ${Buffer.from(key).toString('base64')}`,
      key.replace('pc_test', 'pc_live'),
    ]);
    const headers = sent.headers.filter(([name]) => name !== 'authorization');
    const stripped: Sent = { ...sent, headers: no === null ? headers : [...headers, ['authorization', no]] };
    const answer = await this.send(stripped);
    this.checked('no credentials, no answer');
    if (answer.status !== 401) this.violation('no credentials, no answer', `authorization ${no ?? 'left out'}`, stripped, answer);
  }

  private async method(): Promise<void> {
    const { path } = this.pick(this.operations);
    const documented = this.operations.filter((one) => one.path === path).map(({ method }) => method);
    const method = this.pick(['GET', 'POST', 'PUT', 'PATCH', 'DELETE'].filter((one) => !documented.includes(one)));
    const sent: Sent = { method, path: this.fill(path), headers: this.headersFor(false), body: null };
    const answer = await this.send(sent);
    this.checked('other methods are refused');
    if (answer.status !== 405) this.violation('other methods are refused', 'not 405', sent, answer);
  }

  /** Sends faulty headers and bodies that the document does not describe. */
  private async transport(): Promise<void> {
    const operation = this.operations.find(({ method, path }) => `${method} ${path}` === CREATE)!;
    const { sent } = this.requestFor(operation, false);
    const [name, change, expected] = this.pick<readonly [string, (request: Sent) => Sent, number]>([
      ['another content type', (one) => this.withHeader(one, 'content-type', 'text/plain'), 400],
      ['no content type', (one) => ({ ...one, headers: one.headers.filter(([header]) => header !== 'content-type') }), 400],
      ['a form', (one) => this.withHeader(one, 'content-type', 'application/x-www-form-urlencoded'), 400],
      ['an empty key', (one) => this.withHeader(one, 'idempotency-key', ''), 400],
      ['a key of 256 characters', (one) => this.withHeader(one, 'idempotency-key', 'k'.repeat(256)), 400],
      ['a key that is not ASCII', (one) => this.withHeader(one, 'idempotency-key', 'k\u00e9'), 400],
      ['two keys', (one) => ({ ...one, headers: [...one.headers, ['idempotency-key', 'a'], ['idempotency-key', 'b']] }), 400],
      ['two credentials', (one) => ({ ...one, headers: [...one.headers, ['authorization', `ApiKey ${this.target.apiKey}`]] }), 401],
      ['a compressed body', (one) => this.withHeader(one, 'content-encoding', 'gzip'), 400],
      ['too large', (one) => ({ ...one, body: JSON.stringify({ x_extra: 'x'.repeat(257 * 1024) }) }), 413],
      ['a huge header', (one) => this.withHeader(one, 'x-junk', 'x'.repeat(20_000)), 431],
    ]);
    const changed = change(sent);
    const answer = await this.send(changed);
    this.checked('transport');
    if (answer.status !== expected) this.violation('transport', `${name}: not ${expected}`, changed, answer);
  }

  /** Makes one payment, replays it, and takes four random steps with it: refunds, voids and reads. At the end, the remaining cents must be right. */
  private async sequence(): Promise<void> {
    const create = this.operations.find(({ method, path }) => `${method} ${path}` === CREATE)!;
    const { sent, body } = this.requestFor(create, false, '4242 4242 4242 4242');
    const key = `${this.name}-${this.draws}`;
    // This `referenceId` prevents other steps from using the payment.
    const own: Sent = { ...sent, body: JSON.stringify({ ...(body as object), referenceId: `${OWN}${key}` }) };
    const keyed = this.withHeader(own, 'idempotency-key', key);
    const first = await this.send(keyed);
    if (first.status !== 200) return this.violation('a plain payment', 'not 200', keyed, first);
    const payment = dataOf<PaymentView>(first);
    const replay = await this.send(keyed);
    this.checked('replay');
    if (replay.text !== first.text || replay.headers['idempotent-replayed'] !== 'true')
      this.violation('replay', 'not the first answer', keyed, replay);

    const path = `/api/partner/v1/payments/${payment.id}`;
    let voided = false;
    let left = payment.remainingRefundableAmountCents;
    for (let step = 0; step < 4; step++) {
      const operation = this.pick(['refund', 'refund', 'void', 'get', 'list'] as const);
      if (operation === 'get' || operation === 'list') {
        await this.available(first, keyed);
        continue;
      }
      const amountCents = this.pick([null, 1, Math.max(1, Math.floor(payment.amountCents / 3)), payment.amountCents]);
      const includeFee = amountCents === null && this.pick([true, false]);
      const asked = operation === 'void' ? {} : { ...(amountCents !== null && { amountCents }), ...(includeFee && { feeType: 'include_fee' }) };
      const request = this.post(`${path}/${operation}`, asked);
      const answer = await this.send(request);
      this.checked('after a void nothing moves');
      if (voided && answer.status !== 422) this.violation('after a void nothing moves', `${operation} was not refused`, request, answer);
      if (answer.status === 200) {
        const { amountCents: returned } = dataOf<{ amountCents: number }>(answer);
        this.checked('never more than there is');
        if (returned > left || returned < 1) this.violation('never more than there is', `${returned} of ${left}`, request, answer);
        left -= returned;
        voided ||= operation === 'void';
      } else if (answer.status !== 422) this.violation('refund and void', 'neither 200 nor 422', request, answer);
    }
    const after = await this.send(this.get(path));
    this.checked('the money adds up');
    if (dataOf<PaymentView>(after).remainingRefundableAmountCents !== left)
      this.violation('the money adds up', `${left} should remain`, this.get(path), after);
  }

  /** Checks that the payment can be read, and sometimes that the list has it. */
  private async available(answer: Answer, sent: Sent): Promise<void> {
    const { id } = dataOf<PaymentView>(answer);
    this.checked('what was answered can be read');
    const found = await this.send(this.get(`/api/partner/v1/payments/${id}`));
    if (found.status !== 200) this.violation('what was answered can be read', 'GET', sent, found);
    if (this.integer(LIST_EVERY) > 0) return;
    // Newer payments may push this one to a later page.
    for (let cursor: string | null = null; ;) {
      const query: string = cursor === null ? '' : `&cursor=${encodeURIComponent(cursor)}`;
      const listed: Answer = await this.send(this.get(`/api/partner/v1/payments?limit=${PAGE}${query}`));
      const { payments, nextCursor } = dataOf<{ payments: PaymentView[]; nextCursor: string | null }>(listed);
      if (payments.some((one) => one.id === id)) return;
      cursor = nextCursor;
      if (cursor === null) return this.violation('what was answered can be read', 'not in the list', sent, found);
    }
  }

  // ---- requests

  private requestFor(operation: Operation, withExtras = true, number?: string): { sent: Sent; body: unknown; card: (typeof CARDS)[number] | null } {
    const name = `${operation.method} ${operation.path}`;
    const arbitrary = this.bodies.get(operation);
    let body = arbitrary ? this.sample(arbitrary) : null;
    let card: (typeof CARDS)[number] | null = null;
    if (name === CREATE) ({ body, card } = this.soundCreate(body as Record<string, unknown>, withExtras, number));
    if (operation.path.endsWith('/refund')) body = soundRefund(body as Record<string, unknown>);
    const query = new URLSearchParams();
    for (const { in: where, name: parameter, required, schema } of operation.parameters) {
      if (where !== 'query' || (!required && this.integer(2) === 0)) continue;
      const value = this.queryValue(parameter, schema);
      if (value !== null) query.set(parameter, value);
    }
    // It stands alone, which the schema cannot express.
    if (query.has('idempotencyKey')) for (const parameter of [...query.keys()]) if (parameter !== 'idempotencyKey') query.delete(parameter);
    const search = query.size > 0 ? `?${query.toString()}` : '';
    const headers = this.headersFor(arbitrary !== undefined);
    return {
      sent: { method: operation.method, path: this.fill(operation.path) + search, headers, body: body === null ? null : JSON.stringify(body) },
      body,
      card,
    };
  }

  /** Adjusts a body to rules that the schema cannot express: our portal, lines that sum to the amount, a sandbox card that has not expired. */
  private soundCreate(drawn: Record<string, unknown>, withExtras: boolean, number?: string) {
    const lines = (drawn.lineItems as Record<string, unknown>[]).map((line) => ({
      ...line,
      amountCents: Math.min(line.amountCents as number, 1_000_000),
    }));
    const card = number === undefined ? this.pick(CARDS) : CARDS.find((one) => one.number === number)!;
    const body: Record<string, unknown> = {
      ...drawn,
      portalId: this.target.portalId,
      amountCents: lines.reduce((sum, { amountCents }) => sum + amountCents, 0),
      lineItems: lines.map((line) => ({ ...line, ...(withExtras ? {} : { description: 'x' }) })),
      paymentMethod: {
        type: 'card',
        cardNumber: card.number,
        expirationDate: this.pick(['12/30', '0131', '06/35']),
        cvv: this.pick(['123', '0000']),
      },
    };
    delete body.capture;
    delete body.captureMode;
    if (this.integer(2) === 0) body.capture = 'sale';
    return { body, card };
  }

  private queryValue(name: string, schema: Schema): string | null {
    if (name === 'portalId') return this.target.portalId;
    if (name === 'cursor') return null;
    if (name === 'idempotencyKey') return this.sample(fc.stringMatching(/^[!-~]{1,40}$/));
    if (name === 'status') return this.pick(['succeeded', 'failed', 'voided', 'refunded', 'partially_refunded', 'unknown', 'pending']);
    if (name === 'from') return this.pick(['2020-01-01', '2026-01-31T12:00:00Z', '2026-01-31T12:00:00+05:30']);
    if (name === 'to') return this.pick(['2099-01-01', '2098-12-31T23:59:59.999Z']);
    return String(this.sample(allowed(schema, this.resolve, false)));
  }

  private fill(path: string): string {
    return path.replace('{id}', () =>
      this.known.length > 0 && this.integer(4) > 0 ? this.pick(this.known).id : this.sample(fc.uuid({ version: 7 })),
    );
  }
  private headersFor(hasBody: boolean): [string, string][] {
    return [['authorization', `ApiKey ${this.target.apiKey}`], ...(hasBody ? [['content-type', 'application/json'] as [string, string]] : [])];
  }
  private withHeader(sent: Sent, name: string, value: string): Sent {
    return { ...sent, headers: [...sent.headers.filter(([header]) => header !== name), [name, value]] };
  }
  private post(path: string, body: object): Sent {
    return { method: 'POST', path, headers: this.headersFor(true), body: JSON.stringify(body) };
  }
  private get(path: string): Sent {
    return { method: 'GET', path, headers: this.headersFor(false), body: null };
  }

  private async send(sent: Sent): Promise<Answer> {
    this.count += 1;
    const answer = await exchange(this.agent, this.target.url, sent);
    this.statuses[answer.status] = (this.statuses[answer.status] ?? 0) + 1;
    this.examine(sent, answer);
    return answer;
  }

  /** Invariants of every answer. */
  private examine(sent: Sent, answer: Answer): void {
    this.checked('answers are as documented');
    try {
      this.judge.check({ ...sent, ...answer, contentType: answer.headers['content-type'] as string | undefined });
    } catch (error) {
      return this.violation('answers are as documented', (error as Error).message.slice(0, 500), sent, answer);
    }
    this.checked('no unexplained 5xx');
    const explained = answer.status === 501 || (GATEWAY_TROUBLE.includes(answer.status) && sent.method === 'POST');
    if (answer.status >= 500 && !explained) this.violation('no unexplained 5xx', String(answer.status), sent, answer);
    this.checked('no card number in an answer');
    for (const [run] of answer.text.matchAll(PAN))
      if (CARD_DIGITS.has(digitsOf(run))) this.violation('no card number in an answer', run, sent, answer);
    if (answer.status !== 200) return;
    const data = dataOf<Partial<PaymentView> & { payments?: PaymentView[] }>(answer);
    for (const payment of data.payments ?? (data.lineItems ? [data as PaymentView] : [])) this.sound(payment, sent, answer);
  }

  private sound(payment: PaymentView, sent: Sent, answer: Answer): void {
    this.checked('captured = refunded + remaining');
    const { capturedAmountCents, refundedAmountCents, remainingRefundableAmountCents, lineItems } = payment;
    const sum = (of: (line: PaymentView['lineItems'][number]) => number) => lineItems.reduce((total, line) => total + of(line), 0);
    const sound =
      capturedAmountCents === refundedAmountCents + remainingRefundableAmountCents &&
      sum((line) => line.amountCents) === payment.amountCents &&
      sum((line) => line.serviceFeeCents) === payment.serviceFeeCents &&
      sum((line) => line.refundedAmountCents) === refundedAmountCents &&
      sum((line) => line.remainingRefundableAmountCents) === remainingRefundableAmountCents;
    if (!sound) this.violation('captured = refunded + remaining', payment.id, sent, answer);
    if (payment.referenceId?.startsWith(OWN) || this.known.some(({ id }) => id === payment.id)) return;
    this.known.push({ id: payment.id });
    if (this.known.length > KEPT_PAYMENTS) this.known.shift();
  }

  /**
   * Compares the list with the bank, to the cent. A charge with an unknown outcome stays at the bank until recovery voids it, so charges of that card
   * are left out.
   */
  async compareWithBank(): Promise<void> {
    this.checked('the bank’s books are ours');
    const agent = new Agent({ keepAlive: true });
    let ours = 0;
    for (let cursor: string | null = null; ;) {
      const path: string = `/api/partner/v1/payments?limit=100${cursor === null ? '' : `&cursor=${encodeURIComponent(cursor)}`}`;
      const answer: Answer = await exchange(agent, this.target.url, this.get(path));
      const { payments, nextCursor } = dataOf<{ payments: PaymentView[]; nextCursor: string | null }>(answer);
      ours += payments.reduce((sum, one) => sum + one.capturedAmountCents - one.refundedAmountCents, 0);
      cursor = nextCursor;
      if (cursor === null) break;
    }
    agent.destroy();
    const bank = (await this.target.bank.truth())
      .filter(({ op, result, fixture }) => op === 'charge' && result === 'approved' && fixture !== 'unreadable')
      .reduce((sum, { amountCents = 0, voidedCents = 0, refundedCents = 0 }) => sum + amountCents - voidedCents - refundedCents, 0);
    if (ours !== bank)
      this.violations.push({ check: 'the bank’s books are ours', what: `${ours} cents here, ${bank} at the bank`, request: '', answer: '' });
  }

  private checked(check: string): void {
    this.checks[check] = (this.checks[check] ?? 0) + 1;
  }
  private violation(check: string, what: string, { method, path, body, headers }: Sent, { status, text }: Answer): void {
    if (this.violations.length >= MAX_KEPT_VIOLATIONS) return;
    // The text is enough to repeat the request. The credential is left out.
    const sent = `${method} ${path} ${JSON.stringify(headers.filter(([name]) => name !== 'authorization'))} ${String(body ?? '').slice(0, 1_500)}`;
    this.violations.push({ check, what, request: sent, answer: `${status} ${text.slice(0, 800)}` });
  }
}

/** Removes the amount if `feeType` is set. The service refuses `include_fee` with a smaller amount (C36), which no schema can express. */
const soundRefund = (body: Record<string, unknown>): Record<string, unknown> => {
  if (body.feeType !== undefined) delete body.amountCents;
  return body;
};

const dataOf = <T>({ text }: Answer): T => (JSON.parse(text) as { data: T }).data;

/** Sends one request unchanged. Repeated headers stay repeated. */
const exchange = (agent: Agent, url: string, { method, path, headers, body }: Sent): Promise<Answer> =>
  new Promise((resolve, reject) => {
    const bytes = body === null ? null : Buffer.from(body);
    const grouped = new Map<string, string[]>();
    for (const [name, value] of headers) grouped.set(name, [...(grouped.get(name) ?? []), value]);
    const outgoing = httpRequest(
      new URL(path, url),
      {
        agent,
        method,
        headers: {
          ...Object.fromEntries([...grouped].map(([name, values]) => [name, values.length === 1 ? latin1(values[0]!) : values])),
          ...(bytes && { 'content-length': bytes.length }),
        },
      },
      (answer: IncomingMessage) => {
        const chunks: Buffer[] = [];
        answer.on('data', (chunk: Buffer) => chunks.push(chunk));
        answer.on('end', () => resolve({ status: answer.statusCode!, headers: answer.headers, text: Buffer.concat(chunks).toString() }));
        answer.on('error', reject);
      },
    );
    outgoing.on('error', reject);
    outgoing.end(bytes ?? undefined);
  });

/** Node sends headers as Latin-1. */
const latin1 = (value: string): string => Buffer.from(value, 'utf8').toString('latin1');
