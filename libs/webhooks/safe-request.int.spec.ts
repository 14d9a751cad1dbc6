/** Sends POSTs to a partner's server (decision 0015) over real sockets, real TLS and a real name server, all on loopback. */
import { createServer as createHttpServer } from 'node:http';
import { type AddressInfo, createServer, type Server, type Socket } from 'node:net';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { readConfig } from '#platform';
import { MovableClock } from '../../test/support/clock.js';
import { eventually } from '../../test/support/eventually.js';
import { type NameServer, startNameServer } from '../../test/support/name-server.js';
import { type Certificate, createAuthority, type Receiver, startReceiver, status } from '../../test/support/receiver.js';
import { createSender, type Posted, type Sender } from './safe-request.js';
import { ATTEMPT_BUDGET_MS } from './schedule.js';
import { headersOf } from './signature.js';
import { createResolve, NoAddress, Refused } from './target.js';

const HOST = 'receiver.test';
const SECRET = 'whsec_spec';
const BODY = Buffer.from('{"id":"evt_1","type":"payment.refunded","createdAt":"2026-11-20T10:00:00.000Z","data":{}}');

let directory: string;
let authority: Awaited<ReturnType<typeof createAuthority>>;
let good: Certificate;
let names: NameServer;
let clock: MovableClock;
const senders: Sender[] = [];
const closers: (() => unknown)[] = [];

beforeAll(async () => {
  directory = await mkdtemp(join(tmpdir(), 'payfold-webhooks-'));
  authority = await createAuthority();
  await writeFile(join(directory, 'ca.pem'), authority.cert);
  good = await authority.issue(HOST);
});
afterAll(() => rm(directory, { recursive: true, force: true }));
beforeEach(async () => {
  names = await startNameServer();
  names.answer(HOST, ['127.0.0.1']);
  clock = new MovableClock();
});
afterEach(async () => {
  for (const sender of senders.splice(0)) sender.close();
  for (const close of closers.splice(0)) await close();
  names.close();
});

/** A sender that may reach `HOST` on these ports of 127.0.0.1, and no other private address. */
const senderTo = (ports: readonly number[], env: Record<string, string> = {}): Sender => {
  const { webhooks: settings } = readConfig({
    WEBHOOK_PRIVATE_TARGETS: ports.map((port) => `${HOST}:${port}=127.0.0.1/32`).join(','),
    WEBHOOK_EXTRA_CA_FILE: join(directory, 'ca.pem'),
    ...env,
  });
  const sender = createSender({ settings, resolve: createResolve([names.address], clock), clock });
  senders.push(sender);
  return sender;
};
const receiver = async (certificate = good): Promise<Receiver> => {
  const started = await startReceiver(certificate);
  started.accept(SECRET);
  closers.push(() => started.close());
  return started;
};
/** Starts a TCP server. Returns its port. */
const tcp = async (onConnection: (socket: Socket) => void): Promise<number> => {
  const sockets = new Set<Socket>();
  const server: Server = createServer((socket) => {
    sockets.add(socket);
    socket.on('error', () => undefined).on('close', () => sockets.delete(socket));
    onConnection(socket);
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  closers.push(() => new Promise((resolve) => (sockets.forEach((socket) => socket.destroy()), server.close(resolve))));
  return (server.address() as AddressInfo).port;
};
const post = (sender: Sender, url: string): Promise<Posted> => {
  const headers = headersOf({ id: 'evt_1', type: 'payment.refunded', body: BODY }, SECRET, Math.floor(Date.now() / 1000));
  return sender.post({ url, endpointId: 'e1', headers, body: BODY });
};
const postTo = (port: number, path = '/hook') => post(senderTo([port]), `https://${HOST}:${port}${path}`);
/** Waits until `begun` is true. Then lets the time of the attempt run out. */
const timedOut = async (attempt: Promise<Posted>, begun: () => boolean): Promise<Posted> => {
  await eventually(begun);
  clock.advance(ATTEMPT_BUDGET_MS + 1);
  return attempt;
};

describe('the status line decides', () => {
  test.each([
    [200, 'ok'],
    [201, 'ok'],
    [204, 'ok'],
    [299, 'ok'],
    [304, 'http_3xx'],
    [400, 'http_4xx'],
    [404, 'http_4xx'],
    [410, 'http_4xx'],
    [429, 'http_4xx'],
    [500, 'http_5xx'],
    [503, 'http_5xx'],
  ])('%d is %s', async (code, outcome) => {
    const one = await receiver();
    one.behave(status(code));
    expect(await postTo(one.port)).toMatchObject({ outcome, statusCode: code, errorCode: null, remoteIp: '127.0.0.1' });
    expect(one.deliveries.map(({ path, headers }) => [path, headers.host])).toEqual([['/hook', `${HOST}:${one.port}`]]);
  });
  test('a redirect is a failure and is not followed, to any address', async () => {
    const secret = createHttpServer((_request, response) => response.end('metadata'));
    await new Promise<void>((resolve) => secret.listen(0, '127.0.0.1', resolve));
    closers.push(() => secret.close());
    let asked = 0;
    secret.on('connection', () => (asked += 1));
    const one = await receiver();
    one.behave(status(307, { location: `http://127.0.0.1:${(secret.address() as AddressInfo).port}/latest/meta-data/` }));
    const posted = await postTo(one.port);
    expect(posted).toMatchObject({ outcome: 'http_3xx', statusCode: 307, responseHead: null });
    expect(asked).toBe(0);
    expect(one.requests).toBe(1);
  });
  test('the beginning of the body is kept for staff, uncompressed as it came', async () => {
    const one = await receiver();
    one.behave((request, response) => {
      expect(request.headers['accept-encoding']).toBeUndefined();
      response.writeHead(500, { 'content-encoding': 'gzip' }).end('not really gzip');
    });
    expect((await postTo(one.port)).responseHead?.toString()).toBe('not really gzip');
  });
});

describe('answers that are too much or too slow', () => {
  test('a body of 50 MiB: 16 KiB are read, 2 KiB kept', async () => {
    const one = await receiver();
    let written = 0;
    one.behave((_request, response) => {
      response.writeHead(200);
      const chunk = Buffer.alloc(64 * 1024, 'x');
      const pump = () => {
        while (written < 50 * 1024 * 1024 && !response.destroyed) {
          written += chunk.length;
          if (!response.write(chunk)) return void response.once('drain', pump);
        }
        response.end();
      };
      pump();
    });
    const posted = await postTo(one.port);
    expect(posted).toMatchObject({ outcome: 'ok', statusCode: 200 });
    expect(posted.responseHead).toHaveLength(2_048);
    expect(written).toBeLessThan(8 * 1024 * 1024);
  });
  test('a body that drips after 200 is a success, and ends with the budget', async () => {
    const one = await receiver();
    let drips = 0;
    one.behave((_request, response) => {
      response.writeHead(200);
      const timer = setInterval(() => {
        drips += 1;
        response.write('.');
      }, 5);
      response.once('close', () => clearInterval(timer));
    });
    // After 40 sent pieces, the sender has certainly received the first one.
    const posted = await timedOut(postTo(one.port), () => drips >= 40);
    expect(posted).toMatchObject({ outcome: 'ok', statusCode: 200 });
    expect(posted.responseHead?.toString()).toMatch(/^\.+$/);
  });
  test('no answer: timeout, in the phase that hung', async () => {
    const one = await receiver();
    one.behave(() => undefined);
    expect(await timedOut(postTo(one.port), () => one.requests === 1)).toMatchObject({ outcome: 'timeout', errorCode: 'answer', statusCode: null });
  });
  test('headers without end', async () => {
    const one = await receiver();
    one.behave((request) => request.socket.write('HTTP/1.1 200 OK\r\nx-slow: '));
    expect(await timedOut(postTo(one.port), () => one.requests === 1)).toMatchObject({ outcome: 'timeout', errorCode: 'answer' });
  });
  test('headers beyond 16 KiB', async () => {
    const one = await receiver();
    one.behave((request) => request.socket.write(`HTTP/1.1 200 OK\r\nx-large: ${'x'.repeat(64 * 1024)}\r\n\r\n`));
    expect(await postTo(one.port)).toMatchObject({ outcome: 'connect', errorCode: 'HPE_HEADER_OVERFLOW', statusCode: null });
  });
  test('another protocol, which we did not ask for: the attempt ends, and has failed', async () => {
    const one = await receiver();
    one.behave((request) => request.socket.write('HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: foo\r\n\r\n'));
    expect(await postTo(one.port)).toMatchObject({ outcome: 'http_5xx', statusCode: 101 });
  });
  test('something that is not HTTP', async () => {
    const one = await receiver();
    one.behave((request) => request.socket.end('220 smtp.example ESMTP\r\n'));
    expect((await postTo(one.port)).errorCode).toMatch(/^HPE_/);
  });
  test('TCP without TLS', async () => {
    let connected = 0;
    const port = await tcp(() => (connected += 1));
    expect(await timedOut(postTo(port), () => connected === 1)).toMatchObject({ outcome: 'timeout', errorCode: 'tls', remoteIp: '127.0.0.1' });
  });
  test('plain HTTP where TLS should be', async () => {
    const port = await tcp((socket) => void socket.end('HTTP/1.1 400 Bad Request\r\n\r\n'));
    expect(await postTo(port)).toMatchObject({ outcome: 'tls', statusCode: null });
  });
  test('reset in the handshake, and after the request', async () => {
    const port = await tcp((socket) => void socket.once('data', () => socket.resetAndDestroy()));
    expect(await postTo(port)).toMatchObject({ outcome: 'tls', errorCode: 'ECONNRESET' });
    const one = await receiver();
    one.behave((request) => request.socket.destroy());
    expect(await postTo(one.port)).toMatchObject({ outcome: 'connect', errorCode: 'ECONNRESET', statusCode: null });
  });
  test('no server there', async () => {
    const port = await tcp(() => undefined);
    await closers.pop()!();
    expect(await postTo(port)).toMatchObject({ outcome: 'connect', errorCode: 'ECONNREFUSED' });
  });
});

describe('TLS is verified for the name', () => {
  test('a certificate for another name', async () => {
    const one = await receiver(await authority.issue('other.test'));
    expect(await postTo(one.port)).toMatchObject({ outcome: 'tls', errorCode: 'ERR_TLS_CERT_ALTNAME_INVALID' });
    expect(one.requests).toBe(0);
  });
  test('an unknown authority', async () => {
    const one = await receiver(await (await createAuthority()).issue(HOST));
    expect((await postTo(one.port)).outcome).toBe('tls');
    expect(one.requests).toBe(0);
  });
  test('an expired certificate', async () => {
    const one = await receiver(await authority.issue(HOST, { expired: true }));
    expect(await postTo(one.port)).toMatchObject({ outcome: 'tls', errorCode: 'CERT_HAS_EXPIRED' });
  });
  test('the extra authority is trusted for private targets only', async () => {
    const one = await receiver();
    // The sender does not trust this certificate without the CA file.
    const sender = senderTo([one.port], { WEBHOOK_EXTRA_CA_FILE: '' });
    expect((await post(sender, `https://${HOST}:${one.port}/`)).outcome).toBe('tls');
  });
});

describe('allowed addresses', () => {
  const PUBLIC = 'https://hooks.attacker.test/';
  const outcomeOf = async (answer: Parameters<NameServer['answer']>[1]) => {
    names.answer('hooks.attacker.test', answer);
    const { outcome, errorCode } = await post(senderTo([]), PUBLIC);
    return `${outcome} ${errorCode}`;
  };
  test.each([
    ['public and private', ['93.184.216.34', '10.0.0.1']],
    ['public A, private AAAA', ['93.184.216.34', 'fd00::1']],
    ['loopback', ['127.0.0.1']],
    ['metadata', ['169.254.169.254']],
    ['v4-mapped', ['::ffff:a9fe:a9fe']],
    ['NAT64', ['64:ff9b::a9fe:a9fe']],
    ['6to4', ['2002:7f00:1::1']],
    ['WireServer', ['168.63.129.16']],
    ['carrier-grade NAT', ['100.64.0.1']],
    ['an alias of something private', { cname: 'internal.attacker.test', addresses: ['10.0.0.5'] }],
  ] as const)('an answer with %s is refused', async (_what, answer) => expect(await outcomeOf(answer)).toBe('blocked address_not_public'));
  test('no such name, a server that fails, an empty answer', async () => {
    expect(await outcomeOf('none')).toBe('dns ENOTFOUND');
    expect(await outcomeOf('fail')).toBe('dns ESERVFAIL');
    expect(await outcomeOf([])).toBe('dns ENODATA');
  });
  test('a name server that does not answer takes the budget, not more', async () => {
    names.answer('hooks.attacker.test', 'drop');
    const attempt = post(senderTo([]), PUBLIC);
    expect(await timedOut(attempt, () => names.queries.length > 0)).toMatchObject({ outcome: 'timeout', errorCode: 'dns' });
  });
  test('rebinding: every attempt resolves again, and connects to the checked address', async () => {
    const one = await receiver();
    const sender = senderTo([one.port]);
    // The first look-up returns an allowed address. Later look-ups return a forbidden one. The time to live is 0, so no look-up is cached.
    names.answer(HOST, (_type, number) => [number === 1 ? '127.0.0.1' : '127.0.0.2']);
    expect((await post(sender, `https://${HOST}:${one.port}/`)).outcome).toBe('ok');
    expect(names.queries.filter(({ type }) => type === 'A')).toHaveLength(1);
    expect(await post(sender, `https://${HOST}:${one.port}/`)).toMatchObject({ outcome: 'blocked', errorCode: 'address_not_public' });
    expect(one.requests).toBe(1);
  });
  test('the rules hold at every attempt, not only when an endpoint is added', async () => {
    const one = await receiver();
    const sender = senderTo([one.port]);
    for (const url of [
      `https://127.0.0.1:${one.port}/`,
      `https://localhost:${one.port}/`,
      `https://other.test:${one.port}/`,
      `http://${HOST}:${one.port}/`,
    ])
      expect((await post(sender, url)).outcome).toBe('blocked');
    // Try another name that has the allowed address. Then try the allowed name on another port.
    names.answer('other.test', ['127.0.0.1']);
    expect(await post(senderTo([one.port], { WEBHOOK_PORTS: `443,${one.port}` }), `https://other.test:${one.port}/`)).toMatchObject({
      errorCode: 'address_not_public',
    });
    const elsewhere = senderTo([9], { WEBHOOK_PORTS: `443,${one.port}` });
    expect(await post(elsewhere, `https://${HOST}:${one.port}/`)).toMatchObject({ errorCode: 'address_not_public' });
    expect(one.requests).toBe(0);
  });
  test('an answer is kept for its own lifetime, and shared by all askers', async () => {
    const resolve = createResolve([names.address], clock);
    names.answer('kept.test', { cname: 'real.test', addresses: ['93.184.216.34'], ttl: 3_600 });
    await Promise.all([resolve('kept.test'), resolve('kept.test')]);
    await resolve('kept.test');
    expect(names.queries).toHaveLength(2);
    clock.advance(60_001);
    expect(await resolve('kept.test')).toEqual(['93.184.216.34']);
    expect(names.queries).toHaveLength(4);
  });
  test('proxies of the environment are not asked', async () => {
    let asked = 0;
    const proxy = await tcp(() => (asked += 1));
    const before = { ...process.env };
    Object.assign(process.env, { HTTPS_PROXY: `http://127.0.0.1:${proxy}`, https_proxy: `http://127.0.0.1:${proxy}`, NODE_USE_ENV_PROXY: '1' });
    try {
      const one = await receiver();
      expect((await postTo(one.port)).outcome).toBe('ok');
      expect(asked).toBe(0);
    } finally {
      for (const name of ['HTTPS_PROXY', 'https_proxy', 'NODE_USE_ENV_PROXY']) if (before[name] === undefined) delete process.env[name];
    }
  });
});

describe('connections', () => {
  test('are kept for the next delivery', async () => {
    const one = await receiver();
    const sender = senderTo([one.port]);
    for (let number = 0; number < 5; number++) expect((await post(sender, `https://${HOST}:${one.port}/`)).outcome).toBe('ok');
    expect([one.requests, one.connections]).toEqual([5, 1]);
  });
  test('a kept one that the receiver has closed meanwhile is no failure', async () => {
    const one = await receiver();
    const sender = senderTo([one.port]);
    // When the second request arrives, the receiver closes the connection without an answer.
    one.behave((request, response, number) => (number === 2 ? request.socket.destroy() : response.writeHead(200).end()));
    expect((await post(sender, `https://${HOST}:${one.port}/`)).outcome).toBe('ok');
    expect((await post(sender, `https://${HOST}:${one.port}/`)).outcome).toBe('ok');
    expect([one.requests, one.connections]).toEqual([3, 2]);
  });
  test('a dead address of several is passed over', async () => {
    const one = await receiver();
    const { webhooks: settings } = readConfig({
      WEBHOOK_PRIVATE_TARGETS: `${HOST}:${one.port}=127.0.0.0/8`,
      WEBHOOK_EXTRA_CA_FILE: join(directory, 'ca.pem'),
    });
    // Addresses are tried in sorted order. The receiver does not listen on the first one, 127.0.0.0.
    names.answer(HOST, ['127.0.0.0', '127.0.0.1']);
    const sender = createSender({ settings, resolve: createResolve([names.address], clock), clock });
    senders.push(sender);
    expect(await post(sender, `https://${HOST}:${one.port}/`)).toMatchObject({ outcome: 'ok', remoteIp: '127.0.0.1' });
  });
});

describe('checking an address', () => {
  test('goes as far as TLS, and posts nothing', async () => {
    const one = await receiver();
    const { ok, steps } = await senderTo([one.port]).check(`https://${HOST}:${one.port}/hook`);
    expect([ok, steps.map(({ step }) => step)]).toEqual([true, ['url', 'dns', 'tcp', 'tls']]);
    expect(steps.at(-1)!.detail).toMatch(/^TLSv1\.[23], certificate of receiver\.test valid until /);
    expect(one.requests).toBe(0);
  });
  test('names the step at which it ends', async () => {
    const lastStep = async (url: string, ports: number[] = []) => {
      const { ok, steps } = await senderTo(ports).check(url);
      return [ok, steps.at(-1)!.step, steps.at(-1)!.detail];
    };
    expect(await lastStep('http://receiver.test/')).toEqual([false, 'url', 'The URL must begin with https://. (url_scheme)']);
    expect(await lastStep('https://nobody.test/')).toEqual([false, 'dns', 'nobody.test has no address (ENOTFOUND) (ENOTFOUND)']);
    expect(await lastStep(`https://${HOST}/`)).toEqual([false, 'dns', 'The host resolves to an address that is not public. (address_not_public)']);
    const wrong = await receiver(await authority.issue('other.test'));
    expect((await lastStep(`https://${HOST}:${wrong.port}/`, [wrong.port])).slice(0, 2)).toEqual([false, 'tls']);
    const gone = await tcp(() => undefined);
    await closers.pop()!();
    expect((await lastStep(`https://${HOST}:${gone}/`, [gone])).slice(0, 2)).toEqual([false, 'tcp']);
  });
  test('the check refuses the same addresses as an attempt', async () => {
    await expect(senderTo([]).vet(`https://${HOST}/`)).rejects.toBeInstanceOf(Refused);
    await expect(senderTo([]).vet('https://nobody.test/')).rejects.toBeInstanceOf(NoAddress);
    await expect(senderTo([443]).vet(`https://${HOST}/`)).resolves.toBeUndefined();
  });
});
