/**
 * Measures how one account's flood slows another account. Account A sends as much as it can over many connections. Account B sends one request after
 * the other. Each flood alternates with a quiet time, in which only B sends.
 *
 * Goal: the p99 of B is at most five times its quiet p99 and 25 ms.
 */
import { execFileSync } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { closedLoop, type LoadResult, openLoop, percentile } from './load.js';
import { type BenchService, createRequest, getRequest, startService } from './service.js';

const ROUNDS = 2;
const SECONDS = 8;
/** The requests of B in a second. */
const RATE = 20;
/** B uses a few connections, so that a slow answer does not delay its next request. */
const CONNECTIONS_OF_B = 8;
const SLOW_CARD = '4000 0077 7000 2050';
const LAUNCHER = fileURLToPath(new URL('../../apps/operator/payfold.mjs', import.meta.url));

interface Flood {
  readonly name: string;
  readonly connections: number;
  readonly request: (service: BenchService, run: string) => (number: number) => string;
  readonly victim: 'create' | 'list';
}

const LIST = '/api/partner/v1/payments?limit=100';
const list = (service: BenchService) => () => getRequest(service, LIST);
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

const service = await startService();
try {
  const env = { ...process.env, DATA_DIR: service.dataDir };
  const payfold = <T>(...words: string[]) =>
    JSON.parse(execFileSync(process.execPath, [LAUNCHER, '--json', ...words], { env, encoding: 'utf8' })) as T;
  const { accountId } = payfold<{ accountId: string }>('accounts', 'create', '--name', 'Flood');
  const { apiKey } = payfold<{ apiKey: string }>('keys', 'issue', '--account', accountId);
  const { portalId } = payfold<{ portalId: string }>('portals', 'create', '--account', accountId, '--name', 'Flood');
  const flooding = { ...service, apiKey, portalId };
  const load = (connections: number, request: (number: number) => string) => ({
    host: service.url.hostname,
    port: Number(service.url.port),
    connections,
    request,
  });
  let run = 0;
  const ofB = (victim: Flood['victim']) =>
    openLoop(load(CONNECTIONS_OF_B, victim === 'list' ? list(service) : createRequest(service, `b${++run}`)), RATE, SECONDS);
  const say = ({ latencies, statuses, perSecond }: LoadResult) =>
    `${perSecond.toFixed(0)}/s, p50 ${percentile(latencies, 0.5).toFixed(1)} ms, p99 ${percentile(latencies, 0.99).toFixed(1)} ms (${[...statuses].map(([status, count]) => `${status}: ${count}`).join(', ')})`;

  await closedLoop(load(32, createRequest(flooding, 'warm')), 4);
  await closedLoop(load(8, createRequest(service, 'warm')), 4);
  for (const { name, connections, request, victim } of FLOODS)
    for (let round = 1; round <= ROUNDS; round++) {
      const quiet = await ofB(victim);
      const [flood, flooded] = await Promise.all([closedLoop(load(connections, request(flooding, `a${++run}`)), SECONDS), ofB(victim)]);
      const [before, during] = [percentile(quiet.latencies, 0.99), percentile(flooded.latencies, 0.99)];
      console.log(`${name}: A ${say(flood)}`);
      console.log(`  B quiet ${say(quiet)}`);
      console.log(`  B now   ${say(flooded)}; limit ${(5 * before + 25).toFixed(0)} ms${during <= 5 * before + 25 ? '' : ', EXCEEDED'}`);
    }
} finally {
  await service.stop();
}
