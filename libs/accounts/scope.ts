/**
 * The scope of an audit key: the accounts and portals that it may read (docs/decisions/0054-scoped-audit-keys.md). What lies outside is absent: it
 * gets the same answer as what does not exist.
 *
 * Each function that reads for an audit key takes a scope, and has no default for it. Functions without a scope answer only keys that read everything.
 */
import { ServiceError } from '#kernel';
import type { Queryable } from '#platform';

/** A payment is in scope if its account or its portal is named. */
export interface ScopeLimits {
  readonly accounts: readonly string[];
  readonly portals: readonly string[];
}

/** null: no limits. Code writes {@link EVERYTHING} for it. */
export type Scope = ScopeLimits | null;

/** The scope of commands of the operator, and of keys without limits. */
export const EVERYTHING: Scope = null;

/** True if a payment of this account on this portal may be read. */
export const isInScope = (scope: Scope, { accountId, portalId }: { readonly accountId: string; readonly portalId: string }): boolean =>
  scope === null || scope.accounts.includes(accountId) || scope.portals.includes(portalId);

/** Adds a value to the parameters of the query. Returns its placeholder, such as `$2`. */
export type Bind = (value: unknown) => string;

/** SQL: true for the rows in scope of a table with the columns `account_id` and `portal_id`. */
export const scopeCondition = (scope: Scope, table: string, bind: Bind): string =>
  scope === null
    ? 'true'
    : `(${table}.account_id = any(${bind(scope.accounts)}::uuid[]) or ${table}.portal_id = any(${bind(scope.portals)}::uuid[]))`;

/** The portals whose reports may be read: those that are named, and those that a named account owns. */
export const portalsInScope = async (db: Queryable, { accounts, portals }: ScopeLimits): Promise<readonly string[]> => {
  const { rows } = await db.query<{ portal_id: string }>(
    `select unnest($2::uuid[]) as portal_id union select portal_id from directory_portal where state ->> 'ownerAccountId' = any($1::text[])`,
    [accounts, portals],
  );
  return rows.map((row) => row.portal_id);
};

/**
 * Refuses a portal in a filter with 404, unless it is named, or a named account owns it or ever had access to it. An unknown portal gets the same
 * answer.
 */
export const refuseForeignPortal = async (db: Queryable, scope: Scope, portalId: string | null): Promise<void> => {
  if (scope === null || portalId === null || scope.portals.includes(portalId)) return;
  // The owner of a portal has a row, too.
  const { rows } = await db.query('select from directory_grant where portal_id = $1 and account_id = any($2::uuid[]) limit 1', [
    portalId,
    scope.accounts,
  ]);
  if (rows.length === 0) throw portalNotFound();
};

/** Unknown and out of scope: one answer. */
export const portalNotFound = () => new ServiceError('VALIDATION_ERROR', 'Portal not found.', {}, { status: 404 });
