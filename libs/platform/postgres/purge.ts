/** Maximum number of rows that one statement of a purge deletes. To delete them takes much less than the time limit of a statement. */
export const PURGE_BATCH = 5_000;

/**
 * Deletes in batches. With too many rows, a single statement for all of them would reach its time limit. Each later try would fail in the same way.
 * `deleteBatch` deletes at most `limit` rows and returns the number. If `stop` aborts, the work ends after the current batch.
 */
export const purge = async (deleteBatch: (limit: number) => Promise<number>, stop?: AbortSignal): Promise<number> => {
  for (let deleted = 0; ;) {
    const count = await deleteBatch(PURGE_BATCH);
    deleted += count;
    if (count < PURGE_BATCH || stop?.aborted) return deleted;
  }
};
