import { expect, test } from '@jest/globals';
import { memoryEventStore } from './memory.js';
import { collect, eventStoreContract, newEvent, newStream } from '../../test/support/event-store.contract.js';

eventStoreContract('memory', async () => {
  const store = memoryEventStore({ now: () => Date.now() });
  return { store, another: store, fresh: true, close: () => store.close() };
});

test('a reader cannot change its events', async () => {
  const store = memoryEventStore();
  const stream = newStream();
  await store.append(stream, 'no_stream', [newEvent({ nested: { cents: 1 } })]);
  const [event] = await collect(store.read(stream));
  expect(() => ((event!.data as { nested: { cents: number } }).nested.cents = 2)).toThrow(TypeError);
});
