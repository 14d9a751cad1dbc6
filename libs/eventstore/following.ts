/**
 * A subscription over a log that is read in pages. The Postgres and the memory adapter share it. {@link Tail} reads the end of the log once for all
 * readers.
 */
import type { Clock } from '#kernel';
import { matchesPrefix } from './codec.js';
import type { Position, Recorded, Subscription, SubscriptionItem } from './event-store.js';

/** The answer to one read of the log after a position. */
export interface Page {
  readonly events: readonly Recorded[];
  /** The position up to which the log was read. Events before it may be missing in `events`, because of the filter. null: the log is empty. */
  readonly through: Position | null;
  readonly atEnd: boolean;
  /** Length of the events as text, if it is known. */
  readonly characters?: number;
}

export interface PagedLog {
  /** Reads the next page. During an outage, repeats the read until `signal` aborts. Throws any other error at once. */
  page(after: Position | null, signal: AbortSignal): Promise<Page>;
  /**
   * A count that rises when the log grows. A reader takes the count before it reads a page, and passes the count to `grown`. So the reader misses no
   * growth during the read.
   */
  growth(): number;
  /** Resolves when the count differs from `growth`, or when `signal` aborts. */
  grown(growth: number, signal: AbortSignal): Promise<void>;
}

/** Reads a page only when the reader asks for one, so no events queue up in memory. */
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

/** When the cache holds more than twice this number of events, it keeps only this number of the newest ones. */
const TAIL_EVENTS = 1_000;
/**
 * Maximum number of characters of event text in the cache. Beyond this limit, only the events of the last page stay. Only events of nearly the
 * maximum size reach the limit.
 */
const TAIL_CHARACTERS = 16_000_000;
/** Minimum time between two reads of the end of the log. Under load one read then returns the events of many appends. */
const TAIL_PACE_MS = 20;

/**
 * A cache of the end of the log, for all readers of a process. A wake-up costs one query for all readers together.
 *
 * A reader whose position lies before the cached events reads its page itself. After an error the cache is empty.
 */
export class Tail {
  /** All events after `from`, up to and including `through`. Both positions are null until a reader has reached the end of the log. */
  private events: Recorded[] = [];
  private from: Position | null = null;
  private through: Position | null = null;
  private atEnd = false;
  private characters = 0;
  private reading: Promise<void> = Promise.resolve();
  private next: Promise<void> | null = null;
  private lookedAt = Number.NEGATIVE_INFINITY;

  constructor(
    private readonly clock: Clock,
    private readonly read: (after: Position) => Promise<Page>,
  ) {}

  /** Begins the cache at `end`, the end of the log. Has no effect if the cache has begun already. */
  beginAt(end: Position): void {
    if (this.through === null) this.from = this.through = end;
  }

  /** A page from the cache: the events among the next `max` that pass the filter. null: the caller must read the page itself. */
  async page(after: Position, max: number, prefixes: readonly string[] | undefined): Promise<Page | null> {
    const looks = this.through !== null && after >= this.through;
    if (looks) await this.lookAgain();
    const { from, through } = this;
    if (from === null || through === null || after < from) return null;
    if (after > through) {
      // Even with one more page, the cache does not reach the position of this reader. The cache begins again when a reader reaches the end of the
      // log.
      this.forget();
      return null;
    }
    // The search goes backwards, because most readers are near the end.
    const first = this.events.findLastIndex(({ position }) => position <= after) + 1;
    const looked = this.events.slice(first, first + max);
    const all = first + looked.length === this.events.length;
    const events = looked.filter(({ stream }) => matchesPrefix(stream, prefixes));
    // Only a fresh read may report `atEnd`: a cached end could hide an append that was already signalled.
    return { events, through: all ? through : looked.at(-1)!.position, atEnd: all && looks && this.atEnd };
  }

  /** Reads the end of the log. Resolves after a read that began after the call. Readers of the same wake-up share that read. */
  lookAgain(): Promise<void> {
    this.next ??= Promise.all([this.reading, this.turn()]).then(() => {
      this.next = null;
      this.lookedAt = this.clock.monotonic();
      return (this.reading = this.append());
    });
    return this.next;
  }

  private turn(): Promise<unknown> {
    const wait = this.lookedAt + TAIL_PACE_MS - this.clock.monotonic();
    return wait > 0 ? this.clock.sleep(wait) : new Promise((turned) => setImmediate(turned));
  }

  private forget(): void {
    this.events = [];
    this.from = this.through = null;
    this.characters = 0;
  }

  private async append(): Promise<void> {
    const { through } = this;
    if (through === null) return;
    try {
      // Reads the last cached event again, with the events after it. If another event has its place now, the database was restored or failed over.
      const last = this.events.at(-1);
      const page = await this.read(last ? (this.events.at(-2)?.position ?? this.from!) : through);
      if (this.through !== through) return;
      if (last && page.events[0]?.id !== last.id) throw new Error('the log was replaced');
      this.events.push(...page.events.slice(last ? 1 : 0));
      this.characters += page.characters ?? 0;
      this.through = page.through ?? through;
      this.atEnd = page.atEnd;
      if (this.characters > TAIL_CHARACTERS) this.keep(page.events.length);
      else if (this.events.length > 2 * TAIL_EVENTS) this.keep(TAIL_EVENTS);
    } catch {
      this.forget();
    }
  }

  private keep(count: number): void {
    const { length } = this.events;
    if (count >= length) return;
    this.from = this.events.splice(0, length - count).at(-1)!.position;
    this.characters *= count / length;
  }
}
