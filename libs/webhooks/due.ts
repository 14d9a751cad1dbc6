/** The signal that deliveries may be due: a transaction announces it, and dispatchers hear of it after the commit. It may get lost, so dispatchers also look by themselves. */
import type { Pool, Queryable } from '#platform';

export const DUE_CHANNEL = 'webhook_due';

/** Announces that something may be due, when the transaction commits. */
export const announceDue = async (db: Queryable): Promise<void> => {
  await db.query(`select pg_notify('${DUE_CHANNEL}', '')`);
};

/** A port. Postgres and the simulation keep one contract (test/support/webhook-rows.contract.ts). */
export interface DueSignal {
  /**
   * Calls `ring` once it hears announcements, and then for each of them. Resolves when the connection has ended or `stop` aborts. Throws if there is no connection.
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
      // What was announced before counts as well.
      ring();
      if (!stop.aborted) await ended;
    } finally {
      stop.removeEventListener('abort', end);
      client.release(true);
    }
  },
});
