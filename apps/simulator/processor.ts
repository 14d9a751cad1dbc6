/**
 * The books of the sandbox card processor: charges, voids, refunds, settlements, and references that can no longer be executed.
 *
 * Each operation is decided on the rows of its account and becomes one record. Then the record is folded into the rows. This file uses no clock and no
 * socket. In memory are only the accounts, and when their batches closed.
 *
 * | key | row |
 * |---|---|
 * | `count` | how many operations and batches there were |
 * | `account/<account>` | the sums of the open batch, and what was forgotten |
 * | `op/<account>/<number>` | an operation or tombstone, with its later state |
 * | `ref/<account>/<ref>`, `txn/<account>/<id>` | the number of an operation |
 * | `batch/<account>/<number>` | a closed batch: its sums, and the numbers of the operations whose lines it holds |
 * | `close/<account>/<number>` | the batch that closed after this operation, of all open ones |
 * | `dispute/<number>`, `disputeId/<id>` | the dispute of a charge, by the charge's number · that number |
 *
 * The processor plays another company, so it uses the words of its own protocol and not those of the gateway port. It keeps no card data, not even
 * hashed. Brand, last four digits and the fixture's name are enough.
 */
import { canonicalJson } from '#kernel';
import { fixtureFor, type Fixture, type Quirk } from './fixtures.js';
import { padded, type Store } from './store.js';

export type Leg = 'principal' | 'fee' | 'combined';
export type Check = 'match' | 'no_match' | 'not_checked';
export type DeclineCode = 'generic_decline' | 'insufficient_funds' | 'card_limit_exceeded' | 'expired_card' | 'cvv_mismatch' | 'postal_code_mismatch';
export type Rejection =
  'already_settled' | 'not_settled' | 'already_reversed' | 'exceeds' | 'not_found' | 'finalised' | 'unsupported' | 'settlement_rejected' | 'other';
export type AskedBy = 'void' | 'refund' | 'reversal';

export type Operation = 'charge' | 'void' | 'refund';

export interface Card {
  readonly brand: string;
  readonly last4: string;
}

export interface ChargeAsked {
  readonly op: 'charge';
  readonly leg: Leg;
  readonly amountCents: number;
  readonly fixture: string;
  readonly card: Card;
}

export interface ReversalAsked {
  readonly op: 'void' | 'refund';
  readonly leg: Leg;
  readonly chargeTransactionId: string;
  /** null: all that remains. Only a void may have null. */
  readonly amountCents: number | null;
  readonly askedBy: AskedBy;
}

/** The result of an operation, stored under its reference. A repeated call with the same fields gets the same result. */
export type Result =
  | {
      readonly kind: 'approved';
      readonly transactionId: string;
      readonly amountCents: number;
      readonly authCode?: string;
      readonly avs?: Check;
      readonly cvv?: Check;
      readonly card?: Card;
    }
  | {
      readonly kind: 'declined';
      readonly code: DeclineCode;
      readonly message: string;
      readonly transactionId: string;
      readonly avs?: Check;
      readonly cvv?: Check;
    }
  | { readonly kind: 'rejected'; readonly why: Rejection; readonly message: string }
  | { readonly kind: 'not_processed'; readonly message: string };

/** The processor's fee for each sale. It is stored with the batch, so a new tariff does not change old batches. */
export interface Tariff {
  readonly flatCents: number;
  readonly percentBps: number;
}
const TARIFF: Tariff = { flatCents: 10, percentBps: 220 };

interface Recorded {
  /** RFC 3339. */
  readonly at: string;
  readonly merchantAccount: string;
}

export interface OperationRecord extends Recorded {
  readonly type: 'operation';
  readonly ref: string;
  readonly asked: ChargeAsked | ReversalAsked;
  readonly result: Result;
  /** For a charge: its special behaviour. */
  readonly quirks?: readonly Quirk[];
  /** For a charge that settled at once: its batch. */
  readonly batch?: { readonly batchId: string; readonly tariff: Tariff };
  /** For a reversal that was not processed: the quirk that caused it. */
  readonly usedUp?: Quirk;
}

export interface TombstoneRecord extends Recorded {
  readonly type: 'tombstone';
  readonly ref: string;
}

export interface BatchRecord extends Recorded {
  readonly type: 'batch';
  readonly batchId: string;
  readonly tariff: Tariff;
  /** Disputes that this settlement opens, by charge transaction. */
  readonly disputes: readonly { readonly disputeId: string; readonly chargeTransactionId: string }[];
}

export interface DisputeRecord extends Recorded {
  readonly type: 'dispute';
  readonly disputeId: string;
  readonly status: string;
  readonly stage: string;
}

/** The first record of an older simulator's journal from which ended operations were removed. */
export interface ForgottenRecord {
  readonly type: 'forgotten';
  readonly operations: number;
  readonly batches: number;
}

export type ProcessorRecord = OperationRecord | TombstoneRecord | BatchRecord | DisputeRecord | ForgottenRecord;

export type ChargeState = 'approved' | 'voided' | 'settling' | 'settled' | 'settlement_rejected';

/** A charge or a refund, as a merchant sees it under the processor's own id. */
export interface Transaction {
  readonly transactionId: string;
  readonly ref: string;
  readonly op: 'charge' | 'refund';
  readonly state: ChargeState;
  readonly amountCents: number;
  /** The charge that a refund returns. null: a charge. */
  readonly chargeTransactionId: string | null;
}

/** An operation or tombstone with its later state. */
interface Entry {
  /** Counts all operations and tombstones, from 0. */
  readonly number: number;
  readonly record: OperationRecord | TombstoneRecord;
  readonly voidedCents: number;
  readonly refundedCents: number;
  readonly usedUp: readonly Quirk[];
  /** The batch of a charge that settled at once, or whose batch was forgotten. Other batches follow from the entry's number. */
  readonly batchId?: string;
}

interface OperationEntry extends Entry {
  readonly record: OperationRecord;
}

interface Charge extends OperationEntry {
  readonly record: OperationRecord & { readonly asked: ChargeAsked; readonly result: Extract<Result, { kind: 'approved' }> };
}

export interface SettlementLine {
  readonly transactionId: string;
  readonly ref: string;
  readonly type: 'sale' | 'refund';
  /** False: this sale was rejected at settlement. Gross is then the presented amount, and fee and net are 0. */
  readonly accepted: boolean;
  readonly grossCents: number;
  readonly feeCents: number;
  readonly netCents: number;
}

/** Sums of settlement lines. Gross counts accepted lines only. */
interface Sums {
  readonly count: number;
  readonly grossCents: number;
  readonly feeCents: number;
  readonly netCents: number;
}

export interface Batch extends Sums {
  readonly batchId: string;
  readonly closedAt: string;
  /** The next weekday after the close. */
  readonly fundedOn: string;
}

interface BatchRow extends Batch {
  readonly tariff: Tariff;
  /** Its lines are those of operations above `after`, up to `upTo`. */
  readonly after: number;
  readonly upTo: number;
}

export interface Dispute {
  readonly disputeId: string;
  readonly merchantAccount: string;
  readonly chargeTransactionId: string;
  readonly ref: string;
  readonly amountCents: number;
  readonly status: string;
  readonly stage: string;
  readonly reasonCode: string;
  readonly reason: string;
  readonly openedOn: string;
  readonly dueDate: string;
}

export interface ChargeCommand {
  readonly ref: string;
  readonly leg: Leg;
  readonly amountCents: number;
  readonly instrument: { readonly number: string } | { readonly token: string };
  readonly card: Card;
  readonly postalCodeGiven: boolean;
}

export interface ReversalCommand {
  readonly ref: string;
  readonly asked: ReversalAsked;
}

/** `incomplete`: the answer lacks required fields, whether the charge was approved or not. */
export interface Answer {
  readonly result: Result;
  readonly incomplete: boolean;
}

export type Finalized = { readonly kind: 'executed'; readonly result: Result } | { readonly kind: 'never' } | { readonly kind: 'cannot_tell' };

export type Found =
  | { readonly found: false }
  | { readonly found: 'cannot_tell' }
  | {
      readonly found: true;
      readonly state: ChargeState | 'declined';
      readonly transactionId: string;
      /** The amount that was approved or declined, before any void. */
      readonly amountCents: number;
      readonly batchId?: string;
      readonly authCode?: string;
    };

/** One executed operation or tombstone, with its later state. Proofs compare the ledger with it. */
export interface Truth {
  readonly number: number;
  readonly at: string;
  readonly merchantAccount: string;
  readonly ref: string;
  readonly op: Operation | 'tombstone';
  readonly leg?: Leg;
  readonly askedBy?: AskedBy;
  readonly result?: Result['kind'];
  readonly why?: string;
  readonly transactionId?: string;
  readonly chargeTransactionId?: string;
  readonly amountCents?: number;
  readonly card?: Card;
  readonly fixture?: string;
  readonly state?: ChargeState;
  readonly voidedCents?: number;
  readonly refundedCents?: number;
  readonly batchId?: string;
}

export interface ProcessorOptions {
  /** True if a part of an unsettled charge can be voided. The rest then settles. */
  readonly partialVoid: boolean;
  /** True if a charge can be refunded before it has settled. */
  readonly refundUnsettled: boolean;
}

interface AccountRow {
  /** Sums of the open batch. */
  readonly open: Sums;
  /** Numbers of its charges that will be disputed. */
  readonly toDispute: readonly number[];
  /** The number of the last operation before the last close of the open batch. */
  readonly closedUpTo: number;
  readonly newestBatch: string | null;
  /** Operations up to this number were forgotten with their batches. */
  readonly forgottenUpTo: number;
}

interface Close {
  readonly batchId: string;
  readonly closedAt: string;
  /** Its number: that of the last operation before it. */
  readonly upTo: number;
}

interface Account {
  row: AccountRow;
  /** Oldest first. */
  closes: Close[];
}

const NO_SUMS: Sums = { count: 0, grossCents: 0, feeCents: 0, netCents: 0 };
const NEW_ACCOUNT: AccountRow = { open: NO_SUMS, toDispute: [], closedUpTo: -1, newestBatch: null, forgottenUpTo: -1 };
/** Operations are forgotten in pieces of this many. */
const FORGOTTEN_PER_PIECE = 1_000;
/** After so many pages of lines, the place behind the oldest is no longer known. The next page of that batch then counts from its beginning. */
const PLACES_KEPT = 100;
const DISPUTE_ANSWER_DAYS = 20;
const DAY_MS = 86_400_000;
const BASIS_POINTS = 10_000;

const date = (epochMs: number) => new Date(epochMs).toISOString().slice(0, 10);

const nextWeekday = (at: string): string => {
  let day = Date.parse(at) + DAY_MS;
  while ([0, 6].includes(new Date(day).getUTCDay())) day += DAY_MS;
  return date(day);
};

const rejected = (why: Rejection, message: string): Result => ({ kind: 'rejected', why, message });

export class Processor {
  private readonly accounts = new Map<string, Account>();
  private count = { operations: 0, batches: 0 };
  /** Where the next page of a batch's lines begins: after how many lines, and after which operation. By account and batch. */
  private readonly places = new Map<string, { readonly lines: number; readonly after: number }>();

  private constructor(
    private readonly options: ProcessorOptions,
    private readonly rows: Store,
    private readonly draw: (prefix: string) => string,
  ) {}

  /**
   * @param rows the rows of this processor. They must be durable before an answer is sent.
   * @param draw makes a new id: random characters after a prefix.
   */
  static async open(options: ProcessorOptions, rows: Store, draw: (prefix: string) => string): Promise<Processor> {
    const processor = new Processor(options, rows, draw);
    processor.count = rows.get('count') ?? processor.count;
    for await (const [key, row] of rows.list<AccountRow>('account/')) processor.accounts.set(key.split('/')[1]!, { row, closes: [] });
    for await (const [key, close] of rows.list<Close>('close/')) processor.account(key.split('/')[1]!).closes.push(close);
    return processor;
  }

  /** True if a call with this reference already has an answer: a stored result, or the refusal of a finalised reference. */
  isAnswered(merchantAccount: string, ref: string): boolean {
    return this.byRef(merchantAccount, ref) !== undefined;
  }

  charge(merchantAccount: string, at: string, command: ChargeCommand): Answer {
    const fixture = fixtureFor(command.instrument, command.leg);
    const asked: ChargeAsked = { op: 'charge', leg: command.leg, amountCents: command.amountCents, fixture: fixture.name, card: command.card };
    const stored = this.stored(merchantAccount, command.ref, asked);
    if (stored) return stored;
    if (fixture.result.kind === 'never_reached')
      return { result: { kind: 'not_processed', message: 'never reached the processor' }, incomplete: true };

    const settlesAtOnce = fixture.quirks?.includes('settles_at_once');
    const record: OperationRecord = {
      type: 'operation',
      at,
      merchantAccount,
      ref: command.ref,
      asked,
      result: this.chargeResult(fixture.result, command),
      ...(fixture.quirks && { quirks: fixture.quirks }),
      ...(settlesAtOnce && { batch: { batchId: this.nextBatchId(), tariff: TARIFF } }),
    };
    return this.book(record);
  }

  /** Executes a void or a refund. */
  reverse(merchantAccount: string, at: string, { ref, asked }: ReversalCommand): Answer {
    const stored = this.stored(merchantAccount, ref, asked);
    if (stored) return stored;
    const charge = this.chargeOf(merchantAccount, asked.chargeTransactionId);
    const usedUp = charge && this.failsThisOnce(charge, asked);
    const result: Result = usedUp
      ? { kind: 'not_processed', message: 'the processor failed' }
      : charge
        ? asked.op === 'void'
          ? this.voidResult(charge, asked)
          : this.refundResult(charge, asked)
        : rejected('not_found', 'no such charge');
    return this.book({ type: 'operation', at, merchantAccount, ref, asked, result, ...(usedUp && { usedUp }) });
  }

  /** Reports whether the operation was executed. If not, writes a tombstone, which refuses every later call with this reference. */
  finalize(merchantAccount: string, at: string, ref: string, op: Operation): Finalized {
    const record = this.byRef(merchantAccount, ref)?.record;
    if (!record) {
      this.apply({ type: 'tombstone', at, merchantAccount, ref });
      return { kind: 'never' };
    }
    if (record.type === 'tombstone') return { kind: 'never' };
    // If the reference belongs to another operation, the caller has mixed up the two. Neither `executed` nor `never` would be true.
    if (record.asked.op !== op || isNeverTold(record)) return { kind: 'cannot_tell' };
    return { kind: 'executed', result: record.result };
  }

  lookup(merchantAccount: string, ref: string, op: Operation): Found {
    const entry = this.byRef(merchantAccount, ref);
    if (!entry || !isOperation(entry)) return { found: false };
    const { result, asked } = entry.record;
    if (asked.op !== op || isNeverTold(entry.record)) return { found: 'cannot_tell' };
    if (result.kind === 'declined')
      return { found: true, state: 'declined', transactionId: result.transactionId, amountCents: asked.amountCents ?? 0 };
    if (result.kind !== 'approved') return { found: false };
    const { transactionId, amountCents, authCode } = result;
    if (asked.op === 'void') return { found: true, state: 'voided', transactionId, amountCents };
    const batchId = this.batchIdOf(entry);
    const state = isCharge(entry) ? this.stateOf(entry) : batchId ? 'settled' : 'approved';
    return { found: true, state, transactionId, amountCents, ...(batchId && { batchId }), ...(authCode && { authCode }) };
  }

  /** An approved charge or refund by the processor's own id. null: this account has none. */
  transaction(merchantAccount: string, transactionId: string): Transaction | null {
    const number = this.rows.get<number>(txnKey(merchantAccount, transactionId));
    const entry = number === undefined ? undefined : this.entry(merchantAccount, number);
    if (!entry || !isOperation(entry) || entry.record.result.kind !== 'approved') return null;
    const { ref, asked, result } = entry.record;
    if (asked.op === 'void') return null;
    const refundState = this.batchIdOf(entry) ? 'settled' : 'approved';
    return {
      transactionId,
      ref,
      op: asked.op,
      state: isCharge(entry) ? this.stateOf(entry) : refundState,
      amountCents: result.amountCents,
      chargeTransactionId: asked.op === 'charge' ? null : asked.chargeTransactionId,
    };
  }

  /** Closes the open batch of a merchant account. null: the open batch is empty. */
  closeBatch(merchantAccount: string, at: string): Batch | null {
    const { open, toDispute } = this.account(merchantAccount).row;
    if (open.count === 0) return null;
    const batchId = this.nextBatchId();
    const disputes = toDispute.map((number) => ({
      disputeId: this.draw('dsp_'),
      chargeTransactionId: (this.entry(merchantAccount, number) as Charge).record.result.transactionId,
    }));
    this.apply({ type: 'batch', at, merchantAccount, batchId, tariff: TARIFF, disputes });
    return this.batch(merchantAccount, batchId)!;
  }

  /** At most `limit` closed batches after `batchId`, oldest first. null: this account has no such batch. */
  async batchesAfter(merchantAccount: string, batchId: string | null, limit: number): Promise<readonly Batch[] | null> {
    if (batchId !== null && !this.batch(merchantAccount, batchId)) return null;
    await this.rows.durable();
    const batches: Batch[] = [];
    for await (const [, batch] of this.rows.list<BatchRow>(`batch/${merchantAccount}/`, batchId === null ? '' : padded(batchNumber(batchId)))) {
      if (!this.isForgotten(merchantAccount, batch.upTo)) batches.push(batch);
      if (batches.length === limit) break;
    }
    return batches;
  }

  batch(merchantAccount: string, batchId: string): Batch | null {
    return this.batchRow(merchantAccount, batchId);
  }

  /** At most `limit` lines of a batch, after the first `from` lines, and whether there are more. null: this account has no such batch. */
  async linesOf(
    merchantAccount: string,
    batchId: string,
    from: number,
    limit: number,
  ): Promise<{ readonly lines: readonly SettlementLine[]; readonly more: boolean } | null> {
    const batch = this.batchRow(merchantAccount, batchId);
    if (!batch) return null;
    await this.rows.durable();
    const key = `${merchantAccount}/${batchId}`;
    const place = this.places.get(key);
    let { lines: count, after } = place?.lines === from ? place : { lines: 0, after: batch.after };
    const lines: SettlementLine[] = [];
    for await (const entry of this.entries(merchantAccount, after, batch.upTo)) {
      if (lines.length === limit) break;
      after = entry.number;
      const line = isOperation(entry) && (entry.record.batch?.batchId ?? batchId) === batchId ? lineOf(entry, batch.tariff) : null;
      if (line && count++ >= from) lines.push(line);
    }
    this.places.delete(key);
    this.places.set(key, { lines: count, after });
    if (this.places.size > PLACES_KEPT) this.places.delete(this.places.keys().next().value!);
    return { lines, more: batch.count > from + lines.length };
  }

  merchantAccounts(): string[] {
    return [...this.accounts.keys()];
  }

  async listDisputes(merchantAccount: string | null): Promise<Dispute[]> {
    await this.rows.durable();
    const disputes: Dispute[] = [];
    for await (const [, dispute] of this.rows.list<Dispute>('dispute/'))
      if (merchantAccount === null || dispute.merchantAccount === merchantAccount) disputes.push(dispute);
    return disputes;
  }

  /** Changes the state of a dispute. null: there is none with this id. */
  changeDispute(at: string, disputeId: string, change: { status?: string; stage?: string }): Dispute | null {
    const dispute = this.dispute(disputeId);
    if (!dispute) return null;
    const { merchantAccount } = dispute;
    this.apply({ type: 'dispute', at, merchantAccount, disputeId, status: change.status ?? dispute.status, stage: change.stage ?? dispute.stage });
    return this.dispute(disputeId)!;
  }

  /** Brand and last four digits of the card of a charge. */
  cardOf(merchantAccount: string, chargeTransactionId: string): Card | null {
    return this.chargeOf(merchantAccount, chargeTransactionId)?.record.asked.card ?? null;
  }

  /** Operations and tombstones from number `from` on, but those that were forgotten. */
  async truth(from: number, limit: number): Promise<Truth[]> {
    // Later operations are of the next page, since a look at each account is at another time.
    const upTo = this.count.operations - 1;
    await this.rows.durable();
    const entries: Entry[] = [];
    for (const merchantAccount of this.accounts.keys()) {
      let left = limit;
      for await (const entry of this.entries(merchantAccount, from - 1, upTo)) {
        if (left-- === 0) break;
        entries.push(entry);
      }
    }
    entries.sort((a, b) => a.number - b.number);
    return entries.slice(0, limit).map((entry) => this.truthOf(entry));
  }

  /**
   * Forgets the batches that closed before `before` (RFC 3339), with every operation that came before their close. The newest batch of an account
   * stays, since callers list from it. So does a charge whose outcome the fixture never tells: a caller may ask about it for ever. All are forgotten at
   * once, then deleted in pieces. If that is broken off, the next call goes on. Returns the number of deleted operations.
   */
  async forget(before: string, stopping?: AbortSignal): Promise<number> {
    let deleted = 0;
    for (const [merchantAccount, account] of this.accounts) {
      const over = account.closes.findLast(({ batchId, closedAt }) => closedAt < before && batchId !== account.row.newestBatch);
      if (!over) continue;
      const { upTo } = over;
      this.change(merchantAccount, { forgottenUpTo: upTo });
      await this.rows.durable();
      let inPiece = 0;
      for await (const [key, entry] of this.rows.list<Entry>(`op/${merchantAccount}/`, '', padded(upTo))) {
        if (stopping?.aborted) return deleted;
        if (this.delete(merchantAccount, key, entry)) deleted += 1;
        if (++inPiece % FORGOTTEN_PER_PIECE === 0) await this.rows.durable();
      }
      for await (const [key, batch] of this.rows.list<BatchRow>(`batch/${merchantAccount}/`)) {
        if (batch.upTo > upTo) break;
        this.rows.delete(key);
      }
      // Only now: until then, these say to which batch an operation belonged, and that there is something to delete.
      for (const close of account.closes) if (close.upTo <= upTo) this.rows.delete(closeKey(merchantAccount, close.upTo));
      account.closes = account.closes.filter((close) => close.upTo > upTo);
      await this.rows.durable();
    }
    return deleted;
  }

  /** Folds one record into the rows. */
  apply(record: ProcessorRecord): void {
    switch (record.type) {
      case 'forgotten':
        return this.recount({ operations: record.operations, batches: record.batches });
      case 'tombstone':
        this.enter(record);
        return;
      case 'operation':
        return this.applyOperation(record);
      case 'batch':
        return this.applyBatch(record);
      case 'dispute': {
        // The dispute may have been forgotten while an older simulator wrote this record.
        const dispute = this.dispute(record.disputeId);
        const number = this.rows.get<number>(`disputeId/${record.disputeId}`)!;
        if (dispute) this.rows.put(disputeKey(number), { ...dispute, status: record.status, stage: record.stage });
        return;
      }
    }
  }

  /** Deletes a forgotten operation. False: it stays. */
  private delete(merchantAccount: string, key: string, entry: Entry): boolean {
    const { number, record } = entry;
    if (this.isKept(entry)) {
      // A call may have changed it since it was listed.
      const kept = this.rows.get<Entry>(key)!;
      const batchId = this.batchIdOf(kept);
      if (batchId) this.rows.put(key, { ...kept, batchId });
      return false;
    }
    // The reference may have been used again since it was forgotten.
    if (this.rows.get(refKey(merchantAccount, record.ref)) === number) this.rows.delete(refKey(merchantAccount, record.ref));
    if (isOperation(entry) && 'transactionId' in entry.record.result) this.rows.delete(txnKey(merchantAccount, entry.record.result.transactionId));
    const dispute = this.rows.get<Dispute>(disputeKey(number));
    if (dispute) this.rows.delete(`disputeId/${dispute.disputeId}`);
    if (dispute) this.rows.delete(disputeKey(number));
    this.rows.delete(key);
    return true;
  }

  private book(record: OperationRecord): Answer {
    this.apply(record);
    return answerOf(record);
  }

  /** The stored answer of a reference, if any. */
  private stored(merchantAccount: string, ref: string, asked: ChargeAsked | ReversalAsked): Answer | null {
    const record = this.byRef(merchantAccount, ref)?.record;
    if (!record) return null;
    if (record.type === 'tombstone') return { result: rejected('finalised', 'this reference was finalised'), incomplete: false };
    if (canonicalJson(record.asked) !== canonicalJson(asked)) return { result: rejected('other', 'reference reused'), incomplete: false };
    return answerOf(record);
  }

  private chargeResult(result: Exclude<Fixture['result'], { kind: 'never_reached' }>, command: ChargeCommand): Result {
    if (result.kind === 'not_processed') return result;
    const checks = {
      avs: command.postalCodeGiven ? 'match' : 'not_checked',
      cvv: 'number' in command.instrument ? 'match' : 'not_checked',
    } as const;
    const transactionId = this.draw('ch_');
    if (result.kind === 'declined') return { ...checks, ...result, transactionId };
    return { kind: 'approved', transactionId, amountCents: command.amountCents, authCode: this.draw('').slice(0, 6), ...checks, card: command.card };
  }

  private failsThisOnce({ record, usedUp }: Charge, asked: ReversalAsked): Quirk | null {
    const quirk: Quirk | null = asked.askedBy === 'void' ? 'first_void_fails' : asked.askedBy === 'refund' ? 'first_refund_reversal_fails' : null;
    return quirk && record.quirks?.includes(quirk) && !usedUp.includes(quirk) ? quirk : null;
  }

  private voidResult(charge: Charge, asked: ReversalAsked): Result {
    const state = this.stateOf(charge);
    if (state === 'settlement_rejected') return rejected('settlement_rejected', 'the settlement of this charge was rejected');
    if (state === 'settled' || hasQuirk(charge, 'void_rejected')) return rejected('already_settled', 'this charge was captured');
    const remaining = remainingOf(charge);
    if (remaining === 0) return rejected('already_reversed', 'nothing remains of this charge');
    const amountCents = asked.amountCents ?? remaining;
    if (amountCents > remaining) return rejected('exceeds', 'more than remains of this charge');
    if (amountCents < remaining && !this.options.partialVoid) return rejected('unsupported', 'a void takes all that remains');
    return { kind: 'approved', transactionId: this.draw('vd_'), amountCents };
  }

  private refundResult(charge: Charge, asked: ReversalAsked): Result {
    const state = this.stateOf(charge);
    if (state === 'settlement_rejected') return rejected('settlement_rejected', 'the settlement of this charge was rejected');
    const remaining = remainingOf(charge);
    // Check this first. A voided charge never settles, so "not settled" would make the caller wait in vain.
    if (remaining === 0) return rejected('already_reversed', 'nothing remains of this charge');
    const refundable = state === 'settled' || hasQuirk(charge, 'void_rejected') || this.options.refundUnsettled;
    if (!refundable) return rejected('not_settled', 'this charge has not settled');
    if (asked.amountCents === null) return rejected('other', 'a refund names its amount');
    if (asked.amountCents > remaining) return rejected('exceeds', 'more than remains of this charge');
    return { kind: 'approved', transactionId: this.draw('rf_'), amountCents: asked.amountCents };
  }

  private applyOperation(record: OperationRecord): void {
    const { merchantAccount, asked, result, batch } = record;
    // undefined: the charge was forgotten, and this reversal is younger.
    const charge = asked.op === 'charge' ? undefined : this.chargeOf(merchantAccount, asked.chargeTransactionId);
    const entry = this.enter(record);
    if (result.kind === 'approved' && asked.op !== 'void') {
      this.rows.put(txnKey(merchantAccount, result.transactionId), entry.number);
      if (batch)
        this.addBatch(merchantAccount, { ...batch, at: record.at, after: entry.number - 1, upTo: entry.number, sums: added(NO_SUMS, entry, 1) });
      else
        this.change(merchantAccount, {
          open: added(this.account(merchantAccount).row.open, entry, 1),
          ...(hasQuirk(entry, 'disputed_after_settlement') && { toDispute: [...this.account(merchantAccount).row.toDispute, entry.number] }),
        });
    }
    if (!charge || asked.op === 'charge') return;
    const amountCents = result.kind === 'approved' ? result.amountCents : 0;
    const after: Charge = {
      ...charge,
      voidedCents: charge.voidedCents + (asked.op === 'void' ? amountCents : 0),
      refundedCents: charge.refundedCents + (asked.op === 'refund' ? amountCents : 0),
      usedUp: record.usedUp ? [...charge.usedUp, record.usedUp] : charge.usedUp,
    };
    if (amountCents === 0 && !record.usedUp) return;
    this.rows.put(opKey(merchantAccount, charge.number), after);
    if (asked.op !== 'void' || this.batchIdOf(charge)) return;
    const { open, toDispute } = this.account(merchantAccount).row;
    // A fully voided charge has no line in the batch.
    this.change(merchantAccount, {
      open: added(added(open, charge, -1), after, 1),
      toDispute: isVoided(after) ? toDispute.filter((number) => number !== charge.number) : toDispute,
    });
  }

  private applyBatch(record: BatchRecord): void {
    const { merchantAccount, batchId, at } = record;
    const account = this.account(merchantAccount);
    const upTo = this.count.operations - 1;
    this.addBatch(merchantAccount, { ...record, after: account.row.closedUpTo, upTo, sums: account.row.open });
    const close: Close = { batchId, closedAt: at, upTo };
    account.closes.push(close);
    this.rows.put(closeKey(merchantAccount, upTo), close);
    this.change(merchantAccount, { open: NO_SUMS, toDispute: [], closedUpTo: upTo });
    for (const { disputeId, chargeTransactionId } of record.disputes)
      this.openDispute(record, disputeId, this.chargeOf(merchantAccount, chargeTransactionId)!);
  }

  private addBatch(
    merchantAccount: string,
    { batchId, at, tariff, after, upTo, sums }: { batchId: string; at: string; tariff: Tariff; after: number; upTo: number; sums: Sums },
  ): void {
    const row: BatchRow = { batchId, closedAt: at, fundedOn: nextWeekday(at), ...sums, tariff, after, upTo };
    this.rows.put(batchKey(merchantAccount, batchId), row);
    this.recount({ ...this.count, batches: this.count.batches + 1 });
    this.change(merchantAccount, { newestBatch: batchId });
  }

  private openDispute(record: BatchRecord, disputeId: string, { number, record: { asked, ref, result }, voidedCents }: Charge): void {
    const openedAt = Date.parse(record.at);
    const dispute: Dispute = {
      disputeId,
      merchantAccount: record.merchantAccount,
      chargeTransactionId: result.transactionId,
      ref,
      amountCents: asked.amountCents - voidedCents,
      status: 'debited',
      stage: 'chargeback',
      reasonCode: '10.4',
      reason: 'Other fraud: card absent environment',
      openedOn: date(openedAt),
      dueDate: date(openedAt + DISPUTE_ANSWER_DAYS * DAY_MS),
    };
    this.rows.put(disputeKey(number), dispute);
    this.rows.put(`disputeId/${disputeId}`, number);
  }

  private truthOf(entry: Entry): Truth {
    const { number, record } = entry;
    const { at, merchantAccount, ref } = record;
    if (!isOperation(entry) || record.type === 'tombstone') return { number, at, merchantAccount, ref, op: 'tombstone' };
    const { asked, result } = record;
    const batchId = result.kind === 'approved' && asked.op !== 'void' ? this.batchIdOf(entry) : null;
    return {
      number,
      at,
      merchantAccount,
      ref,
      op: asked.op,
      leg: asked.leg,
      ...(asked.op === 'charge'
        ? { card: asked.card, fixture: asked.fixture }
        : { askedBy: asked.askedBy, chargeTransactionId: asked.chargeTransactionId }),
      result: result.kind,
      ...(result.kind === 'declined' ? { why: result.code } : result.kind === 'rejected' ? { why: result.why } : {}),
      ...('transactionId' in result && { transactionId: result.transactionId }),
      ...(result.kind === 'approved' ? { amountCents: result.amountCents } : asked.amountCents !== null ? { amountCents: asked.amountCents } : {}),
      ...(isCharge(entry) && { state: this.stateOf(entry), voidedCents: entry.voidedCents, refundedCents: entry.refundedCents }),
      ...(batchId && { batchId }),
    };
  }

  private nextBatchId(): string {
    return `bat_${String(this.count.batches + 1).padStart(8, '0')}`;
  }

  private account(merchantAccount: string): Account {
    let account = this.accounts.get(merchantAccount);
    if (!account) this.accounts.set(merchantAccount, (account = { row: NEW_ACCOUNT, closes: [] }));
    return account;
  }

  private change(merchantAccount: string, change: Partial<AccountRow>): void {
    const account = this.account(merchantAccount);
    const row = { ...account.row, ...change };
    this.rows.put(`account/${merchantAccount}`, row);
    account.row = row;
  }

  private recount(count: Processor['count']): void {
    this.rows.put('count', count);
    this.count = count;
  }

  /** Adds an operation or tombstone under the next number. */
  private enter(record: OperationRecord | TombstoneRecord): Entry {
    const { merchantAccount, ref } = record;
    const number = this.count.operations;
    const batchId = record.type === 'operation' ? record.batch?.batchId : undefined;
    const entry: Entry = { number, record, voidedCents: 0, refundedCents: 0, usedUp: [], ...(batchId && { batchId }) };
    // Put first. If the store refuses, the state in memory must not change.
    this.rows.put(opKey(merchantAccount, number), entry);
    this.rows.put(refKey(merchantAccount, ref), number);
    this.recount({ ...this.count, operations: number + 1 });
    // The row of its account tells the next start that it has operations.
    this.change(merchantAccount, {});
    return entry;
  }

  private isForgotten(merchantAccount: string, number: number): boolean {
    return number <= this.account(merchantAccount).row.forgottenUpTo;
  }

  private entry(merchantAccount: string, number: number): Entry | undefined {
    const entry = this.rows.get<Entry>(opKey(merchantAccount, number));
    return entry && this.isKept(entry) ? entry : undefined;
  }

  /** Entries on disk with numbers above `after`, up to `upTo`, but those that were forgotten. */
  private async *entries(merchantAccount: string, after: number, upTo: number): AsyncIterable<Entry> {
    for await (const [, entry] of this.rows.list<Entry>(`op/${merchantAccount}/`, after < 0 ? '' : padded(after), padded(upTo)))
      if (this.isKept(entry)) yield entry;
  }

  private isKept({ number, record }: Entry): boolean {
    return !this.isForgotten(record.merchantAccount, number) || (record.type === 'operation' && isNeverTold(record));
  }

  private byRef(merchantAccount: string, ref: string): Entry | undefined {
    const number = this.rows.get<number>(refKey(merchantAccount, ref));
    return number === undefined ? undefined : this.entry(merchantAccount, number);
  }

  private chargeOf(merchantAccount: string, transactionId: string): Charge | undefined {
    const number = this.rows.get<number>(txnKey(merchantAccount, transactionId));
    const entry = number === undefined ? undefined : this.entry(merchantAccount, number);
    return entry && isCharge(entry) ? entry : undefined;
  }

  private batchRow(merchantAccount: string, batchId: string): BatchRow | null {
    const row = this.rows.get<BatchRow>(batchKey(merchantAccount, batchId));
    return row?.batchId === batchId && !this.isForgotten(merchantAccount, row.upTo) ? row : null;
  }

  private dispute(disputeId: string): Dispute | undefined {
    const number = this.rows.get<number>(`disputeId/${disputeId}`);
    return number === undefined ? undefined : this.rows.get<Dispute>(disputeKey(number));
  }

  /** The batch of an approved charge or refund. null: it is in none yet, or was voided. */
  private batchIdOf(entry: Entry): string | null {
    if (entry.batchId !== undefined) return entry.batchId;
    if (isCharge(entry) && isVoided(entry)) return null;
    const { closes } = this.account(entry.record.merchantAccount);
    // Most entries are young: the first close behind them is among the last.
    let first = closes.length;
    while (first > 0 && closes[first - 1]!.upTo >= entry.number) first -= 1;
    return closes[first]?.batchId ?? null;
  }

  private stateOf(charge: Charge): ChargeState {
    if (this.batchIdOf(charge) !== null) return hasQuirk(charge, 'settlement_rejected') ? 'settlement_rejected' : 'settled';
    if (isVoided(charge)) return 'voided';
    return hasQuirk(charge, 'void_rejected') ? 'settling' : 'approved';
  }
}

const opKey = (merchantAccount: string, number: number) => `op/${merchantAccount}/${padded(number)}`;
const refKey = (merchantAccount: string, ref: string) => `ref/${merchantAccount}/${ref}`;
const txnKey = (merchantAccount: string, transactionId: string) => `txn/${merchantAccount}/${transactionId}`;
const closeKey = (merchantAccount: string, upTo: number) => `close/${merchantAccount}/${padded(upTo)}`;
const disputeKey = (number: number) => `dispute/${padded(number)}`;
const batchNumber = (batchId: string) => Number(batchId.slice('bat_'.length));
const batchKey = (merchantAccount: string, batchId: string) => `batch/${merchantAccount}/${padded(batchNumber(batchId))}`;

const answerOf = (record: OperationRecord): Answer => ({ result: record.result, incomplete: record.quirks?.includes('answer_incomplete') ?? false });

const remainingOf = (charge: Charge): number => charge.record.asked.amountCents - charge.voidedCents - charge.refundedCents;

/** A caller may ask about such a charge for ever. */
const isNeverTold = ({ quirks }: OperationRecord): boolean => quirks?.includes('cannot_tell') ?? false;

const hasQuirk = ({ record }: Entry, quirk: Quirk): boolean => record.type === 'operation' && (record.quirks?.includes(quirk) ?? false);

const isVoided = (charge: Charge): boolean => charge.voidedCents === charge.record.asked.amountCents;

const isOperation = (entry: Entry): entry is OperationEntry => entry.record.type === 'operation';

const isCharge = (entry: Entry): entry is Charge =>
  isOperation(entry) && entry.record.asked.op === 'charge' && entry.record.result.kind === 'approved';

/** The settlement line of an operation. null: it has none. */
const lineOf = (entry: OperationEntry, tariff: Tariff): SettlementLine | null => {
  const { ref, asked, result, quirks } = entry.record;
  if (result.kind !== 'approved' || asked.op === 'void') return null;
  const { transactionId, amountCents } = result;
  if (!isCharge(entry)) return { transactionId, ref, type: 'refund', accepted: true, grossCents: -amountCents, feeCents: 0, netCents: -amountCents };
  if (isVoided(entry)) return null;
  const accepted = !quirks?.includes('settlement_rejected');
  const grossCents = entry.record.asked.amountCents - entry.voidedCents;
  const feeCents = accepted
    ? Math.min(grossCents, tariff.flatCents + Math.floor((grossCents * tariff.percentBps + BASIS_POINTS / 2) / BASIS_POINTS))
    : 0;
  return { transactionId, ref, type: 'sale', accepted, grossCents, feeCents, netCents: accepted ? grossCents - feeCents : 0 };
};

/** Adds the line of an operation to the sums of a batch (`times` 1), or takes it away (-1). */
const added = (sums: Sums, entry: Entry, times: 1 | -1): Sums => {
  const line = isOperation(entry) ? lineOf(entry, TARIFF) : null;
  if (!line) return sums;
  return {
    count: sums.count + times,
    grossCents: sums.grossCents + (line.accepted ? times * line.grossCents : 0),
    feeCents: sums.feeCents + times * line.feeCents,
    netCents: sums.netCents + times * line.netCents,
  };
};
