/**
 * Answers of a processor that are lost, seen from outside: the partner's answers, recovery by the worker, what staff see, and the books after the
 * batch. The doubles of both processors run as servers. Their clocks and the clock of the service move together.
 */
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, afterEach, beforeAll, describe, expect, test } from '@jest/globals';
import { NO_FEE } from '#accounts';
import { findDrift } from '#audit';
import type { Fault as NetFault } from '../doubles/authorize-net/faults.js';
import { type AuthorizeNetDouble, startAuthorizeNetDouble } from '../doubles/authorize-net/server.js';
import { controlOf, type StripeControl } from '../doubles/stripe/control.js';
import { startStripeDouble, type StripeDouble } from '../doubles/stripe/server.js';
import { booksOf } from '../support/books.js';
import { eventually } from '../support/eventually.js';
import { addMerchantAccount, payfoldOn, recordBatch, type Running, startIn } from '../support/merchants.js';
import { heldByAuthorizeNet } from '../support/processor-proxy.js';
import { everySubscriber, paymentOf } from '../support/service.js';

const CARD = '4111 1111 1111 1111';
const MERCHANT = 'login-one';
const [SECOND, MINUTE, HOUR, DAY] = [1_000, 60_000, 3_600_000, 86_400_000];
/** The clocks move in steps, so that no timer of the service is passed over. */
const STEP = 20 * SECOND;

const stops: (() => unknown)[] = [];
let folder: string;
let net: AuthorizeNetDouble;
let stripe: StripeDouble;
let cards: StripeControl;
let running: Running;
let netPortal: string;
/** A portal whose fee is a charge of its own. */
let twoLegs: string;
let cardPortal: string;

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'payfold-processor-lost-'));
  net = await startAuthorizeNetDouble({ file: join(folder, 'net.jsonl') });
  stripe = await startStripeDouble({ file: join(folder, 'stripe.jsonl') });
  stops.push(
    () => net.close(),
    () => stripe.close(),
  );
  cards = controlOf(stripe.url);
  running = await startIn({ folder, stops }, 'sandbox');
  const cutOff = ['--cut-off', '16:00', '--time-zone', 'America/Los_Angeles'];
  const login = '{"apiLoginId":"login-one","transactionKey":"key-of-one-0001"}';
  await addMerchantAccount(running, 'net', 'authorize-net', net.endpoint, login, ...cutOff);
  await addMerchantAccount(running, 'cards', 'stripe', stripe.url, '{"secretKey":"sk_test_double_one_0001"}');
  const { admin, inForce, accountId } = running;
  const portal = async (gateway: 'authorize-net' | 'stripe', merchantAccount: string, chargeMode: 'separate' | 'combined') => {
    const fee = { ...NO_FEE, flatCents: 50, chargeMode };
    const { portalId } = (await inForce(admin.createPortal({ accountIds: [accountId], name: gateway, gateway: 'none', fee }))).state;
    await inForce(admin.setGateway(portalId, { gateway, principal: merchantAccount, fee: merchantAccount }));
    return portalId;
  };
  netPortal = await portal('authorize-net', 'net', 'combined');
  twoLegs = await portal('authorize-net', 'net', 'separate');
  cardPortal = await portal('stripe', 'cards', 'combined');
}, 120_000);
afterEach(async () => {
  net.vendor.heal(null);
  await cards.heal();
});
afterAll(async () => {
  for (const stop of stops.reverse()) await stop();
  await rm(folder, { recursive: true, force: true });
});

const advance = async (ms: number) => {
  running.clock.advance(ms);
  net.vendor.moveTo(net.vendor.ahead + ms);
  await cards.advance(ms);
};
const fault = (name: NetFault['name'], fields: Partial<NetFault> = {}) =>
  net.vendor.setFault({ name, op: '*', ref: null, times: 1, ms: 0, code: 2, reason: 2, ...fields });
const byCard = (portal = netPortal) => paymentOf(portal, { number: CARD });
const byToken = () => paymentOf(cardPortal, { paymentMethod: { type: 'card_token', token: 'pm_card_visa' } });

/** A create whose answer the service does not get. Returns the id of the payment. */
const lost = async (body: object): Promise<string> => {
  const answer = await running.client.create(body);
  expect([answer.status, answer.code]).toEqual([504, 'PAYMENT_TIMEOUT']);
  return answer.details!.id as string;
};
const statusOf = async (id: string) => (await running.client.find(id)).data.status;
/** Moves the clocks until the payment has another status than `unknown`. Returns that status, and how far the clocks moved. */
const outcomeOf = async (id: string, atMostMs: number): Promise<{ status: string; afterMs: number }> => {
  for (let afterMs = 0; ; afterMs += STEP) {
    // The worker looks in real time. A try that has begun must end before the clocks move on.
    for (let look = 0; look < 12; look++) {
      const status = await statusOf(id);
      if (status !== 'unknown') return { status, afterMs };
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
    if (afterMs >= atMostMs) return { status: 'unknown', afterMs };
    await advance(STEP);
  }
};
const heldByNet = () => heldByAuthorizeNet(net, MERCHANT, null);
const command = async <T>(...args: string[]): Promise<T> => {
  const { code, stdout, stderr } = await payfoldOn(running, args);
  expect([args, code, stderr]).toEqual([args, 0, '']);
  return JSON.parse(stdout) as T;
};
interface Waiting {
  readonly payments: readonly {
    readonly paymentId: string;
    readonly state: string;
    readonly why: string | null;
    readonly decidedBy: string | null;
  }[];
}
const waitingOf = async (id: string) => (await command<Waiting>('payments', 'waiting')).payments.find(({ paymentId }) => paymentId === id);
const tasksOf = async (id: string) =>
  (await command<{ paymentId: string; reason: string }[]>('payments', 'tasks')).filter(({ paymentId }) => paymentId === id);
const retried = (body: object) => running.client.created(body);

describe('Authorize.Net: an answer is lost', () => {
  test('the charge is visible at once: it is voided within two minutes, and a second create charges once', async () => {
    const before = heldByNet();
    fault('cut_after', { op: 'charge' });
    const id = await lost(byCard());
    expect(heldByNet()).toBeGreaterThan(before);
    const { status, afterMs } = await outcomeOf(id, 2 * MINUTE);
    expect([status, afterMs <= 2 * MINUTE]).toEqual(['voided', true]);
    expect(heldByNet()).toBe(before);
    const again = await retried(byCard());
    expect(heldByNet()).toBe(before + again.totalChargedCents);
  });

  test('the charge is visible only after three minutes: it is voided within two more', async () => {
    const before = heldByNet();
    fault('hidden', { op: 'charge', ms: 3 * MINUTE });
    fault('cut_after', { op: 'charge' });
    const id = await lost(byCard());
    const { status, afterMs } = await outcomeOf(id, 6 * MINUTE);
    expect(status).toBe('voided');
    expect(afterMs).toBeGreaterThanOrEqual(3 * MINUTE);
    expect(afterMs).toBeLessThanOrEqual(5 * MINUTE);
    expect(heldByNet()).toBe(before);
  });

  test('of a payment with two charges: the first is voided within two minutes, and only the batch tells that the second never arrived', async () => {
    const before = heldByNet();
    fault('cut_after', { op: 'charge' });
    const id = await lost(byCard(twoLegs));
    expect(heldByNet()).toBe(before + 10_000);
    for (let ms = 0; ms < 2 * MINUTE && heldByNet() !== before; ms += STEP) {
      await advance(STEP);
      await new Promise((resolve) => setTimeout(resolve, 1_000));
    }
    expect([heldByNet(), await statusOf(id)]).toEqual([before, 'unknown']);
    await advance(2 * DAY);
    expect((await outcomeOf(id, 10 * MINUTE)).status).toBe('voided');
  });

  test('the charge never arrived: staff see until when it waits, then it is voided, and no task is raised', async () => {
    const before = heldByNet();
    fault('cut_before', { op: 'charge' });
    const id = await lost(byCard());
    expect(heldByNet()).toBe(before);
    expect(await outcomeOf(id, 3 * MINUTE)).toMatchObject({ status: 'unknown' });
    const waits = await eventually(() => waitingOf(id));
    expect(waits).toMatchObject({ state: 'waiting', why: 'not_visible', decidedBy: expect.stringMatching(/^\d{4}-.*Z$/) });
    const untilMs = Date.parse(waits.decidedBy!) - running.clock.now();
    expect(untilMs).toBeGreaterThan(6 * HOUR - 10 * MINUTE);
    expect(untilMs).toBeLessThanOrEqual(30 * HOUR);
    await advance(untilMs - 10 * MINUTE);
    expect(await statusOf(id)).toBe('unknown');
    await advance(10 * MINUTE);
    expect((await outcomeOf(id, 10 * MINUTE)).status).toBe('voided');
    expect(await tasksOf(id)).toEqual([]);
    expect(await waitingOf(id)).toBeUndefined();
    expect(heldByNet()).toBe(before);
  });

  test('no byte was sent: 502, nothing waits, its key never charges, and a new key charges once', async () => {
    const before = heldByNet();
    const [key, body] = ['never-sent-1', byCard()];
    // Nobody listens, so each connection is refused.
    const port = Number(new URL(net.url).port);
    await net.close();
    const refused = await running.client.create(body, { key });
    net = await startAuthorizeNetDouble({ file: join(folder, 'net.jsonl'), port });
    expect([refused.status, refused.code]).toEqual([502, 'PAYMENT_GATEWAY_ERROR']);
    expect(await statusOf(refused.details!.id as string)).toBe('failed');
    expect((await running.client.create(body, { key })).status).toBe(409);
    const paid = await eventually(async () => {
      const answer = await running.client.create(body);
      return answer.status === 200 ? answer.data : null;
    });
    expect(heldByNet()).toBe(before + paid.totalChargedCents);
  });

  test('a charge that is a duplicate of somebody else’s is no decline: 502, and the attempt is taken back', async () => {
    await retried(byCard());
    fault('duplicate_foreign', { op: 'charge' });
    const answer = await running.client.create(byCard());
    expect([answer.status, answer.code]).toEqual([502, 'PAYMENT_GATEWAY_ERROR']);
  });
});

describe('Stripe: an answer is lost', () => {
  test('the charge is undone by a refund; its payout matches sale and refund, books the fee, and leaves nothing in suspense', async () => {
    const before = await booksOf(running.services);
    await cards.fault('cut_after', { op: 'confirm' });
    const id = await lost(byToken());
    expect((await outcomeOf(id, 3 * MINUTE)).status).toBe('voided');
    const [refund, ...more] = await cards.refunds();
    expect([refund!.amount, more]).toEqual([10_050, []]);

    await advance(DAY);
    const payout = (await cards.payOut())!;
    await recordBatch(running.services, payout.id);
    const after = await booksOf(running.services);
    const { services } = running;
    for (const subscriber of everySubscriber(services)) await subscriber.runUntil((await services.store.head())!, { timeoutMs: 30_000 });
    expect(await command('settlement', 'exceptions')).toEqual([]);
    expect(after(/suspense/)).toBe(before(/suspense/));
    expect(after(/^liabilities/)).toBe(before(/^liabilities/));
    // The processor keeps its fee for the sale, although the whole sale went back.
    expect(after(/^expense:processing/) - before(/^expense:processing/)).toBe(-(payout.amount as number));
    expect(after(/^expense:processing/)).toBeGreaterThan(before(/^expense:processing/));
    const drift = await findDrift(services.seal, { streams: null });
    expect(drift.differences).toEqual([]);
  });

  test('the key of the account is revoked: 502, other accounts go on, and it charges once it is back', async () => {
    await cards.fault('unauthorized', { op: 'create', times: null });
    const refused = await running.client.create(byToken());
    expect([refused.status, refused.code]).toEqual([502, 'PAYMENT_GATEWAY_ERROR']);
    expect((await retried(byCard())).status).toBe('succeeded');
    await cards.heal();
    // Charges through the account go on when its credentials have been accepted again.
    await eventually(async () => (await retried(byToken())).status === 'succeeded', { timeoutMs: 120_000, everyMs: 1_000 });
  });
});
