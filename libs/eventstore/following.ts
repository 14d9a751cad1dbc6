/**
 * A subscription over a log that is read in pages: the loop that the Postgres and the memory adapter share. Also the end of the log, read once for
 * all readers.
 */
import type { Clock } from '#kernel';
import { matchesPrefix } from './codec.js';
import type { Position, Recorded, Subscription, SubscriptionItem } from './event-store.js';

/** One look at the log after a position. */
export interface Page {
  readonly events: readonly Recorded[];
  /** The position up to which the log was read, whether events passed the filter or not. null: the log is empty. */
  readonly through: Position | null;
  readonly atEnd: boolean;
  /** Length of the events as text, if it is known. */
  readonly characters?: number;
}

export interface PagedLog {
  /** Reads the next page. During an outage it waits. Throws only errors that a repeat cannot mend. */
  page(after: Position | null, signal: AbortSignal): Promise<Page>;
  /** How often the log was reported to have grown. A reader takes this count before it reads a page, so it misses no growth between page and wait. */
  growth(): number;
  /** Resolves when the log has grown, or may have grown, since `growth`, or when `signal` aborts. */
  grown(growth: number, signal: AbortSignal): Promise<void>;
}

/** The reader asks for each page, so nothing queues up. A slow reader reads larger pages, later. */
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

/** The smallest number of events that is held. At most twice as many are held. */
const TAIL_EVENTS = 1_000;
/** Bytes of events as text. Ordinary events stay far below. If bodies are as large as allowed, only the last page is held. */
const TAIL_CHARACTERS = 16_000_000;
/** The end of the log is read at most this often. Under load one query then returns the events of many appends. */
const TAIL_PACE_MS = 20;

/**
 * The end of the log, read once for all readers: nine readers cost one query for each wake-up instead of nine.
 *
 * It is only a cache. A reader that stands before its content, or meets a fault of the log, reads a page of its own. `read` returns all events behind
 * a position, without a filter.
 */
export class Tail {
  /** All events between `from` and `through`. Both null until a reader has come to the end of the log. */
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

  /** A reader stands at the end of the log. */
  beginAt(end: Position): void {
    if (this.through === null) this.from = this.through = end;
  }

  /** As {@link PagedLog.page}, of at most `max` events before the filter. null: the caller must read for itself. */
  async page(after: Position, max: number, prefixes: readonly string[] | undefined): Promise<Page | null> {
    const looks = this.through !== null && after >= this.through;
    if (looks) await this.lookAgain();
    const { from, through } = this;
    if (from === null || through === null || after < from) return null;
    if (after > through) {
      // There was no reader for so long that one page does not reach the cache. The cache begins again where a reader reaches the end of the log.
      this.forget();
      return null;
    }
    // From the end, where readers stand.
    const first = this.events.findLastIndex(({ position }) => position <= after) + 1;
    const looked = this.events.slice(first, first + max);
    const all = first + looked.length === this.events.length;
    const events = looked.filter(({ stream }) => matchesPrefix(stream, prefixes));
    // Only a fresh read may report the end: a cached end could hide an append that was already signalled.
    return { events, through: all ? through : looked.at(-1)!.position, atEnd: all && looks && this.atEnd };
  }

  /** Resolves after a read that began after the call. Readers of the same wake-up share it. Events that drop out of the cache are still in the log. */
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
      // Starts one event before the end. If another event stands there now, the database was restored, or a standby without the last events took
      // over.
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
