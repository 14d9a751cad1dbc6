/** How a gateway is called: within its time limits (C42), and never with less time than a call needs. */
import { type LogGate, type Position, StoreIncident, Unavailable } from '#eventstore';
import { type Clock, type Deadline, within } from '#kernel';
import type { Outcome } from './gateway.js';

/** C42. The order that must hold: call 20 s < request 28 s < key lease 60 s ≤ start of recovery 60 s. */
export const GATEWAY_CALL_MS = 20_000;
export const REQUEST_DEADLINE_MS = 28_000;
/** A call that would get less is not sent. */
const MIN_CALL_MS = 2_000;
/** The time that an adapter gets to report the outcome of an aborted call. */
const LAST_WORD_MS = 250;

export interface CallPorts {
  readonly clock: Clock;
  readonly ownLog: LogGate;
}

/**
 * Checks that the log holds the intent and every known event, then runs one call. `intent`: its position, if this process just appended it; null: it
 * was already in the log. A call that was not sent counts as `not_processed`. A call that did not answer in time is
 * unknown. Throws {@link StoreIncident} if events are lost.
 */
export const callGateway = async <T>(
  ports: CallPorts,
  deadline: Deadline,
  intent: Position | null,
  call: (signal: AbortSignal) => Promise<Outcome<T>>,
): Promise<Outcome<T>> => {
  const { clock } = ports;
  if (!(await isVerified(ports, deadline, intent))) return { kind: 'not_processed', answered: false, raw: 'the event store could not be checked' };
  const limit = Math.min(GATEWAY_CALL_MS, deadline.leftMs);
  if (limit < MIN_CALL_MS) return { kind: 'not_processed', answered: false, raw: 'no time left to call the gateway' };
  return bounded(clock, limit, call, () => ({ kind: 'unknown', cause: 'timeout' }));
};

/** false: the event store could not be asked in time, as in an outage. Throws {@link StoreIncident}. */
export const isVerified = async ({ clock, ownLog }: CallPorts, deadline: Deadline, intent: Position | null): Promise<boolean> => {
  try {
    await within(clock, Math.max(0, deadline.leftMs), ownLog.verified(intent), () => new Unavailable('no time left to check the event store'));
    return true;
  } catch (error) {
    if (error instanceof StoreIncident) throw error;
    return false;
  }
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
