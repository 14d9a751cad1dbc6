/** An event store whose log can be exchanged during use. */
import { type EventStore, memoryEventStore, type NewEvent, Unavailable } from '#eventstore';

export interface ExchangeableStore extends EventStore {
  /** Uses another log from now on. Open subscriptions end with an error, as when a server is lost. */
  exchange(by: EventStore): void;
}

export const exchangeableStore = (first: EventStore): ExchangeableStore => {
  let present = first;
  let following = new Set<ReturnType<EventStore['subscribe']>>();
  return {
    exchange: (by) => {
      const broken = following;
      present = by;
      following = new Set();
      for (const subscription of broken) void subscription.close();
    },
    append: (...given) => present.append(...given),
    read: (...given) => present.read(...given),
    readAll: (...given) => present.readAll(...given),
    subscribe: (...given) => {
      const inner = present.subscribe(...given);
      const followed = following;
      followed.add(inner);
      const items = (async function* () {
        yield* inner;
        if (followed !== following) throw new Unavailable('the event store was exchanged');
      })();
      return {
        [Symbol.asyncIterator]: () => items,
        close: () => {
          followed.delete(inner);
          return inner.close();
        },
      };
    },
    head: () => present.head(),
    missing: (marks) => present.missing(marks),
    eventAt: (position) => present.eventAt(position),
    close: () => present.close(),
  };
};

/** A log in memory with the first `events` events of another log. */
export const earlierCopy = async (store: EventStore, events: number): Promise<EventStore> => {
  const copy = memoryEventStore();
  let left = events;
  for await (const batch of store.readAll(null))
    for (const { id, type, v, data, meta, stream, revision } of batch) {
      if (left-- <= 0) return copy;
      await copy.append(stream, revision === 0n ? 'no_stream' : revision - 1n, [{ id, type, v, data, meta } satisfies NewEvent]);
    }
  return copy;
};
