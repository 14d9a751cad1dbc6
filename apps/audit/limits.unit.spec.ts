/** A reader of an export may pause, but not for ever. Waiting for it leaves no listeners on the connection. Audit requests take turns. */
import { beforeEach, describe, expect, test } from '@jest/globals';
import { PassThrough } from 'node:stream';
import { MovableClock } from '../../test/support/clock.js';
import { Download, LEAST_BYTES_PER_SECOND, MAX_EXPORT_MS, PAUSE_MS, Pace } from './limits.js';

const EVENTS = ['drain', 'finish', 'close', 'error'] as const;
/** A piece of which the connection takes nothing at once. At the least rate, it needs 60 s. */
const PIECE = 'x'.repeat(60 * LEAST_BYTES_PER_SECOND);
const RATE_MS = PAUSE_MS + 60_000;

let clock: MovableClock;
let raw: PassThrough;
let download: Download;
beforeEach(() => {
  clock = new MovableClock();
  raw = new PassThrough({ highWaterMark: 1 });
  download = new Download(raw, clock);
});

/** The state of a wait: `waits`, `ended`, or the limit that cut the export off. */
const watched = (work: Promise<void>) => {
  let state = 'waits';
  work.then(
    () => (state = 'ended'),
    (error: { limit: string }) => (state = error.limit),
  );
  return async () => {
    await new Promise((next) => setImmediate(next));
    return state;
  };
};

test('each wait takes its listeners away, and ends when the reader takes more or is gone', async () => {
  const listeners = () => EVENTS.map((event) => raw.listenerCount(event));
  const before = listeners();
  for (let wait = 0; wait < 3; wait++) {
    const waited = download.write('a piece');
    raw.read();
    await waited;
    expect(listeners()).toEqual(before);
  }
  const waited = download.write('a piece');
  raw.destroy();
  await waited;
  await download.write('a piece');
});

describe('a reader that takes nothing', () => {
  test('is cut off after the pause and the time that the least rate needs', async () => {
    const state = watched(download.write(PIECE));
    clock.advance(RATE_MS - 1_000);
    expect(await state()).toBe('waits');
    clock.advance(1_000);
    expect(await state()).toBe('rate');
  });
  test('is cut off at the end of the export as well', async () => {
    raw.write(PIECE);
    const state = watched(download.end());
    clock.advance(RATE_MS);
    expect(await state()).toBe('rate');
  });
});

test('a reader that pauses before each piece gets all of them, up to the time for a whole export', async () => {
  const pauses = Math.floor(MAX_EXPORT_MS / (RATE_MS - 1_000));
  for (let pause = 0; pause < pauses; pause++) {
    const state = watched(download.write(PIECE));
    clock.advance(RATE_MS - 1_000);
    raw.read();
    expect(await state()).toBe('ended');
  }
  const state = watched(download.write(PIECE));
  clock.advance(MAX_EXPORT_MS - pauses * (RATE_MS - 1_000));
  expect(await state()).toBe('time');
  await expect(download.write(PIECE)).rejects.toMatchObject({ limit: 'time' });
});

test.each([
  [0, 0, 0, 20],
  [60, 60, 0, 180],
  // A step that mostly waits for Postgres has rested meanwhile.
  [60, 15, 0, 10],
  [10_000, 10_000, 0, 300],
  [60, 60, 1_000, 180],
  // No partner and no payer has asked for anything meanwhile.
  [60, 60, 1_001, 10],
  [60, 60, Number.POSITIVE_INFINITY, 10],
])('after a step of %d ms, with the event loop busy for %d ms and payments idle for %d ms, the next one begins %d ms later', async (...row) => {
  const [tookMs, busyMs, idleMs, laterMs] = row;
  let nowMs = 0;
  let loopMs = 0;
  const sleep = (ms: number) => Promise.resolve(void (nowMs += ms));
  const pace = new Pace({ clock: { now: () => nowMs, realNow: () => nowMs, monotonic: () => nowMs, sleep }, slots: { idleMs } });
  pace.busyMs = () => loopMs;
  await pace.step(() => {
    loopMs += busyMs;
    return sleep(tookMs);
  });
  const endMs = nowMs;
  await pace.step(() => sleep(0));
  expect(nowMs - endMs).toBe(laterMs);
});
