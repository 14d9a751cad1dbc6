/**
 * The settled batches of a merchant account, oldest first, line by line. One page of lines is in memory at a time.
 *
 * The cursor names the time that was reached, and the batches of the last {@link LOOK_BACK_MS} with the numbers of lines in their statistics. So a batch that is listed
 * late is still found, a batch that is listed again is skipped, and a batch that has grown is read again.
 */
import { type Clock, timestamp } from '#kernel';
import { MAX_CURSOR_CHARACTERS, type SettledBatch, type SettlementRecord, UnknownCursor } from '#payments';
import { centsOf, type Fields, idOf, textOf } from './answers.js';
import { STATUSES } from './codes.js';
import { type TransactionDetails } from './outcomes.js';
import { batchesOf, batchPages, type ListedBatch, type Lists, ranges, UnreadableList } from './scans.js';

const HOUR_MS = 3_600_000;
const DAY_MS = 24 * HOUR_MS;
/** A batch may be listed this much later than its settlement time says. */
const LOOK_BACK_MS = 3 * DAY_MS;
/** Without a cursor: the vendor shows two years. */
const FIRST_LOOK_BACK_MS = 2 * 365 * DAY_MS;
/** For so long after its settlement, a batch with fewer lines than its statistics say is not complete. Later, its lines count. */
const GROWS_FOR_MS = HOUR_MS;

/** Our references. Other invoice numbers are of transactions that somebody made at the vendor's own page. */
export const OUR_REF = /^[0-9A-HJKMNP-TV-Z]{20}$/;

interface Cursor {
  readonly reachedMs: number;
  /** Lines by batch id. */
  readonly lines: ReadonlyMap<string, number>;
}

const write = ({ reachedMs, lines }: Cursor): string => {
  let text = String(reachedMs);
  // The newest batches come last in the map, and first in the text: the oldest are left out if there is no room.
  for (const [batchId, count] of [...lines].reverse()) {
    const next = `${text} ${batchId}:${count}`;
    if (next.length > MAX_CURSOR_CHARACTERS) break;
    text = next;
  }
  return text;
};

const read = (cursor: string): Cursor => {
  const [reached, ...batches] = cursor.split(' ');
  const lines = batches.map((one) => /^([1-9]\d{0,19}):(\d{1,9})$/.exec(one));
  if (!/^\d{1,15}$/.test(reached!) || lines.includes(null)) throw new UnknownCursor(cursor);
  return { reachedMs: Number(reached), lines: new Map(lines.reverse().map((match) => [match![1]!, Number(match![2])])) };
};

export interface SettlementPorts {
  readonly lists: Lists;
  /** The details of a transaction. Throws if they cannot be read. */
  readonly details: (transactionId: string, signal: AbortSignal) => Promise<TransactionDetails>;
  readonly clock: Pick<Clock, 'now'>;
}

/** Throws {@link UnknownCursor}, or another error if the vendor cannot be asked. */
export const settledBatches = async function* (ports: SettlementPorts, cursor: string | null, signal: AbortSignal): AsyncGenerator<SettledBatch> {
  const { lists, clock } = ports;
  const now = clock.now();
  let { reachedMs, lines: known }: Cursor = cursor === null ? { reachedMs: now - FIRST_LOOK_BACK_MS, lines: new Map() } : read(cursor);
  const listed = new Map<string, ListedBatch>();
  // The vendor's clock may be a little ahead.
  for (const [from, to] of ranges(reachedMs - (cursor === null ? 0 : LOOK_BACK_MS), now + HOUR_MS))
    for (const batch of batchesOf(await lists.batches(from, to, signal))) listed.set(batch.batchId, batch);

  const settled = [...listed.values()]
    .filter(({ state }) => state === 'settledSuccessfully' || state === 'settlementError')
    .sort((a, b) => a.settledMs - b.settledMs || (a.batchId.padStart(20, '0') < b.batchId.padStart(20, '0') ? -1 : 1));
  for (const batch of settled) {
    const { batchId, settledMs } = batch;
    const before = known.get(batchId);
    if (before !== undefined && (batch.count ?? 0) <= before) continue;
    reachedMs = Math.max(reachedMs, settledMs);
    known = new Map([...recent(known, listed, reachedMs), [batchId, batch.count ?? 0]]);
    yield { batchId, closedAt: timestamp(settledMs), cursor: write({ reachedMs, lines: known }), lines: linesOf(ports, batch, now, signal) };
  }
};

/** The batches that the next listing may name again. */
const recent = (known: ReadonlyMap<string, number>, listed: ReadonlyMap<string, ListedBatch>, reachedMs: number): ReadonlyMap<string, number> =>
  new Map([...known].filter(([batchId]) => (listed.get(batchId)?.settledMs ?? 0) >= reachedMs - LOOK_BACK_MS));

const linesOf = async function* (
  { lists, details }: SettlementPorts,
  batch: ListedBatch,
  now: number,
  signal: AbortSignal,
): AsyncGenerator<SettlementRecord> {
  let read = 0;
  const mayGrow = now - batch.settledMs < GROWS_FOR_MS;
  for await (const page of batchPages(lists, batch.batchId, signal))
    for (const one of page) {
      read += 1;
      const [, meaning] = STATUSES[textOf(one.transactionStatus)] ?? [null, 'adjustment'];
      if (meaning === 'nothing') continue;
      if (meaning === 'pending' && mayGrow) throw new UnreadableList(`a line of batch ${batch.batchId} that is not final`);
      yield await lineOf(one, meaning, details, signal);
    }
  if (read < (batch.count ?? 0) && mayGrow)
    throw new UnreadableList(`${read} of ${batch.count} lines of batch ${batch.batchId}, which was settled a short time ago`);
};

/** The types of lines whose money leaves the merchant. The vendor lists every amount without a sign. */
const NEGATIVE: readonly SettlementRecord['type'][] = ['refund', 'chargeback'];

/** A line of an unknown kind is an adjustment, and so an exception. It is never left out, and never counts as a sale. */
const lineOf = async (
  one: Fields,
  meaning: (typeof STATUSES)[string][1],
  details: SettlementPorts['details'],
  signal: AbortSignal,
): Promise<SettlementRecord> => {
  const transactionId = idOf(one.transId)!;
  const [amountCents, invoiceNumber, status] = [centsOf(one.settleAmount), textOf(one.invoiceNumber), textOf(one.transactionStatus)];
  if (amountCents === null) throw new UnreadableList(`transaction ${transactionId} without an amount`);
  const type = await typeOf(transactionId, meaning, details, signal);
  const isNegative = NEGATIVE.includes(type) || (type === 'adjustment' && /^(?:refund|returned)/.test(status));
  const grossCents = isNegative ? 0 - amountCents : amountCents;
  return {
    transactionId,
    ...(OUR_REF.test(invoiceNumber) && { ref: invoiceNumber }),
    type,
    accepted: meaning !== 'rejected',
    grossCents,
    // The vendor's API shows no fees.
    feeCents: 0,
    netCents: grossCents,
  };
};

/** A line names its kind only by its status. Only the details say what a rejected transaction was. */
const typeOf = async (
  transactionId: string,
  meaning: (typeof STATUSES)[string][1],
  details: SettlementPorts['details'],
  signal: AbortSignal,
): Promise<SettlementRecord['type']> => {
  if (meaning === 'rejected') return (await details(transactionId, signal)).op === 'refund' ? 'refund' : 'sale';
  return meaning === 'pending' || meaning === 'nothing' ? 'adjustment' : meaning;
};
