/** Pages of reports: how columns are written, and how pages follow each other by the key of their last row. */
import { ServiceError } from '#kernel';
import type { Cell } from '#ledger';
import { isDataException } from '#platform';

/** Number of rows in a page. Small pages keep garbage collection cheap: few rows are in use at the same time. */
export const PAGE_ROWS = 250;

export type Kind = 'text' | 'cents' | 'time' | 'day' | 'bool';
export type Column = readonly [name: string, kind: Kind, sql: string];

export const SPELLED: Readonly<Record<Kind, (sql: string) => string>> = {
  text: (sql) => `(${sql})::text`,
  cents: (sql) => `(${sql})::text`,
  time: (sql) => `to_char(${sql}, 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')`,
  day: (sql) => `(${sql})::date::text`,
  bool: (sql) => `(${sql})::text`,
};
export const parsed = (kind: Kind, value: string | null): Cell =>
  value === null ? null : kind === 'cents' ? Number(value) : kind === 'bool' ? value === 'true' : value;

/**
 * Reads pages of rows, each by the key of the last row of the page before. No transaction stays open over a page. A page is read only when the caller
 * asks for it: a page that is read ahead would take the event loop while an export rests.
 */
export const pagesByKey = async function* <Row>(
  place: readonly string[] | null,
  keyOfRow: (row: Row) => readonly string[],
  read: (place: readonly string[] | null) => Promise<readonly Row[]>,
  limit = PAGE_ROWS,
): AsyncGenerator<readonly Row[], void, void> {
  let rows = await read(place).catch((error: unknown) => {
    // All other parameters were checked before. A part of `after` is not a valid date, id or text.
    throw isDataException(error) ? notAPlace() : error;
  });
  while (rows.length > 0) {
    yield rows;
    if (rows.length < limit) return;
    rows = await read(keyOfRow(rows.at(-1)!));
  }
};

export const notAPlace = () => new ServiceError('VALIDATION_ERROR', 'after is not a place of this report.');
export const afterOf = (key: readonly string[]): string => Buffer.from(JSON.stringify(key)).toString('base64url');
export const keyOf = (after: string, length: number): readonly string[] => {
  try {
    const key = JSON.parse(Buffer.from(after, 'base64url').toString()) as unknown;
    if (Array.isArray(key) && key.length === length && key.every((part) => typeof part === 'string')) return key;
  } catch {
    // Invalid JSON gets the same answer as a wrong key.
  }
  throw notAPlace();
};
