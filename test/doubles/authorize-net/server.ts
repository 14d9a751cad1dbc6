/** The HTTP server of the double: the vendor's address, and the control under `/_double`. */
import { createServer, type IncomingMessage, type Server, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { answer, type Call, changed, readCall, refusal, testModeAnswer } from './api.js';
import { FAULTS, type Fault, type FaultName, OPERATIONS, type Operation } from './faults.js';
import { type Merchant, Vendor } from './vendor.js';

export const API_PATH = '/xml/v1/request.api';
const MAX_BODY_BYTES = 256 * 1024;
const MEGABYTE = 1024 * 1024;

export const DEFAULT_MERCHANTS: readonly Merchant[] = ['one', 'two'].map((name, index) => ({
  apiLoginId: `login-${name}`,
  transactionKey: `key-of-${name}-0001`,
  gatewayId: String(700_001 + index),
  name: `Merchant ${name}`,
  testMode: false,
  cutOff: { time: '16:00', timeZone: 'America/Los_Angeles' },
}));

/** Faults before the call is executed. */
const BEFORE: readonly FaultName[] = ['cut_before', 'hang_before', 'http_500_before', 'http_503', 'redirect', 'test_mode', 'late'];
/** Faults of the answer. */
const AFTER: readonly FaultName[] = [
  'cut_after',
  'half',
  'hang',
  'delay',
  'http_500',
  'html',
  'huge',
  'empty',
  'not_json',
  'no_bom',
  'numbers',
  'entities',
  'nulls',
  'other_ref',
  'no_ref',
  'no_invoice',
  'echo_card',
  'echo_key',
  'id_zero',
  'error_too',
  'same_id',
  'split_tender',
  'other_amount',
  'unknown_code',
];
/** These faults stand until they are cleared, unless `times` says otherwise. */
const STANDING: readonly FaultName[] = [
  'duplicate_unnamed',
  'no_duplicates',
  'refunds_repeat',
  'refunds_exceed',
  'void_settled',
  'undone_unlisted',
  'details_api_off',
  'batch_twice',
  'batch_growing',
  'batch_pending',
  'clock_wrong',
];

export interface DoubleOptions {
  /** The double's own file. */
  readonly file: string;
  readonly port?: number;
  /** Milliseconds that every answer takes. */
  readonly delayMs?: number;
}

export interface AuthorizeNetDouble {
  /** `http://127.0.0.1:PORT`. */
  readonly url: string;
  /** The address for an adapter. */
  readonly endpoint: string;
  readonly vendor: Vendor;
  /** The number of calls of each operation since the start. */
  readonly calls: Readonly<Partial<Record<Operation, number>>>;
  close(): Promise<void>;
}

const readBody = async (request: IncomingMessage): Promise<string> => {
  const chunks: Buffer[] = [];
  let size = 0;
  for await (const chunk of request as AsyncIterable<Buffer>) {
    size += chunk.length;
    if (size <= MAX_BODY_BYTES) chunks.push(chunk);
  }
  return Buffer.concat(chunks).toString('utf8');
};

export const startAuthorizeNetDouble = async ({ file, port = 0, delayMs = 0 }: DoubleOptions): Promise<AuthorizeNetDouble> => {
  const vendor = new Vendor(file);
  if (vendor.merchants().length === 0) for (const merchant of DEFAULT_MERCHANTS) vendor.setMerchant(merchant);
  const calls: Partial<Record<Operation, number>> = {};
  const timers = new Set<NodeJS.Timeout>();
  const after = (ms: number, work: () => void) => {
    const timer = setTimeout(() => (timers.delete(timer), work()), ms);
    timers.add(timer);
  };

  const send = (response: ServerResponse, status: number, type: string, body: string, headers: Record<string, string> = {}) => {
    const wrong = vendor.standing('clock_wrong');
    // The host's clock: the time of a sandbox that was advanced is in no header of a real processor.
    const date = new Date(Date.now() + (wrong?.ms ?? 0)).toUTCString();
    response.writeHead(status, { 'content-type': type, 'content-length': String(Buffer.byteLength(body)), date, ...headers });
    response.end(body);
  };

  /** Sends an answer as a fault has it. */
  const sendWith = (fault: Fault | null, given: object, call: Call | null, response: ServerResponse): void => {
    const bom = fault?.name === 'no_bom' ? '' : '\ufeff';
    const text = bom + JSON.stringify(fault && call ? changed(vendor, fault, given as Record<string, unknown>, call) : given);
    switch (fault?.name) {
      case 'cut_after':
        return void response.socket?.destroy();
      case 'hang':
        return;
      case 'half':
        response.writeHead(200, { 'content-type': 'application/json; charset=utf-8', 'content-length': String(Buffer.byteLength(text)) });
        response.write(text.slice(0, text.length / 2), () => response.socket?.destroy());
        return;
      case 'http_500':
        return send(response, 500, 'text/html', '<html><body>Server Error</body></html>');
      case 'html':
        return send(response, 200, 'text/html', '<!doctype html><html><body>The service is unavailable.</body></html>');
      case 'huge':
        return send(response, 200, 'application/json; charset=utf-8', text + ' '.repeat(MEGABYTE));
      case 'empty':
        return send(response, 200, 'application/json; charset=utf-8', '');
      case 'not_json':
        return send(response, 200, 'application/json; charset=utf-8', `${text.slice(0, -20)}`);
      case 'delay':
        return after(fault.ms, () => send(response, 200, 'application/json; charset=utf-8', text));
      default:
        if (delayMs > 0) return after(delayMs, () => send(response, 200, 'application/json; charset=utf-8', text));
        return send(response, 200, 'application/json; charset=utf-8', text);
    }
  };

  const serve = (body: string, response: ServerResponse): void => {
    const call = readCall(vendor, body);
    if ('refused' in call) return sendWith(null, refusal(call.refused, call.refId), null, response);
    calls[call.op] = (calls[call.op] ?? 0) + 1;
    const before = vendor.use(BEFORE, call.op, call.ref);
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
      case 'test_mode':
        return sendWith(null, testModeAnswer(call), call, response);
      case 'late':
        return after(before.ms, () => void answer(vendor, call));
      default:
    }
    const given = answer(vendor, call);
    sendWith(vendor.use(AFTER, call.op, call.ref), given, call, response);
  };

  const control = async (request: IncomingMessage, url: URL, body: string): Promise<object> => {
    const given = (body === '' ? {} : JSON.parse(body)) as Record<string, unknown>;
    const number = (name: string, otherwise: number) => (typeof given[name] === 'number' ? given[name] : otherwise);
    const text = (name: string, otherwise: string) => (typeof given[name] === 'string' ? given[name] : otherwise);
    const merchant = text('merchant', url.searchParams.get('merchant') ?? DEFAULT_MERCHANTS[0]!.apiLoginId);
    if (!vendor.merchant(merchant) && url.pathname !== '/_double/merchants') throw new Error(`no merchant ${merchant}`);
    switch (`${request.method} ${url.pathname}`) {
      case 'GET /_double':
        return { now: new Date(vendor.nowMs).toISOString(), aheadMs: vendor.ahead, faults: vendor.faults, calls, merchants: vendor.merchants().map(({ apiLoginId, gatewayId, name }) => ({ apiLoginId, gatewayId, name })) }; // prettier-ignore
      case 'POST /_double/clock':
        // `aheadMs`: the new distance from the host's clock; `ms`: what is added to it.
        vendor.moveTo(number('aheadMs', vendor.ahead + number('ms', 0)));
        return { aheadMs: vendor.ahead };
      case 'POST /_double/merchants':
        vendor.setMerchant({ ...(vendor.merchant(text('apiLoginId', '')) ?? DEFAULT_MERCHANTS[0]!), ...given });
        return {};
      case 'POST /_double/batch': {
        const closed = vendor.closeNow(merchant);
        return closed ? { batchId: closed.id, count: closed.members.length } : { batchId: null, count: 0 };
      }
      case 'POST /_double/faults': {
        const name = text('name', '') as FaultName;
        if (!(name in FAULTS)) throw new Error(`no fault ${name}`);
        const op = text('op', '*') as Operation | '*';
        if (op !== '*' && !OPERATIONS.includes(op)) throw new Error(`no operation ${op}`);
        const times = typeof given.times === 'number' ? given.times : STANDING.includes(name) || given.times === null ? null : 1;
        const ref = typeof given.ref === 'string' ? given.ref : null;
        return vendor.setFault({ name, op, ref, times, ms: number('ms', 0), code: number('code', 2), reason: number('reason', 2) });
      }
      case 'DELETE /_double/faults':
        vendor.heal((url.searchParams.get('name') as FaultName | null) ?? null);
        return {};
      case 'GET /_double/transactions': {
        const ref = url.searchParams.get('ref');
        return { transactions: vendor.all(merchant).filter((txn) => ref === null || txn.ref === ref) };
      }
      case 'GET /_double/batches':
        return { batches: vendor.batches(merchant).map(({ members, ...one }) => ({ ...one, count: members.length })) };
      case 'POST /_double/seed':
        vendor.seed({ merchant, count: number('count', 1), amountCents: number('amountCents', 100), submitMs: number('submitMs', vendor.nowMs), label: text('label', 'S'), settled: given.settled === true }); // prettier-ignore
        return {};
      case 'POST /_double/foreign': {
        // A transaction that somebody else made: `status` auth_only, held or captured.
        const status = { auth_only: 'authorizedPendingCapture', held: 'FDSPendingReview', captured: 'capturedPendingSettlement' } as const;
        const kind = text('status', 'captured') as keyof typeof status;
        const base = { last4: '0027', brand: 'Visa', submitMs: number('submitMs', vendor.nowMs), visibleMs: 0, refTransId: null } as const;
        const answered = { responseCode: kind === 'held' ? 4 : 1, reason: kind === 'held' ? 253 : 1, authCode: 'FOREIG', avs: 'P', cvv: 'P' };
        const type = kind === 'auth_only' ? 'authOnlyTransaction' : 'authCaptureTransaction';
        return vendor.store({ ...base, ...answered, merchant, type, ref: text('ref', 'INV-1'), amountCents: number('amountCents', 500), status: status[kind], fingerprint: '' }); // prettier-ignore
      }
      default:
        throw new Error(`no ${request.method} ${url.pathname}`);
    }
  };

  const server: Server = createServer((request, response) => {
    const url = new URL(request.url ?? '/', 'http://double');
    void readBody(request)
      .then(async (body) => {
        if (url.pathname.startsWith('/_double')) return send(response, 200, 'application/json', JSON.stringify(await control(request, url, body)));
        if (request.method !== 'POST' || url.pathname !== API_PATH) return send(response, 404, 'text/html', '<html><body>Not Found</body></html>');
        serve(body, response);
      })
      .catch((error: unknown) => {
        if (!response.headersSent) send(response, 400, 'application/json', JSON.stringify({ error: String(error) }));
      });
  });
  // The vendor's own limit is not documented. A longer one than ours keeps an idle connection from ending within a call.
  server.keepAliveTimeout = 65_000;
  await new Promise<void>((resolve, reject) => server.once('error', reject).listen(port, '127.0.0.1', resolve));
  const address = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  return {
    url: address,
    endpoint: `${address}${API_PATH}`,
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
