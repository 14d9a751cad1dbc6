/**
 * Compares the tree, its proofs and its heads with the published test vectors for RFC 6962 and RFC 9162. Compares the standalone verifier with both.
 */
import { describe, expect, test } from '@jest/globals';
import fc from 'fast-check';
import { createHash } from 'node:crypto';
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import type { Recorded } from '#eventstore';
import type { Json } from '#kernel';
import { newKeyRing } from '#platform';
import { ForgedHead, headFiles, headFilesAfter, headKeys, newestHeadFile, openHead, signHead } from './head.js';
import {
  consistencyProof,
  EMPTY_ROOT,
  eventHash,
  type FetchTile,
  GrowingTree,
  inclusionProof,
  leafHash,
  leafOf,
  rootOf,
  TILE_HASHES,
  tileRoot,
} from './merkle.js';

// verify.mjs has no types. These are the functions that this spec calls.
interface Verifier {
  leafHash(bytes: Buffer): Buffer;
  canonical(value: unknown): string;
  rootFromInclusion(leaf: Buffer, index: number, size: number, proof: readonly Buffer[]): Buffer;
  isConsistent(first: number, firstRoot: Buffer, second: number, secondRoot: Buffer, proof: readonly Buffer[]): boolean;
  openHead(note: string, keys: readonly string[]): { size: number; root: Buffer; at: string };
}
const verifier = (await import(new URL('../../apps/operator/verify.mjs', import.meta.url).href)) as Verifier;

const hex = (text: string) => Buffer.from(text, 'hex');
/** Leaves and roots from the tests of the reference implementation (certificate-transparency, merkletree). */
const LEAVES = ['', '00', '10', '2021', '3031', '40414243', '5051525354555657', '606162636465666768696a6b6c6d6e6f'].map(hex);
const ROOTS = [
  '6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d',
  'fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125',
  'aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77',
  'd37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7',
  '4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4',
  '76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef',
  'ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c',
  '5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328',
];
const INCLUSION: readonly [index: number, size: number, proof: string[]][] = [
  [0, 1, []],
  [0, 8, ['96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7', '5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e', '6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4']], // prettier-ignore
  [5, 8, ['bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b', 'ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0', 'd37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7']], // prettier-ignore
  [2, 3, ['fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125']],
  [1, 5, ['6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d', '5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e', 'bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b']], // prettier-ignore
];
const CONSISTENCY: readonly [first: number, second: number, proof: string[]][] = [
  [1, 1, []],
  [1, 8, ['96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7', '5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e', '6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4']], // prettier-ignore
  [6, 8, ['0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a', 'ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0', 'd37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7']], // prettier-ignore
  [2, 5, ['5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e', 'bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b']],
];

/** The tiles that the sealer stores for these leaves. */
const tilesOf = (hashes: readonly Buffer[]): FetchTile => {
  const levels: Buffer[][] = [[...hashes]];
  for (let level = 0; levels[level]!.length >= TILE_HASHES; level++) {
    const below = levels[level]!;
    levels.push(
      Array.from({ length: Math.floor(below.length / TILE_HASHES) }, (_, tile) =>
        tileRoot(Buffer.concat(below.slice(tile * TILE_HASHES, (tile + 1) * TILE_HASHES))),
      ),
    );
  }
  return async (level, number) => Buffer.concat(levels[level]?.slice(number * TILE_HASHES, (number + 1) * TILE_HASHES) ?? []);
};

describe('published vectors', () => {
  const tiles = tilesOf(LEAVES.map(leafHash));
  test('roots, and the empty tree', async () => {
    expect(EMPTY_ROOT.toString('hex')).toBe(createHash('sha256').digest('hex'));
    const tree = new GrowingTree();
    for (const [index, leaf] of LEAVES.entries()) {
      tree.add(leafHash(leaf));
      expect(tree.root().toString('hex')).toBe(ROOTS[index]);
      expect((await rootOf(tiles, index + 1)).toString('hex')).toBe(ROOTS[index]);
      expect(verifier.leafHash(leaf).equals(leafHash(leaf))).toBe(true);
    }
  });
  test.each(INCLUSION)('inclusion of leaf %i in a tree of %i', async (index, size, expected) => {
    const proof = await inclusionProof(tiles, index, size);
    expect(proof.map((one) => one.toString('hex'))).toEqual(expected);
    expect(verifier.rootFromInclusion(leafHash(LEAVES[index]!), index, size, proof).toString('hex')).toBe(ROOTS[size - 1]);
  });
  test.each(CONSISTENCY)('consistency of %i with %i', async (first, second, expected) => {
    const proof = await consistencyProof(tiles, first, second);
    expect(proof.map((one) => one.toString('hex'))).toEqual(expected);
    expect(verifier.isConsistent(first, hex(ROOTS[first - 1]!), second, hex(ROOTS[second - 1]!), proof)).toBe(true);
  });
});

describe('trees of any size, over tiles', () => {
  const MOST = 70_000;
  const hashes = Array.from({ length: MOST }, (_, index) => leafHash(Buffer.from(String(index))));
  const tiles = tilesOf(hashes);
  const rootBy = (size: number) => {
    const tree = new GrowingTree();
    for (const one of hashes.slice(0, size)) tree.add(one);
    return tree.root();
  };
  const SIZE = fc.oneof(fc.integer({ min: 1, max: 1_200 }), fc.constantFrom(255, 256, 257, 65_535, 65_536, 65_537, MOST));
  test('a tree that begins with stored tiles grows like one that had all leaves', async () => {
    await fc.assert(
      fc.asyncProperty(SIZE, fc.nat(600), async (from, more) => {
        const [begin, end] = [Math.max(0, from - more), from];
        const tree = await GrowingTree.of(tiles, begin);
        for (const one of hashes.slice(begin, end)) tree.add(one);
        expect(tree.size).toBe(end);
        expect(tree.root().equals(rootBy(end))).toBe(true);
      }),
      { numRuns: 20 },
    );
  });
  test('the verifier accepts each proof, and none with a bit flipped, a hash missing or one too many', async () => {
    await fc.assert(
      fc.asyncProperty(SIZE, fc.nat(MOST), fc.nat(MOST), fc.nat(1_000), async (size, at, before, bit) => {
        const index = at % size;
        const root = rootBy(size);
        const proof = await inclusionProof(tiles, index, size);
        expect(verifier.rootFromInclusion(hashes[index]!, index, size, proof).equals(root)).toBe(true);
        const first = 1 + (before % size);
        const firstRoot = rootBy(first);
        const appended = await consistencyProof(tiles, first, size);
        expect(verifier.isConsistent(first, firstRoot, size, root, appended)).toBe(true);
        const flipped = (bytes: Buffer) => Buffer.from(bytes.map((byte, place) => (place === bit % 32 ? byte ^ (1 << (bit % 8)) : byte)));
        expect(verifier.isConsistent(first, flipped(firstRoot), size, root, appended)).toBe(false);
        const wrong = (given: Buffer[]) => {
          try {
            return verifier.rootFromInclusion(hashes[index]!, index, size, given).equals(root);
          } catch {
            return false;
          }
        };
        expect(wrong([...proof, root])).toBe(false);
        if (proof.length > 0) {
          expect(wrong(proof.slice(1))).toBe(false);
          expect(wrong(proof.map((one, place) => (place === bit % proof.length ? flipped(one) : one)))).toBe(false);
        }
        if (appended.length > 0) expect(verifier.isConsistent(first, firstRoot, size, root, appended.slice(1))).toBe(false);
      }),
      { numRuns: 40 },
    );
  });
});

describe('the leaf of an intent', () => {
  const KEY = { keySpace: 'a', keyHash: 'b'.repeat(64), fingerprint: 'c'.repeat(64), kid: 'k1', operation: 'create' };
  const intent = (v: number, data: Json, type = 'PaymentInitiated') =>
    ({
      position: '1',
      stream: 'payment-1',
      revision: 0n,
      type,
      id: 'e',
      v,
      data,
      meta: { recordedAt: 't', actor: { type: 'partner', id: 'a' }, correlationId: 'c' },
    }) as unknown as Recorded;
  const shown = (event: Recorded) => verifier.canonical(leafOf(event));

  test('without a key it is made from the event as it is stored', () => {
    for (const event of [intent(1, { amountCents: 1 }), intent(2, { amountCents: 1, idempotency: null })])
      expect(shown(event)).toContain(verifier.canonical(event.data));
    expect(shown(intent(1, { idempotency: KEY }, 'PortalCreated'))).toContain(KEY.keyHash);
  });
  test.each(['PaymentInitiated', 'VoidRequested', 'RefundRequested'])('of the key it shows one hash: %s', (type) => {
    const event = intent(2, { amountCents: 1, idempotency: KEY }, type);
    const sha256 = createHash('sha256').update(verifier.canonical(KEY)).digest('hex');
    expect(leafOf(event).data).toEqual({ amountCents: 1, idempotency: sha256 });
    expect(verifier.leafHash(Buffer.from(shown(event)))).toEqual(eventHash(event));
  });
  test('any change of the key changes the leaf, also one to the hash that is shown', () => {
    const event = intent(2, { idempotency: KEY });
    const others = [null, leafOf(event).data, ...Object.keys(KEY).map((name) => ({ ...KEY, [name]: 'x' }))];
    const leaves = others.map((idempotency) => eventHash(intent(2, { idempotency })).toString('hex'));
    leaves.push(eventHash(intent(2, leafOf(event).data)).toString('hex'));
    expect(leaves).not.toContain(eventHash(event).toString('hex'));
    expect(new Set(leaves).size).toBe(leaves.length);
  });
});

describe('signed heads', () => {
  const keys = newKeyRing();
  const origin = 'payfold/log/01890000-0000-7000-8000-000000000001';
  const head = { origin, size: 8, root: hex(ROOTS[7]!), at: '2026-03-01T10:00:00.000Z', position: '00000000000000000008' };
  const note = signHead(head, keys);
  const vkeys = headKeys(origin, keys).map(({ vkey }) => vkey);

  test('are C2SP checkpoints that open again, here and in the verifier', () => {
    expect(note.split('\n').slice(0, 3)).toEqual([origin, '8', hex(ROOTS[7]!).toString('base64')]);
    expect(openHead(note, headKeys(origin, keys))).toEqual(head);
    expect(verifier.openHead(note, vkeys)).toMatchObject({ size: 8, at: head.at });
  });
  test.each([
    ['another size', note.replace('\n8\n', '\n9\n')],
    ['another root', note.replace(head.root.toString('base64'), hex(ROOTS[6]!).toString('base64'))],
    ['another time', note.replace('10:00', '11:00')],
    ['a signature cut off', note.replace(/— .*\n$/, '')],
    ['the signature of another', `${note.split('\n\n')[0]}\n\n${signHead(head, newKeyRing()).split('\n\n')[1]}`],
    ['nothing', ''],
  ])('with %s are forged', (_name, forged) => {
    expect(() => openHead(forged, headKeys(origin, keys))).toThrow(ForgedHead);
    expect(() => verifier.openHead(forged, vkeys)).toThrow();
  });
  test('the verifier’s canonical JSON is RFC 8785’s', () => {
    expect(verifier.canonical({ b: [1e21, -0, 'é\n'], a: { '10': 1, '9': null, A: true } })).toBe(
      '{"a":{"10":1,"9":null,"A":true},"b":[1e+21,0,"é\\n"]}',
    );
  });
});

test('head files are listed by day; drafts, which another process may remove at any time, are not looked into', () => {
  const folder = mkdtempSync(join(tmpdir(), 'payfold-heads-'));
  try {
    const files = ['2026-01-01/1.head', '2026-01-02/2.head', '2026-01-02/.draft-a/3.head', '.draft-b/4.head', 'keys.txt'];
    for (const file of files) {
      mkdirSync(dirname(join(folder, file)), { recursive: true });
      writeFileSync(join(folder, file), '');
    }
    const heads = files.slice(0, 2).map((file) => join(folder, file));
    expect([headFiles(folder), [...headFilesAfter(folder, 0)], newestHeadFile(folder)]).toEqual([heads, heads, heads[1]]);
  } finally {
    rmSync(folder, { recursive: true });
  }
});
