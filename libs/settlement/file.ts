/** Reads a processor's settlement file (CSV or NDJSON). Each fault is reported with its line number. */
import { createReadStream } from 'node:fs';
import { stat } from 'node:fs/promises';
import { isDay, ServiceError } from '#kernel';
import { type Funding, MAX_BATCH_LINES } from './record.js';
import { type SettlementRecord } from '#payments';
import { holdsCardNumber, parseExactly } from '#platform';

const COLUMNS = ['batch_id', 'closed_at', 'transaction_id', 'ref', 'type', 'gross_cents', 'fee_cents', 'net_cents', 'funded_on'] as const;
type Column = (typeof COLUMNS)[number];
const TYPES: readonly string[] = ['sale', 'refund', 'chargeback', 'chargeback_reversal', 'fee', 'adjustment'];

const MAX_LINE_BYTES = 16 * 1024;
const MAX_CENTS = 1_000_000_000_000;

/** Thrown if a file is refused. Nothing of the file was recorded, unless it changed during the import. */
export class RefusedFile extends ServiceError {
  constructor(line: number | null, why: string) {
    super('VALIDATION_ERROR', line === null ? why : `line ${line}: ${why}`, line === null ? {} : { line });
  }
}

export interface FileBatch {
  readonly batchId: string;
  readonly closedAt: string;
  readonly fundedOn: string | null;
  /** Row of the first line in the file, from 1. The other lines follow it. */
  readonly row: number;
  readonly lines: readonly SettlementRecord[];
}

/** The batches of a file, in its order. Memory holds one batch. Throws {@link RefusedFile}. */
export const fileBatches = async function* (file: string, onBytes: (bytes: Buffer) => void = () => undefined): AsyncGenerator<FileBatch, void, void> {
  const done = new Set<string>();
  let batch: (FileBatch & { lines: SettlementRecord[] }) | null = null;
  let parse: ((text: string, number: number) => Row) | null = null;
  let number = 0;
  for await (const text of textLines(file, onBytes)) {
    number += 1;
    if (parse === null) {
      parse = text.startsWith('{') ? parseJson : parseCsv;
      if (parse === parseCsv) {
        if (text !== COLUMNS.join(',')) throw new RefusedFile(1, `a CSV file begins with ${COLUMNS.join(',')}`);
        continue;
      }
    }
    const { record, batchId, closedAt, fundedOn } = recordOf(parse(text, number), number);
    if (batch && batch.batchId !== batchId) {
      yield batch;
      batch = null;
    }
    if (!batch) {
      if (done.has(batchId)) throw new RefusedFile(number, `batch ${batchId} goes on after another one`);
      done.add(batchId);
      batch = { batchId, closedAt, fundedOn, row: number, lines: [] };
    }
    if (batch.closedAt !== closedAt) throw new RefusedFile(number, `batch ${batchId} has two times of closing`);
    if (batch.fundedOn !== fundedOn) throw new RefusedFile(number, `batch ${batchId} has two days of funding`);
    if (batch.lines.length >= MAX_BATCH_LINES) throw new RefusedFile(number, `batch ${batchId} has more than ${MAX_BATCH_LINES} lines`);
    batch.lines.push(record);
  }
  if (!batch) throw new RefusedFile(null, 'the file holds no lines');
  yield batch;
};

const textLines = async function* (file: string, onBytes: (bytes: Buffer) => void): AsyncGenerator<string, void, void> {
  const utf8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: false });
  let rest = Buffer.alloc(0);
  let number = 0;
  try {
    // A pipe could keep the command waiting for ever.
    if (!(await stat(file)).isFile()) throw new RefusedFile(null, 'it is no ordinary file');
    for await (const piece of createReadStream(file) as AsyncIterable<Buffer>) {
      onBytes(piece);
      let bytes = rest.length > 0 ? Buffer.concat([rest, piece]) : piece;
      for (let end = bytes.indexOf(10); end >= 0; end = bytes.indexOf(10)) {
        number += 1;
        if (end > MAX_LINE_BYTES) throw new RefusedFile(number, `it is longer than ${MAX_LINE_BYTES} bytes`);
        yield textOf(utf8, bytes.subarray(0, end), number);
        bytes = bytes.subarray(end + 1);
      }
      if (bytes.length > MAX_LINE_BYTES) throw new RefusedFile(number + 1, `it is longer than ${MAX_LINE_BYTES} bytes`);
      rest = Buffer.from(bytes);
    }
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException;
    throw error instanceof ServiceError || code === undefined ? error : new RefusedFile(null, `the file cannot be read (${code})`);
  }
  // The file was probably cut off during a transfer, so its last number may be incomplete.
  if (rest.length > 0) throw new RefusedFile(number + 1, 'the file ends in the middle of a line');
};

const textOf = (utf8: TextDecoder, bytes: Buffer, number: number): string => {
  try {
    return utf8.decode(bytes).replace(/\r$/, '');
  } catch {
    throw new RefusedFile(number, 'it is not UTF-8');
  }
};

type Row = Readonly<Record<Column, string | number | null | undefined>>;

const parseJson = (text: string, number: number): Row => {
  let value: unknown;
  try {
    value = parseExactly(text);
  } catch {
    throw new RefusedFile(number, 'it is not JSON');
  }
  if (value === null || typeof value !== 'object' || Array.isArray(value)) throw new RefusedFile(number, 'it is no JSON object');
  const unknown = Object.keys(value).find((key) => !(COLUMNS as readonly string[]).includes(key));
  if (unknown !== undefined) throw new RefusedFile(number, `${unknown.slice(0, 40)} is no field of a settlement line`);
  return value as Row;
};

const parseCsv = (text: string, number: number): Row => {
  const cells = cellsOf(text, number, COLUMNS.length);
  return Object.fromEntries(COLUMNS.map((column, index) => [column, cells[index]])) as unknown as Row;
};

/** The fields of one line by RFC 4180, without line breaks in fields. */
const cellsOf = (text: string, number: number, count: number): readonly string[] => {
  const cells: string[] = [];
  for (let at = 0; at <= text.length;) {
    if (text[at] === '"') {
      // An expression for the whole cell would overflow the stack on a long one.
      let end = text.indexOf('"', at + 1);
      while (end >= 0 && text[end + 1] === '"') end = text.indexOf('"', end + 2);
      if (end < 0 || (end + 1 < text.length && text[end + 1] !== ',')) throw new RefusedFile(number, 'its quotes do not match');
      cells.push(text.slice(at + 1, end).replaceAll('""', '"'));
      at = end + 2;
    } else {
      const end = text.indexOf(',', at);
      const cell = text.slice(at, end < 0 ? undefined : end);
      if (cell.includes('"')) throw new RefusedFile(number, 'its quotes do not match');
      cells.push(cell);
      at = end < 0 ? text.length + 1 : end + 1;
    }
  }
  if (cells.length !== count) throw new RefusedFile(number, `it has ${cells.length} fields instead of ${count}`);
  return cells;
};

const FUNDING_COLUMNS = ['merchant_account', 'batch_id', 'funded_on', 'fee_cents', 'reference'] as const;
/** Rows of a file of fundings. Memory holds all of them, and all are checked before the first is recorded. */
const MAX_FUNDINGS = 10_000;

/** The rows of a CSV file of fundings. An empty `fee_cents` is 0. Throws {@link RefusedFile}. */
export const fundingsIn = async (file: string): Promise<readonly Funding[]> => {
  const fundings: Funding[] = [];
  let number = 0;
  for await (const text of textLines(file, () => undefined)) {
    number += 1;
    if (number === 1) {
      if (text !== FUNDING_COLUMNS.join(',')) throw new RefusedFile(1, `the file begins with ${FUNDING_COLUMNS.join(',')}`);
      continue;
    }
    const [merchantAccount, batchId, on, fee, reference] = cellsOf(text, number, FUNDING_COLUMNS.length) as [string, string, string, string, string];
    if (!/^\d{0,13}$/.test(fee)) throw new RefusedFile(number, 'fee_cents must be whole cents');
    if (fundings.push({ merchantAccount, batchId, on, feeCents: Number(fee), reference }) > MAX_FUNDINGS)
      throw new RefusedFile(number, `a file has at most ${MAX_FUNDINGS} rows`);
  }
  if (fundings.length === 0) throw new RefusedFile(null, 'the file holds no rows');
  return fundings;
};

const INSTANT = /^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(?:\.\d{1,9})?(?:Z|[+-]\d{2}:\d{2})$/;

const recordOf = (row: Row, number: number): Omit<FileBatch, 'lines' | 'row'> & { readonly record: SettlementRecord } => {
  const refuse = (column: Column, why: string) => new RefusedFile(number, `${column} ${why}`);
  const text = (column: Column, pattern: RegExp): string => {
    const value = row[column];
    if (typeof value !== 'string' || !pattern.test(value)) throw refuse(column, `must match ${pattern.source}`);
    // If columns are mixed up, this value may be a card number. The log would keep it for ever.
    if (holdsCardNumber(value)) throw refuse(column, 'must not hold a card number');
    return value;
  };
  const cents = (column: Column): number => {
    const value = row[column];
    const amount = typeof value === 'string' && /^-?\d{1,13}$/.test(value) ? Number(value) : value;
    if (typeof amount !== 'number' || !Number.isSafeInteger(amount) || Math.abs(amount) > MAX_CENTS) throw refuse(column, 'must be whole cents');
    return amount + 0; // -0 is 0
  };
  const optional = (column: Column): boolean => row[column] === undefined || row[column] === null || row[column] === '';
  const closed = text('closed_at', INSTANT);
  if (Number.isNaN(Date.parse(closed)) || !isDay(closed.slice(0, 10))) throw refuse('closed_at', 'is no time');
  const type = text('type', /^\w{1,20}$/);
  if (!TYPES.includes(type)) throw refuse('type', `must be one of ${TYPES.join(', ')}`);
  const fundedOn = optional('funded_on') ? null : text('funded_on', /^\d{4}-\d{2}-\d{2}$/);
  if (fundedOn !== null && !isDay(fundedOn)) throw refuse('funded_on', 'is no day');
  const batchId = text('batch_id', /^[\w.-]{1,64}$/);
  const record: SettlementRecord = {
    transactionId: text('transaction_id', /^[\w.:-]{1,64}$/),
    ...(optional('ref') ? {} : { ref: text('ref', /^[\w.:-]{1,64}$/) }),
    type: type as SettlementRecord['type'],
    accepted: true,
    grossCents: cents('gross_cents'),
    feeCents: cents('fee_cents'),
    netCents: cents('net_cents'),
  };
  if (type === 'sale' && record.grossCents < 0) throw refuse('gross_cents', 'of a sale must not be negative');
  if (type === 'refund' && record.grossCents > 0) throw refuse('gross_cents', 'of a refund must not be positive');
  return { record, batchId, closedAt: new Date(Date.parse(closed)).toISOString(), fundedOn };
};
