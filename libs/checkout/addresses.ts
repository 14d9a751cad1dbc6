/**
 * Checks addresses of a partner before a payer's browser is sent to them. Addresses are compared by parsed origin and path segments. A comparison of
 * text prefixes is not enough: `https://agency.gov.evil.com` begins with `https://agency.gov`.
 */
import { parseUrl } from '#kernel';

export const MAX_ADDRESS_LENGTH = 2_048;

/** Names of the parameters that we add to an address (C59). An address that already has one of them is refused. */
export const RETURN_PARAMETERS = [
  'result',
  'checkout_id',
  'error',
  'payment_id',
  'confirmation_number',
  'reference_id',
  'amount_cents',
  'service_fee_cents',
  'total_charged_cents',
  'state',
  't',
  'sig',
] as const;

export type Vetted =
  | { readonly accepted: true; /** As parsed. */ readonly address: string; /** The matching entry of the allow-list. */ readonly entry: string }
  | { readonly accepted: false; readonly why: string };

const refused = (why: string): Vetted => ({ accepted: false, why });

const IPV4 = /^\d{1,3}(?:\.\d{1,3}){3}$/;
/**
 * A slash, backslash or dot that is encoded, even several times, or `%u`, which some servers read as the begin of a code point. Some servers decode the
 * path before they look for `..`, so it could leave the allowed path.
 */
const ENCODED_PATH_SYNTAX = /%(?:25)*(?:2f|5c|2e|u)/i;
/** A `..` or `.` with path parameters, such as `..;x`. Some servers cut the parameters off, and then leave the allowed path. */
const DOTS_WITH_PARAMETERS = /\/\.{1,2}(?:;|%(?:25)*3b)/i;
/** Characters that some servers drop, or at which some servers end a text. */
const UNSEEN = /[\p{Cc}\p{Cf}\p{Default_Ignorable_Code_Point}]/u;

/** Decides whether a payer may be sent to the address `text`. `allow`: entries in the normal form of the portal's decider. */
export const vetAddress = (text: unknown, allow: readonly string[]): Vetted => {
  if (typeof text !== 'string' || text === '') return refused('is missing');
  if (text.length > MAX_ADDRESS_LENGTH) return refused(`is longer than ${MAX_ADDRESS_LENGTH} characters`);
  if (/[\\\s\p{Cc}\p{Surrogate}]/u.test(text)) return refused('holds a backslash, a space or a control character');
  const url = /^https:\/\//i.test(text) ? parseUrl(text) : null;
  if (!url) return refused('is not an absolute https address');
  if (url.username !== '' || url.password !== '' || /^https:\/\/[^/?#]*@/i.test(text)) return refused('names a user');
  if (text.includes('#')) return refused('has a fragment');
  if (IPV4.test(url.hostname) || url.hostname.startsWith('[')) return refused('names a host by its IP address');
  if (ENCODED_PATH_SYNTAX.test(url.pathname)) return refused('has an encoded slash, backslash or dot in its path');
  if (DOTS_WITH_PARAMETERS.test(url.pathname)) return refused('has dots with parameters in its path');
  const path = fullyDecoded(url.pathname);
  if (path === null) return refused('has a path that cannot be decoded');
  if (UNSEEN.test(path)) return refused('has a control character or an invisible character in its path');
  const segments = path.split(/[/\\]/);
  if (segments.length !== url.pathname.split('/').length) return refused('has an encoded slash, backslash or dot in its path');
  if (segments.some((segment) => /^\.{1,2}(?:[;?#]|$)/.test(segment.replace(/\s/g, '')))) return refused('has dots that may leave its path');
  // Some servers end a pair at `;` too.
  const pairs = queryPairs(url.search.replaceAll(';', '&'));
  if (!pairs) return refused('has a query that cannot be decoded');
  const reserved = pairs.flatMap(([name]) => asServersRead(name)).find((name) => (RETURN_PARAMETERS as readonly string[]).includes(name));
  if (reserved) return refused(`uses the parameter ${reserved}, which is ours`);
  if (pairs.some(([name]) => UNSEEN.test(name))) return refused('has a control character or an invisible character in the name of a parameter');
  const entry = allow.find((candidate) => fits(url, candidate));
  return entry === undefined ? refused("is not on the portal's allow-list") : { accepted: true, address: url.href, entry };
};

/**
 * The names as which servers may read the name of a parameter: without case and blanks around it, with `_` for a dot or blank within. The part from a
 * bracket on is cut off, or the bracket is read as `_`, as PHP does if it is not closed. Brackets at the start are left out, as qs does.
 */
const asServersRead = (name: string): string[] => {
  // Java takes the two Turkish letters for an i, if it compares without case.
  const plain = name.normalize('NFKC').replace(/[ıİ]/g, 'i').toLowerCase();
  return [plain.replace(/^[\s[\]]+/, '').replace(/[[\]].*$/s, ''), plain.replaceAll('[', '_')].map((read) =>
    read.replace(/^[\s\p{Cc}]+|[\s\p{Cc}]+$/gu, '').replace(/[\s.]/g, '_'),
  );
};

/** The path, decoded as long as it can be, in the compatibility form of Unicode, where a full-width dot is a dot. null: it cannot be decoded. */
const fullyDecoded = (path: string): string | null => {
  let decoded: string | null = null;
  try {
    for (let before = ''; decoded !== before;) {
      before = decoded ?? path;
      decoded = decodeURIComponent(before).normalize('NFKC');
    }
  } catch {
    // A `%` that was encoded stands for itself.
  }
  return decoded;
};

const fits = ({ protocol, hostname, port, pathname }: URL, entry: string): boolean => {
  const wildcard = entry.startsWith('https://*.');
  const allowed = new URL(wildcard ? entry.replace('*.', 'any.') : entry);
  if (protocol !== allowed.protocol || port !== allowed.port) return false;
  if (wildcard ? !hostname.endsWith(allowed.hostname.slice('any'.length)) : hostname !== allowed.hostname) return false;
  // `*.agency.gov` stands for at least one label, so it does not include agency.gov itself.
  if (wildcard && hostname.length <= allowed.hostname.length - 'any'.length) return false;
  const prefix = allowed.pathname === '/' ? '' : allowed.pathname;
  return prefix === '' || pathname === prefix || pathname.startsWith(`${prefix}/`);
};

/** Names and values of a query, decoded like a form (`+` is a space). null: invalid encoding. `search` may begin with `?`. */
export const queryPairs = (search: string): [name: string, value: string][] | null => {
  try {
    return search
      .replace(/^\?/, '')
      .split('&')
      .filter((pair) => pair !== '')
      .map((pair) => {
        const at = pair.indexOf('=');
        return [decode(at < 0 ? pair : pair.slice(0, at)), at < 0 ? '' : decode(pair.slice(at + 1))];
      });
  } catch {
    return null;
  }
};

const decode = (text: string): string => decodeURIComponent(text.replaceAll('+', ' '));
