/**
 * The identity of an installation: a start accepts only a database and a log that belong together. The specs use a real Postgres and the double of
 * KurrentDB.
 */
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import { randomUUID } from 'node:crypto';
import { systemClock } from '#kernel';
import { createLogger, createPool, migrate, type Pool } from '#platform';
import { newEvents, newStream } from '../../test/support/event-store.contract.js';
import { KurrentDbDouble } from '../../test/support/kurrentdb-double.js';
import { freshDatabase } from '../../test/support/postgres.js';
import type { EventStore } from './event-store.js';
import {
  INSTALLATION_STREAM,
  type InstallationPorts,
  installationEvents,
  installationIn,
  requireOwnLog,
  settleInstallation,
} from './installation.js';
import { eventStoreMigrations, openEventStore } from './open.js';

const cleanUps: (() => unknown)[] = [];
afterEach(async () => {
  for (const cleanUp of cleanUps.splice(0).reverse()) await cleanUp();
});

const openDatabase = async (): Promise<{ pool: Pool; url: string }> => {
  const database = await freshDatabase();
  const pool = createPool(database.url, { name: 'spec', max: 4 });
  cleanUps.push(() => pool.end().then(() => database.drop()));
  await migrate(pool, eventStoreMigrations);
  return { pool, url: database.url };
};
const openLog = async (): Promise<{ store: EventStore; url: string }> => {
  const double = await new KurrentDbDouble().start();
  const store = await openEventStore(double.url(), '', createLogger('silent', 'spec'));
  cleanUps.push(
    () => double.kill(),
    () => store.close(),
  );
  return { store, url: double.url() };
};

let database: Awaited<ReturnType<typeof openDatabase>>;
let log: Awaited<ReturnType<typeof openLog>>;
beforeEach(async () => ([database, log] = await Promise.all([openDatabase(), openLog()])));

/** A clock with short pauses. */
const clock = { ...systemClock, sleep: () => systemClock.sleep(1) };
const ports = (change: Partial<InstallationPorts> = {}): InstallationPorts => ({
  pool: database.pool,
  store: log.store,
  clock,
  newId: randomUUID,
  kurrentdbUrl: log.url,
  databaseUrl: database.url,
  sealedEnd: async () => null,
  ...change,
});
const start = async (change: Partial<InstallationPorts> = {}): Promise<string> => {
  await requireOwnLog(ports(change));
  return settleInstallation(ports(change));
};
const checkpointAt = (position: string) =>
  database.pool.query(`insert into projection_checkpoint (name, position, epoch) values ('payment-list@1', $1, 1)`, [position]);
const host = () => new URL(log.url.replace(/^kurrentdb/, 'http')).host;

describe('a first start', () => {
  test('makes the id in both; a second start and a second process take it', async () => {
    const [first, second] = await Promise.all([start(), start()]);
    expect(second).toBe(first);
    expect(await installationIn(log.store)).toBe(first);
    await log.store.append(newStream(), 'no_stream', newEvents(3));
    expect(await start()).toBe(first);
  });

  test.each([
    ['before its event', async (id: string) => void id],
    [
      'after its event',
      async (id: string) => {
        const meta = { recordedAt: '2026-01-01T00:00:00.000Z', actor: { type: 'system', id: 'spec' }, correlationId: id } as const;
        const event = { type: 'InstallationCreated', data: { installationId: id, createdAt: meta.recordedAt } } as const;
        await log.store.append(INSTALLATION_STREAM, 'no_stream', [installationEvents.write(event, id, meta)]);
      },
    ],
  ])('that was killed %s goes on with the same id', async (_when, killedAt) => {
    const id = randomUUID();
    await database.pool.query('insert into installation (id) values ($1)', [id]);
    await killedAt(id);
    expect(await start()).toBe(id);
    expect((await database.pool.query('select state from installation')).rows).toEqual([{ state: 'confirmed' }]);
  });
});

describe('refused in one line, with nothing changed', () => {
  test('the log of another installation: both ids, the variable and the host', async () => {
    const ours = await start();
    const [otherDatabase, otherLog] = [await openDatabase(), await openLog()];
    const theirs = await start({ pool: otherDatabase.pool, store: otherLog.store, kurrentdbUrl: otherLog.url });
    const refused = start({ store: otherLog.store, kurrentdbUrl: otherLog.url });
    await expect(refused).rejects.toThrow(new RegExp(`KURRENTDB_URL.*127\\.0\\.0\\.1:\\d+.*${theirs}.*${ours}`));
    expect(await installationIn(otherLog.store)).toBe(theirs);
  });

  test('an empty log under a database that has one', async () => {
    const ours = await start();
    const empty = await openLog();
    await expect(start({ store: empty.store, kurrentdbUrl: empty.url })).rejects.toThrow(`is not the log of installation ${ours}: it is empty`);
    expect(await empty.store.head()).toBeNull();
  });

  test('a new database under a log that is not new takes no id from it', async () => {
    await start();
    const fresh = await openDatabase();
    await expect(start({ pool: fresh.pool })).rejects.toThrow('and this database to none yet');
    expect((await fresh.pool.query('select from installation')).rowCount).toBe(0);
  });

  test('a pending id that meets another one in the log', async () => {
    await start();
    const fresh = await openDatabase();
    const pending = randomUUID();
    await fresh.pool.query('insert into installation (id) values ($1)', [pending]);
    await expect(start({ pool: fresh.pool })).rejects.toThrow(`installation ${pending}`);
  });

  test('a new database under the events of an installation without an id', async () => {
    await log.store.append(newStream(), 'no_stream', newEvents(1));
    await expect(start()).rejects.toThrow(`the event store at KURRENTDB_URL (${host()}) holds events, and this database is new`);
  });

  test('the other kind of event store', async () => {
    await checkpointAt('00000000000000000007');
    await expect(start()).rejects.toThrow('the events of this database lie in Postgres; unset KURRENTDB_URL');
  });
});

describe('a database of 0.1.0', () => {
  test('adopts the log that it has sealed, once', async () => {
    const { position } = await log.store.append(newStream(), 'no_stream', newEvents(3));
    await checkpointAt(position);
    const sealedEnd = async () => ({ where: 'the seal', position, isEvent: () => true });
    const id = await start({ sealedEnd });
    expect(await installationIn(log.store)).toBe(id);
    expect(await start({ sealedEnd: async () => Promise.reject(new Error('asked again')) })).toBe(id);
  });

  test('refuses a log whose event at the end of the seal is another one', async () => {
    const { position } = await log.store.append(newStream(), 'no_stream', newEvents(3));
    await checkpointAt(position);
    await expect(start({ sealedEnd: async () => ({ where: 'the seal', position, isEvent: () => false }) })).rejects.toThrow(
      'is not the log that this database has sealed',
    );
    expect(await installationIn(log.store)).toBeNull();
  });

  test('without a seal: refuses a log that ends before a checkpoint, and an empty one', async () => {
    const { position } = await log.store.append(newStream(), 'no_stream', newEvents(3));
    await checkpointAt(position.replace(/^\d{4}/, '0001'));
    await expect(start()).rejects.toThrow('where payment-list@1 stands');
    const empty = await openLog();
    await expect(start({ store: empty.store, kurrentdbUrl: empty.url })).rejects.toThrow('is empty, but this database has followed a log');
  });

  test('without a seal: adopts a log that holds every checkpoint', async () => {
    const { position } = await log.store.append(newStream(), 'no_stream', newEvents(3));
    await checkpointAt(position);
    expect(await start()).toBe(await installationIn(log.store));
  });
});
