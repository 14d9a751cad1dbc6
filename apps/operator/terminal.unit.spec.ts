/** Values of partners and staff on a terminal: no value can move the cursor, turn the direction of text, or look like another line. */
import { expect, test } from '@jest/globals';
import { fields, personName, table } from './terminal.js';

const HOSTILE = 'a\u001b[2Jb\r\nc\td\u202ee\u009b1m\u2028f\u200f\u061c\u200b';
const SHOWN = 'a\\u001b[2Jb\\u000d\\u000ac\\u0009d\\u202ee\\u009b1m\\u2028f\\u200f\\u061c\\u200b';

test('in a table', () => expect(table(['name', 'n'], [[HOSTILE, '1']]).split('\n')).toEqual([expect.stringMatching(/^name +n$/), `${SHOWN}  1`]));

test('in fields', () => expect(fields([['name', HOSTILE]])).toBe(`name  ${SHOWN}`));

test('a name with control characters is refused', () => {
  expect(personName('Ana Ñúñez')).toBe('Ana Ñúñez');
  for (const name of ['', '  ', 'Ana\u001b[2J', 'Ana\n', 'Ana\u202e', 'a\tb', 'a\u200fb', 'a\u061cb', 'a\u200bb', 'a\u00adb', 'a\u200eb'])
    expect(() => personName(name)).toThrow('without control characters');
  expect(() => personName('4242 4242 4242 4242')).toThrow('card number');
});
