/** Tests the scope of audit keys: the function and the SQL condition agree, and portals in filters and reports are those of the scope. */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { createPool, type Pool } from '#platform';
import { freshDatabase, makeTables } from '../../test/support/postgres.js';
import { directoryModel } from './directory.js';
import { EVERYTHING, isInScope, portalNotFound, portalsInScope, refuseForeignPortal, type Scope, scopeCondition } from './scope.js';

const id = (number: number) => `018f0000-0000-7000-8000-00000000000${number}`;
const [OWNER, PAYER, STRANGER] = [id(1), id(2), id(3)];
const [OWNED, SHARED, FOREIGN] = [id(4), id(5), id(6)];
const ACCOUNTS = [OWNER, PAYER, STRANGER];
const PORTALS = [OWNED, SHARED, FOREIGN];

const SCOPES: readonly Scope[] = [
  EVERYTHING,
  { accounts: [], portals: [] },
  { accounts: [OWNER], portals: [] },
  { accounts: [OWNER, PAYER], portals: [] },
  { accounts: [], portals: [SHARED] },
  { accounts: [], portals: [OWNED, SHARED] },
  { accounts: [PAYER], portals: [OWNED] },
];

let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
beforeAll(async () => {
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'spec', max: 2 });
  await makeTables(pool, directoryModel);
  await pool.query('create table paid (account_id uuid, portal_id uuid)');
  for (const accountId of ACCOUNTS) for (const portalId of PORTALS) await pool.query('insert into paid values ($1, $2)', [accountId, portalId]);
  await pool.query('insert into paid values (null, null)');
  // OWNER owns OWNED and SHARED. PAYER had access to SHARED. STRANGER owns FOREIGN.
  const owners = { [OWNED]: OWNER, [SHARED]: OWNER, [FOREIGN]: STRANGER };
  for (const [portalId, ownerAccountId] of Object.entries(owners)) {
    await pool.query('insert into directory_portal (portal_id, revision, state) values ($1, 0, $2)', [portalId, { ownerAccountId }]);
    await grant(ownerAccountId, portalId, true);
  }
  await grant(PAYER, SHARED, false);
});
afterAll(async () => {
  await pool.end();
  await database.drop();
});

const grant = (accountId: string, portalId: string, isActive: boolean) =>
  pool.query('insert into directory_grant (account_id, portal_id, active, once_granted) values ($1, $2, $3, true)', [accountId, portalId, isActive]);

/** The rows of `paid` that a scope may read, by SQL. `before`: a parameter that the statement has already. */
const readBy = async (scope: Scope, before: readonly unknown[] = []) => {
  const values = [...before];
  const condition = scopeCondition(scope, 'p', (value) => `$${values.push(value)}`);
  const { rows } = await pool.query<{ account_id: string | null; portal_id: string | null }>(
    `select account_id, portal_id from paid p where ${condition}${before.map((_, index) => ` and $${index + 1}::int = 7`).join('')} order by 1, 2`,
    values,
  );
  return rows.map((row) => `${row.account_id} ${row.portal_id}`);
};

describe('a payment is in scope by its account or its portal', () => {
  test('named, one by one', () => {
    const payment = { accountId: PAYER, portalId: SHARED };
    expect(isInScope(EVERYTHING, payment)).toBe(true);
    expect(isInScope({ accounts: [PAYER], portals: [] }, payment)).toBe(true);
    expect(isInScope({ accounts: [], portals: [SHARED] }, payment)).toBe(true);
    expect(isInScope({ accounts: [SHARED], portals: [PAYER] }, payment)).toBe(false);
    expect(isInScope({ accounts: [OWNER], portals: [OWNED, FOREIGN] }, payment)).toBe(false);
    expect(isInScope({ accounts: [], portals: [] }, payment)).toBe(false);
  });
  test.each(SCOPES)('function and SQL agree: %j', async (scope) => {
    const all = ACCOUNTS.flatMap((accountId) => PORTALS.map((portalId) => ({ accountId, portalId })));
    const expected = all.filter((payment) => isInScope(scope, payment)).map(({ accountId, portalId }) => `${accountId} ${portalId}`);
    // A row that names neither belongs to nobody.
    if (scope === EVERYTHING) expected.push('null null');
    expect(await readBy(scope)).toEqual(expected);
    expect(await readBy(scope, [7])).toEqual(expected);
  });
});

describe('portals', () => {
  test('a report shows those that are named, and those that a named account owns; access alone is not enough', async () => {
    const of = async (accounts: string[], portals: string[]) => [...(await portalsInScope(pool, { accounts, portals }))].sort();
    expect(await of([], [])).toEqual([]);
    expect(await of([], [FOREIGN])).toEqual([FOREIGN]);
    expect(await of([OWNER], [])).toEqual([OWNED, SHARED]);
    expect(await of([OWNER], [SHARED, FOREIGN])).toEqual([OWNED, SHARED, FOREIGN]);
    expect(await of([PAYER], [])).toEqual([]);
    expect(await of([OWNER, STRANGER], [])).toEqual([OWNED, SHARED, FOREIGN]);
  });
  test('a filter may name those that are named, owned, or were ever open to a named account', async () => {
    const isFound = async (scope: Scope, portalId: string | null) =>
      refuseForeignPortal(pool, scope, portalId).then(
        () => true,
        (error: unknown) => {
          expect(error).toEqual(portalNotFound());
          return false;
        },
      );
    expect(portalNotFound()).toMatchObject({ code: 'VALIDATION_ERROR', status: 404, message: 'Portal not found.' });
    expect(await isFound(EVERYTHING, FOREIGN)).toBe(true);
    expect(await isFound({ accounts: [], portals: [OWNED] }, null)).toBe(true);
    expect(await isFound({ accounts: [], portals: [OWNED] }, OWNED)).toBe(true);
    expect(await isFound({ accounts: [], portals: [OWNED] }, SHARED)).toBe(false);
    expect(await isFound({ accounts: [OWNER], portals: [] }, SHARED)).toBe(true);
    expect(await isFound({ accounts: [PAYER], portals: [] }, SHARED)).toBe(true);
    expect(await isFound({ accounts: [PAYER, OWNER], portals: [] }, FOREIGN)).toBe(false);
    expect(await isFound({ accounts: [PAYER], portals: [OWNED] }, id(9))).toBe(false);
  });
});
