/**
 * The list and its rebuild at size (`--payments N`, default 1,000,000): history is multiplied in the database from one real payment, then the product's own rebuild makes the
 * list of it, against one `create table as` over the same events; then every page is fetched over HTTP, and the last ones must cost no more than twice the first ones.
 */
import { spawn } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { closedLoop } from './load.js';
import { refuseWithoutFsync, printSettings } from './pgbench.js';
import { createRequest, rssMib, startService, type BenchService } from './service.js';

const PAGE = 100;
const COMPARED_PAGES = 50;
const OPERATOR = fileURLToPath(new URL('../apps/operator/main.js', import.meta.url));

const { values } = parseArgs({ options: { payments: { type: 'string', default: '1000000' } } });
const payments = Number(values.payments);

/** Copies the newest payment's two events under new ids, `count` times, a millisecond apart, and moves the head. */
const multiply = async ({ pool }: BenchService, count: number): Promise<void> => {
  await pool.query('set jit = off');
  await pool.query(
    `with last as (select position from es.head),
          model as (select * from es.events where stream_id = (select stream_id from es.events where type = 'PaymentCreated' order by position desc limit 1)),
          streams as (select n, 'payment-' || gen_random_uuid() as stream_id from generate_series(1, $1::int) n)
     insert into es.events (position, stream_id, revision, event_id, type, data, meta)
     select last.position + (s.n - 1) * 2 + m.revision + 1, s.stream_id, m.revision, gen_random_uuid(), m.type, m.data,
            jsonb_set(m.meta::jsonb, '{recordedAt}', to_jsonb(to_char('2026-01-01'::timestamptz + s.n * interval '1 ms', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')))::json
     from streams s cross join model m cross join last`,
    [count],
  );
  await pool.query('update es.head set position = (select max(position) from es.events)');
  await pool.query('analyze es.events');
};

/** The live projection has the new events too: it must not compete with what is measured. */
const caughtUp = async ({ pool }: BenchService): Promise<void> => {
  for (;;) {
    const { rows } = await pool.query<{ done: boolean }>(
      `select position::numeric >= (select position from es.head) as done from projection_checkpoint where name = 'payment-list'`,
    );
    if (rows[0]?.done) return;
    await new Promise((wake) => setTimeout(wake, 500));
  }
};

/** Runs the command line's rebuild; its memory is sampled while it runs. */
const rebuild = async (service: BenchService): Promise<{ seconds: number; events: number; peakMib: number }> => {
  const started = performance.now();
  const child = spawn(process.execPath, [OPERATOR, '--json', 'projections', 'rebuild', 'payment-list'], {
    env: { ...process.env, DATA_DIR: service.dataDir, LOG_LEVEL: 'error' },
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  let output = '';
  child.stdout.on('data', (chunk: Buffer) => (output += chunk.toString()));
  let peakMib = 0;
  const sampler = setInterval(
    () =>
      void rssMib(child.pid!).then(
        (mib) => (peakMib = Math.max(peakMib, mib)),
        () => undefined,
      ),
    250,
  );
  const code = await new Promise((done) => child.once('exit', done));
  clearInterval(sampler);
  if (code !== 0) throw new Error(`the rebuild failed: ${output}`);
  const { events } = JSON.parse(output) as { events: number };
  return { seconds: (performance.now() - started) / 1_000, events, peakMib };
};

const ceiling = async ({ pool }: BenchService): Promise<number> => {
  const started = performance.now();
  await pool.query(
    'create table bench_ceiling as select stream_id, count(*) as events, json_agg(data order by revision) as data from es.events group by stream_id',
  );
  const seconds = (performance.now() - started) / 1_000;
  await pool.query('drop table bench_ceiling');
  return seconds;
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
  const best = Math.min(await ceiling(service), await ceiling(service));
  console.log(`rebuild of ${large.events} events: ${large.seconds.toFixed(1)} s, ${(large.events / large.seconds).toFixed(0)} events/s`);
  console.log(`create table as: ${best.toFixed(1)} s; ratio ${(best / large.seconds).toFixed(2)} (floor 0.5)`);
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
