/** Calls a gateway within the time limits of C42. */
import { type LogGate, type Position, StoreIncident, Unavailable } from '#eventstore';
import { type Clock, type Deadline, type Json, within } from '#kernel';
import type { Waiting } from '#platform';
import type { HoldsKey } from '../keys/key-store.js';
import type { IntentEvent } from '../payment.js';
import type { Outcome } from './gateway.js';

/** The time limits of C42. This order must hold: call 20 s < request 28 s < key lease 60 s ≤ start of recovery 60 s. */
export const GATEWAY_CALL_MS = 20_000;
export const REQUEST_DEADLINE_MS = 28_000;
/** If less time than this is left, a call is not sent. */
export const MIN_CALL_MS = 2_000;
/** The time that an adapter gets to report the outcome of an aborted call. */
const LAST_WORD_MS = 250;

export interface CallPorts {
  readonly clock: Clock;
  readonly ownLog: LogGate;
  /** Surrounds each wait for a gateway or for a slot. Default: nothing. */
  readonly during?: Waiting;
}

/**
 * Checks the log, then runs one call. The log must hold the intent and every event that this process knows of.
 *
 * `intent`: the position of the intent, if this process has just appended it; null: the log held the intent before. A call that was not sent counts
 * as `not_processed`. A call without an answer in time counts as `unknown`. Throws {@link StoreIncident} if events are lost.
 */
export const callGateway = async <T>(
  ports: CallPorts,
  deadline: Deadline,
  intent: Position | null,
  call: (signal: AbortSignal) => Promise<Outcome<T>>,
): Promise<Outcome<T>> => {
  const { clock } = ports;
  if (!(await isVerified(ports, deadline, intent)))
    return { kind: 'not_processed', answered: false, raw: 'the event store or the key could not be checked' };
  const limit = Math.min(GATEWAY_CALL_MS, deadline.leftMs);
  if (limit < MIN_CALL_MS) return { kind: 'not_processed', answered: false, raw: 'no time left to call the gateway' };
  return duringOf(ports)(() => bounded(clock, limit, call, () => ({ kind: 'unknown', cause: 'timeout' })));
};

/** The wrapper of the wait for a gateway. Its own time is no time of the call: an answer in time counts, also if the wrapper takes longer. */
export const duringOf = ({ during }: Pick<CallPorts, 'during'>): Waiting => during ?? ((wait) => wait());

/** An intent, as it is kept outside of the log. */
export interface KeptEvent {
  readonly paymentId: string;
  readonly intent: IntentEvent;
}

/**
 * The ports of a request that has appended its intent. Before its first call they keep the intent outside of the log: the log may lose it, although
 * the call was executed. `holds`: they also ask whether the key still belongs to the request. null: there is no key, or it cannot be lost alone.
 *
 * A process may stand still between its claim and its intent. If the database of the keys goes back meanwhile, another request may claim the key. But
 * if the key is held when the intent is in the log, a row that is lost later is made again from the log.
 */
export const beginning = <Ports extends CallPorts>(ports: Ports, kept: KeptEvent, holds: HoldsKey | null): Ports => {
  const { ownLog } = ports;
  let held = holds === null;
  let isKept = false;
  const verified = async (intent: Position | null): Promise<void> => {
    const keeps = isKept ? ownLog.verified(intent) : ownLog.verified(intent, kept as unknown as Json).then(() => void (isKept = true));
    [held] = await Promise.all([held || holds!(kept.intent), keeps]);
    if (!held) throw new Unavailable('the key does not belong to this request any more');
  };
  return {
    ...ports,
    ownLog: {
      get incident() {
        return ownLog.incident;
      },
      verified,
      verifiedRead: (last) => ownLog.verifiedRead(last),
      report: (message) => ownLog.report(message),
      refuse: () => ownLog.refuse(),
    },
  };
};

/** Checks the log and the key. false: a store did not answer in time, or the key is lost. Throws {@link StoreIncident} if events are lost. */
export const isVerified = async ({ clock, ownLog }: CallPorts, deadline: Deadline, intent: Position | null): Promise<boolean> => {
  try {
    await within(clock, Math.max(0, deadline.leftMs), ownLog.verified(intent), () => new Unavailable('no time left to check the event store'));
    return true;
  } catch (error) {
    if (error instanceof StoreIncident) throw error;
    return false;
  }
};

/** Runs a call and aborts it after `ms`. If the aborted call does not return within {@link LAST_WORD_MS}, the result is `otherwise()`. */
export const bounded = async <T>(clock: Clock, ms: number, call: (signal: AbortSignal) => Promise<T>, otherwise: () => T): Promise<T> => {
  const abort = new AbortController();
  // An aborted call gets extra time, since the adapter decides its outcome. This timer also ends the wait for an adapter that never returns.
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
    // Without a reason, Node would create a DOMException with a stack trace for every call.
    abort.abort('done');
  }
};
