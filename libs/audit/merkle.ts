/**
 * The Merkle tree of RFC 9162, 2.1, stored in tiles: hashes of leaves and nodes, the root of a tree of any size, and the two kinds of proof.
 *
 * A tile holds up to 256 hashes of one level. A hash on level L covers 256^L leaves.
 */
import { hash } from 'node:crypto';
import type { Recorded } from '#eventstore';
import { canonicalJson } from '#kernel';
import { shownEvent } from '#payments';

export const TILE_HASHES = 256;
const TILE_HEIGHT = 8;
export const HASH_BYTES = 32;

const sha256 = (bytes: Uint8Array): Buffer => hash('sha256', bytes, 'buffer');

export const leafHash = (bytes: Uint8Array): Buffer => {
  const prefixed = Buffer.allocUnsafe(bytes.length + 1);
  prefixed[0] = 0;
  prefixed.set(bytes, 1);
  return sha256(prefixed);
};

export const nodeHash = (left: Uint8Array, right: Uint8Array): Buffer => {
  const both = Buffer.allocUnsafe(1 + 2 * HASH_BYTES);
  both[0] = 1;
  both.set(left, 1);
  both.set(right, 1 + HASH_BYTES);
  return sha256(both);
};

/** Root of the empty tree. */
export const EMPTY_ROOT = sha256(Buffer.alloc(0));

/** The sealed content of an event: all fields that a reader of the log sees. The time at which the store stored the event is not sealed. */
export const leafOf = (event: Recorded) => {
  const { position, stream, revision, type, id, v, data, meta } = shownEvent(event);
  return { position, stream, revision: Number(revision), type, id, version: v, data, metadata: meta };
};

/** {@link leafHash} of the event's canonical text, without a copy of its bytes. */
export const eventHash = (event: Recorded): Buffer => hash('sha256', `\0${canonicalJson(leafOf(event))}`, 'buffer');

/** Root over adjacent hashes. Their number must be a power of two. */
const perfectRoot = (hashes: Uint8Array): Buffer => {
  let level = Buffer.from(hashes);
  while (level.length > HASH_BYTES) {
    const next = Buffer.allocUnsafe(level.length / 2);
    for (let at = 0; at < next.length; at += HASH_BYTES)
      next.set(nodeHash(level.subarray(2 * at, 2 * at + HASH_BYTES), level.subarray(2 * at + HASH_BYTES, 2 * at + 2 * HASH_BYTES)), at);
    level = next;
  }
  return level;
};

/** Root of a full tile. It is a hash on the level above. */
export const tileRoot = (tile: Uint8Array): Buffer => {
  if (tile.length !== TILE_HASHES * HASH_BYTES) throw new Error('only a full tile has a root');
  return perfectRoot(tile);
};

/** Returns the hashes of a tile as adjacent bytes. A partial tile must hold at least the hashes that the computation needs. */
export type FetchTile = (level: number, number: number) => Promise<Uint8Array>;

/** Caches all tiles in memory. */
export const rememberingTiles = (fetch: FetchTile): FetchTile => {
  const known = new Map<string, Promise<Uint8Array>>();
  return (level, number) => {
    const name = `${level}/${number}`;
    let tile = known.get(name);
    if (!tile) known.set(name, (tile = fetch(level, number)));
    return tile;
  };
};

/** Hash of the node over 2^height leaves. The first leaf is `index · 2^height`. */
const node = async (tiles: FetchTile, height: number, index: number): Promise<Buffer> => {
  const level = Math.floor(height / TILE_HEIGHT);
  const count = 2 ** (height % TILE_HEIGHT);
  const first = index * count;
  const tile = await tiles(level, Math.floor(first / TILE_HASHES));
  const from = (first % TILE_HASHES) * HASH_BYTES;
  const hashes = tile.subarray(from, from + count * HASH_BYTES);
  if (hashes.length !== count * HASH_BYTES) throw new Error(`tile ${level}/${Math.floor(first / TILE_HASHES)} is too short`);
  return perfectRoot(hashes);
};

/** Largest power of two below `count`. */
const splitOf = (count: number): number => {
  let split = 1;
  while (split * 2 < count) split *= 2;
  return split;
};

const isPowerOfTwo = (count: number): boolean => Number.isInteger(Math.log2(count));

/** Root over the leaves from `start` (inclusive) to `end` (exclusive). */
const rangeRoot = async (tiles: FetchTile, start: number, end: number): Promise<Buffer> => {
  const count = end - start;
  if (count === 0) return EMPTY_ROOT;
  if (isPowerOfTwo(count) && start % count === 0) return node(tiles, Math.log2(count), start / count);
  const split = start + splitOf(count);
  return nodeHash(await rangeRoot(tiles, start, split), await rangeRoot(tiles, split, end));
};

/** Root of the tree of the first `size` leaves. */
export const rootOf = (tiles: FetchTile, size: number): Promise<Buffer> => rangeRoot(tiles, 0, size);

/** Proof that leaf `index` is in the tree of `size` leaves (RFC 9162, 2.1.3.1). */
export const inclusionProof = async (tiles: FetchTile, index: number, size: number): Promise<Buffer[]> => {
  const path = async (start: number, end: number): Promise<Buffer[]> => {
    if (end - start === 1) return [];
    const split = start + splitOf(end - start);
    return index < split
      ? [...(await path(start, split)), await rangeRoot(tiles, split, end)]
      : [...(await path(split, end)), await rangeRoot(tiles, start, split)];
  };
  if (index < 0 || index >= size) throw new Error(`leaf ${index} is not in a tree of ${size}`);
  return path(0, size);
};

/** Proof that the tree of `size` leaves begins with the tree of its first `before` leaves (RFC 9162, 2.1.4.1). */
export const consistencyProof = async (tiles: FetchTile, before: number, size: number): Promise<Buffer[]> => {
  const part = async (start: number, end: number, whole: boolean): Promise<Buffer[]> => {
    if (before === end) return whole ? [] : [await rangeRoot(tiles, start, end)];
    const split = start + splitOf(end - start);
    return before <= split
      ? [...(await part(start, split, whole)), await rangeRoot(tiles, split, end)]
      : [...(await part(split, end, false)), await rangeRoot(tiles, start, split)];
  };
  if (before > size) throw new Error(`a tree of ${size} is no later one than of ${before}`);
  return before === 0 || before === size ? [] : part(0, size, true);
};

/** A tree that grows by appending leaves. Memory holds only the hashes that the root needs. */
export class GrowingTree {
  size = 0;
  /** Perfect subtrees from left to right, largest first. */
  private subtrees: { readonly height: number; readonly hash: Buffer }[] = [];

  /** The tree of the first `size` leaves, from stored tiles. */
  static async of(tiles: FetchTile, size: number): Promise<GrowingTree> {
    const tree = new GrowingTree();
    while (tree.size < size) {
      const height = Math.floor(Math.log2(size - tree.size));
      tree.subtrees.push({ height, hash: await node(tiles, height, tree.size / 2 ** height) });
      tree.size += 2 ** height;
    }
    return tree;
  }

  /** Roots of the perfect subtrees, largest first. With the size they are the whole tree. */
  hashes(): readonly Buffer[] {
    return this.subtrees.map(({ hash }) => hash);
  }

  add(leaf: Buffer): void {
    this.push(0, leaf);
  }

  /** Appends a full tile of leaves, of which only the root is given. The tree must have no partial tile. */
  addTile(root: Buffer): void {
    if (this.size % TILE_HASHES !== 0) throw new Error('a tile begins where a tile ends');
    this.push(TILE_HEIGHT, root);
  }

  private push(height: number, hash: Buffer): void {
    let added = { height, hash };
    for (let last = this.subtrees.at(-1); last?.height === added.height; last = this.subtrees.at(-1)) {
      this.subtrees.pop();
      added = { height: added.height + 1, hash: nodeHash(last.hash, added.hash) };
    }
    this.subtrees.push(added);
    this.size += 2 ** height;
  }

  /** Root of the tree with these further leaves. The tree itself does not change. */
  rootWith(leaves: readonly Buffer[]): Buffer {
    const longer = new GrowingTree();
    longer.subtrees = [...this.subtrees];
    longer.size = this.size;
    for (const leaf of leaves) longer.add(leaf);
    return longer.root();
  }

  root(): Buffer {
    if (this.size === 0) return EMPTY_ROOT;
    return this.subtrees.slice(0, -1).reduceRight<Buffer>((right, { hash: left }) => nodeHash(left, right), this.subtrees.at(-1)!.hash);
  }
}
