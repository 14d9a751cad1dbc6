/** Compares the clock of this host with the clock of a processor. */
import type { Clock } from '#kernel';

/** The clocks may differ by this much. */
const MAX_CLOCK_DIFFERENCE_MS = 60_000;

/** A problem for the description of an account, or none. `date`: the header of the processor's answer. Absent: its clock is not known. */
export const clockProblems = (processor: string, date: string | undefined, clock: Pick<Clock, 'realNow'>): readonly string[] => {
  const differenceMs = date === undefined ? 0 : Math.abs(Date.parse(date) - clock.realNow());
  return differenceMs > MAX_CLOCK_DIFFERENCE_MS
    ? [`The clock of this host differs from the clock of ${processor} by ${Math.round(differenceMs / 1_000)} s.`]
    : [];
};
