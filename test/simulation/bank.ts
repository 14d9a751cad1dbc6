/**
 * The simulated bank. Its records are the true state of all money. Its code is short, and independent of the product's sandbox processor. The bank
 * passes the contract suite for gateways.
 */
import { timestamp } from '#kernel';
import {
  CHARGE_SENT_WITHIN_MS,
  type ChargeCall,
  type ChargeTxn,
  type DeclineCode,
  type Finalized,
  type GatewayAccount,
  type GatewayCapabilities,
  type Leg,
  type LookedUp,
  type Op,
  type Outcome,
  type PaymentGateway,
  type Ref,
  type ReferenceCall,
  type RefundCall,
  type RejectionReason,
  type ReversalTxn,
  type VoidCall,
} from '#payments';
import { batchesOf, type ListedLine } from '../support/listed-lines.js';
import type { Process, Simulator } from './simulator.js';

/** The cards, by their effect at the bank. Every number passes Luhn. */
export const CARDS = {
  approved: '4242424242424242',
  declined: '4000000000000002',
  insufficientFunds: '4000000000009995',
  gatewayError: '4000007770005020',
  /** The bank charges the card, but its answer is unreadable. */
  unreadable: '4000007770005046',
  /** Like `unreadable`. Also, the bank cannot say later whether it charged the card. */
  cannotTell: '4000007770005145',
  voidRejected: '4000007770004221',
  feeDeclined: '4000007770004023',
  feeVoidFailsOnce: '4000007770004320',
  feeRefundFailsOnce: '4000007770007026',
  settlesAtOnce: '4000007770002001',
  settlementRejected: '4000007770004304',
  /** The bank takes the charge and holds it for review. It does not settle. */
  held: '4000007770005301',
} as const;
export type CardKind = keyof typeof CARDS;
const kindOf = new Map(Object.entries(CARDS).map(([kind, number]) => [number as string, kind as CardKind]));

/** One charge, and everything that happened to it. */
export interface BankCharge {
  readonly transactionId: string;
  readonly ref: Ref;
  readonly leg: Leg;
  readonly merchantAccount: string;
  readonly amountCents: number;
  readonly card: CardKind;
  readonly at: number;
  voidedCents: number;
  refundedCents: number;
  batchId: string | null;
  rejected: boolean;
  failedOnce: boolean;
}

/** Money that was returned. */
export interface BankReversal {
  readonly transactionId: string;
  readonly ref: Ref;
  readonly op: 'void' | 'refund';
  readonly askedBy: 'void' | 'refund' | 'reversal';
  readonly charge: BankCharge;
  readonly amountCents: number;
  readonly at: number;
  batchId: string | null;
}

export type Result = Outcome<ChargeTxn> | Outcome<ReversalTxn>;

interface Executed {
  readonly op: Op;
  readonly asked: string;
  readonly result: Result;
  readonly unreadable: boolean;
  readonly cannotTell: boolean;
  readonly at: number;
}

/** Capabilities of the bank's adapters, by gateway name. */
const HOUR_MS = 3_600_000;
const ALWAYS = { void: Number.POSITIVE_INFINITY, refund: Number.POSITIVE_INFINITY };
const AT_ONCE = { voids: 'until_batch', finalize: 'at_once', finalizeReversal: 'at_once', repeatSafeMs: ALWAYS } as const;
export const CAPABILITIES = {
  'bank-lowering': { partialVoid: true, refundUnsettled: false, ...AT_ONCE },
  'bank-plain': { partialVoid: false, refundUnsettled: false, ...AT_ONCE },
  'bank-refunding': { partialVoid: false, refundUnsettled: true, ...AT_ONCE },
  /** It has no tombstones. That a charge was never made is certain only when the batch has closed, like at Authorize.Net. */
  'bank-after-batch': {
    partialVoid: false,
    refundUnsettled: false,
    voids: 'until_batch',
    finalize: 'after_batch',
    finalizeReversal: 'later',
    repeatSafeMs: { void: Number.POSITIVE_INFINITY, refund: 7.5 * HOUR_MS },
  },
  /** It has no voids, and forgets the answer to a refund after a day, like Stripe. */
  'bank-refund-only': {
    partialVoid: false,
    refundUnsettled: true,
    voids: 'none',
    finalize: 'at_once',
    finalizeReversal: 'at_once',
    repeatSafeMs: { void: 0, refund: 23 * HOUR_MS },
  },
} as const satisfies Readonly<Record<string, Ability>>;
export type GatewayName = keyof typeof CAPABILITIES;
type Ability = Pick<GatewayCapabilities, 'partialVoid' | 'refundUnsettled' | 'voids' | 'finalize' | 'finalizeReversal' | 'repeatSafeMs'>;

/** `bank-after-batch` closes its batches at each full half hour, and lists them 5 minutes later. */
const BATCH_EVERY_MS = HOUR_MS / 2;
const LISTED_AFTER_MS = 5 * 60_000;
/** No call of an attempt arrives later than this after its intent. */
const ALL_ARRIVED_MS = 10 * 60_000;
/** The close of the batch that holds every charge of an attempt that began at `begunAt`. */
export const batchOf = (begunAt: string): { closesAt: number; listedAt: number } => {
  const closesAt = Math.ceil((Date.parse(begunAt) + ALL_ARRIVED_MS) / BATCH_EVERY_MS) * BATCH_EVERY_MS;
  return { closesAt, listedAt: closesAt + LISTED_AFTER_MS };
};
/** A bank keeps the answer to a refund this much longer than its adapter promises. After that, it executes the refund again. */
const ANSWERS_KEPT_LONGER_MS = HOUR_MS / 2;

const rejected = (why: RejectionReason): Outcome<never> => ({ kind: 'rejected', why });
const ACQUIRER_FEE_CENTS = 10;

export class Bank {
  readonly charges = new Map<string, BankCharge>();
  readonly reversals = new Map<string, BankReversal>();
  readonly answers = new Map<Ref, Executed>();
  readonly tombstones = new Set<Ref>();
  readonly lines: ListedLine[] = [];
  /** How often each reference was sent to be executed. */
  readonly sent = new Map<Ref, number>();
  /** The owner of a batch. */
  private readonly accountOf = new Map<string, string>();
  private drawn = 0;
  private batches = 0;

  constructor(private readonly now: () => number) {}

  remaining({ amountCents, voidedCents, refundedCents }: BankCharge): number {
    return amountCents - voidedCents - refundedCents;
  }

  charge({ ref, leg, account, amountCents, instrument }: ChargeCall): Result {
    const card = (instrument.type === 'card' && kindOf.get(instrument.number.reveal())) || 'declined';
    const flags = { unreadable: card === 'unreadable' || card === 'cannotTell', cannotTell: card === 'cannotTell' };
    return this.once(ref, 'charge', JSON.stringify(['charge', leg, account.merchantAccount, amountCents, card]), flags, () => {
      const declined = (code: DeclineCode): Outcome<ChargeTxn> => ({ kind: 'declined', decline: { code }, transactionId: this.draw('dc') });
      if (card === 'declined' || (card === 'feeDeclined' && leg === 'fee')) return declined('generic_decline');
      if (card === 'insufficientFunds') return declined('insufficient_funds');
      if (card === 'gatewayError') return { kind: 'not_processed', answered: true };
      const transactionId = this.draw('ch');
      const settled = card === 'settlesAtOnce';
      const charge: BankCharge = {
        transactionId,
        ref,
        leg,
        merchantAccount: account.merchantAccount,
        amountCents,
        card,
        at: this.now(),
        voidedCents: 0,
        refundedCents: 0,
        batchId: null,
        rejected: false,
        failedOnce: false,
      };
      this.charges.set(transactionId, charge);
      if (card === 'held') return { kind: 'held', transactionId, raw: '252' };
      if (settled) this.closeBatch(account.merchantAccount, [charge]);
      return { kind: 'approved', txn: { transactionId, authCode: transactionId.slice(-6), avs: 'not_checked', cvv: 'match' } };
    });
  }

  void({ ref, leg, account, chargeTransactionId, amountCents, askedBy }: VoidCall, ability: Ability): Result {
    const asked = JSON.stringify(['void', leg, account.merchantAccount, chargeTransactionId, amountCents, askedBy]);
    if (ability.voids === 'none') {
      if (askedBy !== 'reversal') return rejected('already_settled');
      return this.once(ref, 'reversal', asked, {}, () => {
        const charge = this.chargeOf(chargeTransactionId, account);
        if (!charge) return rejected('not_found');
        const cents = this.remaining(charge);
        if (cents === 0) return rejected('already_reversed');
        // A held charge takes no money, so there is nothing to refund, and no batch lists it.
        const means = charge.card === 'held' ? 'void' : 'refund';
        charge[means === 'void' ? 'voidedCents' : 'refundedCents'] += cents;
        return this.reversed(ref, means, 'reversal', charge, cents);
      });
    }
    return this.once(ref, askedBy === 'reversal' ? 'reversal' : 'void', asked, {}, () => {
      const charge = this.chargeOf(chargeTransactionId, account);
      if (!charge) return rejected('not_found');
      if (this.failsOnce(charge, askedBy)) return { kind: 'not_processed', answered: true };
      if (charge.rejected) return rejected('settlement_rejected');
      if (charge.batchId !== null || charge.card === 'voidRejected') return rejected('already_settled');
      const remaining = this.remaining(charge);
      const cents = amountCents ?? remaining;
      if (remaining === 0) return rejected('already_reversed');
      if (cents > remaining) return rejected('exceeds');
      if (cents < remaining && !ability.partialVoid) return rejected('unsupported');
      charge.voidedCents += cents;
      return this.reversed(ref, 'void', askedBy, charge, cents);
    });
  }

  refund({ ref, leg, account, chargeTransactionId, amountCents }: RefundCall, ability: Ability): Result {
    const before = this.answers.get(ref);
    if (before && this.now() - before.at > ability.repeatSafeMs.refund + ANSWERS_KEPT_LONGER_MS) this.answers.delete(ref);
    return this.once(ref, 'refund', JSON.stringify(['refund', leg, account.merchantAccount, chargeTransactionId, amountCents]), {}, () => {
      const charge = this.chargeOf(chargeTransactionId, account);
      if (!charge) return rejected('not_found');
      if (this.failsOnce(charge, 'refund')) return { kind: 'not_processed', answered: true };
      if (charge.rejected) return rejected('settlement_rejected');
      if (this.remaining(charge) === 0) return rejected('already_reversed');
      if (charge.batchId === null && charge.card !== 'voidRejected' && !ability.refundUnsettled) return rejected('not_settled');
      if (amountCents > this.remaining(charge)) return rejected('exceeds');
      charge.refundedCents += amountCents;
      return this.reversed(ref, 'refund', 'refund', charge, amountCents);
    });
  }

  finalize(call: ReferenceCall, ability: Ability, now: number): Finalized<ChargeTxn | ReversalTxn> {
    const { ref, op } = call;
    const executed = this.answers.get(ref);
    if (!executed) {
      if (ability.finalize === 'after_batch') return this.afterBatch(call, now);
      if (ability.voids === 'none' && op === 'void') return { kind: 'never' };
      this.tombstones.add(ref);
      return { kind: 'never' };
    }
    if (executed.cannotTell || !isSame(op, executed.op)) return { kind: 'cannot_tell', why: 'unreachable' };
    return { kind: 'executed', result: executed.result };
  }

  /** Such a bank does not know the reference of a void. It shows whether the charge is voided, or settled. */
  private afterBatch({ op, begunAt, chargeTransactionId, account }: ReferenceCall, now: number): Finalized<ChargeTxn | ReversalTxn> {
    if (op !== 'charge' && chargeTransactionId === null) return { kind: 'never' };
    if (op === 'void' || op === 'reversal') {
      const charge = this.chargeOf(chargeTransactionId!, account);
      const reversal = [...this.reversals.values()].find((one) => one.op === 'void' && one.charge === charge);
      if (reversal) return { kind: 'executed', result: { kind: 'approved', txn: { transactionId: reversal.transactionId } } };
      return !charge || charge.batchId !== null ? { kind: 'never' } : { kind: 'cannot_tell', why: 'not_visible' };
    }
    const { closesAt, listedAt } = batchOf(begunAt);
    if (now >= listedAt) return { kind: 'never' };
    return { kind: 'cannot_tell', why: 'not_visible', until: timestamp(listedAt), voidableUntil: timestamp(closesAt) };
  }

  lookup({ ref, op }: ReferenceCall): LookedUp | { readonly found: 'cannot_tell' } {
    const executed = this.answers.get(ref);
    if (!executed) return { found: false };
    if (executed.cannotTell || !isSame(op, executed.op)) return { found: 'cannot_tell' };
    if (executed.result.kind === 'declined') return { found: true, state: 'declined', transactionId: executed.result.transactionId!, amountCents: 0 };
    if (executed.result.kind === 'held') {
      const charge = this.charges.get(executed.result.transactionId)!;
      const state = this.remaining(charge) === 0 ? 'voided' : 'held';
      return { found: true, state, transactionId: charge.transactionId, amountCents: charge.amountCents };
    }
    if (executed.result.kind !== 'approved') return { found: false };
    const { transactionId } = executed.result.txn;
    const charge = this.charges.get(transactionId);
    if (!charge) return { found: true, state: 'voided', transactionId, amountCents: this.reversals.get(transactionId)!.amountCents };
    const { amountCents, batchId } = charge;
    const state = charge.rejected ? 'settlement_rejected' : batchId ? 'settled' : charge.voidedCents === amountCents ? 'voided' : 'approved';
    return { found: true, state, transactionId, amountCents, ...(batchId !== null && { batchId }) };
  }

  /** Settles the open transactions of a merchant account: refunds, and the part of each charge that was not voided. */
  closeBatch(merchantAccount: string, only?: readonly BankCharge[]): string | null {
    const sales = (only ?? [...this.charges.values()]).filter(
      (charge) =>
        charge.merchantAccount === merchantAccount && charge.batchId === null && charge.card !== 'held' && charge.voidedCents < charge.amountCents,
    );
    const refunds = only
      ? []
      : [...this.reversals.values()].filter(
          ({ op, charge, batchId }) => op === 'refund' && batchId === null && charge.merchantAccount === merchantAccount,
        );
    if (sales.length + refunds.length === 0) return null;
    const batchId = `bat_${String(++this.batches).padStart(8, '0')}`;
    const closedAt = new Date(this.now()).toISOString();
    const line = { batchId, closedAt, fundedOn: closedAt.slice(0, 10) };
    // The lines are sorted by the number of the transaction, which is the order of arrival.
    const arrival = ({ transactionId }: { transactionId: string }) => Number(transactionId.slice(3));
    for (const item of [...sales, ...refunds].sort((one, other) => arrival(one) - arrival(other))) {
      item.batchId = batchId;
      const { transactionId, ref } = item;
      if ('op' in item) {
        const cents = -item.amountCents;
        this.lines.push({ ...line, transactionId, ref, type: 'refund', accepted: true, grossCents: cents, feeCents: 0, netCents: cents });
        continue;
      }
      item.rejected = item.card === 'settlementRejected';
      const grossCents = item.amountCents - item.voidedCents;
      const feeCents = item.rejected ? 0 : Math.min(grossCents, ACQUIRER_FEE_CENTS);
      const netCents = item.rejected ? 0 : grossCents - feeCents;
      this.lines.push({ ...line, transactionId, ref, type: 'sale', accepted: !item.rejected, grossCents, feeCents, netCents });
    }
    this.accountOf.set(batchId, merchantAccount);
    return batchId;
  }

  settlements({ merchantAccount }: GatewayAccount, cursor: string | null): ListedLine[] {
    return this.lines.filter(({ batchId }) => this.accountOf.get(batchId) === merchantAccount && (cursor === null || batchId > cursor));
  }

  private once(ref: Ref, op: Op, asked: string, flags: { unreadable?: boolean; cannotTell?: boolean }, execute: () => Result): Result {
    this.sent.set(ref, (this.sent.get(ref) ?? 0) + 1);
    if (this.tombstones.has(ref)) return rejected('finalised');
    const before = this.answers.get(ref);
    if (before && before.asked !== asked) return rejected('other');
    const executed = before ?? { op, asked, result: execute(), unreadable: false, cannotTell: false, at: this.now(), ...flags };
    this.answers.set(ref, executed);
    return executed.unreadable ? { kind: 'unknown', cause: 'unreadable' } : executed.result;
  }

  private reversed(ref: Ref, op: 'void' | 'refund', askedBy: BankReversal['askedBy'], charge: BankCharge, amountCents: number): Result {
    const transactionId = this.draw(op === 'void' ? 'vd' : 'rf');
    this.reversals.set(transactionId, { transactionId, ref, op, askedBy, charge, amountCents, at: this.now(), batchId: null });
    return { kind: 'approved', txn: { transactionId, ...(op === 'refund' && askedBy === 'reversal' && { means: 'refund' }) } };
  }

  private failsOnce(charge: BankCharge, askedBy: BankReversal['askedBy']): boolean {
    const quirk = askedBy === 'void' ? 'feeVoidFailsOnce' : askedBy === 'refund' ? 'feeRefundFailsOnce' : null;
    if (charge.leg !== 'fee' || charge.card !== quirk || charge.failedOnce) return false;
    charge.failedOnce = true;
    return true;
  }

  private chargeOf(transactionId: string, { merchantAccount }: GatewayAccount): BankCharge | undefined {
    const charge = this.charges.get(transactionId);
    return charge?.merchantAccount === merchantAccount ? charge : undefined;
  }

  private draw(prefix: string): string {
    return `${prefix}_${String(++this.drawn).padStart(8, '0')}`;
  }
}

/** The operation `reversal` is a void with another name. */
const isSame = (asked: Op, executed: Op) => (asked === 'reversal' ? 'void' : asked) === (executed === 'reversal' ? 'void' : executed);

const capabilities = (ability: Ability): GatewayCapabilities => ({
  rawCard: true,
  cardToken: false,
  tokenReusable: false,
  maxCardDigits: 19,
  minAmountCents: 1,
  maxAmountCents: 99_999_999,
  settlement: 'batches',
  lateAfterDays: 3,
  disputes: 'none',
  ...ability,
});

type Unknown = { readonly kind: 'unknown'; readonly cause: 'timeout' | 'disconnected' };

/**
 * How a call reaches the bank: directly, or through the simulator. `otherwise` gives the result of a call that was not sent (`dropped`), or not
 * answered (`lost`).
 */
export type Wire = <T>(name: string, effect: () => T, otherwise: (kind: 'dropped' | 'lost') => T) => Promise<T>;

/** Upper limits. A slow call may take longer than its caller waits. */
const LATENCY_MS = { usual: 600, slow: 25_000 } as const;
const SLOW = 0.02;
const LATE_MS = [31_000, 150_000] as const;
const IN_TRANSIT_MS = LATE_MS[1] + LATENCY_MS.slow;

/** The adapter for an account at the bank. If the connection fails, calls that move money or finalise give an outcome. The other calls throw. */
export const bankGateway = (bank: Bank, account: GatewayAccount, wire: Wire, now: () => number): PaymentGateway => {
  const ability: Ability = CAPABILITIES[account.gateway as GatewayName];
  const inTransitMs = wire === directWire ? 0 : IN_TRANSIT_MS;
  /** The transport writes no first byte after `until`. A byte takes some time to the bank. Other banks refuse late calls by their tombstones. */
  const inTime = (until: number, effect: () => Result): (() => Result) =>
    ability.finalize === 'after_batch' || wire === directWire
      ? () => (now() <= until + inTransitMs ? effect() : { kind: 'not_processed', answered: false })
      : effect;
  const notAfter = (time: string | undefined) => (time === undefined ? Number.POSITIVE_INFINITY : Date.parse(time));
  const moved = async <T>(call: string, effect: () => Result, signal: AbortSignal): Promise<Outcome<T>> => {
    if (signal.aborted) return { kind: 'not_processed', answered: false };
    const aborted = new Promise<Unknown>((resolve) =>
      signal.addEventListener('abort', () => resolve({ kind: 'unknown', cause: 'timeout' }), { once: true }),
    );
    const answer = wire<Result>(call, effect, (kind) =>
      kind === 'dropped' ? { kind: 'not_processed', answered: false } : { kind: 'unknown', cause: 'disconnected' },
    );
    return (await Promise.race([answer, aborted])) as Outcome<T>;
  };
  return {
    capabilities: capabilities(ability),
    charge: (call, signal) =>
      moved(
        `charge.${call.leg}`,
        inTime(Date.parse(call.begunAt) + CHARGE_SENT_WITHIN_MS, () => bank.charge(call)),
        signal,
      ),
    void: (call, signal) =>
      moved(
        `void.${call.leg}`,
        inTime(notAfter(call.notAfter), () => bank.void(call, ability)),
        signal,
      ),
    refund: (call, signal) =>
      moved(
        `refund.${call.leg}`,
        inTime(notAfter(call.notAfter), () => bank.refund(call, ability)),
        signal,
      ),
    finalize: async (call, signal) => {
      if (signal.aborted) return { kind: 'cannot_tell', why: 'unreachable' };
      return wire<Finalized<ChargeTxn | ReversalTxn>>(
        `finalize.${call.op}`,
        () => bank.finalize(call, ability, now()),
        () => ({ kind: 'cannot_tell', why: 'unreachable' }),
      );
    },
    lookup: (call) => wire(`lookup.${call.op}`, () => bank.lookup(call), unreachable),
    settlements: async function* (cursor) {
      yield* batchesOf(await wire('settlements', () => bank.settlements(account, cursor), unreachable));
    },
    describe: async (signal) => {
      signal.throwIfAborted();
      const { merchantAccount, environment } = account;
      return { externalId: merchantAccount, name: merchantAccount, environment, testMode: false, problems: [] };
    },
    close: () => undefined,
  };
};

const unreachable = (): never => {
  throw new Error('the gateway cannot be reached');
};

/** The connection of one process in the simulation. `role`: a prefix for the names of its calls. */
export const simulatedWire =
  (sim: Simulator, process: Process, role: string): Wire =>
  (name, effect, otherwise) =>
    sim.call(process, {
      store: 'gateway',
      name: `${role}${name}`,
      effect,
      // The caller of a dropped call may not know that the call was not sent. So half of the dropped calls look like lost answers.
      failed: (kind) => otherwise(kind === 'dropped' && sim.rng.chance(0.5) ? 'lost' : kind),
      latencyMs: sim.faultsOn && sim.rng.chance(sim.faults.late > 0 ? SLOW : 0) ? LATENCY_MS.slow : LATENCY_MS.usual,
      ...(/finalize|lookup|settlements/.test(name) ? {} : { lateMs: LATE_MS }),
    });

/** Calls take no time and never fail. */
export const directWire: Wire = async (_name, effect) => effect();
