/** Tests the dispatcher (C55) with real payments, outbox, Postgres and TLS. The receivers follow the specification. */
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { eventually } from '../../test/support/eventually.js';
import { status } from '../../test/support/receiver.js';
import { openWebhookGround, openWebhookStage, type Row, type WebhookGround, type WebhookStage, type Worker } from '../../test/support/webhooks.js';
import { findDelivery, listDeliveries, postgresDeliveries, redeliver, redeliverAllHeld } from './deliveries.js';
import { ATTEMPT_BUDGET_MS, FAILING_AFTER, LEASE_MS, MAX_LEASE_LOSSES } from './schedule.js';
import { signatureOf } from './signature.js';

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

const inState = async (state: string): Promise<Row[]> => (await stage.rows()).filter((row) => row.state === state);
const settled = (count: number, state = 'delivered') => eventually(async () => (await inState(state)).length === count);
const running = (options?: Parameters<WebhookStage['worker']>[0]): Worker => {
  const worker = stage.worker(options);
  worker.dispatcher.start();
  return worker;
};
/** Makes all pending deliveries due now, without waiting for the time between attempts. */
const wait = () => stage.query(`update webhook_delivery set due_at = now() where state = 'pending'`);
/** Makes pending deliveries due again and again, until there are at least `count` attempts. */
const attempts = (count: number) =>
  eventually(async () => {
    await wait();
    return (await stage.query('select from webhook_attempt')).length >= count;
  });

describe('delivering', () => {
  test('a refund by staff reaches a receiver that verifies signature, age and id', async () => {
    const { receiver, endpointId } = await stage.register();
    const { outcomes } = running();
    const paymentId = await stage.refunded();
    await stage.tell();
    await settled(1);
    expect(receiver.refusals).toEqual([]);
    expect(receiver.deliveries).toHaveLength(1);
    const [{ event, headers, path }] = receiver.deliveries as [(typeof receiver.deliveries)[number]];
    expect(event).toMatchObject({ type: 'payment.refunded', data: { id: paymentId, amountCents: 10_325, initiatedBy: 'staff' } });
    expect([path, headers['content-type'], headers['transfer-encoding']]).toEqual(['/hook', 'application/json', undefined]);
    expect(outcomes).toEqual(['ok']);
    const [row] = await listDeliveries(stage.pool, { paymentId, limit: 10 });
    expect(row).toMatchObject({
      eventId: event.id,
      endpointId,
      state: 'delivered',
      round: 1,
      attempts: 1,
      lastStatus: 200,
      lastError: null,
      dueAt: null,
    });
    const found = await findDelivery(stage.pool, String(row!.deliveryId));
    expect(found!.attemptLog).toMatchObject([
      { round: 1, attempt: 1, outcome: 'ok', statusCode: 200, errorCode: null, remoteIp: '127.0.0.1', responseHead: null },
    ]);
  });
  test('disputes: one event per change', async () => {
    const { receiver } = await stage.register();
    running();
    const { id } = await stage.house.charge();
    await stage.dispute(id);
    await stage.dispute(id, { status: 'lost', stage: 'arbitration' });
    await stage.tell();
    await settled(2);
    expect(receiver.deliveries.map(({ event }) => [event.type, event.data.status]).sort()).toEqual([
      ['payment.disputed', 'debited'],
      ['payment.disputed', 'lost'],
    ]);
    expect(receiver.refusals).toEqual([]);
  });
  test('the dispatcher wakes up when the outbox has written, without looking', async () => {
    const { receiver } = await stage.register();
    const { clock } = running();
    // The worker's clock does not advance. Only the notification can wake its loop.
    await eventually(
      async () => (await stage.query(`select from pg_stat_activity where query = 'listen webhook_due' and datname = current_database()`)).length > 0,
    );
    stage.outbox.start();
    const before = clock.now();
    await stage.refunded();
    await eventually(() => receiver.deliveries.length === 1);
    expect(clock.now() - before).toBeLessThan(30_000);
  });
  test('two workers at once: each delivery once', async () => {
    const { receiver } = await stage.register();
    const [one, two] = [running({ slots: 4 }), running({ slots: 4 })];
    const { id } = await stage.house.charge();
    for (let number = 0; number < 40; number++) await stage.dispute(id, { stage: `s${number}` });
    await stage.tell();
    await settled(40);
    expect([receiver.deliveries.length, receiver.ids.length, receiver.refusals.length]).toEqual([40, 40, 0]);
    expect(one.outcomes.length + two.outcomes.length).toBe(40);
    expect(Math.min(one.outcomes.length, two.outcomes.length)).toBeGreaterThan(0);
  });
});

describe('retries (C55)', () => {
  test('each attempt 108–132 s after the end of the one before, five in all, then held; every one with a time and signature of its own', async () => {
    const { receiver } = await stage.register({ behave: status(500) });
    running();
    await stage.refunded();
    await stage.tell();
    for (let number = 1; number <= 5; number++) {
      await eventually(async () => (await stage.query('select from webhook_attempt')).length === number);
      const [row] = await stage.query<{ state: string; wait: string; attempts: number }>(
        `select d.state, d.attempts, extract(epoch from d.due_at - (a.started_at + a.duration_ms * interval '1 ms')) as wait
         from webhook_delivery d join webhook_attempt a on a.delivery_id = d.id and a.attempt = d.attempts`,
      );
      expect([row!.state, row!.attempts]).toEqual([number === 5 ? 'held' : 'pending', number]);
      if (number === 5) break;
      // `due_at` counts from the statement that records the attempt, a moment after the attempt has ended.
      expect(Number(row!.wait)).toBeGreaterThanOrEqual(107.9);
      expect(Number(row!.wait)).toBeLessThanOrEqual(134);
      await wait();
    }
    expect(receiver.ids).toHaveLength(1);
    expect(receiver.deliveries).toHaveLength(5);
    expect(new Set(receiver.deliveries.map(({ body }) => body.toString())).size).toBe(1);
    expect(receiver.refusals).toEqual([]);
    expect(stage.logged.join('')).toContain('a webhook delivery is held after its last attempt');
    await wait();
    expect(receiver.deliveries).toHaveLength(5);
  });
  test('one that fails and then succeeds', async () => {
    const { receiver } = await stage.register({ behave: (_request, response, number) => void response.writeHead(number < 3 ? 503 : 204).end() });
    running();
    await stage.refunded();
    await stage.tell();
    await attempts(3);
    await settled(1);
    expect([receiver.deliveries.length, receiver.ids.length]).toEqual([3, 1]);
    const [row] = await stage.rows();
    expect((await findDelivery(stage.pool, row!.id))!.attemptLog.map(({ attempt, outcome, statusCode }) => [attempt, outcome, statusCode])).toEqual([
      [1, 'http_5xx', 503],
      [2, 'http_5xx', 503],
      [3, 'ok', 204],
    ]);
  });
  test('new events are attempted while an older one waits', async () => {
    const { receiver } = await stage.register({ behave: (_request, response, number) => void response.writeHead(number === 1 ? 500 : 200).end() });
    running();
    await stage.refunded(100);
    await stage.tell();
    await eventually(() => receiver.deliveries.length === 1);
    await stage.refunded(200);
    await stage.tell();
    await settled(1);
    expect((await inState('pending')).length).toBe(1);
  });
  test('WEBHOOK_RETRY_SECONDS shortens the wait', async () => {
    const { receiver } = await stage.register({ behave: status(500) });
    running({ retrySeconds: 0.05 });
    await stage.refunded();
    await stage.tell();
    await settled(1, 'held');
    expect(receiver.deliveries).toHaveLength(5);
  });
});

describe('redelivery', () => {
  const held = async () => {
    const registered = await stage.register({ behave: status(500) });
    running({ retrySeconds: 0.05 });
    await stage.refunded();
    await stage.tell();
    await settled(1, 'held');
    const [row] = await stage.rows();
    return { ...registered, row: row! };
  };
  test('brings a held event with the same id and bytes, a new time, and the present secret', async () => {
    const { receiver, row, endpointId } = await held();
    const staged = await stage.endpoints.stageSecret(endpointId);
    await stage.endpoints.activateSecret(endpointId);
    receiver.accept(staged.secret);
    receiver.behave(null);
    expect(await redeliver(stage.staff, [row.id])).toEqual([{ deliveryId: Number(row.id), eventId: row.event_id, endpointId, round: 2 }]);
    await settled(1);
    expect(receiver.deliveries).toHaveLength(6);
    expect(receiver.ids).toEqual([row.event_id]);
    const { body, signedAt, headers } = receiver.deliveries.at(-1)!;
    expect(body).toEqual(receiver.deliveries[0]!.body);
    expect(headers['service-signature']).toBe(`t=${signedAt},v1=${signatureOf(staged.secret, signedAt, body)}`);
    expect((await stage.rows())[0]).toMatchObject({ round: 2, attempts: 1, state: 'delivered' });
  });
  test('a round of redelivery has five attempts too', async () => {
    const { receiver, row } = await held();
    await redeliver(stage.staff, [row.event_id]);
    await eventually(() => receiver.deliveries.length === 10);
    await settled(1, 'held');
    expect((await findDelivery(stage.pool, row.id))!.attemptLog.map(({ round, attempt }) => `${round}.${attempt}`)).toEqual(
      ['1.1', '1.2', '1.3', '1.4', '1.5', '2.1', '2.2', '2.3', '2.4', '2.5'], // prettier-ignore
    );
  });
  test('a double click is one round', async () => {
    const { receiver, row } = await held();
    receiver.behave(null);
    const clicks = await Promise.allSettled([1, 2, 3].map(() => redeliver(stage.staff, [row.id])));
    await settled(1);
    const done = clicks.filter(({ status: how }) => how === 'fulfilled');
    // A click on a pending or in-flight delivery is refused. A click after the delivery succeeded begins another round.
    expect(done.length).toBe((await stage.rows())[0]!.round - 1);
    expect(done.length).toBeGreaterThan(0);
    expect(receiver.ids).toHaveLength(1);
  });
  test('a delivery on its way is refused, and one refusal refuses them all', async () => {
    const { row, endpointId } = await held();
    await stage.endpoints.pause(endpointId);
    await stage.refunded();
    await stage.tell();
    const waiting = (await stage.rows())[1]!;
    await expect(redeliver(stage.staff, [row.id, waiting.id])).rejects.toThrow(`Delivery ${waiting.id} cannot be sent again: it is pending.`);
    await expect(redeliver(stage.staff, ['999999999'])).rejects.toMatchObject({ status: 404 });
    expect((await stage.rows())[0]).toMatchObject({ state: 'held', round: 1 });
    await stage.endpoints.disable(endpointId);
    await expect(redeliver(stage.staff, [row.id])).rejects.toThrow('its endpoint is disabled');
    await expect(redeliver(stage.staff, [row.event_id])).rejects.toThrow(`There is no delivery ${row.event_id}.`);
  });
  test('all held ones, and delivered ones if they are named', async () => {
    const { receiver, row } = await held();
    await stage.refunded();
    await stage.tell();
    await settled(2, 'held');
    receiver.behave(null);
    expect((await redeliverAllHeld(stage.staff)).map(({ round }) => round)).toEqual([2, 2]);
    expect(await redeliverAllHeld(stage.staff)).toEqual([]);
    await settled(2);
    await redeliver(stage.staff, [row.id]);
    await eventually(async () => (await stage.rows())[0]!.round === 3 && (await inState('delivered')).length === 2);
    const recorded = [];
    for await (const page of stage.house.store.readAll(null, { streamPrefixes: ['staff-webhook-'] }))
      for (const { type, data } of page) if (type === 'WebhookRedeliveryRequested') recorded.push(data);
    expect(recorded).toMatchObject([{ deliveries: [{ round: 2 }, { round: 2 }] }, { deliveries: [{ deliveryId: Number(row.id), round: 3 }] }]);
  });
});

describe('pausing and disabling', () => {
  test('a paused endpoint gets nothing until it is resumed, and then everything', async () => {
    const { receiver, endpointId } = await stage.register();
    // Deliveries to another endpoint show that the dispatcher runs.
    const other = await stage.register();
    await stage.endpoints.pause(endpointId);
    const { outcomes } = running();
    await stage.refunded();
    await stage.refunded();
    await stage.tell();
    await eventually(() => other.receiver.deliveries.length === 2);
    await settled(2);
    expect([receiver.requests, outcomes.length]).toEqual([0, 2]);
    await stage.endpoints.resume(endpointId);
    await eventually(() => receiver.ids.length === 2);
  });
  test('disabling cancels waiting deliveries, also those that the outbox adds at that moment', async () => {
    const { receiver, endpointId } = await stage.register({ behave: status(500) });
    running();
    await stage.refunded();
    await stage.tell();
    await eventually(() => receiver.requests === 1);
    await settled(1, 'pending');
    await stage.endpoints.disable(endpointId);
    await settled(1, 'canceled');
    await stage.query(`update webhook_delivery set state = 'pending', due_at = now()`);
    await settled(1, 'canceled');
    expect(receiver.requests).toBe(1);
  });
});

describe('one endpoint does not hold another', () => {
  test('a hanging endpoint takes its own share only', async () => {
    const slow = await stage.register({ behave: () => undefined });
    const quick = await stage.register();
    const { clock, outcomes } = running({ slots: 32 });
    const { id } = await stage.house.charge();
    for (let number = 0; number < 30; number++) await stage.dispute(id, { stage: `s${number}` });
    await stage.tell();
    await eventually(() => quick.receiver.deliveries.length === 30);
    await eventually(() => slow.receiver.requests === 8);
    // A delivery to the quick endpoint stays in_flight for a moment after its receiver has got it.
    await eventually(async () => (await inState('in_flight')).length === 8);
    expect(slow.receiver.requests).toBe(8);
    clock.advance(ATTEMPT_BUDGET_MS + 1);
    await eventually(() => outcomes.filter((outcome) => outcome === 'timeout').length === 8);
    await slow.receiver.close();
  });
  test('an endpoint that keeps failing gets one attempt at a time, until one succeeds; its attempts stay five', async () => {
    const { receiver, endpointId } = await stage.register({ behave: status(500) });
    running();
    const { id } = await stage.house.charge();
    for (let number = 0; number < FAILING_AFTER; number++) await stage.dispute(id, { stage: `s${number}` });
    await stage.tell();
    await eventually(async () => (await stage.endpoints.find(endpointId)).consecutiveFailures >= FAILING_AFTER);
    expect(stage.logged.join('')).toContain('a webhook endpoint keeps failing');
    let open = 0;
    let most = 0;
    const waiting: (() => void)[] = [];
    receiver.behave((_request, response) => {
      most = Math.max(most, ++open);
      waiting.push(() => ((open -= 1), response.writeHead(500).end()));
    });
    await wait();
    for (let number = 0; number < 5; number++) await eventually(() => waiting.shift()).then((answer) => answer());
    expect(most).toBe(1);
    receiver.behave(null);
    for (const answer of waiting) answer();
    await eventually(async () => {
      await wait();
      return (await inState('delivered')).length === FAILING_AFTER;
    });
    await eventually(async () => (await stage.endpoints.find(endpointId)).consecutiveFailures === 0);
    expect(stage.logged.join('')).toContain('a webhook endpoint has recovered');
  });
  test('a redelivery that fails does not count against the endpoint', async () => {
    const { endpointId } = await stage.register({ behave: status(500) });
    running({ retrySeconds: 0.05 });
    await stage.refunded();
    await stage.tell();
    await settled(1, 'held');
    await eventually(async () => (await stage.endpoints.find(endpointId)).consecutiveFailures === 5);
    await redeliverAllHeld(stage.staff);
    await eventually(async () => (await stage.query('select from webhook_attempt')).length === 10);
    await settled(1, 'held');
    expect((await stage.endpoints.find(endpointId)).consecutiveFailures).toBe(5);
  });
});

describe('secrets', () => {
  test('staging changes nothing; activating signs the next attempt with the new one', async () => {
    const { receiver, secret, endpointId } = await stage.register();
    running();
    const staged = await stage.endpoints.stageSecret(endpointId);
    expect(staged.secret).toMatch(/^whsec_[0-9A-Za-z]{43}$/);
    await stage.refunded();
    await stage.tell();
    await settled(1);
    const signedWith = (index: number, key: string) => {
      const { body, signedAt, headers } = receiver.deliveries[index]!;
      return headers['service-signature'] === `t=${signedAt},v1=${signatureOf(key, signedAt, body)}`;
    };
    expect(signedWith(0, secret)).toBe(true);
    receiver.accept(staged.secret);
    await stage.endpoints.activateSecret(endpointId);
    await stage.refunded();
    await stage.tell();
    await settled(2);
    expect(signedWith(1, staged.secret)).toBe(true);
    expect(receiver.refusals).toEqual([]);
  });
});

describe('workers that die, and clocks that jump', () => {
  /** A worker that claims deliveries and then dies. */
  const vanish = () => postgresDeliveries(stage.pool, 'dead').claimDue(10);
  const leaseRunsOut = () => stage.query(`update webhook_delivery set lease_until = now() - interval '1 ms' where state = 'in_flight'`);

  test('a dead worker’s delivery goes to another, and uses up no attempt', async () => {
    const { receiver } = await stage.register();
    await stage.refunded();
    await stage.tell();
    expect(await vanish()).toHaveLength(1);
    const { lost } = running({ leaseGraceMs: 0 });
    await eventually(async () => (await inState('in_flight')).length === 1);
    expect(receiver.requests).toBe(0);
    await leaseRunsOut();
    await settled(1);
    expect((await stage.rows())[0]).toMatchObject({ attempts: 1, lease_losses: 1 });
    expect([receiver.deliveries.length, lost.count]).toEqual([1, 1]);
  });
  test('a worker that wakes up after its lease cannot say how the attempt ended', async () => {
    await stage.register();
    await stage.refunded();
    await stage.tell();
    const port = postgresDeliveries(stage.pool, 'late');
    const [late] = await port.claimDue(1);
    await leaseRunsOut();
    await port.reap(await port.expired());
    const [again] = await port.claimDue(1);
    const ended = (claimed: typeof late, state: 'delivered' | 'held') =>
      ({ deliveryId: claimed!.deliveryId, token: claimed!.token, fate: { state }, outcome: 'ok', statusCode: 200, errorCode: null, remoteIp: null, responseHead: null, secretId: claimed!.secretId, bodySha256: Buffer.alloc(32), startedAtMs: Date.now(), durationMs: 1 }) as const; // prettier-ignore
    expect(await port.complete([ended(late, 'held')])).toEqual([false]);
    expect((await inState('in_flight')).length).toBe(1);
    expect(await port.complete([ended(again, 'delivered')])).toEqual([true]);
    expect(await port.complete([ended(again, 'held')])).toEqual([false]);
    expect((await stage.rows())[0]).toMatchObject({ state: 'delivered', attempts: 1 });
  });
  test('a delivery that loses ten workers is held', async () => {
    await stage.register();
    await stage.refunded();
    await stage.tell();
    const port = postgresDeliveries(stage.pool, 'dead');
    for (let number = 1; number <= MAX_LEASE_LOSSES; number++) {
      expect(await port.claimDue(1)).toHaveLength(1);
      await leaseRunsOut();
      expect(await port.reap(await port.expired())).toMatchObject([{ held: number === MAX_LEASE_LOSSES }]);
    }
    expect((await stage.rows())[0]).toMatchObject({ state: 'held', attempts: 0, last_error: 'worker_lost' });
    expect(await redeliverAllHeld(stage.staff)).toHaveLength(1);
  });
  test('the database’s clock jumps ahead while attempts are in flight: nothing is sent twice', async () => {
    const { receiver } = await stage.register({ behave: () => undefined });
    const [holder, other] = [running(), running()];
    await stage.refunded();
    await stage.tell();
    await eventually(() => receiver.requests === 1);
    // Simulate that the database's clock jumps ahead by an hour: move all times in the rows an hour back. All leases have then expired.
    await stage.query(`update webhook_delivery set lease_until = lease_until - interval '1 hour', due_at = due_at - interval '1 hour'`);
    receiver.behave(null);
    // Both workers look for expired leases every second. 6 s is less than the grace of 12 s, so neither ends the lease.
    for (const { clock } of [holder, other]) for (let number = 0; number < 4; number++) clock.advance(1_500);
    await eventually(async () => (await inState('in_flight')).length === 1);
    expect(receiver.requests).toBe(1);
    // By the workers' own clocks, the 10 s of the attempt are over now. The grace of 12 s is not.
    for (const { clock } of [holder, other]) clock.advance(ATTEMPT_BUDGET_MS - 4 * 1_500 + 1);
    await eventually(async () => (await stage.query('select from webhook_attempt')).length === 1);
    expect((await stage.rows())[0]).toMatchObject({ attempts: 1, lease_losses: 0, last_error: 'answer' });
    expect(receiver.requests).toBe(1);
  });
  test('the database’s clock is set back: waiting deliveries, and those of a dead worker, come all the same', async () => {
    const { receiver } = await stage.register({ behave: status(500) });
    await stage.refunded();
    await stage.refunded();
    await stage.tell();
    await postgresDeliveries(stage.pool, 'dead').claimDue(1);
    // Simulate that the database's clock was set back by an hour: move all times in the rows an hour into the future.
    await stage.query(`update webhook_delivery set lease_until = lease_until + interval '1 hour', due_at = due_at + interval '1 hour'`);
    const port = postgresDeliveries(stage.pool, 'tidy');
    await port.tidy(120);
    const [row] = await stage.query<{ lease: string; due: string }>(
      `select max(extract(epoch from lease_until - now())) as lease, max(extract(epoch from due_at - now())) filter (where state = 'pending') as due from webhook_delivery`,
    );
    expect(Number(row!.lease)).toBeLessThanOrEqual(LEASE_MS / 1000);
    expect(Number(row!.due)).toBeLessThanOrEqual(132);
    // `tidy` does not change a wait of normal length.
    await stage.query(`update webhook_delivery set due_at = now() + interval '131 s' where state = 'pending'`);
    const before = await stage.rows();
    await port.tidy(120);
    expect(await stage.rows()).toEqual(before);
    expect(receiver.requests).toBe(0);
  });
  test('a worker’s own clock may be wrong by a year: signatures and waits are right', async () => {
    const { receiver } = await stage.register({ behave: (_request, response, number) => void response.writeHead(number === 1 ? 500 : 200).end() });
    const { clock, dispatcher } = stage.worker();
    clock.now = () => Date.now() - 365 * 86_400_000;
    dispatcher.start();
    await stage.refunded();
    await stage.tell();
    await eventually(async () => (await stage.query('select from webhook_attempt')).length === 1);
    const [row] = await stage.query<{ wait: string }>('select extract(epoch from due_at - now()) as wait from webhook_delivery');
    expect(Number(row!.wait)).toBeGreaterThan(90);
    expect(Number(row!.wait)).toBeLessThanOrEqual(132);
    await wait();
    await settled(1);
    // The receiver refuses a `t` that is off by more than 300 s.
    expect(receiver.refusals).toEqual([]);
    expect(receiver.deliveries).toHaveLength(2);
  });
  test('a worker that is stopped lets its attempts end, and claims no more', async () => {
    const { receiver } = await stage.register();
    let answer: (() => void) | undefined;
    receiver.behave((_request, response) => (answer = () => response.writeHead(200).end()));
    const worker = running();
    await stage.refunded();
    await stage.tell();
    await eventually(() => answer !== undefined);
    const stopping = worker.dispatcher.stop();
    await stage.refunded();
    await stage.tell();
    answer!();
    await stopping;
    expect((await stage.rows()).map(({ state }) => state)).toEqual(['delivered', 'pending']);
    expect(receiver.requests).toBe(1);
  });
  test('the database goes away while an answer is on its way: the attempt is written down when it is back', async () => {
    const { receiver } = await stage.register();
    let answer: (() => void) | undefined;
    receiver.behave((_request, response) => (answer = () => response.writeHead(200).end()));
    running();
    await stage.refunded();
    await stage.tell();
    await eventually(() => answer !== undefined);
    await stage.query(`select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()`);
    answer!();
    await settled(1);
    expect(receiver.requests).toBe(1);
  });
});

test('no log line holds a secret, a body or an answer', async () => {
  const { secret } = await stage.register({ behave: (_request, response) => void response.writeHead(500).end('internal: root password') });
  running({ retrySeconds: 0.05 });
  await stage.refunded();
  await stage.tell();
  await settled(1, 'held');
  const text = stage.logged.join('');
  for (const no of [secret, 'root password', 'amountCents', 'duplicate']) expect(text).not.toContain(no);
  const line = JSON.parse(stage.logged.find((one) => one.includes('is held'))!) as Record<string, unknown>;
  expect(line).toMatchObject({
    eventId: expect.stringMatching(/^evt_/),
    deliveryId: expect.any(String),
    round: 1,
    attempt: 5,
    outcome: 'http_5xx',
    ms: expect.any(Number),
  });
  const [row] = await stage.rows();
  expect((await findDelivery(stage.pool, row!.id))!.attemptLog[0]!.responseHead).toBe('internal: root password');
});
