/**
 * The contract of every event store adapter, run against memory, Postgres and KurrentDB. So the simulation's store behaves like the real ones. Each
 * test uses its own streams and reads only the log after its own start. The store may therefore hold earlier events.
 */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { randomUUID } from 'node:crypto';
import type { Json } from '#kernel';
import {
  Conflict,
  MAX_APPEND_BYTES,
  MAX_EVENTS_PER_APPEND,
  type EventStore,
  type Expected,
  type Mark,
  type NewEvent,
  NotInTheLog,
  type Position,
  type Recorded,
  type SubscriptionItem,
} from '#eventstore';
import { eventually } from './eventually.js';

export const newEvent = (data: Json = { cents: 1 }, type = 'PaymentInitiated', id: string = randomUUID()): NewEvent => ({
  id,
  type,
  v: 1,
  data,
  meta: { recordedAt: '2026-01-02T03:04:05.678Z', actor: { type: 'system', id: 'contract' }, correlationId: 'c-1' },
});

export const newEvents = (count: number): NewEvent[] => Array.from({ length: count }, (_, index) => newEvent({ index }));
export const newStream = (prefix = 'payment-'): string => `${prefix}${randomUUID()}`;

export const collect = async <T>(items: AsyncIterable<T>): Promise<T[]> => {
  const all: T[] = [];
  for await (const item of items) all.push(item);
  return all;
};

export const logAfter = async (store: EventStore, after: Position | null, options?: Parameters<EventStore['readAll']>[1]): Promise<Recorded[]> =>
  (await collect(store.readAll(after, options))).flat();

/** Reads a subscription in the background. New items are added to `items`. */
export const following = (store: EventStore, after: Position | null, options?: { streamPrefixes?: readonly string[] }) => {
  const subscription = store.subscribe(after, options);
  const items: SubscriptionItem[] = [];
  let failure: Error | undefined;
  const done = (async () => {
    for await (const item of subscription) items.push(item);
  })().catch((error: unknown) => (failure = error as Error));
  return {
    items,
    events: () => {
      if (failure) throw failure;
      return items.flatMap((item) => (item.kind === 'events' ? item.events : []));
    },
    failure: () => failure,
    close: async () => {
      await subscription.close();
      await done;
    },
  };
};

const idsOf = (events: readonly { id: string }[]) => events.map(({ id }) => id);
/** A position far after the given one. */
const beyond = (position: Position) => position.replace(/(^|:)\d{3}/g, '$1008') as Position;
const markOf = ({ position, id }: Recorded): Mark => ({ position, id });
const outcome = (work: Promise<unknown>): Promise<unknown> => work.catch((error: unknown) => error);

export interface ContractSubject {
  readonly store: EventStore;
  /** A second client of the same log, or this store if only one client is possible. */
  readonly another: EventStore;
  /** True if no event was ever written to the store. */
  readonly fresh: boolean;
  /** Returns a position after `position` at which no event begins. Absent: every position of this store up to the head holds an event. */
  readonly between?: (position: Position) => Position;
  readonly close: () => Promise<void>;
}

export const eventStoreContract = (name: string, open: () => Promise<ContractSubject>): void => {
  describe(`event store contract: ${name}`, () => {
    let subject: ContractSubject;
    let store: EventStore;
    beforeAll(async () => {
      subject = await open();
      store = subject.store;
    });
    afterAll(() => subject?.close());

    test('an empty log has no head, and nothing to read', async () => {
      if (!subject.fresh) return;
      expect(await store.head()).toBeNull();
      expect(await logAfter(store, null)).toEqual([]);
    });

    test('an absent stream reads as nothing', async () => {
      expect(await collect(store.read(newStream()))).toEqual([]);
    });

    test('appended events are read back whole', async () => {
      const stream = newStream();
      const events = [
        newEvent({ a: [1, 2.5, null, true, 'x'], nested: { deep: { er: '' } } }),
        { ...newEvent({ cents: 5 }, 'PaymentCreated'), v: 3 },
      ];
      const answer = await store.append(stream, 'no_stream', events);
      const read = await collect(store.read(stream));
      expect(read).toMatchObject(events.map((event, revision) => ({ ...event, stream, revision: BigInt(revision) })));
      expect(read[0]!.meta).toEqual(events[0]!.meta);
      expect(read[0]!.storedAt).toBeInstanceOf(Date);
      expect(answer).toEqual({ revision: 1n, position: read[1]!.position });
      expect(read[0]!.position < read[1]!.position).toBe(true);
      expect(await collect(store.read(stream, 1n))).toEqual([read[1]]);
      expect(await collect(store.read(stream, 0n, 1))).toEqual([read[0]]);
      expect(await collect(store.read(stream, 2n))).toEqual([]);
    });

    test('of 40 reads at the same time, each gets its own stream, from its revision and up to its number', async () => {
      const streams = await Promise.all(
        Array.from({ length: 10 }, async (_, index) => {
          const [stream, events] = [newStream(), newEvents(index)];
          if (index > 0) await store.append(stream, 'no_stream', events);
          return { stream, ids: idsOf(events) };
        }),
      );
      const idsRead = async (...asked: Parameters<typeof store.read>) => (await collect(store.read(...asked))).map(({ id }) => id);
      await Promise.all(
        [...streams, ...streams].flatMap(({ stream, ids }) => [
          idsRead(stream).then((read) => expect(read).toEqual(ids)),
          idsRead(stream, 2n, 3).then((read) => expect(read).toEqual(ids.slice(2, 5))),
        ]),
      );
    });

    describe('expected revision', () => {
      const table: [present: number, expected: Expected, result: bigint | 'conflict'][] = [
        [0, 'no_stream', 0n],
        [0, 'any', 0n],
        [0, 0n, 'conflict'],
        [0, 7n, 'conflict'],
        [1, 'no_stream', 'conflict'],
        [1, 'any', 1n],
        [1, 0n, 1n],
        [1, 1n, 'conflict'],
        [3, 'no_stream', 'conflict'],
        [3, 1n, 'conflict'],
        [3, 2n, 3n],
        [3, 3n, 'conflict'],
        [3, 'any', 3n],
      ];
      test.each(table)('a stream of %s events, expected %s: %s', async (present, expected, result) => {
        const stream = newStream();
        if (present > 0) await store.append(stream, 'no_stream', newEvents(present));
        const appended = store.append(stream, expected, [newEvent()]);
        if (result !== 'conflict') return expect((await appended).revision).toBe(result);
        const error = await outcome(appended);
        expect(error).toBeInstanceOf(Conflict);
        expect(error).toMatchObject({ stream, expected });
        // A store may leave `actual` undefined, but must never give a wrong revision.
        expect([undefined, present === 0 ? null : BigInt(present - 1)]).toContain((error as Conflict).actual);
        expect(await collect(store.read(stream))).toHaveLength(present);
      });
    });

    test('a repeated append is a success with the original answer, also after later events', async () => {
      const stream = newStream();
      const first = newEvents(2);
      const second = newEvents(3);
      const answers = [await store.append(stream, 'no_stream', first), await store.append(stream, 1n, second)];
      expect(await store.append(stream, 1n, second)).toEqual(answers[1]);
      await store.append(stream, 4n, newEvents(1));
      expect(await store.append(stream, 'no_stream', first)).toEqual(answers[0]);
      expect(await store.append(stream, 1n, second)).toEqual(answers[1]);
      expect(await collect(store.read(stream))).toHaveLength(6);
    });

    test('the same id with other data is the same append: ids decide', async () => {
      const stream = newStream();
      const id = randomUUID();
      const answer = await store.append(stream, 'no_stream', [newEvent({ cents: 1 }, 'PaymentInitiated', id)]);
      expect(await store.append(stream, 'no_stream', [newEvent({ cents: 2 }, 'PaymentInitiated', id)])).toEqual(answer);
      expect((await collect(store.read(stream)))[0]!.data).toEqual({ cents: 1 });
    });

    test('other ids at a revision that is taken are a conflict, even with the same data', async () => {
      const stream = newStream();
      await store.append(stream, 'no_stream', [newEvent({ cents: 1 })]);
      expect(await outcome(store.append(stream, 'no_stream', [newEvent({ cents: 1 })]))).toBeInstanceOf(Conflict);
    });

    test('part old, part new is a conflict, and nothing of it is written', async () => {
      const stream = newStream();
      const [known, unknown] = newEvents(2) as [NewEvent, NewEvent];
      await store.append(stream, 'no_stream', [known]);
      expect(await outcome(store.append(stream, 'no_stream', [known, unknown]))).toBeInstanceOf(Conflict);
      expect(await outcome(store.append(stream, 'no_stream', [unknown, known]))).toBeInstanceOf(Conflict);
      expect(idsOf(await collect(store.read(stream)))).toEqual([known.id]);
    });

    test('a known id at another revision is a conflict; in another stream it is another event', async () => {
      const [stream, other] = [newStream(), newStream()];
      const events = newEvents(3);
      await store.append(stream, 'no_stream', events);
      expect(await outcome(store.append(stream, 0n, [events[2]!]))).toBeInstanceOf(Conflict);
      expect((await store.append(other, 'no_stream', [events[1]!])).revision).toBe(0n);
      expect(idsOf(await collect(store.read(stream)))).toEqual(idsOf(events));
    });

    test('20 racing writers on one stream: exactly one wins each revision, none is lost', async () => {
      const stream = newStream();
      const stores = [store, subject.another];
      const won = new Map<bigint, string>();
      await Promise.all(
        Array.from({ length: 20 }, async (_, writer) => {
          let revision: bigint | null = null;
          for (;;) {
            const event = newEvent({ writer });
            try {
              const answer = await stores[writer % 2]!.append(stream, revision ?? 'no_stream', [event], { timeoutMs: 20_000 });
              expect(won.has(answer.revision)).toBe(false);
              won.set(answer.revision, event.id);
              return;
            } catch (error) {
              if (!(error instanceof Conflict)) throw error;
              revision = (await collect(store.read(stream))).at(-1)?.revision ?? null;
            }
          }
        }),
      );
      const read = await collect(store.read(stream));
      expect(read.map(({ revision, id }) => [revision, id])).toEqual([...won].sort(([a], [b]) => (a < b ? -1 : 1)));
      expect(read).toHaveLength(20);
    });

    test('8 writers with pauses and one reader that follows: nothing is missed, and the log never reorders', async () => {
      const start = await store.head();
      const reader = following(subject.another, start);
      const appended: string[] = [];
      await Promise.all(
        Array.from({ length: 8 }, async (_, writer) => {
          for (let round = 0; round < 60; round++) {
            const events = newEvents(1 + ((writer + round) % 3));
            await [store, subject.another][writer % 2]!.append(newStream(), 'no_stream', events, { timeoutMs: 20_000 });
            appended.push(...idsOf(events));
            if ((writer * 7 + round) % 4 === 0) await new Promise((wake) => setTimeout(wake, ((writer + round) % 5) * 0.8));
          }
        }),
      );
      await eventually(() => reader.events().length >= appended.length, { timeoutMs: 20_000 });
      await reader.close();
      const seen = reader.events();
      expect(new Set(idsOf(seen))).toEqual(new Set(appended));
      expect(seen).toHaveLength(appended.length);
      expect(seen.every(({ position }, index) => index === 0 || seen[index - 1]!.position < position)).toBe(true);
      expect(seen.map(({ id, position }) => ({ id, position }))).toEqual(
        (await logAfter(store, start)).map(({ id, position }) => ({ id, position })),
      );
      // In each stream, revisions rise by 1 in the order of the log.
      const revisions = new Map<string, bigint>();
      for (const { stream, revision } of seen) {
        expect(revision).toBe((revisions.get(stream) ?? -1n) + 1n);
        revisions.set(stream, revision);
      }
    });

    test('following starts with the past, reports that it caught up, and goes on with new events', async () => {
      const start = await store.head();
      const [before, after] = [newEvents(3), newEvents(2)];
      const stream = newStream();
      await store.append(stream, 'no_stream', before);
      const reader = following(store, start);
      await eventually(() => reader.items.some(({ kind }) => kind === 'caught_up'));
      expect(idsOf(reader.events())).toEqual(idsOf(before));
      await store.append(stream, 2n, after);
      await eventually(() => reader.events().length === 5);
      await reader.close();
      expect(idsOf(reader.events())).toEqual(idsOf([...before, ...after]));
    });

    test('a reader that starts again at its checkpoint gets later events, once', async () => {
      const start = await store.head();
      const stream = newStream();
      await store.append(stream, 'no_stream', newEvents(10));
      const first = following(store, start);
      await eventually(() => first.events().length === 10);
      await first.close();
      const checkpoint = first.events()[3]!.position;
      await store.append(stream, 9n, newEvents(5));
      const second = following(subject.another, checkpoint);
      await eventually(() => second.events().length === 11);
      await second.close();
      expect(second.events().map(({ revision }) => revision)).toEqual([4n, 5n, 6n, 7n, 8n, 9n, 10n, 11n, 12n, 13n, 14n]);
    });

    test('a reader of some prefixes gets those, and its position passes the others', async () => {
      const start = await store.head();
      const [wanted, other] = [newStream('case-'), newStream('portal-')];
      const reader = following(store, start, { streamPrefixes: ['case-'] });
      await store.append(wanted, 'no_stream', newEvents(2));
      await store.append(other, 'no_stream', newEvents(1));
      const { position } = await store.append(other, 0n, newEvents(2));
      const passed = () =>
        reader.items.some(
          (item) => (item.kind === 'events' ? item.events.at(-1)!.position : item.kind === 'checkpoint' ? item.position : '') >= position,
        );
      await eventually(passed, { timeoutMs: 15_000 });
      await reader.close();
      expect(reader.events().map(({ stream }) => stream)).toEqual([wanted, wanted]);
      // A checkpoint comes after the events that it covers.
      let covered = '';
      for (const item of reader.items) {
        if (item.kind === 'events') item.events.forEach((event) => expect(event.position > covered).toBe(true));
        if (item.kind === 'checkpoint') covered = item.position;
      }
    });

    test('a stream that this release does not know, as a newer one writes it, is in the log for every reader without a filter', async () => {
      const start = await store.head();
      const reader = following(store, start);
      const events = [newEvent({ cents: 1 }, 'InvoiceSent'), { ...newEvent({ cents: 2 }, 'InvoicePaid'), v: 9 }];
      const { position } = await store.append(newStream('invoice-'), 'no_stream', events);
      expect(await store.head()).toBe(position);
      expect(await logAfter(store, start)).toMatchObject(events);
      await eventually(() => reader.events().length === 2);
      await reader.close();
      expect(reader.events()).toMatchObject(events);
    });

    test('a checkpoint beyond the end is refused: the store was replaced under it', async () => {
      await store.append(newStream(), 'no_stream', newEvents(1));
      const head = (await store.head())!;
      const reader = following(store, beyond(head));
      await eventually(() => reader.failure());
      expect(reader.failure()).toBeInstanceOf(NotInTheLog);
      expect(String(reader.failure())).toContain('beyond the end');
      await reader.close();
    });

    test('reading after a place beyond the end is refused, with a filter too', async () => {
      await store.append(newStream(), 'no_stream', newEvents(1));
      const head = (await store.head())!;
      expect(await outcome(logAfter(store, beyond(head)))).toBeInstanceOf(NotInTheLog);
      expect(await outcome(logAfter(store, beyond(head), { streamPrefixes: ['case-'] }))).toBeInstanceOf(NotInTheLog);
      expect(await logAfter(store, head, { streamPrefixes: ['case-'] })).toEqual([]);
    });

    test('a place between two events is refused to readers, and no event lies there', async () => {
      if (!subject.between) return;
      const start = await store.head();
      const stream = newStream();
      await store.append(stream, 'no_stream', newEvents(3));
      const [, second] = await logAfter(store, start);
      const place = subject.between(second!.position);
      expect(place > second!.position).toBe(true);
      expect(await store.eventAt(place)).toBeNull();
      expect(await store.missing([{ position: place, id: second!.id }, markOf(second!)])).toEqual([{ position: place, id: second!.id }]);
      expect(await outcome(logAfter(store, place))).toBeInstanceOf(NotInTheLog);
      const reader = following(store, place);
      await eventually(() => reader.failure());
      expect(reader.failure()).toBeInstanceOf(NotInTheLog);
      await reader.close();
      // The wrong position must not count as an outage. The store still answers.
      expect(await collect(store.read(stream))).toHaveLength(3);
    });

    test('the event at a place is found, by every client, and only there', async () => {
      const start = await store.head();
      const stream = newStream();
      await store.append(stream, 'no_stream', newEvents(2));
      const events = await logAfter(store, start);
      for (const event of events) expect(await subject.another.eventAt(event.position)).toEqual(event);
      expect(await store.eventAt(beyond(events[1]!.position))).toBeNull();
    });

    test('marks: an event at its place is found; another id, another place, and a place beyond the end are missing', async () => {
      const start = await store.head();
      await store.append(newStream(), 'no_stream', newEvents(3));
      const events = await logAfter(store, start);
      const marks = events.map(markOf);
      expect(await store.missing([])).toEqual([]);
      expect(await subject.another.missing(marks)).toEqual([]);
      const [first, second, third] = marks as [Mark, Mark, Mark];
      const wrong = [
        { position: first.position, id: second.id },
        { position: second.position, id: randomUUID() },
        { position: beyond(third.position), id: third.id },
      ];
      for (const mark of wrong) expect(await store.missing([mark])).toEqual([mark]);
      // The marks may be in any order, and two may have the same position.
      const sorted = (found: readonly Mark[]) => [...found].sort((a, b) => a.position.localeCompare(b.position));
      expect(sorted(await store.missing([third, ...wrong, second, first]))).toEqual(sorted(wrong));
    });

    test('a thousand marks close together and a few far apart, one of each missing: exactly those are named', async () => {
      const start = await store.head();
      for (let round = 0; round < 12; round++) {
        await store.append(newStream(), 'no_stream', newEvents(100));
        await store.append(newStream('case-'), 'no_stream', [newEvent('x'.repeat(100_000))]);
      }
      const log = await logAfter(store, start);
      const [dense, sparse] = [log.filter(({ stream }) => stream.startsWith('payment-')), log.filter(({ stream }) => stream.startsWith('case-'))];
      expect([dense.length, sparse.length]).toEqual([1_200, 12]);
      const marks = [...sparse, ...dense].map(markOf);
      expect(await store.missing(marks)).toEqual([]);
      const changed = [marks[7]!, marks[612]!];
      const named = await store.missing(marks.map((mark) => (changed.includes(mark) ? { ...mark, id: randomUUID() } : mark)));
      expect(named.map(({ position }) => position).sort()).toEqual(changed.map(({ position }) => position).sort());
      // Check one event of each hundred, like the marks of several processes.
      expect(await store.missing(marks.filter((_, index) => index % 100 === 0))).toEqual([]);
    });

    test('one bad append beside good ones: only the bad one fails', async () => {
      const taken = newStream();
      await store.append(taken, 'no_stream', newEvents(1));
      const good = Array.from({ length: 30 }, () => newStream());
      const results = await Promise.all([
        ...good.slice(0, 15).map((stream) => outcome(store.append(stream, 'no_stream', newEvents(2)))),
        outcome(store.append(taken, 'no_stream', newEvents(1))),
        outcome(store.append(newStream(), 4n, newEvents(1))),
        ...good.slice(15).map((stream) => outcome(store.append(stream, 'no_stream', newEvents(2)))),
      ]);
      expect(results.filter((result) => result instanceof Conflict)).toHaveLength(2);
      expect(results.filter((result) => (result as { revision?: bigint }).revision === 1n)).toHaveLength(30);
    });

    test('an append of nearly a megabyte is taken, a larger one refused before anything is sent', async () => {
      const stream = newStream();
      const largest = newEvent('x'.repeat(MAX_APPEND_BYTES - 400));
      await store.append(stream, 'no_stream', [largest], { timeoutMs: 20_000 });
      expect((await collect(store.read(stream)))[0]!.data).toHaveLength(MAX_APPEND_BYTES - 400);
      const refused = await outcome(store.append(stream, 0n, [newEvent('x'.repeat(MAX_APPEND_BYTES))]));
      expect((refused as Error).name).toBe('Error');
      expect((refused as Error).message).toContain(`at most ${MAX_APPEND_BYTES}`);
      expect(await collect(store.read(stream))).toHaveLength(1);
    });

    test('as many events as one append may have are taken, one more is refused', async () => {
      const stream = newStream();
      expect((await store.append(stream, 'no_stream', newEvents(MAX_EVENTS_PER_APPEND))).revision).toBe(BigInt(MAX_EVENTS_PER_APPEND - 1));
      const refused = await outcome(store.append(stream, 'any', newEvents(MAX_EVENTS_PER_APPEND + 1)));
      expect((refused as Error).message).toContain(`at most ${MAX_EVENTS_PER_APPEND}`);
      expect((await collect(store.read(stream))).map(({ data }) => (data as { index: number }).index)).toEqual([
        ...Array(MAX_EVENTS_PER_APPEND).keys(),
      ]);
    });

    test('an event that no store could keep is refused as a fault of the caller', async () => {
      const wrong: [string, Expected, NewEvent[]][] = [
        ['', 'no_stream', newEvents(1)],
        ['payment-\ud800', 'no_stream', newEvents(1)],
        ['payment-\0', 'no_stream', newEvents(1)],
        ['$payment', 'no_stream', newEvents(1)],
        [newStream(), 'no_stream', []],
        [newStream(), -1n, newEvents(1)],
        [newStream(), 'no_stream', [newEvent({}, '')]],
        [newStream(), 'no_stream', [newEvent({}, '$streamDeleted')]],
        [newStream(), 'no_stream', [newEvent({}, 'PaymentInitiated', 'no-uuid')]],
        [newStream(), 'no_stream', [newEvent({ big: 1n } as unknown as Json)]],
        [newStream(), 'no_stream', [newEvent(undefined as unknown as Json)].map((event) => ({ ...event, data: undefined as unknown as Json }))],
        [newStream(), 'no_stream', [{ ...newEvent(), v: 0 }]],
        [newStream(), 'no_stream', Array<NewEvent>(2).fill(newEvent())],
      ];
      for (const [stream, expected, events] of wrong) {
        const error = await outcome(store.append(stream, expected, events));
        expect(error).toBeInstanceOf(Error);
        expect(['Conflict', 'OutcomeUnknown', 'Unavailable']).not.toContain((error as Error).name);
      }
    });

    test('text of every script, and characters that JSON escapes, survive', async () => {
      const stream = newStream();
      const data = { 'Zoë 🏦 naïve': 'Ωμέγα ﷽ 你好 \u0000 \u0007 \u2028 \ud800 "\\{},\' NULL', empty: '', key: { '': [] } };
      await store.append(stream, 'no_stream', [newEvent(data, 'Type Ünïcode')]);
      expect((await collect(store.read(stream)))[0]).toMatchObject({ type: 'Type Ünïcode', data });
      const [inLog] = (await logAfter(store, null, { streamPrefixes: [stream] })).slice(-1);
      expect(inLog).toMatchObject({ stream, data });
    });

    test('the log reads in batches, in order, up to a position, a number, or prefixes', async () => {
      const start = await store.head();
      const [payment, account] = [newStream('payment-'), newStream('account-')];
      await store.append(payment, 'no_stream', newEvents(100));
      const middle = await store.append(account, 'no_stream', newEvents(2));
      for (let round = 0; round < 12; round++) await store.append(payment, BigInt(99 + round * 100), newEvents(100));
      const all = await logAfter(store, start);
      expect(all).toHaveLength(1302);
      expect((await collect(store.readAll(start))).every(({ length }) => length > 0 && length <= 1000)).toBe(true);
      expect(await logAfter(store, start, { until: middle.position })).toEqual(all.slice(0, 102));
      expect(await logAfter(store, start, { max: 7 })).toEqual(all.slice(0, 7));
      expect(await logAfter(store, start, { max: 700, until: middle.position })).toEqual(all.slice(0, 102));
      expect(await logAfter(store, all[101]!.position, { max: 3 })).toEqual(all.slice(102, 105));
      expect(await logAfter(store, start, { streamPrefixes: ['account-'] })).toEqual(all.slice(100, 102));
      expect(await logAfter(store, start, { streamPrefixes: ['account-', 'payment-'], max: 104 })).toEqual(all.slice(0, 104));
      expect(await logAfter(store, all.at(-1)!.position)).toEqual([]);
      expect(await logAfter(store, all[200]!.position, { until: all[100]!.position })).toEqual([]);
    });

    test('the head is the position of the last event, for every client', async () => {
      const { position } = await store.append(newStream('settlement-'), 'no_stream', newEvents(3));
      expect(await store.head()).toBe(position);
      expect(await subject.another.head()).toBe(position);
    });
  });
};
