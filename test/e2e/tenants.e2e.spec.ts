/**
 * One account cannot take the time of the others (C65). Each flood is played over HTTP against the whole service. The specs look at the order of the
 * answers and not at times, because `npm run bench -- tenants` measures the times.
 */
import { Agent, request } from 'node:http';
import { connect } from 'node:net';
import { afterAll, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { Deadline, type Lane, systemClock } from '#kernel';
import { REQUEST_DEADLINE_MS } from '#payments';
import { type Slot, Slots } from '#platform';
import { SERVICE_SLOTS } from '../../apps/api/slots.js';
import { CARD_FORM, checkoutPortal, formOf, intakeOf, Payer, type Portal, textOf } from '../support/checkout.js';
import { eventually } from '../support/eventually.js';
import { CARD, PAYMENTS, paymentOf, type Service, startService, type TestAccount } from '../support/service.js';

/** Longer than any spec. */
const WAIT_MS = 600_000;
let service: Service;
let flood: TestAccount;
let other: TestAccount;
let portal: Portal;
let otherPortalId: string;
/** The slots of the API. */
let slots: Slots;
/** The slots at the gateway, as soon as one was used. */
let gateway: Slots;
beforeAll(async () => {
  // The slots that a spec holds must not be taken away.
  slots = new Slots(systemClock, { ...SERVICE_SLOTS, leaseMs: WAIT_MS });
  service = await startService({ slots });
  service.services.payments.ports.slots.watch((watched, share) => share === 'partners' && (gateway = watched));
  [flood, other] = [await service.account('Flood'), await service.account('Other')];
  portal = await checkoutPortal(service, flood);
  otherPortalId = await service.portal(other);
  await other.client.created(paymentOf(otherPortalId));
});
afterAll(() => service.stop());

interface Asked {
  readonly method: 'GET' | 'POST';
  readonly path: string;
  readonly body?: object;
}
/** Sends a request over a kept connection. Resolves to the status. */
const ask = (agent: Agent, { apiKey }: TestAccount, { method, path, body }: Asked): Promise<number> =>
  new Promise((resolve, reject) => {
    const headers = { authorization: `ApiKey ${apiKey}`, ...(body && { 'content-type': 'application/json' }) };
    const sent = request(new URL(path, service.urls[0]), { agent, method, headers }, (answer) => {
      answer.resume().on('end', () => resolve(answer.statusCode!));
    });
    sent.on('error', reject).end(body && JSON.stringify(body));
  });
/**
 * Sends `count` requests of the flooding account at once, and when they are `ready` one request of the other account. All connections are open before,
 * because Node accepts only one new connection in each turn of its event loop. `before`: how many of the flood were answered before the other request.
 */
const flooded = async (count: number, asked: Asked, ready: () => Promise<unknown>, one: Asked) => {
  const [agent, own] = [new Agent({ keepAlive: true, maxFreeSockets: count }), new Agent({ keepAlive: true })];
  try {
    const health: Asked = { method: 'GET', path: '/healthz' };
    await Promise.all([ask(own, other, health), ...Array.from({ length: count }, () => ask(agent, flood, health))]);
    let answered = 0;
    const answers = Array.from({ length: count }, () => ask(agent, flood, asked).finally(() => (answered += 1)));
    await ready();
    const status = await ask(own, other, one);
    const before = answered;
    return { status, before, statuses: await Promise.all(answers) };
  } finally {
    agent.destroy();
    own.destroy();
  }
};
/** On a busy machine, some requests of the flood wait for too long and are refused. */
const isServed = (statuses: readonly number[]) => {
  const refused = statuses.filter((one) => one !== 200);
  expect(new Set(refused)).toEqual(new Set(refused.length === 0 ? [] : [429]));
  expect(refused.length).toBeLessThan(statuses.length / 2);
};
const nothing = async () => undefined;
const create = (portalId: string, number?: string): Asked => ({
  method: 'POST',
  path: PAYMENTS,
  body: paymentOf(portalId, number === undefined ? {} : { number }),
});
const LIST: Asked = { method: 'GET', path: `${PAYMENTS}?limit=100` };

describe('a flood of one account', () => {
  test('400 creates with a card that takes 5 s: the create of another account does not wait for them', async () => {
    const queued = () => eventually(() => gateway.waiting('partner') > 100);
    const { status, before, statuses } = await flooded(400, create(portal.portalId, CARD.slow), queued, create(otherPortalId));
    expect(status).toBe(200);
    expect(before).toBeLessThan(200);
    // The flood is served as before. On a busy machine, some requests are refused and have begun nothing, and some outcomes come too late.
    const count = (status: number) => statuses.filter((one) => one === status).length;
    const [made, refused, late] = [count(200), count(429), count(504)];
    expect(made).toBeGreaterThan(200);
    expect(statuses.filter((one) => ![200, 429, 504].includes(one))).toEqual([]);
    expect([await intentsOf(flood.accountId), made + late]).toEqual([400 - refused, 400 - refused]);
  });

  test('300 quick creates: the create of another account is answered before half of them', async () => {
    const { status, before, statuses } = await flooded(300, create(portal.portalId), nothing, create(otherPortalId));
    expect(status).toBe(200);
    expect(before).toBeLessThan(150);
    isServed(statuses);
  });

  test('200 lists of 100: the list of another account is answered before half of them', async () => {
    const { status, before, statuses } = await flooded(200, LIST, nothing, LIST);
    expect(status).toBe(200);
    expect(before).toBeLessThan(100);
    isServed(statuses);
  });

  test('60 creates of 230 KB: the create of another account is answered before half of them', async () => {
    const metadata = Object.fromEntries(Array.from({ length: 50 }, (_, key) => [`key-${key}`, 'x'.repeat(150)]));
    const body = paymentOf(portal.portalId, { lines: Array.from({ length: 28 }, () => 100) });
    const large = { ...create(portal.portalId), body: { ...body, lineItems: body.lineItems.map((line) => ({ ...line, metadata })) } };
    const { status, before, statuses } = await flooded(60, large, nothing, create(otherPortalId));
    expect(status).toBe(200);
    expect(before).toBeLessThan(30);
    isServed(statuses);
  });
});

/** The number of payments of an account that were begun. */
const intentsOf = async (accountId: string): Promise<number> => {
  let intents = 0;
  for await (const events of service.services.store.readAll(null, { streamPrefixes: ['payment-'] }))
    for (const { type, data } of events) if (type === 'PaymentInitiated' && (data as { accountId: string }).accountId === accountId) intents += 1;
  return intents;
};

describe('an account that has taken its slots', () => {
  let held: Slot[] = [];
  let waiting: Promise<Slot>[] = [];
  /** Takes every slot that an account can get in a lane. */
  const takeAll = async (take: (waitMs: number) => Promise<Slot>): Promise<void> => {
    for (;;) {
      const slot = await take(0).catch(() => null);
      if (!slot) return;
      held.push(slot);
    }
  };
  const slotOf = (from: Slots, accountId: string, lane: Lane, waitMs: number) => from.take({ accountId, lane, slots: 1 }, waitMs);
  /** Takes every slot, and fills the queue of the lane. Another account has work, too. */
  const crowd = async (from: Slots, lane: Lane): Promise<void> => {
    held.push(await slotOf(from, other.accountId, 'partner', 0));
    await takeAll((waitMs) => slotOf(from, flood.accountId, lane, waitMs));
    for (;;) {
      const queued = slotOf(from, flood.accountId, lane, WAIT_MS);
      if ((await Promise.race([queued.then(nothing, () => 'refused'), new Promise((wake) => setImmediate(wake))])) === 'refused') return;
      waiting.push(queued);
    }
  };
  const leave = async () => {
    while (held.length > 0 || waiting.length > 0) {
      for (const slot of held.splice(0)) slot.release();
      for (const queued of waiting.splice(0)) (await queued).release();
    }
  };
  beforeEach(() => {
    [held, waiting] = [[], []];
  });

  test('gets 429 with Retry-After before its key is claimed, and the same key works afterwards', async () => {
    await crowd(slots, 'partner');
    const body = paymentOf(portal.portalId);
    const refused = await flood.client.create(body, { key: 'crowd-1' });
    expect(refused).toMatchObject({ status: 429, code: 'RATE_LIMITED', headers: { 'retry-after': '1' } });
    expect(await flood.client.list()).toMatchObject({ status: 429, code: 'RATE_LIMITED' });
    expect(await other.client.create(paymentOf(otherPortalId))).toMatchObject({ status: 200 });
    await leave();
    const created = await flood.client.create(body, { key: 'crowd-1' });
    expect(created).toMatchObject({ status: 200 });
    expect(created.headers['idempotent-replayed']).toBeUndefined();
  });

  test('is served by its API, although its payers have taken all slots of their pages', async () => {
    const payer = new Payer(service.urls[0]!);
    const id = await payer.begin(intakeOf(portal));
    await crowd(slots, 'payer');
    expect(await flood.client.list()).toMatchObject({ status: 200 });
    const page = await payer.send(`/checkout/${id}`);
    expect([page.status, page.headers['retry-after']]).toEqual([429, '1']);
    const intake = await new Payer(service.urls[0]!).intake(intakeOf(portal));
    expect([intake.status, intake.headers['retry-after']]).toEqual([429, '1']);
    await leave();
    expect(await payer.send(`/checkout/${id}`)).toMatchObject({ status: 200 });
  });

  test('shows its payer the form again, and the attempts of the checkout are not used up', async () => {
    const payer = new Payer(service.urls[0]!);
    const id = await payer.begin(intakeOf(portal));
    const form = formOf((await payer.send(`/checkout/${id}`)).text);
    await crowd(gateway, 'payer');
    const before = service.log.length;
    const refused = await payer.submit(id, { ...form, ...CARD_FORM, first_name: 'Ada' });
    expect([refused.status, refused.headers['retry-after']]).toEqual([429, '5']);
    expect(textOf(refused.text)).toContain('Too many people are paying at this moment.');
    expect(formOf(refused.text)).toMatchObject({ first_name: 'Ada' });
    expect(service.log.slice(before).join('')).not.toContain(CARD.approved.replaceAll(' ', ''));
    const session = await service.services.checkout.sessions.load(id);
    expect(session!.checkout).toMatchObject({ phase: 'open', attemptIds: [] });
    await leave();
    expect(await payer.pay(id)).toMatchObject({ location: `/checkout/${id}/receipt` });
  });

  test('loses the place of a request in its queue when the client is gone', async () => {
    await takeAll((waitMs) => slotOf(slots, flood.accountId, 'partner', waitMs));
    const { hostname, port } = new URL(service.urls[0]!);
    const socket = connect(Number(port), hostname);
    socket.write(`GET ${PAYMENTS} HTTP/1.1\r\nhost: x\r\nauthorization: ApiKey ${flood.apiKey}\r\n\r\n`);
    await eventually(() => slots.waiting('partner') === 1);
    socket.destroy();
    await eventually(() => slots.waiting('partner') === 0);
    await leave();
    // Every slot is back: as many can be taken as by the only account with work, soon after another one had some.
    (await slotOf(slots, other.accountId, 'partner', WAIT_MS)).release();
    await takeAll((waitMs) => slotOf(slots, flood.accountId, 'partner', waitMs));
    expect(held).toHaveLength(19);
    await leave();
  });

  test('has given back every slot at the gateway after all of this', async () => {
    const take = () =>
      service.services.payments.ports.slots.reserve(
        'simulator',
        flood.accountId,
        'partner',
        new Deadline(service.clock, REQUEST_DEADLINE_MS - 20_000),
      );
    await takeAll(take);
    expect(held).toHaveLength(153);
    await leave();
  });
});
