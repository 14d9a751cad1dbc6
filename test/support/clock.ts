/** A clock that specs can move. It runs like real time and jumps on command. After a jump, every sleep whose time is over ends. */
import type { Clock } from '#kernel';

export class MovableClock implements Clock {
  private offset: number;
  private wrongByMs = 0;
  private readonly sleepers = new Set<() => void>();

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
      this.sleepers.add(look);
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
    for (const look of [...this.sleepers]) look();
  }
}
