/**
 * A strict parser of JSON (C8). It refuses invalid UTF-8, deep nesting, duplicate keys, `__proto__`, numbers that cannot be kept as they are written, NUL
 * and lone surrogates. KurrentDB accepts NUL and lone surrogates, but Postgres does not, so they could stop a projection.
 */
import { ServiceError } from '#kernel';

export const MAX_BODY_BYTES = 256 * 1024;
export const MAX_JSON_DEPTH = 16;

export type JsonObject = Record<string, unknown>;

const utf8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true });

interface Parsing {
  readonly emptyIsObject?: boolean;
  /** Gets the faults by rules that are younger than the rows of keys. Default: they are thrown. */
  readonly later?: { push(fault: { readonly field: string; readonly message: string }): unknown };
}

/** Parses a body to an object. With `emptyIsObject`, an empty body gives `{}`. Throws VALIDATION_ERROR, whose message repeats nothing of the body. */
export const parseStrictJson = (bytes: Uint8Array, { emptyIsObject = false, later }: Parsing = {}): JsonObject => {
  if (bytes.length === 0) {
    if (emptyIsObject) return {};
    throw invalid('The request needs a JSON body.');
  }
  let text: string;
  try {
    text = utf8.decode(bytes);
  } catch {
    throw invalid('The body is not valid UTF-8.');
  }
  const value = parseStrictText(text, { later });
  if (value === null || typeof value !== 'object' || Array.isArray(value)) throw invalid('The body must be a JSON object.');
  return value as JsonObject;
};

/** Parses any JSON value under the same rules. For a body use {@link parseStrictJson}. */
export const parseStrictText = (text: string, { later }: Pick<Parsing, 'later'> = {}): unknown => {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    // The parser's error is not passed on, because it quotes the body, which may hold a card number.
    throw invalid('The body is not valid JSON.');
  }
  // The parser keeps only the last value of a repeated key. So a text with more members than its value has a repeated key.
  const { members, inexact } = scan(text);
  if (checkValue(value, 1) !== members) throw invalid('The body has a duplicate key.');
  if (inexact.length > 0) {
    const message = `has a number that would not come back as it is written, such as one of more than ${MAX_DIGITS} digits`;
    if (!later) throw invalid(`The body ${message}.`);
    later.push({ field: 'body', message });
  }
  return value;
};

/** Checks a value and all values inside it. Returns the number of object members. */
const checkValue = (value: unknown, depth: number): number => {
  if (typeof value === 'string') {
    checkText(value);
    return 0;
  }
  if (typeof value === 'number') {
    if (!Number.isFinite(value) || (Number.isInteger(value) && !Number.isSafeInteger(value)))
      throw invalid('The body has a number that is too large.');
    return 0;
  }
  if (value === null || typeof value !== 'object') return 0;
  if (depth > MAX_JSON_DEPTH) throw invalid(`The body is nested deeper than ${MAX_JSON_DEPTH} levels.`);
  let members = 0;
  if (Array.isArray(value)) {
    for (const item of value) members += checkValue(item, depth + 1);
    return members;
  }
  for (const key of Object.keys(value)) {
    if (key === '__proto__') throw invalid('The body has a key that is not allowed: __proto__.');
    checkText(key);
    members += 1 + checkValue((value as JsonObject)[key], depth + 1);
  }
  return members;
};

export const NUL_OR_LONE_SURROGATE = /\0|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/;
const checkText = (text: string): void => {
  if (NUL_OR_LONE_SURROGATE.test(text)) throw invalid('The body has a NUL or a lone surrogate in a text.');
};

const QUOTE = 0x22;
const BACKSLASH = 0x5c;
const COLON = 0x3a;
const MINUS = 0x2d;
const ZERO = 0x30;
const NINE = 0x39;

/** Begins at a number of a valid JSON text. */
const NUMBER = /-?(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?/y;
/** Digits that tell any two numbers apart (IEEE 754). With more of them, a number does not come back as it was sent. */
const MAX_DIGITS = 17;

/** True if the number keeps its value: it does not become 0 or an integer, and has few enough digits. Zeros at both ends do not count. */
const isExactNumber = ([text, whole = '', fraction = '', exponent = '0']: readonly string[]): boolean => {
  const digits = (whole + fraction).replace(/^0+/, '');
  const significant = digits.replace(/0+$/, '');
  const isInteger = significant === '' || Number(exponent) - fraction.length + digits.length - significant.length >= 0;
  return significant.length <= MAX_DIGITS && Number.isInteger(Number(text)) === isInteger;
};

/**
 * Finds in a valid JSON text two things that its parsed value does not show. One is the number of object members: each has one colon outside of strings.
 * The other is the places of the numbers that do not keep their value.
 */
const scan = (text: string): { readonly members: number; readonly inexact: readonly (readonly [from: number, to: number])[] } => {
  let members = 0;
  const inexact: [number, number][] = [];
  for (let index = 0; index < text.length; index++) {
    const code = text.charCodeAt(index);
    if (code === COLON) members += 1;
    else if (code === QUOTE) {
      for (index++; text.charCodeAt(index) !== QUOTE; index++) if (text.charCodeAt(index) === BACKSLASH) index++;
    } else if (code === MINUS || (code >= ZERO && code <= NINE)) {
      NUMBER.lastIndex = index;
      const found = NUMBER.exec(text)!;
      if (!isExactNumber(found)) inexact.push([index, index + found[0].length]);
      index += found[0].length - 1;
    }
  }
  return { members, inexact };
};

/**
 * Parses JSON of a processor. A number that does not keep its value becomes its text. So a reader that needs a number refuses it, and other readers
 * accept it. Throws the error of `JSON.parse`.
 */
export const parseExactly = (text: string): unknown => {
  const value: unknown = JSON.parse(text);
  let [exact, end] = ['', 0];
  for (const [from, to] of scan(text).inexact) {
    exact += `${text.slice(end, from)}"${text.slice(from, to)}"`;
    end = to;
  }
  return end === 0 ? value : JSON.parse(exact + text.slice(end));
};

const invalid = (message: string) => new ServiceError('VALIDATION_ERROR', message);
