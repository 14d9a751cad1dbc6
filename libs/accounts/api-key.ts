/** The text of an API key (C51): `pc_<test|live>_<16 base32>_<43 base62>`. Only a keyed hash of its secret is stored. */
import { randomBytes, timingSafeEqual } from 'node:crypto';
import { crockford, type KeyRing } from '#platform';
import type { ApiKeyRecord, KeyEnvironment } from './account.js';
import type { ApiKeyFacts } from './directory.js';

const LOOKUP_LENGTH = 16;
/** A secret is 32 random bytes in base62. 62^43 is the first power of 62 above 2^256. */
const SECRET_BYTES = 32;
const SECRET_LENGTH = 43;
const BASE62 = '0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz';
const KEY_TEXT = /^pc_(test|live)_([0-9A-HJKMNP-TV-Z]{16})_([0-9A-Za-z]{43})$/;

/** Sandbox keys are `test`, production keys `live`. */
export const keyEnvironment = (environment: 'sandbox' | 'production'): KeyEnvironment => (environment === 'production' ? 'live' : 'test');

const base62 = (bytes: Uint8Array, length: number): string => {
  let rest = BigInt(`0x${Buffer.from(bytes).toString('hex')}`);
  let text = '';
  for (let index = 0; index < length; index++) {
    text = BASE62[Number(rest % 62n)] + text;
    rest /= 62n;
  }
  return text;
};

/** 256 random bits as 43 base62 characters. */
export const newSecret = (random: (bytes: number) => Uint8Array = randomBytes): string => base62(random(SECRET_BYTES), SECRET_LENGTH);

/** Makes a random API key. `apiKey` is never stored. `record` goes into the account's stream. */
export const newApiKey = (
  keyId: string,
  environment: KeyEnvironment,
  keys: KeyRing,
  random: (bytes: number) => Uint8Array = randomBytes,
): { readonly apiKey: string; readonly record: ApiKeyRecord } => {
  const lookupId = crockford(random(10), LOOKUP_LENGTH);
  const secret = newSecret(random);
  const secretHash = keys.mac('api-key', secret).toString('base64');
  return { apiKey: `pc_${environment}_${lookupId}_${secret}`, record: { keyId, lookupId, environment, secretHash, kid: keys.current } };
};

export interface ApiKeyText {
  readonly environment: KeyEnvironment;
  readonly lookupId: string;
  readonly secret: string;
}

/** Parses the text of an API key. null: the text is not an API key. */
export const parseApiKey = (text: string): ApiKeyText | null => {
  const match = KEY_TEXT.exec(text);
  return match ? { environment: match[1] as KeyEnvironment, lookupId: match[2]!, secret: match[3]! } : null;
};

const NO_HASH = Buffer.alloc(32);

/**
 * True if the presented key is the recorded one, not revoked, and of this environment. An unknown key is compared with a dummy hash, so that the
 * response time does not reveal which look-up ids exist.
 */
export const isRightKey = (presented: ApiKeyText, found: ApiKeyFacts | null, environment: KeyEnvironment, keys: KeyRing): found is ApiKeyFacts => {
  // If the master key of the hash is no longer in the ring, the API key is refused.
  const kid = found && keys.kids.includes(found.kid) ? found.kid : null;
  const hash = keys.mac('api-key', presented.secret, kid ?? keys.current);
  const equal = timingSafeEqual(hash, kid && found ? found.secretHash : NO_HASH);
  return equal && kid !== null && found !== null && !found.revoked && found.environment === environment && presented.environment === environment;
};
