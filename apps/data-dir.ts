/**
 * `DATA_DIR`, which several processes share. `runtime.json` names the running service. `lock` names the process that may start Postgres.
 *
 * Node has no flock, so a process takes the lock with a hard link named `lock`, which only one process can make. The lock holds the pid and the start
 * time of its holder. A killed process leaves its lock behind. Another process may get the same pid, but its start time differs, so the lock is known
 * to be stale.
 */
import { execFileSync } from 'node:child_process';
import { createHash, randomUUID } from 'node:crypto';
import { linkSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';

/** The addresses of a running service. The service writes them when it is ready and removes them when it stops. */
export interface Runtime {
  readonly pid: number;
  readonly apiUrl: string;
  readonly databaseUrl: string;
  readonly simulatorUrl: string;
}

/** The running service. null: there is none, or its process is gone. */
export const readRuntime = (dataDir: string): Runtime | null => {
  const text = read(join(dataDir, 'runtime.json'));
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

interface Holder {
  readonly pid: number;
  /** The start time of a process as the system writes it. null: unknown. */
  readonly started: string | null;
}

/** Takes the lock if no living process holds it. Returns the release function, or the holder's pid. */
export const tryLockDataDir = (dataDir: string): { readonly release: () => void } | { readonly holder: number } => {
  const file = join(dataDir, 'lock');
  // The nonce makes the content of every lock unique, because a stale lock is recognised by its content.
  const content = JSON.stringify({ pid: process.pid, started: startOf(process.pid), nonce: randomUUID() } satisfies Holder & { nonce: string });
  const mine = `${file}.${randomUUID()}`;
  writeFileSync(mine, content, { mode: 0o600 });
  try {
    for (;;) {
      // The content is complete before the link is made, so no process reads half a lock.
      if (create(() => linkSync(mine, file))) return { release: () => rmSync(file, { force: true }) };
      const found = read(file);
      if (found === null) continue;
      const holder = parseHolder(found);
      if (holder && isAlive(holder.pid) && (holder.started === null || holder.started === startOf(holder.pid))) return { holder: holder.pid };
      if (!removeStale(file, found)) return { holder: holder?.pid ?? 0 };
    }
  } finally {
    rmSync(mine, { force: true });
  }
};

/**
 * Removes a stale lock. Two processes may read the same stale lock, and the second must not remove the new lock of the first. So a process first
 * makes a guard file, named after the stale content, and then reads the lock again. Returns false while another process holds the guard.
 */
const removeStale = (file: string, content: string): boolean => {
  const guard = `${file}.stale-${createHash('sha256').update(content).digest('hex').slice(0, 16)}`;
  if (!create(() => writeFileSync(guard, String(process.pid), { flag: 'wx' }))) return false;
  try {
    if (read(file) === content) rmSync(file);
    return true;
  } finally {
    rmSync(guard, { force: true });
  }
};

/** Runs `make`, which creates a file. Returns false if the file exists. */
const create = (make: () => void): boolean => {
  try {
    make();
    return true;
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'EEXIST') throw error;
    return false;
  }
};

const read = (file: string): string | null => {
  try {
    return readFileSync(file, 'utf8');
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'ENOENT') throw error;
    return null;
  }
};

const parseHolder = (text: string): Holder | null => {
  try {
    const { pid, started } = JSON.parse(text) as Partial<Holder>;
    return typeof pid === 'number' ? { pid, started: started ?? null } : null;
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
