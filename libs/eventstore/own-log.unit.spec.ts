/** If the log is another one or has lost events, the guard stops every append. An outage does not count as a loss. */
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import { appendFile, mkdtemp, readdir, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createLogger } from '#platform';
import { newEvents, newStream } from '../../test/support/event-store.contract.js';
import { earlierCopy, type ExchangeableStore, exchangeableStore } from '../../test/support/exchangeable-store.js';
import { INSTALLATION, Marks, writeInstallation } from '../../test/support/mark-book.js';
import { MovableClock } from '../../test/support/clock.js';
import { type EventStore, type Mark, OutcomeUnknown, type Position, StoreIncident, Unavailable } from './event-store.js';
import { INSTALLATION_STREAM } from './installation.js';
import { keptIntents, postgresMarkBook } from './marks.js';
import { memoryEventStore } from './memory.js';
import { OwnLog } from './own-log.js';

let clock: MovableClock;
let bare: EventStore;
let store: ExchangeableStore;
let marks: Marks;
let errors: string[];

/** Advances the clock, so that pauses of the guard end. */
let ticking: NodeJS.Timeout;
beforeEach(async () => {
  clock = new MovableClock();
  ticking = setInterval(() => clock.advance(100), 1);
  bare = memoryEventStore();
  store = exchangeableStore(bare);
  marks = new Marks(clock);
  errors = [];
  await writeInstallation(bare, clock);
});
afterEach(() => clearInterval(ticking));

const openLog = async ({ process = 'a', appendsProve = false, over = store } = {}): Promise<OwnLog> => {
  const log = { ...createLogger('silent', 'spec'), warn: () => undefined, error: (_fields: unknown, message: string) => void errors.push(message) };
  const own = new OwnLog({ store: over, book: marks.bookOf(process), installationId: INSTALLATION, clock, log: log as never, appendsProve });
  await own.begin();
  return own;
};
const append = async (log: EventStore, count = 1): Promise<Position> => (await log.append(newStream(), 'no_stream', newEvents(count))).position;
const foreignLog = async (events: number): Promise<EventStore> => {
  const other = memoryEventStore();
  if (events > 0) await other.append(newStream(), 'no_stream', newEvents(events));
  return other;
};

describe('a log that is whole', () => {
  test('appends of many processes and checks between them open no incident', async () => {
    const [a, b] = [await openLog(), await openLog({ process: 'b' })];
    for (let round = 0; round < 20; round++) {
      await Promise.all([append(a, 3), append(b)]);
      await Promise.all([a.verified(null), b.verified(null), a.keepMarks(), b.keepMarks()]);
    }
    expect([a.incident, b.incident, marks.incident]).toEqual([null, null, null]);
  });

  test('answers out of order and a repeated append open no incident', async () => {
    const own = await openLog();
    const [stream, events] = [newStream(), newEvents(1)];
    const { position } = await own.append(stream, 'no_stream', events);
    await append(own, 5);
    await own.verified(null);
    expect((await own.append(stream, 'no_stream', events)).position).toBe(position);
    await own.verified(null);
    expect(own.incident).toBeNull();
  });

  test.each([
    [
      'cannot be reached',
      (): never => {
        throw new Unavailable('away');
      },
    ],
    [
      'is read from a standby',
      (): never => {
        throw new Unavailable('this server is a standby');
      },
    ],
  ])('a store that %s is an outage, and no incident', async (_how, missing) => {
    const own = await openLog();
    await append(own);
    store.exchange({ ...bare, missing });
    await expect(own.verified(null)).rejects.toThrow(Unavailable);
    store.exchange(bare);
    await own.verified(null);
    expect(own.incident).toBeNull();
  });

  test('a read that misses an event once is repeated, and opens no incident', async () => {
    const own = await openLog();
    await append(own);
    let misses = 1;
    store.exchange({ ...bare, missing: async (asked: readonly Mark[]) => (misses-- > 0 ? asked : bare.missing(asked)) });
    await own.verified(null);
    expect(own.incident).toBeNull();
  });
});

describe('a log that is not ours, or not whole', () => {
  const LOSSES: readonly [string, () => Promise<EventStore>][] = [
    ['an empty log', () => foreignLog(0)],
    ['an earlier copy', () => earlierCopy(bare, 3)],
    ['a longer log of others', () => foreignLog(50)],
  ];

  test.each(LOSSES)('%s is found by the check before a call of a gateway', async (_what, other) => {
    const own = await openLog();
    await append(own, 9);
    await own.verified(null);
    store.exchange(await other());
    await expect(own.verified(null)).rejects.toThrow(StoreIncident);
    await expect(append(own)).rejects.toThrow('run payfold log status');
  });

  test.each(LOSSES)('%s that has taken the intent itself is found before the call', async (_what, other) => {
    const own = await openLog();
    await append(own, 9);
    await own.verified(null);
    store.exchange(await other());
    const intent = await append(own, 20);
    await expect(own.verified(intent)).rejects.toThrow(StoreIncident);
  });

  test('a log of others that has taken the first event of a process is found before the call', async () => {
    const own = await openLog();
    store.exchange(await foreignLog(3));
    const intent = await append(own);
    await expect(own.verified(intent)).rejects.toThrow(StoreIncident);
    expect(own.incident).toMatchObject({ kind: 'other_log' });
  });

  test('events are lost that were acknowledged after the last check', async () => {
    const own = await openLog();
    await append(own);
    await own.verified(null);
    const copy = await earlierCopy(bare, 2);
    await append(own);
    store.exchange(copy);
    // The copy now has other events at the lost positions.
    await append(copy, 5);
    await expect(own.verified(null)).rejects.toThrow(StoreIncident);
    expect(own.incident).toMatchObject({ kind: 'lost_events' });
  });

  test('an idle process finds what another process has lost', async () => {
    const [a, b] = [await openLog(), await openLog({ process: 'b' })];
    const copy = await earlierCopy(bare, 1);
    await append(a);
    await a.verified(null);
    await a.keepMarks();
    store.exchange(copy);
    await expect(b.verified(null)).rejects.toThrow(StoreIncident);
  });

  test('if another log answers a read and the right log is back, the events are refused and no incident is opened', async () => {
    const own = await openLog();
    const other = await earlierCopy(bare, 1);
    await Promise.all([append(own), append(other)]);
    const newestOf = async (log: EventStore): Promise<Mark> => (await log.eventAt((await log.head())!))!;
    store.exchange(other);
    const read = await newestOf(store);
    store.exchange(bare);
    expect(await own.verifiedRead(read)).toBe(false);
    expect(await own.verifiedRead(await newestOf(store))).toBe(true);
    expect(await own.verifiedRead(null)).toBe(true);
    expect(own.incident).toBeNull();
  });

  test('a start after the loss finds what dead processes knew', async () => {
    const dead = await openLog();
    const copy = await earlierCopy(bare, 1);
    await append(dead, 4);
    await dead.keepMarks();
    store.exchange(copy);
    const next = await openLog({ process: 'b' });
    expect(next.incident).toMatchObject({ kind: 'lost_events' });
  });

  test('a checkpoint beyond the end is an incident', async () => {
    marks = new Marks(clock, () => [{ name: 'payment-list@1', position: '00000000000000000009' as Position }]);
    const own = await openLog();
    expect(own.incident).toMatchObject({ kind: 'lost_events', message: expect.stringContaining('payment-list@1') });
  });

  test('an incident that one process found stops the others, and is reported once a minute', async () => {
    const [a, b] = [await openLog(), await openLog({ process: 'b' })];
    const stop = new AbortController();
    const running = b.run(stop.signal);
    await append(a);
    await a.verified(null);
    store.exchange(await foreignLog(3));
    await expect(a.verified(null)).rejects.toThrow(StoreIncident);
    for (let waited = 0; b.incident === null && waited < 200; waited++) await new Promise((wake) => setTimeout(wake, 5));
    expect(b.incident).toMatchObject({ foundBy: 'a' });
    expect(errors.length).toBe(2);
    stop.abort();
    await running;
  });

  test('when a person has closed the incident, the guard checks again, and forgets what the other log acknowledged', async () => {
    const own = await openLog();
    await append(own);
    await own.verified(null);
    store.exchange(await foreignLog(9));
    await append(own);
    await expect(own.verified(null)).rejects.toThrow(StoreIncident);
    marks.close();
    // The wrong log is still there.
    await expect(own.begin().then(() => own.refuse())).rejects.toThrow(StoreIncident);
    store.exchange(bare);
    marks.close();
    await own.begin();
    expect(own.incident).toBeNull();
    await append(own);
    await own.verified(null);
  });

  test('an append that is under way when an incident opens has an unknown outcome at once', async () => {
    const own = await openLog();
    await append(own);
    await own.verified(null);
    store.exchange({ ...(await foreignLog(0)), append: () => new Promise(() => undefined) });
    const [hanging, checked] = [append(own), own.verified(null)];
    await expect(checked).rejects.toThrow(StoreIncident);
    await expect(hanging).rejects.toThrow(OutcomeUnknown);
  });
});

describe('a store whose sessions are checked', () => {
  test('a new session on a log that lost an event is refused, one on the whole log is not', async () => {
    const own = await openLog({ appendsProve: true });
    await append(own, 2);
    await own.checkSession((asked) => bare.missing(asked), 'server');
    const copy = await earlierCopy(bare, 1);
    await expect(own.checkSession((asked) => copy.missing(asked), 'server')).rejects.toThrow(StoreIncident);
    await expect(own.verified(null)).rejects.toThrow(StoreIncident);
  });

  test.each([
    ['has written the mark of an event that is lost', false],
    ['has opened an incident', true],
  ])('a process that stood still appends nothing over a new session if another one %s', async (_name, isOpen) => {
    const [a, b] = [await openLog({ appendsProve: true }), await openLog({ process: 'b', appendsProve: true })];
    await append(a);
    await a.verified(null);
    const copy = await earlierCopy(bare, 2);
    await append(b);
    await b.verified(null);
    await b.keepMarks();
    store.exchange(copy);
    if (isOpen) await expect(b.verified(null)).rejects.toThrow(StoreIncident);
    await expect(a.checkSession((asked) => copy.missing(asked), 'server')).rejects.toThrow(StoreIncident);
  });

  test('a session of another server waits until the other processes have looked', async () => {
    const [a, b] = [await openLog({ appendsProve: true }), await openLog({ process: 'b', appendsProve: true })];
    await append(a);
    await a.checkSession((asked) => bare.missing(asked), 'server');
    const copy = await earlierCopy(bare, 2);
    // `b` is told of this event, and has not written its mark when the server is replaced.
    await append(b);
    store.exchange(copy);
    const stop = new AbortController();
    const running = b.run(stop.signal);
    await expect(a.checkSession((asked) => copy.missing(asked), 'another server')).rejects.toThrow(StoreIncident);
    stop.abort();
    await running;
  });

  test('a slow answer that misses an event once is asked for again', async () => {
    const own = await openLog({ appendsProve: true });
    await append(own);
    let misses = 1;
    const missing = async (asked: readonly Mark[]) => {
      if (misses-- <= 0) return bare.missing(asked);
      await clock.sleep(3_100);
      return asked;
    };
    store.exchange({ ...bare, missing });
    await own.verified(null);
    expect(own.incident).toBeNull();
  });
});

describe('an incident that another process has written down', () => {
  const openIncident = () => marks.bookOf('other').open({ kind: 'lost_events', message: 'it does not hold an event', mark: null });

  test('counts also while the store does not answer', async () => {
    const own = await openLog();
    await append(own);
    await own.verified(null);
    await openIncident();
    store.exchange({ ...bare, missing: () => Promise.reject(new Unavailable('away')) });
    await expect(own.verified(null)).rejects.toThrow(StoreIncident);
  });

  test('leaves the newest event of this process in the book, which a resume asks for', async () => {
    const own = await openLog();
    const position = await append(own);
    await openIncident();
    await expect(own.verified(null)).rejects.toThrow(StoreIncident);
    await own.keepMarks();
    expect(marks.rows.get('a')?.acknowledged?.position).toBe(position);
  });
});

describe('intents that are kept outside of the log', () => {
  test('an intent is kept before its call may begin; if the log loses it at once, the next process finds the loss', async () => {
    const own = await openLog();
    await append(own, 3);
    await own.verified(null);
    await own.keepMarks();
    const copy = await earlierCopy(bare, 4);
    await own.verified(await append(own), { paymentId: 'p' });
    expect([...marks.kept.values()].flat(2)).toMatchObject([{ intent: { paymentId: 'p' }, mark: { id: expect.any(String) } }]);
    store.exchange(copy);
    expect((await openLog({ process: 'b', appendsProve: true })).incident).toMatchObject({ kind: 'lost_events' });
  });

  test('if it cannot be kept, the call does not begin', async () => {
    const own = await openLog();
    marks.bookOf = () => ({ ...new Marks(clock).bookOf('x'), keep: () => Promise.reject(new Error('the disk is full')) });
    const other = await openLog({ process: 'b' });
    await expect(other.verified(await append(other), {})).rejects.toThrow('the disk is full');
    expect(own.incident).toBeNull();
  });

  test('files: every line that was kept is read; a turn deletes what came before it; a half line does not count', async () => {
    const folder = await mkdtemp(join(tmpdir(), 'payfold-marks-'));
    const options = { pool: null as never, folder, installationId: 'i', processId: 'p', name: 'spec', pid: 1, clock };
    const book = postgresMarkBook(options);
    const one = (n: number) => ({ mark: { position: `${n}` as Position, id: `${n}` }, intent: { n } });
    const numbers = async () => (await keptIntents(options)).map(({ intent }) => (intent as { n: number }).n);
    await book.keep([one(1), one(2)]);
    const forget = book.turn();
    await book.keep([one(3)]);
    await appendFile(join(folder, 'q-0.intents'), '{"installationId":"i","gener');
    expect(await numbers()).toEqual([1, 2, 3]);
    await forget();
    expect(await numbers()).toEqual([3]);
    // The emptied file is used again, also for more than it has room for.
    const forgetThird = book.turn();
    await book.keep([{ ...one(4), intent: { n: 4, text: 'x'.repeat(600_000) } }, one(5)]);
    await forgetThird();
    await book.keep([one(6)]);
    expect([await numbers(), (await readdir(folder)).length]).toEqual([[4, 5, 6], 3]);
    // Another process may delete a file that was not written for a minute. So nothing is added to it.
    clock.advance(31_000);
    await book.turn()();
    await book.keep([one(7)]);
    expect([await numbers(), (await readdir(folder)).filter((name) => name.startsWith('p-'))]).toEqual([[7], ['p-2.intents']]);
    await rm(folder, { recursive: true });
  });
});

test('a log without identity that holds an event which a check has found before is ours, and has lost events', async () => {
  const own = await openLog();
  await append(own, 2);
  await own.verified(null);
  store.exchange({
    ...bare,
    read: async function* (stream, from, max) {
      if (stream !== INSTALLATION_STREAM) yield* bare.read(stream, from, max);
    },
  });
  clock.advance(10_000);
  await expect(own.verified(null)).rejects.toThrow(StoreIncident);
  expect(own.incident).toMatchObject({ kind: 'lost_events' });
});
