/** If the database fails during a drift check, the caller gets one error. A second, unhandled rejection would end the worker. */
import { afterEach, beforeEach, expect, test } from '@jest/globals';
import {
  checkpointOf,
  type EventStore,
  memoryEventStore,
  openEventStore,
  prepareReadModels,
  readStreams,
  type Recorded,
  searchPathOf,
} from '#eventstore';
import type { Json } from '#kernel';
import { paymentListModel, type PaymentTerms } from '#payments';
import { createLogger, createPool, migrate, PAGE_ROWS, type Pool, type Queryable, systemIds, transaction } from '#platform';
import { paymentRegisterModel } from '#settlement';
import { MIGRATIONS, READ_MODELS } from '../../apps/services.js';
import { KurrentDbDouble } from '../../test/support/kurrentdb-double.js';
import { freshDatabase } from '../../test/support/postgres.js';
import { findAlerts } from './alerts.js';
import { beginPass, passChecks, type PassPorts } from './pass.js';
import { find, LOG_START } from './verify.js';
import { checkPayments, driftFigures, driftFound, findDrift, keepDifferences, MAX_DIFFERENCES, sweepDrift } from './drift.js';
import { journalModel } from '#ledger';

let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
beforeEach(async () => {
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'drift', max: 4, searchPath: searchPathOf(READ_MODELS) });
  await migrate(pool, MIGRATIONS);
  await prepareReadModels(pool, READ_MODELS, memoryEventStore());
});
afterEach(async () => {
  await pool.end();
  await database.drop();
});

test('of several reads at once that all fail, none is left unhandled', async () => {
  await pool.query('drop table payment_list, journal_payment, journal_entry, gateway_transaction cascade');
  const ids = ['01890000-0000-7000-8000-000000000000'];
  await expect(checkPayments({ store: memoryEventStore(), db: pool, now: () => Date.now() }, ids)).rejects.toThrow('does not exist');
  // Jest fails a test on an unhandled rejection. Wait until the other reads have failed too.
  for (let turn = 0; turn < 3; turn++) await pool.query('select pg_sleep(0.02)');
});

test.each(['drift-journal-text', 'drift-journal'])('a payment that the journal books while it is looked at (%s) is no difference', async (read) => {
  const store = memoryEventStore();
  const id = await charged(store);
  const events: Recorded[] = [];
  for await (const event of store.read(`payment-${id}`)) events.push(event);
  await transaction(pool, (client) => paymentListModel.apply(client, events));
  let booked = false;
  const db = {
    query: async (query: string | { name: string }, values?: unknown[]) => {
      const result = (await pool.query(query as string, values)) as unknown;
      // Book the payment between the read of its `journal_payment` row and the read of its entries.
      if (typeof query !== 'string' && query.name === read && !booked) {
        booked = true;
        await transaction(pool, (client) => journalModel.apply(client, events));
      }
      return result;
    },
  } as unknown as Queryable;
  const look = async () => (await checkPayments({ store, db, now: () => Date.now() }, [id])).differences;
  expect(await look()).toEqual([]);
  expect(booked).toBe(true);
  expect(await look()).toEqual([]);
  await pool.query(`delete from journal_entry where rule = 'R1'`);
  expect((await look()).map(({ message }) => message)).toContainEqual(expect.stringMatching(/\(R1\) is missing/));
});

test("balances: an agency's balance below 0 or above the principal is a difference; because of a dispute of an older release it is a warning", async () => {
  const store = memoryEventStore();
  const lost = {
    status: 'lost',
    stage: 's',
    reasonCode: '1',
    personal: null,
    disputedAmountCents: 1_030,
    openedOn: '2026-01-05',
    dueDate: '2026-01-25',
  };
  const take = (principalCents: number) => ({ taken: [{ leg: 'combined', principalCents, feeCents: 0 }] });
  const paidAnd = async (...disputes: readonly object[]) => {
    const id = await charged(store);
    const meta = { recordedAt: '2026-03-01T10:00:00.000Z', actor: { type: 'system', id: 'spec' }, correlationId: id } as const;
    const events = disputes.map((data, index) => ({ id: systemIds(() => Date.now()).uuid(), type: 'PaymentDisputed', v: 3, data: { ...lost, disputeId: `d${index}`, ...data }, meta })); // prettier-ignore
    if (events.length > 0) await store.append(`payment-${id}`, (await readStreams(store, [`payment-${id}`]))[0]!.at(-1)!.revision, events);
    return id;
  };
  const [twice, before, once] = [await paidAnd(take(1_000), take(1)), await paidAnd({}, {}), await paidAnd(take(1_000))];
  const found = await checkPayments({ store, db: pool, now: () => Date.now() }, [twice, before, once]);
  const balances = found.differences.filter(({ kind }) => kind.startsWith('balance'));
  expect(balances.map(({ paymentId, kind, message }) => [paymentId, kind, message])).toEqual([
    [twice, 'balances', "after R11, the agency's balance of it is -1 of 1000 cents"],
    [before, 'balance_before', "after R11, the agency's balance of it is -1000 of 1000 cents"],
  ]);
  // The warning is listed and is an alert of its own. It is no drift.
  await keepDifferences(pool, [before], { differences: [balances[1]!], readAt: found.readAt });
  expect((await driftFound(pool)).differences.map(({ kind }) => kind)).toEqual(['balance_before']);
  const alerts = await findAlerts({ store, db: pool, thresholds: {} as never, nowMs: Date.now() });
  const of = (name: string) => alerts.find((one) => one.name === name)!;
  expect(of('balances')).toMatchObject({ severity: 'ticket', count: 1, items: [{ kind: 'payment', id: before }] });
  expect(of('drift').count).toBe(0);
  expect((await driftFigures({ store, db: pool, now: () => Date.now() })).differences).toBe(0);
  const state = await beginPass({ store, db: pool, now: () => Date.now() } as unknown as PassPorts, null, LOG_START);
  const line = () => passChecks(state).find(({ name }) => name === 'balances')!;
  expect(line()).toMatchObject({ ok: true, detail: "no agency's balance of a payment is below 0 or above its principal" });
  find(state.found.before, 'payment 1');
  expect(line()).toMatchObject({ ok: true, detail: expect.stringMatching(/; warning, disputes from before the rule: payment 1$/) });
  find(state.found.balances, 'payment 2');
  expect(line()).toMatchObject({ ok: false, detail: 'payment 2' });
});

test('a payment with an event of another program in its stream is a difference; the others are compared', async () => {
  const double = await new KurrentDbDouble().start();
  const store = await openEventStore(double.url(), '', createLogger('silent', 'spec'));
  const [broken, sound] = [await charged(store), await charged(store)];
  const events = (await readStreams(store, [`payment-${broken}`, `payment-${sound}`])).flat();
  await transaction(pool, (client) => paymentListModel.apply(client, events));
  await transaction(pool, (client) => journalModel.apply(client, events));
  const look = async () => (await findDrift({ store, db: pool, now: () => Date.now() })).differences;
  expect(await look()).toEqual([]);
  double.write(`payment-${broken}`, [{ type: 'OrderPlaced', data: {}, meta: 'none' }]);
  const found = await look();
  expect(new Set(found.map(({ paymentId }) => paymentId))).toEqual(new Set([broken]));
  expect(found.map(({ kind }) => kind)).toEqual(expect.arrayContaining(['list', 'journal']));
  await store.close();
  double.kill();
});

test('a report lists the first differences, and counts the others', async () => {
  const more = 25;
  await pool.query(
    `insert into payment_list (payment_id, account_id, portal_id, created_at, status, revision, state)
     select gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), now(), 'failed', 0, '{}' from generate_series(1, $1)`,
    [MAX_DIFFERENCES + more],
  );
  const { differences } = await findDrift({ store: memoryEventStore(), db: pool, now: () => Date.now() });
  expect(differences.slice(0, MAX_DIFFERENCES).every(({ paymentId }) => paymentId !== null)).toBe(true);
  expect(differences.slice(MAX_DIFFERENCES)).toEqual([
    { kind: 'list', paymentId: null, position: null, message: `${more} more differences of this kind (list) are not listed` },
  ]);
});

test('all findings of the sweep are shown', async () => {
  await pool.query(
    `insert into drift_difference (payment_id, kind, message, found_at)
     select gen_random_uuid(), k, 'planted', '2026-03-01'::timestamptz + n / 7 * interval '1 microsecond'
     from generate_series(1, $1) n, unnest(array['list', 'journal']) k`,
    [PAGE_ROWS],
  );
  const { differences } = await driftFound(pool);
  expect([differences.length, new Set(differences.map(({ paymentId, kind }) => `${paymentId} ${kind}`)).size]).toEqual([
    2 * PAGE_ROWS,
    2 * PAGE_ROWS,
  ]);
});

test('what somebody read earlier neither deletes nor replaces a difference that another one found since', async () => {
  const id = systemIds(() => Date.now()).uuid();
  const [early, late, later] = ['2026-03-01 10:00:00.000001+00', '2026-03-01 10:00:00.000002+00', '2026-03-01 10:00:00.000003+00'] as const;
  const told = async () => (await pool.query<{ message: string }>('select message from drift_difference')).rows.map(({ message }) => message);
  const found = (message: string) => [{ kind: 'list', paymentId: id, position: null, message }] as const;
  await keepDifferences(pool, [id], { differences: found('of the sweep'), readAt: late });
  await keepDifferences(pool, [id], { differences: [], readAt: early });
  expect(await told()).toEqual(['of the sweep']);
  await keepDifferences(pool, [id], { differences: found('of a slow pass'), readAt: early });
  expect(await told()).toEqual(['of the sweep']);
  await keepDifferences(pool, [id], { differences: found('of the next look'), readAt: later });
  expect(await told()).toEqual(['of the next look']);
  await keepDifferences(pool, [id], { differences: [], readAt: '2026-03-01 10:00:00.000004+00' });
  expect(await told()).toEqual([]);
});

test('the time of a look is that before its reads', async () => {
  const { readAt } = await checkPayments({ store: memoryEventStore(), db: pool, now: () => Date.now() }, [systemIds(() => Date.now()).uuid()]);
  const { rows } = await pool.query<{ before: boolean }>('select $1::timestamptz < clock_timestamp() as before', [readAt]);
  expect(rows[0]!.before).toBe(true);
});

test('a payment that just settled without its line is compared again when the line should be there', async () => {
  const store = memoryEventStore();
  const [id, sound] = [await charged(store), await charged(store)];
  const settledAt = '2026-03-02T10:00:00.000Z';
  for (const paymentId of [id, sound])
    await store.append(`payment-${paymentId}`, 1n, [
      {
        id: systemIds(() => Date.now()).uuid(),
        type: 'PaymentSettled',
        v: 1,
        data: { leg: 'combined', batchId: 'bat_1', closedAt: settledAt, grossCents: 1_030, feeCents: 20 },
        meta: { recordedAt: settledAt, actor: { type: 'system', id: 'spec' }, correlationId: id },
      },
    ]);
  const line = `insert into gateway_transaction (amount_cents, payment_id, attempt_id, ref, gateway, merchant_account, leg, op, settled_batch_id)
                values (1030, $1::uuid, $1::uuid, 'c' || $1::uuid, 'simulator', 'mid', 'combined', 'charge', 'bat_1')`;
  await pool.query(line, [sound]);
  const events = (await readStreams(store, [`payment-${id}`, `payment-${sound}`])).flat();
  await transaction(pool, (client) => paymentListModel.apply(client, events));
  await transaction(pool, (client) => journalModel.apply(client, events));
  for (const model of [paymentListModel, journalModel, paymentRegisterModel])
    await pool.query('insert into projection_checkpoint (name, position, epoch) values ($1, $2, 0) on conflict (name) do update set position = $2', [
      checkpointOf(model),
      await store.head(),
    ]);
  await pool.query(`update drift_sweep set position = ''`);
  let now = Date.parse(settledAt) + 60_000;
  const sweep = async () => (await sweepDrift({ store, db: pool, now: () => now }))!.differences.map(({ paymentId, kind }) => [paymentId, kind]);
  const waiting = async () => (await pool.query<{ payment_id: string }>('select payment_id from drift_again')).rows.map((row) => row.payment_id);

  expect(await sweep()).toEqual([]);
  expect(await waiting()).toEqual([id]);
  now += 60 * 60_000;
  expect(await sweep()).toEqual([]);
  await pool.query(`update drift_again set due_at = now() - interval '1 second'`);
  expect(await sweep()).toEqual([[id, 'settlement']]);
  expect(await waiting()).toEqual([]);
  await pool.query(line, [id]);
  await pool.query(`update drift_difference set looked_at = now() - interval '1 hour'`);
  expect(await sweep()).toEqual([]);
  expect((await driftFound(pool)).differences).toEqual([]);
});

const charged = async (store: EventStore): Promise<string> => {
  const ids = systemIds(() => Date.now());
  const [paymentId, attemptId] = [ids.uuid(), ids.uuid()];
  const account = { gateway: 'simulator', merchantAccount: 'mid', credentialsRef: 'sandbox', environment: 'sandbox' as const };
  const terms: PaymentTerms = {
    accountId: ids.uuid(),
    portalId: ids.uuid(),
    referenceId: null,
    amountCents: 1_000,
    serviceFeeCents: 30,
    feeVersion: 1,
    chargeMode: 'combined',
    lineItems: [{ id: ids.uuid(), amountCents: 1_000, serviceFeeCents: 30, referenceId: 'r', coding: null }],
    personal: null,
    paymentMethod: { type: 'card', brand: 'visa', last4: '4242' },
    legs: [{ leg: 'combined', principalCents: 1_000, feeCents: 30, account, references: { charge: 'c', reversal: 'r' } }],
  };
  const meta = { recordedAt: '2026-03-01T10:00:00.000Z', actor: { type: 'partner' as const, id: 'spec' }, correlationId: ids.uuid() };
  const charge = { attemptId, confirmationNumber: 'X', legs: [{ leg: 'combined', transactionId: 't', authCode: '1', avs: null, cvv: null }] };
  await store.append(`payment-${paymentId}`, 'no_stream', [
    { id: ids.uuid(), type: 'PaymentInitiated', v: 1, data: { attemptId, ...terms } as unknown as Json, meta },
    { id: ids.uuid(), type: 'PaymentCreated', v: 1, data: charge, meta },
  ]);
  return paymentId;
};
