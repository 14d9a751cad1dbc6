/**
 * Tests recovery (docs/contract.md#recovery). It fences the stream, finalises every reference, undoes the charge and records the result. No number of
 * failed tries decides an outcome.
 */
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import fc from 'fast-check';
import { HOST_CLOCKS_DIFFER_MS } from '#kernel';
import { createPool, migrate, type Pool, PURGE_BATCH, transaction } from '#platform';
import { eventually } from '../../test/support/eventually.js';
import {
  away,
  type Asked,
  CARDS,
  COMBINED,
  FEE,
  type Ground,
  type House,
  openGround,
  openHouse,
  referencesIn,
  refused,
  unheard,
} from '../../test/support/payments.js';
import { freshDatabase, makeTables } from '../../test/support/postgres.js';
import { aboutLeg } from './charge.js';
import { findPayment } from './commands.js';
import { paymentListModel } from './list.js';
import type { Awaiting } from './payment.js';
import { bothOf, countedTries, decidedBy, nextTryAt, postgresRecoveryWork, purgeTries, recoveryMigration, recoveryWhyMigration } from './recovery.js';

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

const MINUTE = 60_000;
const DAY = 24 * 60 * MINUTE;
const CUT = { answer: 'cut' } as const;
const NOT_SENT = { effect: false, answer: 'cut' } as const;

/** Makes a charge whose request ends with an unknown outcome. */
const unknown = async (asked: Asked = { card: CARDS.unreadable }) => {
  const paymentId = house.ids.uuid();
  expect((await refused(house.charge(asked, paymentId))).code).toBe('PAYMENT_TIMEOUT');
  return paymentId;
};
const resolve = (paymentId: string) => {
  house.clock.advance(MINUTE);
  return house.recovery.resolve(paymentId);
};
const staffTask = async (paymentId: string) => {
  const tasks = [];
  for await (const events of house.store.readAll(null, { streamPrefixes: ['staff-'] }))
    tasks.push(...events.filter(({ data }) => (data as { paymentId: string }).paymentId === paymentId));
  return tasks;
};
const expectFinalised = async (paymentId: string) => {
  const atBank = new Set((await house.truth()).map(({ ref }) => ref));
  for (const reference of referencesIn(await house.events(paymentId))) expect(atBank).toContain(reference);
};

describe('a charge', () => {
  test('a leg stands → undone under its reversal reference → voided, captured 0', async () => {
    const id = await unknown({ ...(await armed('charge', 'fee', CUT)) });
    expect(await house.balance()).toBe(10_325);
    expect(await resolve(id)).toBe('resolved');
    expect(await house.view(id)).toMatchObject({ status: 'voided', capturedAmountCents: 0, refundedAmountCents: 0, confirmationNumber: null });
    expect(await house.history(id)).toEqual(['PaymentInitiated', 'PaymentOutcomeUnknown', 'ReconciliationStarted', 'PaymentVoided', 'PaymentVoided']);
    const voids = (await house.truth()).filter(({ op }) => op === 'void');
    expect(voids.map(({ leg, askedBy, amountCents }) => [leg, askedBy, amountCents])).toEqual([
      ['principal', 'reversal', 10_000],
      ['fee', 'reversal', 325],
    ]);
    expect(await house.balance()).toBe(0);
  });
  test('never executed, every reference finalised → voided, and no reference is good for anything any more (C61)', async () => {
    const id = await unknown({ card: CARDS.neverReached });
    expect(await resolve(id)).toBe('resolved');
    expect(await house.view(id)).toMatchObject({ status: 'voided', capturedAmountCents: 0 });
    expect(referencesIn(await house.events(id))).toHaveLength(4);
    await expectFinalised(id);
  });
  test('a leg that was never sent is not started: the fee is not charged by recovery (C61)', async () => {
    const id = await unknown();
    expect(await resolve(id)).toBe('resolved');
    expect((await house.truth()).filter(({ op }) => op === 'charge').map(({ leg }) => leg)).toEqual(['principal']);
    expect((await house.truth()).filter(({ op }) => op === 'tombstone')).toHaveLength(2);
  });
  test('declined → failed', async () => {
    const id = await unknown({ card: CARDS.cvvMismatch, ...(await armed('charge', 'principal', CUT)) });
    expect(await resolve(id)).toBe('resolved');
    expect(await house.view(id)).toMatchObject({ status: 'failed', capturedAmountCents: 0 });
    expect((await house.events(id)).at(-1)).toMatchObject({
      type: 'PaymentDeclined',
      data: { declineCode: 'cvv_mismatch', avs: 'not_checked', cvv: 'no_match' },
    });
  });
  test('combined: one leg, one reversal', async () => {
    house = await openHouse(ground, COMBINED);
    const id = await unknown();
    expect(await resolve(id)).toBe('resolved');
    expect([(await house.view(id)).status, await house.balance(), (await house.truth()).filter(({ op }) => op === 'void').length]).toEqual([
      'voided',
      0,
      1,
    ]);
  });
  test.each([
    ['every leg settled', { card: CARDS.settlesAtOnce }, 'principal', 10_000],
    ['only the fee could not be undone', {}, 'fee', 325],
  ] as const)('%s → a task for staff, and the payment stays unknown, for ever if need be (C29)', async (_, asked, leg, held) => {
    await ground.bank.arm({ match: { call: 'charge', leg }, ...CUT });
    const id = await unknown(asked);
    if (leg === 'fee') {
      // The processor closes a batch with the fee in it, after the principal was voided.
      house.calls.after('void.principal', () => ground.bank.closeBatches());
    }
    expect(await resolve(id)).toBe('staff');
    // Staff may return the money meanwhile. So the gateway is asked only once to undo this charge, even if it would do so later.
    let repeated = 0;
    house.calls.after(`void.${leg}`, () => void (repeated += 1));
    for (let round = 0; round < 3; round++) {
      expect(await resolve(id)).toBe('staff');
      expect(await house.view(id)).toMatchObject({ status: 'unknown', capturedAmountCents: 0 });
    }
    expect(repeated).toBe(0);
    expect(house.logged.filter((line) => line.includes('a payment needs a decision by staff'))).toHaveLength(1);
    const tasks = await staffTask(id);
    expect(tasks).toHaveLength(1);
    expect(tasks[0]).toMatchObject({
      type: 'StaffTaskRaised',
      data: {
        paymentId: id,
        reason: 'charge_cannot_be_undone',
        evidence: { legs: [{ leg, why: 'already_settled', transactionId: expect.any(String) }] },
      },
    });
    expect(await house.balance()).toBe(held);
    expect(await house.history(id)).not.toContain('PaymentCreated');
  });
  test.each([
    ['finalize does not answer', 'finalize', NOT_SENT],
    ['finalize answers rubbish', 'finalize', { answer: 'missing_fields' }],
    ['finalize answers for another reference', 'finalize', { answer: 'other_reference' }],
    ['the reversal does not answer', 'void', NOT_SENT],
    ['the reversal is lost after its effect', 'void', CUT],
    ['the reversal is refused for now', 'void', { answer: 'disabled' }],
  ] as const)('%s → stays unknown, and the next round goes on where this one ended', async (_, call, fault) => {
    const id = await unknown();
    await ground.bank.arm({ match: { call }, ...fault });
    expect(await resolve(id)).toBe('open');
    expect((await house.view(id)).status).toBe('unknown');
    expect(await resolve(id)).toBe('resolved');
    expect([(await house.view(id)).status, await house.balance()]).toEqual(['voided', 0]);
    expect((await house.truth()).filter(({ op, result }) => op === 'void' && result === 'approved')).toHaveLength(1);
  });
  test('the gateway cannot tell, ever → unknown, ever; nothing is undone on a guess', async () => {
    const id = await unknown({ card: CARDS.cannotTell });
    for (let round = 0; round < 3; round++) expect(await resolve(id)).toBe('open');
    expect([(await house.view(id)).status, await house.balance()]).toEqual(['unknown', 10_000]);
  });
  test('without the gateway’s credentials it stays open (C68)', async () => {
    const id = await unknown();
    house.setCredentials(false);
    expect(await resolve(id)).toBe('open');
    house.setCredentials(true);
    expect(await resolve(id)).toBe('resolved');
  });
  test('the process died between the legs → the principal is undone (C41)', async () => {
    const paymentId = house.ids.uuid();
    house.calls.before('charge.fee', () => new Promise(() => undefined));
    void house.charge({}, paymentId).catch(() => undefined);
    await eventually(async () => (await house.balance()) === 10_000);
    expect((await house.view(paymentId)).status).toBe('pending');
    expect(await resolve(paymentId)).toBe('resolved');
    expect([(await house.view(paymentId)).status, await house.balance()]).toEqual(['voided', 0]);
  });
  test('younger than 60 s it is left to its request', async () => {
    const id = await unknown();
    house.clock.advance(MINUTE - 2_000);
    expect(await house.recovery.resolve(id)).toBe('open');
    expect(await house.history(id)).not.toContain('ReconciliationStarted');
  });
  test('a leg that staff have had it promised to stand: neither it nor the next one is undone', async () => {
    const id = await unknown();
    const state = (await house.state(id)) as Awaiting;
    const [principal, fee] = state.terms.legs;
    const promise = house.services.ports.gateways
      .find(principal!.account)!
      .finalize(aboutLeg(state, principal!, 'reversal'), AbortSignal.timeout(5_000));
    expect(await promise).toEqual({ kind: 'never' });
    const held = await house.balance();
    expect(await resolve(id)).toBe('staff');
    expect([await house.balance(), (await house.view(id)).status]).toEqual([held, 'unknown']);
    expect((await house.truth()).map(({ ref }) => ref)).not.toContain(fee!.references.reversal);
  });
  test('a resolved payment, or one that never was, is left alone', async () => {
    const { id } = await house.charge();
    expect(await resolve(id)).toBe('resolved');
    expect(await resolve(house.ids.uuid())).toBe('resolved');
    expect(await house.history(id)).toEqual(['PaymentInitiated', 'PaymentCreated']);
  });
  test('a read of an open payment after 60 s starts recovery, and is answered from the stream (2.3)', async () => {
    const id = await unknown();
    const find = () => findPayment(house.services, house.accountId, id);
    expect((await find()).status).toBe('unknown');
    await new Promise((turn) => setTimeout(turn, 100));
    expect(await house.history(id)).not.toContain('ReconciliationStarted');
    house.clock.advance(MINUTE);
    expect((await find()).status).toBe('unknown');
    await eventually(async () => (await find()).status === 'voided');
  });
});

describe('a refund or void', () => {
  const open = async (fault: Parameters<Ground['bank']['arm']>[0], reverse: (id: string) => Promise<unknown>, asked: Asked = {}) => {
    const { id } = await house.charge(asked);
    await ground.bank.arm(fault);
    await refused(reverse(id));
    return id;
  };
  const last = async (id: string) => {
    const state = await house.state(id);
    if (state.phase !== 'charged') throw new Error('not charged');
    return state.attempts.at(-1)!;
  };
  test('a read of its payment after 60 s starts recovery (2.3)', async () => {
    const id = await open({ match: { call: 'void' }, ...CUT }, (payment) => house.refund(payment, { amountCents: 1_000 }));
    house.clock.advance(MINUTE);
    await eventually(async () => (await findPayment(house.services, house.accountId, id)).refundedAmountCents === 1_000);
  });
  test.each([
    ['executed', CUT, 'completed', 9_325],
    ['never executed', NOT_SENT, 'never_executed', 10_325],
  ] as const)('%s → recorded so; every reference finalised', async (_, fault, outcome, left) => {
    const id = await open({ match: { call: 'void' }, ...fault }, (payment) => house.refund(payment, { amountCents: 1_000 }));
    expect(await resolve(id)).toBe('resolved');
    expect((await last(id)).ended).toMatchObject({ outcome });
    expect(await house.balance()).toBe(left);
    await expectFinalisedAttempt(id);
  });
  test('the first leg was executed, the second never sent → partial; recovery sends nothing (C61)', async () => {
    const id = await open({ match: { call: 'void', leg: 'principal' }, ...CUT }, (payment) => house.refund(payment, { includeFee: true }));
    const sent = (await house.truth()).filter(({ op }) => op === 'void' || op === 'refund').length;
    expect(await resolve(id)).toBe('resolved');
    expect((await last(id)).ended).toMatchObject({ outcome: 'partial', amountCents: 10_000 });
    expect((await house.truth()).filter(({ op }) => op === 'void' || op === 'refund')).toHaveLength(sent);
    await expectFinalisedAttempt(id);
  });
  test('a void that the gateway had rejected → rejected', async () => {
    const id = await open({ match: { call: 'void' }, ...CUT }, (payment) => house.void(payment), { card: CARDS.voidRejected });
    expect(await resolve(id)).toBe('resolved');
    expect((await last(id)).ended).toMatchObject({ outcome: 'rejected', amountCents: 0 });
  });
  test('the switch: the void was rejected, the refund executed → completed, a refund (C24)', async () => {
    const { id } = await house.charge();
    await house.settle();
    await ground.bank.arm({ match: { call: 'refund' }, ...CUT });
    expect((await refused(house.refund(id, { amountCents: 1_000 }))).code).toBe('PAYMENT_TIMEOUT');
    expect(await resolve(id)).toBe('resolved');
    expect((await last(id)).ended).toMatchObject({ outcome: 'completed', reversalType: 'refund', amountCents: 1_000 });
    expect(await house.balance()).toBe(9_325);
  });
  test('the gateway cannot tell → stays open', async () => {
    const id = await open({ match: { call: 'void' }, ...CUT }, (payment) => house.refund(payment, { amountCents: 1_000 }));
    await ground.bank.arm({ match: { call: 'finalize' }, effect: false, answer: 'cut' });
    expect(await resolve(id)).toBe('open');
    expect((await last(id)).ended).toBeNull();
    expect(await resolve(id)).toBe('resolved');
    expect((await last(id)).ended).toMatchObject({ outcome: 'completed' });
  });
  const expectFinalisedAttempt = async (id: string) => {
    const atBank = new Set((await house.truth()).map(({ ref }) => ref));
    for (const { references } of (await last(id)).legs) for (const reference of Object.values(references)) expect(atBank).toContain(reference);
  };
});

describe('two recoveries at once, and recovery that is interrupted', () => {
  test.each(['charge', 'refund'])('of a %s: one resolution', async (what) => {
    let id: string;
    if (what === 'charge') id = await unknown();
    else {
      ({ id } = await house.charge());
      await ground.bank.arm({ match: { call: 'void' }, ...CUT });
      await refused(house.refund(id, { amountCents: 1_000 }));
    }
    house.clock.advance(MINUTE);
    const outcomes = await Promise.all(Array.from({ length: 5 }, () => house.anotherWorker().resolve(id)));
    expect(outcomes).toContain('resolved');
    const history = await house.history(id);
    expect(history.filter((type) => type === 'ReconciliationStarted')).toHaveLength(1);
    expect(history.filter((type) => type === 'PaymentVoided')).toHaveLength(1);
    expect((await house.truth()).filter(({ op, result }) => op === 'void' && result === 'approved')).toHaveLength(1);
    expect(await house.recovery.resolve(id)).toBe('resolved');
  });
  test('a request and recovery resolve one refund at once: one resolution, one result', async () => {
    const { id } = await house.charge();
    await ground.bank.arm({ match: { call: 'void' }, ...CUT });
    await refused(house.refund(id, { amountCents: 1_000 }));
    house.clock.advance(MINUTE);
    const [, told] = await Promise.all([house.recovery.resolve(id), house.refund(id, { amountCents: 1_000 })]);
    expect(told).toMatchObject({ amountCents: 1_000, remainingRefundableAmountCents: 9_325 });
    expect(await house.balance()).toBe(9_325);
  });
  test.each(['ReconciliationStarted', 'PaymentVoided'])('interrupted before and after %s: the next one finishes', async (type) => {
    for (const fail of ['failBefore', 'failAfter'] as const) {
      const id = await unknown();
      house.appends[fail](type, () => new Error('the process died'), 1);
      await expect(resolve(id)).rejects.toThrow('the process died');
      expect(await resolve(id)).toBe('resolved');
      expect((await house.view(id)).status).toBe('voided');
      expect((await house.history(id)).filter((one) => one === type)).toHaveLength(1);
    }
    expect(await house.balance()).toBe(0);
  });
  test.each(['finalize.charge', 'finalize.reversal', 'void.principal'])('interrupted before and after %s', async (call) => {
    for (const when of ['before', 'after'] as const) {
      const id = await unknown();
      house.calls[when](call, () => Promise.reject(new Error('the process died')));
      await expect(resolve(id)).rejects.toThrow('the process died');
      expect((await house.view(id)).status).toBe('unknown');
      expect(await resolve(id)).toBe('resolved');
      expect((await house.view(id)).status).toBe('voided');
    }
    expect(await house.balance()).toBe(0);
    expect((await house.truth()).filter(({ op, result }) => op === 'void' && result === 'approved')).toHaveLength(2);
  });
});

describe('rounds', () => {
  test('try open payments by the schedule: 60 s, then 2 m, 5 m, 15 m, 1 h, 6 h, daily for ever', async () => {
    const id = await unknown({ card: CARDS.cannotTell });
    await house.charge();
    expect(await house.recovery.round()).toBe(0);
    house.clock.advance(MINUTE);
    expect(await house.recovery.round()).toBe(1);
    const pauses = [2, 5, 15, 60, 360, 1_440, 1_440, 1_440];
    for (const [index, minutes] of pauses.entries()) {
      expect(house.tries.at(-1)).toMatchObject({ paymentId: id, tries: index + 1, outcome: 'open' });
      expect(Math.abs(Date.parse(house.tries.at(-1)!.nextTryAt) - house.clock.now() - minutes * MINUTE)).toBeLessThan(5_000);
      house.clock.advance(minutes * MINUTE - 10_000);
      expect(await house.recovery.round()).toBe(0);
      house.clock.advance(10_000);
      expect(await house.recovery.round()).toBe(1);
    }
    expect((await house.view(id)).status).toBe('unknown');
  });
  test('when the gateway answers again, no payment waits for the end of a long pause', async () => {
    await ground.bank.arm({ match: { call: 'finalize' }, times: null, ...NOT_SENT });
    const early = await unknown();
    for (const minutes of [1, 2, 5]) {
      house.clock.advance(minutes * MINUTE);
      expect(await house.recovery.round()).toBe(1);
    }
    const late = await unknown();
    await ground.bank.clearFaults();
    house.clock.advance(MINUTE);
    // Only the later payment is due. After this round has resolved it, the earlier payment is due immediately.
    expect(await house.recovery.round()).toBe(1);
    expect((await house.view(late)).status).toBe('voided');
    expect((await house.view(early)).status).toBe('unknown');
    expect(await house.recovery.round()).toBe(1);
    expect((await house.view(early)).status).toBe('voided');
  });
  test('tries that others brought forward do not lengthen the pauses', async () => {
    const stuck = await unknown({ card: CARDS.cannotTell });
    const tries: number[] = [];
    for (let minute = 1; minute <= 10; minute++) {
      const other = await unknown();
      // Some time more than the minute: the wall clock of a machine may be set back a little.
      house.clock.advance(MINUTE + 1_000);
      await house.recovery.round();
      // If this fails, the log and the tries say why.
      const found = { status: (await house.view(other)).status, tries: house.tries.slice(-4), logged: house.logged.slice(-8) };
      expect(found).toMatchObject({ status: 'voided' });
      await house.recovery.round();
      const last = house.tries.filter(({ paymentId, outcome }) => paymentId === stuck && outcome === 'open').at(-1)!;
      tries.push(last.tries);
      expect(Date.parse(last.nextTryAt) - house.clock.now()).toBeLessThanOrEqual(5 * MINUTE);
    }
    expect(Math.max(...tries)).toBeLessThanOrEqual(2);
  });
  test('tries that an outage of the log ended do not lengthen the pauses', async () => {
    const id = await unknown();
    house.appends.failBefore('ReconciliationStarted', away);
    for (let tries = 1; tries <= 10; tries++) {
      house.clock.advance(MINUTE);
      let over = false;
      const round = house.recovery.round().finally(() => (over = true));
      // One try repeats its append for a long time, so the clock is moved forward until the round ends.
      while (!over) {
        house.clock.advance(1_000);
        await new Promise((next) => setImmediate(next));
      }
      expect(await round).toBe(1);
    }
    expect(house.tries.at(-1)).toMatchObject({ paymentId: id, tries: 0, outcome: 'open' });
    house.appends.clear();
    house.clock.advance(MINUTE);
    expect(await house.recovery.round()).toBe(1);
    expect((await house.view(id)).status).toBe('voided');
  });
  test('one payment that cannot be resolved does not keep the others', async () => {
    const stuck = await unknown({ card: CARDS.cannotTell });
    const others = [await unknown(), await unknown()];
    house.clock.advance(MINUTE);
    house.appends.failBefore('ReconciliationStarted', away, 1);
    await house.recovery.round();
    house.clock.advance(2 * MINUTE);
    await house.recovery.round();
    for (const id of others) expect((await house.view(id)).status).toBe('voided');
    expect((await house.view(stuck)).status).toBe('unknown');
  });
});

test('a payment from a clock that was a day ahead is resolved now, not in a day; a clock that is a little ahead is waited for', async () => {
  house.clock.setWrongBy(DAY);
  const id = await unknown();
  house.clock.setWrongBy(5 * MINUTE);
  const fresh = await unknown();
  house.clock.setWrongBy(0);
  expect(await house.recovery.round()).toBe(1);
  expect((await house.view(id)).status).toBe('voided');
  expect(await house.recovery.resolve(fresh)).toBe('open');
  expect((await house.view(fresh)).status).toBe('unknown');
});

describe('the list of its work', () => {
  let database: Awaited<ReturnType<typeof freshDatabase>>;
  let pool: Pool;
  beforeAll(async () => {
    database = await freshDatabase();
    pool = createPool(database.url, { name: 'spec', max: 2 });
    await makeTables(pool, paymentListModel);
    await migrate(pool, [recoveryMigration, recoveryWhyMigration]);
  });
  afterAll(async () => {
    await pool.end();
    await database.drop();
  });
  test('in the list: open charges and open reversals, oldest first, when their next try has come', async () => {
    const work = postgresRecoveryWork(pool);
    const list = async (id: string) => {
      const events = await house.events(id);
      await transaction(pool, (client) => paymentListModel.apply(client, events));
    };
    const stuck = await unknown({ card: CARDS.cannotTell });
    const { id: refunding } = await house.charge();
    await ground.bank.arm({ match: { call: 'void' }, ...CUT });
    await refused(house.refund(refunding, { amountCents: 1 }));
    const { id: done } = await house.charge();
    for (const id of [stuck, refunding, done]) await list(id);
    const NOT_SAID = { why: null, until: null };
    const at = (inMs: number) => new Date(Date.now() + inMs).toISOString();
    const now = { begunBefore: at(1_000), begunAfter: at(HOST_CLOCKS_DIFFER_MS), nextTryBefore: at(1_000), nextTryAfter: at(2 * DAY) };
    const due = await work.due(now);
    const { createdAt: since } = await house.view(stuck);
    expect(due[0]).toEqual({ paymentId: stuck, attemptId: expect.any(String), tries: 0, since, until: null });
    expect(due.map(({ paymentId, tries }) => [paymentId, tries])).toEqual([
      [stuck, 0],
      [refunding, 0],
    ]);
    expect(await work.due({ ...now, begunBefore: at(-MINUTE) })).toEqual([]);
    await work.record({ ...due[0]!, tries: 1, nextTryAt: at(MINUTE), outcome: 'open', ...NOT_SAID });
    expect((await work.due(now)).map(({ paymentId }) => paymentId)).toEqual([refunding]);
    const until = at(DAY);
    await work.record({ ...due[0]!, tries: 2, nextTryAt: at(-1), outcome: 'open', why: 'not_visible', until });
    expect(await work.due(now)).toContainEqual({ ...due[0]!, tries: 2, until });
    // A time far in the future comes from a wrong clock, so the payment is due immediately.
    expect((await work.due({ ...now, begunBefore: at(-DAY), begunAfter: at(-DAY) })).map(({ paymentId }) => paymentId)).toEqual([stuck, refunding]);
    await work.record({ ...due[0]!, tries: 3, nextTryAt: at(3 * DAY), outcome: 'open', ...NOT_SAID });
    expect((await work.due(now)).map(({ paymentId }) => paymentId)).toEqual([stuck, refunding]);
    await work.record({ ...due[0]!, tries: 4, nextTryAt: at(MINUTE), outcome: 'staff', ...NOT_SAID });
    await work.hurry(at(0));
    expect((await work.due(now)).map(({ paymentId }) => paymentId)).toEqual([refunding]);
    await work.record({ ...due[0]!, tries: 4, nextTryAt: at(MINUTE), outcome: 'open', ...NOT_SAID });
    await work.hurry(at(0));
    expect((await work.due(now)).map(({ paymentId, tries }) => [paymentId, tries])).toEqual([
      [stuck, 3],
      [refunding, 0],
    ]);
    house.clock.advance(MINUTE);
    await house.recovery.resolve(refunding);
    await work.record({ ...due[1]!, tries: 1, nextTryAt: at(MINUTE), outcome: 'open', ...NOT_SAID });
    await list(refunding);
    expect((await work.due(now)).map(({ paymentId }) => paymentId)).toEqual([stuck]);
    // `refunding` was resolved outside the round. The purge deletes its row, and keeps the row of the payment that is still open.
    const purged = async () => {
      const { rows } = await pool.query<{ payment_id: string }>('select payment_id from recovery_try');
      return rows;
    };
    expect(await purgeTries(pool)).toBe(1);
    expect(await purged()).toEqual([{ payment_id: stuck }]);
    // The purge deletes any number of rows.
    await pool.query(`insert into recovery_try select gen_random_uuid(), gen_random_uuid(), 1, now(), 'open' from generate_series(1, $1)`, [
      2 * PURGE_BATCH + 1,
    ]);
    expect(await purgeTries(pool, AbortSignal.abort())).toBe(PURGE_BATCH);
    expect(await purgeTries(pool)).toBe(PURGE_BATCH + 1);
    expect(await purged()).toEqual([{ payment_id: stuck }]);
  });
});

describe('when a payment is tried next', () => {
  const [now, hour] = [Date.parse('2026-03-10T12:00:00.000Z'), 60 * MINUTE];
  const minutesTo = (tries: number, still: Parameters<typeof nextTryAt>[2], ageMinutes = 90) =>
    (nextTryAt(now, tries, still, now - ageMinutes * MINUTE) - now) / MINUTE;
  const at = (inMs: number) => new Date(now + inMs).toISOString();

  test('after 2, 5 and 15 minutes, after 1 and 6 hours, then daily', () => {
    for (const still of [null, { why: 'unreachable' }, { why: 'not_visible' }] as const)
      expect([1, 2, 3, 4, 5, 6, 7].map((tries) => minutesTo(tries, still))).toEqual([2, 5, 15, 60, 360, 1_440, 1_440]);
  });
  test('1, 2, 4, 5 and 15 minutes after the attempt began, then hourly, while no trace is visible, and a minute after the gateway can tell', () => {
    const waiting = { why: 'not_visible', until: at(10 * hour) } as const;
    const ages = [0, 1, 2, 4, 5, 15, 75];
    for (const tries of [1, 99]) expect(ages.map((age) => age + minutesTo(tries, waiting, age))).toEqual([1, 2, 4, 5, 15, 75, 135]);
    // A late try does not move the later ones. The scan at the gateway takes its time, too.
    expect(minutesTo(2, waiting, 1.5)).toBe(0.5);
    // A wrong clock dated the attempt a day ahead.
    expect(minutesTo(1, waiting, -1_440)).toBe(1);
    expect(minutesTo(9, { why: 'not_visible', until: at(20 * MINUTE) })).toBe(21);
    // The time has passed, and the gateway still cannot tell.
    expect(minutesTo(9, { why: 'not_visible', until: at(-1) })).toBe(1_440);
  });
  test('one leg waits for its batch, and there was no answer about the other: the earlier of the two times', () => {
    const still = (untilMinutes: number) => ({ why: 'unreachable', until: at(untilMinutes * MINUTE) }) as const;
    expect(minutesTo(2, still(600))).toBe(5);
    expect(minutesTo(9, still(600))).toBe(60);
    expect(minutesTo(9, still(20))).toBe(21);
    expect(minutesTo(9, { ...still(600), voidableUntil: at(40 * MINUTE) })).toBe(30);
    expect(minutesTo(9, still(-1))).toBe(1_440);
  });
  test('once more ten minutes before a charge that still appears can no longer be voided', () => {
    const waiting = { why: 'not_visible', until: at(10 * hour) } as const;
    expect(minutesTo(9, { ...waiting, voidableUntil: at(40 * MINUTE) })).toBe(30);
    expect(minutesTo(9, { ...waiting, voidableUntil: at(10 * MINUTE) })).toBe(60);
    expect(minutesTo(9, { ...waiting, voidableUntil: at(5 * hour) })).toBe(60);
  });
  test('of two legs: when the gateway can tell about both, and each time before a charge can no longer be voided', () => {
    const leg = (untilHours: number, voidableHours: number) =>
      ({ why: 'not_visible', until: at(untilHours * hour), voidableUntil: at(voidableHours * hour) }) as const;
    for (const [one, other] of [
      [leg(7, 1), leg(9, 3)],
      [leg(9, 3), leg(7, 1)],
    ] as const) {
      expect(bothOf(one, other, now)).toEqual(leg(9, 1));
      expect(bothOf(one, other, now + 55 * MINUTE)).toEqual(leg(9, 3));
      expect(bothOf(one, other, now + 4 * hour)).toEqual({ why: 'not_visible', until: at(9 * hour) });
    }
    expect(bothOf(null, leg(7, 1), now)).toEqual(leg(7, 1));
    expect(bothOf(leg(7, 1), { why: 'not_visible' }, now)).toEqual(leg(7, 1));
  });
  test('the earliest time that the gateway named stays, whatever it says later', () => {
    const [early, late] = [at(hour), at(2 * hour)];
    expect(decidedBy(null, null)).toBeNull();
    expect(decidedBy(null, { why: 'not_visible', until: late })).toBe(late);
    expect(decidedBy(early, { why: 'not_visible', until: late })).toBe(early);
    expect(decidedBy(late, { why: 'not_visible', until: early })).toBe(early);
    for (const still of [null, { why: 'unreachable' }, { why: 'not_visible' }] as const) expect(decidedBy(early, still)).toBe(early);
    // The end of a scan is not a time by which the gateway can tell.
    expect([decidedBy(null, { why: 'in_flight', until: early }), decidedBy(late, { why: 'in_flight', until: early })]).toEqual([null, late]);
  });
  test('a wait for the gateway does not lengthen the pauses of an outage that follows', () => {
    const counted = (tries: number, still: Parameters<typeof countedTries>[2]) => countedTries(now, tries, still);
    for (const why of ['not_visible', 'in_flight'] as const) expect(counted(30, { why, until: at(1) })).toBe(3);
    expect(counted(2, { why: 'not_visible', until: at(1) })).toBe(2);
    for (const still of [null, { why: 'unreachable' }, { why: 'not_visible', until: at(-1) }] as const) expect(counted(30, still)).toBe(30);
    // It was unreachable when it could tell: an hour, not a day.
    expect(minutesTo(counted(30, { why: 'not_visible', until: at(1) }) + 1, { why: 'unreachable' })).toBe(60);
  });
  test('as soon as the running scan has ended', () => {
    expect(minutesTo(9, { why: 'in_flight', until: at(MINUTE / 2) }) * 60).toBeCloseTo(31);
  });
});

/** Arms a fault at the simulator. The empty result leaves the request as it is. */
const armed = async (call: 'charge' | 'void', leg: 'principal' | 'fee', fault: Parameters<Ground['bank']['arm']>[0]): Promise<Asked> => {
  await ground.bank.arm({ match: { call, leg }, ...fault });
  return {};
};

describe('any fault, with recovery at any moment', () => {
  /** A higher number of histories finds rarer faults. */
  const HISTORIES = Number(process.env.HISTORIES ?? 60);
  const CALLS = ['charge', 'void', 'refund', 'finalize'] as const;
  const STEPS = ['charge.principal', 'charge.fee', 'void.principal', 'void.fee', 'refund.principal', 'refund.fee', 'finalize'] as const;
  const EVENTS = ['PaymentInitiated', 'PaymentCreated', 'PaymentOutcomeUnknown', 'PaymentDeclined', 'RefundRequested', 'VoidRequested', 'PaymentVoided', 'PaymentRefunded', 'ReversalEnded', 'ReconciliationStarted'] as const; // prettier-ignore
  const fault = fc.record({
    match: fc.record({ call: fc.constantFrom(...CALLS), leg: fc.option(fc.constantFrom('principal' as const, 'fee' as const), { nil: undefined }) }),
    skip: fc.nat(1),
    effect: fc.boolean(),
    answer: fc.constantFrom('cut' as const, 'not_json' as const, 'bare_500' as const, 'disabled' as const),
  });
  const interposed = fc.record({ when: fc.constantFrom('before' as const, 'after' as const), step: fc.constantFrom(...STEPS, ...EVENTS) });
  // A request can outlast 3 failures. 130 failures outlast the request.
  const failure = fc.record({ type: fc.constantFrom(...EVENTS), effect: fc.boolean(), times: fc.constantFrom(3, 130) });
  const scenario = fc.record({
    card: fc.constantFrom(
      CARDS.approved,
      CARDS.approved,
      CARDS.feeDeclined,
      CARDS.feeVoidFailsOnce,
      CARDS.feeRefundFailsOnce,
      CARDS.voidRejected,
      CARDS.declined,
    ),
    combined: fc.boolean(),
    settled: fc.boolean(),
    known: fc.boolean(),
    reverse: fc.array(fc.record({ operation: fc.constantFrom('void' as const, 'refund' as const), amountCents: fc.constantFrom(null, 1_000, 4_000), includeFee: fc.boolean(), keyed: fc.boolean() }), { minLength: 1, maxLength: 3 }), // prettier-ignore
    faults: fc.array(fault, { maxLength: 3 }),
    overtaken: fc.option(interposed, { nil: undefined }),
    appends: fc.option(failure, { nil: undefined }),
  });
  /** `told`: the transaction id in each answer with status 200. */
  const run = async ({
    card,
    combined,
    settled,
    known,
    reverse,
    faults,
    overtaken,
    appends,
  }: typeof scenario extends fc.Arbitrary<infer T> ? T : never) => {
    house = await openHouse(ground, combined ? COMBINED : FEE);
    const paymentId = house.ids.uuid();
    // The store sleeps between retries, so the clock is moved forward until the history ends.
    let going = true;
    const time = (async () => {
      while (going) {
        await new Promise((turn) => setTimeout(turn, 20));
        if (appends) house.clock.advance(2_000);
      }
    })();
    for (const one of faults) await ground.bank.arm(one);
    if (overtaken)
      house.calls[overtaken.when](overtaken.step, () =>
        house
          .anotherWorker()
          .resolve(paymentId)
          .catch(() => undefined),
      );
    if (overtaken) house.appends[overtaken.when](overtaken.step, () => house.recovery.resolve(paymentId).catch(() => undefined));
    if (appends?.effect === true) house.appends.failAfter(appends.type, unheard, appends.times);
    if (appends?.effect === false) house.appends.failBefore(appends.type, away, appends.times);

    const charge = await house.charge({ card }, paymentId).then(() => 200, (error: { status?: number }) => error.status ?? 500); // prettier-ignore
    if (charge === 200 && settled) await (known ? house.settle(paymentId) : house.settle());
    const told: string[] = [];
    for (const { operation, amountCents, includeFee, keyed } of reverse) {
      const asked = operation === 'void' ? {} : { amountCents: includeFee ? null : amountCents, includeFee };
      const key = house.key();
      for (let round = 0; round < 3; round++) {
        const outcome = keyed
          ? await house[operation === 'void' ? 'voidWithKey' : 'refundWithKey'](key, paymentId, asked).catch((error: { status: number }) => error)
          : await house[operation](paymentId, asked).then((data) => ({ status: 200, body: JSON.stringify({ data }) }), (error: { status?: number }) => ({ status: error.status ?? 500 })); // prettier-ignore
        if (outcome.status === 200 && 'body' in outcome)
          told.push((JSON.parse(outcome.body) as { data: { gateway: { transactionId: string } } }).data.gateway.transactionId);
        if (outcome.status < 500) break;
        house.clock.advance(36_000);
      }
    }
    // All faults end. Four rounds of recovery then resolve the open attempts.
    house.calls.clear();
    house.appends.clear();
    await ground.bank.clearFaults();
    for (let round = 0; round < 4; round++) {
      house.clock.advance(60_000);
      await house.recovery.resolve(paymentId).catch(() => undefined);
    }
    going = false;
    await time;
    const view = await house.view(paymentId).catch(() => null);
    return { charge, told, view, balance: await house.balance(), history: await house.history(paymentId), truth: await house.truth() };
  };

  test('the bank and the stream agree to the cent, nothing stays open, unknown never becomes succeeded, no answer names more than was returned', async () => {
    const seen = new Set<string>();
    await fc.assert(
      fc.asyncProperty(scenario, async (asked) => {
        const { charge, told, view, balance, history, truth } = await run(asked);
        history.forEach((type) => seen.add(type));
        if (!view) return expect([balance, charge]).toEqual([0, 500]);
        // A charge that cannot be undone stays unknown, and there is a task for staff. In all other cases the stream and the simulator agree to the
        // cent.
        if (view.status === 'unknown') expect(await staffTask(view.id)).toHaveLength(1);
        else expect(balance).toBe(view.capturedAmountCents - view.refundedAmountCents);
        if (charge === 200) expect(history[1]).toBe('PaymentCreated');
        if (history.includes('PaymentOutcomeUnknown') || history[1] === 'ReconciliationStarted') expect(history).not.toContain('PaymentCreated');
        expect(['pending', 'authorized']).not.toContain(view.status);
        // Each answer with status 200 names a different transaction. However often a request was repeated, it returned its amount at most once.
        expect(new Set(told).size).toBe(told.length);
        const asks = asked.reverse.map(({ operation, amountCents, includeFee }) => (operation === 'refund' && !includeFee ? amountCents : null));
        // If the log's answer to the append of an outcome was lost, the caller gets a 504. A repeat without a key may then count as a new request, so
        // the sum is not checked.
        const unheardOf = asked.appends?.effect && asked.appends.times > 3 && asked.reverse.some(({ keyed }) => !keyed);
        if (!unheardOf && asks.every((cents) => cents !== null))
          expect(view.refundedAmountCents).toBeLessThanOrEqual(asks.reduce((sum, cents) => sum + cents, 0));
        const references = truth.filter(({ op, result }) => op !== 'tombstone' && result === 'approved').map(({ ref }) => ref);
        expect(new Set(references).size).toBe(references.length);
        const requested = history.filter((type) => type === 'RefundRequested' || type === 'VoidRequested').length;
        expect(history.filter((type) => type === 'ReversalEnded')).toHaveLength(requested);
      }),
      { numRuns: HISTORIES, endOnFailure: true },
    );
    for (const type of ['PaymentCreated', 'PaymentVoided', 'ReversalEnded', 'ReconciliationStarted']) expect(seen).toContain(type);
  }, 1_200_000);
});
