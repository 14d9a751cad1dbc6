/**
 * The supervisor behind `npm start`. It runs Postgres, the sandbox processor, the API and the worker as processes.
 *
 * Start: if a command uses `DATA_DIR`, the supervisor waits for it. Postgres and the processor start first, then the API and the worker. Of these two,
 * the faster one brings the schema up to date under a lock. When both are ready, the worker makes the sandbox's first account. The first start of each
 * process must succeed. Later, a child that ends is started again at the same address.
 *
 * A stop during the start ends the children that are starting, then everything that was started.
 *
 * End: first the API drains, then the worker ends, then the processor and Postgres. If the supervisor itself is killed, the API and the worker drain
 * by themselves. The processor ends within 2 s, and Postgres after the last process that needs it.
 */
import { existsSync } from 'node:fs';
import { mkdir, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import client, { type Registry } from 'prom-client';
import { orStopped } from '#kernel';
import { type Config, type EmbeddedPostgres, type Logger, levelOfLine, openKeys, startEmbeddedPostgres, writeOwnFile } from '#platform';
import { lockForService } from '../data-dir.js';
import { type HealthReport, NOT_STARTED } from '../health.js';
import { countMaskedLines, type FirstAccount, type Running, runRole, serveMetrics, type StartOptions } from '../lifecycle.js';
import { type SimulatorProcess, startSimulatorProcess } from '../simulator/child.js';
import { type Kept, keepRunning } from './keep-running.js';
import { type PostgresGuard, startPostgresGuard } from './postgres-guard.js';
import { type RoleProcess, startRole } from './role.js';

type Stops = (() => Promise<unknown>)[];

const start = async (config: Config, log: Logger, { stop: stopStart }: StartOptions): Promise<Running> => {
  const stops: Stops = [];
  const stop = async () => {
    const failures: unknown[] = [];
    // If one child cannot be stopped, still stop the others.
    for (const one of stops.splice(0).reverse()) await one().catch((error: unknown) => failures.push(error));
    if (failures.length > 0) throw failures[0];
  };
  try {
    // Postgres may run as another user, who must be able to pass through this folder.
    await mkdir(config.dataDir, { recursive: true, mode: 0o711 });
    const unlock = await lockForService(
      config.dataDir,
      ({ pid, command }) => log.warn({ command, holder: pid }, `the start waits for the command "${command}" of process ${pid}, which uses DATA_DIR`),
      stopStart,
    );
    stops.push(async () => unlock());
    // Check the key file before anything starts. A wrong key file then leaves no half-made data directory.
    refuseHalfDirectory(config);
    openKeys(config);

    const roles: Partial<Record<'api' | 'worker', Kept<RoleProcess>>> = {};
    let isComplete = false;
    const metricsServer = await serveMetrics(config.metricsPort, {
      metrics: () => allMetrics(roles),
      live: () => ({ ok: true, checks: {} }),
      // The worker and the API look at the same stores.
      ready: async () => (roles.api ? roles.api.current().ask('ready') : NOT_STARTED),
    });
    stops.push(async () => metricsServer.close());
    const [{ databaseUrl, lifeline }, simulatorUrl] = await together(
      config.databaseUrl === null ? embedded(config, log, stops, stopStart) : { databaseUrl: config.databaseUrl, lifeline: 'ignore' as const },
      config.simulatorUrl ?? simulator(config, log, stops, stopStart),
    );

    const environment = {
      ...process.env,
      DATABASE_URL: databaseUrl,
      ...(simulatorUrl !== null && { SIMULATOR_URL: simulatorUrl }),
      // With MASTER_KEY_FILE set, a role never replaces a lost key by a new one. The default of PUBLIC_URL depends on PORT, which differs for a new
      // child.
      MASTER_KEY_FILE: config.masterKeyFile,
      PUBLIC_URL: config.publicUrl,
    };
    const keep = async (role: 'api' | 'worker'): Promise<Kept<RoleProcess>> =>
      (roles[role] = await keepRunning(role, log, stopStart, restarts(role), async (before: RoleProcess | null, stopped) => {
        const child = await startRole(role, { ...environment, ...portsOf(before) }, lifeline, stopped);
        if (isComplete) await child.ask('open');
        return child;
      }));
    for (const role of ['worker', 'api'] as const) stops.push(async () => roles[role]?.stop());
    const [worker, api] = await together(keep('worker'), keep('api'));
    const { url, auditUrl } = api.first.addresses as Required<RoleProcess['addresses']>;
    await untilReady(() => api.current().ask('checked'), log, stopStart);
    // The API key is shown only once, so make the account after all processes have started.
    const first = config.environment === 'sandbox' ? await orStopped(worker.current().ask('firstAccount'), stopStart) : null;
    if (first) await untilAccepted(url, first, stopStart);

    const runtime = join(config.dataDir, 'runtime.json');
    writeOwnFile(runtime, JSON.stringify({ pid: process.pid, apiUrl: url, auditUrl, databaseUrl, simulatorUrl }));
    stops.push(() => rm(runtime, { force: true }));
    if (first) process.stdout.write(welcome(url, first));
    isComplete = true;
    await api.current().ask('open');
    return { addresses: { url, auditUrl }, stop };
  } catch (error) {
    await stop().catch(() => undefined);
    throw error;
  }
};

const READY_POLL_MS = 50;
/** How often the start says what it waits for. */
const SAY_EVERY_MS = 10_000;

/**
 * Waits until all checks of the API pass, and says what the wait is for. A slow machine, or a worker that builds read models after an upgrade, may take
 * minutes.
 */
const untilReady = async (checked: () => Promise<HealthReport>, log: Logger, stop: AbortSignal): Promise<void> => {
  const begun = performance.now();
  for (let said = begun; ; await sleep(READY_POLL_MS, undefined, { signal: stop })) {
    // A child that ended by itself cannot answer. It is started again.
    const { ok, checks } = await orStopped(checked(), stop).catch((): HealthReport => (stop.throwIfAborted(), NOT_STARTED));
    if (ok) return;
    if (performance.now() - said < SAY_EVERY_MS) continue;
    said = performance.now();
    const waitsFor = Object.keys(checks).filter((name) => checks[name] !== 'ok');
    log.warn({ waitsFor, seconds: Math.round((said - begun) / 1_000) }, `the start waits for: ${waitsFor.join(', ')}`);
  }
};

/** Waits until the API knows the new account. */
const untilAccepted = async (url: string, { apiKey }: FirstAccount, stop: AbortSignal): Promise<void> => {
  const ask = () => fetch(`${url}/api/partner/v1/payments?limit=1`, { headers: { authorization: `ApiKey ${apiKey}` }, signal: stop });
  while (!(await ask().catch(() => null))?.ok) await sleep(READY_POLL_MS, undefined, { signal: stop });
};

/** Waits for both, even if one fails. Everything that was started can then be stopped. Throws the first error. */
const together = async <A, B>(a: A | Promise<A>, b: B | Promise<B>): Promise<[A, B]> => {
  const settled = await Promise.allSettled([a, b]);
  for (const one of settled) if (one.status === 'rejected') throw one.reason;
  return Promise.all([a, b]);
};

/** The variables that give a new child the ports of the child before it. */
const portsOf = (before: RoleProcess | null): Record<string, string> => {
  const { url, auditUrl } = before?.addresses ?? {};
  return url && auditUrl ? { PORT: new URL(url).port, AUDIT_PORT: new URL(auditUrl).port } : {};
};

/** Metrics of all processes. The figures of processes are added up. Figures of the database come only from the worker. */
const allMetrics = async ({ api, worker }: Partial<Record<'api' | 'worker', Kept<RoleProcess>>>): Promise<Registry> => {
  if (!api || !worker) throw new Error('not ready');
  const parts = [ours.getMetricsAsJSON(), api.current().ask('ownMetrics'), worker.current().ask('ownMetrics'), worker.current().ask('sharedMetrics')];
  return client.AggregatorRegistry.aggregate(await Promise.all(parts));
};

/** The supervisor's own metrics. A sum of start times makes no sense, so only the supervisor reports its start time. */
const ours = new client.Registry();
countMaskedLines(ours);
new client.Gauge({
  name: 'process_start_time_seconds',
  help: 'Start time of the process since unix epoch in seconds.',
  aggregator: 'first',
  registers: [ours],
}).set(Math.round(performance.timeOrigin / 1_000));

const childRestarts = new client.Counter({
  name: 'payfold_child_restarts_total',
  help: 'Child processes that ended by themselves and were started again',
  labelNames: ['child'],
  registers: [ours],
});
/** Sets the count of a child's restarts to 0, so that it is shown before the first. Returns the function that counts one. */
const restarts = (child: string): (() => void) => {
  childRestarts.inc({ child }, 0);
  return () => childRestarts.inc({ child });
};

/** Throws if the data directory holds data but no key file. The data needs its key, and a new key would hide the loss. */
const refuseHalfDirectory = (config: Config): void => {
  if (
    !config.databaseUrl &&
    config.masterKeyMayBeCreated &&
    !existsSync(config.masterKeyFile) &&
    existsSync(join(config.dataDir, 'postgres', 'PG_VERSION'))
  )
    throw new Error(`${config.dataDir} holds data but ${config.masterKeyFile} is missing; restore the key file, or set DATA_DIR to another folder`);
};

const embedded = async (
  config: Config,
  log: Logger,
  stops: Stops,
  stop: AbortSignal,
): Promise<{ databaseUrl: string } & Pick<PostgresGuard, 'lifeline'>> => {
  const cluster = join(config.dataDir, 'postgres');
  const { watch, lifeline, end } = startPostgresGuard(cluster);
  stops.push(end);
  const postgres = await keepRunning('postgres', log, stop, restarts('postgres'), (before: EmbeddedPostgres | null, stopped) =>
    startEmbeddedPostgres(cluster, {
      stop: stopped,
      // Other processes know this port, so a new Postgres must use it too.
      ...(before && { port: before.port }),
      // A Ctrl-C must not reach Postgres, because requests in flight still need it.
      ownSession: true,
      onSpawn: watch,
      onLog: (line) => log[levelOfLine(line)]({ line }, 'postgres'),
    }),
  );
  stops.push(() => postgres.stop());
  log.info({ directory: postgres.first.directory }, 'embedded Postgres is running');
  return { databaseUrl: postgres.first.url, lifeline };
};

const simulator = async (config: Config, log: Logger, stops: Stops, stop: AbortSignal): Promise<string | null> => {
  if (config.environment === 'production') return null;
  const child = await keepRunning('simulator', log, stop, restarts('simulator'), (before: SimulatorProcess | null, stopped) =>
    afterItsPredecessor(stopped, () =>
      startSimulatorProcess({
        stop: stopped,
        dataDir: config.dataDir,
        port: before ? Number(new URL(before.url).port) : config.simulatorPort,
        closeBatchesAt: config.simulatorBatchClose,
        logLevel: config.logLevel,
        onLog: (line) => log.debug({ line }, 'simulator'),
      }),
    ),
  );
  stops.push(() => child.stop());
  return child.first.url;
};

/** The simulator of a killed supervisor holds the journal for some seconds. The start of a new simulator is tried again for this long. */
const PREDECESSOR_MS = 10_000;
const PREDECESSOR_POLL_MS = 250;
const afterItsPredecessor = async <T>(stop: AbortSignal, begin: () => Promise<T>): Promise<T> => {
  for (let waited = 0; ; waited += PREDECESSOR_POLL_MS) {
    try {
      return await begin();
    } catch (error) {
      if (waited >= PREDECESSOR_MS || !(error as Error).message.includes('another simulator holds')) throw error;
      await sleep(PREDECESSOR_POLL_MS, undefined, { signal: stop });
    }
  }
};

const RULE = '─'.repeat(100);
const welcome = (url: string, { apiKey, portalId, signingSecret }: FirstAccount): string => `
${RULE}
Payfold is running with a sandbox account. The API key and the checkout secret are shown this once.

  Base URL   ${url}
  API key    ${apiKey}
  Portal     ${portalId}      (gateway: simulator, fee 2.5 % + 50 cents)${signingSecret === null ? '' : `\n  Checkout   ${signingSecret}`}

Create a payment:

  curl -s ${url}/api/partner/v1/payments \\
    -H 'Authorization: ApiKey ${apiKey}' \\
    -H 'Content-Type: application/json' -H 'Idempotency-Key: first-payment' \\
    -d '{"portalId":"${portalId}","amountCents":12500,"currency":"USD",
         "paymentMethod":{"type":"card","cardNumber":"4242 4242 4242 4242","expirationDate":"12/30","cvv":"123"},
         "lineItems":[{"amountCents":12500,"referenceId":"WATER-2041","description":"Water bill"}]}'

API reference: ${url}/docs
${RULE}
`;

runRole('payfold', start);
