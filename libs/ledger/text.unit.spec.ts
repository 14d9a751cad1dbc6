/** No cell of a CSV works as a formula, in any spreadsheet (ASVS 1.2.10). */
import { expect, test } from '@jest/globals';
import { csvLine } from './text.js';

test.each(['=1+1', '+1', '-1', '@SUM(A1)', '\t=1', '\r=1', '\n=1', ' =1', '  \n @x', '＝1', '＋1', '－1', '＠x', '\u0000=1'])(
  '%j gets an apostrophe in front',
  (text) => expect(csvLine([text]).replace(/^"/, '')).toMatch(/^'/),
);

test.each(['a;=HYPERLINK("x")', 'a\t=1', 'a,=1', 'a\n=1', 'a "b"'])('%j stays one cell, whatever separates cells', (text) =>
  expect(csvLine([text, 1])).toBe(`"${text.replaceAll('"', '""')}",1\r\n`),
);

test('other texts and numbers stay as they are', () =>
  expect(csvLine(['Water bill', -5, 'a=b', '5-3', null, true, 'mañana'])).toBe('Water bill,-5,a=b,5-3,,true,mañana\r\n'));
