/** Rows by COPY: every character arrives unchanged, also at the border of two pieces. An error of the server is thrown. */
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { copyInto } from './copy.js';
import { createPool, type Client, type Pool } from './pool.js';
import { freshDatabase } from '../../../test/support/postgres.js';

let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
let client: Client;
beforeAll(async () => {
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'spec', max: 1 });
  client = await pool.connect();
  await client.query('create table copied (number int not null, value text)');
});
afterAll(async () => {
  client.release();
  await pool.end();
  await database.drop();
});

const copied = async () => (await client.query<{ number: number; value: string | null }>('select number, value from copied order by number')).rows;

test('values of every kind and size', async () => {
  const long = 'ü'.repeat(300_000);
  const odd = [null, '', '\\N', 'tab\tfeed\nreturn\r\\', '"quoted", {json}', '💶'.repeat(1_000), long, 'after the long one', `${long}!`, 'the last'];
  const values = [...odd, ...Array.from({ length: 5_000 }, (_, index) => `row ${index} ${'€x'.repeat(index % 200)}`)];
  const copy = copyInto(client, 'copied', ['number', 'value']);
  for (const [number, value] of values.entries()) await copy.write([String(number), value]);
  await copy.end();
  expect(await copied()).toEqual(values.map((value, number) => ({ number, value })));
});

test('nothing at all', async () => {
  await client.query('truncate copied');
  await copyInto(client, 'copied', ['number', 'value']).end();
  expect(await copied()).toEqual([]);
});

test('a refusal of the server is thrown to the next write, and the connection is as good as before', async () => {
  const copy = copyInto(client, 'copied', ['number', 'value']);
  const writing = async () => {
    await copy.write(['not a number', 'x']);
    for (let rows = 0; rows < 100_000; rows++) await copy.write(['1', 'x'.repeat(1_000)]);
    await copy.end();
  };
  await expect(writing()).rejects.toThrow('invalid input syntax for type integer');
  expect(await copied()).toEqual([]);
});

test('a refusal of the last piece is thrown at the end', async () => {
  const copy = copyInto(client, 'copied', ['number', 'value']);
  await copy.write([null, 'x']);
  await expect(copy.end()).rejects.toThrow('null value in column "number"');
  expect(await copied()).toEqual([]);
});
