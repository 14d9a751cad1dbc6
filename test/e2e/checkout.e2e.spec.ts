/**
 * Hosted checkout over HTTP (specification, Hosted checkout; C58–C60, C66): intake, the session's states, paying, and the way back to the partner.
 * checkout-browser tests the parts that need a browser.
 */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { checkoutUnfinishedModel } from '#checkout';
import { timestamp } from '#kernel';
import { listRefusals } from '#payments';
import { recordSettlements } from '#settlement';
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
  type Reply,
  SHOP,
  signatureOf,
  signedFields,
  textOf,
} from '../support/checkout.js';
import { RequestMethod } from '@nestjs/common';
import { CheckoutController } from '../../apps/api/payer/checkout.controller.js';
import { createMetrics } from '../../apps/metrics.js';
import { eventually } from '../support/eventually.js';
import { figuresOf } from '../support/metrics.js';
import { CARD, expiryIn, FEE, paymentOf, type Service, startService, type TestAccount } from '../support/service.js';

const PUBLIC = 'https://pay.test';
const INTAKE_ADDRESS = `${PUBLIC}${INTAKE}`;
const LINK_ADDRESS = `${INTAKE_ADDRESS}/link`;

let service: Service;
let account: TestAccount;
let portal: Portal;
/** A payer's browser. Its address of the service is https://pay.test. */
const payer = () => new Payer(service.urls[0]!, PUBLIC);

beforeAll(async () => {
  service = await startService({ publicUrl: PUBLIC });
  account = await service.account();
  portal = await checkoutPortal(service, account);
});
afterAll(() => service.stop());

/** The number of charges that stand at the bank. A payment with a fee has two. */
const charges = async () =>
  (await service.simulator.truth()).filter(
    ({ op, result, amountCents, voidedCents }) => op === 'charge' && result === 'approved' && (voidedCents ?? 0) < amountCents!,
  ).length;
const begun = async (fields: Fields = intakeOf(portal)) => {
  const one = payer();
  return { one, id: await one.begin(fields) };
};
const paidNow = async (fields: Fields = intakeOf(portal)) => {
  const { one, id } = await begun(fields);
  const reply = await one.pay(id);
  expect(reply.location).toBe(`/checkout/${id}/receipt`);
  return { one, id };
};
const told = async (one: Payer, id: string, way: 'done' | 'cancel', secret = portal.signingSecret) => {
  const reply = await one.leave(id, way);
  expect(reply.status).toBe(303);
  const said = readReturn(secret, way === 'done' ? 'return' : 'cancel', reply.location);
  expect(said.right).toBe(true);
  return said;
};
const events = async (id: string) => {
  const types: string[] = [];
  for await (const { type } of service.services.store.read(`checkout-${id}`)) types.push(type);
  return types;
};
const linkPath = (fields: Fields) => `${INTAKE}/link?${formText(fields)}`;
let nonces = 0;
const nonce = () => `nonce-0123456789-${++nonces}`;
const inSeconds = (seconds: number) => String(Math.floor(service.clock.now() / 1_000) + seconds);
const link = (more: Readonly<Record<string, string | undefined>> = {}, secret = portal.signingSecret) =>
  signedFields(secret, 'link', LINK_ADDRESS, intakeOf(portal, { nonce: nonce(), exp: inSeconds(3_600), ...more }));

describe('intake', () => {
  test('form: 303 to the page, with a cookie for that page only', async () => {
    const one = payer();
    const reply = await one.intake(intakeOf(portal));
    expect(reply.status).toBe(303);
    const [, id] = /^\/checkout\/(cs_[\w-]{32})$/.exec(reply.location)!;
    expect(reply.setCookie).toEqual([
      expect.stringMatching(new RegExp(`^__Secure-co=[\\w.-]{80}; Path=/checkout/${id}; HttpOnly; SameSite=Lax; Secure$`)),
    ]);
    const page = await one.send(reply.location);
    expect(page.status).toBe(200);
    expect(textOf(page.text)).toMatch(/Water Reference WTR-2041 \$100\.00 Sewer .* \$25\.00 Subtotal \$125\.00 Service fee \$3\.63 Total \$128\.63/);
    expect(await events(id!)).toEqual(['CheckoutStarted']);
  });
  test('JSON: the address is the capability until a browser opens it; the first one gets the cookie', async () => {
    const server = payer();
    const body = { ...intakeOf(portal), amount_cents: 12_500, line_items: LINES };
    const reply = await server.send(INTAKE, {
      method: 'POST',
      body: JSON.stringify(body),
      headers: { 'content-type': 'application/json', origin: null },
    });
    expect([reply.status, reply.setCookie]).toEqual([303, []]);
    expect(reply.location.startsWith(`${PUBLIC}/checkout/cs_`)).toBe(true);
    const path = new URL(reply.location).pathname;
    const id = path.split('/').at(-1)!;
    const [first, second] = [payer(), payer()];
    const pages = await Promise.all([first.send(path), second.send(path)]);
    expect(pages.map(({ status }) => status).sort()).toEqual([200, 403]);
    expect(pages.flatMap(({ setCookie }) => setCookie)).toHaveLength(1);
    const [winner, loser] = pages[0].status === 200 ? [first, second] : [second, first];
    expect(textOf((await loser.send(path)).text)).toContain('started in another browser');
    expect((await winner.pay(id)).location).toBe(`${path}/receipt`);
    expect(await events(id)).toEqual(['CheckoutStarted', 'CheckoutOpened', 'AttemptStarted', 'CheckoutPaid']);
  });
  test('JSON: a program that only looks (HEAD) does not take the place of the first browser', async () => {
    const headers = { 'content-type': 'application/json', origin: null, 'sec-fetch-site': null };
    const body = JSON.stringify({ ...intakeOf(portal), amount_cents: 12_500, line_items: LINES });
    const path = new URL((await payer().send(INTAKE, { method: 'POST', headers, body })).location).pathname;
    await payer().send(path, { method: 'HEAD' });
    expect((await payer().send(path)).status).toBe(200);
  });
  test('a card number where none belongs is not sent back to the partner (C9)', async () => {
    const fields = intakeOf(portal, { reference_id: '4242424242424242', state: '5555 5555 5555 4444' });
    const { location } = await payer().send(INTAKE, { method: 'POST', body: formText(fields) });
    expect(location).toContain('error=VALIDATION_ERROR');
    expect(decodeURIComponent(location)).not.toMatch(/4242424242424242|5555.5555.5555.4444/);
  });
  test.each<[string, Record<string, string>]>([
    ['a language', { locale: 'en-4242-4242-4242-4242' }],
    ['a language, in one piece of eight', { locale: 'en-42424242-42424242' }],
    ['the query of an address', { return_url: `${SHOP}/pay/done?case=4242%204242%204242%204242` }],
    ['a name', { payer_first_name: 'x4242424242424242' }],
    ['a name, in digits of another script', { payer_last_name: '٤٢٤٢٤٢٤٢٤٢٤٢٤٢٤٢' }],
    ['a state', { state: '6759.6498.2643.8453' }],
  ])('a card number in an intake starts no checkout (C9): %s', async (_, more) => {
    const { location } = await payer().send(INTAKE, { method: 'POST', body: formText(intakeOf(portal, more)) });
    expect(location).toContain('error=VALIDATION_ERROR');
    expect(decodeURIComponent(location)).not.toMatch(/4242|6759|٤٢٤٢/);
  });
  test('an address of the partner with a card number is no place to lead to (C9)', async () => {
    const { location } = await payer().send(INTAKE, {
      method: 'POST',
      body: formText(intakeOf(portal, { cancel_url: `${SHOP}/pay/cancelled?n=4242-4242-4242-4242` })),
    });
    expect(location).toMatch(/^\/checkout\/error\?code=VALIDATION_ERROR/);
  });
  test('the error page repeats no card number that its query names as the request (C9)', async () => {
    const page = await payer().send('/checkout/error?code=VALIDATION_ERROR&ref=r4242424242424242');
    expect([page.status, page.text.includes('4242')]).toEqual([200, false]);
  });
  test('the payment is the owner’s, with everything that came', async () => {
    const { one, id } = await paidNow(
      intakeOf(portal, {
        payer_first_name: 'Maria',
        payer_email: 'maria@example.com',
        payer_phone: '555',
        payer_city: 'Riverton',
        payer_zip: '12345',
      }),
    );
    const said = await told(one, id, 'done');
    const { data } = await account.client.find(said.payment_id as string);
    expect(data).toMatchObject({
      status: 'succeeded',
      amountCents: 12_500,
      serviceFeeCents: 363,
      portalId: portal.portalId,
      referenceId: 'CASE-7',
      payer: { firstName: 'Maria', email: 'maria@example.com', phone: '555', address: { city: 'Riverton', zip: '12345', country: 'US' } },
      lineItems: [{ referenceId: 'WTR-2041' }, { referenceId: 'WTR-2042', metadata: { ward: 4 } }],
    });
    expect(said).toEqual({
      right: true,
      address: `${SHOP}/pay/done`,
      case: 'A&B 7',
      result: 'paid',
      checkout_id: id,
      payment_id: data.id,
      confirmation_number: data.confirmationNumber,
      reference_id: 'CASE-7',
      amount_cents: '12500',
      service_fee_cents: '363',
      total_charged_cents: '12863',
      state: 'xyz',
      t: expect.stringMatching(/^\d{10}$/),
      sig: expect.stringMatching(/^[0-9a-f]{64}$/),
    });
    const [initiated] = await service.services.payments.ports.streams.events(data.id);
    expect(initiated!.meta.actor).toEqual({ type: 'payer', id });
  });

  describe('ends on our own page, and nowhere else, while no address is vetted', () => {
    const cases: [string, Readonly<Record<string, string | undefined>>, string][] = [
      ['no portal', { portal_id: undefined }, 'VALIDATION_ERROR'],
      ['a portal that is no UUID', { portal_id: 'x' }, 'VALIDATION_ERROR'],
      ['an unknown portal', { portal_id: '018f0000-0000-7000-8000-000000000009' }, 'PORTAL_ACCESS_DENIED'],
      ['no cancel_url', { cancel_url: undefined }, 'VALIDATION_ERROR'],
      ['cancel_url over http', { cancel_url: 'http://shop.test/pay/x' }, 'VALIDATION_ERROR'],
      ['cancel_url elsewhere', { cancel_url: 'https://shop.test.evil.test/pay' }, 'VALIDATION_ERROR'],
      ['cancel_url beside the path', { cancel_url: `${SHOP}/payments` }, 'VALIDATION_ERROR'],
      ['cancel_url with a name of ours', { cancel_url: `${SHOP}/pay?result=paid` }, 'VALIDATION_ERROR'],
    ];
    test.each(cases)('%s', async (_, change, code) => {
      const reply = await payer().intake(intakeOf(portal, change));
      expect([reply.status, reply.setCookie]).toEqual([303, []]);
      expect(reply.location).toMatch(new RegExp(`^/checkout/error\\?code=${code}&ref=[\\w-]{36}$`));
      const page = await payer().send(reply.location);
      const reference = new URL(reply.location, PUBLIC).searchParams.get('ref')!;
      expect(page.status).toBe(200);
      expect(textOf(page.text)).toContain(`${code} ${reference}`);
    });
    test('hosted checkout off', async () => {
      const off = await checkoutPortal(service, account, { enabled: false });
      expect((await payer().intake(intakeOf(off))).location).toMatch(/^\/checkout\/error\?code=PORTAL_ACCESS_DENIED&/);
    });
    test.each<[string, Readonly<Record<string, string | null>>, string]>([
      ['another type', { 'content-type': 'multipart/form-data; boundary=x' }, 'x'],
      ['no type', { 'content-type': null }, 'portal_id=1'],
      ['broken JSON', { 'content-type': 'application/json' }, '{"portal_id":'],
      ['JSON that is no object', { 'content-type': 'application/json' }, '[]'],
      ['a parameter twice', {}, 'portal_id=1&portal_id=2'],
      ['bad UTF-8', {}, 'portal_id=%ff'],
      ['a NUL', {}, 'portal_id=%00'],
      ['__proto__', {}, '__proto__=1'],
      ['nothing', {}, ''],
      ['too much', {}, `state=${'x'.repeat(300_000)}`],
    ])('a body that cannot be read: %s', async (_, headers, body) => {
      const reply = await payer().send(INTAKE, { method: 'POST', body, headers });
      expect(reply.status).toBe(303);
      expect(reply.location).toMatch(/^\/checkout\/error\?code=VALIDATION_ERROR&ref=/);
    });
    test('the error page repeats no invented text', async () => {
      const page = await payer().send('/checkout/error?code=%3Cscript%3Ealert(1)%3C/script%3E&ref=%22%3E%3Cimg%20src=x%3E');
      expect(page.text).not.toMatch(/alert|<img/);
      expect(page.status).toBe(200);
      expect((await payer().send('/checkout/error?code=toString&ref=a&ref=b')).status).toBe(200);
    });
  });

  describe('goes back to a vetted cancel_url with a code, signed', () => {
    const lines = (value: unknown) => JSON.stringify(value);
    test.each<[string, Readonly<Record<string, string | undefined>>, string]>([
      ['return_url elsewhere', { return_url: 'https://evil.test/pay' }, 'VALIDATION_ERROR'],
      ['no return_url', { return_url: undefined }, 'VALIDATION_ERROR'],
      ['return_url with a name of ours', { return_url: `${SHOP}/pay?sig=1` }, 'VALIDATION_ERROR'],
      ['no amount', { amount_cents: undefined }, 'VALIDATION_ERROR'],
      ['a sum that differs', { amount_cents: '12501' }, 'VALIDATION_ERROR'],
      ['amount 0', { amount_cents: '0' }, 'VALIDATION_ERROR'],
      ['an amount with a fraction', { amount_cents: '125.00' }, 'VALIDATION_ERROR'],
      ['an amount as 1e2', { amount_cents: '1e2' }, 'VALIDATION_ERROR'],
      ['the field amount', { amount: '125.00' }, 'VALIDATION_ERROR'],
      ['amount in a line', { line_items: lines([{ ...LINES[0], amount: 1 }]), amount_cents: '10000' }, 'VALIDATION_ERROR'],
      ['other money', { currency: 'EUR' }, 'VALIDATION_ERROR'],
      ['no lines', { line_items: undefined }, 'VALIDATION_ERROR'],
      ['empty lines', { line_items: '[]' }, 'VALIDATION_ERROR'],
      ['lines that are no JSON', { line_items: '[{' }, 'VALIDATION_ERROR'],
      ['lines that hide a second key', { line_items: `[{"amount_cents":12500,"amount_cents":1,"reference_id":"x"}]` }, 'VALIDATION_ERROR'],
      [
        '51 lines',
        { line_items: lines(Array.from({ length: 51 }, () => ({ amount_cents: 1, reference_id: 'x' }))), amount_cents: '51' },
        'VALIDATION_ERROR',
      ],
      ['a line without reference', { line_items: lines([{ amount_cents: 12_500 }]) }, 'VALIDATION_ERROR'],
      ['a card number in a line', { line_items: lines([{ amount_cents: 12_500, reference_id: '4242424242424242' }]) }, 'VALIDATION_ERROR'],
      ['a card number in state', { state: 'card 4242 4242 4242 4242' }, 'VALIDATION_ERROR'],
      ['a state too long', { state: 'x'.repeat(513) }, 'VALIDATION_ERROR'],
      ['a card number in an address', { return_url: `${SHOP}/pay?card=4242424242424242` }, 'VALIDATION_ERROR'],
      ['a bad e-mail', { payer_email: 'nobody' }, 'VALIDATION_ERROR'],
      ['a bad language', { locale: 'en_US; drop' }, 'VALIDATION_ERROR'],
      ['a nonce too short', { nonce: 'x' }, 'VALIDATION_ERROR'],
      ['exp in the past', { exp: '1700000000' }, 'VALIDATION_ERROR'],
      ['a wrong sig', { sig: 'a'.repeat(64) }, 'VALIDATION_ERROR'],
    ])('%s', async (_, change, code) => {
      const fields = intakeOf(portal, change);
      const reply = await payer().intake(fields);
      expect([reply.status, reply.setCookie]).toEqual([303, []]);
      const said = readReturn(portal.signingSecret, 'cancel', reply.location);
      expect(said).toMatchObject({ right: true, address: `${SHOP}/pay/cancelled`, result: 'failed', error: code, reference_id: 'CASE-7' });
      expect(said.checkout_id).toBeUndefined();
      expect(reply.text).toMatch(/^VALIDATION_ERROR: [^\n]+\n$/);
    });
    test('a parameter twice; one that names the way back twice leaves none', async () => {
      const twice = async (again: string) =>
        (await payer().send(INTAKE, { method: 'POST', body: `${formText(intakeOf(portal))}&${again}` })).location;
      const said = readReturn(portal.signingSecret, 'cancel', await twice('amount_cents=1'));
      expect(said).toMatchObject({ right: true, address: `${SHOP}/pay/cancelled`, result: 'failed', error: 'VALIDATION_ERROR' });
      for (const name of ['cancel_url', 'portal_id']) expect(await twice(`${name}=x`)).toMatch(/^\/checkout\/error\?code=VALIDATION_ERROR&ref=/);
    });
    test('a refusal by portal, case or account has the API’s own code', async () => {
      const codeOf = async (fields: Fields, secret = portal.signingSecret) => {
        const said = readReturn(secret, 'cancel', (await payer().intake(fields)).location);
        expect(said).toMatchObject({ right: true, result: 'failed' });
        return said.error;
      };
      const bare = await service.admin.createPortal({ accountIds: [account.accountId], name: 'P', gateway: 'none', fee: FEE });
      const { portalId } = bare.state;
      await service.administer(service.admin.configureCheckout(portalId, { enabled: true, allow: [SHOP] }));
      expect(await codeOf(intakeOf({ portalId }), bare.signingSecret)).toBe('GATEWAY_NOT_CONFIGURED');
      const own = await checkoutPortal(service, account);
      const restrict = (kind: 'block' | 'hold' | 'allow') =>
        service.administer(service.admin.restrictCase({ portalId: own.portalId, referenceId: 'CASE-7', kind, until: null, reason: null }));
      const signed = () => signedFields(own.signingSecret, 'intake', INTAKE_ADDRESS, intakeOf(own));
      const answers: string[] = [];
      const expectRefused = async (code: string) => {
        expect(await codeOf(signed(), own.signingSecret)).toBe(code);
        const { location, text } = await payer().intake(intakeOf(own));
        answers.push(text + location.replace(/&t=\d+&sig=.*/, ''));
      };
      await restrict('block');
      await expectRefused('PAYMENT_BLOCKED');
      await restrict('hold');
      await expectRefused('PAYMENT_HELD');
      await restrict('allow');
      await service.administer(service.admin.setRules(own.portalId, { maxCents: 12_499 }));
      await expectRefused('PAYMENT_NOT_ALLOWED');
      // A stranger gets one answer for all three reasons.
      expect(answers).toEqual([...Array<string>(3).fill(answers[0]!)]);
      expect(answers[0]).toContain('error=PAYMENT_NOT_ALLOWED');
      const other = await service.account('Leaving');
      const theirs = await checkoutPortal(service, other);
      await service.administer(service.admin.deactivateAccount(other.accountId));
      expect(await codeOf(intakeOf(theirs), theirs.signingSecret)).toBe('PORTAL_ACCESS_DENIED');
    });
  });

  test('signed intake, where the portal requires it; the staged secret counts too, returns carry the active one', async () => {
    const strict = await checkoutPortal(service, account, { requireSignedIntake: true });
    const errorOf = (reply: Reply) => new URL(reply.location, PUBLIC).searchParams.get('error');
    const fields = intakeOf(strict, { exp: inSeconds(600), nonce: nonce() });
    expect(errorOf(await payer().intake(fields))).toBe('VALIDATION_ERROR');
    expect(errorOf(await payer().intake(signedFields(strict.signingSecret, 'link', INTAKE_ADDRESS, fields)))).toBe('VALIDATION_ERROR');
    const good = signedFields(strict.signingSecret, 'intake', INTAKE_ADDRESS, fields);
    expect(errorOf(await payer().intake({ ...good, amount_cents: '1' }))).toBe('VALIDATION_ERROR');
    expect(errorOf(await payer().intake({ ...good, added: '1' }))).toBe('VALIDATION_ERROR');
    // Our signature of the answer must not vouch for what a stranger sent.
    for (const stranger of [fields, { ...good, amount_cents: '1' }, { ...good, state: 'forged', reference_id: 'forged' }]) {
      const { searchParams } = new URL((await payer().intake(stranger)).location, PUBLIC);
      expect([searchParams.get('state'), searchParams.get('reference_id'), searchParams.has('sig')]).toEqual([null, null, true]);
    }
    // The stranger's own query does not come back either. Only our parameters do.
    const forged = new URL((await payer().intake({ ...fields, cancel_url: `${fields.cancel_url}?bill=forged` })).location, PUBLIC);
    expect([...forged.searchParams.keys()]).toEqual(['result', 'error', 't', 'sig']);
    expect((await payer().intake(good)).location).toMatch(/^\/checkout\/cs_/);
    // The signature of a JSON body covers each top-level value as text, and the lines as in RFC 8785.
    const json = { ...fields, nonce: nonce(), amount_cents: 12_500, line_items: LINES };
    const asText: Fields = {
      ...fields,
      nonce: json.nonce,
      amount_cents: '12500',
      line_items:
        '[{"amount_cents":10000,"description":"Water","reference_id":"WTR-2041"},{"amount_cents":2500,"description":"Sewer","metadata":{"ward":4},"reference_id":"WTR-2042"}]',
    };
    const sig = signatureOf(strict.signingSecret, 'intake', INTAKE_ADDRESS, Object.entries(asText));
    const body = JSON.stringify({ ...json, sig });
    expect((await payer().send(INTAKE, { method: 'POST', body, headers: { 'content-type': 'application/json' } })).location).toMatch(
      /\/checkout\/cs_/,
    );

    const staged = await service.administer(service.admin.stageSigningSecret(strict.portalId));
    const next = signedFields(staged.signingSecret, 'intake', INTAKE_ADDRESS, { ...fields, nonce: nonce() });
    const { one, id } = await paidNow(next);
    await told(one, id, 'done', strict.signingSecret);
    await service.administer(service.admin.activateSigningSecret(strict.portalId));
    await told(one, id, 'done', staged.signingSecret);
    expect(errorOf(await payer().intake(signedFields(strict.signingSecret, 'intake', INTAKE_ADDRESS, { ...fields, nonce: nonce() })))).toBe(
      'VALIDATION_ERROR',
    );
  });

  test('a signed form without nonce and exp starts another checkout at each post, and pays for none', async () => {
    const fields = signedFields(portal.signingSecret, 'intake', INTAKE_ADDRESS, intakeOf(portal));
    const before = await charges();
    const replies = await Promise.all(Array.from({ length: 3 }, () => payer().intake(fields)));
    for (const { location } of replies) expect(location).toMatch(/^\/checkout\/cs_/);
    expect(new Set(replies.map(({ location }) => location)).size).toBe(3);
    expect(await charges()).toBe(before);
  });
});

describe('launch link', () => {
  test('starts one checkout; opened again it resumes it, then says that it is paid: never a second charge', async () => {
    const fields = link();
    const one = payer();
    const first = await one.send(linkPath(fields));
    expect(first.location).toMatch(/^\/checkout\/cs_[\w-]{32}$/);
    const id = first.location.split('/').at(-1)!;
    const other = payer();
    const again = await other.send(linkPath(fields));
    expect(again.location).toBe(first.location);
    expect(again.setCookie).toHaveLength(1);
    const before = await charges();
    expect((await other.pay(id)).location).toBe(`${first.location}/receipt`);
    for (const visitor of [one, other, payer()]) {
      const reply = await visitor.send(linkPath(fields));
      expect([reply.status, reply.location, reply.setCookie]).toEqual([303, `${first.location}/paid`, []]);
      expect(textOf((await visitor.send(reply.location)).text)).toContain('This is already paid');
    }
    const confirmation = (await told(other, id, 'done')).confirmation_number as string;
    expect(textOf((await other.send(`/checkout/${id}/paid`)).text)).toContain(confirmation);
    const stranger = textOf((await payer().send(`/checkout/${id}/paid`)).text);
    expect(stranger).toContain(`…${confirmation.replaceAll('-', '').slice(-4)}`);
    expect(stranger).not.toContain(confirmation);
    expect((await charges()) - before).toBe(2); // principal and fee, once
  });
  test('ten at once start one checkout', async () => {
    const fields = link();
    const replies = await Promise.all(Array.from({ length: 10 }, () => payer().send(linkPath(fields))));
    expect(new Set(replies.map(({ location }) => location)).size).toBe(1);
    expect(await events(replies[0]!.location.split('/').at(-1)!)).toEqual(['CheckoutStarted']);
  });
  test('a session past its hour goes on while the link is valid; one whose partner got a result does not', async () => {
    const fields = link({ exp: inSeconds(5 * 3_600) });
    const one = payer();
    const { location } = await one.send(linkPath(fields));
    service.clock.advance(61 * 60_000);
    expect(textOf((await one.send(location)).text)).toContain('This page has expired');
    expect((await one.send(linkPath(fields))).location).toBe(location);
    expect((await one.send(location)).text).toContain('id="pay"');
    service.clock.advance(61 * 60_000);
    const id = location.split('/').at(-1)!;
    expect(await told(one, id, 'cancel')).toMatchObject({ result: 'expired', checkout_id: id });
    expect(textOf((await one.open(linkPath(fields))).text)).toContain('This page has expired');
    expect(await events(id)).toEqual(['CheckoutStarted', 'CheckoutExtended', 'CheckoutExpired']);
  });
  test.each<[string, () => Fields]>([
    ['without sig', () => intakeOf(portal, { nonce: nonce(), exp: inSeconds(60) })],
    ['without nonce', () => link({ nonce: undefined })],
    ['without exp', () => link({ exp: undefined })],
    ['expired', () => link({ exp: inSeconds(-1) })],
    ['more than 7 days ahead', () => link({ exp: inSeconds(7 * 86_400 + 60) })],
    [
      'signed for the form',
      () => signedFields(portal.signingSecret, 'intake', LINK_ADDRESS, intakeOf(portal, { nonce: nonce(), exp: inSeconds(60) })),
    ],
    [
      'signed for another address',
      () => signedFields(portal.signingSecret, 'link', INTAKE_ADDRESS, intakeOf(portal, { nonce: nonce(), exp: inSeconds(60) })),
    ],
    ['signed with another secret', () => link({}, 'psec_test_other')],
    ['with an amount that was changed', () => ({ ...link(), amount_cents: '12400' })],
    ['with something added', () => ({ ...link(), added: '1' })],
  ])('%s: back with VALIDATION_ERROR', async (_, fields) => {
    const reply = await payer().send(linkPath(fields()));
    expect(readReturn(portal.signingSecret, 'cancel', reply.location)).toMatchObject({ right: true, result: 'failed', error: 'VALIDATION_ERROR' });
  });
  test('a nonce with other content is refused; so is one with the same under another exp', async () => {
    const fields = link();
    await payer().send(linkPath(fields));
    const errorOf = async (more: Record<string, string>) => new URL((await payer().send(linkPath(link({ nonce: fields.nonce!, exp: fields.exp!, ...more })))).location, PUBLIC).searchParams.get('error'); // prettier-ignore
    expect(await errorOf({ reference_id: 'CASE-8' })).toBe('VALIDATION_ERROR');
    expect(await errorOf({ exp: inSeconds(9_000) })).toBe('VALIDATION_ERROR');
    expect(await errorOf({})).toBeNull();
    const posted = await payer().intake(intakeOf(portal, { nonce: fields.nonce! }));
    expect(new URL(posted.location).searchParams.get('error')).toBe('VALIDATION_ERROR');
  });
});

describe('paying', () => {
  test.each([
    [CARD.declined, 'Your card was declined. Try another card'],
    ['4000 0000 0000 9995', 'not enough money'],
    ['4000 0000 0000 6975', 'limit of the card'],
    ['4000 0000 0000 0069', 'says that it has expired'],
    ['4000 0000 0000 0127', 'security code does not match'],
    ['4000 0077 7000 4619', 'ZIP code does not match'],
    [CARD.feeDeclined, 'Your card was declined'],
    [CARD.gatewayError, 'did not go through'],
    ['4000 0077 7000 5129', 'did not go through'],
  ])('%s: open again with the reason; another card pays', async (number, message) => {
    const { one, id } = await begun();
    const refused = await one.pay(id, { card_number: number });
    expect([refused.status, refused.location]).toEqual([303, `/checkout/${id}`]);
    const page = await one.send(refused.location);
    expect(textOf(page.text)).toContain(message);
    expect(textOf(page.text)).toContain('No money has been taken.');
    expect(page.text).toContain('<title>Error: ');
    expect((await one.pay(id)).location).toBe(`/checkout/${id}/receipt`);
    expect(await told(one, id, 'done')).toMatchObject({ result: 'paid' });
    expect(await events(id)).toEqual(['CheckoutStarted', 'AttemptStarted', 'AttemptDeclined', 'AttemptStarted', 'CheckoutPaid']);
  });

  test.each([CARD.unreadable, CARD.neverReached])(
    '%s: outcome unknown; the page waits without a way to pay; recovery decides; open again',
    async (number) => {
      const { one, id } = await begun();
      const before = await charges();
      expect((await one.pay(id, { card_number: number })).location).toBe(`/checkout/${id}/processing`);
      const waiting = await one.send(`/checkout/${id}/processing`);
      expect(waiting.text).toContain('<noscript><meta http-equiv="refresh" content="3"');
      expect(waiting.text).not.toMatch(/<form|\/done/);
      // While the outcome is unknown, every other page of the session redirects to the waiting page.
      for (const path of ['', '/receipt', '/done', '/cancel', '/paid'])
        expect((await one.open(`/checkout/${id}${path}`)).path).toBe(`/checkout/${id}/processing`);
      expect((await one.submit(id, { ...CARD_FORM, attempt_id: 'x' })).location).toBe(`/checkout/${id}/processing`);
      const paymentId = await paymentOfSession(id);
      await service.recover(paymentId);
      expect((await one.send(`/checkout/${id}/processing`)).location).toBe(`/checkout/${id}`);
      expect(textOf((await one.send(`/checkout/${id}`)).text)).toContain('No money has been taken.');
      expect((await one.pay(id)).location).toBe(`/checkout/${id}/receipt`);
      expect((await charges()) - before).toBe(2);
      expect(await account.client.status(paymentId)).toBe('voided');
    },
  );

  test('left unknown: after 30 s with a reference and Done; the session takes no further card, with any outcome', async () => {
    const { one, id } = await begun();
    await one.pay(id, { card_number: CARD.unreadable });
    service.clock.advance(31_000);
    const late = await one.send(`/checkout/${id}/processing`);
    const paymentId = await paymentOfSession(id);
    expect(textOf(late.text)).toContain(paymentId);
    expect(await told(one, id, 'done')).toMatchObject({
      result: 'unknown',
      checkout_id: id,
      payment_id: paymentId,
      amount_cents: '12500',
      service_fee_cents: '363',
      total_charged_cents: '12863',
      reference_id: 'CASE-7',
      state: 'xyz',
    });
    await service.recover(paymentId);
    expect(textOf((await one.open(`/checkout/${id}/processing`)).text)).toContain('Payment cancelled');
    expect((await one.submit(id, { ...CARD_FORM, attempt_id: 'x' })).location).toBe(`/checkout/${id}`);
    expect(await told(one, id, 'cancel')).toMatchObject({ result: 'failed', error: 'PAYMENT_TIMEOUT' });
    expect(await events(id)).toEqual(['CheckoutStarted', 'AttemptStarted', 'OutcomeUnknown', 'PayerLeft', 'AttemptDeclined']);
  });

  test('the same form twice, at once and one after the other: one charge', async () => {
    const before = await charges();
    const { one, id } = await begun();
    const form = { ...formOf((await one.send(`/checkout/${id}`)).text), ...CARD_FORM };
    const replies = await Promise.all([one.submit(id, form), one.submit(id, form), one.submit(id, form)]);
    for (const { status, location } of replies) {
      expect(status).toBe(303);
      expect(location).toMatch(new RegExp(`^/checkout/${id}(/processing|/receipt)?$`));
    }
    expect((await one.open(`/checkout/${id}`)).path).toBe(`/checkout/${id}/receipt`);
    expect((await one.submit(id, form)).location).toBe(`/checkout/${id}/receipt`);
    expect((await charges()) - before).toBe(2);
    expect(await events(id)).toEqual(['CheckoutStarted', 'AttemptStarted', 'CheckoutPaid']);
  });
  test('two tabs, two forms, two cards at once: one charge', async () => {
    const before = await charges();
    const { one, id } = await begun();
    const tabs = [one, one.tab()];
    const forms = await Promise.all(tabs.map(async (tab) => formOf((await tab.send(`/checkout/${id}`)).text)));
    expect(forms[0]!.attempt_id).not.toBe(forms[1]!.attempt_id);
    await Promise.all([
      tabs[0]!.submit(id, { ...forms[0], ...CARD_FORM }),
      tabs[1]!.submit(id, { ...forms[1], ...CARD_FORM, card_number: '5555 5555 5555 4444' }),
    ]);
    for (const tab of tabs) expect((await tab.open(`/checkout/${id}`)).path).toBe(`/checkout/${id}/receipt`);
    expect((await charges()) - before).toBe(2);
  });
  test('a declined form sent again charges nothing and shows the true state', async () => {
    const { one, id } = await begun();
    const form = formOf((await one.send(`/checkout/${id}`)).text);
    await one.submit(id, { ...form, ...CARD_FORM, card_number: CARD.declined });
    const again = await one.submit(id, { ...form, ...CARD_FORM });
    expect([again.status, again.location]).toEqual([303, `/checkout/${id}`]);
    expect(await events(id)).toEqual(['CheckoutStarted', 'AttemptStarted', 'AttemptDeclined']);
  });
  test('an attempt id of another session, or one that was made up, is no attempt: the gateway must never see it', async () => {
    const [first, second] = [await begun(), await begun()];
    const foreign = formOf((await first.one.send(`/checkout/${first.id}`)).text);
    await first.one.submit(first.id, { ...foreign, ...CARD_FORM });
    const own = formOf((await second.one.send(`/checkout/${second.id}`)).text);
    for (const forged of [foreign, { ...own, attempt_id: foreign.attempt_id! }, { ...own, csrf: foreign.csrf! }, { ...own, csrf: '' }]) {
      const reply = await second.one.submit(second.id, { ...forged, ...CARD_FORM });
      expect(reply.status).toBe(403);
      expect(textOf(reply.text)).toContain('This page was out of date. Please enter your card again. No money has been taken.');
      expect(reply.text.replace(/Try card [\d ]+/, '')).not.toMatch(/4242/);
    }
    expect(await events(second.id)).toEqual(['CheckoutStarted']);
  });
  test('the fee changed between page and submit: asked again, with the new total; nothing was charged', async () => {
    const own = await checkoutPortal(service, account);
    const before = await charges();
    const { one, id } = await begun(intakeOf(own));
    const form = formOf((await one.send(`/checkout/${id}`)).text);
    await service.administer(service.admin.changeFee(own.portalId, { flatCents: 99 }));
    const asked = await one.submit(id, { ...form, ...CARD_FORM, first_name: 'Ada' });
    expect(asked.status).toBe(409);
    expect(textOf(asked.text)).toContain('The service fee changed while you were here.');
    expect(textOf(asked.text)).toContain('Pay $129.12');
    const again = formOf(asked.text);
    expect(again).toMatchObject({ first_name: 'Ada', card_number: '', security_code: '', expiry: '', quoted_total_cents: '12912' });
    expect(await charges()).toBe(before);
    expect(await events(id)).toEqual(['CheckoutStarted']);
    await one.submit(id, { ...again, ...CARD_FORM });
    expect(await told(one, id, 'done', own.signingSecret)).toMatchObject({ total_charged_cents: '12912' });
  });
  test('a fee that changes after the look at it is refused by the charge itself', async () => {
    const { checkout: ports } = service.services;
    const own = await checkoutPortal(service, account);
    const { id, one } = await begun(intakeOf(own));
    const { pay } = await import('#checkout');
    const { Secret } = await import('#payments');
    const session = (await ports.sessions.load(id))!;
    const attempt = {
      attemptId: ports.payments.ids.uuid(),
      quotedTotalCents: 12_862,
      instrument: { type: 'card' as const, number: new Secret('4242424242424242'), expiry: { month: 12, year: 2099 }, cvv: new Secret('123') },
      payer: {},
      gateway: 'simulator',
    };
    const after = await pay(ports, session, attempt, { actor: { type: 'payer', id }, correlationId: 'spec' });
    expect(after.checkout).toMatchObject({ phase: 'open', lastRefusal: { code: 'PAYMENT_NOT_ALLOWED', declineCode: 'fee_changed' } });
    expect(textOf((await one.send(`/checkout/${id}`)).text)).toContain('The service fee changed while you were here.');
  });
  test('a payment that the portal forbids by now is refused, and nothing was charged', async () => {
    const own = await checkoutPortal(service, account);
    const { one, id } = await begun(intakeOf(own));
    await service.administer(service.admin.setRules(own.portalId, { brands: ['mastercard'] }));
    expect((await one.pay(id)).location).toBe(`/checkout/${id}`);
    expect(textOf((await one.send(`/checkout/${id}`)).text)).toContain('does not take this payment or this kind of card online');
    const signed = await begun(signedFields(own.signingSecret, 'intake', INTAKE_ADDRESS, intakeOf(own)));
    await service.administer(service.admin.restrictCase({ portalId: own.portalId, referenceId: 'CASE-7', kind: 'block', until: null, reason: null }));
    const shownAfter = async (session: { one: Payer; id: string }) => {
      await session.one.pay(session.id, { card_number: '5555 5555 5555 4444' });
      return textOf((await session.one.send(`/checkout/${session.id}`)).text);
    };
    expect(await shownAfter(signed)).toContain('This case cannot be paid online.');
    // Without a signature, the page does not tell that the case is blocked.
    expect(await shownAfter({ one, id })).toContain('does not take this payment or this kind of card online');
    await service.administer(service.admin.configureCheckout(own.portalId, { enabled: false }));
    expect((await one.pay(id)).status).toBe(403);
    expect(await events(id)).toEqual(['CheckoutStarted', 'AttemptStarted', 'AttemptDeclined', 'AttemptStarted', 'AttemptDeclined']);
    const { pool } = service.services;
    const refusals = async () => (await listRefusals(pool, { portalId: own.portalId, referenceId: 'CASE-7', from: null, to: null, after: null, limit: 10 })).refusals; // prettier-ignore
    await eventually(async () => (await refusals()).length >= 3);
    expect((await refusals()).map(({ code }) => code)).toEqual(['PAYMENT_BLOCKED', 'PAYMENT_BLOCKED', 'PAYMENT_NOT_ALLOWED']);
  });
  test('ten attempts, then none', async () => {
    const { one, id } = await begun();
    for (let number = 0; number < 10; number++) expect((await one.pay(id, { card_number: CARD.declined })).location).toBe(`/checkout/${id}`);
    expect(textOf((await one.send(`/checkout/${id}`)).text)).toContain('Too many attempts');
    expect((await one.submit(id, { ...CARD_FORM, attempt_id: 'x' })).location).toBe(`/checkout/${id}`);
    expect(await told(one, id, 'cancel')).toMatchObject({ result: 'failed', error: 'PAYMENT_DECLINED' });
  });

  test('mistakes are shown beside their fields, 422; nothing of the card comes back, and nothing reached the gateway', async () => {
    const before = await charges();
    const { one, id } = await begun();
    const values: [Record<string, string>, RegExp[]][] = [
      [{ card_number: '4242 4242 4242 4241' }, [/Enter the number on the front/]],
      [{ card_number: '' }, [/Enter the number on the front/]],
      [{ expiry: '13/30' }, [/Enter the expiry date as MM\/YY/]],
      [{ expiry: expiryIn(-2) }, [/This card has expired/]],
      [{ security_code: '12' }, [/Enter the 3 or 4 digits/]],
      [{ email: 'nobody' }, [/Enter an e-mail address/]],
      [{ last_name: 'x'.repeat(101) }, [/This is too long/]],
      [{ first_name: '4242 4242 4242 4242' }, [/must not hold a card number/]],
      [{ email: '4242424242424242' }, [/must not hold a card number/]],
      [{ card_number: '1', expiry: '1', security_code: '1', email: '1' }, [/number on the front/, /MM\/YY/, /3 or 4 digits/, /e-mail/]],
    ];
    for (const [wrong, messages] of values) {
      const form = formOf((await one.send(`/checkout/${id}`)).text);
      const reply = await one.submit(id, { ...form, ...CARD_FORM, security_code: '7391', last_name: 'Lovelace', ...wrong });
      expect(reply.status).toBe(422);
      for (const message of messages) expect(textOf(reply.text)).toMatch(message);
      expect(reply.text.replace(/Try card 4242 4242 4242 4242/, '')).not.toMatch(/4242|7391/);
      const shown = formOf(reply.text);
      expect(shown).toMatchObject({ card_number: '', expiry: '', security_code: '' });
      if (!('last_name' in wrong)) expect(shown.last_name).toBe('Lovelace');
      expect(reply.text).toContain('aria-invalid="true"');
      expect(reply.text).toContain('role="alert"');
    }
    expect(await charges()).toBe(before);
    expect(await events(id)).toEqual(['CheckoutStarted']);
  });
  test.each(['0430', '04/30', '04 / 30', '04/2030'])('an expiry written as %s is understood', async (expiry) => {
    const { one, id } = await begun();
    expect((await one.pay(id, { expiry, card_number: '4242-4242-4242-4242' })).location).toBe(`/checkout/${id}/receipt`);
  });
});

const paymentOfSession = async (id: string): Promise<string> => {
  const session = await service.services.checkout.sessions.load(id);
  return (session!.checkout as { attempt: { paymentId: string } }).attempt.paymentId;
};

describe('the guard of every route', () => {
  const ROUTES = ['', '/processing', '/receipt', '/done', '/cancel', '/paid'];
  test('paid: everything leads to the receipt, refreshed as often as one likes; Done leads back', async () => {
    const { one, id } = await paidNow();
    for (const path of ['', '/processing', '/receipt', '/cancel', '/receipt'])
      expect((await one.open(`/checkout/${id}${path}`)).path).toBe(`/checkout/${id}/receipt`);
    const [first, second] = [await told(one, id, 'done'), await told(one, id, 'done')];
    expect([second.checkout_id, second.payment_id]).toEqual([first.checkout_id, first.payment_id]);
    expect(await events(id)).toEqual(['CheckoutStarted', 'AttemptStarted', 'CheckoutPaid']);
  });
  test('the receipt says when the bank did not send the money (C73)', async () => {
    const { one, id } = await begun();
    await one.pay(id, { card_number: CARD.settlementRejected });
    const receipt = async () => textOf((await one.open(`/checkout/${id}/receipt`)).text);
    const said = 'The bank did not send this money to the agency. Please contact the agency.';
    expect(await receipt()).not.toContain(said);
    await service.simulator.closeBatches();
    await recordSettlements(service.services.settlement, AbortSignal.timeout(20_000));
    expect(await receipt()).toContain(said);
  });
  test('cancelled: stays so, and leads back the same way', async () => {
    const { one, id } = await begun();
    expect(await told(one, id, 'cancel')).toMatchObject({ result: 'cancelled', checkout_id: id, reference_id: 'CASE-7', state: 'xyz' });
    expect(textOf((await one.open(`/checkout/${id}`)).text)).toContain('Payment cancelled');
    for (const path of ['/processing', '/receipt', '/done', '/paid']) expect((await one.open(`/checkout/${id}${path}`)).path).toBe(`/checkout/${id}`);
    await told(one, id, 'cancel');
    expect((await one.submit(id, { ...CARD_FORM, attempt_id: 'x' })).location).toBe(`/checkout/${id}`);
  });
  test('a browser without the cookie sees nothing of the payer and can do nothing, before and after', async () => {
    const { one, id } = await begun(intakeOf(portal, { payer_last_name: 'Lovelace' }));
    for (const path of ROUTES) {
      const { status, text } = await payer().open(`/checkout/${id}${path}`);
      expect([path, status]).toEqual([path, 403]);
      expect(text).not.toMatch(/Lovelace|WTR-2041|128\.63/);
    }
    const form = formOf((await one.send(`/checkout/${id}`)).text);
    expect((await payer().submit(id, { ...form, ...CARD_FORM })).status).toBe(403);
    await one.pay(id);
    for (const path of ['', '/processing', '/receipt', '/done', '/cancel']) {
      const { status, text } = await payer().open(`/checkout/${id}${path}`);
      expect([path, status]).toEqual([path, 200]);
      expect(textOf(text)).toMatch(/This payment is complete .*…[0-9A-Z]{4}/);
      expect(text).not.toMatch(/Lovelace|WTR-2041|128\.63|4242 4242 4242 4242.*ending/);
    }
  });
  test('a cookie of another session, or one that was changed, is none', async () => {
    const [first, second] = [await begun(), await begun()];
    const cookie = [...first.one.cookies.values()][0]!;
    for (const value of [cookie, `${cookie}x`, cookie.replace(/.$/, (last) => (last === 'A' ? 'B' : 'A')), '__Secure-co=', 'co=1'])
      expect((await payer().send(`/checkout/${second.id}`, { headers: { cookie: value } })).status).toBe(403);
    // An attacker's cookie with the same name does no harm.
    expect((await payer().send(`/checkout/${first.id}`, { headers: { cookie: `__Secure-co=evil; ${cookie}` } })).status).toBe(200);
  });
  test('an unknown session is a page, 404; another method is a page, 405', async () => {
    for (const path of ['/checkout/cs_x', `/checkout/cs_${'A'.repeat(32)}`, '/checkout/x/y/z', '/checkout', '/checkout/assets/nothing.css']) {
      const reply = await payer().send(path);
      expect([path, reply.status, reply.headers['content-type']]).toEqual([path, 404, 'text/html; charset=utf-8']);
      expect(textOf(reply.text)).toContain('There is no such payment page');
    }
    expect((await payer().send('/checkout/error', { method: 'POST' })).status).toBe(405);
    expect((await payer().send(INTAKE)).status).toBe(405);
    // A HEAD request does not open the session and does not leave it.
    const { one, id } = await begun();
    for (const path of ['', '/cancel', '/done']) expect((await one.send(`/checkout/${id}${path}`, { method: 'HEAD' })).status).toBe(405);
    expect(await events(id)).toEqual(['CheckoutStarted']);
  });
  test('no GET of a page appends an event, in any state of a session, and a prefetch gets 503', async () => {
    const declined = { card_number: CARD.declined };
    const unknown = { card_number: CARD.unreadable };
    const states: Record<string, (one: Payer, id: string) => Promise<unknown>> = {
      lapsed: () => Promise.resolve(),
      expired: (one, id) => one.leave(id, 'cancel'),
      'unknown for long': (one, id) => one.pay(id, unknown),
      'left unknown': async (one, id) => {
        await one.pay(id, unknown);
        service.clock.advance(31_000);
        await told(one, id, 'done');
      },
      unknown: (one, id) => one.pay(id, unknown),
      paid: (one, id) => one.pay(id),
      cancelled: (one, id) => told(one, id, 'cancel'),
      declined: (one, id) => one.pay(id, declined),
      'attempts used up': async (one, id) => {
        for (let number = 0; number < 10; number++) await one.pay(id, declined);
      },
      open: () => Promise.resolve(),
    };
    // The states of a past hour come first.
    const past = await Promise.all([begun(), begun()]);
    service.clock.advance(61 * 60_000);
    const sessions = [];
    for (const [state, reach] of Object.entries(states)) {
      const { one, id } = past.shift() ?? (await begun());
      await reach(one, id);
      sessions.push({ state, one, id, before: await events(id) });
    }
    // Derived from the controller, so that no route is forgotten.
    const paths = Object.getOwnPropertyNames(CheckoutController.prototype).flatMap((name): string[] => {
      const route = Reflect.get(CheckoutController.prototype, name) as object;
      return Reflect.getMetadata('method', route) === RequestMethod.GET ? [Reflect.getMetadata('path', route) as string] : [];
    });
    expect(paths).toEqual(expect.arrayContaining([':id', ':id/cancel', ':id/done']));
    for (const { state, one, id, before } of sessions) {
      for (const path of paths)
        for (const browser of [one, payer()]) {
          const asked = `/checkout/${path.replace(':id', id)}`;
          for (const purpose of ['prefetch', 'prefetch;prerender'])
            expect((await browser.send(asked, { headers: { 'sec-purpose': purpose } })).status).toBe(503);
          await browser.send(asked);
        }
      expect([state, await events(id)]).toEqual([state, before]);
    }
    for (const { state, id } of sessions) if (state.includes('unknown')) await service.recover(await paymentOfSession(id));
  });
  test('Cancel: a GET shows one button; only the form of this browser and this page leaves', async () => {
    const { one, id } = await begun();
    const asked = await one.send(`/checkout/${id}/cancel`);
    expect([asked.status, asked.text.match(/<button/g)?.length]).toEqual([200, 1]);
    expect(textOf(asked.text)).toContain('Cancel this payment?');
    const fields = formOf(asked.text, `action="/checkout/${id}/cancel"`);
    const post = (browser: Payer, sent: Fields, headers = {}) =>
      browser.send(`/checkout/${id}/cancel`, { method: 'POST', body: formText(sent), headers });
    expect((await post(one, fields, { origin: SHOP, 'sec-fetch-site': 'cross-site' })).status).toBe(403);
    expect((await post(payer(), fields)).status).toBe(403);
    expect((await post(one, { ...fields, csrf: 'x' })).location).toBe(`/checkout/${id}/cancel`);
    expect(await events(id)).toEqual(['CheckoutStarted']);
    const left = await post(one, fields);
    expect([left.status, left.text.includes(`content="0;url=/checkout/${id}/cancel"`)]).toEqual([200, true]);
    expect(await events(id)).toEqual(['CheckoutStarted', 'CheckoutCancelled']);
    expect(readReturn(portal.signingSecret, 'cancel', (await one.send(`/checkout/${id}/cancel`)).location)).toMatchObject({ right: true });
  });
  test('the allow-list is narrowed while the payer is on the page: no redirect to that address, and the receipt stays', async () => {
    const narrowed = await checkoutPortal(service, account);
    const [paid, open, cancelled] = [await paidNow(intakeOf(narrowed)), await begun(intakeOf(narrowed)), await begun(intakeOf(narrowed))];
    expect((await cancelled.one.leave(cancelled.id, 'cancel')).location).toContain(SHOP);
    await service.administer(service.admin.configureCheckout(narrowed.portalId, { enabled: true, allow: ['https://other.test'] }));
    expect((await paid.one.open(`/checkout/${paid.id}/done`)).path).toBe(`/checkout/${paid.id}/receipt`);
    const receipt = await paid.one.send(`/checkout/${paid.id}/receipt`);
    expect(textOf(receipt.text)).toContain('Payment complete');
    expect(receipt.text).not.toContain(`/checkout/${paid.id}/done`);
    expect((await open.one.leave(open.id, 'cancel')).location).toBe(`/checkout/${open.id}`);
    for (const { one, id } of [open, cancelled]) {
      const left = await one.open(`/checkout/${id}/cancel`);
      expect([left.status, left.path]).toEqual([200, `/checkout/${id}`]);
      expect(left.text).not.toMatch(/\/cancel"/);
    }
  });
  test('more time: an hour from now, for the form of this browser only', async () => {
    const { one, id } = await begun();
    const form = formOf((await one.send(`/checkout/${id}`)).text);
    const asked = { attempt_id: form.attempt_id!, csrf: form.csrf! };
    service.clock.advance(30 * 60_000);
    const extend = (fields: Fields, headers = {}) => one.send(`/checkout/${id}/extend`, { method: 'POST', body: formText(fields), headers });
    expect((await extend({ ...asked, csrf: 'x' }, { accept: 'application/json' })).status).toBe(303);
    const extended = await extend(asked, { accept: 'application/json' });
    expect(JSON.parse(extended.text)).toEqual({ expiresAt: expect.stringMatching(/Z$/) });
    service.clock.advance(45 * 60_000);
    expect((await one.send(`/checkout/${id}`)).text).toContain('id="pay"');
    expect((await one.pay(id)).location).toBe(`/checkout/${id}/receipt`);
  });
});

describe('security', () => {
  const HEADERS = {
    'content-security-policy':
      "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    'referrer-policy': 'same-origin',
    'x-frame-options': 'DENY',
    'cache-control': 'no-store',
    'x-content-type-options': 'nosniff',
    'cross-origin-opener-policy': 'same-origin',
    'permissions-policy': 'camera=(), microphone=(), geolocation=()',
    'x-robots-tag': 'noindex',
    'strict-transport-security': 'max-age=63072000; includeSubDomains',
  };
  test('every answer below our paths has the headers', async () => {
    const { one, id } = await paidNow();
    const replies = [
      await payer().intake(intakeOf(portal)),
      await payer().intake({}),
      await payer().send(`${INTAKE}/link`),
      await payer().send('/checkout/error'),
      await payer().send(`/checkout/${id}`),
      await payer().send('/checkout/cs_x'),
      await payer().send('/checkout/error', { method: 'DELETE' }),
      await payer().send('/%63heckout/error'),
      await payer().send(`/%63heckout/${id}`, { method: 'HEAD' }),
      await payer().send(`/%63heckout/${id}`, { method: 'PUT' }),
      ...(await Promise.all(['/%63heckout', '/checkout/%ff', '/checkout/%', '/%ff'].map((path) => payer().send(path)))),
      ...(await Promise.all(['', '/receipt', '/done', '/paid', '/cancel'].map((path) => one.send(`/checkout/${id}${path}`)))),
    ];
    for (const { headers } of replies) expect(headers).toMatchObject(HEADERS);
  });
  test('no page has an inline script or style, or anything of another site', async () => {
    const { one, id } = await begun();
    const page = await one.send(`/checkout/${id}`);
    expect(page.text).not.toMatch(/<style|\sstyle=|\son\w+=|javascript:|https?:\/\//);
    expect([...page.text.matchAll(/<script([^>]*)>/g)].map(([, attributes]) => attributes)).toEqual([
      expect.stringMatching(/^ src="\/checkout\/assets\/checkout-[\w-]{12}\.js" defer$/),
    ]);
    const assets = [...page.text.matchAll(/(?:href|src)="(\/checkout\/assets\/[^"]+)"/g)].map(([, path]) => path!);
    expect(assets).toHaveLength(3);
    for (const path of assets) {
      const asset = await payer().send(path);
      expect([asset.status, asset.headers['cache-control']]).toEqual([200, 'public, max-age=31536000, immutable']);
      expect(asset.headers['x-content-type-options']).toBe('nosniff');
      expect(asset.text).not.toMatch(/https?:\/\/(?!www\.w3\.org)|@import|url\(/);
    }
  });
  test('text of a partner is text', async () => {
    const evil = '<script>alert(1)</script>"\'><img src=x onerror=alert(1)>';
    const own = await checkoutPortal(service, account, { agencyName: `A & B <i>${'x'}</i>` });
    const { one, id } = await begun(
      intakeOf(own, {
        line_items: JSON.stringify([{ amount_cents: 12_500, reference_id: evil, description: evil }]),
        payer_first_name: evil,
        reference_id: evil,
      }),
    );
    const page = await one.send(`/checkout/${id}`);
    expect(page.text).not.toMatch(/<script>|<img|<i>/);
    expect(formOf(page.text).first_name).toBe(evil);
    await one.pay(id);
    expect((await one.send(`/checkout/${id}/receipt`)).text).not.toMatch(/<script>|<img|<i>/);
  });
  test.each<[string, Readonly<Record<string, string | null>>]>([
    ['Origin of somebody else', { origin: 'https://evil.test', 'sec-fetch-site': 'cross-site' }],
    ['Origin of somebody else, an old browser', { origin: 'https://evil.test', 'sec-fetch-site': null }],
    ['Origin null', { origin: 'null', 'sec-fetch-site': null }],
    ['Origin null, said to be same-origin', { origin: 'null' }],
    ['no Origin', { origin: null }],
    ['our Origin, said to come from a neighbour', { 'sec-fetch-site': 'same-site' }],
    ['our Origin, said to be typed in', { 'sec-fetch-site': 'none' }],
    ['our host over http', { origin: 'http://pay.test' }],
    ['a body that is no form', { 'content-type': 'text/plain' }],
    ['JSON', { 'content-type': 'application/json' }],
  ])('a submit with %s does nothing', async (_, headers) => {
    const { one, id } = await begun();
    const form = formOf((await one.send(`/checkout/${id}`)).text);
    const reply = await one.submit(id, { ...form, ...CARD_FORM }, { headers });
    expect(reply.status).toBe(403);
    expect(textOf(reply.text)).toContain('This did not come from our page');
    expect(reply.text.replace(/Try card [\d ]+/, '')).not.toContain('4242');
    expect(await events(id)).toEqual(['CheckoutStarted']);
  });
  test('bodies that cannot be read end on a page, without the card', async () => {
    const { one, id } = await begun();
    for (const body of [
      'card_number=4242424242424242&card_number=4242424242424242',
      'card_number=%ff4242424242424242',
      '%00=4242424242424242',
      ''.padEnd(300_000, '4'),
    ]) {
      const reply = await one.send(`/checkout/${id}/pay`, { method: 'POST', body });
      expect([400, 413]).toContain(reply.status);
      expect(reply.headers['content-type']).toBe('text/html; charset=utf-8');
      expect(reply.text).not.toMatch(/4242|stack|Error:/);
    }
    expect(await events(id)).toEqual(['CheckoutStarted']);
  });
  test('card data is in no event, no row and no log', async () => {
    const [number, code] = ['4000007770000000205', '7391'];
    const { one, id } = await begun();
    await one.pay(id, { card_number: CARD.declined, security_code: code });
    expect((await one.pay(id, { card_number: number, security_code: code, first_name: 'Ada' })).location).toMatch(/receipt$/);
    const log: unknown[] = [];
    for await (const page of service.services.store.readAll(null)) log.push(...page.map(({ data, meta }) => [data, meta]));
    const sinks = [JSON.stringify(log), service.log.join('')];
    for (const table of ['checkout_unfinished', 'checkout_intake', 'payment_list']) {
      const found = await service.services.pool.query<{ text: string }>(`select coalesce(string_agg(t::text, ''), '') as text from ${table} t`);
      sinks.push(found.rows[0]!.text);
    }
    for (const sink of sinks) {
      expect(sink).not.toContain(number);
      expect(sink).not.toContain('4000000000000002');
      expect(sink).not.toMatch(/"(security_code|card_number|cardNumber|expiry)"/);
    }
    expect(sinks[0]).toContain('attemptId');
  });
});

describe('the worker finishes sessions without a visitor', () => {
  test('a browser that was closed: the session gets its outcome without a visit', async () => {
    const { finishSessions, postgresUnfinishedRows } = await import('#checkout');
    const { checkout: ports, pool, readModels, store } = service.services;
    const { id, one } = await begun();
    await one.pay(id, { card_number: CARD.unreadable });
    await service.recover(await paymentOfSession(id));
    await readModels.of(checkoutUnfinishedModel).runUntil((await store.head())!, { timeoutMs: 10_000 });
    // The worker's own round may have finished the session already. Then this call does nothing.
    await finishSessions(ports, postgresUnfinishedRows(pool), { leftAloneMs: 0 });
    expect((await events(id)).at(-1)).toBe('AttemptDeclined');
    await readModels.of(checkoutUnfinishedModel).runUntil((await store.head())!, { timeoutMs: 10_000 });
    const { rows } = await pool.query('select 1 from checkout_unfinished where checkout_id = $1', [id]);
    expect(rows).toEqual([]);
  });
  test('staff resolve an unknown payment as charged: the session is paid, and Done says so', async () => {
    const { id, one } = await begun();
    await one.pay(id, { card_number: CARD.unresolvable });
    const paymentId = await paymentOfSession(id);
    const { streams, clock, ids } = service.services.checkout.payments;
    const owner = { actor: { type: 'staff', id: 'spec' } as const, correlationId: ids.uuid() };
    const loaded = await streams.load(paymentId);
    const charge = { confirmationNumber: 'ABCD-EFGH-JK', legs: legsOf(loaded.payment) };
    await service.services.store.append(`payment-${paymentId}`, loaded.revision!, [
      {
        id: ids.uuid(),
        type: 'PaymentResolved',
        v: 1,
        data: { as: 'succeeded', charge, evidence: 'statement', by: 'spec', forced: true },
        meta: { recordedAt: timestamp(clock.now()), ...owner },
      },
    ]);
    expect((await one.open(`/checkout/${id}/processing`)).path).toBe(`/checkout/${id}/receipt`);
    expect(await told(one, id, 'done')).toMatchObject({ result: 'paid', confirmation_number: 'ABCD-EFGH-JK' });
  });
});

const legsOf = (payment: unknown) =>
  (payment as { terms: { legs: { leg: string }[] } }).terms.legs.map(({ leg }) => ({
    leg,
    transactionId: `t-${leg}`,
    authCode: 'a',
    avs: null,
    cvv: null,
  }));

test('pages speak the language of the partner, else of the portal, else of the browser', async () => {
  const spanish = await checkoutPortal(service, account, { locale: 'es' });
  const languageOf = async (fields: Fields, accept = 'de') => {
    const one = payer();
    const id = await one.begin(fields);
    const { text } = await one.send(`/checkout/${id}`, { headers: { 'accept-language': accept } });
    return /<html lang="(\w+)"/.exec(text)![1];
  };
  expect(await languageOf(intakeOf(portal, { locale: 'es-MX' }))).toBe('es');
  expect(await languageOf(intakeOf(spanish))).toBe('es');
  expect(await languageOf(intakeOf(spanish, { locale: 'en' }))).toBe('en');
  expect(await languageOf(intakeOf(spanish, { locale: 'fr' }))).toBe('es');
  expect(await languageOf(intakeOf(portal), 'fr, es-US;q=0.8')).toBe('es');
  expect(await languageOf(intakeOf(portal))).toBe('en');
});

test('200 payers at once, each of whom sends his form twice: 200 charges', async () => {
  const before = await charges();
  const results = await Promise.all(
    Array.from({ length: 200 }, async () => {
      const { one, id } = await begun();
      const form = { ...formOf((await one.send(`/checkout/${id}`)).text), ...CARD_FORM };
      await Promise.all([one.submit(id, form), one.submit(id, form)]);
      return (await one.open(`/checkout/${id}`)).path === `/checkout/${id}/receipt`;
    }),
  );
  expect(results.filter(Boolean)).toHaveLength(200);
  expect((await charges()) - before).toBe(400); // principal and fee, once each
}, 600_000);

test('a database that is away: a page with a way back, and no internal text; then it goes on', async () => {
  const cut = await startService({ publicUrl: PUBLIC, cuttable: true });
  try {
    const own = await checkoutPortal(cut, await cut.account());
    const one = new Payer(cut.urls[0]!, PUBLIC);
    const id = await one.begin(intakeOf(own));
    const form = { ...formOf((await one.send(`/checkout/${id}`)).text), ...CARD_FORM };
    cut.database!.cut();
    const pay = await one.submit(id, form);
    expect([pay.status, pay.headers['content-type']]).toEqual([500, 'text/html; charset=utf-8']);
    expect(textOf(pay.text)).toContain('it knows whether you paid');
    expect(pay.text).toContain(`href="/checkout/${id}"`);
    expect(pay.text).not.toMatch(/4242|ECONN|postgres|stack/i);
    expect((await one.intake(intakeOf(own))).location).toMatch(/^\/checkout\/error\?code=INTERNAL_ERROR&ref=/);
    cut.database!.restore();
    await eventually(async () => (await one.send(`/checkout/${id}`)).status === 200);
    expect((await one.pay(id)).location).toBe(`/checkout/${id}/receipt`);
  } finally {
    await cut.stop();
  }
});

test('metrics count checkouts and calls to the processor, each by outcome', async () => {
  const { own } = createMetrics(service.services);
  const { one, id } = await begun();
  await one.pay(id, { card_number: CARD.declined });
  await one.pay(id);
  const unknown = await begun();
  await unknown.one.pay(unknown.id, { card_number: CARD.unreadable });
  await service.recover(await paymentOfSession(unknown.id));
  await unknown.one.send(`/checkout/${unknown.id}/processing`);
  const cancelled = await begun();
  await told(cancelled.one, cancelled.id, 'cancel');
  const figures = await figuresOf(own);
  const counts = (prefix: string) => Object.fromEntries([...figures].filter(([name]) => name.startsWith(prefix)).map(([name, value]) => [/"(\w+)"}$/.exec(name)![1], value])); // prettier-ignore
  expect(counts('payfold_checkout_outcomes_total')).toEqual({ started: 3, declined: 1, paid: 1, unknown: 1, voided: 1, cancelled: 1 });
  // The approved payment has two legs.
  expect(counts('payfold_gateway_call_duration_seconds_count{gateway="simulator",operation="charge"')).toEqual({
    declined: 1,
    approved: 2,
    unknown: 1,
  });
  expect(counts('payfold_gateway_call_duration_seconds_count{gateway="simulator",operation="void"')).toEqual({ approved: 1 });
});

test('the two intake endpoints are documented, the pages are not', () => {
  const { document } = service.judge;
  expect(Object.keys(document.paths).filter((path) => path.includes('payer') || path.includes('checkout'))).toEqual([INTAKE, `${INTAKE}/link`]);
  expect(Object.keys(document.paths[INTAKE]!)).toEqual(['post']);
  expect(document.paths[INTAKE]!.post!.responses).toHaveProperty('303');
  expect(document.components.schemas).toHaveProperty('IntakeRequest');
});

test('a payment of the partner API and a checkout do not meet: a key guards nothing here', async () => {
  const other = await service.account();
  const own = await checkoutPortal(service, other);
  const one = payer();
  const id = await one.begin(intakeOf(own));
  await one.pay(id);
  await other.client.created(paymentOf(own.portalId), { key: id });
  expect((await other.client.list()).data.payments).toHaveLength(2);
  await told(one, id, 'done', own.signingSecret);
});
