import { describe, expect, test } from '@jest/globals';
import { newEvent } from '../../test/support/event-store.contract.js';
import { defineEvents, UnreadableEvent } from './events.js';
import type { Position, Recorded } from './event-store.js';

type ExampleEvent =
  | { readonly type: 'ExampleHappened'; readonly at: string; readonly data: { readonly amountCents: number; readonly notes: readonly string[] } }
  | { readonly type: 'ExampleEnded'; readonly at: string; readonly data: { readonly reason: string } };

interface HappenedV1 {
  readonly amount: string;
  readonly note: string | null;
}
interface HappenedV2 {
  readonly amountCents: number;
  readonly note: string | null;
}
const fromV1 = ({ amount, note }: HappenedV1): HappenedV2 => ({ amountCents: Math.round(Number(amount) * 100), note });
const fromV2 = ({ amountCents, note }: HappenedV2) => ({ amountCents, notes: note === null ? [] : [note] });

const events = defineEvents<ExampleEvent>({ ExampleHappened: [fromV1, fromV2], ExampleEnded: [] });

const stored = (type: string, v: number, data: Recorded['data'] = { amount: '1.00', note: 'x' }): Recorded => ({
  ...newEvent(data, type),
  v,
  stream: 'payment-1',
  revision: 4n,
  position: '1' as Position,
  storedAt: new Date(0),
});

describe('the compiler', () => {
  test('refuses a type without a declaration, a declaration without a type, and a chain that ends before the data of today', () => {
    // @ts-expect-error ExampleEnded is missing.
    defineEvents<ExampleEvent>({ ExampleHappened: [fromV1, fromV2] });
    // @ts-expect-error ExampleForgotten is no event of this union.
    defineEvents<ExampleEvent>({ ExampleHappened: [fromV1, fromV2], ExampleEnded: [], ExampleForgotten: [] });
    // @ts-expect-error The step from version 2 is missing: version 2 has no notes.
    defineEvents<ExampleEvent>({ ExampleHappened: [fromV1], ExampleEnded: [] });
    expect(events.names).toEqual(['ExampleHappened', 'ExampleEnded']);
  });
});

test('each type has a version of its own, which is written', () => {
  expect(events.version('ExampleHappened')).toBe(3);
  const { id, meta } = newEvent();
  const event: ExampleEvent = { type: 'ExampleEnded', at: meta.recordedAt, data: { reason: 'over' } };
  expect(events.write(event, id, meta)).toEqual({ id, type: 'ExampleEnded', v: 1, data: { reason: 'over' }, meta });
});

test.each([
  [1, { amount: '12.34', note: null }, { amountCents: 1234, notes: [] }],
  [2, { amountCents: 1234, note: 'late' }, { amountCents: 1234, notes: ['late'] }],
  [3, { amountCents: 1234, notes: ['a', 'b'] }, { amountCents: 1234, notes: ['a', 'b'] }],
])('version %i is read as the newest one', (v, data, read) => {
  const event = stored('ExampleHappened', v, data);
  expect(events.read(event)).toEqual({ type: 'ExampleHappened', at: event.meta.recordedAt, data: read });
});

test('an event of a newer program stops the reader with a clear error', () => {
  expect(() => events.read(stored('ExampleHappened', 4))).toThrow(UnreadableEvent);
  expect(() => events.read(stored('ExampleEnded', 2))).toThrow('payment-1@4: ExampleEnded has version 2, this program knows versions up to 1');
});

test('the version that the next release will write is read, and not written', () => {
  const ahead = defineEvents<ExampleEvent>(
    { ExampleHappened: [fromV1, fromV2], ExampleEnded: [] },
    { ExampleEnded: ({ reason, by }: { reason: string; by: string }) => ({ reason: `${reason} (${by})` }) },
  );
  const next = stored('ExampleEnded', 2, { reason: 'over', by: 'a person' });
  expect(ahead.read(next)).toEqual({ type: 'ExampleEnded', at: next.meta.recordedAt, data: { reason: 'over (a person)' } });
  expect([ahead.version('ExampleEnded'), ahead.version('ExampleHappened')]).toEqual([1, 3]);
  expect(() => ahead.read(stored('ExampleEnded', 3))).toThrow('ExampleEnded has version 3, this program knows versions up to 2');
  expect(() => ahead.read(stored('ExampleHappened', 4))).toThrow(UnreadableEvent);
  // @ts-expect-error The present version of ExampleEnded has a `reason`, and this function returns none.
  defineEvents<ExampleEvent>({ ExampleHappened: [fromV1, fromV2], ExampleEnded: [] }, { ExampleEnded: () => ({ by: 'a person' }) });
});

test('an event of an unknown type stops the reader with a clear error', () => {
  expect(() => events.read(stored('SomethingElse', 1))).toThrow('payment-1@4: SomethingElse is no event that this program knows');
  expect(() => events.read(stored('toString', 1))).toThrow(UnreadableEvent);
});

test('stored data stays as it is', () => {
  const event = stored('ExampleHappened', 1);
  const { data } = event;
  expect(events.read(event)).toEqual({ type: 'ExampleHappened', at: event.meta.recordedAt, data: { amountCents: 100, notes: ['x'] } });
  expect(event).toMatchObject({ v: 1, data });
});
