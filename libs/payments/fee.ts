/** The service fee, in whole cents; half a cent rounds up. Quotes and charges use the same function (C32, C49). */
import { type Cents, proRata } from '#kernel';

export interface FeeSchedule {
  readonly flatCents: Cents;
  /** Hundredths of a percent of the principal. */
  readonly percentBps: number;
  readonly minCents: Cents;
  /** null: no upper bound. */
  readonly maxCents: Cents | null;
}

const BPS = 10_000;

/** `clamp(flat + floor((amount · bps + 5000) / 10000), min, max)` (C32). */
export const serviceFee = (amountCents: Cents, schedule: FeeSchedule): Cents => {
  const percent = Math.floor((amountCents * schedule.percentBps + BPS / 2) / BPS);
  const fee = Math.max(schedule.flatCents + percent, schedule.minCents);
  return schedule.maxCents === null ? fee : Math.min(fee, schedule.maxCents);
};

/** Each line's share of the fee, by largest remainder over the lines' amounts (C33). */
export const feeByLine = (serviceFeeCents: Cents, lineAmounts: readonly Cents[]): Cents[] => proRata(serviceFeeCents, lineAmounts);
