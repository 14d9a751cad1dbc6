/**
 * The roles as separate processes: two APIs, two workers and the processor over one database. If one of them stops or crashes, no partner notices. A
 * change with `payfold` is in force in every process at the next request.
 */
import { Agent, type IncomingMessage, request } from 'node:http';
import { mkdir } from 'node:fs/promises';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { freePort } from '#platform';
import { controlKeyOf, createSimulatorControl, type SimulatorControl } from '../../apps/simulator/control.js';
import { eventually } from '../support/eventually.js';
import { freshDatabase } from '../support/postgres.js';
import { DataDir, type Environment, kill, launch, newKey, type RunningProcess, start, untilReady } from '../support/processes.js';
import { PAYMENTS, paymentOf } from '../support/service.js';

const LAUNCHER = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname;

let dataDir: DataDir;
let database: Awaited<ReturnType<typeof freshDatabase>>;
let bank: SimulatorControl;
let env: Environment;
const apis: RunningProcess[] = [];
const workers: RunningProcess[] = [];
let ports: number[];
let accountId: string;
let apiKey: string;
let portalId: string;

/** Runs the command line on the same stores as the roles. */
const payfold = async <T>(...args: string[]): Promise<T> => {
  const { code, stdout, stderr } = await launch([LAUNCHER, ...args, '--json', '--yes'], dataDir, { ...env, LOG_LEVEL: 'silent' }).exited;
  expect([code, stderr]).toEqual([0, '']);
  return JSON.parse(stdout) as T;
};

const startApi = async (instance: number): Promise<void> => {
  apis[instance] = await start('api', dataDir, { ...env, PORT: String(ports[instance]) });
};

beforeAll(async () => {
  dataDir = await DataDir.create();
  await mkdir(dataDir.data);
  database = await freshDatabase();
  ports = [await freePort(), await freePort()];
  const simulator = await start('simulator', dataDir);
  bank = createSimulatorControl(simulator.url, controlKeyOf(dataDir.data));
  env = { DATABASE_URL: database.url, SIMULATOR_URL: simulator.url };
  // All start at the same time. One of them makes the schema and the key file.
  await Promise.all([startApi(0), startApi(1), ...[0, 1].map(async (n) => (workers[n] = await start('worker', dataDir, env)))]);
  for (const api of apis) await untilReady(api);
  ({ accountId } = await payfold<{ accountId: string }>('accounts', 'create', '--name', 'City'));
  ({ apiKey } = await payfold<{ apiKey: string }>('keys', 'issue', '--account', accountId));
  const fee = ['--fee-flat-cents', '50', '--fee-percent-bps', '250'];
  ({ portalId } = await payfold<{ portalId: string }>('portals', 'create', '--account', accountId, '--name', 'Water', ...fee));
});

afterAll(async () => {
  await dataDir?.remove();
  await database?.drop();
});

// ------------------------------------------------------------------------------------------------------------------------------------

interface Answer {
  readonly status: number;
  readonly text: string;
  readonly headers: IncomingMessage['headers'];
  readonly body: { data: { id: string; payments: { id: string }[] }; details?: { code: string } };
}

const send = (agent: Agent, url: string, method: string, path: string, body: object | null = null, key: string | null = null): Promise<Answer> =>
  new Promise((resolve, reject) => {
    const text = body && JSON.stringify(body);
    const headers = {
      authorization: `ApiKey ${apiKey}`,
      ...(text !== null && { 'content-type': 'application/json', 'content-length': String(Buffer.byteLength(text)) }),
      ...(key !== null && { 'idempotency-key': key }),
    };
    const call = request(url + path, { agent, method, headers, timeout: 40_000 }, (response) => {
      let received = '';
      response.setEncoding('utf8').on('data', (chunk: string) => (received += chunk));
      response
        .once('error', reject)
        .once('end', () =>
          resolve({ status: response.statusCode!, text: received, headers: response.headers, body: JSON.parse(received || '{}') as Answer['body'] }),
        );
    });
    call.once('timeout', () => call.destroy(new Error('no answer')));
    call.once('error', reject).end(text ?? undefined);
  });

const keptAlive = new Agent({ keepAlive: true });
afterAll(() => keptAlive.destroy());
const on = (instance: number) => ({
  get: (path: string) => send(keptAlive, apis[instance]!.url, 'GET', path),
  create: (key: string, body: object = paymentOf(portalId, { referenceId: key })) =>
    send(keptAlive, apis[instance]!.url, 'POST', PAYMENTS, body, key),
});

/** The number of charges that stand at the bank. Each payment has two: principal and fee. */
const standing = async () => (await bank.truth()).filter(({ op, state }) => op === 'charge' && state === 'approved').length;

const newestOnFirst = async (limit: number) => (await on(0).get(`${PAYMENTS}?limit=${limit}`)).body.data.payments.map(({ id }) => id);

describe('two API processes over one database', () => {
  test('the same key in parallel on both charges once; every answer with a payment has the same bytes', async () => {
    const before = await standing();
    const keys = Array.from({ length: 20 }, () => newKey());
    const answers = await Promise.all(keys.map((key) => Promise.all(Array.from({ length: 10 }, (_, n) => on(n % 2).create(key)))));
    expect(await standing()).toBe(before + 2 * keys.length);
    for (const [index, key] of keys.entries()) {
      const ended = answers[index]!;
      for (const { status, body } of ended) expect([200, 'IDEMPOTENCY_IN_PROGRESS']).toContain(status === 200 ? 200 : body.details?.code);
      const paid = ended.filter(({ status }) => status === 200);
      const again = await on(index % 2).create(key);
      expect([again.status, again.body.details, again.headers['idempotent-replayed']]).toEqual([200, undefined, 'true']);
      expect(new Set([...paid, again].map(({ text }) => text)).size).toBe(1);
      expect(paid.filter(({ headers }) => headers['idempotent-replayed'] === undefined)).toHaveLength(1);
    }
  });

  test('a payment that one answered is read and listed by the other at once (C48)', async () => {
    const { body } = await on(0).create(newKey());
    expect((await on(1).get(`${PAYMENTS}/${body.data.id}`)).status).toBe(200);
    expect((await on(1).get(`${PAYMENTS}?limit=1`)).body.data.payments[0]!.id).toBe(body.data.id);
  });

  test('an account that is deactivated with payfold is refused by both on the next request, and admitted again when reactivated', async () => {
    const statuses = () => Promise.all([0, 1].map(async (instance) => (await on(instance).get(PAYMENTS)).status));
    expect(await statuses()).toEqual([200, 200]);
    await payfold('accounts', 'deactivate', accountId);
    expect(await statuses()).toEqual([403, 403]);
    await payfold('accounts', 'reactivate', accountId);
    expect(await statuses()).toEqual([200, 200]);
  });

  test('a key that is rotated with payfold stops in both on the next request, and the new one works', async () => {
    const old = apiKey;
    const fresh = await payfold<{ apiKey: string }>('keys', 'rotate', '--account', accountId);
    expect(await Promise.all([0, 1].map(async (instance) => (await on(instance).get(PAYMENTS)).status))).toEqual([401, 401]);
    expect(fresh.apiKey).not.toBe(old);
    ({ apiKey } = fresh);
    expect(await Promise.all([0, 1].map(async (instance) => (await on(instance).get(PAYMENTS)).status))).toEqual([200, 200]);
  });
});

describe('a rolling restart under load', () => {
  /**
   * A partner that keeps its connections. It moves to the other instance after a refused connection, and repeats no request that failed in another
   * way. An `attentive` partner also moves after `Connection: close`.
   */
  const partnerOf = (first: number, attentive: boolean) => {
    const agent = new Agent({ keepAlive: true, maxSockets: 1 });
    let instance = first;
    let moves = 0;
    return {
      moves: () => moves,
      close: () => agent.destroy(),
      create: async (key: string): Promise<Answer> => {
        for (;;) {
          try {
            const answer = await send(agent, `http://127.0.0.1:${ports[instance]}`, 'POST', PAYMENTS, paymentOf(portalId, { referenceId: key }), key);
            if (!attentive || answer.headers.connection !== 'close') return answer;
            instance = 1 - instance;
            moves += 1;
            return answer;
          } catch (error) {
            if ((error as NodeJS.ErrnoException).code !== 'ECONNREFUSED') throw error;
            instance = 1 - instance;
            moves += 1;
          }
        }
      },
    };
  };

  test('fails no request: each is answered 200, and each key is one charge', async () => {
    const before = await standing();
    const partners = Array.from({ length: 16 }, (_, n) => partnerOf(n % 2, n % 4 < 2));
    const failures: string[] = [];
    let answered = 0;
    let running = true;
    const load = partners.map(async (partner) => {
      while (running) {
        const key = newKey();
        await partner.create(key).then(
          ({ status, text }) => (status === 200 ? (answered += 1) : failures.push(text)),
          (error: NodeJS.ErrnoException) => failures.push(`${error.code} ${error.message}`),
        );
      }
    });
    for (const instance of [0, 1, 0]) {
      const sofar = answered;
      await eventually(() => answered > sofar + 100);
      const ended = await apis[instance]!.stop();
      expect([ended.code, ended.signal]).toEqual([0, null]);
      const alone = answered;
      await eventually(() => answered > alone + 50);
      await startApi(instance);
    }
    running = false;
    await Promise.all(load);
    for (const partner of partners) partner.close();
    expect(failures).toEqual([]);
    expect(await standing()).toBe(before + 2 * answered);
    expect(partners.filter((partner) => partner.moves() === 0)).toEqual([]);
    process.stderr.write(`roles: ${answered} payments across 3 restarts, ${partners.reduce((sum, one) => sum + one.moves(), 0)} moves, 0 failed\n`);
  });

  test('a connection that is kept without being used does not hold the process', async () => {
    await on(1).get('/healthz');
    const begun = performance.now();
    expect((await apis[1]!.stop()).code).toBe(0);
    expect(performance.now() - begun).toBeLessThan(5_000);
    await startApi(1);
  });
});

describe('SIGTERM during a slow gateway call', () => {
  /** Waits until `/readyz` answers 503 on an open connection, or a new connection is refused. */
  const leaving = (instance: number) =>
    eventually(
      async () =>
        on(instance)
          .get('/readyz')
          .then(
            ({ status }) => status === 503,
            (error: NodeJS.ErrnoException) => error.code === 'ECONNREFUSED',
          ),
      { timeoutMs: 900 },
    );

  test('is not ready at once, still delivers the answer, and then ends with code 0', async () => {
    await bank.arm({ match: { call: 'charge', leg: 'principal' }, delayAfterMs: 2_500 });
    const key = newKey();
    const before = await standing();
    const inFlight = on(1).create(key);
    await eventually(async () => (await standing()) > before);
    // Open a second connection for the later questions.
    expect((await on(1).get('/readyz')).status).toBe(200);
    apis[1]!.signal('SIGTERM');
    await leaving(1);
    const answer = await inFlight;
    expect([answer.status, answer.headers.connection]).toEqual([200, 'close']);
    expect(await apis[1]!.exited).toMatchObject({ code: 0, signal: null });
    await expect(on(1).get('/healthz')).rejects.toMatchObject({ code: 'ECONNREFUSED' });
    expect((await on(0).create(key)).text).toBe(answer.text);
    await startApi(1);
  });

  test('sent twice ends the process at once; the key is found again by the other one', async () => {
    await bank.arm({ match: { call: 'charge', leg: 'principal' }, delayAfterMs: 10_000 });
    const before = await standing();
    const key = newKey();
    const inFlight = on(1)
      .create(key)
      .catch((error: NodeJS.ErrnoException) => error.code);
    await eventually(async () => (await standing()) > before);
    expect((await on(1).get('/readyz')).status).toBe(200);
    apis[1]!.signal('SIGTERM');
    await leaving(1);
    const begun = performance.now();
    expect(await apis[1]!.stop()).toMatchObject({ code: 1 });
    expect(performance.now() - begun).toBeLessThan(2_000);
    expect(await inFlight).toMatch(/^ECONN/);
    // The lease of the key runs for a minute. Until then no other process may take the key.
    expect((await on(0).create(key)).body.details?.code).toBe('IDEMPOTENCY_IN_PROGRESS');
    await startApi(1);
  });
});

describe('workers', () => {
  test('one is killed, the other goes on: the list has every payment', async () => {
    kill(workers[0]!.pid);
    await workers[0]!.exited;
    const { body } = await on(1).create(newKey());
    // The dead worker's lease of a projection ends after 10 s. Then the other worker goes on.
    await eventually(async () => (await newestOnFirst(1))[0] === body.data.id, { everyMs: 200 });
  });

  test('stop on SIGTERM with code 0 after the batch at hand; payments go on without any, and the next worker lists them', async () => {
    expect(await workers[1]!.stop()).toMatchObject({ code: 0, signal: null });
    const made = [await on(0).create(newKey()), await on(1).create(newKey())].map(({ body }) => body.data.id);
    for (const id of made) expect((await on(0).get(`${PAYMENTS}/${id}`)).status).toBe(200);
    workers[1] = await start('worker', dataDir, env);
    await eventually(async () => (await newestOnFirst(2)).join() === made.toReversed().join());
  }, 40_000);
});
