/** The contract of the rows of personal keys: Postgres, the simulation and the rows in memory. */
import { randomBytes, randomUUID } from 'node:crypto';
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import type { PersonalKeyRows, WrappedKey } from '#platform';

/** Empty rows. */
export interface PersonalKeyRowsGround {
  readonly rows: PersonalKeyRows;
  close(): Promise<unknown>;
}

const AT = '2026-03-02T09:00:00.000Z';
const LATER = '2026-03-03T09:00:00.000Z';
const key = (): WrappedKey => ({ keyId: randomUUID(), kid: 'k1', wrapped: randomBytes(92) });

export const personalKeyRowsContract = (whose: string, open: () => Promise<PersonalKeyRowsGround>): void =>
  describe(`${whose} rows of personal keys`, () => {
    let ground: PersonalKeyRowsGround;
    beforeEach(async () => {
      ground = await open();
    });
    afterEach(() => ground.close());

    test('are found by their ids, in the order that was asked for, also twice', async () => {
      const [one, other] = [key(), key()];
      await ground.rows.insert([one, other]);
      const unknown = randomUUID();
      expect(await ground.rows.find([other.keyId, unknown, one.keyId, other.keyId])).toEqual([
        { keyId: other.keyId, key: other, erasedAt: null },
        { keyId: unknown, key: null, erasedAt: null },
        { keyId: one.keyId, key: one, erasedAt: null },
        { keyId: other.keyId, key: other, erasedAt: null },
      ]);
      expect(await ground.rows.find([])).toEqual([]);
    });

    test('a block is written whole or not at all', async () => {
      const [known, fresh] = [key(), key()];
      await ground.rows.insert([known]);
      await expect(ground.rows.insert([fresh, known])).rejects.toThrow();
      expect(await ground.rows.find([fresh.keyId])).toEqual([{ keyId: fresh.keyId, key: null, erasedAt: null }]);
    });

    test('an erased key is gone, and keeps the time of its first erasure', async () => {
      const [one, other] = [key(), key()];
      await ground.rows.insert([one, other]);
      const never = randomUUID();
      await ground.rows.forget([one.keyId, never], { erasureId: randomUUID(), at: AT });
      await ground.rows.forget([one.keyId], { erasureId: randomUUID(), at: LATER });
      expect(await ground.rows.find([one.keyId, other.keyId, never])).toEqual([
        { keyId: one.keyId, key: null, erasedAt: AT },
        { keyId: other.keyId, key: other, erasedAt: null },
        { keyId: never, key: null, erasedAt: AT },
      ]);
    });

    test('a key that nothing uses is gone without a trace', async () => {
      const [one, other] = [key(), key()];
      await ground.rows.insert([one, other]);
      await ground.rows.discard([one.keyId, randomUUID()]);
      expect(await ground.rows.find([one.keyId, other.keyId])).toEqual([
        { keyId: one.keyId, key: null, erasedAt: null },
        { keyId: other.keyId, key: other, erasedAt: null },
      ]);
    });

    test('a key that a restore brought back is erased again', async () => {
      const one = key();
      await ground.rows.forget([one.keyId], { erasureId: randomUUID(), at: AT });
      await ground.rows.insert([one]);
      expect(await ground.rows.find([one.keyId])).toEqual([{ keyId: one.keyId, key: one, erasedAt: AT }]);
      await ground.rows.forget([one.keyId], { erasureId: randomUUID(), at: LATER });
      expect(await ground.rows.find([one.keyId])).toEqual([{ keyId: one.keyId, key: null, erasedAt: AT }]);
    });
  });
