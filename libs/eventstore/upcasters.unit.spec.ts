import { expect, test } from '@jest/globals';
import { fileURLToPath } from 'node:url';
import { UnknownEventVersion, Upcasters, upcast, type Position, type Recorded } from '#eventstore';
import { goldenEvents, newEvent } from '../../test/support/event-store.contract.js';

/** An invented type: no event of Payfold has a second version yet. */
const registry = new Upcasters().register({
  ExampleHappened: [
    (data) => {
      const { amount, note } = data as { amount: string; note: string | null };
      return { amountCents: Math.round(Number(amount) * 100), note };
    },
    (data) => {
      const { amountCents, note } = data as { amountCents: number; note: string | null };
      return { amountCents, notes: note === null ? [] : [note] };
    },
  ],
  ExampleEnded: [],
});

goldenEvents(fileURLToPath(new URL('./golden/', import.meta.url)), registry);

const stored = (type: string, v: number): Recorded => ({
  ...newEvent({ amount: '1.00', note: 'x' }, type),
  v,
  stream: 'payment-1',
  revision: 4n,
  position: '1' as Position,
  storedAt: new Date(0),
});

test('an event of a newer program stops the reader, and says so', () => {
  expect(() => registry.upcast(stored('ExampleHappened', 4))).toThrow(UnknownEventVersion);
  expect(() => registry.upcast(stored('ExampleEnded', 2))).toThrow('payment-1@4: ExampleEnded has version 2, this program knows versions up to 1');
});

test('types that nobody registered pass as they are, the newest version untouched', () => {
  const [unknown, newest] = [stored('SomethingElse', 9), stored('ExampleEnded', 1)];
  expect(registry.upcast(unknown)).toBe(unknown);
  expect(registry.upcast(newest)).toBe(newest);
  expect(upcast(unknown)).toBe(unknown);
});

test('what is stored is left as it is', () => {
  const event = stored('ExampleHappened', 1);
  const { data } = event;
  expect(registry.upcast(event)).toMatchObject({ v: 3, data: { amountCents: 100, notes: ['x'] } });
  expect(event).toMatchObject({ v: 1, data });
});

test('a type has one owner', () => {
  expect(() => new Upcasters().register({ A: [] }).register({ A: [] })).toThrow('event type A is registered twice');
});
