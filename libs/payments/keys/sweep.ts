/** The worker's tasks for keys: finish keys whose request vanished, and delete expired keys. */
import { Deadline } from '#kernel';
import { PURGE_BATCH } from '#platform';
import { type PaymentServices, finishCreate } from '../commands.js';
import { resultOf } from '../payment.js';
import { finishEmptyCreate, restoreReversal } from '../lost.js';
import { KEEP_HOURS, type KeyAttempt, type KeyName } from './key-store.js';
import { toStore } from './once-by-key.js';

const SWEEP_BATCH = 100;
export const SWEEP_DEADLINE_MS = 20_000;
const HOUR_MS = 3_600_000;

/**
 * Finishes the keys of creates whose request vanished, from their streams (T7). If a stream holds no outcome, fences it and makes the key reserved.
 * `only`: no other key.
 */
export const sweepKeys = async ({ ports, idempotency, answers, log }: PaymentServices, only?: KeyName): Promise<void> => {
  for (const row of await idempotency.takeOverStale(SWEEP_BATCH, only)) {
    const origin = { actor: { type: 'recovery' as const, id: 'key-sweeper' }, correlationId: ports.ids.uuid() };
    // If a key cannot be finished now, a later round takes it over again. This round continues with the other keys.
    try {
      const found = await finishCreate(ports, row, row.accountId, origin, new Deadline(ports.clock, SWEEP_DEADLINE_MS));
      const place = { paymentId: row.paymentId, operation: 'create' } as const;
      await idempotency.finish(
        row,
        row.fence,
        found === 'reserved' ? { to: 'reserved' } : { to: 'completed', answer: toStore(found, answers, place) },
      );
    } catch (error) {
      log.warn({ paymentId: row.paymentId, err: error }, 'a key whose request vanished cannot be finished yet');
    }
  }
};

/**
 * Deletes expired keys. If the payment of a create's key is still open, the key stays reserved and can never charge again (C16, T12).
 *
 * The key of a refund or void stays until its attempt has ended, then for {@link KEEP_HOURS} more. A key that is forgotten while its attempt is open
 * would let the same request return the money a second time.
 */
export const purgeKeys = async ({ ports, idempotency }: PaymentServices, stop?: AbortSignal): Promise<void> => {
  const { clock, ids, streams, ownLog } = ports;
  const origin = () => ({ actor: { type: 'recovery' as const, id: 'key-purge' }, correlationId: ids.uuid() });
  const deadline = () => new Deadline(clock, SWEEP_DEADLINE_MS);
  const hasEnded = async (paymentId: string, { attemptId, begun }: KeyAttempt): Promise<boolean> => {
    const loaded = await streams.load(paymentId);
    const { payment } = loaded;
    await ownLog.verified(null);
    const attempt = payment.phase === 'charged' ? resultOf(payment, attemptId) : undefined;
    if (!attempt && begun && payment.phase === 'charged') {
      // The log has lost the intent of a call that may have begun. Recovery resolves it.
      await restoreReversal(ports, loaded, begun, origin(), deadline());
      return false;
    }
    return !attempt || (attempt.ended !== null && clock.now() - Date.parse(attempt.ended.at) >= KEEP_HOURS * HOUR_MS);
  };
  const isResolved: Parameters<typeof idempotency.purge>[1] = async (bound) => {
    const { operation } = bound;
    if (operation !== 'create') return hasEnded(operation.slice(operation.indexOf(':') + 1), bound);
    const loaded = await streams.load(bound.paymentId);
    // Another log may have answered. Its empty stream says nothing, and without its row the key could be executed again.
    await ownLog.verified(null);
    if (loaded.revision !== null) return loaded.payment.phase !== 'pending' && loaded.payment.phase !== 'unknown';
    // After the key is deleted, an old intent could still arrive. So the stream is fenced first.
    const ended = await finishEmptyCreate(ports, loaded, bound, 'the key expired before anything began', origin(), deadline());
    await ownLog.verified(null);
    return ended === 'abandoned';
  };
  await idempotency.purge(PURGE_BATCH, isResolved, stop);
};
