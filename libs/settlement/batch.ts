/**
 * Settlement: the processor's batches, line by line, and the effect of a line on a payment. Pure.
 *
 * A batch is a stream of its own (`settlement-<gateway>-<merchant account>-<batch>`, a `-` within a part as `%2D`). It records every line exactly
 * once, with its match. So no line that the processor reported is ever lost. A line that fits no payment stays as an exception for staff.
 */
import { type Cents, sumCents } from '#kernel';
import { cents, type Charged, type ChargedLeg, type DisputeStatus, type Leg, openAttempt, type Payment, type SettlementRecord } from '#payments';

/**
 * The result of matching a line. `MISSING_HERE`: no payment of ours. `STATUS_MISMATCH`: its payment is unknown, failed or voided here, or the refund
 * did not happen here. `WRONG_ACCOUNT`: it settled on another merchant account than it was charged on. All but `MATCHED` are exceptions.
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
   * All lines are recorded. Sums are over accepted lines. `fundedOn` (YYYY-MM-DD) is the day that the processor announces. `listed`: the lines came
   * from the processor's interface, each in its place, so listing can continue after this batch.
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
   * The processor's interface listed a batch to its end that had been completed from a file. From now on the interface is asked for later batches.
   * The sums are those of the interface. `differing`: lines, and day of funding, in which it differs from the record.
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
   * A corrected file changes recorded lines. Each is given before and after. null: it was not there, or is gone. `fundedOn` is the newest day.
   * `fileId` null: the processor's interface lists further lines of a batch that a file has recorded.
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
  /** The net of the batch reached the bank on its day: the operator's bank, or directly that of the agency whose portal is named. */
  | Fact<'BatchFunded', BatchName & { readonly fundedOn: string; readonly netCents: number; readonly agencyPortalId?: string }>;

/** Id of a batch's stream. No two batches share a stream, also with unusual text in their parts. */
export const batchStreamId = ({ gateway, merchantAccount, batchId }: BatchName): string =>
  [gateway, merchantAccount, batchId].map((part) => encodeURIComponent(part).replaceAll('-', '%2D')).join('-');

/** Imported files have streams with the same prefix, of fewer parts. */
export const isSettlementStream = (stream: string): boolean => stream.startsWith('settlement-') && stream.split('-').length === 4;

/** A batch as far as it is recorded. */
export interface SettlementBatch {
  readonly lines: readonly RecordedLine[];
  readonly complete: boolean;
  /** RFC 3339; null: nothing is recorded of it. */
  readonly closedAt: string | null;
  /** YYYY-MM-DD. null: no source has announced it. */
  readonly fundedOn: string | null;
  readonly funded: boolean;
  /** The processor's interface has listed all of it. */
  readonly listed: boolean;
  /** A file has corrected it. From then on the interface counts less than the file. */
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

/** The register's facts about a line's transaction. */
export interface Registered {
  readonly paymentId: string;
  readonly leg: Leg;
  readonly op: 'charge' | 'refund';
  readonly attemptId: string;
  readonly merchantAccount: string;
  /** The batch of the line that this transaction was matched with before. */
  readonly settledBatchId: string | null;
}

const isMatched = ({ result }: RecordedLine): boolean => result === 'MATCHED' || result === 'AMOUNT_MISMATCH';

/** A sale that its payment knows. The payment's own fact settles it. */
export const isSettledSale = (line: RecordedLine): boolean => line.type === 'sale' && isMatched(line);

/** A sale or a refund of ours, with our amount or with another one. */
export const isSettledLine = (line: RecordedLine): boolean => (line.type === 'sale' || line.type === 'refund') && isMatched(line);

/** The unexplained cents of a line: the whole line if it belongs to no payment, the difference of a dispute's line, and every adjustment. */
export const unexplainedCents = (line: RecordedLine): number => {
  if (!line.accepted) return 0;
  if (!isMatched(line)) return line.grossCents;
  if (line.type === 'adjustment') return line.netCents;
  const isDispute = line.type === 'chargeback' || line.type === 'chargeback_reversal';
  return isDispute && line.expectedCents !== null ? line.grossCents - line.expectedCents : 0;
};

export type Judgement =
  | { readonly result: LineResult; readonly expectedCents: number | null; /** The leg's stream gets its fact. */ readonly settles: boolean }
  /** The payment is being charged or reversed at this moment. The meaning of the line is clear when that has ended. */
  | 'wait';

const judged = (result: LineResult, expectedCents: number | null = null, settles = false): Judgement => ({ result, expectedCents, settles });

/** A reversal that cannot be resolved for this long must not delay a whole batch. Its line is judged by the present state. */
const WAIT_FOR_REVERSAL_MS = 3_600_000;

/** The meaning of a batch's line for the payment that it belongs to. `now`: milliseconds since the epoch. */
export const judgeLine = (line: SettlementRecord, batch: Omit<BatchName, 'gateway'>, found: Registered, payment: Payment, now: number): Judgement => {
  if (found.merchantAccount !== batch.merchantAccount) return judged('WRONG_ACCOUNT');
  if (payment.phase === 'pending') return 'wait';
  // Settlement evidence for an unknown payment leaves it unknown; only a person resolves it (C29).
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
  // A second transaction under one reference, or one transaction in two batches: the cardholder paid twice.
  if (found.op !== 'charge' || line.transactionId !== leg.transactionId) return judged('DUPLICATE_AT_GATEWAY');
  // The payment's own stream decides. A read model may be older than a correction.
  const before = leg.settledBatchId;
  if (before !== null && before !== batchId) return judged('DUPLICATE_AT_GATEWAY');
  // First rejected, now accepted. The books no longer expect the money, and the API has no status for it. A person decides.
  if (leg.settlementRejected && line.accepted) return judged('STATUS_MISMATCH', 0);
  // A running void changes the amount that settles.
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
  // Refunded here, and the processor sent it back. A person has to return the money another way.
  if (!line.accepted) return judged('STATUS_MISMATCH', -cents(returned));
  const expected = -cents(returned);
  return line.grossCents === expected ? judged('MATCHED') : judged('AMOUNT_MISMATCH', expected);
};

/** The money of a dispute was posted when it was recorded. Its line must name that dispute's amount. */
const judgeDispute = (line: SettlementRecord, payment: Charged, fits: (status: DisputeStatus) => boolean, sign: 1 | -1): Judgement => {
  const amounts = payment.disputes.filter(({ status }) => fits(status)).map(({ disputedAmountCents }) => sign * disputedAmountCents);
  if (amounts.length === 0) return judged('STATUS_MISMATCH', 0);
  return amounts.includes(line.grossCents) ? judged('MATCHED') : judged('AMOUNT_MISMATCH', amounts.at(-1));
};

const isReversing = (payment: Charged, now: number): boolean => {
  const attempt = openAttempt(payment);
  return attempt !== undefined && now - Date.parse(attempt.requestedAt) < WAIT_FOR_REVERSAL_MS;
};

/** Cents of a leg that were voided, and so never settle. */
const voidedCents = (payment: Charged, { leg }: ChargedLeg): Cents =>
  sumCents(
    payment.attempts.flatMap(({ returned }) => returned).filter((one) => one.leg === leg && one.means === 'void'),
    cents,
  );
