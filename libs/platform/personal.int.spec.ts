/** Personal keys on Postgres: the contract of the rows, blocks while the database is away, and what the rows reveal. */
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { isBox, systemClock } from '#kernel';
import { freshDatabase } from '../../test/support/postgres.js';
import { personalKeyRowsContract } from '../../test/support/personal-keys.contract.js';
import { MemoryPersonalKeyRows } from '../../test/support/personal-keys.js';
import { systemIds } from './ids.js';
import { newKeyRing } from './keys.js';
import { createPersonalKeys, personalKeyMigration, postgresOpenings, postgresPersonalKeyRows } from './personal.js';
import { createPool, type Pool } from './postgres/pool.js';
import { migrate } from './postgres/schema.js';

const ids = systemIds(() => Date.now());
const keys = newKeyRing();
const QUIET = { warn: () => undefined, error: () => undefined };

let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
beforeAll(async () => {
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'spec', max: 4, byKey: true });
  await migrate(pool, [personalKeyMigration]);
});
afterAll(async () => {
  await pool.end();
  await database.drop();
});

personalKeyRowsContract('Postgres’', async () => ({ rows: postgresPersonalKeyRows(pool), close: async () => undefined }));
personalKeyRowsContract('the memory’s', async () => ({ rows: new MemoryPersonalKeyRows(), close: async () => undefined }));

const count = async () => Number((await pool.query<{ count: string }>('select count(*) from personal_key')).rows[0]!.count);

test('a process writes 512 keys at once, hands each out once, and opens it again', async () => {
  const before = await count();
  const personal = createPersonalKeys(postgresPersonalKeyRows(pool), { keys, ids, clock: systemClock, log: QUIET });
  const taken = await Promise.all(Array.from({ length: 20 }, () => personal.take()));
  expect(await count()).toBe(before + 512);
  expect(new Set(taken.map(({ id }) => id)).size).toBe(20);
  const boxes = taken.map((key, number) => key.seal({ number }, 'here'));
  const opened = await personal.open(taken.map(({ id }) => id));
  expect(boxes.map((box) => opened.content(box, 'here'))).toEqual(taken.map((_, number) => ({ number })));
});

test('the rows hold nothing that opens a box, without the key ring', async () => {
  const personal = createPersonalKeys(postgresPersonalKeyRows(pool), { keys, ids, clock: systemClock, log: QUIET, block: 1 });
  const key = await personal.take();
  const stranger = createPersonalKeys(postgresPersonalKeyRows(pool), { keys: newKeyRing(), ids, clock: systemClock, log: QUIET, block: 1 });
  await expect(stranger.open([key.id])).rejects.toThrow();
  // A row that is copied to another id does not open.
  const other = ids.uuid();
  await pool.query('insert into personal_key (key_id, kid, wrapped) select $2, kid, wrapped from personal_key where key_id = $1', [key.id, other]);
  await expect(personal.open([other])).rejects.toThrow();
});

test('an erasure closes a box for ever, and says when', async () => {
  const personal = createPersonalKeys(postgresPersonalKeyRows(pool), { keys, ids, clock: systemClock, log: QUIET, block: 1 });
  const key = await personal.take();
  const box = key.seal({ name: 'Ada' }, 'here');
  if (!isBox(box)) throw new Error('no box');
  const at = '2026-03-02T09:00:00.000Z';
  await personal.forget([key.id], { erasureId: ids.uuid(), at });
  const opened = await personal.open([key.id]);
  expect([opened.content(box, 'here'), opened.erasedAt([box])]).toEqual([null, at]);
  const looked = await personal.erasures([key.id]);
  expect([looked.content(box, 'here'), looked.erasedAt([box])]).toEqual([null, at]);
});

test('a reading of personal data leaves who read what, when, and how much', async () => {
  const said: unknown[] = [];
  const openings = postgresOpenings(pool, { ids, log: { info: (fields: unknown) => said.push(fields) } as never });
  const opening = await openings.begin({ actor: 'audit key k', report: 'exports/reversals' });
  const rows = async () => (await pool.query('select actor, report, shown::int, opened_at from personal_opening')).rows as unknown[];
  expect(await rows()).toEqual([{ actor: 'audit key k', report: 'exports/reversals', shown: 0, opened_at: expect.any(Date) }]);
  await opening.shown(41);
  expect(await rows()).toMatchObject([{ shown: 41 }]);
  expect(said).toEqual([{ openingId: expect.any(String), actor: 'audit key k', report: 'exports/reversals', count: 41 }]);
});
