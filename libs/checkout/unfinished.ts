/**
 * Sessions whose attempt has no outcome yet: a read model of them, and the worker's round that finishes them. A payer who has closed his browser, a process that
 * died between two appends, a charge that recovery undid an hour later: none leaves a session in `processing` (checkout.md 3).
 */
import type { Origin, ReadModel, Recorded } from '#eventstore';
import { timestamp } from '#kernel';
import type { Pool, Queryable } from '#platform';
import type { CheckoutEvent } from './checkout.js';
import { type CheckoutPorts, followNow } from './pay.js';
import { CHECKOUT_STREAMS, checkoutIdOf, checkoutEvents } from './sessions.js';

const TABLE = `
  create table checkout_unfinished (checkout_id text collate "C" not null, payment_id uuid not null, since timestamptz not null)`;
const INDEXES = `
  alter table checkout_unfinished add constraint checkout_unfinished_pkey primary key (checkout_id);
  create index checkout_unfinished_since on checkout_unfinished (since, checkout_id)`;

export const checkoutUnfinishedModel: ReadModel = {
  name: 'checkout-unfinished',
  shape: 1,
  streamPrefixes: CHECKOUT_STREAMS,
  tables: ['checkout_unfinished'],
  createTables: TABLE,
  createIndexes: INDEXES,
  apply: (client, events) => applyUnfinished(client, events),
};

const BEGINS: CheckoutEvent['type'] = 'AttemptStarted';
/** A session whose outcome is unknown stays: the loop goes on until somebody knows. */
const ENDS: readonly CheckoutEvent['type'][] = ['AttemptDeclined', 'CheckoutPaid'];

const applyUnfinished = async (client: Queryable, events: readonly Recorded[]): Promise<void> => {
  const begun = new Map<string, { paymentId: string; since: string }>();
  const ended = new Set<string>();
  for (const recorded of events) {
    const checkoutId = checkoutIdOf(recorded.stream);
    const event = checkoutEvents.read(recorded);
    if (event.type === BEGINS) {
      ended.delete(checkoutId);
      begun.set(checkoutId, { paymentId: event.data.paymentId, since: event.at });
    } else if (ENDS.includes(event.type)) {
      begun.delete(checkoutId);
      ended.add(checkoutId);
    }
  }
  if (ended.size > 0) await client.query('delete from checkout_unfinished where checkout_id = any ($1::text[])', [[...ended]]);
  if (begun.size > 0)
    await client.query(
      `insert into checkout_unfinished (checkout_id, payment_id, since) select * from unnest($1::text[], $2::uuid[], $3::timestamptz[])
       on conflict (checkout_id) do update set payment_id = excluded.payment_id, since = excluded.since`,
      [[...begun.keys()], [...begun.values()].map(({ paymentId }) => paymentId), [...begun.values()].map(({ since }) => since)],
    );
};

/** A request that is at work finishes its session itself. */
const LEFT_ALONE_MS = 5_000;
const ROUND_LIMIT = 100;

/** One round over all sessions without an outcome; returns how many were looked at. Ends early when `stop` aborts. */
export const finishSessions = async (
  ports: CheckoutPorts,
  pool: Pool,
  { stop, leftAloneMs = LEFT_ALONE_MS, abandonedAfterMs }: { stop?: AbortSignal; leftAloneMs?: number; abandonedAfterMs?: number } = {},
): Promise<number> => {
  const { clock, ids, log } = ports.payments;
  const until = timestamp(clock.now() - leftAloneMs);
  let after = { since: '-infinity', checkoutId: '' };
  for (let looked = 0; ;) {
    const page = await unfinishedAfter(pool, after, until);
    for (const { checkoutId, since } of page) {
      if (stop?.aborted) return looked;
      after = { since, checkoutId };
      looked += 1;
      const origin: Origin = { actor: { type: 'recovery', id: 'checkout' }, correlationId: ids.uuid() };
      try {
        const session = await ports.sessions.load(checkoutId);
        if (session) await followNow(ports, session, origin, abandonedAfterMs === undefined ? {} : { abandonedAfterMs });
      } catch (error) {
        // It comes again in the next round; the others need not wait for it.
        log.warn({ err: error }, 'a checkout cannot be finished yet');
      }
    }
    if (page.length < ROUND_LIMIT) return looked;
  }
};

const unfinishedAfter = async (
  pool: Pool,
  after: { readonly since: string; readonly checkoutId: string },
  until: string,
): Promise<{ checkoutId: string; since: string }[]> => {
  const { rows } = await pool.query<{ checkout_id: string; since: string }>(
    `select checkout_id, since::text as since from checkout_unfinished
     where (since, checkout_id) > ($1::timestamptz, $2) and since <= $3 order by since, checkout_id limit $4`,
    [after.since, after.checkoutId, until, ROUND_LIMIT],
  );
  return rows.map((row) => ({ checkoutId: row.checkout_id, since: row.since }));
};
