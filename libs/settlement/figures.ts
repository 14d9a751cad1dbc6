/** Figures of settlement for metrics. Each query reads only open or newest rows, however large the tables are. */
import { timestamp } from '#kernel';
import type { Queryable } from '#platform';
import { EXCEPTION_KINDS, type ExceptionKind, OPEN_STATUSES } from './exception.js';

export interface ExceptionFigure {
  readonly kind: ExceptionKind;
  readonly count: number;
  /** Age of the oldest. 0: there is none. */
  readonly oldestSeconds: number;
}

/** Exceptions that nobody has resolved yet, one figure for each kind. */
export const exceptionFigures = async (db: Queryable, nowMs: number): Promise<readonly ExceptionFigure[]> => {
  const { rows } = await db.query<{ kind: string; count: string; oldest: string }>(
    `select kind, count(*) as count, extract(epoch from $2::timestamptz - min(opened_at)) as oldest from settlement_case where status = any ($1::text[]) group by kind`,
    [OPEN_STATUSES, timestamp(nowMs)],
  );
  const found = new Map(rows.map((row) => [row.kind, row]));
  return EXCEPTION_KINDS.map((kind) => ({ kind, count: Number(found.get(kind)?.count ?? 0), oldestSeconds: Number(found.get(kind)?.oldest ?? 0) }));
};

export interface BatchFigures {
  /** Age of the newest batch that was read completely from a processor, of all merchant accounts. null: there is none. */
  readonly lastBatchSeconds: number | null;
  /** Age of the oldest charge or refund that moved money after that batch was recorded, and is in no batch. 0: there is none. */
  readonly waitingSeconds: number;
}

export const batchFigures = async (db: Queryable, nowMs: number): Promise<BatchFigures> => {
  const { rows } = await db.query<{ last: string | null; waiting: string | null }>(
    `with last as (
       select max(b.recorded_at) as at from gateway_account a cross join lateral (
         select recorded_at from settlement_batch b
         where b.gateway = a.gateway and b.merchant_account = a.merchant_account and b.listed_position is not null
         order by b.listed_position desc limit 1) b)
     select extract(epoch from $1::timestamptz - last.at) as last,
       (select extract(epoch from $1::timestamptz - t.moved_at) from gateway_transaction t
        where t.settled_batch_id is null and not t.rejected and t.moved_at is not null and t.amount_cents > t.voided_cents
          and t.moved_at > coalesce((select at from last), '-infinity')
        order by t.moved_at limit 1) as waiting
     from last`,
    [timestamp(nowMs)],
  );
  const { last = null, waiting = null } = rows[0] ?? {};
  return { lastBatchSeconds: last === null ? null : Number(last), waitingSeconds: Number(waiting ?? 0) };
};
