/** Long lists, read in pages by key. */

/** Few enough for one statement under its time limit, and for the memory of one request. */
export const PAGE_ROWS = 5_000;

/** Every row of a list. `page` reads the first `limit` rows after the given one, in an order without ties. After null it reads the first rows of all. */
export const everyRow = async function* <Row>(page: (after: Row | null, limit: number) => Promise<readonly Row[]>): AsyncGenerator<Row, void, void> {
  for (let after: Row | null = null; ;) {
    const rows = await page(after, PAGE_ROWS);
    yield* rows;
    if (rows.length < PAGE_ROWS) return;
    after = rows.at(-1)!;
  }
};

export const collect = async <T>(items: AsyncIterable<T>): Promise<T[]> => {
  const all: T[] = [];
  for await (const item of items) all.push(item);
  return all;
};
