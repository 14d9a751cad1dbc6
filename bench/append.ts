/**
 * Measures how many events per second the Postgres event store appends durably, as a ratio to pgbench. pgbench inserts single rows with the same
 * columns, indexes and durability, on the same Postgres and in the same minute. On shared machines, absolute figures vary by a factor of three.
 * Ratios do not.
 *
 *     node dist/bench/append.js [--rounds 3] [--seconds 5] [--writers 64] [--events 0] [--pause 0] [--gate 1.8]
 *
 * - `--events`: number of events that are in the log before the first run. Plans and caches differ on a large table.
 * - `--pause`: seconds to wait before each run.
 *
 * The benchmark starts its own Postgres and refuses one that does not fsync. If the median ratio is below the gate, the exit code is 1. Without
 * pgbench, the benchmark prints only rates.
 */
import { randomUUID } from 'node:crypto';
import { closeSync, fdatasyncSync, openSync, writeSync } from 'node:fs';
import { chmod, mkdtemp, rm } from 'node:fs/promises';
import { cpus, tmpdir } from 'node:os';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import { createPostgresEventStore, eventStoreMigrations, type EventStore, type NewEvent } from '#eventstore';
import { createPool, migrate, startEmbeddedPostgres, type Pool } from '#platform';
import { CLIENTS, pgbench, SAMPLE, SAMPLE_BYTES } from './pgbench.js';

const { values } = parseArgs({
  options: {
    rounds: { type: 'string', default: '3' },
    seconds: { type: 'string', default: '5' },
    writers: { type: 'string', default: '64' },
    events: { type: 'string', default: '0' },
    pause: { type: 'string', default: '0' },
    gate: { type: 'string', default: '1.8' },
  },
});
const options = {
  rounds: Number(values.rounds),
  seconds: Number(values.seconds),
  writers: Number(values.writers),
  events: Number(values.events),
  pause: Number(values.pause),
  gate: Number(values.gate),
};
const WARM_UP_SECONDS = 2;

const print = (line: string) => process.stdout.write(`${line}\n`);
const rate = (perSecond: number) => `${(perSecond / 1000).toFixed(1)} k/s`;
const median = (numbers: readonly number[]) => [...numbers].sort((a, b) => a - b)[Math.floor(numbers.length / 2)]!;
const quantile = (sorted: Float64Array, q: number) => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * q))]!;

const event = (): NewEvent => ({ id: randomUUID(), type: 'PaymentInitiated', v: 1, ...SAMPLE });

interface Run {
  readonly perSecond: number;
  readonly acknowledged: number;
  readonly p50Ms: number;
  readonly p99Ms: number;
}

/** A closed loop: each writer sends its next event when the last one is acknowledged. */
const appendFor = async (store: EventStore, writers: number, seconds: number): Promise<Run> => {
  const latencies: number[] = [];
  const begun = performance.now();
  const end = begun + seconds * 1000;
  await Promise.all(
    Array.from({ length: writers }, async () => {
      for (let now = performance.now(); now < end;) {
        await store.append(`payment-${randomUUID()}`, 'no_stream', [event()]);
        const done = performance.now();
        latencies.push(done - now);
        now = done;
      }
    }),
  );
  const sorted = Float64Array.from(latencies).sort();
  return {
    perSecond: (latencies.length / (performance.now() - begun)) * 1000,
    acknowledged: latencies.length,
    p50Ms: quantile(sorted, 0.5),
    p99Ms: quantile(sorted, 0.99),
  };
};

/** Median time of one durable write on this disk, in milliseconds. A write is 8 KiB and fdatasync, as in a commit. */
const fsyncMs = (directory: string): number => {
  const file = openSync(join(directory, 'fsync'), 'w');
  const times: number[] = [];
  for (let index = 0; index < 200; index++) {
    const begun = performance.now();
    writeSync(file, Buffer.alloc(8192), 0, 8192, 0);
    fdatasyncSync(file);
    times.push(performance.now() - begun);
  }
  closeSync(file);
  return median(times);
};

/**
 * Share of the machine that is busy now, 0 to 1. Other work on the machine makes the ratio worse: pgbench uses many processes, and the store only
 * one.
 */
const othersShare = async (): Promise<number> => {
  const times = () =>
    cpus().reduce((sum, { times: t }) => ({ idle: sum.idle + t.idle, all: sum.all + t.idle + t.user + t.sys + t.nice + t.irq }), { idle: 0, all: 0 });
  const before = times();
  await new Promise((wake) => setTimeout(wake, 1_000));
  const after = times();
  return 1 - (after.idle - before.idle) / (after.all - before.all);
};

/** Checks that every acknowledged event is stored exactly once, and that positions have no gaps. */
const verify = async (pool: Pool, acknowledged: number): Promise<string> => {
  const { rows } = await pool.query<{ stored: string; gap_free: boolean; once: boolean; size: string }>(
    `select count(*) as stored, count(*) = max(position) and min(position) = 1 and max(position) = (select position from es.head) as gap_free,
            count(distinct event_id) = count(*) as once, pg_size_pretty(pg_total_relation_size('es.events')) as size from es.events`,
  );
  const { stored, gap_free, once, size } = rows[0]!;
  if (Number(stored) !== acknowledged || !gap_free || !once)
    throw new Error(`acknowledged ${acknowledged}, stored ${stored}, gap-free ${gap_free}, each once ${once}`);
  return `${stored} events (${size}): acknowledged = stored, gap-free, each once`;
};

const setting = async (pool: Pool, name: string) =>
  (await pool.query<{ value: string }>('select current_setting($1) as value', [name])).rows[0]!.value;

const run = async (directory: string): Promise<boolean> => {
  await chmod(directory, 0o755);
  const postgres = await startEmbeddedPostgres(join(directory, 'postgres'));
  const pool = createPool(postgres.url, { name: 'bench', max: 2, statementTimeoutMs: 600_000 });
  const store = createPostgresEventStore(postgres.url);
  try {
    const settings: Record<string, string> = {};
    for (const name of ['server_version', 'fsync', 'synchronous_commit', 'full_page_writes', 'shared_buffers', 'max_wal_size'])
      settings[name] = await setting(pool, name);
    if (settings.fsync !== 'on' || settings.synchronous_commit === 'off') throw new Error('this Postgres does not make commits durable: no figures');
    await migrate(pool, eventStoreMigrations);
    print(
      Object.entries(settings)
        .map(([name, value]) => `${name}=${value}`)
        .join(' '),
    );
    print(
      `${cpus().length} cores (${cpus()[0]?.model ?? 'unknown'}), Node ${process.version}, fdatasync of 8 KiB ${fsyncMs(directory).toFixed(2)} ms, payload ${SAMPLE_BYTES} bytes`,
    );

    let acknowledged = 0;
    while (acknowledged < options.events) acknowledged += (await appendFor(store, 256, 2)).acknowledged;
    acknowledged += (await appendFor(store, options.writers, WARM_UP_SECONDS)).acknowledged;
    await pgbench(postgres.url, pool, { clients: CLIENTS[0], seconds: WARM_UP_SECONDS });

    const ratios: number[] = [];
    const rates: number[] = [];
    for (let round = 1; round <= options.rounds; round++) {
      let others = 0;
      const settle = async () => {
        await new Promise((wake) => setTimeout(wake, options.pause * 1000));
        others = Math.max(others, await othersShare());
      };
      await settle();
      // Run between two runs of pgbench. If the machine slows down, both sides are affected.
      const before = await pgbench(postgres.url, pool, { clients: CLIENTS[0], seconds: options.seconds });
      await settle();
      const ours = await appendFor(store, options.writers, options.seconds);
      await settle();
      const after = await pgbench(postgres.url, pool, { clients: CLIENTS[1], seconds: options.seconds });
      await settle();
      acknowledged += ours.acknowledged;
      rates.push(ours.perSecond);
      const own = `append, ${options.writers} writers ${rate(ours.perSecond)} (p50 ${ours.p50Ms.toFixed(1)} ms, p99 ${ours.p99Ms.toFixed(1)} ms)`;
      if (before === null || after === null) print(`round ${round}: ${own}`);
      else {
        ratios.push(ours.perSecond / Math.max(before, after));
        print(
          `round ${round}: ${own}, pgbench c=${CLIENTS.join('/')} ${rate(before)} / ${rate(after)}, ratio ${ratios.at(-1)!.toFixed(2)}, other work ${Math.round(others * 100)} %`,
        );
      }
    }
    const alone = await appendFor(store, 1, 2);
    acknowledged += alone.acknowledged;
    print(`one writer alone: ${rate(alone.perSecond)} (p50 ${alone.p50Ms.toFixed(2)} ms, p99 ${alone.p99Ms.toFixed(2)} ms)`);
    print(await verify(pool, acknowledged));
    if (ratios.length === 0) {
      print('pgbench is not installed: no ratio, no gate');
      return true;
    }
    const spread = `${Math.min(...ratios).toFixed(2)}–${Math.max(...ratios).toFixed(2)}`;
    const passed = median(ratios) >= options.gate;
    print(`ratio: median ${median(ratios).toFixed(2)}, spread ${spread}; gate ${options.gate}: ${passed ? 'passed' : 'FAILED'}`);
    print(
      JSON.stringify({
        bench: 'append',
        medianRatio: median(ratios),
        ratios,
        medianPerSecond: median(rates),
        writers: options.writers,
        settings,
        passed,
      }),
    );
    return passed;
  } finally {
    await store.close();
    await pool.end();
    await postgres.stop();
  }
};

const directory = await mkdtemp(join(tmpdir(), 'payfold-bench-'));
try {
  if (!(await run(directory))) process.exitCode = 1;
} catch (error) {
  process.stderr.write(`${(error as Error).message}\n`);
  process.exitCode = 1;
} finally {
  await rm(directory, { recursive: true, force: true });
}
