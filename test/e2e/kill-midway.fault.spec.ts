/**
 * `kill -9` in the middle of a closing and of a purge, against real processes over one database. The next run goes on, and nothing is counted twice.
 */
import { mkdir } from 'node:fs/promises';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import pg from 'pg';
import { searchPathOf } from '#eventstore';
import { READ_MODELS } from '../../apps/services.js';
import { eventually } from '../support/eventually.js';
import { freshDatabase } from '../support/postgres.js';
import { DataDir, type Environment, kill, launch, newKey, type RunningProcess, start, startApiAndWorker } from '../support/processes.js';
import { PAYMENTS, paymentOf } from '../support/service.js';

const LAUNCHER = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname;
const DAY_MS = 86_400_000;
const PAID_EACH_DAY = 3;
/** Enough pieces that a kill can hit a purge in the middle. */
const EXPIRED = 200_000;
const KEPT = 10;

let dataDir: DataDir;
let database: Awaited<ReturnType<typeof freshDatabase>>;
let env: Environment;
let db: pg.Client;
let api: RunningProcess;
let worker: RunningProcess;
let apiKey: string;
let portalId: string;

const run = (args: readonly string[], more: Environment = {}) =>
  launch([LAUNCHER, ...args, '--json', '--yes'], dataDir, { ...env, LOG_LEVEL: 'silent', ...more }).exited;
const payfold = async <T>(...args: string[]): Promise<T> => {
  const { code, stdout, stderr } = await run(args);
  expect([code, stderr]).toEqual([0, '']);
  return JSON.parse(stdout) as T;
};

beforeAll(async () => {
  dataDir = await DataDir.create();
  await mkdir(dataDir.data);
  database = await freshDatabase();
  const simulator = await start('simulator', dataDir);
  env = { DATABASE_URL: database.url, SIMULATOR_URL: simulator.url };
  [api, worker] = await startApiAndWorker(dataDir, env);
  const { accountId } = await payfold<{ accountId: string }>('accounts', 'create', '--name', 'City');
  ({ apiKey } = await payfold<{ apiKey: string }>('keys', 'issue', '--account', accountId));
  ({ portalId } = await payfold<{ portalId: string }>('portals', 'create', '--account', accountId, '--name', 'Water'));
  db = new pg.Client({ connectionString: database.url, options: `-c search_path=${searchPathOf(READ_MODELS).join(',')}` });
  await db.connect();
}, 120_000);
afterAll(async () => {
  await db?.end();
  await dataDir?.remove();
  await database?.drop();
});

describe('a closing', () => {
  const aheadMs = async () => Number((await db.query<{ ahead_ms: string }>('select ahead_ms from sandbox_time')).rows[0]?.ahead_ms ?? 0);
  /** Makes payments, and lets their day pass. Returns the end of that day. */
  const aDay = async (): Promise<string> => {
    for (let paid = 0; paid < PAID_EACH_DAY; paid++) {
      const headers = { authorization: `ApiKey ${apiKey}`, 'content-type': 'application/json', 'idempotency-key': newKey() };
      const answer = await fetch(api.url + PAYMENTS, { method: 'POST', headers, body: JSON.stringify(paymentOf(portalId)) });
      expect(answer.status).toBe(200);
    }
    const to = new Date(Date.now() + (await aheadMs()) + DAY_MS);
    await payfold('sandbox', 'advance', '--to', to.toISOString());
    return `${to.toISOString().slice(0, 10)}T00:00:00.000Z`;
  };
  /** The events of the periods, by type, with the end that they name. */
  const periods = async (): Promise<string[]> => {
    const { rows } = await db.query<{ type: string; to: string }>(
      `select type, data::jsonb ->> 'to' as to from es.events where stream_id = 'adjustment-periods' order by revision`,
    );
    return rows.map(({ type, to }) => `${type} ${to}`);
  };
  test.each([
    ['append.PeriodClosed:before', []],
    ['append.PeriodClosed:after', ['PeriodClosed']],
    ['append.TrialBalanceRecorded:before', ['PeriodClosed']],
    ['append.TrialBalanceRecorded:after', ['PeriodClosed', 'TrialBalanceRecorded']],
  ])('that is killed at %s is completed by the next one, once', async (failpoint, left) => {
    const end = await aDay();
    const before = await periods();
    const command = ['audit', 'close-period', '--to', end, '--by', 'Dana'];
    expect(await run(command, { FAILPOINT: failpoint })).toMatchObject({ signal: 'SIGKILL' });
    const named = (types: readonly string[]) => [...before, ...types.map((type) => `${type} ${end}`)];
    expect(await periods()).toEqual(named(left));
    type Closed = { readonly ok: boolean; readonly checks: readonly { readonly name: string; readonly detail: string }[] };
    const detailOf = ({ checks }: Closed) => checks.find(({ name }) => name === 'period')!.detail;
    const closed = await payfold<Closed>(...command);
    expect(closed.ok).toBe(true);
    expect(await periods()).toEqual(named(['PeriodClosed', 'TrialBalanceRecorded']));
    // Closing again changes nothing and gives the same digest.
    expect(detailOf(await payfold<Closed>(...command))).toBe(detailOf(closed));
    expect(await periods()).toEqual(named(['PeriodClosed', 'TrialBalanceRecorded']));
    const begin = before.at(-1)?.split(' ')[1] ?? '-infinity';
    const { rows } = await db.query<{ entries: string }>('select count(*) as entries from journal_entry where booked_at >= $1 and booked_at < $2', [
      begin,
      end,
    ]);
    expect(Number(rows[0]!.entries)).toBeGreaterThanOrEqual(PAID_EACH_DAY);
    expect(detailOf(closed)).toMatch(`closed to ${end}: ${rows[0]!.entries} entries, digest `);
  });
  test('leaves every period as it was closed: audit verify finds nothing', async () => {
    const { ok, checks } = await payfold<{ ok: boolean; checks: { name: string; detail: string }[] }>('audit', 'verify');
    expect(ok).toBe(true);
    expect(checks.find(({ name }) => name === 'periods')!.detail).toBe('4 closed periods are what they were');
  });
});

test('a purge that is killed: the next worker deletes the rest, and nothing that is still needed', async () => {
  await worker.stop();
  const insert = (count: number, expires: string) =>
    db.query(
      `insert into velocity_entry (portal_id, scope, subject, kid, kind, entry_id, at, expires_at)
       select $1, 'card', decode(md5(n::text), 'hex'), 'k1', 'attempt', gen_random_uuid(), now(), now() + $3::interval from generate_series(1, $2::int) n`,
      [portalId, count, expires],
    );
  const count = async () => Number((await db.query<{ count: string }>('select count(*) as count from velocity_entry')).rows[0]!.count);
  for (let tries = 0; ; tries++) {
    expect(tries).toBeLessThan(10);
    await db.query('delete from velocity_entry');
    await insert(EXPIRED, '-1 hour');
    await insert(KEPT, '1 hour');
    const doomed = await start('worker', dataDir, env);
    await eventually(async () => (await count()) < EXPIRED + KEPT, { everyMs: 1 });
    kill(doomed.pid);
    await doomed.exited;
    const left = await count();
    if (left > KEPT) break;
  }
  const next = await start('worker', dataDir, env);
  await eventually(async () => (await count()) === KEPT);
  await next.stop();
  expect(await count()).toBe(KEPT);
}, 180_000);
