/**
 * Events after the charge (specification, Events and States; C23, C24, C29, C30, C57, C67, C69): batches settle, staff refund and resolve,
 * cardholders dispute. Lines that the sandbox processor never sends come from a scripted processor.
 */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import type { ServiceError } from '#kernel';
import { changeException, openDispute, recordSettlements, type SettlementPorts, updateDispute } from '#settlement';
import {
  paymentEvents,
  type PaymentGateway,
  type PaymentView,
  type RefundView,
  resolvePayment,
  type ResolveRequest,
  reverseByStaff,
  staff,
} from '#payments';
import { notificationOf } from '#webhooks';
import { viewOf } from '../../apps/answers.js';
import { createMetrics } from '../../apps/metrics.js';
import { booksOf } from '../support/books.js';
import { batchesOf, type ListedLine } from '../support/listed-lines.js';
import { eventually } from '../support/eventually.js';
import { figuresOf } from '../support/metrics.js';
import { CARD, type Client, paymentOf, type Service, startService, type TestAccount } from '../support/service.js';

let service: Service;
let partner: TestAccount;
let client: Client;
/** A portal with a flat fee of 300 cents. */
let separate: string;
let combined: string;
beforeAll(async () => {
  service = await startService();
  partner = await service.account();
  client = partner.client;
  separate = await service.portal(partner, { fee: { flatCents: 300 } });
  combined = await service.portal(partner, { fee: { flatCents: 300, chargeMode: 'combined' } });
});
afterAll(() => service.stop());

const soon = () => AbortSignal.timeout(20_000);
const pay = (options: { lines?: number[]; number?: string; portal?: string } = {}) => client.created(paymentOf(options.portal ?? separate, options));
const read = async (id: string): Promise<PaymentView> => (await client.find(id)).data;
const record = (ports: SettlementPorts = service.services.settlement) => recordSettlements(ports, soon());
/** Closes the batches at the processor, as every night, and records them here. */
const settle = async () => {
  await service.simulator.closeBatches();
  return record();
};
const history = async (id: string) => (await service.services.payments.ports.streams.events(id)).map(({ type }) => type);
const exceptionsOf = async (paymentId: string | null) => {
  await service.services.settlement.register.caughtUp();
  const { rows } = await service.services.pool.query<{
    exceptionId: string;
    kind: string;
    transactionId: string;
    grossCents: number;
    expectedCents: number | null;
  }>(
    `select exception_id as "exceptionId", kind, transaction_id as "transactionId", gross_cents::int as "grossCents", expected_cents::int as "expectedCents"
     from settlement_exception where payment_id is not distinct from $1 order by recorded_at, batch_id, line`,
    [paymentId],
  );
  return rows;
};
const tasksOf = async (paymentId: string) => {
  const tasks: string[] = [];
  for await (const events of service.services.store.readAll(null, { streamPrefixes: ['staff-'] }))
    for (const { data } of events) {
      const task = data as { paymentId: string; reason: string };
      if (task.paymentId === paymentId) tasks.push(task.reason);
    }
  return tasks;
};
const refused = async (work: Promise<unknown>) => {
  const error = await work.then(
    () => null,
    (caught: unknown) => caught as ServiceError,
  );
  return error && { code: error.code, message: error.message };
};
let drawn = 0;

describe('settlement', () => {
  test('each leg of a payment gets the fact, with the batch, gross and fee that the processor says; the status stays', async () => {
    const { id } = await pay();
    expect(await settle()).not.toEqual([]);
    const events = await service.services.payments.ports.streams.events(id);
    expect(events.slice(-2).map(({ type, data, meta }) => ({ type, data, effectiveAt: meta.effectiveAt }))).toEqual(
      (['principal', 'fee'] as const).map((leg) => ({
        type: 'PaymentSettled',
        data: {
          leg,
          batchId: expect.stringMatching(/^bat_/),
          closedAt: expect.any(String),
          grossCents: leg === 'fee' ? 300 : 10_000,
          // 10 cents + 2.2 %.
          feeCents: leg === 'fee' ? 17 : 230,
        },
        effectiveAt: expect.any(String),
      })),
    );
    expect(await read(id)).toMatchObject({ status: 'succeeded', remainingRefundableAmountCents: 10_300 });
  });
  test('GET and list tell when a void is no longer possible, and that a settlement was rejected (C73)', async () => {
    const [good, bad] = [await pay(), await pay({ number: CARD.settlementRejected })];
    const voided = (await pay()).id;
    for (const { settlement } of [good, bad]) expect(settlement).toEqual({ status: 'unsettled', settledAt: null });
    await client.void(voided);
    await settle();
    const settled = await read(good.id);
    const events = await service.services.payments.ports.streams.events(good.id);
    const closed = events.flatMap(({ type, data }) => (type === 'PaymentSettled' ? [(data as { closedAt: string }).closedAt] : []));
    expect(settled.settlement).toEqual({ status: 'settled', settledAt: closed[0] });
    expect(Date.parse(settled.updatedAt)).toBeGreaterThan(Date.parse(good.updatedAt));
    expect(await client.void(good.id)).toMatchObject({ status: 422, code: 'VOID_FAILED' });
    const rejected = await read(bad.id);
    expect([rejected.status, rejected.settlement]).toEqual(['succeeded', { status: 'rejected', settledAt: null }]);
    expect((await read(voided)).settlement).toEqual({ status: 'unsettled', settledAt: null });
    const { payments } = (await client.list({ limit: 3 })).data;
    expect(payments.map(({ id, settlement }) => [id, settlement?.status])).toEqual([
      [voided, 'unsettled'],
      [bad.id, 'rejected'],
      [good.id, 'settled'],
    ]);
    // A replay of the create shows the settlement of that time: the answer is kept as it was.
    const key = 'replayed after its batch';
    const first = await client.create(paymentOf(separate), { key });
    await settle();
    expect((await client.create(paymentOf(separate), { key })).text).toBe(first.text);
  });
  test('recorded again, and by two at the same time, every line is recorded once', async () => {
    const payments = await Promise.all(Array.from({ length: 5 }, () => pay()));
    await service.simulator.closeBatches();
    await Promise.all([record(), record(), record()]);
    expect(await record()).toEqual([]);
    for (const { id } of payments) expect((await history(id)).filter((type) => type === 'PaymentSettled')).toHaveLength(2);
    const lines: string[] = [];
    for await (const events of service.services.store.readAll(null, { streamPrefixes: ['settlement-'] }))
      for (const { type, data } of events)
        if (type === 'SettlementLinesRecorded')
          lines.push(...(data as unknown as { lines: { transactionId: string }[] }).lines.map(({ transactionId }) => transactionId));
    expect(new Set(lines).size).toBe(lines.length);
    const truth = (await service.simulator.truth()).filter(({ op, batchId }) => op === 'charge' && batchId !== undefined);
    expect(lines.sort()).toEqual(truth.map(({ transactionId }) => transactionId!).sort());
  });
  test('a settled payment refuses a void before any gateway call and keeps the answer under its key (C27); a refund of it is a refund', async () => {
    const { id } = await pay();
    await settle();
    const calls = (await service.simulator.truth()).length;
    const key = `settled-${++drawn}`;
    for (const replayed of [undefined, 'true']) {
      const answer = await client.void(id, {}, { key });
      expect([answer.status, answer.code, answer.details!.suggestedAction, answer.details!.retryable]).toEqual([422, 'VOID_FAILED', 'refund', false]);
      expect(answer.headers['idempotent-replayed']).toBe(replayed);
    }
    expect((await service.simulator.truth()).length).toBe(calls);
    expect((await client.refund(id, { amountCents: 2_500 })).data).toMatchObject({ reversalType: 'refund', amountCents: 2_500 });
    expect(await read(id)).toMatchObject({ status: 'partially_refunded', remainingRefundableAmountCents: 7_800 });
  });
  test('the refund itself settles in the next batch, as its own line', async () => {
    const { id } = await pay();
    await settle();
    expect((await client.refund(id, { feeType: 'include_fee' })).data).toMatchObject({ reversalType: 'refund', amountCents: 10_300 });
    await settle();
    const lines: { paymentId: string; type: string; result: string; grossCents: number }[] = [];
    for await (const events of service.services.store.readAll(null, { streamPrefixes: ['settlement-'] }))
      for (const { type, data } of events) if (type === 'SettlementLinesRecorded') lines.push(...(data as unknown as { lines: typeof lines }).lines);
    expect(lines.filter((line) => line.paymentId === id && line.type === 'refund').map(({ result, grossCents }) => [result, grossCents])).toEqual([
      ['MATCHED', -10_000],
      ['MATCHED', -300],
    ]);
    expect(await exceptionsOf(id)).toEqual([]);
  });
  test('a part that was voided before does not settle: the line names the rest, and matches', async () => {
    const { id } = await pay();
    expect((await client.refund(id, { amountCents: 4_000 })).data.reversalType).toBe('void');
    await settle();
    const settled = (await service.services.payments.ports.streams.events(id)).filter(({ type }) => type === 'PaymentSettled');
    expect(settled.map(({ data }) => (data as { grossCents: number }).grossCents)).toEqual([6_000, 300]);
    expect(await exceptionsOf(id)).toEqual([]);
  });
  test('one leg settled, the other not yet: the void is refused; a refund is a refund, each leg by its own means (C24)', async () => {
    const { id } = await pay();
    const [batch] = (await service.simulator.closeBatches()).filter(({ merchantAccount }) => merchantAccount.startsWith('agency-'));
    expect(batch).toBeDefined();
    const principalOnly: SettlementPorts = {
      ...service.services.settlement,
      register: {
        ...service.services.settlement.register,
        accounts: async () =>
          (await service.services.settlement.register.accounts()).filter(({ merchantAccount }) => merchantAccount.startsWith('agency-')),
      },
    };
    await record(principalOnly);
    expect((await history(id)).filter((type) => type === 'PaymentSettled')).toHaveLength(1);
    expect((await client.void(id)).details).toMatchObject({ code: 'VOID_FAILED', suggestedAction: 'refund' });
    expect((await client.refund(id, { feeType: 'include_fee' })).data).toMatchObject({ reversalType: 'refund', amountCents: 10_300 });
    expect(await read(id)).toMatchObject({ status: 'refunded', remainingRefundableAmountCents: 0 });
    await record();
  });
  test('C24: we thought unsettled, the gateway says settled → refund; the later line matches all the same', async () => {
    const { id } = await pay();
    await service.simulator.closeBatches();
    expect((await client.refund(id, { amountCents: 1_000 })).data.reversalType).toBe('refund');
    await record();
    expect((await history(id)).filter((type) => type === 'PaymentSettled')).toHaveLength(2);
    expect(await exceptionsOf(id)).toEqual([]);
  });
  test('C24: settled here, not at the gateway → a void of exactly the requested amount', async () => {
    const { id } = await pay();
    const loaded = await service.services.payments.ports.streams.load(id);
    if (loaded.payment.phase !== 'charged') throw new Error('not charged');
    // Record the line before the batch has closed. The stream then says settled, but at the processor the charge is still open.
    await record(
      processorOf(
        loaded.payment.legs.map(({ leg, transactionId, account }) => ({
          merchantAccount: account.merchantAccount,
          line: line({ transactionId, grossCents: leg === 'fee' ? 300 : 10_000 }),
        })),
      ),
    );
    expect((await client.refund(id, { amountCents: 1_000 })).data).toMatchObject({ reversalType: 'void', amountCents: 1_000 });
    expect((await client.refund(id, { feeType: 'include_fee' })).data).toMatchObject({ reversalType: 'void', amountCents: 9_300 });
    expect(await read(id)).toMatchObject({ status: 'refunded', remainingRefundableAmountCents: 0 });
  });
  test('a rejected settlement leaves the status and raises a task; refund and void are refused (C67)', async () => {
    const { id } = await pay({ number: CARD.settlementRejected, portal: combined });
    await settle();
    expect(await history(id)).toEqual(['PaymentInitiated', 'PaymentCreated', 'SettlementRejected']);
    expect(await read(id)).toMatchObject({ status: 'succeeded', refundedAmountCents: 0 });
    expect(await tasksOf(id)).toEqual(['settlement_rejected']);
    for (const answer of [await client.refund(id), await client.void(id)])
      expect([answer.status, answer.code, answer.message]).toEqual([422, 'INVALID_STATE', 'The settlement of this payment was rejected.']);
  });
  test('evidence for an unknown payment leaves it unknown, is kept as an exception and raises a task (C29)', async () => {
    const answer = await client.create(paymentOf(combined, { number: CARD.unresolvable }));
    const id = answer.details!.id as string;
    await service.recover(id);
    expect(await client.status(id)).toBe('unknown');
    await settle();
    expect(await client.status(id)).toBe('unknown');
    expect((await exceptionsOf(id)).map(({ kind, grossCents, expectedCents }) => ({ kind, grossCents, expectedCents }))).toEqual([
      { kind: 'STATUS_MISMATCH', grossCents: 10_300, expectedCents: 0 },
    ]);
    expect(await tasksOf(id)).toContain('settled_while_unknown');
  });
  test('a batch with a payment that is just being charged waits for it, and goes on afterwards', async () => {
    const { id } = await pay({ portal: combined });
    const before = (await service.simulator.truth()).length;
    await service.simulator.arm({ match: { call: 'charge' }, delayAfterMs: 1_500 });
    const slow = client.create(paymentOf(combined));
    // Wait until the bank has the charge. Its answer is delayed.
    await eventually(async () => (await service.simulator.truth()).length > before);
    await service.simulator.closeBatches();
    await record();
    expect(service.logLines().some(({ msg }) => msg.includes('the batch goes on when that has ended'))).toBe(true);
    const made = (await slow).data;
    await record();
    expect((await history(made.id)).at(-1)).toBe('PaymentSettled');
    expect((await history(id)).at(-1)).toBe('PaymentSettled');
    expect(await exceptionsOf(made.id)).toEqual([]);
  });
  test('funding is recorded on the day that the processor announced, once', async () => {
    await pay();
    await settle();
    const funded = async () => {
      let count = 0;
      for await (const events of service.services.store.readAll(null, { streamPrefixes: ['settlement-'] }))
        count += events.filter(({ type }) => type === 'BatchFunded').length;
      return count;
    };
    const before = await funded();
    service.clock.advance(4 * 86_400_000);
    await record();
    const after = await funded();
    expect(after).toBeGreaterThan(before);
    await record();
    expect(await funded()).toBe(after);
  });
});

// ------------------------------------------------------------------------------------------------------------------------------------
// A processor that is scripted by a test.

let scripted = 0;
const line = (fields: Partial<ListedLine> & { transactionId: string; grossCents: number }): ListedLine => ({
  batchId: `scripted_${scripted}`,
  closedAt: new Date(service.clock.now()).toISOString(),
  type: 'sale',
  accepted: true,
  feeCents: 0,
  netCents: fields.grossCents,
  ...fields,
});
/** The service's settlement ports, with processors that list these lines. */
const processorOf = (lines: readonly { merchantAccount: string; line: ListedLine }[]): SettlementPorts => {
  const { settlement } = service.services;
  const gateways = {
    find: (account: Parameters<typeof settlement.payments.gateways.find>[0]): PaymentGateway | null => {
      const real = settlement.payments.gateways.find(account);
      return (
        real && {
          ...real,
          settlements: () => batchesOf(lines.flatMap((one) => (one.merchantAccount === account.merchantAccount ? [one.line] : []))),
        }
      );
    },
  };
  scripted += 1;
  return { ...settlement, payments: { ...settlement.payments, gateways } };
};

describe('lines that fit no payment, or not the way they should: kept, and nothing lost', () => {
  const charged = async () => {
    const { id } = await pay({ portal: combined });
    const { payment } = await service.services.payments.ports.streams.load(id);
    if (payment.phase !== 'charged') throw new Error('not charged');
    const [leg] = payment.legs;
    return { id, transactionId: leg!.transactionId, merchantAccount: leg!.account.merchantAccount, ref: payment.terms.legs[0]!.references.charge };
  };
  const kinds = async (id: string | null) => (await exceptionsOf(id)).map(({ kind, grossCents, expectedCents }) => [kind, grossCents, expectedCents]);

  test('a transaction that is not ours: MISSING_HERE', async () => {
    const { merchantAccount } = await charged();
    const before = (await exceptionsOf(null)).length;
    await record(processorOf([{ merchantAccount, line: line({ transactionId: 'ch_stranger', grossCents: 777 }) }]));
    expect((await exceptionsOf(null)).slice(before)).toMatchObject([{ kind: 'MISSING_HERE', transactionId: 'ch_stranger', grossCents: 777 }]);
  });
  test('another amount: AMOUNT_MISMATCH, and the leg counts as settled', async () => {
    const { id, merchantAccount, transactionId } = await charged();
    await record(processorOf([{ merchantAccount, line: line({ transactionId, grossCents: 10_299 }) }]));
    expect(await kinds(id)).toEqual([['AMOUNT_MISMATCH', 10_299, 10_300]]);
    expect((await history(id)).at(-1)).toBe('PaymentSettled');
  });
  test('a payment that was voided here: STATUS_MISMATCH, and its stream gets nothing', async () => {
    const { id, merchantAccount, transactionId } = await charged();
    expect((await client.void(id)).status).toBe(200);
    await record(processorOf([{ merchantAccount, line: line({ transactionId, grossCents: 10_300 }) }]));
    expect(await kinds(id)).toEqual([['STATUS_MISMATCH', 10_300, 0]]);
    expect(await history(id)).not.toContain('PaymentSettled');
  });
  test('the same transaction twice in a batch, and again in another batch: DUPLICATE_AT_GATEWAY', async () => {
    const { id, merchantAccount, transactionId } = await charged();
    const sale = () => ({ merchantAccount, line: line({ transactionId, grossCents: 10_300 }) });
    await record(processorOf([sale(), sale()]));
    expect(await kinds(id)).toEqual([['DUPLICATE_AT_GATEWAY', 10_300, null]]);
    await record(processorOf([sale()]));
    expect(await kinds(id)).toEqual([
      ['DUPLICATE_AT_GATEWAY', 10_300, null],
      ['DUPLICATE_AT_GATEWAY', 10_300, null],
    ]);
    expect((await history(id)).filter((type) => type === 'PaymentSettled')).toHaveLength(1);
  });
  test('a second transaction under our reference: DUPLICATE_AT_GATEWAY', async () => {
    const { id, merchantAccount, ref } = await charged();
    await record(processorOf([{ merchantAccount, line: line({ transactionId: 'ch_second', ref, grossCents: 10_300 }) }]));
    expect(await kinds(id)).toEqual([['DUPLICATE_AT_GATEWAY', 10_300, null]]);
  });
  test('settled on another merchant account: WRONG_ACCOUNT', async () => {
    const { id, transactionId } = await charged();
    const other = await pay();
    const { payment } = await service.services.payments.ports.streams.load(other.id);
    if (payment.phase !== 'charged') throw new Error('not charged');
    const { merchantAccount } = payment.legs[0]!.account;
    await record(processorOf([{ merchantAccount, line: line({ transactionId, grossCents: 10_300 }) }]));
    expect(await kinds(id)).toEqual([['WRONG_ACCOUNT', 10_300, null]]);
    expect(await history(id)).not.toContain('PaymentSettled');
  });
  test('a refund that did not happen here: STATUS_MISMATCH', async () => {
    const { id, merchantAccount, ref } = await charged();
    await record(processorOf([{ merchantAccount, line: line({ transactionId: 'rf_stranger', ref, type: 'refund', grossCents: -500 }) }]));
    expect(await kinds(id)).toEqual([['STATUS_MISMATCH', -500, 0]]);
  });
  test('a batch of many lines is recorded in several events, in order; each line once', async () => {
    const { id, merchantAccount, transactionId } = await charged();
    const ports = processorOf([
      ...Array.from({ length: 450 }, (_, index) => ({
        merchantAccount,
        line: line({ transactionId: `ch_many_${scripted}_${index}`, grossCents: 1 }),
      })),
      { merchantAccount, line: line({ transactionId, grossCents: 10_300 }) },
    ]);
    expect(await record(ports)).toContainEqual({ batchId: expect.stringMatching(/^scripted/), count: 451, amountCents: 10_750 });
    expect((await history(id)).at(-1)).toBe('PaymentSettled');
  });
});

describe('batches of a processor that does not behave', () => {
  const charged = async () => {
    const { id } = await pay({ portal: combined });
    const { payment } = await service.services.payments.ports.streams.load(id);
    if (payment.phase !== 'charged') throw new Error('not charged');
    return { id, transactionId: payment.legs[0]!.transactionId, merchantAccount: payment.legs[0]!.account.merchantAccount };
  };
  let batches = 0;
  const inBatch = (name: string, one: ListedLine): ListedLine => ({ ...one, batchId: `${name}_${batches}` });
  const linesOf = async (id: string, type: string) => {
    const found: string[] = [];
    for await (const events of service.services.store.readAll(null, { streamPrefixes: ['settlement-'] }))
      for (const event of events)
        if (event.type === 'SettlementLinesRecorded')
          for (const one of (event.data as unknown as { lines: { paymentId: string; type: string; result: string }[] }).lines)
            if (one.paymentId === id && one.type === type) found.push(one.result);
    return found;
  };

  test('the same refund in two batches of one round is a duplicate', async () => {
    batches += 1;
    const { id, merchantAccount } = await charged();
    await settle();
    const refund = (await client.refund(id, { amountCents: 2_500 })).data;
    const one = line({ transactionId: refund.gateway.transactionId, type: 'refund', grossCents: -2_500 });
    await record(processorOf(['twice_a', 'twice_b'].map((name) => ({ merchantAccount, line: inBatch(name, one) }))));
    expect(await linesOf(id, 'refund')).toEqual(['MATCHED', 'DUPLICATE_AT_GATEWAY']);
  });
  test('a fee of the transaction one batch before its sale does not settle it', async () => {
    batches += 1;
    const { id, merchantAccount, transactionId } = await charged();
    await record(processorOf([{ merchantAccount, line: inBatch('fee', line({ transactionId, type: 'fee', grossCents: -10 })) }]));
    await record(processorOf([{ merchantAccount, line: inBatch('sale', line({ transactionId, grossCents: 10_300 })) }]));
    expect((await history(id)).at(-1)).toBe('PaymentSettled');
  });
  test('a sale that was rejected and comes back accepted is an exception and a task: it is booked nowhere by itself (C67)', async () => {
    batches += 1;
    const { id, merchantAccount, transactionId } = await charged();
    await record(processorOf([{ merchantAccount, line: inBatch('no', line({ transactionId, grossCents: 10_300, accepted: false, netCents: 0 })) }]));
    await record(processorOf([{ merchantAccount, line: inBatch('yes', line({ transactionId, grossCents: 10_300 })) }]));
    expect((await exceptionsOf(id)).map(({ kind, grossCents }) => [kind, grossCents])).toEqual([['STATUS_MISMATCH', 10_300]]);
    expect(await tasksOf(id)).toEqual(['settlement_rejected', 'settled_after_rejection']);
    expect((await history(id)).at(-1)).toBe('SettlementRejected');
  });
  test('fewer lines than were recorded before: nothing is written, an alarm, and every other account goes on', async () => {
    batches += 1;
    const { merchantAccount } = await charged();
    // If the day of funding lies before the close, the batch is not recorded.
    const fundedOn = new Date(service.clock.now()).toISOString().slice(0, 10);
    const all = Array.from({ length: 250 }, (_, index) => ({
      merchantAccount,
      line: inBatch('short', line({ transactionId: `ch_short_${index}`, grossCents: 1, fundedOn })),
    }));
    const whole = processorOf(all);
    // These ports end the round after the first 200 lines of the batch.
    const cut: SettlementPorts = {
      ...whole,
      payments: {
        ...whole.payments,
        gateways: {
          find: (account) => {
            const gateway = whole.payments.gateways.find(account);
            return (
              gateway && {
                ...gateway,
                settlements: async function* (...asked: Parameters<PaymentGateway['settlements']>) {
                  let count = 0;
                  for await (const batch of gateway.settlements(...asked)) {
                    const lines = async function* () {
                      for await (const one of batch.lines) {
                        if (++count > 230) throw new Error('away');
                        yield one;
                      }
                    };
                    yield { ...batch, lines: lines() };
                  }
                },
              }
            );
          },
        },
      },
    };
    await record(cut);
    const mine = ({ batchId }: { batchId: string }) => batchId.startsWith('short');
    expect((await record(processorOf(all.slice(0, 100)))).filter(mine)).toEqual([]);
    expect(service.logLines().some(({ level, msg }) => level >= 50 && msg === 'a settlement batch cannot be recorded')).toBe(true);
    const other = await pay({ portal: await service.portal(partner) });
    await settle();
    expect(await history(other.id)).toContain('PaymentSettled');
    expect((await record(processorOf(all))).filter(mine)).toEqual([{ batchId: `short_${batches}`, count: 250, amountCents: 250 }]);
  });
});

describe('staff', () => {
  const byStaff = async (request: Partial<Parameters<typeof reverseByStaff>[1]> & { paymentId: string }, key: string | null = null) => {
    const asked = { operation: 'refund', amountCents: null, includeFee: false, reason: 'duplicate', by: 'Dana', ...request } as const;
    return viewOf(await reverseByStaff(service.services.payments, asked, key)) as RefundView;
  };
  test('refund in part, of the rest, and of the fee; actor and reason are recorded', async () => {
    const { id } = await pay({ number: CARD.settlesAtOnce });
    expect(await byStaff({ paymentId: id, amountCents: 2_500 })).toMatchObject({
      amountCents: 2_500,
      reversalType: 'refund',
      reason: 'duplicate',
    });
    expect(await byStaff({ paymentId: id })).toMatchObject({ amountCents: 7_500, remainingRefundableAmountCents: 300 });
    expect(await byStaff({ paymentId: id, includeFee: true })).toMatchObject({ amountCents: 300, remainingRefundableAmountCents: 0 });
    const events = await service.services.payments.ports.streams.events(id);
    const requests = events.filter(({ type }) => type === 'RefundRequested');
    expect(requests.map(({ data, meta }) => [(data as { initiatedBy: string }).initiatedBy, meta.actor])).toEqual(
      Array.from({ length: 3 }, () => ['staff', { type: 'staff', id: 'Dana' }]),
    );
    expect(await read(id)).toMatchObject({ status: 'refunded' });
  });
  test('the same key again is answered once; a partner’s key of the same name is another key', async () => {
    const { id } = await pay({ number: CARD.settlesAtOnce });
    const key = `double-click-${++drawn}`;
    const answers = await Promise.allSettled([
      byStaff({ paymentId: id, amountCents: 1_000 }, key),
      byStaff({ paymentId: id, amountCents: 1_000 }, key),
    ]);
    expect(answers.filter(({ status }) => status === 'fulfilled').length).toBeGreaterThan(0);
    expect((await byStaff({ paymentId: id, amountCents: 1_000 }, key)).amountCents).toBe(1_000);
    expect((await read(id)).refundedAmountCents).toBe(1_000);
    expect(await refused(byStaff({ paymentId: id, amountCents: 2_000 }, key))).toMatchObject({ code: 'IDEMPOTENCY_MISMATCH' });
    expect((await client.refund(id, { amountCents: 500 }, { key })).status).toBe(200);
    expect((await read(id)).refundedAmountCents).toBe(1_500);
  });
  test('the rules are the partner’s: amounts, state, words', async () => {
    const { id } = await pay({ number: CARD.settlesAtOnce });
    expect(await refused(byStaff({ paymentId: id, amountCents: 10_001 }))).toMatchObject({ code: 'INVALID_STATE' });
    expect(await refused(byStaff({ paymentId: id, amountCents: 0 }))).toMatchObject({ code: 'VALIDATION_ERROR' });
    expect(await refused(byStaff({ paymentId: id, reason: ' ' }))).toMatchObject({ code: 'VALIDATION_ERROR' });
    expect(await refused(byStaff({ paymentId: id, reason: 'card 4242 4242 4242 4242' }))).toMatchObject({ code: 'VALIDATION_ERROR' });
    expect(await refused(byStaff({ paymentId: id, by: '' }))).toMatchObject({ code: 'VALIDATION_ERROR' });
    expect(await refused(byStaff({ paymentId: '018f0000-0000-7000-8000-00000000dead' }))).toMatchObject({ code: 'PAYMENT_NOT_FOUND' });
    await expect(byStaff({ paymentId: id, operation: 'void' })).rejects.toMatchObject({
      code: 'VOID_FAILED',
      details: { suggestedAction: 'refund' },
    });
    expect((await read(id)).refundedAmountCents).toBe(0);
  });
  test('staff and partner at the same time return no more than there is', async () => {
    const { id } = await pay({ number: CARD.settlesAtOnce });
    // The one that comes second is refused.
    await Promise.allSettled([byStaff({ paymentId: id, amountCents: 6_000 }), client.refund(id, { amountCents: 6_000 })]);
    expect((await read(id)).refundedAmountCents).toBe(6_000);
  });
});

describe('disputes', () => {
  const dispute = (change: Partial<Parameters<typeof openDispute>[2]> = {}) => ({
    disputeId: service.services.ids.uuid(),
    status: 'debited' as const,
    stage: 'chargeback',
    reasonCode: '10.4',
    reason: 'not recognised',
    disputedAmountCents: 4_000,
    openedOn: new Date(service.clock.now()).toISOString().slice(0, 10),
    dueDate: new Date(service.clock.now() + 19 * 86_400_000).toISOString().slice(0, 10),
    ...change,
  });
  const owner = () => staff('Dana', service.services.ids.uuid());
  const open = (id: string, change: Parameters<typeof dispute>[0] = {}) => openDispute(service.services.payments.ports, id, dispute(change), owner());
  const update = (disputeId: string, change: { status?: 'debited' | 'in_dispute' | 'lost' | 'recovered'; stage?: string }) =>
    updateDispute(
      service.services.payments.ports,
      service.services.settlement.register,
      disputeId,
      { status: null, stage: null, ...change },
      owner(),
    );
  const disputedEvents = async (id: string) => (await history(id)).filter((type) => type === 'PaymentDisputed').length;

  test('a disputed amount cannot be refunded, a recovered one can again; the status never changes (C30)', async () => {
    const { id } = await pay({ number: CARD.settlesAtOnce });
    const { disputeId } = await open(id);
    expect((await client.refund(id, { amountCents: 6_301 })).message).toMatch(/: 6000 cents remain$/);
    expect((await client.refund(id, { amountCents: 6_000 })).status).toBe(200);
    await update(disputeId, { status: 'lost', stage: 'arbitration' });
    expect((await client.refund(id, { amountCents: 1_000 })).message).toMatch(/: 0 cents remain/);
    await update(disputeId, { status: 'recovered' });
    expect((await client.refund(id, { feeType: 'include_fee' })).data.remainingRefundableAmountCents).toBe(0);
    expect(await disputedEvents(id)).toBe(3);
    expect(await read(id)).toMatchObject({ status: 'refunded' });
  });
  test('several disputes of one payment add up; one after a full refund is recorded all the same; a void is refused', async () => {
    const { id } = await pay();
    await open(id, { disputedAmountCents: 5_000 });
    await open(id, { disputedAmountCents: 5_300 });
    expect((await client.refund(id, { amountCents: 1 })).message).toMatch(/0 cents remain/);
    expect((await client.void(id)).code).toBe('INVALID_STATE');
    const refunded = await pay({ number: CARD.settlesAtOnce });
    await client.refund(refunded.id, { feeType: 'include_fee' });
    await open(refunded.id, { disputedAmountCents: 10_300 });
    expect(await disputedEvents(refunded.id)).toBe(1);
    expect(await read(refunded.id)).toMatchObject({ status: 'refunded' });
  });
  test('no change, no event; the same id again opens no second dispute', async () => {
    const { id } = await pay();
    const disputeId = service.services.ids.uuid();
    await open(id, { disputeId });
    await open(id, { disputeId });
    await update(disputeId, { status: 'debited' });
    expect(await disputedEvents(id)).toBe(1);
    expect(await refused(open(id, { disputeId, disputedAmountCents: 1 }))).toMatchObject({ code: 'INVALID_STATE' });
  });
  test.each([
    ['an unknown payment', () => open('018f0000-0000-7000-8000-00000000dead'), 'PAYMENT_NOT_FOUND'],
    ['more than was captured', async () => open((await pay()).id, { disputedAmountCents: 10_301 }), 'VALIDATION_ERROR'],
    ['nothing', async () => open((await pay()).id, { disputedAmountCents: 0 }), 'VALIDATION_ERROR'],
    ['a status that is none', async () => open((await pay()).id, { status: 'won' as 'lost' }), 'VALIDATION_ERROR'],
    ['a stage of 65 characters', async () => open((await pay()).id, { stage: 'x'.repeat(65) }), 'VALIDATION_ERROR'],
    ['a day that is none', async () => open((await pay()).id, { openedOn: '2026-02-30' }), 'VALIDATION_ERROR'],
    ['due before it was opened', async () => open((await pay()).id, { dueDate: '2020-10-31' }), 'VALIDATION_ERROR'],
    ['a card number', async () => open((await pay()).id, { reason: '4242424242424242' }), 'VALIDATION_ERROR'],
    ['a dispute that was never opened', () => update(service.services.ids.uuid(), { status: 'lost' }), 'VALIDATION_ERROR'],
  ] as const)('%s is refused', async (_, work, code) => {
    expect(await refused(work())).toMatchObject({ code });
  });
});

describe('resolving what recovery must not (C29, C69)', () => {
  const resolve = (paymentId: string, change: Partial<ResolveRequest> = {}) =>
    resolvePayment(service.services.payments.ports, service.services.settlement.register, {
      paymentId,
      as: 'succeeded',
      evidence: 'statement of 2026-11-20',
      by: 'Dana',
      force: false,
      transactions: {},
      ...change,
    });
  const unknown = async (number: string = CARD.unreadable, portal = separate) => {
    const answer = await client.create(paymentOf(portal, { number }));
    expect(answer.status).toBe(504);
    return answer.details!.id as string;
  };
  /** The charge as the processor has it. */
  const chargeAtBank = async (id: string) => {
    const { payment } = await service.services.payments.ports.streams.load(id);
    if (payment.phase === 'none' || payment.phase === 'abandoned') throw new Error('no payment');
    const [leg] = payment.terms.legs;
    const charge = (await service.simulator.truth()).find(({ ref }) => ref === leg!.references.charge);
    return { ...charge!, account: leg!.account, leg: leg!.leg };
  };
  /** A refund that a person makes at the processor, without Payfold. Resolves to its transaction id. */
  const returnByHand = async (id: string, amountCents?: number): Promise<string> => {
    const { account, leg, transactionId, ...charge } = await chargeAtBank(id);
    const ref = `hand${service.services.ids.uuid().replaceAll('-', '').slice(0, 16)}`;
    const begunAt = new Date(service.clock.now()).toISOString();
    const call = { ref, leg, account, begunAt, chargeTransactionId: transactionId!, amountCents: amountCents ?? charge.amountCents!, last4: '4242' };
    const outcome = await service.services.payments.ports.gateways.find(account)!.refund(call, AbortSignal.timeout(20_000));
    if (outcome.kind !== 'approved') throw new Error(JSON.stringify(outcome));
    return outcome.txn.transactionId;
  };
  describe('a transaction that staff name is looked up at the gateway (C75), also with --force', () => {
    test('for succeeded: unknown, of another payment, of another amount, or no charge is refused; the right one is taken', async () => {
      const id = await unknown(CARD.unresolvable, combined);
      const other = await client.create(paymentOf(combined, { number: CARD.approved }));
      const dearer = await client.create(paymentOf(combined, { number: CARD.settlesAtOnce, lines: [20_000] }));
      const refund = await returnByHand(dearer.data.id, 10_300);
      const named = (combined: string) => refused(resolve(id, { force: true, transactions: { combined } }));
      expect((await named('ch_nobody_knows'))?.message).toContain('is unknown to the gateway');
      expect((await named((await chargeAtBank(other.data.id)).transactionId!))?.message).toContain('belongs to another payment');
      expect((await named((await chargeAtBank(dearer.data.id)).transactionId!))?.message).toMatch(/has \d+ cents, the combined leg has 10300/);
      expect((await named(refund))?.message).toContain('is a refund, not a charge');
      expect(await refused(resolve(id, { force: true, transactions: { fee: 'ch_x' } }))).toMatchObject({ code: 'VALIDATION_ERROR' });
      expect(await client.status(id)).toBe('unknown');
      const { transactionId } = await chargeAtBank(id);
      expect(await resolve(id, { force: true, transactions: { combined: transactionId! } })).toMatchObject({ gateway: { transactionId } });
    });
    test('for voided: a return of another charge, of another amount, or a charge is refused; the right one is taken', async () => {
      const id = await unknown(CARD.unreadable, combined);
      const other = await client.create(paymentOf(combined, { number: CARD.settlesAtOnce }));
      await service.simulator.closeBatches();
      await service.recover(id);
      const named = (combined: string) => refused(resolve(id, { as: 'voided', force: true, transactions: { combined } }));
      expect((await named('rf_nobody_knows'))?.message).toContain('is unknown to the gateway');
      expect((await named(await returnByHand(other.data.id)))?.message).toContain('returns another charge');
      expect((await named((await chargeAtBank(id)).transactionId!))?.message).toContain('is a charge, not a refund');
      expect((await named(await returnByHand(id, 300)))?.message).toContain('has 300 cents');
      expect(await client.status(id)).toBe('unknown');
      await record();
    });
    test('a gateway that cannot be asked: only by force, and the event says that the transaction was not checked', async () => {
      const id = await unknown(CARD.unresolvable, combined);
      const { transactionId } = await chargeAtBank(id);
      await service.bank.stop();
      try {
        expect(await refused(resolve(id, { transactions: { combined: transactionId! } }))).toMatchObject({ code: 'INVALID_STATE' });
        await resolve(id, { force: true, transactions: { combined: transactionId! } });
      } finally {
        await service.bank.start();
      }
      expect((await service.services.payments.ports.streams.events(id)).at(-1)).toMatchObject({
        data: { forced: true, evidence: expect.stringContaining(`${transactionId} was not checked at the gateway`) },
      });
    });
  });
  test('as succeeded where the gateway shows the charge: charged, refundable, and recovery leaves it alone', async () => {
    const id = await unknown(CARD.unreadable, combined);
    expect(await resolve(id)).toMatchObject({ status: 'succeeded', capturedAmountCents: 10_300, confirmationNumber: expect.any(String) });
    await service.recover(id);
    expect(await read(id)).toMatchObject({ status: 'succeeded' });
    expect((await client.refund(id, { feeType: 'include_fee' })).data.amountCents).toBe(10_300);
  });
  test('as succeeded where a leg was never charged: refused', async () => {
    const id = await unknown();
    expect(await refused(resolve(id))).toEqual({
      code: 'INVALID_STATE',
      message: 'The gateway shows the fee leg as never charged; the payment cannot be resolved as succeeded.',
    });
    expect(await client.status(id)).toBe('unknown');
  });
  test.each(['succeeded', 'voided', 'failed'] as const)(
    'refused as %s, it changes nothing at the gateway: recovery still undoes the charge',
    async (as) => {
      const id = await unknown();
      expect(await refused(resolve(id, { as }))).toMatchObject({ code: 'INVALID_STATE' });
      expect(await refused(resolve(id, { as, force: true }))).toMatchObject({ code: 'INVALID_STATE' });
      await service.recover(id);
      expect(await client.status(id)).toBe('voided');
      const { payment } = await service.services.payments.ports.streams.load(id);
      if (payment.phase !== 'voided') throw new Error('not voided');
      const charge = (await service.simulator.truth()).find(({ ref }) => ref === payment.terms.legs[0]!.references.charge);
      expect([charge?.amountCents, charge?.voidedCents]).toEqual([10_000, 10_000]);
    },
  );
  test('a settled principal without a charged fee: as voided, by force, with the transaction that returned it', async () => {
    const id = await unknown();
    await service.simulator.closeBatches();
    await service.recover(id);
    expect(await tasksOf(id)).toEqual(['charge_cannot_be_undone']);
    for (const as of ['succeeded', 'voided', 'failed'] as const)
      expect(await refused(resolve(id, { as, force: true }))).toMatchObject({ code: 'INVALID_STATE' });
    const transactions = { principal: await returnByHand(id) };
    expect(await refused(resolve(id, { as: 'voided', transactions }))).toMatchObject({ code: 'INVALID_STATE' });
    expect(await resolve(id, { as: 'voided', force: true, transactions })).toMatchObject({ status: 'voided', capturedAmountCents: 0 });
    const last = (await service.services.payments.ports.streams.events(id)).at(-1)!;
    expect(last).toMatchObject({
      type: 'PaymentResolved',
      data: { forced: true, evidence: expect.stringContaining(`principal returned by ${transactions.principal}`) },
    });
    await record();
  });
  test('as voided or failed where the charge stands: refused', async () => {
    const id = await unknown(CARD.unreadable, combined);
    for (const as of ['voided', 'failed'] as const) expect(await refused(resolve(id, { as }))).toMatchObject({ code: 'INVALID_STATE' });
    expect(await client.status(id)).toBe('unknown');
  });
  test('as voided where nothing was ever charged, and nothing can be any more', async () => {
    const id = await unknown(CARD.neverReached);
    expect(await refused(resolve(id))).toMatchObject({ code: 'INVALID_STATE' });
    expect(await resolve(id, { as: 'voided' })).toMatchObject({ status: 'voided', capturedAmountCents: 0 });
  });
  test('the gateway cannot tell: refused, unless forced; a forced success names its transactions and is an alarm', async () => {
    const id = await unknown(CARD.unresolvable, combined);
    expect((await refused(resolve(id)))?.message).toMatch(/cannot tell about the combined leg.*--force/);
    expect(await refused(resolve(id, { force: true }))).toMatchObject({ code: 'VALIDATION_ERROR' });
    const { transactionId } = await chargeAtBank(id);
    expect(await resolve(id, { force: true, transactions: { combined: transactionId! } })).toMatchObject({
      status: 'succeeded',
      gateway: { transactionId },
    });
    expect(service.logLines().some(({ level, paymentId, msg }) => level >= 50 && paymentId === id && msg.includes('by force'))).toBe(true);
  });
  test('the gateway cannot tell, and a batch has settled it: a decision against that money is refused, also by force; its exception settles with it', async () => {
    const id = await unknown(CARD.unresolvable, combined);
    await settle();
    const [exception] = await exceptionsOf(id);
    const settles = () =>
      changeException(
        service.services.settlement,
        exception!.exceptionId,
        { type: 'Resolve', resolution: 'settles', portalId: null, feeCents: 0, reason: 'ours', by: 'Dana' },
        staff('Dana', 'spec'),
      );
    // Each round opens a limited number of exceptions, and earlier tests have left more.
    while ((await service.services.openExceptions()) > 0);
    for (const as of ['voided', 'failed'] as const)
      expect((await refused(resolve(id, { as, force: true })))?.message).toContain(
        `A batch has settled the combined leg (${exception!.transactionId})`,
      );
    expect((await refused(settles()))?.message).toContain('Nothing of the payment stands here as unsettled');
    // The settled line supplies the transaction id that the gateway could not give.
    expect(await resolve(id, { force: true })).toMatchObject({ status: 'succeeded', gateway: { transactionId: exception!.transactionId } });
    await settles();
  });
  test('the gateway cannot be reached: refused, and the payment stays as it was', async () => {
    const id = await unknown(CARD.unreadable, combined);
    await service.bank.stop();
    try {
      expect(await refused(resolve(id))).toMatchObject({ code: 'INVALID_STATE' });
    } finally {
      await service.bank.start();
    }
    expect(await client.status(id)).toBe('unknown');
    expect(await resolve(id)).toMatchObject({ status: 'succeeded' });
  });
  test('a payment that is not unknown cannot be resolved', async () => {
    const { id } = await pay();
    expect(await refused(resolve(id))).toMatchObject({ code: 'INVALID_STATE' });
    expect(await refused(resolve('018f0000-0000-7000-8000-00000000dead'))).toMatchObject({ code: 'PAYMENT_NOT_FOUND' });
    expect(await refused(resolve(id, { evidence: '' }))).toMatchObject({ code: 'VALIDATION_ERROR' });
  });
  test('resolve beside recovery: one of them decides, and the bank agrees', async () => {
    const id = await unknown(CARD.unreadable, combined);
    await Promise.allSettled([resolve(id), service.recover(id)]);
    const { status } = await read(id);
    const truth = (await service.simulator.truth()).filter(({ op, fixture, amountCents }) => op === 'charge' && fixture === 'unreadable' && amountCents === 10_300).at(-1)!; // prettier-ignore
    expect([status, truth.voidedCents]).toEqual(status === 'succeeded' ? ['succeeded', 0] : ['voided', 10_300]);
  });
});

describe('a return that was made at the page of the processor', () => {
  type Charge = Extract<Awaited<ReturnType<typeof service.services.payments.ports.streams.load>>['payment'], { phase: 'charged' }>;
  const legsOf = async (id: string) => ((await service.services.payments.ports.streams.load(id)).payment as Charge).legs;
  /** Somebody returns the money of a leg, under a reference that is not ours. */
  const elsewhere = async (id: string, operation: 'void' | 'refund', legs: readonly string[] = ['principal', 'fee']) => {
    for (const { leg, account, transactionId, principalCents, feeCents } of await legsOf(id)) {
      if (!legs.includes(leg)) continue;
      const begunAt = new Date(service.clock.now()).toISOString();
      const call = { ref: `dashboard-${++drawn}`, leg, account, begunAt, chargeTransactionId: transactionId, amountCents: principalCents + feeCents };
      const gateway = service.services.payments.ports.gateways.find(account)!;
      const { kind } = await (operation === 'void'
        ? gateway.void({ ...call, askedBy: 'reversal' }, soon())
        : gateway.refund({ ...call, last4: '4242' }, soon()));
      expect(kind).toBe('approved');
    }
  };
  const found = async (id: string) => (await exceptionsOf(id)).filter(({ kind }) => kind === 'RETURNED_ELSEWHERE');
  const openOnes = async () => {
    while ((await service.services.openExceptions()) > 0);
    await service.services.settlement.register.caughtUp();
  };
  const adopt = async (exceptionId: string) => {
    await openOnes();
    const change = { type: 'Resolve', resolution: 'adopt', reason: 'seen on the page', by: 'Dana', portalId: null, feeCents: 0 } as const;
    return changeException(service.services.settlement, exceptionId, change, staff('Dana', service.services.ids.uuid()));
  };
  const told = async (id: string) =>
    (await service.services.payments.ports.streams.events(id)).flatMap((event) => notificationOf(id, paymentEvents.read(event), '') ?? []);
  const money = async () => {
    const cents = await booksOf(service.services);
    return [/suspense/, /:unsettled$/, /:payable$/, /^revenue:/].map(cents);
  };
  const statesOf = async (id: string) => {
    await openOnes();
    const { rows } = await service.services.pool.query<{ status: string }>('select status from settlement_case where payment_id = $1', [id]);
    return [...new Set(rows.map(({ status }) => status))];
  };
  const byRound = async () => {
    service.clock.advance(25 * 3_600_000);
    await record();
  };

  test.each([
    ['the round', null],
    ['our refund that is refused', 'INVALID_STATE'],
    ['our void that is refused', 'VOID_FAILED'],
  ])(
    'a void, found by %s: adopted for both legs, shown as voided, told once, and the books are as before the charge',
    async (_, code) => {
      const before = await money();
      const { id } = await pay();
      await elsewhere(id, 'void');
      if (code === null) await byRound();
      else expect((await (code === 'VOID_FAILED' ? client.void(id) : client.refund(id))).code).toBe(code);
      const exceptions = await found(id);
      expect(exceptions).toHaveLength(code === null ? 2 : 1);
      const blocked = {
        status: 422,
        code: 'INVALID_STATE',
        message: expect.stringContaining('money was returned at the processor; staff must record it'),
      };
      for (const again of [await client.void(id), await client.refund(id)]) expect(again).toMatchObject(blocked);
      expect(await read(id)).toMatchObject({ status: 'succeeded', refundedAmountCents: 0 });
      await Promise.allSettled(exceptions.map(({ exceptionId }) => adopt(exceptionId)));
      expect(await read(id)).toMatchObject({ status: 'voided', refundedAmountCents: 10_300, remainingRefundableAmountCents: 0 });
      expect(await told(id)).toMatchObject([{ type: 'payment.refunded', data: { amountCents: 10_300, reversalType: 'void', initiatedBy: 'staff' } }]);
      expect((await history(id)).filter((type) => type === 'PaymentVoided')).toHaveLength(2);
      expect((await statesOf(id)).filter((status) => status !== 'resolved' && status !== 'superseded')).toEqual([]);
      expect(await money()).toEqual(before);
    },
    120_000,
  );

  test('a refund of the fee: adopted as FeeRefunded, with its line in the batch', async () => {
    const { id } = await pay();
    await settle();
    const before = await money();
    await elsewhere(id, 'refund', ['fee']);
    await settle();
    await openOnes();
    await record();
    const [exception, ...more] = await found(id);
    expect(more).toEqual([]);
    await adopt(exception!.exceptionId);
    expect((await history(id)).slice(-4)).toEqual(['RefundRequested', 'FeeRefunded', 'ReversalEnded', 'ReturnedElsewhere']);
    expect(await read(id)).toMatchObject({ status: 'partially_refunded', refundedAmountCents: 300, remainingRefundableAmountCents: 10_000 });
    expect(await told(id)).toMatchObject([{ type: 'payment.refunded', data: { amountCents: 300, initiatedBy: 'staff' } }]);
    const [suspense, unsettled, payable, revenue] = before as [number, number, number, number];
    expect(await money()).toEqual([suspense, unsettled, payable, revenue + 300]);
    expect(await client.refund(id, { feeType: 'include_fee' })).toMatchObject({ status: 200, data: { amountCents: 10_000 } });
  }, 120_000);
});

test('metrics show open exceptions by kind, the age of the last batch, and the age of the oldest money without a batch', async () => {
  const { services } = service;
  const { shared, own } = createMetrics(services);
  while ((await services.openExceptions()) > 0);
  await pay();
  await settle();
  await services.settlement.register.caughtUp();
  const { rows } = await services.pool.query<{ kind: string; count: number }>(
    `select kind, count(*)::int as count from settlement_case where status not in ('resolved', 'superseded') group by kind`,
  );
  const settled = await figuresOf(shared);
  const exceptions = [...settled].filter(
    ([name, count]) => name.startsWith('payfold_settlement_exceptions{') && name.includes('"count"') && count > 0,
  );
  expect(exceptions.length).toBeGreaterThan(3);
  expect(new Map(exceptions)).toEqual(
    new Map(rows.map(({ kind, count }) => [`payfold_settlement_exceptions{kind="${kind}",figure="count"}`, count])),
  );
  expect(settled.get('payfold_settlement_exceptions{kind="LATE",figure="count"}')).toBe(0);
  expect(settled.get('payfold_settlement_waiting_seconds')).toBe(0);
  expect(
    (await figuresOf(own)).get('payfold_gateway_call_duration_seconds_count{gateway="simulator",operation="settlements",outcome="listed"}'),
  ).toBeGreaterThan(0);

  const { id } = await pay();
  await services.settlement.register.caughtUp();
  // The clock of this service runs ahead of the database's.
  const hoursAgo = (hours: number) => new Date(service.clock.now() - hours * 3_600_000).toISOString();
  await services.pool.query('update settlement_batch set recorded_at = $1 where listed_position is not null', [hoursAgo(40)]);
  await services.pool.query('update gateway_transaction set moved_at = $2 where payment_id = $1', [id, hoursAgo(39)]);
  await services.pool.query(`update settlement_case set opened_at = $1 where kind = 'MISSING_HERE'`, [hoursAgo(38)]);
  const waiting = await figuresOf(shared);
  expect(Math.floor(waiting.get('payfold_settlement_last_batch_seconds')! / 3_600)).toBe(40);
  expect(Math.floor(waiting.get('payfold_settlement_waiting_seconds')! / 3_600)).toBe(39);
  expect(Math.floor(waiting.get('payfold_settlement_exceptions{kind="MISSING_HERE",figure="oldest_seconds"}')! / 3_600)).toBe(38);
});
