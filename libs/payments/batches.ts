/**
 * Recording settlement: closed batches of the processor are read line by line, each line is matched to its payment, the payment's stream gets its fact, and
 * then the batch's own stream gets the line. Everything may be repeated: a payment's leg settles once, a line is recorded once, and two that record the same
 * batch at the same time share its lines between them.
 */
import { Conflict, type EventStore, type NewEvent, OutcomeUnknown, type Recorded, Unavailable, upcast, upcasters } from '#eventstore';
import { Deadline, type Json, timestamp } from '#kernel';
import { hashedUuid } from '#platform';
import type { PaymentPorts } from './charge.js';
import { REQUEST_DEADLINE_MS } from './gateway/call.js';
import type { GatewayAccount, SettlementRecord } from './gateway/gateway.js';
import { isVisible } from './payment.js';
import type { Register, RegisteredTransaction } from './register.js';
import {
  type BatchName,
  emptyBatch,
  evolveBatch,
  judgeLine,
  type LineCorrection,
  type RecordedLine,
  SETTLEMENT_EVENT_TYPES,
  type SettlementBatch,
  type SettlementEvent,
  settlementStream,
} from './settlement.js';
import { raiseStaffTask } from './staff.js';
import { type Owner, retryingConflicts } from './stream.js';

/** Lines per event: far below what a store takes in one append, and enough to look their payments up in one statement. */
const LINES_PER_EVENT = 200;
/** Payments of one event whose streams are written at the same time. */
const PARALLEL_PAYMENTS = 16;
/** How often somebody else may come between before a batch is left to them. */
const MAX_CONFLICTS = 50;
const VERSION = 1;

upcasters.register(Object.fromEntries(SETTLEMENT_EVENT_TYPES.map((type) => [type, []])));

/** Files that were imported have streams of their own among them. */
export const isSettlementStream = (stream: string): boolean => stream.startsWith('settlement-') && !stream.startsWith('settlement-file-');

export const toSettlementEvent = (recorded: Recorded): SettlementEvent => {
  const { type, data, meta } = upcast(recorded);
  return { type, data, at: meta.recordedAt } as unknown as SettlementEvent;
};

export interface SettlementPorts {
  readonly payments: PaymentPorts;
  readonly store: EventStore;
  readonly register: Register;
}

/** A batch as the command line tells it. `amountCents`: gross of the accepted lines, refunds subtracted. */
export interface BatchSummary {
  readonly batchId: string;
  readonly count: number;
  readonly amountCents: number;
}

/** A payment of the batch is being charged or reversed right now: the batch is recorded up to there, and goes on in the next round. */
export class NotYet extends Error {}

/**
 * Records every closed batch of every account that is not recorded yet, and the funding of those whose day has come. Resolves with the batches that are complete
 * now; an account whose processor cannot be asked is logged and left to the next round. Throws when our own stores fail.
 */
export const recordSettlements = async (ports: SettlementPorts, signal: AbortSignal): Promise<BatchSummary[]> => {
  const { register, payments } = ports;
  await register.caughtUp();
  const recorded: BatchSummary[] = [];
  for (const account of await register.accounts()) {
    const gateway = payments.gateways.find(account);
    if (!gateway || gateway.capabilities.settlement === 'none') continue;
    const reader = readAhead(gateway.settlements(account, await register.lastBatch(account), signal), payments, account);
    try {
      for await (const batch of batchesOf(reader)) {
        recorded.push(await recordBatch(ports, account, batch, signal));
        // What this batch settled must be known to the next: the same refund in both was made twice.
        await register.caughtUp();
      }
    } catch (error) {
      const { merchantAccount } = account;
      if (error instanceof NotYet) payments.log.info({ merchantAccount }, error.message);
      // A batch that cannot be must not keep other accounts from theirs; what our stores cannot do concerns all of them.
      else if (error instanceof ImpossibleBatch) payments.log.error({ merchantAccount, err: error }, 'a settlement batch cannot be recorded');
      else throw error;
    }
  }
  await recordFunding(ports);
  return recorded;
};

/** What the processor says of a batch contradicts what was recorded of it: nothing is written, and somebody has to look. */
class ImpossibleBatch extends Error {}

/** The processor's own troubles end the account's round; ours are thrown by whoever consumes. */
const readAhead = async function* (
  records: AsyncIterable<SettlementRecord>,
  { log }: PaymentPorts,
  { merchantAccount }: GatewayAccount,
): AsyncIterable<SettlementRecord> {
  const iterator = records[Symbol.asyncIterator]();
  for (;;) {
    let next: IteratorResult<SettlementRecord>;
    try {
      next = await iterator.next();
    } catch (error) {
      log.warn({ merchantAccount, err: error }, 'the processor cannot be asked for its batches');
      throw new NotYet('the processor cannot be asked now');
    }
    if (next.done) return;
    yield next.value;
  }
};

export interface IncomingBatch {
  readonly batchId: string;
  readonly closedAt: string;
  readonly fundedOn: string | null;
  readonly lines: AsyncIterable<SettlementRecord>;
}

/** Cuts the processor's lines, which come batch after batch, into batches; each must be read to its end before the next. */
const batchesOf = async function* (records: AsyncIterable<SettlementRecord>): AsyncIterable<IncomingBatch> {
  const iterator = records[Symbol.asyncIterator]();
  let next = await iterator.next();
  while (!next.done) {
    const { batchId, closedAt, fundedOn = null } = next.value;
    const lines = async function* (): AsyncIterable<SettlementRecord> {
      while (!next.done && next.value.batchId === batchId) {
        yield next.value;
        next = await iterator.next();
      }
    };
    yield { batchId, closedAt, fundedOn, lines: lines() };
  }
};

/** Records a batch that is not recorded yet; one that is stays as it is. */
export const recordBatch = async (
  ports: SettlementPorts,
  account: GatewayAccount,
  incoming: IncomingBatch,
  signal: AbortSignal,
): Promise<BatchSummary> => {
  const { batchId, closedAt, fundedOn } = incoming;
  const { gateway, merchantAccount } = account;
  const name = { gateway, merchantAccount, batchId };
  let place = await loadBatch(ports.store, settlementStream(name));
  let number = 0;
  let chunk: { number: number; line: SettlementRecord }[] = [];
  const sums = { grossCents: 0, feeCents: 0, netCents: 0 };

  const write = async (): Promise<void> => {
    for (let conflicts = 0; ; conflicts++) {
      const missing = chunk.filter((one) => one.number >= place.batch.lines.length);
      if (missing.length === 0) return;
      const lines = await matchLines(ports, account, incoming, place.batch, missing);
      try {
        place = await append(ports, name, place, { type: 'SettlementLinesRecorded', data: { ...name, closedAt, lines } });
        return;
      } catch (error) {
        if (!(error instanceof Conflict) || conflicts >= MAX_CONFLICTS) throw error;
        place = await loadBatch(ports.store, settlementStream(name));
      }
    }
  };

  for await (const line of incoming.lines) {
    signal.throwIfAborted();
    chunk.push({ number: number++, line });
    if (line.accepted) {
      sums.grossCents += line.grossCents;
      sums.feeCents += line.feeCents;
      sums.netCents += line.netCents;
    }
    if (chunk.length < LINES_PER_EVENT) continue;
    await write();
    chunk = [];
  }
  await write();
  if (number < place.batch.lines.length)
    throw new ImpossibleBatch(`batch ${batchId} has ${number} lines now, and had ${place.batch.lines.length} before`);
  while (!place.batch.complete) {
    try {
      place = await append(ports, name, place, {
        type: 'SettlementBatchRecorded',
        data: { ...name, closedAt, fundedOn, lineCount: number, ...sums },
      });
    } catch (error) {
      if (!(error instanceof Conflict)) throw error;
      place = await loadBatch(ports.store, settlementStream(name));
    }
  }
  return { batchId, count: number, amountCents: sums.grossCents };
};

/** Lines that a corrected file may change at once: far below what a store takes in one append. */
const CORRECTIONS_PER_EVENT = 100;

/**
 * Makes a recorded batch what a later file says of it. Lines are compared in their order by type and transaction; what is the same stays, what differs is judged
 * again and recorded beside what was there before. Returns how many lines differed. The lines of one batch must fit in memory.
 */
export const correctBatch = async (
  ports: SettlementPorts,
  account: GatewayAccount,
  incoming: Omit<IncomingBatch, 'lines'>,
  lines: readonly SettlementRecord[],
  fileId: string,
): Promise<number> => {
  const { gateway, merchantAccount } = account;
  const { batchId, closedAt } = incoming;
  const name = { gateway, merchantAccount, batchId };
  for (let conflicts = 0; ; conflicts++) {
    let place = await loadBatch(ports.store, settlementStream(name));
    const left = new Map<string, RecordedLine[]>();
    for (const line of place.batch.lines) left.set(nameOfLine(line), [...(left.get(nameOfLine(line)) ?? []), line]);
    const changed: { before: RecordedLine | null; line: SettlementRecord }[] = [];
    for (const line of lines) {
      const before = left.get(nameOfLine(line))?.shift() ?? null;
      if (!before || !saysTheSame(before, line)) changed.push({ before, line });
    }
    const gone = [...left.values()].flat();
    if (changed.length + gone.length === 0) return 0;
    const kept = place.batch.lines.filter((line) => !gone.includes(line) && !changed.some(({ before }) => before === line));
    let number = place.batch.lines.reduce((most, line) => Math.max(most, line.number), -1);
    const numbered = changed.map(({ before, line }) => ({ before, line, number: before?.number ?? ++number }));
    const judgedLines = await matchLines(ports, account, { ...incoming, lines: nothing() }, { ...place.batch, lines: kept }, numbered);
    const corrections: LineCorrection[] = [
      ...gone.map((before) => ({ before, after: null })),
      ...numbered.map(({ before }, index) => ({ before, after: judgedLines[index]! })),
    ];
    try {
      for (let from = 0; from < corrections.length; from += CORRECTIONS_PER_EVENT)
        place = await append(ports, name, place, {
          type: 'SettlementLinesCorrected',
          data: { ...name, closedAt, fileId, corrections: corrections.slice(from, from + CORRECTIONS_PER_EVENT) },
        });
      return corrections.length;
    } catch (error) {
      if (!(error instanceof Conflict) || conflicts >= MAX_CONFLICTS) throw error;
    }
  }
};

const nothing = async function* (): AsyncIterable<SettlementRecord> {
  yield* [];
};

const saysTheSame = (recorded: RecordedLine, line: SettlementRecord): boolean =>
  recorded.accepted === line.accepted &&
  recorded.grossCents === line.grossCents &&
  recorded.feeCents === line.feeCents &&
  recorded.netCents === line.netCents &&
  (line.ref === undefined || recorded.ref === null || recorded.ref === line.ref);

/** Whether a batch is recorded to its end. */
export const isRecorded = async (store: EventStore, name: BatchName): Promise<boolean> =>
  (await loadBatch(store, settlementStream(name))).batch.complete;

interface Place {
  readonly batch: SettlementBatch;
  readonly revision: bigint | null;
}

const loadBatch = async (store: EventStore, stream: string): Promise<Place> => {
  let place: Place = { batch: emptyBatch, revision: null };
  for await (const recorded of store.read(stream))
    place = { batch: evolveBatch(place.batch, toSettlementEvent(recorded)), revision: recorded.revision };
  return place;
};

type Written = { [Type in SettlementEvent['type']]: Omit<Extract<SettlementEvent, { type: Type }>, 'at'> }[SettlementEvent['type']];

const append = async (
  { store, payments: { clock, ids } }: SettlementPorts,
  name: Parameters<typeof settlementStream>[0],
  { batch, revision }: Place,
  { type, data }: Written,
): Promise<Place> => {
  const at = timestamp(clock.now());
  const closedAt = 'closedAt' in data ? { effectiveAt: data.closedAt } : { effectiveAt: `${data.fundedOn}T00:00:00.000Z` };
  const event: NewEvent = {
    id: ids.uuid(),
    type,
    v: VERSION,
    data: data as unknown as Json,
    meta: { recordedAt: at, ...closedAt, actor: { type: 'system', id: 'settlement' }, correlationId: ids.uuid() },
  };
  // Folded before it is appended: what cannot be must never reach the log.
  const after = evolveBatch(batch, { type, at, data } as SettlementEvent);
  const appended = await store.append(settlementStream(name), revision ?? 'no_stream', [event]);
  return { batch: after, revision: appended.revision };
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Matching: by transaction id, else by our reference.

const matchLines = async (
  ports: SettlementPorts,
  account: GatewayAccount,
  batch: IncomingBatch,
  recorded: SettlementBatch,
  lines: readonly { number: number; line: SettlementRecord }[],
): Promise<RecordedLine[]> => {
  const find = async () => {
    const found = await ports.register.transactions(
      account.gateway,
      lines.map(({ line }) => line.transactionId),
      lines.flatMap(({ line }) => line.ref ?? []),
    );
    const byId = new Map(found.flatMap((one) => (one.transactionId === null ? [] : [[one.transactionId, one] as const])));
    const byRef = new Map(found.map((one) => [one.ref, one]));
    return (line: SettlementRecord) => byId.get(line.transactionId) ?? (line.ref === undefined ? undefined : byRef.get(line.ref));
  };
  let found = await find();
  // What was charged a moment before the batch closed may not be in the register yet.
  if (lines.some(({ line }) => !found(line))) {
    await ports.register.caughtUp();
    found = await find();
  }

  const seen = new Set(recorded.lines.map(nameOfLine));
  const results = new Map<number, RecordedLine>();
  const byPayment = new Map<string, { number: number; line: SettlementRecord; transaction: RegisteredTransaction }[]>();
  for (const { number, line } of lines) {
    const transaction = found(line);
    const name = nameOfLine(line);
    const repeated = seen.has(name);
    seen.add(name);
    // What the processor takes for its service belongs to no payment.
    if (!transaction && !repeated && line.type === 'fee') results.set(number, toRecorded(number, line, 'MATCHED', null, null));
    else if (!transaction || repeated) {
      const owner = transaction ? { paymentId: transaction.paymentId, leg: transaction.leg } : null;
      results.set(number, toRecorded(number, line, repeated ? 'DUPLICATE_AT_GATEWAY' : 'MISSING_HERE', owner, null));
    } else byPayment.set(transaction.paymentId, [...(byPayment.get(transaction.paymentId) ?? []), { number, line, transaction }]);
  }
  const queue = [...byPayment.values()];
  await Promise.all(
    Array.from({ length: PARALLEL_PAYMENTS }, async () => {
      for (let payment = queue.pop(); payment; payment = queue.pop())
        for (const { number, line, transaction } of payment) results.set(number, await settleLine(ports, account, batch, number, line, transaction));
    }),
  );
  return lines.map(({ number }) => results.get(number)!);
};

const nameOfLine = ({ type, transactionId }: { type: string; transactionId: string }) => `${type} ${transactionId}`;

const toRecorded = (
  number: number,
  { transactionId, ref = undefined, type, accepted, grossCents, feeCents, netCents }: SettlementRecord,
  result: RecordedLine['result'],
  owner: { paymentId: string; leg: RecordedLine['leg'] } | null,
  expectedCents: number | null,
): RecordedLine => ({
  number,
  transactionId,
  ref: ref ?? null,
  type,
  accepted,
  grossCents,
  feeCents,
  netCents,
  result,
  paymentId: owner?.paymentId ?? null,
  leg: owner?.leg ?? null,
  expectedCents,
});

/** Judges one line against its payment as it is now, and gives the payment's stream its fact. */
const settleLine = (
  { payments, store }: SettlementPorts,
  { merchantAccount }: GatewayAccount,
  { batchId, closedAt }: IncomingBatch,
  number: number,
  line: SettlementRecord,
  transaction: RegisteredTransaction,
): Promise<RecordedLine> => {
  const { clock, streams } = payments;
  const { paymentId, leg } = transaction;
  return retryingConflicts(async () => {
    const loaded = await streams.load(paymentId);
    const judgement = judgeLine(line, { merchantAccount, batchId }, transaction, loaded.payment, clock.now());
    if (judgement === 'wait')
      throw new NotYet(`payment ${paymentId} of batch ${batchId} is being charged or reversed; the batch goes on when that has ended`);
    const { result, expectedCents, settles } = judgement;
    const owner: Owner = { actor: { type: 'system', id: 'settlement' }, correlationId: hashedUuid('settlement', merchantAccount, batchId) };
    if (settles)
      await streams.execute(
        loaded,
        [
          {
            type: 'RecordSettlement',
            at: timestamp(clock.now()),
            leg,
            batchId,
            closedAt,
            accepted: line.accepted,
            grossCents: line.grossCents,
            feeCents: line.feeCents,
          },
        ],
        owner,
        new Deadline(clock, REQUEST_DEADLINE_MS),
      );
    const evidence = { merchantAccount, batchId, transactionId: line.transactionId, leg };
    if (settles && !line.accepted) await raiseStaffTask(payments, store, paymentId, 'settlement_rejected', evidence, owner); // C67
    if (result === 'STATUS_MISMATCH' && isVisible(loaded.payment) && loaded.payment.phase === 'unknown')
      await raiseStaffTask(payments, store, paymentId, 'settled_while_unknown', evidence, owner); // C29
    const rejected = loaded.payment.phase === 'charged' && loaded.payment.legs.some((one) => one.leg === leg && one.settlementRejected);
    if (result === 'STATUS_MISMATCH' && line.type === 'sale' && rejected)
      await raiseStaffTask(payments, store, paymentId, 'settled_after_rejection', evidence, owner);
    return toRecorded(number, line, result, { paymentId, leg }, expectedCents);
  });
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Funding.

/** The processor pays out a batch on the day that it announced with it; what truly reached the bank is compared by finance. */
export const recordFunding = async (ports: SettlementPorts): Promise<void> => {
  const today = timestamp(ports.payments.clock.now()).slice(0, 10);
  for (const { account, batchId, netCents, fundedOn } of await ports.register.fundable(today)) {
    const name = { gateway: account.gateway, merchantAccount: account.merchantAccount, batchId };
    try {
      const place = await loadBatch(ports.store, settlementStream(name));
      if (!place.batch.funded) await append(ports, name, place, { type: 'BatchFunded', data: { ...name, fundedOn, netCents } });
    } catch (error) {
      // Recorded by another worker, or a batch that somebody has to look at; the others get theirs.
      if (error instanceof Unavailable || error instanceof OutcomeUnknown) throw error;
      if (!(error instanceof Conflict)) ports.payments.log.error({ batchId, err: error }, 'the funding of a batch cannot be recorded');
    }
  }
};
