/**
 * A crash at each named point of a create, a void and a refund (S0 to S6). An API process kills itself with SIGKILL right before or right after one
 * port call. Then another API process gets the same key again. The processor is a separate process, and its books show the money that moved.
 */
import { randomBytes } from 'node:crypto';
import { mkdir, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { Administration, directoryModel, NO_FEE } from '#accounts';
import { createRecovery, postgresRecoveryWork } from '#payments';
import type { Services } from '../../apps/services.js';
import { controlKeyOf, createSimulatorControl, type SimulatorControl } from '../../apps/simulator/control.js';
import { Partner, type Reply } from '../../apps/demo/partner.js';
import { DataDir, launch, newKey, type RunningProcess, start, startApiAndWorker } from '../support/processes.js';
import { freshDatabase } from '../support/postgres.js';
import { CARD, FEE, PARTNER, paymentOf } from '../support/service.js';
import { type Book, type Books, endLeases, openStores, readBooks, recoverAll } from '../support/truth.js';

let dataDir: DataDir;
let database: Awaited<ReturnType<typeof freshDatabase>>;
let bank: SimulatorControl;
let stores: Services;
let healthy: RunningProcess;
let partner: Partner;
let apiKey: string;
let portalId: string;
let env: Record<string, string>;

beforeAll(async () => {
  dataDir = await DataDir.create();
  database = await freshDatabase();
  await mkdir(dataDir.data);
  const masterKeyFile = join(dataDir.data, 'master.key');
  await writeFile(masterKeyFile, JSON.stringify({ current: 'k1', keys: { k1: randomBytes(32).toString('base64') } }), { mode: 0o600 });
  const simulator = await start('simulator', dataDir);
  bank = createSimulatorControl(simulator.url, controlKeyOf(dataDir.data));
  env = { DATABASE_URL: database.url, SIMULATOR_URL: simulator.url, MASTER_KEY_FILE: masterKeyFile };
  stores = await openStores({ databaseUrl: database.url, simulatorUrl: simulator.url }, masterKeyFile, dataDir.data);

  const { store, clock, ids, keys, personal } = stores;
  const actor = { type: 'system', id: 'spec' } as const;
  const admin = new Administration({ store, clock, ids, keys, personal, environment: 'sandbox', cardInTextCheck: true, actor });
  const { accountId } = (await admin.createAccount('Partner')).state;
  const portal = await admin.createPortal({ accountIds: [accountId], name: 'Portal', gateway: 'simulator', fee: { ...NO_FEE, ...FEE } });
  ({ portalId } = portal.state);
  const issued = await admin.issueKey(accountId);
  ({ apiKey } = issued);
  await stores.readModels.of(directoryModel).runUntil(issued.position!, { timeoutMs: 10_000 });

  [healthy] = await startApiAndWorker(dataDir, env);
  partner = new Partner(healthy.url + PARTNER, apiKey);
});

afterAll(async () => {
  await stores?.close();
  await dataDir?.remove();
  await database?.drop();
});

// ------------------------------------------------------------------------------------------------------------------------------------

type Flow = 'create' | 'void' | 'refund' | 'partial refund' | 'refund with fee';
/** Whether recovery runs between the crash and the retry. */
type Before = 'retried' | 'recovered first, then retried';

interface Crash {
  readonly point: string;
  readonly flow: Flow;
  readonly card?: string;
  /** The batch closes before the crash. So money is returned by a refund, not by a void. */
  readonly settled?: boolean;
  /** A first try returned the principal and was answered 502 PARTIAL_REFUND_PENDING. The crash happens in the retry. */
  readonly feePending?: boolean;
  readonly before: Before;
  /** Only for a create: the answer to the retry. Retries of voids and refunds always get 200. */
  readonly answer?: '200 fresh' | '200 replay' | '402 replay' | 'reconcile, no payment' | 'reconcile';
  /** Only for a create: the state of the payment after recovery. */
  readonly ends?: 'succeeded' | 'failed' | 'voided' | 'none';
}

interface Story extends Crash {
  readonly key: string;
  readonly path: string;
  readonly body: object;
  readonly killed: string;
  readonly reply: Reply;
  readonly replayed: Reply;
  /** The payment that the crashed request made or returned. */
  readonly paymentId: string | null;
}

const BODIES: Record<Exclude<Flow, 'create'>, [path: string, body: object]> = {
  void: ['void', { reason: 'crash' }],
  refund: ['refund', {}],
  'partial refund': ['refund', { amountCents: 1_234 }],
  'refund with fee': ['refund', { feeType: 'include_fee' }],
};

const LINES = [7_000, 3_000];
const TOTAL = { principal: 10_000, fee: 300 } as const;
const RETURNED: Record<Exclude<Flow, 'create'>, number> = {
  void: TOTAL.principal + TOTAL.fee,
  refund: TOTAL.principal,
  'partial refund': 1_234,
  'refund with fee': TOTAL.principal + TOTAL.fee,
};

const stories: Story[] = [];

/** Makes a payment, which a later request will return. */
const paid = async (number: string = CARD.approved): Promise<string> => {
  const reply = await partner.post('payments', paymentOf(portalId, { lines: LINES, number }), newKey('paid'));
  if (reply.status !== 200) throw new Error(`no payment: ${reply.text}`);
  return reply.data.id as string;
};

const crash = async (point: string, path: string, body: object, key: string): Promise<string> => {
  const doomed = await start('api', dataDir, { ...env, FAILPOINT: point });
  const answer = await new Partner(doomed.url + PARTNER, apiKey).post(path, body, key).then(
    (reply) => `answered ${reply.status}`,
    () => 'cut off',
  );
  if (answer !== 'cut off') await doomed.stop();
  const { signal } = await doomed.exited;
  return `${answer}, ${signal}`;
};

const SETTLED = { settled: true } as const;
const RECOVERED_FIRST = { before: 'recovered first, then retried' } as const;
const FEE_PENDING = { feePending: true } as const;

const crashes: Crash[] = [];
const at = (flow: Flow, points: string, more: Partial<Crash> = {}) => {
  for (const point of points.split(' ')) crashes.push({ flow, point, before: 'retried', ...more });
};

// A crash right after one call equals a crash right before the next call. So only one of the two names is used. `npm run crash` plays both.
// Creates: S0 to S6.
at('create', 'claim:before', { answer: '200 fresh', ends: 'succeeded' });
at('create', 'claim:after', { answer: 'reconcile, no payment', ends: 'none' });
at('create', 'append.PaymentInitiated:after charge.principal:after charge.fee:after', { answer: 'reconcile', ends: 'voided' });
at('create', 'append.PaymentCreated:after finish:after', { answer: '200 replay', ends: 'succeeded' });
at('create', 'append.PaymentDeclined:before', { card: CARD.declined, answer: 'reconcile', ends: 'failed' });
at('create', 'append.PaymentDeclined:after finish:after', { card: CARD.declined, answer: '402 replay', ends: 'failed' });
at('create', 'append.PaymentOutcomeUnknown:before append.PaymentOutcomeUnknown:after finish:after', {
  card: CARD.unreadable,
  answer: 'reconcile',
  ends: 'voided',
});
at('create', 'append.PaymentFailed:before', { card: CARD.gatewayError, answer: 'reconcile', ends: 'voided' });
at('create', 'append.PaymentFailed:after', { card: CARD.gatewayError, answer: 'reconcile', ends: 'failed' });
// The fee is declined. So the service voids the principal, and then records the decline. After a crash in between, the payment ends as voided.
at('create', 'void.principal:before void.principal:after', { card: CARD.feeDeclined, answer: 'reconcile', ends: 'voided' });
at('create', 'append.PaymentDeclined:after', { card: CARD.feeDeclined, answer: '402 replay', ends: 'failed' });

at('void', 'claim:before claim:after append.VoidRequested:after void.principal:after');
at('void', 'append.PaymentVoided:after void.fee:after append.ReversalEnded:after finish:after');
at('void', 'append.VoidRequested:after void.principal:after append.PaymentVoided:after void.fee:after', RECOVERED_FIRST);

at('refund', 'claim:after append.RefundRequested:after void.principal:after append.ReversalEnded:after');
at('refund', 'append.RefundRequested:after void.principal:after', RECOVERED_FIRST);
at('refund', 'refund.principal:before refund.principal:after append.PaymentRefunded:after', SETTLED);
at('partial refund', 'append.RefundRequested:before append.RefundRequested:after void.principal:after append.PaymentVoided:after finish:after');
at('partial refund', 'append.RefundRequested:after void.principal:after', RECOVERED_FIRST);
at('partial refund', 'refund.principal:before refund.principal:after append.ReversalEnded:after', SETTLED);
at('refund with fee', 'append.RefundRequested:after void.principal:after append.PaymentVoided:after void.fee:after append.ReversalEnded:after');
at('refund with fee', 'finish:after');
at('refund with fee', 'void.principal:after append.PaymentVoided:after void.fee:after', RECOVERED_FIRST);
at('refund with fee', 'refund.principal:after append.PaymentRefunded:after refund.fee:after append.FeeRefunded:after', SETTLED);
at('refund with fee', 'renewAttempt:before renewAttempt:after append.RefundRequested:after void.fee:after', FEE_PENDING);
at('refund with fee', 'renewAttempt:after append.RefundRequested:after void.fee:after', { ...FEE_PENDING, ...RECOVERED_FIRST });

/** The money may have moved, and the log does not say so. */
const MONEY_MAY_HAVE_MOVED = /^(charge|void|refund)\.|Requested:after$/;
/** `npm test` plays all creates, and these crashes of voids and refunds. `npm run kills` plays all crashes. */
const played = process.env.LONG_PROOFS ? crashes : crashes.filter(({ flow, point }) => flow === 'create' || MONEY_MAY_HAVE_MOVED.test(point));

/** How many processes start at the same time. A start needs almost a second of CPU time. */
const AT_ONCE = 3;

beforeAll(async () => {
  const queue = [...played];
  const begun: (Crash & { key: string; path: string; body: object; target: string | null; killed: string })[] = [];
  // Closing the batch settles all payments made so far. So the payments that must be settled are made first.
  queue.sort((a, b) => Number(b.settled ?? false) - Number(a.settled ?? false));
  const settled = await Promise.all(queue.filter(({ flow, settled: yes }) => flow !== 'create' && yes).map(() => paid()));
  await bank.closeBatches();
  await Promise.all(
    Array.from({ length: AT_ONCE }, async () => {
      for (let one = queue.shift(); one; one = queue.shift()) {
        const key = newKey(one.flow.replaceAll(' ', '-'));
        const target =
          one.flow === 'create' ? null : one.settled ? settled.shift()! : await paid(one.feePending ? CARD.feeRefundFailsOnce : undefined);
        const [path, body] =
          one.flow === 'create'
            ? ['payments', paymentOf(portalId, { lines: LINES, referenceId: key, ...(one.card ? { number: one.card } : {}) })]
            : [`payments/${target}/${BODIES[one.flow][0]}`, BODIES[one.flow][1]];
        if (one.feePending) expect((await partner.post(path, body, key)).code).toBe('PARTIAL_REFUND_PENDING');
        begun.push({ ...one, key, path, body, target, killed: await crash(one.point, path, body, key) });
      }
    }),
  );
  // The owners of all leases are dead.
  await endLeases(stores);
  const answer = async (one: (typeof begun)[number]) => {
    const reply = await partner.post(one.path, one.body, one.key);
    const replayed = await partner.post(one.path, one.body, one.key);
    const made = (reply.data.id as string | undefined) ?? reply.paymentId;
    stories.push({ ...one, reply, replayed, paymentId: one.target ?? made });
  };
  await Promise.all(begun.filter(({ before }) => before === 'retried').map(answer));
  await recoverAll(stores);
  await Promise.all(begun.filter(({ before }) => before !== 'retried').map(answer));
  await recoverAll(stores);
}, 900_000);

const title = ({ flow, point, card, settled, feePending, before }: Crash) =>
  `${flow}${settled ? ' after settlement' : ''}${feePending ? ' whose fee is pending' : ''}${card ? ` with the card "${Object.entries(CARD).find(([, number]) => number === card)![0]}"` : ''}, ${point}, ${before}`;
const storyOf = (wanted: Crash): Story => {
  const found = stories.find((story) => title(story) === title(wanted));
  if (!found) throw new Error(`no story: ${title(wanted)}`);
  return found;
};

describe('a crash', () => {
  let books: Books;
  beforeAll(async () => {
    books = await readBooks(stores, bank);
  });
  const standing = ({ charges }: Book) => charges.filter(({ state }) => state !== 'voided').map(({ leg }) => leg);

  test.each(played.filter(({ flow }) => flow === 'create').map((one) => [title(one), one] as const))('%s', (_, wanted) => {
    const { killed, reply, replayed, key, paymentId, answer, ends } = storyOf(wanted);
    expect(killed).toBe('cut off, SIGKILL');
    const made = books.for(key);
    const reconcile = 'IDEMPOTENCY_RECONCILIATION_REQUIRED';
    const spoken =
      reply.status === 409
        ? reply.paymentId === null
          ? 'reconcile, no payment'
          : 'reconcile'
        : `${reply.status} ${reply.replayed ? 'replay' : 'fresh'}`;
    expect([spoken, reply.status === 409 ? reply.code : reconcile]).toEqual([answer, reconcile]);
    // A second retry gets the same bytes. A 200 or 402 is then a replay, and a 409 is not.
    expect([replayed.text, replayed.replayed]).toEqual([reply.text, reply.status !== 409]);
    expect(made.map((book) => [book.paymentId, phaseOf(book)])).toEqual(ends === 'none' ? [] : [[paymentId, ends]]);
    expect(made.flatMap(standing).sort()).toEqual(ends === 'succeeded' ? ['fee', 'principal'] : []);
  });

  test.each(played.filter(({ flow }) => flow !== 'create').map((one) => [title(one), one] as const))('%s', (_, wanted) => {
    const { killed, reply, replayed, flow, paymentId, settled } = storyOf(wanted);
    expect(killed).toBe('cut off, SIGKILL');
    expect([reply.status, reply.code]).toEqual([200, null]);
    expect([replayed.status, replayed.replayed, replayed.text]).toEqual([200, true, reply.text]);
    const returned = RETURNED[flow as Exclude<Flow, 'create'>];
    expect(reply.data.amountCents).toBe(returned);
    if (flow === 'void') expect(reply.data.voidedServiceFeeCents).toBe(TOTAL.fee);
    else expect(reply.data.reversalType).toBe(settled ? 'refund' : 'void');
    // The money was returned once: at the bank, and in the log (readBooks checks the log).
    const book = books.of(paymentId!);
    expect(book.netAtBankCents).toBe(TOTAL.principal + TOTAL.fee - returned);
    expect(book.types.filter((type) => type === 'ReversalEnded').length).toBeGreaterThan(0);
  });

  test('of any kind leaves log and bank equal to the cent, and no key in progress', async () => {
    expect(books.payments.reduce((sum, { netInLogCents }) => sum + netInLogCents, 0)).toBe(books.netAtBankCents);
    const { rows } = await stores.pool.query(`select state, count(*) from idempotency_key where state in ('in_progress', 'released') group by state`);
    expect(rows).toEqual([]);
    process.stderr.write(`failpoints: ${stories.length} kills, ${books.chargesAtBank} charges at the bank, ${books.payments.length} streams\n`);
  });
});

/** Recovers one payment in a separate process, without the usual wait of a minute. */
const RECOVERY = `
  const { readConfig, readKeyRing, createLogger } = await import(process.env.DIST + 'libs/platform/index.js');
  const { createRecovery, postgresRecoveryWork } = await import(process.env.DIST + 'libs/payments/index.js');
  const { openServices, requirePlaces } = await import(process.env.DIST + 'apps/services.js');
  const config = readConfig();
  const services = await openServices(config, requirePlaces(config), readKeyRing(config.masterKeyFile), createLogger('silent', 'recovery'));
  const recovery = createRecovery(services.payments.ports, services.store, postgresRecoveryWork(services.pool), { startsAfterMs: 0 });
  process.stdout.write(await recovery.resolve(process.env.PAYMENT_ID));
  process.exit(0);
`;
const recoverIn = async (paymentId: string, failpoint: string): Promise<string> => {
  const own = { DIST: new URL('../../dist/', import.meta.url).pathname, PAYMENT_ID: paymentId, FAILPOINT: failpoint };
  const { signal, stdout, stderr } = await launch(['--input-type=module', '-e', RECOVERY], dataDir, { ...env, ...own }).exited;
  return `${signal} ${stdout}${stderr}`;
};

describe('a crash of recovery itself leaves the rest to the next round', () => {
  const history = async (paymentId: string) => (await stores.payments.ports.streams.events(paymentId)).map(({ type }) => type);

  test.each([
    ['append.ReconciliationStarted:before'],
    ['append.ReconciliationStarted:after'],
    ['finalize.charge:after'],
    ['void.principal:after'],
    ['append.PaymentVoided:before'],
    ['append.PaymentVoided:after'],
  ])('of a charge, %s', async (failpoint) => {
    const reply = await partner.post('payments', paymentOf(portalId, { lines: LINES, number: CARD.unreadable }), newKey('unknown'));
    expect(reply.code).toBe('PAYMENT_TIMEOUT');
    const paymentId = reply.paymentId!;
    expect(await recoverIn(paymentId, failpoint)).toBe('SIGKILL ');
    await recoverAll(stores);
    const book = (await readBooks(stores, bank)).of(paymentId);
    expect([phaseOf(book), book.netAtBankCents]).toEqual(['voided', 0]);
    expect(book.types.filter((type) => type === 'ReconciliationStarted')).toHaveLength(1);
  });

  test.each([['finalize.void:after'], ['append.ReversalEnded:before'], ['append.ReversalEnded:after']])('of a refund, %s', async (failpoint) => {
    const paymentId = await paid();
    await bank.arm({ match: { call: 'void' }, answer: 'cut' });
    const key = newKey('refund');
    const refund = () => partner.post(`payments/${paymentId}/refund`, { amountCents: 1_234 }, key);
    expect((await refund()).code).toBe('PAYMENT_TIMEOUT');
    expect(await recoverIn(paymentId, failpoint)).toBe('SIGKILL ');
    await recoverAll(stores);
    expect((await history(paymentId)).filter((type) => type === 'ReversalEnded')).toHaveLength(1);
    const retried = await refund();
    expect([retried.status, retried.data.amountCents]).toEqual([200, 1_234]);
    expect((await readBooks(stores, bank)).of(paymentId).netAtBankCents).toBe(TOTAL.principal + TOTAL.fee - 1_234);
  });

  test('two recoveries at once come to one resolution', async () => {
    const reply = await partner.post('payments', paymentOf(portalId, { lines: LINES, number: CARD.unreadable }), newKey('unknown'));
    const work = postgresRecoveryWork(stores.pool);
    const both = [0, 1].map(() => createRecovery(stores.payments.ports, stores.store, work, { startsAfterMs: 0 }).resolve(reply.paymentId!));
    expect(await Promise.all(both)).toContain('resolved');
    const voided = (await history(reply.paymentId!)).filter((type) => type === 'PaymentVoided');
    await recoverAll(stores);
    expect((await history(reply.paymentId!)).filter((type) => type === 'PaymentVoided')).toEqual(voided);
    await readBooks(stores, bank);
  });
});

const phaseOf = ({ payment, types }: Book): string =>
  payment.phase === 'charged' ? (types.includes('PaymentCreated') ? 'succeeded' : 'resolved') : payment.phase;
