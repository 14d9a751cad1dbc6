/**
 * Measures erasures of personal data: the plan and the erasure of one payer among `--payments N` (default 1,000,000) payments with personal data, and
 * how many payments a second the worker's retention erases beside creates. `--aged M` (default 5,000): payments whose retention is over. If a figure is
 * worse than its limit, the exit code is 1.
 */
import { parseArgs } from 'node:util';
import { caughtUp } from './history.js';
import { judge } from './judge.js';
import { closedLoop, openLoop, percentile } from './load.js';
import { operate, type Operated } from './operate.js';
import { printSettings, refuseWithoutFsync } from './pgbench.js';
import { createRequest, startService } from './service.js';

const { values } = parseArgs({ options: { payments: { type: 'string', default: '1000000' }, aged: { type: 'string', default: '5000' } } });
const [payments, aged] = [Number(values.payments), Number(values.aged)];
const LIMITS = { firstAnswerSeconds: 2, paymentsASecond: 500 } as const;
/** The payer of every request that a benchmark makes. */
const EMAIL = 'maria@example.com';
const DAY_MS = 86_400_000;
const CREATES_A_SECOND = 10;
const CONNECTIONS = 8;
const WARM_UP_SECONDS = 0.5;
const LOOK_MS = 250;
/** Without progress for this long, the retention counts as ended. */
const QUIET_MS = 15_000;

const done = (what: string, { exitCode, stdout, stderr, seconds }: Operated) => {
  if (exitCode !== 0) throw new Error(`${what}: ${stderr}${stdout}`);
  return { answer: JSON.parse(stdout) as { readonly erased?: number; readonly wouldErase?: number; readonly skipped: readonly unknown[] }, seconds };
};

const service = await startService();
try {
  const { pool } = service;
  await refuseWithoutFsync(pool);
  await printSettings(pool);
  const host = { host: service.url.hostname, port: Number(service.url.port) };
  const count = async (sql: string) => Number((await pool.query<{ count: string }>(sql)).rows[0]!.count);

  // The payer's own payments. All others differ in the hash of the address.
  await closedLoop({ ...host, connections: 1, request: createRequest(service, 'payer') }, WARM_UP_SECONDS);
  await caughtUp(service);
  await pool.query(
    `with made as (select gen_random_uuid() as key_id, 'payment-' || gen_random_uuid() as stream, n from generate_series(1, $1::int) as n),
     keys as (insert into personal_key (key_id, kid, wrapped) select key_id, 'k1', decode(repeat('00', 92), 'hex') from made)
     insert into personal_use (key_id, stream, account_id, mail_mac, begun_at)
     select m.key_id, m.stream, (select account_id from payment_list limit 1), sha256(n::text::bytea), now() from made m`,
    [payments],
  );
  await pool.query('analyze personal_use');
  await pool.query('analyze personal_key');
  console.log(
    `${await count('select count(*) from personal_use')} uses of keys, ${await count('select count(*) from payment_list')} of them by the payer`,
  );

  const erase = ['payments', 'erase', '--email', EMAIL, '--reason-code', 'request', '--by', 'Bench'];
  const { seconds: idleSeconds } = await operate(service, 'accounts', 'list');
  const plan = done('the plan', await operate(service, ...erase));
  judge(
    `erase by e-mail: the plan of ${plan.answer.wouldErase} payments after ${plan.seconds.toFixed(2)} s (ceiling ${LIMITS.firstAnswerSeconds} s); a command that lists accounts takes ${idleSeconds.toFixed(2)} s`,
    plan.seconds <= LIMITS.firstAnswerSeconds,
  );
  const applied = done('the erasure', await operate(service, ...erase, '--apply'));
  console.log(`erase by e-mail: ${applied.answer.erased} payments erased after ${applied.seconds.toFixed(2)} s`);
  if (applied.answer.erased !== plan.answer.wouldErase || applied.answer.skipped.length > 0) throw new Error('the erasure differs from its plan');

  // Retention. The filler has no streams, so it would only be in the way.
  await pool.query(`delete from personal_use where mail_mac is not null and stream not in (select 'payment-' || payment_id from payment_list)`);
  for (let run = 0; (await count('select count(*) from personal_use')) < aged; run++)
    await closedLoop({ ...host, connections: CONNECTIONS, request: createRequest(service, `aged-${run}`) }, 10);
  await caughtUp(service);
  // Retention counts from a payment's newest event. So all batches are settled before the time moves.
  done('the settlement', await operate(service, 'settlement', 'close'));
  await caughtUp(service);
  const { rows } = await pool.query<{ account_id: string }>('select account_id from payment_list limit 1');
  const overdue = await count('select count(*) from personal_use');
  const erasedBefore = await count('select count(*) from personal_erased');
  await operate(service, 'accounts', 'retention', rows[0]!.account_id, '--years', '1');
  const to = new Date(Math.floor(Date.now() / DAY_MS) * DAY_MS + 366 * DAY_MS).toISOString();
  const moving = operate(service, 'sandbox', 'advance', '--to', to);
  const seconds = 60;
  const load = openLoop({ ...host, connections: CONNECTIONS, request: createRequest(service, 'beside') }, CREATES_A_SECOND, seconds);
  const points: { readonly ms: number; readonly erased: number }[] = [];
  for (let quietSince = performance.now(); performance.now() - quietSince < QUIET_MS;) {
    const erased = (await count('select count(*) from personal_erased')) - erasedBefore;
    if (erased > (points.at(-1)?.erased ?? 0)) {
      points.push({ ms: performance.now(), erased });
      quietSince = performance.now();
    }
    if (erased === 0) quietSince = performance.now();
    if (erased >= overdue) break;
    await new Promise((wake) => setTimeout(wake, LOOK_MS));
  }
  if ((await moving).exitCode !== 0) throw new Error((await moving).stderr);
  const [first, last] = [points[0]!, points.at(-1)!];
  const rate = (last.erased - first.erased) / ((last.ms - first.ms) / 1_000);
  const { latencies } = await load;
  const beside = `p50 ${percentile(latencies, 0.5).toFixed(0)} ms, p99 ${percentile(latencies, 0.99).toFixed(0)} ms`;
  judge(
    `retention: ${last.erased} of ${overdue} payments erased, ${rate.toFixed(0)} a second (the worker's own limit is ${LIMITS.paymentsASecond}) beside ${CREATES_A_SECOND} creates/s (${beside})`,
    last.erased >= overdue && rate >= 0.95 * LIMITS.paymentsASecond,
  );
} finally {
  await service.stop();
}
