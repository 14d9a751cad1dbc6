/**
 * Tests the outcome of a call for each row of the table in docs/contract.md#gateway. In each test, a server on a real socket misbehaves in one way.
 */
import { spawn } from 'node:child_process';
import { connect, createServer, type AddressInfo, type Server, type Socket } from 'node:net';
import { inspect } from 'node:util';
import { afterEach, describe, expect, test } from '@jest/globals';
import { eventually } from '../../../test/support/eventually.js';
import { systemClock } from '#kernel';
import { Secret, type GatewayAccount, type Outcome, type PaymentInstrument } from '#payments';
import { createSimulatorGateway, GatewayUnreachable, type SimulatorGateway, type SimulatorGatewayOptions } from './simulator.js';

const NUMBER = '4242424242424242';
const CVV = '987';
const REF = 'R0000000000000000001';
const account: GatewayAccount = { gateway: 'simulator', merchantAccount: 'm', credentialsRef: 'sandbox', environment: 'sandbox' };
const card: PaymentInstrument = { type: 'card', number: new Secret(NUMBER), expiry: { month: 1, year: 2031 }, cvv: new Secret(CVV) };
const begun = () => ({ leg: 'principal', account, begunAt: new Date().toISOString() }) as const;
const soon = () => AbortSignal.timeout(10_000);
const shortly = () => AbortSignal.timeout(150);

const cleanUps: (() => unknown)[] = [];
afterEach(async () => {
  for (const cleanUp of cleanUps.splice(0).reverse()) await cleanUp();
});

interface Misbehaving {
  readonly url: string;
  /** Complete requests that arrived, as text. */
  readonly requests: string[];
  /** Connections that were made. */
  readonly connections: Socket[];
}

/** Starts a server that calls `onRequest` for each complete request. `count`: the number of requests so far. */
const misbehaving = async (
  onRequest: (socket: Socket, count: number) => void,
  onConnection: (socket: Socket) => void = () => undefined,
): Promise<Misbehaving> => {
  const requests: string[] = [];
  const connections: Socket[] = [];
  const server: Server = createServer((socket) => {
    connections.push(socket);
    socket.on('error', () => undefined);
    let text = '';
    socket.on('data', (bytes) => {
      text += bytes.toString('latin1');
      const [head = '', body] = text.split('\r\n\r\n');
      const length = Number(/content-length: (\d+)/i.exec(head)?.[1] ?? 0);
      if (body === undefined || body.length < length) return;
      requests.push(text);
      text = '';
      onRequest(socket, requests.length);
    });
    onConnection(socket);
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  cleanUps.push(() => {
    for (const socket of connections) socket.destroy();
    return new Promise((resolve) => server.close(resolve));
  });
  return { url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`, requests, connections };
};

const gatewayAt = (endpoint: string, options: Partial<SimulatorGatewayOptions> = {}): SimulatorGateway => {
  const gateway = createSimulatorGateway({ endpoint, account, clock: systemClock, ...options });
  cleanUps.push(() => gateway.close());
  return gateway;
};

const http = (status: number, body: string, headers = '') =>
  `HTTP/1.1 ${status} Whatever\r\ncontent-type: application/json\r\ncontent-length: ${Buffer.byteLength(body)}\r\n${headers}\r\n${body}`;
const answer = (status: number, outcome: unknown, ref = REF) => http(status, JSON.stringify({ ref, outcome }));
const APPROVED = { kind: 'approved', transactionId: 'ch_1', authCode: 'A1', amountCents: 1_000 };

const charge = (gateway: SimulatorGateway, signal = soon()) =>
  gateway.charge({ ...begun(), ref: REF, amountCents: 1_000, instrument: card, payer: { address: { zip: '10001' } } }, signal);
const calls: [string, (gateway: SimulatorGateway, signal?: AbortSignal) => Promise<Outcome<unknown>>][] = [
  ['charge', charge],
  [
    'void',
    (gateway, signal = soon()) => gateway.void({ ...begun(), ref: REF, chargeTransactionId: 'ch_1', amountCents: 1_000, askedBy: 'void' }, signal),
  ],
  [
    'refund',
    (gateway, signal = soon()) => gateway.refund({ ...begun(), ref: REF, chargeTransactionId: 'ch_1', amountCents: 1_000, last4: '4242' }, signal),
  ],
];

/** A port without a listener. */
const deadPort = async (): Promise<number> => {
  const server = createServer();
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  const { port } = server.address() as AddressInfo;
  await new Promise((resolve) => server.close(resolve));
  return port;
};

/** Returns the address of a listener that answers no new connection: its process is stopped, and its queue is full. */
const unaccepting = async (): Promise<string> => {
  const script = "require('node:net').createServer().listen({port:0,host:'127.0.0.1',backlog:1},function(){console.log(this.address().port)})";
  const child = spawn(process.execPath, ['-e', script], { stdio: ['ignore', 'pipe', 'ignore'] });
  const exited = new Promise((resolve) => child.once('exit', resolve));
  cleanUps.push(() => (child.kill('SIGKILL'), exited));
  const port = await new Promise<number>((resolve) => child.stdout.once('data', (text) => resolve(Number(text))));
  child.kill('SIGSTOP');
  for (let waiting = false; !waiting;) {
    const socket = connect(port, '127.0.0.1').on('error', () => undefined);
    cleanUps.push(() => socket.destroy());
    waiting = await new Promise<boolean>((resolve) => {
      const timer = setTimeout(() => resolve(true), 200);
      socket.once('connect', () => (clearTimeout(timer), resolve(false)));
    });
  }
  return `http://127.0.0.1:${port}`;
};

describe.each(calls)('%s: no byte was sent, so certainly nothing happened', (_, call) => {
  test('the name has no address', async () => {
    // The resolver refuses a label of more than 63 characters without a network query.
    expect(await call(gatewayAt(`http://${'n'.repeat(70)}/`))).toMatchObject({ kind: 'not_processed', answered: false });
  });

  test('the connection is refused', async () => {
    expect(await call(gatewayAt(`http://127.0.0.1:${await deadPort()}`))).toMatchObject({
      kind: 'not_processed',
      answered: false,
      raw: 'ECONNREFUSED',
    });
  });

  test('the deadline passed before the call', async () => {
    const { url, connections } = await misbehaving((socket) => socket.destroy());
    expect(await call(gatewayAt(url), AbortSignal.abort())).toMatchObject({ kind: 'not_processed', answered: false });
    expect(connections).toHaveLength(0);
  });

  test('the deadline passed while every connection was taken', async () => {
    const { url, requests, connections } = await misbehaving((socket, count) => {
      if (count === 1) setTimeout(() => socket.write(answer(200, APPROVED)), 400);
    });
    const gateway = gatewayAt(url, { maxConnections: 1 });
    const first = charge(gateway);
    await eventually(() => requests.length === 1);
    expect(await call(gateway, shortly())).toMatchObject({ kind: 'not_processed', answered: false });
    // The connection is free again now. The call that was given up must not use the connection.
    expect((await first).kind).toBe('approved');
    expect((await charge(gateway, shortly())).kind).toBe('unknown');
    expect(requests).toHaveLength(2);
    expect(connections).toHaveLength(1);
  });

  // Linux lets a new connection wait if the listener's queue is full. Other systems refuse the connection, as in the test above.
  (process.platform === 'linux' ? test : test.skip)('the deadline passed while connecting', async () => {
    expect(await call(gatewayAt(await unaccepting()), shortly())).toMatchObject({ kind: 'not_processed', answered: false });
  });

  test('the request cannot be made', async () => {
    const { url, connections } = await misbehaving((socket) => socket.destroy());
    const gateway = gatewayAt(url);
    const outcome = await gateway.charge(
      { ...begun(), ref: REF, account: { ...account, merchantAccount: 'a\nb' }, amountCents: 1_000, instrument: card },
      soon(),
    );
    expect(outcome).toMatchObject({ kind: 'not_processed', answered: false });
    expect(connections).toHaveLength(0);
  });
});

describe.each(calls)('%s: bytes were sent and no whole answer came, so the outcome is unknown', (_, call) => {
  const part = 'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 200\r\n\r\n{"ref":"R0';
  test.each<[string, string, (socket: Socket) => void]>([
    ['a reset', 'disconnected', (socket) => socket.resetAndDestroy()],
    ['the end of the connection', 'disconnected', (socket) => socket.end()],
    ['the end within the head', 'disconnected', (socket) => socket.end('HTTP/1.1 200 OK\r\ncontent-ty')],
    ['the end within the body', 'disconnected', (socket) => socket.end(part)],
    ['a reset within the body', 'disconnected', (socket) => socket.write(part, () => socket.resetAndDestroy())],
    ['the end within a chunked body', 'disconnected', (socket) => socket.end('HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nff\r\n{"ref"')],
    ['silence', 'timeout', () => undefined],
    ['silence after the head', 'timeout', (socket) => socket.write('HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n')],
    ['silence within the body', 'timeout', (socket) => socket.write(part)],
    ['a preliminary answer and silence', 'timeout', (socket) => socket.write('HTTP/1.1 103 Early Hints\r\n\r\n')],
    [
      'a change of protocol',
      'disconnected',
      (socket) => socket.write('HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n'),
    ],
    ['a 500 that ends within its body', 'http_5xx', (socket) => socket.end(part.replace('200 OK', '500 Oops'))],
    ['a 503 that never ends', 'http_5xx', (socket) => socket.write(part.replace('200 OK', '503 Oops'))],
  ])('%s: %s', async (_what, cause, misbehave) => {
    const { url, requests } = await misbehaving(misbehave);
    expect(await call(gatewayAt(url), cause === 'timeout' || cause === 'http_5xx' ? shortly() : soon())).toMatchObject({ kind: 'unknown', cause });
    expect(requests).toHaveLength(1);
  });

  test('a reset as soon as the connection stands: not processed only if the connection never stood for us', async () => {
    const seen: number[] = [];
    const { url } = await misbehaving(
      () => undefined,
      (socket) => {
        socket.on('data', (bytes) => seen.push(bytes.length));
        socket.resetAndDestroy();
      },
    );
    const outcome = await call(gatewayAt(url));
    // The kernel may report the reset as a failure to connect. No byte was written then.
    if (outcome.kind === 'not_processed')
      expect({ outcome, seen }).toEqual({ outcome: { kind: 'not_processed', answered: false, raw: 'ECONNRESET' }, seen: [] });
    else expect(outcome).toMatchObject({ kind: 'unknown', cause: 'disconnected' });
  });

  test('a reset of a kept-alive connection after the request: unknown, and it is not sent again', async () => {
    const { url, requests, connections } = await misbehaving((socket, count) =>
      count === 1 ? socket.write(answer(200, APPROVED)) : socket.resetAndDestroy(),
    );
    const gateway = gatewayAt(url);
    expect((await charge(gateway)).kind).toBe('approved');
    expect(await call(gateway)).toMatchObject({ kind: 'unknown', cause: 'disconnected' });
    expect(requests).toHaveLength(2);
    expect(connections).toHaveLength(1);
  });

  test('an idle connection that the gateway closed is replaced', async () => {
    const { url, connections } = await misbehaving((socket) => socket.write(answer(200, APPROVED)));
    const gateway = gatewayAt(url);
    expect((await charge(gateway)).kind).toBe('approved');
    const gone = new Promise((resolve) => connections[0]!.once('close', resolve));
    connections[0]!.end();
    await gone;
    expect((await call(gateway)).kind).toBe('approved');
    expect(connections).toHaveLength(2);
  });
});

describe.each(calls)('%s: an answer that cannot be read is no answer', (_, call) => {
  test.each<[string, string]>([
    ['not HTTP', 'SSH-2.0-OpenSSH_9.6\r\n'],
    ['a head without end', `HTTP/1.1 200 OK\r\n${'x: y\r\n'.repeat(20_000)}`],
    ['not JSON', http(200, '<html>')],
    ['no body', http(200, '')],
    ['204', 'HTTP/1.1 204 No Content\r\n\r\n'],
    ['302', http(302, '', 'location: http://127.0.0.1:1/\r\n')],
    ['a list', http(200, '[]')],
    ['null', http(200, 'null')],
    ['an object without fields', http(200, '{}')],
    ['two values', http(200, `${JSON.stringify({ ref: REF, outcome: APPROVED })}{}`)],
    ['another reference', answer(200, APPROVED, 'R0000000000000000002')],
    ['no reference', http(200, JSON.stringify({ outcome: APPROVED }))],
    ['no outcome', http(200, JSON.stringify({ ref: REF }))],
    ['an unknown outcome', answer(200, { kind: 'perhaps' })],
    ['an outcome called like a property', answer(200, { kind: 'constructor' })],
    ['approved without its transaction', answer(200, { ...APPROVED, transactionId: undefined })],
    ['approved with an odd transaction', answer(200, { ...APPROVED, transactionId: 'a b' })],
    ['approved with a number as transaction', answer(200, { ...APPROVED, transactionId: 17 })],
    ['approved with another amount', answer(200, { ...APPROVED, amountCents: 1_001 })],
    ['approved without its amount', answer(200, { ...APPROVED, amountCents: undefined })],
    ['approved under 201', answer(201, APPROVED)],
    ['approved under 402', answer(402, APPROVED)],
    ['declined under 200', answer(200, { kind: 'declined', code: 'generic_decline' })],
    ['declined without a code', answer(402, { kind: 'declined' })],
    ['rejected without a reason', answer(422, { kind: 'rejected' })],
    ['a refusal under 200', http(200, JSON.stringify({ error: { code: 'disabled', message: 'x' } }))],
    ['a refusal without a code', http(400, JSON.stringify({ error: 'no' }))],
    ['a 404 of somebody else', http(404, '<html>not found</html>')],
    ['2 MiB', answer(200, { ...APPROVED, padding: 'x'.repeat(2 * 1024 * 1024) })],
    ['a byte more than is read', http(200, JSON.stringify({ ref: REF, outcome: APPROVED }).padEnd(64 * 1024 + 1))],
  ])('%s: unreadable', async (_what, bytes) => {
    const { url, requests } = await misbehaving((socket) => socket.write(bytes));
    expect(await call(gatewayAt(url))).toMatchObject({ kind: 'unknown', cause: 'unreadable' });
    expect(requests).toHaveLength(1);
  });

  test.each<[string, string]>([
    ['a bare 500', http(500, '')],
    ['a 502 in HTML', http(502, '<html>Bad Gateway</html>')],
    ['a 502 of another reference', answer(502, { kind: 'not_processed' }, 'R0000000000000000002')],
    ['a 503 in JSON that says nothing', http(503, '{"status":"unavailable"}')],
    ['approved under 500', answer(500, APPROVED)],
    ['not processed under 500', answer(500, { kind: 'not_processed' })],
    ['a refusal under 500', http(500, JSON.stringify({ error: { code: 'disabled', message: 'x' } }))],
  ])('%s: http_5xx', async (_what, bytes) => {
    const { url } = await misbehaving((socket) => socket.write(bytes));
    expect(await call(gatewayAt(url))).toMatchObject({ kind: 'unknown', cause: 'http_5xx' });
  });
});

describe.each(calls)('%s: a whole answer is taken one to one', (name, call) => {
  test.each<[string, string, object]>([
    [
      'approved',
      answer(200, APPROVED),
      { kind: 'approved', txn: name === 'charge' ? { transactionId: 'ch_1', authCode: 'A1' } : { transactionId: 'ch_1' } },
    ],
    ['approved, as large as is read', http(200, JSON.stringify({ ref: REF, outcome: APPROVED }).padEnd(64 * 1024)), { kind: 'approved' }],
    [
      'declined',
      answer(402, { kind: 'declined', code: 'insufficient_funds', message: 'no', avs: 'match', cvv: 'no_match', transactionId: 't' }),
      { kind: 'declined', decline: { code: 'insufficient_funds', raw: 'no', avs: 'match', cvv: 'no_match' }, transactionId: 't' },
    ],
    [
      'declined for a reason new to us',
      answer(402, { kind: 'declined', code: 'stolen_card' }),
      { kind: 'declined', decline: { code: 'generic_decline' } },
    ],
    ['rejected', answer(422, { kind: 'rejected', why: 'already_settled' }), { kind: 'rejected', why: 'already_settled' }],
    ['rejected for a reason new to us', answer(422, { kind: 'rejected', why: 'full_moon' }), { kind: 'rejected', why: 'other' }],
    ['not processed', answer(502, { kind: 'not_processed', message: 'sorry' }), { kind: 'not_processed', answered: true, raw: 'sorry' }],
    ...[400, 401, 403, 404, 415, 503].map((status): [string, string, object] => [
      `refused with ${status}`,
      http(status, JSON.stringify({ error: { code: 'no', message: 'no' } })),
      { kind: 'not_processed', answered: false },
    ]),
  ])('%s', async (_what, bytes, outcome) => {
    const { url } = await misbehaving((socket) => socket.write(bytes));
    expect(await call(gatewayAt(url))).toMatchObject(outcome);
  });

  test('also when it comes a byte at a time', async () => {
    const { url } = await misbehaving((socket) => {
      socket.setNoDelay(true);
      const bytes = [...answer(200, APPROVED)];
      const next = () => socket.write(bytes.shift()!, () => bytes.length > 0 && setImmediate(next));
      next();
    });
    expect((await call(gatewayAt(url))).kind).toBe('approved');
  });
});

describe('card data', () => {
  const everything = (value: unknown) => inspect(value, { depth: null, showHidden: true }) + JSON.stringify(value);

  test('travels in the request body only', async () => {
    const { url, requests } = await misbehaving((socket) => socket.write(answer(200, APPROVED)));
    await charge(gatewayAt(url));
    const [head, body] = requests[0]!.split('\r\n\r\n');
    expect(head).not.toContain(NUMBER);
    expect(JSON.parse(body!)).toMatchObject({ instrument: { number: NUMBER, expiryMonth: 1, expiryYear: 2031, cvv: CVV }, postalCode: '10001' });
  });

  test.each<[string, (socket: Socket) => void]>([
    ['a reset', (socket) => socket.resetAndDestroy()],
    ['a parse error', (socket) => socket.write(`HTTP/1.1 200 ${NUMBER}\u0000\r\n\r\n`)],
    ['rubbish that repeats it', (socket) => socket.write(http(500, `{"number":"${NUMBER}"`))],
    ['a message that repeats it', (socket) => socket.write(answer(402, { kind: 'declined', code: 'generic_decline', message: `card ${NUMBER}` }))],
    ['a message that repeats it in groups', (socket) => socket.write(answer(502, { kind: 'not_processed', message: 'card 4242 4242 4242 4242' }))],
    ['a transaction that is it', (socket) => socket.write(answer(200, { ...APPROVED, transactionId: NUMBER }))],
    ['a refusal that repeats it', (socket) => socket.write(http(400, JSON.stringify({ error: { code: 'invalid', message: NUMBER } })))],
  ])('is in no outcome: %s', async (_, misbehave) => {
    const { url } = await misbehaving(misbehave);
    const outcome = await charge(gatewayAt(url));
    expect(outcome.kind).not.toBe('approved');
    expect(everything(outcome)).not.toMatch(/4242[ -]?4242[ -]?4242[ -]?4242/);
  });

  test('a token is treated as a card number is', async () => {
    const secret = 'tok_live_9f8e7d6c';
    const { url } = await misbehaving((socket) => socket.write(answer(402, { kind: 'declined', code: 'generic_decline', message: secret })));
    const outcome = await gatewayAt(url).charge(
      { ...begun(), ref: REF, leg: 'combined', amountCents: 1_000, instrument: { type: 'card_token', token: new Secret(secret) } },
      soon(),
    );
    expect(outcome).toMatchObject({ kind: 'unknown', cause: 'unreadable' });
    expect(everything(outcome)).not.toContain(secret);
  });
});

describe('finalize, look-up and settlements', () => {
  const about = () => ({ ...begun(), ref: REF, op: 'charge', amountCents: 1_000, chargeTransactionId: null, last4: '4242' }) as const;
  const finalize = (gateway: SimulatorGateway, signal = soon()) => gateway.finalize(about(), signal);
  const lookup = (gateway: SimulatorGateway, signal = soon()) => gateway.lookup(about(), signal);
  const settlements = async (gateway: SimulatorGateway, signal = soon()) => {
    const all = [];
    for await (const { lines } of gateway.settlements(null, signal)) for await (const line of lines) all.push(line);
    return all;
  };
  const executed = (fields: object) => http(200, JSON.stringify({ ref: REF, finalized: 'executed', status: 200, outcome: APPROVED, ...fields }));

  const batch = { batchId: 'b1', closedAt: '2026-01-31T12:00:00.000Z', count: 1, grossCents: 5 };
  const line = { transactionId: 'ch_1', ref: REF, type: 'sale', accepted: true, grossCents: 5, feeCents: 1, netCents: 4 };

  test.each<[string, (socket: Socket) => void]>([
    ['a reset', (socket) => socket.resetAndDestroy()],
    ['silence', () => undefined],
    ['a bare 500', (socket) => socket.write(http(500, ''))],
    ['a refusal', (socket) => socket.write(http(503, JSON.stringify({ error: { code: 'disabled', message: 'x' } })))],
    ['not JSON', (socket) => socket.write(http(200, 'never'))],
    ['an empty object', (socket) => socket.write(http(200, '{}'))],
    [
      '5 MiB',
      (socket) =>
        socket.write(http(200, JSON.stringify({ ref: REF, finalized: 'never', found: false, batches: [], padding: 'x'.repeat(5 * 1024 * 1024) }))),
    ],
  ])('%s: finalize cannot tell, the others throw', async (_, misbehave) => {
    const { url } = await misbehaving(misbehave);
    const gateway = gatewayAt(url);
    expect(await finalize(gateway, shortly())).toEqual({ kind: 'cannot_tell', why: 'unreachable' });
    await expect(lookup(gateway, shortly())).rejects.toBeInstanceOf(GatewayUnreachable);
    await expect(settlements(gateway, shortly())).rejects.toBeInstanceOf(GatewayUnreachable);
    await expect(gateway.closeBatch(shortly())).rejects.toBeInstanceOf(GatewayUnreachable);
  });

  test('no listener: finalize cannot tell, the others throw', async () => {
    const gateway = gatewayAt(`http://127.0.0.1:${await deadPort()}`);
    expect(await finalize(gateway)).toEqual({ kind: 'cannot_tell', why: 'unreachable' });
    await expect(lookup(gateway)).rejects.toBeInstanceOf(GatewayUnreachable);
    await expect(settlements(gateway)).rejects.toBeInstanceOf(GatewayUnreachable);
  });

  test.each<[string, string]>([
    ['never of another reference', http(200, JSON.stringify({ ref: 'R2', finalized: 'never' }))],
    ['never under 202', http(202, JSON.stringify({ ref: REF, finalized: 'never' }))],
    ['executed of another reference', executed({ ref: 'R2' })],
    ['executed without an outcome', executed({ outcome: undefined })],
    ['executed without a transaction', executed({ outcome: { kind: 'approved', amountCents: 5 } })],
    ['executed without a status', executed({ status: undefined })],
    ['executed under a status that does not fit', executed({ status: 402 })],
    ['an unknown word', http(200, JSON.stringify({ ref: REF, finalized: 'maybe' }))],
  ])('finalize cannot tell: %s', async (_, bytes) => {
    const { url } = await misbehaving((socket) => socket.write(bytes));
    expect(await finalize(gatewayAt(url))).toEqual({ kind: 'cannot_tell', why: 'unreachable' });
  });

  test.each<[string, object]>([
    ['found without a transaction', { found: true, state: 'approved', amountCents: 5 }],
    ['an unknown state', { found: true, state: 'floating', transactionId: 't', amountCents: 5 }],
    ['not found, of another reference', { ref: 'R2', found: false }],
  ])('a look-up that cannot be read throws: %s', async (_, fields) => {
    const { url } = await misbehaving((socket) => socket.write(http(200, JSON.stringify({ ref: REF, ...fields }))));
    await expect(lookup(gatewayAt(url))).rejects.toBeInstanceOf(GatewayUnreachable);
  });

  test.each<[string, object, object]>([
    ['a batch without a date', { closedAt: undefined }, {}],
    ['a line without a transaction', {}, { transactionId: undefined }],
    ['a line of an unknown type', {}, { type: 'gift' }],
    ['a line in fractions', {}, { grossCents: 1.5 }],
    ['a line that does not say whether it was accepted', {}, { accepted: undefined }],
  ])('a settlement that cannot be read throws: %s', async (_, batchFields, lineFields) => {
    const { url } = await misbehaving((socket, count) =>
      socket.write(http(200, JSON.stringify(count === 1 ? { batches: [{ ...batch, ...batchFields }] } : { lines: [{ ...line, ...lineFields }] }))),
    );
    await expect(settlements(gatewayAt(url))).rejects.toBeInstanceOf(GatewayUnreachable);
  });

  test('a server that takes the question and never answers does not hold the reading of batches, whose signal has no end', async () => {
    const { url, requests } = await misbehaving(() => undefined);
    const gateway = gatewayAt(url, { timeouts: { silenceMs: 100 } });
    await expect(settlements(gateway, new AbortController().signal)).rejects.toBeInstanceOf(GatewayUnreachable);
    expect(requests).toHaveLength(1);
  });
  test('settlements that break off in the middle throw after the lines that were read', async () => {
    const { url } = await misbehaving((socket, count) =>
      count < 3
        ? socket.write(http(200, JSON.stringify(count === 1 ? { batches: [batch, { ...batch, batchId: 'b2' }] } : { lines: [line] })))
        : socket.resetAndDestroy(),
    );
    const read: string[] = [];
    const reading = (async () => {
      for await (const { batchId, lines } of gatewayAt(url).settlements(null, soon())) for await (const _ of lines) read.push(batchId);
    })();
    await expect(reading).rejects.toBeInstanceOf(GatewayUnreachable);
    expect(read).toEqual(['b1']);
  });
});
