/**
 * The Postgres adapter with broken connections, a stalled server, and a server that is killed during commits. The spec has its own cluster, with
 * fsync on.
 */
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { mkdtemp, rm } from 'node:fs/promises';
import { createServer, connect, type Server, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { systemClock } from '#kernel';
import { createPool, freePort, migrate, startEmbeddedPostgres, type EmbeddedPostgres, type Pool } from '#platform';
import { createPostgresEventStore } from './postgres.js';
import { postgresCheckpoint } from './checkpoint.js';
import { createSubscriber } from './subscriber.js';
import { eventStoreMigrations } from './index.js';
import { appendRepeatedly } from './streams.js';
import { OutcomeUnknown, ReadOnly, Unavailable, type EventStore, type NewEvent, type Position } from './event-store.js';
import { collect, following, logAfter, newEvent, newEvents, newStream } from '../../test/support/event-store.contract.js';
import { eventually } from '../../test/support/eventually.js';

let directory: string;
let port: number;
let postgres: EmbeddedPostgres;
let admin: Pool;
const start = async () => {
  postgres = await startEmbeddedPostgres(join(directory, 'postgres'), { port });
  return true;
};
beforeAll(async () => {
  directory = await mkdtemp(join(tmpdir(), 'payfold-fault-'));
  port = await freePort();
  await start();
  admin = createPool(postgres.url, { name: 'admin', max: 2 });
  await migrate(admin, eventStoreMigrations);
});
afterAll(async () => {
  await admin.end();
  await postgres.stop();
  await rm(directory, { recursive: true, force: true });
});

const cutConnections = () => admin.query(`select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'payfold event%'`);

/** Stops everything that a test started, even if the test failed. */
const cleanUps: (() => Promise<unknown>)[] = [];
afterEach(async () => {
  for (const cleanUp of cleanUps.splice(0).reverse()) await cleanUp();
});

/** Starts writers that repeat each append until they know its outcome. `acknowledged`: the appended events with their places. */
const load = (store: EventStore, writers: number) => {
  let running = true;
  const acknowledged: { stream: string; event: NewEvent; revision: bigint; position: Position }[] = [];
  const errors = { unknown: 0, unavailable: 0, retried: 0 };
  const done = Promise.all(
    Array.from({ length: writers }, async (_, writer) => {
      for (let round = 0; running; round++) {
        const stream = newStream();
        let expected: bigint | 'no_stream' = 'no_stream';
        for (let n = 0; n < 3; n++) {
          const event = newEvent({ writer, round, n });
          for (let tries = 0; ; tries++) {
            try {
              const answer = await store.append(stream, expected, [event], { timeoutMs: 1_000 });
              acknowledged.push({ stream, event, ...answer });
              expected = answer.revision;
              if (tries > 0) errors.retried++;
              break;
            } catch (error) {
              if (error instanceof OutcomeUnknown) errors.unknown++;
              else if (error instanceof Unavailable) errors.unavailable++;
              else throw error;
            }
          }
        }
      }
    }),
  );
  const stop = async () => {
    running = false;
    await done;
  };
  cleanUps.push(stop);
  return { acknowledged, errors, stop };
};

/** Checks that every acknowledged event is in the log once, at the position of its answer, and that the log has no gaps. */
const verify = async (store: EventStore, acknowledged: ReturnType<typeof load>['acknowledged']) => {
  const log = new Map((await logAfter(store, null)).map((event) => [event.position, event]));
  expect(acknowledged.filter(({ position, event }) => log.get(position)?.id !== event.id)).toEqual([]);
  const { rows } = await admin.query(
    `select count(*) = max(position) and min(position) = 1 and max(position) = (select position from es.head) as gap_free,
            count(distinct event_id) = count(*) as once from es.events`,
  );
  expect(rows).toEqual([{ gap_free: true, once: true }]);
};

describe('connections that break', () => {
  test('in the middle of batches, for seconds: appends succeed all the same, once, and a reader misses nothing', async () => {
    const store = createPostgresEventStore(postgres.url);
    cleanUps.push(() => store.close());
    const from = await store.head();
    const reader = following(store, from);
    const work = load(store, 32);
    for (let cut = 0; cut < 15; cut++) {
      const before = work.acknowledged.length;
      await eventually(() => work.acknowledged.length > before + 100);
      await cutConnections();
    }
    await work.stop();
    expect(work.errors).toEqual({ unknown: 0, unavailable: 0, retried: 0 });
    await verify(store, work.acknowledged);
    await eventually(() => reader.events().length === work.acknowledged.length);
    expect(new Set(reader.events().map(({ id }) => id))).toEqual(new Set(work.acknowledged.map(({ event }) => event.id)));
    await reader.close();
  });

  test('an append without a revision is not repeated: its outcome is reported as unknown', async () => {
    const store = createPostgresEventStore(postgres.url);
    await store.append(newStream(), 'any', newEvents(1));
    const blocker = await admin.connect();
    await blocker.query('begin; select from es.head for update');
    const pending = store.append(newStream(), 'any', newEvents(1)).catch((error: unknown) => error);
    await eventually(
      async () =>
        (await admin.query(`select from pg_stat_activity where application_name = 'payfold event append' and wait_event_type = 'Lock'`)).rowCount,
    );
    await cutConnections();
    expect(await pending).toBeInstanceOf(OutcomeUnknown);
    await blocker.query('rollback');
    blocker.release();
    await store.close();
  });
});

/** A proxy between store and Postgres that can hold back every byte, like a stalled network. */
class Gate {
  open = true;
  private readonly sockets = new Set<Socket>();
  private readonly server: Server = createServer((client) => {
    const server = connect(port, '127.0.0.1');
    for (const [from, to] of [
      [client, server],
      [server, client],
    ] as const) {
      this.sockets.add(from);
      from.on(
        'data',
        (bytes) => void (async () => (await eventually(() => this.open, { timeoutMs: 60_000 }), to.write(bytes)))().catch(() => undefined),
      );
      from.on('close', () => to.destroy()).on('error', () => undefined);
    }
  });
  private listening: Promise<number> | null = null;
  listen = () =>
    (this.listening ??= new Promise((ready) => this.server.listen(0, '127.0.0.1', () => ready((this.server.address() as { port: number }).port))));
  close = () => {
    this.sockets.forEach((socket) => socket.destroy());
    this.server.close();
  };
}

describe('a server that takes no writes', () => {
  let owner: Pool;
  beforeAll(() => {
    owner = createPool(postgres.adminUrl, { name: 'owner', max: 1 });
  });
  afterAll(() => owner.end());
  const mayWrite = async (may: boolean) => {
    await owner.query(`alter system ${may ? 'reset default_transaction_read_only' : 'set default_transaction_read_only = on'}`);
    await owner.query('select pg_reload_conf()');
    await eventually(async () => {
      const { rows } = await owner.query<{ value: string }>(`select current_setting('default_transaction_read_only') as value`);
      return rows[0]!.value === (may ? 'off' : 'on');
    });
  };
  afterEach(() => mayWrite(true));

  test('refuses each append at once, also those of one batch; reads go on; it heals by itself', async () => {
    const store = createPostgresEventStore(postgres.url);
    cleanUps.push(() => store.close());
    const stream = newStream();
    const first = newEvent();
    await store.append(stream, 'no_stream', [first]);
    await mayWrite(false);
    await cutConnections();
    // This append may be on its way while its session ends, so its outcome may be unknown.
    await store.append(newStream(), 'no_stream', newEvents(1)).catch(() => undefined);
    const begun = performance.now();
    const refused = await Promise.allSettled(Array.from({ length: 300 }, () => store.append(newStream(), 'no_stream', newEvents(1))));
    expect(performance.now() - begun).toBeLessThan(2_000);
    expect(refused.filter((one) => !(one.status === 'rejected' && one.reason instanceof ReadOnly))).toEqual([]);
    expect((await collect(store.read(stream))).map(({ id }) => id)).toEqual([first.id]);
    await mayWrite(true);
    await eventually(() => store.append(stream, 0n, newEvents(1)).then(() => true, () => false)); // prettier-ignore
  });

  test('an append whose answer is lost: the log decides', async () => {
    const held = createPostgresEventStore(postgres.url);
    cleanUps.push(() => held.close());
    for (const appended of [true, false]) {
      let tries = 0;
      const lossy: Pick<EventStore, 'append' | 'read'> = {
        read: (...args) => held.read(...args),
        append: async (...args) => {
          if (tries++ > 0) return held.append(...args);
          if (appended) await held.append(...args);
          await mayWrite(false);
          throw new OutcomeUnknown('the answer was lost');
        },
      };
      const appending = appendRepeatedly(lossy, systemClock, newStream(), 'no_stream', newEvents(2), { forMs: 1_000 });
      if (appended) expect(await appending).toMatchObject({ revision: 1n });
      else await expect(appending).rejects.toThrow(OutcomeUnknown);
      expect(tries).toBeGreaterThan(1);
      await mayWrite(true);
    }
  });
});

describe('a server that does not answer', () => {
  let gate: Gate;
  let store: EventStore;
  beforeEach(async () => {
    gate = new Gate();
    const url = new URL(postgres.url);
    url.port = String(await gate.listen());
    store = createPostgresEventStore(url.toString());
  });

  test('a sent append is OutcomeUnknown, an unsent one is Unavailable; both in time, and all works again afterwards', async () => {
    await store.append(newStream(), 'no_stream', newEvents(1));
    const url = new URL(postgres.url);
    url.port = String(await gate.listen());
    const unconnected = createPostgresEventStore(url.toString());
    const [first, second] = [newStream(), newStream()];
    const event = newEvent();
    gate.open = false;
    const begun = performance.now();
    const outcomes = await Promise.all(
      [store.append(first, 'no_stream', [event], { timeoutMs: 400 }), unconnected.append(second, 'no_stream', newEvents(1), { timeoutMs: 400 })].map(
        (append) => append.catch((error: unknown) => error),
      ),
    );
    expect(performance.now() - begun).toBeLessThan(5_000);
    expect(outcomes[0]).toBeInstanceOf(OutcomeUnknown);
    expect(outcomes[1]).toBeInstanceOf(Unavailable);
    gate.open = true;
    expect((await store.append(first, 'no_stream', [event])).revision).toBe(0n);
    expect(await collect(store.read(first))).toHaveLength(1);
    expect((await unconnected.append(newStream(), 'no_stream', newEvents(1))).revision).toBe(0n);
    expect(await collect(store.read(second))).toEqual([]);
    await unconnected.close();
    await store.close();
    gate.close();
  });

  test('reads end with Unavailable', async () => {
    await store.head();
    gate.open = false;
    await expect(store.head()).rejects.toBeInstanceOf(Unavailable);
    gate.open = true;
    await store.head();
    await store.close();
    gate.close();
  });
});

describe('Postgres is killed (SIGKILL) under load and started again', () => {
  test('every acknowledged event is found, once and without gaps; appends, reader and projection go on by themselves', async () => {
    const store = createPostgresEventStore(postgres.url);
    cleanUps.push(() => store.close());
    const from = await store.head();
    const reader = following(store, from);
    const pool = createPool(postgres.url, { name: 'projection', max: 4 });
    cleanUps.push(() => pool.end());
    await pool.query('create table applied (nth bigserial, id uuid not null)');
    const projection = createSubscriber(
      {
        name: 'applied',
        apply: async (client, events) =>
          void (await client.query('insert into applied (id) select unnest($1::uuid[])', [events.map(({ id }) => id)])),
      },
      { store, checkpoint: postgresCheckpoint(pool, 'applied') },
    );
    projection.start();
    cleanUps.push(() => projection.stop());
    const work = load(store, 32);
    for (let kill = 0; kill < 3; kill++) {
      const before = work.acknowledged.length;
      await eventually(() => work.acknowledged.length > before + 1_000);
      process.kill(postgres.pid, 'SIGKILL');
      // A start fails until the children of the killed server are gone, because they use the cluster's shared memory.
      await eventually(start, { everyMs: 200 });
    }
    const before = work.acknowledged.length;
    await eventually(() => work.acknowledged.length > before + 500);
    await work.stop();
    await verify(store, work.acknowledged);
    const log = (await logAfter(store, from)).map(({ id }) => id);
    await eventually(() => reader.events().length >= log.length);
    expect(reader.events().map(({ id }) => id)).toEqual(log);
    expect(await projection.caughtUpTo(await store.head(), 20_000)).toBe(true);
    const all = (await logAfter(store, null)).map(({ id }) => id);
    expect((await pool.query<{ id: string }>('select id from applied order by nth')).rows.map(({ id }) => id)).toEqual(all);
    await reader.close();
  }, 600_000);
});
