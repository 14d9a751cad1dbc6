/**
 * Runs charges, reads, lists and refunds at an even rate for hours, and measures whether the memory of the processes grows. The resident memory of
 * supervisor, API and worker is sampled every ten seconds. The growth is the slope of a least-squares line through the samples after the warm-up.
 *
 * `npm run bench -- soak [--minutes 60] [--rate 50]`.
 */
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { openLoop, percentile, slope } from './load.js';
import { createRequest, getRequest, rssOf, startService } from './service.js';

const CONNECTIONS = 16;
const SAMPLE_MS = 10_000;
/** The warm-up is this share of the run, at most `mostMs`. */
const WARM_UP = { share: 0.25, mostMs: 20 * 60_000 } as const;
const CEILING_MIB_PER_HOUR = 1;

const { values } = parseArgs({ options: { minutes: { type: 'string', default: '60' }, rate: { type: 'string', default: '50' } } });
const [minutes, rate] = [Number(values.minutes), Number(values.rate)];

const service = await startService();
try {
  const load = (request: (number: number) => string) => ({
    host: service.url.hostname,
    port: Number(service.url.port),
    connections: CONNECTIONS,
    request,
  });
  const create = createRequest(service, 'soak');
  const list = getRequest(service, '/api/partner/v1/payments?limit=50');
  await openLoop(load(createRequest(service, 'first')), rate, 1);
  const recent = async (): Promise<string[]> => {
    const answer = await fetch(`${service.url.origin}/api/partner/v1/payments?limit=100&status=succeeded`, {
      headers: { authorization: `ApiKey ${service.apiKey}` },
    });
    return ((await answer.json()) as { data: { payments: { id: string }[] } }).data.payments.map(({ id }) => id);
  };
  let ids = await recent();
  const refund = (id: string): string => {
    const body = JSON.stringify({ amountCents: 100 });
    return `POST /api/partner/v1/payments/${id}/refund HTTP/1.1\r\nhost: ${service.url.host}\r\nauthorization: ApiKey ${service.apiKey}\r\ncontent-type: application/json\r\ncontent-length: ${body.length}\r\n\r\n${body}`;
  };
  // Of ten requests, six are charges, two are reads, one is a list, and one is a refund of a recent payment.
  const day = (number: number): string => {
    const id = ids[number % ids.length]!;
    const kind = number % 10;
    if (kind === 9) return refund(id);
    if (kind === 8) return list;
    return kind >= 6 ? getRequest(service, `/api/partner/v1/payments/${id}`) : create(number);
  };
  const samples: (readonly [hours: number, mib: number])[] = [];
  const started = performance.now();
  const end = started + minutes * 60_000;
  let running = true;
  const sampling = (async () => {
    while (running) {
      await sleep(SAMPLE_MS, undefined, { ref: false });
      ids = await recent();
      samples.push([(performance.now() - started) / 3_600_000, await rssOf(service, ['supervisor', 'api', 'worker'])]);
    }
  })();
  const { latencies, statuses } = await openLoop(load(day), rate, (end - started) / 1_000);
  running = false;
  await sampling;
  const warm = Math.min(minutes * 60_000 * WARM_UP.share, WARM_UP.mostMs) / 3_600_000;
  const kept = samples.filter(([hours]) => hours >= warm);
  const growth = slope(kept);
  const mib = kept.map(([, mib]) => mib);
  console.log(
    `${minutes} min at ${rate}/s: ${[...statuses].map(([status, count]) => `${status}: ${count}`).join(', ')}; p50 ${percentile(latencies, 0.5).toFixed(1)} ms, p99 ${percentile(latencies, 0.99).toFixed(1)} ms`,
  );
  console.log(
    `memory after warm-up ${Math.min(...mib).toFixed(0)} to ${Math.max(...mib).toFixed(0)} MiB, slope ${growth.toFixed(2)} MiB/h; ceiling ${CEILING_MIB_PER_HOUR}`,
  );
  if (growth > CEILING_MIB_PER_HOUR || [...statuses.keys()].some((status) => status >= 500)) process.exitCode = 1;
} finally {
  await service.stop();
}
