/**
 * Sessions whose attempt has no outcome yet: a read model of them, and the worker's round that finishes them. They occur if a payer closes the
 * browser, or if a process dies between two appends. If recovery later undoes a charge, the round also records this in the session.
 */
import type { Origin, ReadModel, Recorded } from '#eventstore';
import { timestamp } from '#kernel';
import { WAITS_FOR_STAFF } from '#payments';
import type { Queryable } from '#platform';
import type { CheckoutEvent } from './checkout.js';
import { type CheckoutPorts, followNow } from './pay.js';
import { CHECKOUT_STREAMS, checkoutIdOf, checkoutEvents } from './sessions.js';

const TABLE = `
  create table checkout_unfinished (checkout_id text collate "C" not null, payment_id uuid not null, since timestamptz not null)`;
const INDEXES = `
  alter table checkout_unfinished add constraint checkout_unfinished_pkey primary key (checkout_id);
  create index checkout_unfinished_since on checkout_unfinished (since, checkout_id)`;

/** A port with two implementations: Postgres and the simulation. One contract tests both (test/support/unfinished-rows.contract.ts). */
export interface UnfinishedRows {
  /** A session that has a row already gets the new attempt in this row. */
  write(sessions: readonly UnfinishedSession[]): Promise<void>;
  remove(checkoutIds: readonly string[]): Promise<void>;
  /** Sessions whose attempt began at `until` or earlier, oldest first. `after`: the last session of the previous page. */
  page(after: UnfinishedPlace | null, until: string, limit: number): Promise<UnfinishedPlace[]>;
}

export interface UnfinishedSession {
  readonly checkoutId: string;
  readonly paymentId: string;
  /** When its attempt began, RFC 3339. */
  readonly since: string;
}

export interface UnfinishedPlace {
  readonly checkoutId: string;
  /** As text, in the store's own form. */
  readonly since: string;
}

export const checkoutUnfinishedModel: ReadModel = {
  name: 'checkout-unfinished',
  shape: 1,
  streamPrefixes: CHECKOUT_STREAMS,
  tables: ['checkout_unfinished'],
  createTables: TABLE,
  createIndexes: INDEXES,
  apply: (client, events) => applyUnfinished(postgresUnfinishedRows(client), events),
};

const BEGINS: CheckoutEvent['type'] = 'AttemptStarted';
/** Events that remove a session's row. OutcomeUnknown is not one of them: the worker continues to look for the outcome. */
const ENDS: readonly CheckoutEvent['type'][] = ['AttemptDeclined', 'CheckoutPaid'];

export const applyUnfinished = async (rows: Pick<UnfinishedRows, 'write' | 'remove'>, events: readonly Recorded[]): Promise<void> => {
  const begun = new Map<string, UnfinishedSession>();
  const ended = new Set<string>();
  for (const recorded of events) {
    const checkoutId = checkoutIdOf(recorded.stream);
    const event = checkoutEvents.read(recorded);
    if (event.type === BEGINS) {
      ended.delete(checkoutId);
      begun.set(checkoutId, { checkoutId, paymentId: event.data.paymentId, since: event.at });
    } else if (ENDS.includes(event.type)) {
      begun.delete(checkoutId);
      ended.add(checkoutId);
    }
  }
  if (ended.size > 0) await rows.remove([...ended]);
  if (begun.size > 0) await rows.write([...begun.values()]);
};

export const postgresUnfinishedRows = (db: Queryable): UnfinishedRows => ({
  write: async (sessions) => {
    await db.query(
      `insert into checkout_unfinished (checkout_id, payment_id, since) select * from unnest($1::text[], $2::uuid[], $3::timestamptz[])
       on conflict (checkout_id) do update set payment_id = excluded.payment_id, since = excluded.since`,
      [sessions.map(({ checkoutId }) => checkoutId), sessions.map(({ paymentId }) => paymentId), sessions.map(({ since }) => since)],
    );
  },

  remove: async (checkoutIds) => {
    await db.query('delete from checkout_unfinished where checkout_id = any ($1::text[])', [checkoutIds]);
  },

  page: async (after, until, limit) => {
    const { rows } = await db.query<{ checkout_id: string; since: string }>(
      `select checkout_id, since::text as since from checkout_unfinished
     where (since, checkout_id) > ($1::timestamptz, $2) and since <= $3 order by since, checkout_id limit $4`,
      [after?.since ?? '-infinity', after?.checkoutId ?? '', until, limit],
    );
    return rows.map((row) => ({ checkoutId: row.checkout_id, since: row.since }));
  },
});

/** For this long after an attempt began, the worker does not touch its session. The attempt's own request normally records the outcome. */
const LEFT_ALONE_MS = 5_000;
const ROUND_LIMIT = 100;

/** One round over all sessions without an outcome. Returns the number of processed sessions. Ends early if `stop` aborts. */
export const finishSessions = async (
  ports: CheckoutPorts,
  rows: Pick<UnfinishedRows, 'page'>,
  { stop, leftAloneMs = LEFT_ALONE_MS, abandonedAfterMs }: { stop?: AbortSignal; leftAloneMs?: number; abandonedAfterMs?: number } = {},
): Promise<number> => {
  const { clock, ids, log } = ports.payments;
  const until = timestamp(clock.now() - leftAloneMs);
  let after: UnfinishedPlace | null = null;
  for (let looked = 0; ;) {
    const page: UnfinishedPlace[] = await rows.page(after, until, ROUND_LIMIT);
    for (const place of page) {
      if (stop?.aborted) return looked;
      after = place;
      looked += 1;
      const origin: Origin = { actor: { type: 'recovery', id: 'checkout' }, correlationId: ids.uuid() };
      try {
        const session = await ports.sessions.load(place.checkoutId);
        if (session) await followNow(ports, session, origin, abandonedAfterMs === undefined ? {} : { abandonedAfterMs });
      } catch (error) {
        // The next round tries this session again. Continue with the other sessions.
        log.warn({ err: error }, 'a checkout cannot be finished yet');
      }
    }
    if (page.length < ROUND_LIMIT) return looked;
  }
};

/**
 * For metrics: the number of sessions without an outcome, and the age of the oldest in seconds (0: there is none). Sessions whose payment waits for
 * staff are not counted.
 */
export const unfinishedSessions = async (db: Queryable, nowMs: number): Promise<{ readonly count: number; readonly oldestSeconds: number }> => {
  const { rows } = await db.query<{ count: string; oldest: string | null }>(
    `select count(*) as count, extract(epoch from $1::timestamptz - min(c.since)) as oldest from checkout_unfinished c
     where not exists (select from payment_list p where p.payment_id = c.payment_id and ${WAITS_FOR_STAFF})`,
    [timestamp(nowMs)],
  );
  return { count: Number(rows[0]!.count), oldestSeconds: Number(rows[0]!.oldest ?? 0) };
};
