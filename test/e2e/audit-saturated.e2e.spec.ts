/**
 * Audit never stops payments: a finance key saturates the audit listener of the built service. Meanwhile partners create and list payments, and health
 * and metrics are read.
 */
import { connect, type Socket } from 'node:net';
import { get as httpGet, type IncomingMessage } from 'node:http';
import { mkdir } from 'node:fs/promises';
import { afterAll, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import pg from 'pg';
import { searchPathOf } from '#eventstore';
import { freePort } from '#platform';
import { READ_MODELS } from '../../apps/services.js';
import { eventually } from '../support/eventually.js';
import { figuresIn } from '../support/metrics.js';
import { freshDatabase } from '../support/postgres.js';
import { DataDir, launch, newKey, start, startApiAndWorker } from '../support/processes.js';
import { PAYMENTS, paymentOf } from '../support/service.js';

const LAUNCHER = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname;
/** An export of this size does not fit into the buffers of a connection. */
const COPIES = 40_000;
const SLOW_READERS = 20;
const QUICK_READERS = 30;
/** The limits of docs/operations.md#the-audit-listener. */
const [EXPORTS, QUERIES, FOLDED] = [4, 3, 250];
/** Bytes of the MAC before the place in a cursor. */
const MAC_BYTES = 16;
const placeIn = (cursor: string): string => Buffer.from(cursor, 'base64url').subarray(MAC_BYTES).toString();
/** A reader that takes nothing is cut off after 10 s, and the time that the least rate needs for one piece. */
const CUT_OFF_MS = 60_000;
/** A quick reader takes the rows of so many seconds. There is one a second. */
const QUICK_ROWS = 4_000;
const HONEST_PAUSE_MS = 25;
const READER_PAUSE_MS = 250;

let dataDir: DataDir;
let database: Awaited<ReturnType<typeof freshDatabase>>;
let db: pg.Client;
let apiUrl: string;
let auditUrl: string;
let metricsUrl: string;
let apiKey: string;
let portalId: string;
let authorization: string;

beforeAll(async () => {
  dataDir = await DataDir.create();
  await mkdir(dataDir.data);
  database = await freshDatabase();
  const [auditPort, metricsPort] = [await freePort(), await freePort()];
  const simulator = await start('simulator', dataDir);
  const env = { DATABASE_URL: database.url, SIMULATOR_URL: simulator.url };
  const [api] = await startApiAndWorker(dataDir, env, { AUDIT_PORT: String(auditPort), METRICS_PORT: String(metricsPort) });
  [apiUrl, auditUrl, metricsUrl] = [api.url, `http://127.0.0.1:${auditPort}/audit/v1`, `http://127.0.0.1:${metricsPort}`];
  const payfold = async <T>(...args: string[]): Promise<T> => {
    const { code, stdout, stderr } = await launch([LAUNCHER, ...args, '--json', '--yes'], dataDir, { ...env, LOG_LEVEL: 'silent' }).exited;
    expect([code, stderr]).toEqual([0, '']);
    return JSON.parse(stdout) as T;
  };
  const { accountId } = await payfold<{ accountId: string }>('accounts', 'create', '--name', 'City');
  ({ apiKey } = await payfold<{ apiKey: string }>('keys', 'issue', '--account', accountId));
  ({ portalId } = await payfold<{ portalId: string }>('portals', 'create', '--account', accountId, '--name', 'Water'));
  const { auditKey } = await payfold<{ auditKey: string }>('audit', 'keys', 'issue', '--name', 'Books', '--role', 'finance');
  authorization = `AuditKey ${auditKey}`;

  db = new pg.Client({ connectionString: database.url, options: `-c search_path=${searchPathOf(READ_MODELS).join(',')}` });
  await db.connect();
  expect((await create()).status).toBe(200);
  await eventually(async () => (await db.query('select from payment_list')).rowCount === 1);
  await db.query(`
    insert into payment_list (payment_id, account_id, portal_id, created_at, status, revision, state)
    select gen_random_uuid(), gen_random_uuid(), portal_id, created_at - n * interval '1 second', status, revision, state
    from payment_list, generate_series(1, ${COPIES}) as n`);
  await db.query('vacuum analyze payment_list');
}, 300_000);
afterAll(async () => {
  await db?.end();
  await dataDir?.remove();
  await database?.drop();
});

const create = () =>
  fetch(apiUrl + PAYMENTS, {
    method: 'POST',
    headers: { authorization: `ApiKey ${apiKey}`, 'content-type': 'application/json', 'idempotency-key': newKey() },
    body: JSON.stringify(paymentOf(portalId)),
  });
const ask = (path: string) => fetch(auditUrl + path, { headers: { authorization } });
const limited = async (): Promise<Record<string, number>> =>
  Object.fromEntries(
    [...figuresIn(await (await fetch(`${metricsUrl}/metrics`)).text())].flatMap(([name, value]) => {
      const [, limit] = /^payfold_audit_limited_total\{limit="(\w+)"/.exec(name) ?? [];
      return limit === undefined ? [] : [[limit, value]];
    }),
  );

/** Requests of honest clients, one of each kind at a time, until `stop`. Returns how many of each status there were. */
const honestClients = () => {
  const requests: Readonly<Record<string, () => Promise<Response>>> = {
    create,
    list: () => fetch(apiUrl + PAYMENTS, { headers: { authorization: `ApiKey ${apiKey}` } }),
    readyz: () => fetch(`${apiUrl}/readyz`),
    metrics: () => fetch(`${metricsUrl}/metrics`),
  };
  const statuses = Object.fromEntries(Object.keys(requests).map((name) => [name, new Map<number, number>()]));
  const times = Object.fromEntries(Object.keys(requests).map((name): [string, number[]] => [name, []]));
  let running = true;
  const clients = Object.entries(requests).map(async ([name, send]) => {
    while (running) {
      const begun = performance.now();
      const answer = await send();
      await answer.arrayBuffer();
      times[name]!.push(performance.now() - begun);
      await new Promise((next) => setTimeout(next, HONEST_PAUSE_MS));
      statuses[name]!.set(answer.status, (statuses[name]!.get(answer.status) ?? 0) + 1);
    }
  });
  return {
    /** At least so many requests of each kind were answered. */
    answered: (count: number) =>
      eventually(() => Object.values(statuses).every((one) => [...one.values()].reduce((sum, n) => sum + n, 0) >= count), { timeoutMs: 60_000 }),
    stop: async (during: string) => {
      running = false;
      await Promise.all(clients);
      const figures = Object.entries(times).map(([name, all]) => {
        all.sort((one, other) => one - other);
        return `${name} ${[0.5, 0.99].map((part) => Math.round(all[Math.floor(all.length * part)]!)).join('/')} (${all.length})`;
      });
      process.stderr.write(`audit: p50/p99 in ms of honest requests during ${during}: ${figures.join(', ')}\n`);
      return Object.fromEntries(Object.entries(statuses).map(([name, one]) => [name, [...one.keys()]]));
    },
  };
};
const ALL_GOOD = { create: [200], list: [200], readyz: [200], metrics: [200] };

const refusals = async (answers: readonly Response[]) => {
  for (const answer of answers) {
    expect(answer.status).toBe(503);
    expect(Number(answer.headers.get('retry-after'))).toBeGreaterThan(0);
    expect(await answer.json()).toMatchObject({ success: false, details: { code: 'RATE_LIMITED' } });
  }
};
/**
 * The number of statements that wait for a lock, by pool. In the worker, a sweep compares payments with their journal entries over the main pool. Its
 * statement does not count.
 */
const waiting = async (): Promise<ReadonlyMap<string, number>> => {
  const { rows } = await db.query<{ name: string; count: string }>(
    `select application_name as name, count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'
       and query not like 'select payment_id, string_agg(%' group by 1`,
  );
  return new Map(rows.map(({ name, count }) => [name, Number(count)]));
};
const wholeExport = (report: string) =>
  new Promise<IncomingMessage>((resolve, reject) => {
    httpGet(`${auditUrl}/exports/${report}`, { headers: { authorization } }, (response) =>
      response
        .resume()
        .once('error', reject)
        .once('end', () => resolve(response)),
    ).once('error', reject);
  });

let before: Record<string, number>;
beforeEach(async () => {
  before = await limited();
});
const met = async (limit: string) => ((await limited())[limit] ?? 0) - (before[limit] ?? 0);

test(`${SLOW_READERS} readers that take nothing of an export: ${EXPORTS} begin, and are cut off; the others are refused`, async () => {
  const honest = honestClients();
  const readers = await Promise.all(
    Array.from({ length: SLOW_READERS }, async () => {
      const socket: Socket = connect(Number(new URL(auditUrl).port), '127.0.0.1');
      socket.write(`GET /audit/v1/exports/payments HTTP/1.1\r\nHost: audit\r\nAuthorization: ${authorization}\r\n\r\n`);
      const first = await new Promise<string>((resolve, reject) => {
        socket.once('error', reject).once('data', (chunk: Buffer) => {
          socket.pause();
          resolve(chunk.toString());
        });
      });
      return { socket, status: Number(first.split(' ')[1]), first };
    }),
  );
  try {
    const begun = readers.filter(({ status }) => status === 200);
    const refused = readers.filter(({ status }) => status === 503);
    expect([begun.length, refused.length]).toEqual([EXPORTS, SLOW_READERS - EXPORTS]);
    for (const { first } of refused) expect(first.toLowerCase()).toContain('\r\nretry-after: 10\r\n');
    expect(await met('exports')).toBe(refused.length);
    await refusals([await ask('/exports/payments')]);
    // Queries go on beside the exports.
    expect((await ask('/ledger/balances')).status).toBe(200);

    await eventually(async () => (await met('rate')) === begun.length, { timeoutMs: CUT_OFF_MS, everyMs: 500 });
    for (const { socket } of begun) {
      let rest = '';
      const ended = new Promise((resolve) => socket.once('error', resolve).once('close', resolve));
      socket.on('data', (chunk: Buffer) => (rest = (rest + chunk.toString()).slice(-1_000))).resume();
      await ended;
      expect(rest).not.toContain('Export-Rows:');
    }
    // The next export gets a place, and is whole.
    expect(Number((await wholeExport('payments')).trailers['export-rows'])).toBeGreaterThan(COPIES);
  } finally {
    for (const { socket } of readers) socket.destroy();
  }
  await honest.answered(20);
  expect(await honest.stop(`${SLOW_READERS} slow downloads`)).toEqual(ALL_GOOD);
}, 180_000);

describe(`${QUICK_READERS} readers at the same time`, () => {
  test('that take whole exports, again and again: some are refused, and all others are whole', async () => {
    const { rows } = await db.query<{ from: Date }>(
      `select min(created_at) + ${COPIES - QUICK_ROWS} * interval '1 second' as from from payment_list`,
    );
    const from = rows[0]!.from.toISOString();
    const honest = honestClients();
    let whole = 0;
    let running = true;
    const readers = Array.from({ length: QUICK_READERS }, async () => {
      while (running) {
        const { statusCode, headers, trailers } = await wholeExport(`payments?from=${from}`);
        if (statusCode === 200) {
          expect(Number(trailers['export-rows'])).toBeGreaterThan(QUICK_ROWS);
          whole += 1;
        } else {
          expect([statusCode, headers['retry-after']]).toEqual([503, '10']);
          // A client that asks again at once would measure its own requests.
          await new Promise((next) => setTimeout(next, READER_PAUSE_MS));
        }
      }
    });
    try {
      await Promise.race([Promise.all(readers), honest.answered(20)]);
      await eventually(() => whole >= 2 * EXPORTS, { timeoutMs: 60_000 });
    } finally {
      running = false;
    }
    await Promise.all(readers);
    expect(await honest.stop(`${QUICK_READERS} quick downloads`)).toEqual(ALL_GOOD);
    expect(await met('exports')).toBeGreaterThan(0);
  }, 180_000);

  test('whose statements wait in Postgres: none of them holds a connection of payments', async () => {
    const locked = new pg.Client({ connectionString: database.url, options: `-c search_path=${searchPathOf(READ_MODELS).join(',')}` });
    await locked.connect();
    const honest = honestClients();
    try {
      await locked.query('begin; lock table webhook_attempt, journal_entry in access exclusive mode');
      const asked = (path: string, runs: number) => {
        const answers: Response[] = [];
        const all = Array.from({ length: QUICK_READERS }, () => ask(path).then((answer) => answers.push(answer)));
        return { runs, answers, all: Promise.all(all) };
      };
      const [exported, queried] = [asked('/exports/webhooks?format=ndjson', EXPORTS), asked('/ledger/journal', QUERIES)];
      for (const { answers, runs } of [exported, queried]) await eventually(() => answers.length === QUICK_READERS - runs);
      await eventually(async () => (await waiting()).get('payfold audit') === EXPORTS + QUERIES);
      const refused = [...exported.answers, ...queried.answers];
      // The projection of the journal waits in the worker.
      const others = [...(await waiting())].filter(([name]) => name !== 'payfold projections');
      expect(others).toEqual([['payfold audit', EXPORTS + QUERIES]]);
      await honest.answered(20);
      await locked.query('rollback');
      for (const { all } of [exported, queried]) await all;
      await refusals(refused);
      expect([exported, queried].map(({ answers }) => answers.filter(({ status }) => status === 200).length)).toEqual([EXPORTS, QUERIES]);
      expect(await met('queries')).toBe(QUICK_READERS - QUERIES);
      expect(await honest.stop('statements that wait')).toEqual(ALL_GOOD);
    } finally {
      await locked.end();
    }
  }, 60_000);
});

test('an export counts until its last statement has ended, also if its client is gone', async () => {
  const locked = new pg.Client({ connectionString: database.url });
  await locked.connect();
  try {
    await locked.query('begin; lock table webhook_attempt in access exclusive mode');
    const gone = Array.from({ length: EXPORTS }, () => new AbortController());
    const asked = gone.map(({ signal }) =>
      fetch(`${auditUrl}/exports/webhooks?format=ndjson`, { headers: { authorization }, signal }).catch(() => null),
    );
    await eventually(async () => (await waiting()).get('payfold audit') === EXPORTS);
    for (const one of gone) one.abort();
    expect(await Promise.all(asked)).toEqual(gone.map(() => null));
    await refusals([await ask('/exports/open')]);
    await locked.query('rollback');
    await eventually(async () => (await wholeExport('webhooks')).statusCode === 200);
  } finally {
    await locked.end();
  }
});

test('a search for a rare status at an earlier time folds a page at most, and goes on with its cursor', async () => {
  // Tests before this one made payments, which the worker may still be listing.
  await eventually(async () => {
    const { rows } = await db.query<{ listed: string; made: string }>(
      `select (select count(*) from payment_list) as listed, (select count(*) from es.events where type = 'PaymentInitiated') as made`,
    );
    return Number(rows[0]!.listed) === COPIES + Number(rows[0]!.made);
  });
  const asOf = new Date().toISOString();
  const places = await db.query<{ payment_id: string }>('select payment_id from payment_list order by created_at desc, payment_id desc limit 1000');
  const order = places.rows.map(({ payment_id: id }) => id);
  let cursor = '';
  for (let page = 1; page <= 3; page++) {
    const answer = await ask(`/payments?asOf=${asOf}&status=unknown&limit=1${cursor && `&cursor=${cursor}`}`);
    const { data } = (await answer.json()) as { data: { payments: object[]; nextCursor: string } };
    expect(data.payments).toEqual([]);
    cursor = data.nextCursor;
    expect(order.indexOf(placeIn(cursor).split(' ')[1]!)).toBe(page * FOLDED - 1);
  }
});
