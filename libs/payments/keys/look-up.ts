/** What a key of a create has made, for a partner that no longer has the request (C44). */
import { Unavailable } from '#eventstore';
import { ServiceError } from '#kernel';
import { findPayment, type PaymentServices } from '../commands.js';
import type { PaymentPage } from '../list.js';
import { finishIfEmpty, VANISHED } from '../lost.js';
import { MAX_RETRY_AFTER_SECONDS } from './key-store.js';
import { atStableTime, inProgress, storeIncident } from './once-by-key.js';
import { SWEEP_DEADLINE_MS, sweepKeys } from './sweep.js';

/** `absent` promises nothing: the request may still be on its way, or its key may be forgotten. */
export const KEY_STATES = ['completed', 'reserved', 'absent'] as const;

export interface FoundByKey extends PaymentPage {
  readonly keyState: (typeof KEY_STATES)[number];
}

/** The row of the key cannot be read now. The request of the key may have charged a card. */
export const keyUnreadable = () =>
  new ServiceError('IDEMPOTENCY_UNAVAILABLE', 'What this key has made cannot be read at the moment. Ask again.', {}, { retryAfterSeconds: 1 });

/**
 * The payment that a key of the account's creates has made, and the state of the key. Takes over an expired lease first (T7). Throws
 * IDEMPOTENCY_IN_PROGRESS while the request runs, and IDEMPOTENCY_UNAVAILABLE if rows or streams may be missing.
 */
export const lookUpKey = async (services: PaymentServices, accountId: string, key: string): Promise<FoundByKey> => {
  const { ports, idempotency, claims, log } = services;
  if (ports.ownLog.incident) throw storeIncident();
  if (!claims.isOpen) await claims.begun();
  const name = idempotency.name(accountId, key);
  const read = () =>
    idempotency.ofCreate(name).catch((error: unknown) => {
      log.warn({ err: error }, 'the row of a key could not be looked up');
      throw keyUnreadable();
    });
  let row = await read();
  if (row && row.leaseLeft !== null && row.leaseLeft <= 0) {
    await atStableTime(ports, () => sweepKeys(services, name));
    row = await read();
  }
  // While claims are closed, rows may be missing. They may have been closed since the row was read.
  if (!claims.isOpen) throw keyUnreadable();
  if (row === null) return { payments: [], nextCursor: null, keyState: 'absent' };
  if (row.state === 'in_progress') throw inProgress(Math.min(MAX_RETRY_AFTER_SECONDS, Math.max(1, Math.ceil(row.leaseLeft ?? 1))));
  const { paymentId } = row;
  const find = () =>
    findPayment(services, accountId, paymentId).catch((error: unknown) => {
      if (error instanceof ServiceError && error.code === 'PAYMENT_NOT_FOUND') return null;
      if (error instanceof Unavailable) throw keyUnreadable();
      throw error;
    });
  let payment = await find();
  if (row.state === 'reserved' && payment === null) {
    // An empty stream may be a lost one, so the gateway may have to be asked (T5).
    const create = { ...row, accountId };
    await atStableTime(ports, () => finishIfEmpty(ports, create, VANISHED, 'key-look-up', SWEEP_DEADLINE_MS)).catch((error: unknown) => {
      log.warn({ paymentId, err: error }, 'a create without events could not be ended');
      throw keyUnreadable();
    });
    payment = await find();
  }
  // The answer of a completed key names a payment. Without it, the stream is lost.
  if (row.state === 'completed' && payment === null) throw storeIncident();
  return { payments: payment ? [payment] : [], nextCursor: null, keyState: row.state };
};
