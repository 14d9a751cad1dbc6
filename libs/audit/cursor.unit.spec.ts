/** Tests that a cursor of the audit API is good only for the key and the list that it was given to. */
import { expect, test } from '@jest/globals';
import { randomBytes } from 'node:crypto';
import fc from 'fast-check';
import { KeyRing, newKeyRing } from '#platform';
import { openPlace, sealPlace } from './cursor.js';

const KEY = '0191a0de-4c5b-7a7c-9f2e-0a1b2c3d4e5f';
const OTHER = '0191a0de-4c5b-7a7c-9f2e-0a1b2c3d4e60';
const PLACE = '2026-01-05T10:00:00.000Z 0191b6a3-91c2-7d3e-8f40-15263748596a';

const ring = newKeyRing();
const cursor = sealPlace(ring, KEY, 'payments', PLACE);

test('opens to its place, whichever that is', () =>
  fc.assert(
    fc.property(fc.string({ unit: 'grapheme' }), (place) =>
      expect(openPlace(ring, KEY, 'payments', sealPlace(ring, KEY, 'payments', place))).toBe(place),
    ),
  ));

test('not under another key, nor in another list', () => {
  expect(openPlace(ring, KEY, 'payments', cursor)).toBe(PLACE);
  expect(openPlace(ring, OTHER, 'payments', cursor)).toBeNull();
  expect(openPlace(ring, KEY, 'refusals', cursor)).toBeNull();
  expect(openPlace(newKeyRing(), KEY, 'payments', cursor)).toBeNull();
});

test('no bit of it can be changed, and nothing else is one', () => {
  const bytes = Buffer.from(cursor, 'base64url');
  for (let bit = 0; bit < bytes.length * 8; bit++) {
    const changed = Buffer.from(bytes);
    changed[bit >> 3]! ^= 1 << (bit & 7);
    expect(openPlace(ring, KEY, 'payments', changed.toString('base64url'))).toBeNull();
  }
  for (let length = 0; length < bytes.length; length++)
    expect(openPlace(ring, KEY, 'payments', bytes.subarray(0, length).toString('base64url'))).toBeNull();
  for (const text of ['', 'x', `${cursor}=`, ` ${cursor}`, `${cursor}x`, KEY, 'é'.repeat(30)])
    expect(openPlace(ring, KEY, 'payments', text)).toBeNull();
});

test('an empty place has a cursor of 16 bytes', () => {
  const empty = sealPlace(ring, KEY, 'payments', '');
  expect(Buffer.from(empty, 'base64url')).toHaveLength(16);
  expect(openPlace(ring, KEY, 'payments', empty)).toBe('');
});

test('one of an older master key stays good', () => {
  const old = randomBytes(32);
  const before = new KeyRing('k1', new Map([['k1', old]]));
  const both = new KeyRing('k2', new Map([['k1', old], ['k2', randomBytes(32)]])); // prettier-ignore
  const given = sealPlace(before, KEY, 'payments', PLACE);
  expect(openPlace(both, KEY, 'payments', given)).toBe(PLACE);
  expect(sealPlace(both, KEY, 'payments', PLACE)).not.toBe(given);
});
