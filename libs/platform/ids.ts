/** Random ids and hashed ids. The formats of ids are in `kernel/ids`. */
import { createHash, hash, randomBytes } from 'node:crypto';
import type { Ids } from '#kernel';

const CROCKFORD = '0123456789ABCDEFGHJKMNPQRSTVWXYZ';

/** Crockford base32 of the first bits of `bytes`. */
export const crockford = (bytes: Uint8Array, length: number): string => {
  let text = '';
  let buffer = 0;
  let bits = 0;
  for (const byte of bytes) {
    buffer = (buffer << 8) | byte;
    bits += 8;
    while (bits >= 5 && text.length < length) {
      bits -= 5;
      text += CROCKFORD[(buffer >> bits) & 31];
    }
    buffer &= (1 << bits) - 1;
  }
  return text;
};

const formatUuid = (bytes: Uint8Array): string => {
  const hex = Buffer.from(bytes.buffer, bytes.byteOffset, 16).toString('hex');
  return `${hex.slice(0, 8)}-${hex.slice(8, 12)}-${hex.slice(12, 16)}-${hex.slice(16, 20)}-${hex.slice(20)}`;
};

/** Random bytes are requested in pieces of this size, because a system call for each id would be slow. No byte is used twice. */
const POOL_BYTES = 4_096;
let pool = Buffer.alloc(0);
const drawBytes = (count: number): Uint8Array => {
  if (pool.length < count) pool = randomBytes(POOL_BYTES);
  const drawn = pool.subarray(0, count);
  pool = pool.subarray(count);
  return drawn;
};

/** UUID v7 (RFC 9562): 48 bits of time, 74 random bits. */
export const uuidV7 = (epochMs: number, random: Uint8Array = drawBytes(16)): string => {
  const bytes = Uint8Array.from(random);
  for (let index = 0; index < 6; index++) bytes[index] = Math.floor(epochMs / 2 ** (8 * (5 - index))) % 256;
  bytes[6] = (bytes[6]! & 0x0f) | 0x70;
  bytes[8] = (bytes[8]! & 0x3f) | 0x80;
  return formatUuid(bytes);
};

/** The time in a UUID v7, in milliseconds since the epoch. */
export const uuidTime = (uuid: string): number => Number.parseInt(uuid.replaceAll('-', '').slice(0, 12), 16);

/**
 * An id that depends only on the parts: their SHA-256 hash in the form of a UUID v5. Joined as JSON, two different lists never give the same text.
 */
export const hashedUuid = (...parts: readonly (string | number | bigint)[]): string => {
  const bytes = createHash('sha256')
    .update(JSON.stringify(parts.map(String)))
    .digest()
    .subarray(0, 16);
  bytes[6] = (bytes[6]! & 0x0f) | 0x50;
  bytes[8] = (bytes[8]! & 0x3f) | 0x80;
  return formatUuid(bytes);
};

export const systemIds = (now: () => number): Ids => ({
  uuid: () => uuidV7(now()),
  confirmationNumber: () => crockford(randomBytes(8), 10).replace(/^(.{4})(.{4})(.{2})$/, '$1-$2-$3'),
});

/** UUID v5 (RFC 9562) of a namespace and a name. */
export const uuidV5 = (namespace: string, name: string): string => {
  const hex = hash('sha1', Buffer.concat([Buffer.from(namespace.replaceAll('-', ''), 'hex'), Buffer.from(name, 'utf8')]), 'hex');
  const variant = ((Number.parseInt(hex[16]!, 16) & 0x3) | 0x8).toString(16);
  return `${hex.slice(0, 8)}-${hex.slice(8, 12)}-5${hex.slice(13, 16)}-${variant}${hex.slice(17, 20)}-${hex.slice(20, 32)}`;
};
