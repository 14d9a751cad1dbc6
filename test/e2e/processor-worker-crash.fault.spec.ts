/**
 * `kill -9` of a worker process at each call to a processor: recovery, settlement rounds, dispute rounds, and the refunds of exceptions.
 *
 * Each flow has a proxy, or its own operations at one. A worker is killed before its first call of a flow, and after each call that no earlier kill
 * came after: the processor has executed it, and its answer is withheld. "Each call" means each sequence of calls since the start of the worker. A
 * new worker then goes on, until one comes to the end of every flow. So no call can be left out.
 *
 * Flows run side by side, and one kill serves all of them: the proxies hold each flow at its next new call, and then the worker is killed.
 */
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { EVERYTHING, type FeeConfig, NO_FEE } from '#accounts';
import { findDrift } from '#audit';
import { askVendor, readCredentials } from '#gateways';
import { CLOSED, systemClock } from '#kernel';
import { isVisible, paymentView, staff } from '#payments';
import { advanceSandboxTime, collect } from '#platform';
import { exceptionRows, recordDisputes, recordSettlements, sendRefund, type SettlementEvent, settlementEvents } from '#settlement';
import type { Fault as NetFault } from '../doubles/authorize-net/faults.js';
import { type AuthorizeNetDouble, DEFAULT_MERCHANTS, startAuthorizeNetDouble } from '../doubles/authorize-net/server.js';
import { controlOf, type StripeControl } from '../doubles/stripe/control.js';
import { startStripeDouble, type StripeDouble } from '../doubles/stripe/server.js';
import type { Thing } from '../doubles/stripe/vendor.js';
import { booksOf } from '../support/books.js';
import { eventually } from '../support/eventually.js';
import { type Running, startIn } from '../support/merchants.js';
import { DataDir, kill, type RunningProcess, start } from '../support/processes.js';
import { heldByAuthorizeNet, heldByStripe, type Moment, type ProcessorCall, startProcessorProxy } from '../support/processor-proxy.js';
import { type Answer, paymentOf } from '../support/service.js';
import { paymentStreams } from '../support/truth.js';

const CARD = '4111 1111 1111 1111';
const [MINUTE_MS, HOUR_MS, DAY_MS] = [60_000, 3_600_000, 86_400_000];
/** More lines than one event holds. So a kill can leave a batch that is recorded in part. */
const MANY = 205;
const FEE_CENTS = 50;

const stops: (() => unknown)[] = [];
let folder: string;
let net: AuthorizeNetDouble;
let stripe: StripeDouble;
let running: Running;
let dataDir: DataDir;

// ------------------------------------------------------------------------------------------------------------------------------------
// Flows and kills.

interface Flow {
  /** The operations of the last call of each sequence after which a worker was killed. */
  readonly kills: string[];
  readonly sequences: Set<string>;
  /** The calls of the worker that runs now. */
  calls: string[];
  /** True: the worker waits for an answer that will not come. */
  held: boolean;
}
/** By name: that of a merchant account, or `disputes of` one. */
const flows = new Map<string, Flow>();

/** Whether a call ends here. A flow that is not watched passes. */
const judge = (name: string, call: string): Moment | null => {
  const flow = flows.get(name);
  if (!flow) return null;
  if (flow.held) return 'before';
  flow.calls.push(call);
  const [moment, sequence, at]: [Moment, string, string] =
    flow.sequences.size === 0 ? ['before', '', `before ${call}`] : ['after', flow.calls.join(' '), call];
  if (flow.sequences.has(sequence)) return null;
  flow.sequences.add(sequence);
  flow.kills.push(at);
  flow.held = true;
  return moment;
};

const NET_CALLS: Readonly<Record<string, string>> = {
  getUnsettledTransactionListRequest: 'unsettled',
  getSettledBatchListRequest: 'batches',
  getTransactionListRequest: 'batch',
  getTransactionDetailsRequest: 'details',
  updateHeldTransactionRequest: 'decline',
};
const netCall = ({ body }: ProcessorCall): string => {
  const [name] = Object.keys(JSON.parse(body) as object) as [string];
  return NET_CALLS[name] ?? /"transactionType":"(\w+)Transaction"/.exec(body)?.[1] ?? name;
};
/** `intent` and `intents`, `refund` and `refunds` and so on: one object, or the list. A change has its own name. */
const stripeCall = ({ method, path }: ProcessorCall): string => {
  const [, , list, id, action] = new URL(path, 'http://stripe').pathname.split('/') as [string, string, string, string?, string?];
  const one = list.replace('payment_', '').replace(/s$/, '');
  if (list === 'balance_transactions') return 'lines';
  if (method === 'GET') return id ? one : `${one}s`;
  return action ?? (id ? 'close key' : `make ${one}`);
};

/** Brings the read models up to the log. Without a worker, nobody else does. */
const catchUp = async (): Promise<void> => {
  const { readModels, store } = running.services;
  const head = (await store.head())!;
  await Promise.all(readModels.all().map((model) => model.runUntil(head, { timeoutMs: 20_000 })));
};

const startWorker = (): Promise<RunningProcess> => {
  const { databaseUrl, dataDir: keys } = running;
  const env = { DATABASE_URL: databaseUrl, MASTER_KEY_FILE: join(keys, 'master.key'), SIMULATOR_URL: 'http://127.0.0.1:1' };
  return start('worker', dataDir, env);
};

/** Starts a worker, and resolves as soon as it is held in a flow, and each flow is held or `isOver`. The result is false if all are over. */
const workUntilHeld = async (isOver: (flow: string, worker: RunningProcess, since: Date) => Promise<boolean>): Promise<boolean> => {
  for (const flow of flows.values()) [flow.calls, flow.held] = [[], false];
  const { pool } = running.services;
  // Each owner was killed, and each pause is one of minutes. The spec waits for neither.
  await pool.query('update projection_checkpoint set owner = null, lease_until = null');
  await pool.query('delete from recovery_try');
  await catchUp();
  const since = new Date();
  const worker = await startWorker();
  await eventually(
    async () => {
      for (const [name, { held, calls }] of flows)
        if (!held && !(await isOver(name, worker, since))) throw new Error(`${name} is neither held nor over after: ${calls.join(', ')}`);
      return true;
    },
    { everyMs: 50 },
  );
  const isHeld = [...flows.values()].some(({ held }) => held);
  kill(worker.pid);
  expect((await worker.exited).signal).toBe('SIGKILL');
  return isHeld;
};

/**
 * Kills workers in these flows until one comes to the end of all. Returns the calls after which each flow was killed. Those of
 * Authorize.Net are named once: on a slow machine, a scan outlasts its question, and the next question begins another scan.
 */
const killEverywhere = async (names: readonly string[], before: () => Promise<unknown>, isOver: Parameters<typeof workUntilHeld>[0]) => {
  flows.clear();
  for (const name of names) flows.set(name, { kills: [], sequences: new Set(), calls: [], held: false });
  do await before();
  while (await workUntilHeld(isOver));
  return Object.fromEntries([...flows].map(([name, { kills }]) => [name, name.startsWith('net') ? [...new Set(kills)] : kills]));
};

// ------------------------------------------------------------------------------------------------------------------------------------
// The installation: one merchant account for each flow. This process is the API. It calls the doubles directly, only workers call by the proxies.

const NET = ['net-lost', 'net-held', 'net-void', 'net-refund'] as const;
const CARDS = ['cards-lost', 'cards-old', 'cards-late', 'cards-refund', 'cards-failed'] as const;
type Account = (typeof NET)[number] | (typeof CARDS)[number];
const isNet = (name: Account): name is (typeof NET)[number] => name.startsWith('net');
const portals = {} as Record<Account, string>;
const cards = {} as Record<(typeof CARDS)[number], StripeControl>;

const addAccount = async (name: Account): Promise<void> => {
  const { admin, inForce, accountId, services } = running;
  const gateway = isNet(name) ? 'authorize-net' : 'stripe';
  let credentials: object;
  let target: string;
  if (isNet(name)) {
    credentials = { apiLoginId: name, transactionKey: `key-of-${name}` };
    net.vendor.setMerchant({ ...DEFAULT_MERCHANTS[0]!, ...(credentials as { apiLoginId: string; transactionKey: string }), gatewayId: String(800_001 + NET.indexOf(name)), name }); // prettier-ignore
    target = net.endpoint;
  } else {
    credentials = { secretKey: `sk_test_${name.replace('-', '_')}_0001` };
    cards[name] = controlOf(stripe.url, `acct_3Double${name.slice(6)}`);
    await cards[name].account([(credentials as { secretKey: string }).secretKey]);
    target = stripe.url;
  }
  const flowOf = (call: ProcessorCall): [string, string] => {
    const said = isNet(name) ? netCall(call) : stripeCall(call);
    return [said.startsWith('dispute') ? `disputes of ${name}` : name, said];
  };
  const proxy = await startProcessorProxy(
    target,
    (call) => judge(...flowOf(call)),
    () => undefined,
  );
  stops.push(() => proxy.close());
  const endpoint = isNet(name) ? proxy.url + new URL(target).pathname : proxy.url;
  const account = { merchantAccount: name, gateway, environment: 'sandbox', settings: { cutOff: null, endpoint } } as const;
  const sealed = readCredentials(gateway, 'sandbox', JSON.stringify(credentials));
  const about = await askVendor({ ...account, repeats: null }, sealed, { clock: systemClock });
  await inForce(admin.addMerchantAccount({ ...account, name: about.name }, about.externalId, sealed, await services.directory.merchantAccounts()));
  const fee: FeeConfig = { ...NO_FEE, flatCents: FEE_CENTS, chargeMode: name === 'net-lost' ? 'separate' : 'combined' };
  const { portalId } = (await inForce(admin.createPortal({ accountIds: [accountId], name, gateway: 'none', fee }))).state;
  await inForce(admin.setGateway(portalId, { gateway, principal: name, fee: name }));
  portals[name] = portalId;
};

const ask = (name: Account) => {
  const by = isNet(name) ? { number: CARD } : { paymentMethod: { type: 'card_token', token: 'pm_card_visa' } };
  return running.client.create(paymentOf(portals[name], by));
};
const paid = async (name: Account): Promise<string> => {
  const { status, data, text } = await ask(name);
  if (status !== 200) throw new Error(`no payment: ${text}`);
  return data.id;
};
/** Waits for a request whose answer the processor loses. Resolves to the id of the payment. */
const lost = async (request: Promise<Answer<unknown>>): Promise<string> => {
  const { status, code, details } = await request;
  expect([status, code]).toEqual([504, 'PAYMENT_TIMEOUT']);
  return details!.id as string;
};
const netFault = (name: NetFault['name'], op: NetFault['op'], more: Partial<NetFault> = {}) =>
  net.vendor.setFault({ name, op, ref: null, times: 1, ms: 0, code: 2, reason: 2, ...more });
const intentOf = async (id: string): Promise<string> => {
  const { payment } = await running.services.payments.ports.streams.load(id);
  if (payment.phase !== 'charged') throw new Error(`the payment is ${payment.phase}`);
  return payment.legs[0]!.transactionId;
};

/** Moves the time of the sandbox and of both doubles. No worker runs meanwhile. */
const advance = async (ms: number): Promise<void> => {
  const { services } = running;
  const moved = await advanceSandboxTime(services.pool, services.clock, services.clock.now() + ms, async () => undefined);
  await services.sandboxTime!.reaches(moved.aheadMs);
  net.vendor.moveTo(net.vendor.ahead + ms);
  stripe.vendor.moveTo(stripe.vendor.ahead + ms);
};
const record = (merchantAccount: Account) => recordSettlements(running.services.settlement, AbortSignal.timeout(20_000), { merchantAccount });
/** Lets workers read these feeds at once, and no others. */
const due = async (...feeds: readonly (readonly [Account, 'settlement' | 'disputes'])[]): Promise<void> => {
  await running.services.pool.query(
    `update gateway_feed set next_at = clock_timestamp() + case when merchant_account || ' ' || feed = any($1::text[]) then interval '0' else interval '1 day' end`,
    [feeds.map((one) => one.join(' '))],
  );
};
const hasRead = async (merchantAccount: string, feed: 'settlement' | 'disputes', since: Date): Promise<boolean> => {
  const { rowCount } = await running.services.pool.query(
    'select from gateway_feed where merchant_account = $1 and feed = $2 and last_ok_at > $3 and last_error is null',
    [merchantAccount, feed, since],
  );
  return rowCount === 1;
};
/** True if a worker has written that its try to resolve a payment has ended. A scan that is still under way is asked for again within seconds. */
const hasTried = ({ stderr }: RunningProcess, paymentId: string): boolean =>
  stderr()
    .split('\n')
    .some((line) => line.includes(`"paymentId":"${paymentId}"`) && line.includes('"msg":"recovery"') && !line.includes('"why":"in_flight"'));

const isOpen = async (paymentId: string): Promise<boolean> => {
  const { payment } = await running.services.payments.ports.streams.load(paymentId);
  if (payment.phase === 'charged') return payment.attempts.some(({ ended }) => ended === null);
  return payment.phase === 'pending' || payment.phase === 'unknown';
};
/** True if a worker has resolved a payment, or its try has ended. */
const isTried = async (worker: RunningProcess, paymentId: string) => hasTried(worker, paymentId) || !(await isOpen(paymentId));

/** The payment that each flow of recovery is about. */
const open = {} as Record<Account, string>;
/** The exception whose refund is lost. */
let exceptionId: string;
/** A payout that is not complete when it is first listed. */
let early: Thing;
let inquiry: Thing;
let disputed: Thing;

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'payfold-worker-crash-'));
  dataDir = await DataDir.create();
  stops.push(() => dataDir.remove());
  net = await startAuthorizeNetDouble({ file: join(folder, 'net.jsonl') });
  stripe = await startStripeDouble({ file: join(folder, 'stripe.jsonl') });
  stops.push(
    () => net.close(),
    () => stripe.close(),
  );
  running = await startIn({ folder, stops }, 'sandbox', { 'authorize-net': net.endpoint, stripe: stripe.url }, { withWorker: false });
  for (const name of [...NET, ...CARDS]) await addAccount(name);
  // Only after this check may recovery send a refund again at Authorize.Net.
  const guarantees = [{ guarantee: 'g8', result: 'holds', detail: 'spec' }] as const;
  await running.inForce(running.admin.recordMerchantCheck('net-refund', 'spec', guarantees));
  const { services, client } = running;
  const { settlement, pool } = services;
  await catchUp();
  // Every feed has been read before, Authorize.Net's up to now. Without a cursor it is asked for two years, month by month.
  await pool.query(
    `insert into gateway_feed (gateway, merchant_account, feed, next_at, cursor)
     select case when name like 'net%' then 'authorize-net' else 'stripe' end, name, feed, clock_timestamp() + interval '1 day',
       case when name like 'net%' then $2 end
     from unnest($1::text[]) name, unnest('{settlement,disputes}'::text[]) feed where not (name like 'net%' and feed = 'disputes')`,
    [[...NET, ...CARDS], String(services.clock.now() - DAY_MS)],
  );

  // A day ago: a lost charge and a lost refund, whose keys Stripe forgets, and payments that settle.
  await cards['cards-old'].fault('cut_after', { op: 'confirm' });
  open['cards-old'] = await lost(ask('cards-old'));
  open['cards-late'] = await paid('cards-late');
  await cards['cards-late'].fault('cut_after', { op: 'refund' });
  await lost(client.refund(open['cards-late'], { amountCents: 2_000 }));
  open['net-refund'] = await paid('net-refund');
  net.vendor.closeNow('net-refund');
  open['cards-refund'] = await paid('cards-refund');
  early = (await cards['cards-refund'].payOut({ status: 'in_progress' }))!;
  const failing = await paid('cards-failed');
  await cards['cards-failed'].payOut();
  await advance(26 * HOUR_MS);
  for (const id of ['inquiry', 'dispute']) {
    const intent = await intentOf(await paid('cards-refund'));
    if (id === 'inquiry') inquiry = await cards['cards-refund'].dispute(intent, { status: 'warning_needs_response' });
    else disputed = await cards['cards-refund'].dispute(intent);
  }
  await cards['cards-refund'].payOut();
  await recordDisputes(settlement, AbortSignal.timeout(20_000), { merchantAccount: 'cards-refund' });
  for (const name of ['net-refund', 'cards-refund', 'cards-failed'] as const) expect(await record(name)).toHaveLength(1);

  // A refund that fails after it has settled. Its money is sent again, and the answer is lost.
  const failed = cards['cards-failed'];
  expect((await client.refund(failing, { amountCents: 4_000 })).status).toBe(200);
  await failed.payOut();
  await record('cards-failed');
  await failed.failRefund((await failed.refunds())[0]!.id);
  await failed.payOut();
  await record('cards-failed');
  while ((await services.openExceptions()) > 0);
  const [exception, ...more] = await collect(exceptionRows(pool, EVERYTHING, { status: null, now: services.clock.now() }));
  expect([exception?.kind, more]).toEqual(['REFUND_FAILED', []]);
  exceptionId = exception!.exceptionId;
  await failed.fault('cut_after', { op: 'refund' });
  await failed.fault('http_503', { op: 'update' });
  const sending = sendRefund(settlement, { exceptionId, reason: 'the card was closed', by: 'Dana', last4: null }, staff('Dana', services.ids.uuid()));
  await expect(sending).rejects.toMatchObject({ code: 'PAYMENT_TIMEOUT' });

  // Two minutes ago: answers that were lost.
  netFault('cut_after', 'charge');
  open['net-lost'] = await lost(ask('net-lost'));
  netFault('held', 'charge', { reason: 253 });
  netFault('cut_after', 'charge');
  open['net-held'] = await lost(ask('net-held'));
  open['net-void'] = await paid('net-void');
  netFault('cut_before', 'void');
  await lost(client.void(open['net-void'], {}));
  netFault('cut_before', 'refund');
  await lost(client.refund(open['net-refund'], { feeType: 'include_fee' }));
  await cards['cards-lost'].fault('cut_after', { op: 'confirm' });
  open['cards-lost'] = await lost(ask('cards-lost'));
  await cards['cards-refund'].fault('cut_after', { op: 'refund' });
  await lost(client.refund(open['cards-refund'], { amountCents: 3_000 }));
  await advance(2 * MINUTE_MS);
  expect([net.vendor.faults, Object.keys(open).length]).toEqual([[], 8]);
});
afterAll(async () => {
  for (const stop of stops.reverse()) await stop();
  await rm(folder, { recursive: true, force: true });
});

/** Cents that the processor holds of a charge. null: of all charges of the account. */
const heldAt = async (name: Account, ref: string | null): Promise<number> =>
  isNet(name) ? heldByAuthorizeNet(net, name, ref) : heldByStripe(cards[name], ref);

/** The transaction that a line of a payout is about, by the processor's own objects. */
const transactionOf = (account: string, { id, source }: Thing): string => {
  const object = stripe.vendor.byId(account, String(source));
  if (object?.object === 'refund') return object.id;
  return object ? String(object.payment_intent) : id;
};

describe('a worker is killed before its first call, and after each call', () => {
  test('recovery: lost charges, voids and refunds, and the refund of an exception', async () => {
    const kills = await killEverywhere([...NET, ...CARDS], due, async (name, worker) => {
      if (name !== 'cards-failed') return isTried(worker, open[name as Account]);
      const types: string[] = [];
      for await (const { type } of running.services.store.read(`exception-${exceptionId}`)) types.push(type);
      return types.includes('ExceptionResolved');
    });
    expect(kills).toEqual({
      'net-lost': ['before unsettled', 'unsettled', 'batches', 'details', 'void'],
      'net-held': ['before unsettled', 'unsettled', 'batches', 'details', 'void', 'decline'],
      'net-void': ['before details', 'details', 'void'],
      'net-refund': ['before details', 'details', 'unsettled', 'batches', 'refund'],
      'cards-lost': ['before make intent', 'make intent', 'cancel', 'intent', 'make refund'],
      'cards-old': ['before intents', 'intents', 'cancel', 'intent', 'refunds', 'make refund'],
      'cards-late': ['before refunds', 'refunds'],
      'cards-refund': ['before close key', 'close key', 'make refund'],
      'cards-failed': ['before close key', 'close key', 'make refund'],
    });
    const stillOpen: string[] = [];
    for (const [name, id] of Object.entries(open)) if (await isOpen(id)) stillOpen.push(name);
    // Only the batch can tell that the fee of this payment was never charged.
    expect(stillOpen).toEqual(['net-lost']);
  }, 300_000);

  test('recovery after the batch, settlement and disputes', async () => {
    const refunding = cards['cards-refund'];
    for (let made = 0; made < MANY; made += 41) await Promise.all(Array.from({ length: 41 }, () => paid('net-refund')));
    for (const name of NET) net.vendor.closeNow(name);
    // Only the details of a rejected transaction say what it was.
    net.vendor.setStatus(net.vendor.all('net-refund').at(-1)!, 'settlementError');
    await advance(4 * DAY_MS);
    for (let fee = 0; fee < MANY; fee += 1)
      stripe.vendor.bookForeign('acct_3Doublerefund', { type: 'stripe_fee', reporting_category: 'fee', amount: -1, fee: 0, source: null });
    const lastIntent = await intentOf(await paid('cards-refund'));
    await refunding.changePayout(early.id, { reconciliation_status: 'completed' });
    await refunding.changeDispute(inquiry.id, { status: 'needs_response' });
    await refunding.changeDispute(disputed.id, { status: 'won' });
    await refunding.dispute(lastIntent);
    await refunding.payOut();
    const names = ['net-lost', 'net-refund', 'cards-refund', 'disputes of cards-refund'];
    const kills = await killEverywhere(
      names,
      () => due(['net-refund', 'settlement'], ['cards-refund', 'settlement'], ['cards-refund', 'disputes']),
      async (name, worker, since) => {
        if (name === 'net-lost') return isTried(worker, open['net-lost']);
        return name.startsWith('disputes') ? hasRead('cards-refund', 'disputes', since) : hasRead(name, 'settlement', since);
      },
    );
    expect(kills).toEqual({
      'net-lost': ['before unsettled', 'unsettled', 'batches', 'batch', 'details'],
      'net-refund': ['before batches', 'batches', 'batch', 'details'],
      // A payout that was not complete, and one with three pages of lines.
      'cards-refund': ['before payout', 'payout', 'lines', 'payouts', 'payouts', 'lines', 'lines', 'lines'],
      // Two disputes that were open, then the list. One more, when the inquiry has become a dispute.
      'disputes of cards-refund': ['before dispute', 'dispute', 'dispute', 'disputes', 'disputes'],
    });
    expect(await isOpen(open['net-lost'])).toBe(false);
  }, 300_000);
});

describe('then one worker goes on to the end', () => {
  const ALL = [...NET, ...CARDS].map((name) => [name, 'settlement'] as const);

  beforeAll(async () => {
    for (const name of NET) net.vendor.closeNow(name);
    for (const name of CARDS) await cards[name].payOut();
    await advance(3 * DAY_MS);
    await due(...ALL, ['cards-refund', 'disputes']);
    flows.clear();
    const { services } = running;
    await services.pool.query('update projection_checkpoint set owner = null, lease_until = null');
    const since = new Date();
    const worker = await startWorker();
    for (const [name, feed] of [...ALL, ['cards-refund', 'disputes'] as const]) await eventually(() => hasRead(name, feed, since));
    const { code, signal, stderr } = await worker.stop();
    expect([code, signal]).toEqual([0, null]);
    expect(stderr.split('\n').filter((line) => /"level":[56]0/.test(line))).toEqual([]);
    await catchUp();
    while ((await services.openExceptions()) > 0);
    await catchUp();
  });

  test('for each payment and in sum, the processors hold exactly the cents of the log', async () => {
    const sums = new Map<string, number>();
    const statuses: (readonly [string, string])[] = [];
    let seen = 0;
    for (const { paymentId, payment } of await paymentStreams(running.services.store)) {
      if (!isVisible(payment)) continue;
      seen += 1;
      const { status, settlement, capturedAmountCents, refundedAmountCents } = paymentView(paymentId, payment, CLOSED);
      const cents = settlement?.status === 'rejected' ? 0 : capturedAmountCents - refundedAmountCents;
      const { merchantAccount } = payment.terms.legs[0]!.account;
      const held = await Promise.all(payment.terms.legs.map(({ references }) => heldAt(merchantAccount as Account, references.charge)));
      expect([paymentId, status, held.reduce((sum, one) => sum + one, 0)]).toEqual([paymentId, status, cents]);
      if (status !== 'succeeded') statuses.push([merchantAccount, status]);
      sums.set(merchantAccount, (sums.get(merchantAccount) ?? 0) + cents);
    }
    expect(seen).toBeGreaterThan(MANY);
    // The statuses of the payments of the flows. All others have succeeded.
    expect(Object.fromEntries(statuses)).toEqual({
      'net-lost': 'voided',
      'net-held': 'failed',
      'net-void': 'voided',
      'net-refund': 'refunded',
      'cards-lost': 'voided',
      'cards-old': 'voided',
      'cards-late': 'partially_refunded',
      'cards-refund': 'partially_refunded',
      'cards-failed': 'partially_refunded',
    });
    expect(statuses).toHaveLength(9);
    for (const name of [...NET, ...CARDS]) expect([name, await heldAt(name, null)]).toEqual([name, sums.get(name)]);
  });

  test('every batch is recorded once, with each line once', async () => {
    const recorded = new Map<string, SettlementEvent[]>();
    for await (const events of running.services.store.readAll(null, { streamPrefixes: ['settlement-'] }))
      for (const event of events) {
        const fact = settlementEvents.read(event);
        if (!('batchId' in fact.data)) continue;
        const { merchantAccount, batchId } = fact.data;
        recorded.set(`${merchantAccount} ${batchId}`, [...(recorded.get(`${merchantAccount} ${batchId}`) ?? []), fact]);
      }
    const expected = new Map<string, string[]>();
    for (const name of NET)
      for (const { id, members } of net.vendor.batches(name))
        expected.set(
          `${name} ${id}`,
          members.filter(({ status }) => status !== 'voided' && status !== 'declined').map((txn) => txn.id),
        );
    for (const name of CARDS) {
      const account = `acct_3Double${name.slice(6)}`;
      for (const { id, balance_transaction: own } of stripe.vendor.all(account, 'payout'))
        expected.set(
          `${name} ${id}`,
          stripe.vendor.linesOfPayout(account, id, null, 1_000)!.data.flatMap((txn) => (txn.id === own ? [] : [transactionOf(account, txn)])),
        );
    }
    const lines = new Map(
      [...recorded].map(([name, facts]) => [
        name,
        facts.flatMap(({ type, data }) => (type === 'SettlementLinesRecorded' ? data.lines : [])).map(({ transactionId }) => transactionId),
      ]),
    );
    const sorted = (all: ReadonlyMap<string, readonly string[]>) => [...all].map(([name, ids]) => [name, [...ids].sort()]).sort();
    expect(sorted(lines)).toEqual(sorted(expected));
    for (const [name, facts] of recorded) {
      const numbers = facts.flatMap(({ type, data }) => (type === 'SettlementLinesRecorded' ? data.lines : [])).map(({ number }) => number);
      expect(numbers).toEqual(numbers.map((_, index) => index));
      // Nothing was corrected or added, and each batch was completed and funded once. Authorize.Net names no day of funding.
      const types = facts.map(({ type }) => type).filter((type) => type !== 'SettlementLinesRecorded');
      expect(types).toEqual(name.startsWith('net') ? ['SettlementBatchRecorded'] : ['SettlementBatchRecorded', 'BatchFunded']);
    }
    // A worker was killed between the two parts of each of these.
    const inParts = [...recorded].filter(([, facts]) => facts.filter(({ type }) => type === 'SettlementLinesRecorded').length === 2);
    expect(inParts.map(([name]) => name.split(' ')[0]).sort()).toEqual(['cards-refund', 'net-refund']);
  });

  test('each dispute is opened once, and stands as the processor has it', async () => {
    const recorded: (readonly [string, string])[] = [];
    for (const { facts } of await paymentStreams(running.services.store))
      for (const { type, data } of facts) if (type === 'PaymentDisputed') recorded.push([data.source!.externalId, data.status]);
    const [second, first, third, ...more] = stripe.vendor.all('acct_3Doublerefund', 'dispute');
    expect([second!.id, first!.id, more]).toEqual([inquiry.id, disputed.id, []]);
    // The first one was opened before the spec began to kill workers.
    const expected = [[first!.id, 'debited'], [first!.id, 'recovered'], [second!.id, 'debited'], [third!.id, 'debited']]; // prettier-ignore
    expect(recorded.sort()).toEqual(expected.sort());
  });

  test('suspense is 0, the books balance, and nothing differs from the log', async () => {
    const { pool, seal, clock, store } = running.services;
    const cents = await booksOf(running.services);
    const exceptions = await collect(exceptionRows(pool, EVERYTHING, { status: null, now: clock.now() }));
    expect([cents(/suspense/), cents(/:unsettled$/), exceptions.map(({ kind, status }) => [kind, status])]).toEqual([0, 0, []]);
    const drift = await findDrift(seal, { streams: null });
    expect([drift.differences, drift.payments > MANY]).toEqual([[], true]);
    const tasks: unknown[] = [];
    for await (const events of store.readAll(null, { streamPrefixes: ['staff-'] }))
      tasks.push(...events.map(({ data }) => (data as { reason?: string }).reason));
    expect(tasks).toEqual(['refund_failed', 'settlement_rejected']);
  });
});
