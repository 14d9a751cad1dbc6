/** The measurements of `bench -- year`: each request, report, closing, verification and idle loop that must not cost more in a larger store. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { logState, REPORTS, rootOf, signHead, storedTiles } from '#audit';
import type { Charged } from '#payments';
import { readKeyRing } from '#platform';
import { caughtUp } from './history.js';
import { openLoop, percentile } from './load.js';
import { type Operated, operate } from './operate.js';
import { countingPages } from './pages.js';
import { type BenchService, createRequest, getRequest, PARTS, processorMs, serviceMs } from './service.js';
import { settleBatch } from './settlement.js';
import { startOfDay } from './multiply.js';

/** What a figure must hold (docs/proof.md). `times`: of the same figure at the base size. The others hold at every size. */
export interface Gate {
  /** At most so many times the median at the base size. */
  readonly times?: number;
  readonly mostMs?: number;
  readonly mostP99?: number;
  readonly mostP95?: number;
  /** Processor time in milliseconds for an operation. */
  readonly mostCpuMs?: number;
  readonly mostMib?: number;
}

/** What an operation costs. null: not measured. */
export interface Figure {
  readonly name: string;
  /** Median of an operation in milliseconds. */
  readonly ms: number | null;
  readonly p99: number | null;
  readonly p95: number | null;
  /** Processor time of all processes for an operation, in milliseconds. */
  readonly cpuMs: number | null;
  /** Pages that Postgres reads for an operation. */
  readonly pages: number | null;
  readonly mib: number | null;
  readonly note: string | null;
  /** null: the figure explains others, and has no gate. */
  readonly gate: Gate | null;
}
const figure = (name: string, known: Partial<Figure>): Figure => ({
  name,
  ms: null,
  p99: null,
  p95: null,
  cpuMs: null,
  pages: null,
  mib: null,
  note: null,
  gate: null,
  ...known,
});

export interface Measured {
  readonly payments: number;
  readonly auditKey: string;
  readonly portalId: string;
  /** Milliseconds since 1970: the store ends at the midnight before. */
  readonly now: number;
  /** Seconds of each load. */
  readonly seconds: number;
  readonly idleSeconds: number;
  /** Lines of the settlement batch. 0: it is not measured. */
  readonly lines: number;
  readonly say: (line: string) => void;
}

const DAY_MS = 86_400_000;
/** Requests per second of each load. The service is far from its limit, so requests do not wait for each other. */
const RATE = 20;
const CREATES_RATE = 40;
const CONNECTIONS = 8;
const SAMPLED = 1_000;
/** Payments that are refunded must be new: the processor knows nothing of multiplied ones. */
const NEW_PAGES = 2;
const TIMES = 3;
const SETTLED_POLL_MS = 1_000;

/** Gates: what a figure may cost at any size, in times of the base size. */
const REQUEST: Gate = { times: 1.2 };
const BOOKS_OF_A_DAY: Gate = { times: 1.2 };
const REPORT: Gate = { times: 1.3 };
const READY: Gate = { times: 1.5 };
/** 2 % of a core. */
const IDLE: Gate = { mostCpuMs: 20 };
const SETTLEMENT: Gate = { mostMs: 60_000 };
const FIND: Gate = { mostP95: 20 };
/** Payments that are found by each name. */
const FINDS = 200;
const BESIDE_SETTLEMENT: Gate = { mostP99: 100 };
/** 20,000 events per second. */
const FULL_VERIFY_OF_1000: Gate = { mostMs: 50 };
const FULL_VERIFY: Gate = { mostMib: 300 };
/** Reports of the books of a day. The other reports may cost a little more. */
const BOOKS: readonly string[] = ['payable', 'fees', 'trial-balance'];

/** After a start, the worker records what fell due in the multiplied days: funding of batches, keys of the last day. */
export const atRest = async (service: BenchService): Promise<void> => {
  await caughtUp(service);
  for (;;) {
    const { rows } = await service.pool.query<{ rests: boolean }>(
      `select not exists (select from settlement_batch where not funded and funded_on <= current_date)
         and (select size from log_state) = (select position from es.head) as rests`,
    );
    if (rows[0]!.rests) break;
    await sleep(SETTLED_POLL_MS);
  }
  await caughtUp(service);
};

/** Collects figures, and says each at once. */
const recorder = (service: BenchService, say: (line: string) => void) => {
  const figures: Figure[] = [];
  const add = (name: string, known: Partial<Figure>) => {
    const one = figure(name, known);
    figures.push(one);
    say(`${name}: ${['ms', 'p99', 'cpuMs', 'pages', 'mib', 'note'].flatMap((key) => (one[key as 'ms'] === null ? [] : [`${key} ${typeof one[key as 'ms'] === 'number' ? one[key as 'ms']!.toFixed(1) : one.note}`])).join(', ')}`); // prettier-ignore
  };
  let idle = 0;
  /** Pages of the work, less what the idle service reads in the same time, once that is known. */
  const counting = async <T>(work: () => Promise<T>) => {
    const { result, pages, seconds } = await countingPages(service.pool, work);
    return { result, pages: Math.max(0, pages - idle * seconds) };
  };
  const addCommand = (name: string, run: Operated, cpuMs: number, known: Partial<Figure>) => {
    const failed = run.exitCode === 0 ? null : `exit ${run.exitCode}: ${(run.stderr || run.stdout).slice(0, 200)}`;
    add(name, { ms: 1_000 * run.seconds, cpuMs, mib: run.peakMib, ...known, note: failed ?? known.note ?? null });
  };
  return {
    figures,
    add,
    addCommand,
    counting,
    /** Pages that the idle service reads in a second. They count for no work. */
    idlePages: (pages: number) => void (idle = pages),
    /** `cpuMs` of the figure: of the command and of the whole service while it runs. */
    measureCommand: async (name: string, gate: Gate | null, ...args: readonly string[]) => {
      const cpu = serviceMs(service);
      const { result, pages } = await counting(() => operate(service, ...args));
      addCommand(name, result, result.cpuMs + serviceMs(service) - cpu, { pages, gate });
      return result;
    },
  };
};

/** `service` was at rest, and was then restarted. */
export const measureYear = async (service: BenchService, options: Measured): Promise<readonly Figure[]> => {
  const { auditKey, portalId, now, seconds, idleSeconds, say } = options;
  const { figures, add, measureCommand, counting, ...recording } = recorder(service, say);
  add('ready', { ms: 1_000 * service.readySeconds, gate: READY });
  await atRest(service);

  const idleFrom = processorMs(service);
  const idle = await countingPages(service.pool, () => sleep(1_000 * idleSeconds));
  const idlePages = idle.pages / idle.seconds;
  const idleTo = processorMs(service);
  const parts = PARTS.filter((part) => part !== 'load').map((part) => ({ part, cpuMs: (idleTo[part] - idleFrom[part]) / idle.seconds }));
  const idleMs = parts.reduce((sum, { cpuMs }) => sum + cpuMs, 0);
  for (const { part, cpuMs } of parts) add(`idle ${part}, each second`, { cpuMs, note: `${(cpuMs / 10).toFixed(2)} % of a core` });
  add('idle, each second', { cpuMs: idleMs, pages: idlePages, note: `${(idleMs / 10).toFixed(2)} % of a core`, gate: IDLE });

  recording.idlePages(idlePages);

  // Requests of partners.
  const measureLoad = async (name: string, request: (number: number) => string, to: URL = service.url, rate = RATE) => {
    const load = { host: to.hostname, port: Number(to.port), connections: CONNECTIONS, request };
    const cpu = serviceMs(service);
    const { result, pages } = await counting(() => openLoop(load, rate, seconds));
    const bad = [...result.statuses].filter(([status]) => status !== 200).map(([status, count]) => `${count} × ${status}`);
    add(name, {
      ms: percentile(result.latencies, 0.5),
      p99: percentile(result.latencies, 0.99),
      cpuMs: (serviceMs(service) - cpu) / result.answered,
      pages: pages / result.answered,
      note: bad.length > 0 ? bad.join(', ') : null,
      gate: REQUEST,
    });
  };
  const list = '/api/partner/v1/payments';
  const get = (path: string) => () => getRequest(service, path);
  const fetched = async (path: string) =>
    (
      (await (await fetch(`${service.url.origin}${path}`, { headers: { authorization: `ApiKey ${service.apiKey}` } })).json()) as {
        data: { payments: { id: string }[]; nextCursor: string | null };
      }
    ).data;
  const { rows: sample } = await service.pool.query<{ id: string }>(
    `select substr(stream_id, 9) as id from es.events where revision = 0 and stream_id like 'payment-%'
       and position in (select 1 + floor(random() * (select position from es.head))::bigint from generate_series(1, $1::int))`,
    [8 * SAMPLED],
  );
  const run = `year${Date.now()}`;
  const walBefore = await walBytes(service);
  await measureLoad('create', createRequest(service, run), service.url, CREATES_RATE);
  await caughtUp(service);
  const wal = (await walBytes(service)) - walBefore;
  add('WAL of a create', { note: `${(wal / (CREATES_RATE * seconds)).toFixed(0)} bytes` });
  await measureLoad('GET', (number) => getRequest(service, `${list}/${sample[number % sample.length]!.id}`));
  const day = startOfDay(now) - DAY_MS;
  const [from, to] = [day, day + DAY_MS].map((ms) => new Date(ms).toISOString()) as [string, string];
  const { rows: portals } = await service.pool.query<{ portal_id: string }>('select portal_id from directory_portal');
  const emptyPortal = portals.at(-1)!.portal_id;
  await measureLoad('list, first page of 100', get(`${list}?limit=100`));
  await measureLoad('list, status failed', get(`${list}?status=failed`));
  await measureLoad('list, status without a match', get(`${list}?status=unknown`));
  await measureLoad('list, portal', get(`${list}?portalId=${portalId}`));
  await measureLoad('list, portal and status', get(`${list}?portalId=${portalId}&status=refunded`));
  await measureLoad('list, portal and status without a match', get(`${list}?portalId=${emptyPortal}&status=unknown`));
  await measureLoad('list, one day', get(`${list}?from=${from}&to=${to}`));
  const oldest = (await service.pool.query<{ at: string }>('select min(created_at)::text as at from payment_list')).rows[0]!.at;
  await measureLoad('list, the oldest', get(`${list}?to=${new Date(Date.parse(oldest) + 60_000).toISOString()}`));
  const { nextCursor } = await fetched(`${list}?limit=100&to=${from}`);
  if (nextCursor !== null) await measureLoad('list, by cursor', get(`${list}?limit=100&to=${from}&cursor=${nextCursor}`));
  const fresh: string[] = [];
  for (let cursor: string | null = null, page = 0; page < NEW_PAGES; page++) {
    const { payments: found, nextCursor: next } = await fetched(`${list}?limit=100&portalId=${service.portalId}${cursor ? `&cursor=${cursor}` : ''}`);
    fresh.push(...found.map(({ id }) => id));
    if ((cursor = next) === null) break;
  }
  const post = (path: string, body: object) => {
    const text = JSON.stringify(body);
    return `POST ${path} HTTP/1.1\r\nhost: ${service.url.host}\r\nauthorization: ApiKey ${service.apiKey}\r\ncontent-type: application/json\r\ncontent-length: ${text.length}\r\n\r\n${text}`;
  };
  await measureLoad('refund', (number) => post(`${list}/${fresh[number % fresh.length]!}/refund`, { amountCents: 10 }));
  await measureLoad('quote', get(`/api/partner/v1/fees/quote?portalId=${service.portalId}&amountCents=12500`));
  await measureLoad('readiness', get('/readyz'));

  // Reports and audit routes of one day.
  const measureFetch = async (name: string, url: URL, gate: Gate, headers: Record<string, string> = { authorization: `AuditKey ${auditKey}` }) => {
    const times: number[] = [];
    let note: string | null = null;
    const { pages } = await counting(async () => {
      for (let time = 0; time < TIMES; time++) {
        const begun = performance.now();
        const answer = await fetch(url, { headers });
        const read = await answer.text().catch((error: unknown) => `broken off: ${String(error)}`);
        times.push(performance.now() - begun);
        if (answer.status !== 200 || read.startsWith('broken off')) note = `HTTP ${answer.status} ${read.slice(0, 120)}`;
      }
    });
    times.sort((a, b) => a - b);
    add(name, { ms: times[Math.floor(TIMES / 2)]!, p99: times.at(-1)!, pages: pages / TIMES, note, gate });
  };
  const measureAudit = (name: string, path: string, gate = REPORT) => measureFetch(name, new URL(path, service.auditUrl), gate);
  for (const report of Object.keys(REPORTS))
    await measureAudit(
      `report ${report}, one day`,
      `/audit/v1/exports/${report}?from=${from}&to=${to}`,
      BOOKS.includes(report) ? BOOKS_OF_A_DAY : REPORT,
    );
  await measureFetch('metrics', service.metricsUrl, REQUEST, {});
  const dated = sample[0]!.id;
  await measureAudit('audit: a payment as of a day', `/audit/v1/payments/${dated}?asOf=${to}`);
  await measureAudit('audit: timeline', `/audit/v1/payments/${dated}/timeline`);
  await measureAudit('audit: payments', '/audit/v1/payments?limit=100');
  await measureAudit('audit: payments, status failed', '/audit/v1/payments?limit=100&status=failed');
  await measureAudit('audit: payments, status unknown', '/audit/v1/payments?limit=100&status=unknown');
  for (const [name, queries] of Object.entries(await namesOf(service, FINDS))) {
    const times: number[] = [];
    let rows = 0;
    const { pages } = await counting(async () => {
      for (const query of queries) {
        const begun = performance.now();
        const url = new URL(`/audit/v1/payments?${new URLSearchParams(query).toString()}`, service.auditUrl);
        const answer = await fetch(url, { headers: { authorization: `AuditKey ${auditKey}` } });
        if (!answer.ok) throw new Error(`HTTP ${answer.status} by ${JSON.stringify(query)}`);
        const { data } = (await answer.json()) as { data: { payments: object[] } };
        times.push(performance.now() - begun);
        if (data.payments.length === 0) throw new Error(`nothing is found by ${JSON.stringify(query)}`);
        rows += data.payments.length;
      }
    });
    const sorted = Float64Array.from(times).sort();
    const [p50, p95, p99] = [0.5, 0.95, 0.99].map((share) => percentile(sorted, share)) as [number, number, number];
    const note = `p95 ${p95.toFixed(1)} ms, ${(rows / queries.length).toFixed(1)} payments an answer`;
    add(`audit: find by ${name}`, { ms: p50, p99, p95, pages: pages / queries.length, note, gate: FIND });
  }
  await measureAudit('audit: balances', '/audit/v1/ledger/balances');
  await measureAudit('audit: balances as of a day', `/audit/v1/ledger/balances?asOf=${to}`);
  await measureAudit('audit: journal of one day, 1,000 entries', `/audit/v1/ledger/journal?from=${from}&to=${to}&limit=1000`);
  await measureAudit('audit: drift', '/audit/v1/drift');
  await measureAudit('audit: exceptions', '/audit/v1/exceptions');
  await measureAudit('audit: batches', '/audit/v1/batches');

  // Commands.
  await measureCommand('command that does nothing', null, 'portals', 'list');
  await measureCommand('payments tasks', REQUEST, 'payments', 'tasks');
  // First close the day before, so that the last day is a period of its own. A store of one day has no day before.
  await operate(service, 'audit', 'close-period', '--to', from);
  await measureCommand('close a day', BOOKS_OF_A_DAY, 'audit', 'close-period', '--to', to);
  const folder = mkdtempSync(join(tmpdir(), 'payfold-head-'));
  try {
    const head = join(folder, 'day.head');
    const signed = await signHeadOf(service, from);
    if (signed === null) add('incremental verify of one day', { note: 'not measured: nothing lies before the last day' });
    else {
      writeFileSync(head, signed);
      // This pass compares the payments of the day with their events, too.
      await measureCommand('incremental verify and drift of one day', REPORT, 'audit', 'verify', '--from-head', head);
    }
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
  return [...figures, ...(await measureWhole(service, options))];
};

/** A full verification, and a settlement batch of `lines` lines beside creates. */
export const measureWhole = async (service: BenchService, { payments, lines, say }: Measured): Promise<readonly Figure[]> => {
  const { figures, add, addCommand, measureCommand } = recorder(service, say);
  const verified = await measureCommand('full verify', FULL_VERIFY, 'audit', 'verify', '--timeout-seconds', '3600', '--full');
  const { size = 0 } = verified.exitCode === 0 ? (JSON.parse(verified.stdout) as { size?: number }) : {};
  add('full verify, 1,000 events', { ms: (1_000_000 * verified.seconds) / size, note: `${(size / verified.seconds).toFixed(0)} events/s of ${size}, ${payments} payments`, gate: FULL_VERIFY_OF_1000 }); // prettier-ignore

  // The last measurement, because it makes the store larger.
  if (lines > 0) {
    const { imported, creates, cpuMs, failed } = await settleBatch(service, lines, CREATES_RATE);
    addCommand('settlement batch', imported, cpuMs, { gate: SETTLEMENT, note: failed ?? `${lines} lines` });
    const bad = [...creates.statuses].filter(([status]) => status !== 200).map(([status, count]) => `${count} × ${status}`);
    add('create beside the settlement batch', {
      ms: percentile(creates.latencies, 0.5),
      p99: percentile(creates.latencies, 0.99),
      note: [...bad, `${creates.answered} creates`].join(', '),
      gate: BESIDE_SETTLEMENT,
    });
  }
  return figures;
};

/** Names of payments from all over the store, by their parameter. */
const namesOf = async ({ pool }: BenchService, count: number): Promise<Record<string, readonly Record<string, string>[]>> => {
  const { rows } = await pool.query<{ state: string }>(
    `select state from payment_list tablesample system (5) where status in ('succeeded', 'refunded', 'partially_refunded') order by random() limit $1`,
    [count],
  );
  const payments = rows.map(({ state }) => JSON.parse(state) as Charged);
  return {
    lineReference: payments.map(({ terms }) => ({ lineReference: terms.lineItems.at(-1)!.referenceId })),
    referenceId: payments.flatMap(({ terms: { referenceId } }) => (referenceId === null ? [] : [{ referenceId }])),
    confirmationNumber: payments.map(({ confirmationNumber }) => ({ confirmationNumber })),
    transactionId: payments.map(({ legs }) => ({ transactionId: legs.at(-1)!.transactionId })),
    // A token names no last four digits.
    'last4 and amountCents': payments.flatMap(({ terms: { paymentMethod, amountCents, serviceFeeCents } }) =>
      paymentMethod.last4 === '' ? [] : [{ last4: paymentMethod.last4, amountCents: String(amountCents + serviceFeeCents) }],
    ),
  };
};

/** A signed head over all events that were stored before an instant, as if it had been signed then. null: there are none. */
const signHeadOf = async ({ pool, dataDir }: BenchService, at: string): Promise<string | null> => {
  // The log is in the order of time, and positions count events. So the end is found by halves.
  let [low, high] = [0, Number((await pool.query<{ position: string }>('select position from es.head')).rows[0]!.position)];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    const { rows } = await pool.query<{ before: boolean }>('select stored_at < $2::timestamptz as before from es.events where position = $1', [
      middle,
      at,
    ]);
    if (rows[0]!.before) low = middle;
    else high = middle - 1;
  }
  if (low === 0) return null;
  const { rows } = await pool.query<{ position: string }>(`select lpad($1::text, length(position), '0') as position from log_state`, [low]);
  const { origin } = await logState(pool);
  const head = { origin, size: low, root: await rootOf(storedTiles(pool), low), at, position: rows[0]!.position };
  return signHead(head, readKeyRing(join(dataDir, 'master.key')));
};

const walBytes = async ({ pool }: BenchService): Promise<number> =>
  Number((await pool.query<{ bytes: string }>(`select pg_current_wal_lsn() - '0/0' as bytes`)).rows[0]!.bytes);
