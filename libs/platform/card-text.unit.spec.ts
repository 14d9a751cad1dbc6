/** Card numbers in free text (C9) and the brand of a card (C11). */
import { afterEach, describe, expect, test } from '@jest/globals';
import { type Brand, brandOf, cardInText, cardInTextCheck, DIGITS_ONLY, holdsCardNumber, maskCardNumbers, passesLuhn } from './card-text.js';

/** A number with this prefix and length that passes Luhn. */
const card = (prefix: string, length: number): string => {
  const open = prefix.padEnd(length - 1, '0');
  return [...'0123456789'].map((last) => open + last).find(passesLuhn)!;
};
const brand = (prefix: string, length: number): Brand => brandOf(card(prefix, length));

/** The table of C9. `begins`: prefixes of the brand. `not`: prefixes just outside the ranges of the brand. */
const BRANDS: readonly [Brand, { readonly begins: readonly string[]; readonly not: readonly string[]; readonly lengths: readonly number[] }][] = [
  ['visa', { begins: ['4', '40', '49'], not: ['3', '5'], lengths: [13, 16, 19] }],
  ['mastercard', { begins: ['51', '53', '55', '2221', '2500', '2720'], not: ['50', '56', '2220', '2721'], lengths: [16] }],
  ['amex', { begins: ['34', '37'], not: ['33', '35'], lengths: [15] }],
  ['discover', { begins: ['6011', '644', '646', '649', '65'], not: ['6010', '6012', '643', '66'], lengths: [16, 17, 18, 19] }],
  ['diners', { begins: ['300', '303', '305', '36', '38', '39'], not: ['306', '299', '310'], lengths: [14, 15, 16, 17, 18, 19] }],
  ['jcb', { begins: ['3528', '3555', '3589'], not: ['3527', '3590'], lengths: [16, 17, 18, 19] }],
  ['unionpay', { begins: ['62', '81'], not: ['61', '63', '80', '82'], lengths: [16, 17, 18, 19] }],
];
const LENGTHS = [12, 13, 14, 15, 16, 17, 18, 19, 20];

describe('brands (C11)', () => {
  test.each(BRANDS)('%s: its leading digits at its lengths, and no others', (name, { begins, not, lengths }) => {
    for (const prefix of begins) expect(LENGTHS.filter((length) => brand(prefix, length) === name)).toEqual(lengths);
    for (const prefix of not) expect(LENGTHS.map((length) => brand(prefix, length))).not.toContain(name);
  });
  test('digits that begin like no brand', () => {
    for (const prefix of ['0', '1', '7', '9', '2220', '2721', '50', '56', '59', '60', '63', '66', '80', '82', '306', '3527', '3590'])
      for (const length of LENGTHS) expect(brand(prefix, length)).toBe('unknown');
    expect(brandOf('')).toBe('unknown');
  });
});

test('Luhn: the published numbers pass, and no single digit of them can be another', () => {
  for (const digits of ['4242424242424242', '378282246310005', '30569309025904', '6205500000000000004', '4000007770005046', '79927398713']) {
    expect(passesLuhn(digits)).toBe(true);
    for (let index = 0; index < digits.length; index++)
      for (const other of '0123456789')
        if (other !== digits[index]) expect(passesLuhn(digits.slice(0, index) + other + digits.slice(index + 1))).toBe(false);
  }
});

describe('card numbers in free text (C9)', () => {
  test.each([
    '4242424242424242',
    'card 4242 4242 4242 4242.',
    '4242-4242-4242-4242',
    '378282246310005',
    '3782 822463 10005',
    '3782-822463-10005',
    '3056 930902 5904',
    'x:6205500000000000004',
    '6205 5000 0000 0000 004',
    '4222222222222',
    '4222 2222 2222 2',
    '(4242424242424242)',
    '_4242424242424242_',
    'first 1234567890123, then 4242424242424242',
    '4242 4242 4242 4242 123',
    'a4242424242424242',
    '4242424242424242x',
    'я4242424242424242',
    'en-4242-4242-4242-4242',
    'Case 2024 4242 4242 4242 4242',
    '2024-3782-822463-10005 12',
  ])('refused: %s', (text) => {
    expect(holdsCardNumber(text)).toBe(true);
    expect(maskCardNumbers(text)).toContain('[card]');
    expect(maskCardNumbers(text)).not.toMatch(/4242|3782|3056|6205|4222/);
  });
  test.each([
    ['a time in milliseconds', '1766000000000'],
    ['a case number', 'CASE-2024-000123456789'],
    ['digits that fail Luhn', '4242424242424241'],
    ['an expiry glued on', '42424242424242421230'],
    ['a security code glued on', '42424242424242421'],
    ['a letter between the digits', '42424242x42424242'],
    ['a number between the digits that is no decimal digit', '42424242Ⅳ42424242'],
    ['four separators between two digits', '42424242 -- 42424242'],
    ['a time in microseconds', '1766000000000000'],
    ['a time in nanoseconds', '1766000000000000000'],
    ['a time', '2026-01-31 12:00:00.000'],
    ['a time without separators', '20260131120000000'],
    ['a list of invoice numbers', 'INV 2024-000017, 2024-000018, 2025-000001'],
    ['a parcel', 'parcel 14-220-345-678, lot 5'],
    ['an id of ours', '40000000-0000-7000-8000-00000000000a'],
    ['an id of ours in a text', 'payment 4242424a-4242-4242-8242-424242424242.'],
    ['a telephone number of Germany', '+49 1512 3456782'],
    ['20 digits', card('4', 20)],
    ['12 digits', card('4', 12)],
    ['no brand', '9999999999999995'],
    ['a brand at a length that is not its own', card('4', 15)],
    ['a brand at a length that is not its own', card('37', 16)],
    ['short text', '12345'],
    ['a telephone number', 'tel 555 867 5309'],
    ['nothing', ''],
  ])('passes: %s, %s', (_, text) => {
    expect(holdsCardNumber(text)).toBe(false);
    expect(maskCardNumbers(text)).toBe(text);
  });
  test.each([
    ['4OOO OO77 7OOO 5O46', '4OOO OO77 7OOO 5O46'],
    ['4000007770oo5o46', '4000007770oo5o46'],
    ['no. 4ＯＯ0007770005046.', '4ＯＯ0007770005046'],
    ['4ΟО0007770005046', '4ΟО0007770005046'],
    ['4242424242424242O12', '4242424242424242'],
    ['O4242424242424242', '4242424242424242'],
    ['4242424242424242 OK', '4242424242424242'],
    ['4242424242424242OO', '4242424242424242'],
  ])('refused: a letter O between digits is a zero: %s', (text, number) => {
    expect(holdsCardNumber(text)).toBe(true);
    expect(maskCardNumbers(text)).toBe(text.replace(number, '[card]'));
  });
  test.each(['4000007770oo5o47', '42424242OK42424242', '4242 or 4242 4242 4242', 'OOOO OOOO OOOO OOOO', 'room 4 of 4242, floor 4242 4242'])(
    'passes: %s',
    (text) => expect(maskCardNumbers(text)).toBe(text),
  );
  test('without the second reading, a letter O ends a number', () => {
    expect([cardInText('4OOO OO77 7OOO 5O46', DIGITS_ONLY), cardInText('4242424242424242O', DIGITS_ONLY)]).toEqual([null, expect.any(String)]);
  });
  test.each(BRANDS)('%s: each of its numbers is found at its lengths', (_, { begins, lengths }) => {
    for (const prefix of begins) for (const length of lengths) expect(holdsCardNumber(`no. ${card(prefix, length)}`)).toBe(true);
  });
  test.each([
    ['Maestro', ['50', '56', '59', '63', '67'], [13, 16, 19]],
    ['Mir', ['2200', '2204'], [16, 17, 18, 19]],
    ['RuPay', ['60', '65', '81', '82', '508', '353', '356'], [16]],
  ])('%s is found too, though it is no brand of C11', (_, begins, lengths) => {
    for (const prefix of begins) for (const length of lengths) expect(holdsCardNumber(card(prefix, length))).toBe(true);
  });
  test.each([
    ['points', '.'],
    ['low lines', '_'],
    ['slashes', '/'],
    ['no-break spaces', '\u00a0'],
    ['two blanks', '  '],
    ['three separators', ' - '],
    ['commas', ', '],
    ['line ends', '\r\n'],
    ['en dashes', '–'],
    ['ideographic spaces', '\u3000'],
    ['soft hyphens', '\u00ad'],
    ['many zero-width spaces', '\u200b'.repeat(9)],
    ['combining lines', '\u0332'],
    ['prolonged sound marks', '\u30fc'],
  ])('refused: %s between the digits, in groups of four, of two and of one', (_, separator) => {
    for (const group of [/.{4}/g, /.{2}/g, /./g]) {
      const text = '4242424242424242'.match(group)!.join(separator);
      expect(holdsCardNumber(`no. ${text}`)).toBe(true);
      expect(maskCardNumbers(`no. ${text}!`)).toBe('no. [card]!');
    }
  });
  test('refused: different separators, and groups that no card shows', () => {
    expect(maskCardNumbers('42 42.424_2 / 4242--4242')).toBe('[card]');
  });
  test('refused: digits of every script, wide, raised and circled digits', () => {
    const scripts: string[][] = [];
    for (let code = 128; code <= 0x10ffff; code++) if (/^\p{Nd}$/u.test(String.fromCodePoint(code))) scripts.push([String.fromCodePoint(code)]);
    const zeros = scripts.map(([digit]) => digit!).filter((_, index) => index % 10 === 0);
    expect(zeros.length).toBeGreaterThan(60);
    const alphabets = zeros.map((zero) => Array.from({ length: 10 }, (_, value) => String.fromCodePoint(zero.codePointAt(0)! + value)));
    for (const digits of [
      ...alphabets,
      [...'⁰¹²³⁴⁵⁶⁷⁸⁹'],
      [...'₀₁₂₃₄₅₆₇₈₉'],
      [...'⓪①②③④⑤⑥⑦⑧⑨'],
      [...'⓿❶❷❸❹❺❻❼❽❾'],
      [...'🄋➀➁➂➃➄➅➆➇➈'],
      [...'🄌➊➋➌➍➎➏➐➑➒'],
      [...'⓪⓵⓶⓷⓸⓹⓺⓻⓼⓽'],
    ]) {
      const text = (number: string) => number.replace(/\d/g, (digit) => digits[Number(digit)]!);
      expect([digits[0], maskCardNumbers(`x${text('4000007770005046')}`)]).toEqual([digits[0], 'x[card]']);
      expect(holdsCardNumber(text('4000007770005047'))).toBe(false);
    }
    expect(maskCardNumbers('４2４2 ٤٢٤٢ 4242 ④②④②')).toBe('[card]');
    // Numbers of two digits in one circle.
    for (const ten of '⑩❿➉➓⓾') expect(maskCardNumbers(`400000${ten}0000${ten}⓰`)).toBe('[card]');
  });
  test('digits in the form of an id that has no letter are searched', () =>
    expect(holdsCardNumber('42424242-4242-4242-8242-424242424242')).toBe(true));
  test('a text of any kind takes time in proportion to its length', () => {
    const every = Array.from({ length: 20_000 }, (_, index) => String.fromCodePoint(0x4e00 + index)).join('');
    for (const part of [
      '4',
      '4 ',
      '42 ',
      '4242  -',
      '٤ ',
      '４',
      '4\u200b',
      '4242424a-4242-',
      '424242424242 ',
      '-',
      '4-',
      '\u0316\u0301',
      '\ufdfa',
      every,
    ]) {
      const begun = performance.now();
      expect(maskCardNumbers(`4242424242420${part.repeat(200_000 / part.length)}`).length).toBeGreaterThan(0);
      // It takes about a tenth of that. In quadratic time it would take a minute.
      expect([part.slice(0, 9), performance.now() - begun < 5_000]).toEqual([part.slice(0, 9), true]);
    }
  });
  test('an id without a letter is searched, also where a letter follows', () =>
    expect(maskCardNumbers('42424242-4242-4242-8242-424242424242-a')).toContain('[card]'));
  test('masks card numbers, and nothing else', () =>
    expect(maskCardNumbers('{"d":"pay 4242424242424242 now, 4242 4242 4242 4242 later, case 1766000000000"}')).toBe(
      '{"d":"pay [card] now, [card] later, case 1766000000000"}',
    ));
  test('masks in the order of the text, in any form of the number', () =>
    expect(maskCardNumbers('now 4242 4242 4242 4242, then 4242424242424242, then 3782 822463 10005.')).toBe('now [card], then [card], then [card].'));
  test('masks numbers that overlap once', () => expect(maskCardNumbers('no. 4242 4242 4242 4242 4242!')).toBe('no. [card]!'));
});

describe('the check of free text', () => {
  afterEach(() => {
    cardInTextCheck.on = true;
  });
  test('names the fault, and repeats nothing of the text', () => {
    expect(cardInText('pay 4242424242424242')).toBe('must not hold a card number');
    expect(cardInText('case 1766000000000')).toBeNull();
  });
  test('finds nothing if it is switched off', () => {
    cardInTextCheck.on = false;
    expect(cardInText('pay 4242424242424242')).toBeNull();
  });
});
