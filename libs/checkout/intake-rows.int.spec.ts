/** Runs the contract of the contents of checkouts (test/support/intake-rows.contract.ts) on Postgres, and tests how they are made. */
import { expect, test } from '@jest/globals';
import { createPool, OpenedKeys, PersonalKey } from '#platform';
import { intakeRowsContract } from '../../test/support/intake-rows.contract.js';
import { freshDatabase } from '../../test/support/postgres.js';
import type { CheckoutContent } from './checkout.js';
import { checkoutIntakeMigration, contentOf, contentText, intakeRow, keyOfContent, MAX_CONTENT_BYTES, postgresIntakeRows } from './intake-rows.js';

const database = async () => {
  const { url, drop } = await freshDatabase();
  const pool = createPool(url, { name: 'spec', max: 2 });
  await pool.query(checkoutIntakeMigration.sql);
  return {
    pool,
    close: async () => {
      await pool.end();
      await drop();
    },
  };
};

intakeRowsContract('Postgres’', async () => {
  const { pool, close } = await database();
  return { rows: postgresIntakeRows(pool), close };
});

const content: CheckoutContent = {
  referenceId: 'CASE-7',
  lineItems: [{ amountCents: 12_500, referenceId: 'W-1', description: null, metadata: { ward: 4 } }],
  payer: { email: 'maria@example.com' },
  returnUrl: 'https://shop.test/done',
  cancelUrl: 'https://shop.test/cancelled',
  state: null,
  locale: 'es',
};
const NOW = Date.parse('2026-03-02T09:00:00.000Z');
const key = new PersonalKey('018f0000-0000-7000-8000-00000000000a', Buffer.alloc(64, 7));
const opened = new OpenedKeys(new Map([[key.id, key]]));
const made = (change: Partial<CheckoutContent> = {}, exp: string | null = null, salt = 's') =>
  intakeRow('cs_x', contentText({ ...content, ...change }, salt), { key, exp, now: NOW });

test('a content is boxed, and counts only as it was hashed; without its salt, the hash says nothing about it', () => {
  const { text, hash } = made();
  expect(text).not.toContain('maria');
  expect(keyOfContent(text)).toBe(key.id);
  expect(contentOf('cs_x', text, hash, opened)).toEqual(content);
  expect(contentOf('cs_x', text, made({ state: 'other' }).hash, opened)).toBe('changed');
  expect(contentOf('cs_y', text, hash, opened)).toBe('changed');
  expect(contentOf('cs_x', `${text.slice(0, -4)}AAAA`, hash, opened)).toBe('changed');
  expect(contentOf('cs_x', text, hash, new OpenedKeys(new Map()))).toBe('erased');
  expect(made({}, null, 't').hash).not.toBe(hash);
});

test('a row of an earlier release holds the content in clear', () => {
  const text = contentText(content, 's');
  const { hash } = made();
  expect(keyOfContent(text)).toBeNull();
  expect(contentOf('cs_x', text, hash, opened)).toEqual(content);
  expect(contentOf('cs_x', text.replace('W-1', 'W-2'), hash, opened)).toBe('changed');
});

test('it is kept for 30 days after the expiry of its session, and for 7 days after its exp', () => {
  const days = (count: number) => new Date(NOW + count * 86_400_000).toISOString();
  expect(made().purgeAt).toBe(days(30 + 1 / 24));
  expect(made({}, String(NOW / 1_000 + 7 * 86_400)).purgeAt).toBe(days(30 + 1 / 24));
  expect(made({}, String(NOW / 1_000 + 30 * 86_400)).purgeAt).toBe(days(37));
});

test('it has at most 64 KB, counted in bytes', () => {
  const text = (state: string) => contentText({ ...content, state }, 's');
  const room = MAX_CONTENT_BYTES - Buffer.byteLength(text(''));
  expect(Buffer.byteLength(text('x'.repeat(room)))).toBe(65_536);
  for (const state of ['x'.repeat(room + 1), 'é'.repeat(room / 2 + 1)])
    expect(() => text(state)).toThrow(expect.objectContaining({ code: 'VALIDATION_ERROR', message: expect.stringContaining('at most 64 KB') }));
});

test('a purge names the keys of boxed rows', async () => {
  const { pool, close } = await database();
  const rows = postgresIntakeRows(pool);
  const boxed = made();
  await rows.write(boxed);
  await rows.write({ ...boxed, checkoutId: 'cs_y', text: contentText(content, 's') });
  const purged = [...(await rows.purge(boxed.purgeAt, 10))].sort((one, other) => (one.checkoutId < other.checkoutId ? -1 : 1));
  expect(purged).toEqual([{ checkoutId: 'cs_x', hash: boxed.hash, keyId: key.id }, { checkoutId: 'cs_y', hash: boxed.hash, keyId: null }]); // prettier-ignore
  await close();
});

test('a purge takes as many as asked for, by the index', async () => {
  const { pool, close } = await database();
  await pool.query(`insert into checkout_intake select 'cs_' || n, 'h', 'x', to_timestamp(n) from generate_series(1, 2500) n`);
  expect(await postgresIntakeRows(pool).purge(new Date(2_400_000).toISOString(), 5_000)).toHaveLength(2_400);
  expect((await pool.query('select from checkout_intake')).rowCount).toBe(100);
  await close();
});
