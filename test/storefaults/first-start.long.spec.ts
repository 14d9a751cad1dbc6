/** Processes are killed in each step of a first start (fault 10). The next start continues, and database and log have the same single id. */
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import pg from 'pg';
import { INSTALLATION_STREAM, installationEvents } from '#eventstore';
import { eventually } from '../support/eventually.js';
import { DataDir, type Environment, launch, runtimeOf, start, welcomeOf } from '../support/processes.js';
import { freshDatabase } from '../support/postgres.js';
import { doubles, type Node, urlOf, withLog } from './nodes.js';
import { Partner } from './partner.js';

const TEST_MS = 600_000;
const RUNS = 10;

let dataDir: DataDir;
beforeEach(async () => {
  dataDir = await DataDir.create();
});
afterEach(() => dataDir.remove());

const rowsOf = async (url: string, sql: string): Promise<readonly object[]> => {
  const client = new pg.Client({ connectionString: url });
  await client.connect();
  try {
    return (await client.query<object>(sql)).rows;
  } finally {
    await client.end();
  }
};

/** Starts the whole service, makes one payment, and stops it. `said`: the output of the killed start, which may already have shown the API key. */
const startAndPay = async (env: Environment, said = ''): Promise<void> => {
  const service = await start('standalone', dataDir, env);
  const { apiKey, portalId } = welcomeOf(service.stdout()) ?? welcomeOf(said)!;
  const partner = new Partner(() => ({ url: service.url, apiKey, portalId }));
  expect((await partner.create()).sent.at(-1)).toMatchObject({ status: 200 });
  const installations = await rowsOf(runtimeOf(dataDir).databaseUrl, 'select id, state from installation');
  expect(installations).toEqual([{ id: expect.any(String), state: 'confirmed' }]);
  await service.stop();
};

describe('the events are in KurrentDB', () => {
  const nodes = doubles();
  let node: Node;
  let database: Awaited<ReturnType<typeof freshDatabase>>;
  beforeEach(async () => {
    [node, database] = await Promise.all([nodes.empty(), freshDatabase()]);
  });
  afterEach(async () => {
    await nodes.end();
    await database.drop();
  });

  const idsInLog = () =>
    withLog(urlOf(node.port), async (store) => {
      const ids: string[] = [];
      for await (const event of store.read(INSTALLATION_STREAM)) ids.push(installationEvents.read(event).data.installationId);
      return ids;
    });
  const has = (sql: string) => async () => (await rowsOf(database.url, `select 1 where ${sql}`).catch(() => [])).length > 0;

  test.each([
    ['while it makes the tables', {}, has(`to_regclass('es.events') is not null`)],
    ['before the id is in the database', {}, has(`to_regclass('installation') is not null`)],
    ['before the event is in the log', { FAILPOINT: 'append.InstallationCreated:before' }, null],
    ['before the id is confirmed', { FAILPOINT: 'append.InstallationCreated:after' }, null],
    ['after the id is confirmed', {}, has(`exists (select from installation where state = 'confirmed')`)],
  ] as const)(
    'killed %s',
    async (_step, failpoint, isThere) => {
      const env = { KURRENTDB_URL: urlOf(node.port), DATABASE_URL: database.url };
      const first = launch('worker', dataDir, { ...env, ...failpoint, SIMULATOR_URL: 'http://127.0.0.1:9' });
      if (isThere) {
        await eventually(isThere, { everyMs: 1 });
        await first.killTree();
      }
      expect((await first.exited).signal).toBe('SIGKILL');
      await startAndPay(env);
      const [row] = await rowsOf(database.url, 'select id from installation');
      expect(await idsInLog()).toEqual([(row as { id: string }).id]);
    },
    TEST_MS,
  );
});

test(
  `the whole service on its embedded Postgres, killed ${RUNS} times in its first start`,
  async () => {
    const begun = performance.now();
    await startAndPay({});
    const tookMs = performance.now() - begun;
    for (let run = 1; run <= RUNS; run++) {
      await dataDir.remove();
      dataDir = await DataDir.create();
      const first = launch('standalone', dataDir);
      await new Promise((wake) => setTimeout(wake, (tookMs * run) / (RUNS + 1)));
      await first.killTree();
      await startAndPay({}, first.stdout());
    }
  },
  TEST_MS,
);
