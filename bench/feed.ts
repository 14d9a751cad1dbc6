/**
 * Measures readers of the change feed over HTTP: events a second of one reader from the start of the log, and of four at the same time; and what 64
 * readers cost that wait while nothing happens. `--payments N` (default 100,000): the size of the log. If a figure is worse than its limit, the exit
 * code is 1.
 */
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { caughtUp, multiply } from './history.js';
import { judge } from './judge.js';
import { closedLoop } from './load.js';
import { operate } from './operate.js';
import { printSettings, refuseWithoutFsync } from './pgbench.js';
import { type BenchService, createRequest, processorMs, startService } from './service.js';

const READERS = 4;
const WAITERS = 64;
const WAITERS_PER_KEY = 4;
const PAGE = 1_000;
/** All waiters wait for this long, so that the first poll and the last answer are outside of it. */
const WAIT_SECONDS = 30;
const IDLE_SECONDS = 20;
/** Pause between the first requests of two readers. */
const NEXT_WAITER_MS = 50;
const LIMITS = { eventsPerSecond: 20_000, idleShare: 0.02 } as const;

const { values } = parseArgs({ options: { payments: { type: 'string', default: '100000' } } });

interface Page {
  readonly events: readonly unknown[];
  readonly next: string | null;
  readonly end: boolean;
}

const issue = async (service: BenchService, number: number): Promise<string> => {
  const { stdout } = await operate(service, 'audit', 'keys', 'issue', '--name', `Reader ${number}`, '--role', 'finance');
  return (JSON.parse(stdout) as { auditKey: string }).auditKey;
};

const page = async ({ auditUrl }: BenchService, key: string, query: Readonly<Record<string, string>>): Promise<Page> => {
  for (;;) {
    const answer = await fetch(`${auditUrl.origin}/audit/v1/events?${new URLSearchParams(query).toString()}`, { headers: { authorization: key } });
    const body = (await answer.json()) as { data: Page };
    if (answer.status === 200) return body.data;
    if (answer.status !== 503) throw new Error(`${answer.status} ${JSON.stringify(body)}`);
    await sleep(Number(answer.headers.get('retry-after')) * 1_000);
  }
};

/** Reads the feed from its start to its end. */
const readAll = async (service: BenchService, key: string): Promise<{ events: number; next: string }> => {
  let events = 0;
  for (let after: string | null = null; ;) {
    const read: Page = await page(service, key, { limit: String(PAGE), ...(after !== null && { after }) });
    events += read.events.length;
    after = read.next;
    if (read.end) return { events, next: after! };
  }
};

const service = await startService();
try {
  await refuseWithoutFsync(service.pool);
  const keys: string[] = [];
  for (let number = 0; number < WAITERS / WAITERS_PER_KEY; number++) keys.push(await issue(service, number));
  await closedLoop({ host: service.url.hostname, port: Number(service.url.port), connections: 1, request: createRequest(service, 'model') }, 0.2);
  await multiply(service, Number(values.payments));
  await caughtUp(service);
  await printSettings(service.pool);

  await readAll(service, keys[0]!);
  const begun = performance.now();
  const cpuBefore = processorMs(service);
  const { events, next } = await readAll(service, keys[0]!);
  const seconds = (performance.now() - begun) / 1_000;
  const cpu = processorMs(service);
  const share = (part: 'api' | 'postgres' | 'load') => `${part} ${((cpu[part] - cpuBefore[part]) / 1_000 / seconds).toFixed(2)}`;
  judge(
    `one reader: ${events} events in ${seconds.toFixed(1)} s, ${(events / seconds).toFixed(0)} events/s (floor ${LIMITS.eventsPerSecond}); cores: ${share('api')}, ${share('postgres')}, ${share('load')}`,
    events / seconds >= LIMITS.eventsPerSecond,
  );

  const many = performance.now();
  const all = await Promise.all(keys.slice(0, READERS).map((key) => readAll(service, key)));
  const manySeconds = (performance.now() - many) / 1_000;
  const sum = all.reduce((total, one) => total + one.events, 0);
  console.log(`${READERS} readers: ${(sum / manySeconds).toFixed(0)} events/s together`);

  const idle = async (seconds_: number): Promise<number> => {
    const before = processorMs(service).api;
    await sleep(seconds_ * 1_000);
    return (processorMs(service).api - before) / (seconds_ * 1_000);
  };
  await caughtUp(service);
  const without = await idle(IDLE_SECONDS);
  const types = 'PortalCodingSet';
  const waits: Promise<Page>[] = [];
  for (const key of keys)
    for (let number = 0; number < WAITERS_PER_KEY; number++) {
      waits.push(page(service, key, { after: next, wait: String(WAIT_SECONDS), types }));
      await sleep(NEXT_WAITER_MS);
    }
  const with_ = await idle(IDLE_SECONDS);
  const answers = await Promise.all(waits);
  if (answers.some((answer) => answer.events.length > 0)) throw new Error('something happened');
  judge(
    `${WAITERS} readers that wait: the API uses ${(with_ * 100).toFixed(2)} % of a core, and ${(without * 100).toFixed(2)} % without them (ceiling ${LIMITS.idleShare * 100} % more)`,
    with_ - without <= LIMITS.idleShare,
  );
} finally {
  await service.stop();
}
