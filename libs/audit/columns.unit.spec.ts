/** Every column of every report has a meaning, and docs/finance.md shows the same. */
import { expect, test } from '@jest/globals';
import { readFileSync } from 'node:fs';
import { columnsOf } from './columns.js';
import { REPORTS, type ReportName } from './exports.js';

const GUIDE = readFileSync(new URL('../../docs/finance.md', import.meta.url), 'utf8').replace(/ +/g, ' ');

test.each(Object.keys(REPORTS) as ReportName[])('%s: each column has a meaning, in the code and in the guide', (name) => {
  const columns = columnsOf(name);
  expect(columns.map(({ column }) => column)).toEqual([...REPORTS[name].columns]);
  for (const { column, meaning } of columns)
    expect(meaning === '' ? `${column} has no meaning` : GUIDE).toContain(`| \`${name}\` | \`${column}\` | ${meaning} |`);
});
