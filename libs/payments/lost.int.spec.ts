/**
 * The log loses the end of a create or a refund, and no mark tells it. The key's row says whether a call of the gateway may have begun. If so, the
 * gateway is asked before the key gets an answer (C64, T7).
 */
import { afterAll, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { load } from '#eventstore';
import { sent } from '../../test/support/answers.js';
import { eventually } from '../../test/support/eventually.js';
import { type Ground, type House, openGround, openHouse } from '../../test/support/payments.js';
import { chargeOnce, type PaymentServices, reverseOnce } from './commands.js';
import { lookUpKey } from './keys/look-up.js';
import { purgeKeys, sweepKeys } from './keys/sweep.js';
import { createRecovery } from './recovery.js';
import { STAFF_TASK_STREAM, staffTaskId, type StaffTaskReason } from './staff.js';
import { PaymentStreams } from './stream.js';

let ground: Ground;
let house: House;
let services: PaymentServices;
/** Appends to payments that the log acknowledges and loses. */
let loses: boolean;
let isAway: boolean;
beforeAll(async () => {
  ground = await openGround();
});
afterAll(() => ground.close());
beforeEach(async () => {
  house = await openHouse(ground);
  loses = false;
  isAway = false;
  const { ports, idempotency } = house.services;
  const { store } = house;
  const append: typeof store.append = async (stream, expected, events, options) => {
    const isLost = loses && stream.startsWith('payment-');
    const before = expected === 'no_stream' ? -1n : (expected as bigint);
    return isLost
      ? { revision: before + BigInt(events.length), position: '9' as never }
      : store.append(stream, isLost ? 'any' : expected, events, options);
  };
  const find: typeof ports.gateways.find = (account) => {
    const gateway = ports.gateways.find(account);
    return gateway && isAway ? { ...gateway, finalize: async () => ({ kind: 'cannot_tell', why: 'unreachable' }) } : gateway;
  };
  const changed = { ...ports, streams: new PaymentStreams({ ...store, append }, house.clock, house.ids), gateways: { find } };
  services = { ...house.services, idempotency: { ...idempotency }, claims: { ...house.services.claims, mayBeLost: true }, ports: changed };
});

const request = (key: string) => sent(chargeOnce(services, house.request({}), house.received(key, {})));
const read = (answer: Awaited<ReturnType<typeof request>>) => {
  const { message, details } = JSON.parse(answer.body) as { message?: string; details?: { code: string; id?: string } };
  return { status: answer.status, message, id: details?.id ?? null };
};
const rowsOf = async () => {
  const { rows } = await ground.pool.query<{ payment_id: string; state: string; begun: string | null }>(
    'select payment_id, state, begun from idempotency_key where api_account_id = $1',
    [house.accountId],
  );
  return rows;
};
/** The request stops at this step and never goes on. Its lease ends. */
const vanish = async (key: string, stop: (step: () => Promise<unknown>) => void) => {
  let reached = false;
  stop(() => {
    reached = true;
    return new Promise(() => undefined);
  });
  void request(key);
  await eventually(() => reached);
  await leaseEnds();
  loses = false;
};
const leaseEnds = () =>
  ground.pool.query(`update idempotency_key set lease_until = now() - interval '1 s' where api_account_id = $1 and lease_until is not null`, [
    house.accountId,
  ]);
const isRaised = async (paymentId: string, reason: StaffTaskReason) =>
  (await load(house.store, STAFF_TASK_STREAM, staffTaskId(paymentId, reason))).state.evidence.length > 0;
const incident = () => services.ports.ownLog.incident;
const charged = async () => (await house.truth()).filter(({ op }) => op === 'charge').length;
const NOTHING = 'Nothing was charged. Use a new key.';

test('claimed, and no call can have begun: answered at once, although the gateway is away', async () => {
  isAway = true;
  await vanish('k', (step) => house.calls.before('charge.principal', step));
  // The row of a request that vanished before its intent.
  await ground.pool.query(`update idempotency_key set begun = 'false', payment_id = $2 where api_account_id = $1`, [
    house.accountId,
    house.ids.uuid(),
  ]);
  expect(read(await request('k'))).toEqual({ status: 409, message: NOTHING, id: null });
});

test('the row holds the intent before the gateway is called', async () => {
  let begun: string | null = null;
  house.calls.before('charge.principal', async () => void (begun = (await rowsOf())[0]!.begun));
  await request('k');
  expect(JSON.parse(begun!)).toMatchObject({ type: 'PaymentInitiated', data: { portalId: house.portalId, personal: null } });
});

test('the intent is lost before the call: the gateway promises that it never charges, and the answer is that nothing was charged', async () => {
  loses = true;
  await vanish('k', (step) => house.calls.before('charge.principal', step));
  expect(read(await request('k'))).toEqual({ status: 409, message: NOTHING, id: null });
  expect([await charged(), incident()]).toEqual([0, null]);
});

describe('the charge was executed', () => {
  const FIRST_CALL = (step: () => Promise<unknown>) => house.calls.after('charge.principal', step);
  const LAST_CALL = (step: () => Promise<unknown>) => house.calls.after('charge.fee', step);

  test.each([
    ['the principal', FIRST_CALL],
    ['both legs', LAST_CALL],
  ])('%s: PaymentLost, a task, an incident; the key names the payment, also in the incident', async (_what, stop) => {
    loses = true;
    await vanish('k', stop);
    const before = await charged();
    const id = (await rowsOf())[0]!.payment_id;
    const named = { status: 409, message: `Read payment ${id}. Charge again with a new key only if it reads failed or voided.`, id };
    expect(read(await request('k'))).toEqual(named);
    expect(await house.history(id)).toEqual(['PaymentInitiated', 'PaymentLost']);
    expect(await house.view(id)).toMatchObject({ status: 'unknown', amountCents: 10_000, totalChargedCents: 10_325 });
    expect([await isRaised(id, 'charge_cannot_be_undone'), incident()?.kind]).toEqual([true, 'lost_events']);
    expect(read(await request('k'))).toEqual(named);
    expect(await charged()).toBe(before);
  });

  test('a create that was answered 200: the sweeper ends its key, and recovery never undoes it', async () => {
    loses = true;
    services.idempotency.finish = async () => true;
    expect((await request('k')).status).toBe(200);
    loses = false;
    services.idempotency.finish = (...given) => house.services.idempotency.finish(...given);
    await leaseEnds();
    await sweepKeys(services);
    const [row] = await rowsOf();
    expect([row!.state, await house.history(row!.payment_id)]).toEqual(['reserved', ['PaymentInitiated', 'PaymentLost']]);
    house.clock.advance(60_000);
    expect(
      await createRecovery({ ...services.ports, ownLog: house.ports.ownLog }, house.store, {} as never)
        .resolve(row!.payment_id)
        .catch(() => 'refused'),
    ).not.toBe('resolved');
    expect([(await house.view(row!.payment_id)).status, await house.balance()]).toEqual(['unknown', 10_325]);
  });

  test('a row of an older release counts as begun: no amounts, and the payment is unknown', async () => {
    loses = true;
    await vanish('k', FIRST_CALL);
    await ground.pool.query('update idempotency_key set begun = null where api_account_id = $1', [house.accountId]);
    const id = (await rowsOf())[0]!.payment_id;
    expect(read(await request('k')).id).toBe(id);
    expect([await house.history(id), await house.view(id)]).toEqual([
      ['PaymentLost'],
      expect.objectContaining({ status: 'unknown', amountCents: 0 }),
    ]);
  });

  test('the gateway cannot tell now: PaymentLost and a task without an incident; an execution that is found later opens it', async () => {
    loses = true;
    await vanish('k', LAST_CALL);
    isAway = true;
    const id = (await rowsOf())[0]!.payment_id;
    expect(read(await request('k')).id).toBe(id);
    expect([await isRaised(id, 'outcome_overdue'), incident()]).toEqual([true, null]);
    isAway = false;
    house.clock.advance(60_000);
    expect(await house.recovery.resolve(id)).toBe('staff');
    expect([(await house.view(id)).status, incident()?.kind, await house.balance()]).toEqual(['unknown', 'lost_events', 10_325]);
  });

  test('the key is reserved, and the log lost the stream afterwards: T5 asks the gateway', async () => {
    loses = true;
    await vanish('k', FIRST_CALL);
    await ground.pool.query(`update idempotency_key set state = 'reserved', lease_until = null where api_account_id = $1`, [house.accountId]);
    const id = (await rowsOf())[0]!.payment_id;
    expect(read(await request('k')).id).toBe(id);
    expect(await house.history(id)).toEqual(['PaymentInitiated', 'PaymentLost']);
  });

  test.each([true, false])('the key is reserved, its stream is lost, and the partner looks the key up; the gateway is away: %s', async (away) => {
    loses = true;
    await vanish('k', FIRST_CALL);
    isAway = away;
    await ground.pool.query(`update idempotency_key set state = 'reserved', lease_until = null where api_account_id = $1`, [house.accountId]);
    const id = (await rowsOf())[0]!.payment_id;
    const found = await lookUpKey(services, house.accountId, 'k').catch(({ code }: { code: string }) => code);
    // An incident is open after a charge was found.
    expect(found).toEqual(away ? { payments: [expect.objectContaining({ id, status: 'unknown' })], nextCursor: null, keyState: 'reserved' } : 'IDEMPOTENCY_UNAVAILABLE'); // prettier-ignore
    expect([await house.history(id), incident()?.kind]).toEqual([['PaymentInitiated', 'PaymentLost'], away ? undefined : 'lost_events']);
  });

  // With each fault, the key says that nothing was charged, although the bank holds the charge.
  test.each<[string, () => void]>([
    [
      'an empty stream is answered from the log alone',
      () => {
        const before = { ...services.idempotency };
        services.idempotency.claim = async (asked) => {
          const claimed = await before.claim(asked);
          return claimed.kind === 'owned' ? { ...claimed, begun: false } : claimed;
        };
      },
    ],
    [
      'the mark is written after the call',
      () => {
        const before = { ...services.idempotency };
        services.idempotency.holds = async (...given) => {
          house.calls.after('charge.fee', () => before.holds(...given));
          return true;
        };
      },
    ],
  ])('a planted fault is found: %s', async (_what, plant) => {
    plant();
    loses = true;
    await vanish('k', FIRST_CALL);
    expect([read(await request('k')), await charged()]).toEqual([{ status: 409, message: NOTHING, id: null }, 1]);
  });

  test('the purge keeps the key', async () => {
    loses = true;
    await vanish('k', FIRST_CALL);
    await ground.pool.query(
      `update idempotency_key set state = 'reserved', lease_until = null, expires_at = now() - interval '1 s' where api_account_id = $1`,
      [house.accountId],
    );
    await purgeKeys(services);
    const [row] = await rowsOf();
    expect(await house.history(row!.payment_id)).toEqual(['PaymentInitiated', 'PaymentLost']);
  });
});

test('a lost refund: the retry finds what the gateway executed, sends nothing, and an incident opens', async () => {
  const { id } = await house.charge({});
  await house.settle(id);
  const wanted = { operation: 'refund', paymentId: id, accountId: house.accountId, initiatedBy: 'partner', amountCents: 1_000, includeFee: false, reason: null } as const; // prettier-ignore
  const refund = () => sent(reverseOnce(services, wanted, house.received('r', wanted)));
  const refunds = async () => (await house.truth()).filter(({ op }) => op === 'refund').length;
  let reached = false;
  house.calls.after('refund.principal', () => {
    reached = true;
    return new Promise(() => undefined);
  });
  loses = true;
  void refund();
  await eventually(() => reached);
  loses = false;
  await leaseEnds();
  // Behind the guard of the log, the answer is 503 until the incident is closed.
  expect([(await refund()).status, await refunds(), incident()?.kind]).toEqual([200, 1, 'lost_events']);
  expect((await house.history(id)).slice(-5)).toEqual([
    'RefundRequested',
    'ReconciliationStarted',
    'PaymentRefunded',
    'ReversalEnded',
    'ReversalAcknowledged',
  ]);
  expect(await house.view(id)).toMatchObject({ status: 'partially_refunded', refundedAmountCents: 1_000 });
});
