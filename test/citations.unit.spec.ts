/** Every citation must lead to a place in this repository. The forms of citations: docs/contract.md#how-to-cite. */
import { expect, test } from '@jest/globals';
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { dirname, join, normalize } from 'node:path';

const ROOT = join(import.meta.dirname, '..');
const read = (path: string) => readFileSync(join(ROOT, path), 'utf8');
const below = (folder: string, ends: RegExp): string[] =>
  readdirSync(join(ROOT, folder), { recursive: true, encoding: 'utf8' })
    .map((name) => join(folder, name))
    .filter((path) => ends.test(path));

const DOCS = ['README.md', 'CONTRIBUTING.md', 'SECURITY.md', ...below('docs', /\.md$/)];
const CODE = [
  'eslint.config.mjs',
  'jest.config.mjs',
  ...['apps', 'libs', 'test', 'bench', 'examples'].flatMap((folder) => below(folder, /\.(ts|mjs)$/)),
];

const CONTRACT = read('docs/contract.md');
/** Numbers such as C42 and T7 from docs/contract.md and docs/finance.md. A number is defined in a heading or in the first cell of a table row. */
const NUMBERS = new Set([
  ...[...CONTRACT.matchAll(/^#{2,3} (C\d+)$/gm)].map(([, number]) => number!),
  ...[...CONTRACT.matchAll(/^\| ([ESTAK]\d+) /gm)].map(([, number]) => number!),
  ...[...read('docs/finance.md').matchAll(/^\| (R\d+\b[^|]*)/gm)].flatMap(([, rules]) => [...rules!.matchAll(/R\d+/g)].map(([rule]) => rule)),
]);
/** The headings of the rules of the specification, each with the numbers of its list. */
const SPECIFICATION = new Map(
  CONTRACT.split('\n## Rules of the specification\n')[1]!
    .split('\n## ')[0]!
    .split('\n### ')
    .slice(1)
    .map((section) => [section.split('\n')[0]!, new Set([...section.matchAll(/^(\d+)\. /gm)].map(([, number]) => number!))]),
);
const DECISIONS = new Set(readdirSync(join(ROOT, 'docs/decisions')).map((name) => name.slice(0, 4)));

/** The anchors of the headings, as GitHub makes them. */
const anchorsOf = (text: string): string[] =>
  [...text.replace(/^```.*?^```/gms, '').matchAll(/^#{1,6} (.*)$/gm)].map(([, heading]) =>
    heading!
      .toLowerCase()
      .replace(/[^\p{L}\p{N}\- _]/gu, '')
      .replace(/ /g, '-'),
  );
const leads = (path: string, anchor: string | undefined): boolean =>
  existsSync(join(ROOT, path)) && (anchor === undefined || !path.endsWith('.md') || anchorsOf(read(path)).includes(anchor));

/** A number of the contract, or a range of numbers. A match inside a word, a path or an identifier does not count. */
const NUMBER = /(?<![\w'"`#/.-])([CESTAKR])(\d{1,2})(?![\w'"`/-]|\.\d)/g;
/** A rule of the specification, such as "specification, Authentication 3 and 4": the heading and numbers of its list. */
const RULE = /\bspecification, ([A-Z][a-z]+(?: [a-z]+)?)((?: \d+)(?:(?:, | and )\d+)*)?/g;

const faultsOf = (path: string, text: string): string[] => {
  const faults: string[] = [];
  for (const [cited, letter, number] of text.matchAll(NUMBER)) if (!NUMBERS.has(`${letter}${number}`)) faults.push(cited);
  for (const [cited, words, numbers] of text.matchAll(RULE)) {
    const heading = [words!, words!.split(' ')[0]!].find((name) => SPECIFICATION.has(name));
    const known = heading === undefined ? undefined : SPECIFICATION.get(heading);
    if (!known || [...(numbers ?? '').matchAll(/\d+/g)].some(([rule]) => !known.has(rule))) faults.push(cited);
  }
  for (const [cited, number] of text.matchAll(/\bdecision (\d{4})\b/g)) if (!DECISIONS.has(number!)) faults.push(cited);
  for (const [cited] of text.matchAll(/§\s?\d[\d.]*/g)) faults.push(cited);
  return path.endsWith('.md') ? faults : [...faults, ...pathsOf(text)];
};

/** The document paths in a text that lead nowhere. A path may have an anchor. */
const pathsOf = (text: string): string[] =>
  [...text.matchAll(/(?<![\w/.-])((?:[\w.-]+\/)*[\w-]+\.md)(?:#([\p{L}\w-]+))?/gu)].flatMap(([cited, path, anchor]) =>
    leads(path!, anchor) ? [] : [cited],
  );

/** The comments and spec titles of a source file. A number elsewhere in the code is no citation. */
const proseOf = (source: string): string =>
  [
    ...[...source.matchAll(/\/\*.*?\*\/|\/\/[^\n]*/gs)].map(([text]) => text),
    ...[...source.matchAll(/\b(?:describe|test)(?:\.each(?:<[^>]*>)?\(.*?\))?\(\s*(['"`])(.*?)\1/gs)].map(([, , title]) => title),
  ].join('\n');

test.each(CODE)('%s cites only existing passages', (path) => {
  expect(faultsOf(path, proseOf(read(path)))).toEqual([]);
});

test.each(DOCS)('%s cites only existing passages', (path) => {
  const text = read(path).replace(/^```.*?^```/gms, '');
  expect(faultsOf(path, text.replace(/`[^`]*`/g, ''))).toEqual([]);
  const links = [...text.matchAll(/\]\(([^)\s]+)\)/g)].map(([, target]) => target!).filter((target) => !/^[a-z]+:/.test(target));
  const dead = links.filter((target) => {
    const [file, anchor] = target.split('#');
    return !leads(file === '' ? path : normalize(join(dirname(path), file!)), anchor);
  });
  expect(dead).toEqual([]);
  if (path.startsWith('docs/decisions/')) return; // A record names the files of its time.
  const named = [...text.matchAll(/`((?:apps|bench|docker|docs|examples|libs|test)\/[\w./-]+\.\w+)`/g)].map(([, file]) => file!);
  expect(named.filter((file) => !leads(file, undefined))).toEqual([]);
});

/** The rulings that docs/contract.md must contain. */
const RULINGS = Array.from({ length: 78 }, (_, index) => `C${index + 1}`);

test('each ruling that is built stands once, and each other number once', () => {
  expect([...CONTRACT.matchAll(/^### (C\d+)$/gm)].map(([, number]) => number)).toEqual(RULINGS);
  const cells = [...CONTRACT.matchAll(/^\| ([ESTAK]\d+) /gm)].map(([, number]) => number);
  expect(cells).toEqual([...new Set(cells)]);
});

test('a citation that leads nowhere is found', () => {
  const text = 'C99, T14 and R77; specification, Refund 9; specification, Nothing; decision 9999; recovery.md 1.4; docs/api.md#nowhere; §4';
  expect(faultsOf('a.ts', text)).toEqual([
    'C99',
    'T14',
    'R77',
    'specification, Refund 9',
    'specification, Nothing',
    'decision 9999',
    '§4',
    'recovery.md',
    'docs/api.md#nowhere',
  ]);
});
