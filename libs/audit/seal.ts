/**
 * The sealer: a subscriber that reads the log without a filter and appends each event to a Merkle tree. The tree is stored as tiles in Postgres, in
 * the transaction that moves the sealer's checkpoint.
 *
 * The tree is never rebuilt: a tree over changed events would prove nothing. While events arrive, a head is signed every minute. Before each
 * signature, the sealer checks that the tree begins with the tree of the last signed head.
 */
import type { EventStore, Position, Projection, Recorded, SealedPlace } from '#eventstore';
import { timestamp } from '#kernel';
import type { KeyRing, Migration, Queryable } from '#platform';

import { ForgedHead, type Head, headKeys, newestHeadFile, openHead, readHeadFile, signHead, writeHead, writeKeys } from './head.js';
import { eventHash, type FetchTile, HASH_BYTES, rememberingTiles, rootOf, TILE_HASHES, tileRoot } from './merkle.js';

/** Name of the sealer and of its checkpoint. */
export const LOG_SEAL = 'log-seal';

export const logSealMigration: Migration = {
  name: '0101-log-seal',
  sql: `
create table log_state (
  one bool primary key default true check (one),
  origin text not null,
  size bigint not null,
  position text collate "C" not null
);
insert into log_state (origin, size, position) values ('payfold/log/' || gen_random_uuid(), 0, '');

-- Up to 256 hashes of a level, one after the other. first_position (level 0): of the event of the first leaf.
create table log_tile (
  level int not null,
  number bigint not null,
  hashes bytea not null,
  first_position text collate "C",
  primary key (level, number)
);
alter table log_tile alter column hashes set storage external;
create index log_tile_position on log_tile (first_position) where level = 0;

create table log_head (size bigint primary key, note text not null);
`,
};

interface Tile {
  readonly level: number;
  readonly number: number;
  hashes: Buffer;
  firstPosition: string | null;
}

export interface LogState {
  readonly origin: string;
  readonly size: number;
  /** Log position of the last event in the tree. '' if the tree is empty. */
  readonly position: string;
}

export const logState = async (db: Queryable): Promise<LogState> => {
  const { rows } = await db.query<{ origin: string; size: string; position: string }>('select origin, size, position from log_state');
  if (!rows[0]) throw new Error('the state of the sealed log is missing');
  return { origin: rows[0].origin, size: Number(rows[0].size), position: rows[0].position };
};

/** Number of sealed events that no signed head covers yet. */
export const unsignedEvents = async (db: Queryable): Promise<number> => {
  const { rows } = await db.query<{ count: string }>('select size - coalesce((select max(size) from log_head), 0) as count from log_state');
  return Number(rows[0]?.count ?? 0);
};

/** Size and root of the newest head in the database. null: no head is signed yet. */
export const newestHead = async (db: Queryable): Promise<{ readonly size: number; readonly root: string } | null> => {
  const { rows } = await db.query<{ size: string; note: string }>('select size, note from log_head order by size desc limit 1');
  return rows[0] ? { size: Number(rows[0].size), root: rows[0].note.split('\n')[2] ?? '' } : null;
};

/** The sealer collects events for this long before it writes. Each write rewrites the last tile, so fewer writes cost less. */
const GATHER_MS = 500;

export const logSeal: Projection = {
  name: LOG_SEAL,
  gatherMs: GATHER_MS,
  apply: async (client, events) => {
    const { size, position } = await logState(client);
    refuseGap(size, position, events);
    const tree = new TiledTree(client, size);
    for (const event of events) await tree.add(eventHash(event), event.position);
    await tree.write();
    await client.query('update log_state set size = $1, position = $2', [size + events.length, events.at(-1)!.position]);
  },
};

/** Throws if positions do not ascend. If positions count events, also throws if a position is missing. */
const refuseGap = (size: number, position: string, events: readonly Recorded[]): void => {
  for (const [index, event] of events.entries()) {
    if (/^\d+$/.test(event.position) && BigInt(event.position) !== BigInt(size + index + 1))
      throw new Error(`the log has a gap: after ${size + index} events comes position ${event.position}`);
    if (event.position <= (index === 0 ? position : events[index - 1]!.position)) throw new Error(`the log runs backwards at ${event.position}`);
  }
};

/** Appends leaves to the stored tree. Memory holds only the last tile of each level, and the tiles to write. */
class TiledTree {
  private readonly edge: Tile[] = [];
  private readonly written = new Map<string, Tile>();

  constructor(
    private readonly db: Queryable,
    private readonly size: number,
  ) {}

  async add(hash: Buffer, position: string | null, level = 0): Promise<void> {
    const tile = (this.edge[level] ??= await this.lastTile(level));
    if (tile.hashes.length === 0) tile.firstPosition = position;
    tile.hashes = Buffer.concat([tile.hashes, hash]);
    this.written.set(`${level}/${tile.number}`, tile);
    if (tile.hashes.length < TILE_HASHES * HASH_BYTES) return;
    this.edge[level] = { level, number: tile.number + 1, hashes: Buffer.alloc(0), firstPosition: null };
    await this.add(tileRoot(tile.hashes), null, level + 1);
  }

  private async lastTile(level: number): Promise<Tile> {
    const nodes = Math.floor(this.size / TILE_HASHES ** level);
    const number = Math.floor(nodes / TILE_HASHES);
    const held = nodes % TILE_HASHES;
    if (held === 0) return { level, number, hashes: Buffer.alloc(0), firstPosition: null };
    const { rows } = await this.db.query<{ hashes: Buffer; first_position: string | null }>(
      'select hashes, first_position from log_tile where level = $1 and number = $2',
      [level, number],
    );
    if (rows[0]?.hashes.length !== held * HASH_BYTES) throw new Error(`tile ${level}/${number} of the sealed log is damaged`);
    return { level, number, hashes: rows[0].hashes, firstPosition: rows[0].first_position };
  }

  async write(): Promise<void> {
    const tiles = [...this.written.values()];
    await this.db.query({
      name: 'log-tile-write',
      text: `insert into log_tile (level, number, hashes, first_position) select * from unnest($1::int[], $2::bigint[], $3::bytea[], $4::text[])
             on conflict (level, number) do update set hashes = excluded.hashes`,
      values: [
        tiles.map(({ level }) => level),
        tiles.map(({ number }) => number),
        tiles.map(({ hashes }) => hashes),
        tiles.map(({ firstPosition }) => firstPosition),
      ],
    });
  }
}

export const storedTiles =
  (db: Queryable): FetchTile =>
  async (level, number) => {
    const { rows } = await db.query<{ hashes: Buffer }>('select hashes from log_tile where level = $1 and number = $2', [level, number]);
    if (!rows[0]) throw new Error(`tile ${level}/${number} of the sealed log is missing`);
    return rows[0].hashes;
  };

// ------------------------------------------------------------------------------------------------------------------------------------
// Heads.

export interface HeadPorts {
  readonly db: Queryable;
  readonly keys: KeyRing;
  /** `HEADS_DIR`: folder of the signed heads, outside the database. Its files are the evidence, and rows are copies. */
  readonly folder: string;
  readonly now: () => number;
}

export interface SignedLog {
  readonly head: Head;
  readonly note: string;
}

export interface ProvePorts extends HeadPorts {
  readonly store: EventStore;
}

/** The last sealed event. null: nothing is sealed, or the database is of an earlier release without a seal. */
export const sealedEnd = async (db: Queryable): Promise<SealedPlace | null> => {
  const { rows } = await db.query<{ found: boolean }>(`select to_regclass('public.log_state') is not null as found`);
  if (!rows[0]!.found) return null;
  const { size, position } = await logState(db);
  return size === 0 ? null : sealedPlace(db, size, position as Position, 'the seal');
};

/**
 * The last event that the newest signed head covers. Heads are read from the database and the folder. null: no head is signed, or one of them is
 * forged.
 */
export const signedEnd = async (ports: HeadPorts): Promise<SealedPlace | null> => {
  const last = await lastHead(ports).catch((error: unknown) => {
    if (error instanceof ForgedHead) return null;
    throw error;
  });
  return last && sealedPlace(ports.db, last.head.size, last.head.position as Position, `the head that was signed at ${last.head.at}`);
};

const sealedPlace = async (db: Queryable, size: number, position: Position, where: string): Promise<SealedPlace> => {
  const [tile, index] = [Math.floor((size - 1) / TILE_HASHES), (size - 1) % TILE_HASHES];
  const { rows } = await db.query<{ leaf: Buffer }>(
    `select substr(hashes, $2::int, ${HASH_BYTES}) as leaf from log_tile where level = 0 and number = $1`,
    [tile, index * HASH_BYTES + 1],
  );
  const leaf = rows[0]?.leaf;
  // If an old backup of the database was restored, the leaf may be missing. Then any event is accepted.
  return { where, position, isEvent: (event) => leaf?.length !== HASH_BYTES || eventHash(event).equals(leaf) };
};

/**
 * Call this before the sealer starts. If the database was lost, the new, empty tree takes the origin of the newest head file. The sealer then seals
 * the log again, and {@link signLog} compares the new tree with that head. A head file that is unreadable or forged is ignored.
 */
export const resumeSeal = async ({ db, keys, folder }: Pick<HeadPorts, 'db' | 'keys' | 'folder'>): Promise<void> => {
  // Do nothing if events are sealed already. If the row is missing, the sealer fails later, but the service continues.
  if ((await db.query('select from log_state where size = 0')).rowCount === 0) return;
  const origin = signedOrigin(folder, keys);
  if (origin === null) return;
  await db.query(`update log_state set origin = $1 where size = 0`, [origin]);
};

const signedOrigin = (folder: string, keys: KeyRing): string | null => {
  try {
    const file = newestHeadFile(folder);
    if (file === null) return null;
    const note = readHeadFile(file);
    return openHead(note, headKeys(note.slice(0, note.indexOf('\n')), keys)).origin;
  } catch (error) {
    if (error instanceof ForgedHead || (error as NodeJS.ErrnoException).syscall !== undefined) return null;
    throw error;
  }
};

/**
 * True if the tree is smaller than the signed head only because the sealer is not finished. Then the log reaches the signed position, and all events
 * up to the sealer's checkpoint are sealed.
 */
const isBeingSealed = async ({ db, store }: ProvePorts, signed: Head): Promise<boolean> => {
  const end = await store.head();
  if (end === null || end < signed.position) return false;
  const { rows } = await db.query<{ sealed: Position; read: Position }>(
    'select s.position as sealed, c.position as read from log_state s join projection_checkpoint c on c.name = $1 and c.position >= s.position',
    [LOG_SEAL],
  );
  const [places] = rows;
  if (!places) return false;
  if (places.read === places.sealed) return true;
  // Every event of Payfold up to the sealer's checkpoint must be sealed. `readAll` leaves out events of other programs. Any event here is missing in
  // the tree.
  for await (const events of store.readAll(places.sealed || null, { until: places.read })) if (events.length > 0) return false;
  return true;
};

/** Thrown if the tree does not begin with the tree of the last signed head: the log was changed. No further head is signed. */
export class BrokenPromise extends Error {}

/** The largest of the newest heads in the database and in the folder. null: there is none. Throws {@link ForgedHead} if one of them is not ours. */
export const lastHead = async ({ db, keys, folder }: HeadPorts): Promise<{ head: Head; note: string } | null> => {
  const { origin } = await logState(db);
  const { rows } = await db.query<{ note: string }>('select note from log_head order by size desc limit 1');
  const file = newestHeadFile(folder);
  const notes = [...rows.map(({ note }) => note), ...(file ? [readHeadFile(file)] : [])];
  const heads = notes.map((note) => ({ note, head: openHead(note, headKeys(origin, keys)) }));
  return heads.sort((a, b) => b.head.size - a.head.size)[0] ?? null;
};

/**
 * The newest stored head that was signed by `at` (RFC 3339) and whose last event lies before `position` (null: anywhere). null: there is none. Throws
 * {@link ForgedHead}.
 */
export const headBefore = async (ports: Pick<HeadPorts, 'db' | 'keys'>, at: string, position: string | null): Promise<SignedLog | null> =>
  storedHead(
    ports,
    `where split_part(note, E'\\n', 4) collate "C" <= 'at ' || $1 and ($2::text is null or split_part(note, E'\\n', 5) collate "C" < 'position ' || $2)
     order by size desc limit 1`,
    [at, position],
  );

/** The oldest stored head that covers the event at this position. null: there is none. Throws {@link ForgedHead}. */
export const headCovering = async (ports: Pick<HeadPorts, 'db' | 'keys'>, position: string): Promise<SignedLog | null> =>
  storedHead(ports, `where split_part(note, E'\\n', 5) collate "C" >= 'position ' || $1 order by size limit 1`, [position]);

const storedHead = async (
  { db, keys }: Pick<HeadPorts, 'db' | 'keys'>,
  where: string,
  values: readonly (string | null)[],
): Promise<SignedLog | null> => {
  const { origin } = await logState(db);
  const { rows } = await db.query<{ note: string }>(`select note from log_head ${where}`, [...values]);
  return rows[0] ? { note: rows[0].note, head: openHead(rows[0].note, headKeys(origin, keys)) } : null;
};

/**
 * Signs the present tree, or returns the last head if nothing was added. null: nothing is sealed, or the sealer is still sealing events of the last
 * head again. Throws {@link BrokenPromise} if the tree does not begin with the tree of the last head. Throws {@link ForgedHead} if that head is not
 * ours.
 */
export const signLog = async (ports: ProvePorts): Promise<SignedLog | null> => {
  const { db, keys, folder, now } = ports;
  const { origin, size, position } = await logState(db);
  const before = await lastHead(ports);
  if (size === 0 && !before) return null;
  if (before && before.head.size > size && (await isBeingSealed(ports, before.head))) return null;
  const tiles = rememberingTiles(storedTiles(db));
  if (before && (before.head.size > size || !(await rootOf(tiles, before.head.size)).equals(before.head.root)))
    throw new BrokenPromise(`the log of ${size} events does not begin with the ${before.head.size} that were signed at ${before.head.at}`);
  if (before?.head.size === size) {
    writeHead(folder, before.head, before.note);
    return before;
  }
  const head: Head = { origin, size, position, root: await rootOf(tiles, size), at: timestamp(now()) };
  const note = signHead(head, keys);
  writeKeys(folder, headKeys(origin, keys));
  writeHead(folder, head, note);
  await db.query('insert into log_head (size, note) values ($1, $2) on conflict (size) do nothing', [size, note]);
  return { head, note };
};
