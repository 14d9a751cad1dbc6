/**
 * Erasure of personal data by the command line, and a restore: an older copy of the database, started with the erasure files of today, shows nothing that
 * was erased.
 */
import { execFile } from 'node:child_process';
import { cpSync, existsSync, mkdirSync, readdirSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import pg from 'pg';
import { freshDatabase } from '../support/postgres.js';
import { DataDir, launch, newKey, start, welcomeOf } from '../support/processes.js';
import { PAYMENTS, paymentOf } from '../support/service.js';

const LAUNCHER = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname;
const COMMAND_MS = 60_000;
const EMAIL = 'robin.lee@mail.example';
const BY = ['--by', 'Kim Park'];

let dataDir: DataDir;
let restoredDir: DataDir;
let database: Awaited<ReturnType<typeof freshDatabase>>;
let backup: string;
let apiKey: string;
let accountId: string;
/** Payments of one payer, and one of another. */
let mine: string[];
let other: string;
const admin = async (sql: string) => {
  const client = new pg.Client({ connectionString: process.env.TEST_POSTGRES_URL! });
  await client.connect();
  try {
    await client.query(sql);
  } finally {
    await client.end();
  }
};
const nameOf = (url: string) => new URL(url).pathname.slice(1);
const backupUrl = () => {
  const url = new URL(database.url);
  url.pathname = `/${backup}`;
  return url.toString();
};

interface Ran {
  readonly code: number;
  readonly stdout: string;
  readonly stderr: string;
}
const payfold = (
  args: readonly string[],
  { input = '', on = database.url, at = dataDir }: { input?: string; on?: string; at?: DataDir } = {},
): Promise<Ran> =>
  new Promise((done) => {
    const child = execFile(
      process.execPath,
      [LAUNCHER, ...args],
      { env: { PATH: process.env.PATH, HOME: process.env.HOME, DATABASE_URL: on, DATA_DIR: at.data }, cwd: tmpdir(), timeout: COMMAND_MS },
      (error, stdout, stderr) => done({ code: error ? Number(error.code ?? 99) : 0, stdout, stderr }),
    );
    child.stdin?.end(input);
  });
const json = async <T>(args: readonly string[], more: Parameters<typeof payfold>[1] = {}): Promise<T> => {
  const ran = await payfold([...args, '--json'], more);
  expect([ran.code, ran.stderr]).toEqual([0, '']);
  return JSON.parse(ran.stdout) as T;
};

const payerOf = async (url: string, id: string) => {
  const answer = await fetch(`${url}${PAYMENTS}/${id}`, { headers: { authorization: `ApiKey ${apiKey}` } });
  expect(answer.status).toBe(200);
  const { data } = (await answer.json()) as { data: { payer: object | null; personalDataErasedAt?: string } };
  return { payer: data.payer, erased: data.personalDataErasedAt !== undefined };
};

beforeAll(async () => {
  dataDir = await DataDir.create();
  restoredDir = await DataDir.create();
  database = await freshDatabase();
  backup = `${nameOf(database.url)}_backup`;
  const service = await start('standalone', dataDir, { DATABASE_URL: database.url });
  const welcome = welcomeOf(service.stdout())!;
  ({ apiKey } = welcome);
  const pay = async (email: string) => {
    const answer = await fetch(`${service.url}${PAYMENTS}`, {
      method: 'POST',
      headers: { authorization: `ApiKey ${apiKey}`, 'content-type': 'application/json', 'idempotency-key': newKey() },
      body: JSON.stringify(paymentOf(welcome.portalId, { payer: { firstName: 'Robin', email } })),
    });
    expect(answer.status).toBe(200);
    return ((await answer.json()) as { data: { id: string } }).data.id;
  };
  mine = [await pay(EMAIL), await pay('ROBIN.LEE@mail.example'), await pay(EMAIL)];
  other = await pay('someone@mail.example');
  await service.stop();
  ({ accountId } = (await json<{ accountId: string }[]>(['accounts', 'list']))[0]!);
  await admin(`create database ${backup} template ${nameOf(database.url)}`);
  // The files of that moment. The marks of the service stay with the log that it knew last.
  mkdirSync(restoredDir.data, { mode: 0o711 });
  for (const name of ['master.key', 'heads', 'simulator'].filter((one) => existsSync(join(dataDir.data, one))))
    cpSync(join(dataDir.data, name), join(restoredDir.data, name), { recursive: true });
}, 300_000);
afterAll(async () => {
  await dataDir?.remove();
  await restoredDir?.remove();
  await database?.drop();
  await admin(`drop database if exists ${backup} with (force)`);
});

test('wrong usage is refused, and nothing is erased', async () => {
  const refused = async (code: 1 | 2, ...args: string[]) => {
    const ran = await payfold(args);
    expect([ran.code, ran.stdout]).toEqual([code, '']);
    return ran.stderr;
  };
  const reason = ['--reason-code', 'request'];
  expect(await refused(2, 'payments', 'erase', ...reason, ...BY)).toContain('name payments, or one of --email, --retention, --replay');
  expect(await refused(2, 'payments', 'erase', other, '--retention', ...reason, ...BY)).toContain('name payments, or one of');
  expect(await refused(2, 'payments', 'erase', other, ...BY)).toContain('--reason-code is missing');
  expect(await refused(2, 'payments', 'erase', other, '--reason-code', 'whim', ...BY)).toContain('Allowed choices are request, retention, order');
  expect(await refused(2, 'payments', 'erase', 'all', ...reason, ...BY)).toContain('It must be a UUID');
  expect(await refused(2, 'payments', 'erase', '--email', '-', ...reason, ...BY)).toContain('standard input must have one line');
  expect(await refused(1, 'payments', 'erase', '--email', 'nobody', ...reason, ...BY)).toContain('must look like name@example.org');
  expect(await refused(1, 'payments', 'erase', '--replay', 'absent.ndjson', ...BY)).toContain('does not exist');
  expect(await refused(2, 'accounts', 'retention', accountId, '--years', 'seven')).toContain('whole number');
  expect(await refused(1, 'accounts', 'retention', accountId, '--years', '100', '--yes')).toContain('years must be 1 to 99');
  expect(await refused(2, 'accounts', 'retention', accountId, '--years', '7')).toMatch(
    /0 payments will be erased for ever tonight\. Nobody can be asked here: add --yes/,
  );
});

test('an account gets a retention, and loses it', async () => {
  expect(await json(['accounts', 'retention', accountId, '--years', '7', '--yes'])).toMatchObject({ accountId, retentionYears: 7 });
  expect(await json(['accounts', 'retention', accountId, '--years', 'none'])).toMatchObject({ accountId, retentionYears: null });
});

test('payments are found by the address, also from standard input', async () => {
  const newest = [...mine].reverse();
  for (const [address, input] of [
    [EMAIL, ''],
    ['-', `  ${EMAIL.toUpperCase()}\n`],
  ] as const) {
    const { payments } = await json<{ payments: { id: string }[] }>(['payments', 'find', '--email', address], { input });
    expect(payments.map(({ id }) => id)).toEqual(newest);
    expect(JSON.stringify(payments)).not.toMatch(/robin/i);
  }
});

test('payments show has the texts in its table only with --with-personal', async () => {
  const shown = await payfold(['payments', 'show', other, '--with-personal']);
  expect(shown.stdout).toContain('"email":"someone@mail.example"');
  expect((await payfold(['payments', 'show', other])).stdout).not.toContain('someone');
});

test('a plan first, then the erasure; an older copy of the database is refused until it is erased again', async () => {
  const erase = ['payments', 'erase', '--email', '-', '--reason-code', 'request', ...BY];
  expect(await json(erase, { input: EMAIL })).toMatchObject({ erasureId: null, wouldErase: 3, skipped: [] });
  const { erasureId, erased } = await json<{ erasureId: string; erased: number }>([...erase, '--apply'], { input: EMAIL });
  expect([erased, erasureId]).toEqual([3, expect.stringMatching(/^[0-9a-f-]{36}$/)]);
  expect(await json([...erase, '--apply'], { input: EMAIL })).toMatchObject({ erasureId: null, erased: 0 });

  const service = await start('standalone', dataDir, { DATABASE_URL: database.url });
  for (const id of mine) expect(await payerOf(service.url, id)).toEqual({ payer: null, erased: true });
  expect((await payerOf(service.url, other)).payer).not.toBeNull();
  await service.stop();

  // The restore: an older database, and the erasure files of today.
  cpSync(join(dataDir.data, 'erasures'), join(restoredDir.data, 'erasures'), { recursive: true });
  const on = { on: backupUrl(), at: restoredDir };
  const refused = await launch('standalone', restoredDir, { DATABASE_URL: backupUrl() }).exited;
  const [file] = readdirSync(join(restoredDir.data, 'erasures')).map((name) => join(restoredDir.data, 'erasures', name));
  expect(refused.code).toBe(1);
  expect(refused.stderr).toContain(
    `${file} names 3 erased keys that the database still has, as after a restore of a backup; run payfold payments erase --replay ${file} --by NAME --apply\n`,
  );
  // No command shows them either.
  const shown = await payfold(['payments', 'show', mine[0]!, '--with-personal', '--json'], on);
  expect(shown.stdout).not.toMatch(/robin/i);

  const replay = ['payments', 'erase', '--replay', file!, ...BY];
  expect(await json(replay, on)).toEqual({ file, events: 1, recorded: 1, keys: 3 });
  expect(await json([...replay, '--apply'], on)).toEqual({ file, events: 1, recorded: 1, keys: 3 });
  expect(await json([...replay, '--apply'], on)).toEqual({ file, events: 1, recorded: 0, keys: 0 });
  const restored = await start('standalone', restoredDir, { DATABASE_URL: backupUrl() });
  for (const id of mine) expect(await payerOf(restored.url, id)).toEqual({ payer: null, erased: true });
  expect((await payerOf(restored.url, other)).payer).not.toBeNull();
  await restored.stop();
}, 300_000);
