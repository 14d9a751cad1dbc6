import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import { randomUUID } from 'node:crypto';
import { systemClock } from '#kernel';
import { createPool, DatabaseUnavailable, migrate, transaction, type Client, type Pool } from '#platform';
import { memoryEventStore } from './memory.js';
import { createPostgresEventStore } from './postgres.js';
import { dropCheckpoint, lockCheckpoint, postgresCheckpoint, resetCheckpoint, type PostgresCheckpointOptions } from './checkpoint.js';
import { createSubscriber, ProjectionFailed, projectionStatus, watchProjection, type Subscriber, type SubscriberOptions } from './subscriber.js';
import { eventStoreMigrations } from './index.js';
import { Unavailable, type EventStore, type Position, type Recorded } from './event-store.js';
import { newEvent, newEvents, newStream } from '../../test/support/event-store.contract.js';
import { eventually } from '../../test/support/eventually.js';
import { freshDatabase } from '../../test/support/postgres.js';

const SEEN = 'create table seen (nth bigserial, id uuid not null, position text not null)';

let url: string;
let drop: () => Promise<void>;
let pool: Pool;
let store: EventStore;
let started: Subscriber[];
beforeEach(async () => {
  ({ url, drop } = await freshDatabase());
  pool = createPool(url, { name: 'spec', max: 12 });
  await migrate(pool, eventStoreMigrations);
  await pool.query(SEEN);
  store = createPostgresEventStore(url);
  started = [];
});
afterEach(async () => {
  await Promise.all(started.map((each) => each.stop()));
  await store.close();
  await pool.end();
  await drop();
});

/** Deliberately not idempotent: an event that is applied twice has two rows. */
const write = async (client: Client, events: readonly Recorded[]) => {
  await client.query('insert into seen (id, position) select * from unnest($1::uuid[], $2::text[])', [
    events.map(({ id }) => id),
    events.map(({ position }) => position),
  ]);
};

const subscriber = (
  options: Partial<SubscriberOptions> &
    PostgresCheckpointOptions & { apply?: typeof write; name?: string; streamPrefixes?: string[]; gatherMs?: number } = {},
) => {
  const { apply = write, name = 'seen', streamPrefixes, gatherMs = 0, searchPath, ...rest } = options;
  const checkpoint = postgresCheckpoint(pool, name, searchPath === undefined ? {} : { searchPath });
  const made = createSubscriber({ name, apply, gatherMs, ...(streamPrefixes && { streamPrefixes }) }, { store, checkpoint, ...rest });
  started.push(made);
  return made;
};

const append = async (count: number, stream = newStream()) => {
  const events = newEvents(count);
  let answer = { revision: -1n, position: '' as Position };
  for (let from = 0; from < count; from += 100)
    answer = await store.append(stream, from === 0 ? 'no_stream' : answer.revision, events.slice(from, from + 100));
  return { ids: events.map(({ id }) => id), position: answer.position };
};

const seen = async (table = 'seen') => (await pool.query<{ id: string }>(`select id from ${table} order by nth`)).rows.map(({ id }) => id);
const checkpoint = async () =>
  (
    await pool.query<{ position: string; epoch: string; owner: string | null }>(
      `select position, epoch, owner from projection_checkpoint where name = 'seen'`,
    )
  ).rows[0];

describe('a worker', () => {
  test('applies past and new events in order, and ends at the last event', async () => {
    const past = await append(1_200);
    const worker = subscriber();
    worker.start();
    await eventually(async () => (await seen()).length === 1_200);
    const more = await append(3);
    expect(await worker.caughtUpTo(more.position, 5_000)).toBe(true);
    expect(await seen()).toEqual([...past.ids, ...more.ids]);
    expect(await checkpoint()).toMatchObject({ position: more.position, epoch: '1' });
    expect(worker.state).toBe('active');
  });

  test('stops after the batch at hand, gives the lease back, and continues from its position', async () => {
    const { ids } = await append(300);
    let release = () => undefined as void;
    const gate = new Promise<void>((open) => (release = open));
    const worker = subscriber({ batchEvents: 100, apply: async (client, events) => (await gate, write(client, events)) });
    worker.start();
    await eventually(() => worker.state === 'active');
    const stopped = worker.stop();
    release();
    await stopped;
    expect(worker.state).toBe('stopped');
    expect(await checkpoint()).toMatchObject({ owner: null });
    expect([0, 100]).toContain((await seen()).length);
    worker.start();
    await eventually(async () => (await seen()).length === 300);
    expect(await seen()).toEqual(ids);
  });

  test('that may linger writes events that come one by one together, each once and in order, and a command need not wait for it', async () => {
    const sizes: number[] = [];
    const gathers = async (client: Client, events: readonly Recorded[]) => {
      sizes.push(events.length);
      await write(client, events);
    };
    const worker = subscriber({ gatherMs: 2_000, batchEvents: 20, apply: gathers });
    worker.start();
    await eventually(() => worker.state === 'active');
    const first: string[] = [];
    for (let count = 0; count < 20; count++) first.push(...(await append(1)).ids);
    await eventually(async () => (await seen()).length === 20);
    // 20 events must not be written one by one.
    expect(sizes.length).toBeLessThan(3);
    const { ids, position } = await append(1);
    await worker.runUntil(position, { timeoutMs: 20_000 });
    expect(await seen()).toEqual([...first, ...ids]);
    // A stop during the wait for more events neither loses events nor applies them twice.
    const more = await append(2);
    await worker.stop();
    worker.start();
    const last = await append(18);
    await eventually(async () => (await seen()).length === 41);
    expect(await seen()).toEqual([...first, ...ids, ...more.ids, ...last.ids]);
  });

  test('that gathers writes later events together with the first ones', async () => {
    // The pages of this store need no I/O. So each event that arrived while the worker gathered is there at the end of the wait.
    const memory = memoryEventStore();
    const sizes: number[] = [];
    const worker = subscriber({
      store: memory,
      gatherMs: 2_000,
      apply: async (client, events) => (sizes.push(events.length), write(client, events)),
    });
    worker.start();
    await eventually(() => worker.state === 'active');
    for (const count of [1, 3]) {
      await memory.append(newStream(), 'no_stream', newEvents(count));
      await systemClock.sleep(50);
    }
    await eventually(async () => (await seen()).length === 4);
    expect(sizes).toEqual([4]);
    await worker.stop();
  });

  test('that gathers is woken by a caller that waits for it in its process', async () => {
    const worker = subscriber({ gatherMs: 100_000 });
    worker.start();
    await eventually(() => worker.state === 'active');
    for (let round = 0; round < 3; round++) {
      const { position } = await append(2);
      // In the first round, the wait begins before the worker has the events. In the others, the worker already gathers.
      if (round > 0) await systemClock.sleep(300);
      expect(await worker.caughtUpTo(position, 60_000)).toBe(true);
    }
    expect(await seen()).toHaveLength(6);
  });

  test('of several only one is active; when it stops another takes over, and the epoch counts it', async () => {
    const workers = [subscriber(), subscriber(), subscriber()];
    workers.forEach((worker) => worker.start());
    await eventually(
      () => workers.filter(({ state }) => state === 'active').length === 1 && workers.filter(({ state }) => state === 'standby').length === 2,
    );
    const first = workers.find(({ state }) => state === 'active')!;
    const { position } = await append(5);
    await first.stop();
    await eventually(() => workers.some((worker) => worker !== first && worker.state === 'active'));
    expect(await first.caughtUpTo(position, 5_000)).toBe(true);
    expect(await seen()).toHaveLength(5);
    expect((await checkpoint())!.epoch).toBe('2');
  });

  test('is replaced when its lease runs out, by the clock of the database', async () => {
    const { position } = await append(5);
    await pool.query(`insert into projection_checkpoint values ('seen', '', 7, $1, clock_timestamp() + interval '700 milliseconds')`, [randomUUID()]);
    const worker = subscriber();
    worker.start();
    await eventually(() => worker.state === 'standby');
    expect(await worker.caughtUpTo(position, 10_000)).toBe(true);
    expect((await checkpoint())!.epoch).toBe('8');
  });

  test('that was asleep while another took over writes nothing any more', async () => {
    const { position, ids } = await append(10);
    let asleep = true;
    const sleeper = subscriber({
      // A worker that is asleep does not renew its lease. This one would do so after 20 s.
      leaseMs: 60_000,
      apply: async (client, events) => {
        await eventually(() => !asleep);
        await write(client, events);
      },
    });
    // The connection of `sleeper` is ended, as if its process had been stopped for long. `sleeper` still uses its old lease.
    sleeper.start();
    await eventually(async () => (await checkpoint())?.owner);
    await eventually(async () => (await pool.query(`select pg_terminate_backend(pid) from pg_stat_activity where state like 'idle in%'`)).rowCount);
    await pool.query(`update projection_checkpoint set lease_until = clock_timestamp() - interval '1 second'`);
    const awake = subscriber();
    awake.start();
    expect(await awake.caughtUpTo(position, 10_000)).toBe(true);
    asleep = false;
    await eventually(() => sleeper.state === 'standby');
    expect(await seen()).toEqual(ids);
  });

  test('tries again after an outage of the server', async () => {
    const { position, ids } = await append(10);
    let failures = 3;
    const errors: boolean[] = [];
    const worker = subscriber({
      apply: async (client, events) => {
        if (failures-- > 0) throw new DatabaseUnavailable('deadlock', { code: '40P01' });
        await write(client, events);
      },
      onError: (_, { retrying }) => errors.push(retrying),
    });
    worker.start();
    expect(await worker.caughtUpTo(position, 10_000)).toBe(true);
    expect(await seen()).toEqual(ids);
    expect(errors).toEqual([true, true, true]);
    expect(worker.retrying).toBeNull();
  });

  test('has its place saved although its prefixes pass nothing, so that waiting for the head ends', async () => {
    const worker = subscriber({ streamPrefixes: ['case-'] });
    worker.start();
    await append(3, newStream('account-'));
    const head = (await store.head())!;
    expect(await worker.caughtUpTo(head, 2_000)).toBe(true);
    await eventually(async () => (await checkpoint())?.position === head);
    expect(await seen()).toEqual([]);
  });

  test('has its position saved also if events of other prefixes arrive while it gathers', async () => {
    const { ids } = await append(2, newStream('case-'));
    const { position: head } = await append(3, newStream('account-'));
    const worker = subscriber({ streamPrefixes: ['case-'], gatherMs: 20 });
    worker.start();
    await eventually(async () => (await checkpoint())?.position === head);
    expect(await seen()).toEqual(ids);
  });

  test('saves its position although a command has just saved an earlier one', async () => {
    const { position: earlier } = await append(1, newStream('account-'));
    const { position: head } = await append(1, newStream('account-'));
    const raced = postgresCheckpoint(pool, 'seen');
    const commit = raced.commit.bind(raced);
    let isFirst = true;
    raced.commit = async (from, ...rest) => {
      if (isFirst) await commit(from, earlier, { owner: randomUUID(), ms: 0 }, null);
      isFirst = false;
      await commit(from, ...rest);
    };
    subscriber({ streamPrefixes: ['case-'], checkpoint: raced }).start();
    // No event comes any more, so nothing else moves the checkpoint.
    await eventually(async () => (await checkpoint())?.position === head);
    expect(isFirst).toBe(false);
  });

  test('three that compete while their connections are cut: every event once, in order', async () => {
    const workers = [subscriber({ batchEvents: 7 }), subscriber({ batchEvents: 20 }), subscriber({ batchEvents: 50 })];
    workers.forEach((worker) => worker.start());
    const ids: string[] = [];
    let position = '' as Position;
    for (let round = 0; round < 40; round++) {
      const one = await append(25);
      ids.push(...one.ids);
      position = one.position;
      if (round % 4 === 0)
        // The pool may give out a connection that an earlier round has killed, so an error is ignored.
        await pool
          .query(
            `select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and application_name = 'payfold spec' and pid <> pg_backend_pid()`,
          )
          .catch(() => undefined);
      if (round % 10 === 5) {
        const active = workers.find(({ state }) => state === 'active');
        await active?.stop();
        active?.start();
      }
      // A command of an operator, beside the workers.
      if (round % 13 === 6) await subscriber().runUntil(position, { timeoutMs: 10_000 });
    }
    expect(await workers[0]!.caughtUpTo(position, 20_000)).toBe(true);
    expect(await seen()).toEqual(ids);
  });
});

describe('an event that cannot be applied', () => {
  const poisoned = (poison: string, message = 'the account is closed') =>
    async function (client: Client, events: readonly Recorded[]) {
      await write(client, events);
      if (events.some(({ id }) => id === poison)) throw new Error(message);
    };

  test('stops the projection there, with everything before it applied, and says which and why', async () => {
    const { ids } = await append(400);
    const worker = subscriber({ apply: poisoned(ids[250]!) });
    worker.start();
    await eventually(() => worker.state === 'failed');
    expect(await seen()).toEqual(ids.slice(0, 250));
    expect(worker.failure).toMatchObject({ projection: 'seen', event: { id: ids[250] } });
    const status = await worker.status();
    expect(status).toMatchObject({ lagEvents: 150, leased: false, failure: { eventId: ids[250], message: 'the account is closed' } });
    expect(status.failure!.position! > status.position!).toBe(true);
    const { rows } = await pool.query<{ stack: string }>('select stack from projection_failure');
    expect(rows).toHaveLength(1);
    expect(rows[0]!.stack).toContain('subscriber.int.spec');
  });

  test('is met again after a restart, and resolved by a program that can apply it', async () => {
    const { ids, position } = await append(20);
    for (let start = 0; start < 2; start++) {
      const worker = subscriber({ apply: poisoned(ids[10]!) });
      worker.start();
      await eventually(() => worker.state === 'failed');
    }
    expect((await pool.query('select attempts, resolved_at from projection_failure')).rows).toEqual([{ attempts: 2, resolved_at: null }]);
    const mended = subscriber();
    mended.start();
    expect(await mended.caughtUpTo(position, 5_000)).toBe(true);
    expect(await seen()).toEqual(ids);
    expect((await mended.status()).failure).toBeNull();
  });

  test('is refused to a command too', async () => {
    const { ids, position } = await append(20);
    const error = await subscriber({ apply: poisoned(ids[5]!) })
      .runUntil(position, { timeoutMs: 5_000 })
      .catch((caught: unknown) => caught);
    expect(error).toBeInstanceOf(ProjectionFailed);
    expect((error as ProjectionFailed).event!.id).toBe(ids[5]);
    expect(await seen()).toEqual(ids.slice(0, 5));
  });

  test('a batch that takes longer than a statement may is applied in smaller ones, by a worker and by a command', async () => {
    const slow = async (client: Client, events: readonly Recorded[]) => {
      await write(client, events);
      await client.query(`set local statement_timeout = 200`);
      await client.query('select pg_sleep($1)', [events.length / 500]);
    };
    const { ids, position } = await append(200);
    const worker = subscriber({ apply: slow });
    worker.start();
    expect(await worker.caughtUpTo(position, 20_000)).toBe(true);
    await worker.stop();
    const more = await append(200);
    await subscriber({ apply: slow }).runUntil(more.position, { timeoutMs: 20_000 });
    expect(await seen()).toEqual([...ids, ...more.ids]);
  });

  test('a handler that swallows the error of a statement stops as well: its commit would be a rollback', async () => {
    await append(1);
    const worker = subscriber({ apply: async (client) => void (await client.query('select 1/0').catch(() => undefined)) });
    worker.start();
    await eventually(() => worker.state === 'failed');
    expect(worker.failure!.message).toContain('swallowed');
    expect((await checkpoint())!.position).toBe('');
  });

  test('a checkpoint from another event store stops it before it waits for ever', async () => {
    await append(1);
    await pool.query(`insert into projection_checkpoint values ('seen', '00000000000000009999', 1)`);
    const worker = subscriber();
    worker.start();
    await eventually(() => worker.state === 'failed');
    expect(worker.failure!.message).toContain('beyond the end');
  });
});

describe('a database that went back, as a standby without its last commits does', () => {
  /** Sets log, rows and checkpoint back to the time when there were `kept` events. */
  const goBack = (kept: number) =>
    transaction(pool, async (client) => {
      const [{ position }] = (await client.query<{ position: string }>('select position from seen where nth = $1', [kept])).rows as [
        { position: string },
      ];
      await client.query('delete from seen where nth > $1', [kept]);
      await client.query('delete from es.events where position > $1', [kept]);
      await client.query('update es.head set position = $1', [kept]);
      await client.query(`update projection_checkpoint set position = $1 where name = 'seen'`, [position]);
    });

  test('is not taken for caught up because more had been seen before', async () => {
    const worker = subscriber();
    const elsewhere = watchProjection(postgresCheckpoint(pool, 'seen'));
    worker.start();
    const { ids, position } = await append(8);
    const both = async (until: Position, timeoutMs: number) =>
      Promise.all([worker.caughtUpTo(until, timeoutMs), elsewhere.caughtUpTo(until, timeoutMs)]);
    expect(await both(position, 5_000)).toEqual([true, true]);
    await worker.stop();
    await goBack(5);
    await systemClock.sleep(2_100);
    const more = await append(1);
    expect(await both(more.position, 300)).toEqual([false, false]);
    worker.start();
    expect(await both(more.position, 5_000)).toEqual([true, true]);
    expect(await seen()).toEqual([...ids.slice(0, 5), ...more.ids]);
  });

  test('under a worker that stood at the end which is gone: it goes on from its checkpoint', async () => {
    const worker = subscriber();
    worker.start();
    const { ids, position } = await append(8);
    expect(await worker.caughtUpTo(position, 5_000)).toBe(true);
    await goBack(5);
    // The poll finds that the end of the log is gone.
    await systemClock.sleep(1_500);
    expect([worker.state, worker.failure]).toEqual(['active', null]);
    const more = await append(1);
    expect(await worker.caughtUpTo(more.position, 5_000)).toBe(true);
    expect(await seen()).toEqual([...ids.slice(0, 5), ...more.ids]);
  });
});

describe('a command that brings a projection up to its own event', () => {
  test('does so without a worker', async () => {
    const { ids, position } = await append(1_100);
    await subscriber().runUntil(position, { timeoutMs: 10_000 });
    expect(await seen()).toEqual(ids);
    expect(await checkpoint()).toMatchObject({ position, owner: null });
  });

  test('passes events of other prefixes', async () => {
    await append(2);
    const { position } = await append(2, newStream('portal-'));
    await subscriber({ streamPrefixes: ['payment-'] }).runUntil(position, { timeoutMs: 10_000 });
    expect(await seen()).toHaveLength(2);
    expect((await checkpoint())!.position).toBe(position);
  });

  test('lets a worker that moves do it', async () => {
    let batches = 0;
    const worker = subscriber();
    worker.start();
    await eventually(() => worker.state === 'active');
    const command = subscriber({ apply: async (client, events) => (batches++, write(client, events)) });
    for (let round = 0; round < 5; round++) await command.runUntil((await append(5)).position, { timeoutMs: 10_000 });
    expect(await seen()).toHaveLength(25);
    expect(batches).toBe(0);
  });

  test('takes part when the worker that holds the lease is dead, without waiting for the lease', async () => {
    await pool.query(`insert into projection_checkpoint values ('seen', '', 3, $1, clock_timestamp() + interval '1 minute')`, [randomUUID()]);
    const { ids, position } = await append(10);
    await subscriber().runUntil(position, { timeoutMs: 5_000 });
    expect(await seen()).toEqual(ids);
    expect((await checkpoint())!.epoch).toBe('3');
  });

  test('many at once apply every event once', async () => {
    const { ids, position } = await append(500);
    await Promise.all(Array.from({ length: 5 }, (_, index) => subscriber({ batchEvents: 30 + index }).runUntil(position, { timeoutMs: 20_000 })));
    expect(await seen()).toEqual(ids);
  });

  test('says so when the time is up', async () => {
    const { position } = await append(1);
    const slow = subscriber({
      apply: async () => {
        throw new DatabaseUnavailable('busy', { code: '53300' });
      },
    });
    await expect(slow.runUntil(position, { timeoutMs: 300 })).rejects.toThrow('busy');
    const beyond = (position + '').replace(/.$/, '9') as Position;
    await expect(subscriber({ name: 'other' }).runUntil(beyond, { timeoutMs: 300 })).resolves.toBeUndefined();
    await pool.query(`insert into projection_checkpoint values ('held', '', 3, $1, clock_timestamp() + interval '1 minute')`, [randomUUID()]);
    await expect(subscriber({ name: 'held' }).runUntil(position, { timeoutMs: 100 })).rejects.toBeInstanceOf(Unavailable);
  });
});

describe('from another process', () => {
  test('readers wait for the checkpoint', async () => {
    const watch = watchProjection(postgresCheckpoint(pool, 'seen'));
    expect(await watch.caughtUpTo(null, 0)).toBe(true);
    const { position } = await append(3);
    expect(await watch.caughtUpTo(position, 50)).toBe(false);
    const waiting = Promise.all(Array.from({ length: 20 }, () => watch.caughtUpTo(position, 5_000)));
    await subscriber().runUntil(position, { timeoutMs: 5_000 });
    expect(await waiting).toEqual(Array(20).fill(true));
  });

  test('the status has position, head and lag', async () => {
    expect(await projectionStatus({ name: 'seen' }, { store, checkpoint: postgresCheckpoint(pool, 'seen') })).toMatchObject({
      position: null,
      head: null,
      lagEvents: 0,
      lagMs: 0,
      epoch: 0n,
      failure: null,
    });
    const { position } = await append(3);
    const { position: head } = await append(4);
    await subscriber().runUntil(position, { timeoutMs: 5_000 });
    const behind = await projectionStatus({ name: 'seen' }, { store, checkpoint: postgresCheckpoint(pool, 'seen') });
    expect(behind).toMatchObject({ position, head, lagEvents: 4, leased: false });
    expect(behind.lagMs).toBeGreaterThan(0);
    expect(
      await projectionStatus({ name: 'seen', streamPrefixes: ['case-'] }, { store, checkpoint: postgresCheckpoint(pool, 'seen') }),
    ).toMatchObject({ lagEvents: 4, lagMs: 0 });
  });
});

describe('a rebuild', () => {
  test('runs the same handler from zero into another schema beside the live one, and is swapped in one transaction', async () => {
    const { ids } = await append(700);
    const live = subscriber();
    live.start();
    await eventually(async () => (await seen()).length === 700);
    await pool.query(`create schema rm_seen_2; set search_path = rm_seen_2; ${SEEN}; reset search_path`);
    const rebuild = subscriber({ name: 'seen/2', searchPath: 'rm_seen_2, public' });
    const progress: Position[] = [];
    await rebuild.runUntil((await store.head())!, { timeoutMs: 10_000, onProgress: (position) => progress.push(position) });
    expect(await seen('rm_seen_2.seen')).toEqual(ids);
    expect(progress.at(-1)).toBe(await store.head());
    const more = await append(5);
    await live.caughtUpTo(more.position, 5_000);
    await rebuild.runUntil(more.position, { timeoutMs: 10_000 });
    await transaction(pool, async (client) => {
      const [old, fresh] = [await lockCheckpoint(client, 'seen'), await lockCheckpoint(client, 'seen/2')];
      expect(fresh!.position).toBe(old!.position);
      await client.query('drop table public.seen; alter table rm_seen_2.seen set schema public');
      await resetCheckpoint(client, 'seen', fresh!.position);
      await dropCheckpoint(client, 'seen/2');
    });
    const last = await append(2);
    expect(await live.caughtUpTo(last.position, 5_000)).toBe(true);
    expect(await seen()).toEqual([...ids, ...more.ids, ...last.ids]);
  });

  test('a checkpoint put back to the start is applied again from there, even under a running worker', async () => {
    const { ids } = await append(50);
    const worker = subscriber();
    worker.start();
    await eventually(async () => (await seen()).length === 50);
    await transaction(pool, async (client) => {
      await lockCheckpoint(client, 'seen');
      await client.query('truncate seen');
      await resetCheckpoint(client, 'seen', null);
    });
    await store.append(newStream(), 'no_stream', [newEvent()]);
    await eventually(async () => (await seen()).length === 51);
    expect((await seen()).slice(0, 50)).toEqual(ids);
  });
});
