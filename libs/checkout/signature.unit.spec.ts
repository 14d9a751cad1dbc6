/** Unit tests of `sig` (C60) with the examples of its documentation, and of the checks of addresses. */
import { describe, expect, test } from '@jest/globals';
import fc from 'fast-check';
import { signatureOf } from '../../test/support/checkout.js';
import { queryPairs, RETURN_PARAMETERS, vetAddress } from './addresses.js';
import { canonical, isSigned, sign, signedAddress } from './signature.js';

const SECRET = 'psec_test_0123456789abcdef0123456789abcdef';
const pairsOf = (address: string) => queryPairs(new URL(address).search)!;

describe('the vectors', () => {
  const returned =
    'https://agency.example/pay/done?case=A%26B+7&amount_cents=12500&checkout_id=cs_9yX2&confirmation_number=7K3M-9QXT-4B&payment_id=7b0c2f5e-6f0a-4a86-9a56-0d7c9a1f2b11&result=paid&service_fee_cents=313&state=xyz&t=1795168800&total_charged_cents=12813';
  const cancelled = 'https://agency.example/pay/cancelled?checkout_id=cs_9yX2&result=cancelled&state=xyz&t=1795168800';
  test('return', () => {
    expect(canonical('return', returned, pairsOf(returned)).split('\n')).toEqual([
      'v1',
      'return',
      'https://agency.example/pay/done',
      expect.stringMatching(/^amount_cents=12500&case=A%26B%207&checkout_id=cs_9yX2&/),
    ]);
    expect(sign(SECRET, 'return', returned, pairsOf(returned))).toBe('261095a773e4f12cd3ad6cf19845f5549e8ee6bf8aa0874c63f7ac2f88d72c52');
  });
  test('cancel', () =>
    expect(sign(SECRET, 'cancel', cancelled, pairsOf(cancelled))).toBe('923bdb987bfa6e43d5ccf5c721018999ac5d2ef98cab08b5d4335948f20768d7'));
});

describe('a signature', () => {
  const address = 'https://agency.example/pay';
  const pairs = [
    ['a', '1'],
    ['b', 'x&c=2'],
  ] as const;
  const sig = sign(SECRET, 'link', address, pairs);
  test('counts for its kind, address, pairs and secret only', () => {
    expect(isSigned([SECRET], 'link', address, pairs, sig)).toBe(true);
    expect(isSigned(['other', SECRET], 'link', address, [...pairs].reverse(), sig)).toBe(true);
    expect(isSigned([SECRET], 'link', `${address}?ignored=1#too`, pairs, sig)).toBe(true);
    expect(isSigned([SECRET], 'link', address, [...pairs, ['sig', 'anything']], sig)).toBe(true);
    for (const wrong of [
      isSigned(['other'], 'link', address, pairs, sig),
      isSigned([SECRET], 'intake', address, pairs, sig),
      isSigned([SECRET], 'link', `${address}/x`, pairs, sig),
      // Without encoding, these pairs would have the same signed text.
      isSigned([SECRET], 'link', address, [['a', '1'], ['b', 'x'], ['c', '2']], sig), // prettier-ignore
      isSigned([SECRET], 'link', address, pairs, sig.toUpperCase()),
      isSigned([SECRET], 'link', address, pairs, sig.slice(1)),
      isSigned([SECRET], 'link', address, pairs, `${sig.slice(0, -1)}${sig.endsWith('0') ? '1' : '0'}`),
      isSigned([SECRET], 'link', address, pairs, undefined),
      // A parameter that was sent twice arrives as an array.
      isSigned([SECRET], 'link', address, pairs, [sig]),
      isSigned([SECRET], 'link', address, pairs, ''),
      isSigned([], 'link', address, pairs, sig),
    ])
      expect(wrong).toBe(false);
  });
  test('is the one of the documentation, for any text', () =>
    fc.assert(
      fc.property(fc.array(fc.tuple(fc.string({ unit: 'grapheme' }), fc.string({ unit: 'grapheme' }))), (any) => {
        expect(sign(SECRET, 'intake', address, any)).toBe(signatureOf(SECRET, 'intake', address, any));
      }),
    ));
  test('is not made for an address that was never vetted', () =>
    expect(() => signedAddress(SECRET, 'return', 'https://agency.example/done?case=%zz', {}, 0)).toThrow(/cannot be decoded/));
  test('goes behind the own query of an address, and speaks for all of it', () => {
    for (const own of ['', '?', '?case=A%26B+7', '?case=1&', '?x=%C3%A9&x=2']) {
      const signed = signedAddress(
        SECRET,
        'return',
        `https://agency.example/done${own}`,
        { result: 'paid', state: 'ä b&c', missing: null },
        1_795_168_800_999,
      );
      expect(signed.startsWith(`https://agency.example/done${own === '' ? '?' : own}`)).toBe(true);
      const { searchParams } = new URL(signed);
      expect([searchParams.get('result'), searchParams.get('state'), searchParams.get('t'), searchParams.get('missing')]).toEqual([
        'paid',
        'ä b&c',
        '1795168800',
        null,
      ]);
      expect(signatureOf(SECRET, 'return', 'https://agency.example/done', [...searchParams])).toBe(searchParams.get('sig'));
    }
  });
});

describe('an address', () => {
  const allow = ['https://agency.example/pay', 'https://shop.example:8443', 'https://*.agency.gov', 'https://*.town.gov/bills'];
  test.each([
    ['https://agency.example/pay', 'https://agency.example/pay'],
    ['https://agency.example/pay/done?a=1', 'https://agency.example/pay'],
    ['https://AGENCY.example:443/pay/done', 'https://agency.example/pay'],
    ['HTTPS://agency.example/pay', 'https://agency.example/pay'],
    ['https://agency.example/x/../pay/done', 'https://agency.example/pay'],
    ['https://shop.example:8443/anything', 'https://shop.example:8443'],
    ['https://a.agency.gov/', 'https://*.agency.gov'],
    ['https://a.b.agency.gov/x', 'https://*.agency.gov'],
    ['https://a.town.gov/bills/1', 'https://*.town.gov/bills'],
    ['https://agency.example/pay/a;v=1/100%25?results=1&payment=2&stated=3', 'https://agency.example/pay'],
    ['https://agency.example/pay/a%20b/%C3%A9/..a/a..?a;b=1&checkout[x]=1', 'https://agency.example/pay'],
  ])('%s is taken by %s', (address, entry) => expect(vetAddress(address, allow)).toMatchObject({ accepted: true, entry }));
  test.each([
    ['https://agency.example/payment', /allow-list/],
    ['https://agency.example/', /allow-list/],
    ['https://agency.example/pay/../admin', /allow-list/],
    ['https://agency.example/pay/%2e%2e/admin', /allow-list/],
    ['https://agency.example/pay/..%2fadmin', /encoded/],
    ['https://agency.example/pay/%2E%2E%2Fadmin', /encoded/],
    ['https://agency.example/pay/..%5cadmin', /encoded/],
    ['https://agency.example.evil.com/pay', /allow-list/],
    ['https://evil.com/https://agency.example/pay', /allow-list/],
    ['https://agency.example:8443/pay', /allow-list/],
    ['https://shop.example/', /allow-list/],
    ['https://agency.gov/', /allow-list/],
    ['https://evilagency.gov/', /allow-list/],
    ['https://a.town.gov/bill', /allow-list/],
    ['https://agency.example./pay', /allow-list/],
    ['https://xn--gency-8ya.example/pay', /allow-list/],
    ['https://аgency.example/pay', /allow-list/],
    ['http://agency.example/pay', /absolute https/],
    ['//agency.example/pay', /absolute https/],
    ['https:agency.example/pay', /absolute https/],
    ['https:/agency.example/pay', /absolute https/],
    ['javascript:alert(1)//https://agency.example/pay', /absolute https/],
    ['https://user@agency.example/pay', /user/],
    ['https://@agency.example/pay', /user/],
    ['https://agency.example:x@evil.com/pay', /user/],
    ['https://agency.example/pay#x', /fragment/],
    ['https://agency.example/pay#', /fragment/],
    ['https:\\\\agency.example\\pay', /backslash/],
    ['https://agency.example\\@evil.com/pay', /backslash/],
    [' https://agency.example/pay', /space/],
    ['https://agency.example/pay\n', /space/],
    ['https://agency.example/p\tay', /space/],
    ['https://127.0.0.1/pay', /IP/],
    ['https://0x7f.1/pay', /IP/],
    ['https://2130706433/pay', /IP/],
    ['https://[::1]/pay', /IP/],
    ['https://agency.example/pay?a=%zz', /decoded/],
    ['https://agency.example/pay?a=%ff', /decoded/],
    [`https://agency.example/pay?${'x'.repeat(2_048)}`, /longer/],
    ['', /missing/],
    [undefined, /missing/],
    [7, /missing/],
    ...RETURN_PARAMETERS.map((name) => [`https://agency.example/pay?${name}=1`, /which is ours/] as const),
    ['https://agency.example/pay?r%65sult=1', /which is ours/],
    ...[
      'Result',
      'result[]',
      'result[a][b]',
      '[result]',
      '[[result]]',
      '[Result][a]',
      'result]',
      '%5Bcheckout.id%5D',
      '+result',
      '%09result',
      'checkout.id',
      'checkout%20id',
      'CHECKOUT.ID[]',
      '%EF%BD%94',
      'sig+',
    ].map((name) => [`https://agency.example/pay?${name}=1`, /which is ours/] as const),
    ...['checkout[id', 'payment[id', 'Payment[ID', 'result[', 'x=1;result', 'x;sig', 'x=1;a=2;checkout.id', 'checkout_ıd', 'SİG'].map(
      (query) => [`https://agency.example/pay?${query}=1`, /which is ours/] as const,
    ),
    ...['result%00x', 'result%00', 're%E2%80%8Bsult', 're%C2%ADsult', '%EF%BB%BFresult', 'a%0Ab'].map(
      (name) => [`https://agency.example/pay?${name}=1`, /which is ours|invisible character in the name/] as const,
    ),
    ...['..%00', '..%09', '.%00.', '%00', '..%E2%80%8B', '..%C2%AD', '..%2500'].map(
      (segment) => [`https://agency.example/pay/${segment}/evil`, /invisible character in its path/] as const,
    ),
    ...['..%20', '.%20.', '%EF%BC%8E%EF%BC%8E', '\uff0e\uff0e', '%E2%80%A5', '.%EF%BC%8E', '..%EF%BC%9B', '%25EF%25BC%258E.', '..%2520'].map(
      (segment) => [`https://agency.example/pay/${segment}/evil`, /dots that may leave/] as const,
    ),
    ...['%u002e%u002e', '%25u002e.', '..%EF%BC%8Fevil', '..%EF%BC%BCevil'].map(
      (segment) => [`https://agency.example/pay/${segment}`, /encoded/] as const,
    ),
    ...['%c0%ae%c0%ae', '%ff', '100%'].map((segment) => [`https://agency.example/pay/${segment}`, /path that cannot be decoded/] as const),
    ...['..;', '.;', '..;a=b', '..%3b', '..%253B'].map((segment) => [`https://agency.example/pay/${segment}/evil`, /dots with parameters/] as const),
    ...['..%23', '..%3f', '.%2523', '..%253Fa'].map((segment) => [`https://agency.example/pay/${segment}/evil`, /dots that may leave/] as const),
    ...['%252e%252e', '%25252E.', '..%252fevil', '%255c'].map((path) => [`https://agency.example/pay/${path}/evil`, /encoded/] as const),
  ])('%p is refused', (address, why) => expect(vetAddress(address, allow)).toEqual({ accepted: false, why: expect.stringMatching(why) }));
  test('nothing is taken by an empty list', () => expect(vetAddress('https://agency.example/pay', [])).toMatchObject({ accepted: false }));
  test('every accepted address leads to an allowed origin, as browsers read it', () =>
    fc.assert(
      fc.property(
        fc.array(
          fc.constantFrom('https:', '/', '//', '\\', '@', 'agency.example', '.evil.com', ':443', '/pay', '?', '#', '..', '%2f', ' ', '\t', 'a', '.'),
        ),
        (parts) => {
          const address = `https://${parts.join('')}`;
          const vetted = vetAddress(address, ['https://agency.example/pay']);
          if (vetted.accepted) {
            expect(new URL(vetted.address).origin).toBe('https://agency.example');
            expect(new URL(vetted.address).pathname).toMatch(/^\/pay(\/|$)/);
          }
        },
      ),
      { numRuns: 5_000 },
    ));
});
