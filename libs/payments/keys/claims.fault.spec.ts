/**
 * Tests a database of the keys that goes back while the log does not. The database is restored from an earlier copy, or replaced by a standby that
 * lacks the last commits. The Postgres servers are real.
 *
 * Two processes repeat requests with every known key. No operator command is given. No card may be charged twice.
 */
import { afterAll, afterEach, beforeAll, beforeEach, expect, test } from '@jest/globals';
import { execFileSync } from 'node:child_process';
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createSubscriber, eventStoreMigrations, postgresCheckpoint, type Subscriber } from '#eventstore';
import { systemClock } from '#kernel';
import { type Answer, createLogger, createPool, type EmbeddedPostgres, freePort, migrate, type Pool, startEmbeddedPostgres } from '#platform';
import { answerEncoder } from '../../../apps/answers.js';
import { read, sent } from '../../../test/support/answers.js';
import { eventually } from '../../../test/support/eventually.js';
import { type Ground, type House, openGround, openHouse } from '../../../test/support/payments.js';
import { chargeOnce, type PaymentServices, reverseOnce } from '../commands.js';
import { type ClaimsGate, claimsMigration, openClaims } from './claims.js';
import { KEYS_FROM_LOG, keysFromLog, keysFromLogMigration } from './from-log.js';
import { LEASE_SECONDS } from './key-store.js';
import { idempotencyMigrations, postgresIdempotency } from './postgres.js';

const MIGRATIONS = [...eventStoreMigrations, ...idempotencyMigrations, keysFromLogMigration, claimsMigration];
/** The data may be lost if the machine crashes. */
const SETTINGS = { fsync: 'off', restore_command: '/bin/false' };

let ground: Ground;
let house: House;
let folder: string;
let port: number;
let cluster: EmbeddedPostgres;
beforeAll(async () => {
  ground = await openGround();
});
afterAll(() => ground.close());

/** A process of the service: its connections, its claims, its subscriber. */
interface Process {
  readonly claims: ClaimsGate;
  readonly services: PaymentServices;
  readonly pool: Pool;
  readonly logged: string[];
  stop(): Promise<void>;
}
let processes: Process[] = [];

const openProcess = (name: string, works = true): Process => {
  const logged: string[] = [];
  const log = createLogger('info', 'spec', { write: (line) => logged.push(line) });
  const { store } = house;
  const projections = createPool(cluster.url, { name: 'projections', max: 2 });
  const keys: Subscriber = createSubscriber(keysFromLog({ store, answers: answerEncoder, personal: house.ports.personal, clock: systemClock, log }), {
    store,
    checkpoint: postgresCheckpoint(projections, KEYS_FROM_LOG),
    leaseMs: 1_000,
  });
  const { claims, pool, completions } = openClaims(
    (which, verify) => createPool(cluster.url, { name: which, max: 3, byKey: true, verify }),
    join(folder, name),
    { store, keys, ownLog: house.ports.ownLog, clock: systemClock, log },
  );
  if (works) keys.start();
  return {
    claims,
    services: { ...house.services, idempotency: postgresIdempotency(pool, ground.keys, house.ids, { completions }), claims },
    pool,
    logged,
    stop: async () => {
      await Promise.all([claims.stop(), keys.stop()]);
      await Promise.all([pool.end(), completions.end(), projections.end()]);
    },
  };
};

const startCluster = () => startEmbeddedPostgres(join(folder, 'postgres'), { port, settings: SETTINGS });

beforeEach(async () => {
  house = await openHouse(ground);
  folder = await mkdtemp(join(tmpdir(), 'payfold-claims-'));
  execFileSync('chmod', ['711', folder]);
  port = await freePort();
  cluster = await startCluster();
  const pool = createPool(cluster.url, { name: 'spec', max: 1 });
  await migrate(pool, MIGRATIONS);
  await pool.end();
  processes = [];
}, 600_000);
afterEach(async () => {
  await Promise.all(processes.map((one) => one.stop()));
  await cluster.stop();
  await rm(folder, { recursive: true, force: true });
}, 60_000);

/** A request of a partner, to either process. */
type Request = (process: Process) => Promise<Answer>;
const chargeOf = (): Request => {
  const key = house.key();
  return ({ services }) => sent(chargeOnce(services, house.request(), house.received(key, 'charge')));
};
const refundOf = (paymentId: string): Request => {
  const key = house.key();
  const asked = { operation: 'refund', paymentId, accountId: house.accountId, initiatedBy: 'partner', amountCents: 1_000, includeFee: false, reason: null } as const; // prettier-ignore
  return ({ services }) => sent(reverseOnce(services, asked, house.received(key, asked)));
};

const send = async (requests: readonly Request[]): Promise<Answer[]> => {
  const answers = await Promise.all(requests.map((request, index) => request(processes[index % processes.length]!)));
  for (const answer of answers) expect(answer.status).toBe(200);
  return answers;
};

const isOpen = () => processes.every(({ claims }) => claims.isOpen);
const allClosed = () => processes.every(({ claims }) => !claims.isOpen);
/** Ends the lease by moving the stored time back. Processes read the time only from the database's clock. */
const leaseEnds = (pool: Pool) => pool.query(`update key_claims set noticed_at = noticed_at - make_interval(secs => $1)`, [LEASE_SECONDS]);
const copy = (from: string, to: string) => execFileSync('cp', ['-a', join(folder, from), join(folder, to)]);

/** In both losses the server gets an earlier copy of its files. In the second loss it is also promoted to a new timeline. */
const LOSSES = [
  ['was put back to an earlier copy', null],
  ['was replaced by a standby that lacked the last commits', 'recovery.signal'],
] as const;

test.each(LOSSES)(
  'the database of the keys %s: each known key gets its answer or 503, and no money moves twice',
  async (_, signal) => {
    processes = [openProcess('a'), openProcess('b', false)];
    await Promise.all(processes.map(({ claims }) => claims.begun()));
    expect(isOpen()).toBe(true);
    const early = Array.from({ length: 4 }, chargeOf);
    const answers = new Map<Request, Answer>();
    const sendFirst = async (requests: readonly Request[]) =>
      (await send(requests)).forEach((answer, index) => answers.set(requests[index]!, answer));
    await sendFirst(early);

    await cluster.stop();
    copy('postgres', 'earlier');
    cluster = await startCluster();
    // After the restart, each process compares its keys with the log before it claims one.
    await eventually(async () => (await Promise.all(processes.map(async (process) => chargeOf()(process)))).every(({ status }) => status === 200));
    expect(isOpen()).toBe(true);

    // The earlier copy lacks the keys of these requests.
    const late = Array.from({ length: 6 }, chargeOf);
    await sendFirst(late);
    const charged = [...early, ...late].map((request) => read<{ id: string }>(answers.get(request)!).data.id);
    await sendFirst(charged.slice(0, 2).map(refundOf));
    const money = (await house.truth()).length;

    const retrying = new AbortController();
    const others = new Set<string>();
    const retries = [...answers].flatMap(([request, first]) =>
      processes.map(async (process) => {
        while (!retrying.signal.aborted) {
          const { replayed: _, ...answer } = await request(process);
          if (answer.status !== first.status || answer.body !== first.body)
            others.add(`${answer.status} ${read({ ...answer, replayed: false }).code}`);
          await systemClock.sleep(20);
        }
      }),
    );

    await cluster.stop();
    await rm(join(folder, 'postgres'), { recursive: true });
    copy('earlier', 'postgres');
    if (signal) {
      await writeFile(join(folder, 'postgres', signal), '');
      execFileSync('chown', ['--reference', join(folder, 'earlier'), join(folder, 'postgres', signal)]);
    }
    cluster = await startCluster();
    await eventually(allClosed, { timeoutMs: 20_000 });
    const { pool } = processes[0]!;
    await eventually(async () => (await pool.query('select from key_claims where noticed_at is not null')).rowCount === 1, { timeoutMs: 20_000 });
    await systemClock.sleep(1_500);
    expect(isOpen()).toBe(false);
    await leaseEnds(pool);
    await eventually(isOpen, { timeoutMs: 20_000 });
    await systemClock.sleep(1_000);
    retrying.abort();
    await Promise.all(retries);

    expect([...others].filter((other) => other !== '503 IDEMPOTENCY_UNAVAILABLE')).toEqual([]);
    expect((await house.truth()).length).toBe(money);
    for (const [request, first] of answers) for (const process of processes) expect(await request(process)).toEqual({ ...first, replayed: true });
    expect(processes.some(({ logged }) => logged.some((line) => line.includes('went back or was exchanged')))).toBe(true);
    // New keys are claimed again, and a restarted process notices no loss.
    await send([chargeOf(), chargeOf()]);
    await processes[1]!.stop();
    processes[1] = openProcess('b');
    await processes[1].claims.begun();
    expect(isOpen()).toBe(true);
  },
  120_000,
);

test('the server loses its last commits at a restart, on the same timeline: no lost key charges again', async () => {
  processes = [openProcess('a'), openProcess('b', false)];
  await Promise.all(processes.map(({ claims }) => claims.begun()));
  // Every connection is open, so that a claim needs no new one.
  for (let round = 0; round < 5; round++) {
    await send(Array.from({ length: 12 }, chargeOf));
    await systemClock.sleep(200);
  }
  // The copy is made just after the gate has read the place, and the loss comes before it reads the place again. Other writes of the restarted server
  // then pass the known place.
  const kept = () => readFile(join(folder, 'a', 'keys-database'), 'utf8');
  const before = await kept();
  await send([chargeOf()]);
  await eventually(async () => (await kept()) !== before, { everyMs: 5 });
  copy('postgres', 'earlier');
  const late = Array.from({ length: 4 }, chargeOf);
  const first = await send(late);
  process.kill(cluster.pid, 'SIGQUIT');
  await cluster.exited;
  const money = (await house.truth()).length;
  await rm(join(folder, 'postgres'), { recursive: true });
  copy('earlier', 'postgres');
  cluster = await startCluster();

  for (const [index, request] of late.entries())
    for (const process of processes) {
      const answer = await eventually(async () => {
        const one = await request(process);
        return one.status === 200 && one;
      });
      expect(answer).toEqual({ ...first[index], replayed: true });
    }
  expect((await house.truth()).length).toBe(money);
}, 120_000);

test('a start without a worker makes the keys itself, and claims nothing before', async () => {
  processes = [openProcess('a')];
  const requests = Array.from({ length: 3 }, chargeOf);
  const first = await send(requests);
  await processes[0]!.stop();
  const pool = createPool(cluster.url, { name: 'spec', max: 1 });
  await pool.query('delete from idempotency_key');
  await pool.query(`update projection_checkpoint set position = '', event_position = null, event_id = null where name = $1`, [KEYS_FROM_LOG]);
  await pool.end();
  processes = [openProcess('a', false)];
  for (const [index, request] of requests.entries()) expect(await request(processes[0]!)).toEqual({ ...first[index], replayed: true });
  expect((await house.truth()).filter(({ op, leg }) => op === 'charge' && leg === 'principal')).toHaveLength(3);
}, 60_000);

test('the kept place is damaged, as after a power failure: the process starts, and claims are closed until the lease of all requests is over', async () => {
  processes = [openProcess('a')];
  const request = chargeOf();
  const [first] = await send([request]);
  await processes[0]!.stop();
  await writeFile(join(folder, 'a', 'keys-database'), '');
  processes = [openProcess('a')];
  await processes[0]!.claims.begun();
  const pool = createPool(cluster.url, { name: 'spec', max: 1 });
  await eventually(async () => (await pool.query('select from key_claims where noticed_at is not null')).rowCount === 1);
  expect(isOpen()).toBe(false);
  expect(read(await chargeOf()(processes[0]!)).status).toBe(503);
  await leaseEnds(pool);
  await eventually(isOpen, { timeoutMs: 20_000 });
  expect(await request(processes[0]!)).toEqual({ ...first, replayed: true });
  expect(processes[0]!.logged.some((line) => line.includes('is damaged'))).toBe(true);
  await pool.end();
});

test('a server that hides its place is said in an error line, and claims go on', async () => {
  const admin = createPool(cluster.adminUrl, { name: 'spec', max: 1 });
  await admin.query(`
    create role plain login password 'plain'; grant all on all tables in schema public to plain; grant all on all sequences in schema public to plain;
    revoke execute on function pg_control_system() from public;`);
  const url = new URL(cluster.url);
  [url.username, url.password] = ['plain', 'plain'];
  cluster = { ...cluster, url: url.toString() };
  processes = [openProcess('a')];
  await send([chargeOf()]);
  expect(processes[0]!.logged.filter((line) => line.includes('does not tell its place'))).toHaveLength(1);
  await admin.end();
}, 60_000);
