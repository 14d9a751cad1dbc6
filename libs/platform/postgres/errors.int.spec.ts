/** The types of the errors that the driver and a real Postgres throw, and connections that a failover made read-only. */
import { type AddressInfo, connect, createServer, type Server, type Socket } from 'node:net';
import { afterAll, afterEach, beforeAll, describe, expect, test } from '@jest/globals';
import { eventually } from '../../../test/support/eventually.js';
import { freshDatabase } from '../../../test/support/postgres.js';
import { DatabaseUnavailable, isDataException, isLockTimeout, isRolledBack, StatementTimeout } from './errors.js';
import { createPool, type Pool, type PoolOptions, transaction } from './pool.js';

let database: Awaited<ReturnType<typeof freshDatabase>>;
let admin: Pool;
beforeAll(async () => {
  database = await freshDatabase();
  admin = createPool(database.url, { name: 'spec admin', max: 3 });
  await admin.query('create table note (id int primary key, text text)');
  await admin.query(`insert into note values (1, 'one'), (2, 'two')`);
});
afterAll(async () => {
  await admin.end();
  await database.drop();
});

const cleanUps: (() => Promise<unknown>)[] = [];
afterEach(async () => {
  for (const cleanUp of cleanUps.splice(0).reverse()) await cleanUp();
});

const open = (options: Partial<PoolOptions> = {}, url = database.url): Pool => {
  const pool = createPool(url, { name: 'spec', max: 1, ...options });
  cleanUps.push(() => pool.end().catch(() => undefined));
  return pool;
};
const failure = async (work: Promise<unknown>): Promise<Error & { code?: string }> => {
  const error = await work.then(
    () => null,
    (thrown: unknown) => thrown,
  );
  if (!(error instanceof Error)) throw new Error('nothing was thrown');
  return error;
};
/** The URL of a server that the test puts before Postgres or in place of Postgres. */
const between = async (onConnection: (socket: Socket) => void): Promise<string> => {
  const sockets = new Set<Socket>();
  const server: Server = createServer((socket) => {
    sockets.add(socket);
    socket.on('error', () => undefined);
    onConnection(socket);
  });
  await new Promise<void>((listening) => server.listen(0, '127.0.0.1', listening));
  cleanUps.push(async () => {
    sockets.forEach((socket) => socket.destroy());
    await new Promise((closed) => server.close(closed));
  });
  const url = new URL(database.url);
  url.host = `127.0.0.1:${(server.address() as AddressInfo).port}`;
  return url.toString();
};
const proxied = async (): Promise<{ url: string; cut: () => void }> => {
  const ends: (() => void)[] = [];
  const { hostname, port } = new URL(database.url);
  const url = await between((socket) => {
    const upstream = connect(Number(port), hostname);
    upstream.on('error', () => undefined);
    socket.pipe(upstream).pipe(socket);
    ends.push(() => {
      socket.end();
      upstream.destroy();
    });
  });
  return { url, cut: () => ends.forEach((end) => end()) };
};

describe('the connection or the server failed', () => {
  const expectUnavailable = (error: Error, code: string | undefined) => {
    expect(error).toBeInstanceOf(DatabaseUnavailable);
    expect(error).not.toBeInstanceOf(StatementTimeout);
    expect([error.name, (error as DatabaseUnavailable).code]).toEqual(['DatabaseUnavailable', code]);
    expect(error.message).not.toBe('');
  };

  test('no listener', async () => {
    expectUnavailable(await failure(open({}, 'postgres://nobody@127.0.0.1:1/none').query('select 1')), 'ECONNREFUSED');
    expectUnavailable(await failure(open({}, 'postgres://nobody@localhost:1/none').connect()), 'ECONNREFUSED');
  });
  test('the server ends the session in the middle of a statement', async () => {
    const running = failure(open().query(`select pg_sleep(10) /* ended */`));
    for (let ended = 0; ended === 0;)
      ended = (await admin.query(`select pg_terminate_backend(pid) from pg_stat_activity where query like 'select pg_sleep(10) /* ended */'`))
        .rowCount!;
    const error = await running;
    expectUnavailable(error, '57P01');
    expect(isRolledBack(error)).toBe(false);
  });
  test('the connection ends without a word', async () => {
    const { url, cut } = await proxied();
    const pool = open({}, url);
    const client = await pool.connect();
    const running = failure(client.query('select pg_sleep(10)'));
    setTimeout(cut, 100);
    const error = await running;
    expectUnavailable(error, undefined);
    expect(isRolledBack(error)).toBe(false);
    expectUnavailable(await failure(client.query('select 1')), undefined);
    client.release(true);
  });
  test('the client, or the pool, was closed', async () => {
    const pool = open();
    const client = await pool.connect();
    void client.end();
    expectUnavailable(await failure(client.query('select 1')), undefined);
    client.release(true);
    await pool.end();
    expectUnavailable(await failure(pool.query('select 1')), undefined);
  });
  test('another transaction was in the way', async () => {
    const change = (pool: Pool, first: number, second: number) =>
      transaction(pool, async (client) => {
        await client.query('update note set text = text where id = $1', [first]);
        await client.query('select pg_sleep(0.2)');
        await client.query('update note set text = text where id = $1', [second]);
      });
    const results = await Promise.allSettled([change(open(), 1, 2), change(open(), 2, 1)]);
    const lost = results.find((one) => one.status === 'rejected')!;
    expectUnavailable(lost.reason as Error, '40P01');
    expect(isRolledBack(lost.reason)).toBe(true);
  });
});

describe('a time limit ended the wait', () => {
  const expectTimeout = (error: Error, code: string | undefined) => {
    expect(error).toBeInstanceOf(StatementTimeout);
    expect(error).toBeInstanceOf(DatabaseUnavailable);
    expect([error.name, (error as StatementTimeout).code]).toEqual(['StatementTimeout', code]);
  };

  test('for a statement', async () => {
    const error = await failure(open({ statementTimeoutMs: 50 }).query('select pg_sleep(10)'));
    expectTimeout(error, '57014');
    expect(isRolledBack(error)).toBe(true);
  });
  test('for a lock', async () => {
    const error = await transaction(admin, async (client) => {
      await client.query('lock table note');
      return failure(open({ lockTimeoutMs: 50 }).query('select * from note'));
    });
    expectTimeout(error, '55P03');
    expect(isLockTimeout(error)).toBe(true);
  });
  test('for an answer, by our own clock', async () => {
    const client = await open().connect();
    expectTimeout(await failure(client.query({ text: 'select pg_sleep(1)', query_timeout: 50 } as { text: string })), undefined);
    client.release(true);
  });
  test('for a connection, in the queue of the pool and at a server that is silent', async () => {
    const pool = open();
    const client = await pool.connect();
    const silent = open({}, await between(() => undefined));
    const [queued, unanswered] = await Promise.all([failure(pool.query('select 1')), failure(silent.query('select 1'))]);
    expectTimeout(queued, undefined);
    expectTimeout(unanswered, undefined);
    client.release();
  });
});

test('the fault of a statement stays unchanged', async () => {
  const pool = open();
  for (const [statement, code, data] of [
    [`insert into note values (1, 'again')`, '23505', false],
    [`select 'x'::int`, '22P02', true],
    ['select * from nothing', '42P01', false],
  ] as const) {
    const error = await failure(pool.query(statement));
    expect(error).not.toBeInstanceOf(DatabaseUnavailable);
    expect([error.code, isDataException(error), isRolledBack(error)]).toEqual([code, data, true]);
  }
  await expect(pool.query(null as unknown as string)).rejects.toThrow(TypeError);
  expect([isDataException(undefined), isRolledBack(new Error('x')), isRolledBack({ code: 14 })]).toEqual([false, false, false]);
});

describe('a session that may only read, as on a standby after a failover', () => {
  /** Sessions of the spec itself are read-only, too. */
  const mayWrite = (may: boolean) =>
    admin.query(
      `begin read write; alter database ${new URL(database.url).pathname.slice(1)} ${may ? 'reset default_transaction_read_only' : 'set default_transaction_read_only = on'}; commit`,
    );
  const WRITE = `update note set text = 'written' where id = 1`;

  test.each<[string, (pool: Pool) => Promise<unknown>]>([
    ['a statement of the pool', (pool) => pool.query(WRITE)],
    ['a transaction', (pool) => transaction(pool, (client) => client.query(WRITE))],
    [
      'a client that hides the error from the pool',
      async (pool) => {
        const client = await pool.connect();
        try {
          return await client.query(WRITE);
        } finally {
          client.release();
        }
      },
    ],
  ])('%s fails as unavailable, and the connection is not used again', async (_, write) => {
    await mayWrite(false);
    const pool = open();
    await pool.query('select 1');
    const error = await failure(write(pool));
    await mayWrite(true);
    expect(error).toBeInstanceOf(DatabaseUnavailable);
    expect((error as DatabaseUnavailable).code).toBe('25006');
    // The first session keeps its read-only setting, so this write succeeds only on another session.
    await write(pool);
  });

  test('after a refused write, pools of the same address that only read are replaced, too', async () => {
    await mayWrite(false);
    const [writes, reads] = [open(), open({ max: 2 })];
    const mayNotWrite = async () => (await reads.query<{ on: string }>(`select current_setting('transaction_read_only') as on`)).rows[0]!.on;
    const inUse = await reads.connect();
    expect(await mayNotWrite()).toBe('on');
    await failure(writes.query(WRITE));
    await mayWrite(true);
    inUse.release();
    await eventually(async () => (await mayNotWrite()) === 'off');
    expect(await Promise.all([mayNotWrite(), mayNotWrite(), mayNotWrite()])).toEqual(['off', 'off', 'off']);
  });
});
