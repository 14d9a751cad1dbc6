/**
 * `payfold merchant-accounts check` over a batch, as a person rehearses it: the doubles of both processors are processes of their own that follow the
 * time of the database (`--database`), and `payfold sandbox advance` moves it. After the batch nothing is left for later.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { eventually } from '../support/eventually.js';
import { payfoldOn, type Running, startIn } from '../support/merchants.js';

const HOUR_MS = 3_600_000;
const NAMES = Array.from({ length: 13 }, (_, index) => `g${index + 1}`);
const ROOT = join(import.meta.dirname, '../..');
const DOUBLES = {
  'authorize-net': { path: '/xml/v1/request.api', credentials: '{"apiLoginId":"login-one","transactionKey":"key-of-one-0001"}' },
  stripe: { path: '', credentials: '{"secretKey":"sk_test_double_one_0001"}' },
} as const;
type Name = keyof typeof DOUBLES;
const BOTH = Object.keys(DOUBLES) as Name[];

interface Checked {
  readonly runId: string;
  readonly guarantees: readonly { readonly guarantee: string; readonly result: string }[];
}

const stops: (() => unknown)[] = [];
let folder: string;
let running: Running;
const urls = new Map<Name, string>();

const startDouble = async (name: Name): Promise<void> => {
  const main = join(ROOT, `dist/test/doubles/${name}/main.js`);
  const args = [main, '--file', join(folder, `${name}.jsonl`), '--database', running.databaseUrl];
  const child: ChildProcess = spawn(process.execPath, args, { stdio: ['ignore', 'pipe', 'inherit'] });
  stops.push(async () => {
    const gone = once(child, 'exit');
    child.kill('SIGKILL');
    await gone;
  });
  const [line] = (await once(child.stdout!, 'data')) as [Buffer];
  urls.set(name, (JSON.parse(line.toString()) as { url: string }).url);
};
const controlOf = async <T>(name: Name, path = '', body?: object): Promise<T> => {
  const answer = await fetch(`${urls.get(name)}/_double${path}`, { method: body ? 'POST' : 'GET', ...(body && { body: JSON.stringify(body) }) });
  return (await answer.json()) as T;
};
const aheadMs = async (name: Name): Promise<number> => (await controlOf<{ aheadMs: number }>(name)).aheadMs;

const payfold = (args: readonly string[], input = '') => payfoldOn(running, [...args, '--yes'], input);
const check = async (...args: string[]) => {
  const { code, stdout } = await payfold(['merchant-accounts', 'check', ...args]);
  const { runId, guarantees } = JSON.parse(stdout) as Checked;
  return { code, runId, results: Object.fromEntries(guarantees.map(({ guarantee, result }) => [guarantee, result])) };
};
const all = (others: Readonly<Record<string, string>>) => Object.fromEntries(NAMES.map((name) => [name, others[name] ?? 'holds']));
const advanceTo = async (toMs: number): Promise<void> => {
  const ran = await payfold(['sandbox', 'advance', '--to', new Date(toMs).toISOString()]);
  expect([ran.code, ran.stderr]).toEqual([0, '']);
};

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'payfold-check-'));
  running = await startIn({ folder, stops }, 'sandbox');
  await Promise.all(BOTH.map(startDouble));
  for (const name of BOTH) {
    const place = ['--gateway', name, '--environment', 'sandbox', '--endpoint', `${urls.get(name)}${DOUBLES[name].path}`];
    const cutOff = name === 'authorize-net' ? ['--cut-off', '16:00', '--time-zone', 'America/Los_Angeles'] : [];
    const added = await payfold(['merchant-accounts', 'add', name, ...place, ...cutOff, '--credentials-file', '-'], DOUBLES[name].credentials);
    expect([added.code, added.stderr]).toEqual([0, '']);
  }
});
afterAll(async () => {
  for (const stop of stops.reverse()) await stop();
  await rm(folder, { recursive: true, force: true });
});

describe('a check over a batch', () => {
  const began = Date.now();
  const runs = new Map<Name, string>();

  test('before the batch, the check names what it cannot tell yet', async () => {
    const net = await check('authorize-net');
    expect([net.code, net.results]).toEqual([0, all({ g7: 'later', g8: 'later', g10: 'later', g11: 'later', g13: 'later' })]);
    const stripe = await check('stripe');
    expect([stripe.code, stripe.results]).toEqual([0, all({ g9: 'not_applicable', g10: 'not_applicable', g13: 'later' })]);
    runs.set('authorize-net', net.runId).set('stripe', stripe.runId);
  }, 180_000);

  test('both doubles follow the time of the database', async () => {
    for (const name of BOTH) expect(await aheadMs(name)).toBe(0);
    await advanceTo(began + 54 * HOUR_MS);
    const { rows } = await running.services.pool.query<{ ahead_ms: string }>('select ahead_ms from public.sandbox_time');
    const ahead = Number(rows[0]!.ahead_ms);
    expect(ahead).toBeGreaterThan(53 * HOUR_MS);
    for (const name of BOTH) await eventually(async () => (await aheadMs(name)) === ahead);
  });

  test('after the batch, nothing is left for later', async () => {
    const { batches } = await controlOf<{ batches: readonly { state: string }[] }>('authorize-net', '/batches');
    expect(batches).toEqual([expect.objectContaining({ state: 'settledSuccessfully' })]);
    await controlOf('stripe', '/payouts', {});
    const net = await check('authorize-net', '--resume', runs.get('authorize-net')!);
    expect([net.code, net.results]).toEqual([0, all({})]);
    const stripe = await check('stripe', '--resume', runs.get('stripe')!);
    expect([stripe.code, stripe.results]).toEqual([0, all({ g9: 'not_applicable', g10: 'not_applicable' })]);
    // The time of the sandbox was moved, and the clocks of the hosts still agree.
    for (const name of BOTH) expect(await check(name, '--quick')).toMatchObject({ code: 0, results: { g1: 'holds' } });
  }, 180_000);
});
