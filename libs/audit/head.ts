/**
 * Signed heads of the log, as C2SP checkpoints (c2sp.org/tlog-checkpoint). A head is a signed note with the log's origin, the tree's size and its
 * root. Two extension lines hold the time and the log position.
 *
 * The Ed25519 key is derived from the master key ring. Each head is also written to a file outside the database.
 */
import { createHash, createPrivateKey, createPublicKey, type KeyObject, sign, verify } from 'node:crypto';
import {
  closeSync,
  existsSync,
  fsyncSync,
  linkSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { basename, join } from 'node:path';
import type { KeyRing } from '#platform';

export interface Head {
  readonly origin: string;
  readonly size: number;
  readonly root: Buffer;
  /** RFC 3339: when it was signed. */
  readonly at: string;
  /** Log position of the last event that the head covers. '' if it covers none. */
  readonly position: string;
}

/** Fixed prefixes of an Ed25519 key in PKCS #8 and in SPKI. The 32 bytes of the key follow. */
const PKCS8 = Buffer.from('302e020100300506032b657004220420', 'hex');
const SPKI = Buffer.from('302a300506032b6570032100', 'hex');
const ED25519 = 1;
const KEY_HASH_BYTES = 4;

/** Public key that verifies the heads of one log. */
export interface HeadKey {
  readonly name: string;
  readonly publicKey: Buffer;
  /** Verifier key in C2SP's form, for auditors. */
  readonly vkey: string;
}

const keyHash = (name: string, publicKey: Buffer): Buffer =>
  createHash('sha256')
    .update(Buffer.concat([Buffer.from(`${name}\n`), Buffer.from([ED25519]), publicKey]))
    .digest()
    .subarray(0, KEY_HASH_BYTES);

const privateKey = (keys: KeyRing, kid: string): KeyObject =>
  createPrivateKey({ key: Buffer.concat([PKCS8, keys.derive('log-head', kid)]), format: 'der', type: 'pkcs8' });

const headKey = (name: string, keys: KeyRing, kid: string): HeadKey => {
  const publicKey = createPublicKey(privateKey(keys, kid)).export({ format: 'der', type: 'spki' }).subarray(SPKI.length);
  const vkey = `${name}+${keyHash(name, publicKey).toString('hex')}+${Buffer.concat([Buffer.from([ED25519]), publicKey]).toString('base64')}`;
  return { name, publicKey, vkey };
};

/** Public keys of a log's heads, one for each key of the master key ring. Heads that an earlier key signed stay valid. */
export const headKeys = (origin: string, keys: KeyRing): HeadKey[] => keys.kids.map((kid) => headKey(origin, keys, kid));

const textOf = ({ origin, size, root, at, position }: Head): string =>
  `${origin}\n${size}\n${root.toString('base64')}\nat ${at}\nposition ${position}\n`;

/** Text with the signature of the current key: a signed note. `text` ends with a line feed. */
const signNote = (origin: string, text: string, keys: KeyRing): string => {
  const { name, publicKey } = headKey(origin, keys, keys.current);
  const signature = sign(null, Buffer.from(text), privateKey(keys, keys.current));
  return `${text}\n— ${name} ${Buffer.concat([keyHash(name, publicKey), signature]).toString('base64')}\n`;
};

export const signHead = (head: Head, keys: KeyRing): string => signNote(head.origin, textOf(head), keys);

/** Signs the manifest of an evidence pack. A head begins with its origin, so no reader can take this note for a head. */
export const signManifest = (origin: string, manifest: string, keys: KeyRing): string =>
  signNote(origin, `payfold evidence pack\n${origin}\nmanifest.json sha256 ${createHash('sha256').update(manifest).digest('hex')}\n`, keys);

export class ForgedHead extends Error {}

/** Reads a signed head and verifies its signature. Throws {@link ForgedHead} if the text is no head, or if none of `keys` signed it. */
export const openHead = (note: string, keys: readonly HeadKey[]): Head => {
  const [, text, signatures] = /^([^]*?\n)\n((?:— [^\n]+\n)+)$/.exec(note) ?? [];
  const lines = text?.split('\n') ?? [];
  const [origin, size, root, at, position] = lines;
  if (
    text === undefined ||
    signatures === undefined ||
    lines.length !== 6 ||
    !/^(0|[1-9]\d{0,15})$/.test(size!) ||
    !at!.startsWith('at ') ||
    !position!.startsWith('position ')
  )
    // prettier-ignore
    throw new ForgedHead('it is no signed head');
  const bytes = Buffer.from(root!, 'base64');
  if (bytes.length !== 32 || bytes.toString('base64') !== root) throw new ForgedHead('its root is no hash');
  const good = signatures.split('\n').some((line) => {
    const [, name, value] = /^— (\S+) (\S+)$/.exec(line) ?? [];
    const signed = Buffer.from(value ?? '', 'base64');
    const key = keys.find((one) => one.name === name && keyHash(one.name, one.publicKey).equals(signed.subarray(0, KEY_HASH_BYTES)));
    if (!key || origin !== key.name) return false;
    const publicKey = createPublicKey({ key: Buffer.concat([SPKI, key.publicKey]), format: 'der', type: 'spki' });
    return verify(null, Buffer.from(text), publicKey, signed.subarray(KEY_HASH_BYTES));
  });
  if (!good) throw new ForgedHead('no key of this log signed it');
  return { origin: origin!, size: Number(size), root: bytes, at: at!.slice('at '.length), position: position!.slice('position '.length) };
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Files: `<day>/<size>.head`. An operator copies the folder to a place that database administrators cannot reach.

const DIGITS = 20;
const EXTENSION = '.head';
/** Prefix of the folder in which a file is written before it is moved to its place. */
const DRAFT = '.draft-';

/** Writes a head to its file and returns the file's path. An existing file is not changed. */
export const writeHead = (folder: string, head: Head, note: string, name: string = String(head.size).padStart(DIGITS, '0')): string => {
  const day = join(folder, head.at.slice(0, 10));
  mkdirSync(day, { recursive: true, mode: 0o755 });
  const file = join(day, `${name}${EXTENSION}`);
  if (existsSync(file)) return file;
  const place = mkdtempSync(join(day, DRAFT));
  const draft = join(place, 'head');
  const descriptor = openSync(draft, 'w', 0o644);
  writeSync(descriptor, note);
  fsyncSync(descriptor);
  closeSync(descriptor);
  try {
    linkSync(draft, file);
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'EEXIST') throw error; // Another worker was faster.
  } finally {
    rmSync(place, { recursive: true, force: true });
  }
  return file;
};

/** Writes the public keys of this log's heads to `keys.txt`, for auditors. If several processes write at once, no reader sees half a file. */
export const writeKeys = (folder: string, keys: readonly HeadKey[]): void => {
  mkdirSync(folder, { recursive: true, mode: 0o755 });
  const place = mkdtempSync(join(folder, DRAFT));
  writeFileSync(join(place, 'keys.txt'), keys.map(({ vkey }) => `${vkey}\n`).join(''), { mode: 0o644 });
  renameSync(join(place, 'keys.txt'), join(folder, 'keys.txt'));
  rmSync(place, { recursive: true, force: true });
};

/** Names in a folder, in order, without those that begin with a dot. Another process may remove a draft before it can be read. */
const namesIn = (folder: string): string[] =>
  readdirSync(folder)
    .filter((name) => !name.startsWith('.'))
    .sort();

/** All head files in a folder, oldest first. Empty if the folder does not exist. */
export const headFiles = (folder: string): string[] => {
  if (!statSync(folder, { throwIfNoEntry: false })?.isDirectory()) return [];
  return namesIn(folder).flatMap((name) => {
    const place = join(folder, name);
    return name.endsWith(EXTENSION) ? [place] : headFiles(place);
  });
};

/**
 * All head files in a folder, oldest day first. One day's folder is listed at a time, since a year has half a million head files. Files whose names
 * tell a size up to `after` are left out.
 */
export const headFilesAfter = function* (folder: string, after: number): Generator<string, void, void> {
  if (!existsSync(folder)) return;
  for (const day of namesIn(folder)) {
    const files = day.endsWith(EXTENSION) ? [join(folder, day)] : headFiles(join(folder, day));
    for (const file of files) if (after === 0 || !(Number(basename(file, EXTENSION)) <= after)) yield file;
  }
};

/** The newest head file. Looks into the newest day's folder first, since a year has half a million head files. */
export const newestHeadFile = (folder: string): string | null => {
  const days = existsSync(folder) ? namesIn(folder).reverse() : [];
  for (const day of days) {
    const [newest] = headFiles(join(folder, day)).reverse();
    if (newest) return newest;
  }
  return null;
};

export const readHeadFile = (file: string): string => readFileSync(file, 'utf8');
