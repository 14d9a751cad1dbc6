/** The port of the key store: one row for each idempotency key, claimed with a lease and a fence (C12–C20). The payment's own stream says what was executed. */

import type { RecordedKey } from '../payment.js';

/** Longer than a request may take (28 s). So no other request can take over a key while its owner still runs (C42). */
export const LEASE_SECONDS = 60;
/** Specification, Limits; operators may keep keys longer (C20). */
export const KEEP_HOURS = 24;
/** The longest wait that C19 asks of a caller. */
export const MAX_RETRY_AFTER_SECONDS = 5;

/** `create`, `refund:<paymentId>` or `void:<paymentId>`: a key belongs to one operation on one path (C12). */
export type Operation = 'create' | `refund:${string}` | `void:${string}`;

/** The text that a key is bound to, without the cvv (C13). Only keyed hashes of it are kept. */
export interface RequestText {
  readonly fingerprintText: string;
  /** The same with the card's last four digits instead of its number, for the hash that the log keeps for ever. */
  readonly loggedText: string;
}

export interface ClaimRequest extends RequestText {
  readonly accountId: string;
  readonly key: string;
  readonly operation: Operation;
}

/** The row is ours until the lease ends. `tookOver`: an earlier owner vanished, or its key was released. */
export interface Owned {
  readonly kind: 'owned';
  readonly fence: string;
  readonly tookOver: boolean;
  readonly paymentId: string;
  readonly attemptId: string;
}

/** An answer as the edge encoded it. The key store keeps it and gives it back; only the edge reads it. */
export interface StoredAnswer {
  readonly status: number;
  readonly body: string;
}

export type Claim =
  | Owned
  | { readonly kind: 'replay'; readonly answer: StoredAnswer }
  | { readonly kind: 'mismatch' }
  | { readonly kind: 'in_progress'; readonly retryAfterSeconds: number }
  | { readonly kind: 'reserved'; readonly paymentId: string };

/** `unrecorded`: no event holds the answer, so a takeover could not make it again. It must survive a crash of the database. */
export type KeyEnding =
  | { readonly to: 'completed'; readonly answer: StoredAnswer; readonly unrecorded?: boolean }
  | { readonly to: 'reserved' | 'released' | 'given_back' };

/** The row's identity, kept hashed. */
export interface KeyName {
  readonly accountId: string;
  readonly keyHash: Buffer;
}

/** The facts that a key was bound to at its claim. */
export interface Bound {
  readonly accountId: string;
  readonly paymentId: string;
  readonly attemptId: string;
}

export interface IdempotencyStore {
  /** Claims or takes over a key in one statement. If the store cannot be asked, it throws: the outcome of the claim is then unknown. */
  claim(request: ClaimRequest): Promise<Claim>;
  /**
   * The finding of a claim, without claiming. null: a claim would own the key, since there is no row, it begins anew, or it is taken over. If the store
   * cannot be asked, it throws.
   */
  look(request: ClaimRequest): Promise<Exclude<Claim, Owned> | null>;
  /** Finishes the key as the owner of that fence. false: the row has another owner now (T10). */
  finish(name: KeyName, fence: string, ending: KeyEnding): Promise<boolean>;
  /** Stores a new attempt id under the fence, before the intent of the attempt is appended (C17). false: the fence is lost. */
  renewAttempt(name: KeyName, fence: string, attemptId: string): Promise<boolean>;
  /** The hashed name of a key. */
  name(accountId: string, key: string): KeyName;
  /** The key as an intent records it. */
  recorded(request: ClaimRequest): RecordedKey;
  /** Claims rows of creates whose lease is over, for the sweeper (T7). */
  takeOverStale(limit: number): Promise<(KeyName & Owned)[]>;
  /** Deletes expired rows, `limit` at once; a `reserved` row only if its payment is resolved (C16, T12). `stop` ends it after the rows at hand. */
  purge(limit: number, resolved: (bound: Bound) => Promise<boolean>, stop?: AbortSignal): Promise<number>;
  /** True when the store can be written. */
  ping(): Promise<boolean>;
}

/** A row that was made from the log: the newest attempt of a key, and the end that the payment's stream says. */
export interface RestoredKey {
  readonly key: RecordedKey;
  readonly paymentId: string;
  readonly attemptId: string;
  /** RFC 3339: when the intent was recorded. The key is kept from then on. */
  readonly at: string;
  readonly state: 'in_progress' | 'completed' | 'reserved' | 'released';
  /** Of a completed key. */
  readonly answer: StoredAnswer | null;
}

/** A row as it is compared with the log. */
export interface FoundKey {
  readonly fence: string;
  readonly attemptId: string;
  readonly state: RestoredKey['state'];
  /** A request may be running under it. */
  readonly isLeased: boolean;
  /** The next claim begins anew. */
  readonly isFree: boolean;
}

/** The rows of keys, a port: compared with the log, and made from it. Postgres and the simulation keep one contract (test/support/key-store.contract.ts). */
export interface KeyRows {
  /** In the order of the names. null: there is no row. */
  find(names: readonly KeyName[]): Promise<readonly (FoundKey | null)[]>;
  /**
   * Makes rows. Each row replaces the row with the fence `replaces`; null: it replaces no row. Returns how many it made. A row that has changed
   * meanwhile stays as it is.
   */
  restore(rows: readonly { readonly row: RestoredKey; readonly replaces: string | null }[]): Promise<number>;
}

/** The identity of the row of a key in the log. */
export const keyNameOf = ({ keySpace, keyHash }: RecordedKey): KeyName => ({ accountId: keySpace, keyHash: Buffer.from(keyHash, 'hex') });
