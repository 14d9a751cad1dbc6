/**
 * `payfold audit verify` from a signed head, on a log that lost its last events, and with read models that make no progress. The command must end in
 * time. It must not report ok for a part that it did not compare.
 *
 * If a worker is killed in the middle of a verification pass or of the drift sweep, the next worker goes on there.
 */
import { execFile, execFileSync } from 'node:child_process';
import { chmodSync, existsSync, linkSync, readFileSync, rmSync, statSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { headFiles } from '#audit';
import { createPostgresEventStore, searchPathOf } from '#eventstore';
import { createPool, type Pool, systemIds } from '#platform';
import { READ_MODELS } from '../../apps/services.js';
import { eventually } from '../support/eventually.js';
import { freshDatabase } from '../support/postgres.js';
import { DataDir, launch, newKey, start, welcomeOf } from '../support/processes.js';
import { paymentOf, PAYMENTS } from '../support/service.js';

const LAUNCHER = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname;
const COMMAND_MS = 60_000;
const PAID = 3;
/** More payments than a worker compares without a pause, and more of their events than are read at once. */
const COPIES = 300;
/** More events than a worker verifies in one page. */
const NOTES = 4_000;

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
const verify = async (
  ...more: string[]
): Promise<{ code: number; failed: Record<string, string>; details: Record<string, string>; seconds: number }> => {
  const begun = performance.now();
  const { code, stdout } = await payfold('audit', 'verify', ...more);
  const { checks } = JSON.parse(stdout) as Verdict;
  const texts = (some: Verdict['checks']) => Object.fromEntries(some.map(({ name, detail }) => [name, detail]));
  return { code, failed: texts(checks.filter(({ ok }) => !ok)), details: texts(checks), seconds: (performance.now() - begun) / 1_000 };
};

/** Appends copies of the newest payment's two events, with ids of their own, and notes of staff. */
const writeHistory = async (): Promise<void> => {
  const store = createPostgresEventStore(database.url);
  const ids = systemIds(() => Date.now());
  const { rows } = await pool.query<{ stream_id: string }>(
    `select stream_id from es.events where type = 'PaymentCreated' order by position desc limit 1`,
  );
  const model: Parameters<typeof store.append>[2][number][] = [];
  for await (const { type, v, data, meta } of store.read(rows[0]!.stream_id)) model.push({ id: '', type, v, data, meta });
  const [, { meta }] = model as [unknown, (typeof model)[number]];
  for (let copy = 0; copy < COPIES; copy++) {
    // Each payment has its own references and transactions.
    const own = model.map((event) => ({
      ...event,
      id: ids.uuid(),
      data: JSON.parse(
        JSON.stringify(event.data).replaceAll(/"(charge|reversal|transactionId)":"([^"]+)"/g, `"$1":"$2-${copy}"`),
      ) as typeof event.data,
    }));
    await store.append(`payment-${ids.uuid()}`, 'no_stream', own);
  }
  for (let note = 0; note < NOTES; note += 100)
    await store.append(
      `staff-filler-${note}`,
      'no_stream',
      Array.from({ length: 100 }, (_, number) => ({ id: ids.uuid(), type: 'StaffNoted', v: 1, data: { number }, meta })),
    );
  await store.close();
};

beforeAll(async () => {
  dataDir = await DataDir.create();
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'spec', max: 2, searchPath: searchPathOf(READ_MODELS) });
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
  const { rows } = await pool.query<{ payment_id: string }>('select payment_id from payment_list limit 1');
  // This signs a head. Somebody else may have put a link at the place of the proof.
  const [proof, link] = [join(dataDir.path, 'proof.json'), join(dataDir.path, 'link.json')];
  expect(await payfold('audit', 'prove', rows[0]!.payment_id, '--out', proof)).toMatchObject({ code: 0 });
  expect(statSync(proof).mode & 0o777).toBe(0o600);
  // A file that lies there is replaced: neither its mode nor its other name is kept.
  const other = join(dataDir.path, 'other.json');
  writeFileSync(other, 'other', { mode: 0o644 });
  rmSync(proof);
  linkSync(other, proof);
  expect(await payfold('audit', 'prove', rows[0]!.payment_id, '--out', proof)).toMatchObject({ code: 0 });
  expect([statSync(proof).mode & 0o777, readFileSync(other, 'utf8')]).toEqual([0o600, 'other']);
  const pipe = join(dataDir.path, 'pipe');
  execFileSync('mkfifo', [pipe]);
  expect(await payfold('audit', 'prove', rows[0]!.payment_id, '--out', pipe)).toMatchObject({ code: 1 });
  symlinkSync(proof, link);
  expect(await payfold('audit', 'prove', rows[0]!.payment_id, '--out', link)).toMatchObject({ code: 1 });
  await writeHistory();
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

describe('from a signed head', () => {
  const first = () => headFiles(join(dataDir.data, 'heads'))[0]!;
  test('only what came after it is read and compared', async () => {
    const { rows } = await pool.query<{ entries: string }>('select count(*) as entries from journal_entry where payment_id is not null');
    const everything = await verify('--full');
    expect(everything).toMatchObject({ code: 0, failed: {} });
    expect(everything.details['read models']).toContain(` ${PAID + COPIES} payments `);
    expect(everything.details.journal).toBe(`${rows[0]!.entries} entries equal their replay`);
    const { code, failed, details } = await verify('--from-head', first());
    const size = Number(readFileSync(first(), 'utf8').split('\n')[1]);
    expect({ code, failed }).toEqual({ code: 0, failed: {} });
    expect(details.events).toBe(`${end - size} events after the first ${size} are those that were sealed`);
    expect(Number(/of (\d+) changed payments/.exec(details['read models']!)![1])).toBeGreaterThanOrEqual(COPIES);

    const dataOf = async () => (await pool.query<{ data: string }>('select data::text from es.events where position = $1', [size + 1])).rows[0]!.data;
    const kept = await dataOf();
    await pool.query(`update es.events set data = '{}' where position = $1`, [size + 1]);
    expect((await verify('--from-head', first())).failed).toMatchObject({
      events: expect.stringMatching(/^the event at position 0*\d+ .* was changed/),
      'read models': expect.stringMatching(/its events cannot be replayed/),
    });
    await pool.query('update es.events set data = $2::json where position = $1', [size + 1, kept]);
  });

  test('a file that is missing, a foreign head, a head of other tiles and one beyond the log are refused in one line', async () => {
    const refused = async (file: string, ...more: string[]) => {
      const { code, stderr, stdout } = await payfold('audit', 'verify', '--from-head', file, ...more);
      return { code, stderr, envelope: JSON.parse(stdout) as unknown };
    };
    const envelope = expect.objectContaining({ success: false }) as unknown;
    const line = (text: string) => expect.stringMatching(new RegExp(`^error: [^\n]*${text}[^\n]*\n$`)) as unknown;
    expect(await refused(join(dataDir.path, 'none.head'))).toEqual({ code: 2, stderr: line('none.head cannot be read \\(ENOENT\\)'), envelope });
    expect(await refused(first(), '--full')).toMatchObject({ code: 2, envelope });
    const foreign = join(dataDir.path, 'foreign.head');
    writeFileSync(foreign, readFileSync(first(), 'utf8').replaceAll('payfold/log/', 'payfold/log/other-'));
    expect(await refused(foreign)).toEqual({ code: 1, stderr: line('this head cannot be trusted: no key of this log signed it'), envelope });

    const turned = () => pool.query('update log_tile set hashes = set_byte(hashes, 3, get_byte(hashes, 3) # 1) where level = 0 and number = 0');
    await turned();
    expect(await refused(first())).toEqual({ code: 1, stderr: line('the stored tiles are not those over which this head was signed'), envelope });
    await turned();

    const resize = (size: number) => pool.query('update log_state set size = $1', [size]);
    await resize(5);
    expect(await refused(first())).toEqual({ code: 1, stderr: line('signed over \\d+ events; only 5 are sealed now'), envelope });
    await resize(end);
    expect((await verify('--from-head', first())).failed).toEqual({});
  });
});

/**
 * Lets a worker run until it stores its progress for the second time. A trigger writes each stored progress down, and holds the second one until the
 * worker is killed. Then another worker runs. Returns the values before and after the kill.
 */
const killedInTheMiddle = async (table: string, value: string, ends: () => Promise<unknown>): Promise<{ before: string[]; after: string[] }> => {
  await pool.query(`
    create table public.seen (id serial, value text);
    create function public.note_progress() returns trigger language plpgsql as $$
    begin
      if (${value}) is null or (${value}) is not distinct from (${value.replaceAll('new.', 'old.')}) then return new; end if;
      if (select count(*) from public.seen) = 1 then perform pg_advisory_xact_lock(4711); end if;
      insert into public.seen (value) values (${value});
      return new;
    end $$;
    create trigger note_progress before update on ${table} for each row execute function public.note_progress()`);
  const lock = `select from pg_locks where locktype = 'advisory' and objid = 4711`;
  const env = { DATABASE_URL: database.url, SIMULATOR_URL: 'http://127.0.0.1:9' };
  const held = await pool.connect();
  try {
    await held.query('select pg_advisory_lock(4711)');
    const doomed = await start('worker', dataDir, env);
    await eventually(async () => (await pool.query(`${lock} and not granted`)).rowCount === 1).finally(() => doomed.killTree());
    await held.query('select pg_advisory_unlock(4711)');
  } finally {
    held.release(true);
  }
  await eventually(async () => (await pool.query(lock)).rowCount === 0);
  await pool.query(`insert into public.seen (value) values ('killed'); update ${table} set busy_until = null`);
  const next = await start('worker', dataDir, env);
  await eventually(ends).finally(() => next.stop());
  const all = (await pool.query<{ value: string }>('select value from public.seen order by id')).rows.map((row) => row.value);
  await pool.query(`drop trigger note_progress on ${table}; drop function public.note_progress; drop table public.seen`);
  return { before: all.slice(0, all.indexOf('killed')), after: all.slice(all.indexOf('killed') + 1) };
};

describe('--place', () => {
  const place = () => join(dataDir.path, 'place.json');
  const change = (text: string) =>
    pool.query(`update es.events set data = jsonb_build_object('number', $1::text) where stream_id = 'staff-filler-0' and revision = 0`, [text]);

  const restore = async (data: string) => pool.query(`update es.events set data = $1 where stream_id = 'staff-filler-0' and revision = 0`, [data]);
  const present = async () => {
    const { rows } = await pool.query<{ data: string }>(`select data::text from es.events where stream_id = 'staff-filler-0' and revision = 0`);
    return rows[0]!.data;
  };
  const stepOf = () => (JSON.parse(readFileSync(place(), 'utf8')) as { pass: { step: string } }).pass.step;

  /** Kills the command when all events are compared, and not all payments. */
  const cutOff = async (): Promise<void> => {
    for (let tries = 0; ; tries++) {
      expect(tries).toBeLessThan(20);
      const child = launch([LAUNCHER, 'audit', 'verify', '--place', place(), '--json'], dataDir, { DATABASE_URL: database.url, LOG_LEVEL: 'error' });
      let isOver = false;
      void child.exited.then(() => (isOver = true));
      await eventually(() => isOver || (existsSync(place()) && stepOf() === 'payments'), { everyMs: 1 });
      child.signal('SIGKILL');
      await child.exited;
      if (existsSync(place()) && stepOf() === 'payments') return;
    }
  };

  test('a verification that was killed goes on, says so, and removes the file at its end', async () => {
    await cutOff();
    expect(statSync(place()).mode & 0o777).toBe(0o600);
    const data = await present();
    // The events were compared before the kill, so this change is not seen until the next verification.
    await change('changed');
    const goneOn = await verify('--place', place());
    expect(goneOn).toMatchObject({ code: 0, failed: {} });
    expect(goneOn.details['read models']).toContain(` ${PAID + COPIES} payments `);
    expect(existsSync(place())).toBe(false);
    expect(Object.keys((await verify('--place', place())).failed)).toEqual(['events', 'heads']);
    expect(existsSync(place())).toBe(false);
    await restore(data);
    expect(await verify()).toMatchObject({ code: 0, failed: {} });
  });

  test('a difference that was found before the kill is reported by the run that goes on', async () => {
    const data = await present();
    await change('changed');
    await cutOff();
    await restore(data);
    const { code, stdout, stderr } = await payfold('audit', 'verify', '--place', place());
    expect([code, stderr]).toEqual([1, expect.stringMatching(/^goes on with the verification that began at \S+Z\n$/)]);
    const { checks } = JSON.parse(stdout) as Verdict;
    expect(checks.filter(({ ok }) => !ok).map(({ name }) => name)).toEqual(['events', 'heads']);
    expect(await verify()).toMatchObject({ code: 0, failed: {} });
  });

  test('a file of another verification or release, a damaged one, and one that others can read are refused in one line', async () => {
    const head = headFiles(join(dataDir.data, 'heads'))[0]!;
    await cutOff();
    const text = readFileSync(place(), 'utf8');
    const refused = async (code: number, message: string, ...more: string[]) => {
      const answer = await payfold('audit', 'verify', '--place', place(), ...more);
      expect([answer.code, answer.stderr.trim().split('\n')]).toEqual([code, [expect.stringContaining(message)]]);
      expect(existsSync(place())).toBe(true);
    };
    await refused(2, 'is the place of another verification', '--from-head', head);
    writeFileSync(place(), text.replace(/"release": "[^"]+"/, '"release": "0.0.1"'));
    await refused(2, 'of this release');
    for (const damaged of ['{"release":', text.replace(/"pass": /, '"gone": ')]) {
      writeFileSync(place(), damaged);
      await refused(2, 'of this release');
    }
    writeFileSync(place(), text.replace(/"end": \{\s*"size": \d+/, '"end": {"size": 9999999'));
    await refused(1, 'events were lost');
    writeFileSync(place(), text);
    chmodSync(place(), 0o644);
    await refused(1, 'chmod 600');
    rmSync(place());
  });
});

test('a full pass whose worker is killed goes on after the last page; no payment and no entry counts twice', async () => {
  await pool.query(`update verify_pass set due_at = case pass when 'full' then now() else now() + interval '1 day' end`);
  const ended = async () => (await pool.query(`select from verify_pass where pass = 'full' and finished_at is not null`)).rowCount === 1;
  const progress = `case when new.state->'pass'->>'step' = 'payments' and new.state->'pass'->>'payments' <> '0' then new.state->'pass'->>'payments' end`;
  const { before, after } = await killedInTheMiddle('verify_pass', progress, ended);
  const numbers = [...before, ...after].map(Number);
  expect(before.length).toBeGreaterThan(0);
  expect(after.length).toBeGreaterThan(1);
  expect(numbers).toEqual([...new Set(numbers)].sort((a, b) => a - b));
  const { rows } = await pool.query<{ checks: Verdict['checks'] }>(`select checks from verify_pass where pass = 'full'`);
  const details = Object.fromEntries(rows[0]!.checks.map(({ name, detail }) => [name, detail]));
  const { rows: counted } = await pool.query<{ entries: string }>('select count(*) as entries from journal_entry');
  expect(rows[0]!.checks.every(({ ok }) => ok)).toBe(true);
  expect(details).toMatchObject({
    events: `${end} events are those that were sealed`,
    'read models': `the list and the settlement of ${PAID + COPIES} payments equal their replay`,
    journal: `${counted[0]!.entries} entries equal their replay`,
  });
  expect(readFileSync(join(dataDir.data, 'heads', 'verification.txt'), 'utf8').split('\n')[2]).toBe(String(end));
});

test('a sweep whose worker is killed goes on after the last events; each difference is stored once', async () => {
  const { rows } = await pool.query<{ status: string; payment_id: string }>(
    'select payment_id, status from payment_list order by payment_id limit 1',
  );
  await pool.query(`update payment_list set status = 'failed' where payment_id = $1`, [rows[0]!.payment_id]);
  await pool.query(`update drift_sweep set position = '', busy_until = null`);
  const level = async () =>
    (await pool.query(`select from drift_sweep where position = $1 and busy_until <= now()`, [String(end).padStart(20, '0')])).rowCount === 1;
  const { before, after } = await killedInTheMiddle('drift_sweep', `nullif(new.position, '')`, level);
  expect(before.length).toBeGreaterThan(0);
  expect(after.length).toBeGreaterThan(0);
  expect([...before, ...after]).toEqual([...new Set([...before, ...after])].sort());
  expect((await pool.query('select payment_id, kind from drift_difference')).rows).toEqual([{ payment_id: rows[0]!.payment_id, kind: 'list' }]);
  await pool.query('update payment_list set status = $2 where payment_id = $1', [rows[0]!.payment_id, rows[0]!.status]);
  await pool.query('truncate drift_difference');
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
  expect(Object.keys(failed).sort()).toEqual(['books', 'journal', 'lines', 'read models']);
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
