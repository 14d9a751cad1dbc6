/**
 * The processor's file is imported once, corrected, or refused as a whole. Each kind of exception is provoked, and followed to the posting that ends
 * it.
 */
import { afterAll, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { join } from 'node:path';
import { changeException, type ExceptionChange, recordSettlements } from '#settlement';
import { findDrift } from '#audit';
import { type PaymentView, staff } from '#payments';
import { settle } from '../support/books.js';
import { CARD, paymentOf, type Service, startService, type TestAccount, everySubscriber } from '../support/service.js';
import { FILE_HEAD as HEAD, type SettlementDesk, settlementDesk } from '../support/settlement.js';

let service: Service;
let partner: TestAccount;
let portal: string;
let desk: SettlementDesk;
let merchantAccount: string;
let drawn = 0;
beforeAll(async () => {
  service = await startService();
  partner = await service.account();
  portal = await service.portal(partner);
  desk = settlementDesk(service);
  // The service learns of a merchant account with the first charge on it.
  const { id } = await pay();
  merchantAccount = (await transaction(id)).merchantAccount;
});
afterAll(async () => {
  desk.close();
  await service.stop();
});
beforeEach(() => {
  drawn += 1;
});

const pay = (number?: string): Promise<PaymentView> => partner.client.created(paymentOf(portal, { lines: [10_000], ...(number && { number }) }));
const transaction = (paymentId: string) => desk.transaction(paymentId);
const line = (...one: Parameters<SettlementDesk['line']>) => desk.line(...one);
const closedNow = () => desk.closedNow();
const written = (text: string | Buffer) => desk.written(text);
const csv = (...lines: string[]) => desk.csv(...lines);
const importFile = (file: string, account: string | null = null) => desk.importFile(file, account);
const open = (status: string | null = null) => desk.exceptions(status);
const exceptionsOf = async (batchId: string) => (await open()).filter((one) => one.batchId === batchId);
const booked = () => desk.booked();
const eventCount = () => desk.eventCount();

describe('a file', () => {
  test('settles its lines, as the processor’s own interface would', async () => {
    const { id } = await pay();
    const { transactionId } = await transaction(id);
    const before = await booked();
    const imported = await importFile(csv(line(`f${drawn}`, transactionId)));
    expect(imported).toMatchObject({
      repeated: false,
      lines: 1,
      corrected: 0,
      batches: [{ batchId: `f${drawn}`, count: 1, amountCents: 10_000 }],
    });
    const after = await booked();
    expect(after('assets:processor') - before('assets:processor')).toBe(-230);
    expect(await exceptionsOf(`f${drawn}`)).toEqual([]);
    expect((await partner.client.void(id, {})).code).toBe('VOID_FAILED');
  });
  test('again is nothing, under any name; as NDJSON it is another file that says the same', async () => {
    const { transactionId } = await transaction((await pay()).id);
    const closed = closedNow();
    const text = line('again', transactionId, { closed });
    const first = await importFile(csv(text));
    const events = await eventCount();
    expect(await importFile(csv(text))).toEqual({ ...first, repeated: true });
    expect(await eventCount()).toBe(events);
    const json = JSON.stringify({ batch_id: 'again', closed_at: closed, transaction_id: transactionId, ref: null, type: 'sale', gross_cents: 10_000, fee_cents: 230, net_cents: 9_770, funded_on: null }); // prettier-ignore
    expect(await importFile(written(`${json}\n`))).toMatchObject({ repeated: false, corrected: 0 });
  });
  test('imported by two at once, and beside the processor’s own interface, records every line once', async () => {
    const payments = [await pay(), await pay(), await pay()];
    const closed = closedNow();
    const lines: string[] = [];
    for (const { id } of payments) lines.push(line('twice', (await transaction(id)).transactionId, { closed }));
    const file = csv(...lines);
    await Promise.all([importFile(file), importFile(file)]);
    for (const { id } of payments) {
      const types = (await service.services.payments.ports.streams.events(id)).map(({ type }) => type);
      expect(types.filter((type) => type === 'PaymentSettled')).toHaveLength(1);
    }
    expect(await exceptionsOf('twice')).toEqual([]);
  });
  test('that corrects another supersedes it: the difference is posted, the earlier record stays in the log', async () => {
    const [a, b, c] = [(await transaction((await pay()).id)).transactionId, (await transaction((await pay()).id)).transactionId, (await transaction((await pay()).id)).transactionId]; // prettier-ignore
    const closed = closedNow();
    await importFile(
      csv(line('wrong', a, { closed }), line('wrong', b, { closed, fee: 300 }), line('wrong', 'tx-ghost', { closed, gross: 700, fee: 0 })),
      merchantAccount,
    );
    const before = await booked();
    expect(before('liabilities:suspense')).toBe(-700);
    const right = csv(line('wrong', a, { closed, gross: 9_900, fee: 228 }), line('wrong', b, { closed }), line('wrong', c, { closed }));
    expect(await importFile(right)).toMatchObject({ corrected: 4 });
    const after = await booked();
    expect(after('liabilities:suspense')).toBe(0);
    // Line a: 100 less, and 2 less in fees. Line b: 70 less in fees. The ghost line of 700 is removed. Line c is new, with a fee of 230.
    expect(after('expense:processing') - before('expense:processing')).toBe(-2 - 70 + 230);
    expect(after('assets:processor') - before('assets:processor')).toBe(-700 + 2 + 70 - 230);
    expect((await exceptionsOf('wrong')).map(({ kind, grossCents }) => [kind, grossCents])).toEqual([['AMOUNT_MISMATCH', 9_900]]);
    expect((await importFile(right)).repeated).toBe(true);
    expect((await findDrift(service.services.seal)).differences).toEqual([]);
  });
});

describe('a bad file is refused as a whole, with its line', () => {
  const good = () => line('bad', 'tx-1', { closed: '2026-03-01T05:00:00Z' });
  test.each<[string, () => string | Buffer, string]>([
    ['nothing', () => '', 'the file holds no lines'],
    ['only its heading', () => `${HEAD}\n`, 'the file holds no lines'],
    ['another heading', () => `batch,amount\n${good()}\n`, 'line 1: a CSV file begins with batch_id,closed_at'],
    ['a field too few', () => `${HEAD}\n${good()}\nbad,2026-03-01T05:00:00Z,tx-2\n`, 'line 3: it has 3 fields instead of 9'],
    ['a fraction of a cent', () => `${HEAD}\n${good().replace('10000', '100.5')}\n`, 'line 2: gross_cents must be whole cents'],
    ['a sum beyond reason', () => `${HEAD}\n${good().replace('10000', '99999999999999999999')}\n`, 'line 2: gross_cents must be whole cents'],
    ['an unknown type', () => `${HEAD}\n${good().replace('sale', 'gift')}\n`, 'line 2: type must be one of sale, refund'],
    ['a day that is none', () => `${HEAD}\n${good()}2026-02-30\n`, 'line 2: funded_on is no day'],
    ['a time that is none', () => `${HEAD}\n${good().replace('2026-03-01', '2026-13-01')}\n`, 'line 2: closed_at is no time'],
    [
      'a card number for a transaction',
      () => `${HEAD}\n${good().replace('tx-1', '4242424242424242')}\n`,
      'line 2: transaction_id must not hold a card number',
    ],
    ['a sale that takes money back', () => `${HEAD}\n${good().replace('10000', '-10000')}\n`, 'line 2: gross_cents of a sale must not be negative'],
    ['a batch with a slash', () => `${HEAD}\n${good().replace('bad', '../bad')}\n`, 'line 2: batch_id must match'],
    [
      'two times for one batch',
      () => `${HEAD}\n${good()}\n${line('bad', 'tx-2', { closed: '2026-03-02T05:00:00Z' })}\n`,
      'line 3: batch bad has two times of closing',
    ],
    [
      'a batch that goes on later',
      () => `${HEAD}\n${good()}\n${good().replace('bad', 'other')}\n${good()}\n`,
      'line 4: batch bad goes on after another one',
    ],
    ['a line without its end', () => `${HEAD}\n${good()}\n${good().slice(0, -3)}`, 'line 3: the file ends in the middle of a line'],
    ['an open quote', () => `${HEAD}\n"${good()}\n`, 'line 2: its quotes do not match'],
    ['bytes that are no text', () => Buffer.concat([Buffer.from(`${HEAD}\n`), Buffer.from([0xff, 0xfe, 10])]), 'line 2: it is not UTF-8'],
    ['a line without end', () => `${HEAD}\n${'x'.repeat(40_000)}\n`, 'line 2: it is longer than'],
    ['a cell of 10 MB', () => `${HEAD}\n"${'x'.repeat(10_000_000)}",1\n`, 'line 2: it is longer than'],
    ['broken JSON', () => `{"batch_id":"bad"\n`, 'line 1: it is not JSON'],
    ['a field that nobody knows', () => `{"batch_id":"bad","amount":1}\n`, 'line 1: amount is no field of a settlement line'],
    ['no transaction of ours', () => `${HEAD}\n${good()}\n`, 'batch bad holds no transaction of ours: name its merchant account'],
  ])('%s', async (_name, content, message) => {
    const events = await eventCount();
    await expect(importFile(written(content()))).rejects.toThrow(message);
    expect(await eventCount()).toBe(events);
  });
  test('that is not there', async () => {
    await expect(importFile(join(desk.folder, 'nowhere.csv'))).rejects.toThrow('the file cannot be read (ENOENT)');
  });
  test('with its fault in the last of many lines: nothing of the others was taken, and reading it took no memory for it', async () => {
    const closed = closedNow();
    const many = Array.from({ length: 30_000 }, (_, number) => line('many', `tx-many-${number}`, { closed }));
    const events = await eventCount();
    await expect(importFile(csv(...many, line('many', 'tx-last', { closed, gross: 'all' })), merchantAccount)).rejects.toThrow(
      'line 30002: gross_cents',
    );
    expect(await eventCount()).toBe(events);
  });
});

describe('every kind of exception', () => {
  const only = async (batchId: string) => {
    const rows = await exceptionsOf(batchId);
    expect(rows).toHaveLength(1);
    return rows[0]!;
  };
  test('MISSING_HERE: a transaction that is none of ours', async () => {
    await importFile(csv(line('k1', 'tx-unknown', { gross: 1_234, fee: 0 })), merchantAccount);
    expect(await only('k1')).toMatchObject({ kind: 'MISSING_HERE', grossCents: 1_234, suspenseCents: 1_234, paymentId: null, status: 'opened' });
  });
  test('AMOUNT_MISMATCH: a cent too few', async () => {
    const { id } = await pay();
    await importFile(csv(line('k2', (await transaction(id)).transactionId, { gross: 9_999 })));
    expect(await only('k2')).toMatchObject({ kind: 'AMOUNT_MISMATCH', grossCents: 9_999, expectedCents: 10_000, suspenseCents: 0, paymentId: id });
  });
  test('STATUS_MISMATCH: voided here, settled there', async () => {
    const { id } = await pay();
    const { transactionId } = await transaction(id);
    await partner.client.void(id, {});
    await importFile(csv(line('k3', transactionId)));
    expect(await only('k3')).toMatchObject({ kind: 'STATUS_MISMATCH', suspenseCents: 10_000, paymentId: id });
  });
  test('DUPLICATE_AT_GATEWAY: one sale in two batches', async () => {
    const { transactionId } = await transaction((await pay()).id);
    await importFile(csv(line('k4', transactionId)));
    await importFile(csv(line('k4-again', transactionId)));
    expect(await exceptionsOf('k4')).toEqual([]);
    expect(await only('k4-again')).toMatchObject({ kind: 'DUPLICATE_AT_GATEWAY', suspenseCents: 10_000 });
  });
  test('WRONG_ACCOUNT: settled on another account than charged', async () => {
    const { rows } = await service.services.pool.query<{ merchant_account: string }>('select merchant_account from gateway_account where merchant_account <> $1', [merchantAccount]); // prettier-ignore
    const { transactionId } = await transaction((await pay()).id);
    await importFile(csv(line('k5', transactionId)), rows[0]!.merchant_account);
    expect(await only('k5')).toMatchObject({ kind: 'WRONG_ACCOUNT', suspenseCents: 10_000 });
  });
  test('FEE_MISMATCH: a net that is not gross less fee', async () => {
    const { transactionId } = await transaction((await pay()).id);
    await importFile(csv(line('k6', transactionId, { net: 9_700 })));
    expect(await only('k6')).toMatchObject({ kind: 'FEE_MISMATCH', grossCents: 9_700, expectedCents: 9_770 });
  });
  test('FUNDING_MISMATCH: paid before it was corrected', async () => {
    const { transactionId } = await transaction((await pay()).id);
    const [closed, funded] = [closedNow(), closedNow().slice(0, 10)];
    await importFile(csv(line('k7', transactionId, { closed, funded })));
    expect(await exceptionsOf('k7')).toEqual([]);
    await importFile(csv(line('k7', transactionId, { closed, funded, fee: 250 })));
    expect(await only('k7')).toMatchObject({ kind: 'FUNDING_MISMATCH', grossCents: 9_770, expectedCents: 9_750 });
  });
  test('LATE, and MISSING_AT_GATEWAY: settled after days, and not at all', async () => {
    const [late, missing] = [await pay(), await pay()];
    const { transactionId } = await transaction(late.id);
    service.clock.advance(4 * 86_400_000);
    await importFile(csv(line('k8', transactionId)));
    expect(await only('k8')).toMatchObject({ kind: 'LATE', paymentId: late.id });
    const waiting = (await open()).filter(({ kind, paymentId }) => kind === 'MISSING_AT_GATEWAY' && paymentId === missing.id);
    // Both legs are missing, since the fee was a charge of its own.
    expect(waiting.map(({ leg, expectedCents }) => [leg, expectedCents]).sort()).toEqual([
      ['fee', missing.serviceFeeCents],
      ['principal', 10_000],
    ]);
    service.clock.advance(2 * 86_400_000);
    expect((await open()).find(({ exceptionId }) => exceptionId === waiting[0]!.exceptionId)!.ageDays).toBe(2);
  });
  test('MATCHED is none: a fee of the processor, a voided charge, a declined one', async () => {
    const { id } = await pay();
    await partner.client.void(id, {});
    await partner.client.create(paymentOf(portal, { number: CARD.declined }));
    await importFile(csv(line('k9', 'monthly-fee', { type: 'fee', gross: 0, fee: 995 })), merchantAccount);
    service.clock.advance(4 * 86_400_000);
    expect((await open()).filter((one) => one.paymentId === id || one.batchId === 'k9')).toEqual([]);
  });
});

describe('the life of an exception', () => {
  const change = (exceptionId: string, one: ExceptionChange) => changeException(service.services.settlement, exceptionId, one, staff(one.by, 'spec'));
  const opened = async (batchId: string, over: Parameters<typeof line>[2] = {}) => {
    await importFile(csv(line(batchId, `tx-${batchId}`, { gross: 500, fee: 0, ...over })), merchantAccount);
    return (await exceptionsOf(batchId))[0]!.exceptionId;
  };
  const by = 'Dana';

  test('assigned, explained, resolved; the money leaves suspense with the resolution', async () => {
    const before = await booked();
    const id = await opened('life');
    expect((await booked())('liabilities:suspense') - before('liabilities:suspense')).toBe(-500);
    await change(id, { type: 'Assign', to: 'Robin', by });
    await change(id, { type: 'Explain', reason: 'a terminal of another city', by });
    expect((await open('explained'))[0]).toMatchObject({ exceptionId: id, assignedTo: 'Robin', reason: 'a terminal of another city', changedBy: by });
    await change(id, { type: 'Resolve', resolution: 'adopt', portalId: portal, feeCents: 25, reason: 'paid at the counter', by });
    expect((await open('resolved')).at(-1)).toMatchObject({ exceptionId: id, resolution: 'adopt', ageDays: null });
    const after = await booked();
    expect(after('liabilities:suspense')).toBe(before('liabilities:suspense'));
    expect(after('liabilities:agency') - before('liabilities:agency')).toBe(-475);
    expect(after('revenue:service_fee:') - before('revenue:service_fee:')).toBe(-25);
    await expect(change(id, { type: 'Assign', to: 'Robin', by })).rejects.toThrow('is resolved');
  });
  test('refused: an unknown exception, no words, a card number, money out of nothing', async () => {
    const id = await opened('life2', { type: 'fee', gross: 0, fee: 5, net: -9 });
    const nobody = '00000000-0000-5000-8000-000000000000';
    await expect(change(nobody, { type: 'Assign', to: 'Robin', by })).rejects.toThrow('no such exception');
    await expect(change(id, { type: 'Explain', reason: ' ', by })).rejects.toThrow('must have 1 to');
    await expect(change(id, { type: 'Explain', reason: 'card 4242424242424242', by })).rejects.toThrow('card number');
    await expect(change(id, { type: 'Resolve', resolution: 'settles', portalId: null, feeCents: 0, reason: 'x', by })).rejects.toThrow(
      'Nothing of this exception',
    );
    const stranger = await opened('life3');
    await expect(change(stranger, { type: 'Resolve', resolution: 'settles', portalId: null, feeCents: 0, reason: 'x', by })).rejects.toThrow(
      'Nothing of the payment',
    );
    await change(id, { type: 'Resolve', resolution: 'no_posting', portalId: null, feeCents: 0, reason: 'rounding of theirs', by });
  });
  test('after all of that books and read models still equal the events', async () => {
    await settle(service);
    await recordSettlements(service.services.settlement, AbortSignal.timeout(20_000));
    const { store } = service.services;
    for (const projection of everySubscriber(service.services)) await projection.runUntil((await store.head())!, { timeoutMs: 20_000 });
    expect((await findDrift(service.services.seal)).differences).toEqual([]);
  });
});
