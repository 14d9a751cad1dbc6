/** The filters of the list: their types and SQL conditions. The HTTP edge parses them. A cursor is bound to the filters that are set. */
import type { Bind } from '#accounts';
import type { PaymentStatus } from './payment.js';

/** A filter that is null accepts every payment. */
export interface ListFilters {
  readonly portalId: string | null;
  readonly status: PaymentStatus | null;
  /** Milliseconds since the epoch, inclusive, on createdAt. */
  readonly from: number | null;
  /** Milliseconds since the epoch, exclusive, on createdAt. */
  readonly to: number | null;
}

/** Every payment of an account. */
export const NO_FILTERS: ListFilters = { portalId: null, status: null, from: null, to: null };

/** The status has no condition here: a page reads each status in its own range of an index. */
type Conditional = Omit<ListFilters, 'status'>;

const CONDITIONS: { readonly [Name in keyof Conditional]: (value: NonNullable<Conditional[Name]>, bind: Bind) => string } = {
  portalId: (portalId, bind) => `portal_id = ${bind(portalId)}`,
  from: (from, bind) => `created_at >= ${bind(new Date(from).toISOString())}::timestamptz`,
  to: (to, bind) => `created_at < ${bind(new Date(to).toISOString())}::timestamptz`,
};

/** The filters that are set. */
export const setFilters = (filters: ListFilters): Partial<ListFilters> =>
  Object.fromEntries(Object.entries(filters).filter(([, value]) => value !== null));

/** The SQL conditions of all filters except the status. */
export const conditionsOf = (filters: Conditional, bind: Bind): string[] => {
  const condition = <Name extends keyof Conditional>(name: Name): string[] => {
    const value = filters[name];
    return value === null ? [] : [CONDITIONS[name](value, bind)];
  };
  return (Object.keys(CONDITIONS) as (keyof Conditional)[]).flatMap(condition);
};
