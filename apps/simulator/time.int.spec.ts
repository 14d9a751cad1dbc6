/** The calls of the gateway carry the time of a sandbox to the processor, which closes the batches that should have closed in between. */
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from '@jest/globals';
import { createSimulatorGateway, type SimulatorGateway } from '#gateways';
import { systemClock } from '#kernel';
import { type GatewayAccount, Secret } from '#payments';
import { MovableClock } from '../../test/support/clock.js';
import { eventually } from '../../test/support/eventually.js';
import { createSimulatorControl } from './control.js';
import { type Simulator, startSimulator } from './server.js';

const HOUR_MS = 3_600_000;
const DAY_MS = 24 * HOUR_MS;
const ACCOUNT: GatewayAccount = { gateway: 'simulator', merchantAccount: 'city', credentialsRef: 'none', environment: 'sandbox' };

let directory: string;
let clock: MovableClock;
let simulator: Simulator;
let aheadMs: number;
let gateway: SimulatorGateway;
const begin = async () => {
  simulator = await startSimulator({ directory, clock, closeBatchesAt: '05:00' });
  gateway = createSimulatorGateway({ endpoint: simulator.url, account: ACCOUNT, clock: systemClock, aheadMs: () => aheadMs });
};
const end = async () => {
  gateway.close();
  await simulator.close();
};
beforeEach(async () => {
  directory = await mkdtemp(join(tmpdir(), 'payfold-time-'));
  clock = new MovableClock('2026-03-10T12:00:00.000Z');
  aheadMs = 0;
  await begin();
});
afterEach(async () => {
  await end();
  await rm(directory, { recursive: true, force: true });
});

let drawn = 0;
const charge = async () => {
  const instrument = { type: 'card', number: new Secret('4242424242424242'), expiry: { month: 12, year: 2040 }, cvv: new Secret('987') } as const;
  const begunAt = new Date().toISOString();
  const call = { ref: `ref${++drawn}`, leg: 'principal', account: ACCOUNT, begunAt, amountCents: 1_000, instrument } as const;
  expect(await gateway.charge(call, AbortSignal.timeout(10_000))).toMatchObject({ kind: 'approved' });
};
const times = async () => (await createSimulatorControl(simulator.url, simulator.controlKey).truth()).map(({ at }) => at.slice(0, 13));
const batches = async () => {
  const found = [];
  for await (const { closedAt, fundedOn } of gateway.settlements(null, AbortSignal.timeout(10_000))) found.push({ closedAt, fundedOn });
  return found;
};

test('a call that is ahead is executed at its time; the open batch closes as of the closing time in between, later ones by themselves', async () => {
  await charge();
  aheadMs = 20 * DAY_MS;
  await charge();
  expect(await times()).toEqual(['2026-03-10T12', '2026-03-30T12']);
  expect(await batches()).toEqual([{ closedAt: '2026-03-11T05:00:00.000Z', fundedOn: '2026-03-12' }]);
  // A caller that is behind does not take the time back.
  aheadMs = 0;
  await charge();
  expect((await times()).at(-1)).toBe('2026-03-30T12');
  clock.advance(17 * HOUR_MS + 60_000);
  const closed = await eventually(async () => (await batches())[1]);
  expect([closed.closedAt.slice(0, 14), closed.fundedOn]).toEqual(['2026-03-31T05:', '2026-04-01']);
});

test('a move that passes no closing leaves the batch open', async () => {
  await charge();
  aheadMs = 16 * HOUR_MS;
  await charge();
  expect(await batches()).toEqual([]);
  aheadMs = 18 * HOUR_MS;
  expect((await batches()).map(({ closedAt }) => closedAt)).toEqual(['2026-03-11T05:00:00.000Z']);
});

test.each([
  ['as it was written', null, '2026-03-30T12'],
  ['damaged: the next call tells it', 'no number', '2026-03-10T12'],
])('a restart finds the time %s', async (_case, text, hour) => {
  aheadMs = 20 * DAY_MS;
  await charge();
  await end();
  if (text !== null) await writeFile(join(directory, 'ahead'), text, { mode: 0o600 });
  aheadMs = 0;
  await begin();
  await charge();
  expect((await times()).at(-1)).toBe(hour);
});

test('a time that is no number is refused, and nothing is executed', async () => {
  const answer = await fetch(`${simulator.url}/v1/batches`, {
    headers: { authorization: 'Sandbox city:sk_sandbox_city', 'sandbox-ahead-ms': 'soon' },
  });
  expect([answer.status, await answer.json()]).toEqual([
    400,
    { error: { code: 'invalid_request', message: expect.stringContaining('sandbox-ahead-ms') } },
  ]);
});
