/** The present code with the data of every frozen release (`npm run release:freeze`): old answers, open work, signatures and closed periods. */
import { afterEach, describe, expect, test } from '@jest/globals';
import { execFile } from 'node:child_process';
import { chmodSync, cpSync } from 'node:fs';
import { mkdir } from 'node:fs/promises';
import { join } from 'node:path';
import { promisify } from 'node:util';
import pg from 'pg';
import { createLogger, readConfig, readKeyRing } from '#platform';
import { createApi } from '../../apps/api/api.js';
import { Health } from '../../apps/health.js';
import { openServices } from '../../apps/services.js';
import { startWorker } from '../../apps/worker/worker.js';
import { Payer } from '../support/checkout.js';
import { eventually } from '../support/eventually.js';
import { freshDatabase } from '../support/postgres.js';
import { DataDir, type Environment, launch, type RunningProcess, start } from '../support/processes.js';
import { MovableClock, PAYMENTS } from '../support/service.js';
import { type Answered, PUBLIC, verifyWith } from './freeze.js';
import { expectedOf, folderOf, loadRows, RELEASES } from './frozen.js';

const VERIFIER = new URL('../../apps/operator/verify.mjs', import.meta.url).pathname;
const LAUNCHER = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname;

const cleanUps: (() => Promise<unknown>)[] = [];
afterEach(async () => {
  for (const cleanUp of cleanUps.splice(0).reverse()) await cleanUp();
});

const takeOver = async (release: string) => {
  const [folder, expected] = [folderOf(release), expectedOf(release)];
  const [dataDir, database] = [await DataDir.create(), await freshDatabase()];
  cleanUps.push(() => database.drop());
  cleanUps.push(() => dataDir.remove());
  await mkdir(dataDir.data);
  for (const name of ['master.key', 'heads', 'simulator']) cpSync(join(folder, name), join(dataDir.data, name), { recursive: true });
  // Git keeps no mode that hides a file from others.
  chmodSync(join(dataDir.data, 'master.key'), 0o600);
  const client = new pg.Client({ connectionString: database.url });
  await client.connect();
  cleanUps.push(() => client.end());
  await loadRows(client, release);
  const simulator = await start('simulator', dataDir);
  const env: Environment = { DATABASE_URL: database.url, SIMULATOR_URL: simulator.url, PUBLIC_URL: PUBLIC, LOG_LEVEL: 'error' };
  return { folder, expected, dataDir, client, env, simulator };
};

const payfold = async <T>(dataDir: DataDir, env: Environment, ...args: string[]): Promise<T> => {
  const { code, stdout, stderr } = await launch([LAUNCHER, ...args, '--json', '--yes'], dataDir, { ...env, LOG_LEVEL: 'silent' }).exited;
  expect([args.join(' '), code, stderr, code === 0 ? '' : stdout]).toEqual([args.join(' '), 0, '', '']);
  return JSON.parse(stdout) as T;
};

type Shown = Readonly<Record<string, unknown>>;
/** Fields that releases have added to a payment. */
const ADDED: readonly string[] = ['settlement'];
/** The answer without the fields that were added after the release that gave `then`. Everything else must keep its bytes and its order. */
const asThen = (now: string, then: string): string => {
  const { data } = JSON.parse(then) as { data: Shown };
  const { data: shown, ...rest } = JSON.parse(now) as { data: Shown };
  return JSON.stringify({ ...rest, data: Object.fromEntries(Object.entries(shown).filter(([name]) => name in data || !ADDED.includes(name))) });
};

describe.each(RELEASES)('the data of release %s', (release) => {
  test('is taken over: every earlier answer, signature and closed period stays the same, and open work goes on', async () => {
    const { folder, expected, dataDir, env, client, simulator } = await takeOver(release);
    const api: RunningProcess = await start('api', dataDir, env);
    const post = async ({ path, key, body }: Answered) => {
      const headers = { authorization: `ApiKey ${expected.apiKey}`, 'content-type': 'application/json', 'idempotency-key': key };
      const answer = await fetch(api.url + path, { method: 'POST', headers, body: JSON.stringify(body) });
      return { status: answer.status, text: await answer.text(), replayed: answer.headers.get('idempotent-replayed') };
    };
    const get = async (path: string) => (await fetch(api.url + path, { headers: { authorization: `ApiKey ${expected.apiKey}` } })).text();

    // Before a worker has built the new shape of the directory, a valid API key gets 503 and not 401.
    const early = await fetch(api.url + PAYMENTS, { headers: { authorization: `ApiKey ${expected.apiKey}` } });
    expect([early.status, early.headers.get('retry-after'), await early.json()]).toMatchObject([503, '2', { details: { code: 'INTERNAL_ERROR' } }]);
    expect(await post(expected.answered[0]!)).toMatchObject({ status: 503, text: expect.stringContaining('IDEMPOTENCY_UNAVAILABLE') });
    // The processor is away until the answers are compared. Otherwise recovery could end the open refund before that.
    simulator.signal('SIGSTOP');
    try {
      await start('worker', dataDir, env);
      await eventually(async () => (await fetch(`${api.url}/readyz`)).status === 200, { timeoutMs: 60_000 });

      // Payments have the same answers as before, on their own and in the list.
      const { payments } = (JSON.parse(await get(`${PAYMENTS}?limit=100`)) as { data: { payments: Shown[] } }).data;
      for (const [id, text] of Object.entries(expected.payments)) {
        const now = await get(`${PAYMENTS}/${id}`);
        expect(asThen(now, text)).toBe(text);
        expect(payments.find((listed) => listed.id === id)).toEqual((JSON.parse(now) as { data: Shown }).data);
      }
    } finally {
      simulator.signal('SIGCONT');
    }

    // Old keys replay the same bytes. A create that ended in a 5xx stays reserved.
    for (const answered of expected.answered) {
      const again = await post(answered);
      if (answered.status < 500) expect(again).toEqual({ status: answered.status, text: answered.text, replayed: 'true' });
      else expect([again.status, again.text]).toEqual([409, expect.stringContaining('IDEMPOTENCY_RECONCILIATION_REQUIRED')]);
    }

    // The refund with the unknown outcome ends under its old key, and only once.
    const ended = await eventually(
      async () => {
        const answer = await post(expected.open);
        return answer.status === 200 ? answer : null;
      },
      { timeoutMs: 60_000, everyMs: 1_000 },
    );
    expect(JSON.parse(ended.text)).toMatchObject({ data: { id: expected.open.paymentId, amountCents: 1_000, status: 'succeeded' } });
    expect((await post(expected.open)).text).toBe(ended.text);

    // The closed period is unchanged, the log matches its signed heads, and the old evidence still verifies.
    const verified = await payfold<{ ok: boolean; checks: { name: string; ok: boolean }[] }>(dataDir, env, 'audit', 'verify');
    expect(verified.checks.filter(({ ok }) => !ok)).toEqual([]);
    const balance = await payfold<object>(dataDir, env, 'payments', 'show', expected.open.paymentId);
    expect(JSON.stringify(balance)).toContain('partially_refunded');
    await verifyWith(folder, 'pack', join(folder, 'pack'));
    await verifyWith(folder, 'prove', join(folder, 'proof.json'));
    // Packs that this release makes of the old events pass the verifier of this release, also the pack of the closed period.
    const keys = join(dataDir.data, 'heads', 'keys.txt');
    for (const [to, said] of [
      [expected.frozenAt, 'the openings follow from the events'],
      [expected.period.to, 'the closing balances and the digest of the journal are those that were recorded'],
    ] as const) {
      const pack = join(dataDir.path, `pack-${to}`);
      await payfold(dataDir, env, 'audit', 'pack', '--from', '2020-01-01', '--to', to, '--out', pack);
      const checked = await promisify(execFile)(process.execPath, [VERIFIER, 'pack', pack, '--key', keys]);
      expect(checked.stdout).toContain(`ok: ${said}`);
    }
    const { rows: periods } = await client.query<{ data: { digest: string } }>(`select data from es.events where data->>'digest' = $1`, [
      expected.period.digest,
    ]);
    expect(periods).toHaveLength(1);
    expect(verified.checks.map(({ name }) => name)).toContain('periods');

    // `upgrade finish` removes what only the older release needs. The service continues to work.
    await payfold(dataDir, env, 'upgrade', 'finish');
    for (const [id, text] of Object.entries(expected.payments))
      if (id !== expected.open.paymentId) expect(asThen(await get(`${PAYMENTS}/${id}`), text)).toBe(text);
  }, 600_000);

  test('is taken over in the hour in which it was frozen: the open checkout is paid', async () => {
    const { expected, dataDir, env } = await takeOver(release);
    const clock = new MovableClock();
    clock.advance(Date.parse(expected.frozenAt) - clock.now());
    const config = readConfig({ ...env, DATA_DIR: dataDir.data });
    const places = { databaseUrl: env.DATABASE_URL!, simulatorUrl: env.SIMULATOR_URL! };
    const services = await openServices(config, places, readKeyRing(join(dataDir.data, 'master.key')), createLogger('silent', 'spec'), { clock });
    cleanUps.push(() => services.close());
    const worker = startWorker(services);
    cleanUps.push(() => worker.stop());
    await eventually(() => services.readModels.areBuilt(), { timeoutMs: 20_000 });
    const api = await createApi({ ...services, health: new Health(services), publicUrl: config.publicUrl });
    cleanUps.push(() => api.close());
    const payer = new Payer(await api.listen(0, '127.0.0.1'), PUBLIC);
    for (const [path, cookie] of expected.checkout.cookies) payer.cookies.set(path, cookie);
    const id = expected.checkout.path.split('/').at(-1)!;
    const paid = await payer.pay(id);
    expect([paid.status, paid.location]).toEqual([303, `/checkout/${id}/receipt`]);
  }, 300_000);
});
