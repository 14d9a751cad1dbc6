/** Tests that lost rows of keys are made again from the log. A retry gets the answer of its first request, and no money moves twice. */
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { Unavailable } from '#eventstore';
import { SandboxClock, systemClock } from '#kernel';
import { answerEncoder } from '../../../apps/answers.js';
import { read } from '../../../test/support/answers.js';
import { eventually } from '../../../test/support/eventually.js';
import { away, CARDS, type Ground, type House, openGround, openHouse, OPEN_CLAIMS } from '../../../test/support/payments.js';
import { type Answer, transaction } from '#platform';
import { type ComparedKeys, compareKeys, type KeysFromLogPorts, rebuildKeys } from './from-log.js';
import { postgresKeyRows } from './postgres.js';

let ground: Ground;
let house: House;
beforeAll(async () => {
  ground = await openGround();
});
afterAll(() => ground.close());
beforeEach(async () => {
  house = await openHouse(ground);
});
afterEach(() => ground.bank.clearFaults());

const UNKNOWN = { answer: 'cut' } as const;
const NOT_SENT = { effect: false, answer: 'cut' } as const;
const PARTIAL = { amountCents: 1_000 };

const ports = (): KeysFromLogPorts => ({
  store: house.store,
  answers: answerEncoder,
  personal: house.ports.personal,
  clock: house.clock,
});
/** Compares the whole log with the rows, in batches of `size` events. */
const compare = async (size = 1_000, given = ports()): Promise<ComparedKeys> => {
  const total = { restored: 0, corrected: 0, unchanged: 0 };
  for await (const events of house.store.readAll(null, { streamPrefixes: ['payment-'] }))
    for (let from = 0; from < events.length; from += size) {
      const found = await transaction(ground.pool, (client) => compareKeys(given, postgresKeyRows(client), events.slice(from, from + size)));
      for (const name of ['restored', 'corrected', 'unchanged'] as const) total[name] += found[name];
    }
  return total;
};

const rows = async () => {
  const { rows } = await ground.pool.query<Record<string, unknown>>('select * from idempotency_key where api_account_id = $1 order by key_hash', [
    house.accountId,
  ]);
  return rows;
};
const loseKeys = () => ground.pool.query('delete from idempotency_key where api_account_id = $1', [house.accountId]);
/** Copies the rows of the keys. Returns a function that restores this copy. */
const copyKeys = async () => {
  const copied = await rows();
  return async () => {
    await loseKeys();
    for (const row of copied)
      await ground.pool.query(
        `insert into idempotency_key (${Object.keys(row).join(', ')}) values (${Object.keys(row).map((_, index) => `$${index + 1}`).join(', ')})`, // prettier-ignore
        Object.values(row),
      );
  };
};
const leasesEnd = () =>
  ground.pool.query(`update idempotency_key set lease_until = clock_timestamp() - interval '1 second' where lease_until is not null`);
const charged = async (card: string = CARDS.approved) => (await house.charge({ card })).id;
/** The number of money movements that the simulator has executed. */
const moved = async () => (await house.truth()).filter(({ result }) => result === 'approved').length;
/** A request with a key. Each call sends the request again. */
type Request = () => Promise<Answer>;

/** Every end of a request that reached the log, and the state of its key afterwards. null: the key was given back. */
const ENDS: readonly (readonly [title: string, state: string | null, status: number, begin: () => Promise<Request>])[] = [
  ['a charge', 'completed', 200, async () => chargeWith(CARDS.approved)],
  ['a decline', 'completed', 402, async () => chargeWith(CARDS.declined)],
  ['a fee that was declined, the principal taken back', 'completed', 402, async () => chargeWith(CARDS.feeDeclined)],
  ['a charge that was not processed', 'reserved', 502, async () => chargeWith(CARDS.gatewayError)],
  ['a charge of unknown outcome', 'reserved', 504, async () => chargeWith(CARDS.unreadable)],
  ['a refund', 'completed', 200, async () => refundOf(await charged())],
  ['a refund of a part', 'completed', 200, async () => refundOf(await charged(), PARTIAL)],
  ['a refund of a part, before another one', 'completed', 200, async () => {
    const id = await charged();
    const request = refundOf(id, PARTIAL);
    const first = await request();
    await house.refund(id, { amountCents: 2_000 });
    return replayOf(first, request);
  }], // prettier-ignore
  ['a void', 'completed', 200, async () => voidOf(await charged())],
  ['a void that the gateway rejected', 'completed', 422, async () => voidOf(await charged(CARDS.voidRejected))],
  ['a refund that was not processed', 'released', 502, async () => {
    const id = await charged();
    await ground.bank.arm({ match: { call: 'void' }, answer: 'disabled' });
    return refundOf(id, PARTIAL);
  }], // prettier-ignore
  ['a refund of unknown outcome', 'released', 504, async () => {
    const id = await charged();
    await ground.bank.arm({ match: { call: 'void' }, ...UNKNOWN });
    return refundOf(id, PARTIAL);
  }], // prettier-ignore
  ['a refund that never arrived', 'released', 504, async () => {
    const id = await charged();
    await ground.bank.arm({ match: { call: 'void' }, ...NOT_SENT });
    return refundOf(id, PARTIAL);
  }], // prettier-ignore
  ['a refund whose fee failed', 'released', 502, async () => {
    const id = await charged(CARDS.feeRefundFailsOnce);
    await house.settle(id);
    return refundOf(id, { includeFee: true });
  }], // prettier-ignore
  ['a void whose fee failed', null, 422, async () => voidOf(await charged(CARDS.feeVoidFailsOnce))],
  ['a void whose fee failed, and was rejected when it was retried', 'completed', 422, async () => {
    const request = voidOf(await charged(CARDS.feeVoidFailsOnce));
    expect(read(await request())).toMatchObject({ status: 422, code: 'VOID_FAILED' });
    await ground.bank.closeBatches();
    return request;
  }], // prettier-ignore
];

const chargeWith = (card: string): Request => {
  const key = house.key();
  return () => house.chargeWithKey(key, { card });
};
const refundOf = (id: string, asked: Parameters<House['refundWithKey']>[2] = {}): Request => {
  const key = house.key();
  return () => house.refundWithKey(key, id, asked);
};
const voidOf = (id: string): Request => {
  const key = house.key();
  return () => house.voidWithKey(key, id);
};
/** The first call returns the known first answer without sending a request. Later calls send the request. */
const replayOf = (first: Answer, request: Request): Request => {
  let sent = false;
  return () => (sent ? request() : ((sent = true), Promise.resolve(first)));
};
const shownState = (row: Record<string, unknown> | undefined) =>
  row && { attempt: row.attempt_id, operation: row.operation, state: row.state, status: row.status, body: row.body };

describe.each(ENDS)('%s (%s, %i)', (_, state, status, begin) => {
  let request: Request;
  let first: Answer;
  beforeEach(async () => {
    request = await begin();
    first = await request();
    expect(first.status).toBe(status);
  });

  test('nothing is lost: nothing changes', async () => {
    const before = await rows();
    expect(before.map((row) => row.state)).toEqual(state === null ? [] : [state]);
    expect(await compare()).toEqual({ restored: 0, corrected: 0, unchanged: 1 });
    expect(await rows()).toEqual(before);
  });

  test('the row is lost: it is made again with state, attempt and answer; no money moves twice', async () => {
    const [before] = await rows();
    await loseKeys();
    expect(await compare()).toEqual(state === null ? { restored: 0, corrected: 0, unchanged: 1 } : { restored: 1, corrected: 0, unchanged: 0 });
    const [after] = await rows();
    expect(shownState(after)).toEqual(shownState(before));
    expect(await compare()).toMatchObject({ restored: 0, corrected: 0 });
    const money = await moved();
    const again = await request();
    if (state === 'completed') expect(again).toEqual({ ...first, replayed: true });
    if (state === 'reserved') expect(read(again)).toMatchObject({ status: 409, code: 'IDEMPOTENCY_RECONCILIATION_REQUIRED' });
    if (state === 'completed' || state === 'reserved') expect(await moved()).toBe(money);
  });
});

describe('a released key that was lost is made again bound to its attempt', () => {
  test('the refund had succeeded: the retry gets its result, and nothing is returned again', async () => {
    const id = await charged();
    await ground.bank.arm({ match: { call: 'void' }, ...UNKNOWN });
    const request = refundOf(id, PARTIAL);
    expect((await request()).status).toBe(504);
    await loseKeys();
    await compare();
    const money = await moved();
    expect(read(await request())).toMatchObject({ status: 200, data: { amountCents: 1_000 } });
    expect(await moved()).toBe(money);
  });
  test('its request vanished after the call: the retry makes the same calls under the same references', async () => {
    const id = await charged();
    const request = refundOf(id, PARTIAL);
    house.appends.after('RefundRequested', () => house.appends.failBefore('append', away));
    expect((await house.clock.hurry(request())).status).toBe(504);
    house.appends.clear();
    await loseKeys();
    await compare();
    await leasesEnd();
    const money = await moved();
    expect((await request()).status).toBe(200);
    expect(await moved()).toBe(money);
  });
});

describe('a key that got the result of another attempt (C38)', () => {
  const ASKED = { includeFee: true };
  /**
   * Makes a refund of principal and fee. The processor returns the fee, but its answer is lost, and the caller gets a 502. Another key then gets the
   * result.
   */
  const told = async () => {
    const id = await charged();
    await ground.bank.arm({ match: { call: 'void', leg: 'fee' }, ...UNKNOWN });
    expect(read(await house.refundWithKey(house.key(), id, ASKED))).toMatchObject({ status: 502, code: 'PARTIAL_REFUND_PENDING' });
    const key = house.key();
    const goBack = await copyKeys();
    const first = await house.refundWithKey(key, id, ASKED);
    expect(first.status).toBe(200);
    expect(await house.history(id)).toContain('ReversalAcknowledged');
    expect((await house.history(id)).filter((type) => type === 'RefundRequested')).toHaveLength(1);
    return { request: () => house.refundWithKey(key, id, ASKED), first, goBack };
  };
  test('its row is lost: it is made again', async () => {
    const { request, first, goBack } = await told();
    const before = await rows();
    await goBack();
    expect(await compare(1)).toMatchObject({ restored: 1, corrected: 0 });
    expect((await rows()).map(shownState)).toEqual(before.map(shownState));
    const money = await moved();
    expect(await request()).toEqual({ ...first, replayed: true });
    expect(await moved()).toBe(money);
  });
  test('nothing is lost: nothing changes', async () => {
    await told();
    const before = await rows();
    expect(await compare()).toEqual({ restored: 0, corrected: 0, unchanged: 2 });
    expect(await rows()).toEqual(before);
  });
  test('its process vanished before it could answer: the retry gets that result', async () => {
    const { request, first } = await told();
    await ground.pool.query(
      `update idempotency_key set state = 'in_progress', status = null, body = null, lease_until = clock_timestamp() - interval '1 second'
       where api_account_id = $1 and attempt_id = $2`,
      [house.accountId, (await rows()).find(({ body }) => String(body) === first.body)!.attempt_id],
    );
    const money = await moved();
    expect((await request()).body).toBe(first.body);
    expect(await moved()).toBe(money);
  });
});

test('the intent of a charge has no outcome: its key is in progress, its lease ends, and the takeover fences it', async () => {
  const request = chargeWith(CARDS.approved);
  house.appends.after('PaymentInitiated', () => house.appends.failBefore('append', away));
  expect((await house.clock.hurry(request())).status).toBe(504);
  house.appends.clear();
  await loseKeys();
  await compare();
  expect(await rows()).toMatchObject([{ state: 'in_progress', operation: 'create' }]);
  await leasesEnd();
  expect(read(await request())).toMatchObject({ status: 409, code: 'IDEMPOTENCY_RECONCILIATION_REQUIRED' });
  expect((await house.truth()).filter(({ op }) => op === 'charge')).toHaveLength(2);
});

describe('the rows went back to an earlier copy', () => {
  test('a refund whose attempt was renewed since: the row is bound to the newest attempt', async () => {
    const id = await charged();
    const request = refundOf(id, PARTIAL);
    await ground.bank.arm({ match: { call: 'void' }, answer: 'disabled' });
    expect((await request()).status).toBe(502);
    const goBack = await copyKeys();
    const second = await request();
    expect(second.status).toBe(200);
    await goBack();
    // The events are compared one at a time, as a subscriber may do.
    expect(await compare(1)).toMatchObject({ corrected: 1, restored: 0 });
    expect(await request()).toEqual({ ...second, replayed: true });
    expect(read(await request()).status).toBe(200);
    expect(await house.balance()).toBe(10_325 - 1_000);
  });
  test('a key that was claimed, given back and claimed again since: the row of the first claim is replaced', async () => {
    const id = await charged();
    const key = house.key();
    // This claim has no intent, and holds the key until the copy is made.
    const { idempotency } = house.services;
    const claimed = await idempotency.claim({ ...house.received(key, 'other'), accountId: house.accountId, key, operation: `refund:${id}` });
    const goBack = await copyKeys();
    if (claimed.kind !== 'owned') throw new Error(claimed.kind);
    await idempotency.finish(idempotency.name(house.accountId, key), claimed.fence, { to: 'given_back' });
    const first = await house.refundWithKey(key, id, PARTIAL);
    await goBack();
    await expect(compare()).rejects.toThrow(Unavailable);
    await leasesEnd();
    expect(await compare()).toMatchObject({ corrected: 1 });
    expect(await house.refundWithKey(key, id, PARTIAL)).toEqual({ ...first, replayed: true });
    expect(await house.balance()).toBe(10_325 - 1_000);
  });
  test('a key that had expired and was used again since: the row of today is made', async () => {
    const key = house.key();
    await house.chargeWithKey(key);
    await ground.pool.query(`update idempotency_key set expires_at = clock_timestamp() - interval '1 second' where api_account_id = $1`, [
      house.accountId,
    ]);
    const goBack = await copyKeys();
    const second = await house.chargeWithKey(key, { lines: [700] });
    await goBack();
    expect(await compare()).toMatchObject({ corrected: 1 });
    expect(await house.chargeWithKey(key, { lines: [700] })).toEqual({ ...second, replayed: true });
  });
});

describe('a row that is right stays as it is', () => {
  test('a running request has renewed its attempt, and its intent is not in the log yet: the comparison waits', async () => {
    const id = await charged();
    const request = refundOf(id, PARTIAL);
    await ground.bank.arm({ match: { call: 'void' }, answer: 'disabled' });
    await request();
    let go!: () => void;
    let renewed = false;
    house.appends.before('RefundRequested', () => ((renewed = true), new Promise<void>((done) => (go = done))));
    const running = request();
    await eventually(() => renewed);
    const [before] = await rows();
    await expect(compare()).rejects.toThrow(/running request/);
    expect(await rows()).toEqual([before]);
    go();
    const second = await running;
    expect(second.status).toBe(200);
    expect(await compare()).toMatchObject({ restored: 0, corrected: 0 });
    expect(await request()).toEqual({ ...second, replayed: true });
  });
  test('a key that was given back belongs to a later request with another body', async () => {
    const id = await charged(CARDS.feeVoidFailsOnce);
    const key = house.key();
    expect((await house.voidWithKey(key, id)).status).toBe(422);
    const later = await house.refundWithKey(key, id, { includeFee: true });
    expect(later.status).toBe(200);
    expect(await compare(1)).toMatchObject({ restored: 0, corrected: 0 });
    expect(await house.refundWithKey(key, id, { includeFee: true })).toEqual({ ...later, replayed: true });
  });
  test('the answer belongs to a void that was refused without an event', async () => {
    const id = await charged(CARDS.feeVoidFailsOnce);
    const request = voidOf(id);
    expect((await request()).status).toBe(422);
    await house.settle(id);
    const refused = await request();
    expect(read(refused)).toMatchObject({ status: 422, code: 'VOID_FAILED', details: { suggestedAction: 'refund' } });
    const before = await rows();
    expect(await compare(1)).toMatchObject({ restored: 0, corrected: 0 });
    expect(await rows()).toEqual(before);
  });
  test('a request without a key has no row', async () => {
    await house.refund(await charged(), PARTIAL);
    expect(await compare()).toEqual({ restored: 0, corrected: 0, unchanged: 0 });
    expect(await rows()).toEqual([]);
  });
});

describe('a process stands still between its claim and its intent, and its row is lost meanwhile', () => {
  beforeEach(() => void Object.assign(house.services, { claims: { ...OPEN_CLAIMS, mayBeLost: true } }));

  test.each([
    ['a charge', 'PaymentInitiated', async () => chargeWith(CARDS.approved)],
    ['a refund', 'RefundRequested', async () => refundOf(await charged(), PARTIAL)],
    ['a void', 'VoidRequested', async () => voidOf(await charged())],
  ] as const)('%s: its late intent moves no money, and the key keeps the answer of the request that claimed it anew', async (_, intent, make) => {
    const request = await make();
    let anew: Answer | null = null;
    let money = 0;
    house.appends.before(intent, async () => {
      await loseKeys();
      anew = await request();
      money = await moved();
    });
    expect((await request()).status).toBeGreaterThanOrEqual(400);
    expect(anew).toMatchObject({ status: 200 });
    expect(await moved()).toBe(money);
    await leasesEnd();
    for (const size of [1_000, 1]) expect(await compare(size)).toMatchObject({ restored: 0, corrected: 0 });
    expect(await request()).toEqual({ ...anew!, replayed: true });
    expect(await moved()).toBe(money);
  });

  test('the key cannot be looked at: the charge is not sent', async () => {
    const { idempotency } = house.services;
    Object.assign(house.services, { idempotency: { ...idempotency, holds: () => Promise.reject(new Error('away')) } });
    const before = await moved();
    expect(read(await chargeWith(CARDS.approved)())).toMatchObject({ status: 502, code: 'PAYMENT_GATEWAY_ERROR' });
    expect(await moved()).toBe(before);
  });
});

test('an intent that is older than its key makes no row, unless its outcome is still unknown', async () => {
  await chargeWith(CARDS.approved)();
  await chargeWith(CARDS.unreadable)();
  await refundOf(await charged(), PARTIAL)();
  house.clock.advance(24 * 3_600_000 + 60_000);
  await loseKeys();
  expect(await compare()).toEqual({ restored: 1, corrected: 0, unchanged: 2 });
  expect(await rows()).toMatchObject([{ state: 'reserved' }]);
});

describe('business time is a month ahead of the real time', () => {
  const MONTH_MS = 30 * 86_400_000;
  const behind = () => {
    const clock = new SandboxClock({ ...systemClock, now: () => house.clock.now() - MONTH_MS, realNow: () => house.clock.now() - MONTH_MS });
    clock.moveTo(MONTH_MS);
    return { ...ports(), clock };
  };

  test('a key from before the move has not expired: its row is made again, and a retry charges nothing', async () => {
    const request = chargeWith(CARDS.approved);
    const first = await request();
    house.clock.advance(MONTH_MS);
    await loseKeys();
    expect(await compare(1_000, behind())).toEqual({ restored: 1, corrected: 0, unchanged: 0 });
    const money = await moved();
    expect(await request()).toEqual({ ...first, replayed: true });
    expect(await moved()).toBe(money);
  });

  test('a row from after the move begins its lease and its 24 hours now', async () => {
    house.clock.advance(MONTH_MS);
    await chargeWith(CARDS.approved)();
    const request = chargeWith(CARDS.approved);
    house.appends.after('PaymentInitiated', () => house.appends.failBefore('append', away));
    expect((await house.clock.hurry(request())).status).toBe(504);
    house.appends.clear();
    await loseKeys();
    expect(await compare(1_000, behind())).toEqual({ restored: 2, corrected: 0, unchanged: 0 });
    const { rows: left } = await ground.pool.query<{ state: string; lease: number | null; kept: number }>(
      `select state, extract(epoch from lease_until - now())::int as lease, extract(epoch from expires_at - now())::int as kept
       from idempotency_key where api_account_id = $1 order by state`,
      [house.accountId],
    );
    expect(left.map(({ state, lease, kept }) => [state, lease !== null && lease <= 60, kept <= 24 * 3_600])).toEqual([
      ['completed', false, true],
      ['in_progress', true, true],
    ]);
  });
});

test('an event of version 1 names no key', async () => {
  const [intent] = await house.events(await charged());
  const { idempotency: _, ...data } = intent!.data as Record<string, never>;
  expect(await compareKeys(ports(), postgresKeyRows(ground.pool), [{ ...intent!, v: 1, data }])).toEqual({ restored: 0, corrected: 0, unchanged: 0 });
});

describe('payfold keys rebuild', () => {
  test('makes the rows of the last hours, and says how many', async () => {
    const early = chargeWith(CARDS.approved);
    await early();
    house.clock.advance(2 * 3_600_000);
    const late = [chargeWith(CARDS.approved), chargeWith(CARDS.declined)];
    for (const request of late) await request();
    await loseKeys();
    expect(await rebuildKeys({ ...ports(), store: house.store }, ground.pool, 1)).toEqual({ restored: 2, corrected: 0, unchanged: 0 });
    expect(await rebuildKeys({ ...ports(), store: house.store }, ground.pool, 24)).toEqual({ restored: 1, corrected: 0, unchanged: 2 });
    const money = await moved();
    for (const request of [early, ...late]) expect(await request()).toMatchObject({ replayed: true });
    expect(await moved()).toBe(money);
  });
});
