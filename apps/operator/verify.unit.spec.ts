/** The output of the standalone verifier for files that nobody has verified, and proofs that prove nothing. */
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { execFile } from 'node:child_process';
import { createHash, generateKeyPairSync, sign } from 'node:crypto';
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';

const VERIFIER = new URL('verify.mjs', import.meta.url).pathname;

let folder: string;
beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'payfold-verify-'));
});
afterAll(() => rmSync(folder, { recursive: true }));

/** The verifier's output, and true if it agreed. */
const run = (...values: string[]) =>
  promisify(execFile)(process.execPath, [VERIFIER, ...values]).then(
    ({ stdout }) => [true, stdout] as const,
    ({ stderr }: { stderr: string }) => [false, stderr] as const,
  );
const written = (name: string, value: unknown): string => {
  const file = join(folder, name);
  writeFileSync(file, typeof value === 'string' ? value : JSON.stringify(value));
  return file;
};

const sha256 = (...parts: (string | Buffer)[]) =>
  createHash('sha256')
    .update(Buffer.concat(parts.map((part) => Buffer.from(part))))
    .digest();
const { publicKey, privateKey } = generateKeyPairSync('ed25519');
const key = Buffer.concat([Buffer.from([1]), publicKey.export({ format: 'der', type: 'spki' }).subarray(-32)]);
const NAME = 'log.example';
const keyHash = sha256(`${NAME}\n`, key).subarray(0, 4);
const keys = [`${NAME}+${keyHash.toString('hex')}+${key.toString('base64')}`];
const signed = (text: string) =>
  `${text}\n\u2014 ${NAME} ${Buffer.concat([keyHash, sign(null, Buffer.from(text), privateKey)]).toString('base64')}\n`;

/** The proof of a log that holds one event. */
const proofOf = (position: string) => {
  const event = { id: 'e1', position };
  const root = sha256(Buffer.from([0]), JSON.stringify(event)).toString('base64');
  const head = signed(`${NAME}\n1\n${root}\nat 2026-01-01T00:00:00.000Z\nposition 1\n`);
  return { head, keys, events: [{ leaf: 0, event, proof: [] as string[] }] };
};

const HOSTILE = 'a\u001b[2J\n\u009b1mb\u200e\u200f\u061c\u202e\u2066\u2069\u200b\ufeff\u{e0001}';
const SHOWN = 'a\\u001b[2J\\u000a\\u009b1mb\\u200e\\u200f\\u061c\\u202e\\u2066\\u2069\\u200b\\ufeff\\udb40\\udc01';
/** Anything but the line feed at the end. */
const RAW = /[\p{Cc}\p{Cf}](?!$)/u;

test('a proof holds at least one event, and each event once', async () => {
  const proof = proofOf('1');
  expect(await run('prove', written('proof.json', proof))).toEqual([true, expect.stringContaining('1 events are in the log of 1 events')]);
  expect(await run('prove', written('none.json', { ...proof, events: [] }))).toEqual([false, 'NOT OK: the proof has no events\n']);
  expect(await run('prove', written('missing.json', { ...proof, events: undefined }))).toEqual([false, 'NOT OK: the proof has no events\n']);
  const twice = { ...proof, events: [...proof.events, ...proof.events] };
  expect(await run('prove', written('twice.json', twice))).toEqual([false, 'NOT OK: the event at position 1 stands twice in the proof\n']);
});

test('values of a proof, and bad JSON, are printed without control and format characters', async () => {
  const { events, ...proof } = proofOf('1');
  const changed = events.map((one) => ({ ...one, event: { ...one.event, position: HOSTILE } }));
  expect(await run('prove', written('changed.json', { ...proof, events: changed }))).toEqual([
    false,
    `NOT OK: the event at position ${SHOWN} is not in the log of 2026-01-01T00:00:00.000Z\n`,
  ]);
  const [ok, said] = await run('prove', written('bad.json', '\u202e\u001b]0;x\u0007'));
  expect([ok, said]).toEqual([false, expect.stringContaining('\\u202e')]);
  expect(said).not.toMatch(RAW);
});

test('names of files in a pack are printed without them', async () => {
  const pack = join(folder, 'pack');
  mkdirSync(pack);
  const manifest = JSON.stringify({ keys, files: [{ file: HOSTILE }], events: { first: 0 } });
  writeFileSync(join(pack, 'manifest.json'), manifest);
  writeFileSync(join(pack, 'manifest.note'), signed(`payfold evidence pack\n${NAME}\nmanifest.json sha256 ${sha256(manifest).toString('hex')}\n`));
  const [ok, said] = await run('pack', pack);
  expect([ok, said]).toEqual([false, expect.stringMatching(/^NOT OK: the manifest names .*no file of a pack has a path/)]);
  expect(said).not.toMatch(RAW);
});
