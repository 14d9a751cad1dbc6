/** Merchant accounts: by the command line in the sandbox, against the doubles of both processors; and in production, with the address replaced. */
import { chmod, mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, afterEach, beforeAll, describe, expect, test } from '@jest/globals';
import { directoryModel, NO_FEE } from '#accounts';
import { askVendor, readCredentials } from '#gateways';
import { load } from '#eventstore';
import { systemClock, timestamp } from '#kernel';
import { recordDisputes, recordSettlements } from '#settlement';
import { createMetrics } from '../../apps/metrics.js';
import { type AuthorizeNetDouble, startAuthorizeNetDouble } from '../doubles/authorize-net/server.js';
import { controlOf, type StripeControl } from '../doubles/stripe/control.js';
import { startStripeDouble, type StripeDouble } from '../doubles/stripe/server.js';
import { booksOf } from '../support/books.js';
import { eventually } from '../support/eventually.js';
import { addMerchantAccount, payfoldOn, type Running, startIn } from '../support/merchants.js';
import { paymentOf } from '../support/service.js';
import { formText, INTAKE, intakeOf, Payer, SHOP } from '../support/checkout.js';
import { PORTAL_STREAM, portalEvents } from '../../libs/accounts/events.js';

const CARD = '4111 1111 1111 1111';
const OFF = /hosted checkout is off/;
const KEY = 'key-of-one-0001';
const TEST_MODE = {
  apiLoginId: 'login-test',
  transactionKey: 'key-of-test-0001',
  gatewayId: '700009',
  name: 'Test',
  cutOff: { time: '16:00', timeZone: 'America/Los_Angeles' },
};
const stops: (() => unknown)[] = [];
let folder: string;
let net: AuthorizeNetDouble;
let stripe: StripeDouble;
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'payfold-merchants-'));
  net = await startAuthorizeNetDouble({ file: join(folder, 'net.jsonl') });
  stripe = await startStripeDouble({ file: join(folder, 'stripe.jsonl') });
  stops.push(
    () => net.close(),
    () => stripe.close(),
  );
});
afterEach(() => net.vendor.heal(null));
afterAll(async () => {
  for (const stop of stops.reverse()) await stop();
  await rm(folder, { recursive: true, force: true });
});

const combined = { ...NO_FEE, flatCents: 50, chargeMode: 'combined' } as const;

describe('the command line', () => {
  let running: Running;
  let file: string;
  let stripeFile: string;
  beforeAll(async () => {
    running = await startIn({ folder, stops }, 'sandbox');
    file = join(folder, 'net.json');
    stripeFile = join(folder, 'stripe.json');
    await writeFile(file, JSON.stringify({ apiLoginId: 'login-one', transactionKey: KEY }), { mode: 0o600 });
    await writeFile(stripeFile, '{"secretKey":"sk_test_double_one_0001"}', { mode: 0o600 });
  });

  const payfold = (args: readonly string[], input = '') => payfoldOn(running, args, input);
  const json = async <T = Record<string, unknown>>(...args: string[]): Promise<T> => {
    const ran = await payfold(args);
    expect([ran.code, ran.stderr]).toEqual([0, '']);
    return JSON.parse(ran.stdout) as T;
  };
  const refused = async (code: 1 | 2, args: readonly string[], input = ''): Promise<string> => {
    const ran = await payfold(args, input);
    const { success, message, details } = JSON.parse(ran.stdout) as { success: boolean; message: string; details: { code: string } };
    expect([ran.code, success]).toEqual([code, false]);
    expect(details.code).toMatch(/^(VALIDATION_ERROR|INVALID_STATE)$/);
    expect(ran.stdout + ran.stderr).not.toMatch(/key-of-|sk_test|SECRET/);
    return message;
  };
  const added = () => running.services.directory.merchantAccounts();
  const ADD_NET = () => ['merchant-accounts', 'add', 'water', '--gateway', 'authorize-net', '--environment', 'sandbox', '--endpoint', net.endpoint];

  test('refuses a bad file, bad settings and wrong credentials: nothing is recorded, and nothing is shown', async () => {
    const add = (...more: string[]) => [...ADD_NET(), ...more];
    expect(await refused(1, add('--credentials-file', join(folder, 'none.json')))).toMatch(/cannot be read \(ENOENT\)/);
    expect(await refused(1, add('--credentials-file', '-'), 'SECRET')).toMatch(/are not JSON/);
    expect(await refused(1, add('--credentials-file', '-'), '{"secretKey":"SECRET"}')).toMatch(/exactly the fields apiLoginId and transactionKey/);
    expect(await refused(1, add('--credentials-file', '-'), '{"apiLoginId":"login-one","transactionKey":"SECRET"}')).toMatch(
      /^The account cannot be described\./,
    );
    expect(await refused(1, add('--credentials-file', file, '--cut-off', '25:00', '--time-zone', 'UTC'))).toMatch(/HH:MM/);
    expect(await refused(2, add('--credentials-file', file, '--cut-off', '16:00'))).toMatch(/belong together/);
    const production = ['merchant-accounts', 'add', 'water', '--gateway', 'authorize-net', '--environment', 'production', '--credentials-file', file];
    expect(await refused(1, production)).toMatch(/belongs to sandbox/);
    // The credentials go to no address that would show them.
    const elsewhere = ['merchant-accounts', 'add', 'water', '--gateway', 'authorize-net', '--environment', 'sandbox', '--credentials-file', file];
    expect(await refused(1, [...elsewhere, '--endpoint', 'http://203.0.113.7/'])).toMatch(/https address/);
    net.vendor.setMerchant({ ...TEST_MODE, testMode: true });
    const { apiLoginId, transactionKey } = TEST_MODE;
    expect(await refused(1, add('--credentials-file', '-'), JSON.stringify({ apiLoginId, transactionKey }))).toMatch(/in test mode/);
    expect(await added()).toEqual([]);
  });

  test('adds an account, and an account of the processor only once', async () => {
    await chmod(file, 0o644);
    const open = await payfold([...ADD_NET(), '--credentials-file', file, '--cut-off', '16:00', '--time-zone', 'America/Los_Angeles']);
    await chmod(file, 0o600);
    expect([open.code, open.stderr]).toEqual([0, expect.stringMatching(/^warning: .*chmod 600/)]);
    expect(JSON.parse(open.stdout)).toEqual({
      merchantAccount: 'water',
      gateway: 'authorize-net',
      environment: 'sandbox',
      name: 'Merchant one',
      externalId: '700001',
      status: 'active',
      settings: { cutOff: { time: '16:00', timeZone: 'America/Los_Angeles' }, endpoint: net.endpoint },
      portals: [],
      lastCheck: null,
      feeds: [],
    });
    expect(await refused(1, [...ADD_NET(), '--credentials-file', file])).toBe('There is a merchant account water already.');
    expect(
      await refused(
        1,
        ADD_NET()
          .map((word) => (word === 'water' ? 'again' : word))
          .concat('--credentials-file', file),
      ),
    ).toBe('Account 700001 of authorize-net is there already, as water.');
    const stripeArgs = [
      '--gateway',
      'stripe',
      '--environment',
      'sandbox',
      '--endpoint',
      stripe.url,
      '--credentials-file',
      stripeFile,
      '--name',
      'Fines',
    ];
    expect(await json('merchant-accounts', 'add', 'fines', ...stripeArgs)).toMatchObject({ name: 'Fines', externalId: 'acct_3Doubleone' });
    expect((await json<{ merchantAccount: string }[]>('merchant-accounts', 'list')).map((row) => row.merchantAccount)).toEqual(['fines', 'water']);
  });

  test('points a portal at it, which then charges at once in a running service', async () => {
    const { portalId } = (
      await running.inForce(running.admin.createPortal({ accountIds: [running.accountId], name: 'Water', gateway: 'none', fee: NO_FEE }))
    ).state;
    const set = (...args: string[]) => ['portals', 'set-gateway', portalId, ...args];
    expect(await refused(2, set('--gateway', 'authorize-net'))).toMatch(/needs --principal/);
    expect(await refused(1, set('--gateway', 'authorize-net', '--principal', 'nobody'))).toBe('There is no such merchant account.');
    expect(await refused(1, set('--gateway', 'stripe', '--principal', 'water'))).toMatch(/is one of authorize-net, not of stripe/);
    expect(await refused(1, set('--gateway', 'stripe', '--principal', 'fines'))).toMatch(/charge mode must be combined/);
    expect(await json(...set('--gateway', 'authorize-net', '--principal', 'water'))).toMatchObject({
      gateway: 'authorize-net',
      merchantAccounts: { principal: 'water', fee: 'water' },
    });
    const made = await running.client.created(paymentOf(portalId, { number: CARD }));
    expect(made).toMatchObject({ status: 'succeeded' });
    expect(await json('merchant-accounts', 'show', 'water')).toMatchObject({ portals: [portalId] });

    expect(await refused(1, ['settlement', 'close', '--portal', portalId])).toBe(
      'Only the simulator closes batches on request; authorize-net closes its batches by itself.',
    );

    expect(await json('merchant-accounts', 'disable', 'water', '--reason', 'audit', '--by', 'Dana')).toMatchObject({ status: 'charges_disabled' });
    const closed = await running.client.create(paymentOf(portalId, { number: CARD }));
    expect([closed.status, closed.code]).toEqual([503, 'GATEWAY_NOT_CONFIGURED']);
    expect((await running.client.refund(made.id)).status).toBe(200);
    expect(await refused(2, ['merchant-accounts', 'disable', 'water', '--everything', '--reason', 'leak', '--by', 'Dana'])).toMatch(
      /can no longer be refunded.*--yes/,
    );
    expect(await json('merchant-accounts', 'enable', 'water', '--by', 'Dana')).toMatchObject({ status: 'active' });
    expect(await running.client.created(paymentOf(portalId, { number: CARD }))).toMatchObject({ status: 'succeeded' });
  });

  test('stops new charges while the processor refuses its lists, also if only another process was refused', async () => {
    const { portalId } = (
      await running.inForce(running.admin.createPortal({ accountIds: [running.accountId], name: 'Blind', gateway: 'none', fee: NO_FEE }))
    ).state;
    await running.inForce(running.admin.setGateway(portalId, { gateway: 'authorize-net', principal: 'water', fee: 'water' }));
    const limit = { attempts: 50, declines: null, windowSeconds: 3_600, blockSeconds: null };
    await running.inForce(running.admin.setLimits(portalId, 'card', limit));
    const { pool, store } = running.services;
    const counted = async () => (await pool.query('select 1 from velocity_entry where portal_id = $1', [portalId])).rowCount;
    const paid = await running.client.created(paymentOf(portalId, { number: CARD }));
    expect(await counted()).toBe(1);

    net.vendor.setFault({ name: 'details_api_off', op: '*', ref: null, times: null, ms: 0, code: 2, reason: 2 });
    // This command is a process of its own. The service has not asked for a list.
    expect((await payfold(['settlement', 'sync', '--merchant-account', 'water'])).code).toBe(1);
    const key = 'blind-create-1';
    await eventually(() => running.log.some((line) => line.includes('No new charges')));
    const [charges, head] = [net.calls.charge, await store.head()];
    const refused = await running.client.create(paymentOf(portalId, { number: CARD }), { key });
    expect([refused.status, refused.code, refused.details]).toEqual([503, 'GATEWAY_NOT_CONFIGURED', { code: 'GATEWAY_NOT_CONFIGURED' }]);
    expect([await counted(), await store.head(), net.calls.charge]).toEqual([1, head, charges]);
    // Earlier charges can still be given back.
    expect((await running.client.void(paid.id)).status).toBe(200);
    const stopped = createMetrics(running.services).shared.getSingleMetric('payfold_gateway_charges_stopped')!;
    expect((await stopped.get()).values).toEqual([{ labels: { gateway: 'authorize-net', account: 'water' }, value: 1 }]);

    net.vendor.heal('details_api_off');
    // So does a process that asks again after 30 s and is answered.
    await pool.query('delete from gateway_charge_stop');
    await eventually(async () => (await running.client.create(paymentOf(portalId, { number: CARD }), { key })).status === 200);
    expect((await stopped.get()).values).toEqual([]);
  });

  test('keeps hosted checkout away from a gateway that takes no card numbers', async () => {
    const { portalId } = (
      await running.inForce(running.admin.createPortal({ accountIds: [running.accountId], name: 'Fines', gateway: 'none', fee: combined }))
    ).state;
    await running.inForce(running.admin.configureCheckout(portalId, { enabled: true, allow: [SHOP] }));
    const set = ['portals', 'set-gateway', portalId, '--gateway', 'stripe', '--principal', 'fines'];
    expect(await refused(1, set)).toMatch(/^Hosted checkout takes card numbers/);
    expect(await json(...set, '--disable-checkout')).toMatchObject({ gateway: 'stripe', checkout: { enabled: false } });
    expect(await refused(1, ['portals', 'checkout', portalId, '--enable'])).toMatch(/gateway stripe takes none/);
    const paid = await running.client.created(paymentOf(portalId, { paymentMethod: { type: 'card_token', token: 'pm_card_visa' } }));
    expect(paid).toMatchObject({ status: 'succeeded', paymentMethod: { type: 'card_token', brand: 'visa', last4: '4242' } });
    expect((await running.client.refund(paid.id)).status).toBe(200);

    // Even a portal that an older release had set up so takes no card number: its intake answers as switched off.
    const intake = (portal: string) =>
      new Payer(running.url, 'https://pay.example').send(INTAKE, {
        method: 'POST',
        body: formText(intakeOf({ portalId: portal })),
        headers: { origin: SHOP },
      });
    const { state } = await running.inForce(running.admin.configureCheckout(portalId, { locale: 'es' }));
    expect((await intake(portalId)).text).toMatch(OFF);
    const { store, ids, clock, readModels } = running.services;
    const meta = { recordedAt: timestamp(clock.now()), actor: { type: 'operator', id: 'spec' }, correlationId: ids.uuid() } as const;
    const data = { portalId, checkout: { ...state.checkout, enabled: true } };
    const { revision } = await load(store, PORTAL_STREAM, portalId);
    await store.append(`portal-${portalId}`, revision!, [portalEvents.write({ type: 'PortalCheckoutConfigured', data }, ids.uuid(), meta)]);
    await readModels.of(directoryModel).runUntil((await store.head())!, { timeoutMs: 10_000 });
    expect((await running.services.directory.portal(portalId))?.checkout.enabled).toBe(true);
    expect((await intake(portalId)).text).toMatch(OFF);
    // With a gateway that takes card numbers, the same request comes further.
    await running.inForce(running.admin.setGateway(portalId, { gateway: 'authorize-net', principal: 'water', fee: 'water' }));
    expect((await intake(portalId)).text).not.toMatch(OFF);
  });

  test('passes the public address of a payer of hosted checkout on to the processor, and keeps it nowhere', async () => {
    const { portalId } = (
      await running.inForce(running.admin.createPortal({ accountIds: [running.accountId], name: 'Pay', gateway: 'none', fee: NO_FEE }))
    ).state;
    await running.inForce(running.admin.setGateway(portalId, { gateway: 'authorize-net', principal: 'water', fee: 'water' }));
    await running.inForce(running.admin.configureCheckout(portalId, { enabled: true, allow: [`${SHOP}/pay`], agencyName: 'Town' }));
    const passedOn = async (address: string | null, amountCents: number) => {
      const payer = new Payer(running.url, 'https://pay.example', address);
      const lines = JSON.stringify([{ amount_cents: amountCents, reference_id: 'W-1' }]);
      const id = await payer.begin(intakeOf({ portalId }, { amount_cents: String(amountCents), line_items: lines }));
      expect((await payer.pay(id, { card_number: CARD })).location).toBe(`/checkout/${id}/receipt`);
      return net.vendor.all('login-one').find((one) => one.amountCents === amountCents)!.customerIp;
    };
    const address = '198.51.100.77';
    expect(await passedOn(address, 7_001)).toBe(address);
    // As behind a proxy that nobody counts. A filter would take all payers for one.
    expect(await passedOn('10.1.2.3', 7_002)).toBeUndefined();
    expect(await passedOn(null, 7_003)).toBeUndefined();
    // A payment over the API has no payer's address.
    await running.client.created(paymentOf(portalId, { number: CARD, lines: [7_004] }));
    expect(net.vendor.all('login-one').find((one) => one.amountCents === 7_004)!.customerIp).toBeUndefined();

    expect(running.log.join('')).not.toContain(address);
    const { rows } = await running.services.pool.query<{ name: string }>(
      `select format('%I.%I', table_schema, table_name) as name from information_schema.tables
       where table_schema not in ('pg_catalog', 'information_schema') and table_type = 'BASE TABLE'`,
    );
    expect(rows.map(({ name }) => name)).toContain('es.events');
    for (const { name } of rows)
      expect([name, (await running.services.pool.query(`select 1 from ${name} t where t::text like '%${address}%'`)).rowCount]).toEqual([name, 0]);
  });

  test.each([
    ['executed', 'cut_after', 1],
    ['not executed', 'http_500_before', 0],
  ] as const)('a refund whose answer was lost is not sent again if the processor would make it twice: %s', async (_, lost, made) => {
    const { portalId } = (
      await running.inForce(running.admin.createPortal({ accountIds: [running.accountId], name: 'Refunds', gateway: 'none', fee: NO_FEE }))
    ).state;
    await running.inForce(running.admin.setGateway(portalId, { gateway: 'authorize-net', principal: 'water', fee: 'water' }));
    const { id } = await running.client.created(paymentOf(portalId, { number: CARD }));
    net.vendor.closeNow('login-one');
    await eventually(async () => {
      await recordSettlements(running.services.settlement, AbortSignal.timeout(20_000), { merchantAccount: 'water' });
      return (await running.client.find(id)).data.settlement?.status === 'settled';
    });
    const before = net.calls.refund ?? 0;
    const atVendor = () => net.vendor.all('login-one').filter((one) => one.type === 'refundTransaction' && one.amountCents === 4_000).length;
    const others = atVendor();
    const fault = { op: 'refund', ref: null, ms: 0, code: 2, reason: 2 } as const;
    net.vendor.setFault({ ...fault, name: 'refunds_repeat', times: null });
    net.vendor.setFault({ ...fault, name: lost, times: 1 });
    const refund = () => running.client.refund(id, { amountCents: 4_000 }, { key: `refund-${lost}` });
    expect((await refund()).status).toBe(504);
    // The partner sends it again: the refund is looked for in the lists. A minute later, recovery does the same.
    expect((await refund()).status === 200).toBe(made === 1);
    running.clock.advance(61_000);
    const tried = async () =>
      (await running.services.pool.query<{ outcome: string }>('select outcome from recovery_try where payment_id = $1', [id])).rows;
    const refunded = async () => (await running.client.find(id)).data.refundedAmountCents;
    await eventually(async () => (made === 1 ? (await refunded()) === 4_000 : (await tried())[0]?.outcome === 'open'));
    await refund();
    expect([net.calls.refund, atVendor() - others, await refunded()]).toEqual([before + 1, made, made === 1 ? 4_000 : 0]);
    net.vendor.heal('refunds_repeat');
  });

  test('rotates credentials of the same account only, and changes settings', async () => {
    const other = '{"apiLoginId":"login-two","transactionKey":"key-of-two-0001"}';
    expect(await refused(1, ['merchant-accounts', 'rotate', 'water', '--credentials-file', '-'], other)).toBe(
      'The credentials belong to another account: 700002, not 700001.',
    );
    expect(await json('merchant-accounts', 'rotate', 'water', '--credentials-file', file)).toMatchObject({ externalId: '700001' });
    expect(await json('merchant-accounts', 'set', 'water', '--cut-off', '17:30')).toMatchObject({
      settings: { cutOff: { time: '17:30', timeZone: 'America/Los_Angeles' } },
    });
    expect(await json('merchant-accounts', 'set', 'water', '--cut-off', 'none', '--name', 'Water')).toMatchObject({
      name: 'Water',
      settings: { cutOff: null },
    });
    expect(await refused(2, ['merchant-accounts', 'set', 'water'])).toMatch(/at least one setting/);
    expect(await refused(2, ['merchant-accounts', 'show', 'No_Id'])).toMatch(/lower-case/);
  });
});

test('in production: no simulator, 503 without an account, then add, set-gateway, create, settle, refund, fund, dispute, verify', async () => {
  const endpoints = { 'authorize-net': net.endpoint };
  const running = await startIn({ folder, stops }, 'production', endpoints);
  const { services, client, admin, inForce, accountId, log } = running;
  expect(log.filter((line) => line.includes('there is no merchant account'))).toHaveLength(1);
  const { portalId } = (await inForce(admin.createPortal({ accountIds: [accountId], name: 'Water', gateway: 'simulator', fee: NO_FEE }))).state;
  const none = await client.create(paymentOf(portalId, { number: CARD }));
  expect([none.status, none.code]).toEqual([503, 'GATEWAY_NOT_CONFIGURED']);

  const credentials = readCredentials('authorize-net', 'production', '{"apiLoginId":"login-two","transactionKey":"key-of-two-0001"}');
  const account = {
    merchantAccount: 'water',
    gateway: 'authorize-net',
    environment: 'production',
    settings: { cutOff: null, endpoint: null },
  } as const;
  const { externalId, name } = await askVendor({ ...account, repeats: null }, credentials, { clock: systemClock, endpoints });
  await admin.addMerchantAccount({ ...account, name }, externalId, credentials, await services.directory.merchantAccounts());
  await inForce(admin.setGateway(portalId, { gateway: 'authorize-net', principal: 'water', fee: 'water' }));
  const paid = await client.created(paymentOf(portalId, { number: CARD }));
  expect(paid.status).toBe('succeeded');
  const { own } = createMetrics(services);
  for (const name of ['payfold_gateway_refused_credentials_total', 'payfold_gateway_held_total'])
    expect((await own.getSingleMetric(name)!.get()).values).toEqual([{ labels: { gateway: 'authorize-net', account: 'water' }, value: 0 }]);

  // The batch closes and settles at the processor, and the service records it.
  net.vendor.closeNow('login-two');
  await eventually(async () => {
    await recordSettlements(services.settlement, AbortSignal.timeout(10_000));
    return (await client.find(paid.id)).data.settlement?.status === 'settled';
  });
  const refund = await client.refund(paid.id, { amountCents: 4_000 });
  expect([refund.status, refund.data]).toEqual([200, expect.objectContaining({ amountCents: 4_000 })]);

  const payfold = (...args: string[]) => payfoldOn(running, [...args, '--yes']);
  const simulated = await payfold('portals', 'set-gateway', portalId, '--gateway', 'simulator');
  expect([simulated.code, simulated.stdout]).toEqual([2, expect.stringContaining('production has no simulator')]);
  expect((await payfold('portals', 'create', '--account', accountId, '--name', 'None')).stdout).toContain('production has no simulator');

  // The refund is in the next batch. Both are matched to the cent, and staff say when the bank got the money.
  net.vendor.closeNow('login-two');
  interface Batch {
    readonly batchId: string;
    readonly netCents: number;
    readonly closedOn: string;
  }
  const batches = async () =>
    (
      await services.pool.query<Batch>(
        `select batch_id as "batchId", net_cents::int as "netCents", to_char(closed_at, 'YYYY-MM-DD') as "closedOn" from settlement_batch where merchant_account = 'water' order by net_cents desc`,
      )
    ).rows;
  await eventually(async () => {
    await recordSettlements(services.settlement, AbortSignal.timeout(10_000));
    return (await batches()).length === 2;
  });
  expect((await batches()).map(({ netCents }) => netCents)).toEqual([paid.totalChargedCents, -4_000]);
  const exceptions = await payfold('settlement', 'exceptions');
  expect([exceptions.code, JSON.parse(exceptions.stdout)]).toEqual([0, []]);
  for (const { batchId, closedOn } of await batches()) {
    const funded = await payfold('settlement', 'fund', '--merchant-account', 'water', '--batch', batchId, '--on', closedOn, '--reference', 'statement 7', '--by', 'Dana'); // prettier-ignore
    expect(funded).toMatchObject({ code: 0 });
  }
  const funded = await booksOf(services);
  expect([funded(/^assets:bank/), funded(/:in_transit$/), funded(/suspense/)]).toEqual([paid.totalChargedCents - 4_000, 0, 0]);

  const today = new Date().toISOString().slice(0, 10);
  const day = ['--opened-on', today, '--due-date', today];
  const what = ['--amount-cents', '1000', '--status', 'debited', '--stage', 'chargeback', '--reason-code', '10.4', '--reason', 'fraud'];
  const disputed = await payfold('disputes', 'open', '--payment', paid.id, ...what, ...day, '--by', 'Dana');
  expect([disputed.code, JSON.parse(disputed.stdout)]).toMatchObject([0, { status: 'debited' }]);
  expect((await booksOf(services))(/:in_transit$/)).toBe(-1_000);
  for (const check of ['verify', 'drift']) expect(await payfold('audit', check)).toMatchObject({ code: 0 });
  expect(log.join('')).not.toMatch(/key-of-two|4111/);
});

describe('the feeds of Stripe', () => {
  const SECRET = 'sk_test_double_one_0001';
  let running: Running;
  let portalId: string;
  let vendor: StripeControl;
  /** A sale that somebody made at Stripe without us. */
  const foreignSale = async (): Promise<string> => {
    const post = async (path: string, body: Record<string, string>) => {
      const headers = { authorization: `Bearer ${SECRET}` };
      const answer = await fetch(`${stripe.url}/v1/payment_intents${path}`, { method: 'POST', headers, body: new URLSearchParams(body) });
      return (await answer.json()) as { id: string; status: string };
    };
    const { id } = await post('', { amount: '3000', currency: 'usd', 'allowed_payment_method_types[0]': 'card' });
    expect(await post(`/${id}/confirm`, { payment_method: 'pm_card_visa' })).toMatchObject({ status: 'succeeded' });
    return id;
  };
  const payfold = (...args: string[]) => payfoldOn(running, [...args, '--yes']);
  beforeAll(async () => {
    running = await startIn({ folder, stops }, 'sandbox', { stripe: stripe.url });
    vendor = controlOf(stripe.url);
    const { admin, inForce, accountId, services } = running;
    const account = {
      merchantAccount: 'cards',
      gateway: 'stripe',
      environment: 'sandbox',
      settings: { cutOff: null, endpoint: stripe.url },
    } as const;
    const credentials = readCredentials('stripe', 'sandbox', JSON.stringify({ secretKey: SECRET }));
    const { externalId, name } = await askVendor({ ...account, repeats: null }, credentials, {
      clock: systemClock,
      endpoints: { stripe: stripe.url },
    });
    await admin.addMerchantAccount({ ...account, name }, externalId, credentials, await services.directory.merchantAccounts());
    ({ portalId } = (await inForce(admin.createPortal({ accountIds: [accountId], name: 'Cards', gateway: 'none', fee: combined }))).state);
    await inForce(admin.setGateway(portalId, { gateway: 'stripe', principal: 'cards', fee: 'cards' }));
  });
  const paid = () => running.client.created(paymentOf(portalId, { paymentMethod: { type: 'card_token', token: 'pm_card_visa' } }));
  const disputesOf = async (paymentId: string) => {
    const { payment } = await running.services.payments.ports.streams.load(paymentId);
    return payment.phase === 'charged' ? payment.disputes : [];
  };
  const intentOf = async (paymentId: string): Promise<string> => {
    const { payment } = await running.services.payments.ports.streams.load(paymentId);
    if (payment.phase !== 'charged') throw new Error(`the payment is ${payment.phase}`);
    return payment.legs[0]!.transactionId;
  };

  test('a dispute opens at its payment and moves with the processor; read again, it changes nothing', async () => {
    const { id } = await paid();
    const dispute = await vendor.dispute(await intentOf(id));
    const sync = () => recordDisputes(running.services.settlement, AbortSignal.timeout(20_000));
    expect(await sync()).toBe(1);
    expect(await disputesOf(id)).toMatchObject([{ status: 'debited', stage: 'needs_response', disputedAmountCents: 10_050, leg: 'combined', source: { gateway: 'stripe', merchantAccount: 'cards', externalId: dispute.id } }]); // prettier-ignore
    await vendor.changeDispute(dispute.id, { status: 'under_review' });
    await sync();
    await sync();
    expect(await disputesOf(id)).toMatchObject([{ status: 'in_dispute', stage: 'under_review' }]);
    await vendor.changeDispute(dispute.id, { status: 'won' });
    await sync();
    expect(await disputesOf(id)).toMatchObject([{ status: 'recovered', stage: 'won' }]);
    expect(await running.services.settlement.feeds.openDisputes({ gateway: 'stripe', merchantAccount: 'cards', credentialsRef: '', environment: 'sandbox' })).toEqual([]); // prettier-ignore
    const events = [];
    for await (const event of running.services.store.read(`payment-${id}`)) if (event.type === 'PaymentDisputed') events.push(event);
    expect(events).toHaveLength(3);
  });

  test('a dispute of a sale that is not ours becomes a task, and a person ends it', async () => {
    const dispute = await vendor.dispute(await foreignSale());
    const { code, stdout } = await payfold('disputes', 'sync', '--merchant-account', 'cards');
    expect([code, JSON.parse(stdout)]).toEqual([0, { listed: 1, feeds: [expect.objectContaining({ feed: 'disputes', error: null })] }]);
    const tasks = async () => JSON.parse((await payfold('payments', 'tasks')).stdout) as { paymentId: string; reason: string; status: string; evidence: object }[]; // prettier-ignore
    const [task, ...others] = await tasks();
    expect(others).toEqual([]);
    expect(task).toMatchObject({ reason: 'gateway_dispute_unmatched', status: 'none', evidence: { dispute: dispute.id, amountCents: 3_000 } });
    await payfold('disputes', 'sync');
    expect(await tasks()).toHaveLength(1);
    const done = await payfold(
      'payments',
      'acknowledge',
      task!.paymentId,
      '--task',
      'gateway_dispute_unmatched',
      '--reason',
      'not ours',
      '--by',
      'Dana',
    );
    expect(done.code).toBe(0);
    await payfold('disputes', 'sync');
    expect(await tasks()).toEqual([]);
  });

  test('a payout settles its payments; a place that cannot be read loses nothing and records nothing twice', async () => {
    const { id } = await paid();
    const payout = await vendor.payOut();
    const { code, stdout } = await payfold('settlement', 'sync');
    expect(code).toBe(0);
    const { feeds } = JSON.parse(stdout) as { feeds: { feed: string; error: string | null }[] };
    expect(feeds.map(({ feed, error }) => [feed, error])).toEqual([['settlement', null]]);
    // The worker may read the payout at the same time.
    await eventually(async () => (await running.client.find(id)).data.settlement?.status === 'settled');
    // The lines without a payment become exceptions: the foreign sale, its dispute, the other dispute, and sales of earlier tests.
    let head = null as string | null;
    await eventually(async () => {
      head = await running.services.store.head();
      await running.services.settlement.register.caughtUp();
      await recordSettlements(running.services.settlement, AbortSignal.timeout(10_000));
      const exceptions = JSON.parse((await payfold('settlement', 'exceptions')).stdout) as readonly object[];
      return exceptions.length >= 3 && (await running.services.store.head()) === head;
    });
    await running.services.pool.query(`update gateway_feed set cursor = 'no place' where feed = 'settlement'`);
    expect((await payfold('settlement', 'sync')).code).toBe(0);
    expect(await running.services.store.head()).toBe(head);
    // Stripe names the day, so nobody may name another one.
    const fund = ['settlement', 'fund', '--merchant-account', 'cards', '--batch', payout!.id];
    const refused = await payfold(...fund, '--on', '2026-01-02', '--reference', 'statement', '--by', 'Dana');
    expect([refused.code, refused.stdout]).toEqual([1, expect.stringMatching(/its day of funding is \d{4}-\d{2}-\d{2} already/)]);
    expect((await payfold(...fund, '--by', 'Dana')).code).toBe(2);
    const shown = JSON.parse((await payfold('merchant-accounts', 'show', 'cards')).stdout) as { feeds: { feed: string; lastOkAt: string }[] };
    expect(shown.feeds.map(({ feed, lastOkAt }) => [feed, typeof lastOkAt])).toEqual([
      ['disputes', 'string'],
      ['settlement', 'string'],
    ]);
  });

  test('a processor that cannot be asked is named, and the feed is read later', async () => {
    await vendor.fault('http_503', { op: 'payouts', times: null });
    const { code, stdout } = await payfold('settlement', 'sync');
    expect([code, JSON.parse(stdout)]).toMatchObject([1, { feeds: [{ error: 'the processor cannot be asked now' }] }]);
    await vendor.heal();
    expect((await payfold('settlement', 'sync')).code).toBe(0);
  });
});

describe('the check of guarantees', () => {
  const NAMES = Array.from({ length: 13 }, (_, index) => `g${index + 1}`);
  let running: Running;
  interface Checked {
    readonly runId: string;
    readonly guarantees: readonly { readonly guarantee: string; readonly result: string; readonly detail: string }[];
    readonly calls: Readonly<Record<string, readonly { readonly call: string; readonly answer: string }[]>>;
  }
  const payfold = (args: readonly string[], input = '') => payfoldOn(running, [...args, '--yes'], input);
  const check = async (...args: string[]): Promise<{ code: number; checked: Checked }> => {
    const { code, stdout } = await payfold(['merchant-accounts', 'check', ...args]);
    return { code, checked: JSON.parse(stdout) as Checked };
  };
  const resultsOf = ({ guarantees }: Checked): Record<string, string> =>
    Object.fromEntries(guarantees.map(({ guarantee, result }) => [guarantee, result]));
  const all = (result: string, others: Record<string, string> = {}) => Object.fromEntries(NAMES.map((name) => [name, others[name] ?? result]));
  beforeAll(async () => {
    running = await startIn({ folder, stops }, 'sandbox', { 'authorize-net': net.endpoint, stripe: stripe.url });
    await addMerchantAccount(running, 'net', 'authorize-net', net.endpoint, '{"apiLoginId":"login-one","transactionKey":"key-of-one-0001"}');
    await addMerchantAccount(running, 'cards', 'stripe', stripe.url, '{"secretKey":"sk_test_double_two_0001"}');
  });

  test('stripe: all but the lines of the batch at once, and these after it', async () => {
    const { code, checked } = await check('cards');
    expect([code, resultsOf(checked)]).toEqual([0, all('holds', { g9: 'not_applicable', g10: 'not_applicable', g13: 'later' })]);
    await controlOf(stripe.url, 'acct_3Doubletwo').payOut();
    expect((await check('cards', '--quick')).code).toBe(0);
    const again = await check('cards', '--resume', checked.runId);
    expect([again.code, resultsOf(again.checked)]).toEqual([0, all('holds', { g9: 'not_applicable', g10: 'not_applicable' })]);
    const shown = JSON.parse((await payfold(['merchant-accounts', 'show', 'cards'])).stdout) as { lastCheck: Checked };
    expect(shown.lastCheck).toEqual({ runId: checked.runId, guarantees: again.checked.guarantees });
  }, 120_000);

  test('authorize-net: what needs the batch holds after it', async () => {
    const { code, checked } = await check('net');
    expect([code, resultsOf(checked)]).toEqual([0, all('holds', { g7: 'later', g8: 'later', g10: 'later', g11: 'later', g13: 'later' })]);
    net.vendor.closeNow('login-one');
    const again = await check('net', '--resume', checked.runId);
    // It can tell only two days later that a charge never arrived: no cut-off is known.
    expect([again.code, resultsOf(again.checked)]).toEqual([0, all('holds', { g7: 'later' })]);
  }, 180_000);

  test('a broken guarantee is named with the calls that were made, without credentials and cards', async () => {
    await controlOf(stripe.url).fault('other_ref', { op: 'refund', times: null });
    const { code, checked } = await check('cards');
    await controlOf(stripe.url).heal();
    expect(code).toBe(1);
    const broken = checked.guarantees.filter(({ result }) => result === 'broken').map(({ guarantee }) => guarantee);
    expect(broken).toContain('g8');
    expect(Object.keys(checked.calls)).toEqual(broken);
    expect(checked.calls.g8!.map(({ call }) => call.split(' ')[0])).toContain('refund');
    expect(JSON.stringify(checked)).not.toMatch(/sk_test|pm_card/);
  }, 120_000);

  test('a quick check only reads', async () => {
    const before = net.vendor.all('login-one').length;
    const { code, checked } = await check('net', '--quick');
    expect([code, resultsOf(checked)]).toEqual([0, { g1: 'holds' }]);
    expect(net.vendor.all('login-one')).toHaveLength(before);
  });

  test.each([
    ['America/New_York', 'broken'],
    // The same time of day under another name.
    ['US/Pacific', 'holds'],
  ])('a cut-off in the time zone %s, of an account in America/Los_Angeles: %s', async (zone, result) => {
    await payfold(['merchant-accounts', 'set', 'net', '--cut-off', '16:00', '--time-zone', zone]);
    const { code, checked } = await check('net', '--quick');
    await payfold(['merchant-accounts', 'set', 'net', '--cut-off', 'none']);
    expect([code, resultsOf(checked)]).toEqual([result === 'holds' ? 0 : 1, { g1: result }]);
    if (result === 'broken')
      expect(checked.guarantees[0]!.detail).toBe(
        'The time zone of the account is America/Los_Angeles at the processor, and --time-zone of its cut-off is America/New_York.',
      );
  });

  test('clocks that differ by ten minutes break g1', async () => {
    net.vendor.setFault({ name: 'clock_wrong', op: '*', ref: null, times: null, ms: 600_000, code: 2, reason: 2 });
    await controlOf(stripe.url).fault('clock_wrong', { ms: 600_000, times: null });
    for (const id of ['net', 'cards']) {
      const { code, checked } = await check(id, '--quick');
      expect([code, checked.guarantees]).toEqual([1, [expect.objectContaining({ guarantee: 'g1', detail: expect.stringContaining('clock') })]]);
    }
    net.vendor.heal('clock_wrong');
    await controlOf(stripe.url).heal();
  });

  test.each([
    [['net', '--quick', '--token', 'pm_card_visa'], 2],
    [['net', '--token', 'pm_card_visa'], 2],
    [['cards', '--card-file', '-'], 2],
    [['cards', '--amount-cents', '100'], 2],
    [['cards', '--token', '4111111111111111'], 2],
    [['cards', '--resume', '01a21807-d7dd-777d-a43b-b07fdf0204ae'], 1],
    [['nobody'], 1],
  ] as const)('refuses %j', async (args, code) => {
    expect((await payfold(['merchant-accounts', 'check', ...args])).code).toBe(code);
  });
});
