/** The worker's tasks for keys: finish those whose request vanished, and delete those that have expired. */
import { Deadline, timestamp } from '#kernel';
import { PURGE_BATCH } from '#platform';
import { type PaymentServices, finishCreate } from '../commands.js';
import { encode } from './once-by-key.js';

const SWEEP_BATCH = 100;
const SWEEP_DEADLINE_MS = 20_000;

/** Creates whose request vanished: finished from the stream, or fenced if the stream holds nothing (T7). */
export const sweepKeys = async ({ ports, idempotency, answers, log }: PaymentServices): Promise<void> => {
  for (const row of await idempotency.takeOverStale(SWEEP_BATCH)) {
    const origin = { actor: { type: 'recovery' as const, id: 'key-sweeper' }, correlationId: ports.ids.uuid() };
    // If one cannot be finished now, it keeps its lease and comes again. The others do not wait for it.
    try {
      const found = await finishCreate(ports, row, row.accountId, origin, new Deadline(ports.clock, SWEEP_DEADLINE_MS));
      await idempotency.finish(row, row.fence, found === 'reserved' ? { to: 'reserved' } : { to: 'completed', answer: encode(found, answers) });
    } catch (error) {
      log.warn({ paymentId: row.paymentId, err: error }, 'a key whose request vanished cannot be finished yet');
    }
  }
};

/** Expired keys. A key whose payment is still open stays reserved, so that it can never charge again (C16, T12). */
export const purgeKeys = async ({ ports, idempotency }: PaymentServices, stop?: AbortSignal): Promise<void> => {
  const { clock, ids, streams } = ports;
  const isResolved: Parameters<typeof idempotency.purge>[1] = async ({ accountId, paymentId, attemptId }) => {
    const loaded = await streams.load(paymentId);
    if (loaded.revision !== null) return loaded.payment.phase !== 'pending' && loaded.payment.phase !== 'unknown';
    // If an old intent still arrived, no key would guard it: fence the stream first.
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
