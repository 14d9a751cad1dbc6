import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { createPool, migrate, type Pool } from '#platform';
import { Conflict, Unavailable, type EventStore } from './event-store.js';
import { createPostgresEventStore } from './postgres.js';
import { eventStoreMigrations } from './index.js';
import { collect, eventStoreContract, following, logAfter, newEvent, newEvents, newStream } from '../../test/support/event-store.contract.js';
import { eventually } from '../../test/support/eventually.js';
import { freshDatabase } from '../../test/support/postgres.js';

const migrated = async () => {
  const database = await freshDatabase();
  const pool = createPool(database.url, { name: 'spec', max: 4 });
  await migrate(pool, eventStoreMigrations);
  return { url: database.url, pool, drop: async () => (await pool.end(), database.drop()) };
};

eventStoreContract('postgres', async () => {
  const { url, drop } = await migrated();
  const [store, another] = [createPostgresEventStore(url), createPostgresEventStore(url)];
  return {
    store,
    another,
    fresh: true,
    close: async () => {
      await Promise.all([store.close(), another.close()]);
      await drop();
    },
  };
});

describe('group commit', () => {
  let url: string;
  let pool: Pool;
  let drop: () => Promise<void>;
  let store: EventStore;
  beforeAll(async () => {
    ({ url, pool, drop } = await migrated());
    store = createPostgresEventStore(url);
  });
  afterAll(async () => {
    await store.close();
    await drop();
  });

  test('appends that wait together are committed together, and positions have no gaps', async () => {
    const transactions = async () =>
      Number((await pool.query<{ n: string }>('select count(distinct xmin::text) as n from es.events where position > 0')).rows[0]!.n);
    const before = await transactions();
    await Promise.all(Array.from({ length: 400 }, () => store.append(newStream(), 'no_stream', newEvents(1))));
    expect((await transactions()) - before).toBeLessThan(20);
    const { rows } = await pool.query<{ ok: boolean }>(
      'select count(*) = max(position) and max(position) = (select position from es.head) as ok from es.events',
    );
    expect(rows).toEqual([{ ok: true }]);
  });

  test('appends of one process to one stream keep their order, also without waiting in between', async () => {
    const stream = newStream();
    const appends = Array.from({ length: 30 }, (_, index) =>
      store.append(stream, index === 0 ? 'no_stream' : BigInt(index - 1), [newEvent({ index })]),
    );
    expect((await Promise.all(appends)).map(({ revision }) => revision)).toEqual(appends.map((_, index) => BigInt(index)));
  });

  test('a batch that Postgres refuses is sent one by one, and only the guilty append fails', async () => {
    await pool.query(`create function refuse() returns trigger language plpgsql as $$ begin
      if new.type = 'Refused' then raise exception 'no such fact'; end if; return new; end $$;
      create trigger refuse before insert on es.events for each row execute function refuse()`);
    const good = Array.from({ length: 20 }, () => newStream());
    const results = await Promise.allSettled([
      ...good.slice(0, 10).map((stream) => store.append(stream, 'no_stream', newEvents(2))),
      store.append(newStream(), 'no_stream', [newEvent({}, 'Refused')]),
      ...good.slice(10).map((stream) => store.append(stream, 'any', newEvents(2))),
    ]);
    expect(results.filter(({ status }) => status === 'fulfilled')).toHaveLength(20);
    expect(String((results[10] as PromiseRejectedResult).reason)).toContain('no such fact');
    for (const stream of good) expect(await collect(store.read(stream))).toHaveLength(2);
    await pool.query('drop trigger refuse on es.events');
  });

  test('an acknowledged append is durable under any default of the database', async () => {
    const database = new URL(url).pathname.slice(1);
    await pool.query(
      `alter database ${database} set synchronous_commit = off; alter database ${database} set default_transaction_isolation = 'serializable'`,
    );
    const careful = createPostgresEventStore(url);
    await pool.query(`create table seen (setting text); create function look() returns trigger language plpgsql as $$ begin
      insert into seen values (current_setting('synchronous_commit') || ' ' || current_setting('transaction_isolation')); return new; end $$;
      create trigger look before insert on es.events for each row execute function look()`);
    await careful.append(newStream(), 'no_stream', newEvents(1));
    await careful.append(newStream(), 'no_stream', newEvents(1));
    await careful.close();
    await pool.query('drop trigger look on es.events');
    await pool.query(`alter database ${database} reset all`);
    // A connection for appends gets its settings before its first append.
    expect((await pool.query('select distinct setting from seen')).rows).toEqual([{ setting: 'on read committed' }]);
  });

  test('appends beyond the queue’s limit are refused at once', async () => {
    const results = await Promise.allSettled(Array.from({ length: 6_000 }, () => store.append(newStream(), 'no_stream', newEvents(1))));
    const refused = results.filter((result) => result.status === 'rejected');
    expect(refused.length).toBeGreaterThan(0);
    expect(refused.every(({ reason }) => reason instanceof Unavailable)).toBe(true);
    expect(results.length - refused.length).toBeGreaterThanOrEqual(4_000);
  });

  test('a gap in the log is found', async () => {
    const start = await store.head();
    await store.append(newStream(), 'no_stream', newEvents(5));
    await pool.query('delete from es.events where position = (select position - 2 from es.head)');
    await expect(logAfter(store, start)).rejects.toThrow('the log has a gap');
    await pool.query('update es.head set position = position'); // the gap stays: later tests read from the new head
  });

  test('a reader learns of an append of another process without waiting for the poll', async () => {
    const other = createPostgresEventStore(url);
    const reader = following(store, await store.head());
    await eventually(() => reader.items.some(({ kind }) => kind === 'caught_up'));
    await eventually(
      async () => (await pool.query(`select from pg_stat_activity where datname = current_database() and query like 'listen%'`)).rowCount,
    );
    const delays: number[] = [];
    for (let round = 0; round < 5; round++) {
      const seen = reader.events().length;
      const begun = performance.now();
      await other.append(newStream(), 'no_stream', newEvents(1));
      await eventually(() => reader.events().length > seen, { everyMs: 2 });
      delays.push(performance.now() - begun);
    }
    expect(Math.min(...delays)).toBeLessThan(100);
    await reader.close();
    await other.close();
  });

  test('a closed store refuses', async () => {
    const closing = createPostgresEventStore(url);
    const last = closing.append(newStream(), 'no_stream', newEvents(1));
    await closing.close();
    expect((await last).revision).toBe(0n);
    await expect(closing.append(newStream(), 'no_stream', newEvents(1))).rejects.toBeInstanceOf(Unavailable);
  });

  test('thousands of racing appends, retries and conflicts over two processes: every answer is right', async () => {
    const stores = [createPostgresEventStore(url), createPostgresEventStore(url)];
    const streams = Array.from({ length: 20 }, () => newStream());
    const known: { stream: string; expected: bigint | 'no_stream'; event: ReturnType<typeof newEvent>; revision: bigint }[] = [];
    const counts = { ok: 0, again: 0, conflict: 0 };
    await Promise.all(
      Array.from({ length: 32 }, async (_, writer) => {
        for (let round = 0; round < 60; round++) {
          const store = stores[(writer + round) % 2]!;
          const earlier = known[(writer * 31 + round * 17) % Math.max(1, known.length)];
          if (earlier && round % 5 === 0) {
            expect((await store.append(earlier.stream, earlier.expected, [earlier.event])).revision).toBe(earlier.revision);
            counts.again++;
            continue;
          }
          const stream = streams[(writer * 7 + round) % streams.length]!;
          const last = (await collect(store.read(stream))).at(-1)?.revision;
          const expected = last ?? 'no_stream';
          // Some appends have the id of an event that is stored at another place.
          const event = earlier && round % 10 === 3 ? newEvent({ writer, round }, 'PaymentInitiated', earlier.event.id) : newEvent({ writer, round });
          try {
            const { revision } = await store.append(stream, expected, [event]);
            if (event.id !== earlier?.event.id) known.push({ stream, expected, event, revision });
            counts.ok++;
          } catch (error) {
            if (!(error instanceof Conflict)) throw error;
            counts.conflict++;
          }
        }
      }),
    );
    expect(counts.ok).toBeGreaterThan(100);
    expect(counts.conflict).toBeGreaterThan(10);
    expect(counts.again).toBeGreaterThan(50);
    for (const { stream, revision, event } of known) expect((await collect(store.read(stream, revision, 1)))[0]!.id).toBe(event.id);
    const { rows } = await pool.query(
      `select count(*)::int as wrong from (select revision, row_number() over (partition by stream_id order by position) - 1 as nth from es.events
        where stream_id = any ($1::text[])) r where revision <> nth`,
      [streams],
    );
    expect(rows).toEqual([{ wrong: 0 }]);
    await Promise.all(stores.map((each) => each.close()));
  });
});
