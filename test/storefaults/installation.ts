/** The built service with its own stores, which a spec can exchange while the service runs. */
import type pg from 'pg';
import { createPool, freePort } from '#platform';
import { Random } from '../../apps/demo/city.js';
import { controlKeyOf, createSimulatorControl, type SimulatorControl } from '../../apps/simulator/control.js';
import { type Proxy, startProxy } from '../chaos/proxy.js';
import { eventually } from '../support/eventually.js';
import { freshDatabase } from '../support/postgres.js';
import { DataDir, type Ended, type Environment, launch, type Role, type RunningProcess, runtimeOf, start, welcomeOf } from '../support/processes.js';
import { type Node, urlOf } from './nodes.js';
import type { Access } from './partner.js';

/** A guard against hanging only. Specs compare the result of {@link Installation.noticed} with the limit of the contract. */
const NOTICED_MS = 60_000;
const LAUNCHER = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname.replace('/dist/apps/', '/apps/');

/** A process of the service. */
export interface Witness {
  readonly name: string;
  /** True if the process reports an incident, in `/readyz` or in its metrics. */
  readonly knows: () => Promise<boolean>;
  /** The time of the process's first log line after `from` about an incident, in milliseconds since 1970. null: none yet. */
  readonly knewAt: (from: number) => number | null;
}

interface LogLine {
  readonly time: string;
  /** The role. */
  readonly name: string;
}

export interface Stores {
  /** The first event store. The service reaches it through a proxy. null: the events are in Postgres. */
  readonly node: Node | null;
  /** The URL of an event store, used without a proxy instead of `node`. */
  readonly url?: string;
  /** False: the service uses its embedded Postgres. */
  readonly database?: boolean;
  /** The URL of a Postgres that the spec has started. */
  readonly databaseUrl?: string;
}

export class Installation {
  readonly witnesses: Witness[] = [];
  bank!: SimulatorControl;
  pool!: pg.Pool;
  service!: RunningProcess;
  private readonly others: RunningProcess[] = [];
  private access: Access | null = null;

  private constructor(
    readonly dataDir: DataDir,
    private readonly database: { readonly url: string; drop(): Promise<void> } | null,
    readonly proxy: Proxy | null,
    private readonly metricsPort: number,
    private readonly env: Environment,
  ) {}

  static async start({ node, database = true, databaseUrl, url }: Stores): Promise<Installation> {
    const dataDir = await DataDir.create();
    const own = databaseUrl === undefined && database ? await freshDatabase() : null;
    const proxy = node && url === undefined ? await startProxy(node.port, new Random(1)) : null;
    const kurrentdb = url ?? (proxy && urlOf(proxy.port));
    const metricsPort = await freePort();
    const env = {
      METRICS_PORT: String(metricsPort),
      LOG_LEVEL: 'warn',
      ...(own && { DATABASE_URL: own.url }),
      ...(databaseUrl !== undefined && { DATABASE_URL: databaseUrl }),
      ...(kurrentdb !== null && { KURRENTDB_URL: kurrentdb }),
    };
    const installation = new Installation(dataDir, own, proxy, metricsPort, env);
    try {
      await installation.startService();
    } catch (error) {
      await installation.remove().catch(() => undefined);
      throw error;
    }
    return installation;
  }

  /** Starts the whole service, also after {@link stopService} or a kill. */
  async startService(): Promise<void> {
    this.service = await start('standalone', this.dataDir, this.env);
    const welcome = welcomeOf(this.service.stdout());
    const { apiKey, portalId } = welcome ?? this.access!;
    this.access = { url: this.service.url, apiKey, portalId };
    const { databaseUrl, simulatorUrl } = runtimeOf(this.dataDir);
    this.bank = createSimulatorControl(simulatorUrl, controlKeyOf(this.dataDir.data));
    await this.pool?.end();
    this.pool = createPool(databaseUrl, { name: 'spec', max: 2 });
    this.witnesses.splice(0, this.witnesses.length, apiWitness('the API', this.service), workerWitness('the worker', this.service, this.metricsPort));
  }

  /** Starts one more process of a role. */
  async add(role: Extract<Role, 'api' | 'worker'>, name: string): Promise<void> {
    const { databaseUrl, simulatorUrl } = runtimeOf(this.dataDir);
    const metricsPort = await freePort();
    const one = await start(role, this.dataDir, {
      ...this.env,
      DATABASE_URL: databaseUrl,
      SIMULATOR_URL: simulatorUrl,
      METRICS_PORT: String(metricsPort),
    });
    this.others.push(one);
    this.witnesses.push(role === 'api' ? apiWitness(name, one) : workerWitness(name, one, metricsPort));
  }

  readonly partner = (): Access => this.access!;

  /** Leads the service to another event store at the same address. Returns the time of the exchange. */
  exchange(node: Node): number {
    const at = Date.now();
    this.proxy!.leadTo(node.port);
    return at;
  }

  /**
   * Waits until every process reports the incident. Returns for each process the milliseconds from `from` to its first log line about the incident.
   */
  async noticed(from: number): Promise<Record<string, number>> {
    const took = this.witnesses.map(async ({ name, knows, knewAt }) => {
      await eventually(knows, { timeoutMs: NOTICED_MS });
      return [name, (await eventually(() => knewAt(from), { timeoutMs: NOTICED_MS })) - from] as const;
    });
    return Object.fromEntries(await Promise.all(took));
  }

  /** Runs `payfold` with these arguments. */
  command(...args: readonly string[]): Promise<Ended> {
    return launch([LAUNCHER, ...args], this.dataDir, { ...this.env, LOG_LEVEL: 'silent' }).exited;
  }

  /** Starts the service, which must refuse to start. */
  refusedStart(): Promise<Ended> {
    return launch('standalone', this.dataDir, this.env).exited;
  }

  async stopService(): Promise<void> {
    await this.service.stop();
  }

  async remove(): Promise<void> {
    await this.pool?.end();
    await this.dataDir.remove();
    await this.proxy?.close();
    await this.database?.drop();
  }
}

/** The time of the first line about an incident in a role's log. */
const saidBy =
  (role: 'api' | 'worker', { stderr }: RunningProcess) =>
  (from: number): number | null => {
    for (const text of stderr().split('\n')) {
      if (!text.startsWith('{') || !text.includes('run payfold log status')) continue;
      const line = JSON.parse(text) as LogLine;
      if (line.name === role && Date.parse(line.time) >= from) return Date.parse(line.time);
    }
    return null;
  };

const apiWitness = (name: string, process: RunningProcess): Witness => ({
  name,
  knewAt: saidBy('api', process),
  knows: async () => {
    const answer = await fetch(`${process.url}/readyz`);
    const { storeIncident } = (await answer.json()) as { storeIncident?: boolean };
    // In an incident the API must stay ready. Otherwise the load balancer would answer partners.
    if (storeIncident === true && answer.status !== 200) throw new Error(`${name} is not ready: ${answer.status}`);
    return storeIncident === true;
  },
});

const workerWitness = (name: string, process: RunningProcess, port: number): Witness => ({
  name,
  knewAt: saidBy('worker', process),
  knows: async () => /^payfold_store_incident 1$/m.test(await (await fetch(`http://127.0.0.1:${port}/metrics`)).text()),
});
