/**
 * Measures the books with many payments (`--payments N`, default 250,000, four events each):
 *
 * - reading a payment as of an instant;
 * - the journal's projection, compared with the list's, and that of the line items, compared with the journal's;
 * - a full verification, compared with reading and hashing the same rows;
 * - two exports, and their memory;
 * - the drift check;
 * - a full verification pass: log, payments and books.
 *
 * Everything runs in one process with one Postgres. The history consists of copies of one real payment. `--as-of` ends after the first part, which
 * needs only the log.
 */
import { spawnSync } from 'node:child_process';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import {
  checkpointOf,
  createPostgresEventStore,
  createSubscriber,
  postgresCheckpoint,
  prepareReadModels,
  type Projection,
  type ReadModel,
  rebuild,
  resetCheckpoint,
  searchPathOf,
} from '#eventstore';
import { EVERYTHING } from '#accounts';
import { beginPass, eventHash, exportReport, findDrift, logSeal, passChecks, paymentAsOf, type ReportName, runPass, verifyLog } from '#audit';
import { journalModel, lineRegisterModel } from '#ledger';
import { paymentListModel } from '#payments';
import { paymentRegisterModel } from '#settlement';
import { createPool, migrate, newKeyRing, startEmbeddedPostgres, transaction } from '#platform';
import { MIGRATIONS, READ_MODELS } from '../apps/services.js';
import { closedLoop } from './load.js';
import { printSettings, refuseWithoutFsync } from './pgbench.js';
import { createRequest, rssMib, startService } from './service.js';

const OPERATOR = fileURLToPath(new URL('../apps/operator/main.js', import.meta.url));
const READS = 1_000;
const RUN_MS = 60 * 60_000;

const { values } = parseArgs({ options: { payments: { type: 'string', default: '250000' }, 'as-of': { type: 'boolean', default: false } } });
const payments = Number(values.payments);

/** Payment ids of the same form as the service makes (UUID v7), ascending with the time of the payment. */
const TIMELY_ID = `encode(substring(int8send(1767225600000 + n * 10) from 3) || set_byte(set_byte(substring(uuid_send(gen_random_uuid()) from 7), 0, 112), 2, 128), 'hex')::uuid`;

/** The events of one real payment, charged and settled, as rows. */
const modelPayment = async (): Promise<{ revision: string; type: string; data: string; meta: string }[]> => {
  const service = await startService();
  try {
    await closedLoop({ host: service.url.hostname, port: Number(service.url.port), connections: 1, request: createRequest(service, 'model') }, 0.2);
    const closed = spawnSync(process.execPath, [OPERATOR, '--yes', 'settlement', 'close'], {
      env: { ...process.env, DATA_DIR: service.dataDir, LOG_LEVEL: 'error' },
    });
    if (closed.status !== 0) throw new Error(closed.stderr.toString());
    const { rows } = await service.pool.query<{ revision: string; type: string; data: string; meta: string }>(
      `select revision, type, data::text as data, meta::text as meta from es.events
       where stream_id = (select stream_id from es.events where type = 'PaymentSettled' order by position limit 1) order by revision`,
    );
    return rows;
  } finally {
    await service.stop();
  }
};

const model = await modelPayment();
const directory = await mkdtemp(join(tmpdir(), 'payfold-bench-'));
const postgres = await startEmbeddedPostgres(join(directory, 'postgres'), {});
const pool = createPool(postgres.url, { name: 'bench', max: 8, statementTimeoutMs: 0, searchPath: searchPathOf(READ_MODELS) });
const store = createPostgresEventStore(postgres.url);
try {
  await migrate(pool, MIGRATIONS);
  await prepareReadModels(pool, READ_MODELS, store);
  await refuseWithoutFsync(pool);
  // Each payment gets its own references and transaction ids. The register and settlement find a payment by them.
  const names = [
    ...new Set(model.flatMap(({ data }) => [...data.matchAll(/"(?:charge|reversal|transactionId)":"([^"]+)"/g)].map(([, name]) => name!))),
  ];
  const own = names.reduce((sql, name) => `replace(${sql}, '${name}', substr(md5(s.stream_id || '${name}'), 1, 20))`, 'm.data::text');
  await pool.query('create table model (revision bigint, type text, data json, meta json)');
  for (const row of model) await pool.query('insert into model values ($1, $2, $3, $4)', [row.revision, row.type, row.data, row.meta]);
  await pool.query(
    `insert into es.events (position, stream_id, revision, event_id, type, data, meta)
     select (s.n - 1) * $2::int + m.revision + 1, s.stream_id, m.revision, gen_random_uuid(), m.type, (${own})::json,
            jsonb_set(m.meta::jsonb, '{recordedAt}', to_jsonb(to_char('2026-01-01'::timestamptz + s.n * interval '10 ms', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')))::json
     from (select n, 'payment-' || ${TIMELY_ID} as stream_id from generate_series(1, $1::int) n) s cross join model m`,
    [payments, model.length],
  );
  await pool.query('update es.head set position = (select max(position) from es.events)');
  await pool.query('vacuum analyze es.events');
  await printSettings(pool);
  const events = payments * model.length;
  const head = (await store.head())!;
  const keys = newKeyRing();
  const ports = { store, db: pool, keys, folder: join(directory, 'heads'), headFolder: join(directory, 'heads'), now: () => Date.now() };
  const timed = async (work: () => Promise<unknown>): Promise<number> => {
    const started = performance.now();
    await work();
    return (performance.now() - started) / 1_000;
  };
  const project = (projection: Projection, name = projection.name) =>
    timed(() => createSubscriber(projection, { store, checkpoint: postgresCheckpoint(pool, name) }).runUntil(head, { timeoutMs: RUN_MS }));
  const projectModel = (model: ReadModel) => project(model, checkpointOf(model));
  const again = async (model: ReadModel) => {
    await transaction(pool, async (client) => {
      await client.query(`truncate ${model.tables.join(', ')}`);
      await resetCheckpoint(client, checkpointOf(model), null);
    });
    return projectModel(model);
  };

  // Choose payments from the whole log. Most of them are then in no cache of the database.
  const { rows: some } = await pool.query<{ payment_id: string }>(
    `select substr(stream_id, 9) as payment_id from es.events where position in (select 1 + floor(random() * $1)::bigint from generate_series(1, $2::int))`,
    [events, READS],
  );
  const reads: number[] = [];
  for (const { payment_id: id } of some)
    reads.push(1_000 * (await timed(() => paymentAsOf(store, EVERYTHING, id, { asOf: '2026-06-01T00:00:00.000Z' }))));
  reads.sort((a, b) => a - b);
  console.log(
    `a payment as of an instant, ${events} events in the log, ${reads.length} reads: median ${reads[Math.floor(reads.length / 2)]!.toFixed(2)} ms, p99 ${reads[Math.floor(reads.length * 0.99)]!.toFixed(2)} ms (ceiling 5)`,
  );

  const measureBooks = async () => {
    // Measure the list before and after the journal. Other work on the machine then affects both figures.
    const first = await projectModel(paymentListModel);
    const journal = await projectModel(journalModel);
    const second = await again(paymentListModel);
    const listRate = events / ((first + second) / 2);
    console.log(
      `projections, ${events} events: list ${listRate.toFixed(0)}/s, journal ${(events / journal).toFixed(0)}/s; ratio ${(events / journal / listRate).toFixed(2)} (floor 0.5)`,
    );

    const lines = await projectModel(lineRegisterModel);
    const rebuilt = (model: ReadModel) => timed(() => rebuild(model, { store, pool, now: () => Date.now() }));
    const [journalAgain, linesAgain] = [await rebuilt(journalModel), await rebuilt(lineRegisterModel)];
    console.log(
      `line items: followed ${(events / lines).toFixed(0)}/s, ratio to the journal ${(journal / lines).toFixed(2)}; rebuilt ${(events / linesAgain).toFixed(0)}/s, ratio to a rebuild of the journal ${(journalAgain / linesAgain).toFixed(2)} (floor 1)`,
    );

    await projectModel(paymentRegisterModel);
    // This history has no settlement streams. Fill the column that their events would fill.
    await pool.query(
      `update gateway_transaction g set settled_batch_id = m.data->>'batchId' from model m where m.type = 'PaymentSettled' and m.data->>'leg' = g.leg`,
    );
    await pool.query('vacuum analyze');
    const sealing = await project(logSeal);
    const plain = async () => {
      for await (const batch of store.readAll(null, { until: head })) for (const event of batch) eventHash(event);
    };
    const baseline = await timed(plain);
    let ok = false;
    const verified = await timed(async () => void (ok = (await verifyLog(ports)).checks.every((check) => check.ok)));
    const rest = await timed(plain);
    const plainRate = events / ((baseline + rest) / 2);
    console.log(
      `sealing ${(events / sealing).toFixed(0)}/s; verification ${(events / verified).toFixed(0)}/s, reading and hashing alone ${plainRate.toFixed(0)}/s; ratio ${(events / verified / plainRate).toFixed(2)} (floor 0.7); ${ok ? 'ok' : 'NOT OK'}`,
    );

    const measureExport = async (report: ReportName): Promise<void> => {
      globalThis.gc?.();
      const idle = await rssMib(process.pid);
      let most = idle;
      let pieces = 0;
      const made = exportReport({ store, db: pool }, EVERYTHING, report, 'csv', { from: null, to: null, asOf: null, after: null }, head);
      const cpuExport = process.cpuUsage();
      const exporting = await timed(async () => {
        for await (const _piece of made.pieces) if (pieces++ % 20 === 0) most = Math.max(most, await rssMib(process.pid));
      });
      const busy = process.cpuUsage(cpuExport);
      const { rows } = await made.manifest();
      console.log(
        `export of ${report}: ${rows} rows, ${(rows / exporting).toFixed(0)}/s (floor 50000), ${((rows * 1e6) / (busy.user + busy.system)).toFixed(0)} per second of our core; memory ${(most - idle).toFixed(0)} MiB above idle (ceiling 150)`,
      );
    };
    await measureExport('payments');
    await measureExport('line-items');

    let differences = 0;
    const before = process.cpuUsage();
    const drift = await timed(async () => void (differences = (await findDrift(ports)).differences.length));
    const spent = process.cpuUsage(before);
    console.log(
      `drift over ${payments} payments: ${drift.toFixed(1)} s, ${(payments / drift).toFixed(0)} payments/s (floor 8333), ${((payments * 1e6) / (spent.user + spent.system)).toFixed(0)} per second of our core, ${differences} differences`,
    );
    const pass = await beginPass(ports, null, { size: events, position: head });
    const idleBefore = await rssMib(process.pid);
    let peak = idleBefore;
    let pages = 0;
    const cpuBefore = process.cpuUsage();
    const whole = await timed(async () => {
      for await (const _page of runPass(ports, pass, { eventsAtOnce: 16_384, paymentsAtOnce: 100 }))
        if (pages++ % 20 === 0) peak = Math.max(peak, await rssMib(process.pid));
    });
    const cpu = process.cpuUsage(cpuBefore);
    const failed = passChecks(pass).filter((check) => !check.ok);
    console.log(
      `full verification pass: ${(events / whole).toFixed(0)} events/s (floor 20000), ${((cpu.user + cpu.system) / 1_000 / events).toFixed(4)} ms of our processor an event; memory ${peak.toFixed(0)} MiB (ceiling 300); ${failed.length === 0 ? 'ok' : failed.map(({ name, detail }) => `${name}: ${detail}`).join('; ')}`,
    );
    if (!ok || differences > 0 || failed.length > 0) process.exitCode = 1;
  };
  if (!values['as-of']) await measureBooks();
} finally {
  await pool.end();
  await store.close();
  await postgres.stop();
  await rm(directory, { recursive: true, force: true });
}
