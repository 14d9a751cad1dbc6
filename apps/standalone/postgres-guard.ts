/**
 * Stops the embedded Postgres when no process is left that needs it, however those processes ended. The supervisor, the API and the worker hold one
 * end of a pipe. When the last of them is gone, the system closes that end, and the shell at the other end stops the newest postmaster that it was
 * given.
 */
import { spawn } from 'node:child_process';
import type { Writable } from 'node:stream';

/** Another Postgres may have taken its place. Then its pid file holds another number. */
const SCRIPT = `
  while read -r line; do postmaster=$line; done
  [ -n "$postmaster" ] && [ "$(head -n 1 "$0/postmaster.pid")" = "$postmaster" ] && kill -s INT "$postmaster"
`;

export interface PostgresGuard {
  /** The end of the pipe, for the processes that need Postgres. */
  readonly lifeline: Writable | 'ignore';
  readonly watch: (postmaster: number) => void;
  /** Ends the guard after Postgres was stopped in order. */
  readonly end: () => Promise<void>;
}

/** `cluster`: the folder of `postmaster.pid`. Without a POSIX shell there is no guard. Then the next start stops a Postgres that was left running. */
export const startPostgresGuard = (cluster: string): PostgresGuard => {
  if (process.platform === 'win32') return { lifeline: 'ignore', watch: () => undefined, end: async () => undefined };
  // In a session of its own it gets no Ctrl-C.
  const shell = spawn('sh', ['-c', SCRIPT, cluster], { detached: true, stdio: ['pipe', 'ignore', 'ignore'] });
  const ended = new Promise<void>((resolve) => shell.once('exit', () => resolve()).once('error', () => resolve()));
  shell.stdin.on('error', () => undefined);
  return {
    lifeline: shell.stdin,
    watch: (postmaster) => void shell.stdin.write(`${postmaster}\n`),
    end: () => {
      shell.stdin.end();
      return ended;
    },
  };
};
