/** Headers on which money depends. They are read from the raw lines, because Node joins or drops repeated headers (C14). */
import { ServiceError } from '#kernel';

export const MAX_KEY_LENGTH = 255;
const VISIBLE_ASCII = /^[\x20-\x7e]+$/;
/** The documented form of a key. Spaces within a key are accepted too, but clients and proxies treat them differently. */
export const IDEMPOTENCY_KEY_PATTERN = '^[!-~]+$';

/** All values of a header, unchanged and in order. `rawHeaders` alternates names and values. */
export const headerLines = (rawHeaders: readonly string[], name: string): string[] =>
  rawHeaders.filter((_, index) => index % 2 === 1 && rawHeaders[index - 1]!.toLowerCase() === name);

/** The `Idempotency-Key`. null: the request has none. Throws VALIDATION_ERROR if the key is empty, too long, not ASCII or sent twice (C14). */
export const idempotencyKeyOf = (rawHeaders: readonly string[]): string | null => {
  const lines = headerLines(rawHeaders, 'idempotency-key');
  if (lines.length === 0) return null;
  if (lines.length > 1) throw invalid('Idempotency-Key was sent more than once.');
  const key = lines[0]!;
  const fault = keyFault(key);
  if (fault) throw invalid(`Idempotency-Key ${fault}.`);
  return key;
};

/** The fault of a text that is no key (C14). null: there is no fault. */
export const keyFault = (key: string): string | null =>
  key.length < 1 || key.length > MAX_KEY_LENGTH || !VISIBLE_ASCII.test(key) ? `must be 1 to ${MAX_KEY_LENGTH} visible ASCII characters` : null;

/** Refuses a body that is neither JSON nor empty (C65). */
export const refuseOtherContentTypes = (contentType: string | undefined, contentEncoding: string | undefined, bytes: Uint8Array): void => {
  if (contentEncoding !== undefined && contentEncoding.toLowerCase() !== 'identity') throw invalid('Content-Encoding is not supported.');
  if (bytes.length > 0 && !/^application\/json\s*(;|$)/i.test(contentType ?? '')) throw invalid('Content-Type must be application/json.');
};

const invalid = (message: string) => new ServiceError('VALIDATION_ERROR', message);
