/**
 * Staff at the command line, with and without a running service: refund, void, resolve, disputes, settlement. The service is a real process tree.
 * Effects are read over HTTP.
 */
import { execFile } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { writeFile } from 'node:fs/promises';
import { tmpdir, userInfo } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { paymentListModel, type PaymentView, postgresRecoveryWork, type RefundView } from '#payments';
import { createPool } from '#platform';
import { readRuntime } from '../../apps/data-dir.js';
import { eventually } from '../support/eventually.js';
import { adminUrlOf, DataDir, newKey, type RunningProcess, start, type Welcome, welcomeOf } from '../support/processes.js';
import { CARD, paymentOf, PAYMENTS } from '../support/service.js';

const LAUNCHER = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname;
const COMMAND_MS = 60_000;

let dataDir: DataDir;
let service: RunningProcess;
let welcome: Welcome;
beforeAll(async () => {
  dataDir = await DataDir.create();
  service = await start('standalone', dataDir);
  welcome = welcomeOf(service.stdout())!;
}, COMMAND_MS);
afterAll(() => dataDir.remove());

const payfold = (...args: string[]) => payfoldIn({}, ...args);
const payfoldIn = (
  more: Readonly<Record<string, string>>,
  ...args: string[]
): Promise<{ code: number; value: Record<string, unknown>; stderr: string }> =>
  new Promise((done) => {
    const env = { PATH: process.env.PATH, HOME: process.env.HOME, DATA_DIR: dataDir.data, ...more };
    const child = execFile(process.execPath, [LAUNCHER, ...args, '--json'], { env, cwd: tmpdir(), timeout: COMMAND_MS }, (error, stdout, stderr) =>
      done({ code: error ? Number(error.code ?? 99) : 0, value: JSON.parse(stdout || '{}') as Record<string, unknown>, stderr }),
    );
    child.stdin?.end();
  });
const done = async (...args: string[]) => {
  const { code, value, stderr } = await payfold(...args);
  expect([code, stderr]).toEqual([0, '']);
  return value;
};
/** The command as a person starts it: input and output are a terminal's. */
const atTerminal = (typed: string, ...args: string[]): Promise<{ code: number; stdout: string; stderr: string }> =>
  new Promise((done) => {
    const isTerminal = 'data:text/javascript,process.stdin.isTTY=true;process.stdout.isTTY=true';
    const env = { PATH: process.env.PATH, HOME: process.env.HOME, DATA_DIR: dataDir.data, NODE_OPTIONS: `--import=${isTerminal}` };
    const child = execFile(process.execPath, [LAUNCHER, ...args], { env, cwd: tmpdir(), timeout: COMMAND_MS }, (error, stdout, stderr) =>
      done({ code: error ? Number(error.code ?? 99) : 0, stdout, stderr }),
    );
    child.stdin?.end(typed);
  });
const call = async (method: string, path: string, body?: object): Promise<{ status: number; body: { data: unknown; details?: { id?: string } } }> => {
  const answer = await fetch(`${service.url}${path}`, {
    method,
    headers: { authorization: `ApiKey ${welcome.apiKey}`, 'content-type': 'application/json', 'idempotency-key': newKey() },
    ...(body && { body: JSON.stringify(body) }),
  });
  return { status: answer.status, body: (await answer.json()) as { data: unknown; details?: { id?: string } } };
};
const pay = async (number?: string) => (await call('POST', PAYMENTS, paymentOf(welcome.portalId, number ? { number } : {}))).body.data as PaymentView;
const read = async (id: string) => (await call('GET', `${PAYMENTS}/${id}`)).body.data as PaymentView;
const BY = ['--by', 'Dana Scott'];
const today = () => new Date().toISOString().slice(0, 10);
/** The actor of the last event of each type, from the audit export. */
const actorsByEvent = async (): Promise<ReadonlyMap<string, string>> => {
  const env = { PATH: process.env.PATH, HOME: process.env.HOME, DATA_DIR: dataDir.data };
  const { stdout } = await promisify(execFile)(process.execPath, [LAUNCHER, 'audit', 'export', 'staff-actions', '--format', 'ndjson'], { env });
  const rows = stdout
    .trimEnd()
    .split('\n')
    .map((line) => JSON.parse(line) as { actor_type: string; actor: string; event: string });
  return new Map(rows.map((row) => [row.event, `${row.actor_type} ${row.actor}`]));
};

describe('beside the running service', () => {
  test('settlement close: the open batches, once; then a refund is a refund, and a void exits 1 with the envelope', async () => {
    const { id } = await pay();
    expect(await done('settlement', 'close')).toEqual({
      batches: [
        { batchId: expect.stringMatching(/^bat_/), count: 1, amountCents: 10_000 },
        { batchId: expect.stringMatching(/^bat_/), count: 1, amountCents: 300 },
      ],
    });
    expect(await done('settlement', 'close', '--portal', welcome.portalId)).toEqual({ batches: [] });
    expect(await done('settlement', 'exceptions')).toEqual([]);
    const refused = await payfold('payments', 'void', id, '--reason', 'mistake', ...BY);
    expect(refused).toMatchObject({
      code: 1,
      value: { success: false, details: { code: 'VOID_FAILED', retryable: false, suggestedAction: 'refund' } },
    });
    expect(await done('payments', 'refund', id, '--amount-cents', '2500', '--reason', 'duplicate', ...BY)).toMatchObject({
      id,
      target: 'group',
      reversalType: 'refund',
      amountCents: 2_500,
      reason: 'duplicate',
      remainingRefundableAmountCents: 7_800,
    });
    expect(await done('payments', 'refund', id, '--include-fee', '--reason', 'duplicate', ...BY)).toMatchObject({ amountCents: 7_800 });
    expect(await read(id)).toMatchObject({ status: 'refunded' });
    const { events } = (await done('payments', 'show', id, '--events')) as { events: { type: string; actor: object }[] };
    expect(events.filter(({ type }) => type === 'RefundRequested').map(({ actor }) => actor)).toEqual([
      { type: 'staff', id: 'Dana Scott' },
      { type: 'staff', id: 'Dana Scott' },
    ]);
  });
  test('a text that the log keeps in clear may hold no e-mail address, telephone number or card number, and nothing is recorded', async () => {
    const nobody = randomUUID();
    const books = ['ledger', 'adjust', '--debit', 'assets:bank:operating', '--credit', 'equity:adjustment', '--amount-cents', '1'];
    const remit = ['ledger', 'remit', '--portal', welcome.portalId];
    const day = ['--on', '2026-01-05'];
    const asked: (readonly string[])[] = [
      ['payments', 'resolve', nobody, '--as', 'failed', '--evidence'],
      ['payments', 'acknowledge', nobody, '--task', 'settlement_rejected', '--reason'],
      ['settlement', 'exceptions', 'explain', nobody, '--reason'],
      ['settlement', 'exceptions', 'resolve', nobody, '--as', 'no_posting', '--reason'],
      ['settlement', 'exceptions', 'resolve', nobody, '--as', 'refund', '--send', '--reason'],
      ['settlement', 'fund', '--merchant-account', 'main', '--batch', 'bat_1', ...day, '--reference'],
      [...books, '--reason'],
      [...remit, '--amount-cents', '1', '--reference'],
      [...remit, '--reverse', nobody, '--reason'],
    ];
    const texts = ['told ada@mail.example', 'call (512) 555-0100', 'card 4242 4242 4242 4242'];
    const pool = createPool(adminUrlOf(dataDir), { name: 'spec', max: 1 });
    try {
      const events = async () => (await pool.query<{ count: number }>('select count(*)::int as count from es.events')).rows[0]!.count;
      const before = await events();
      for (const [index, args] of asked.entries()) {
        const refused = await payfold(...args, texts[index % texts.length]!, ...BY);
        expect([args, refused]).toMatchObject([args, { code: 1, value: { details: { code: 'VALIDATION_ERROR' } } }]);
        expect([args, refused.value.message]).toEqual([args, expect.stringMatching(/must not (hold|contain)/)]);
      }
      expect(await events()).toBe(before);
    } finally {
      await pool.end();
    }
  });
  test('staff decide about payments, cases and the books; operators run the installation; without --by the login name is recorded', async () => {
    const { id } = await pay(CARD.settlesAtOnce);
    await done('accounts', 'create', '--name', 'Shelbyville');
    await done('audit', 'keys', 'issue', '--name', 'Books', '--role', 'finance');
    await done('cases', 'block', '--portal', welcome.portalId, '--reference', 'CASE-ACTOR');
    const dispute = [
      '--payment',
      id,
      '--amount-cents',
      '100',
      '--status',
      'debited',
      '--stage',
      'chargeback',
      '--reason-code',
      '10.4',
      '--reason',
      'fraud',
    ];
    await done('disputes', 'open', ...dispute, '--opened-on', today(), '--due-date', today());
    await done(
      'ledger',
      'adjust',
      '--debit',
      'equity:adjustment',
      '--credit',
      'assets:bank:operating',
      '--amount-cents',
      '1',
      '--reason',
      'cent',
      ...BY,
    );
    const file = join(dataDir.path, 'actor.csv');
    const { transactionId } = (await pay()).gateway;
    const line = `actor,${new Date().toISOString()},${transactionId},,sale,10000,0,10000,`;
    await writeFile(file, `batch_id,closed_at,transaction_id,ref,type,gross_cents,fee_cents,net_cents,funded_on\n${line}\n`);
    await done('settlement', 'import', file);

    const login = `os:${userInfo().username}`;
    const actors = await actorsByEvent();
    const recorded = ['AccountCreated', 'AuditKeyIssued', 'CaseBlocked', 'PaymentDisputed', 'ManualAdjustment', 'SettlementFileImported'];
    expect(Object.fromEntries(recorded.map((event) => [event, actors.get(event)]))).toEqual({
      AccountCreated: `operator ${login}`,
      AuditKeyIssued: `operator ${login}`,
      CaseBlocked: `staff ${login}`,
      PaymentDisputed: `staff ${login}`,
      ManualAdjustment: 'staff Dana Scott',
      SettlementFileImported: `staff ${login}`,
    });
  });
  test('an agency gets a key for its portal, and a statement of its month', async () => {
    const { portalId } = welcome;
    const issue = ['audit', 'keys', 'issue', '--name', 'City', '--role', 'agency'];
    expect((await payfold(...issue)).code).toBe(2);
    expect((await payfold(...issue, '--portal', randomUUID())).code).toBe(1);
    const { keyId, auditKey, ...terms } = await done(...issue, '--portal', portalId, '--personal');
    expect([terms, auditKey]).toEqual([
      { name: 'City', role: 'agency', scope: { accounts: [], portals: [portalId] }, personal: true },
      expect.stringMatching(/^pa_test_/),
    ]);
    const rows = (await done('audit', 'keys', 'list')) as unknown as { keyId: unknown }[];
    expect(rows.find((row) => row.keyId === keyId)).toMatchObject({ ...terms, revokedAt: null });
    const { createdAt } = await pay();
    const period = createdAt.slice(0, 7);
    const statement = await done('audit', 'statement', portalId, '--period', period);
    expect(statement).toMatchObject({ portalId, period, zone: 'UTC', final: false, movements: { chargedCents: expect.any(Number) } });
    const zoned = await done('audit', 'statement', portalId, '--period', period, '--zone', 'America/Chicago');
    expect(zoned).toMatchObject({ zone: 'America/Chicago' });
    expect(await payfold('audit', 'statement', portalId, '--period', 'soon')).toMatchObject({
      code: 1,
      value: { details: { code: 'VALIDATION_ERROR' } },
    });
    expect((await payfold('audit', 'statement', randomUUID(), '--period', period)).code).toBe(1);
  });
  test('refund twice under one key: the same answer, the money once', async () => {
    const { id } = await pay(CARD.settlesAtOnce);
    const refund = ['payments', 'refund', id, '--amount-cents', '1000', '--reason', 'twice', ...BY, '--idempotency-key', newKey()];
    const [first, second] = [await done(...refund), await done(...refund)] as unknown as [RefundView, RefundView];
    expect(second).toEqual(first);
    expect(await read(id)).toMatchObject({ refundedAmountCents: 1_000 });
  });
  test('the same refund again is refused, unless --again says that it is another one', async () => {
    const { id } = await pay(CARD.settlesAtOnce);
    const refund = ['payments', 'refund', id, '--amount-cents', '1000', '--reason', 'arrow up, enter', ...BY];
    await done(...refund);
    expect(await payfold(...refund)).toMatchObject({
      code: 1,
      value: { message: expect.stringMatching(/^The same refund, of 10.00, was completed at .*Z\. For another refund, add --again\.$/), details: { code: 'INVALID_STATE' } }, // prettier-ignore
    });
    await done(...refund, '--again');
    expect(await read(id)).toMatchObject({ refundedAmountCents: 2_000 });
  });
  test('a person at a terminal sees what a refund will do, and is asked; the answer says how the money goes back', async () => {
    const { id } = await pay(CARD.settlesAtOnce);
    const refund = ['payments', 'refund', id, '--amount-cents', '2500', '--reason', 'duplicate', ...BY];
    // A refund reads only the stream. Wait until the worker has appended the settlement.
    await eventually(async () => ((await done('payments', 'show', id)).settlement as { settledAt: unknown } | null)?.settledAt);
    const no = await atTerminal('n\n', ...refund);
    const effect = new RegExp(`refund +payment ${id}\nprincipal +\\$25\\.00 goes back by refund\nfee kept +\\$3\\.00\ntold +Sandbox.*, by payment\\.refunded to 0 webhook endpoints`); // prettier-ignore
    expect(no).toMatchObject({ code: 1, stdout: '' });
    expect(no.stderr).toMatch(effect);
    expect(await read(id)).toMatchObject({ refundedAmountCents: 0 });
    const yes = await atTerminal('y\n', ...refund);
    expect([yes.code, yes.stderr]).toEqual([0, expect.stringMatching(effect)]);
    expect(yes.stdout).toMatch(/returned +\$25\.00\nhow +refunded to the card\n/);
    expect(await atTerminal('y\n', ...refund)).toMatchObject({ code: 1, stderr: expect.not.stringContaining('Go on?') });
    expect(await read(id)).toMatchObject({ refundedAmountCents: 2_500 });
  });
  test('a refusal names the option; --by may not look like a user of the system; in production it is required', async () => {
    const refund = ['payments', 'refund', randomUUID(), '--reason', 'x'];
    expect((await payfold(...refund, '--amount-cents', '0')).value.message).toBe('--amount-cents must be 1 to 99999999.');
    expect(await payfold(...refund, '--by', 'os:root')).toMatchObject({ code: 2, stderr: expect.stringContaining('must not begin with os:') });
    for (const args of [refund, ['disputes', 'update', randomUUID(), '--stage', 'x']])
      expect(await payfoldIn({ ENVIRONMENT: 'production' }, ...args)).toMatchObject({ code: 2, stderr: expect.stringContaining("required option '--by <name>'") }); // prettier-ignore
  });
  test('a refund that ended partial exits 1 with PARTIAL_REFUND_PENDING; again completes it', async () => {
    const { id } = await pay(CARD.feeRefundFailsOnce);
    const refund = ['payments', 'refund', id, '--include-fee', '--reason', 'all', ...BY];
    expect(await payfold(...refund)).toMatchObject({
      code: 1,
      value: { success: false, details: { code: 'PARTIAL_REFUND_PENDING', remainingRefundableAmountCents: 300 } },
    });
    expect(await done(...refund)).toMatchObject({ amountCents: 10_300, remainingRefundableAmountCents: 0 });
  });
  test('void', async () => {
    const { id } = await pay();
    expect(await done('payments', 'void', id, '--reason', 'wrong account', ...BY)).toMatchObject({ id, status: 'voided', amountCents: 10_300 });
  });
  test('disputes open, update, list: {disputeId, …}', async () => {
    const { id } = await pay(CARD.settlesAtOnce);
    const dispute = await done('disputes', 'open', '--payment', id, '--amount-cents', '5000', '--status', 'debited', '--stage', 'chargeback', '--reason-code', '10.4', '--reason', 'not recognised', '--opened-on', today(), '--due-date', today()); // prettier-ignore
    expect(dispute).toMatchObject({ disputeId: expect.any(String), paymentId: id, status: 'debited', disputedAmountCents: 5_000 });
    const refused = await payfold('payments', 'refund', id, '--reason', 'x', ...BY);
    expect(refused).toMatchObject({ code: 1, value: { details: { code: 'INVALID_STATE' } } });
    expect(await done('disputes', 'update', dispute.disputeId as string, '--status', 'recovered', '--stage', 'representment')).toEqual({
      ...dispute,
      status: 'recovered',
      stage: 'representment',
    });
    expect(await done('disputes', 'list')).toContainEqual(expect.objectContaining({ disputeId: dispute.disputeId, status: 'recovered' }));
    expect(await done('payments', 'refund', id, '--reason', 'x', ...BY)).toMatchObject({ amountCents: 10_000 });
  });
  test('tasks that only a person may decide', async () => {
    const answer = await call('POST', PAYMENTS, paymentOf(welcome.portalId, { number: CARD.unresolvable }));
    const id = answer.body.details!.id!;
    // Besides the answer, an alarm is correct here.
    const closed = await payfold('settlement', 'close');
    expect([closed.code, closed.stderr]).toEqual([0, expect.stringContaining('a payment needs a decision by staff')]);
    expect(await done('payments', 'tasks')).toContainEqual({
      paymentId: id,
      reason: 'settled_while_unknown',
      status: 'unknown',
      open: true,
      raisedAt: expect.any(String),
      evidence: expect.objectContaining({ transactionId: expect.any(String) }),
      acknowledged: null,
    });
  });
  const settledWhileUnknown = async () => {
    const id = (await call('POST', PAYMENTS, paymentOf(welcome.portalId, { number: CARD.unresolvable }))).body.details!.id!;
    await payfold('settlement', 'close');
    const rows = (await done('settlement', 'exceptions')) as unknown as { exceptionId: string; paymentId: string; suspenseCents: number }[];
    return { id, exceptionId: rows.find(({ paymentId }) => paymentId === id)!.exceptionId };
  };
  const resolve = ['settlement', 'exceptions', 'resolve'];
  const back = ['--as', 'refund', '--send', '--reason', 'not ours to keep', ...BY];
  test('a sale that settled while unknown goes back to the card: each step has its command', async () => {
    const first = await settledWhileUnknown();
    for (const args of [
      ['--as', 'adopt', '--send'],
      ['--as', 'refund', '--last4', '1234'],
      ['--as', 'refund', '--send', '--last4', '12'],
    ])
      expect((await payfold(...resolve, first.exceptionId, ...args, '--reason', 'x', ...BY)).code).toBe(2);
    expect(await done(...resolve, first.exceptionId, ...back, '--last4', '5145')).toEqual({
      exceptionId: first.exceptionId,
      status: 'resolved',
      transactionId: expect.stringMatching(/^rf_/),
      amountCents: 10_000,
      paymentId: first.id,
    });
    expect(await read(first.id)).toMatchObject({ status: 'voided' });

    const second = await settledWhileUnknown();
    const env = { PATH: process.env.PATH, HOME: process.env.HOME, DATA_DIR: dataDir.data };
    const { stdout } = await promisify(execFile)(
      process.execPath,
      [LAUNCHER, ...resolve, second.exceptionId, '--as', 'refund', '--reason', 'returned at the bank', ...BY],
      { env },
    );
    expect(stdout).toContain('Only the books were changed. No money was sent to the card.');
    expect(await read(second.id)).toMatchObject({ status: 'unknown' });
  }, 240_000);
  test('a rejected settlement: the payment shows it, the task names the batch, and an acknowledgement ends it', async () => {
    const answer = await call('POST', PAYMENTS, paymentOf(welcome.portalId, { number: CARD.settlementRejected }));
    const { id } = answer.body.data as { id: string };
    const acknowledge = (...more: string[]) =>
      payfold('payments', 'acknowledge', id, '--task', 'settlement_rejected', '--reason', 'paid at the counter', ...BY, ...more);
    expect(await acknowledge()).toMatchObject({ code: 1, value: { message: 'The payment has no such task.' } });
    await payfold('settlement', 'close');
    expect(await done('payments', 'show', id)).toMatchObject({ status: 'succeeded', settlement: { status: 'rejected', settledAt: null } });
    const tasks = async (...options: string[]) =>
      ((await done('payments', 'tasks', ...options)) as unknown as { paymentId: string }[]).filter(({ paymentId }) => paymentId === id);
    expect(await tasks()).toMatchObject([{ reason: 'settlement_rejected', open: true, evidence: { batchId: expect.any(String) } }]);
    const said = { reason: 'paid at the counter', by: BY[1] };
    expect((await acknowledge()).value).toEqual({ paymentId: id, task: 'settlement_rejected', ...said });
    expect(await tasks()).toEqual([]);
    expect(await tasks('--all')).toMatchObject([{ open: false, acknowledged: said }]);
    expect(await done('payments', 'show', id)).toMatchObject({ settlement: { status: 'rejected' } });
    expect((await payfold('payments', 'acknowledge', id, '--task', 'settled_while_unknown', '--reason', 'x', ...BY)).code).toBe(2);
  });
  /** A payment whose return was killed. The worker begins with it a minute later, and no batch may close meanwhile. */
  let killedReturn: string;
  test('a command that returns a settled sale is killed: a second one is refused', async () => {
    const { id, exceptionId } = await settledWhileUnknown();
    killedReturn = id;
    const killed = await payfoldIn({ FAILPOINT: 'refund.principal:after' }, ...resolve, exceptionId, ...back);
    expect(killed).toMatchObject({ code: 99, value: {} });
    expect((await payfold(...resolve, exceptionId, ...back)).value).toMatchObject({
      message: 'A refund of this exception was sent. A worker ends the exception as soon as it knows the outcome.',
    });
    const succeeded = ['--as', 'succeeded', '--evidence', 'statement', '--force'];
    expect((await payfold('payments', 'resolve', id, ...succeeded, ...BY)).value).toMatchObject({ details: { code: 'INVALID_STATE' } });
  }, 240_000);
  test('find: each name answers the payment at once, newest first, page by page; the answer says how far the log was read', async () => {
    const reference = newKey();
    const made: string[] = [];
    for (const lines of [[4_000], [5_500, 1_100], [4_000]]) {
      const body = { ...paymentOf(welcome.portalId, { lines }), referenceId: reference };
      body.lineItems[0]!.referenceId = `line of ${reference}`;
      made.unshift(((await call('POST', PAYMENTS, body)).body.data as PaymentView).id);
    }
    const find = async (...args: string[]) =>
      (await done('payments', 'find', ...args)) as { payments: PaymentView[]; nextCursor: string | null; position: string };
    const ids = async (...args: string[]) => (await find(...args)).payments.map(({ id }) => id);
    const second = await read(made[1]!);
    expect(await find('--reference-id', reference)).toEqual({
      payments: [await read(made[0]!), second, await read(made[2]!)].map((one) => ({
        ...one,
        accountId: expect.stringMatching(/^[0-9a-f-]{36}$/),
        returns: [],
      })),
      nextCursor: null,
      position: expect.stringMatching(/^\d{20}$/),
    });
    const refund = (await done('payments', 'refund', second.id, '--include-fee', '--reason', 'duplicate', ...BY)) as unknown as RefundView;
    expect(await ids('--transaction-id', refund.gateway.transactionId)).toEqual([second.id]);
    expect(await ids('--confirmation-number', second.confirmationNumber!.toLowerCase())).toEqual([second.id]);
    expect(await ids('--last4', '4242', '--amount-cents', String(second.totalChargedCents))).toEqual([second.id]);
    const line = ['--line-reference', `line of ${reference}`];
    const first = await find(...line, '--limit', '2');
    expect(first.payments.map(({ id }) => id)).toEqual(made.slice(0, 2));
    expect(await ids(...line, '--cursor', first.nextCursor!)).toEqual(made.slice(2));
    const filters = ['--from', second.createdAt, '--to', '2100-01-01', '--portal', welcome.portalId];
    expect(await ids(...line, ...filters)).toEqual(made.slice(0, 2));
    expect(await ids(...line, '--account', second.id)).toEqual([]);
    const env = { PATH: process.env.PATH, HOME: process.env.HOME, DATA_DIR: dataDir.data };
    const shown = await promisify(execFile)(process.execPath, [LAUNCHER, 'payments', 'find', '--reference-id', reference, '--limit', '1'], { env });
    expect(shown.stdout).toMatch(new RegExp(`^PAYMENT .*\\n${made[0]!} .*\\n\\nThere may be more: --cursor ${made[0]!}\\n$`));
  }, 120_000);
  test('five callers are answered by find and show, in dollars', async () => {
    const reference = newKey();
    const paid = async (cents: number, number?: string) => {
      const body = { ...paymentOf(welcome.portalId, { lines: [cents], ...(number && { number }) }), referenceId: reference };
      return (await call('POST', PAYMENTS, body)).body as { data: PaymentView; details?: { id?: string } };
    };
    const found = async (...args: string[]) =>
      ((await done('payments', 'find', ...args)) as { payments: PaymentView[] }).payments.map(({ id }) => id);
    const page = async (id: string, ...more: string[]) => (await atTerminal('', 'payments', 'show', id, ...more)).stdout;
    const day = today();

    // Charged twice: the same amount on the same day and card.
    const twice = [(await paid(71_317)).data.id, (await paid(71_317)).data.id];
    expect((await found('--amount', '713.17', '--on', day, '--last4', '4242')).sort()).toEqual(twice.sort());
    expect(await found('--amount', '713.17', '--brand', 'mastercard')).toEqual([]);
    expect((await found('--amount', '700..720', '--portal', welcome.portalId, '--status', 'succeeded', '--reference-id', reference)).length).toBe(2);
    expect((await found('--email', 'nobody@mail.example', '--amount', '700..720')).length).toBe(0);

    // Where is my refund, and the wrong amount.
    await done('payments', 'refund', twice[0]!, '--amount-cents', '2500', '--reason', 'billed twice', ...BY);
    const refunded = await page(twice[0]!, '--events');
    expect(refunded).toMatch(/^card +visa 4242$/m);
    expect(refunded).toMatch(/^returned +\$25\.00; \$\d+\.\d\d remain$/m);
    expect(refunded).toMatch(
      /REFUNDS AND VOIDS\nASKED .*\n.*refund +Dana Scott +completed +\$25\.00 +principal \$25\.00 by void \w+ +hidden: --with-personal shows it/,
    );
    expect(refunded).toMatch(/staff asked for a refund: \$25\.00 of the principal charge by void/);
    expect(refunded).toMatch(/^times +in UTC; --zone names another$/m);
    expect(await page(twice[0]!, '--with-personal', '--zone', 'America/Chicago')).toMatch(/times +in America\/Chicago[^]*billed twice/);

    // A refused card.
    const declined = (await paid(71_318, CARD.declined)).details!.id!;
    expect(await found('--status', 'failed', '--amount', '713.18')).toEqual([declined]);
    expect(await page(declined)).toMatch(/^why +declined: [a-z ]+\n[^]*^charged +nothing$/m);

    // A lost dispute.
    const lost = (await paid(71_319, CARD.settlesAtOnce)).data.id;
    await done('disputes', 'open', '--payment', lost, '--amount-cents', '5000', '--status', 'lost', '--stage', 'chargeback', '--reason-code', '10.4', '--reason', 'x', '--opened-on', day, '--due-date', day); // prettier-ignore
    expect(await page(lost)).toMatch(new RegExp(String.raw`DISPUTES\nOPENED .*\n${day} +lost +chargeback +\$50\.00 +10\.4 +${day}`));
    const shown = await done('payments', 'show', lost);
    expect(shown).toMatchObject({ disputes: [{ status: 'lost', disputedAmountCents: 5_000 }], reversals: [], webhooks: [] });
    expect(JSON.stringify(shown)).not.toContain('personal"');
  }, 240_000);
  test.each([
    [[], 'say what is known of the payment: --amount, --on, --last4'],
    [['--last4', '4242424242424242'], '--last4 must be the last four digits of the card'],
    [['--amount', '4242424242424242'], 'It must be dollars like 128.63, or a range like 100..150.'],
    [['--amount', '150..100'], 'It must be dollars like 128.63, or a range like 100..150.'],
    [['--on', '2026-02-30'], 'It must be a day like 2026-01-31.'],
    [['--on', '2026-02-03', '--from', '2026-02-03'], "'--on"],
    [['--amount', '1', '--zone', 'CST'], 'It must be the name of a time zone'],
    [['--confirmation-number', '1'], '--confirmation-number must look like ABCD-EFGH-JK'],
    [['--reference-id', 'A', '--limit', '1001'], 'It must be 1 to 1000.'],
  ])('find %j is wrong usage, and no value is repeated', async (args, message) => {
    const { code, value, stderr } = await payfold('payments', 'find', ...args);
    expect([code, value]).toEqual([2, { success: false, message: expect.stringContaining(message), details: { code: 'VALIDATION_ERROR' } }]);
    expect(stderr).not.toContain('4242424242424242');
  });
  test('refused attempts: a charge of a blocked case is listed, by portal and reference', async () => {
    await done('cases', 'block', '--portal', welcome.portalId, '--reference', 'CASE-REFUSED');
    const { status } = await call('POST', PAYMENTS, paymentOf(welcome.portalId, { referenceId: 'CASE-REFUSED' }));
    expect(status).toBe(403);
    const refusals = (...options: string[]) => done('payments', 'refusals', ...options) as unknown as Promise<object[]>;
    const row = {
      refusedAt: expect.any(String),
      portalId: welcome.portalId,
      code: 'PAYMENT_BLOCKED',
      referenceId: 'CASE-REFUSED',
      cardHash: expect.stringMatching(/^[0-9a-f]{64}$/),
      attempts: 1,
    };
    await eventually(async () => (await refusals('--reference', 'CASE-REFUSED')).length > 0);
    expect(await refusals('--portal', welcome.portalId, '--reference', 'CASE-REFUSED')).toEqual([row]);
    expect(await refusals('--reference', 'CASE-REFUSED', '--to', '2020-01-01')).toEqual([]);
    expect((await payfold('payments', 'refusals', '--limit', '0')).code).toBe(2);
  });
  test('waiting: an attempt without an outcome, with why and by when the gateway can tell, until it is decided', async () => {
    const answer = await call('POST', PAYMENTS, paymentOf(welcome.portalId, { number: CARD.neverReached }));
    const id = answer.body.details!.id!;
    const waiting = async () =>
      ((await done('payments', 'waiting')) as unknown as { payments: { paymentId: string }[] }).payments.filter(({ paymentId }) => paymentId === id);
    // Recovery has not tried it yet.
    expect(await waiting()).toEqual([]);
    const { createdAt, totalChargedCents } = await read(id);
    const pool = createPool(readRuntime(dataDir.data)!.databaseUrl, { name: 'spec', max: 1 });
    const list = `rm_payment_list_${paymentListModel.shape}.payment_list`;
    const { rows } = await pool.query<{ attempt: string }>(`select open_attempt_id as attempt from ${list} where payment_id = $1`, [id]);
    const record = (until: string) => {
      const nextTryAt = new Date(Date.now() + 3_600_000).toISOString();
      const tried = { paymentId: id, attemptId: rows[0]!.attempt, tries: 1, nextTryAt, outcome: 'open', why: 'not_visible', until } as const;
      return postgresRecoveryWork(pool).record(tried);
    };
    const listed = {
      paymentId: id,
      portalId: welcome.portalId,
      amountCents: totalChargedCents,
      operation: 'charge',
      since: createdAt,
      why: 'not_visible',
    };
    const [future, past] = ['2100-01-01T00:00:00.000Z', '2026-01-01T00:00:00.000Z'];
    await record(future);
    expect(await waiting()).toEqual([{ ...listed, state: 'waiting', decidedBy: future }]);
    await record(past);
    expect(await waiting()).toEqual([{ ...listed, state: 'overdue', decidedBy: past }]);
    await pool.end();
    const env = { PATH: process.env.PATH, HOME: process.env.HOME, DATA_DIR: dataDir.data };
    const shown = await promisify(execFile)(process.execPath, [LAUNCHER, 'payments', 'waiting'], { env });
    expect(shown.stdout).toMatch(
      new RegExp(`^PAYMENT +PORTAL +AMOUNT +OPERATION +SINCE +STATE +WHY +DECIDED BY\\n(.*\\n)*${id} .* charge .* overdue +not_visible +${past}`),
    );
    await done('payments', 'resolve', id, '--as', 'voided', '--evidence', 'call with the bank', ...BY);
    expect(await waiting()).toEqual([]);
  }, 120_000);
  test('resolve', async () => {
    const answer = await call('POST', PAYMENTS, paymentOf(welcome.portalId, { number: CARD.neverReached }));
    const id = answer.body.details!.id!;
    const resolve = (as: string) => payfold('payments', 'resolve', id, '--as', as, '--evidence', 'call with the bank', ...BY);
    expect(await resolve('succeeded')).toMatchObject({ code: 1, value: { details: { code: 'INVALID_STATE' } } });
    expect(await resolve('voided')).toMatchObject({ code: 0, value: { id, status: 'voided' } });
    expect((await resolve('settled')).code).toBe(2);
  });
  test.each([
    ['no reason', ['payments', 'refund', '018f0000-0000-7000-8000-00000000dead', ...BY]],
    ['an amount with a point', ['payments', 'refund', '018f0000-0000-7000-8000-00000000dead', '--reason', 'x', ...BY, '--amount-cents', '10.50']],
    ['nothing to update', ['disputes', 'update', '018f0000-0000-7000-8000-00000000dead']],
    ['a portal that is none', ['settlement', 'close', '--portal', '018f0000-0000-7000-8000-00000000dead']],
  ])('%s is wrong usage, exit 2', async (_, args) => {
    expect((await payfold(...args)).code).toBe(2);
  });
  test('an unknown payment or dispute exits 1', async () => {
    expect((await payfold('payments', 'refund', '018f0000-0000-7000-8000-00000000dead', '--reason', 'x', ...BY)).value).toMatchObject({ details: { code: 'PAYMENT_NOT_FOUND' } }); // prettier-ignore
    expect((await payfold('disputes', 'update', '018f0000-0000-7000-8000-00000000dead', '--status', 'lost')).code).toBe(1);
  });
  test('keys rebuild: lost rows are made again, the retry is replayed, and no event shows the hashes of a key', async () => {
    const headers = { authorization: `ApiKey ${welcome.apiKey}`, 'content-type': 'application/json', 'idempotency-key': newKey() };
    const send = () => fetch(`${service.url}${PAYMENTS}`, { method: 'POST', headers, body: JSON.stringify(paymentOf(welcome.portalId)) });
    const first = await (await send()).text();
    const { id } = (JSON.parse(first) as { data: PaymentView }).data;
    const pool = createPool(readRuntime(dataDir.data)!.databaseUrl, { name: 'spec', max: 1 });
    // Waits until the projection `keys` has passed the payment's last event. If the row were deleted earlier, the worker would make it again.
    const passed = `select from projection_checkpoint where name = 'keys' and event_id =
      (select event_id from es.events where stream_id = $1 order by revision desc limit 1)`;
    await eventually(async () => (await pool.query(passed, [`payment-${id}`])).rowCount === 1);
    const { rows } = await pool.query<{ name: string }>(
      `delete from idempotency_key where created_at = (select max(created_at) from idempotency_key) returning encode(key_hash, 'hex') as name`,
    );
    await pool.end();
    expect(rows).toHaveLength(1);
    expect(await done('keys', 'rebuild', '--hours', '1')).toMatchObject({ restored: 1, corrected: 0 });
    expect(await done('keys', 'rebuild')).toMatchObject({ restored: 0, corrected: 0 });
    const again = await send();
    expect([again.status, again.headers.get('idempotent-replayed'), await again.text()]).toEqual([200, 'true', first]);

    const shown = await done('payments', 'show', id, '--events');
    expect(JSON.stringify(shown)).not.toContain(rows[0]!.name);
    expect((shown.events as { data: { idempotency?: string } }[])[0]!.data.idempotency).toMatch(/^[0-9a-f]{64}$/);
    expect((await done('projections', 'status')) as unknown).toContainEqual(expect.objectContaining({ name: 'keys', running: true, failure: null }));
  });
  test('the worker finishes the return whose command was killed', async () => {
    await eventually(async () => (await read(killedReturn)).status === 'voided', { timeoutMs: 120_000, everyMs: 1_000 });
    await done('settlement', 'close');
    expect(
      ((await done('settlement', 'exceptions')) as unknown as { paymentId: string }[]).filter(({ paymentId }) => paymentId === killedReturn),
    ).toEqual([]);
  }, 240_000);
});

test('without a running service the command starts the processes that it needs, and leaves none running', async () => {
  const { id } = await pay();
  await service.stop();
  expect(await done('payments', 'refund', id, '--include-fee', '--reason', 'closed today', ...BY)).toMatchObject({
    amountCents: 10_300,
    reversalType: 'void',
  });
  expect(await done('settlement', 'close')).toHaveProperty('batches');
  service = await start('standalone', dataDir);
  expect(await read(id)).toMatchObject({ status: 'refunded' });
}, 600_000);

test('the simulator closes its batches every day, and the worker learns of it', async () => {
  const { id } = await pay();
  await service.stop();
  const soon = new Date(Date.now() + 8_000).toISOString().slice(11, 19);
  service = await start('standalone', dataDir, { SIMULATOR_BATCH_CLOSE: soon });
  await eventually(async () => (await read(id)).settlement?.settledAt, { timeoutMs: 90_000, everyMs: 200 });
  const { events } = (await done('payments', 'show', id, '--events')) as { events: { type: string }[] };
  expect(events.map(({ type }) => type)).toContain('PaymentSettled');
}, 600_000);
