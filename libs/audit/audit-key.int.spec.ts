/** Tests audit keys: what their terms may be, what a credential opens, and how keys of version 1 are read. */
import { afterAll, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { EVERYTHING, type Scope } from '#accounts';
import { type EventStore, memoryEventStore, type Recorded } from '#eventstore';
import { systemClock } from '#kernel';
import { createPool, newKeyRing, type Pool, systemIds, transaction } from '#platform';
import { freshDatabase, makeTables } from '../../test/support/postgres.js';
import {
  auditKeyEvents,
  auditKeyModel,
  type AuditKeyPorts,
  authenticateAudit,
  issueAuditKey,
  type KeyTerms,
  listAuditKeys,
  revokeAuditKey,
} from './audit-key.js';

const ACTOR = { type: 'operator', id: 'spec' } as const;
const id = (number: number) => `018f0000-0000-7000-8000-${number.toString(16).padStart(12, '0')}`;
const [ACCOUNT, OTHER, PORTAL] = [id(1), id(2), id(3)];
const FINANCE: KeyTerms = { name: 'Books', role: 'finance', scope: EVERYTHING, personal: false };

let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
let store: EventStore;
let ports: AuditKeyPorts;
beforeAll(async () => {
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'spec', max: 2 });
  await makeTables(pool, auditKeyModel);
});
afterAll(async () => {
  await pool.end();
  await database.drop();
});
beforeEach(async () => {
  await pool.query('truncate audit_key');
  store = memoryEventStore();
  ports = { store, db: pool, clock: systemClock, ids: systemIds(() => systemClock.now()), keys: newKeyRing(), environment: 'sandbox' };
});

const follow = async () => {
  const all: Recorded[] = [];
  for await (const events of store.readAll(null, { streamPrefixes: auditKeyModel.streamPrefixes! })) all.push(...events);
  await transaction(pool, (client) => auditKeyModel.apply(client, all));
};
const issue = async (terms: Partial<KeyTerms>) => {
  const issued = await issueAuditKey(ports, { ...FINANCE, ...terms }, ACTOR);
  await follow();
  return issued;
};
const open = (authorization: string, change: Partial<AuditKeyPorts> = {}) => authenticateAudit([authorization], { ...ports, ...change });

describe('the terms of a key', () => {
  test.each<Partial<KeyTerms>>([
    { role: 'finance', scope: EVERYTHING },
    { role: 'auditor', scope: EVERYTHING, personal: true },
    { role: 'finance', scope: { accounts: [ACCOUNT], portals: [] } },
    { role: 'auditor', scope: { accounts: [], portals: [PORTAL] }, personal: true },
    { role: 'agency', scope: { accounts: [], portals: [PORTAL] } },
    { role: 'agency', scope: { accounts: [ACCOUNT, OTHER], portals: [PORTAL] }, personal: true },
  ])('are those that it opens with, and that the list shows: %j', async (terms) => {
    const { keyId, auditKey } = await issue(terms);
    const { role, scope, personal } = { ...FINANCE, ...terms };
    expect(await open(auditKey)).toEqual({ keyId, role, scope, personal });
    expect(await listAuditKeys(pool)).toEqual([{ keyId, name: 'Books', role, scope, personal, issuedAt: expect.any(String), revokedAt: null }]);
  });
  test('a scope holds each id once, in small letters, in order', async () => {
    const { auditKey } = await issue({ scope: { accounts: [OTHER, ACCOUNT.toUpperCase(), ACCOUNT], portals: [PORTAL, PORTAL] } });
    expect((await open(auditKey)).scope).toEqual({ accounts: [ACCOUNT, OTHER], portals: [PORTAL] });
  });
  const ids = (count: number) => Array.from({ length: count }, (_, index) => id(index));
  test.each<[string, KeyTerms['role'], Scope]>([
    ['A key of an agency needs a portal.', 'agency', EVERYTHING],
    ['A key of an agency needs a portal.', 'agency', { accounts: [ACCOUNT], portals: [] }],
    ['A scope names an account or a portal.', 'finance', { accounts: [], portals: [] }],
    ['accounts of a scope are UUIDs.', 'finance', { accounts: [ACCOUNT, '%'], portals: [] }],
    ['portals of a scope are UUIDs.', 'agency', { accounts: [], portals: ['x'] }],
    ['A scope has at most 100 accounts.', 'auditor', { accounts: ids(101), portals: [] }],
    ['A scope has at most 100 portals.', 'auditor', { accounts: [], portals: ids(101) }],
  ])('%s (%s)', async (message, role, scope) => {
    await expect(issue({ role, scope })).rejects.toMatchObject({ code: 'VALIDATION_ERROR', message });
    expect(await listAuditKeys(pool)).toEqual([]);
  });
  test('a scope may have 100 accounts and 100 portals', async () => {
    const { auditKey } = await issue({ scope: { accounts: ids(100), portals: ids(100) } });
    expect((await open(auditKey)).scope).toEqual({ accounts: ids(100), portals: ids(100) });
  });
  test.each(['', ' ', 'x'.repeat(201), 'a\nb', 'a\u200fb', 'a\u200bb', '\ud800'])('a name like %j is refused', async (name) => {
    await expect(issue({ name })).rejects.toMatchObject({
      code: 'VALIDATION_ERROR',
      message: 'name must have 1 to 200 characters, none of them a control character.',
    });
  });
  test('a name with a card number is refused without repeating it (C9)', async () => {
    await expect(issue({ name: '4242 4242 4242 4242' })).rejects.toMatchObject({
      code: 'VALIDATION_ERROR',
      message: 'name must not hold a card number.',
    });
  });
  test('a name is trimmed', async () => {
    await issue({ name: ` ${'x'.repeat(198)} ` });
    expect((await listAuditKeys(pool)).map(({ name }) => name)).toEqual(['x'.repeat(198)]);
  });
});

describe('a credential', () => {
  const REFUSED = { status: 401, message: 'An audit key is needed.' };
  test('opens with or without its scheme, in any case of letters', async () => {
    const { auditKey, keyId } = await issue({});
    for (const text of [auditKey, `AuditKey ${auditKey}`, `auditkey   ${auditKey}`, ` ${auditKey} `]) expect((await open(text)).keyId).toBe(keyId);
  });
  test('is refused if it is missing, doubled, changed, revoked, of another kind or of another environment', async () => {
    const { auditKey, keyId } = await issue({});
    const other = await issue({ name: 'Other' });
    const [, , lookup, secret] = auditKey.split('_');
    const wrong = [
      '',
      'AuditKey',
      `Bearer ${auditKey}`,
      `x AuditKey ${auditKey}`,
      `${auditKey}x`,
      `x${auditKey}`,
      auditKey.replace('pa_test', 'pa_live'),
      `pa_test_${lookup}_${other.auditKey.split('_')[3]}`,
      `pa_test_${'0'.repeat(16)}_${secret}`,
    ];
    for (const text of wrong) await expect(open(text)).rejects.toMatchObject(REFUSED);
    await expect(authenticateAudit([], ports)).rejects.toMatchObject(REFUSED);
    await expect(authenticateAudit([auditKey, auditKey], ports)).rejects.toMatchObject(REFUSED);
    await expect(open(auditKey, { environment: 'production' })).rejects.toMatchObject(REFUSED);
    await expect(open(auditKey, { keys: newKeyRing() })).rejects.toMatchObject(REFUSED);
    await revokeAuditKey(ports, keyId, ACTOR);
    await follow();
    await expect(open(auditKey)).rejects.toMatchObject(REFUSED);
    expect((await open(other.auditKey)).keyId).toBe(other.keyId);
    expect((await listAuditKeys(pool)).filter(({ revokedAt }) => revokedAt !== null).map((row) => row.keyId)).toEqual([keyId]);
  });
  test('is refused if the row of an agency has lost its scope', async () => {
    const { auditKey } = await issue({ role: 'agency', scope: { accounts: [], portals: [PORTAL] } });
    const finance = await issue({});
    await pool.query('update audit_key set scope = null');
    await expect(open(auditKey)).rejects.toMatchObject(REFUSED);
    expect((await open(finance.auditKey)).scope).toBeNull();
  });
  test('a key is revoked once, and an unknown one is not found', async () => {
    const { keyId } = await issue({});
    const first = await revokeAuditKey(ports, keyId, ACTOR);
    expect(await revokeAuditKey(ports, keyId, ACTOR)).toBe(first);
    await expect(revokeAuditKey(ports, id(9), ACTOR)).rejects.toMatchObject({ status: 404, message: 'There is no such audit key.' });
  });
});

test.each(['finance', 'auditor'] as const)('a %s key of version 1 reads everything, and no personal data', async (role) => {
  const { keyId, auditKey } = await issue({ role, scope: { accounts: [ACCOUNT], portals: [] }, personal: true });
  const recorded: Recorded[] = [];
  for await (const event of store.read(`staff-audit-key-${keyId}`)) recorded.push(event);
  const [{ data, ...issued }] = recorded as [Recorded];
  const { scope: _, personal: __, ...old } = data as Record<string, string>;
  const stored = { ...issued, v: 1, data: old };
  expect(auditKeyEvents.read(stored).data).toEqual({ ...old, scope: null, personal: false });
  await pool.query('truncate audit_key');
  await transaction(pool, (client) => auditKeyModel.apply(client, [stored]));
  expect(await open(auditKey)).toEqual({ keyId, role, scope: EVERYTHING, personal: false });
});
