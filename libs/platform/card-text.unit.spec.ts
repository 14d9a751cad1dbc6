import { describe, expect, test } from '@jest/globals';
import { brandOf, holdsCardNumber, maskCardNumbers, passesLuhn } from './card-text.js';

describe('card numbers in free text (C9)', () => {
  test.each([
    '4242424242424242',
    'card 4242 4242 4242 4242.',
    '4242-4242-4242-4242',
    '378282246310005',
    '3782 822463 10005',
    'x:6205500000000000004',
  ])('refused: %s', (text) => expect(holdsCardNumber(text)).toBe(true));
  test.each([
    '1766000000000',
    'CASE-2024-000123456789',
    '4242424242424241',
    'a4242424242424242',
    '42424242424242421',
    '9999999999999995',
    '12345',
    'tel 555 867 5309',
  ])('passes: %s', (text) => expect(holdsCardNumber(text)).toBe(false));
  test('masks what it finds', () => expect(maskCardNumbers('{"d":"pay 4242424242424242 now"}')).toBe('{"d":"pay [card] now"}'));
});

test('brands (C11)', () => {
  expect(
    [
      '4242424242424242',
      '5555555555554444',
      '2221000000000009',
      '378282246310005',
      '6011111111111117',
      '3530111333300000',
      '6205500000000000004',
      '30569309025904',
      '9999',
    ].map(brandOf),
  ).toEqual(['visa', 'mastercard', 'mastercard', 'amex', 'discover', 'jcb', 'unionpay', 'diners', 'unknown']);
  expect(passesLuhn('4000007770005046')).toBe(true);
});
