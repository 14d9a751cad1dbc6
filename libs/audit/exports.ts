/**
 * Reports for finance staff, reconciliation jobs and auditors, as pages of rows. A report needs constant memory.
 *
 * Each page has an `after`, the key of its last row. A query with this `after` begins with the next row. `from` (inclusive) and `to` (exclusive)
 * limit the rows by the report's own time column. Reports over the journal also take `asOf`.
 */
import { type Bind, portalsInScope, type Scope, scopeCondition } from '#accounts';
import type { EventStore, ReadModel } from '#eventstore';
import { AuthenticationError, CLOSED, isDay, type Reveal, sumCents } from '#kernel';
import {
  type Charged,
  isVisible,
  keysOfPayment,
  type Payment,
  paymentListModel,
  paymentScopeCondition,
  reasonOf,
  returnStatus,
  remaining,
  staffWorkModel,
  statusOf,
  type VisiblePayment,
} from '#payments';
import { paymentRegisterModel } from '#settlement';
import type { Pool } from '#platform';
import {
  account as chart,
  type AccountBalance,
  balancesBefore,
  type Cell,
  journalModel,
  lineRegisterModel,
  type Movement,
  movements,
  movementsByDay,
  type Rule,
} from '#ledger';
import { CAUSE_COLUMN, DEPOSIT_COLUMNS, depositPages, LINE_ITEM_COLUMNS, lineItemPages } from './line-reports.js';
import { afterOf, type Column, keyOf, notAPlace, PAGE_ROWS, pagesByKey, parsed, SPELLED } from './pages.js';
import { fillDescriptions, fillDisputeReasons, fillStaffReasons, type FillTexts, type OpensKeys } from './texts.js';
import type { TieRow } from './tie.js';

export interface ReportQuery {
  /** RFC 3339; null: unbounded. */
  readonly from: string | null;
  readonly to: string | null;
  /** Only for reports over the journal: entries that were recorded later do not count. null: all entries count. */
  readonly asOf: string | null;
  /** `after` of the last page that was read. null: begin with the first row. */
  readonly after: string | null;
  /** Only for reports over the line-item register: events up to this position of the log count. Absent: all that the read models have applied. */
  readonly until?: string | null;
}

export interface ReportPorts {
  readonly store: EventStore;
  readonly db: Pool;
  /** Opens personal data. Absent: columns of personal data are empty. */
  readonly personal?: OpensKeys;
}

export interface ReportPage {
  readonly rows: readonly (readonly Cell[])[];
  /** Key of the page's last row. A query with this `after` begins with the next row. null: the page has no row in scope. */
  readonly after: string | null;
  /** Only on the last page of a report over the line-item register: the log position up to which it is complete, and its tie to the journal. */
  readonly until?: string;
  readonly tie?: readonly TieRow[];
}

interface Report {
  readonly title: string;
  readonly columns: readonly string[];
  /** A column more in the answer to a query with `after`. Such an answer has a heading of its own. */
  readonly changesColumn?: string;
  /** Columns of cents whose sum is meaningful. */
  readonly totals: readonly string[];
  /**
   * The report is complete up to the checkpoint of this read model. A report without a read model (keys, deliveries) names the journal.
   */
  readonly projection: ReadModel;
  /** Another read model that the report is compared with. It is complete up to the checkpoint that is less. */
  readonly comparedWith?: ReadModel;
  /** Only for auditors. */
  readonly auditorsOnly?: true;
  /** true: a scope with limits gets the rows in scope. false: such a scope gets 403. */
  readonly isScoped: boolean;
  /** Places of the report are positions of the log, which any key may name. Absent: a place is good only for the key that it was given to. */
  readonly byPosition?: true;
  pages(ports: ReportPorts, scope: Scope, query: ReportQuery): AsyncIterable<ReportPage>;
}

/** The number of rows in a page for a scope with limits. A page reads this many rows of the time of the report, and shows those in scope. */
const SCANNED_ROWS = 1_000;
const pageRows = (scope: Scope): number => (scope === null ? PAGE_ROWS : SCANNED_ROWS);

type Key = readonly [column: string, type: 'text' | 'uuid' | 'date' | 'timestamptz' | 'bigint' | 'int'];

interface Source {
  /** The table of the rows. Columns name it `t`. */
  readonly table: string;
  /** `$1` is from, `$2` is to, and `$3` is asOf. */
  readonly where: string;
  /** Joins that add columns, but neither add nor remove rows. */
  readonly joined?: string;
  /** SQL: true for a row in scope. null: keys with limits may not read the report. */
  readonly inScope: ((scope: Scope, bind: Bind) => string) | null;
}

/** The row belongs to the payment that it names. */
const BY_PAYMENT = (scope: Scope, bind: Bind): string => paymentScopeCondition(scope, 't.payment_id', bind);

/**
 * SQL for a page of a table, in the order of its columns `key`. Only the first of them needs an index: rows that agree in it are read together and
 * sorted afterwards. If the index had to order all key columns, Postgres might sort the whole rest of the report for each page.
 */
const pageOf = (select: string, { table, where, joined = '' }: Omit<Source, 'inScope'>, key: readonly string[], rows: number): string =>
  `select ${select} from (select * from ${table} where ${where} order by ${key[0]} fetch first ${rows} rows with ties) as t ${joined}
   order by ${key.map((name) => `t.${name}`).join(', ')}`;

/** A report from one SQL statement for each page, sorted by the columns of `key`, which together are unique. */
const sqlReport = (title: string, columns: readonly Column[], key: readonly Key[], source: Source, extra: Partial<Report> = {}): Report => ({
  title,
  columns: columns.map(([name]) => name),
  totals: columns.filter(([name, kind]) => kind === 'cents' && name.endsWith('_cents')).map(([name]) => name),
  projection: journalModel,
  isScoped: source.inScope !== null,
  pages: async function* ({ db }, scope, { from, to, asOf, after }) {
    const beyond = key.map(([, type], index) => `($4::text[])[${index + 1}]::${type}`);
    const names = key.map(([name]) => name);
    const read = async (place: readonly string[] | null) => {
      const values: unknown[] = [from ?? '-infinity', to ?? 'infinity', asOf ?? 'infinity', place];
      const limits = scope && source.inScope!(scope, (value) => `$${values.push(value)}`);
      // Of a row out of scope, only the key is read, since the next page begins there. Without `offset 0`, each column would evaluate the condition.
      const joined = `${source.joined ?? ''} ${limits === null ? '' : `cross join lateral (select ${limits} as is_inside offset 0) as seen`}`;
      const shown = columns.map(([, kind, sql]) =>
        limits === null ? SPELLED[kind](sql) : `case when seen.is_inside then ${SPELLED[kind](sql)} end`,
      );
      const select = [...shown, ...names.map((name) => `t.${name}::text`), limits === null ? `'true'` : 'seen.is_inside::text'].join(', ');
      const later = place === null ? '$4::text[] is null' : `(${names.join(', ')}) > (${beyond.join(', ')})`;
      const { rows } = await db.query<(string | null)[]>({
        text: pageOf(select, { ...source, joined, where: `${source.where} and ${later}` }, names, pageRows(scope)),
        values,
        rowMode: 'array',
      });
      return rows;
    };
    const keyOfRow = (row: readonly (string | null)[]) => row.slice(columns.length, columns.length + key.length) as string[];
    for await (const rows of pagesByKey(after === null ? null : keyOf(after, key.length), keyOfRow, read, pageRows(scope))) {
      const inside = rows.filter((row) => row.at(-1) === 'true');
      yield {
        rows: inside.map((row) => columns.map(([, kind], index) => parsed(kind, row[index]!))),
        after: inside.length === 0 ? null : afterOf(keyOfRow(inside.at(-1)!)),
      };
    }
  },
  ...extra,
});

/** A report over folded payments, oldest first. `rowsOf` returns the rows of one payment. */
const paymentReport = (
  title: string,
  columns: readonly string[],
  totals: readonly string[],
  where: string,
  rowsOf: (id: string, payment: VisiblePayment, reveal: Reveal) => readonly Cell[][],
): Report => ({
  title,
  columns,
  totals,
  projection: paymentListModel,
  isScoped: true,
  pages: async function* ({ db, personal }, scope, { from, to, after }) {
    const rowsInPage = pageRows(scope);
    const read = async (place: readonly string[] | null) => {
      // A page has about `rowsInPage` payments, also if they have no rows. So each statement is short. First only times are read, to find where the page
      // ends. With a plain limit, Postgres read all payments of the day for each page and sorted them.
      const values: unknown[] = [place?.[0] ?? from ?? '-infinity', to ?? 'infinity', place?.[1] ?? null];
      const inScope = scopeCondition(scope, 't', (value) => `$${values.push(value)}`);
      const { rows } = await db.query<[created: string, id: string, state: Payment | null]>({
        text: `
          select t.created_at::text, t.payment_id, case when ${where} and ${inScope} then t.state::json end from payment_list t
          where t.created_at >= $1::timestamptz and t.created_at < $2::timestamptz
            and ${place === null ? '$3::uuid is null' : '(t.created_at, t.payment_id) > ($1::timestamptz, $3::uuid)'}
            and t.created_at <= coalesce(
              (select created_at from payment_list where created_at > $1::timestamptz and created_at < $2::timestamptz
               order by created_at offset ${rowsInPage - 1} limit 1), 'infinity')
          order by t.created_at, t.payment_id`,
        values,
        rowMode: 'array',
      });
      return rows;
    };
    const keyOfRow = ([created, id]: readonly [string, string, Payment | null]) => [created, id];
    for await (const rows of pagesByKey(after === null ? null : keyOf(after, 2), keyOfRow, read, rowsInPage)) {
      // A key with limits must not get the id of a payment out of scope as its place.
      const last = scope === null ? rows.at(-1) : rows.findLast(([, , state]) => state !== null);
      const reveal = personal ? await personal.open([...new Set(rows.flatMap(([, , state]) => (state ? keysOfPayment(state) : [])))]) : CLOSED;
      yield {
        rows: rows.flatMap(([, id, state]) => (state && isVisible(state) ? rowsOf(id, state, reveal) : [])),
        after: last ? afterOf(keyOfRow(last)) : null,
      };
    }
  },
});

/** The report with a column of personal data, which is empty until a reader opens it. */
const withTexts = (report: Report, fill: FillTexts): Report => ({
  ...report,
  pages: async function* (ports, scope, query) {
    const { store, personal } = ports;
    for await (const page of report.pages(ports, scope, query))
      yield personal && page.rows.length > 0 ? { ...page, rows: await fill({ store, personal }, report.columns, page.rows) } : page;
  },
});

const leftOf = (payment: Payment) => (payment.phase === 'charged' ? remaining(payment) : { principal: 0, fee: 0 });
const batchesOf = ({ legs }: Charged): string => {
  const batches: string[] = [];
  for (const { settledBatchId: batch } of legs) if (batch !== null && !batches.includes(batch)) batches.push(batch);
  return batches.join(' ');
};

/** The portals whose rows a report shows. null: those of all portals. */
type Portals = readonly string[] | null;

/**
 * A report over sums of the books. It has few rows: at most one for each account and day. `key`: what the first columns are, which sort the rows and
 * are unique together. `isScoped` false: `rowsOf` ignores its portals.
 */
const booksReport = (
  title: string,
  columns: readonly string[],
  key: readonly ('day' | 'text')[],
  isScoped: boolean,
  rowsOf: (db: Pool, query: ReportQuery, portals: Portals) => Promise<readonly (readonly Cell[])[]>,
): Report => ({
  title,
  columns,
  totals: columns.slice(key.length),
  projection: journalModel,
  isScoped,
  pages: async function* ({ db }, scope, query) {
    const after = query.after === null ? null : keyOf(query.after, key.length);
    if (after && key[0] === 'day' && !isDay(after[0]!)) throw notAPlace();
    const place = after && after.join('\t');
    const portals = scope && (await portalsInScope(db, scope));
    const keyed = (await rowsOf(db, query, portals)).map((row) => ({ row, name: row.slice(0, key.length).join('\t') }));
    const left = keyed.filter(({ name }) => place === null || name > place).sort((one, other) => (one.name < other.name ? -1 : 1));
    for (let from = 0; from < left.length; from += PAGE_ROWS) {
      const page = left.slice(from, from + PAGE_ROWS);
      yield { rows: page.map(({ row }) => row), after: afterOf(page.at(-1)!.row.slice(0, key.length).map(String)) };
    }
  },
});

/** The name of the portal in the name of its account. */
const portalOf = (account: string): string => account.split(':')[2] ?? '';

/** Rules of the books, by the column in which their movements count. */
type Columns = Readonly<Record<string, readonly Rule[]>>;
const FEE_COLUMNS: Columns = { charged: ['R2'], voided: ['R3'], refunded: ['R8'] };
const PAYABLE_COLUMNS: Columns = {
  charged: ['R1'],
  returned: ['R3', 'R7'],
  disputed: ['R11', "R12'", "R12''"],
  rejected: ['R14'],
  funded: ["R6'"],
  remitted: ['R20'],
  adjusted: ['R16', 'R17'],
};

/** The credits less the debits of movements, by the columns of their rules, in the order of the columns. The last sum is of all other rules. */
const byColumns = (moved: readonly Movement[], columns: Columns): number[] => {
  const rules = Object.values(columns);
  const sums = [...rules.map(() => 0), 0];
  for (const { rule, debitCents, creditCents } of moved) {
    const column = rules.findIndex((ones) => ones.includes(rule as Rule));
    sums[column < 0 ? rules.length : column]! += creditCents - debitCents;
  }
  return sums;
};

const groupedBy = <Row>(rows: readonly Row[], nameOf: (row: Row) => string): Map<string, Row[]> => {
  const groups = new Map<string, Row[]>();
  for (const row of rows) {
    const group = groups.get(nameOf(row));
    if (group) group.push(row);
    else groups.set(nameOf(row), [row]);
  }
  return groups;
};

const sumOf = (cents: readonly number[]): number => sumCents(cents, (one) => one);

const feeAccounts = (portals: Portals): string[] =>
  portals === null ? ['revenue:%'] : portals.flatMap((portal) => [chart.serviceFee(portal), chart.serviceFeeRefunded(portal)]);

export const feeRows = async (db: Pool, query: ReportQuery, portals: Portals): Promise<Cell[][]> => {
  const groups = groupedBy(await movementsByDay(db, query, feeAccounts(portals)), ({ day, account }) => `${day}\t${portalOf(account)}`);
  return [...groups].map(([name, moved]) => {
    const sums = byColumns(moved, FEE_COLUMNS);
    return [...name.split('\t'), ...sums, sumOf(sums)];
  });
};

const agencyAccounts = (portals: Portals): string[] => (portals === null ? ['liabilities:agency:%'] : portals.map((portal) => chart.payable(portal)));

export const payableRows = async (db: Pool, query: ReportQuery, portals: Portals): Promise<Cell[][]> => {
  const accounts = agencyAccounts(portals);
  const opening = query.from === null ? [] : await balancesBefore(db, query.from, query.asOf, accounts);
  const moved = groupedBy(await movements(db, query, accounts), ({ account }) => portalOf(account));
  const before = groupedBy(opening, ({ account }) => portalOf(account));
  return [...new Set([...before.keys(), ...moved.keys()])].map((portal) => {
    const begin = sumCents(before.get(portal) ?? [], ({ debitCents, creditCents }) => creditCents - debitCents);
    const sums = byColumns(moved.get(portal) ?? [], PAYABLE_COLUMNS);
    // No other rule moves these accounts. If one did, its cents would stand in the closing balance only.
    return [portal, begin, ...sums.slice(0, -1), begin + sumOf(sums)];
  });
};

/** The rows of a trial balance: the balances before a period, and what its entries moved. */
export const trialRows = (opening: readonly AccountBalance[], movedBy: readonly AccountBalance[]): Cell[][] => {
  const before = new Map(opening.map(({ account, debitCents, creditCents }) => [account, debitCents - creditCents]));
  const moved = groupedBy(movedBy, ({ account }) => account);
  return [...new Set([...before.keys(), ...moved.keys()])].map((account) => {
    const [begin, ones] = [before.get(account) ?? 0, moved.get(account) ?? []];
    const [debit, credit] = [sumCents(ones, ({ debitCents }) => debitCents), sumCents(ones, ({ creditCents }) => creditCents)];
    return [account, begin, debit, credit, begin + debit - credit];
  });
};

export const REPORTS = {
  payments: paymentReport(
    'Payments register',
    ['payment_id', 'created_at', 'account_id', 'portal_id', 'reference_id', 'status', 'amount_cents', 'service_fee_cents', 'captured_cents', 'returned_cents', 'remaining_cents', 'confirmation_number', 'batch_ids', 'brand', 'last4', 'fee_version', 'updated_at'], // prettier-ignore
    ['amount_cents', 'service_fee_cents', 'captured_cents', 'returned_cents', 'remaining_cents'],
    'true',
    (id, payment) => {
      const { terms } = payment;
      const left = leftOf(payment);
      const captured = payment.phase === 'charged' ? terms.amountCents + terms.serviceFeeCents : 0;
      return [
        [
          id,
          payment.createdAt,
          terms.accountId,
          terms.portalId,
          terms.referenceId,
          statusOf(payment),
          terms.amountCents,
          terms.serviceFeeCents,
          captured,
          captured - left.principal - left.fee,
          left.principal + left.fee,
          payment.phase === 'charged' ? payment.confirmationNumber : null,
          payment.phase === 'charged' ? batchesOf(payment) : null,
          terms.paymentMethod.brand,
          terms.paymentMethod.last4,
          terms.feeVersion,
          payment.updatedAt,
        ],
      ];
    },
  ),
  transactions: sqlReport(
    'Transaction register: one row per gateway transaction and leg',
    [
      ['ref', 'text', 'ref'],
      ['transaction_id', 'text', 'transaction_id'],
      ['gateway', 'text', 'gateway'],
      ['merchant_account', 'text', 'merchant_account'],
      ['payment_id', 'text', 'payment_id'],
      ['leg', 'text', 'leg'],
      ['operation', 'text', 'op'],
      ['amount_cents', 'cents', `case op when 'refund' then -amount_cents else amount_cents end`],
      ['voided_cents', 'cents', 'voided_cents'],
      ['moved_at', 'time', 'moved_at'],
      ['settled_batch_id', 'text', 'settled_batch_id'],
      ['rejected', 'bool', 'rejected'],
      ['auth_code', 'text', 'auth_code'],
      ['brand', 'text', 'brand'],
      ['last4', 'text', 'last4'],
      ['avs', 'text', 'avs'],
      ['cvv', 'text', 'cvv'],
    ],
    [
      ['moved_at', 'timestamptz'],
      ['ref', 'text'],
    ],
    {
      table: 'gateway_transaction',
      where: 'transaction_id is not null and moved_at >= $1::timestamptz and moved_at < $2::timestamptz and $3::timestamptz is not null',
      inScope: BY_PAYMENT,
    },
    { projection: paymentRegisterModel },
  ),
  reversals: paymentReport(
    'Refund and void register',
    ['payment_id', 'attempt_id', 'requested_at', 'operation', 'reversal_type', 'outcome', 'initiated_by', 'reason', 'principal_cents', 'fee_cents', 'transaction_ids', 'completes', 'statuses'], // prettier-ignore
    ['principal_cents', 'fee_cents'],
    // Payments with these three statuses have no reversal. A `succeeded` payment may have one, since an incomplete void leaves its status unchanged.
    `status not in ('pending', 'failed', 'unknown')`,
    (id, payment, reveal) =>
      payment.phase !== 'charged'
        ? []
        : payment.attempts.map((attempt) => [
            id,
            attempt.attemptId,
            attempt.requestedAt,
            attempt.operation,
            attempt.ended?.reversalType ?? null,
            attempt.ended?.outcome ?? 'open',
            attempt.initiatedBy,
            reasonOf(id, attempt, reveal),
            sumCents(attempt.returned, (leg) => leg.principalCents),
            sumCents(attempt.returned, (leg) => leg.feeCents),
            attempt.returned.map(({ transactionId }) => transactionId).join(' '),
            attempt.completes,
            attempt.returned.map(returnStatus).join(' '),
          ]),
  ),
  fees: booksReport(
    'Fee revenue by portal and day',
    ['day', 'portal_id', 'charged_cents', 'voided_cents', 'refunded_cents', 'other_cents', 'net_cents'],
    ['day', 'text'],
    true,
    feeRows,
  ),
  payable: booksReport(
    'Agency payable statement',
    ['portal_id', 'opening_cents', 'charged_cents', 'returned_cents', 'disputed_cents', 'rejected_cents', 'funded_cents', 'remitted_cents', 'adjusted_cents', 'closing_cents'], // prettier-ignore
    ['text'],
    true,
    payableRows,
  ),
  batches: sqlReport(
    'Batch report: expected, reported, funded',
    [
      ['gateway', 'text', 'gateway'],
      ['merchant_account', 'text', 'merchant_account'],
      ['batch_id', 'text', 'batch_id'],
      ['closed_at', 'time', 'closed_at'],
      ['lines', 'text', 'line_count'],
      ['expected_cents', 'cents', `gross_cents - differing`],
      ['reported_cents', 'cents', 'gross_cents'],
      ['fee_cents', 'cents', 'fee_cents'],
      ['net_cents', 'cents', 'net_cents'],
      ['funded_on', 'day', 'funded_on'],
      ['funded_cents', 'cents', 'funded_cents'],
      ['exceptions', 'text', 'exceptions'],
    ],
    [
      ['closed_at', 'timestamptz'],
      ['gateway', 'text'],
      ['merchant_account', 'text'],
      ['batch_id', 'text'],
    ],
    {
      table: 'settlement_batch',
      where: 'closed_at >= $1::timestamptz and closed_at < $2::timestamptz and recorded_at <= $3::timestamptz',
      joined: `cross join lateral (
        select count(*) as exceptions,
          coalesce(sum(case when kind in ('FEE_MISMATCH', 'LATE', 'FUNDING_MISMATCH', 'SOURCE_MISMATCH') then 0 else gross_cents - coalesce(expected_cents, 0) end), 0) as differing
        from settlement_exception x
        where x.batch_id = t.batch_id and x.gateway = t.gateway and x.merchant_account = t.merchant_account and not x.superseded) as found`,
      inScope: null,
    },
    { projection: paymentRegisterModel },
  ),
  disputes: withTexts(
    sqlReport(
      'Disputes: ageing and due dates',
      [
        ['dispute_id', 'text', 'dispute_id'],
        ['payment_id', 'text', 'payment_id'],
        ['status', 'text', 'status'],
        ['stage', 'text', 'stage'],
        ['reason_code', 'text', 'reason_code'],
        ['reason', 'text', 'null'],
        ['disputed_cents', 'cents', 'disputed_amount_cents'],
        ['opened_on', 'day', 'opened_on'],
        ['due_date', 'day', 'due_date'],
        ['updated_at', 'time', 'updated_at'],
      ],
      [
        ['due_date', 'date'],
        ['dispute_id', 'uuid'],
      ],
      {
        // Each part has an index of its own. Recovered disputes of earlier days are not read.
        table: `(select * from dispute where status <> 'recovered'
          union all select * from dispute where status = 'recovered' and updated_at >= $1::timestamptz) as dispute`,
        where: 'opened_on < $2::timestamptz and $3::timestamptz is not null',
        inScope: BY_PAYMENT,
      },
      { projection: paymentRegisterModel },
    ),
    fillDisputeReasons,
  ),
  open: sqlReport(
    'Unknown outcomes and incomplete operations, and since when',
    [
      ['payment_id', 'text', 'payment_id'],
      ['status', 'text', 'status'],
      ['attempt_id', 'text', 'open_attempt_id'],
      ['open_since', 'time', 'open_since'],
    ],
    [
      ['open_since', 'timestamptz'],
      ['payment_id', 'uuid'],
    ],
    {
      table: 'payment_list',
      where: 'open_since is not null and $1::timestamptz is not null and open_since < $2::timestamptz and $3::timestamptz is not null',
      inScope: BY_PAYMENT,
    },
    { projection: paymentListModel },
  ),
  'trial-balance': booksReport('Trial balance', ['account', 'opening_cents', 'debit_cents', 'credit_cents', 'closing_cents'], ['text'], false, async (db, query) => trialRows(query.from === null ? [] : await balancesBefore(db, query.from, query.asOf), await movements(db, query))), // prettier-ignore
  attempts: sqlReport(
    'Idempotency keys and what became of them',
    [
      ['created_at', 'time', 'created_at'],
      ['account_id', 'text', 'api_account_id'],
      ['operation', 'text', 'operation'],
      ['state', 'text', 'state'],
      ['payment_id', 'text', 'payment_id'],
      ['attempt_id', 'text', 'attempt_id'],
      ['status', 'text', 'status'],
      ['expires_at', 'time', 'expires_at'],
    ],
    [
      ['created_at', 'timestamptz'],
      ['attempt_id', 'uuid'],
      ['operation', 'text'],
    ],
    {
      table: 'idempotency_key',
      where: 'created_at >= $1::timestamptz and created_at < $2::timestamptz and $3::timestamptz is not null',
      inScope: null,
    },
    { auditorsOnly: true },
  ),
  webhooks: sqlReport(
    'Webhook deliveries, attempt by attempt',
    [
      ['event_id', 'text', 'd.event_id'],
      ['type', 'text', 'e.type'],
      ['payment_id', 'text', 'e.payment_id'],
      ['endpoint_id', 'text', 'd.endpoint_id'],
      ['state', 'text', 'd.state'],
      ['round', 'text', 't.round'],
      ['attempt', 'text', 't.attempt'],
      ['started_at', 'time', 't.started_at'],
      ['outcome', 'text', 't.outcome'],
      ['status_code', 'text', 't.status_code'],
      ['error_code', 'text', 't.error_code'],
    ],
    [
      ['started_at', 'timestamptz'],
      ['delivery_id', 'bigint'],
      ['round', 'int'],
      ['attempt', 'int'],
    ],
    {
      table: 'webhook_attempt',
      where: 'started_at >= $1::timestamptz and started_at < $2::timestamptz and $3::timestamptz is not null',
      // `offset 0` makes Postgres look rows up by key, also when its statistics are wrong.
      joined: `cross join lateral (select * from webhook_delivery where id = t.delivery_id offset 0) as d
        cross join lateral (select * from webhook_event where id = d.event_id offset 0) as e`,
      inScope: null,
    },
  ),
  'staff-actions': withTexts(
    sqlReport(
      'Staff actions: who did what, and why',
      [
        ['recorded_at', 'time', 'recorded_at'],
        ['actor_type', 'text', 'actor_type'],
        ['actor', 'text', 'actor'],
        ['event', 'text', 'event'],
        ['stream', 'text', 'stream'],
        ['reason', 'text', 'reason'],
        ['event_id', 'text', 'event_id'],
        ['position', 'text', 'position'],
      ],
      [
        ['recorded_at', 'timestamptz'],
        ['position', 'text'],
      ],
      {
        table: 'staff_action',
        where: 'recorded_at >= $1::timestamptz and recorded_at < $2::timestamptz and $3::timestamptz is not null',
        inScope: null,
      },
      { projection: staffWorkModel, auditorsOnly: true },
    ),
    fillStaffReasons,
  ),
  'line-items': withTexts(
    {
      title: 'Line items: every movement of money, by line of a payment',
      columns: LINE_ITEM_COLUMNS,
      changesColumn: CAUSE_COLUMN,
      totals: ['principal_cents', 'fee_cents', 'processor_fee_cents'],
      projection: lineRegisterModel,
      comparedWith: journalModel,
      isScoped: true,
      byPosition: true,
      pages: lineItemPages,
    },
    fillDescriptions,
  ),
  deposits: {
    title: 'Deposits: the settled lines of each funded batch',
    columns: DEPOSIT_COLUMNS,
    totals: ['principal_cents', 'fee_cents', 'processor_fee_cents', 'net_cents'],
    projection: lineRegisterModel,
    isScoped: true,
    pages: depositPages,
  },
} as const satisfies Record<string, Report>;

export type ReportName = keyof typeof REPORTS;
export const isReport = (text: string): text is ReportName => Object.hasOwn(REPORTS, text);
export const reportOf = (name: ReportName): Report => REPORTS[name];

/** Throws 403 for a scope with limits, if the report has none of its rows. */
export const refuseReport = (name: ReportName, scope: Scope): void => {
  if (scope !== null && !reportOf(name).isScoped) throw outOfScope();
};

/** The answer to a key with limits that asks for what is not divided by account or portal. */
export const outOfScope = () => new AuthenticationError(403, 'This key reads only its accounts and portals.');
