import { expect, test } from '@jest/globals';
import { pagesByKey } from './pages.js';

test('a page is read when the caller asks for it, and not while the caller uses the page before', async () => {
  const read: (readonly string[] | null)[] = [];
  const pages = pagesByKey<number>(
    null,
    (row) => [String(row)],
    async (place) => {
      read.push(place);
      const from = Number(place?.[0] ?? 0);
      return from === 4 ? [5] : [from + 1, from + 2];
    },
    2,
  );
  const seen: (readonly number[])[] = [];
  for await (const rows of pages) {
    seen.push(rows);
    await new Promise((wake) => setImmediate(wake));
    expect(read).toHaveLength(seen.length);
  }
  expect(seen).toEqual([[1, 2], [3, 4], [5]]);
  expect(read).toEqual([null, ['2'], ['4']]);
});
