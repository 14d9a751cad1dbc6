/**
 * Calls that arrive while a statement is on its way go together in the next one: under load a round trip, and a commit, are shared by many requests.
 * No timer: a lone call goes out at once. Nothing is remembered: an answer is always younger than its question.
 */
export interface BatchOptions {
  /** Most items of one statement. */
  readonly maxItems: number;
  /** Statements on their way at once. */
  readonly inFlight: number;
}

/** `run` answers each item, in order; when it throws, every caller of that batch hears of it. */
export const batched = <Item, Result>(
  run: (items: readonly Item[]) => Promise<readonly Result[]>,
  { maxItems, inFlight }: BatchOptions,
): ((item: Item) => Promise<Result>) => {
  const queue: { item: Item; resolve: (result: Result) => void; reject: (error: unknown) => void }[] = [];
  let running = 0;
  const pump = (): void => {
    while (running < inFlight && queue.length > 0) {
      const batch = queue.splice(0, maxItems);
      running += 1;
      run(batch.map(({ item }) => item))
        .then((results) => {
          if (results.length !== batch.length) throw new Error(`${results.length} answers to ${batch.length} questions`);
          batch.forEach(({ resolve }, index) => resolve(results[index]!));
        })
        .catch((error: unknown) => batch.forEach(({ reject }) => reject(error)))
        .finally(() => {
          running -= 1;
          pump();
        });
    }
  };
  return (item) =>
    new Promise<Result>((resolve, reject) => {
      queue.push({ item, resolve, reject });
      // After this turn of the event loop: requests that were read together are asked together.
      if (queue.length === 1) setImmediate(pump);
    });
};
