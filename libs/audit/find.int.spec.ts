/** Tests the read model of names: each name finds its payments and no other, newest first, page by page. */
import { afterAll, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { EVERYTHING } from '#accounts';
import { type EventStore, memoryEventStore, type NewEvent, type Recorded } from '#eventstore';
import type { Json } from '#kernel';
import { createPool, type Pool, transaction, uuidV7 } from '#platform';
import { type PaymentEvent, paymentListModel, paymentStream, type PaymentTerms } from '#payments';
import { personalUseModel } from '#privacy';
import type { ExceptionEvent, RecordedLine, SettlementEvent } from '#settlement';
import {
  ACCOUNT,
  charged,
  chargeOf,
  created,
  declined,
  failed,
  feeless,
  fenced,
  halfRefunded,
  initiated,
  PORTAL,
  returned,
  separate,
  unknown,
  voided,
} from '../../test/support/given.js';
import { freshDatabase, makeTables } from '../../test/support/postgres.js';
import { type FindBy, findFaults, findPayments, type FindQuery, nameHashOf, NOTHING_KNOWN, paymentFindModel, searchPayments } from './find.js';

let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
let store: EventStore;
let now = Date.parse('2026-01-05T00:00:00Z');
/** An id that is newer than all before. */
const newId = () => uuidV7((now += 1_000));

beforeAll(async () => {
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'find', max: 2 });
  for (const model of [paymentFindModel, paymentListModel, personalUseModel(null)]) await makeTables(pool, model);
});
afterAll(async () => {
  await pool.end();
  await database.drop();
});
beforeEach(async () => {
  await pool.query('truncate payment_find, payment_trait, payment_list, personal_use');
  store = memoryEventStore();
});

type Fact = PaymentEvent | SettlementEvent | ExceptionEvent;
const append = (stream: string, facts: readonly Fact[]) =>
  store.append(
    stream,
    'any',
    facts.map(({ type, at, data }): NewEvent => ({
      id: newId(),
      type,
      v: 1,
      data: data as unknown as Json,
      meta: { recordedAt: at, actor: { type: 'system', id: 'spec' }, correlationId: 'spec' },
    })),
  );
const pay = async (...facts: readonly PaymentEvent[]): Promise<string> => {
  const id = newId();
  await append(paymentStream(id), facts);
  return id;
};
const recorded = async (): Promise<Recorded[]> => {
  const all: Recorded[] = [];
  for await (const events of store.readAll(null, { streamPrefixes: paymentFindModel.streamPrefixes! })) all.push(...events);
  return all;
};
/** Applies the whole log, `atOnce` events in a transaction. */
const follow = async (atOnce = 1_000) => {
  const events = await recorded();
  for (let from = 0; from < events.length; from += atOnce)
    await transaction(pool, (client) => paymentFindModel.apply(client, events.slice(from, from + atOnce)));
};
const page = (by: FindBy, change: Partial<FindQuery> = {}) => {
  expect(findFaults(by)).toEqual([]);
  return search({ nameHashes: [nameHashOf(by)!], ...change });
};
const NONE = { ...NOTHING_KNOWN, asOf: null, accountId: null, portalId: null, from: null, to: null, status: null, after: null, limit: 100 };
const search = (known: Partial<FindQuery>) => findPayments({ store, db: pool }, EVERYTHING, { ...NONE, ...known });
const found = async (by: FindBy, change: Partial<FindQuery> = {}) => (await page(by, change)).payments.map(({ id }) => id);

const REFUND = '018f0000-0000-7000-8000-0000000000f1';
const line = (change: Partial<RecordedLine>): RecordedLine => ({
  number: 0,
  transactionId: 'ch_line',
  ref: null,
  type: 'sale',
  accepted: true,
  grossCents: 100,
  feeCents: 0,
  netCents: 100,
  result: 'STATUS_MISMATCH',
  paymentId: null,
  leg: 'principal',
  expectedCents: null,
  ...change,
});
const AT = '2026-01-06T00:00:00.000Z';
const batch = { gateway: 'simulator', merchantAccount: 'm', batchId: 'b1', closedAt: AT };
const BATCH_STREAM = 'settlement-simulator-m-b1';
const sendRefund = (attemptId: string, paymentId: string | null, transactionId: string | null): ExceptionEvent[] => [
  {
    type: 'ExceptionRefundRequested',
    at: AT,
    data: {
      attemptId,
      ref: 'r',
      account: { gateway: 'simulator', merchantAccount: 'm', credentialsRef: 'sandbox', environment: 'sandbox' },
      leg: 'combined',
      chargeTransactionId: 'ch_line',
      amountCents: 100,
      last4: null,
      paymentId,
      reason: 'r',
      by: 'Dana',
    },
  },
  {
    type: 'ExceptionRefundEnded',
    at: AT,
    data: { attemptId, outcome: transactionId === null ? 'refused' : 'refunded', transactionId },
  },
];

describe('a payment is found', () => {
  test('by its references, its confirmation number, its charges, and its card with principal or total', async () => {
    const id = await pay(...charged());
    await pay(initiated({ ...feeless, referenceId: 'CASE-2', paymentMethod: { type: 'card', brand: 'visa', last4: '1881' } }));
    await follow();
    for (const by of [
      { lineReference: 'INV-2' },
      { lineReference: 'INV-3' },
      { referenceId: 'CASE-1' },
      { confirmationNumber: 'ABCD-EFGH-JK' },
      { confirmationNumber: 'abcd-efgh-jk' },
      { transactionId: 'ch_principal' },
      { transactionId: 'ch_fee' },
      { last4: '4242', amountCents: '10000' },
      { last4: '4242', amountCents: '10325' },
    ])
      expect([by, await found(by)]).toEqual([by, [id]]);
    // The payment that was not charged yet is found, too.
    expect(await found({ last4: '1881', amountCents: '10000' })).toHaveLength(1);
    expect(await found({ lineReference: 'INV-1' })).toHaveLength(2);
  });

  test('but not by a part of a name, by another kind of name, or by another amount', async () => {
    await pay(...charged());
    await follow();
    for (const by of [
      { lineReference: 'INV' },
      { lineReference: 'inv-1' },
      { lineReference: 'INV-1 ' },
      { lineReference: 'CASE-1' },
      { referenceId: 'INV-1' },
      { transactionId: 'ABCD-EFGH-JK' },
      { confirmationNumber: 'ABCD-EFGH-JM' },
      { last4: '4242', amountCents: '325' },
      { last4: '4241', amountCents: '10000' },
    ])
      expect([by, await page(by)]).toEqual([by, { payments: [], next: null }]);
  });

  test('by each transaction of a decline, a failure, a void, a refund, and of what staff resolved', async () => {
    const takenBack = [{ leg: 'principal', amountCents: 100, transactionId: 'ch_taken', voidTransactionId: 'vd_taken' }] as const;
    const payments = {
      declined: await pay(initiated(), { ...declined, data: { ...declined.data, takenBack } } as PaymentEvent),
      failed: await pay(initiated(), { ...failed, data: { ...failed.data, takenBack: [{ ...takenBack[0], transactionId: 'ch_f', voidTransactionId: 'vd_f' }] } } as PaymentEvent), // prettier-ignore
      voided: await pay(...charged(), ...voided('void')),
      refunded: await pay(...charged(), halfRefunded('refund')[0]!, returned('refund', 'principal', 10_000, 0, 'refund'), returned('refund', 'fee', 0, 325, 'refund')), // prettier-ignore
      resolved: await pay(initiated(), unknown, fenced(), {
        type: 'PaymentResolved',
        at: AT,
        data: {
          as: 'succeeded',
          charge: { ...chargeOf(separate), confirmationNumber: 'ZZZZ-ZZZZ-ZZ', legs: chargeOf(separate).legs.map((leg) => ({ ...leg, transactionId: `st_${leg.leg}` })) }, // prettier-ignore
          evidence: 'statement',
          by: 'Dana',
          forced: true,
        },
      }),
    };
    await follow();
    const names: readonly (readonly [keyof typeof payments, FindBy])[] = [
      ['declined', { transactionId: 'ch_x' }],
      ['declined', { transactionId: 'ch_taken' }],
      ['declined', { transactionId: 'vd_taken' }],
      ['failed', { transactionId: 'ch_f' }],
      ['failed', { transactionId: 'vd_f' }],
      ['voided', { transactionId: 'void-principal-txn' }],
      ['voided', { transactionId: 'void-fee-txn' }],
      ['refunded', { transactionId: 'refund-principal-txn' }],
      ['refunded', { transactionId: 'refund-fee-txn' }],
      ['resolved', { transactionId: 'st_fee' }],
      ['resolved', { confirmationNumber: 'ZZZZ-ZZZZ-ZZ' }],
    ];
    for (const [name, by] of names) expect([name, by, await found(by)]).toEqual([name, by, [payments[name]]]);
  });

  test('by a settlement line that is none of its own transactions, and by a refund that staff sent for it', async () => {
    const id = await pay(initiated(), unknown, fenced());
    await append(BATCH_STREAM, [
      {
        type: 'SettlementLinesRecorded',
        at: AT,
        data: { ...batch, lines: [line({ paymentId: id }), line({ number: 1, transactionId: 'ch_nobody' })] },
      },
      {
        type: 'SettlementBatchRecorded',
        at: AT,
        data: { ...batch, fundedOn: null, lineCount: 2, grossCents: 200, feeCents: 0, netCents: 200, listed: false },
      },
      {
        type: 'SettlementLinesCorrected',
        at: AT,
        data: { ...batch, fundedOn: null, fileId: 'f', reference: null, corrections: [{ before: line({ number: 1, transactionId: 'ch_nobody' }), after: line({ number: 1, transactionId: 'ch_again', paymentId: id }) }] }, // prettier-ignore
      },
    ]);
    // Streams of files have the same prefix as batches.
    await append('settlement-file-1', [{ type: 'SettlementFileImported', at: AT, data: {} } as unknown as SettlementEvent]);
    await append('exception-1', sendRefund(REFUND, id, 'rf_sent'));
    await append('exception-2', sendRefund(newId(), id, null));
    await append('exception-3', sendRefund(newId(), null, 'rf_of_no_payment'));
    await follow();
    for (const transactionId of ['ch_line', 'ch_again', 'rf_sent']) expect([transactionId, await found({ transactionId })]).toEqual([transactionId, [id]]); // prettier-ignore
    for (const transactionId of ['ch_nobody', 'rf_of_no_payment', REFUND]) expect([transactionId, await found({ transactionId })]).toEqual([transactionId, []]); // prettier-ignore
  });
});

describe('a page', () => {
  const many = async (count: number, terms: (number: number) => Partial<PaymentTerms> = () => ({})) => {
    const ids: string[] = [];
    for (let number = 0; number < count; number++)
      ids.unshift(await pay(initiated({ ...feeless, ...terms(number) }, new Date(now + 1_000).toISOString())));
    await follow();
    return ids;
  };

  test('has the newest payments first; the pages together hold each payment once', async () => {
    const ids = await many(7);
    const seen: string[] = [];
    const sizes: number[] = [];
    for (let after: string | null = null; ;) {
      const { payments, next } = await page({ referenceId: 'CASE-1' }, { limit: 3, after });
      seen.push(...payments.map(({ id }) => id));
      sizes.push(payments.length);
      if ((after = next) === null) break;
    }
    expect([seen, sizes]).toEqual([ids, [3, 3, 1]]);
    expect(await page({ referenceId: 'CASE-1' }, { limit: 7 })).toMatchObject({ next: null });
  });

  test('has the other filters of the list', async () => {
    const [account, portal] = [newId(), newId()];
    const [fifth, fourth, third, second, first] = await many(5, (number) => ({ ...(number === 1 && { accountId: account }), ...(number === 2 && { portalId: portal }) })); // prettier-ignore
    await append(paymentStream(third!), [{ ...failed, at: new Date((now += 1_000)).toISOString() }]);
    const by = { referenceId: 'CASE-1' };
    const { payments } = await page(by);
    const createdAt = (id: string | undefined) => payments.find((one) => one.id === id)!.createdAt;
    expect(await found(by, { accountId: account })).toEqual([second]);
    expect(await found(by, { portalId: portal })).toEqual([third]);
    expect(await found(by, { accountId: ACCOUNT, portalId: PORTAL })).toEqual([fifth, fourth, first]);
    expect(await found(by, { from: createdAt(fourth) })).toEqual([fifth, fourth]);
    expect(await found(by, { to: createdAt(third) })).toEqual([second, first]);
    expect(await found(by, { status: 'failed' })).toEqual([third]);
    expect(await found(by, { asOf: createdAt(third) })).toEqual([third, second, first]);
    expect((await page(by, { asOf: createdAt(third), limit: 1 })).payments).toMatchObject([{ id: third, status: 'pending', accountId: ACCOUNT }]);
  });

  test('looks at a limited number of payments, even if none of them passes a filter', async () => {
    const ids = await many(300);
    const first = await page({ lineReference: 'INV-1' }, { accountId: newId(), limit: 10 });
    expect(first).toEqual({ payments: [], next: ids[249] });
    expect(await page({ lineReference: 'INV-1' }, { accountId: newId(), limit: 10, after: first.next })).toEqual({ payments: [], next: null });
    expect(await page({ lineReference: 'INV-1' }, { limit: 10 })).toMatchObject({ next: ids[9] });
  });
});

describe('by what a caller knows', () => {
  const day = (number: number) => new Date(Date.parse('2026-02-01T12:00:00Z') + number * 86_400_000).toISOString();
  /** A payment of each day, with its own amount and one of four cards. Every third one failed. The fifth was paid by a token. */
  const made = async (): Promise<string[]> => {
    const ids: string[] = [];
    now = Date.parse(day(0));
    for (let number = 0; number < 12; number++) {
      now = Date.parse(day(number));
      const last4 = ['4242', '1881', '0005', '4444'][number % 4]!;
      const brand = number % 2 === 0 ? 'visa' : 'mastercard';
      const terms = { ...feeless, portalId: number < 6 ? PORTAL : OTHER, paymentMethod: { type: 'card', brand, last4 } as const };
      const one = number === 5 ? { ...terms, paymentMethod: { type: 'card_token', brand: 'unknown', last4: '' } as const } : terms;
      const card = { brand: 'discover', last4: '9424' };
      const charge = created(feeless) as Extract<PaymentEvent, { type: 'PaymentCreated' }>;
      const outcome = number % 3 === 0 ? { ...failed, at: day(number) } : { ...charge, at: day(number), data: { ...charge.data, legs: charge.data.legs.map((leg) => ({ ...leg, ...(number === 5 && { card }) })) } }; // prettier-ignore
      const amountCents = 1_000 * (number + 1);
      const lineItems = [{ ...feeless.lineItems[0]!, amountCents }];
      const legs = feeless.legs.map((leg) => ({ ...leg, principalCents: amountCents }));
      ids.push(await pay(initiated({ ...one, amountCents, lineItems, legs }, day(number)), outcome));
    }
    await follow();
    const events = await recorded();
    await transaction(pool, (client) => paymentListModel.apply(client, events));
    return ids;
  };
  const OTHER = '018f0000-0000-7000-8000-0000000000b9';

  test('each mix answers the payments that fit, newest first, as a look at every payment does', async () => {
    const ids = await made();
    const numbers = async (known: Partial<FindQuery>) => (await search(known)).payments.map(({ id }) => ids.indexOf(id));
    expect(await numbers({ last4: '4242' })).toEqual([8, 4, 0]);
    expect(await numbers({ amount: [3_000, 3_000] })).toEqual([2]);
    expect(await numbers({ amount: [3_000, 5_000] })).toEqual([4, 3, 2]);
    expect(await numbers({ amount: [3_000, 9_000], brand: 'visa' })).toEqual([8, 6, 4, 2]);
    expect(await numbers({ from: day(3), to: day(5) })).toEqual([4, 3]);
    expect(await numbers({ portalId: OTHER, brand: 'mastercard' })).toEqual([11, 9, 7]);
    expect(await numbers({ status: 'failed', from: day(4) })).toEqual([9, 6]);
    expect(await numbers({ status: 'failed', amount: [4_000, 4_000] })).toEqual([3]);
    expect(await numbers({ status: 'failed', last4: '4242' })).toEqual([0]);
    expect(await numbers({ last4: '4242', amount: [5_000, 5_000], from: day(4), to: day(5), portalId: PORTAL, brand: 'visa' })).toEqual([4]);
    expect(await numbers({ nameHashes: [nameHashOf({ referenceId: 'CASE-1' })!], last4: '1881', to: day(9) })).toEqual([1]);
    expect(await numbers({ nameHashes: [nameHashOf({ referenceId: 'CASE-1' })!, nameHashOf({ lineReference: 'nobody' })!] })).toEqual([]);
    // The gateway named the card of a token.
    expect(await numbers({ last4: '9424', brand: 'discover' })).toEqual([5]);
    expect(await numbers({ last4: '4242', amount: [5_001, 5_001] })).toEqual([]);
  });

  test('pages together hold each payment once, and a search reads on while a page is empty', async () => {
    const ids = await made();
    for (const known of [{ last4: '4242' }, { amount: [1, 99_999] }, { status: 'failed' }, { portalId: PORTAL }] as const) {
      const all = (await search(known)).payments.map(({ id }) => id);
      const seen: string[] = [];
      for (let after: string | null = null, pages = 0; pages < 20; pages++) {
        const { payments, next } = await search({ ...known, limit: 2, after });
        seen.push(...payments.map(({ id }) => id));
        if ((after = next) === null) break;
      }
      expect([known, seen]).toEqual([known, all]);
    }
    await pool.query(
      `insert into payment_trait select gen_random_uuid(), '2026-03-01', account_id, portal_id, 'visa', '4242', 5, 5 from payment_trait t, generate_series(1, 500) where t.payment_id = $1`,
      [ids[0]],
    );
    // 500 newer rows whose payments do not exist fill the first page.
    expect((await search({ last4: '4242', limit: 1 })).payments).toEqual([]);
    const { payments } = await searchPayments({ store, db: pool }, EVERYTHING, { ...NONE, last4: '4242', limit: 1 });
    expect(payments.map(({ id }) => id)).toEqual([ids[8]]);
    await expect(search({ last4: '4242', after: newId() })).rejects.toThrow('cursor is not valid');
  });

  test('an e-mail address is found by its hash, alone and beside a name', async () => {
    const [first, second] = await made();
    const mac = Buffer.from('hash of an address');
    const use = (id: string | undefined) =>
      pool.query(`insert into personal_use values (gen_random_uuid(), $1, $2, $3, '2026-02-01')`, [`payment-${id}`, ACCOUNT, mac]);
    await use(first);
    await use(second);
    const found = async (known: Partial<FindQuery>) => (await search(known)).payments.map(({ id }) => id);
    expect(await found({ mailMac: mac })).toEqual([second, first]);
    expect(await found({ mailMac: mac, limit: 1, after: second! })).toEqual([first]);
    expect(await found({ mailMac: mac, status: 'failed' })).toEqual([first]);
    expect(await found({ mailMac: mac, nameHashes: [nameHashOf({ referenceId: 'CASE-1' })!] })).toEqual([second, first]);
    expect(await found({ mailMac: Buffer.from('of another') })).toEqual([]);
  });
});

test('rows do not depend on the pieces in which events arrive, and to apply them again changes nothing', async () => {
  const id = await pay(...charged(), ...voided('void'));
  await append(BATCH_STREAM, [{ type: 'SettlementLinesRecorded', at: AT, data: { ...batch, lines: [line({ paymentId: id }), line({ number: 1, paymentId: id })] } }]); // prettier-ignore
  await append('exception-1', sendRefund(REFUND, id, 'rf_sent'));
  const rows = async () => (await pool.query('select * from payment_find order by name_hash')).rows as unknown[];
  const traits = async () => (await pool.query('select * from payment_trait')).rows as unknown[];
  await follow(1);
  const one = await rows();
  await follow();
  expect(await rows()).toEqual(one);
  expect(await traits()).toHaveLength(1);
  await pool.query('truncate payment_find');
  await follow();
  expect(await rows()).toEqual(one);
  // 3 line references, 1 reference, 2 amounts, 1 confirmation number, 2 charges, 2 voids, 1 line, and a refund with its attempt.
  expect(one).toHaveLength(14);
});

describe('bad requests', () => {
  test.each<[FindBy, string]>([
    [{ lineReference: '' }, 'lineReference must have 1 to 255 characters'],
    [{ referenceId: 'x'.repeat(256) }, 'referenceId must have 1 to 255 characters'],
    [{ confirmationNumber: 'ABCDEFGHJK' }, 'confirmationNumber must look like ABCD-EFGH-JK'],
    [{ last4: '4242424242424242', amountCents: '100' }, 'last4 must be the last four digits of the card'],
    [{ last4: '4242', amountCents: '1.00' }, 'amountCents must be whole cents, 1 or more'],
    [{ last4: '4242', amountCents: '0' }, 'amountCents must be whole cents, 1 or more'],
    [{ last4: '4242' }, 'amountCents is required: a card is found by both, last4 and amountCents'],
    [{ amountCents: '100' }, 'last4 is required: a card is found by both, last4 and amountCents'],
    [{ lineReference: 'A', referenceId: 'A' }, 'referenceId is one too many: find by one at a time'],
    [{ transactionId: 'A', last4: '4242', amountCents: '1' }, 'last4 is one too many: find by one at a time'],
  ])('%j', (by, message) => {
    expect(findFaults(by).map((fault) => `${fault.field} ${fault.message}`)).toEqual([message]);
  });
  test('a request without a name has no fault here: the caller decides', () => {
    expect([findFaults({}), nameHashOf({})]).toEqual([[], null]);
  });
});
