/**
 * While events are lost, nothing is charged, and no answer states an outcome that is not known (C76). The test opens the incident from outside of the
 * service.
 */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { closeIncident, StoreIncident } from '#eventstore';
import { CARD_FORM, checkoutPortal, formOf, intakeOf, Payer, type Portal, textOf } from '../support/checkout.js';
import { eventually } from '../support/eventually.js';
import { card, CARD, type Client, PARTNER, paymentOf, type Service, startService, type TestAccount } from '../support/service.js';

let service: Service;
let partner: TestAccount;
let client: Client;
let portalId: string;
let checkout: Portal;
let otherClient: Client;
beforeAll(async () => {
  service = await startService({ instances: 2 });
  partner = await service.account();
  client = partner.client;
  otherClient = (await service.account('Other')).client;
  portalId = await service.portal(partner);
  checkout = await checkoutPortal(service, partner);
});
afterAll(() => service.stop());

const NOTICED_MS = 3_000;
const incident = () => service.services.ownLog.incident;
const openIncident = async () => {
  await service.services.pool.query(
    `insert into store_incident (kind, message, found_by) values ('lost_events', 'it does not hold an event', 'another process')`,
  );
  await eventually(() => incident() !== null, { timeoutMs: NOTICED_MS });
};
const close = async () => {
  await closeIncident(service.services.pool, [], { by: 'Dana', reason: 'spec' });
  await eventually(() => incident() === null);
};
const charges = async () => (await service.simulator.truth()).length;
const UNAVAILABLE = [503, 'IDEMPOTENCY_UNAVAILABLE', '60'];
const shown = ({ status, code, headers }: { status: number; code: unknown; headers: Readonly<Record<string, string | undefined>> }) => [
  status,
  code,
  headers['retry-after'],
];

describe('an open incident', () => {
  let paid: Awaited<ReturnType<Client['create']>>;
  let before: number;
  beforeAll(async () => {
    paid = await client.create(paymentOf(portalId), { key: 'paid-before' });
    await eventually(async () => (await client.list()).data.payments.length === 1);
    before = await charges();
    await openIncident();
  });
  afterAll(close);

  test('POST payments answers 503 with Retry-After 60, with and without a key', async () => {
    expect(shown(await client.create(paymentOf(portalId), { key: 'new' }))).toEqual(UNAVAILABLE);
    expect(shown(await client.create(paymentOf(portalId)))).toEqual(UNAVAILABLE);
    expect(await charges()).toBe(before);
  });

  test('a stored answer is replayed byte for byte; another body is a mismatch; nothing is claimed', async () => {
    const replay = await client.create(paymentOf(portalId), { key: 'paid-before' });
    expect([replay.status, replay.text, replay.headers['idempotent-replayed']]).toEqual([200, paid.text, 'true']);
    expect((await client.create(paymentOf(portalId, { paymentMethod: card(CARD.declined) }), { key: 'paid-before' })).code).toBe(
      'IDEMPOTENCY_MISMATCH',
    );
    const { rows } = await service.services.pool.query<{ count: string }>('select count(*) as count from idempotency_key');
    expect(rows[0]!.count).toBe('1');
  });

  test('refund and void answer 503', async () => {
    expect(shown(await client.refund(paid.data.id, {}, { key: 'refund' }))).toEqual(UNAVAILABLE);
    expect(shown(await client.void(paid.data.id, {}))).toEqual(UNAVAILABLE);
    expect(await charges()).toBe(before);
  });

  test('GET shows the payment; one that may be lost is 503, never 404; so is the payment of another account', async () => {
    expect((await client.find(paid.data.id)).data).toEqual(paid.data);
    const other = await otherClient.find(paid.data.id);
    expect(shown(other)).toEqual(UNAVAILABLE);
    expect(shown(await client.find('018f0000-0000-7000-8000-00000000dead'))).toEqual(UNAVAILABLE);
  });

  test('lists, quotes and refusals of a body go on; the lag of a list is unknown', async () => {
    const list = await client.list();
    expect([list.status, list.data.payments.length, list.headers['ledger-lag']]).toEqual([200, 1, 'unknown']);
    expect((await client.get(`${PARTNER}/fees/quote?portalId=${portalId}&amountCents=100`)).status).toBe(200);
    expect((await client.create({})).status).toBe(400);
  });

  test('the process stays ready and says that an incident is open', async () => {
    const ready = await fetch(`${service.urls[0]}/readyz`);
    expect([ready.status, await ready.json()]).toEqual([200, expect.objectContaining({ ok: true, storeIncident: true })]);
  });

  test('the payer gets a page without a card form, and the submit says that nothing was charged', async () => {
    const payer = new Payer(service.urls[0]!);
    const reply = await payer.intake(intakeOf(checkout));
    expect([reply.status, textOf(reply.text)]).toEqual([503, expect.stringContaining('Nothing was charged by this attempt')]);
    expect(reply.text).not.toContain('card_number');
  });

  test('nothing of the log can be changed', async () => {
    await expect(service.admin.createAccount('Late')).rejects.toThrow(StoreIncident);
  });
});

describe('a payer who opened the form before the incident', () => {
  test('is told that nothing was charged, and can pay when it is over', async () => {
    const payer = new Payer(service.urls[0]!);
    const id = await payer.begin(intakeOf(checkout));
    const page = await payer.open(`/checkout/${id}`);
    const form = page.text;
    const before = await charges();
    await openIncident();
    expect((await payer.send(`/checkout/${id}`)).status).toBe(503);
    const submitted = await payer.submit(id, { ...formOf(form), ...CARD_FORM });
    expect([submitted.status, submitted.headers['retry-after'], textOf(submitted.text)]).toEqual([
      503,
      '60',
      expect.stringContaining('Nothing was charged'),
    ]);
    expect(submitted.text).not.toContain('card_number');
    expect(await charges()).toBe(before);
    await close();
    await payer.pay(id);
    expect((await payer.open(`/checkout/${id}`)).path).toContain('/receipt');
  });
});

test('when the incident is closed, payments go on', async () => {
  expect((await client.create(paymentOf(portalId), { key: 'new' })).status).toBe(200);
});
