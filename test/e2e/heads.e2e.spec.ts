/**
 * Two workers on hosts of their own: each with its own `DATA_DIR`, both with one `HEADS_DIR`. All signed heads lie there, and one worker
 * does not verify again the events that the other has verified.
 */
import { existsSync, mkdirSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { headFiles } from '#audit';
import { createPool, type Pool } from '#platform';
import { eventually } from '../support/eventually.js';
import { freshDatabase } from '../support/postgres.js';
import { DataDir, type Environment, launch, type RunningProcess, start } from '../support/processes.js';

const LAUNCHER = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname;

let dataDir: DataDir;
let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
let env: Environment;
let heads: string;

const on = (host: string): Environment => ({ ...env, DATA_DIR: join(dataDir.path, host) });
const startWorker = (host: string): Promise<RunningProcess> => start('worker', dataDir, on(host));
/** Runs a command on a host. */
const payfold = async (host: string, ...args: string[]) => {
  const { code, stdout, stderr } = await launch([LAUNCHER, ...args, '--json', '--yes'], dataDir, { ...on(host), LOG_LEVEL: 'silent' }).exited;
  return { code, stderr, value: JSON.parse(stdout || 'null') as { size?: number; message?: string } };
};
/** Signs the log by a command on a host. Returns the size of the signed log. */
const signed = async (host: string): Promise<number> => {
  expect((await payfold(host, 'accounts', 'create', '--name', `City of ${host}`)).code).toBe(0);
  const [from, to] = ['2026-01-01', new Date().toISOString()];
  const { code, value } = await payfold(host, 'audit', 'pack', '--from', from, '--to', to, '--out', join(dataDir.path, `pack-${host}-${Date.now()}`));
  expect(code).toBe(0);
  return value.size!;
};
/** Lets a worker verify what is due. Returns the words of its check of the events. */
const verified = async (): Promise<string> => {
  await pool.query(`update verify_pass set due_at = now(), finished_at = null where pass = 'incremental'`);
  const { checks, failed } = await eventually(
    async () => {
      const { rows } = await pool.query<{ checks: { name: string; detail: string }[]; failed: number }>(
        `select checks, failed_checks as failed from verify_pass where pass = 'incremental' and finished_at is not null`,
      );
      return rows[0];
    },
    { timeoutMs: 90_000 },
  );
  expect([failed, checks]).toEqual([0, checks]);
  return checks.find(({ name }) => name === 'events')!.detail;
};

beforeAll(async () => {
  dataDir = await DataDir.create();
  mkdirSync(dataDir.data);
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'spec', max: 2 });
  heads = join(dataDir.path, 'evidence');
  const masterKeyFile = join(dataDir.path, 'master.key');
  expect((await launch([LAUNCHER, 'keyfile', 'create', masterKeyFile], dataDir).exited).code).toBe(0);
  const simulator = await start('simulator', dataDir);
  env = { DATABASE_URL: database.url, SIMULATOR_URL: simulator.url, MASTER_KEY_FILE: masterKeyFile, HEADS_DIR: heads };
  for (const host of ['one', 'two', 'three']) mkdirSync(join(dataDir.path, host), { mode: 0o711 });
}, 120_000);
afterAll(async () => {
  await pool?.end();
  await dataDir?.remove();
  await database?.drop();
});

test('heads of every host lie in one place; the state of the verification is there too, and is never read as a head', async () => {
  const one = await startWorker('one');
  const first = await signed('three');
  expect(await verified()).toMatch(/^\d+ events/);
  const state = join(heads, 'verification.txt');
  expect(readFileSync(state, 'utf8').split('\n')[2]).toBe(String(first));
  expect(await one.stop()).toMatchObject({ code: 0 });

  // Another host goes on where the first one ended.
  const second = await signed('two');
  const two = await startWorker('two');
  expect(await verified()).toContain(`after the first ${first} `);
  expect(readFileSync(state, 'utf8').split('\n')[2]).toBe(String(second));
  await two.stop();

  const sizes = headFiles(heads).map((file) => Number(readFileSync(file, 'utf8').split('\n')[1]));
  expect(sizes).toEqual([...new Set(sizes)].sort((a, b) => a - b));
  expect(sizes).toEqual(expect.arrayContaining([first, second]));
  for (const host of ['one', 'two', 'three']) expect(existsSync(join(dataDir.path, host, 'heads'))).toBe(false);
  expect(readdirSync(heads).filter((name) => !/^\d{4}-\d{2}-\d{2}$/.test(name))).toEqual(['keys.txt', 'verification.txt']);

  const refused = await payfold('one', 'audit', 'verify', '--from-head', state);
  expect([refused.code, refused.stderr]).toEqual([1, expect.stringContaining('it is no signed head')]);
  expect((await payfold('one', 'audit', 'verify', '--from-head', headFiles(heads)[0]!)).code).toBe(0);
}, 300_000);
