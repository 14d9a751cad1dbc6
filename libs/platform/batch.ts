import type { Clock } from '#kernel';
import { isDataException, StatementTimeout } from './postgres/errors.js';

/**
 * Calls that arrive while `inFlight` statements run are sent together in the next statement. Under load many requests share a round trip and a
 * commit. A single call is sent at once. Each answer comes from a statement that was sent after the call.
 */
export interface BatchOptions {
  /** Maximum number of items in one statement. */
  readonly maxItems: number;
  /** Maximum number of statements in flight. */
  readonly inFlight: number;
  /** A call that waited longer than `ms` is refused and never sent. Default: no limit. */
  readonly patience?: { readonly ms: number; readonly clock: Pick<Clock, 'monotonic'> };
}

/**
 * Shares runs among callers: one run is in flight and one is queued. Later calls share the queued run, so each answer comes from a run that began
 * after the call. The queued run starts even if the run before it fails.
 */
export const shared = <Result>(run: () => Promise<Result>): (() => Promise<Result>) => {
  let running: Promise<Result> | null = null;
  let queued: Promise<Result> | null = null;
  const call = (): Promise<Result> => {
    if (!running) return (running = run().finally(() => (running = null)));
    return (queued ??= running
      .catch(() => undefined)
      .then(() => {
        queued = null;
        return call();
      }));
  };
  return call;
};

/**
 * `run` returns one answer for each item, in order. If it throws, every caller of that batch gets the error. After a data exception of the database,
 * each item is sent alone, so that only the faulty one fails.
 */
export const batched = <Item, Result>(
  run: (items: readonly Item[]) => Promise<readonly Result[]>,
  { maxItems, inFlight, patience }: BatchOptions,
): ((item: Item) => Promise<Result>) => {
  interface Call {
    readonly item: Item;
    /** The end of this call's `patience`, on the monotonic clock. */
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
      while (queue.length > 0 && queue[0]!.until < now) queue.shift()!.reject(new StatementTimeout('timeout while waiting for a turn'));
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
      // All calls of this turn of the event loop are sent together.
      if (queue.length === 1) setImmediate(pump);
    });
};

/** Group requests when 5 are in flight, and for 100 ms after that. */
const CROWD = 5;
const CROWD_LASTS_MS = 100;
/** How long a group waits for further requests after its first one. */
const GATHER_MS = 10;

/**
 * Groups requests under load. The requests of a group take every step at the same time, so they share statements, commits and wake-ups (decision
 * 0025). With few requests in flight, no request waits.
 */
export class Convoy {
  private inside = 0;
  private crowdSeen = Number.NEGATIVE_INFINITY;
  private gathering: Promise<void> | null = null;

  constructor(private readonly clock: Pick<Clock, 'monotonic' | 'sleep'>) {}

  /** Resolves with the release function once admitted. */
  async enter(): Promise<() => void> {
    const now = this.clock.monotonic();
    if (this.inside >= CROWD) this.crowdSeen = now;
    if (now - this.crowdSeen < CROWD_LASTS_MS) await (this.gathering ??= this.gather());
    this.inside += 1;
    return () => {
      this.inside -= 1;
    };
  }

  private async gather(): Promise<void> {
    await this.clock.sleep(GATHER_MS);
    this.gathering = null;
  }
}
