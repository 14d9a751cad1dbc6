/**
 * Verification of the sealed log. Each event is read again, and its hash is compared with the stored tiles. Each tile is compared with the tile above
 * it, and each signed head with the tree of that size.
 *
 * The result names the first event that was changed, removed, inserted or swapped, and each tile or head that differs.
 *
 * The size of the tree is fixed when a verification begins, and nothing beyond that size is compared. So the service may go on. A verification can
 * begin at a trusted size, and it can stop and go on after each part.
 */
import { type EventStore, LogGap, NotInTheLog, type Position, readAhead, type Recorded } from '#eventstore';
import type { Check } from '#ledger';
import { paymentIdOf } from '#payments';
import { everyRow, type KeyRing, type Queryable } from '#platform';
import { type Head, headFilesAfter, headKeys, openHead, readHeadFile } from './head.js';
import { eventHash, GrowingTree, HASH_BYTES, rememberingTiles, rootOf, TILE_HASHES, tileRoot } from './merkle.js';
import { logState, storedTiles } from './seal.js';

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
/** A tree with a node above this level would hold more events than a number can count. */
const MAX_LEVEL = 7;
/** Number of events of one part when the whole log is verified at once. */
const PART_EVENTS = 64 * TILE_HASHES;

/** The findings of one check. A plain object, because a verification that goes on later stores it as JSON. */
export interface Findings {
  readonly named: string[];
  count: number;
}
export const noFindings = (): Findings => ({ named: [], count: 0 });
export const find = (findings: Findings, text: string): void => {
  if (findings.count++ < NAMED_FINDINGS) findings.named.push(text);
};
const listed = ({ named, count }: Findings): string => named.join('; ') + (count > named.length ? `; and ${count - named.length} more` : '');
export const checkOf = (name: string, findings: Findings, good: string): Check => {
  const ok = findings.count === 0;
  return { name, ok, detail: ok ? good : listed(findings) };
};

/** A place in the sealed log: the number of events up to it, and the position of the last of them ('': none). */
export interface LogPlace {
  readonly size: number;
  readonly position: string;
}
export const LOG_START: LogPlace = { size: 0, position: '' };

/** The progress of a verification of the log, as plain JSON. */
export interface LogProgress {
  /** Exclusive: the compared part begins after this place. */
  readonly from: LogPlace;
  /** Inclusive: the compared part ends here. */
  readonly end: LogPlace;
  reached: LogPlace;
  /** True if there is nothing more to read. */
  over: boolean;
  /** Number of payment streams that begin between `from` and `reached`. */
  payments: number;
  /** Number of signed heads that were compared. */
  heads: number;
  /** The last head that agreed. */
  agreed: { readonly size: number; readonly at: string } | null;
  /** Events of another installation, which were skipped. Absent in a verification that an earlier release began. */
  foreign?: Findings;
  readonly found: { readonly events: Findings; readonly tiles: Findings; readonly heads: Findings };
}

export const logProgress = (from: LogPlace, end: LogPlace): LogProgress => ({
  from,
  end,
  reached: from,
  over: false,
  payments: 0,
  heads: 0,
  agreed: null,
  foreign: noFindings(),
  found: { events: noFindings(), tiles: noFindings(), heads: noFindings() },
});

export const logChecks = ({ from, reached, heads, foreign, found }: LogProgress): Check[] => [
  checkOf(
    'events',
    found.events,
    `${reached.size - from.size} events ${from.size > 0 ? `after the first ${from.size} ` : ''}are those that were sealed${
      foreign?.count ? `; skipped ${foreign.count} of another installation: ${listed(foreign)}` : ''
    }`,
  ),
  checkOf('tiles', found.tiles, 'the tree is whole'),
  checkOf('heads', found.heads, `${heads} signed heads agree`),
];

/** Thrown if a verification cannot begin at a head. */
export class UntrustedHead extends Error {}

/**
 * The head from which a verification may begin. Throws {@link UntrustedHead} if no key of this log signed it, if the log is shorter, or if the stored
 * tiles have another root at that size.
 */
export const trustedHead = async ({ db, keys }: Pick<VerifyPorts, 'db' | 'keys'>, note: string): Promise<Head> => {
  const { origin, size } = await logState(db);
  let head: Head;
  try {
    head = openHead(note, headKeys(origin, keys));
  } catch (error) {
    throw new UntrustedHead(`this head cannot be trusted: ${(error as Error).message}`);
  }
  if (head.size > size) throw new UntrustedHead(`this head was signed over ${head.size} events; only ${size} are sealed now`);
  const root = await rootOf(storedTiles(db), head.size).catch((error: unknown) => {
    throw new UntrustedHead(`the stored tiles do not hold the ${head.size} events of this head: ${(error as Error).message}`);
  });
  if (!root.equals(head.root)) throw new UntrustedHead(`the stored tiles are not those over which this head was signed at ${head.at}`);
  return head;
};

/** Verifies the whole sealed log. */
export const verifyLog = async (ports: VerifyPorts, onProgress?: (events: number) => void): Promise<LogVerified> => {
  const { size, position } = await logState(ports.db);
  const progress = logProgress(LOG_START, { size, position });
  const verification = new LogVerification(ports, progress);
  while (!progress.over) {
    await verification.next(PART_EVENTS);
    onProgress?.(progress.reached.size);
  }
  const root = (await verification.root()).toString('base64');
  return { position: position === '' ? null : position, size, root, payments: progress.payments, checks: logChecks(progress) };
};

interface Leaf {
  /** null: the leaf lies before the part that is verified. */
  readonly event: Recorded | null;
  readonly hash: Buffer;
}

/** Verifies the log in parts. Memory does not grow with the log. */
export class LogVerification {
  private readonly roots: StoredTiles;
  private readonly signed: SignedHeads;
  private tree: GrowingTree | null = null;
  /** Leaves of the present tile. They are added to the tree when the tile is full, or when the log ends. */
  private batch: Leaf[] = [];

  constructor(
    private readonly ports: VerifyPorts,
    private readonly progress: LogProgress,
  ) {
    this.roots = new StoredTiles(ports.db, progress.found.tiles);
    this.signed = new SignedHeads(ports, progress.reached.size, progress.found.heads);
  }

  /** Verifies the next part of about `maxEvents` events. Returns the payments of these events. */
  async next(maxEvents: number): Promise<string[]> {
    const { ports, progress } = this;
    const { end, found } = progress;
    const { store } = ports;
    const before = progress.reached;
    const wanted = Math.max(TILE_HASHES, maxEvents) + before.size;
    // A part ends at the end of a tile, or at the end of the log.
    const to = wanted >= end.size ? end.size : wanted - (wanted % TILE_HASHES);
    const tree = await this.begin();
    const changed = new Set<string>();
    const foreign = (progress.foreign ??= noFindings());
    const others: Recorded[] = [];
    const onForeign = (event: Recorded) => void others.push(event);
    let [count, last] = [before.size, before.position];
    if (before.size === 0) await this.compareHeads(0);
    try {
      if (to > count)
        reading: for await (const read of readAhead(
          store.readAll((last || null) as Position | null, { until: end.position as Position, onForeign }),
        )) {
          // The hashes of a page do not yield to the event loop. This pause lets the request for the next page go out first.
          await new Promise((turned) => setImmediate(turned));
          for (const event of read) {
            if (count === to) break reading;
            this.batch.push({ event, hash: eventHash(event) });
            count += 1;
            last = event.position;
            if (event.stream.startsWith('payment-')) {
              changed.add(paymentIdOf(event.stream));
              if (event.revision === 0n) progress.payments += 1;
            }
            if (this.signed.mayHold(count)) await this.compareHeads(count);
            if (this.batch.length === TILE_HASHES) await this.flush(count);
          }
          if (count === to) break;
        }
    } catch (error) {
      if (error instanceof LogGap) find(found.events, `the event at position ${error.missing} was removed (of ${end.size} that are sealed)`);
      else if (error instanceof NotInTheLog) find(found.events, error.message);
      else throw error;
    }
    progress.reached = { size: count, position: last };
    // A read may go beyond this part. The next part reads what follows once more.
    for (const { type, id, stream, position, meta } of others)
      if (position <= last) find(foreign, `${type} ${id} in ${stream} at position ${position}, of installation ${meta.installation}`);
    progress.over = count === end.size || count < to;
    if (!progress.over) return [...changed];
    await this.flush(count);
    if (count === end.size) await this.roots.end(end.size);
    else if (found.events.count === 0)
      find(found.events, `the log ends after ${count} events (position ${last || 'none'}); ${end.size} were sealed, up to position ${end.position}`);
    await this.nameHeadsBeyond(tree.size);
    return [...changed];
  }

  /** Root over the events that were read. */
  async root(): Promise<Buffer> {
    return (await this.begin()).root();
  }

  /** The tree before the next event. Its whole tiles are in `tree`, and the leaves of the last tile are in `batch`. */
  private async begin(): Promise<GrowingTree> {
    if (this.tree) return this.tree;
    const { reached, over } = this.progress;
    const tiles = storedTiles(this.ports.db);
    const rest = over ? 0 : reached.size % TILE_HASHES;
    this.tree = await GrowingTree.of(rememberingTiles(tiles), reached.size - rest);
    if (rest > 0) {
      const hashes = Buffer.from(await tiles(0, Math.floor(reached.size / TILE_HASHES)));
      for (let index = 0; index < rest; index++)
        this.batch.push({ event: null, hash: hashes.subarray(index * HASH_BYTES, (index + 1) * HASH_BYTES) });
    }
    return this.tree;
  }

  private async flush(count: number): Promise<void> {
    const [leaves, tree, { found, end }] = [this.batch, this.tree!, this.progress];
    if (leaves.length === 0) return;
    const root = leaves.length === TILE_HASHES ? tileRoot(Buffer.concat(leaves.map(({ hash }) => hash))) : null;
    await this.roots.compare(leaves, root, count - leaves.length, async (event, index, guilty) =>
      guilty === null ? find(found.events, await nameDifference(this.ports, event, index, end.size)) : find(found.tiles, guilty),
    );
    if (root) tree.addTile(root);
    else for (const { hash } of leaves) tree.add(hash);
    this.batch = [];
  }

  /** Compares the heads up to the size `count` that were not compared yet. */
  private async compareHeads(count: number): Promise<void> {
    const { progress } = this;
    for (let head = await this.signed.upTo(count); head; head = await this.signed.upTo(count)) {
      progress.heads += 1;
      // Files are read in the order of their days. If a clock was set back, a smaller head may follow a larger one.
      const root =
        head.size === count ? this.tree!.rootWith(this.batch.map(({ hash }) => hash)) : await rootOf(storedTiles(this.ports.db), head.size);
      if (root.equals(head.root)) progress.agreed = { size: head.size, at: head.at };
      else
        find(
          progress.found.heads,
          `${head.where} was signed at ${head.at} over other events than the first ${head.size} of now; ${progress.agreed ? `up to ${progress.agreed.size} they are those of ${progress.agreed.at}` : 'no earlier head agrees'}`,
        );
    }
  }

  /** If events and tiles were removed from the end, only heads beyond the end show it. A head that was signed after the start is left to the next verification. */
  private async nameHeadsBeyond(read: number): Promise<void> {
    const { end, found } = this.progress;
    for (let head = await this.signed.upTo(Number.POSITIVE_INFINITY); head; head = await this.signed.upTo(Number.POSITIVE_INFINITY)) {
      const sealed = read < end.size ? end.size : (await logState(this.ports.db)).size;
      if (head.size > end.size && head.size <= sealed) continue;
      find(
        found.heads,
        `${head.where} was signed at ${head.at} over ${head.size} events; ${read < end.size ? `the log shows only ${read} now` : `only ${end.size} are sealed now`}`,
      );
    }
  }
}

interface SignedHead {
  readonly where: string;
  readonly size: number;
  readonly root: Buffer;
  readonly at: string;
}

/** The signed heads from the files and the database, smallest first. They are read as they are needed. A forged head is a finding. */
class SignedHeads {
  private readonly sources: AsyncGenerator<SignedHead, void, void>[];
  private readonly first: (SignedHead | null | undefined)[] = [];
  private smallest = 0;

  constructor(
    private readonly ports: VerifyPorts,
    private readonly after: number,
    private readonly found: Findings,
  ) {
    this.sources = [this.fromRows(), this.fromFiles()];
  }

  /** Returns false if no head has a size up to `count`. */
  mayHold(count: number): boolean {
    return this.smallest <= count;
  }

  /** The next head, if its size is at most `size`. */
  async upTo(size: number): Promise<SignedHead | null> {
    for (const [index, source] of this.sources.entries())
      if (this.first[index] === undefined) this.first[index] = (await source.next()).value ?? null;
    const [row, file] = this.first;
    const index = row && (!file || row.size <= file.size) ? 0 : 1;
    const head = this.first[index];
    this.smallest = head?.size ?? Number.POSITIVE_INFINITY;
    if (!head || head.size > size) return null;
    this.first[index] = undefined;
    return head;
  }

  private async *fromRows() {
    const { db } = this.ports;
    const rows = everyRow<{ size: string; note: string }>(async (after, limit) => {
      const values = [after?.size ?? (this.after === 0 ? -1 : this.after), limit];
      return (await db.query<{ size: string; note: string }>('select size, note from log_head where size > $1 order by size limit $2', values)).rows;
    });
    for await (const { size, note } of rows) yield* await this.opened(`the head of ${size} in the database`, note);
  }

  private async *fromFiles() {
    for (const file of headFilesAfter(this.ports.headFolder, this.after)) yield* await this.opened(file, readHeadFile(file));
  }

  private async opened(where: string, note: string): Promise<SignedHead[]> {
    this.origin ??= (await logState(this.ports.db)).origin;
    this.ours ??= headKeys(this.origin, this.ports.keys);
    try {
      const { size, root, at } = openHead(note, this.ours);
      return this.after > 0 && size <= this.after ? [] : [{ where, size, root, at }];
    } catch (error) {
      find(this.found, `${where} is forged: ${(error as Error).message}`);
      return [];
    }
  }
  private origin: string | null = null;
  private ours: ReturnType<typeof headKeys> | null = null;
}

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

  private find(text: string): void {
    find(this.findings, text);
  }

  /** Compares leaves with the stored ones. `leaves` are at most one tile. `first` is the number of the first leaf. */
  async compare(
    leaves: readonly Leaf[],
    /** Root of these leaves, if they fill a tile. */
    root: Buffer | null,
    first: number,
    onDifference: (event: Recorded, index: number, guilty: Guilty) => Promise<void>,
  ): Promise<void> {
    const number = Math.floor(first / TILE_HASHES);
    const stored = await this.leafTile(number);
    if (!stored) return this.find(`tile 0/${number} is missing`);
    const computed = Buffer.concat(leaves.map(({ hash }) => hash));
    const same = computed.equals(stored.subarray(0, computed.length));
    if (root) await this.addRoot(1, number, root, same);
    if (same) return;
    const parent = root && (await this.storedNode(1, number));
    // If the tile above agrees with the events, then the tile of leaves was changed, not an event.
    const tileIsGuilty = root !== null && parent?.equals(root) === true;
    for (const [index, { event, hash }] of leaves.entries()) {
      if (hash.equals(stored.subarray(index * HASH_BYTES, (index + 1) * HASH_BYTES))) continue;
      if (!event) return this.find(`tile 0/${number} was changed while it was compared`);
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
      this.find(`tile ${level}/${Math.floor(index / TILE_HASHES)} was changed: it does not hold the root of tile ${level - 1}/${index}`);
    const nodes = (this.above[level] ??= await this.nodesBefore(level, index));
    nodes.push(stored ?? root);
    if (nodes.length < TILE_HASHES) return;
    this.above[level] = [];
    await this.addRoot(level + 1, Math.floor(index / TILE_HASHES), tileRoot(Buffer.concat(nodes)), true);
  }

  /** The stored hashes of a tile before a node, if a verification begins within the tile. */
  private async nodesBefore(level: number, index: number): Promise<Buffer[]> {
    const before = index % TILE_HASHES;
    if (before === 0) return [];
    const hashes = Buffer.alloc(before * HASH_BYTES);
    (await this.storedTile(level, Math.floor(index / TILE_HASHES)))?.copy(hashes);
    return Array.from({ length: before }, (_, at) => hashes.subarray(at * HASH_BYTES, (at + 1) * HASH_BYTES));
  }

  /**
   * Checks that no level of tiles holds more than the tree. One statement reads the present size and the last tiles. If the sealer has added events meanwhile,
   * these tiles are beyond the size that is verified, and are not looked at. The sealer itself refuses a last tile of a wrong length.
   */
  async end(size: number): Promise<void> {
    const { rows } = await this.db.query<{ level: number; number: string; held: number; sealed: string }>(
      `select l as level, t.number, length(t.hashes) / ${HASH_BYTES} as held, s.size as sealed
       from log_state s cross join generate_series(0, $1::int) l
       cross join lateral (select number, hashes from log_tile where level = l order by number desc limit 1) t`,
      [MAX_LEVEL],
    );
    for (const { level, number, held, sealed } of rows) {
      const nodes = Math.floor(size / TILE_HASHES ** level);
      const stored = Number(number) * TILE_HASHES + held;
      if (Number(sealed) === size && stored !== nodes) this.find(`level ${level} holds ${stored} hashes instead of ${nodes}`);
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

  private async storedTile(level: number, number: number): Promise<Buffer | undefined> {
    const { rows } = await this.db.query<{ hashes: Buffer }>('select hashes from log_tile where level = $1 and number = $2', [level, number]);
    return rows[0]?.hashes;
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
