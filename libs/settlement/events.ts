/** The events of this lib, and their streams. */
import { type DecidedStreamType, defineEvents, type Recorded, type StreamType } from '#eventstore';
import { emptyBatch, evolveBatch, type SettlementBatch, type SettlementEvent } from './batch.js';
import { type ExceptionCommand, type ExceptionEvent, type SettlementCase, settlementException } from './exception.js';

/** Upcast to a version that knows more kinds. */
const asItWas = <Data>(data: Data): Data => data;
const withoutReference = <Data extends { readonly reference: string | null }>(data: Omit<Data, 'reference'>): Data =>
  ({ ...data, reference: null }) as Data;

export const settlementEvents = defineEvents<SettlementEvent>({
  SettlementLinesRecorded: [asItWas],
  SettlementBatchRecorded: [],
  SettlementBatchListed: [],
  SettlementLinesCorrected: [withoutReference],
  BatchFunded: [],
  BatchFundingWithdrawn: [],
});

export const exceptionEvents = defineEvents<ExceptionEvent>({
  ExceptionOpened: [asItWas, asItWas],
  ExceptionAssigned: [],
  ExceptionExplained: [],
  ExceptionRefundRequested: [],
  ExceptionRefundEnded: [],
  ExceptionSuperseded: [],
  ExceptionResolved: [],
});

export interface SettlementFileImported {
  readonly type: 'SettlementFileImported';
  readonly data: {
    /** SHA-256 of the file, in lower-case hex. */
    readonly sha256: string;
    readonly name: string;
    readonly lines: number;
    /** Number of corrections that this file made to earlier batches: changed lines, and changed days of funding. */
    readonly corrected: number;
    readonly batches: readonly { readonly batchId: string; readonly count: number; readonly amountCents: number }[];
  };
}

export const settlementFileEvents = defineEvents<SettlementFileImported>({ SettlementFileImported: [] });

export const BATCH_STREAM: StreamType<SettlementBatch, SettlementEvent> = {
  prefix: 'settlement-',
  events: settlementEvents,
  decider: { initial: emptyBatch, evolve: evolveBatch },
  effectiveAt: ({ data }) => ('closedAt' in data ? data.closedAt : `${data.fundedOn}T00:00:00.000Z`),
};

export const EXCEPTION_STREAM: DecidedStreamType<SettlementCase | null, ExceptionCommand, ExceptionEvent> = {
  prefix: 'exception-',
  events: exceptionEvents,
  decider: settlementException,
};

export const exceptionIdOf = ({ stream }: Pick<Recorded, 'stream'>): string => stream.slice(EXCEPTION_STREAM.prefix.length);
