/**
 * Each script of package.json under a real npm, as root too. A signal reaches npm alone: the service must end with it. Other ways to start a service
 * must not be taken for npm.
 */
import { spawnSync } from 'node:child_process';
import { readFileSync, realpathSync } from 'node:fs';
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import { readRuntime } from '../../apps/data-dir.js';
import { controlKeyOf, createSimulatorControl } from '../../apps/simulator/control.js';
import { eventually } from '../support/eventually.js';
import { freshDatabase } from '../support/postgres.js';
import {
  DataDir,
  entryOf,
  type Environment,
  isAlive,
  kill,
  launch,
  newKey,
  runtimeOf,
  type SystemProcess,
  systemProcesses,
  welcomeOf,
} from '../support/processes.js';
import { paymentOf, PAYMENTS } from '../support/service.js';

const ROOT = new URL('../../', import.meta.url).pathname;
const NPM = realpathSync(spawnSync('sh', ['-c', 'command -v npm'], { encoding: 'utf8' }).stdout.trim());
const LAUNCHER = `${ROOT}apps/operator/payfold.mjs`;
const TEST_MS = 300_000;
/** A limit for a service that hangs. An idle service ends within 10 s on two idle cores. */
const ENDS_MS = 60_000;
/** Longer than the watch of a service needs to notice that npm is gone. */
const WATCH_MS = 3_000;

let dataDir: DataDir;
beforeEach(async () => {
  dataDir = await DataDir.create();
});
afterEach(() => dataDir.remove());

/** Without the scripts before `start`, which would build the code anew under other specs. */
const npm = (script: string, env: Environment = {}, ...args: string[]) =>
  launch([NPM, '--prefix', ROOT, 'run', '--ignore-scripts', script, ...args], dataDir, env);

/** Sends the signal to npm alone. Everything that npm had started must be gone. */
const endsWith = async (signal: NodeJS.Signals, started: ReturnType<typeof launch>): Promise<void> => {
  const children = started.children();
  expect(children.some(({ args }) => args.includes('node'))).toBe(true);
  const begun = performance.now();
  started.signal(signal);
  const left = () => systemProcesses().filter(({ pid, args }) => children.some((child) => child.pid === pid) || args.includes(dataDir.data));
  await eventually(() => left().length === 0, { timeoutMs: ENDS_MS }).catch(() => expect(left()).toEqual([]));
  process.stderr.write(`npm: all gone ${((performance.now() - begun) / 1_000).toFixed(1)} s after ${signal} to npm\n`);
};

/** The processes that run a script of Payfold for this data directory. npm and its shell are not among them. */
const serviceOf = (started: ReturnType<typeof launch>): SystemProcess[] =>
  started.children().filter(({ args }) => /^\S*node /.test(args) && args.includes('dist/apps/'));

describe('SIGTERM to npm alone', () => {
  test(
    'npm start, and npm run demo beside it: each ends with its npm, Postgres too; a payment in flight gets its answer',
    async () => {
      const service = npm('start');
      const [, url = ''] = await service.firstLine(/^ready (\S+)\n/m);
      const demo = npm('demo', {}, '--', '--payments', '1000000');
      await demo.firstLine(/^1000000 payments against/m);
      const paying = serviceOf(demo);
      demo.signal('SIGTERM');
      await eventually(() => paying.every(({ pid }) => !isAlive(pid)), { timeoutMs: ENDS_MS });
      expect(readRuntime(dataDir.data)).not.toBeNull();
      const { apiKey, portalId } = welcomeOf(service.stdout())!;
      const bank = createSimulatorControl(runtimeOf(dataDir).simulatorUrl, controlKeyOf(dataDir.data));
      const merchantAccount = `agency-${portalId}`;
      // The charge is executed at once, and its answer comes late.
      await bank.arm({ match: { call: 'charge', merchantAccount }, delayAfterMs: 5_000 });
      const paid = fetch(url + PAYMENTS, {
        method: 'POST',
        headers: { authorization: `ApiKey ${apiKey}`, 'content-type': 'application/json', 'idempotency-key': newKey() },
        body: JSON.stringify(paymentOf(portalId)),
      });
      await eventually(async () => (await bank.truth()).some((made) => made.merchantAccount === merchantAccount), { timeoutMs: ENDS_MS });
      await endsWith('SIGTERM', service);
      expect((await paid).status).toBe(200);
      expect(readRuntime(dataDir.data)).toBeNull();
    },
    TEST_MS,
  );

  test(
    'npm run start:simulator, start:api and start:worker',
    async () => {
      const database = await freshDatabase();
      try {
        const simulator = npm('start:simulator');
        const [line] = await simulator.firstLine(/^\{"ready".*\}\n/m);
        const env = { DATABASE_URL: database.url, SIMULATOR_URL: (JSON.parse(line) as { url: string }).url };
        const api = npm('start:api', env);
        const worker = npm('start:worker', env);
        await Promise.all([api.firstLine(/^ready http/m), worker.firstLine(/^ready worker/m)]);
        await Promise.all([endsWith('SIGTERM', api), endsWith('SIGTERM', worker), endsWith('SIGTERM', simulator)]);
      } finally {
        await database.drop();
      }
    },
    TEST_MS,
  );

  test.each([
    ['the first process appears', (started: ReturnType<typeof launch>) => serviceOf(started).length > 0],
    ['the first child of the service appears', (started: ReturnType<typeof launch>) => serviceOf(started).length > 1],
  ])(
    'while npm start is starting, as soon as %s',
    async (_, begins) => {
      const service = npm('start');
      await eventually(() => begins(service), { timeoutMs: ENDS_MS, everyMs: 10 });
      await endsWith('SIGTERM', service);
    },
    TEST_MS,
  );
});

test(
  'kill -9 of npm leaves its shell, and the service ends all the same',
  async () => {
    const simulator = npm('start:simulator');
    await simulator.firstLine(/^\{"ready".*\}\n/m);
    await endsWith('SIGKILL', simulator);
  },
  TEST_MS,
);

describe('is not taken for an npm that is gone', () => {
  /** Starts the command in the background of a shell that ends. Returns the process of the service. */
  const orphan = async (command: string, env: Environment = {}): Promise<{ pid: number; stop: () => Promise<void> }> => {
    const script = `${command} > "$DATA_DIR.out" 2>&1 & sleep 1`;
    const shell = launch(['-e', `require('node:child_process').spawnSync('sh', ['-c', process.argv[1]], { stdio: 'ignore' })`, script], dataDir, env);
    await shell.exited;
    const { pid } = await eventually(
      () => {
        const ready = /^\{"ready".*\}$/m.exec(readFileSync(`${dataDir.data}.out`, 'utf8'));
        return ready && (JSON.parse(ready[0]) as { pid: number });
      },
      { timeoutMs: ENDS_MS },
    );
    return {
      pid,
      stop: async () => {
        kill(pid, 'SIGTERM');
        await eventually(() => !isAlive(pid), { timeoutMs: ENDS_MS });
      },
    };
  };
  const staysAlive = async (command: string, env: Environment = {}) => {
    const service = await orphan(command, env);
    await new Promise((wake) => setTimeout(wake, WATCH_MS));
    expect(isAlive(service.pid)).toBe(true);
    await service.stop();
  };

  test('the end of the process that had started npm', () =>
    staysAlive(`exec "${process.execPath}" "${NPM}" --prefix "${ROOT}" run start:simulator`), TEST_MS); // prettier-ignore
  test('a deployment script of npm that has ended, and left the service running', () =>
    staysAlive(`exec "${process.execPath}" "${entryOf('simulator')}"`, { npm_lifecycle_script: 'node deploy.js', npm_lifecycle_event: 'deploy' }), TEST_MS); // prettier-ignore
  test('payfold run, whose parent has ended: it is a process of its own', () =>
    staysAlive(`exec "${process.execPath}" "${LAUNCHER}" run simulator`), TEST_MS); // prettier-ignore
});

test(
  'payfold run is Payfold’s own process: SIGTERM to it ends the role with code 0',
  async () => {
    const simulator = launch([LAUNCHER, 'run', 'simulator'], dataDir);
    const [line] = await simulator.firstLine(/^\{"ready".*\}\n/m);
    expect((JSON.parse(line) as { pid: number }).pid).toBe(simulator.pid);
    expect(await simulator.stop()).toMatchObject({ code: 0, signal: null });
    const everything = launch([LAUNCHER, 'run', 'everything'], dataDir);
    await everything.firstLine(/^ready (\S+)\n/m);
    expect(await everything.stop()).toMatchObject({ code: 0, signal: null });
    expect(systemProcesses().filter(({ args }) => args.includes(dataDir.data))).toEqual([]);
    expect(await launch([LAUNCHER, 'run', 'clerk'], dataDir).exited).toMatchObject({
      code: 2,
      stderr: expect.stringMatching(/everything, api, worker, simulator/),
    });
  },
  TEST_MS,
);
