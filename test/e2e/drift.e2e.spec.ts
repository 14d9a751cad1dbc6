/** Drift: a replay of the events is compared with the four places that show a payment. Past states are computed as they were known at that time. */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { EVERYTHING } from '#accounts';
import { paymentListModel } from '#payments';
import { journalModel } from '#ledger';
import { type Load, rebuild } from '#eventstore';
import {
  beginPass,
  checkPayments,
  findDrift,
  listAsOf,
  logState,
  type ListThenQuery,
  passChecks,
  type PassName,
  paymentAsOf,
  paymentIdsAfter,
  runDuePasses,
  runPass,
  signLog,
  sweepDrift,
  timeline,
} from '#audit';
import { eventually } from '../support/eventually.js';
import { type BusyDay, busyDay } from '../support/books.js';
import { type Service, startService, everySubscriber } from '../support/service.js';

let service: Service;
let day: BusyDay;
beforeAll(async () => {
  service = await startService();
  day = await busyDay(service);
  const head = (await service.services.store.head())!;
  for (const projection of everySubscriber(service.services)) await projection.runUntil(head, { timeoutMs: 20_000 });
}, 600_000);
afterAll(() => service.stop());

const ports = () => service.services.seal;
const sql = (text: string, ...values: unknown[]) => service.services.pool.query(text, values);

describe('drift', () => {
  test('of a busy day there is none; the digest is that of any order of looking, and of a rebuild', async () => {
    const report = await findDrift(ports(), { streams: (await paymentIdsAfter(service.services.pool, null, 1_000)).length });
    expect(report.differences).toEqual([]);
    expect(report.payments).toBeGreaterThan(12);
    const { store, pool, clock } = service.services;
    for (const model of [paymentListModel, journalModel]) await rebuild(model, { store, pool, now: () => clock.now() });
    expect(await findDrift(ports())).toEqual(report);
  });

  test.each([
    [
      'loses its connection',
      async (session: number) => void (await sql('select pg_terminate_backend($1)', session)),
      /terminat|EPIPE|ECONNRESET|closed/,
    ],
    ['cannot read on', () => Promise.reject(new Error('the log is damaged')), /the log is damaged/],
  ])('a rebuild that %s while it loads fails with that error and leaves the live rows', async (_name, happens, told) => {
    const { store, pool, clock } = service.services;
    const { load, ...list } = paymentListModel;
    const add: Load['add'] = (client, part) =>
      load!.add(
        client,
        (async function* () {
          for await (const batch of part) {
            yield batch;
            await happens((client as unknown as { processID: number }).processID);
          }
        })(),
      );
    const rows = async () => (await sql('select * from payment_list order by payment_id')).rows;
    const before = await rows();
    await expect(rebuild({ ...list, load: { ...load!, add } }, { store, pool, now: () => clock.now() })).rejects.toThrow(told);
    expect(await rows()).toEqual(before);
    await rebuild(paymentListModel, { store, pool, now: () => clock.now() });
    expect(await rows()).toEqual(before);
  });

  const settledPayment = () => day.payments.find(({ amountCents }) => amountCents === 777)!.id;
  const tampered = async (table: string, change: () => Promise<unknown>) => {
    await sql(`create table kept as table ${table}`);
    try {
      await change();
      return (await findDrift(ports())).differences;
    } finally {
      await sql(`begin; truncate ${table}; insert into ${table} table kept; drop table kept; commit`);
    }
  };
  test.each([
    [
      'a cent in the list',
      'payment_list',
      `update payment_list set state = replace(state, '"amountCents":777', '"amountCents":778') where payment_id = $1`,
      'list',
      /its row says terms\.amountCents 778 instead of 777/,
    ],
    [
      'a state that is no JSON',
      'payment_list',
      `update payment_list set state = 'no JSON' where payment_id = $1`,
      'list',
      /its row says {2}"no JSON" instead of/,
    ],
    [
      'a status in the list',
      'payment_list',
      `update payment_list set status = 'succeeded' where payment_id = $1`,
      'list',
      /its row is found under status succeeded instead of/,
    ],
    [
      'a time in the list',
      'payment_list',
      `update payment_list set created_at = created_at + interval '1 ms' where payment_id = $1`,
      'list',
      /its row is found under creation .* instead of/,
    ],
    [
      'an attempt that recovery would look after for ever',
      'payment_list',
      `update payment_list set open_attempt_id = payment_id, open_since = now() where payment_id = $1`,
      'list',
      /its row is found under open attempt .* instead of null/,
    ],
    ['a row that is missing', 'payment_list', `delete from payment_list where payment_id = $1`, 'list', /it has no row in the list/],
    [
      'a row that stands still',
      'payment_list',
      `update payment_list set revision = 2 where payment_id = $1`,
      'list',
      /its row stands at revision 2, the list has passed/,
    ],
    [
      'a cent in the journal',
      'journal_entry',
      `update journal_entry set cents = array[cents[1] + 1, cents[2] - 1] where payment_id = $1 and rule = 'R1'`,
      'journal',
      /entry .* \(R1\) says postings\.0\.cents 778 instead of 777/,
    ],
    [
      'an account in the journal',
      'journal_entry',
      `update journal_entry set accounts = array['assets:bank:mine', accounts[2]] where payment_id = $1 and rule = 'R1'`,
      'journal',
      /assets:bank:mine/,
    ],
    [
      'a time in the journal',
      'journal_entry',
      `update journal_entry set effective_at = effective_at - interval '1 day' where payment_id = $1 and rule = 'R7'`,
      'journal',
      /\(R7\) says effectiveAt/,
    ],
    ['an entry that is missing', 'journal_entry', `delete from journal_entry where payment_id = $1 and rule = 'R4'`, 'journal', /\(R4\) is missing/],
    [
      'an entry that nobody posted',
      'journal_entry',
      `insert into journal_entry select position, 90, gen_random_uuid(), event_id, 'R7', null, payment_id, recorded_at, effective_at, booked_at, accounts, cents from journal_entry where payment_id = $1 and rule = 'R1'`,
      'journal',
      /\(R7\) belongs to no event/,
    ],
    [
      'what the journal remembers',
      'journal_payment',
      `update journal_payment set books = replace(books::text, '777', '770')::json where payment_id = $1`,
      'journal',
      /what the journal remembers of it says legs/,
    ],
    [
      'another batch',
      'gateway_transaction',
      `update gateway_transaction set settled_batch_id = 'bat_other' where payment_id = $1 and op = 'charge'`,
      'settlement',
      /the processor's lines say bat_other/,
    ],
    [
      'no batch',
      'gateway_transaction',
      `update gateway_transaction set settled_batch_id = null where payment_id = $1 and op = 'charge'`,
      'settlement',
      /the processor's lines say none/,
    ],
  ] as const)('%s', async (_name, table, change, kind, message) => {
    // Go far beyond the busy day, so that no settlement line is expected any more.
    service.clock.advance(3_600_000);
    const found = await tampered(table, () => sql(change, settledPayment()));
    expect(found.filter((one) => one.kind === kind && one.paymentId === settledPayment())[0]?.message).toMatch(message);
    expect(found.every(({ paymentId, kind: is }) => paymentId === settledPayment() || is === 'books' || is === 'lines')).toBe(true);
  });
  test('entries of settlement, and entries of no event at all', async () => {
    const funding = await tampered('journal_entry', () =>
      sql(`update journal_entry set cents = array[cents[1] + 5, cents[2] - 5] where rule = 'R6'`),
    );
    expect(funding.map(({ kind, message }) => `${kind} ${message}`).join()).toMatch(/journal entry .* \(R6\) says postings/);
    const forged = await tampered('journal_entry', () =>
      sql(`insert into journal_entry select position || 'x', number, gen_random_uuid(), gen_random_uuid(), 'R17', null, null, recorded_at, effective_at, booked_at,
             array['assets:bank:mine', 'equity:adjustment'], array[100, -100] from journal_entry order by position limit 1`),
    );
    expect(forged.map(({ message }) => message).join()).toMatch(/the journal holds \d+ entries, the events post \d+/);
    const oneSided = await tampered('journal_entry', () => sql(`update journal_entry set cents = array[cents[1] + 5, cents[2]] where rule = 'R6'`));
    expect(oneSided.map(({ message }) => message).join()).toContain('does not balance');
  });
  describe('by itself', () => {
    const known = async () => (await sql('select payment_id from drift_difference')).rows.map((row) => (row as { payment_id: string }).payment_id);
    const sweep = async () => {
      for (;;) if ((await sweepDrift(ports()))?.level) return;
    };
    const pass = async (name: PassName) => {
      const { clock, ids } = service.services;
      const { rows } = await sql(`update verify_pass set due_at = now() where pass = $1 returning finished_at`, name);
      const { finished_at: before } = rows[0] as { finished_at: Date | null };
      // A worker of the service may do the pass.
      await eventually(async () => {
        await runDuePasses({
          ...ports(),
          headFolder: ports().folder,
          clock,
          ids,
          goOn: () => Promise.resolve(true),
          onDifferences: () => undefined,
          onFailed: () => undefined,
        });
        const { rows: after } = await sql('select finished_at from verify_pass where pass = $1', name);
        return (after[0] as { finished_at: Date | null }).finished_at?.getTime() !== before?.getTime();
      });
      const { rows: found } = await sql('select checks from verify_pass where pass = $1', name);
      const { checks } = found[0] as { checks: { name: string; ok: boolean; detail: string }[] };
      return Object.fromEntries(checks.filter(({ ok }) => !ok).map(({ name: check, detail }) => [check, detail]));
    };
    const status = async () =>
      ((await sql('select status from payment_list where payment_id = $1', settledPayment())).rows[0] as { status: string }).status;
    const become = (to: string) => sql(`update payment_list set status = $2 where payment_id = $1`, settledPayment(), to);

    test('the sweep compares a payment that changes, a full pass also one that does not; a payment that differs is compared again', async () => {
      const kept = await status();
      await sweep();
      await become('failed');
      await sweep();
      expect(await known()).toEqual([]);
      await sql(`update drift_sweep set position = ''`);
      await sweep();
      expect(await known()).toEqual([settledPayment()]);
      await become(kept);
      await sweep();
      expect(await known()).toEqual([settledPayment()]);
      await sql(`update drift_difference set looked_at = now() - interval '1 hour'`);
      await sweep();
      expect(await known()).toEqual([]);

      await become('failed');
      expect(await pass('full')).toMatchObject({ 'read models': expect.stringContaining(settledPayment()) as unknown });
      expect(await known()).toEqual([settledPayment()]);
      await become(kept);
      expect(await pass('full')).toEqual({});
      expect(await known()).toEqual([]);
    });
    test('a sweep at the end of the log reads nothing of it', async () => {
      await sweep();
      let reads = 0;
      const { store } = ports();
      const counting = { ...store, readAll: (...asked: Parameters<typeof store.readAll>) => (reads++, store.readAll(...asked)) };
      expect(await sweepDrift({ ...ports(), store: counting })).toEqual({ differences: [], level: true });
      expect(reads).toBe(0);
    });
    test('an incremental pass begins at the last good one: it proves the sums of the days since then, and leaves older days to the full pass', async () => {
      await signLog(service.services.seal);
      expect(await pass('full')).toEqual({});
      const { client } = day.partner;
      await client.refund(day.payments.findLast(({ amountCents }) => amountCents === 1_500)!.id, {});
      const head = (await service.services.store.head())!;
      for (const projection of everySubscriber(service.services)) await projection.runUntil(head, { timeoutMs: 20_000 });
      await signLog(service.services.seal);
      const days = (await sql('select distinct recorded_on::text as day from journal_total order by day')).rows as { day: string }[];
      expect(days.length).toBeGreaterThan(1);
      const changed = async (table: string, condition: string, change = 'debit_cents = debit_cents + 1') => {
        await sql(`create table kept as table ${table}`);
        await sql(`update ${table} set ${change} where ctid = (select ctid from ${table} where ${condition} limit 1)`);
        try {
          return [await pass('incremental'), await pass('full')] as const;
        } finally {
          await sql(`begin; truncate ${table}; insert into ${table} table kept; drop table kept; commit`);
        }
      };
      const named = expect.stringMatching(/the day totals of .* are not those of its entries/) as unknown;
      const newest = await changed('journal_total', `recorded_on = '${days.at(-1)!.day}'`);
      expect(newest).toEqual([{ books: named }, { books: named }]);
      const oldest = await changed('journal_total', `recorded_on = '${days[0]!.day}'`);
      expect(oldest).toEqual([{}, { books: named }]);
      expect(await changed('journal_balance', 'true')).toEqual([
        { books: expect.stringMatching(/the books sum to 1 cents instead of 0/) as unknown },
        { books: expect.stringMatching(/the balance of \S+ is not the sum of its days/) as unknown },
      ]);
      expect(await changed('journal_day', `recorded_on = '${days[0]!.day}'`, 'first_position = last_position')).toEqual([
        {},
        { books: expect.stringMatching(/an entry lies outside of the part of the journal that is read for its day \(position \d+/) as unknown },
      ]);
      expect(await pass('incremental')).toEqual({});
      const { rows } = await sql('select checks from verify_pass where pass = $1', 'incremental');
      expect(JSON.stringify(rows)).toMatch(/events after the first \d+ are those that were sealed/);
    });
    test('a pass whose stored state was changed begins again and says so', async () => {
      await sql(`update verify_pass set state = '{"pass": {"full": true, "step": "done"}, "note": null, "mac": ""}' where pass = 'full'`);
      expect(await pass('full')).toEqual({ heads: expect.stringMatching(/the stored state of this pass was changed/) as unknown });
      expect(await pass('full')).toEqual({});
    });
  });
  test('a service in motion is no difference', async () => {
    const { client } = day.partner;
    const ids = await paymentIdsAfter(service.services.pool, null, 1_000);
    const moving = Promise.all(day.payments.slice(0, 6).map(({ id }) => client.refund(id, {})));
    for (let round = 0; round < 5; round++) expect((await checkPayments(ports(), ids)).differences).toEqual([]);
    await moving;
    // A whole pass, and one from a signed head, while the service charges and refunds, and while its seal and its models go on.
    const { head } = (await signLog(service.services.seal))!;
    const going = day.payments.slice(6, 9).map(({ id }) => client.refund(id, {}).then(() => signLog(service.services.seal)));
    for (const from of [null, head]) {
      const { size, position } = await logState(service.services.pool);
      const all = { ...ports(), headFolder: ports().folder };
      const pass = await beginPass(all, from, { size, position });
      for await (const _page of runPass(all, pass, { eventsAtOnce: 256, paymentsAtOnce: 5 })) await signLog(service.services.seal);
      expect(passChecks(pass).filter(({ ok }) => !ok)).toEqual([]);
    }
    await Promise.all(going);
  });
});

describe('as it was known then', () => {
  test('a payment after each of its events, by revision, place and instant', async () => {
    const { store } = service.services;
    const { id } = day.payments.find(({ amountCents }) => amountCents === 10_000)!;
    const moments = await timeline(store, EVERYTHING, id);
    for (const { revision, position, status, recordedAt } of moments) {
      expect((await paymentAsOf(store, EVERYTHING, id, { revision: BigInt(revision) })).payment.status).toBe(status);
      expect(await paymentAsOf(store, EVERYTHING, id, { position })).toMatchObject({ revision, position, payment: { status } });
      const then = await paymentAsOf(store, EVERYTHING, id, { asOf: recordedAt });
      expect(then.revision).toBe(moments.findLast((one) => one.recordedAt <= recordedAt)!.revision);
    }
    expect(moments[0]).toMatchObject({
      type: 'PaymentInitiated',
      feeVersion: 1,
      actor: { type: 'partner', id: day.partner.accountId },
      status: 'pending',
      rules: [],
    });
    expect(moments[1]).toMatchObject({ type: 'PaymentCreated', status: 'succeeded', rules: ['R1', 'R2'] });
    await expect(paymentAsOf(store, EVERYTHING, id, { asOf: '2020-01-01T00:00:00.000Z' })).rejects.toMatchObject({ code: 'PAYMENT_NOT_FOUND' });
  });
  test('the list at the instant of any event is the list of the payments as they were then', async () => {
    const { store, pool } = service.services;
    const query: ListThenQuery = {
      asOf: null,
      accountId: day.partner.accountId,
      portalId: null,
      from: null,
      to: null,
      status: null,
      after: null,
      limit: 5,
    };
    const pages = async (asked: Partial<ListThenQuery>) => {
      const all = [];
      for (let after: ListThenQuery['after'] = null; ;) {
        const page = await listAsOf({ store, db: pool }, EVERYTHING, { ...query, ...asked, after });
        all.push(...page.payments);
        after = page.next;
        if (!after) return all;
      }
    };
    const now = await pages({});
    expect(now.map(({ id }) => id)).toEqual((await day.partner.client.list({ limit: 100 })).data.payments.map(({ id }) => id));
    for (const { createdAt: asOf } of now) {
      const then = await pages({ asOf });
      expect(then.every(({ createdAt, updatedAt }) => createdAt <= asOf && updatedAt <= asOf)).toBe(true);
      expect(then.map(({ id }) => id)).toEqual(now.filter(({ createdAt }) => createdAt <= asOf).map(({ id }) => id));
      const succeeded = then.filter(({ status }) => status === 'succeeded').map(({ id }) => id);
      expect((await pages({ asOf, status: 'succeeded' })).map(({ id }) => id)).toEqual(succeeded);
    }
  });
});
