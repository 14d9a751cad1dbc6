import { execFileSync, spawn } from 'node:child_process';
import { createHash } from 'node:crypto';
import { once } from 'node:events';
import { chmod, chown, mkdtemp, readdir, readFile, rm, symlink, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import { type Holder, lockForService, readRuntime, tryLockDataDir } from './data-dir.js';
import { eventually } from '../test/support/eventually.js';

let dataDir: string;
beforeEach(async () => {
  dataDir = await mkdtemp(join(tmpdir(), 'payfold-data-'));
});
afterEach(() => rm(dataDir, { recursive: true, force: true }));

/** The pid of a process that has ended. */
const deadPid = async (): Promise<number> => {
  const child = spawn(process.execPath, ['-e', '']);
  await once(child, 'exit');
  return child.pid!;
};
const taken = () => {
  const lock = tryLockDataDir(dataDir, null);
  if (!('release' in lock)) throw new Error(`held by ${lock.holder.pid}`);
  return lock;
};

describe('the lock on DATA_DIR', () => {
  test('is held by one, and free again when given back', async () => {
    const lock = taken();
    expect(tryLockDataDir(dataDir, null)).toEqual({ holder: { pid: process.pid, command: null } });
    lock.release();
    taken().release();
    expect(await readdir(dataDir)).toEqual([]);
  });
  test('of many that ask at once, one gets it', async () => {
    const answers = Array.from({ length: 20 }, () => tryLockDataDir(dataDir, null));
    expect(answers.filter((answer) => 'release' in answer)).toHaveLength(1);
  });
  test('of a killed process is stale', async () => {
    await writeFile(join(dataDir, 'lock'), JSON.stringify({ pid: await deadPid(), started: '1' }));
    taken().release();
  });
  test('left behind again and again is taken over by one of many processes, never by two', async () => {
    // Each process takes the lock and leaves it behind, as a killed process would. In the lock, the pid is alive but the start time is that of another process.
    const contender = `
      import { appendFileSync, renameSync, writeFileSync } from 'node:fs';
      import { tryLockDataDir } from ${JSON.stringify(new URL('../dist/apps/data-dir.js', import.meta.url).href)};
      const dir = process.argv[1];
      for (let turn = 0; turn < 300; turn++) {
        if (!('release' in tryLockDataDir(dir, null))) continue;
        appendFileSync(dir + '/log', 'in ' + process.pid + '\\n');
        appendFileSync(dir + '/log', 'out ' + process.pid + '\\n');
        // Write and rename, so that no process reads half a lock.
        writeFileSync(dir + '/left-' + process.pid, JSON.stringify({ pid: 1, started: 'another time', nonce: turn + '-' + process.pid }));
        renameSync(dir + '/left-' + process.pid, dir + '/lock');
      }`;
    const children = Array.from({ length: 4 }, () =>
      spawn(process.execPath, ['--input-type=module', '-e', contender, dataDir], { stdio: 'inherit' }),
    );
    for (const child of children) if (child.exitCode === null) expect(await once(child, 'exit')).toEqual([0, null]);
    const log = (await readFile(join(dataDir, 'log'), 'utf8')).trim().split('\n');
    expect(log.length).toBeGreaterThan(100);
    for (let index = 0; index < log.length; index += 2)
      expect([log[index]!.split(' ')[0], log[index + 1]]).toEqual(['in', log[index]!.replace('in', 'out')]);
  });
  test('is stale too when its pid has been given to another process since', async () => {
    await writeFile(join(dataDir, 'lock'), JSON.stringify({ pid: process.pid, started: 'another time' }));
    taken().release();
  });
  test('that cannot be read is stale', async () => {
    await writeFile(join(dataDir, 'lock'), '{"pid":');
    const lock = taken();
    expect(JSON.parse(await readFile(join(dataDir, 'lock'), 'utf8'))).toMatchObject({ pid: process.pid });
    lock.release();
  });
});

describe('a guard over a stale lock', () => {
  const stale = JSON.stringify({ pid: 1, started: 'another time', nonce: 'left' });
  const guardOf = (text: string) => join(dataDir, `lock.stale-${createHash('sha256').update(text).digest('hex').slice(0, 16)}`);

  test('of a process that was killed meanwhile is taken over, and no file is left', async () => {
    await writeFile(join(dataDir, 'lock'), stale);
    await writeFile(guardOf(stale), JSON.stringify({ pid: await deadPid(), started: '1' }));
    taken().release();
    expect(await readdir(dataDir)).toEqual([]);
  });
  test('of a living process is respected', async () => {
    await writeFile(join(dataDir, 'lock'), stale);
    await writeFile(guardOf(stale), JSON.stringify({ pid: process.pid, started: null }));
    expect(tryLockDataDir(dataDir, null)).toEqual({ holder: { pid: process.pid, command: null } });
  });
});

describe('a service that finds the lock taken', () => {
  const command = (): { readonly release: () => void } => {
    const lock = tryLockDataDir(dataDir, 'settlement close');
    if (!('release' in lock)) throw new Error('not free');
    return lock;
  };
  const waits = (stop = new AbortController().signal) => {
    const waitedFor: Holder[] = [];
    return { waitedFor, locked: lockForService(dataDir, (holder) => waitedFor.push(holder), stop) };
  };

  test('waits for a command, names it once, and goes on when it ends', async () => {
    const { release } = command();
    const { waitedFor, locked } = waits();
    await eventually(() => waitedFor.length > 0);
    expect(waitedFor).toEqual([{ pid: process.pid, command: 'settlement close' }]);
    release();
    (await locked)();
    expect(waitedFor).toHaveLength(1);
  });
  test('is refused by another service, and by a lock of release 0.2.0, which names no command', async () => {
    const first = taken();
    const message = new RegExp(`is in use by process ${process.pid}; `);
    await expect(waits().locked).rejects.toThrow(message);
    first.release();
    await writeFile(join(dataDir, 'lock'), JSON.stringify({ pid: process.pid, started: null, nonce: 'x' }));
    await expect(waits().locked).rejects.toThrow(message);
  });
  test('does not wait for a command that was killed, nor for a process that has its pid by now', async () => {
    for (const left of [
      { pid: await deadPid(), command: 'settlement close', started: '1' },
      { pid: process.pid, command: 'settlement close', started: 'another time' },
    ]) {
      await writeFile(join(dataDir, 'lock'), JSON.stringify(left));
      const { waitedFor, locked } = waits();
      (await locked)();
      expect(waitedFor).toEqual([]);
    }
  });
  test('ends its wait at a stop', async () => {
    const { release } = command();
    const stop = new AbortController();
    const { waitedFor, locked } = waits(stop.signal);
    await eventually(() => waitedFor.length > 0);
    stop.abort();
    await expect(locked).rejects.toThrow();
    release();
    expect(await readdir(dataDir)).toEqual([]);
  });
});

describe('the running service, as runtime.json names it', () => {
  const write = (value: unknown) =>
    writeFile(join(dataDir, 'runtime.json'), typeof value === 'string' ? value : JSON.stringify(value), { mode: 0o600 });
  const runtime = { pid: process.pid, apiUrl: 'http://127.0.0.1:1', databaseUrl: 'postgres://x', simulatorUrl: 'http://127.0.0.1:2' };
  test('is found while it lives', async () => {
    expect(readRuntime(dataDir)).toBeNull();
    await write(runtime);
    expect(readRuntime(dataDir)).toEqual(runtime);
  });
  test('is not one that has died, nor half a file', async () => {
    await write({ ...runtime, pid: await deadPid() });
    expect(readRuntime(dataDir)).toBeNull();
    for (const text of ['', '{"pid"', 'null', '[]', '{"pid":"1"}', JSON.stringify({ pid: process.pid })]) {
      await write(text);
      expect(readRuntime(dataDir)).toBeNull();
    }
  });
  test('is not read from a file that another user could have written', async () => {
    await writeFile(join(dataDir, 'theirs'), JSON.stringify(runtime), { mode: 0o600 });
    await symlink(join(dataDir, 'theirs'), join(dataDir, 'runtime.json'));
    expect(() => readRuntime(dataDir)).toThrow(/^[^\n]*runtime\.json is a link[^\n]*$/);
    await rm(join(dataDir, 'runtime.json'));
    execFileSync('mkfifo', [join(dataDir, 'runtime.json')]);
    expect(() => readRuntime(dataDir)).toThrow(/runtime\.json is not a file/);
    await rm(join(dataDir, 'runtime.json'));
    await write(runtime);
    await chmod(join(dataDir, 'runtime.json'), 0o666);
    expect(() => readRuntime(dataDir)).toThrow(/chmod 600/);
    await chmod(dataDir, 0o777);
    expect(() => readRuntime(dataDir)).toThrow(/can be written by every user/);
    expect(() => tryLockDataDir(dataDir, null)).toThrow(/can be written by every user/);
  });
  (process.getuid?.() === 0 ? test : test.skip)('is not read from a file or folder of another user', async () => {
    await write(runtime);
    await chown(join(dataDir, 'runtime.json'), 54_321, 54_321);
    expect(() => readRuntime(dataDir)).toThrow(/^[^\n]*runtime\.json belongs to another user[^\n]*$/);
    await chown(join(dataDir, 'runtime.json'), 0, 0);
    await chown(dataDir, 54_321, 54_321);
    expect(() => readRuntime(dataDir)).toThrow(/belongs to another user/);
    expect(() => tryLockDataDir(dataDir, null)).toThrow(/belongs to another user/);
  });
});
