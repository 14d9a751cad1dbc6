/** Handles Ctrl-C and SIGTERM. A command stops everything that it started and ends, unless it has called `untilInterrupted`. */
import { whenNpmIsGone } from '../npm-parent.js';

const EXIT_CODES = { SIGINT: 130, SIGTERM: 143 } as const;
/** The process exits after this time, even if a resource is not closed, such as a pool with a running statement. */
const CLOSE_MS = 10_000;

export class Interrupted extends Error {
  constructor(readonly exitCode: number) {
    super('interrupted');
    this.name = 'Interrupted';
  }
}

export interface Interruption {
  /** Aborts with {@link Interrupted}. */
  readonly signal: AbortSignal;
  /**
   * After this call, an interrupt only aborts the signal, and the command must end by itself. Without this call, an interrupt calls `close` and ends
   * the process.
   */
  readonly untilInterrupted: () => AbortSignal;
  /** Removes the listeners. Ctrl-C and SIGTERM then have their default effect. */
  readonly ignore: () => void;
}

export const onInterrupt = (close: () => Promise<unknown>): Interruption => {
  const interrupted = new AbortController();
  let endsByItself = false;
  const listeners = Object.entries(EXIT_CODES).map(([name, exitCode]) => {
    const listener = () => {
      interrupted.abort(new Interrupted(exitCode));
      if (endsByItself) return;
      setTimeout(() => process.exit(exitCode), CLOSE_MS).unref();
      void close()
        .catch(() => undefined)
        .then(() => process.exit(exitCode));
    };
    process.once(name, listener);
    return () => process.off(name, listener);
  });
  return {
    signal: interrupted.signal,
    untilInterrupted: () => {
      endsByItself = true;
      // If only npx gets a signal, a command that waits for one would outlive it.
      whenNpmIsGone(() => process.kill(process.pid, 'SIGTERM'));
      return interrupted.signal;
    },
    ignore: () => {
      for (const off of listeners) off();
    },
  };
};
