/** Money: whole cents of USD, never a float, never another currency. */
export type Cents = number;

/** Largest amount that one money field may carry (C4). */
export const MAX_AMOUNT_CENTS = 99_999_999;

export const isCents = (value: unknown): value is Cents =>
  typeof value === 'number' && Number.isSafeInteger(value) && value >= 1 && value <= MAX_AMOUNT_CENTS;

/** Throws if the sum is not a safe integer: money is never rounded. */
export const sumCents = <T>(items: readonly T[], cents: (item: T) => Cents): Cents => {
  const total = items.reduce((sum, item) => sum + cents(item), 0);
  if (!Number.isSafeInteger(total)) throw new Error('sum of cents is not a safe integer');
  return total;
};

/**
 * Shares out `totalCents` in proportion to `weights`. The shares sum to exactly `totalCents` (C33, C34).
 *
 * Each share is rounded down. The remaining cents go to the shares with the largest remainders; among equal remainders, the lower index is first.
 * Throws if all weights are 0 and `totalCents` is not.
 */
export const proRata = (totalCents: Cents, weights: readonly number[]): Cents[] => {
  const weightSum = weights.reduce((sum, weight) => sum + weight, 0);
  if (weightSum === 0) {
    if (totalCents !== 0) throw new Error('nothing to share the cents over');
    return weights.map(() => 0);
  }
  // Cents times cents can exceed the safe integers, even if each amount is within the limits of C4.
  const whole = BigInt(weightSum);
  const exact = weights.map((weight) => BigInt(totalCents) * BigInt(weight));
  const shares = exact.map((product) => Number(product / whole));
  const left = totalCents - shares.reduce((sum, share) => sum + share, 0);
  exact
    .map((product, index) => ({ index, remainder: product % whole }))
    .sort((a, b) => (a.remainder === b.remainder ? a.index - b.index : a.remainder > b.remainder ? -1 : 1))
    .slice(0, left)
    .forEach(({ index }) => (shares[index]! += 1));
  return shares;
};

/** Writes `1234` as `12.34`, without floats. */
export const decimal = (cents: Cents): string => {
  const digits = String(Math.abs(cents)).padStart(3, '0');
  return `${cents < 0 ? '-' : ''}${digits.slice(0, -2)}.${digits.slice(-2)}`;
};

/** Writes `1234` as `$12.34`, as people do. */
export const dollars = (cents: Cents): string => `${cents < 0 ? '-' : ''}$${decimal(Math.abs(cents))}`;
