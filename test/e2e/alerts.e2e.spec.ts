/**
 * `payfold alerts` against real processes: each alert is caused, shown by the command, the audit API and the metrics alike, and gone after it is
 * mended. `sandbox advance` makes the days pass.
 */
import { mkdir, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { type Alert, ALERT_NAMES } from '#audit';
import { searchPathOf } from '#eventstore';
import { createPool, freePort, type Pool } from '#platform';
import { READ_MODELS } from '../../apps/services.js';
import { eventually } from '../support/eventually.js';
import { figuresIn } from '../support/metrics.js';
import { freshDatabase } from '../support/postgres.js';
import { DataDir, type Environment, launch, newKey, type RunningProcess, start, startApiAndWorker } from '../support/processes.js';
import { CARD, PARTNER, paymentOf } from '../support/service.js';
import { FILE_HEAD } from '../support/settlement.js';

const LAUNCHER = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname;
const MINUTE_MS = 60_000;
const HOUR_MS = 3_600_000;
const DAY_MS = 24 * HOUR_MS;
const BY = ['--by', 'Dana Scott'];
/** The worker and its sweeps need some rounds of 5 to 20 s. */
const WORKER_MS = 120_000;

let dataDir: DataDir;
let database: Awaited<ReturnType<typeof freshDatabase>>;
let sql: Pool;
let env: Environment;
let api: RunningProcess;
let worker: RunningProcess;
let auditUrl: string;
let metricsUrl: string;
let auditKey: string;
let apiKey: string;
let portalId: string;

const ran = (args: readonly string[], settings: Environment = {}) =>
  launch([LAUNCHER, ...args, '--json', '--yes'], dataDir, { ...env, ...settings, LOG_LEVEL: 'silent' }).exited;
const payfold = async <T>(...args: string[]): Promise<T> => {
  const { code, stdout, stderr } = await ran(args);
  expect([code, stderr]).toEqual([0, '']);
  return JSON.parse(stdout) as T;
};
const post = async (overrides: { number?: string; payer?: object } = {}): Promise<{ data?: { id: string }; details?: { id: string } }> => {
  const answer = await fetch(`${api.url}${PARTNER}/payments`, {
    method: 'POST',
    headers: { authorization: `ApiKey ${apiKey}`, 'content-type': 'application/json', 'idempotency-key': newKey() },
    body: JSON.stringify(paymentOf(portalId, overrides)),
  });
  return (await answer.json()) as Awaited<ReturnType<typeof post>>;
};
const pay = async (overrides?: Parameters<typeof post>[0]): Promise<string> => (await post(overrides)).data!.id;
/** Business time, `ms` from now. */
const inMs = async (ms: number) => {
  const { rows } = await sql.query<{ ahead_ms: string }>('select ahead_ms from sandbox_time');
  return new Date(Date.now() + Number(rows[0]?.ahead_ms ?? 0) + ms).toISOString();
};
const advanceTo = (ms: number) => payfold('sandbox', 'advance', '--to', new Date(ms).toISOString());

beforeAll(async () => {
  dataDir = await DataDir.create();
  await mkdir(dataDir.data);
  database = await freshDatabase();
  sql = createPool(database.url, { name: 'spec', max: 3, searchPath: searchPathOf(READ_MODELS) });
  const [auditPort, metricsPort] = [await freePort(), await freePort()];
  const simulator = await start('simulator', dataDir);
  env = { DATABASE_URL: database.url, SIMULATOR_URL: simulator.url };
  [api, worker] = await startApiAndWorker(dataDir, env, { AUDIT_PORT: String(auditPort), METRICS_PORT: String(metricsPort) });
  auditUrl = `http://127.0.0.1:${auditPort}`;
  metricsUrl = `http://127.0.0.1:${metricsPort}/metrics`;
  const { accountId } = await payfold<{ accountId: string }>('accounts', 'create', '--name', 'City');
  ({ apiKey } = await payfold<{ apiKey: string }>('keys', 'issue', '--account', accountId));
  ({ portalId } = await payfold<{ portalId: string }>('portals', 'create', '--account', accountId, '--name', 'Water'));
  ({ auditKey } = await payfold<{ auditKey: string }>('audit', 'keys', 'issue', '--name', 'Books', '--role', 'finance'));
}, 180_000);
afterAll(async () => {
  await dataDir?.remove();
  await sql?.end();
  await database?.drop();
});

const byCommand = async (settings?: Environment) => {
  const { code, stdout, stderr } = await ran(['alerts'], settings);
  expect(stderr).toBe('');
  return { code, alerts: JSON.parse(stdout) as readonly Alert[] };
};
const byHttp = async (): Promise<readonly Alert[]> => {
  const answer = await fetch(`${auditUrl}/audit/v1/alerts`, { headers: { authorization: auditKey } });
  expect(answer.status).toBe(200);
  return ((await answer.json()) as { data: { alerts: readonly Alert[] } }).data.alerts;
};
const byMetrics = async (): Promise<ReadonlyMap<string, number>> => new Map(figuresIn(await (await fetch(metricsUrl)).text()));
const named = (alerts: readonly Alert[], name: string): Alert => alerts.find((alert) => alert.name === name)!;
const firing = (alerts: readonly Alert[]) => alerts.filter(({ count }) => count > 0).map(({ name }) => name);

/** Waits until `isTrue` of the alerts, by HTTP and by the command. The command takes seconds, so it is asked last. Returns its alerts and exit code. */
const once = async (isTrue: (alerts: readonly Alert[]) => boolean): Promise<{ code: number | null; alerts: readonly Alert[] }> => {
  let last: readonly Alert[] = [];
  for (const end = performance.now() + WORKER_MS; ;) {
    await eventually(async () => isTrue((last = await byHttp())), { timeoutMs: WORKER_MS, everyMs: 100 }).catch((error: unknown) => {
      throw new Error(`${String(error)}: ${JSON.stringify(last)}`);
    });
    const found = await byCommand();
    if (isTrue(found.alerts)) return found;
    if (performance.now() > end) throw new Error(`the command says otherwise: ${JSON.stringify(found)}`);
  }
};

/** Waits until the alert fires with `count` items. Returns it. The command, the audit API and the metrics say the same of it. */
const fires = async (name: string, count = 1): Promise<Alert> => {
  const { code, alerts } = await once((some) => named(some, name).count === count);
  expect(code).toBe(1);
  const found = named(alerts, name);
  expect(named(await byHttp(), name)).toEqual(found);
  const metrics = await byMetrics();
  expect(metrics.get(`payfold_alert{name="${name}"}`)).toBe(count);
  const ageSeconds = found.oldestAt === null ? 0 : (Date.parse(await inMs(0)) - Date.parse(found.oldestAt)) / 1_000;
  expect(Math.abs(metrics.get(`payfold_alert_oldest_seconds{name="${name}"}`)! - Math.max(0, ageSeconds))).toBeLessThan(60);
  return found;
};
/** Waits until none of these alerts fires, and the metrics say so. Without names: no alert at all, so that the command exits with 0. */
const ends = async (...names: readonly string[]) => {
  const isEnded = (alerts: readonly Alert[]) => firing(alerts).every((name) => names.length > 0 && !names.includes(name));
  const { code, alerts } = await once(isEnded);
  expect([code, firing(alerts)]).toEqual([firing(alerts).length === 0 ? 0 : 1, firing(alerts)]);
  const metrics = await byMetrics();
  for (const name of names.length === 0 ? ALERT_NAMES : names) expect([name, metrics.get(`payfold_alert{name="${name}"}`)]).toEqual([name, 0]);
};

describe('payfold alerts', () => {
  test('fires none of its alerts in a new installation, and exits 0', async () => {
    await pay();
    const { code, alerts } = await byCommand();
    expect(code).toBe(0);
    expect(alerts.map(({ name }) => name)).toEqual(ALERT_NAMES);
    for (const alert of alerts) expect(alert).toMatchObject({ count: 0, cents: null, oldestAt: null, items: [] });
    await ends();
  });

  test('unknown_outcome: a charge without an outcome, until recovery has resolved it', async () => {
    await worker.stop();
    const id = (await post({ number: CARD.unreadable })).details!.id;
    expect(named((await byCommand()).alerts, 'unknown_outcome').count).toBe(0);
    const earlier = await byCommand({ ALERT_UNKNOWN_OUTCOME_SECONDS: '1' });
    expect(earlier.code).toBe(1);
    expect(named(earlier.alerts, 'unknown_outcome')).toMatchObject({ count: 1, threshold: '1 s', items: [{ kind: 'payment', id }] });
    await advanceTo(Date.parse(await inMs(16 * MINUTE_MS)));
    expect(await fires('unknown_outcome')).toMatchObject({
      severity: 'page',
      count: 1,
      cents: 10_000,
      threshold: '900 s',
      items: [{ kind: 'payment', id, cents: 10_000 }],
    });
    worker = await start('worker', dataDir, env);
    await ends();
  }, 300_000);

  test('staff_task: a sale that the processor rejected, until a person acknowledges it', async () => {
    const id = await pay({ number: CARD.settlementRejected });
    // The alarm on stderr is correct here.
    expect((await ran(['settlement', 'close'])).code).toBe(0);
    expect(await fires('staff_task')).toMatchObject({
      severity: 'ticket',
      count: 1,
      threshold: null,
      items: [{ kind: 'payment', id, cents: 10_000 }],
    });
    await payfold('payments', 'acknowledge', id, '--task', 'settlement_rejected', '--reason', 'told the city', ...BY);
    await ends('staff_task');
  }, 300_000);

  test('suspense, exceptions_old, in_transit_old: a line that nobody knows, in a batch that is not funded', async () => {
    const { rows } = await sql.query<{ merchant_account: string }>('select merchant_account from gateway_account limit 1');
    const closed = await inMs(0);
    const file = async (name: string, funded: string) => {
      const path = join(dataDir.path, name);
      await writeFile(path, `${FILE_HEAD}\nghost,${closed},tx-ghost,,sale,700,0,700,${funded}\n`);
      return ['settlement', 'import', path, '--merchant-account', rows[0]!.merchant_account];
    };
    expect((await ran(await file('first.csv', ''))).code).toBe(0);
    const [exception] = await payfold<{ exceptionId: string }[]>('settlement', 'exceptions');
    expect(await fires('suspense')).toMatchObject({ count: 1, cents: 700, items: [{ kind: 'account', cents: 700 }] });
    await advanceTo(Date.parse(closed) + 5 * DAY_MS - HOUR_MS);
    await ends('in_transit_old', 'exceptions_old');
    await advanceTo(Date.parse(closed) + 5 * DAY_MS + HOUR_MS);
    // The worker records that the batches of the processor are funded. The file does not say so of its own.
    const batch = { kind: 'batch', id: `simulator/${rows[0]!.merchant_account}/ghost`, cents: 700, at: closed };
    expect(await fires('in_transit_old')).toMatchObject({ threshold: '5 d', oldestAt: closed, items: [batch] });
    await advanceTo(Date.parse(closed) + 7 * DAY_MS - HOUR_MS);
    await ends('exceptions_old');
    await advanceTo(Date.parse(closed) + 7 * DAY_MS + HOUR_MS);
    expect(await fires('exceptions_old')).toMatchObject({
      threshold: '7 d',
      count: 1,
      cents: 700,
      items: [{ kind: 'exception', id: exception!.exceptionId, cents: 700 }],
    });
    await payfold('settlement', 'exceptions', 'resolve', exception!.exceptionId, '--as', 'adopt', '--portal', portalId, '--reason', 'cash', ...BY);
    await ends('exceptions_old', 'suspense');
    expect((await ran(await file('second.csv', closed.slice(0, 10)))).code).toBe(0);
    await ends();
  }, 600_000);

  test('dispute_due: nobody has answered a dispute that is due soon', async () => {
    const id = await pay();
    const [opened, soon, late] = [await inMs(0), await inMs(5 * DAY_MS), await inMs(6 * DAY_MS)].map((at) => at.slice(0, 10)) as [
      string,
      string,
      string,
    ];
    const open = (due: string) =>
      payfold<{ disputeId: string }>(
        ...['disputes', 'open', '--payment', id, '--amount-cents', '100', '--status', 'debited', '--stage', 'chargeback', '--reason-code', '10.4'],
        ...['--reason', 'fraud', '--opened-on', opened, '--due-date', due, ...BY],
      );
    await open(late);
    await ends('dispute_due');
    const { disputeId } = await open(soon);
    expect(await fires('dispute_due')).toMatchObject({
      threshold: '5 d',
      count: 1,
      cents: 100,
      oldestAt: `${soon}T00:00:00.000Z`,
      items: [{ kind: 'dispute', id: disputeId }],
    });
    await payfold('disputes', 'update', disputeId, '--status', 'in_dispute', ...BY);
    await ends();
  }, 300_000);

  test('drift: a row that was changed by hand, until the list is rebuilt', async () => {
    const id = await pay();
    const lookAgain = () => sql.query(`update drift_difference set looked_at = looked_at - interval '1 hour'`);
    await ends();
    const changed = `update payment_list set state = replace(state, '"amountCents":10000', '"amountCents":10001') where payment_id = $1`;
    expect((await sql.query(changed, [id])).rowCount).toBe(1);
    await sql.query(`update drift_sweep set position = ''`);
    expect(await fires('drift')).toMatchObject({ severity: 'page', count: 1, items: [{ kind: 'payment', id }] });
    await payfold('projections', 'rebuild', 'payment-list');
    await lookAgain();
    await ends();
  }, 300_000);

  test('drift and seal: a verification pass found a fault, until one finds none', async () => {
    const found = (name: string) => JSON.stringify([{ name, ok: false, detail: 'planted' }]);
    const set = `update verify_pass set checks = $1::json, failed_checks = 1, finished_at = now() where pass = 'full'`;
    for (const [check, name] of [
      ['books', 'drift'],
      ['tiles', 'seal'],
    ] as const) {
      await sql.query(set, [found(check)]);
      expect(await fires(name)).toMatchObject({ count: 1, items: [{ kind: 'check', id: `full ${check}` }] });
    }
    await sql.query(`update verify_pass set checks = null, failed_checks = null, finished_at = null where pass = 'full'`);
    await ends();
  }, 300_000);

  test('seal: events that nobody seals, until a worker does', async () => {
    await worker.stop();
    await pay();
    // No worker runs, so these events wait. A minute passes on the clock of the store.
    await sql.query(`update es.events set stored_at = stored_at - interval '2 minutes' where position > (select position from log_state)::bigint`);
    expect(await fires('seal')).toMatchObject({ severity: 'page', count: 1, threshold: '60 s', items: [{ kind: 'position' }] });
    worker = await start('worker', dataDir, env);
    await ends();
  }, 300_000);

  test('erasure_pending: keys that cannot be deleted, until they can', async () => {
    const id = await pay({ payer: { firstName: 'Ada', email: 'ada@example.org' } });
    const holder = await sql.connect();
    try {
      await holder.query('begin');
      await holder.query('lock table personal_key in exclusive mode');
      const erased = ran(['payments', 'erase', id, '--reason-code', 'request', ...BY, '--apply']);
      await eventually(async () => {
        const { rowCount } = await sql.query(
          `update es.events set stored_at = stored_at - interval '2 minutes' where stream_id like 'erasure-%' and stored_at > clock_timestamp() - interval '1 minute'`,
        );
        return rowCount === 1;
      });
      expect(await fires('erasure_pending')).toMatchObject({ severity: 'ticket', threshold: '60 s', items: [{ kind: 'erasure' }] });
      await holder.query('rollback');
      await erased;
    } finally {
      holder.release();
    }
    await ends();
    const payment = await fetch(`${api.url}${PARTNER}/payments/${id}`, { headers: { authorization: `ApiKey ${apiKey}` } });
    expect(await payment.json()).toMatchObject({ data: { payer: null, personalDataErasedAt: expect.any(String) } });
  }, 300_000);
});
