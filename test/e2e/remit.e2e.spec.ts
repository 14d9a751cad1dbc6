/**
 * Paying the agency, on a real service: what is owed, settled and funded; two payments at once; a closed period; and the proofs that hold afterwards.
 */
import { execFile } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { findDrift, writePack } from '#audit';
import type { ServiceError } from '#kernel';
import { balances, closePeriod, JOURNAL_START, journalHeading, journalModel, journalPages, journalText, remit, type RemitPorts, reverseRemittance, standingOf } from '#ledger'; // prettier-ignore
import { resolvePayment, staff } from '#payments';
import { changeException, paymentRegisterModel, recordSettlements } from '#settlement';
import type { EventStore, Position } from '#eventstore';
import { addHledger, dispute, settle } from '../support/books.js';
import { CARD, everySubscriber, paymentOf, type Service, startService, type TestAccount } from '../support/service.js';
import { settlementDesk } from '../support/settlement.js';

const DAY_MS = 86_400_000;

let service: Service;
let partner: TestAccount;
let portal: string;
let combined: string;
let ports: RemitPorts;
beforeAll(async () => {
  service = await startService();
  partner = await service.account();
  portal = await service.portal(partner, { fee: { flatCents: 300 } });
  combined = await service.portal(partner, { fee: { flatCents: 100, chargeMode: 'combined' } });
  const { store, pool: db, clock, ids, readModels } = service.services;
  const reached = (model: typeof journalModel) => (position: Position) => readModels.of(model).runUntil(position, { timeoutMs: 20_000 });
  ports = { store, db, clock, ids, journalReached: reached(journalModel), registerReached: reached(paymentRegisterModel) };
}, 120_000);
afterAll(() => service.stop());

const pay = async (of: string, cents: number) => (await partner.client.created(paymentOf(of, { lines: [cents] }))).id;
const fund = async () => {
  service.clock.advance(5 * DAY_MS);
  await recordSettlements(service.services.settlement, AbortSignal.timeout(20_000));
};
const standing = (of = portal) => standingOf(ports, of);
let references = 0;
const paying = (cents: number, over: Partial<Parameters<typeof remit>[1]> = {}, by: RemitPorts = ports) =>
  remit(by, {
    remittanceId: service.services.ids.uuid(),
    portalId: portal,
    cents,
    reference: `WIRE-${++references}`,
    on: null,
    advance: false,
    by: 'Dana Scott',
    ...over,
  });
const refusal = (work: Promise<unknown>): Promise<string> => work.then(() => 'done', (error: unknown) => (error as ServiceError).message); // prettier-ignore
const bank = async () =>
  (await balances(service.services.pool, { asOf: null, effectiveTo: null })).find(({ account }) => account === 'assets:bank:operating')?.balanceCents;

test('a charge counts as settled with its batch, and as funded with the funding of its batch; refunds and disputes count at once', async () => {
  const [first, second] = [await pay(portal, 10_000), await pay(combined, 7_000)];
  expect(await standing()).toEqual({ payableCents: 10_000, settledCents: 0, fundedCents: 0 });
  await settle(service);
  expect(await standing()).toEqual({ payableCents: 10_000, settledCents: 10_000, fundedCents: 0 });
  // The batch of the combined portal holds principal and fee in one charge. Only the principal is owed.
  expect(await standing(combined)).toEqual({ payableCents: 7_000, settledCents: 7_000, fundedCents: 0 });
  await fund();
  expect(await standing()).toEqual({ payableCents: 10_000, settledCents: 10_000, fundedCents: 10_000 });
  const voided = await pay(portal, 900);
  await pay(portal, 2_000);
  await partner.client.refund(voided, { amountCents: 400 });
  expect(await standing()).toEqual({ payableCents: 12_500, settledCents: 10_000, fundedCents: 10_000 });
  await partner.client.refund(first, { amountCents: 1_500 });
  expect(await standing()).toEqual({ payableCents: 11_000, settledCents: 8_500, fundedCents: 8_500 });
  await dispute(service, second, 7_100, 'debited');
  expect(await standing(combined)).toEqual({ payableCents: 7_000, settledCents: 7_000, fundedCents: 0 });
});

test('an adopted line of a batch without funding is owed, but not funded', async () => {
  const desk = settlementDesk(service);
  try {
    const before = await standing();
    const { merchantAccount } = await desk.transaction(await pay(portal, 100));
    await desk.importFile(desk.csv(desk.line('bat_adopted', 'tx_unknown', { gross: 700, fee: 0 })), merchantAccount);
    const { exceptionId } = (await desk.exceptions()).find(({ transactionId }) => transactionId === 'tx_unknown')!;
    const adopt = { type: 'Resolve', resolution: 'adopt', reason: 'paid at the counter', by: 'Dana', portalId: portal, feeCents: 50 } as const;
    await changeException(service.services.settlement, exceptionId, adopt, staff('Dana', service.services.ids.uuid()));
    const { payableCents, settledCents, fundedCents } = before;
    expect(await standing()).toEqual({ payableCents: payableCents + 750, settledCents: settledCents + 650, fundedCents });
  } finally {
    desk.close();
  }
});

test('more than the funded part is refused with the figures; the funded part is paid from the bank, and then nothing is left', async () => {
  const before = await bank();
  expect(await refusal(paying(8_501))).toBe(
    '8501 cents are more than the funded part: 11750 payable, of it 9150 settled, of it 8500 funded. Only an advance (--advance) may pay more.',
  );
  expect(await paying(500)).toMatchObject({ cents: 500, payableCents: 11_750, settledCents: 9_150, fundedCents: 8_500 });
  expect(await standing()).toEqual({ payableCents: 11_250, settledCents: 8_650, fundedCents: 8_000 });
  expect(await bank()).toBe(before! - 500);
});

test('several payments at once never exceed the funded part together', async () => {
  const { fundedCents } = await standing();
  const each = Math.floor(fundedCents / 2) + 1;
  const outcomes = await Promise.all([paying(each), paying(each)].map(refusal));
  expect(outcomes.filter((one) => one === 'done')).toHaveLength(1);
  expect(outcomes.find((one) => one !== 'done')).toContain('are more than the funded part');
  expect((await standing()).fundedCents).toBe(fundedCents - each);
});

test.each(['read', 'append'] as const)('another payment that comes right before the %s of the stream counts in the balance', async (call) => {
  const { fundedCents } = await standing();
  const each = Math.floor(fundedCents / 2) + 1;
  const { store } = ports;
  let others = 0;
  const other = async (stream: string) => {
    if (stream === `remittance-${portal}` && others++ === 0) await paying(each);
  };
  const between: EventStore = new Proxy(store, {
    get: (target, name) => {
      if (name !== call) return Reflect.get(target, name, target) as unknown;
      if (call === 'append')
        return async (...given: Parameters<EventStore['append']>) => {
          await other(given[0]);
          return store.append(...given);
        };
      return async function* (...given: Parameters<EventStore['read']>) {
        await other(given[0]);
        yield* store.read(...given);
      };
    },
  });
  expect(await refusal(paying(each, {}, { ...ports, store: between }))).toContain('are more than the funded part');
  expect([others > 0, (await standing()).fundedCents]).toEqual([true, fundedCents - each]);
});

test('the same payment by two people at once is recorded once', async () => {
  const outcomes = await Promise.all([1, 2].map((by) => refusal(paying(100, { reference: 'WIRE-SAME', by: `Person ${by}` }))));
  expect(outcomes.filter((one) => one === 'done')).toHaveLength(1);
  expect(outcomes.find((one) => one !== 'done')).toContain('has the reference WIRE-SAME already');
  expect(await refusal(paying(100, { reference: 'WIRE-SAME' }))).toContain('has the reference WIRE-SAME already');
  for (const reference of ['WIRE\u2011SAME', 'wire-same', 'WIRE-\u200BSAME', ' WIRE\u2212SAME', 'ＷＩＲＥ-SAME', 'WIRE-SAME\uFE0F'])
    expect([reference, await refusal(paying(100, { reference }))]).toEqual([
      reference,
      expect.stringContaining('has the reference WIRE-SAME already'),
    ]);
  // Another portal has references of its own.
  expect(await refusal(paying(100, { reference: 'WIRE-SAME', portalId: combined, advance: true }))).toBe('done');
});

test('an advance makes the funded part negative; taking it back restores the amounts, and it cannot be taken back twice', async () => {
  const before = await standing();
  const { remittanceId } = await paying(50_000, { advance: true });
  expect((await standing()).fundedCents).toBe(before.fundedCents - 50_000);
  const back = { remittanceId, portalId: portal, on: null, reason: 'account closed', by: 'Dana Scott' };
  expect(await refusal(reverseRemittance(ports, { ...back, portalId: combined }))).toContain('The portal has no remittance');
  const outcomes = await Promise.all([1, 2].map(() => refusal(reverseRemittance(ports, back))));
  expect(outcomes.sort()).toEqual([`Remittance ${remittanceId} was taken back already.`, 'done']);
  expect(await standing()).toEqual(before);
});

test('a day in a closed period, or a day to come, is refused for a payment and for taking it back', async () => {
  const { remittanceId } = await paying(1);
  const today = new Date(service.clock.now()).toISOString().slice(0, 10);
  const yesterday = new Date(service.clock.now() - DAY_MS).toISOString().slice(0, 10);
  await closePeriod(ports, `${today}T00:00:00.000Z`, 'Dana Scott');
  expect(await refusal(paying(1, { on: yesterday }))).toBe(`The books are closed to ${today}T00:00:00.000Z; name a later day.`);
  const back = { remittanceId, portalId: portal, reason: 'r', by: 'Dana Scott' };
  expect(await refusal(reverseRemittance(ports, { ...back, on: yesterday }))).toContain('The books are closed to');
  expect(await refusal(paying(1, { on: '2099-01-01' }))).toBe('2099-01-01 lies in the future.');
  expect(await refusal(reverseRemittance(ports, { ...back, on: today }))).toBe('done');
});

test('an amount that a batch settled too little is held back; an amount that staff resolved as settles is not', async () => {
  const desk = settlementDesk(service);
  const other = await service.portal(partner, { fee: { flatCents: 300 } });
  try {
    const short = await pay(other, 10_000);
    const { merchantAccount, transactionId, ref } = await desk.transaction(short);
    const fundedOn = new Date(service.clock.now() + DAY_MS).toISOString().slice(0, 10);
    await desk.importFile(desk.csv(desk.line('bat_short', transactionId, { ref, gross: 1_000, fee: 0, funded: fundedOn })), merchantAccount);
    await fund();
    expect(await standing(other)).toEqual({ payableCents: 10_000, settledCents: 10_000, fundedCents: 1_000 });

    const unknown = (await partner.client.create(paymentOf(combined, { number: CARD.unresolvable }))).details!.id as string;
    await settle(service);
    const before = await standing(combined);
    const { exceptionId } = (await desk.exceptions()).find(({ paymentId }) => paymentId === unknown)!;
    const { payments, settlement, ids } = service.services;
    await resolvePayment(payments.ports, settlement.register, { paymentId: unknown, as: 'succeeded', evidence: 'statement', by: 'Dana', force: true, transactions: {} }); // prettier-ignore
    const settles = { type: 'Resolve', resolution: 'settles', reason: 'ours', by: 'Dana', portalId: null, feeCents: 0 } as const;
    await changeException(settlement, exceptionId, settles, staff('Dana', ids.uuid()));
    await fund();
    const after = {
      payableCents: before.payableCents + 10_000,
      settledCents: before.settledCents + 10_000,
      fundedCents: before.fundedCents + 10_000,
    };
    expect(await standing(combined)).toEqual(after);
    const asIf = (funded: boolean) => service.services.pool.query('update settlement_batch set funded = $1 where funded <> $1', [funded]);
    await asIf(false);
    expect((await standing(combined)).fundedCents).toBeLessThanOrEqual(before.fundedCents);
    await asIf(true);
    expect(await standing(combined)).toEqual(after);
  } finally {
    desk.close();
  }
});

test('books and events agree, hledger’s text balances, and the verifier that shares no code makes the same journal', async () => {
  const { services } = service;
  while ((await services.openExceptions()) > 0);
  const caughtUp = async () => {
    const head = (await services.store.head())!;
    for (const projection of everySubscriber(services)) await projection.runUntil(head, { timeoutMs: 20_000 });
  };
  await caughtUp();
  expect((await findDrift(services.seal, { streams: null })).differences).toEqual([]);
  let text = journalHeading('hledger');
  for await (const page of journalPages(services.pool, JOURNAL_START, { from: null, to: null, until: null }))
    text += page.map(journalText('hledger')).join('');
  expect(text).toContain('(R20) agency paid');
  expect(addHledger(text).get(`liabilities:agency:${portal}:payable`)).toBe(BigInt(0 - (await standing()).payableCents));
  const folder = mkdtempSync(join(tmpdir(), 'payfold-remit-'));
  try {
    const verifier = join(import.meta.dirname, '../../apps/operator/verify.mjs');
    const [from, to, out] = ['2020-01-01T00:00:00.000Z', new Date(service.clock.now()).toISOString(), join(folder, 'pack')];
    await writePack({ ...services.seal, db: services.pool, reached: caughtUp }, { from, to, out, version: '0', verifier });
    const { stdout } = await promisify(execFile)(process.execPath, [verifier, 'pack', out]);
    expect(stdout).toContain('ok:');
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
});
