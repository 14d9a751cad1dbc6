/** The configuration. Only this file reads environment variables. One error lists every wrong or missing variable. */
import { isIP } from 'node:net';
import { isAbsolute, resolve } from 'node:path';
import { parseUrl } from '#kernel';

/** A network, such as `127.0.0.0/8` or `fd00::/8`. */
export interface Network {
  readonly address: string;
  readonly prefix: number;
}

/** A host and port in a network that is not public. Webhooks may reach them. */
export interface PrivateTarget {
  readonly host: string;
  readonly port: number;
  readonly network: Network;
}

export interface WebhookSettings {
  /** Seconds between two delivery attempts, before the random spread. Production allows only 120; tests use other values. */
  readonly retrySeconds: number;
  /** Days for which an event and its deliveries are kept after the event was delivered. */
  readonly keepDays: number;
  /** Ports that an endpoint's URL may name. */
  readonly ports: readonly number[];
  /** Public networks that webhooks must not reach, such as the operator's own public addresses. */
  readonly blockedNetworks: readonly Network[];
  /** Non-public targets that webhooks may reach, for local development and tests. Production needs a second variable that confirms them. */
  readonly privateTargets: readonly PrivateTarget[];
  /** PEM file of further certificate authorities, trusted only for private targets. null: none. */
  readonly extraCaFile: string | null;
  /** The name servers, each as `address` or `address:port`. Empty: those of the system. */
  readonly dnsServers: readonly string[];
}

/** From when on something that waits is an alert, by the name of the alert. The settings are `ALERT_<NAME>_DAYS` and `ALERT_<NAME>_SECONDS`. */
export interface AlertThresholds {
  /** Days for which an exception of settlement may stay open. */
  readonly exceptions_old: number;
  /** Days after the closing of a batch by which its money should be funded. */
  readonly in_transit_old: number;
  /** Days before the due date of a dispute from which a missing answer to it is an alert. */
  readonly dispute_due: number;
  /** Seconds for which a charge or reversal may have no outcome. */
  readonly unknown_outcome: number;
  /** Seconds within which each event should be in the sealed log. */
  readonly seal: number;
  /** Seconds within which the keys of an erasure should be destroyed. */
  readonly erasure_pending: number;
}

export interface Config {
  readonly host: string;
  readonly port: number;
  readonly dataDir: string;
  /** The folder in which each process keeps its marks (`MARKS_DIR`), outside the database. */
  readonly marksDir: string;
  /** The folder of the signed heads (`HEADS_DIR`), outside the database. All processes of an installation share it. */
  readonly headsDir: string;
  /** The folder of the erasure files (`ERASURES_DIR`), outside the database. All processes of an installation share it. */
  readonly erasuresDir: string;
  /** Days for which backups of the database are kept. After this time, no copy of an erased key is left. */
  readonly backupRetentionDays: number;
  /** null: embedded Postgres. */
  readonly databaseUrl: string | null;
  /** null: Postgres is the event store too. */
  readonly kurrentdbUrl: string | null;
  /** null: Payfold starts the simulator itself. */
  readonly simulatorUrl: string | null;
  readonly simulatorPort: number;
  /** Time of day, UTC, at which the simulator closes its batches. null: only a command closes them. */
  readonly simulatorBatchClose: string | null;
  readonly metricsPort: number;
  /** The address of `/audit/v1`. Loopback unless an operator names another one. */
  readonly auditHost: string;
  readonly auditPort: number;
  readonly publicUrl: string;
  /** True if `/docs` shows the API reference. */
  readonly apiDocs: boolean;
  /** `start`: each process brings the schema up to its release. `prepare`: only `payfold upgrade prepare` changes the schema. */
  readonly migrate: 'start' | 'prepare';
  readonly logLevel: 'fatal' | 'error' | 'warn' | 'info' | 'debug' | 'silent';
  readonly masterKeyFile: string;
  /** True if the key file may be created on first start. */
  readonly masterKeyMayBeCreated: boolean;
  readonly environment: 'sandbox' | 'production';
  readonly cardInTextCheck: boolean;
  /** Maximum number of intakes and card submissions a minute from one client address. null: no limit (C65). */
  readonly checkoutRatePerAddress: number | null;
  /** Over this many unsigned intakes a minute at one portal, the limit by address drops to a tenth for this portal. null: never. */
  readonly checkoutUnsignedPerPortal: number | null;
  /** Over this many declined cards a minute at one portal, the limit by address drops to a tenth for this portal. null: never. */
  readonly checkoutDeclinesPerPortal: number | null;
  /** Number of the operator's own proxies that add to `X-Forwarded-For`. 0: the header is not trusted. */
  readonly proxyHops: number;
  /** Maximum number of connections from one client address, for each listener. null: no limit, because all clients come through a proxy. */
  readonly connectionsPerAddress: number | null;
  /** Crash point for tests, `<port call>:<before|after>`. null: none. */
  readonly failpoint: string | null;
  readonly webhooks: WebhookSettings;
  readonly alerts: AlertThresholds;
}

/** About every 2 minutes (specification, Retries). */
const WEBHOOK_RETRY_SECONDS = 120;
const WEBHOOK_KEEP_DAYS = 400;
const MAX_KEEP_DAYS = 36_500;
const BACKUP_RETENTION_DAYS = 35;
/** The thresholds of alerts, and the unit of each. */
const ALERTS = {
  exceptions_old: [7, 'days'],
  in_transit_old: [5, 'days'],
  dispute_due: [5, 'days'],
  unknown_outcome: [900, 'seconds'],
  seal: [60, 'seconds'],
  erasure_pending: [60, 'seconds'],
} as const satisfies Readonly<Record<keyof AlertThresholds, readonly [number, 'days' | 'seconds']>>;
/** The greatest threshold. An alert that comes later would help nobody. */
const MAX_ALERT = { days: 366, seconds: 86_400 } as const;
const WEBHOOK_PORTS: readonly number[] = [443, 8443];
const MAX_RATE = 1_000_000;
/** Defaults in production, per minute and process. In the sandbox, these limits are off. */
const CHECKOUT_RATE_PER_ADDRESS = 60;
const CHECKOUT_UNSIGNED_PER_PORTAL = 300;
const CHECKOUT_DECLINES_PER_PORTAL = 30;
const MAX_PROXY_HOPS = 10;
/** An eighth of all connections that a listener takes. */
const CONNECTIONS_PER_ADDRESS = 512;
const MAX_CONNECTIONS_PER_ADDRESS = 4_096;

export class ConfigError extends Error {
  constructor(readonly faults: readonly string[]) {
    super(`wrong configuration:\n${faults.map((fault) => `  ${fault}`).join('\n')}`);
    this.name = 'ConfigError';
  }
}

/** Reads and checks the environment. Throws {@link ConfigError} with every fault. */
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
      // A URL with several KurrentDB hosts is not a WHATWG URL, so only its scheme is checked.
      if (protocols.some((protocol) => value.startsWith(`${protocol}//`)) && value.includes(',')) return value;
    }
    // The value may hold a password, so the message does not repeat it.
    faults.push(`${name}: must be a URL that begins with ${protocols.map((protocol) => `${protocol}//`).join(' or ')}`);
    return null;
  };

  const timeOfDay = (name: string, otherwise: string): string | null => {
    const value = text(name, otherwise);
    if (value === 'off') return null;
    if (!/^([01]\d|2[0-3]):[0-5]\d(:[0-5]\d)?$/.test(value)) faults.push(`${name}=${value}: must be a time of day, UTC, like 05:00, or off`);
    return value;
  };

  const count = (name: string, most: number, otherwise = 0): number => {
    const value = text(name, String(otherwise));
    if (/^\d{1,7}$/.test(value) && Number(value) <= most) return Number(value);
    faults.push(`${name}=${value}: must be a whole number, 0 to ${most}`);
    return 0;
  };

  const environment = oneOf('ENVIRONMENT', ['sandbox', 'production'], 'sandbox');
  const production = environment === 'production';
  const host = text('HOST', '127.0.0.1');
  const auditHost = text('AUDIT_HOST', '127.0.0.1');
  const apiPort = port('PORT', 3000);
  const dataDir = resolve(text('DATA_DIR', '.payfold'));
  const publicUrl = (url('PUBLIC_URL', ['http:', 'https:']) ?? `http://${host.includes(':') ? `[${host}]` : host}:${apiPort}`).replace(/\/+$/, '');
  const failpoint = env.FAILPOINT || null;

  const databaseUrl = url('DATABASE_URL', ['postgres:', 'postgresql:']);
  if (production && !env.MASTER_KEY_FILE) faults.push('MASTER_KEY_FILE: required in production');
  for (const name of ['HEADS_DIR', 'ERASURES_DIR'] as const) {
    if (env[name] && !isAbsolute(env[name])) faults.push(`${name}=${env[name]}: must be an absolute path`);
    // Otherwise each process would keep its files where it was started.
    if (production && !env[name] && !isAbsolute(env.DATA_DIR ?? '')) faults.push(`${name}: required in production if DATA_DIR is no absolute path`);
  }
  if (production && !databaseUrl && !faults.some((fault) => fault.startsWith('DATABASE_URL'))) faults.push('DATABASE_URL: required in production');
  if (production && !publicUrl.startsWith('https:')) faults.push('PUBLIC_URL: must be https in production');
  if ((parseUrl(publicUrl)?.pathname ?? '/') !== '/') faults.push('PUBLIC_URL: must have no path; checkout pages stand at the root');
  if (failpoint && production) faults.push('FAILPOINT: refused in production');
  const behindTls = oneOf('BEHIND_TLS', ['on', 'off'], 'off') === 'on';
  for (const [name, address] of [
    ['HOST', host],
    ['AUDIT_HOST', auditHost],
  ] as const)
    // prettier-ignore
    if (production && !behindTls && !isLoopback(address))
      faults.push(`${name}=${address}: card data would travel without TLS; put TLS in front and say so with BEHIND_TLS=on`);
  if (failpoint && !/^[\w.]+:(before|after)$/.test(failpoint)) faults.push(`FAILPOINT=${failpoint}: must read <call>:<before|after>`);

  const limit = (name: string, inProduction: number): number | null => count(name, MAX_RATE, production ? inProduction : 0) || null;
  const checkoutRatePerAddress = limit('CHECKOUT_RATE_PER_ADDRESS', CHECKOUT_RATE_PER_ADDRESS);
  if (env.CHECKOUT_RATE_PER_PORTAL)
    faults.push('CHECKOUT_RATE_PER_PORTAL: no longer known; it closed a portal to its payers. See CHECKOUT_UNSIGNED_PER_PORTAL');
  // TLS ends at a proxy, which would be the one address of all payers.
  if (production && checkoutRatePerAddress !== null && !env.PROXY_HOPS)
    faults.push('PROXY_HOPS: required in production: how many proxies of yours add to X-Forwarded-For; else all payers count as one address');

  /** Reads a list separated by commas. `read` parses one part, and returns null if the part is wrong. */
  const list = <T>(name: string, form: string, read: (part: string) => T | null): T[] => {
    const parts = (env[name] ?? '').split(',').filter((part) => part !== '');
    const values = parts.map((part) => read(part.trim()));
    if (values.includes(null)) faults.push(`${name}: must be a list of ${form}, separated by commas`);
    return values.filter((value) => value !== null);
  };
  const retrySeconds = text('WEBHOOK_RETRY_SECONDS', String(WEBHOOK_RETRY_SECONDS));
  if (!/^\d{1,4}(\.\d{1,3})?$/.test(retrySeconds) || Number(retrySeconds) === 0)
    faults.push(`WEBHOOK_RETRY_SECONDS=${retrySeconds}: must be a number of seconds, up to 9999`);
  else if (production && Number(retrySeconds) !== WEBHOOK_RETRY_SECONDS)
    faults.push(`WEBHOOK_RETRY_SECONDS: refused in production, where it is ${WEBHOOK_RETRY_SECONDS}`);
  const time = (name: string, unit: 'days' | 'seconds', otherwise: number, most: number): number => {
    const value = text(name, String(otherwise));
    if (/^\d{1,5}$/.test(value) && Number(value) >= 1 && Number(value) <= most) return Number(value);
    faults.push(`${name}=${value}: must be a whole number of ${unit}, 1 to ${most}`);
    return otherwise;
  };
  const days = (name: string, otherwise: number, most = MAX_KEEP_DAYS): number => time(name, 'days', otherwise, most);
  const alert = (name: keyof AlertThresholds): number => {
    const [otherwise, unit] = ALERTS[name];
    return time(`ALERT_${name}_${unit}`.toUpperCase(), unit, otherwise, MAX_ALERT[unit]);
  };
  const keepDays = days('WEBHOOK_KEEP_DAYS', WEBHOOK_KEEP_DAYS);
  const privateTargets = list('WEBHOOK_PRIVATE_TARGETS', 'host:port=network', readPrivateTarget);
  if (production && privateTargets.length > 0 && env.WEBHOOK_PRIVATE_TARGETS_ACK !== env.WEBHOOK_PRIVATE_TARGETS)
    faults.push('WEBHOOK_PRIVATE_TARGETS: lets webhooks reach private addresses; in production WEBHOOK_PRIVATE_TARGETS_ACK must hold the same text');
  const ports = list('WEBHOOK_PORTS', 'ports', (part) => (isPort(part) ? Number(part) : null));
  const webhooks: WebhookSettings = {
    retrySeconds: Number(retrySeconds),
    keepDays,
    ports: ports.length > 0 ? ports : WEBHOOK_PORTS,
    blockedNetworks: list('WEBHOOK_BLOCKED_NETWORKS', 'networks such as 198.51.100.0/24', readNetwork),
    privateTargets,
    extraCaFile: env.WEBHOOK_EXTRA_CA_FILE ? resolve(env.WEBHOOK_EXTRA_CA_FILE) : null,
    dnsServers: list('WEBHOOK_DNS_SERVERS', 'address:port', (part) => (isNameServer(part) ? part : null)),
  };

  const proxyHops = count('PROXY_HOPS', MAX_PROXY_HOPS);
  const behindProxy = proxyHops > 0 || behindTls;
  const connectionsPerAddress = env.CONNECTIONS_PER_ADDRESS
    ? count('CONNECTIONS_PER_ADDRESS', MAX_CONNECTIONS_PER_ADDRESS) || null
    : behindProxy
      ? null
      : CONNECTIONS_PER_ADDRESS;

  const config: Config = {
    host,
    port: apiPort,
    dataDir,
    marksDir: resolve(text('MARKS_DIR', `${dataDir}/marks`)),
    headsDir: resolve(text('HEADS_DIR', `${dataDir}/heads`)),
    erasuresDir: resolve(text('ERASURES_DIR', `${dataDir}/erasures`)),
    backupRetentionDays: days('BACKUP_RETENTION_DAYS', BACKUP_RETENTION_DAYS),
    databaseUrl,
    kurrentdbUrl: url('KURRENTDB_URL', ['kurrentdb:', 'kurrentdb+discover:', 'kurrent:', 'kdb:', 'esdb:', 'esdb+discover:']),
    simulatorUrl: url('SIMULATOR_URL', ['http:']),
    simulatorPort: port('SIMULATOR_PORT', 0),
    simulatorBatchClose: timeOfDay('SIMULATOR_BATCH_CLOSE', '05:00'),
    metricsPort: port('METRICS_PORT', 9464),
    auditHost,
    auditPort: port('AUDIT_PORT', 3001),
    publicUrl,
    apiDocs: oneOf('API_DOCS', ['on', 'off'], 'on') === 'on',
    migrate: oneOf('MIGRATE', ['start', 'prepare'], 'start'),
    logLevel: oneOf('LOG_LEVEL', ['fatal', 'error', 'warn', 'info', 'debug', 'silent'], 'info'),
    masterKeyFile: resolve(env.MASTER_KEY_FILE || `${dataDir}/master.key`),
    masterKeyMayBeCreated: !production && !env.MASTER_KEY_FILE,
    environment,
    cardInTextCheck: oneOf('CARD_IN_TEXT_CHECK', ['on', 'off'], 'on') === 'on',
    checkoutRatePerAddress,
    checkoutUnsignedPerPortal: limit('CHECKOUT_UNSIGNED_PER_PORTAL', CHECKOUT_UNSIGNED_PER_PORTAL),
    checkoutDeclinesPerPortal: limit('CHECKOUT_DECLINES_PER_PORTAL', CHECKOUT_DECLINES_PER_PORTAL),
    proxyHops,
    connectionsPerAddress,
    failpoint,
    webhooks,
    alerts: {
      exceptions_old: alert('exceptions_old'),
      in_transit_old: alert('in_transit_old'),
      dispute_due: alert('dispute_due'),
      unknown_outcome: alert('unknown_outcome'),
      seal: alert('seal'),
      erasure_pending: alert('erasure_pending'),
    },
  };
  if (faults.length > 0) throw new ConfigError(faults);
  return config;
};

/** True for the name or an address of this host alone. */
export const isLoopback = (host: string): boolean => host === 'localhost' || host === '::1' || (isIP(host) === 4 && host.startsWith('127.'));

const isPort = (text: string): boolean => /^\d{1,5}$/.test(text) && Number(text) >= 1 && Number(text) <= 65_535;

const readNetwork = (text: string): Network | null => {
  const match = /^(\S+)\/(\d{1,3})$/.exec(text);
  const family = match ? isIP(match[1]!) : 0;
  if (!match || family === 0 || Number(match[2]) > (family === 4 ? 32 : 128)) return null;
  return { address: match[1]!, prefix: Number(match[2]) };
};

const readPrivateTarget = (text: string): PrivateTarget | null => {
  const match = /^([a-z0-9._-]+):(\d+)=(\S+)$/i.exec(text);
  const network = match ? readNetwork(match[3]!) : null;
  return match && network && isPort(match[2]!) ? { host: match[1]!.toLowerCase(), port: Number(match[2]), network } : null;
};

/** True for an IP address with or without a port. An IPv6 address with a port needs brackets. */
const isNameServer = (text: string): boolean => {
  if (isIP(text) !== 0) return true;
  const match = /^(?:\[([0-9a-f:.]+)\]|([0-9.]+)):(\d+)$/i.exec(text);
  return match !== null && isIP(match[1] ?? match[2]!) !== 0 && isPort(match[3]!);
};
