/**
 * Stops the embedded Postgres when no process is left that needs it, however they ended. The supervisor, the API and the worker hold one end of a pipe. When the
 * last of them is gone the system closes that end, and the shell at the other end stops the postmaster that it was told of last.
 */
import { spawn } from 'node:child_process';
import type { Writable } from 'node:stream';

/** Another Postgres may have taken the place since; then the number in its file is another one. */
const SCRIPT = `
  while read -r line; do postmaster=$line; done
  [ -n "$postmaster" ] && [ "$(head -n 1 "$0/postmaster.pid")" = "$postmaster" ] && kill -s INT "$postmaster"
`;

export interface PostgresGuard {
  /** To be held open by those that need Postgres. */
  readonly lifeline: Writable | 'ignore';
  readonly watch: (postmaster: number) => void;
  /** Once Postgres was stopped in order. */
  readonly end: () => Promise<void>;
}

/** `cluster`: where `postmaster.pid` lies. Without a POSIX shell there is no guard: the next start stops what was left. */
export const startPostgresGuard = (cluster: string): PostgresGuard => {
  if (process.platform === 'win32') return { lifeline: 'ignore', watch: () => undefined, end: async () => undefined };
  // In a session of its own it does not hear of a Ctrl-C.
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
