/**
 * Settlement batches of the processor, and the meaning of a line for its payment. Pure functions.
 *
 * Each batch has a stream (`settlement-<gateway>-<merchant account>-<batch>`; a `-` inside a part is written `%2D`). The stream records every line
 * exactly once, with the result of its matching. A line that fits no payment is recorded too, as an exception for staff.
 */
import { type Cents, sumCents } from '#kernel';
import {
  cents,
  type Charged,
  type ChargedLeg,
  type DisputeStatus,
  type Leg,
  openAttempt,
  type Payment,
  returnOf,
  type SettlementRecord,
  type UndoneCharge,
  undoneCharges,
} from '#payments';
import type { SettlementCase } from './exception.js';

/**
 * The result of matching a line. All results except `MATCHED` make an exception.
 *
 * - `MISSING_HERE`: the line belongs to no payment here, or is an adjustment.
 * - `STATUS_MISMATCH`: the line does not fit the state of its payment. For example, the payment is unknown, failed or voided.
 * - `WRONG_ACCOUNT`: the charge was made on another merchant account.
 * - `REFUND_FAILED`: a settled refund has failed, and its money is back at the merchant.
 */
export type LineResult =
  'MATCHED' | 'MISSING_HERE' | 'AMOUNT_MISMATCH' | 'STATUS_MISMATCH' | 'DUPLICATE_AT_GATEWAY' | 'WRONG_ACCOUNT' | 'REFUND_FAILED';

export interface RecordedLine {
  /** From 0, in the processor's order. */
  readonly number: number;
  readonly transactionId: string;
  readonly ref: string | null;
  readonly type: SettlementRecord['type'];
  readonly accepted: boolean;
  /** Negative if the money goes back to the cardholder. */
  readonly grossCents: number;
  readonly feeCents: number;
  readonly netCents: number;
  readonly result: LineResult;
  readonly paymentId: string | null;
  readonly leg: Leg | null;
  /** The expected gross, if it differs. */
  readonly expectedCents: number | null;
  /** The line is of a charge that was undone by a refund, or of that refund. Its payment was never charged. Absent: it is not. */
  readonly undone?: true;
}

export interface LineCorrection {
  readonly before: RecordedLine | null;
  readonly after: RecordedLine | null;
}

export interface BatchName {
  readonly gateway: string;
  readonly merchantAccount: string;
  readonly batchId: string;
}

type Fact<Type extends string, Data> = { readonly type: Type; readonly at: string; readonly data: Data };

export type SettlementEvent =
  | Fact<'SettlementLinesRecorded', BatchName & { readonly closedAt: string; readonly lines: readonly RecordedLine[] }>
  /**
   * All lines are recorded. The sums are over accepted lines. `fundedOn` (YYYY-MM-DD): the day of funding that the processor announced. `listed`:
   * true if all lines came from the processor's interface, in this order. Later requests then ask only for later batches.
   */
  | Fact<
      'SettlementBatchRecorded',
      BatchName & {
        readonly closedAt: string;
        readonly fundedOn: string | null;
        readonly lineCount: number;
        readonly grossCents: number;
        readonly feeCents: number;
        readonly netCents: number;
        readonly listed: boolean;
      }
    >
  /**
   * The processor's interface has listed the whole batch after its record was complete. Later requests ask only for later batches. The sums are those
   * of the interface. `differing`: the number of lines in which the interface differs from the record, plus 1 for another day of funding.
   */
  | Fact<
      'SettlementBatchListed',
      BatchName & {
        readonly closedAt: string;
        readonly fundedOn: string | null;
        readonly lineCount: number;
        readonly grossCents: number;
        readonly feeCents: number;
        readonly netCents: number;
        readonly differing: number;
      }
    >
  /**
   * Lines of a complete batch were corrected. A correction holds the line before (null: it was added) and after (null: it was removed). `closedAt`:
   * the time at which the corrections take effect. If a file corrects it, events with the old time first remove all lines. Then others add them. `fundedOn`:
   * the day of funding after the correction. `fileId`: the corrected file. null: the processor's interface listed further lines, or staff recorded the
   * funding. `reference`: what staff name as the source of the funding, such as a statement. null: they did not record it.
   */
  | Fact<
      'SettlementLinesCorrected',
      BatchName & {
        readonly closedAt: string;
        readonly fundedOn: string | null;
        readonly fileId: string | null;
        readonly reference: string | null;
        readonly corrections: readonly LineCorrection[];
      }
    >
  /** The net amount of the batch reached the bank on `fundedOn`. This is the operator's bank or, if `agencyPortalId` is given, that agency's bank. */
  | Fact<'BatchFunded', BatchFunding>
  /** The day of the last `BatchFunded` was wrong. The data are of that event. The batch is funded again, with the same amount, on its right day. */
  | Fact<'BatchFundingWithdrawn', BatchFunding>;

type BatchFunding = BatchName & { readonly fundedOn: string; readonly netCents: number; readonly agencyPortalId?: string };

/** Id of a batch's stream. The parts are encoded, so each batch has its own stream for any names. */
export const batchStreamId = ({ gateway, merchantAccount, batchId }: BatchName): string =>
  [gateway, merchantAccount, batchId].map((part) => encodeURIComponent(part).replaceAll('-', '%2D')).join('-');

/** True for streams of batches. Streams of imported files have the same prefix, but fewer parts. */
export const isSettlementStream = (stream: string): boolean => stream.startsWith('settlement-') && stream.split('-').length === 4;

export interface SettlementBatch {
  /** The lines, as the events recorded them: {@link linesOf}. One list would be copied for each event. */
  readonly pages: readonly (readonly RecordedLine[])[];
  readonly lineCount: number;
  readonly complete: boolean;
  /** RFC 3339. null: nothing of the batch is recorded. */
  readonly closedAt: string | null;
  /** YYYY-MM-DD. null: no source has announced it. */
  readonly fundedOn: string | null;
  readonly funded: boolean;
  /** The last funding, also if it was withdrawn. */
  readonly funding: BatchFunding | null;
  /** True if the processor's interface has listed the whole batch. */
  readonly listed: boolean;
  /** True if a file has corrected the batch. The interface can then no longer add lines. */
  readonly correctedByFile: boolean;
  /** The source of the funding, as staff named it. null: they did not record it. */
  readonly reference: string | null;
}

export const emptyBatch: SettlementBatch = {
  pages: [],
  lineCount: 0,
  complete: false,
  closedAt: null,
  fundedOn: null,
  funded: false,
  funding: null,
  listed: false,
  correctedByFile: false,
  reference: null,
};

/** Transaction id of the line that staff record for a fee which the processor kept. The processor's interface does not list it. */
export const WITHHELD_FEE = 'payfold-withheld-fee';

/** Lines with the same name say something of the same transaction. */
export const nameOfLine = ({ type, transactionId }: { type: string; transactionId: string }) => `${type} ${transactionId}`;

/** All lines, in the order of their numbers. */
export const linesOf = ({ pages }: SettlementBatch): readonly RecordedLine[] => pages.flat();

/** The number of the next line. A line that was taken out of the batch may leave a gap. */
export const nextNumber = (lines: readonly RecordedLine[]): number => lines.reduce((most, { number }) => Math.max(most, number), -1) + 1;

export const evolveBatch = (batch: SettlementBatch, event: SettlementEvent): SettlementBatch => {
  switch (event.type) {
    case 'SettlementLinesRecorded': {
      const { lines, closedAt } = event.data;
      if (batch.complete || lines.some(({ number }, index) => number !== batch.lineCount + index))
        throw new Error('impossible history: settlement lines out of order');
      return { ...batch, closedAt: batch.closedAt ?? closedAt, pages: [...batch.pages, lines], lineCount: batch.lineCount + lines.length };
    }
    case 'SettlementBatchRecorded':
      if (batch.complete || event.data.lineCount !== batch.lineCount) throw new Error('impossible history: a batch of other lines');
      return { ...batch, complete: true, closedAt: event.data.closedAt, fundedOn: event.data.fundedOn, listed: event.data.listed };
    case 'SettlementBatchListed':
      if (!batch.complete || batch.listed) throw new Error('impossible history: a batch listed out of turn');
      return { ...batch, listed: true, fundedOn: batch.fundedOn ?? event.data.fundedOn };
    case 'SettlementLinesCorrected': {
      if (!batch.complete) throw new Error('impossible history: a batch corrected before it was complete');
      const lines = new Map(linesOf(batch).map((line) => [line.number, line]));
      for (const { before, after } of event.data.corrections) {
        if (before && !lines.delete(before.number)) throw new Error('impossible history: a line corrected that is not there');
        if (after) lines.set(after.number, after);
      }
      return {
        ...batch,
        closedAt: event.data.closedAt,
        pages: [[...lines.values()].sort((a, b) => a.number - b.number)],
        lineCount: lines.size,
        fundedOn: event.data.fundedOn,
        correctedByFile: batch.correctedByFile || event.data.fileId !== null,
        reference: event.data.reference ?? batch.reference,
      };
    }
    case 'BatchFunded':
      if (!batch.complete || batch.funded) throw new Error('impossible history: a batch funded out of turn');
      return { ...batch, funded: true, funding: event.data };
    case 'BatchFundingWithdrawn':
      if (!batch.funded) throw new Error('impossible history: a funding withdrawn that is not there');
      return { ...batch, funded: false };
  }
};

// ------------------------------------------------------------------------------------------------------------------------------------
// The meaning of a line.

/** The register's row of a line's transaction. */
export interface Registered {
  readonly paymentId: string;
  readonly leg: Leg;
  readonly op: 'charge' | 'refund';
  readonly attemptId: string;
  readonly merchantAccount: string;
  /** The batch in which this transaction has settled. null: not settled. */
  readonly settledBatchId: string | null;
}

const isMatched = ({ result }: RecordedLine): boolean => result === 'MATCHED' || result === 'AMOUNT_MISMATCH';

/** True for a sale that was matched with its payment. The payment's stream records that the leg has settled. */
export const isSettledSale = (line: RecordedLine): boolean => line.type === 'sale' && !line.undone && isMatched(line);

/** True for a sale or a refund that was matched with its payment, even with another amount. */
export const isSettledLine = (line: RecordedLine): boolean => (line.type === 'sale' || line.type === 'refund') && isMatched(line);

/** Cents of an accepted line that nothing explains. The books post the same cents with rule R15. */
export const unexplainedCents = (line: RecordedLine): number => {
  if (!line.accepted) return 0;
  if (!isMatched(line)) return line.grossCents;
  if (line.type === 'adjustment') return line.netCents;
  const isDispute = line.type === 'chargeback' || line.type === 'chargeback_reversal';
  return isDispute && line.expectedCents !== null ? line.grossCents - line.expectedCents : 0;
};

export type Judgement =
  | {
      readonly result: LineResult;
      readonly expectedCents: number | null;
      /** True: the payment's stream records it. */
      readonly settles: boolean;
      readonly undone?: true;
    }
  /** The payment is being charged or reversed. The line is judged when this has ended. */
  | 'wait';

const judged = (result: LineResult, expectedCents: number | null = null, settles = false): Exclude<Judgement, 'wait'> => ({
  result,
  expectedCents,
  settles,
});

/** Lines wait this long for an open reversal. After that, they are judged by the payment's present state. */
const WAIT_FOR_REVERSAL_MS = 3_600_000;

/** Judges a line against its payment. `now`: milliseconds since 1970. */
export const judgeLine = (line: SettlementRecord, batch: Omit<BatchName, 'gateway'>, found: Registered, payment: Payment, now: number): Judgement => {
  if (found.merchantAccount !== batch.merchantAccount) return judged('WRONG_ACCOUNT');
  if (payment.phase === 'pending') return 'wait';
  // The money of the refund is back at the merchant. A person sends it again, under a new reference.
  if (line.type === 'refund_failure') return judged('REFUND_FAILED', 0);
  if (payment.phase === 'failed' || payment.phase === 'voided') return judgeUndone(line, batch, found, undoneCharges(payment));
  // A settlement line never resolves a payment whose outcome is unknown. A person resolves it (C29).
  if (payment.phase !== 'charged') return judged('STATUS_MISMATCH', 0);
  const leg = payment.legs.find((candidate) => candidate.leg === found.leg);
  if (!leg) return judged('STATUS_MISMATCH', 0);
  switch (line.type) {
    case 'sale':
      return judgeSale(line, batch, found, payment, leg, now);
    case 'refund':
      return judgeRefund(line, batch, found, payment, leg, now);
    case 'chargeback':
      return judgeDispute(line, payment, (status) => status !== 'recovered', -1);
    case 'chargeback_reversal':
      return judgeDispute(line, payment, (status) => status === 'recovered', 1);
    case 'fee':
      return judged('MATCHED');
    case 'adjustment':
      return judged('MISSING_HERE');
  }
};

/** Judges a line of a payment that was never charged. A charge that was undone by a refund settles all the same, and so does the refund. */
const judgeUndone = (line: SettlementRecord, { batchId }: { batchId: string }, found: Registered, charges: readonly UndoneCharge[]): Judgement => {
  const charge = charges.find(({ leg }) => leg === found.leg);
  const fits =
    charge && ((line.type === 'sale' && line.transactionId === charge.chargeTransactionId) || (line.type === 'refund' && line.transactionId === charge.refundTransactionId)); // prettier-ignore
  if (charge && line.type === 'fee') return { ...judged('MATCHED'), undone: true };
  // The processor must not reject one of the two: the other one stands.
  if (!fits || !line.accepted) return judged('STATUS_MISMATCH', 0);
  if (found.settledBatchId !== null && found.settledBatchId !== batchId) return judged('DUPLICATE_AT_GATEWAY');
  const expected = line.type === 'sale' ? charge.amountCents : -charge.amountCents;
  return { ...(line.grossCents === expected ? judged('MATCHED') : judged('AMOUNT_MISMATCH', expected)), undone: true };
};

const judgeSale = (
  line: SettlementRecord,
  { batchId }: { batchId: string },
  found: Registered,
  payment: Charged,
  leg: ChargedLeg,
  now: number,
): Judgement => {
  // The line is a second transaction under the charge's reference: the cardholder paid twice.
  if (found.op !== 'charge' || line.transactionId !== leg.transactionId) return judged('DUPLICATE_AT_GATEWAY');
  // If the transaction has settled in another batch, this line is a duplicate. The payment's stream decides, since the register may lag behind a
  // correction.
  const before = leg.settledBatchId;
  if (before !== null && before !== batchId) return judged('DUPLICATE_AT_GATEWAY');
  // The sale was rejected before and is accepted now. The books no longer expect this money, so a person decides.
  if (leg.settlementRejected && line.accepted) return judged('STATUS_MISMATCH', 0);
  // The open reversal may be a void, which changes the expected amount.
  if (before === null && isReversing(payment, now)) return 'wait';
  const expected = cents(leg) - voidedCents(payment, leg);
  if (expected === 0) return judged('STATUS_MISMATCH', 0);
  return line.grossCents === expected ? judged('MATCHED', null, true) : judged('AMOUNT_MISMATCH', expected, true);
};

const judgeRefund = (
  line: SettlementRecord,
  { batchId }: { batchId: string },
  found: Registered,
  payment: Charged,
  leg: ChargedLeg,
  now: number,
): Judgement => {
  if (found.settledBatchId !== null && found.settledBatchId !== batchId) return judged('DUPLICATE_AT_GATEWAY');
  const returned = returnOf(payment, { leg: leg.leg, transactionId: line.transactionId });
  if (!returned) return isReversing(payment, now) ? 'wait' : judged('STATUS_MISMATCH', 0);
  // The processor rejected a refund that was made here. A person must return the money in another way.
  if (!line.accepted) return judged('STATUS_MISMATCH', -cents(returned));
  const expected = -cents(returned);
  return line.grossCents === expected ? judged('MATCHED') : judged('AMOUNT_MISMATCH', expected);
};

/** Judges a line of a refund that staff sent for an exception. `refund`: as the exception's stream has it. */
export const judgeSentRefund = (
  line: SettlementRecord,
  batch: Omit<BatchName, 'gateway'>,
  found: Omit<Registered, 'paymentId'>,
  refund: SettlementCase['refund'],
  now: number,
): Judgement => {
  if (found.merchantAccount !== batch.merchantAccount) return judged('WRONG_ACCOUNT');
  if (line.type === 'fee') return judged('MATCHED');
  if (line.type === 'adjustment') return judged('MISSING_HERE');
  if (line.type === 'refund_failure') return judged('REFUND_FAILED', 0);
  if (line.type !== 'refund' || (found.settledBatchId !== null && found.settledBatchId !== batch.batchId)) return judged('DUPLICATE_AT_GATEWAY');
  if (refund?.attemptId !== found.attemptId) return judged('STATUS_MISMATCH', 0);
  if (refund.transactionId === null) return now - Date.parse(refund.requestedAt) < WAIT_FOR_REVERSAL_MS ? 'wait' : judged('STATUS_MISMATCH', 0);
  if (refund.transactionId !== line.transactionId) return judged('STATUS_MISMATCH', 0);
  const expected = -refund.amountCents;
  if (!line.accepted) return judged('STATUS_MISMATCH', expected);
  return line.grossCents === expected ? judged('MATCHED') : judged('AMOUNT_MISMATCH', expected);
};

/** The money of a dispute was posted when the dispute was recorded. A line matches if it has the amount of one of the payment's disputes. */
const judgeDispute = (line: SettlementRecord, payment: Charged, fits: (status: DisputeStatus) => boolean, sign: 1 | -1): Judgement => {
  const amounts = payment.disputes.filter(({ status }) => fits(status)).map(({ disputedAmountCents }) => sign * disputedAmountCents);
  if (amounts.length === 0) return judged('STATUS_MISMATCH', 0);
  return amounts.includes(line.grossCents) ? judged('MATCHED') : judged('AMOUNT_MISMATCH', amounts.at(-1));
};

const isReversing = (payment: Charged, now: number): boolean => {
  const attempt = openAttempt(payment);
  return attempt !== undefined && now - Date.parse(attempt.requestedAt) < WAIT_FOR_REVERSAL_MS;
};

/** Voided cents of a leg. They never settle. */
const voidedCents = (payment: Charged, { leg }: ChargedLeg): Cents =>
  sumCents(
    payment.attempts.flatMap(({ returned }) => returned).filter((one) => one.leg === leg && one.means === 'void'),
    cents,
  );
