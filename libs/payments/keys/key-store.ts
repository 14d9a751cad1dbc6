/**
 * The port of the key store. Each idempotency key has one row, which a request claims with a lease and a fence (C12–C20). Only the payment's own
 * stream says which calls were executed.
 */

import type { IntentEvent, RecordedKey } from '../payment.js';

/** Longer than a request may run (28 s). So no other request takes over the key of a running request (C42). */
export const LEASE_SECONDS = 60;
/** Specification, Limits; operators may keep keys longer (C20). */
export const KEEP_HOURS = 24;
/** The longest time that an answer asks a caller to wait (C19). */
export const MAX_RETRY_AFTER_SECONDS = 5;

/** `create`, `refund:<paymentId>` or `void:<paymentId>`: a key belongs to one operation on one path (C12). */
export type Operation = 'create' | `refund:${string}` | `void:${string}`;

/** The text that a key is bound to, without the cvv (C13). Only keyed hashes of it are kept. */
export interface RequestText {
  readonly fingerprintText: string;
  /** The same text with the card's last four digits instead of its number. The log keeps a hash of it for ever. */
  readonly loggedText: string;
}

export interface ClaimRequest extends RequestText {
  readonly accountId: string;
  readonly key: string;
  readonly operation: Operation;
}

/** The attempt that a key is bound to. */
export interface KeyAttempt {
  /** A create: the payment. A refund or void: drawn with the key, and of no use; the operation names the payment. */
  readonly paymentId: string;
  readonly attemptId: string;
  /** When the key was first claimed, RFC 3339. */
  readonly claimedAt: string;
  /**
   * The intent, if a call of the gateway may have begun. false: none has begun, as far as the row can tell. null: not known, since an older release or
   * the log made the row; then a call may have begun.
   */
  readonly begun: IntentEvent | false | null;
}

/** The row belongs to this request until the lease ends. `tookOver`: the row existed before; its owner vanished or released the key. */
export interface Owned extends KeyAttempt {
  readonly kind: 'owned';
  readonly fence: string;
  readonly tookOver: boolean;
}

/** An answer as the HTTP edge encoded it. Only the edge reads its content. In a row, `body` is a box if the answer has personal data. */
export interface StoredAnswer {
  readonly status: number;
  readonly body: string;
}

export type Claim =
  | Owned
  | { readonly kind: 'replay'; readonly answer: StoredAnswer; readonly paymentId: string; readonly attemptId: string }
  | { readonly kind: 'mismatch' }
  | { readonly kind: 'in_progress'; readonly retryAfterSeconds: number }
  | ({ readonly kind: 'reserved' } & KeyAttempt);

/** `unrecorded`: no event holds the answer, so a takeover could not make it again. The row must survive a crash of the database. */
export type KeyEnding =
  | { readonly to: 'completed'; readonly answer: StoredAnswer; readonly unrecorded?: boolean }
  | { readonly to: 'reserved' | 'released' | 'given_back' };

/** Identifies the row of a key. The key itself is stored only as a hash. */
export interface KeyName {
  readonly accountId: string;
  readonly keyHash: Buffer;
}

export interface CreateKey extends KeyAttempt {
  readonly state: 'in_progress' | 'completed' | 'reserved';
  /** Seconds until the lease ends. null: no request runs. */
  readonly leaseLeft: number | null;
}

/** Asks whether a key still belongs to the attempt of its owner. If it does, its row holds the intent from then on: a call may begin. */
export type HoldsKey = (intent: IntentEvent) => Promise<boolean>;

/** The account, payment and attempt that a key was bound to when it was claimed. */
export interface Bound extends KeyAttempt {
  readonly accountId: string;
  readonly operation: string;
}

export interface IdempotencyStore {
  /** Claims or takes over a key in one statement. If the store does not answer, throws; the key may be claimed then. */
  claim(request: ClaimRequest): Promise<Claim>;
  /** The answer that a claim would get, without a claim. null: a claim would own the key. Throws if the store does not answer. */
  look(request: ClaimRequest): Promise<Exclude<Claim, Owned> | null>;
  /** Finishes the key for the owner with this fence. false: the row has another owner now (T10). */
  finish(name: KeyName, fence: string, ending: KeyEnding): Promise<boolean>;
  /** Stores a new attempt id under the fence, before the intent of the attempt is appended (C17). false: the fence is lost. */
  renewAttempt(name: KeyName, fence: string, attemptId: string): Promise<boolean>;
  /**
   * true: the key still belongs to this attempt of the owner with this fence, and its row holds the intent now, durably. Throws if the store does not
   * answer.
   */
  holds(name: KeyName, fence: string, attemptId: string, intent: IntentEvent): Promise<boolean>;
  /** The hashed name of a key. */
  name(accountId: string, key: string): KeyName;
  /** The key as an intent records it. */
  recorded(request: ClaimRequest): RecordedKey;
  /** The row of a create's key. null: there is none, it has expired, or the key is of a refund or void. Throws if the store does not answer. */
  ofCreate(name: KeyName): Promise<CreateKey | null>;
  /** Takes over keys of creates whose lease has ended (T7). `only`: no other key. */
  takeOverStale(limit: number, only?: KeyName): Promise<(KeyName & Owned)[]>;
  /**
   * Deletes expired rows, `limit` at a time. Deletes a row without an answer only if `resolved` says so (C16, T12): such a key may be bound to an
   * attempt that is still open. After `stop` aborts, begins no further batch.
   */
  purge(limit: number, resolved: (bound: Bound) => Promise<boolean>, stop?: AbortSignal): Promise<number>;
  /** True when the store can be written. */
  ping(): Promise<boolean>;
}

/** A row that is made from the log: the newest attempt of a key, and the state that follows from the payment's stream. */
export interface RestoredKey {
  readonly key: RecordedKey;
  readonly paymentId: string;
  readonly attemptId: string;
  /** RFC 3339: when the event that names the key was recorded. The key is kept from this time on. */
  readonly at: string;
  readonly state: 'in_progress' | 'completed' | 'reserved' | 'released';
  /** Only a completed key has an answer. */
  readonly answer: StoredAnswer | null;
}

/** A row as it is compared with the log. */
export interface FoundKey {
  readonly fence: string;
  readonly paymentId: string;
  readonly attemptId: string;
  readonly state: RestoredKey['state'];
  /** True if a request may still be running under this key. */
  readonly isLeased: boolean;
  /** True if the next claim begins a new request under this key. */
  readonly isFree: boolean;
}

/**
 * The port to the rows of keys: compares them with the log, and makes them from it. Postgres and the simulation pass the same contract tests
 * (test/support/key-store.contract.ts).
 */
export interface KeyRows {
  /** Finds rows, in the order of `names`. null: there is no row. */
  find(names: readonly KeyName[]): Promise<readonly (FoundKey | null)[]>;
  /**
   * Makes rows. `replaces`: the fence of the row to replace; null: no row is replaced. A row that has changed in the meantime stays. Returns the
   * number of rows that were made.
   */
  restore(rows: readonly { readonly row: RestoredKey; readonly replaces: string | null }[]): Promise<number>;
}

/** The name of the row that belongs to a key in the log. */
export const keyNameOf = ({ keySpace, keyHash }: RecordedKey): KeyName => ({ accountId: keySpace, keyHash: Buffer.from(keyHash, 'hex') });
