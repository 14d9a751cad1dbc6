/**
 * An outage of the database in the log of this process: one line when it begins, and one when it ends. Lines between them that only repeat it are left
 * out and counted. A line that names a payment or another thing by its id is always written.
 */
import { systemClock } from '#kernel';
import { DatabaseUnavailable, isAway } from './errors.js';

/** An answer ends the outage only if nothing has failed for this long: some connections may have survived. */
const QUIET_MS = 1_000;
/** Errors within errors that are looked at. */
const MAX_CAUSES = 4;

type Write = (fields: object, message: string) => void;

const databaseErrorIn = (error: unknown): DatabaseUnavailable | null => {
  let current = error;
  for (let depth = 0; depth < MAX_CAUSES && current instanceof Error; depth += 1, current = current.cause)
    if (current instanceof DatabaseUnavailable) return current;
  return null;
};

let begun: { readonly at: number; readonly write: Write; failedAt: number; leftOut: number } | null = null;

/**
 * True: the line says only that the database is away. It must not be written. `write`: writes another line to the same log, at the level of this one. So
 * a log that shows this line shows the outage, too.
 */
export const saysOnlyAway = (fields: unknown, write: Write): boolean => {
  if (typeof fields !== 'object' || fields === null || !('err' in fields)) return false;
  const error = databaseErrorIn(fields.err);
  if (!error || (!begun && !isAway(error))) return false;
  const at = systemClock.monotonic();
  if (!begun) {
    begun = { at, write, failedAt: at, leftOut: 0 };
    write({ cause: error.message }, 'the database is away');
  }
  begun.failedAt = at;
  if (Object.keys(fields).some((name) => /id$/i.test(name))) return false;
  begun.leftOut += 1;
  return true;
};

/** Call this after each answer of the database. */
export const databaseAnswered = (): void => {
  if (!begun) return;
  const now = systemClock.monotonic();
  if (now - begun.failedAt < QUIET_MS) return;
  const { at, write, leftOut } = begun;
  begun = null;
  write({ seconds: Math.round((now - at) / 1_000), leftOut }, 'the database is back');
};
