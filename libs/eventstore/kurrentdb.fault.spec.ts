/** The KurrentDB adapter against failures of the client and the server; docs/contract.md#the-kurrentdb-client. */
import { afterEach, beforeEach, describe, expect, jest, test } from '@jest/globals';
import grpc from '@grpc/grpc-js';
import { randomUUID } from 'node:crypto';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { systemClock } from '#kernel';
import { createPool, migrate, type Client } from '#platform';
import {
  Conflict,
  OutcomeUnknown,
  StoreIncident,
  Unavailable,
  UnreadableStream,
  type EventStore,
  type Position,
  type Recorded,
} from './event-store.js';
import { postgresCheckpoint } from './checkpoint.js';
import { NotInTheLog } from './codec.js';
import { INSTALLATION_STREAM, requireOwnLog } from './installation.js';
import { createKurrentDbEventStore, type KurrentDbOptions } from './kurrentdb.js';
import { createSubscriber } from './subscriber.js';
import { eventStoreMigrations } from './index.js';
import { collect, following, logAfter, newEvent, newEvents, newStream } from '../../test/support/event-store.contract.js';
import { eventually } from '../../test/support/eventually.js';
import { authority, certificate, privateKey } from '../../test/support/kurrentdb-double-certificate.js';
import { freshDatabase } from '../../test/support/postgres.js';
import { KurrentDbDouble, type AppendFault } from '../../test/support/kurrentdb-double.js';
import { silentServer } from '../../test/support/silent-server.js';

/** Shorter time limits than the real ones, so that the suite takes seconds. */
const QUICK = {
  appendMs: 1_500,
  tryMs: 300,
  graceMs: 100,
  retryMs: 20,
  readMs: 1_500,
  readStallMs: 400,
  confirmMs: 400,
  silenceMs: 300,
  replaceMs: 300,
  deposedMs: 1_000,
  backoffMs: 10,
  backoffMostMs: 100,
};

let double: KurrentDbDouble;
let store: EventStore;
let troubles: string[];
let foreign: string[];
const cleanUps: (() => unknown)[] = [];
const open = async (url = double.url(), timings: KurrentDbOptions['timings'] = QUICK) => {
  const opened = await createKurrentDbEventStore(url, {
    timings,
    onTrouble: (message) => troubles.push(message),
    onForeign: (stream) => foreign.push(stream),
  });
  cleanUps.push(() => opened.close());
  return opened;
};
const node = async (...options: ConstructorParameters<typeof KurrentDbDouble>) => {
  const started = await new KurrentDbDouble(...options).start();
  cleanUps.push(() => started.kill());
  return started;
};

beforeEach(async () => {
  troubles = [];
  foreign = [];
  double = await node();
  store = await open();
});
afterEach(async () => {
  // Jest itself fails a test that leaves an unhandled rejection (K6).
  for (const cleanUp of cleanUps.splice(0).reverse()) await cleanUp();
});

const outcome = (work: Promise<unknown>): Promise<unknown> => work.catch((error: unknown) => error);
const timed = async <T>(work: () => Promise<T>): Promise<[T, number]> => {
  const begun = performance.now();
  return [await work(), performance.now() - begun];
};

describe('another server answers at the address', () => {
  const SWAPS = 15;
  /** Writes the first event of an installation to the double, and opens a store that checks for it. */
  const openOwn = async () => {
    const [created] = newEvents(1);
    await store.append(INSTALLATION_STREAM, 'no_stream', [created!]);
    double.calls.read = 0;
    const opened: EventStore = await createKurrentDbEventStore(double.url(), {
      timings: QUICK,
      checkConnection: async () => {
        for await (const { id } of opened.read(INSTALLATION_STREAM, 0n, 1)) if (id === created!.id) return;
        throw new StoreIncident('another log');
      },
    });
    cleanUps.push(() => opened.close());
    return opened;
  };
  const appendOne = (to: EventStore) => to.append(newStream(), 'no_stream', newEvents(1));

  test('the log is checked once over each connection, before the first append', async () => {
    const own = await openOwn();
    const { calls } = double;
    const before = calls.read;
    for (let n = 0; n < 5; n++) await appendOne(own);
    expect(calls.read - before).toBe(1);
    double.kill();
    await double.start();
    await appendOne(own);
    expect(calls.read - before).toBe(2);
  });

  test('under load, while servers are swapped: no event reaches the other log, and appends work again on the right one', async () => {
    const own = await openOwn();
    const other = await node();
    await (await open(other.url())).append(INSTALLATION_STREAM, 'no_stream', newEvents(1));
    other.kill();
    other.port = double.port;
    let over = false;
    cleanUps.push(() => (over = true));
    let done = 0;
    const load = Array.from({ length: 16 }, async () => {
      while (!over)
        await appendOne(own).then(
          () => (done += 1),
          () => systemClock.sleep(10),
        );
    });
    for (let swap = 0; swap < SWAPS; swap++) {
      const before = done;
      await eventually(() => done > before);
      double.kill();
      await other.start();
      const asked = other.calls.read;
      await eventually(() => other.calls.read > asked || other.log.length > 1);
      await systemClock.sleep(50);
      other.kill();
      await double.start();
    }
    over = true;
    await Promise.all(load);
    expect([other.log.length, other.calls.append]).toEqual([1, 1]);
  });

  test('readers skip events of another installation and report them; a read of the stream fails; own events name their installation', async () => {
    const openFor = async (installation: string) => {
      const opened = await createKurrentDbEventStore(double.url(), {
        timings: QUICK,
        installationId: () => installation,
        onForeign: (stream, of) => foreign.push(`${stream} ${of}`),
      });
      cleanUps.push(() => opened.close());
      return opened;
    };
    const [own, another] = await Promise.all([openFor('own'), openFor('another')]);
    const [stream, theirs] = [newStream(), newStream()];
    const appendTo = (to: EventStore, name: string) => to.append(name, 'no_stream', newEvents(1));
    await appendTo(another, theirs);
    await appendTo(own, stream);
    const last = await appendTo(another, newStream());

    const named: Recorded[] = [];
    const read: Recorded[] = [];
    // A full page has one event of ours, although another one came before it.
    for await (const batch of own.readAll(null, { max: 1, onForeign: (event) => named.push(event) })) read.push(...batch);
    expect(read.map((event) => [event.stream, event.meta.installation])).toEqual([[stream, 'own']]);
    expect(named.map((event) => [event.stream, event.meta.installation])).toEqual([[theirs, 'another']]);
    expect(foreign[0]).toBe(`${theirs} another`);

    const reader = following(own, null);
    cleanUps.push(() => reader.close());
    await eventually(() => reader.items.some((item) => item.kind === 'checkpoint' && item.position === last.position));
    expect(reader.events().map((event) => event.stream)).toEqual([stream]);
    expect(await outcome(collect(own.read(theirs)))).toBeInstanceOf(UnreadableStream);
  });

  test('a log that cannot be checked is an outage, and nothing is sent', async () => {
    const own = await openOwn();
    const before = double.calls.append;
    double.everyRead = 'unavailable';
    expect(await outcome(appendOne(own))).toBeInstanceOf(Unavailable);
    double.everyRead = null;
    expect(double.calls.append).toBe(before);
    await appendOne(own);
  });
});

describe('appends', () => {
  test('go over the unary call, to the leader, never over the shared batch stream (K7)', async () => {
    await store.append(newStream(), 'no_stream', newEvents(3));
    expect(double.calls).toMatchObject({ batchAppend: 0 });
    expect(double.calls.append).toBeGreaterThan(0);
    expect(double.calls.requiresLeader).toBeGreaterThanOrEqual(2);
  });

  const passing: [AppendFault[], string][] = [
    [['lost'], 'stored, but the reply never came'],
    [['cut'], 'stored, then the connection broke'],
    [['late'], 'stored after the deadline'],
    [['hang'], 'neither stored nor answered'],
    [['half_close'], 'ended with OK and no reply'],
    [['unavailable', 'unavailable'], 'unavailable'],
    [['not_ready', 'not_ready_unknown'], 'the server starts (K11)'],
    [['busy'], 'the server is busy'],
    [['not_leader'], 'another node leads'],
    [['lost', 'conflict'], 'a repetition that the server did not recognise (K12)'],
    [['lost', 'unavailable', 'conflict'], 'the same after an outage between'],
    [['no_position'], 'a success without a position (K14)'],
  ];
  test.each(passing)('%j: %s; the append succeeds all the same, once', async (faults) => {
    const stream = newStream();
    await store.append(stream, 'no_stream', newEvents(1));
    const events = newEvents(2);
    double.nextAppends.push(...faults);
    const answer = await store.append(stream, 0n, events);
    const read = await collect(store.read(stream));
    expect(read.map(({ id }) => id).slice(1)).toEqual(events.map(({ id }) => id));
    expect(answer).toEqual({ revision: 2n, position: read[2]!.position });
    // Another client gets the original answer too.
    expect(await (await open()).append(stream, 0n, events)).toEqual(answer);
  });

  test('a conflict after a retry that is a real one stays one', async () => {
    const stream = newStream();
    double.nextAppends.push('unavailable');
    double.write(stream, [{ type: 'PaymentInitiated', data: {} }]);
    const error = await outcome(store.append(stream, 'no_stream', newEvents(1)));
    expect(error).toBeInstanceOf(Conflict);
    expect((error as Conflict).actual).toBe(0n);
  });

  test('a conflict that cannot be read back is OutcomeUnknown, not a conflict', async () => {
    double.everyRead = 'unavailable';
    double.nextAppends.push('lost');
    double.everyAppend = 'conflict';
    expect(await outcome(store.append(newStream(), 'no_stream', newEvents(1), { timeoutMs: 600 }))).toBeInstanceOf(OutcomeUnknown);
  });

  test('an append that may have happened is OutcomeUnknown, one that cannot have happened is Unavailable; both in time (K1, K7)', async () => {
    double.everyAppend = 'hang';
    const [unknown, took] = await timed(() => outcome(store.append(newStream(), 'no_stream', newEvents(1), { timeoutMs: 700 })));
    expect(unknown).toBeInstanceOf(OutcomeUnknown);
    // Far below the client's own deadline, and long enough for a busy machine.
    expect(took).toBeLessThan(5_000);
    double.everyAppend = 'not_leader';
    await eventually(async () => (await outcome(store.append(newStream(), 'no_stream', newEvents(1), { timeoutMs: 300 }))) instanceof Unavailable);
    double.kill();
    await eventually(async () => (await outcome(store.append(newStream(), 'no_stream', newEvents(1), { timeoutMs: 200 }))) instanceof Unavailable);
  });

  test('without a revision nothing is repeated: the store could not tell the second from the first', async () => {
    double.nextAppends.push('lost');
    const stream = newStream();
    expect(await outcome(store.append(stream, 'any', newEvents(1)))).toBeInstanceOf(OutcomeUnknown);
    expect(await collect(store.read(stream))).toHaveLength(1);
  });

  test('a request that the server calls bad is a fault of ours, at once', async () => {
    double.everyAppend = 'bad_request';
    const [error, took] = await timed(() => outcome(store.append(newStream(), 'no_stream', newEvents(1))));
    expect((error as Error).name).toBe('Error');
    expect((error as Error).message).toContain('BadRequest');
    expect(took).toBeLessThan(3_000);
  });

  test('deadlines of a few milliseconds: every reported failure is appended by its repetition, once (K12)', async () => {
    const hasty = await open(double.url(), { ...QUICK, tryMs: 5, graceMs: 5, retryMs: 5, replaceMs: 60_000 });
    const streams = Array.from({ length: 40 }, () => newStream());
    const outcomes = await Promise.all(
      streams.map(async (stream) => {
        const events = newEvents(2);
        const first = await outcome(hasty.append(stream, 'no_stream', events, { timeoutMs: 15 }));
        return { first, again: await store.append(stream, 'no_stream', events, { timeoutMs: 30_000 }) };
      }),
    );
    expect(outcomes.some(({ first }) => first instanceof OutcomeUnknown)).toBe(true);
    expect(outcomes.every(({ again }) => again.revision === 1n)).toBe(true);
    for (const stream of streams) expect(double.log.filter((event) => event.stream === stream)).toHaveLength(2);
  });

  test('a limited number is on its way; the others wait, and learn in time that nothing happened', async () => {
    double.everyAppend = 'hang';
    const appends = Array.from({ length: 200 }, () => outcome(store.append(newStream(), 'no_stream', newEvents(1), { timeoutMs: 3_000 })));
    await eventually(() => double.calls.append >= 128);
    expect(double.calls.append).toBe(128);
    const results = await Promise.all(appends);
    expect(results.filter((error) => error instanceof OutcomeUnknown).length).toBeGreaterThanOrEqual(128);
    expect(results.every((error) => error instanceof OutcomeUnknown || error instanceof Unavailable)).toBe(true);
    expect(results.some((error) => error instanceof Unavailable)).toBe(true);
  });

  test('a channel that another call closed under an append leaves nothing unhandled (K6)', async () => {
    await store.append(newStream(), 'no_stream', newEvents(1));
    const createCall = jest.spyOn(grpc.Channel.prototype, 'createCall').mockImplementationOnce(() => {
      throw new Error('Channel has been shut down');
    });
    expect((await store.append(newStream(), 'no_stream', newEvents(1))).revision).toBe(0n);
    expect(createCall).toHaveBeenCalledTimes(2);
    createCall.mockRestore();
  });

  test('a server that dies with large appends on their way takes nothing with it; all succeed when it is back, once (K6)', async () => {
    const streams = Array.from({ length: 40 }, () => newStream());
    const appends = streams.map((stream) => store.append(stream, 'no_stream', [newEvent('x'.repeat(100_000))], { timeoutMs: 60_000 }));
    await eventually(() => double.calls.append > 10);
    double.kill();
    await new Promise((wake) => setTimeout(wake, 300));
    await double.start();
    expect((await Promise.all(appends)).every(({ revision }) => revision === 0n)).toBe(true);
    expect(double.log).toHaveLength(40);
  });
});

describe('reads', () => {
  test('a server that does not answer: the read ends in time with Unavailable (K5)', async () => {
    double.everyRead = 'hang';
    const [error, took] = await timed(() => outcome(collect(store.read(newStream()))));
    expect(error).toBeInstanceOf(Unavailable);
    expect(took).toBeLessThan(10_000);
    expect(await outcome(store.head())).toBeInstanceOf(Unavailable);
  });

  test('a read that stalls half-way is read again, on a new client (K8)', async () => {
    const stream = newStream();
    await store.append(stream, 'no_stream', newEvents(20));
    double.nextReads.push('stall');
    expect(await collect(store.read(stream))).toHaveLength(20);
    expect(troubles).toContain('the KurrentDB client is replaced');
  });

  test('an outage in between is waited out', async () => {
    const stream = newStream();
    await store.append(stream, 'no_stream', newEvents(3));
    double.nextReads.push('unavailable', 'unavailable');
    expect(await collect(store.read(stream))).toHaveLength(3);
  });

  test('leaving reads early, hundreds of times, leaves no read hanging (K9)', async () => {
    const stream = newStream();
    await store.append(stream, 'no_stream', newEvents(50));
    for (let round = 0; round < 80; round++) {
      for await (const event of store.read(stream)) if (event.revision === 2n) break;
      for await (const events of store.readAll(null)) if (events.length > 0) break;
    }
    const [read, took] = await timed(() => collect(store.read(stream)));
    expect(read).toHaveLength(50);
    expect(took).toBeLessThan(5_000);
  });

  test('many callers that ask for the head at once share a read, and see every earlier append', async () => {
    const before = double.calls.read;
    await Promise.all(
      Array.from({ length: 50 }, async () => {
        const { position } = await store.append(newStream(), 'no_stream', newEvents(1));
        expect((await store.head())! >= position).toBe(true);
      }),
    );
    expect(double.calls.read - before).toBeLessThan(40);
  });
});

describe('following', () => {
  const appendTen = async () => {
    const stream = newStream();
    await store.append(stream, 'no_stream', newEvents(10));
    return stream;
  };
  const isLevel = ({ items }: ReturnType<typeof following>) => items.some(({ kind }) => kind === 'caught_up');
  const ids = () => double.log.filter(({ stream }) => stream.startsWith('payment-')).map(({ id }) => id);

  test.each(['silent_end', 'stall', 'error', 'unconfirmed', 'duplicate', 'early_checkpoint'] as const)(
    'a subscription with %s: everything arrives, once, in order (K3, K4, K13)',
    async (fault) => {
      await appendTen();
      double.nextSubscriptions.push(fault, fault);
      const reader = following(store, null);
      cleanUps.push(() => reader.close());
      await eventually(() => double.calls.subscribe > 0);
      await appendTen();
      await eventually(() => reader.events().length >= 20);
      await appendTen();
      await eventually(() => reader.events().length >= 30);
      expect(reader.events().map(({ id }) => id)).toEqual(ids());
      // No checkpoint ever came before an event that it covers.
      let covered = '';
      for (const item of reader.items) {
        if (item.kind === 'checkpoint') covered = item.position;
        if (item.kind === 'events') expect(item.events[0]!.position > covered).toBe(true);
      }
    },
  );

  test('goes on over restarts of the server, behind the last event that was handed on', async () => {
    const reader = following(store, null);
    cleanUps.push(() => reader.close());
    for (let round = 1; round <= 3; round++) {
      await eventually(appendTen);
      await eventually(() => reader.events().length === round * 10);
      double.kill();
      await eventually(() => troubles.includes('a subscription ended and is taken up again'));
      await double.start();
    }
    expect(reader.events().map(({ id }) => id)).toEqual(ids());
  });

  test('a slow reader does not make the process hold the whole log', async () => {
    for (let round = 0; round < 60; round++) await store.append(newStream(), 'no_stream', newEvents(100));
    const subscription = store.subscribe(null);
    cleanUps.push(() => subscription.close());
    let seen = 0;
    for await (const item of subscription) {
      if (item.kind === 'events') {
        seen += item.events.length;
        await new Promise((wake) => setTimeout(wake, 5));
      }
      if (seen === 6_000) break;
    }
    expect(seen).toBe(6_000);
  });

  test('a server with another log is refused; the reader does not wait for it (K10)', async () => {
    await appendTen();
    const { position } = await store.append(newStream(), 'no_stream', newEvents(1));
    double.wipe();
    double.write(newStream(), [{ type: 'PaymentInitiated', data: {} }]);
    const reader = following(store, position);
    cleanUps.push(() => reader.close());
    await eventually(() => reader.failure());
    expect(String(reader.failure())).toContain('beyond the end');
  });

  /** Replaces the server by one with the log that `exchange` makes. */
  const exchanged = async (exchange: () => void) => {
    double.kill();
    exchange();
    await double.start();
  };
  const foreignEvents = (count: number) => {
    for (let n = 0; n < count; n++) double.write(newStream(), [{ type: 'PaymentInitiated', data: {} }]);
  };
  const logs: [string, () => void][] = [
    ['an empty log', () => double.wipe()],
    ['an earlier copy', () => double.keep(15)],
    ['an earlier copy that has grown past the place', () => (double.keep(15), foreignEvents(30))],
    ['an earlier copy without the last event, which has grown', () => (double.keep(29), foreignEvents(30))],
    ['a longer log of others, whose events begin at the same places', () => (double.wipe(), foreignEvents(60))],
    ['a longer log of others, whose events begin at other places', () => ((double.bytesPerEvent = 149), double.wipe(), foreignEvents(60))],
  ];
  test.each(logs)('the store is exchanged for %s under a running reader: it stops, and hands out no event of it', async (_, exchange) => {
    const readers = [following(store, null), following(store, (await store.append(newStream(), 'no_stream', newEvents(1))).position)];
    cleanUps.push(...readers.map((reader) => () => reader.close()));
    await appendTen();
    await appendTen();
    await store.append(newStream(), 'no_stream', newEvents(9));
    const before = ids();
    await eventually(() => readers[0]!.events().length === 30 && readers[1]!.events().length === 29);
    await exchanged(exchange);
    await eventually(() => readers.every((reader) => reader.failure()));
    for (const reader of readers) {
      expect(reader.failure()).toBeInstanceOf(NotInTheLog);
      expect(String(reader.failure())).toContain('not the event store that the checkpoint was taken from');
    }
    const handedOut = readers.map(({ items }) => items.flatMap((item) => (item.kind === 'events' ? item.events.map(({ id }) => id) : [])));
    expect(handedOut).toEqual([before, before.slice(1)]);
  });

  test.each(logs)('the store is exchanged for %s under a reader that has met no event yet: the same', async (_, exchange) => {
    await appendTen();
    await appendTen();
    await appendTen();
    const reader = following(store, await store.head());
    cleanUps.push(() => reader.close());
    await eventually(() => isLevel(reader));
    await exchanged(exchange);
    await eventually(() => reader.failure());
    expect(reader.failure()).toBeInstanceOf(NotInTheLog);
    expect(reader.items.filter(({ kind }) => kind !== 'caught_up')).toEqual([]);
  });

  test('a reader whose connection outlives an exchange looks at its place again once the log ends before it', async () => {
    await appendTen();
    const reader = following(store, null);
    cleanUps.push(() => reader.close());
    await eventually(() => reader.events().length === 10);
    double.keep(5);
    await eventually(() => reader.failure());
    expect(String(reader.failure())).toContain('beyond the end');
  });

  test('a server that refuses reads for a while is an outage, at any place', async () => {
    await appendTen();
    const events = (await collect(store.readAll(null))).flat();
    double.nextReads.push('unavailable', 'unavailable');
    expect(await store.eventAt(events[3]!.position)).toEqual(events[3]);
    double.everyRead = 'unavailable';
    expect(await outcome(store.missing(events.map(({ position, id }) => ({ position, id }))))).toBeInstanceOf(Unavailable);
  });

  test('thousands of marks cost a read for some hundred of them; a gap between them is not read', async () => {
    for (let round = 0; round < 20; round++) await store.append(newStream(), 'no_stream', newEvents(100));
    const first = (await collect(store.readAll(null))).flat();
    for (let round = 0; round < 40; round++) await store.append(newStream('case-'), 'no_stream', newEvents(100));
    const last = await store.append(newStream(), 'no_stream', [newEvent()]);
    const marks = [...first.map(({ position, id }) => ({ position, id })), { position: last.position, id: (await store.eventAt(last.position))!.id }];
    const before = double.calls.read;
    expect(await store.missing(marks)).toEqual([]);
    // Four pages for 2,000 marks and one read for the last mark. One more read is allowed.
    expect(double.calls.read - before).toBeLessThanOrEqual(6);
  });

  test('a checkpoint of another kind of store is refused too', async () => {
    const reader = following(store, '00000000000000000005' as Position);
    cleanUps.push(() => reader.close());
    await eventually(() => reader.failure());
    expect(String(reader.failure())).toContain('not a position of KurrentDB');
  });

  test.each([
    ['an event of another program', { type: 'PaymentInitiated', data: {}, meta: 'none' }],
    ['a link', { type: '$>', data: '0@payment-1' }],
    ['the mark of a deleted stream', { type: '$streamDeleted', data: {} }],
  ])('%s in a stream of ours: readers of the log pass over it and name the stream, commands on the stream are refused', async (_, event) => {
    const stream = await appendTen();
    double.write(stream, [event]);
    await appendTen();
    const reader = following(store, null);
    cleanUps.push(() => reader.close());
    await eventually(() => isLevel(reader));
    expect(reader.events()).toHaveLength(20);
    expect(foreign).toEqual([stream]);
    expect(await store.foreignStream!()).toBe(stream);
    expect(String(await outcome(collect(store.read(stream))))).toContain(`${stream}@10: not an event of Payfold`);
  });

  test('the stream of another program is passed over and named once; the readers come to the end of the log', async () => {
    expect(await store.foreignStream!()).toBeNull();
    await appendTen();
    double.write('$stats-somewhere', [{ type: '$statsCollected', data: {} }]);
    expect(await store.foreignStream!()).toBeNull();
    double.write('orders-7', [{ type: 'OrderPlaced', data: {}, meta: 'none' }]);
    const readers = [following(store, null), following(store, null)];
    cleanUps.push(...readers.map((reader) => () => reader.close()));
    for (const reader of readers) {
      await eventually(() => isLevel(reader));
      expect(reader.events()).toHaveLength(10);
    }
    expect(foreign).toEqual(['orders-7']);
    expect(await store.foreignStream!()).toBe('orders-7');
    expect((await collect(store.readAll(null))).flat()).toHaveLength(10);
  });

  test('the stream of another program is refused before the first use', async () => {
    const database = await freshDatabase();
    const pool = createPool(database.url, { name: 'spec', max: 2 });
    cleanUps.push(() => pool.end().then(() => database.drop()));
    await migrate(pool, eventStoreMigrations);
    const ports = {
      pool,
      store,
      clock: systemClock,
      newId: randomUUID,
      kurrentdbUrl: double.url(),
      databaseUrl: database.url,
      sealedEnd: async () => null,
    };
    await requireOwnLog(ports);
    double.write('orders-7', [{ type: 'OrderPlaced', data: {}, meta: 'none' }]);
    await expect(requireOwnLog(ports)).rejects.toThrow('KURRENTDB_URL holds the stream orders-7, which Payfold did not write');
  });

  test('a stream of a newer release is read by every reader that does not name its streams', async () => {
    await store.append(`invoice-${randomUUID()}`, 'no_stream', newEvents(2));
    await appendTen();
    const [all, payments] = [following(store, null), following(store, null, { streamPrefixes: ['payment-'] })];
    cleanUps.push(
      () => all.close(),
      () => payments.close(),
    );
    await eventually(() => isLevel(all) && isLevel(payments));
    expect([all.events().length, payments.events().length, foreign]).toEqual([12, 10, []]);
    expect((await collect(store.readAll(null))).flat()).toHaveLength(12);
    expect(await store.foreignStream!()).toBeNull();
  });

  test('closing ends the iteration in any state of the server', async () => {
    double.everySubscription = 'unconfirmed';
    const reader = following(store, null);
    await eventually(() => double.calls.subscribe > 0);
    const [, took] = await timed(() => reader.close());
    expect(took).toBeLessThan(5_000);
  });
});

describe('a projection over it', () => {
  test('has every event once, in order, over duplicates, ends, early checkpoints and deaths of the server; a command waits for its own event', async () => {
    const database = await freshDatabase();
    const pool = createPool(database.url, { name: 'spec', max: 6 });
    cleanUps.push(
      () => database.drop(),
      () => pool.end(),
    );
    await migrate(pool, eventStoreMigrations);
    await pool.query('create table seen (nth bigserial, id uuid not null)');
    const projection = {
      name: 'seen',
      apply: async (client: Client, events: readonly Recorded[]) =>
        void (await client.query('insert into seen (id) select unnest($1::uuid[])', [events.map(({ id }) => id)])),
    };
    const another = () => createSubscriber(projection, { store, checkpoint: postgresCheckpoint(pool, 'seen') });
    const [worker, command] = [another(), another()];
    cleanUps.push(() => worker.stop());
    double.nextSubscriptions.push('duplicate', 'early_checkpoint', 'silent_end', 'error', 'stall', 'unconfirmed');
    worker.start();
    let position: Position | null = null;
    for (let round = 0; round < 12; round++) {
      position = (await store.append(newStream(), 'no_stream', newEvents(5), { timeoutMs: 10_000 })).position;
      if (round % 4 === 1) {
        double.kill();
        await double.start();
      }
      if (round % 4 === 3) await command.runUntil(position, { timeoutMs: 10_000 });
    }
    expect(await worker.caughtUpTo(position, 20_000)).toBe(true);
    expect((await pool.query<{ id: string }>('select id from seen order by nth')).rows.map(({ id }) => id)).toEqual(double.log.map(({ id }) => id));
    expect(await worker.status()).toMatchObject({ position, head: position, lagEvents: 0, lagMs: 0 });
    // On KurrentDB a position counts bytes, not events.
    await worker.stop();
    await store.append(newStream(), 'no_stream', newEvents(1));
    expect(await worker.status()).toMatchObject({ lagEvents: null });
  });
});

describe('a cluster', () => {
  test('the leader dies: writes, reads and readers go on with the next one (K7, K8)', async () => {
    const second = await node(undefined, double);
    for (const one of [double, second]) {
      one.members = [double.port, second.port];
      one.leaderPort = double.port;
    }
    const cluster = await open(`kurrentdb://127.0.0.1:${double.port},127.0.0.1:${second.port}?tls=false&nodePreference=leader`);
    const reader = following(cluster, null);
    cleanUps.push(() => reader.close());
    const stream = newStream();
    await cluster.append(stream, 'no_stream', newEvents(1));
    await eventually(() => reader.events().length === 1);
    double.kill();
    second.members = [second.port];
    second.leaderPort = second.port;
    const event = newEvent();
    await eventually(() => cluster.append(stream, 0n, [event], { timeoutMs: 1_000 }));
    await eventually(async () => (await collect(cluster.read(stream))).length === 2);
    await eventually(() => reader.events().length === 2);
    expect(second.calls.append).toBeGreaterThan(0);
    expect(await logAfter(cluster, null)).toHaveLength(2);
  });
});

describe('a node that was deposed and does not know it', () => {
  /** Two nodes that both answer as the leader. The log of the first one ends before the last event. */
  const deposed = async () => {
    const stream = newStream();
    await store.append(stream, 'no_stream', newEvents(3));
    const next = await node();
    next.log.push(...double.log);
    const { length } = double.log;
    next.write(stream, [{ type: 'PaymentCaptured', data: {} }]);
    double.members = next.members = [double.port, next.port];
    double.leaderPort = double.port;
    next.leaderPort = next.port;
    const last = next.log[length]!;
    const position = String(last.position).padStart(20, '0');
    return { mark: { position: `${position}:${position}` as Position, id: last.id }, next, stream };
  };
  /** The first node notices that it was deposed. */
  const notices = (next: KurrentDbDouble) =>
    setTimeout(() => {
      double.everyRead = 'not_leader';
      double.leaderPort = next.port;
    }, 300);

  test('an event beyond the end of its log is not missing: the answer comes from the present leader', async () => {
    const { mark, next } = await deposed();
    const reader = following(store, mark.position);
    cleanUps.push(() => reader.close());
    const asked = store.missing([mark]);
    const read = store.eventAt(mark.position);
    notices(next);
    expect(await asked).toEqual([]);
    expect(await read).toMatchObject({ id: mark.id });
    await eventually(() => reader.items.some(({ kind }) => kind === 'caught_up'));
    expect(reader.failure()).toBeUndefined();
  });

  test('an event is not missing because its log holds another event in that place', async () => {
    const { mark, next, stream } = await deposed();
    double.write(stream, [{ type: 'PaymentCaptured', data: {} }]);
    expect(await store.eventAt(mark.position)).toMatchObject({ id: expect.not.stringContaining(mark.id) });
    const asked = store.missing([mark]);
    notices(next);
    expect(await asked).toEqual([]);
  });

  test('an event that the log of a cluster still does not hold after that time is missing', async () => {
    const { mark } = await deposed();
    const [missing, took] = await timed(() => store.missing([mark, ...Array.from({ length: 40 }, () => ({ ...mark, id: randomUUID() }))]));
    expect(missing).toHaveLength(41);
    expect(took).toBeGreaterThanOrEqual(QUICK.deposedMs);
    expect(took).toBeLessThan(QUICK.deposedMs + 2_000);
  });
});

describe('a list of addresses with one that accepts connections and never answers', () => {
  /**
   * A silent address may delay a start or a fail-over by at most this time. The client asks the addresses in a random order, so the test measures
   * several rounds.
   */
  const ALLOWED_MS = 2_000;
  const ROUNDS = 4;
  const usable = async (one: EventStore) => {
    const stream = newStream();
    await eventually(() => one.append(stream, 'no_stream', newEvents(1)));
    await eventually(async () => (await collect(one.read(stream))).length === 1);
  };
  /** Milliseconds from the start to the first append and read, and from the death of the leader to the next ones. */
  const times = async (addresses: (good: string) => string) => {
    const leader = await node();
    const follower = await node(undefined, leader);
    const led = ({ port }: KurrentDbDouble, ...members: KurrentDbDouble[]) => {
      for (const one of members) Object.assign(one, { members: members.map((member) => member.port), leaderPort: port });
    };
    led(leader, leader, follower);
    const good = `127.0.0.1:${leader.port},127.0.0.1:${follower.port}`;
    const [cluster, started] = await timed(() => open(`kurrentdb://${addresses(good)}?tls=false`, {}));
    const [, used] = await timed(() => usable(cluster));
    leader.kill();
    led(follower, follower);
    const [, over] = await timed(() => usable(cluster));
    return { start: started + used, over };
  };

  test('start and fail-over take no longer than with good addresses only (K17)', async () => {
    const silent = await silentServer();
    cleanUps.push(() => silent.close());
    const worst = { good: { start: 0, over: 0 }, silent: { start: 0, over: 0 } };
    for (let round = 0; round < ROUNDS; round++)
      for (const [list, addresses] of [
        ['good', (good: string) => good],
        ['silent', (good: string) => `127.0.0.1:${silent.port},${good}`],
      ] as const) {
        const { start, over } = await times(addresses);
        worst[list] = { start: Math.max(worst[list].start, start), over: Math.max(worst[list].over, over) };
      }
    expect(silent.accepted()).toBeGreaterThan(0);
    expect(worst.silent.start).toBeLessThan(worst.good.start + ALLOWED_MS);
    expect(worst.silent.over).toBeLessThan(worst.good.over + ALLOWED_MS);
  }, 600_000);
});

describe('opening', () => {
  test('needs no server yet, and works as soon as there is one', async () => {
    double.kill();
    const early = await open();
    expect(troubles).toContain('KurrentDB does not answer yet');
    await double.start();
    await eventually(() => early.append(newStream(), 'no_stream', newEvents(1)));
  });

  test('refuses a wrong URL in one line that does not repeat the password', async () => {
    const error = (await outcome(createKurrentDbEventStore('kurrentdb://admin:hush-hush@127.0.0.1:x?tls=false'))) as Error;
    expect(error.message).toMatch(/^KURRENTDB_URL is not a URL of KurrentDB/);
    expect(error.message).not.toContain('hush');
  });

  test('over TLS, with the user of the URL or without one: unary, verified against the CA that the URL names', async () => {
    const directory = await mkdtemp(join(tmpdir(), 'payfold-tls-'));
    const ca = join(directory, 'ca.pem');
    await writeFile(ca, authority);
    cleanUps.push(() => rm(directory, { recursive: true }));
    const secure = await node(
      grpc.ServerCredentials.createSsl(null, [{ private_key: Buffer.from(privateKey), cert_chain: Buffer.from(certificate) }]),
    );
    const stream = newStream();
    for (const [index, user] of ['', 'ops:p%40ss@'].entries()) {
      const tls = await open(secure.url(`tls=true&tlsCAFile=${ca}`, user));
      await tls.append(stream, index === 0 ? 'no_stream' : 0n, newEvents(1));
      expect(await collect(tls.read(stream))).toHaveLength(index + 1);
      const reader = following(tls, null);
      cleanUps.push(() => reader.close());
      await eventually(() => reader.events().length === index + 1);
    }
    // On a busy machine, an append may be tried again.
    expect(secure.calls.batchAppend).toBe(0);
    expect(secure.calls.append).toBeGreaterThanOrEqual(2);
    expect([...secure.calls.authorization]).toEqual([`Basic ${Buffer.from('ops:p@ss').toString('base64')}`]);
    const strange = await open(secure.url('tls=true'));
    expect(await outcome(strange.append(stream, 1n, newEvents(1), { timeoutMs: 300 }))).toBeInstanceOf(Error);
  });
});
