/**
 * A strict parser of JSON (C8). It refuses invalid UTF-8, deep nesting, duplicate keys, `__proto__`, numbers that are too large, NUL and lone
 * surrogates. KurrentDB accepts NUL and lone surrogates, but Postgres does not, so they could stop a projection.
 */
import { ServiceError } from '#kernel';

export const MAX_BODY_BYTES = 256 * 1024;
export const MAX_JSON_DEPTH = 16;

export type JsonObject = Record<string, unknown>;

const utf8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true });

/** Parses a body to an object. With `emptyIsObject`, an empty body gives `{}`. Throws VALIDATION_ERROR, whose message repeats nothing of the body. */
export const parseStrictJson = (bytes: Uint8Array, { emptyIsObject = false } = {}): JsonObject => {
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
  const value = parseStrictText(text);
  if (value === null || typeof value !== 'object' || Array.isArray(value)) throw invalid('The body must be a JSON object.');
  return value as JsonObject;
};

/** Parses any JSON value under the same rules. For a body use {@link parseStrictJson}. */
export const parseStrictText = (text: string): unknown => {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    // The parser's error is not passed on, because it quotes the body, which may hold a card number.
    throw invalid('The body is not valid JSON.');
  }
  // The parser keeps only the last value of a repeated key. So a text with more members than its value has a repeated key.
  if (checkValue(value, 1) !== countMembers(text)) throw invalid('The body has a duplicate key.');
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

/** Counts the object members of a valid JSON text. Each member has one colon outside of strings. */
const countMembers = (text: string): number => {
  let members = 0;
  for (let index = 0; index < text.length; index++) {
    const code = text.charCodeAt(index);
    if (code === COLON) members += 1;
    else if (code === QUOTE) for (index++; text.charCodeAt(index) !== QUOTE; index++) if (text.charCodeAt(index) === BACKSLASH) index++;
  }
  return members;
};

const invalid = (message: string) => new ServiceError('VALIDATION_ERROR', message);
