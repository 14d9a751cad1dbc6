/** The funding of batches whose processor names neither the day nor its fee: staff record both, and the books agree. */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { findDrift } from '#audit';
import { journalModel } from '#ledger';
import { type PaymentGateway, staff } from '#payments';
import { batchOf, type Funding, fundingsIn, linesOf, recordAnnouncedFunding, recordSettlements, type SettlementPorts } from '#settlement';
import { batchesOf, type ListedLine } from '../support/listed-lines.js';
import { paymentOf, type Service, startService, type TestAccount } from '../support/service.js';
import { type SettlementDesk, settlementDesk } from '../support/settlement.js';

const HEAD = 'merchant_account,batch_id,funded_on,fee_cents,reference\n';

let service: Service;
let partner: TestAccount;
let portal: string;
let desk: SettlementDesk;
let ports: SettlementPorts;
let merchantAccount: string;
let folder: string;
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'payfold-fund-'));
  service = await startService();
  partner = await service.account();
  portal = await service.portal(partner);
  desk = settlementDesk(service);
  ports = service.services.settlement;
});
afterAll(async () => {
  desk.close();
  await service.stop();
  await rm(folder, { recursive: true, force: true });
});

const today = () => new Date(service.clock.now()).toISOString().slice(0, 10);
const listed: ListedLine[] = [];
/** Ports whose processor lists all batches that were made here, without days and fees. */
const lister = (): SettlementPorts => {
  const find = (one: Parameters<typeof ports.payments.gateways.find>[0]): PaymentGateway | null => {
    const real = ports.payments.gateways.find(one);
    return (
      real && {
        ...real,
        settlements: async function* () {
          if (one.merchantAccount === merchantAccount) yield* batchesOf(listed);
        },
      }
    );
  };
  return { ...ports, payments: { ...ports.payments, gateways: { find } } };
};
const record = () => recordSettlements(lister(), AbortSignal.timeout(20_000));
/** Pays 100.00 and lets the processor list it in a batch of its own that closes now. */
const batch = async (batchId: string): Promise<void> => {
  const { id } = await partner.client.created(paymentOf(portal, { lines: [10_000] }));
  const transaction = await desk.transaction(id);
  ({ merchantAccount } = transaction);
  const closedAt = new Date(service.clock.now()).toISOString();
  listed.push({ batchId, closedAt, transactionId: transaction.transactionId, type: 'sale', accepted: true, grossCents: 10_000, feeCents: 0, netCents: 10_000 }); // prettier-ignore
  await record();
};
const funding = (batchId: string, over: Partial<Funding> = {}): Funding => ({
  merchantAccount,
  batchId,
  on: today(),
  feeCents: 250,
  reference: 'statement 11',
  ...over,
});
const fund = (...fundings: readonly Funding[]) => recordAnnouncedFunding(ports, fundings, staff('Dana', 'spec'));
const stateOf = (batchId: string) => batchOf(ports.store, { gateway: 'simulator', merchantAccount, batchId });
const caughtUp = () => service.services.readModels.caughtUp(journalModel, 20_000);
/** Debits less credits of the accounts of this merchant account and the bank, in cents. */
const books = async (): Promise<Readonly<Record<string, number>>> => {
  await caughtUp();
  const { rows } = await service.services.pool.query<{ account: string; cents: string }>(
    `select account, debit_cents - credit_cents as cents from journal_balance
     where account in ('assets:bank:operating', 'assets:processor:' || $1 || ':in_transit', 'expense:processing:' || $1)`,
    [merchantAccount],
  );
  return Object.fromEntries(rows.map(({ account, cents }) => [account.replace(`:${merchantAccount}`, ''), Number(cents)]));
};
const alarms = () => service.logLines().filter(({ level, msg }) => level >= 50 && msg.includes('says otherwise of a batch')).length;

test('the day and the fee are booked once; a later listing of the processor changes nothing', async () => {
  await batch('net-1');
  expect(await fund(funding('net-1'))).toBe(1);
  expect(await stateOf('net-1')).toMatchObject({ fundedOn: today(), funded: true, reference: 'statement 11', correctedByFile: false });
  expect(await books()).toMatchObject({ 'assets:processor:in_transit': 0, 'assets:bank:operating': 9_750, 'expense:processing': 250 });
  expect(await fund(funding('net-1'))).toBe(0);

  const events = await desk.eventCount();
  await service.services.pool.query('update gateway_feed set cursor = null');
  await record();
  expect(alarms()).toBe(0);
  expect(await desk.exceptions()).toEqual([]);
  expect(linesOf(await stateOf('net-1'))).toHaveLength(2);
  expect(await desk.eventCount()).toBe(events);
  const { store, pool: db, clock } = service.services;
  expect((await findDrift({ store, db, now: () => clock.now() })).differences).toEqual([]);
});

test('a batch that grows after its funding keeps the fee that staff recorded', async () => {
  await batch('net-2');
  await fund(funding('net-2', { feeCents: 100 }));
  const { id } = await partner.client.created(paymentOf(portal, { lines: [10_000] }));
  const { transactionId } = await desk.transaction(id);
  const first = listed.findIndex(({ batchId }) => batchId === 'net-2');
  listed.splice(first + 1, 0, { ...listed[first]!, transactionId });
  await service.services.pool.query('update gateway_feed set cursor = null');
  await record();
  expect(linesOf(await stateOf('net-2')).map(({ type, netCents }) => [type, netCents])).toEqual([
    ['sale', 10_000],
    ['fee', -100],
    ['sale', 10_000],
  ]);
  expect(alarms()).toBe(0);
});

test('a day that staff recorded wrongly is corrected, if they say so: the money is booked once', async () => {
  await batch('net-6');
  const [wrong, bank] = [new Date(service.clock.now() - 86_400_000).toISOString().slice(0, 10), (await books())['assets:bank:operating']!];
  const correct = (over: Partial<Funding>) => recordAnnouncedFunding(ports, [funding('net-6', over)], staff('Dana', 'spec'), { correct: true });
  await fund(funding('net-6', { on: wrong }));
  expect((await books())['assets:bank:operating']).toBe(bank + 9_750);
  await expect(fund(funding('net-6', { reference: 'statement 12' }))).rejects.toThrow(
    `its day of funding is ${wrong} already; --correct corrects it`,
  );
  await expect(correct({ feeCents: 0 })).rejects.toThrow('its fee is recorded as 250 cents');
  expect(await correct({ reference: 'statement 12' })).toBe(1);
  expect(await stateOf('net-6')).toMatchObject({ fundedOn: today(), funded: true, reference: 'statement 12', correctedByFile: false });
  expect(linesOf(await stateOf('net-6'))).toHaveLength(2);
  expect((await books())['assets:bank:operating']).toBe(bank + 9_750);
  expect(await correct({ reference: 'statement 12' })).toBe(0);
  // The first command again does not bring the wrong day back.
  await expect(fund(funding('net-6', { on: wrong }))).rejects.toThrow('--correct corrects it');
});

describe('is refused, and nothing is recorded', () => {
  beforeAll(() => batch('net-3'));
  const day = (days: number) => new Date(service.clock.now() + days * 86_400_000).toISOString().slice(0, 10);
  test.each<[string, (f: typeof funding) => readonly Funding[], RegExp]>([
    ['an unknown batch', (f) => [f('nothing')], /there is no such batch/],
    ['another account', (f) => [f('net-3', { merchantAccount: 'other' })], /there is no such batch/],
    ['a batch that has a day', (f) => [f('net-1', { reference: 'another' })], /its day of funding is .* already/],
    ['a day too far in the future', (f) => [f('net-3', { on: day(15) })], /the day .* lies more than 14 days in the future/],
    ['a day before the batch closed', (f) => [f('net-3', { on: day(-2) })], /the day .* lies before the close of the batch/],
    ['no day', (f) => [f('net-3', { on: '2026-02-30' })], /must read YYYY-MM-DD/],
    ['more than the batch', (f) => [f('net-3', { feeCents: 10_001 })], /must not be more than the batch, which is 10000 cents/],
    ['a part of a cent', (f) => [f('net-3', { feeCents: 0.5 })], /whole cents/],
    ['less than nothing', (f) => [f('net-3', { feeCents: -1 })], /whole cents/],
    ['a name of a person', (f) => [f('net-3', { reference: 'told by ada@example.org' })], /reference/],
    ['a card number', (f) => [f('net-3', { reference: '4111 1111 1111 1111' })], /reference/],
    ['one batch twice', (f) => [f('net-3'), f('net-3', { feeCents: 1 })], /is named twice/],
    ['a good one before a wrong one', (f) => [f('net-3'), f('nothing')], /there is no such batch/],
  ])('%s', async (_, fundings, why) => {
    const events = await desk.eventCount();
    await expect(fund(...fundings(funding))).rejects.toThrow(why);
    expect(await desk.eventCount()).toBe(events);
  });
});

describe('a file', () => {
  const file = (text: string): string => {
    const path = join(folder, 'fundings.csv');
    writeFileSync(path, text);
    return path;
  };
  test('funds its batches; the same file again records nothing, and goes on where it stopped', async () => {
    await batch('net-4');
    await batch('net-5');
    const row = (batchId: string, fee: string) => `${merchantAccount},${batchId},${today()},${fee},"statement ""11"", page 2"\n`;
    await fund(...(await fundingsIn(file(HEAD + row('net-4', '')))));
    const both = await fundingsIn(file(HEAD + row('net-4', '') + row('net-5', '30')));
    expect(await fund(...both)).toBe(1);
    expect(await fund(...both)).toBe(0);
    expect(await stateOf('net-5')).toMatchObject({ funded: true, reference: 'statement "11", page 2' });
    expect(linesOf(await stateOf('net-4'))).toHaveLength(1);
  });
  test.each([
    ['', /holds no rows/],
    [HEAD, /holds no rows/],
    ['batch_id\n', /begins with merchant_account/],
    [`${HEAD}a,b,2026-11-01,1.5,c\n`, /line 2: fee_cents must be whole cents/],
    [`${HEAD}a,b\n`, /line 2: it has 2 fields instead of 5/],
    [`${HEAD}a,b,2026-11-01,1,c`, /ends in the middle of a line/],
  ])('%j is refused', async (text, why) => {
    await expect(fundingsIn(file(text))).rejects.toThrow(why);
  });
});
