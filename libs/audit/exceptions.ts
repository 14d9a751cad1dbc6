/** Settlement exceptions as an audit key may see them. */
import { collect, type Queryable } from '#platform';
import { type ExceptionRow, exceptionRows } from '#settlement';
import type { AuditCaller } from './audit-key.js';

/** `null`: this key must not see it. */
type ShownException = { readonly [Field in keyof ExceptionRow]: ExceptionRow[Field] | null };

/** A batch may hold lines of others. So the number of a line counts them, and a line on the wrong merchant account names the account of another. */
const withinScope = (row: ShownException): ShownException => ({
  ...row,
  line: null,
  ...(row.kind === 'WRONG_ACCOUNT' && { merchantAccount: null, batchId: null }),
});

/** Reasons are notes of staff, who may name other agencies in them. */
const withoutStaff = (row: ShownException): ShownException => ({ ...row, assignedTo: null, changedBy: null, reason: null });

/** Exceptions of one status whose payment is in scope, oldest first. */
export const exceptionsFor = async (
  db: Queryable,
  { role, scope }: Pick<AuditCaller, 'role' | 'scope'>,
  query: Parameters<typeof exceptionRows>[2],
): Promise<ShownException[]> => {
  const rows: ShownException[] = await collect(exceptionRows(db, scope, query));
  const inside = scope === null ? rows : rows.map(withinScope);
  return role === 'agency' ? inside.map(withoutStaff) : inside;
};
