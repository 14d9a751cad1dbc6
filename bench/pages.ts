/** Counts the pages that Postgres reads for some work, from its buffers or from the disk. Unlike a time, the count does not depend on the machine. */
import { setTimeout as sleep } from 'node:timers/promises';
import type { Pool } from '#platform';

/** Schemas that are not ours, for `not in`. */
export const SCHEMAS_OF_POSTGRES = `('pg_catalog', 'information_schema', 'pg_toast')`;

/** A session writes its statistics at most once a second. */
const STATISTICS_MS = 1_200;

const pagesSoFar = async (pool: Pool): Promise<number> => {
  await sleep(STATISTICS_MS);
  const { rows } = await pool.query<{ pages: string }>(
    'select blks_hit + blks_read as pages from pg_stat_database where datname = current_database()',
  );
  return Number(rows[0]!.pages);
};

/** Runs `work`. `pages` includes what the loops of the service read in these `seconds`. */
export const countingPages = async <T>(
  pool: Pool,
  work: () => Promise<T>,
): Promise<{ readonly result: T; readonly pages: number; readonly seconds: number }> => {
  const before = await pagesSoFar(pool);
  const started = performance.now();
  const result = await work();
  const pages = (await pagesSoFar(pool)) - before;
  return { result, pages, seconds: (performance.now() - started) / 1_000 };
};
