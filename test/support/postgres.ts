/** Real databases for specs. */
import { randomBytes } from 'node:crypto';
import pg from 'pg';
import type { ReadModel } from '#eventstore';

/** Makes an empty database in the Postgres of this run. `drop` closes its connections and removes it. */
export const freshDatabase = async (): Promise<{ url: string; drop: () => Promise<void> }> => {
  const admin = process.env.TEST_POSTGRES_URL!;
  const name = `t_${randomBytes(6).toString('hex')}`;
  const run = async (sql: string) => {
    const client = new pg.Client({ connectionString: admin });
    await client.connect();
    try {
      await client.query(sql);
    } finally {
      await client.end();
    }
  };
  await run(`create database ${name}`);
  const url = new URL(admin);
  url.pathname = `/${name}`;
  return { url: url.toString(), drop: () => run(`drop database if exists ${name} with (force)`) };
};

/** Makes the tables of a read model in the schema `public`. For specs without the registry of read models. */
export const makeTables = async (db: Pick<pg.Pool, 'query'>, { createTables, createIndexes }: Pick<ReadModel, 'createTables' | 'createIndexes'>) => {
  await db.query(`${createTables}; ${createIndexes}`);
};
