/** One batch from two sources, and files that correct recorded batches. Afterwards events, books and read models agree. */
import { afterAll, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { writeFileSync } from 'node:fs';
import { EVERYTHING } from '#accounts';
import { type EventStore, type Position, Unavailable } from '#eventstore';
import { closePeriod, journalModel, lineRegisterModel } from '#ledger';
import {
  batchOf,
  batchStreamId,
  changeException,
  importSettlementFile,
  linesOf,
  recordSettlements,
  type Resolution,
  type SettlementPorts,
} from '#settlement';
import { findDrift, REPORTS } from '#audit';
import { type PaymentGateway, type PaymentView, staff, UnknownCursor } from '#payments';
import { batchesOf, type ListedLine, listedLines } from '../support/listed-lines.js';
import { settle } from '../support/books.js';
import { CARD, paymentOf, type Service, startService, type TestAccount, everySubscriber } from '../support/service.js';
import { FILE_HEAD, type SettlementDesk, settlementDesk } from '../support/settlement.js';

let service: Service;
let partner: TestAccount;
let portal: string;
let desk: SettlementDesk;
let merchantAccount: string;
let ports: SettlementPorts;
beforeAll(async () => {
  service = await startService();
  partner = await service.account();
  portal = await service.portal(partner);
  desk = settlementDesk(service);
  ports = service.services.settlement;
  merchantAccount = (await desk.transaction((await pay()).id)).merchantAccount;
});
afterAll(async () => {
  desk.close();
  await service.stop();
});

const pay = (number?: string): Promise<PaymentView> => partner.client.created(paymentOf(portal, { lines: [10_000], ...(number && { number }) }));
/** Makes a payment. Returns its id and the transaction of its principal. */
const sale = async () => {
  const { id } = await pay();
  return { id, tx: (await desk.transaction(id)).transactionId };
};
/** Up to where the processor's batches are recorded. The simulator's places are batch ids. */
const cursor = async (): Promise<string | null> =>
  (
    await service.services.pool.query<{ cursor: string | null }>(
      `select cursor from gateway_feed where feed = 'settlement' and merchant_account = $1`,
      [merchantAccount],
    )
  ).rows[0]!.cursor;
const record = (through: SettlementPorts = ports) => recordSettlements(through, AbortSignal.timeout(20_000));
const settledIn = async (id: string): Promise<string | null> => {
  const { payment } = await ports.payments.streams.load(id);
  return payment.phase === 'charged' ? payment.legs.find(({ leg }) => leg === 'principal')!.settledBatchId : null;
};
const account = async () => (await ports.register.accounts()).find((one) => one.merchantAccount === merchantAccount)!;
const named = (batchId: string) => ({ gateway: 'simulator', merchantAccount, batchId });
const recordedLines = async (batchId: string) => linesOf(await batchOf(ports.store, named(batchId)));
const eventCount = () => desk.eventCount();
const kindsOf = async (batchId: string) =>
  (await desk.exceptions())
    .filter((one) => one.batchId === batchId)
    .map(({ kind, suspenseCents }) => [kind, suspenseCents])
    .sort();
/**
 * What a batch and the payment of its sale posted to `in_transit`: rule, day of effect, day in the books, number of entries, cents. Rules R4 to R6.
 */
const inTransit = async (batchId: string, paymentId: string): Promise<(readonly [string, string, string, number, number])[]> => {
  await desk.booked();
  const { rows } = await service.services.pool.query<{ rule: string; effective: string; booked: string; entries: number; cents: number }>(
    `select e.rule, to_char(e.effective_at at time zone 'utc', 'YYYY-MM-DD') as effective, to_char(e.booked_at at time zone 'utc', 'YYYY-MM-DD') as booked,
            count(*)::int as entries, sum(a.cents)::int as cents
     from journal_entry e join es.events v on v.event_id = e.event_id cross join unnest(e.accounts, e.cents) as a (account, cents)
     where v.stream_id in ('payment-' || $1, 'settlement-' || $2) and e.rule in ('R4', 'R5', 'R6') and a.account like '%:in_transit'
     group by 1, 2, 3 order by 1, 2, 3`,
    [paymentId, batchStreamId(named(batchId))],
  );
  return rows.map(({ rule, effective, booked, entries, cents }) => [rule, effective, booked, entries, cents]);
};
/** The day and the net cents of each deposit of a batch, in log order, as the report `deposits` shows them. */
const deposits = async (batchId: string): Promise<(readonly [string, number])[]> => {
  const { readModels, store, pool: db } = service.services;
  await readModels.of(lineRegisterModel).runUntil((await store.head())!, { timeoutMs: 20_000 });
  const sums = new Map<string, readonly [string, number]>();
  const query = { from: null, to: null, asOf: null, after: null, until: null };
  const [id, day, batch, net] = ['deposit_id', 'deposited_on', 'batch_id', 'net_cents'].map((name) => REPORTS.deposits.columns.indexOf(name)) as [number, number, number, number]; // prettier-ignore
  for await (const { rows } of REPORTS.deposits.pages({ db, store }, EVERYTHING, query))
    for (const row of rows)
      if (row[batch] === batchId) sums.set(String(row[id]), [String(row[day]), (sums.get(String(row[id]))?.[1] ?? 0) + Number(row[net])]);
  const { rows } = await db.query<{ deposit_id: string }>('select deposit_id from line_deposit where batch_id = $1 order by position', [batchId]);
  return rows.map((row) => sums.get(row.deposit_id)!);
};
const alarms = (text: string) => service.logLines().filter(({ level, msg }) => level >= 50 && msg.includes(text)).length;

/** Ports whose store fails at the `nth` append of lines and at every later one. */
const breakingOff = (nth: number): SettlementPorts => {
  let times = 0;
  const append: EventStore['append'] = (stream, expected, events) => {
    if (events[0]!.type === 'SettlementLinesRecorded' && ++times >= nth) throw new Unavailable('the store is away');
    return ports.store.append(stream, expected, events);
  };
  return { ...ports, store: Object.assign(Object.create(ports.store) as EventStore, { append }) };
};
/** Ports whose processor lists these lines. `before` runs when the request has a cursor. */
const listing = (lines: readonly ListedLine[], before: () => void = () => undefined): SettlementPorts => {
  const find = (one: Parameters<typeof ports.payments.gateways.find>[0]): PaymentGateway | null => {
    const real = ports.payments.gateways.find(one);
    return (
      real && {
        ...real,
        settlements: async function* (cursor) {
          if (one.merchantAccount !== merchantAccount) return;
          if (cursor !== null) before();
          yield* batchesOf(lines);
        },
      }
    );
  };
  return { ...ports, payments: { ...ports.payments, gateways: { find } } };
};
const said = (batchId: string, transactionId: string, over: Partial<ListedLine> = {}): ListedLine => ({
  batchId,
  closedAt: `${closes.slice(0, -1)}.000Z`,
  transactionId,
  type: 'sale',
  accepted: true,
  grossCents: 1,
  feeCents: 0,
  netCents: 1,
  ...over,
});
/** When the batches of the present test close. */
let closes = '';
const CLOSED = {
  get closed() {
    return closes;
  },
};
const dayOf = (days: number) => new Date(service.clock.now() + days * 86_400_000).toISOString().slice(0, 10);
beforeEach(() => {
  closes = `${new Date(service.clock.now()).toISOString().slice(0, 19)}Z`;
});

describe('files beside the processor’s interface', () => {
  test('a later batch from a file is no reason to pass over the earlier one', async () => {
    const earlier = await sale();
    await service.simulator.closeBatches();
    const later = await sale();
    await service.simulator.closeBatches();
    const listed = await listedLines(ports.payments.gateways.find(await account())!, null, AbortSignal.timeout(5_000));
    const { batchId } = listed.find(({ transactionId }) => transactionId === later.tx)!;
    const lines = listed
      .filter((one) => one.batchId === batchId)
      .map((one) => desk.line(batchId, one.transactionId, { closed: one.closedAt, gross: one.grossCents, fee: one.feeCents }));
    await desk.importFile(desk.csv(...lines));
    expect(await settledIn(later.id)).toBe(batchId);
    await record();
    expect(await settledIn(earlier.id)).toMatch(/^bat_/);
    expect(await cursor()).toBe(batchId);
    expect((await batchOf(ports.store, named(batchId))).fundedOn).toMatch(/^2/); // the file had no funding day
    expect(await kindsOf(batchId)).toEqual([]);
    expect(await record()).toEqual([]);
  });
  test('a batch that only files know does not keep the interface from the next ones', async () => {
    await desk.importFile(desk.csv(desk.line('only-in-a-file', (await sale()).tx)));
    const next = await sale();
    await settle(service);
    expect(await settledIn(next.id)).toMatch(/^bat_/);
    expect(await cursor()).toMatch(/^bat_/);
    expect(alarms('does not know the place in its list')).toBe(0);
  });
  test('a last batch that the processor does not know any more is an alarm, and everything is read again', async () => {
    const gateway = ports.payments.gateways.find(await account())!;
    const read = async () => {
      for await (const _ of gateway.settlements('bat_lost', AbortSignal.timeout(5_000))) throw new Error('a batch after a batch that is none');
    };
    await expect(read()).rejects.toThrow(UnknownCursor);
    const one = await sale();
    const before = alarms('does not know the place in its list');
    const lost = () => {
      throw new UnknownCursor('bat_lost');
    };
    await record(listing([said('after-the-loss', one.tx, { grossCents: 10_000, feeCents: 230, netCents: 9_770 })], lost));
    expect(alarms('does not know the place in its list')).toBe(before + 1);
    expect(await settledIn(one.id)).toBe('after-the-loss');
  });
  test('if they contradict each other the file stands, staff get a task, and the interface is asked on', async () => {
    const [one, next] = [await sale(), await sale()];
    await desk.importFile(desk.csv(desk.line('two-words', one.tx, { ...CLOSED, gross: 9_900 })));
    const before = alarms('says otherwise of a batch');
    const whole = { grossCents: 10_000, feeCents: 230, netCents: 9_770 };
    await record(listing([said('two-words', one.tx, whole), said('two-words-next', next.tx, whole)]));
    expect(alarms('says otherwise of a batch')).toBe(before + 1);
    expect(await kindsOf('two-words')).toEqual([
      ['AMOUNT_MISMATCH', 0],
      ['SOURCE_MISMATCH', 0],
    ]);
    expect((await recordedLines('two-words')).map(({ grossCents }) => grossCents)).toEqual([9_900]);
    expect(await settledIn(next.id)).toBe('two-words-next');
    expect(await cursor()).toBe('two-words-next');
  });
  test('at the same time, with other amounts: the payment equals the record, in either order', async () => {
    const one = await sale();
    const whole = { grossCents: 10_000, feeCents: 230, netCents: 9_770 };
    let [judged, recorded] = [(): void => undefined, (): void => undefined];
    const isJudged = new Promise<void>((resolve) => (judged = resolve));
    const isRecorded = new Promise<void>((resolve) => (recorded = resolve));
    const before = (through: SettlementPorts, wait: () => Promise<void>): SettlementPorts => {
      const append: EventStore['append'] = async (stream, expected, events) => {
        if (events[0]!.type === 'SettlementLinesRecorded') await wait();
        return ports.store.append(stream, expected, events);
      };
      return { ...through, store: Object.assign(Object.create(ports.store) as EventStore, { append }) };
    };
    // The order: the file's line is judged, then the interface's line is judged, then the file's line is recorded.
    let listed: Promise<unknown> = Promise.resolve();
    const file = before(ports, () => {
      listed = record(
        before(listing([said('at-once', one.tx, whole)]), () => {
          judged();
          return isRecorded;
        }),
      );
      return isJudged;
    });
    await desk.importFile(desk.csv(desk.line('at-once', one.tx, { ...CLOSED, gross: 9_900 })), null, file);
    recorded();
    await listed;
    expect((await recordedLines('at-once')).map(({ grossCents }) => grossCents)).toEqual([9_900]);
    const { payment } = await ports.payments.streams.load(one.id);
    expect(payment).toMatchObject({ legs: [{ settledBatchId: 'at-once', settledGrossCents: 9_900, settledFeeCents: 230 }, {}] });
    expect(await kindsOf('at-once')).toContainEqual(['SOURCE_MISMATCH', 0]);
  });
  test('a complete batch that is listed with more lines gets them; a failure of one account stops no other account’s batches or funding', async () => {
    const [one, more] = [await sale(), await sale()];
    const whole = { grossCents: 10_000, feeCents: 230, netCents: 9_770, fundedOn: dayOf(0) };
    await record(listing([said('grows', one.tx, whole)]));
    expect(await settledIn(more.id)).toBeNull();
    await record(listing([said('grows', one.tx, whole), said('grows', more.tx, whole)]));
    expect(await settledIn(more.id)).toBe('grows');
    expect((await recordedLines('grows')).map(({ result }) => result)).toEqual(['MATCHED', 'MATCHED']);

    const other = await partner.client.created(paymentOf(await service.portal(partner), { lines: [10_000] }));
    await service.simulator.closeBatches();
    const real = ports.payments.gateways;
    const broken = listing([said('half-cents', 'tx-half', { netCents: 0.5, grossCents: 0.5 })]).payments.gateways;
    const before = alarms('a settlement batch cannot be recorded');
    const tomorrow = new Date(service.clock.now() + 86_400_000).toISOString().slice(0, 10);
    await desk.importFile(desk.csv(desk.line('due', (await sale()).tx, { ...CLOSED, funded: tomorrow })));
    service.clock.advance(86_400_000);
    await record({
      ...ports,
      payments: { ...ports.payments, gateways: { find: (a) => (a.merchantAccount === merchantAccount ? broken : real).find(a) } },
    });
    expect(alarms('a settlement batch cannot be recorded')).toBe(before + 1);
    expect(await settledIn(other.id)).toMatch(/^bat_/);
    expect(await batchOf(ports.store, named('due'))).toMatchObject({ fundedOn: tomorrow, funded: true });
    expect(await recordedLines('half-cents')).toEqual([]);
    await record();
  });
});

describe('imports that break off', () => {
  const many = (count: number, first = 0) => Array.from({ length: count }, (_, index) => `x${first + index}`);

  test('and go on with a corrected file: the record equals the corrected one', async () => {
    const [gone, last] = [await sale(), await sale()];
    const file = (batch: string, ids: string[]) =>
      desk.csv(...ids.map((id) => desk.line(batch, id, { ...CLOSED, ...(id.startsWith('x') && { gross: 1, fee: 0 }) })));
    const v1 = [gone.tx, ...many(199), last.tx, ...many(49, 199)];
    await expect(desk.importFile(file('broken', v1), merchantAccount, breakingOff(2))).rejects.toThrow('the store is away');
    expect(await settledIn(gone.id)).toBe('broken');
    expect(await recordedLines('broken')).toHaveLength(200);
    await desk.importFile(file('broken', v1.slice(1)), merchantAccount);
    expect((await recordedLines('broken')).map(({ transactionId }) => transactionId).sort()).toEqual(v1.slice(1).sort());
    expect(await settledIn(gone.id)).toBeNull();
    expect(await settledIn(last.id)).toBe('broken');
    const { rows } = await service.services.pool.query('select line_count, gross_cents, net_cents from settlement_batch where batch_id = $1', [
      'broken',
    ]);
    expect(rows).toEqual([{ line_count: 249, gross_cents: '10248', net_cents: '10018' }]);
  });
  test('and that the interface goes on with in another order lose no line and record none twice', async () => {
    const ids = many(250, 1_000);
    const file = desk.csv(...ids.map((id) => desk.line('reversed', id, { ...CLOSED, gross: 1, fee: 0 })));
    await expect(desk.importFile(file, merchantAccount, breakingOff(2))).rejects.toThrow('the store is away');
    await record(listing(ids.map((id) => said('reversed', id)).reverse()));
    expect((await recordedLines('reversed')).map(({ transactionId }) => transactionId).sort()).toEqual(ids.sort());
    expect(await cursor()).toBe('reversed');
    expect(await desk.importFile(file, merchantAccount)).toMatchObject({ corrected: 0, repeated: false });
  });
  test('and that the interface contradicts are left to staff with exact words, until a file says how it is', async () => {
    const ids = many(250, 2_000);
    const lines = ids.map((id) => desk.line('disputed', id, { ...CLOSED, gross: 1, fee: 0 }));
    await expect(desk.importFile(desk.csv(...lines), merchantAccount, breakingOff(2))).rejects.toThrow('the store is away');
    const other = ids.map((id, index) => said('disputed', id, index === 3 ? { grossCents: 2, netCents: 2 } : {}));
    const events = await eventCount();
    await record(listing(other));
    expect(await eventCount()).toBe(events);
    const told = service.logLines().filter(({ level, msg }) => level >= 50 && msg === 'a settlement batch cannot be recorded');
    expect(JSON.stringify(told.at(-1))).toContain(
      `batch disputed of ${merchantAccount} is recorded up to line 200, line 3 of it as sale x2003 (gross 1, fee 0, net 1); the processor says gross 2, fee 0, net 2 of it now`,
    );
    await desk.importFile(
      desk.csv(...lines.map((one, index) => (index === 3 ? desk.line('disputed', ids[3]!, { ...CLOSED, gross: 2, fee: 0 }) : one))),
      merchantAccount,
    );
    await record(listing(other));
    expect(await cursor()).toBe('disputed');
    expect((await kindsOf('disputed')).filter(([kind]) => kind === 'SOURCE_MISMATCH')).toEqual([]);
  });
});

describe('a line that goes', () => {
  test('and comes back is posted again', async () => {
    const [stays, comes] = [await sale(), await sale()];
    const transit = async () => (await desk.booked())(`assets:processor:${merchantAccount}:in_transit`);
    const start = await transit();
    const file = (...ids: string[]) => desk.csv(...ids.map((id) => desk.line('v', id, CLOSED)));
    await desk.importFile(file(stays.tx, comes.tx));
    expect((await transit()) - start).toBe(19_540);
    await desk.importFile(file(stays.tx));
    expect((await transit()) - start).toBe(9_770);
    await desk.importFile(file(comes.tx, stays.tx));
    expect((await transit()) - start).toBe(19_540);
    expect(await settledIn(comes.id)).toBe('v');
    // A file may correct the amount of the line that came back. Then the books have the new amount.
    await desk.importFile(desk.csv(desk.line('v', stays.tx, CLOSED), desk.line('v', comes.tx, { ...CLOSED, gross: 9_000 })));
    expect((await transit()) - start).toBe(9_770 + 8_770);
    await desk.importFile(desk.csv(desk.line('v', stays.tx, { ...CLOSED, fee: 231 })));
    expect((await transit()) - start).toBe(9_769);
  });
  test('is missing from then on, though it was in a batch once; its payment is unsettled, and settles in another batch', async () => {
    const [stays, goes] = [await sale(), await sale()];
    await desk.importFile(desk.csv(desk.line('g', stays.tx, CLOSED), desk.line('g', goes.tx, CLOSED)));
    await desk.importFile(desk.csv(desk.line('g', stays.tx, CLOSED)));
    expect(await settledIn(goes.id)).toBeNull();
    expect((await partner.client.find(goes.id)).data.settlement).toEqual({ status: 'unsettled', settledAt: null });
    const [missing, ...others] = (await desk.exceptions()).filter((one) => one.batchId === 'g');
    expect(others).toEqual([]);
    expect(missing).toMatchObject({ kind: 'MISSING_AT_GATEWAY', paymentId: goes.id, leg: 'principal', expectedCents: 10_000, grossCents: 0 });
    await desk.importFile(desk.csv(desk.line('g-later', goes.tx, CLOSED)));
    expect(await settledIn(goes.id)).toBe('g-later');
    expect((await recordedLines('g-later')).map(({ result }) => result)).toEqual(['MATCHED']);
    expect((await desk.exceptions('superseded')).find(({ exceptionId }) => exceptionId === missing!.exceptionId)).toMatchObject({
      reason: 'it settled in batch g-later',
    });
    expect((await desk.exceptions()).filter(({ paymentId }) => paymentId === goes.id)).toEqual([]);
  });
  test('leaves to the gateway whether its payment can be voided or refunded (C23, C24)', async () => {
    const [stays, voided, refunded] = [await sale(), await sale(), await pay(CARD.settlesAtOnce)];
    const tx = (await desk.transaction(refunded.id)).transactionId;
    const file = (...ids: string[]) => desk.csv(...ids.map((id) => desk.line('c', id, CLOSED)));
    await desk.importFile(file(stays.tx, voided.tx, tx));
    expect((await partner.client.void(voided.id, {})).code).toBe('VOID_FAILED');
    await desk.importFile(file(stays.tx));
    // The batch of this payment is still open at the processor, so a void is possible.
    expect((await partner.client.void(voided.id, {})).status).toBe(200);
    // The batch of this payment has closed, so the service tries a void and then refunds.
    expect((await partner.client.refund(refunded.id, { amountCents: 1_000 })).data.reversalType).toBe('refund');
  });
});

describe('exceptions of lines that were corrected', () => {
  const resolve = (exceptionId: string, resolution: Resolution, feeCents = 0) =>
    changeException(
      ports,
      exceptionId,
      { type: 'Resolve', resolution, reason: 'looked at', by: 'Dana', portalId: resolution === 'adopt' ? portal : null, feeCents },
      staff('Dana', 'spec'),
    );
  const suspense = async () => (await desk.booked())('liabilities:suspense');
  const ghost = (batch: string, gross: number, fee = 0) => desk.line(batch, `tx-${batch}`, { ...CLOSED, gross, fee });
  const begun = async (batch: string) => {
    const { tx } = await sale();
    await desk.importFile(desk.csv(desk.line(batch, tx, CLOSED), ghost(batch, 700)));
    const [one] = (await desk.exceptions()).filter(({ batchId }) => batchId === batch);
    return { sound: desk.line(batch, tx, CLOSED), exceptionId: one!.exceptionId };
  };

  test('an open one is superseded, and cannot be resolved any more', async () => {
    const before = await suspense();
    const { sound, exceptionId } = await begun('e1');
    await desk.importFile(desk.csv(sound));
    expect(await kindsOf('e1')).toEqual([]);
    expect((await desk.exceptions('superseded')).find((one) => one.exceptionId === exceptionId)).toMatchObject({
      kind: 'MISSING_HERE',
      ageDays: null,
    });
    await expect(resolve(exceptionId, 'adopt')).rejects.toThrow('The exception is superseded.');
    expect(await suspense()).toBe(before);
  });
  test('one that had been resolved: the surplus of its resolution is an exception, whose resolution brings it back with its fee', async () => {
    const [before, payable] = [await suspense(), (await desk.booked())('liabilities:agency')];
    const { sound, exceptionId } = await begun('e2');
    await resolve(exceptionId, 'adopt', 25);
    await desk.importFile(desk.csv(sound));
    expect(await suspense()).toBe(before + 700);
    expect(await kindsOf('e2')).toEqual([['SUSPENSE_MISMATCH', -700]]);
    const [back] = (await desk.exceptions()).filter(({ batchId }) => batchId === 'e2');
    await expect(resolve(back!.exceptionId, 'adopt', 701)).rejects.toThrow('part of the amount');
    await resolve(back!.exceptionId, 'adopt', 25);
    expect(await kindsOf('e2')).toEqual([]);
    const after = await desk.booked();
    expect([after('liabilities:suspense'), after('liabilities:agency') - payable]).toEqual([before, 0 - 10_000]); // the correct sale alone
  });
  test('one that had been resolved, of a line that says another amount: the difference', async () => {
    const before = await suspense();
    const { sound, exceptionId } = await begun('e3');
    await resolve(exceptionId, 'refund');
    await desk.importFile(desk.csv(sound, ghost('e3', 650)));
    expect(await kindsOf('e3')).toEqual([['MISSING_HERE', -50]]);
    await desk.importFile(desk.csv(sound, ghost('e3', 800)));
    expect(await kindsOf('e3')).toEqual([['MISSING_HERE', 100]]);
    const [open] = (await desk.exceptions()).filter(({ batchId }) => batchId === 'e3');
    await resolve(open!.exceptionId, 'refund');
    expect(await suspense()).toBe(before);
    await desk.importFile(desk.csv(sound));
    expect(await kindsOf('e3')).toEqual([['SUSPENSE_MISMATCH', -800]]);
    await desk.importFile(desk.csv(ghost('e3', 800), sound));
    // The line that came back counts as new. So its exception and the removed line's exception both stay open until staff resolve them.
    expect(await kindsOf('e3')).toEqual([
      ['MISSING_HERE', 800],
      ['SUSPENSE_MISMATCH', -800],
    ]);
  });
});

describe('a file is refused before anything of it is recorded', () => {
  // Before each test, record all batches that the interface lists. Otherwise the worker could record them during a test.
  beforeEach(() => record());

  test('if the merchant account of one of its batches is unknown', async () => {
    const { tx } = await sale();
    const events = await eventCount();
    await expect(desk.importFile(desk.csv(desk.line('h1', tx, CLOSED), desk.line('h1-strange', 'tx-strange', CLOSED)))).rejects.toThrow(
      'batch h1-strange holds no transaction of ours',
    );
    expect(await eventCount()).toBe(events);
  });
  test('if it would record a half-recorded batch again on another merchant account', async () => {
    const { rows } = await service.services.pool.query<{ merchant_account: string }>(
      'select merchant_account from gateway_account where merchant_account <> $1',
      [merchantAccount],
    );
    const other = rows[0]!.merchant_account;
    const { tx } = await sale();
    const ids = [tx, ...Array.from({ length: 249 }, (_, index) => `h2-${index}`)];
    const file = desk.csv(...ids.map((id) => desk.line('h2', id, CLOSED)));
    await expect(desk.importFile(file, null, breakingOff(2))).rejects.toThrow('away');
    await expect(desk.importFile(file, other)).rejects.toThrow(
      `batch h2 is recorded on merchant account ${merchantAccount}; it is not recorded again on ${other}`,
    );
    expect(linesOf(await batchOf(ports.store, { ...named('h2'), merchantAccount: other }))).toEqual([]);
    await desk.importFile(file);
    expect(await recordedLines('h2')).toHaveLength(250);
    // A batch id of another merchant account names another batch.
    await desk.importFile(desk.csv(desk.line('h2', 'its-own', CLOSED)), other);
    expect(await recordedLines('h2')).toHaveLength(250);
  });
  test('if a date of it cannot be true; with --old, a date may be long ago', async () => {
    const { tx } = await sale();
    const before = await eventCount();
    const at = (days: number) => `${dayOf(days)}T05:00:00Z`;
    const cases: [Parameters<SettlementDesk['line']>[2], RegExp][] = [
      [{ closed: '2031-01-01T05:00:00Z' }, /^line 2: closed_at 2031-01-01T05:00:00.000Z lies in the future$/],
      [{ closed: at(2) }, /closed_at .* lies in the future/],
      [{ closed: '2019-11-01T05:00:00Z' }, /closed_at 2019-11-01T05:00:00.000Z lies more than 400 days back; --old allows that/],
      [{ closed: at(-2) }, new RegExp(`^line 2: closed_at .* lies before transaction ${tx}, `)],
      [{ funded: '2226-11-01' }, /^line 2: funded_on 2226-11-01 lies more than 14 days in the future$/],
      [{ funded: dayOf(15) }, /funded_on/],
      [{ funded: dayOf(-2) }, /^line 2: funded_on .* lies before the close of the batch/],
    ];
    for (const [over, message] of cases)
      await expect(desk.importFile(desk.csv(desk.line('h5', tx, { ...CLOSED, ...over })))).rejects.toThrow(message);
    const old = desk.csv(desk.line('h5', tx, { closed: '2019-11-01T05:00:00Z' }));
    const by = { actor: { type: 'operator', id: 'spec' }, correlationId: 'spec' } as const;
    await expect(importSettlementFile(ports, old, { merchantAccount: null, old: true, by }, AbortSignal.timeout(20_000))).rejects.toThrow(
      'lies before transaction',
    );
    expect(await eventCount()).toBe(before);
    const unknown = desk.csv(desk.line('h6', 'long-ago', { closed: '2019-11-01T05:00:00Z' }));
    await importSettlementFile(ports, unknown, { merchantAccount, old: true, by }, AbortSignal.timeout(20_000));
    expect((await batchOf(ports.store, named('h6'))).closedAt).toBe('2019-11-01T05:00:00.000Z');
  });
  test('but a day of funding may come later, and a wrong one is corrected: the money is booked once, on the right day', async () => {
    const { id, tx } = await sale();
    const funded = (day: string) => desk.importFile(desk.csv(desk.line('h3', tx, { ...CLOSED, funded: day })), null, ports, true);
    await funded('');
    const bank = async () => (await desk.booked())('assets:bank');
    const before = await bank();
    const [wrong, right, later] = [dayOf(-1), dayOf(0), dayOf(14)];
    expect(await funded(later)).toMatchObject({ corrected: 1 });
    expect(await bank()).toBe(before);
    expect(await funded(wrong)).toMatchObject({ corrected: 1 });
    expect(await bank()).toBe(before + 9_770);
    expect(await deposits('h3')).toEqual([[wrong, 9_770]]);
    expect(await funded(right)).toMatchObject({ corrected: 1 });
    expect(await bank()).toBe(before + 9_770);
    expect((await inTransit('h3', id)).filter(([rule]) => rule === 'R6')).toEqual([
      ['R6', wrong, wrong, 2, 0],
      ['R6', right, right, 1, -9_770],
    ]);
    expect(await deposits('h3')).toEqual([
      [wrong, 9_770],
      [wrong, -9_770],
      [right, 9_770],
    ]);
    // The money is announced for later: until then it is in transit.
    expect(await funded(later)).toMatchObject({ corrected: 1 });
    expect(await bank()).toBe(before);
    expect(await batchOf(ports.store, named('h3'))).toMatchObject({ funded: false, fundedOn: later });
    await funded(right);
    expect(await bank()).toBe(before + 9_770);
    // Without a day, the file leaves the day as it is. With other amounts, only the lines change: the bank got what it got.
    await funded('');
    expect(await bank()).toBe(before + 9_770);
    await desk.importFile(desk.csv(desk.line('h3', tx, { ...CLOSED, funded: wrong, fee: 200 })));
    expect(await bank()).toBe(before + 9_770);
    expect(await kindsOf('h3')).toEqual([['FUNDING_MISMATCH', 0]]);
    expect((await deposits('h3')).reduce((sum, [, cents]) => sum + cents, 0)).toBe(9_770);
  });
  test('but a wrong time of closing is corrected: the books take the old entries back and post the new ones', async () => {
    const one = await sale();
    const by = { actor: { type: 'operator', id: 'spec' }, correlationId: 'spec' } as const;
    const lines = (closed: string) => [
      desk.line('h7', one.tx, { closed, funded: dayOf(0) }),
      ...Array.from({ length: 120 }, (_, index) => desk.line('h7', `h7-${index}`, { closed, funded: dayOf(0) })),
    ];
    const wrong = `${dayOf(-1)}T00:00:01Z`;
    await importSettlementFile(ports, desk.csv(...lines(wrong)), { merchantAccount, by }, AbortSignal.timeout(20_000));
    await desk.exceptions();
    const before = await desk.booked();
    const right = `${closes.slice(0, -1)}.000Z`;
    expect(await desk.importFile(desk.csv(...lines(closes)), merchantAccount)).toMatchObject({ corrected: 121 });
    expect((await batchOf(ports.store, named('h7'))).closedAt).toBe(right);
    expect((await recordedLines('h7')).map(({ number, transactionId }) => [number, transactionId])).toEqual([
      [0, one.tx],
      ...Array.from({ length: 120 }, (_, index) => [index + 1, `h7-${index}`]),
    ]);
    const { payment } = await ports.payments.streams.load(one.id);
    expect(payment.phase === 'charged' && payment.legs[0]).toMatchObject({ settledBatchId: 'h7', settledAt: right });
    const after = await desk.booked();
    for (const prefix of ['assets', 'liabilities', 'income', 'expenses', 'equity']) expect([prefix, after(prefix)]).toEqual([prefix, before(prefix)]);
    const { rows } = await service.services.pool.query('select closed_at, funded from settlement_batch where batch_id = $1', ['h7']);
    expect(rows).toEqual([{ closed_at: new Date(right), funded: true }]);
    expect((await desk.exceptions()).filter(({ kind, batchId }) => batchId === 'h7' && kind !== 'MISSING_HERE')).toEqual([]);
    // Again changes nothing.
    expect(await desk.importFile(desk.csv(...lines(closes)), merchantAccount, ports, true)).toMatchObject({ corrected: 0 });
  });
  test('by entries that take the old ones back on their day, and new ones on the right day', async () => {
    const { id, tx } = await sale();
    const [wrong, right] = [dayOf(-1), dayOf(0)];
    const closing = (closed: string) => desk.importFile(desk.csv(desk.line('h8', tx, { closed, funded: right })));
    await closing(`${wrong}T00:00:01Z`);
    expect(await inTransit('h8', id)).toEqual([
      ['R4', wrong, wrong, 1, 10_000],
      ['R5', wrong, wrong, 1, -230],
      ['R6', right, right, 1, -9_770],
    ]);
    await closing(`${right}T00:00:01Z`);
    expect(await inTransit('h8', id)).toEqual([
      ['R4', wrong, wrong, 2, 0],
      ['R4', right, right, 1, 10_000],
      ['R5', wrong, wrong, 2, 0],
      ['R5', right, right, 1, -230],
      ['R6', right, right, 1, -9_770],
    ]);
  });
  test('a date of the interface that cannot be true is an exception of its batch, and the feed goes on', async () => {
    const [one, other, third] = [await sale(), await sale(), await sale()];
    const amounts = { grossCents: 10_000, feeCents: 230, netCents: 9_770 };
    const done = await record(
      listing([
        said('w1', one.tx, { ...amounts, closedAt: '2031-01-01T00:00:00.000Z' }),
        said('w2', other.tx, { ...amounts, closedAt: `${dayOf(-30)}T00:00:00.000Z` }),
        said('w3', third.tx, amounts),
      ]),
    );
    expect(done.filter(({ batchId }) => batchId.startsWith('w')).map(({ batchId }) => batchId)).toEqual(['w3']);
    expect([await settledIn(one.id), await settledIn(other.id), await settledIn(third.id)]).toEqual([null, null, 'w3']);
    for (const [batchId, reason] of [
      ['w1', 'closed_at 2031-01-01T00:00:00.000Z lies in the future'],
      ['w2', 'lies before transaction'],
    ] as const)
      expect((await desk.exceptions()).filter((row) => row.batchId === batchId)).toMatchObject([
        { kind: 'SOURCE_MISMATCH', status: 'explained', suspenseCents: 0, reason: expect.stringContaining(reason) },
      ]);
    await desk.importFile(desk.csv(desk.line('w1', one.tx, CLOSED)));
    expect(await settledIn(one.id)).toBe('w1');
  });
  test('if it has changed before it is recorded', async () => {
    const { tx } = await sale();
    const file = desk.csv(desk.line('h4', tx, CLOSED));
    const accountsOfBatch: SettlementPorts['register']['accountsOfBatch'] = (batchId) => {
      writeFileSync(file, `${FILE_HEAD}\n${desk.line('h4', tx, { ...CLOSED, gross: 1, fee: 0 })}\n`);
      return ports.register.accountsOfBatch(batchId);
    };
    const events = await eventCount();
    await expect(desk.importFile(file, null, { ...ports, register: { ...ports.register, accountsOfBatch } })).rejects.toThrow(
      'the file changed while it was',
    );
    expect(await eventCount()).toBe(events);
    expect(await desk.importFile(file)).toMatchObject({ repeated: false, batches: [{ amountCents: 1 }] });
  });
});

test('an earlier file is taken again where that is asked for', async () => {
  const { id, tx } = await sale();
  const [first, second] = [desk.csv(desk.line('again', tx, CLOSED)), desk.csv(desk.line('again', tx, { ...CLOSED, gross: 9_900 }))];
  const gross = async () => (await recordedLines('again')).map(({ grossCents }) => grossCents);
  await desk.importFile(first);
  await desk.importFile(second);
  expect(await desk.importFile(first)).toMatchObject({ repeated: true });
  expect(await gross()).toEqual([9_900]);
  expect(await desk.importFile(first, null, ports, true)).toMatchObject({ repeated: false, corrected: 1 });
  expect(await gross()).toEqual([10_000]);
  expect(await settledIn(id)).toBe('again');
});

test('a refund that no batch ever brings is missed as a charge is; one that came back as something else is not missed on top', async () => {
  const [lost, strange] = [await pay(CARD.settlesAtOnce), await pay(CARD.settlesAtOnce)];
  await partner.client.refund(lost.id, { amountCents: 2_500 });
  const refund = (await partner.client.refund(strange.id, { amountCents: 1_500 })).data;
  await record(listing([said('sent-back', refund.gateway.transactionId, { type: 'refund', accepted: false, grossCents: -1_500, netCents: -1_500 })]));
  service.clock.advance(4 * 86_400_000);
  const refunds = (await desk.exceptions()).filter(({ kind, expectedCents }) => kind === 'MISSING_AT_GATEWAY' && expectedCents! < 0);
  expect(refunds.map(({ paymentId, expectedCents }) => [paymentId, expectedCents])).toContainEqual([lost.id, -2_500]);
  expect(refunds.filter(({ paymentId }) => paymentId === strange.id)).toEqual([]);
});

test('wrong dates of a closed period are corrected in the first open one', async () => {
  const { id, tx } = await sale();
  const [wrong, open, right] = [dayOf(0), dayOf(1), dayOf(2)];
  await desk.importFile(desk.csv(desk.line('closed', tx, { closed: `${wrong}T00:00:01Z`, funded: wrong })));
  service.clock.advance(2 * 86_400_000);
  const { store, pool: db, clock, ids, readModels } = service.services;
  const journalReached = (position: Position) => readModels.of(journalModel).runUntil(position, { timeoutMs: 20_000 });
  await closePeriod({ store, db, clock, ids, journalReached }, `${open}T00:00:00.000Z`, 'Dana');
  await desk.importFile(desk.csv(desk.line('closed', tx, { closed: `${right}T00:00:01Z`, funded: right })));
  expect(await inTransit('closed', id)).toEqual([
    ['R4', wrong, wrong, 1, 10_000],
    ['R4', wrong, open, 1, -10_000],
    ['R4', right, right, 1, 10_000],
    ['R5', wrong, wrong, 1, -230],
    ['R5', wrong, open, 1, 230],
    ['R5', right, right, 1, -230],
    ['R6', wrong, wrong, 1, -9_770],
    ['R6', wrong, open, 1, 9_770],
    ['R6', right, right, 1, -9_770],
  ]);
});

test('after all of that books and read models equal the events', async () => {
  await settle(service);
  const { store } = service.services;
  for (const projection of everySubscriber(service.services)) await projection.runUntil((await store.head())!, { timeoutMs: 20_000 });
  service.clock.advance(3_600_000);
  expect((await findDrift(service.services.seal)).differences).toEqual([]);
});
