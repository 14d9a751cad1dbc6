/** Formats of ids, and the port that draws new ids. `platform/ids` implements the port. Deciders get ids as arguments. */

const UUID = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/i;
export const isUuid = (value: unknown): value is string => typeof value === 'string' && UUID.test(value);

/** Draws new ids. A simulation draws them from a seed. */
export interface Ids {
  /** UUID v7: time-ordered, lower case. */
  uuid(): string;
  /** `XXXX-XXXX-XX`, 50 random bits of Crockford base32 (C10). */
  confirmationNumber(): string;
}
