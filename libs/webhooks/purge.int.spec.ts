/** Tests the purge of webhooks on Postgres: many rows are deleted, some rows must stay, and a replay must not write purged rows again. */
import { afterAll, afterEach, beforeAll, beforeEach, expect, test } from '@jest/globals';
import { resetCheckpoint } from '#eventstore';
import { PURGE_BATCH, transaction } from '#platform';
import { eventually } from '../../test/support/eventually.js';
import { openWebhookGround, openWebhookStage, type WebhookGround, type WebhookStage } from '../../test/support/webhooks.js';
import { purgeAttempts, purgeDelivered, redeliver } from './deliveries.js';
import { WEBHOOK_OUTBOX } from './outbox.js';

const KEEP_DAYS = 400;
/** Two full batches and one row. */
const MANY = 2 * PURGE_BATCH + 1;

let ground: WebhookGround;
let stage: WebhookStage;
beforeAll(async () => {
  ground = await openWebhookGround();
});
afterAll(() => ground.close());
beforeEach(async () => {
  stage = await openWebhookStage(ground);
});
afterEach(() => stage.close());

interface Planted {
  readonly name: string;
  readonly ageDays: number;
  /** One delivery is inserted for each of these states. */
  readonly states: readonly string[];
  readonly deliveredDays?: number;
}
const plant = async (endpointIds: readonly string[], { name, ageDays, states, deliveredDays = ageDays }: Planted, count = 1) => {
  await stage.query(
    `insert into webhook_event (id, type, account_id, payment_id, payload, created_at, stream, revision)
     select $1 || n, 'payment.refunded', $2, gen_random_uuid(), '{}', now() - $3::int * interval '1 day', 'payment-' || $1 || n, 1 from generate_series(1, $4) n`,
    [name, stage.house.accountId, ageDays, count],
  );
  for (const [index, state] of states.entries())
    await stage.query(
      `with d as (
         insert into webhook_delivery (event_id, endpoint_id, state, attempts, delivered_at, held_at, lease_token, lease_until)
         select $1 || n, $2, $3, 1, case when $3 = 'delivered' then now() - $4::int * interval '1 day' end, case when $3 = 'held' then now() end,
           case when $3 = 'in_flight' then gen_random_uuid() end, case when $3 = 'in_flight' then now() end from generate_series(1, $5) n returning id)
       insert into webhook_attempt (delivery_id, round, attempt, started_at, duration_ms, outcome)
       select id, 1, 1, now() - $4::int * interval '1 day', 1, 'ok' from d`,
      [name, endpointIds[index], state, deliveredDays, count],
    );
};
const counts = async () => {
  const [row] = await stage.query<{ events: number; deliveries: number; attempts: number }>(
    `select (select count(*)::int from webhook_event) as events, (select count(*)::int from webhook_delivery) as deliveries,
       (select count(*)::int from webhook_attempt) as attempts`,
  );
  return [row!.events, row!.deliveries, row!.attempts];
};
const left = async () => (await stage.query<{ id: string }>('select id from webhook_event order by id')).map(({ id }) => id);
const twoEndpoints = async () => [(await stage.register()).endpointId, (await stage.register()).endpointId];

test('many delivered events go with their deliveries and attempts; a signal ends the purge after a batch', async () => {
  const endpoints = await twoEndpoints();
  await plant(endpoints, { name: 'old', ageDays: 401, states: ['delivered', 'delivered'] }, MANY);
  expect(await counts()).toEqual([MANY, 2 * MANY, 2 * MANY]);
  expect(await purgeDelivered(stage.pool, KEEP_DAYS, AbortSignal.abort())).toBe(PURGE_BATCH);
  expect(await counts()).toEqual([MANY - PURGE_BATCH, 2 * (MANY - PURGE_BATCH), 2 * (MANY - PURGE_BATCH)]);
  expect(await purgeDelivered(stage.pool, KEEP_DAYS)).toBe(MANY - PURGE_BATCH);
  expect(await counts()).toEqual([0, 0, 0]);
});

test('an event stays while one of its deliveries is open or young', async () => {
  const endpoints = await twoEndpoints();
  for (const open of ['pending', 'in_flight', 'held']) {
    await plant(endpoints, { name: `kept-${open}`, ageDays: 900, states: [open] });
    await plant(endpoints, { name: `kept-half-${open}`, ageDays: 900, states: ['delivered', open] });
  }
  await plant(endpoints, { name: 'kept-young', ageDays: 399, states: ['delivered'] });
  await plant(endpoints, { name: 'kept-late', ageDays: 900, states: ['delivered', 'delivered'], deliveredDays: 399 });
  await plant(endpoints, { name: 'gone', ageDays: 401, states: ['delivered', 'canceled'] });
  await plant(endpoints, { name: 'gone-canceled', ageDays: 401, states: ['canceled'] });
  await plant(endpoints, { name: 'gone-nobody', ageDays: 401, states: [] });
  const before = await left();
  expect(await purgeDelivered(stage.pool, KEEP_DAYS)).toBe(3);
  expect(await left()).toEqual(before.filter((id) => id.startsWith('kept-')));
  expect(await stage.query(`select from webhook_delivery d where not exists (select from webhook_event v where v.id = d.event_id)`)).toEqual([]);
});

test('events behind more than a page of events that stay are deleted, even if all have the same time', async () => {
  const [endpoint] = await twoEndpoints();
  await plant([endpoint!], { name: 'a-kept', ageDays: 900, states: ['held'] }, PURGE_BATCH + 1);
  await plant([endpoint!], { name: 'gone', ageDays: 900, states: ['delivered'] }, PURGE_BATCH + 1);
  await stage.query(`update webhook_event set created_at = now() - interval '900 days'`);
  expect(await purgeDelivered(stage.pool, KEEP_DAYS)).toBe(PURGE_BATCH + 1);
  expect(await counts()).toEqual([PURGE_BATCH + 1, PURGE_BATCH + 1, PURGE_BATCH + 1]);
});

test('a replay does not make a purged event again; later events are sent, and a purged one cannot be redelivered', async () => {
  await stage.register();
  await stage.refunded();
  await stage.tell();
  const [row] = await stage.rows();
  await stage.query(`update webhook_delivery set state = 'delivered', delivered_at = now() - interval '401 days'`);
  await stage.query(`update webhook_event set created_at = now() - interval '401 days'`);
  expect(await purgeDelivered(stage.pool, KEEP_DAYS)).toBeGreaterThan(0);
  expect(await counts()).toEqual([0, 0, 0]);
  const deleted = 'A delivery is deleted WEBHOOK_KEEP_DAYS after it was delivered.';
  for (const name of [row!.id, row!.event_id])
    await expect(redeliver(stage.staff, [name])).rejects.toMatchObject({ status: 404, message: `There is no delivery ${name}. ${deleted}` });

  await transaction(stage.pool, (client) => resetCheckpoint(client, WEBHOOK_OUTBOX, null));
  await stage.tell();
  expect(await counts()).toEqual([0, 0, 0]);
  await stage.refunded();
  await stage.tell();
  expect(await counts()).toEqual([1, 1, 0]);
});

test('a redelivery that begins at the same moment keeps its event', async () => {
  const [endpoint] = await twoEndpoints();
  await plant([endpoint!], { name: 'raced', ageDays: 401, states: ['delivered'] });
  const [row] = await stage.rows();
  let purged: Promise<number>;
  await transaction(stage.pool, async (client) => {
    await client.query(`update webhook_delivery set state = 'pending', round = 2 where id = $1`, [row!.id]);
    purged = purgeDelivered(stage.pool, KEEP_DAYS);
    await eventually(async () => {
      const waiting = await stage.query(`select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`);
      return waiting.length > 0;
    });
  });
  expect(await purged!).toBe(0);
  expect(await stage.rows()).toMatchObject([{ id: row!.id, state: 'pending', round: 2 }]);
  expect(await left()).toEqual(['raced1']);
});

test('many attempts go after 90 days, and their deliveries stay', async () => {
  const endpoints = await twoEndpoints();
  await plant(endpoints, { name: 'old', ageDays: 91, states: ['delivered'] }, MANY);
  await plant(endpoints, { name: 'young', ageDays: 89, states: ['delivered'] });
  expect(await purgeAttempts(stage.pool, AbortSignal.abort())).toBe(PURGE_BATCH);
  expect(await purgeAttempts(stage.pool)).toBe(MANY - PURGE_BATCH);
  expect(await counts()).toEqual([MANY + 1, MANY + 1, 1]);
});
