/** The pace of lists that are read in the background. They must not use up the processor's limit while a payment needs it. */
import type { Clock } from '#kernel';

/** Five lists a second of each merchant account. */
const LIST_GAP_MS = 200;

/** Waits for the turn of a list. Rejects if the signal aborts before. Calls that move money do not wait. */
export type Pace = (signal: AbortSignal) => Promise<void>;

export const createPace = (clock: Pick<Clock, 'monotonic' | 'sleep'>, gapMs = LIST_GAP_MS): Pace => {
  let nextMs = 0;
  return async (signal) => {
    const now = clock.monotonic();
    const waitMs = nextMs - now;
    nextMs = Math.max(nextMs, now) + gapMs;
    if (waitMs > 0) await clock.sleep(waitMs, signal);
    signal.throwIfAborted();
  };
};
