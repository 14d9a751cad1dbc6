/**
 * A delivery is one event for one endpoint. All workers share the rows of deliveries.
 *
 * A worker claims a delivery under a lease with a token. Only a worker with this token can record how the attempt ended. All times are the
 * database's.
 *
 * - pending → in_flight → delivered, held, or pending again
 * - pending → canceled, if the endpoint is disabled
 * - held, delivered → pending in another round, if an operator redelivers
 */
import { ServiceError } from '#kernel';
import { type Client, type Migration, type Pool, PURGE_BATCH, purge, type Queryable, transaction } from '#platform';
import { announceDue } from './due.js';
import { recordStaffAction, type Redelivered, type StaffDeps } from './endpoint.js';
import { OUTBOX_NEVER_AGAIN, WEBHOOK_OUTBOX } from './outbox.js';
import type { Outcome } from './safe-request.js';
import { FAILING_AFTER, type Fate, LEASE_MS, MAX_LEASE_LOSSES, RETRY_SPREAD } from './schedule.js';
import { CANCELED_AT_ONCE, cancelForDisabled, type StaffRows } from './staff-rows.js';

export const webhookDeliveryMigration: Migration = {
  name: '0082-webhook-delivery',
  sql: `
create table webhook_delivery (
  id           bigint generated always as identity primary key,
  event_id     text collate "C" not null references webhook_event,
  endpoint_id  uuid not null references webhook_endpoint,
  state        text not null default 'pending' check (state in ('pending', 'in_flight', 'delivered', 'held', 'canceled')),
  round        int not null default 1,
  attempts     int not null default 0,
  lease_losses int not null default 0,
  due_at       timestamptz not null default clock_timestamp(),
  lease_token  uuid,
  lease_until  timestamptz,
  lease_owner  text,
  last_status  int,
  last_error   text,
  delivered_at timestamptz,
  held_at      timestamptz,
  created_at   timestamptz not null default clock_timestamp(),
  unique (event_id, endpoint_id),
  check ((state = 'in_flight') = (lease_token is not null)),
  check ((lease_token is null) = (lease_until is null))
) with (fillfactor = 70);
create index webhook_delivery_due on webhook_delivery (endpoint_id, due_at, id) where state = 'pending';
create index webhook_delivery_lease on webhook_delivery (endpoint_id, lease_until) where state = 'in_flight';
create index webhook_delivery_held on webhook_delivery (held_at desc, id desc) where state = 'held';

create table webhook_attempt (
  delivery_id   bigint not null references webhook_delivery on delete cascade,
  round         int not null,
  attempt       int not null,
  started_at    timestamptz not null,
  duration_ms   int not null,
  outcome       text not null,
  status_code   int,
  error_code    text,
  remote_ip     inet,
  secret_id     uuid,
  response_head bytea,
  primary key (delivery_id, round, attempt)
);
create index webhook_attempt_started on webhook_attempt using brin (started_at);
`,
};

/** The purge and the report of attempts read by time. A BRIN index was not used while the planner took most rows for old. */
export const webhookAttemptTimeMigration: Migration = {
  name: '0085-webhook-attempt-time',
  run: 'concurrently',
  sql: 'create index concurrently if not exists webhook_attempt_time on webhook_attempt (started_at)',
};

export const webhookAttemptBrinMigration: Migration = {
  name: '0086-webhook-attempt-brin',
  run: 'concurrently',
  sql: 'drop index concurrently if exists webhook_attempt_started',
};

/** The list of deliveries reads each state of each endpoint as one range. */
export const webhookDeliveryListMigration: Migration = {
  name: '0087-webhook-delivery-list',
  run: 'concurrently',
  sql: 'create index concurrently if not exists webhook_delivery_list on webhook_delivery (endpoint_id, state, id desc)',
};

/** After an erasure, the hash is all that says what an attempt sent (C78). */
export const webhookAttemptHashMigration: Migration = {
  name: '0088-webhook-attempt-hash',
  sql: 'alter table webhook_attempt add column body_sha256 bytea',
};

export const DELIVERY_STATES = ['pending', 'in_flight', 'delivered', 'held', 'canceled'] as const;
export type DeliveryState = (typeof DELIVERY_STATES)[number];

export interface Claimed {
  readonly deliveryId: string;
  readonly token: string;
  readonly round: number;
  /** Number of earlier attempts in this round. */
  readonly attempts: number;
  readonly eventId: string;
  readonly type: string;
  /** As the row holds it: {@link bodyToSend} opens it. */
  readonly payload: Buffer;
  readonly stream: string;
  readonly revision: bigint;
  readonly endpointId: string;
  readonly url: string;
  /** Consecutive failures of the endpoint before this attempt. */
  readonly consecutiveFailures: number;
  readonly secretId: string;
  readonly sealed: { readonly kid: string; readonly ciphertext: string };
  /** Time of the claim by the database's clock, in milliseconds. */
  readonly claimedAtMs: number;
  /** Random number from [0, 1). It varies the wait before the next attempt. */
  readonly chance: number;
}

/** How an attempt ended. */
export interface Ended {
  readonly deliveryId: string;
  readonly token: string;
  readonly fate: Fate;
  readonly outcome: Outcome;
  readonly statusCode: number | null;
  readonly errorCode: string | null;
  readonly remoteIp: string | null;
  readonly responseHead: Buffer | null;
  readonly secretId: string;
  /** Hash of the bytes that were sent. */
  readonly bodySha256: Buffer;
  /** Start of the attempt by the database's clock, in milliseconds. */
  readonly startedAtMs: number;
  readonly durationMs: number;
}

export interface HealthChange {
  readonly endpointId: string;
  readonly before: number;
  readonly after: number;
}

/** Operations of workers on deliveries. Several workers may call them at the same time. */
export interface Deliveries {
  /**
   * Claims at most `slots` deliveries that are due, from endpoints in random order. Each endpoint has a maximum of deliveries in flight. Two claims
   * at the same moment may together exceed this maximum.
   */
  claimDue(slots: number): Promise<Claimed[]>;
  /** Records how attempts ended. The result is true for each attempt whose lease was still held. Nothing is recorded of the other attempts. */
  complete(ended: readonly Ended[]): Promise<boolean[]>;
  /** Gives back claimed deliveries that were not attempted. They are pending, and due after `waitMs`. */
  release(claimed: readonly Pick<Claimed, 'deliveryId' | 'token'>[], waitMs: number): Promise<void>;
  /** Counts consecutive failures of endpoints. A success sets the count to 0. Returns the counts before and after. */
  recordHealth(results: readonly { readonly endpointId: string; readonly succeeded: boolean }[]): Promise<HealthChange[]>;
  /** Leases that have expired by the database's clock. */
  expired(): Promise<readonly { readonly deliveryId: string; readonly token: string }[]>;
  /**
   * Ends those of the given leases that are still expired. Their deliveries become pending again. A delivery that has lost MAX_LEASE_LOSSES leases
   * becomes held.
   */
  reap(
    leases: readonly { readonly deliveryId: string; readonly token: string }[],
  ): Promise<{ readonly deliveryId: string; readonly held: boolean }[]>;
  /**
   * Cancels pending deliveries of disabled endpoints. Also repairs rows after the database's clock was set back: due times and leases that end too
   * late are set to their latest normal value.
   */
  tidy(retrySeconds: number): Promise<void>;
}

export const postgresDeliveries = (pool: Pool, owner: string): Deliveries => ({
  claimDue: async (slots) => {
    type Row = Omit<Claimed, 'sealed' | 'claimedAtMs' | 'revision'> & { kid: string; ciphertext: string; claimedAt: Date; revision: string };
    const { rows } = await pool.query<Row>({
      name: 'webhook-claim',
      text: `
        with pick as materialized (
          select d.id
          from (
            select id, case when consecutive_failures >= $3::int then 1 else max_in_flight end as share
            from webhook_endpoint where status = 'enabled' order by random()) e
          cross join lateral (
            select w.id from webhook_delivery w
            where w.endpoint_id = e.id and w.state = 'pending' and w.due_at <= now()
            order by w.due_at, w.id
            limit greatest(0, e.share - (select count(*)::int from webhook_delivery f where f.endpoint_id = e.id and f.state = 'in_flight'))
            for update skip locked) d
          limit $1)
        update webhook_delivery d
        set state = 'in_flight', lease_token = gen_random_uuid(), lease_until = clock_timestamp() + $4::int * interval '1 millisecond', lease_owner = $2
        from pick p, webhook_event v, webhook_endpoint e, webhook_endpoint_secret s
        where d.id = p.id and v.id = d.event_id and e.id = d.endpoint_id and s.endpoint_id = e.id and s.state = 'active'
        returning d.id as "deliveryId", d.lease_token as token, d.round, d.attempts, v.id as "eventId", v.type, v.payload, v.stream, v.revision,
                  e.id as "endpointId", e.url,
                  e.consecutive_failures as "consecutiveFailures", s.id as "secretId", s.kid, s.ciphertext, clock_timestamp() as "claimedAt",
                  random() as chance`,
      values: [slots, owner, FAILING_AFTER, LEASE_MS],
    });
    return rows.map(({ kid, ciphertext, claimedAt, revision, ...row }) => ({
      ...row,
      revision: BigInt(revision),
      sealed: { kid, ciphertext },
      claimedAtMs: claimedAt.getTime(),
    }));
  },

  complete: async (ended) => {
    const { rows } = await pool.query<{ id: string }>({
      name: 'webhook-complete',
      text: `
        with ended as (
          select * from unnest($1::bigint[], $2::uuid[], $3::text[], $4::int[], $5::text[], $6::int[], $7::text[], $8::inet[], $9::bytea[], $10::uuid[],
                               $11::timestamptz[], $12::int[], $13::bytea[])
            as t (id, token, state, wait_ms, outcome, status_code, error_code, remote_ip, response_head, secret_id, started_at, duration_ms, body_sha256)),
        moved as (
          update webhook_delivery d
          set state = e.state, attempts = d.attempts + 1, lease_token = null, lease_until = null, lease_owner = null,
              due_at = case when e.state = 'pending' then clock_timestamp() + e.wait_ms * interval '1 millisecond' else d.due_at end,
              last_status = e.status_code, last_error = case when e.outcome = 'ok' then null else coalesce(e.error_code, e.outcome) end,
              delivered_at = case when e.state = 'delivered' then clock_timestamp() else d.delivered_at end,
              held_at = case when e.state = 'held' then clock_timestamp() end
          from ended e
          where d.id = e.id and d.lease_token = e.token and d.state = 'in_flight'
          returning d.id, d.round, d.attempts)
        insert into webhook_attempt
          (delivery_id, round, attempt, started_at, duration_ms, outcome, status_code, error_code, remote_ip, secret_id, response_head, body_sha256)
        select m.id, m.round, m.attempts, e.started_at, e.duration_ms, e.outcome, e.status_code, e.error_code, e.remote_ip, e.secret_id, e.response_head,
               e.body_sha256
        from moved m join ended e on e.id = m.id
        returning delivery_id as id`,
      values: [
        ended.map(({ deliveryId }) => deliveryId),
        ended.map(({ token }) => token),
        ended.map(({ fate }) => fate.state),
        ended.map(({ fate }) => (fate.state === 'pending' ? fate.waitMs : null)),
        ended.map(({ outcome }) => outcome),
        ended.map(({ statusCode }) => statusCode),
        ended.map(({ errorCode }) => errorCode),
        ended.map(({ remoteIp }) => remoteIp),
        ended.map(({ responseHead }) => responseHead),
        ended.map(({ secretId }) => secretId),
        ended.map(({ startedAtMs }) => new Date(startedAtMs)),
        ended.map(({ durationMs }) => durationMs),
        ended.map(({ bodySha256 }) => bodySha256),
      ],
    });
    const counted = new Set(rows.map(({ id }) => id));
    return ended.map(({ deliveryId }) => counted.has(deliveryId));
  },

  release: async (claimed, waitMs) => {
    await pool.query(
      `update webhook_delivery d
       set state = 'pending', lease_token = null, lease_until = null, lease_owner = null, due_at = clock_timestamp() + $3::int * interval '1 millisecond'
       from unnest($1::bigint[], $2::uuid[]) as t (id, token) where d.id = t.id and d.lease_token = t.token and d.state = 'in_flight'`,
      [claimed.map(({ deliveryId }) => deliveryId), claimed.map(({ token }) => token), waitMs],
    );
  },

  recordHealth: async (results) => {
    const changes = new Map<string, { succeeded: boolean; failures: number }>();
    for (const { endpointId, succeeded } of results) {
      const change = changes.get(endpointId) ?? { succeeded: false, failures: 0 };
      changes.set(endpointId, { succeeded: change.succeeded || succeeded, failures: change.failures + (succeeded ? 0 : 1) });
    }
    const { rows } = await pool.query<HealthChange>(
      `with change as (select * from unnest($1::uuid[], $2::boolean[], $3::int[]) as t (id, succeeded, failures)),
       -- In one order for all workers, so that none waits for another that waits for it.
       locked as (select e.id, e.consecutive_failures from webhook_endpoint e where e.id = any ($1::uuid[]) order by e.id for update)
       update webhook_endpoint e
       set consecutive_failures = case when c.succeeded then 0 else l.consecutive_failures + c.failures end
       from change c join locked l using (id) where e.id = c.id
       returning e.id as "endpointId", l.consecutive_failures as before, e.consecutive_failures as after`,
      [[...changes.keys()], [...changes.values()].map(({ succeeded }) => succeeded), [...changes.values()].map(({ failures }) => failures)],
    );
    return rows;
  },

  expired: async () => {
    const { rows } = await pool.query<{ deliveryId: string; token: string }>(
      `select id as "deliveryId", lease_token as token from webhook_delivery where state = 'in_flight' and lease_until < now()`,
    );
    return rows;
  },

  reap: async (leases) => {
    const { rows } = await pool.query<{ deliveryId: string; held: boolean }>(
      `update webhook_delivery d
       set state = case when d.lease_losses + 1 >= $3::int then 'held' else 'pending' end, lease_losses = d.lease_losses + 1,
           lease_token = null, lease_until = null, lease_owner = null, due_at = clock_timestamp(), last_error = 'worker_lost',
           held_at = case when d.lease_losses + 1 >= $3::int then clock_timestamp() end
       from unnest($1::bigint[], $2::uuid[]) as t (id, token)
       where d.id = t.id and d.lease_token = t.token and d.state = 'in_flight' and d.lease_until < clock_timestamp()
       returning d.id as "deliveryId", d.state = 'held' as held`,
      [leases.map(({ deliveryId }) => deliveryId), leases.map(({ token }) => token), MAX_LEASE_LOSSES],
    );
    return rows;
  },

  tidy: async (retrySeconds) => {
    while ((await cancelForDisabled(pool)) === CANCELED_AT_ONCE);
    const longestWaitMs = Math.ceil(retrySeconds * 1000 * (1 + RETRY_SPREAD));
    await pool.query(
      `update webhook_delivery d set due_at = now() + $1::int * interval '1 millisecond'
       from webhook_endpoint e
       cross join lateral (
         select w.id from webhook_delivery w
         where w.endpoint_id = e.id and w.state = 'pending' and w.due_at > now() + ($1::int + $2::int) * interval '1 millisecond'
         order by w.due_at desc, w.id desc limit 100) far
       where d.id = far.id and d.state = 'pending'`,
      [longestWaitMs, CLOCK_TOLERANCE_MS],
    );
    await pool.query(
      `update webhook_delivery set lease_until = now() + $1::int * interval '1 millisecond'
       where state = 'in_flight' and lease_until > now() + ($1::int + $2::int) * interval '1 millisecond'`,
      [LEASE_MS, CLOCK_TOLERANCE_MS],
    );
  },
});

/** `tidy` repairs a time only if it is more than this after its latest normal value. */
const CLOCK_TOLERANCE_MS = 5_000;

// For staff.

export interface DeliveryRow {
  readonly deliveryId: number;
  readonly eventId: string;
  readonly type: string;
  readonly accountId: string;
  readonly paymentId: string;
  readonly endpointId: string;
  readonly url: string;
  readonly state: DeliveryState;
  readonly round: number;
  readonly attempts: number;
  /** Time of the next attempt. null: none is planned. */
  readonly dueAt: string | null;
  readonly lastStatus: number | null;
  readonly lastError: string | null;
  readonly createdAt: string;
  readonly deliveredAt: string | null;
  readonly heldAt: string | null;
}

export interface AttemptRow {
  readonly round: number;
  readonly attempt: number;
  readonly startedAt: string;
  readonly durationMs: number;
  readonly outcome: Outcome;
  readonly statusCode: number | null;
  readonly errorCode: string | null;
  readonly remoteIp: string | null;
  readonly secretId: string | null;
  /** First bytes of the answer's body. Bytes that are not printable are escaped. null: no body, or no answer. */
  readonly responseHead: string | null;
}

export interface DeliveryFilter {
  readonly state?: DeliveryState;
  readonly accountId?: string;
  readonly endpointId?: string;
  readonly paymentId?: string;
  readonly limit: number;
}

const ROW = `
  d.id::text as "deliveryId", d.event_id as "eventId", v.type, v.account_id as "accountId", v.payment_id as "paymentId", d.endpoint_id as "endpointId", e.url,
  d.state, d.round, d.attempts, case when d.state = 'pending' then d.due_at end as "dueAt", d.last_status as "lastStatus", d.last_error as "lastError",
  d.created_at as "createdAt", d.delivered_at as "deliveredAt", d.held_at as "heldAt"
  from webhook_delivery d join webhook_event v on v.id = d.event_id join webhook_endpoint e on e.id = d.endpoint_id`;

type Raw<T> = { readonly [K in keyof T]: T[K] extends string | null ? string | Date | null : T[K] };
const toRow = (raw: Raw<DeliveryRow>): DeliveryRow => ({ ...withTimes(raw), deliveryId: Number(raw.deliveryId) });
const withTimes = <T>(raw: object): T =>
  Object.fromEntries(Object.entries(raw).map(([name, value]: [string, unknown]) => [name, value instanceof Date ? value.toISOString() : value])) as T;

/** Deliveries that match the filter, newest first. */
export const listDeliveries = async (db: Queryable, { state, accountId, endpointId, paymentId, limit }: DeliveryFilter): Promise<DeliveryRow[]> => {
  const filter = [state ?? null, accountId ?? null, endpointId ?? null, paymentId ?? null, limit];
  const { rows } = await db.query<Raw<DeliveryRow>>(
    paymentId === undefined
      ? `select ${ROW} join (${NEWEST}) as newest on newest.id = d.id order by d.id desc`
      : `select ${ROW} where v.payment_id = $4 and ($1::text is null or d.state = $1) and ($2::uuid is null or v.account_id = $2)
           and ($3::uuid is null or d.endpoint_id = $3) order by d.id desc limit $5`,
    paymentId === undefined ? [...filter.slice(0, 3), DELIVERY_STATES, limit] : filter,
  );
  return rows.map(toRow);
};

/**
 * SQL for the ids of the newest deliveries of the state $1, the account $2 and the endpoint $3. Each of them may be null: all. $4: all states. $5: the
 * limit.
 */
const NEWEST = `
  select range.id from webhook_endpoint e
  cross join unnest(case when $1::text is null then $4::text[] else array[$1] end) as s (state)
  cross join lateral (select id from webhook_delivery where endpoint_id = e.id and state = s.state order by id desc limit $5) as range
  where ($2::uuid is null or e.account_id = $2) and ($3::uuid is null or e.id = $3)
  order by range.id desc limit $5`;

/** One delivery with all its attempts, oldest first. null: there is none. */
export const findDelivery = async (db: Queryable, deliveryId: string): Promise<(DeliveryRow & { readonly attemptLog: AttemptRow[] }) | null> => {
  const { rows } = await db.query<Raw<DeliveryRow>>(`select ${ROW} where d.id = $1`, [deliveryId]);
  if (!rows[0]) return null;
  const attempts = await db.query<Omit<Raw<AttemptRow>, 'responseHead'> & { responseHead: Buffer | null }>(
    `select round, attempt, started_at as "startedAt", duration_ms as "durationMs", outcome, status_code as "statusCode", error_code as "errorCode",
            host(remote_ip) as "remoteIp", secret_id as "secretId", response_head as "responseHead"
     from webhook_attempt where delivery_id = $1 order by round, attempt`,
    [deliveryId],
  );
  const attemptLog = attempts.rows.map(({ responseHead, ...row }) => ({
    ...withTimes<AttemptRow>(row),
    responseHead: responseHead === null ? null : printable(responseHead),
  }));
  return { ...toRow(rows[0]), attemptLog };
};

/** Makes a receiver's answer safe for a terminal. Printable ASCII stays, a backslash is doubled, and every other byte becomes `\xNN`. */
export const printable = (bytes: Uint8Array): string =>
  Array.from(bytes, (byte) =>
    byte === 0x5c ? '\\\\' : byte >= 0x20 && byte < 0x7f ? String.fromCharCode(byte) : `\\x${byte.toString(16).padStart(2, '0')}`,
  ).join('');

/** Maximum number of deliveries that `redeliverAllHeld` redelivers in one transaction. */
const REDELIVERY_BATCH = 500;

const reopenAll = async (deps: StaffDeps, ids: (rows: StaffRows) => Promise<string[]>, exactly: boolean): Promise<Redelivered[]> =>
  deps.tables.change(async (rows) => {
    const wanted = await ids(rows);
    if (wanted.length === 0) return [];
    const reopened = await rows.reopen(wanted);
    if (exactly && reopened.length < wanted.length) {
      const missing = wanted.filter((id) => !reopened.some(({ deliveryId }) => String(deliveryId) === id));
      throw await cannotRedeliver(rows, missing);
    }
    const done = reopened.sort((a, b) => a.deliveryId - b.deliveryId);
    if (done.length > 0) {
      await rows.announceDue();
      await recordStaffAction(deps, { type: 'WebhookRedeliveryRequested', data: { deliveries: done } });
    }
    return done;
  });

/**
 * Begins another round for held or delivered deliveries. A name is the number of a delivery, or an event id. An event id stands for all deliveries of
 * the event to endpoints that are not disabled. The receiver gets the same event id and body, with a new time and signature.
 *
 * Throws if one of the deliveries is pending, in flight, canceled, or of a disabled endpoint. Then nothing is redelivered. This refuses the second
 * click of a double click while the first round runs.
 */
export const redeliver = async (deps: StaffDeps, names: readonly string[]): Promise<Redelivered[]> => {
  const ids = async (rows: StaffRows) => {
    const wanted = new Set<string>();
    for (const name of names) {
      const found = await rows.findDeliveries(name);
      if (found.length === 0) throw noDelivery(name);
      for (const id of found) wanted.add(id);
    }
    return [...wanted];
  };
  return reopenAll(deps, ids, true);
};

/** Begins another round for all held deliveries, except those of disabled endpoints. */
export const redeliverAllHeld = async (deps: StaffDeps): Promise<Redelivered[]> => {
  const done: Redelivered[] = [];
  for (;;) {
    const batch = await reopenAll(deps, (rows) => rows.heldDeliveries(REDELIVERY_BATCH), false);
    if (batch.length === 0) return done;
    done.push(...batch);
  }
};

/** The error for a delivery that does not exist, or that was purged. */
export const noDelivery = (name: string): ServiceError =>
  new ServiceError(
    'VALIDATION_ERROR',
    `There is no delivery ${name}. A delivery is deleted WEBHOOK_KEEP_DAYS after it was delivered.`,
    {},
    { status: 404 },
  );

const cannotRedeliver = async (rows: StaffRows, ids: readonly string[]): Promise<ServiceError> => {
  const { id, state, status } = await rows.deliveryState(ids);
  const why = status === 'disabled' ? 'its endpoint is disabled' : `it is ${state.replace('_', ' ')}`;
  return new ServiceError('INVALID_STATE', `Delivery ${id} cannot be sent again: ${why}.`);
};

/** Makes every pending delivery due earlier by `ms`: its retry time follows the time of the sandbox. Returns the number of deliveries. */
export const bringForward = async (db: Queryable, ms: number): Promise<number> => {
  const { rowCount } = await db.query(`update webhook_delivery set due_at = due_at - $1::bigint * interval '1 millisecond' where state = 'pending'`, [
    ms,
  ]);
  await announceDue(db);
  return rowCount ?? 0;
};

/** Attempts are deleted after this time. */
const KEEP_ATTEMPTS_DAYS = 90;

export const purgeAttempts = (db: Queryable, stop?: AbortSignal): Promise<number> =>
  purge(async (limit) => {
    const { rowCount } = await db.query(
      `delete from webhook_attempt where ctid = any(array(
         select ctid from webhook_attempt where started_at < now() - $1::int * interval '1 day' order by started_at limit $2 for update skip locked))`,
      [KEEP_ATTEMPTS_DAYS, limit],
    );
    return rowCount ?? 0;
  }, stop);

/**
 * Deletes events that are more than `keepDays` old, with their deliveries. Each delivery of such an event must be canceled, or delivered more than
 * `keepDays` ago. Returns the number of deleted events.
 */
export const purgeDelivered = async (pool: Pool, keepDays: number, stop?: AbortSignal): Promise<number> => {
  let deleted = 0;
  for (let after: PurgeCursor | null = START; after !== null;) {
    const page: PurgedPage = await transaction(pool, (client) => purgePage(client, keepDays, after!));
    deleted += page.deleted;
    after = stop?.aborted ? null : page.next;
  }
  return deleted;
};

/** An event by its age. `createdAt`: as Postgres writes it, with microseconds. */
interface PurgeCursor {
  readonly createdAt: string;
  readonly id: string;
}
const START: PurgeCursor = { createdAt: '-infinity', id: '' };
interface PurgedPage {
  readonly deleted: number;
  /** null: no event is left to check. */
  readonly next: PurgeCursor | null;
}

/** Checks the next page of events that are older than `keepDays`. Each is checked once, so events that stay do not slow the later pages. */
const purgePage = async (client: Client, keepDays: number, after: PurgeCursor): Promise<PurgedPage> => {
  const { rows } = await client.query<PurgeCursor & { over: boolean }>(
    `select v.id, v.created_at::text as "createdAt", not exists (
         select from webhook_delivery d where d.event_id = v.id
           and not (d.state = 'canceled' or (d.state = 'delivered' and d.delivered_at < now() - $1::int * interval '1 day'))) as over
     from webhook_event v
     where v.created_at < now() - $1::int * interval '1 day' and v.created_at >= $2::timestamptz and (v.created_at, v.id) > ($2::timestamptz, $3)
     order by v.created_at, v.id limit $4`,
    [keepDays, after.createdAt, after.id, PURGE_BATCH],
  );
  const next = rows.length < PURGE_BATCH ? null : rows.at(-1)!;
  const ids = rows.flatMap(({ id, over }) => (over ? [id] : []));
  if (ids.length === 0) return { deleted: 0, next };
  await client.query(OUTBOX_NEVER_AGAIN, [WEBHOOK_OUTBOX]);
  // If an operator has redelivered a delivery since the select, it is pending. Keep that delivery and its event.
  await client.query(`delete from webhook_delivery where event_id = any($1::text[]) and state in ('delivered', 'canceled')`, [ids]);
  const { rowCount } = await client.query(
    `delete from webhook_event v where v.id = any($1::text[]) and not exists (select from webhook_delivery d where d.event_id = v.id)`,
    [ids],
  );
  return { deleted: rowCount ?? 0, next };
};

/**
 * For metrics: the number of open deliveries by state, and for how long the oldest one of an enabled endpoint has been due. There are too many
 * delivered ones to count them at each scrape.
 */
export const deliveryFigures = async (
  db: Queryable,
): Promise<{ readonly open: Readonly<Record<'pending' | 'in_flight' | 'held', number>>; readonly oldestDueSeconds: number }> => {
  const { rows } = await db.query<{ pending: string; in_flight: string; held: string; oldest: string | null }>(
    `select (select count(*) from webhook_delivery where state = 'pending') as pending,
            (select count(*) from webhook_delivery where state = 'in_flight') as in_flight,
            (select count(*) from webhook_delivery where state = 'held') as held,
            (select extract(epoch from now() - min(first.due_at)) from webhook_endpoint e
             cross join lateral (select due_at from webhook_delivery w where w.endpoint_id = e.id and w.state = 'pending' order by due_at limit 1) first
             where e.status = 'enabled' and first.due_at <= now()) as oldest`,
  );
  const { pending, in_flight, held, oldest } = rows[0]!;
  return { open: { pending: Number(pending), in_flight: Number(in_flight), held: Number(held) }, oldestDueSeconds: Number(oldest ?? 0) };
};
