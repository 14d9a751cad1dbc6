/**
 * The outbox makes deliveries from events of payments, exactly once. In the transaction that moves its checkpoint, it writes a row with the body of
 * the notification. It also writes a delivery for each endpoint of the account that was registered before the event.
 *
 * The outbox is a reactor: it is never rebuilt, since a sent webhook cannot be undone. A replay of the log adds no row. The id of a notification
 * depends only on its event, and events that may have been purged are skipped.
 */
import { paymentIdOf, type PaymentTerms } from '#payments';
import type { Migration, Queryable } from '#platform';
import type { EventStore, Projection, Recorded } from '#eventstore';
import { announceDue } from './due.js';
import { keysOfEvents, notifies, payloadOf, type PayloadPorts } from './payload.js';

export const webhookEventMigration: Migration = {
  name: '0081-webhook-event',
  sql: `
create table webhook_event (
  id         text collate "C" primary key,
  number     bigint generated always as identity unique,
  type       text not null,
  account_id uuid not null,
  payment_id uuid not null,
  payload    bytea not null,
  created_at timestamptz not null,
  stream     text collate "C" not null,
  revision   bigint not null,
  unique (stream, revision, type)
);
create index webhook_event_payment on webhook_event (payment_id);
create index webhook_event_account on webhook_event (account_id, number);
`,
};

export const webhookPurgeMigration: Migration = {
  name: '0083-webhook-purge',
  sql: `
-- Up to this position of the log, events may have been deleted after their delivery.
create table webhook_purged (
  one      bool primary key default true check (one),
  position text collate "C" not null
);
`,
};

export const webhookEventCreatedMigration: Migration = {
  name: '0084-webhook-event-created',
  run: 'concurrently',
  sql: 'create index concurrently if not exists webhook_event_created on webhook_event (created_at)',
};

/** SQL that stores the outbox's checkpoint: rows up to it may have been purged. A replay must not write these rows again. */
export const OUTBOX_NEVER_AGAIN = `
  insert into webhook_purged (position) select position from projection_checkpoint where name = $1
  on conflict (one) do update set position = greatest(webhook_purged.position, excluded.position)`;

/** Name of the outbox's checkpoint. */
export const WEBHOOK_OUTBOX = 'webhook-outbox';

/** A notification: one row of webhook_event. `payload`: its body; a box if it holds a reason (payload.ts). */
export interface OutboxEvent {
  readonly id: string;
  readonly type: string;
  readonly accountId: string;
  readonly paymentId: string;
  readonly payload: Buffer;
  /** RFC 3339. */
  readonly createdAt: string;
  readonly stream: string;
  readonly revision: bigint;
  readonly position: string;
}

/**
 * The rows of the outbox: a port with two implementations, Postgres and the simulation. One contract tests both
 * (test/support/webhook-rows.contract.ts).
 */
export interface OutboxRows {
  /**
   * Writes events in order. Each event gets a delivery for every endpoint of its account that was registered before the event's position and is not
   * disabled. Existing rows are not changed. An event that may have been purged is skipped.
   */
  write(events: readonly OutboxEvent[]): Promise<void>;
  /** Signals that deliveries may be due, when the transaction commits. */
  announceDue(): Promise<void>;
}

/** The outbox collects events for this long before it writes. Otherwise nearly every event would need its own transaction. */
const GATHER_MS = 50;

export const webhookOutbox = (store: EventStore, personal: PayloadPorts['personal']): Projection => ({
  name: WEBHOOK_OUTBOX,
  streamPrefixes: ['payment-'],
  gatherMs: GATHER_MS,
  apply: (client, events) => applyOutbox(postgresOutboxRows(client), { store, personal }, events),
});

export const applyOutbox = async (rows: OutboxRows, { store, personal }: PayloadPorts, events: readonly Recorded[]): Promise<void> => {
  const notifying = events.filter(notifies);
  const opened = await personal.open(keysOfEvents(notifying));
  const told: OutboxEvent[] = [];
  for (const recorded of notifying) {
    const notification = payloadOf(recorded, opened);
    if (!notification) continue;
    const { stream, revision, position, meta } = recorded;
    const accountId = await ownerOf(store, stream);
    told.push({ ...notification, accountId, paymentId: paymentIdOf(stream), createdAt: meta.recordedAt, stream, revision, position });
  }
  if (told.length === 0) return;
  await rows.write(told);
  await rows.announceDue();
};

/** The account of a payment, from its first event. */
const ownerOf = async (store: PayloadPorts['store'], stream: string): Promise<string> => {
  for await (const first of store.read(stream, 0n, 1)) {
    if (first.type === 'PaymentInitiated') return (first.data as unknown as PaymentTerms).accountId;
    break;
  }
  throw new Error(`${stream} does not begin with PaymentInitiated`);
};

export const postgresOutboxRows = (db: Queryable): OutboxRows => ({
  write: async (events) => {
    await db.query(
      `with told as (
       select * from unnest($1::text[], $2::text[], $3::uuid[], $4::uuid[], $5::bytea[], $6::timestamptz[], $7::text[], $8::bigint[], $9::text[])
         with ordinality as t (id, type, account_id, payment_id, payload, created_at, stream, revision, position, number)
       where not exists (select from webhook_purged p where p.position >= t.position)),
     event as (
       insert into webhook_event (id, type, account_id, payment_id, payload, created_at, stream, revision)
       select id, type, account_id, payment_id, payload, created_at, stream, revision from told order by number
       on conflict do nothing)
     insert into webhook_delivery (event_id, endpoint_id)
     select t.id, e.id from told t
     join webhook_endpoint e on e.account_id = t.account_id and e.status <> 'disabled' and e.registered_at_position < t.position collate "C"
     order by t.number
     on conflict (event_id, endpoint_id) do nothing`,
      [
        events.map(({ id }) => id),
        events.map(({ type }) => type),
        events.map(({ accountId }) => accountId),
        events.map(({ paymentId }) => paymentId),
        events.map(({ payload }) => payload),
        events.map(({ createdAt }) => createdAt),
        events.map(({ stream }) => stream),
        events.map(({ revision }) => String(revision)),
        events.map(({ position }) => position),
      ],
    );
  },
  announceDue: () => announceDue(db),
});
