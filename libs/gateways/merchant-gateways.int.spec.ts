/** The adapters that processes make from merchant accounts, against the doubles of both processors. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import {
  Administration,
  chargesOnce,
  type ChargeStops,
  MemoryDirectory,
  type MerchantAccount,
  type MerchantAccountSettings,
  type Stopped,
  takesCardNumbers,
  type Vendor,
  VENDORS,
} from '#accounts';
import { memoryEventStore, type Position } from '#eventstore';
import { timestamp } from '#kernel';
import { type GatewayAccount, type PaymentGateway, type TransactionClaims, Secret } from '#payments';
import { createLogger, newKeyRing, systemIds } from '#platform';
import { startAuthorizeNetDouble, type AuthorizeNetDouble } from '../../test/doubles/authorize-net/server.js';
import { startStripeDouble, type StripeDouble } from '../../test/doubles/stripe/server.js';
import { eventually } from '../../test/support/eventually.js';
import { MovableClock } from '../../test/support/clock.js';
import { memoryPersonalKeys } from '../../test/support/personal-keys.js';
import { MerchantGateways } from './merchant-gateways.js';
import { askVendor, createVendorGateway, ENDPOINTS, readCredentials } from './vendors.js';

const KEYS = {
  one: { apiLoginId: 'login-one', transactionKey: 'key-of-one-0001' },
  two: { apiLoginId: 'login-two', transactionKey: 'key-of-two-0001' },
};
const CREDENTIALS = JSON.stringify(KEYS.one);
const STRIPE_CREDENTIALS = '{"secretKey":"sk_test_double_one_0001"}';

let folder: string;
let clock: MovableClock;
let net: AuthorizeNetDouble;
let stripe: StripeDouble;
let logged: string[];
let held: [merchantAccount: string, more: 0 | 1][];
let alarms: string[];
let cleanUps: (() => unknown)[];
beforeEach(async () => {
  [clock, logged, held, alarms, cleanUps] = [new MovableClock(), [], [], [], []];
  folder = mkdtempSync(join(tmpdir(), 'payfold-doubles-'));
  net = await startAuthorizeNetDouble({ file: join(folder, 'net.jsonl') });
  stripe = await startStripeDouble({ file: join(folder, 'stripe.jsonl') });
  cleanUps.push(
    () => net.close(),
    () => stripe.close(),
  );
});
afterEach(async () => {
  for (const cleanUp of cleanUps.reverse()) await cleanUp();
  rmSync(folder, { recursive: true, force: true });
  // Credentials are in no log line.
  expect(logged.join('')).not.toMatch(/key-of-|sk_test/);
});

/** A process with its own registry of adapters, on a log in memory. */
const process = () => {
  const [store, directory, keys] = [memoryEventStore(), new MemoryDirectory(), newKeyRing()];
  const logger = createLogger('info', 'spec', { write: (line) => logged.push(line) });
  const admin = new Administration({
    store,
    clock,
    ids: systemIds(() => clock.now()),
    keys,
    personal: memoryPersonalKeys(),
    environment: 'sandbox',
    cardInTextCheck: true,
    actor: { type: 'operator', id: 'spec' },
  });
  const stops = memoryStops();
  let seen: Position | null = null;
  const project = async () => {
    for await (const events of store.readAll(seen)) {
      directory.apply(events);
      seen = events.at(-1)!.position;
    }
  };
  const open = (ring = keys) => {
    const made = new MerchantGateways({
      directory,
      keys: ring,
      environment: 'sandbox',
      clock,
      logger,
      stops,
      observed: (_, gateway) => gateway,
      claims: memoryClaims(),
      disableCharges: async (id, reason) => void (await admin.disableMerchantAccount(id, 'charges', reason)),
      countAlarm: ({ merchantAccount }, more) => void (more && alarms.push(merchantAccount)),
      countHeld: ({ merchantAccount }, more) => void held.push([merchantAccount, more]),
      endpoints: { 'authorize-net': net.endpoint, stripe: stripe.url },
    });
    cleanUps.push(() => made.close());
    return made;
  };
  const add = async (merchantAccount: string, gateway: Vendor = 'authorize-net', credentials = CREDENTIALS, externalId = '700001') => {
    const settings = { cutOff: null, endpoint: null };
    await admin.addMerchantAccount({ merchantAccount, gateway, environment: 'sandbox', name: 'City', settings }, externalId, credentials, []);
    await project();
  };
  return { admin, add, project, open, stops };
};

const memoryClaims = (): TransactionClaims => {
  const owners = new Map<string, string>();
  return {
    claim: async ({ merchantAccount }, transactionId, ref) => {
      const key = `${merchantAccount} ${transactionId}`;
      if (!owners.has(key)) owners.set(key, ref);
      return owners.get(key) === ref;
    },
  };
};

/** The stops of an installation. `isDown`: they cannot be written. */
const memoryStops = (): ChargeStops & { isDown: boolean } => {
  const rows = new Map<string, Stopped>();
  return {
    isDown: false,
    all: async () => [...rows.values()],
    async stop({ gateway, merchantAccount }) {
      if (this.isDown) throw new Error('the stops are down');
      rows.set(merchantAccount, { gateway, merchantAccount });
    },
    end: async ({ merchantAccount }) => void rows.delete(merchantAccount),
  };
};

const accountOf = (merchantAccount: string, gateway: Vendor = 'authorize-net'): GatewayAccount => ({
  gateway,
  merchantAccount,
  credentialsRef: `merchant-account:${merchantAccount}`,
  environment: 'sandbox',
});
const charge = (gateway: PaymentGateway, account: GatewayAccount, ref: string) =>
  gateway.charge(
    {
      ref,
      account,
      leg: 'combined',
      begunAt: timestamp(clock.now()),
      amountCents: 1_000,
      instrument:
        account.gateway === 'stripe'
          ? { type: 'card_token', token: new Secret('pm_card_visa') }
          : { type: 'card', number: new Secret('4111111111111111'), expiry: { month: 1, year: 2041 }, cvv: new Secret('946') },
    },
    AbortSignal.timeout(10_000),
  );

describe('the adapters of a process', () => {
  test.each([
    ['authorize-net', CREDENTIALS],
    ['stripe', STRIPE_CREDENTIALS],
  ] as const)('charge through an account of %s that was added a moment ago', async (gateway, credentials) => {
    const { add, open } = process();
    const gateways = open();
    await gateways.reload();
    const account = accountOf('city', gateway);
    await add('city', gateway, credentials);
    expect(gateways.find(account)).toBeNull();
    await gateways.load('city');
    expect(await charge(gateways.find(account)!, account, 'PF000000000000000001')).toMatchObject({ kind: 'approved' });
  });

  test('follow the rows: added, disabled for charges, disabled for everything, enabled', async () => {
    const { admin, add, project, open } = process();
    const gateways = open();
    void gateways.follow();
    await add('city');
    await eventually(() => gateways.find(accountOf('city')) !== null);
    const adapter = gateways.find(accountOf('city'));
    await admin.disableMerchantAccount('city', 'charges', 'audit');
    await project();
    await gateways.reload();
    // Refunds and settlement go on.
    expect(gateways.find(accountOf('city'))).toBe(adapter);
    await admin.disableMerchantAccount('city', 'everything', 'audit');
    await project();
    await gateways.reload();
    expect(gateways.find(accountOf('city'))).toBeNull();
    await admin.enableMerchantAccount('city');
    await project();
    await gateways.reload();
    expect(gateways.find(accountOf('city'))).toBe(adapter);
  });

  test('take new credentials and settings, and complete the calls that began with the old ones', async () => {
    const { admin, add, project, open } = process();
    const gateways = open();
    await add('city');
    await gateways.reload();
    const old = gateways.find(accountOf('city'))!;
    net.vendor.setFault({ name: 'delay', op: '*', ref: null, times: 1, ms: 300, code: 2, reason: 2 });
    const running = charge(old, accountOf('city'), 'PF000000000000000002');
    await admin.rotateCredentials('city', '700001', JSON.stringify({ ...KEYS.one, transactionKey: 'not-the-key-0001' }));
    await project();
    await gateways.reload();
    const rotated = gateways.find(accountOf('city'))!;
    expect(rotated).not.toBe(old);
    expect(await running).toMatchObject({ kind: 'approved' });
    // The new credentials are in use: these are wrong.
    expect(await charge(rotated, accountOf('city'), 'PF000000000000000003')).toEqual({ kind: 'not_processed', answered: false, raw: 'E00007' });
    await admin.recordMerchantCheck('city', 'r1', [{ guarantee: 'g8', result: 'holds', detail: '' }]);
    await project();
    await gateways.reload();
    expect(rotated.capabilities.repeatSafeMs.refund).toBe(0);
    expect(gateways.find(accountOf('city'))!.capabilities.repeatSafeMs.refund).toBeGreaterThan(0);
  });

  test('count the charges that are held for review, by account', async () => {
    const { add, open } = process();
    await add('city');
    const gateways = open();
    await gateways.reload();
    expect(held).toEqual([['city', 0]]);
    net.vendor.setFault({ name: 'held', op: 'charge', ref: null, times: 1, ms: 0, code: 4, reason: 252 });
    const account = accountOf('city');
    expect(await charge(gateways.find(account)!, account, 'PF000000000000000021')).toMatchObject({ kind: 'held' });
    expect(await charge(gateways.find(account)!, account, 'PF000000000000000022')).toMatchObject({ kind: 'approved' });
    expect(held).toEqual([
      ['city', 0],
      ['city', 1],
    ]);
  });

  test('are not found under another gateway, credentials or environment', async () => {
    const { add, open } = process();
    const gateways = open();
    await add('city');
    await gateways.reload();
    const account = accountOf('city');
    expect(gateways.find({ ...account, gateway: 'stripe' })).toBeNull();
    expect(gateways.find({ ...account, credentialsRef: 'merchant-account:other' })).toBeNull();
    expect(gateways.find({ ...account, environment: 'production' })).toBeNull();
    expect(gateways.find(account)).not.toBeNull();
  });

  test('are missing where another key ring sealed the credentials; the others stay', async () => {
    const { add, open } = process();
    await add('city');
    const gateways = open(newKeyRing());
    expect(await gateways.reload()).toBe(1);
    expect(gateways.find(accountOf('city'))).toBeNull();
    expect(logged.join('')).toContain('cannot be opened');
  });
});

describe('answers that need a person', () => {
  test('two charges with the same transaction: the second is unknown, also under its reference, and is never undone', async () => {
    const { add, open } = process();
    await add('city');
    const gateways = open();
    await gateways.reload();
    const account = accountOf('city');
    const gateway = gateways.find(account)!;
    expect(await charge(gateway, account, 'PF000000000000000031')).toMatchObject({ kind: 'approved' });
    net.vendor.setFault({ name: 'same_id', op: 'charge', ref: null, times: 1, ms: 0, code: 1, reason: 1 });
    expect(await charge(gateway, account, 'PF000000000000000032')).toEqual({ kind: 'unknown', cause: 'unreadable', raw: 'a transaction of another charge' }); // prettier-ignore
    expect(alarms).toEqual(['city']);
    // The same reference again is no other charge.
    expect(await charge(gateway, account, 'PF000000000000000031')).toMatchObject({ kind: 'approved' });
    expect(alarms).toEqual(['city']);
  });

  test('test mode stops the account in every process, until it is enabled', async () => {
    const { add, admin, open, project } = process();
    await add('city');
    const gateways = open();
    await gateways.reload();
    const account = accountOf('city');
    const gateway = gateways.find(account)!;
    net.vendor.setFault({ name: 'test_mode', op: 'charge', ref: null, times: 1, ms: 0, code: 1, reason: 1 });
    expect(await charge(gateway, account, 'PF000000000000000041')).toEqual({ kind: 'not_processed', answered: false, raw: 'test mode' });
    expect(gateway.mayCharge!()).toBe(false);
    expect(alarms).toEqual(['city']);
    await eventually(async () => (await admin.merchantAccount('city')).status === 'charges_disabled');
    void gateways.follow();
    await project();
    await eventually(() => gateway.mayCharge!());
    expect((await admin.merchantAccount('city')).status).toBe('charges_disabled');
    await admin.enableMerchantAccount('city');
    expect((await admin.merchantAccount('city')).status).toBe('active');
  });

  test('refused credentials stop new charges, and they begin again with good ones', async () => {
    const { add, open } = process();
    await add('city');
    const gateways = open();
    await gateways.reload();
    void gateways.follow();
    const account = accountOf('city');
    net.vendor.setFault({ name: 'refused', op: 'charge', ref: null, times: 1, ms: 0, code: 8, reason: 2 });
    expect(await charge(gateways.find(account)!, account, 'PF000000000000000051')).toMatchObject({ kind: 'not_processed' });
    expect(gateways.find(account)!.mayCharge!()).toBe(false);
    clock.advance(31_000);
    await eventually(() => gateways.find(account)!.mayCharge!());
  });
});

describe('a processor that refuses its lists', () => {
  const AWHILE_MS = 31_000;
  const off = () => net.vendor.setFault({ name: 'details_api_off', op: '*', ref: null, times: null, ms: 0, code: 2, reason: 2 });
  /** Two processes of one installation. Only the first one is refused a list. */
  const two = async () => {
    const { add, open, stops } = process();
    await add('city');
    const all = [open(), open()];
    for (const gateways of all) {
      await gateways.reload();
      void gateways.follow();
    }
    const [first, second] = all.map((gateways) => () => gateways.find(accountOf('city'))!) as [() => PaymentGateway, () => PaymentGateway];
    const meet = () => expect(first().transaction!('1', AbortSignal.timeout(10_000))).rejects.toThrow('E00011');
    return { first, second, stops, meet };
  };

  test('stops new charges in every process, and they begin again when it answers', async () => {
    const { first, second, meet } = await two();
    expect([first().mayCharge!(), second().mayCharge!()]).toEqual([true, true]);
    off();
    await meet();
    expect(first().mayCharge!()).toBe(false);
    await eventually(() => !second().mayCharge!());
    expect(logged.filter((line) => line.includes('No new charges'))).toHaveLength(2);
    // The processor is asked again, and still refuses.
    const asked = net.calls.merchant ?? 0;
    clock.advance(AWHILE_MS);
    await eventually(() => (net.calls.merchant ?? 0) >= asked + 2);
    expect([first().mayCharge!(), second().mayCharge!()]).toEqual([false, false]);
    net.vendor.heal('details_api_off');
    clock.advance(AWHILE_MS);
    await eventually(() => first().mayCharge!() && second().mayCharge!());
    expect(await charge(first(), accountOf('city'), 'PF000000000000000011')).toMatchObject({ kind: 'approved' });
  });

  test('is known to the other processes as soon as it can be written', async () => {
    const { first, second, stops, meet } = await two();
    stops.isDown = true;
    off();
    await meet();
    await eventually(() => logged.join('').includes('cannot be shared yet'));
    expect([first().mayCharge!(), second().mayCharge!()]).toEqual([false, true]);
    stops.isDown = false;
    await eventually(() => !second().mayCharge!());
  });
});

describe('the processor is asked about an account', () => {
  const facts = (gateway: Vendor = 'authorize-net', settings: Partial<MerchantAccountSettings> = {}): MerchantAccount => ({
    merchantAccount: 'city',
    gateway,
    environment: 'sandbox',
    name: 'City',
    externalId: '',
    settings: { cutOff: null, endpoint: null, ...settings },
    credentials: { kid: '', ciphertext: '' },
    status: 'active',
    lastCheck: null,
    openCheck: null,
    repeats: null,
  });
  const ask = (gateway: Vendor, credentials: string) =>
    askVendor(facts(gateway), credentials, { clock, endpoints: { 'authorize-net': net.endpoint, stripe: stripe.url } });

  test('and names it', async () => {
    expect(await ask('authorize-net', CREDENTIALS)).toEqual({ externalId: '700001', name: 'Merchant one' });
    expect(await ask('stripe', STRIPE_CREDENTIALS)).toMatchObject({ externalId: 'acct_3Doubleone' });
  });
  test.each([
    ['authorize-net', JSON.stringify({ ...KEYS.one, transactionKey: 'wrong-key-00001' })],
    ['stripe', '{"secretKey":"sk_test_wrong_00001"}'],
  ] as const)('and refuses wrong credentials of %s, which are not repeated', async (gateway, credentials) => {
    const error = await ask(gateway, credentials).catch((thrown: unknown) => thrown);
    expect(error).toMatchObject({ code: 'VALIDATION_ERROR' });
    expect(String((error as Error).message)).not.toMatch(/wrong/);
  });
  test('and an account in test mode, or one that shows no transactions, is refused', async () => {
    const cutOff = { time: '16:00', timeZone: 'America/Los_Angeles' };
    const merchant = { apiLoginId: 'login-test', transactionKey: 'key-of-test-0001', gatewayId: '700009', name: 'Test', testMode: true, cutOff };
    net.vendor.setMerchant(merchant);
    await expect(ask('authorize-net', '{"apiLoginId":"login-test","transactionKey":"key-of-test-0001"}')).rejects.toThrow(/in test mode/);
    net.vendor.setFault({ name: 'details_api_off', op: '*', ref: null, times: null, ms: 0, code: 2, reason: 2 });
    await expect(ask('authorize-net', CREDENTIALS)).rejects.toThrow(/Transaction Details API.*Account > Settings/);
  });
  test('and an endpoint that nobody answers is refused', async () => {
    const endpoint = net.endpoint;
    await net.close();
    cleanUps.splice(0, 1);
    await expect(askVendor(facts('authorize-net', { endpoint }), CREDENTIALS, { clock })).rejects.toMatchObject({ code: 'VALIDATION_ERROR' });
  });
});

describe('a credentials file', () => {
  const bad = (text: string, gateway: Vendor = 'authorize-net', environment: 'sandbox' | 'production' = 'sandbox') =>
    expect(() => readCredentials(gateway, environment, text));
  test('holds exactly the fields of the processor', () => {
    expect(readCredentials('authorize-net', 'sandbox', `\uFEFF ${CREDENTIALS}\n`)).toBe(CREDENTIALS);
    expect(readCredentials('stripe', 'production', '{"secretKey":"rk_live_abc"}')).toBe('{"secretKey":"rk_live_abc"}');
  });
  test.each(['', 'not json', '[]', 'null', '"text"', '{}', '{"apiLoginId":"a"}', '{"apiLoginId":"a","transactionKey":"b","more":1}'])(
    'is refused: %s',
    (text) => bad(text).toThrow(/^The credentials /),
  );
  test.each(['""', '1', 'null', '"with space"', '"line\\nfeed"', `"${'x'.repeat(256)}"`])('has no usable field: %s', (value) =>
    bad(`{"apiLoginId":"a","transactionKey":${value}}`).toThrow(/no usable transactionKey/),
  );
  test('a key of Stripe names its environment, and a public one is refused', () => {
    bad('{"secretKey":"sk_live_abc"}', 'stripe').toThrow('The credentials belong to production, not to sandbox.');
    bad('{"secretKey":"sk_test_abc"}', 'stripe', 'production').toThrow('The credentials belong to sandbox, not to production.');
    bad('{"secretKey":"pk_test_abc"}', 'stripe').toThrow(/sk_ or rk_/);
  });
  test('its content is in no message', () => {
    for (const text of ['key-SECRET', '{"apiLoginId":"SECRET"}', '{"apiLoginId":"a","transactionKey":"SEC RET"}'])
      expect(() => readCredentials('authorize-net', 'sandbox', text)).toThrow(
        expect.objectContaining({ message: expect.not.stringMatching(/SEC ?RET/) }),
      );
  });
});

test.each(VENDORS)('%s: the rules of portals agree with the capabilities of the adapter, and its address is a constant', (gateway) => {
  const facts = { merchantAccount: 'm', gateway, environment: 'production', settings: { cutOff: null, endpoint: null }, repeats: null } as const;
  const adapter = createVendorGateway(facts, gateway === 'stripe' ? '{"secretKey":"sk_live_x"}' : CREDENTIALS, { clock });
  const { rawCard, cardToken, tokenReusable } = adapter.capabilities;
  adapter.close();
  expect(takesCardNumbers(gateway)).toBe(rawCard);
  expect(chargesOnce(gateway)).toBe(cardToken && !tokenReusable);
  expect(ENDPOINTS[gateway].production).toMatch(/^https:\/\/api\.(authorize\.net|stripe\.com)/);
});
