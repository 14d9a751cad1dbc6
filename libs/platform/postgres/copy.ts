/** Bulk loading: writes rows into a table by COPY, with constant memory. */
import { once } from 'node:events';
import { from as copyFrom } from 'pg-copy-streams';
import { typedError } from './errors.js';
import type { Client } from './pool.js';

/** Writes rows to a table. `end` resolves when all rows are written. */
export interface RowCopy {
  /** Values as text or null, in the order of the columns. Resolves when there is room for another row. */
  write(row: readonly (string | null)[]): Promise<void>;
  end(): Promise<void>;
}

/** Rows are written to the socket in pieces of about this size. */
const PIECE_BYTES = 256 * 1024;
/** Maximum number of bytes that UTF-8 needs for one character of a JavaScript string. */
const CHARACTER_BYTES = 3;

export const copyInto = (client: Client, table: string, columns: readonly string[]): RowCopy => {
  const stream = client.query(copyFrom(`copy ${table} (${columns.join(', ')}) from stdin`));
  let failure: Error | undefined;
  stream.on('error', (error: Error) => (failure ??= typedError(error) as Error));
  const check = () => {
    if (failure) throw failure;
  };
  let piece = Buffer.allocUnsafe(PIECE_BYTES);
  let filled = 0;
  /** Resolves when the stream has room for another piece. While the previous piece is being sent, `write` fills the next one. */
  let drained: Promise<unknown> = Promise.resolve();
  const flush = async () => {
    await drained;
    check();
    const full = piece.subarray(0, filled);
    piece = Buffer.allocUnsafe(PIECE_BYTES);
    filled = 0;
    if (stream.write(full)) return;
    const waiting = new AbortController();
    drained = Promise.race([once(stream, 'drain', { signal: waiting.signal }), once(stream, 'close', { signal: waiting.signal })]).finally(() =>
      waiting.abort(),
    );
    // If the stream fails, the next `write` or `end` throws the error. Until then the rejection must not be unhandled.
    drained.catch(() => undefined);
  };
  return {
    write: async (row) => {
      const line = `${row.map(copyText).join('\t')}\n`;
      const most = line.length * CHARACTER_BYTES;
      if (filled > 0 && filled + most > piece.length) await flush();
      if (most > piece.length) piece = Buffer.allocUnsafe(most);
      filled += piece.write(line, filled);
    },
    end: async () => {
      if (filled > 0) await flush();
      await drained;
      check();
      const finished = once(stream, 'finish');
      stream.end();
      await finished;
      check();
    },
  };
};

const SPECIAL = /[\\\t\n\r]/g;
const ESCAPES: Readonly<Record<string, string>> = { '\\': '\\\\', '\t': '\\t', '\n': '\\n', '\r': '\\r' };
const copyText = (value: string | null): string => (value === null ? '\\N' : value.replace(SPECIAL, (character) => ESCAPES[character]!));
