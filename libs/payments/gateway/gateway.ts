/**
 * The gateway port: the only way to a card processor. Business results are return values, never exceptions. Only the adapter decides the
 * `Outcome.kind` of a call that it completes.
 *
 * Each reference is executed at most once. `finalize` asks the gateway to promise that a reference will never be executed.
 */
import type { Cents } from '#kernel';
import type { DisputeStatus, Payer } from '../payment.js';

export const LEGS = ['principal', 'fee', 'combined'] as const;
/** One transaction of a payment at the processor: the principal, the fee, or both together (charge mode `combined`). */
export type Leg = (typeof LEGS)[number];

/** `reversal` takes back a charge that must not stand: one of unknown outcome, or the principal if its fee failed (C41). */
export type Op = 'charge' | 'void' | 'refund' | 'reversal';

/**
 * Our reference: 20 characters, a hash of attempt id, leg and operation. A new attempt has new references. A finalised reference is never used again.
 */
export type Ref = string;

export interface GatewayAccount {
  readonly gateway: string;
  readonly merchantAccount: string;
  readonly credentialsRef: string;
  readonly environment: 'sandbox' | 'production';
}

export const DECLINE_CODES = [
  'generic_decline',
  'insufficient_funds',
  'card_limit_exceeded',
  'expired_card',
  'cvv_mismatch',
  'postal_code_mismatch',
  'invalid_token',
] as const;
/** C54. `invalid_token`: the token is unknown, expired or used, so no card was asked. */
export type DeclineCode = (typeof DECLINE_CODES)[number];

export type Check = 'match' | 'no_match' | 'not_checked';

export interface ChargeTxn {
  readonly transactionId: string;
  readonly authCode: string;
  readonly avs?: Check;
  readonly cvv?: Check;
  /** The card, if the gateway names it. For a token only the gateway knows it. */
  readonly card?: ChargedCard;
}

/** `brand`: in lower case, `unknown` if the gateway does not name it. `last4`: four digits. */
export interface ChargedCard {
  readonly brand: string;
  readonly last4: string;
}

export interface ReversalTxn {
  readonly transactionId: string;
  /** How the money goes back. Absent: as it was called. */
  readonly means?: 'void' | 'refund';
  /** The processor took the refund and has not carried it out yet. It may still fail. */
  readonly pending?: true;
  /** The charge was voided before this call, by an earlier call of ours or by somebody else: the processor does not say which. */
  readonly before?: true;
}

/** `exceeds`: less is left of the charge. `not_refundable`: the gateway does not say why a settled charge cannot be refunded. */
export type RejectionReason =
  | 'not_refundable'
  | 'already_settled'
  | 'not_settled'
  | 'already_reversed'
  | 'exceeds'
  | 'not_found'
  | 'finalised'
  | 'unsupported'
  | 'settlement_rejected'
  | 'other';

export type Outcome<T> =
  | { readonly kind: 'approved'; readonly txn: T }
  /** Definite: no money moved. */
  | {
      readonly kind: 'declined';
      readonly decline: { readonly code: DeclineCode; readonly raw?: string; readonly avs?: Check; readonly cvv?: Check };
      readonly transactionId?: string;
    }
  | { readonly kind: 'rejected'; readonly why: RejectionReason; readonly raw?: string }
  /**
   * Charges only. The gateway took the charge, and it must be undone at once. `why`: it waits for a person to review it (the default), or a part of
   * the amount was approved.
   */
  | { readonly kind: 'held'; readonly transactionId: string; readonly why?: 'review' | 'partial'; readonly raw?: string }
  /**
   * Nothing happened, for certain. `answered` true: the gateway said so for this reference. `answered` false: no byte was sent, or the gateway
   * refused the whole request.
   */
  | { readonly kind: 'not_processed'; readonly answered: boolean; readonly raw?: string }
  | { readonly kind: 'unknown'; readonly cause: 'timeout' | 'unreadable' | 'disconnected' | 'http_5xx'; readonly raw?: string };

/**
 * Wraps card data, so that logs, errors, JSON text and inspection never show it. Only gateway adapters may call `reveal()`, and the code that derives
 * brand, last four digits and keyed hash.
 */
export class Secret {
  readonly #value: string;
  constructor(value: string) {
    this.#value = value;
  }
  reveal(): string {
    return this.#value;
  }
  toString(): string {
    return '[card data]';
  }
  toJSON(): string {
    return '[card data]';
  }
  [Symbol.for('nodejs.util.inspect.custom')](): string {
    return '[card data]';
  }
}

export type PaymentInstrument =
  | { readonly type: 'card'; readonly number: Secret; readonly expiry: { readonly month: number; readonly year: number }; readonly cvv: Secret }
  | { readonly type: 'card_token'; readonly token: Secret };

/**
 * Why a gateway cannot tell.
 *
 * - `unreachable`: it could not be asked, or its answer could not be read.
 * - `in_flight`: the call is being executed, or the question is being answered.
 * - `not_visible`: it shows no trace of the reference, but one may still appear.
 * - `held`: it holds the charge for review.
 */
export type CannotTell = 'unreachable' | 'in_flight' | 'not_visible' | 'held';

/** What became of a reference. `T`: the transaction of its operation. */
export type Finalized<T> =
  | { readonly kind: 'executed'; readonly result: Outcome<T> }
  | { readonly kind: 'never' }
  /** Nothing remains of the charge, whether it was executed or not. This will not change. `transactionId`: what undid it. */
  | { readonly kind: 'undone'; readonly transactionId: string }
  /**
   * `until`: when the gateway can tell, RFC 3339. Absent: not known. It is no reason to stop asking. A later answer may name a later time, if a batch is
   * late. With `in_flight`, it is the end of the call that is under way.
   */
  | {
      readonly kind: 'cannot_tell';
      readonly why: CannotTell;
      readonly until?: string;
      /** Until when a charge that still appears can be voided, RFC 3339. Absent: not known. */
      readonly voidableUntil?: string;
    };

/** The state of a transaction at the gateway. */
export type TransactionState = 'approved' | 'declined' | 'held' | 'voided' | 'settling' | 'settled' | 'settlement_rejected';

export type LookedUp =
  | { readonly found: false }
  | {
      readonly found: true;
      readonly state: TransactionState;
      readonly transactionId: string;
      readonly amountCents: Cents;
      readonly batchId?: string;
      readonly authCode?: string;
    };

/** A transaction as the gateway keeps it under its own id. Voids are not transactions of their own. */
export interface NamedTransaction {
  readonly transactionId: string;
  /** Our reference. null: it was made at the gateway's own page. */
  readonly ref: Ref | null;
  readonly op: 'charge' | 'refund';
  readonly state: TransactionState;
  readonly amountCents: Cents;
  /** The charge that a refund returns. null: a charge, or the gateway does not name it. */
  readonly chargeTransactionId: string | null;
  /** A refund that the gateway took and has not carried out yet. */
  readonly pending?: true;
}

/** One line of a closed batch. */
export interface SettlementRecord {
  readonly transactionId: string;
  readonly ref?: Ref;
  /**
   * `refund_failure`: a refund has failed after it was settled, and its money is back at the merchant. `ref` and `transactionId` are the refund's.
   */
  readonly type: 'sale' | 'refund' | 'refund_failure' | 'chargeback' | 'chargeback_reversal' | 'fee' | 'adjustment';
  /** False: the processor closed the batch and rejected this transaction (C67). */
  readonly accepted: boolean;
  /** Negative if the money goes back to the cardholder. */
  readonly grossCents: number;
  readonly feeCents: number;
  readonly netCents: number;
}

/** A closed batch or a payout. */
export interface SettledBatch {
  readonly batchId: string;
  /** RFC 3339. */
  readonly closedAt: string;
  /** YYYY-MM-DD. Absent: the gateway does not name the day. */
  readonly fundedOn?: string;
  /** Names the place after this batch, for the next listing. Only the adapter can read it. At most {@link MAX_CURSOR_CHARACTERS}. */
  readonly cursor: string;
  /** Must be read to its end before the next batch is asked for. */
  readonly lines: AsyncIterable<SettlementRecord>;
}

/** A dispute as the gateway shows it now. Disputes that move no money are not shown. */
export interface GatewayDispute {
  /** The gateway's own id. */
  readonly externalId: string;
  readonly chargeTransactionId: string;
  /** Our reference of the charge. null: the gateway does not name it. */
  readonly ref: Ref | null;
  readonly status: DisputeStatus;
  /** The gateway's own word for the latest step, at most 64 characters. */
  readonly stage: string;
  readonly reasonCode: string;
  readonly reason: string;
  readonly amountCents: Cents;
  /** YYYY-MM-DD. */
  readonly openedOn: string;
  /** YYYY-MM-DD: the last day for evidence. null: none is accepted any more. */
  readonly dueDate: string | null;
}

/** A dispute that was open, and that the gateway does not know any more. */
export interface GoneDispute {
  readonly externalId: string;
  readonly gone: true;
}

/** The account behind the credentials, as the gateway describes it. */
export interface AccountDescription {
  /** The gateway's own id of the account. Two sets of credentials with the same id settle the same money. */
  readonly externalId: string;
  readonly name: string;
  readonly environment: 'sandbox' | 'production';
  /** True: the account approves charges and moves no money. */
  readonly testMode: boolean;
  /** IANA time zone. */
  readonly timeZone?: string;
  /** What a person must change at the gateway before the account may charge: one sentence each. Empty: nothing. */
  readonly problems: readonly string[];
}

export interface GatewayCapabilities {
  readonly rawCard: boolean;
  readonly cardToken: boolean;
  readonly tokenReusable: boolean;
  /** Digits of the longest card number that the gateway takes. Used only with `rawCard`. */
  readonly maxCardDigits: number;
  /** The smallest and the largest charge of one leg. */
  readonly minAmountCents: Cents;
  readonly maxAmountCents: Cents;
  readonly partialVoid: boolean;
  readonly refundUnsettled: boolean;
  /** `none`: a charge is undone by a refund only. */
  readonly voids: 'until_batch' | 'none';
  /** `after_batch`: that a charge was never made is certain only when its batch has closed. */
  readonly finalize: 'at_once' | 'after_batch';
  /** `later`: at once, it may not tell that a void or refund was never made. Then recovery may send it (C72). */
  readonly finalizeReversal: 'at_once' | 'later';
  /**
   * For how many milliseconds after its first sending a void or a refund may be sent again under its reference, without being executed twice.
   * Infinity: always. 0: never.
   */
  readonly repeatSafeMs: { readonly void: number; readonly refund: number };
  readonly settlement: 'batches' | 'payouts' | 'none';
  /** As {@link lateAfterDays} says for the gateway. */
  readonly lateAfterDays: number;
  readonly disputes: 'poll' | 'none';
}

/** Days until the batch or payout of a charge is listed. A batch of Authorize.Net waits for the bank, a payout of Stripe for its schedule. */
const LATE_AFTER_DAYS: Readonly<Record<string, number>> = { 'authorize-net': 4, stripe: 10 };
const USUAL_LATE_AFTER_DAYS = 3;

/**
 * A charge or refund of this gateway that is in no batch after this many days counts as missing. If it settles later, it counts as late. Read models
 * use it, so it must not depend on which accounts a process knows.
 */
export const lateAfterDays = (gateway: string): number => LATE_AFTER_DAYS[gateway] ?? USUAL_LATE_AFTER_DAYS;

interface CallBase {
  readonly ref: Ref;
  readonly account: GatewayAccount;
  readonly leg: Leg;
  /** Business time of the intent, RFC 3339. A charge is never sent later than {@link CHARGE_SENT_WITHIN_MS} after it. */
  readonly begunAt: string;
}

/** No byte of a charge leaves this process later than this after the intent, by the clock on the wall. `never` rests on this. */
export const CHARGE_SENT_WITHIN_MS = 55_000;

export interface ChargeCall extends CallBase {
  readonly amountCents: Cents;
  readonly instrument: PaymentInstrument;
  /** For the checks of the address. */
  readonly payer?: Payer;
  /** The payer's own public IPv4 address, for the gateway's check of fraud. Hosted checkout only. Never stored. */
  readonly payerIp?: string;
}

export interface VoidCall extends CallBase {
  readonly chargeTransactionId: string;
  /**
   * The amount to return. Default: all that remains. A smaller amount needs `partialVoid`. Payments always name the amount. An answer with another
   * amount is then unreadable.
   */
  readonly amountCents?: Cents;
  readonly askedBy: 'void' | 'refund' | 'reversal';
  /** The call is not sent later, RFC 3339. */
  readonly notAfter?: string;
}

export interface RefundCall extends CallBase {
  readonly chargeTransactionId: string;
  readonly amountCents: Cents;
  /** The card's last four digits. Empty: they are not known. */
  readonly last4: string;
  /** The call is not sent later, RFC 3339. */
  readonly notAfter?: string;
}

export interface ReferenceCall extends CallBase {
  readonly op: Op;
  /** The amount that the operation under this reference has, or would have. */
  readonly amountCents: Cents;
  /** The charge that a void, refund or reversal undoes. null: a charge, or the charge has no transaction that we know of. */
  readonly chargeTransactionId: string | null;
  /** The card's last four digits. null: they are not known. */
  readonly last4: string | null;
}

/** Longest cursor of a feed. */
export const MAX_CURSOR_CHARACTERS = 1_024;

/** The gateway cannot go on at a cursor. Everything is read again from the beginning; what is recorded is not recorded twice. */
export class UnknownCursor extends Error {
  constructor(cursor: string) {
    super(`the gateway knows no cursor ${cursor}`);
    this.name = 'UnknownCursor';
  }
}

/** The adapter of one merchant account. */
export interface PaymentGateway {
  readonly capabilities: GatewayCapabilities;
  /** The URL that is called. Absent: the gateway runs in this process, as in a simulation. */
  readonly endpoint?: string;
  /**
   * False: no new charge may begin, since nobody could learn what became of one whose answer is lost. Calls of earlier charges go on. Absent: always
   * true.
   */
  mayCharge?(): boolean;
  charge(call: ChargeCall, signal: AbortSignal): Promise<Outcome<ChargeTxn>>;
  void(call: VoidCall, signal: AbortSignal): Promise<Outcome<ReversalTxn>>;
  refund(call: RefundCall, signal: AbortSignal): Promise<Outcome<ReversalTxn>>;
  /**
   * Asks whether this reference was executed. If not, the gateway must never execute it later: `never` is a promise. Does not throw: if the gateway
   * cannot be asked, the result is `cannot_tell`.
   */
  finalize(call: ReferenceCall, signal: AbortSignal): Promise<Finalized<ChargeTxn | ReversalTxn>>;
  /** Asks for the state of a transaction. Changes nothing at the gateway. Throws if the gateway cannot be asked. */
  lookup(call: ReferenceCall, signal: AbortSignal): Promise<LookedUp | { readonly found: 'cannot_tell' }>;
  /**
   * Asks for a transaction by the gateway's own id. null: the account has no such transaction. Throws if the gateway cannot be asked. Absent: the
   * gateway has no such question.
   */
  transaction?(transactionId: string, signal: AbortSignal): Promise<NamedTransaction | null>;
  /**
   * The closed batches after `cursor` (null: from the first batch), oldest first. Throws {@link UnknownCursor} before the first batch if the gateway
   * cannot go on at the cursor. Throws another error if the gateway cannot be asked.
   */
  settlements(cursor: string | null, signal: AbortSignal): AsyncIterable<SettledBatch>;
  /**
   * Disputes that are new since `cursor` (null: all), and those with the ids `open`. Absent: the gateway has no such question. Throws
   * {@link UnknownCursor}, or another error if the gateway cannot be asked.
   */
  disputes?(
    open: readonly string[],
    cursor: string | null,
    signal: AbortSignal,
  ): AsyncIterable<(GatewayDispute | GoneDispute) & { readonly cursor: string }>;
  /** Describes the account behind the credentials. Throws if the gateway cannot be asked, or refuses the credentials. */
  describe(signal: AbortSignal): Promise<AccountDescription>;
  /** Closes the connections. */
  close(): void;
}

/** Finds the adapter for a merchant account. null: this process has no adapter for it, or the account's credentials are gone (C47, C68). */
export interface Gateways {
  find(account: GatewayAccount): PaymentGateway | null;
  /** Reads the account again, for the next {@link find}. Absent: this process always knows all accounts. */
  load?(account: GatewayAccount): Promise<void>;
}
