/** The data for finance and auditors: `/audit/v1` with its own keys, reports, the evidence pack, and closed periods. */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { execFile } from 'node:child_process';
import { hash } from 'node:crypto';
import { appendFileSync, mkdtempSync, readFileSync, readdirSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { get as httpGet } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { EVERYTHING, type Scope } from '#accounts';
import { PAGE_ROWS } from '#platform';
import {
  auditKeyModel,
  exportReport,
  findDrift,
  sweepDrift,
  issueAuditKey,
  projectionDigest,
  type ReportName,
  REPORTS,
  reportText,
  revokeAuditKey,
  signLog,
  writePack,
} from '#audit';
import { paymentListModel, type PaymentView, resolvePayment } from '#payments';
import { closeIncident, type Position } from '#eventstore';
import { openDispute } from '#settlement';
import { adjustBooks, balances, balancesBefore, closePeriod, JOURNAL_START, journalModel, journalPage, type Movement, movements, type PeriodPorts, verifyPeriods } from '#ledger'; // prettier-ignore
import { type Audit, createAudit } from '../../apps/audit/audit.js';
import { serveMetrics } from '../../apps/lifecycle.js';
import { Health } from '../../apps/health.js';
import { createMetrics } from '../../apps/metrics.js';
import { addHledger, type BusyDay, busyDay, settle } from '../support/books.js';
import { eventually } from '../support/eventually.js';
import { createOpenApiJudge, type OpenApiJudge } from '../support/openapi.js';
import { eventsInPostgres } from '../support/kurrentdb-server.js';
import { CARD, paymentOf, PAYMENTS, type Service, startService, everySubscriber } from '../support/service.js';

const VERIFIER = join(import.meta.dirname, '../../apps/operator/verify.mjs');
const OPERATOR = { type: 'operator' as const, id: 'spec' };
/** A range that contains the busy day, also the days by which its clock was moved forward. */
const FROM = '2020-01-01T00:00:00.000Z';
const TO = '2100-01-01T00:00:00.000Z';

let service: Service;
let day: BusyDay;
let audit: Audit;
let url: string;
let judge: OpenApiJudge;
let finance: string;
let auditor: string;
let folder: string;
beforeAll(async () => {
  service = await startService();
  folder = mkdtempSync(join(tmpdir(), 'payfold-audit-'));
  day = await busyDay(service);
  audit = await createAudit(service.services);
  url = await audit.listen(0, '127.0.0.1');
  judge = createOpenApiJudge((await (await fetch(`${url}/openapi.json`)).json()) as Parameters<typeof createOpenApiJudge>[0]);
  finance = (await issue('finance')).auditKey;
  auditor = (await issue('auditor')).auditKey;
  await caughtUp();
}, 600_000);
afterAll(async () => {
  await audit.close();
  rmSync(folder, { recursive: true, force: true });
  await service.stop();
});

/** The ids of the processor's transactions, however deep they lie in `value`. */
const transactionsIn = (value: unknown): string[] =>
  typeof value !== 'object' || value === null
    ? []
    : Object.entries(value).flatMap(([name, part]) => (name === 'transactionId' && typeof part === 'string' ? [part] : transactionsIn(part)));

const keyPorts = () => {
  const { store, pool, clock, ids, keys, config } = service.services;
  return { store, db: pool, clock, ids, keys, environment: config.environment };
};
const keysReach = (position: Parameters<PeriodPorts['journalReached']>[0]) =>
  service.services.readModels.of(auditKeyModel).runUntil(position, { timeoutMs: 10_000 });
const issue = async (role: 'finance' | 'auditor' | 'agency', scope: Scope = EVERYTHING, personal = false) => {
  const issued = await issueAuditKey(keyPorts(), { name: `Books ${role}`, role, scope, personal }, OPERATOR);
  await keysReach(issued.position);
  return issued;
};
const caughtUp = async () => {
  const head = (await service.services.store.head())!;
  for (const projection of everySubscriber(service.services)) await projection.runUntil(head, { timeoutMs: 20_000 });
};
interface Read {
  readonly status: number;
  readonly headers: Headers;
  readonly text: string;
  readonly data: Record<string, never>;
}
const get = async (path: string, authorization: string | null = `AuditKey ${finance}`, method = 'GET'): Promise<Read> => {
  const response = await fetch(`${url}${path}`, { method, headers: authorization === null ? {} : { authorization } });
  const text = await response.text();
  const type = response.headers.get('content-type') ?? undefined;
  if (type?.startsWith('application/json')) judge.check({ method, path, status: response.status, contentType: type, text });
  return {
    status: response.status,
    headers: response.headers,
    text,
    data: type?.startsWith('application/json') ? (JSON.parse(text) as { data: Read['data'] }).data : {},
  };
};
/** The trailers of an export. */
const trailersOf = (address: string, authorization: string): Promise<NodeJS.Dict<string>> =>
  new Promise((resolve, reject) => {
    httpGet(address, { headers: { authorization } }, (response) => response.resume().once('end', () => resolve(response.trailers))).once(
      'error',
      reject,
    );
  });

const PATHS = () => [
  `/audit/v1/payments/${day.payments[0]!.id}`,
  `/audit/v1/payments/${day.payments[0]!.id}/timeline`,
  '/audit/v1/payments',
  '/audit/v1/payments?referenceId=nobody',
  '/audit/v1/ledger/balances',
  '/audit/v1/ledger/journal',
  '/audit/v1/drift',
  '/audit/v1/alerts',
  '/audit/v1/exceptions',
  '/audit/v1/refusals',
  '/audit/v1/batches',
  '/audit/v1/events?limit=1000',
  '/audit/v1/changed-payments?limit=1000',
  `/audit/v1/statements/${day.separate}?period=2026-01`,
  '/audit/v1/exports/payments',
];

describe('keys', () => {
  test('every path answers its key, and says how far the ledger had come', async () => {
    for (const path of PATHS())
      for (const authorization of [`AuditKey ${finance}`, `auditkey ${auditor}`, finance]) {
        const { status, headers } = await get(path, authorization);
        expect([path, status]).toEqual([path, 200]);
        expect([headers.get('ledger-position'), headers.get('ledger-lag')]).toEqual([await service.services.store.head(), '0']);
      }
  });
  test('and no other credential: none, a partner’s, a token, a wrong secret, a revoked key; nor does an audit key open a partner’s path', async () => {
    const { client, apiKey } = day.partner;
    const { data } = await client.post<{ accessToken: string }>('/api/partner/v1/auth/token', {});
    const revoked = await issue('auditor');
    expect((await get('/audit/v1/payments', revoked.auditKey)).status).toBe(200);
    await keysReach(await revokeAuditKey(keyPorts(), revoked.keyId, OPERATOR));
    const wrong = finance.slice(0, -1) + (finance.endsWith('a') ? 'b' : 'a');
    for (const path of PATHS())
      for (const authorization of [
        null,
        apiKey,
        `ApiKey ${apiKey}`,
        `Bearer ${data.accessToken}`,
        wrong,
        finance.replace('pa_test', 'pa_live'),
        revoked.auditKey,
        `Bearer ${finance}`,
        '',
      ]) {
        const { status, headers, text } = await get(path, authorization);
        expect([path, authorization, status]).toEqual([path, authorization, 401]);
        expect(headers.get('www-authenticate')).toBe('AuditKey realm="payfold audit"');
        expect(Object.keys(JSON.parse(text) as object)).toEqual(['success', 'message']);
      }
    for (const authorization of [finance, `AuditKey ${finance}`, `ApiKey ${auditor}`])
      expect((await client.as(authorization).get(PAYMENTS)).status).toBe(401);
  });
  test('a finance key does not read the actions of staff; nothing can be written', async () => {
    expect((await get('/audit/v1/exports/staff-actions')).status).toBe(403);
    expect((await get('/audit/v1/exports/staff-actions', auditor)).status).toBe(200);
    for (const method of ['POST', 'PUT', 'PATCH', 'DELETE']) expect((await get('/audit/v1/payments', finance, method)).status).toBe(405);
  });
  test('the hash of a key is all that is kept of it', async () => {
    const { rows } = await service.services.pool.query<{ text: string }>(
      `select e::text as text from es.events e where stream_id like 'staff-audit-key-%' union all select k::text from audit_key k`,
    );
    const text = rows.map((row) => row.text).join('\n');
    for (const key of [finance, auditor]) expect(text).not.toContain(key.split('_')[3]);
  });
});

describe('reading', () => {
  test.each([
    'asOf=yesterday',
    'asOf=2026-02-30',
    'limit=0',
    'limit=2000',
    'status=gone',
    'portalId=1',
    'cursor=x',
    'amount=1',
    'asOf=2026-01-01&asOf=2026-01-02',
  ])('?%s is refused', async (query) => {
    expect((await get(`/audit/v1/payments?${query}`)).status).toBe(400);
  });
  test('a forged cursor is refused', async () => {
    const { nextCursor } = (await get('/audit/v1/payments?limit=1')).data as unknown as { nextCursor: string };
    const place = Buffer.from(nextCursor, 'base64url').subarray(16);
    expect(place.toString()).toContain(day.payments.at(-1)!.createdAt.slice(0, 4));
    for (const mac of [Buffer.alloc(0), Buffer.alloc(16)])
      expect((await get(`/audit/v1/payments?cursor=${Buffer.concat([mac, place]).toString('base64url')}`)).status).toBe(400);
  });
  test.each(['%00', 'gone'])('exceptions?status=%s is refused', async (status) => {
    expect((await get(`/audit/v1/exceptions?status=${status}`)).status).toBe(400);
  });
  test('a payment as it was, and one that was not yet', async () => {
    const { id, createdAt } = day.payments[3]!;
    const first = await get(`/audit/v1/payments/${id}?revision=0`);
    expect(first.data).toMatchObject({ revision: 0, payment: { id, status: 'pending' } });
    const { position } = first.data as unknown as { position: string };
    expect((await get(`/audit/v1/payments/${id}?position=${position}`)).data).toEqual(first.data);
    for (const other of ['1', 'x', '-1', '', '%00', position.replaceAll(/\d/g, '9')])
      expect([other, (await get(`/audit/v1/payments/${id}?position=${other}`)).status]).toEqual([other, 400]);
    expect((await get(`/audit/v1/payments/${id}?asOf=2020-01-01`)).status).toBe(404);
    expect((await get(`/audit/v1/payments/${id}?asOf=${encodeURIComponent(createdAt)}`)).data).toMatchObject({ payment: { createdAt } });
    expect((await get('/audit/v1/payments/nonsense')).status).toBe(404);
    const { events } = (await get(`/audit/v1/payments/${id}/timeline`)).data as unknown as { events: object[] };
    expect(events.slice(0, 2)).toMatchObject([
      { type: 'PaymentInitiated', feeVersion: 1 },
      { type: 'PaymentCreated', rules: ['R1', 'R2'] },
    ]);
  });
  describe('finding', () => {
    const find = async (query: Readonly<Record<string, string>>) => {
      const { status, headers, data, text } = await get(`/audit/v1/payments?${new URLSearchParams(query).toString()}`);
      expect([query, status, status === 200 ? '' : text]).toEqual([query, 200, '']);
      const { payments, nextCursor } = data as unknown as { payments: (PaymentView & { accountId: string })[]; nextCursor: string | null };
      return { headers, payments, nextCursor, ids: payments.map(({ id }) => id) };
    };
    test('each name answers the payment as the list shows it, and says how far the log was read', async () => {
      await caughtUp();
      const [one] = day.payments;
      const { data } = await day.partner.client.find(one!.id);
      const { headers, payments } = await find({ confirmationNumber: one!.confirmationNumber! });
      expect(payments).toEqual([{ ...data, accountId: day.partner.accountId, returns: expect.any(Array) }]);
      expect([headers.get('ledger-position'), headers.get('ledger-lag')]).toEqual([await service.services.store.head(), '0']);
      expect((await find({ confirmationNumber: one!.confirmationNumber!.toLowerCase() })).ids).toEqual([one!.id]);
      expect(await find({ lineReference: 'INV-9' })).toMatchObject({ payments: [], nextCursor: null });
    });
    test('the processor’s transactions: charge and fee, void, refund, and those of a decline', async () => {
      const payments = new Map<string, string>();
      for await (const events of service.services.store.readAll(null, { streamPrefixes: ['payment-', 'settlement-'] }))
        for (const { stream, data } of events) {
          const [category, id] = [stream.split('-')[0], stream.slice('payment-'.length)];
          const parts = category === 'payment' ? [{ paymentId: id, data }] : ((data as { lines?: { paymentId?: string }[] }).lines ?? []);
          for (const part of parts) for (const transaction of transactionsIn(part)) if (part.paymentId) payments.set(transaction, part.paymentId);
        }
      expect(new Set([...payments.keys()].map((transaction) => transaction.slice(0, 3)))).toEqual(new Set(['ch_', 'vd_', 'rf_']));
      expect(payments.size).toBeGreaterThan(20);
      for (const [transaction, payment] of payments)
        expect([transaction, (await find({ transactionId: transaction })).ids]).toEqual([transaction, [payment]]);
    });
    test('references, and a card with the principal or the total, with the other filters, page by page', async () => {
      const all = (await day.partner.client.list({ limit: 100 })).data.payments;
      const lines = all.filter(({ lineItems }) => lineItems.length > 1).map(({ id }) => id);
      expect((await find({ lineReference: 'INV-2' })).ids).toEqual(lines);
      const seen: string[] = [];
      for (let cursor: string | null = ''; cursor !== null;) {
        const page = await find({ lineReference: 'INV-1', limit: '5', ...(cursor && { cursor }) });
        seen.push(...page.ids);
        cursor = page.nextCursor;
      }
      expect([...seen].sort()).toEqual(all.map(({ id }) => id).sort());
      const ofPortal = all.filter(({ portalId, status }) => portalId === day.combined && status === 'succeeded').map(({ id }) => id);
      expect((await find({ lineReference: 'INV-1', portalId: day.combined, status: 'succeeded' })).ids.sort()).toEqual(ofPortal.sort());
      const [{ id, amountCents, totalChargedCents, paymentMethod }] = all.filter((one) => one.amountCents === 20_000) as [PaymentView];
      for (const cents of [amountCents, totalChargedCents])
        expect((await find({ last4: paymentMethod.last4, amountCents: String(cents) })).ids).toEqual([id]);
      expect((await find({ last4: '0000', amountCents: '20000' })).ids).toEqual([]);
      expect((await find({ lineReference: 'INV-1', asOf: '2020-01-01' })).ids).toEqual([]);
    });
    test.each([
      ['lineReference=', 'lineReference must have 1 to 255 characters'],
      ['last4=4242', 'amountCents is required: a card is found by both, last4 and amountCents'],
      ['amountCents=1', 'last4 is required: a card is found by both, last4 and amountCents'],
      ['last4=4242424242424242&amountCents=1', 'last4 must be the last four digits of the card'],
      ['last4=4242&amountCents=1.5', 'amountCents must be whole cents, 1 or more'],
      ['confirmationNumber=1', 'confirmationNumber must look like ABCD-EFGH-JK'],
      ['lineReference=A&referenceId=A', 'referenceId is one too many: find by one at a time'],
      ['lineReference=A&lineReference=B', 'lineReference must be given once'],
      ['lineReference=A&cursor=x', 'cursor is not one of this list'],
      ['reference=A', 'reference is no parameter here'],
    ])('?%s is refused: %s', async (query, message) => {
      const { status, text } = await get(`/audit/v1/payments?${query}`);
      expect([status, JSON.parse(text)]).toMatchObject([400, { success: false, message: `${message}.`, details: { code: 'VALIDATION_ERROR' } }]);
      expect(text).not.toContain('4242424242424242');
    });
  });
  test('in an incident of the event store, a payment that is not found is 503, never 404', async () => {
    const { pool, ownLog } = service.services;
    const absent = '018f0000-0000-7000-8000-000000000001';
    await pool.query(`insert into store_incident (kind, message, found_by) values ('lost_events', 'it does not hold an event', 'another process')`);
    await eventually(() => ownLog.incident !== null);
    const found = [
      await get(`/audit/v1/payments/${absent}`),
      await get(`/audit/v1/payments/${absent}/timeline`),
      await get('/audit/v1/payments?referenceId=absent'),
    ];
    await closeIncident(pool, [], { by: 'Dana', reason: 'spec' });
    await eventually(() => ownLog.incident === null);
    expect(found.map(({ status }) => status)).toEqual([503, 503, 503]);
    expect((await get(`/audit/v1/payments/${absent}`)).status).toBe(404);
  });
  test('journal and list page to their end; the pages together are the whole', async () => {
    const entries: { entryId: string }[] = [];
    for (let next: string | null = ''; next !== null;) {
      const page = (await get(`/audit/v1/ledger/journal?limit=7${next ? `&after=${next}` : ''}`)).data as unknown as {
        entries: { entryId: string }[];
        next: string | null;
      };
      entries.push(...page.entries);
      ({ next } = page);
    }
    const all = await journalPage(service.services.pool, JOURNAL_START, { from: null, to: null, until: null }, 100_000);
    expect(entries).toEqual(JSON.parse(JSON.stringify(all)));
    const payments: { id: string }[] = [];
    for (let cursor: string | null = ''; cursor !== null;) {
      const page = (await get(`/audit/v1/payments?limit=4${cursor ? `&cursor=${cursor}` : ''}`)).data as unknown as {
        payments: { id: string }[];
        nextCursor: string | null;
      };
      payments.push(...page.payments);
      cursor = page.nextCursor;
    }
    expect(payments.map(({ id }) => id)).toEqual((await day.partner.client.list({ limit: 100 })).data.payments.map(({ id }) => id));
    expect((await get('/audit/v1/ledger/balances')).data).toMatchObject({ sumCents: 0 });
  });
});

describe('refused attempts', () => {
  interface Refusal {
    readonly refusedAt: string;
    readonly code: string;
    readonly referenceId: string | null;
    readonly cardHash: string | null;
    readonly attempts: number;
  }
  const page = async (query: string) =>
    (await get(`/audit/v1/refusals?${query}`)).data as unknown as { refusals: Refusal[]; nextCursor: string | null };
  const WRITTEN = { timeoutMs: 10_000 };

  test('a blocked case and a rule leave rows, by portal, reference and time, page by page; a replay leaves none', async () => {
    const { client } = day.partner;
    const portal = await service.portal(day.partner);
    const pay = (referenceId: string, sent?: { key: string }) => client.create(paymentOf(portal, { referenceId }), sent);
    expect((await pay('CASE-1', { key: 'refusals' })).status).toBe(200);
    const from = new Date(service.clock.now()).toISOString();
    await service.administer(service.admin.restrictCase({ portalId: portal, referenceId: 'CASE-1', kind: 'block', until: null, reason: null }));
    await service.administer(service.admin.setRules(portal, { brands: ['amex'] }));
    expect((await pay('CASE-1', { key: 'refusals' })).status).toBe(200);
    expect([(await pay('CASE-1')).code, (await pay('CASE-2')).code, (await pay('CASE-2')).code]).toEqual([
      'PAYMENT_BLOCKED',
      'PAYMENT_NOT_ALLOWED',
      'PAYMENT_NOT_ALLOWED',
    ]);
    await eventually(async () => (await page(`portalId=${portal}`)).refusals.length >= 3, WRITTEN);
    const { refusals, nextCursor } = await page(`portalId=${portal}`);
    expect([refusals.map(({ code, referenceId, attempts }) => [code, referenceId, attempts]), nextCursor]).toEqual([
      [
        ['PAYMENT_NOT_ALLOWED', 'CASE-2', 1],
        ['PAYMENT_NOT_ALLOWED', 'CASE-2', 1],
        ['PAYMENT_BLOCKED', 'CASE-1', 1],
      ],
      null,
    ]);
    expect(new Set(refusals.map(({ cardHash }) => cardHash)).size).toBe(1);
    const first = await page(`portalId=${portal}&limit=2`);
    const rest = await page(`portalId=${portal}&limit=2&cursor=${first.nextCursor}`);
    expect([...first.refusals, ...rest.refusals]).toEqual(refusals);
    expect((await page(`portalId=${portal}&referenceId=CASE-1&from=${from}`)).refusals).toEqual(refusals.slice(2));
    expect((await page(`portalId=${portal}&to=${from}`)).refusals).toEqual([]);
    await caughtUp();
  });
  test.each(['limit=0', 'portalId=1', 'referenceId=', 'referenceId=%00', `referenceId=${'x'.repeat(256)}`, 'cursor=x', 'from=yesterday', 'code=X'])(
    '?%s is refused',
    async (query) => {
      expect((await get(`/audit/v1/refusals?${query}`)).status).toBe(400);
    },
  );
});

describe('reports', () => {
  const report = async (name: ReportName, format: 'csv' | 'ndjson' = 'ndjson', after: string | null = null, opens = false) => {
    const said = { rows: 0, totals: {} as Record<string, number>, after };
    let text = '';
    const { store, pool, personal } = service.services;
    for await (const piece of reportText(
      { store, db: pool, ...(opens && { personal }) },
      EVERYTHING,
      name,
      format,
      { from: FROM, to: TO, asOf: null, after },
      said,
    ))
      text += piece;
    return { ...said, text, objects: format === 'ndjson' ? text.trim().split('\n').filter(Boolean).map((line) => JSON.parse(line) as Record<string, string | number | null>) : [] }; // prettier-ignore
  };
  test.each(Object.keys(REPORTS) as ReportName[])('%s: the same rows in both formats, and over HTTP', async (name) => {
    const [json, csv] = [await report(name), await report(name, 'csv')];
    expect(csv.text.split('\r\n')[0]).toBe(REPORTS[name].columns.join(','));
    expect(csv.text.trim().split('\r\n').length - 1).toBe(json.rows);
    expect(csv.totals).toEqual(json.totals);
    const response = await get(`/audit/v1/exports/${name}?format=ndjson&from=2020-01-01&to=2100-01-01`, auditor);
    expect(response.text).toBe(json.text);
  });
  test('control totals agree with the books', async () => {
    const sum = async (prefix: string) =>
      (await balances(service.services.pool, { asOf: null, effectiveTo: null }))
        .filter(({ account }) => account.startsWith(prefix))
        .reduce((total, row) => total + row.balanceCents, 0);
    expect((await report('fees')).totals.net_cents).toBe(0 - (await sum('revenue:')));
    expect((await report('payable')).totals.closing_cents).toBe(0 - (await sum('liabilities:agency')));
    const trial = await report('trial-balance');
    expect(trial.totals).toMatchObject({ opening_cents: 0, closing_cents: 0 });
    expect(trial.totals.debit_cents).toBe(trial.totals.credit_cents);
    expect((await report('payments')).rows).toBe((await day.partner.client.list({ limit: 100 })).data.payments.length);
    expect((await report('disputes')).rows).toBe(3);
    for (const opens of [false, true])
      expect((await report('reversals', 'ndjson', null, opens)).objects.filter(({ initiated_by: by }) => by === 'staff')).toMatchObject([
        { reversal_type: 'refund', reason: opens ? 'billed twice' : null },
      ]);
    expect((await report('staff-actions')).objects.map(({ actor, event }) => `${actor} ${event}`)).toContain('Dana RefundRequested');
  });
  test('transactions name the card, and of a charge the authorization code and the checks; a refund names the card of its charge', async () => {
    const { objects } = await report('transactions');
    const of = (id: string, operation: string) => objects.filter((row) => row.payment_id === id && row.operation === operation);
    for (const { id, gateway, paymentMethod } of day.payments) {
      const { brand, last4 } = paymentMethod;
      const charges = of(id, 'charge');
      expect(charges.length).toBeGreaterThan(0);
      for (const row of charges)
        expect([row, row.auth_code !== null && row.auth_code !== '']).toMatchObject([{ brand, last4, avs: 'not_checked', cvv: 'match' }, true]);
      expect(charges.find(({ leg }) => leg !== 'fee')).toMatchObject({ auth_code: gateway.authCode });
      for (const row of of(id, 'refund')) expect(row).toMatchObject({ brand, last4, auth_code: null, avs: null, cvv: null });
    }
    expect(objects.filter(({ operation }) => operation === 'refund').length).toBeGreaterThan(0);
    expect(new Set(objects.map(({ last4 }) => last4)).size).toBeGreaterThan(1);
  });
  test('goes on after a break', async () => {
    const { store, pool } = service.services;
    const whole = await report('payments');
    const first = whole.objects[4]!;
    const after = Buffer.from(JSON.stringify([first.created_at, first.payment_id])).toString('base64url');
    expect((await report('payments', 'ndjson', after)).objects).toEqual(whole.objects.slice(5));
    const bad = reportText(
      { store, db: pool },
      EVERYTHING,
      'payments',
      'csv',
      { from: null, to: null, asOf: null, after: 'bm8' },
      { rows: 0, totals: {}, after: null },
    );
    await expect(bad.next().then(() => bad.next())).rejects.toThrow('after is not a place');
  });
  test('the manifest names query, result, position and head; over HTTP it is a trailer', async () => {
    const { store, pool, seal } = service.services;
    await caughtUp();
    const { head } = (await signLog(seal))!;
    const query = { from: FROM, to: TO, asOf: null, after: null };
    const { pieces, manifest } = exportReport({ store, db: pool }, EVERYTHING, 'payments', 'csv', query, await store.head());
    let text = '';
    for await (const piece of pieces) text += piece;
    const made = await manifest();
    const { rows, totals, after } = await report('payments', 'csv');
    const expected = { report: 'payments', format: 'csv', query, position: await store.head(), digest: null, rows, totals, after };
    expect(made).toEqual({ ...expected, head: { size: head.size, root: head.root.toString('base64') }, sha256: hash('sha256', text, 'hex') });
    const trailers = await trailersOf(`${url}/audit/v1/exports/payments?from=${FROM}&to=${TO}`, finance);
    // Over HTTP, the place is bound to the key.
    const end = trailers['export-after']!;
    expect([trailers['export-rows'], Buffer.from(end, 'base64url').subarray(16).toString()]).toEqual([String(rows), after]);
    expect(JSON.parse(trailers['export-manifest']!)).toEqual({ ...made, after: end });
    expect(await get(`/audit/v1/exports/payments?after=${end}`)).toMatchObject({ status: 200, text: '' });
    expect((await get(`/audit/v1/exports/payments?after=${end}`, auditor)).status).toBe(400);
  });
  test('with a digest requested, the manifest has that of the read models, equal to a replay; with drift it has none', async () => {
    const { store, pool, seal } = service.services;
    await caughtUp();
    const found = await findDrift(seal);
    const query = { from: FROM, to: TO, asOf: null, after: null };
    const { pieces, manifest } = exportReport({ store, db: pool }, EVERYTHING, 'fees', 'csv', query, await store.head(), projectionDigest(found));
    for await (const _ of pieces);
    expect(await manifest()).toMatchObject({
      position: await store.head(),
      digest: { sha256: found.digest, payments: found.payments, position: found.position },
    });
    const { rows } = await pool.query<{ payment_id: string; status: string }>('select payment_id, status from payment_list limit 1');
    const { payment_id: id, status } = rows[0]!;
    const tell = (other: string) => pool.query('update payment_list set status = $2 where payment_id = $1', [id, other]);
    await tell('authorized');
    const drifted = await findDrift(seal);
    await tell(status);
    expect(() => projectionDigest(drifted)).toThrow(/not what their replay says/);
    expect((await findDrift(seal)).differences).toEqual([]);
  });
  test.each(['payments', 'disputes', 'fees', 'staff-actions', 'attempts', 'line-items', 'deposits'])(
    '%s: a place that is none of it is refused',
    async (name) => {
      const places = [['x'], ['x', 'y'], ['2026-02-30', 'x'], ['x', 'y', 'z']].map((key) => Buffer.from(JSON.stringify(key)).toString('base64url'));
      for (const after of ['nonsense', 'é', '9'.repeat(20), ...places]) {
        const { status, text } = await get(`/audit/v1/exports/${name}?after=${encodeURIComponent(after)}`, auditor);
        expect([after, status, text]).toEqual([after, 400, expect.stringContaining('after is not a place of this report')]);
        await expect(report(name as ReportName, 'ndjson', after)).rejects.toThrow('after is not a place of this report');
      }
    },
  );
  test('line items tie to the books; what came since a place is new, and a download with a difference breaks off', async () => {
    const { pool } = service.services;
    const rowsOf = ({ text }: Read) => text.split('\n').filter(Boolean).map((line) => JSON.parse(line) as Record<string, string | number | null>); // prettier-ignore
    const whole = await get('/audit/v1/exports/line-items?format=ndjson');
    const cents = (rows: readonly Record<string, string | number | null>[], column: string) =>
      rows.reduce((sum, row) => sum + Number(row[column]), 0);
    const owed = rowsOf(whole).filter(({ family }) => family === 'owed');
    const books = await balances(pool, { asOf: null, effectiveTo: null });
    const of = (prefix: string) => books.reduce((sum, row) => sum + (row.account.startsWith(prefix) ? row.balanceCents : 0), 0);
    expect(cents(owed, 'principal_cents')).toBe(0 - of('liabilities:agency'));
    expect(cents(owed, 'fee_cents')).toBe(0 - of('revenue:') - of('expense:chargeback_loss'));
    expect(new Set(rowsOf(whole).map(({ movement }) => movement))).toEqual(
      new Set(['charge', 'void', 'refund', 'rejected', 'settled', 'refund_settled', 'dispute_opened', 'dispute_lost', 'dispute_excess', 'funded']),
    );
    const place = whole.headers.get('ledger-position')!;
    expect((await get(`/audit/v1/exports/line-items?format=ndjson&after=${place}`)).text).toBe('');
    await day.partner.client.created(paymentOf(day.separate, { lines: [200, 300] }));
    await caughtUp();
    const news = rowsOf(await get(`/audit/v1/exports/line-items?format=ndjson&after=${place}`));
    expect(news.map(({ movement, leg, line_number: line, cause }) => [movement, leg, line, cause])).toEqual([
      ['charge', 'principal', '1', 'new'],
      ['charge', 'principal', '2', 'new'],
      ['charge', 'fee', '1', 'new'],
      ['charge', 'fee', '2', 'new'],
    ]);
    await pool.query('update line_movement set fee_cents = fee_cents + 1 where movement_id = $1', [news[3]!.movement_id]);
    await expect(get(`/audit/v1/exports/line-items?after=${place}`)).rejects.toThrow(/terminated/);
    expect((await findDrift(service.services.seal)).differences.map(({ kind }) => kind)).toEqual(['lines', 'lines']);
    await pool.query('update line_movement set fee_cents = fee_cents - 1 where movement_id = $1', [news[3]!.movement_id]);
    expect((await findDrift(service.services.seal)).differences).toEqual([]);
  });
  test('a text that is a formula to a spreadsheet is not one', async () => {
    await day.partner.client.refund(day.payments.at(-1)!.id, { amountCents: 1, reason: '=HYPERLINK("http://x","y"), you' });
    await caughtUp();
    expect((await report('reversals', 'csv', null, true)).text).toContain(`,"'=HYPERLINK(""http://x"",""y""), you",`);
  });
});

describe('personal data', () => {
  const PLANTED = {
    payer: 'Ada Planted',
    email: 'planted@example.org',
    line: 'water of Planted',
    reason: 'told by Planted',
    dispute: 'Planted denies',
  };
  let personal: string;
  let keyId: string;
  let id: string;
  let disputeId: string;
  beforeAll(async () => {
    ({ auditKey: personal, keyId } = await issue('auditor', EVERYTHING, true));
    const body = paymentOf(day.separate, { lines: [6_000, 4_000] });
    const lines = body.lineItems.map((line, index) => (index === 1 ? { ...line, description: PLANTED.line, metadata: { of: PLANTED.payer } } : line));
    ({ id } = await day.partner.client.created({ ...body, lineItems: lines, payer: { firstName: PLANTED.payer, email: PLANTED.email } }));
    await day.partner.client.refund(id, { amountCents: 100, reason: PLANTED.reason });
    disputeId = service.services.ids.uuid();
    const today = new Date(service.clock.now()).toISOString().slice(0, 10);
    const dispute = { disputeId, status: 'debited', stage: 'chargeback', reasonCode: '10.4', reason: PLANTED.dispute, disputedAmountCents: 500, openedOn: today, dueDate: today } as const; // prettier-ignore
    await openDispute(service.services.payments.ports, id, dispute, { actor: { type: 'staff', id: 'Dana' }, correlationId: 'r' });
    await caughtUp();
  });
  const paths = (): [path: string, texts: readonly string[]][] => [
    [`/audit/v1/payments/${id}`, [PLANTED.payer, PLANTED.email, PLANTED.line]],
    [`/audit/v1/payments/${id}/timeline`, Object.values(PLANTED)],
    ['/audit/v1/payments?limit=1', [PLANTED.payer, PLANTED.email, PLANTED.line]],
    [`/audit/v1/exports/reversals?format=ndjson`, [PLANTED.reason]],
    [`/audit/v1/exports/disputes?format=ndjson`, [PLANTED.dispute]],
    [`/audit/v1/exports/line-items?format=ndjson`, [PLANTED.line]],
    [`/audit/v1/exports/staff-actions?format=ndjson`, [PLANTED.dispute]],
  ];
  const opening = (path: string) => `${path}${path.includes('?') ? '&' : '?'}personal=true`;
  const openings = async () =>
    (await service.services.pool.query<{ actor: string; report: string; shown: number }>('select actor, report, shown::int from personal_opening order by opened_at, opening_id')).rows; // prettier-ignore

  test('is not shown unless it is asked for', async () => {
    for (const [path] of paths())
      for (const key of [auditor, personal]) {
        const { status, text } = await get(path, key);
        expect([path, status]).toEqual([path, 200]);
        expect([path, Object.values(PLANTED).filter((planted) => text.includes(planted))]).toEqual([path, []]);
      }
  });
  test('is refused to a key that was not issued for it; another value is no value', async () => {
    for (const [path] of paths()) {
      expect([path, (await get(opening(path), auditor)).status]).toEqual([path, 403]);
      for (const value of ['', '1', 'false', 'TRUE'])
        expect([path, (await get(opening(path).replace('personal=true', `personal=${value}`), personal)).status]).toEqual([path, 400]);
    }
    for (const path of ['/audit/v1/refusals', '/audit/v1/ledger/balances', '/audit/v1/exceptions'])
      expect([path, (await get(opening(path), personal)).status]).toEqual([path, 400]);
  });
  test('is shown to a key that may read it, and each reading is noted', async () => {
    for (const [path, texts] of paths()) {
      const before = (await openings()).length;
      const { status, text } = await get(opening(path), personal);
      expect([path, status]).toEqual([path, 200]);
      expect([path, texts.filter((planted) => !text.includes(planted))]).toEqual([path, []]);
      const noted = (await openings()).slice(before);
      expect(noted).toEqual([{ actor: `audit key ${keyId}`, report: path.slice('/audit/v1/'.length).split('?')[0], shown: expect.any(Number) }]);
      const { shown: _, ...said } = noted[0]!;
      // The rows of an export are counted after its answer has ended.
      await eventually(async () => {
        const count = (await openings())[before]!.shown;
        expect(count).toBeGreaterThan(0);
        expect(service.logLines()).toContainEqual(expect.objectContaining({ msg: 'personal data was opened', ...said, count }));
        return true;
      });
    }
  });
  test('has the same rows otherwise', async () => {
    for (const [path] of paths().filter(([one]) => one.includes('/exports/'))) {
      const [closed, opened] = await Promise.all([get(path, personal), get(opening(path), personal)]);
      const rows = ({ text }: { text: string }) =>
        text
          .trim()
          .split('\n')
          .map((line) => ({ ...(JSON.parse(line) as object), reason: 0, description: 0 }));
      expect([path, rows(opened)]).toEqual([path, rows(closed)]);
    }
  });
});

describe('the evidence pack', () => {
  const run = (path: string) =>
    promisify(execFile)(process.execPath, [VERIFIER, 'pack', path]).then(
      ({ stdout }) => stdout,
      (error: { stderr: string }) => error.stderr,
    );
  const pack = (name: string, from = FROM, to = TO) =>
    writePack(
      { ...service.services.seal, db: service.services.pool, reached: caughtUp },
      { from, to, out: join(folder, name), version: '0', verifier: VERIFIER },
    );
  test('of one period at one place of the log is the same bytes, twice; the verifier and an adder of its own agree', async () => {
    await caughtUp();
    const made = await pack('a');
    await pack('b');
    const names = readdirSync(join(folder, 'a')).sort();
    expect(readdirSync(join(folder, 'b')).sort()).toEqual(names);
    for (const name of names) expect([name, statSync(join(folder, 'a', name)).mode & 0o077]).toEqual([name, 0]);
    for (const name of names)
      expect([name, readFileSync(join(folder, 'b', name)).equals(readFileSync(join(folder, 'a', name)))]).toEqual([name, true]);
    expect(made.drift.differences).toEqual([]);
    expect(await run(join(folder, 'a'))).toContain('ok: the trial balance follows from those entries');
    const sums = addHledger(readFileSync(join(folder, 'a', 'journal.hledger'), 'utf8'));
    const rows = await balances(service.services.pool, { asOf: null, effectiveTo: null });
    expect(rows.map(({ account, balanceCents }) => [account, BigInt(balanceCents)])).toEqual([...sums].sort(([a], [b]) => (a < b ? -1 : 1)));
  });
  test('any change in it is found', async () => {
    const touched = async (name: string, change: (file: string) => void) => {
      const file = join(folder, 'a', name);
      const before = readFileSync(file);
      change(file);
      const said = await run(join(folder, 'a'));
      writeFileSync(file, before);
      return said;
    };
    expect(await touched('payments.csv', (file) => appendFileSync(file, 'x'))).toContain(
      'NOT OK: payments.csv is not the file that the manifest names',
    );
    expect(await touched('head.txt', (file) => appendFileSync(file, '\n'))).toContain('NOT OK');
    expect(
      await touched('manifest.json', (file) => writeFileSync(file, readFileSync(file, 'utf8').replace(/"sha256": "./, '"sha256": "_'))),
    ).toContain('NOT OK');
    expect(await run(join(folder, 'a'))).not.toContain('NOT OK');
  });
  test('and /audit/v1/exceptions hold every exception, however many there are', async () => {
    const { pool } = service.services;
    await pool.query(
      `insert into settlement_case (exception_id, kind, status, gateway, merchant_account, suspense_cents, opened_at, changed_at)
       select gen_random_uuid(), 'LATE', 'superseded', 'planted', 'mid', 0, $2, $2 from generate_series(1, $1)`,
      [PAGE_ROWS + 1, FROM],
    );
    try {
      const { data } = await get('/audit/v1/exceptions?status=superseded');
      const planted = (rows: readonly { gateway: string }[]) => rows.filter(({ gateway }) => gateway === 'planted').length;
      expect(planted(data.exceptions!)).toBe(PAGE_ROWS + 1);
      const { files } = await pack('many');
      const lines = readFileSync(join(folder, 'many', 'exceptions.ndjson'), 'utf8')
        .trimEnd()
        .split('\n');
      expect(planted(lines.map((line) => JSON.parse(line) as { gateway: string }))).toBe(PAGE_ROWS + 1);
      expect(files.find(({ file }) => file === 'exceptions.ndjson')!.rows).toBe(lines.length);
    } finally {
      await pool.query(`delete from settlement_case where gateway = 'planted'`);
    }
  });
  test('needs a folder of its own and a period that is one', async () => {
    await expect(pack('a')).rejects.toThrow('a pack gets a folder of its own');
    await expect(pack('c', TO, FROM)).rejects.toThrow('must begin before it ends');
  });
});

describe('closed periods', () => {
  const ports = (): PeriodPorts => {
    const { store, pool, clock, ids, readModels } = service.services;
    return { store, db: pool, clock, ids, journalReached: (position) => readModels.of(journalModel).runUntil(position, { timeoutMs: 20_000 }) };
  };
  const periodsInLog = async () => {
    const types: string[] = [];
    for await (const { type } of service.services.store.read('adjustment-periods')) types.push(type);
    return types;
  };
  const monthAgo = (months: number) => {
    const now = new Date(service.clock.now());
    return new Date(Date.UTC(now.getUTCFullYear(), now.getUTCMonth() - months, 1)).toISOString();
  };
  test('never change: a late fact is booked in the next one, with its own effective time', async () => {
    await caughtUp();
    const now = new Date(service.clock.now()).toISOString();
    const end = `${now.slice(0, 10)}T00:00:00.000Z`;
    await expect(closePeriod(ports(), end.replace('00:00:00.000', '00:00:00.001'), 'Dana')).rejects.toMatchObject({ code: 'VALIDATION_ERROR' });
    // The figures cannot be made: nothing is closed.
    const away = () => Promise.reject(new Error('the journal is away'));
    await expect(closePeriod({ ...ports(), journalReached: away }, end, 'Dana')).rejects.toThrow('the journal is away');
    expect(await periodsInLog()).toEqual([]);
    // The closing is cut off after its first event: the next call completes it.
    let calls = 0;
    const cutOff = (position: Position) => (calls++ === 0 ? ports().journalReached(position) : away());
    await expect(closePeriod({ ...ports(), journalReached: cutOff }, end, 'Dana')).rejects.toThrow('the journal is away');
    expect(await periodsInLog()).toEqual(['PeriodClosed']);
    const closed = await closePeriod(ports(), end, 'Dana');
    expect(closed.entries).toBeGreaterThan(20);
    expect(await closePeriod(ports(), end, 'Dana')).toEqual(closed);
    expect(await periodsInLog()).toEqual(['PeriodClosed', 'TrialBalanceRecorded']);
    const late = monthAgo(1);
    const adjustment = { adjustmentId: service.services.ids.uuid(), postings: [{ account: 'assets:bank:operating', cents: 700 }, { account: 'equity:adjustment', cents: -700 }], effectiveAt: late, reason: 'found later', by: 'Dana' }; // prettier-ignore
    await adjustBooks(ports(), adjustment);
    // Staff may repeat an adjustment whose outcome they do not know. The repetition posts nothing.
    await adjustBooks(ports(), adjustment);
    await expect(adjustBooks(ports(), { ...adjustment, postings: [{ account: 'assets:bank:operating', cents: 7 }, { account: 'equity:adjustment', cents: -7 }] })).rejects.toMatchObject({ code: 'INVALID_STATE' }); // prettier-ignore
    const { rows: booked } = await service.services.pool.query(`select from journal_entry where rule = 'R17'`);
    expect(booked).toHaveLength(1);
    const entry = (await journalPage(service.services.pool, JOURNAL_START, { from: end, to: null, until: null }, 1_000)).at(-1)!;
    expect(entry).toMatchObject({ rule: 'R17', effectiveAt: late, bookedAt: end });
    expect(await verifyPeriods(ports())).toMatchObject({ ok: true, detail: '1 closed periods are what they were' });
    expect((await findDrift(service.services.seal)).differences).toEqual([]);
    await expect(closePeriod(ports(), late, 'Dana')).rejects.toThrow('are closed to');
    await expect(closePeriod(ports(), TO, 'Dana')).rejects.toThrow('only when it is over');
  });
  test('sums by day, from any time to any time and as of any time, are those of the entries', async () => {
    await caughtUp();
    const { pool } = service.services;
    const { rows: days } = await pool.query<{ at: Date }>('select distinct date_trunc($1, booked_at) as at from journal_entry', ['hour']);
    const end = `${new Date(service.clock.now()).toISOString().slice(0, 10)}T00:00:00.000Z`;
    const times = [null, end, ...days.map(({ at }) => at.toISOString()), ...days.map(({ at }) => `${at.toISOString().slice(0, 10)}T00:00:00.000Z`)];
    const slow = async (from: string | null, to: string | null, asOf: string | null) => {
      const { rows } = await pool.query<{ account: string; rule: string; debit: string; credit: string }>(
        `select p.account, rule, sum(greatest(p.cents, 0)) as debit, sum(greatest(-p.cents, 0)) as credit
         from journal_entry e cross join unnest(e.accounts, e.cents) as p (account, cents)
         where booked_at >= $1 and booked_at < $2 and recorded_at <= $3 group by 1, 2`,
        [from ?? '-infinity', to ?? 'infinity', asOf ?? 'infinity'],
      );
      return rows.map(({ account, rule, debit, credit }) => `${account} ${rule} ${debit} ${credit}`).sort();
    };
    const text = ({ account, rule, debitCents, creditCents }: Movement) => `${account} ${rule} ${debitCents} ${creditCents}`;
    let compared = 0;
    for (const from of times)
      for (const to of times)
        for (const asOf of [null, times.at(-1)!, times.at(2)!]) {
          if (from !== null && to !== null && from > to) continue;
          const expected = await slow(from, to, asOf);
          expect([from, to, asOf, (await movements(pool, { from, to, asOf })).map(text).sort()]).toEqual([from, to, asOf, expected]);
          const sums = new Map<string, number>();
          for (const line of await slow(null, to, asOf)) {
            const [account, , debit, credit] = line.split(' ');
            sums.set(account!, (sums.get(account!) ?? 0) + Number(debit) - Number(credit));
          }
          const before = (await balancesBefore(pool, to, asOf)).map(({ account, debitCents, creditCents }) => [account, debitCents - creditCents]);
          expect([to, asOf, Object.fromEntries(before)]).toEqual([to, asOf, Object.fromEntries(sums)]);
          compared += expected.length;
        }
    expect(compared).toBeGreaterThan(100);
  });
  test('a cent that is moved in one afterwards is found', async () => {
    const { pool } = service.services;
    await pool.query(`create table kept as table journal_entry`);
    await pool.query(`update journal_entry set cents = array[cents[1] + 1, cents[2] - 1] where rule = 'R6'`);
    const found = await verifyPeriods(ports());
    await pool.query('begin; truncate journal_entry; insert into journal_entry table kept; drop table kept; commit');
    expect(found.ok).toBe(false);
    expect(found.detail).toMatch(/the period to .* holds \d+ entries of digest/);
  });
});

describe('statements', () => {
  const thisMonth = () => new Date(service.clock.now()).toISOString().slice(0, 7);
  test('say for each portal what the report of the payable says, as JSON and as CSV', async () => {
    const period = thisMonth();
    const from = `${period}-01T00:00:00.000Z`;
    const next = new Date(Date.UTC(Number(period.slice(0, 4)), Number(period.slice(5)), 1)).toISOString();
    const { text } = await get(`/audit/v1/exports/payable?format=ndjson&from=${from}&to=${next}`);
    const rows = text.trim().split('\n').map((line) => JSON.parse(line) as Record<string, number>); // prettier-ignore
    for (const portal of [day.separate, day.combined]) {
      const row = rows.find((one) => (one.portal_id as unknown) === portal)!;
      const path = `/audit/v1/statements/${portal}?period=${period}`;
      const { data, headers } = await get(path);
      expect(headers.get('ledger-lag')).toBe('0');
      expect(data).toMatchObject({ portalId: portal, name: 'Portal', zone: 'UTC', from, to: next, openingCents: row.opening_cents, closingCents: row.closing_cents, final: false }); // prettier-ignore
      expect(data.movements).toMatchObject({ chargedCents: row.charged_cents, returnedCents: row.returned_cents, disputedCents: row.disputed_cents });
      const csv = await get(`${path}&format=csv`);
      expect([csv.status, csv.headers.get('content-type')]).toEqual([200, 'text/csv; charset=utf-8; header=present']);
      expect(csv.text.split('\r\n')[1]).toBe(`${portal},${period},UTC,opening,,,${row.opening_cents},false,,`);
    }
  });
  test.each([
    '',
    '?period=2026-13',
    '?period=2026-01&zone=Nowhere',
    '?period=2026-01&format=pdf',
    '?period=2026-01&period=2026-02',
    '?period=2026-01&x=1',
  ])('%s is refused', async (query) => expect((await get(`/audit/v1/statements/${day.separate}${query}`)).status).toBe(400));
  test('of no portal are 404', async () => {
    for (const portal of ['nonsense', day.payments[0]!.id])
      expect(await get(`/audit/v1/statements/${portal}?period=2026-01`)).toMatchObject({
        status: 404,
        text: expect.stringContaining('Portal not found.'),
      });
  });
});

test('a finance key sees in a timeline that staff acted, but no name; an auditor sees both', async () => {
  const { payments, settlement } = service.services;
  const { details } = await day.partner.client.create(paymentOf(day.separate, { number: CARD.neverReached }));
  const paymentId = details!.id as string;
  const resolution = { as: 'failed', evidence: 'call with the bank', by: 'Dana', force: false, transactions: {} } as const;
  await resolvePayment(payments.ports, settlement.register, { ...resolution, paymentId });
  const timelineFor = async (key: string) => (await get(`/audit/v1/payments/${paymentId}/timeline`, key)).data as unknown as { events: Moment[] };
  interface Moment {
    readonly type: string;
    readonly actor: { readonly type: string; readonly id: string | null };
    readonly data: { readonly by?: string | null };
  }
  const [whole, shown] = [await timelineFor(auditor), await timelineFor(finance)];
  expect(whole.events.at(-1)).toMatchObject({ type: 'PaymentResolved', actor: { type: 'staff', id: 'Dana' }, data: { by: 'Dana' } });
  const nameless = whole.events.map((event) => ({
    ...event,
    ...(event.actor.type === 'staff' && { actor: { type: 'staff', id: null } }),
    ...(event.data.by === 'Dana' && { data: { ...event.data, by: null } }),
  }));
  expect(shown.events).toEqual(nameless);
  expect(JSON.stringify(shown)).not.toContain('Dana');
  await caughtUp();
});

test('metrics show drift, seal, signatures and suspense', async () => {
  const { pool, seal } = service.services;
  const { shared } = createMetrics(service.services);
  const health = new Health(service.services);
  const server = await serveMetrics(0, { metrics: async () => shared, live: () => health.live(), ready: () => health.ready() });
  try {
    const { port } = server.address() as { port: number };
    const value = async (name: string) =>
      Number(new RegExp(`^${name} (.*)$`, 'm').exec(await (await fetch(`http://127.0.0.1:${port}/metrics`)).text())?.[1]);
    await pool.query('truncate drift_difference');
    expect(await value('payfold_drift_differences')).toBe(0);
    await pool.query(`insert into drift_difference (payment_id, kind, message) values ($1, 'list', 'planted')`, [day.payments[0]!.id]);
    expect(await value('payfold_drift_differences')).toBe(1);
    await pool.query(`truncate drift_difference; update drift_sweep set completed_at = now() - interval '1 hour'`);
    expect(Math.round((await value('payfold_drift_last_run_seconds')) / 60)).toBe(60);
    // Between these calls the sweep may go on. Then the calls are repeated.
    await eventually(async () => {
      await pool.query(`update drift_sweep set position = '', busy_until = now() + interval '1 minute'`);
      return (await value('payfold_drift_oldest_seconds')) > 0;
    });
    await pool.query('update drift_sweep set busy_until = null');
    await caughtUp();
    await eventually(async () => (await sweepDrift(seal))?.level && (await value('payfold_drift_oldest_seconds')) === 0);
    await pool.query(`update verify_pass set finished_at = now() - interval '1 hour', failed_checks = 2 where pass = 'full'`);
    const passes = ['failed_checks', 'last_run_seconds'].map((figure) => value(`payfold_verify_${figure}\\{pass="full"\\}`));
    expect((await Promise.all(passes)).map(Math.round)).toEqual([2, 3_600]);
    // The worker may append an event between these calls. Then the calls are repeated.
    await eventually(async () => {
      await caughtUp();
      await signLog(seal);
      return (await value('payfold_seal_lag_seconds')) === 0 && (await value('payfold_seal_unsigned_events')) === 0;
    });
    const suspense = (await balances(pool, { asOf: null, effectiveTo: null })).filter(({ account }) => account.startsWith('liabilities:suspense'));
    expect(await value('payfold_suspense_cents')).toBe(suspense.reduce((sum, { balanceCents }) => sum + Math.abs(balanceCents), 0));
  } finally {
    server.close();
  }
});

test('answers are counted as those of partners, errors with their codes', async () => {
  const { own, answered } = createMetrics(service.services);
  const counting = await createAudit({ ...service.services, onAnswer: answered });
  try {
    const base = await counting.listen(0, '127.0.0.1');
    const statusOf = async (path: string) => (await fetch(`${base}/audit/v1/${path}`, { headers: { authorization: finance } })).status;
    expect([await statusOf('exports/staff-actions'), await statusOf('exports/none')]).toEqual([403, 400]);
  } finally {
    await counting.close();
  }
  const { values } = await own.getSingleMetric('payfold_http_errors_total')!.get();
  expect(values.map(({ labels, value }) => ({ ...labels, value }))).toEqual([
    { code: 'none', status: '403', value: 1 },
    { code: 'VALIDATION_ERROR', status: '400', value: 1 },
  ]);
});

test('a listener that closes completes an export, and accepts no further request', async () => {
  const closing = await createAudit(service.services);
  const base = await closing.listen(0, '127.0.0.1');
  const response = await fetch(`${base}/audit/v1/exports/payments?format=ndjson`, { headers: { authorization: finance } });
  const closed = closing.close(1_000);
  expect((await response.text()).trim().split('\n')).toHaveLength((await day.partner.client.list({ limit: 100 })).data.payments.length);
  await closed;
  await expect(fetch(`${base}/audit/v1/payments`, { headers: { authorization: finance } })).rejects.toThrow('fetch failed');
});

test('how complete a report is, says the read model that it is read from: the register held up makes its own late, no others', async () => {
  const { pool, readModels, store } = service.services;
  const lagOf = async (report: string) => (await get(`/audit/v1/exports/${report}`)).headers.get('ledger-lag');
  const held = await pool.connect();
  try {
    await held.query('begin');
    await held.query('lock table gateway_transaction in exclusive mode');
    await day.partner.client.created(paymentOf(day.separate));
    const head = (await store.head())!;
    for (const one of [readModels.of(journalModel), readModels.of(paymentListModel)]) await one.runUntil(head, { timeoutMs: 20_000 });
    // In KurrentDB a position is not a count of events, so the lag in events is unknown.
    const lag = eventsInPostgres ? '2' : 'unknown';
    for (const late of ['transactions', 'batches', 'disputes']) expect([late, await lagOf(late)]).toEqual([late, lag]);
    for (const whole of ['payments', 'open', 'fees', 'trial-balance']) expect([whole, await lagOf(whole)]).toEqual([whole, '0']);
  } finally {
    await held.query('rollback');
    held.release();
  }
  await caughtUp();
  expect(await lagOf('transactions')).toBe('0');
});

/**
 * Every route of the OpenAPI document and every report, with the keys of two agencies, of an account and of everything. A new route fails here until
 * it says what a key with a scope gets, and until its answer holds nothing of others.
 */
describe('a key with a scope', () => {
  interface Holder {
    readonly key: string;
    readonly portals: readonly string[];
    /** Texts that only this holder may see. */
    readonly own: readonly string[];
    readonly payments: readonly string[];
  }
  interface Operation {
    readonly path: string;
    readonly scope: string | undefined;
    readonly parameters: readonly { readonly name: string; readonly in: string }[];
  }
  const ABSENT = '018f0000-0000-7000-8000-00000000beef';
  let holders: readonly Holder[];
  let operations: readonly Operation[];
  const others = (holder: Holder) => holders.filter((one) => one !== holder);

  /** The texts that name the payments of some portals, from all tables that hold one. */
  const textsOf = async (portals: readonly string[]): Promise<{ own: string[]; payments: string[] }> => {
    const { rows } = await service.services.pool.query<{ payment_id: string; texts: string[] }>(
      `select payment_id, array[payment_id::text]
         || array(select transaction_id from gateway_transaction t where t.payment_id = l.payment_id and transaction_id is not null)
         || array(select ref from gateway_transaction t where t.payment_id = l.payment_id)
         || array(select dispute_id::text from dispute d where d.payment_id = l.payment_id)
         || array(select exception_id::text from settlement_case c where c.payment_id = l.payment_id)
         || array(select entry_id::text from journal_entry e where e.payment_id = l.payment_id) as texts
       from payment_list l where portal_id = any($1::uuid[])`,
      [portals],
    );
    return { own: [...portals, ...rows.flatMap(({ texts }) => texts)], payments: rows.map((row) => row.payment_id) };
  };
  const holder = async (role: 'agency' | 'finance', scope: Scope, ...portals: readonly string[]): Promise<Holder> => {
    const { own, payments } = await textsOf(portals);
    expect(payments.length).toBeGreaterThan(0);
    return { key: (await issue(role, scope)).auditKey, portals, own, payments };
  };
  beforeAll(async () => {
    const clerk = await service.account('Clerk');
    const counter = await service.portal(clerk);
    await clerk.client.created(paymentOf(counter));
    await clerk.client.refund((await clerk.client.created(paymentOf(counter))).id, { amountCents: 1, reason: 'twice' });
    await settle(service);
    await caughtUp();
    // Otherwise the worker might open an exception after the ids of the holders were read.
    while ((await service.services.openExceptions()) > 0);
    await caughtUp();
    // Whether the busy day left an exception about a payment depends on the speed of the machine.
    await service.services.pool.query(
      `insert into settlement_case (exception_id, kind, status, gateway, merchant_account, payment_id, suspense_cents, opened_at, changed_at)
       select gen_random_uuid(), 'LATE', 'opened', 'planted', 'mid', payment_id, 0, $2, $2 from payment_list where portal_id = $1 limit 1`,
      [counter, FROM],
    );
    // One agency has all other portals of this file.
    const { rows } = await service.services.pool.query<{ portal_id: string }>('select distinct portal_id from payment_list');
    const rest = rows.map((row) => row.portal_id).filter((portal) => portal !== day.separate && portal !== counter);
    holders = [
      await holder('agency', { accounts: [], portals: [day.separate] }, day.separate),
      await holder('agency', { accounts: [], portals: rest }, ...rest),
      await holder('finance', { accounts: [clerk.accountId], portals: [] }, counter),
    ];
    const { paths } = judge.document as unknown as { paths: Record<string, Record<string, Operation & { 'x-scope'?: string }>> };
    operations = Object.entries(paths).flatMap(([path, methods]) =>
      Object.values(methods).map(({ parameters = [], 'x-scope': scope }) => ({ path, parameters, scope })),
    );
  });

  const expectNothingOf = (foreign: readonly Holder[], path: string, text: string) => {
    for (const { own } of foreign) for (const one of own) if (text.includes(one)) throw new Error(`${path} shows ${one}, which belongs to another`);
  };
  const PERIOD = '2026-01';
  /** Values for parameters that a route demands. */
  const demanded = (path: string) => (path.includes('/statements/') ? `?period=${PERIOD}` : '');
  const filled = (path: string, name: string, value: string) => `${path.replace(`{${name}}`, value)}${demanded(path)}`;
  const parameterOf = ({ path }: Operation) => /\{(\w+)\}/.exec(path)?.[1] ?? null;
  const scoped = () => operations.filter(({ scope }) => scope === 'filtered');
  const has = ({ parameters }: Operation, name: string) => parameters.some((one) => one.name === name && one.in === 'query');

  test('each route says what it gets', () => {
    expect(operations.length).toBeGreaterThan(8);
    expect(operations.filter(({ scope }) => scope !== 'filtered' && scope !== 'refused')).toEqual([]);
    for (const operation of scoped()) expect(['id', 'report', 'portalId', null]).toContain(parameterOf(operation));
  });
  test('what is not divided by account or portal is 403, in one answer', async () => {
    const answers = new Set<string>();
    for (const { path } of operations.filter(({ scope }) => scope === 'refused'))
      for (const { key } of holders) {
        const { status, text } = await get(path, key);
        expect([path, status]).toEqual([path, 403]);
        answers.add(text);
        expect([path, (await get(path, auditor)).status]).toEqual([path, 200]);
      }
    expect([...answers]).toEqual([JSON.stringify({ success: false, message: 'This key reads only its accounts and portals.' })]);
  });
  test('what belongs to others is absent: the bytes of an unknown id', async () => {
    for (const operation of scoped()) {
      const name = parameterOf(operation);
      if (name === null || name === 'report') continue;
      for (const one of holders) {
        const ids = ({ payments, portals }: Holder) => (name === 'id' ? payments : portals);
        const absent = await get(filled(operation.path, name, ABSENT), one.key);
        expect([operation.path, absent.status]).toEqual([operation.path, 404]);
        for (const id of [...others(one).flatMap(ids), 'nonsense']) {
          const { status, text } = await get(filled(operation.path, name, id), one.key);
          expect([operation.path, status, text]).toEqual([operation.path, 404, absent.text]);
        }
        for (const id of ids(one)) {
          const { status, text } = await get(filled(operation.path, name, id), one.key);
          expect([operation.path, status]).toEqual([operation.path, 200]);
          expect(one.own.some((own) => text.includes(own))).toBe(true);
          expectNothingOf(others(one), operation.path, text);
        }
      }
    }
  });
  test('lists hold what is its own, page by page, and all keys together hold everything', async () => {
    for (const operation of scoped().filter((one) => parameterOf(one) === null)) {
      const { path } = operation;
      const isFeed = has(operation, 'after');
      const pagesOf = async (key: string) => {
        const rows: unknown[] = [];
        for (let cursor: string | null = ''; cursor !== null;) {
          const query = new URLSearchParams({
            ...(has(operation, 'limit') && { limit: '3' }),
            ...(cursor && { [isFeed ? 'after' : 'cursor']: cursor }),
          });
          const { status, text, data } = await get(`${path}?${query.toString()}`, key);
          expect([path, status]).toEqual([path, 200]);
          for (const one of holders.filter((other) => other.key === key)) expectNothingOf(others(one), path, text);
          const {
            nextCursor = null,
            next = null,
            end = false,
            ...answer
          } = data as { nextCursor?: string | null; next?: string | null; end?: boolean };
          if (isFeed) {
            // A place of the feed is a position of the log, which any key may name.
            rows.push(...Object.values(answer).filter(Array.isArray).flat());
            cursor = end ? null : next;
            continue;
          }
          if (nextCursor !== null) {
            for (const one of holders.filter((other) => other.key === key))
              expectNothingOf(others(one), path, Buffer.from(nextCursor, 'base64url').toString('latin1'));
            // The cursor is good for no other key, and for no other list.
            for (const other of [...holders.map((one) => one.key), auditor].filter((one) => one !== key))
              expect([path, (await get(`${path}?cursor=${nextCursor}`, other)).status]).toEqual([path, 400]);
          }
          rows.push(...Object.values(answer).filter(Array.isArray).flat());
          cursor = nextCursor;
        }
        return rows;
      };
      const idOf = (row: unknown) => {
        const { id, exceptionId, payment, stream } = row as { id?: string; exceptionId?: string; payment?: { id: string }; stream?: string };
        return id ?? exceptionId ?? payment?.id ?? stream!.replace(/^payment-/, '');
      };
      /** What belongs to no payment, or to none that was to be charged, is in no scope with limits. */
      const isOwned = (row: unknown) => {
        const { paymentId, stream } = row as { paymentId?: string | null; stream?: string };
        return paymentId !== null && (stream === undefined || holders.some(({ payments }) => payments.includes(stream.replace(/^payment-/, ''))));
      };
      const parts: unknown[][] = [];
      for (const { key } of holders) parts.push(await pagesOf(key));
      for (const [index, rows] of parts.entries())
        expect([path, rows.map(idOf).filter((one) => !holders[index]!.own.includes(one))]).toEqual([path, []]);
      const all = (await pagesOf(auditor)).filter(isOwned);
      expect([path, all.length]).not.toEqual([path, 0]);
      /** An event has an id of its own. A payment that changed stands on each page in which it changed, and the pages of another key end elsewhere. */
      const namesOf = (rows: readonly unknown[]) => {
        const names = rows.map((row) => `${idOf(row)} ${(row as { eventId?: string }).eventId ?? ''}`);
        return (isFeed ? [...new Set(names)] : names).sort();
      };
      expect([path, namesOf(parts.flat())]).toEqual([path, namesOf(all)]);
    }
  });
  test('a filter by the portal of another is that of an unknown portal: 404', async () => {
    for (const { path } of scoped().filter((one) => has(one, 'portalId')))
      for (const one of holders) {
        const absent = await get(`${path}?portalId=${ABSENT}`, one.key);
        expect([path, absent.status]).toEqual([path, 404]);
        for (const { portals } of others(one)) expect((await get(`${path}?portalId=${portals[0]}`, one.key)).text).toBe(absent.text);
        expect((await get(`${path}?portalId=${one.portals[0]}`, one.key)).status).toBe(200);
        // An account is only a filter more: that of another finds nothing, as an unknown one does.
        for (const account of [ABSENT, ...(one === holders[2] ? [day.partner.accountId] : [])])
          expect((await get(`${path}?accountId=${account}`, one.key)).data).toEqual({ payments: [], nextCursor: null });
      }
  });
  test('a name finds only its own payments, and no page names another', async () => {
    const found: string[] = [];
    for (const one of holders)
      for (let cursor: string | null = ''; cursor !== null;) {
        const { text, data } = await get(`/audit/v1/payments?lineReference=INV-1&limit=2${cursor && `&cursor=${cursor}`}`, one.key);
        expectNothingOf(others(one), 'find', text);
        const { payments, nextCursor } = data as unknown as { payments: { id: string }[]; nextCursor: string | null };
        if (nextCursor !== null) expect(payments.length).toBeGreaterThan(0);
        found.push(...payments.map(({ id }) => id));
        cursor = nextCursor;
      }
    expect(found.sort()).toEqual(holders.flatMap(({ payments }) => payments).sort());
  });
  test.each(Object.keys(REPORTS) as ReportName[])('the report %s: rows of its own, or 403', async (name) => {
    const rowsOf = (text: string) => text.split('\n').filter(Boolean);
    const path = `/audit/v1/exports/${name}?format=ndjson&from=2020-01-01&to=2100-01-01`;
    // A row of a whole batch belongs to nobody.
    const whole = rowsOf((await get(path, auditor)).text).filter((row) => !row.includes('"portal_id":null'));
    const parts: string[] = [];
    for (const one of holders) {
      const { status, text, headers } = await get(path, one.key);
      if (!REPORTS[name].isScoped) {
        expect([status, text]).toEqual([403, JSON.stringify({ success: false, message: 'This key reads only its accounts and portals.' })]);
        continue;
      }
      expect([status, headers.get('content-disposition')]).toEqual([200, null]);
      expectNothingOf(others(one), name, text);
      const rows = rowsOf(text);
      for (const row of rows) expect(one.own.some((own) => row.includes(own))).toBe(true);
      parts.push(...rows);
    }
    // Money that belongs to no account and no portal, such as a deposit, is in no scope with limits.
    const owned = whole.filter((row) => !row.includes('"account_id":null,"portal_id":null'));
    if (REPORTS[name].isScoped) expect([name, parts.sort()]).toEqual([name, owned.sort()]);
  });
  test('an export ends with its own place and rows, without the size of the log, and goes on only with its own key', async () => {
    for (const one of holders) {
      const trailers = await trailersOf(`${url}/audit/v1/exports/payments`, one.key);
      const { rows, after, head } = JSON.parse(trailers['export-manifest']!) as { rows: number; after: string; head: unknown };
      expect([rows, head, trailers['export-rows']]).toEqual([one.payments.length, null, String(rows)]);
      const place = Buffer.from(after, 'base64url').subarray(16).toString();
      expect(one.payments).toContain((JSON.parse(Buffer.from(place, 'base64url').toString()) as string[])[1]);
      for (const { key } of others(one)) expect((await get(`/audit/v1/exports/payments?after=${after}`, key)).status).toBe(400);
      expect(await get(`/audit/v1/exports/payments?after=${after}`, one.key)).toMatchObject({ status: 200, text: '' });
    }
  });
  test('an agency sees no name of staff, and of an exception nothing of other merchant accounts', async () => {
    const { pool } = service.services;
    const [{ key, payments }] = holders as [Holder];
    const path = `/audit/v1/payments/${payments[0]!}/timeline`;
    expect((await get(path, key)).text).toBe((await get(path, finance)).text);
    await pool.query(
      `insert into settlement_case (exception_id, kind, status, gateway, merchant_account, batch_id, line, payment_id, suspense_cents, opened_at, changed_at,
         assigned_to, changed_by, reason)
       values (gen_random_uuid(), 'WRONG_ACCOUNT', 'assigned', 'planted', 'of another', 'bat of another', 7, $1, 0, $2, $2, 'Robin', 'Dana', 'it is of another')`,
      [payments[0], FROM],
    );
    try {
      const planted = async (authorization: string) =>
        ((await get('/audit/v1/exceptions?status=assigned', authorization)).data as unknown as { exceptions: Record<string, unknown>[] }).exceptions;
      const hidden = { line: null, merchantAccount: null, batchId: null };
      const [whole] = await planted(finance);
      expect(whole).toMatchObject({ merchantAccount: 'of another', batchId: 'bat of another', line: 7, assignedTo: 'Robin', changedBy: 'Dana' });
      expect(await planted(key)).toEqual([{ ...whole, ...hidden, assignedTo: null, changedBy: null, reason: null }]);
      const ownStaff = await issue('finance', { accounts: [], portals: [day.separate] });
      expect(await planted(ownStaff.auditKey)).toEqual([{ ...whole, ...hidden }]);
      expect(await planted(holders[1]!.key)).toEqual([]);
    } finally {
      await pool.query(`delete from settlement_case where gateway = 'planted'`);
    }
  });
  test('a portal that an account owns is in its portal reports; an account that only had access gets none of them', async () => {
    const report = async (scope: Scope) => (await get('/audit/v1/exports/payable?format=ndjson', (await issue('finance', scope)).auditKey)).text;
    const own = await report({ accounts: [day.partner.accountId], portals: [] });
    expect([day.separate, day.combined].map((portal) => own.includes(portal))).toEqual([true, true]);
    const guest = await service.account('Guest');
    await service.administer(service.admin.grantAccess(day.separate, guest.accountId));
    await guest.client.created(paymentOf(day.separate));
    await caughtUp();
    const { auditKey } = await issue('finance', { accounts: [guest.accountId], portals: [] });
    expect((await get('/audit/v1/exports/payable?format=ndjson', auditKey)).text).toBe('');
    expect(((await get(`/audit/v1/payments?portalId=${day.separate}`, auditKey)).data as unknown as { payments: object[] }).payments).toHaveLength(1);
  });
});
