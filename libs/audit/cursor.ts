/**
 * Cursors of the audit API: where a page of a list ended. The MAC binds a cursor to the audit key and to the list. So a cursor of another key gets 400,
 * and nobody learns from an answer whether a place of another key exists.
 */
import { timingSafeEqual } from 'node:crypto';
import type { KeyRing } from '#platform';

const MAC_BYTES = 16;

const macOf = (keys: KeyRing, kid: string, keyId: string, list: string, place: string): Buffer =>
  keys.mac('cursor', `audit\n${keyId}\n${list}\n${place}`, kid).subarray(0, MAC_BYTES);

/** `list`: names the list within the API. */
export const sealPlace = (keys: KeyRing, keyId: string, list: string, place: string): string =>
  Buffer.concat([macOf(keys, keys.current, keyId, list, place), Buffer.from(place)]).toString('base64url');

/** The place that a cursor names. null: the cursor was changed, or belongs to another key or list. */
export const openPlace = (keys: KeyRing, keyId: string, list: string, cursor: string): string | null => {
  const bytes = Buffer.from(cursor, 'base64url');
  if (bytes.length < MAC_BYTES || bytes.toString('base64url') !== cursor) return null;
  const place = bytes.subarray(MAC_BYTES).toString();
  const isGenuine = keys.kids.some((kid) => timingSafeEqual(bytes.subarray(0, MAC_BYTES), macOf(keys, kid, keyId, list, place)));
  return isGenuine ? place : null;
};
