/** The cached end of the log: the events that a reader gets, and the cases in which the cache returns null. */
import { expect, test } from '@jest/globals';
import { systemClock } from '#kernel';
import { numericPosition } from './codec.js';
import type { Position, Recorded } from './event-store.js';
import { type Page, Tail } from './following.js';

const at = (number: number): Position => numericPosition(BigInt(number));
const event = (number: number, timeline: string): Recorded =>
  ({ id: `${timeline}-${number}`, stream: number % 2 ? 'odd-1' : 'even-1', position: at(number) }) as unknown as Recorded;

/** A log of numbered events, and a tail that begins at its end. */
const tailed = (length: number) => {
  const log = { length, timeline: 'first', reads: 0, broken: false, characters: 0, gate: null as Promise<void> | null };
  const read = async (after: Position): Promise<Page> => {
    log.reads += 1;
    const { length } = log;
    await log.gate;
    if (log.broken) throw new Error('the log has a gap');
    const from = Number(after);
    const to = Math.min(length, from + 500);
    const events = Array.from({ length: to - from }, (_, index) => event(from + index + 1, log.timeline));
    return { events, through: at(to), atEnd: to === length, characters: log.characters };
  };
  const tail = new Tail(systemClock, read);
  tail.beginAt(at(length));
  return { log, tail };
};
const positions = (page: Page | null) => page?.events.map(({ position }) => Number(position));

test('readers that one wake-up wakes share a read, each with a filter of its own', async () => {
  const { log, tail } = tailed(10);
  log.length = 14;
  const pages = await Promise.all([undefined, ['odd-'], ['even-'], ['none-']].map((prefixes) => tail.page(at(10), 500, prefixes)));
  expect(pages.map(positions)).toEqual([[11, 12, 13, 14], [11, 13], [12, 14], []]);
  expect(pages.map((page) => [page!.through, page!.atEnd])).toEqual(Array(4).fill([at(14), true]));
  expect(log.reads).toBe(1);
});

test('a later reader gets from memory what was already read, page by page', async () => {
  const { log, tail } = tailed(10);
  log.length = 20;
  await tail.page(at(10), 500, undefined);
  const first = await tail.page(at(10), 4, undefined);
  expect([positions(first), first!.through, first!.atEnd]).toEqual([[11, 12, 13, 14], at(14), false]);
  expect(positions(await tail.page(at(14), 500, ['odd-']))).toEqual([15, 17, 19]);
  expect(log.reads).toBe(1);
});

test('a read that began before the question does not answer it: an append in between would wait for the next wake-up', async () => {
  const { log, tail } = tailed(10);
  let open = () => undefined as void;
  log.gate = new Promise((resolve) => (open = resolve));
  log.length = 11;
  const early = tail.page(at(10), 500, undefined);
  while (log.reads === 0) await systemClock.sleep(1);
  log.length = 12;
  const late = tail.page(at(10), 500, undefined);
  open();
  expect(positions(await early)).toEqual([11]);
  expect(positions(await late)).toEqual([11, 12]);
});

test('a reader before its content, or behind the end of the log, must read for itself', async () => {
  const { log, tail } = tailed(10);
  log.length = 5_000;
  for (let after = 10; after < 5_000;) after = Number((await tail.page(at(after), 500, undefined))!.through);
  expect(await tail.page(at(10), 500, undefined)).toBeNull();
  expect(await tail.page(at(3_000), 500, undefined)).toBeNull();
  expect(positions(await tail.page(at(4_998), 500, undefined))).toEqual([4_999, 5_000]);
  expect(await tail.page(at(6_000), 500, undefined)).toBeNull();
});

test('an earlier end of the log is not reported as the end: the wake-up for later events may have passed already', async () => {
  const { log, tail } = tailed(10);
  log.length = 12;
  expect((await tail.page(at(10), 500, undefined))!.atEnd).toBe(true);
  log.length = 13;
  const held = await tail.page(at(11), 500, undefined);
  expect([positions(held), held!.atEnd]).toEqual([[12], false]);
  const looked = await tail.page(held!.through!, 500, undefined);
  expect([positions(looked), looked!.atEnd]).toEqual([[13], true]);
});

test('far behind every reader, it begins again where one reaches the end', async () => {
  const { log, tail } = tailed(10);
  log.length = 5_000;
  expect(await tail.page(at(5_000), 500, undefined)).toBeNull();
  tail.beginAt(at(5_000));
  log.length = 5_001;
  expect(positions(await tail.page(at(5_000), 500, undefined))).toEqual([5_001]);
});

test('of large events it holds the last page only', async () => {
  const { log, tail } = tailed(10);
  log.characters = 9_000_000;
  for (const length of [12, 14]) {
    log.length = length;
    await tail.page(at(length - 2), 500, undefined);
  }
  expect(await tail.page(at(10), 500, undefined)).toBeNull();
  expect(positions(await tail.page(at(12), 500, undefined))).toEqual([13, 14]);
});

test('a log that cannot be read is nothing that it knows about; it begins again where a reader comes to the end', async () => {
  const { log, tail } = tailed(10);
  log.broken = true;
  log.length = 12;
  expect(await tail.page(at(10), 500, undefined)).toBeNull();
  log.broken = false;
  expect(await tail.page(at(10), 500, undefined)).toBeNull();
  tail.beginAt(at(12));
  log.length = 13;
  expect(positions(await tail.page(at(12), 500, undefined))).toEqual([13]);
});

test('a reader is never left without an event because another read is under way', async () => {
  const { log, tail } = tailed(10);
  log.length = 13;
  await tail.page(at(10), 500, undefined);
  let open = () => undefined as void;
  log.gate = new Promise((resolve) => (open = resolve));
  const waiting = tail.page(at(13), 500, undefined);
  while (log.reads === 1) await systemClock.sleep(1);
  expect(positions(await tail.page(at(11), 500, undefined))).toEqual([12, 13]);
  log.length = 14;
  open();
  expect(positions(await waiting)).toEqual([]);
  log.gate = null;
  expect(positions(await tail.page(at(13), 500, undefined))).toEqual([14]);
});

test('a log that was replaced under it, longer than before, is not mixed with the old one', async () => {
  const { log, tail } = tailed(10);
  log.length = 13;
  expect(positions(await tail.page(at(10), 500, undefined))).toEqual([11, 12, 13]);
  log.timeline = 'second';
  log.length = 20;
  await tail.lookAgain();
  expect(await tail.page(at(11), 500, undefined)).toBeNull();
});
