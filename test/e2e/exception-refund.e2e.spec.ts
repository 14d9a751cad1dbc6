/**
 * `settlement exceptions resolve --as refund --send`: money that a batch settled goes back to the card exactly once, also in races and after crashes.
 */
import { randomBytes } from 'node:crypto';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import type { ServiceError } from '#kernel';
import { type PaymentGateway, resolvePayment, type ResolveRequest, Secret, staff } from '#payments';
import { changeException, createRefundRecovery, type ExceptionRow, recordSettlements, sendRefund, type SettlementPorts } from '#settlement';
import { crockford } from '#platform';
import { eventually } from '../support/eventually.js';
import { CARD, type Client, paymentOf, type Service, startService } from '../support/service.js';
import { type SettlementDesk, settlementDesk } from '../support/settlement.js';

let service: Service;
let desk: SettlementDesk;
let client: Client;
let combined: string;
let separate: string;
beforeAll(async () => {
  service = await startService();
  desk = settlementDesk(service);
  const partner = await service.account();
  client = partner.client;
  separate = await service.portal(partner, { fee: { flatCents: 300 } });
  combined = await service.portal(partner, { fee: { flatCents: 300, chargeMode: 'combined' } });
});
afterAll(async () => {
  desk.close();
  await service.stop();
});

const origin = () => staff('Dana', service.services.ids.uuid());
const settle = async () => {
  await service.simulator.closeBatches();
  await recordSettlements(service.services.settlement, AbortSignal.timeout(20_000));
};
const send = (exceptionId: string, ports: SettlementPorts = service.services.settlement) =>
  sendRefund(ports, { exceptionId, reason: 'settled, but unknown here', by: 'Dana', last4: null }, origin());
const resolve = (paymentId: string, change: Partial<ResolveRequest> = {}) =>
  resolvePayment(service.services.payments.ports, service.services.settlement.register, {
    paymentId,
    as: 'succeeded',
    evidence: 'statement',
    by: 'Dana',
    force: true,
    transactions: {},
    ...change,
  });
const refused = (work: Promise<unknown>) =>
  work.then(
    () => null,
    ({ code, message }: ServiceError) => ({ code, message }),
  );
const history = async (stream: string) => {
  const types: string[] = [];
  for await (const { type } of service.services.store.read(stream)) types.push(type);
  return types;
};
/** A payment with an unknown outcome that a batch has settled, with the exceptions of its lines. */
const settledWhileUnknown = async (portal = combined): Promise<{ id: string; exceptions: ExceptionRow[] }> => {
  const answer = await client.create(paymentOf(portal, { number: portal === combined ? CARD.unresolvable : CARD.unreadable }));
  const id = answer.details!.id as string;
  await settle();
  return { id, exceptions: (await desk.exceptions()).filter(({ paymentId }) => paymentId === id) };
};
/** The charge of an unknown payment's first leg, as the processor has it. */
const chargeOf = async (paymentId: string) => {
  const { payment } = await service.services.payments.ports.streams.load(paymentId);
  if (payment.phase !== 'unknown') throw new Error(`the payment is ${payment.phase}`);
  return (await service.simulator.truth()).find(({ ref }) => ref === payment.terms.legs[0]!.references.charge)!;
};
const refundsOf = async (charge: string) =>
  (await service.simulator.truth()).filter(
    ({ op, chargeTransactionId, result }) => op === 'refund' && chargeTransactionId === charge && result === 'approved',
  );
/** Settlement ports whose gateway does this instead of a refund. */
const instead = (
  refund: (real: PaymentGateway, ...call: Parameters<PaymentGateway['refund']>) => ReturnType<PaymentGateway['refund']>,
  finalize?: PaymentGateway['finalize'],
): SettlementPorts => {
  const { settlement } = service.services;
  const find: SettlementPorts['payments']['gateways']['find'] = (account) => {
    const real = settlement.payments.gateways.find(account);
    if (!real) return real;
    const isRefund = (call: Parameters<PaymentGateway['finalize']>) => call[0].op === 'refund';
    return {
      ...real,
      refund: (...call) => refund(real, ...call),
      finalize: (...call) => (finalize && isRefund(call) ? finalize(...call) : real.finalize(...call)),
    };
  };
  return { ...settlement, payments: { ...settlement.payments, gateways: { find } } };
};
const MINUTE_MS = 60_000;
/** Lets recovery, of this spec or of the worker, end the refund. */
const recovered = async (exceptionId: string, type = 'ExceptionResolved') => {
  service.clock.advance(MINUTE_MS + 1_000);
  await desk.exceptions();
  await createRefundRecovery(service.services.settlement, service.services.pool).round();
  await eventually(async () => (await history(`exception-${exceptionId}`)).includes(type));
};

describe('a sale that settled while its payment was unknown', () => {
  test('goes back once: the payment is voided, its own line is MATCHED, suspense and unsettled end at 0', async () => {
    const before = await desk.booked();
    const { id, exceptions } = await settledWhileUnknown();
    const [exception] = exceptions;
    expect(exceptions).toMatchObject([{ kind: 'STATUS_MISMATCH', suspenseCents: 10_300 }]);
    const sent = await send(exception!.exceptionId);
    expect(sent).toMatchObject({ status: 'resolved', amountCents: 10_300, paymentId: id, transactionId: expect.stringMatching(/^rf_/) });
    expect(await client.status(id)).toBe('voided');
    expect((await history(`payment-${id}`)).slice(-2)).toEqual(['ReturnRequested', 'PaymentResolved']);
    expect(await history(`exception-${exception!.exceptionId}`)).toEqual([
      'ExceptionOpened',
      'ExceptionRefundRequested',
      'ExceptionRefundEnded',
      'ExceptionResolved',
    ]);
    await settle();
    expect((await desk.exceptions()).filter(({ transactionId }) => transactionId === sent.transactionId)).toEqual([]);
    const { rows } = await service.services.pool.query<{ settled_batch_id: string | null; brand: string; last4: string }>(
      'select settled_batch_id, brand, last4 from gateway_transaction where transaction_id = $1',
      [sent.transactionId],
    );
    expect(rows).toEqual([{ settled_batch_id: expect.stringMatching(/^bat_/), brand: 'visa', last4: CARD.unresolvable.slice(-4) }]);
    const after = await desk.booked();
    for (const account of ['liabilities:suspense', `assets:processor:${exception!.merchantAccount}:unsettled`])
      expect([account, after(account)]).toEqual([account, before(account)]);
    expect(await refundsOf(exception!.transactionId!)).toHaveLength(1);
  });

  test('after the intent nothing else ends it: resolve as succeeded and other resolutions are refused', async () => {
    const { id, exceptions } = await settledWhileUnknown();
    const { exceptionId, transactionId } = exceptions[0]!;
    let during: (ReturnType<typeof refused> extends Promise<infer T> ? T : never)[] = [];
    await send(
      exceptionId,
      instead(async (real, ...call) => {
        const adopt = { type: 'Resolve', resolution: 'adopt', portalId: combined, feeCents: 0, reason: 'x', by: 'Robin' } as const;
        during = [
          await refused(resolve(id)),
          await refused(changeException(service.services.settlement, exceptionId, adopt, origin())),
          await refused(changeException(service.services.settlement, exceptionId, { ...adopt, resolution: 'refund', portalId: null }, origin())),
          await refused(send(exceptionId)),
        ];
        return real.refund(...call);
      }),
    );
    expect(during.map((one) => one?.code)).toEqual(Array(4).fill('INVALID_STATE'));
    expect(during[0]!.message).toContain('cannot be resolved as succeeded any more');
    expect(await refundsOf(transactionId!)).toHaveLength(1);
    expect(await client.status(id)).toBe('voided');
  });

  test('raced with resolve as succeeded, and with itself: either the charge stands or it went back, never both', async () => {
    await settle();
    const before = await desk.booked();
    for (let round = 0; round < 6; round++) {
      const { id, exceptions } = await settledWhileUnknown();
      const { exceptionId, transactionId } = exceptions[0]!;
      const pause = () => new Promise((done) => setTimeout(done, round % 3 === 0 ? 0 : 15));
      const charge = () => resolve(id);
      const back = () => send(exceptionId);
      const racing = round % 2 === 0 ? [charge, back, back] : [back, charge, back];
      await Promise.all(racing.map(async (work, index) => (await (index === 0 ? undefined : pause()), refused(work()))));
      const status = await client.status(id);
      expect([status, (await refundsOf(transactionId!)).length]).toEqual(status === 'voided' ? ['voided', 1] : ['succeeded', 0]);
      const settles = { type: 'Resolve', resolution: 'settles', portalId: null, feeCents: 0, reason: 'ours', by: 'Dana' } as const;
      if (status === 'succeeded') await changeException(service.services.settlement, exceptionId, settles, origin());
    }
    await settle();
    const after = await desk.booked();
    for (const account of ['liabilities:suspense', `assets:processor:agency-${combined}:unsettled`])
      expect([account, after(account)]).toEqual([account, before(account)]);
  });

  test.each([
    ['before the refund reaches the gateway', 'ExceptionRefundEnded', 0],
    ['after the gateway has executed it', 'ExceptionResolved', 1],
  ] as const)('the command dies %s: recovery ends it, and sends nothing', async (_, type, refunds) => {
    const { id, exceptions } = await settledWhileUnknown();
    const { exceptionId, transactionId } = exceptions[0]!;
    let [reached, die] = [() => {}, (_: Error) => {}];
    const there = new Promise<void>((done) => (reached = done));
    void send(
      exceptionId,
      instead(async (real, ...call) => {
        if (refunds > 0) await real.refund(...call);
        reached();
        return new Promise((_, reject) => (die = reject));
      }),
    ).catch(() => undefined);
    await there;
    await recovered(exceptionId, type);
    die(new Error('killed'));
    expect(await refundsOf(transactionId!)).toHaveLength(refunds);
    expect(await client.status(id)).toBe(refunds > 0 ? 'voided' : 'unknown');
    // Nothing went back: the exception is free, and the next command sends.
    if (refunds === 0) await send(exceptionId);
    expect(await refundsOf(transactionId!)).toHaveLength(1);
    expect(await client.status(id)).toBe('voided');
  });

  test('the command dies after the outcome was recorded: recovery voids the payment and resolves the exception', async () => {
    const { id, exceptions } = await settledWhileUnknown();
    const { exceptionId } = exceptions[0]!;
    const { settlement } = service.services;
    const dying = { ...settlement, register: { ...settlement.register, caughtUp: () => Promise.reject(new Error('killed')) } };
    await expect(send(exceptionId, dying)).rejects.toThrow('killed');
    expect([await client.status(id), (await history(`exception-${exceptionId}`)).at(-1)]).toEqual(['unknown', 'ExceptionRefundEnded']);
    await recovered(exceptionId);
    expect(await client.status(id)).toBe('voided');
  });

  test('between the outcome and its end, a person cannot resolve the exception in the books only', async () => {
    const { id, exceptions } = await settledWhileUnknown();
    const { exceptionId } = exceptions[0]!;
    const { settlement } = service.services;
    const dying = { ...settlement, register: { ...settlement.register, caughtUp: () => Promise.reject(new Error('killed')) } };
    await expect(send(exceptionId, dying)).rejects.toThrow('killed');
    const refund = { type: 'Resolve', resolution: 'refund', portalId: null, feeCents: 0, reason: 'x', by: 'Robin' } as const;
    expect(await refused(changeException(settlement, exceptionId, refund, origin()))).toMatchObject({ code: 'INVALID_STATE' });
    await recovered(exceptionId);
    expect(await client.status(id)).toBe('voided');
  });

  test('a gateway that cannot tell is asked again after the pauses of recovery; the line of the refund in a batch ends the attempt', async () => {
    await settle();
    const before = await desk.booked();
    const { id, exceptions } = await settledWhileUnknown();
    const { exceptionId, transactionId } = exceptions[0]!;
    let asked = 0;
    const deaf = instead(
      async (real, ...call) => {
        // The worker of this service asks, too.
        await service.simulator.arm({ match: { call: 'finalize', ref: call[0].ref }, times: null, effect: false, answer: 'cut' });
        await real.refund(...call);
        return { kind: 'unknown', cause: 'disconnected' };
      },
      async () => (asked++, { kind: 'cannot_tell', why: 'unreachable' }),
    );
    expect(await refused(send(exceptionId, deaf))).toMatchObject({ code: 'PAYMENT_TIMEOUT' });
    const recovery = createRefundRecovery(deaf, service.services.pool);
    service.clock.advance(MINUTE_MS + 1_000);
    await desk.exceptions();
    asked = 0;
    for (let round = 0; round < 3; round++) await recovery.round();
    expect(asked).toBe(1);
    service.clock.advance(60 * MINUTE_MS);
    await recovery.round();
    expect(asked).toBe(2);
    await settle();
    const line = (await desk.exceptions()).find(({ kind, suspenseCents }) => kind === 'STATUS_MISMATCH' && suspenseCents === -10_300)!;
    service.clock.advance(60 * MINUTE_MS);
    await recovery.round();
    expect(await client.status(id)).toBe('voided');
    expect(await refundsOf(transactionId!)).toHaveLength(1);
    const refund = { type: 'Resolve', resolution: 'refund', portalId: null, feeCents: 0, reason: 'its line', by: 'Dana' } as const;
    await changeException(service.services.settlement, line.exceptionId, refund, origin());
    await service.simulator.clearFaults();
    const after = await desk.booked();
    for (const account of ['liabilities:suspense', `assets:processor:${line.merchantAccount}:unsettled`])
      expect([account, after(account)]).toEqual([account, before(account)]);
  });

  test('an answer that is lost: the gateway is asked at once, and the refund counts', async () => {
    const { id, exceptions } = await settledWhileUnknown();
    const lost = instead(async (real, ...call) => (await real.refund(...call), { kind: 'unknown', cause: 'disconnected' }));
    expect(await send(exceptions[0]!.exceptionId, lost)).toMatchObject({ amountCents: 10_300 });
    expect(await client.status(id)).toBe('voided');
  });

  test('a gateway that refuses: nothing went back, the exception stays open, and succeeded stays refused', async () => {
    const { id, exceptions } = await settledWhileUnknown();
    const { exceptionId, transactionId } = exceptions[0]!;
    const no = instead(async () => ({ kind: 'rejected', why: 'other' }));
    expect((await refused(send(exceptionId, no)))?.message).toContain('did not refund (other); nothing was returned');
    expect(await client.status(id)).toBe('unknown');
    expect((await refused(resolve(id)))?.message).toContain('cannot be resolved as succeeded any more');
    await send(exceptionId);
    expect([await client.status(id), (await refundsOf(transactionId!)).length]).toEqual(['voided', 1]);
  });

  test('a payment of two legs, of which one was charged and settled: voided when that leg is back', async () => {
    const { id, exceptions } = await settledWhileUnknown(separate);
    expect(exceptions).toMatchObject([{ leg: 'principal', suspenseCents: 10_000 }]);
    await send(exceptions[0]!.exceptionId);
    expect(await client.status(id)).toBe('voided');
  });
});

describe('money that belongs to no payment', () => {
  test('a sale under a strange reference goes back, its line is MATCHED, and suspense ends at 0', async () => {
    const known = await client.created(paymentOf(combined));
    const { payment } = await service.services.payments.ports.streams.load(known.id);
    if (payment.phase !== 'charged') throw new Error('not charged');
    const { account } = payment.legs[0]!;
    const instrument = { type: 'card' as const, number: new Secret('4242424242424242'), expiry: { month: 12, year: 2040 }, cvv: new Secret('987') };
    const ref = crockford(randomBytes(13), 20);
    const begunAt = new Date(service.clock.now()).toISOString();
    const charge = { ref, leg: 'combined' as const, account, begunAt, amountCents: 4_321, instrument };
    const charged = await service.services.payments.ports.gateways.find(account)!.charge(charge, AbortSignal.timeout(20_000));
    expect(charged).toMatchObject({ kind: 'approved' });
    const before = await desk.booked();
    await settle();
    const exception = (await desk.exceptions()).find((one) => one.ref === ref)!;
    expect(exception).toMatchObject({ kind: 'MISSING_HERE', suspenseCents: 4_321, paymentId: null });
    const { transactionId } = await send(exception.exceptionId);
    await settle();
    expect((await desk.exceptions()).filter((one) => one.transactionId === transactionId)).toEqual([]);
    expect((await desk.booked())('liabilities:suspense')).toBe(before('liabilities:suspense'));
  });

  test.each(['unknown', 'succeeded'] as const)(
    'a sale whose line names no payment, but which is the charge of one that is %s: nothing is sent',
    async (status) => {
      const answer = await client.create(paymentOf(combined, { number: CARD.unresolvable }));
      const id = answer.details!.id as string;
      const charge = await chargeOf(id);
      await desk.importFile(desk.csv(desk.line(`nameless_${status}`, charge.transactionId!, { gross: 10_300, fee: 0 })), charge.merchantAccount);
      const exception = (await desk.exceptions()).find((one) => one.transactionId === charge.transactionId)!;
      expect(exception).toMatchObject({ kind: 'MISSING_HERE', paymentId: null });
      if (status === 'succeeded') await resolve(id, { transactions: { combined: charge.transactionId! } });
      expect((await refused(send(exception.exceptionId)))?.message).toContain(`is the charge of payment ${id}`);
      expect(await refundsOf(charge.transactionId!)).toEqual([]);
      expect(await history(`exception-${exception.exceptionId}`)).toEqual(['ExceptionOpened']);
    },
  );
});

describe('refused before anything is written', () => {
  test('an unknown exception, nothing in suspense, a payment that is not unknown', async () => {
    expect(await refused(send(service.services.ids.uuid()))).toMatchObject({ code: 'VALIDATION_ERROR' });
    const { id, exceptions } = await settledWhileUnknown();
    const { exceptionId } = exceptions[0]!;
    await resolve(id);
    const before = await history(`payment-${id}`);
    expect((await refused(send(exceptionId)))?.message).toContain('The payment is succeeded');
    expect([await history(`payment-${id}`), await history(`exception-${exceptionId}`)]).toEqual([before, ['ExceptionOpened']]);
    const paid = await client.created(paymentOf(combined));
    const { merchantAccount } = await service.services.payments.ports.streams
      .load(paid.id)
      .then(({ payment }) => (payment.phase === 'charged' ? payment.legs[0]!.account : Promise.reject(new Error('not charged'))));
    await desk.importFile(desk.csv(desk.line(`refund_only_${Date.now()}`, 'tx_strange', { type: 'refund', gross: -500, fee: 0 })), merchantAccount);
    const negative = (await desk.exceptions()).find(({ transactionId }) => transactionId === 'tx_strange')!;
    expect((await refused(send(negative.exceptionId)))?.code).toBe('INVALID_STATE');
  });
});
