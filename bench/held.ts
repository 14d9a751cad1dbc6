/**
 * Measures latency under a steady load: 250 creates per second with an open loop. The processor takes 50 ms for each of the two legs. A city has this
 * load on a busy day. `npm run bench -- held [--rate 250] [--seconds 60]`.
 */
import { parseArgs } from 'node:util';
import { openLoop, percentile } from './load.js';
import { printSettings, refuseWithoutFsync } from './pgbench.js';
import { createRequest, startService } from './service.js';

const PROCESSOR_MS = 50;
const CONNECTIONS = 128;
const CEILING_P99_MS = 250;
const WARM_UP_SECONDS = 10;

const { values } = parseArgs({ options: { rate: { type: 'string', default: '250' }, seconds: { type: 'string', default: '60' } } });
const [rate, seconds] = [Number(values.rate), Number(values.seconds)];

const service = await startService();
try {
  await refuseWithoutFsync(service.pool);
  await printSettings(service.pool);
  await service.bank.arm({ match: { call: 'charge' }, times: null, delayAfterMs: PROCESSOR_MS });
  const load = (run: string) => ({
    host: service.url.hostname,
    port: Number(service.url.port),
    connections: CONNECTIONS,
    request: createRequest(service, run),
  });
  await openLoop(load('warm'), rate, WARM_UP_SECONDS);
  const { latencies, statuses, perSecond } = await openLoop(load('held'), rate, seconds);
  const [p50, p99, max] = [percentile(latencies, 0.5), percentile(latencies, 0.99), latencies.at(-1)!];
  const created = statuses.get(200) ?? 0;
  const { rows } = await service.pool.query<{ created: string }>(`select count(*) as created from es.events where type = 'PaymentCreated'`);
  const stored = Number(rows[0]!.created);
  console.log(
    `${perSecond.toFixed(0)}/s for ${seconds} s behind ${PROCESSOR_MS} ms a leg: p50 ${p50.toFixed(0)} ms, p99 ${p99.toFixed(0)} ms, longest ${max.toFixed(0)} ms; ceiling ${CEILING_P99_MS} ms`,
  );
  console.log(`answers ${[...statuses].map(([status, count]) => `${status}: ${count}`).join(', ')}; stored ${stored}, the warm-up included`);
  if (created < rate * seconds || stored < created) process.exitCode = 1;
} finally {
  await service.stop();
}
