#!/usr/bin/env node
/**
 * Checks Payfold's proofs without Payfold's code. It is plain Node with nothing to install, and short enough to read.
 *
 *   node verify.mjs prove FILE          checks the file of `payfold audit prove`: each event is in the log of the signed head
 *   node verify.mjs consistency FILE    checks the file of `payfold audit consistency --out`: the later log begins with the earlier one
 *   node verify.mjs head FILE           checks the signature of a signed head
 *   node verify.mjs pack FOLDER         checks an evidence pack: the files are those of its manifest, the books add up, the events are in the log
 *
 * --key VKEY (or a file with several): the keys that you trust, because you noted them earlier. Without this option the keys in the file itself are
 * used. Then the check proves only that the file agrees with itself.
 *
 * Hashes are those of RFC 9162. Heads are C2SP signed notes with Ed25519.
 */
import { createHash, createPublicKey, verify as verifySignature } from 'node:crypto';
import { createReadStream, existsSync, readFileSync, realpathSync } from 'node:fs';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { pathToFileURL } from 'node:url';

const sha256 = (...parts) => createHash('sha256').update(Buffer.concat(parts)).digest();
export const leafHash = (bytes) => sha256(Buffer.from([0]), bytes);
export const nodeHash = (left, right) => sha256(Buffer.from([1]), left, right);

/** RFC 8785: keys sorted, no white space. */
export const canonical = (value) => {
  if (value === null || typeof value !== 'object') return JSON.stringify(value);
  if (Array.isArray(value)) return `[${value.map(canonical).join(',')}]`;
  const keys = Object.keys(value).sort((a, b) => (a < b ? -1 : 1));
  return `{${keys.map((key) => `${JSON.stringify(key)}:${canonical(value[key])}`).join(',')}}`;
};

/** RFC 9162, 2.1.3.2: the root that follows from an inclusion proof. */
export const rootFromInclusion = (leaf, index, size, proof) => {
  if (index >= size) throw new Error('the leaf lies beyond the tree');
  let [fn, sn, hash] = [index, size - 1, leaf];
  for (const sibling of proof) {
    if (sn === 0) throw new Error('the proof is too long');
    if (fn % 2 === 1 || fn === sn) {
      hash = nodeHash(sibling, hash);
      while (fn % 2 === 0 && fn !== 0) [fn, sn] = [Math.floor(fn / 2), Math.floor(sn / 2)];
    } else hash = nodeHash(hash, sibling);
    [fn, sn] = [Math.floor(fn / 2), Math.floor(sn / 2)];
  }
  if (sn !== 0) throw new Error('the proof is too short');
  return hash;
};

/** RFC 9162, 2.1.4.2: true if the tree of `second` leaves begins with the tree of `first` leaves. */
export const isConsistent = (first, firstRoot, second, secondRoot, given) => {
  if (first === second) return given.length === 0 && firstRoot.equals(secondRoot);
  if (first === 0) return given.length === 0;
  const proof = Number.isInteger(Math.log2(first)) ? [firstRoot, ...given] : [...given];
  let [fn, sn] = [first - 1, second - 1];
  while (fn % 2 === 1) [fn, sn] = [Math.floor(fn / 2), Math.floor(sn / 2)];
  if (proof.length === 0) return false;
  let [fr, sr] = [proof[0], proof[0]];
  for (const hash of proof.slice(1)) {
    if (sn === 0) return false;
    if (fn % 2 === 1 || fn === sn) {
      [fr, sr] = [nodeHash(hash, fr), nodeHash(hash, sr)];
      while (fn % 2 === 0 && fn !== 0) [fn, sn] = [Math.floor(fn / 2), Math.floor(sn / 2)];
    } else sr = nodeHash(sr, hash);
    [fn, sn] = [Math.floor(fn / 2), Math.floor(sn / 2)];
  }
  return sn === 0 && fr.equals(firstRoot) && sr.equals(secondRoot);
};

/** Opens a signed head: `{origin, size, root, at}`. Throws if no trusted key signed it. */
export const openHead = (note, vkeys) => {
  const [, text, signatures] = /^([^]*?\n)\n((?:— [^\n]+\n)+)$/.exec(note) ?? [];
  if (!text) throw new Error('this is no signed head');
  const [origin, size, root, at = ''] = text.split('\n');
  for (const vkey of vkeys) {
    const [, name, hash, key] = /^(.+?)\+([0-9a-f]{8})\+(.+)$/.exec(vkey.trim()) ?? [];
    const bytes = Buffer.from(key ?? '', 'base64');
    if (
      bytes[0] !== 1 ||
      bytes.length !== 33 ||
      sha256(Buffer.from(`${name}\n`), bytes)
        .subarray(0, 4)
        .toString('hex') !== hash
    )
      continue;
    const publicKey = createPublicKey({
      key: Buffer.concat([Buffer.from('302a300506032b6570032100', 'hex'), bytes.subarray(1)]),
      format: 'der',
      type: 'spki',
    });
    for (const [, signer, value] of signatures.matchAll(/— (\S+) (\S+)\n/g)) {
      const signed = Buffer.from(value, 'base64');
      if (signer !== name || origin !== name || signed.subarray(0, 4).toString('hex') !== hash) continue;
      if (verifySignature(null, Buffer.from(text), publicKey, signed.subarray(4)))
        return { origin, size: Number(size), root: Buffer.from(root, 'base64'), at: at.replace(/^at /, '') };
    }
  }
  throw new Error('no trusted key signed this head');
};

const hashes = (texts) => texts.map((text) => Buffer.from(text, 'base64'));

/** Checks events with their proofs. Returns the head and the number of events. */
export const checkInclusion = ({ head: note, keys, events }, trusted = keys) => {
  const head = openHead(note, trusted);
  for (const one of events) checkEvent(one, head);
  return { head, count: events.length };
};

const checkEvent = ({ leaf, event, proof }, head) => {
  const root = rootFromInclusion(leafHash(Buffer.from(canonical(event), 'utf8')), leaf, head.size, hashes(proof));
  if (!root.equals(head.root)) throw new Error(`the event at position ${event.position} is not in the log of ${head.at}`);
};

export const checkConsistency = ({ first, second, keys, proof }, trusted = keys) => {
  const [a, b] = [openHead(first, trusted), openHead(second, trusted)];
  if (a.origin !== b.origin || !isConsistent(a.size, a.root, b.size, b.root, hashes(proof)))
    throw new Error(`the log of ${b.size} events does not begin with the ${a.size} of ${a.at}`);
  return { first: a, second: b };
};

const lines = (file) => createInterface({ input: createReadStream(file, 'utf8'), crlfDelay: Infinity });

/** Checks a whole pack. Throws at the first fault. */
export const checkPack = async (folder, given = null) => {
  const said = [];
  const manifest = JSON.parse(readFileSync(join(folder, 'manifest.json'), 'utf8'));
  for (const { file, bytes, sha256: expected } of manifest.files) {
    const hash = createHash('sha256');
    let read = 0;
    for await (const piece of createReadStream(join(folder, file))) {
      hash.update(piece);
      read += piece.length;
    }
    if (read !== bytes || hash.digest('hex') !== expected) throw new Error(`${file} is not the file that the manifest names`);
  }
  said.push(`${manifest.files.length} files are those of the manifest`);
  const trusted = given ?? manifest.keys;
  const head = openHead(readFileSync(join(folder, 'head.txt'), 'utf8'), trusted);
  said.push(`the head of ${head.size} events was signed at ${head.at}`);
  let events = 0;
  for await (const line of lines(join(folder, 'events.ndjson'))) {
    checkEvent(JSON.parse(line), head);
    events += 1;
  }
  said.push(`${events} events are in the log of that head`);
  // Add up the postings of the journal, which is in hledger's format. The sum of each account must be its movement in the trial balance.
  const sums = new Map();
  let [entry, left] = ['', 0n];
  for await (const line of lines(join(folder, 'journal.hledger'))) {
    const posting = /^ {4}(\S+) {2}USD (-?)(\d+)\.(\d\d)$/.exec(line);
    if (/^\d{4}-/.test(line)) entry = line;
    if (line === '' && left !== 0n) throw new Error(`${entry} does not balance`);
    if (!posting) continue;
    const cents = BigInt(posting[3] + posting[4]) * (posting[2] ? -1n : 1n);
    sums.set(posting[1], (sums.get(posting[1]) ?? 0n) + cents);
    left += cents;
  }
  for (const row of JSON.parse(readFileSync(join(folder, 'trial-balance.json'), 'utf8')).accounts) {
    const moved = BigInt(row.closingCents) - BigInt(row.openingCents);
    if (moved !== (sums.get(row.account) ?? 0n))
      throw new Error(`${row.account} moved by ${moved} cents, its journal by ${sums.get(row.account) ?? 0n}`);
    sums.delete(row.account);
  }
  if (sums.size > 0) throw new Error(`${[...sums.keys()][0]} is not in the trial balance`);
  said.push('the journal balances and gives the trial balance');
  return said;
};

const USE = 'use: node verify.mjs prove|consistency|head|pack PATH [--key VKEY]';
const main = async ([what, path, ...options]) => {
  const [flag, key, more] = options;
  if (options.length > 0 && (flag !== '--key' || !key || more)) throw new Error(USE);
  const given = key === undefined ? null : (existsSync(key) ? readFileSync(key, 'utf8') : key).split('\n').filter(Boolean);
  const json = () => JSON.parse(readFileSync(path, 'utf8'));
  switch (path && what) {
    case 'prove': {
      const { head, count } = checkInclusion(json(), given ?? json().keys);
      return [`${count} events are in the log of ${head.size} events that was signed at ${head.at}`];
    }
    case 'consistency': {
      const { first, second } = checkConsistency(json(), given ?? json().keys);
      return [`the log of ${second.size} events begins with the ${first.size} that were signed at ${first.at}`];
    }
    case 'head':
      if (!given) throw new Error('a head needs the key that you trust: --key');
      return [`${openHead(readFileSync(path, 'utf8'), given).size} events, signed`];
    case 'pack':
      return checkPack(path, given);
    default:
      throw new Error(USE);
  }
};

if (process.argv[1] && import.meta.url === pathToFileURL(realpathSync(process.argv[1])).href)
  main(process.argv.slice(2)).then(
    (said) => said.forEach((line) => console.log(`ok: ${line}`)),
    (error) => {
      console.error(`NOT OK: ${error.message}`);
      process.exitCode = 1;
    },
  );
