/**
 * The clock: the only file below `apps/` that reads the time or sets a timer. Everything else gets a `Clock` handed in,
 * so that tests and the simulation decide what time it is.
 */
export interface Clock {
  /** Milliseconds since the epoch: what is written down. */
  now(): number;
  /** Milliseconds that never jump: what deadlines are measured with. */
  monotonic(): number;
  /** Resolves after `ms`, or at once when `signal` aborts. Never rejects. */
  sleep(ms: number, signal?: AbortSignal): Promise<void>;
}

export const systemClock: Clock = {
  now: () => Date.now(),
  monotonic: () => performance.now(),
  sleep: (ms, signal) =>
    new Promise((resolve) => {
      if (signal?.aborted) return resolve();
      const done = () => {
        clearTimeout(timer);
        signal?.removeEventListener('abort', done);
        resolve();
      };
      const timer = setTimeout(done, ms);
      signal?.addEventListener('abort', done, { once: true });
    }),
};

/** RFC 3339, UTC, milliseconds (C2). */
export const timestamp = (epochMs: number): string => new Date(epochMs).toISOString();

/** Clocks of hosts that are looked after differ by less than this. */
export const HOST_CLOCKS_DIFFER_MS = 10 * 60_000;

/**
 * Milliseconds since an instant (RFC 3339) that some host wrote down. What lies further ahead than hosts' clocks may differ was written by a clock that is
 * wrong, and counts as long ago: whoever waited for its time to come might wait for ever.
 */
export const ageMs = (clock: Clock, since: string): number => {
  const age = clock.now() - Date.parse(since);
  return age < -HOST_CLOCKS_DIFFER_MS ? Number.POSITIVE_INFINITY : age;
};

const LATE = Symbol('late');

/** Rejects with `error()` when `promise` takes longer than `ms`; the promise itself is not stopped. */
export const within = async <T>(clock: Clock, ms: number, promise: Promise<T>, error: () => Error): Promise<T> => {
  const timer = new AbortController();
  try {
    const first = await Promise.race([promise, clock.sleep(ms, timer.signal).then((): typeof LATE => LATE)]);
    if (first === LATE) throw error();
    return first;
  } finally {
    // A reason of our own: without one a DOMException with its stack is made for every call that came back in time.
    timer.abort('done');
  }
};

/** What is left of a request's time, measured with the clock that never jumps. */
export class Deadline {
  private readonly end: number;
  constructor(
    private readonly clock: Clock,
    ms: number,
  ) {
    this.end = clock.monotonic() + ms;
  }
  get leftMs(): number {
    return this.end - this.clock.monotonic();
  }
}
