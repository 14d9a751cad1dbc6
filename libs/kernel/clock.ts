/**
 * Code in `libs/` gets the time only from a `Clock`. Tests and the simulation pass clocks of their own.
 *
 * A clock has two times. They differ only in a sandbox whose time was moved. docs/decisions/0048-two-clocks.md lists the uses of each.
 */
export interface Clock {
  /** Business time, in milliseconds since the epoch. For times in events, and for times that are compared with them. */
  now(): number;
  /** The time of the host, in milliseconds since the epoch. It is never moved. For keys, tokens, windows and signatures. */
  realNow(): number;
  /** Milliseconds that never jump, for deadlines. */
  monotonic(): number;
  /** Resolves after `ms`, or at once when `signal` aborts. Never rejects. */
  sleep(ms: number, signal?: AbortSignal): Promise<void>;
}

export const systemClock: Clock = {
  now: () => Date.now(),
  realNow: () => Date.now(),
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

/** The clock of a sandbox process. Its business time is the host's time and the time that `payfold sandbox advance` has added. */
export class SandboxClock implements Clock {
  private ahead = 0;

  constructor(private readonly host: Clock = systemClock) {}

  now = (): number => this.host.now() + this.ahead;
  realNow = (): number => this.host.realNow();
  monotonic = (): number => this.host.monotonic();
  sleep = (ms: number, signal?: AbortSignal): Promise<void> => this.host.sleep(ms, signal);

  get aheadMs(): number {
    return this.ahead;
  }

  /** Business time never goes back. Returns whether it has moved. */
  moveTo(aheadMs: number): boolean {
    if (aheadMs <= this.ahead) return false;
    this.ahead = aheadMs;
    return true;
  }
}

/** RFC 3339, UTC, milliseconds (C2). */
export const timestamp = (epochMs: number): string => new Date(epochMs).toISOString();

/** The largest difference that we expect between the clocks of two hosts. */
export const HOST_CLOCKS_DIFFER_MS = 10 * 60_000;

/**
 * Milliseconds since `since` (RFC 3339). If `since` is more than {@link HOST_CLOCKS_DIFFER_MS} in the future, a wrong clock wrote `since`. The age is
 * then infinite, so that no process waits.
 */
export const ageMs = (clock: Clock, since: string): number => {
  const age = clock.now() - Date.parse(since);
  return age < -HOST_CLOCKS_DIFFER_MS ? Number.POSITIVE_INFINITY : age;
};

const LATE = Symbol('late');

/** Rejects with `error()` if `promise` takes longer than `ms`. Does not stop the work behind `promise`. */
export const within = async <T>(clock: Clock, ms: number, promise: Promise<T>, error: () => Error): Promise<T> => {
  const timer = new AbortController();
  try {
    const first = await Promise.race([promise, clock.sleep(ms, timer.signal).then((): typeof LATE => LATE)]);
    if (first === LATE) throw error();
    return first;
  } finally {
    // Without a reason, Node would create a DOMException with a stack trace for every call.
    timer.abort('done');
  }
};

/** Rejects with the reason of `stop` as soon as `stop` aborts. Does not stop the work behind `promise`. */
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

/** True for a day that exists, YYYY-MM-DD. */
export const isDay = (text: string): boolean =>
  /^\d{4}-\d{2}-\d{2}$/.test(text) && !Number.isNaN(Date.parse(text)) && new Date(Date.parse(text)).toISOString().startsWith(text);
