/** The HTTP server of the double: the vendor's API under `/v1`, and the control under `/_double`. */
import { randomBytes } from 'node:crypto';
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { AFTER, BEFORE, type Fault, type FaultName, FAULTS, type Operation, OPERATIONS, STANDING, WITHIN } from './faults.js';
import { listOf, namesOf, readForm, textOf } from './form.js';
import { type Answer, type Fields, ok, refusal, shown, type Thing, Vendor } from './vendor.js';

const MAX_BODY_BYTES = 64 * 1024;
const MEGABYTE = 1024 * 1024;
const DEFAULT_ACCOUNTS = ['one', 'two'];
/** A card number that passes the check digit. No test sends it, so an answer that holds it repeats nothing. */
const A_CARD = '4000056655665556';

export interface StripeDoubleOptions {
  /** The double's own file. */
  readonly file: string;
  readonly port?: number;
  /** Milliseconds that every answer takes. */
  readonly delayMs?: number;
}

export interface StripeDouble {
  /** `http://127.0.0.1:PORT`. */
  readonly url: string;
  readonly vendor: Vendor;
  /** The number of calls of each operation since the start. */
  readonly calls: Readonly<Partial<Record<Operation, number>>>;
  close(): Promise<void>;
}

/** The parameters of each operation, besides `expand`. A list ends with `[]`; metadata may have any member. */
const PARAMETERS: Readonly<Record<Operation, readonly string[]>> = {
  create: ['amount', 'currency', 'allowed_payment_method_types[]', 'capture_method', 'metadata'],
  confirm: ['payment_method', 'error_on_requires_action'],
  cancel: ['cancellation_reason'],
  update: ['metadata'],
  intent: [],
  intents: ['limit', 'starting_after', 'created'],
  refund: ['payment_intent', 'charge', 'amount', 'metadata', 'reason'],
  one_refund: [],
  refunds: ['limit', 'starting_after', 'payment_intent', 'charge', 'created'],
  charge: [],
  payouts: ['limit', 'starting_after', 'created', 'status'],
  payout: [],
  lines: ['limit', 'starting_after', 'payout', 'source', 'type', 'created'],
  disputes: ['limit', 'starting_after', 'created', 'payment_intent', 'charge'],
  dispute: [],
  account: [],
  balance: [],
};

interface Request {
  readonly account: string;
  readonly secretKey: string;
  readonly op: Operation;
  readonly id: string;
  readonly path: string;
  readonly form: Fields;
  readonly expand: readonly string[];
  readonly key: string | null;
}

const ROUTES: readonly [string, RegExp, Operation][] = [
  ['POST', /^\/v1\/payment_intents$/, 'create'],
  ['GET', /^\/v1\/payment_intents$/, 'intents'],
  ['GET', /^\/v1\/payment_intents\/([^/]+)$/, 'intent'],
  ['POST', /^\/v1\/payment_intents\/([^/]+)$/, 'update'],
  ['POST', /^\/v1\/payment_intents\/([^/]+)\/confirm$/, 'confirm'],
  ['POST', /^\/v1\/payment_intents\/([^/]+)\/cancel$/, 'cancel'],
  ['POST', /^\/v1\/refunds$/, 'refund'],
  ['GET', /^\/v1\/refunds$/, 'refunds'],
  ['GET', /^\/v1\/refunds\/([^/]+)$/, 'one_refund'],
  ['GET', /^\/v1\/charges\/([^/]+)$/, 'charge'],
  ['GET', /^\/v1\/payouts$/, 'payouts'],
  ['GET', /^\/v1\/payouts\/([^/]+)$/, 'payout'],
  ['GET', /^\/v1\/balance_transactions$/, 'lines'],
  ['GET', /^\/v1\/disputes$/, 'disputes'],
  ['GET', /^\/v1\/disputes\/([^/]+)$/, 'dispute'],
  ['GET', /^\/v1\/account$/, 'account'],
  ['GET', /^\/v1\/balance$/, 'balance'],
];

const readBody = async (request: IncomingMessage): Promise<string> => {
  const chunks: Buffer[] = [];
  let size = 0;
  for await (const chunk of request as AsyncIterable<Buffer>) {
    size += chunk.length;
    if (size <= MAX_BODY_BYTES) chunks.push(chunk);
  }
  return Buffer.concat(chunks).toString('utf8');
};

/** Canonical text of the parameters: their order does not count. */
const parametersOf = (form: Fields): string =>
  JSON.stringify(form, (_, value: unknown) =>
    value !== null && typeof value === 'object' && !Array.isArray(value)
      ? Object.fromEntries(Object.entries(value).sort(([a], [b]) => (a < b ? -1 : 1)))
      : value,
  );

const ERRORS: Readonly<Partial<Record<FaultName, [number, Fields]>>> = {
  rate_limit: [429, { type: 'invalid_request_error', code: 'rate_limit', message: 'Request rate limit exceeded.' }],
  lock_timeout: [429, { type: 'invalid_request_error', code: 'lock_timeout', message: 'This object cannot be accessed right now.' }],
  key_in_use: [409, { type: 'idempotency_error', code: 'idempotency_key_in_use', message: 'There is another request in progress with this key.' }],
  conflict_bare: [409, { type: 'idempotency_error', message: 'There is another request in progress with this key.' }],
  too_many_bare: [429, { type: 'invalid_request_error', message: 'Too many requests.' }],
  unauthorized: [401, { type: 'invalid_request_error', message: 'Invalid API Key provided.' }],
  forbidden: [403, { type: 'invalid_request_error', message: 'The provided key does not have the required permissions for this endpoint.' }],
  unknown_error: [400, { type: 'invalid_request_error', code: 'a_code_that_nobody_knows', message: 'Something else.' }],
};
const STORED_500 = { error: { type: 'api_error', message: 'An unknown error occurred' } };

export const startStripeDouble = async ({ file, port = 0, delayMs = 0 }: StripeDoubleOptions): Promise<StripeDouble> => {
  const vendor = new Vendor(file);
  if (vendor.accountIds.length === 0) for (const name of DEFAULT_ACCOUNTS) vendor.setAccount(`acct_3Double${name}`, [`sk_test_double_${name}_0001`]);
  const calls: Partial<Record<Operation, number>> = {};
  const faults: Fault[] = [];
  /** Keys and objects of requests that are being executed. */
  const running = new Set<string>();
  const timers = new Set<NodeJS.Timeout>();
  const after = (ms: number, work: () => void) => {
    const timer = setTimeout(() => (timers.delete(timer), work()), ms);
    timers.add(timer);
  };

  const use = (names: readonly FaultName[], op: Operation, ref: string | null): Fault | null => {
    const fault = faults.find((one) => names.includes(one.name) && (one.op === '*' || one.op === op) && (one.ref === null || one.ref === ref));
    if (!fault) return null;
    if (fault.times !== null && (fault.times -= 1) <= 0) faults.splice(faults.indexOf(fault), 1);
    return fault;
  };
  /** Whatever its operation, and the number of times. `ref` null: any reference. */
  const stands = (name: FaultName, ref: string | null = null): boolean =>
    faults.some((one) => one.name === name && (one.ref === null || ref === null || one.ref === ref));

  // ---- Answers ----------------------------------------------------------------------------------------------------------------

  const send = (response: ServerResponse, status: number, type: string, text: string, headers: Record<string, string> = {}) => {
    const wrong = faults.find(({ name }) => name === 'clock_wrong');
    response.writeHead(status, {
      ...(wrong && { date: new Date(Date.now() + wrong.ms).toUTCString() }),
      'content-type': type,
      'content-length': String(Buffer.byteLength(text)),
      'stripe-version': '2026-10-28.endive',
      ...headers,
    });
    response.end(text);
  };
  const sendJson = (response: ServerResponse, status: number, body: Fields, headers: Record<string, string> = {}) => {
    const text = JSON.stringify(body, null, 2);
    if (delayMs > 0) after(delayMs, () => send(response, status, 'application/json', text, headers));
    else send(response, status, 'application/json', text, headers);
  };

  /** The body, as a fault changes it. */
  const changed = (name: FaultName, body: Fields, request: Request): Fields => {
    const every = (change: (key: string, value: unknown) => unknown) => JSON.parse(JSON.stringify(body, change)) as Fields;
    const isEmpty = (value: unknown) => value !== null && typeof value === 'object' && Object.keys(value).length === 0;
    switch (name) {
      case 'numbers':
        return every((_, value) => (typeof value === 'number' ? String(value) : value));
      case 'nulls':
        return every((_, value) => (isEmpty(value) ? null : value));
      case 'absent':
        return every((_, value) => (value === null ? undefined : value));
      case 'other_ref':
        return every((key, value) => (key === 'payfold_ref' ? 'R0THER0000000000REF0' : value));
      case 'no_ref':
        return every((key, value) => (key === 'metadata' ? undefined : value));
      case 'no_card':
        return every((key, value) => (key === 'payment_method_details' ? undefined : value));
      case 'no_error':
        return every((key, value) => (key === 'last_payment_error' ? null : value));
      case 'other_amount':
        return every((key, value) => (key === 'amount' ? Number(value) + 1 : value));
      case 'partial':
        return every((key, value) => (key === 'amount_received' || key === 'amount_captured' ? Math.floor(Number(value) / 2) : value));
      case 'other_id':
        return { ...body, id: `${String(body.id)}0` };
      case 'id_zero':
        return { ...body, id: '0' };
      case 'echo_key':
        return { ...body, description: request.secretKey };
      case 'echo_card':
        return { ...body, description: A_CARD };
      case 'unknown_status':
        return { ...body, status: 'flourishing' };
      default:
        return body;
    }
  };

  const sendWith = (
    fault: Fault | null,
    status: number,
    given: Fields,
    request: Request,
    response: ServerResponse,
    headers: Record<string, string>,
  ): void => {
    const body = fault ? changed(fault.name, given, request) : given;
    const text = JSON.stringify(body, null, 2);
    switch (fault?.name) {
      case 'cut_after':
        return void response.socket?.destroy();
      case 'hang':
        return;
      case 'half':
        response.writeHead(status, { 'content-type': 'application/json', 'content-length': String(Buffer.byteLength(text)) });
        response.write(text.slice(0, text.length / 2), () => response.socket?.destroy());
        return;
      case 'http_500':
        return send(response, 500, 'text/html', '<html><body>Server Error</body></html>');
      case 'html':
        return send(response, 200, 'text/html', '<!doctype html><html><body>The service is unavailable.</body></html>');
      case 'huge':
        return send(response, status, 'application/json', text + ' '.repeat(5 * MEGABYTE));
      case 'empty':
        return send(response, status, 'application/json', '');
      case 'not_json':
        return send(response, status, 'application/json', text.slice(0, -3));
      case 'bom':
        return send(response, status, 'application/json', `\ufeff${text}`);
      case 'card_error_beside': {
        const error = { type: 'card_error', code: 'card_declined', decline_code: 'generic_decline', message: 'Your card was declined.' };
        return sendJson(response, 402, { error: { ...error, payment_intent: body } }, headers);
      }
      case 'error_200':
        return send(response, 200, 'application/json', JSON.stringify(STORED_500));
      default:
        return sendJson(response, status, body, headers);
    }
  };

  // ---- Execution --------------------------------------------------------------------------------------------------------------

  const expanded = (request: Request, path: string, thing: Fields): Fields => {
    const id = thing[path];
    const found = typeof id === 'string' ? vendor.byId(request.account, id) : undefined;
    return found ? { ...thing, [path]: shown(found) } : thing;
  };
  const one = (request: Request, answer: Answer): Answer =>
    answer.status !== 200 ? answer : { ...answer, body: request.expand.reduce((body, path) => expanded(request, path, body), shown(answer.body)) };
  const found = (request: Request, kind: string, thing: Thing | undefined): Answer =>
    thing ? one(request, ok(thing)) : refusal(404, { code: 'resource_missing', message: `No such ${kind}: '${request.id}'`, param: 'id' });

  const listed = (request: Request, data: readonly Thing[], more: boolean): Answer =>
    ok({
      object: 'list',
      url: request.path,
      has_more: more,
      data: data.map((thing) =>
        request.expand
          .filter((path) => path.startsWith('data.'))
          .reduce((body, path) => expanded(request, path.slice('data.'.length), body), shown(thing)),
      ),
    });

  /** A page of a list, newest first. */
  const page = (request: Request, all: readonly Thing[]): Answer => {
    const { limit: given, starting_after: startingAfter, created } = request.form;
    const limit = given === undefined ? 10 : Number(given);
    if (!(limit >= 1 && limit <= 100)) return refusal(400, { code: 'parameter_invalid_integer', param: 'limit', message: 'Invalid limit' });
    if (stands('pages_empty')) return listed(request, [], true);
    const bounds = (created ?? {}) as Fields;
    const { gt = '-1', gte = '0', lt = 'Infinity', lte = 'Infinity' } = bounds as Record<string, string>;
    const newestFirst = all
      .filter((thing) => thing.created > Number(gt) && thing.created >= Number(gte) && thing.created < Number(lt) && thing.created <= Number(lte))
      .reverse();
    let from = 0;
    if (startingAfter !== undefined) {
      from = newestFirst.findIndex(({ id }) => id === startingAfter) + 1;
      if (from === 0) return refusal(400, { code: 'resource_missing', param: 'starting_after', message: 'No such object' });
      if (stands('pages_twice')) from -= 1;
    }
    return listed(request, newestFirst.slice(from, from + limit), newestFirst.length > from + limit);
  };

  const execute = (request: Request, processingMs: number | null): Answer => {
    const { account, op, id, form } = request;
    switch (op) {
      case 'create':
        return one(request, vendor.createIntent(account, { ...form, payment_method_types: listOf(form.allowed_payment_method_types) }));
      case 'confirm':
        return one(request, vendor.confirmIntent(account, id, form, processingMs));
      case 'cancel':
        return one(request, vendor.cancelIntent(account, id));
      case 'update':
        return one(request, vendor.updateIntent(account, id, form));
      case 'intent':
        return found(request, 'payment_intent', vendor.intent(account, id));
      case 'intents':
        return page(
          request,
          vendor.all(account, 'payment_intent').map((intent) => vendor.intent(account, intent.id)!),
        );
      case 'refund':
        return one(request, vendor.createRefund(account, form, stands('refunds_exceed')));
      case 'one_refund':
        return found(request, 'refund', vendor.find(account, 'refund', id));
      case 'refunds':
        return page(
          request,
          vendor
            .all(account, 'refund')
            .filter((refund) => form.payment_intent === undefined || refund.payment_intent === form.payment_intent)
            .filter((refund) => form.charge === undefined || refund.charge === form.charge),
        );
      case 'charge':
        return found(request, 'charge', vendor.find(account, 'charge', id));
      case 'payouts':
        return page(
          request,
          vendor.all(account, 'payout').filter((payout) => form.status === undefined || payout.status === form.status),
        );
      case 'payout':
        return found(request, 'payout', vendor.find(account, 'payout', id));
      case 'lines': {
        if (form.payout === undefined)
          return page(
            request,
            vendor.all(account, 'balance_transaction').filter((txn) => form.source === undefined || txn.source === form.source),
          );
        const limit = form.limit === undefined ? 10 : Number(form.limit);
        if (!(limit >= 1 && limit <= 100)) return refusal(400, { code: 'parameter_invalid_integer', param: 'limit', message: 'Invalid limit' });
        const lines = vendor.linesOfPayout(
          account,
          textOf(form.payout),
          form.starting_after === undefined ? null : textOf(form.starting_after),
          limit,
        );
        if (!lines) return refusal(400, { param: 'payout', message: 'Balance transaction history can only be filtered on automatic transfers' });
        const twice = stands('pages_twice') && form.starting_after !== undefined && lines.data.length > 0;
        return listed(request, twice ? [{ ...lines.data[0]!, id: textOf(form.starting_after) }, ...lines.data] : lines.data, lines.more);
      }
      case 'disputes':
        return page(request, vendor.all(account, 'dispute'));
      case 'dispute':
        return found(request, 'dispute', vendor.find(account, 'dispute', id));
      case 'account':
        return ok(vendor.account(account));
      case 'balance':
        return ok(vendor.balance(account));
    }
  };

  const unknownParameter = ({ op, form }: Request): string | null => {
    const allowed = PARAMETERS[op];
    const isAllowed = (name: string) => {
      const top = name.replace(/\[.*$/, '');
      if (name === top) return allowed.includes(top);
      if (top === 'metadata') return allowed.includes('metadata');
      if (top === 'created') return allowed.includes('created') && /^created\[(gt|gte|lt|lte)\]$/.test(name);
      return allowed.includes(`${top}[]`);
    };
    return namesOf(form).find((name) => !isAllowed(name)) ?? null;
  };

  const refOf = ({ form, key }: Request): string | null => {
    const metadata = form.metadata as Fields | undefined;
    return typeof metadata?.payfold_ref === 'string' ? metadata.payfold_ref : key === null ? null : key.replace(/-confirm$/, '');
  };

  const serve = (request: Request, method: string, response: ServerResponse): void => {
    const { account, op, path, form, key } = request;
    calls[op] = (calls[op] ?? 0) + 1;
    const requestId = `req_${randomBytes(7).toString('hex')}`;
    const headers = { 'request-id': requestId };
    const ref = refOf(request);
    const before = use(BEFORE, op, ref);
    switch (before?.name) {
      case 'cut_before':
        return void response.socket?.destroy();
      case 'hang_before':
        return;
      case 'http_500_before':
        return send(response, 500, 'text/html', '<html><body>Server Error</body></html>');
      case 'http_503':
        return send(response, 503, 'text/html', '<html><body>Service Unavailable</body></html>');
      case 'redirect':
        return send(response, 302, 'text/html', '', { location: 'https://example.com/' });
      default: {
        const error = before && ERRORS[before.name];
        if (error) return sendJson(response, error[0], { error: error[1] }, headers);
      }
    }
    const unknown = unknownParameter(request);
    if (unknown !== null)
      return sendJson(
        response,
        400,
        refusal(400, { code: 'parameter_unknown', param: unknown, message: `Received unknown parameter: ${unknown}` }).body,
        headers,
      );

    const keyName = key === null || method !== 'POST' ? null : stands('keys_unbound', ref) ? `${path} ${key}` : key;
    if (keyName !== null) {
      if (running.has(`key ${account} ${keyName}`)) return sendJson(response, 409, { error: ERRORS.key_in_use![1] }, headers);
      const stored = stands('keys_forgotten', ref) ? undefined : vendor.key(account, keyName);
      if (stored) {
        const wrong =
          stored.endpoint !== path
            ? `Keys for idempotent requests can only be used for the same endpoint they were first used for ('${stored.endpoint}' vs '${path}').`
            : stored.parameters !== parametersOf({ ...form, expand: request.expand })
              ? 'Keys for idempotent requests can only be used with the same parameters they were first used with.'
              : null;
        if (wrong !== null) return sendJson(response, 400, { error: { type: 'idempotency_error', message: wrong } }, headers);
        const replayed = { ...headers, 'idempotent-replayed': 'true', 'original-request': stored.requestId };
        return sendWith(use(AFTER, op, ref), stored.status, stored.body, request, response, replayed);
      }
    }
    const lock = ['confirm', 'cancel', 'update'].includes(op)
      ? `lock ${account} ${request.id}`
      : op === 'refund'
        ? `lock ${account} ${String(form.payment_intent)}`
        : null;
    if (lock !== null && running.has(lock)) return sendJson(response, 429, { error: ERRORS.lock_timeout![1] }, headers);

    const run = (name: FaultName | null): Answer => {
      const processing = op === 'confirm' ? use(['processing'], op, ref) : null;
      const answer = name === 'stored_500' ? { status: 500, body: STORED_500, begun: true } : execute(request, processing?.ms ?? null);
      const given = name === 'executed_500' ? { status: 500, body: STORED_500, begun: true } : answer;
      if (keyName !== null && given.begun)
        vendor.storeKey(account, keyName, {
          endpoint: path,
          parameters: parametersOf({ ...form, expand: request.expand }),
          atMs: vendor.nowMs,
          status: given.status,
          body: given.body,
          requestId,
        });
      vendor.commit();
      return given;
    };
    const within = use(WITHIN, op, ref);
    if (within?.name !== 'slow' && within?.name !== 'late') {
      const { status, body } = run(within?.name ?? null);
      return sendWith(use(AFTER, op, ref), status, body, request, response, headers);
    }
    const held = [...(keyName === null ? [] : [`key ${account} ${keyName}`]), ...(lock === null ? [] : [lock])];
    for (const name of held) running.add(name);
    after(within.ms, () => {
      const { status, body } = run(null);
      for (const name of held) running.delete(name);
      if (within.name === 'slow') sendWith(use(AFTER, op, ref), status, body, request, response, headers);
    });
  };

  const api = (incoming: IncomingMessage, url: URL, text: string, response: ServerResponse): void => {
    const secretKey = /^Bearer (.+)$/.exec(incoming.headers.authorization ?? '')?.[1] ?? '';
    const account = vendor.accountOf(secretKey);
    if (account === null) return sendJson(response, 401, { error: ERRORS.unauthorized![1] });
    const route = ROUTES.find(([method, pattern]) => method === incoming.method && pattern.test(url.pathname));
    if (!route)
      return sendJson(response, 404, {
        error: { type: 'invalid_request_error', message: `Unrecognized request URL (${incoming.method}: ${url.pathname}).` },
      });
    const { expand, ...form } = readForm(incoming.method === 'POST' ? text : url.search.slice(1));
    const header = incoming.headers['idempotency-key'];
    serve(
      {
        account,
        secretKey,
        op: route[2],
        id: decodeURIComponent(route[1].exec(url.pathname)![1] ?? ''),
        path: url.pathname,
        form,
        expand: listOf(expand),
        key: typeof header === 'string' ? header : null,
      },
      incoming.method!,
      response,
    );
  };

  // ---- Control ----------------------------------------------------------------------------------------------------------------

  const control = (method: string, url: URL, body: string): object => {
    const given = (body === '' ? {} : JSON.parse(body)) as Fields;
    const number = (name: string, otherwise: number) => (typeof given[name] === 'number' ? given[name] : otherwise);
    const text = (name: string, otherwise: string) => (typeof given[name] === 'string' ? given[name] : otherwise);
    const account = text('account', url.searchParams.get('account') ?? vendor.accountIds[0]!);
    const { account: _, ...rest } = given;
    const whole = <T extends object>(thing: T | null, what: string): T => {
      if (!thing) throw new Error(`no ${what}`);
      return thing;
    };
    switch (`${method} ${url.pathname}`) {
      case 'GET /_double':
        return { now: new Date(vendor.nowMs).toISOString(), aheadMs: vendor.ahead, accounts: vendor.accountIds, calls, faults };
      case 'POST /_double/clock':
        // `aheadMs`: the new distance from the host's clock; `ms`: what is added to it.
        vendor.moveTo(number('aheadMs', vendor.ahead + number('ms', 0)));
        return { aheadMs: vendor.ahead };
      case 'POST /_double/accounts':
        vendor.setAccount(
          account,
          (given.keys as string[] | undefined) ?? [`sk_test_double_${account}`],
          (given.changes as Fields | undefined) ?? {},
        );
        return vendor.account(account);
      case 'POST /_double/methods':
        return { id: vendor.addMethod(account, rest).id };
      case 'POST /_double/payouts':
        return { payout: vendor.payOut(account, rest) };
      case 'POST /_double/payouts/change':
        return { payout: vendor.changePayout(account, text('id', ''), (given.changes as Fields | undefined) ?? {}) };
      case 'POST /_double/seed':
        return { payout: vendor.seed(account, number('count', 1), number('amountCents', 1_000), text('label', 'S')) };
      case 'POST /_double/refunds/fail':
        return whole(vendor.failRefund(account, text('id', '')), 'such refund');
      case 'POST /_double/disputes':
        return whole(vendor.openDispute(account, text('intent', ''), (given.dispute as Fields | undefined) ?? {}), 'such intent');
      case 'POST /_double/disputes/change':
        return whole(vendor.moveDispute(account, text('id', ''), (given.changes as Fields | undefined) ?? {}), 'such dispute');
      case 'POST /_double/transactions':
        return vendor.bookForeign(account, { type: 'stripe_fee', reporting_category: 'fee', amount: -100, fee: 0, source: null, ...rest });
      case 'GET /_double/intents': {
        const ref = url.searchParams.get('ref');
        const all = vendor.all(account, 'payment_intent').map(({ id }) => vendor.intent(account, id)!);
        return { intents: all.filter((intent) => ref === null || (intent.metadata as Fields).payfold_ref === ref) };
      }
      case 'GET /_double/refunds':
        return { refunds: vendor.all(account, 'refund') };
      case 'GET /_double/charges':
        return { charges: vendor.all(account, 'charge') };
      case 'POST /_double/faults': {
        const name = text('name', '') as FaultName;
        if (!(name in FAULTS)) throw new Error(`no fault ${name}`);
        const op = text('op', '*') as Operation | '*';
        if (op !== '*' && !OPERATIONS.includes(op)) throw new Error(`no operation ${op}`);
        const times = typeof given.times === 'number' ? given.times : STANDING.includes(name) || given.times === null ? null : 1;
        const fault: Fault = { name, op, ref: typeof given.ref === 'string' ? given.ref : null, times, ms: number('ms', 0) };
        faults.push(fault);
        return fault;
      }
      case 'DELETE /_double/faults': {
        const name = url.searchParams.get('name');
        for (const fault of [...faults]) if (name === null || fault.name === name) faults.splice(faults.indexOf(fault), 1);
        return {};
      }
      default:
        throw new Error(`no ${method} ${url.pathname}`);
    }
  };

  const server = createServer((incoming, response) => {
    const url = new URL(incoming.url ?? '/', 'http://double');
    void readBody(incoming)
      .then((body) => {
        if (url.pathname.startsWith('/_double')) return send(response, 200, 'application/json', JSON.stringify(control(incoming.method!, url, body)));
        api(incoming, url, body, response);
      })
      .catch((error: unknown) => {
        if (!response.headersSent) send(response, 400, 'application/json', JSON.stringify({ error: { message: String(error) } }));
      });
  });
  // A shorter limit than ours could end an idle connection within a call.
  server.keepAliveTimeout = 65_000;
  await new Promise<void>((resolve, reject) => server.once('error', reject).listen(port, '127.0.0.1', resolve));
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    vendor,
    calls,
    close: async () => {
      for (const timer of timers) clearTimeout(timer);
      server.closeAllConnections();
      await new Promise((resolve) => server.close(resolve));
      vendor.close();
    },
  };
};
