/**
 * Tests the event and the answer that follow from each outcome of a charge (docs/contract.md#gateway). A success is answered only after its outcome
 * is durable.
 */
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { ReadOnly } from '#eventstore';
import { Deadline } from '#kernel';
import { eventually } from '../../test/support/eventually.js';
import { read, sent } from '../../test/support/answers.js';
import {
  away,
  CARDS,
  COMBINED,
  FEE,
  type Ground,
  type House,
  openGround,
  openHouse,
  readOnly,
  refused,
  unheard,
} from '../../test/support/payments.js';
import { aboutLeg, charge } from './charge.js';
import { chargeOnce } from './commands.js';
import { GATEWAY_CALL_MS, REQUEST_DEADLINE_MS } from './gateway/call.js';
import type { PaymentTerms } from './payment.js';
import type { PaymentView } from './payment.view.js';

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

const failing = async (asked: Parameters<House['charge']>[0] = {}) => {
  const paymentId = house.ids.uuid();
  return { paymentId, refusal: await refused(house.charge(asked, paymentId)) };
};
const charges = async () => (await house.truth()).filter(({ op }) => op === 'charge');
const resolve = (paymentId: string) => {
  house.clock.advance(60_000);
  return house.recovery.resolve(paymentId);
};

describe('approved', () => {
  test('separate: principal, then fee at its own account; 200 with the payment of the stream', async () => {
    const view = await house.charge({ lines: [3333, 3333, 3334] });
    expect(view).toMatchObject({
      status: 'succeeded',
      amountCents: 10_000,
      serviceFeeCents: 325,
      capturedAmountCents: 10_325,
      portalId: house.portalId,
    });
    expect(view.confirmationNumber).toMatch(/^[0-9A-HJKMNP-TV-Z]{4}-[0-9A-HJKMNP-TV-Z]{4}-[0-9A-HJKMNP-TV-Z]{2}$/);
    expect(view.lineItems.map((line) => line.serviceFeeCents)).toEqual([108, 108, 109]);
    expect(await house.view(view.id)).toEqual(view);
    expect(await house.history(view.id)).toEqual(['PaymentInitiated', 'PaymentCreated']);
    const [principal, fee] = await charges();
    expect([principal, fee].map((one) => [one!.leg, one!.amountCents])).toEqual([
      ['principal', 10_000],
      ['fee', 325],
    ]);
    expect(principal!.merchantAccount).not.toBe(fee!.merchantAccount);
    expect(view.gateway.transactionId).toBe(principal!.transactionId);
  });
  test('combined: one charge', async () => {
    house = await openHouse(ground, COMBINED);
    await house.charge();
    expect((await charges()).map(({ leg, amountCents }) => [leg, amountCents])).toEqual([['combined', 10_325]]);
  });
  test('a fee of 0 is no leg (C35)', async () => {
    house = await openHouse(ground, { ...FEE, flatCents: 0, percentBps: 0 });
    expect(await house.charge()).toMatchObject({ serviceFeeCents: 0, totalChargedCents: 10_000 });
    expect((await charges()).map(({ leg }) => leg)).toEqual(['principal']);
  });
  test('the intent is durable, and pending, before the first call (C61)', async () => {
    const paymentId = house.ids.uuid();
    const seen: unknown[] = [];
    house.calls.before('charge.principal', async () => seen.push((await house.view(paymentId)).status, await house.history(paymentId)));
    await house.charge({}, paymentId);
    expect(seen).toEqual(['pending', ['PaymentInitiated']]);
  });
  test('no card data reaches the stream, the log or the answer', async () => {
    const { id } = await house.charge({ card: CARDS.approved });
    const declined = await failing({ card: CARDS.declined });
    const written = JSON.stringify([
      (await house.events(id)).map(({ data, meta }) => [data, meta]),
      (await house.events(declined.paymentId)).map(({ data }) => data),
      house.logged,
    ]);
    for (const secret of [CARDS.approved, CARDS.declined, '"987"']) expect(written).not.toContain(secret);
  });
});

test('lines carry the coding that their portal names, from the next charge on, and no answer shows it', async () => {
  const withMetadata = async (metadata: Readonly<Record<string, string | number>> | null) => {
    const request = { ...house.request({ lines: [6_000, 4_000] }) };
    const lineItems = request.lineItems.map((line, index) => ({ ...line, metadata: index === 0 ? metadata : null }));
    const paymentId = house.ids.uuid();
    const attempt = { paymentId, attemptId: house.ids.uuid(), idempotency: null };
    const origin = { actor: { type: 'partner', id: house.accountId }, correlationId: house.ids.uuid() } as const;
    const { view } = await charge(house.ports, { ...request, lineItems }, attempt, origin, new Deadline(house.clock, 20_000));
    expect(JSON.stringify([view, await house.view(paymentId)])).not.toContain('coding');
    const [initiated] = await house.events(paymentId);
    return (initiated!.data as unknown as PaymentTerms).lineItems.map(({ coding }) => coding);
  };
  expect(await withMetadata({ fund: '402' })).toEqual([null, null]);
  await house.administration.setCoding(house.portalId, ['fund', 'gl']);
  await house.project();
  expect(await withMetadata({ fund: '402', gl: 40_100, ward: 'north' })).toEqual([{ fund: '402', gl: '40100' }, null]);
  expect(await withMetadata({ fund: 'paid by Alex Rivera' })).toEqual([null, null]);
});

describe('definite outcomes (C43, C54)', () => {
  test.each([
    [CARDS.declined, 'generic_decline', 'not_checked', 'match'],
    [CARDS.insufficientFunds, 'insufficient_funds', 'not_checked', 'match'],
    ['4000000000006975', 'card_limit_exceeded', 'not_checked', 'match'],
    ['4000000000000069', 'expired_card', 'not_checked', 'match'],
    [CARDS.cvvMismatch, 'cvv_mismatch', 'not_checked', 'no_match'],
    ['4000007770004619', 'postal_code_mismatch', 'no_match', 'match'],
  ])('declined %s → failed, 402 %s; the event has what the gateway said of AVS (%s) and CVV (%s)', async (card, declineCode, avs, cvv) => {
    const { paymentId, refusal } = await failing({ card });
    expect(refusal).toMatchObject({ code: 'PAYMENT_DECLINED', status: 402, details: { id: paymentId, declineCode } });
    expect(await house.view(paymentId)).toMatchObject({ status: 'failed', capturedAmountCents: 0, confirmationNumber: null });
    expect(await house.history(paymentId)).toEqual(['PaymentInitiated', 'PaymentDeclined']);
    expect((await house.events(paymentId)).at(-1)).toMatchObject({ v: 4, data: { declineCode, avs, cvv } });
    expect(await house.balance()).toBe(0);
  });
  test.each([
    ['the gateway says that it did not process it', { card: CARDS.gatewayError }],
    ['a token that the gateway fails on', { token: 'tok_sandbox_gateway_error' }],
  ])('%s → failed, 502', async (_, asked) => {
    const { paymentId, refusal } = await failing(asked);
    expect(refusal).toMatchObject({ code: 'PAYMENT_GATEWAY_ERROR', status: 502, details: { id: paymentId } });
    expect(await house.history(paymentId)).toEqual(['PaymentInitiated', 'PaymentFailed']);
    expect(await house.balance()).toBe(0);
  });
  test('a clear refusal that executed nothing → failed, 502', async () => {
    await ground.bank.arm({ match: { call: 'charge' }, answer: 'disabled' });
    const { paymentId, refusal } = await failing();
    expect([refusal.code, (await house.view(paymentId)).status, await house.balance()]).toEqual(['PAYMENT_GATEWAY_ERROR', 'failed', 0]);
  });
  test('never sent, since no time was left for a call (C42) → failed, 502', async () => {
    house.appends.after('PaymentInitiated', () => house.clock.advance(REQUEST_DEADLINE_MS - 1_000));
    const { paymentId, refusal } = await failing();
    expect([refusal.code, (await house.view(paymentId)).status, (await house.truth()).length]).toEqual(['PAYMENT_GATEWAY_ERROR', 'failed', 0]);
  });
});

describe('anything else → unknown, 504 with the id (C42, C43), undone by recovery (C29)', () => {
  const expectUnknown = async ({ paymentId, refusal }: Awaited<ReturnType<typeof failing>>) => {
    expect(refusal).toMatchObject({ code: 'PAYMENT_TIMEOUT', status: 504, details: { id: paymentId } });
    expect(await house.view(paymentId)).toMatchObject({ status: 'unknown', capturedAmountCents: 0, confirmationNumber: null, capturedAt: null });
    expect(await house.history(paymentId)).toEqual(['PaymentInitiated', 'PaymentOutcomeUnknown']);
  };
  test.each([
    ['cut before the commit', { effect: false, answer: 'cut' }, 0],
    ['cut after the commit', { answer: 'cut' }, 10_000],
    ['garbage', { answer: 'not_json' }, 10_000],
    ['fields missing', { answer: 'missing_fields' }, 10_000],
    ['the answer of another reference', { answer: 'other_reference' }, 10_000],
    ['larger than an answer may be', { answer: 'oversized' }, 10_000],
    ['a bare 500', { answer: 'bare_500' }, 10_000],
  ] as const)('%s', async (_, fault, charged) => {
    await ground.bank.arm({ match: { call: 'charge', leg: 'principal' }, ...fault });
    const attempt = await failing();
    await expectUnknown(attempt);
    expect(await house.balance()).toBe(charged);
    expect(await resolve(attempt.paymentId)).toBe('resolved');
    expect([(await house.view(attempt.paymentId)).status, await house.balance()]).toEqual(['voided', 0]);
  });
  test.each([
    ['incomplete, and the charge stands', { card: CARDS.unreadable }, 10_000],
    ['incomplete, by token', { token: 'tok_sandbox_incomplete_response' }, 10_000],
    ['incomplete, and it never reached the processor', { card: CARDS.neverReached }, 0],
  ])('fixture: %s', async (_, asked, charged) => {
    const attempt = await failing(asked);
    await expectUnknown(attempt);
    expect(await house.balance()).toBe(charged);
    expect(await resolve(attempt.paymentId)).toBe('resolved');
    expect([(await house.view(attempt.paymentId)).status, await house.balance()]).toEqual(['voided', 0]);
  });
  test('no answer within 20 s; the charge that arrives afterwards finds its reference finalised', async () => {
    const harmed = await ground.bank.harmedCalls();
    await ground.bank.arm({ match: { call: 'charge' }, delayBeforeMs: 1_000 });
    const call = failing();
    await eventually(async () => (await ground.bank.harmedCalls()) > harmed);
    house.clock.advance(GATEWAY_CALL_MS);
    const attempt = await call;
    await expectUnknown(attempt);
    expect(await resolve(attempt.paymentId)).toBe('resolved');
    expect(await house.view(attempt.paymentId)).toMatchObject({ status: 'voided', capturedAmountCents: 0 });
    const before = (await house.truth()).length;
    await new Promise((done) => setTimeout(done, 1_200));
    expect([(await house.truth()).length, await house.balance()]).toEqual([before, 0]);
  });
});

describe('the two legs of a charge (C41)', () => {
  test('fee declined → the principal is voided → failed, 402', async () => {
    const { paymentId, refusal } = await failing({ card: CARDS.feeDeclined });
    expect(refusal).toMatchObject({ code: 'PAYMENT_DECLINED', details: { id: paymentId, declineCode: 'generic_decline' } });
    expect(await house.history(paymentId)).toEqual(['PaymentInitiated', 'PaymentDeclined']);
    expect((await house.truth()).map(({ op, leg, result }) => [op, leg, result])).toEqual([
      ['charge', 'principal', 'approved'],
      ['charge', 'fee', 'declined'],
      ['void', 'principal', 'approved'],
    ]);
    expect(await house.balance()).toBe(0);
    // Every movement of money is in the log, even a charge that was voided right after it.
    const [charged, , undone] = await house.truth();
    expect((await house.events(paymentId)).at(-1)!.data).toMatchObject({
      takenBack: [{ leg: 'principal', amountCents: 10_000, transactionId: charged!.transactionId, voidTransactionId: undone!.transactionId }],
    });
  });
  test('fee certainly not processed → the principal is voided → failed, 502', async () => {
    await ground.bank.arm({ match: { call: 'charge', leg: 'fee' }, answer: 'disabled' });
    const { paymentId, refusal } = await failing();
    expect([refusal.code, (await house.view(paymentId)).status, await house.balance()]).toEqual(['PAYMENT_GATEWAY_ERROR', 'failed', 0]);
  });
  test.each([
    ['executed', { answer: 'cut' }, 10_325],
    ['not executed', { effect: false, answer: 'cut' }, 10_000],
  ] as const)('fee unknown (%s) → 504, nothing is voided by the request; recovery undoes both legs', async (_, fault, held) => {
    await ground.bank.arm({ match: { call: 'charge', leg: 'fee' }, ...fault });
    const { paymentId, refusal } = await failing();
    expect([refusal.code, (await house.view(paymentId)).status, await house.balance()]).toEqual(['PAYMENT_TIMEOUT', 'unknown', held]);
    expect(await resolve(paymentId)).toBe('resolved');
    expect([(await house.view(paymentId)).status, await house.balance()]).toEqual(['voided', 0]);
  });
  test.each([
    ['fails without effect', { effect: false, answer: 'cut' }, 10_000],
    ['is lost after its effect', { answer: 'cut' }, 0],
    ['is refused for now', { answer: 'disabled' }, 10_000],
  ] as const)('fee declined and the void of the principal %s → 504; recovery goes on under the same reference', async (_, fault, held) => {
    await ground.bank.arm({ match: { call: 'void' }, ...fault });
    const { paymentId, refusal } = await failing({ card: CARDS.feeDeclined });
    expect([refusal.code, (await house.view(paymentId)).status, await house.balance()]).toEqual(['PAYMENT_TIMEOUT', 'unknown', held]);
    expect(await resolve(paymentId)).toBe('resolved');
    expect([(await house.view(paymentId)).status, await house.balance()]).toEqual(['voided', 0]);
    const voids = (await house.truth()).filter(({ op, result }) => op === 'void' && result === 'approved');
    expect(voids).toHaveLength(1);
  });
  test('no time is left for the fee → nothing is sent, and the principal goes back by recovery', async () => {
    house.calls.after('charge.principal', () => house.clock.advance(REQUEST_DEADLINE_MS - 1_000));
    const { paymentId, refusal } = await failing();
    expect([refusal.code, await house.balance()]).toEqual(['PAYMENT_TIMEOUT', 10_000]);
    await resolve(paymentId);
    expect([(await house.view(paymentId)).status, await house.balance()]).toEqual(['voided', 0]);
    expect((await charges()).map(({ leg }) => leg)).toEqual(['principal']);
  });
});

describe('the event store fails', () => {
  test('before the intent: nothing is sent', async () => {
    house.appends.failBefore('PaymentInitiated', away);
    const paymentId = house.ids.uuid();
    await expect(house.clock.hurry(house.charge({}, paymentId))).rejects.toThrow('the store is away');
    expect([await house.history(paymentId), await house.truth()]).toEqual([[], []]);
  });
  test('once, before or after the intent: it is repeated, and appended once', async () => {
    for (const fail of ['failBefore', 'failAfter'] as const) {
      house.appends[fail]('PaymentInitiated', fail === 'failBefore' ? away : unheard, 1);
      const { id } = await house.charge();
      expect(await house.history(id)).toEqual(['PaymentInitiated', 'PaymentCreated']);
    }
  });
  test('the intent was appended and its answer was lost: nothing is sent, and recovery finds that no charge was made', async () => {
    house.appends.failAfter('PaymentInitiated', unheard);
    const paymentId = house.ids.uuid();
    expect((await refused(house.clock.hurry(house.charge({}, paymentId)))).code).toBe('PAYMENT_TIMEOUT');
    expect([(await house.view(paymentId)).status, await house.truth()]).toEqual(['pending', []]);
    house.appends.clear();
    expect(await resolve(paymentId)).toBe('resolved');
    expect(await house.view(paymentId)).toMatchObject({ status: 'voided', capturedAmountCents: 0 });
  });
  test.each([
    ['approved', {}, 10_325],
    ['declined', { card: CARDS.declined }, 0],
    ['not processed', { card: CARDS.gatewayError }, 0],
    ['unknown', { card: CARDS.unreadable }, 10_000],
  ] as const)('before the outcome (%s): 504, never the outcome itself; recovery resolves it', async (outcome, asked, held) => {
    const paymentId = house.ids.uuid();
    house.appends.after('PaymentInitiated', () => house.appends.failBefore('append', away));
    const refusal = await refused(house.clock.hurry(house.charge(asked, paymentId)));
    expect([refusal.code, refusal.details.id, await house.history(paymentId)]).toEqual(['PAYMENT_TIMEOUT', paymentId, ['PaymentInitiated']]);
    expect(await house.balance()).toBe(held);
    house.appends.clear();
    expect(await resolve(paymentId)).toBe('resolved');
    expect([(await house.view(paymentId)).status, await house.balance()]).toEqual([outcome === 'declined' ? 'failed' : 'voided', 0]);
  });
  test('after the outcome, for good: 504, and the payment may yet read succeeded (C29)', async () => {
    house.appends.failAfter('PaymentCreated', unheard);
    const paymentId = house.ids.uuid();
    expect((await refused(house.clock.hurry(house.charge({}, paymentId)))).code).toBe('PAYMENT_TIMEOUT');
    expect([(await house.view(paymentId)).status, await house.balance()]).toEqual(['succeeded', 10_325]);
    house.appends.clear();
    expect(await resolve(paymentId)).toBe('resolved');
    expect([(await house.view(paymentId)).status, await house.balance()]).toEqual(['succeeded', 10_325]);
  });
  test('after the outcome, once: it is repeated → 200', async () => {
    house.appends.failAfter('PaymentCreated', unheard, 1);
    const view = await house.charge();
    expect([view.status, await house.history(view.id)]).toEqual(['succeeded', ['PaymentInitiated', 'PaymentCreated']]);
  });
});

describe('the event store takes no writes', () => {
  const lostThenReadOnly = (type: string) =>
    house.appends.after(type, () => {
      house.appends.failBefore('append', readOnly);
      throw unheard();
    });
  test('before the intent: refused at once, nothing is sent, and the attempt is not counted', async () => {
    house.appends.failBefore('PaymentInitiated', readOnly);
    const paymentId = house.ids.uuid();
    const begun = house.clock.monotonic();
    await expect(house.charge({}, paymentId)).rejects.toThrow(ReadOnly);
    expect(house.clock.monotonic() - begun).toBeLessThan(1_000);
    expect([await house.history(paymentId), await house.truth()]).toEqual([[], []]);
  });
  test('after an intent whose answer was lost: 504, and the gateway gets no call', async () => {
    lostThenReadOnly('PaymentInitiated');
    const paymentId = house.ids.uuid();
    expect((await refused(house.clock.hurry(house.charge({}, paymentId)))).code).toBe('PAYMENT_TIMEOUT');
    expect([await house.history(paymentId), await house.truth()]).toEqual([['PaymentInitiated'], []]);
  });
  test('before the outcome, for a moment: it is repeated → 200', async () => {
    house.appends.failBefore('PaymentCreated', readOnly, 3);
    const view = await house.clock.hurry(house.charge());
    expect([view.status, await house.history(view.id)]).toEqual(['succeeded', ['PaymentInitiated', 'PaymentCreated']]);
  });
  test('before the outcome, for good: 504, and recovery resolves it', async () => {
    const paymentId = house.ids.uuid();
    house.appends.failBefore('PaymentCreated', readOnly);
    expect((await refused(house.clock.hurry(house.charge({}, paymentId)))).code).toBe('PAYMENT_TIMEOUT');
    expect([await house.history(paymentId), await house.balance()]).toEqual([['PaymentInitiated'], 10_325]);
    house.appends.clear();
    expect(await resolve(paymentId)).toBe('resolved');
    expect([(await house.view(paymentId)).status, await house.balance()]).toEqual(['voided', 0]);
  });
  test('after an outcome whose answer was lost: the log holds it → 200', async () => {
    lostThenReadOnly('PaymentCreated');
    const view = await house.clock.hurry(house.charge());
    expect([view.status, await house.history(view.id)]).toEqual(['succeeded', ['PaymentInitiated', 'PaymentCreated']]);
  });
});

/** The charge is answered with 504, its stream holds only the intent, and recovery undoes it. */
const isLeftToRecovery = async (paymentId: string): Promise<void> => {
  expect((await refused(house.charge({}, paymentId))).code).toBe('PAYMENT_TIMEOUT');
  expect(await house.history(paymentId)).toEqual(['PaymentInitiated']);
  expect(await resolve(paymentId)).toBe('resolved');
  expect([(await house.view(paymentId)).status, await house.balance()]).toEqual(['voided', 0]);
};

describe('a process that stood still for minutes', () => {
  const STOOD_STILL_MS = REQUEST_DEADLINE_MS + 61_000;
  test('before the outcome: it appends nothing, even if the revision fits; recovery resolves the payment', async () => {
    const paymentId = house.ids.uuid();
    house.calls.after('charge.fee', () => house.clock.advance(STOOD_STILL_MS));
    await isLeftToRecovery(paymentId);
  });
  test('between two tries of an append: it does not try again', async () => {
    const paymentId = house.ids.uuid();
    const standStill = () => {
      house.clock.advance(STOOD_STILL_MS);
      return unheard();
    };
    house.appends.failBefore('PaymentCreated', standStill, 1);
    expect((await refused(house.charge({}, paymentId))).code).toBe('PAYMENT_TIMEOUT');
    expect(await house.history(paymentId)).toEqual(['PaymentInitiated']);
  });
});

describe('fenced while in flight', () => {
  const fenced: [string, (paymentId: string) => void][] = [
    ['before the principal is sent', (id) => house.calls.before('charge.principal', () => resolve(id))],
    ['after the principal was approved', (id) => house.calls.after('charge.principal', () => resolve(id))],
    ['before the fee is sent', (id) => house.calls.before('charge.fee', () => resolve(id))],
    ['after the fee was approved', (id) => house.calls.after('charge.fee', () => resolve(id))],
    ['before the outcome is appended', (id) => house.appends.before('PaymentCreated', () => resolve(id))],
  ];
  test.each(fenced)('%s: 504, never 200; nothing stays charged, nothing is recorded after recovery', async (_, interpose) => {
    const paymentId = house.ids.uuid();
    interpose(paymentId);
    const refusal = await refused(house.charge({}, paymentId));
    expect(refusal).toMatchObject({ code: 'PAYMENT_TIMEOUT', details: { id: paymentId } });
    const history = await house.history(paymentId);
    expect(history.slice(0, 2)).toEqual(['PaymentInitiated', 'ReconciliationStarted']);
    expect(new Set(history.slice(2))).toEqual(new Set(['PaymentVoided']));
    expect([(await house.view(paymentId)).status, await house.balance()]).toEqual(['voided', 0]);
  });
  test('a decline that comes after the fence is recovery’s to record', async () => {
    const paymentId = house.ids.uuid();
    house.calls.after('charge.principal', () => resolve(paymentId));
    expect((await refused(house.charge({ card: CARDS.declined }, paymentId))).code).toBe('PAYMENT_TIMEOUT');
    expect(await house.history(paymentId)).toEqual(['PaymentInitiated', 'ReconciliationStarted', 'PaymentDeclined']);
  });
  test.each(['principal', 'fee'] as const)(
    'the reference of the %s was finalised without a fence on the stream: 504 all the same, nothing recorded',
    async (leg) => {
      const paymentId = house.ids.uuid();
      house.calls.before(`charge.${leg}`, async () => {
        const state = await house.state(paymentId);
        if (state.phase !== 'pending') throw new Error(state.phase);
        const terms = state.terms.legs.find((one) => one.leg === leg)!;
        await house.ports.gateways.find(terms.account)!.finalize(aboutLeg(state, terms, 'charge'), AbortSignal.timeout(5_000));
      });
      await isLeftToRecovery(paymentId);
    },
  );
  test('the reversal between the legs wakes late: recovery undid the principal once, under the same reference', async () => {
    const paymentId = house.ids.uuid();
    house.calls.before('void.principal', () => resolve(paymentId));
    expect((await refused(house.charge({ card: CARDS.feeDeclined }, paymentId))).code).toBe('PAYMENT_TIMEOUT');
    expect((await house.truth()).filter(({ op, result }) => op === 'void' && result === 'approved')).toHaveLength(1);
    expect([(await house.view(paymentId)).status, await house.balance()]).toEqual(['voided', 0]);
  });
});

describe('with a key', () => {
  const leaseEnds = (key: string) =>
    ground.pool.query(`update idempotency_key set lease_until = clock_timestamp() - interval '1 second' where key_hash = $1`, [
      house.services.idempotency.name(house.accountId, key).keyHash,
    ]);
  /** Sends a create whose key store fails right before the key is finished. The key stays in progress, as if its owner had vanished. */
  const unsettled = (key: string, asked = {}) => {
    const idempotency = { ...house.services.idempotency, finish: () => Promise.reject(new Error('gone')) };
    return sent(chargeOnce({ ...house.services, idempotency }, house.request(asked), house.received(key, asked)));
  };

  test('one charge, however often it is asked; every replay byte for byte (T3)', async () => {
    const key = house.key();
    const first = await house.chargeWithKey(key);
    const [second, third] = await Promise.all([house.chargeWithKey(key), house.chargeWithKey(key)]);
    expect([first.status, second.body, third.body, second.replayed]).toEqual([200, first.body, first.body, true]);
    expect(await charges()).toHaveLength(2);
  });
  test('a decline is replayed; a 502 and a 504 leave the key reserved with the payment’s id (C15, C16)', async () => {
    const declined = house.key();
    const first = await house.chargeWithKey(declined, { card: CARDS.declined });
    expect(await house.chargeWithKey(declined, { card: CARDS.declined })).toMatchObject({ status: 402, body: first.body, replayed: true });
    for (const card of [CARDS.gatewayError, CARDS.unreadable]) {
      const key = house.key();
      const failed = read(await house.chargeWithKey(key, { card }));
      expect(read(await house.chargeWithKey(key, { card })).details).toEqual({ id: failed.details.id });
    }
  });
  test('a refusal gives the key back (C15): the same key charges another card', async () => {
    const key = house.key();
    expect((await house.chargeWithKey(key, { expiry: { month: 1, year: 2020 } })).status).toBe(400);
    expect((await house.chargeWithKey(key)).status).toBe(200);
  });
  test('replay beats state: portal revoked, case blocked, card expired (docs/contract.md#order-of-evaluation)', async () => {
    const key = house.key();
    const asked = { referenceId: 'CASE-7' };
    const first = await house.chargeWithKey(key, asked);
    await house.administration.revokeAccess(house.portalId, house.accountId);
    await house.administration.restrictCase({ portalId: house.portalId, referenceId: 'CASE-7', kind: 'block', until: null, reason: null });
    await house.project();
    house.clock.advance(20 * 366 * 86_400_000);
    expect(await house.chargeWithKey(key, asked)).toMatchObject({ body: first.body, replayed: true });
  });
  test.each([
    ['succeeded', {}, 200],
    ['declined', { card: CARDS.declined }, 402],
  ] as const)('S5: never finished, %s: the takeover makes the same bytes, also after later changes', async (_, asked, status) => {
    const key = house.key();
    const first = await unsettled(key, asked);
    expect(first.status).toBe(status);
    if (status === 200) await house.refund(read<PaymentView>(first).data.id, { amountCents: 100 });
    expect(read(await house.chargeWithKey(key, asked)).code).toBe('IDEMPOTENCY_IN_PROGRESS');
    await leaseEnds(key);
    expect(await house.chargeWithKey(key, asked)).toMatchObject({ status, body: first.body, replayed: true });
    expect(await house.chargeWithKey(key, asked)).toMatchObject({ status, body: first.body, replayed: true });
  });
  test('S5: never finished, failed or unknown: reconciliation, with the id', async () => {
    for (const card of [CARDS.gatewayError, CARDS.unreadable]) {
      const key = house.key();
      const first = read(await unsettled(key, { card }));
      await leaseEnds(key);
      const refusal = read(await house.chargeWithKey(key, { card }));
      expect([refusal.code, refusal.details]).toEqual(['IDEMPOTENCY_RECONCILIATION_REQUIRED', { id: first.details.id }]);
    }
  });
  test('S1: claimed and vanished before the intent: the stream is fenced, no id, and the late owner can never begin (C64)', async () => {
    const key = house.key();
    let taken: ReturnType<typeof read> | undefined;
    house.appends.before('PaymentInitiated', async () => {
      await leaseEnds(key);
      taken = read(await house.chargeWithKey(key));
    });
    const late = await house.chargeWithKey(key);
    expect(taken).toMatchObject({
      code: 'IDEMPOTENCY_RECONCILIATION_REQUIRED',
      details: {},
      message: 'Nothing was charged. Use a new key.',
    });
    expect(read(late).code).toBe('IDEMPOTENCY_RECONCILIATION_REQUIRED');
    expect(await house.truth()).toEqual([]);
    expect(read(await house.chargeWithKey(key)).details).toEqual({});
  });
  test.each(['charge.principal', 'charge.fee'])(
    'S2, S4: taken over while %s is on its way: fenced, reserved, undone; the late owner answers 504',
    async (call) => {
      const key = house.key();
      let taken: ReturnType<typeof read> | undefined;
      house.calls.before(call, async () => {
        await leaseEnds(key);
        taken = read(await house.chargeWithKey(key));
      });
      const late = read(await house.chargeWithKey(key));
      expect([late.status, late.code]).toEqual([504, 'PAYMENT_TIMEOUT']);
      expect(taken).toMatchObject({ code: 'IDEMPOTENCY_RECONCILIATION_REQUIRED', details: { id: late.details.id } });
      const paymentId = late.details.id as string;
      expect((await house.history(paymentId)).slice(0, 2)).toEqual(['PaymentInitiated', 'ReconciliationStarted']);
      expect(await resolve(paymentId)).toBe('resolved');
      expect([(await house.view(paymentId)).status, await house.balance()]).toEqual(['voided', 0]);
      // C16: this key never charges again.
      expect(read(await house.chargeWithKey(key)).details).toEqual({ id: paymentId });
    },
  );
  test('the taker cannot read or fence the stream: 409 in progress, later the truth (T7)', async () => {
    const key = house.key();
    house.appends.failBefore('PaymentOutcomeUnknown', () => new Error('the process died'), 1);
    await unsettled(key, { card: CARDS.unreadable });
    await leaseEnds(key);
    house.appends.failBefore('ReconciliationStarted', () => new Error('a broken store'), 1);
    expect(read(await house.chargeWithKey(key, { card: CARDS.unreadable })).code).toBe('IDEMPOTENCY_IN_PROGRESS');
    await leaseEnds(key);
    expect(read(await house.chargeWithKey(key, { card: CARDS.unreadable })).code).toBe('IDEMPOTENCY_RECONCILIATION_REQUIRED');
  });
});

describe('refusals before anything begins (E7 to E11)', () => {
  const nothingHappened = async () => {
    const types: string[] = [];
    for await (const events of house.store.readAll(null, { streamPrefixes: ['payment-'] })) types.push(...events.map(({ type }) => type));
    expect([types, await house.truth()]).toEqual([[], []]);
  };
  const block = (kind: 'block' | 'hold', until: string | null = null) =>
    house.administration.restrictCase({ portalId: house.portalId, referenceId: 'CASE-7', kind, until, reason: null });
  /** Each row changes the configuration, and all changes stay in force. The newest change is checked before the earlier ones. */
  const worse: [string, number, () => Promise<unknown>][] = [
    ['PAYMENT_NOT_ALLOWED', 422, () => house.administration.setRules(house.portalId, { maxCents: 9_999 })],
    ['PAYMENT_HELD', 409, () => block('hold')],
    ['PAYMENT_BLOCKED', 403, () => block('block')],
    ['GATEWAY_NOT_CONFIGURED', 503, () => house.administration.setGateway(house.portalId, 'none')],
    ['PORTAL_ACCESS_DENIED', 403, () => house.administration.revokeAccess(house.portalId, house.accountId)],
  ];
  test('in the documented order, each hiding the later ones', async () => {
    for (const [code, status, make] of worse) {
      await make();
      await house.project();
      expect(await refused(house.charge({ referenceId: 'CASE-7' }))).toMatchObject({ code, status });
    }
    expect(await refused(house.charge({ referenceId: 'CASE-7', expiry: { month: 1, year: 2020 } }))).toMatchObject({ code: 'VALIDATION_ERROR' });
    await nothingHappened();
  });
  test('an unknown portal and one of others give the same answer', async () => {
    const other = await openHouse(ground);
    const answers = await Promise.all([house.ids.uuid(), other.portalId].map((portalId) => refused(house.charge({ portalId }))));
    expect(answers[0]).toEqual(answers[1]);
    expect(answers[0]!.code).toBe('PORTAL_ACCESS_DENIED');
  });
  test('a deactivated account charges nothing (C66)', async () => {
    await house.administration.deactivateAccount(house.accountId);
    await house.project();
    expect((await refused(house.charge())).code).toBe('PORTAL_ACCESS_DENIED');
    await nothingHappened();
  });
  test('a hold ends by itself, and says when', async () => {
    const until = new Date(house.clock.now() + 60_000).toISOString();
    await block('hold', until);
    await house.project();
    expect(await refused(house.charge({ referenceId: 'CASE-7' }))).toMatchObject({ code: 'PAYMENT_HELD', details: { retryAt: until } });
    house.clock.advance(60_000);
    expect((await house.charge({ referenceId: 'CASE-7' })).status).toBe('succeeded');
  });
  test('only the payment-level referenceId is looked at (Errors 2)', async () => {
    await block('block');
    await house.project();
    expect((await house.charge({ referenceId: 'CASE-8' })).status).toBe('succeeded');
    expect((await house.charge()).status).toBe('succeeded');
  });
  test('a look-alike of a restricted referenceId is refused; the strictest restriction counts (C70)', async () => {
    const restrict = (referenceId: string, kind: 'block' | 'hold') =>
      house.administration.restrictCase({ portalId: house.portalId, referenceId, kind, until: null, reason: null });
    await restrict('CASÉ-7 A', 'block');
    await restrict('casé-7 a', 'hold');
    await house.project();
    for (const referenceId of ['CASE\u0301-7 A', 'casé-7 a', 'CASÉ-7  A', 'CASÉ-7\u00A0A ', 'CASÉ\u20117 A', 'CAS\u200BÉ-7 A'])
      expect([referenceId, await refused(house.charge({ referenceId }))]).toMatchObject([referenceId, { code: 'PAYMENT_BLOCKED', status: 403 }]);
    await nothingHappened();
  });
  test.each([
    [{ minCents: 10_001 }, /from 10001 cents/],
    [{ maxCents: 9_999 }, /up to 9999 cents/],
    [{ brands: ['amex' as const] }, /card brand/],
  ])('the portal’s rules: %j (C70)', async (rules, message) => {
    await house.administration.setRules(house.portalId, rules);
    await house.project();
    expect(await refused(house.charge())).toMatchObject({ code: 'PAYMENT_NOT_ALLOWED', message: expect.stringMatching(message) });
    await nothingHappened();
  });
  test('bounds of the rules are inclusive', async () => {
    await house.administration.setRules(house.portalId, { minCents: 10_000, maxCents: 10_000, brands: ['visa'] });
    await house.project();
    expect((await house.charge()).status).toBe('succeeded');
  });
  test('a card is good while it is its month anywhere on earth (C5)', async () => {
    const expiry = { month: 1, year: 2026 };
    house = await openHouse(ground, FEE, '2026-02-01T11:59:58.000Z');
    expect((await house.charge({ expiry })).status).toBe('succeeded');
    house = await openHouse(ground, FEE, '2026-02-01T12:00:00.000Z');
    expect((await refused(house.charge({ expiry }))).code).toBe('VALIDATION_ERROR');
    house = await openHouse(ground, FEE, '2026-01-01T12:00:00.000Z');
    expect((await refused(house.charge({ expiry: { month: 12, year: 2025 } }))).code).toBe('VALIDATION_ERROR');
  });
});
