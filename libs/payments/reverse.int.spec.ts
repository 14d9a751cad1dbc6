/**
 * Tests how money is returned (C17, C18, C22–C27, C30, C31, C36–C40, C61–C63, C68), over the real simulator. Money is never returned twice, and never
 * more than was requested. A caller without the attempt's own key gets its result only if no caller has got it before.
 */
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { ReadOnly } from '#eventstore';
import { Deadline } from '#kernel';
import { eventually } from '../../test/support/eventually.js';
import { read, sent } from '../../test/support/answers.js';
import {
  away,
  type Asked,
  CARDS,
  COMBINED,
  type Ground,
  type House,
  openGround,
  openHouse,
  referencesIn,
  refused,
  readOnly,
  unheard,
} from '../../test/support/payments.js';
import { gatewayRef } from './charge.js';
import { GATEWAY_CALL_MS, REQUEST_DEADLINE_MS } from './gateway/call.js';
import type { PaymentView, RefundView, VoidView } from './payment.view.js';
import { openDispute } from '#settlement';
import { effectByStaff, reverseByStaff, reverseOnce, type StaffReverseRequest } from './commands.js';
import { RepeatRefused, STAFF_REPEAT_MS } from './payment.js';
import { staffTaskEvidence } from './staff.js';
import { ABANDONED_AFTER_MS, resolveReversal } from './reverse.js';

let ground: Ground;
let house: House;
beforeAll(async () => {
  ground = await openGround();
});
afterAll(() => ground.close());
beforeEach(async () => {
  house = await openHouse(ground);
});
afterEach(() => ground.bank.clearFaults());

const charged = async (asked: Asked = {}) => (await house.charge(asked)).id;
/** The voids and refunds that the simulator has executed: operation, leg and amount. */
const moved = async () =>
  (await house.truth())
    .filter(({ op, result }) => (op === 'void' || op === 'refund') && result === 'approved')
    .map(({ op, leg, amountCents }) => [op, leg, amountCents]);
const money = async (paymentId: string) => {
  const { status, refundedAmountCents, remainingRefundableAmountCents } = await house.view(paymentId);
  return [status, refundedAmountCents, remainingRefundableAmountCents];
};
/** The invariant behind every test in this file: stream and simulator agree on the returned money. */
const inAgreement = async (paymentId: string) => {
  const view = await house.view(paymentId);
  expect(view.capturedAmountCents - view.refundedAmountCents).toBe(await house.balance());
};
const resolve = (paymentId: string) => {
  house.clock.advance(60_000);
  return house.recovery.resolve(paymentId);
};
const attempts = async (paymentId: string) => {
  const state = await house.state(paymentId);
  if (state.phase !== 'charged') throw new Error('not charged');
  return state.attempts;
};
const PARTIAL = { amountCents: 1_000 };
const UNKNOWN = { answer: 'cut' } as const;
const NOT_SENT = { effect: false, answer: 'cut' } as const;

describe('refunding before and after settlement (rule 4, C22–C24)', () => {
  test('before settlement a full refund is a void, and ends in refunded (C22)', async () => {
    const id = await charged();
    expect(await house.refund(id, { includeFee: true, reason: 'asked' })).toMatchObject({
      id,
      target: 'group',
      reversalType: 'void',
      amountCents: 10_325,
      status: 'succeeded',
      reason: 'asked',
      remainingRefundableAmountCents: 0,
    });
    expect(await moved()).toEqual([
      ['void', 'principal', 10_000],
      ['void', 'fee', 325],
    ]);
    expect(await money(id)).toEqual(['refunded', 10_325, 0]);
  });
  test('a part of the principal lowers the amount that settles (C23)', async () => {
    const id = await charged();
    expect(await house.refund(id, PARTIAL)).toMatchObject({ reversalType: 'void', amountCents: 1_000, remainingRefundableAmountCents: 9_325 });
    expect(await moved()).toEqual([['void', 'principal', 1_000]]);
    expect(await money(id)).toEqual(['partially_refunded', 1_000, 9_325]);
  });
  test('the principal without the fee: the fee leg is left alone', async () => {
    const id = await charged();
    expect(await house.refund(id)).toMatchObject({ amountCents: 10_000 });
    expect(await moved()).toEqual([['void', 'principal', 10_000]]);
    expect(await money(id)).toEqual(['partially_refunded', 10_000, 325]);
    expect(await house.refund(id, { includeFee: true })).toMatchObject({ amountCents: 325 });
    expect(await money(id)).toEqual(['refunded', 10_325, 0]);
    expect((await refused(house.refund(id))).message).toMatch(/: 0 cents remain$/);
  });
  test('after settlement it is a refund', async () => {
    const id = await charged();
    await house.settle(id);
    expect(await house.refund(id, { includeFee: true })).toMatchObject({ reversalType: 'refund', amountCents: 10_325 });
    expect((await moved()).map(([op]) => op)).toEqual(['refund', 'refund']);
    expect(await house.history(id)).toEqual(expect.arrayContaining(['PaymentRefunded', 'FeeRefunded', 'ReversalEnded']));
  });
  test('settled meanwhile, unknown to us: the gateway’s refusal turns the void into a refund (C24)', async () => {
    const id = await charged();
    await house.settle();
    expect(await house.refund(id, { ...PARTIAL })).toMatchObject({ reversalType: 'refund', amountCents: 1_000 });
    expect(await moved()).toEqual([['refund', 'principal', 1_000]]);
    await inAgreement(id);
  });
  test('a request that could not send its call reports the return of another one under its key (C62)', async () => {
    const id = await charged();
    const key = house.key();
    let other: Awaited<ReturnType<House['voidWithKey']>> | undefined;
    house.calls.before('void.principal', async () => {
      // The first request pauses here. Its lease ends, and another request runs under its key. The first request then has no time left for its call.
      await ground.pool.query(`update idempotency_key set lease_until = clock_timestamp() - interval '1 second' where state = 'in_progress'`);
      other = await house.voidWithKey(key, id);
      house.clock.advance(GATEWAY_CALL_MS);
    });
    const late = await house.voidWithKey(key, id);
    expect(other).toMatchObject({ status: 200 });
    expect([late.status, late.body]).toEqual([200, other!.body]);
    expect(await moved()).toHaveLength(2);
    await inAgreement(id);
  });

  test('a request that marked the attempt as left open leaves the fee to recovery, although another under its key has brought the principal back (C61)', async () => {
    const id = await charged({ card: CARDS.feeVoidFailsOnce });
    const key = house.key();
    let other: ReturnType<House['voidWithKey']> | undefined;
    let goOn = () => undefined as void;
    house.calls.before('void.principal', async () => {
      await ground.pool.query(`update idempotency_key set lease_until = clock_timestamp() - interval '1 second' where state = 'in_progress'`);
      await new Promise<void>((principalIsBack) => {
        house.calls.before('void.fee', () => {
          principalIsBack();
          return new Promise<void>((resolve) => (goOn = resolve));
        });
        other = house.voidWithKey(key, id);
      });
      house.clock.advance(GATEWAY_CALL_MS);
    });
    expect((await house.voidWithKey(key, id)).status).toBe(504);
    goOn();
    expect(read(await other!)).toMatchObject({ status: 422, code: 'VOID_FAILED' });
    await resolve(id);
    expect(await attempts(id)).toMatchObject([{ returned: [{ leg: 'principal' }], fenced: true, ended: { outcome: 'partial' } }]);
    await inAgreement(id);
  });

  test('a void that the gateway rejected is answered the same again, although its answer never reached the key (C15, T8)', async () => {
    const id = await charged({ card: CARDS.voidRejected });
    const key = house.key();
    const { idempotency } = house.services;
    const lost = { ...house.services, idempotency: { ...idempotency, finish: () => Promise.reject(new Error('the connection is gone')) } };
    const wanted = { operation: 'void', paymentId: id, accountId: house.accountId, initiatedBy: 'partner', amountCents: null, includeFee: true, reason: null } as const; // prettier-ignore
    const first = await sent(reverseOnce(lost, wanted, house.received(key, wanted)));
    expect(read(first)).toMatchObject({ status: 422, code: 'VOID_FAILED', details: { suggestedAction: 'refund' } });
    await ground.pool.query(`update idempotency_key set lease_until = clock_timestamp() - interval '1 second' where state = 'in_progress'`);
    const today = new Date(house.ports.clock.now()).toISOString().slice(0, 10);
    const dispute = { disputeId: house.ids.uuid(), status: 'debited', stage: 'chargeback', reasonCode: '10.4', reason: 'fraud', disputedAmountCents: 1_000, openedOn: today, dueDate: today } as const; // prettier-ignore
    await openDispute(house.ports, id, dispute, { actor: { type: 'staff', id: 'spec' }, correlationId: house.ids.uuid() });
    const again = await sent(reverseOnce(house.services, wanted, house.received(key, wanted)));
    expect([again.status, again.body]).toEqual([first.status, first.body]);
    expect(await attempts(id)).toHaveLength(1);
    expect(await sent(reverseOnce(house.services, wanted, house.received(key, wanted)))).toMatchObject({ body: first.body, replayed: true });
  });

  test('a refund whose answer never reached the key is answered as a replay, in the same bytes (S5)', async () => {
    const id = await charged();
    const key = house.key();
    const { idempotency } = house.services;
    const lost = { ...house.services, idempotency: { ...idempotency, finish: () => Promise.reject(new Error('the connection is gone')) } };
    const wanted = { operation: 'refund', paymentId: id, accountId: house.accountId, initiatedBy: 'partner', amountCents: 1_000, includeFee: false, reason: null } as const; // prettier-ignore
    const first = await sent(reverseOnce(lost, wanted, house.received(key, wanted)));
    expect(first).toMatchObject({ status: 200 });
    expect(first.replayed).toBe(false);
    await ground.pool.query(`update idempotency_key set lease_until = clock_timestamp() - interval '1 second' where state = 'in_progress'`);
    expect(await sent(reverseOnce(house.services, wanted, house.received(key, wanted)))).toEqual({ ...first, replayed: true });
    expect(await moved()).toHaveLength(1);
  });

  test('a retry under a key that got the result of an earlier attempt gets it again, although the key has no record of it (rule 1)', async () => {
    const id = await charged();
    const key = house.key();
    await ground.bank.arm({ match: { call: 'void', leg: 'fee' }, answer: 'cut' });
    const wanted = { operation: 'void', paymentId: id, accountId: house.accountId, initiatedBy: 'partner', amountCents: null, includeFee: true, reason: null } as const; // prettier-ignore
    expect(read(await sent(reverseOnce(house.services, wanted, house.received(key, wanted))))).toMatchObject({ status: 422, code: 'VOID_FAILED' });
    const { idempotency } = house.services;
    const lost = { ...house.services, idempotency: { ...idempotency, finish: () => Promise.reject(new Error('the connection is gone')) } };
    const told = await sent(reverseOnce(lost, wanted, house.received(key, wanted)));
    expect(told).toMatchObject({ status: 200 });
    await ground.pool.query(`update idempotency_key set lease_until = clock_timestamp() - interval '1 second' where state = 'in_progress'`);
    expect(await sent(reverseOnce(house.services, wanted, house.received(key, wanted)))).toEqual({ ...told, replayed: true });
    expect(await sent(reverseOnce(house.services, wanted, house.received(house.key(), wanted)))).toMatchObject({ status: 422 });
    expect(await moved()).toHaveLength(2);
  });

  test('a fixture being captured: refund at once, void refused', async () => {
    const id = await charged({ card: CARDS.voidRejected });
    expect(await house.refund(id, { includeFee: true })).toMatchObject({ reversalType: 'refund', amountCents: 10_325 });
  });
  test('settled here, not at the gateway: void instead, of exactly the requested amount (C23, C24)', async () => {
    const id = await charged();
    const loaded = await house.ports.streams.load(id);
    const at = new Date().toISOString();
    await house.ports.streams.execute(
      loaded,
      (['principal', 'fee'] as const).map((leg) => ({
        type: 'RecordSettlement' as const,
        at,
        leg,
        batchId: 'b',
        closedAt: at,
        accepted: true,
        grossCents: 1,
        feeCents: 0,
      })),
      { actor: { type: 'system', id: 's' }, correlationId: house.ids.uuid() },
      new Deadline(house.clock, REQUEST_DEADLINE_MS),
    );
    expect(await house.refund(id, PARTIAL)).toMatchObject({ reversalType: 'void', amountCents: 1_000 });
    expect(await moved()).toEqual([['void', 'principal', 1_000]]);
    await inAgreement(id);
  });
  test('one leg settled, the other not: refund if any leg was a refund (C24)', async () => {
    const id = await charged();
    house.calls.after('void.principal', () => ground.bank.closeBatches());
    expect(await house.refund(id, { includeFee: true })).toMatchObject({ reversalType: 'refund', amountCents: 10_325 });
    expect(await moved()).toEqual([
      ['void', 'principal', 10_000],
      ['refund', 'fee', 325],
    ]);
    expect(await money(id)).toEqual(['refunded', 10_325, 0]);
  });
  test('combined: principal and fee in one movement', async () => {
    house = await openHouse(ground, COMBINED);
    const id = await charged();
    expect(await house.refund(id, { amountCents: 4_000 })).toMatchObject({ amountCents: 4_000 });
    expect(await house.refund(id, { includeFee: true })).toMatchObject({ amountCents: 6_325 });
    expect(await moved()).toEqual([
      ['void', 'combined', 4_000],
      ['void', 'combined', 6_325],
    ]);
    expect(await money(id)).toEqual(['refunded', 10_325, 0]);
  });
  test('another account’s payment, an absent one and a line item are not found, all alike (C7)', async () => {
    const other = await openHouse(ground);
    const { id, lineItems } = await house.charge();
    const answers = await Promise.all([
      refused(other.refund(id)),
      refused(house.refund(house.ids.uuid())),
      refused(house.refund(lineItems[0]!.id)),
      refused(house.void(lineItems[0]!.id)),
    ]);
    for (const answer of answers) expect(answer).toEqual({ code: 'PAYMENT_NOT_FOUND', status: 404, message: answers[0].message, details: {} });
  });
  test('staff act on any account’s payment, and are recorded as initiator', async () => {
    const id = await charged();
    expect(await house.refund(id, { accountId: null, initiatedBy: 'staff', ...PARTIAL })).toMatchObject({ amountCents: 1_000 });
    expect((await attempts(id))[0]).toMatchObject({ initiatedBy: 'staff' });
  });
  test('the gateway account that charged is asked, not the portal’s present one; without its credentials 503, nothing begun (C68, C47)', async () => {
    const id = await charged();
    await house.administration.setGateway(house.portalId, 'none');
    await house.administration.revokeAccess(house.portalId, house.accountId);
    await house.project();
    house.setCredentials(false);
    expect(await refused(house.refund(id, PARTIAL))).toMatchObject({ code: 'GATEWAY_NOT_CONFIGURED', status: 503 });
    expect(await house.history(id)).toEqual(['PaymentInitiated', 'PaymentCreated']);
    house.setCredentials(true);
    expect(await house.refund(id, PARTIAL)).toMatchObject({ amountCents: 1_000 });
  });
});

describe('a gateway that cannot void a part (C23)', () => {
  let other: Ground;
  afterAll(() => other.close());
  test('refunds it if it can refund unsettled charges, and never voids that leg again (C24)', async () => {
    other = await openGround({ partialVoid: false, refundUnsettled: true });
    house = await openHouse(other);
    const id = await charged();
    expect(await house.refund(id, PARTIAL)).toMatchObject({ reversalType: 'refund', amountCents: 1_000 });
    expect(await house.refund(id, { includeFee: true })).toMatchObject({ reversalType: 'refund', amountCents: 9_325 });
    expect(await moved()).toEqual([
      ['refund', 'principal', 1_000],
      ['refund', 'principal', 9_000],
      ['void', 'fee', 325],
    ]);
    await inAgreement(id);
  });
  test('else 422, after settlement a refund', async () => {
    await other.close();
    other = await openGround({ partialVoid: false });
    house = await openHouse(other);
    const id = await charged();
    expect(await refused(house.refund(id, PARTIAL))).toMatchObject({ code: 'INVALID_STATE', message: expect.stringMatching(/after settlement/) });
    expect(await house.history(id)).toEqual(['PaymentInitiated', 'PaymentCreated']);
    await house.settle(id);
    expect(await house.refund(id, PARTIAL)).toMatchObject({ reversalType: 'refund', amountCents: 1_000 });
    expect((await house.truth()).filter(({ op }) => op === 'void')).toEqual([]);
  });
});

describe('voiding (C25–C27)', () => {
  test('principal, then fee → voided, with the whole payment in the answer', async () => {
    const view = await house.charge({ lines: [3333, 3333, 3334] });
    expect(await house.void(view.id, { reason: 'mistake' })).toMatchObject({
      id: view.id,
      amountCents: 10_325,
      status: 'voided',
      reason: 'mistake',
      voidedServiceFeeCents: 325,
      voidedLineItems: view.lineItems.map(({ id, amountCents }) => ({ id, amountCents })),
    });
    expect(await moved()).toEqual([
      ['void', 'principal', 10_000],
      ['void', 'fee', 325],
    ]);
    expect(await money(view.id)).toEqual(['voided', 10_325, 0]);
    expect((await refused(house.void(view.id))).code).toBe('INVALID_STATE');
  });
  test('principal rejected → VOID_FAILED refund, the fee untouched, never a refund by itself (C26); the refund then works', async () => {
    const id = await charged({ card: CARDS.voidRejected });
    expect(await refused(house.void(id))).toMatchObject({
      code: 'VOID_FAILED',
      status: 422,
      details: { retryable: false, suggestedAction: 'refund' },
    });
    expect((await house.truth()).filter(({ op }) => op !== 'charge').map(({ op, leg, result }) => [op, leg, result])).toEqual([
      ['void', 'principal', 'rejected'],
    ]);
    expect(await money(id)).toEqual(['succeeded', 0, 10_325]);
    expect(await house.refund(id, { includeFee: true })).toMatchObject({ reversalType: 'refund', amountCents: 10_325 });
  });
  test('settled, and the stream knows: VOID_FAILED before any call, stored like the gateway’s own (C27)', async () => {
    const id = await charged();
    await house.settle(id);
    const key = house.key();
    const first = await house.voidWithKey(key, id);
    expect(read(first)).toMatchObject({ status: 422, code: 'VOID_FAILED', details: { suggestedAction: 'refund' } });
    expect(await house.voidWithKey(key, id)).toMatchObject({ body: first.body, replayed: true });
    expect((await house.truth()).filter(({ op }) => op === 'void')).toEqual([]);
  });
  test('fee void fails → VOID_FAILED retry_void, succeeded, refunded = principal; the retry voids the fee only and reports all (C27)', async () => {
    const id = await charged({ card: CARDS.feeVoidFailsOnce });
    expect(await refused(house.void(id))).toMatchObject({ code: 'VOID_FAILED', details: { retryable: true, suggestedAction: 'retry_void' } });
    expect(await money(id)).toEqual(['succeeded', 10_000, 325]);
    expect(await house.void(id)).toMatchObject({ amountCents: 10_325, voidedServiceFeeCents: 325, status: 'voided' });
    expect(await moved()).toEqual([
      ['void', 'principal', 10_000],
      ['void', 'fee', 325],
    ]);
    expect(await money(id)).toEqual(['voided', 10_325, 0]);
  });
  test.each([
    ['executed', UNKNOWN],
    ['not executed', NOT_SENT],
  ] as const)('fee void unknown (%s) → VOID_FAILED retry_void; the retry reports the whole void and moves nothing twice', async (_, fault) => {
    const id = await charged();
    await ground.bank.arm({ match: { call: 'void', leg: 'fee' }, ...fault });
    expect(await refused(house.void(id))).toMatchObject({ code: 'VOID_FAILED', details: { suggestedAction: 'retry_void' } });
    expect(await money(id)).toEqual(['succeeded', 10_000, 325]);
    expect(await house.void(id)).toMatchObject({ amountCents: 10_325, voidedServiceFeeCents: 325, status: 'voided' });
    expect(await moved()).toHaveLength(2);
    expect(await money(id)).toEqual(['voided', 10_325, 0]);
    await inAgreement(id);
  });
  test('a retry with a fee void that is definitely rejected → refund is suggested; include_fee returns the fee → refunded (C27)', async () => {
    const id = await charged({ card: CARDS.feeVoidFailsOnce });
    await refused(house.void(id));
    await house.settle();
    expect(await refused(house.void(id))).toMatchObject({ code: 'VOID_FAILED', details: { retryable: false, suggestedAction: 'refund' } });
    expect(await house.refund(id, { includeFee: true })).toMatchObject({ reversalType: 'refund', amountCents: 325 });
    expect(await money(id)).toEqual(['refunded', 10_325, 0]);
  });
  test.each([
    ['not processed → 502', { answer: 'disabled' }, 'PAYMENT_GATEWAY_ERROR', 502],
    ['unknown → 504', UNKNOWN, 'PAYMENT_TIMEOUT', 504],
  ] as const)('the principal %s, unchanged (C40, C62)', async (_, fault, code, status) => {
    const id = await charged();
    await ground.bank.arm({ match: { call: 'void', leg: 'principal' }, ...fault });
    expect(await refused(house.void(id))).toMatchObject({ code, status });
    expect(await money(id)).toEqual(['succeeded', 0, 10_325]);
    expect(await house.void(id)).toMatchObject({ amountCents: 10_325, status: 'voided' });
    expect(await moved()).toHaveLength(2);
  });
  test('a void of which recovery found the principal is completed by the next (C61, C27)', async () => {
    const id = await charged();
    await ground.bank.arm({ match: { call: 'void', leg: 'principal' }, ...UNKNOWN });
    const key = house.key();
    expect((await house.voidWithKey(key, id)).status).toBe(504);
    expect(await resolve(id)).toBe('resolved');
    expect(await money(id)).toEqual(['succeeded', 10_000, 325]);
    expect(read<VoidView>(await house.voidWithKey(key, id)).data).toMatchObject({ amountCents: 10_325, voidedServiceFeeCents: 325 });
    expect(await moved()).toHaveLength(2);
  });
});

describe('outcomes of a refund at the gateway (C40, C62)', () => {
  test.each([
    ['not processed', { answer: 'disabled' }, 'PAYMENT_GATEWAY_ERROR', 502],
    ['unknown', UNKNOWN, 'PAYMENT_TIMEOUT', 504],
    ['unknown, without effect', NOT_SENT, 'PAYMENT_TIMEOUT', 504],
    ['garbage', { answer: 'not_json' }, 'PAYMENT_TIMEOUT', 504],
  ] as const)('first leg %s: payment unchanged', async (_, fault, code, status) => {
    const id = await charged();
    await ground.bank.arm({ match: { call: 'void', leg: 'principal' }, ...fault });
    expect(await refused(house.refund(id, PARTIAL))).toMatchObject({ code, status, details: { id } });
    expect(await money(id)).toEqual(['succeeded', 0, 10_325]);
  });
  test('no answer within 20 s → 504; the void that arrives later finds its reference finalised', async () => {
    const id = await charged();
    const harmed = await ground.bank.harmedCalls();
    await ground.bank.arm({ match: { call: 'void' }, delayBeforeMs: 800 });
    const call = refused(house.refund(id, PARTIAL));
    await eventually(async () => (await ground.bank.harmedCalls()) > harmed);
    house.clock.advance(GATEWAY_CALL_MS);
    expect((await call).code).toBe('PAYMENT_TIMEOUT');
    expect(await resolve(id)).toBe('resolved');
    await new Promise((done) => setTimeout(done, 1_000));
    expect(await moved()).toEqual([]);
    expect(await money(id)).toEqual(['succeeded', 0, 10_325]);
  });
  test('rejected for another reason → 422, an alarm, not stored (C62)', async () => {
    const id = await charged({ card: CARDS.settlementRejected });
    await house.settle();
    const key = house.key();
    for (let round = 0; round < 2; round++) {
      const answer = await house.refundWithKey(key, id, PARTIAL);
      expect(read(answer)).toMatchObject({ status: 422, code: 'INVALID_STATE' });
      expect(JSON.parse(answer.body)).toMatchObject({ message: 'The settlement of this payment was rejected.' });
      expect(answer.replayed).toBeUndefined();
    }
    expect(house.logged.filter((line) => line.includes('the gateway refused a refund'))).toHaveLength(2);
    expect((await attempts(id)).map(({ ended }) => ended?.outcome)).toEqual(['rejected', 'rejected']);
  });

  describe.each([
    ['failed', { card: CARDS.feeRefundFailsOnce }, null],
    ['unknown, executed', {}, UNKNOWN],
    ['unknown, not executed', {}, NOT_SENT],
    ['refused for now', {}, { answer: 'disabled' }],
  ] as const)('principal returned, fee %s: 502 PARTIAL_REFUND_PENDING', (_, asked, fault) => {
    const pending = async (key: string, change = {}) => {
      const id = await charged(asked);
      if (fault) await ground.bank.arm({ match: { call: 'void', leg: 'fee' }, ...fault });
      const answer = read(await house.refundWithKey(key, id, { includeFee: true, ...change }));
      expect(answer).toMatchObject({
        status: 502,
        code: 'PARTIAL_REFUND_PENDING',
        details: { retryable: true, suggestedAction: 'refund', remainingRefundableAmountCents: 325 },
      });
      expect(await money(id)).toEqual(['partially_refunded', 10_000, 325]);
      return id;
    };
    const completed = { amountCents: 10_325, status: 'succeeded', remainingRefundableAmountCents: 0 };
    const once = async (id: string) => {
      expect(await moved()).toEqual([
        ['void', 'principal', 10_000],
        ['void', 'fee', 325],
      ]);
      expect(await money(id)).toEqual(['refunded', 10_325, 0]);
    };

    test('the same key completes it: the fee only, answered as one refund (C17, C38)', async () => {
      const key = house.key();
      const id = await pending(key);
      const answer = await house.refundWithKey(key, id, { includeFee: true });
      expect(read<RefundView>(answer).data).toMatchObject(completed);
      await once(id);
      expect(await house.refundWithKey(key, id, { includeFee: true })).toMatchObject({ body: answer.body, replayed: true });
    });
    test('another key completes it; the first key then gets the same result (C38)', async () => {
      const key = house.key();
      const id = await pending(key);
      const other = read<RefundView>(await house.refundWithKey(house.key(), id, { includeFee: true, ...(fault ? {} : { amountCents: 10_000 }) }));
      if (other.status === 200) expect(other.data).toMatchObject(completed);
      // With the fault UNKNOWN, the second request first resolves the open attempt, whose fee was returned. Nothing is left for the second key.
      else expect([fault, other.code]).toEqual([UNKNOWN, 'INVALID_STATE']);
      const first = read<RefundView>(await house.refundWithKey(key, id, { includeFee: true }));
      expect(first.data).toMatchObject(completed);
      if (other.status === 200) expect(first.data).toEqual(other.data);
      await once(id);
    });
    test('a request without a key completes it, or learns once that it is complete', async () => {
      const id = await pending(house.key());
      expect(await house.refund(id, { includeFee: true })).toMatchObject(completed);
      await once(id);
      expect((await refused(house.refund(id, { includeFee: true }))).code).toBe('INVALID_STATE');
    });
    test('staff return the fee as a refund of their own', async () => {
      const id = await pending(house.key());
      const outcome = await house.refund(id, { includeFee: true, initiatedBy: 'staff', accountId: null }).catch((error: Error) => error);
      if (outcome instanceof Error) expect([fault, outcome.message]).toEqual([UNKNOWN, expect.stringMatching(/0 cents remain/)]);
      else expect(outcome).toMatchObject({ amountCents: 325 });
      await once(id);
    });
    test('recovery finds the state of the fee and starts no leg that was not sent (C61)', async () => {
      const key = house.key();
      const id = await pending(key);
      const before = (await house.truth()).filter(({ op }) => op === 'void' || op === 'refund').length;
      expect(await resolve(id)).toBe('resolved');
      expect((await house.truth()).filter(({ op }) => op === 'void' || op === 'refund')).toHaveLength(before);
      expect(read<RefundView>(await house.refundWithKey(key, id, { includeFee: true })).data).toMatchObject(completed);
      await once(id);
    });
  });
});

describe('a retry under its key after a 5xx (C17)', () => {
  const failed = async (fault: Parameters<Ground['bank']['arm']>[0], asked = PARTIAL) => {
    const id = await charged();
    const key = house.key();
    await ground.bank.arm({ match: { call: 'void' }, ...fault });
    expect((await house.refundWithKey(key, id, asked)).status).toBeGreaterThanOrEqual(500);
    return { id, key, retry: () => house.refundWithKey(key, id, asked) };
  };
  test('another body → mismatch', async () => {
    const { id, key } = await failed(UNKNOWN);
    expect(read(await house.refundWithKey(key, id, { amountCents: 1_001 })).code).toBe('IDEMPOTENCY_MISMATCH');
  });
  test('it had succeeded → 200 with that result, no second movement', async () => {
    const { id, retry } = await failed(UNKNOWN);
    expect(read<RefundView>(await retry()).data).toMatchObject({ amountCents: 1_000, reversalType: 'void' });
    expect(await moved()).toEqual([['void', 'principal', 1_000]]);
    await inAgreement(id);
  });
  test('recovery had found that it succeeded → 200 with that result', async () => {
    const { id, retry } = await failed(UNKNOWN);
    await resolve(id);
    expect(read<RefundView>(await retry()).data).toMatchObject({ amountCents: 1_000 });
    expect(await moved()).toHaveLength(1);
  });
  test.each(['at the retry', 'by recovery'])('it was never executed, found %s → a new attempt with new references', async (by) => {
    const { id, retry } = await failed(NOT_SENT);
    if (by === 'by recovery') await resolve(id);
    expect(read<RefundView>(await retry()).data).toMatchObject({ amountCents: 1_000 });
    const [first, second] = await attempts(id);
    expect([first!.ended?.outcome, second!.ended?.outcome]).toEqual(['never_executed', 'completed']);
    expect(second!.legs[0]!.references).not.toEqual(first!.legs[0]!.references);
    expect(await moved()).toHaveLength(1);
  });
  test('not processed for certain → a new attempt', async () => {
    const { id, retry } = await failed({ answer: 'disabled' });
    expect((await retry()).status).toBe(200);
    expect(await moved()).toHaveLength(1);
    await inAgreement(id);
  });
  test('the gateway cannot tell now → 504 again, the key stays bound; later the true result', async () => {
    const { id, retry } = await failed(UNKNOWN);
    await ground.bank.arm({ match: { call: 'finalize' }, effect: false, answer: 'cut', times: 2 });
    for (let round = 0; round < 2; round++) expect(read(await retry())).toMatchObject({ status: 504, code: 'PAYMENT_TIMEOUT' });
    expect(read<RefundView>(await retry()).data).toMatchObject({ amountCents: 1_000 });
    expect(await moved()).toHaveLength(1);
    await inAgreement(id);
  });
  test('the outcome could not be recorded → the same calls again under the same references', async () => {
    const id = await charged();
    const key = house.key();
    house.appends.after('RefundRequested', () => house.appends.failBefore('append', away));
    expect((await house.clock.hurry(house.refundWithKey(key, id, PARTIAL))).status).toBe(504);
    house.appends.clear();
    expect(read<RefundView>(await house.refundWithKey(key, id, PARTIAL)).data).toMatchObject({ amountCents: 1_000 });
    expect(await moved()).toHaveLength(1);
    expect(await attempts(id)).toHaveLength(1);
    await inAgreement(id);
  });
  test('the same calls again cannot be sent: 504, since the first ones may have returned the money (C43)', async () => {
    const id = await charged();
    const key = house.key();
    house.appends.after('RefundRequested', () => house.appends.failBefore('append', away));
    expect((await house.clock.hurry(house.refundWithKey(key, id, PARTIAL))).status).toBe(504);
    house.appends.clear();
    expect(await moved()).toHaveLength(1);
    await ground.bank.arm({ match: { call: 'void' }, answer: 'disabled' });
    expect(read(await house.refundWithKey(key, id, PARTIAL))).toMatchObject({ status: 504, code: 'PAYMENT_TIMEOUT' });
    expect(read<RefundView>(await house.refundWithKey(key, id, PARTIAL)).data).toMatchObject({ amountCents: 1_000 });
    expect(await moved()).toHaveLength(1);
  });
  test('credentials away in between (503) → still the same refund, never a second one', async () => {
    const { id, retry } = await failed(UNKNOWN);
    house.setCredentials(false);
    expect((await retry()).status).toBe(503);
    house.setCredentials(true);
    await resolve(id);
    expect(read<RefundView>(await retry()).data).toMatchObject({ amountCents: 1_000 });
    expect(await moved()).toHaveLength(1);
    await inAgreement(id);
  });
  test('its own refund is whole, another is open and cannot be resolved → its own result all the same', async () => {
    const { id, retry } = await failed(UNKNOWN);
    await resolve(id);
    await ground.bank.arm({ match: { call: 'void' }, ...UNKNOWN });
    await refused(house.refund(id, { amountCents: 2_000 }));
    await ground.bank.arm({ match: { call: 'finalize' }, effect: false, answer: 'cut', times: null });
    expect(read<RefundView>(await retry()).data).toMatchObject({ amountCents: 1_000 });
    await ground.bank.clearFaults();
    expect((await retry()).replayed).toBe(true);
    await resolve(id);
    expect(await moved()).toEqual([
      ['void', 'principal', 1_000],
      ['void', 'principal', 2_000],
    ]);
    await inAgreement(id);
  });
  test('a key of a void is as bound as that of a refund', async () => {
    const id = await charged();
    const key = house.key();
    await ground.bank.arm({ match: { call: 'void', leg: 'principal' }, ...NOT_SENT });
    expect((await house.voidWithKey(key, id)).status).toBe(504);
    expect(read<VoidView>(await house.voidWithKey(key, id)).data).toMatchObject({ status: 'voided', amountCents: 10_325 });
    expect(read(await house.refundWithKey(key, id)).code).toBe('IDEMPOTENCY_MISMATCH');
  });
  test('T8: the owner vanished between the call and the record → the next claim runs the same calls', async () => {
    const id = await charged();
    const key = house.key();
    const hang = new Promise(() => undefined);
    let sent = false;
    house.calls.after('void.principal', () => ((sent = true), hang));
    void house.refundWithKey(key, id, PARTIAL);
    await eventually(() => sent);
    await ground.pool.query(`update idempotency_key set lease_until = clock_timestamp() - interval '1 second' where key_hash = $1`, [
      house.services.idempotency.name(house.accountId, key).keyHash,
    ]);
    expect(read<RefundView>(await house.refundWithKey(key, id, PARTIAL)).data).toMatchObject({ amountCents: 1_000 });
    expect([(await attempts(id)).length, await moved()]).toEqual([1, [['void', 'principal', 1_000]]]);
  });
});

describe('a repeat without a key (C18)', () => {
  /** Makes a refund that is executed, but whose caller gets a 504. Recovery then resolves it. */
  const untold = async (asked: Parameters<House['refund']>[1] = PARTIAL) => {
    const id = await charged();
    await ground.bank.arm({ match: { call: 'void' }, ...UNKNOWN });
    expect((await refused(house.refund(id, asked))).status).toBe(504);
    await resolve(id);
    expect(await moved()).toHaveLength(1);
    return id;
  };
  test('gets the first one’s result once; the next one returns money of its own', async () => {
    const id = await untold();
    const told = await house.refund(id, PARTIAL);
    expect([told.amountCents, (await moved()).length]).toEqual([1_000, 1]);
    expect(await house.history(id)).toContain('ReversalAcknowledged');
    expect(await house.refund(id, PARTIAL)).toMatchObject({ remainingRefundableAmountCents: 8_325 });
    expect(await moved()).toHaveLength(2);
    await inAgreement(id);
  });
  test('also if it resolves the first one itself', async () => {
    const id = await charged();
    await ground.bank.arm({ match: { call: 'void' }, ...UNKNOWN });
    await refused(house.refund(id, PARTIAL));
    expect(await house.refund(id, PARTIAL)).toMatchObject({ amountCents: 1_000 });
    expect(await moved()).toHaveLength(1);
  });
  test('two at once: one gets the result, the other returns money of its own: no result goes to two', async () => {
    const id = await untold();
    const results = await Promise.all([house.refund(id, PARTIAL), house.refund(id, PARTIAL)]);
    expect(new Set(results.map(({ gateway }) => gateway.transactionId)).size).toBe(2);
    expect(await moved()).toHaveLength(2);
    await inAgreement(id);
  });
  test.each<[string, Parameters<House['refund']>[1]]>([
    ['another amount', { amountCents: 999 }],
    ['another kind of actor', { ...PARTIAL, initiatedBy: 'staff', accountId: null }],
    ['all that remains', {}],
    ['the fee as well', { includeFee: true }],
  ])('%s is a request of its own', async (_, asked) => {
    const id = await untold();
    const before = (await moved()).length;
    await house.refund(id, asked);
    expect((await moved()).length).toBeGreaterThan(before);
    await inAgreement(id);
  });
  test('after 24 hours it is one, too', async () => {
    const id = await untold();
    house.clock.advance(24 * 3_600_000);
    await house.refund(id, PARTIAL);
    expect(await moved()).toHaveLength(2);
  });
  test('with a key it is matched to its own attempt only', async () => {
    const id = await untold();
    expect((await house.refundWithKey(house.key(), id, PARTIAL)).status).toBe(200);
    expect(await moved()).toHaveLength(2);
  });
  test('once the key’s owner has the result, a request without a key does not get it', async () => {
    const id = await charged();
    const key = house.key();
    await ground.bank.arm({ match: { call: 'void' }, ...UNKNOWN });
    await house.refundWithKey(key, id, PARTIAL);
    expect((await house.refundWithKey(key, id, PARTIAL)).status).toBe(200);
    await house.refund(id, PARTIAL);
    expect(await moved()).toHaveLength(2);
  });
  test('a void is answered once, then refused', async () => {
    const id = await charged();
    await ground.bank.arm({ match: { call: 'void', leg: 'fee' }, ...UNKNOWN });
    await refused(house.void(id));
    await resolve(id);
    expect(await house.void(id)).toMatchObject({ status: 'voided', amountCents: 10_325 });
    expect((await refused(house.void(id))).code).toBe('INVALID_STATE');
  });
  test('while it cannot be resolved every refund and void → 422, for every caller', async () => {
    const id = await charged();
    await ground.bank.arm({ match: { call: 'void' }, ...UNKNOWN });
    await refused(house.refund(id, PARTIAL));
    await ground.bank.arm({ match: { call: 'finalize' }, effect: false, answer: 'cut', times: null });
    for (const call of [house.refund(id, PARTIAL), house.void(id), house.refund(id, { initiatedBy: 'staff', accountId: null })])
      expect(await refused(call)).toMatchObject({ code: 'INVALID_STATE', message: expect.stringMatching(/being reconciled/) });
    expect(read(await house.refundWithKey(house.key(), id, PARTIAL))).toMatchObject({ code: 'INVALID_STATE' });
  });
});

describe('the same refund of staff again (C56)', () => {
  const asked = (paymentId: string) =>
    ({ operation: 'refund', paymentId, amountCents: 1_000, includeFee: false, reason: 'twice', by: 'Dana' }) satisfies StaffReverseRequest;
  const byStaff = (paymentId: string, change: Partial<StaffReverseRequest> = {}, key: string | null = null) =>
    sent(reverseByStaff(house.services, { ...asked(paymentId), ...change }, key));
  const code = { status: 422, code: 'INVALID_STATE' };

  test('is refused; another one says so, has a key, or comes after ten minutes; a partner has no such guard', async () => {
    const id = await charged();
    expect((await byStaff(id)).status).toBe(200);
    expect(read(await byStaff(id, { by: 'Kim', reason: 'again' }))).toMatchObject({
      ...code,
      message: expect.stringMatching(/^The same refund, of 10.00/),
    });
    expect(await moved()).toHaveLength(1);
    await expect(effectByStaff(house.services, asked(id), null)).rejects.toThrow(RepeatRefused);
    expect(await effectByStaff(house.services, { ...asked(id), again: true }, null)).toEqual({
      accountId: house.accountId,
      legs: [expect.objectContaining({ leg: 'principal', means: 'void', principalCents: 1_000, feeCents: 0 })],
      feeKeptCents: 325,
      earlier: null,
    });
    expect((await byStaff(id, { again: true })).status).toBe(200);
    expect((await byStaff(id, {}, house.key())).status).toBe(200);
    expect(read(await byStaff(id, { again: false }, house.key()))).toMatchObject(code);
    expect(await house.refund(id, PARTIAL)).toMatchObject({ amountCents: 1_000 });
    expect(await house.refund(id, PARTIAL)).toMatchObject({ amountCents: 1_000 });
    house.clock.advance(STAFF_REPEAT_MS);
    expect((await byStaff(id)).status).toBe(200);
    expect(await moved()).toHaveLength(6);
    await inAgreement(id);
  });
  test('five at once return the money once', async () => {
    const id = await charged();
    const answers = await Promise.all(Array.from({ length: 5 }, () => byStaff(id)));
    expect(answers.map(({ status }) => status).sort()).toEqual([200, 422, 422, 422, 422]);
    expect(await moved()).toHaveLength(1);
    await inAgreement(id);
  });
  test('one whose command vanished is completed by the repeat, and its result told once', async () => {
    const id = await charged();
    house.calls.after('void.principal', () => new Promise(() => undefined));
    void byStaff(id).catch(() => undefined);
    await eventually(async () => (await moved()).length === 1);
    house.clock.advance(ABANDONED_AFTER_MS);
    expect(await effectByStaff(house.services, asked(id), null)).toMatchObject({ legs: [], earlier: { operation: 'refund', isOpen: true } });
    expect((await byStaff(id)).status).toBe(200);
    expect(read(await byStaff(id))).toMatchObject(code);
    expect(await moved()).toHaveLength(1);
    await inAgreement(id);
  });
});

describe('two at once (C31)', () => {
  test('the second waits, then is compared with the remainder', async () => {
    const id = await charged();
    await ground.bank.arm({ match: { call: 'void' }, delayBeforeMs: 400 });
    const [first, second] = await Promise.all([
      house.refund(id, { amountCents: 6_000 }),
      eventually(async () => (await attempts(id)).length === 1).then(() => refused(house.refund(id, { amountCents: 6_000 }))),
    ]);
    expect(first.amountCents).toBe(6_000);
    expect(second).toMatchObject({ code: 'INVALID_STATE', message: 'Refund exceeds remaining principal: 4000 cents remain' });
    await inAgreement(id);
  });
  test('ten at once return all there is, and not a cent more', async () => {
    const id = await charged();
    const results = await Promise.allSettled(Array.from({ length: 10 }, () => house.refund(id, { amountCents: 3_000 })));
    expect(results.filter(({ status }) => status === 'fulfilled')).toHaveLength(3);
    expect(await moved()).toEqual(Array(3).fill(['void', 'principal', 3_000]));
    await inAgreement(id);
  });
  test('a void and a refund at once: one wins, the other sees it', async () => {
    const id = await charged();
    const results = await Promise.allSettled([house.void(id), house.refund(id, { includeFee: true })]);
    expect(results.filter(({ status }) => status === 'fulfilled')).toHaveLength(1);
    expect(await house.balance()).toBe(0);
    await inAgreement(id);
  });
  test('one that runs longer than 10 s → 422 for the other, and its key is free', async () => {
    const id = await charged();
    await ground.bank.arm({ match: { call: 'void' }, delayBeforeMs: 4_000 });
    const first = house.refund(id, PARTIAL);
    await eventually(async () => (await attempts(id)).length === 1);
    const key = house.key();
    const second = house.refundWithKey(key, id, PARTIAL);
    await new Promise((turn) => setTimeout(turn, 1_500));
    house.clock.advance(10_000);
    expect(read(await second)).toMatchObject({ status: 422, code: 'INVALID_STATE' });
    await first;
    expect((await house.refundWithKey(key, id, PARTIAL)).status).toBe(200);
    expect(await moved()).toHaveLength(2);
  });
  test('one of a vanished process is resolved after 35 s, not waited for', async () => {
    const id = await charged();
    house.calls.after('void.principal', () => new Promise(() => undefined));
    void house.refund(id, PARTIAL).catch(() => undefined);
    await eventually(async () => (await moved()).length === 1);
    house.clock.advance(ABANDONED_AFTER_MS);
    // The repeated request gets the result of the vanished one.
    expect(await house.refund(id, PARTIAL)).toMatchObject({ amountCents: 1_000 });
    expect(await moved()).toHaveLength(1);
    await inAgreement(id);
  });
});

test('one of a vanished process with a clock a day ahead is resolved at once', async () => {
  const id = await charged();
  house.clock.setWrongBy(24 * 3_600_000);
  house.calls.after('void.principal', () => new Promise(() => undefined));
  void house.refund(id, PARTIAL).catch(() => undefined);
  await eventually(async () => (await moved()).length === 1);
  house.clock.setWrongBy(0);
  expect(await house.refund(id, PARTIAL)).toMatchObject({ amountCents: 1_000 });
  expect(await moved()).toHaveLength(1);
  await inAgreement(id);
});

describe('a late wake-up (C61)', () => {
  /** Recovery takes over the attempt of a paused request. The clock does not move meanwhile. */
  const overtaken = (id: string) => async () => {
    const [attempt] = await attempts(id);
    const owner = { actor: { type: 'recovery' as const, id: 'spec' }, correlationId: house.ids.uuid() };
    expect(await resolveReversal(house.ports, id, attempt!.attemptId, owner, new Deadline(house.clock, REQUEST_DEADLINE_MS))).toBe('resolved');
  };
  test('before the call: finalised, 504, nothing recorded, nothing moved', async () => {
    const id = await charged();
    house.calls.before('void.principal', overtaken(id));
    expect((await refused(house.refund(id, PARTIAL))).code).toBe('PAYMENT_TIMEOUT');
    expect([await moved(), (await attempts(id)).map(({ ended }) => ended?.outcome)]).toEqual([[], ['never_executed']]);
    expect(await money(id)).toEqual(['succeeded', 0, 10_325]);
  });
  test('after the call: its effect is recorded once, by the other; the late one answers 504, and the repeat gets the result once', async () => {
    const id = await charged();
    house.calls.after('void.principal', overtaken(id));
    expect((await refused(house.refund(id, PARTIAL))).code).toBe('PAYMENT_TIMEOUT');
    expect(await money(id)).toEqual(['partially_refunded', 1_000, 9_325]);
    expect(await house.refund(id, PARTIAL)).toMatchObject({ amountCents: 1_000 });
    expect(await moved()).toHaveLength(1);
  });
  test('between the legs: the principal is recorded, the fee never goes by the late one', async () => {
    const id = await charged();
    house.calls.before('void.fee', overtaken(id));
    expect((await refused(house.refund(id, { includeFee: true }))).code).toBe('PAYMENT_TIMEOUT');
    expect([await moved(), await money(id)]).toEqual([[['void', 'principal', 10_000]], ['partially_refunded', 10_000, 325]]);
    expect(await house.refund(id, { includeFee: true })).toMatchObject({ amountCents: 10_325 });
    expect(await money(id)).toEqual(['refunded', 10_325, 0]);
  });
  test('before the switch to a refund: both references are finalised (C24)', async () => {
    const id = await charged();
    await house.settle();
    house.calls.before('refund.principal', overtaken(id));
    expect((await refused(house.refund(id, PARTIAL))).code).toBe('PAYMENT_TIMEOUT');
    expect([await moved(), await money(id)]).toEqual([[], ['succeeded', 0, 10_325]]);
  });
  test('a reference that was finalised without a fence on the stream: 504 all the same, nothing recorded, the next one finds out', async () => {
    const id = await charged();
    house.calls.before('void.principal', async () => {
      const [attempt] = await attempts(id);
      const state = await house.state(id);
      if (state.phase !== 'charged') throw new Error(state.phase);
      const { account, leg, transactionId: chargeTransactionId } = state.legs[0]!;
      const call = { ref: attempt!.legs[0]!.references.void, op: 'void', leg, account, begunAt: attempt!.requestedAt } as const;
      const about = { ...call, amountCents: 4_000, chargeTransactionId, last4: null };
      await house.ports.gateways.find(account)!.finalize(about, AbortSignal.timeout(5_000));
    });
    expect((await refused(house.refund(id, PARTIAL))).code).toBe('PAYMENT_TIMEOUT');
    expect((await house.history(id)).at(-1)).toBe('RefundRequested');
    house.clock.advance(ABANDONED_AFTER_MS);
    expect(await house.refund(id, PARTIAL)).toMatchObject({ amountCents: 1_000 });
    expect((await attempts(id)).map(({ ended }) => ended?.outcome)).toEqual(['never_executed', 'completed']);
    expect(await moved()).toHaveLength(1);
  });
  test('every reference of an attempt is used or finalised when another process ends it', async () => {
    const id = await charged();
    house.calls.before('void.principal', overtaken(id));
    await refused(house.refund(id, { includeFee: true }));
    const [attempt] = await attempts(id);
    const named = attempt!.legs.flatMap(({ references }) => [references.void, references.refund]);
    expect(named).toHaveLength(4);
    const atBank = new Set((await house.truth()).map(({ ref }) => ref));
    for (const reference of named) expect(atBank).toContain(reference);
    expect(referencesIn(await house.events(id))).toEqual(expect.arrayContaining(named));
  });
  test('references derive from attempt, leg and operation', () => {
    const attemptId = house.ids.uuid();
    const all = (['principal', 'fee', 'combined'] as const).flatMap((leg) =>
      (['charge', 'void', 'refund', 'reversal'] as const).map((op) => gatewayRef(attemptId, leg, op)),
    );
    expect(new Set(all).size).toBe(12);
    for (const reference of all) expect(reference).toMatch(/^[0-9A-HJKMNP-TV-Z]{20}$/);
    expect(gatewayRef(attemptId, 'fee', 'void')).toBe(gatewayRef(attemptId, 'fee', 'void'));
  });
});

describe('the event store fails', () => {
  test('before the intent: nothing is sent', async () => {
    const id = await charged();
    house.appends.failBefore('RefundRequested', away);
    await expect(house.clock.hurry(house.refund(id, PARTIAL))).rejects.toThrow('the store is away');
    expect(await moved()).toEqual([]);
  });
  test('after the intent, with a key: 504, and the retry continues that attempt', async () => {
    const id = await charged();
    const key = house.key();
    house.appends.failAfter('RefundRequested', unheard);
    expect((await house.clock.hurry(house.refundWithKey(key, id, PARTIAL))).status).toBe(504);
    expect(await moved()).toEqual([]);
    house.appends.clear();
    expect((await house.refundWithKey(key, id, PARTIAL)).status).toBe(200);
    expect([(await attempts(id)).length, (await moved()).length]).toEqual([1, 1]);
  });
  test.each([
    ['PaymentVoided', 'of the principal', 1],
    ['ReversalEnded', 'of the fee', 2],
  ])('before %s %s is appended: 504, never 200; the retry finishes without moving anything twice', async (type, _, count) => {
    const id = await charged();
    const key = house.key();
    house.appends.failBefore(type, away);
    expect((await house.clock.hurry(house.refundWithKey(key, id, { includeFee: true }))).status).toBe(504);
    expect(await moved()).toHaveLength(count);
    house.appends.clear();
    expect(read<RefundView>(await house.refundWithKey(key, id, { includeFee: true })).data).toMatchObject({ amountCents: 10_325 });
    expect(await moved()).toHaveLength(2);
    await inAgreement(id);
  });
  test('after the end, with a key: 504, and the retry gets the result', async () => {
    const id = await charged();
    const key = house.key();
    house.appends.failAfter('ReversalEnded', unheard);
    expect((await house.clock.hurry(house.refundWithKey(key, id, PARTIAL))).status).toBe(504);
    house.appends.clear();
    expect(read<RefundView>(await house.refundWithKey(key, id, PARTIAL)).data).toMatchObject({ amountCents: 1_000 });
    expect(await moved()).toHaveLength(1);
  });
  test('at the mark of an open attempt: the answer is the same, and the next one waits for 35 s', async () => {
    const id = await charged();
    await ground.bank.arm({ match: { call: 'void' }, ...UNKNOWN });
    house.appends.failBefore('ReconciliationStarted', away);
    expect((await refused(house.clock.hurry(house.refund(id, PARTIAL)))).code).toBe('PAYMENT_TIMEOUT');
    house.appends.clear();
    house.clock.advance(ABANDONED_AFTER_MS);
    expect(await house.refund(id, PARTIAL)).toMatchObject({ amountCents: 1_000 });
    expect(await moved()).toHaveLength(1);
  });
});

describe('the event store takes no writes', () => {
  test('before the intent: 503 at once with a key, nothing is sent, and the key can be used again', async () => {
    const id = await charged();
    const key = house.key();
    house.appends.failBefore('RefundRequested', readOnly);
    expect(read(await house.refundWithKey(key, id, PARTIAL))).toMatchObject({ status: 503, code: 'IDEMPOTENCY_UNAVAILABLE' });
    expect(await moved()).toEqual([]);
    house.appends.clear();
    expect((await house.refundWithKey(key, id, PARTIAL)).status).toBe(200);
    expect(await moved()).toHaveLength(1);
  });
  test('after the gateway call: 504, and the retry gets the result', async () => {
    const id = await charged();
    const key = house.key();
    house.appends.failBefore('ReversalEnded', readOnly);
    expect((await house.clock.hurry(house.refundWithKey(key, id, PARTIAL))).status).toBe(504);
    house.appends.clear();
    expect((await house.refundWithKey(key, id, PARTIAL)).status).toBe(200);
    expect(await moved()).toHaveLength(1);
  });
  test('a retry of a refund that is done, which cannot be recorded as told: 504, never "nothing was refunded"', async () => {
    const id = await charged();
    const key = house.key();
    house.appends.failAfter('ReversalEnded', unheard);
    expect((await house.clock.hurry(house.refundWithKey(key, id, PARTIAL))).status).toBe(504);
    house.appends.clear();
    await eventually(async () => (await attempts(id))[0]!.fenced);
    house.appends.failBefore('ReversalAcknowledged', readOnly);
    expect((await house.clock.hurry(house.refundWithKey(key, id, PARTIAL))).status).toBe(504);
    house.appends.clear();
    expect((await house.refundWithKey(key, id, PARTIAL)).status).toBe(200);
    expect(await moved()).toHaveLength(1);
  });
  test('while an earlier refund is open: 503 at once', async () => {
    const id = await charged();
    await ground.bank.arm({ match: { call: 'void' }, ...UNKNOWN });
    house.appends.failBefore('ReconciliationStarted', away);
    await refused(house.clock.hurry(house.refund(id, PARTIAL)));
    house.appends.clear();
    house.clock.advance(ABANDONED_AFTER_MS);
    house.appends.failBefore('append', readOnly);
    const begun = house.clock.monotonic();
    await expect(house.refund(id, { amountCents: 2_000 })).rejects.toThrow(ReadOnly);
    expect(house.clock.monotonic() - begun).toBeLessThan(1_000);
  });
});

describe('a 5xx, although the log says otherwise', () => {
  test('C18: an outcome that was appended without an answer ends in 504; the repeat without a key gets that refund instead of a second one', async () => {
    const id = await charged();
    house.appends.failAfter('ReversalEnded', unheard);
    expect((await refused(house.clock.hurry(house.refund(id, PARTIAL)))).status).toBe(504);
    house.appends.clear();
    await eventually(async () => (await attempts(id))[0]!.fenced);
    await house.refund(id, PARTIAL);
    expect(await moved()).toHaveLength(1);
    // Only one repeat gets the result. The next request counts as a new one.
    await house.refund(id, PARTIAL);
    expect(await moved()).toHaveLength(2);
  });
  test('C27: a void that must be retried, with a fee that turns out to be voided, is answered whole under the same key (C15 gives the key back)', async () => {
    const id = await charged();
    const key = house.key();
    await ground.bank.arm({ match: { call: 'void', leg: 'fee' }, ...UNKNOWN });
    expect(read(await house.voidWithKey(key, id))).toMatchObject({ code: 'VOID_FAILED', details: { suggestedAction: 'retry_void' } });
    expect(read(await house.voidWithKey(key, id))).toMatchObject({ status: 200, data: { amountCents: 10_325 } });
  });
});

describe('facts of others in between', () => {
  const dispute = (id: string) => async () => {
    const loaded = await house.ports.streams.load(id);
    await house.ports.streams.execute(
      loaded,
      [
        {
          type: 'OpenDispute',
          at: new Date().toISOString(),
          dispute: {
            disputeId: house.ids.uuid(),
            status: 'debited',
            stage: 'chargeback',
            reasonCode: 'x',
            personal: null,
            disputedAmountCents: 9_000,
            openedOn: '2026-01-01',
            dueDate: '2026-01-20',
          },
        },
      ],
      { actor: { type: 'system', id: 's' }, correlationId: house.ids.uuid() },
      new Deadline(house.clock, REQUEST_DEADLINE_MS),
    );
  };
  test('a dispute before the intent: judged again, refused (C30)', async () => {
    const id = await charged();
    house.appends.before('RefundRequested', dispute(id));
    expect(await refused(house.refund(id, { amountCents: 5_000 }))).toMatchObject({
      code: 'INVALID_STATE',
      message: expect.stringMatching(/: 1000 cents remain$/),
    });
    expect(await moved()).toEqual([]);
  });
  test('a dispute or a settlement before the outcome: the outcome is recorded after it', async () => {
    const id = await charged();
    house.appends.before('PaymentVoided', dispute(id));
    expect(await house.refund(id, { amountCents: 5_000 })).toMatchObject({ amountCents: 5_000 });
    expect((await house.history(id)).slice(-4)).toEqual(['PaymentDisputed', 'PaymentDisputed', 'PaymentVoided', 'ReversalEnded']);
    // 4000 of the 9000 that the dispute takes were returned: staff are told at once which return it was, and which cents (C30).
    const [evidence, ...more] = await staffTaskEvidence(house.store, id, 'dispute_after_return');
    expect(evidence).toMatchObject({ disputes: [{ leg: 'principal', excessCents: 4_000 }], returns: [{ leg: 'principal', cents: 5_000 }] });
    expect(more).toEqual([]);
    const other = await charged();
    house.calls.after('void.principal', () => house.settle(other));
    expect((await house.refund(other, { includeFee: true })).amountCents).toBe(10_325);
    await eventually(async () => (await house.view(other)).status === 'refunded');
  });
});

test('answers are rebuilt byte for byte from the stream (C17, T8)', async () => {
  const id = await charged({ lines: [3333, 3333, 3334] });
  const key = house.key();
  const asked = { ...PARTIAL, reason: 'é' };
  const { idempotency } = house.services;
  Object.assign(house.services, { idempotency: { ...idempotency, finish: () => Promise.reject(new Error('gone')) } });
  const first = await house.refundWithKey(key, id, asked);
  Object.assign(house.services, { idempotency });
  house.clock.advance(5_000);
  await house.refund(id, { amountCents: 1 });
  await ground.pool.query(`update idempotency_key set lease_until = clock_timestamp() - interval '1 second' where key_hash = $1`, [
    house.services.idempotency.name(house.accountId, key).keyHash,
  ]);
  const again = await house.refundWithKey(key, id, asked);
  expect([again.status, again.body]).toEqual([200, first.body]);
  expect(read<PaymentView>(first).status).toBe(200);
});
