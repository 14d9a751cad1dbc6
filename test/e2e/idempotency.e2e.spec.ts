/** Idempotency of create, refund and void (specification, Idempotency; C12 to C20, T1 to T12). Two API instances over one database. */
import { spawn } from 'node:child_process';
import { mkdtemp, readFile, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import type { ServiceError } from '#kernel';
import { chargeOnce, type RefundView, reverseByStaff, type VoidView } from '#payments';
import { parseStrictJson } from '#platform/http';
import { requestText } from '../../apps/api/partner/http.js';
import { chargeRequestOf } from '../../apps/api/partner/requests.js';
import type { SimulatorControl } from '../../apps/simulator/control.js';
import { eventually } from '../support/eventually.js';
import {
  type Answer,
  CARD,
  card,
  type Client,
  expiryIn,
  PARTNER,
  paymentOf,
  type PaymentPage,
  PAYMENTS,
  type Sent,
  type Service,
  startService,
  type TestAccount,
} from '../support/service.js';

const LATER_MS = 40_000;

let service: Service;
let partner: TestAccount;
let client: Client;
/** A portal whose payments have one charge each. */
let portal: string;
let separate: string;
beforeAll(async () => {
  service = await startService({ instances: 2 });
  partner = await service.account();
  client = partner.client;
  portal = await service.portal(partner, { fee: { flatCents: 300, chargeMode: 'combined' } });
  separate = await service.portal(partner, { fee: { flatCents: 300 } });
});
afterAll(() => service.stop());

let drawn = 0;
const newKey = () => `key ${++drawn}`;
const keyHash = (key: string) => service.services.payments.idempotency.name('', key).keyHash;
/** Waits until the first request has claimed the key. Reads the database, since a second request could itself claim the key. */
const claimed = (key: string) =>
  eventually(async () => (await service.services.pool.query('select from idempotency_key where key_hash = $1', [keyHash(key)])).rowCount === 1);
const replayed = ({ headers }: Answer<unknown>) => headers['idempotent-replayed'];
type Truth = Awaited<ReturnType<SimulatorControl['truth']>>[number];
/** The operations of the bank that moved money while `work` ran. */
const moved = async (work: () => Promise<unknown>): Promise<Truth[]> => {
  const before = (await service.simulator.truth()).length;
  await work();
  return (await service.simulator.truth(before)).filter(({ op, result }) => op !== 'tombstone' && result === 'approved');
};
const arm = (fault: Parameters<SimulatorControl['arm']>[0]) =>
  service.simulator.arm({ ...fault, match: { ...fault.match, merchantAccount: `agency-${portal}` } });
const vanish = (key: string, paymentId?: string) =>
  service.services.pool.query(
    `update idempotency_key set state = 'in_progress', status = null, body = null, lease_until = clock_timestamp() - interval '1 second',
       payment_id = coalesce($2, payment_id) where key_hash = $1`,
    [keyHash(key), paymentId ?? null],
  );
const expectReplay = (again: Answer<unknown>, first: Answer<unknown>) => {
  expect(replayed(first)).toBeUndefined();
  expect([again.status, again.text, replayed(again)]).toEqual([first.status, first.text, 'true']);
};

describe('rule 1: same key and same body answer the original response, and nothing happens again', () => {
  test('a created payment', async () => {
    const key = newKey();
    const body = paymentOf(portal);
    const first = await client.create(body, { key });
    expect(first.status).toBe(200);
    const again = await moved(async () => {
      for (const instance of [0, 1, 0]) expectReplay(await client.create(body, { key, instance }), first);
    });
    expect(again).toEqual([]);
  });

  test('a declined payment (C15)', async () => {
    const key = newKey();
    const body = paymentOf(portal, { number: CARD.declined });
    const first = await client.create(body, { key });
    expect(first.code).toBe('PAYMENT_DECLINED');
    expectReplay(await client.create(body, { key, instance: 1 }), first);
    expect((await client.list({ status: 'failed' })).data.payments.filter(({ id }) => id === first.details!.id)).toHaveLength(1);
  });

  test.each<[string, (id: string, key: string, instance?: number) => Promise<Answer<unknown>>]>([
    ['a refund', (id, key, instance = 0) => client.refund(id, { reason: 'r' }, { key, instance })],
    ['a partial refund', (id, key, instance = 0) => client.refund(id, { amountCents: 100 }, { key, instance })],
    ['a void', (id, key, instance = 0) => client.void(id, undefined, { key, instance })],
  ])('%s, also after the payment has moved on', async (_, send) => {
    const { id } = await client.created(paymentOf(portal));
    const key = newKey();
    const first = await send(id, key);
    expect(first.status).toBe(200);
    expect(await moved(async () => expectReplay(await send(id, key, 1), first))).toEqual([]);
    await client.refund(id, { feeType: 'include_fee' });
    expectReplay(await send(id, key), first);
  });

  test('a void that the gateway rejected for good (C15)', async () => {
    const { id } = await client.created(paymentOf(portal, { number: CARD.voidRejected }));
    const key = newKey();
    const first = await client.void(id, {}, { key });
    expect([first.status, first.code]).toEqual([422, 'VOID_FAILED']);
    expectReplay(await client.void(id, {}, { key }), first);
  });

  test.each<[string, (body: ReturnType<typeof paymentOf>) => object | string]>([
    ['another cvv, which is left out', (body) => ({ ...body, paymentMethod: { ...(body.paymentMethod as object), cvv: '1234' } })],
    ['no spaces in the card number', (body) => ({ ...body, paymentMethod: { ...(body.paymentMethod as object), cardNumber: '4242424242424242' } })],
    ['another order of keys', (body) => Object.fromEntries(Object.entries(body).reverse())],
    ['white space', (body) => JSON.stringify(body, null, 3)],
    ['another spelling of a number', (body) => JSON.stringify(body).replaceAll('10000', '1e4')],
    ['another spelling of a string', (body) => JSON.stringify(body).replace('INV-1', '\\u0049NV-1')],
  ])('the same body: %s (C13)', async (_, change) => {
    const key = newKey();
    const body = paymentOf(portal);
    const first = await client.create(body, { key });
    expectReplay(await client.create(change(body), { key }), first);
  });

  test('the same body: none and {} (C13)', async () => {
    const { id } = await client.created(paymentOf(portal));
    const key = newKey();
    const first = await client.void(id, undefined, { key });
    expectReplay(await client.void(id, {}, { key }), first);
  });
});

describe('rule 2: same key, different body', () => {
  test.each<[string, Record<string, unknown>]>([
    ['another amount', { amountCents: 100, lineItems: [{ amountCents: 100, referenceId: 'INV-1' }] }],
    ['another card', { paymentMethod: card('4111 1111 1111 1111') }],
    ['the same expiry in another spelling (C13)', { paymentMethod: card(CARD.approved, { expirationDate: expiryIn(36).replace('/', '') }) }],
    ['a default left out (C13)', { currency: undefined }],
    ['a default that is sent (C13)', { capture: 'sale' }],
    ['a field that is ignored otherwise', { note: 'x' }],
    ['another line item', { lineItems: [{ amountCents: 10_000, referenceId: 'INV-2' }] }],
    ['a reference id', { referenceId: 'R' }],
  ])('create: %s → 409 IDEMPOTENCY_MISMATCH', async (_, change) => {
    const key = newKey();
    const body = paymentOf(portal);
    const first = await client.create(body, { key });
    const other = await client.create({ ...body, ...change }, { key, instance: 1 });
    expect([other.status, other.code, replayed(other)]).toEqual([409, 'IDEMPOTENCY_MISMATCH', undefined]);
    expectReplay(await client.create(body, { key }), first);
  });

  test.each<[string, object, object]>([
    ['amount', { amountCents: 100 }, { amountCents: 101 }],
    ['fee type', {}, { feeType: 'include_fee' }],
    ['reason', { reason: 'a' }, { reason: 'b' }],
  ])('refund: another %s → 409', async (_, body, other) => {
    const { id } = await client.created(paymentOf(portal));
    const key = newKey();
    expect((await client.refund(id, body, { key })).status).toBe(200);
    expect((await client.refund(id, other, { key })).code).toBe('IDEMPOTENCY_MISMATCH');
  });

  test('refund: feeType none is the same body as without it, and returns no fee (C13, C36); elsewhere the field is only ignored', async () => {
    for (const [sent, again] of [
      [{}, { feeType: 'none' }],
      [{ feeType: 'none' }, {}],
    ] as const) {
      // prettier-ignore
      const { id } = await client.created(paymentOf(separate));
      const key = newKey();
      const first = await client.refund(id, sent, { key });
      expect([first.status, first.data.amountCents]).toEqual([200, 10_000]);
      expectReplay(await client.refund(id, again, { key, instance: 1 }), first);
      expect((await client.refund(id, { feeType: 'include_fee' }, { key })).code).toBe('IDEMPOTENCY_MISMATCH');
    }
    const { id } = await client.created(paymentOf(portal));
    const key = newKey();
    expect((await client.void(id, { feeType: 'none' }, { key })).status).toBe(200);
    expect((await client.void(id, {}, { key })).code).toBe('IDEMPOTENCY_MISMATCH');
  });
});

describe('rule 3: same key while the first request is processing', () => {
  test('409 IDEMPOTENCY_IN_PROGRESS with Retry-After, on every instance; another body is a mismatch already', async () => {
    const key = newKey();
    const body = paymentOf(portal, { number: CARD.slow });
    const first = client.create(body, { key });
    await claimed(key);
    for (const instance of [1, 0]) {
      const answer = await client.create(body, { key, instance });
      expect(answer.code).toBe('IDEMPOTENCY_IN_PROGRESS');
      expect(answer.status).toBe(409);
      expect(Number(answer.headers['retry-after'])).toBeGreaterThanOrEqual(1);
      expect(Number(answer.headers['retry-after'])).toBeLessThanOrEqual(5);
    }
    expect((await client.create({ ...body, note: 1 }, { key, instance: 1 })).code).toBe('IDEMPOTENCY_MISMATCH');
    const answer = await first;
    expect(answer.status).toBe(200);
    expectReplay(await client.create(body, { key, instance: 1 }), answer);
  });

  test('50 parallel creates under one key over two instances are one charge', async () => {
    await service.simulator.arm({ match: { call: 'charge', merchantAccount: `agency-${portal}` }, delayBeforeMs: 300 });
    const key = newKey();
    const body = paymentOf(portal);
    let answers: Answer<unknown>[] = [];
    const charges = await moved(async () => {
      answers = await Promise.all(Array.from({ length: 50 }, (_, index) => client.create(body, { key, instance: index % 2 })));
    });
    expect(charges.map(({ op }) => op)).toEqual(['charge']);
    const [winner, ...others] = answers.filter(({ status, headers }) => status === 200 && headers['idempotent-replayed'] === undefined);
    expect(others).toEqual([]);
    for (const answer of answers.filter((one) => one !== winner))
      if (answer.status === 200) expectReplay(answer, winner!);
      else expect(answer.code).toBe('IDEMPOTENCY_IN_PROGRESS');
    expectReplay(await client.create(body, { key, instance: 1 }), winner!);
  });

  test('50 parallel refunds under one key over two instances are one refund', async () => {
    const { id } = await client.created(paymentOf(portal));
    await service.simulator.arm({ match: { call: 'void', merchantAccount: `agency-${portal}` }, delayBeforeMs: 300 });
    const key = newKey();
    let answers: Answer<unknown>[] = [];
    const movements = await moved(async () => {
      answers = await Promise.all(Array.from({ length: 50 }, (_, index) => client.refund(id, { amountCents: 10 }, { key, instance: index % 2 })));
    });
    expect(movements.map(({ op, amountCents }) => [op, amountCents])).toEqual([['void', 10]]);
    expect(answers.filter(({ status, headers }) => status === 200 && headers['idempotent-replayed'] === undefined)).toHaveLength(1);
    expect(new Set(answers.map(({ status, code }) => code ?? status))).toEqual(new Set([200, 'IDEMPOTENCY_IN_PROGRESS']));
    expect((await client.find(id)).data.refundedAmountCents).toBe(10);
  });
});

describe('rule 4: after a 5xx on create the key stays reserved', () => {
  test.each([
    ['502', CARD.gatewayError, 'PAYMENT_GATEWAY_ERROR', 'failed'],
    ['504', CARD.unreadable, 'PAYMENT_TIMEOUT', 'voided'],
  ])('%s: 409 IDEMPOTENCY_RECONCILIATION_REQUIRED with details.id, for good (C16)', async (_, number, code, finally_) => {
    const key = newKey();
    const body = paymentOf(portal, { number });
    const first = await client.create(body, { key });
    expect(first.code).toBe(code);
    const expectReserved = async () => {
      const again = await client.create(body, { key, instance: 1 });
      expect([again.status, again.details]).toEqual([409, { code: 'IDEMPOTENCY_RECONCILIATION_REQUIRED', id: first.details!.id }]);
      // The message never invites a second charge (C74).
      expect(again.message).toBe(`Read payment ${first.details!.id as string}. Charge again with a new key only if it reads failed or voided.`);
      expect(replayed(again)).toBeUndefined();
    };
    await expectReserved();
    expect((await client.create(paymentOf(portal), { key })).code).toBe('IDEMPOTENCY_MISMATCH');
    await service.recover(first.details!.id as string);
    expect(await client.status(first.details!.id as string)).toBe(finally_);
    await expectReserved();
    expect((await client.create(paymentOf(portal), { key: newKey() })).status).toBe(200);
  });
});

describe('a refusal before the gateway gives the key back (C15)', () => {
  test.each<[string, string, (key: string) => Promise<Answer<unknown>>]>([
    ['create', 'VALIDATION_ERROR', (key) => client.create({}, { key })],
    ['create', 'CAPTURE_NOT_SUPPORTED', (key) => client.create({ ...paymentOf(portal), capture: 'auth' }, { key })],
    ['create', 'PORTAL_ACCESS_DENIED', (key) => client.create(paymentOf('018f0000-0000-7000-8000-00000000dead'), { key })],
    ['refund', 'PAYMENT_NOT_FOUND', (key) => client.refund('018f0000-0000-7000-8000-00000000dead', {}, { key })],
    ['refund', 'PAYMENT_NOT_FOUND', (key) => client.refund('nonsense', {}, { key })],
    ['refund', 'PAYMENT_NOT_FOUND', (key) => client.refund('%00', {}, { key })],
    ['void', 'PAYMENT_NOT_FOUND', (key) => client.void('x'.repeat(500), {}, { key })],
    ['refund', 'VALIDATION_ERROR', (key) => client.refund('018f0000-0000-7000-8000-00000000dead', { feeType: 'x' }, { key })],
    ['refund', 'INVALID_STATE', async (key) => client.refund((await client.created(paymentOf(portal))).id, { amountCents: 10_001 }, { key })],
    [
      'void',
      'INVALID_STATE',
      async (key) => {
        const { id } = await client.created(paymentOf(portal));
        await client.void(id);
        return client.void(id, {}, { key });
      },
    ],
    [
      'void',
      'VOID_FAILED',
      async (key) => {
        // The principal is voided, but the fee is not. No answer is stored, since the partner must retry (C27).
        const { id } = await client.created(paymentOf(separate, { number: CARD.feeVoidFailsOnce }));
        const answer = await client.void(id, {}, { key });
        expect(answer.details?.suggestedAction).toBe('retry_void');
        return answer;
      },
    ],
  ])('%s: %s', async (_, code, refused) => {
    const key = newKey();
    expect((await refused(key)).code).toBe(code);
    // The refused request has given the key back, so a create may use it.
    const { status, headers } = await client.create(paymentOf(portal), { key });
    expect([status, headers['idempotent-replayed']]).toEqual([200, undefined]);
  });
});

describe('rule 6: a different operation needs a new key (C12)', () => {
  test('create → refund → void, and another payment', async () => {
    const [create, refund, void_] = [newKey(), newKey(), newKey()];
    const { id } = await client.created(paymentOf(portal), { key: create });
    const other = await client.created(paymentOf(portal));
    await client.refund(id, {}, { key: refund });
    await client.void(other.id, {}, { key: void_ });
    const attempts = [
      () => client.refund(id, {}, { key: create }),
      () => client.void(id, {}, { key: create }),
      () => client.void(id, {}, { key: refund }),
      () => client.refund(other.id, {}, { key: refund }),
      () => client.create(paymentOf(portal), { key: refund }),
      () => client.refund(other.id, {}, { key: void_ }),
      () => client.create(paymentOf(portal), { key: void_ }),
    ];
    for (const attempt of attempts) {
      const { status, code } = await attempt();
      expect([status, code]).toEqual([409, 'IDEMPOTENCY_MISMATCH']);
    }
  });
});

describe('the scope of a key is the API account (C12)', () => {
  test('two accounts, one key: two payments', async () => {
    const other = await service.account('Other');
    const where = await service.portal(other, { fee: { chargeMode: 'combined' } });
    const key = newKey();
    const first = await client.create(paymentOf(portal), { key });
    const second = await other.client.create(paymentOf(where), { key });
    expect([first.status, second.status, replayed(second)]).toEqual([200, 200, undefined]);
    // The other account cannot send the same body, since it has no access to the portal.
    const foreign = await other.client.create(paymentOf(portal), { key: newKey() });
    expect(foreign.code).toBe('PORTAL_ACCESS_DENIED');
  });

  test('API key, access token and rotated key of one account share it', async () => {
    const account = await service.account('Rotated');
    const where = await service.portal(account);
    const key = newKey();
    const body = paymentOf(where);
    const first = await account.client.create(body, { key });
    const token = await account.client.post<{ accessToken: string }>(`${PARTNER}/auth/token`);
    expectReplay(await account.client.as(`Bearer ${token.data.accessToken}`).create(body, { key }), first);
    const { apiKey } = await service.administer(service.admin.rotateKeys(account.accountId));
    expectReplay(await account.client.as(`ApiKey ${apiKey}`).create(body, { key }), first);
    expectReplay(await account.client.as(`Bearer ${token.data.accessToken}`).create(body, { key }), first);
  });
});

describe('keys are kept for 24 hours (C20)', () => {
  const age = (key: string, seconds: number) =>
    service.services.pool.query('update idempotency_key set expires_at = clock_timestamp() + make_interval(secs => $2) where key_hash = $1', [
      keyHash(key),
      seconds,
    ]);
  test('one second before the end a replay, after it a new request', async () => {
    const key = newKey();
    const body = paymentOf(portal);
    const first = await client.create(body, { key });
    await age(key, 30);
    expectReplay(await client.create(body, { key }), first);
    await age(key, 0);
    const second = await client.create(body, { key });
    expect([second.status, replayed(second), second.data.id === first.data.id]).toEqual([200, undefined, false]);
    expectReplay(await client.create(body, { key }), second);
  });

  test('a key is stored hashed, its expiry a day ahead', async () => {
    const key = newKey();
    await client.create(paymentOf(portal), { key });
    const { rows } = await service.services.pool.query<{ hours: number; text: string }>(
      `select extract(epoch from expires_at - clock_timestamp())::float8 / 3600 as hours, k::text as text from idempotency_key k where key_hash = $1`,
      [keyHash(key)],
    );
    expect(rows[0]!.hours).toBeGreaterThan(23.99);
    expect(rows[0]!.hours).toBeLessThanOrEqual(24);
    expect(rows[0]!.text).not.toContain(key);
    expect(rows[0]!.text).not.toMatch(/4242 ?4242|\b946\b/);
  });

  test('a reserved key is kept until its payment is settled (C16)', async () => {
    const key = newKey();
    const body = paymentOf(portal, { number: CARD.unresolvable });
    const first = await client.create(body, { key });
    await age(key, 0);
    const { idempotency } = service.services.payments;
    await idempotency.purge(100, async ({ paymentId }) => (await client.status(paymentId)) !== 'unknown');
    expect((await client.create(body, { key })).details).toEqual({ code: 'IDEMPOTENCY_RECONCILIATION_REQUIRED', id: first.details!.id });
    expect((await client.create(paymentOf(portal), { key })).code).toBe('IDEMPOTENCY_MISMATCH');
  });
});

describe('a request that vanished is taken over when its lease is over (T7)', () => {
  test.each([
    ['approved', CARD.approved],
    ['declined', CARD.declined],
  ])('after the outcome (S5): the original answer, byte for byte: %s', async (_, number) => {
    const key = newKey();
    const body = paymentOf(portal, { number });
    const first = await client.create(body, { key });
    if (first.status === 200) await client.refund(first.data.id, { amountCents: 5 });
    await vanish(key);
    expect(await moved(async () => expectReplay(await client.create(body, { key, instance: 1 }), first))).toEqual([]);
  });

  test('before the intent (S1): nothing was charged, no payment to look at, a new key is needed (C64)', async () => {
    const key = newKey();
    const body = paymentOf(portal);
    await client.create(body, { key });
    const paymentId = service.services.ids.uuid();
    await vanish(key, paymentId);
    for (let again = 0; again < 2; again++) {
      const { status, details, message } = await client.create(body, { key });
      expect([status, details]).toEqual([409, { code: 'IDEMPOTENCY_RECONCILIATION_REQUIRED' }]);
      expect(message).toBe('Nothing was charged. Use a new key.');
    }
    expect((await client.find(paymentId)).code).toBe('PAYMENT_NOT_FOUND');
    expect((await client.refund(paymentId)).code).toBe('PAYMENT_NOT_FOUND');
  });

  test('during the charge (S2–S4): fenced, so that a late outcome is not believed, and undone', async () => {
    const key = newKey();
    const body = paymentOf(portal, { number: CARD.slow });
    const before = (await service.simulator.truth()).length;
    const first = client.create(body, { key });
    await claimed(key);
    await vanish(key);
    const taken = await client.create(body, { key, instance: 1 });
    expect(taken.code).toBe('IDEMPOTENCY_RECONCILIATION_REQUIRED');
    const id = taken.details!.id as string;
    // The slow first request gets its approval now. But its key was taken over, so the answer must not be a success.
    expect([(await first).status, (await first).details]).toEqual([504, { code: 'PAYMENT_TIMEOUT', id }]);
    await service.recover(id);
    expect(await client.status(id)).toBe('voided');
    expect((await service.simulator.truth(before)).filter(({ op }) => op === 'charge').map(({ state }) => state)).toEqual(['voided']);
  });
});

/** C17, C18, C40, C62: retries after a 5xx on refund and void. */
describe('rule 5: after a 5xx on refund or void the key may be used again', () => {
  interface Operation {
    readonly name: string;
    readonly call: 'void';
    readonly send: (id: string, sent?: { key?: string; instance?: number }) => Promise<Answer<RefundView | VoidView>>;
    readonly other: (id: string, sent: { key: string }) => Promise<Answer<unknown>>;
    readonly amountCents: number;
    readonly status: string;
  }
  const operations: readonly Operation[] = [
    {
      name: 'refund',
      call: 'void',
      send: (id, sent) => client.refund(id, { amountCents: 1_000, reason: 'r' }, sent),
      other: (id, sent) => client.refund(id, { amountCents: 1_001, reason: 'r' }, sent),
      amountCents: 1_000,
      status: 'partially_refunded',
    },
    {
      name: 'void',
      call: 'void',
      send: (id, sent) => client.void(id, { reason: 'r' }, sent),
      other: (id, sent) => client.void(id, { reason: 's' }, sent),
      amountCents: 10_300,
      status: 'voided',
    },
  ];
  const faults = [
    ['cut after it was executed', { answer: 'cut', effect: true }, true],
    ['cut before it was executed', { answer: 'cut', effect: false }, false],
    ['answered with no JSON, executed', { answer: 'not_json', effect: true }, true],
    ['answered with no JSON, not executed', { answer: 'not_json', effect: false }, false],
    ['answered without its fields', { answer: 'missing_fields', effect: true }, true],
    ['answered for another reference', { answer: 'other_reference', effect: true }, true],
    ['answered with 2 MiB', { answer: 'oversized', effect: true }, true],
    ['answered with a bare 500, executed', { answer: 'bare_500', effect: true }, true],
    ['answered with a bare 500, not executed', { answer: 'bare_500', effect: false }, false],
  ] as const;
  describe.each(operations.map((operation) => [operation.name, operation] as const))('%s', (_, { send, other, amountCents, status }) => {
    test.each(faults)('%s: 504, the payment unchanged, then the same key completes it once', async (__, fault, executed) => {
      const { id } = await client.created(paymentOf(portal));
      const before = (await client.find(id)).data;
      const key = newKey();
      const movements = await moved(async () => {
        await arm({ match: { call: 'void' }, ...fault });
        const first = await send(id, { key });
        expect([first.status, first.code]).toEqual([504, 'PAYMENT_TIMEOUT']);
        const { updatedAt: _at, ...unchanged } = before;
        expect((await client.find(id)).data).toMatchObject(unchanged);
        // The key is released, but still bound to its request (C17).
        expect((await other(id, { key })).code).toBe('IDEMPOTENCY_MISMATCH');
        const again = await send(id, { key, instance: 1 });
        expect([again.status, replayed(again)]).toEqual([200, undefined]);
        expect(again.data).toMatchObject({ id, amountCents, reason: 'r' });
        expectReplay(await send(id, { key }), { ...again, headers: {} });
      });
      expect(movements.map(({ op, amountCents: cents }) => [op, cents])).toEqual([['void', amountCents]]);
      expect((await client.find(id)).data).toMatchObject({ status, refundedAmountCents: amountCents });
      // If the first void was not executed, the service finalised its reference before the second void. So the first void can never be executed
      // later.
      const tombstones = (await service.simulator.truth()).filter(({ op, number }) => op === 'tombstone' && number > movements[0]!.number - 10);
      expect(tombstones.length > 0 || executed).toBe(true);
    });

    test('not processed, as the gateway says: 502 PAYMENT_GATEWAY_ERROR, unchanged, then the same key completes it (C62)', async () => {
      const { id } = await client.created(paymentOf(portal));
      const key = newKey();
      const movements = await moved(async () => {
        await arm({ match: { call: 'void' }, answer: 'disabled' });
        const first = await send(id, { key });
        expect([first.status, first.details]).toEqual([502, { code: 'PAYMENT_GATEWAY_ERROR', id }]);
        expect(await client.status(id)).toBe('succeeded');
        expect((await other(id, { key })).code).toBe('IDEMPOTENCY_MISMATCH');
        expect((await send(id, { key })).status).toBe(200);
      });
      expect(movements).toHaveLength(1);
    });

    test('while the gateway cannot tell: 504 again under the key, 422 INVALID_STATE for others; afterwards it completes (C17, C18)', async () => {
      const { id } = await client.created(paymentOf(portal));
      const key = newKey();
      const movements = await moved(async () => {
        await arm({ match: { call: 'void' }, answer: 'cut' });
        await arm({ match: { call: 'finalize' }, answer: 'cut', times: null });
        expect((await send(id, { key })).code).toBe('PAYMENT_TIMEOUT');
        expect((await send(id, { key })).code).toBe('PAYMENT_TIMEOUT');
        for (const answer of [
          await send(id),
          await send(id, { key: newKey() }),
          await client.refund(id, { amountCents: 7 }),
          await client.void(id),
        ]) {
          expect([answer.status, answer.code]).toEqual([422, 'INVALID_STATE']);
          expect(answer.message).toMatch(/reconciled/);
        }
        await service.simulator.clearFaults();
        expect((await send(id, { key })).status).toBe(200);
      });
      expect(movements).toHaveLength(1);
    });

    test('resolved by recovery meanwhile: the key still gets the result (C17)', async () => {
      for (const effect of [true, false]) {
        const { id } = await client.created(paymentOf(portal));
        const key = newKey();
        const movements = await moved(async () => {
          await arm({ match: { call: 'void' }, answer: 'cut', effect });
          expect((await send(id, { key })).code).toBe('PAYMENT_TIMEOUT');
          await service.recover(id);
          expect((await client.find(id)).data.refundedAmountCents).toBe(effect ? amountCents : 0);
          expect((await send(id, { key })).data).toMatchObject({ amountCents });
        });
        expect(movements).toHaveLength(1);
      }
    });

    test('without a key: the result is given once (C18)', async () => {
      const { id } = await client.created(paymentOf(portal));
      const movements = await moved(async () => {
        await arm({ match: { call: 'void' }, answer: 'cut' });
        expect((await send(id)).code).toBe('PAYMENT_TIMEOUT');
        expect((await send(id)).data).toMatchObject({ amountCents });
      });
      expect(movements).toHaveLength(1);
    });

    test('its owner is slow and has lost its lease: the same call under the same reference, one movement, one answer (C17)', async () => {
      const { id } = await client.created(paymentOf(portal));
      const key = newKey();
      const movements = await moved(async () => {
        // The processor executes the void at once, but answers late.
        await arm({ match: { call: 'void' }, delayAfterMs: 3_000 });
        const before = (await service.simulator.truth()).length;
        const first = send(id, { key });
        await eventually(async () => (await service.simulator.truth(before)).some(({ op }) => op === 'void'));
        await service.services.pool.query(`update idempotency_key set lease_until = clock_timestamp() - interval '1 second' where key_hash = $1`, [
          keyHash(key),
        ]);
        const second = await send(id, { key, instance: 1 });
        expect(second.data).toMatchObject({ amountCents });
        expect((await first).text).toBe(second.text);
        expectReplay(await send(id, { key }), second);
      });
      expect(movements).toHaveLength(1);
    });
  });

  test('without a key, a third request returns money again: it is a refund of its own (C18)', async () => {
    const { id } = await client.created(paymentOf(portal));
    const send = () => client.refund(id, { amountCents: 1_000 });
    const movements = await moved(async () => {
      await arm({ match: { call: 'void' }, answer: 'cut' });
      expect((await send()).code).toBe('PAYMENT_TIMEOUT');
      expect((await send()).data).toMatchObject({ amountCents: 1_000, remainingRefundableAmountCents: 9_300 });
      expect((await send()).data).toMatchObject({ amountCents: 1_000, remainingRefundableAmountCents: 8_300 });
    });
    expect(movements).toHaveLength(2);
  });

  test('without a key, another refund does not get the result; the one that repeats does (C18)', async () => {
    const { id } = await client.created(paymentOf(portal));
    const movements = await moved(async () => {
      await arm({ match: { call: 'void' }, answer: 'cut' });
      expect((await client.refund(id, { amountCents: 1_000 })).code).toBe('PAYMENT_TIMEOUT');
      expect((await client.refund(id, { amountCents: 500 })).data).toMatchObject({ amountCents: 500, remainingRefundableAmountCents: 8_800 });
      // A request with a key matches only the attempt of that key.
      expect((await client.refund(id, { amountCents: 1_000 }, { key: newKey() })).data).toMatchObject({ remainingRefundableAmountCents: 7_800 });
      expect((await client.refund(id, { amountCents: 1_000 })).data).toMatchObject({ amountCents: 1_000, remainingRefundableAmountCents: 9_300 });
    });
    expect(movements).toHaveLength(3);
    expect((await client.find(id)).data).toMatchObject({ refundedAmountCents: 2_500, remainingRefundableAmountCents: 7_800 });
  });

  test('without a key, the result of a keyed attempt that no caller got (C18)', async () => {
    const { id } = await client.created(paymentOf(portal));
    const key = newKey();
    const movements = await moved(async () => {
      await arm({ match: { call: 'void' }, answer: 'cut' });
      expect((await client.refund(id, { amountCents: 1_000 }, { key })).code).toBe('PAYMENT_TIMEOUT');
      expect((await client.refund(id, { amountCents: 1_000 }, { key })).status).toBe(200);
      // The key's own retry has already got the result. So this request is a new refund.
      expect((await client.refund(id, { amountCents: 1_000 })).data).toMatchObject({ remainingRefundableAmountCents: 8_300 });
    });
    expect(movements).toHaveLength(2);
  });

  test('without a key, feeType none repeats the refund without it (C18)', async () => {
    const { id } = await client.created(paymentOf(portal));
    await arm({ match: { call: 'void' }, answer: 'cut' });
    expect((await client.refund(id, { amountCents: 10 })).code).toBe('PAYMENT_TIMEOUT');
    expect((await client.refund(id, { amountCents: 10, feeType: 'none' })).status).toBe(200);
    expect((await client.find(id)).data.refundedAmountCents).toBe(10);
  });

  test('without a key, only within 24 hours (C18)', async () => {
    const { id } = await client.created(paymentOf(portal));
    const movements = await moved(async () => {
      await arm({ match: { call: 'void' }, answer: 'cut' });
      expect((await client.refund(id, { amountCents: 1_000 })).code).toBe('PAYMENT_TIMEOUT');
      service.clock.advance(24 * 3_600_000 + LATER_MS);
      expect((await client.refund(id, { amountCents: 1_000 })).data).toMatchObject({ remainingRefundableAmountCents: 8_300 });
    });
    expect(movements).toHaveLength(2);
  });
});

// This must be the last block: it moves the clock forward by a month.
describe('replay beats state (docs/contract.md#order-of-evaluation)', () => {
  test('a replay is answered though the card has expired, the case is blocked, the portal revoked', async () => {
    const where = await service.portal(partner);
    const { admin, administer, clock } = service;
    const key = newKey();
    const body = paymentOf(where, { referenceId: 'CASE-9', paymentMethod: card(CARD.approved, { expirationDate: expiryIn(0, clock.now()) }) });
    const first = await client.create(body, { key });
    expect(first.status).toBe(200);
    const refundKey = newKey();
    const refund = await client.refund(first.data.id, { amountCents: 1 }, { key: refundKey });

    await administer(admin.restrictCase({ portalId: where, referenceId: 'CASE-9', kind: 'block', until: null, reason: null }));
    expectReplay(await client.create(body, { key }), first);
    await administer(admin.revokeAccess(where, partner.accountId));
    expectReplay(await client.create(body, { key }), first);
    expectReplay(await client.refund(first.data.id, { amountCents: 1 }, { key: refundKey }), refund);
    clock.advance(33 * 24 * 3_600_000);
    expectReplay(await client.create(body, { key, instance: 1 }), first);
    expect((await client.create(body, { key: newKey() })).code).toBe('VALIDATION_ERROR');
    expect((await client.post(PAYMENTS, paymentOf(where), { key: newKey() })).code).toBe('PORTAL_ACCESS_DENIED');
  });
});

describe('rules that are younger than a key come after the look at it (E7, C63)', () => {
  interface Raw {
    readonly amount?: string;
    readonly reference?: string;
    readonly line?: string;
    readonly payer?: string;
  }
  const bodyOf = ({ amount = '100', reference = '"INV-1"', line = '', payer = '' }: Raw): string =>
    `{"portalId":"${portal}","amountCents":100,"paymentMethod":${JSON.stringify(card())},"lineItems":[{"amountCents":${amount},"referenceId":${reference}${line}}]${payer}}`;
  /** Requests that older releases took, and the field that is refused now. */
  const young: readonly [string, string, Raw][] = [
    ['a number with more digits than come back', 'body', { line: ',"metadata":{"n":1e-400}' }],
    ['an amount that becomes an integer', 'body', { amount: '100.00000000000000001' }],
    ['a control character in a reference', 'lineItems[0].referenceId', { reference: String.raw`"a\u001b[2J"` }],
    ['a line break in a reference', 'lineItems[0].referenceId', { reference: String.raw`"a\nb"` }],
    ['a bidi override in a description', 'lineItems[0].description', { line: String.raw`,"description":"a\u202eb"` }],
    ['a control character in a key of metadata', 'lineItems[0].metadata', { line: String.raw`,"metadata":{"a":{"\u0085":1}}` }],
    ['a card number with the letter O', 'lineItems[0].description', { line: ',"description":"4OOO OO77 7OOO 5O46"' }],
    ['an invisible character in an e-mail address', 'payer.email', { payer: String.raw`,"payer":{"email":"a\u00adda@example.org"}` }],
  ];
  /** Charges as an older release did, which knew no such rule. */
  const byOlderRelease = (text: string, key: string) => {
    const body = parseStrictJson(Buffer.from(text), { later: [] });
    const request = chargeRequestOf(partner.accountId, body, []);
    const received = { idempotencyKey: key, ...requestText('POST', PAYMENTS, body), requestId: key };
    return chargeOnce(service.services.payments, request, received);
  };

  test.each(young)('create: %s is refused at %s, and its key is given back; what was charged before is replayed', async (_, field, raw) => {
    const text = bodyOf(raw);
    const key = newKey();
    const charges = await moved(async () => {
      const refused = await client.create(text, { key });
      expect([refused.status, refused.code, refused.details]).toMatchObject([400, 'VALIDATION_ERROR', { errors: [{ field }] }]);
      expect((await client.create(text)).code).toBe('VALIDATION_ERROR');
    });
    expect(charges).toEqual([]);
    expect(await service.services.payments.idempotency.look({ accountId: partner.accountId, key, operation: 'create', fingerprintText: '', loggedText: '' })).toBeNull(); // prettier-ignore

    const answered = await byOlderRelease(text, key);
    const again = await moved(async () => {
      const replay = await client.create(text, { key, instance: 1 });
      expect([replay.status, replayed(replay), replay.data.id]).toEqual([200, 'true', 'view' in answered && answered.view.id]);
      expect((await client.create(bodyOf({ reference: '"INV-2"' }), { key })).code).toBe('IDEMPOTENCY_MISMATCH');
    });
    expect(again).toEqual([]);
  });

  test('a late refusal never comes before an earlier step: 501, the card in digits; tabs and line breaks of a description pass', async () => {
    const line = { amountCents: 10_000, referenceId: 'INV-1', description: 'a\tb\r\nc', metadata: { 'k\n': 'v\n', n: [0.1, 1e3] } };
    expect((await client.create({ ...paymentOf(portal), lineItems: [line] })).status).toBe(200);
    const bad = { ...line, description: '\u001b' };
    expect((await client.create({ ...paymentOf(portal), capture: 'auth', lineItems: [bad] })).code).toBe('CAPTURE_NOT_SUPPORTED');
    const both = await client.create({ ...paymentOf(portal), lineItems: [{ ...bad, referenceId: '4242424242424242' }] });
    expect(both.details).toMatchObject({ errors: [{ field: 'lineItems[0].referenceId' }] });
    expect((await client.create({ ...paymentOf(portal), payer: { email: 'ada@bücher.example' } })).data.payer).toEqual({
      email: 'ada@bücher.example',
    });
  });

  test.each(['partner', 'staff'] as const)('refund by %s: an attempt that an older release began is completed', async (by) => {
    const reason = 'over\u001b[31mcharged';
    const send = (id: string, key: string) =>
      by === 'partner'
        ? client.refund(id, { amountCents: 10, reason }, { key })
        : reverseByStaff(
            service.services.payments,
            { operation: 'refund', paymentId: id, amountCents: 10, includeFee: false, reason, by: 'Kim' },
            key,
          ).then(
            () => ({ status: 200, code: undefined }),
            (error: ServiceError) => ({ status: error.status, code: error.code }),
          );
    const { id } = await client.created(paymentOf(portal));
    const key = newKey();
    expect(await send(id, key)).toMatchObject({ status: 400, code: 'VALIDATION_ERROR' });
    expect((await client.find(id)).data.refundedAmountCents).toBe(0);

    // The row of a key that an older release left: bound to the request, its attempt in the log, and released after a 504.
    const pools = service.services.pool;
    await arm({ match: { call: 'void' }, answer: 'cut', effect: true });
    expect((await client.refund(id, { amountCents: 10, reason: 'RR' }, { key })).code).toBe('PAYMENT_TIMEOUT');
    const request = { amountCents: 10, reason };
    const text =
      by === 'partner'
        ? requestText('POST', `${PAYMENTS}/${id}/refund`, request)
        : requestText('STAFF', `refund ${id}`, { amountCents: 10, includeFee: false, reason });
    const accountId = by === 'partner' ? partner.accountId : '00000000-0000-0000-0000-000000000000';
    const fp = Buffer.from(service.services.payments.idempotency.recorded({ accountId, key, operation: `refund:${id}`, fingerprintText: '', loggedText: text.fingerprintText }).fingerprint, 'hex'); // prettier-ignore
    await pools.query('update idempotency_key set fp = $1, api_account_id = $2 where key_hash = $3', [fp, accountId, keyHash(key)]);
    const movements = await moved(async () => expect(await send(id, key)).toMatchObject({ status: 200 }));
    expect(movements).toEqual([]);
    expect((await client.find(id)).data.refundedAmountCents).toBe(10);
  });
});

describe('GET /payments?idempotencyKey (C44)', () => {
  const look = (key: string, more = '', sent?: Sent) =>
    client.get<PaymentPage & { keyState: string }>(`${PAYMENTS}?idempotencyKey=${encodeURIComponent(key)}${more}`, sent);
  const seen = async (key: string) => {
    const { status, data } = await look(key);
    return [status, data.keyState, data.payments.map(({ id }) => id), data.nextCursor];
  };

  test('completed: the payment that the key made, as it is now; a declined one too', async () => {
    const key = `${newKey()} +/&=%`;
    const { id } = await client.created(paymentOf(portal), { key });
    await client.refund(id, { amountCents: 5 });
    expect(await seen(key)).toEqual([200, 'completed', [id], null]);
    expect((await look(key)).data.payments).toEqual([(await client.find(id)).data]);
    const declined = newKey();
    const { details } = await client.create(paymentOf(portal, { number: CARD.declined }), { key: declined });
    expect(await seen(declined)).toEqual([200, 'completed', [details!.id], null]);
  });

  test('absent: no such key, one that was given back, a key of a refund, or of another account; the message promises nothing', async () => {
    const [refund, back, others] = [newKey(), newKey(), newKey()];
    await client.refund((await client.created(paymentOf(portal))).id, { amountCents: 5 }, { key: refund });
    await client.create({ ...paymentOf(portal), portalId: '018f0000-0000-7000-8000-00000000dead' }, { key: back });
    const stranger = await service.account();
    await stranger.client.create(paymentOf(await service.portal(stranger)), { key: others });
    for (const key of [newKey(), refund, back, others]) expect(await seen(key)).toEqual([200, 'absent', [], null]);
    expect((await look(newKey())).message).toMatch(/promises nothing/);
  });

  test('reserved: the payment to read, or none if nothing was charged', async () => {
    const key = newKey();
    const { details } = await client.create(paymentOf(portal, { number: CARD.unresolvable }), { key });
    expect(await seen(key)).toEqual([200, 'reserved', [details!.id], null]);
    const vanished = newKey();
    await client.create(paymentOf(portal), { key: vanished });
    await vanish(vanished, service.services.ids.uuid());
    expect(await seen(vanished)).toEqual([200, 'reserved', [], null]);
    expect((await client.create(paymentOf(portal), { key: vanished })).message).toBe('Nothing was charged. Use a new key.');
  });

  test('while the request runs 409 with Retry-After; an expired lease is taken over first (T7)', async () => {
    const key = newKey();
    const first = client.create(paymentOf(portal, { number: CARD.slow }), { key });
    await claimed(key);
    const running = await look(key, '', { instance: 1 });
    expect([running.status, running.code]).toEqual([409, 'IDEMPOTENCY_IN_PROGRESS']);
    expect(Number(running.headers['retry-after'])).toBeGreaterThanOrEqual(1);
    const { id } = (await first).data;
    await vanish(key);
    expect(await moved(async () => expect(await seen(key)).toEqual([200, 'completed', [id], null]))).toEqual([]);
  });

  test.each([
    ['an empty key', '', ''],
    ['a key of 256 characters', 'k'.repeat(256), ''],
    ['a key that is not ASCII', 'kä', ''],
    ['another parameter', 'k', '&limit=1'],
    ['an unknown parameter', 'k', '&referenceId=R'],
    ['a second key', 'k', '&idempotencyKey=k'],
  ])('%s: 400', async (_, key, more) => {
    const answer = await look(key, more);
    expect([answer.status, answer.code]).toEqual([400, 'VALIDATION_ERROR']);
  });

  test('503 while rows of keys may be missing; and no line of the log holds the key', async () => {
    const key = 'a-key-that-no-log-may-hold';
    const { id } = await client.created(paymentOf(portal), { key });
    const { claims } = service.services.payments;
    const { isOpen } = claims;
    const begun = claims.begun.bind(claims);
    try {
      Object.assign(claims, { isOpen: false, begun: () => Promise.resolve() });
      expect([(await look(key)).code, (await look('another')).code]).toEqual(['IDEMPOTENCY_UNAVAILABLE', 'IDEMPOTENCY_UNAVAILABLE']);
    } finally {
      Object.assign(claims, { isOpen, begun });
    }
    expect(await seen(key)).toEqual([200, 'completed', [id], null]);
    expect(service.log.some((line) => line.includes('answered'))).toBe(true);
    expect(service.log.filter((line) => line.includes(key))).toEqual([]);
  });
});

describe('examples/no-card-on-disk: a program of a partner that dies before it has the answer', () => {
  const TILL = new URL('../../examples/no-card-on-disk/pay.mjs', import.meta.url).pathname.replace('/dist/', '/');
  const INTENTIONS = 5;
  const KILLS_OF_EACH = 4;

  test('killed at twenty random moments: each intention is charged once, and no card is in its record', async () => {
    const folder = await mkdtemp(join(tmpdir(), 'payfold-till-'));
    const { cardNumber, expirationDate, cvv } = card();
    const run = (number: number) => {
      const env = { PAYFOLD_URL: service.urls[0], PAYFOLD_API_KEY: partner.apiKey, PORTAL: portal, RECORD: join(folder, 'payments.ndjson') };
      const program = spawn(process.execPath, [TILL, `intention-${number}`, String(1_000 + number)], { env, stdio: ['pipe', 'ignore', 'inherit'] });
      program.stdin.on('error', () => undefined).end(JSON.stringify({ cardNumber, expirationDate, cvv }));
      return { program, exited: new Promise<number | null>((resolve) => program.on('exit', resolve)) };
    };
    try {
      const begun = performance.now();
      expect(await run(0).exited).toBe(0);
      const longest = (performance.now() - begun) * 1.5;
      const moments: number[] = [];
      const charges = await moved(() =>
        Promise.all(
          Array.from({ length: INTENTIONS }, async (_, index) => {
            for (let kill = 0; kill < KILLS_OF_EACH; kill++) {
              const { program, exited } = run(index + 1);
              const moment = Math.random() * longest;
              moments.push(Math.round(moment));
              await Promise.race([sleep(moment), exited]);
              program.kill('SIGKILL');
              await exited;
            }
            let code = await run(index + 1).exited;
            for (let again = 0; code === 2 && again < 10; again++) code = await run(index + 1).exited;
            expect([index, code]).toEqual([index, 0]);
          }),
        ),
      );
      const paid = (await client.list({ limit: 100 })).data.payments.flatMap(({ status, lineItems }) => (status === 'succeeded' ? lineItems.map(({ referenceId }) => referenceId) : [])); // prettier-ignore
      const amounts = charges.filter(({ op }) => op === 'charge').map(({ amountCents }) => amountCents! - 1_300);
      const numbers = Array.from({ length: INTENTIONS }, (_, index) => index + 1);
      expect([moments, amounts.sort()]).toEqual([moments, numbers]);
      expect(paid.filter((reference) => reference.startsWith('intention-')).sort()).toEqual([0, ...numbers].map((number) => `intention-${number}`));
      const record = await readFile(join(folder, 'payments.ndjson'), 'utf8');
      for (const secret of [cardNumber, cardNumber.replaceAll(' ', ''), expirationDate, 'cvv']) expect(record).not.toContain(secret);
    } finally {
      await rm(folder, { recursive: true, force: true });
    }
  }, 120_000);
});
