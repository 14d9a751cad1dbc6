import { describe, expect, test } from '@jest/globals';
import { batched, Convoy, shared } from './batch.js';
import { StatementTimeout } from './postgres/errors.js';

describe('calls that share a run', () => {
  test('one runs, one is queued, and all later calls share the queued one; a failed run does not stop it', async () => {
    const ends: ((error?: Error) => void)[] = [];
    const call = shared(() => new Promise<number>((resolve, reject) => ends.push((error) => (error ? reject(error) : resolve(ends.length)))));
    const first = call();
    const [second, third] = [call(), call()];
    expect(ends).toHaveLength(1);
    ends[0]!(new Error('away'));
    await expect(first).rejects.toThrow('away');
    await new Promise((done) => setImmediate(done));
    expect(ends).toHaveLength(2);
    ends[1]!();
    expect(await Promise.all([second, third])).toEqual([2, 2]);
    void call();
    expect(ends).toHaveLength(3);
  });
});

describe('calls that share a statement', () => {
  /** Statements that end when the test calls `ends`. */
  const held = () => {
    const sent: (readonly number[])[] = [];
    const ends: ((error?: Error) => void)[] = [];
    const run = (items: readonly number[]) =>
      new Promise<number[]>((resolve, reject) => {
        sent.push(items);
        ends.push((error) => (error ? reject(error) : resolve(items.map((item) => item * 10))));
      });
    return { sent, ends, run };
  };
  const turn = () => new Promise((done) => setImmediate(done));

  test('a lone call goes out at once; those that arrive meanwhile go together, each with its own answer', async () => {
    const { sent, ends, run } = held();
    const call = batched(run, { maxItems: 10, inFlight: 1 });
    const first = call(1);
    await turn();
    const others = [call(2), call(3), call(2)];
    await turn();
    expect(sent).toEqual([[1]]);
    ends[0]!();
    expect(await first).toBe(10);
    await turn();
    expect(sent).toEqual([[1], [2, 3, 2]]);
    ends[1]!();
    expect(await Promise.all(others)).toEqual([20, 30, 20]);
  });
  test('calls of one turn go together, at most so many at once and so many statements on their way', async () => {
    const { sent, ends, run } = held();
    const call = batched(run, { maxItems: 2, inFlight: 2 });
    const calls = [1, 2, 3, 4, 5].map(call);
    await turn();
    expect(sent).toEqual([[1, 2], [3, 4]]); // prettier-ignore
    ends[1]!();
    await turn();
    expect(sent).toHaveLength(3);
    ends[0]!();
    ends[2]!();
    expect(await Promise.all(calls)).toEqual([10, 20, 30, 40, 50]);
  });
  test('a statement that fails fails its own calls, and the next one goes out', async () => {
    const { ends, run } = held();
    const call = batched(run, { maxItems: 2, inFlight: 1 });
    const calls = Promise.allSettled([1, 2, 3].map(call));
    await turn();
    ends[0]!(new Error('away'));
    await turn();
    ends[1]!();
    expect((await calls).map(({ status }) => status)).toEqual(['rejected', 'rejected', 'fulfilled']);
  });
  test('answers that do not match the questions reach no caller', async () => {
    const call = batched(async () => [1], { maxItems: 10, inFlight: 1 });
    const outcomes = await Promise.allSettled([call(1), call(2)]);
    expect(outcomes.map(({ status }) => status)).toEqual(['rejected', 'rejected']);
  });

  test('an item that the database cannot hold fails no other call', async () => {
    const sent: number[][] = [];
    const call = batched(
      async (items: readonly number[]) => {
        sent.push([...items]);
        if (items.includes(2)) throw Object.assign(new Error('invalid byte sequence'), { code: '22021' });
        return items;
      },
      { maxItems: 10, inFlight: 1 },
    );
    const outcomes = await Promise.allSettled([1, 2, 3].map(call));
    expect(outcomes.map(({ status }) => status)).toEqual(['fulfilled', 'rejected', 'fulfilled']);
    expect(sent).toEqual([[1, 2, 3], [1], [2], [3]]);
  });
  test('a call that waited for too long is refused, and not sent', async () => {
    const { sent, ends, run } = held();
    let now = 0;
    const call = batched(run, { maxItems: 10, inFlight: 1, patience: { ms: 100, clock: { monotonic: () => now } } });
    const first = call(1);
    await turn();
    const late = call(2);
    now = 60;
    const inTime = call(3);
    now = 101;
    ends[0]!();
    expect(await first).toBe(10);
    await expect(late).rejects.toThrow(StatementTimeout);
    await turn();
    ends[1]!();
    expect(await inTime).toBe(30);
    expect(sent).toEqual([[1], [3]]); // prettier-ignore
  });
});

describe('a convoy', () => {
  /** A convoy with a clock that the test sets. Each function in `time.asleep` ends one wait. */
  const door = () => {
    const time = { now: 0, asleep: [] as (() => void)[] };
    const sleep = () => new Promise<void>((wake) => time.asleep.push(wake));
    return { time, convoy: new Convoy({ monotonic: () => time.now, sleep }) };
  };
  const turn = () => new Promise((done) => setImmediate(done));
  const enter = (convoy: Convoy, entered: number[], number: number) =>
    convoy.enter().then((leave) => {
      entered.push(number);
      return leave;
    });

  test('few, or one after the other, never wait', async () => {
    const { time, convoy } = door();
    const leave = await Promise.all(Array.from({ length: 5 }, () => convoy.enter()));
    leave.forEach((go) => go());
    for (let number = 0; number < 20; number++) (await convoy.enter())();
    expect(time.asleep).toEqual([]);
  });
  test('a crowd enters together, and for a while after', async () => {
    const { time, convoy } = door();
    const entered: number[] = [];
    const inside = await Promise.all(Array.from({ length: 5 }, () => convoy.enter()));
    for (const number of [1, 2, 3]) void enter(convoy, entered, number);
    await turn();
    expect([entered, time.asleep.length]).toEqual([[], 1]);
    for (const go of inside) go();
    // The whole group is admitted at once. Later requests wait for another group.
    time.asleep.pop()!();
    await turn();
    expect(entered).toEqual([1, 2, 3]);
    time.now = 99;
    void enter(convoy, entered, 4);
    await turn();
    expect([entered, time.asleep.length]).toEqual([[1, 2, 3], 1]);
    time.asleep.pop()!();
    await turn();
    time.now = 100;
    void enter(convoy, entered, 5);
    await turn();
    expect([entered, time.asleep.length]).toEqual([[1, 2, 3, 4, 5], 0]);
  });
});
