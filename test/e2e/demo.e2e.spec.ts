/**
 * `npm run demo` while its service is killed and started again. The demo repeats every request under its key. At the end the books agree to the cent.
 */
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import pg from 'pg';
import { freePort } from '#platform';
import { eventually } from '../support/eventually.js';
import { DataDir, entryOf, launch, type RunningProcess, runtimeOf, start } from '../support/processes.js';

const PAYMENTS = 250;
/** After a kill, a key or payment in progress is taken over only after a minute. */
const TIMEOUT_MS = 400_000;

let dataDir: DataDir;
let port: string;
let service: RunningProcess;
beforeAll(async () => {
  dataDir = await DataDir.create();
  port = String(await freePort());
  service = await start('standalone', dataDir, { PORT: port });
}, TIMEOUT_MS);
afterAll(() => dataDir.remove());

const eventsOf = async (types: readonly string[]): Promise<number> => {
  const client = new pg.Client({ connectionString: runtimeOf(dataDir).databaseUrl });
  await client.connect();
  const { rows } = await client
    .query<{ count: string }>('select count(*) as count from es.events where type = any($1)', [types])
    .finally(() => client.end());
  return Number(rows[0]!.count);
};
const killAndStart = async (): Promise<void> => {
  await service.killTree();
  service = await start('standalone', dataDir, { PORT: port });
};

test(
  'goes on after a kill -9 while it pays, and one while it returns',
  async () => {
    const before = await eventsOf(['PaymentInitiated']);
    const demo = launch(
      [
        '--enable-source-maps',
        join(entryOf('standalone'), '../../demo/main.js'),
        '--payments',
        String(PAYMENTS),
        '--concurrency',
        '8',
        '--seed',
        '7',
      ],
      dataDir,
    );
    await eventually(async () => (await eventsOf(['PaymentInitiated'])) >= before + PAYMENTS / 5, { timeoutMs: 60_000, everyMs: 20 });
    await killAndStart();
    await eventually(async () => (await eventsOf(['RefundRequested', 'VoidRequested'])) > 0, { timeoutMs: 180_000, everyMs: 20 });
    await killAndStart();
    const { code, stdout, stderr } = await demo.exited;
    expect([code, stderr]).toEqual([0, '']);
    expect(stdout).toContain('0 differences');
    // A create that is sent again makes no second payment.
    expect(await eventsOf(['PaymentInitiated'])).toBeLessThanOrEqual(before + PAYMENTS);
  },
  TIMEOUT_MS,
);
