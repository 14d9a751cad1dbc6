/** An event store behind a name: another log can be put there while its users go on. */
import { type EventStore, memoryEventStore, type NewEvent } from '#eventstore';

export interface ExchangeableStore extends EventStore {
  exchange(by: EventStore): void;
}

export const exchangeableStore = (first: EventStore): ExchangeableStore => {
  let present = first;
  return {
    exchange: (by) => void (present = by),
    append: (...given) => present.append(...given),
    read: (...given) => present.read(...given),
    readAll: (...given) => present.readAll(...given),
    subscribe: (...given) => present.subscribe(...given),
    head: () => present.head(),
    missing: (marks) => present.missing(marks),
    eventAt: (position) => present.eventAt(position),
    close: () => present.close(),
  };
};

/** A log in memory with the first events of another one: an earlier copy of it. */
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
