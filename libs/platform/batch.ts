import type { Clock } from '#kernel';
import { isDataException } from './postgres/pool.js';

/**
 * Calls that arrive while a statement is on its way go together in the next one: under load a round trip, and a commit, are shared by many requests.
 * No timer: a lone call goes out at once. Nothing is remembered: an answer is always younger than its question.
 */
export interface BatchOptions {
  /** Most items of one statement. */
  readonly maxItems: number;
  /** Statements on their way at once. */
  readonly inFlight: number;
  /** A call that stood in line for longer is refused and never sent: who waits for a slow database hears of it while there is time left. Default: it waits on. */
  readonly patience?: { readonly ms: number; readonly clock: Pick<Clock, 'monotonic'> };
}

/**
 * `run` answers each item, in order; when it throws, every caller of that batch hears of it. An item that the database cannot hold spoils nobody else's call: then
 * each is sent alone.
 */
export const batched = <Item, Result>(
  run: (items: readonly Item[]) => Promise<readonly Result[]>,
  { maxItems, inFlight, patience }: BatchOptions,
): ((item: Item) => Promise<Result>) => {
  interface Call {
    readonly item: Item;
    /** When its patience ends. */
    readonly until: number;
    readonly resolve: (result: Result) => void;
    readonly reject: (error: unknown) => void;
  }
  const queue: Call[] = [];
  let running = 0;
  const send = async (batch: readonly Call[]): Promise<void> => {
    try {
      const results = await run(batch.map(({ item }) => item));
      if (results.length !== batch.length) throw new Error(`${results.length} answers to ${batch.length} questions`);
      batch.forEach(({ resolve }, index) => resolve(results[index]!));
    } catch (error) {
      if (batch.length > 1 && isDataException(error)) for (const call of batch) await send([call]);
      else for (const { reject } of batch) reject(error);
    }
  };
  const pump = (): void => {
    if (patience) {
      const now = patience.clock.monotonic();
      while (queue.length > 0 && queue[0]!.until < now) queue.shift()!.reject(new Error('timeout while waiting for a turn'));
    }
    while (running < inFlight && queue.length > 0) {
      const batch = queue.splice(0, maxItems);
      running += 1;
      void send(batch).finally(() => {
        running -= 1;
        pump();
      });
    }
  };
  return (item) =>
    new Promise<Result>((resolve, reject) => {
      queue.push({ item, until: patience ? patience.clock.monotonic() + patience.ms : Number.POSITIVE_INFINITY, resolve, reject });
      // After this turn of the event loop: requests that were read together are asked together.
      if (queue.length === 1) setImmediate(pump);
    });
};
