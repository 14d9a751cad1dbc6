/** The time of a sandbox, with several processes over a real database: how they follow a move, its waits, its refusals, and connections that die. */
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { type Clock, systemClock } from '#kernel';
import { eventually } from '../../../test/support/eventually.js';
import { freshDatabase } from '../../../test/support/postgres.js';
import { createPool, type Pool } from './pool.js';
import { advanceSandboxTime, clockOf, refuseMovedTime, SandboxTime, sandboxTimeMigration } from './sandbox-time.js';
import { migrate } from './schema.js';

const DAY_MS = 86_400_000;
/** The specification of `sandbox advance`: every process follows within 2 s. */
const HEARD_MS = 2_000;

let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
beforeAll(async () => {
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'spec', max: 5 });
  await migrate(pool, [sandboxTimeMigration]);
});
afterAll(async () => {
  await pool.end();
  await database.drop();
});
beforeEach(() => pool.query('update sandbox_time set ahead_ms = 0'));

const cleanUps: (() => Promise<unknown>)[] = [];
afterEach(async () => {
  for (const cleanUp of cleanUps.splice(0).reverse()) await cleanUp();
});

/** A process of the sandbox, with a connection of its own. */
const startProcess = async (name = 'process', over = (pool: Pool) => pool): Promise<SandboxTime> => {
  const own = over(createPool(database.url, { name, max: 1 }));
  const time = new SandboxTime(null);
  cleanUps.push(
    () => own.end(),
    () => time.stop(),
  );
  await time.begin(own);
  return time;
};
const processes = (count: number) => Promise.all(Array.from({ length: count }, () => startProcess()));

const refused = () => new Error('refused');
const begins = (time: SandboxTime) => time.run(async () => true, refused).catch(() => false);
const nothing = async () => undefined;
const aheadDays = (time: SandboxTime) => Math.round(time.clock.aheadMs / DAY_MS);
const stored = async () => Number((await pool.query<{ ahead_ms: string }>('select ahead_ms from sandbox_time')).rows[0]!.ahead_ms);
const inDays = (days: number, from: Clock = systemClock) => from.now() + days * DAY_MS;
/** Moves the time to `days` ahead of the host's clock. */
const advance = (days: number, move: Parameters<typeof advanceSandboxTime>[3] = nothing) =>
  advanceSandboxTime(pool, systemClock, systemClock.realNow() + days * DAY_MS, move);
/** Kills the connections with this name, as the server does when a process dies. */
const killConnections = (name: string) =>
  pool.query('select pg_terminate_backend(pid) from pg_stat_activity where application_name = $1', [`payfold ${name}`]);

test('every process follows a move within 2 s; business time moves, the real time does not', async () => {
  const all = await processes(3);
  const moved = await advance(30);
  const since = performance.now();
  await eventually(() => all.every((time) => aheadDays(time) === 30), { timeoutMs: HEARD_MS });
  expect(performance.now() - since).toBeLessThan(HEARD_MS);
  for (const time of all) {
    expect(await begins(time)).toBe(true);
    expect(time.clock.now()).toBeGreaterThanOrEqual(Date.parse(moved.to));
    expect(Math.abs(time.clock.realNow() - Date.now())).toBeLessThan(DAY_MS);
  }
  expect(Date.parse(moved.to) - Date.parse(moved.from)).toBeGreaterThan(29.9 * DAY_MS);
});

test('a process that starts later knows the time before work may begin', async () => {
  await advance(30);
  const time = await startProcess();
  expect([aheadDays(time), time.isOpen]).toEqual([30, true]);
  expect((await clockOf(pool)).now()).toBeGreaterThan(inDays(29));
});

test('a process that starts during a move waits for its end', async () => {
  let started: Promise<SandboxTime> | undefined;
  await advance(30, async () => {
    started = startProcess();
    const early = await Promise.race([started, systemClock.sleep(300).then(() => 'waits' as const)]);
    expect(early).toBe('waits');
  });
  expect(aheadDays(await started!)).toBe(30);
});

test('a move waits for the work under way and lets no new work begin; afterwards work begins again', async () => {
  const all = await processes(2);
  let end = () => undefined as void;
  const work = all[0]!.run(() => new Promise<void>((resolve) => (end = resolve)), refused);
  let isMoved = false;
  const moving = advance(30).then(() => (isMoved = true));
  await eventually(() => all.every((time) => !time.isOpen), { timeoutMs: HEARD_MS });
  for (const time of all) expect(await begins(time)).toBe(false);
  await systemClock.sleep(500);
  expect([isMoved, await stored()]).toEqual([false, 0]);
  expect(all.map(aheadDays)).toEqual([0, 0]);
  end();
  await Promise.all([work, moving]);
  await eventually(() => all.every((time) => time.isOpen && aheadDays(time) === 30), { timeoutMs: HEARD_MS });
});

test('a watcher is called after each move, at the new time', async () => {
  const time = await startProcess();
  const seen: number[] = [];
  time.watch(() => seen.push(aheadDays(time)));
  for (const days of [1, 2]) {
    await advance(days);
    await eventually(() => seen.at(-1) === days, { timeoutMs: HEARD_MS });
  }
  expect(seen).toEqual([1, 2]);
});

describe('nothing is moved', () => {
  const refusal = (work: Promise<unknown>) => work.then(() => 'moved', (error: Error) => error.message); // prettier-ignore

  test('backwards, to the same moment, or too far', async () => {
    await advance(30);
    const before = await stored();
    expect(await refusal(advance(29))).toMatch(/^Time goes forward only: it is \d{4}-.*Z now\.$/);
    expect(await refusal(advance(30 + 367))).toMatch(/^--to must be at most 366 days ahead/);
    expect(await stored()).toBe(before);
  });

  test('if the rows that are due cannot be moved', async () => {
    const [time] = await processes(1);
    const fails = advance(30, async (client) => {
      await client.query('select 1 / 0');
    });
    expect(await refusal(fails)).toBe('division by zero');
    expect(await stored()).toBe(0);
    await eventually(() => begins(time!), { timeoutMs: HEARD_MS });
    expect(aheadDays(time!)).toBe(0);
  });

  test('while another command moves it', async () => {
    const other = await advance(1, async () => {
      expect(await refusal(advance(30))).toBe('Another command is moving the time; nothing was moved.');
    });
    expect(await stored()).toBe(other.aheadMs);
  });
});

describe('a connection is killed', () => {
  /** Begins a move over a pool of its own, whose connection can be killed. */
  const advanceAlone = (days: number, move: Parameters<typeof advanceSandboxTime>[3] = nothing) => {
    const own = createPool(database.url, { name: 'doomed', max: 1 });
    cleanUps.push(() => own.end());
    return advanceSandboxTime(own, systemClock, systemClock.realNow() + days * DAY_MS, move).then(() => 'moved', () => 'died'); // prettier-ignore
  };

  test('the command while it waits: the processes go on, and nothing was moved', async () => {
    const all = await processes(2);
    let end = () => undefined as void;
    const work = all[0]!.run(() => new Promise<void>((resolve) => (end = resolve)), refused);
    const dying = advanceAlone(30);
    await eventually(() => all.every((time) => !time.isOpen), { timeoutMs: HEARD_MS });
    await killConnections('doomed');
    expect(await dying).toBe('died');
    // The process with work under way still has its share, and goes on at once.
    await eventually(() => all.every((time) => time.isOpen), { timeoutMs: HEARD_MS });
    expect([await stored(), ...all.map(aheadDays)]).toEqual([0, 0, 0]);
    end();
    await work;
  });

  test('the command while it moves: nothing was moved', async () => {
    const all = await processes(2);
    const dying = advanceAlone(30, async () => void (await killConnections('doomed')));
    expect(await dying).toBe('died');
    await eventually(() => all.every((time) => time.isOpen), { timeoutMs: HEARD_MS });
    expect([await stored(), ...all.map(aheadDays)]).toEqual([0, 0, 0]);
  });

  test('a process with work under way: its share ends with its connection', async () => {
    const [other] = await processes(1);
    const gone = await startProcess('gone');
    void gone.run(() => new Promise(() => undefined), refused);
    await gone.stop();
    await advance(30);
    await eventually(() => aheadDays(other!) === 30, { timeoutMs: HEARD_MS });
  });
});

test('a process whose connection breaks lets no work begin until it has read the time again', async () => {
  let isReachable = true;
  const time = await startProcess('cut', (own) => {
    const connect = own.connect.bind(own);
    return Object.assign(own, { connect: () => (isReachable ? connect() : Promise.reject(new Error('away'))) });
  });
  isReachable = false;
  await killConnections('cut');
  await eventually(() => !time.isOpen, { timeoutMs: HEARD_MS });
  await advance(30);
  expect([await begins(time), aheadDays(time)]).toEqual([false, 0]);
  isReachable = true;
  await eventually(() => time.isOpen, { timeoutMs: HEARD_MS });
  expect(aheadDays(time)).toBe(30);
  // The new connection holds one share: the next move gets it.
  await advance(31);
  await eventually(() => aheadDays(time) === 31, { timeoutMs: HEARD_MS });
});

test('production does not start on a database whose time was moved', async () => {
  await refuseMovedTime(pool);
  await advance(30);
  await expect(refuseMovedTime(pool)).rejects.toThrow(/^the time of this database was moved ahead by 30 days .*; production does not start on it$/);
});
