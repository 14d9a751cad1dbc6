/**
 * A strict parser of `application/x-www-form-urlencoded`, for form bodies and queries. It refuses invalid UTF-8, repeated names, NUL, lone surrogates
 * and `__proto__`. Node's own parsers accept repeated names and replace bytes that they cannot decode.
 */
import { ServiceError } from '#kernel';
import { NUL_OR_LONE_SURROGATE } from './strict-json.js';

/** Maximum number of pairs in a form. The limit bounds the time that a request can cost. */
const MAX_PAIRS = 200;

const utf8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true });

/** A parameter was sent more than once. `others`: the parameters that were sent once. */
export class RepeatedParameter extends ServiceError {
  constructor(readonly others: ReadonlyMap<string, string>) {
    super('VALIDATION_ERROR', 'The request has a parameter that was sent more than once.');
  }
}

/** Parses names and values, in their order. Throws VALIDATION_ERROR, whose message repeats nothing of the text. */
export const parseForm = (text: string): ReadonlyMap<string, string> => {
  const pairs = new Map<string, string>();
  const repeated = new Set<string>();
  for (const pair of text.split('&')) {
    if (pair === '') continue;
    const at = pair.indexOf('=');
    const name = decode(at < 0 ? pair : pair.slice(0, at));
    if (name === '__proto__') throw invalid('The request has a parameter that is not allowed: __proto__.');
    if (pairs.has(name)) repeated.add(name);
    if (pairs.size >= MAX_PAIRS) throw invalid(`The request has more than ${MAX_PAIRS} parameters.`);
    pairs.set(name, at < 0 ? '' : decode(pair.slice(at + 1)));
  }
  if (repeated.size > 0) throw new RepeatedParameter(new Map([...pairs].filter(([name]) => !repeated.has(name))));
  return pairs;
};

/** Decodes a body and parses it with {@link parseForm}. */
export const parseFormBody = (bytes: Uint8Array): ReadonlyMap<string, string> => {
  let text: string;
  try {
    text = utf8.decode(bytes);
  } catch {
    throw invalid('The request is not valid UTF-8.');
  }
  return parseForm(text);
};

const decode = (text: string): string => {
  let decoded: string;
  try {
    // Throws for bytes that are not UTF-8, and for a % without two hex digits.
    decoded = decodeURIComponent(text.replaceAll('+', ' '));
  } catch {
    throw invalid('The request has a parameter that cannot be decoded.');
  }
  if (NUL_OR_LONE_SURROGATE.test(decoded)) throw invalid('The request has a NUL or a lone surrogate in a parameter.');
  return decoded;
};

const invalid = (message: string) => new ServiceError('VALIDATION_ERROR', message);
