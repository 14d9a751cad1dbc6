/**
 * Measures webhook delivery with one worker process, 20 endpoints and a Postgres that fsyncs. The receivers use real TLS and run in another process
 * on the same machine.
 *
 *     node dist/bench/webhooks.js [--deliveries 20000] [--rows 1000000] [--pending 100000]
 *
 * - Deliveries per second, with all endpoints healthy and with one of 20 hanging.
 * - Time to the first attempt, at a steady rate, while another endpoint hangs.
 * - Time from the outbox to the POST while idle.
 * - A claim over a table of a million rows.
 * - Memory of the worker with 100,000 deliveries waiting.
 *
 * If a figure is worse than its limit, the exit code is 1.
 */
import { type ChildProcess, fork } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { createServer } from 'node:https';
import { chmod, mkdtemp, readFile, rm, writeFile } from 'node:fs/promises';
import type { AddressInfo } from 'node:net';
import { cpus, loadavg, tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { createPostgresEventStore, eventStoreMigrations } from '#eventstore';
import { systemClock } from '#kernel';
import {
  createLogger,
  createPersonalKeys,
  createPool,
  migrate,
  type Pool,
  postgresPersonalKeyRows,
  readConfig,
  readOrCreateKeyRing,
  startEmbeddedPostgres,
  systemIds,
} from '#platform';
import { createDispatcher, createResolve, createSender, postgresDeliveries, postgresDueSignal, webhookMigrations } from '#webhooks';
import { startNameServer } from '../test/support/name-server.js';
import { createAuthority } from '../test/support/receiver.js';
import { refuseWithoutFsync } from './pgbench.js';
import { rssMib } from './service.js';

const ENDPOINTS = 20;
const HANGING = 0;
const RATE_PER_SECOND = 300;
const RATE_SECONDS = 15;
const IDLE_EVENTS = 60;
const CLAIM_ENDPOINTS = 200;
const CLAIM_PENDING = 60_000;
const BARS = { perSecond: 1_000, hangingShare: 0.6, firstAttemptMs: 2_000, idleMs: 500, claimMs: 5, memoryGrowthMib: 64 } as const;

const hostOf = (endpoint: number) => `e${endpoint}.receiver.test`;
const print = (line: string) => process.stdout.write(`${line}\n`);
const sleep = (ms: number) => new Promise((wake) => setTimeout(wake, ms));
const quantile = (values: readonly number[], q: number) =>
  [...values].sort((a, b) => a - b)[Math.min(values.length - 1, Math.floor(values.length * q))]!;

/** A receiver that answers every POST with status 200, except on `/hang`, where it never answers. Its name server knows every endpoint. */
const receive = async (directory: string): Promise<void> => {
  const names = await startNameServer();
  for (let endpoint = 0; endpoint < CLAIM_ENDPOINTS; endpoint++) names.answer(hostOf(endpoint), { addresses: ['127.0.0.1'], ttl: 300 });
  const server = createServer({
    key: readFileSync(join(directory, 'key.pem')),
    cert: readFileSync(join(directory, 'cert.pem')),
    keepAliveTimeout: 60_000,
  });
  server.on('request', (request, response) => {
    request.resume();
    if (request.url !== '/hang') request.on('end', () => response.writeHead(200).end());
  });
  server.listen(0, '127.0.0.1', () => process.send!({ port: (server.address() as AddressInfo).port, names: names.address }));
};

/** The dispatcher, as it runs in a worker. */
const work = (databaseUrl: string): void => {
  const config = readConfig();
  const clock = systemClock;
  const pool = createPool(databaseUrl, { name: 'webhooks', max: 5 });
  const keys = readOrCreateKeyRing(config.masterKeyFile);
  const log = createLogger('error', 'bench');
  const ids = systemIds(() => clock.now());
  const personal = createPersonalKeys(postgresPersonalKeyRows(pool), { keys, ids, clock, log });
  const payloads = { store: createPostgresEventStore(databaseUrl), personal };
  const dispatcher = createDispatcher({
    deliveries: postgresDeliveries(pool, ids.uuid()),
    sender: createSender({ settings: config.webhooks, resolve: createResolve(config.webhooks.dnsServers, clock), clock }),
    due: postgresDueSignal(pool),
    payloads,
    keys,
    clock,
    log,
    watch: { attempted: () => undefined, leaseLost: () => undefined },
    retrySeconds: config.webhooks.retrySeconds,
  });
  dispatcher.start();
  process.send!({ ready: true });
  process.once('SIGTERM', () => void dispatcher.stop().then(() => process.exit(0)));
};

const child = <T>(args: readonly string[], env: NodeJS.ProcessEnv): Promise<{ process: ChildProcess; message: T }> =>
  new Promise((resolve, reject) => {
    const started = fork(fileURLToPath(import.meta.url), args, { env, execArgv: ['--enable-source-maps'] });
    started.once('message', (message) => resolve({ process: started, message: message as T }));
    started.once('exit', (code) => reject(new Error(`a process of the benchmark ended with ${code}`)));
  });

const stopped = async (process: ChildProcess): Promise<void> => {
  if (process.exitCode !== null || process.signalCode !== null) return;
  const exited = new Promise((done) => process.once('exit', done));
  process.kill('SIGTERM');
  await exited;
};

/** Writes `count` events with one delivery each, as the outbox does, spread evenly over the endpoints. */
const enqueue = async (pool: Pool, count: number, endpoints = ENDPOINTS): Promise<void> => {
  await pool.query(
    `with n as (select n, 'evt_' || encode(sha256(gen_random_uuid()::text::bytea), 'hex') as id from generate_series(1, $1::int) n),
     event as (
       insert into webhook_event (id, type, account_id, payment_id, payload, created_at, stream, revision)
       select id, 'payment.refunded', $3::uuid, gen_random_uuid(),
              convert_to('{"id":"' || id || '","type":"payment.refunded","createdAt":"2026-11-20T10:00:00.000Z","data":{"id":"7b0c2f5e-6f0a-4a86-9a56-0d7c9a1f2b11","reversalType":"refund","amountCents":12500,"currency":"USD","reason":"duplicate","initiatedBy":"staff"}}', 'UTF8'),
              now(), 'payment-' || id, 1 from n),
     endpoint as (select id, row_number() over (order by url) - 1 as number from webhook_endpoint)
     insert into webhook_delivery (event_id, endpoint_id) select n.id, e.id from n join endpoint e on e.number = n.n % $2::int`,
    [count, endpoints, ACCOUNT],
  );
  await pool.query(`select pg_notify('webhook_due', '')`);
};

const ACCOUNT = '0190c1f2-8f52-7b3e-9c61-2f0d8a6b7c11';
const HEALTHY = `endpoint_id in (select id from webhook_endpoint where url not like '%/hang')`;

const count = async (pool: Pool, where: string): Promise<number> =>
  Number((await pool.query<{ count: string }>(`select count(*) as count from webhook_delivery where ${where}`)).rows[0]!.count);
const emptied = (pool: Pool) => pool.query('truncate webhook_attempt, webhook_delivery, webhook_event cascade');

const drained = async (pool: Pool): Promise<void> => {
  while ((await count(pool, `state in ('pending', 'in_flight') and ${HEALTHY}`)) > 0) await sleep(100);
};

/** Deliveries per second, from the first attempt to the last success. */
const rateOf = async (pool: Pool): Promise<number> => {
  const { rows } = await pool.query<{ rate: string }>(
    `select count(*) / extract(epoch from max(d.delivered_at) - min(a.started_at)) as rate
     from webhook_delivery d join webhook_attempt a on a.delivery_id = d.id where d.state = 'delivered' and d.${HEALTHY}`,
  );
  return Number(rows[0]!.rate);
};

const firstAttempts = async (pool: Pool): Promise<number[]> => {
  const { rows } = await pool.query<{ ms: string }>(
    `select extract(epoch from a.started_at - d.created_at) * 1000 as ms from webhook_delivery d
     join webhook_attempt a on a.delivery_id = d.id and a.round = 1 and a.attempt = 1 where d.${HEALTHY}`,
  );
  return rows.map(({ ms }) => Number(ms));
};

const hang = (pool: Pool, hanging: boolean) =>
  pool.query(`update webhook_endpoint set consecutive_failures = 0, url = regexp_replace(url, '/[a-z]*$', $2) where url like $1`, [
    `https://${hostOf(HANGING)}:%`,
    hanging ? '/hang' : '/hook',
  ]);

const run = async (directory: string): Promise<boolean> => {
  const { values } = parseArgs({
    options: {
      deliveries: { type: 'string', default: '20000' },
      rows: { type: 'string', default: '1000000' },
      pending: { type: 'string', default: '100000' },
    },
  });
  const [deliveries, rows, pending] = [Number(values.deliveries), Number(values.rows), Number(values.pending)];
  await chmod(directory, 0o755);
  const authority = await createAuthority();
  const { key, cert } = await authority.issue('*.receiver.test');
  for (const [name, text] of Object.entries({ 'ca.pem': authority.cert, 'key.pem': key, 'cert.pem': cert }))
    await writeFile(join(directory, name), text);
  const postgres = await startEmbeddedPostgres(join(directory, 'postgres'));
  const pool = createPool(postgres.url, { name: 'bench', max: 4, statementTimeoutMs: 0 });
  const children: ChildProcess[] = [];
  const figures: { name: string; value: number; bar: number; ok: boolean; unit: string }[] = [];
  const figure = (name: string, value: number, bar: number, unit: string, atLeast = false) => {
    const ok = atLeast ? value >= bar : value <= bar;
    figures.push({ name, value, bar, ok, unit });
    print(`${name}: ${value.toFixed(value < 10 ? 2 : 0)} ${unit} (bar ${atLeast ? '≥' : '≤'} ${bar}) ${ok ? '' : 'MISSED'}`);
  };
  try {
    await refuseWithoutFsync(pool);
    await migrate(pool, [...eventStoreMigrations, ...webhookMigrations]);
    const receiver = await child<{ port: number; names: string }>(['receive', directory], process.env);
    children.push(receiver.process);
    const { port, names } = receiver.message;
    const env = {
      ...process.env,
      DATA_DIR: directory,
      WEBHOOK_PRIVATE_TARGETS: Array.from({ length: CLAIM_ENDPOINTS }, (_, n) => `${hostOf(n)}:${port}=127.0.0.1/32`).join(','),
      WEBHOOK_EXTRA_CA_FILE: join(directory, 'ca.pem'),
      WEBHOOK_DNS_SERVERS: names,
    };
    const keys = readOrCreateKeyRing(readConfig(env).masterKeyFile);
    const ids = systemIds(() => Date.now());
    const addEndpoints = async (from: number, to: number) => {
      for (let number = from; number < to; number++) {
        const [endpointId, secretId] = [ids.uuid(), ids.uuid()];
        await pool.query(`insert into webhook_endpoint (id, account_id, url, created_at, registered_at_position) values ($1, $2, $3, now(), '')`, [
          endpointId,
          ACCOUNT,
          `https://${hostOf(number)}:${port}/hook`,
        ]);
        const { kid, ciphertext } = keys.seal(`whsec_bench${number}`, `webhook_endpoint_secret/${secretId}/ciphertext`);
        await pool.query(
          `insert into webhook_endpoint_secret (id, endpoint_id, kid, ciphertext, hint, state, created_at) values ($1, $2, $3, $4, '', 'active', now())`,
          [secretId, endpointId, kid, ciphertext],
        );
      }
    };
    const startWorker = async () => {
      const worker = await child(['work', postgres.url], env);
      children.push(worker.process);
      return worker.process;
    };
    await addEndpoints(0, ENDPOINTS);
    print(
      `${cpus().length} cores (${cpus()[0]?.model ?? 'unknown'}), Node ${process.version}, load ${loadavg()
        .map((one) => one.toFixed(1))
        .join(' ')}`,
    );

    // Throughput with all endpoints healthy.
    let worker = await startWorker();
    await enqueue(pool, 2_000);
    await drained(pool);
    await emptied(pool);
    await enqueue(pool, deliveries);
    await drained(pool);
    const healthy = await rateOf(pool);
    figure('deliveries over TLS, one worker', healthy, BARS.perSecond, 'per second', true);

    // One of 20 endpoints hangs.
    await emptied(pool);
    await hang(pool, true);
    await enqueue(pool, deliveries);
    await drained(pool);
    const hanging = await rateOf(pool);
    figure(`share of it while 1 of ${ENDPOINTS} endpoints hangs (${hanging.toFixed(0)} per second)`, hanging / healthy, BARS.hangingShare, '', true);

    // A steady rate while one endpoint hangs.
    await stopped(worker);
    await emptied(pool);
    worker = await startWorker();
    for (let tick = 0; tick < RATE_SECONDS * 10; tick++) {
      const next = performance.now() + 100;
      await enqueue(pool, RATE_PER_SECOND / 10);
      await sleep(Math.max(0, next - performance.now()));
    }
    await drained(pool);
    figure(
      `first attempt at ${RATE_PER_SECOND}/s beside a hanging endpoint, p95`,
      quantile(await firstAttempts(pool), 0.95),
      BARS.firstAttemptMs,
      'ms',
    );

    // Idle.
    await stopped(worker);
    await hang(pool, false);
    await emptied(pool);
    worker = await startWorker();
    await sleep(1_000);
    for (let event = 0; event < IDLE_EVENTS; event++) {
      await enqueue(pool, 1);
      await sleep(150);
    }
    await drained(pool);
    figure('from the outbox to the POST while idle, p95', quantile(await firstAttempts(pool), 0.95), BARS.idleMs, 'ms');

    // Memory of the worker with 5,000 deliveries waiting, and with `--pending`.
    const mostMib = async (waiting: number): Promise<number> => {
      await emptied(pool);
      await enqueue(pool, waiting);
      let most = 0;
      const begun = performance.now();
      while (performance.now() - begun < 20_000 && (await count(pool, `state = 'pending'`)) > 0) {
        most = Math.max(most, await rssMib(worker.pid!));
        await sleep(100);
      }
      return most;
    };
    const few = await mostMib(5_000);
    const many = await mostMib(pending);
    figure(
      `memory of the worker, ${few.toFixed(0)} MiB with 5000 waiting, ${many.toFixed(0)} MiB with ${pending}; growth`,
      many - few,
      BARS.memoryGrowthMib,
      'MiB',
    );
    await stopped(worker);

    // A claim over a large table.
    await emptied(pool);
    await addEndpoints(ENDPOINTS, CLAIM_ENDPOINTS);
    await enqueue(pool, rows, CLAIM_ENDPOINTS);
    await pool.query(
      `update webhook_delivery set state = 'delivered', delivered_at = now() where id not in (select id from webhook_delivery order by id desc limit $1)`,
      [CLAIM_PENDING],
    );
    await pool.query('vacuum analyze webhook_delivery, webhook_event');
    const claims = postgresDeliveries(pool, 'bench');
    const took: number[] = [];
    for (let round = 0; round < 200; round++) {
      const started = performance.now();
      const claimed = await claims.claimDue(128);
      took.push(performance.now() - started);
      if (claimed.length !== 128) throw new Error(`claimed ${claimed.length}`);
      await claims.release(claimed, 0);
    }
    figure(
      `a claim of 128 of ${CLAIM_PENDING} pending in ${rows} rows, median (p95 ${quantile(took, 0.95).toFixed(1)} ms)`,
      quantile(took, 0.5),
      BARS.claimMs,
      'ms',
    );
    const single: number[] = [];
    for (let round = 0; round < 200; round++) {
      const started = performance.now();
      const claimed = await claims.claimDue(8);
      single.push(performance.now() - started);
      await claims.release(claimed, 0);
    }
    print(`a claim of 8: median ${quantile(single, 0.5).toFixed(2)} ms, p95 ${quantile(single, 0.95).toFixed(2)} ms`);
    print(
      `load ${loadavg()
        .map((one) => one.toFixed(1))
        .join(' ')} of ${(await readFile('/proc/loadavg', 'utf8').catch(() => '')).trim()}`,
    );
    print(JSON.stringify({ bench: 'webhooks', figures }));
    return figures.every(({ ok }) => ok);
  } finally {
    for (const one of children) one.kill('SIGKILL');
    await pool.end();
    await postgres.stop();
  }
};

const [, , role, argument] = process.argv;
if (role === 'receive') await receive(argument!);
else if (role === 'work') work(argument!);
else {
  const directory = await mkdtemp(join(tmpdir(), 'payfold-bench-'));
  try {
    if (!(await run(directory))) process.exitCode = 1;
  } catch (error) {
    process.stderr.write(`${(error as Error).stack}\n`);
    process.exitCode = 1;
  } finally {
    await rm(directory, { recursive: true, force: true });
  }
}
