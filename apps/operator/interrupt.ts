/** Handles Ctrl-C and SIGTERM: the command ends at once, whatever it waits for, and stops everything that it started. */

const EXIT_CODES = { SIGINT: 130, SIGTERM: 143 } as const;
/** After this time the process exits, even if a resource has not closed, such as a pool with a running statement. */
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
  /** After this call, the command itself must end when the signal aborts. Without this call, an interrupt calls `close` and then ends the process. */
  readonly untilInterrupted: () => AbortSignal;
  /** Removes the listeners, so that Ctrl-C and SIGTERM have their default effect again. */
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
      return interrupted.signal;
    },
    ignore: () => {
      for (const off of listeners) off();
    },
  };
};
