/**
 * The gateway port: the only way to a card processor. Business results are return values, never exceptions. Only the adapter decides the
 * `Outcome.kind` of a call that it completes.
 *
 * Each reference is executed at most once. `finalize` asks the gateway to promise that a reference will never be executed.
 */
import type { Cents } from '#kernel';

/** One transaction of a payment at the processor: the principal, the fee, or both together (charge mode `combined`). */
export type Leg = 'principal' | 'fee' | 'combined';

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
] as const;
/** C54. */
export type DeclineCode = (typeof DECLINE_CODES)[number];

export type Check = 'match' | 'no_match' | 'not_checked';

export interface ChargeTxn {
  readonly transactionId: string;
  readonly authCode: string;
  readonly avs?: Check;
  readonly cvv?: Check;
}

export interface ReversalTxn {
  readonly transactionId: string;
}

export type RejectionReason =
  'already_settled' | 'not_settled' | 'already_reversed' | 'exceeds' | 'not_found' | 'finalised' | 'unsupported' | 'settlement_rejected' | 'other';

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

export type Finalized<T> = { readonly kind: 'executed'; readonly result: Outcome<T> } | { readonly kind: 'never' } | { readonly kind: 'cannot_tell' };

export type LookedUp =
  | { readonly found: false }
  | {
      readonly found: true;
      readonly state: 'approved' | 'declined' | 'voided' | 'settling' | 'settled' | 'settlement_rejected';
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
  readonly state: 'approved' | 'declined' | 'voided' | 'settling' | 'settled' | 'settlement_rejected';
  readonly amountCents: Cents;
  /** The charge that a refund returns. null: a charge, or the gateway does not name it. */
  readonly chargeTransactionId: string | null;
}

export interface SettlementRecord {
  readonly batchId: string;
  /** RFC 3339. */
  readonly closedAt: string;
  readonly transactionId: string;
  readonly ref?: Ref;
  readonly type: 'sale' | 'refund' | 'chargeback' | 'chargeback_reversal' | 'fee' | 'adjustment';
  /** False: the processor closed the batch and rejected this transaction (C67). */
  readonly accepted: boolean;
  readonly grossCents: number;
  readonly feeCents: number;
  readonly netCents: number;
  readonly fundedOn?: string;
}

export interface GatewayCapabilities {
  readonly rawCard: boolean;
  readonly cardToken: boolean;
  readonly tokenReusable: boolean;
  readonly partialVoid: boolean;
  readonly refundUnsettled: boolean;
  readonly settlement: 'batches' | 'payouts' | 'none';
}

export interface ChargeCall {
  readonly ref: Ref;
  readonly leg: Leg;
  readonly account: GatewayAccount;
  readonly amountCents: Cents;
  readonly instrument: PaymentInstrument;
  /** For the postal code check. */
  readonly postalCode?: string;
}

export interface VoidCall {
  readonly ref: Ref;
  readonly leg: Leg;
  readonly account: GatewayAccount;
  readonly chargeTransactionId: string;
  /**
   * The amount to return. Default: all that remains. A smaller amount needs `partialVoid`. Payments always name the amount. An answer with another
   * amount is then unreadable.
   */
  readonly amountCents?: Cents;
  readonly askedBy: 'void' | 'refund' | 'reversal';
}

export interface RefundCall {
  readonly ref: Ref;
  readonly leg: Leg;
  readonly account: GatewayAccount;
  readonly chargeTransactionId: string;
  readonly amountCents: Cents;
  /** The card's last four digits, for a gateway that asks for them. */
  readonly last4?: string;
}

export interface ReferenceCall {
  readonly ref: Ref;
  readonly account: GatewayAccount;
  readonly op: Op;
}

/** The gateway does not know the batch that a cursor names. */
export class UnknownCursor extends Error {
  constructor(batchId: string) {
    super(`the gateway knows no batch ${batchId}`);
    this.name = 'UnknownCursor';
  }
}

export interface PaymentGateway {
  readonly capabilities: GatewayCapabilities;
  /** The URL that is called. Absent: the gateway runs in this process, as in a simulation. */
  readonly endpoint?: string;
  charge(call: ChargeCall, signal: AbortSignal): Promise<Outcome<ChargeTxn>>;
  void(call: VoidCall, signal: AbortSignal): Promise<Outcome<ReversalTxn>>;
  refund(call: RefundCall, signal: AbortSignal): Promise<Outcome<ReversalTxn>>;
  /**
   * Asks whether this reference was executed. If not, the gateway must never execute it later: `never` is a promise. Does not throw: if the gateway
   * cannot be asked, the result is `cannot_tell`.
   */
  finalize(call: ReferenceCall, signal: AbortSignal): Promise<Finalized<ChargeTxn | ReversalTxn>>;
  /** Asks for the state of a transaction. Throws if the gateway cannot be asked. */
  lookup(call: ReferenceCall, signal: AbortSignal): Promise<LookedUp | { readonly found: 'cannot_tell' }>;
  /**
   * Asks for a transaction by the gateway's own id. null: the account has no such transaction. Throws if the gateway cannot be asked. Absent: the
   * gateway has no such question.
   */
  transaction?(account: GatewayAccount, transactionId: string, signal: AbortSignal): Promise<NamedTransaction | null>;
  /**
   * The lines of closed batches after `cursor` (a batch id; null: from the first batch), oldest first. Throws {@link UnknownCursor} before the first
   * line if the gateway does not know the cursor. Throws another error if the gateway cannot be asked.
   */
  settlements(account: GatewayAccount, cursor: string | null, signal: AbortSignal): AsyncIterable<SettlementRecord>;
}

/** Finds the adapter for a merchant account. null: this process has no adapter for it, or the account's credentials are gone (C47, C68). */
export interface Gateways {
  find(account: GatewayAccount): PaymentGateway | null;
}
