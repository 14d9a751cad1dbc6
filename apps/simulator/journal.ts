/**
 * The simulator's durable file. It is append-only, with one JSON line for each record. A record is on disk before its answer is sent. Concurrent
 * requests share one fsync.
 *
 * Each line has a number and a checksum. So a changed, lost or inserted line is noticed on load. A last line without a line feed is from a write that
 * was cut short. No caller got an answer for its record, so the line is cut off.
 *
 * A journal can be compacted: the records that are still needed are written into a file beside it, which then takes its place in one step. A process
 * that is killed meanwhile leaves the old file, with every record.
 */
import { createHash } from 'node:crypto';
import { mkdir, open, rename, rm, stat, unlink, type FileHandle } from 'node:fs/promises';
import { connect, createServer, type Server } from 'node:net';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { crc32 } from 'node:zlib';

const FORMAT_VERSION = 1;
/** A compacted journal. A release that does not know it must not read it, since numbers go on from what was removed. */
const COMPACTED_VERSION = 2;
const READ_CHUNK_BYTES = 1024 * 1024;
/** Records are far shorter than this. A longer run of bytes without a line feed is no journal. */
const MAX_LINE_BYTES = 1024 * 1024;
/** The suffix of the file that a compaction writes. */
const DRAFT = '.new';
const WRITE_CHUNK_CHARACTERS = 1024 * 1024;
/** A compaction writes this many records, and then looks whether the journal was closed. */
const RECORDS_PER_PIECE = 5_000;
const LINE_FEED = 10;
/** A line begins with `{"crc":"`, 8 hex digits and `",`. The checksum covers the rest. */
const CRC_START = '{"crc":"';
const CRC_DIGITS = 8;
const CRC_END = '",';
const COVERED_FROM = CRC_START.length + CRC_DIGITS + CRC_END.length;

/** Thrown if the file is damaged or another process holds it. The message is one line with the next step. */
export class JournalRefused extends Error {
  constructor(message: string) {
    super(message);
    this.name = 'JournalRefused';
  }
}

/** Thrown after a failed write. The end of the file is unknown until a restart reads it. */
export class JournalFailed extends Error {
  constructor(message: string) {
    super(message);
    this.name = 'JournalFailed';
  }
}

export interface Journal<Record> {
  /** Appends a record. Its place in the order is fixed at once. It is on disk when {@link durable} resolves. Throws after a failed write. */
  append(record: Record): void;
  /** Resolves when all records appended so far are on disk. Rejects if a write failed. An answer that depends on a record waits for this promise. */
  durable(): Promise<void>;
  /**
   * Replaces all records that were appended before this call. Later records are kept. Appends go on meanwhile. Resolves when the new file is in its
   * place. If the new file cannot be written, rejects, and the journal goes on with the old one. One call at a time.
   */
  compact(records: readonly Record[]): Promise<void>;
  /** Waits until appended records are on disk, then closes the file and releases the lock. */
  close(): Promise<void>;
}

const checksum = (covered: string | Uint8Array) => crc32(covered).toString(16).padStart(CRC_DIGITS, '0');

const encode = (number: number, record: unknown): string => {
  const covered = `"number":${number},"record":${JSON.stringify(record)}}`;
  return `${CRC_START}${checksum(covered)}${CRC_END}${covered}\n`;
};

/** Returns the record of a line, or the line's fault. */
const decode = (line: Buffer, number: number): { record: unknown } | { fault: string } => {
  const covered = line.subarray(COVERED_FROM);
  if (line.subarray(0, COVERED_FROM).toString('latin1') !== `${CRC_START}${checksum(covered)}${CRC_END}`) return { fault: 'its checksum differs' };
  const parsed = JSON.parse(line.toString('utf8')) as { number?: unknown; record?: unknown };
  if (parsed.number !== number) return { fault: `it is numbered ${String(parsed.number)}` };
  return { record: parsed.record };
};

/**
 * Locks a directory for one process, by a listening socket named after the directory. The lock ends with its process, so `kill -9` leaves no stale
 * lock. Throws {@link JournalRefused} if another process holds the lock.
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
  const held = new JournalRefused(`another simulator holds ${directory}`);
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

/** Passes each whole line to `onLine`. Returns the number of bytes in whole lines (`whole`) and after them (`torn`). */
const readLines = async (
  handle: FileHandle,
  file: string,
  onLine: (line: Buffer, number: number) => void,
): Promise<{ whole: number; torn: number }> => {
  const chunk = Buffer.alloc(READ_CHUNK_BYTES);
  let rest = Buffer.alloc(0);
  let position = 0;
  let number = 0;
  for (;;) {
    const { bytesRead } = await handle.read(chunk, 0, chunk.length, position);
    if (bytesRead === 0) return { whole: position - rest.length, torn: rest.length };
    position += bytesRead;
    const bytes = Buffer.concat([rest, chunk.subarray(0, bytesRead)]);
    let start = 0;
    for (let end = bytes.indexOf(LINE_FEED); end !== -1; end = bytes.indexOf(LINE_FEED, start)) {
      onLine(bytes.subarray(start, end), number++);
      start = end + 1;
    }
    rest = Buffer.from(bytes.subarray(start));
    if (rest.length > MAX_LINE_BYTES) throw new JournalRefused(`${file} is no simulator journal: line ${number + 1} does not end`);
  }
};

const syncDirectory = async (directory: string): Promise<void> => {
  // Windows cannot open a directory and does not need this sync.
  if (process.platform === 'win32') return;
  const handle = await open(directory, 'r');
  await handle.sync().finally(() => handle.close());
};

/**
 * Opens or creates the journal in `file`, and passes every record to `onRecord` in order. Throws {@link JournalRefused} if another process holds the
 * directory or a line is damaged. A torn last line is not damage.
 */
export const openJournal = async <Record>(
  file: string,
  onRecord: (record: Record) => void,
  onLog: (line: string) => void,
): Promise<Journal<Record>> => {
  const directory = dirname(file);
  await mkdir(directory, { recursive: true, mode: 0o700 });
  const release = await hold(directory);
  let handle: FileHandle | undefined;
  try {
    // Do not open with 'a': each write names its position, right after the last whole line.
    handle = await open(file, 'r+').catch((error: NodeJS.ErrnoException) => {
      if (error.code !== 'ENOENT') throw error;
      return open(file, 'wx+', 0o600);
    });
    await rm(`${file}${DRAFT}`, { force: true });
    let lines = 0;
    const { whole, torn } = await readLines(handle, file, (line, number) => {
      const decoded = decode(line, number);
      if ('fault' in decoded)
        throw new JournalRefused(`${file} is damaged at line ${number + 1}: ${decoded.fault}. Restore it, or move it away to begin anew`);
      lines += 1;
      if (number > 0) return onRecord(decoded.record as Record);
      const { version } = decoded.record as { version?: unknown };
      if (version !== FORMAT_VERSION && version !== COMPACTED_VERSION)
        throw new JournalRefused(`${file} has format ${String(version)}; this simulator reads ${FORMAT_VERSION} and ${COMPACTED_VERSION}`);
    });
    if (torn > 0) {
      await handle.truncate(whole);
      onLog(`cut ${torn} bytes of an unfinished last line off ${file}`);
    }
    const journal = new OpenJournal<Record>(file, handle, whole, lines, release);
    if (lines === 0) {
      journal.append({ type: 'journal', version: FORMAT_VERSION });
      await journal.durable();
    }
    await handle.sync();
    await syncDirectory(directory);
    return journal;
  } catch (error) {
    await handle?.close();
    await release();
    throw error;
  }
};

type Stored<Record> = Record | { readonly type: 'journal'; readonly version: number };

/** A file of numbered lines that grows at its end. */
class LineFile {
  constructor(
    readonly handle: FileHandle,
    private position: number,
    private lines: number,
  ) {}

  /** Writes the records. They are on disk after {@link FileHandle.datasync}. */
  async write(records: readonly unknown[]): Promise<void> {
    let number = this.lines;
    for (let next = 0; next < records.length;) {
      let text = '';
      while (next < records.length && text.length < WRITE_CHUNK_CHARACTERS) text += encode(number++, records[next++]);
      const bytes = Buffer.from(text);
      for (let written = 0; written < bytes.length;) {
        const { bytesWritten } = await this.handle.write(bytes, written, bytes.length - written, this.position + written);
        written += bytesWritten;
      }
      this.position += bytes.length;
      this.lines = number;
    }
  }
}

class OpenJournal<Record> implements Journal<Record> {
  /** Appended, and not written yet. */
  private pending: Stored<Record>[] = [];
  private appended = 0;
  private onDisk = 0;
  private waiting: { readonly upTo: number; readonly resolve: () => void; readonly reject: (error: Error) => void }[] = [];
  private flushing = false;
  private failure: Error | null = null;
  private lines: LineFile;
  /** The records appended since a compaction began. null: none runs. */
  private since: Stored<Record>[] | null = null;
  private compaction: Promise<void> = Promise.resolve();
  /** The last step of a compaction, which runs between two writes. */
  private exchange: (() => Promise<void>) | null = null;

  constructor(
    private readonly file: string,
    handle: FileHandle,
    position: number,
    lines: number,
    private readonly release: () => Promise<void>,
  ) {
    this.lines = new LineFile(handle, position, lines);
  }

  append(record: Stored<Record>): void {
    if (this.failure) throw this.failure;
    this.appended += 1;
    this.pending.push(record);
    this.since?.push(record);
    this.startFlush();
  }

  durable(): Promise<void> {
    if (this.failure) return Promise.reject(this.failure);
    if (this.onDisk === this.appended) return Promise.resolve();
    return new Promise((resolve, reject) => this.waiting.push({ upTo: this.appended, resolve, reject }));
  }

  compact(records: readonly Record[]): Promise<void> {
    const since: Stored<Record>[] = (this.since = []);
    this.compaction = this.writeDraft(records, since).finally(() => (this.since = null));
    return this.compaction;
  }

  async close(): Promise<void> {
    await this.durable().catch(() => undefined);
    this.failure ??= new Error('the journal is closed');
    await this.compaction.catch(() => undefined);
    await this.lines.handle.close();
    await this.release();
  }

  private async writeDraft(records: readonly Record[], since: readonly Stored<Record>[]): Promise<void> {
    const draft = `${this.file}${DRAFT}`;
    const handle = await open(draft, 'wx+', 0o600);
    try {
      const lines = new LineFile(handle, 0, 0);
      await lines.write([{ type: 'journal', version: COMPACTED_VERSION }]);
      for (let from = 0; from < records.length; from += RECORDS_PER_PIECE) {
        if (this.failure) throw this.failure;
        await lines.write(records.slice(from, from + RECORDS_PER_PIECE));
      }
      // Most of the file is on disk before the last step, in which appends wait.
      await handle.datasync();
      await new Promise<void>((resolve, reject) => {
        this.exchange = () => this.takePlace(draft, lines, since).then(resolve, reject);
        this.startFlush();
      });
    } catch (error) {
      if (this.lines.handle === handle) throw error;
      await handle.close();
      await rm(draft, { force: true });
      throw error;
    }
  }

  /** Completes the draft with all records appended meanwhile, and puts it in the place of the file. No other write runs. */
  private async takePlace(draft: string, lines: LineFile, since: readonly Stored<Record>[]): Promise<void> {
    if (this.failure) throw this.failure;
    const [covered, appended, late] = [this.pending.length, this.appended, [...since]];
    this.since = null;
    await lines.write(late);
    await lines.handle.sync();
    await rename(draft, this.file);
    const before = this.lines.handle;
    this.lines = lines;
    this.pending.splice(0, covered);
    try {
      await syncDirectory(dirname(this.file));
    } catch (error) {
      this.fail(error);
      throw error;
    }
    this.settle(appended);
    await before.close();
  }

  private startFlush(): void {
    if (this.flushing) return;
    this.flushing = true;
    // Flush in the next turn of the event loop. Requests that were read together then share one write.
    setImmediate(() => void this.flush());
  }

  private async flush(): Promise<void> {
    try {
      while (this.pending.length > 0 || this.exchange) {
        const { exchange } = this;
        this.exchange = null;
        if (exchange) {
          await exchange();
          continue;
        }
        const records = this.pending;
        this.pending = [];
        await this.lines.write(records);
        await this.lines.handle.datasync();
        this.settle(this.onDisk + records.length);
      }
      this.flushing = false;
    } catch (error) {
      this.fail(error);
    }
  }

  /**
   * After a failed write or fsync, the content of the disk is unknown. A second try could report success for lost pages. So all later calls fail until
   * a restart reads the file again.
   */
  private fail(error: unknown): void {
    const failure = new JournalFailed(`the journal cannot be written (${(error as NodeJS.ErrnoException).code ?? 'unknown'})`);
    this.failure = failure;
    for (const { reject } of this.waiting.splice(0)) reject(failure);
  }

  private settle(onDisk: number): void {
    this.onDisk = onDisk;
    const settled = this.waiting.filter(({ upTo }) => upTo <= onDisk);
    this.waiting = this.waiting.filter(({ upTo }) => upTo > onDisk);
    for (const { resolve } of settled) resolve();
  }
}
