/**
 * `payfold sandbox advance` against real processes: two APIs, a worker, the processor and the command line. The two kinds of time,
 * how processes follow a move, requests that race with it, a command that is killed, and the moves that are refused.
 */
import { mkdir, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import pg from 'pg';
import { freePort } from '#platform';
import { controlKeyOf, createSimulatorControl, type SimulatorControl } from '../../apps/simulator/control.js';
import type { Truth } from '../../apps/simulator/processor.js';
import { eventually } from '../support/eventually.js';
import { type NameServer, startNameServer } from '../support/name-server.js';
import { freshDatabase } from '../support/postgres.js';
import {
  DataDir,
  type Ended,
  type Environment,
  kill,
  launch,
  newKey,
  type RunningProcess,
  runToEnd,
  start,
  untilReady,
} from '../support/processes.js';
import { createAuthority, type Receiver, startReceiver, status } from '../support/receiver.js';
import { CARD, PARTNER, paymentOf } from '../support/service.js';

const LAUNCHER = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname;
const DAY_MS = 86_400_000;
/** Every process must follow a move within this time. */
const HEARD_MS = 2_000;
const HOOK = 'hook.receiver.test';

let dataDir: DataDir;
let database: Awaited<ReturnType<typeof freshDatabase>>;
let sql: pg.Pool;
let names: NameServer;
let receiver: Receiver;
let simulator: RunningProcess;
let bank: SimulatorControl;
let env: Environment;
let ports: number[];
let apiKey: string;
let portalId: string;
const apis: RunningProcess[] = [];

const command = (args: readonly string[], change: Environment = {}) =>
  launch([LAUNCHER, ...args, '--json', '--yes'], dataDir, { ...env, LOG_LEVEL: 'silent', ...change });
const payfold = async <T>(...args: string[]): Promise<T> => {
  const { code, stdout, stderr } = await command(args).exited;
  expect([code, stderr]).toEqual([0, '']);
  return JSON.parse(stdout) as T;
};
const refusal = async (args: readonly string[], change: Environment = {}): Promise<string> => {
  const { code, stdout } = await command(args, change).exited;
  expect(code).toBe(1);
  return (JSON.parse(stdout) as { message: string }).message;
};

const startApi = async (instance: number): Promise<void> => {
  apis[instance] = await start('api', dataDir, { ...env, PORT: String(ports[instance]) });
};
const startBank = async (port = 0): Promise<void> => {
  simulator = await start('simulator', dataDir, { SIMULATOR_BATCH_CLOSE: '05:00', SIMULATOR_PORT: String(port) });
  bank = createSimulatorControl(simulator.url, controlKeyOf(dataDir.data));
};

beforeAll(async () => {
  dataDir = await DataDir.create();
  await mkdir(dataDir.data);
  database = await freshDatabase();
  sql = new pg.Pool({ connectionString: database.url, max: 2 });
  sql.on('error', () => undefined);
  names = await startNameServer();
  names.answer(HOOK, ['127.0.0.1']);
  const authority = await createAuthority();
  await writeFile(join(dataDir.path, 'ca.pem'), authority.cert);
  receiver = await startReceiver(await authority.issue(HOOK));
  ports = [await freePort(), await freePort()];
  await startBank();
  env = {
    DATABASE_URL: database.url,
    SIMULATOR_URL: simulator.url,
    WEBHOOK_PRIVATE_TARGETS: `${HOOK}:${receiver.port}=127.0.0.1/32`,
    WEBHOOK_EXTRA_CA_FILE: join(dataDir.path, 'ca.pem'),
    WEBHOOK_DNS_SERVERS: names.address,
  };
  await Promise.all([startApi(0), startApi(1), start('worker', dataDir, env)]);
  for (const api of apis) await untilReady(api);
  const { accountId } = await payfold<{ accountId: string }>('accounts', 'create', '--name', 'City');
  ({ apiKey } = await payfold<{ apiKey: string }>('keys', 'issue', '--account', accountId));
  const fee = ['--fee-flat-cents', '50', '--fee-percent-bps', '250'];
  ({ portalId } = await payfold<{ portalId: string }>('portals', 'create', '--account', accountId, '--name', 'Water', ...fee));
  const endpoint = ['webhooks', 'endpoints', 'add', '--account', accountId, '--url', `https://${HOOK}:${receiver.port}/`];
  receiver.accept((await payfold<{ secret: string }>(...endpoint)).secret);
});
afterAll(async () => {
  await dataDir?.remove();
  await sql?.end();
  await receiver?.close();
  names?.close();
  await database?.drop();
});

// ------------------------------------------------------------------------------------------------------------------------------------
// The partner, over plain HTTP.

interface Reply {
  readonly status: number;
  readonly text: string;
  readonly replayed: boolean;
  readonly retryAfter: string | null;
  readonly code: string | undefined;
  readonly data: { readonly id: string; readonly status: string; readonly createdAt: string; readonly settlement?: { readonly status: string; readonly settledAt: string | null } }; // prettier-ignore
}

const send = async (
  method: string,
  path: string,
  body?: object,
  { key, instance = 0, authorization = `ApiKey ${apiKey}` }: { key?: string; instance?: number; authorization?: string } = {},
): Promise<Reply> => {
  // prettier-ignore
  const answer = await fetch(`${apis[instance]!.url}${PARTNER}/${path}`, {
    method,
    headers: { authorization, 'content-type': 'application/json', ...(key !== undefined && { 'idempotency-key': key }) },
    ...(body && { body: JSON.stringify(body) }),
  });
  const text = await answer.text();
  const parsed = JSON.parse(text) as { data: Reply['data']; details?: { code: string } };
  return {
    status: answer.status,
    text,
    replayed: answer.headers.get('idempotent-replayed') === 'true',
    retryAfter: answer.headers.get('retry-after'),
    code: parsed.details?.code,
    data: parsed.data,
  };
};
const create = (key: string, { instance = 0, ...body }: { instance?: number; number?: string; lines?: number[] } = {}) =>
  send('POST', 'payments', paymentOf(portalId, { ...body, referenceId: key }), { key, instance });
const find = async (id: string, instance = 0) => (await send('GET', `payments/${id}`, undefined, { instance })).data;

const advance = (to: string) => payfold<{ from: string; to: string; deliveriesMoved: number }>('sandbox', 'advance', '--to', to);
const aheadMs = async () => Number((await sql.query<{ ahead_ms: string }>('select ahead_ms from sandbox_time')).rows[0]!.ahead_ms);
/** Business time, `days` from now, as the command takes it. */
const inDays = async (days: number) => new Date(Date.now() + (await aheadMs()) + days * DAY_MS).toISOString();
const charges = async (): Promise<readonly Truth[]> => (await bank.truth()).filter(({ op, result }) => op === 'charge' && result === 'approved');

// ------------------------------------------------------------------------------------------------------------------------------------

test('a month passes: an earlier key replays and charges nothing, tokens stay, batches close and are funded as of their day', async () => {
  const [key, refundKey] = [newKey(), newKey()];
  const first = await create(key);
  expect(first.status).toBe(200);
  const refunded = await create(newKey());
  const refund = await send('POST', `payments/${refunded.data.id}/refund`, { amountCents: 1_000 }, { key: refundKey });
  expect(refund.status).toBe(200);
  const token = await send('POST', 'auth/token', undefined);
  const { accessToken } = token.data as unknown as { accessToken: string };
  const before = await bank.truth();

  const to = await inDays(30);
  expect(await advance(to)).toMatchObject({ to });
  for (const instance of [0, 1]) {
    const again = await create(key, { instance });
    expect([again.status, again.text, again.replayed]).toEqual([200, first.text, true]);
    const refundAgain = await send('POST', `payments/${refunded.data.id}/refund`, { amountCents: 1_000 }, { key: refundKey, instance });
    expect([refundAgain.text, refundAgain.replayed]).toEqual([refund.text, true]);
  }
  expect((await send('GET', 'payments', undefined, { authorization: `Bearer ${accessToken}` })).status).toBe(200);
  expect((await bank.truth()).map(({ ref, op }) => [ref, op])).toEqual(before.map(({ ref, op }) => [ref, op]));

  // The processor closed its batch at the first five o'clock after the charge, and not at the end of the month.
  const { settlement, createdAt } = await find(first.data.id);
  expect(settlement).toMatchObject({ status: 'settled' });
  const waited = Date.parse(settlement!.settledAt!) - Date.parse(createdAt);
  expect([waited > 0, waited <= DAY_MS, settlement!.settledAt!.slice(11)]).toEqual([true, true, '05:00:00.000Z']);
  const { rows } = await sql.query<{ payload: { type: string } }>(`select type from es.events where type = 'BatchFunded'`);
  expect(rows.length).toBeGreaterThan(0);
  expect(await payfold<unknown[]>('settlement', 'exceptions')).toEqual([]);

  // Both APIs and the processor have the time of the move.
  for (const instance of [0, 1]) {
    const next = await create(newKey(), { instance });
    expect(next.data.createdAt > to).toBe(true);
  }
  expect((await charges()).at(-1)!.at > to).toBe(true);
});

test('a refund without a key, whose caller got no answer, is replayed and not made again, also after business days (C18)', async () => {
  const { data } = await create(newKey());
  await bank.arm({ match: { call: 'void' }, answer: 'cut' });
  const refund = () => send('POST', `payments/${data.id}/refund`, { amountCents: 700 });
  expect((await refund()).status).toBe(504);
  await advance(await inDays(3 / 1_440));
  const ended = () => sql.query(`select from es.events where stream_id = $1 and type = 'ReversalEnded'`, [`payment-${data.id}`]);
  await eventually(async () => (await ended()).rowCount === 1, { timeoutMs: 20_000 });
  await advance(await inDays(2));
  const before = (await bank.truth()).length;
  expect(await refund()).toMatchObject({ status: 200, data: { amountCents: 700 } });
  expect((await bank.truth()).length).toBe(before);
});

test('a retry of a webhook and an open attempt come due, and the attempts of recovery go on', async () => {
  const { data } = await create(newKey());
  const open = await create(newKey(), { number: CARD.unreadable });
  const { id: openId } = (JSON.parse(open.text) as { details: { id: string } }).details;
  expect([open.status, (await find(openId)).status]).toEqual([504, 'unknown']);
  receiver.behave(status(500));
  await payfold('payments', 'refund', data.id, '--amount-cents', '500', '--reason', 'billed twice', '--by', 'Dana');
  await eventually(() => receiver.deliveries.length === 1);
  const failed = () => sql.query(`select from webhook_delivery where state = 'pending' and attempts = 1`);
  await eventually(async () => (await failed()).rowCount === 1);
  receiver.behave(null);

  // Three minutes: both are due after two.
  expect(await advance(await inDays(3 / 1_440))).toMatchObject({ deliveriesMoved: 1 });
  await eventually(() => receiver.deliveries.length === 2, { timeoutMs: 10_000 });
  expect(receiver.refusals).toEqual([]);
  await eventually(async () => ['voided', 'failed'].includes((await find(openId)).status), { timeoutMs: 20_000 });
});

describe('requests that race with a move', () => {
  /** Sends creates over both APIs until `until` resolves. Each is sent again after a 503, as a partner does. */
  const flood = async (until: Promise<unknown>): Promise<{ replies: Reply[]; refused: Reply[]; keys: string[] }> => {
    let isOver = false;
    void until.then(() => (isOver = true));
    const [replies, refused, keys]: [Reply[], Reply[], string[]] = [[], [], []];
    await Promise.all(
      Array.from({ length: 8 }, async (_, nth) => {
        while (!isOver) {
          const key = newKey();
          keys.push(key);
          for (;;) {
            const reply = await create(key, { instance: nth % 2 });
            if (reply.status !== 503) {
              replies.push(reply);
              break;
            }
            refused.push(reply);
            await new Promise((wake) => setTimeout(wake, 50));
          }
        }
      }),
    );
    return { replies, refused, keys };
  };

  test('each is executed before or after the move, once for its key; during the move they get 503', async () => {
    const before = (await charges()).length;
    const to = await inDays(3);
    const moving = advance(to);
    const { replies, refused, keys } = await flood(moving.then(() => new Promise((wake) => setTimeout(wake, 1_000))));
    await moving;
    expect(new Set(replies.map((reply) => reply.status))).toEqual(new Set([200]));
    expect(refused.length).toBeGreaterThan(0);
    for (const reply of refused) expect([reply.code, reply.retryAfter]).toEqual(['IDEMPOTENCY_UNAVAILABLE', '1']);
    // Principal and fee are charged apart.
    expect((await charges()).length - before).toBe(2 * keys.length);
    expect(new Set(replies.map(({ data }) => data.id)).size).toBe(keys.length);
    const [early, late] = [replies.filter(({ data }) => data.createdAt < to), replies.filter(({ data }) => data.createdAt >= to)];
    expect([early.length > 0, late.length > 0]).toEqual([true, true]);
    // After the processor had the new time, nothing was charged at an old one.
    const times = (await charges()).map(({ at }) => at);
    expect(times).toEqual([...times].sort());
  });
});

describe('a command that is killed', () => {
  const advancing = async (days: number) => {
    const to = await inDays(days);
    return { to, running: command(['sandbox', 'advance', '--to', to]) };
  };
  const gone = async (running: ReturnType<typeof command>): Promise<Ended> => {
    kill(running.pid);
    return running.exited;
  };

  test('while it waits for a request: nothing is moved, and creates go on within 2 s', async () => {
    let before = 0;
    let slow: ReturnType<typeof create> | null = null;
    for (let isOver = true; isOver;) {
      before = await aheadMs();
      // On a busy machine, the command may begin only after the request has ended. Then it is killed too late.
      isOver = false;
      slow = create(newKey(), { number: CARD.slow }).finally(() => (isOver = true));
      const { running } = await advancing(10);
      const refused = await eventually(async () => {
        const reply = await create(newKey(), { instance: 1 });
        return reply.status === 503 ? reply : null;
      });
      expect(refused.code).toBe('IDEMPOTENCY_UNAVAILABLE');
      await gone(running);
    }
    await eventually(async () => (await create(newKey(), { instance: 1 })).status === 200, { timeoutMs: HEARD_MS });
    await eventually(async () => (await create(newKey())).status === 200, { timeoutMs: HEARD_MS });
    expect((await slow)!.status).toBe(200);
    expect(await aheadMs()).toBe(before);
  });

  test('right after the move: every process follows within 2 s, and a call of the worker carries the time to the processor', async () => {
    const { data } = await create(newKey());
    const before = await aheadMs();
    const { to, running } = await advancing(10);
    await eventually(async () => (await aheadMs()) > before, { everyMs: 1 });
    await gone(running);
    const since = performance.now();
    for (const instance of [0, 1])
      await eventually(async () => {
        const reply = await send('POST', 'payments', paymentOf(portalId), { instance });
        return reply.status === 200 && reply.data.createdAt >= to;
      }, { timeoutMs: HEARD_MS }); // prettier-ignore
    expect(performance.now() - since).toBeLessThan(HEARD_MS);
    await eventually(async () => (await find(data.id)).settlement?.status === 'settled', { timeoutMs: 20_000 });
  });
});

describe('a process that starts later', () => {
  test('an API serves at the time of the sandbox from its first request on', async () => {
    await apis[0]!.killTree();
    await startApi(0);
    const business = await inDays(0);
    const reply = await create(newKey());
    expect([reply.status, reply.data.createdAt >= business]).toEqual([200, true]);
  });

  test('the processor keeps the time over a restart', async () => {
    const business = await inDays(0);
    const port = Number(new URL(simulator.url).port);
    await simulator.killTree();
    await startBank(port);
    const { status: answered } = await create(newKey());
    expect(answered).toBe(200);
    expect((await charges()).at(-1)!.at >= business).toBe(true);
  });

  test('production is refused in one line', async () => {
    const keyFile = join(dataDir.path, 'production.key');
    await writeFile(keyFile, JSON.stringify({ current: 'k1', keys: { k1: Buffer.alloc(32, 7).toString('base64') } }), { mode: 0o600 });
    const production = { ENVIRONMENT: 'production', DATABASE_URL: database.url, MASTER_KEY_FILE: keyFile, PUBLIC_URL: 'https://pay.example', PROXY_HOPS: '1' }; // prettier-ignore
    const { code, stdout, stderr } = await runToEnd('api', dataDir, production, 'ulimit -c 0');
    expect([code, stdout]).toEqual([1, '']);
    expect(stderr).toMatch(/^the time of this database was moved ahead by \d+ days with payfold sandbox advance; production does not start on it\n$/);
  });
});

describe('refused, and nothing is moved', () => {
  const move = ['sandbox', 'advance', '--to'];
  let before: number;
  beforeAll(async () => {
    before = await aheadMs();
  });
  afterAll(async () => expect(await aheadMs()).toBe(before));

  test('backwards', async () => {
    expect(await refusal([...move, await inDays(-1)])).toMatch(/^Time goes forward only: it is .*Z now\.$/);
  });

  test('more than a year at once', async () => {
    expect(await refusal([...move, await inDays(400)])).toMatch(/^--to must be at most 366 days ahead: it is .*Z now\.$/);
  });

  test('while a merchant account has an endpoint that is not on loopback', async () => {
    expect(await refusal([...move, await inDays(1)], { SIMULATOR_URL: 'http://192.0.2.1:9' })).toMatch(
      /^The merchant account .* is called at http:\/\/192\.0\.2\.1:9, which is not on loopback; nothing was moved\.$/,
    );
  });

  test('while a process of another release lives', async () => {
    await sql.query(
      `insert into payfold_process (id, role, release, host, pid, read_models) values (gen_random_uuid(), 'worker', '0.1.9', 'host', 7, '{}')`,
    );
    expect(await refusal([...move, await inDays(1)])).toBe('Processes of other releases live: worker 0.1.9 (process 7); nothing was moved.');
    await sql.query(`delete from payfold_process where release = '0.1.9'`);
  });

  test('in production', async () => {
    const own = await freshDatabase();
    const keyFile = join(dataDir.path, 'production.key');
    const production = { ENVIRONMENT: 'production', DATABASE_URL: own.url, MASTER_KEY_FILE: keyFile, PUBLIC_URL: 'https://pay.example', PROXY_HOPS: '1', SIMULATOR_URL: '', WEBHOOK_PRIVATE_TARGETS: '', DATA_DIR: join(dataDir.path, 'production') }; // prettier-ignore
    expect(await refusal([...move, await inDays(1)], production)).toBe('The time of production never moves; nothing was moved.');
    await own.drop();
  });

  test.each([[['--to', 'tomorrow']], [[]]])('wrong usage: %j', async (args) => {
    const { code, stdout } = await command(['sandbox', 'advance', ...args]).exited;
    expect(code).toBe(2);
    expect((JSON.parse(stdout) as { details: { code: string } }).details.code).toBe('VALIDATION_ERROR');
  });
});

test('afterwards the books, the list and the seal agree with the log, and no exception was opened', async () => {
  const { ok, checks } = await payfold<{ ok: boolean; checks: readonly { name: string; ok: boolean; detail: string }[] }>('audit', 'verify');
  expect([ok, checks.filter((check) => !check.ok)]).toEqual([true, []]);
  expect(await payfold<unknown[]>('settlement', 'exceptions')).toEqual([]);
});
