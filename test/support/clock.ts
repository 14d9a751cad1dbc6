/** A clock that specs can move. It runs like real time and jumps on command. After a jump, every sleep whose time is over ends. */
import type { Clock } from '#kernel';

/** No pause between retries is longer. */
const LONGEST_PAUSE_MS = 500;

export class MovableClock implements Clock {
  private offset: number;
  private wrongByMs = 0;
  /** The sleeps under way: a function that ends the sleep if its time is over, and the milliseconds that were asked for. */
  private readonly sleepers = new Map<() => void, number>();

  /** Starts at the real time, or at `startAt`. */
  constructor(startAt?: string) {
    this.offset = startAt === undefined ? 0 : Date.parse(startAt) - Date.now();
  }

  now(): number {
    return Date.now() + this.offset + this.wrongByMs;
  }

  /** Here all times move together. */
  realNow(): number {
    return this.now();
  }

  monotonic(): number {
    return performance.now() + this.offset;
  }

  sleep(ms: number, signal?: AbortSignal): Promise<void> {
    return new Promise((resolve) => {
      const end = this.monotonic() + ms;
      let timer: NodeJS.Timeout | undefined;
      const done = () => {
        clearTimeout(timer);
        this.sleepers.delete(look);
        signal?.removeEventListener('abort', done);
        resolve();
      };
      const look = () => {
        clearTimeout(timer);
        const left = end - this.monotonic();
        if (left <= 0 || signal?.aborted) return done();
        timer = setTimeout(look, left);
      };
      this.sleepers.set(look, ms);
      signal?.addEventListener('abort', done, { once: true });
      look();
    });
  }

  /** Sets the wall clock ahead by `ms`, or back if `ms` is negative. The monotonic clock does not change. */
  setWrongBy(ms: number): void {
    this.wrongByMs = ms;
  }

  /** Moves the clock forward by `ms`. */
  advance(ms: number): void {
    this.offset += ms;
    for (const look of [...this.sleepers.keys()]) look();
  }

  /**
   * Waits for a call that pauses between retries, and cuts the pauses short. A longer sleep is a time limit: what it limits takes real time, which may
   * be much on a busy machine.
   */
  async hurry<T>(call: Promise<T>): Promise<T> {
    let done = false;
    void call.finally(() => (done = true)).catch(() => undefined);
    while (!done) {
      await new Promise((turn) => setTimeout(turn, 1));
      if ([...this.sleepers.values()].some((ms) => ms <= LONGEST_PAUSE_MS)) this.advance(LONGEST_PAUSE_MS);
    }
    return call;
  }
}
