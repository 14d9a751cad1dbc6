/**
 * Every request, report of one day, loop and figure reads little more than it answers, however large the store is. The spec runs them on 100,000
 * payments of 20 days (`READS_PAYMENTS` makes more), and counts the rows and blocks that each statement reads. It never measures time.
 */
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import pg from 'pg';
import { finishSessions, postgresUnfinishedRows } from '#checkout';
import { EVERYTHING } from '#accounts';
import { auditKeyModel, findPayments, type FindQuery, issueAuditKey, nameHashOf, NOTHING_KNOWN, type ReportName, REPORTS, signLog } from '#audit';
import { dropUnusedShapes, type NewEvent, searchPathOf } from '#eventstore';
import { PAYMENT_STATUSES, purgeKeys, purgeRefusals, purgeTries, purgeVelocity, staffTasks, sweepKeys } from '#payments';
import { mailMac } from '#privacy';
import { createRefundRecovery, recordDisputes, recordSettlements } from '#settlement';
import { listDeliveries, purgeAttempts, purgeDelivered } from '#webhooks';
import { type Audit, createAudit } from '../../apps/audit/audit.js';
import { createMetrics } from '../../apps/metrics.js';
import { READ_MODELS } from '../../apps/services.js';
import { type BusyDay, busyDay } from '../support/books.js';
import { multiply } from '../support/multiply.js';
import { everySubscriber, paymentOf, type Service, startService } from '../support/service.js';
import { registerConnections, type Statement, type Watched, watchStatements } from '../support/statements.js';

/** Copies of payments. `READS_PAYMENTS` makes more. */
const PAYMENTS_MADE = Number(process.env.READS_PAYMENTS ?? 100_000);
const DAYS = 20;
const DAY_MS = 86_400_000;
/** Events that no read model needs. If a statement reads the whole log, it reads them too, and so it is found. */
const FILLER_EVENTS = 10_000;
const FILLER_CHARACTERS = 1_400;
const APPEND_EVENTS = 100;
/** A table with more rows than this is large. */
const LARGE_ROWS = 5_000;

/** From large tables, a statement may read ROWS_FOR_ONE rows for each row that it answers, and ROWS_MORE on top. */
const ROWS_FOR_ONE = 10;
const ROWS_MORE = 2_000;
/** The same for blocks of 8 KiB. */
const BLOCKS_FOR_ONE = 25;
const BLOCKS_MORE = 1_000;

registerConnections();

let service: Service;
let day: BusyDay;
let audit: Audit;
let url: string;
let authorization: string;
let agencyAuthorization: string;
let watched: Watched;
let large: Set<string>;
/** The whole day that the reports are about: the middle of the history. */
let from: string;
let to: string;

const t0 = Date.now();
const tick = (what: string) => process.env.READS_REPORT && console.log(`TICK ${what} ${Date.now() - t0}`);
beforeAll(async () => {
  service = await startService();
  tick('service');
  day = await busyDay(service);
  const { store, pool, clock, ids, keys, config, readModels } = service.services;
  tick('day');
  audit = await createAudit(service.services);
  url = await audit.listen(0, '127.0.0.1');
  const ports = { store, db: pool, clock, ids, keys, environment: config.environment };
  const { auditKey, position } = await issueAuditKey(
    ports,
    { name: 'Reads', role: 'auditor', scope: EVERYTHING, personal: false },
    { type: 'operator', id: 'spec' },
  );
  await readModels.of(auditKeyModel).runUntil(position, { timeoutMs: 10_000 });
  authorization = `AuditKey ${auditKey}`;
  await fillLog();
  const head = (await store.head())!;
  for (const projection of everySubscriber(service.services)) await projection.runUntil(head, { timeoutMs: 60_000 });

  tick('filled');
  const client = new pg.Client({
    connectionString: config.databaseUrl!,
    options: `-c search_path=${searchPathOf(READ_MODELS).join(',')} -c timezone=UTC`,
  });
  await client.connect();
  const until = new Date(Math.floor(clock.now() / DAY_MS) * DAY_MS).toISOString();
  // Unlogged tables halve the time to make the copies.
  for (const table of ['payment_list', 'gateway_transaction', 'journal_entry', 'journal_payment', 'payment_find', 'payment_trait', 'line_movement'])
    await client.query(`alter table ${table} set unlogged`);
  await multiply(client, { payments: PAYMENTS_MADE, days: DAYS, until });
  tick('multiplied');
  await client.query('vacuum analyze');
  tick('vacuumed');
  const { rows } = await client.query<{ name: string }>(`select relname as name from pg_class where relkind = 'r' and reltuples > $1`, [LARGE_ROWS]);
  large = new Set(rows.map(({ name }) => name));
  // The copies have no events, so the sweep finds a difference in each.
  large.delete('drift_difference');
  await client.end();
  to = new Date(Date.parse(until) - (DAYS / 2) * DAY_MS).toISOString();
  from = new Date(Date.parse(to) - DAY_MS).toISOString();
  // The agency with the most payments, of 40.
  const { rows: portals } = await pool.query<{ portal_id: string }>('select portal_id from payment_list group by 1 order by count(*) desc limit 1');
  const scope = { accounts: [], portals: [portals[0]!.portal_id] };
  const agency = await issueAuditKey(ports, { name: 'Agency', role: 'agency', scope, personal: false }, { type: 'operator', id: 'spec' });
  await readModels.of(auditKeyModel).runUntil(agency.position, { timeoutMs: 10_000 });
  agencyAuthorization = `AuditKey ${agency.auditKey}`;
  watched = await watchStatements();
}, 300_000);
afterAll(async () => {
  await watched?.stop();
  await audit?.close();
  await service?.stop();
});

const fillLog = async (): Promise<void> => {
  const { store, ids } = service.services;
  const append = async () => {
    const events = Array.from({ length: APPEND_EVENTS }, (): NewEvent => ({
      id: ids.uuid(),
      type: 'Filled',
      v: 1,
      data: { text: 'x'.repeat(FILLER_CHARACTERS) },
      meta: { recordedAt: new Date().toISOString(), actor: { type: 'system', id: 'spec' }, correlationId: 'spec' },
    }));
    await store.append(`filler-${ids.uuid()}`, 'no_stream', events);
  };
  await Promise.all(Array.from({ length: FILLER_EVENTS / APPEND_EVENTS }, append));
};

const rowsOfLarge = ({ read }: Statement): number => [...read].reduce((sum, [table, rows]) => sum + (large.has(table) ? rows : 0), 0);

/** The findings: statements that read more than a small multiple of what they answer. */
const greedy = (statements: readonly Statement[]): string[] =>
  statements.flatMap((one) => {
    const [rows, blocks] = [rowsOfLarge(one), one.blocks];
    const isGood = rows <= ROWS_FOR_ONE * one.answered + ROWS_MORE && blocks <= BLOCKS_FOR_ONE * one.answered + BLOCKS_MORE;
    return isGood ? [] : [`${rows} rows and ${blocks} blocks read for ${one.answered} rows: ${one.text.slice(0, 400)} [${one.plan}]`];
  });

/**
 * Runs `work`, which returns the number of rows that it answers. Each statement may read little more, and so may all statements together. `inAll`
 * false: the total is not checked. The copies have no events, so a route that folds events looks at many of them in vain.
 */
const readsLittle = async (work: () => Promise<number>, inAll = true): Promise<void> => {
  watched.take();
  const answered = await work();
  const statements = watched.take();
  const findings = greedy(statements);
  const total = statements.reduce((sum, one) => sum + rowsOfLarge(one), 0);
  if (process.env.READS_REPORT) {
    const blocks = statements.reduce((sum, one) => sum + one.blocks, 0);
    console.log(
      `${expect.getState().currentTestName}: ${answered} answered, ${Math.round(total)} rows, ${blocks} blocks, ${statements.length} statements`,
    );
  }
  expect(findings).toEqual([]);
  // Meanwhile the loops of the worker read a little, too.
  if (inAll && total > ROWS_FOR_ONE * answered + 10 * ROWS_MORE)
    throw new Error(`${total} rows read for ${answered}:\n${statements.map((one) => `${rowsOfLarge(one)} ${one.text.slice(0, 200)}`).join('\n')}`);
};

const get = async (path: string, as = authorization): Promise<string> => {
  const response = await fetch(`${url}${path}`, { headers: { authorization: as } });
  const text = await response.text();
  expect([path, response.status, response.status === 200 ? '' : text]).toEqual([path, 200, '']);
  return text;
};

test.each(Object.keys(REPORTS) as ReportName[])('the report %s of one day', (name) =>
  readsLittle(async () => (await get(`/audit/v1/exports/${name}?format=ndjson&from=${from}&to=${to}`)).split('\n').length),
);

// A page of a scope reads the rows of the period in their order. So all pages together read more than they answer, but each page is bounded.
test.each((Object.keys(REPORTS) as ReportName[]).filter((name) => REPORTS[name].isScoped))('the report %s of one day, for an agency', (name) =>
  readsLittle(
    async () => (await get(`/audit/v1/exports/${name}?format=ndjson&from=${from}&to=${to}`, agencyAuthorization)).split('\n').length,
    false,
  ),
);

test.each(['payments', 'payments?status=unknown', 'payments?from=$from&to=$to', 'payments?asOf=$from', 'exceptions', 'exceptions?status=resolved'])(
  'the audit route %s, for an agency',
  (path) =>
    readsLittle(async () => {
      const text = await get(`/audit/v1/${path.replaceAll('$from', from).replaceAll('$to', to)}`, agencyAuthorization);
      return Object.values((JSON.parse(text) as { data: object }).data).reduce((sum, one) => sum + (Array.isArray(one) ? one.length : 1), 0);
    }, false),
);

test.each(['alerts', 'statements/$portal?period=$month'])('the audit route %s', (path) =>
  readsLittle(async () => {
    const text = await get(`/audit/v1/${path.replace('$portal', day.separate).replace('$month', from.slice(0, 7))}`);
    return Object.values((JSON.parse(text) as { data: object }).data).reduce((sum, one) => sum + (Array.isArray(one) ? one.length : 1), 0);
  }, false),
);

test('reports of the newest day, without an end', () =>
  readsLittle(async () => {
    const newest = new Date(Math.floor(service.clock.now() / DAY_MS - 1) * DAY_MS).toISOString();
    let rows = 0;
    for (const name of ['payments', 'transactions', 'webhooks', 'staff-actions'])
      rows += (await get(`/audit/v1/exports/${name}?format=ndjson&from=${newest}`)).split('\n').length;
    return rows;
  }));

test('line items since a place of the log', () =>
  readsLittle(async () => {
    const { rows } = await service.services.pool.query<{ position: string }>(
      `select position from line_movement where position like '%:%' order by position desc, number desc offset 3000 limit 1`,
    );
    watched.take();
    return (await get(`/audit/v1/exports/line-items?format=ndjson&after=${rows[0]!.position}`)).split('\n').length;
  }));

test('pages of a report hold each row of the day once, also rows of the same instant', async () => {
  const { pool } = service.services;
  const of = async (report: ReportName, key: string) =>
    (await get(`/audit/v1/exports/${report}?format=ndjson&from=${from}&to=${to}`))
      .trimEnd()
      .split('\n')
      .map((line) => (JSON.parse(line) as Record<string, string>)[key]);
  const inside = async (table: string, key: string, time: string) => {
    const { rows } = await pool.query<{ key: string }>(`select ${key} as key from ${table} where ${time} >= $1 and ${time} < $2`, [from, to]);
    return rows.map((row) => row.key).sort();
  };
  expect((await of('payments', 'payment_id')).sort()).toEqual(await inside('payment_list', 'payment_id', 'created_at'));
  expect((await of('transactions', 'ref')).sort()).toEqual(await inside('gateway_transaction', 'ref', 'moved_at'));
  expect((await of('webhooks', 'event_id')).sort()).toEqual(
    await inside('webhook_attempt a join webhook_delivery d on d.id = a.delivery_id', 'd.event_id', 'a.started_at'),
  );
});

test.each([
  'payments',
  'payments?status=unknown',
  'payments?status=refunded',
  'payments?status=succeeded',
  'payments?portalId=$portal',
  'payments?portalId=$portal&status=failed',
  'payments?accountId=$account',
  'payments?accountId=$account&status=unknown',
  'payments?from=$from&to=$to',
  'payments?asOf=$from',
  'payments?lineReference=$line',
  'payments?referenceId=$reference',
  'payments?confirmationNumber=$confirmation',
  'payments?transactionId=$transaction',
  'payments?last4=$last4&amountCents=$cents',
  'payments?lineReference=$line&portalId=$portal&status=unknown&from=$from',
  'payments?lineReference=$line&limit=1000',
  'payments/$payment',
  'payments/$payment/timeline',
  'ledger/balances',
  'ledger/balances?asOf=$from',
  'ledger/balances?effectiveTo=$from',
  'ledger/journal',
  'ledger/journal?from=$from&to=$to',
  'ledger/journal?from=$from&to=$to&limit=1000',
  'drift',
  'exceptions',
  'exceptions?status=assigned',
  'refusals',
  'refusals?portalId=$portal',
  'refusals?portalId=$portal&from=$from&to=$to',
  'refusals?referenceId=CASE-0',
  'refusals?referenceId=CASE-0&portalId=$portal',
  'batches',
  'statements/$portal?period=2026-01',
])('the audit route %s', (path) =>
  readsLittle(
    async () => {
      const [one] = day.payments;
      const asked = path
        .replaceAll('$line', one!.lineItems[0]!.referenceId)
        .replaceAll('$reference', 'nobody')
        .replaceAll('$confirmation', one!.confirmationNumber!)
        .replaceAll('$transaction', one!.gateway.transactionId!)
        .replaceAll('$last4', one!.paymentMethod.last4)
        .replaceAll('$cents', String(one!.totalChargedCents))
        .replaceAll('$portal', day.separate)
        .replaceAll('$account', day.partner.accountId)
        .replaceAll('$payment', one!.id)
        .replaceAll('$from', from)
        .replaceAll('$to', to);
      const data = Object.values((JSON.parse(await get(`/audit/v1/${asked}`)) as { data: object }).data);
      return data.reduce((sum, one) => sum + (Array.isArray(one) ? one.length : 1), 0);
    },
    !/^payments($|\?)/.test(path),
  ),
);

type Known =
  'last4' | 'rareLast4' | 'noLast4' | 'amount' | 'noAmount' | 'range' | 'noRange' | 'brand' | 'noBrand' | 'portal' | 'day' | 'mail' | 'name';
const MIXES: readonly (readonly Known[])[] = [
  ['last4'], ['rareLast4'], ['noLast4'], ['amount'], ['noAmount'], ['range'], ['noRange'], ['brand'], ['noBrand'], ['portal'], ['day'], ['mail'],
  ['last4', 'day'], ['last4', 'noAmount'], ['last4', 'noBrand'], ['rareLast4', 'portal'], ['amount', 'day', 'portal'], ['amount', 'noBrand'],
  ['noRange', 'day'], ['range', 'portal'], ['noBrand', 'portal', 'day'], ['mail', 'day'], ['name', 'last4'], ['name', 'mail', 'noAmount', 'portal', 'day'],
]; // prettier-ignore
test.each(MIXES.map((mix) => [mix.join(' and '), mix] as const))('a search by %s, with and without each status', (_, mix) =>
  readsLittle(async () => {
    const { store, pool: db, keys } = service.services;
    const [one] = day.payments;
    const { last4 } = one!.paymentMethod;
    const VALUES: Readonly<Record<Known, Partial<FindQuery>>> = {
      last4: { last4 },
      rareLast4: { last4: '9972' },
      noLast4: { last4: '9999' },
      amount: { amount: [one!.amountCents, one!.amountCents] },
      noAmount: { amount: [1, 1] },
      range: { amount: [5_000, 15_000] },
      noRange: { amount: [90_000_000, 99_999_999] },
      brand: { brand: one!.paymentMethod.brand },
      noBrand: { brand: 'jcb' },
      portal: { portalId: day.separate },
      day: { from, to },
      mail: { mailMac: mailMac(keys, 'nobody@mail.example') },
      name: { nameHashes: [nameHashOf({ lineReference: one!.lineItems[0]!.referenceId })!] },
    };
    const none = { ...NOTHING_KNOWN, asOf: null, accountId: null, portalId: null, from: null, to: null, after: null, limit: 100 };
    const known = Object.assign({}, ...mix.map((name) => VALUES[name])) as Partial<FindQuery>;
    let rows = 0;
    for (const status of [null, ...PAYMENT_STATUSES]) {
      const { payments, next } = await findPayments({ store, db }, EVERYTHING, { ...none, ...known, status });
      rows += payments.length + 1;
      if (next !== null) rows += (await findPayments({ store, db }, EVERYTHING, { ...none, ...known, status, after: next })).payments.length;
    }
    return rows;
  }, false),
);

type Filter = Readonly<Record<string, string>>;
const STATUSES: readonly Filter[] = [{}, ...PAYMENT_STATUSES.map((status) => ({ status }))];
test.each(STATUSES)('the list of a partner %j, by each other filter', (filter) =>
  readsLittle(async () => {
    let rows = 0;
    for (const portal of [{}, { portalId: day.separate }, { portalId: day.combined }] as readonly Filter[])
      for (const time of [{}, { from, to }, { to: from }] as readonly Filter[]) {
        const { status, text, data } = await day.partner.client.list({ ...filter, ...portal, ...time });
        expect([status, status === 200 ? '' : text]).toEqual([200, '']);
        rows += data.payments.length + 1;
      }
    return rows;
  }),
);

test('deliveries, by each filter', () =>
  readsLittle(async () => {
    const { pool } = service.services;
    const { rows } = await pool.query<{ id: string; account_id: string }>('select id, account_id from webhook_endpoint limit 1');
    const [{ id: endpointId, account_id: accountId }] = rows as [{ id: string; account_id: string }];
    let found = 0;
    for (const owner of [{}, { endpointId }, { accountId }, { paymentId: day.payments[0]!.id }])
      for (const state of [{}, { state: 'held' }, { state: 'delivered' }, { state: 'canceled' }] as const)
        found += (await listDeliveries(pool, { ...owner, ...state, limit: 20 })).length;
    return found;
  }));

test('tasks of staff', () =>
  readsLittle(async () => {
    const { store, pool: db } = service.services;
    return (await staffTasks({ store, db }, { all: false })).length;
  }));

test('a GET, a create, a refund and a void', () =>
  readsLittle(async () => {
    const { client } = day.partner;
    const made = await client.find(day.payments.at(-1)!.id);
    expect(made.status).toBe(200);
    expect((await client.refund(made.data.id, { amountCents: 1 })).status).toBe(200);
    const { id } = await client.created(paymentOf(day.separate));
    expect((await client.void(id, {})).status).toBe(200);
    return 4;
  }));

test('metrics and readiness', () =>
  readsLittle(async () => {
    const { own, shared } = createMetrics(service.services);
    const text = `${await own.metrics()}${await shared.metrics()}`;
    const { readiness } = service.services;
    for (const check of Object.values(readiness)) await check();
    return text.length > 0 ? 1 : 0;
  }));

// The drift sweep is never idle here. The worker runs it during these tests, so its statements are counted, too.
test('each loop of the worker, when nothing is due', () =>
  readsLittle(async () => {
    const { checkout, config, openExceptions, payments, pool, readModels, retention, seal, settlement } = service.services;
    const stop = AbortSignal.timeout(60_000);
    await payments.recovery.round(stop);
    await recordSettlements(settlement, stop);
    await openExceptions(stop);
    await recordDisputes(settlement, stop, { onlyDue: true });
    await createRefundRecovery(settlement, pool).round(stop);
    await retention.round(stop);
    await sweepKeys(payments);
    await finishSessions(checkout, postgresUnfinishedRows(pool), { stop });
    await purgeKeys(payments, stop);
    await purgeTries(pool, stop);
    await purgeVelocity(pool, stop);
    await purgeRefusals(pool, service.clock.now(), stop);
    await checkout.sessions.purge(Date.now(), stop);
    await purgeAttempts(pool, stop);
    await purgeDelivered(pool, config.webhooks.keepDays, stop);
    await dropUnusedShapes(pool, readModels.models);
    await signLog(seal);
    return 1;
  }));
