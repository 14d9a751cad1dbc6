/**
 * The simulator's durable rows: a LevelDB database in `books/`. The rows that are put in one turn of the event loop go to disk together, or none of
 * them. Concurrent requests share one fsync. Only rows that are not on disk yet are in memory.
 *
 * LevelDB drops a damaged part of its own log without a word. So each write has a number, and the number of the last write that is on disk stands in
 * `journal.ndjson` too. A write that is missing is noticed at the next start. Each row has a checksum.
 *
 * `journal.ndjson` was the file of older simulators. Its first line makes them refuse the directory.
 */
import { createHash } from 'node:crypto';
import { closeSync, openSync, writeSync } from 'node:fs';
import { mkdir, open, rename, rm, stat, unlink } from 'node:fs/promises';
import { connect, createServer, type Server } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { crc32 } from 'node:zlib';
import { ClassicLevel } from 'classic-level';

const BOOKS = 'books';
/** The books that an older journal is carried over into. */
const DRAFT = 'books.new';
const JOURNAL_FILE = 'journal.ndjson';
/** A line in the format of older simulators, which read versions 1 and 2 and refuse 3. */
const HEADER = '{"crc":"5f0156df","number":0,"record":{"type":"journal","version":3}}\n';
/** Digits of a number in a key or file, so that keys sort by number. */
const DIGITS = 16;
const CRC_DIGITS = 8;
/** Keys of write numbers. A number is deleted when it is this old. LevelDB's log, which is at most some megabytes, holds fewer writes. */
const WRITE = 'write/';
const WRITES_KEPT = 25_000;
const LAST_CHARACTER = '\uffff';
/** A start looks at this many rows, the accounts and batches first. All others are looked at when they are read. */
const ROWS_CHECKED = 100_000;

/** Thrown if the directory's content is damaged or another process holds it. The message is one line with the next step. */
export class StoreRefused extends Error {
  constructor(message: string) {
    super(message);
    this.name = 'StoreRefused';
  }
}

/** Thrown after a failed read or write. The content of the disk is unknown until a restart reads it. */
export class StoreFailed extends Error {
  constructor(message: string) {
    super(message);
    this.name = 'StoreFailed';
  }
}

export type Row = object | string | number;

export interface Store {
  /** A row as it was put last, on disk or not. undefined: there is none. Throws {@link StoreFailed} if it cannot be read or is damaged. */
  get<T extends Row>(key: string): T | undefined;
  /** Puts a row. It is on disk when {@link durable} resolves. A row must not be changed after this. Throws after a failed write. */
  put(key: string, row: Row): void;
  delete(key: string): void;
  /** Resolves when everything put so far is on disk. Rejects if a write failed. An answer that depends on a row waits for this promise. */
  durable(): Promise<void>;
  /** The rows on disk whose keys begin with `prefix`, in the order of their keys. `after`, `upTo`: only keys above the one and up to the other. */
  list<T extends Row>(prefix: string, after?: string, upTo?: string): AsyncIterable<readonly [key: string, row: T]>;
  /** Waits until everything is on disk, then closes the files and releases the lock. */
  close(): Promise<void>;
}

/** A number as a part of a key. */
export const padded = (number: number): string => String(number).padStart(DIGITS, '0');

const checksum = (key: string, json: string) => crc32(json, crc32(key)).toString(16).padStart(CRC_DIGITS, '0');

const encode = (key: string, row: Row): string => {
  const json = JSON.stringify(row);
  return checksum(key, json) + json;
};

const isWhole = (key: string, value: string): boolean => checksum(key, value.slice(CRC_DIGITS)) === value.slice(0, CRC_DIGITS);

const decode = <T extends Row>(key: string, value: string): T => {
  if (!isWhole(key, value)) throw new StoreFailed(`the row ${key} of the books is damaged: its checksum differs`);
  return JSON.parse(value.slice(CRC_DIGITS)) as T;
};

const codeOf = (error: unknown): string => {
  const { code, cause } = error as { code?: string; cause?: { code?: string } };
  return cause?.code ?? code ?? 'unknown';
};

/**
 * Locks a directory for one process, by a listening socket named after the directory. The lock ends with its process, so `kill -9` leaves no stale
 * lock. Throws {@link StoreRefused} if another process holds the lock.
 */
const hold = async (directory: string): Promise<() => Promise<void>> => {
  const { dev, ino } = await stat(directory);
  const name = `payfold-simulator-${createHash('sha256').update(`${dev}:${ino}`).digest('hex').slice(0, 24)}`;
  const listen = (path: string) =>
    new Promise<Server>((resolve, reject) => {
      const server = createServer((socket) => socket.destroy());
      server.once('error', reject);
      server.listen(path, () => resolve(server.unref()));
    });
  const release = (server: Server) => () => new Promise<void>((resolve) => server.close(() => resolve()));
  const held = new StoreRefused(`another simulator holds ${directory}`);
  const isTaken = (error: unknown) => (error as NodeJS.ErrnoException).code === 'EADDRINUSE';

  // On Linux this is an abstract socket, on Windows a pipe. Both vanish with their process.
  const path = process.platform === 'linux' ? `\0${name}` : process.platform === 'win32' ? `\\\\.\\pipe\\${name}` : join(tmpdir(), `${name}.sock`);
  try {
    return release(await listen(path));
  } catch (error) {
    if (!isTaken(error)) throw error;
    if (process.platform === 'linux' || process.platform === 'win32') throw held;
  }
  // On other systems, the socket's file remains after `kill -9`. If nothing answers on the socket, its process is gone.
  const answered = await new Promise<boolean>((resolve) => {
    const probe = connect(path, () => resolve(true)).once('error', () => resolve(false));
    probe.once('close', () => probe.destroy());
  });
  if (answered) throw held;
  await unlink(path);
  return release(
    await listen(path).catch((error: unknown) => {
      throw isTaken(error) ? held : error;
    }),
  );
};

const syncDirectory = async (directory: string): Promise<void> => {
  // Windows cannot open a directory and does not need this sync.
  if (process.platform === 'win32') return;
  const handle = await open(directory, 'r');
  await handle.sync().finally(() => handle.close());
};

/** Writes the file that tells older simulators to refuse the directory. Returns its content: its header, and the number of the last write. */
const writeHeader = async (directory: string, written: number): Promise<string> => {
  const file = join(directory, JOURNAL_FILE);
  const text = `${HEADER}${padded(written)}\n`;
  // The directory of the rows must be on disk before this file.
  await syncDirectory(directory);
  const handle = await open(`${file}.new`, 'w', 0o600);
  await handle
    .writeFile(text)
    .then(() => handle.sync())
    .finally(() => handle.close());
  await rename(`${file}.new`, file);
  await syncDirectory(directory);
  return text;
};

/** As many characters of a file as {@link writeHeader} writes. null: there is no such file. */
const startOf = async (file: string): Promise<string | null> => {
  const length = HEADER.length + DIGITS + 1;
  try {
    const handle = await open(file, 'r');
    const { buffer, bytesRead } = await handle.read(Buffer.alloc(length), 0, length, 0).finally(() => handle.close());
    return buffer.toString('latin1', 0, bytesRead);
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return null;
    throw error;
  }
};

const exists = (path: string): Promise<boolean> =>
  stat(path).then(
    () => true,
    () => false,
  );

const openLevel = async (books: string): Promise<ClassicLevel> => {
  // Not compressed: a search for card data must find what is there.
  const level = new ClassicLevel(books, { compression: false });
  await level.open().catch((error: unknown) => {
    throw new StoreRefused(`${books} cannot be opened (${codeOf(error)}). Restore the directory above it, or move that away to begin anew`);
  });
  return level;
};

/**
 * Opens or creates the store in `directory`. If an older simulator's journal lies there, `carryOver` puts its content into a new store. A
 * process that is killed meanwhile leaves the journal, and the next start begins again. Throws {@link StoreRefused} if another process holds
 * the directory or a write is missing.
 */
export const openStore = async (directory: string, carryOver: (journal: string, store: Store) => Promise<void>): Promise<Store> => {
  await mkdir(directory, { recursive: true, mode: 0o700 });
  const release = await hold(directory);
  let level: ClassicLevel | undefined;
  try {
    const [books, draft, file] = [join(directory, BOOKS), join(directory, DRAFT), join(directory, JOURNAL_FILE)];
    let head = await startOf(file);
    if (head !== null && !head.startsWith(HEADER)) {
      await rm(draft, { recursive: true, force: true });
      const carried = new OpenStore(await openLevel(draft), 0, () => Promise.resolve());
      await carryOver(file, carried)
        .then(() => carried.durable())
        .finally(() => carried.close());
      if (await exists(books)) throw new StoreRefused(`${file} is of an older simulator, but ${books} exists too. Move one of them away`);
      // The older journal is the truth until this file takes its place.
      head = await writeHeader(directory, carried.written);
    }
    if (head !== null && !(await exists(books))) {
      if (!(await exists(draft))) throw new StoreRefused(`${books} is gone. Restore ${directory}, or move it away to begin anew`);
      await rename(draft, books);
    }
    level = await openLevel(books);
    const written = await lastWrite(level, directory);
    if (head === null && written > 0)
      throw new StoreRefused(`${file} is gone, but ${books} holds rows. Restore it, or move ${directory} away to begin anew`);
    if (head === null) await writeHeader(directory, written);
    else if (!(written >= Number(head.slice(HEADER.length)))) throw damaged(directory, `its write ${written + 1} is missing`);
    for await (const [key, value] of level.iterator({ limit: ROWS_CHECKED }))
      if (!isWhole(key, value)) throw damaged(directory, `the checksum of its row ${key} differs`);
    return new OpenStore(level, written, release, openSync(file, 'r+'));
  } catch (error) {
    await level?.close();
    await release();
    throw error;
  }
};

const damaged = (directory: string, how: string) =>
  new StoreRefused(`${join(directory, BOOKS)} is damaged: ${how}. Restore ${directory}, or move it away to begin anew`);

/** The number of the last write. Throws {@link StoreRefused} if one before it is missing. */
const lastWrite = async (level: ClassicLevel, directory: string): Promise<number> => {
  let last: number | null = null;
  for await (const key of level.keys({ gt: WRITE, lt: WRITE + LAST_CHARACTER })) {
    const number = Number(key.slice(WRITE.length));
    if (last !== null && number !== last + 1) throw damaged(directory, `its write ${last + 1} is missing`);
    last = number;
  }
  return last ?? 0;
};

/** Rows that go to disk together. null: a deleted row. */
class Write {
  readonly rows = new Map<string, Row | null>();
  resolve!: () => void;
  reject!: (error: Error) => void;
  readonly done = new Promise<void>((resolve, reject) => Object.assign(this, { resolve, reject }));

  constructor() {
    // A failed write is also a failure of all later calls, so it may have no one that waits.
    this.done.catch(() => undefined);
  }
}

class OpenStore implements Store {
  private next = new Write();
  private running: Write | null = null;
  private flushing = false;
  private failure: Error | null = null;

  constructor(
    private readonly level: ClassicLevel,
    public written: number,
    private readonly release: () => Promise<void>,
    /** The file that holds the number of the last write. null: a draft, which has none. */
    private readonly header: number | null = null,
  ) {}

  get<T extends Row>(key: string): T | undefined {
    let row = this.next.rows.get(key);
    if (row === undefined) row = this.running?.rows.get(key);
    if (row !== undefined) return (row ?? undefined) as T | undefined;
    const value = this.reading(() => this.level.getSync(key));
    return value === undefined ? undefined : decode<T>(key, value);
  }

  put(key: string, row: Row): void {
    this.change(key, row);
  }

  delete(key: string): void {
    this.change(key, null);
  }

  durable(): Promise<void> {
    if (this.failure) return Promise.reject(this.failure);
    if (this.next.rows.size > 0) return this.next.done;
    return this.running?.done ?? Promise.resolve();
  }

  async *list<T extends Row>(prefix: string, after = '', upTo?: string): AsyncIterable<readonly [key: string, row: T]> {
    const range = { gt: prefix + after, ...(upTo === undefined ? { lt: prefix + LAST_CHARACTER } : { lte: prefix + upTo }) };
    for await (const [key, value] of this.level.iterator(range)) yield [key, decode<T>(key, value)];
  }

  async close(): Promise<void> {
    await this.durable().catch(() => undefined);
    this.failure ??= new Error('the store is closed');
    await this.level.close();
    if (this.header !== null) closeSync(this.header);
    await this.release();
  }

  private change(key: string, row: Row | null): void {
    if (this.failure) throw this.failure;
    this.next.rows.set(key, row);
    if (this.flushing) return;
    this.flushing = true;
    // Flush in the next turn of the event loop. Requests that were read together then share one write.
    setImmediate(() => void this.flush());
  }

  private async flush(): Promise<void> {
    try {
      while (this.next.rows.size > 0) {
        const write = (this.running = this.next);
        this.next = new Write();
        await this.write(write.rows);
        this.running = null;
        write.resolve();
      }
      this.flushing = false;
    } catch (error) {
      this.fail(error);
    }
  }

  private async write(rows: Write['rows']): Promise<void> {
    const number = this.written + 1;
    const batch = this.level.batch();
    for (const [key, row] of rows) {
      if (row === null) batch.del(key);
      else batch.put(key, encode(key, row));
    }
    batch.put(WRITE + padded(number), encode(WRITE + padded(number), number)).del(WRITE + padded(Math.max(0, number - WRITES_KEPT)));
    await batch.write({ sync: true });
    this.written = number;
    // No fsync: after a power failure an older number may stand here, which is still true.
    if (this.header !== null) writeSync(this.header, padded(number), HEADER.length);
  }

  /** A second try of a failed write or fsync could report success for lost pages. So all later calls fail until a restart reads the files again. */
  private fail(error: unknown): void {
    const failure = (this.failure = new StoreFailed(`the books cannot be written (${codeOf(error)})`));
    for (const write of [this.running, this.next]) write?.reject(failure);
  }

  private reading<T>(read: () => T): T {
    try {
      return read();
    } catch (error) {
      throw new StoreFailed(`the books cannot be read (${codeOf(error)})`);
    }
  }
}
