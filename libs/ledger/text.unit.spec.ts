/** No cell of a CSV works as a formula, in any spreadsheet (ASVS 1.2.10). */
import { expect, test } from '@jest/globals';
import { csvLine } from './text.js';

test.each(['=1+1', '+1', '-1', '@SUM(A1)', '\t=1', '\r=1', '\n=1', ' =1', '  \n @x', '＝1', '＋1', '－1', '＠x', '\u0000=1'])(
  '%j gets an apostrophe in front',
  (text) => expect(csvLine([text]).replace(/^"/, '')).toMatch(/^'/),
);

/** How a spreadsheet reads cells if `separator` ends one: quotes count only at the begin of a cell. */
const cellsAt = (separator: string, line: string): string[] => {
  const cells: string[] = [];
  for (let at = 0; at < line.length; at++) {
    let cell = '';
    if (line[at] === '"') for (at += 1; at < line.length && (line[at] !== '"' || line[++at] === '"'); at++) cell += line[at];
    for (; at < line.length && line[at] !== separator && line[at] !== '\r' && line[at] !== '\n'; at++) cell += line[at];
    cells.push(cell);
  }
  return cells;
};
const SEPARATORS = [',', ';', '\t'];

test.each([
  ['a;=1+1;b', "a;'=1+1;b"],
  ['a\n=1+1;z', "a\n'=1+1;z"],
  ['a\r\n  =1+1;z', "a\r\n'  =1+1;z"],
  ['a\t=1+1\tb', "a\t'=1+1\tb"],
  ['a;  =1+1;b', "a;'  =1+1;b"],
  ['a;＝1+1;b;－2', "a;'＝1+1;b;'－2"],
  ['a;"=1+1;b', 'a;\'"=1+1;b'],
  ['=1;@x;+2', "'=1;'@x;'+2"],
  ['\n=1+1;z', "'\n'=1+1;z"],
  ['a;\u200b=1', "a;'\u200b=1"],
])('%j gets an apostrophe wherever a spreadsheet may see a cell begin', (text, safe) => {
  const line = csvLine([7, text, 'end']);
  expect(line).toBe(`7,"${safe.replaceAll('"', '""')}",end\r\n`);
  for (const separator of SEPARATORS) for (const cell of cellsAt(separator, line)) expect(cell).not.toMatch(/^[\s\u200b"]*[=+\-@＝＋－＠]/u);
});

test.each(['a;b=HYPERLINK("x")', 'a,=1', 'a\n1=1', 'a "b"'])('%j stays as it is, in quotes', (text) =>
  expect(csvLine([text, 1])).toBe(`"${text.replaceAll('"', '""')}",1\r\n`),
);

test('a long text of separators takes linear time', () => {
  const begun = performance.now();
  csvLine(['\n'.repeat(1_000_000)]);
  csvLine([';'.repeat(1_000_000)]);
  csvLine([`;${' '.repeat(1_000_000)}`]);
  expect(performance.now() - begun).toBeLessThan(5_000);
});

test('other texts and numbers stay as they are', () =>
  expect(csvLine(['Water bill', -5, 'a=b', '5-3', null, true, 'mañana'])).toBe('Water bill,-5,a=b,5-3,,true,mañana\r\n'));

/** Reads a cell back as docs/finance.md says. */
const textOf = (cell: string): string => {
  const quoted = /^"(.*)"\r\n$/su.exec(cell);
  const plain = quoted ? quoted[1]!.replaceAll('""', '"') : cell.slice(0, -2);
  const read = !/\\u[\da-f]{4}/.test(plain)
    ? plain
    : plain.replace(/\\(\\|u[\da-f]{4})/g, (_, what: string) => (what === '\\' ? what : String.fromCharCode(parseInt(what.slice(1), 16))));
  return read.replace(/^'/, '').replace(/([;\t-\r\x85\u2028\u2029])'/gu, '$1');
};

test('each control character but a tab or a line break is written as an escape', () => {
  expect(csvLine(['a\u001b[31mb\u007f\u0085c\u202ed', 1])).toBe('a\\u001b[31mb\\u007f\\u0085c\\u202ed,1\r\n');
  expect(csvLine(['a\r\nb\tc'])).toBe('"a\r\nb\tc"\r\n');
  expect(csvLine(['\u0000=1'])).toBe("'\\u0000=1\r\n");
});

test('no two texts share a cell, and each text can be read back', () => {
  const pieces = ["'", '=', ';', '\n', '\t', ' ', '"', 'a', '1', '\\', 'u001b', '\u001b', '\u0085', '\u202e', '-'];
  let texts = [''];
  const seen = new Map<string, string>();
  const wrong: string[] = [];
  for (let length = 0; length <= 4; length++) {
    for (const text of texts) {
      const cell = csvLine([text]);
      if (textOf(cell) !== text || seen.has(cell)) wrong.push(JSON.stringify([text, cell, textOf(cell), seen.get(cell)]));
      seen.set(cell, text);
    }
    if (length < 4) texts = texts.flatMap((text) => pieces.map((piece) => text + piece));
  }
  expect(wrong.slice(0, 5)).toEqual([]);
});
