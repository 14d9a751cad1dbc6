/** Long lists, read in pages by key. */

/** Rows of one page. They fit into the time limit of a statement and the memory of a request. */
export const PAGE_ROWS = 5_000;

/** Yields every row of a list. `page` reads the next `limit` rows after the row `after` (null: from the first row), in an order without ties. */
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
