/** The hosts of a store's URL, for messages. A URL may hold a password, so no message repeats it. */
import { DatabaseUnavailable } from '#platform';
import { Unavailable } from './event-store.js';

const KURRENTDB_PORT = '2113';
const POSTGRES_PORT = '5432';

/** `host:port`, or several of them separated by commas, as the driver reads the URL. Contains neither user nor password nor options. */
export const hostsOf = (url: string): string => (/^postgres(ql)?:/i.test(url) ? postgresHosts(url) : kurrentdbHosts(url));

/** The hosts of a KurrentDB URL. `new URL` cannot parse a URL with several hosts. */
const kurrentdbHosts = (url: string): string => {
  // The client takes the text up to the first `@` as user and password. If the text has further `@`, the hosts begin after the last one.
  const address = url.replace(/^[^:]*:\/\/([^:]+:[^@]+@)?/, '').split(/[/?#]/, 1)[0]!;
  return address
    .slice(address.lastIndexOf('@') + 1)
    .split(',')
    .filter((host) => host !== '')
    .map((host) => (host.includes(':') ? host : `${host}:${KURRENTDB_PORT}`))
    .join(', ');
};

/** The host of a Postgres URL, as `pg` reads it. The option `host` overrides the host of the URL, and may be the folder of a socket. */
const postgresHosts = (url: string): string => {
  const { hostname, port, searchParams } = new URL(url);
  return `${searchParams.get('host') ?? (hostname === '' ? 'localhost' : decodeURIComponent(hostname))}:${searchParams.get('port') ?? (port || POSTGRES_PORT)}`;
};

/** The environment variable and the hosts of the event store. Without a URL of KurrentDB the store is in Postgres. */
export const storeAddress = (kurrentdbUrl: string | null, databaseUrl: string): string =>
  kurrentdbUrl === null ? `DATABASE_URL (${hostsOf(databaseUrl)})` : `KURRENTDB_URL (${hostsOf(kurrentdbUrl)})`;

/**
 * Converts the error of a failed start. If a store could not be used, the new error names the environment variable and the hosts in one line. Any
 * other error is returned unchanged.
 */
export const withAddress = (error: unknown, kurrentdbUrl: string | null, databaseUrl: string): unknown => {
  if (error instanceof Unavailable)
    return new Error(`the event store at ${storeAddress(kurrentdbUrl, databaseUrl)} cannot be reached: ${error.message}`, { cause: error });
  if (error instanceof DatabaseUnavailable)
    return new Error(`the database at ${storeAddress(null, databaseUrl)} cannot be used: ${error.message}`, { cause: error });
  return error;
};
