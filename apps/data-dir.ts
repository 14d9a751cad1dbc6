/**
 * `DATA_DIR`, which several processes share. `runtime.json` names the running service. `lock` names the process that may start Postgres.
 *
 * The service waits for a command that holds the lock, and a command waits for the service. A second service is refused.
 *
 * Node has no flock, so a process takes the lock with a hard link named `lock`, which only one process can make. The lock holds the pid and the start
 * time of its holder, and the name of its command. A killed process leaves its lock behind. Another process may get the same pid, but its start time
 * differs. So the lock is known to be stale.
 */
import { execFileSync } from 'node:child_process';
import { createHash, randomUUID } from 'node:crypto';
import { existsSync, linkSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { readOwnFile, requireOwnFolder } from '#platform';

/** The addresses of a running service. The service writes them when it is ready and removes them when it stops. */
export interface Runtime {
  readonly pid: number;
  readonly apiUrl: string;
  readonly databaseUrl: string;
  readonly simulatorUrl: string;
}

/** The running service. null: there is none, or its process is gone. Throws an error of one line if another user could have written the file. */
export const readRuntime = (dataDir: string): Runtime | null => {
  if (!existsSync(dataDir)) return null;
  requireOwnFolder(dataDir);
  const text = readOwnFile(join(dataDir, 'runtime.json'), { secret: true });
  if (text === null) return null;
  let runtime: Partial<Runtime> | null;
  try {
    runtime = JSON.parse(text) as Partial<Runtime> | null;
  } catch {
    // The file is only partly written, so the service is not ready yet.
    return null;
  }
  if (typeof runtime?.pid !== 'number' || typeof runtime.databaseUrl !== 'string' || !isAlive(runtime.pid)) return null;
  return { pid: runtime.pid, databaseUrl: runtime.databaseUrl, apiUrl: runtime.apiUrl ?? '', simulatorUrl: runtime.simulatorUrl ?? '' };
};

/** The process that holds the lock. */
export interface Holder {
  readonly pid: number;
  /** The command that the process runs, such as `settlement close`. null: the process is a service. */
  readonly command: string | null;
}

interface StoredHolder extends Holder {
  /** The start time of a process as the system writes it. null: unknown. */
  readonly started: string | null;
}

/** Takes the lock if no living process holds it. `command`: as in {@link Holder}. Returns the release function, or the holder. */
export const tryLockDataDir = (dataDir: string, command: string | null): { readonly release: () => void } | { readonly holder: Holder } => {
  requireOwnFolder(dataDir);
  const file = join(dataDir, 'lock');
  // The nonce makes the content of every lock unique, because a stale lock is recognised by its content.
  const content = JSON.stringify({ pid: process.pid, command, started: startOf(process.pid), nonce: randomUUID() } satisfies StoredHolder & { nonce: string }); // prettier-ignore
  const mine = `${file}.${randomUUID()}`;
  writeFileSync(mine, content, { mode: 0o600 });
  try {
    const holder = take(file, mine);
    return holder === null ? { release: () => rmSync(file, { force: true }) } : { holder };
  } finally {
    rmSync(mine, { force: true });
  }
};

/**
 * Links `mine` as `file`. If a living process holds `file`, returns that process.
 *
 * Two processes may read the same stale file, and the second must not remove the new file of the first. So a process first takes a guard, named after
 * the stale content, and then reads the file again. A guard whose process was killed is stale too, and is taken over in the same way.
 */
const take = (file: string, mine: string): Holder | null => {
  for (;;) {
    // The content is complete before the link is made, so no process reads half a lock.
    if (linked(mine, file)) return null;
    const found = readOwnFile(file);
    if (found === null) continue;
    const holder = parseHolder(found);
    if (holder && isAlive(holder.pid) && (holder.started === null || holder.started === startOf(holder.pid)))
      return { pid: holder.pid, command: holder.command };
    const guard = `${file}.stale-${createHash('sha256').update(found).digest('hex').slice(0, 16)}`;
    const remover = take(guard, mine);
    if (remover) return remover;
    try {
      if (readOwnFile(file) === found) rmSync(file);
    } finally {
      rmSync(guard, { force: true });
    }
  }
};

/** While a command holds the lock, the service tries to take it this often. */
const COMMAND_POLL_MS = 100;
/** While the service waits for a command, it reports the wait again after this time. */
const STILL_WAITING_MS = 30_000;

/**
 * Takes the lock for the service. If a command holds it, waits without a limit: a start that gives up would leave the service down until a person
 * acts. `onWait` is called for each command, and again every 30 s. If another service holds the lock, throws an error with a one-line message. If
 * `stop` aborts, throws.
 */
export const lockForService = async (dataDir: string, onWait: (holder: Holder) => void, stop: AbortSignal): Promise<() => void> => {
  for (let [waitingFor, saidAt] = [0, 0]; ;) {
    const lock = tryLockDataDir(dataDir, null);
    if ('release' in lock) return lock.release;
    const { holder } = lock;
    if (holder.command === null) throw new Error(`${dataDir} is in use by process ${holder.pid}; stop it, or set DATA_DIR to another folder`);
    if (holder.pid !== waitingFor || performance.now() - saidAt > STILL_WAITING_MS) {
      [waitingFor, saidAt] = [holder.pid, performance.now()];
      onWait(holder);
    }
    await sleep(COMMAND_POLL_MS, undefined, { signal: stop });
  }
};

/** Returns false if `file` exists. */
const linked = (mine: string, file: string): boolean => {
  try {
    linkSync(mine, file);
    return true;
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'EEXIST') throw error;
    return false;
  }
};

const parseHolder = (text: string): StoredHolder | null => {
  try {
    const { pid, command, started } = JSON.parse(text) as Partial<StoredHolder>;
    return typeof pid === 'number' ? { pid, command: command ?? null, started: started ?? null } : null;
  } catch {
    return null;
  }
};

/** A killed process that is not reaped yet is a zombie. It counts as ended. */
const isZombie = (pid: number): boolean => {
  try {
    // The command name in parentheses may hold any characters. The state follows the last closing parenthesis.
    return readFileSync(`/proc/${pid}/stat`, 'utf8').split(') ').at(-1)!.startsWith('Z');
  } catch {
    return false; // There is no /proc here.
  }
};

const isAlive = (pid: number): boolean => {
  try {
    process.kill(pid, 0);
    return !isZombie(pid);
  } catch (error) {
    return (error as NodeJS.ErrnoException).code === 'EPERM';
  }
};

/** The start time of a process. Linux gives it in ticks since boot, so a change of the clock does not affect it. Other systems give it by `ps`. */
const startOf = (pid: number): string | null => {
  try {
    if (process.platform !== 'linux') return execFileSync('ps', ['-o', 'lstart=', '-p', String(pid)], { encoding: 'utf8' }).trim() || null;
    // The command name in parentheses may hold any characters, so count fields after it. The start time is field 22 of the line.
    const stat = readFileSync(`/proc/${pid}/stat`, 'utf8');
    return stat.slice(stat.lastIndexOf(')') + 2).split(' ')[19] ?? null;
  } catch {
    return null;
  }
};
