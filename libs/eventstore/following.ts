/** A subscription over a log that is read in pages: the loop that the Postgres and the memory adapter share. */
import type { Position, Recorded, Subscription, SubscriptionItem } from './event-store.js';

/** One look at the log after a position. */
export interface Page {
  readonly events: readonly Recorded[];
  /** Everything up to here was looked at, whether it passed the filter or not; null while the log is empty. */
  readonly through: Position | null;
  readonly atEnd: boolean;
}

export interface PagedLog {
  /** Reads the next page; waits out outages by itself. Throws only what trying again cannot mend. */
  page(after: Position | null, signal: AbortSignal): Promise<Page>;
  /** Number of times that the log was said to have grown; taken before a page, so that no wake-up is lost between page and wait. */
  growth(): number;
  /** Resolves when the log has grown since `growth`, may have, or `signal` aborts. */
  grown(growth: number, signal: AbortSignal): Promise<void>;
}

/** Pulled by the reader, so nothing queues up: a slow reader reads larger pages, later. */
export const followPages = (log: PagedLog, after: Position | null): Subscription => {
  const stop = new AbortController();
  const items = follow(log, after, stop.signal);
  return {
    [Symbol.asyncIterator]: () => items,
    close: async () => {
      stop.abort();
      await items.return();
    },
  };
};

async function* follow(log: PagedLog, after: Position | null, signal: AbortSignal): AsyncGenerator<SubscriptionItem, void, void> {
  let position = after;
  let announced = false;
  while (!signal.aborted) {
    const growth = log.growth();
    const { events, through, atEnd } = await log.page(position, signal);
    if (signal.aborted) return;
    if (events.length > 0) {
      announced = false;
      yield { kind: 'events', events };
    }
    const last = events.at(-1)?.position ?? position;
    if (through !== null && (last === null || through > last)) {
      announced = false;
      yield { kind: 'checkpoint', position: through };
    }
    position = through ?? position;
    if (!atEnd) continue;
    if (!announced) yield { kind: 'caught_up' };
    announced = true;
    await log.grown(growth, signal);
  }
}
