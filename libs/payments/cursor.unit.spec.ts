/** Tests that the cursor of the list (C45) is opaque, and valid only for the list of one account under one set of filters. */
import { randomBytes } from 'node:crypto';
import { describe, expect, test } from '@jest/globals';
import fc from 'fast-check';
import { ServiceError } from '#kernel';
import { KeyRing, newKeyRing } from '#platform';
import { openCursor, type PagePlace, sealCursor } from './cursor.js';
import { type ListFilters, NO_FILTERS } from './list-filters.js';

const ACCOUNT = '0191a0de-4c5b-7a7c-9f2e-0a1b2c3d4e5f';
const OTHER_ACCOUNT = '0191a0de-4c5b-7a7c-9f2e-0a1b2c3d4e60';
const PORTAL = '0191a0de-0000-7000-8000-00000000a11c';
const PLACE: PagePlace = { createdAt: Date.UTC(2026, 0, 5, 10, 0, 0, 3), id: '0191b6a3-91c2-7d3e-8f40-15263748596a' };

const ring = newKeyRing();
const cursor = sealCursor(ring, ACCOUNT, NO_FILTERS, PLACE);
const open = (text: string, filters: ListFilters = NO_FILTERS, accountId = ACCOUNT, keys = ring) => openCursor(keys, accountId, filters, text);
const refusal = (call: () => unknown) => {
  try {
    call();
  } catch (error) {
    if (error instanceof ServiceError) return error;
    throw error;
  }
  throw new Error('it was opened');
};
const invalid = (...of: Parameters<typeof open>) => {
  expect(refusal(() => open(...of))).toMatchObject({
    code: 'VALIDATION_ERROR',
    status: 400,
    message: expect.stringMatching(/cursor/),
    details: { errors: [{ field: 'cursor' }] },
  });
};

test('opens to the place that it was sealed for, whichever that is', () =>
  fc.assert(
    fc.property(fc.nat({ max: 8.64e15 }), fc.uuid(), (createdAt, id) => {
      expect(open(sealCursor(ring, ACCOUNT, NO_FILTERS, { createdAt, id }))).toEqual({ createdAt, id });
    }),
  ));

test('is opaque: base64url of one length, and shows neither account nor filters', () => {
  expect(cursor).toMatch(/^[A-Za-z0-9_-]{55}$/);
  const bound = Buffer.from(sealCursor(ring, ACCOUNT, { ...NO_FILTERS, portalId: PORTAL, status: 'succeeded' }, PLACE), 'base64url');
  for (const secret of [ACCOUNT, PORTAL]) {
    expect(bound.toString('latin1')).not.toContain(secret);
    expect(bound.toString('hex')).not.toContain(secret.replaceAll('-', ''));
  }
  expect(bound.toString('latin1')).not.toContain('succeeded');
});

test('is bound to the account', () => invalid(cursor, NO_FILTERS, OTHER_ACCOUNT));

test.each<Partial<ListFilters>>([{ portalId: PORTAL }, { from: 0 }, { to: Date.UTC(2030, 0, 1) }, { status: 'succeeded' }])(
  'is bound to the filters: %j',
  (filter) => {
    const filters = { ...NO_FILTERS, ...filter };
    invalid(cursor, filters);
    const filtered = sealCursor(ring, ACCOUNT, filters, PLACE);
    invalid(filtered);
    expect(open(filtered, filters)).toEqual(PLACE);
  },
);

test('a filter of a later release ends no open cursor, unless it is set', () => {
  expect(open(cursor, { ...NO_FILTERS, brand: null } as ListFilters)).toEqual(PLACE);
  invalid(cursor, { ...NO_FILTERS, brand: 'visa' } as ListFilters);
});

test('one of an earlier form is refused with words of its own', () => {
  const form1 = Buffer.from(cursor, 'base64url');
  form1[0] = 1;
  const error = refusal(() => open(form1.toString('base64url')));
  expect([error.status, error.message]).toEqual([400, 'cursor is of an earlier release; ask for the first page again.']);
  expect(error.details).toEqual({ errors: [{ field: 'cursor', message: 'is of an earlier release; ask for the first page again' }] });
  for (const no of [0, 3, 255]) {
    form1[0] = no;
    expect(refusal(() => open(form1.toString('base64url'))).message).toBe('cursor is not valid for this list.');
  }
  // A changed cursor of the present version must not count as a cursor of an earlier version.
  const changed = Buffer.from(cursor, 'base64url');
  changed[changed.length - 1]! ^= 1;
  expect(refusal(() => open(changed.toString('base64url'))).message).toBe('cursor is not valid for this list.');
  // Every cursor that was ever given out has the full length.
  form1[0] = 1;
  expect(refusal(() => open(form1.subarray(0, 40).toString('base64url'))).message).toBe('cursor is not valid for this list.');
});

test('the order in which filters are named does not matter', () =>
  expect(open(cursor, Object.fromEntries(Object.entries(NO_FILTERS).toReversed()) as unknown as ListFilters)).toEqual(PLACE));

test('no bit of it can be changed', () => {
  const bytes = Buffer.from(cursor, 'base64url');
  for (let bit = 0; bit < bytes.length * 8; bit++) {
    const changed = Buffer.from(bytes);
    changed[bit >> 3]! ^= 1 << (bit & 7);
    invalid(changed.toString('base64url'));
  }
});

test('nothing can be cut off or added, at either end', () => {
  const bytes = Buffer.from(cursor, 'base64url');
  for (const length of [0, 1, 24, 25, 26, 40]) invalid(bytes.subarray(0, length).toString('base64url'));
  invalid(bytes.subarray(1).toString('base64url'));
  invalid(Buffer.concat([bytes, Buffer.alloc(1)]).toString('base64url'));
  invalid(Buffer.concat([Buffer.alloc(1), bytes]).toString('base64url'));
});

test.each(['', 'x', 'null', '=', 'AAAA', 'é', '../../etc', 'A'.repeat(55), 'A'.repeat(10_000)])('garbage: %j', (text) => invalid(text));

test('another spelling of the same bytes is another text', () => {
  // The last of the 55 characters holds four bits of the cursor and two unused bits.
  const alphabet = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_';
  const spare = `${cursor.slice(0, -1)}${alphabet[alphabet.indexOf(cursor.at(-1)!) + 1]!}`;
  expect(Buffer.from(spare, 'base64url')).toEqual(Buffer.from(cursor, 'base64url'));
  for (const spelled of [spare, `${cursor}=`, `${cursor} `, ` ${cursor}`, `${cursor}\n`]) invalid(spelled);
  const dashed = Array.from({ length: 50 }, (_, index) => sealCursor(ring, ACCOUNT, NO_FILTERS, { ...PLACE, createdAt: index })).find((text) => /[-_]/.test(text))!; // prettier-ignore
  invalid(dashed.replaceAll('-', '+').replaceAll('_', '/'));
});

describe('the key ring', () => {
  const [before, after] = [randomBytes(32), randomBytes(32)];
  const old = new KeyRing('k1', new Map([['k1', before]]));
  const rotated = new KeyRing('k2', new Map([['k1', before], ['k2', after]])); // prettier-ignore
  test('a cursor lives on when it is rotated, and ends with its key', () => {
    const text = sealCursor(old, ACCOUNT, NO_FILTERS, PLACE);
    expect(open(text, NO_FILTERS, ACCOUNT, rotated)).toEqual(PLACE);
    invalid(text, NO_FILTERS, ACCOUNT, new KeyRing('k2', new Map([['k2', after]])));
  });
  test('a new one is sealed with the current key', () => {
    const text = sealCursor(rotated, ACCOUNT, NO_FILTERS, PLACE);
    expect(open(text, NO_FILTERS, ACCOUNT, new KeyRing('k2', new Map([['k2', after]])))).toEqual(PLACE);
    invalid(text, NO_FILTERS, ACCOUNT, old);
  });
});
