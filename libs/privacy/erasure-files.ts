/**
 * Erasure files: `ERASURES_DIR/<day>.ndjson`, outside the database. Each line is an event of an erasure. A backup of the database brings erased keys
 * back; these files say which, so that a start can refuse them, and `payments erase --replay` can erase them again.
 */
import { existsSync, mkdirSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { isUuid } from '#kernel';
import { appendOwnFile, readOwnFile, requireOwnFolder } from '#platform';
import { type Erased, REASON_CODES } from './erasure.js';

/** An event of an erasure, as a line. It has all that is needed to record the event again. */
export interface ErasureLine {
  readonly eventId: string;
  /** RFC 3339. */
  readonly erasedAt: string;
  readonly data: Erased;
}

const ENDING = '.ndjson';
const MODE = 0o700;

/**
 * Appends the lines that the files do not have yet, durably. `lines`: in the order of the log. Throws the errors of the file system, and NotOurs.
 */
export const appendErasures = (folder: string, lines: readonly ErasureLine[]): void => {
  mkdirSync(folder, { recursive: true, mode: MODE });
  requireOwnFolder(folder);
  const days = new Map<string, ErasureLine[]>();
  for (const line of lines) {
    const day = line.erasedAt.slice(0, 10);
    days.set(day, [...(days.get(day) ?? []), line]);
  }
  for (const [day, ofDay] of days) {
    const file = join(folder, `${day}${ENDING}`);
    // The event of a line that a crash cut off is written again.
    const whole = (readOwnFile(file) ?? '').split('\n').filter((line) => line.endsWith(END));
    const known = new Set(whole.map((line) => line.slice(BEGIN.length, BEGIN.length + UUID_LENGTH)));
    const missing = ofDay.filter(({ eventId }) => !known.has(eventId));
    if (missing.length > 0) appendOwnFile(file, missing.map(textOf).join(''));
  }
};

const BEGIN = '{"eventId":"';
const END = ']}}';
const UUID_LENGTH = 36;
const isCutOff = (line: string): boolean => !line.endsWith(END) && (line.startsWith(BEGIN) || BEGIN.startsWith(line));
const textOf = ({ eventId, erasedAt, data }: ErasureLine): string => `${JSON.stringify({ eventId, erasedAt, data })}\n`;

/** All erasure files of a folder, oldest day first. Empty if there is no folder. */
export const erasureFiles = (folder: string): readonly string[] =>
  existsSync(folder)
    ? readdirSync(folder)
        .filter((name) => /^\d{4}-\d{2}-\d{2}\.ndjson$/.test(name))
        .sort()
        .map((name) => join(folder, name))
    : [];

/** The lines of a file. Passes over a line that a crash cut off. Throws an error of one line for any other fault, and NotOurs. */
export const readErasures = (file: string): readonly ErasureLine[] => {
  const text = readOwnFile(file);
  if (text === null) throw new Error(`${file} does not exist`);
  return text.split('\n').flatMap((line, index) => {
    if (isCutOff(line)) return [];
    const read = lineIn(line);
    if (read) return [read];
    throw new Error(`${file}, line ${index + 1}: it is no line of an erasure; nothing was changed`);
  });
};

/** null: the text is no line of an erasure. */
const lineIn = (text: string): ErasureLine | null => {
  let line: Partial<ErasureLine> | null;
  try {
    line = JSON.parse(text) as Partial<ErasureLine> | null;
  } catch {
    return null;
  }
  const { eventId, erasedAt, data } = line ?? {};
  const { erasureId, cause, reasonCode, subjects } = data ?? {};
  const isWhole =
    typeof eventId === 'string' &&
    isUuid(eventId) &&
    typeof erasedAt === 'string' &&
    !Number.isNaN(Date.parse(erasedAt)) &&
    typeof erasureId === 'string' &&
    isUuid(erasureId) &&
    (CAUSES as readonly unknown[]).includes(cause) &&
    (REASON_CODES as readonly unknown[]).includes(reasonCode) &&
    Array.isArray(subjects) &&
    (subjects as readonly unknown[]).every(isSubject);
  return isWhole ? (line as ErasureLine) : null;
};

const CAUSES = ['payment', 'email', 'retention'] as const;
const isSubject = (value: unknown): boolean => {
  const { stream, keyId } = (value ?? {}) as { readonly stream?: unknown; readonly keyId?: unknown };
  const isStream = typeof stream === 'string' && (/^(?:checkout|case)-[\w-]+$/.test(stream) || isUuid(/^payment-(.*)$/.exec(stream)?.[1] ?? ''));
  return isStream && typeof keyId === 'string' && isUuid(keyId);
};
