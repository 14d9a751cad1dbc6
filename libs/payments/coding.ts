/** The coding of a line: values of its metadata that the general ledger needs, under the keys that its portal names (docs/decisions/0049-coding-in-clear.md). */
import { isCodingWord } from '#accounts';
import type { Json } from '#kernel';
import { holdsCardNumber } from '#platform';
import type { Coding } from './payment.js';

/**
 * The values of these keys. A text counts if it is a code: short, and without spaces or other signs of free text. A number counts as its digits.
 * Anything else, and any card number, is left out, so that a wrong value never refuses a charge. null: none is left.
 */
export const codingOf = (metadata: Readonly<Record<string, Json>> | null, keys: readonly string[]): Coding | null => {
  if (metadata === null) return null;
  const found = keys.flatMap((key): [string, string][] => {
    const value = Object.hasOwn(metadata, key) ? metadata[key] : null;
    const text = typeof value === 'string' || typeof value === 'number' ? String(value) : '';
    return isCodingWord(text) && !holdsCardNumber(text) ? [[key, text]] : [];
  });
  return found.length === 0 ? null : Object.fromEntries(found);
};
