/**
 * Reads the journal of a simulator of release 0.1 or 0.2, which kept one JSON line for each record. Each line has a number and a checksum, so a
 * changed, lost or inserted line is noticed. A last line without a line feed is from a write that was cut short. No caller got an answer for its
 * record, so it is left out.
 */
import { open } from 'node:fs/promises';
import { crc32 } from 'node:zlib';
import { StoreRefused } from './store.js';

/** 2: a journal from which ended operations were removed. */
const VERSIONS: readonly unknown[] = [1, 2];
const READ_CHUNK_BYTES = 1024 * 1024;
/** Records are far shorter than this. A longer run of bytes without a line feed is no journal. */
const MAX_LINE_BYTES = 1024 * 1024;
const LINE_FEED = 10;
/** A line begins with `{"crc":"`, 8 hex digits and `",`. The checksum covers the rest. */
const CRC_START = '{"crc":"';
const CRC_DIGITS = 8;
const CRC_END = '",';
const COVERED_FROM = CRC_START.length + CRC_DIGITS + CRC_END.length;

const checksum = (covered: string | Uint8Array) => crc32(covered).toString(16).padStart(CRC_DIGITS, '0');

/** Returns the record of a line, or the line's fault. */
const decode = (line: Buffer, number: number): { record: unknown } | { fault: string } => {
  const covered = line.subarray(COVERED_FROM);
  if (line.subarray(0, COVERED_FROM).toString('latin1') !== `${CRC_START}${checksum(covered)}${CRC_END}`) return { fault: 'its checksum differs' };
  const parsed = JSON.parse(line.toString('utf8')) as { number?: unknown; record?: unknown };
  if (parsed.number !== number) return { fault: `it is numbered ${String(parsed.number)}` };
  return { record: parsed.record };
};

/**
 * The records of a journal, in order and in pieces of at most {@link READ_CHUNK_BYTES}. Throws {@link StoreRefused} if a line is damaged or the file is
 * of another format. A torn last line is not damage.
 */
export async function* readJournal<Record>(file: string, onLog: (line: string) => void): AsyncGenerator<Record[]> {
  const handle = await open(file, 'r');
  try {
    const chunk = Buffer.alloc(READ_CHUNK_BYTES);
    let rest = Buffer.alloc(0);
    let number = 0;
    for (;;) {
      const { bytesRead } = await handle.read(chunk, 0, chunk.length, null);
      if (bytesRead === 0) break;
      const bytes = Buffer.concat([rest, chunk.subarray(0, bytesRead)]);
      const records: Record[] = [];
      let start = 0;
      for (let end = bytes.indexOf(LINE_FEED); end !== -1; end = bytes.indexOf(LINE_FEED, start)) {
        const decoded = decode(bytes.subarray(start, end), number);
        if ('fault' in decoded)
          throw new StoreRefused(`${file} is damaged at line ${number + 1}: ${decoded.fault}. Restore it, or move it away to begin anew`);
        if (number > 0) records.push(decoded.record as Record);
        else {
          const { version } = decoded.record as { version?: unknown };
          if (!VERSIONS.includes(version)) throw new StoreRefused(`${file} has format ${String(version)}, which this simulator does not know`);
        }
        number += 1;
        start = end + 1;
      }
      rest = Buffer.from(bytes.subarray(start));
      if (rest.length > MAX_LINE_BYTES) throw new StoreRefused(`${file} is no simulator journal: line ${number + 1} does not end`);
      yield records;
    }
    if (rest.length > 0) onLog(`left ${rest.length} bytes of an unfinished last line of ${file} out`);
  } finally {
    await handle.close();
  }
}
