/** The contract of the rows of unfinished checkouts, in Postgres and in the simulation. */
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import { randomUUID } from 'node:crypto';
import type { UnfinishedPlace, UnfinishedRows } from '#checkout';

/** Empty. */
export interface UnfinishedRowsGround {
  readonly rows: UnfinishedRows;
  close(): Promise<unknown>;
}

const at = (ms: number) => new Date(Date.UTC(2026, 2, 2, 9) + ms).toISOString();
const session = (checkoutId: string, ms: number) => ({ checkoutId, paymentId: randomUUID() as string, since: at(ms) });

export const unfinishedRowsContract = (whose: string, open: () => Promise<UnfinishedRowsGround>): void =>
  describe(`${whose} rows of unfinished checkouts`, () => {
    let ground: UnfinishedRowsGround;
    beforeEach(async () => {
      ground = await open();
    });
    afterEach(() => ground.close());

    const ids = async (until = at(60_000), after: UnfinishedPlace | null = null, limit = 10) =>
      (await ground.rows.page(after, until, limit)).map(({ checkoutId }) => checkoutId);

    test('are paged oldest first, by id within an instant, up to an instant', async () => {
      const written = [session('b', 7), session('B', 7), session('a', 1), session('c', 1_000), session('_', 7)];
      await ground.rows.write(written);
      expect(await ids()).toEqual(['a', 'B', '_', 'b', 'c']);
      expect(await ids(at(7))).toEqual(['a', 'B', '_', 'b']);
      expect(await ids(at(6))).toEqual(['a']);
      expect(await ids(at(0))).toEqual([]);
      const seen: string[] = [];
      for (let after: UnfinishedPlace | null = null, page: UnfinishedPlace[] = []; after === null || page.length > 0; after = page.at(-1) ?? after) {
        page = await ground.rows.page(after, at(60_000), 2);
        seen.push(...page.map(({ checkoutId }) => checkoutId));
      }
      expect(seen).toEqual(['a', 'B', '_', 'b', 'c']);
    });

    test('a session that begins another attempt stands there once, at the new time', async () => {
      await ground.rows.write([session('a', 1), session('b', 2)]);
      await ground.rows.write([session('a', 3)]);
      expect(await ids()).toEqual(['b', 'a']);
    });

    test('a removed row is gone, and may come again', async () => {
      await ground.rows.write([session('a', 1), session('b', 2), session('c', 3)]);
      const [first] = await ground.rows.page(null, at(60_000), 1);
      await ground.rows.remove(['a', 'c', 'unknown']);
      expect(await ids()).toEqual(['b']);
      // A page may begin after a row that is gone.
      expect(await ids(at(60_000), first)).toEqual(['b']);
      await ground.rows.write([session('c', 4)]);
      expect(await ids()).toEqual(['b', 'c']);
    });
  });
