/**
 * A batch may list the refund that undid an unknown charge before our log names that refund. Its line has our reference, so the register on Postgres
 * must find its payment. The gateway is the simulation's bank without voids.
 */
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { type EventStore, memoryEventStore, type Position, prepareReadModels, type ReadModel, searchPathOf } from '#eventstore';
import { Deadline, timestamp } from '#kernel';
import {
  charge,
  createRecovery,
  type GatewayAccount,
  type PaymentGateway,
  type PaymentPorts,
  postgresTransactionClaims,
  type Ref,
  type VisiblePayment,
  type Gateways,
} from '#payments';
import { collect, createPool, migrate, type Pool, transaction } from '#platform';
import { MIGRATIONS, READ_MODELS } from '../../apps/services.js';
import { Bank, bankGateway, CARDS, directWire } from '../../test/simulation/bank.js';
import { batchesOf } from '../../test/support/listed-lines.js';
import { COMBINED, type Ground, type House, openGround, openHouse, refused } from '../../test/support/payments.js';
import { freshDatabase } from '../../test/support/postgres.js';
import { MerchantGateways } from '../gateways/merchant-gateways.js';
import { linesOf } from './batch.js';
import { exceptionModel, openExceptions, paymentRegisterModel, postgresRegister, type SettlementPorts } from './index.js';
import { batchOf, recordBatch } from './record.js';

const MINUTE = 60_000;
const DAY = 24 * 60 * MINUTE;
const gateway = 'bank-refund-only';

let ground: Ground;
let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
let house: House;
let bank: Bank;
let ports: PaymentPorts;
let settlement: SettlementPorts;
let cases: { caughtUp(): Promise<void> };
/** The operation whose answers are lost. The bank executes it. */
let unheard: 'charge' | 'void' | null;

beforeAll(async () => {
  ground = await openGround();
});
afterAll(() => ground.close());
beforeEach(async () => {
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'register', max: 4, searchPath: searchPathOf(READ_MODELS) });
  await migrate(pool, MIGRATIONS);
  await prepareReadModels(pool, READ_MODELS, memoryEventStore());
  house = await openHouse(ground, COMBINED);
  bank = new Bank(() => house.clock.now());
  unheard = null;
  const find = (account: GatewayAccount): PaymentGateway => {
    const inner = bankGateway(bank, { ...account, gateway }, directWire, () => house.clock.now());
    const lost = async (call: Promise<unknown>) => (await call, { kind: 'unknown', cause: 'disconnected' } as const);
    return {
      ...inner,
      charge: (call, signal) => (unheard === 'charge' ? lost(inner.charge(call, signal)) : inner.charge(call, signal)),
      void: (call, signal) => (unheard === 'void' ? lost(inner.void(call, signal)) : inner.void(call, signal)),
    };
  };
  ports = { ...house.ports, gateways: { find } };
  const register = follower(paymentRegisterModel);
  cases = follower(exceptionModel);
  settlement = { store: house.store, payments: ports, register: postgresRegister(pool, register.caughtUp) } as unknown as SettlementPorts;
});
afterEach(async () => {
  await pool.end();
  await database.drop();
});

/** Applies the new events of the log to a read model. */
const follower = ({ apply, streamPrefixes }: ReadModel) => {
  let seen: Position | null = null;
  return {
    caughtUp: async () => {
      for await (const events of house.store.readAll(seen, { streamPrefixes })) {
        await transaction(pool, (client) => apply(client, events));
        seen = events.at(-1)!.position;
      }
    },
  };
};
/** Makes a payment. The bank takes the charge, and its answer is lost. */
const unknownPayment = async (): Promise<string> => {
  const paymentId = house.ids.uuid();
  const attempt = { paymentId, attemptId: house.ids.uuid(), idempotency: null };
  const origin = { actor: { type: 'partner', id: house.accountId }, correlationId: house.ids.uuid() } as const;
  unheard = 'charge';
  const request = house.request({ card: CARDS.approved });
  expect((await refused(charge(ports, request, attempt, origin, new Deadline(house.clock, 28_000)))).code).toBe('PAYMENT_TIMEOUT');
  unheard = null;
  return paymentId;
};
/** Recovery tries the payment, a minute later. */
const recover = async (paymentId: string): Promise<void> => {
  house.clock.advance(MINUTE);
  const { attemptId, createdAt: since } = (await house.state(paymentId)) as VisiblePayment;
  const due = async () => [{ paymentId, attemptId, tries: 0, since, until: null }];
  await createRecovery(ports, house.store, { due, record: async () => undefined, hurry: async () => undefined }).round();
};
const accountOf = async (paymentId: string): Promise<GatewayAccount> => ((await house.state(paymentId)) as VisiblePayment).terms.legs[0]!.account;
/** Closes the batch at the bank, and records it. */
const recordedLines = async (paymentId: string, ports = settlement) => {
  const account = await accountOf(paymentId);
  const batchId = bank.closeBatch(account.merchantAccount)!;
  for await (const batch of batchesOf(bank.lines))
    await recordBatch(ports, account, { fundedOn: null, ...batch }, null, new AbortController().signal);
  await settlement.register.caughtUp();
  return linesOf(await batchOf(house.store, { ...account, batchId })).map(({ type, result, paymentId: of, leg }) => ({
    type,
    result,
    paymentId: of,
    leg,
  }));
};
const rowsOf = async (paymentId: string) =>
  (
    await pool.query(
      `select op, transaction_id, settled_batch_id is not null as settled, last4 from gateway_transaction where payment_id = $1 order by op, ref`,
      [paymentId],
    )
  ).rows;

test('the batch is recorded before the undoing: sale and refund are both of the payment, and neither is reported as missing later', async () => {
  const paymentId = await unknownPayment();
  unheard = 'void';
  await recover(paymentId);
  unheard = null;
  const [refund] = bank.reversals.values();
  expect([(await house.state(paymentId)).phase, refund!.op]).toEqual(['unknown', 'refund']);
  const of = { result: 'STATUS_MISMATCH', paymentId, leg: 'combined' };
  expect(await recordedLines(paymentId)).toEqual([
    { ...of, type: 'sale' },
    { ...of, type: 'refund' },
  ]);
  expect(await rowsOf(paymentId)).toMatchObject([
    { op: 'charge', transaction_id: null },
    { op: 'refund', transaction_id: null },
  ]);

  await recover(paymentId);
  expect(await house.state(paymentId)).toMatchObject({ phase: 'voided', undone: [{ refundTransactionId: refund!.transactionId }] });
  house.clock.advance(40 * DAY);
  await openExceptions(settlement, pool, cases);
  const opened = await pool.query('select kind, type, payment_id, suspense_cents::int as cents from settlement_exception where opened order by line');
  expect(opened.rows).toEqual([
    { kind: 'STATUS_MISMATCH', type: 'sale', payment_id: paymentId, cents: 10_325 },
    { kind: 'STATUS_MISMATCH', type: 'refund', payment_id: paymentId, cents: -10_325 },
  ]);
  expect((await pool.query('select kind from settlement_case')).rows).toHaveLength(2);
});

test('the batch is recorded after the undoing: both lines match, whether the events came to the register one by one or together', async () => {
  const paymentId = await unknownPayment();
  await settlement.register.caughtUp();
  unheard = 'void';
  await recover(paymentId);
  unheard = null;
  await settlement.register.caughtUp();
  await recover(paymentId);
  expect((await recordedLines(paymentId)).map(({ type, result }) => [type, result])).toEqual([
    ['sale', 'MATCHED'],
    ['refund', 'MATCHED'],
  ]);
  const [[charged], [refund]] = [[...bank.charges.keys()], [...bank.reversals.keys()]];
  const rows = await rowsOf(paymentId);
  expect(rows).toEqual([
    { op: 'charge', transaction_id: charged, settled: true, last4: '4242' },
    { op: 'refund', transaction_id: refund, settled: true, last4: '4242' },
  ]);

  const events = (await collect(house.store.readAll(null, { streamPrefixes: paymentRegisterModel.streamPrefixes }))).flat();
  for (const group of [[events], events.map((event) => [event])]) {
    await pool.query('truncate gateway_account, gateway_transaction, settlement_begun, settlement_batch, settlement_exception');
    for (const some of group) await transaction(pool, (client) => paymentRegisterModel.apply(client, some));
    expect(await rowsOf(paymentId)).toEqual(rows);
  }
});

test('a charge with a known outcome has no row for a refund that undoes it', async () => {
  const attempt = { paymentId: house.ids.uuid(), attemptId: house.ids.uuid(), idempotency: null };
  const origin = { actor: { type: 'partner', id: house.accountId }, correlationId: house.ids.uuid() } as const;
  const { view } = await charge(ports, house.request({ card: CARDS.approved }), attempt, origin, new Deadline(house.clock, 28_000));
  await settlement.register.caughtUp();
  expect((await rowsOf(view.id)).map(({ op }) => op)).toEqual(['charge']);
});

/** A worker that stands still after it has judged a line of this unknown payment. Meanwhile another one undoes the charge. */
const standingStill = (paymentId: string) => {
  const been = { still: false };
  const store: EventStore = {
    ...house.store,
    append: async (stream, revision, events) => {
      const appended = await house.store.append(stream, revision, events);
      if (!been.still && events.some(({ type }) => type === 'StaffTaskRaised')) {
        been.still = true;
        await recover(paymentId);
        house.clock.advance(1);
      }
      return appended;
    },
  };
  return { been, ports: { ...settlement, store } };
};

test('a worker stands still after it has judged a line, and another one undoes the charge: the line is judged again', async () => {
  const paymentId = await unknownPayment();
  await settlement.register.caughtUp();
  const { been, ports: still } = standingStill(paymentId);
  expect(await recordedLines(paymentId, still)).toEqual([{ result: 'MATCHED', paymentId, leg: 'combined', type: 'sale' }]);
  expect([been.still, (await house.state(paymentId)).phase]).toEqual([true, 'voided']);
});

test('the same, for a line that the processor adds to a complete batch', async () => {
  const [first, paymentId] = [await unknownPayment(), await unknownPayment()];
  await recover(first);
  await settlement.register.caughtUp();
  const account = await accountOf(paymentId);
  const batchId = bank.closeBatch(account.merchantAccount)!;
  const record = async (by: SettlementPorts, count: number) => {
    for await (const batch of batchesOf(bank.lines.slice(0, count)))
      await recordBatch(by, account, { fundedOn: null, ...batch }, null, new AbortController().signal);
  };
  await record(settlement, 1);
  const { been, ports: still } = standingStill(paymentId);
  await record(still, bank.lines.length);
  const results = linesOf(await batchOf(house.store, { ...account, batchId })).map((line) => [line.type, line.result, line.paymentId]);
  expect(results).toEqual([
    ['sale', 'MATCHED', first],
    ['sale', 'MATCHED', paymentId],
    ['refund', 'MATCHED', first],
  ]);
  expect([been.still, (await house.state(paymentId)).phase]).toEqual([true, 'voided']);
});

let closedAt: string;
beforeEach(() => {
  closedAt = timestamp(house.clock.now());
});
/** A batch `b-1` of sales without a payment here, by transaction and cents, as a source lists it. `fileId` null: the interface. */
const listed = async (sales: readonly (readonly [transactionId: string, cents: number])[], fileId: string | null, ports = settlement) => {
  const account: GatewayAccount = { gateway, merchantAccount: 'agency-1', credentialsRef: 'none', environment: 'sandbox' };
  const batch = { batchId: 'b-1', closedAt };
  const lines = sales.map(([transactionId, grossCents]) => ({
    ...batch,
    ...({ transactionId, type: 'sale', accepted: true, grossCents, feeCents: 0, netCents: grossCents } as const),
  }));
  const [only] = await collect(batchesOf(lines));
  const said = await recordBatch(ports, account, { ...batch, fundedOn: null, lines: only!.lines }, fileId, new AbortController().signal);
  const recorded = linesOf(await batchOf(house.store, { ...account, batchId: 'b-1' }));
  return { said, recorded };
};

test('a file corrects a batch while the interface adds a line to it: the file has the last word', async () => {
  await listed([['a', 100]], null);
  let corrected = false;
  const store: EventStore = {
    ...house.store,
    append: async (stream, revision, events) => {
      if (!corrected && events.some(({ type }) => type === 'SettlementLinesCorrected')) {
        corrected = true;
        await listed(
          [
            ['a', 150],
            ['f', 300],
          ],
          'file',
        );
      }
      return house.store.append(stream, revision, events);
    },
  };
  const { recorded } = await listed(
    [
      ['a', 100],
      ['b', 200],
    ],
    null,
    { ...settlement, store },
  );
  expect([corrected, Object.fromEntries(recorded.map((line) => [line.transactionId, line.grossCents]))]).toEqual([true, { a: 150, f: 300 }]);
});

test('250 lines that are added to a complete batch are recorded in three events; a line that comes twice is a duplicate, whichever event has the first', async () => {
  const record = (...ids: string[]) =>
    listed(
      ids.map((id) => [id, 100]),
      'file',
    );
  await record('t-0');
  const added = Array.from({ length: 249 }, (_, index) => `t-${index + 1}`);
  expect((await record('t-0', ...added, 't-1')).said).toMatchObject({ count: 251, corrected: 250 });
  const { said, recorded } = await record('t-0', ...added, 't-1');
  expect(said).toMatchObject({ corrected: 0 });
  const results = recorded.map(({ transactionId, result }) => [transactionId, result]);
  expect(results).toEqual([...['t-0', ...added].map((id) => [id, 'MISSING_HERE']), ['t-1', 'DUPLICATE_AT_GATEWAY']]);
  const types = (await collect(house.store.readAll(null))).flat().map(({ type }) => type);
  expect(types.filter((type) => type === 'SettlementLinesCorrected')).toHaveLength(3);
});

describe('charges that a processor answers with the same transaction', () => {
  const STRIPE = { gateway: 'stripe', environment: 'sandbox', settings: { cutOff: null, endpoint: null } } as const;
  const SAME = 'pi_same';
  let claiming: Pool;
  let portals: Readonly<Record<'city' | 'town', string>>;
  let alarms: string[];
  /** Changes the id of the transaction in the answers to the charge and to the questions about it. */
  let named: (ref: Ref, transactionId: string) => string;
  let ends: (() => unknown)[];
  beforeEach(async () => {
    [alarms, ends, named] = [[], [], () => SAME];
    claiming = createPool(database.url, { name: 'claims', max: 4 });
    for (const [index, merchantAccount] of ['city', 'town'].entries()) {
      const account = { ...STRIPE, merchantAccount, name: 'City' };
      await house.administration.addMerchantAccount(account, `acct_${index}`, `{"secretKey":"sk_test_${index}"}`, []);
    }
    const portalOf = async (principal: string) => {
      const of = { accountIds: [house.accountId], name: 'P', fee: COMBINED, gateway: { gateway: 'stripe', principal, fee: principal } } as const;
      return (await house.administration.createPortal(of)).state.portalId;
    };
    portals = { city: await portalOf('city'), town: await portalOf('town') };
    await house.project();
    ports = { ...house.ports, gateways: await aProcess() };
    settlement = { ...settlement, payments: ports };
  });
  afterEach(async () => {
    for (const end of ends) await end();
    await claiming.end();
  });
  /** The gateways of another process. The adapters of the vendor are replaced by the bank. */
  const aProcess = async () => {
    const gateways = new MerchantGateways({
      directory: house.ports.directory,
      keys: ground.keys,
      environment: 'sandbox',
      clock: house.clock,
      logger: house.ports.log,
      stops: { all: async () => [], stop: async () => undefined, end: async () => undefined },
      observed: () => answering(bankGateway(bank, { ...ACCOUNT, gateway: 'bank-refund-only' }, directWire, () => house.clock.now())),
      disableCharges: async () => undefined,
      claims: postgresTransactionClaims(claiming),
      countAlarm: ({ merchantAccount }, more) => void (more && alarms.push(merchantAccount)),
    });
    ends.push(() => gateways.close());
    await gateways.reload();
    const found: Gateways = { find: (account) => gateways.find(account), load: ({ merchantAccount }) => gateways.load(merchantAccount) };
    return found;
  };
  const ACCOUNT = { merchantAccount: 'city', credentialsRef: 'none', environment: 'sandbox' } as const;
  const answering = (inner: PaymentGateway): PaymentGateway => ({
    ...inner,
    charge: async (call, signal) => {
      const outcome = await inner.charge(call, signal);
      if (outcome.kind !== 'approved') return outcome;
      return { ...outcome, txn: { ...outcome.txn, transactionId: named(call.ref, outcome.txn.transactionId) } };
    },
    finalize: async (call, signal) => {
      const found = await inner.finalize(call, signal);
      if (call.op !== 'charge' || found.kind !== 'executed' || found.result.kind !== 'approved') return found;
      const { txn } = found.result;
      return { ...found, result: { kind: 'approved', txn: { ...txn, transactionId: named(call.ref, txn.transactionId) } } as typeof found.result };
    },
  });
  const pay = async (of: 'city' | 'town' = 'city', through = ports) => {
    const paymentId = house.ids.uuid();
    const attempt = { paymentId, attemptId: house.ids.uuid(), idempotency: null };
    const origin = { actor: { type: 'partner', id: house.accountId }, correlationId: house.ids.uuid() } as const;
    const request = house.request({ card: CARDS.approved, portalId: portals[of] });
    const answer = await charge(through, request, attempt, origin, new Deadline(house.clock, 28_000)).then(
      () => 200,
      (error: { status?: number }) => error.status ?? error,
    );
    return { paymentId, answer };
  };
  const claims = async () => (await pool.query('select merchant_account, transaction_id, repeated_by from transaction_claim order by 1, 2')).rows;
  const refOf = async (paymentId: string) => ((await house.state(paymentId)) as VisiblePayment).terms.legs[0]!.references.charge;
  const exceptions = async () => {
    await openExceptions(settlement, pool, cases);
    return (await pool.query('select kind, gateway, merchant_account, transaction_id, ref, payment_id, leg, status from settlement_case')).rows;
  };

  test.each([
    ['one after the other', async () => [await pay(), await pay()]],
    ['at the same time, in two processes', async () => Promise.all([pay(), pay('city', { ...ports, gateways: await aProcess() })])],
  ])('%s: one stands, the other is unknown, is not undone, and gets an exception and the alarm', async (_, payTwice) => {
    const paid = await payTwice();
    expect(paid.map(({ answer }) => answer).sort()).toEqual([200, 504]);
    const [first, second] = [paid.find(({ answer }) => answer === 200)!, paid.find(({ answer }) => answer === 504)!];
    const ref = await refOf(second.paymentId);
    expect(await claims()).toEqual([{ merchant_account: 'city', transaction_id: SAME, repeated_by: [ref] }]);
    expect(alarms).toEqual(['city']);
    const expected = { kind: 'DUPLICATE_AT_GATEWAY', gateway: 'stripe', merchant_account: 'city', transaction_id: SAME, ref, payment_id: second.paymentId, leg: 'combined', status: 'opened' }; // prettier-ignore
    expect(await exceptions()).toEqual([expected]);
    // Recovery asks for the references of both. The processor may now tell the same, or another transaction.
    await recover(second.paymentId);
    named = (_ref, transactionId) => transactionId;
    for (let round = 0; round < 3; round++) await recover(second.paymentId);
    expect([(await house.state(second.paymentId)).phase, (await house.state(first.paymentId)).phase]).toEqual(['unknown', 'charged']);
    expect([...bank.reversals]).toEqual([]);
    expect(await exceptions()).toEqual([expected]);
  });

  test('a third charge with the transaction has an exception of its own; the first stands', async () => {
    const paid = [await pay(), await pay(), await pay()];
    expect(paid.map(({ answer }) => answer)).toEqual([200, 504, 504]);
    expect(await claims()).toMatchObject([{ repeated_by: await Promise.all(paid.slice(1).map(({ paymentId }) => refOf(paymentId))) }]);
    expect((await exceptions()).map((row: { payment_id: string }) => row.payment_id).sort()).toEqual(
      paid
        .slice(1)
        .map(({ paymentId }) => paymentId)
        .sort(),
    );
  });

  test('the same id at another merchant account is another transaction', async () => {
    expect([(await pay('city')).answer, (await pay('town')).answer]).toEqual([200, 200]);
    expect([alarms, await exceptions()]).toEqual([[], []]);
    expect(await claims()).toEqual(['city', 'town'].map((merchant_account) => ({ merchant_account, transaction_id: SAME, repeated_by: null })));
  });

  test('the claim of the same reference again is no repeat: recovery undoes its charge', async () => {
    house.appends.failBefore('PaymentCreated', () => new Error('the process died'), 1);
    named = (_ref, transactionId) => transactionId;
    const { paymentId, answer } = await pay();
    expect([answer, await claims()]).toEqual([504, [expect.objectContaining({ repeated_by: null })]]);
    const account = { gateway: 'stripe', merchantAccount: 'city' };
    const [{ transaction_id: transactionId }] = (await claims()) as [{ transaction_id: string }];
    const ref = await refOf(paymentId);
    const again = Array.from({ length: 8 }, () => postgresTransactionClaims(claiming).claim(account, transactionId, ref));
    expect(await Promise.all(again)).toEqual(Array.from({ length: 8 }, () => true));
    await recover(paymentId);
    expect([(await house.state(paymentId)).phase, bank.reversals.size, alarms, await exceptions()]).toEqual(['voided', 1, [], []]);
  });

  test('the claim cannot be written after the charge: 504, and recovery undoes the charge when it can be', async () => {
    named = (_ref, transactionId) => transactionId;
    const name = new URL(database.url).pathname.slice(1);
    const readOnly = (is: 'on' | 'off') => pool.query(`begin read write; alter database ${name} set default_transaction_read_only = ${is}; commit`);
    await readOnly('on');
    const { paymentId, answer } = await pay();
    expect([answer, bank.charges.size, await claims()]).toEqual([504, 1, []]);
    await recover(paymentId);
    expect([(await house.state(paymentId)).phase, bank.reversals.size]).toEqual(['unknown', 0]);
    await readOnly('off');
    await recover(paymentId);
    expect([(await house.state(paymentId)).phase, bank.reversals.size, alarms]).toEqual(['voided', 1, []]);
  });
});
