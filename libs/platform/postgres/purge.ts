/** Maximum number of rows that one statement of a purge deletes. Their deletion takes much less than the time limit of a statement. */
export const PURGE_BATCH = 1_000;

/**
 * Deletes in batches, because one statement for all rows could reach its time limit. `deleteBatch` deletes at most `limit` rows and returns their
 * number. If `stop` aborts, the purge ends after the current batch. Returns the number of deleted rows.
 */
export const purge = async (deleteBatch: (limit: number) => Promise<number>, stop?: AbortSignal): Promise<number> => {
  for (let deleted = 0; ;) {
    const count = await deleteBatch(PURGE_BATCH);
    deleted += count;
    if (count < PURGE_BATCH || stop?.aborted) return deleted;
  }
};
