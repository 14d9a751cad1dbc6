/** Rows that one statement of a purge deletes: well within the time limit of a statement. */
export const PURGE_BATCH = 5_000;

/**
 * Deletes in batches. One statement for all would reach its time limit once there are too many rows, and fail the same way at each later try. `deleteBatch` deletes
 * at most `limit` rows and returns how many. `stop` ends the work after the batch at hand.
 */
export const purge = async (deleteBatch: (limit: number) => Promise<number>, stop?: AbortSignal): Promise<number> => {
  for (let deleted = 0; ;) {
    const count = await deleteBatch(PURGE_BATCH);
    deleted += count;
    if (count < PURGE_BATCH || stop?.aborted) return deleted;
  }
};
