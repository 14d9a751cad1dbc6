/** The HTTP edge: limits, methods, headers, and data that must never be sent (C1, C8, C65; docs/contract.md#the-http-edge). */
import { connect } from 'node:net';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { eventually } from '../support/eventually.js';
import { card, CARD, type Client, PARTNER, paymentOf, PAYMENTS, type Service, startService, type TestAccount } from '../support/service.js';

const UUID_V7 = /^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/;
const STRANGER = '018f0000-0000-7000-8000-00000000dead';
const KIB = 1024;
const SILENT_MS = 1_500;

let service: Service;
let partner: TestAccount;
let client: Client;
let portal: string;
beforeAll(async () => {
  service = await startService({ timeouts: { headersMs: 1_000, requestMs: 1_500, silentMs: SILENT_MS } });
  partner = await service.account();
  client = partner.client;
  portal = await service.portal(partner);
});
afterAll(() => service.stop());

/** Sends the text on a plain socket. Resolves with the answer when the socket is closed. */
const raw = (text: string, { dripMs }: { dripMs?: number } = {}): Promise<{ status: number; headers: Record<string, string>; text: string }> =>
  new Promise((resolve, reject) => {
    const { hostname, port } = new URL(service.urls[0]!);
    const socket = connect(Number(port), hostname);
    let received = '';
    const timer = dripMs === undefined ? undefined : setInterval(() => socket.write('x'), dripMs);
    socket.on('data', (chunk) => (received += chunk.toString()));
    socket.on('error', reject);
    socket.on('close', () => {
      clearInterval(timer);
      const [head = '', body = ''] = received.split('\r\n\r\n');
      const [first = '', ...lines] = head.split('\r\n');
      const headers = Object.fromEntries(
        lines.map((line) => [line.slice(0, line.indexOf(':')).toLowerCase(), line.slice(line.indexOf(':') + 1).trim()]),
      );
      resolve({ status: Number(first.split(' ')[1]), headers, text: body });
    });
    socket.write(text);
  });
/** Sends the text, and `then` once the first answer is there. Resolves with all answers when the socket is closed. */
const pipelined = (text: string, then = ''): Promise<{ status: number; text: string }[]> =>
  new Promise((resolve, reject) => {
    const { hostname, port } = new URL(service.urls[0]!);
    const socket = connect(Number(port), hostname);
    let received = '';
    socket.once('data', () => socket.write(then));
    socket.on('data', (chunk) => (received += chunk.toString()));
    socket.on('error', reject);
    socket.on('close', () =>
      resolve(
        received
          .split(/(?=HTTP\/1\.1 )/)
          .filter((answer) => answer !== '')
          .map((answer) => ({ status: Number(answer.split(' ')[1]), text: answer.split('\r\n\r\n')[1] ?? '' })),
      ),
    );
    socket.write(text);
  });
const head = (method: string, path: string, lines: string[] = []) =>
  [`${method} ${path} HTTP/1.1`, 'host: test', `authorization: ApiKey ${partner.apiKey}`, ...lines, '', ''].join('\r\n');
/** Checks an error of the HTTP edge: it has the envelope of C1, matches the OpenAPI document, and shows no internals. */
const expectTransport = (answer: { status: number; headers: Readonly<Record<string, string | undefined>>; text: string }, status: number) => {
  expect(answer.status).toBe(status);
  service.judge.check({ method: 'GET', path: '/no-operation', status, contentType: answer.headers['content-type'], text: answer.text });
  expect(JSON.parse(answer.text)).toMatchObject({ success: false, message: expect.any(String), details: { code: 'VALIDATION_ERROR' } });
  expect(answer.headers['cache-control']).toBe('no-store');
};
const INSIDE = /node_modules|\.ts\b|\.js\b|\bat \S+ \(|fastify|nest|postgres|select |ECONN|stack|undefined/i;

describe('paths and methods', () => {
  test.each([
    '/',
    '/api',
    '/api/partner',
    PARTNER,
    `${PARTNER}/payment`,
    `${PAYMENTS}/`,
    `${PAYMENTS}/${STRANGER}/`,
    `${PAYMENTS}/${STRANGER}/refunds`,
    `${PAYMENTS}/x/y/z`,
    '/API/partner/v1/payments',
    '/api/partner/v2/payments',
    '/favicon.ico',
    '/openapi.yaml',
    '//',
    '/api/v1/payer/nothing',
    `${PAYMENTS}%2f`,
  ])('GET %s → 404 (C65)', async (path) => {
    const answer = await client.get(path);
    expectTransport(answer, 404);
    expect(answer.text).not.toMatch(INSIDE);
  });

  test.each(['/%ZZ', `${PAYMENTS}/%C3%28`, `${PAYMENTS}/%`])('a path that cannot be decoded, %s, does not exist: 404', async (path) => {
    const answer = await raw(head('GET', path, ['connection: close']));
    expectTransport(answer, 404);
    expect(answer.text).not.toContain('%');
  });

  test.each([
    ['PUT', PAYMENTS, 'GET, HEAD, POST'],
    ['DELETE', PAYMENTS, 'GET, HEAD, POST'],
    ['PATCH', `${PAYMENTS}/${STRANGER}`, 'GET, HEAD'],
    ['POST', `${PAYMENTS}/${STRANGER}`, 'GET, HEAD'],
    ['GET', `${PAYMENTS}/${STRANGER}/refund`, 'POST'],
    ['GET', `${PAYMENTS}/${STRANGER}/void`, 'POST'],
    ['GET', `${PAYMENTS}/${STRANGER}/capture`, 'POST'],
    ['GET', `${PARTNER}/vault`, 'POST'],
    ['GET', `${PARTNER}/auth/token`, 'POST'],
    ['POST', `${PARTNER}/fees/quote`, 'GET, HEAD'],
    ['OPTIONS', PAYMENTS, 'GET, HEAD, POST'],
    ['OPTIONS', `${PARTNER}/vault`, 'POST'],
    ['POST', '/healthz', 'GET, HEAD'],
  ])('%s %s → 405 with Allow: %s', async (method, path, allow) => {
    const answer = await client.send(method, path);
    expectTransport(answer, 405);
    expect(answer.headers.allow).toBe(allow);
  });

  test.each(['TRACE', 'PROPFIND', 'SEARCH', 'QUERY'])('%s → 405', async (method) => {
    const answer = await raw(head(method, PAYMENTS, ['content-length: 0', 'connection: close']));
    expectTransport(answer, 405);
    expect(answer.headers.allow).toBe('GET, HEAD, POST');
    // The answer does not repeat the data of the request.
    expect(answer.text).not.toContain(partner.apiKey);
  });
  test('QUERY of a path that does not exist → 404', async () => {
    expectTransport(await raw(head('QUERY', `${PARTNER}/nothing`, ['content-length: 0', 'connection: close'])), 404);
  });

  test('HEAD answers as GET does, without a body', async () => {
    const { id } = await client.created(paymentOf(portal));
    for (const [path, status] of [
      [`${PAYMENTS}/${id}`, 200],
      [`${PAYMENTS}/${STRANGER}`, 404],
      [PAYMENTS, 200],
    ] as const) {
      const [get, answer] = [await client.get(path), await client.send('HEAD', path)];
      expect([answer.status, answer.text]).toEqual([status, '']);
      expect(answer.headers['content-length']).toBe(get.headers['content-length']);
    }
    expect((await service.anonymous.send('HEAD', PAYMENTS)).status).toBe(401);
  });
});

describe('limits', () => {
  test('a body of 256 KiB is read, one byte more → 413 (C8)', async () => {
    const text = JSON.stringify(paymentOf(portal));
    expect((await client.create(text + ' '.repeat(256 * KIB - text.length))).status).toBe(200);
    expectTransport(await client.create(text + ' '.repeat(256 * KIB - text.length + 1)), 413);
  });

  test('413 also for a body without a length', async () => {
    const chunk = `${(64 * KIB).toString(16)}\r\n${' '.repeat(64 * KIB)}\r\n`;
    const answer = await raw(
      `${head('POST', PAYMENTS, ['content-type: application/json', 'transfer-encoding: chunked', 'connection: close'])}${chunk.repeat(5)}0\r\n\r\n`,
    );
    expectTransport(answer, 413);
  });

  test('headers of more than 8 KiB → 431', async () => {
    expectTransport(await raw(head('GET', PAYMENTS, [`x-long: ${'x'.repeat(9 * KIB)}`])), 431);
  });

  test('an expectation other than 100-continue → 417', async () => {
    expectTransport(await raw(head('GET', PAYMENTS, ['expect: something'])), 417);
  });

  test('more than 64 headers → 431: none is dropped without a word, an Idempotency-Key least of all', async () => {
    const count = async (headers: number) =>
      client.create(paymentOf(portal), {
        headers: {
          ...Object.fromEntries(Array.from({ length: headers }, (_, index) => [`x-${index}`, '1'])),
          'idempotency-key': `last of ${headers}`,
        },
      });
    expectTransport(await count(80), 431);
    const first = await count(50);
    expect([first.status, (await service.services.pool.query('select from idempotency_key')).rowCount]).toEqual([200, 1]);
  });

  test('a body that does not come → 408', async () => {
    expectTransport(await raw(head('POST', PAYMENTS, ['content-type: application/json', 'content-length: 100']), { dripMs: 200 }), 408);
  });
  test('requests that are sent together are all answered, even if their answers exceed the buffer of the socket', async () => {
    const { hostname, port } = new URL(service.urls[0]!);
    const document = await (await fetch(`${service.urls[0]!}/openapi.json`)).text();
    const asked = 50;
    const socket = connect(Number(port), hostname);
    socket.write('GET /openapi.json HTTP/1.1\r\nhost: test\r\n\r\n'.repeat(asked));
    let received = 0;
    socket.on('data', (chunk) => (received += chunk.length));
    await eventually(() => received > asked * document.length, { timeoutMs: 20_000 }).finally(() => socket.destroy());
  });
  test('answers that the client does not read: the connection ends, with its waiting requests', async () => {
    const { hostname, port } = new URL(service.urls[0]!);
    const socket = connect(Number(port), hostname);
    const asked = 200;
    let received = 0;
    const closed = new Promise<void>((close) => socket.on('close', () => close()).on('error', () => undefined));
    socket.pause().write('GET /openapi.json HTTP/1.1\r\nhost: test\r\n\r\n'.repeat(asked));
    // Node ends the connection after two checks in which a write made no progress.
    await new Promise((later) => setTimeout(later, 3 * SILENT_MS));
    // If the service had not ended the connection, all answers would arrive now and the connection would stay open.
    socket.on('data', (chunk) => (received += chunk.length)).resume();
    await closed;
    const document = await (await fetch(`${service.urls[0]!}/openapi.json`)).text();
    expect(received).toBeLessThan((asked * document.length) / 2);
    expect((await client.list()).status).toBe(200);
  });
  test.each(['/healthz', '/healthz HTTP/2.0\r\nhost: test', '/healthz HTTP/0.9\r\nhost: test'])(
    'another version of HTTP than 1.0 and 1.1 → 505: %j',
    async (line) => expectTransport(await raw(`GET ${line}\r\n\r\n`), 505),
  );

  test('headers that do not end → 408', async () => {
    expectTransport(await raw(`GET ${PAYMENTS} HTTP/1.1\r\nhost: test\r\nx-slow: `, { dripMs: 200 }), 408);
  });

  test.each([
    ['not HTTP', 'hello\r\n\r\n'],
    ['a wrong length', `POST ${PAYMENTS} HTTP/1.1\r\nhost: test\r\ncontent-length: x\r\n\r\n`],
    [
      'a length and chunks (request smuggling)',
      `POST ${PAYMENTS} HTTP/1.1\r\nhost: test\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n`,
    ],
    ['no Host', `GET ${PAYMENTS} HTTP/1.1\r\nauthorization: x\r\n\r\n`],
    ['two hosts', `GET ${PAYMENTS} HTTP/1.1\r\nhost: test\r\nhost: other\r\n\r\n`],
    [
      'HTTP/1.0 with chunks',
      `POST ${PAYMENTS} HTTP/1.0\r\nhost: test\r\nconnection: keep-alive\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n`,
    ],
    ...['gzip, chunked', 'chunked, gzip', 'identity'].map((coding) => [
      `Transfer-Encoding: ${coding}`,
      `POST ${PAYMENTS} HTTP/1.1\r\nhost: test\r\ntransfer-encoding: ${coding}\r\n\r\n2\r\n{}\r\n0\r\n\r\n`,
    ]),
    ...Object.entries({ 'a blank': ' ', 'a tab': '\t' }).map(([name, nothing]) => [
      `a length and a Transfer-Encoding that is ${name}`,
      `POST ${PAYMENTS} HTTP/1.1\r\nhost: test\r\ntransfer-encoding:${nothing}\r\ncontent-length: 2\r\n\r\n{}`,
    ]),
    [
      'chunks and a second, empty Transfer-Encoding',
      `POST ${PAYMENTS} HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\ntransfer-encoding:\r\n\r\n2\r\n{}\r\n0\r\n\r\n`,
    ],
    ['two lengths', `POST ${PAYMENTS} HTTP/1.1\r\nhost: test\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\n{}  `],
    ['a bare line feed in a header', `GET ${PAYMENTS} HTTP/1.1\r\nhost: test\r\nx: a\nauthorization: x\r\n\r\n`],
  ])('%s → 400 and the connection is closed', async (_, text) => {
    const answer = await raw(text);
    expectTransport(answer, 400);
    expect(answer.headers.connection).toBe('close');
  });
});

describe('credentials before the body', () => {
  /** A head without a body. `requestMs` makes a 408 of it, if the service waits for the body. */
  const post = (path: string, authorization: string, lines: string[]) =>
    [`POST ${path} HTTP/1.1`, 'host: test', `authorization: ${authorization}`, 'content-type: application/json', ...lines, '', ''].join('\r\n');
  const NOBODY = 'ApiKey pc_test_none';

  test.each([PAYMENTS, '/nothing', '/healthz', `${PAYMENTS}/${STRANGER}/refund`])(
    'POST %s with a length over the limit → 413, whatever the path and the credentials',
    async (path) => {
      const answer = await raw(post(path, NOBODY, [`content-length: ${256 * KIB + 1}`]));
      expectTransport(answer, 413);
      expect(answer.headers.connection).toBe('close');
    },
  );

  test.each(['content-length: 100', 'transfer-encoding: chunked'])('401 and 403 do not wait for the body: %s', async (length) => {
    const account = await service.account();
    await service.administer(service.admin.deactivateAccount(account.accountId));
    for (const [authorization, status] of [
      [NOBODY, 401],
      [`ApiKey ${account.apiKey}`, 403],
    ] as const) {
      const answer = await raw(post(PAYMENTS, authorization, [length]));
      expect([answer.status, answer.headers.connection]).toEqual([status, 'close']);
    }
    expectTransport(await raw(post('/nothing', NOBODY, [length])), 404);
  });

  test('401, and not 413, for a body without a length', async () => {
    const chunk = `${(64 * KIB).toString(16)}\r\n${' '.repeat(64 * KIB)}\r\n`;
    expect((await raw(post(PAYMENTS, NOBODY, ['transfer-encoding: chunked']) + chunk.repeat(5))).status).toBe(401);
  });

  test('the client can read the answer while it sends its body', async () => {
    for (let index = 0; index < 20; index++)
      expect((await raw(post(PAYMENTS, NOBODY, [`content-length: ${256 * KIB}`]) + ' '.repeat(256 * KIB))).status).toBe(401);
  });

  test('a body that was read leaves the connection open', async () => {
    const answers = await pipelined(post(PAYMENTS, NOBODY, ['content-length: 2']) + '{}' + head('GET', '/healthz', ['connection: close']));
    expect(answers.map(({ status }) => status)).toEqual([401, 200]);
  });

  test('100 Continue comes after the credentials are checked', async () => {
    const body = JSON.stringify(paymentOf(portal));
    const expecting = ['expect: 100-continue', `content-length: ${body.length}`, 'connection: close'];
    expect((await pipelined(post(PAYMENTS, NOBODY, expecting))).map(({ status }) => status)).toEqual([401]);
    const answers = await pipelined(post(PAYMENTS, `ApiKey ${partner.apiKey}`, expecting), body);
    expect(answers.map(({ status }) => status)).toEqual([100, 200]);
  });

  test('a body in more than 4,096 pieces → 400', async () => {
    const pieces = '1\r\n \r\n'.repeat(4_097);
    expectTransport(await raw(post(PAYMENTS, `ApiKey ${partner.apiKey}`, ['transfer-encoding: chunked']) + pieces), 400);
  });

  test('10,000 empty lines in an announced body are no pieces', async () => {
    const body = JSON.stringify(paymentOf(portal)) + '\r\n\r\n'.repeat(10_000);
    expect((await raw(post(PAYMENTS, `ApiKey ${partner.apiKey}`, [`content-length: ${body.length}`, 'connection: close']) + body)).status).toBe(200);
  });
});

describe('several requests on a connection', () => {
  const create = (lines: string[] = []) => {
    const body = JSON.stringify(paymentOf(portal));
    return head('POST', PAYMENTS, ['content-type: application/json', `content-length: ${body.length}`, ...lines]) + body;
  };

  test('none is processed after one that closes the connection', async () => {
    const answers = await pipelined(create(['connection: close']) + create(['idempotency-key: not processed']));
    expect(answers.map(({ status }) => status)).toEqual([200]);
    // The key is bound to no body.
    expect((await client.create(paymentOf(portal, { lines: [1_234] }), { key: 'not processed' })).status).toBe(200);
  });

  test('the refusal of what is no HTTP comes after the answer of the request before', async () => {
    const answers = await pipelined(`${create()}hello\r\n\r\n`);
    expect(answers.map(({ status }) => status)).toEqual([200, 400]);
  });
});

describe('headers of every answer', () => {
  test('X-Request-Id: the caller’s when it looks like an id, else a new one', async () => {
    for (const given of ['abc-123', '018f0000-0000-7000-8000-00000000dead', 'a.b:c_d', 'x'.repeat(64)])
      expect((await client.list({}, { headers: { 'x-request-id': given } })).headers['x-request-id']).toBe(given);
    const drawn = new Set<string | undefined>();
    for (const given of [
      undefined,
      '',
      'x'.repeat(65),
      'a b',
      'é',
      '<script>',
      'a\tb',
      `r${CARD.approved.replaceAll(' ', '')}`,
      '4242.4242_4242:4242',
    ]) {
      const id = (await client.list({}, given === undefined ? {} : { headers: { 'x-request-id': given } })).headers['x-request-id'];
      expect(id).toMatch(UUID_V7);
      drawn.add(id);
    }
    expect(drawn.size).toBe(9);
  });

  test.each(['/checkout/error', '/%63heckout/error', 'http://test/checkout/error', 'HTTP://other.test/%63heckout/error'])(
    'a page of hosted checkout has its headers, and no HEAD, in every spelling of its address: %s',
    async (target) => {
      const page = await raw(head('GET', target, ['connection: close']));
      expect([page.status, page.headers['x-frame-options']]).toEqual([200, 'DENY']);
      expect(page.headers['content-security-policy']).toMatch(/^default-src 'none'; .*frame-ancestors 'none'$/);
      expect((await raw(head('HEAD', target, ['connection: close']))).status).toBe(405);
    },
  );

  test('no-store, nosniff, charset, and nothing about the software', async () => {
    const { id } = await client.created(paymentOf(portal));
    const answers = [
      await client.find(id),
      await client.find(STRANGER),
      await service.anonymous.list(),
      await client.get('/nothing'),
      await client.create('{'),
      await client.send('PUT', PAYMENTS),
    ];
    for (const { status, headers } of answers) {
      expect([status, headers['cache-control'], headers['x-content-type-options'], headers['content-type']]).toEqual([
        status,
        'no-store',
        'nosniff',
        'application/json; charset=utf-8',
      ]);
      expect(headers['x-request-id']).toMatch(UUID_V7);
      expect(headers['x-powered-by']).toBeUndefined();
      expect(headers.server).toBeUndefined();
      expect(headers['set-cookie']).toBeUndefined();
      expect(headers['access-control-allow-origin']).toBeUndefined();
    }
  });
});

describe('data that never leaves', () => {
  const number = CARD.approved.replaceAll(' ', '');
  test.each<[string, string]>([
    ['malformed JSON', `{"paymentMethod":{"cardNumber":"${number}","cvv":"946"`],
    ['a card number as a key', `{"${number}":1`],
    ['an invalid card number', JSON.stringify({ paymentMethod: { type: 'card', cardNumber: '4242424242424241', cvv: '94x' } })],
    [
      'a card in a description',
      JSON.stringify({ ...paymentOf(STRANGER), lineItems: [{ amountCents: 10_000, referenceId: number, description: `pay ${number}` }] }),
    ],
    ['a card in a field that is not ours', JSON.stringify({ [`x${number}`]: number })],
    ['a card as the type', JSON.stringify({ ...paymentOf(STRANGER), paymentMethod: { ...card(), type: number } })],
    ['a card as a token', JSON.stringify({ ...paymentOf(STRANGER), paymentMethod: { type: 'card_token', token: number } })],
    ['a card as the portal', JSON.stringify({ ...paymentOf(number) })],
    ['a card as the currency', JSON.stringify({ ...paymentOf(STRANGER), currency: number })],
  ])('the card number of a request that is refused: %s', async (_, body) => {
    const before = service.log.length;
    const answer = await client.create(body);
    expect([answer.status, answer.code]).toEqual([400, 'VALIDATION_ERROR']);
    expect(answer.text).not.toMatch(/424242424242|\b946\b/);
    expect(answer.text).not.toMatch(INSIDE);
    const id = answer.headers['x-request-id']!;
    await eventually(() => service.log.slice(before).some((line) => line.includes(id)));
    expect(service.log.slice(before).join('')).not.toMatch(/424242424242|\[card\]|"946"/);
  });

  test('a card number in a path, a query, a key or a request id is not logged', async () => {
    const before = service.log.length;
    await client.find(number);
    await client.list({ status: number });
    await client.get(`/${number}`);
    for (const id of [number, `r${number}`, '4242.4242.4242.4242', '4242_4242_4242_4242:x'])
      await client.create('{', { key: number, headers: { 'x-request-id': id } });
    await client.refund(number, '{');
    await client.list();
    await eventually(() => service.log.slice(before).filter((line) => line.includes('"answered"')).length >= 9);
    expect(service.log.slice(before).join('')).not.toMatch(/4242.?4242.?4242|\[card\]/);
  });

  test('card data, credentials and idempotency keys of successful requests', async () => {
    await client.created(paymentOf(portal, { payer: { email: 'ada@example.com' } }), { key: 'a-key-of-the-partner' });
    await client.create(paymentOf(portal, { number: CARD.declined }));
    const all = service.log.join('');
    expect(all).not.toMatch(/424242|4000000000|\[card\]|pc_test_|a-key-of-the-partner|ada@example/);
    expect(service.logLines().every(({ level }) => level < 50)).toBe(true);
  });
});

describe('the document (OpenAPI 3.1)', () => {
  test('names every endpoint of the specification, and no other', () => {
    const operations = Object.entries(service.judge.document.paths).flatMap(([path, methods]) =>
      Object.keys(methods).map((method) => `${method.toUpperCase()} ${path}`),
    );
    expect(operations.filter((operation) => operation.includes('/api/partner/')).sort()).toEqual(
      [
        `GET ${PAYMENTS}`,
        `GET ${PAYMENTS}/{id}`,
        `GET ${PARTNER}/fees/quote`,
        `POST ${PAYMENTS}`,
        `POST ${PAYMENTS}/{id}/capture`,
        `POST ${PAYMENTS}/{id}/refund`,
        `POST ${PAYMENTS}/{id}/void`,
        `POST ${PARTNER}/auth/token`,
        `POST ${PARTNER}/vault`,
      ].sort(),
    );
    expect(service.judge.document.openapi).toMatch(/^3\.1\./);
  });
  test('every reference leads somewhere', () => {
    const text = JSON.stringify(service.judge.document);
    for (const [, name] of text.matchAll(/"#\/components\/schemas\/([^"]+)"/g))
      expect(Object.keys(service.judge.document.components.schemas)).toContain(name);
  });
});
