import { describe, expect, test } from '@jest/globals';
import fc from 'fast-check';
import { MAX_AMOUNT_CENTS, proRata } from '#kernel';
import { feeByLine, type FeeSchedule, serviceFee } from './fee.js';

describe('the service fee: clamp(flat + floor((amount · bps + 5000) / 10000), min, max) (C32)', () => {
  test.each([
    [10_000, 50, 275, 0, null, 325],
    [1_010, 0, 250, 0, null, 25],
    [1_020, 0, 250, 0, null, 26],
    [1, 0, 250, 0, null, 0],
    [100, 0, 250, 100, null, 100],
    [9_999_999, 150, 299, 100, 5_000, 5_000],
  ])('%d cents; flat %d, bps %d, min %d, max %p → %d', (amountCents, flatCents, percentBps, minCents, maxCents, fee) =>
    expect(serviceFee(amountCents, { flatCents, percentBps, minCents, maxCents })).toBe(fee),
  );

  test.each([
    ['half a cent rounds up', 20, 250, 1],
    ['less than half a cent rounds down', 19, 250, 0],
    ['100 % of the largest payment stays exact', MAX_AMOUNT_CENTS, 10_000, MAX_AMOUNT_CENTS],
  ])('%s', (_, amountCents, percentBps, fee) => expect(serviceFee(amountCents, { flatCents: 0, percentBps, minCents: 0, maxCents: null })).toBe(fee));

  test('a schedule without anything is no fee (C35)', () =>
    expect(serviceFee(10_000, { flatCents: 0, percentBps: 0, minCents: 0, maxCents: null })).toBe(0));

  const schedule = fc
    .record({ flatCents: fc.nat(10_000), percentBps: fc.nat(10_000), minCents: fc.nat(5_000), over: fc.option(fc.nat(5_000)) })
    .map(({ over, ...rest }): FeeSchedule => ({ ...rest, maxCents: over === null ? null : rest.minCents + over }));
  const amount = fc.integer({ min: 1, max: MAX_AMOUNT_CENTS });

  test('is whole cents within its bounds, and agrees with exact arithmetic', () =>
    fc.assert(
      fc.property(amount, schedule, (amountCents, fee) => {
        const result = serviceFee(amountCents, fee);
        const exact = BigInt(fee.flatCents) + (BigInt(amountCents) * BigInt(fee.percentBps) + 5_000n) / 10_000n;
        const clamped = exact < BigInt(fee.minCents) ? BigInt(fee.minCents) : exact;
        expect(BigInt(result)).toBe(fee.maxCents !== null && clamped > BigInt(fee.maxCents) ? BigInt(fee.maxCents) : clamped);
      }),
    ));
  test('never falls as the amount grows', () =>
    fc.assert(
      fc.property(amount, fc.nat(1_000), schedule, (amountCents, more, fee) => {
        expect(serviceFee(amountCents + more, fee)).toBeGreaterThanOrEqual(serviceFee(amountCents, fee));
      }),
    ));
});

describe('shares over lines: largest remainder, ties to the lower index (C33, C34)', () => {
  test.each([
    [325, [3333, 3333, 3334], [108, 108, 109]],
    [325, [5000, 3000, 2000], [163, 97, 65]],
    [0, [5000, 3000], [0, 0]],
    [1, [1, 1, 1], [1, 0, 0]],
    [2, [1, 1, 1], [1, 1, 0]],
  ])('a fee of %d over %j → %j', (fee, lines, shares) => expect(feeByLine(fee, lines)).toEqual(shares));

  test('the steps of C34: each over the remaining amounts of the lines', () => {
    let left = [3333, 3333, 3334];
    for (const [cents, shares] of [
      [1000, [333, 333, 334]],
      [1, [1, 0, 0]],
      [8999, [2999, 3000, 3000]],
    ] as const) {
      expect(proRata(cents, left)).toEqual(shares);
      left = left.map((line, index) => line - shares[index]!);
    }
    expect(left).toEqual([0, 0, 0]);
    expect(proRata(3333, [5000, 3000, 2000])).toEqual([1666, 1000, 667]);
  });

  test('shares sum to the total, none is more than a cent off its exact part, none exceeds its line', () =>
    fc.assert(
      fc.property(
        fc.array(fc.integer({ min: 0, max: MAX_AMOUNT_CENTS }), { minLength: 1, maxLength: 50 }),
        fc.double({ min: 0, max: 1, noNaN: true }),
        (lines, part) => {
          const sum = lines.reduce((a, b) => a + b, 0);
          fc.pre(sum > 0);
          const total = Math.floor(sum * part);
          const shares = proRata(total, lines);
          expect(shares.reduce((a, b) => a + b, 0)).toBe(total);
          shares.forEach((share, index) => {
            expect(share).toBeLessThanOrEqual(lines[index]!);
            const floor = Number((BigInt(total) * BigInt(lines[index]!)) / BigInt(sum));
            expect(share - floor === 0 || share - floor === 1).toBe(true);
          });
        },
      ),
    ));
  test('cents without anything to share them over are a fault; no cents are shared over anything', () => {
    expect(() => proRata(1, [0, 0])).toThrow(/nothing to share/);
    expect(proRata(0, [0, 0])).toEqual([0, 0]);
    expect(proRata(0, [])).toEqual([]);
  });
});
