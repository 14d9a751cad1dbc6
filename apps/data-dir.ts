/**
 * `DATA_DIR`, shared by processes that come and go: who is running (`runtime.json`), and who may start Postgres in it (`lock`).
 *
 * Node has no flock. The lock is a file that is linked into place, which only one process can do, and it names its holder by pid and start time, so that
 * the lock of a killed process is recognised as stale, even when its pid has been given to another process since.
 */
import { execFileSync } from 'node:child_process';
import { createHash, randomUUID } from 'node:crypto';
import { linkSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';

/** What a running service tells about itself; the service writes it when it is ready and removes it when it stops. */
export interface Runtime {
  readonly pid: number;
  readonly apiUrl: string;
  readonly databaseUrl: string;
  readonly simulatorUrl: string;
}

/** The running service, by its own account; null where there is none, or none that lives. */
export const readRuntime = (dataDir: string): Runtime | null => {
  const text = read(join(dataDir, 'runtime.json'));
  if (text === null) return null;
  let runtime: Partial<Runtime> | null;
  try {
    runtime = JSON.parse(text) as Partial<Runtime> | null;
  } catch {
    // Half written: the service is not ready yet.
    return null;
  }
  if (typeof runtime?.pid !== 'number' || typeof runtime.databaseUrl !== 'string' || !isAlive(runtime.pid)) return null;
  return { pid: runtime.pid, databaseUrl: runtime.databaseUrl, apiUrl: runtime.apiUrl ?? '', simulatorUrl: runtime.simulatorUrl ?? '' };
};

interface Holder {
  readonly pid: number;
  /** Start time of the process as the system spells it; null where it cannot be told. */
  readonly started: string | null;
}

/** Takes the lock if nobody living holds it. Returns what gives it back, or the holder's pid. */
export const tryLockDataDir = (dataDir: string): { readonly release: () => void } | { readonly holder: number } => {
  const file = join(dataDir, 'lock');
  // The nonce makes every lock's content its own: a stale one is removed by its content, not by its name.
  const content = JSON.stringify({ pid: process.pid, started: startOf(process.pid), nonce: randomUUID() } satisfies Holder & { nonce: string });
  const mine = `${file}.${randomUUID()}`;
  writeFileSync(mine, content, { mode: 0o600 });
  try {
    for (;;) {
      // Linked when it is complete: nobody ever reads half a lock.
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
 * Takes a stale lock away. Two that have both seen it must not both remove "the lock": the second would remove the first one's new lock. So removing is
 * guarded by a file named after the stale content, and the content is looked at again under the guard; its holder is dead and nobody else may touch it.
 * Returns false while another process is at it.
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

/** False where the file exists. */
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

/** Killed and not yet reaped by its parent: it holds nothing any more. */
const isZombie = (pid: number): boolean => {
  try {
    // The command name may hold spaces and parentheses; the state follows the last of them.
    return readFileSync(`/proc/${pid}/stat`, 'utf8').split(') ').at(-1)!.startsWith('Z');
  } catch {
    return false; // no /proc here
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

/** Linux tells it in ticks since boot, which no change of the clock moves; elsewhere `ps` does. */
const startOf = (pid: number): string | null => {
  try {
    if (process.platform !== 'linux') return execFileSync('ps', ['-o', 'lstart=', '-p', String(pid)], { encoding: 'utf8' }).trim() || null;
    // The name in parentheses may hold anything, so fields are counted behind it; the 22nd of all is the start time.
    const stat = readFileSync(`/proc/${pid}/stat`, 'utf8');
    return stat.slice(stat.lastIndexOf(')') + 2).split(' ')[19] ?? null;
  } catch {
    return null;
  }
};
