/** What disputes take from the legs of a payment (C30). Pure. The payment, the refundable figures and the books all use these functions. */
import { type Cents, proRata, sumCents } from '#kernel';
import type { Leg } from './gateway/gateway.js';

/** The cents that a dispute takes from one leg. */
export interface Taken {
  readonly leg: Leg;
  readonly principalCents: Cents;
  readonly feeCents: Cents;
  /** Cents beyond what remained of principal and fee: they were returned before, or another dispute takes them. Absent: none. */
  readonly excessCents?: Cents;
}

interface Claim {
  readonly disputedAmountCents: Cents;
  readonly leg?: Leg;
}

interface LegCents {
  readonly leg: Leg;
  readonly principalCents: Cents;
  readonly feeCents: Cents;
}

const both = ({ principalCents, feeCents }: LegCents): Cents => principalCents + feeCents;

/**
 * Shares a dispute over what remains of its legs, in their order: the principal's charge first, then the fee's. Within a leg, principal and fee give in
 * proportion to what remains of them. The excess counts on the legs that charged it; what exceeds the charges counts on the first leg.
 *
 * `remaining`: captured less returned cents, of the same legs. `standing`: what other disputes take now.
 */
export const takingOf = (
  captured: readonly LegCents[],
  remaining: readonly LegCents[],
  standing: readonly Taken[],
  { leg: named, disputedAmountCents }: Claim,
): readonly Taken[] => {
  let left = disputedAmountCents;
  const take = (most: Cents): Cents => {
    const cents = Math.min(left, Math.max(0, most));
    left -= cents;
    return cents;
  };
  const shares = remaining.flatMap(({ leg, principalCents, feeCents }, index) => {
    if (named !== undefined && leg !== named) return [];
    const others = standing.filter((one) => one.leg === leg);
    const weights = [principalCents - sumCents(others, (one) => one.principalCents), feeCents - sumCents(others, (one) => one.feeCents)];
    const free = weights.map((weight) => Math.max(0, weight)) as [Cents, Cents];
    const [principal, fee] = proRata(take(free[0] + free[1]), free) as [Cents, Cents];
    const gone = sumCents(others, (one) => both(one) + (one.excessCents ?? 0)) + principal + fee;
    return [{ leg, principalCents: principal, feeCents: fee, most: both(captured[index]!) - gone }];
  });
  const excess = shares.map(({ most }) => take(most));
  excess[0]! += left;
  return shares.flatMap(({ most: _, ...share }, index) => {
    const excessCents = excess[index]!;
    return both(share) + excessCents === 0 ? [] : [{ ...share, ...(excessCents > 0 && { excessCents }) }];
  });
};

/**
 * How disputes were shared before their events said what they take: over the charged cents, whatever was returned. What exceeds them goes to the first
 * leg. Their entries stand.
 */
export const sharedByTotal = (
  legs: readonly LegCents[],
  standing: readonly Taken[],
  { leg: named, disputedAmountCents }: Claim,
): readonly Taken[] => {
  let left = disputedAmountCents;
  const mine = legs.filter(({ leg }) => named === undefined || leg === named);
  const cents = mine.map((one) => {
    const before = sumCents(standing, (share) => (share.leg === one.leg ? both(share) : 0));
    const part = Math.min(left, Math.max(0, both(one) - before));
    left -= part;
    return part;
  });
  cents[0]! += left;
  return mine.flatMap(({ leg, principalCents, feeCents }, index) => {
    if (cents[index] === 0) return [];
    const [principal, fee] = proRata(cents[index]!, [principalCents, feeCents]) as [Cents, Cents];
    return [{ leg, principalCents: principal, feeCents: fee }];
  });
};

/** What a dispute takes after a return that took a part of the same cents of a leg. These cents become excess. `remaining`: what the return leaves of the leg. */
export const overtaken = (taken: readonly Taken[], remaining: LegCents, standing: readonly Taken[]): readonly Taken[] => {
  const others = standing.filter(({ leg }) => leg === remaining.leg);
  return taken.map((share) => {
    if (share.leg !== remaining.leg) return share;
    const over = (part: 'principalCents' | 'feeCents') =>
      Math.min(share[part], Math.max(0, sumCents(others, (one) => one[part]) + share[part] - remaining[part]));
    const [principal, fee] = [over('principalCents'), over('feeCents')];
    if (principal + fee === 0) return share;
    const { leg, principalCents, feeCents, excessCents = 0 } = share;
    return { leg, principalCents: principalCents - principal, feeCents: feeCents - fee, excessCents: excessCents + principal + fee };
  });
};
