/** The rules for forms (C8): each name once, valid UTF-8, no NUL and no lone surrogate. */
import { describe, expect, test } from '@jest/globals';
import fc from 'fast-check';
import { parseForm, parseFormBody } from './form.js';

describe('a form', () => {
  test.each<[string, [string, string][]]>([
    ['', []],
    ['a=1&b=2', [['a', '1'], ['b', '2']]], // prettier-ignore
    ['a=x+y%2Bz', [['a', 'x y+z']]],
    ['a=1=2&&b&c=', [['a', '1=2'], ['b', ''], ['c', '']]], // prettier-ignore
    ['%C3%A9=%E2%82%AC', [['é', '€']]],
    ['constructor=1&toString=2', [['constructor', '1'], ['toString', '2']]], // prettier-ignore
  ])('%p', (text, pairs) => expect([...parseForm(text)]).toEqual(pairs));
  test.each([
    ['a=1&a=2', /more than once/],
    ['a=1&%61=2', /more than once/],
    ['__proto__=1', /not allowed/],
    ['a=%', /cannot be decoded/],
    ['a=%zz', /cannot be decoded/],
    ['a=%ff', /cannot be decoded/],
    ['a=%ed%a0%80', /cannot be decoded/],
    ['a=%00', /NUL/],
    [Array.from({ length: 201 }, (_, index) => `a${index}=`).join('&'), /more than 200/],
  ])('%p is refused without repeating it', (text, message) => {
    const read = () => parseForm(text);
    expect(read).toThrow(message);
    expect(read).toThrow(expect.objectContaining({ code: 'VALIDATION_ERROR' }));
  });
  test('bytes that are no UTF-8 are refused', () => expect(() => parseFormBody(Buffer.from([0x61, 0x3d, 0xff]))).toThrow(/UTF-8/));
  test('reads the forms of browsers', () =>
    fc.assert(
      fc.property(fc.dictionary(fc.string({ unit: 'grapheme', minLength: 1 }), fc.string({ unit: 'grapheme' })), (fields) => {
        fc.pre(Object.entries(fields).every((pair) => pair.every((text) => !text.includes('\0') && text !== '__proto__')));
        expect(Object.fromEntries(parseForm(new URLSearchParams(fields).toString()))).toEqual(fields);
      }),
    ));
});
