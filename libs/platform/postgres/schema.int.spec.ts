/** Migrations on a real Postgres: each runs once, in the order of the names, even with several processes and interrupted runs. */
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import { spawn } from 'node:child_process';
import { freshDatabase } from '../../../test/support/postgres.js';
import { createPool, type Pool } from './pool.js';
import { isMigrated, migrate, type Migration, missingMigrations } from './schema.js';

const NOTE: Migration = { name: '0001-note', sql: 'create table note (id int primary key, text text)' };
const FILL: Migration = { name: '0002-fill', sql: `insert into note select n, null from generate_series(1, 5000) n` };
const INDEX: Migration = { name: '0003-index', run: 'concurrently', sql: 'create index concurrently if not exists note_text on note (text)' };
const BATCHES: Migration = {
  name: '0004-batches',
  run: 'batches',
  sql: `update note set text = 'filled' where id in (select id from note where text is null limit 100)`,
};
const DROP: Migration = { name: '0005-drop', phase: 'contract', sql: 'alter table note drop column text' };

let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
beforeEach(async () => {
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'spec', max: 10 });
});
afterEach(async () => {
  await pool.end();
  await database.drop();
});

const applied = async () => (await pool.query<{ name: string }>('select name from payfold_migration order by name')).rows.map(({ name }) => name);
const count = async (where = 'true') => Number((await pool.query<{ n: string }>(`select count(*) as n from note where ${where}`)).rows[0]!.n);

describe('migrations', () => {
  test('are applied once, in the order of their names', async () => {
    expect(await missingMigrations(pool, [NOTE, FILL])).toEqual([NOTE.name, FILL.name]);
    await migrate(pool, [FILL, NOTE]);
    await migrate(pool, [FILL, NOTE]);
    expect(await applied()).toEqual([NOTE.name, FILL.name]);
    expect(await count()).toBe(5000);
    expect(await isMigrated(pool, [NOTE, FILL])).toBe(true);
    expect(await isMigrated(pool, [NOTE, FILL, INDEX])).toBe(false);
  });

  test('of many processes at once are applied once, an index that is built concurrently included', async () => {
    const many = Array.from({ length: 8 }, () => migrate(pool, [NOTE, FILL, INDEX, BATCHES]));
    await Promise.all(many);
    expect(await applied()).toEqual([NOTE.name, FILL.name, INDEX.name, BATCHES.name]);
    expect([await count(), await count(`text = 'filled'`)]).toEqual([5000, 5000]);
  });

  test('that contract wait until they are asked for', async () => {
    await migrate(pool, [NOTE, DROP]);
    expect(await applied()).toEqual([NOTE.name]);
    expect(await missingMigrations(pool, [NOTE, DROP], 'contract')).toEqual([DROP.name]);
    expect(await isMigrated(pool, [NOTE, DROP])).toBe(true);
    await migrate(pool, [NOTE, DROP], { phase: 'contract' });
    expect(await applied()).toEqual([NOTE.name, DROP.name]);
  });

  test('take as long as they need, whatever the time limit of the pool', async () => {
    const hurried = createPool(database.url, { name: 'spec', max: 1, statementTimeoutMs: 100 });
    await migrate(hurried, [{ name: '0001-long', sql: 'select pg_sleep(1.3)' }]);
    expect(await applied()).toEqual(['0001-long']);
    await expect(hurried.query('select pg_sleep(1)')).rejects.toThrow('timeout');
    await hurried.end();
  });

  test('with other SQL under the same name are refused, and nothing is changed', async () => {
    await migrate(pool, [NOTE]);
    const changed = migrate(pool, [{ ...NOTE, sql: `${NOTE.sql} ` }, FILL]);
    await expect(changed).rejects.toThrow('migration 0001-note differs from the one that this database was made with; nothing was changed');
    expect(await applied()).toEqual([NOTE.name]);
  });

  test('that wait for a lock are tried again, and statements of others pass meanwhile', async () => {
    await migrate(pool, [NOTE]);
    const holder = await pool.connect();
    await holder.query('begin; lock table note in access share mode');
    const waiting = migrate(pool, [NOTE, DROP], { phase: 'contract' });
    // Waits longer than the migration's own time limit for a lock.
    await new Promise((resolve) => setTimeout(resolve, 2_300));
    expect(await count()).toBe(0);
    await holder.query('commit');
    holder.release();
    await waiting;
    expect(await applied()).toEqual([NOTE.name, DROP.name]);
  });
});

describe('a database of another release', () => {
  const LATER = (needs: string): Migration => ({ name: '0009-later', needs, sql: 'create table later ()' });

  test('is used if its schema works with this one', async () => {
    await migrate(pool, [NOTE, LATER('0.2.0')], { release: '0.3.0' });
    await migrate(pool, [NOTE, FILL], { release: '0.2.0' });
    expect(await applied()).toEqual([NOTE.name, FILL.name, '0009-later']);
  });

  test('is refused if a migration needs a newer one, and nothing is changed', async () => {
    await migrate(pool, [NOTE, LATER('0.3.0')], { release: '0.3.0' });
    await expect(migrate(pool, [NOTE, FILL], { release: '0.2.9' })).rejects.toThrow(
      'the database was written by a newer version of Payfold (migration 0009-later is unknown here and needs release 0.3.0); nothing was changed',
    );
    expect(await applied()).toEqual([NOTE.name, '0009-later']);
  });
});

describe('a process that is killed in the middle', () => {
  /** Runs `migrate` in another process, kills that process as soon as `when` is true, calls `then`, and runs `migrate` here. */
  const killed = async (migrations: readonly Migration[], when: () => Promise<boolean>, then = () => {}) => {
    const script = `
      import { createPool, migrate } from '#platform';
      await migrate(createPool(process.argv[1], { name: 'killed', max: 1 }), JSON.parse(process.argv[2]));
    `;
    const child = spawn(process.execPath, ['--input-type=module', '-e', script, database.url, JSON.stringify(migrations)], { stdio: 'inherit' });
    const exited = new Promise((resolve) => child.once('exit', resolve));
    while (child.exitCode === null && !(await when().catch(() => false)));
    expect(child.exitCode).toBeNull();
    child.kill('SIGKILL');
    await exited;
    then();
    await migrate(pool, migrations);
  };

  test('of batches: the next run does the rest', async () => {
    const slow = { ...BATCHES, sql: BATCHES.sql.replace('limit 100', 'limit 100 offset (select 0 from pg_sleep(0.05))') };
    await killed([NOTE, FILL, slow], async () => (await count(`text = 'filled'`)) >= 200);
    expect(await count(`text = 'filled'`)).toBe(5000);
    expect(await applied()).toEqual([NOTE.name, FILL.name, slow.name]);
  });

  test('of a transaction: the next run does all of it', async () => {
    const slow = { ...FILL, sql: `${FILL.sql}; select pg_sleep(1)` };
    const runs = `select from pg_stat_activity where query like '%pg_sleep(1)%' and pid <> pg_backend_pid()`;
    await killed([NOTE, slow], async () => (await pool.query(runs)).rowCount === 1);
    expect(await count()).toBe(5000);
    expect(await applied()).toEqual([NOTE.name, FILL.name]);
  });

  test('of an index that waits for an old transaction: the next run builds it', async () => {
    await migrate(pool, [NOTE, FILL]);
    const old = await pool.connect();
    await old.query('begin isolation level repeatable read; select from note');
    const building = `select from pg_stat_activity where query like 'create index concurrently%' and wait_event_type = 'Lock'`;
    // The server continues the statement of the killed process until the old transaction ends.
    const commitSoon = () => void setTimeout(() => void old.query('commit').then(() => old.release()), 1_000);
    await killed([NOTE, FILL, INDEX], async () => (await pool.query(building)).rowCount === 1, commitSoon);
    const { rows } = await pool.query<{ indisvalid: boolean }>(`select indisvalid from pg_index where indexrelid = 'note_text'::regclass`);
    expect(rows).toEqual([{ indisvalid: true }]);
    expect(await applied()).toEqual([NOTE.name, FILL.name, INDEX.name]);
  });

  test('of an index, together with the server: the unfinished index is built again', async () => {
    await migrate(pool, [NOTE, FILL]);
    // The build of a unique index over equal values fails, and leaves an invalid index like an interrupted build.
    await expect(pool.query('create unique index concurrently note_text on note ((1))')).rejects.toThrow('could not create unique index');
    await migrate(pool, [NOTE, FILL, INDEX]);
    const { rows } = await pool.query<{ indisvalid: boolean; indisunique: boolean }>(
      `select indisvalid, indisunique from pg_index where indexrelid = 'note_text'::regclass`,
    );
    expect(rows).toEqual([{ indisvalid: true, indisunique: false }]);
  });
});
