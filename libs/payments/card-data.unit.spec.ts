/** Tests that card data is shown nowhere (PCI DSS 3.3.1, 3.5.1.1), and that a key's fingerprint uses card data only as C13 allows. */
import { describe, expect, test } from '@jest/globals';
import fc from 'fast-check';
import { format, inspect } from 'node:util';
import { canonicalJson } from '#kernel';
import { createLogger, maskedLines } from '#platform';
import { requestText } from '../../apps/api/partner/http.js';
import { Secret } from './gateway/gateway.js';

const NUMBER = '4242424242424242';
const secret = new Secret(NUMBER);

describe('a Secret shows itself only when it is revealed', () => {
  test('revealed, it is unchanged', () => expect(secret.reveal()).toBe(NUMBER));
  test.each<[string, () => string]>([
    ['JSON', () => JSON.stringify({ instrument: { number: secret } })],
    ['canonical JSON', () => canonicalJson({ secret })],
    ['a template', () => `${String(secret)}`],
    ['String()', () => String(secret)],
    ['concatenation', () => 'card ' + String(secret)],
    ['inspection', () => inspect(secret)],
    ['inspection, everything shown', () => inspect({ a: [secret] }, { showHidden: true, depth: 10, getters: true })],
    ['format', () => format('%s %o %O %j', secret, secret, secret, secret)],
    ['an error', () => String(new Error(`declined: ${String(secret)}`).stack)],
    ['an error’s cause', () => inspect(new Error('x', { cause: secret }))],
    ['its keys', () => JSON.stringify([Object.keys(secret), Object.getOwnPropertyNames(secret), Object.entries(secret), { ...secret }])],
    ['a clone', () => inspect(structuredClone({ secret }), { showHidden: true })],
    ['Object.assign', () => inspect(Object.assign({}, secret))],
    ['a Map', () => inspect(new Map([[secret, secret]]))],
  ])('%s', (_, show) => expect(show()).not.toContain('4242'));
  test('a log', () => {
    const lines: string[] = [];
    const before = maskedLines.count;
    createLogger('debug', 'spec', { write: (line) => lines.push(line) }).error(
      { instrument: { number: secret }, err: new Error(String(secret)) },
      `${String(secret)}`,
    );
    expect(lines.join()).not.toContain('4242');
    // `Secret` masked the number, so the logger had nothing to mask.
    expect(maskedLines.count).toBe(before);
  });
});

describe('the fingerprint of a request (C13)', () => {
  const body = (method: Record<string, unknown>, rest: Record<string, unknown> = {}) => ({
    amountCents: 100,
    ...rest,
    paymentMethod: { type: 'card', cardNumber: NUMBER, expirationDate: '12/30', cvv: '987', ...method },
  });
  const print = (value: Record<string, unknown>, method = 'POST', path = '/api/partner/v1/payments') =>
    requestText(method, path, value).fingerprintText;

  test('method, path and canonical body, one under the other', () =>
    expect(print(body({}))).toBe(
      `POST\n/api/partner/v1/payments\n{"amountCents":100,"paymentMethod":{"cardNumber":"${NUMBER}","expirationDate":"12/30","type":"card"}}`,
    ));
  test('the cvv is left out: with another one, or none, it is the same request', () => {
    expect(print(body({ cvv: '123' }))).toBe(print(body({})));
    expect(print(body({ cvv: undefined }))).toBe(print(body({})));
    expect(print(body({ cvv: 987 }))).toBe(print(body({})));
  });
  test('the card number enters as its digits', () => expect(print(body({ cardNumber: '4242 4242 4242 4242' }))).toBe(print(body({}))));
  test('key order and white space do not matter', () => {
    const shuffled = { paymentMethod: { cvv: '987', expirationDate: '12/30', cardNumber: NUMBER, type: 'card' }, amountCents: 1e2 };
    expect(print(shuffled)).toBe(print(body({})));
  });
  test.each<[string, string]>([
    ['another path', print(body({}), 'POST', '/api/partner/v1/payments/x/refund')],
    ['another method', print(body({}), 'PUT')],
    ['12/30 and 1230 differ', print(body({ expirationDate: '1230' }))],
    ['another card', print(body({ cardNumber: '4111111111111111' }))],
    ['an unknown field', print(body({}, { x: 1 }))],
    ['an unknown field of the card', print(body({ x: 1 }))],
    ['a default written out', print(body({}, { currency: 'USD' }))],
    ['null is not absent', print(body({}, { payer: null }))],
    ['spaces elsewhere', print(body({}, { referenceId: 'a b' }))],
  ])('%s', (_, other) => expect(other).not.toBe(print(body({}))));
  test('the log gets a hash of the last four digits, and of no more', () => {
    const logged = (value: Record<string, unknown>) => requestText('POST', '/payments', value).loggedText;
    expect(logged(body({ cardNumber: '4242 4242 4242 4242' }))).toBe(
      'POST\n/payments\n{"amountCents":100,"paymentMethod":{"cardNumber":"4242","expirationDate":"12/30","type":"card"}}',
    );
    expect(logged(body({ cardNumber: Number(NUMBER) }))).not.toContain('4242');
    expect(logged({ reason: 'x' })).toBe('POST\n/payments\n{"reason":"x"}');
  });
  test('a body without a card is taken as it is', () => {
    expect(print({})).toBe('POST\n/api/partner/v1/payments\n{}');
    expect(print({ reason: 'x' })).toMatch(/\{"reason":"x"\}$/);
    expect(print({ paymentMethod: null })).toMatch(/\{"paymentMethod":null\}$/);
  });
  test('the body itself is not changed', () => {
    const original = body({ cardNumber: '4242 4242' });
    print(original);
    expect(original.paymentMethod).toEqual({ type: 'card', cardNumber: '4242 4242', expirationDate: '12/30', cvv: '987' });
  });
  test('no cvv of a card is ever in it, and any other difference is', () =>
    fc.assert(
      fc.property(fc.stringMatching(/^[0-9]{3,4}$/), fc.jsonValue({ maxDepth: 2 }), fc.jsonValue({ maxDepth: 2 }), (cvv, a, b) => {
        const [one, other] = [a, b].map((extra) => print(body({ cvv }, { extra })));
        expect(one).not.toContain('"cvv"');
        expect(one === other).toBe(canonicalJson(a) === canonicalJson(b));
      }),
    ));
});
