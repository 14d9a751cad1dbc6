/**
 * The list: a read model of payments by account, newest first, and its pages (C44–C48). A row holds the state that the decider's `evolve` makes. So a
 * page shows the same as GET.
 */
import { type Bind, type Directory, EVERYTHING, type Scope, scopeCondition } from '#accounts';
import type { Load, LogGate, Position, ProjectionLog, ReadModel, Recorded } from '#eventstore';
import { type Cents, ServiceError, timestamp } from '#kernel';
import { copyInto, type KeyRing, type PersonalKeys, type Queryable } from '#platform';
import { openCursor, type PagePlace, sealCursor } from './cursor.js';
import type { CannotTell } from './gateway/gateway.js';
import { conditionsOf, type ListFilters } from './list-filters.js';
import {
  isVisible,
  keysOfPayment,
  type Means,
  openAttempt,
  openOf,
  payment as decider,
  type Payment,
  PAYMENT_STATUSES,
  statusOf,
} from './payment.js';
import { type PaymentView, paymentView } from './payment.view.js';
import { WAITS_FOR_STAFF } from './staff-work.js';
import { LONG_STREAM_EVENTS, paymentIdOf, paymentEvents } from './stream.js';

export const DEFAULT_PAGE = 25;
export const MAX_PAGE = 100;
/** How long a page waits for the read model to reach the log's head (C48). */
export const LIST_WAIT_MS = 2_000;

// `state` is JSON, stored as text: Postgres knows the size of a text without reading it.
const PAYMENT_LIST_TABLE = `
  create table payment_list (
    payment_id uuid not null, account_id uuid not null, portal_id uuid not null, created_at timestamptz not null, status text not null,
    open_attempt_id uuid, open_since timestamptz, revision bigint not null, state text not null)`;
// Each filter of a page finds its rows as one range for each status. A page without a status merges the ranges of all of them.
const PAYMENT_LIST_INDEXES = `
  alter table payment_list add constraint payment_list_pkey primary key (payment_id);
  create index payment_list_portal on payment_list (account_id, portal_id, status, created_at desc, payment_id desc);
  create index payment_list_status on payment_list (account_id, status, created_at desc, payment_id desc);
  create index payment_list_created on payment_list (created_at);
  create index payment_list_open on payment_list (open_since) where open_since is not null`;

export interface PaymentRow {
  readonly paymentId: string;
  readonly revision: bigint;
  readonly payment: Payment;
}

/**
 * Largest size of the states of one page, in bytes of their JSON. 100 ordinary payments have 200 thousand bytes. Without this limit, a page could
 * have 24 million.
 */
export const PAGE_BYTES = 512 * 1_024;

/** The port to the rows of the list. Postgres and the simulation pass the same contract tests (test/support/list-rows.contract.ts). */
export interface PaymentListRows {
  /** The rows that exist, in any order. */
  read(paymentIds: readonly string[]): Promise<PaymentRow[]>;
  /** Writes rows. An existing row with the same or a later revision stays. Throws for a payment that must have no row. */
  write(rows: readonly PaymentRow[]): Promise<void>;
  /**
   * Rows of an account, newest first. Among equal times, the higher id comes first. `after`: the last row of the page before. A page ends after `limit`
   * rows, or after {@link PAGE_BYTES}, but has at least one row. `hasMore`: further rows follow.
   */
  page(
    accountId: string,
    filters: ListFilters,
    after: PagePlace | null,
    limit: number,
  ): Promise<{ readonly rows: readonly Pick<PaymentRow, 'paymentId' | 'payment'>[]; readonly hasMore: boolean }>;
}

/** Folds events into `rows`, which holds the earlier rows. Skips events that are applied already. */
const advanceRows = (rows: Map<string, PaymentRow>, events: readonly Recorded[]): void => {
  for (const recorded of events) {
    const paymentId = paymentIdOf(recorded.stream);
    const row = rows.get(paymentId);
    if (row && recorded.revision <= row.revision) continue;
    if (recorded.revision !== (row ? row.revision + 1n : 0n))
      throw new Error(`${recorded.stream}: revision ${recorded.revision} does not follow ${row?.revision ?? 'an absent row'}`);
    rows.set(paymentId, {
      paymentId,
      revision: recorded.revision,
      payment: decider.evolve(row?.payment ?? decider.initial, paymentEvents.read(recorded)),
    });
  }
};

/**
 * How long the read model gathers events before a write. A list request in the same process ends this wait (C48). A list request in another process
 * may have to wait for it.
 */
const GATHER_MS = 50;

/** Number of payments that are read and written together. A row of a payment with the largest body has 330 KB. */
const APPLIED_TOGETHER = 100;

/** Applies a batch inside the transaction that moves the checkpoint. */
export const applyPaymentList = async (
  list: Pick<PaymentListRows, 'read' | 'write'>,
  events: readonly Recorded[],
  log?: ProjectionLog,
): Promise<void> => {
  const byPayment = new Map<string, Recorded[]>();
  for (const event of events) {
    const paymentId = paymentIdOf(event.stream);
    const known = byPayment.get(paymentId);
    if (known) known.push(event);
    else byPayment.set(paymentId, [event]);
  }
  const payments = [...byPayment];
  for (let from = 0; from < payments.length; from += APPLIED_TOGETHER) await applyTo(list, payments.slice(from, from + APPLIED_TOGETHER), log);
};

const applyTo = async (
  list: Pick<PaymentListRows, 'read' | 'write'>,
  payments: readonly (readonly [paymentId: string, events: readonly Recorded[]])[],
  log?: ProjectionLog,
): Promise<void> => {
  const known = payments.flatMap(([paymentId, events]) => (events.some(({ revision }) => revision > 0n) ? [paymentId] : []));
  const rows = new Map<string, PaymentRow>();
  if (known.length > 0) for (const row of await list.read(known)) rows.set(row.paymentId, row);
  for (const [, events] of payments) advanceRows(rows, events);
  const visible = [...rows.values()].filter(({ payment }) => isVisible(payment));
  for (const { paymentId, revision } of visible)
    if (revision >= LONG_STREAM_EVENTS) log?.warn({ paymentId }, 'a payment has an unusually long stream');
  if (visible.length > 0) await list.write(visible);
};

/** The number of payments that a load folds in memory at the same time. */
const LOADING_PAYMENTS = 1_000;
const LATE_BATCH = 1_000;
const LATE_EVENTS = 'create table if not exists late_event (number bigint generated always as identity primary key, event json not null)';

/**
 * Payments are folded in memory and copied out, oldest first. Later events of a copied payment are kept in the table `late_event`, and applied after
 * the indexes are made. So memory does not grow with history.
 */
const loadPaymentList: Load = {
  add: async (client, part) => {
    await client.query(LATE_EVENTS);
    const copy = copyInto(client, 'payment_list', COLUMNS);
    const loading = new Map<string, PaymentRow>();
    const copyOut = async (keep: number) => {
      for (const [paymentId, row] of loading) {
        if (loading.size <= keep) return;
        loading.delete(paymentId);
        if (isVisible(row.payment)) await copy.write(paymentListRow(row));
      }
    };
    const late: string[] = [];
    for await (const batch of part) {
      for (const event of batch) {
        if (event.revision > 0n && !loading.has(paymentIdOf(event.stream))) late.push(lateText(event));
        else advanceRows(loading, [event]);
      }
      await copyOut(LOADING_PAYMENTS);
    }
    await copyOut(0);
    await copy.end();
    for (let from = 0; from < late.length; from += LATE_BATCH)
      await client.query('insert into late_event (event) select * from unnest($1::json[])', [late.slice(from, from + LATE_BATCH)]);
    return late.length;
  },

  addLate: async (client) => {
    await client.query(LATE_EVENTS);
    const { rows } = await client.query<{ number: string; event: Recorded & { revision: string; storedAt: string } }>(
      'select number, event from late_event order by number limit $1',
      [LATE_BATCH],
    );
    if (rows.length === 0) {
      await client.query('drop table late_event');
      return 0;
    }
    await applyPaymentList(
      postgresListRows(client),
      rows.map(({ event }) => ({ ...event, revision: BigInt(event.revision), storedAt: new Date(event.storedAt) })),
    );
    await client.query('delete from late_event where number <= $1', [rows.at(-1)!.number]);
    return rows.length;
  },
};

const lateText = (event: Recorded): string => JSON.stringify({ ...event, revision: event.revision.toString() });

export const paymentListModel: ReadModel = {
  name: 'payment-list',
  shape: 7,
  streamPrefixes: ['payment-'],
  gatherMs: GATHER_MS,
  tables: ['payment_list'],
  createTables: PAYMENT_LIST_TABLE,
  createIndexes: PAYMENT_LIST_INDEXES,
  load: loadPaymentList,
  apply: (client, events, log) => applyPaymentList(postgresListRows(client), events, log),
};

const COLUMNS = ['payment_id', 'account_id', 'portal_id', 'created_at', 'status', 'open_attempt_id', 'open_since', 'revision', 'state'];

/** The values of a row in the order of the columns, as text; times in ISO 8601. */
export const paymentListRow = ({ paymentId, revision, payment }: PaymentRow): (string | null)[] => {
  if (!isVisible(payment)) throw new Error('an abandoned stream has no row');
  const open = openOf(payment);
  return [
    paymentId,
    payment.terms.accountId,
    payment.terms.portalId,
    payment.createdAt,
    statusOf(payment),
    open?.attemptId ?? null,
    open?.since ?? null,
    revision.toString(),
    JSON.stringify(payment),
  ];
};

export const postgresListRows = (db: Queryable): PaymentListRows => ({
  read: async (paymentIds) => {
    const { rows } = await db.query<{ payment_id: string; revision: string; state: string }>(
      'select payment_id, revision, state from payment_list where payment_id = any($1::uuid[])',
      [paymentIds],
    );
    return rows.map((row) => ({ paymentId: row.payment_id, revision: BigInt(row.revision), payment: JSON.parse(row.state) as Payment }));
  },

  write: async (rows) => {
    const columns = rows.map(paymentListRow);
    const column = (index: number) => columns.map((row) => row[index]!);
    await db.query({
      name: 'payment-list-write',
      text: `
      insert into payment_list as l (payment_id, account_id, portal_id, created_at, status, open_attempt_id, open_since, revision, state)
      select * from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::timestamptz[], $5::text[], $6::uuid[], $7::timestamptz[], $8::bigint[], $9::text[])
      on conflict (payment_id) do update set status = excluded.status, open_attempt_id = excluded.open_attempt_id, open_since = excluded.open_since,
        revision = excluded.revision, state = excluded.state
      where l.revision < excluded.revision`,
      values: COLUMNS.map((_, index) => column(index)),
    });
  },

  page: async (accountId, filters, after, limit) => {
    const place = after && { ...after, createdAt: new Date(after.createdAt).toISOString() };
    const { text, values } = placesQuery(EVERYTHING, accountId, filters, place, limit + 1);
    const { rows } = await db.query<{ payment_id: string; state: string; found: string }>(
      `select payment_id, state, found from (
         select page.*, l.state, count(*) over () as found, row_number() over newest as number, sum(octet_length(l.state)) over newest as bytes
         from (${text}) as page join payment_list l using (payment_id) window newest as (order by page.created_at desc, page.payment_id desc)) as sized
       where number <= ${limit} and (number = 1 or bytes <= ${PAGE_BYTES}) order by number`,
      values,
    );
    const payments = rows.map((row) => ({ paymentId: row.payment_id, payment: JSON.parse(row.state) as Payment }));
    return { rows: payments, hasMore: rows.length > 0 && rows.length < Number(rows[0]!.found) };
  },
});

/** A payment in the order of the list. `createdAt`: RFC 3339. */
export interface ListPlace {
  readonly createdAt: string;
  readonly id: string;
}

/**
 * SQL for the newest places in scope that match the filters: `payment_id` and `created_at`. It reads `limit` places of each status. `accountId` null:
 * of every account.
 */
const placesQuery = (
  scope: Scope,
  accountId: string | null,
  filters: ListFilters,
  after: ListPlace | null,
  limit: number,
): { text: string; values: unknown[] } => {
  const values: unknown[] = [];
  const bind = (value: unknown) => `$${values.push(value)}`;
  const conditions = conditionsOf(filters, bind);
  if (after !== null) conditions.push(`(created_at, payment_id) < (${bind(after.createdAt)}::timestamptz, ${bind(after.id)}::uuid)`);
  const newest = `order by created_at desc, payment_id desc limit ${bind(limit)}`;
  const places = (where: readonly string[]) =>
    `select payment_id, created_at from payment_list where ${[...where, ...conditions].join(' and ') || 'true'} ${newest}`;
  if (scope === null && accountId === null && filters.portalId === null && filters.status === null) return { text: places([]), values };
  const statuses = `unnest(${bind(filters.status === null ? PAYMENT_STATUSES : [filters.status])}::text[]) as s (status)`;
  const ranges = (owners: string, ...where: readonly string[]) =>
    `select range.payment_id, range.created_at from ${owners} cross join ${statuses}
     cross join lateral (${places(['account_id = a.account_id', ...where, 'status = s.status'])}) as range ${newest}`;
  const accounts = accountId === null ? `${EVERY_ACCOUNT} as a` : `(select ${bind(accountId)}::uuid as account_id) as a`;
  if (scope === null) return { text: ranges(accounts), values };
  const named = accountId === null ? scope.accounts : scope.accounts.filter((id) => id === accountId);
  const byAccount = ranges(`unnest(${bind(named)}::uuid[]) as a (account_id)`);
  const byPortal = ranges(`${accounts} cross join unnest(${bind(scope.portals)}::uuid[]) as p (portal_id)`, 'portal_id = p.portal_id');
  // A payment may be in scope by its account and by its portal. `union` drops the second one.
  return { text: `select payment_id, created_at from ((${byAccount}) union (${byPortal})) as scoped ${newest}`, values };
};

/** SQL for all accounts of the list. It reads one row of each account. */
const EVERY_ACCOUNT = `(
  with recursive known as (
    (select account_id from payment_list order by account_id limit 1)
    union all
    select (select l.account_id from payment_list l where l.account_id > known.account_id order by l.account_id limit 1) from known
    where known.account_id is not null)
  select account_id from known where account_id is not null)`;

/** The newest payments in scope that match the filters. `accountId` null: of every account. `after`: the last place of the page before. */
export const listPlaces = async (
  db: Queryable,
  scope: Scope,
  accountId: string | null,
  filters: ListFilters,
  after: ListPlace | null,
  limit: number,
): Promise<readonly ListPlace[]> => {
  const { text, values } = placesQuery(scope, accountId, filters, after, limit);
  const { rows } = await db.query<{ payment_id: string; created_at: Date }>(text, values);
  return rows.map((row) => ({ createdAt: row.created_at.toISOString(), id: row.payment_id }));
};

/**
 * SQL: true if a payment is in scope. `paymentId` is a column; null in it is out of each scope but {@link EVERYTHING}. It looks the payment up by its
 * key. Of `exists`, Postgres may make a read of all payments in scope.
 */
export const paymentScopeCondition = (scope: Scope, paymentId: string, bind: Bind): string =>
  scope === null
    ? 'true'
    : `coalesce((select ${scopeCondition(scope, 'owned', bind)} from payment_list owned where owned.payment_id = ${paymentId}), false)`;

// ------------------------------------------------------------------------------------------------------------------------------------
// Reading pages.

/**
 * - `running`: a request or recovery works on it.
 * - `waiting`: the gateway shows no trace of it, and can tell only later.
 * - `overdue`: it still shows no trace, and should have been able to tell by now.
 * - `staff`: a person decides. {@link openStaffTasks} counts the tasks.
 */
export const OPEN_STATES = ['running', 'waiting', 'overdue', 'staff'] as const;
export type OpenState = (typeof OPEN_STATES)[number];

/** SQL condition: the gateway shows no trace. A scan that is under way (`in_flight`) does not change the state. */
const SHOWS_NO_TRACE = `t.why in ('not_visible', 'in_flight')`;
/** SQL: the state of an open row `p` of the list, whose try is `t`. `now`: the parameter with the present time. */
const openState = (now: string): string => `
  case when ${WAITS_FOR_STAFF} then 'staff'
       when ${SHOWS_NO_TRACE} and t.until > ${now}::timestamptz then 'waiting'
       when ${SHOWS_NO_TRACE} and t.until <= ${now}::timestamptz then 'overdue'
       else 'running' end`;

const WITH_TRY = 'left join recovery_try t on t.payment_id = p.payment_id and t.attempt_id = p.open_attempt_id';

/** For each state, the number of charges and reversals without an outcome, and the age of the oldest in seconds. 0: there is none. */
export const openAttempts = async (
  db: Queryable,
  nowMs: number,
): Promise<Readonly<Record<OpenState, { readonly count: number; readonly oldestSeconds: number }>>> => {
  const { rows } = await db.query<{ state: OpenState; count: string; oldest: string }>(
    `select ${openState('$1')} as state, count(*) as count, extract(epoch from $1::timestamptz - min(p.open_since)) as oldest
     from payment_list p ${WITH_TRY} where p.open_since is not null group by 1`,
    [timestamp(nowMs)],
  );
  const of = (state: OpenState) => {
    const row = rows.find((one) => one.state === state);
    return { count: Number(row?.count ?? 0), oldestSeconds: Number(row?.oldest ?? 0) };
  };
  return { running: of('running'), waiting: of('waiting'), overdue: of('overdue'), staff: of('staff') };
};

/** An open attempt about which the gateway cannot tell. */
export interface WaitingPayment {
  readonly paymentId: string;
  readonly portalId: string;
  /** Principal and fee of the payment. */
  readonly amountCents: Cents;
  readonly operation: 'charge' | Means;
  /** RFC 3339: since when the attempt is open. */
  readonly since: string;
  readonly state: OpenState;
  /** null: it was not asked yet, or our own store did not answer. */
  readonly why: CannotTell | null;
  /** RFC 3339: by when the gateway should be able to tell, by its earliest answer. null: not known. */
  readonly decidedBy: string | null;
}

/** The open attempts that recovery has tried, oldest first. The list must have reached the end of the log. */
export const waitingPayments = async (db: Queryable, nowMs: number): Promise<readonly WaitingPayment[]> => {
  const { rows } = await db.query<{
    payment_id: string;
    open_since: Date;
    state: OpenState;
    why: CannotTell | null;
    until: Date | null;
    payment: string;
  }>(
    `select p.payment_id, p.open_since, ${openState('$1')} as state, t.why, t.until, p.state as payment
     from payment_list p join recovery_try t on t.payment_id = p.payment_id and t.attempt_id = p.open_attempt_id
     where p.open_since is not null order by p.open_since, p.payment_id`,
    [timestamp(nowMs)],
  );
  return rows.flatMap(({ payment_id: paymentId, open_since: since, state, why, until, payment: folded }) => {
    const payment = JSON.parse(folded) as Payment;
    if (!isVisible(payment)) return [];
    const { portalId, amountCents, serviceFeeCents } = payment.terms;
    const operation = payment.phase === 'charged' ? openAttempt(payment)!.operation : 'charge';
    const times = { since: since.toISOString(), decidedBy: until?.toISOString() ?? null };
    return [{ paymentId, portalId, amountCents: amountCents + serviceFeeCents, operation, state, why, ...times }];
  });
};

export interface PaymentPage {
  readonly payments: readonly PaymentView[];
  readonly nextCursor: string | null;
}

export interface PaymentListPorts {
  readonly rows: Pick<PaymentListRows, 'page' | 'read'>;
  readonly ownLog: LogGate;
  readonly keys: KeyRing;
  readonly directory: Directory;
  readonly personal: Pick<PersonalKeys, 'open'>;
  head(): Promise<Position | null>;
  /** true as soon as the list has reached the position. false: the list did not reach it in time. */
  caughtUpTo(position: Position, timeoutMs: number): Promise<boolean>;
}

/** The page that a request asks for. `cursor` null: the first page. `limit` null: {@link DEFAULT_PAGE}. */
export interface ListRequest {
  readonly accountId: string;
  readonly filters: ListFilters;
  readonly cursor: string | null;
  readonly limit: number | null;
}

export interface ListedPage {
  readonly page: PaymentPage;
  /** `lag`: `0` if the page shows everything that happened before the request, else `unknown`. */
  readonly ledger: { readonly position: Position | null; readonly lag: string };
}

/**
 * Reads one page. Throws PORTAL_ACCESS_DENIED if the portal is unknown or was never granted (C46), and VALIDATION_ERROR if the cursor belongs to
 * another list (C45).
 */
export const listPayments = async (ports: PaymentListPorts, { accountId, filters, cursor, limit }: ListRequest): Promise<ListedPage> => {
  const isOurs = ports.ownLog.incident === null;
  const head = isOurs ? await ports.head() : null;
  if (filters.portalId !== null && (await ports.directory.grant(accountId, filters.portalId)) === null)
    throw new ServiceError('PORTAL_ACCESS_DENIED', 'The portal is unknown or may not be used by this account.');
  const after = cursor === null ? null : openCursor(ports.keys, accountId, filters, cursor);
  // Waits until the list shows the events from before the request. If that takes too long, the headers of the answer say so.
  const complete = isOurs && (head === null || (await ports.caughtUpTo(head, LIST_WAIT_MS)));
  const size = limit ?? DEFAULT_PAGE;
  const { rows, hasMore } = await ports.rows.page(accountId, filters, after, size);
  const opened = await ports.personal.open([...new Set(rows.flatMap(({ payment }) => keysOfPayment(payment)))]);
  const last = hasMore ? rows.at(-1) : undefined;
  return {
    page: {
      payments: rows.map(({ paymentId, payment }) => {
        if (!isVisible(payment)) throw new Error('a row without a payment');
        return paymentView(paymentId, payment, opened);
      }),
      nextCursor:
        last && isVisible(last.payment)
          ? sealCursor(ports.keys, accountId, filters, { createdAt: Date.parse(last.payment.createdAt), id: last.paymentId })
          : null,
    },
    ledger: { position: head, lag: complete ? '0' : 'unknown' },
  };
};
