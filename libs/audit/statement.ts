/**
 * The statement of an agency for a month: what is owed to its portal at the begin, what changed it, what was deposited, and what is owed at the end.
 *
 * The figures are those of the reports `payable` and `fees`, so they are read from sums by day (docs/decisions/0034-sums-by-day.md). After the month
 * is closed they never change.
 */
import { gatewaysOfPortal, portalNotFound, portalsInScope, postgresDirectory, type Scope } from '#accounts';
import type { EventStore } from '#eventstore';
import { ServiceError } from '#kernel';
import { type Cell, csvLine, recordedBalances } from '#ledger';
import type { Pool } from '#platform';
import { feeRows, payableRows } from './exports.js';
import { isZone, type Month, monthOf, UTC } from './month.js';

export interface Statement {
  readonly portalId: string;
  readonly name: string;
  readonly period: string;
  readonly zone: string;
  /** The instants at which the month begins (inclusive) and ends (exclusive) in the zone, RFC 3339. */
  readonly from: string;
  readonly to: string;
  /** Owed to the agency. Negative: the agency owes us. */
  readonly openingCents: number;
  /** By kind. What is owed to the agency grew by these cents. */
  readonly movements: {
    readonly chargedCents: number;
    readonly returnedCents: number;
    readonly disputedCents: number;
    readonly rejectedCents: number;
    readonly adjustedCents: number;
  };
  /** Service fees of the operator. They are no part of what is owed. */
  readonly fees: {
    readonly chargedCents: number;
    readonly voidedCents: number;
    readonly refundedCents: number;
    readonly otherCents: number;
    readonly netCents: number;
  };
  /** Paid out by the processor directly to the agency. Negative, as it is owed no more. */
  readonly fundedCents: number;
  /** Paid to the agency by the operator. Negative. */
  readonly remittedCents: number;
  readonly closingCents: number;
  /** The funded batches with money of this portal, by day. */
  readonly deposits: readonly Deposit[];
  /** true: the month is closed. Nothing of it changes any more. */
  readonly final: boolean;
  /** Position in the log of the closing of the month, and the digest of the journal that was recorded then. null: the month is not closed. */
  readonly position: string | null;
  readonly digest: string | null;
}

/** The portal's own share of a funded batch: the lines that were recorded when it was funded, as in the report `deposits`. */
export interface Deposit {
  readonly depositId: string;
  /** The day that the processor announced, YYYY-MM-DD. */
  readonly depositedOn: string;
  readonly merchantAccount: string;
  readonly batchId: string;
  readonly principalCents: number;
  readonly feeCents: number;
  readonly processorFeeCents: number;
  readonly netCents: number;
}

export interface StatementRequest {
  readonly portalId: string;
  /** YYYY-MM */
  readonly period: string;
  /** Name of a time zone, such as America/Chicago. Default: UTC. */
  readonly zone?: string | undefined;
}

interface StatementPorts {
  readonly store: EventStore;
  readonly db: Pool;
  /** The position up to which the figures are complete. */
  readonly position: string | null;
}

/** Throws VALIDATION_ERROR for a period that is no month, or an unknown zone. A portal that is unknown or out of scope → 404. */
export const statementOf = async (ports: StatementPorts, scope: Scope, { portalId, period, zone = UTC }: StatementRequest): Promise<Statement> => {
  const { db } = ports;
  if (!isZone(zone)) throw invalid('zone', 'must be the name of a time zone, such as America/Chicago');
  const month = monthOf(period, zone);
  if (month === null) throw invalid('period', 'must be a month, such as 2026-11');
  const name = await nameOf(db, scope, portalId);
  const { from, to } = month;
  const query = { from, to, asOf: null, after: null };
  const [payable] = await payableRows(db, query, [portalId]);
  const days = await feeRows(db, query, [portalId]);
  const [openingCents, chargedCents, returnedCents, disputedCents, rejectedCents, fundedCents, remittedCents, adjustedCents, closingCents] =
    centsOf(payable?.slice(1)); // prettier-ignore
  const feeOf = (column: number) => days.reduce((sum, row) => sum + (row[column] as number), 0);
  return {
    portalId,
    name,
    period,
    zone,
    from,
    to,
    openingCents,
    movements: { chargedCents, returnedCents, disputedCents, rejectedCents, adjustedCents },
    fees: { chargedCents: feeOf(2), voidedCents: feeOf(3), refundedCents: feeOf(4), otherCents: feeOf(5), netCents: feeOf(6) },
    fundedCents,
    remittedCents,
    closingCents,
    deposits: await depositsOf(ports, portalId, month),
    ...(await closingOf(ports, to)),
  };
};

const invalid = (field: string, message: string) => new ServiceError('VALIDATION_ERROR', `${field} ${message}.`, { errors: [{ field, message }] });

type Nine = readonly [number, number, number, number, number, number, number, number, number];
/** The sums of a row of `payable`. A portal without entries has no row. */
const centsOf = (cells: readonly Cell[] = [0, 0, 0, 0, 0, 0, 0, 0, 0]): Nine => cells as unknown as Nine;

const nameOf = async (db: Pool, scope: Scope, portalId: string): Promise<string> => {
  if (scope !== null && !(await portalsInScope(db, scope)).includes(portalId)) throw portalNotFound();
  const portal = await postgresDirectory(db).portal(portalId);
  if (portal === null) throw portalNotFound();
  return portal.name;
};

/** The first closing that reaches the end of the month. Its entries must be applied, else the figures are not those that were closed. */
const closingOf = async ({ store, position }: StatementPorts, to: string): Promise<Pick<Statement, 'final' | 'position' | 'digest'>> => {
  const closing = (await recordedBalances(store)).find(({ balance }) => balance.to >= to)?.balance;
  if (closing === undefined || position === null || position < closing.position) return { final: false, position: null, digest: null };
  return { final: true, position: closing.position, digest: closing.digest };
};

/**
 * A deposit counts on its day. If its funding was recorded after that day was closed, it counts on the first day after the closed periods, as its
 * entry in the journal does. So no closed month gets another deposit.
 */
const depositsOf = async ({ store, db }: StatementPorts, portalId: string, { firstDay, nextFirstDay }: Month): Promise<readonly Deposit[]> => {
  const gateways = await gatewaysOfPortal(store, portalId);
  const merchantAccounts = gateways.flatMap(({ merchantAccount, feeMerchantAccount }) => [merchantAccount, feeMerchantAccount]);
  const { rows } = await db.query<Record<'deposit_id' | 'day' | 'merchant_account' | 'batch_id' | 'principal' | 'fee' | 'processor_fee', string>>(
    `with dated as (
       select d.*, greatest(d.deposited_on, (select max(p.closed_to)::date from line_period p where p.position < d.position)) as booked_on
       from line_deposit d
       where d.merchant_account = any($4::text[]) and d.deposited_on < $3::date
         and (d.deposited_on >= $2::date or d.position > (select min(position) from line_period where closed_to >= $2::date)))
     select d.deposit_id, d.deposited_on::text as day, d.merchant_account, d.batch_id,
            p.principal_cents as principal, p.fee_cents as fee, p.processor_fee_cents as processor_fee
     from dated d join line_deposit_portal p on p.position = d.position and p.portal_id = $1
     where d.booked_on >= $2::date and d.booked_on < $3::date order by d.booked_on, d.position`,
    [portalId, firstDay, nextFirstDay, merchantAccounts],
  );
  return rows.map((row) => {
    const [principalCents, feeCents, processorFeeCents] = [Number(row.principal), Number(row.fee), Number(row.processor_fee)];
    return {
      depositId: row.deposit_id,
      depositedOn: row.day,
      merchantAccount: row.merchant_account,
      batchId: row.batch_id,
      principalCents,
      feeCents,
      processorFeeCents,
      netCents: principalCents + feeCents + processorFeeCents,
    };
  });
};

const CSV_COLUMNS = ['portal_id', 'period', 'zone', 'item', 'day', 'reference', 'cents', 'final', 'position', 'digest'];

/** The figures of a statement in the order in which they are shown. */
export const statementItems = ({
  openingCents,
  movements,
  fees,
  fundedCents,
  remittedCents,
  closingCents,
}: Statement): readonly [item: string, cents: number][] => [
  ['opening', openingCents],
  ['charged', movements.chargedCents],
  ['returned', movements.returnedCents],
  ['disputed', movements.disputedCents],
  ['rejected', movements.rejectedCents],
  ['adjusted', movements.adjustedCents],
  ['funded', fundedCents],
  ['remitted', remittedCents],
  ['closing', closingCents],
  ['fees_charged', fees.chargedCents],
  ['fees_voided', fees.voidedCents],
  ['fees_refunded', fees.refundedCents],
  ['fees_other', fees.otherCents],
  ['fees_net', fees.netCents],
];

/** A line for each figure, and three for each deposit, with its day and its batch. */
export const statementCsv = (statement: Statement): string => {
  const { portalId, period, zone, deposits, final, position, digest } = statement;
  const line = (item: string, day: string | null, reference: string | null, cents: number) =>
    csvLine([portalId, period, zone, item, day, reference, cents, final, position, digest]);
  return [
    csvLine(CSV_COLUMNS),
    ...statementItems(statement).map(([item, cents]) => line(item, null, null, cents)),
    ...deposits.flatMap(({ depositedOn, batchId, principalCents, feeCents, processorFeeCents }) => [
      line('deposit_principal', depositedOn, batchId, principalCents),
      line('deposit_fee', depositedOn, batchId, feeCents),
      line('deposit_processor_fee', depositedOn, batchId, processorFeeCents),
    ]),
  ].join('');
};
