/**
 * `payfold webhooks listen`: forwards an account's notifications to a server on this machine, for the development of a receiver. It reads the rows of
 * the outbox and posts them like deliveries. It registers no endpoint and changes no table. Each event is posted once, even if the server refuses it.
 *
 * The secret is derived from the master key and the account. It is the same in every run and is not stored.
 */
import { request as httpRequest } from 'node:http';
import { type Clock, timestamp, within } from '#kernel';
import type { KeyRing, Pool, Queryable } from '#platform';
import { DUE_CHANNEL } from './due.js';
import { bodyToSend, type PayloadPorts } from './payload.js';
import { ATTEMPT_BUDGET_MS } from './schedule.js';
import { headersOf } from './signature.js';

export const listenSecretOf = (keys: KeyRing, accountId: string): string => `whsec_${keys.mac('webhook-listen', accountId).toString('base64url')}`;

/** The result of one post. `status` null: no answer came, and `error` holds the reason. */
export interface Forwarded {
  readonly at: string;
  readonly eventId: string;
  readonly type: string;
  readonly paymentId: string;
  readonly status: number | null;
  readonly error: string | null;
  readonly ms: number;
}

export interface Listening {
  readonly pool: Pool;
  readonly payloads: PayloadPorts;
  readonly keys: KeyRing;
  readonly clock: Clock;
  readonly accountId: string;
  /** A server on this machine, over http. */
  readonly forwardTo: URL;
  readonly onForwarded: (forwarded: Forwarded) => void;
  /** Called once, when forwarding begins. */
  readonly onReady?: () => void;
}

interface Row {
  readonly id: string;
  readonly number: string;
  readonly type: string;
  readonly payment_id: string;
  readonly payload: Buffer;
  readonly stream: string;
  readonly revision: string;
}

const LOOK_EVERY_MS = 500;
const BATCH = 100;

/** Runs until `signal` aborts. Throws the errors of the database. */
export const listenTo = async (
  { pool, payloads, keys, clock, accountId, forwardTo, onForwarded, onReady }: Listening,
  signal: AbortSignal,
): Promise<void> => {
  const secret = listenSecretOf(keys, accountId);
  const bell = { wake: new AbortController() };
  const client = await pool.connect();
  const ring = () => bell.wake.abort('rung');
  client.on('notification', ring);
  client.on('error', ring);
  signal.addEventListener('abort', ring);
  try {
    await client.query(`listen ${DUE_CHANNEL}`);
    let after = await lastNumber(pool, accountId);
    onReady?.();
    while (!signal.aborted) {
      bell.wake = new AbortController();
      const rows = await next(pool, accountId, after);
      for (const { id, number, type, payment_id: paymentId, payload, stream, revision } of rows) {
        if (signal.aborted) return;
        const body = await bodyToSend(payloads, { eventId: id, payload, stream, revision: BigInt(revision) });
        const begun = clock.monotonic();
        const headers = headersOf({ id, type, body }, secret, Math.floor(clock.realNow() / 1000));
        const answer = await forward(forwardTo, headers, body, clock);
        onForwarded({ at: timestamp(clock.realNow()), eventId: id, type, paymentId, ...answer, ms: Math.round(clock.monotonic() - begun) });
        after = number;
      }
      if (rows.length < BATCH) await clock.sleep(LOOK_EVERY_MS, bell.wake.signal);
    }
  } finally {
    signal.removeEventListener('abort', ring);
    client.release(true);
  }
};

/** Number of the account's newest event. Numbers ascend in the order of commits, since the outbox writes under the lock of its checkpoint. */
const lastNumber = async (db: Queryable, accountId: string): Promise<string> => {
  const { rows } = await db.query<{ last: string }>('select coalesce(max(number), 0)::text as last from webhook_event where account_id = $1', [
    accountId,
  ]);
  return rows[0]!.last;
};

const next = async (db: Queryable, accountId: string, after: string): Promise<Row[]> => {
  const { rows } = await db.query<Row>(
    `select id, number::text as number, type, payment_id, payload, stream, revision::text as revision from webhook_event where account_id = $1 and number > $2::bigint order by number limit $3`,
    [accountId, after, BATCH],
  );
  return rows;
};

const forward = async (
  url: URL,
  headers: Readonly<Record<string, string>>,
  body: Uint8Array,
  clock: Clock,
): Promise<{ status: number | null; error: string | null }> => {
  const stop = new AbortController();
  const answered = new Promise<number>((resolve, reject) => {
    const request = httpRequest(url, { method: 'POST', headers, signal: stop.signal, agent: false }, (response) => {
      resolve(response.statusCode!);
      response.resume();
    });
    request.once('error', reject);
    request.end(body);
  });
  try {
    const status = await within(clock, ATTEMPT_BUDGET_MS, answered, () => new Error('no answer within 10 s'));
    return { status, error: null };
  } catch (error) {
    stop.abort();
    const { code, message } = error as NodeJS.ErrnoException;
    return { status: null, error: code === 'ECONNREFUSED' ? 'nobody listens there' : message };
  }
};
