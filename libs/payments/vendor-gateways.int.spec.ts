/**
 * Charges and reversals at gateways that can do less than the simulator: limits of a charge, charges that are held for review, charges that only a
 * refund undoes, and questions that the gateway can answer only later (C72). The gateways are the simulation's banks.
 */
import { readFileSync } from 'node:fs';
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { createVendorGateway } from '#gateways';
import { Deadline, timestamp } from '#kernel';
import { Bank, bankGateway, CARDS, directWire, type GatewayName } from '../../test/simulation/bank.js';
import { COMBINED, FEE, type Ground, type House, openGround, openHouse, refused } from '../../test/support/payments.js';
import { charge, type PaymentPorts } from './charge.js';
import { beginning } from './gateway/call.js';
import type { ChargeTxn, GatewayAccount, Outcome, PaymentGateway, ReversalTxn } from './gateway/gateway.js';
import { finishEmptyCreate } from './lost.js';
import { type Charged, openOf } from './payment.js';
import { createRecovery, type RecoveryWork } from './recovery.js';
import { resolvePayment, type ResolveRequest } from './resolve.js';
import { type KeyBinding, reverse } from './reverse.js';

const MINUTE = 60_000;
const HOUR = 60 * MINUTE;

let ground: Ground;
let house: House;
let bank: Bank;
/** Changes the calls of the next gateway that is found. */
let change: (inner: PaymentGateway) => Partial<PaymentGateway>;
let ports: PaymentPorts;
beforeAll(async () => {
  ground = await openGround();
});
afterAll(() => ground.close());
const begin = async (name: GatewayName, fee = COMBINED) => {
  house = await openHouse(ground, fee);
  bank = new Bank(() => house.clock.now());
  change = () => ({});
  const find = (account: GatewayAccount): PaymentGateway => {
    const inner = bankGateway(bank, { ...account, gateway: name }, directWire, () => house.clock.now());
    return { ...inner, ...change(inner) };
  };
  ports = { ...house.ports, gateways: { find } };
};
afterEach(() => void (change = () => ({})));

const origin = () => ({ actor: { type: 'partner', id: house.accountId }, correlationId: house.ids.uuid() }) as const;
const pay = async (card: string, paymentId = house.ids.uuid()) => {
  const attempt = { paymentId, attemptId: house.ids.uuid(), idempotency: null };
  return charge(ports, house.request({ card }), attempt, origin(), new Deadline(house.clock, 28_000));
};
/** The payment whose last charge the bank took, and whose answer was lost. */
const lost = async (card: string = CARDS.approved): Promise<string> => {
  const paymentId = house.ids.uuid();
  change = (inner) => ({
    charge: async (call, signal) => {
      const answer = await inner.charge(call, signal);
      return call.leg === 'principal' ? answer : { kind: 'unknown', cause: 'disconnected' };
    },
  });
  expect((await refused(pay(card, paymentId))).code).toBe('PAYMENT_TIMEOUT');
  change = () => ({});
  return paymentId;
};
/** The bank does not answer a void of this leg. */
const voidUnanswered =
  (silent: string): typeof change =>
  (inner) => ({ void: async (call, signal) => (call.leg === silent ? { kind: 'unknown', cause: 'timeout' } : inner.void(call, signal)) });
const recorded: Parameters<RecoveryWork['record']>[0][] = [];
const recovery = () => {
  const due = async () =>
    Promise.all(
      open.map(async (paymentId) => {
        const attempt = openOf(await house.state(paymentId)) ?? { attemptId: house.ids.uuid(), since: new Date(house.clock.now()).toISOString() };
        const { attemptId, since } = attempt;
        return { paymentId, attemptId, tries: 0, since, until: recorded.findLast((one) => one.attemptId === attemptId)?.until ?? null };
      }),
    );
  return createRecovery(ports, house.store, { due, record: async (tried) => void recorded.push(tried), hurry: async () => undefined });
};
let open: string[] = [];
beforeEach(() => void ((open = []), (recorded.length = 0)));
/** Recovery tries the payment, a minute later. Returns what it notes. */
const recover = async (paymentId: string, afterMs = MINUTE) => {
  house.clock.advance(afterMs);
  open = [paymentId];
  await recovery().round();
  const { outcome, why, until } = recorded.at(-1)!;
  return { outcome, why, until };
};
const giveBack = (paymentId: string, operation: 'void' | 'refund', amountCents: number | null = null, key: KeyBinding | null = null) =>
  reverse(
    ports,
    { operation, paymentId, accountId: house.accountId, initiatedBy: 'partner', amountCents, includeFee: amountCents === null, reason: null },
    key,
    origin(),
    new Deadline(house.clock, 28_000),
  );
/** Closes the batches of a payment at the bank. The stream does not know of it yet. */
const closeBatches = (payment: unknown): void => {
  for (const { account } of (payment as Charged).legs) bank.closeBatch(account.merchantAccount);
};
/** Closes the batch at the bank, and records it. */
const settle = async (paymentId: string): Promise<void> => {
  const loaded = await house.ports.streams.load(paymentId);
  for (const { leg, account, principalCents, feeCents } of (loaded.payment as Charged).legs) {
    const at = new Date(house.clock.now()).toISOString();
    const batchId = bank.closeBatch(account.merchantAccount)!;
    const settled = {
      type: 'RecordSettlement',
      at,
      leg,
      batchId,
      closedAt: at,
      accepted: true,
      grossCents: principalCents + feeCents,
      feeCents: 0,
    } as const;
    await house.ports.streams.execute(loaded, [settled], origin(), new Deadline(house.clock, 28_000));
  }
};
const returned = () => [...bank.reversals.values()].map(({ op, amountCents }) => [op, amountCents]);
const dataOf = async (paymentId: string, type: string) => (await house.events(paymentId)).find((event) => event.type === type)?.data;

const NO_FEE = { flatCents: 0, percentBps: 0, minCents: 0 };
const CREDENTIALS = { 'authorize-net': '{"apiLoginId":"a","transactionKey":"b"}', stripe: '{"secretKey":"sk_test_a"}' };
const merchantOf = <G extends keyof typeof CREDENTIALS>(gateway: G) =>
  ({ merchantAccount: 'm', gateway, environment: 'sandbox', settings: { cutOff: null, endpoint: null }, repeats: null }) as const;
const MERCHANTS = { 'authorize-net': merchantOf('authorize-net'), stripe: merchantOf('stripe') };

describe('limits of a gateway are refused before the intent', () => {
  const able = (capabilities: Partial<PaymentGateway['capabilities']>) => {
    change = (inner) => ({ capabilities: { ...inner.capabilities, ...capabilities } });
  };
  beforeEach(async () => {
    await begin('bank-refund-only');
    await limitCards();
  });
  const limitCards = async () => {
    await house.administration.setLimits(house.portalId, 'card', { attempts: 3, declines: 3, windowSeconds: 600, blockSeconds: 600 });
    await house.project();
  };
  const counted = async () => {
    const { rows } = await ground.pool.query<{ kind: string }>('select kind from velocity_entry where portal_id = $1', [house.portalId]);
    return rows.map(({ kind }) => kind);
  };
  test('an attempt within the limits is counted', async () => {
    await pay(CARDS.approved);
    expect(await counted()).toEqual(['attempt']);
  });
  test.each([
    ['a card with more digits', { maxCardDigits: 15 }, 'card numbers of at most 15 digits'],
    ['less than the least', { minAmountCents: 1_000_000 }, 'charges from 1000000 cents'],
    ['more than the most', { maxAmountCents: 50 }, 'charges up to 50 cents'],
    ['a raw card', { rawCard: false }, 'cannot charge this kind of payment method'],
  ] as const)('%s', async (_, capabilities, message) => {
    able(capabilities);
    const paymentId = house.ids.uuid();
    expect(await refused(pay(CARDS.approved, paymentId))).toMatchObject({
      code: 'PAYMENT_NOT_ALLOWED',
      status: 422,
      message: expect.stringContaining(message),
      details: {},
    });
    expect(await house.history(paymentId)).toEqual([]);
    expect(bank.sent.size).toBe(0);
    expect(await counted()).toEqual([]);
  });
  describe.each([
    ['authorize-net', 'a card of 17 digits', { card: '41111111111111113' }, {}, 'card numbers of at most 16 digits'],
    ['authorize-net', 'a token', { token: 'pm_card_visa' }, {}, 'this kind of payment method'],
    ['stripe', 'a raw card', { card: CARDS.approved }, {}, 'this kind of payment method'],
    ['stripe', '49 cents', { token: 'pm_card_visa', lines: [49] }, NO_FEE, 'charges from 50 cents'],
    ['stripe', 'a token for two charges', { token: 'pm_card_visa' }, { chargeMode: 'separate' }, 'this kind of payment method'],
  ] as const)('the limits of %s', (vendor, what, asked, fee, message) => {
    test(`${what}: 422, not counted, without an intent and a call`, async () => {
      await begin('bank-refund-only', { ...COMBINED, ...fee });
      await limitCards();
      const adapter = createVendorGateway(MERCHANTS[vendor], CREDENTIALS[vendor], { clock: house.clock });
      adapter.close();
      able(adapter.capabilities);
      const paymentId = house.ids.uuid();
      const attempt = { paymentId, attemptId: house.ids.uuid(), idempotency: null };
      const paid = charge(ports, house.request(asked), attempt, origin(), new Deadline(house.clock, 28_000));
      expect(await refused(paid)).toMatchObject({ code: 'PAYMENT_NOT_ALLOWED', status: 422, message: expect.stringContaining(message), details: {} });
      expect([await house.history(paymentId), bank.sent.size, await counted()]).toEqual([[], 0, []]);
    });
  });
  test('a gateway that takes no new charges: before the intent, and not counted', async () => {
    change = () => ({ mayCharge: () => false });
    const paymentId = house.ids.uuid();
    expect(await refused(pay(CARDS.approved, paymentId))).toMatchObject({ code: 'GATEWAY_NOT_CONFIGURED', status: 503, details: {} });
    expect([await house.history(paymentId), bank.sent.size, await counted()]).toEqual([[], 0, []]);
    change = () => ({ mayCharge: () => true });
    await pay(CARDS.approved, paymentId);
    expect(await counted()).toEqual(['attempt']);
  });
  test('the account of each leg is asked for: without that of the fee nothing is charged', async () => {
    await begin('bank-plain', { ...COMBINED, chargeMode: 'separate' });
    const find = ports.gateways.find.bind(ports.gateways);
    ports = { ...ports, gateways: { find: (account) => (account.merchantAccount.startsWith('fee-') ? null : find(account)) } };
    expect((await refused(pay(CARDS.approved))).code).toBe('GATEWAY_NOT_CONFIGURED');
    expect(bank.sent.size).toBe(0);
  });
});

describe('a charge that is held for review', () => {
  beforeEach(() => begin('bank-after-batch'));
  test('is undone at once: 402', async () => {
    const paymentId = house.ids.uuid();
    expect(await refused(pay(CARDS.held, paymentId))).toMatchObject({
      code: 'PAYMENT_DECLINED',
      status: 402,
      details: { declineCode: 'generic_decline' },
    });
    const [{ transactionId, voidedCents }] = [...bank.charges.values()] as never as [{ transactionId: string; voidedCents: number }];
    expect(voidedCents).toBe(10_325);
    expect(await dataOf(paymentId, 'PaymentDeclined')).toMatchObject({
      raw: 'held for review: 252',
      transactionId,
      takenBack: [{ leg: 'combined', amountCents: 10_325, transactionId }],
    });
  });
  test('whose void gets no answer: 504, then recovery voids it', async () => {
    change = () => ({ void: async () => ({ kind: 'unknown', cause: 'timeout' }) });
    const paymentId = house.ids.uuid();
    expect((await refused(pay(CARDS.held, paymentId))).code).toBe('PAYMENT_TIMEOUT');
    expect(await dataOf(paymentId, 'PaymentOutcomeUnknown')).toMatchObject({ cause: 'held_for_review' });
    change = () => ({});
    expect(await recover(paymentId)).toMatchObject({ outcome: 'resolved' });
    expect([(await house.view(paymentId)).status, returned()]).toEqual(['voided', [['void', 10_325]]]);
  });
});

describe('a charge that was approved in part', () => {
  beforeEach(async () => {
    await begin('bank-after-batch');
    change = part;
  });
  /** The bank answers as a prepaid card does: the charge stands, and it must not. */
  const part: typeof change = (inner) => ({
    charge: async (call, signal) => {
      const outcome = await inner.charge(call, signal);
      return outcome.kind === 'approved' ? { kind: 'held', why: 'partial', transactionId: outcome.txn.transactionId, raw: 'part' } : outcome;
    },
  });
  test('is undone at once: 402', async () => {
    const paymentId = house.ids.uuid();
    expect(await refused(pay(CARDS.approved, paymentId))).toMatchObject({ code: 'PAYMENT_DECLINED', status: 402 });
    expect([(await house.view(paymentId)).status, returned()]).toEqual(['failed', [['void', 10_325]]]);
  });
  test('whose void gets no answer: 504, then recovery voids it', async () => {
    change = (inner) => ({ ...part(inner), void: async () => ({ kind: 'unknown', cause: 'timeout' }) });
    const paymentId = house.ids.uuid();
    expect(await refused(pay(CARDS.approved, paymentId))).toMatchObject({ code: 'PAYMENT_TIMEOUT', status: 504 });
    expect([(await house.view(paymentId)).status, returned()]).toEqual(['unknown', []]);
    change = () => ({});
    expect(await recover(paymentId)).toMatchObject({ outcome: 'resolved' });
    expect([(await house.view(paymentId)).status, returned()]).toEqual(['voided', [['void', 10_325]]]);
  });
});

test('a token that names no card: 402 invalid_token; velocity counts neither an attempt nor a decline', async () => {
  await begin('bank-refund-only');
  await house.administration.setLimits(house.portalId, 'card', { attempts: 1, declines: 1, windowSeconds: 600, blockSeconds: 600 });
  await house.project();
  change = () => ({ charge: async () => ({ kind: 'declined', decline: { code: 'invalid_token', raw: 'resource_missing' } }) });
  for (let tried = 0; tried < 3; tried++) {
    const paymentId = house.ids.uuid();
    expect(await refused(pay(CARDS.approved, paymentId))).toMatchObject({
      code: 'PAYMENT_DECLINED',
      status: 402,
      details: { id: paymentId, declineCode: 'invalid_token' },
    });
    expect((await house.view(paymentId)).status).toBe('failed');
  }
  const { rows } = await ground.pool.query('select kind from velocity_entry where portal_id = $1', [house.portalId]);
  expect(rows).toEqual([]);
  change = () => ({});
  await pay(CARDS.approved);
});

describe('what an outcome means, as docs/processors.md tells it', () => {
  const page = readFileSync('docs/processors.md', 'utf8');
  const rowOf = (outcome: string): string[] =>
    page
      .split('\n')
      .find((line) => line.startsWith(`| ${outcome}`))!
      .split('|')
      .slice(2, -1)
      .map((cell) => cell.trim());
  const HELD = { kind: 'held', transactionId: 'none' } as const;
  const answered =
    (outcome: Outcome<ChargeTxn>): typeof change =>
    () => ({ charge: async () => outcome });
  const undone =
    (outcome: Outcome<ReversalTxn>, held: Outcome<ChargeTxn> = HELD): typeof change =>
    () => ({ charge: async () => held, void: async () => outcome });
  const approved = { kind: 'approved', txn: { transactionId: 'v' } } as const;
  test.each<[row: string, what: string, typeof change, status: number, code: string, shown: string]>([
    ['nothing was executed', 'the vendor says so', answered({ kind: 'not_processed', answered: true }), 502, 'PAYMENT_GATEWAY_ERROR', 'failed'],
    [
      'nothing was executed',
      'the whole request was refused',
      answered({ kind: 'not_processed', answered: false }),
      502,
      'PAYMENT_GATEWAY_ERROR',
      'failed',
    ],
    ['declined', 'by the card', answered({ kind: 'declined', decline: { code: 'generic_decline' } }), 402, 'PAYMENT_DECLINED', 'failed'],
    ['declined', 'by the token', answered({ kind: 'declined', decline: { code: 'invalid_token' } }), 402, 'PAYMENT_DECLINED', 'failed'],
    ['must not stand', 'for review, undone', undone(approved), 402, 'PAYMENT_DECLINED', 'failed'],
    ['must not stand', 'in part, undone', undone(approved, { ...HELD, why: 'partial' }), 402, 'PAYMENT_DECLINED', 'failed'],
    ['must not stand', 'the undoing is uncertain', undone({ kind: 'unknown', cause: 'timeout' }), 504, 'PAYMENT_TIMEOUT', 'unknown'],
    ['must not stand', 'the undoing was not carried out', undone({ kind: 'not_processed', answered: false }), 504, 'PAYMENT_TIMEOUT', 'unknown'],
    ['must not stand', 'the undoing was refused', undone({ kind: 'rejected', why: 'already_settled' }), 504, 'PAYMENT_TIMEOUT', 'unknown'],
    ['unknown', 'a contradiction', answered({ kind: 'unknown', cause: 'unreadable' }), 504, 'PAYMENT_TIMEOUT', 'unknown'],
    ['unknown', 'no answer', answered({ kind: 'unknown', cause: 'timeout' }), 504, 'PAYMENT_TIMEOUT', 'unknown'],
  ])('%s: %s', async (row, _, given, status, code, shown) => {
    await begin('bank-after-batch');
    change = given;
    const paymentId = house.ids.uuid();
    expect(await refused(pay(CARDS.approved, paymentId))).toMatchObject({ status, code, details: { id: paymentId } });
    expect((await house.view(paymentId)).status).toBe(shown);
    const [answer, get, retry] = rowOf(row);
    expect([answer, get]).toEqual([expect.stringContaining(String(status)), expect.stringContaining(`\`${shown}\``)]);
    // A new payment may charge at once, whatever became of this one. Only where nothing can stand, the page says that it may.
    change = () => ({});
    await pay(CARDS.approved);
    expect(retry).toMatch(row === 'unknown' ? /^must read the payment first/ : row === 'must not stand' ? /^as the answer says/ : /^may charge/);
    expect([...bank.charges.values()]).toHaveLength(1);
  });
});

describe('staff resolve a charge that is held for review', () => {
  beforeEach(() => begin('bank-after-batch'));
  const settled = { caughtUp: async () => undefined, settledUnknown: async () => ({}), sentBack: async () => ({}) };
  const resolve = (paymentId: string, as: ResolveRequest['as'], transactions: ResolveRequest['transactions'] = {}) =>
    resolvePayment(ports, settled, { paymentId, as, evidence: 'call with the bank', by: 'Dana', force: true, transactions });
  test('is refused, also with force; then recovery voids the charge', async () => {
    change = () => ({ void: async () => ({ kind: 'unknown', cause: 'timeout' }) });
    const paymentId = house.ids.uuid();
    expect((await refused(pay(CARDS.held, paymentId))).code).toBe('PAYMENT_TIMEOUT');
    change = () => ({});
    const [{ transactionId }] = [...bank.charges.values()] as never as [{ transactionId: string }];
    for (const [as, named] of [
      ['succeeded', {}],
      ['succeeded', { combined: transactionId }],
      ['voided', { combined: transactionId }],
      ['failed', {}],
    ] as const)
      // prettier-ignore
      expect(await refused(resolve(paymentId, as, named))).toMatchObject({
        code: 'INVALID_STATE',
        message: expect.stringMatching(`holds the charge of the combined leg for review; the payment cannot be resolved as ${as}`),
      });
    expect((await house.view(paymentId)).status).toBe('unknown');
    expect(await recover(paymentId)).toMatchObject({ outcome: 'resolved' });
    expect((await house.view(paymentId)).status).toBe('voided');
  });
  test('is refused if the charge appears after the look-up', async () => {
    const paymentId = await lost(CARDS.held);
    change = () => ({ lookup: async () => ({ found: false }) });
    expect((await refused(resolve(paymentId, 'failed'))).message).toMatch('for review');
    expect((await house.view(paymentId)).status).toBe('unknown');
  });
});

describe('one leg without an answer does not keep the other leg charged', () => {
  beforeEach(() => begin('bank-after-batch', FEE));
  const legOf = (leg: string) => [...bank.charges.values()].find((charge) => charge.leg === leg)!;
  test.each([
    ['principal', 'fee'],
    ['fee', 'principal'],
  ] as const)('no answer about the void of the %s leg', async (silent, other) => {
    const paymentId = await lost();
    change = voidUnanswered(silent);
    expect(await recover(paymentId)).toMatchObject({ outcome: 'open', why: 'unreachable' });
    expect([legOf(silent).voidedCents, legOf(other).voidedCents]).toEqual([0, legOf(other).amountCents]);
    change = () => ({});
    expect(await recover(paymentId)).toMatchObject({ outcome: 'resolved' });
    expect([(await house.view(paymentId)).status, legOf(silent).voidedCents]).toEqual(['voided', legOf(silent).amountCents]);
  });
  test('no answer about the charge of the principal leg', async () => {
    const paymentId = await lost();
    change = (inner) => ({
      finalize: async (call, signal) => (call.leg === 'principal' ? { kind: 'cannot_tell', why: 'unreachable' } : inner.finalize(call, signal)),
    });
    expect(await recover(paymentId)).toMatchObject({ outcome: 'open', why: 'unreachable' });
    expect([legOf('principal').voidedCents, legOf('fee').voidedCents]).toEqual([0, legOf('fee').amountCents]);
  });
});

test('a gateway that may have promised staff that a leg stays charged: without its answer, the other leg is left alone', async () => {
  await begin('bank-plain', FEE);
  const paymentId = await lost();
  change = voidUnanswered('principal');
  expect(await recover(paymentId)).toMatchObject({ outcome: 'open', why: 'unreachable' });
  expect(returned()).toEqual([]);
  change = () => ({});
  expect(await recover(paymentId)).toMatchObject({ outcome: 'resolved' });
  expect(returned()).toHaveLength(2);
});

describe('a charge that was voided before the call, and the gateway does not say by whom', () => {
  const before: typeof change = () => ({
    void: async ({ chargeTransactionId }) => ({ kind: 'approved', txn: { transactionId: chargeTransactionId, before: true } }),
  });
  const payAndChange = async () => {
    await begin('bank-plain');
    const { id } = (await pay(CARDS.approved)).view;
    change = before;
    return id;
  };
  test('the first call: it was voided elsewhere', async () => {
    for (const [operation, code] of [
      ['void', 'VOID_FAILED'],
      ['refund', 'INVALID_STATE'],
    ] as const) {
      const id = await payAndChange();
      expect(await refused(giveBack(id, operation))).toMatchObject({ code });
      expect((await house.events(id)).slice(-2).map(({ type }) => type)).toEqual(['ReversalEnded', 'ReturnedElsewhere']);
      expect((await house.view(id)).status).toBe('succeeded');
      expect(await refused(giveBack(id, 'refund'))).toMatchObject({
        code: 'INVALID_STATE',
        message: expect.stringContaining('staff must record it'),
      });
    }
  });
  test('a repeat of our own call: it was our own void', async () => {
    const id = await payAndChange();
    const claimed = { attemptId: house.ids.uuid(), claimedAt: timestamp(house.clock.now()), begun: false } as const;
    const key: KeyBinding = { ...claimed, recorded: null as never, renew: async () => house.ids.uuid(), holds: null };
    // The process dies between the call and the record of its outcome.
    const streams = new Proxy(ports.streams, {
      get: (real, name) => {
        const value: unknown = Reflect.get(real, name, real);
        if (name === 'execute') return async (...args: Parameters<typeof real.execute>) => (args[1][0]!.type === 'RequestVoid' ? real.execute(...args) : Promise.reject(new Error('killed'))); // prettier-ignore
        return typeof value === 'function' ? (value as () => unknown).bind(real) : value;
      },
    });
    const alive = ports;
    ports = { ...ports, streams };
    await giveBack(id, 'void', null, key).catch(() => undefined);
    ports = alive;
    expect((await giveBack(id, 'void', null, key)).view).toMatchObject({ status: 'voided' });
    expect((await house.events(id)).map(({ type }) => type)).not.toContain('ReturnedElsewhere');
  });
});

describe('a gateway without voids', () => {
  beforeEach(() => begin('bank-refund-only'));
  test('an unknown charge is undone by a refund, and the stream names both transactions', async () => {
    const paymentId = await lost();
    expect(await recover(paymentId)).toMatchObject({ outcome: 'resolved', why: null, until: null });
    expect([(await house.view(paymentId)).status, returned()]).toEqual(['voided', [['refund', 10_325]]]);
    const [charged] = bank.charges.values();
    expect(await dataOf(paymentId, 'PaymentVoided')).toMatchObject({ undone: { means: 'refund', chargeTransactionId: charged!.transactionId } });
    expect(await house.state(paymentId)).toMatchObject({
      phase: 'voided',
      undone: [{ leg: 'combined', chargeTransactionId: charged!.transactionId, amountCents: 10_325 }],
    });
  });
  test('a void is refused, a refund of the whole works', async () => {
    const { id } = (await pay(CARDS.approved)).view;
    expect(await refused(giveBack(id, 'void'))).toMatchObject({ code: 'VOID_FAILED', details: { suggestedAction: 'refund' } });
    expect((await giveBack(id, 'refund')).view).toMatchObject({ reversalType: 'refund', amountCents: 10_325 });
  });
  test('a refund that vanished is not sent again after the gateway may have forgotten it', async () => {
    const { id } = (await pay(CARDS.approved)).view;
    change = (inner) => ({
      refund: async (call, signal) => {
        await inner.refund(call, signal);
        return { kind: 'unknown', cause: 'disconnected' };
      },
    });
    await refused(giveBack(id, 'refund', 1_000));
    change = () => ({});
    expect(await recover(id, 25 * HOUR)).toMatchObject({ outcome: 'resolved' });
    expect(returned()).toEqual([['refund', 1_000]]);
    expect((await house.view(id)).refundedAmountCents).toBe(1_000);
  });
});

describe('a gateway that can tell only after the batch', () => {
  beforeEach(() => begin('bank-after-batch'));
  test('a charge that arrived is voided at the first look', async () => {
    const paymentId = await lost();
    expect(await recover(paymentId)).toMatchObject({ outcome: 'resolved' });
    expect([(await house.view(paymentId)).status, returned()]).toEqual(['voided', [['void', 10_325]]]);
  });
  test('a charge that never arrived waits until the batch is listed, then it was never made', async () => {
    const paymentId = house.ids.uuid();
    change = () => ({ charge: async () => ({ kind: 'unknown', cause: 'disconnected' }) });
    expect((await refused(pay(CARDS.approved, paymentId))).code).toBe('PAYMENT_TIMEOUT');
    change = () => ({});
    const first = await recover(paymentId);
    expect(first).toMatchObject({ outcome: 'open', why: 'not_visible', until: expect.stringMatching(/T\d\d:[03]5:00\.000Z$/) });
    expect((await house.view(paymentId)).status).toBe('unknown');
    const until = Date.parse(first.until!);
    expect(await recover(paymentId, until - house.clock.now() - 1_000)).toEqual(first);
    expect(await recover(paymentId, 61_000)).toMatchObject({ outcome: 'resolved' });
    expect((await house.view(paymentId)).status).toBe('voided');
  });

  /** The payment whose charge never arrived. */
  const neverArrived = async (): Promise<string> => {
    const paymentId = house.ids.uuid();
    change = () => ({ charge: async () => ({ kind: 'unknown', cause: 'disconnected' }) });
    expect((await refused(pay(CARDS.approved, paymentId))).code).toBe('PAYMENT_TIMEOUT');
    change = () => ({});
    return paymentId;
  };
  const tasks = async (paymentId: string) => {
    const found: unknown[] = [];
    for await (const events of house.store.readAll(null, { streamPrefixes: ['staff-task-'] })) found.push(...events.map(({ data }) => data));
    return found.filter((data) => (data as { paymentId: string }).paymentId === paymentId);
  };
  test('an answer without a time, and one that names a later time, leave the time as it was', async () => {
    const paymentId = await neverArrived();
    const { until } = await recover(paymentId);
    change = () => ({ finalize: async () => ({ kind: 'cannot_tell', why: 'unreachable' }) });
    expect(await recover(paymentId)).toEqual({ outcome: 'open', why: 'unreachable', until });
    change = () => ({ finalize: async () => ({ kind: 'cannot_tell', why: 'in_flight', until: new Date(house.clock.now() + 5_000).toISOString() }) });
    expect(await recover(paymentId)).toEqual({ outcome: 'open', why: 'in_flight', until });
    const later = () => new Date(house.clock.now() + 30 * MINUTE).toISOString();
    change = () => ({ finalize: async () => ({ kind: 'cannot_tell', why: 'not_visible', until: later() }) });
    expect(await recover(paymentId, 2 * HOUR)).toEqual({ outcome: 'open', why: 'not_visible', until });
    // It is asked again a minute after the time that the gateway named last.
    expect(Math.abs(Date.parse(recorded.at(-1)!.nextTryAt) - house.clock.now() - 31 * MINUTE)).toBeLessThan(5_000);
  });
  test.each(['not_visible', 'unreachable'] as const)(
    'a batch that is a day late is one task for staff, which ends with the attempt: %s',
    async (why) => {
      const paymentId = await neverArrived();
      const { until } = await recover(paymentId);
      const later = () => new Date(house.clock.now() + 30 * MINUTE).toISOString();
      change = () => ({ finalize: async () => ({ kind: 'cannot_tell', why, ...(why === 'not_visible' && { until: later() }) }) });
      await recover(paymentId, Date.parse(until!) + 24 * HOUR - MINUTE - house.clock.now());
      expect(await tasks(paymentId)).toEqual([]);
      for (let round = 1; round <= 3; round++) {
        expect(await recover(paymentId, 31 * MINUTE)).toMatchObject({ outcome: 'open', until });
        expect(await tasks(paymentId)).toEqual([
          { paymentId, reason: 'outcome_overdue', evidence: { attemptId: openOf(await house.state(paymentId))!.attemptId, why, until } },
        ]);
      }
      change = () => ({});
      expect(await recover(paymentId)).toEqual({ outcome: 'resolved', why: null, until: null });
      expect([(await house.view(paymentId)).status, (await tasks(paymentId)).length]).toEqual(['voided', 1]);
    },
  );

  test('a create without an intent was never charged only when the batch is listed (C76)', async () => {
    const claimedAt = new Date(house.clock.now()).toISOString();
    const account = { gateway: 'simulator', merchantAccount: 'm', credentialsRef: 'simulated', environment: 'sandbox' } as const;
    const portal = { portalId: house.portalId, accounts: [account] };
    const create = { accountId: house.accountId, paymentId: house.ids.uuid(), attemptId: house.ids.uuid(), claimedAt, begun: null, portal };
    const origin = { actor: { type: 'recovery' as const, id: 'spec' }, correlationId: 'spec' };
    const loaded = await ports.streams.load(create.paymentId);
    expect(await finishEmptyCreate(ports, loaded, create, 'spec', origin, new Deadline(house.clock, HOUR))).toBe('lost');
    expect(await house.state(create.paymentId)).toMatchObject({ phase: 'unknown', lost: true, terms: { portalId: house.portalId } });
    house.clock.advance(HOUR);
    expect(await recover(create.paymentId)).toMatchObject({ outcome: 'resolved' });
    expect((await house.state(create.paymentId)).phase).toBe('voided');
  });

  describe('a reversal without an answer (C72)', () => {
    /** The request ends with a 504. `arrived`: the bank executed the call. */
    const unheard = (op: 'void' | 'refund', arrived: boolean) => {
      change = (inner) => ({
        [op]: async (call: never, signal: AbortSignal) => {
          if (arrived) await inner[op](call, signal);
          return { kind: 'unknown', cause: 'disconnected' };
        },
      });
    };
    test.each([true, false])('a void is sent once more under its reference; it arrived before: %s', async (arrived) => {
      const { id } = (await pay(CARDS.approved)).view;
      unheard('void', arrived);
      expect((await refused(giveBack(id, 'void'))).code).toBe('PAYMENT_TIMEOUT');
      change = () => ({});
      expect(await recover(id)).toMatchObject({ outcome: 'resolved' });
      expect([(await house.view(id)).status, returned()]).toEqual(['voided', [['void', 10_325]]]);
    });
    test.each(['void', 'refund'] as const)('a %s whose call could not be sent: 504, because recovery sends it', async (operation) => {
      const { id } = (await pay(CARDS.approved)).view;
      if (operation === 'refund') await settle(id);
      const able = ports;
      ports = beginning(ports, { paymentId: id, intent: null as never }, async () => false);
      expect((await refused(giveBack(id, operation))).code).toBe('PAYMENT_TIMEOUT');
      expect(returned()).toEqual([]);
      ports = able;
      expect(await recover(id)).toMatchObject({ outcome: 'resolved' });
      expect(returned()).toEqual([[operation, 10_325]]);
    });
    test.each(['exceeds', 'already_reversed'] as const)('a request that repeats a vanished one and is refused with %s: 504', async (why) => {
      const { id } = (await pay(CARDS.approved)).view;
      await settle(id);
      const attemptId = house.ids.uuid();
      const recorded = { keySpace: house.accountId, keyHash: 'a', fingerprint: 'b', kid: 'c', operation: 'refund' };
      const key = {
        attemptId,
        recorded,
        renew: () => Promise.reject(new Error('no new attempt')),
        holds: null,
        begun: false as const,
        claimedAt: '',
      };
      change = (inner) => ({
        refund: async (call, signal) => {
          await inner.refund(call, signal);
          throw new Error('the process ends');
        },
      });
      await expect(giveBack(id, 'refund', null, key)).rejects.toThrow('the process ends');
      change = () => ({ refund: async () => ({ kind: 'rejected', why }) });
      expect((await refused(giveBack(id, 'refund', null, key))).code).toBe('PAYMENT_TIMEOUT');
      expect(openOf(await house.state(id))).not.toBeNull();
      change = () => ({});
      expect(await recover(id)).toMatchObject({ outcome: 'resolved' });
      expect(returned()).toEqual([['refund', 10_325]]);
    });
    test.each([true, false])('a refund, too, as long as the gateway takes it once; it arrived before: %s', async (arrived) => {
      const { id } = (await pay(CARDS.approved)).view;
      await settle(id);
      unheard('refund', arrived);
      expect((await refused(giveBack(id, 'refund', 1_000))).code).toBe('PAYMENT_TIMEOUT');
      change = () => ({});
      expect(await recover(id)).toMatchObject({ outcome: 'resolved' });
      expect(returned()).toEqual([['refund', 1_000]]);
      expect((await house.view(id)).refundedAmountCents).toBe(1_000);
    });
    /** A full refund without an answer. The batch has closed, so its void came too late, and its refund was sent. */
    const refundAfterLateVoid = async (arrived: boolean): Promise<string> => {
      const { id } = (await pay(CARDS.approved)).view;
      closeBatches(await house.state(id));
      unheard('refund', arrived);
      expect((await refused(giveBack(id, 'refund'))).code).toBe('PAYMENT_TIMEOUT');
      expect(returned()).toEqual(arrived ? [['refund', 10_325]] : []);
      change = () => ({});
      return id;
    };
    test.each([true, false])('a full refund whose void came too late is sent again as a refund; it arrived before: %s', async (arrived) => {
      const id = await refundAfterLateVoid(arrived);
      expect(await recover(id)).toMatchObject({ outcome: 'resolved' });
      expect([(await house.view(id)).status, returned()]).toEqual(['refunded', [['refund', 10_325]]]);
    });
    test('such a refund is not sent again if the gateway could take it twice', async () => {
      const id = await refundAfterLateVoid(false);
      change = (inner) => ({ capabilities: { ...inner.capabilities, repeatSafeMs: { void: Number.POSITIVE_INFINITY, refund: 0 } } });
      expect(await recover(id)).toMatchObject({ outcome: 'open', why: 'not_visible' });
      expect(returned()).toEqual([]);
    });
    test.each(['exceeds', 'already_reversed'] as const)(
      'the first call may have arrived if its repeat is refused with %s: it stays open',
      async (why) => {
        const id = await refundAfterLateVoid(true);
        change = (inner) => ({
          finalize: async (call, signal) =>
            call.op === 'refund' ? { kind: 'cannot_tell', why: 'not_visible', until: '2030-01-01T00:00:00.000Z' } : inner.finalize(call, signal),
          refund: async () => ({ kind: 'rejected', why }),
        });
        expect(await recover(id)).toMatchObject({ outcome: 'open', why: 'not_visible' });
        expect(openOf(await house.state(id))).not.toBeNull();
      },
    );
    test('a refund never becomes a void, which could return more than was asked for', async () => {
      const { id } = (await pay(CARDS.approved)).view;
      await settle(id);
      unheard('refund', false);
      await refused(giveBack(id, 'refund', 1_000));
      change = () => ({
        finalize: async (call) =>
          call.op === 'void'
            ? { kind: 'cannot_tell', why: 'not_visible', until: '2030-01-01T00:00:00.000Z' }
            : { kind: 'executed', result: { kind: 'rejected', why: 'other' } },
        void: async () => {
          throw new Error('a void was sent');
        },
      });
      expect(await recover(id)).toMatchObject({ outcome: 'open', why: 'not_visible' });
    });
    test('an old one is not sent again: it waits for the batch, and then was never executed', async () => {
      const { id } = (await pay(CARDS.approved)).view;
      await settle(id);
      unheard('refund', false);
      await refused(giveBack(id, 'refund', 1_000));
      change = (inner) => ({
        capabilities: { ...inner.capabilities, repeatSafeMs: { void: Number.POSITIVE_INFINITY, refund: 0 } },
        refund: async () => {
          throw new Error('sent again');
        },
      });
      expect(await recover(id)).toMatchObject({ outcome: 'open', why: 'not_visible' });
      expect(await recover(id, HOUR)).toMatchObject({ outcome: 'resolved' });
      expect(returned()).toEqual([]);
      expect(((await house.state(id)) as Charged).attempts.map(({ ended }) => ended?.outcome)).toEqual(['never_executed']);
    });
    test('the next leg, which was never sent, is not sent by recovery', async () => {
      await begin('bank-after-batch', { ...COMBINED, chargeMode: 'separate' });
      const { id } = (await pay(CARDS.approved)).view;
      unheard('void', false);
      expect((await refused(giveBack(id, 'void'))).code).toBe('PAYMENT_TIMEOUT');
      change = () => ({});
      expect(await recover(id)).toMatchObject({ outcome: 'open', why: 'not_visible' });
      expect(returned()).toEqual([['void', 10_000]]);
      expect(await recover(id, 2 * MINUTE)).toMatchObject({ outcome: 'resolved' });
      expect(returned()).toEqual([['void', 10_000]]);
      expect(((await house.state(id)) as Charged).attempts.map(({ ended }) => ended?.outcome)).toEqual(['partial']);
      expect((await giveBack(id, 'void')).view).toMatchObject({ status: 'voided', amountCents: 10_325 });
    });
  });
});
