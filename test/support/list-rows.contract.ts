/**
 * The contract of the list's rows, in Postgres and in the simulation. Only the newest revision of a payment is kept. For each filter, the pages equal
 * those of a model.
 */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { randomUUID } from 'node:crypto';
import fc from 'fast-check';
import { fold } from '#kernel';
import {
  type ListFilters,
  NO_FILTERS,
  PAGE_BYTES,
  payment as decider,
  type PaymentEvent,
  type PaymentListRows,
  type PaymentRow,
  type PaymentTerms,
} from '#payments';
import { abandoned, AT, created, declined, feeless, initiated, separate, unknown, voided } from './given.js';

export interface ListRowsGround {
  readonly rows: PaymentListRows;
  close(): Promise<unknown>;
}

/** One history for each of four statuses. */
const HISTORIES = [
  ['pending', () => []],
  ['failed', () => [declined]],
  ['unknown', () => [unknown]],
  ['succeeded', (terms, at) => [created(terms, at)]],
] as const satisfies readonly (readonly [NonNullable<ListFilters['status']>, (terms: PaymentTerms, at: string) => PaymentEvent[]])[];

const rowOf = (facts: readonly PaymentEvent[], paymentId: string = randomUUID()): PaymentRow => ({
  paymentId,
  revision: BigInt(facts.length - 1),
  payment: fold(decider, facts),
});

const text = (rows: readonly Pick<PaymentRow, 'paymentId' | 'payment'>[]) =>
  rows.map(({ paymentId, payment }) => [paymentId, JSON.stringify(payment)]);

export const listRowsContract = (whose: string, open: () => Promise<ListRowsGround>, runs: number): void =>
  describe(`${whose} rows of the list`, () => {
    let ground: ListRowsGround;
    beforeAll(async () => {
      ground = await open();
    });
    afterAll(() => ground.close());

    const all = async (accountId: string, filters: Partial<ListFilters> = {}) =>
      (await ground.rows.page(accountId, { ...NO_FILTERS, ...filters }, null, 100)).rows;

    test('come back as they were written, to the byte', async () => {
      const rows = HISTORIES.map(([, facts]) => rowOf([initiated(feeless), ...facts(feeless, AT)]));
      await ground.rows.write(rows);
      const read = await ground.rows.read([...rows.map(({ paymentId }) => paymentId), randomUUID()]);
      expect(read).toHaveLength(rows.length);
      for (const row of rows) {
        const found = read.find(({ paymentId }) => paymentId === row.paymentId)!;
        expect([found.revision, JSON.stringify(found.payment)]).toEqual([row.revision, JSON.stringify(row.payment)]);
      }
    });

    test('keep the newest revision after any later write', async () => {
      const terms = { ...separate, accountId: randomUUID() };
      const [begun, good, gone] = [[initiated(terms)], [initiated(terms), created(terms)], [initiated(terms), created(terms), ...voided('A')]];
      const { paymentId, ...first } = rowOf(begun);
      const write = (facts: readonly PaymentEvent[]) => ground.rows.write([rowOf(facts, paymentId)]);
      await ground.rows.write([{ paymentId, ...first }]);
      await write(good);
      await write(begun);
      expect(await ground.rows.read([paymentId])).toMatchObject([{ revision: 1n }]);
      expect(await all(terms.accountId, { status: 'pending' })).toEqual([]);
      expect(await all(terms.accountId, { status: 'succeeded' })).toHaveLength(1);
      // Write the same revision once more, as a repeated batch does.
      await ground.rows.write([{ ...rowOf(gone, paymentId), revision: 1n }]);
      expect(await all(terms.accountId, { status: 'succeeded' })).toHaveLength(1);
      await write(gone);
      expect(await all(terms.accountId, { status: 'succeeded' })).toEqual([]);
      expect(await all(terms.accountId)).toHaveLength(1);
    });

    test('refuse a payment that must have none', async () => {
      const [good, bad] = [rowOf([initiated()]), rowOf([abandoned])];
      await expect(ground.rows.write([good, bad])).rejects.toThrow('no row');
      expect(await ground.rows.read([good.paymentId, bad.paymentId])).toEqual([]);
    });

    test('a page of large payments ends early, and has at least one', async () => {
      const accountId = randomUUID();
      const [line] = feeless.lineItems;
      const ofSize = (bytes: number) => rowOf([initiated({ ...feeless, accountId, lineItems: [{ ...line!, referenceId: 'x'.repeat(bytes) }] })]);
      const [small, large] = [PAGE_BYTES / 4, PAGE_BYTES + 1];
      const rows = [small, large, small, small, small, small].map(ofSize);
      await ground.rows.write(rows);
      const order = rows.map(({ paymentId }) => paymentId).sort((one, other) => (one < other ? 1 : -1));
      const [seen, sizes]: [string[], number[]] = [[], []];
      for (let more = true; more;) {
        const last = seen.at(-1);
        const page = await ground.rows.page(accountId, NO_FILTERS, last === undefined ? null : { createdAt: Date.parse(AT), id: last }, 100);
        seen.push(...page.rows.map(({ paymentId }) => paymentId));
        sizes.push(page.rows.reduce((sum, { payment }) => sum + JSON.stringify(payment).length, 0));
        more = page.hasMore;
      }
      expect(seen).toEqual(order);
      expect(sizes.filter((bytes) => bytes > PAGE_BYTES)).toHaveLength(1);
      expect(sizes.length).toBeGreaterThan(2);
    });

    test('pages of any size under any filter: the model’s rows, newest first', async () => {
      const accounts = [randomUUID(), randomUUID()];
      const portals = [randomUUID(), randomUUID()];
      const time = (tick: number) => new Date(Date.parse(AT) + tick).toISOString();
      const tick = fc.integer({ min: 0, max: 4 });
      const payment = fc.record({ id: fc.uuid(), account: fc.nat(1), portal: fc.nat(1), tick, history: fc.nat(HISTORIES.length - 1) });
      const filter = fc.record({
        account: fc.nat(1),
        portal: fc.option(fc.nat(1)),
        status: fc.option(fc.constantFrom(...HISTORIES.map(([status]) => status))),
        from: fc.option(tick),
        to: fc.option(tick),
        size: fc.integer({ min: 1, max: 7 }),
      });
      const made: { row: PaymentRow; account: number; portal: number; tick: number; status: string }[] = [];
      await fc.assert(
        fc.asyncProperty(fc.array(payment, { maxLength: 12 }), fc.array(filter, { minLength: 1, maxLength: 5 }), async (payments, filters) => {
          const fresh = payments.map(({ id, account, portal, tick, history }) => {
            const terms = { ...feeless, accountId: accounts[account]!, portalId: portals[portal]! };
            const [status, facts] = HISTORIES[history]!;
            return { row: rowOf([initiated(terms, time(tick)), ...facts(terms, time(tick))], id), account, portal, tick, status };
          });
          if (fresh.length > 0) await ground.rows.write(fresh.map(({ row }) => row));
          made.push(...fresh);
          for (const { account, portal, status, from, to, size } of filters) {
            const expected = made
              .filter((one) => one.account === account && (portal === null || one.portal === portal) && (status === null || one.status === status))
              .filter((one) => (from === null || one.tick >= from) && (to === null || one.tick < to))
              .sort((a, b) => b.tick - a.tick || (a.row.paymentId < b.row.paymentId ? 1 : -1));
            const edge = (tick: number | null) => (tick === null ? null : Date.parse(time(tick)));
            const asked = { ...NO_FILTERS, portalId: portal === null ? null : portals[portal]!, status, from: edge(from), to: edge(to) };
            const seen: Pick<PaymentRow, 'paymentId' | 'payment'>[] = [];
            for (let more = true; more;) {
              const last = seen.at(-1);
              const createdAt = last ? made.find(({ row }) => row.paymentId === last.paymentId)!.tick : 0;
              const page = await ground.rows.page(accounts[account]!, asked, last ? { createdAt: edge(createdAt)!, id: last.paymentId } : null, size);
              more = page.hasMore;
              expect(page.rows.length).toBeLessThanOrEqual(size);
              seen.push(...page.rows);
            }
            expect(text(seen)).toEqual(text(expected.map(({ row }) => row)));
          }
        }),
        { numRuns: runs, endOnFailure: true },
      );
    }, 180_000);
  });
