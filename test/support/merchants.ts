/** API and worker in the process of a spec, without a simulator, and the command line. For specs of merchant accounts and real processors' doubles. */
import { execFile } from 'node:child_process';
import { mkdtemp, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { Administration, directoryModel } from '#accounts';
import { createLogger, readConfig, readKeyRing } from '#platform';
import { recordSettlements } from '#settlement';
import { createApi } from '../../apps/api/api.js';
import { Health } from '../../apps/health.js';
import { openServices, type Services } from '../../apps/services.js';
import { startWorker } from '../../apps/worker/worker.js';
import { eventually } from './eventually.js';
import { createOpenApiJudge } from './openapi.js';
import { freshDatabase } from './postgres.js';
import { Client, MovableClock } from './service.js';

const LAUNCHER = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname;

export interface Place {
  /** Data directories are made in it. */
  readonly folder: string;
  /** Called at the end of a spec, last one first. */
  readonly stops: (() => unknown)[];
}

export interface Running {
  readonly services: Services;
  readonly clock: MovableClock;
  readonly client: Client;
  readonly url: string;
  readonly accountId: string;
  readonly apiKey: string;
  readonly databaseUrl: string;
  readonly dataDir: string;
  readonly log: readonly string[];
  readonly admin: Administration;
  readonly inForce: <T extends { readonly position: Parameters<Services['readModels']['inForce']>[1] | null }>(change: Promise<T>) => Promise<T>;
}

/** `endpoints`: the addresses of processors, by gateway, in place of those of the accounts. `withWorker` false: a spec starts workers itself. */
export const startIn = async (
  { folder, stops }: Place,
  environment: 'sandbox' | 'production',
  endpoints?: Readonly<Record<string, string>>,
  { withWorker = true }: { readonly withWorker?: boolean } = {},
): Promise<Running> => {
  const database = await freshDatabase();
  stops.push(() => database.drop());
  const dataDir = await mkdtemp(join(folder, 'data-'));
  const keyFile = join(dataDir, 'master.key');
  await writeFile(keyFile, JSON.stringify({ current: 'k1', keys: { k1: Buffer.alloc(32, 7).toString('base64') } }), { mode: 0o600 });
  const config = readConfig({
    ENVIRONMENT: environment,
    DATABASE_URL: database.url,
    DATA_DIR: dataDir,
    MASTER_KEY_FILE: keyFile,
    PROXY_HOPS: '1',
    PUBLIC_URL: 'https://pay.example',
  });
  const keys = readKeyRing(keyFile);
  const log: string[] = [];
  const logger = createLogger('debug', 'spec', { write: (line) => log.push(line) });
  const clock = new MovableClock();
  const services = await openServices(config, { databaseUrl: database.url, simulatorUrl: null }, keys, logger, {
    role: 'api',
    clock,
    ...(endpoints && { gatewayEndpoints: endpoints }),
  });
  stops.push(() => services.close());
  if (withWorker) {
    const worker = startWorker(services);
    stops.push(() => worker.stop());
  }
  const api = await createApi({ ...services, health: new Health(services), publicUrl: config.publicUrl });
  stops.push(() => api.close());
  const url = await api.listen(0, '127.0.0.1');
  const { store, ids, personal, readModels } = services;
  const admin = new Administration({ store, clock, ids, keys, personal, environment, cardInTextCheck: true, actor: { type: 'system', id: 'spec' } });
  const inForce: Running['inForce'] = async (change) => {
    const done = await change;
    if (done.position) await readModels.of(directoryModel).runUntil(done.position, { timeoutMs: 10_000 });
    return done;
  };
  const { accountId } = (await inForce(admin.createAccount('City'))).state;
  const { apiKey } = await inForce(admin.issueKey(accountId));
  const document = await (await fetch(`${url}/openapi.json`)).json();
  const client = new Client([url], createOpenApiJudge(document as Parameters<typeof createOpenApiJudge>[0]), `ApiKey ${apiKey}`);
  return { services, clock, client, url, accountId, apiKey, databaseUrl: database.url, dataDir, log, admin, inForce };
};

export interface Ran {
  readonly code: number;
  readonly stdout: string;
  readonly stderr: string;
}
/** Runs a command against a service that runs. */
export const payfoldOn = ({ databaseUrl, dataDir, services }: Running, args: readonly string[], input = ''): Promise<Ran> =>
  new Promise((done) => {
    const { environment, publicUrl } = services.config;
    const env = { PATH: process.env.PATH, HOME: process.env.HOME, ENVIRONMENT: environment, PUBLIC_URL: publicUrl, PROXY_HOPS: '1', DATABASE_URL: databaseUrl, DATA_DIR: dataDir, MASTER_KEY_FILE: join(dataDir, 'master.key'), LOG_LEVEL: 'silent' }; // prettier-ignore
    const child = execFile(process.execPath, [LAUNCHER, ...args, '--json'], { env, timeout: 120_000 }, (error, stdout, stderr) =>
      done({ code: error ? Number(error.code ?? 99) : 0, stdout, stderr }),
    );
    child.stdin!.end(input);
  });

/** Adds a merchant account of a sandbox by the command line. Throws if the command fails or warns. */
export const addMerchantAccount = async (
  running: Running,
  id: string,
  gateway: string,
  endpoint: string,
  credentials: string,
  ...more: readonly string[]
): Promise<void> => {
  const args = ['merchant-accounts', 'add', id, '--gateway', gateway, '--environment', 'sandbox', '--endpoint', endpoint, ...more];
  const { code, stdout, stderr } = await payfoldOn(running, [...args, '--credentials-file', '-', '--yes'], credentials);
  if (code !== 0 || stderr !== '') throw new Error(`merchant-accounts add ${id} ended with ${code}: ${stderr}${stdout}`);
};

/** Records the batches of all processors until this one is recorded. */
export const recordBatch = async (services: Services, batchId: string): Promise<void> => {
  await eventually(async () => {
    await recordSettlements(services.settlement, AbortSignal.timeout(10_000));
    const { rows } = await services.pool.query('select from settlement_batch where batch_id = $1', [batchId]);
    return rows.length === 1;
  });
};
