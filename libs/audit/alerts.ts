/**
 * Alerts: what waits for people too long, and what does not agree. The command line, the audit API and the metrics all call {@link findAlerts}, so they
 * say the same. Each statement reads only what is open, however large the tables are.
 */
import { checkpointOf, type EventStore, NotInTheLog, type Position } from '#eventstore';
import { timestamp } from '#kernel';
import { OPEN_STAFF_TASKS, WAITS_FOR_STAFF } from '#payments';
import type { AlertThresholds, Queryable } from '#platform';
import { ERASURE_STREAMS, erasureIdOf, erasureModel } from '#privacy';
import { OPEN_STATUSES } from '#settlement';

/** Number of items that an alert names, the oldest ones. `count` and `cents` are of all. */
export const MAX_ITEMS = 20;

/** Something that waits, or that does not agree. */
export interface AlertItem {
  /** The kind of thing that `id` names: exception, batch, dispute, payment, account, check, position or erasure. */
  readonly kind: string;
  readonly id: string;
  /** null: the item is no money. */
  readonly cents: number | null;
  /** RFC 3339: since when it waits. Of a dispute: the day on which it is due. null: unknown. */
  readonly at: string | null;
}

export interface Alert {
  readonly name: AlertName;
  /** `page`: look now. `ticket`: look today. */
  readonly severity: 'page' | 'ticket';
  /** Number of items. The alert fires if it is more than 0. */
  readonly count: number;
  /** Sum over all items. null: they are no money. */
  readonly cents: number | null;
  /** `at` of the oldest item. null: there is none, or it is unknown. */
  readonly oldestAt: string | null;
  /** The age at which an item counts, such as `7 d`. Of a dispute: the time before it is due. null: an item counts at once. */
  readonly threshold: string | null;
  readonly items: readonly AlertItem[];
}

export interface AlertPorts {
  readonly store: EventStore;
  readonly db: Queryable;
  /** The thresholds, by alert: days or seconds, as its rule says. */
  readonly thresholds: AlertThresholds;
  /** The present business time: milliseconds since 1970. */
  readonly nowMs: number;
}

/** The `threshold` of a rule is the unit of its setting. null: it has no setting. */
interface Rule extends Pick<Alert, 'severity'> {
  readonly threshold: 'd' | 's' | null;
  readonly find: (ports: AlertPorts) => Promise<Found>;
}
type Found = Pick<Alert, 'count' | 'cents' | 'items'>;

/**
 * Reads items by an SQL statement with the columns `kind`, `id`, `cents` and `at`. `$1` is the present time, and `values` are the parameters after
 * it.
 */
const bySql =
  (sql: string, values: (thresholds: AlertThresholds) => readonly unknown[] = () => []): Rule['find'] =>
  async ({ db, nowMs, thresholds }) => {
    const { rows } = await db.query<{ kind: string; id: string; cents: string | null; at: Date | null; count: string; sum: string | null }>(
      `select kind, id, cents, at, count(*) over () as count, sum(cents) over () as sum from (${sql}) as found
       where $1::timestamptz is not null order by at nulls last, id limit ${MAX_ITEMS}`,
      [timestamp(nowMs), ...values(thresholds)],
    );
    const centsOf = (text: string | null = null) => (text === null ? null : Number(text));
    return {
      count: Number(rows[0]?.count ?? 0),
      cents: centsOf(rows[0]?.sum),
      items: rows.map(({ kind, id, cents, at }) => ({ kind, id, cents: centsOf(cents), at: at?.toISOString() ?? null })),
    };
  };

/** SQL: the failed checks of the last verification passes. `names`: a parameter with the names of checks. */
const failedChecks = (names: string): string =>
  `select 'check' as kind, p.pass || ' ' || (c ->> 'name') as id, null::bigint as cents, p.finished_at as at
   from verify_pass p cross join json_array_elements(p.checks) as c where not (c ->> 'ok')::boolean and c ->> 'name' = any (${names}::text[])`;

/** The events that a scheduled pass did not find sealed are a fault of the seal. Faults of all other checks are drift. */
const SEAL_CHECKS = ['events', 'tiles', 'heads'];
const DRIFT_CHECKS = ['read models', 'journal', 'balances', 'books', 'lines', 'periods'];

/** SQL: what a payment `p` of the list charged or tries to charge, in cents. */
const TOTAL_CENTS = `(p.state::json -> 'terms' ->> 'amountCents')::bigint + (p.state::json -> 'terms' ->> 'serviceFeeCents')::bigint`;

const failedSealChecks = bySql(failedChecks('$2'), () => [SEAL_CHECKS]);

/** The oldest event that is not sealed, if it was stored longer ago on the store's clock than the threshold allows. */
const unsealed = async ({ store, db, thresholds }: AlertPorts): Promise<AlertItem[]> => {
  const { rows } = await db.query<{ position: string; now: Date }>('select position, clock_timestamp() as now from log_state');
  const { position, now } = rows[0]!;
  try {
    for await (const [oldest] of store.readAll((position || null) as Position | null, { max: 1 }))
      return oldest && now.getTime() - oldest.storedAt.getTime() > thresholds.seal * 1_000
        ? [{ kind: 'position', id: oldest.position, cents: null, at: oldest.storedAt.toISOString() }]
        : [];
    return [];
  } catch (error) {
    // The seal has read a log that was longer than this one.
    if (error instanceof NotInTheLog) return [{ kind: 'position', id: position, cents: null, at: null }];
    throw error;
  }
};

/** The oldest erasure that is recorded and not done: its keys, or copies of the data, are still there. */
const pendingErasure: Rule['find'] = async ({ store, db, thresholds }) => {
  const { rows } = await db.query<{ position: string; now: Date }>(
    'select position, clock_timestamp() as now from projection_checkpoint where name = $1',
    [checkpointOf(erasureModel(null))],
  );
  const none = { count: 0, cents: null, items: [] };
  if (!rows[0]) return none;
  const { position, now } = rows[0];
  try {
    for await (const [oldest] of store.readAll((position || null) as Position | null, { max: 1, streamPrefixes: ERASURE_STREAMS }))
      if (oldest && now.getTime() - oldest.storedAt.getTime() > thresholds.erasure_pending * 1_000)
        return {
          count: 1,
          cents: null,
          items: [{ kind: 'erasure', id: erasureIdOf(oldest.stream), cents: null, at: oldest.storedAt.toISOString() }],
        };
  } catch (error) {
    // The log is shorter than it was. That is an incident with an alarm of its own.
    if (!(error instanceof NotInTheLog)) throw error;
  }
  return none;
};

const RULES = {
  exceptions_old: {
    severity: 'ticket',
    threshold: 'd',
    find: bySql(
      `select 'exception' as kind, exception_id::text as id, abs(suspense_cents) as cents, opened_at as at from settlement_case
       where status = any ($2::text[]) and opened_at < $1::timestamptz - $3 * interval '1 day'`,
      ({ exceptions_old }) => [OPEN_STATUSES, exceptions_old],
    ),
  },
  returned_elsewhere: {
    severity: 'ticket',
    threshold: null,
    find: bySql(
      `select 'exception' as kind, exception_id::text as id, null::bigint as cents, opened_at as at from settlement_case
       where kind = 'RETURNED_ELSEWHERE' and status = any ($2::text[])`,
      () => [OPEN_STATUSES],
    ),
  },
  in_transit_old: {
    severity: 'ticket',
    threshold: 'd',
    find: bySql(
      `select 'batch' as kind, gateway || '/' || merchant_account || '/' || batch_id as id, net_cents as cents, closed_at as at from settlement_batch
       where not funded and closed_at < $1::timestamptz - $2 * interval '1 day'`,
      ({ in_transit_old }) => [in_transit_old],
    ),
  },
  // A dispute that is contested waits for the bank.
  dispute_due: {
    severity: 'ticket',
    threshold: 'd',
    find: bySql(
      `select 'dispute' as kind, dispute_id::text as id, disputed_amount_cents as cents, due_date::timestamp at time zone 'UTC' as at from dispute
       where status = 'debited' and due_date <= (($1::timestamptz at time zone 'UTC') + $2 * interval '1 day')::date`,
      ({ dispute_due }) => [dispute_due],
    ),
  },
  unknown_outcome: {
    severity: 'page',
    threshold: 's',
    find: bySql(
      `select 'payment' as kind, p.payment_id::text as id, ${TOTAL_CENTS} as cents, p.open_since as at from payment_list p
       where p.open_since < $1::timestamptz - $2 * interval '1 second' and not (${WAITS_FOR_STAFF})`,
      ({ unknown_outcome }) => [unknown_outcome],
    ),
  },
  suspense: {
    severity: 'ticket',
    threshold: null,
    find: bySql(
      `select 'account' as kind, account as id, abs(debit_cents - credit_cents)::bigint as cents, null::timestamptz as at from journal_balance
       where (account like 'liabilities:suspense:%' or account like 'assets:dispute_suspense:%') and debit_cents <> credit_cents`,
    ),
  },
  staff_task: {
    severity: 'ticket',
    threshold: null,
    find: bySql(
      `select 'payment' as kind, t.payment_id::text as id, ${TOTAL_CENTS} as cents, min(t.raised_at) as at
       from (${OPEN_STAFF_TASKS}) as t left join payment_list p using (payment_id) group by t.payment_id, p.state`,
    ),
  },
  drift: {
    severity: 'page',
    threshold: null,
    find: bySql(
      `select 'payment' as kind, payment_id::text as id, null::bigint as cents, min(found_at) as at from drift_difference
       where kind <> 'balance_before' group by payment_id union all ${failedChecks('$2')}`,
      () => [DRIFT_CHECKS],
    ),
  },
  balances: {
    severity: 'ticket',
    threshold: null,
    find: bySql(
      `select 'payment' as kind, payment_id::text as id, null::bigint as cents, found_at as at from drift_difference where kind = 'balance_before'`,
    ),
  },
  seal: {
    severity: 'page',
    threshold: 's',
    find: async (ports) => {
      const late = await unsealed(ports);
      const failed = await failedSealChecks(ports);
      return { count: late.length + failed.count, cents: null, items: [...late, ...failed.items].slice(0, MAX_ITEMS) };
    },
  },
  erasure_pending: { severity: 'ticket', threshold: 's', find: pendingErasure },
} as const satisfies Readonly<Record<string, Rule>>;

export type AlertName = keyof typeof RULES;
export const ALERT_NAMES = Object.keys(RULES) as readonly AlertName[];

/** Every alert, also those that do not fire. */
export const findAlerts = async (ports: AlertPorts): Promise<readonly Alert[]> => {
  const alerts: Alert[] = [];
  // One after the other: a caller has one connection.
  for (const name of ALERT_NAMES) {
    const { severity, threshold: unit, find }: Rule = RULES[name];
    const { count, cents, items } = await find(ports);
    const threshold = unit === null ? null : `${ports.thresholds[name as keyof AlertThresholds]} ${unit}`;
    // The items are ordered by time, except that the oldest unsealed event comes first.
    const times = items.flatMap(({ at }) => at ?? []).sort();
    alerts.push({ name, severity, count, cents, oldestAt: times[0] ?? null, threshold, items });
  }
  return alerts;
};
