/** Refunds and voids (specification, Endpoints and States; C21–C31, C34–C40, C62, C63, C67). */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import type { PaymentView } from '#payments';
import type { SimulatorControl } from '../../apps/simulator/control.js';
import { eventually } from '../support/eventually.js';
import { type Answer, CARD, type Client, paymentOf, PAYMENTS, type Service, startService, type TestAccount } from '../support/service.js';

const STRANGER = '018f0000-0000-7000-8000-00000000dead';

let service: Service;
let partner: TestAccount;
let client: Client;
/** A portal with two charges per payment: principal and fee. The fee of 10,000 cents is 300. */
let separate: string;
let combined: string;
let free: string;
beforeAll(async () => {
  service = await startService();
  partner = await service.account();
  client = partner.client;
  separate = await service.portal(partner, { fee: { flatCents: 300 } });
  combined = await service.portal(partner, { fee: { flatCents: 300, chargeMode: 'combined' } });
  free = await service.portal(partner, { fee: {} });
});
afterAll(() => service.stop());

type Fault = Parameters<SimulatorControl['arm']>[0];
let drawn = 0;
const newKey = () => `key ${++drawn}`;
const pay = (portal: string, options: { lines?: number[]; number?: string } = {}) => client.created(paymentOf(portal, options));
const read = async (id: string): Promise<PaymentView> => (await client.find(id)).data;
/** The voids and refunds of the bank while `work` ran. */
const moved = async (work: () => Promise<unknown>) => {
  const before = (await service.simulator.truth()).length;
  await work();
  return (await service.simulator.truth(before))
    .filter(({ op, result }) => (op === 'void' || op === 'refund') && result === 'approved')
    .map(({ op, leg, amountCents }) => [op, leg, amountCents]);
};
const expectRefused = (answer: Answer<unknown>, message: RegExp) => {
  expect([answer.status, answer.code]).toEqual([422, 'INVALID_STATE']);
  expect(answer.message).toMatch(message);
};
/**
 * In every status captured = refunded + remaining, for the payment and for each line. The lines add up to the payment
 * (docs/contract.md#money-and-states).
 */
const expectSound = (payment: PaymentView) => {
  expect(payment.refundedAmountCents + payment.remainingRefundableAmountCents).toBe(payment.capturedAmountCents);
  const sum = (of: (line: PaymentView['lineItems'][number]) => number) => payment.lineItems.reduce((total, line) => total + of(line), 0);
  expect(sum((line) => line.refundedAmountCents)).toBe(payment.refundedAmountCents);
  expect(sum((line) => line.remainingRefundableAmountCents)).toBe(payment.remainingRefundableAmountCents);
};

describe('the amount of a refund (specification, refund, the table)', () => {
  const settled = { number: CARD.settlesAtOnce };
  test.each<[string, object, { number?: string }, string, number, number, string]>([
    ['no amountCents: all remaining principal', {}, {}, 'void', 10_000, 300, 'partially_refunded'],
    ['no amountCents, settled', {}, settled, 'refund', 10_000, 300, 'partially_refunded'],
    ['amountCents: that many cents of principal', { amountCents: 2_500 }, {}, 'void', 2_500, 7_800, 'partially_refunded'],
    ['amountCents, settled', { amountCents: 2_500 }, settled, 'refund', 2_500, 7_800, 'partially_refunded'],
    ['amountCents equal to all principal: the fee is kept', { amountCents: 10_000 }, settled, 'refund', 10_000, 300, 'partially_refunded'],
    [
      'include_fee: principal and fee; a full refund that was a void ends in refunded (C22)',
      { feeType: 'include_fee' },
      {},
      'void',
      10_300,
      0,
      'refunded',
    ],
    ['include_fee, settled', { feeType: 'include_fee' }, settled, 'refund', 10_300, 0, 'refunded'],
    [
      'include_fee with amountCents equal to the remaining principal (C36)',
      { feeType: 'include_fee', amountCents: 10_000 },
      settled,
      'refund',
      10_300,
      0,
      'refunded',
    ],
  ])('%s', async (_, body, card, reversalType, amountCents, remaining, status) => {
    for (const portal of [separate, combined]) {
      const { id } = await pay(portal, card);
      const { status: http, data } = await client.refund(id, { ...body, reason: 'asked for' });
      expect(http).toBe(200);
      expect(data).toStrictEqual({
        id,
        target: 'group',
        reversalType,
        amountCents,
        currency: 'USD',
        reason: 'asked for',
        status: 'succeeded',
        remainingRefundableAmountCents: remaining,
        gateway: { transactionId: expect.any(String) },
        createdAt: expect.stringMatching(/^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/),
      });
      const after = await read(id);
      expect(after).toMatchObject({
        status,
        capturedAmountCents: 10_300,
        refundedAmountCents: amountCents,
        remainingRefundableAmountCents: remaining,
      });
      expectSound(after);
      expect((await client.list({ limit: 1 })).data.payments).toEqual([after]);
    }
  });

  test('reason is null when none was sent', async () => {
    expect((await client.refund((await pay(free)).id)).data.reason).toBeNull();
  });

  test('without a fee, include_fee is a plain full refund (C35)', async () => {
    for (const body of [{}, { feeType: 'include_fee' }, { feeType: 'include_fee', amountCents: 10_000 }]) {
      const { id } = await pay(free);
      expect((await client.refund(id, body)).data).toMatchObject({ amountCents: 10_000, remainingRefundableAmountCents: 0 });
      expect(await client.status(id)).toBe('refunded');
    }
  });

  test('rule 2: the fee later, after the principal went back without it', async () => {
    for (const card of [{}, settled]) {
      for (const portal of [separate, combined]) {
        const { id } = await pay(portal, card);
        await client.refund(id, { amountCents: 4_000 });
        await client.refund(id);
        expect(await read(id)).toMatchObject({ status: 'partially_refunded', refundedAmountCents: 10_000, remainingRefundableAmountCents: 300 });
        expectRefused(await client.refund(id), /\b0 cents remain/);
        const { data } = await client.refund(id, { feeType: 'include_fee' });
        expect(data).toMatchObject({ amountCents: 300, remainingRefundableAmountCents: 0, reversalType: card === settled ? 'refund' : 'void' });
        const after = await read(id);
        expect(after.status).toBe('refunded');
        expect(after.lineItems.map(({ status }) => status)).toEqual(['refunded']);
        expectSound(after);
      }
    }
  });

  test('rule 1: the fee never goes back with a part (C36)', async () => {
    const { id } = await pay(separate);
    const answer = await client.refund(id, { feeType: 'include_fee', amountCents: 9_999 });
    expect([answer.status, answer.code]).toEqual([400, 'VALIDATION_ERROR']);
    expectRefused(await client.refund(id, { feeType: 'include_fee', amountCents: 10_001 }), /10000 cents remain/);
    expect((await read(id)).refundedAmountCents).toBe(0);
  });

  test('rule 3: more principal than remains; the message states the remaining cents (C37)', async () => {
    const { id } = await pay(separate);
    expectRefused(await client.refund(id, { amountCents: 10_001 }), /10000 cents remain/);
    await client.refund(id, { amountCents: 7_500 });
    expectRefused(await client.refund(id, { amountCents: 2_501 }), /^Refund exceeds remaining principal: 2500 cents remain$/);
    expect((await client.refund(id, { amountCents: 2_500 })).status).toBe(200);
    expectRefused(await client.refund(id, { amountCents: 1 }), /\b0 cents remain/);
    expectRefused(await client.refund(id), /\b0 cents remain/);
    await client.refund(id, { feeType: 'include_fee' });
    expectRefused(await client.refund(id, { feeType: 'include_fee' }), /\b0 cents remain/);
  });

  test('rule 4: a batch that closes in between turns the void into a refund (C24)', async () => {
    const { id } = await pay(separate);
    const movements = await moved(async () => {
      expect((await client.refund(id, { amountCents: 1_000 })).data.reversalType).toBe('void');
      await service.simulator.closeBatches();
      expect((await client.refund(id, { amountCents: 1_000 })).data.reversalType).toBe('refund');
      expect((await client.refund(id, { feeType: 'include_fee' })).data).toMatchObject({ reversalType: 'refund', amountCents: 8_300 });
    });
    expect(movements).toEqual([
      ['void', 'principal', 1_000],
      ['refund', 'principal', 1_000],
      ['refund', 'principal', 8_000],
      ['refund', 'fee', 300],
    ]);
    expectSound(await read(id));
  });

  test.each<[number[], { flatCents: number; percentBps: number }, [number, number[]][]]>([
    [
      [3333, 3333, 3334],
      { flatCents: 50, percentBps: 275 },
      [
        [1000, [333, 333, 334]],
        [1, [1, 0, 0]],
        [8999, [2999, 3000, 3000]],
      ],
    ],
    [[5000, 3000, 2000], { flatCents: 50, percentBps: 275 }, [[3333, [1666, 1000, 667]]]],
  ])('a part over the lines %j (C34)', async (lines, fee, refunds) => {
    const portal = await service.portal(partner, { fee });
    const { id, lineItems } = await pay(portal, { lines });
    const returned = lines.map(() => 0);
    for (const [amountCents, shares] of refunds) {
      await client.refund(id, { amountCents });
      shares.forEach((share, index) => (returned[index]! += share));
      const after = await read(id);
      expect(after.lineItems.map((line) => line.refundedAmountCents)).toEqual(returned);
      expect(after.lineItems.map((line) => line.status)).toEqual(returned.map((cents) => (cents === 0 ? 'succeeded' : 'partially_refunded')));
      expectSound(after);
    }
    await client.refund(id, { feeType: 'include_fee' });
    const after = await read(id);
    expect(after.lineItems.map((line) => line.refundedAmountCents)).toEqual(lineItems.map((line) => line.amountCents + line.serviceFeeCents));
    expect(after.lineItems.map((line) => line.status)).toEqual(lines.map(() => 'refunded'));
  });

  test('a line of which nothing went back stays succeeded (C28)', async () => {
    const { id } = await pay(free, { lines: [9_999, 1] });
    await client.refund(id, { amountCents: 1 });
    expect((await read(id)).lineItems.map(({ status }) => status)).toEqual(['partially_refunded', 'succeeded']);
  });
});

describe('void', () => {
  test.each([
    [
      'separate',
      () => separate,
      [
        ['void', 'principal', 10_000],
        ['void', 'fee', 300],
      ],
    ],
    ['combined', () => combined, [['void', 'combined', 10_300]]],
  ] as const)('covers principal and fee, %s (C26, C38)', async (_, portalOf, expected) => {
    const payment = await pay(portalOf(), { lines: [4_000, 6_000] });
    let answer: Awaited<ReturnType<Client['void']>>;
    const movements = await moved(async () => (answer = await client.void(payment.id, { reason: 'mistake' })));
    expect(answer!.status).toBe(200);
    expect(answer!.data).toStrictEqual({
      id: payment.id,
      amountCents: 10_300,
      currency: 'USD',
      reason: 'mistake',
      status: 'voided',
      voidedLineItems: payment.lineItems.map(({ id, amountCents }) => ({ id, amountCents })),
      voidedServiceFeeCents: 300,
      gateway: { transactionId: expect.any(String) },
      createdAt: expect.any(String),
    });
    expect(movements).toEqual(expected);
    const after = await read(payment.id);
    expect(after).toMatchObject({
      status: 'voided',
      capturedAmountCents: 10_300,
      refundedAmountCents: 10_300,
      remainingRefundableAmountCents: 0,
      confirmationNumber: payment.confirmationNumber,
      capturedAt: payment.capturedAt,
    });
    expect(after.lineItems.map(({ status }) => status)).toEqual(['voided', 'voided']);
    expectSound(after);
  });

  test('without a fee', async () => {
    expect((await client.void((await pay(free)).id)).data).toMatchObject({ amountCents: 10_000, voidedServiceFeeCents: 0, reason: null });
  });

  test.each([
    ['approved card whose void is rejected', { number: CARD.voidRejected }, undefined],
    ['a settled batch', { number: CARD.settlesAtOnce }, undefined],
    ['a batch that closed since', {}, () => service.simulator.closeBatches()],
  ])(
    'rejected by the gateway: %s → 422 VOID_FAILED, suggestedAction refund, the fee untouched; a refund then works (C26)',
    async (_, card, before) => {
      for (const portal of [separate, combined]) {
        const { id } = await pay(portal, card);
        await before?.();
        const movements = await moved(async () => {
          const answer = await client.void(id);
          expect([answer.status, answer.details]).toEqual([422, { code: 'VOID_FAILED', retryable: false, suggestedAction: 'refund' }]);
          expect(await read(id)).toMatchObject({ status: 'succeeded', refundedAmountCents: 0 });
        });
        expect(movements).toEqual([]);
        expect((await client.refund(id, { feeType: 'include_fee' })).data).toMatchObject({ reversalType: 'refund', amountCents: 10_300 });
        expect(await client.status(id)).toBe('refunded');
      }
    },
  );

  test('a part of it: 422 VOID_FAILED, retry_void, still succeeded; the retry voids the fee and reports the whole (C27)', async () => {
    for (const key of [undefined, newKey()]) {
      const sent = key === undefined ? {} : { key };
      const payment = await pay(separate, { number: CARD.feeVoidFailsOnce, lines: [4_000, 6_000] });
      const movements = await moved(async () => {
        const first = await client.void(payment.id, {}, sent);
        expect([first.status, first.details]).toEqual([422, { code: 'VOID_FAILED', retryable: true, suggestedAction: 'retry_void' }]);
        const half = await read(payment.id);
        expect(half).toMatchObject({ status: 'succeeded', refundedAmountCents: 10_000, remainingRefundableAmountCents: 300 });
        expect(half.lineItems.map(({ status }) => status)).toEqual(['succeeded', 'succeeded']);
        expectSound(half);
        const second = await client.void(payment.id, {}, sent);
        expect(second.status).toBe(200);
        expect(second.data).toMatchObject({
          amountCents: 10_300,
          voidedServiceFeeCents: 300,
          voidedLineItems: payment.lineItems.map(({ id, amountCents }) => ({ id, amountCents })),
        });
      });
      expect(movements).toEqual([
        ['void', 'principal', 10_000],
        ['void', 'fee', 300],
      ]);
      expect(await client.status(payment.id)).toBe('voided');
    }
  });

  test('a part of it, the fee void unknown: retry_void as well (C27)', async () => {
    for (const effect of [true, false]) {
      const { id } = await pay(separate);
      const movements = await moved(async () => {
        await service.simulator.arm({ match: { call: 'void', leg: 'fee', merchantAccount: `fee-${separate}` }, answer: 'cut', effect });
        const first = await client.void(id);
        expect([first.status, first.details]).toEqual([422, { code: 'VOID_FAILED', retryable: true, suggestedAction: 'retry_void' }]);
        expect(await read(id)).toMatchObject({ status: 'succeeded', refundedAmountCents: 10_000 });
        expect((await client.void(id)).data).toMatchObject({ amountCents: 10_300 });
      });
      expect(movements).toHaveLength(2);
      expect(await client.status(id)).toBe('voided');
    }
  });

  test('a part of it, the rest rejected: refund, and include_fee returns the fee and ends in refunded (C27)', async () => {
    const { id } = await pay(separate, { number: CARD.feeVoidFailsOnce });
    await client.void(id);
    await service.simulator.closeBatches();
    const again = await client.void(id);
    expect([again.status, again.details]).toEqual([422, { code: 'VOID_FAILED', retryable: false, suggestedAction: 'refund' }]);
    expect((await client.refund(id, { feeType: 'include_fee' })).data).toMatchObject({ amountCents: 300, reversalType: 'refund' });
    expect(await read(id)).toMatchObject({ status: 'refunded', remainingRefundableAmountCents: 0 });
  });

  test('a refund is allowed while a void is incomplete (C27)', async () => {
    const { id } = await pay(separate, { number: CARD.feeVoidFailsOnce });
    await client.void(id);
    expectRefused(await client.refund(id), /\b0 cents remain/);
    expect((await client.refund(id, { feeType: 'include_fee' })).data).toMatchObject({ amountCents: 300 });
    expect(await client.status(id)).toBe('refunded');
  });
});

describe('states that do not allow it → 422 INVALID_STATE', () => {
  const failed = async () => (await client.create(paymentOf(separate, { number: CARD.declined }))).details!.id as string;
  const unknown = async () => (await client.create(paymentOf(separate, { number: CARD.unresolvable }))).details!.id as string;
  const after = (change: (id: string) => Promise<unknown>) => async () => {
    const { id } = await pay(separate);
    await change(id);
    return id;
  };
  test.each<[string, () => Promise<string>]>([
    ['failed', failed],
    ['unknown', unknown],
    ['voided', after((id) => client.void(id))],
    ['refunded', after((id) => client.refund(id, { feeType: 'include_fee' }))],
    ['partially_refunded', after((id) => client.refund(id, { amountCents: 1 }))],
  ])('void of a payment that is %s (C25)', async (status, made) => {
    const id = await made();
    expect(await client.status(id)).toBe(status);
    expectRefused(await client.void(id), /./);
    expect(await client.status(id)).toBe(status);
  });
  test.each<[string, () => Promise<string>]>([
    ['failed', failed],
    ['unknown', unknown],
    ['voided', after((id) => client.void(id))],
    ['refunded', after((id) => client.refund(id, { feeType: 'include_fee' }))],
  ])('refund of a payment that is %s', async (_, made) => {
    const id = await made();
    for (const body of [{}, { amountCents: 1 }, { feeType: 'include_fee' }]) expectRefused(await client.refund(id, body), /./);
  });

  test('void of a payment that recovery undid: voided from unknown, nothing captured', async () => {
    const id = (await client.create(paymentOf(separate, { number: CARD.unreadable }))).details!.id as string;
    await service.recover(id);
    expect(await client.status(id)).toBe('voided');
    expectRefused(await client.void(id), /./);
    expectRefused(await client.refund(id), /./);
  });

  test('a payment that is pending', async () => {
    const slow = client.create(paymentOf(free, { number: CARD.slow }));
    const pending = await eventually(async () => (await client.list({ status: 'pending', portalId: free })).data.payments[0]);
    expect(pending).toMatchObject({ status: 'pending', capturedAmountCents: 0, confirmationNumber: null, lineItems: [{ status: 'pending' }] });
    expectRefused(await client.void(pending.id), /pending/);
    expectRefused(await client.refund(pending.id), /pending/);
    expect((await slow).status).toBe(200);
  });

  test('the gateway refuses the refund for another reason: 422, not stored, an alarm (C62, C67)', async () => {
    const { id } = await pay(separate, { number: CARD.settlementRejected });
    await service.simulator.closeBatches();
    const key = newKey();
    for (let again = 0; again < 2; again++) {
      const answer = await client.refund(id, {}, { key });
      expectRefused(answer, /refused|rejected/);
      expect(answer.headers['idempotent-replayed']).toBeUndefined();
    }
    expect(await read(id)).toMatchObject({ status: 'succeeded', refundedAmountCents: 0 });
    const alarms = service.logLines().filter(({ level, msg }) => level >= 50 && msg === 'the gateway refused a refund');
    expect(alarms.length).toBeGreaterThan(0);
  });
});

describe('principal returned, fee not: 502 PARTIAL_REFUND_PENDING (rule 5, C38, C39, C62)', () => {
  const half = { status: 'partially_refunded', refundedAmountCents: 10_000, remainingRefundableAmountCents: 300 };
  const pending = { code: 'PARTIAL_REFUND_PENDING', retryable: true, suggestedAction: 'refund', remainingRefundableAmountCents: 300 };
  const faults: [string, { number?: string }, Fault | null][] = [
    ['failed', { number: CARD.feeRefundFailsOnce }, null],
    ['not processed', {}, { answer: 'disabled' }],
    ['unknown, executed', {}, { answer: 'cut', effect: true }],
    ['unknown, not executed', {}, { answer: 'cut', effect: false }],
  ];

  describe.each(faults)('fee %s', (_, card, fault) => {
    test.each<[string, { key?: string }, { key?: string }, object]>([
      ['the same key', { key: 'same' }, { key: 'same' }, { feeType: 'include_fee' }],
      ['another key', { key: 'first' }, { key: 'second' }, { feeType: 'include_fee' }],
      ['no key', {}, {}, { feeType: 'include_fee' }],
      ['the original amount', {}, {}, { feeType: 'include_fee', amountCents: 10_000 }],
    ])('completed under %s: the same refund, principal and fee', async (name, first, second, body) => {
      const sent = ({ key }: { key?: string }) => (key === undefined ? {} : { key: `${name} ${_} ${key}` });
      const { id } = await pay(separate, card);
      const movements = await moved(async () => {
        if (fault) await service.simulator.arm({ match: { leg: 'fee', merchantAccount: `fee-${separate}` }, ...fault });
        const begun = await client.refund(id, body, sent(first));
        expect([begun.status, begun.details]).toEqual([502, pending]);
        expect(await read(id)).toMatchObject(half);
        expectSound(await read(id));
        const done = await client.refund(id, body, sent(second));
        // The first retry gets the whole refund, under any key or none, even if the fee had already come back (C38).
        expect(done.status).toBe(200);
        expect(done.data).toMatchObject({ amountCents: 10_300, remainingRefundableAmountCents: 0, status: 'succeeded', reversalType: 'void' });
        expect(await client.status(id)).toBe('refunded');
        // A later retry under the first key gets the whole refund, too (C38).
        if (first.key !== undefined) expect((await client.refund(id, body, sent(first))).data).toMatchObject({ amountCents: 10_300 });
      });
      expect(movements).toEqual([
        ['void', 'principal', 10_000],
        ['void', 'fee', 300],
      ]);
    });
  });

  test('a plain refund does not complete it: no principal remains', async () => {
    const { id } = await pay(separate, { number: CARD.feeRefundFailsOnce });
    await client.refund(id, { feeType: 'include_fee' });
    expectRefused(await client.refund(id), /\b0 cents remain/);
    expectRefused(await client.refund(id, { amountCents: 1 }), /\b0 cents remain/);
    expect((await client.refund(id, { feeType: 'include_fee' })).data.amountCents).toBe(10_300);
  });

  test('settled, too', async () => {
    const { id } = await pay(separate, { number: CARD.settlesAtOnce });
    await service.simulator.arm({ match: { call: 'refund', leg: 'fee', merchantAccount: `fee-${separate}` }, answer: 'disabled' });
    expect((await client.refund(id, { feeType: 'include_fee' })).details).toEqual(pending);
    expect((await client.refund(id, { feeType: 'include_fee' })).data).toMatchObject({ amountCents: 10_300, reversalType: 'refund' });
  });

  test('combined mode has one leg, and no partial outcome', async () => {
    const { id } = await pay(combined, { number: CARD.feeRefundFailsOnce });
    expect((await client.refund(id, { feeType: 'include_fee' })).status).toBe(200);
  });
});

describe('requests', () => {
  test.each<[string, unknown[], unknown[]]>([
    ['amountCents', [0, -1, 1.5, '100', null, 100_000_000, true], [1]],
    ['feeType', ['', 'exclude_fee', null, true, 'INCLUDE_FEE'], []],
    ['reason', ['x'.repeat(1001), 7, null, 'a\0', '\ud800', 'card 4242 4242 4242 4242'], ['x'.repeat(1000), '']],
    ['amount', [1, null, 'x'], []],
    ['extra', [{ amount: 1 }], [{ other: 1 }]],
  ])('refund: %s', async (field, refused, accepted) => {
    const { id } = await pay(separate);
    for (const value of refused) {
      const answer = await client.refund(id, { [field]: value });
      expect([value, answer.status, answer.code]).toEqual([value, 400, 'VALIDATION_ERROR']);
    }
    expect((await read(id)).refundedAmountCents).toBe(0);
    for (const value of accepted) expect([value, (await client.refund(id, { amountCents: 1, [field]: value })).status]).toEqual([value, 200]);
  });
  test.each<[string, unknown[]]>([
    ['reason', ['x'.repeat(1001), 7, null]],
    ['amount', [1]],
  ])('void: %s', async (field, refused) => {
    const { id } = await pay(free);
    for (const value of refused) expect((await client.void(id, { [field]: value })).code).toBe('VALIDATION_ERROR');
    expect(await client.status(id)).toBe('succeeded');
    expect((await client.void(id, { reason: 'x'.repeat(1000), amountCents: 7 })).status).toBe(200);
  });
  test.each(['', '{}', '  {} '])('an empty body %j is {} (C65)', async (body) => {
    expect((await client.refund((await pay(free)).id, body)).status).toBe(200);
    expect((await client.void((await pay(free)).id, body)).status).toBe(200);
  });
  test.each(['[]', '"x"', '{', 'null'])('a body %j → 400 (C65)', async (body) => {
    const { id } = await pay(free);
    expect((await client.refund(id, body)).code).toBe('VALIDATION_ERROR');
    expect((await client.void(id, body)).code).toBe('VALIDATION_ERROR');
  });

  test('404 PAYMENT_NOT_FOUND: absent, foreign, a line item id, no UUID; byte-identical bodies (C7)', async () => {
    const other = await service.account('Other');
    const { id, lineItems } = await pay(separate);
    const bodies = new Set<string>();
    for (const operation of ['refund', 'void'])
      for (const answer of [
        await client.post(`${PAYMENTS}/${STRANGER}/${operation}`),
        await other.client.post(`${PAYMENTS}/${id}/${operation}`),
        await client.post(`${PAYMENTS}/${lineItems[0]!.id}/${operation}`),
        await client.post(`${PAYMENTS}/nonsense/${operation}`),
      ]) {
        expect([answer.status, answer.code]).toEqual([404, 'PAYMENT_NOT_FOUND']);
        bodies.add(answer.text);
      }
    expect(bodies.size).toBe(1);
    expect((await read(id)).refundedAmountCents).toBe(0);
  });

  test('order of evaluation (C63): credentials, JSON, key, fields, payment, state, amounts', async () => {
    const { id } = await pay(separate);
    await client.refund(id, { amountCents: 1 });
    const stranger = service.anonymous;
    const long = { key: 'k'.repeat(256) };
    expect((await stranger.refund(id, '{', long)).status).toBe(401);
    expect((await client.refund(STRANGER, '{', long)).message).toMatch(/JSON/);
    expect((await client.refund(STRANGER, { feeType: 'x' }, long)).message).toMatch(/Idempotency-Key/);
    expect((await client.refund(STRANGER, { feeType: 'x' })).code).toBe('VALIDATION_ERROR');
    expect((await client.refund(STRANGER, { amountCents: 99_999_999 })).code).toBe('PAYMENT_NOT_FOUND');
    const failed = (await client.create(paymentOf(separate, { number: CARD.declined }))).details!.id as string;
    expectRefused(await client.refund(failed, { amountCents: 99_999_999 }), /failed/);
    expectRefused(await client.refund(id, { amountCents: 99_999_999 }), /9999 cents remain/);
  });

  test('refunds and voids stay possible after the portal was revoked (C47) or got another gateway (C68)', async () => {
    const portal = await service.portal(partner, { fee: { flatCents: 300 } });
    const [first, second] = [await pay(portal), await pay(portal)];
    await service.administer(service.admin.setGateway(portal, 'none'));
    await service.administer(service.admin.revokeAccess(portal, partner.accountId));
    expect((await client.create(paymentOf(portal))).code).toBe('PORTAL_ACCESS_DENIED');
    expect((await client.refund(first.id, { feeType: 'include_fee' })).status).toBe(200);
    expect((await client.void(second.id)).status).toBe(200);
    expect(await client.status(first.id)).toBe('refunded');
  });
});

describe('at the same time (C31)', () => {
  test('40 parallel refunds never return more than there is', async () => {
    const { id } = await pay(combined);
    let answers: Answer<unknown>[] = [];
    const movements = await moved(async () => {
      answers = await Promise.all(Array.from({ length: 40 }, () => client.refund(id, { amountCents: 500 })));
    });
    const done = answers.filter(({ status }) => status === 200).length;
    for (const answer of answers.filter(({ status }) => status !== 200)) expect([answer.status, answer.code]).toEqual([422, 'INVALID_STATE']);
    expect(movements).toHaveLength(done);
    const after = await read(id);
    expect(after.refundedAmountCents).toBe(done * 500);
    expect(after.refundedAmountCents).toBeLessThanOrEqual(10_000);
    expectSound(after);
    // The rest can still be refunded.
    if (done < 20) expect((await client.refund(id)).data.amountCents).toBe(10_000 - done * 500);
  });

  test('a void and a refund: one of them', async () => {
    const { id } = await pay(separate);
    const movements = await moved(async () => {
      const answers = await Promise.all([client.void(id), client.refund(id, { feeType: 'include_fee' }), client.void(id)]);
      expect(answers.map(({ status }) => status).sort()).toEqual([200, 422, 422]);
    });
    expect(movements).toHaveLength(2);
    expectSound(await read(id));
  });

  test('the second waits for a slow first one, and is compared with the remainder', async () => {
    const { id } = await pay(combined);
    await service.simulator.arm({ match: { call: 'void', merchantAccount: `agency-${combined}` }, delayAfterMs: 1_500 });
    // Earlier tests have voided 6,000 cents too. So look only at later operations of the bank.
    const before = (await service.simulator.truth()).length;
    const first = client.refund(id, { amountCents: 6_000 });
    await eventually(async () => (await service.simulator.truth(before)).some(({ op, amountCents }) => op === 'void' && amountCents === 6_000));
    const [small, large] = await Promise.all([client.refund(id, { amountCents: 4_000 }), client.refund(id, { amountCents: 4_001 })]);
    expect((await first).status).toBe(200);
    expect(small.status).toBe(200);
    expectRefused(large, /cents remain|in progress/);
    expect((await read(id)).refundedAmountCents).toBe(10_000);
  });
});
