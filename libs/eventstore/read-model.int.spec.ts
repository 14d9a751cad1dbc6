/** Shapes of read models on a real Postgres. */
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import { randomUUID } from 'node:crypto';
import { setTimeout } from 'node:timers/promises';
import { systemClock } from '#kernel';
import { type Client, copyInto, createPool, livingProcesses, migrate, type Pool, processMigration, recordProcess } from '#platform';
import { newEvents, newStream } from '../../test/support/event-store.contract.js';
import { eventually } from '../../test/support/eventually.js';
import { freshDatabase } from '../../test/support/postgres.js';
import { type EventStore, type Recorded, Unavailable } from './event-store.js';
import { eventStoreMigrations } from './open.js';
import { createPostgresEventStore } from './postgres.js';
import {
  checkpointOf,
  dropUnusedShapes,
  type Load,
  prepareReadModels,
  type ReadModel,
  ReadModels,
  rebuild,
  schemaOf,
  searchPathOf,
  shapeStatus,
} from './read-model.js';

const model = (shape: number, change: Partial<ReadModel> = {}): ReadModel => ({
  name: 'seen-events',
  shape,
  streamPrefixes: ['payment-'],
  tables: ['seen'],
  createTables: 'create table seen (id uuid not null)',
  createIndexes: 'alter table seen add primary key (id)',
  apply: async (client, events) => {
    await client.query('insert into seen select * from unnest($1::uuid[])', [events.map(({ id }: Recorded) => id)]);
  },
  ...change,
});

let database: Awaited<ReturnType<typeof freshDatabase>>;
let store: EventStore;
let pools: Pool[];
const poolOf = (...models: readonly ReadModel[]): Pool => {
  const pool = createPool(database.url, { name: 'spec', max: 6, searchPath: searchPathOf(models) });
  pools.push(pool);
  return pool;
};
const readModels = (pool: Pool, ...models: readonly ReadModel[]) => new ReadModels(models, { store, pool, clock: systemClock, batchEvents: 10 });
const seen = async (pool: Pool, shape: number) =>
  Number((await pool.query<{ n: string }>(`select count(*) as n from ${schemaOf(model(shape))}.seen`)).rows[0]!.n);
const append = () => store.append(newStream(), 'no_stream', newEvents(50));

beforeEach(async () => {
  database = await freshDatabase();
  store = createPostgresEventStore(database.url);
  pools = [];
  await migrate(poolOf(), [...eventStoreMigrations, processMigration]);
});
afterEach(async () => {
  await store.close();
  await Promise.all(pools.map((pool) => pool.end()));
  await database.drop();
});

/** Follows the log until the shapes are built and have reached its end. */
const build = async (models: ReadModels) => {
  const stop = new AbortController();
  await models.follow(stop.signal);
  const head = (await store.head())!;
  for (const subscriber of models.all()) await subscriber.runUntil(head, { timeoutMs: 10_000 });
  await Promise.all(models.all().map((subscriber) => subscriber.stop()));
};

test('a new shape is built beside the old one, which goes on', async () => {
  const [old, next] = [poolOf(model(1)), poolOf(model(2))];
  await prepareReadModels(old, [model(1)], store);
  await append();
  await build(readModels(old, model(1)));
  await prepareReadModels(next, [model(2)], store);
  // Makes the events older, because a shape that is less than two seconds behind counts as built.
  await old.query(`update es.events set stored_at = stored_at - interval '1 minute'`);
  expect(await readModels(next, model(2)).areBuilt()).toBe(false);
  expect(await seen(old, 1)).toBe(50);
  await build(readModels(next, model(2)));
  await append();
  await build(readModels(old, model(1)));
  expect([await seen(old, 1), await seen(next, 2)]).toEqual([100, 50]);
  expect((await shapeStatus(next)).map(({ shape, isBuilt }) => [shape, isBuilt])).toEqual([
    [1, true],
    [2, true],
  ]);
});

test('a shape with other tables under the same number is refused, and nothing is changed', async () => {
  const pool = poolOf(model(1));
  await prepareReadModels(pool, [model(1)], store);
  const changed = model(1, { createTables: 'create table seen (id uuid not null, note text)' });
  const other = { ...model(1), name: 'others' };
  await expect(prepareReadModels(pool, [other, changed], store)).rejects.toThrow(
    'read model seen-events: the database holds shape 1 with other tables; raise the number of the shape (docs/changing.md); nothing was changed',
  );
  expect((await shapeStatus(pool)).map(({ name }) => name)).toEqual(['seen-events']);
});

test('a build that was cut off continues', async () => {
  const pool = poolOf(model(1));
  await append();
  await prepareReadModels(pool, [model(1)], store);
  let batches = 0;
  let goOn = (): void => undefined;
  const halted = new Promise<void>((resolve) => (goOn = resolve));
  const halting = model(1, {
    apply: async (client, events) => {
      if (++batches === 3) await halted;
      await model(1).apply(client, events);
    },
  });
  // The connections of `dying` are ended in the middle of a batch, as if its process were killed.
  const dying = poolOf(model(1));
  const [stop, models] = [new AbortController(), readModels(dying, halting)];
  const following = models.follow(stop.signal);
  await eventually(() => batches === 3);
  expect(await seen(pool, 1)).toBe(20);
  await pool.query(`select pg_terminate_backend(pid) from pg_stat_activity where state = 'idle in transaction'`);
  await pool.query(`update projection_checkpoint set owner = null, lease_until = null`);
  stop.abort();
  goOn();
  await following;
  await models.of(halting).stop();
  expect(await seen(pool, 1)).toBe(20);
  await build(readModels(pool, model(1)));
  expect(await seen(pool, 1)).toBe(50);
});

test('a shape that was unused for seven days is dropped, except those of this release and of living processes', async () => {
  const pool = poolOf(model(3));
  for (const shape of [1, 2, 3]) await prepareReadModels(pool, [model(shape)], store);
  await pool.query(`update read_model set used_at = now() - interval '7 days 1 minute'`);
  const other = await recordProcess(pool, { id: randomUUID(), role: 'api', pid: 1, readModels: ['seen-events@2'], clock: systemClock });
  expect(await dropUnusedShapes(pool, [model(3)])).toEqual(['rm_seen_events_1']);
  expect((await shapeStatus(pool)).map(({ shape }) => shape)).toEqual([2, 3]);
  await expect(seen(pool, 1)).rejects.toThrow('does not exist');
  await other.stop();
});

test('a change is in force once every shape that a living process reads has passed it; else the process is named', async () => {
  const pool = poolOf(model(2));
  for (const shape of [1, 2]) await prepareReadModels(pool, [model(shape)], store);
  const { position } = await append();
  const other = await recordProcess(pool, {
    id: randomUUID(),
    role: 'api',
    pid: 4711,
    readModels: ['seen-events@1'],
    clock: systemClock,
    release: '0.1.9',
  });
  const ours = readModels(pool, model(2));
  await expect(ours.inForce(model(2), position, 1_000)).rejects.toThrow(
    /^The change is recorded, but process 4711 on \S+ \(api, release 0\.1\.9\) still reads the state before it \(seen-events@1\)\./,
  );
  const late = ours.inForce(model(2), position, 10_000);
  await build(readModels(poolOf(model(1)), model(1)));
  await late;
  expect([await seen(pool, 1), await seen(pool, 2)]).toEqual([50, 50]);
  await other.stop();
});

test('a process that stands still while the change waits is named, also once it counts as gone; one that has gone does not', async () => {
  const pool = poolOf(model(2));
  for (const shape of [1, 2]) await prepareReadModels(pool, [model(shape)], store);
  const { position } = await append();
  const other = await recordProcess(pool, { id: randomUUID(), role: 'worker', pid: 4712, readModels: ['seen-events@1'], clock: systemClock });
  // The other process was last seen 29 s ago, so in one second it counts as gone.
  await pool.query(`update payfold_process set seen_at = clock_timestamp() - interval '29 s'`);
  const ours = readModels(pool, model(2));
  await expect(ours.inForce(model(2), position, 2_500)).rejects.toThrow(/process 4712 on \S+ \(worker/);
  expect(await livingProcesses(pool)).toEqual([]);
  // When this wait begins, the other process counts as gone already.
  await ours.inForce(model(2), position, 2_500);
  await pool.query('update payfold_process set seen_at = clock_timestamp()');
  const waiting = ours.inForce(model(2), position, 10_000);
  await other.stop();
  await waiting;
});

test('a read model that stopped keeps a change from being in force; the answer says that it is recorded', async () => {
  const stuck = model(1, { apply: () => Promise.reject(new Error('a row that nobody expected')) });
  const pool = poolOf(stuck);
  await prepareReadModels(pool, [stuck], store);
  const { position } = await append();
  await expect(readModels(pool, stuck).inForce(stuck, position, 1_000)).rejects.toThrow(
    /^The change is recorded, but requests still read the state before it: .*a row that nobody expected/,
  );
});

describe('a rebuild', () => {
  const again = (pool: Pool, of = model(1), stop?: AbortSignal) => rebuild(of, { store, pool, now: () => performance.now(), ...(stop && { stop }) });
  const placeOf = async (pool: Pool) =>
    (await pool.query<{ position: string }>('select position from projection_checkpoint where name = $1', [checkpointOf(model(1))])).rows[0]
      ?.position;
  const built = async (): Promise<Pool> => {
    const pool = poolOf(model(1));
    await prepareReadModels(pool, [model(1)], store);
    await append();
    await build(readModels(pool, model(1)));
    return pool;
  };
  /** Copies the ids of all events. `pause` lasts before the end of the COPY. */
  const copyIds = async (client: Client, part: AsyncIterable<readonly Recorded[]>, pause: () => Promise<void> = () => Promise.resolve()) => {
    const copy = copyInto(client, 'seen', ['id']);
    for await (const events of part) for (const { id } of events) await copy.write([id]);
    await pause();
    await copy.end();
    return 0;
  };
  const beyond = (pool: Pool) => pool.query(`update projection_checkpoint set position = '00000000000000009999'`);
  const cutTo = async (pool: Pool, end: number) => {
    await pool.query('delete from es.events where position > $1', [end]);
    await pool.query('update es.head set position = $1', [end]);
  };

  test('ends at the head where the live checkpoint lies beyond the log', async () => {
    const pool = await built();
    await beyond(pool);
    const head = (await store.head())!;
    expect(await again(pool)).toMatchObject({ position: head, events: 50, lagEvents: 0, rows: [{ table: 'seen', live: 50, rebuilt: 50 }] });
    expect(await placeOf(pool)).toBe(head);
    await append();
    await build(readModels(pool, model(1)));
    expect(await seen(pool, 1)).toBe(100);
  });

  test('of a log that lost its tail shows what the log holds, also when nothing is left', async () => {
    const pool = await built();
    await cutTo(pool, 30);
    expect(await again(pool)).toMatchObject({ position: '00000000000000000030', rows: [{ live: 50, rebuilt: 30 }] });
    expect(await placeOf(pool)).toBe('00000000000000000030');
    await cutTo(pool, 0);
    expect(await again(pool)).toMatchObject({ position: null, events: 0, rows: [{ live: 30, rebuilt: 0 }] });
    expect(await placeOf(pool)).toBe('');
  });

  test('takes as long as it needs: no limit of its pool ends a COPY, an index or the count of rows', async () => {
    await built();
    const hurried = createPool(database.url, { name: 'spec', max: 6, searchPath: searchPathOf([model(1)]), statementTimeoutMs: 100, byKey: true });
    pools.push(hurried);
    const longerThanTheLimits = 1.3;
    const slow = model(1, {
      tables: ['seen', 'slow'],
      createTables: `create table seen (id uuid not null);
        create view slow as select 1 as one where (select pg_sleep(${longerThanTheLimits}) is not null)`,
      createIndexes: `alter table seen add primary key (id); select pg_sleep(${longerThanTheLimits})`,
      load: {
        add: async (client, part) => {
          // Without scans and hash joins, a load would compare each row with each other one.
          expect((await client.query('show enable_hashjoin')).rows).toEqual([{ enable_hashjoin: 'on' }]);
          return copyIds(client, part, () => setTimeout(1_000 * longerThanTheLimits));
        },
      },
    });
    await hurried.query(`create table ${schemaOf(model(1))}.slow ()`);
    expect(await again(hurried, slow)).toMatchObject({ events: 50, rows: [{ rebuilt: 50 }, { table: 'slow', rebuilt: 1 }] });
    await expect(hurried.query('select pg_sleep(1)')).rejects.toThrow('timeout');
  });

  test('leaves alone the tables of another one that runs', async () => {
    const pool = await built();
    const add: Load['add'] = async (client, part) => {
      await expect(again(pool)).rejects.toThrow('another rebuild is running');
      return copyIds(client, part);
    };
    expect(await again(pool, model(1, { load: { add } }))).toMatchObject({ rows: [{ live: 50, rebuilt: 50 }] });
  });

  test('holds what the live rows hold, though they were ahead of it until the swap', async () => {
    const pool = await built();
    // The rebuild reads the head twice before the swap, and gets an early head both times. The live rows have later events already.
    const early = await store.head();
    const looks = [early, early];
    const seesLess = { ...store, head: async () => looks.shift() ?? (await store.head()) };
    await append();
    await build(readModels(pool, model(1)));
    const report = await rebuild(model(1), { store: seesLess, pool, now: () => performance.now() });
    expect(report).toMatchObject({ position: await store.head(), rows: [{ live: 100, rebuilt: 100 }] });
  });

  test.each([
    ['while an index is built', model(1, { createIndexes: 'select pg_sleep(60)', load: { add: copyIds } }), null],
    ['while the log does not answer', model(1), 'lock table es.events in access exclusive mode'],
    ['while a row is written', model(1, { apply: async (client) => void (await client.query('select pg_sleep(60)')) }), null],
  ])('that is stopped %s ends at once and leaves the live rows', async (_when, stuck, lock) => {
    const pool = await built();
    const other = await pool.connect();
    await other.query('begin');
    if (lock) await other.query(lock);
    const stop = new AbortController();
    const running = again(pool, stuck, stop.signal).catch((error: unknown) => error);
    await eventually(async () => {
      const { rows } = await pool.query(
        `select from pg_stat_activity where datname = current_database() and (query ~ '^select pg_sleep' or wait_event_type = 'Lock') and state = 'active'`,
      );
      return rows.length > 0;
    });
    const begun = performance.now();
    stop.abort(new Error('stopped by the spec'));
    expect(await running).toMatchObject({ message: 'stopped by the spec' });
    expect(performance.now() - begun).toBeLessThan(2_000);
    await other.query('rollback');
    other.release();
    expect(await seen(pool, 1)).toBe(50);
    expect(await again(pool)).toMatchObject({ events: 50, rows: [{ live: 50, rebuilt: 50 }] });
    expect((await pool.query(`select from pg_namespace where nspname ~ '_new$'`)).rowCount).toBe(0);
  });

  describe('that was interrupted', () => {
    const PARTS = 5;
    /** A model of which each part is one stream of 50 events. `steps` names each step that is taken; the step `interrupted` fails once. */
    const steps: string[] = [];
    let interrupted: string | null;
    const take = (step: string) => {
      steps.push(step);
      if (step !== interrupted) return;
      interrupted = null;
      throw new Unavailable('interrupted by the spec');
    };
    const load: Load = {
      add: async (client, part) => {
        await client.query('create table if not exists late (id uuid)');
        let read = 0;
        for await (const events of part) {
          read += events.length;
          const ids = events.map(({ id }) => id);
          await client.query(`insert into ${read > 25 ? 'late' : 'seen'} select * from unnest($1::uuid[])`, [ids]);
        }
        if (read === 0) return 0;
        take(`part of ${read}`);
        return read - 25;
      },
      addLate: async (client) => {
        const { rowCount } = await client.query(
          'with gone as (delete from late where ctid in (select ctid from late limit 25) returning id) insert into seen select id from gone',
        );
        take(rowCount === 0 ? 'nothing late' : 'late');
        if (rowCount === 0) await client.query('drop table late');
        return rowCount ?? 0;
      },
    };
    const loaded = (change: Partial<ReadModel> = {}) => model(1, { load, ...change });
    const inParts = (pool: Pool, of = loaded(), from = store, stop?: AbortSignal) => {
      const inHalves: EventStore = { ...from, readAll: (...asked) => halves(from.readAll(...asked)) };
      return rebuild(of, { store: inHalves, pool, now: () => performance.now(), partEvents: 50, ...(stop && { stop }) });
    };
    const halves = async function* (batches: AsyncIterable<readonly Recorded[]>): AsyncGenerator<readonly Recorded[], void, void> {
      for await (const batch of batches) for (let at = 0; at < batch.length; at += 25) yield batch.slice(at, at + 25);
    };
    const whole = { events: 50 * PARTS, rows: [{ live: 50 * PARTS, rebuilt: 50 * PARTS }] };
    let pool: Pool;

    beforeEach(async () => {
      steps.length = 0;
      pool = await built();
      for (let more = 1; more < PARTS; more++) await append();
      await build(readModels(pool, model(1)));
    });
    afterEach(() => {
      interrupted = null;
    });

    test.each([
      ['in its third part', 'part of 50', 3, ['part of 50', 'part of 50', 'part of 50', 'late', 'late', 'late', 'late', 'late', 'nothing late']],
      ['while it applies what it had put aside', 'late', 2, ['late', 'late', 'late', 'late', 'nothing late']],
      ['after the last event that was put aside', 'nothing late', 1, ['nothing late']],
    ])('%s goes on there', async (_when, step, number, then) => {
      let left = number;
      const counting: Load = {
        add: (client, part) => load.add(client, part).then((aside) => (step.startsWith('part') ? reached(aside) : aside)),
        addLate: (client) => load.addLate!(client).then((applied) => (step.startsWith('part') ? applied : reached(applied))),
      };
      const reached = <T>(result: T): T => {
        if (steps.at(-1) === step && --left === 0) throw new Unavailable('interrupted by the spec');
        return result;
      };
      await expect(inParts(pool, loaded({ load: counting }))).rejects.toThrow('interrupted by the spec');
      expect(await seen(pool, 1)).toBe(50 * PARTS);
      steps.length = 0;
      expect(await inParts(pool)).toMatchObject(whole);
      expect(steps).toEqual(then);
      expect((await pool.query('select count(*) as rows, count(distinct id) as ids from seen')).rows).toEqual([{ rows: '250', ids: '250' }]);
    });

    test('while it catches up goes on from its checkpoint', async () => {
      const stop = new AbortController();
      const stopping = loaded({
        apply: () => {
          stop.abort(new Error('stopped by the spec'));
          return Promise.reject(new Unavailable('away'));
        },
      });
      const looks = [await store.head()];
      const seesLess = { ...store, head: async () => looks.shift() ?? (await store.head()) };
      await append();
      await expect(inParts(pool, stopping, seesLess, stop.signal)).rejects.toThrow('stopped by the spec');
      steps.length = 0;
      expect(await inParts(pool)).toMatchObject({ events: 250, rows: [{ live: 250, rebuilt: 300 }] });
      expect(steps).toEqual([]);
    });

    test('by an error of its own begins anew', async () => {
      const wrong: Load = { ...load, addLate: () => Promise.reject(new Error('a row that nobody expected')) };
      await expect(inParts(pool, loaded({ load: wrong }))).rejects.toThrow('a row that nobody expected');
      expect((await pool.query(`select from pg_namespace where nspname ~ '_new$'`)).rowCount).toBe(0);
      expect(await inParts(pool)).toMatchObject(whole);
    });

    test('and loses its lock while it works is not disturbed by another one', async () => {
      let another: Promise<unknown> = Promise.resolve(null);
      let hasBegun = false;
      const disturbed: Load = {
        ...load,
        add: async (client, part) => {
          const aside = await load.add(client, part);
          if (steps.length === 2 && !hasBegun) {
            hasBegun = true;
            await pool.query(
              `select pg_terminate_backend(l.pid) from pg_locks l join pg_stat_activity a using (pid)
               where l.locktype = 'advisory' and l.granted and a.datname = current_database()`,
            );
            another = inParts(pool).catch((error: unknown) => error);
            await eventually(async () => (await pool.query(`select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`)).rowCount === 1); // prettier-ignore
          }
          return aside;
        },
      };
      expect(await inParts(pool, loaded({ load: disturbed }))).toMatchObject(whole);
      expect(await another).toMatchObject({ message: 'another rebuild is running' });
      expect((await pool.query('select count(*) as rows, count(distinct id) as ids from seen')).rows).toEqual([{ rows: '250', ids: '250' }]);
    });

    test.each([
      ['its tables have changed since', async () => undefined, { createIndexes: 'alter table seen add unique (id)' }, 5],
      ['the log has lost what it had read', () => cutTo(pool, 50), {}, 1],
      ['its rows also concern other tables', async () => undefined, { rebuildsAnew: true }, 5],
      [
        'another release made its rows',
        async () => void (await pool.query(`update ${schemaOf(model(1))}_new.rebuild_progress set release = '0.1.0'`)),
        {},
        5,
      ],
    ])('begins anew if %s', async (_why, change, other, parts) => {
      interrupted = 'late';
      await expect(inParts(pool)).rejects.toThrow('interrupted by the spec');
      await change();
      steps.length = 0;
      const report = await inParts(pool, loaded(other));
      expect(steps.filter((step) => step.startsWith('part'))).toHaveLength(parts);
      expect(report).toMatchObject({ events: 50 * parts, rows: [{ rebuilt: 50 * parts }] });
    });
  });
});
