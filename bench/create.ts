/**
 * Measures `POST /payments` over HTTP with all its parts: authentication, validation, key, two durable appends, and a processor without delay.
 *
 * - Throughput, as a ratio to durable single-row inserts by pgbench. Runs of both alternate on the same Postgres.
 * - Latency at half of the peak rate and at an ordinary rate, with an open loop.
 * - Processor time of a create at each rate, by process.
 * - Each part alone. Together they give an upper bound for any service made of these parts.
 *
 * At the end, the benchmark counts the stored payments.
 */
import { type Answered, closedLoop, type LoadResult, openLoop, percentile } from './load.js';
import { pgbenchBest, pgbenchTogether, printSettings, refuseWithoutFsync } from './pgbench.js';
import { createRequest, type Part, PARTS, processorMs, rssOf, startService } from './service.js';
import { printTrace } from './trace.js';

const CONNECTIONS = 64;
const ROUNDS = 3;
const ROUND_SECONDS = 10;
const LATENCY_SECONDS = 20;
const ORDINARY_RATE = 100;
const PART_SECONDS = 5;
/** Rows that a create writes durably: two events in the log, and the claim and the answer of the key. */
const ROWS_PER_CREATE = 4;
/** The test portal charges principal and fee as two transactions. */
const CHARGES_PER_CREATE = 2;

const service = await startService();
try {
  await refuseWithoutFsync(service.pool);
  await printSettings(service.pool);
  const load = (run: string) => ({
    host: service.url.hostname,
    port: Number(service.url.port),
    connections: CONNECTIONS,
    request: createRequest(service, run),
  });
  await closedLoop(load('warm'), 5);
  const memory = () => rssOf(service, ['api', 'worker']);
  const idle = await memory();
  let acknowledged = 0;
  /** Runs a load and adds its processor time to `spent`. */
  const measured = async (spent: Record<Part, number>, run: () => Promise<LoadResult>): Promise<LoadResult> => {
    const before = processorMs(service);
    const result = await run();
    const after = processorMs(service);
    for (const part of PARTS) spent[part] += after[part] - before[part];
    acknowledged += result.statuses.get(200) ?? 0;
    return result;
  };
  const nothing = (): Record<Part, number> => Object.fromEntries(PARTS.map((part) => [part, 0])) as Record<Part, number>;
  const printSpent = (rate: number, spent: Record<Part, number>, creates: number) => {
    const each = PARTS.map((part) => `${part} ${(spent[part] / creates).toFixed(2)}`).join(', ');
    const together = PARTS.reduce((sum, part) => sum + spent[part], 0) / creates;
    console.log(`processor milliseconds a create at ${rate.toFixed(0)}/s: ${each}; together ${together.toFixed(2)}`);
  };
  const atPeak = { spent: nothing(), creates: 0 };
  const rates: number[] = [];
  const yardsticks: number[] = [];
  const ratios: number[] = [];
  for (let round = 1; round <= ROUNDS; round++) {
    const result = await measured(atPeak.spent, () => closedLoop(load(`r${round}`), ROUND_SECONDS));
    atPeak.creates += result.answered;
    rates.push(result.perSecond);
    const best = await pgbenchBest(service.databaseUrl, service.pool);
    const statuses = [...result.statuses].map(([status, count]) => `${status}: ${count}`).join(', ');
    console.log(
      `round ${round}: ${result.perSecond.toFixed(0)} creates/s, p50 ${percentile(result.latencies, 0.5).toFixed(1)} ms, p99 ${percentile(result.latencies, 0.99).toFixed(1)} ms (${statuses})`,
    );
    if (best) {
      yardsticks.push(best.perSecond);
      ratios.push(result.perSecond / best.perSecond);
      console.log(
        `         pgbench ${best.perSecond.toFixed(0)} inserts/s with ${best.clients} clients, ratio ${(result.perSecond / best.perSecond).toFixed(2)}`,
      );
    }
  }
  const median = (values: number[]) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)]!;
  const half = median(rates) / 2;
  console.log(`\nmedian ${median(rates).toFixed(0)} creates/s (${Math.min(...rates).toFixed(0)} to ${Math.max(...rates).toFixed(0)})`);
  if (ratios.length > 0)
    console.log(
      `median ratio to pgbench ${median(ratios).toFixed(2)} (${Math.min(...ratios).toFixed(2)} to ${Math.max(...ratios).toFixed(2)}); floor 0.25, goal 0.35`,
    );
  printSpent(median(rates), atPeak.spent, atPeak.creates);
  for (const [run, rate, ceiling] of [
    ['half', half, '; ceiling 50 ms'],
    ['ordinary', ORDINARY_RATE, ''],
  ] as const) {
    const spent = nothing();
    const traced: Answered[] = [];
    const { latencies, answered } = await measured(spent, () => openLoop(load(run), rate, LATENCY_SECONDS, (one) => traced.push(one)));
    console.log(
      `at ${rate.toFixed(0)}/s, open loop: p50 ${percentile(latencies, 0.5).toFixed(1)} ms, p99 ${percentile(latencies, 0.99).toFixed(1)} ms${ceiling}`,
    );
    printSpent(rate, spent, answered);
    await printTrace(service.pool, run, traced);
  }
  console.log(`memory of API and worker after warm-up ${idle.toFixed(0)} MiB, now ${(await memory()).toFixed(0)} MiB`);

  // Two parts alone: the same request with wrong credentials, and the same charges sent directly to the processor.
  const { host } = service.simulatorUrl;
  const instrument = { number: '4242424242424242', expiryMonth: 12, expiryYear: 2030, cvv: '123' };
  const charges = (number: number): string => {
    const body = JSON.stringify({ ref: `part-${number}`, leg: 'principal', amountCents: 12_500, instrument });
    return `POST /v1/charges HTTP/1.1\r\nhost: ${host}\r\nauthorization: Sandbox part:sk_sandbox_part\r\ncontent-type: application/json\r\ncontent-length: ${body.length}\r\n\r\n${body}`;
  };
  const refused = await closedLoop({ ...load('part'), request: createRequest({ ...service, apiKey: `pc_${'x'.repeat(40)}` }, 'part') }, PART_SECONDS);
  const processor = await closedLoop({ host: service.simulatorUrl.hostname, port: Number(service.simulatorUrl.port), connections: CONNECTIONS, request: charges }, PART_SECONDS); // prettier-ignore
  if (refused.statuses.get(401) === undefined || processor.statuses.get(200) === undefined) throw new Error('a part did not answer as it should');
  console.log(`parts alone: ${refused.perSecond.toFixed(0)} refused creates/s, ${processor.perSecond.toFixed(0)} charges/s at the processor`);
  const together = await pgbenchTogether(service.databaseUrl, service.pool, CONNECTIONS);
  if (together !== null) {
    const bound = 1 / (1 / refused.perSecond + CHARGES_PER_CREATE / processor.perSecond + ROWS_PER_CREATE / together);
    console.log(`pgbench, ${CONNECTIONS} rows to a commit: ${together.toFixed(0)} rows/s`);
    console.log(`HTTP in, ${CHARGES_PER_CREATE} charges and ${ROWS_PER_CREATE} such rows at those rates on these cores: ${bound.toFixed(0)} creates/s, ratio ${(bound / median(yardsticks)).toFixed(2)}, with no work of our own`); // prettier-ignore
    console.log(`share of that bound: ${(median(rates) / bound).toFixed(2)}`);
  }

  const { rows } = await service.pool.query<{ created: string; gaps: string }>(
    `select (select count(*) from es.events where type = 'PaymentCreated') as created,
            (select max(position) - count(*) from es.events) as gaps`,
  );
  const stored = Number(rows[0]!.created);
  console.log(`acknowledged ${acknowledged} (and the warm-up), stored ${stored}, gaps in the log ${rows[0]!.gaps}`);
  if (stored < acknowledged || rows[0]!.gaps !== '0') process.exitCode = 1;
} finally {
  await service.stop();
}
