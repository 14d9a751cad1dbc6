/**
 * Measures how long payments stay open after an outage of the processor. During the outage, charges get no answer and cannot be looked up. The result
 * is the time from the processor's return until each of these payments is resolved.
 *
 * `npm run bench -- outage [--minutes 4] [--rate 5]`.
 */
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { openLoop, percentile } from './load.js';
import { createRequest, startService } from './service.js';

const CONNECTIONS = 64;
const CEILING_P99_MS = 180_000;
/** Maximum wait for the last payment. */
const PATIENCE_MS = 1_200_000;

const { values } = parseArgs({ options: { minutes: { type: 'string', default: '4' }, rate: { type: 'string', default: '5' } } });
const [minutes, rate] = [Number(values.minutes), Number(values.rate)];

const service = await startService();
try {
  for (const call of ['finalize', 'void', 'refund', 'lookup'] as const)
    await service.bank.arm({ match: { call }, times: null, effect: false, answer: 'cut' });
  await service.bank.arm({ match: { call: 'charge' }, times: null, answer: 'cut' });
  const { statuses } = await openLoop(
    { host: service.url.hostname, port: Number(service.url.port), connections: CONNECTIONS, request: createRequest(service, 'outage') },
    rate,
    minutes * 60,
  );
  await service.bank.clearFaults();
  const healedAt = Date.now();
  const open = async () =>
    Number((await service.pool.query<{ count: string }>('select count(*) as count from payment_list where open_since is not null')).rows[0]!.count);
  while ((await open()) > 0 && Date.now() - healedAt < PATIENCE_MS) await sleep(1_000);
  const left = await open();
  const { rows } = await service.pool.query<{ at: Date }>(
    `select max(stored_at) as at from es.events where type in ('PaymentVoided', 'PaymentFailed') group by stream_id`,
  );
  const times = Float64Array.from(rows.map(({ at }) => Math.max(0, at.getTime() - healedAt))).sort();
  const [p50, p99, max] = [percentile(times, 0.5), percentile(times, 0.99), times.at(-1) ?? 0];
  console.log(`${minutes} min of outage, answers ${[...statuses].map(([status, count]) => `${status}: ${count}`).join(', ')}`);
  console.log(
    `${times.length} payments resolved after its end: p50 ${(p50 / 1_000).toFixed(0)} s, p99 ${(p99 / 1_000).toFixed(0)} s, the last after ${(max / 1_000).toFixed(0)} s; ceiling ${CEILING_P99_MS / 1_000} s; still open: ${left}`,
  );
  if (left > 0 || times.length === 0) process.exitCode = 1;
} finally {
  await service.stop();
}
