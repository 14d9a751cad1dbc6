import { ServiceError } from './errors.js';

/** Rules for dates that people, files and processors tell us. Checked where a date comes in, and never where stored events are read again. */

const DAY_MS = 86_400_000;

/** Elsewhere the next day may have begun, or the day before may not be over. */
export const ZONE_DAYS = 1;
/** Processors announce when money will arrive. Long holidays included, two weeks are the most that they need. */
export const FUNDING_AHEAD_DAYS = 14;
/** An older date more likely has a wrong year. A year and a month: people close the books of a year in the month after it. */
export const OLDEST_DAYS = 400;
/** Card networks give at most 120 days for a step of a dispute. The rest is for arbitration. */
export const DUE_AHEAD_DAYS = 180;

export interface DateLimits {
  /** What the date is about. `date`: RFC 3339 or YYYY-MM-DD; `what`: words for the message. */
  readonly notBefore?: { readonly date: string; readonly what: string };
  /** Whole days after today. Default: {@link ZONE_DAYS}. */
  readonly aheadDays?: number;
  /** True: a person says that the date is more than {@link OLDEST_DAYS} old. */
  readonly old?: boolean;
}

const dayOf = (epochMs: number): number => Math.floor(epochMs / DAY_MS);

/**
 * What is wrong with a date (RFC 3339 or YYYY-MM-DD, and valid): words for a message after the name of its field. null: nothing. Compares UTC days.
 * `now`: business time, in milliseconds since the epoch.
 */
export const wrongDate = (date: string, now: number, { notBefore, aheadDays = ZONE_DAYS, old = false }: DateLimits = {}): string | null => {
  const [day, today] = [dayOf(Date.parse(date)), dayOf(now)];
  if (notBefore && day < dayOf(Date.parse(notBefore.date)) - ZONE_DAYS) return `${date} lies before ${notBefore.what}, ${notBefore.date}`;
  if (day > today + aheadDays) return `${date} lies ${aheadDays > ZONE_DAYS ? `more than ${aheadDays} days ` : ''}in the future`;
  if (!old && day < today - OLDEST_DAYS) return `${date} lies more than ${OLDEST_DAYS} days back; --old allows that`;
  return null;
};

/** Throws VALIDATION_ERROR if {@link wrongDate} finds something. */
export const refuseWrongDate = (field: string, date: string, now: number, limits?: DateLimits): void => {
  const why = wrongDate(date, now, limits);
  if (why !== null) throw new ServiceError('VALIDATION_ERROR', `${field} ${why}.`);
};
