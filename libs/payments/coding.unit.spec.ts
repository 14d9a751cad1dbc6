import { expect, test } from '@jest/globals';
import fc from 'fast-check';
import { isCodingWord } from '#accounts';
import { codingOf } from './coding.js';

test('the values of the named keys, and of no other key', () => {
  expect(codingOf({ fund: '402', gl: 'WTR/40-100.2', ward: 'north' }, ['gl', 'fund', 'dept'])).toEqual({ gl: 'WTR/40-100.2', fund: '402' });
});
test('a number counts as its digits', () => {
  expect(codingOf({ fund: 402, part: 1.5, credit: -7 }, ['fund', 'part', 'credit'])).toEqual({ fund: '402', part: '1.5', credit: '-7' });
});
test.each<[string, unknown]>([
  ['free text', 'Alex Rivera'],
  ['an e-mail address', 'alex@mail.example'],
  ['an empty text', ''],
  ['a long text', 'x'.repeat(65)],
  ['a text of another line', '402\n'],
  ['true', true],
  ['null', null],
  ['a list', ['402']],
  ['an object', { code: '402' }],
])('%s is no code, and is left out', (_, value) => {
  expect(codingOf({ fund: value as never, gl: '40100' }, ['fund', 'gl'])).toEqual({ gl: '40100' });
  expect(codingOf({ fund: value as never }, ['fund'])).toBeNull();
});
test('null without keys, without metadata, and if the metadata has none of the keys', () => {
  expect([codingOf({ fund: '402' }, []), codingOf(null, ['fund']), codingOf({ ward: 4 }, ['fund'])]).toEqual([null, null, null]);
});
test('names that every object inherits give no value', () => {
  expect(codingOf({}, ['constructor', 'toString', '__proto__'])).toBeNull();
  expect(codingOf({ constructor: 'C1' }, ['constructor'])).toEqual({ constructor: 'C1' });
});
test('any metadata: only codes under the portal’s keys come out', () =>
  fc.assert(
    fc.property(fc.dictionary(fc.string(), fc.jsonValue() as fc.Arbitrary<never>), fc.array(fc.string(), { maxLength: 5 }), (metadata, keys) => {
      for (const [key, value] of Object.entries(codingOf(metadata, keys) ?? {})) {
        expect(keys).toContain(key);
        expect(isCodingWord(value)).toBe(true);
        expect(String(metadata[key])).toBe(value);
      }
    }),
  ));
