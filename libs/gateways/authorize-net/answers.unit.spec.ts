/** The reader of the vendor's JSON: liberal in form, strict in meaning. */
import { expect, test } from '@jest/globals';
import { centsOf, idOf, instantOf, isOk, listOf, messageCode, plainTextOf, readAnswer, textOf } from './answers.js';

test('a byte order mark may come first, and anything but an object is no answer', () => {
  expect(readAnswer('\ufeff{"a":1}')).toEqual({ a: 1 });
  for (const text of ['', '\ufeff', 'null', '[]', '"x"', '{"a":', '<html>', '\ufeff\ufeff{}']) expect(readAnswer(text)).toBeNull();
});

test.each<[unknown, number | null]>([
  ['12.34', 1_234],
  [12.34, 1_234],
  [0.29, 29],
  ['1.1', 110],
  [1.15, 115],
  ['4.35', 435],
  ['999999.99', 99_999_999],
  [999_999.99, 99_999_999],
  ['12', 1_200],
  ['12.3400', 1_234],
  ['0', 0],
  ['12.345', null],
  ['-1.00', null],
  ['1e3', null],
  ['1,000.00', null],
  ['.50', null],
  ['', null],
  [null, null],
  [{}, null],
])('%p dollars are %p cents', (dollars, cents) => {
  expect(centsOf(dollars)).toBe(cents);
});

test('every amount of cents is read as it was written', () => {
  for (let cents = 0; cents <= 20_000; cents++) {
    const text = `${Math.floor(cents / 100)}.${String(cents % 100).padStart(2, '0')}`;
    expect([centsOf(text), centsOf(JSON.parse(text))]).toEqual([cents, cents]);
  }
});

test('an id has digits and is not 0', () => {
  expect([idOf('60000000001'), idOf(60_000_000_001)]).toEqual(['60000000001', '60000000001']);
  for (const value of ['0', 0, '', null, undefined, 'X1', '1.5', -1, 2 ** 60, {}, ['1']]) expect(idOf(value)).toBeNull();
});

test('a time without a zone is UTC', () => {
  const at = Date.UTC(2026, 2, 8, 10, 30, 5);
  expect(instantOf('2026-03-08T10:30:05')).toBe(at);
  expect(instantOf('2026-03-08T10:30:05Z')).toBe(at);
  expect(instantOf('2026-03-08T10:30:05.1234567Z')).toBe(at + 123);
  expect(instantOf('2026-03-08T05:30:05-05:00')).toBe(at);
  for (const value of ['', null, 'yesterday', '2026-03-08', '2026-13-08T10:30:05Z', 1_700_000_000]) expect(instantOf(value)).toBeNull();
});

test('a list may be absent, null, empty text or one object; other values are no list', () => {
  for (const value of [undefined, null, '', []]) expect(listOf(value)).toEqual([]);
  expect(listOf({ code: '1' })).toEqual([{ code: '1' }]);
  for (const value of ['x', 7, [1], [null]]) expect(listOf(value)).toBeNull();
});

test('XML entities in text are read, also numeric ones, and nothing else is', () => {
  expect(plainTextOf('O&apos;Neill &amp; Sons &lt;&#65;&#x42;&gt; &quot;')).toBe('O\'Neill & Sons <AB> "');
  expect(plainTextOf('&amp;lt; &nbsp; &#0; &#xd800; &#x110000; &')).toBe('&lt; &nbsp; &#0; &#xd800; &#x110000; &');
});

test('null, absent and empty are the same; a number may be text', () => {
  expect([textOf(null), textOf(undefined), textOf(''), textOf({}), textOf(true)]).toEqual(['', '', '', '', '']);
  expect([textOf(3), textOf('3'), textOf(' 3 ')]).toEqual(['3', '3', '3']);
  expect(textOf(2 ** 60)).toBe('');
});

test('an answer says Ok and a code, or neither', () => {
  expect(isOk({ messages: { resultCode: 'Ok', message: [{ code: 'I00001' }] } })).toBe(true);
  expect(messageCode({ messages: { resultCode: 'Error', message: { code: 'E00007' } } })).toBe('E00007');
  for (const answer of [{}, { messages: null }, { messages: 'Ok' }, { messages: { resultCode: 'OK?' } }]) {
    expect(isOk(answer)).toBe(false);
    expect(messageCode(answer)).toBe('');
  }
});

test('a number that would become another one is no amount; one that nobody reads does not matter', () => {
  const answer = readAnswer('{"amount":10.00000000000000000001,"other":1e-400,"fine":10.50}')!;
  expect([centsOf(answer.amount), centsOf(answer.fine)]).toEqual([null, 1_050]);
});
