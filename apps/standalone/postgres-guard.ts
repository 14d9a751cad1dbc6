/**
 * Stops the embedded Postgres when all processes that need it have ended, even by `kill -9`. The supervisor, the API and the worker hold one end of a
 * pipe. When the last of them is gone, the system closes that end. The shell at the other end then stops the postmaster whose pid it read last.
 */
import { spawn } from 'node:child_process';
import type { Writable } from 'node:stream';

/**
 * Compare the pid file first. If another Postgres now uses the folder, its pid differs, and no signal is sent. A pipe or a link in its place is not
 * read.
 */
const SCRIPT = `
  while read -r line; do postmaster=$line; done
  [ -n "$postmaster" ] && [ -f "$0/postmaster.pid" ] && [ ! -L "$0/postmaster.pid" ] && [ "$(head -n 1 "$0/postmaster.pid")" = "$postmaster" ] && kill -s INT "$postmaster"
`;

export interface PostgresGuard {
  /** One end of the pipe. The processes that need Postgres hold it open. */
  readonly lifeline: Writable | 'ignore';
  readonly watch: (postmaster: number) => void;
  /** Ends the guard after a normal stop of Postgres. */
  readonly end: () => Promise<void>;
}

/**
 * `cluster`: the folder of `postmaster.pid`. Windows has no POSIX shell and so no guard. There, the next start stops a Postgres that was left
 * running.
 */
export const startPostgresGuard = (cluster: string): PostgresGuard => {
  if (process.platform === 'win32') return { lifeline: 'ignore', watch: () => undefined, end: async () => undefined };
  // The shell runs in its own session, where Ctrl-C does not reach it.
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
