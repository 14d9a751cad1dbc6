/** The service under test: the process tree of `npm start` with its own data directory, an account and a portal. */
import { spawn, type ChildProcess } from 'node:child_process';
import { readdirSync, readFileSync } from 'node:fs';
import { mkdtemp, readFile, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { searchPathOf } from '#eventstore';
import { createPool, freePort, type Pool } from '#platform';
import { READ_MODELS } from '../apps/services.js';
import { controlKeyOf, createSimulatorControl, type SimulatorControl } from '../apps/simulator/control.js';

/** The measured processes. `load` is this process. */
export const PARTS = ['api', 'worker', 'postgres', 'processor', 'supervisor', 'load'] as const;
export type Part = (typeof PARTS)[number];

export interface BenchService {
  readonly url: URL;
  readonly auditUrl: URL;
  readonly metricsUrl: URL;
  readonly pids: Readonly<Record<Part, number>>;
  readonly dataDir: string;
  readonly databaseUrl: string;
  readonly simulatorUrl: URL;
  /** Controls the simulated processor. */
  readonly bank: SimulatorControl;
  readonly pool: Pool;
  readonly apiKey: string;
  readonly portalId: string;
  readonly readySeconds: number;
  restart(): Promise<BenchService>;
  /** Ends the processes, and keeps the data directory. */
  close(): Promise<void>;
  /** Ends the processes, and removes the data directory. */
  stop(): Promise<void>;
}

const MAIN = fileURLToPath(new URL('../apps/standalone/main.js', import.meta.url));

export const startService = async (options: { dataDir?: string; apiKey?: string; portalId?: string } = {}): Promise<BenchService> => {
  const dataDir = options.dataDir ?? (await mkdtemp(join(tmpdir(), 'payfold-bench-')));
  const env = {
    ...process.env,
    DATA_DIR: dataDir,
    PORT: String(await freePort()),
    METRICS_PORT: String(await freePort()),
    AUDIT_PORT: String(await freePort()),
    LOG_LEVEL: 'error',
  };
  const started = performance.now();
  const child = spawn(process.execPath, ['--enable-source-maps', MAIN], { env, stdio: ['ignore', 'pipe', 'inherit'] });
  const lines: string[] = [];
  await new Promise<void>((ready, fail) => {
    child.once('exit', (code) => fail(new Error(`the service ended with code ${code}`)));
    createInterface(child.stdout).on('line', (line) => {
      lines.push(line);
      if (line.startsWith('ready ')) ready();
    });
  });
  const readySeconds = (performance.now() - started) / 1_000;
  const { apiUrl, databaseUrl, simulatorUrl } = JSON.parse(await readFile(join(dataDir, 'runtime.json'), 'utf8')) as Record<
    'apiUrl' | 'databaseUrl' | 'simulatorUrl',
    string
  >;
  const find = (pattern: RegExp) => lines.map((line) => pattern.exec(line)?.[1]).find(Boolean);
  const apiKey = options.apiKey ?? find(/API key\s+(pc_\S+)/)!;
  const portalId = options.portalId ?? find(/Portal\s+([0-9a-f-]{36})/)!;
  const pool = createPool(databaseUrl, { name: 'bench', max: 4, statementTimeoutMs: 0, searchPath: searchPathOf(READ_MODELS) });
  const end = async () => {
    await pool.end();
    await stopChild(child);
  };
  return {
    url: new URL(apiUrl),
    auditUrl: new URL(`http://127.0.0.1:${env.AUDIT_PORT}`),
    metricsUrl: new URL(`http://127.0.0.1:${env.METRICS_PORT}/metrics`),
    pids: pidsOf(child.pid!),
    dataDir,
    databaseUrl,
    simulatorUrl: new URL(simulatorUrl),
    bank: createSimulatorControl(simulatorUrl, controlKeyOf(dataDir)),
    pool,
    apiKey,
    portalId,
    readySeconds,
    restart: async () => {
      await end();
      return startService({ dataDir, apiKey, portalId });
    },
    close: end,
    stop: async () => {
      await end();
      await rm(dataDir, { recursive: true, force: true });
    },
  };
};

const stopChild = async (child: ChildProcess): Promise<void> => {
  if (child.exitCode !== null) return;
  const gone = new Promise((done) => child.once('exit', done));
  child.kill('SIGTERM');
  await gone;
};

/** A card that the simulator approves without delay. */
const QUICK_CARD = '4242 4242 4242 4242';

const LARGE_LINES = 28;
/** Nearly 8 KiB. */
const LARGE_METADATA = Object.fromEntries(Array.from({ length: 50 }, (_, key) => [`key-${key}`, 'x'.repeat(150)]));

/** Makes the text of create requests. Each has the key and request id `<run>-<number>`, two lines and a payer. `large`: with 28 lines more, 240 KB together. */
export const createRequest = (
  { url, apiKey, portalId }: Pick<BenchService, 'url' | 'apiKey' | 'portalId'>,
  run: string,
  { cardNumber = QUICK_CARD, large = false }: { readonly cardNumber?: string; readonly large?: boolean } = {},
) => {
  const body = JSON.stringify({
    portalId,
    amountCents: 12_500 + (large ? LARGE_LINES : 0),
    currency: 'USD',
    paymentMethod: { type: 'card', cardNumber, expirationDate: '12/30', cvv: '123' },
    lineItems: [
      { amountCents: 10_000, referenceId: 'WTR-100200', description: 'Water', metadata: { ward: 4 } },
      { amountCents: 2_500, referenceId: 'WTR-100201', description: 'Sewer' },
      ...Array.from({ length: large ? LARGE_LINES : 0 }, (_, line) => ({ amountCents: 1, referenceId: `L-${line}`, metadata: LARGE_METADATA })),
    ],
    payer: { firstName: 'Maria', lastName: 'Nguyen', email: 'maria@example.com' },
  });
  const head = `POST /api/partner/v1/payments HTTP/1.1\r\nhost: ${url.host}\r\nauthorization: ApiKey ${apiKey}\r\ncontent-type: application/json\r\ncontent-length: ${Buffer.byteLength(body)}\r\n`;
  return (number: number): string => `${head}x-request-id: ${run}-${number}\r\nidempotency-key: ${run}-${number}\r\n\r\n${body}`;
};

export const getRequest = ({ url, apiKey }: Pick<BenchService, 'url' | 'apiKey'>, path: string): string =>
  `GET ${path} HTTP/1.1\r\nhost: ${url.host}\r\nauthorization: ApiKey ${apiKey}\r\n\r\n`;

export const rssMib = async (pid: number): Promise<number> => Number(/VmRSS:\s+(\d+)/.exec(await readFile(`/proc/${pid}/status`, 'utf8'))![1]) / 1024;

/** Sum of the resident memory of several processes, in MiB. */
export const rssOf = async ({ pids }: BenchService, parts: readonly Part[]): Promise<number> =>
  (await Promise.all(parts.map((part) => rssMib(pids[part])))).reduce((sum, mib) => sum + mib, 0);

/** Indexes of fields in `/proc/<pid>/stat` after the process name. The name may hold spaces, so the fields before it cannot be counted. */
const STAT = { parent: 1, own: [11, 12], ofEnded: [13, 14] } as const;
/** The unit of the kernel's counters on Linux. */
const TICK_MS = 10;

interface Stat {
  readonly pid: number;
  readonly fields: readonly string[];
}
const statOf = (pid: number): Stat => {
  const text = readFileSync(`/proc/${pid}/stat`, 'utf8');
  return { pid, fields: text.slice(text.lastIndexOf(')') + 2).split(' ') };
};

const childrenOf = (parent: number): Stat[] =>
  readdirSync('/proc')
    .filter((name) => /^\d+$/.test(name))
    .flatMap((name) => {
      try {
        return [statOf(Number(name))];
      } catch {
        return []; // It has ended meanwhile.
      }
    })
    .filter(({ fields }) => Number(fields[STAT.parent]) === parent);

/** The processes of a service that has started. */
export const pidsOf = (supervisor: number): Record<Part, number> => {
  const children = childrenOf(supervisor).map(({ pid }) => ({ pid, command: readFileSync(`/proc/${pid}/cmdline`, 'utf8') }));
  const find = (pattern: RegExp): number => children.find(({ command }) => pattern.test(command))!.pid;
  return {
    api: find(/api\/main\.js/),
    worker: find(/worker\/main\.js/),
    postgres: find(/bin\/postgres\0/),
    processor: find(/simulator\/main\.js/),
    supervisor,
    load: process.pid,
  };
};

/** Processor time of each part so far, in milliseconds. The time of Postgres includes ended sessions. */
export const processorMs = ({ pids }: Pick<BenchService, 'pids'>): Record<Part, number> => {
  const ticks = (stats: readonly Stat[], at: readonly number[]) =>
    stats.reduce((sum, { fields }) => sum + at.reduce((own, field) => own + Number(fields[field]), 0), 0);
  const of = (part: Part): number => {
    const stat = statOf(pids[part]);
    if (part !== 'postgres') return TICK_MS * ticks([stat], STAT.own);
    return TICK_MS * (ticks([stat, ...childrenOf(stat.pid)], STAT.own) + ticks([stat], STAT.ofEnded));
  };
  return Object.fromEntries(PARTS.map((part) => [part, of(part)])) as Record<Part, number>;
};

/** Processor time of all processes of the service so far, in milliseconds. */
export const serviceMs = (service: Pick<BenchService, 'pids'>): number => {
  const parts = processorMs(service);
  return PARTS.filter((part) => part !== 'load').reduce((sum, part) => sum + parts[part], 0);
};

/** Processor time of the processes that this process started and that have ended, in milliseconds. */
export const endedChildrenMs = (): number => {
  const { fields } = statOf(process.pid);
  return TICK_MS * STAT.ofEnded.reduce((sum, field) => sum + Number(fields[field]), 0);
};
