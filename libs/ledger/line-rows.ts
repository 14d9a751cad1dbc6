/**
 * The rows that the line-item register makes of events, without a database. Like line-movements.ts, it shares no code with the journal.
 */
import type { Recorded } from '#eventstore';
import { paymentEvents, paymentIdOf } from '#payments';
import { uuidV5 } from '#platform';
import { exceptionEvents, isSettlementStream, settlementEvents } from '#settlement';
import { manualAdjustmentEvents, periodEvents, PERIODS, remittanceEvents, RULE_CHANGES } from './events.js';
import {
  type FindPayment,
  moveAdjustment,
  type Movement,
  moveException,
  movePayment,
  moveRemittance,
  moveSettlement,
  type PaymentLine,
  type PaymentLines,
  paymentsOfBatch,
} from './line-movements.js';

export interface Remembered {
  readonly revision: bigint;
  readonly payment: PaymentLines | null;
}

export interface Deposit {
  readonly position: string;
  readonly depositId: string;
  readonly gateway: string;
  readonly merchantAccount: string;
  readonly batchId: string;
  readonly depositedOn: string;
  /** -1: the deposit of before is taken back. */
  readonly sign: 1 | -1;
  readonly recordedAt: string;
}

/** What a batch of events adds to the tables. */
export interface Added {
  /** Values in the order of {@link COLUMNS}. */
  readonly rows: (string | null)[][];
  readonly payments: Map<string, Remembered>;
  readonly deposits: Deposit[];
  readonly days: Map<string, { readonly bookedOn: string; readonly recordedOn: string; readonly first: string; last: string }>;
  readonly periods: { readonly position: string; readonly closedTo: string }[];
  closedTo: string | null;
}

/** `closedTo`: end of the last closed period. */
export const nothingAdded = (closedTo: string | null): Added => ({
  rows: [],
  payments: new Map(),
  deposits: [],
  days: new Map(),
  periods: [],
  closedTo,
});

/** The payments whose state an event needs. */
export const paymentsOf = (recorded: Recorded): string | readonly string[] => {
  const { stream, revision } = recorded;
  if (stream.startsWith('payment-')) return revision > 0n ? paymentIdOf(stream) : [];
  if (isSettlementStream(stream)) return paymentsOfBatch(settlementEvents.read(recorded));
  if (!stream.startsWith('exception-')) return [];
  const event = exceptionEvents.read(recorded);
  return event.type === 'ExceptionResolved' ? (event.data.paymentId ?? []) : [];
};

/** Adds the rows of an event. The states of {@link paymentsOf} must be there. */
export const addEvent = (added: Added, recorded: Recorded): void => {
  const made = new Map<string, number>();
  for (const [number, movement] of movementsOf(added, recorded).entries()) {
    const name = `${movement.movement}/${lineOf(movement)?.id ?? ''}`;
    const times = (made.get(name) ?? 0) + 1;
    made.set(name, times);
    addRow(added, recorded, number, movement, times === 1 ? name : `${name}/${times}`);
  }
};

const movementsOf = (added: Added, recorded: Recorded): readonly Movement[] => {
  const { stream, position, revision, id, meta } = recorded;
  const actor = meta.actor.type;
  const find: FindPayment = (paymentId) => added.payments.get(paymentId ?? '')?.payment ?? null;
  if (stream.startsWith('payment-')) {
    const paymentId = paymentIdOf(stream);
    const before = added.payments.get(paymentId);
    if (revision !== (before ? before.revision + 1n : 0n))
      throw new Error(`${stream}: revision ${revision} does not follow ${before?.revision ?? 'an absent row'} in the line register`);
    const { payment, movements } = movePayment(paymentId, before?.payment ?? null, paymentEvents.read(recorded), actor);
    added.payments.set(paymentId, { revision, payment });
    return movements;
  }
  if (isSettlementStream(stream)) {
    const event = settlementEvents.read(recorded);
    if (event.type === 'BatchFunded' || event.type === 'BatchFundingWithdrawn') {
      const { gateway, merchantAccount, batchId, fundedOn: depositedOn } = event.data;
      const sign = event.type === 'BatchFunded' ? 1 : -1;
      added.deposits.push({ position, depositId: id, gateway, merchantAccount, batchId, depositedOn, sign, recordedAt: meta.recordedAt });
    }
    return moveSettlement(event, find, actor);
  }
  if (stream.startsWith('exception-')) return moveException(exceptionEvents.read(recorded), find, actor);
  if (stream === PERIODS) {
    const event = periodEvents.read(recorded);
    if (event.type === 'PeriodClosed') {
      added.closedTo = utc(event.data.to);
      added.periods.push({ position, closedTo: added.closedTo });
    }
    return [];
  }
  // A new version of a posting rule moves the money of the same events. The tie tells if the register must follow it.
  if (stream === RULE_CHANGES) return [];
  if (stream.startsWith('adjustment-')) return moveAdjustment(manualAdjustmentEvents.read(recorded), actor);
  if (stream.startsWith('remittance-')) return moveRemittance(remittanceEvents.read(recorded), actor);
  return []; // an imported file
};

/** The payment's line. Without a payment, a movement has no line. */
const lineOf = ({ of, line }: Movement): PaymentLine | null => (line === null ? null : of!.lines[line]!);

/** A time as we record times: UTC with milliseconds. */
const utc = (time: string): string => new Date(Date.parse(time)).toISOString();

/** The columns of a row, with their types. */
export const COLUMNS = [
  ['position', 'text'], ['number', 'int'], ['line_number', 'int'], ['movement_id', 'uuid'], ['account_id', 'uuid'], ['portal_id', 'uuid'],
  ['payment_id', 'uuid'], ['line_id', 'uuid'], ['principal_cents', 'bigint'], ['fee_cents', 'bigint'], ['processor_fee_cents', 'bigint'],
  ['recorded_at', 'timestamptz'], ['effective_at', 'timestamptz'], ['booked_at', 'timestamptz'], ['movement', 'text'], ['family', 'text'], ['rule', 'text'],
  ['leg', 'text'], ['reference_id', 'text'], ['payment_reference_id', 'text'], ['coding', 'json'], ['gateway', 'text'],
  ['merchant_account', 'text'], ['ledger_account', 'text'], ['transaction_id', 'text'], ['auth_code', 'text'], ['brand', 'text'], ['last4', 'text'],
  ['confirmation_number', 'text'], ['batch_id', 'text'], ['initiated_by', 'text'],
] as const; // prettier-ignore

const addRow = (added: Added, { position, id, meta: { recordedAt } }: Recorded, number: number, one: Movement, name: string): void => {
  const { of, line: index } = one;
  const line = lineOf(one);
  const effectiveAt = utc(one.effectiveAt);
  const bookedAt = added.closedTo !== null && effectiveAt < added.closedTo ? added.closedTo : effectiveAt;
  added.rows.push([
    position,
    String(number),
    index === null ? null : String(index + 1),
    uuidV5(id, name),
    of?.accountId ?? null,
    one.portalId,
    one.paymentId,
    line?.id ?? null,
    String(one.principalCents),
    String(one.feeCents),
    String(one.processorFeeCents),
    recordedAt,
    effectiveAt,
    bookedAt,
    one.movement,
    one.family,
    one.rule,
    one.leg,
    line?.referenceId ?? null,
    of?.referenceId ?? null,
    line?.coding ? JSON.stringify(line.coding) : null,
    one.gateway,
    one.merchantAccount,
    one.ledgerAccount,
    one.transactionId,
    one.authCode,
    of?.brand ?? null,
    of?.last4 ?? null,
    of?.confirmationNumber ?? null,
    one.batchId,
    one.initiatedBy,
  ]);
  const [bookedOn, recordedOn] = [bookedAt.slice(0, 10), recordedAt.slice(0, 10)];
  const day = added.days.get(bookedOn + recordedOn);
  if (day) day.last = position;
  else added.days.set(bookedOn + recordedOn, { bookedOn, recordedOn, first: position, last: position });
};
