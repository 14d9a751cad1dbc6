/** Calendar months in time zones. Pure. */

/** A month as two instants: `from` is inclusive, `to` is exclusive (RFC 3339, UTC). */
export interface Month {
  readonly from: string;
  readonly to: string;
  /** The first days of this month and of the next one, YYYY-MM-DD. */
  readonly firstDay: string;
  readonly nextFirstDay: string;
}

export const UTC = 'UTC';

const ZONE = /^[A-Z]\w*(?:\/[A-Z][\w+-]*){1,2}$/;

/** True for the name of a zone, such as America/Chicago. Abbreviations and offsets are no zones: they mean different things in different places. */
export const isZone = (name: string): boolean => {
  if (name === UTC) return true;
  if (!ZONE.test(name)) return false;
  try {
    Intl.DateTimeFormat('en-US', { timeZone: name });
    return true;
  } catch {
    return false; // RangeError: there is no such zone.
  }
};

const DAY_MS = 86_400_000;

type ZoneClock = (at: number) => number;

/** The time that a clock in the zone shows at an instant, as if it were UTC. */
const clockIn = (zone: string): ZoneClock => {
  const format = new Intl.DateTimeFormat('en-US', {
    timeZone: zone,
    hourCycle: 'h23',
    year: 'numeric',
    month: 'numeric',
    day: 'numeric',
    hour: 'numeric',
    minute: 'numeric',
    second: 'numeric',
  });
  return (at) => {
    const parts = format.formatToParts(at);
    const of = (type: Intl.DateTimeFormatPartTypes) => Number(parts.find((part) => part.type === type)!.value);
    return Date.UTC(of('year'), of('month') - 1, of('day'), of('hour'), of('minute'), of('second'));
  };
};

/** The first instant of a day in a zone. `day`: the begin of the day in UTC. */
const beginOf = (shown: ZoneClock, day: number): number => {
  // The clock may change around midnight. The offsets of the day before and of the day after give a candidate each. The first one within the day is it.
  const candidates = [day - DAY_MS, day + DAY_MS].map((at) => day - (shown(at) - at));
  return Math.min(...candidates.filter((at) => shown(at) >= day));
};

const FORM = /^(20\d{2})-(0[1-9]|1[0-2])$/;

/** The month of a text like 2026-11. null: it is none, or the zone is unknown. */
export const monthOf = (period: string, zone: string): Month | null => {
  const [, year, month] = FORM.exec(period) ?? [];
  if (year === undefined || !isZone(zone)) return null;
  const [first, next] = [Date.UTC(Number(year), Number(month) - 1), Date.UTC(Number(year), Number(month))];
  const shown = clockIn(zone);
  const text = (at: number) => new Date(at).toISOString();
  return {
    from: text(beginOf(shown, first)),
    to: text(beginOf(shown, next)),
    firstDay: text(first).slice(0, 10),
    nextFirstDay: text(next).slice(0, 10),
  };
};

/** A day, YYYY-MM-DD, in a zone: from the first instant on, and before the second one (RFC 3339, UTC). */
export const dayIn = (zone: string, day: string): readonly [from: string, to: string] => {
  const [shown, first] = [clockIn(zone), Date.parse(day)];
  return [new Date(beginOf(shown, first)).toISOString(), new Date(beginOf(shown, first + DAY_MS)).toISOString()];
};
