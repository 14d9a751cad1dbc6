/**
 * The event store or the database is unavailable when a process gets a signal to stop: a service that is starting, a running service, or a command. Each must leave
 * no process, and end within the grace period of an orchestrator (usually 30 s).
 */
import { setTimeout as sleep } from 'node:timers/promises';
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import { createPool } from '#platform';
import { Random } from '../../apps/demo/city.js';
import { startProxy } from '../chaos/proxy.js';
import { eventually } from '../support/eventually.js';
import { KurrentDbDouble } from '../support/kurrentdb-double.js';
import { freshDatabase } from '../support/postgres.js';
import {
  DataDir,
  type Ended,
  isAlive,
  launch,
  newKey,
  postmasterOf,
  type RunningProcess,
  start,
  systemProcesses,
  welcomeOf,
} from '../support/processes.js';
import { paymentOf, PAYMENTS } from '../support/service.js';
import { type SilentServer, silentServer } from '../support/silent-server.js';

const LAUNCHER = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname;
/** The limit for a service that is starting, and for a command. */
const START_ENDS_MS = 10_000;
/** The limit for a running service, which first finishes its requests in flight. */
const SERVICE_ENDS_MS = 25_000;
/** A request ends within this time (C42). */
const REQUEST_ENDS_MS = 28_000;
/** The limit from the answer of the last request to the end of the service, if the event store is away. */
const AFTER_REQUEST_MS = 10_000;
const TEST_MS = 180_000;
/** A port where nothing listens. */
const REFUSING = 9;

let dataDir: DataDir;
let silent: SilentServer;
beforeEach(async () => {
  dataDir = await DataDir.create();
  silent = await silentServer();
});
afterEach(async () => {
  await dataDir.remove();
  await silent.close();
});

/** The lines on stderr for people: all lines that are not JSON of the log. */
const complaint = ({ stderr }: Ended): string[] => stderr.split('\n').filter((line) => line !== '' && !line.startsWith('{"level"'));
/** Sends SIGTERM. The process and all of its children must be gone in time. */
const endsWithin = async (ms: number, process: Pick<RunningProcess, 'signal' | 'exited' | 'children'>): Promise<Ended> => {
  const children = process.children();
  const begun = performance.now();
  process.signal('SIGTERM');
  const ended = await process.exited;
  expect(performance.now() - begun).toBeLessThan(ms);
  // The guard process of Postgres ends after all others.
  await eventually(() => children.every(({ pid }) => !isAlive(pid)), { timeoutMs: 2_000 });
  expect(systemProcesses().filter(({ args }) => args.includes(dataDir.data))).toEqual([]);
  return ended;
};
/** Creates a payment in the account that the service made. Returns the status. */
const pay = async ({ url, stdout }: RunningProcess): Promise<number> => {
  const { apiKey, portalId } = welcomeOf(stdout())!;
  const answer = await fetch(`${url}${PAYMENTS}`, {
    method: 'POST',
    headers: { authorization: `ApiKey ${apiKey}`, 'content-type': 'application/json', 'idempotency-key': newKey() },
    body: JSON.stringify(paymentOf(portalId)),
  });
  return answer.status;
};
const roleOf = ({ args }: { readonly args: string }) => /apps\/(api|worker|simulator)\/main/.exec(args)?.[1] ?? null;

describe.each<[what: string, port: () => number]>([
  ['refuses connections', () => REFUSING],
  ['accepts them and never answers', () => silent.port],
])('an event store that %s', (_what, port) => {
  const env = () => ({ KURRENTDB_URL: `kurrentdb://ops:very-secret@127.0.0.1:${port()}?tls=false` });

  test(
    'a start is refused in one line that names the variable and the host; nothing stays behind',
    async () => {
      const begun = launch('standalone', dataDir, env());
      const ended = await begun.exited;
      expect(ended).toMatchObject({ code: 1, stdout: '' });
      expect(complaint(ended)).toEqual([
        expect.stringMatching(`^the event store at KURRENTDB_URL \\(127\\.0\\.0\\.1:${port()}\\) cannot be reached: `),
      ]);
      expect(ended.stderr).not.toContain('very-secret');
      expect(systemProcesses().filter(({ args }) => args.includes(dataDir.data))).toEqual([]);
    },
    TEST_MS,
  );

  test(
    'SIGTERM during the start ends it, its children and its Postgres',
    async () => {
      const begun = launch('standalone', dataDir, env());
      // Wait until all roles have started, and one waits for the event store.
      await eventually(() => ['api', 'worker', 'simulator'].every((role) => begun.children().some((child) => roleOf(child) === role)), {
        timeoutMs: 30_000,
      });
      expect(postmasterOf(dataDir.data)).not.toBeNull();
      await eventually(() => begun.stderr().includes('KurrentDB does not answer yet'), { timeoutMs: 30_000 });
      expect(await endsWithin(START_ENDS_MS, begun)).toMatchObject({ code: 0, stdout: '' });
    },
    TEST_MS,
  );

  test(
    'after SIGTERM, a service without its event store ends soon after its last answer',
    async () => {
      const double = await new KurrentDbDouble().start();
      const service = await start('standalone', dataDir, { KURRENTDB_URL: double.url() });
      expect(await pay(service)).toBe(200);
      double.kill();
      const gone = port() === REFUSING ? null : await silentServer(double.port);
      try {
        let answeredAt = 0;
        const unanswered = pay(service).finally(() => (answeredAt = performance.now()));
        // The request must arrive before the signal.
        await sleep(1_000);
        expect(await endsWithin(REQUEST_ENDS_MS + AFTER_REQUEST_MS, service)).toMatchObject({ code: 0 });
        const endedAt = performance.now();
        expect(await unanswered).toBeGreaterThanOrEqual(500);
        expect(endedAt - answeredAt).toBeLessThan(AFTER_REQUEST_MS);
      } finally {
        await gone?.close();
      }
    },
    TEST_MS,
  );

  test(
    'SIGTERM of a command that waits for it ends the command and the Postgres that it started',
    async () => {
      const command = launch([LAUNCHER, 'projections', 'rebuild', '--all'], dataDir, env());
      await eventually(() => command.stderr().includes('KurrentDB does not answer yet'), { timeoutMs: 30_000 });
      expect(postmasterOf(dataDir.data)).not.toBeNull();
      expect(await endsWithin(START_ENDS_MS, command)).toMatchObject({ code: 143 });
    },
    TEST_MS,
  );
});

describe('a database that accepts connections and does not answer', () => {
  test(
    'SIGTERM during the start ends it and its children',
    async () => {
      const begun = launch('standalone', dataDir, { DATABASE_URL: `postgres://payfold:very-secret@127.0.0.1:${silent.port}/payfold` });
      await eventually(() => silent.accepted() > 0, { timeoutMs: 30_000 });
      const ended = await endsWithin(START_ENDS_MS, begun);
      expect(ended.stdout).toBe('');
      expect(ended.stderr).not.toContain('very-secret');
    },
    TEST_MS,
  );

  test(
    'SIGTERM of a running service ends it',
    async () => {
      const database = await freshDatabase();
      const proxy = await startProxy(Number(new URL(database.url).port), new Random(1));
      const behindProxy = new URL(database.url);
      behindProxy.port = String(proxy.port);
      try {
        const service = await start('standalone', dataDir, { DATABASE_URL: behindProxy.toString() });
        expect(await pay(service)).toBe(200);
        proxy.poison({ kind: 'timeout' });
        const unanswered = pay(service);
        // The request must arrive before the signal.
        await sleep(1_000);
        await endsWithin(SERVICE_ENDS_MS, service);
        expect(await unanswered).toBeGreaterThanOrEqual(500);
      } finally {
        await proxy.close();
        await database.drop();
      }
    },
    TEST_MS,
  );
});

test(
  'SIGTERM interrupts a rebuild and leaves the live rows alone; the next rebuild completes',
  async () => {
    const database = await freshDatabase();
    const pool = createPool(database.url, { name: 'spec', max: 2 });
    const env = { DATABASE_URL: database.url };
    await (await start('standalone', dataDir, env)).stop();
    const other = await pool.connect();
    // The lock blocks the command when it swaps the directory.
    await other.query(`begin; select from projection_checkpoint where name like 'directory@%' for update`);
    const command = launch([LAUNCHER, 'projections', 'rebuild', 'directory'], dataDir, env);
    await eventually(async () => (await pool.query(`select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`)).rowCount === 1); // prettier-ignore
    const ended = await endsWithin(START_ENDS_MS, command);
    expect([ended.code, complaint(ended)]).toEqual([143, ['error: interrupted']]);
    await other.query('rollback');
    other.release();
    const schemas = async () => (await pool.query(`select from pg_namespace where nspname ~ '^rm_directory'`)).rowCount;
    expect(await schemas()).toBe(2);
    const again = await launch([LAUNCHER, 'projections', 'rebuild', 'directory'], dataDir, env).exited;
    expect(again.code).toBe(0);
    expect(await schemas()).toBe(1);
    await pool.end();
    await database.drop();
  },
  TEST_MS,
);
