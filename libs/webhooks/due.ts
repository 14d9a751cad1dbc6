/**
 * The signal that deliveries may be due. A transaction sends it, and dispatchers receive it after the commit. Signals can be lost, so dispatchers
 * also poll.
 */
import type { Pool, Queryable } from '#platform';

export const DUE_CHANNEL = 'webhook_due';

/** Signals that deliveries may be due, when the transaction commits. */
export const announceDue = async (db: Queryable): Promise<void> => {
  await db.query(`select pg_notify('${DUE_CHANNEL}', '')`);
};

/** A port with two implementations: Postgres and the simulation. One contract tests both (test/support/webhook-rows.contract.ts). */
export interface DueSignal {
  /**
   * Calls `ring` once at the beginning, and then for each signal. Resolves when the connection ends or `stop` aborts. Throws if there is no
   * connection.
   */
  listen(ring: () => void, stop: AbortSignal): Promise<void>;
}

/** Holds one connection of the pool while it listens. */
export const postgresDueSignal = (pool: Pool): DueSignal => ({
  listen: async (ring, stop) => {
    const client = await pool.connect();
    let end!: () => void;
    const ended = new Promise<void>((resolve) => (end = resolve));
    stop.addEventListener('abort', end, { once: true });
    try {
      client.on('error', end);
      client.on('end', end);
      client.on('notification', ring);
      await client.query(`listen ${DUE_CHANNEL}`);
      // Earlier signals were missed, so ring once.
      ring();
      if (!stop.aborted) await ended;
    } finally {
      stop.removeEventListener('abort', end);
      client.release(true);
    }
  },
});
