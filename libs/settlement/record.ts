/**
 * Records settlement. For each line of a closed batch: find its payment, append an event to the payment's stream, then append the line to the batch's
 * stream.
 *
 * Every step can be repeated: a leg settles once, and a line is recorded once. Two processes can record the same batch at the same time.
 */
import {
  append,
  type AppendOptions,
  Conflict,
  type EventStore,
  load,
  type Loaded,
  type Origin,
  OutcomeUnknown,
  StoreIncident,
  Unavailable,
} from '#eventstore';
import { type Cents, Deadline, FUNDING_AHEAD_DAYS, isDay, ServiceError, sumCents, timestamp, wrongDate } from '#kernel';
import { hashedUuid, uuidTime } from '#platform';
import {
  type GatewayAccount,
  isVisible,
  type Leg,
  type LoadedPayment,
  type Payment,
  type PaymentCommand,
  type PaymentPorts,
  raiseStaffTask,
  READ_TOO_LONG_AGO_MS,
  refuseClearText,
  REQUEST_DEADLINE_MS,
  retryingConflicts,
  type SettlementRecord,
} from '#payments';
import { BATCH_STREAM, EXCEPTION_STREAM } from './events.js';
import type { FeedRows } from './feeds.js';
import type { Register, RegisteredTransaction } from './register.js';
import {
  type BatchName,
  batchStreamId,
  isSettledSale,
  judgeLine,
  judgeSentRefund,
  type LineCorrection,
  linesOf,
  nameOfLine,
  nextNumber,
  type RecordedLine,
  type SettlementBatch,
  type SettlementEvent,
  WITHHELD_FEE,
} from './batch.js';

/** Number of lines per event. An append allows many more. The payments of these lines are looked up in one statement. */
const LINES_PER_EVENT = 200;
/**
 * If a transaction is unknown, the register catches up, but not again before so many lines or milliseconds. It then also reads the lines just recorded,
 * which takes time.
 */
const CATCH_UP_LINES = 5_000;
const CATCH_UP_MS = 2_000;
/** Number of payments whose streams are written at the same time. The store writes what waits in one statement. */
const PARALLEL_PAYMENTS = 64;
/** After this many conflicts, this process leaves the batch to the other writer. */
const MAX_CONFLICTS = 50;

export interface SettlementPorts {
  readonly payments: PaymentPorts;
  readonly store: EventStore;
  readonly register: Register;
  readonly feeds: FeedRows;
}

/** A batch as the command line shows it. `amountCents`: gross of the accepted lines, minus refunds. */
export interface BatchSummary {
  readonly batchId: string;
  readonly count: number;
  readonly amountCents: number;
}

/**
 * Thrown if a batch cannot be completed now. For example, one of its payments is being charged, or the processor does not answer. Recorded lines
 * stay, and the next round continues after them.
 */
export class NotYet extends Error {}

/** True for an error of our own event store. It concerns all batches. */
export const isOfStore = (error: unknown): boolean =>
  error instanceof Unavailable || error instanceof OutcomeUnknown || error instanceof StoreIncident;

/**
 * Thrown if a batch cannot be recorded as the processor lists it. For example, it contradicts the recorded lines. Nothing more is written, and a
 * person must decide.
 */
export class ImpossibleBatch extends Error {}

/** Thrown if a date of a batch that the interface lists cannot be true. */
export class WrongDate extends ImpossibleBatch {}

type BatchDates = Pick<IncomingBatch, 'closedAt' | 'fundedOn'>;

/** What is wrong with the dates of a batch: words that begin with the column. null: nothing. */
export const wrongHead = ({ closedAt, fundedOn }: BatchDates, now: number, old = false): string | null => {
  const closed = wrongDate(closedAt, now, { old });
  if (closed !== null) return `closed_at ${closed}`;
  const notBefore = { date: closedAt, what: 'the close of the batch' };
  const funded = fundedOn === null ? null : wrongDate(fundedOn, now, { notBefore, aheadDays: FUNDING_AHEAD_DAYS, old });
  return funded === null ? null : `funded_on ${funded}`;
};

/**
 * The first line whose charge began after the batch closed. null: there is none. Only the time in the id of the payment is a bound: the register knows
 * when a charge or return was recorded, which can be days after the batch.
 */
export const lateLine = async (
  { register }: Pick<SettlementPorts, 'register'>,
  { gateway, merchantAccount }: GatewayAccount,
  closedAt: string,
  lines: readonly SettlementRecord[],
): Promise<{ readonly index: number; readonly why: string } | null> => {
  const found = await register.transactions(
    gateway,
    lines.map(({ transactionId }) => transactionId),
    [],
  );
  for (const [index, { transactionId }] of lines.entries())
    for (const one of found)
      if (one.transactionId === transactionId && one.merchantAccount === merchantAccount && one.op === 'charge' && one.paymentId !== null) {
        const notBefore = { date: timestamp(uuidTime(one.paymentId)), what: `transaction ${transactionId}` };
        // Only this bound: the others were checked with the head of the batch.
        const why = wrongDate(closedAt, Date.parse(closedAt), { notBefore });
        if (why !== null) return { index, why: `closed_at ${why}` };
      }
  return null;
};

export interface IncomingBatch {
  readonly batchId: string;
  readonly closedAt: string;
  readonly fundedOn: string | null;
  readonly lines: AsyncIterable<SettlementRecord>;
}

/** Maximum number of lines in a batch. Memory holds the whole batch. */
export const MAX_BATCH_LINES = 200_000;

export interface RecordedBatch extends BatchSummary {
  /** If the batch was recorded before: number of corrected or added lines, plus 1 for a corrected day of funding. */
  readonly corrected: number;
}

/**
 * Records a batch, from its beginning or from the line at which an earlier run ended.
 *
 * The source is a file (`fileId`: its hash) or the processor's interface (null). A file corrects all recorded lines that differ. The interface only
 * adds missing lines. If the interface contradicts a complete batch, the difference is recorded for staff. If it contradicts an incomplete batch,
 * this throws {@link ImpossibleBatch} until a file decides.
 */
export const recordBatch = async (
  ports: SettlementPorts,
  account: GatewayAccount,
  incoming: IncomingBatch,
  fileId: string | null,
  signal: AbortSignal,
): Promise<RecordedBatch> => {
  const { batchId } = incoming;
  const { gateway, merchantAccount } = account;
  const name = { gateway, merchantAccount, batchId };
  const said: SettlementRecord[] = [];
  let place = await loadBatch(ports.store, name);
  // A file was checked before. Dates that are recorded already are not looked at again.
  const isNew = fileId === null && !place.state.complete;
  const wrong = isNew && place.state.closedAt === null ? wrongHead(incoming, ports.payments.clock.now()) : null;
  if (wrong !== null) throw new WrongDate(`batch ${batchId} of ${merchantAccount}: ${wrong}`);
  let isAsSaid = false;
  const head = () => ({ ...name, closedAt: place.state.closedAt ?? incoming.closedAt });
  const recorded: RecordedLine[] = [];
  const names = new Set<string>();
  let pagesRead = 0;
  /** Adds the lines that were recorded since the last call to `recorded` and `names`. Recorded pages of an incomplete batch never change. */
  const readPages = (): void => {
    for (const line of place.state.pages.slice(pagesRead).flat()) {
      recorded.push(line);
      names.add(nameOfLine(line));
    }
    pagesRead = place.state.pages.length;
  };
  // The batch was closed before this call. So the first catching up covers the intents of all its charges and refunds. It covers the refunds by which
  // recovery undid a charge, too. A line without a reference, and the refund by which a request undid its own charge, need an event that may come later.
  // So the register catches up again and again.
  const catchUp = catchingUp(ports, () => said.length);
  let same = 0;
  /** True if the batch is incomplete and its recorded lines agree with the source so far. `same`: number of lines that were already compared. */
  const agrees = (): boolean => {
    if (place.state.complete) return false;
    readPages();
    const both = Math.min(recorded.length, said.length);
    while (same < both && sameName(recorded[same]!, said[same]!) && saysTheSame(recorded[same]!, said[same]!)) same++;
    return same === both;
  };
  /** Appends at the loaded revision. If another writer was first, or if `notAfter` has passed, loads the batch again and returns false. */
  const appended = async (event: WithoutTime<SettlementEvent>, options?: AppendOptions): Promise<boolean> => {
    try {
      place = await appendTo(ports, place, event, undefined, options);
      return true;
    } catch (error) {
      if (!(error instanceof Conflict)) throw error;
      place = await loadBatch(ports.store, name);
      return false;
    }
  };
  const write = async (): Promise<void> => {
    for (let conflicts = 0; agrees() && recorded.length < said.length; conflicts++) {
      if (conflicts > MAX_CONFLICTS) throw new NotYet(`batch ${batchId} is being recorded by somebody else`);
      const from = recorded.length;
      const late = isNew ? await lateLine(ports, account, head().closedAt, said.slice(from)) : null;
      if (late) throw new WrongDate(`batch ${batchId} of ${merchantAccount}: ${late.why}`);
      const missing = said.slice(from).map((line, index) => ({ number: from + index, line }));
      const { lines, readAt } = await matchLines(ports, account, head(), names, missing, catchUp);
      // Later than this, they are judged again: see {@link matchLines}.
      await appended({ type: 'SettlementLinesRecorded', data: { ...head(), lines } }, { notAfter: readAt + READ_TOO_LONG_AGO_MS });
    }
  };

  for await (const line of incoming.lines) {
    signal.throwIfAborted();
    // The log would keep a wrong amount for ever, and every reader would fail at it.
    if (![line.grossCents, line.feeCents, line.netCents].every(Number.isSafeInteger))
      throw new ImpossibleBatch(`batch ${batchId}: line ${said.length} is not in whole cents`);
    if (said.push(line) > MAX_BATCH_LINES) throw new ImpossibleBatch(`batch ${batchId} has more than ${MAX_BATCH_LINES} lines`);
    if (said.length % LINES_PER_EVENT === 0) await write();
  }
  await write();

  while (!place.state.complete) {
    // An interrupted run may have recorded other lines or another order. Complete the batch with the recorded lines, and correct them in
    // `complete()`. If the interface lacks a recorded line or contradicts it, a person must decide.
    const isWhole = agrees() && recorded.length === said.length;
    const lacking = isWhole ? [] : compared(place.state, said, fileId === null ? 'interface' : 'file').lacking;
    if (fileId === null && lacking.length > 0) throw contradiction(name, lacking, place.state, said);
    const data = { ...head(), fundedOn: incoming.fundedOn, lineCount: recorded.length, ...sumsOf(recorded), listed: isWhole && fileId === null };
    isAsSaid = (await appended({ type: 'SettlementBatchRecorded', data })) && isWhole && (fileId === null || !isOtherClose(place.state, incoming));
  }
  const complete = () => (fileId === null ? listBatch(ports, account, incoming, said) : correctBatch(ports, account, incoming, said, fileId));
  return { batchId, count: said.length, amountCents: sumsOf(said).grossCents, corrected: isAsSaid ? 0 : await complete() };
};

/** Brings the register up to date, if enough lines were judged or enough time has passed since the last call that did. Else resolves to false. */
const catchingUp = ({ register, payments: { clock } }: SettlementPorts, judged: () => number): (() => Promise<boolean>) => {
  let last: { readonly lines: number; readonly at: number } | null = null;
  return async () => {
    const now = { lines: judged(), at: clock.monotonic() };
    if (last !== null && now.lines - last.lines < CATCH_UP_LINES && now.at - last.at < CATCH_UP_MS) return false;
    last = now;
    await register.caughtUp();
    return true;
  };
};

const sumsOf = (lines: readonly { accepted: boolean; grossCents: number; feeCents: number; netCents: number }[]) => {
  const accepted = lines.filter((line) => line.accepted);
  return {
    grossCents: sumCents(accepted, ({ grossCents }) => grossCents),
    feeCents: sumCents(accepted, ({ feeCents }) => feeCents),
    netCents: sumCents(accepted, ({ netCents }) => netCents),
  };
};

/** The error for the person who decides. It names the first line that differs. */
const contradiction = (
  { merchantAccount, batchId }: BatchName,
  [first]: readonly RecordedLine[],
  { lineCount }: SettlementBatch,
  said: readonly SettlementRecord[],
): ImpossibleBatch => {
  const words = ({ grossCents, feeCents, netCents }: RecordedLine | SettlementRecord) => `gross ${grossCents}, fee ${feeCents}, net ${netCents}`;
  const now = said.find((line) => sameName(first!, line));
  return new ImpossibleBatch(
    `batch ${batchId} of ${merchantAccount} is recorded up to line ${lineCount}, line ${first!.number} of it as ${first!.type} ${first!.transactionId} (${words(first!)}); ` +
      `${now ? `the processor says ${words(now)} of it now` : `among the ${said.length} lines that the processor lists now it is not`}. Import the file of the batch that is right`,
  );
};

/**
 * Compares a complete batch with the interface's lines. If the interface only has further lines, they are added. Other differences are recorded for
 * staff. Returns the number of added lines.
 */
const listBatch = async (
  ports: SettlementPorts,
  account: GatewayAccount,
  incoming: Omit<IncomingBatch, 'lines'>,
  said: readonly SettlementRecord[],
): Promise<number> => {
  const { gateway, merchantAccount } = account;
  const { batchId, fundedOn } = incoming;
  const name = { gateway, merchantAccount, batchId };
  let added = 0;
  for (let conflicts = 0; conflicts <= MAX_CONFLICTS; conflicts++) {
    const place = await loadBatch(ports.store, name);
    const { state: batch } = place;
    const { changed, lacking } = compared(batch, said, 'interface');
    if (changed.length > 0 && lacking.length === 0 && !batch.correctedByFile) {
      added += await correctBatch(ports, account, incoming, said, null);
      continue;
    }
    const isOtherDay = fundedOn !== null && batch.fundedOn !== null && fundedOn !== batch.fundedOn;
    const differing = changed.filter(({ before }) => !before).length + lacking.length + (isOtherDay ? 1 : 0);
    if (differing > 0) {
      // A listed batch may differ because a file has corrected it. Then do not log the difference.
      if (!batch.listed || !batch.correctedByFile)
        ports.payments.log.error(
          { merchantAccount, batchId, differing },
          'the processor’s interface says otherwise of a batch than what is recorded of it',
        );
      await standAsRecorded(ports, account, { batchId, closedAt: batch.closedAt! }, batch, [...changed.map(({ line }) => line), ...lacking]);
    }
    if (batch.listed) return added;
    try {
      const data = { ...name, closedAt: batch.closedAt!, fundedOn, lineCount: said.length, ...sumsOf(said), differing };
      await appendTo(ports, place, { type: 'SettlementBatchListed', data });
      return added;
    } catch (error) {
      if (!(error instanceof Conflict)) throw error;
    }
  }
  throw new NotYet(`batch ${batchId} is being recorded by somebody else`);
};

/**
 * Makes the payments of differing lines agree with the recorded lines. If two writers record a batch at the same time, both may append to a payment,
 * but only one records the line.
 */
const standAsRecorded = async (
  ports: SettlementPorts,
  account: GatewayAccount,
  { batchId, closedAt }: { batchId: string; closedAt: string },
  batch: SettlementBatch,
  differing: readonly (SettlementRecord | RecordedLine)[],
): Promise<void> => {
  const sales = [...new Set(differing.flatMap(({ type, transactionId }) => (type === 'sale' ? [transactionId] : [])))];
  const settled = new Map(linesOf(batch).flatMap((line) => (isSettledSale(line) ? [[line.transactionId, line] as const] : [])));
  for (const { paymentId, leg, op, transactionId } of await ports.register.transactions(account.gateway, sales, [])) {
    const line = transactionId === null ? undefined : settled.get(transactionId);
    if (op === 'charge' && paymentId !== null) await tellPayment(ports, account, { batchId, closedAt }, paymentId, leg, line ?? null);
  }
};

/** Makes the payment agree with the recorded line. `line` null: the leg is not in this batch. */
const tellPayment = (
  { payments: { clock, streams } }: SettlementPorts,
  { merchantAccount }: GatewayAccount,
  { batchId, closedAt }: { batchId: string; closedAt: string },
  paymentId: string,
  leg: Leg,
  line: RecordedLine | null,
): Promise<LoadedPayment> =>
  retryingConflicts(async () => {
    const loaded = await streams.load(paymentId);
    const at = timestamp(clock.now());
    const command: PaymentCommand = line
      ? { type: 'RecordSettlement', at, leg, batchId, closedAt, accepted: line.accepted, grossCents: line.grossCents, feeCents: line.feeCents }
      : { type: 'WithdrawSettlement', at, leg, batchId };
    return streams.execute(loaded, [command], ownerOf(merchantAccount, batchId), new Deadline(clock, REQUEST_DEADLINE_MS));
  });

const ownerOf = (merchantAccount: string, batchId: string): Origin => ({
  actor: { type: 'system', id: 'settlement' },
  correlationId: hashedUuid('settlement', merchantAccount, batchId),
});

/**
 * Compares received lines (`said`) with recorded lines. The interface does not list a fee that staff recorded, so only a file is compared with it.
 * Lines are paired by type and transaction. If a transaction is recorded twice, the line that
 * settled its payment is paired first.
 *
 * - `changed`: received lines that differ from the recorded line `before`, or are new (`before` is null).
 * - `gone`: recorded lines that were not received.
 * - `lacking`: recorded lines that differ or are gone.
 */
const compared = (
  batch: SettlementBatch,
  said: readonly SettlementRecord[],
  source: 'interface' | 'file',
): { changed: { before: RecordedLine | null; line: SettlementRecord }[]; gone: RecordedLine[]; lacking: RecordedLine[] } => {
  const left = new Map<string, RecordedLine[]>();
  for (const line of linesOf(batch)) {
    if (source === 'interface' && line.transactionId === WITHHELD_FEE) continue;
    const same = left.get(nameOfLine(line));
    if (!same) left.set(nameOfLine(line), [line]);
    else if (isSettledSale(line)) same.unshift(line);
    else same.push(line);
  }
  const changed: { before: RecordedLine | null; line: SettlementRecord }[] = [];
  for (const line of said) {
    const before = left.get(nameOfLine(line))?.shift() ?? null;
    if (!before || !saysTheSame(before, line)) changed.push({ before, line });
  }
  const gone = [...left.values()].flat();
  return { changed, gone, lacking: [...changed.flatMap(({ before }) => before ?? []), ...gone] };
};

/** Number of corrections per event. An append allows many more. */
const CORRECTIONS_PER_EVENT = 100;

/**
 * Corrects a complete batch by a later source. Lines that differ are judged again. If a file names another time of closing, all lines are removed at the
 * old time and added at the new one. After an interruption, the same file goes on. If the money is booked on a wrong day, that funding is withdrawn. If a payment's sale is no longer in the batch, the payment's
 * stream records this. Returns the number of corrected lines, plus 1 for a corrected day of funding.
 */
const correctBatch = async (
  ports: SettlementPorts,
  account: GatewayAccount,
  { batchId, closedAt, fundedOn }: Omit<IncomingBatch, 'lines'>,
  said: readonly SettlementRecord[],
  fileId: string | null,
): Promise<number> => {
  const { gateway, merchantAccount } = account;
  const name = { gateway, merchantAccount, batchId };
  let corrected = 0;
  // Lines that come back with another time of closing keep their numbers. So their exceptions go on where the old ones ended.
  const numbers = new Map<string, number[]>();
  let next = 0;
  for (let conflicts = 0; ; conflicts++) {
    let place = await loadBatch(ports.store, name);
    const { state: batch } = place;
    const lines = linesOf(batch);
    const isMoved = fileId !== null && isOtherClose(batch, { closedAt });
    // The books first take back the entries at the old time.
    const isRemoval = isMoved && lines.length > 0;
    const head = {
      ...name,
      closedAt: isMoved && !isRemoval ? closedAt : batch.closedAt!,
      fundedOn: (fileId === null ? null : fundedOn) ?? batch.fundedOn ?? fundedOn,
      fileId,
      reference: null,
    };
    const { changed, gone, lacking } = compared(batch, isRemoval ? [] : said, fileId === null ? 'interface' : 'file');
    // A file has the last word. The caller decides again.
    if (fileId === null && (lacking.length > 0 || batch.correctedByFile)) return corrected;
    if (changed.length + gone.length === 0 && head.fundedOn === batch.fundedOn) return corrected;
    const touched = new Set(lacking);
    // Duplicate lines are left out. Otherwise the first line of a transaction would count as a duplicate of the second.
    const names = new Set(lines.filter((line) => !touched.has(line) && line.result !== 'DUPLICATE_AT_GATEWAY').map(nameOfLine));
    next = Math.max(next, nextNumber(lines));
    if (isRemoval) for (const line of lines) numbers.set(nameOfLine(line), [...(numbers.get(nameOfLine(line)) ?? []), line.number]);
    const left = [
      ...gone.map((before) => ({ before, line: null, number: before.number })),
      ...changed.map(({ before, line }) => ({ before, line, number: before?.number ?? numbers.get(nameOfLine(line))?.shift() ?? next++ })),
    ];
    const changedDay = head.fundedOn === batch.fundedOn ? 0 : 1;
    let done = 0;
    const catchUp = catchingUp(ports, () => done);
    try {
      do {
        const some = left.slice(done, done + CORRECTIONS_PER_EVENT);
        const received = some.flatMap(({ line, number }) => (line === null ? [] : [{ line, number }]));
        const { lines: judged, readAt } = await matchLines(ports, account, head, names, received, catchUp);
        const judgedAs = new Map(judged.map((line) => [line.number, line]));
        const corrections: LineCorrection[] = some.map(({ before, line, number }) => ({
          before,
          after: line === null ? null : judgedAs.get(number)!,
        }));
        for (const { before, after } of corrections)
          if (before && before.accepted && isSettledSale(before) && !(after && isSettledSale(after)))
            await tellPayment(ports, account, head, before.paymentId!, before.leg!, null);
        done += some.length;
        // Another day counts with the last lines. Before them, the net amount of the batch is not yet the right one.
        const day = isRemoval || done < left.length ? batch.fundedOn : head.fundedOn;
        place = await appendTo(ports, place, correctionOf(batch, { ...head, fundedOn: day, corrections }), undefined, {
          notAfter: readAt + READ_TOO_LONG_AGO_MS,
        });
        for (const line of judged) names.add(nameOfLine(line));
      } while (done < left.length);
      if (isRemoval) continue;
      return corrected + done + changedDay;
    } catch (error) {
      if (!(error instanceof Conflict)) throw error;
      if (conflicts >= MAX_CONFLICTS) throw new NotYet(`batch ${batchId} is being recorded by somebody else`);
      if (!isRemoval) corrected += done;
    }
  }
};

/** The events of a correction. If the money is booked on another day, that funding is withdrawn with them. */
const correctionOf = (
  { funded, funding, fundedOn }: SettlementBatch,
  data: Extract<SettlementEvent, { type: 'SettlementLinesCorrected' }>['data'],
): readonly WithoutTime<SettlementEvent>[] => [
  ...(funded && data.fundedOn !== fundedOn ? [{ type: 'BatchFundingWithdrawn', data: funding! } as const] : []),
  { type: 'SettlementLinesCorrected', data },
];

/** True if the time differs from the recorded one. Files may give seconds, and the interface milliseconds. */
const isOtherClose = ({ closedAt }: SettlementBatch, said: { readonly closedAt: string }): boolean =>
  closedAt !== null && Math.floor(Date.parse(closedAt) / 1_000) !== Math.floor(Date.parse(said.closedAt) / 1_000);

const saysTheSame = (recorded: RecordedLine, line: SettlementRecord): boolean =>
  recorded.accepted === line.accepted &&
  recorded.grossCents === line.grossCents &&
  recorded.feeCents === line.feeCents &&
  recorded.netCents === line.netCents &&
  (line.ref === undefined || recorded.ref === null || recorded.ref === line.ref);

const sameName = (one: { type: string; transactionId: string }, other: { type: string; transactionId: string }): boolean =>
  one.type === other.type && one.transactionId === other.transactionId;

export const batchOf = async (store: EventStore, name: BatchName): Promise<SettlementBatch> => (await loadBatch(store, name)).state;

type LoadedBatch = Loaded<SettlementBatch>;

const loadBatch = (store: EventStore, name: BatchName): Promise<LoadedBatch> => load(store, BATCH_STREAM, batchStreamId(name));

type WithoutTime<Event> = Event extends unknown ? Omit<Event, 'at'> : never;

const appendTo = (
  { store, payments: { clock, ids } }: SettlementPorts,
  loaded: LoadedBatch,
  events: WithoutTime<SettlementEvent> | readonly WithoutTime<SettlementEvent>[],
  origin: Origin = { actor: { type: 'system', id: 'settlement' }, correlationId: ids.uuid() },
  options?: AppendOptions,
): Promise<LoadedBatch> => {
  const at = timestamp(clock.now());
  const facts = [events].flat().map((event): SettlementEvent => ({ ...event, at }));
  return append({ store, clock, ids }, BATCH_STREAM, loaded, facts, origin, options);
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Matching: find the payment of a line by the transaction id, else by our reference.

/**
 * A line that does not settle its payment appends nothing to the payment's stream. So no append fails if another process has changed the payment
 * meanwhile. Record the lines at most {@link READ_TOO_LONG_AGO_MS} after `readAt`, the time at which their payments were read.
 */
const matchLines = async (
  ports: SettlementPorts,
  account: GatewayAccount,
  batch: { readonly batchId: string; readonly closedAt: string },
  /** Names of the lines that are recorded. */
  recorded: ReadonlySet<string>,
  lines: readonly { number: number; line: SettlementRecord }[],
  /** Brings the register up to date. Resolves to false if that was not due. */
  catchUp: () => Promise<boolean>,
): Promise<{ readonly lines: RecordedLine[]; readonly readAt: number }> => {
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
  // A charge right before the batch closed may not be in the register yet.
  if (lines.some(({ line }) => !found(line)) && (await catchUp())) found = await find();

  const seen = new Set<string>();
  const results = new Map<number, RecordedLine>();
  const byPayment = new Map<string, FoundLine[]>();
  const sent: { number: number; line: SettlementRecord; transaction: RegisteredTransaction; exceptionId: string }[] = [];
  for (const { number, line } of lines) {
    const transaction = found(line);
    const name = nameOfLine(line);
    const repeated = recorded.has(name) || seen.has(name);
    seen.add(name);
    // The processor's own fees belong to no payment.
    if (!transaction && !repeated && line.type === 'fee') results.set(number, toRecorded(number, line, 'MATCHED', null, null));
    else if (!transaction || repeated) {
      const origin = transaction && transaction.paymentId !== null ? { paymentId: transaction.paymentId, leg: transaction.leg } : null;
      results.set(number, toRecorded(number, line, repeated ? 'DUPLICATE_AT_GATEWAY' : 'MISSING_HERE', origin, null));
    } else if (transaction.exceptionId !== null) sent.push({ number, line, transaction, exceptionId: transaction.exceptionId });
    else {
      const paymentId = transaction.paymentId!;
      byPayment.set(paymentId, [...(byPayment.get(paymentId) ?? []), { number, line, transaction: { ...transaction, paymentId } }]);
    }
  }
  const readAt = ports.payments.clock.realNow();
  for (const { number, line, transaction, exceptionId } of sent) {
    const { paymentId, leg } = transaction;
    const refund = (await load(ports.store, EXCEPTION_STREAM, exceptionId)).state?.refund ?? null;
    const name = { merchantAccount: account.merchantAccount, batchId: batch.batchId };
    const judgement = judgeSentRefund(line, name, transaction, refund, ports.payments.clock.now());
    if (judgement === 'wait')
      throw new NotYet(`a refund of exception ${exceptionId} is being sent; batch ${batch.batchId} goes on when that has ended`);
    const origin = paymentId === null ? null : { paymentId, leg };
    if (judgement.result === 'REFUND_FAILED' && paymentId !== null) {
      const { payment } = await ports.payments.streams.load(paymentId);
      await raiseRefundFailed(ports, account, batch.batchId, line, { paymentId, leg }, payment);
    }
    results.set(number, toRecorded(number, line, judgement.result, origin, judgement.expectedCents));
  }
  const queue = [...byPayment];
  const loaded = await ports.payments.streams.loadAll([...byPayment.keys()]);
  await Promise.all(
    Array.from({ length: PARALLEL_PAYMENTS }, async () => {
      for (let payment = queue.pop(); payment; payment = queue.pop()) {
        const [paymentId, [first, ...others]] = payment;
        results.set(first!.number, await settleLine(ports, account, batch, first!, loaded.get(paymentId)));
        for (const line of others) results.set(line.number, await settleLine(ports, account, batch, line));
      }
    }),
  );
  return { lines: lines.map(({ number }) => results.get(number)!), readAt };
};

/** A line with the transaction that it names. */
interface FoundLine {
  readonly number: number;
  readonly line: SettlementRecord;
  readonly transaction: RegisteredTransaction & { readonly paymentId: string };
}

const toRecorded = (
  number: number,
  { transactionId, ref = undefined, type, accepted, grossCents, feeCents, netCents }: SettlementRecord,
  result: RecordedLine['result'],
  origin: { paymentId: string; leg: RecordedLine['leg'] } | null,
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
  paymentId: origin?.paymentId ?? null,
  leg: origin?.leg ?? null,
  expectedCents,
});

/**
 * Judges one line against its payment. If the line settles a leg, the payment's stream records this. `before`: the payment as it was read with others.
 * If it has changed since, an append at its revision fails. Without an append nothing would notice that, so the payment is then read again.
 */
const settleLine = (
  { payments, store }: SettlementPorts,
  { merchantAccount }: GatewayAccount,
  { batchId, closedAt }: { readonly batchId: string; readonly closedAt: string },
  { number, line, transaction }: FoundLine,
  before: LoadedPayment | null = null,
): Promise<RecordedLine> => {
  const { clock, streams } = payments;
  const { paymentId, leg } = transaction;
  const judge = ({ payment }: LoadedPayment) => judgeLine(line, { merchantAccount, batchId }, transaction, payment, clock.now());
  return retryingConflicts(async () => {
    let loaded = before ?? (await streams.load(paymentId));
    let judgement = judge(loaded);
    if (before && (judgement === 'wait' || !judgement.settles)) {
      loaded = await streams.load(paymentId);
      judgement = judge(loaded);
    }
    before = null;
    if (judgement === 'wait')
      throw new NotYet(`payment ${paymentId} of batch ${batchId} is being charged or reversed; the batch goes on when that has ended`);
    const { result, expectedCents, settles, undone } = judgement;
    const origin = ownerOf(merchantAccount, batchId);
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
        origin,
        new Deadline(clock, REQUEST_DEADLINE_MS),
      );
    const evidence = { merchantAccount, batchId, transactionId: line.transactionId, leg };
    if (settles && !line.accepted) await raiseStaffTask(payments, store, paymentId, 'settlement_rejected', evidence, origin); // C67
    if (result === 'STATUS_MISMATCH' && isVisible(loaded.payment) && loaded.payment.phase === 'unknown')
      await raiseStaffTask(payments, store, paymentId, 'settled_while_unknown', evidence, origin); // C29
    const rejected = loaded.payment.phase === 'charged' && loaded.payment.legs.some((one) => one.leg === leg && one.settlementRejected);
    if (result === 'STATUS_MISMATCH' && line.type === 'sale' && rejected)
      await raiseStaffTask(payments, store, paymentId, 'settled_after_rejection', evidence, origin);
    if (result === 'REFUND_FAILED') {
      const failed = { type: 'RecordRefundFailed', at: timestamp(clock.now()), leg, transactionId: line.transactionId } as const;
      await streams.execute(loaded, [failed], origin, new Deadline(clock, REQUEST_DEADLINE_MS));
      await raiseRefundFailed({ payments, store }, { merchantAccount }, batchId, line, transaction, loaded.payment);
    }
    return { ...toRecorded(number, line, result, { paymentId, leg }, expectedCents), ...(undone && { undone }) };
  });
};

/** `wasVoided`: the payment was never charged as partners see it. They were told that the payer had not paid. */
const raiseRefundFailed = (
  { payments, store }: Pick<SettlementPorts, 'payments' | 'store'>,
  { merchantAccount }: Pick<GatewayAccount, 'merchantAccount'>,
  batchId: string,
  { transactionId, grossCents: cents }: SettlementRecord,
  { paymentId, leg }: { readonly paymentId: string; readonly leg: Leg },
  { phase }: Payment,
): Promise<boolean> => {
  const wasVoided = phase === 'failed' || phase === 'voided';
  const evidence = { merchantAccount, batchId, transactionId, leg, cents, wasVoided };
  return raiseStaffTask(payments, store, paymentId, 'refund_failed', evidence, ownerOf(merchantAccount, batchId));
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Funding.

export interface Funding {
  readonly merchantAccount: string;
  readonly batchId: string;
  /** YYYY-MM-DD: the day on which the money reached the bank. */
  readonly on: string;
  /** The part of the batch that the processor kept, 0 or more. */
  readonly feeCents: Cents;
  /** Where this is written, such as the number of a statement. */
  readonly reference: string;
}

export interface FundingOptions {
  /** True: the day may be long ago. */
  readonly old?: boolean;
  /** True: the day may correct one that staff recorded. */
  readonly correct?: boolean;
}

/** A batch that {@link recordAnnouncedFunding} may record. null: the same was recorded before. */
interface PlannedFunding {
  readonly name: BatchName;
  readonly place: LoadedBatch;
}

const planned = async (
  ports: SettlementPorts,
  { merchantAccount, batchId, on, feeCents, reference }: Funding,
  { old = false, correct = false }: FundingOptions,
): Promise<PlannedFunding | null> => {
  const refuse = (message: string): never => {
    throw new ServiceError('VALIDATION_ERROR', `Batch ${batchId} of ${merchantAccount}: ${message}.`);
  };
  refuseClearText('reference', reference);
  if (!Number.isSafeInteger(feeCents) || feeCents < 0) refuse('the fee must be whole cents, 0 or more');
  if (!isDay(on)) refuse('the day must read YYYY-MM-DD');
  const account = (await ports.register.accountsOfBatch(batchId)).find((one) => one.merchantAccount === merchantAccount);
  if (!account) return refuse('there is no such batch');
  const name = { gateway: account.gateway, merchantAccount, batchId };
  const place = await loadBatch(ports.store, name);
  const { complete, closedAt, fundedOn, reference: before } = place.state;
  if (!complete) refuse('it is not recorded to its end');
  if (fundedOn === on && before === reference) return null;
  // Without --correct, an old command that is sent again must not bring the wrong day back.
  if (fundedOn !== null && (before === null || !correct))
    refuse(`its day of funding is ${fundedOn} already; ${before === null ? 'a file of the processor' : '--correct'} corrects it`);
  const notBefore = { date: closedAt!, what: 'the close of the batch' };
  const wrong = wrongDate(on, ports.payments.clock.now(), { notBefore, aheadDays: FUNDING_AHEAD_DAYS, old });
  if (wrong !== null) refuse(`the day ${wrong}`);
  const lines = linesOf(place.state);
  const fee = lines.find(({ transactionId }) => transactionId === WITHHELD_FEE)?.feeCents ?? 0;
  if (fundedOn !== null && feeCents !== fee) refuse(`its fee is recorded as ${fee} cents; name the same, since only the day is corrected`);
  if (fundedOn !== null) return { name, place };
  const net = sumsOf(lines).netCents;
  if (feeCents > 0 && feeCents > net) refuse(`the fee must not be more than the batch, which is ${net} cents`);
  return { name, place };
};

/**
 * Records when the money of batches reached the bank, and what the processor kept of them, for a processor that names neither. All are checked before
 * the first is recorded. What was recorded before with the same day and reference is passed over. Returns the number of recorded batches. Throws
 * VALIDATION_ERROR, INVALID_STATE if somebody else changes a batch at the same time, and the errors of the store.
 */
export const recordAnnouncedFunding = async (
  ports: SettlementPorts,
  fundings: readonly Funding[],
  origin: Origin,
  options: FundingOptions = {},
): Promise<number> => {
  await ports.register.caughtUp();
  const plans: (readonly [Funding, PlannedFunding])[] = [];
  const seen = new Set<string>();
  for (const funding of fundings) {
    const key = `${funding.merchantAccount} ${funding.batchId}`;
    if (seen.has(key)) throw new ServiceError('VALIDATION_ERROR', `Batch ${funding.batchId} of ${funding.merchantAccount} is named twice.`);
    seen.add(key);
    const plan = await planned(ports, funding, options);
    if (plan) plans.push([funding, plan]);
  }
  for (const [{ on, feeCents, reference }, { name, place }] of plans) {
    const { state } = place;
    const number = nextNumber(linesOf(state));
    const fee = { transactionId: WITHHELD_FEE, type: 'fee', accepted: true, grossCents: 0, feeCents, netCents: 0 - feeCents } as const;
    const corrections = feeCents === 0 || state.fundedOn !== null ? [] : [{ before: null, after: toRecorded(number, fee, 'MATCHED', null, null) }];
    const data = { ...name, closedAt: state.closedAt!, fundedOn: on, fileId: null, reference, corrections };
    try {
      await appendTo(ports, place, correctionOf(state, data), origin);
    } catch (error) {
      if (!(error instanceof Conflict)) throw error;
      throw new ServiceError('INVALID_STATE', `Batch ${name.batchId} is being changed; send the same again.`);
    }
  }
  await ports.register.caughtUp();
  await recordFunding(ports);
  return plans.length;
};

/** Records the funding of batches whose announced day has come. Finance compares the amount with the bank account. */
export const recordFunding = async (ports: SettlementPorts): Promise<void> => {
  const today = timestamp(ports.payments.clock.now()).slice(0, 10);
  for (const { account, batchId, netCents } of await ports.register.fundable(today)) {
    const name = { gateway: account.gateway, merchantAccount: account.merchantAccount, batchId };
    try {
      const place = await loadBatch(ports.store, name);
      const { funded, funding, fundedOn } = place.state;
      // The register may lag behind a correction of the day. Only the day of a withdrawn funding was wrong: its amount counts again.
      if (!funded && fundedOn !== null && fundedOn <= today)
        await appendTo(ports, place, { type: 'BatchFunded', data: { ...(funding ?? { ...name, netCents }), fundedOn } });
    } catch (error) {
      // A conflict means that another worker has recorded the funding. Log any other fault, and continue with the other batches.
      if (isOfStore(error)) throw error;
      if (!(error instanceof Conflict)) ports.payments.log.error({ batchId, err: error }, 'the funding of a batch cannot be recorded');
    }
  }
};
