/**
 * The master key ring and the keys that are derived from it.
 *
 * `MASTER_KEY_FILE` holds `{"current": "<kid>", "keys": {"<kid>": "<32 bytes, base64>"}}`. HKDF derives a separate key for each purpose, so a leaked
 * key does not reveal the others. To rotate the master key, add a key and name it as `current`.
 */
import { createCipheriv, createDecipheriv, createHmac, hkdfSync, randomBytes } from 'node:crypto';
import { closeSync, existsSync, fsyncSync, linkSync, mkdirSync, openSync, unlinkSync, writeSync } from 'node:fs';
import { dirname } from 'node:path';
import type { Config } from './config.js';
import { NotOurs, readOwnFile } from './own-file.js';

export type Purpose =
  | 'api-key'
  | 'audit-key'
  | 'idempotency-key'
  | 'fingerprint'
  | 'card'
  | 'cursor'
  | 'access-token'
  | 'secret'
  | 'csrf'
  | 'log-head'
  | 'verify-pass'
  | 'webhook-listen'
  | 'key-check'
  | 'checkout'
  | 'personal-key'
  | 'personal-mail';

const KEY_BYTES = 32;
const NONCE_BYTES = 12;
const TAG_BYTES = 16;
/** Length of a check value, in hex digits. */
const CHECK_DIGITS = 16;

export class KeyRing {
  private readonly derived = new Map<string, Buffer>();

  constructor(
    readonly current: string,
    private readonly keys: ReadonlyMap<string, Buffer>,
  ) {
    if (!keys.has(current)) throw new Error(`the master key ring names "${current}" as current but does not hold it`);
  }

  get kids(): string[] {
    return [...this.keys.keys()];
  }

  /** The key for one purpose under one key id: 32 bytes. Throws for an unknown id. */
  derive(purpose: Purpose, kid: string = this.current): Buffer {
    const name = `${kid}/${purpose}`;
    let key = this.derived.get(name);
    if (!key) {
      const master = this.keys.get(kid);
      if (!master) throw new Error(`master key "${kid}" is not in the ring`);
      key = Buffer.from(hkdfSync('sha256', master, Buffer.alloc(0), `payfold ${purpose}`, KEY_BYTES));
      this.derived.set(name, key);
    }
    return key;
  }

  /** A check value of one key: 16 hex digits that are equal where the key is equal, and do not reveal it. */
  check(kid: string): string {
    return this.derive('key-check', kid).toString('hex').slice(0, CHECK_DIGITS);
  }

  /** HMAC-SHA256 under a purpose's key. */
  mac(purpose: Purpose, data: string | Uint8Array, kid?: string): Buffer {
    return createHmac('sha256', this.derive(purpose, kid)).update(data).digest();
  }

  /**
   * Encrypts a secret (AES-256-GCM, fresh nonce). `context` names table or stream, id and field. A ciphertext that is copied to another place cannot
   * be decrypted there.
   */
  seal(plaintext: string, context: string): { kid: string; ciphertext: string } {
    const nonce = randomBytes(NONCE_BYTES);
    const cipher = createCipheriv('aes-256-gcm', this.derive('secret'), nonce).setAAD(Buffer.from(context));
    const body = Buffer.concat([cipher.update(plaintext, 'utf8'), cipher.final()]);
    return { kid: this.current, ciphertext: Buffer.concat([nonce, body, cipher.getAuthTag()]).toString('base64') };
  }

  /** Decrypts a secret that {@link seal} encrypted. Throws if ciphertext, context or key differ. */
  open(sealed: { kid: string; ciphertext: string }, context: string): string {
    const bytes = Buffer.from(sealed.ciphertext, 'base64');
    const decipher = createDecipheriv('aes-256-gcm', this.derive('secret', sealed.kid), bytes.subarray(0, NONCE_BYTES))
      .setAAD(Buffer.from(context))
      .setAuthTag(bytes.subarray(bytes.length - TAG_BYTES));
    return Buffer.concat([decipher.update(bytes.subarray(NONCE_BYTES, bytes.length - TAG_BYTES)), decipher.final()]).toString('utf8');
  }
}

/** A ring with one fresh key. */
export const newKeyRing = (): KeyRing => new KeyRing('k1', new Map([['k1', randomBytes(KEY_BYTES)]]));

/** Reads the key file. Refuses one that others can read or have written: its keys may be known. */
const readSecret = (file: string): string => {
  const fault = (why: string, cause?: unknown) => new Error(`MASTER_KEY_FILE ${file} ${why}`, { cause });
  let text: string | null;
  try {
    text = readOwnFile(file, { secret: true });
  } catch (error) {
    if (error instanceof NotOurs) throw new Error(`MASTER_KEY_FILE ${error.message}`, { cause: error });
    throw fault(`cannot be read (${(error as NodeJS.ErrnoException).code})`, error);
  }
  if (text === null) throw fault('cannot be read (ENOENT)');
  return text;
};

/** Reads the ring. Throws an error of one line for any fault. */
export const readKeyRing = (file: string): KeyRing => {
  const text = readSecret(file);
  const refuse = (why: string): never => {
    throw new Error(`MASTER_KEY_FILE ${file} is not a key ring: ${why}`);
  };
  let ring: { current?: unknown; keys?: unknown };
  try {
    ring = JSON.parse(text) as typeof ring;
  } catch {
    return refuse('not JSON');
  }
  if (ring === null || typeof ring !== 'object' || typeof ring.current !== 'string' || ring.keys === null || typeof ring.keys !== 'object')
    return refuse('it needs "current" and "keys"');
  const keys = new Map<string, Buffer>();
  for (const [kid, value] of Object.entries(ring.keys as Record<string, unknown>)) {
    // The first key must be the oldest, because it names idempotency rows. JavaScript objects move names that look like numbers to the front. So a
    // key id must begin with a letter.
    if (!/^[A-Za-z][\w.-]{0,31}$/.test(kid)) return refuse(`key id "${kid}" must begin with a letter`);
    const bytes = typeof value === 'string' ? Buffer.from(value, 'base64') : Buffer.alloc(0);
    if (bytes.length !== KEY_BYTES) return refuse(`key "${kid}" is not ${KEY_BYTES} bytes of base64`);
    keys.set(kid, bytes);
  }
  return new KeyRing(ring.current, keys);
};

/** Creates a key file with one fresh key, mode 600, and its folder. False: the file exists already, and was not changed. */
export const createKeyFile = (file: string): boolean => {
  mkdirSync(dirname(file), { recursive: true, mode: 0o711 });
  const draft = `${file}.${randomBytes(6).toString('hex')}`;
  const descriptor = openSync(draft, 'wx', 0o600);
  const key = randomBytes(KEY_BYTES).toString('base64');
  try {
    writeSync(descriptor, `${JSON.stringify({ current: 'k1', keys: { k1: key } }, null, 2)}\n`);
    fsyncSync(descriptor);
    closeSync(descriptor);
    linkSync(draft, file);
    return true;
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'EEXIST') throw error;
    return false;
  } finally {
    unlinkSync(draft);
  }
};

/**
 * The sandbox's ring: reads the file, or creates it on the first start. An existing file is never overwritten, even if two processes start at once.
 */
export const readOrCreateKeyRing = (file: string): KeyRing => {
  // If another process creates the file first, its key is used.
  if (!existsSync(file)) createKeyFile(file);
  return readKeyRing(file);
};

/** The ring that the configuration names. */
export const openKeys = ({ masterKeyFile, masterKeyMayBeCreated }: Pick<Config, 'masterKeyFile' | 'masterKeyMayBeCreated'>): KeyRing =>
  masterKeyMayBeCreated ? readOrCreateKeyRing(masterKeyFile) : readKeyRing(masterKeyFile);
