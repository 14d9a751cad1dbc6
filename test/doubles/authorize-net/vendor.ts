/**
 * The state of the double and its rules: merchants, transactions, the duplicate window, held transactions, refunds and batches. README.md names the
 * vendor's page for each rule. Every change is a record in the double's file, and the state is made from those records alone.
 */
import { createHmac } from 'node:crypto';
import { ChangeFile } from './file.js';
import type { Fault, FaultName, Operation } from './faults.js';

const MINUTE_MS = 60_000;
const FIRST_ID = 60_000_000_000;
const FIRST_BATCH = 20_000_000;

export interface Merchant {
  readonly apiLoginId: string;
  readonly transactionKey: string;
  readonly gatewayId: string;
  readonly name: string;
  readonly testMode: boolean;
  /** When the day's batch closes, in the vendor's default: 16:00 Pacific. */
  readonly cutOff: { readonly time: string; readonly timeZone: string };
}

export type Status =
  | 'authorizedPendingCapture'
  | 'capturedPendingSettlement'
  | 'refundPendingSettlement'
  | 'FDSPendingReview'
  | 'FDSAuthorizedPendingReview'
  | 'settledSuccessfully'
  | 'refundSettledSuccessfully'
  | 'settlementError'
  | 'voided'
  | 'declined';

export interface Transaction {
  readonly id: string;
  readonly merchant: string;
  readonly type: 'authCaptureTransaction' | 'authOnlyTransaction' | 'refundTransaction';
  readonly ref: string;
  readonly amountCents: number;
  readonly last4: string;
  readonly brand: string;
  readonly submitMs: number;
  readonly visibleMs: number;
  readonly refTransId: string | null;
  readonly responseCode: number;
  readonly reason: number;
  readonly authCode: string;
  readonly avs: string;
  readonly cvv: string;
  /** A keyed hash of the data that the vendor compares. The double keeps no card number. */
  readonly fingerprint: string;
  /** Absent: the request had none. */
  readonly customerIp?: string;
  status: Status;
  batchId: string | null;
}

export interface Batch {
  readonly id: string;
  readonly merchant: string;
  readonly closedMs: number;
  readonly settleMs: number;
  readonly visibleMs: number;
  state: 'pendingSettlement' | 'settledSuccessfully' | 'settlementError';
  readonly members: Transaction[];
}

export type NewTransaction = Omit<Transaction, 'id' | 'batchId'>;

type Change =
  | { readonly k: 'merchant'; readonly merchant: Merchant }
  | { readonly k: 'clock'; readonly aheadMs: number }
  | { readonly k: 'txn'; readonly txn: NewTransaction }
  | { readonly k: 'status'; readonly id: string; readonly status: Status }
  | {
      readonly k: 'close';
      readonly merchant: string;
      readonly closedMs: number;
      readonly settleMs: number;
      readonly visibleMs: number;
    }
  | { readonly k: 'settle'; readonly batch: string; readonly error: boolean }
  | {
      readonly k: 'seed';
      readonly merchant: string;
      readonly count: number;
      readonly amountCents: number;
      readonly submitMs: number;
      readonly label: string;
      readonly settled: boolean;
    }
  | { readonly k: 'fault'; readonly fault: Fault }
  | { readonly k: 'used'; readonly fault: number }
  | { readonly k: 'healed'; readonly name: FaultName | null };

/** The batch is settled this long after its cut-off. */
const SETTLES_AFTER_MS = 30 * MINUTE_MS;

const partsIn = (timeZone: string, ms: number): { day: string; time: string } => {
  const text = new Date(ms).toLocaleString('sv-SE', { timeZone });
  return { day: text.slice(0, 10), time: text.slice(11, 16) };
};

/** The last answer. Every charge asks, and the answer is the same for a quarter of an hour. */
let lastCutOff: { readonly question: string; readonly at: number } = { question: '', at: 0 };

/** The first cut-off after `ms`. Time zones change by whole quarters of an hour. */
export const cutOffAfter = ({ time, timeZone }: Merchant['cutOff'], ms: number): number => {
  const QUARTER_MS = 15 * MINUTE_MS;
  const [hours, minutes] = time.split(':').map(Number) as [number, number];
  const offset = (minutes % 15) * MINUTE_MS;
  let at = Math.floor((ms - offset) / QUARTER_MS) * QUARTER_MS + offset;
  const question = `${time} ${timeZone} ${at}`;
  if (question === lastCutOff.question) return lastCutOff.at;
  for (let tries = 0; tries < 2 * 96 + 8; tries++) {
    at += QUARTER_MS;
    if (at > ms && partsIn(timeZone, at).time === `${String(hours).padStart(2, '0')}:${String(minutes).padStart(2, '0')}`) {
      lastCutOff = { question, at };
      return at;
    }
  }
  throw new Error(`no cut-off at ${time} in ${timeZone}`);
};

export class Vendor {
  private readonly file: ChangeFile;
  private readonly merchantsByLogin = new Map<string, Merchant>();
  private readonly transactions = new Map<string, Transaction>();
  private readonly open = new Map<string, Transaction[]>();
  private readonly batchesOf = new Map<string, Batch[]>();
  private readonly batchesById = new Map<string, Batch>();
  private readonly byFingerprint = new Map<string, Transaction>();
  private readonly refundsOf = new Map<string, Transaction[]>();
  private faultList: Fault[] = [];
  private readonly usesOf = new Map<number, number>();
  private nextFault = 1;
  private aheadMs = 0;

  constructor(
    path: string,
    private readonly hostNow: () => number = Date.now,
  ) {
    this.file = new ChangeFile(path);
    for (const change of this.file.changes) this.apply(change as Change);
  }

  close(): void {
    this.file.close();
  }

  get nowMs(): number {
    return this.hostNow() + this.aheadMs;
  }

  /** Milliseconds by which the double is ahead of the host. */
  get ahead(): number {
    return this.aheadMs;
  }

  get faults(): readonly Fault[] {
    return this.faultList;
  }

  merchants(): Merchant[] {
    return [...this.merchantsByLogin.values()];
  }

  merchant(apiLoginId: string): Merchant | undefined {
    return this.merchantsByLogin.get(apiLoginId);
  }

  setMerchant(merchant: Merchant): void {
    this.record({ k: 'merchant', merchant });
  }

  /** Moves the clock. Cut-offs that it passes close their batches. */
  moveTo(aheadMs: number): void {
    if (aheadMs <= this.aheadMs) return;
    this.record({ k: 'clock', aheadMs });
    this.tick();
  }

  // Faults.

  setFault(fault: Omit<Fault, 'id'>): Fault {
    const made = { ...fault, id: this.nextFault };
    this.record({ k: 'fault', fault: made });
    return made;
  }

  /** Ends the faults of a name, or all. */
  heal(name: FaultName | null): void {
    this.record({ k: 'healed', name });
  }

  /** The first fault that fits and stands. It is then used once. */
  use(names: readonly FaultName[], op: Operation, ref: string | null): Fault | null {
    const fault = this.faultList.find(
      (one) => names.includes(one.name) && (one.op === '*' || one.op === op) && (one.ref === null || one.ref === ref),
    );
    if (fault && fault.times !== null) this.record({ k: 'used', fault: fault.id });
    return fault ?? null;
  }

  standing(name: FaultName): Fault | null {
    return this.faultList.find((one) => one.name === name) ?? null;
  }

  // Transactions.

  fingerprint(fields: readonly (string | null)[]): string {
    return createHmac('sha256', 'the double compares, and keeps no card').update(JSON.stringify(fields)).digest('base64url');
  }

  /** The transaction of the same data within `windowMs`. */
  duplicateOf(fingerprint: string, windowMs: number): Transaction | null {
    const earlier = this.byFingerprint.get(fingerprint);
    return earlier && earlier.submitMs + windowMs > this.nowMs ? earlier : null;
  }

  store(txn: NewTransaction): Transaction {
    const id = String(FIRST_ID + this.transactions.size + 1);
    this.record({ k: 'txn', txn });
    return this.transactions.get(id)!;
  }

  setStatus(txn: Transaction, status: Status): void {
    this.record({ k: 'status', id: txn.id, status });
  }

  transaction(merchant: string, id: string): Transaction | null {
    const found = this.transactions.get(id);
    return found && found.merchant === merchant ? found : null;
  }

  all(merchant: string): Transaction[] {
    return [...this.transactions.values()].filter((txn) => txn.merchant === merchant);
  }

  /** The newest transaction that does not have this reference. */
  newestOf(merchant: string, otherThan: string | null): Transaction | null {
    return this.all(merchant).findLast(({ ref }) => ref !== otherThan) ?? null;
  }

  /** Cents that refunds have taken from a charge. A voided or failed refund counts no more. */
  refundedCents(charge: Transaction): number {
    return (this.refundsOf.get(charge.id) ?? [])
      .filter(({ status }) => status === 'refundPendingSettlement' || status === 'refundSettledSuccessfully')
      .reduce((sum, { amountCents }) => sum + amountCents, 0);
  }

  /** Unsettled transactions, in the order of their ids. */
  unsettled(merchant: string): readonly Transaction[] {
    const open = this.open.get(merchant) ?? [];
    return open.every(({ visibleMs }) => visibleMs <= this.nowMs) ? open : open.filter(({ visibleMs }) => visibleMs <= this.nowMs);
  }

  // Batches.

  batches(merchant: string): readonly Batch[] {
    return this.batchesOf.get(merchant) ?? [];
  }

  batch(merchant: string, id: string): Batch | null {
    const found = this.batchesById.get(id);
    return found && found.merchant === merchant ? found : null;
  }

  /** Closes the open batch now, and settles it at once. null: nothing was open. */
  closeNow(merchant: string): Batch | null {
    const batch = this.closeAt(merchant, this.nowMs, this.nowMs);
    this.tick();
    return batch;
  }

  /** Closes the batches whose cut-off has passed, and settles those whose time has come. */
  tick(): void {
    const now = this.nowMs;
    for (const { apiLoginId, cutOff } of this.merchantsByLogin.values()) {
      for (;;) {
        const first = (this.open.get(apiLoginId) ?? []).find(isBatched);
        if (!first) break;
        const closes = cutOffAfter(cutOff, first.submitMs);
        if (closes > now || !this.closeAt(apiLoginId, closes, closes + SETTLES_AFTER_MS)) break;
      }
      if (this.standing('batch_pending')) continue;
      for (const batch of this.batches(apiLoginId))
        if (batch.state === 'pendingSettlement' && batch.settleMs <= now) {
          const fault = this.use(['settlement_error'], 'batch', null);
          this.record({ k: 'settle', batch: batch.id, error: fault !== null });
        }
    }
  }

  /** Makes many transactions at once. `settled`: in one batch of their own, settled now. */
  seed(seed: { merchant: string; count: number; amountCents: number; submitMs: number; label: string; settled: boolean }): void {
    this.record({ k: 'seed', ...seed });
  }

  private closeAt(merchant: string, closedMs: number, settleMs: number): Batch | null {
    if (!(this.open.get(merchant) ?? []).some((txn) => isBatched(txn) && txn.submitMs <= closedMs)) return null;
    const late = this.use(['batch_late'], 'batch', null);
    this.record({ k: 'close', merchant, closedMs, settleMs, visibleMs: late ? settleMs + late.ms : 0 });
    return this.batches(merchant).at(-1)!;
  }

  private record(change: Change): void {
    this.file.append(change);
    this.apply(change);
  }

  private apply(change: Change): void {
    switch (change.k) {
      case 'merchant':
        this.merchantsByLogin.set(change.merchant.apiLoginId, change.merchant);
        return;
      case 'clock':
        this.aheadMs = change.aheadMs;
        return;
      case 'txn':
        this.add({ ...change.txn, id: String(FIRST_ID + this.transactions.size + 1), batchId: null });
        return;
      case 'status':
        this.transactions.get(change.id)!.status = change.status;
        return;
      case 'close': {
        const open = this.open.get(change.merchant) ?? [];
        const goes = (txn: Transaction) => isBatched(txn) && txn.submitMs <= change.closedMs;
        this.open.set(
          change.merchant,
          open.filter((txn) => !goes(txn)),
        );
        this.addBatch({ ...change, members: open.filter(goes) }, 'pendingSettlement');
        return;
      }
      case 'settle': {
        const batch = this.batchesById.get(change.batch)!;
        batch.state = change.error ? 'settlementError' : 'settledSuccessfully';
        for (const txn of batch.members) {
          if (txn.status === 'capturedPendingSettlement') txn.status = change.error ? 'settlementError' : 'settledSuccessfully';
          if (txn.status === 'refundPendingSettlement') txn.status = change.error ? 'settlementError' : 'refundSettledSuccessfully';
        }
        return;
      }
      case 'seed': {
        const { merchant, count, amountCents, submitMs, label, settled } = change;
        const made: Transaction[] = [];
        for (let n = 0; n < count; n++) {
          const ref = `${label}${String(n).padStart(20 - label.length, '0')}`;
          const shared = { merchant, amountCents, submitMs, type: 'authCaptureTransaction' as const, last4: '1111', brand: 'Visa' };
          const answer = { responseCode: 1, reason: 1, authCode: 'SEED01', avs: 'P', cvv: 'P', refTransId: null, visibleMs: 0, fingerprint: '' };
          const status = settled ? 'settledSuccessfully' : 'capturedPendingSettlement';
          const txn: Transaction = { ...shared, ...answer, ref, status, id: String(FIRST_ID + this.transactions.size + 1), batchId: null };
          if (settled) this.transactions.set(txn.id, txn);
          else this.add(txn);
          made.push(txn);
        }
        if (settled) this.addBatch({ merchant, closedMs: submitMs, settleMs: submitMs, visibleMs: 0, members: made }, 'settledSuccessfully');
        return;
      }
      case 'fault':
        this.faultList.push(change.fault);
        this.nextFault = change.fault.id + 1;
        return;
      case 'used': {
        const uses = (this.usesOf.get(change.fault) ?? 0) + 1;
        this.usesOf.set(change.fault, uses);
        this.faultList = this.faultList.filter(({ id, times }) => id !== change.fault || (times ?? Infinity) > uses);
        return;
      }
      case 'healed':
        this.faultList = this.faultList.filter(({ name }) => change.name !== null && name !== change.name);
    }
  }

  private add(txn: Transaction): void {
    this.transactions.set(txn.id, txn);
    const open = this.open.get(txn.merchant) ?? [];
    open.push(txn);
    this.open.set(txn.merchant, open);
    if (txn.fingerprint !== '') this.byFingerprint.set(txn.fingerprint, txn);
    if (txn.refTransId !== null) this.refundsOf.set(txn.refTransId, [...(this.refundsOf.get(txn.refTransId) ?? []), txn]);
  }

  private addBatch(batch: Omit<Batch, 'id' | 'state'>, state: Batch['state']): void {
    const { merchant, closedMs, settleMs, visibleMs, members } = batch;
    const made: Batch = { id: String(FIRST_BATCH + this.batchesById.size + 1), merchant, closedMs, settleMs, visibleMs, members, state };
    for (const txn of members) txn.batchId = made.id;
    this.batchesById.set(made.id, made);
    this.batchesOf.set(merchant, [...(this.batchesOf.get(merchant) ?? []), made]);
  }
}

/** An authorisation without capture, and a held transaction, stay out of every batch. */
const isBatched = ({ status }: Transaction): boolean =>
  status === 'capturedPendingSettlement' || status === 'refundPendingSettlement' || status === 'voided' || status === 'declined';

export const REVIEW: readonly Status[] = ['FDSPendingReview', 'FDSAuthorizedPendingReview'];
export const HELD_BY: Readonly<Record<number, Status>> = { 252: 'FDSAuthorizedPendingReview', 253: 'FDSPendingReview' };
