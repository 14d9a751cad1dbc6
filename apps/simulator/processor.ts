/**
 * The books of the sandbox card processor: charges, voids, refunds, settlements, and references that can no longer be executed.
 *
 * Each operation is decided on the state in memory and written as one record. Then the record is folded into the state. The records alone rebuild the
 * state. This file uses no clock, socket or file.
 *
 * The processor plays another company, so it uses the words of its own protocol and not those of the gateway port. It keeps no card data, not even
 * hashed. Brand, last four digits and the fixture's name are enough.
 */
import { canonicalJson } from '#kernel';
import { fixtureFor, type Fixture, type Quirk } from './fixtures.js';

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

/** The first record of a journal from which ended operations were removed. */
export interface ForgottenRecord {
  readonly type: 'forgotten';
  readonly operations: number;
  readonly batches: number;
}

export type ProcessorRecord = OperationRecord | TombstoneRecord | BatchRecord | DisputeRecord | ForgottenRecord;

export type ChargeState = 'approved' | 'voided' | 'settling' | 'settled' | 'settlement_rejected';

interface Charge {
  readonly record: OperationRecord;
  readonly asked: ChargeAsked;
  readonly transactionId: string;
  readonly authCode: string;
  voidedCents: number;
  refundedCents: number;
  batchId: string | null;
  rejected: boolean;
  readonly usedUp: Quirk[];
}

interface Refund {
  readonly record: OperationRecord;
  readonly transactionId: string;
  readonly amountCents: number;
  batchId: string | null;
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

export interface Batch {
  readonly batchId: string;
  readonly merchantAccount: string;
  readonly closedAt: string;
  /** The next weekday after the close. */
  readonly fundedOn: string;
  readonly lines: readonly SettlementLine[];
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

/** What remains after old batches are forgotten. */
export interface Remainder {
  /** Number of records, of those that are held now, that are not in {@link records}. */
  readonly dropped: number;
  /** A fold of these records gives the state that {@link drop} leaves, before any later record. */
  readonly records: readonly ProcessorRecord[];
  /** Forgets the rest in memory. */
  readonly drop: () => void;
}

export interface ProcessorOptions {
  /** True if a part of an unsettled charge can be voided. The rest then settles. */
  readonly partialVoid: boolean;
  /** True if a charge can be refunded before it has settled. */
  readonly refundUnsettled: boolean;
}

interface Account {
  readonly refs: Map<string, OperationRecord | TombstoneRecord>;
  readonly charges: Map<string, Charge>;
  readonly refunds: Map<string, Refund>;
  /** Items of the open batch, in order of arrival. */
  readonly open: Set<Charge | Refund>;
  /** Oldest first. */
  batches: Batch[];
  readonly batchIndex: Map<string, number>;
}

const DISPUTE_ANSWER_DAYS = 20;
const DAY_MS = 86_400_000;
const BASIS_POINTS = 10_000;

const isCharge = (item: Charge | Refund): item is Charge => 'voidedCents' in item;

const date = (epochMs: number) => new Date(epochMs).toISOString().slice(0, 10);

const nextWeekday = (at: string): string => {
  let day = Date.parse(at) + DAY_MS;
  while ([0, 6].includes(new Date(day).getUTCDay())) day += DAY_MS;
  return date(day);
};

const rejected = (why: Rejection, message: string): Result => ({ kind: 'rejected', why, message });

export class Processor {
  private readonly accounts = new Map<string, Account>();
  /** All records in order, but those that were forgotten. */
  private records: Exclude<ProcessorRecord, ForgottenRecord>[] = [];
  /** Operations and tombstones of {@link records}. */
  private history: (OperationRecord | TombstoneRecord)[] = [];
  /** The number of operations and tombstones that were forgotten. */
  private forgotten = 0;
  private readonly disputes = new Map<string, Dispute>();
  private batchCount = 0;

  /**
   * @param write writes a record before it is folded into the state. The record must be durable before the answer is sent.
   * @param draw makes a new id: random characters after a prefix.
   */
  constructor(
    private readonly options: ProcessorOptions,
    private readonly write: (record: ProcessorRecord) => void,
    private readonly draw: (prefix: string) => string,
  ) {}

  /** True if a call with this reference already has an answer: a stored result, or the refusal of a finalised reference. */
  isAnswered(merchantAccount: string, ref: string): boolean {
    return this.account(merchantAccount).refs.has(ref);
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
    const charge = this.account(merchantAccount).charges.get(asked.chargeTransactionId);
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
    const record = this.account(merchantAccount).refs.get(ref);
    if (!record) {
      this.take({ type: 'tombstone', at, merchantAccount, ref });
      return { kind: 'never' };
    }
    if (record.type === 'tombstone') return { kind: 'never' };
    // If the reference belongs to another operation, the caller has mixed up the two. Neither `executed` nor `never` would be true.
    if (record.asked.op !== op || record.quirks?.includes('cannot_tell')) return { kind: 'cannot_tell' };
    return { kind: 'executed', result: record.result };
  }

  lookup(merchantAccount: string, ref: string, op: Operation): Found {
    const account = this.account(merchantAccount);
    const record = account.refs.get(ref);
    if (!record || record.type === 'tombstone') return { found: false };
    if (record.asked.op !== op || record.quirks?.includes('cannot_tell')) return { found: 'cannot_tell' };
    const { result, asked } = record;
    if (result.kind === 'declined')
      return { found: true, state: 'declined', transactionId: result.transactionId, amountCents: asked.amountCents ?? 0 };
    if (result.kind !== 'approved') return { found: false };
    const { transactionId, amountCents, authCode } = result;
    if (asked.op === 'void') return { found: true, state: 'voided', transactionId, amountCents };
    const charge = account.charges.get(transactionId);
    const batchId = (charge ?? account.refunds.get(transactionId))?.batchId ?? undefined;
    const state = charge ? stateOf(charge) : batchId ? 'settled' : 'approved';
    return { found: true, state, transactionId, amountCents, ...(batchId && { batchId }), ...(authCode && { authCode }) };
  }

  /** Closes the open batch of a merchant account. null: the open batch is empty. */
  closeBatch(merchantAccount: string, at: string): Batch | null {
    const account = this.account(merchantAccount);
    if (account.open.size === 0) return null;
    const disputes = [...account.open]
      .filter((item) => isCharge(item) && item.record.quirks?.includes('disputed_after_settlement'))
      .map((item) => ({ disputeId: this.draw('dsp_'), chargeTransactionId: item.transactionId }));
    this.take({ type: 'batch', at, merchantAccount, batchId: this.nextBatchId(), tariff: TARIFF, disputes });
    return account.batches.at(-1)!;
  }

  /** Closed batches after `batchId`, oldest first. null: this account has no such batch. */
  batchesAfter(merchantAccount: string, batchId: string | null): readonly Batch[] | null {
    const { batches, batchIndex } = this.account(merchantAccount);
    if (batchId === null) return batches;
    const index = batchIndex.get(batchId);
    return index === undefined ? null : batches.slice(index + 1);
  }

  batch(merchantAccount: string, batchId: string): Batch | null {
    const { batches, batchIndex } = this.account(merchantAccount);
    return batches[batchIndex.get(batchId) ?? -1] ?? null;
  }

  merchantAccounts(): string[] {
    return [...this.accounts.keys()];
  }

  listDisputes(merchantAccount: string | null): Dispute[] {
    return [...this.disputes.values()].filter((dispute) => merchantAccount === null || dispute.merchantAccount === merchantAccount);
  }

  /** Changes the state of a dispute. null: there is none with this id. */
  changeDispute(at: string, disputeId: string, change: { status?: string; stage?: string }): Dispute | null {
    const dispute = this.disputes.get(disputeId);
    if (!dispute) return null;
    this.take({
      type: 'dispute',
      at,
      merchantAccount: dispute.merchantAccount,
      disputeId,
      status: change.status ?? dispute.status,
      stage: change.stage ?? dispute.stage,
    });
    return this.disputes.get(disputeId)!;
  }

  /** Brand and last four digits of the card of a charge. */
  cardOf(merchantAccount: string, chargeTransactionId: string): Card | null {
    return this.account(merchantAccount).charges.get(chargeTransactionId)?.asked.card ?? null;
  }

  /** Operations and tombstones from number `from` on, but those that were forgotten. */
  truth(from: number, limit: number): Truth[] {
    const first = Math.max(0, from - this.forgotten);
    return this.history.slice(first, first + limit).map((record, index) => this.truthOf(record, this.forgotten + first + index));
  }

  /** When the oldest record was written, RFC 3339. null: there is none. */
  get oldestAt(): string | null {
    return this.records[0]?.at ?? null;
  }

  /**
   * What remains if every operation that ended before `before` (RFC 3339) is forgotten: settled batches with their charges and refunds, and declined,
   * rejected, voided and finalised operations. A batch stays if it is the newest of its account, which callers list from, or if it holds a charge
   * whose outcome the fixture never tells: a caller may ask about such a charge for ever.
   */
  remainder(before: string): Remainder {
    const over = new Map([...this.accounts].map(([merchantAccount, account]) => [merchantAccount, overBatches(account, before)]));
    const isOver = (record: Exclude<ProcessorRecord, ForgottenRecord>): boolean => {
      const account = this.account(record.merchantAccount);
      const batches = over.get(record.merchantAccount)!;
      const chargeOver = (charge: Charge | undefined): boolean =>
        !charge ||
        (!isNeverTold(charge.record) && (charge.batchId === null ? charge.record.at < before && isVoided(charge) : batches.has(charge.batchId)));
      switch (record.type) {
        case 'batch':
          return batches.has(record.batchId);
        case 'dispute':
          return chargeOver(account.charges.get(this.disputes.get(record.disputeId)?.chargeTransactionId ?? ''));
        case 'tombstone':
          return record.at < before;
        case 'operation': {
          const { asked, result } = record;
          if (record.at >= before || isNeverTold(record)) return false;
          if (asked.op === 'charge') return result.kind !== 'approved' || chargeOver(account.charges.get(result.transactionId));
          const refund = asked.op === 'refund' && result.kind === 'approved' ? account.refunds.get(result.transactionId) : undefined;
          return refund ? refund.batchId !== null && batches.has(refund.batchId) : chargeOver(account.charges.get(asked.chargeTransactionId));
        }
      }
    };
    const [kept, gone]: [typeof this.records, typeof this.records] = [[], []];
    for (const record of this.records) (isOver(record) ? gone : kept).push(record);
    const operations = this.forgotten + gone.filter(isOperation).length;
    const batches = this.batchCount - [...this.accounts].reduce((sum, [name, account]) => sum + account.batches.length - over.get(name)!.size, 0);
    const held = this.records.length;
    return {
      dropped: gone.length,
      records: [{ type: 'forgotten', operations, batches }, ...kept],
      drop: () => {
        this.records = [...kept, ...this.records.slice(held)];
        this.history = this.records.filter(isOperation);
        this.forgotten = operations;
        for (const record of gone) this.forget(record);
        for (const [name, account] of this.accounts) {
          account.batches = account.batches.filter(({ batchId }) => !over.get(name)?.has(batchId));
          account.batchIndex.clear();
          for (const [index, { batchId }] of account.batches.entries()) account.batchIndex.set(batchId, index);
        }
      },
    };
  }

  private forget(record: Exclude<ProcessorRecord, ForgottenRecord>): void {
    const account = this.account(record.merchantAccount);
    if (record.type === 'dispute') this.disputes.delete(record.disputeId);
    if (record.type === 'batch') for (const { disputeId } of record.disputes) this.disputes.delete(disputeId);
    if (!isOperation(record)) return;
    account.refs.delete(record.ref);
    if (record.type === 'tombstone' || record.result.kind !== 'approved') return;
    if (record.asked.op === 'charge') account.charges.delete(record.result.transactionId);
    if (record.asked.op === 'refund') account.refunds.delete(record.result.transactionId);
  }

  /** Folds one record into the state. Only this function changes the state. */
  apply(record: ProcessorRecord): void {
    if (record.type === 'forgotten') {
      this.forgotten = record.operations;
      this.batchCount = record.batches;
      return;
    }
    this.records.push(record);
    const account = this.account(record.merchantAccount);
    switch (record.type) {
      case 'operation':
        return this.applyOperation(account, record);
      case 'tombstone':
        account.refs.set(record.ref, record);
        this.history.push(record);
        return;
      case 'batch': {
        const items = [...account.open];
        account.open.clear();
        this.settle(account, record.merchantAccount, record, items);
        for (const { disputeId, chargeTransactionId } of record.disputes)
          this.openDispute(record, disputeId, account.charges.get(chargeTransactionId)!);
        return;
      }
      case 'dispute': {
        // The dispute may have been forgotten while this record was written.
        const dispute = this.disputes.get(record.disputeId);
        if (dispute) this.disputes.set(record.disputeId, { ...dispute, status: record.status, stage: record.stage });
        return;
      }
    }
  }

  private take(record: ProcessorRecord): void {
    // Write the record first. If the journal refuses it, the state in memory must not change.
    this.write(record);
    this.apply(record);
  }

  private book(record: OperationRecord): Answer {
    this.take(record);
    return answerOf(record);
  }

  /** The stored answer of a reference, if any. */
  private stored(merchantAccount: string, ref: string, asked: ChargeAsked | ReversalAsked): Answer | null {
    const record = this.account(merchantAccount).refs.get(ref);
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

  private failsThisOnce(charge: Charge, asked: ReversalAsked): Quirk | null {
    const quirk: Quirk | null = asked.askedBy === 'void' ? 'first_void_fails' : asked.askedBy === 'refund' ? 'first_refund_reversal_fails' : null;
    return quirk && charge.record.quirks?.includes(quirk) && !charge.usedUp.includes(quirk) ? quirk : null;
  }

  private voidResult(charge: Charge, asked: ReversalAsked): Result {
    if (charge.rejected) return rejected('settlement_rejected', 'the settlement of this charge was rejected');
    if (charge.batchId !== null || charge.record.quirks?.includes('void_rejected')) return rejected('already_settled', 'this charge was captured');
    const remaining = remainingOf(charge);
    if (remaining === 0) return rejected('already_reversed', 'nothing remains of this charge');
    const amountCents = asked.amountCents ?? remaining;
    if (amountCents > remaining) return rejected('exceeds', 'more than remains of this charge');
    if (amountCents < remaining && !this.options.partialVoid) return rejected('unsupported', 'a void takes all that remains');
    return { kind: 'approved', transactionId: this.draw('vd_'), amountCents };
  }

  private refundResult(charge: Charge, asked: ReversalAsked): Result {
    if (charge.rejected) return rejected('settlement_rejected', 'the settlement of this charge was rejected');
    const remaining = remainingOf(charge);
    // Check this first. A voided charge never settles, so "not settled" would make the caller wait in vain.
    if (remaining === 0) return rejected('already_reversed', 'nothing remains of this charge');
    const refundable = charge.batchId !== null || charge.record.quirks?.includes('void_rejected') || this.options.refundUnsettled;
    if (!refundable) return rejected('not_settled', 'this charge has not settled');
    if (asked.amountCents === null) return rejected('other', 'a refund names its amount');
    if (asked.amountCents > remaining) return rejected('exceeds', 'more than remains of this charge');
    return { kind: 'approved', transactionId: this.draw('rf_'), amountCents: asked.amountCents };
  }

  private applyOperation(account: Account, record: OperationRecord): void {
    account.refs.set(record.ref, record);
    this.history.push(record);
    const { asked, result } = record;
    if (asked.op === 'charge') {
      if (result.kind !== 'approved') return;
      const { transactionId, authCode = '' } = result;
      const charge: Charge = { record, asked, transactionId, authCode, voidedCents: 0, refundedCents: 0, batchId: null, rejected: false, usedUp: [] };
      account.charges.set(transactionId, charge);
      if (record.batch) this.settle(account, record.merchantAccount, { ...record.batch, at: record.at }, [charge]);
      else account.open.add(charge);
      return;
    }
    // undefined: the charge was forgotten, and this reversal is younger.
    const charge = account.charges.get(asked.chargeTransactionId);
    if (charge && record.usedUp) charge.usedUp.push(record.usedUp);
    if (result.kind !== 'approved') return;
    const { transactionId, amountCents } = result;
    if (asked.op === 'void') {
      if (charge) charge.voidedCents += amountCents;
      // A fully voided charge has no line in the batch.
      if (charge && isVoided(charge)) account.open.delete(charge);
      return;
    }
    if (charge) charge.refundedCents += amountCents;
    const refund: Refund = { record, transactionId, amountCents, batchId: null };
    account.refunds.set(transactionId, refund);
    account.open.add(refund);
  }

  private settle(
    account: Account,
    merchantAccount: string,
    { batchId, at, tariff }: { batchId: string; at: string; tariff: Tariff },
    items: readonly (Charge | Refund)[],
  ): void {
    const lines: SettlementLine[] = [];
    for (const item of items) {
      const { ref } = item.record;
      const { transactionId } = item;
      if (!isCharge(item)) {
        item.batchId = batchId;
        lines.push({ transactionId, ref, type: 'refund', accepted: true, grossCents: -item.amountCents, feeCents: 0, netCents: -item.amountCents });
        continue;
      }
      const grossCents = item.asked.amountCents - item.voidedCents;
      item.batchId = batchId;
      item.rejected = item.record.quirks?.includes('settlement_rejected') ?? false;
      const feeCents = item.rejected
        ? 0
        : Math.min(grossCents, tariff.flatCents + Math.floor((grossCents * tariff.percentBps + BASIS_POINTS / 2) / BASIS_POINTS));
      lines.push({
        transactionId,
        ref,
        type: 'sale',
        accepted: !item.rejected,
        grossCents,
        feeCents,
        netCents: item.rejected ? 0 : grossCents - feeCents,
      });
    }
    this.batchCount += 1;
    account.batchIndex.set(batchId, account.batches.length);
    account.batches.push({ batchId, merchantAccount, closedAt: at, fundedOn: nextWeekday(at), lines });
  }

  private openDispute(record: BatchRecord, disputeId: string, charge: Charge): void {
    const openedAt = Date.parse(record.at);
    this.disputes.set(disputeId, {
      disputeId,
      merchantAccount: record.merchantAccount,
      chargeTransactionId: charge.transactionId,
      ref: charge.record.ref,
      amountCents: charge.asked.amountCents - charge.voidedCents,
      status: 'debited',
      stage: 'chargeback',
      reasonCode: '10.4',
      reason: 'Other fraud: card absent environment',
      openedOn: date(openedAt),
      dueDate: date(openedAt + DISPUTE_ANSWER_DAYS * DAY_MS),
    });
  }

  private truthOf(record: OperationRecord | TombstoneRecord, number: number): Truth {
    const { at, merchantAccount, ref } = record;
    if (record.type === 'tombstone') return { number, at, merchantAccount, ref, op: 'tombstone' };
    const { asked, result } = record;
    const account = this.account(merchantAccount);
    const transactionId = 'transactionId' in result ? result.transactionId : undefined;
    const charge = transactionId === undefined ? undefined : account.charges.get(transactionId);
    const batchId = (charge ?? (transactionId === undefined ? undefined : account.refunds.get(transactionId)))?.batchId;
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
      ...(transactionId !== undefined && { transactionId }),
      ...(result.kind === 'approved' ? { amountCents: result.amountCents } : asked.amountCents !== null ? { amountCents: asked.amountCents } : {}),
      ...(charge && { state: stateOf(charge), voidedCents: charge.voidedCents, refundedCents: charge.refundedCents }),
      ...(batchId && { batchId }),
    };
  }

  private nextBatchId(): string {
    return `bat_${String(this.batchCount + 1).padStart(8, '0')}`;
  }

  private account(merchantAccount: string): Account {
    let account = this.accounts.get(merchantAccount);
    if (!account) {
      account = { refs: new Map(), charges: new Map(), refunds: new Map(), open: new Set(), batches: [], batchIndex: new Map() };
      this.accounts.set(merchantAccount, account);
    }
    return account;
  }
}

const answerOf = (record: OperationRecord): Answer => ({ result: record.result, incomplete: record.quirks?.includes('answer_incomplete') ?? false });

const remainingOf = (charge: Charge): number => charge.asked.amountCents - charge.voidedCents - charge.refundedCents;

/** A caller may ask about such a charge for ever. */
const isNeverTold = ({ quirks }: OperationRecord): boolean => quirks?.includes('cannot_tell') ?? false;

const isVoided = (charge: Charge): boolean => charge.voidedCents === charge.asked.amountCents;

const isOperation = (record: ProcessorRecord): record is OperationRecord | TombstoneRecord =>
  record.type === 'operation' || record.type === 'tombstone';

/**
 * Ids of the batches of an account that may be forgotten. If a charge stays, the batches of its refunds stay too, since they are part of what remains
 * of the charge.
 */
const overBatches = ({ batches, charges, refunds }: Account, before: string): ReadonlySet<string> => {
  const over = new Set<string>();
  for (const { batchId, closedAt, lines } of batches.slice(0, -1)) {
    const isOver = ({ transactionId }: SettlementLine): boolean => {
      const charge = charges.get(transactionId);
      if (charge) return !isNeverTold(charge.record);
      const { asked } = refunds.get(transactionId)!.record;
      const refunded = asked.op === 'refund' ? charges.get(asked.chargeTransactionId) : undefined;
      return !refunded || refunded.batchId === batchId || over.has(refunded.batchId!);
    };
    if (closedAt < before && lines.every(isOver)) over.add(batchId);
  }
  return over;
};

const stateOf = (charge: Charge): ChargeState => {
  if (charge.rejected) return 'settlement_rejected';
  if (charge.batchId !== null) return 'settled';
  if (isVoided(charge)) return 'voided';
  return charge.record.quirks?.includes('void_rejected') ? 'settling' : 'approved';
};
