/**
 * `sig` (C60): with a portal's signing secret, the partner signs requests to us, and we sign addresses on the way back.
 *
 * The signed text has four lines, joined by line feeds: the version, the kind, the address, and the query. Because of the kind, the signature of a
 * cancel address is wrong for a return address. Each pair of the query has only one encoding, and the pairs are sorted by bytes.
 */
import { createHmac, timingSafeEqual } from 'node:crypto';
import { queryPairs } from './addresses.js';

export type SignatureKind = 'return' | 'cancel' | 'link' | 'intake';
export type Pairs = Iterable<readonly [name: string, value: string]>;

const SIGNATURE = /^[0-9a-f]{64}$/;

/**
 * Percent-encodes all characters except the unreserved ones of RFC 3986, with upper-case hex. `encodeURIComponent` leaves five more characters
 * unchanged.
 */
const encode = (text: string): string =>
  encodeURIComponent(text).replace(/[!'()*]/g, (character) => `%${character.charCodeAt(0).toString(16).toUpperCase()}`);

/** Compares encoded texts. They are ASCII, so the order is that of their bytes. */
const byText = (a: string, b: string) => (a < b ? -1 : a > b ? 1 : 0);

/** The signed text. The query of `address` is ignored. */
export const canonical = (kind: SignatureKind, address: string, pairs: Pairs): string => {
  const { origin, pathname } = new URL(address);
  const encoded = [...pairs].filter(([name]) => name !== 'sig').map(([name, value]) => [encode(name), encode(value)] as const);
  const query = encoded.sort(([a, x], [b, y]) => byText(a, b) || byText(x, y)).map(([name, value]) => `${name}=${value}`);
  return `v1\n${kind}\n${origin}${pathname}\n${query.join('&')}`;
};

/** Lower-case hex HMAC-SHA256 of {@link canonical}. */
export const sign = (secret: string, kind: SignatureKind, address: string, pairs: Pairs): string =>
  createHmac('sha256', secret)
    .update(canonical(kind, address, pairs))
    .digest('hex');

/** True if `sig` was made with one of the secrets. Compares in constant time. */
export const isSigned = (secrets: readonly string[], kind: SignatureKind, address: string, pairs: Pairs, sig: unknown): boolean => {
  if (typeof sig !== 'string' || !SIGNATURE.test(sig)) return false;
  const given = Buffer.from(sig, 'hex');
  const all = [...pairs];
  return secrets.filter((secret) => timingSafeEqual(Buffer.from(sign(secret, kind, address, all), 'hex'), given)).length > 0;
};

/**
 * The address with its own query and our parameters, signed as a whole. Null values are left out. `t` (unix seconds) and `sig` come last. `address`
 * must have passed {@link vetAddress}.
 */
export const signedAddress = (
  secret: string,
  kind: 'return' | 'cancel',
  address: string,
  parameters: Readonly<Record<string, string | null>>,
  nowMs: number,
): string => {
  const { search } = new URL(address);
  const own = queryPairs(search);
  if (!own) throw new Error('an address whose query cannot be decoded was vetted');
  const ours = Object.entries({ ...parameters, t: String(Math.floor(nowMs / 1_000)) }).filter((pair): pair is [string, string] => pair[1] !== null);
  const sig = sign(secret, kind, address, [...own, ...ours]);
  const added = [...ours, ['sig', sig] as const].map(([name, value]) => `${name}=${encode(value)}`).join('&');
  return `${address}${search === '' ? (address.endsWith('?') ? '' : '?') : '&'}${added}`;
};
