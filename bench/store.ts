/**
 * Makes a large store from a small real history: the history is made over HTTP, its events are multiplied in an empty database, and our own code makes
 * everything else from the log: read models, seal, notifications. A step that was interrupted goes on where it stopped.
 */
import { existsSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { logSeal } from '#audit';
import {
  checkpointOf,
  createPostgresEventStore,
  createSubscriber,
  installationIn,
  postgresCheckpoint,
  prepareReadModels,
  rebuild,
  searchPathOf,
} from '#eventstore';
import { copyInto, createPool, migrate, newKeyRing, OpenedKeys, type Pool, type Queryable, transaction } from '#platform';
import { personalUseModel } from '#privacy';
import { webhookOutbox } from '#webhooks';
import { Partner } from '../apps/demo/partner.js';
import { type Plan, Random, requestFor } from '../apps/demo/city.js';
import { MIGRATIONS, READ_MODELS } from '../apps/services.js';
import { copiesOf, isCopied, keptIds, startOfDay, type StoredEvent } from './multiply.js';

// ------------------------------------------------------------------------------------------------------------------------------------
// The real history.

const PARALLEL = 16;
const PATIENCE_MS = 120_000;
const SEED = 19;
/** Each charge of this scenario is a batch of its own. With it, the store would have more batches than a real year. */
const OWN_BATCH = 'approved, settles at once';
const ENDED_POLL_MS = 500;

export interface HistoryPorts {
  /** Base URL of the API. */
  readonly url: string;
  readonly apiKey: string;
  /** The portals of the demo's three services. */
  readonly portals: readonly string[];
  readonly pool: Pool;
  /** Closes the open batches, and records them. */
  readonly settle: () => Promise<unknown>;
  /** Staff record a dispute of a payment. */
  readonly dispute: (paymentId: string) => Promise<unknown>;
  /** Staff refund a part of a payment. */
  readonly refund: (paymentId: string) => Promise<unknown>;
}

/**
 * Makes payments as the demo does: declined, refunded and voided ones too. Then settles them. Then staff record `byStaff` disputes and as many
 * refunds, of which partners are notified. Resolves when everything has ended.
 */
export const makeHistory = async (ports: HistoryPorts, payments: number, byStaff: number, seed = SEED): Promise<void> => {
  const { url, apiKey, portals, pool } = ports;
  const partner = new Partner(`${url}/api/partner/v1`, apiKey, PATIENCE_MS);
  const random = new Random(seed);
  const plans: Plan[] = [];
  for (let index = 0; plans.length < payments; index++) {
    const plan = requestFor(random, index, portals);
    if (plan.scenario !== OWN_BATCH) plans.push(plan);
  }
  const queue = plans.values();
  const pay = async () => {
    for (const { key, body, afterwards } of queue) {
      const answer = await partner.post('payments', body, key, ['IDEMPOTENCY_UNAVAILABLE']);
      if (answer.status === 200 && afterwards)
        await partner.post(`payments/${answer.data.id as string}/${afterwards.operation}`, afterwards.body, `${key}-${afterwards.operation}`);
    }
  };
  await Promise.all(Array.from({ length: PARALLEL }, pay));
  const until = async (sql: string) => {
    while ((await pool.query<{ done: boolean }>(sql)).rows[0]?.done !== true) await sleep(ENDED_POLL_MS);
  };
  // A charge without an outcome must be resolved before its batch closes.
  await until('select count(*) >= 1 as done from payment_list having bool_and(open_since is null)');
  await ports.settle();
  await until(
    `select not exists (select from gateway_transaction
       where settled_batch_id is null and not rejected and moved_at is not null and amount_cents > voided_cents) as done`,
  );
  const { rows } = await pool.query<{ id: string }>(`select payment_id as id from payment_list where status = 'succeeded' order by 1 limit $1`, [
    2 * byStaff,
  ]);
  for (const [index, { id }] of rows.entries()) await (index < byStaff ? ports.dispute(id) : ports.refund(id));
};

/** Events in the order of the log. `where`: SQL that limits them. */
export const eventsOf = async (pool: Queryable, where = ''): Promise<StoredEvent[]> => {
  const { rows } = await pool.query<StoredEvent>(
    `select stream_id as stream, revision, event_id as "eventId", type, data::text as data, meta::text as meta, meta->>'recordedAt' as "recordedAt"
     from es.events ${where} order by position`,
  );
  return rows;
};

// ------------------------------------------------------------------------------------------------------------------------------------
// The large store.

const DAY_MS = 86_400_000;
/** Events per transaction, at least. */
const CHUNK_EVENTS = 20_000;
const ENDPOINT_URL = 'https://receiver.example/hook';
const RUN_MS = 12 * 60 * 60_000;
const REBUILD_CONNECTIONS = 6;
const NO_ERASURE = '00000000-0000-7000-8000-000000000000';

export interface StoreSize {
  readonly payments: number;
  /** Payments of each UTC day. The last day ends at the last midnight before `now`. */
  readonly perDay: number;
  /** Milliseconds since 1970. */
  readonly now: number;
}

/** Progress of a step: `done` events of `total`. */
export type OnProgress = (step: string, done: number, total: number) => void;

/** The times of the copies: spread evenly over each day, so that a day has `perDay` payments. */
export const copyTimes = (base: readonly StoredEvent[], { payments, perDay, now }: StoreSize): readonly number[] => {
  const based = base.filter(({ type }) => type === 'PaymentInitiated').length;
  const copies = Math.ceil(payments / based);
  const ofDay = Math.max(1, Math.round(perDay / based));
  const everyMs = Math.floor(DAY_MS / ofDay);
  const [born, ended] = [base[0]!, base.at(-1)!].map(({ recordedAt }) => Date.parse(recordedAt)) as [number, number];
  if (ended - born >= everyMs) throw new Error(`the history lasts ${ended - born} ms, and copies follow each other every ${everyMs} ms`);
  const first = startOfDay(now) - Math.ceil(copies / ofDay) * DAY_MS;
  return Array.from({ length: copies }, (_, number) => first + Math.floor(number / ofDay) * DAY_MS + (number % ofDay) * everyMs);
};

/** Fills the database at `databaseUrl`. It must be empty, or partly filled by an earlier call with the same history and size. */
export const makeStore = async (databaseUrl: string, base: readonly StoredEvent[], size: StoreSize, onProgress: OnProgress): Promise<void> => {
  const pool = createPool(databaseUrl, { name: 'bench', max: REBUILD_CONNECTIONS, statementTimeoutMs: 0, searchPath: searchPathOf(READ_MODELS) });
  const store = createPostgresEventStore(databaseUrl);
  // The keys of the history that is copied are not here. So their data counts as erased.
  const personal = { open: async () => new OpenedKeys(new Map()) };
  const use = personalUseModel(newKeyRing());
  const models = READ_MODELS.map((model) => (model.name === use.name ? use : model));
  try {
    await migrate(pool, MIGRATIONS);
    await prepareReadModels(pool, models, store);
    await pool.query('create table if not exists bench_copy (one bool primary key default true, copies int not null)');
    await multiply(pool, base, copyTimes(base, size), onProgress);
    await pool.query('analyze es.events');
    await pool.query(`insert into installation (id, state) values ($1, 'confirmed') on conflict do nothing`, [await installationIn(store)]);
    const head = (await store.head())!;
    const total = Number(head);
    for (const model of models) {
      if ((await postgresCheckpoint(pool, checkpointOf(model)).position()) === head) continue;
      await rebuild(model, { store, pool, now: () => Date.now(), onProgress: ({ position }) => onProgress(model.name, Number(position), total) });
    }
    await pool.query(
      `insert into personal_erased (key_id, erasure_id, erased_at) select distinct on (key_id) key_id, $1::uuid, begun_at from personal_use on conflict do nothing`,
      [NO_ERASURE],
    );
    await pool.query('update read_model set built_at = clock_timestamp() where built_at is null');
    await addEndpoints(pool);
    // Keys of older days have expired. The service itself makes those of the last day from the log.
    await pool.query(
      `insert into projection_checkpoint (name, position, epoch)
       select 'keys', lpad(coalesce(max(position), 0)::text, 20, '0'), 0 from es.events where stored_at < $1::timestamptz having max(position) > 0 on conflict do nothing`,
      [new Date(size.now - DAY_MS).toISOString()],
    );
    for (const projection of [logSeal, webhookOutbox(store, personal)]) {
      const { name, apply } = projection;
      let done = 0;
      const shown = {
        ...projection,
        apply: async (...given: Parameters<typeof apply>) => {
          await apply(...given);
          onProgress(name, (done += given[1].length), total);
        },
      };
      await createSubscriber(shown, { store, checkpoint: postgresCheckpoint(pool, name) }).runUntil(head, { timeoutMs: RUN_MS });
    }
    await deliver(pool);
    await pool.query('vacuum analyze');
  } finally {
    await pool.end();
    await store.close();
  }
};

export const EVENT_COLUMNS = ['position', 'stream_id', 'revision', 'event_id', 'type', 'data', 'meta', 'stored_at'];

/** Writes all copies. Each transaction writes whole copies, moves the head, and records how many copies there are. */
const multiply = async (pool: Pool, base: readonly StoredEvent[], times: readonly number[], onProgress: OnProgress): Promise<void> => {
  const bornMs = Date.parse(base[0]!.recordedAt);
  const kept = keptIds(base);
  const first = base.map((event) => copiesOf(event, kept, bornMs));
  const later = first.filter((_, index) => isCopied(base[index]!));
  const total = first.length + (times.length - 1) * later.length;
  const { rows } = await pool.query<{ copies: number; position: string }>(
    'select coalesce((select copies from bench_copy), 0) as copies, position from es.head',
  );
  let { copies } = rows[0]!;
  let position = Number(rows[0]!.position);
  while (copies < times.length) {
    await transaction(pool, async (client) => {
      const copy = copyInto(client, 'es.events', EVENT_COLUMNS);
      const end = position + CHUNK_EVENTS;
      for (; copies < times.length && position < end; copies++) {
        const made = { number: copies, shiftMs: times[copies]! - bornMs };
        for (const copyOf of copies === 0 ? first : later) {
          const { stream, revision, eventId, type, data, meta, recordedAt } = copyOf(made);
          await copy.write([String(++position), stream, revision, eventId, type, data, meta, recordedAt]);
        }
      }
      await copy.end();
      await client.query('update es.head set position = $1', [position]);
      await client.query('insert into bench_copy (copies) values ($1) on conflict (one) do update set copies = excluded.copies', [copies]);
    });
    onProgress('events', position, total);
  }
};

/** An endpoint for each account, as if it had been registered before all events. */
const addEndpoints = async (pool: Pool): Promise<void> => {
  await pool.query(
    `insert into webhook_endpoint (id, account_id, url, created_at, registered_at_position)
     select gen_random_uuid(), a.account_id, $1, now(), '' from (select distinct account_id from payment_list) a
     where not exists (select from webhook_endpoint)`,
    [ENDPOINT_URL],
  );
};

/** The endpoints do not exist. So each delivery gets a delivery attempt that succeeded, and the endpoints are disabled. */
const deliver = async (pool: Pool): Promise<void> => {
  await transaction(pool, async (client) => {
    await client.query(
      `with delivered as (
         update webhook_delivery d set state = 'delivered', attempts = 1, last_status = 200, delivered_at = e.created_at, created_at = e.created_at
         from webhook_event e where e.id = d.event_id and d.state = 'pending' returning d.id, e.created_at)
       insert into webhook_attempt (delivery_id, round, attempt, started_at, duration_ms, outcome, status_code)
       select id, 1, 1, created_at, 20, 'ok', 200 from delivered`,
    );
    await client.query(`update webhook_endpoint set status = 'disabled' where url = $1`, [ENDPOINT_URL]);
  });
};

/** Removes the small history's database, seal and marks. Its keys and its processor then serve the large store. */
export const forgetDatabase = (dataDir: string): void => {
  for (const name of ['postgres', 'postgres.password', 'heads', 'marks']) rmSync(join(dataDir, name), { recursive: true, force: true });
};

/** The history in a file, one event a line. */
export const writeHistory = (file: string, events: readonly StoredEvent[]): void =>
  writeFileSync(file, events.map((event) => `${JSON.stringify(event)}\n`).join(''));
export const readHistory = (file: string): StoredEvent[] | null =>
  existsSync(file)
    ? readFileSync(file, 'utf8')
        .trimEnd()
        .split('\n')
        .map((line) => JSON.parse(line) as StoredEvent)
    : null;
