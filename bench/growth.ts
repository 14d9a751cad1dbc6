/**
 * Measures how costs grow with the log: `npm run bench -- growth --events 10000,100000,1000000`. At each size, it measures a create, a GET, the first
 * and last page of the list, and the rebuild of the list per thousand events. In `reports/growth.svg`, a cost that does not grow is a flat line.
 */
import { mkdirSync, writeFileSync } from 'node:fs';
import { parseArgs } from 'node:util';
import { caughtUp, multiply, rebuild } from './history.js';
import { closedLoop, percentile } from './load.js';
import { printSettings, refuseWithoutFsync } from './pgbench.js';
import { type BenchService, createRequest, getRequest, startService } from './service.js';

const CONNECTIONS = 8;
const SECONDS = 5;

const { values } = parseArgs({ options: { events: { type: 'string', default: '10000,100000,1000000' } } });
const sizes = values.events.split(',').map(Number);

interface Costs {
  readonly events: number;
  /** Milliseconds by name: the median with {@link CONNECTIONS} clients at the same time. For the rebuild, milliseconds per thousand events. */
  readonly costs: Readonly<Record<string, number>>;
}

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
    rows.push({ events, costs });
    console.log(`${events} events: ${Object.entries(costs).map(([name, ms]) => `${name} ${ms.toFixed(2)} ms`).join(', ')}; rebuild ${rebuilt.seconds.toFixed(1)} s, ${rebuilt.peakMib.toFixed(0)} MiB`); // prettier-ignore
  }
} finally {
  await service.stop();
}

// ------------------------------------------------------------------------------------------------------------------------------------
// The plot. Both axes are logarithmic.

const WIDTH = 760;
const HEIGHT = 420;
const MARGIN = { left: 64, right: 190, top: 36, bottom: 44 } as const;
const LABEL_HEIGHT = 14;
const COLOURS = ['#1f6feb', '#1a7f37', '#9a6700', '#cf222e', '#8250df'];

const plot = (measured: readonly Costs[]): string => {
  const names = Object.keys(measured[0]!.costs);
  const all = measured.flatMap(({ costs }) => Object.values(costs));
  const decades = { low: Math.floor(Math.log10(Math.min(...all))), high: Math.ceil(Math.log10(Math.max(...all))) };
  const [from, to] = [Math.log10(measured[0]!.events), Math.log10(measured.at(-1)!.events)];
  const x = (events: number) => MARGIN.left + ((Math.log10(events) - from) / Math.max(0.001, to - from)) * (WIDTH - MARGIN.left - MARGIN.right);
  const y = (ms: number) =>
    HEIGHT - MARGIN.bottom - ((Math.log10(ms) - decades.low) / (decades.high - decades.low)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const grid = Array.from({ length: decades.high - decades.low + 1 }, (_, index) => 10 ** (decades.low + index)).map(
    (ms) =>
      `<path d="M${MARGIN.left} ${y(ms).toFixed(1)}H${WIDTH - MARGIN.right}" stroke="#d0d7de"/><text x="${MARGIN.left - 8}" y="${(y(ms) + 4).toFixed(1)}" text-anchor="end">${ms} ms</text>`,
  );
  const ticks = measured.map(
    ({ events }) => `<text x="${x(events).toFixed(1)}" y="${HEIGHT - MARGIN.bottom + 20}" text-anchor="middle">${events.toLocaleString('en')}</text>`,
  );
  const last = measured.at(-1)!;
  // Each name stands at the end of its line. If two names would overlap, the lower one is moved down.
  const heights = new Map<string, number>();
  let above = -LABEL_HEIGHT;
  for (const name of names.toSorted((a, b) => last.costs[b]! - last.costs[a]!)) {
    above = Math.max(y(last.costs[name]!) + 4, above + LABEL_HEIGHT);
    heights.set(name, above);
  }
  const lines = names.map((name, index) => {
    const points = measured.map(({ events, costs }) => [x(events), y(costs[name]!)] as const);
    const colour = COLOURS[index % COLOURS.length]!;
    return (
      `<polyline fill="none" stroke="${colour}" stroke-width="2" points="${points.map((point) => point.map((one) => one.toFixed(1)).join(',')).join(' ')}"/>` +
      points.map(([cx, cy]) => `<circle cx="${cx.toFixed(1)}" cy="${cy.toFixed(1)}" r="3" fill="${colour}"/>`).join('') +
      `<text x="${(x(last.events) + 10).toFixed(1)}" y="${heights.get(name)!.toFixed(1)}" fill="${colour}">${name}</text>`
    );
  });
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${HEIGHT}" font-family="system-ui, sans-serif" font-size="12" fill="#1f2328">
<rect width="100%" height="100%" fill="#ffffff"/>
<text x="${MARGIN.left}" y="20" font-size="14">Median cost by events in the log, ${CONNECTIONS} clients at once</text>
${[...grid, ...ticks, ...lines].join('\n')}
</svg>
`;
};

mkdirSync('reports', { recursive: true });
writeFileSync('reports/growth.svg', plot(rows));
console.log('plot: reports/growth.svg');
