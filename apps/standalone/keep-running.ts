/** A child process that is started again whenever it ends. Until then its callers fail or wait by their own rules. */
import { setTimeout as sleep } from 'node:timers/promises';
import type { Logger } from '#platform';

export interface Child {
  readonly pid: number;
  /** Resolves when the process is gone. */
  readonly exited: Promise<unknown>;
  /** Resolves when the process is gone, at once if it is already. */
  stop(): Promise<void>;
}

export interface Kept<C extends Child> {
  /** The first child. Its successors have the same address. */
  readonly first: C;
  current(): C;
  stop(): Promise<void>;
}

const BACKOFF_MS = { first: 100, most: 5_000 } as const;
/** A child that lived this long was healthy. Its end counts as a new fault. */
const WELL_AFTER_MS = 30_000;

/**
 * `start` gets the child that ended (null at first), so the next one can take its address. Rejects if the first child cannot be started. Later it
 * tries again without end. The signal of `start` ends a start that is under way: the first one by `stop`, later ones by {@link Kept.stop}.
 */
export const keepRunning = async <C extends Child>(
  name: string,
  log: Logger,
  stop: AbortSignal,
  start: (before: C | null, stop: AbortSignal) => Promise<C>,
): Promise<Kept<C>> => {
  const stopping = new AbortController();
  const first = await start(null, stop);
  let current = first;

  const watch = async (): Promise<void> => {
    let startedAt = performance.now();
    for (let tries = 0; ;) {
      await current.exited;
      if (stopping.signal.aborted) return;
      log.error({ child: name, pid: current.pid }, 'a child process ended by itself; it is started again');
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
          log.error({ child: name, err: error }, 'a child process could not be started again; it is tried again');
        }
      }
      startedAt = performance.now();
      if (stopping.signal.aborted) return current.stop();
      log.warn({ child: name, pid: current.pid }, 'a child process is running again');
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
