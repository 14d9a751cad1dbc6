/**
 * Measures what a year of payments costs: `npm run bench -- year --payments 1000000`.
 *
 * The store is made from a small real history (store.ts). Then everything is measured that must not grow with the store. Reports and closings are
 * measured over its last UTC day, which has `--per-day` payments. At the end a full `payfold audit verify` reads every event.
 *
 * `--dir <folder>` keeps the store. The next run with the same folder goes on where an earlier one ended, and measures the same store again.
 * `--only-make` ends when the store is made. `--only-whole` measures only the full verification and the settlement batch, and draws no plot. A plot of
 * all recorded sizes is written to `reports/year.svg`.
 *
 * `--base 100000` compares each figure with the newest run of that size in `reports/bench.ndjson`. The last column says whether the gate of the figure
 * is met. `--lines` sets the size of the settlement batch, which is measured last, because it adds as many payments to the store (0: not measured).
 */
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { chmod, mkdir, mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import { NO_FEE } from '#accounts';
import { startEmbeddedPostgres } from '#platform';
import { SERVICES } from '../apps/demo/city.js';
import { openContext } from '../apps/operator/context.js';
import { printBytes } from './bytes.js';
import { caughtUp } from './history.js';
import { atRest, type Figure, type Gate, measureWhole, measureYear } from './measurements.js';
import { operate } from './operate.js';
import { refuseWithoutFsync } from './pgbench.js';
import { type Costs, writePlot } from './plot.js';
import { type BenchService, startService } from './service.js';
import { eventsOf, forgetDatabase, makeHistory, makeStore, readHistory, writeHistory } from './store.js';

const { values } = parseArgs({
  options: {
    payments: { type: 'string', default: '100000' },
    /** Payments of each day. */
    'per-day': { type: 'string', default: '100000' },
    /** Payments of the real history. */
    history: { type: 'string', default: '2000' },
    dir: { type: 'string' },
    'only-make': { type: 'boolean', default: false },
    'only-whole': { type: 'boolean', default: false },
    /** Seconds of each measured load. */
    seconds: { type: 'string', default: '10' },
    'idle-seconds': { type: 'string', default: '60' },
    /** Lines of the settlement batch. */
    lines: { type: 'string', default: '200000' },
    /** Payments of the run with which this one is compared. */
    base: { type: 'string', default: '100000' },
  },
});
const [payments, perDay, history] = [Number(values.payments), Number(values['per-day']), Number(values.history)];
const [seconds, idleSeconds, lines, base] = (['seconds', 'idle-seconds', 'lines', 'base'] as const).map((name) => Number(values[name])) as [
  number,
  number,
  number,
  number,
];
/** Disputes, and refunds by staff, of the history. */
const BY_STAFF = 3;
const TODAY = new Date().toISOString().slice(0, 10);
const DISPUTE = ['--amount-cents', '100', '--status', 'in_dispute', '--stage', 'chargeback', '--reason-code', '10.4', '--reason', 'fraud', '--opened-on', TODAY, '--due-date', TODAY]; // prettier-ignore
const PROGRESS_EVERY_MS = 10_000;

/** Facts of a store that a later run needs. */
interface Made {
  readonly apiKey: string;
  readonly auditKey: string;
  readonly portalId: string;
  /** Milliseconds since 1970, when the history was made. */
  readonly now: number;
  readonly complete: boolean;
}

const started = performance.now();
const say = (line: string) => console.log(`${((performance.now() - started) / 1_000).toFixed(0).padStart(5)} s  ${line}`);

/** The small service whose history is multiplied: three portals as in the demo, and a key for auditors. */
const makeBase = async (dataDir: string, historyFile: string): Promise<Made> => {
  const service = await startService({ dataDir });
  try {
    await refuseWithoutFsync(service.pool);
    const { rows } = await service.pool.query<{ account_id: string }>('select account_id from directory_account');
    const accountId = rows[0]!.account_id;
    const context = await openContext('bench', { ...process.env, DATA_DIR: dataDir, LOG_LEVEL: 'error' });
    const portals: string[] = [];
    try {
      for (const { name, fee } of SERVICES) {
        const { state, position } = await context.administration.createPortal({ accountIds: [accountId], name, gateway: 'simulator', fee: { ...NO_FEE, ...fee } }); // prettier-ignore
        portals.push(state.portalId);
        await context.inForce(position);
      }
    } finally {
      await context.close();
    }
    const issued = await operate(service, 'audit', 'keys', 'issue', '--name', 'bench', '--role', 'auditor');
    const { auditKey } = JSON.parse(issued.stdout) as { auditKey: string };
    const command = async (...args: readonly string[]) => {
      const { exitCode, stderr } = await operate(service, ...args);
      if (exitCode !== 0) throw new Error(`${args.join(' ')}: ${stderr}`);
    };
    const staffed = {
      settle: () => command('settlement', 'close'),
      dispute: (id: string) => command('disputes', 'open', '--payment', id, ...DISPUTE),
      refund: (id: string) => command('payments', 'refund', id, '--amount-cents', '100', '--reason', 'meter misread', '--by', 'bench'),
    };
    await makeHistory({ url: service.url.origin, apiKey: service.apiKey, portals, pool: service.pool, ...staffed }, history, BY_STAFF);
    await caughtUp(service);
    const events = await eventsOf(service.pool);
    writeHistory(historyFile, events);
    say(`a real history of ${history} payments: ${events.length} events`);
    return { apiKey: service.apiKey, auditKey, portalId: portals[0]!, now: Date.now(), complete: false };
  } finally {
    await service.close();
  }
};

/** Makes the store in `directory`, or finds the one of an earlier run. */
const made = async (directory: string): Promise<Made & { dataDir: string }> => {
  const [dataDir, historyFile, madeFile] = ['data', 'history.ndjson', 'made.json'].map((name) => join(directory, name)) as [string, string, string];
  const write = (one: Made) => {
    writeFileSync(madeFile, JSON.stringify(one));
    return one;
  };
  let found = existsSync(madeFile) ? (JSON.parse(readFileSync(madeFile, 'utf8')) as Made) : null;
  if (!found) {
    await rm(dataDir, { recursive: true, force: true });
    await mkdir(dataDir, { recursive: true, mode: 0o711 });
    found = await makeBase(dataDir, historyFile);
    forgetDatabase(dataDir);
    write(found);
  }
  if (!found.complete) {
    let said = 0;
    let step = '';
    const onProgress = (name: string, done: number, total: number) => {
      if (name === step && performance.now() - said < PROGRESS_EVERY_MS) return;
      [said, step] = [performance.now(), name];
      say(`${name}: ${done} of ${total} events`);
    };
    // The store is made again after a crash, so this Postgres need not wait for the disk.
    const postgres = await startEmbeddedPostgres(join(dataDir, 'postgres'), { settings: { synchronous_commit: 'off', max_wal_size: '8GB' } });
    try {
      await makeStore(postgres.url, readHistory(historyFile)!, { payments, perDay, now: found.now }, onProgress);
    } finally {
      await postgres.stop();
    }
    found = write({ ...found, complete: true });
    say('the store is made');
  }
  return { ...found, dataDir };
};

const directory = values.dir ?? (await mkdtemp(join(tmpdir(), 'payfold-year-')));
await mkdir(directory, { recursive: true });
// Postgres runs as another user if this process runs as root.
await chmod(directory, 0o711);
let service: BenchService | null = null;
try {
  const store = await made(directory);
  if (!values['only-make']) {
    service = await startService(store);
    await atRest(service);
    service = await service.restart();
    const measure = values['only-whole'] ? measureWhole : measureYear;
    const figures = await measure(service, { ...store, payments, seconds, idleSeconds, lines, say });
    await printBytes(service.pool);
    table(figures);
    if (!values['only-whole']) {
      // The plot reads this line from the report.
      console.log(JSON.stringify({ size: payments, costs: costsOf(figures) } satisfies Costs));
      plotAll({ size: payments, costs: costsOf(figures) });
    }
  }
} finally {
  await service?.close();
  if (!values.dir) await rm(directory, { recursive: true, force: true });
}

function table(figures: readonly Figure[]): void {
  const cell = (value: number | null, digits = 1) => (value === null ? '' : value.toFixed(digits)).padStart(11);
  console.log(`${''.padEnd(44)}${['p50 ms', 'p99 ms', 'cpu ms', 'pages', 'MiB'].map((head) => head.padStart(11)).join('')}  gate`);
  const known = recorded().get(base)?.costs ?? {};
  const missed: string[] = [];
  for (const figure of figures) {
    const { name, ms, p99, cpuMs, pages, mib, note, gate } = figure;
    const verdict = gate === null ? '' : judged(figure, gate, known[name] ?? null);
    if (verdict.startsWith('MISSED')) missed.push(name);
    console.log(
      `${name.padEnd(44)}${cell(ms)}${cell(p99)}${cell(cpuMs, 2)}${cell(pages, 0)}${cell(mib, 0)}  ${verdict.padEnd(34)}${note ?? ''}`.trimEnd(),
    );
  }
  const gates = figures.filter(({ gate }) => gate !== null).length;
  console.log(
    `gates against ${base} payments: ${gates - missed.length} of ${gates} not missed${missed.length > 0 ? `; missed: ${missed.join(', ')}` : ''}`,
  );
}

/** Whether a figure holds its gate. `baseMs`: its median at the base size. null: that was not recorded. */
function judged({ ms, p95, p99, cpuMs, mib }: Figure, { times, mostMs, mostP95, mostP99, mostCpuMs, mostMib }: Gate, baseMs: number | null): string {
  const said: string[] = [];
  let met = true;
  const most = (value: number | null, limit: number | undefined, unit: string) => {
    if (limit === undefined) return;
    met &&= value !== null && value <= limit;
    said.push(`≤ ${limit} ${unit}`);
  };
  most(ms, mostMs, 'ms');
  most(p95, mostP95, 'ms p95');
  most(p99, mostP99, 'ms p99');
  most(cpuMs, mostCpuMs, 'ms cpu');
  most(mib, mostMib, 'MiB');
  if (times !== undefined && payments !== base) {
    if (baseMs === null || ms === null) return 'no base';
    met &&= ms <= times * baseMs;
    said.push(`${(ms / baseMs).toFixed(2)} × ≤ ${times} × ${baseMs.toFixed(1)}`);
  }
  return said.length === 0 ? 'base' : `${met ? 'met' : 'MISSED'}: ${said.join(', ')}`;
}

function costsOf(figures: readonly Figure[]): Record<string, number> {
  return Object.fromEntries(figures.flatMap(({ name, ms }) => (ms === null ? [] : [[name, ms]])));
}

/** The newest recorded run of each size. */
function recorded(): Map<number, Costs> {
  const bySize = new Map<number, Costs>();
  const file = 'reports/bench.ndjson';
  for (const line of existsSync(file) ? readFileSync(file, 'utf8').trimEnd().split('\n') : []) {
    const { bench, printed } = JSON.parse(line) as { bench: string; printed?: string[] };
    const said = bench === 'year' ? printed?.find((text) => text.startsWith('{"size"')) : undefined;
    if (said) bySize.set((JSON.parse(said) as Costs).size, JSON.parse(said) as Costs);
  }
  return bySize;
}

/** Draws the newest run of each size in the reports, and this one. Only names that every size has. */
function plotAll(mine: Costs): void {
  const bySize = recorded().set(mine.size, mine);
  const all = [...bySize.values()].sort((a, b) => a.size - b.size);
  const names = Object.keys(mine.costs).filter((name) => all.every(({ costs }) => name in costs));
  const shown = all.map(({ size, costs }) => ({ size, costs: Object.fromEntries(names.map((name) => [name, costs[name]!])) }));
  writePlot('reports/year.svg', 'Milliseconds by payments in the store', shown);
}
