/** The form in which every adapter stores events: JSON text, size limits, the text form of positions. */
import { isUuid, type Json } from '#kernel';
import { MAX_APPEND_BYTES, MAX_EVENTS_PER_APPEND, type Expected, type Meta, type NewEvent, type Position, type Recorded } from './event-store.js';

/** One event as text. `v` is stored inside the metadata, because neither store has a column for it. */
export interface Serialised {
  readonly id: string;
  readonly type: string;
  readonly data: string;
  readonly meta: string;
  readonly dataBytes: number;
  readonly metaBytes: number;
}

export const sizeOf = (events: readonly Serialised[]): number => {
  let bytes = 0;
  for (const { dataBytes, metaBytes } of events) bytes += dataBytes + metaBytes;
  return bytes;
};

/** One event as the store returns it. */
export interface Stored {
  readonly stream: string;
  readonly revision: bigint;
  readonly position: Position;
  readonly id: string;
  readonly type: string;
  readonly data: string;
  readonly meta: string;
  readonly storedAtMs: number;
}

/**
 * Turns events into text, and checks every rule that needs no store. Throws a plain `Error` for a broken rule: the fault is in the calling code, and
 * a repeat would not help. A BigInt in the data throws here too; in the KurrentDB client, the append would never end.
 */
export const serialise = (stream: string, expected: Expected, events: readonly NewEvent[]): Serialised[] => {
  if (!isName(stream)) throw new Error(`not a stream name: ${JSON.stringify(stream)}`);
  if (typeof expected === 'bigint' && expected < 0n) throw new Error(`${stream}: not a revision: ${expected}`);
  if (events.length === 0) throw new Error(`${stream}: nothing to append`);
  if (events.length > MAX_EVENTS_PER_APPEND)
    throw new Error(`${stream}: ${events.length} events in one append; at most ${MAX_EVENTS_PER_APPEND} are allowed`);
  const serialised = events.map((event) => serialiseOne(stream, event));
  const bytes = sizeOf(serialised);
  if (bytes > MAX_APPEND_BYTES) throw new Error(`${stream}: ${bytes} bytes in one append; at most ${MAX_APPEND_BYTES} are allowed`);
  if (serialised.length > 1 && new Set(serialised.map((event) => event.id)).size < serialised.length)
    throw new Error(`${stream}: one event id twice in one append`);
  return serialised;
};

/** True if the text can be a name. The stores cannot keep a NUL or half a surrogate pair unchanged. Names that begin with `$` belong to KurrentDB. */
const isName = (text: string & { isWellFormed?: () => boolean }): boolean => text !== '' && !/^\$|\0/.test(text) && text.isWellFormed!();

const serialiseOne = (stream: string, { id, type, v, data, meta }: NewEvent): Serialised => {
  if (!isUuid(id)) throw new Error(`${stream}: not an event id: ${JSON.stringify(id)}`);
  if (!isName(type)) throw new Error(`${stream}: not an event type: ${JSON.stringify(type)}`);
  if (!Number.isSafeInteger(v) || v < 1) throw new Error(`${stream}: ${type} has no schema version`);
  const dataText = JSON.stringify(data) as string | undefined;
  if (dataText === undefined) throw new Error(`${stream}: ${type} has no data`);
  const metaText = JSON.stringify({ v, ...meta });
  return {
    id: id.toLowerCase(),
    type,
    data: dataText,
    meta: metaText,
    dataBytes: Buffer.byteLength(dataText),
    metaBytes: Buffer.byteLength(metaText),
  };
};

export const deserialise = ({ stream, revision, position, id, type, data, meta, storedAtMs }: Stored): Recorded => {
  const { v, ...rest } = JSON.parse(meta) as Meta & { v: number };
  return { id, type, v, data: JSON.parse(data) as Json, meta: rest, stream, revision, position, storedAt: new Date(storedAtMs) };
};

const DIGITS = 20;

/** The position for a number. With 20 digits, positions sort as text in the order of their numbers. */
export const numericPosition = (value: bigint | number | string): Position => String(value).padStart(DIGITS, '0') as Position;

/**
 * The number of a position that {@link numericPosition} made. null, the start of the log, gives 0. Throws for a position of another kind of store.
 */
export const positionNumber = (position: Position | null): bigint => {
  if (position === null) return 0n;
  if (!/^\d{20}$/.test(position))
    throw new Error(`"${position}" is not a position of this event store; was the kind of store changed under a checkpoint?`);
  return BigInt(position);
};

/** An event is missing in the log. */
export class LogGap extends Error {
  constructor(readonly missing: Position) {
    super(`the log has a gap: position ${missing} is missing`);
    this.name = 'LogGap';
  }
}

/** A position does not belong to this log: the store was wiped, restored or replaced. A repeat would not help. */
export abstract class NotInTheLog extends Error {
  constructor(
    readonly after: Position,
    message: string,
  ) {
    super(`${message}: this is not the event store that the checkpoint was taken from`);
    this.name = new.target.name;
  }
}

/** The position lies after the end of the log. */
export class BeyondTheEnd extends NotInTheLog {
  constructor(after: Position, head: Position | null) {
    super(after, `position ${after} lies beyond the end of the log (${head ?? 'empty'})`);
  }
}

/** No event begins at the position, or the event there has another id than `id`. */
export class NoEventThere extends NotInTheLog {
  constructor(after: Position, id?: string) {
    super(after, id === undefined ? `no event begins at position ${after}` : `another event than ${id} lies at position ${after}`);
  }
}

/** True if the filter includes the stream. Without a filter every stream is included. */
export const matchesPrefix = (stream: string, prefixes: readonly string[] | undefined): boolean =>
  prefixes === undefined || prefixes.some((prefix) => stream.startsWith(prefix));
