/** Personal data of payments: where it lies in boxes, what partners see of it before and after an erasure, and payments while no key can be had. */
import { afterAll, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { type Box, Deadline, isBox } from '#kernel';
import { createPersonalKeys, type PersonalKeyRows, postgresPersonalKeyRows } from '#platform';
import { openDispute } from '#settlement';
import { read, sent } from '../../test/support/answers.js';
import { CARDS, type Ground, type House, openGround, openHouse, refused } from '../../test/support/payments.js';
import { chargeOnce, findPayment, type PaymentServices, reverseByStaff, reverseOnce } from './commands.js';
import type { ChargeRequest } from './charge.js';
import { REQUEST_DEADLINE_MS } from './gateway/call.js';
import { sweepKeys } from './keys/sweep.js';
import type { Charged, Payment } from './payment.js';
import { openedAnswer } from './personal.js';
import type { PaymentView } from './payment.view.js';
import { resolveReversal, type ReverseRequest } from './reverse.js';

let ground: Ground;
let house: House;
beforeAll(async () => {
  ground = await openGround();
});
afterAll(() => ground.close());
beforeEach(async () => {
  house = await openHouse(ground);
});

const PAYER = {
  firstName: 'Augustina',
  lastName: 'Lovelace',
  email: 'augustina@example.org',
  phone: '+1 512 555 0100',
  address: { zip: '78701-0100' },
};
const LINE = { description: 'Water of Augustina', metadata: { parcel: 'of Augustina', ward: 4 } };
/** Texts that stand nowhere in clear. They are long, so that the letters of a box never spell one by chance. */
const PLANTED = ['Augustina', 'Lovelace', 'augustina@example.org', '555 0100', '78701-0100', 'told by Augustina'];

const withTexts = (change: Partial<ChargeRequest> = {}): ChargeRequest => {
  const request = house.request({ lines: [6_000, 4_000] });
  return { ...request, payer: PAYER, lineItems: request.lineItems.map((line, index) => (index === 0 ? { ...line, ...LINE } : line)), ...change };
};
const create = (key: string | null, request = withTexts(), services: PaymentServices = house.services) =>
  sent(chargeOnce(services, request, { ...house.received(key ?? '', 'create'), idempotencyKey: key }));
const reverse = (key: string, paymentId: string, reason: string | null, change: Partial<ReverseRequest> = {}) => {
  const request = { operation: 'refund', paymentId, accountId: house.accountId, initiatedBy: 'partner', amountCents: 1_000, includeFee: false, reason, ...change } as const; // prettier-ignore
  return sent(reverseOnce(house.services, { ...request, accountId: house.accountId }, house.received(key, { reason, ...change })));
};
const idOf = (answer: Awaited<ReturnType<typeof create>>) => read<PaymentView>(answer).data.id;
const boxesIn = async (paymentId: string): Promise<Box[]> =>
  (await house.events(paymentId)).flatMap(({ data }) => {
    const { personal } = data as { personal?: Box | null };
    return isBox(personal ?? null) ? [personal!] : [];
  });
const keysIn = async (paymentId: string) => [...new Set((await boxesIn(paymentId)).map(({ key }) => key))];
const erase = async (paymentId: string) =>
  house.ports.personal.forget(await keysIn(paymentId), { erasureId: house.ids.uuid(), at: '2026-05-01T00:00:00.000Z' });
const storedBodies = async () =>
  (await ground.pool.query<{ body: string }>('select body from idempotency_key where api_account_id = $1 and body is not null', [house.accountId]))
    .rows;
const withoutTexts = (view: PaymentView) => ({ ...view, payer: null, lineItems: view.lineItems.map((line) => ({ ...line, description: null, metadata: null })) }); // prettier-ignore

test('texts of a create lie in one box; partners see them; the log, the row of the key and the process’s log hold none in clear', async () => {
  const key = house.key();
  const answer = await create(key);
  const view = read<PaymentView>(answer).data;
  expect(view).toMatchObject({ status: 'succeeded', payer: PAYER, lineItems: [LINE, { description: null, metadata: null }] });
  expect('personalDataErasedAt' in view).toBe(false);
  expect(await findPayment(house.services, house.accountId, view.id)).toEqual(view);
  expect(await boxesIn(view.id)).toHaveLength(1);
  const [row] = await storedBodies();
  expect(row!.body).toMatch(/^box [0-9a-f-]{36} [\w+/=]+$/);
  const kept = JSON.stringify([await house.events(view.id), await storedBodies(), house.logged], (_, value: unknown) =>
    typeof value === 'bigint' ? String(value) : value,
  );
  for (const text of PLANTED) expect(kept).not.toContain(text);
  // The coding of a line stays in clear, since the general ledger needs it. This portal names no key.
  expect((await create(key)).body).toBe(answer.body);
});

test('a stored answer in clear is read as it is, without a look for keys', async () => {
  const open = () => Promise.reject(new Error('the keys were asked for'));
  const answer = { status: 200, body: '{"success":true}' };
  expect(await openedAnswer({ personal: { open } }, answer, { paymentId: house.ids.uuid(), operation: 'create' })).toEqual(answer);
});

test('a create without texts takes no key, and its answer is stored as it was sent', async () => {
  let taken = 0;
  const { personal } = house.ports;
  const ports = { ...house.ports, personal: { ...personal, take: () => ((taken += 1), personal.take()), open: personal.open.bind(personal) } };
  const answer = await create(house.key(), house.request(), { ...house.services, ports });
  expect(taken).toBe(0);
  expect(await storedBodies()).toEqual([{ body: answer.body }]);
  expect(await boxesIn(idOf(answer))).toEqual([]);
});

test('a declined create is answered without texts, so its answer is stored in clear', async () => {
  const answer = await create(house.key(), withTexts({ instrument: house.request({ card: CARDS.declined }).instrument }));
  expect(answer.status).toBe(402);
  expect(await storedBodies()).toEqual([{ body: answer.body }]);
});

describe('after an erasure', () => {
  test('a replay keeps its status, and shows null where the text was; it is byte-identical otherwise (C77)', async () => {
    const key = house.key();
    const answer = await create(key);
    const { id } = read<PaymentView>(answer).data;
    await erase(id);
    const again = await create(key);
    expect([again.status, JSON.parse(again.body)]).toEqual([answer.status, { success: true, data: withoutTexts(read<PaymentView>(answer).data) }]);
    expect(again.body).toBe(JSON.stringify({ ...JSON.parse(answer.body), data: withoutTexts(read<PaymentView>(answer).data) }));
  });
  test('GET shows null, and when the texts were erased', async () => {
    const view = read<PaymentView>(await create(null)).data;
    await erase(view.id);
    const erased = { ...withoutTexts(view), personalDataErasedAt: '2026-05-01T00:00:00.000Z' };
    expect(await findPayment(house.services, house.accountId, view.id)).toEqual(erased);
  });
  test('a refund is replayed without its reason, also after a later one', async () => {
    const id = idOf(await create(null));
    const [first, other] = [house.key(), house.key()];
    const answer = await reverse(first, id, 'told by Augustina');
    expect(read(answer).data).toMatchObject({ amountCents: 1_000, reason: 'told by Augustina' });
    expect(await keysIn(id)).toHaveLength(1);
    await erase(id);
    const later = await reverse(other, id, 'told by Augustina again');
    expect(read(later).data).toMatchObject({ reason: 'told by Augustina again' });
    // A later refund takes a new key.
    expect(await keysIn(id)).toHaveLength(2);
    expect(JSON.parse((await reverse(first, id, 'told by Augustina')).body)).toEqual({
      success: true,
      data: { ...(read(answer).data as object), reason: null },
    });
    expect((await reverse(other, id, 'told by Augustina again')).body).toBe(later.body);
    await erase(id);
    expect(JSON.parse((await reverse(other, id, 'told by Augustina again')).body)).toEqual({
      success: true,
      data: { ...(read(later).data as object), reason: null },
    });
    for (const { body } of await storedBodies()) for (const text of PLANTED) expect(body).not.toContain(text);
  });
  test('a void is replayed without its reason', async () => {
    const id = idOf(await create(null));
    const [key, asked] = [house.key(), { operation: 'void', amountCents: null, includeFee: true } as const];
    const answer = await reverse(key, id, 'told by Augustina', asked);
    await erase(id);
    expect(JSON.parse((await reverse(key, id, 'told by Augustina', asked)).body)).toEqual({
      success: true,
      data: { ...(read(answer).data as object), reason: null },
    });
  });
});

describe('a reason', () => {
  test('of a payment without texts takes a key of its own; one without words takes none', async () => {
    const { id } = await house.charge();
    expect(read(await reverse(house.key(), id, null)).data).toMatchObject({ reason: null });
    expect(await boxesIn(id)).toEqual([]);
    expect(read(await reverse(house.key(), id, 'told by Augustina')).data).toMatchObject({ reason: 'told by Augustina' });
    // The request and the end of the attempt hold the same box.
    const boxes = await boxesIn(id);
    expect(boxes).toHaveLength(2);
    expect(boxes[0]).toEqual(boxes[1]);
  });
  test('of staff is sealed under the key of the payment', async () => {
    const id = idOf(await create(null));
    const done = await reverseByStaff(house.services, { operation: 'refund', paymentId: id, amountCents: 500, includeFee: false, reason: 'told by Augustina', by: 'Jo' }, null); // prettier-ignore
    expect(done).toMatchObject({ view: { reason: 'told by Augustina' } });
    expect(await keysIn(id)).toHaveLength(1);
    expect(JSON.stringify((await house.events(id)).map(({ data }) => data))).not.toContain('Augustina');
  });
  test('of a refund whose request vanished is in the answer of the next one', async () => {
    const id = idOf(await create(null));
    const key = house.key();
    house.appends.failAfter('ReversalEnded', () => new Error('the process died'), 1);
    await reverse(key, id, 'told by Augustina').catch(() => undefined);
    const attemptId = (((await house.state(id)) as Charged).attempts[0] as { attemptId: string }).attemptId;
    const origin = { actor: { type: 'recovery', id: 'recovery' }, correlationId: house.ids.uuid() } as const;
    await resolveReversal(house.ports, id, attemptId, origin, new Deadline(house.clock, REQUEST_DEADLINE_MS));
    const answer = await reverse(key, id, 'told by Augustina');
    expect(read(answer).data).toMatchObject({ reason: 'told by Augustina', amountCents: 1_000 });
    for (const { body } of await storedBodies()) expect(body).toMatch(/^box /);
  });
});

test('the sweeper finishes the key of a create that vanished, with the answer in a box', async () => {
  const key = house.key();
  const { idempotency } = house.services;
  const lost = { ...house.services, idempotency: { ...idempotency, finish: () => Promise.reject(new Error('the connection is gone')) } };
  const first = await create(key, withTexts(), lost);
  expect(await storedBodies()).toEqual([]);
  await ground.pool.query(`update idempotency_key set lease_until = clock_timestamp() - interval '1 second' where state = 'in_progress'`);
  await sweepKeys(house.services);
  expect(await storedBodies()).toEqual([{ body: expect.stringMatching(/^box /) }]);
  expect((await create(key)).body).toBe(first.body);
});

describe('a dispute', () => {
  const today = new Date().toISOString().slice(0, 10);
  const terms = { disputeId: '0190c1f2-8f52-7b3e-9c61-2f0d8a6b7c11', status: 'debited', stage: 'chargeback', reasonCode: '10.4', reason: 'told by Augustina', disputedAmountCents: 500, openedOn: today, dueDate: today } as const; // prettier-ignore
  const origin = () => ({ actor: { type: 'staff', id: 'spec' }, correlationId: house.ids.uuid() }) as const;
  const disputed = async (id: string) => ((await house.state(id)) as Extract<Payment, { phase: 'charged' }>).disputes;

  test.each([
    ['with', () => withTexts()],
    ['without', () => house.request()],
  ])('of a payment %s texts: the same words change nothing, other words are refused', async (_, request) => {
    const id = idOf(await create(null, request()));
    const { reason, ...facts } = terms;
    expect(await openDispute(house.ports, id, terms, origin())).toEqual({ ...facts, taken: [expect.objectContaining({ principalCents: 500 })] });
    expect(JSON.stringify((await house.events(id)).map(({ data }) => data))).not.toContain(reason);
    await openDispute(house.ports, id, terms, origin());
    expect(await disputed(id)).toHaveLength(1);
    expect(await house.history(id)).toHaveLength(3);
    expect(await refused(openDispute(house.ports, id, { ...terms, reason: 'something else' }, origin()))).toMatchObject({ code: 'INVALID_STATE' });
  });
  test('of an erased payment is compared without its reason', async () => {
    const id = idOf(await create(null));
    await openDispute(house.ports, id, terms, origin());
    await erase(id);
    await openDispute(house.ports, id, { ...terms, reason: 'something else' }, origin());
    expect(await house.history(id)).toHaveLength(3);
    expect(await refused(openDispute(house.ports, id, { ...terms, reasonCode: '13.1' }, origin()))).toMatchObject({ code: 'INVALID_STATE' });
  });
});

describe('while the keys of the database are away', () => {
  let away = false;
  const broken = (): PaymentServices => {
    const rows = postgresPersonalKeyRows(ground.pool);
    const gone = () => Promise.reject(new Error('the keys are away'));
    const failing: PersonalKeyRows = {
      insert: (keys) => (away ? gone() : rows.insert(keys)),
      find: (ids) => (away ? gone() : rows.find(ids)),
      discard: (ids) => rows.discard(ids),
      forget: (...given) => rows.forget(...given),
    };
    const { ids, clock, ports, services } = house;
    const personal = createPersonalKeys(failing, { keys: ground.keys, ids, clock, log: ports.log, block: 4 });
    return { ...services, ports: { ...ports, personal } };
  };
  beforeEach(() => {
    away = false;
  });

  test('creates go on while a block lasts, and are then refused before anything is charged', async () => {
    const services = broken();
    expect((await create(house.key(), withTexts(), services)).status).toBe(200);
    away = true;
    for (let number = 0; number < 3; number++) expect((await create(house.key(), withTexts(), services)).status).toBe(200);
    const [key, before] = [house.key(), await house.balance()];
    const answer = await create(key, withTexts(), services);
    expect(read(answer)).toMatchObject({ status: 503, code: 'IDEMPOTENCY_UNAVAILABLE' });
    expect(await house.balance()).toBe(before);
    // A create without texts needs no key.
    expect((await create(house.key(), house.request(), services)).status).toBe(200);
    // The refusal gave its key back.
    away = false;
    expect((await create(key, withTexts(), services)).status).toBe(200);
  });
  test('the refusal says when to try again, and the log says why', async () => {
    away = true;
    const services = broken();
    const logged: unknown[] = [];
    const ports = {
      ...services.ports,
      log: { ...services.ports.log, error: (fields: unknown) => void logged.push(fields) },
    } as typeof services.ports;
    const answer = await create(null, withTexts(), { ...services, ports });
    expect(read(answer)).toMatchObject({ status: 503, code: 'IDEMPOTENCY_UNAVAILABLE' });
    expect(answer.retryAfterSeconds).toBe(1);
    expect(logged).toContainEqual({ err: expect.objectContaining({ message: 'the keys are away' }) });
  });
  test('a refused create is no attempt (C70)', async () => {
    await house.administration.setLimits(house.portalId, 'case', { attempts: 1, declines: null, windowSeconds: 3_600, blockSeconds: null });
    await house.project();
    const services = broken();
    away = true;
    const request = () => withTexts({ referenceId: 'CASE-1' });
    expect(read(await create(null, request(), services)).code).toBe('IDEMPOTENCY_UNAVAILABLE');
    away = false;
    expect((await create(null, request(), services)).status).toBe(200);
    expect(read(await create(null, request(), services)).code).toBe('VELOCITY_LIMIT');
  });
  test('a boxed answer is refused (C19), and given again later', async () => {
    const services = broken();
    const key = house.key();
    const answer = await create(key, withTexts(), services);
    away = true;
    expect(read(await create(key, withTexts(), services))).toMatchObject({ status: 503, code: 'IDEMPOTENCY_UNAVAILABLE' });
    away = false;
    expect((await create(key, withTexts(), services)).body).toBe(answer.body);
  });
  test('reads of payments with texts fail, and those without go on', async () => {
    const services = broken();
    const [withText, without] = [idOf(await create(null, withTexts(), services)), idOf(await create(null, house.request(), services))];
    away = true;
    await expect(findPayment(services, house.accountId, withText)).rejects.toThrow('away');
    expect((await findPayment(services, house.accountId, without)).id).toBe(without);
  });
  test('a refund with a reason is refused before it begins; one without goes on', async () => {
    const services = broken();
    const id = idOf(await create(null, withTexts(), services));
    away = true;
    const ask = (reason: string | null) => sent(reverseOnce(services, { operation: 'refund', paymentId: id, accountId: house.accountId, initiatedBy: 'partner', amountCents: 100, includeFee: false, reason }, house.received(house.key(), reason))); // prettier-ignore
    expect(read(await ask('told by Augustina'))).toMatchObject({ status: 503, code: 'IDEMPOTENCY_UNAVAILABLE' });
    expect(await house.history(id)).toEqual(['PaymentInitiated', 'PaymentCreated']);
    expect((await ask(null)).status).toBe(200);
  });
});
