/**
 * The cursor of the list (C45). It holds a version, the time and the id of a page's last payment, and a MAC. The MAC also covers the account and the
 * filters, so a cursor is valid only for its own list. The current key of the ring makes the MAC. Every key of the ring can check it.
 */
import { timingSafeEqual } from 'node:crypto';
import { canonicalJson, ServiceError } from '#kernel';
import type { KeyRing } from '#platform';
import { type ListFilters, setFilters } from './list-filters.js';

/** Where a page ended: its last payment. */
export interface PagePlace {
  /** Milliseconds since the epoch. */
  readonly createdAt: number;
  readonly id: string;
}

/** Increase this number when the format of cursors changes. */
const CURSOR_VERSION = 2;
const PLACE_BYTES = 25;
const MAC_BYTES = 16;

export const sealCursor = (keys: KeyRing, accountId: string, filters: ListFilters, place: PagePlace): string => {
  const bytes = Buffer.alloc(PLACE_BYTES);
  bytes.writeUInt8(CURSOR_VERSION, 0);
  bytes.writeBigInt64BE(BigInt(place.createdAt), 1);
  bytes.write(place.id.replaceAll('-', ''), 9, 'hex');
  return Buffer.concat([bytes, cursorMac(keys, keys.current, accountId, filters, bytes)]).toString('base64url');
};

/**
 * The place that a cursor names. Throws VALIDATION_ERROR if the cursor was changed, has an earlier version, or belongs to another account or to other
 * filters.
 */
export const openCursor = (keys: KeyRing, accountId: string, filters: ListFilters, cursor: string): PagePlace => {
  const bytes = Buffer.from(cursor, 'base64url');
  const place = bytes.subarray(0, PLACE_BYTES);
  const mac = bytes.subarray(PLACE_BYTES);
  const genuine =
    bytes.length === PLACE_BYTES + MAC_BYTES &&
    bytes.toString('base64url') === cursor &&
    place[0] === CURSOR_VERSION &&
    keys.kids.some((kid) => timingSafeEqual(mac, cursorMac(keys, kid, accountId, filters, place)));
  if (!genuine) throw refuse(isOfEarlierForm(bytes) ? 'is of an earlier release; ask for the first page again' : 'is not valid for this list');
  const hex = place.subarray(9).toString('hex');
  return { createdAt: Number(place.readBigInt64BE(1)), id: hex.replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, '$1-$2-$3-$4-$5') };
};

const isOfEarlierForm = (bytes: Buffer): boolean => bytes.length === PLACE_BYTES + MAC_BYTES && bytes[0]! > 0 && bytes[0]! < CURSOR_VERSION;

const refuse = (message: string) => new ServiceError('VALIDATION_ERROR', `cursor ${message}.`, { errors: [{ field: 'cursor', message }] });

const cursorMac = (keys: KeyRing, kid: string, accountId: string, filters: ListFilters, place: Buffer): Buffer =>
  keys.mac('cursor', `${accountId}\n${canonicalJson(setFilters(filters))}\n${place.toString('hex')}`, kid).subarray(0, MAC_BYTES);
