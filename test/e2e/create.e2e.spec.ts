/** POST /api/partner/v1/payments: charges, refusals, and the order of the checks (specification, Endpoints; C1 to C11, C32 to C35, E1 to E13). */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { CARD, card, expiryIn, PARTNER, paymentOf, PAYMENTS, type Service, startService, type TestAccount } from '../support/service.js';

const UUID_V7 = /^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/;
const INSTANT = /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/;
const STRANGER = '018f0000-0000-7000-8000-00000000dead';

let service: Service;
let partner: TestAccount;
let portal: string;
let combined: string;
beforeAll(async () => {
  service = await startService();
  partner = await service.account();
  portal = await service.portal(partner);
  combined = await service.portal(partner, { fee: { flatCents: 50, percentBps: 250, chargeMode: 'combined' } });
});
afterAll(() => service.stop());

const create = (...args: Parameters<TestAccount['client']['create']>) => partner.client.create(...args);
/** A copy of the body with one field changed, for example `lineItems.0.referenceId`. The value undefined removes the field. */
const withField = (path: string, value: unknown, body: object = paymentOf(portal)): Record<string, unknown> => {
  const copy = structuredClone(body) as Record<string, unknown>;
  const names = path.split('.');
  const last = names.pop()!;
  let target: Record<string, unknown> = copy;
  for (const name of names) target = (target[name] ??= {}) as Record<string, unknown>;
  if (value === undefined) delete target[last];
  else target[last] = value;
  return copy;
};
const charges = async () => (await service.simulator.truth()).filter(({ op }) => op === 'charge').length;

describe('an approved payment', () => {
  test('every field of a Payment, with its type and its null rule (C2, C10, C11, C28)', async () => {
    const payer = {
      firstName: 'Ada',
      lastName: 'Lovelace',
      email: 'ada@example.com',
      phone: '+1 555 867 5309',
      address: { line1: '1 Main St', line2: 'Apt 2', city: 'Springfield', state: 'IL', zip: '62701' },
    };
    const { status, headers, data, text } = await create({
      ...paymentOf(portal, { lines: [3333, 3333, 3334], referenceId: 'CASE-77' }),
      lineItems: [
        { amountCents: 3333, referenceId: 'A', description: 'Water', metadata: { unit: 7, tags: ['x', null, 1.5, true] } },
        { amountCents: 3333, referenceId: 'B' },
        { amountCents: 3334, referenceId: 'C', metadata: {} },
      ],
      payer,
    });
    expect(status).toBe(200);
    expect(headers['content-type']).toBe('application/json; charset=utf-8');
    const id = expect.stringMatching(UUID_V7) as unknown as string;
    const instant = expect.stringMatching(INSTANT) as unknown as string;
    const line = { id, status: 'succeeded', refundedAmountCents: 0 };
    expect(data).toStrictEqual({
      id,
      status: 'succeeded',
      captureMode: 'sale',
      currency: 'USD',
      amountCents: 10_000,
      serviceFeeCents: 300,
      totalChargedCents: 10_300,
      refundedAmountCents: 0,
      remainingRefundableAmountCents: 10_300,
      authorizedAmountCents: 0,
      capturedAmountCents: 10_300,
      confirmationNumber: expect.stringMatching(/^[0-9A-HJKMNP-TV-Z]{4}-[0-9A-HJKMNP-TV-Z]{4}-[0-9A-HJKMNP-TV-Z]{2}$/),
      portalId: portal,
      referenceId: 'CASE-77',
      payer: { ...payer, address: { ...payer.address, country: 'US' } },
      paymentMethod: { type: 'card', brand: 'visa', last4: '4242' },
      gateway: { transactionId: expect.any(String), authCode: expect.any(String) },
      lineItems: [
        {
          ...line,
          amountCents: 3333,
          serviceFeeCents: 100,
          remainingRefundableAmountCents: 3433,
          referenceId: 'A',
          description: 'Water',
          metadata: { unit: 7, tags: ['x', null, 1.5, true] },
        },
        {
          ...line,
          amountCents: 3333,
          serviceFeeCents: 100,
          remainingRefundableAmountCents: 3433,
          referenceId: 'B',
          description: null,
          metadata: null,
        },
        { ...line, amountCents: 3334, serviceFeeCents: 100, remainingRefundableAmountCents: 3434, referenceId: 'C', description: null, metadata: {} },
      ],
      settlement: { status: 'unsettled', settledAt: null },
      expiresAt: null,
      capturedAt: instant,
      createdAt: instant,
      updatedAt: instant,
    });
    expect(Object.keys(JSON.parse(text) as object)).toEqual(['success', 'data']);
    expect((await partner.client.find(data.id)).text).toBe(text);
    expect((await partner.client.list({ limit: 1 })).data.payments).toEqual([data]);
  });

  test('the least that a request needs: no currency, no payer, no description', async () => {
    const { status, data } = await create({
      portalId: portal,
      amountCents: 100,
      paymentMethod: card(),
      lineItems: [{ amountCents: 100, referenceId: 'A' }],
    });
    expect(status).toBe(200);
    expect(data).toMatchObject({ currency: 'USD', payer: null, referenceId: null });
  });

  test.each([
    ['separate', () => portal, ['principal', 'fee'], [10_000, 300]],
    ['combined', () => combined, ['combined'], [10_300]],
  ] as const)('charge mode %s moves the money in legs %j (C41)', async (_, portalOf, legs, amounts) => {
    const before = (await service.simulator.truth()).length;
    const { data } = await create(paymentOf(portalOf()));
    const moved = (await service.simulator.truth(before)).filter(({ op }) => op === 'charge');
    expect(moved.map(({ leg }) => leg)).toEqual(legs);
    expect(moved.map(({ amountCents }) => amountCents)).toEqual(amounts);
    expect(data).toMatchObject({ status: 'succeeded', totalChargedCents: 10_300, gateway: { transactionId: moved[0]!.transactionId } });
  });

  test.each([
    ['capture', { capture: 'sale' }],
    ['captureMode, the deprecated alias', { captureMode: 'sale' }],
    ['both, alike', { capture: 'sale', captureMode: 'sale' }],
    ['unknown fields, which are ignored (C3)', { colour: 'blue', vaultId: 7, tip: { cents: 5 } }],
    ['an expiry without the slash', { paymentMethod: card(CARD.approved, { expirationDate: expiryIn(36).replace('/', '') }) }],
    ['a cvv of four digits on any brand (C5)', { paymentMethod: card(CARD.approved, { cvv: '9469' }) }],
    ['a portal id in upper case', () => ({ portalId: portal.toUpperCase() })],
  ])('accepted: %s', async (_, change) => {
    const { status, data } = await create({ ...paymentOf(portal), ...(typeof change === 'function' ? change() : change) });
    expect(status).toBe(200);
    expect(data.portalId).toBe(portal);
  });

  test('the card number leaves no trace but brand and last four', async () => {
    const { text } = await create(paymentOf(portal));
    expect(text).not.toMatch(/4242 ?4242/);
    expect(text).not.toMatch(/\b946\b/);
  });
});

describe('the service fee', () => {
  test.each([
    [10_000, { flatCents: 50, percentBps: 275 }, 325],
    [1_010, { percentBps: 250 }, 25],
    [1_020, { percentBps: 250 }, 26],
    [1, { percentBps: 250 }, 0],
    [100, { percentBps: 250, minCents: 100 }, 100],
    [9_999_999, { flatCents: 150, percentBps: 299, minCents: 100, maxCents: 5_000 }, 5_000],
  ])('of %i cents under %j is %i, charged as quoted (C32, C49)', async (amountCents, fee, serviceFeeCents) => {
    const priced = await service.portal(partner, { fee });
    const { data } = await create(paymentOf(priced, { lines: [amountCents] }));
    expect(data).toMatchObject({ amountCents, serviceFeeCents, totalChargedCents: amountCents + serviceFeeCents, status: 'succeeded' });
    const quote = await partner.client.get(`${PARTNER}/fees/quote?portalId=${priced}&amountCents=${amountCents}`);
    expect(quote.data).toEqual({ portalId: priced, amountCents, serviceFeeCents, totalChargedCents: amountCents + serviceFeeCents, currency: 'USD' });
  });

  test.each([
    [
      [3333, 3333, 3334],
      [108, 108, 109],
    ],
    [
      [5000, 3000, 2000],
      [163, 97, 65],
    ],
  ])('325 cents over the lines %j are %j (C33)', async (lines, shares) => {
    const priced = await service.portal(partner, { fee: { flatCents: 50, percentBps: 275 } });
    const { data } = await create(paymentOf(priced, { lines }));
    expect(data.lineItems.map(({ serviceFeeCents }) => serviceFeeCents)).toEqual(shares);
  });

  test('is the configuration in force at charge time, and a payment keeps it (C32)', async () => {
    const priced = await service.portal(partner, { fee: { flatCents: 10 } });
    const first = await partner.client.created(paymentOf(priced));
    await service.administer(service.admin.changeFee(priced, { flatCents: 20 }));
    expect((await create(paymentOf(priced))).data.serviceFeeCents).toBe(20);
    expect((await partner.client.find(first.id)).data.serviceFeeCents).toBe(10);
  });
});

describe('fixture cards', () => {
  const reading = { status: 'succeeded' };
  test.each([
    ['approved Visa', '4242 4242 4242 4242', 'visa', '4242'],
    ['approved Visa', '4111 1111 1111 1111', 'visa', '1111'],
    ['approved Mastercard', '5555 5555 5555 4444', 'mastercard', '4444'],
    ['approved Amex', '3782 822463 10005', 'amex', '0005'],
    ['approved Discover', '6011 1111 1111 1117', 'discover', '1117'],
    ['approved 19 digits', '4000 0077 7000 0000 205', 'visa', '0205'],
    ['approved 19 digits, UnionPay', '6205 5000 0000 0000 004', 'unionpay', '0004'],
    ['approved, later void rejected', CARD.voidRejected, 'visa', '4221'],
    ['settles at once', CARD.settlesAtOnce, 'visa', '2001'],
    ['settlement rejected', CARD.settlementRejected, 'visa', '4304'],
    ['slow approval', CARD.slow, 'visa', '2050'],
    ['dispute after settlement', '4000 0077 7000 9006', 'visa', '9006'],
    ['fee void fails once', CARD.feeVoidFailsOnce, 'visa', '4320'],
    ['fee refund fails once', CARD.feeRefundFailsOnce, 'visa', '7026'],
  ])('%s %s → 200', async (_, number, brand, last4) => {
    const { status, data } = await create(paymentOf(portal, { number }));
    expect(status).toBe(200);
    expect(data).toMatchObject({ ...reading, paymentMethod: { type: 'card', brand, last4 } });
  });

  test.each([
    ['general decline', CARD.declined, 'generic_decline'],
    ['insufficient funds', '4000 0000 0000 9995', 'insufficient_funds'],
    ['card limit exceeded', '4000 0000 0000 6975', 'card_limit_exceeded'],
    ['issuer-reported expired card', '4000 0000 0000 0069', 'expired_card'],
    ['security code mismatch', '4000 0000 0000 0127', 'cvv_mismatch'],
    ['postal code mismatch', '4000 0077 7000 4619', 'postal_code_mismatch'],
    ['fee leg declined', CARD.feeDeclined, 'generic_decline'],
    ['any other number that passes Luhn', '4012 8888 8888 1881', 'generic_decline'],
  ])('%s %s → 402 PAYMENT_DECLINED, the attempt a failed payment (C54)', async (_, number, declineCode) => {
    const { status, code, details } = await create(paymentOf(portal, { number }));
    expect([status, code]).toEqual([402, 'PAYMENT_DECLINED']);
    expect(details).toEqual({ code: 'PAYMENT_DECLINED', id: expect.stringMatching(UUID_V7), declineCode });
    const { data } = await partner.client.find(details!.id as string);
    expect(data).toMatchObject({
      status: 'failed',
      amountCents: 10_000,
      serviceFeeCents: 300,
      capturedAmountCents: 0,
      refundedAmountCents: 0,
      remainingRefundableAmountCents: 0,
      confirmationNumber: null,
      settlement: null,
      capturedAt: null,
      gateway: { transactionId: null, authCode: null },
      lineItems: [{ status: 'failed', refundedAmountCents: 0, remainingRefundableAmountCents: 0 }],
    });
    expect((await partner.client.list({ status: 'failed', limit: 1 })).data.payments).toEqual([data]);
  });

  test('a declined fee leg takes the principal back (C41)', async () => {
    const before = (await service.simulator.truth()).length;
    await create(paymentOf(portal, { number: CARD.feeDeclined }));
    expect((await service.simulator.truth(before)).map(({ op, leg, result, state }) => [op, leg, result, state])).toEqual([
      ['charge', 'principal', 'approved', 'voided'],
      ['charge', 'fee', 'declined', undefined],
      ['void', 'principal', 'approved', undefined],
    ]);
    // A combined portal has no fee leg, so this card is approved there.
    expect((await create(paymentOf(combined, { number: CARD.feeDeclined }))).status).toBe(200);
  });

  test.each([
    ['gateway server error', CARD.gatewayError],
    ['delayed gateway failure', '4000 0077 7000 5129'],
  ])('%s %s → 502 PAYMENT_GATEWAY_ERROR, nothing charged (C43)', async (_, number) => {
    const { status, code, details } = await create(paymentOf(portal, { number }));
    expect([status, code]).toEqual([502, 'PAYMENT_GATEWAY_ERROR']);
    expect(details).toEqual({ code, id: expect.stringMatching(UUID_V7) });
    expect(await partner.client.status(details!.id as string)).toBe('failed');
  });

  test.each([
    ['unreadable response, reversal works', CARD.unreadable, 'voided'],
    ['unreadable, never reached the processor', CARD.neverReached, 'voided'],
    ['unreadable response, cannot be resolved', CARD.unresolvable, 'unknown'],
  ])('%s %s → 504 PAYMENT_TIMEOUT, then %s (C29, C42)', async (_, number, finally_) => {
    for (const where of [portal, combined]) {
      const { status, code, details } = await create(paymentOf(where, { number }));
      expect([status, code]).toEqual([504, 'PAYMENT_TIMEOUT']);
      expect(details).toEqual({ code, id: expect.stringMatching(UUID_V7) });
      const id = details!.id as string;
      const zero = { capturedAmountCents: 0, refundedAmountCents: 0, remainingRefundableAmountCents: 0, confirmationNumber: null, capturedAt: null };
      expect((await partner.client.find(id)).data).toMatchObject({ status: 'unknown', ...zero });
      expect((await partner.client.list({ status: 'unknown' })).data.payments.map((payment) => payment.id)).toContain(id);
      await service.recover(id);
      const { data } = await partner.client.find(id);
      expect(data).toMatchObject({ status: finally_, ...zero, lineItems: [{ status: finally_ }] });
      const standing = (await service.simulator.truth()).filter(
        ({ op, merchantAccount, state }) => op === 'charge' && merchantAccount.endsWith(where) && state === 'approved',
      );
      if (finally_ === 'voided') expect(standing.filter(({ card: shown }) => shown?.last4 === number.slice(-4))).toEqual([]);
      expect((await partner.client.list({ status: finally_, limit: 1 })).data.payments[0]!.id).toBe(id);
    }
  });

  test.each([
    ['tok_sandbox_approved', 200, undefined, 'succeeded'],
    ['tok_sandbox_gateway_error', 502, 'PAYMENT_GATEWAY_ERROR', 'failed'],
    ['tok_sandbox_incomplete_response', 504, 'PAYMENT_TIMEOUT', 'unknown'],
    ['tok_of_somebody_else', 402, 'PAYMENT_DECLINED', 'failed'],
  ])('card token %s → %i %s', async (token, status, code, reads) => {
    const answer = await create({ ...paymentOf(portal), paymentMethod: { type: 'card_token', token } });
    expect([answer.status, answer.code]).toEqual([status, code]);
    const { data } = await partner.client.find((answer.details?.id as string | undefined) ?? answer.data.id);
    expect(data).toMatchObject({ status: reads, paymentMethod: { type: 'card_token', brand: expect.any(String), last4: expect.any(String) } });
  });
});

describe('400 VALIDATION_ERROR, before anything happens', () => {
  const long = (length: number) => 'x'.repeat(length);
  const nested = (depth: number): object => (depth <= 1 ? {} : { a: nested(depth - 1) });
  const keys = (count: number) => Object.fromEntries(Array.from({ length: count }, (_, index) => [`k${index}`, index]));

  test.each<[rule: string, path: string, refused: unknown[], accepted: unknown[]]>([
    ['portalId: a UUID (C46)', 'portalId', [undefined, null, '', 'x', 7, '018f0000-0000-7000-8000-00000000000g', ` ${STRANGER}`], []],
    ['referenceId: at most 255 characters', 'referenceId', [long(256), 7, null, {}], [long(255), '', '😀'.repeat(127)]],
    ['currency: USD only (C4)', 'currency', ['EUR', 'usd', '', null, 840], ['USD', undefined]],
    ['capture: sale or auth', 'capture', ['SALE', '', null, 1], ['sale']],
    ['captureMode: sale or auth', 'captureMode', ['sales', null], ['sale']],
    ['paymentMethod: an object of a known type', 'paymentMethod', [undefined, null, 'card', [], {}, { type: 'cash' }, { type: 'toString' }], []],
    [
      'cardNumber: 12 to 19 digits that pass Luhn (C5)',
      'paymentMethod.cardNumber',
      [
        undefined,
        null,
        4242424242424242,
        '',
        '4242424242424241',
        '4242-4242-4242-4242',
        '42424242424',
        '42424242424242424242',
        '４２４２４２４２４２４２４２４２',
        '4242\t424242424242',
      ],
      ['  4242 42 4242424242 '],
    ],
    [
      'expirationDate: MM/YY or MMYY (C5)',
      'paymentMethod.expirationDate',
      [undefined, null, 1230, '', '13/30', '00/30', '1/30', '12/2030', '12-30', '2030-12', '12/3a', '12/30 '],
      ['12/99', '1299'],
    ],
    ['cvv: 3 or 4 digits', 'paymentMethod.cvv', [undefined, null, 123, '', '12', '12345', '12a', ' 123', '１２３'], ['123', '1234']],
    ['lineItems: 1 to 50 of them', 'lineItems', [undefined, null, {}, [], 'x', [null], [[]], [7]], []],
    ['line referenceId: required, 1 to 255 characters (C8)', 'lineItems.0.referenceId', [undefined, null, '', 7, long(256)], [long(255)]],
    [
      'description: at most 500 characters, UTF-16 units (C8)',
      'lineItems.0.description',
      [long(501), '😀'.repeat(251), null, 7],
      [long(500), '😀'.repeat(250), ''],
    ],
    ['metadata: an object', 'lineItems.0.metadata', [null, [], 'x', 7], [{}]],
    ['metadata: at most 50 keys (C8)', 'lineItems.0.metadata', [keys(51)], [keys(50)]],
    [
      'metadata: at most 8 KiB (C8)',
      'lineItems.0.metadata',
      [{ a: long(8192 - 7) }, { a: 'é'.repeat(4096) }, { a: Array(129_000).fill(0) }],
      [{ a: long(8192 - 8) }],
    ],
    ['metadata: at most 8 levels deep (C8)', 'lineItems.0.metadata', [nested(9)], [nested(8)]],
    ['payer: an object', 'payer', [null, [], 'Ada'], [{}]],
    ['payer.firstName: at most 100 characters (C8)', 'payer.firstName', [long(101), 7, null], [long(100)]],
    ['payer.lastName: at most 100 characters (C8)', 'payer.lastName', [long(101)], [long(100)]],
    ['payer.phone: at most 40 characters (C8)', 'payer.phone', [long(41), 5558675309], [long(40)]],
    [
      'payer.email: an e-mail address of at most 254 characters (C8)',
      'payer.email',
      [
        'ada',
        'ada@',
        '@example.com',
        'a b@example.com',
        'ada@example',
        'ada@@example.com',
        '',
        null,
        7,
        `${long(64)}@${long(60)}.${long(60)}.${long(60)}.example`,
      ],
      ['ada@example.com', 'ada.l+tag@sub.example.co'],
    ],
    ['payer.address: an object', 'payer.address', [null, 'x', []], [{}]],
    ['address lines: at most 200 characters (C8)', 'payer.address.line1', [long(201), 7], [long(200)]],
    ['address line2: at most 200 characters (C8)', 'payer.address.line2', [long(201)], [long(200)]],
    ['city: at most 100 characters (C8)', 'payer.address.city', [long(101)], [long(100)]],
    ['zip: at most 20 characters (C8)', 'payer.address.zip', [long(21), 62701], [long(20)]],
    [
      'a card number in free text (C9): description',
      'lineItems.0.description',
      ['pay 4242 4242 4242 4242 now', '4242424242424242', '4242-4242-4242-4242', 'x:378282246310005'],
      ['1766000000000', 'CASE-2024-000123456789', '4242424242424241', 'payment 4242424a-4242-4242-8242-424242424242'],
    ],
    [
      'a card number in free text (C9), as people write it: description',
      'lineItems.0.description',
      [
        ...['4242.4242.4242.4242', '4242_4242_4242_4242', '4242/4242/4242/4242', '4242\u00a04242\u00a04242\u00a04242', '4242  4242  4242  4242'],
        ...['x4242424242424242', '4242424242424242x', '４２４２４２４２４２４２４２４２', '٤٢٤٢٤٢٤٢٤٢٤٢٤٢٤٢', '6759649826438453', '2200000000000004'],
      ],
      ['42424242 -- 42424242', '42424242424242421230', '1766000000000000'],
    ],
    ['a card number in free text (C9): referenceId', 'referenceId', ['4242424242424242'], ['9999999999999995']],
    ['a card number in free text (C9): line referenceId', 'lineItems.0.referenceId', ['6205500000000000004'], []],
    ['a card number in free text (C9): metadata value', 'lineItems.0.metadata', [{ a: { b: ['4242424242424242'] } }], [{ a: '1766000000000' }]],
    ['a card number in free text (C9): metadata key', 'lineItems.0.metadata', [{ '4242424242424242': 1 }], []],
    ['a card number in free text (C9): metadata number', 'lineItems.0.metadata', [{ a: 4242424242424242 }], [{ a: 1766000000000 }]],
    ['a card number in free text (C9): payer', 'payer.lastName', ['4242424242424242'], []],
    ['a card number in free text (C9): e-mail', 'payer.email', ['4242424242424242@example.com'], []],
    ['a card number in free text (C9): address', 'payer.address.line1', ['5555 5555 5555 4444'], []],
    ['text without NUL (C8)', 'lineItems.0.description', ['a\0b'], []],
    ['text without lone surrogates (C8)', 'lineItems.0.metadata', [{ a: '\ud800' }, { '\udc00': 1 }], [{ a: '😀' }]],
  ])('%s', async (_, path, refused, accepted) => {
    const before = await charges();
    for (const value of refused) {
      const answer = await create(withField(path, value));
      expect([value, answer.status, answer.code]).toEqual([value, 400, 'VALIDATION_ERROR']);
      expect(answer.text).not.toMatch(/4242 ?4242|5555 ?5555|6205500000/);
    }
    expect(await charges()).toBe(before);
    for (const value of accepted) {
      const answer = await create(withField(path, value));
      expect([value, answer.status, answer.code]).toEqual([value, 200, undefined]);
    }
  });

  test.each([
    ['amountCents', (cents: string) => `{"amountCents":${cents},"line":100}`],
    ['lineItems[].amountCents', (cents: string) => `{"amountCents":100,"line":${cents}}`],
  ])('%s: a JSON integer of 1 to 99,999,999 (C4)', async (_, amounts) => {
    const bodyOf = (cents: string) => {
      const { line, amountCents } = /"amountCents":(?<amountCents>.*),"line":(?<line>.*)\}$/.exec(amounts(cents))!.groups!;
      return JSON.stringify(withField('lineItems.0.amountCents', 'LINE', withField('amountCents', 'AMOUNT')))
        .replace('"AMOUNT"', amountCents!)
        .replace('"LINE"', line!);
    };
    for (const cents of [
      '"100"',
      '1.5',
      '-0',
      '0',
      '-100',
      '1e21',
      '100000000',
      'null',
      'true',
      '[100]',
      '{}',
      '100.5',
      '1e-2',
      '9007199254740993',
    ]) {
      const answer = await create(bodyOf(cents));
      expect([cents, answer.status, answer.code]).toEqual([cents, 400, 'VALIDATION_ERROR']);
    }
    for (const cents of ['100', '100.0', '1e2', '1E+2', '1000e-1']) {
      const answer = await create(bodyOf(cents));
      expect([cents, answer.status]).toEqual([cents, 200]);
      expect(answer.text).toContain('"amountCents":100,');
    }
  });

  test('the boundaries of an amount: 1 and 99,999,999 cents (C4)', async () => {
    expect((await create(paymentOf(portal, { lines: [1] }))).status).toBe(200);
    expect((await create(paymentOf(portal, { lines: [99_999_999] }))).status).toBe(200);
    expect((await create(paymentOf(portal, { lines: [99_999_999, 1] }))).code).toBe('VALIDATION_ERROR');
  });

  test('amountCents equals the sum of the line items', async () => {
    for (const amountCents of [9_999, 10_001]) expect((await create(withField('amountCents', amountCents))).code).toBe('VALIDATION_ERROR');
  });

  test('1 to 50 line items', async () => {
    const fifty = await create(paymentOf(portal, { lines: Array.from({ length: 50 }, () => 100) }));
    expect([fifty.status, fifty.data.lineItems.length]).toEqual([200, 50]);
    expect((await create(paymentOf(portal, { lines: Array.from({ length: 51 }, () => 100) }))).code).toBe('VALIDATION_ERROR');
  });

  test('a fault in any line item, not just the first, is found and named', async () => {
    const body = paymentOf(portal, { lines: [100, 100, 100] });
    const { details } = await create(withField('lineItems.2.referenceId', '', body));
    expect(details?.errors).toEqual([{ field: 'lineItems[2].referenceId', message: expect.any(String) }]);
  });

  test.each([
    ['top level', { amount: 1 }],
    ['null counts too', { amount: null }],
    ['payment method', { paymentMethod: { ...card(), amount: 100 } }],
    ['line item', { lineItems: [{ amountCents: 10_000, referenceId: 'A', amount: 1 }] }],
    ['payer', { payer: { amount: 1 } }],
    ['address', { payer: { address: { amount: 1 } } }],
    ['a field that is not ours', { extra: [{ deep: { amount: 1 } }] }],
    ['a metadata that is no line item’s', { metadata: { amount: 1 } }],
    ['the metadata of something inside a line item', { lineItems: [{ amountCents: 10_000, referenceId: 'A', extra: { metadata: { amount: 1 } } }] }],
    ['a card number for a name, which is not told', { '4242424242424242': { amount: 1 } }],
    ['a field spelt like a path', { 'lineItems[0]': { metadata: { amount: 1 } } }],
  ])('the key `amount`: %s (C3)', async (_, change) => {
    const { status, code, text } = await create({ ...paymentOf(portal), ...change });
    expect([status, code]).toEqual([400, 'VALIDATION_ERROR']);
    expect(text).not.toContain('4242424242424242');
  });

  test('the key `amount` inside the metadata of a line item is data (C3)', async () => {
    const metadata = { amount: 1, deep: { amount: [{ amount: 2 }] }, Amount: 3 };
    expect((await create(withField('lineItems.0.metadata', metadata))).data.lineItems[0]!.metadata).toEqual(metadata);
  });

  test.each(['constructor', 'toString', 'then', 'hasOwnProperty', 'length', 'valueOf', 'prototype', 'toJSON', '0', '', 'ключ', '😀', 'amount'])(
    'metadata key %j comes back exactly (C8)',
    async (name) => {
      const metadata = `{"z":1,${JSON.stringify(name)}:{"value":[1,1.5,"x",null,true,{}],${JSON.stringify(name)}:"inner"},"a":-0.25}`;
      const body = JSON.stringify(withField('lineItems.0.metadata', 'HERE')).replace('"HERE"', metadata);
      const answer = await create(body);
      expect(answer.status).toBe(200);
      for (const seen of [answer, await partner.client.find(answer.data.id)]) expect(seen.data.lineItems[0]!.metadata).toEqual(JSON.parse(metadata));
      expect((await partner.client.list({ limit: 1 })).data.payments[0]!.lineItems[0]!.metadata).toEqual(JSON.parse(metadata));
      expect(({} as Record<string, unknown>).value).toBeUndefined();
    },
  );

  test.each<[string, string]>([
    ['__proto__ as a key', '{"__proto__":{"polluted":1}}'],
    ['__proto__ deep down', '{"a":[{"__proto__":1}]}'],
    ['a number that is not finite', '{"a":1e400}'],
    ['an integer beyond 2^53 − 1', '{"a":9007199254740992}'],
    ['an integer beyond −(2^53 − 1)', '{"a":-9007199254740992}'],
  ])('metadata: %s (C8)', async (_, metadata) => {
    const { status, code } = await create(JSON.stringify(withField('lineItems.0.metadata', 'HERE')).replace('"HERE"', metadata));
    expect([status, code]).toEqual([400, 'VALIDATION_ERROR']);
    expect(({} as Record<string, unknown>).polluted).toBeUndefined();
  });

  test.each<[string, (text: string) => string | Buffer]>([
    ['no JSON', () => '{"portalId":'],
    ['nothing', () => ''],
    ['an array', (text) => `[${text}]`],
    ['a string', () => '"payment"'],
    ['null', () => 'null'],
    ['a trailing comma', (text) => text.replace(/\}$/, ',}')],
    ['a duplicate key', (text) => text.replace(/\}$/, ',"amountCents":10000}')],
    ['a duplicate key, spelt with an escape', (text) => text.replace(/\}$/, ',"\\u0061mountCents":10000}')],
    ['a duplicate key in a line item', (text) => text.replace('"referenceId":"INV-1"', '"referenceId":"INV-1","referenceId":"INV-2"')],
    ['invalid UTF-8', (text) => Buffer.from(text.replace('INV-1', 'INV-\u00ff'), 'latin1')],
    ['an overlong encoding', (text) => Buffer.concat([Buffer.from(text.replace(/\}$/, ',"x":"')), Buffer.from([0xc0, 0xaf]), Buffer.from('"}')])],
    ['a byte order mark', (text) => `\ufeff${text}`],
    ['17 levels', (text) => text.replace(/\}$/, `,"x":${'['.repeat(16)}${']'.repeat(16)}}`)],
    ['200,000 levels', (text) => text.replace(/\}$/, `,"x":${'['.repeat(100_000)}${']'.repeat(100_000)}}`)],
    ['a NUL in a field that is not ours', (text) => text.replace(/\}$/, ',"x":"\\u0000"}')],
    ['a lone surrogate in a key', (text) => text.replace(/\}$/, ',"\\ud800":1}')],
    ['__proto__ at the top', (text) => text.replace(/\}$/, ',"__proto__":{"a":1}}')],
  ])('a body that is %s (C8, C65)', async (_, spoil) => {
    const { status, code } = await create(spoil(JSON.stringify(paymentOf(portal))));
    expect([status, code]).toEqual([400, 'VALIDATION_ERROR']);
  });

  test('16 levels are still read (C8)', async () => {
    const text = JSON.stringify(paymentOf(portal)).replace(/\}$/, `,"x":${'['.repeat(15)}${']'.repeat(15)}}`);
    expect((await create(text)).status).toBe(200);
  });

  test.each(['text/plain', 'application/x-www-form-urlencoded', 'application/jsonp', 'multipart/form-data; boundary=x', 'garbage', ''])(
    'content type %j (C65)',
    async (type) => {
      const { status, code } = await create(paymentOf(portal), { headers: { 'content-type': type } });
      expect([status, code]).toEqual([400, 'VALIDATION_ERROR']);
    },
  );
  test.each(['application/json', 'application/json; charset=utf-8', 'APPLICATION/JSON'])('content type %j is JSON', async (type) => {
    expect((await create(paymentOf(portal), { headers: { 'content-type': type } })).status).toBe(200);
  });
  test('a content encoding (C65)', async () => {
    expect((await create(paymentOf(portal), { headers: { 'content-encoding': 'gzip' } })).code).toBe('VALIDATION_ERROR');
  });

  test.each<[string, string | string[]]>([
    ['empty', ''],
    ['256 characters', long(256)],
    ['sent twice', ['a', 'a']],
    ['not ASCII', 'clé'],
    ['a control character', 'a\tb'],
  ])('Idempotency-Key: %s (C14)', async (_, key) => {
    const { status, code } = await create(paymentOf(portal), { headers: { 'idempotency-key': key } });
    expect([status, code]).toEqual([400, 'VALIDATION_ERROR']);
  });
  test.each(['k', long(255), '"quoted"', 'with a space', '~!@#$%^&*()'])('Idempotency-Key %j is accepted (C14)', async (key) => {
    expect((await create(paymentOf(portal), { key })).status).toBe(200);
  });
});

describe('501 for unsupported features', () => {
  test.each([
    ['capture: auth', { capture: 'auth' }, 'CAPTURE_NOT_SUPPORTED'],
    ['captureMode: auth', { captureMode: 'auth' }, 'CAPTURE_NOT_SUPPORTED'],
    ['both auth', { capture: 'auth', captureMode: 'auth' }, 'CAPTURE_NOT_SUPPORTED'],
    ['vault', { paymentMethod: { type: 'vault', vaultId: 'v' } }, 'VAULT_NOT_SUPPORTED'],
    ['vault without vaultId (C6)', { paymentMethod: { type: 'vault' } }, 'VAULT_NOT_SUPPORTED'],
    ['auth with a past expiry (C71)', { capture: 'auth', paymentMethod: card(CARD.approved, { expirationDate: '01/20' }) }, 'CAPTURE_NOT_SUPPORTED'],
  ])('%s', async (_, change, code) => {
    const answer = await create({ ...paymentOf(portal), ...change });
    expect([answer.status, answer.code]).toEqual([501, code]);
  });
  test.each([
    ['capture and captureMode differ', { capture: 'auth', captureMode: 'sale' }],
    ['capture and captureMode differ', { capture: 'sale', captureMode: 'auth' }],
    ['auth with another fault (C6)', { capture: 'auth', currency: 'EUR' }],
    ['vault with another fault (C6)', { paymentMethod: { type: 'vault' }, amountCents: 1 }],
    ['auth with a wrong cvv', { capture: 'auth', paymentMethod: card(CARD.approved, { cvv: '1' }) }],
  ])('but 400: %s', async (_, change) => {
    const answer = await create({ ...paymentOf(portal), ...change });
    expect([answer.status, answer.code]).toEqual([400, 'VALIDATION_ERROR']);
  });
});

describe('expiry of the card (C5)', () => {
  const HOUR = 3_600_000;
  test('this month is good, the one before it is not, for any card', async () => {
    // A month ends when it has ended everywhere on earth: twelve hours after its end in UTC.
    const now = service.clock.now() - 12 * HOUR;
    for (const number of [CARD.approved, CARD.declined, CARD.gatewayError]) {
      const { status, code } = await create(paymentOf(portal, { paymentMethod: card(number, { expirationDate: expiryIn(-1, now) }) }));
      expect([status, code]).toEqual([400, 'VALIDATION_ERROR']);
    }
    for (const months of [0, 1, 12]) {
      const { status } = await create(paymentOf(portal, { paymentMethod: card(CARD.approved, { expirationDate: expiryIn(months, now) }) }));
      expect([months, status]).toEqual([months, 200]);
    }
    const { status } = await create(paymentOf(portal, { paymentMethod: card(CARD.approved, { expirationDate: expiryIn(-12, now) }) }));
    expect(status).toBe(400);
  });

  test('a month ends at UTC−12:00', async () => {
    // This test moves the clock to the end of a month. So it uses its own service.
    const other = await startService();
    try {
      const account = await other.account();
      const where = await other.portal(account);
      const today = new Date();
      const boundary = Date.UTC(today.getUTCFullYear(), today.getUTCMonth() + 1, 1) + 12 * HOUR;
      const expiring = paymentOf(where, { paymentMethod: card(CARD.approved, { expirationDate: expiryIn(0, today.getTime()) }) });
      other.clock.advance(boundary - 60_000 - other.clock.now());
      expect((await account.client.create(expiring)).status).toBe(200);
      other.clock.advance(61_000);
      expect((await account.client.create(expiring)).code).toBe('VALIDATION_ERROR');
    } finally {
      await other.stop();
    }
  });
});

/**
 * E1 to E13. Each row makes the service refuse a request for one reason. If a request has several reasons, the answer names the earliest one. Every
 * pair of reasons that can occur together is tested.
 */
describe('order of evaluation (E1 to E13)', () => {
  interface Provoked {
    portal: 'open' | 'bare' | 'ruled' | 'limited' | 'unknown';
    authorization: 'right' | 'none' | 'deactivated';
    text: string | null;
    key: string | undefined;
    body: Record<string, unknown>;
  }
  interface Row {
    readonly step: string;
    readonly status: number;
    readonly code: string | undefined;
    /** Rows whose reasons cannot occur together with this one. */
    readonly excludes?: readonly string[];
    provoke(request: Provoked): void;
  }
  const rows: readonly Row[] = [
    { step: '1 body too large', status: 413, code: 'VALIDATION_ERROR', provoke: (request) => (request.text = ' '.repeat(256 * 1024 + 1)) },
    { step: '2 no credentials', status: 401, code: undefined, provoke: (request) => (request.authorization = 'none') },
    {
      step: '2 deactivated account',
      status: 403,
      code: undefined,
      excludes: ['2 no credentials'],
      provoke: (request) => (request.authorization = 'deactivated'),
    },
    { step: '3 no JSON', status: 400, code: 'VALIDATION_ERROR', excludes: ['1 body too large'], provoke: (request) => (request.text = '{') },
    { step: '4 key syntax', status: 400, code: 'VALIDATION_ERROR', provoke: (request) => (request.key = 'k'.repeat(256)) },
    { step: '5 invalid field', status: 400, code: 'VALIDATION_ERROR', provoke: ({ body }) => (body.currency = 'EUR') },
    { step: '5 capture: auth', status: 501, code: 'CAPTURE_NOT_SUPPORTED', provoke: ({ body }) => (body.capture = 'auth') },
    {
      step: '6 key used otherwise',
      status: 409,
      code: 'IDEMPOTENCY_MISMATCH',
      excludes: ['4 key syntax'],
      provoke: (request) => (request.key = 'used'),
    },
    {
      step: '7 card expired',
      status: 400,
      code: 'VALIDATION_ERROR',
      provoke: ({ body }) => (body.paymentMethod = { ...(body.paymentMethod as object), expirationDate: '01/20' }),
    },
    { step: '8 portal access', status: 403, code: 'PORTAL_ACCESS_DENIED', provoke: (request) => (request.portal = 'unknown') },
    {
      step: '9 no gateway',
      status: 503,
      code: 'GATEWAY_NOT_CONFIGURED',
      excludes: ['8 portal access'],
      provoke: (request) => (request.portal = 'bare'),
    },
    {
      step: '10 blocked case',
      status: 403,
      code: 'PAYMENT_BLOCKED',
      excludes: ['8 portal access'],
      provoke: ({ body }) => (body.referenceId = 'BLOCKED'),
    },
    {
      step: '10 held case',
      status: 409,
      code: 'PAYMENT_HELD',
      excludes: ['8 portal access', '10 blocked case'],
      provoke: ({ body }) => (body.referenceId = 'HELD'),
    },
    {
      step: '10 against the rules',
      status: 422,
      code: 'PAYMENT_NOT_ALLOWED',
      excludes: ['8 portal access', '9 no gateway'],
      provoke: (request) => (request.portal = 'ruled'),
    },
    {
      step: '11 decline block',
      status: 409,
      code: 'DECLINE_BLOCKED',
      excludes: ['8 portal access', '9 no gateway', '10 against the rules'],
      provoke: (request) => {
        request.portal = 'limited';
        request.body.paymentMethod = { ...(request.body.paymentMethod as object), cardNumber: CARD.declined };
      },
    },
    {
      step: '11 velocity',
      status: 429,
      code: 'VELOCITY_LIMIT',
      excludes: ['8 portal access', '9 no gateway', '10 against the rules', '10 blocked case', '10 held case', '11 decline block'],
      provoke: (request) => {
        request.portal = 'limited';
        request.body.referenceId ??= 'BUSY';
      },
    },
    {
      step: '13 declined',
      status: 402,
      code: 'PAYMENT_DECLINED',
      excludes: ['11 decline block', '11 velocity'],
      provoke: ({ body }) => (body.paymentMethod = { ...(body.paymentMethod as object), cardNumber: CARD.declined }),
    },
  ];

  let portals: Record<Provoked['portal'], string>;
  let deactivated: TestAccount;
  beforeAll(async () => {
    const { admin, administer } = service;
    portals = {
      open: await service.portal(partner),
      bare: await service.portal(partner, { gateway: 'none' }),
      ruled: await service.portal(partner),
      limited: await service.portal(partner),
      unknown: STRANGER,
    };
    await administer(admin.setRules(portals.ruled, { minCents: 20_000 }));
    await administer(admin.setLimits(portals.limited, 'card', { attempts: null, declines: 1, windowSeconds: 3_600, blockSeconds: 3_600 }));
    await administer(admin.setLimits(portals.limited, 'case', { attempts: 1, declines: null, windowSeconds: 3_600, blockSeconds: null }));
    for (const portalId of [portals.open, portals.bare, portals.ruled, portals.limited])
      for (const [referenceId, kind] of [
        ['BLOCKED', 'block'],
        ['HELD', 'hold'],
      ] as const)
        await administer(admin.restrictCase({ portalId, referenceId, kind, until: null, reason: null }));
    expect((await create(paymentOf(portals.limited, { number: CARD.declined }))).code).toBe('PAYMENT_DECLINED');
    expect((await create(paymentOf(portals.limited, { referenceId: 'BUSY' }))).status).toBe(200);
    expect((await create(paymentOf(portals.open), { key: 'used' })).status).toBe(200);
    deactivated = await service.account('Deactivated');
    await administer(admin.deactivateAccount(deactivated.accountId));
  });

  const provoked = async (...wanted: Row[]) => {
    const request: Provoked = { portal: 'open', authorization: 'right', text: null, key: undefined, body: paymentOf('', { lines: [12_345] }) };
    for (const row of wanted) row.provoke(request);
    const authorization = { right: partner.client.authorization, none: null, deactivated: deactivated.client.authorization }[request.authorization];
    const client = service.anonymous.as(authorization);
    return client.post(
      PAYMENTS,
      request.text ?? { ...request.body, portalId: portals[request.portal] },
      request.key === undefined ? {} : { key: request.key },
    );
  };
  const excluded = (one: Row, other: Row) => one.excludes?.includes(other.step) || other.excludes?.includes(one.step);

  test.each(rows.map((row) => [row.step, row] as const))('%s, by itself', async (_, row) => {
    const { status, code } = await provoked(row);
    expect([status, code]).toEqual([row.status, row.code]);
  });

  test.each(
    rows
      .map((row, index) => [row.step, row, rows.slice(index + 1).filter((later) => !excluded(row, later))] as const)
      .filter(([, , later]) => later.length > 0),
  )('%s wins over everything after it', async (_, row, later) => {
    for (const other of later) {
      // The later row is applied first. If both rows set the same field, the value of the earlier row remains.
      const { status, code } = await provoked(other, row);
      expect([other.step, status, code]).toEqual([other.step, row.status, row.code]);
    }
  });

  test('a refusal of steps 7 to 11 gives the key back', async () => {
    const early = new Set(['1', '2', '3', '4', '5', '6', '13']);
    for (const row of rows.filter(({ step }) => !early.has(step.split(' ')[0]!))) {
      const key = `given back ${row.step}`;
      const spoil: Row = { ...row, provoke: (request) => (row.provoke(request), (request.key = key)) };
      expect((await provoked(spoil)).code).toBe(row.code);
      // The key was given back, so it accepts another body.
      expect((await create(paymentOf(portals.open), { key })).status).toBe(200);
    }
  });
});
