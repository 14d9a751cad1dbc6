/**
 * Measures how costs grow with the log: `npm run bench -- growth --events 10000,100000,1000000`. At each size, it measures a create, a GET, the first
 * and last page of the list, and the rebuild of the list per thousand events. In `reports/growth.svg`, a cost that does not grow is a flat line.
 */
import { parseArgs } from 'node:util';
import { caughtUp, multiply, rebuild } from './history.js';
import { closedLoop, percentile } from './load.js';
import { type Costs, writePlot } from './plot.js';
import { printSettings, refuseWithoutFsync } from './pgbench.js';
import { type BenchService, createRequest, getRequest, startService } from './service.js';

const CONNECTIONS = 8;
const SECONDS = 5;

const { values } = parseArgs({ options: { events: { type: 'string', default: '10000,100000,1000000' } } });
const sizes = values.events.split(',').map(Number);

const measure = async (service: BenchService, run: string): Promise<Record<string, number>> => {
  const load = (request: (number: number) => string) => ({
    host: service.url.hostname,
    port: Number(service.url.port),
    connections: CONNECTIONS,
    request,
  });
  const median = async (request: (number: number) => string) => percentile((await closedLoop(load(request), SECONDS)).latencies, 0.5);
  const list = '/api/partner/v1/payments?limit=100';
  const first = (await (await fetch(`${service.url.origin}${list}`, { headers: { authorization: `ApiKey ${service.apiKey}` } })).json()) as {
    data: { payments: { id: string }[] };
  };
  // The last page holds the oldest payments. A time window selects it directly.
  const last = `${list}&to=2026-01-01T00:00:00.100Z`;
  const one = getRequest(service, `/api/partner/v1/payments/${first.data.payments[0]!.id}`);
  return {
    create: await median(createRequest(service, run)),
    GET: await median(() => one),
    'first page of 100': await median(() => getRequest(service, list)),
    'last page of 100': await median(() => getRequest(service, last)),
  };
};

const service = await startService();
/** Costs: the median with {@link CONNECTIONS} clients at the same time. For the rebuild, milliseconds per thousand events. */
const rows: Costs[] = [];
try {
  await refuseWithoutFsync(service.pool);
  await printSettings(service.pool);
  await closedLoop({ host: service.url.hostname, port: Number(service.url.port), connections: 1, request: createRequest(service, 'model') }, 0.2);
  for (const events of sizes) {
    const { rows: counted } = await service.pool.query<{ count: string }>('select count(*) as count from es.events');
    const missing = events - Number(counted[0]!.count);
    if (missing > 1) await multiply(service, Math.floor(missing / 2));
    await caughtUp(service);
    const rebuilt = await rebuild(service);
    const costs = { ...(await measure(service, `g${events}`)), 'rebuild, 1,000 events': (1_000_000 * rebuilt.seconds) / rebuilt.events };
    rows.push({ size: events, costs });
    console.log(`${events} events: ${Object.entries(costs).map(([name, ms]) => `${name} ${ms.toFixed(2)} ms`).join(', ')}; rebuild ${rebuilt.seconds.toFixed(1)} s, ${rebuilt.peakMib.toFixed(0)} MiB`); // prettier-ignore
  }
} finally {
  await service.stop();
}

writePlot('reports/growth.svg', `Median cost by events in the log, ${CONNECTIONS} clients at once`, rows);
