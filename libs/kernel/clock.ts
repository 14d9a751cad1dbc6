/** The clock. Code in `libs/` gets a `Clock` as an argument and does not read the time itself, so that tests and the simulation set the time. */
export interface Clock {
  /** Milliseconds since the epoch, for times that are recorded. */
  now(): number;
  /** Milliseconds that never jump, for deadlines. */
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

/** Clocks of well-run hosts differ by less than this. */
export const HOST_CLOCKS_DIFFER_MS = 10 * 60_000;

/**
 * Milliseconds since an instant (RFC 3339) that any host recorded. If the instant is more than {@link HOST_CLOCKS_DIFFER_MS} in the future, a wrong
 * clock recorded it. It then counts as infinitely long ago, so that no process waits for it.
 */
export const ageMs = (clock: Clock, since: string): number => {
  const age = clock.now() - Date.parse(since);
  return age < -HOST_CLOCKS_DIFFER_MS ? Number.POSITIVE_INFINITY : age;
};

const LATE = Symbol('late');

/** Rejects with `error()` if `promise` takes longer than `ms`. The work behind `promise` goes on. */
export const within = async <T>(clock: Clock, ms: number, promise: Promise<T>, error: () => Error): Promise<T> => {
  const timer = new AbortController();
  try {
    const first = await Promise.race([promise, clock.sleep(ms, timer.signal).then((): typeof LATE => LATE)]);
    if (first === LATE) throw error();
    return first;
  } finally {
    // The explicit reason saves time: without one, Node would create a DOMException with its stack for every call.
    timer.abort('done');
  }
};

/** Rejects with the reason of `stop` as soon as `stop` aborts. The work behind `promise` goes on. */
export const orStopped = async <T>(promise: Promise<T>, stop: AbortSignal | undefined): Promise<T> => {
  if (!stop) return promise;
  const over = new AbortController();
  const stopped = new Promise<never>((_, reject) => {
    if (stop.aborted) reject(stop.reason as Error);
    else stop.addEventListener('abort', () => reject(stop.reason as Error), { once: true, signal: over.signal });
  });
  try {
    return await Promise.race([stopped, promise]);
  } finally {
    over.abort('done');
  }
};

/** The time that a request has left, measured by {@link Clock.monotonic}. */
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
