/**
 * The event store port: append at an expected revision, read a stream, read or follow the log of all streams.
 * Adapters: Postgres (default), KurrentDB/EventStoreDB, memory. One contract suite (`test/support/event-store.contract.ts`) runs against each.
 */
import type { Json } from '#kernel';
import { READ_ONLY } from '#platform';

/** The actor of an append. An event about the request of another actor names that actor in its data. */
export interface Actor {
  readonly type: 'partner' | 'payer' | 'staff' | 'operator' | 'recovery' | 'system';
  readonly id: string;
}

export interface Meta {
  /** When the event was recorded: RFC 3339, UTC, with milliseconds. APIs and reports show this time, never `storedAt`. */
  readonly recordedAt: string;
  /** When the event took effect, if that differs from `recordedAt`. Example: the time at which a processor closed a batch. */
  readonly effectiveAt?: string;
  readonly actor: Actor;
  readonly correlationId: string;
  readonly causationId?: string;
  /** The installation that appended the event. Only in logs on KurrentDB; absent in events of release 0.2 and earlier. */
  readonly installation?: string;
}

/** An event before it is stored. `v` is the schema version of `data`. Only the newest version is written. */
export interface NewEvent {
  readonly id: string;
  readonly type: string;
  readonly v: number;
  readonly data: Json;
  readonly meta: Meta;
}

/**
 * A place in the log, for example `00000000000000012345`. Positions are compared as text, and sort in the order of the log. On KurrentDB, the commit
 * and the prepare position are padded in the same way and joined by `:`.
 */
export type Position = string & { readonly __position: unique symbol };

/** An event that is known to have been in the log: its place and its id. */
export interface Mark {
  readonly position: Position;
  readonly id: string;
}

export interface Recorded extends NewEvent {
  readonly stream: string;
  /** 0 for the first event of the stream. */
  readonly revision: bigint;
  readonly position: Position;
  /** The time on the store's clock. Used for lag metrics only. */
  readonly storedAt: Date;
}

/**
 * The expected state of the stream: `no_stream`, an exact last revision, or `any` (no check). Never use `any` for money, because a repeat may be
 * appended twice.
 */
export type Expected = 'any' | 'no_stream' | bigint;

/**
 * An item of a subscription. `checkpoint`: the subscription has read the log up to `position`; every event up to there was delivered or did not pass
 * the filter.
 */
export type SubscriptionItem =
  | { readonly kind: 'events'; readonly events: readonly Recorded[] }
  | { readonly kind: 'caught_up' }
  | { readonly kind: 'checkpoint'; readonly position: Position };

export interface Subscription extends AsyncIterable<SubscriptionItem> {
  /** Ends the iteration. Resolves once the subscription holds no resource. */
  close(): Promise<void>;
}

export interface EventStore {
  /**
   * Appends all events or none. A repeated call with the same ids at the same exact revision succeeds with the original answer. Throws
   * {@link Conflict}, {@link OutcomeUnknown} or {@link Unavailable}.
   */
  append(
    stream: string,
    expected: Expected,
    events: readonly NewEvent[],
    options?: { timeoutMs?: number },
  ): Promise<{ revision: bigint; position: Position }>;
  /** Events of one stream in order, from revision `from` (default 0). An absent stream yields nothing. Throws {@link Unavailable}. */
  read(stream: string, from?: bigint, max?: number): AsyncIterable<Recorded>;
  /**
   * All events of several streams: one list for each stream, in the order of the request. A store may lack this method; the function
   * {@link readStreams} works with every store.
   */
  readStreams?(streams: readonly string[]): Promise<readonly (readonly Recorded[])[]>;
  /**
   * Yields the events of the log after a position (null: from the start), in batches and in log order, up to and including `until`. Events of
   * another installation are skipped, and `onForeign` is called with each of them.
   */
  readAll(
    after: Position | null,
    options?: { max?: number; until?: Position; streamPrefixes?: readonly string[]; onForeign?: (event: Recorded) => void },
  ): AsyncIterable<readonly Recorded[]>;
  /** Follows the log after a position, without end. Continues by itself after an outage. Delivers each event at least once. */
  subscribe(after: Position | null, options?: { streamPrefixes?: readonly string[] }): Subscription;
  /** Position of the last event. null: there is none. System streams do not count. */
  head(): Promise<Position | null>;
  /**
   * Returns the marks whose event is not at its position. Reads only the leader or the primary. Throws {@link Unavailable} if that server cannot be
   * read now.
   */
  missing(marks: readonly Mark[]): Promise<readonly Mark[]>;
  /** The event of Payfold at exactly this position. null: there is none. Reads the same server as {@link missing}. */
  eventAt(position: Position): Promise<Recorded | null>;
  /**
   * The first stream into which another program wrote. null: there is none. Reads the whole log. Absent for a store that belongs to Payfold alone.
   */
  foreignStream?(): Promise<string | null>;
  close(): Promise<void>;
}

/** Maximum number of streams that are read at the same time from a store without `readStreams`. */
const PARALLEL_READS = 16;

/**
 * Reads several streams of any store. Throws {@link Unavailable} and {@link UnreadableStream}. With `skipUnreadable`, an unreadable stream gives an
 * empty list.
 */
export const readStreams = async (
  store: EventStore,
  streams: readonly string[],
  { skipUnreadable = false }: { skipUnreadable?: boolean } = {},
): Promise<readonly (readonly Recorded[])[]> => {
  if (store.readStreams) return store.readStreams(streams);
  const found: Recorded[][] = streams.map(() => []);
  let next = 0;
  await Promise.all(
    Array.from({ length: PARALLEL_READS }, async () => {
      for (let index = next++; index < streams.length; index = next++)
        try {
          for await (const event of store.read(streams[index]!)) found[index]!.push(event);
        } catch (error) {
          if (!(skipUnreadable && error instanceof UnreadableStream)) throw error;
          found[index] = [];
        }
    }),
  );
  return found;
};

/** The stream is not at the expected revision. The caller must decide again. */
export class Conflict extends Error {
  constructor(
    readonly stream: string,
    readonly expected: Expected,
    /** Present revision. null: there is no such stream. undefined: the store did not report it. */
    readonly actual: bigint | null | undefined,
  ) {
    super(`${stream}: expected ${String(expected)}, found ${String(actual ?? 'no_stream')}`);
    this.name = 'Conflict';
  }
}

/** The append may or may not have happened. Repeat the same ids at the same revision, or reconcile. */
export class OutcomeUnknown extends Error {
  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = 'OutcomeUnknown';
  }
}

/** Nothing was appended or read; the store cannot be used now. */
export class Unavailable extends Error {
  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = 'Unavailable';
  }
}

/** The store takes no writes at present, for example during a failover. Nothing was appended. Reads may work. */
export class ReadOnly extends Unavailable {
  readonly code = READ_ONLY;

  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = 'ReadOnly';
  }
}

/** The log is not the installation's own, or it has lost events (C76). Nothing was appended. */
export class StoreIncident extends Error {
  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = 'StoreIncident';
  }
}

/** The stream was deleted, or another program or installation wrote an event into it. Nothing can be decided on it. */
export class UnreadableStream extends Error {
  constructor(
    readonly stream: string,
    reason: string,
  ) {
    super(`${stream}${reason}`);
    this.name = 'UnreadableStream';
  }
}

/** Upper bounds that every adapter keeps, checked before anything is sent. */
export const MAX_EVENTS_PER_APPEND = 100;
/** KurrentDB refuses more than 1 MiB summed over one append. */
export const MAX_APPEND_BYTES = 1_000_000;
