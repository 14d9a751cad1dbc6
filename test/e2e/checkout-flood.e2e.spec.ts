/**
 * Strangers at hosted checkout (C58, C65): they cannot fill the log, they cannot close a portal to its payers, and card testing meets limits. The
 * limits are those of production.
 */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { Capabilities, postgresIntakeRows } from '#checkout';
import type { Recorded } from '#eventstore';
import { type Json, timestamp } from '#kernel';
import {
  CARD_FORM,
  checkoutPortal,
  type Fields,
  formOf,
  formText,
  INTAKE,
  intakeOf,
  LINES,
  Payer,
  type Portal,
  readReturn,
  SHOP,
  signedFields,
  textOf,
} from '../support/checkout.js';
import { createMetrics, type Metrics } from '../../apps/metrics.js';
import { eventually } from '../support/eventually.js';
import { FloodSocket } from '../support/flood.js';
import { figuresOf } from '../support/metrics.js';
import { CARD, type Service, startService } from '../support/service.js';

const PUBLIC = 'https://pay.test';
const INTAKE_ADDRESS = `${PUBLIC}${INTAKE}`;
const DAY_MS = 86_400_000;

let service: Service;
let portal: Portal;
let metrics: Metrics;

/** Starts a service with one portal. */
const start = async (env: Readonly<Record<string, string>>) => {
  service = await startService({ publicUrl: PUBLIC, env });
  portal = await checkoutPortal(service, await service.account());
  metrics = createMetrics(service.services);
  metrics.limitedBy(service.apis[0]!.limits);
};

/** A browser at this address. */
const payer = (address: string | null = null) => new Payer(service.urls[0]!, PUBLIC, address);

const eventsOf = async (id: string) => {
  const events = [];
  for await (const event of service.services.store.read(`checkout-${id}`)) events.push(event);
  return events;
};

describe('the content of a checkout lies beside the log', () => {
  beforeAll(() => start({}));
  afterAll(() => service.stop());

  const begun = async (fields: Fields = intakeOf(portal, { payer_email: 'maria@example.com' })) => {
    const one = payer();
    return { one, id: await one.begin(fields) };
  };
  const forget = (id: string) => service.services.pool.query('delete from checkout_intake where checkout_id = $1', [id]);
  const expectExpired = async (one: Payer, id: string) => {
    for (const path of ['', '/pay', '/done', '/cancel', '/receipt', '/processing']) {
      const page = await (path === '/pay' ? one.submit(id, { ...CARD_FORM }) : one.open(`/checkout/${id}${path}`));
      if (path === '/pay') expect([page.status, page.location]).toEqual([303, `/checkout/${id}`]);
      else {
        expect(textOf(page.text)).toContain('This page has expired');
        expect(page.text).not.toMatch(/<form|\/cancel"/);
      }
    }
  };

  /** A JSON intake with about this many bytes of lines. */
  const bulk = (bytes: number, more: object = {}) => {
    const count = 50;
    const lines = Array.from({ length: count }, (_, index) => ({
      amount_cents: 250,
      reference_id: `R-${index}`,
      metadata: { note: 'x'.repeat(Math.floor(bytes / count) - 80) },
    }));
    return JSON.stringify({ ...intakeOf(portal), amount_cents: 250 * count, line_items: lines, ...more });
  };
  const post = (body: string) => payer().send(INTAKE, { method: 'POST', body, headers: { 'content-type': 'application/json' } });
  const logBytes = async () => {
    let bytes = 0;
    for await (const page of service.services.store.readAll(null)) for (const { data, meta } of page) bytes += JSON.stringify([data, meta]).length;
    return bytes;
  };

  test('200 unsigned intakes of 239 KB add nothing to the log, and 200 of the largest that are accepted add less than 1 KB each', async () => {
    const before = await logBytes();
    const large = bulk(239 * 1_024);
    expect(large.length).toBeGreaterThan(230 * 1_024);
    for (let number = 0; number < 200; number++) {
      const said = readReturn(portal.signingSecret, 'cancel', (await post(large)).location);
      expect(said).toMatchObject({ right: true, result: 'failed', error: 'VALIDATION_ERROR', reference_id: 'CASE-7' });
    }
    expect(await logBytes()).toBe(before);
    const { text } = await post(large);
    expect(text).toBe('VALIDATION_ERROR: The parameters are too large: at most 64 KB as JSON.\n');

    const allowed = bulk(60 * 1_024);
    for (let number = 0; number < 200; number++) expect((await post(allowed)).location).toContain('/checkout/cs_');
    expect((await logBytes()) - before).toBeLessThan(200 * 1_024);
  }, 300_000);

  test('the event holds ids, the amount and hashes, in 1 KB with its metadata; a paid payment has its own copy of the rest', async () => {
    const { one, id } = await begun(intakeOf(portal, { payer_email: 'maria@example.com', payer_line1: 'Main St 1', nonce: 'nonce-of-the-event' }));
    const [started] = await eventsOf(id);
    expect(started!.v).toBe(2);
    expect(Object.keys(started!.data as object).sort()).toEqual(
      ['accountId', 'amountCents', 'checkoutId', 'content', 'expiresAt', 'fingerprint', 'intake', 'opened', 'portalId', 'signed'], // prettier-ignore
    );
    const text = JSON.stringify([started!.data, started!.meta]);
    expect(text.length).toBeLessThan(1_024);
    expect(text).not.toMatch(/maria|Main St|Water|CASE-7|shop\.test|xyz/);
    const page = await one.send(`/checkout/${id}`);
    expect(textOf(page.text)).toMatch(/Water Reference WTR-2041/);
    expect(page.text).toContain('maria@example.com');
    expect((await one.pay(id)).location).toBe(`/checkout/${id}/receipt`);
    await forget(id);
    // The receipt needs no content. The address of the agency is gone.
    for (const path of ['', '/receipt', '/done', '/cancel']) {
      const shown = await one.open(`/checkout/${id}${path}`);
      expect([shown.path, textOf(shown.text)]).toEqual([`/checkout/${id}/receipt`, expect.stringContaining('Water')]);
    }
  });

  test('a content that is gone, or that was changed, shows the page of an expired checkout, never a card form', async () => {
    const { one, id } = await begun();
    const form = formOf((await one.send(`/checkout/${id}`)).text);
    await forget(id);
    await expectExpired(one, id);
    expect((await one.submit(id, { ...form, ...CARD_FORM })).location).toBe(`/checkout/${id}`);
    expect(textOf((await payer().send(`/checkout/${id}`)).text)).toContain('This page has expired');
    expect((await eventsOf(id)).map(({ type }) => type)).toEqual(['CheckoutStarted']);

    const changed = await begun();
    await service.services.pool.query(`update checkout_intake set content = left(content, -8) || 'AAAAAAA=' where checkout_id = $1`, [changed.id]);
    await expectExpired(changed.one, changed.id);
    expect(service.logLines()).toContainEqual(
      expect.objectContaining({ level: 50, checkoutId: changed.id, msg: 'the content of a checkout was changed; it takes no card' }),
    );
  });

  test('a nonce knows other content for ever, also after its content is purged', async () => {
    const fields = intakeOf(portal, { nonce: 'nonce-that-lives-on' });
    const { one, id } = await begun(fields);
    await forget(id);
    const said = readReturn(portal.signingSecret, 'cancel', (await payer().intake({ ...fields, state: 'other' })).location);
    expect(said).toMatchObject({ right: true, error: 'VALIDATION_ERROR' });
    expect((await one.intake(fields)).location).toBe(`/checkout/${id}`);
    await expectExpired(one, id);
    expect(await eventsOf(id)).toHaveLength(1);
  });

  test('one nonce with several contents at once: one session, with the content that its event names', async () => {
    const states = Array.from({ length: 12 }, (_, index) => `state ${index % 3}`);
    const replies = await Promise.all(states.map(async (state) => {
      const one = payer();
      return { one, state, reply: await one.intake(intakeOf(portal, { nonce: 'nonce-of-many-at-once', state })) };
    })); // prettier-ignore
    const won = replies.filter(({ reply }) => reply.location.startsWith('/checkout/cs_'));
    expect(new Set(won.map(({ reply }) => reply.location)).size).toBe(1);
    expect(new Set(won.map(({ state }) => state)).size).toBe(1);
    expect(won).toHaveLength(4);
    const { one, reply, state } = won[0]!;
    expect((await one.pay(reply.location.slice('/checkout/'.length))).location).toMatch(/receipt$/);
    expect(readReturn(portal.signingSecret, 'return', (await one.send(`${reply.location}/done`)).location)).toMatchObject({
      right: true,
      result: 'paid',
      state,
    });
  });

  test('a session of the build before, with its content in the event, is paid and goes back', async () => {
    const { store, clock, ids, keys } = service.services;
    const { id: known } = await begun();
    const [{ data, meta }] = (await eventsOf(known)) as [Recorded];
    const { content: _, signed: __, ...ours } = data as Record<string, Json>;
    const id = `cs_${'v'.repeat(32)}`;
    const lineItems = LINES.map((line) => ({
      amountCents: line.amount_cents,
      referenceId: line.reference_id,
      description: line.description,
      metadata: null,
    }));
    const urls = { returnUrl: `${SHOP}/pay/done`, cancelUrl: `${SHOP}/pay/cancelled` };
    const started = {
      ...ours,
      checkoutId: id,
      expiresAt: timestamp(clock.now() + 60_000),
      lineItems,
      payer: { firstName: 'Ada' },
      referenceId: 'OLD-1',
      state: 's',
      locale: 'es',
      ...urls,
    };
    await store.append(`checkout-${id}`, 'no_stream', [{ id: ids.uuid(), type: 'CheckoutStarted', v: 1, data: started, meta }]);
    const one = payer();
    one.cookies.set(`/checkout/${id}`, `__Secure-co=${new Capabilities(keys).cookie(id, ids.uuid())}`);
    const page = await one.send(`/checkout/${id}`);
    expect(page.text).toContain('lang="es"');
    expect(page.text).toContain('value="Ada"');
    expect((await one.pay(id)).location).toBe(`/checkout/${id}/receipt`);
    const said = readReturn(portal.signingSecret, 'return', (await one.send(`/checkout/${id}/done`)).location);
    expect(said).toMatchObject({ right: true, result: 'paid', reference_id: 'OLD-1', amount_cents: '12500', state: 's' });
  });

  test('contents are purged when they are no longer needed, and not before', async () => {
    const { id } = await begun();
    const { pool, checkout } = service.services;
    const { sessions } = checkout;
    const rows = postgresIntakeRows(pool);
    const paid = await begun();
    expect((await paid.one.pay(paid.id)).location).toBe(`/checkout/${paid.id}/receipt`);
    const keys = [(await sessions.load(id))!.key!.id, (await sessions.load(paid.id))!.key!.id];
    const kept = async () => (await pool.query<{ key_id: string }>('select key_id from personal_key where key_id = any ($1::uuid[])', [keys])).rows;
    const now = service.clock.now();
    await sessions.purge(now + 30 * DAY_MS);
    expect((await rows.read(id)).size).toBe(1);
    expect(await kept()).toHaveLength(2);
    await sessions.purge(now + 30 * DAY_MS + 3_660_000);
    expect((await rows.read(id)).size).toBe(0);
    // The payment uses the key of its session. The key of a session without a payment goes with the content.
    expect(await kept()).toEqual([{ key_id: keys[1] }]);
  });
});

describe('the limits of production, behind one proxy', () => {
  beforeAll(() =>
    start({ PROXY_HOPS: '1', CHECKOUT_RATE_PER_ADDRESS: '60', CHECKOUT_UNSIGNED_PER_PORTAL: '300', CHECKOUT_DECLINES_PER_PORTAL: '30' }),
  );
  afterAll(() => service.stop());

  const alarms = (by: string) =>
    service
      .logLines()
      .filter(({ level, msg, reason }) => level === 50 && msg === 'the limits of hosted checkout are lowered for a portal' && reason === by);
  const figure = async (name: string) => (await figuresOf(metrics.own)).get(name);
  const newPortal = async () => checkoutPortal(service, await service.account());

  test('an address gets its number of intakes; 429 with Retry-After, as a page. An IPv6 address counts by its /64', async () => {
    const own = await newPortal();
    for (const [mine, mate, other] of [
      ['198.51.100.1', null, '198.51.100.2'],
      ['2001:db8:1:2::1', '2001:db8:1:2:ffff:ffff:ffff:ffff', '2001:db8:1:3::1'],
    ] as const) {
      // The signature does not help: every intake counts by address.
      const fields = signedFields(own.signingSecret, 'intake', INTAKE_ADDRESS, intakeOf(own));
      const replies = await Promise.all(
        Array.from({ length: 75 }, (_, number) => payer(mate !== null && number % 2 === 0 ? mate : mine).intake(fields)),
      );
      const refused = replies.filter(({ status }) => status === 429);
      expect(refused.length).toBeGreaterThan(0);
      expect(replies.length - refused.length).toBeGreaterThanOrEqual(60);
      expect(refused[0]!.headers['content-type']).toBe('text/html; charset=utf-8');
      expect(Number(refused[0]!.headers['retry-after'])).toBeGreaterThan(0);
      expect(textOf(refused[0]!.text)).toContain('Too many requests');
      expect((await payer(other).intake(fields)).location).toMatch(/^\/checkout\/cs_/);
      // Earlier entries of the header may be forged.
      const forged = { 'x-forwarded-for': `203.0.113.9, ${mine}` };
      // The address may have got one more intake meanwhile: it gets one a second.
      const more = await Promise.all(
        Array.from({ length: 10 }, () => payer().send(INTAKE, { method: 'POST', body: formText(fields), headers: forged })),
      );
      expect(more.map(({ status }) => status)).toContain(429);
    }
    // The refusal needs no body: a flood of large intakes is answered before it sends them.
    const head = `POST ${INTAKE} HTTP/1.1\r\nhost: localhost\r\nx-forwarded-for: 198.51.100.1\r\ncontent-type: application/json\r\ncontent-length: 240000\r\n\r\n`;
    // More than an address may send in a minute. The others wait for their bodies.
    const clients = await FloodSocket.openMany(70, service.urls[0]!, '127.0.0.2', head);
    try {
      for (const client of clients) client.read();
      await eventually(() => clients.some(({ received }) => received.startsWith('HTTP/1.1 429 ')));
    } finally {
      for (const client of clients) client.close();
    }
    expect(await figure('payfold_checkout_lowered_portals')).toBe(0);
  }, 120_000);

  test('an intake counts once for each started 8 KiB of its body', async () => {
    const body = JSON.stringify({ ...intakeOf(portal), state: 'x'.repeat(20 * 1_024) });
    const asked = { method: 'POST', body, headers: { 'content-type': 'application/json' } };
    const replies = await Promise.all(Array.from({ length: 60 }, () => payer('198.51.100.77').send(INTAKE, asked)));
    const admitted = replies.filter(({ status }) => status !== 429).length;
    // A token comes back each second, so a slow machine admits a few more.
    expect(admitted).toBeGreaterThanOrEqual(20);
    expect(admitted).toBeLessThan(40);
  });

  test('junk posts do not close a portal to its payers', async () => {
    const own = await newPortal();
    const before = await figure('payfold_checkout_lowered_portals');
    // From many addresses, each within its own limit: bad lines, bad signatures and whole intakes.
    const junk = [{ line_items: 'x' }, { sig: 'a'.repeat(64) }, {}];
    for (let round = 0; round < 8; round++)
      await Promise.all(Array.from({ length: 50 }, (_, number) => payer(`192.0.2.${number}`).intake(intakeOf(own, junk[number % 3]))));
    expect(alarms('unsigned intakes')).toEqual([expect.objectContaining({ portalId: own.portalId })]);
    expect(await figure('payfold_checkout_lowered_portals')).toBe(before! + 1);

    const admitted = async (address: string, fields: Fields) => {
      const replies = await Promise.all(Array.from({ length: 30 }, () => payer(address).intake(fields)));
      return replies.filter(({ status }) => status === 303).length;
    };
    // A stranger gets a tenth there, and the whole number elsewhere.
    const strangers = await admitted('203.0.113.1', intakeOf(own));
    expect(strangers).toBeGreaterThanOrEqual(6);
    expect(strangers).toBeLessThan(15);
    expect(await admitted('203.0.113.2', intakeOf(portal))).toBe(30);
    // A partner who signs is not concerned.
    expect(await admitted('203.0.113.3', signedFields(own.signingSecret, 'intake', INTAKE_ADDRESS, intakeOf(own)))).toBe(30);
    // Each payer still pays, with a form that is not signed.
    for (let number = 0; number < 5; number++) {
      const one = payer(`203.0.113.${100 + number}`);
      const id = await one.begin(intakeOf(own));
      expect((await one.pay(id, { card_number: CARD.declined })).location).toBe(`/checkout/${id}`);
      expect((await one.pay(id)).location).toBe(`/checkout/${id}/receipt`);
    }
  }, 600_000);

  test('180 declined cards from one address meet the limits, and show in the metric', async () => {
    const own = await newPortal();
    const before = (await figure('payfold_checkout_declines'))!;
    const thief = '203.0.113.66';
    const statuses: number[] = [];
    await Promise.all(
      Array.from({ length: 18 }, async () => {
        const one = payer(thief);
        const { status, location } = await one.intake(intakeOf(own));
        statuses.push(status);
        if (status !== 303) return;
        const id = location.slice('/checkout/'.length);
        for (let card = 0; card < 10; card++) statuses.push((await one.pay(id, { card_number: CARD.declined })).status);
      }),
    );
    expect(statuses.filter((status) => status === 429).length).toBeGreaterThan(100);
    const declined = (await figure('payfold_checkout_declines'))! - before;
    expect(declined).toBeGreaterThan(30);
    expect(declined).toBeLessThan(80);
    await eventually(() => alarms('declines').length > 0);
    expect(alarms('declines')[0]).toMatchObject({ portalId: own.portalId });
    expect(await figure('payfold_checkout_lowered_portals')).toBeGreaterThan(0);
    // The thief goes on at a tenth. A payer elsewhere pays at once.
    const one = payer('203.0.113.67');
    expect((await one.pay(await one.begin(intakeOf(own)))).location).toMatch(/receipt$/);
  }, 300_000);
});

test('in the sandbox the limits are off', async () => {
  await start({});
  const replies = await Promise.all(Array.from({ length: 100 }, () => payer().intake(intakeOf(portal))));
  expect(replies.filter(({ status }) => status !== 303)).toEqual([]);
  await service.stop();
});
