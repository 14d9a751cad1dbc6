import { describe, expect, test } from '@jest/globals';
import { systemClock } from '#kernel';
import { MovableClock } from '../../test/support/clock.js';
import { type SlotRefusal, Slots, type SlotsOptions } from './slots.js';

const options = (more: Partial<SlotsOptions> = {}): SlotsOptions => ({
  slots: 1,
  waitingAlone: 2,
  waitingShared: 2,
  refusal: 'too many',
  retryAfterSeconds: 5,
  ...more,
});
const A = { accountId: 'A', lane: 'partner', slots: 1 } as const;
const B = { ...A, accountId: 'B' };
const FOREVER_MS = 3_600_000;
const turn = () => new Promise((done) => setImmediate(done));
/** Follows a promise, so that a test can ask whether it is still pending. */
const followed = <T>(promise: Promise<T>) => {
  const state = { value: undefined as T | undefined, error: undefined as unknown, promise };
  promise.then(
    (value) => (state.value = value),
    (error: unknown) => (state.error = error),
  );
  return state;
};

test('it is idle from the end of the last request on, and not while one holds a slot or waits', async () => {
  const clock = new MovableClock();
  const slots = new Slots(clock, options());
  expect(slots.idleMs).toBe(Number.POSITIVE_INFINITY);
  const first = await slots.take(A, FOREVER_MS);
  const second = slots.take(B, FOREVER_MS);
  clock.advance(5_000);
  expect(slots.idleMs).toBe(0);
  first.release();
  const held = await second;
  clock.advance(5_000);
  expect(slots.idleMs).toBe(0);
  held.release();
  clock.advance(3_000);
  expect(Math.round(slots.idleMs / 1_000)).toBe(3);
});

test('an account may use more slots from 10 s after the last request of another one', async () => {
  const clock = new MovableClock();
  const slots = new Slots(clock, options({ slots: 5, slotsAlone: 10, waitingAlone: 12 }));
  /** How many of 12 requests get a slot at once. */
  const most = async () => {
    const asked = Array.from({ length: 12 }, () => followed(slots.take(A, FOREVER_MS)));
    await turn();
    const held = asked.filter(({ value }) => value !== undefined).length;
    for (const { promise } of asked) (await promise).release();
    return held;
  };
  expect(await most()).toBe(8);
  (await slots.take(B, FOREVER_MS)).release();
  expect(await most()).toBe(4);
  clock.advance(9_900);
  expect(await most()).toBe(4);
  clock.advance(200);
  expect(await most()).toBe(8);
});

describe('waiting for a slot', () => {
  test('the wait ends when a slot is given back, and tells how long it was', async () => {
    const clock = new MovableClock();
    const slots = new Slots(clock, options());
    const first = await slots.take(A, FOREVER_MS);
    expect(first.waitedMs).toBeLessThan(1_000);
    const second = followed(slots.take(A, FOREVER_MS));
    await turn();
    expect([second.value, slots.waiting('partner')]).toEqual([undefined, 1]);
    clock.advance(7_000);
    first.release();
    first.release();
    expect((await second.promise).waitedMs).toBeGreaterThanOrEqual(7_000);
    expect(slots.waiting('partner')).toBe(0);
  });

  test('after the time for the wait: RATE_LIMITED with the seconds to wait, and the place in the queue is gone', async () => {
    const clock = new MovableClock();
    const slots = new Slots(clock, options());
    const reasons: SlotRefusal[] = [];
    slots.watch((reason) => reasons.push(reason));
    const first = await slots.take(A, FOREVER_MS);
    const second = followed(slots.take(A, 10_000));
    const third = followed(slots.take(A, FOREVER_MS));
    await turn();
    clock.advance(10_001);
    await expect(second.promise).rejects.toMatchObject({ code: 'RATE_LIMITED', status: 429, options: { retryAfterSeconds: 5 } });
    expect(reasons).toEqual(['time']);
    first.release();
    await third.promise;
  });

  test('beyond the share of its account, a request is refused at once', async () => {
    const slots = new Slots(systemClock, options());
    const reasons: SlotRefusal[] = [];
    slots.watch((reason) => reasons.push(reason));
    const first = await slots.take(A, FOREVER_MS);
    const waiting = [slots.take(A, FOREVER_MS), slots.take(A, FOREVER_MS)];
    await expect(slots.take(A, FOREVER_MS)).rejects.toMatchObject({ code: 'RATE_LIMITED' });
    expect(reasons).toEqual(['share']);
    first.release();
    for (const one of waiting) (await one).release();
  });

  test('a client that is gone waits no longer, and its slot goes to the next', async () => {
    const slots = new Slots(systemClock, options());
    const first = await slots.take(A, FOREVER_MS);
    const gone = new AbortController();
    const second = followed(slots.take(A, FOREVER_MS, { gone: gone.signal }));
    const third = slots.take(B, FOREVER_MS);
    gone.abort();
    await expect(second.promise).rejects.toMatchObject({ code: 'RATE_LIMITED' });
    first.release();
    (await third).release();
    (await slots.take(A, 0)).release();
  });

  test('a slot that comes in the same moment in which the time ends is not lost', async () => {
    const clock = new MovableClock();
    const slots = new Slots(clock, options());
    const first = await slots.take(A, FOREVER_MS);
    const second = followed(slots.take(A, 10_000));
    await turn();
    clock.advance(10_001);
    first.release();
    await Promise.allSettled([second.promise]);
    second.value?.release();
    (await slots.take(B, 0)).release();
  });
});

describe('an absence', () => {
  test('gives the slot back, and then goes before new requests of the account', async () => {
    const slots = new Slots(systemClock, options());
    const order: string[] = [];
    const first = await slots.take(A, FOREVER_MS);
    let end: (result: string) => void = () => undefined;
    const absence = followed(first.away(() => new Promise<string>((resolve) => (end = resolve))));
    const second = await slots.take(A, 0);
    const third = followed(slots.take(A, FOREVER_MS).then((slot) => (order.push('third'), slot)));
    void absence.promise.then(() => order.push('first'));
    end('answer');
    await turn();
    expect(order).toEqual([]);
    second.release();
    expect(await absence.promise).toBe('answer');
    await turn();
    expect(order).toEqual(['first']);
    first.release();
    (await third.promise).release();
  });

  test('goes on without a slot after a second, since its work has begun', async () => {
    const clock = new MovableClock();
    const slots = new Slots(clock, options());
    const first = await slots.take(A, FOREVER_MS);
    let second: Awaited<ReturnType<Slots['take']>> | undefined;
    const absence = followed(first.away(async () => (second = await slots.take(A, 0))));
    await turn();
    expect(absence.value).toBeUndefined();
    clock.advance(1_001);
    await absence.promise;
    first.release();
    second!.release();
    (await slots.take(B, 0)).release();
  });

  test('whose request ended meanwhile leaves nothing behind, also after a failure', async () => {
    const slots = new Slots(systemClock, options());
    const first = await slots.take(A, FOREVER_MS);
    await expect(
      first.away(async () => {
        first.release();
        throw new Error('away');
      }),
    ).rejects.toThrow('away');
    (await slots.take(B, 0)).release();
  });
});

test('if others wait, a slot whose lease is over is taken away; without a lease it is kept', async () => {
  const clock = new MovableClock();
  const [leased, kept] = [new Slots(clock, options({ leaseMs: 1_000 })), new Slots(clock, options())];
  const first = await leased.take(A, FOREVER_MS);
  await kept.take(A, FOREVER_MS);
  const [second, other] = [followed(leased.take(B, FOREVER_MS)), followed(kept.take(B, FOREVER_MS))];
  for (let quarter = 0; quarter < 6; quarter++) {
    await turn();
    clock.advance(250);
  }
  const slot = await second.promise;
  expect(other.value).toBeUndefined();
  // The first holder has lost its slot. Its release must not end the lease of the second one.
  first.release();
  const third = followed(leased.take(A, FOREVER_MS));
  await turn();
  expect(third.value).toBeUndefined();
  slot.release();
  (await third.promise).release();
  clock.advance(FOREVER_MS);
  await expect(other.promise).rejects.toMatchObject({ code: 'RATE_LIMITED' });
});
