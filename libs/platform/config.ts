/** Configuration: the only reader of the environment. Every wrong or missing name is listed at once (cli.md). */
import { resolve } from 'node:path';

export interface Config {
  readonly host: string;
  readonly port: number;
  readonly dataDir: string;
  /** null: embedded Postgres. */
  readonly databaseUrl: string | null;
  /** null: Postgres is the event store too. */
  readonly kurrentdbUrl: string | null;
  /** null: the simulator is started along. */
  readonly simulatorUrl: string | null;
  readonly simulatorPort: number;
  /** Time of day, UTC, at which the simulator closes its batches; null: only when it is told to. */
  readonly simulatorBatchClose: string | null;
  readonly metricsPort: number;
  readonly publicUrl: string;
  readonly logLevel: 'fatal' | 'error' | 'warn' | 'info' | 'debug' | 'silent';
  readonly masterKeyFile: string;
  /** True where the key file may be created on first start. */
  readonly masterKeyMayBeCreated: boolean;
  readonly environment: 'sandbox' | 'production';
  readonly cardInTextCheck: boolean;
  /** Named crash point for tests, `<port call>:<before|after>`; null otherwise. */
  readonly failpoint: string | null;
}

export class ConfigError extends Error {
  constructor(readonly faults: readonly string[]) {
    super(`wrong configuration:\n${faults.map((fault) => `  ${fault}`).join('\n')}`);
    this.name = 'ConfigError';
  }
}

/** Reads and checks all of the environment. Throws {@link ConfigError} with every fault. */
export const readConfig = (env: Readonly<Record<string, string | undefined>> = process.env): Config => {
  const faults: string[] = [];
  const text = (name: string, otherwise: string) => env[name] || otherwise;
  const oneOf = <T extends string>(name: string, allowed: readonly T[], otherwise: T): T => {
    const value = text(name, otherwise);
    if ((allowed as readonly string[]).includes(value)) return value as T;
    faults.push(`${name}=${value}: must be one of ${allowed.join(', ')}`);
    return otherwise;
  };
  const port = (name: string, otherwise: number): number => {
    const value = text(name, String(otherwise));
    if (/^\d{1,5}$/.test(value) && Number(value) <= 65_535) return Number(value);
    faults.push(`${name}=${value}: must be a port, 0 to 65535`);
    return otherwise;
  };
  const url = (name: string, protocols: readonly string[]): string | null => {
    const value = env[name];
    if (!value) return null;
    try {
      if (protocols.includes(new URL(value).protocol)) return value;
    } catch {
      // Several KurrentDB hosts in one URL are no WHATWG URL; the scheme is what can be checked here.
      if (protocols.some((protocol) => value.startsWith(`${protocol}//`)) && value.includes(',')) return value;
    }
    // The value may hold a password: it is not repeated.
    faults.push(`${name}: must be a URL that begins with ${protocols.map((protocol) => `${protocol}//`).join(' or ')}`);
    return null;
  };

  const timeOfDay = (name: string, otherwise: string): string | null => {
    const value = text(name, otherwise);
    if (value === 'off') return null;
    if (!/^([01]\d|2[0-3]):[0-5]\d(:[0-5]\d)?$/.test(value)) faults.push(`${name}=${value}: must be a time of day, UTC, like 05:00, or off`);
    return value;
  };

  const environment = oneOf('ENVIRONMENT', ['sandbox', 'production'], 'sandbox');
  const production = environment === 'production';
  const host = text('HOST', '127.0.0.1');
  const apiPort = port('PORT', 3000);
  const dataDir = resolve(text('DATA_DIR', '.payfold'));
  const publicUrl = (url('PUBLIC_URL', ['http:', 'https:']) ?? `http://${host.includes(':') ? `[${host}]` : host}:${apiPort}`).replace(/\/+$/, '');
  const failpoint = env.FAILPOINT || null;

  const databaseUrl = url('DATABASE_URL', ['postgres:', 'postgresql:']);
  if (production && !env.MASTER_KEY_FILE) faults.push('MASTER_KEY_FILE: required in production');
  if (production && !databaseUrl && !faults.some((fault) => fault.startsWith('DATABASE_URL'))) faults.push('DATABASE_URL: required in production');
  if (production && !publicUrl.startsWith('https:')) faults.push('PUBLIC_URL: must be https in production');
  if (failpoint && production) faults.push('FAILPOINT: refused in production');
  if (failpoint && !/^[\w.]+:(before|after)$/.test(failpoint)) faults.push(`FAILPOINT=${failpoint}: must read <call>:<before|after>`);

  const config: Config = {
    host,
    port: apiPort,
    dataDir,
    databaseUrl,
    kurrentdbUrl: url('KURRENTDB_URL', ['kurrentdb:', 'kurrentdb+discover:', 'kurrent:', 'kdb:', 'esdb:', 'esdb+discover:']),
    simulatorUrl: url('SIMULATOR_URL', ['http:']),
    simulatorPort: port('SIMULATOR_PORT', 0),
    simulatorBatchClose: timeOfDay('SIMULATOR_BATCH_CLOSE', '05:00'),
    metricsPort: port('METRICS_PORT', 9464),
    publicUrl,
    logLevel: oneOf('LOG_LEVEL', ['fatal', 'error', 'warn', 'info', 'debug', 'silent'], 'info'),
    masterKeyFile: resolve(env.MASTER_KEY_FILE || `${dataDir}/master.key`),
    masterKeyMayBeCreated: !production && !env.MASTER_KEY_FILE,
    environment,
    cardInTextCheck: oneOf('CARD_IN_TEXT_CHECK', ['on', 'off'], 'on') === 'on',
    failpoint,
  };
  if (faults.length > 0) throw new ConfigError(faults);
  return config;
};
