/**
 * Measures the payment list and its rebuild with many payments (`--payments N`, default 1,000,000). The history consists of copies of one real
 * payment. The rebuild of the list is compared with one `create table as` over the same events. Then every page is fetched over HTTP. The last pages
 * should take at most twice the time of the first ones.
 */
import { parseArgs } from 'node:util';
import { caughtUp, multiply, rebuild } from './history.js';
import { closedLoop } from './load.js';
import { refuseWithoutFsync, printSettings } from './pgbench.js';
import { type BenchService, createRequest, startService } from './service.js';

const PAGE = 100;
const COMPARED_PAGES = 50;

const { values } = parseArgs({ options: { payments: { type: 'string', default: '1000000' } } });
const payments = Number(values.payments);

/** One statement that makes the list's columns for this history, without indexes. Like the rebuild, it must read the JSON of every event. */
const SAME_COLUMNS = `
  select substr(intent.stream_id, 9)::uuid as payment_id, (intent.data ->> 'accountId')::uuid as account_id, (intent.data ->> 'portalId')::uuid as portal_id,
         (intent.meta ->> 'recordedAt')::timestamptz as created_at, 'succeeded' as status, null::uuid as open_attempt_id, null::timestamptz as open_since,
         outcome.revision,
         json_build_object('phase', 'charged', 'createdAt', intent.meta ->> 'recordedAt', 'attemptId', intent.data ->> 'attemptId', 'terms', intent.data,
           'confirmationNumber', outcome.data ->> 'confirmationNumber', 'legs', outcome.data -> 'legs') as state
  from es.events intent join es.events outcome on outcome.stream_id = intent.stream_id and outcome.type = 'PaymentCreated'
  where intent.type = 'PaymentInitiated'`;
/** The events of each stream as one text. Postgres does not parse the JSON. */
const SAME_TEXT = 'select stream_id, count(*) as events, json_agg(data order by revision) as data from es.events group by stream_id';

/** Seconds that a `create table as` takes. The better of two runs. */
const ceiling = async ({ pool }: BenchService, select: string): Promise<number> => {
  let best = Number.POSITIVE_INFINITY;
  for (let round = 0; round < 2; round++) {
    const started = performance.now();
    await pool.query(`create table bench_ceiling as ${select}`);
    best = Math.min(best, (performance.now() - started) / 1_000);
    await pool.query('drop table bench_ceiling');
  }
  return best;
};

const service = await startService();
try {
  await refuseWithoutFsync(service.pool);
  await closedLoop({ host: service.url.hostname, port: Number(service.url.port), connections: 1, request: createRequest(service, 'model') }, 0.2);

  const tenth = Math.round(payments / 10);
  await multiply(service, tenth);
  await caughtUp(service);
  const small = await rebuild(service);
  await multiply(service, payments - tenth);
  await caughtUp(service);
  await printSettings(service.pool);
  const large = await rebuild(service);
  const [columnsSeconds, textSeconds] = [await ceiling(service, SAME_COLUMNS), await ceiling(service, SAME_TEXT)];
  console.log(`rebuild of ${large.events} events: ${large.seconds.toFixed(1)} s, ${(large.events / large.seconds).toFixed(0)} events/s`);
  console.log(`create table as, the same columns: ${columnsSeconds.toFixed(1)} s; ratio ${(columnsSeconds / large.seconds).toFixed(2)} (floor 0.5)`);
  console.log(`create table as, the same events as text: ${textSeconds.toFixed(1)} s; ratio ${(textSeconds / large.seconds).toFixed(2)}`);
  console.log(
    `peak memory of the rebuild: ${small.peakMib.toFixed(0)} MiB at ${small.events} events, ${large.peakMib.toFixed(0)} MiB at ${large.events}`,
  );

  const durations: number[] = [];
  let listed = 0;
  for (let cursor: string | null = null; ;) {
    const started = performance.now();
    const response = await fetch(`${service.url.origin}/api/partner/v1/payments?limit=${PAGE}${cursor ? `&cursor=${cursor}` : ''}`, {
      headers: { authorization: `ApiKey ${service.apiKey}` },
    });
    const { data } = (await response.json()) as { data: { payments: unknown[]; nextCursor: string | null } };
    durations.push(performance.now() - started);
    listed += data.payments.length;
    cursor = data.nextCursor;
    if (cursor === null) break;
  }
  const median = (part: number[]) => [...part].sort((a, b) => a - b)[Math.floor(part.length / 2)]!;
  const first = median(durations.slice(1, 1 + COMPARED_PAGES));
  const last = median(durations.slice(-1 - COMPARED_PAGES, -1));
  console.log(
    `${durations.length} pages of ${PAGE}, ${listed} payments: the first ${first.toFixed(1)} ms, the last ${last.toFixed(1)} ms each; ratio ${(last / first).toFixed(2)} (ceiling 2)`,
  );
  const { rows } = await service.pool.query<{ count: string }>('select count(*) as count from payment_list');
  if (listed !== Number(rows[0]!.count)) {
    console.log(`the table has ${rows[0]!.count} payments`);
    process.exitCode = 1;
  }
} finally {
  await service.stop();
}
