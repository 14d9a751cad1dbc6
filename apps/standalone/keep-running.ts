/** Starts a child process again whenever it ends. */
import { setTimeout as sleep } from 'node:timers/promises';
import type { Logger } from '#platform';

export interface Child {
  readonly pid: number;
  /** Resolves when the process is gone. */
  readonly exited: Promise<unknown>;
  /** Ends the process. Resolves when it is gone. */
  stop(): Promise<void>;
}

export interface Kept<C extends Child> {
  /** The first child. Later children have the same address. */
  readonly first: C;
  current(): C;
  stop(): Promise<void>;
}

const BACKOFF_MS = { first: 100, most: 5_000 } as const;
/** After a child has run for this long, the next restart uses the shortest pause again. */
const WELL_AFTER_MS = 30_000;

/**
 * Starts a child, and starts it again whenever it ends. `start` gets the ended child (null at first), because a new child takes its address. Rejects
 * if the first start fails. Later starts are repeated without limit. `stop` ends the first start, and {@link Kept.stop} ends later ones. `onEnd` is
 * called each time the child has ended by itself.
 *
 * `stop` says that the whole service stops. A signal to the process group then ends every child at once, which is no fault. Requests in flight still
 * need the child, so it is started again.
 */
export const keepRunning = async <C extends Child>(
  name: string,
  log: Logger,
  stop: AbortSignal,
  onEnd: () => void,
  start: (before: C | null, stop: AbortSignal) => Promise<C>,
): Promise<Kept<C>> => {
  const stopping = new AbortController();
  const levelOf = (fault: 'warn' | 'error') => (stop.aborted ? 'info' : fault);
  const first = await start(null, stop);
  let current = first;

  const watch = async (): Promise<void> => {
    let startedAt = performance.now();
    for (let tries = 0; ;) {
      await current.exited;
      if (stopping.signal.aborted) return;
      if (!stop.aborted) onEnd();
      log[levelOf('error')]({ child: name, pid: current.pid }, 'a child process ended by itself; it is started again');
      if (performance.now() - startedAt > WELL_AFTER_MS) tries = 0;
      for (let running = false; !running; tries++) {
        const pauseMs = Math.min(BACKOFF_MS.most, BACKOFF_MS.first * 2 ** Math.min(tries, 10));
        await sleep(pauseMs, undefined, { signal: stopping.signal }).catch(() => undefined);
        if (stopping.signal.aborted) return;
        try {
          current = await start(current, stopping.signal);
          running = true;
        } catch (error) {
          if (stopping.signal.aborted) return;
          log[levelOf('error')]({ child: name, err: error }, 'a child process could not be started again; it is tried again');
        }
      }
      startedAt = performance.now();
      if (stopping.signal.aborted) return current.stop();
      log[levelOf('warn')]({ child: name, pid: current.pid }, 'a child process is running again');
    }
  };
  const watching = watch();
  return {
    first,
    current: () => current,
    stop: async () => {
      stopping.abort();
      await current.stop();
      await watching;
    },
  };
};
