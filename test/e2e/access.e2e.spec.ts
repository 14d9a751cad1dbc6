/** Access: credentials, unsupported endpoints, portals, cases and velocity (specification, Authentication and Errors; C6, C46, C47, C50–C54, C70). */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import {
  type Answer,
  CARD,
  card,
  type Client,
  PARTNER,
  paymentOf,
  PAYMENTS,
  type Service,
  startService,
  type TestAccount,
} from '../support/service.js';

const STRANGER = '018f0000-0000-7000-8000-00000000dead';
const TOKEN = `${PARTNER}/auth/token`;

let service: Service;
let partner: TestAccount;
let client: Client;
let portal: string;
beforeAll(async () => {
  service = await startService({ instances: 2 });
  partner = await service.account();
  client = partner.client;
  portal = await service.portal(partner, { fee: { chargeMode: 'combined' } });
});
afterAll(() => service.stop());

interface Grant {
  readonly accessToken: string;
  readonly tokenType: string;
  readonly expiresIn: number;
  readonly expiresAt: string;
}
const tokenOf = async (account: TestAccount) => (await account.client.post<Grant>(TOKEN)).data.accessToken;
const every = (on: Client): [string, () => Promise<Answer<unknown>>][] => [
  ['POST /payments', () => on.create(paymentOf(portal))],
  ['GET /payments', () => on.list()],
  ['GET /payments/{id}', () => on.find(STRANGER)],
  ['POST /payments/{id}/refund', () => on.refund(STRANGER)],
  ['POST /payments/{id}/void', () => on.void(STRANGER)],
  ['POST /payments/{id}/capture', () => on.post(`${PAYMENTS}/${STRANGER}/capture`)],
  ['POST /vault', () => on.post(`${PARTNER}/vault`, {})],
  ['GET /fees/quote', () => on.get(`${PARTNER}/fees/quote?portalId=${portal}&amountCents=100`)],
  ['POST /auth/token', () => on.post(TOKEN)],
];
/** A 401 or 403 without a code has only a message. A 401 also names the accepted schemes (specification, Authentication 5; C1, C65). */
const expectRefused = (answer: Answer<unknown>, status: 401 | 403) => {
  expect([answer.status, Object.keys(JSON.parse(answer.text) as object)]).toEqual([status, ['success', 'message']]);
  if (status === 401) expect(answer.headers['www-authenticate']).toBe('ApiKey realm="payfold", Bearer realm="payfold"');
};

describe('credentials', () => {
  test.each([
    ['ApiKey <key>', (key: string) => `ApiKey ${key}`],
    ['the bare key', (key: string) => key],
    ['the scheme in another case', (key: string) => `apikey ${key}`],
  ])('accepted: %s', async (_, header) => {
    expect((await client.as(header(partner.apiKey)).list()).status).toBe(200);
  });

  test.each<[string, (key: string) => string | null]>([
    ['none', () => null],
    ['an empty one', () => ''],
    ['a scheme alone', () => 'ApiKey'],
    ['an unknown scheme', (key) => `Basic ${key}`],
    ['a key as Bearer (C50)', (key) => `Bearer ${key}`],
    ['a key with a wrong secret', (key) => `ApiKey ${key.slice(0, -1)}${key.endsWith('A') ? 'B' : 'A'}`],
    ['a key that is cut', (key) => `ApiKey ${key.slice(0, -1)}`],
    ['a key that is longer', (key) => `ApiKey ${key}A`],
    ['a key of the other environment (C51)', (key) => `ApiKey ${key.replace('pc_test_', 'pc_live_')}`],
    ['an unknown key', () => `ApiKey pc_test_ABCDEFGHJKMNPQRS_${'a'.repeat(43)}`],
    ['no token', () => 'Bearer x.y.z'],
    ['a token without signature', () => `Bearer ${Buffer.from('{"alg":"none"}').toString('base64url')}.${Buffer.from('{}').toString('base64url')}.`],
    ['two in one line', (key) => `ApiKey ${key}, ApiKey ${key}`],
  ])('%s → 401 on every endpoint, message only, WWW-Authenticate', async (_, header) => {
    for (const [, send] of every(service.anonymous.as(header(partner.apiKey)))) expectRefused(await send(), 401);
  });

  test('unknown, mangled and rotated keys get one and the same answer', async () => {
    const account = await service.account('Rotating');
    const old = account.client;
    await service.administer(service.admin.rotateKeys(account.accountId));
    const bodies = [old, client.as(`ApiKey pc_test_ABCDEFGHJKMNPQRS_${'a'.repeat(43)}`), client.as(`ApiKey ${partner.apiKey}x`)];
    expect(new Set(await Promise.all(bodies.map(async (on) => (await on.list()).text))).size).toBe(1);
  });

  test('two Authorization lines → 401, whichever would be right (C14)', async () => {
    for (const authorization of [
      [`ApiKey ${partner.apiKey}`, `ApiKey ${partner.apiKey}`],
      [`ApiKey ${partner.apiKey}`, 'Bearer x'],
      ['Bearer x', `ApiKey ${partner.apiKey}`],
    ])
      expectRefused(await client.list({}, { headers: { authorization } }), 401);
  });

  test('credentials come before everything else that a body may be', async () => {
    const answers = [
      await service.anonymous.post(PAYMENTS, '{'),
      await service.anonymous.post(PAYMENTS, paymentOf(portal), { headers: { 'content-type': 'text/plain' } }),
      await service.anonymous.post(PAYMENTS, paymentOf(portal), { headers: { 'content-type': 'garbage' } }),
      await service.anonymous.post(PAYMENTS, paymentOf(portal), { key: 'k'.repeat(300) }),
      await service.anonymous.list({ limit: 'x' }),
    ];
    for (const answer of answers) expectRefused(answer, 401);
  });

  test('/healthz, /readyz, /openapi.json, /openapi-3.0.json and /docs need none (C65)', async () => {
    for (const path of ['/healthz', '/readyz', '/openapi.json', '/openapi-3.0.json', '/docs'])
      expect([path, (await fetch(service.urls[0]! + path)).status]).toEqual([path, 200]);
    expect(await (await fetch(`${service.urls[0]}/readyz`)).json()).toEqual({
      ok: true,
      checks: { idempotency: 'ok', readModels: 'ok', schema: 'ok', eventStore: 'ok' },
    });
  });
});

test('every reference of the OpenAPI document leads somewhere, and the body of a create is described', async () => {
  const document = (await (await fetch(`${service.urls[0]}/openapi.json`)).json()) as { components: { schemas: Record<string, unknown> } };
  const references = [...JSON.stringify(document).matchAll(/"#\/components\/schemas\/([^"]*)"/g)].map(([, name]) => name!);
  expect(references).toEqual(expect.arrayContaining(['CreatePaymentRequest', 'LineItemRequest', 'PaymentMethodRequest', 'PayerRequest']));
  expect(references.filter((name) => !(name in document.components.schemas))).toEqual([]);
});

describe('POST /auth/token (C50, C52)', () => {
  test.each<[string, string | undefined]>([
    ['no body', undefined],
    ['an empty object', '{}'],
  ])('exchanges an API key for an access token of one hour: %s', async (_, body) => {
    const before = service.clock.now();
    const answer = await client.post<Grant>(TOKEN, body);
    expect(answer.status).toBe(200);
    expect(answer.data).toStrictEqual({ accessToken: expect.any(String), tokenType: 'Bearer', expiresIn: 3_600, expiresAt: expect.any(String) });
    expect(Math.abs(Date.parse(answer.data.expiresAt) - before - 3_600_000)).toBeLessThan(5_000);
    for (const instance of [0, 1]) expect((await client.as(`Bearer ${answer.data.accessToken}`).list({}, { instance })).status).toBe(200);
  });
  test('the bare key too', async () => expect((await client.as(partner.apiKey).post(TOKEN)).status).toBe(200));
  test.each(['[]', '{', 'x', '{"amount":1}'])('a body %s → 400', async (body) =>
    expect((await client.post(TOKEN, body)).code).toBe('VALIDATION_ERROR'),
  );
  test('an access token cannot obtain another one: 403, message only', async () => {
    expectRefused(await client.as(`Bearer ${await tokenOf(partner)}`).post(TOKEN), 403);
  });
  test('a token does everything that the key does, on the same payments', async () => {
    const on = client.as(`bearer ${await tokenOf(partner)}`);
    const { id } = await on.created(paymentOf(portal));
    expect((await client.find(id)).data.id).toBe(id);
    expect((await on.refund(id)).status).toBe(200);
  });
  test('rotation ends the old key at once, on every instance; tokens live on', async () => {
    const account = await service.account('Rotating');
    const token = client.as(`Bearer ${await tokenOf(account)}`);
    const { apiKey } = await service.administer(service.admin.rotateKeys(account.accountId));
    for (const instance of [0, 1]) {
      expectRefused(await account.client.list({}, { instance }), 401);
      expect((await token.list({}, { instance })).status).toBe(200);
      expect((await client.as(`ApiKey ${apiKey}`).list({}, { instance })).status).toBe(200);
    }
    expectRefused(await account.client.post(TOKEN), 401);
  });
  test('deactivation blocks key and token on the next request, on every instance; reactivation restores the key, and the token stays dead', async () => {
    const account = await service.account('Deactivated');
    const token = client.as(`Bearer ${await tokenOf(account)}`);
    await service.administer(service.admin.deactivateAccount(account.accountId));
    for (const instance of [0, 1]) for (const on of [account.client, token]) expectRefused(await on.list({}, { instance }), 403);
    for (const [, send] of every(account.client)) expectRefused(await send(), 403);
    await service.administer(service.admin.reactivateAccount(account.accountId));
    for (const instance of [0, 1]) expectRefused(await token.list({}, { instance }), 401);
    const renewed = client.as(`Bearer ${await tokenOf(account)}`);
    for (const on of [account.client, renewed]) expect((await on.list()).status).toBe(200);
  });
});

describe('unsupported endpoints: 401 first, then always 501, for any body (C6)', () => {
  const bodies: [string, string | Buffer | undefined, Record<string, string>][] = [
    ['none', undefined, {}],
    ['a right one', JSON.stringify({ portalId: STRANGER, paymentMethod: card(), payer: {} }), {}],
    ['no JSON', '{', {}],
    ['invalid UTF-8', Buffer.from([0xff]), {}],
    ['another type', 'x', { 'content-type': 'text/plain' }],
    ['a type that is none', 'x', { 'content-type': 'garbage' }],
    ['a key that is too long', '{}', { 'idempotency-key': 'k'.repeat(300) }],
    ['the key `amount`', '{"amount":1}', {}],
  ];
  test.each(bodies)('body: %s', async (_, body, headers) => {
    for (const [path, code] of [
      [`${PAYMENTS}/${STRANGER}/capture`, 'CAPTURE_NOT_SUPPORTED'],
      [`${PAYMENTS}/nonsense/capture`, 'CAPTURE_NOT_SUPPORTED'],
      [`${PARTNER}/vault`, 'VAULT_NOT_SUPPORTED'],
    ] as const) {
      const answer = await client.post(path, body, { headers });
      expect([answer.status, answer.code]).toEqual([501, code]);
      expectRefused(await service.anonymous.post(path, body, { headers }), 401);
    }
  });
});

describe('restrictions (specification, Errors 2; C53, C70)', () => {
  const restrict = (portalId: string, referenceId: string, kind: 'block' | 'hold' | 'allow', until: string | null = null) =>
    service.administer(service.admin.restrictCase({ portalId, referenceId, kind, until, reason: null }));
  const pay = (referenceId: string | undefined, options: { portalId?: string; number?: string } = {}) =>
    client.create(
      paymentOf(options.portalId ?? portal, {
        ...(referenceId === undefined ? {} : { referenceId }),
        ...(options.number ? { number: options.number } : {}),
      }),
    );

  test('a blocked case: 403 PAYMENT_BLOCKED, until it is allowed again', async () => {
    await restrict(portal, 'B', 'block');
    const { status, details } = await pay('B');
    expect([status, details]).toEqual([403, { code: 'PAYMENT_BLOCKED' }]);
    await restrict(portal, 'B', 'allow');
    expect((await pay('B')).status).toBe(200);
  });

  test('a held case: 409 PAYMENT_HELD, with retryAt when it is known, until then', async () => {
    await restrict(portal, 'H', 'hold');
    expect([(await pay('H')).status, (await pay('H')).details]).toEqual([409, { code: 'PAYMENT_HELD' }]);
    const until = new Date(service.clock.now() + 3_600_000).toISOString();
    await restrict(portal, 'H', 'hold', until);
    expect((await pay('H')).details).toEqual({ code: 'PAYMENT_HELD', retryAt: until });
    service.clock.advance(3_600_000);
    expect((await pay('H')).status).toBe(200);
  });

  test('only that case and what looks like it, of that portal, by the payment-level reference', async () => {
    const elsewhere = await service.portal(partner);
    await restrict(portal, 'X', 'block');
    for (const reference of [undefined, 'XX', 'Y']) expect((await pay(reference)).status).toBe(200);
    for (const reference of ['x', 'X ', 'X\u200b']) expect((await pay(reference)).code).toBe('PAYMENT_BLOCKED');
    expect((await pay('X', { portalId: elsewhere })).status).toBe(200);
    expect((await client.create({ ...paymentOf(portal), lineItems: [{ amountCents: 10_000, referenceId: 'X' }] })).status).toBe(200);
    // Payments that already exist stay readable and refundable.
    const { id } = await client.created(paymentOf(portal, { referenceId: 'Y' }));
    await restrict(portal, 'Y', 'block');
    expect((await client.refund(id)).status).toBe(200);
  });

  test('the portal’s rules: 422 PAYMENT_NOT_ALLOWED below, above, and for another brand', async () => {
    const ruled = await service.portal(partner);
    await service.administer(service.admin.setRules(ruled, { minCents: 100, maxCents: 200, brands: ['visa'] }));
    const amounts = async (cents: number, number?: string) =>
      (await client.create(paymentOf(ruled, { lines: [cents], ...(number ? { number } : {}) }))).code;
    expect([await amounts(99), await amounts(100), await amounts(200), await amounts(201)]).toEqual([
      'PAYMENT_NOT_ALLOWED',
      undefined,
      undefined,
      'PAYMENT_NOT_ALLOWED',
    ]);
    expect(await amounts(150, '5555 5555 5555 4444')).toBe('PAYMENT_NOT_ALLOWED');
    await service.administer(service.admin.setRules(ruled, { minCents: null, maxCents: null, brands: null }));
    expect([await amounts(1), await amounts(99_999), await amounts(150, '5555 5555 5555 4444')]).toEqual([undefined, undefined, undefined]);
  });

  test('a portal without a gateway: 503 GATEWAY_NOT_CONFIGURED; the quote still answers', async () => {
    const bare = await service.portal(partner, { gateway: 'none' });
    const { status, code } = await client.create(paymentOf(bare));
    expect([status, code]).toEqual([503, 'GATEWAY_NOT_CONFIGURED']);
    expect((await client.get(`${PARTNER}/fees/quote?portalId=${bare}&amountCents=100`)).status).toBe(200);
  });

  test('a portal that is unknown, another account’s or revoked: 403 PORTAL_ACCESS_DENIED, one and the same; granted again it works', async () => {
    const other = await service.account('Other');
    const theirs = await service.portal(other);
    const revoked = await service.portal(partner);
    await service.administer(service.admin.revokeAccess(revoked, partner.accountId));
    const answers = await Promise.all([STRANGER, theirs, revoked].map((where) => client.create(paymentOf(where))));
    for (const { status, details } of answers) expect([status, details]).toEqual([403, { code: 'PORTAL_ACCESS_DENIED' }]);
    expect(new Set(answers.map(({ text }) => text)).size).toBe(1);
    await service.administer(service.admin.grantAccess(revoked, partner.accountId));
    expect((await client.create(paymentOf(revoked))).status).toBe(200);
    await service.administer(service.admin.grantAccess(theirs, partner.accountId));
    const { id } = await client.created(paymentOf(theirs));
    // Two accounts may use one portal, but neither can read the payments of the other.
    expect((await other.client.find(id)).code).toBe('PAYMENT_NOT_FOUND');
  });
});

describe('velocity, off by default (C53, C70)', () => {
  const HOUR = 3_600;
  const limited = async (scope: 'card' | 'case', limits: { attempts?: number; declines?: number; windowSeconds?: number; blockSeconds?: number }) => {
    const where = await service.portal(partner, { fee: { chargeMode: 'combined' } });
    const { attempts = null, declines = null, windowSeconds = HOUR, blockSeconds = null } = limits;
    await service.administer(service.admin.setLimits(where, scope, { attempts, declines, windowSeconds, blockSeconds }));
    return (referenceId: string, number: string = CARD.approved, instance = 0) =>
      client.create(paymentOf(where, { referenceId, number }), { instance });
  };
  const expectLimited = (answer: Answer<unknown>, scope: string, windowSeconds: number) => {
    const { status, details, headers } = answer;
    expect([status, details]).toEqual([429, { code: 'VELOCITY_LIMIT', scope, windowSeconds, retryAt: expect.any(String) }]);
    const seconds = (Date.parse(details!.retryAt as string) - service.clock.now()) / 1000;
    expect(seconds).toBeGreaterThan(0);
    expect(seconds).toBeLessThanOrEqual(windowSeconds);
    expect(Math.abs(Number(headers['retry-after']) - seconds)).toBeLessThan(2);
  };

  test('without limits nothing is limited', async () => {
    for (let count = 0; count < 5; count++)
      expect((await client.create(paymentOf(portal, { number: CARD.declined, referenceId: 'V' }))).status).toBe(402);
  });

  test('attempts of a case: N pass, the next is refused until the oldest leaves the window', async () => {
    const pay = await limited('case', { attempts: 2 });
    expect([(await pay('C')).status, (await pay('C', '4111 1111 1111 1111')).status]).toEqual([200, 200]);
    for (const instance of [0, 1]) expectLimited(await pay('C', '5555 5555 5555 4444', instance), 'case', HOUR);
    expect((await pay('D')).status).toBe(200);
    service.clock.advance(HOUR * 1000);
    expect((await pay('C')).status).toBe(200);
  });

  test('attempts of a card, in any case and any spelling', async () => {
    const pay = await limited('card', { attempts: 1 });
    expect((await pay('A')).status).toBe(200);
    expectLimited(await pay('B', '4242424242424242'), 'card', HOUR);
    expect((await pay('A', '4111 1111 1111 1111')).status).toBe(200);
  });

  test('parallel attempts: no more than N pass', async () => {
    const pay = await limited('card', { attempts: 3 });
    const answers = await Promise.all(Array.from({ length: 12 }, (_, index) => pay(`P${index}`, CARD.approved, index % 2)));
    expect(answers.filter(({ status }) => status === 200)).toHaveLength(3);
    expect(answers.filter(({ status }) => status === 429)).toHaveLength(9);
  });

  test('declines of a case, approvals do not count', async () => {
    const pay = await limited('case', { declines: 2 });
    expect((await pay('C')).status).toBe(200);
    expect([(await pay('C', CARD.declined)).status, (await pay('C')).status, (await pay('C', CARD.declined)).status]).toEqual([402, 200, 402]);
    expectLimited(await pay('C'), 'case', HOUR);
  });

  test('declines of a card without a block: VELOCITY_LIMIT', async () => {
    const pay = await limited('card', { declines: 1 });
    expect((await pay('C', CARD.declined)).status).toBe(402);
    expectLimited(await pay('D', CARD.declined), 'card', HOUR);
    expect((await pay('C')).status).toBe(200);
  });

  test('a decline that cannot be counted is answered as the decline that it is', async () => {
    const { pool } = service.services;
    const pay = await limited('card', { declines: 1 });
    await pool.query(`
      create function refuse_declines() returns trigger language plpgsql as $$ begin raise 'no room'; end $$;
      create trigger refuse_declines before insert on velocity_entry for each row when (new.kind = 'decline') execute function refuse_declines()`);
    try {
      expect((await pay('C', CARD.declined)).status).toBe(402);
    } finally {
      await pool.query('drop function refuse_declines cascade');
    }
    expect((await pay('C', CARD.declined)).status).toBe(402);
    expectLimited(await pay('C', CARD.declined), 'card', HOUR);
  });

  test('declines of a card with a block: 409 DECLINE_BLOCKED with retryAt, before the card’s outcome', async () => {
    const pay = await limited('card', { declines: 2, windowSeconds: 600, blockSeconds: 7_200 });
    expect([(await pay('A', CARD.declined)).status, (await pay('B', CARD.declined)).status]).toEqual([402, 402]);
    const before = (await service.simulator.truth()).length;
    const { status, details, headers } = await pay('C', CARD.declined);
    expect([status, details]).toEqual([409, { code: 'DECLINE_BLOCKED', retryAt: expect.any(String) }]);
    expect(Number(headers['retry-after'])).toBeGreaterThan(7_100);
    expect((await service.simulator.truth()).length).toBe(before);
    service.clock.advance(7_200_000);
    expect((await pay('C', CARD.declined)).status).toBe(402);
  });

  test('replays and refusals do not count', async () => {
    const where = await service.portal(partner);
    await service.administer(service.admin.setLimits(where, 'case', { attempts: 2, declines: null, windowSeconds: HOUR, blockSeconds: null }));
    const body = paymentOf(where, { referenceId: 'R' });
    for (let again = 0; again < 4; again++) expect((await client.create(body, { key: 'velocity' })).status).toBe(200);
    await service.administer(service.admin.restrictCase({ portalId: where, referenceId: 'R', kind: 'block', until: null, reason: null }));
    for (let again = 0; again < 4; again++) expect((await client.create(body)).code).toBe('PAYMENT_BLOCKED');
    await service.administer(service.admin.restrictCase({ portalId: where, referenceId: 'R', kind: 'allow', until: null, reason: null }));
    expect((await client.create(body)).status).toBe(200);
    expectLimited(await client.create(body), 'case', HOUR);
  });

  test('no card number is kept for it', async () => {
    const { rows } = await service.services.pool.query<{ text: string }>('select v::text as text from velocity_entry v');
    expect(rows.length).toBeGreaterThan(0);
    for (const { text } of rows) expect(text).not.toMatch(/4242424242|4000000000000002/);
  });
});

// This test must be the last: it moves the clock forward by an hour.
test('an access token ends after one hour: 401, and the key gets a new one (specification, Authentication 1)', async () => {
  const token = client.as(`Bearer ${await tokenOf(partner)}`);
  service.clock.advance(3_590_000);
  expect((await token.list()).status).toBe(200);
  service.clock.advance(11_000);
  expectRefused(await token.list(), 401);
  expect((await client.as(`Bearer ${await tokenOf(partner)}`).list()).status).toBe(200);
});
