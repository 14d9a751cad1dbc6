/** Bulk loading: rows into a table by COPY, the fastest way in, at constant memory. */
import { once } from 'node:events';
import { from as copyFrom } from 'pg-copy-streams';
import type { Client } from './pool.js';

/** Takes rows one after the other and writes them to a table; `end` waits until they are all there. */
export interface RowCopy {
  /** Values as text, null for null, in the order of the columns. Resolves when there is room for more. */
  write(row: readonly (string | null)[]): Promise<void>;
  end(): Promise<void>;
}

/** Rows are handed to the socket in pieces of about this size. */
const FLUSH_CHARACTERS = 256 * 1024;

export const copyInto = (client: Client, table: string, columns: readonly string[]): RowCopy => {
  const stream = client.query(copyFrom(`copy ${table} (${columns.join(', ')}) from stdin`));
  let failure: Error | undefined;
  stream.once('error', (error: Error) => (failure = error));
  let buffer = '';
  const flush = async () => {
    if (failure) throw failure;
    const text = buffer;
    buffer = '';
    if (stream.write(text)) return;
    const waiting = new AbortController();
    await Promise.race([once(stream, 'drain', { signal: waiting.signal }), once(stream, 'close', { signal: waiting.signal })]).finally(() =>
      waiting.abort(),
    );
  };
  return {
    write: async (row) => {
      buffer += `${row.map(copyText).join('\t')}\n`;
      if (buffer.length >= FLUSH_CHARACTERS) await flush();
    },
    end: async () => {
      await flush();
      const finished = once(stream, 'finish');
      stream.end();
      await finished;
      if (failure) throw failure;
    },
  };
};

const SPECIAL = /[\\\t\n\r]/g;
const ESCAPES: Readonly<Record<string, string>> = { '\\': '\\\\', '\t': '\\t', '\n': '\\n', '\r': '\\r' };
const copyText = (value: string | null): string => (value === null ? '\\N' : value.replace(SPECIAL, (character) => ESCAPES[character]!));
