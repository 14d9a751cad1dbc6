/**
 * `payfold audit verify` on a log that lost its last events, and with read models that make no progress. The command must end in time. It must not
 * report ok for a part that it did not compare.
 */
import { execFile } from 'node:child_process';
import { tmpdir } from 'node:os';
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { createPool, type Pool } from '#platform';
import { eventually } from '../support/eventually.js';
import { freshDatabase } from '../support/postgres.js';
import { DataDir, newKey, start, welcomeOf } from '../support/processes.js';
import { paymentOf, PAYMENTS } from '../support/service.js';

const LAUNCHER = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname;
const COMMAND_MS = 60_000;
const PAID = 3;

let dataDir: DataDir;
let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
let end: number;

interface Verdict {
  readonly ok: boolean;
  readonly checks: readonly { readonly name: string; readonly ok: boolean; readonly detail: string }[];
}
const payfold = (...args: string[]): Promise<{ code: number; stdout: string; stderr: string }> =>
  new Promise((done) => {
    const env = { PATH: process.env.PATH, HOME: process.env.HOME, DATA_DIR: dataDir.data, DATABASE_URL: database.url, LOG_LEVEL: 'error' };
    const child = execFile(process.execPath, [LAUNCHER, ...args, '--json'], { env, cwd: tmpdir(), timeout: COMMAND_MS }, (error, stdout, stderr) =>
      done({ code: error ? Number(error.code ?? 99) : 0, stdout, stderr }),
    );
    child.stdin?.end();
  });
const verify = async (...more: string[]): Promise<{ code: number; failed: Record<string, string>; seconds: number }> => {
  const begun = performance.now();
  const { code, stdout } = await payfold('audit', 'verify', ...more);
  const failed = (JSON.parse(stdout) as Verdict).checks.filter(({ ok }) => !ok).map(({ name, detail }) => [name, detail] as const);
  return { code, failed: Object.fromEntries(failed), seconds: (performance.now() - begun) / 1_000 };
};

beforeAll(async () => {
  dataDir = await DataDir.create();
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'spec', max: 2 });
  const service = await start('standalone', dataDir, { DATABASE_URL: database.url });
  const { apiKey, portalId } = welcomeOf(service.stdout())!;
  for (let paid = 0; paid < PAID; paid++) {
    const answer = await fetch(`${service.url}${PAYMENTS}`, {
      method: 'POST',
      headers: { authorization: `ApiKey ${apiKey}`, 'content-type': 'application/json', 'idempotency-key': newKey() },
      body: JSON.stringify(paymentOf(portalId)),
    });
    expect(answer.status).toBe(200);
  }
  await service.stop();
  // A worker signs a head when it starts.
  expect((await verify()).failed).toEqual({});
  const again = await start('standalone', dataDir, { DATABASE_URL: database.url });
  await eventually(async () => (await pool.query('select from log_head h join log_state s on h.size = s.size')).rowCount === 1);
  await again.stop();
  end = Number((await pool.query<{ position: string }>('select position from es.head')).rows[0]!.position);
}, 2 * COMMAND_MS);
afterAll(async () => {
  await pool.end();
  await dataDir.remove();
  await database.drop();
});

test('a read model that cannot go on is waited for as long as the option says; a stopped one not at all; neither is called ok', async () => {
  await pool.query(`update projection_checkpoint set position = '00000000000000000001' where name like 'payment-list@%' or name like 'journal@%'`);
  const other = await pool.connect();
  // The checkpoints of the list and the journal were set back. The lock stops the list from moving its checkpoint. The journal applies events again,
  // finds their rows, and stops.
  await other.query(`begin; select from projection_checkpoint where name like 'payment-list@%' for update`);
  const { code, failed, seconds } = await verify('--timeout-seconds', '2').finally(() => other.query('rollback'));
  other.release();
  expect(code).toBe(1);
  expect(failed['read models']).toMatch(/^not compared in full: payment-list did not reach \d+ within 2000 ms/);
  expect(failed.journal).toMatch(/^not compared in full: journal stopped at/);
  expect(failed.books).toMatch(/^not compared in full: journal stopped at/);
  expect(Object.keys(failed).sort()).toEqual(['books', 'journal', 'read models']);
  expect(seconds).toBeLessThan(30);
  expect(await payfold('projections', 'rebuild', '--all')).toMatchObject({ code: 0, stderr: '' });
  expect((await verify()).failed).toEqual({});
});

test('a log that was cut behind a signed head, its tree kept: the head is named, and what lies beyond the log is not called ok', async () => {
  await pool.query('delete from es.events where position > $1', [end - 2]);
  await pool.query('update es.head set position = $1', [end - 2]);
  const { code, failed, seconds } = await verify();
  expect(code).toBe(1);
  expect(failed.events).toMatch(new RegExp(`^the log ends after ${end - 2} events .*; ${end} were sealed`));
  expect(failed.heads).toMatch(
    new RegExp(`the head of ${end} in the database was signed at .* over ${end} events; the log shows only ${end - 2} now`),
  );
  expect(failed['read models']).toMatch(/payment-list has applied events up to position \d+, and the log ends at \d+/);
  expect(failed.journal).toMatch(/journal has applied events up to position/);
  expect(seconds).toBeLessThan(30);
});
