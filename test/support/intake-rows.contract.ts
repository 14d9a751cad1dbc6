/** The contract of the contents of checkouts, in Postgres and in the simulation. */
import { createHash } from 'node:crypto';
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import type { IntakeRow, IntakeRows } from '#checkout';

/** Empty. */
export interface IntakeRowsGround {
  readonly rows: IntakeRows;
  close(): Promise<unknown>;
}

const at = (ms: number) => new Date(Date.UTC(2026, 2, 2, 9) + ms).toISOString();
const row = (checkoutId: string, text: string, ms: number): IntakeRow => ({
  checkoutId,
  hash: createHash('sha256').update(text).digest('hex'),
  text,
  purgeAt: at(ms),
});

export const intakeRowsContract = (whose: string, open: () => Promise<IntakeRowsGround>): void =>
  describe(`${whose} contents of checkouts`, () => {
    let ground: IntakeRowsGround;
    beforeEach(async () => {
      ground = await open();
    });
    afterEach(() => ground.close());

    test('are read by checkout, byte for byte', async () => {
      const texts = ['{"state":"\\u0000 \\ud800"}', '{ "b": 1, "a": "ü 😀 \\"" }'] as const;
      const [first, second, other] = [row('a', texts[0], 1), row('a', texts[1], 1), row('A', texts[0], 1)];
      for (const one of [first, second, other]) await ground.rows.write(one);
      expect([...(await ground.rows.read('a'))].sort()).toEqual([[first.hash, texts[0]], [second.hash, texts[1]]].sort()); // prettier-ignore
      expect([...(await ground.rows.read('A'))]).toEqual([[other.hash, texts[0]]]);
      expect((await ground.rows.read('b')).size).toBe(0);
    });

    test('are purged from their time on, oldest first, as many as asked for', async () => {
      for (const ms of [3, 1, 2, 4]) await ground.rows.write(row(`c${ms}`, '{}', ms));
      const left = async () => (await Promise.all([1, 2, 3, 4].map(async (ms) => [...(await ground.rows.read(`c${ms}`)).keys()].length))).join('');
      expect(await ground.rows.purge(at(0), 10)).toEqual([]);
      expect(await left()).toBe('1111');
      expect((await ground.rows.purge(at(3), 2)).map(({ checkoutId, keyId }) => [checkoutId, keyId]).sort()).toEqual([['c1', null], ['c2', null]]); // prettier-ignore
      expect(await left()).toBe('0011');
      expect(await ground.rows.purge(at(3), 10)).toHaveLength(1);
      expect(await left()).toBe('0001');
    });
  });
