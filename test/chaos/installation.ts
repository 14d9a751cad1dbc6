/**
 * A whole installation as real processes: Postgres, the card processor, two APIs and a worker. A process that dies is started again. A proxy stands
 * on every link between them. The comparison reads the stores without the proxies.
 */
import { randomBytes } from 'node:crypto';
import { mkdir, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { Administration, directoryModel, NO_FEE } from '#accounts';
import { recordSettlements } from '#settlement';
import { freePort, startEmbeddedPostgres } from '#platform';
import { Random } from '../../apps/demo/city.js';
import type { Services } from '../../apps/services.js';
import { controlKeyOf, createSimulatorControl, type SimulatorControl } from '../../apps/simulator/control.js';
import { eventually } from '../support/eventually.js';
import { DataDir, isAlive, kill, launch, postmasterOf, systemProcesses } from '../support/processes.js';
import { FEE, PARTNER } from '../support/service.js';
import { endLeases, openStores, recoverAll } from '../support/truth.js';
import { type Proxy, startProxy } from './proxy.js';

export const PARTS = ['postgres', 'simulator', 'api 1', 'api 2', 'worker'] as const;
export type Part = (typeof PARTS)[number];
/** The roles of the service. These processes hold leases, and can be killed at a fail point. */
export const ROLES = ['api 1', 'api 2', 'worker'] as const satisfies readonly Part[];
export type RolePart = (typeof ROLES)[number];

export const LINKS = ['client→api', 'api→postgres', 'api→simulator'] as const;
export type LinkName = (typeof LINKS)[number];

/** Two APIs, a worker and the comparison each have connection pools. Postgres may also still count sessions of dead processes. */
const MAX_CONNECTIONS = 500;
const RETRY_START_MS = 250;
const READY_TIMEOUT_MS = 60_000;
const GONE_TIMEOUT_MS = 20_000;
const LAST_WORDS = 2_000;
const SESSION_ENDS_MS = 5_000;
const MAX_SEED = 2 ** 31;
const CLOCK_JUMP = new URL('clock-jump.mjs', import.meta.url).href.replace('/dist/test/', '/test/');

interface Incarnation {
  readonly pid: number;
  readonly ready: Promise<unknown>;
  readonly exited: Promise<{ readonly signal: NodeJS.Signals | null; readonly said: string }>;
  /** Output so far. */
  readonly said: () => string;
}

/** One process that is started again whenever it ends. An end that neither our kill nor a fail point caused is a fault. */
export class Supervised {
  /** The fail point of the next start. Each start resets it to null. */
  failpoint: string | null = null;
  readonly deaths = { killed: 0, atFailpoint: 0, byItself: 0 };
  readonly faults: string[] = [];
  /** True while the process may be unable to work, for example on a full disk. Then its end is no fault. */
  mayEnd = false;
  private pid: number | null = null;
  private running = false;
  private doomed = false;
  private paused = false;
  private held: Promise<void> | null = null;
  private release: () => void = () => undefined;
  private ended = false;
  private readonly kept: Promise<void>;

  constructor(
    readonly part: Part,
    private readonly begin: (failpoint: string | null) => Promise<Incarnation>,
    private readonly pids: Set<number>,
  ) {
    this.kept = this.keep();
  }

  private async keep(): Promise<void> {
    for (;;) {
      await this.held;
      if (this.ended) return;
      const { failpoint } = this;
      this.failpoint = null;
      try {
        const incarnation = await this.begin(failpoint);
        this.pid = incarnation.pid;
        this.said = incarnation.said;
        this.pids.add(incarnation.pid);
        this.doomed = false;
        const started = await incarnation.ready.then(
          () => true,
          () => false,
        );
        this.running = started;
        // A process that does not become ready may hang, for example because its stores are unavailable. So kill it and start another.
        if (!started) kill(incarnation.pid);
        const { signal, said } = await incarnation.exited;
        if (started && !this.doomed && this.mayEnd) this.deaths.byItself += 1;
        else if (started && !this.doomed && signal !== 'SIGKILL')
          this.faults.push(`${this.part} ended by itself with ${signal}: ${said.slice(-LAST_WORDS)}`);
        else if (started && !this.doomed && failpoint === null) this.faults.push(`${this.part} was killed by somebody else`);
        else if (signal === 'SIGKILL' && failpoint !== null && !this.doomed) this.deaths.atFailpoint += 1;
      } catch (error) {
        // Postgres cannot start, for example on a full disk. Try again.
        if (this.ended) return;
        void error;
      } finally {
        this.running = false;
        this.pid = null;
        this.paused = false;
      }
      if (!this.ended) await new Promise((wake) => setTimeout(wake, RETRY_START_MS));
    }
  }

  /** Output of the process that runs now. */
  said: () => string = () => '';

  get isRunning(): boolean {
    return this.running;
  }

  get isPaused(): boolean {
    return this.paused;
  }

  /** `kill -9`. false: no process runs. */
  kill(): boolean {
    if (this.pid === null || this.doomed) return false;
    this.doomed = true;
    this.deaths.killed += 1;
    kill(this.pid);
    return true;
  }

  pause(): void {
    if (this.pid === null || !this.running || this.paused) return;
    this.paused = true;
    kill(this.pid, 'SIGSTOP');
  }

  resume(): void {
    if (this.pid === null || !this.paused) return;
    this.paused = false;
    kill(this.pid, 'SIGCONT');
  }

  /** Kills the process, and starts no other one until {@link goOn}. Resolves when the process has ended. */
  async hold(): Promise<void> {
    this.held ??= new Promise((resolve) => (this.release = resolve));
    this.failpoint = null;
    await eventually(() => (this.kill(), this.pid === null), { timeoutMs: GONE_TIMEOUT_MS });
  }

  async goOn(): Promise<void> {
    this.held = null;
    this.release();
    await this.ready();
  }

  ready(): Promise<unknown> {
    return eventually(() => this.running && !this.doomed, { timeoutMs: READY_TIMEOUT_MS });
  }

  async end(): Promise<void> {
    this.ended = true;
    this.release();
    if (this.pid !== null) {
      this.doomed = true;
      kill(this.pid);
    }
    await this.kept;
  }
}

export interface Installation {
  /** URLs of the APIs, through their proxies. */
  readonly urls: readonly string[];
  readonly apiKey: string;
  readonly portalId: string;
  readonly parts: Readonly<Record<Part, Supervised>>;
  readonly links: Readonly<Record<LinkName, readonly Proxy[]>>;
  readonly bank: SimulatorControl;
  readonly simulatorUrl: string;
  /** The stores for the comparison, without the proxies. */
  readonly stores: Services;
  /** Shifts the wall clock of an API by `offsetMs`. */
  jump(part: RolePart, offsetMs: number): Promise<void>;
  /**
   * Ends every fault: heals the links, resumes the simulator, and ends all leases. Kills and starts again the APIs and the worker, except those in
   * `sleepers`: the caller resumes these later.
   */
  heal(sleepers?: readonly RolePart[]): Promise<void>;
  /** Resolves open payments and records closed batches, without the minute that the worker would wait. Returns how many payments were resolved. */
  recover(): Promise<number>;
  /** Ends of processes that neither our kill nor a fail point caused. */
  faults(): string[];
  /** Processes that were started here and still exist. */
  leftovers(): string[];
  remove(): Promise<void>;
}

export interface InstallationOptions {
  /** Called when the data directory exists and is empty. */
  readonly prepare?: (data: string) => Promise<void> | void;
  /** Called after every process has ended, and before the data directory is removed. */
  readonly release?: (data: string) => Promise<void> | void;
}

/** Starts all processes, and creates an account and a portal. */
export const startInstallation = async (random: Random, { prepare, release }: InstallationOptions = {}): Promise<Installation> => {
  const dataDir = await DataDir.create();
  const pids = new Set<number>();
  const supervised: Supervised[] = [];
  const proxies: Proxy[] = [];
  let stores: Services | null = null;
  const remove = async () => {
    await stores?.close().catch(() => undefined);
    // The service is stopped first. Without its stores it would only log errors.
    for (const one of supervised.reverse()) await one.end();
    for (const proxy of proxies) await proxy.close();
    await release?.(dataDir.data);
    await dataDir.remove();
  };
  try {
    await mkdir(dataDir.data, { mode: 0o711 });
    await prepare?.(dataDir.data);
    const masterKeyFile = join(dataDir.data, 'master.key');
    await writeFile(masterKeyFile, JSON.stringify({ current: 'k1', keys: { k1: randomBytes(32).toString('base64') } }), { mode: 0o600 });
    const keep = async (part: Part, begin: (failpoint: string | null) => Promise<Incarnation>) => {
      const one = new Supervised(part, begin, pids);
      supervised.push(one);
      await one.ready();
      return one;
    };
    const proxyTo = async (port: number) => {
      const proxy = await startProxy(port, new Random(random.int(0, MAX_SEED)));
      proxies.push(proxy);
      return proxy;
    };

    const postgresPort = await freePort();
    let databaseUrl = '';
    const postgres = await keep('postgres', async () => {
      // The settings of a real installation, except for max_connections. So fsync is on.
      const server = await startEmbeddedPostgres(join(dataDir.data, 'postgres'), {
        port: postgresPort,
        settings: { max_connections: String(MAX_CONNECTIONS) },
      });
      databaseUrl = server.url;
      return {
        pid: server.pid,
        ready: Promise.resolve(),
        exited: server.exited.then(() => ({ signal: 'SIGKILL' as const, said: '' })),
        said: () => '',
      };
    });
    const role =
      (name: 'api' | 'worker' | 'simulator', env: Record<string, string>) =>
      async (failpoint: string | null): Promise<Incarnation> => {
        const process = launch(name, dataDir, { LOG_LEVEL: 'warn', ...env, ...(failpoint !== null && { FAILPOINT: failpoint }) });
        const exited = process.exited.then(({ code, signal, stdout, stderr }) => ({
          signal: signal ?? (`exit ${code}` as NodeJS.Signals),
          said: stdout + stderr,
        }));
        return {
          pid: process.pid,
          said: () => process.stdout() + process.stderr(),
          ready: process.firstLine(name === 'simulator' ? /^\{"ready".*\}\n/m : /^ready \S+\n/m),
          exited,
        };
      };
    const simulatorPort = await freePort();
    const simulator = await keep('simulator', role('simulator', { SIMULATOR_PORT: String(simulatorPort) }));
    const simulatorUrl = `http://127.0.0.1:${simulatorPort}`;

    stores = await openStores({ databaseUrl, simulatorUrl }, masterKeyFile, dataDir.data);
    const { apiKey, portalId } = await firstAccount(stores);

    const [toPostgres, toSimulator] = [await proxyTo(postgresPort), await proxyTo(simulatorPort)];
    const throughProxy = new URL(databaseUrl);
    throughProxy.port = String(toPostgres.port);
    const places = { DATABASE_URL: throughProxy.toString(), SIMULATOR_URL: `http://127.0.0.1:${toSimulator.port}`, MASTER_KEY_FILE: masterKeyFile };
    const clockOf = (part: RolePart) => join(dataDir.path, `${part}.clock`);
    const withClock = (part: RolePart) => ({ NODE_OPTIONS: `--import ${CLOCK_JUMP}`, CHAOS_CLOCK_FILE: clockOf(part) });
    const ports = [await freePort(), await freePort()];
    const apis = await Promise.all(ports.map((port, n) => keep(ROLES[n]!, role('api', { ...places, ...withClock(ROLES[n]!), PORT: String(port) }))));
    const worker = await keep('worker', role('worker', places));
    const toApis = [await proxyTo(ports[0]!), await proxyTo(ports[1]!)];

    const parts = { postgres, simulator, 'api 1': apis[0]!, 'api 2': apis[1]!, worker };
    const opened = stores;
    return {
      urls: toApis.map((proxy) => `http://127.0.0.1:${proxy.port}${PARTNER}`),
      apiKey,
      portalId,
      parts,
      links: { 'client→api': toApis, 'api→postgres': [toPostgres], 'api→simulator': [toSimulator] },
      bank: createSimulatorControl(simulatorUrl, controlKeyOf(dataDir.data)),
      simulatorUrl,
      stores: opened,
      jump: (part, offsetMs) => writeFile(clockOf(part), String(offsetMs)),
      heal: async (sleepers = []) => {
        for (const part of ROLES) await writeFile(clockOf(part), '0');
        const awake = ROLES.filter((part) => !sleepers.includes(part));
        await Promise.all(awake.map((part) => parts[part].hold()));
        for (const proxy of proxies) {
          proxy.heal();
          proxy.cut();
        }
        simulator.resume();
        await Promise.all([postgres.ready(), simulator.ready()]);
        await eventually(
          async () => {
            // A session of a dead process may still run a statement. So end all sessions of Payfold except this one. The pool of the comparison then
            // connects again.
            await opened.pool.query(
              `select pg_terminate_backend(pid, $1) from pg_stat_activity where application_name like 'payfold%' and pid <> pg_backend_pid()`,
              [SESSION_ENDS_MS],
            );
            await endLeases(opened);
            return true;
          },
          { timeoutMs: READY_TIMEOUT_MS, everyMs: 100 },
        );
        await Promise.all(awake.map((part) => parts[part].goOn()));
      },
      recover: async () => {
        // Remove the pauses after earlier tries.
        await opened.pool.query('delete from recovery_try');
        const resolved = await recoverAll(opened).catch(async (error: unknown) => {
          const { rows: stuck } = await opened.pool.query(
            `select payment_id, status, open_since, tries, outcome from payment_list p left join recovery_try t using (payment_id) where open_since is not null limit 10`,
          );
          const { rows: read } = await opened.pool.query('select name, position, owner, lease_until from projection_checkpoint');
          const told = { head: await opened.store.head(), stuck, read, worker: parts.worker.said().slice(-LAST_WORDS) };
          throw new Error(`recovery came to no end: ${JSON.stringify(told)}`, { cause: error });
        });
        // Record closed batches now. Otherwise the worker would append events during the comparison.
        await recordSettlements(opened.settlement, AbortSignal.timeout(READY_TIMEOUT_MS));
        return resolved;
      },
      faults: () => supervised.flatMap(({ faults }) => faults),
      leftovers: () => {
        const postmaster = postmasterOf(dataDir.data);
        const alive = systemProcesses().filter(({ pid, args }) => args.includes(dataDir.path) || (pids.has(pid) && args.includes('dist/apps/')));
        return [...alive.map(({ pid, args }) => `${pid} ${args}`), ...(postmaster !== null && isAlive(postmaster) ? [`${postmaster} postgres`] : [])];
      },
      remove,
    };
  } catch (error) {
    await remove().catch(() => undefined);
    throw error;
  }
};

const firstAccount = async ({ store, clock, ids, keys, personal, readModels }: Services): Promise<{ apiKey: string; portalId: string }> => {
  const actor = { type: 'system', id: 'chaos' } as const;
  const admin = new Administration({ store, clock, ids, keys, personal, environment: 'sandbox', cardInTextCheck: true, actor });
  const { accountId } = (await admin.createAccount('Partner')).state;
  const portal = await admin.createPortal({ accountIds: [accountId], name: 'Portal', gateway: 'simulator', fee: { ...NO_FEE, ...FEE } });
  const issued = await admin.issueKey(accountId);
  await readModels.of(directoryModel).runUntil(issued.position!, { timeoutMs: READY_TIMEOUT_MS });
  return { apiKey: issued.apiKey, portalId: portal.state.portalId };
};
