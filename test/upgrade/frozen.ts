/** The data of frozen releases (`npm run release:freeze`). */
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import type pg from 'pg';
import type { Expected } from './freeze.js';

const HERE = new URL('.', import.meta.url).pathname;
export const folderOf = (release: string): string => join(HERE, release);
export const RELEASES: readonly string[] = readdirSync(HERE).filter((name) => existsSync(join(HERE, name, 'expected.json')));
export const expectedOf = (release: string): Expected => JSON.parse(readFileSync(join(folderOf(release), 'expected.json'), 'utf8')) as Expected;

/** Loads the rows of a frozen release into an empty database. Moves the expiry times of keys, so that the keys are still valid. */
export const loadRows = async (client: pg.Client, release: string): Promise<void> => {
  const folder = folderOf(release);
  const migrations = JSON.parse(readFileSync(join(folder, 'migrations.json'), 'utf8')) as readonly Migrated[];
  await client.query('create table payfold_migration (name text primary key, sha256 text not null, applied_at timestamptz not null default now())');
  for (const { name, sql } of [...migrations].sort((a, b) => (a.name < b.name ? -1 : 1))) {
    await client.query(sql);
    await client.query(`insert into payfold_migration (name, sha256) values ($1, encode(sha256(convert_to($2, 'utf8')), 'hex'))`, [name, sql]);
  }
  // Empty the tables first. Rows that a migration made are also in rows.ndjson.
  const lines = readFileSync(join(folder, 'rows.ndjson'), 'utf8').trimEnd().split('\n');
  const tables = new Set(lines.map((line) => line.slice(0, line.indexOf(' '))));
  await client.query(`set session_replication_role = replica; truncate ${[...tables].join(', ')} cascade`);
  for (const line of lines) {
    const [table, row] = [line.slice(0, line.indexOf(' ')), line.slice(line.indexOf(' ') + 1)];
    await client.query(`insert into ${table} overriding system value select * from json_populate_record(null::${table}, $1)`, [row]);
  }
  await client.query('set session_replication_role = origin');
  await client.query('update idempotency_key set expires_at = expires_at + (now() - $1::timestamptz)', [expectedOf(release).frozenAt]);
};
interface Migrated {
  readonly name: string;
  readonly sql: string;
}
