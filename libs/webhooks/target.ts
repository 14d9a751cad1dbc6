/**
 * Where a delivery may go: the rules for an endpoint's URL, and for the addresses of its host name.
 *
 * Partners choose the URL. The URL and the addresses are checked when the endpoint is added and before every attempt. The connection goes to a
 * checked address without a second look-up. A later answer of the name server cannot redirect it (server-side request forgery, DNS rebinding).
 *
 * Names are resolved by c-ares, not by `dns.lookup`, which uses libuv's few threads. One slow name server would occupy these threads and delay all
 * endpoints.
 */
import { Resolver } from 'node:dns/promises';
import { BlockList, isIP } from 'node:net';
import { type Clock, parseUrl } from '#kernel';
import type { Network, WebhookSettings } from '#platform';

/** Thrown if a rule refuses a URL or an address. The message names the rule and reveals nothing about our network. */
export class Refused extends Error {
  constructor(
    /** For the delivery log: `url_…`, `address_…`. */
    readonly code: string,
    message: string,
  ) {
    super(message);
    this.name = 'Refused';
  }
}

/** Thrown if a name has no address. `code`: error code of c-ares (`ENOTFOUND`, `ETIMEOUT`, `ESERVFAIL`…). */
export class NoAddress extends Error {
  constructor(
    readonly code: string,
    hostname: string,
  ) {
    super(`${hostname} has no address (${code})`);
    this.name = 'NoAddress';
  }
}

/** A URL that passed {@link checkUrl}. */
export interface Target {
  readonly href: string;
  /** Lower case, without a trailing dot. This name is resolved, and the certificate must match it. */
  readonly hostname: string;
  readonly port: number;
  /** `Host` header. */
  readonly host: string;
  /** Path and query. */
  readonly path: string;
}

export type TargetRules = Pick<WebhookSettings, 'privateTargets' | 'ports' | 'blockedNetworks'>;

const MAX_URL_LENGTH = 2_048;
const LOCAL_NAME = /(^|\.)(localhost|local|internal|onion|home\.arpa)$/;

/**
 * Checks a URL. The host is checked after parsing: `https://2130706433/`, `https://0x7f.1/` and `https://①②⑦.0.0.1/` are all 127.0.0.1. Throws
 * {@link Refused}.
 */
export const checkUrl = (text: string, rules: TargetRules): Target => {
  if (text.length > MAX_URL_LENGTH) throw new Refused('url_too_long', `The URL must have at most ${MAX_URL_LENGTH} characters.`);
  // The parser drops tabs and line breaks, trims spaces, and reads a backslash as a slash. A person could read such a URL as another host.
  if (/[\p{Cc}\p{Z}\\]/u.test(text)) throw new Refused('url_characters', 'The URL must not hold spaces, control characters or backslashes.');
  const url = parseUrl(text);
  if (!url) throw new Refused('url_syntax', 'The URL cannot be read.');
  if (url.protocol !== 'https:') throw new Refused('url_scheme', 'The URL must begin with https://.');
  if (url.username !== '' || url.password !== '') throw new Refused('url_credentials', 'The URL must not hold a user name or password.');
  if (text.includes('#')) throw new Refused('url_fragment', 'The URL must not have a fragment.');
  const hostname = url.hostname.replace(/\.$/, '');
  if (isIP(hostname.replace(/^\[|\]$/g, '')) !== 0) throw new Refused('url_ip_address', 'The URL must name its host, not give an IP address.');
  if (!hostname.includes('.') || hostname.split('.').includes('') || LOCAL_NAME.test(hostname))
    throw new Refused('url_local_name', 'The host must be a public DNS name.');
  const port = url.port === '' ? 443 : Number(url.port);
  if (!rules.ports.includes(port) && !rules.privateTargets.some((target) => target.host === hostname && target.port === port))
    throw new Refused('url_port', `The port must be ${rules.ports.join(' or ')}.`);
  return { href: url.href, hostname, port, host: url.port === '' ? hostname : `${hostname}:${port}`, path: `${url.pathname}${url.search}` };
};

const blockListOf = (networks: readonly (Network | string)[]): BlockList => {
  const list = new BlockList();
  for (const network of networks) {
    const [address, prefix] = typeof network === 'string' ? network.split('/') : [network.address, network.prefix];
    list.addSubnet(address, Number(prefix), isIP(address) === 6 ? 'ipv6' : 'ipv4');
  }
  return list;
};

/** IANA's special-purpose addresses, multicast and reserved networks, and Azure's host agent (168.63.129.16), whose address looks public. */
const NOT_PUBLIC_V4 = blockListOf(
  ['0.0.0.0/8', '10.0.0.0/8', '100.64.0.0/10', '127.0.0.0/8', '168.63.129.16/32', '169.254.0.0/16', '172.16.0.0/12', '192.0.0.0/24', '192.0.2.0/24', '192.31.196.0/24', '192.52.193.0/24', '192.88.99.0/24', '192.168.0.0/16', '192.175.48.0/24', '198.18.0.0/15', '198.51.100.0/24', '203.0.113.0/24', '224.0.0.0/4', '240.0.0.0/4'], // prettier-ignore
);
/** All public IPv6 addresses are in this network. Addresses outside it are refused, such as `::ffff:10.0.0.1`, which embeds an IPv4 address. */
const GLOBAL_V6 = blockListOf(['2000::/3']);
const NOT_PUBLIC_V6 = blockListOf(['2001::/23', '2001:db8::/32', '2002::/16', '2620:4f:8000::/48', '3fff::/20']);

/** True if the address belongs to the public internet. */
export const isPublic = (address: string): boolean => {
  // A zone, as in `fe80::1%eth0`, names a network interface of this machine.
  if (address.includes('%')) return false;
  const family = isIP(address);
  if (family === 4) return !NOT_PUBLIC_V4.check(address, 'ipv4');
  return family === 6 && GLOBAL_V6.check(address, 'ipv6') && !NOT_PUBLIC_V6.check(address, 'ipv6');
};

const isIn = (list: BlockList, address: string): boolean => list.check(address, isIP(address) === 6 ? 'ipv6' : 'ipv4');

/**
 * Checks all addresses of a target and returns them, IPv4 first. If one is not allowed, all are refused: a mix of public and private addresses is
 * suspicious. Throws {@link Refused}.
 */
export const vetAddresses = ({ hostname, port }: Target, addresses: readonly string[], rules: TargetRules): readonly string[] => {
  const named = blockListOf(rules.privateTargets.filter((target) => target.host === hostname && target.port === port).map(({ network }) => network));
  const blocked = blockListOf(rules.blockedNetworks);
  for (const address of addresses)
    if (isIP(address) === 0 || address.includes('%') || !(isIn(named, address) || (isPublic(address) && !isIn(blocked, address))))
      throw new Refused('address_not_public', 'The host resolves to an address that is not public.');
  return [...addresses].sort((a, b) => isIP(a) - isIP(b) || (a < b ? -1 : 1));
};

/** Resolves a name to at least one address, without checking the addresses. Throws {@link NoAddress}. */
export type Resolve = (hostname: string) => Promise<readonly string[]>;

const LOOKUP_TIMEOUT_MS = 2_000;
const LOOKUP_TRIES = 2;
/** Answers of a name server are cached for their own time to live, at most this long. */
const MAX_CACHED_MS = 60_000;
const MAX_CACHED_NAMES = 10_000;

/** Makes a function that looks up IPv4 and IPv6 addresses. `servers`: name servers like `127.0.0.1:5399`. Empty: those of the system. */
export const createResolve = (servers: readonly string[], clock: Clock): Resolve => {
  const cache = new Map<string, { readonly addresses: Promise<readonly string[]>; until: number }>();

  const lookUp = async (hostname: string): Promise<{ addresses: readonly string[]; keepMs: number }> => {
    // Use a new resolver for each look-up. In Node 20.19.0, a resolver caches answers itself.
    const resolver = new Resolver({ timeout: LOOKUP_TIMEOUT_MS, tries: LOOKUP_TRIES });
    if (servers.length > 0) resolver.setServers(servers);
    const [v4, v6] = await Promise.allSettled([resolver.resolve4(hostname, { ttl: true }), resolver.resolve6(hostname, { ttl: true })]);
    const found = [v4, v6].flatMap((answer) => (answer.status === 'fulfilled' ? answer.value : []));
    if (found.length === 0) {
      const codes = [v4, v6].map((answer) =>
        answer.status === 'rejected' ? ((answer.reason as NodeJS.ErrnoException).code ?? 'EUNKNOWN') : 'ENODATA',
      );
      // Prefer an error other than "no such name", since it says more.
      throw new NoAddress(codes.find((code) => code !== 'ENODATA' && code !== 'ENOTFOUND') ?? codes[0]!, hostname);
    }
    return { addresses: found.map(({ address }) => address), keepMs: Math.min(MAX_CACHED_MS, ...found.map(({ ttl }) => ttl * 1000)) };
  };

  return (hostname) => {
    const cached = cache.get(hostname);
    if (cached && clock.monotonic() < cached.until) return cached.addresses;
    cache.delete(hostname);
    if (cache.size >= MAX_CACHED_NAMES) cache.delete(cache.keys().next().value!);
    const looked = lookUp(hostname);
    // Other attempts share the promise of this look-up. A failure is not cached.
    const entry = { addresses: looked.then(({ addresses }) => addresses), until: Number.POSITIVE_INFINITY };
    cache.set(hostname, entry);
    looked.then(
      ({ keepMs }) => (entry.until = clock.monotonic() + keepMs),
      () => cache.get(hostname) === entry && cache.delete(hostname),
    );
    return entry.addresses;
  };
};
