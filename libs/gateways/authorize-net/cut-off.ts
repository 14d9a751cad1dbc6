/** When the day's batch of a merchant account closes. */

/** `time`: HH:MM in `timeZone`, an IANA name. */
export interface CutOff {
  readonly time: string;
  readonly timeZone: string;
}

const MINUTE_MS = 60_000;
const HOUR_MS = 60 * MINUTE_MS;
const DAY_MS = 24 * HOUR_MS;

/** A charge this long before a cut-off may still miss it. */
const SUBMITTED_BEFORE_MS = 10 * MINUTE_MS;
/** The batch of a cut-off is settled and listed within this time. */
const SETTLED_WITHIN_MS = 6 * HOUR_MS;
/** Without a known cut-off: every charge is in a batch that is settled by then. */
const WITHOUT_CUT_OFF_MS = 48 * HOUR_MS;

const formats = new Map<string, Intl.DateTimeFormat>();
/** Throws a RangeError if there is no such time zone. */
const formatOf = (timeZone: string): Intl.DateTimeFormat => {
  const known = formats.get(timeZone);
  if (known) return known;
  const numeric = { year: 'numeric', month: 'numeric', day: 'numeric', hour: 'numeric', minute: 'numeric', second: 'numeric' } as const;
  const made = new Intl.DateTimeFormat('en-US', { timeZone, hourCycle: 'h23', ...numeric });
  formats.set(timeZone, made);
  return made;
};

/** Milliseconds by which the zone's clock is ahead of UTC at an instant. */
const aheadOfUtc = (timeZone: string, ms: number): number => {
  const parts = formatOf(timeZone).formatToParts(ms);
  const of = (type: Intl.DateTimeFormatPartTypes) => Number(parts.find((part) => part.type === type)!.value);
  return Date.UTC(of('year'), of('month') - 1, of('day'), of('hour'), of('minute'), of('second')) - Math.floor(ms / 1_000) * 1_000;
};

/** The first cut-off after an instant, in milliseconds since the epoch. If a change of the clocks skips the time, the cut-off is that much later. */
export const cutOffAfter = ({ time, timeZone }: CutOff, ms: number): number => {
  const [hours, minutes] = time.split(':').map(Number) as [number, number];
  const localMidnight = Math.floor((ms + aheadOfUtc(timeZone, ms)) / DAY_MS) * DAY_MS;
  for (let day = localMidnight - DAY_MS; ; day += DAY_MS) {
    const local = day + hours * HOUR_MS + minutes * MINUTE_MS;
    // The offset at the cut-off itself: the first guess may be on the other side of a change of the clocks.
    const guess = local - aheadOfUtc(timeZone, local);
    const at = local - aheadOfUtc(timeZone, guess);
    if (at > ms) return at;
  }
};

export interface Decision {
  /** When the absence of a charge can be decided. */
  readonly untilMs: number;
  /** As long as a transaction that was submitted before this time is not settled, the batch has not closed. */
  readonly cutOffMs: number;
}

/** When a charge or refund that began at `begunMs` has surely been in a settled batch, if it was ever made. */
export const decidedBy = (cutOff: CutOff | null, begunMs: number): Decision => {
  const latest = begunMs + SUBMITTED_BEFORE_MS;
  if (!cutOff) return { untilMs: begunMs + WITHOUT_CUT_OFF_MS, cutOffMs: latest };
  const cutOffMs = cutOffAfter(cutOff, latest);
  return { untilMs: cutOffMs + SETTLED_WITHIN_MS, cutOffMs };
};
