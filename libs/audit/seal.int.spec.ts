/** Seals a KurrentDB into which other programs also write. Every release must seal the same leaves, and the verification must find every change. */
import { afterEach, beforeEach, expect, test } from '@jest/globals';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import {
  createSubscriber,
  type EventStore,
  eventStoreMigrations,
  openEventStore,
  type Position,
  postgresCheckpoint,
  resetCheckpoint,
} from '#eventstore';
import { createLogger, createPool, migrate, newKeyRing, type Pool, transaction } from '#platform';
import { newEvent, newEvents, newStream } from '../../test/support/event-store.contract.js';
import { KurrentDbDouble } from '../../test/support/kurrentdb-double.js';
import { freshDatabase } from '../../test/support/postgres.js';
import { BrokenPromise, LOG_SEAL, logSeal, logSealMigration, logState, type ProvePorts, signLog } from './seal.js';
import { verifyLog } from './verify.js';

let double: KurrentDbDouble;
let store: EventStore;
let pool: Pool;
let seal: ProvePorts;
const cleanUps: (() => unknown)[] = [];
const openDatabase = async (): Promise<Pool> => {
  const database = await freshDatabase();
  const opened = createPool(database.url, { name: 'spec', max: 4 });
  cleanUps.push(() => opened.end().then(() => database.drop()));
  await migrate(opened, [...eventStoreMigrations, logSealMigration]);
  return opened;
};
beforeEach(async () => {
  double = await new KurrentDbDouble().start();
  pool = await openDatabase();
  store = await openEventStore(double.url(), '', createLogger('silent', 'spec'));
  const folder = await mkdtemp(join(tmpdir(), 'payfold-seal-'));
  cleanUps.push(
    () => rm(folder, { recursive: true }),
    () => double.kill(),
    () => store.close(),
  );
  seal = { db: pool, store, keys: newKeyRing(), folder, now: () => Date.now() };
});
afterEach(async () => {
  for (const cleanUp of cleanUps.splice(0).reverse()) await cleanUp();
});

const sealUntil = async (position: Position, db = pool) =>
  createSubscriber(logSeal, { store, checkpoint: postgresCheckpoint(db, LOG_SEAL) }).runUntil(position, { timeoutMs: 10_000 });
const sealAll = async (db = pool) => sealUntil((await store.head())!, db);
const verdict = async (db = pool, log = store) => {
  const { size, root, checks } = await verifyLog({ ...seal, db, store: log, headFolder: seal.folder });
  return { size, root, findings: checks.flatMap(({ name, ok, detail }) => (ok ? [] : `${name}: ${detail}`)) };
};
const foreign = (stream: string) => {
  double.write(stream, [{ type: 'OrderPlaced', data: { cents: 1 }, meta: { by: 'shop' } }]);
  return double.log.length - 1;
};
/**
 * Writes eight events: three of ours, one of another program, two of a stream that only a newer release knows, one of another program, and one of
 * ours.
 */
const writeLog = async () => {
  const stream = newStream();
  const third = await store.append(stream, 'no_stream', newEvents(3));
  const order = foreign('orders-7');
  await store.append(newStream('invoice-'), 'no_stream', [newEvent({}, 'InvoiceSent'), { ...newEvent({}, 'InvoicePaid'), v: 9 }]);
  foreign(newStream());
  await store.append(stream, 2n, newEvents(1));
  return { third: third.position, order };
};

test('events that are appended, sealed and signed while the log is verified make no finding', async () => {
  const grow = async () => {
    for (let append = 0; append < 3; append++) await store.append(newStream(), 'no_stream', newEvents(100));
    await sealAll();
    await signLog(seal);
  };
  await grow();
  const growing: EventStore = {
    ...store,
    readAll: async function* (...asked) {
      for await (const events of store.readAll(...asked)) {
        await grow();
        yield events;
      }
    },
  };
  expect(await verdict(pool, growing)).toMatchObject({ size: 300, findings: [] });
  expect(await verdict()).toMatchObject({ findings: [] });
});

test('a head that is signed beyond the end of the log is named as failed; only heads that were compared are counted', async () => {
  const grow = async () => {
    await store.append(newStream(), 'no_stream', newEvents(10));
    await sealAll();
    return (await signLog(seal))!.head;
  };
  await grow();
  const lost = [await grow(), await grow()];
  double.log.length = 15;
  const { findings } = await verdict();
  expect(findings).toHaveLength(2);
  expect(findings[0]).toMatch(/^events: the log ends after 15 events .*; 30 were sealed/);
  expect(findings[1]).toMatch(/^heads: /);
  for (const { size, at } of lost)
    for (const where of [`the head of ${size} in the database`, `${size}.head`])
      expect(findings[1]).toContain(`${where} was signed at ${at} over ${size} events; the log shows only 15 now`);
  expect(findings[1]).not.toContain('the head of 10');
  double.log.length = 0;
  expect((await verdict()).findings.at(-1)).toMatch(/^heads: the head of 10 in the database .* the log shows only 0 now/);
});

test('an event of another installation is not sealed; a verification names it and finds no fault', async () => {
  const openFor = async (installationId: string) => {
    const guard = { installationId, checkConnection: async () => undefined };
    const opened = await openEventStore(double.url(), '', createLogger('silent', 'spec'), () => guard);
    cleanUps.push(() => opened.close());
    return opened;
  };
  const another = await openFor('another');
  store = await openFor('own');
  seal = { ...seal, store };
  const theirs = newStream();
  await store.append(newStream(), 'no_stream', newEvents(2));
  const { position } = await another.append(theirs, 'no_stream', newEvents(1));
  await store.append(newStream(), 'no_stream', newEvents(2));
  await sealAll();
  const { size, checks } = await verifyLog({ ...seal, headFolder: seal.folder });
  const named = expect.stringMatching(new RegExp(`4 events are those that were sealed; skipped 1 of another installation: .* in ${theirs} at position ${position}, of installation another$`)); // prettier-ignore
  expect([size, checks]).toEqual([4, expect.arrayContaining([{ name: 'events', ok: true, detail: named }])]);
});

test('streams of a newer release are sealed, events of other programs are not; when they are sealed makes no difference', async () => {
  await writeLog();
  await sealAll();
  await writeLog();
  foreign('orders-8');
  await sealAll();
  const inParts = await verdict();
  expect(inParts).toMatchObject({ size: 12, findings: [] });
  const later = await openDatabase();
  await sealAll(later);
  expect(await verdict(later)).toEqual(inParts);
});

const change = (index: number, to: { metadata?: object; data?: object }) => {
  const bytes = (value: object | undefined) => value && Buffer.from(JSON.stringify(value));
  const { metadata, data } = double.log[index]!;
  double.log[index] = { ...double.log[index]!, metadata: bytes(to.metadata) ?? metadata, data: bytes(to.data) ?? data };
};

test('the verdict does not depend on events of other programs', async () => {
  const { order } = await writeLog();
  await sealAll();
  change(order, { data: { cents: 2 } });
  foreign('orders-9');
  expect((await verdict()).findings).toEqual([]);
});

const LOOKS_LIKE_OURS = { v: 1, recordedAt: '', actor: { type: 'system', id: '' }, correlationId: '' };
test.each([
  [
    'an event that was made to look as if another program wrote it',
    () => change(4, { metadata: { by: 'shop' } }),
    /the event sealed before the event at position \d+:\d+ \(InvoicePaid .* was removed/,
  ],
  ['two that were removed', () => double.log.splice(4, 2), /2 events sealed before the event at position \d+:\d+ \(.* were removed/],
  [
    'an event of another program that was made to look like ours',
    () => change(3, { metadata: LOOKS_LIKE_OURS }),
    /the event at position \d+:\d+ \(OrderPlaced .* was inserted/,
  ],
  [
    'a changed event of a stream that this release does not know',
    () => change(4, { data: { cents: 9 } }),
    /the event at position \d+:\d+ \(InvoiceSent .* was changed/,
  ],
])('%s: found and named', async (_, tamper, finding) => {
  await writeLog();
  await sealAll();
  expect((await verdict()).findings).toEqual([]);
  tamper();
  expect((await verdict()).findings[0]).toMatch(finding);
});

test('a seal that is made again waits for the signed part, also behind an event of another program; not behind one of ours that it left out', async () => {
  const { third, order } = await writeLog();
  await sealAll();
  await signLog(seal);
  await pool.query(`delete from log_tile; delete from log_head; update log_state set size = 0, position = ''`);
  const moveTo = (position: Position | null) => transaction(pool, (client) => resetCheckpoint(client, LOG_SEAL, position));
  const at = (index: number) => Array(2).fill(String(double.log[index]!.position).padStart(20, '0')).join(':') as Position;
  await moveTo(null);
  await sealUntil(third);
  expect(await logState(pool)).toMatchObject({ size: 3, position: third });
  await moveTo(at(order));
  expect(await signLog(seal)).toBeNull();
  await moveTo(at(order + 1));
  await expect(signLog(seal)).rejects.toThrow(BrokenPromise);
  await moveTo(at(order));
  await sealAll();
  expect(await signLog(seal)).toMatchObject({ head: { size: 6 } });
  expect((await verdict()).findings).toEqual([]);
});
