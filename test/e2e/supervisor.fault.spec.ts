/**
 * While partners pay, each process of `npm start` is killed in turn, also the supervisor. Either the service works again soon, or all its processes
 * are gone and the next start works. Acknowledged payments stay, and their keys replay. The last tests cover the end of the supervisor and its
 * reports about children.
 */
import { readFileSync } from 'node:fs';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import pg from 'pg';
import { schemaOf } from '#eventstore';
import { paymentListModel } from '#payments';
import { freePort } from '#platform';
import { readRuntime } from '../../apps/data-dir.js';
import { Partner } from '../../apps/demo/partner.js';
import { READ_MODELS } from '../../apps/services.js';
import { controlKeyOf, createSimulatorControl } from '../../apps/simulator/control.js';
import { eventually } from '../support/eventually.js';
import { figuresIn, metricsInCode } from '../support/metrics.js';
import {
  DataDir,
  isAlive,
  kill,
  newKey,
  type RunningProcess,
  runtimeOf,
  start,
  systemProcesses,
  type Welcome,
  welcomeOf,
} from '../support/processes.js';
import { CARD, PARTNER, paymentOf } from '../support/service.js';

/** The children of the supervisor, with a part of their commands. */
const CHILDREN = { api: 'api/main.js', worker: 'worker/main.js', simulator: 'simulator/main.js', postgres: 'bin/postgres' } as const;
type Name = keyof typeof CHILDREN;
const NAMES = Object.keys(CHILDREN) as Name[];

/** Subscribers that build no read model: the webhook outbox, the seal of the log, and the keys. */
const REACTORS = 3;
const PAYERS = 8;
/** A limit for a service that hangs. A restart takes 2 to 6 s on two idle cores. */
const BACK_WITHIN_MS = 60_000;

let dataDir: DataDir;
let service: RunningProcess;
let welcome: Welcome;
let metricsPort: number;
/** The text of each answer with status 200 that `traffic` got, by idempotency key. */
const acknowledged = new Map<string, string>();

const startAgain = async () => {
  service = await start('standalone', dataDir, { METRICS_PORT: String(metricsPort) });
  welcome = welcomeOf(service.stdout()) ?? welcome;
};
const partner = () => new Partner(service.url + PARTNER, welcome.apiKey);
const pay = (by: Partner, key = newKey(), number: string = CARD.approved) => by.post('payments', paymentOf(welcome.portalId, { number }), key);
const bankOf = () => createSimulatorControl(runtimeOf(dataDir).simulatorUrl, controlKeyOf(dataDir.data));

const pidOf = (name: Name): number => {
  const found = service.children().filter(({ ppid, args }) => ppid === service.pid && args.includes(CHILDREN[name]));
  expect(found).toHaveLength(1);
  return found[0]!.pid;
};
const pids = (): Record<Name, number> => Object.fromEntries(NAMES.map((name) => [name, pidOf(name)])) as Record<Name, number>;

/** Partners pay without a pause until `stop`, also after errors. */
const traffic = () => {
  let paying = true;
  const payers = Array.from({ length: PAYERS }, async () => {
    const by = partner();
    while (paying) {
      const key = newKey();
      await pay(by, key).then(
        ({ status, text }) => status === 200 && acknowledged.set(key, text),
        // No process listens at the moment, or the answer was cut off.
        () => new Promise((wake) => setTimeout(wake, 20)),
      );
    }
  });
  const more = async (count: number) => {
    const before = acknowledged.size;
    await eventually(() => acknowledged.size >= before + count);
  };
  return {
    more,
    stop: async () => {
      paying = false;
      await Promise.all(payers);
    },
  };
};

/** True if a payment passes through the API, the processor, the log, and the worker, which puts it into the list. */
const isWhole = async () => {
  const by = partner();
  const { status, data } = await pay(by);
  if (status !== 200) return false;
  const newest = async () => ((await by.get('payments?limit=1')).data.payments as { createdAt: string }[])[0]!.createdAt;
  return eventually(async () => (await newest()) >= (data.createdAt as string), { timeoutMs: BACK_WITHIN_MS });
};

const everythingReplays = async () => {
  // A killed Postgres may have lost endings of keys that were not on disk yet. The service makes them again when the leases are over. So end all
  // leases now.
  const client = new pg.Client({ connectionString: runtimeOf(dataDir).databaseUrl });
  await client.connect();
  await client.query(`update idempotency_key set lease_until = clock_timestamp() - interval '1 second' where state = 'in_progress'`);
  await client.end();
  const by = partner();
  for (const [key, text] of acknowledged) {
    const reply = await pay(by, key);
    expect([reply.status, reply.replayed, reply.text]).toEqual([200, true, text]);
    expect((await by.get(`payments/${reply.data.id as string}`)).data).toEqual(reply.data);
  }
};

const nothingIsLeft = async (children: readonly number[]) => {
  const left = () => systemProcesses().filter(({ pid, args }) => children.includes(pid) || args.includes(dataDir.data));
  await eventually(() => left().length === 0, { timeoutMs: BACK_WITHIN_MS }).catch(() => expect(left()).toEqual([]));
  expect(readRuntime(dataDir.data)).toBeNull();
};

beforeAll(async () => {
  dataDir = await DataDir.create();
  metricsPort = await freePort();
  await startAgain();
});
afterAll(() => dataDir?.remove());

describe('kill -9 while partners pay', () => {
  test.each(NAMES)('of the %s: it is started again at its address, and the service is whole again', async (name) => {
    const before = pids();
    const runtime = runtimeOf(dataDir);
    const load = traffic();
    await load.more(20);
    const killedAt = performance.now();
    kill(before[name]);
    await eventually(() => !isAlive(before[name]), { everyMs: 1 });
    await eventually(isWhole, { timeoutMs: BACK_WITHIN_MS, everyMs: 50 });
    const tookMs = performance.now() - killedAt;
    await load.more(20);
    await load.stop();

    const after = pids();
    expect(after).toEqual({ ...before, [name]: after[name] });
    expect(after[name]).not.toBe(before[name]);
    expect(runtimeOf(dataDir)).toEqual(runtime);
    await everythingReplays();
    process.stderr.write(`supervisor: whole ${(tookMs / 1_000).toFixed(1)} s after kill -9 of the ${name}\n`);
  });

  test('of the supervisor: nothing is left, and the next start goes on', async () => {
    const children = service.children().map(({ pid }) => pid);
    const load = traffic();
    await load.more(20);
    const killedAt = performance.now();
    kill(service.pid);
    await nothingIsLeft(children);
    process.stderr.write(`supervisor: nothing left ${((performance.now() - killedAt) / 1_000).toFixed(1)} s after its kill -9\n`);
    expect((await service.exited).signal).toBe('SIGKILL');
    await load.stop();
    await startAgain();
    await eventually(isWhole);
    await everythingReplays();
  });

  test('of the supervisor after Postgres was started again: Postgres follows it as before', async () => {
    const first = pidOf('postgres');
    kill(first);
    await eventually(() => service.children().some(({ pid, args }) => args.includes(CHILDREN.postgres) && pid !== first && !isAlive(first)));
    await eventually(isWhole);
    const children = service.children().map(({ pid }) => pid);
    kill(service.pid);
    await nothingIsLeft(children);
    await startAgain();
  });
});

describe('the supervisor ends', () => {
  /** Sends `count` payments. Resolves when the principal of each has been charged and its delayed answer is still in flight. */
  const inFlight = async (count: number, delayAfterMs: number): Promise<Promise<number | string | undefined>[]> => {
    const bank = bankOf();
    const charged = (await bank.truth()).length;
    await bank.arm({ match: { call: 'charge', leg: 'principal' }, times: count, delayAfterMs });
    const by = partner();
    const answers = Array.from({ length: count }, () =>
      pay(by).then(
        ({ status }) => status,
        (error: Error) => (error.cause as NodeJS.ErrnoException).code,
      ),
    );
    await eventually(async () => (await bank.truth()).length >= charged + count, { everyMs: 1 });
    return answers;
  };
  const childPids = () => service.children().map(({ pid }) => pid);
  const endedAtOnce = async () => {
    const begun = performance.now();
    expect(await service.stop()).toMatchObject({ code: 1, signal: null });
    // Much less than the request in flight lasts.
    expect(performance.now() - begun).toBeLessThan(10_000);
  };

  test('on SIGTERM: nothing that the API needs ends before the API has answered its requests in flight', async () => {
    const [children, { api, ...needed }] = [childPids(), pids()];
    const [late] = await inFlight(1, 8_000);
    const answers = await inFlight(PAYERS, 2_000);
    service.signal('SIGTERM');
    expect(await Promise.all(answers)).toEqual(answers.map(() => 200));
    expect(Object.values(needed).filter((pid) => !isAlive(pid))).toEqual([]);
    expect(await late).toBe(200);
    expect(await service.exited).toMatchObject({ code: 0, signal: null });
    expect(isAlive(api)).toBe(false);
    await nothingIsLeft(children);
    await startAgain();
  });

  test.each(['SIGINT', 'SIGHUP'] as const)('on %s to the whole process group, as from a terminal, the same', async (signal) => {
    const children = childPids();
    const answers = await inFlight(PAYERS, 2_000);
    process.kill(-service.pid, signal);
    expect(await Promise.all(answers)).toEqual(answers.map(() => 200));
    expect(await service.exited).toMatchObject({ code: 0, signal: null });
    await nothingIsLeft(children);
    await startAgain();
  });

  test('at once on a second signal, with all that it started; the next start works', async () => {
    const children = childPids();
    const answers = await inFlight(1, 20_000);
    service.signal('SIGTERM');
    await eventually(async () =>
      fetch(`${service.url}/healthz`).then(
        () => false,
        () => true,
      ),
    );
    await endedAtOnce();
    expect(await Promise.all(answers)).toEqual([expect.stringMatching(/^ECONN/)]);
    await nothingIsLeft(children);
    await startAgain();
    await eventually(isWhole);
  });

  test('also when a child hangs', async () => {
    const [children, { worker }] = [childPids(), pids()];
    kill(worker, 'SIGSTOP');
    service.signal('SIGTERM');
    await eventually(async () =>
      fetch(`${service.url}/healthz`).then(
        () => false,
        () => true,
      ),
    );
    await endedAtOnce();
    await nothingIsLeft(children);
    await startAgain();
  });
});

describe('/metrics of the supervisor', () => {
  const scrape = async () => {
    const answer = await fetch(`http://127.0.0.1:${metricsPort}/metrics`);
    const text = await answer.text();
    const figures = figuresIn(text);
    return { status: answer.status, text, figures, get: (name: string) => figures.get(name) };
  };

  test('adds up the figures of API and worker, and shows common figures once', async () => {
    const by = partner();
    const answered = 'payfold_http_request_duration_seconds_count{method="POST",route="/api/partner/v1/payments",status="504"}';
    const [attempts, before] = ['payfold_open_attempts{state="running",figure="count"}', await scrape()];
    expect((await pay(by, newKey(), CARD.unreadable)).code).toBe('PAYMENT_TIMEOUT');
    // Recovery may still work on attempts of earlier tests. So read the expected number of open attempts from the database.
    const client = new pg.Client({ connectionString: runtimeOf(dataDir).databaseUrl });
    await client.connect();
    const open = async () => {
      const { rows } = await client.query<{ n: number }>(
        `select count(*)::int as n from ${schemaOf(paymentListModel)}.payment_list where open_since is not null`,
      );
      return rows[0]!.n;
    };
    await eventually(async () => {
      const shown = (await scrape()).get(attempts);
      return shown !== undefined && shown > 0 && shown === (await open());
    });
    await client.end();
    const { text, figures, get, status } = await scrape();
    expect(status).toBe(200);
    // Each metric that the code declares is printed, also one that has no value yet.
    expect([...text.matchAll(/^# HELP (payfold_\w+)/gm)].map(([, name]) => name).sort()).toEqual(Object.keys(metricsInCode()).sort());
    expect(get(answered)).toBe((before.get(answered) ?? 0) + 1);
    expect([...figures.keys()].filter((name) => name.startsWith('payfold_projection_lag_milliseconds'))).toHaveLength(READ_MODELS.length + REACTORS);
    // Each error code is counted, and each call to the processor by its outcome. The fee's charge follows only an approved principal.
    for (const figure of [
      'payfold_http_errors_total{code="PAYMENT_TIMEOUT",status="504"}',
      'payfold_gateway_call_duration_seconds_count{gateway="simulator",operation="charge",outcome="unknown"}',
    ])
      expect([figure, get(figure)]).toEqual([figure, (before.get(figure) ?? 0) + 1]);
    for (const check of ['idempotency', 'readModels', 'schema', 'eventStore']) expect(get(`payfold_ready{check="${check}"}`)).toBe(1);
    for (const name of NAMES) expect(get(`payfold_child_restarts_total{child="${name}"}`)).toBe(0);
    for (const task of [
      'charge_cannot_be_undone',
      'settled_while_unknown',
      'outcome_overdue',
      'settlement_rejected',
      'settled_after_rejection',
      'refund_failed',
    ])
      expect(get(`payfold_staff_tasks{task="${task}",figure="count"}`)).toBe(0);
    expect(get('payfold_log_lines_masked_total')).toBe(0);
    expect(get('payfold_webhook_lease_lost_total')).toBe(0);
    expect(get('process_start_time_seconds')).toBeGreaterThan(Date.now() / 1_000 - 3_600);
    const { api, worker } = pids();
    const rss = [api, worker].map((pid) => Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))![1]) * 1_024);
    expect(get('process_resident_memory_bytes')! / (rss[0]! + rss[1]!)).toBeCloseTo(1, 0);
  });

  test('answers 503 while one of them is away', async () => {
    kill(pidOf('worker'));
    await eventually(async () => (await scrape()).status === 503, { everyMs: 1 });
    await eventually(async () => (await scrape()).status === 200);
    const { get } = await scrape();
    expect(NAMES.map((name) => get(`payfold_child_restarts_total{child="${name}"}`))).toEqual(NAMES.map((name) => (name === 'worker' ? 1 : 0)));
  });
});
