/** Everything in one process tree on a bare machine: embedded Postgres, sandbox processor, API and worker. What `npm start` runs. */
import { existsSync } from 'node:fs';
import { mkdir, rm, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { Administration, createSandboxDefaults, directoryModel, type SandboxDefaults } from '#accounts';
import { type Config, type EmbeddedPostgres, type Logger, startEmbeddedPostgres } from '#platform';
import { createApi } from '../api/api.js';
import { createAudit } from '../audit/audit.js';
import { createMetrics, drained, LINGER_MS, runRole, type Running } from '../lifecycle.js';
import { tryLockDataDir } from '../data-dir.js';
import { openKeys, openServices, type Services } from '../services.js';
import { type SimulatorProcess, startSimulatorProcess } from '../simulator/child.js';
import { startWorker } from '../worker/worker.js';
import { keepRunning } from './keep-running.js';

/** How long the first account may take to be visible to requests. */
const FIRST_ACCOUNT_MS = 10_000;

const start = async (config: Config, log: Logger): Promise<Running> => {
  const stops: (() => Promise<unknown>)[] = [];
  const stop = async () => {
    const failures: unknown[] = [];
    // What cannot be stopped keeps nothing else from being stopped.
    for (const one of stops.splice(0).reverse()) await one().catch((error: unknown) => failures.push(error));
    if (failures.length > 0) throw failures[0];
  };
  try {
    // Postgres may run as another user than we do, and has to pass through.
    await mkdir(config.dataDir, { recursive: true, mode: 0o711 });
    const lock = tryLockDataDir(config.dataDir);
    if ('holder' in lock) throw new Error(`${config.dataDir} is in use by process ${lock.holder}; stop it, or set DATA_DIR to another folder`);
    stops.push(async () => lock.release());
    // Before anything is started: a wrong key file must not cost a half-made data directory.
    refuseHalfDirectory(config);
    const keys = openKeys(config);

    const databaseUrl = config.databaseUrl ?? (await embedded(config, log, stops));
    const simulatorUrl = config.simulatorUrl ?? (await simulator(config, log, stops));
    const services = await openServices(config, { databaseUrl, simulatorUrl }, keys, log, { role: 'standalone' });
    stops.push(() => services.close());
    const worker = startWorker(services);
    stops.push(() => worker.stop());
    const metrics = createMetrics(services);
    const metricsServer = await metrics.listen(config.metricsPort);
    stops.push(async () => metricsServer.close());
    const api = await createApi({ ...services, publicUrl: config.publicUrl, onAnswer: metrics.answered });
    const audit = await createAudit(services);
    // Together: as long as one drains the other must take nothing new.
    stops.push(() => drained(Promise.all([api.close(LINGER_MS), audit.close(LINGER_MS)])));
    const url = await api.listen(config.port, config.host);
    const auditUrl = await audit.listen(config.auditPort, config.auditHost);
    // After everything that may refuse to start: the key is shown once, and must be seen.
    const first = config.environment === 'sandbox' ? await firstAccount(services) : null;

    const runtime = join(config.dataDir, 'runtime.json');
    await writeFile(runtime, JSON.stringify({ pid: process.pid, apiUrl: url, auditUrl, databaseUrl, simulatorUrl }), { mode: 0o600 });
    stops.push(() => rm(runtime, { force: true }));
    if (first) process.stdout.write(welcome(url, first));
    process.stdout.write(`ready ${url}\n`);
    return { drain: () => api.health.drain(), stop };
  } catch (error) {
    await stop().catch(() => undefined);
    throw error;
  }
};

/** Data without its key cannot be used, and a new key would hide that. */
const refuseHalfDirectory = (config: Config): void => {
  if (
    !config.databaseUrl &&
    config.masterKeyMayBeCreated &&
    !existsSync(config.masterKeyFile) &&
    existsSync(join(config.dataDir, 'postgres', 'PG_VERSION'))
  )
    throw new Error(`${config.dataDir} holds data but ${config.masterKeyFile} is missing; restore the key file, or set DATA_DIR to another folder`);
};

const embedded = async (config: Config, log: Logger, stops: (() => Promise<unknown>)[]): Promise<string> => {
  const postgres = await keepRunning('postgres', log, (before: EmbeddedPostgres | null) =>
    startEmbeddedPostgres(join(config.dataDir, 'postgres'), {
      // Everybody knows it by this port.
      ...(before && { port: before.port }),
      // We still need it for what is in flight when a Ctrl-C comes.
      ownSession: true,
      onLog: (line) => log.debug({ line }, 'postgres'),
    }),
  );
  stops.push(() => postgres.stop());
  log.info({ directory: postgres.first.directory }, 'embedded Postgres is running');
  return postgres.first.url;
};

const simulator = async (config: Config, log: Logger, stops: (() => Promise<unknown>)[]): Promise<string | null> => {
  if (config.environment === 'production') return null;
  const child = await keepRunning('simulator', log, (before: SimulatorProcess | null) =>
    afterItsPredecessor(() =>
      startSimulatorProcess({
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

/** The simulator of a killed service follows it within seconds; until then it holds its journal. */
const PREDECESSOR_MS = 10_000;
const PREDECESSOR_POLL_MS = 250;
const afterItsPredecessor = async <T>(begin: () => Promise<T>): Promise<T> => {
  for (let waited = 0; ; waited += PREDECESSOR_POLL_MS) {
    try {
      return await begin();
    } catch (error) {
      if (waited >= PREDECESSOR_MS || !(error as Error).message.includes('another simulator holds')) throw error;
      await new Promise((wake) => setTimeout(wake, PREDECESSOR_POLL_MS));
    }
  }
};

const firstAccount = async (services: Services): Promise<SandboxDefaults | null> => {
  const { store, clock, ids, keys, config, readModels } = services;
  const administration = new Administration({
    store,
    clock,
    ids,
    keys,
    environment: config.environment,
    cardInTextCheck: config.cardInTextCheck,
    actor: { type: 'system', id: 'first-start' },
  });
  const made = await createSandboxDefaults(administration);
  if (made?.position) await readModels.of(directoryModel).runUntil(made.position, { timeoutMs: FIRST_ACCOUNT_MS });
  return made;
};

const RULE = '─'.repeat(100);
const welcome = (url: string, { apiKey, portalId }: SandboxDefaults): string => `
${RULE}
Payfold is running with a sandbox account. The API key is shown this once.

  Base URL   ${url}
  API key    ${apiKey}
  Portal     ${portalId}      (gateway: simulator, fee 2.5 % + 50 cents)

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
