/**
 * The double of Stripe, driven by the vendor's own client as it comes: it repeats requests, draws its own keys and pages by itself. So the double
 * answers as that client expects, and not only as our adapter does.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { afterAll, afterEach, beforeAll, describe, expect, test } from '@jest/globals';
import Stripe from 'stripe';
import { controlOf, type StripeControl } from './control.js';
import { FAULTS } from './faults.js';
import { isKind, MEMBERS } from './members.js';
import { startStripeDouble, type StripeDouble } from './server.js';

const KEY = 'sk_test_double_one_0001';
const HOUR = 3_600_000;

let folder: string;
let double: StripeDouble;
let control: StripeControl;
let stripe: Stripe;
/** A client that repeats nothing by itself. */
let exact: Stripe;

const clientAt = (url: string, key = KEY, options: { maxNetworkRetries?: number } = {}) => {
  const { hostname, port } = new URL(url);
  return new Stripe(key, { host: hostname, port, protocol: 'http', telemetry: false, ...options });
};
beforeAll(async () => {
  folder = mkdtempSync(join(tmpdir(), 'payfold-double-'));
  double = await startStripeDouble({ file: join(folder, 'double.jsonl') });
  control = controlOf(double.url);
  stripe = clientAt(double.url);
  exact = clientAt(double.url, KEY, { maxNetworkRetries: 0 });
});
afterAll(async () => {
  await double.close();
  rmSync(folder, { recursive: true });
});
afterEach(() => control.heal());

const create = (key?: string, amount = 2_000, on = stripe) =>
  on.paymentIntents.create(
    {
      amount,
      currency: 'usd',
      allowed_payment_method_types: ['card'],
      capture_method: 'automatic',
      metadata: { payfold_ref: 'R0000000000000000001' },
    },
    key === undefined ? {} : { idempotencyKey: key },
  );
const confirm = (id: string, key?: string, method = 'pm_card_visa', on = stripe) =>
  on.paymentIntents.confirm(
    id,
    { payment_method: method, error_on_requires_action: true, expand: ['latest_charge'] },
    key === undefined ? {} : { idempotencyKey: key },
  );
const thrown = (promise: Promise<unknown>): Promise<Stripe.errors.StripeError> =>
  promise.then(
    () => {
      throw new Error('it did not throw');
    },
    (error: Stripe.errors.StripeError) => error,
  );
let drawn = 0;
const drawKey = () => `key-${(drawn += 1)}`;

test('each object has the members that the package of Stripe says, also those that are null; a dispute has its transactions as objects', async () => {
  const { id } = await create();
  const { latest_charge: charge } = await confirm(id);
  const refund = await stripe.refunds.create({ payment_intent: id, amount: 500 });
  const made = await control.dispute(id);
  await control.payOut();
  const dispute = await stripe.disputes.retrieve(made.id);
  const payout = (await stripe.payouts.list({ limit: 1 })).data[0]!;
  const lines = (await stripe.balanceTransactions.list({ payout: payout.id, limit: 100 })).data;
  const intent = await stripe.paymentIntents.retrieve(id);
  for (const thing of [intent, charge as Stripe.Charge, refund, dispute, payout, ...lines, ...dispute.balance_transactions]) {
    expect(isKind(thing.object)).toBe(true);
    for (const name of Object.keys(MEMBERS[thing.object])) expect(thing).toHaveProperty(name);
  }
  expect(dispute.balance_transactions).toMatchObject([{ object: 'balance_transaction', amount: -2_000, fee: 1_500 }]);
  expect([intent.processing, refund.receipt_number, dispute.intended_submission_method]).toEqual([null, null, null]);
});

describe('the default client', () => {
  test('charges', async () => {
    const { id } = await create();
    const intent = await confirm(id);
    expect(intent).toMatchObject({ id, object: 'payment_intent', status: 'succeeded', amount: 2_000, amount_received: 2_000, currency: 'usd' });
    const charge = intent.latest_charge as Stripe.Charge;
    expect(charge).toMatchObject({
      object: 'charge',
      paid: true,
      captured: true,
      payment_intent: id,
      metadata: { payfold_ref: 'R0000000000000000001' },
    });
    expect(charge.payment_method_details?.card).toMatchObject({ brand: 'visa', last4: '4242', checks: { cvc_check: 'pass' } });
    expect(await stripe.charges.retrieve(charge.id)).toMatchObject({ id: charge.id });
    expect(await stripe.paymentIntents.retrieve(id)).toMatchObject({ status: 'succeeded', latest_charge: charge.id });
  });

  test('is declined with an error of the card', async () => {
    const { id } = await create();
    const error = await thrown(confirm(id, undefined, 'pm_card_chargeDeclinedInsufficientFunds'));
    expect(error).toBeInstanceOf(Stripe.errors.StripeCardError);
    expect(error).toMatchObject({ statusCode: 402, code: 'card_declined', decline_code: 'insufficient_funds', payment_intent: { id } });
    expect(await stripe.paymentIntents.retrieve(id)).toMatchObject({
      status: 'requires_payment_method',
      last_payment_error: { type: 'card_error', decline_code: 'insufficient_funds' },
    });
  });

  test('cancels, and cannot cancel what has succeeded', async () => {
    const open = await create();
    expect(await stripe.paymentIntents.cancel(open.id)).toMatchObject({ status: 'canceled' });
    expect(await thrown(confirm(open.id))).toMatchObject({ code: 'payment_intent_unexpected_state', payment_intent: { status: 'canceled' } });
    const done = await create();
    await confirm(done.id);
    const error = await thrown(stripe.paymentIntents.cancel(done.id));
    expect(error).toBeInstanceOf(Stripe.errors.StripeInvalidRequestError);
    expect(error).toMatchObject({ statusCode: 400, code: 'payment_intent_unexpected_state', payment_intent: { id: done.id, status: 'succeeded' } });
  });

  test('refunds in parts, and never more than was charged', async () => {
    const { id } = await create();
    await confirm(id);
    const refund = await stripe.refunds.create({ payment_intent: id, amount: 500, metadata: { payfold_ref: 'R' } });
    expect(refund).toMatchObject({ object: 'refund', amount: 500, status: 'succeeded', payment_intent: id });
    expect(await thrown(stripe.refunds.create({ payment_intent: id, amount: 1_501 }))).toMatchObject({
      statusCode: 400,
      param: 'amount',
      code: undefined,
    });
    await stripe.refunds.create({ payment_intent: id });
    expect(await thrown(stripe.refunds.create({ payment_intent: id }))).toMatchObject({ code: 'charge_already_refunded' });
    expect(await stripe.refunds.retrieve(refund.id)).toMatchObject({ id: refund.id });
    const amounts: number[] = [];
    for await (const one of stripe.refunds.list({ payment_intent: id })) amounts.push(one.amount);
    expect(amounts).toEqual([1_500, 500]);
  });

  test('lists by time, newest first, page by page', async () => {
    await control.advance(10_000);
    const from = Math.floor((Date.now() + double.vendor.ahead) / 1_000);
    const made: string[] = [];
    for (let index = 0; index < 25; index += 1) made.unshift((await create()).id);
    const listed: string[] = [];
    for await (const { id } of stripe.paymentIntents.list({ created: { gte: from }, limit: 10 })) listed.push(id);
    expect(listed).toEqual(made);
    const page = await stripe.paymentIntents.list({ created: { gte: from }, limit: 10, starting_after: made[19]! });
    expect([page.data.map(({ id }) => id), page.has_more]).toEqual([made.slice(20), false]);
  });

  test('reads payouts with their lines', async () => {
    const { id } = await create(undefined, 10_000);
    await confirm(id);
    const refund = await stripe.refunds.create({ payment_intent: id, amount: 1_000 });
    const made = await control.payOut();
    const payout = await stripe.payouts.retrieve(made!.id);
    expect(payout).toMatchObject({ object: 'payout', automatic: true, reconciliation_status: 'completed', status: 'paid' });
    const lines: Stripe.BalanceTransaction[] = [];
    for await (const line of stripe.balanceTransactions.list({ payout: payout.id, expand: ['data.source'] })) lines.push(line);
    expect(lines.find(({ type }) => type === 'charge')).toMatchObject({ net: expect.any(Number), source: { object: 'charge' } });
    expect(lines.find(({ source }) => (source as Stripe.Refund).id === refund.id)).toMatchObject({ type: 'refund', amount: -1_000, net: -1_000 });
    const own = lines.find(({ type }) => type === 'payout');
    expect(own).toMatchObject({ net: -payout.amount });
    expect(lines.filter((line) => line !== own).reduce((sum, { net }) => sum + net, 0)).toBe(payout.amount);
    expect((await stripe.payouts.list({ limit: 1 })).data[0]!.id).toBe(payout.id);
    await confirm((await create()).id);
    const manual = await control.payOut({ status: 'not_applicable' });
    expect(await thrown(stripe.balanceTransactions.list({ payout: manual!.id }))).toMatchObject({ statusCode: 400 });
  });

  test('reads disputes, the account and the balance', async () => {
    const { id } = await create();
    await confirm(id);
    const made = await control.dispute(id);
    const dispute = await stripe.disputes.retrieve(made.id, { expand: ['charge'] });
    expect(dispute).toMatchObject({ object: 'dispute', status: 'needs_response', payment_intent: id, charge: { object: 'charge', disputed: true } });
    expect((await stripe.disputes.list({ limit: 1 })).data[0]!.id).toBe(made.id);
    expect(await stripe.accounts.retrieveCurrent()).toMatchObject({ object: 'account', country: 'US', default_currency: 'usd' });
    expect(await stripe.balance.retrieve()).toMatchObject({ object: 'balance', livemode: false });
  });

  test('is refused with a wrong key, an unknown object and an unknown parameter', async () => {
    expect(await thrown(create(undefined, 2_000, clientAt(double.url, 'sk_test_nobody')))).toBeInstanceOf(Stripe.errors.StripeAuthenticationError);
    expect(await thrown(stripe.paymentIntents.retrieve('pi_none'))).toMatchObject({ statusCode: 404, code: 'resource_missing' });
    expect(await thrown(stripe.refunds.list({ wrong: 1 } as never))).toMatchObject({ statusCode: 400, code: 'parameter_unknown', param: 'wrong' });
    // This version of the API does not take it any more.
    const old = { amount: 2_000, currency: 'usd', payment_method_types: ['card'] } as never;
    expect(await thrown(stripe.paymentIntents.create(old))).toMatchObject({ code: 'parameter_unknown' });
    expect(await thrown(create(undefined, 49))).toMatchObject({ code: 'amount_too_small', param: 'amount' });
  });

  test('repeats by itself what was refused for now, and charges once', async () => {
    await control.fault('key_in_use', { op: 'create' });
    await control.fault('http_500_before', { op: 'confirm' });
    const patient = clientAt(double.url, KEY, { maxNetworkRetries: 2 });
    const { id } = await create(undefined, 2_000, patient);
    expect(await confirm(id, undefined, 'pm_card_visa', patient)).toMatchObject({ status: 'succeeded' });
    expect((await control.charges()).filter((charge) => charge.payment_intent === id)).toHaveLength(1);
  });
});

describe('keys', () => {
  test('give the stored answer again, for 24 hours', async () => {
    const key = drawKey();
    const first = await create(key);
    const again = await create(key);
    expect(again.id).toBe(first.id);
    expect(again.lastResponse.headers['idempotent-replayed']).toBe('true');
    await control.advance(24 * HOUR - 60_000);
    expect((await create(key)).id).toBe(first.id);
    await control.advance(120_000);
    expect((await create(key)).id).not.toBe(first.id);
  });

  test('store declines, refusals and errors of the server, too', async () => {
    const [declined, refused, failed] = [drawKey(), drawKey(), drawKey()];
    const { id } = await create();
    const decline = await thrown(confirm(id, declined, 'pm_card_chargeDeclined'));
    expect(await thrown(confirm(id, declined, 'pm_card_chargeDeclined'))).toMatchObject({ code: 'card_declined', charge: decline.charge });
    const over = () => stripe.refunds.create({ payment_intent: id, amount: 5_000 }, { idempotencyKey: refused });
    expect(await thrown(over())).toMatchObject({ code: 'payment_intent_unexpected_state' });
    await confirm(id);
    expect(await thrown(over())).toMatchObject({ code: 'payment_intent_unexpected_state' });
    await control.fault('stored_500', { op: 'create' });
    expect(await thrown(create(failed, 2_000, exact))).toMatchObject({ statusCode: 500 });
    expect(await thrown(create(failed, 2_000, exact))).toMatchObject({ statusCode: 500 });
  });

  test('are bound to the endpoint and the parameters of their first use', async () => {
    const key = drawKey();
    const { id } = await create(key);
    for (const other of [create(key, 2_001), stripe.paymentIntents.update(id, { metadata: { a: 'b' } }, { idempotencyKey: key })]) {
      const error = await thrown(other);
      expect(error).toBeInstanceOf(Stripe.errors.StripeIdempotencyError);
      expect(error).toMatchObject({ statusCode: 400, rawType: 'idempotency_error' });
    }
    await control.fault('keys_unbound');
    expect(await stripe.paymentIntents.update(id, { metadata: { a: 'b' } }, { idempotencyKey: key })).toMatchObject({ metadata: { a: 'b' } });
  });

  test.each([
    ['rate_limit', 429, 'rate_limit'],
    ['lock_timeout', 429, 'lock_timeout'],
    ['key_in_use', 409, 'idempotency_key_in_use'],
  ] as const)('store nothing of %s', async (name, statusCode, code) => {
    const key = drawKey();
    await control.fault(name, { op: 'create' });
    expect(await thrown(create(key, 2_000, exact))).toMatchObject({ statusCode, code });
    expect(await create(key)).toMatchObject({ object: 'payment_intent' });
  });

  test('are in use, and the object is locked, while a request is executed', async () => {
    const key = drawKey();
    const { id } = await create();
    await control.fault('slow', { op: 'confirm', ms: 300 });
    const first = confirm(id, key, 'pm_card_visa', exact);
    await new Promise((done) => setTimeout(done, 100));
    expect(await thrown(confirm(id, key, 'pm_card_visa', exact))).toMatchObject({ statusCode: 409, code: 'idempotency_key_in_use' });
    expect(await thrown(exact.paymentIntents.cancel(id))).toMatchObject({ statusCode: 429, code: 'lock_timeout' });
    expect(await first).toMatchObject({ status: 'succeeded' });
    expect(await confirm(id, key)).toMatchObject({ status: 'succeeded' });
  });

  test('belong to one account', async () => {
    const key = drawKey();
    const first = await create(key);
    const other = await create(key, 2_000, clientAt(double.url, 'sk_test_double_two_0001'));
    expect(other.id).not.toBe(first.id);
  });
});

describe('as a process', () => {
  const processes: ChildProcess[] = [];
  afterEach(() => {
    for (const child of processes.splice(0)) child.kill('SIGKILL');
  });
  const start = async (file: string): Promise<{ url: string; pid: number; child: ChildProcess }> => {
    const main = resolve(import.meta.dirname, '../../../dist/test/doubles/stripe/main.js');
    const child = spawn(process.execPath, [main, '--file', file], { stdio: ['ignore', 'pipe', 'inherit'] });
    processes.push(child);
    const line = await new Promise<string>((done, fail) => {
      child.once('exit', (code) => fail(new Error(`ended with ${code}`)));
      child.stdout.once('data', (bytes: Buffer) => done(bytes.toString()));
    });
    const { ready, url, pid } = JSON.parse(line) as { ready: string; url: string; pid: number };
    expect([ready, pid]).toEqual(['double:stripe', child.pid]);
    return { url, pid, child };
  };

  test('it says where it listens, and loses nothing that it answered when it is killed', async () => {
    const file = join(folder, 'process.jsonl');
    const first = await start(file);
    const client = clientAt(first.url);
    await controlOf(first.url).advance(5 * HOUR);
    const key = drawKey();
    const { id } = await create(key, 2_000, client);
    await confirm(id, undefined, 'pm_card_visa', client);
    const refund = await client.refunds.create({ payment_intent: id, amount: 100 });
    const payout = await controlOf(first.url).payOut();
    const ended = new Promise((done) => first.child.once('exit', done));
    first.child.kill('SIGKILL');
    await ended;

    const second = await start(file);
    const again = clientAt(second.url);
    expect(await again.paymentIntents.retrieve(id)).toMatchObject({ status: 'succeeded' });
    expect(await again.refunds.retrieve(refund.id)).toMatchObject({ amount: 100 });
    expect(await again.payouts.retrieve(payout!.id)).toMatchObject({ amount: payout!.amount });
    expect((await create(key, 2_000, again)).id).toBe(id);
    const state = (await (await fetch(`${second.url}/_double`)).json()) as { aheadMs: number };
    expect(state.aheadMs).toBe(5 * HOUR);
    expect((await create(undefined, 2_000, again)).id).not.toBe(id);
  });
});

test('the table of answers names each fault', () => {
  const table = readFileSync(join(import.meta.dirname, 'answers.md'), 'utf8');
  for (const name of Object.keys(FAULTS)) expect(table).toContain(`\`${name}\``);
});
