/**
 * Measures how one account's flood slows another account. Account A sends as much as it can over many connections. Account B sends one request after
 * the other. Each flood alternates with a quiet time, in which only B sends. The requests of A have a thread of their own.
 *
 * Goal: the p99 of B is at most five times its quiet p99 and 25 ms.
 */
import { execFileSync } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { isMainThread, parentPort, Worker, workerData } from 'node:worker_threads';
import { closedLoop, type Load, type LoadResult, openLoop, percentile } from './load.js';
import { type BenchService, createRequest, getRequest, startService } from './service.js';

const ROUNDS = 2;
const SECONDS = 8;
/** The requests of B in a second. */
const RATE = 20;
/** B uses a few connections, so that a slow answer does not delay its next request. */
const CONNECTIONS_OF_B = 8;
const SLOW_CARD = '4000 0077 7000 2050';
const LAUNCHER = fileURLToPath(new URL('../../apps/operator/payfold.mjs', import.meta.url));

type Requester = Pick<BenchService, 'url' | 'apiKey' | 'portalId'>;
interface Flood {
  readonly name: string;
  readonly connections: number;
  readonly request: (service: Requester, run: string) => (number: number) => string;
  readonly victim: 'create' | 'list';
}

const LIST = '/api/partner/v1/payments?limit=100';
const list = (service: Requester) => () => getRequest(service, LIST);
const FLOODS: readonly Flood[] = [
  {
    name: '400 creates with a card that takes 5 s',
    connections: 400,
    request: (service, run) => createRequest(service, run, { cardNumber: SLOW_CARD }),
    victim: 'create',
  },
  { name: '100 quick creates', connections: 100, request: createRequest, victim: 'create' },
  { name: '100 lists of 100', connections: 100, request: list, victim: 'list' },
  {
    name: '50 creates of 240 KB',
    connections: 50,
    request: (service, run) => createRequest(service, run, { large: true }),
    victim: 'create',
  },
];

type Target = Pick<BenchService, 'apiKey' | 'portalId'> & { readonly url: string };
/** What the thread of A is told. */
interface Begun {
  readonly name: string;
  readonly target: Target;
  readonly run: string;
}
const loadOf = (url: URL, connections: number, request: (number: number) => string): Load => ({
  host: url.hostname,
  port: Number(url.port),
  connections,
  request,
});

/** Sends a flood for {@link SECONDS}. */
const flooded = ({ name, target, run }: Begun): Promise<LoadResult> => {
  const { connections, request } = FLOODS.find((one) => one.name === name)!;
  const url = new URL(target.url);
  return closedLoop(loadOf(url, connections, request({ ...target, url }, run)), SECONDS);
};

const compare = async (): Promise<void> => {
  const service = await startService();
  try {
    const env = { ...process.env, DATA_DIR: service.dataDir };
    const payfold = <T>(...words: string[]) =>
      JSON.parse(execFileSync(process.execPath, [LAUNCHER, '--json', ...words], { env, encoding: 'utf8' })) as T;
    const { accountId } = payfold<{ accountId: string }>('accounts', 'create', '--name', 'Flood');
    const { apiKey } = payfold<{ apiKey: string }>('keys', 'issue', '--account', accountId);
    const { portalId } = payfold<{ portalId: string }>('portals', 'create', '--account', accountId, '--name', 'Flood');
    const target: Target = { url: service.url.href, apiKey, portalId };
    let run = 0;
    const ofA = (name: string): Promise<LoadResult> =>
      new Promise((resolve, reject) => {
        const thread = new Worker(new URL(import.meta.url), { workerData: { name, target, run: `a${++run}` } satisfies Begun });
        thread.once('message', resolve).once('error', reject);
      });
    const ofB = (victim: Flood['victim']) =>
      openLoop(loadOf(service.url, CONNECTIONS_OF_B, victim === 'list' ? list(service) : createRequest(service, `b${++run}`)), RATE, SECONDS);
    const say = ({ latencies, statuses, perSecond }: LoadResult) =>
      `${perSecond.toFixed(0)}/s, p50 ${percentile(latencies, 0.5).toFixed(1)} ms, p99 ${percentile(latencies, 0.99).toFixed(1)} ms (${[...statuses].map(([status, count]) => `${status}: ${count}`).join(', ')})`;

    await closedLoop(loadOf(service.url, 32, createRequest({ ...service, apiKey, portalId }, 'warm')), 4);
    await closedLoop(loadOf(service.url, 8, createRequest(service, 'warm')), 4);
    for (const { name, victim } of FLOODS)
      for (let round = 1; round <= ROUNDS; round++) {
        const quiet = await ofB(victim);
        const [flood, besideIt] = await Promise.all([ofA(name), ofB(victim)]);
        const [before, during] = [percentile(quiet.latencies, 0.99), percentile(besideIt.latencies, 0.99)];
        console.log(`${name}: A ${say(flood)}`);
        console.log(`  B quiet ${say(quiet)}`);
        console.log(`  B now   ${say(besideIt)}; limit ${(5 * before + 25).toFixed(0)} ms${during <= 5 * before + 25 ? '' : ', EXCEEDED'}`);
      }
  } finally {
    await service.stop();
  }
};

if (isMainThread) await compare();
else parentPort!.postMessage(await flooded(workerData as Begun));
