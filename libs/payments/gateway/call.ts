/** How a gateway is called: within its time limits (C42), and never with less time than a call needs. */
import type { Clock, Deadline } from '#kernel';
import type { Outcome } from './gateway.js';

/** C42. The order that must hold: call 20 s < request 28 s < key lease 60 s ≤ start of recovery 60 s. */
export const GATEWAY_CALL_MS = 20_000;
export const REQUEST_DEADLINE_MS = 28_000;
/** A call that would get less is not sent. */
const MIN_CALL_MS = 2_000;
/** The time that an adapter gets to report the outcome of an aborted call. */
const LAST_WORD_MS = 250;

/** Runs one call. A call that was not sent is certain not to have been processed. A call that did not answer in time is unknown. */
export const callGateway = async <T>(clock: Clock, deadline: Deadline, call: (signal: AbortSignal) => Promise<Outcome<T>>): Promise<Outcome<T>> => {
  const limit = Math.min(GATEWAY_CALL_MS, deadline.leftMs);
  if (limit < MIN_CALL_MS) return { kind: 'not_processed', answered: false, raw: 'no time left to call the gateway' };
  return bounded(clock, limit, call, () => ({ kind: 'unknown', cause: 'timeout' }));
};

/** Aborts the call after `ms`. If it does not return even then, the answer is `otherwise`. */
export const bounded = async <T>(clock: Clock, ms: number, call: (signal: AbortSignal) => Promise<T>, otherwise: () => T): Promise<T> => {
  const abort = new AbortController();
  // The adapter decides what an aborted call means. The extra time is for that decision. It also bounds an adapter that never settles.
  const late = clock.sleep(ms, abort.signal).then(async () => {
    if (!abort.signal.aborted) {
      abort.abort();
      await clock.sleep(LAST_WORD_MS);
    }
    return otherwise();
  });
  try {
    return await Promise.race([call(abort.signal), late]);
  } finally {
    // A reason of our own. Without one, every call would make a DOMException with its stack.
    abort.abort('done');
  }
};
