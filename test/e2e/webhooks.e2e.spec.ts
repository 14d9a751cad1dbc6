/**
 * Webhooks from end to end (specification, Events). The service is a real process tree, and staff use the command line. The partner's receiver was
 * written only from the specification. It uses real TLS and a test name server.
 */
import { execFile, spawn } from 'node:child_process';
import { createServer, type Server } from 'node:http';
import { writeFile } from 'node:fs/promises';
import type { AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import type { PaymentView } from '#payments';
import { freePort } from '#platform';
import type { AttemptRow, DeliveryRow, Endpoint } from '#webhooks';
import { eventually } from '../support/eventually.js';
import { type NameServer, startNameServer } from '../support/name-server.js';
import { type FreshKurrentDb, freshKurrentDb } from '../support/kurrentdb-server.js';
import { DataDir, newKey, type RunningProcess, start, type Welcome, welcomeOf } from '../support/processes.js';
import { createAuthority, type Receiver, startReceiver, status, verify } from '../support/receiver.js';
import { paymentOf, PAYMENTS } from '../support/service.js';

const LAUNCHER = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname;
const COMMAND_MS = 60_000;
const UUID = /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/;
const SECRET = /^whsec_[0-9A-Za-z]{43}$/;

let dataDir: DataDir;
let service: RunningProcess;
let welcome: Welcome;
let names: NameServer;
let metricsPort: number;
let kurrentDb: FreshKurrentDb;
let env: Record<string, string>;
let accountId: string;
const receivers: Receiver[] = [];
/** URLs of the receivers, for example `https://r1.receiver.test:…/hook`. */
const urls: string[] = [];

beforeAll(async () => {
  dataDir = await DataDir.create();
  names = await startNameServer();
  const authority = await createAuthority();
  await writeFile(join(dataDir.path, 'ca.pem'), authority.cert);
  const targets: string[] = [];
  for (const host of ['r1.receiver.test', 'r2.receiver.test', 'r3.receiver.test']) {
    names.answer(host, ['127.0.0.1']);
    const receiver = await startReceiver(await authority.issue(host));
    receivers.push(receiver);
    targets.push(`${host}:${receiver.port}=127.0.0.1/32`);
    urls.push(`https://${host}:${receiver.port}/hook`);
  }
  kurrentDb = await freshKurrentDb();
  env = {
    ...kurrentDb.env,
    WEBHOOK_PRIVATE_TARGETS: targets.join(','),
    WEBHOOK_EXTRA_CA_FILE: join(dataDir.path, 'ca.pem'),
    WEBHOOK_DNS_SERVERS: names.address,
    WEBHOOK_RETRY_SECONDS: '0.1',
  };
  metricsPort = await freePort();
  service = await start('standalone', dataDir, { ...env, METRICS_PORT: String(metricsPort) });
  welcome = welcomeOf(service.stdout())!;
  accountId = ((await done<{ accountId: string }[]>('accounts', 'list'))[0] as { accountId: string }).accountId;
}, COMMAND_MS);
afterAll(async () => {
  await dataDir?.remove();
  await kurrentDb?.stop();
  for (const receiver of receivers) await receiver.close();
  names?.close();
}, COMMAND_MS);

const command = () => ({ PATH: process.env.PATH, HOME: process.env.HOME, DATA_DIR: dataDir.data, LOG_LEVEL: 'error', ...env });
const run = (...args: string[]): Promise<{ code: number; stdout: string; stderr: string }> =>
  new Promise((resolve) => {
    const child = execFile(process.execPath, [LAUNCHER, ...args], { env: command(), cwd: tmpdir(), timeout: COMMAND_MS }, (error, stdout, stderr) =>
      resolve({ code: error ? Number(error.code ?? 99) : 0, stdout, stderr }),
    );
    child.stdin?.end();
  });
const done = async <T>(...args: string[]): Promise<T> => {
  const { code, stdout, stderr } = await run(...args, '--json');
  expect([code, stderr]).toEqual([0, '']);
  expect(stdout).toMatch(/^[^\n]+\n$/);
  return JSON.parse(stdout) as T;
};
const refused = async (code: 1 | 2, ...args: string[]): Promise<string> => {
  const ran = await run(...args, '--json');
  expect([ran.code, ran.stderr]).toEqual([code, expect.stringMatching(/^error: [^\n]+\n$/)]);
  return (JSON.parse(ran.stdout) as { message: string }).message;
};
const pay = async (): Promise<PaymentView> => {
  const answer = await fetch(`${service.url}${PAYMENTS}`, {
    method: 'POST',
    headers: { authorization: `ApiKey ${welcome.apiKey}`, 'content-type': 'application/json', 'idempotency-key': newKey() },
    body: JSON.stringify(paymentOf(welcome.portalId)),
  });
  return ((await answer.json()) as { data: PaymentView }).data;
};
const partnerRefund = (id: string) =>
  fetch(`${service.url}${PAYMENTS}/${id}/refund`, { method: 'POST', headers: { authorization: `ApiKey ${welcome.apiKey}` } });
const BY = ['--by', 'Dana Scott'];

let endpointId: string;
test('endpoints add: the secret is shown once, and the receiver gets events from then on', async () => {
  const before = await pay();
  await done('payments', 'refund', before.id, '--reason', 'before anybody listened', ...BY);
  const added = await done<{ endpointId: string; url: string; secret: string }>('webhooks', 'endpoints', 'add', '--account', accountId, '--url', urls[0]!, ...BY); // prettier-ignore
  expect(added).toEqual({ endpointId: expect.stringMatching(UUID), url: urls[0], secret: expect.stringMatching(SECRET) });
  ({ endpointId } = added);
  receivers[0]!.accept(added.secret);
  const list = await run('webhooks', 'endpoints', 'list', '--account', accountId, '--json');
  expect(list.stdout).not.toContain(added.secret);
  expect(JSON.parse(list.stdout)).toMatchObject([{ endpointId, accountId, url: urls[0], status: 'enabled', secretHint: added.secret.slice(-4) }]);
});

test('an operator, not staff, is recorded as having added it', async () => {
  const { stdout } = await run('audit', 'export', 'staff-actions', '--format', 'ndjson');
  const actions = stdout
    .trimEnd()
    .split('\n')
    .map((line) => JSON.parse(line) as { actor_type: string; actor: string; event: string });
  expect(actions.find(({ event }) => event === 'WebhookEndpointAdded')).toMatchObject({ actor_type: 'operator', actor: 'Dana Scott' });
});

test('a refund by staff reaches it, signed; one by the partner does not', async () => {
  const receiver = receivers[0]!;
  const [one, other] = [await pay(), await pay()];
  expect((await partnerRefund(other.id)).status).toBe(200);
  await done('payments', 'refund', one.id, '--amount-cents', '2500', '--reason', 'meter misread', ...BY);
  await eventually(() => receiver.deliveries.length > 0);
  expect(receiver.refusals).toEqual([]);
  expect(receiver.deliveries.map(({ event }) => event)).toEqual([
    {
      id: expect.stringMatching(/^evt_/),
      type: 'payment.refunded',
      createdAt: expect.stringMatching(/Z$/),
      data: { id: one.id, reversalType: 'void', amountCents: 2_500, currency: 'USD', reason: 'meter misread', initiatedBy: 'staff' },
    },
  ]);
  const [row] = await eventually(async () => {
    const rows = await done<DeliveryRow[]>('webhooks', 'deliveries', 'list', '--payment', one.id, '--state', 'delivered');
    return rows.length === 1 ? rows : null;
  });
  expect(row).toMatchObject({
    eventId: receiver.ids[0],
    type: 'payment.refunded',
    accountId,
    endpointId,
    url: urls[0],
    round: 1,
    attempts: 1,
    lastStatus: 200,
  });
});

test('a dispute: one event when it is opened, one per change', async () => {
  const receiver = receivers[0]!;
  const { id } = await pay();
  const openedOn = new Date().toISOString().slice(0, 10);
  const dueDate = new Date(Date.now() + 20 * 86_400_000).toISOString().slice(0, 10);
  const terms = ['--reason-code', '10.4', '--reason', 'fraud', '--opened-on', openedOn, '--due-date', dueDate];
  const { disputeId } = await done<{ disputeId: string }>('disputes', 'open', '--payment', id, '--amount-cents', '5000', '--status', 'debited', '--stage', 'chargeback', ...terms, ...BY); // prettier-ignore
  await done('disputes', 'update', disputeId, '--status', 'in_dispute', '--stage', 'representment', ...BY);
  await done('disputes', 'update', disputeId, '--status', 'in_dispute', ...BY);
  const told = () => receiver.deliveries.filter(({ event }) => event.data.disputeId === disputeId).map(({ event }) => event);
  await eventually(() => told().length === 2);
  expect(told().map(({ type, data }) => [type, data.status, data.stage]).sort()).toEqual([
    ['payment.disputed', 'debited', 'chargeback'],
    ['payment.disputed', 'in_dispute', 'representment'],
  ]); // prettier-ignore
  expect(told()[0]!.data).toEqual({
    id,
    disputeId,
    status: expect.any(String),
    stage: expect.any(String),
    reasonCode: '10.4',
    reason: 'fraud',
    disputedAmountCents: 5_000,
    currency: 'USD',
    openedOn,
    dueDate,
  });
});

test('five failures hold it; show has the attempts; redeliver brings it with the same id', async () => {
  const receiver = receivers[0]!;
  receiver.behave((_request, response) => void response.writeHead(503).end('try \u001b[31mlater'));
  const { id } = await pay();
  await done('payments', 'refund', id, '--reason', 'duplicate', ...BY);
  const held = () => done<DeliveryRow[]>('webhooks', 'deliveries', 'list', '--state', 'held');
  const [row] = await eventually(async () => {
    const rows = await held();
    return rows.length === 1 ? rows : null;
  });
  expect(row).toMatchObject({ state: 'held', attempts: 5, lastStatus: 503, lastError: 'http_5xx', dueAt: null });
  const shown = await done<DeliveryRow & { attemptLog: AttemptRow[] }>('webhooks', 'deliveries', 'show', String(row!.deliveryId));
  expect(shown.attemptLog.map(({ attempt, outcome, statusCode, responseHead }) => [attempt, outcome, statusCode, responseHead])).toEqual(
    [1, 2, 3, 4, 5].map((attempt) => [attempt, 'http_5xx', 503, 'try \\x1b[31mlater']),
  );
  const text = (await run('webhooks', 'deliveries', 'show', String(row!.deliveryId))).stdout;
  expect(text).toContain('try \\x1b[31mlater');
  expect(text).not.toContain('\u001b');

  receiver.behave(null);
  const sent = receiver.deliveries.length;
  expect(await done('webhooks', 'deliveries', 'redeliver', String(row!.deliveryId), ...BY)).toEqual([
    { deliveryId: row!.deliveryId, eventId: row!.eventId, endpointId, round: 2 },
  ]);
  await eventually(() => receiver.deliveries.length > sent);
  expect(receiver.deliveries.at(-1)!.event.id).toBe(row!.eventId);
  expect(receiver.deliveries.at(-1)!.body).toEqual(receiver.deliveries.find(({ event }) => event.id === row!.eventId)!.body);
  await eventually(async () => (await held()).length === 0);
  expect(await done('webhooks', 'deliveries', 'redeliver', '--all-held', ...BY)).toEqual([]);
  expect(receiver.refusals).toEqual([]);
});

test('pause, resume, disable; stage and activate a secret', async () => {
  const receiver = receivers[1]!;
  const added = await done<{ endpointId: string; secret: string }>('webhooks', 'endpoints', 'add', '--account', accountId, '--url', urls[1]!);
  receiver.accept(added.secret);
  const verb = (name: string, ...more: string[]) => done<Endpoint>('webhooks', 'endpoints', name, added.endpointId, ...BY, ...more);
  expect(await verb('pause')).toMatchObject({ endpointId: added.endpointId, status: 'paused' });
  const { id } = await pay();
  await done('payments', 'refund', id, '--reason', 'duplicate', ...BY);
  // The other endpoint of the account gets the event at once.
  await eventually(() => receivers[0]!.deliveries.some(({ event }) => event.data.id === id));
  const waiting = await done<DeliveryRow[]>('webhooks', 'deliveries', 'list', '--endpoint', added.endpointId);
  expect(waiting).toMatchObject([{ state: 'pending', attempts: 0 }]);
  expect(await refused(1, 'webhooks', 'deliveries', 'redeliver', String(waiting[0]!.deliveryId))).toContain('cannot be sent again: it is pending');

  const staged = await done<{ endpointId: string; url: string; secret: string }>('webhooks', 'endpoints', 'stage-secret', added.endpointId);
  expect(staged).toEqual({ endpointId: added.endpointId, url: urls[1], secret: expect.stringMatching(SECRET) });
  expect(await verb('activate-secret')).toMatchObject({ secretHint: staged.secret.slice(-4), stagedSecretHint: null });
  expect(await verb('resume')).toMatchObject({ status: 'enabled' });
  await eventually(() => receiver.refusals.length > 0);
  expect(receiver.refusals[0]).toBe('wrong signature');
  // The partner accepts the new secret now, so the next attempt succeeds.
  receiver.accept(staged.secret);
  await eventually(() => receiver.deliveries.length === 1);

  expect(await refused(2, 'webhooks', 'endpoints', 'disable', added.endpointId)).toContain('add --yes');
  expect(await verb('disable', '--yes')).toMatchObject({ status: 'disabled' });
  expect(await refused(1, 'webhooks', 'endpoints', 'resume', added.endpointId)).toContain('stays disabled');
});

test('check: as far as TLS, and no POST; after a failed step the exit code is 1', async () => {
  const before = receivers[0]!.requests;
  const { ok, steps } = await done<{ ok: boolean; steps: { step: string }[] }>('webhooks', 'endpoints', 'check', endpointId);
  expect([ok, steps.map(({ step }) => step)]).toEqual([true, ['url', 'dns', 'tcp', 'tls']]);
  expect(receivers[0]!.requests).toBe(before);
  names.answer('inside.attacker.test', ['169.254.169.254']);
  const failed = await run('webhooks', 'endpoints', 'check', '--url', 'https://inside.attacker.test/');
  expect(failed.code).toBe(1);
  expect(failed.stdout).toMatch(/^dns +FAILED .* not public/m);
});

test('a forbidden address is refused with the reason', async () => {
  const add = (url: string) => refused(1, 'webhooks', 'endpoints', 'add', '--account', accountId, '--url', url);
  expect(await add('http://hooks.example.com/')).toBe('The URL must begin with https://.');
  expect(await add('https://127.0.0.1/')).toBe('The URL must name its host, not give an IP address.');
  expect(await add('https://hooks.example.com:22/')).toBe('The port must be 443 or 8443.');
  names.answer('mixed.attacker.test', ['93.184.216.34', '10.0.0.1']);
  expect(await add('https://mixed.attacker.test/')).toBe('The host resolves to an address that is not public.');
  expect(await add('https://nobody.attacker.test/')).toContain('does not resolve');
  expect(await add(urls[0]!)).toBe('The account has an endpoint with this URL.');
  const nobody = '0190c1f2-8f52-7b3e-9c61-2f0d8a6b7c11';
  expect(await refused(1, 'webhooks', 'endpoints', 'add', '--account', nobody, '--url', urls[2]!)).toBe('There is no such account.');
  expect(await refused(1, 'webhooks', 'endpoints', 'pause', nobody)).toBe('There is no such webhook endpoint.');
  const kept = 'A delivery is deleted WEBHOOK_KEEP_DAYS after it was delivered.';
  expect(await refused(1, 'webhooks', 'deliveries', 'show', '99999999')).toBe(`There is no delivery 99999999. ${kept}`);
  expect(await refused(1, 'webhooks', 'deliveries', 'redeliver', 'evt_nothing')).toBe(`There is no delivery evt_nothing. ${kept}`);
  for (const wrong of [
    ['endpoints', 'add', '--account', accountId],
    ['endpoints', 'check'],
    ['deliveries', 'redeliver'],
    ['deliveries', 'redeliver', '1', '--all-held'],
    ['deliveries', 'redeliver', 'x'],
    ['deliveries', 'list', '--state', 'lost'],
    ['deliveries', 'list', '--limit', '0'],
    ['listen', '--account', accountId, '--forward-to', 'http://example.com/'],
    ['listen', '--account', accountId, '--forward-to', 'https://127.0.0.1/'],
  ])
    await refused(2, 'webhooks', ...wrong);
});

test('the health flag, metrics and projections show the true state', async () => {
  expect(await (await fetch(`${service.url}/healthz`)).json()).toEqual({ ok: true, checks: { eventLoop: 'ok' }, webhookPrivateTargets: true });
  const text = await (await fetch(`http://127.0.0.1:${metricsPort}/metrics`)).text();
  const value = (line: string) => Number(new RegExp(`^${line.replace(/[{}"]/g, '\\$&')} (.*)$`, 'm').exec(text)?.[1]);
  expect(value('payfold_webhook_attempts_total{outcome="ok"}')).toBeGreaterThan(3);
  expect(value('payfold_webhook_attempts_total{outcome="http_5xx"}')).toBeGreaterThanOrEqual(5);
  expect(value('payfold_webhook_attempt_seconds_count')).toBeGreaterThan(8);
  expect(value('payfold_webhook_deliveries{state="held"}')).toBe(0);
  expect(value('payfold_webhook_held')).toBe(0);
  expect(value('payfold_webhook_oldest_due_seconds')).toBe(0);
  expect(value('payfold_webhook_lease_lost_total')).toBe(0);
  expect(value('payfold_webhook_outbox_lag_events')).toBe(0);
  expect(text).not.toContain('receiver.test');
  const projections = await done<{ name: string; lagEvents: number; failure: null }[]>('projections', 'status');
  expect(projections.find(({ name }) => name === 'webhook-outbox')).toMatchObject({ lagEvents: 0, failure: null });
  // A reactor cannot be rebuilt.
  expect(await refused(2, 'projections', 'rebuild', 'webhook-outbox')).toContain('name one of');
  await done('projections', 'rebuild', '--all');
  expect((await done<DeliveryRow[]>('webhooks', 'deliveries', 'list')).every(({ state }) => ['delivered', 'canceled'].includes(state))).toBe(true);
});

describe('listen', () => {
  let local: Server;
  const received: { headers: Record<string, unknown>; body: Buffer }[] = [];
  let answer = 200;
  beforeAll(async () => {
    local = createServer((request, response) => {
      const chunks: Buffer[] = [];
      request.on('data', (chunk: Buffer) => chunks.push(chunk)).on('end', () => {
        received.push({ headers: request.headers, body: Buffer.concat(chunks) });
        response.writeHead(answer).end();
      }); // prettier-ignore
    });
    await new Promise<void>((resolve) => local.listen(0, '127.0.0.1', resolve));
  });
  afterAll(() => void local.close());
  let secret: string;

  const listen = () => {
    const to = `http://127.0.0.1:${(local.address() as AddressInfo).port}/hook`;
    const child = spawn(process.execPath, [LAUNCHER, 'webhooks', 'listen', '--account', accountId, '--forward-to', to], { env: command(), cwd: tmpdir(), stdio: ['ignore', 'pipe', 'pipe'] }); // prettier-ignore
    const said = { stdout: '', stderr: '' };
    for (const stream of ['stdout', 'stderr'] as const) child[stream].setEncoding('utf8').on('data', (text: string) => (said[stream] += text));
    const exited = new Promise<number | null>((resolve) => child.once('close', resolve));
    return { child, said, exited };
  };
  const counts = async () => {
    const endpoints = await done<Endpoint[]>('webhooks', 'endpoints', 'list');
    const deliveries = await done<DeliveryRow[]>('webhooks', 'deliveries', 'list', '--limit', '1000');
    return [endpoints.length, deliveries.filter(({ endpointId: one }) => !endpoints.some((known) => known.endpointId === one)).length];
  };

  test('forwards signed events to a local server, a line each, until Ctrl-C, and leaves nothing behind', async () => {
    const before = await counts();
    const { child, said, exited } = listen();
    await eventually(() => said.stdout.includes('listening'));
    secret = /^signing secret +(whsec_\S+)$/m.exec(said.stdout)![1]!;
    const { id } = await pay();
    await done('payments', 'refund', id, '--amount-cents', '100', '--reason', 'one', ...BY);
    await eventually(() => received.length === 1);
    answer = 500;
    await done('payments', 'refund', id, '--amount-cents', '200', '--reason', 'two', ...BY);
    await eventually(() => said.stdout.includes('  500  '));
    const { event } = verify(received[0]!.headers as Parameters<typeof verify>[0], received[0]!.body, [secret]);
    expect(event).toMatchObject({ type: 'payment.refunded', data: { id, amountCents: 100 } });
    expect(said.stdout).toMatch(new RegExp(`^\\d\\d:\\d\\d:\\d\\d  payment.refunded  ${event.id}  payment ${id}  200  \\d+ ms$`, 'm'));
    // The registered endpoint of the partner got the event too, with the same id.
    await eventually(() => receivers[0]!.ids.includes(event.id));
    child.kill('SIGINT');
    expect(await exited).toBe(0);
    expect(said.stdout).toMatch(/1 forwarded, 1 failed\n$/);
    expect(said.stderr).toBe('');
    expect(await counts()).toEqual(before);
  });

  test('the same secret at every run; a server that is not there is a line, not an end', async () => {
    const first = listen();
    await eventually(() => first.said.stdout.includes('listening'));
    expect(first.said.stdout).toContain(secret);
    await new Promise<void>((resolve) => local.close(() => resolve()));
    const { id } = await pay();
    await done('payments', 'refund', id, '--reason', 'nobody there', ...BY);
    await eventually(() => first.said.stdout.includes('nobody listens there'));
    first.child.kill('SIGINT');
    expect(await first.exited).toBe(0);
  });
});

test('the list distinguishes a redirect and every kind of outcome', async () => {
  receivers[0]!.behave(status(302, { location: 'http://169.254.169.254/' }));
  const { id } = await pay();
  await done('payments', 'refund', id, '--reason', 'redirected', ...BY);
  const [row] = await eventually(async () => {
    const rows = await done<DeliveryRow[]>('webhooks', 'deliveries', 'list', '--payment', id, '--state', 'held');
    return rows.length === 1 ? rows : null;
  });
  expect(row).toMatchObject({ lastStatus: 302, lastError: 'http_3xx' });
  receivers[0]!.behave(null);
});
