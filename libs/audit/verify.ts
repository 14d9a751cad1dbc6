/**
 * Verification of the sealed log. Each event is read again, and its hash is compared with the stored tiles. Each tile is compared with the tile above
 * it, and each signed head with the tree of that size.
 *
 * The result names the first event that was changed, removed, inserted or swapped, and each tile or head that differs.
 */
import { type EventStore, LogGap, NotInTheLog, type Position, type Recorded } from '#eventstore';
import type { Check } from '#ledger';
import type { KeyRing, Queryable } from '#platform';
import { headFiles, headKeys, openHead, readHeadFile } from './head.js';
import { eventHash, GrowingTree, HASH_BYTES, TILE_HASHES, tileRoot } from './merkle.js';
import { logState } from './seal.js';

export interface LogVerified {
  readonly position: string | null;
  readonly size: number;
  /** Root over the present events, base64. */
  readonly root: string;
  /** Number of payment streams that begin in the log. */
  readonly payments: number;
  readonly checks: readonly Check[];
}

export interface VerifyPorts {
  readonly store: EventStore;
  readonly db: Queryable;
  readonly keys: KeyRing;
  readonly headFolder: string;
}

/** At most this many findings are named. Further ones are counted. */
const NAMED_FINDINGS = 5;
/** Number of events and sealed leaves that are compared, from the first difference on, to find its cause. */
const NEIGHBOURS = 64;
const TILES_PER_READ = 64;

class Findings {
  private readonly named: string[] = [];
  private count = 0;
  add(text: string): void {
    if (this.count++ < NAMED_FINDINGS) this.named.push(text);
  }
  check(name: string, good: string): Check {
    const more = this.count - this.named.length;
    return { name, ok: this.count === 0, detail: this.count === 0 ? good : this.named.join('; ') + (more > 0 ? `; and ${more} more` : '') };
  }
  get any(): boolean {
    return this.count > 0;
  }
}

interface SignedHead {
  readonly where: string;
  readonly size: number;
  readonly root: Buffer;
  readonly at: string;
}

/** Verifies the whole sealed log. Memory grows only with the number of signed heads. */
export const verifyLog = async (ports: VerifyPorts, onProgress?: (events: number) => void): Promise<LogVerified> => {
  const { store, db } = ports;
  const [events, tiles, heads] = [new Findings(), new Findings(), new Findings()];
  // Read the heads before the size. The sealer may sign larger heads during the verification.
  const signed = await readHeads(ports, (await logState(db)).origin, heads);
  const { size, position } = await logState(db);
  const tree = new GrowingTree();
  const roots = new StoredTiles(db, tiles);
  let nextHead = 0;
  let agreed: SignedHead | null = null;
  // Leaves of the present tile. They are added to the tree when the tile is full, or when the log ends.
  let batch: { event: Recorded; hash: Buffer }[] = [];
  let count = 0;
  const rootNow = () => tree.rootWith(batch.map(({ hash }) => hash));
  const checkHeads = () => {
    for (let head = signed[nextHead]; head && head.size <= count; head = signed[++nextHead]) {
      if (head.size === count && rootNow().equals(head.root)) agreed = head;
      else if (head.size === count)
        heads.add(
          `${head.where} was signed at ${head.at} over other events than the first ${head.size} of now; ${agreed ? `up to ${agreed.size} they are those of ${agreed.at}` : 'no earlier head agrees'}`,
        );
    }
  };
  checkHeads();

  const flush = async () => {
    if (batch.length === 0) return;
    const root = batch.length === TILE_HASHES ? tileRoot(Buffer.concat(batch.map(({ hash }) => hash))) : null;
    await roots.compare(batch, root, count - batch.length, (event, index, guilty) =>
      guilty === null ? nameDifference(ports, event, index, size).then((text) => events.add(text)) : Promise.resolve(tiles.add(guilty)),
    );
    if (root) tree.addTile(root);
    else for (const { hash } of batch) tree.add(hash);
    batch = [];
  };
  let last = '';
  let payments = 0;
  try {
    if (size > 0)
      for await (const read of store.readAll(null, { until: position as Position })) {
        for (const event of read) {
          if (count >= size) break;
          const hash = eventHash(event);
          batch.push({ event, hash });
          count += 1;
          last = event.position;
          if (event.revision === 0n && event.stream.startsWith('payment-')) payments += 1;
          checkHeads();
          if (batch.length === TILE_HASHES) await flush();
        }
        onProgress?.(count);
      }
  } catch (error) {
    if (error instanceof LogGap) events.add(`the event at position ${error.missing} was removed (of ${size} that are sealed)`);
    else if (error instanceof NotInTheLog) events.add(error.message);
    else throw error;
  }
  await flush();
  await roots.end(tree.size, size);
  if (tree.size < size && !events.any)
    events.add(`the log ends after ${tree.size} events (position ${last || 'none'}); ${size} were sealed, up to position ${position}`);
  // The remaining heads cover more events than were read. If events and tiles were removed from the end, only these heads show it.
  for (const head of signed.slice(nextHead))
    heads.add(
      `${head.where} was signed at ${head.at} over ${head.size} events; ${count < size ? `the log shows only ${count} now` : `only ${size} are sealed now`}`,
    );
  return {
    position: position === '' ? null : position,
    size,
    root: tree.root().toString('base64'),
    payments,
    checks: [
      events.check('events', `${tree.size} events are those that were sealed`),
      tiles.check('tiles', 'the tree is whole'),
      heads.check('heads', `${nextHead} signed heads agree`),
    ],
  };
};

/** All signed heads from the files and the database, smallest first. A forged head is a finding. */
const readHeads = async ({ db, keys, headFolder }: VerifyPorts, origin: string, findings: Findings): Promise<SignedHead[]> => {
  const { rows } = await db.query<{ size: string; note: string }>('select size, note from log_head order by size');
  const notes = [
    ...rows.map(({ size, note }) => ({ where: `the head of ${size} in the database`, note })),
    ...headFiles(headFolder).map((file) => ({ where: file, note: readHeadFile(file) })),
  ];
  const ours = headKeys(origin, keys);
  return notes
    .flatMap(({ where, note }): SignedHead[] => {
      try {
        const { size, root, at } = openHead(note, ours);
        return [{ where, size, root, at }];
      } catch (error) {
        findings.add(`${where} is forged: ${(error as Error).message}`);
        return [];
      }
    })
    .sort((a, b) => a.size - b.size);
};

/** Names the changed part if an event differs from its sealed leaf. null: the event was changed. A text: the tile was, and the text is the finding. */
type Guilty = string | null;

/** Compares computed hashes with the stored tiles, from left to right and level by level. */
class StoredTiles {
  private readonly ahead = new Map<number, Buffer>();
  /** For each level above the leaves: the hashes of its last, partial tile. */
  private readonly above: Buffer[][] = [];

  constructor(
    private readonly db: Queryable,
    private readonly findings: Findings,
  ) {}

  /** Compares leaves with the stored ones. `leaves` are at most one tile. `first` is the number of the first leaf. */
  async compare(
    leaves: readonly { readonly event: Recorded; readonly hash: Buffer }[],
    /** Root of these leaves, if they fill a tile. */
    root: Buffer | null,
    first: number,
    onDifference: (event: Recorded, index: number, guilty: Guilty) => Promise<void>,
  ): Promise<void> {
    const number = Math.floor(first / TILE_HASHES);
    const stored = await this.leafTile(number);
    if (!stored) return this.findings.add(`tile 0/${number} is missing`);
    const computed = Buffer.concat(leaves.map(({ hash }) => hash));
    const same = computed.equals(stored.subarray(0, computed.length));
    if (root) await this.addRoot(1, number, root, same);
    if (same) return;
    const parent = root && (await this.storedNode(1, number));
    // If the tile above agrees with the events, then the tile of leaves was changed, not an event.
    const tileIsGuilty = root !== null && parent?.equals(root) === true;
    for (const [index, { event, hash }] of leaves.entries()) {
      if (hash.equals(stored.subarray(index * HASH_BYTES, (index + 1) * HASH_BYTES))) continue;
      return onDifference(
        event,
        first + index,
        tileIsGuilty ? `tile 0/${number} was changed at ${event.position}; the tree above it bears the event out` : null,
      );
    }
  }

  /**
   * Checks that `level` holds the root of a full tile of the level below. If `genuine` is false, the root comes from events that differ from their
   * tile. Then no difference is reported here.
   */
  private async addRoot(level: number, index: number, root: Buffer, genuine: boolean): Promise<void> {
    const stored = await this.storedNode(level, index);
    if (genuine && !stored?.equals(root))
      this.findings.add(`tile ${level}/${Math.floor(index / TILE_HASHES)} was changed: it does not hold the root of tile ${level - 1}/${index}`);
    const nodes = (this.above[level] ??= []);
    nodes.push(stored ?? root);
    if (nodes.length < TILE_HASHES) return;
    this.above[level] = [];
    await this.addRoot(level + 1, Math.floor(index / TILE_HASHES), tileRoot(Buffer.concat(nodes)), true);
  }

  /**
   * Checks that the last tile of each level ends where the tree ends. The sealer may have added events during the verification. One statement reads
   * the present size and the tiles, so both are of the same moment.
   */
  async end(read: number, size: number): Promise<void> {
    if (read !== size) return;
    const { rows } = await this.db.query<{ level: number; number: string; held: number; sealed: string }>(
      `select level, number, length(hashes) / ${HASH_BYTES} as held, size as sealed from log_tile, log_state order by level, number desc`,
    );
    const last = new Map<number, { number: number; held: number }>();
    for (const { level, number, held } of rows) if (!last.has(level)) last.set(level, { number: Number(number), held });
    for (const [level, { number, held }] of last) {
      const nodes = Math.floor(Number(rows[0]!.sealed) / TILE_HASHES ** level);
      if (number * TILE_HASHES + held !== nodes) this.findings.add(`level ${level} holds ${number * TILE_HASHES + held} hashes instead of ${nodes}`);
    }
  }

  private async leafTile(number: number): Promise<Buffer | undefined> {
    if (!this.ahead.has(number)) {
      this.ahead.clear();
      const { rows } = await this.db.query<{ number: string; hashes: Buffer }>(
        'select number, hashes from log_tile where level = 0 and number >= $1 and number < $2',
        [number, number + TILES_PER_READ],
      );
      for (const row of rows) this.ahead.set(Number(row.number), row.hashes);
    }
    return this.ahead.get(number);
  }

  private async storedNode(level: number, index: number): Promise<Buffer | null> {
    const { rows } = await this.db.query<{ hash: Buffer }>(
      `select substr(hashes, $3::int, ${HASH_BYTES}) as hash from log_tile where level = $1 and number = $2`,
      [level, Math.floor(index / TILE_HASHES), (index % TILE_HASHES) * HASH_BYTES + 1],
    );
    return rows[0]?.hash ?? null;
  }
}

/** Describes the first event that differs. Compares the event with the leaf at its number and with the leaves after it. */
const nameDifference = async ({ store, db }: VerifyPorts, event: Recorded, index: number, size: number): Promise<string> => {
  const name = `the event at position ${event.position} (${event.type} ${event.id} in ${event.stream})`;
  const sealed = await sealedHashes(db, index, Math.min(size, index + NEIGHBOURS));
  if (!/^\d+$/.test(event.position)) {
    // These positions do not count events. They stay the same if another event is inserted or removed.
    const removed = sealed.findIndex((hash) => hash.equals(eventHash(event)));
    if (removed > 0) return `${removed === 1 ? 'the event' : `${removed} events`} sealed before ${name} ${removed === 1 ? 'was' : 'were'} removed`;
    for await (const batch of store.readAll(event.position, { max: NEIGHBOURS }))
      if (batch.some((one) => sealed[0]!.equals(eventHash(one)))) return `${name} was inserted`;
    return `${name} was changed`;
  }
  const places = sealed.map((_, offset) => String(BigInt(event.position) + BigInt(offset)).padStart(event.position.length, '0') as Position);
  const at = (one: Recorded, offset: number) => eventHash({ ...one, position: places[offset]! });
  const around: Recorded[] = [];
  const before = BigInt(event.position) - 1n;
  const after = before === 0n ? null : (String(before).padStart(event.position.length, '0') as Position);
  // If the log has another gap after this event, compare only the events before that gap.
  try {
    for await (const batch of store.readAll(after, { max: places.length })) around.push(...batch);
  } catch {
    around.push(...(around.length === 0 ? [event] : []));
  }
  const other = around.findIndex((one, offset) => offset > 0 && sealed[0]!.equals(at(one, 0)));
  if (other > 0 && at(event, other).equals(sealed[other]!)) return `${name} was swapped with the one at position ${places[other]}`;
  if (other > 0) return `${name} was inserted: the one that was sealed there now lies at position ${places[other]}`;
  const moved = sealed.findIndex((hash, offset) => offset > 0 && hash.equals(at(event, offset)));
  if (moved > 0) return `the event that was sealed at position ${event.position} was removed: ${name} was sealed at position ${places[moved]}`;
  return `${name} was changed`;
};

const sealedHashes = async (db: Queryable, from: number, to: number): Promise<Buffer[]> => {
  const { rows } = await db.query<{ number: string; hashes: Buffer }>(
    'select number, hashes from log_tile where level = 0 and number between $1 and $2 order by number',
    [Math.floor(from / TILE_HASHES), Math.floor(Math.max(from, to - 1) / TILE_HASHES)],
  );
  const bytes = Buffer.concat(rows.map(({ hashes }) => hashes));
  const start = from - Math.floor(from / TILE_HASHES) * TILE_HASHES;
  return Array.from({ length: to - from }, (_, index) => bytes.subarray((start + index) * HASH_BYTES, (start + index + 1) * HASH_BYTES));
};
