/**
 * Looks for references in the vendor's lists, since the vendor has no question for one reference.
 *
 * A scan belongs to the merchant account and not to the asker. It reads the unsettled transactions (the newest first), the batches that were settled
 * since, and the unsettled transactions again: a transaction that moves into a batch meanwhile is in one of the three. A scan answers all who asked
 * before it began. A scan that began before a question can show that a transaction exists, but not that it is absent. The result is kept for
 * {@link KEPT_MS}.
 */
import type { Clock } from '#kernel';
import { type Fields, fieldsOf, idOf, instantOf, listOf, textOf } from './answers.js';
import { AWAITS_BATCH } from './outcomes.js';
import { PAGE_LIMIT } from './requests.js';

const KEPT_MS = 10 * 60_000;
/** Questions that come together share one scan. */
const GATHER_MS = 10;
/** A question waits at most this long for a scan that begins after it. */
const WAIT_MS = 1_000;
/** Before the first scan has shown how long one takes. */
const FIRST_ESTIMATE_MS = 5_000;
/** `accountType` of what the vendor lists beside the cards, in lower case. It has batches of its own, which may be days away. */
const NO_CARDS: readonly string[] = ['echeck', 'paypal'];
/** The vendor's longest range of one question for batches. */
export const BATCH_RANGE_MS = 31 * 86_400_000;
/** Clocks may differ, and a transaction may have been submitted a little before its intent was dated. */
const MARGIN_MS = 60 * 60_000;
/**
 * Pages of one list. The vendor shows {@link PAGE_LIMIT} transactions on each, and no merchant of a day or of a batch comes near to this. A list that
 * goes on is a fault of the vendor, and the next reading begins anew.
 */
export const MAX_PAGES = 1_000;

export interface ScanQuestion {
  readonly ref: string;
  /** Wall clock: nothing of this reference is older. */
  readonly begunMs: number;
  /** The scan must have begun later, by the wall clock, and must read every unsettled transaction. null: any scan will do. */
  readonly decidesAfterMs: number | null;
}

/** What a scan found for a reference. `in_flight`: a scan is under way; it ends at about `untilMs` (wall clock). */
export type ScanAnswer =
  | { readonly kind: 'found'; readonly transactionIds: readonly string[] }
  | { readonly kind: 'absent'; readonly scan: Scan }
  | { readonly kind: 'in_flight'; readonly untilMs: number };

export interface Scan {
  /** Wall clock. */
  readonly begunMs: number;
  /** Monotonic. */
  readonly begunAt: number;
  endedAt: number;
  /** Wall clock: everything that was submitted later has been read. */
  readonly sinceMs: number;
  /** All unsettled transactions were read, however old. */
  readonly isWhole: boolean;
  readonly idsByRef: Map<string, string[]>;
  /** Wall clock: the oldest submission that waits for a batch. Infinity: none waits. Known only if the scan is whole. */
  oldestWaitingMs: number;
  /** A batch was closed and is not settled yet. */
  hasPendingBatch: boolean;
}

/** The lists of the vendor. Each throws if the vendor cannot be asked. */
export interface Lists {
  unsettled(page: number, signal: AbortSignal): Promise<Fields>;
  batches(fromMs: number, toMs: number, signal: AbortSignal): Promise<Fields>;
  batch(batchId: string, page: number, signal: AbortSignal): Promise<Fields>;
}

/** The vendor answered with a list that cannot be read. */
export class UnreadableList extends Error {
  constructor(what: string) {
    super(`Authorize.Net answered with ${what}`);
    this.name = 'UnreadableList';
  }
}

/** The transactions of one page. Throws {@link UnreadableList}. */
export const transactionsOf = (answer: Fields): readonly Fields[] => {
  const list = listOf(answer.transactions);
  if (list === null || list.some((one) => idOf(one.transId) === null)) throw new UnreadableList('a list of transactions that cannot be read');
  return list;
};

export interface ListedBatch {
  readonly batchId: string;
  readonly settledMs: number;
  readonly state: string;
  /** Lines by the batch's statistics. null: it has none. */
  readonly count: number | null;
}

const COUNTS = ['chargeCount', 'refundCount', 'voidCount', 'declineCount', 'errorCount'] as const;

/** The batches of card payments in an answer, without doubles. Throws {@link UnreadableList}. */
export const batchesOf = (answer: Fields): readonly ListedBatch[] => {
  const list = listOf(answer.batchList);
  if (list === null) throw new UnreadableList('a list of batches that cannot be read');
  const found = new Map<string, ListedBatch>();
  for (const one of list) {
    const method = textOf(one.paymentMethod);
    if (method !== '' && method !== 'creditCard') continue;
    const [batchId, settledMs, state] = [idOf(one.batchId), instantOf(one.settlementTimeUTC), textOf(one.settlementState)];
    if (batchId === null || (settledMs === null && state !== 'pendingSettlement')) throw new UnreadableList('a batch that cannot be read');
    const statistics = listOf(one.statistics);
    const counts = statistics?.flatMap((sums) => COUNTS.map((name) => Number(textOf(sums[name]) || '0')));
    const count = counts && counts.length > 0 && counts.every((number) => Number.isSafeInteger(number)) ? counts.reduce((a, b) => a + b) : null;
    found.set(batchId, { batchId, settledMs: settledMs ?? 0, state, count });
  }
  return [...found.values()];
};

/** All transactions of a batch, page by page, in the order of their ids. Throws {@link UnreadableList} if a page is missing. */
export const batchPages = async function* (lists: Pick<Lists, 'batch'>, batchId: string, signal: AbortSignal): AsyncGenerator<readonly Fields[]> {
  let read = 0;
  for (let page = 1; page <= MAX_PAGES; page++) {
    const answer = await lists.batch(batchId, page, signal);
    const list = transactionsOf(answer);
    read += list.length;
    const total = Number(textOf(answer.totalNumInResultSet) || '0');
    if (list.length > 0) yield list;
    if (list.length >= PAGE_LIMIT) continue;
    if (read < total) throw new UnreadableList(`${read} of ${total} lines of batch ${batchId}`);
    return;
  }
  throw new UnreadableList(`more than ${MAX_PAGES} pages of batch ${batchId}`);
};

/** Splits a range into ranges that the vendor answers. */
export const ranges = function* (fromMs: number, toMs: number): Generator<readonly [from: number, to: number]> {
  for (let from = fromMs; from <= toMs; from += BATCH_RANGE_MS) yield [from, Math.min(toMs, from + BATCH_RANGE_MS - 1_000)];
};

export class Scans {
  private readonly questions = new Map<string, ScanQuestion & { readonly askedAt: number }>();
  private last: Scan | null = null;
  private running: { readonly scan: Scan | null; readonly startedAt: number; readonly done: Promise<Scan> } | null = null;
  private tookMs = FIRST_ESTIMATE_MS;
  private readonly stop = new AbortController();

  constructor(
    private readonly lists: Lists,
    private readonly clock: Clock,
  ) {}

  close(): void {
    this.stop.abort('closed');
  }

  /**
   * Answers a question, if need be with a new scan. Does not wait for a scan that is under way: the answer is then `in_flight`. A repeated question
   * has the date of its first asking, until it is answered. Throws if the scan fails.
   */
  async ask(question: ScanQuestion, signal: AbortSignal): Promise<ScanAnswer> {
    const { ref } = question;
    const now = this.clock.monotonic();
    const asked = { ...question, askedAt: this.questions.get(ref)?.askedAt ?? now };
    this.questions.set(ref, asked);
    const known = this.answerTo(asked);
    if (known) return known;
    const { running } = this;
    // A scan that has begun cannot answer. The next one will.
    if (running?.scan) return this.inFlight();
    const { done } = running ?? this.start();
    const ended = await this.inTime(done, signal);
    return (ended ? this.answerTo(asked) : null) ?? this.inFlight();
  }

  private answerTo(asked: ScanQuestion & { readonly askedAt: number }): ScanAnswer | null {
    const { last } = this;
    if (!last || this.clock.monotonic() - last.endedAt > KEPT_MS) return null;
    const transactionIds = last.idsByRef.get(asked.ref);
    if (transactionIds) {
      this.questions.delete(asked.ref);
      return { kind: 'found', transactionIds };
    }
    if (!covers(last, asked)) return null;
    this.questions.delete(asked.ref);
    return { kind: 'absent', scan: last };
  }

  private inFlight(): ScanAnswer {
    const runs = this.running ? this.clock.monotonic() - this.running.startedAt : 0;
    return { kind: 'in_flight', untilMs: this.clock.now() + Math.max(WAIT_MS, this.tookMs - runs) };
  }

  /** True: the scan has ended in time. Throws if it failed. */
  private async inTime(done: Promise<Scan>, signal: AbortSignal): Promise<boolean> {
    const over = new AbortController();
    const abort = () => over.abort('over');
    signal.addEventListener('abort', abort, { once: true });
    try {
      return (await Promise.race([done, this.clock.sleep(WAIT_MS, over.signal).then(() => null)])) !== null;
    } finally {
      signal.removeEventListener('abort', abort);
      abort();
    }
  }

  private start(): { readonly done: Promise<Scan> } {
    const startedAt = this.clock.monotonic();
    const done = this.clock
      .sleep(GATHER_MS, this.stop.signal)
      .then(() => this.run(startedAt))
      .then(
        (scan) => {
          this.last = scan;
          this.tookMs = scan.endedAt - scan.begunAt;
          this.running = null;
          const oldest = scan.endedAt - KEPT_MS;
          for (const [ref, { askedAt }] of this.questions) if (askedAt < oldest) this.questions.delete(ref);
          // Questions that came while this scan was under way get the next one at once.
          if ([...this.questions.values()].some((asked) => !covers(scan, asked) && !scan.idsByRef.has(asked.ref))) this.start();
          return scan;
        },
        (error: unknown) => {
          this.running = null;
          throw error;
        },
      );
    // Askers that have gone do not handle the error.
    done.catch(() => undefined);
    this.running = { scan: null, startedAt, done };
    return this.running;
  }

  private async run(startedAt: number): Promise<Scan> {
    const { clock } = this;
    const { signal } = this.stop;
    signal.throwIfAborted();
    const questions = [...this.questions.values()];
    const batchesSinceMs = Math.min(clock.now(), ...questions.map(({ begunMs }) => begunMs)) - MARGIN_MS;
    const scan: Scan = {
      begunMs: clock.now(),
      begunAt: clock.monotonic(),
      endedAt: 0,
      sinceMs: batchesSinceMs,
      isWhole: questions.some(({ decidesAfterMs }) => decidesAfterMs !== null),
      idsByRef: new Map(),
      oldestWaitingMs: Number.POSITIVE_INFINITY,
      hasPendingBatch: false,
    };
    this.running = { scan, startedAt, done: this.running!.done };
    const unsettledSinceMs = scan.isWhole ? Number.NEGATIVE_INFINITY : batchesSinceMs;
    await this.readUnsettled(scan, unsettledSinceMs, signal);
    await this.readBatches(scan, batchesSinceMs, signal);
    if (questions.some(({ ref }) => !scan.idsByRef.has(ref))) {
      // Only the later list says what still waits for a batch.
      scan.oldestWaitingMs = Number.POSITIVE_INFINITY;
      await this.readUnsettled(scan, unsettledSinceMs, signal);
    }
    scan.endedAt = clock.monotonic();
    return scan;
  }

  private async readUnsettled(scan: Scan, sinceMs: number, signal: AbortSignal): Promise<void> {
    for (let page = 1; page <= MAX_PAGES; page++) {
      const list = transactionsOf(await this.lists.unsettled(page, signal));
      let oldestMs = Number.POSITIVE_INFINITY;
      for (const one of list) {
        const submittedMs = instantOf(one.submitTimeUTC);
        if (submittedMs === null) throw new UnreadableList('a transaction without its time');
        oldestMs = Math.min(oldestMs, submittedMs);
        if (NO_CARDS.includes(textOf(one.accountType).toLowerCase())) continue;
        note(scan, one);
        if (AWAITS_BATCH.includes(textOf(one.transactionStatus))) scan.oldestWaitingMs = Math.min(scan.oldestWaitingMs, submittedMs);
      }
      if (list.length < PAGE_LIMIT || oldestMs < sinceMs) return;
    }
    throw new UnreadableList(`more than ${MAX_PAGES} pages of unsettled transactions`);
  }

  private async readBatches(scan: Scan, sinceMs: number, signal: AbortSignal): Promise<void> {
    const seen = new Set<string>();
    // The vendor's clock may be a little ahead.
    for (const [from, to] of ranges(sinceMs, this.clock.now() + MARGIN_MS))
      for (const { batchId, state } of batchesOf(fieldsOf(await this.lists.batches(from, to, signal)))) {
        if (state === 'pendingSettlement') scan.hasPendingBatch = true;
        if (seen.has(batchId)) continue;
        seen.add(batchId);
        for await (const list of batchPages(this.lists, batchId, signal)) for (const one of list) note(scan, one);
      }
  }
}

/** True if the scan began after the question and has read everything that the question is about. */
const covers = (scan: Scan, { askedAt, begunMs, decidesAfterMs }: ScanQuestion & { readonly askedAt: number }): boolean =>
  scan.begunAt >= askedAt && scan.sinceMs <= begunMs && (decidesAfterMs === null || (scan.begunMs >= decidesAfterMs && scan.isWhole));

const note = ({ idsByRef }: Scan, one: Fields): void => {
  const [ref, transactionId] = [textOf(one.invoiceNumber), idOf(one.transId)!];
  if (ref === '') return;
  const ids = idsByRef.get(ref);
  if (!ids) idsByRef.set(ref, [transactionId]);
  else if (!ids.includes(transactionId)) ids.push(transactionId);
};
