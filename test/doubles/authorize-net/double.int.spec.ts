/** The double as a process: its line at the start, its file, its clock, and its control. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { appendFileSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from '@jest/globals';
import { eventually } from '../../support/eventually.js';
import { FAULTS } from './faults.js';
import { DEFAULT_MERCHANTS } from './server.js';
import { cutOffAfter } from './vendor.js';

const DAY_MS = 86_400_000;
const [{ apiLoginId: name, transactionKey }] = DEFAULT_MERCHANTS as [(typeof DEFAULT_MERCHANTS)[0]];
const CARD = '4111111111111111';

/** Twelve hours from now, so that no test meets a cut-off by chance. */
const cutOff = { time: new Date(Date.now() + DAY_MS / 2).toISOString().slice(11, 16), timeZone: 'UTC' };

let folder: string;
let file: string;
let child: ChildProcess;
let url: string;

const start = async (): Promise<void> => {
  child = spawn(process.execPath, ['dist/test/doubles/authorize-net/main.js', '--file', file], { stdio: ['ignore', 'pipe', 'inherit'] });
  const line = JSON.parse(await new Promise<string>((resolve) => child.stdout!.once('data', (text) => resolve(String(text)))));
  expect(line).toEqual({ ready: 'double:authorize-net', url: expect.stringMatching(/^http:\/\/127\.0\.0\.1:\d+$/), pid: child.pid });
  ({ url } = line);
};
const kill = async (): Promise<void> => {
  const gone = once(child, 'exit');
  child.kill('SIGKILL');
  await gone;
};
beforeEach(async () => {
  folder = mkdtempSync(join(tmpdir(), 'payfold-double-'));
  file = join(folder, 'double.jsonl');
  await start();
  await control('/merchants', { apiLoginId: name, cutOff });
});
afterEach(async () => {
  await kill();
  rmSync(folder, { recursive: true, force: true });
});

/** JSON of any shape. */
type Loose = ReturnType<typeof JSON.parse>;
const control = async (path: string, body?: object, method = body ? 'POST' : 'GET'): Promise<Loose> => {
  const answer = await fetch(`${url}/_double${path}`, { method, ...(body && { body: JSON.stringify(body) }) });
  return answer.json();
};
const call = async (request: string, fields: object): Promise<Loose> => {
  const body = JSON.stringify({ [request]: { merchantAuthentication: { name, transactionKey }, refId: 'R', ...fields } });
  const answer = await fetch(`${url}/xml/v1/request.api`, { method: 'POST', body });
  const text = Buffer.from(await answer.arrayBuffer()).toString('utf8');
  expect(text.startsWith('\ufeff')).toBe(true);
  return JSON.parse(text.slice(1));
};
const charge = (invoiceNumber: string, settingValue = '28800') =>
  call('createTransactionRequest', {
    transactionRequest: {
      transactionType: 'authCaptureTransaction',
      amount: '10.00',
      payment: { creditCard: { cardNumber: CARD, expirationDate: '2041-01', cardCode: '900' } },
      order: { invoiceNumber },
      transactionSettings: { setting: [{ settingName: 'duplicateWindow', settingValue }] },
    },
  });
const unsettled = async () => (await call('getUnsettledTransactionListRequest', {})).transactions?.length ?? 0;

test('goes on after kill -9 with the same file: transactions, the window for duplicates, faults, the clock and batches', async () => {
  const first = (await charge('A')).transactionResponse;
  await control('/batch', {});
  await charge('B');
  await control('/faults', { name: 'batch_twice' });
  await control('/clock', { ms: 3_600_000 });
  const before = await control('/transactions');
  await kill();
  // The last line was never answered.
  appendFileSync(file, '{"k":"clock","ahe');
  await start();
  expect(await control('/transactions')).toEqual(before);
  expect((await charge('A')).transactionResponse).toMatchObject({ errors: [{ errorCode: '11' }], transId: first.transId });
  expect(await control('')).toMatchObject({ aheadMs: 3_600_000, faults: [{ name: 'batch_twice' }] });
  expect((await control('/batches')).batches).toMatchObject([{ state: 'settledSuccessfully', count: 1 }]);
  expect(await unsettled()).toBe(1);
  expect(readFileSync(file, 'utf8')).not.toContain(CARD);
});

test('the window for duplicates ends after its time, by the clock of the double', async () => {
  await charge('A');
  await control('/clock', { ms: 28_000_000 });
  expect((await charge('A')).transactionResponse.responseCode).toBe('3');
  await control('/clock', { ms: 1_000_000 });
  expect((await charge('A')).transactionResponse.responseCode).toBe('1');
  expect((await charge('C', '')).transactionResponse.responseCode).toBe('1');
  expect((await charge('C', '')).transactionResponse).toMatchObject({ responseCode: '3', transId: '0' });
  await control('/clock', { ms: 121_000 });
  expect((await charge('C', '')).transactionResponse.responseCode).toBe('1');
});

test('a moved clock passes cut-offs: a batch closes, and is settled 30 minutes later', async () => {
  await charge('A');
  const closes = cutOffAfter(cutOff, Date.now());
  await control('/clock', { ms: closes - Date.now() + 1_000 });
  expect((await control('/batches')).batches).toMatchObject([{ closedMs: closes, state: 'pendingSettlement' }]);
  expect(await unsettled()).toBe(0);
  await control('/clock', { ms: 1_800_000 });
  expect(await unsettled()).toBe(0);
  expect((await control('/batches')).batches).toMatchObject([{ state: 'settledSuccessfully' }]);
  expect((await call('getSettledBatchListRequest', {})).batchList).toHaveLength(1);
  await control('/clock', { ms: 40 * DAY_MS });
  expect((await call('getSettledBatchListRequest', {})).messages.message[0].code).toBe('I00004');
  const longer = {
    firstSettlementDate: new Date(Date.now() - DAY_MS).toISOString(),
    lastSettlementDate: new Date(Date.now() + 40 * DAY_MS).toISOString(),
  };
  expect((await call('getSettledBatchListRequest', longer)).messages.resultCode).toBe('Error');
});

test('an element out of order or unknown is refused', async () => {
  const wrong = { transactionRequest: { amount: '1.00', transactionType: 'authCaptureTransaction' } };
  expect((await call('createTransactionRequest', wrong)).messages.message[0].code).toBe('E00003');
  expect((await call('getTransactionDetailsRequest', { transId: '1', more: 1 })).messages.message[0].code).toBe('E00003');
  expect((await call('getTransactionDetailsRequest', { transId: '1' })).messages.message[0].code).toBe('E00040');
});

test('each fault can be set by its name and ended again; an unknown one is refused', async () => {
  for (const fault of Object.keys(FAULTS)) expect(await control('/faults', { name: fault, op: 'held' })).toMatchObject({ name: fault });
  expect((await control('')).faults).toHaveLength(Object.keys(FAULTS).length);
  await control('/faults', undefined, 'DELETE');
  expect((await control('')).faults).toEqual([]);
  expect(await control('/faults', { name: 'nothing' })).toEqual({ error: expect.stringContaining('no fault') });
});

test('a fault stands for its number of times, its operation and its reference', async () => {
  await control('/faults', { name: 'reason', op: 'charge', ref: 'A', times: 2, code: 3, reason: 57 });
  const reasons = [];
  for (const ref of ['B', 'A', 'A', 'A']) reasons.push((await charge(ref)).transactionResponse.responseCode);
  expect(reasons).toEqual(['1', '3', '3', '1']);
});

test('a fault of duplicates stands for duplicates only, of its reference and its number of times', async () => {
  await control('/faults', { name: 'no_duplicates', ref: 'A', times: 1 });
  const codes = [];
  for (const ref of ['A', 'B', 'B', 'A', 'A']) codes.push((await charge(ref)).transactionResponse.responseCode);
  expect(codes).toEqual(['1', '1', '3', '1', '3']);
});

test('a late charge is executed after its time, without an answer', async () => {
  await control('/faults', { name: 'late', op: 'charge', ms: 300 });
  const stop = AbortSignal.timeout(100);
  const body = { transactionRequest: { transactionType: 'authCaptureTransaction', amount: '1.00', payment: { creditCard: { cardNumber: CARD, expirationDate: '2041-01' } } } }; // prettier-ignore
  const request = JSON.stringify({ createTransactionRequest: { merchantAuthentication: { name, transactionKey }, ...body } });
  await expect(fetch(`${url}/xml/v1/request.api`, { method: 'POST', body: request, signal: stop })).rejects.toThrow();
  expect(await unsettled()).toBe(0);
  await eventually(async () => (await unsettled()) === 1);
});

test('the key of a merchant can be changed: the old one is refused', async () => {
  await control('/merchants', { apiLoginId: name, transactionKey: 'another-key-0001' });
  expect((await call('getMerchantDetailsRequest', {})).messages.message[0].code).toBe('E00007');
});
