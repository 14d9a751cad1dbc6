/** Reading and listing payments (specification, Endpoints; C7, C44–C49). */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import type { PaymentView } from '#payments';
import { CARD, type Client, PARTNER, paymentOf, PAYMENTS, type Service, startService, type TestAccount } from '../support/service.js';

const STRANGER = '018f0000-0000-7000-8000-00000000dead';

let service: Service;
let partner: TestAccount;
let other: TestAccount;
let client: Client;
let portal: string;
let second: string;
beforeAll(async () => {
  service = await startService({ instances: 2 });
  partner = await service.account();
  other = await service.account('Other');
  client = partner.client;
  portal = await service.portal(partner, { fee: { chargeMode: 'combined' } });
  second = await service.portal(partner, { fee: { chargeMode: 'combined' } });
});
afterAll(() => service.stop());

/** All pages, one after the other. */
const pages = async (query: Record<string, string | number>, between?: () => Promise<unknown>): Promise<PaymentView[][]> => {
  const all: PaymentView[][] = [];
  for (let cursor: string | null = ''; cursor !== null;) {
    const answer: Awaited<ReturnType<Client['list']>> = await client.list(
      { ...query, ...(cursor === '' ? {} : { cursor }) },
      { instance: all.length % 2 },
    );
    expect(answer.status).toBe(200);
    all.push([...answer.data.payments]);
    cursor = answer.data.nextCursor;
    await between?.();
  }
  return all;
};
const expectInvalid = async (query: string, on: Client = client) => {
  const { status, code } = await on.get(`${PAYMENTS}?${query}`);
  expect([query, status, code]).toEqual([query, 400, 'VALIDATION_ERROR']);
};

describe('GET /payments/{id}', () => {
  test('404 PAYMENT_NOT_FOUND with byte-identical bodies: absent, foreign, a line item id, no UUID (C7)', async () => {
    const { id, lineItems } = await client.created(paymentOf(portal));
    const answers = [
      await client.find(STRANGER),
      await other.client.find(id),
      await client.find(lineItems[0]!.id),
      await client.find('nonsense'),
      await client.find(`${id}0`),
      await client.find(id.slice(0, -1)),
      await client.find('0'),
      await client.find('%00'),
      await client.find("'%20or%201=1"),
      await client.find('..%2f..%2fetc'),
      await client.find('x'.repeat(400)),
      await client.find('%F0%9F%98%80'),
    ];
    for (const { status, code } of answers) expect([status, code]).toEqual([404, 'PAYMENT_NOT_FOUND']);
    expect(new Set(answers.map(({ text }) => text)).size).toBe(1);
    expect((await client.find(id)).status).toBe(200);
  });

  test('an id in upper case is the same id', async () => {
    const { id } = await client.created(paymentOf(portal));
    expect((await client.find(id.toUpperCase())).data.id).toBe(id);
  });

  test('a query is ignored', async () => {
    const { id } = await client.created(paymentOf(portal));
    expect((await client.get(`${PAYMENTS}/${id}?x=1&x=2`)).status).toBe(200);
  });
});

describe('GET /payments', () => {
  test('an account without payments: an empty page', async () => {
    const { text } = await other.client.list();
    expect(JSON.parse(text)).toEqual({ success: true, data: { payments: [], nextCursor: null } });
  });

  test('newest first, the account’s own, exactly as GET shows them; 25 a page unless said otherwise', async () => {
    for (let count = 0; count < 27; count++) await client.created(paymentOf(portal));
    const { data } = await client.list();
    expect(data.payments).toHaveLength(25);
    expect(data.nextCursor).toEqual(expect.any(String));
    const places = data.payments.map(({ createdAt, id }) => `${createdAt} ${id}`);
    expect(places).toEqual([...places].sort().reverse());
    for (const payment of data.payments.slice(0, 3)) expect((await client.find(payment.id)).data).toEqual(payment);
    expect((await other.client.list()).data.payments).toEqual([]);
  });

  test('read your writes: every answer that has an id is in the list at once, on any instance (C48)', async () => {
    for (const [number, status] of [
      [CARD.approved, 'succeeded'],
      [CARD.declined, 'failed'],
      [CARD.gatewayError, 'failed'],
      [CARD.unreadable, 'unknown'],
    ] as const) {
      const answer = await client.create(paymentOf(portal, { number }));
      const id = (answer.details?.id as string | undefined) ?? answer.data.id;
      for (const instance of [1, 0]) {
        expect((await client.list({ limit: 1 }, { instance })).data.payments.map((payment) => [payment.id, payment.status])).toEqual([[id, status]]);
        expect((await client.find(id, { instance })).data.status).toBe(status);
      }
    }
    const { id } = await client.created(paymentOf(portal));
    await client.refund(id, { amountCents: 1 });
    expect((await client.list({ limit: 1 }, { instance: 1 })).data.payments[0]).toMatchObject({ id, status: 'partially_refunded' });
    await client.refund(id, { feeType: 'include_fee' });
    expect((await client.list({ limit: 1, status: 'refunded' }, { instance: 1 })).data.payments[0]).toMatchObject({ id });
  });

  test('hundreds of payments, page by page, while more arrive: no gap, no repeat (C45)', async () => {
    const where = await service.portal(partner, { fee: { chargeMode: 'combined' } });
    const make = (count: number) =>
      Promise.all(Array.from({ length: count }, (_, index) => client.created(paymentOf(where), { instance: index % 2 })));
    const made: PaymentView[] = [];
    for (let round = 0; round < 10; round++) made.push(...(await make(25)));
    const expected = made
      .map(({ createdAt, id }) => `${createdAt} ${id}`)
      .sort()
      .reverse()
      .map((place) => place.split(' ')[1]);
    const arriving: Promise<unknown>[] = [];
    const read = await pages({ portalId: where, limit: 17 }, async () => void arriving.push(make(3)));
    await Promise.all(arriving);
    expect(read.slice(0, -1).every((page) => page.length === 17)).toBe(true);
    expect(read.flat().map(({ id }) => id)).toEqual(expected);
    // `to` is exclusive: before the creation of the first payment, the list is empty.
    expect((await pages({ portalId: where, limit: 5, to: made.map(({ createdAt }) => createdAt).sort()[0]! })).flat()).toEqual([]);
    const all = (await pages({ portalId: where, limit: 100 })).flat().length;
    expect(all).toBe(250 + 3 * read.length);
  });

  test('payments of one millisecond are ordered by id (C45)', async () => {
    const where = await service.portal(partner, { fee: { chargeMode: 'combined' } });
    const made = await service.clock.frozenDuring(() => Promise.all(Array.from({ length: 12 }, () => client.created(paymentOf(where)))));
    expect(new Set(made.map(({ createdAt }) => createdAt)).size).toBe(1);
    const read = (await pages({ portalId: where, limit: 5 })).flat().map(({ id }) => id);
    expect(read).toEqual(
      made
        .map(({ id }) => id)
        .sort()
        .reverse(),
    );
  });

  test('by status: exactly one of the eight (C44)', async () => {
    const ids: Record<string, string> = {
      succeeded: (await client.created(paymentOf(second))).id,
      failed: (await client.create(paymentOf(second, { number: CARD.declined }))).details!.id as string,
      unknown: (await client.create(paymentOf(second, { number: CARD.unresolvable }))).details!.id as string,
      voided: (await client.created(paymentOf(second))).id,
      refunded: (await client.created(paymentOf(second))).id,
      partially_refunded: (await client.created(paymentOf(second))).id,
    };
    await client.void(ids.voided!);
    await client.refund(ids.refunded!);
    await client.refund(ids.partially_refunded!, { amountCents: 1 });
    for (const status of ['pending', 'authorized', 'succeeded', 'failed', 'voided', 'refunded', 'partially_refunded', 'unknown']) {
      const { data } = await client.list({ portalId: second, status });
      expect([status, data.payments.map(({ id }) => id)]).toEqual([status, ids[status] === undefined ? [] : [ids[status]]]);
    }
    for (const query of [
      'status=',
      'status=SUCCEEDED',
      'status=settled',
      'status=succeeded,failed',
      'status=succeeded&status=failed',
      'status=toString',
      'status[]=failed',
    ])
      await expectInvalid(query);
  });

  test('by portal (C46)', async () => {
    const { payments } = (await client.list({ portalId: second, limit: 100 })).data;
    expect(payments.length).toBeGreaterThan(0);
    expect(new Set(payments.map(({ portalId }) => portalId))).toEqual(new Set([second]));
    expect((await client.list({ portalId: second.toUpperCase(), limit: 100 })).data.payments).toEqual(payments);
    await expectInvalid('portalId=x');
    await expectInvalid('portalId=');
    for (const [on, portalId] of [
      [client, STRANGER],
      [other.client, portal],
    ] as const) {
      const { status, code } = await on.list({ portalId });
      expect([status, code]).toEqual([403, 'PORTAL_ACCESS_DENIED']);
    }
  });

  test('a portal that was revoked may still be read (C46, C47)', async () => {
    const where = await service.portal(partner);
    const { id } = await client.created(paymentOf(where));
    await service.administer(service.admin.revokeAccess(where, partner.accountId));
    expect((await client.list({ portalId: where })).data.payments.map((payment) => payment.id)).toEqual([id]);
    expect((await client.find(id)).status).toBe(200);
    expect((await client.list({ limit: 1 })).data.payments[0]!.id).toBe(id);
  });

  test('by time: from inclusive, to exclusive, on createdAt (C44)', async () => {
    const where = await service.portal(partner);
    const made: PaymentView[] = [];
    for (let count = 0; count < 3; count++) {
      made.push(await client.created(paymentOf(where)));
      service.clock.advance(1_000);
    }
    const [first, middle, last] = made as [PaymentView, PaymentView, PaymentView];
    const ids = async (query: Record<string, string>) => (await client.list({ portalId: where, ...query })).data.payments.map(({ id }) => id);
    const all = [last.id, middle.id, first.id];
    const later = (at: string, ms: number) => new Date(Date.parse(at) + ms).toISOString();
    expect(await ids({ from: middle.createdAt })).toEqual([last.id, middle.id]);
    expect(await ids({ from: later(middle.createdAt, 1) })).toEqual([last.id]);
    expect(await ids({ to: middle.createdAt })).toEqual([first.id]);
    expect(await ids({ to: later(middle.createdAt, 1) })).toEqual([middle.id, first.id]);
    expect(await ids({ from: middle.createdAt, to: last.createdAt })).toEqual([middle.id]);
    expect(await ids({ from: middle.createdAt, to: middle.createdAt })).toEqual([]);
    // The same instant in other spellings: with an offset, in lower case, with another precision.
    const offset = `${new Date(Date.parse(middle.createdAt) + 5.5 * 3_600_000).toISOString().slice(0, -1)}+05:30`;
    expect(await ids({ from: offset })).toEqual([last.id, middle.id]);
    expect(await ids({ from: middle.createdAt.toLowerCase() })).toEqual([last.id, middle.id]);
    expect(await ids({ from: `${middle.createdAt.slice(0, -1)}000000Z` })).toEqual([last.id, middle.id]);
    // A date without a time means the first moment of that day in UTC.
    const today = first.createdAt.slice(0, 10);
    const tomorrow = later(`${today}T00:00:00Z`, 2 * 86_400_000).slice(0, 10);
    expect(await ids({ from: today, to: tomorrow })).toEqual(all);
    expect(await ids({ to: today })).toEqual([]);
    expect(await ids({ from: '2024-02-29' })).toEqual(all);
  });

  test.each([
    'from=',
    'from=yesterday',
    'from=2024-13-01',
    'from=2024-02-30',
    'from=2023-02-29',
    'from=2024-2-3',
    'from=20240203',
    'from=2024-02-03T10:00:00',
    'from=2024-02-03T24:00:00Z',
    'from=2024-02-03T10:60:00Z',
    'from=2024-02-03T10:00Z',
    'from=2024-02-03T10:00:00%2B25:00',
    'from=2024-02-03T10:00:00+01:00',
    'from=2024-02-03%2010:00:00Z',
    'from=1700000000',
    'to=never',
    'from=2024-02-03&to=2024-02-02',
    'from=2024-02-03&from=2024-02-04',
    'to=2024-02-03&to=2024-02-03',
    'limit=0',
    'limit=101',
    'limit=-1',
    'limit=1.5',
    'limit=ten',
    'limit=',
    'limit=010',
    'limit=1&limit=2',
    'referenceId=CASE-1',
    'offset=10',
    'page=2',
    'amount=1',
    'Status=failed',
    'cursor=',
    'cursor=x',
    'cursor=a&cursor=b',
    'cursor=%00',
    '__proto__=1',
    'constructor=1',
    'portalId=018f0000-0000-7000-8000-00000000dead&portalId=018f0000-0000-7000-8000-00000000dead',
  ])('%s → 400 (C44)', (query) => expectInvalid(query));

  test('an unknown parameter does not hide other faults; an unescaped + gets a hint', async () => {
    const { status, text } = await client.get(`${PAYMENTS}?referenceId=CASE-1&limit=0&from=2024-02-03T10:00:00+01:00`);
    expect(status).toBe(400);
    expect((JSON.parse(text) as { details: { errors: unknown[] } }).details.errors).toEqual([
      { field: 'referenceId', message: 'is not a supported parameter' },
      { field: 'from', message: 'must be RFC 3339 with offset, or YYYY-MM-DD; write + as %2B in a query' },
      { field: 'limit', message: 'must be 1 to 100' },
    ]);
  });
  test('limit 1 to 100', async () => {
    expect((await client.list({ limit: 1 })).data.payments).toHaveLength(1);
    expect((await client.list({ limit: 100 })).data.payments).toHaveLength(100);
  });
});

describe('the cursor (C45)', () => {
  test('one of an earlier form: 400 that says so', async () => {
    const form1 = Buffer.from((await client.list({ limit: 1 })).data.nextCursor!, 'base64url');
    form1[0] = 1;
    const { status, message } = await client.list({ cursor: form1.toString('base64url') });
    expect([status, message]).toEqual([400, 'cursor is of an earlier release; ask for the first page again.']);
  });
  test('tampered in any place, cut, lengthened, another’s, with other filters → 400; with another limit it works', async () => {
    const cursor = (await client.list({ limit: 1 })).data.nextCursor!;
    expect(cursor).toMatch(/^[A-Za-z0-9_-]+$/);
    for (let index = 0; index < cursor.length; index++) {
      const tampered = cursor.slice(0, index) + (cursor[index] === 'A' ? 'B' : 'A') + cursor.slice(index + 1);
      await expectInvalid(`cursor=${tampered}`);
    }
    for (const wrong of [cursor.slice(0, -1), `${cursor}A`, `${cursor}=`, cursor.slice(0, 10), Buffer.from(cursor).toString('base64')])
      await expectInvalid(`cursor=${encodeURIComponent(wrong)}`);
    await expectInvalid(`cursor=${cursor}`, other.client);
    for (const filter of [`portalId=${portal}`, 'status=succeeded', 'from=2020-01-01', 'to=2099-01-01'])
      await expectInvalid(`cursor=${cursor}&${filter}`);
    expect((await client.list({ cursor, limit: 2 })).data.payments).toHaveLength(2);
    expect((await client.list({ cursor, limit: 2 }, { instance: 1 })).data.payments).toHaveLength(2);
  });

  test.each(['0000-01-01', '0001-01-01T00:00:00+23:00', '9999-12-31T23:59:59-23:59'])(
    'an instant beyond years 1 to 9999 → 400: %s (C44)',
    async (to) => {
      expect((await client.list({ to })).code).toBe('VALIDATION_ERROR');
      expect((await client.list({ from: to })).code).toBe('VALIDATION_ERROR');
    },
  );
  test('an unknown parameter’s name is not repeated if it holds a card number', async () => {
    const answer = await client.list({ '4539064589943164': '1' });
    expect(answer.status).toBe(400);
    expect(answer.text).not.toContain('4539064589943164');
  });
  test('of a filtered list is good for that filter only, however the instant is written', async () => {
    const cursor = (await client.list({ limit: 1, from: '2020-01-01', status: 'succeeded' })).data.nextCursor!;
    expect((await client.list({ limit: 1, from: '2020-01-01T00:00:00Z', status: 'succeeded', cursor })).status).toBe(200);
    await expectInvalid(`cursor=${cursor}&status=succeeded`);
    await expectInvalid(`cursor=${cursor}&status=failed&from=2020-01-01`);
    await expectInvalid(`cursor=${cursor}`);
  });
});

describe('GET /fees/quote (C49)', () => {
  const quote = (query: string, on: Client = client) => on.get<Record<string, unknown>>(`${PARTNER}/fees/quote?${query}`);
  test('the fee of the portal for the amount', async () => {
    const where = await service.portal(partner, { fee: { flatCents: 50, percentBps: 275 } });
    const { status, text } = await quote(`portalId=${where}&amountCents=10000`);
    expect(status).toBe(200);
    expect(JSON.parse(text)).toEqual({
      success: true,
      data: { portalId: where, amountCents: 10_000, serviceFeeCents: 325, totalChargedCents: 10_325, currency: 'USD' },
    });
    expect((await quote(`portalId=${where.toUpperCase()}&amountCents=10000&other=1`)).data.portalId).toBe(where);
    expect((await quote(`portalId=${where}&amountCents=99999999`)).status).toBe(200);
    await service.administer(service.admin.changeFee(where, { flatCents: 0 }));
    expect((await quote(`portalId=${where}&amountCents=10000`)).data.serviceFeeCents).toBe(275);
  });
  test.each([
    '',
    'portalId=PORTAL',
    'amountCents=100',
    'portalId=x&amountCents=100',
    ...['0', '-1', '1.5', '100000000', '1e2', '0x10', '%20100', '', 'ten', '0100'].map((cents) => `portalId=PORTAL&amountCents=${cents}`),
    'portalId=PORTAL&amountCents=100&amountCents=100',
    'portalId=PORTAL&portalId=PORTAL&amountCents=100',
    'portalId=PORTAL&amountCents=100&amount=1',
    'portalId=PORTAL&amountCents=100&amount=1&amount=2',
  ])('%s → 400 (C3, C46)', async (query) => {
    const { status, code } = await quote(query.replaceAll('PORTAL', portal));
    expect([status, code]).toEqual([400, 'VALIDATION_ERROR']);
  });
  test('a portal that the account may not use, or does not exist: 403, one and the same', async () => {
    const revoked = await service.portal(partner);
    await service.administer(service.admin.revokeAccess(revoked, partner.accountId));
    const bodies = new Set<string>();
    for (const [on, where] of [
      [client, STRANGER],
      [other.client, portal],
      [client, revoked],
    ] as const) {
      const { status, code, text } = await quote(`portalId=${where}&amountCents=100`, on);
      expect([status, code]).toEqual([403, 'PORTAL_ACCESS_DENIED']);
      bodies.add(text);
    }
    expect(bodies.size).toBe(1);
  });
});
