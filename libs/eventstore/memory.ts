/**
 * The event store in memory, for unit tests and the deterministic simulation. It follows the rules of the other stores, without timers and
 * randomness. Its events are frozen, so a reader that changes one fails in the tests.
 */
import { BeyondTheEnd, deserialise, matchesPrefix, numericPosition, positionNumber, serialise } from './codec.js';
import { followPages, type Page } from './following.js';
import { Conflict, Unavailable, type EventStore, type Position, type Recorded } from './event-store.js';

const BATCH_EVENTS = 500;

/** An empty store. `now` gives `storedAt`, in milliseconds. Default: always 0, so that a repeated run gives the same events. */
export const memoryEventStore = (options: { now?: () => number } = {}): EventStore => {
  const now = options.now ?? (() => 0);
  const streams = new Map<string, Recorded[]>();
  const log: Recorded[] = [];
  let wake: (() => void)[] = [];
  let closed = false;

  const head = () => log.at(-1)?.position ?? null;
  const open = () => {
    if (closed) throw new Unavailable('the event store is closed');
  };
  const page = (after: Position | null, max: number, until: Position | undefined, prefixes: readonly string[] | undefined): Page => {
    open();
    const from = Number(positionNumber(after));
    if (after !== null && from > log.length) throw new BeyondTheEnd(after, head());
    const to = Math.min(from + max, log.length, until === undefined ? log.length : Number(positionNumber(until)));
    const events = log.slice(from, to).filter(({ stream }) => matchesPrefix(stream, prefixes));
    return { events, through: to > from ? numericPosition(to) : after, atEnd: to >= log.length };
  };

  return {
    append: async (stream, expected, events) => {
      const serialised = serialise(stream, expected, events);
      open();
      const present = streams.get(stream) ?? [];
      const last = present.length - 1;
      const wanted = expected === 'any' ? last : expected === 'no_stream' ? -1 : Number(expected);
      if (wanted !== last) {
        // If the same ids follow the expected revision, this append is a repeat and succeeds.
        const original = present.slice(wanted + 1, wanted + 1 + serialised.length);
        if (wanted > last || original.length < serialised.length || serialised.some(({ id }, index) => original[index]!.id !== id))
          throw new Conflict(stream, expected, last < 0 ? null : BigInt(last));
        return { revision: original.at(-1)!.revision, position: original.at(-1)!.position };
      }
      for (const { id, type, data, meta } of serialised) {
        const position = numericPosition(log.length + 1);
        const event = frozen(deserialise({ id, type, data, meta, stream, revision: BigInt(present.length), position, storedAtMs: now() }));
        present.push(event);
        log.push(event);
      }
      streams.set(stream, present);
      const waiting = wake;
      wake = [];
      waiting.forEach((resume) => resume());
      return { revision: BigInt(present.length - 1), position: head()! };
    },
    read: async function* (stream, from = 0n, max = Number.POSITIVE_INFINITY) {
      open();
      yield* (streams.get(stream) ?? []).slice(Number(from), Number(from) + max);
    },
    readAll: async function* (after, { max = Number.POSITIVE_INFINITY, until, streamPrefixes } = {}) {
      let position = after;
      for (let left = max; left > 0;) {
        const { events, through, atEnd } = page(position, BATCH_EVENTS, until, streamPrefixes);
        if (events.length > 0) yield events.slice(0, left);
        left -= events.length;
        if (atEnd || through === position) return;
        position = through;
      }
    },
    subscribe: (after, { streamPrefixes } = {}) =>
      followPages(
        {
          page: async (position) => page(position, BATCH_EVENTS, undefined, streamPrefixes),
          growth: () => log.length,
          grown: (growth, signal) =>
            new Promise((done) => {
              const resume = () => {
                signal.removeEventListener('abort', resume);
                done();
              };
              if (log.length > growth || signal.aborted) return done();
              signal.addEventListener('abort', resume, { once: true });
              wake.push(resume);
            }),
        },
        after,
      ),
    head: async () => {
      open();
      return head();
    },
    missing: async (marks) => {
      open();
      return marks.filter(({ position, id }) => log[Number(positionNumber(position)) - 1]?.id !== id);
    },
    eventAt: async (position) => {
      open();
      return log[Number(positionNumber(position)) - 1] ?? null;
    },
    close: async () => {
      closed = true;
      wake.forEach((resume) => resume());
    },
  };
};

const frozen = <T>(value: T): T => {
  if (typeof value === 'object' && value !== null && !Object.isFrozen(value)) {
    Object.freeze(value);
    Object.values(value).forEach(frozen);
  }
  return value;
};
