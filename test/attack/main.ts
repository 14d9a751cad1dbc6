/**
 * `npm run attack -- [--only audit,checkout,connections,tenants] [--seconds S] [--rest S] [--control]`: starts the built service with the limits of
 * production, and plays the floods of `floods.ts` against it. Meanwhile an honest client creates and lists payments, opens the page of a checkout, and
 * asks whether the service is ready. Prints a table, and writes a line to `reports/attack.ndjson`. Exit 1 if a gate fails.
 *
 * `--control`: before each flood, plays it against a bare HTTP server on the same machine, while the honest client uses the service. So the table
 * shows how much a flood delays the client if it goes elsewhere.
 */
import { fork } from 'node:child_process';
import { once } from 'node:events';
import { parseArgs } from 'node:util';
import pg from 'pg';
import { searchPathOf } from '#eventstore';
import { freePort } from '#platform';
import { READ_MODELS } from '../../apps/services.js';
import { openLoop, percentile } from '../../bench/load.js';
import { intakeOf, Payer, SHOP } from '../support/checkout.js';
import { eventually } from '../support/eventually.js';
import { descriptorsOf, forgetPeak, memoryOf, peakMemoryOf } from '../support/flood.js';
import { DataDir, launch, newKey, type RunningProcess, runtimeOf, start, welcomeOf } from '../support/processes.js';
import { writeReport } from '../support/report.js';
import { PAYMENTS, paymentOf } from '../support/service.js';
import { type Answers, begin, FLOODS, type Target } from './floods.js';

const { values } = parseArgs({
  options: {
    only: { type: 'string', default: 'audit,checkout,connections,tenants' },
    seconds: { type: 'string', default: '20' },
    rest: { type: 'string', default: '60' },
    control: { type: 'boolean', default: false },
  },
});
const seconds = Number(values.seconds);
const restMs = Number(values.rest) * 1_000;

// The gates.
const MAX_P99_MS = 250;
/** Beside another account that floods the API: a multiple of the quiet p99, and ms. */
const MAX_BESIDE = { times: 5, moreMs: 25 } as const;
const MAX_MEMORY_MIB = 400;
/** Memory and descriptors after the rest, as a share of those before. */
const MAX_LEFT = 1.1;

/** Requests of each kind a second. */
const HONEST_RATE = 10;
const HONEST_CONNECTIONS = 4;
/** Longer than this, an honest request counts as never answered. */
const GIVE_UP_MS = 60_000;
/** Payments that an export reads. Fewer would fit into the buffers of a connection. */
const EXPORTED = 40_000;
const LISTED = 100;
/** The limits of hosted checkout, which are off in a sandbox. */
const LIMITS = { CHECKOUT_RATE_PER_ADDRESS: '60', CHECKOUT_UNSIGNED_PER_PORTAL: '300', CHECKOUT_DECLINES_PER_PORTAL: '30' };
const LAUNCHER = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname.replace('/dist/', '/');

interface Measured {
  /** In milliseconds, by kind of request. */
  readonly p99: Readonly<Record<string, number>>;
  /** Honest requests that were refused or not answered, by kind and status. */
  readonly refused: Readonly<Record<string, number>>;
  readonly memoryMib: number;
  readonly descriptors: number;
}

const WIDTHS = [70, 8, 11, 9, 18, 11, 6, 12, 0];
const said = (answers: Answers): string => [...answers].map(([answer, number]) => `${number} × ${answer}`).join(', ');
const print = (cells: readonly string[]): void => console.log(cells.map((cell, index) => cell.padEnd(WIDTHS[index]!)).join(' '));

/** Makes the account that attacks, an audit key, a portal with hosted checkout, and payments to list and export. */
const prepare = async (
  dataDir: DataDir,
  service: RunningProcess,
  auditPort: number,
  honest: { apiKey: string; portalId: string },
): Promise<Target> => {
  const { apiKey, portalId } = honest;
  const payfold = async <T>(...args: string[]): Promise<T> => {
    const { code, stdout, stderr } = await launch([LAUNCHER, ...args, '--json', '--yes'], dataDir, { LOG_LEVEL: 'silent' }).exited;
    if (code !== 0) throw new Error(`payfold ${args.join(' ')}: ${stderr}`);
    return JSON.parse(stdout) as T;
  };
  const { accountId } = await payfold<{ accountId: string }>('accounts', 'create', '--name', 'Attacker');
  const attacker = {
    apiKey: (await payfold<{ apiKey: string }>('keys', 'issue', '--account', accountId)).apiKey,
    portalId: (await payfold<{ portalId: string }>('portals', 'create', '--account', accountId, '--name', 'Attacker')).portalId,
  };
  const { auditKey } = await payfold<{ auditKey: string }>('audit', 'keys', 'issue', '--name', 'Finance', '--role', 'finance');
  await payfold('portals', 'checkout', portalId, '--enable', '--allow', `${SHOP}/pay`);
  for (const [key, portal] of [
    [apiKey, portalId],
    [attacker.apiKey, attacker.portalId],
  ] as const)
    for (let paid = 0; paid < LISTED; paid++) {
      const body = JSON.stringify(paymentOf(portal));
      await fetch(service.url + PAYMENTS, { method: 'POST', headers: { authorization: `ApiKey ${key}`, 'content-type': 'application/json' }, body });
    }
  const db = new pg.Client({ connectionString: runtimeOf(dataDir).databaseUrl, options: `-c search_path=${searchPathOf(READ_MODELS).join(',')}` });
  await db.connect();
  await eventually(async () => (await db.query('select from payment_list')).rowCount! >= 2 * LISTED);
  await db.query(
    `insert into payment_list (payment_id, account_id, portal_id, created_at, status, revision, state)
     select gen_random_uuid(), gen_random_uuid(), portal_id, created_at - n * interval '1 second', status, revision, state
     from (select * from payment_list limit 1) one, generate_series(1, $1::int) n`,
    [EXPORTED],
  );
  await db.end();
  return { url: service.url, auditUrl: `http://127.0.0.1:${auditPort}`, auditor: `AuditKey ${auditKey}`, attacker, portalId };
};

/** The requests of the honest client, by kind. */
const honestRequests = async ({ url, portalId }: Target, apiKey: string): Promise<Readonly<Record<string, () => string>>> => {
  const payer = new Payer(url);
  const path = `/checkout/${await payer.begin(intakeOf({ portalId }))}`;
  const cookie = payer.cookies.get(path)!;
  const ask = (method: string, target: string, lines: readonly string[] = [], body = '') =>
    [`${method} ${target} HTTP/1.1`, `host: ${new URL(url).host}`, `authorization: ApiKey ${apiKey}`, ...lines, '', body].join('\r\n');
  const body = JSON.stringify(paymentOf(portalId));
  const json = ['content-type: application/json', `content-length: ${Buffer.byteLength(body)}`];
  return {
    create: () => ask('POST', PAYMENTS, [...json, `idempotency-key: ${newKey('honest')}`], body),
    list: () => ask('GET', `${PAYMENTS}?limit=20`),
    'checkout page': () => ask('GET', path, [`cookie: ${cookie}`]),
    readyz: () => ask('GET', '/readyz'),
  };
};

/** Starts the bare server of `--control`. */
const startBare = async (): Promise<{ readonly url: string; stop(): void }> => {
  const child = fork(new URL('./bare.js', import.meta.url));
  const ended = once(child, 'exit').then(([code]) => Promise.reject(new Error(`the bare server ended with ${code}`)));
  const [port] = (await Promise.race([once(child, 'message'), ended])) as [number];
  ended.catch(() => undefined);
  return { url: `http://127.0.0.1:${port}`, stop: () => child.kill() };
};

const attack = async (dataDir: DataDir): Promise<void> => {
  const [auditPort, metricsPort] = [await freePort(), await freePort()];
  const service = await start('standalone', dataDir, {
    ...LIMITS,
    LOG_LEVEL: 'error',
    AUDIT_PORT: String(auditPort),
    METRICS_PORT: String(metricsPort),
  });
  const { apiKey, portalId } = welcomeOf(service.stdout())!;
  const target = await prepare(dataDir, service, auditPort, { apiKey, portalId });
  const honest = await honestRequests(target, apiKey);
  const pid = service.children().find(({ args }) => args.includes('api/main.js'))!.pid;

  const measure = async (): Promise<Measured> => {
    forgetPeak(pid);
    const p99: Record<string, number> = {};
    const refused: Record<string, number> = {};
    await Promise.all(
      Object.entries(honest).map(async ([kind, request]) => {
        const load = { host: new URL(target.url).hostname, port: Number(new URL(target.url).port), connections: HONEST_CONNECTIONS, request };
        const stop = new AbortController();
        const never = new Promise<null>((resolve) => setTimeout(resolve, seconds * 1_000 + GIVE_UP_MS, null).unref());
        const result = await Promise.race([openLoop(load, HONEST_RATE, seconds, undefined, stop.signal), never]).catch(() => null);
        stop.abort();
        p99[kind] = result === null ? Number.POSITIVE_INFINITY : Math.round(percentile(result.latencies, 0.99));
        if (result === null) refused[`${kind} unanswered`] = 1;
        for (const [status, number] of result?.statuses ?? []) if (status !== 200) refused[`${kind} ${status}`] = number;
      }),
    );
    return { p99, refused, memoryMib: Math.round(peakMemoryOf(pid)), descriptors: descriptorsOf(pid) };
  };
  const atRest = async (): Promise<Measured> => ({ ...(await measure()), memoryMib: Math.round(memoryOf(pid)) });

  // The first measurement warms the service up.
  await measure();
  const before = await atRest();
  const kinds = Object.keys(honest);
  print(['flood', 'when', ...kinds.map((kind) => `${kind} p99`), 'MiB', 'descriptors', 'answers to the flood']);
  const row = (name: string, when: string, { p99, memoryMib, descriptors }: Measured, more = '') =>
    print([name, when, ...kinds.map((kind) => String(p99[kind])), String(memoryMib), String(descriptors), more]);
  row('none', 'before', before);
  const failed: string[] = [];
  const floods = [];
  for (const { name, group } of FLOODS.filter((flood) => values.only.split(',').includes(flood.group))) {
    let control: Measured | null = null;
    if (values.control) {
      const bare = await startBare();
      const elsewhere = begin(name, { ...target, url: bare.url, auditUrl: bare.url });
      control = await measure();
      const answers = await elsewhere.end();
      bare.stop();
      row(name, 'control', control, said(answers));
    }
    const begun = begin(name, target);
    const during = await measure();
    const answers = await begun.end();
    row(name, 'during', during, said(answers));
    await new Promise((wake) => setTimeout(wake, restMs));
    const after = await atRest();
    row('', 'after', after);
    // A customer's own work is not an attack: it may use memory, and each kind of request is compared with its quiet time.
    const isCustomer = group === 'tenants';
    const limitMs = (kind: string) => (isCustomer ? before.p99[kind]! * MAX_BESIDE.times + MAX_BESIDE.moreMs : MAX_P99_MS);
    const faults = [
      ...Object.entries(during.p99).flatMap(([kind, ms]) => (ms > limitMs(kind) ? [`${kind}: p99 ${ms} ms, limit ${limitMs(kind)}`] : [])),
      ...Object.entries({ ...during.refused, ...after.refused }).map(([kind, number]) => `${kind}: ${number} times`),
      ...(during.memoryMib > MAX_MEMORY_MIB && !isCustomer ? [`memory ${during.memoryMib} MiB`] : []),
      ...(after.memoryMib > before.memoryMib * MAX_LEFT && !isCustomer
        ? [`memory ${after.memoryMib} MiB afterwards, ${before.memoryMib} before`]
        : []),
      ...(after.descriptors > before.descriptors * MAX_LEFT ? [`${after.descriptors} descriptors afterwards, ${before.descriptors} before`] : []),
    ];
    failed.push(...faults.map((fault) => `${name}: ${fault}`));
    floods.push({ name, control, during, after, answers: Object.fromEntries(answers) });
  }
  await service.stop();
  for (const fault of failed) console.log(`✗ ${fault}`);
  console.log(failed.length === 0 ? 'every gate is met' : `${failed.length} gates failed`);
  writeReport('attack', { seconds, restSeconds: restMs / 1_000, before, floods, failed });
  if (failed.length > 0) process.exitCode = 1;
};

const dataDir = await DataDir.create();
try {
  await attack(dataDir);
} finally {
  await dataDir.remove();
}
