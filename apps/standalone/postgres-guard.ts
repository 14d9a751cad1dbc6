/**
 * Stops the embedded Postgres when all processes that need it have ended, in whatever way they ended. The supervisor, the API and the worker hold one
 * end of a pipe. When the last of them is gone, the system closes that end. The shell at the other end then stops the postmaster whose pid it read
 * last.
 */
import { spawn } from 'node:child_process';
import type { Writable } from 'node:stream';

/** The pid file is compared first: if another Postgres has taken the place of this one, the file holds another number, and no signal is sent. */
const SCRIPT = `
  while read -r line; do postmaster=$line; done
  [ -n "$postmaster" ] && [ "$(head -n 1 "$0/postmaster.pid")" = "$postmaster" ] && kill -s INT "$postmaster"
`;

export interface PostgresGuard {
  /** One end of the pipe. The processes that need Postgres hold it open. */
  readonly lifeline: Writable | 'ignore';
  readonly watch: (postmaster: number) => void;
  /** Ends the guard after Postgres was stopped in order. */
  readonly end: () => Promise<void>;
}

/**
 * `cluster`: the folder of `postmaster.pid`. Windows has no POSIX shell, so there is no guard. On Windows, the next start stops a Postgres that was
 * left running.
 */
export const startPostgresGuard = (cluster: string): PostgresGuard => {
  if (process.platform === 'win32') return { lifeline: 'ignore', watch: () => undefined, end: async () => undefined };
  // The shell runs in a session of its own, so that it gets no Ctrl-C.
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
