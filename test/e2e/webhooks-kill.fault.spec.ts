/**
 * `kill -9` of workers in the middle of deliveries: real worker processes over one database, real receivers with TLS. No event is lost, every
 * delivery keeps its id, and attempts keep to their schedule.
 */
import { mkdir, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { Administration, directoryModel, NO_FEE } from '#accounts';
import { Deadline, timestamp } from '#kernel';
import { charge, Secret } from '#payments';
import { createLogger, readConfig, readKeyRing } from '#platform';
import { createResolve, createSender, Endpoints, postgresStaffTables } from '#webhooks';
import { openServices, type Services } from '../../apps/services.js';
import { eventually } from '../support/eventually.js';
import { type NameServer, startNameServer } from '../support/name-server.js';
import { freshDatabase } from '../support/postgres.js';
import { DataDir, type Environment, kill, launch, type RunningProcess, start } from '../support/processes.js';
import { createAuthority, type Receiver, startReceiver, status } from '../support/receiver.js';
import { FIRST_DISPUTE } from '../support/webhooks.js';

const RETRY_SECONDS = 1;
/** `npm run kills` plays 17 rounds. In every fifth round both workers are killed, so these are 20 kills, and 6 in `npm test`. */
const ROUNDS = process.env.LONG_PROOFS ? 17 : 5;
/** More events come when a third and when two thirds of the rounds are over. */
const MORE_AFTER = [Math.floor(ROUNDS / 3), Math.floor((2 * ROUNDS) / 3)];
const EVENTS = 300;
/** All events: EVENTS, and one for each fail point. */
const ALL = EVENTS + 5;
/** Another worker takes over after a lease and its grace period. The limit is twice that time, for busy machines. */
const TAKEN_OVER_MS = 70_000;
/** A guard against hanging. All retries are over in half a minute, and in minutes on a busy machine. */
const DONE_MS = 300_000;

let dataDir: DataDir;
let database: Awaited<ReturnType<typeof freshDatabase>>;
let names: NameServer;
let env: Environment;
let services: Services;
let accountId: string;
let paymentId: string;
const receivers: Receiver[] = [];

beforeAll(async () => {
  dataDir = await DataDir.create();
  await mkdir(dataDir.data);
  database = await freshDatabase();
  names = await startNameServer();
  const authority = await createAuthority();
  await writeFile(join(dataDir.path, 'ca.pem'), authority.cert);
  const targets: string[] = [];
  const urls: string[] = [];
  for (const host of ['good1.receiver.test', 'good2.receiver.test', 'bad.receiver.test']) {
    names.answer(host, ['127.0.0.1']);
    const receiver = await startReceiver(await authority.issue(host));
    receivers.push(receiver);
    targets.push(`${host}:${receiver.port}=127.0.0.1/32`);
    urls.push(`https://${host}:${receiver.port}/`);
  }
  const simulator = await start('simulator', dataDir);
  env = {
    DATABASE_URL: database.url,
    SIMULATOR_URL: simulator.url,
    WEBHOOK_PRIVATE_TARGETS: targets.join(','),
    WEBHOOK_EXTRA_CA_FILE: join(dataDir.path, 'ca.pem'),
    WEBHOOK_DNS_SERVERS: names.address,
    WEBHOOK_RETRY_SECONDS: String(RETRY_SECONDS),
  };
  // The first worker makes the schema and the key file.
  await (await start('worker', dataDir, env)).stop();
  const config = readConfig({ ...env, DATA_DIR: dataDir.data });
  const keys = readKeyRing(config.masterKeyFile);
  services = await openServices(config, { databaseUrl: database.url, simulatorUrl: simulator.url }, keys, createLogger('silent', 'spec'));
  const { store, clock, ids, personal, pool, readModels, payments } = services;
  const actor = { type: 'system', id: 'spec' } as const;
  const administration = new Administration({ store, clock, ids, keys, personal, environment: 'sandbox', cardInTextCheck: true, actor });
  ({ accountId } = (await administration.createAccount('City')).state);
  const portal = await administration.createPortal({ accountIds: [accountId], name: 'Water', gateway: 'simulator', fee: NO_FEE });
  await readModels.of(directoryModel).runUntil(portal.position!, { timeoutMs: 10_000 });
  paymentId = ids.uuid();
  await charge(
    payments.ports,
    {
      accountId,
      portalId: portal.state.portalId,
      referenceId: null,
      amountCents: 10_000,
      lineItems: [{ amountCents: 10_000, referenceId: 'INV-1', description: null, metadata: null }],
      payer: null,
      instrument: { type: 'card', number: new Secret('4242424242424242'), expiry: { month: 12, year: 2040 }, cvv: new Secret('987') },
    },
    { paymentId, attemptId: ids.uuid(), idempotency: null },
    { actor, correlationId: ids.uuid() },
    new Deadline(clock, 20_000),
  );
  const sender = createSender({ settings: config.webhooks, resolve: createResolve(config.webhooks.dnsServers, clock), clock });
  const endpoints = new Endpoints({ tables: postgresStaffTables(pool), store, clock, ids, keys, sender, actor });
  for (const [index, url] of urls.entries()) receivers[index]!.accept((await endpoints.add(accountId, url)).secret);
});
afterAll(async () => {
  await services?.close();
  await dataDir?.remove();
  for (const receiver of receivers) await receiver.close();
  names?.close();
  await database?.drop();
});

let events = 0;
/** Makes `count` events for the account: changes of one dispute. */
const moveOn = async (count: number, name: string): Promise<void> => {
  events += count;
  const { clock, ids, payments } = services;
  const owner = { actor: { type: 'staff' as const, id: 'spec' }, correlationId: ids.uuid() };
  for (let number = 0; number < count;) {
    const loaded = await payments.ports.streams.load(paymentId);
    const at = timestamp(clock.now());
    const disputed = loaded.payment.phase === 'charged' && loaded.payment.disputes.length > 0;
    const opened = disputed ? [] : [{ type: 'OpenDispute' as const, at, dispute: { ...FIRST_DISPUTE, stage: `${name} ${number}` } }];
    const changes = Array.from({ length: Math.min(80, count - number) - opened.length }, (_, index) => ({
      type: 'UpdateDispute' as const,
      at,
      disputeId: FIRST_DISPUTE.disputeId,
      status: null,
      stage: `${name} ${number + opened.length + index}`,
    }));
    await payments.ports.streams.execute(loaded, [...opened, ...changes], owner, new Deadline(clock, 20_000));
    number += opened.length + changes.length;
  }
};
const states = async (): Promise<Record<string, number>> => {
  const { rows } = await services.pool.query<{ state: string; count: string }>(
    'select state, count(*) as count from webhook_delivery group by state',
  );
  return Object.fromEntries(rows.map(({ state, count }) => [state, Number(count)]));
};
/** True if every event has its deliveries, and none is pending or in flight. */
const done = async (): Promise<boolean> => {
  const { pending = 0, in_flight = 0 } = await states();
  return pending + in_flight === 0 && (await told()).length === events;
};
const told = async (): Promise<string[]> => {
  const { rows } = await services.pool.query<{ id: string }>('select id from webhook_event order by number');
  return rows.map(({ id }) => id);
};

/** Fail points of the dispatcher, right before or right after one of its calls. */
const FAILPOINTS = ['claimDue:after', 'post:before', 'post:after', 'complete:before', 'complete:after'];

test('a worker dies at each step of a delivery', async () => {
  receivers[2]!.behave(status(500));
  for (const failpoint of FAILPOINTS) {
    await moveOn(1, failpoint);
    const ended = await launch('worker', dataDir, { ...env, FAILPOINT: failpoint }).exited;
    expect(ended.signal).toBe('SIGKILL');
    // A delivery that was claimed but not posted is at no receiver. Any other delivery arrived at most once.
    const heard = receivers.map(({ deliveries }) => deliveries.filter(({ event }) => event.data.stage === `${failpoint} 0`).length);
    expect(Math.max(...heard)).toBeLessThanOrEqual(['claimDue:after', 'post:before'].includes(failpoint) ? 0 : 1);
  }
}, 600_000);

test('kills of workers: nothing lost, same ids, five attempts by schedule where a receiver fails', async () => {
  const [good1, good2, bad] = receivers as [Receiver, Receiver, Receiver];
  for (const receiver of [good1, good2]) receiver.behave((_request, response) => void setTimeout(() => response.writeHead(200).end(), 30));
  // Start two workers. A killed worker is started again.
  const workers: Promise<RunningProcess>[] = [start('worker', dataDir, env), start('worker', dataDir, env)];
  await moveOn(EVENTS / 3, 'first');
  for (let round = 0; round < ROUNDS; round++) {
    const victim = round % 2;
    const before = good1.requests + good2.requests + bad.requests;
    // Wait until ten more requests were received, so that the kill hits deliveries. At the end there may be none left.
    await eventually(async () => good1.requests + good2.requests + bad.requests >= before + 10 || (await done()), {
      timeoutMs: TAKEN_OVER_MS,
      everyMs: 5,
    });
    // In every fifth round both workers are killed at once.
    const victims = round % 5 === 4 ? [victim, 1 - victim] : [victim];
    const killed = await Promise.all(victims.map((index) => workers[index]!));
    for (const { pid } of killed) kill(pid);
    if (MORE_AFTER.includes(round)) await moveOn(EVENTS / 3, `round ${round}`);
    for (const index of victims) workers[index] = killed[victims.indexOf(index)]!.exited.then(() => start('worker', dataDir, env));
  }
  await eventually(done, { timeoutMs: DONE_MS, everyMs: 250 });
  for (const worker of await Promise.all(workers)) expect((await worker.stop()).code).toBe(0);

  expect(await states()).toEqual({ delivered: 2 * ALL, held: ALL });
  const ids = (await told()).sort();
  for (const receiver of receivers) {
    expect([...receiver.ids].sort()).toEqual(ids);
    expect(receiver.refusals).toEqual([]);
  }
  const { rows: lost } = await services.pool.query<{ lost: string }>('select sum(lease_losses) as lost from webhook_delivery');
  expect(Number(lost[0]!.lost)).toBeGreaterThan(0);
  // A killed worker uses up no attempt. Each failing delivery has five recorded attempts, in order, each after its waiting time.
  const { rows: attempts } = await services.pool.query<{ count: string; most: number; soonest: string }>(
    `select count(*) as count, max(attempt) as most,
            min(extract(epoch from started_at - previous)) filter (where previous is not null) as soonest
     from (select a.*, lag(a.started_at + a.duration_ms * interval '1 ms') over (partition by a.delivery_id order by a.attempt) as previous
           from webhook_attempt a where a.outcome = 'http_5xx') as a`,
  );
  expect([Number(attempts[0]!.count), attempts[0]!.most]).toEqual([5 * ALL, 5]);
  expect(Number(attempts[0]!.soonest)).toBeGreaterThanOrEqual(RETRY_SECONDS * 0.9);
}, 1_200_000);
