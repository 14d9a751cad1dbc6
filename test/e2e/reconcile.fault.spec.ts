/**
 * Readers of the feed beside 64 writers, while readers and the worker are killed: each ends with exactly the log. The reader is
 * examples/reconcile. It finds a difference that is planted, and none without one.
 */
import { execFile, spawn, type ChildProcess } from 'node:child_process';
import { readFileSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { createPostgresEventStore, searchPathOf } from '#eventstore';
import { createPool, freePort, type Pool } from '#platform';
import { READ_MODELS } from '../../apps/services.js';
import { eventually } from '../support/eventually.js';
import { freshDatabase } from '../support/postgres.js';
import { DataDir, type Environment, launch, newKey, type RunningProcess, start, startApiAndWorker } from '../support/processes.js';
import { CARD, PARTNER, paymentOf } from '../support/service.js';

const ROOT = new URL('../../', import.meta.url).pathname.replace(/dist\/$/, '');
const JOB = join(ROOT, 'examples/reconcile/reconcile.mjs');
const LAUNCHER = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname;
const WRITERS = 64;
const PAYMENTS_PER_WRITER = 12;
const READERS = 3;

let dataDir: DataDir;
let database: Awaited<ReturnType<typeof freshDatabase>>;
let sql: Pool;
let env: Environment;
let api: RunningProcess;
let worker: RunningProcess;
let auditUrl: string;
let auditKey: string;
let apiKey: string;
let portalId: string;

const payfold = async <T>(...args: string[]): Promise<T> => {
  const { code, stdout } = await launch([LAUNCHER, ...args, '--json', '--yes'], dataDir, { ...env, LOG_LEVEL: 'silent' }).exited;
  expect([args, code]).toEqual([args, 0]);
  return JSON.parse(stdout) as T;
};
const call = (path: string, body: object): Promise<Response> =>
  fetch(`${api.url}${PARTNER}/${path}`, {
    method: 'POST',
    headers: { authorization: `ApiKey ${apiKey}`, 'content-type': 'application/json', 'idempotency-key': newKey() },
    body: JSON.stringify(body),
  });
const pay = async (number?: string): Promise<string> => {
  const answer = await call('payments', paymentOf(portalId, number ? { number } : {}));
  const { data, details } = (await answer.json()) as { data?: { id: string }; details?: { id?: string } };
  return (data?.id ?? details?.id)!;
};

beforeAll(async () => {
  dataDir = await DataDir.create();
  database = await freshDatabase();
  sql = createPool(database.url, { name: 'spec', max: 2, searchPath: searchPathOf(READ_MODELS) });
  const auditPort = await freePort();
  const simulator = await start('simulator', dataDir);
  env = { DATABASE_URL: database.url, SIMULATOR_URL: simulator.url };
  [api, worker] = await startApiAndWorker(dataDir, env, { AUDIT_PORT: String(auditPort) });
  auditUrl = `http://127.0.0.1:${auditPort}`;
  const { accountId } = await payfold<{ accountId: string }>('accounts', 'create', '--name', 'City');
  ({ apiKey } = await payfold<{ apiKey: string }>('keys', 'issue', '--account', accountId));
  const fee = ['--fee-flat-cents', '50', '--fee-percent-bps', '250'];
  ({ portalId } = await payfold<{ portalId: string }>('portals', 'create', '--account', accountId, '--name', 'Water', ...fee));
  ({ auditKey } = await payfold<{ auditKey: string }>('audit', 'keys', 'issue', '--name', 'Reader', '--role', 'finance'));
}, 180_000);
afterAll(async () => {
  await dataDir?.remove();
  await sql?.end();
  await database?.drop();
});

const jobEnv = (file: string, limit: number) => ({
  PATH: process.env.PATH,
  PAYFOLD_AUDIT_URL: auditUrl,
  PAYFOLD_AUDIT_KEY: auditKey,
  RECONCILE_FILE: join(dataDir.path, file),
  RECONCILE_LIMIT: String(limit),
});
interface Ran {
  readonly code: number | null;
  readonly lines: readonly string[];
}
/** Runs the job to its end. */
const reconcile = (file: string, { limit = 1_000, key = auditKey }: { limit?: number; key?: string } = {}): Promise<Ran> =>
  new Promise((done) => {
    execFile(process.execPath, [JOB], { env: { ...jobEnv(file, limit), PAYFOLD_AUDIT_KEY: key } }, (error, stdout, stderr) =>
      done({ code: error ? Number(error.code ?? 99) : 0, lines: `${stdout}${stderr}`.trimEnd().split('\n') }),
    );
  });
/** The events in the file of a job. */
const copyOf = (file: string): { position: string; eventId: string }[] =>
  readFileSync(join(dataDir.path, file), 'utf8')
    .split('\n')
    .filter(Boolean)
    .flatMap((line) => (JSON.parse(line) as { events: { position: string; eventId: string }[] }).events)
    .map(({ position, eventId }) => ({ position, eventId }));
const log = async (): Promise<{ position: string; eventId: string }[]> => {
  const store = createPostgresEventStore(database.url);
  const events: { position: string; eventId: string }[] = [];
  for await (const batch of store.readAll(null)) events.push(...batch.map(({ position, id }) => ({ position, eventId: id })));
  await store.close();
  return events;
};

test('readers beside 64 writers, killed again and again, and a worker that is killed: each ends with exactly the log, and finds no difference', async () => {
  let isWriting = true;
  const writers = Array.from({ length: WRITERS }, async (_, writer) => {
    for (let payment = 0; payment < PAYMENTS_PER_WRITER; payment++) {
      const id = await pay(writer % 16 === 0 ? CARD.declined : undefined);
      if (writer % 4 === 1) await call(`payments/${id}/refund`, { amountCents: 100 });
      if (writer % 8 === 2) await call(`payments/${id}/void`, {});
    }
  });
  let kills = 0;
  /** A job that runs again and again while there are writers. Two of three runs are killed. */
  const reader = async (number: number): Promise<void> => {
    for (let run = 0; isWriting; run++) {
      const child: ChildProcess = spawn(process.execPath, [JOB], { env: jobEnv(`reader-${number}.ndjson`, 5 + number), stdio: 'ignore' });
      const ended = new Promise<NodeJS.Signals | null>((resolve) => child.once('exit', (_, signal) => resolve(signal)));
      const timer = run % 3 === 2 ? null : setTimeout(() => child.kill('SIGKILL'), 300 + 137 * ((run + number) % 7));
      if ((await ended) === 'SIGKILL') kills += 1;
      if (timer) clearTimeout(timer);
    }
  };
  const readers = Array.from({ length: READERS }, (_, number) => reader(number));
  const killer = (async () => {
    while (isWriting) {
      await new Promise((wake) => setTimeout(wake, 2_000));
      await worker.killTree();
      worker = await start('worker', dataDir, env);
    }
  })();
  await Promise.all(writers);
  isWriting = false;
  await Promise.all([...readers, killer]);
  expect(kills).toBeGreaterThan(3);
  await payfold('settlement', 'close');
  for (let number = 0; number < READERS; number++) {
    const { code, lines } = await reconcile(`reader-${number}.ndjson`);
    expect([code, lines.at(-1)]).toEqual([0, expect.stringMatching(/^7\d\d payments and [1-9]\d* batches compared up to \d+: 0 differences$/)]);
  }
  const whole = await log();
  expect(whole.length).toBeGreaterThan(WRITERS * PAYMENTS_PER_WRITER * 2);
  for (let number = 0; number < READERS; number++) {
    const copy = copyOf(`reader-${number}.ndjson`);
    // The settlement loop of the worker may have appended since.
    expect(copy).toEqual(whole.slice(0, copy.length));
    expect(copy.length).toBeGreaterThan(WRITERS * PAYMENTS_PER_WRITER * 2);
  }
}, 600_000);

describe('the job finds', () => {
  const found = async (file = 'finder.ndjson') => {
    const { code, lines } = await reconcile(file);
    return { code, differences: lines.filter((line) => line.startsWith('DIFFERENCE ')).map((line) => line.slice('DIFFERENCE '.length)) };
  };
  /** What a spec plants, and how it is taken back. */
  const planted = async (set: string, back: string, values: readonly unknown[] = []) => {
    expect((await sql.query(set, [...values])).rowCount).toBe(1);
    const result = await found();
    expect((await sql.query(back, [...values])).rowCount).toBe(1);
    return result;
  };
  test('no difference, before and after each that is planted, and however often it runs', async () => {
    rmSync(join(dataDir.path, 'finder.ndjson'), { force: true });
    for (let run = 0; run < 2; run++) expect(await found()).toEqual({ code: 0, differences: [] });
  });
  test('an amount of a payment in the list', async () => {
    const id = await pay();
    await eventually(async () => (await sql.query(`select from payment_list where payment_id = $1 and status = 'succeeded'`, [id])).rowCount === 1);
    const change = (from: number, to: number) =>
      `update payment_list set state = replace(state, '"amountCents":${from},"serviceFeeCents"', '"amountCents":${to},"serviceFeeCents"') where payment_id = $1`;
    const { rows } = await sql.query<{ state: string }>('select state from payment_list where payment_id = $1', [id]);
    expect(rows[0]!.state).toContain('"amountCents":10000,"serviceFeeCents"');
    const { code, differences } = await planted(change(10_000, 10_001), change(10_001, 10_000), [id]);
    expect([code, differences]).toEqual([
      1,
      [expect.stringMatching(new RegExp(`^payment ${id}, revision 1: captured 10300 .* by the feed, 10301 and 1 in the list$`))],
    ]);
    expect(await found()).toEqual({ code: 0, differences: [] });
  });
  test('a payment that is not in the list', async () => {
    const id = await pay();
    await eventually(async () => (await sql.query(`select from payment_list where payment_id = $1 and status = 'succeeded'`, [id])).rowCount === 1);
    await sql.query('create table kept as select * from payment_list where payment_id = $1', [id]);
    const result = await planted(
      'delete from payment_list where payment_id = $1',
      'insert into payment_list select * from kept where payment_id = $1',
      [id],
    );
    expect(result).toEqual({ code: 1, differences: [`payment ${id}: the feed has it, and the list has not`] });
    await sql.query('drop table kept');
    expect(await found()).toEqual({ code: 0, differences: [] });
  });
  test('an amount of a batch in the report', async () => {
    const { rows } = await sql.query<{ batch_id: string; merchant_account: string; gross_cents: string }>('select * from settlement_batch limit 1');
    const { batch_id: batch, merchant_account: merchant, gross_cents: gross } = rows[0]!;
    const change = (sign: string) => `update settlement_batch set gross_cents = gross_cents ${sign} 1 where batch_id = $1 and merchant_account = $2`;
    expect(await planted(change('+'), change('-'), [batch, merchant])).toEqual({
      code: 1,
      differences: [`batch simulator ${merchant} ${batch}: gross ${gross} by the feed, ${Number(gross) + 1} in the report`],
    });
    expect(await found()).toEqual({ code: 0, differences: [] });
  });
  test('for an agency, its own payments; and says that it does not compare settlement', async () => {
    const { auditKey: key } = await payfold<{ auditKey: string }>(
      'audit',
      'keys',
      'issue',
      '--name',
      'Agency',
      '--role',
      'agency',
      '--portal',
      portalId,
    );
    const { code, lines } = await reconcile('agency.ndjson', { key });
    expect([code, lines[0]]).toEqual([0, 'settlement was not compared: this key has a scope']);
    expect(lines.at(-1)).toMatch(/^7\d\d payments and 0 batches compared up to \d+: 0 differences$/);
  });
  test('nothing without a key, or with a wrong one: it fails with the reason', async () => {
    expect((await reconcile('none.ndjson', { key: '' })).code).toBe(1);
    const { code, lines } = await reconcile('none.ndjson', { key: 'pa_test_0' });
    expect([code, lines.join('\n')]).toEqual([1, expect.stringContaining('401')]);
  });
});
