/** The adapter of Stripe against the double, over real sockets. */
import { mkdtempSync, rmSync } from 'node:fs';
import { createServer, type AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { inspect } from 'node:util';
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import {
  type ChargeTxn,
  type GatewayAccount,
  type GatewayDispute,
  type Outcome,
  type PaymentGateway,
  Secret,
  type SettlementRecord,
} from '#payments';
import { MovableClock } from '../../../test/support/clock.js';
import { eventually } from '../../../test/support/eventually.js';
import { controlOf, type StripeControl } from '../../../test/doubles/stripe/control.js';
import type { FaultName, Operation } from '../../../test/doubles/stripe/faults.js';
import { startStripeDouble, type StripeDouble } from '../../../test/doubles/stripe/server.js';
import { createStripeGateway, type StripeGatewayOptions } from './stripe.js';

const SECRET_KEY = 'sk_test_double_one_0001';
const HOUR = 3_600_000;
const account: GatewayAccount = { gateway: 'stripe', merchantAccount: 'town', credentialsRef: 'merchant-account:town', environment: 'sandbox' };

/** Waits end at once. The time of a business moves only by `advance`. */
class HastyClock extends MovableClock {
  override sleep(): Promise<void> {
    return new Promise((resolve) => void setTimeout(resolve, 1));
  }
}

let folder: string;
let double: StripeDouble;
let control: StripeControl;
let clock: MovableClock;
let gateway: PaymentGateway;
let logged: [string, object][];
const opened: PaymentGateway[] = [];

const open = (options: Partial<StripeGatewayOptions> = {}): PaymentGateway => {
  const made = createStripeGateway({
    endpoint: double.url,
    account,
    clock,
    credentials: { secretKey: SECRET_KEY },
    log: (message, fields) => void logged.push([message, fields]),
    ...options,
  });
  opened.push(made);
  return made;
};

beforeAll(async () => {
  folder = mkdtempSync(join(tmpdir(), 'payfold-stripe-'));
  double = await startStripeDouble({ file: join(folder, 'double.jsonl') });
  control = controlOf(double.url);
  clock = new HastyClock();
});
afterAll(async () => {
  await double.close();
  rmSync(folder, { recursive: true });
});
beforeEach(() => {
  logged = [];
  gateway = open();
});
afterEach(async () => {
  for (const one of opened.splice(0)) one.close();
  await control.heal();
});

const advance = async (ms: number) => {
  clock.advance(ms);
  await control.advance(ms);
};
const soon = () => AbortSignal.timeout(20_000);
const shortly = () => AbortSignal.timeout(300);
let drawn = 0;
const drawRef = () => `REF${String((drawn += 1)).padStart(17, '0')}`;
const now = () => new Date(clock.now()).toISOString();

const charge = async (
  { ref = drawRef(), amountCents = 1_000, token = 'pm_card_visa', begunAt = now(), on = gateway } = {},
  signal = soon(),
): Promise<Outcome<ChargeTxn>> =>
  on.charge({ ref, account, leg: 'combined', begunAt, amountCents, instrument: { type: 'card_token', token: new Secret(token) } }, signal);
const charged = async (ref = drawRef(), amountCents = 1_000, token = 'pm_card_visa'): Promise<string> => {
  const outcome = await charge({ ref, amountCents, token });
  if (outcome.kind !== 'approved') throw new Error(`not approved: ${JSON.stringify(outcome)}`);
  return outcome.txn.transactionId;
};
const refund = (chargeTransactionId: string, amountCents: number, ref = drawRef(), signal = soon()) =>
  gateway.refund({ ref, account, leg: 'combined', begunAt: now(), chargeTransactionId, amountCents, last4: '4242' }, signal);
const reverse = (chargeTransactionId: string, amountCents: number, ref = drawRef(), signal = soon()) =>
  gateway.void({ ref, account, leg: 'combined', begunAt: now(), chargeTransactionId, amountCents, askedBy: 'reversal' }, signal);
const about = (
  op: 'charge' | 'void' | 'refund' | 'reversal',
  ref: string,
  chargeTransactionId: string | null = null,
  begunAt = now(),
  amountCents = 1_000,
) => ({ ref, account, leg: 'combined', begunAt, op, amountCents, chargeTransactionId, last4: null }) as const;
const finalize = (...asked: Parameters<typeof about>) => gateway.finalize(about(...asked), soon());
const lookup = (...asked: Parameters<typeof about>) => gateway.lookup(about(...asked), soon());

const calls = () => ({ ...double.calls });
const callsSince = (before: ReturnType<typeof calls>, op: Operation) => (double.calls[op] ?? 0) - (before[op] ?? 0);

describe('a charge', () => {
  test('is created under its reference and confirmed with the token', async () => {
    const ref = drawRef();
    expect(await charge({ ref, amountCents: 12_345 })).toEqual({
      kind: 'approved',
      txn: {
        transactionId: expect.stringMatching(/^pi_/),
        authCode: expect.stringMatching(/^\d{6}$/),
        avs: 'not_checked',
        cvv: 'match',
        card: { brand: 'visa', last4: '4242' },
      },
    });
    const [intent, ...more] = await control.intents(ref);
    expect(more).toEqual([]);
    expect(intent).toMatchObject({ amount: 12_345, amount_received: 12_345, capture_method: 'automatic', payment_method_types: ['card'] });
  });

  test('the same call again gives the same answer, and charges once', async () => {
    const ref = drawRef();
    const token = await control.method();
    const first = await charge({ ref, token });
    expect(first.kind).toBe('approved');
    expect(await charge({ ref, token })).toEqual(first);
    expect(await control.intents(ref)).toHaveLength(1);
  });

  test('five that race under one reference charge once, and none is told that nothing happened', async () => {
    const ref = drawRef();
    await control.fault('slow', { op: 'confirm', ref, ms: 300 });
    const outcomes = await Promise.all(Array.from({ length: 5 }, () => charge({ ref })));
    const kinds = outcomes.map(({ kind }) => kind);
    expect(kinds).toContain('approved');
    expect(kinds.filter((kind) => kind !== 'approved' && kind !== 'unknown')).toEqual([]);
    expect((await control.charges()).filter(({ metadata }) => (metadata as { payfold_ref?: string }).payfold_ref === ref)).toHaveLength(1);
  });

  test('the same reference with another amount is refused', async () => {
    const ref = drawRef();
    await charged(ref, 1_000);
    expect(await charge({ ref, amountCents: 1_001 })).toMatchObject({ kind: 'rejected', why: 'other' });
    expect(await control.intents(ref)).toHaveLength(1);
  });

  test('the checks and the brand of the card', async () => {
    const token = await control.method({ brand: 'amex', last4: '0005', zip: 'fail', cvc: 'unavailable' });
    expect(await charge({ token })).toMatchObject({
      kind: 'approved',
      txn: { avs: 'no_match', cvv: 'not_checked', card: { brand: 'amex', last4: '0005' } },
    });
  });

  test.each([
    ['generic_decline', 'generic_decline'],
    ['insufficient_funds', 'insufficient_funds'],
    ['card_velocity_exceeded', 'card_limit_exceeded'],
    ['withdrawal_count_limit_exceeded', 'card_limit_exceeded'],
    ['expired_card', 'expired_card'],
    ['incorrect_cvc', 'cvv_mismatch'],
    ['invalid_cvc', 'cvv_mismatch'],
    ['incorrect_zip', 'postal_code_mismatch'],
    ['lost_card', 'generic_decline'],
    ['a_word_of_tomorrow', 'generic_decline'],
  ])('the decline %s is %s', async (declineCode, code) => {
    const ref = drawRef();
    expect(await charge({ ref, token: await control.method({ declineCode }) })).toEqual({
      kind: 'declined',
      decline: { code, raw: declineCode },
      transactionId: expect.stringMatching(/^pi_/),
    });
    expect(await finalize('charge', ref)).toMatchObject({ kind: 'executed', result: { kind: 'declined', decline: { code } } });
  });

  test.each([
    ['pm_card_chargeDeclinedExpiredCard', 'expired_card'],
    ['pm_card_chargeDeclinedIncorrectCvc', 'cvv_mismatch'],
    ['pm_card_chargeDeclinedProcessingError', 'generic_decline'],
    ['pm_card_authenticationRequired', 'generic_decline'],
  ])('the test card %s is declined with %s', async (token, code) => {
    expect(await charge({ token })).toMatchObject({ kind: 'declined', decline: { code } });
  });

  test('a raw card is never sent', async () => {
    const before = calls();
    const card = { type: 'card', number: new Secret('4242424242424242'), expiry: { month: 1, year: 2031 }, cvv: new Secret('123') } as const;
    const call = { ref: drawRef(), account, leg: 'combined', begunAt: now(), amountCents: 1_000, instrument: card } as const;
    expect(await gateway.charge(call, soon())).toMatchObject({ kind: 'not_processed', answered: false });
    expect(calls()).toEqual(before);
  });

  test('a token that is unknown or was used is refused, and nothing is charged', async () => {
    const ref = drawRef();
    expect(await charge({ ref, token: 'pm_unknown' })).toEqual({ kind: 'declined', decline: { code: 'invalid_token', raw: 'resource_missing' } });
    expect(await finalize('charge', ref)).toEqual({ kind: 'never' });
    const token = await control.method();
    await charged(drawRef(), 1_000, token);
    expect(await charge({ token })).toMatchObject({ kind: 'declined', decline: { code: 'invalid_token' } });
  });

  test.each([
    ['succeeded', null],
    ['processing', 60_000],
  ])('an error of the card beside an intent that is %s is a contradiction: unknown, and never a decline', async (_, processingMs) => {
    const ref = drawRef();
    if (processingMs !== null) await control.fault('processing', { op: 'confirm', ref, ms: processingMs });
    await control.fault('card_error_beside', { op: 'confirm', ref });
    expect(await charge({ ref })).toMatchObject({ kind: 'unknown', cause: 'unreadable' });
    if (processingMs !== null) await advance(processingMs + 1_000);
    expect(await finalize('charge', ref)).toMatchObject({ kind: 'executed', result: { kind: 'approved' } });
  });

  test('no byte is sent later than 55 s after the intent', async () => {
    const before = calls();
    const begunAt = new Date(clock.now() - 56_000).toISOString();
    expect(await charge({ begunAt })).toMatchObject({ kind: 'not_processed', answered: false });
    expect(await charge({ begunAt: 'yesterday' })).toMatchObject({ kind: 'not_processed', answered: false });
    expect(calls()).toEqual(before);
  });

  test('an intent whose creation took too long is not confirmed', async () => {
    const [ref, before] = [drawRef(), calls()];
    await control.fault('slow', { op: 'create', ref, ms: 500 });
    const late = charge({ ref });
    await eventually(() => double.calls.create !== before.create);
    await advance(56_000);
    expect(await late).toMatchObject({ kind: 'not_processed', answered: false });
    expect(await control.intents(ref)).toMatchObject([{ status: 'requires_payment_method' }]);
  });

  test.each(['cut_before', 'cut_after', 'hang', 'half', 'http_500', 'stored_500', 'html', 'empty', 'not_json', 'other_amount', 'no_ref'] as const)(
    'a lost answer to the creation (%s) charges nothing',
    async (name) => {
      const ref = drawRef();
      await control.fault(name, { op: 'create', ref });
      expect(await charge({ ref }, shortly())).toMatchObject({ kind: 'not_processed', answered: false });
      expect((await control.intents(ref)).filter(({ status }) => status !== 'requires_payment_method')).toEqual([]);
    },
  );

  test.each(['rate_limit', 'lock_timeout'] as const)('%s is tried again, twice', async (name) => {
    await control.fault(name, { op: 'confirm', times: 2 });
    expect(await charge()).toMatchObject({ kind: 'approved' });
    await control.fault(name, { op: 'confirm', times: 3 });
    const ref = drawRef();
    expect(await charge({ ref })).toEqual({ kind: 'not_processed', answered: false, raw: name });
    expect(await finalize('charge', ref)).toEqual({ kind: 'never' });
  });

  test('a key in use among the tries makes the outcome unknown', async () => {
    await control.fault('key_in_use', { op: 'confirm', times: 1 });
    await control.fault('rate_limit', { op: 'confirm', times: 2 });
    expect(await charge()).toMatchObject({ kind: 'unknown', raw: 'idempotency_key_in_use' });
    await control.fault('key_in_use', { op: 'create', times: 3 });
    expect(await charge()).toMatchObject({ kind: 'unknown', raw: 'idempotency_key_in_use' });
    await control.fault('key_in_use', { op: 'create', times: 1 });
    expect(await charge()).toMatchObject({ kind: 'approved' });
  });

  test('refused credentials charge nothing, and are logged without the key', async () => {
    let refusals = 0;
    const wrong = open({ credentials: { secretKey: 'sk_test_of_nobody_0009' }, onRefusedCredentials: () => (refusals += 1) });
    expect(await charge({ on: wrong })).toMatchObject({ kind: 'not_processed', answered: false });
    expect(logged).toEqual([['Stripe refuses the credentials of a merchant account', { merchantAccount: 'town', status: 401 }]]);
    expect(refusals).toBe(1);
    expect(inspect(logged)).not.toContain('sk_test');
  });
});

describe('a charge of unknown outcome', () => {
  test.each([
    ['processing', 'timeout'],
    ['cut_after', 'disconnected'],
    ['hang', 'timeout'],
    ['half', 'disconnected'],
    ['http_500', 'http_5xx'],
    ['executed_500', 'http_5xx'],
  ] as const)('%s: it was executed, and is found', async (name, cause) => {
    const ref = drawRef();
    await control.fault(name, { op: 'confirm', ref, ms: 0 });
    expect(await charge({ ref }, shortly())).toMatchObject({ kind: 'unknown', cause });
    const end = await finalize('charge', ref);
    expect(end).toMatchObject({ kind: 'executed', result: { kind: 'approved', txn: { card: { last4: '4242' } } } });
    expect(await finalize('charge', ref)).toEqual(end);
  });

  test.each(['cut_before', 'hang_before', 'http_500_before', 'http_503', 'stored_500', 'redirect'] as const)(
    '%s: it was not executed, and never will be',
    async (name) => {
      const ref = drawRef();
      await control.fault(name, { op: 'confirm', ref });
      expect(await charge({ ref }, shortly())).toMatchObject({ kind: 'unknown' });
      expect(await finalize('charge', ref)).toEqual({ kind: 'never' });
      expect(await control.intents(ref)).toMatchObject([{ status: 'canceled' }]);
      expect(await charge({ ref })).toMatchObject(name === 'stored_500' ? { kind: 'unknown' } : { kind: 'rejected', why: 'finalised' });
      expect(await control.intents(ref)).toMatchObject([{ status: 'canceled' }]);
    },
  );

  test('a reference without any trace gets an intent that nobody can confirm', async () => {
    const ref = drawRef();
    expect(await finalize('charge', ref)).toEqual({ kind: 'never' });
    expect(await charge({ ref })).toMatchObject({ kind: 'rejected', why: 'finalised' });
    expect(await finalize('charge', ref)).toEqual({ kind: 'never' });
  });

  test('a charge that is being executed is in flight, and later executed', async () => {
    const ref = drawRef();
    await control.fault('late', { op: 'confirm', ref, ms: 500 });
    expect(await charge({ ref }, shortly())).toMatchObject({ kind: 'unknown', cause: 'timeout' });
    expect(await finalize('charge', ref)).toEqual({ kind: 'cannot_tell', why: 'in_flight' });
    await new Promise((resolve) => setTimeout(resolve, 400));
    expect(await finalize('charge', ref)).toMatchObject({ kind: 'executed', result: { kind: 'approved' } });
  });

  test('a charge that is processing is in flight', async () => {
    const ref = drawRef();
    await control.fault('processing', { op: 'confirm', ref, ms: HOUR });
    expect(await charge({ ref })).toEqual({ kind: 'unknown', cause: 'timeout', raw: 'processing' });
    expect(await finalize('charge', ref)).toEqual({ kind: 'cannot_tell', why: 'in_flight' });
    expect(await lookup('charge', ref)).toEqual({ found: 'cannot_tell' });
    await advance(HOUR);
    expect(await finalize('charge', ref, null, new Date(clock.now() - HOUR).toISOString())).toMatchObject({ kind: 'executed' });
  });

  test('a second request under the key of the creation is in flight', async () => {
    const ref = drawRef();
    await control.fault('key_in_use', { op: 'create', ref, times: 3 });
    expect(await finalize('charge', ref)).toEqual({ kind: 'cannot_tell', why: 'in_flight' });
  });

  test('a cancel that is answered with 500 can be repeated at once', async () => {
    const ref = drawRef();
    await control.fault('stored_500', { op: 'cancel' });
    expect(await finalize('charge', ref)).toEqual({ kind: 'cannot_tell', why: 'unreachable' });
    expect(await finalize('charge', ref)).toEqual({ kind: 'never' });
  });

  test('a creation whose stored answer is 500 is found by the list', async () => {
    const ref = drawRef();
    await control.fault('executed_500', { op: 'create', ref });
    expect(await charge({ ref })).toMatchObject({ kind: 'not_processed' });
    expect(await finalize('charge', ref)).toEqual({ kind: 'never' });
    expect(await control.intents(ref)).toMatchObject([{ status: 'canceled' }]);
  });

  test('an outage and revoked credentials cannot tell', async () => {
    const ref = drawRef();
    await control.fault('http_503', { times: null });
    expect(await finalize('charge', ref)).toEqual({ kind: 'cannot_tell', why: 'unreachable' });
    await control.heal();
    await control.fault('unauthorized', { times: null });
    expect(await finalize('charge', ref)).toEqual({ kind: 'cannot_tell', why: 'unreachable' });
    expect(logged).not.toEqual([]);
    const nobody = open({ endpoint: `http://127.0.0.1:${await deadPort()}` });
    expect(await nobody.finalize(about('charge', ref), soon())).toEqual({ kind: 'cannot_tell', why: 'unreachable' });
    expect(await gateway.finalize(about('charge', ref, null, 'yesterday'), soon())).toEqual({ kind: 'cannot_tell', why: 'unreachable' });
  });

  test('after 23 hours the list by time decides, and absence counts only when the key is gone', async () => {
    const [executed, open_, absent] = [drawRef(), drawRef(), drawRef()];
    const begunAt = now();
    await charged(executed);
    await control.fault('cut_before', { op: 'confirm', ref: open_ });
    await charge({ ref: open_ });
    await advance(23 * HOUR + 60_000);
    const before = calls();
    expect(await finalize('charge', executed, null, begunAt)).toMatchObject({ kind: 'executed', result: { kind: 'approved' } });
    expect(await finalize('charge', open_, null, begunAt)).toEqual({ kind: 'never' });
    const until = new Date(Date.parse(begunAt) + 24 * HOUR).toISOString();
    expect(await finalize('charge', absent, null, begunAt)).toEqual({ kind: 'cannot_tell', why: 'not_visible', until });
    await advance(HOUR);
    expect(await finalize('charge', absent, null, begunAt)).toEqual({ kind: 'never' });
    expect(callsSince(before, 'create')).toBe(0);
  });

  test('a charge that was refunded in full, under whatever reference, counts as undone', async () => {
    const ref = drawRef();
    const transactionId = await charged(ref);
    await refund(transactionId, 400);
    expect(await lookup('charge', ref)).toMatchObject({ found: true, state: 'approved' });
    await refund(transactionId, 600);
    expect(await lookup('charge', ref)).toMatchObject({ found: true, state: 'voided', transactionId, amountCents: 1_000 });
    expect(await gateway.transaction!(transactionId, soon())).toMatchObject({ state: 'voided' });
  });

  test('a look-up changes nothing', async () => {
    const [executed, declined, open_, absent] = [drawRef(), drawRef(), drawRef(), drawRef()];
    const transactionId = await charged(executed);
    await charge({ ref: declined, token: 'pm_card_chargeDeclined' });
    await control.fault('cut_before', { op: 'confirm', ref: open_ });
    await charge({ ref: open_ });
    expect(await lookup('charge', executed)).toEqual({ found: true, state: 'approved', transactionId, amountCents: 1_000 });
    expect(await lookup('charge', declined)).toMatchObject({ found: true, state: 'declined' });
    expect(await lookup('charge', open_)).toEqual({ found: false });
    expect(await lookup('charge', absent)).toEqual({ found: false });
    expect(await control.intents(open_)).toMatchObject([{ status: 'requires_payment_method' }]);
    expect(await control.intents(absent)).toEqual([]);
    await control.fault('http_500', { op: 'intents' });
    await expect(lookup('charge', executed)).rejects.toThrow('Stripe did not answer');
  });
});

describe('the answer of an approval that cannot be trusted is never an approval', () => {
  test.each<FaultName>([
    'html',
    'huge',
    'empty',
    'not_json',
    'error_200',
    'other_ref',
    'no_ref',
    'other_amount',
    'partial',
    'other_id',
    'id_zero',
    'echo_key',
    'unknown_status',
  ])('%s', async (name) => {
    const ref = drawRef();
    await control.fault(name, { op: 'confirm', ref });
    expect(await charge({ ref })).toMatchObject({ kind: 'unknown', cause: 'unreadable' });
    expect(await finalize('charge', ref)).toMatchObject({ kind: 'executed', result: { kind: 'approved' } });
    expect(inspect(logged)).not.toContain('sk_test');
  });

  test.each<FaultName>(['html', 'empty', 'not_json', 'error_200', 'other_ref', 'other_amount', 'id_zero', 'echo_key', 'unknown_status'])(
    '%s, as the answer to a refund',
    async (name) => {
      const [transactionId, ref] = [await charged(), drawRef()];
      await control.fault(name, { op: 'refund', ref });
      expect(await refund(transactionId, 400, ref)).toMatchObject({ kind: 'unknown', cause: 'unreadable' });
      expect(await finalize('refund', ref, transactionId, now(), 400)).toMatchObject({ kind: 'executed', result: { kind: 'approved' } });
    },
  );

  test.each<FaultName>(['bom', 'numbers', 'nulls', 'absent', 'echo_card'])('but %s can be read', async (name) => {
    const ref = drawRef();
    await control.fault(name, { op: 'create', ref });
    await control.fault(name, { op: 'confirm', ref });
    expect(await charge({ ref })).toMatchObject({ kind: 'approved', txn: { card: { last4: '4242' } } });
    await control.fault(name, { op: 'account' });
    expect(await gateway.describe(soon())).toMatchObject({ externalId: 'acct_3Doubleone' });
  });

  test('an unknown error is no approval and no decline', async () => {
    const ref = drawRef();
    await control.fault('unknown_error', { op: 'confirm', ref });
    expect(await charge({ ref })).toEqual({ kind: 'not_processed', answered: true, raw: 'a_code_that_nobody_knows' });
    expect(await finalize('charge', ref)).toEqual({ kind: 'never' });
  });

  test('an intent of the other environment is none of ours', async () => {
    const live = open({ account: { ...account, environment: 'production' } });
    expect(await charge({ on: live })).toMatchObject({ kind: 'not_processed', answered: false });
  });
});

describe('a refund', () => {
  test('once, and the same answer again', async () => {
    const [transactionId, ref] = [await charged(), drawRef()];
    const first = await refund(transactionId, 400, ref);
    expect(first).toEqual({ kind: 'approved', txn: { transactionId: expect.stringMatching(/^re_/) } });
    expect(await refund(transactionId, 400, ref)).toEqual(first);
    expect((await control.refunds()).filter((one) => one.payment_intent === transactionId)).toMatchObject([
      { amount: 400, metadata: { payfold_ref: ref } },
    ]);
    expect(await lookup('refund', ref, transactionId)).toMatchObject({ found: true, state: 'approved', amountCents: 400 });
  });

  test('a void is a refund only if it takes back a charge that must not stand', async () => {
    const transactionId = await charged();
    const before = calls();
    const call = { ref: drawRef(), account, leg: 'combined', begunAt: now(), chargeTransactionId: transactionId, amountCents: 1_000 } as const;
    for (const askedBy of ['void', 'refund'] as const)
      expect(await gateway.void({ ...call, askedBy }, soon())).toMatchObject({ kind: 'rejected', why: 'already_settled' });
    expect(calls()).toEqual(before);
    expect(await finalize('void', call.ref, transactionId)).toEqual({ kind: 'never' });
    expect(calls()).toEqual(before);

    const ref = drawRef();
    const undone = await reverse(transactionId, 1_000, ref);
    expect(undone).toEqual({ kind: 'approved', txn: { transactionId: expect.stringMatching(/^re_/), means: 'refund' } });
    expect(await finalize('reversal', ref, transactionId)).toEqual({ kind: 'executed', result: undone });
  });

  test('refusals by their reason', async () => {
    const transactionId = await charged();
    expect(await refund(transactionId, 1_001)).toMatchObject({ kind: 'rejected', why: 'exceeds' });
    await refund(transactionId, 600);
    expect(await refund(transactionId, 401)).toMatchObject({ kind: 'rejected', why: 'exceeds' });
    await refund(transactionId, 400);
    expect(await refund(transactionId, 1)).toMatchObject({ kind: 'rejected', why: 'already_reversed' });
    expect(await refund('pi_unknown', 1)).toMatchObject({ kind: 'rejected', why: 'not_found' });
    const disputed = await charged();
    await control.dispute(disputed);
    expect(await refund(disputed, 1)).toMatchObject({ kind: 'rejected', why: 'other', raw: 'charge_disputed' });
    await control.fault('unauthorized', { op: 'refund' });
    expect(await refund(transactionId, 1)).toMatchObject({ kind: 'not_processed', answered: false });
    expect(logged).toHaveLength(1);
  });

  test.each([
    ['conflict_bare', { kind: 'unknown', cause: 'timeout' }],
    ['too_many_bare', { kind: 'not_processed', answered: false }],
  ] as const)('%s is no refusal: it is tried again, and then nobody is told that it was refused', async (name, expected) => {
    const transactionId = await charged();
    await control.fault(name, { op: 'refund', times: 3 });
    const ref = drawRef();
    expect(await refund(transactionId, 400, ref)).toMatchObject(expected);
    expect(await refund(transactionId, 400, ref)).toMatchObject({ kind: 'approved' });
    await control.fault(name, { op: 'refund', times: 2 });
    expect(await refund(transactionId, 300)).toMatchObject({ kind: 'approved' });
  });

  test('a refusal is final: finalize gives it again', async () => {
    const [transactionId, ref] = [await charged(), drawRef()];
    expect(await refund(transactionId, 1_001, ref)).toMatchObject({ kind: 'rejected', why: 'exceeds' });
    expect(await finalize('refund', ref, transactionId, now(), 1_001)).toMatchObject({
      kind: 'executed',
      result: { kind: 'rejected', why: 'exceeds' },
    });
  });

  test('a pending refund is approved', async () => {
    const transactionId = await charged(drawRef(), 1_000, 'pm_card_pendingRefund');
    expect(await refund(transactionId, 1_000)).toMatchObject({ kind: 'approved' });
  });

  test('no byte is sent after its time', async () => {
    const transactionId = await charged();
    const before = calls();
    const call = {
      ref: drawRef(),
      account,
      leg: 'combined',
      begunAt: now(),
      chargeTransactionId: transactionId,
      amountCents: 1,
      last4: '4242',
    } as const;
    expect(await gateway.refund({ ...call, notAfter: new Date(clock.now() - 1).toISOString() }, soon())).toMatchObject({
      kind: 'not_processed',
      answered: false,
    });
    expect(calls()).toEqual(before);
  });

  test('no byte is sent when its key may be gone, so nothing is returned twice', async () => {
    const [transactionId, ref, begunAt] = [await charged(), drawRef(), now()];
    const call = { ref, account, leg: 'combined', begunAt, chargeTransactionId: transactionId, amountCents: 400, last4: '4242' } as const;
    await control.fault('cut_after', { op: 'refund', ref });
    expect(await gateway.refund(call, soon())).toMatchObject({ kind: 'unknown' });
    await advance(24 * HOUR + 1_000);
    const before = calls();
    expect(await gateway.refund(call, soon())).toMatchObject({ kind: 'not_processed', answered: false });
    expect(await gateway.void({ ...call, askedBy: 'reversal' }, soon())).toMatchObject({ kind: 'not_processed', answered: false });
    expect(await gateway.refund({ ...call, begunAt: 'yesterday' }, soon())).toMatchObject({ kind: 'not_processed', answered: false });
    expect(calls()).toEqual(before);
    expect((await control.refunds()).filter((one) => one.payment_intent === transactionId)).toHaveLength(1);
  });

  describe('a charge that is taken back days later', () => {
    const late = async (fault: 'cut_before' | 'cut_after' | null) => {
      const [chargeTransactionId, ref, begunAt] = [await charged(), drawRef(), now()];
      const call = { ref, account, leg: 'combined', begunAt, chargeTransactionId, amountCents: 1_000, askedBy: 'reversal' } as const;
      if (fault) {
        await control.fault(fault, { op: 'refund', ref, times: null });
        expect((await gateway.void(call, soon())).kind).not.toBe('approved');
        await control.heal();
      }
      await advance(25 * HOUR + 1_000);
      const made = async () => (await control.refunds()).filter((one) => one.payment_intent === chargeTransactionId);
      const end = () => gateway.finalize(about('reversal', ref, chargeTransactionId, begunAt), soon());
      return { call, end, made };
    };

    test.each([null, 'cut_before', 'cut_after'] as const)('its money goes back once (first try: %s)', async (fault) => {
      const { call, end, made } = await late(fault);
      expect(await Promise.all([gateway.void(call, soon()), gateway.void(call, soon())])).toContainEqual(
        expect.objectContaining({ kind: 'approved', txn: expect.objectContaining({ means: 'refund' }) }),
      );
      expect(await gateway.void(call, soon())).toMatchObject({ kind: 'approved' });
      expect(await end()).toMatchObject({ kind: 'executed', result: { kind: 'approved', txn: { means: 'refund' } } });
      await advance(25 * HOUR + 1_000);
      expect(await gateway.void(call, soon())).toMatchObject({ kind: 'approved' });
      expect(await made()).toHaveLength(1);
    });

    test('a charge that shall stay is not taken back: its key is used up first', async () => {
      const { call, end, made } = await late('cut_before');
      expect(await end()).toEqual({ kind: 'never' });
      expect(await gateway.void(call, soon())).toMatchObject({ kind: 'rejected', why: 'finalised' });
      expect(await end()).toEqual({ kind: 'never' });
      expect(await made()).toEqual([]);
    });

    test('between the end of its key and the time from which it is sent anew, the gateway cannot promise that the charge stays', async () => {
      const [chargeTransactionId, ref, begunAt] = [await charged(), drawRef(), now()];
      const end = () => gateway.finalize(about('reversal', ref, chargeTransactionId, begunAt), soon());
      const undecided = { kind: 'cannot_tell', why: 'not_visible', until: new Date(Date.parse(begunAt) + 25 * HOUR).toISOString() };
      for (const hours of [23, 1]) {
        await advance(hours * HOUR + 1_000);
        expect(await end()).toEqual(undecided);
      }
      await advance(HOUR);
      expect(await end()).toEqual({ kind: 'never' });
      const call = { ref, account, leg: 'combined', begunAt, chargeTransactionId, amountCents: 1_000, askedBy: 'reversal' } as const;
      expect(await gateway.void(call, soon())).toMatchObject({ kind: 'rejected', why: 'finalised' });
    });

    test('one whose stored answer is a 500 may still be made: only the end of that key decides', async () => {
      const { call, end, made } = await late(null);
      await control.fault('stored_500', { op: 'refund', ref: call.ref });
      expect(await gateway.void(call, soon())).toMatchObject({ kind: 'unknown' });
      await control.heal();
      const askedMs = clock.now();
      const open = await end();
      expect(open).toMatchObject({ kind: 'cannot_tell', why: 'not_visible' });
      const gone = Date.parse(open.kind === 'cannot_tell' ? open.until! : '') - 25 * HOUR;
      expect([gone >= Math.floor(askedMs), gone <= clock.now()]).toEqual([true, true]);
      await advance(25 * HOUR + 1_000);
      expect(await end()).toEqual({ kind: 'never' });
      expect(await made()).toEqual([]);
    });

    test('if the process stands still for a day after it has read the list, it sends nothing', async () => {
      const { call, made } = await late(null);
      await control.fault('late', { op: 'refunds', ms: 600 });
      const voiding = gateway.void(call, soon());
      await new Promise((resolve) => setTimeout(resolve, 200));
      await advance(23 * HOUR + 1_000);
      expect(await voiding).toMatchObject({ kind: 'not_processed', answered: false });
      expect(await made()).toEqual([]);
    });

    test('where keys are not bound to an endpoint, it is never sent anew, and a person decides', async () => {
      const { call, made } = await late(null);
      const unbound = open({ keysAreBound: false });
      expect(await unbound.void(call, soon())).toMatchObject({ kind: 'rejected', why: 'other' });
      expect(await unbound.finalize(about('reversal', call.ref, call.chargeTransactionId, call.begunAt), soon())).toEqual({ kind: 'never' });
      expect(await made()).toEqual([]);
    });

    test('it is not sent while its refunds cannot be read', async () => {
      const { call, made } = await late(null);
      await control.fault('http_500', { op: 'refunds', times: null });
      expect(await gateway.void(call, soon())).toEqual({ kind: 'not_processed', answered: false });
      expect(await made()).toEqual([]);
    });
  });

  test.each(['cut_after', 'hang', 'half', 'http_500', 'executed_500'] as const)('lost after its execution (%s): finalize finds it', async (name) => {
    const [transactionId, ref] = [await charged(), drawRef()];
    await control.fault(name, { op: 'refund', ref });
    expect(await refund(transactionId, 400, ref, shortly())).toMatchObject({ kind: 'unknown' });
    expect(await finalize('refund', ref, transactionId, now(), 400)).toMatchObject({ kind: 'executed', result: { kind: 'approved' } });
    expect((await control.refunds()).filter((one) => one.payment_intent === transactionId)).toHaveLength(1);
  });

  test.each(['cut_before', 'hang_before', 'http_500_before'] as const)(
    'lost before its execution (%s): finalize uses its key up, so it never happens',
    async (name) => {
      const [transactionId, ref] = [await charged(), drawRef()];
      await control.fault(name, { op: 'refund', ref });
      expect(await refund(transactionId, 400, ref, shortly())).toMatchObject({ kind: 'unknown' });
      expect(await finalize('refund', ref, transactionId, now(), 400)).toEqual({ kind: 'never' });
      expect(await finalize('refund', ref, transactionId, now(), 400)).toEqual({ kind: 'never' });
      expect(await refund(transactionId, 400, ref)).toMatchObject({ kind: 'rejected', why: 'finalised' });
      expect((await control.refunds()).filter((one) => one.payment_intent === transactionId)).toEqual([]);
    },
  );

  test('a stored 500 without an execution cannot be told until the key is gone', async () => {
    const [transactionId, ref, begunAt] = [await charged(), drawRef(), now()];
    await control.fault('stored_500', { op: 'refund', ref });
    expect(await refund(transactionId, 400, ref)).toMatchObject({ kind: 'unknown', cause: 'http_5xx' });
    const until = new Date(Date.parse(begunAt) + 24 * HOUR).toISOString();
    expect(await finalize('refund', ref, transactionId, begunAt, 400)).toEqual({ kind: 'cannot_tell', why: 'not_visible', until });
    await advance(24 * HOUR + 1_000);
    expect(await finalize('refund', ref, transactionId, begunAt, 400)).toEqual({ kind: 'never' });
  });

  test('a refund that is being executed is in flight, also where its key is in use', async () => {
    const [transactionId, ref] = [await charged(), drawRef()];
    await control.fault('late', { op: 'refund', ref, ms: 500 });
    expect(await refund(transactionId, 400, ref, shortly())).toMatchObject({ kind: 'unknown', cause: 'timeout' });
    expect(await finalize('refund', ref, transactionId, now(), 400)).toEqual({ kind: 'cannot_tell', why: 'in_flight' });
    await new Promise((resolve) => setTimeout(resolve, 400));
    expect(await finalize('refund', ref, transactionId, now(), 400)).toMatchObject({ kind: 'executed', result: { kind: 'approved' } });
  });

  test('after 23 hours the refunds of the charge decide', async () => {
    const [transactionId, made, absent, begunAt] = [await charged(), drawRef(), drawRef(), now()];
    await refund(transactionId, 300, made);
    await advance(23 * HOUR + 60_000);
    const before = calls();
    expect(await finalize('refund', made, transactionId, begunAt, 300)).toMatchObject({ kind: 'executed', result: { kind: 'approved' } });
    expect(await finalize('refund', absent, transactionId, begunAt, 300)).toMatchObject({ kind: 'cannot_tell', why: 'not_visible' });
    await advance(HOUR);
    expect(await finalize('refund', absent, transactionId, begunAt, 300)).toEqual({ kind: 'never' });
    expect([callsSince(before, 'update'), callsSince(before, 'refund')]).toEqual([0, 0]);
  });

  test('where keys are not bound to an endpoint, only the list and the time decide', async () => {
    const unbound = open({ keysAreBound: false });
    expect(unbound.capabilities.finalizeReversal).toBe('later');
    const [transactionId, made, absent, begunAt] = [await charged(), drawRef(), drawRef(), now()];
    await refund(transactionId, 300, made);
    await control.fault('keys_unbound');
    expect(await unbound.finalize(about('refund', made, transactionId, begunAt, 300), soon())).toMatchObject({ kind: 'executed' });
    expect(await unbound.finalize(about('refund', absent, transactionId, begunAt, 300), soon())).toMatchObject({ why: 'not_visible' });
    // The binding is what the other way rests on: without it, a refund that was made would count as one that never will be.
    expect(await finalize('refund', made, transactionId, begunAt, 300)).toEqual({ kind: 'never' });
  });

  test('without a charge, nothing can have been refunded', async () => {
    const before = calls();
    expect(await finalize('reversal', drawRef())).toEqual({ kind: 'never' });
    expect(calls()).toEqual(before);
    expect(await finalize('reversal', drawRef(), 'pi_unknown')).toEqual({ kind: 'cannot_tell', why: 'unreachable' });
  });
});

describe('transactions by their id', () => {
  test('a charge, a refund, and ids of no transaction', async () => {
    const [ref, refundRef] = [drawRef(), drawRef()];
    const transactionId = await charged(ref);
    const refunded = await refund(transactionId, 250, refundRef);
    const refundId = refunded.kind === 'approved' ? refunded.txn.transactionId : '';
    expect(await gateway.transaction!(transactionId, soon())).toEqual({
      transactionId,
      ref,
      op: 'charge',
      state: 'approved',
      amountCents: 1_000,
      chargeTransactionId: null,
    });
    expect(await gateway.transaction!(refundId, soon())).toEqual({
      transactionId: refundId,
      ref: refundRef,
      op: 'refund',
      state: 'approved',
      amountCents: 250,
      chargeTransactionId: transactionId,
    });
    for (const id of ['pi_unknown', 're_unknown', 'ch_1', '', '../account', 'R0000000000000000001'])
      expect(await gateway.transaction!(id, soon())).toBeNull();
    await control.fault('http_500', { op: 'intent' });
    await expect(gateway.transaction!(transactionId, soon())).rejects.toThrow('Stripe did not answer');
  });
});

describe('settlement', () => {
  const batches = async (cursor: string | null, on = gateway) => {
    const all: { batchId: string; fundedOn?: string; cursor: string; lines: SettlementRecord[] }[] = [];
    for await (const { batchId, fundedOn, cursor: place, lines } of on.settlements(cursor, soon())) {
      const batch = { batchId, cursor: place, lines: [] as SettlementRecord[], ...(fundedOn !== undefined && { fundedOn }) };
      for await (const line of lines) batch.lines.push(line);
      all.push(batch);
    }
    return all;
  };
  /** A cursor behind everything that was paid out so far. */
  const here = async (): Promise<string> => {
    await charged();
    await control.payOut();
    let cursor = '';
    for await (const batch of gateway.settlements(null, soon())) cursor = batch.cursor;
    await advance(2_000);
    return cursor;
  };

  test('a payout is a batch, and its lines carry our references', async () => {
    const cursor = await here();
    const [ref, refundRef] = [drawRef(), drawRef()];
    const transactionId = await charged(ref, 10_000);
    const refunded = await refund(transactionId, 4_000, refundRef);
    const refundId = refunded.kind === 'approved' ? refunded.txn.transactionId : '';
    await control.transaction({ type: 'stripe_fee', reporting_category: 'fee', amount: -250, fee: 0, source: null });
    await control.transaction({ type: 'adjustment', reporting_category: 'other_adjustment', amount: -75, fee: 0, source: null });
    const payout = await control.payOut();
    const [batch, ...more] = await batches(cursor);
    expect(more).toEqual([]);
    expect(batch).toMatchObject({ batchId: payout!.id, fundedOn: new Date((payout!.arrival_date as number) * 1_000).toISOString().slice(0, 10) });
    expect(batch!.lines.sort((a, b) => b.grossCents - a.grossCents)).toEqual([
      { type: 'sale', transactionId, ref, accepted: true, grossCents: 10_000, feeCents: 320, netCents: 9_680 },
      { type: 'fee', transactionId: expect.stringMatching(/^txn_/), accepted: true, grossCents: 0, feeCents: 250, netCents: -250 },
      { type: 'adjustment', transactionId: expect.stringMatching(/^txn_/), accepted: true, grossCents: -75, feeCents: 0, netCents: -75 },
      { type: 'refund', transactionId: refundId, ref: refundRef, accepted: true, grossCents: -4_000, feeCents: 0, netCents: -4_000 },
    ]);
    expect(batch!.lines.reduce((sum, { netCents }) => sum + netCents, 0)).toBe(payout!.amount);
    expect(await batches(batch!.cursor)).toEqual([]);
  });

  test('a refund that fails later is a line of its own, under the reference of the refund', async () => {
    const cursor = await here();
    const [ref, transactionId] = [drawRef(), await charged(drawRef(), 1_000, 'pm_card_refundFail')];
    const refunded = await refund(transactionId, 1_000, ref);
    const refundId = refunded.kind === 'approved' ? refunded.txn.transactionId : '';
    await control.payOut();
    await control.failRefund(refundId);
    await charged();
    await control.payOut();
    const [, second] = await batches(cursor);
    expect(second!.lines).toContainEqual({
      type: 'refund_failure',
      transactionId: refundId,
      ref,
      accepted: true,
      grossCents: 1_000,
      feeCents: 0,
      netCents: 1_000,
    });
    expect(await gateway.transaction!(refundId, soon())).toMatchObject({ state: 'declined' });
  });

  test('a dispute is a line of its charge, and so is its end', async () => {
    const cursor = await here();
    const transactionId = await charged(drawRef(), 5_000);
    const dispute = await control.dispute(transactionId);
    await control.payOut();
    await control.changeDispute(dispute.id, { status: 'won' });
    await control.payOut();
    const lines = (await batches(cursor)).flatMap((batch) => batch.lines);
    expect(lines).toContainEqual({ type: 'chargeback', transactionId, accepted: true, grossCents: -5_000, feeCents: 1_500, netCents: -6_500 });
    expect(lines).toContainEqual({
      type: 'chargeback_reversal',
      transactionId,
      accepted: true,
      grossCents: 5_000,
      feeCents: -1_500,
      netCents: 6_500,
    });
  });

  test('a payout whose lines are not known yet is read when they are, and holds up no other', async () => {
    const cursor = await here();
    await charged();
    const early = await control.payOut({ status: 'in_progress' });
    await advance(2_000);
    await charged();
    const late = await control.payOut();
    const first = await batches(cursor);
    expect(first.map(({ batchId }) => batchId)).toEqual([late!.id]);
    expect(await batches(first[0]!.cursor)).toEqual([]);
    await control.changePayout(early!.id, { reconciliation_status: 'completed' });
    const second = await batches(first[0]!.cursor);
    expect(second.map(({ batchId }) => batchId)).toEqual([early!.id]);
    expect(await batches(second[0]!.cursor)).toEqual([]);
  });

  test('more open payouts than a cursor can name are all read again, and none is lost', async () => {
    const cursor = await here();
    const waiting: string[] = [];
    for (let index = 0; index < 60; index += 1) {
      await control.transaction({ amount: 100, fee: 0 });
      waiting.push((await control.payOut({ status: 'in_progress' }))!.id);
    }
    await advance(2_000);
    await charged();
    const late = await control.payOut();
    const [batch] = await batches(cursor);
    expect(batch!.batchId).toBe(late!.id);
    expect(batch!.cursor.length).toBeLessThanOrEqual(1_024);
    for (const id of waiting) await control.changePayout(id, { reconciliation_status: 'completed' });
    expect((await batches(batch!.cursor)).map(({ batchId }) => batchId)).toEqual([...waiting, late!.id]);
  });

  test('a payout that the list shows only after a newer one is read, and no other one twice', async () => {
    // The many payouts of the spec before would make the overlap shorter.
    await advance(20 * 60_000);
    const cursor = await here();
    await charged();
    const newer = await control.payOut();
    const [batch] = await batches(cursor);
    expect(batch!.batchId).toBe(newer!.id);
    await charged();
    const late = await control.payOut();
    await control.changePayout(late!.id, { created: newer!.created - 60 });
    const after = await batches(batch!.cursor);
    expect(after.map(({ batchId }) => batchId)).toEqual([late!.id]);
    expect(await batches(after[0]!.cursor)).toEqual([]);
  });

  test('manual payouts and other currencies are passed over; a failed payout names no day', async () => {
    const cursor = await here();
    await charged();
    await control.payOut({ status: 'not_applicable' });
    await charged();
    await control.payOut({ currency: 'eur' });
    await charged();
    const failed = await control.payOut();
    await control.changePayout(failed!.id, { status: 'failed' });
    const [batch, ...more] = await batches(cursor);
    expect([batch!.batchId, batch!.fundedOn, more]).toEqual([failed!.id, undefined, []]);
    await control.payOut();
    const [back] = await batches(batch!.cursor);
    expect(back!.lines).toMatchObject([{ type: 'adjustment', netCents: failed!.amount }]);
  });

  test('a page that repeats a line adds none; a payout that does not add up is not complete', async () => {
    const cursor = await here();
    const payout = await control.seed(250, 1_000, 'TWICE');
    await control.fault('pages_twice');
    expect((await batches(cursor))[0]!.lines).toHaveLength(250);
    await control.heal();
    await control.changePayout(payout.id, { amount: (payout.amount as number) + 1 });
    await expect(batches(cursor)).rejects.toThrow('add up');
  });

  test('a cursor of somebody else is refused before the first batch', async () => {
    for (const cursor of ['', 'B1', '{}', '[2,0,[],[]]', '[1,"x",[],[]]', '[1,0,[7],[]]'])
      await expect(batches(cursor)).rejects.toThrow('knows no cursor');
  });

  test('an outage, an unreadable list and revoked credentials are errors without the text of the vendor', async () => {
    for (const [name, op] of [
      ['http_503', 'payouts'],
      ['html', 'payouts'],
      ['unauthorized', 'payouts'],
      ['not_json', 'lines'],
      ['huge', 'lines'],
    ] as const) {
      await control.fault(name, { op });
      const error = await batches(null).then(String, (thrown: unknown) => inspect(thrown));
      expect(error).toContain('Stripe did not answer with');
      expect(error).not.toContain(SECRET_KEY);
    }
  });

  test('200,000 lines are read 100 at a time, and only when they are asked for', async () => {
    const cursor = await here();
    const payout = await control.seed(200_000, 1_000, 'MANY');
    const before = calls();
    let [count, net, peak] = [0, 0, 0];
    const heap = () => process.memoryUsage().heapUsed / 1024 / 1024;
    const start = heap();
    for await (const { lines } of gateway.settlements(cursor, AbortSignal.timeout(280_000))) {
      for await (const line of lines) {
        count += 1;
        net += line.netCents;
        if (count === 150) expect(callsSince(before, 'lines')).toBe(2);
        if (count % 10_000 === 0) peak = Math.max(peak, heap() - start);
      }
    }
    expect([count, net, callsSince(before, 'lines')]).toEqual([200_000, payout.amount, 2_001]);
    expect(peak).toBeLessThan(300);
  });

  test('lists of the background are asked for at most five times a second', async () => {
    const cursor = await here();
    const seeded = await control.seed(900, 1_000, 'PACED');
    // A clock whose pauses pass, and are counted.
    let paused = 0;
    class Counting extends MovableClock {
      override sleep(ms: number): Promise<void> {
        paused += ms;
        this.advance(ms);
        return Promise.resolve();
      }
    }
    const paced = open({ clock: new Counting() });
    const [batch] = await batches(cursor, paced);
    expect(batch!.batchId).toBe(seeded.id);
    // 1 page of payouts and 10 of lines. The answers take some of the time.
    expect(paused).toBeGreaterThan(1_000);
    expect(paused).toBeLessThanOrEqual(2_000);
  });
});

describe('disputes', () => {
  const disputes = async (open_: readonly string[], cursor: string | null) => {
    const all: (GatewayDispute & { cursor: string })[] = [];
    for await (const dispute of gateway.disputes!(open_, cursor, soon())) all.push(dispute as GatewayDispute & { cursor: string });
    return all;
  };

  test('are found when they are new, followed while they are open, and read by their words', async () => {
    const ref = drawRef();
    const transactionId = await charged(ref, 7_700);
    const before = (await disputes([], null)).at(-1)?.cursor ?? null;
    await advance(2_000);
    const made = await control.dispute(transactionId);
    const [found, ...more] = await disputes([], before);
    expect(more).toEqual([]);
    const day = (ms: number) => new Date(ms).toISOString().slice(0, 10);
    expect(found).toEqual({
      externalId: made.id,
      chargeTransactionId: transactionId,
      ref,
      status: 'debited',
      stage: 'needs_response',
      reasonCode: '10.4',
      reason: 'fraudulent',
      amountCents: 7_700,
      openedOn: day(made.created * 1_000),
      dueDate: day((made.evidence_details as { due_by: number }).due_by * 1_000),
      cursor: expect.any(String),
    });
    expect(await disputes([], found!.cursor)).toEqual([]);
    for (const [status, is] of [
      ['under_review', 'in_dispute'],
      ['lost', 'lost'],
      ['won', 'recovered'],
    ]) {
      await control.changeDispute(made.id, { status });
      expect(await disputes([made.id], found!.cursor)).toMatchObject([{ externalId: made.id, status: is, stage: status, dueDate: null }]);
    }
  });

  test('an inquiry moves no money and is logged; it is found when it becomes a dispute', async () => {
    const cursor = (await disputes([], null)).at(-1)?.cursor ?? null;
    await advance(2_000);
    const inquiry = await control.dispute(await charged(), { status: 'warning_needs_response' });
    const closed = await control.dispute(await charged(), { status: 'warning_closed' });
    const prevented = await control.dispute(await charged(), { status: 'prevented' });
    const other = await control.dispute(await charged());
    const [found, ...more] = await disputes([], cursor);
    expect([found!.externalId, more]).toEqual([other.id, []]);
    const said = logged.map(([, fields]) => (fields as { dispute: string }).dispute);
    expect(said.sort()).toEqual([inquiry.id, closed.id, prevented.id]);
    expect(await disputes([], found!.cursor)).toEqual([]);
    await control.changeDispute(inquiry.id, { status: 'needs_response' });
    expect(await disputes([], found!.cursor)).toMatchObject([{ externalId: inquiry.id, status: 'debited' }]);
  });

  test.each(['prevented', 'warning_closed'])('one that was told and becomes %s is told as recovered, once it is asked for', async (status) => {
    const made = await control.dispute(await charged());
    const told = (await disputes([], null)).find(({ externalId }) => externalId === made.id)!;
    expect(told.status).toBe('debited');
    await control.changeDispute(made.id, { status });
    expect(await disputes([made.id], told.cursor)).toMatchObject([{ externalId: made.id, status: 'recovered', stage: status }]);
  });

  test('an open one that Stripe does not know any more is told as gone, and the others go on', async () => {
    const cursor = (await disputes([], null)).at(-1)?.cursor ?? null;
    await advance(2_000);
    const known = await control.dispute(await charged());
    expect(await disputes(['du_unknown'], cursor)).toMatchObject([
      { externalId: 'du_unknown', gone: true },
      { externalId: known.id, status: 'debited' },
    ]);
  });

  test('a list without an end is read for a few empty pages, and the next reading goes on', async () => {
    const cursor = (await disputes([], null)).at(-1)?.cursor ?? null;
    await advance(2_000);
    const made = await control.dispute(await charged());
    const before = calls();
    await control.fault('pages_empty');
    await expect(disputes([], cursor)).rejects.toThrow('Stripe did not answer');
    expect(callsSince(before, 'disputes')).toBeLessThanOrEqual(5);
    await control.heal();
    expect(await disputes([], cursor)).toMatchObject([{ externalId: made.id }]);
  });

  test('one in another currency, of another program, is passed over, and later ones are read', async () => {
    const cursor = (await disputes([], null)).at(-1)?.cursor ?? null;
    await advance(2_000);
    const foreign = await control.dispute(await charged(), { currency: 'eur' });
    const other = await control.dispute(await charged());
    expect((await disputes([], cursor)).map(({ externalId }) => externalId)).toEqual([other.id]);
    expect(logged).toContainEqual(['a dispute in another currency is passed over', expect.objectContaining({ dispute: foreign.id })]);
  });

  test('a status that nobody knows is not shown, and asked for again', async () => {
    const cursor = (await disputes([], null)).at(-1)?.cursor ?? null;
    await advance(2_000);
    const strange = await control.dispute(await charged(), { status: 'flourishing' });
    const other = await control.dispute(await charged());
    const [found] = await disputes([], cursor);
    expect(found!.externalId).toBe(other.id);
    await control.changeDispute(strange.id, { status: 'needs_response' });
    expect(await disputes([], found!.cursor)).toMatchObject([{ externalId: strange.id }]);
  });
});

describe('the description of the account', () => {
  // Earlier tests have moved the business time, but not the time in the headers of answers.
  beforeEach(() => void (gateway = open({ clock: new HastyClock() })));

  test('of a complete account', async () => {
    expect(await gateway.describe(soon())).toEqual({
      externalId: 'acct_3Doubleone',
      name: 'Display acct_3Doubleone',
      environment: 'sandbox',
      testMode: false,
      timeZone: 'America/New_York',
      problems: [],
    });
  });

  test('manual payouts, missing rights and a restricted key are problems', async () => {
    const id = 'acct_3Doubletwo';
    const key = 'sk_test_double_two_0001';
    await controlOf(double.url, id).account([key], {
      charges_enabled: false,
      payouts_enabled: false,
      default_currency: 'eur',
      settings: { payouts: { schedule: { interval: 'manual' } } },
    });
    await control.fault('forbidden', { op: 'disputes' });
    const described = await open({ clock: new HastyClock(), credentials: { secretKey: key } }).describe(soon());
    expect(described.problems).toEqual([
      expect.stringContaining('charge'),
      expect.stringContaining('pay this account out'),
      expect.stringContaining('USD'),
      expect.stringContaining('manual'),
      expect.stringContaining('Disputes'),
    ]);
    expect(described).toMatchObject({ externalId: id, name: `Business ${id}` });
  });

  test('a clock that is 10 minutes wrong is a problem', async () => {
    await control.fault('clock_wrong', { ms: -10 * 60_000, times: null });
    expect((await gateway.describe(soon())).problems).toEqual([expect.stringMatching(/differs from the clock of Stripe by \d{3} s/)]);
  });

  test('a live key is one of production, and charges there', async () => {
    const key = 'sk_live_double_live_0001';
    await controlOf(double.url, 'acct_3Doublelive').account([key]);
    const live = open({ clock: new HastyClock(), account: { ...account, environment: 'production' }, credentials: { secretKey: key } });
    expect(await live.describe(soon())).toMatchObject({ externalId: 'acct_3Doublelive', environment: 'production', problems: [] });
    expect(await charge({ on: live })).toMatchObject({ kind: 'approved' });
  });

  test('a wrong key throws, and the error does not quote it', async () => {
    const wrong = open({ credentials: { secretKey: 'sk_test_of_nobody_0009' } });
    const error = await wrong.describe(soon()).then(String, (thrown: unknown) => inspect(thrown));
    expect(error).toContain('HTTP 401');
    expect(error).not.toContain('sk_test_of_nobody');
  });
});

test('its capabilities', () => {
  expect(gateway.capabilities).toEqual({
    rawCard: false,
    cardToken: true,
    tokenReusable: false,
    maxCardDigits: expect.any(Number),
    minAmountCents: 50,
    maxAmountCents: 99_999_999,
    partialVoid: false,
    refundUnsettled: true,
    voids: 'none',
    finalize: 'at_once',
    finalizeReversal: 'at_once',
    repeatSafeMs: { void: 0, refund: 23 * HOUR },
    settlement: 'payouts',
    lateAfterDays: 10,
    disputes: 'poll',
  });
});

test('a refused connection and a name without an address: no byte was sent', async () => {
  for (const endpoint of [`http://127.0.0.1:${await deadPort()}`, `http://${'n'.repeat(70)}`]) {
    const nobody = open({ endpoint });
    expect(await charge({ on: nobody })).toMatchObject({ kind: 'not_processed', answered: false });
  }
});

describe('a request', () => {
  const requests: string[] = [];
  const server = createServer((socket) => {
    socket.on('error', () => undefined);
    socket.on('data', (bytes: Buffer) => {
      requests.push(String(bytes));
      socket.destroy();
    });
  });
  const call = () => ({ ref: drawRef(), account, leg: 'combined', begunAt: now(), chargeTransactionId: 'pi_1', amountCents: 1, last4: '' }) as const;
  let closing: ReturnType<typeof open>;
  beforeAll(async () => {
    await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
    closing = open({ endpoint: `http://127.0.0.1:${(server.address() as AddressInfo).port}` });
  });
  beforeEach(() => void requests.splice(0));
  afterAll(() => new Promise((resolve) => server.close(resolve)));
  const headersOf = (text: string) =>
    Object.fromEntries(
      text
        .slice(0, text.indexOf('\r\n\r\n'))
        .split('\r\n')
        .slice(1)
        .map((line) => [line.slice(0, line.indexOf(':')).toLowerCase(), line.slice(line.indexOf(':') + 2)]),
    );

  test('is not sent again after its connection was closed', async () => {
    expect(await closing.refund(call(), soon())).toMatchObject({ kind: 'unknown', cause: 'disconnected' });
    expect(requests).toHaveLength(1);
  });

  test('that moves money carries its key, the secret key and the API version, and nothing about this host', async () => {
    const refund = call();
    await closing.refund(refund, soon());
    const { connection: _, host: __, 'content-length': ___, ...headers } = headersOf(requests[0]!);
    expect(headers).toEqual({
      accept: 'application/json',
      authorization: `Bearer ${SECRET_KEY}`,
      'content-type': 'application/x-www-form-urlencoded',
      'idempotency-key': refund.ref,
      'stripe-version': '2026-10-28.endive',
      'user-agent': 'payfold',
    });
  });

  test('that only reads carries no key and no type of a body', async () => {
    await expect(closing.describe(soon())).rejects.toThrow();
    const headers = headersOf(requests[0]!);
    expect(headers).toMatchObject({ authorization: `Bearer ${SECRET_KEY}`, 'stripe-version': '2026-10-28.endive' });
    expect(headers).not.toHaveProperty('idempotency-key');
    expect(headers).not.toHaveProperty('content-type');
  });
});

/** A port without a listener. */
const deadPort = async (): Promise<number> => {
  const server = createServer();
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  const { port } = server.address() as AddressInfo;
  await new Promise((resolve) => server.close(resolve));
  return port;
};
