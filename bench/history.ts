/** Makes a history of any size and rebuilds the list from it, for the benchmarks with a large log. */
import { LOG_SEAL } from '#audit';
import { checkpointOf } from '#eventstore';
import { KEYS_FROM_LOG } from '#payments';
import { WEBHOOK_OUTBOX } from '#webhooks';
import { READ_MODELS } from '../apps/services.js';
import { operate } from './operate.js';
import type { BenchService } from './service.js';

/** The key of the copies' personal data. A box cannot be opened in another stream, so the data of the copies counts as erased. */
const COPIED_KEY = '00000000-0000-7000-8000-000000000001';

/** Copies the two events of the newest payment `count` times, with new ids and one millisecond apart. Then moves the head of the log. */
export const multiply = async ({ pool }: BenchService, count: number): Promise<void> => {
  await pool.query('set jit = off');
  await pool.query('insert into personal_erased (key_id, erasure_id, erased_at) values ($1, $1, now()) on conflict do nothing', [COPIED_KEY]);
  await pool.query(
    `with last as (select position from es.head),
          model as (select * from es.events where stream_id = (select stream_id from es.events where type = 'PaymentCreated' order by position desc limit 1)),
          streams as (select n, 'payment-' || gen_random_uuid() as stream_id from generate_series(1, $1::int) n)
     insert into es.events (position, stream_id, revision, event_id, type, data, meta)
     select last.position + (s.n - 1) * 2 + m.revision + 1, s.stream_id, m.revision, gen_random_uuid(), m.type,
            regexp_replace(m.data::text, '"key":"[0-9a-f-]{36}"', '"key":"${COPIED_KEY}"', 'g')::json,
            jsonb_set(m.meta::jsonb, '{recordedAt}', to_jsonb(to_char('2026-01-01'::timestamptz + s.n * interval '1 ms', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')))::json
     from streams s cross join model m cross join last`,
    [count],
  );
  await pool.query('update es.head set position = (select max(position) from es.events)');
  await pool.query('analyze es.events');
};

/** The checkpoints that a service of this release moves. A store may also hold checkpoints of older shapes, which nothing moves. */
const FOLLOWED = [...READ_MODELS.map(checkpointOf), LOG_SEAL, WEBHOOK_OUTBOX, KEYS_FROM_LOG];

/** Waits until every projection has applied all events. Otherwise the projections would disturb the measurement. */
export const caughtUp = async ({ pool }: BenchService): Promise<void> => {
  for (;;) {
    const { rows } = await pool.query<{ done: boolean }>(
      `select count(*) = cardinality($1::text[]) and bool_and(position <> '' and position::numeric >= (select position from es.head)) as done
       from projection_checkpoint where name = any($1)`,
      [FOLLOWED],
    );
    if (rows[0]?.done) return;
    await new Promise((wake) => setTimeout(wake, 500));
  }
};

/** Runs `payfold projections rebuild` as a process and samples its memory. */
export const rebuild = async (service: BenchService): Promise<{ seconds: number; events: number; peakMib: number }> => {
  const { exitCode, stdout, stderr, seconds, peakMib } = await operate(service, 'projections', 'rebuild', 'payment-list');
  if (exitCode !== 0) throw new Error(`the rebuild failed: ${stdout}${stderr}`);
  const { events } = JSON.parse(stdout) as { events: number };
  return { seconds, events, peakMib };
};
