/**
 * Two neighbouring releases on one database, under load. The steps: prepare, new worker, new API, back, forward, finish. No request may fail, and
 * each release must be able to read all events. Release N can read a new event version. Release N + 1 writes this version, and has new shapes of two
 * read models and two new migrations.
 */
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { mkdir } from 'node:fs/promises';
import { setTimeout as sleep } from 'node:timers/promises';
import { directoryModel } from '#accounts';
import { paymentListModel } from '#payments';
import { createPool, type Pool } from '#platform';
import { eventually } from '../support/eventually.js';
import { freshDatabase } from '../support/postgres.js';
import { DataDir, type Environment, launch, newKey, start } from '../support/processes.js';
import { PAYMENTS, paymentOf } from '../support/service.js';
import { type Build, buildOf, type Patch } from './builds.js';

const release = (to: string): Patch => ({ file: 'libs/platform/release.ts', from: `RELEASE = '0.2.0'`, to: `RELEASE = '${to}'` });

const N: readonly Patch[] = [
  release('0.3.0'),
  {
    file: 'libs/payments/stream.ts',
    from: `  PaymentResolved: [],\n});`,
    to: `  PaymentResolved: [],\n}, { PaymentCreated: ({ note: _, ...data }) => data });`,
  },
];
/** The shape of the list in release N. */
const SHAPE = paymentListModel.shape;
const DIRECTORY_SHAPE = directoryModel.shape;
const N_PLUS_1: readonly Patch[] = [
  release('0.4.0'),
  {
    file: 'libs/payments/stream.ts',
    from: `  PaymentCreated: [asItWas],`,
    to: `  PaymentCreated: [asItWas, (data) => ({ ...data, note: 'older' })],`,
  },
  { file: 'libs/payments/payment.ts', from: `legs: outcome.legs } }];`, to: `legs: outcome.legs, note: 'newer' } }];` },
  { file: 'libs/payments/list.ts', from: `  name: 'payment-list',\n  shape: ${SHAPE},`, to: `  name: 'payment-list',\n  shape: ${SHAPE + 1},` },
  {
    file: 'libs/accounts/directory.ts',
    from: `  name: 'directory',\n  shape: ${DIRECTORY_SHAPE},`,
    to: `  name: 'directory',\n  shape: ${DIRECTORY_SHAPE + 1},`,
  },
  { file: 'libs/payments/list.ts', from: `state text not null)`, to: `state text not null, note text)` },
  {
    file: 'apps/services.ts',
    from: `  dropReadModelsOf010,\n];`,
    to: `  dropReadModelsOf010,
  { name: '0900-note', needs: '0.3.0', sql: 'create table note (id int)' },
  { name: '0901-no-note', phase: 'contract', needs: '0.4.0', sql: 'drop table note' },
];`,
  },
];

let dataDir: DataDir;
let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
let env: Environment;
let [n, next]: Build[] = [];

beforeAll(async () => {
  [n, next, dataDir, database] = await Promise.all([buildOf(N), buildOf(N_PLUS_1), DataDir.create(), freshDatabase()]);
  await mkdir(dataDir.data);
  pool = createPool(database.url, { name: 'spec', max: 2 });
  const simulator = await start('simulator', dataDir);
  env = { DATABASE_URL: database.url, SIMULATOR_URL: simulator.url, MIGRATE: 'prepare' };
}, 600_000);
afterAll(async () => {
  load.stop();
  await pool?.end();
  await dataDir?.remove();
  await database?.drop();
  await Promise.all([n?.remove(), next?.remove()]);
});

// ------------------------------------------------------------------------------------------------------------------------------------

interface Process {
  readonly url: string;
  readonly signal: (name: 'SIGSTOP' | 'SIGCONT') => void;
  readonly stop: () => Promise<unknown>;
}

const startRole = async (build: Build, role: 'api' | 'worker', more: Environment = {}): Promise<Process> => {
  const launched = launch(build.role(role), dataDir, { ...env, ...more });
  const [, url = ''] = await launched.firstLine(/^ready (\S+)\n/m);
  return { url: role === 'api' ? url : '', signal: (name) => launched.signal(name), stop: () => launched.stop() };
};
const ran = async (build: Build, ...args: string[]) =>
  launch(build.payfold(...args, '--json', '--yes'), dataDir, { ...env, LOG_LEVEL: 'silent' }).exited;
const payfold = async <T>(build: Build, ...args: string[]): Promise<T> => {
  const { code, stdout, stderr } = await ran(build, ...args);
  expect([code, stderr]).toEqual([0, '']);
  return JSON.parse(stdout) as T;
};
const refusal = async (build: Build, ...args: string[]): Promise<string> => {
  const { code, stdout } = await ran(build, ...args);
  expect(code).toBe(1);
  return (JSON.parse(stdout) as { message: string }).message;
};

/**
 * Sends creates, reads and lists to every API in turn, until `stop` is called. `leave` removes an API from `apis`, waits for its requests in flight,
 * and stops it.
 */
const load = {
  apis: [] as string[],
  apiKey: '',
  portalId: '',
  created: [] as string[],
  failed: [] as string[],
  inFlight: new Map<string, number>(),
  running: true,
  stop: () => (load.running = false),
  send: async (url: string, path: string, body?: object): Promise<{ data: { id: string; payments: { id: string }[] } }> => {
    load.inFlight.set(url, (load.inFlight.get(url) ?? 0) + 1);
    try {
      const headers = { authorization: `ApiKey ${load.apiKey}`, ...(body && { 'content-type': 'application/json', 'idempotency-key': newKey() }) };
      const answer = await fetch(url + path, { headers, ...(body && { method: 'POST', body: JSON.stringify(body) }) });
      const text = await answer.text();
      if (answer.status !== 200) throw new Error(`${answer.status} ${text}`);
      return JSON.parse(text) as never;
    } finally {
      load.inFlight.set(url, load.inFlight.get(url)! - 1);
    }
  },
  run: async () => {
    for (let turn = 0; load.running; turn++) {
      const url = load.apis[turn % load.apis.length]!;
      const other = load.apis[(turn + 1) % load.apis.length]!;
      try {
        const { id } = (await load.send(url, PAYMENTS, paymentOf(load.portalId))).data;
        load.created.push(id);
        // The other release shows the payment at once, on its own and in the list.
        await load.send(other, `${PAYMENTS}/${id}`);
        const { payments } = (await load.send(other, `${PAYMENTS}?limit=10`)).data;
        if (!payments.some((payment) => payment.id === id)) throw new Error(`the list at ${other} lacks ${id} of ${url}`);
      } catch (error) {
        load.failed.push(String(error));
      }
      await sleep(20);
    }
  },
  leave: async (api: Process) => {
    load.apis = load.apis.filter((url) => url !== api.url);
    await eventually(() => load.inFlight.get(api.url) === 0);
    await api.stop();
  },
};
const some = async (more = 10) => {
  const from = load.created.length;
  await eventually(() => load.created.length >= from + more, { timeoutMs: 20_000 });
  expect(load.failed).toEqual([]);
};

test('two releases run side by side, back and forward, without a failed request', async () => {
  // With `MIGRATE=prepare` a start does not change the schema.
  const early = await launch(n!.role('worker'), dataDir, env).exited;
  expect([early.code, early.stderr]).toEqual([1, expect.stringContaining('is not prepared for this release')]);
  await payfold(n!, 'upgrade', 'prepare');
  const [worker, api] = [await startRole(n!, 'worker'), await startRole(n!, 'api')];
  const { accountId } = await payfold<{ accountId: string }>(n!, 'accounts', 'create', '--name', 'City');
  load.apiKey = (await payfold<{ apiKey: string }>(n!, 'keys', 'issue', '--account', accountId)).apiKey;
  load.portalId = (await payfold<{ portalId: string }>(n!, 'portals', 'create', '--account', accountId, '--name', 'Water')).portalId;
  load.apis = [api.url];
  const running = Promise.all([load.run(), load.run()]);
  await some();

  // Prepare: the old release continues to serve. If `prepare` is killed, its next run completes the work.
  const killed = launch(next!.payfold('upgrade', 'prepare'), dataDir, env);
  await eventually(async () => (await pool.query(`select from payfold_migration where name = '0900-note'`)).rowCount === 1);
  killed.signal('SIGKILL');
  await killed.exited;
  expect(await payfold(next!, 'upgrade', 'prepare')).toMatchObject({ release: '0.4.0', missing: [] });
  await some();

  // Start the new worker and the new API.
  let [newWorker, newApi] = [await startRole(next!, 'worker'), await startRole(next!, 'api')];
  load.apis = [api.url, newApi.url];
  await some(20);
  expect(await refusal(next!, 'upgrade', 'finish')).toMatch(
    /^Older processes live: (worker|api) 0\.3\.0 \(process \d+ on [^)]+\).* nothing was changed\.$/,
  );

  // Both releases accept an API key of the new release at once.
  const { apiKey } = await payfold<{ apiKey: string }>(next!, 'keys', 'issue', '--account', accountId);
  load.apiKey = apiKey;
  await some();

  // Back: stop the new release. The old one can read the new one's events.
  await load.leave(newApi);
  await newWorker.stop();
  await some(20);

  // Forward: start the new release again, and stop the old API.
  [newWorker, newApi] = [await startRole(next!, 'worker'), await startRole(next!, 'api')];
  load.apis = [api.url, newApi.url];
  await some();
  await load.leave(api);

  // The old worker is paused. A change of access is in force for the new release at once. The command names the process that has not yet seen the
  // change.
  const left = await payfold<{ accountId: string }>(next!, 'accounts', 'create', '--name', 'Town');
  const { apiKey: oldKey } = await payfold<{ apiKey: string }>(next!, 'keys', 'issue', '--account', left.accountId);
  const statusOf = async (key: string) => (await fetch(`${newApi.url}${PAYMENTS}?limit=1`, { headers: { authorization: `ApiKey ${key}` } })).status;
  expect(await statusOf(oldKey)).toBe(200);
  worker.signal('SIGSTOP');
  const [deactivated, issued] = await Promise.all([
    refusal(next!, 'accounts', 'deactivate', left.accountId),
    refusal(next!, 'keys', 'issue', '--account', accountId),
  ]);
  expect(deactivated).toMatch(
    new RegExp(
      `^The change is recorded, but process \\d+ on \\S+ \\(worker, release 0\\.3\\.0\\) still reads the state before it \\(directory@${DIRECTORY_SHAPE}\\)\\. `,
    ),
  );
  // The error shows the API key that was issued while the worker is paused. No later command can show it.
  expect(await statusOf(/The new API key is (pc_\S+);/.exec(issued)![1]!)).toBe(200);
  expect(await statusOf(oldKey)).toBe(403);
  worker.signal('SIGCONT');
  expect(await payfold(next!, 'accounts', 'deactivate', left.accountId)).toMatchObject({ accountId: left.accountId });
  await some();
  await worker.stop();
  expect(await payfold(next!, 'upgrade', 'finish')).toMatchObject({ unfinished: [] });
  await some();
  load.stop();
  await running;

  const late = await launch(n!.role('api'), dataDir, { ...env, MIGRATE: 'start' }).exited;
  expect([late.code, late.stderr]).toEqual([
    1,
    expect.stringContaining('0901-no-note is unknown here and needs release 0.4.0); nothing was changed'),
  ]);

  const { rows: versions } = await pool.query<{ v: number; n: number }>(
    `select (meta->>'v')::int as v, count(*)::int as n from es.events where type = 'PaymentCreated' group by 1 order by 1`,
  );
  expect(versions.map(({ v }) => v)).toEqual([2, 3]);
  expect(versions.reduce((sum, one) => sum + one.n, 0)).toBe(load.created.length);
  expect((await pool.query('select from projection_failure')).rowCount).toBe(0);
  for (const shape of [SHAPE, SHAPE + 1]) {
    const { rows } = await pool.query<{ id: string }>(`select payment_id as id from rm_payment_list_${shape}.payment_list`);
    if (shape > SHAPE) expect(rows.map(({ id }) => id).sort()).toEqual([...load.created].sort());
    else expect(rows.length).toBeGreaterThan(0);
  }
  expect(await payfold(next!, 'audit', 'verify')).toMatchObject({ ok: true });
  await load.leave(newApi);
  await newWorker.stop();
}, 600_000);
