/** Tests the read model of staff's work: tasks that wait for a decision, and the actions of staff. */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { memoryEventStore, type NewEvent, type Origin, type Recorded } from '#eventstore';
import { type Json, systemClock } from '#kernel';
import { createLogger, createPool, migrate, type Pool, systemIds, transaction } from '#platform';
import { ATTEMPT, charged, chargeOf, declined, initiated, principalRefunded, separate, unknown } from '../../test/support/given.js';
import { freshDatabase, makeTables } from '../../test/support/postgres.js';
import { openAttempts, paymentListModel, waitingPayments } from './list.js';
import type { PaymentEvent } from './payment.js';
import { acknowledgeStaffTask, raiseStaffTask, staff, type StaffTaskReason } from './staff.js';
import { postgresRecoveryWork, recoveryMigration, recoveryWhyMigration, type RecoveryWork } from './recovery.js';
import { openStaffTasks, staffTasks, staffWorkModel } from './staff-work.js';
import { paymentStream } from './stream.js';

const ids = systemIds(() => systemClock.now());
const RECOVERY: Origin = { actor: { type: 'recovery', id: 'recovery' }, correlationId: 'spec' };
const store = memoryEventStore();
/** No two tasks are raised in the same millisecond, so their order is known. */
let now = systemClock.now();
const clock = { ...systemClock, now: () => (now += 1) };

let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
beforeAll(async () => {
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'spec', max: 2 });
  for (const model of [paymentListModel, staffWorkModel]) await makeTables(pool, model);
  await migrate(pool, [recoveryMigration, recoveryWhyMigration]);
});
afterAll(async () => {
  await pool.end();
  await database.drop();
});

const record = async (facts: readonly PaymentEvent[], origin: Origin = RECOVERY, id = ids.uuid()): Promise<string> => {
  const events = facts.map(({ type, at, data }): NewEvent => ({
    id: ids.uuid(),
    type,
    v: 1,
    data: data as unknown as Json,
    meta: { recordedAt: at, ...origin },
  }));
  await store.append(paymentStream(id), 'any', events);
  return id;
};
const raise = (paymentId: string, reason: StaffTaskReason, batchId = 'bat_1') =>
  raiseStaffTask({ clock, ids, log: createLogger('silent', 'spec') }, store, paymentId, reason, { batchId }, RECOVERY);
let applied = 0;
/** Applies the events that are new. */
const follow = async () => {
  const all: Recorded[] = [];
  for await (const events of store.readAll(null)) all.push(...events);
  const fresh = all.slice(applied);
  applied = all.length;
  await transaction(pool, async (client) => {
    await paymentListModel.apply(
      client,
      fresh.filter(({ stream }) => stream.startsWith('payment-')),
    );
    await staffWorkModel.apply(client, fresh);
  });
};
const shown = async (all = false) => (await staffTasks({ store, db: pool }, { all })).map(({ paymentId, reason }) => [paymentId, reason]);

test('payments that wait for staff are counted by their task, and not among the open attempts', async () => {
  await record([initiated(), unknown]);
  const stuck = await record([initiated(), unknown]);
  const other = await record([initiated(), unknown]);
  const refunding = await record([...charged(), principalRefunded(ids.uuid())[0]!]);
  const before = await record(charged());
  await raise(stuck, 'charge_cannot_be_undone');
  await raise(stuck, 'settled_while_unknown');
  await raise(other, 'charge_cannot_be_undone');
  await raise(refunding, 'settlement_rejected');
  await raise(before, 'settled_while_unknown');
  await follow();
  expect(await openStaffTasks(pool, Date.now())).toEqual([
    { task: 'charge_cannot_be_undone', count: 2, oldestSeconds: expect.any(Number) },
    { task: 'settled_while_unknown', count: 1, oldestSeconds: expect.any(Number) },
    { task: 'settlement_rejected', count: 1, oldestSeconds: expect.any(Number) },
  ]);
  expect((await openAttempts(pool, Date.now())).running.count).toBe(2);
  expect(await shown()).toEqual([
    [stuck, 'charge_cannot_be_undone'],
    [stuck, 'settled_while_unknown'],
    [other, 'charge_cannot_be_undone'],
    [refunding, 'settlement_rejected'],
  ]);
  expect(await shown(true)).toContainEqual([before, 'settled_while_unknown']);
  expect((await staffTasks({ store, db: pool }, { all: false }))[0]).toMatchObject({ status: 'unknown', open: true, evidence: { batchId: 'bat_1' } });

  await record([declined], RECOVERY, stuck);
  await follow();
  expect((await openStaffTasks(pool, Date.now())).map(({ task, count }) => [task, count])).toEqual([
    ['charge_cannot_be_undone', 1],
    ['settlement_rejected', 1],
  ]);
  expect((await openAttempts(pool, Date.now())).running.count).toBe(2);
  expect((await shown()).map(([paymentId]) => paymentId)).toEqual([other, refunding]);
});

test('a task about a rejected settlement ends when a person acknowledges it, and waits again if another batch rejects', async () => {
  const id = await record(charged());
  const ports = { clock, ids };
  const request = { paymentId: id, task: 'settlement_rejected', reason: 'the payer paid at the counter', by: ' Dana ' } as const;
  await expect(acknowledgeStaffTask(ports, store, request)).rejects.toThrow('The payment has no such task.');
  await raise(id, 'settlement_rejected');
  await follow();
  const open = async () => (await shown()).filter(([paymentId]) => paymentId === id).length;
  const counted = async () => (await openStaffTasks(pool, Date.now())).find(({ task }) => task === 'settlement_rejected')!.count;
  const before = await counted();
  expect(await open()).toBe(1);
  const done = { paymentId: id, task: 'settlement_rejected', reason: 'the payer paid at the counter', by: 'Dana' };
  expect(await acknowledgeStaffTask(ports, store, request)).toEqual(done);
  // A second person gets the first acknowledgement, and nothing is recorded.
  expect(await acknowledgeStaffTask(ports, store, { ...request, by: 'Robin' })).toEqual(done);
  await follow();
  expect([await open(), await counted()]).toEqual([0, before - 1]);
  const ended = (await staffTasks({ store, db: pool }, { all: true })).filter(({ paymentId }) => paymentId === id);
  expect(ended).toMatchObject([{ open: false, acknowledged: { reason: 'the payer paid at the counter', by: 'Dana' } }]);
  const { rows } = await pool.query('select actor, reason from staff_action where event = $1', ['StaffTaskAcknowledged']);
  expect(rows).toEqual([{ actor: 'Dana', reason: 'the payer paid at the counter' }]);
  await raise(id, 'settlement_rejected');
  await follow();
  expect(await open()).toBe(0);
  await raise(id, 'settlement_rejected', 'bat_2');
  await follow();
  expect([await open(), await counted()]).toEqual([1, before]);
  await acknowledgeStaffTask(ports, store, request);
  await follow();
});

describe('open attempts that recovery has tried', () => {
  const HOUR = 3_600_000;
  const at = (inMs: number) => new Date(now + inMs).toISOString();
  const note = (paymentId: string, tried: Partial<Parameters<RecoveryWork['record']>[0]>) =>
    postgresRecoveryWork(pool).record({
      paymentId,
      attemptId: ATTEMPT,
      tries: 1,
      nextTryAt: at(HOUR),
      outcome: 'open',
      why: null,
      until: null,
      ...tried,
    });
  /** The states of these payments, as `payments waiting` lists them. */
  const states = async (...paymentIds: string[]) => {
    const listed = await waitingPayments(pool, now);
    return paymentIds.map((id) => listed.find(({ paymentId }) => paymentId === id)?.state);
  };
  const counts = async () => {
    const { running, waiting, overdue, staff: forStaff } = await openAttempts(pool, now);
    return [running.count, waiting.count, overdue.count, forStaff.count];
  };

  test('are waiting until the gateway should be able to tell, then overdue; a scan that is under way changes nothing', async () => {
    const id = await record([initiated(), unknown]);
    await follow();
    const [running, waiting, overdue, forStaff] = (await counts()) as [number, number, number, number];
    expect(await states(id)).toEqual([undefined]);
    const shownAs = async (tried: Parameters<typeof note>[1]) => {
      await note(id, tried);
      const [state] = await states(id);
      const [r, w, o, s] = (await counts()) as [number, number, number, number];
      return [state, r - running + 1, w - waiting, o - overdue, s - forStaff];
    };
    expect(await shownAs({ why: 'unreachable' })).toEqual(['running', 1, 0, 0, 0]);
    expect(await shownAs({ why: 'in_flight' })).toEqual(['running', 1, 0, 0, 0]);
    for (const why of ['not_visible', 'in_flight'] as const) {
      expect(await shownAs({ why, until: at(HOUR) })).toEqual(['waiting', 0, 1, 0, 0]);
      expect(await shownAs({ why, until: at(-HOUR) })).toEqual(['overdue', 0, 0, 1, 0]);
    }
    // The alert about attempts that recovery cannot resolve counts those that are running.
    expect(await shownAs({ why: 'unreachable', until: at(-HOUR) })).toEqual(['running', 1, 0, 0, 0]);
    await raise(id, 'charge_cannot_be_undone');
    await follow();
    expect(await shownAs({ why: 'not_visible', until: at(HOUR) })).toEqual(['staff', 0, 0, 0, 1]);
    await record([declined], RECOVERY, id);
    await follow();
    expect([await states(id), await counts()]).toEqual([[undefined], [running - 1, waiting, overdue, forStaff]]);
  });

  test('are listed with portal, amount, operation, reason and time, oldest first', async () => {
    const refundId = ids.uuid();
    const [asked] = principalRefunded(refundId);
    const refunding = await record([...charged(), { ...asked, at: at(-HOUR) } as PaymentEvent]);
    const charging = await record([initiated(), unknown]);
    await follow();
    const until = at(5 * HOUR);
    await note(charging, { why: 'not_visible', until });
    await note(refunding, { attemptId: refundId, why: 'unreachable' });
    const listed = (await waitingPayments(pool, now)).filter(({ paymentId }) => paymentId === charging || paymentId === refunding);
    expect(listed).toEqual([
      {
        paymentId: charging,
        portalId: expect.stringMatching(/^[0-9a-f-]{36}$/),
        amountCents: 10_325,
        operation: 'charge',
        since: new Date(initiated().at).toISOString(),
        state: 'waiting',
        why: 'not_visible',
        decidedBy: until,
      },
      expect.objectContaining({ paymentId: refunding, operation: 'refund', since: at(-HOUR), state: 'running', why: 'unreachable', decidedBy: null }),
    ]);
  });

  test('the task about an overdue outcome ends with its attempt, and a later attempt of the payment does not show it', async () => {
    const id = await record([initiated(), unknown]);
    const overdue = (attemptId: string) =>
      raiseStaffTask({ clock, ids, log: createLogger('silent', 'spec') }, store, id, 'outcome_overdue', { attemptId }, RECOVERY);
    const open = async () => [
      (await shown()).filter(([paymentId]) => paymentId === id).length,
      (await openStaffTasks(pool, now)).find(({ task }) => task === 'outcome_overdue')?.count ?? 0,
    ];
    for (let round = 0; round < 3; round++) await overdue(ATTEMPT);
    await follow();
    expect(await open()).toEqual([1, 1]);
    expect((await staffTasks({ store, db: pool }, { all: true })).find(({ paymentId }) => paymentId === id)).toMatchObject({ open: true, evidence: { attemptId: ATTEMPT } }); // prettier-ignore
    const resolved = { as: 'succeeded', charge: chargeOf(separate), evidence: 'call with the bank', by: 'Dana', forced: true } as const;
    await record([{ type: 'PaymentResolved', at: at(0), data: resolved }], RECOVERY, id);
    await follow();
    expect(await open()).toEqual([0, 0]);
    const refundId = ids.uuid();
    await record([{ ...principalRefunded(refundId)[0]!, at: at(HOUR) }], RECOVERY, id);
    await follow();
    expect(await open()).toEqual([0, 0]);
    now += 2 * HOUR;
    await overdue(refundId);
    await follow();
    expect(await open()).toEqual([1, 1]);
  });
});

test('an acknowledgement in one batch with its task', async () => {
  const id = await record(charged());
  await raise(id, 'settled_after_rejection');
  await acknowledgeStaffTask({ clock, ids }, store, { paymentId: id, task: 'settled_after_rejection', reason: 'booked', by: 'Dana' });
  await follow();
  expect((await shown()).filter(([paymentId]) => paymentId === id)).toEqual([]);
});

test('events of staff and operators are kept with their words; others are not', async () => {
  const id = await record(charged());
  const [asked] = principalRefunded(ids.uuid());
  const refund = { ...asked, data: { ...asked!.data, reason: 'billed twice' } } as PaymentEvent;
  await record([refund], staff('Dana', 'spec'), id);
  await follow();
  const { rows } = await pool.query('select actor_type, actor, event, stream, reason, recorded_at from staff_action where stream = $1', [
    paymentStream(id),
  ]);
  expect(rows).toEqual([
    {
      actor_type: 'staff',
      actor: 'Dana',
      event: 'RefundRequested',
      stream: paymentStream(id),
      reason: 'billed twice',
      recorded_at: new Date(refund.at),
    },
  ]);
});
