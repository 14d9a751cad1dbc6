/**
 * A real KurrentDB or EventStoreDB for the end-to-end specs. `KURRENTDB_FRESH` is a shell command that starts an empty server, prints its URL on a
 * separate line and runs until SIGTERM. Before the URL it may print a line `files DIR`, the folder of the server's files. If it is set, every service of
 * these specs has its own server. Otherwise the events are in Postgres.
 */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { createInterface } from 'node:readline';

const { KURRENTDB_FRESH } = process.env;

/** False: specs cannot read or change events by SQL. */
export const eventsInPostgres = !KURRENTDB_FRESH;

const START_MS = 120_000;

/**
 * A shell script that runs the server, and ends all its processes when the script's input is closed. The system closes the input when our process
 * ends, even by `kill -9`. Background children do not get the input.
 */
const GUARD = `
  trap : TERM
  sh -c "$0" &
  cat > /dev/null
  kill -s TERM -- "-$$"
  wait
`;

export interface FreshKurrentDb {
  /** The settings of a service that uses this server. Empty if events are in Postgres. */
  readonly env: { readonly KURRENTDB_URL?: string };
  /** The folder of the server's files. null: there is no server, or its command did not say. */
  readonly files: string | null;
  stop(): Promise<void>;
}

export const freshKurrentDb = async (): Promise<FreshKurrentDb> => {
  if (!KURRENTDB_FRESH) return { env: {}, files: null, stop: async () => undefined };
  const server = spawn('sh', ['-c', GUARD, KURRENTDB_FRESH], { detached: true, stdio: ['pipe', 'pipe', 'inherit'] });
  const ended = once(server, 'exit');
  const stop = async () => {
    server.stdin.end();
    await ended;
  };
  let files: string | null = null;
  const url = await new Promise<string | null>((resolve) => {
    createInterface(server.stdout)
      .on('line', (line) => {
        files ??= /^files (.+)$/.exec(line)?.[1] ?? null;
        if (/^(kurrentdb|kurrent|kdb|esdb)(\+discover)?:\/\/\S+$/.test(line)) resolve(line);
      })
      .on('close', () => resolve(null));
    setTimeout(() => resolve(null), START_MS).unref();
  });
  if (url !== null) return { env: { KURRENTDB_URL: url }, files, stop };
  await stop();
  throw new Error('KURRENTDB_FRESH printed no URL of a server');
};
