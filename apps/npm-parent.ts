/**
 * Ends a process with the npm that runs it. npm passes a signal only to the shell between, which ends without its child. So SIGTERM to npm alone would
 * leave the service running, with its ports.
 */
import { readFileSync } from 'node:fs';
import { resolve } from 'node:path';

const POLL_MS = 500;
/** Programs that run scripts of a package. */
const RUNNERS = /\b(npm|npx|pnpm|yarn|bun)\b/;

/** The arguments of a process, separated by blanks. null: it is gone, or this system has no `/proc`. */
const commandOf = (pid: number): string | null => read(`/proc/${pid}/cmdline`)?.replaceAll('\0', ' ') ?? null;
/** The parent of a process. null: as for {@link commandOf}. */
const parentOf = (pid: number): number | null => {
  // The name in parentheses may hold blanks.
  const [, parent] = read(`/proc/${pid}/stat`)?.split(') ').at(-1)?.split(' ') ?? [];
  return parent === undefined ? null : Number(parent);
};
const read = (file: string): string | null => {
  try {
    return readFileSync(file, 'latin1');
  } catch {
    return null;
  }
};

/**
 * Calls `gone` once when the npm that runs this process has ended. Does nothing if no npm runs it: a process that only inherits npm's environment
 * goes on. Without `/proc`, notices only the end of the direct parent.
 */
export const whenNpmIsGone = (gone: () => void): void => {
  const script = process.env.npm_lifecycle_script;
  if (!script) return;
  const parent = process.ppid;
  const command = commandOf(parent);
  const isShellOfNpm = command?.includes(` -c ${script}`) ?? false;
  if (!isShellOfNpm && !script.split(' ').some((word) => resolve(word) === process.argv[1])) return;
  // npm ended while this process was loading its code.
  if (!isShellOfNpm && command !== null && !RUNNERS.test(command)) return void setImmediate(gone);
  const npm = isShellOfNpm ? parentOf(parent) : null;
  const timer = setInterval(() => {
    if (process.ppid === parent && (npm === null || parentOf(parent) === npm)) return;
    clearInterval(timer);
    gone();
  }, POLL_MS);
  timer.unref();
};
