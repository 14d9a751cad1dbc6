/**
 * The cursor of the list (C45): version, time, id and a MAC over account and filters, so that it is good for nothing but the next page of the list that it came
 * from. Keys that the ring still holds open it; a new one is sealed with the current key.
 */
import { timingSafeEqual } from 'node:crypto';
import { canonicalJson, ServiceError } from '#kernel';
import type { KeyRing } from '#platform';
import type { PaymentStatus } from './payment.js';

export interface ListFilters {
  readonly portalId: string | null;
  /** Milliseconds since the epoch, inclusive and exclusive, on createdAt. */
  readonly from: number | null;
  readonly to: number | null;
  readonly status: PaymentStatus | null;
}

/** Where a page ended: its last payment. */
export interface PagePlace {
  /** Milliseconds since the epoch. */
  readonly createdAt: number;
  readonly id: string;
}

const CURSOR_VERSION = 1;
const PLACE_BYTES = 25;
const MAC_BYTES = 16;

export const sealCursor = (keys: KeyRing, accountId: string, filters: ListFilters, place: PagePlace): string => {
  const bytes = Buffer.alloc(PLACE_BYTES);
  bytes.writeUInt8(CURSOR_VERSION, 0);
  bytes.writeBigInt64BE(BigInt(place.createdAt), 1);
  bytes.write(place.id.replaceAll('-', ''), 9, 'hex');
  return Buffer.concat([bytes, cursorMac(keys, keys.current, accountId, filters, bytes)]).toString('base64url');
};

/** The place that a cursor names. Tampered, another account's, other filters → VALIDATION_ERROR. */
export const openCursor = (keys: KeyRing, accountId: string, filters: ListFilters, cursor: string): PagePlace => {
  const bytes = Buffer.from(cursor, 'base64url');
  const place = bytes.subarray(0, PLACE_BYTES);
  const mac = bytes.subarray(PLACE_BYTES);
  const genuine =
    bytes.length === PLACE_BYTES + MAC_BYTES &&
    bytes.toString('base64url') === cursor &&
    place[0] === CURSOR_VERSION &&
    keys.kids.some((kid) => timingSafeEqual(mac, cursorMac(keys, kid, accountId, filters, place)));
  if (!genuine)
    throw new ServiceError('VALIDATION_ERROR', 'cursor is not valid for this list.', {
      errors: [{ field: 'cursor', message: 'is not valid for this list' }],
    });
  const hex = place.subarray(9).toString('hex');
  return { createdAt: Number(place.readBigInt64BE(1)), id: hex.replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, '$1-$2-$3-$4-$5') };
};

const cursorMac = (keys: KeyRing, kid: string, accountId: string, filters: ListFilters, place: Buffer): Buffer =>
  keys.mac('cursor', `${accountId}\n${canonicalJson(filters)}\n${place.toString('hex')}`, kid).subarray(0, MAC_BYTES);
