/** The rows that operators change: endpoints, their secrets, and redelivered deliveries. */
import { type Client, type Pool, type Queryable, transaction } from '#platform';
import type { DeliveryState } from './deliveries.js';
import { announceDue } from './due.js';
import type { Endpoint, EndpointStatus, Redelivered } from './endpoint.js';

export interface EndpointRow {
  readonly endpointId: string;
  readonly accountId: string;
  readonly url: string;
  readonly description: string | null;
  readonly createdAt: string;
  /** The log's head at the registration. '' if the log was empty. The endpoint gets only later events. */
  readonly registeredAtPosition: string;
}

export interface SecretRow {
  readonly secretId: string;
  readonly endpointId: string;
  readonly kid: string;
  readonly ciphertext: string;
  readonly hint: string;
  readonly state: 'staged' | 'active';
  readonly at: string;
}

/**
 * {@link StaffTables} and {@link StaffRows} are ports with two implementations: Postgres and the simulation. One contract tests both
 * (test/support/webhook-rows.contract.ts).
 */
export interface StaffTables {
  /** Runs `work` in one transaction. Commits if `work` returns, and rolls back if it throws. */
  change<T>(work: (rows: StaffRows) => Promise<T>): Promise<T>;
  /** All endpoints, or those of an account, oldest first. */
  endpoints(accountId: string | null): Promise<Endpoint[]>;
}

/** Operations inside one transaction. Reads see all rows of earlier transactions. */
export interface StaffRows {
  /** Locks the account until the end of the transaction. */
  lockAccount(accountId: string): Promise<void>;
  /** True if the account has an endpoint with this URL that is not disabled. */
  hasEndpoint(accountId: string, url: string): Promise<boolean>;
  addEndpoint(endpoint: EndpointRow): Promise<void>;
  /** Locks the endpoint until the end of the transaction and returns its status. null: there is none. */
  lockEndpoint(endpointId: string): Promise<EndpointStatus | null>;
  /** Sets the status. Also sets the number of consecutive failures to 0. */
  setStatus(endpointId: string, status: EndpointStatus): Promise<void>;
  /** Cancels pending deliveries of disabled endpoints. */
  cancelForDisabled(): Promise<unknown>;
  addSecret(secret: SecretRow): Promise<void>;
  stagedSecret(endpointId: string): Promise<string | null>;
  /** Marks a secret as retired and deletes its ciphertext. */
  retireSecret(endpointId: string, state: 'staged' | 'active', at: string): Promise<void>;
  activateSecret(secretId: string, at: string): Promise<void>;
  /**
   * Ids of deliveries. `name`: the number of a delivery, or an event id. An event id stands for all deliveries of the event to endpoints that are not
   * disabled.
   */
  findDeliveries(name: string): Promise<string[]>;
  /** The oldest held deliveries of endpoints that are not disabled. Rows that another transaction has locked are skipped. */
  heldDeliveries(limit: number): Promise<string[]>;
  /** Begins another round for those deliveries that are held or delivered, and whose endpoint is not disabled. */
  reopen(deliveryIds: readonly string[]): Promise<Redelivered[]>;
  /** State of the delivery with the lowest number among these, and the status of its endpoint. */
  deliveryState(deliveryIds: readonly string[]): Promise<{ readonly id: string; readonly state: DeliveryState; readonly status: EndpointStatus }>;
  /** Signals that deliveries may be due, when the transaction commits. */
  announceDue(): Promise<void>;
}

export const postgresStaffTables = (pool: Pool): StaffTables => ({
  change: (work) => transaction(pool, (client) => work(postgresStaffRows(client))),

  endpoints: async (accountId) => {
    const { rows } = await pool.query<Omit<Endpoint, 'createdAt'> & { createdAt: Date }>(
      `select e.id as "endpointId", e.account_id as "accountId", e.url, e.description, e.status, e.consecutive_failures as "consecutiveFailures",
              e.created_at as "createdAt", a.hint as "secretHint", s.hint as "stagedSecretHint"
       from webhook_endpoint e
       join webhook_endpoint_secret a on a.endpoint_id = e.id and a.state = 'active'
       left join webhook_endpoint_secret s on s.endpoint_id = e.id and s.state = 'staged'
       where $1::uuid is null or e.account_id = $1
       order by e.created_at, e.id`,
      [accountId],
    );
    return rows.map((row) => ({ ...row, createdAt: row.createdAt.toISOString() }));
  },
});

const postgresStaffRows = (client: Client): StaffRows => ({
  lockAccount: async (accountId) => {
    await client.query('select pg_advisory_xact_lock(hashtextextended($1, 0))', [`webhook_endpoint ${accountId}`]);
  },

  hasEndpoint: async (accountId, url) => {
    const twin = await client.query(`select from webhook_endpoint where account_id = $1 and url = $2 and status <> 'disabled'`, [accountId, url]);
    return twin.rowCount !== 0;
  },

  addEndpoint: async ({ endpointId, accountId, url, description, createdAt, registeredAtPosition }) => {
    await client.query(
      `insert into webhook_endpoint (id, account_id, url, description, created_at, registered_at_position) values ($1, $2, $3, $4, $5, $6)`,
      [endpointId, accountId, url, description, createdAt, registeredAtPosition],
    );
  },

  lockEndpoint: async (endpointId) => {
    const { rows } = await client.query<{ status: EndpointStatus }>('select status from webhook_endpoint where id = $1 for update', [endpointId]);
    return rows[0]?.status ?? null;
  },

  setStatus: async (endpointId, status) => {
    await client.query(`update webhook_endpoint set status = $2, consecutive_failures = 0 where id = $1`, [endpointId, status]);
  },

  cancelForDisabled: () => cancelForDisabled(client),

  addSecret: async ({ secretId, endpointId, kid, ciphertext, hint, state, at }) => {
    await client.query(
      `insert into webhook_endpoint_secret (id, endpoint_id, kid, ciphertext, hint, state, created_at, activated_at)
       values ($1, $2, $3, $4, $5, $6, $7, case when $6 = 'active' then $7::timestamptz end)`,
      [secretId, endpointId, kid, ciphertext, hint, state, at],
    );
  },

  stagedSecret: async (endpointId) => {
    const { rows } = await client.query<{ id: string }>(`select id from webhook_endpoint_secret where endpoint_id = $1 and state = 'staged'`, [
      endpointId,
    ]);
    return rows[0]?.id ?? null;
  },

  retireSecret: async (endpointId, state, at) => {
    await client.query(
      `update webhook_endpoint_secret set state = 'retired', ciphertext = null, retired_at = $3 where endpoint_id = $1 and state = $2`,
      [endpointId, state, at],
    );
  },

  activateSecret: async (secretId, at) => {
    await client.query(`update webhook_endpoint_secret set state = 'active', activated_at = $2 where id = $1`, [secretId, at]);
  },

  findDeliveries: async (name) => {
    const { rows } = /^evt_/.test(name)
      ? await client.query<{ id: string }>(
          `select d.id::text as id from webhook_delivery d join webhook_endpoint e on e.id = d.endpoint_id where d.event_id = $1 and e.status <> 'disabled'`,
          [name],
        )
      : await client.query<{ id: string }>('select id::text as id from webhook_delivery where id = $1::bigint', [name]);
    return rows.map(({ id }) => id);
  },

  heldDeliveries: async (limit) => {
    const { rows } = await client.query<{ id: string }>(
      `select d.id::text as id from webhook_delivery d join webhook_endpoint e on e.id = d.endpoint_id
       where d.state = 'held' and e.status <> 'disabled' order by d.held_at, d.id limit $1 for update of d skip locked`,
      [limit],
    );
    return rows.map(({ id }) => id);
  },

  reopen: async (deliveryIds) => {
    const { rows } = await client.query<Omit<Redelivered, 'deliveryId'> & { deliveryId: string }>(
      `update webhook_delivery d set state = 'pending', round = d.round + 1, attempts = 0, lease_losses = 0, due_at = clock_timestamp(), held_at = null
       from webhook_endpoint e
       where e.id = d.endpoint_id and e.status <> 'disabled' and d.state in ('held', 'delivered') and d.id = any ($1::bigint[])
       returning d.id::text as "deliveryId", d.event_id as "eventId", d.endpoint_id as "endpointId", d.round`,
      [deliveryIds],
    );
    return rows.map((row) => ({ ...row, deliveryId: Number(row.deliveryId) }));
  },

  deliveryState: async (deliveryIds) => {
    const { rows } = await client.query<{ id: string; state: DeliveryState; status: EndpointStatus }>(
      `select d.id::text as id, d.state, e.status from webhook_delivery d join webhook_endpoint e on e.id = d.endpoint_id
       where d.id = any ($1::bigint[]) order by d.id limit 1`,
      [deliveryIds],
    );
    return rows[0]!;
  },

  announceDue: () => announceDue(client),
});

/** At most this many deliveries are canceled by one statement. */
export const CANCELED_AT_ONCE = 10_000;

/**
 * Cancels up to {@link CANCELED_AT_ONCE} pending deliveries of disabled endpoints, and returns how many. Dispatchers cancel the rest. They repeat this
 * call, since the outbox may add a delivery while its endpoint is being disabled.
 */
export const cancelForDisabled = async (db: Queryable): Promise<number> => {
  const { rowCount } = await db.query(
    `update webhook_delivery set state = 'canceled' where id in (
       select w.id from webhook_endpoint e
       cross join lateral (
         select id from webhook_delivery where endpoint_id = e.id and state = 'pending' limit $1 for update skip locked) w
       where e.status = 'disabled' limit $1)`,
    [CANCELED_AT_ONCE],
  );
  return rowCount ?? 0;
};
