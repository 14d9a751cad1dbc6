/** Each event makes its deliveries exactly once (C56, C57). Tested with real payments and Postgres. */
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { resetCheckpoint } from '#eventstore';
import { transaction } from '#platform';
import { CARDS } from '../../test/support/payments.js';
import { openWebhookGround, openWebhookStage, type WebhookGround, type WebhookStage } from '../../test/support/webhooks.js';
import { STAFF_STREAM } from './endpoint.js';
import { WEBHOOK_OUTBOX } from './outbox.js';
import { bodyToSend } from './payload.js';

let ground: WebhookGround;
let stage: WebhookStage;
beforeAll(async () => {
  ground = await openWebhookGround();
});
afterAll(() => ground.close());
beforeEach(async () => {
  stage = await openWebhookStage(ground);
});
afterEach(async () => {
  await ground.ground.bank.clearFaults();
  await stage.close();
});

interface Told {
  readonly type: string;
  readonly data: Readonly<Record<string, unknown>>;
}
const told = async (): Promise<Told[]> => {
  await stage.tell();
  return (await bodies()).map((body) => JSON.parse(body) as Told);
};
/** The bodies that would be sent now. */
const bodies = async (): Promise<string[]> => {
  const rows = await stage.query<{ eventId: string; payload: Buffer; stream: string; revision: string }>(
    'select id as "eventId", payload, stream, revision::text from webhook_event order by number',
  );
  const ports = { store: stage.house.store, personal: stage.house.ports.personal };
  const sent = rows.map((row) => bodyToSend(ports, { ...row, revision: BigInt(row.revision) }));
  return (await Promise.all(sent)).map(String);
};
const deliveries = async () => (await stage.rows()).map(({ endpoint_id, state }) => [endpoint_id, state]);
const STAFF = { initiatedBy: 'staff', reason: 'duplicate' } as const;

describe('notified', () => {
  test('a refund by staff, with the bytes that will be sent and the time of the event', async () => {
    const id = await stage.refunded();
    const [event] = await told();
    expect(event).toEqual({
      id: expect.stringMatching(/^evt_[\w-]{27}$/),
      type: 'payment.refunded',
      createdAt: (await stage.house.events(id)).at(-1)!.meta.recordedAt,
      data: { id, reversalType: 'void', amountCents: 10_325, currency: 'USD', reason: 'duplicate', initiatedBy: 'staff' },
    });
  });
  test('with its reason in a box; after an erasure the same event is sent with an empty reason (C78)', async () => {
    const id = await stage.refunded();
    const [event] = await told();
    const [row] = await stage.query<{ payload: Buffer }>('select payload from webhook_event');
    expect(row!.payload.toString()).toMatch(/^box /);
    const { personal } = stage.house.ports;
    const keyId = ((await stage.house.events(id)).at(-1)!.data as unknown as { personal: { key: string } }).personal.key;
    await personal.forget([keyId], { erasureId: stage.house.ids.uuid(), at: '2026-05-01T00:00:00.000Z' });
    expect(await told()).toEqual([{ ...event, data: { ...event!.data, reason: '' } }]);
    // An outbox that writes after the erasure writes the same body, in clear.
    await stage.query('truncate webhook_event cascade');
    await transaction(stage.pool, (client) => resetCheckpoint(client, WEBHOOK_OUTBOX, null));
    expect(
      await stage
        .anotherOutbox()
        .runUntil((await stage.house.store.head())!, { timeoutMs: 10_000 })
        .then(bodies),
    ).toEqual([JSON.stringify({ ...event, data: { ...event!.data, reason: '' } })]);
  });
  test('without a reason in clear', async () => {
    const { id } = await stage.house.charge();
    await stage.house.refund(id, { initiatedBy: 'staff', reason: null, includeFee: true });
    expect(await told()).toMatchObject([{ data: { reason: '' } }]);
    const [row] = await stage.query<{ payload: Buffer }>('select payload from webhook_event');
    expect(row!.payload.toString()).toMatch(/^\{/);
  });
  test('a void by staff too', async () => {
    const { id } = await stage.house.charge();
    await stage.house.void(id, STAFF);
    expect(await told()).toMatchObject([{ type: 'payment.refunded', data: { id, reversalType: 'void', amountCents: 10_325 } }]);
  });
  test('after settlement it is a refund', async () => {
    const { id } = await stage.house.charge();
    await stage.house.settle(id);
    await stage.house.refund(id, { ...STAFF, amountCents: 4_000 });
    expect(await told()).toMatchObject([{ data: { reversalType: 'refund', amountCents: 4_000 } }]);
  });
  test('a partial one, and its completion: the amounts sum to the money returned', async () => {
    const { id } = await stage.house.charge({ card: CARDS.feeRefundFailsOnce });
    await expect(stage.house.refund(id, { ...STAFF, includeFee: true })).rejects.toMatchObject({ code: 'PARTIAL_REFUND_PENDING' });
    await stage.house.refund(id, { ...STAFF, includeFee: true });
    const events = await told();
    expect(events.map(({ data }) => data.amountCents)).toEqual([10_000, 325]);
    expect((await stage.house.view(id)).refundedAmountCents).toBe(10_325);
  });
  test('the initiator counts, not the recorder of the end: an attempt of staff that recovery ends is notified', async () => {
    const { id } = await stage.house.charge();
    await ground.ground.bank.arm({ match: { call: 'void' }, answer: 'cut' });
    await expect(stage.house.refund(id, { ...STAFF, amountCents: 4_000 })).rejects.toMatchObject({ code: 'PAYMENT_TIMEOUT' });
    expect(await told()).toEqual([]);
    stage.house.clock.advance(61_000);
    await stage.house.recovery.resolve(id);
    expect((await stage.house.events(id)).at(-1)).toMatchObject({ type: 'ReversalEnded', meta: { actor: { type: 'recovery' } } });
    expect(await told()).toMatchObject([{ data: { amountCents: 4_000, initiatedBy: 'staff' } }]);
  });
  test('a dispute: one for its opening, one per change of status or stage, one for a change of both, none for no change', async () => {
    const { id } = await stage.house.charge();
    await stage.dispute(id);
    await stage.dispute(id, { stage: 'representment' });
    await stage.dispute(id, { status: 'in_dispute' });
    await stage.dispute(id, { status: 'in_dispute' });
    await stage.dispute(id, { status: 'lost', stage: 'arbitration' });
    expect((await told()).map(({ type, data }) => [type, data.status, data.stage])).toEqual([
      ['payment.disputed', 'debited', 'chargeback'],
      ['payment.disputed', 'debited', 'representment'],
      ['payment.disputed', 'in_dispute', 'representment'],
      ['payment.disputed', 'lost', 'arbitration'],
    ]);
  });
});

describe('not notified', () => {
  test('charges, declines, and the partner’s own requests', async () => {
    await stage.register();
    const { id } = await stage.house.charge();
    await stage.house.refund(id, { amountCents: 1_000 });
    await stage.house.refund(id, { includeFee: true });
    const other = await stage.house.charge();
    await stage.house.void(other.id);
    await stage.house.charge({ card: CARDS.declined }).catch(() => undefined);
    expect(await told()).toEqual([]);
    expect(await deliveries()).toEqual([]);
  });
  test('a charge that times out and is undone', async () => {
    const id = stage.house.ids.uuid();
    await expect(stage.house.charge({ card: CARDS.unreadable }, id)).rejects.toMatchObject({ code: 'PAYMENT_TIMEOUT' });
    stage.house.clock.advance(61_000);
    await stage.house.recovery.resolve(id);
    expect((await stage.house.view(id)).status).toBe('voided');
    expect(await told()).toEqual([]);
  });
  test('an attempt of staff that moved nothing', async () => {
    const { id } = await stage.house.charge();
    await ground.ground.bank.arm({ match: { call: 'void' }, effect: false, answer: 'cut' });
    await expect(stage.house.refund(id, { ...STAFF, amountCents: 4_000 })).rejects.toMatchObject({ code: 'PAYMENT_TIMEOUT' });
    stage.house.clock.advance(61_000);
    await stage.house.recovery.resolve(id);
    expect((await stage.house.events(id)).at(-1)!.data).toMatchObject({ outcome: 'never_executed', initiatedBy: 'staff' });
    expect(await told()).toEqual([]);
  });
});

describe('receivers', () => {
  test('every endpoint of the account, and none of another', async () => {
    const [one, two] = [await stage.register(), await stage.register()];
    const other = await stage.house.administration.createAccount('Other');
    await stage.register({ accountId: other.state.accountId });
    await stage.refunded();
    await stage.tell();
    expect(await deliveries()).toEqual([
      [one.endpointId, 'pending'],
      [two.endpointId, 'pending'],
    ]);
  });
  test('a paused endpoint keeps its rows, a disabled one gets none', async () => {
    const [paused, disabled] = [await stage.register(), await stage.register()];
    await stage.endpoints.pause(paused.endpointId);
    await stage.endpoints.disable(disabled.endpointId);
    await stage.refunded();
    await stage.tell();
    expect(await deliveries()).toEqual([[paused.endpointId, 'pending']]);
  });
  test('an endpoint that is registered later gets no earlier event, even if the outbox lags behind', async () => {
    await stage.refunded();
    const late = await stage.register();
    await stage.tell();
    expect(await told()).toHaveLength(1);
    expect(await deliveries()).toEqual([]);
    await stage.refunded(500);
    await stage.tell();
    expect(await deliveries()).toEqual([[late.endpointId, 'pending']]);
  });
});

describe('exactly once', () => {
  test('a replay of the whole log adds nothing', async () => {
    await stage.register();
    await stage.refunded();
    await stage.refunded();
    await stage.tell();
    const before = [await stage.query('select * from webhook_event order by number'), await stage.rows()];
    await transaction(stage.pool, (client) => resetCheckpoint(client, WEBHOOK_OUTBOX, null));
    await stage.tell();
    expect([await stage.query('select * from webhook_event order by number'), await stage.rows()]).toEqual(before);
  });
  test('several writers, and one that loses its transaction: each event once, checkpoint and rows together', async () => {
    await stage.register();
    const writers = [stage.outbox, stage.anotherOutbox(), stage.anotherOutbox()];
    for (const writer of writers) writer.start();
    for (let number = 0; number < 8; number++) {
      await stage.refunded(100);
      // Cut the connections of outboxes that are writing.
      if (number % 3 === 2)
        await stage.query(
          `select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() and query like '%projection_checkpoint%'`,
        );
    }
    await stage.tell();
    expect(await told()).toHaveLength(8);
    const rows = await stage.rows();
    expect(rows).toHaveLength(8);
    expect(new Set(rows.map(({ event_id }) => event_id)).size).toBe(8);
  });
});

describe('changes by staff are recorded', () => {
  test('each action with its actor, in the stream of its own', async () => {
    const { endpointId, url } = await stage.register();
    await stage.endpoints.pause(endpointId);
    await stage.endpoints.pause(endpointId);
    await stage.endpoints.resume(endpointId);
    const { secretId } = await stage.endpoints.stageSecret(endpointId);
    await stage.endpoints.activateSecret(endpointId);
    await stage.endpoints.disable(endpointId);
    const events = [];
    for await (const page of stage.house.store.readAll(null, { streamPrefixes: [STAFF_STREAM] }))
      for (const { type, data, meta } of page) events.push([type, data, meta.actor.id]);
    const { accountId } = stage.house;
    expect(events).toEqual([
      ['WebhookEndpointAdded', { endpointId, accountId, url, secretId: expect.any(String) }, 'spec'],
      ['WebhookEndpointPaused', { endpointId }, 'spec'],
      ['WebhookEndpointResumed', { endpointId }, 'spec'],
      ['WebhookSecretStaged', { endpointId, secretId }, 'spec'],
      ['WebhookSecretActivated', { endpointId, secretId }, 'spec'],
      ['WebhookEndpointDisabled', { endpointId }, 'spec'],
    ]);
    expect(JSON.stringify(events)).not.toContain('whsec_');
  });
  test('a change that cannot be recorded is not made', async () => {
    const { endpointId } = await stage.register();
    const endpoints = stage.endpoints;
    stage.house.appends.failBefore('WebhookEndpointPaused', () => new Error('the store is away'));
    await expect(endpoints.pause(endpointId)).rejects.toBeDefined();
    stage.house.appends.clear();
    expect((await endpoints.find(endpointId)).status).toBe('enabled');
  });
  test('secrets at rest are sealed, and a retired one is forgotten', async () => {
    const { endpointId, secret } = await stage.register();
    await stage.endpoints.stageSecret(endpointId);
    const staged = await stage.endpoints.stageSecret(endpointId);
    await stage.endpoints.activateSecret(endpointId);
    const rows = await stage.query<{ state: string; ciphertext: string | null; hint: string }>(
      'select state, ciphertext, hint from webhook_endpoint_secret order by created_at, id',
    );
    expect(rows.map(({ state, ciphertext }) => [state, ciphertext === null])).toEqual([
      ['retired', true],
      ['retired', true],
      ['active', false],
    ]);
    expect(JSON.stringify(rows)).not.toContain(staged.secret);
    expect(JSON.stringify(rows)).not.toContain(secret);
    expect((await stage.endpoints.find(endpointId)).secretHint).toBe(staged.secret.slice(-4));
    await expect(stage.endpoints.activateSecret(endpointId)).rejects.toMatchObject({ code: 'INVALID_STATE' });
  });
  test('refused by the rules', async () => {
    const { endpointId, url } = await stage.register();
    const { accountId } = stage.house;
    await expect(stage.endpoints.add(accountId, 'http://hooks.example.com/')).rejects.toThrow('The URL must begin with https://.');
    await expect(stage.endpoints.add(accountId, 'https://nobody.receiver.test/')).rejects.toThrow('does not resolve');
    ground.names.answer('inside.receiver.test', ['10.0.0.1']);
    await expect(stage.endpoints.add(accountId, 'https://inside.receiver.test/')).rejects.toThrow('not public');
    await expect(stage.endpoints.add(accountId, url)).rejects.toThrow('has an endpoint with this URL');
    await expect(stage.endpoints.pause('0190c1f2-8f52-7b3e-9c61-2f0d8a6b7c11')).rejects.toMatchObject({ status: 404 });
    await stage.endpoints.disable(endpointId);
    await expect(stage.endpoints.resume(endpointId)).rejects.toMatchObject({ code: 'INVALID_STATE' });
    await expect(stage.endpoints.stageSecret(endpointId)).rejects.toMatchObject({ code: 'INVALID_STATE' });
  });
});
