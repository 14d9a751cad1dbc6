/**
 * Slots at the gateway (C65), over the real simulator. Admission is decided before the intent: a request that is refused has begun nothing, and an
 * attempt that has begun is never refused.
 */
import { afterAll, beforeAll, beforeEach, expect, test } from '@jest/globals';
import { Deadline } from '#kernel';
import { GATEWAY_SLOTS, type GatewaySlotLimits, REQUEST_DEADLINE_MS, reverseByStaff } from '#payments';
import type { Slot, Slots } from '#platform';
import { eventually } from '../../../test/support/eventually.js';
import { CARDS, FEE, type Ground, type House, openGround, openHouse, refused } from '../../../test/support/payments.js';

/** One slot for each of two accounts, and one waiting request in each lane of an account. */
const FEW: GatewaySlotLimits = {
  partners: { ...GATEWAY_SLOTS.partners, slots: 2, waitingAlone: 1, waitingShared: 1 },
  house: { ...GATEWAY_SLOTS.house, slots: 2 },
};

let ground: Ground;
let house: House;
let partners: Slots;
beforeAll(async () => {
  ground = await openGround();
});
afterAll(() => ground.close());
beforeEach(async () => {
  house = await openHouse(ground, FEE, undefined, FEW);
  house.ports.slots.watch((slots, share) => share === 'partners' && (partners = slots));
});

const soon = () => new Deadline(house.clock, REQUEST_DEADLINE_MS);
const reserve = (lane: 'partner' | 'reversal' = 'partner') => house.ports.slots.reserve('simulator', house.accountId, lane, soon());
/** Takes the only slot of the account, and fills the queue of a lane. */
const crowd = async (lane: 'partner' | 'reversal' = 'partner') => {
  const held = await reserve();
  const queued = reserve(lane);
  return {
    held,
    leave: async () => {
      held.release();
      (await queued).release();
    },
  };
};
const isFree = async () => {
  (await house.ports.slots.reserve('simulator', house.accountId, 'partner', new Deadline(house.clock, 0))).release();
};
const logged = async (): Promise<string[]> => {
  const types: string[] = [];
  for await (const events of house.store.readAll(null, { streamPrefixes: ['payment-'] })) types.push(...events.map(({ type }) => type));
  return types;
};
const keyRows = async () => {
  const { rows } = await ground.pool.query<{ state: string; attempt_id: string; fp: Buffer }>(
    'select * from idempotency_key where api_account_id = $1',
    [house.accountId],
  );
  return rows;
};

test('a create beyond the share of its account is refused before its intent, and its key is given back', async () => {
  const { leave } = await crowd();
  const key = house.key();
  const answer = await house.chargeWithKey(key);
  expect(answer).toMatchObject({ status: 429, retryAfterSeconds: 5 });
  expect(JSON.parse(answer.body)).toEqual({ success: false, message: expect.any(String), details: { code: 'RATE_LIMITED' } });
  expect([await logged(), await keyRows(), await house.truth()]).toEqual([[], [], []]);

  await leave();
  // The key can be used with another body, since nothing was begun under it.
  expect(await house.chargeWithKey(key, { lines: [500] })).toMatchObject({ status: 200 });
  expect(await logged()).toEqual(['PaymentInitiated', 'PaymentCreated']);
});

test('an attempt without a slot does not count against the limits of its card (C70)', async () => {
  await house.administration.setLimits(house.portalId, 'card', { attempts: 1, declines: null, windowSeconds: 600, blockSeconds: null });
  await house.project();
  const { leave } = await crowd();
  expect(await refused(house.charge())).toMatchObject({ code: 'RATE_LIMITED' });
  await leave();
  await house.charge();
  expect(await refused(house.charge())).toMatchObject({ code: 'VELOCITY_LIMIT' });
});

test('the refusals E7 to E11 come first', async () => {
  const { leave } = await crowd();
  await house.administration.setRules(house.portalId, { brands: ['amex'] });
  await house.project();
  expect(await refused(house.charge())).toMatchObject({ code: 'PAYMENT_NOT_ALLOWED' });
  await leave();
});

test('a create waits for a slot; after 20 of its 28 s it is refused, and nothing was begun', async () => {
  const held = await reserve();
  const inTime = house.charge();
  await eventually(() => partners.waiting('partner') === 1);
  held.release();
  expect(await inTime).toMatchObject({ status: 'succeeded' });

  const again = await reserve();
  const before = await logged();
  const late = refused(house.charge());
  await eventually(() => partners.waiting('partner') === 1);
  house.clock.advance(20_000);
  expect(await late).toMatchObject({ code: 'RATE_LIMITED' });
  expect(await logged()).toEqual(before);
  again.release();
  await isFree();
});

test('a slot is given back after every end', async () => {
  const payment = await house.charge();
  for (const card of [CARDS.declined, CARDS.gatewayError, CARDS.feeDeclined, CARDS.unreadable]) {
    await refused(house.charge({ card }));
    await isFree();
  }
  const fault = () => new Error('a fault of the store');
  house.appends.failBefore('PaymentInitiated', fault, 1);
  await expect(house.charge()).rejects.toThrow('store');
  await isFree();
  house.calls.failBefore('charge.principal', () => new Error('a fault of the adapter'), 1);
  await expect(house.charge()).rejects.toThrow('adapter');
  await isFree();
  expect(await refused(house.refund(payment.id, { amountCents: 10_001 }))).toMatchObject({ code: 'INVALID_STATE' });
  house.appends.failBefore('RefundRequested', fault, 1);
  await expect(house.refund(payment.id)).rejects.toThrow('store');
  await isFree();
  await house.refund(payment.id);
  await isFree();
});

test.each([
  ['its fee leg', CARDS.approved, ['charge.principal', 'charge.fee']],
  ['taking back', CARDS.feeDeclined, ['charge.principal', 'charge.fee', 'void.principal']],
])('an attempt that has begun keeps its slot for %s', async (_, card, calls) => {
  const made: string[] = [];
  let queued: Promise<Slot> | undefined;
  for (const call of calls)
    house.calls.before(call, async () => {
      made.push(call);
      if (call !== 'charge.fee') return;
      queued = reserve();
      expect(await refused(house.charge())).toMatchObject({ code: 'RATE_LIMITED' });
    });
  await house.charge({ card }).catch(() => undefined);
  expect(made).toEqual(calls);
  expect(await logged()).toEqual(['PaymentInitiated', card === CARDS.approved ? 'PaymentCreated' : 'PaymentDeclined']);
  (await queued)?.release();
});

test('a refund is refused before its intent; state and amounts are judged first (C63)', async () => {
  const { id } = await house.charge();
  const { leave } = await crowd('reversal');
  expect(await refused(house.refund(id, { amountCents: 20_000 }))).toMatchObject({ code: 'INVALID_STATE' });
  const key = house.key();
  expect(await house.refundWithKey(key, id)).toMatchObject({ status: 429, retryAfterSeconds: 5 });
  expect(await house.history(id)).toEqual(['PaymentInitiated', 'PaymentCreated']);
  expect(await keyRows()).toEqual([]);
  await leave();
  expect(await house.refundWithKey(key, id)).toMatchObject({ status: 200 });
});

test('a reversal goes before first calls that have waited longer', async () => {
  const { id } = await house.charge();
  const held = await reserve();
  const order: string[] = [];
  house.calls.before('void.principal', () => order.push('void'));
  house.calls.before('charge.principal', () => order.push('charge'));
  const create = house.charge();
  await eventually(() => partners.waiting('partner') === 1);
  const reversal = house.void(id);
  await eventually(() => partners.waiting('reversal') === 1);
  held.release();
  await Promise.all([reversal, create]);
  expect(order).toEqual(['void', 'charge']);
});

/** A refund under a key, whose request got a 500 after its intent. */
const cutShort = async (id: string): Promise<string> => {
  const key = house.key();
  house.calls.failBefore('void.principal', () => new Error('a fault of the adapter'), 1);
  expect(await house.refundWithKey(key, id)).toMatchObject({ status: 500 });
  expect(await house.history(id)).toEqual(['PaymentInitiated', 'PaymentCreated', 'RefundRequested']);
  return key;
};

test('429 leaves a released key bound to its body and its attempt (C17)', async () => {
  const { id } = await house.charge();
  const key = await cutShort(id);
  // Recovery ends the attempt as never executed. So a retry needs a new attempt, and a slot for it.
  house.clock.advance(61_000);
  expect(await house.recovery.resolve(id)).toBe('resolved');
  const [bound] = await keyRows();
  const before = await house.history(id);

  const { leave } = await crowd('reversal');
  expect(await house.refundWithKey(key, id)).toMatchObject({ status: 429 });
  const [after] = await keyRows();
  expect(after).toMatchObject({ state: 'released', attempt_id: bound!.attempt_id, fp: bound!.fp });
  expect(await house.history(id)).toEqual(before);
  expect(await house.refundWithKey(key, id, { amountCents: 1 })).toMatchObject({ status: 409 });
  await leave();
  expect(await house.refundWithKey(key, id)).toMatchObject({ status: 200 });
  expect(await house.balance()).toBe(325);
});

test('a retry that continues an open attempt is never refused, and goes before what waits longer', async () => {
  const { id } = await house.charge();
  const key = await cutShort(id);
  const { held, leave } = await crowd('reversal');
  const retry = house.refundWithKey(key, id);
  await eventually(() => partners.waiting('begun') === 1);
  expect(partners.waiting('reversal')).toBe(1);
  held.release();
  expect(await retry).toMatchObject({ status: 200 });
  await leave();
  expect(await house.balance()).toBe(325);
});

test('a retry that finds no slot in time gets 504, and its attempt stays open for the next one', async () => {
  const { id } = await house.charge();
  const key = await cutShort(id);
  const held = await reserve();
  const retry = house.refundWithKey(key, id);
  await eventually(() => partners.waiting('begun') === 1);
  house.clock.advance(26_100);
  expect(await retry).toMatchObject({ status: 504 });
  held.release();
  expect(await house.refundWithKey(key, id)).toMatchObject({ status: 200 });
  expect(await house.balance()).toBe(325);
});

test('recovery and staff have slots of their own', async () => {
  const { id } = await house.charge();
  const { details } = await refused(house.charge({ card: CARDS.neverReached }));
  house.clock.advance(61_000);
  const { leave } = await crowd();
  expect(await house.recovery.resolve(details.id as string)).toBe('resolved');
  const asked = { operation: 'void', paymentId: id, amountCents: null, includeFee: true, reason: 'the payer asked', by: 'anna' } as const;
  expect(await reverseByStaff(house.services, asked, null)).toMatchObject({ view: { status: 'voided' } });
  await leave();
});

test('an account is served at once, although another one has taken its slots and filled its queue', async () => {
  const { leave } = await crowd();
  const { accountId } = (await house.administration.createAccount('Town')).state;
  (await house.ports.slots.reserve('simulator', accountId, 'partner', new Deadline(house.clock, 0))).release();
  await leave();
});
