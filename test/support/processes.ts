/**
 * The built service as real processes, for specs of crashes, start-up and shutdown: the whole standalone service or single roles. Each has its own
 * process group and data. A guard ends every process that still runs when a spec ends, or when Jest is killed.
 */
import { type ChildProcess, spawn, spawnSync } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { once } from 'node:events';
import { existsSync, readFileSync } from 'node:fs';
import { mkdtemp } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { eventually } from './eventually.js';

export type Role = 'standalone' | 'api' | 'worker' | 'simulator';
export type Environment = Readonly<Record<string, string>>;

export interface Exit {
  readonly code: number | null;
  readonly signal: NodeJS.Signals | null;
}

/** The exit of a process, with all its output. */
export interface Ended extends Exit {
  readonly stdout: string;
  readonly stderr: string;
}

export interface RunningProcess {
  readonly role: Role | 'command';
  readonly pid: number;
  /** The address of the process, from its output. Empty for a worker. */
  readonly url: string;
  readonly stdout: () => string;
  readonly stderr: () => string;
  /** Resolves when the process is gone and all its output has been read. */
  readonly exited: Promise<Ended>;
  signal(signal: NodeJS.Signals): void;
  /** Sends SIGTERM (or another signal), and waits until the process has ended. */
  stop(signal?: NodeJS.Signals): Promise<Ended>;
  /** `kill -9` of the process and all its descendants at once. */
  killTree(): Promise<void>;
  /** The descendants of the process that are alive, as reported by `ps`. */
  children(): SystemProcess[];
}

export interface SystemProcess {
  readonly pid: number;
  readonly ppid: number;
  readonly args: string;
}

/** The folder of the checkout, even if this file runs from its `dist`. */
const ROOT = new URL('../../', import.meta.url).pathname.replace(/dist\/$/, '');
const START_TIMEOUT_MS = 90_000;
const STOP_TIMEOUT_MS = 45_000;
const GONE_TIMEOUT_MS = 10_000;

export const entryOf = (role: Role): string => join(ROOT, 'dist', 'apps', role, 'main.js');

/** All living processes of this machine, without zombies. */
export const systemProcesses = (): SystemProcess[] =>
  spawnSync('ps', ['-e', '-o', 'pid=,ppid=,stat=,args='], { encoding: 'utf8', maxBuffer: 64 * 1024 * 1024 })
    .stdout.split('\n')
    .map((line) => /^\s*(\d+)\s+(\d+)\s+(\S+)\s+(.*)$/.exec(line))
    .filter((match) => match !== null && !match[3]!.startsWith('Z'))
    .map((match) => ({ pid: Number(match![1]), ppid: Number(match![2]), args: match![4]! }));

const descendantsOf = (pid: number): SystemProcess[] => {
  const all = systemProcesses();
  const found = all.filter(({ ppid }) => ppid === pid);
  // The list grows in this loop, so it also collects children of children.
  for (const one of found) found.push(...all.filter(({ ppid }) => ppid === one.pid));
  return found;
};

export const isAlive = (pid: number): boolean => systemProcesses().some((process) => process.pid === pid);

export const kill = (pid: number, signal: NodeJS.Signals = 'SIGKILL'): void => {
  try {
    process.kill(pid, signal);
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'ESRCH') throw error;
  }
};

/** The pid of the embedded Postgres in a data directory, from its pid file. null: there is none, or it has ended. */
export const postmasterOf = (dataDir: string): number | null => {
  const file = join(dataDir, 'postgres', 'postmaster.pid');
  const pid = existsSync(file) ? Number(readFileSync(file, 'utf8').split('\n')[0]) : 0;
  return systemProcesses().some((process) => process.pid === pid && process.args.includes(dataDir)) ? pid : null;
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Data directories, and the guard process of each.

/**
 * A shell script that runs until its input is closed. The system closes this input when our process ends, even by `kill -9`. The script then kills
 * the process groups of its last input line and the Postgres of the directory, and removes the directory. The last line names only groups whose
 * leader lives, so no number belongs to a newer group.
 */
const GUARD = `
  while read -r line; do groups=$line; done
  for group in $groups; do kill -s KILL -- "-$group"; done
  postmaster=$(head -n 1 "$0/data/postgres/postmaster.pid") && case "$(ps -o args= -p "$postmaster")" in *"$0"*) kill -s KILL "$postmaster";; esac
  sleep 0.1
  umount -l "$0/data" 2>/dev/null
  rm -rf "$0" || { sleep 1; rm -rf "$0"; }
`;

export class DataDir {
  private readonly running = new Set<RunningProcess>();

  private constructor(
    readonly path: string,
    private readonly guard: ChildProcess,
  ) {}

  /** Makes an empty folder for the data of a service. Postgres may run as another user, so every user may enter the folder. */
  static async create(): Promise<DataDir> {
    const parent = await mkdtemp(join(tmpdir(), 'payfold-process-'));
    spawnSync('chmod', ['711', parent]);
    const guard = spawn('sh', ['-c', GUARD, parent], { detached: true, stdio: ['pipe', 'ignore', 'ignore'] });
    guard.unref();
    return new DataDir(parent, guard);
  }

  /** The data directory. The service makes it. */
  get data(): string {
    return join(this.path, 'data');
  }

  watch(process: RunningProcess): void {
    this.running.add(process);
    this.tell();
    void process.exited.finally(() => {
      this.running.delete(process);
      this.tell();
    });
  }

  private tell(): void {
    this.guard.stdin!.write(`${[...this.running].map(({ pid }) => pid).join(' ')}\n`);
  }

  /** Kills every process that still uses the directory, and removes it. */
  async remove(): Promise<void> {
    for (const process of this.running) await process.killTree();
    const postmaster = postmasterOf(this.data);
    if (postmaster !== null) {
      kill(postmaster);
      await eventually(() => !isAlive(postmaster), { timeoutMs: GONE_TIMEOUT_MS });
    }
    // This process now waits for the guard, so the guard must keep it alive.
    this.guard.ref();
    const ended = once(this.guard, 'exit');
    this.guard.stdin!.end();
    await ended;
  }
}

// ------------------------------------------------------------------------------------------------------------------------------------
// Processes.

const environment = (dataDir: DataDir, env: Environment): NodeJS.ProcessEnv => ({
  PATH: process.env.PATH,
  HOME: process.env.HOME,
  // Use any free port. Another service on this machine may use the default one.
  PORT: '0',
  METRICS_PORT: '0',
  AUDIT_PORT: '0',
  // Otherwise the simulator closes batches at five o'clock, perhaps during a spec.
  SIMULATOR_BATCH_CLOSE: 'off',
  DATA_DIR: dataDir.data,
  LOG_LEVEL: 'info',
  ...env,
});

/** Starts a process, but does not wait until it is ready. `entry`: a role, or arguments of Node. `first`: a shell command that sets limits. */
export const launch = (
  entry: Role | readonly string[],
  dataDir: DataDir,
  env: Environment = {},
  first = ':',
): Omit<RunningProcess, 'url'> & { firstLine(prefix: RegExp): Promise<RegExpExecArray> } => {
  const args = typeof entry === 'string' ? ['--enable-source-maps', entryOf(entry)] : entry;
  const child = spawn('sh', ['-c', `${first} && exec "$0" "$@"`, process.execPath, ...args], {
    cwd: tmpdir(),
    env: environment(dataDir, env),
    detached: true,
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  const said = { stdout: '', stderr: '' };
  for (const stream of ['stdout', 'stderr'] as const) child[stream].setEncoding('utf8').on('data', (text: string) => (said[stream] += text));
  const exited = new Promise<Ended>((resolve, reject) => {
    child.once('error', reject);
    // Children may keep the output pipes open after the process ends. The output is complete when the pipes are closed.
    child.once('close', (code, signal) => resolve({ code, signal, ...said }));
  });
  let gone: true | undefined;
  const end = () => (gone = true);
  exited.then(end, end);
  const pid = child.pid!;
  const running = {
    role: typeof entry === 'string' ? entry : ('command' as const),
    pid,
    stdout: () => said.stdout,
    stderr: () => said.stderr,
    exited,
    signal: (signal: NodeJS.Signals) => kill(pid, signal),
    stop: async (signal: NodeJS.Signals = 'SIGTERM') => {
      kill(pid, signal);
      return within(exited, STOP_TIMEOUT_MS, () => `${signal} did not end ${pid}:\n${said.stderr}`);
    },
    killTree: async () => {
      const tree = [pid, ...descendantsOf(pid).map((one) => one.pid)];
      for (const one of tree) kill(one);
      await exited;
      await eventually(() => systemProcesses().every((one) => !tree.includes(one.pid)), { timeoutMs: GONE_TIMEOUT_MS });
    },
    children: () => descendantsOf(pid),
    firstLine: async (pattern: RegExp) => {
      const found = await eventually(() => pattern.exec(said.stdout) ?? gone, { timeoutMs: START_TIMEOUT_MS, everyMs: 10 });
      if (found !== true) return found;
      const { code, signal } = await exited;
      throw new Error(`ended with ${code ?? signal} before it was ready:\n${said.stdout}\n${said.stderr}`);
    },
  };
  dataDir.watch({ ...running, url: '' });
  return running;
};

const within = <T>(work: Promise<T>, ms: number, message: () => string): Promise<T> => {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<never>((_, reject) => (timer = setTimeout(() => reject(new Error(message())), ms)));
  return Promise.race([work, late]).finally(() => clearTimeout(timer));
};

/** Starts a role and waits until it prints that it is ready. */
export const start = async (role: Role, dataDir: DataDir, env: Environment = {}, first?: string): Promise<RunningProcess> => {
  const launched = launch(role, dataDir, env, first);
  if (role !== 'simulator') {
    const [, url = ''] = await launched.firstLine(/^ready (\S+)\n/m);
    return { ...launched, url: role === 'worker' ? '' : url };
  }
  const [line] = await launched.firstLine(/^\{.*\}\n/m);
  return { ...launched, url: (JSON.parse(line) as { url: string }).url };
};

/** Waits until an API takes payments. On a new database, it first waits for a worker to build the read models. */
export const untilReady = async ({ url }: Pick<RunningProcess, 'url'>): Promise<void> =>
  void (await eventually(async () => (await fetch(`${url}/readyz`)).status === 200));

/** Starts an API and a worker, and waits until the API takes payments. `more` is for the API only. */
export const startApiAndWorker = async (
  dataDir: DataDir,
  env: Environment,
  more: Environment = {},
): Promise<[api: RunningProcess, worker: RunningProcess]> => {
  const [api, worker] = await Promise.all([start('api', dataDir, { ...env, ...more }), start('worker', dataDir, env)]);
  await untilReady(api);
  return [api, worker];
};

/** Runs a role that must fail to start, and waits for its end. */
export const runToEnd = async (role: Role, dataDir: DataDir, env: Environment = {}, first?: string): Promise<Ended> => {
  const launched = launch(role, dataDir, env, first);
  const ended = await within(launched.exited, START_TIMEOUT_MS, () => `still running:\n${launched.stdout()}\n${launched.stderr()}`).catch(
    async (error: unknown) => {
      await launched.killTree();
      throw error;
    },
  );
  return ended;
};

/** The values in the text that the first start prints. */
export interface Welcome {
  readonly apiKey: string;
  readonly portalId: string;
  /** The printed command, for a shell. */
  readonly curl: string;
}

export const welcomeOf = (stdout: string): Welcome | null => {
  const apiKey = /^ {2}API key {4}(\S+)$/m.exec(stdout)?.[1];
  const portalId = /^ {2}Portal {5}(\S+)/m.exec(stdout)?.[1];
  const curl = /^ {2}curl [^]*?\]\}'$/m.exec(stdout)?.[0];
  return apiKey && portalId && curl ? { apiKey, portalId, curl } : null;
};

export interface RuntimeFile {
  readonly pid: number;
  readonly apiUrl: string;
  readonly databaseUrl: string;
  readonly simulatorUrl: string;
}

/** Addresses of the running standalone service. */
export const runtimeOf = (dataDir: DataDir): RuntimeFile => JSON.parse(readFileSync(join(dataDir.data, 'runtime.json'), 'utf8')) as RuntimeFile;

/** The database of the running standalone service, for the superuser. The service's own role may do less. */
export const adminUrlOf = (dataDir: DataDir): string => {
  const url = new URL(runtimeOf(dataDir).databaseUrl);
  [url.username, url.password] = ['payfold', readFileSync(join(dataDir.data, 'postgres.password'), 'utf8').trim()];
  return url.toString();
};

/** A new key. A UUID is never taken for a card number (C9). */
export const newKey = (name = 'key'): string => `${name}-${randomUUID()}`;
