/**
 * A refund that Stripe accepted and that fails later (`REFUND_FAILED`): its money is sent again exactly once, under a new reference, also in races and
 * after crashes. Also a charge that was undone by a refund: both settle, and the books end at 0.
 */
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { EVERYTHING, NO_FEE } from '#accounts';
import { askVendor, readCredentials } from '#gateways';
import { findAlerts, paymentAsOf } from '#audit';
import type { ServiceError } from '#kernel';
import { systemClock } from '#kernel';
import { lineRegisterModel } from '#ledger';
import { createRecovery, paymentEvents, type PaymentGateway, PaymentStreams, postgresRecoveryWork, staff } from '#payments';
import { collect } from '#platform';
import { changeException, createRefundRecovery, type ExceptionRow, exceptionModel, exceptionRows, findReturns, sendRefund, type SettlementPorts } from '#settlement'; // prettier-ignore
import { notificationOf } from '#webhooks';
import { controlOf, type StripeControl } from '../doubles/stripe/control.js';
import { startStripeDouble, type StripeDouble } from '../doubles/stripe/server.js';
import type { Thing } from '../doubles/stripe/vendor.js';
import { booksOf } from '../support/books.js';
import { eventually } from '../support/eventually.js';
import { payfoldOn, recordBatch, type Running, startIn } from '../support/merchants.js';
import { paymentOf } from '../support/service.js';

const SECRET = 'sk_test_double_one_0001';
const MINUTE_MS = 60_000;
const stops: (() => unknown)[] = [];
let folder: string;
let double: StripeDouble;
let stripe: StripeControl;
let running: Running;
let portalId: string;

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'payfold-failed-refund-'));
  double = await startStripeDouble({ file: join(folder, 'stripe.jsonl') });
  stops.push(() => double.close());
  stripe = controlOf(double.url);
  running = await startIn({ folder, stops }, 'sandbox', { stripe: double.url });
  const { admin, inForce, accountId, services } = running;
  const account = { merchantAccount: 'cards', gateway: 'stripe', environment: 'sandbox', settings: { cutOff: null, endpoint: double.url } } as const;
  const credentials = readCredentials('stripe', 'sandbox', JSON.stringify({ secretKey: SECRET }));
  const asked = { clock: systemClock, endpoints: { stripe: double.url } };
  const { externalId, name } = await askVendor({ ...account, repeats: null }, credentials, asked);
  await admin.addMerchantAccount({ ...account, name }, externalId, credentials, await services.directory.merchantAccounts());
  const fee = { ...NO_FEE, flatCents: 50, chargeMode: 'combined' } as const;
  ({ portalId } = (await inForce(admin.createPortal({ accountIds: [accountId], name: 'Cards', gateway: 'none', fee }))).state);
  await inForce(admin.setGateway(portalId, { gateway: 'stripe', principal: 'cards', fee: 'cards' }));
});
afterAll(async () => {
  for (const stop of stops.reverse()) await stop();
  await rm(folder, { recursive: true, force: true });
});

const ports = () => running.services.settlement;
const create = (token = 'pm_card_visa') => running.client.create(paymentOf(portalId, { paymentMethod: { type: 'card_token', token } }));
const status = async (paymentId: string) => {
  const { data } = await running.client.find(paymentId);
  return [data.status, data.refundedAmountCents] as const;
};
const history = async (stream: string) => {
  const types: string[] = [];
  for await (const { type } of running.services.store.read(stream)) types.push(type);
  return types;
};
const paymentIn = async (paymentId: string) => (await running.services.payments.ports.streams.load(paymentId)).payment;
const intentOf = async (paymentId: string): Promise<string> => {
  const payment = await paymentIn(paymentId);
  if (payment.phase === 'charged') return payment.legs[0]!.transactionId;
  if (payment.phase === 'voided') return payment.undone![0]!.chargeTransactionId;
  throw new Error(`the payment is ${payment.phase}`);
};
/** The refunds of a payment's charge at the processor, oldest first. */
const refundsOf = async (paymentId: string): Promise<Thing[]> => {
  const intent = await intentOf(paymentId);
  return (await stripe.refunds()).filter(({ payment_intent }) => payment_intent === intent);
};
/** Cents that went back to the payer. */
const paidBack = async (paymentId: string) =>
  (await refundsOf(paymentId)).filter((refund) => refund.status !== 'failed').reduce((sum, { amount }) => sum + Number(amount), 0);
/** Pays out what is open at the processor, and records it. */
const payOut = async (): Promise<string> => {
  const { id } = (await stripe.payOut())!;
  await recordBatch(running.services, id);
  await ports().register.caughtUp();
  return id;
};
const exceptions = async (paymentId: string, asked: string | null = null): Promise<ExceptionRow[]> => {
  await ports().register.caughtUp();
  while ((await running.services.openExceptions()) > 0);
  await running.services.readModels.of(exceptionModel).runUntil((await running.services.store.head())!, { timeoutMs: 20_000 });
  const rows = await collect(exceptionRows(running.services.pool, EVERYTHING, { status: asked, now: running.clock.now() }));
  return rows.filter((row) => row.paymentId === paymentId);
};
/** Cents in suspense before the test. Some tests leave a failed refund open. */
let suspenseBefore = 0;
beforeEach(async () => {
  suspenseBefore = (await booksOf(running.services))(/suspense/);
});
/** The test left nothing in suspense, unsettled is 0, and there is no drift, also not between the line-item register and the journal. */
const expectClean = async () => {
  const cents = await booksOf(running.services);
  expect([cents(/suspense/), cents(/:unsettled$/)]).toEqual([suspenseBefore, 0]);
  const drift = await payfold('audit', 'drift');
  expect([drift.code, JSON.parse(drift.stdout)]).toEqual([0, expect.objectContaining({ ok: true })]);
};
const payfold = (...args: string[]) => payfoldOn(running, [...args, '--yes']);
const refused = (work: Promise<unknown>) =>
  work.then(
    () => null,
    ({ code, message }: ServiceError) => ({ code, message }),
  );
const send = (exceptionId: string, through: SettlementPorts = ports(), by = 'Dana') =>
  sendRefund(through, { exceptionId, reason: 'the card was closed', by, last4: null }, staff(by, running.services.ids.uuid()));
/** Ports whose adapter differs in these calls. */
const instead = (calls: (real: PaymentGateway) => Partial<PaymentGateway>): SettlementPorts => {
  const settlement = ports();
  const find: SettlementPorts['payments']['gateways']['find'] = (account) => {
    const real = settlement.payments.gateways.find(account);
    return real && { ...real, ...calls(real) };
  };
  return { ...settlement, payments: { ...settlement.payments, gateways: { find } } };
};
/** A settled payment of 100.50 whose settled refund of 40.00 has failed, with the exception of the failure. */
const failed = async (): Promise<{ id: string; exceptionId: string; refund: string }> => {
  const { id } = (await create()).data;
  await payOut();
  expect((await running.client.refund(id, { amountCents: 4_000 })).status).toBe(200);
  const [refund] = await refundsOf(id);
  await payOut();
  await stripe.failRefund(refund!.id);
  await payOut();
  const found = await exceptions(id);
  expect(found).toMatchObject([{ kind: 'REFUND_FAILED', transactionId: refund!.id, suspenseCents: 4_000 }]);
  return { id, exceptionId: found[0]!.exceptionId, refund: refund!.id };
};

describe('the whole way, by the command line', () => {
  test('accepted, failed, listed, sent again under a new reference, listed; the new one fails too, and is sent again', async () => {
    const { id, exceptionId, refund } = await failed();
    expect((await booksOf(running.services))(/suspense/)).toBe(-4_000);
    const tasks = async () => (JSON.parse((await payfold('payments', 'tasks')).stdout) as { paymentId: string; reason: string; evidence: object }[]).filter(({ paymentId }) => paymentId === id); // prettier-ignore
    expect(await tasks()).toMatchObject([{ reason: 'refund_failed', evidence: { transactionId: refund, cents: 4_000, wasVoided: false } }]);
    const again = ['settlement', 'exceptions', 'resolve', exceptionId, '--as', 'refund', '--send', '--reason', 'card closed', '--by', 'Dana'];
    const sent = await payfold(...again);
    expect([sent.code, sent.stderr]).toEqual([0, '']);
    const done = JSON.parse(sent.stdout) as { transactionId: string };
    expect(done).toEqual({ exceptionId, status: 'resolved', transactionId: expect.stringMatching(/^re_/), amountCents: 4_000, paymentId: id });
    const [first, second, ...more] = await refundsOf(id);
    expect([first!.status, second!.id, second!.amount, more]).toEqual(['failed', done.transactionId, 4_000, []]);
    expect((first!.metadata as { payfold_ref: string }).payfold_ref).not.toBe((second!.metadata as { payfold_ref: string }).payfold_ref);
    const sentOnce = ['ExceptionOpened', 'ExceptionRefundRequested', 'ExceptionRefundEnded', 'ExceptionResolved'];
    expect(await history(`exception-${exceptionId}`)).toEqual(sentOnce);
    expect(await status(id)).toEqual(['partially_refunded', 4_000]);

    const repeated = await payfold(...again);
    expect([repeated.code, repeated.stdout]).toEqual([1, expect.stringContaining('The exception is resolved')]);
    expect(await paidBack(id)).toBe(4_000);

    await payOut();
    expect(await exceptions(id)).toEqual([]);
    await expectClean();
    const ended = await payfold('payments', 'acknowledge', id, '--task', 'refund_failed', '--reason', 'sent again', '--by', 'Dana');
    expect([ended.code, await tasks()]).toEqual([0, []]);

    // The new refund fails, too: a new exception, and the task again.
    await stripe.failRefund(done.transactionId);
    await payOut();
    const [next, ...others] = await exceptions(id);
    expect([next, others]).toMatchObject([{ kind: 'REFUND_FAILED', transactionId: done.transactionId, suspenseCents: 4_000 }, []]);
    expect(await tasks()).toMatchObject([{ reason: 'refund_failed', evidence: { transactionId: done.transactionId } }]);
    await send(next!.exceptionId);
    expect([await paidBack(id), (await refundsOf(id)).length]).toEqual([4_000, 3]);
    await payOut();
    expect(await exceptions(id)).toEqual([]);
    expect(await status(id)).toEqual(['partially_refunded', 4_000]);
    await expectClean();
  }, 180_000);

  test.each(['pending', 'requires_action'])(
    'a refund that is %s says so, also in a replay; when it fails, cents and status stay',
    async (word) => {
      const { id } = (await create(await stripe.method({ refunds: word }))).data;
      await payOut();
      const key = { key: `pending-${word}` };
      const asked = { amountCents: 4_000, reason: 'billed twice' };
      const first = await running.client.refund(id, asked, key);
      expect([first.status, first.data.status, first.data.amountCents]).toEqual([200, 'pending', 4_000]);
      const [refund] = await refundsOf(id);
      const shown = async () => JSON.parse((await payfold('payments', 'show', id)).stdout) as { returns: object[] };
      const found = { leg: 'combined', means: 'refund', amountCents: 4_000, transactionId: refund!.id };
      expect((await shown()).returns).toMatchObject([{ ...found, status: 'pending' }]);
      // Its answer is lost: the look-up tells the same.
      await stripe.fault('cut_after', { op: 'refund' });
      expect((await running.client.refund(id, { amountCents: 1_000 }, { key: `lost-${word}` })).status).toBe(504);
      const again = await running.client.refund(id, { amountCents: 1_000 }, { key: `lost-${word}` });
      expect([again.status, again.data.status]).toEqual([200, 'pending']);

      await stripe.failRefund(refund!.id);
      await payOut();
      expect(await exceptions(id)).toMatchObject([{ kind: 'REFUND_FAILED', transactionId: refund!.id, suspenseCents: 4_000 }]);
      expect(await history(`payment-${id}`)).toEqual(expect.arrayContaining(['RefundFailed']));
      // A corrected file, or a second line, says it once more.
      await stripe.transaction({ type: 'refund_failure', reporting_category: 'refund_failure', amount: 4_000, fee: 0, source: refund!.id });
      await payOut();
      expect((await history(`payment-${id}`)).filter((type) => type === 'RefundFailed')).toHaveLength(1);
      expect((await shown()).returns).toMatchObject([
        { ...found, status: 'failed' },
        { amountCents: 1_000, status: 'pending' },
      ]);
      expect(await status(id)).toEqual(['partially_refunded', 5_000]);
      const replay = await running.client.refund(id, asked, key);
      expect([replay.status, replay.text, replay.headers['idempotent-replayed']]).toEqual([200, first.text, 'true']);
      const { services } = running;
      const { payment } = await paymentAsOf(services.store, EVERYTHING, id, {});
      expect(payment.returns.map((one) => one.status)).toEqual(['failed', 'pending']);
      const rows = await payfold('audit', 'export', 'reversals', '--format', 'ndjson');
      const row = rows.stdout.split('\n').find((line) => line.includes(refund!.id));
      expect(row === undefined ? rows : JSON.parse(row)).toMatchObject({ statuses: 'failed' });
    },
    180_000,
  );

  test('a charge that was undone: sale and refund are matched (R21), the fee is booked; then its refund fails and is sent again', async () => {
    const feesBefore = (await booksOf(running.services))(/^expense:processing/);
    await stripe.fault('cut_after', { op: 'confirm' });
    const answer = await create();
    expect(answer.status).toBe(504);
    const id = answer.details!.id as string;
    const { payments, store, pool } = running.services;
    const recovery = createRecovery(payments.ports, store, postgresRecoveryWork(pool), { startsAfterMs: 0 });
    await eventually(async () => (await recovery.resolve(id)) === 'resolved');
    expect((await running.client.find(id)).data.status).toBe('voided');
    const intent = await intentOf(id);
    const batchId = await payOut();
    expect(await exceptions(id)).toEqual([]);
    const lines = await pool.query<{ op: string }>(
      `select op, transaction_id from gateway_transaction where payment_id = $1 and settled_batch_id = $2 order by op`,
      [id, batchId],
    );
    const [refund] = await refundsOf(id);
    expect(lines.rows).toEqual([
      { op: 'charge', transaction_id: intent },
      { op: 'refund', transaction_id: refund!.id },
    ]);
    await running.services.readModels.of(lineRegisterModel).runUntil((await store.head())!, { timeoutMs: 20_000 });
    const movements = await pool.query(
      `select rule, movement, sum(principal_cents)::int as cents, sum(processor_fee_cents)::int as fee from line_movement where payment_id = $1 group by 1, 2`,
      [id],
    );
    const fee = (await booksOf(running.services))(/^expense:processing/) - feesBefore;
    expect(fee).toBeGreaterThan(0);
    expect(movements.rows).toEqual([{ rule: 'R21', movement: 'undone_settled', cents: 0, fee: -fee }]);
    await expectClean();

    await stripe.failRefund(refund!.id);
    await payOut();
    const [exception] = await exceptions(id);
    expect(exception).toMatchObject({ kind: 'REFUND_FAILED', suspenseCents: 10_050 });
    const tasks = JSON.parse((await payfold('payments', 'tasks')).stdout) as { paymentId: string }[];
    expect(tasks.find(({ paymentId }) => paymentId === id)).toMatchObject({ reason: 'refund_failed', evidence: { wasVoided: true } });
    expect(await send(exception!.exceptionId)).toMatchObject({ amountCents: 10_050, paymentId: id });
    expect([await paidBack(id), (await running.client.find(id)).data.status]).toEqual([10_050, 'voided']);
    await payOut();
    expect(await exceptions(id)).toEqual([]);
    await expectClean();
    expect(await payfold('audit', 'verify')).toMatchObject({ code: 0 });
  }, 180_000);
});

describe('never twice', () => {
  test('two people of staff at once: one refund; while it is under way, nothing else ends the exception', async () => {
    const { id, exceptionId } = await failed();
    const during: unknown[] = [];
    const slow = instead((real) => ({
      refund: async (...call) => {
        const adopt = { type: 'Resolve', resolution: 'adopt', portalId, feeCents: 0, reason: 'x', by: 'Robin' } as const;
        const books = { ...adopt, resolution: 'refund', portalId: null } as const;
        const robin = staff('Robin', running.services.ids.uuid());
        for (const work of [
          send(exceptionId),
          changeException(ports(), exceptionId, adopt, robin),
          changeException(ports(), exceptionId, books, robin),
        ])
          during.push((await refused(work))?.code);
        return real.refund(...call);
      },
    }));
    await send(exceptionId, slow);
    expect(during).toEqual(['INVALID_STATE', 'INVALID_STATE', 'INVALID_STATE']);
    expect([await paidBack(id), (await refundsOf(id)).length]).toEqual([4_000, 2]);

    const other = await failed();
    const ends = await Promise.all([1, 2, 3].map(() => refused(send(other.exceptionId))));
    expect(ends.filter((end) => end === null)).toHaveLength(1);
    expect([await paidBack(other.id), (await refundsOf(other.id)).length]).toEqual([4_000, 2]);
  }, 120_000);

  test.each([
    ['before the refund reaches the processor', 'ExceptionRefundEnded', 0],
    ['after the processor has executed it', 'ExceptionResolved', 4_000],
  ] as const)(
    'the command dies %s: recovery ends the attempt, and sends nothing',
    async (_, ends, cents) => {
      const { id, exceptionId } = await failed();
      let [reached, die] = [() => {}, (_: Error) => {}];
      const there = new Promise<void>((done) => (reached = done));
      const dying = instead((real) => ({
        refund: async (...call) => {
          if (cents > 0) await real.refund(...call);
          reached();
          return new Promise((_, reject) => (die = reject));
        },
      }));
      void send(exceptionId, dying).catch(() => undefined);
      await there;
      running.clock.advance(MINUTE_MS + 1_000);
      await exceptions(id);
      await createRefundRecovery(ports(), running.services.pool).round();
      await eventually(async () => (await history(`exception-${exceptionId}`)).includes(ends));
      die(new Error('killed'));
      expect(await paidBack(id)).toBe(cents);
      // Nothing went back: the exception is free, and the next command sends.
      if (cents === 0) await send(exceptionId);
      expect([await paidBack(id), (await history(`exception-${exceptionId}`)).at(-1)]).toEqual([4_000, 'ExceptionResolved']);
    },
    120_000,
  );

  test('an answer that is lost: the processor is asked at once, and the refund counts', async () => {
    const { id, exceptionId } = await failed();
    await stripe.fault('cut_after', { op: 'refund' });
    expect(await send(exceptionId)).toMatchObject({ status: 'resolved', amountCents: 4_000 });
    expect([await paidBack(id), (await refundsOf(id)).length]).toEqual([4_000, 2]);
  }, 120_000);

  test('a refund that the processor does not show as failed, or cannot show: nothing is sent', async () => {
    const { id } = (await create()).data;
    await payOut();
    await running.client.refund(id, { amountCents: 4_000 });
    const [refund] = await refundsOf(id);
    // A line says that it failed, and the refund itself says that it arrived.
    await stripe.transaction({ type: 'refund_failure', reporting_category: 'refund_failure', amount: 4_000, fee: 0, source: refund!.id });
    await payOut();
    const [{ exceptionId }] = (await exceptions(id)) as [ExceptionRow];
    expect((await refused(send(exceptionId)))?.message).toContain(`does not show refund ${refund!.id} as failed, but as approved`);
    await stripe.fault('http_503', { op: 'one_refund', times: null });
    expect((await refused(send(exceptionId)))?.message).toContain(`cannot tell whether refund ${refund!.id} has failed`);
    await stripe.heal();
    expect([await history(`exception-${exceptionId}`), await paidBack(id), (await refundsOf(id)).length]).toEqual([['ExceptionOpened'], 4_000, 1]);
  }, 120_000);

  test('the same failure in two payouts: sent for the first of them only', async () => {
    const { id, exceptionId, refund } = await failed();
    await stripe.transaction({ type: 'refund_failure', reporting_category: 'refund_failure', amount: 4_000, fee: 0, source: refund });
    await payOut();
    const [first, second, ...more] = await exceptions(id);
    expect([first, second, more]).toMatchObject([{ exceptionId }, { kind: 'REFUND_FAILED', transactionId: refund, suspenseCents: 4_000 }, []]);
    const refusal = `Exception ${exceptionId} is about the same refund ${refund}`;
    expect((await refused(send(second!.exceptionId)))?.message).toContain(refusal);
    await send(exceptionId);
    expect((await refused(send(second!.exceptionId)))?.message).toContain(refusal);
    expect([await paidBack(id), (await refundsOf(id)).length]).toEqual([4_000, 2]);
  }, 120_000);

  test('a refund under our reference that we do not know as made: nothing is sent', async () => {
    const { id } = (await create()).data;
    await payOut();
    await running.client.refund(id, { amountCents: 4_000 });
    const [ours] = await refundsOf(id);
    const { payfold_ref: ref } = ours!.metadata as { payfold_ref: string };
    const body = new URLSearchParams({ payment_intent: await intentOf(id), amount: '4000', 'metadata[payfold_ref]': ref });
    const made = await fetch(`${double.url}/v1/refunds`, { method: 'POST', headers: { authorization: `Bearer ${SECRET}` }, body });
    const strange = (await made.json()) as { id: string };
    await stripe.failRefund(strange.id);
    await payOut();
    const failure = (await exceptions(id)).find(({ kind }) => kind === 'REFUND_FAILED')!;
    expect(failure).toMatchObject({ transactionId: strange.id });
    expect((await refused(send(failure.exceptionId)))?.message).toContain(`Refund ${strange.id} is not recorded here as made`);
    expect(await paidBack(id)).toBe(4_000);
  }, 120_000);

  test('a dispute that takes the same money: nothing is sent; after it was won, the refund is', async () => {
    const { id, exceptionId } = await failed();
    const today = new Date().toISOString().slice(0, 10);
    const day = ['--opened-on', today, '--due-date', today];
    const what = ['--status', 'debited', '--stage', 'chargeback', '--reason-code', '10.4', '--reason', 'no credit'];
    const opened = await payfold('disputes', 'open', '--payment', id, '--amount-cents', '10050', ...what, ...day, '--by', 'Dana');
    expect(opened.code).toBe(0);
    expect((await refused(send(exceptionId)))?.message).toContain('A dispute of this payment takes the money of this refund');
    expect(await paidBack(id)).toBe(0);
    const { disputeId } = JSON.parse(opened.stdout) as { disputeId: string };
    expect((await payfold('disputes', 'update', disputeId, '--status', 'recovered', '--by', 'Dana')).code).toBe(0);
    await send(exceptionId);
    expect(await paidBack(id)).toBe(4_000);
  }, 120_000);

  test('a refund by the partner returns no cent of the failed one', async () => {
    const { id, exceptionId } = await failed();
    expect((await running.client.refund(id, { amountCents: 6_001 })).code).toBe('INVALID_STATE');
    expect((await running.client.refund(id)).status).toBe(200);
    await send(exceptionId);
    // The fee stays with the operator.
    expect([await status(id), await paidBack(id)]).toEqual([['partially_refunded', 10_000], 10_000]);
  }, 120_000);
});

describe('a refund that was made at the processor’s own page', () => {
  /** Somebody refunds at the processor, without a reference of ours. */
  const elsewhere = async (paymentId: string, amountCents: number, metadata: Readonly<Record<string, string>> = {}): Promise<string> => {
    const more = Object.entries(metadata).map(([name, value]): [string, string] => [`metadata[${name}]`, value]);
    const body = new URLSearchParams([['payment_intent', await intentOf(paymentId)], ['amount', String(amountCents)], ...more]);
    const made = await fetch(`${double.url}/v1/refunds`, { method: 'POST', headers: { authorization: `Bearer ${SECRET}` }, body });
    return ((await made.json()) as { id: string }).id;
  };
  /** What the round of a worker does after it has read the batches. */
  const look = async () => {
    await ports().register.caughtUp();
    const [account] = await ports().register.accounts();
    await findReturns(ports(), account!, ports().payments.gateways.find(account!)!);
    await ports().register.caughtUp();
  };
  const resolve = (exceptionId: string, resolution: 'adopt' | 'no_posting', transactionId: string | null = null, through = ports()) => {
    const change = { type: 'Resolve', resolution, reason: 'seen on the dashboard', by: 'Dana', portalId: null, feeCents: 0, transactionId } as const;
    return changeException(through, exceptionId, change, staff('Dana', running.services.ids.uuid()));
  };
  const found = async (paymentId: string) => (await exceptions(paymentId)).filter(({ kind }) => kind === 'RETURNED_ELSEWHERE');
  const lineOf = async (transactionId: string) => {
    await exceptions('');
    const rows = await collect(exceptionRows(running.services.pool, EVERYTHING, { status: null, now: running.clock.now() }));
    return rows.find((row) => row.transactionId === transactionId && row.kind === 'MISSING_HERE');
  };
  const adopted = ['RefundRequested', 'PaymentRefunded', 'ReversalEnded', 'ReturnedElsewhere'];
  const told = async (paymentId: string) => {
    const { services } = running;
    return (await services.payments.ports.streams.events(paymentId)).flatMap(
      (event) => notificationOf(paymentId, paymentEvents.read(event), '') ?? [],
    );
  };

  test('a refused refund finds it; nothing else returns money; adopted, imported, and told once; a repeat changes nothing', async () => {
    const { id } = (await create()).data;
    await payOut();
    const refund = await elsewhere(id, 10_050);
    const first = await running.client.refund(id, { amountCents: 500 });
    expect([first.code, first.message]).toEqual([
      'INVALID_STATE',
      expect.stringContaining('money was returned at the processor; staff must record it'),
    ]);
    const blocked = 'money was returned at the processor; staff must record it';
    for (const again of [await running.client.refund(id), await running.client.void(id)])
      expect([again.code, again.message]).toEqual(['INVALID_STATE', expect.stringContaining(blocked)]);
    const [exception, ...more] = await found(id);
    expect([exception, more]).toMatchObject([{ paymentId: id, leg: 'combined', transactionId: null, suspenseCents: 0 }, []]);
    const { services } = running;
    const thresholds = services.config.alerts;
    const alerts = await findAlerts({ store: services.store, db: services.pool, thresholds, nowMs: running.clock.now() });
    expect(alerts.find(({ name }) => name === 'returned_elsewhere')?.items).toEqual([expect.objectContaining({ id: exception!.exceptionId })]);
    expect((await refused(resolve(exception!.exceptionId, 'adopt')))?.message).toContain('name the refund that was made of it');

    const ends = await Promise.all([1, 2].map(() => refused(resolve(exception!.exceptionId, 'adopt', refund))));
    expect(ends).toContain(null);
    expect((await refused(resolve(exception!.exceptionId, 'adopt', refund)))?.code).toBe('INVALID_STATE');
    expect((await history(`payment-${id}`)).slice(-4)).toEqual(adopted);
    expect(await status(id)).toEqual(['refunded', 10_050]);
    expect(await told(id)).toMatchObject([{ type: 'payment.refunded', data: { amountCents: 10_050, reversalType: 'refund', initiatedBy: 'staff' } }]);
    await payOut();
    expect([await exceptions(id), await lineOf(refund)]).toEqual([[], undefined]);
    await expectClean();
  }, 180_000);

  test('the feed finds it after its line was imported: the adoption takes the line out of suspense', async () => {
    const { id } = (await create()).data;
    await payOut();
    const refund = await elsewhere(id, 4_000);
    await payOut();
    const line = (await lineOf(refund))!;
    expect(line.suspenseCents).toBe(-4_000);
    await look();
    await look();
    const [exception, ...more] = await found(id);
    expect([exception, more]).toMatchObject([{ transactionId: refund }, []]);
    expect((await running.client.refund(id, { amountCents: 100 })).code).toBe('INVALID_STATE');
    const by = ['--reason', 'seen on the dashboard', '--by', 'Dana'];
    const done = await payfold('settlement', 'exceptions', 'resolve', exception!.exceptionId, '--as', 'adopt', ...by);
    expect([done.code, done.stderr]).toEqual([0, '']);
    expect([await status(id), await exceptions(id), await lineOf(refund)]).toEqual([['partially_refunded', 4_000], [], undefined]);
    expect(await history(`exception-${line.exceptionId}`)).toEqual(['ExceptionOpened', 'ExceptionResolved']);
    expect((await running.client.refund(id, { amountCents: 6_001 })).code).toBe('INVALID_STATE');
    expect((await running.client.refund(id, { amountCents: 6_000 })).status).toBe(200);
    await look();
    expect(await found(id)).toEqual([]);
    await payOut();
    await expectClean();
    expect(await payfold('audit', 'verify')).toMatchObject({ code: 0 });
  }, 180_000);

  test('the line was given to the agency before: the adoption is refused, and a dismissal ends the matter', async () => {
    const { id } = (await create()).data;
    await payOut();
    const refund = await elsewhere(id, 4_000);
    await payOut();
    await look();
    const line = (await lineOf(refund))!;
    const agency = { type: 'Resolve', resolution: 'adopt', portalId, feeCents: 0, reason: 'x', by: 'Robin' } as const;
    await changeException(ports(), line.exceptionId, agency, staff('Robin', running.services.ids.uuid()));
    const [exception] = await found(id);
    expect((await refused(resolve(exception!.exceptionId, 'adopt')))?.message).toContain(`was resolved with exception ${line.exceptionId}`);
    expect(await status(id)).toEqual(['succeeded', 0]);
    await resolve(exception!.exceptionId, 'no_posting');
    await look();
    expect(await found(id)).toEqual([]);
    expect((await running.client.refund(id, { amountCents: 6_000 })).status).toBe(200);
    await payOut();
  }, 180_000);

  test('the command dies after each of its steps: a repeat or the next round ends it, and nothing counts twice', async () => {
    for (const dies of ['line', 'payment'] as const) {
      const { id } = (await create()).data;
      await payOut();
      const refund = await elsewhere(id, 4_000);
      await payOut();
      await look();
      const [exception] = await found(id);
      const { store } = running.services;
      const append: typeof store.append = async (stream, ...rest) => {
        const isLate = stream === (dies === 'line' ? `payment-${id}` : `exception-${exception!.exceptionId}`);
        if (isLate) throw new Error('killed');
        return store.append(stream, ...rest);
      };
      const dying = new Proxy(store, { get: (real, name) => (name === 'append' ? append : Reflect.get(real, name, real)) as unknown });
      const streams = new PaymentStreams(dying, running.clock, running.services.ids);
      await refused(resolve(exception!.exceptionId, 'adopt', null, { ...ports(), store: dying, payments: { ...ports().payments, streams } }));
      expect((await status(id))[1]).toBe(dies === 'line' ? 0 : 4_000);
      if (dies === 'line') {
        // The line is settled with this return. A dismissal would leave its money in unsettled for ever.
        expect((await refused(resolve(exception!.exceptionId, 'no_posting')))?.message).toContain('adopt it');
        await resolve(exception!.exceptionId, 'adopt');
      }
      expect([await status(id), await exceptions(id), await lineOf(refund)]).toEqual([['partially_refunded', 4_000], [], undefined]);
      expect(await told(id)).toHaveLength(1);
    }
    await expectClean();
  }, 180_000);

  test('a refund that the processor has not carried out yet is adopted as pending', async () => {
    const { id } = (await create(await stripe.method({ refunds: 'pending' }))).data;
    await payOut();
    const refund = await elsewhere(id, 4_000);
    expect((await running.client.refund(id)).code).toBe('INVALID_STATE');
    const [exception] = await found(id);
    await resolve(exception!.exceptionId, 'adopt', refund);
    const { payment } = await paymentAsOf(running.services.store, EVERYTHING, id, {});
    expect(payment.returns).toMatchObject([{ amountCents: 4_000, transactionId: refund, status: 'pending' }]);
  }, 120_000);

  test('never a transaction with a reference of ours, of another charge, or of more than remains; never while an attempt is open', async () => {
    const { id } = (await create()).data;
    const other = (await create()).data.id;
    await payOut();
    expect((await running.client.refund(id, { amountCents: 1_000 })).status).toBe(200);
    const [ours] = await refundsOf(id);
    const { payfold_ref: ref } = ours!.metadata as { payfold_ref: string };
    const strange = await elsewhere(id, 500, { payfold_ref: ref });
    const theirs = await elsewhere(other, 700);
    const rest = await elsewhere(id, 8_550);
    expect((await running.client.refund(id, { amountCents: 600 })).code).toBe('INVALID_STATE');
    const [exception] = await found(id);
    const adopt = async (transaction: string) => (await refused(resolve(exception!.exceptionId, 'adopt', transaction)))?.message;
    expect(await adopt(strange)).toContain('carries a reference of ours');
    expect(await adopt(theirs)).toContain('returns another charge');
    expect(await adopt('re_unknown')).toContain('is unknown to the gateway');
    await payOut();
    await look();
    expect(await found(other)).toMatchObject([{ transactionId: theirs }]);
    await resolve(exception!.exceptionId, 'adopt', rest);
    expect(await status(id)).toEqual(['partially_refunded', 9_550]);

    // An attempt is open: what the processor shows may be its own return.
    const open = (await create()).data.id;
    await payOut();
    await stripe.fault('http_503', { op: 'refund' });
    expect((await running.client.refund(open, { amountCents: 300 }, { key: 'open-attempt' })).status).toBe(504);
    await elsewhere(open, 2_000);
    await payOut();
    await look();
    expect(await found(open)).toEqual([]);
    expect((await running.client.refund(open, { amountCents: 300 }, { key: 'open-attempt' })).status).toBe(200);
    await look();
    expect(await found(open)).toHaveLength(1);
  }, 240_000);
});
