/**
 * Settlement batches of the processor, line by line, and the meaning of a line for its payment. Pure functions.
 *
 * Each batch has its own stream (`settlement-<gateway>-<merchant account>-<batch>`; a `-` inside a part is written `%2D`). The stream records every
 * line exactly once, with the result of its matching. A line that fits no payment is recorded too, as an exception for staff. So no line that the
 * processor reported is lost.
 */
import { type Cents, sumCents } from '#kernel';
import { cents, type Charged, type ChargedLeg, type DisputeStatus, type Leg, openAttempt, type Payment, type SettlementRecord } from '#payments';

/**
 * The result of matching a line. `MISSING_HERE`: the line belongs to no payment here, or is an adjustment. `STATUS_MISMATCH`: the line does not fit
 * the state of its payment. For example, the payment is unknown, failed or voided, or the refund was not made here. `WRONG_ACCOUNT`: the charge was
 * made on another merchant account. All results except `MATCHED` make an exception.
 */
export type LineResult = 'MATCHED' | 'MISSING_HERE' | 'AMOUNT_MISMATCH' | 'STATUS_MISMATCH' | 'DUPLICATE_AT_GATEWAY' | 'WRONG_ACCOUNT';

export interface RecordedLine {
  /** From 0, in the processor's order. */
  readonly number: number;
  readonly transactionId: string;
  readonly ref: string | null;
  readonly type: SettlementRecord['type'];
  readonly accepted: boolean;
  /** Signed: an amount that goes back to the cardholder is negative. */
  readonly grossCents: number;
  readonly feeCents: number;
  readonly netCents: number;
  readonly result: LineResult;
  readonly paymentId: string | null;
  readonly leg: Leg | null;
  /** The expected gross, if it differs. */
  readonly expectedCents: number | null;
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
   * All lines are recorded. The sums are over accepted lines. `fundedOn` (YYYY-MM-DD) is the day of funding that the processor announced. `listed`:
   * all lines came from the processor's interface, in this order. Then the interface is asked only for later batches.
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
   * A batch was completed from a file, and then the processor's interface listed it to its end. From now on the interface is asked only for later
   * batches. The sums are those of the interface. `differing`: the number of lines in which the interface differs from the record, plus 1 for another
   * day of funding.
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
   * Lines of a recorded batch were corrected. Each correction holds the line before (null: it was added) and after (null: it was removed). `fundedOn`
   * is the day of funding after the correction. `fileId` names the corrected file. null: the processor's interface listed further lines of a batch
   * that was recorded from a file.
   */
  | Fact<
      'SettlementLinesCorrected',
      BatchName & {
        readonly closedAt: string;
        readonly fundedOn: string | null;
        readonly fileId: string | null;
        readonly corrections: readonly LineCorrection[];
      }
    >
  /**
   * The net amount of the batch reached the bank on `fundedOn`: the operator's bank or, if `agencyPortalId` is given, the bank of that portal's
   * agency.
   */
  | Fact<'BatchFunded', BatchName & { readonly fundedOn: string; readonly netCents: number; readonly agencyPortalId?: string }>;

/** Id of a batch's stream. The parts are encoded, so two batches never share a stream, whatever their names hold. */
export const batchStreamId = ({ gateway, merchantAccount, batchId }: BatchName): string =>
  [gateway, merchantAccount, batchId].map((part) => encodeURIComponent(part).replaceAll('-', '%2D')).join('-');

/** True for the streams of batches. Streams of imported files have the same prefix, but fewer parts. */
export const isSettlementStream = (stream: string): boolean => stream.startsWith('settlement-') && stream.split('-').length === 4;

/** The recorded state of a batch. */
export interface SettlementBatch {
  readonly lines: readonly RecordedLine[];
  readonly complete: boolean;
  /** RFC 3339; null: nothing is recorded of it. */
  readonly closedAt: string | null;
  /** YYYY-MM-DD. null: no source has announced it. */
  readonly fundedOn: string | null;
  readonly funded: boolean;
  /** True if the processor's interface has listed the whole batch. */
  readonly listed: boolean;
  /** True if a file has corrected the batch. After that, the interface can no longer add lines. */
  readonly correctedByFile: boolean;
}

export const emptyBatch: SettlementBatch = {
  lines: [],
  complete: false,
  closedAt: null,
  fundedOn: null,
  funded: false,
  listed: false,
  correctedByFile: false,
};

export const evolveBatch = (batch: SettlementBatch, event: SettlementEvent): SettlementBatch => {
  switch (event.type) {
    case 'SettlementLinesRecorded':
      if (batch.complete || event.data.lines.some(({ number }, index) => number !== batch.lines.length + index))
        throw new Error('impossible history: settlement lines out of order');
      return { ...batch, closedAt: batch.closedAt ?? event.data.closedAt, lines: [...batch.lines, ...event.data.lines] };
    case 'SettlementBatchRecorded':
      if (batch.complete || event.data.lineCount !== batch.lines.length) throw new Error('impossible history: a batch of other lines');
      return { ...batch, complete: true, closedAt: event.data.closedAt, fundedOn: event.data.fundedOn, listed: event.data.listed };
    case 'SettlementBatchListed':
      if (!batch.complete || batch.listed) throw new Error('impossible history: a batch listed out of turn');
      return { ...batch, listed: true, fundedOn: batch.fundedOn ?? event.data.fundedOn };
    case 'SettlementLinesCorrected': {
      if (!batch.complete) throw new Error('impossible history: a batch corrected before it was complete');
      const lines = new Map(batch.lines.map((line) => [line.number, line]));
      for (const { before, after } of event.data.corrections) {
        if (before && !lines.delete(before.number)) throw new Error('impossible history: a line corrected that is not there');
        if (after) lines.set(after.number, after);
      }
      return {
        ...batch,
        lines: [...lines.values()].sort((a, b) => a.number - b.number),
        fundedOn: event.data.fundedOn,
        correctedByFile: batch.correctedByFile || event.data.fileId !== null,
      };
    }
    case 'BatchFunded':
      if (!batch.complete || batch.funded) throw new Error('impossible history: a batch funded out of turn');
      return { ...batch, funded: true };
  }
};

// ------------------------------------------------------------------------------------------------------------------------------------
// The meaning of a line.

/** The register's row for the transaction of a line. */
export interface Registered {
  readonly paymentId: string;
  readonly leg: Leg;
  readonly op: 'charge' | 'refund';
  readonly attemptId: string;
  readonly merchantAccount: string;
  /** The batch in which this transaction has settled. null: none so far. */
  readonly settledBatchId: string | null;
}

const isMatched = ({ result }: RecordedLine): boolean => result === 'MATCHED' || result === 'AMOUNT_MISMATCH';

/** True for a sale that was matched with its payment. The payment's own stream records that the leg has settled. */
export const isSettledSale = (line: RecordedLine): boolean => line.type === 'sale' && isMatched(line);

/** True for a sale or a refund that was matched with its payment, even if the amount differs. */
export const isSettledLine = (line: RecordedLine): boolean => (line.type === 'sale' || line.type === 'refund') && isMatched(line);

/**
 * The cents of a line that nothing explains: the whole line if it was not matched with a payment, the difference of a dispute's line, and the net
 * amount of an adjustment.
 */
export const unexplainedCents = (line: RecordedLine): number => {
  if (!line.accepted) return 0;
  if (!isMatched(line)) return line.grossCents;
  if (line.type === 'adjustment') return line.netCents;
  const isDispute = line.type === 'chargeback' || line.type === 'chargeback_reversal';
  return isDispute && line.expectedCents !== null ? line.grossCents - line.expectedCents : 0;
};

export type Judgement =
  | { readonly result: LineResult; readonly expectedCents: number | null; /** True: the payment's stream records it. */ readonly settles: boolean }
  /** The payment is being charged or reversed now. The line can be judged when the charge or the reversal has ended. */
  | 'wait';

const judged = (result: LineResult, expectedCents: number | null = null, settles = false): Judgement => ({ result, expectedCents, settles });

/** If a reversal has been open for this long, the lines of its payment no longer wait. They are judged by the payment's present state. */
const WAIT_FOR_REVERSAL_MS = 3_600_000;

/** Judges a line of a batch against the payment to which it belongs. `now`: milliseconds since the epoch. */
export const judgeLine = (line: SettlementRecord, batch: Omit<BatchName, 'gateway'>, found: Registered, payment: Payment, now: number): Judgement => {
  if (found.merchantAccount !== batch.merchantAccount) return judged('WRONG_ACCOUNT');
  if (payment.phase === 'pending') return 'wait';
  // A settlement line does not resolve a payment whose outcome is unknown. Only a person resolves it (C29).
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
  // A transaction that has settled in another batch is a duplicate here. The payment's own stream decides this, since the register may not include
  // the last correction yet.
  const before = leg.settledBatchId;
  if (before !== null && before !== batchId) return judged('DUPLICATE_AT_GATEWAY');
  // The sale was rejected before and is accepted now. The books no longer expect the money, and the API has no status for this. A person decides.
  if (leg.settlementRejected && line.accepted) return judged('STATUS_MISMATCH', 0);
  // The open reversal may be a void, which changes the amount that settles.
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
  const returned = payment.attempts
    .flatMap((attempt) => attempt.returned)
    .find((one) => one.leg === leg.leg && one.means === 'refund' && one.transactionId === line.transactionId);
  if (!returned) return isReversing(payment, now) ? 'wait' : judged('STATUS_MISMATCH', 0);
  // The refund was made here, and then the processor rejected it. A person has to return the money another way.
  if (!line.accepted) return judged('STATUS_MISMATCH', -cents(returned));
  const expected = -cents(returned);
  return line.grossCents === expected ? judged('MATCHED') : judged('AMOUNT_MISMATCH', expected);
};

/** The money of a dispute was posted when the dispute was recorded. So a line matches if its amount is that of one of the payment's disputes. */
const judgeDispute = (line: SettlementRecord, payment: Charged, fits: (status: DisputeStatus) => boolean, sign: 1 | -1): Judgement => {
  const amounts = payment.disputes.filter(({ status }) => fits(status)).map(({ disputedAmountCents }) => sign * disputedAmountCents);
  if (amounts.length === 0) return judged('STATUS_MISMATCH', 0);
  return amounts.includes(line.grossCents) ? judged('MATCHED') : judged('AMOUNT_MISMATCH', amounts.at(-1));
};

const isReversing = (payment: Charged, now: number): boolean => {
  const attempt = openAttempt(payment);
  return attempt !== undefined && now - Date.parse(attempt.requestedAt) < WAIT_FOR_REVERSAL_MS;
};

/** Cents of a leg that were voided. They never settle. */
const voidedCents = (payment: Charged, { leg }: ChargedLeg): Cents =>
  sumCents(
    payment.attempts.flatMap(({ returned }) => returned).filter((one) => one.leg === leg && one.means === 'void'),
    cents,
  );
