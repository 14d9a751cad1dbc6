/** UTC days. Pure. */

const DAY_MS = 86_400_000;

/** YYYY-MM-DD. `time`: RFC 3339 in UTC. */
export const dayOf = (time: string): string => time.slice(0, 10);

/** RFC 3339: the begin of a day, YYYY-MM-DD. */
export const beginOf = (day: string): string => `${day}T00:00:00.000Z`;

/** The day that begins at this time, or the first day that begins after it. */
export const firstDayFrom = (time: string): string => dayOf(new Date(Math.ceil(Date.parse(time) / DAY_MS) * DAY_MS).toISOString());

export const isMidnight = (time: string): boolean => Date.parse(time) % DAY_MS === 0;
