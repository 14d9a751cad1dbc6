/** The worker's tasks for keys. They finish keys whose request vanished, and delete keys that have expired. */
import { Deadline, timestamp } from '#kernel';
import { PURGE_BATCH } from '#platform';
import { type PaymentServices, finishCreate } from '../commands.js';
import { encode } from './once-by-key.js';

const SWEEP_BATCH = 100;
const SWEEP_DEADLINE_MS = 20_000;

/**
 * Finishes the keys of creates whose request vanished, from their streams (T7). If a stream holds no outcome, it is fenced and the key becomes
 * reserved.
 */
export const sweepKeys = async ({ ports, idempotency, answers, log }: PaymentServices): Promise<void> => {
  for (const row of await idempotency.takeOverStale(SWEEP_BATCH)) {
    const origin = { actor: { type: 'recovery' as const, id: 'key-sweeper' }, correlationId: ports.ids.uuid() };
    // If a key cannot be finished now, a later round takes it over again after its lease. The other keys of this round do not wait for it.
    try {
      const found = await finishCreate(ports, row, row.accountId, origin, new Deadline(ports.clock, SWEEP_DEADLINE_MS));
      await idempotency.finish(row, row.fence, found === 'reserved' ? { to: 'reserved' } : { to: 'completed', answer: encode(found, answers) });
    } catch (error) {
      log.warn({ paymentId: row.paymentId, err: error }, 'a key whose request vanished cannot be finished yet');
    }
  }
};

/** Deletes expired keys. If the payment of a key is still open, the key stays reserved, so that it can never charge again (C16, T12). */
export const purgeKeys = async ({ ports, idempotency }: PaymentServices, stop?: AbortSignal): Promise<void> => {
  const { clock, ids, streams } = ports;
  const isResolved: Parameters<typeof idempotency.purge>[1] = async ({ accountId, paymentId, attemptId }) => {
    const loaded = await streams.load(paymentId);
    if (loaded.revision !== null) return loaded.payment.phase !== 'pending' && loaded.payment.phase !== 'unknown';
    // An old intent may still arrive, and then no key would stop it. So the stream is fenced first.
    const origin = { actor: { type: 'recovery' as const, id: 'key-purge' }, correlationId: ids.uuid() };
    const abandon = {
      type: 'Abandon' as const,
      at: timestamp(clock.now()),
      attemptId,
      accountId,
      reason: 'the key expired before anything began',
    };
    await streams.execute(loaded, [abandon], origin, new Deadline(clock, SWEEP_DEADLINE_MS));
    return true;
  };
  await idempotency.purge(PURGE_BATCH, isResolved, stop);
};
