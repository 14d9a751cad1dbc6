/**
 * Starting and stopping the service as its user does (docs/operations.md). Every condition that must prevent a start gives one clear line and changes
 * no file.
 */
import { spawn } from 'node:child_process';
import { createHash } from 'node:crypto';
import { existsSync } from 'node:fs';
import { chown, cp, mkdir, readdir, readFile, rename, rm, stat, writeFile } from 'node:fs/promises';
import { createServer } from 'node:net';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import pg from 'pg';
import { createPool, newKeyRing } from '#platform';
import { Partner, type Reply } from '../../apps/demo/partner.js';
import { controlKeyOf, createSimulatorControl } from '../../apps/simulator/control.js';
import { eventually } from '../support/eventually.js';
import { KurrentDbDouble } from '../support/kurrentdb-double.js';
import { freshDatabase } from '../support/postgres.js';
import {
  DataDir,
  type Ended,
  type Environment,
  isAlive,
  kill,
  launch,
  newKey,
  postmasterOf,
  type RunningProcess,
  runToEnd,
  runtimeOf,
  start,
  systemProcesses,
  untilReady,
  type Welcome,
  welcomeOf,
} from '../support/processes.js';
import { CARD, PARTNER, paymentOf } from '../support/service.js';

interface Payment {
  readonly id: string;
  readonly status: string;
  readonly totalChargedCents: number;
}

let dataDir: DataDir;
let welcome: Welcome;
/** The service that runs on `dataDir`. null: none runs. */
let service: RunningProcess | null = null;
let paid: Payment;

const running = async (env: Environment = {}): Promise<RunningProcess> => (service ??= await start('standalone', dataDir, env));
const stopped = async (): Promise<void> => {
  await service?.stop();
  service = null;
};
const partner = ({ url }: RunningProcess) => new Partner(url + PARTNER, welcome.apiKey);
const create = async (by: Partner, number: string = CARD.approved, key = newKey()): Promise<Reply> =>
  by.post('payments', paymentOf(welcome.portalId, { number }), key);

const sh = (command: string): Promise<{ code: number | null; stdout: string }> =>
  new Promise((resolve, reject) => {
    const shell = spawn('sh', ['-c', command], { stdio: ['ignore', 'pipe', 'inherit'] });
    let stdout = '';
    shell.stdout.setEncoding('utf8').on('data', (text: string) => (stdout += text));
    shell.once('error', reject).once('close', (code) => resolve({ code, stdout }));
  });

/** Runs a statement in the database of the running service. */
const sql = async (statement: string): Promise<void> => {
  const client = new pg.Client({ connectionString: runtimeOf(dataDir).databaseUrl });
  await client.connect();
  await client.query(statement).finally(() => client.end());
};

/** The lines on stderr for people: all lines that are not JSON of the log. */
const complaint = ({ stderr }: Ended): string[] => stderr.split('\n').filter((line) => line !== '' && !line.startsWith('{"level"'));

/** Files that LevelDB writes anew whenever it opens the simulator's store. They hold no row. */
const HOUSEKEEPING = /^(LOG|LOG\.old|LOCK|CURRENT|MANIFEST-\d+)$/;
/** The checksum of every file below a folder. */
const checksums = async (folder: string): Promise<Record<string, string>> => {
  const found: Record<string, string> = {};
  for (const entry of await readdir(folder, { recursive: true, withFileTypes: true })) {
    const file = join(entry.parentPath, entry.name);
    if (entry.parentPath.endsWith('/simulator/books') && (HOUSEKEEPING.test(entry.name) || (await readFile(file)).length === 0)) continue;
    found[file.slice(folder.length)] = entry.isFile()
      ? createHash('sha256')
          .update(await readFile(file))
          .digest('hex')
      : 'folder';
  }
  return found;
};

const nothingRunsOn = (dir: DataDir) => {
  expect(systemProcesses().filter(({ args }) => args.includes(dir.data))).toEqual([]);
};

/** Starts the service, which must print a reason in one line, leave no process, and change no file (unless `untouched` is false). */
const refuses = async (line: RegExp, env: Environment = {}, { untouched = true } = {}): Promise<void> => {
  const before = untouched ? await checksums(dataDir.path) : {};
  const ended = await runToEnd('standalone', dataDir, env);
  expect(complaint(ended)).toEqual([expect.stringMatching(line)]);
  expect([ended.code, ended.signal, ended.stdout]).toEqual([1, null, '']);
  nothingRunsOn(dataDir);
  if (untouched) expect(await checksums(dataDir.path)).toEqual(before);
};

beforeAll(async () => {
  dataDir = await DataDir.create();
});
afterAll(() => dataDir.remove());

describe('the first start', () => {
  test('prints base URL, API key, portal and a curl in one block, then ready; the command as printed makes a payment', async () => {
    const { url, stdout } = await running();
    const printed = stdout();
    expect(printed).toMatch(/^\n─+\n[^]*\n─+\nready http:\/\/127\.0\.0\.1:\d+\n$/);
    expect(printed).toContain(`Base URL   ${url}\n`);
    welcome = welcomeOf(printed)!;
    expect(welcome).not.toBeNull();

    const { code, stdout: answer } = await sh(`${welcome.curl} -w '\\n%{http_code}'`);
    const [body, status] = answer.split('\n');
    expect([code, status]).toEqual([0, '200']);
    paid = (JSON.parse(body!) as { data: Payment }).data;
    expect(paid).toMatchObject({ status: 'succeeded', amountCents: 12_500, serviceFeeCents: 363, totalChargedCents: 12_863 });
  });

  test('the command typed twice is a replay: one payment', async () => {
    const { stdout } = await sh(welcome.curl);
    expect((JSON.parse(stdout) as { data: Payment }).data.id).toBe(paid.id);
    expect((await partner(await running()).get('payments')).data.payments).toHaveLength(1);
  });

  test('a second instance on the same DATA_DIR is refused while the first runs on', async () => {
    const first = await running();
    const keyFile = await readFile(join(dataDir.data, 'master.key'), 'utf8');
    const ended = await runToEnd('standalone', dataDir);
    expect([ended.code, complaint(ended)]).toEqual([1, [expect.stringMatching(new RegExp(`data is in use by process ${first.pid}; `))]]);
    expect(await readFile(join(dataDir.data, 'master.key'), 'utf8')).toBe(keyFile);
    expect(runtimeOf(dataDir).pid).toBe(first.pid);
    expect((await create(partner(first))).status).toBe(200);
  });
});

test('a warning of the embedded Postgres and a fault of its disk are logged; refused statements and their data are not', async () => {
  const { stderr } = await running();
  await sql(`do $$ begin raise warning 'the first'; end $$`);
  await expect(sql(`do $$ begin raise exception 'the second' using errcode = '53100', detail = 'data of a payer'; end $$`)).rejects.toThrow();
  await expect(sql(`do $$ begin raise exception 'the third' using errcode = '23505'; end $$`)).rejects.toThrow();
  await sql(`do $$ begin raise warning 'the last'; end $$`);
  await eventually(() => stderr().includes('the last'));
  const logged = stderr().split('\n').filter((line) => line.includes('"msg":"postgres"')).map((line) => JSON.parse(line) as { level: number; line: string }); // prettier-ignore
  expect(logged.map(({ level, line }) => [level, /\] (.*)$/.exec(line)?.[1]])).toEqual([
    [40, '01000 WARNING:  the first'],
    [50, '53100 ERROR:  the second'],
    [40, '01000 WARNING:  the last'],
  ]);
});

describe('a child that is killed under the running service', () => {
  test('Postgres: started again at its address; keyed requests answer 503 IDEMPOTENCY_UNAVAILABLE meanwhile, and nothing acknowledged is lost', async () => {
    const first = await running();
    const by = partner(first);
    const { databaseUrl } = runtimeOf(dataDir);
    const refused: (string | null)[] = [];
    const paidFor: { key: string; text: string }[] = [];
    let running_ = true;
    const payers = Array.from({ length: 16 }, async () => {
      while (running_) {
        const key = newKey();
        const reply = await create(by, CARD.approved, key);
        if (reply.status === 200) paidFor.push({ key, text: reply.text });
        else refused.push(`${reply.status} ${reply.code}`);
      }
    });
    // Postgres is back within moments. If all 16 requests have claimed their keys already, none gets a 503. So kill until one request does.
    for (let kills = 0; kills < 3 || !refused.includes('503 IDEMPOTENCY_UNAVAILABLE'); kills++) {
      const before = paidFor.length;
      await eventually(() => paidFor.length > before + 20);
      const postmaster = postmasterOf(dataDir.data)!;
      kill(postmaster);
      await eventually(() => postmasterOf(dataDir.data) !== null && postmasterOf(dataDir.data) !== postmaster);
    }
    const before = paidFor.length;
    await eventually(() => paidFor.length > before + 20);
    running_ = false;
    await Promise.all(payers);

    expect(isAlive(first.pid)).toBe(true);
    expect(runtimeOf(dataDir).databaseUrl).toBe(databaseUrl);
    // A payment that had begun may get a 504 or a 500. A request that had not begun must get a 503.
    expect([...new Set(refused)].filter((answer) => !/^(503 IDEMPOTENCY_UNAVAILABLE|504 PAYMENT_TIMEOUT|500 INTERNAL_ERROR)$/.test(answer!))).toEqual(
      [],
    );
    // The kill may have lost the endings of some keys. The service makes them again when their leases end. No request is in flight, so end all leases
    // now.
    await sql(`update idempotency_key set lease_until = clock_timestamp() - interval '1 second' where state = 'in_progress'`);
    for (const { key, text } of paidFor) {
      const reply = await create(by, CARD.approved, key);
      expect([reply.status, reply.replayed, reply.text]).toEqual([200, true, text]);
      expect((await by.get(`payments/${reply.data.id as string}`)).data).toEqual(reply.data);
    }
    await untilReady(first);
  });

  test('the processor: started again with its books; charges fail clearly meanwhile', async () => {
    const first = await running();
    const by = partner(first);
    const before = runtimeOf(dataDir);
    const bank = createSimulatorControl(before.simulatorUrl, controlKeyOf(dataDir.data));
    const charged = (await bank.truth()).length;
    const simulator = first.children().find(({ args }) => args.includes('simulator'))!;
    kill(simulator.pid);
    await eventually(() => !isAlive(simulator.pid));
    const down = await create(by);
    expect([200, 502, 504]).toContain(down.status);
    await eventually(async () => (await create(by)).status === 200);
    expect(runtimeOf(dataDir)).toEqual(before);
    expect((await bank.truth()).length).toBeGreaterThan(charged);
    expect(first.children().filter(({ args }) => args.includes('simulator'))).toHaveLength(1);
  });
});

describe('stopping', () => {
  const leavesNothing = async (how: (process: RunningProcess) => void): Promise<void> => {
    const process = await running();
    const children = process.children();
    expect(children.some(({ args }) => args.includes('postgres'))).toBe(true);
    const bank = createSimulatorControl(runtimeOf(dataDir).simulatorUrl, controlKeyOf(dataDir.data));
    const charged = (await bank.truth()).length;
    await bank.arm({ match: { call: 'charge', leg: 'principal' }, delayAfterMs: 1_500 });
    const inFlight = create(partner(process));
    await eventually(async () => (await bank.truth()).length > charged, { everyMs: 1 });
    how(process);
    const begun = performance.now();
    expect((await inFlight).status).toBe(200);
    // The answer came after the signal, so the processor was still running then.
    expect(performance.now() - begun).toBeGreaterThan(500);
    expect(await process.exited).toMatchObject({ code: 0, signal: null });
    service = null;
    for (const { pid } of children) expect(isAlive(pid)).toBe(false);
    nothingRunsOn(dataDir);
    expect(existsSync(join(dataDir.data, 'runtime.json'))).toBe(false);
    expect(existsSync(join(dataDir.data, 'lock'))).toBe(false);
  };

  test('SIGTERM completes requests in flight, and leaves no process behind', () => leavesNothing((process) => process.signal('SIGTERM')));

  test('Ctrl-C reaches the whole process group, as in a terminal: the same', () => leavesNothing(({ pid }) => process.kill(-pid, 'SIGINT')));

  test('SIGTERM at any moment of the start leaves no process behind, and the next start works', async () => {
    for (const afterMs of [150, 350, 550, 750, 950]) {
      const begun = launch('standalone', dataDir);
      await sleep(afterMs);
      begun.signal('SIGTERM');
      const { code, signal } = await begun.exited;
      // A signal before our first line of code kills the process, which is the signal's default effect.
      expect([code, signal]).toEqual(code === null ? [null, 'SIGTERM'] : [0, null]);
      nothingRunsOn(dataDir);
    }
    await running();
  });
});

describe('the second start', () => {
  test('finds its data: the payment is there, and no new key is printed', async () => {
    await stopped();
    const { stdout, ...again } = await running();
    expect(stdout()).toMatch(/^ready \S+\n$/);
    const found = await partner({ ...again, stdout }).get(`payments/${paid.id}`);
    expect([found.status, found.data]).toEqual([200, paid]);
  });

  test('works at once after kill -9 of the service alone, which leaves Postgres and processor to themselves for a moment', async () => {
    for (let kills = 0; kills < 3; kills++) {
      const { pid, exited } = await running();
      kill(pid);
      expect((await exited).signal).toBe('SIGKILL');
      service = null;
      const again = await running();
      expect((await create(partner(again))).status).toBe(200);
    }
  });

  test('works when the pid in postmaster.pid is another living process by now, as happens in containers', async () => {
    const before = await running();
    await before.killTree();
    service = null;
    const file = join(dataDir.data, 'postgres', 'postmaster.pid');
    const text = await readFile(file, 'utf8');
    await writeFile(file, text.replace(/^\d+/, String(process.ppid)));
    const again = await running();
    expect((await partner(again).get(`payments/${paid.id}`)).status).toBe(200);
  });
});

describe('a start beside a command that uses the data directory', () => {
  const LAUNCHER = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname;

  /** Begins a command while no service runs, and stops it in the middle of its work. */
  const stoppedCommand = async () => {
    await stopped();
    const command = launch([LAUNCHER, 'settlement', 'close'], dataDir);
    await eventually(() => postmasterOf(dataDir.data) !== null, { everyMs: 5 });
    command.signal('SIGSTOP');
    return command;
  };
  /** Begins a service, which must wait for the command. */
  const waitingService = async ({ pid }: { readonly pid: number }) => {
    const waiting = launch('standalone', dataDir);
    await eventually(() =>
      waiting.stderr().includes(`the start waits for the command \\"settlement close\\" of process ${pid}, which uses DATA_DIR`),
    );
    return waiting;
  };
  const ready = async (launched: Awaited<ReturnType<typeof waitingService>>) => {
    const [, url = ''] = await launched.firstLine(/^ready (\S+)\n/m);
    service = { ...launched, url };
    expect((await create(partner(service))).status).toBe(200);
  };

  test('waits until the command has ended; a stop ends the wait', async () => {
    const command = await stoppedCommand();
    const first = await waitingService(command);
    first.signal('SIGTERM');
    expect(await first.exited).toMatchObject({ code: 0, stdout: '' });
    const second = await waitingService(command);
    command.signal('SIGCONT');
    expect(await command.exited).toMatchObject({ code: 0 });
    await ready(second);
    expect(second.stderr().match(/the start waits for/g)).toHaveLength(1);
  });

  test('webhooks listen is refused: a start would wait for as long as it listens', async () => {
    await stopped();
    const account = '01890000-0000-7000-8000-000000000000';
    const command = launch([LAUNCHER, 'webhooks', 'listen', '--account', account, '--forward-to', 'http://127.0.0.1:9/hook'], dataDir);
    expect(await command.exited).toMatchObject({
      code: 1,
      stderr: expect.stringContaining('No service uses this DATA_DIR. Start it first, then listen.'),
    });
  });

  test('goes on with the database of a command that was killed', async () => {
    const command = await stoppedCommand();
    const waiting = await waitingService(command);
    await command.killTree();
    await ready(waiting);
  });

  test('succeeds after a kill of the service, and so does a command that begins meanwhile', async () => {
    const before = await running();
    kill(before.pid);
    await before.exited;
    service = null;
    const command = launch([LAUNCHER, 'settlement', 'close'], dataDir);
    const again = launch('standalone', dataDir);
    expect(await command.exited).toMatchObject({ code: 0 });
    await ready(again);
  });
});

test('a first start that finds its port taken leaves the key to the one that succeeds', async () => {
  const fresh = await DataDir.create();
  const server = createServer().listen(0, '127.0.0.1');
  await new Promise((listening) => server.once('listening', listening));
  const { port } = server.address() as { port: number };
  for (const name of ['PORT', 'AUDIT_PORT', 'METRICS_PORT']) expect((await runToEnd('standalone', fresh, { [name]: String(port) })).code).toBe(1);
  server.close();
  const begun = await start('standalone', fresh);
  expect(welcomeOf(begun.stdout())).not.toBeNull();
  await fresh.remove();
});

describe('a first start that is killed at any moment', () => {
  test('leaves a draft that the next start clears away, also when the cluster was in its place already', async () => {
    const fresh = await DataDir.create();
    try {
      await (await start('standalone', fresh)).killTree();
      const draft = join(fresh.data, 'postgres.new-0badcafe');
      await mkdir(join(draft, 'base'), { recursive: true });
      await start('standalone', fresh);
      await expect(readdir(draft)).rejects.toMatchObject({ code: 'ENOENT' });
    } finally {
      await fresh.remove();
    }
  });

  test('leaves nothing that keeps the next one from being a first start', async () => {
    const fresh = await DataDir.create();
    try {
      for (const afterMs of [250, 500, 700, 850, 1_000, 1_200]) {
        const begun = launch('standalone', fresh);
        await sleep(afterMs);
        await begun.killTree();
      }
      const { url, stdout } = await start('standalone', fresh);
      expect((await fetch(`${url}/readyz`)).status).toBe(200);
      // The last kill may have come after the API key was made and before it was shown. So this start may show no key.
      expect(stdout()).toMatch(/ready \S+\n$/);
      expect((await readdir(fresh.data)).filter((name) => name.includes('.new-'))).toEqual([]);
    } finally {
      await fresh.remove();
    }
  });
});

describe('it does not start, says so in one line and changes nothing', () => {
  beforeAll(stopped);

  const occupied = async (work: (port: number) => Promise<void>): Promise<void> => {
    const server = createServer().listen(0, '127.0.0.1');
    await new Promise((listening) => server.once('listening', listening));
    await work((server.address() as { port: number }).port).finally(() => server.close());
  };
  const without = async (path: string, work: () => Promise<void>): Promise<void> => {
    const [place, aside] = [join(dataDir.data, path), join(dataDir.path, 'aside')];
    await rename(place, aside);
    await work().finally(async () => {
      await rm(place, { recursive: true, force: true });
      await rename(aside, place);
    });
  };
  const withFile = async (path: string, text: string, work: () => Promise<void>): Promise<void> => {
    const place = join(dataDir.data, path);
    const before = await readFile(place);
    await writeFile(place, text);
    await work().finally(() => writeFile(place, before));
  };

  test.each([['PORT'], ['METRICS_PORT'], ['SIMULATOR_PORT']])('%s in use', (name) =>
    // Postgres has run for a moment and has changed its files, so `untouched` is false.
    occupied((port) => refuses(new RegExp(`\\b${port}\\b.*in use|in use.*\\b${port}\\b`), { [name]: String(port) }, { untouched: false })),
  );

  test('the key file is missing', () => without('master.key', () => refuses(/holds data but .*master\.key is missing; restore/)));
  test('the key file is torn', () => withFile('master.key', '{"current": "k1", "ke', () => refuses(/master\.key is not a key ring: not JSON/)));
  test('the key file holds a short key', () =>
    withFile('master.key', '{"current":"k1","keys":{"k1":"AAAA"}}', () => refuses(/master\.key is not a key ring: key "k1" is not 32 bytes/)));
  test('the key file names a key that it does not hold', () =>
    withFile('master.key', JSON.stringify({ current: 'k2', keys: { k1: newKeyRing().derive('card').toString('base64') } }), () =>
      refuses(/names "k2" as current but does not hold it/),
    ));
  test('the key file is another database’s', () =>
    withFile('master.key', JSON.stringify({ current: 'k1', keys: { k1: newKeyRing().derive('card').toString('base64') } }), () =>
      refuses(/master\.key is not the master key of this database/, {}, { untouched: false }),
    ));

  (process.getuid?.() === 0 ? test : test.skip).each([['.'], ['master.key'], ['postgres'], ['postgres.password'], ['simulator/control.key']])(
    'another user owns %s',
    async (path) => {
      const place = join(dataDir.data, path);
      const { uid, gid } = await stat(place);
      await chown(place, 54_321, 54_321);
      // Postgres may have run for a moment before the processor refused its key.
      const untouched = path !== 'simulator/control.key';
      await refuses(/belongs to (another user|uid 54321)/, {}, { untouched }).finally(() => chown(place, uid, gid));
    },
  );
  test('the cluster is of another version of Postgres', () =>
    withFile('postgres/PG_VERSION', '15\n', () => refuses(/was written by Postgres 15, the embedded one is \d+; nothing was changed/)));
  test('the cluster has lost its PG_VERSION', () =>
    without('postgres/PG_VERSION', () => refuses(/holds files but no PG_VERSION: it is damaged.*nothing was changed/)));
  test('the cluster is gone', () => without('postgres', () => refuses(/postgres is gone, but .*postgres\.password says that there was one/)));
  test('the password of the cluster is gone', () => without('postgres.password', () => refuses(/postgres\.password, cannot be read \(ENOENT\)/)));
  test('the cluster is damaged', () =>
    withFile('postgres/global/pg_control', 'x'.repeat(8192), () => refuses(/Postgres ended with code 1: .*(FATAL|PANIC)/, {}, { untouched: false })));
  test('the processor’s books are damaged', async () => {
    const simulator = join(dataDir.data, 'simulator');
    await cp(simulator, `${simulator}.whole`, { recursive: true });
    let changed = 0;
    for (const name of await readdir(join(simulator, 'books'))) {
      const file = join(simulator, 'books', name);
      const bytes = await readFile(file, 'latin1');
      if (!bytes.includes('"amountCents":12500')) continue;
      await writeFile(file, bytes.replaceAll('"amountCents":12500', '"amountCents":12501'), 'latin1');
      changed += 1;
    }
    expect(changed).toBeGreaterThan(0);
    await refuses(
      /the simulator did not start: .*books is damaged: (its write \d+ is missing|the checksum of its row \S+ differs)/,
      {},
      { untouched: false },
    );
    await rm(simulator, { recursive: true });
    await rename(`${simulator}.whole`, simulator);
  });

  const KURRENTDB = { KURRENTDB_URL: 'kurrentdb://127.0.0.1:9?tls=false' };
  test('KURRENTDB_URL is set, but the events lie in Postgres', () =>
    refuses(/the events of this database lie in Postgres; unset KURRENTDB_URL/, KURRENTDB, { untouched: false }));
  test('KurrentDB cannot be reached', async () => {
    const fresh = await DataDir.create();
    const ended = await runToEnd('standalone', fresh, KURRENTDB);
    expect([ended.code, complaint(ended)]).toEqual([1, [expect.stringMatching(/KurrentDB/)]]);
    await fresh.remove();
  });

  test('KurrentDB holds the stream of another program: neither the service nor a command starts, and nothing is written', async () => {
    const [fresh, database, server] = await Promise.all([DataDir.create(), freshDatabase(), new KurrentDbDouble().start()]);
    server.write('orders-7', [{ type: 'OrderPlaced', data: {}, meta: 'none' }]);
    const env = { KURRENTDB_URL: server.url(), DATABASE_URL: database.url, SIMULATOR_URL: 'http://127.0.0.1:9' };
    const line = expect.stringMatching(
      /the event store at KURRENTDB_URL holds the stream orders-7, which Payfold did not write; it must belong to one installation alone; nothing was changed/,
    );
    const payfold = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname;
    for (const entry of ['worker', 'api', [payfold, 'upgrade', 'prepare'], [payfold, 'accounts', 'create', '--name', 'City']] as const) {
      const { code, stdout, stderr } = await launch(entry, fresh, env).exited;
      expect([entry, code, stdout, stderr]).toEqual([entry, 1, '', line]);
    }
    expect(server.log).toHaveLength(1);
    const pool = createPool(database.url, { name: 'spec', max: 1 });
    expect((await pool.query(`select from pg_tables where schemaname <> all ('{pg_catalog,information_schema}')`)).rowCount).toBe(0);
    await pool.end();
    server.kill();
    await Promise.all([fresh.remove(), database.drop()]);
  });

  test('the database was written by a newer version', async () => {
    await running();
    await sql(`insert into payfold_migration (name, sha256) values ('9999-from-the-future', 'x')`);
    await stopped();
    const journal = await readFile(join(dataDir.data, 'simulator', 'journal.ndjson'), 'utf8');
    await refuses(
      /written by a newer version of Payfold \(migration 9999-from-the-future is unknown here\); nothing was changed/,
      {},
      { untouched: false },
    );
    expect(await readFile(join(dataDir.data, 'simulator', 'journal.ndjson'), 'utf8')).toBe(journal);
  });

  test('configuration: every fault is named at once', async () => {
    const before = await checksums(dataDir.path);
    const ended = await runToEnd('standalone', dataDir, {
      LOG_LEVEL: 'loud',
      PORT: '70000',
      METRICS_PORT: 'x',
      ENVIRONMENT: 'staging',
      DATABASE_URL: 'mysql://user:secret@host/db',
      CARD_IN_TEXT_CHECK: 'perhaps',
      FAILPOINT: 'nonsense',
    });
    expect([ended.code, ended.stdout]).toEqual([1, '']);
    const [title, ...faults] = ended.stderr.trim().split('\n');
    expect(title).toBe('wrong configuration:');
    expect(faults.map((fault) => /^ {2}([A-Z_]+)/.exec(fault)?.[1]).sort()).toEqual(
      ['CARD_IN_TEXT_CHECK', 'DATABASE_URL', 'ENVIRONMENT', 'FAILPOINT', 'LOG_LEVEL', 'METRICS_PORT', 'PORT'].sort(),
    );
    expect(ended.stderr).not.toContain('secret');
    expect(await checksums(dataDir.path)).toEqual(before);
  });

  test('production without its required settings: all of them at once, for every role', async () => {
    for (const role of ['standalone', 'api', 'worker'] as const) {
      const ended = await runToEnd(role, dataDir, { ENVIRONMENT: 'production', FAILPOINT: 'claim:after' });
      expect(ended.code).toBe(1);
      const faults = ended.stderr.trim().split('\n').slice(1);
      expect(faults.map((fault) => fault.trim().split(':')[0]).sort()).toEqual([
        'DATABASE_URL',
        'FAILPOINT',
        'MASTER_KEY_FILE',
        'PROXY_HOPS',
        'PUBLIC_URL',
      ]);
    }
  });

  test('a role without its addresses, without a database, or with a wrong password', async () => {
    const apart = await DataDir.create();
    try {
      await mkdir(apart.data);
      const complaints = async (env: Environment) => {
        const ended = await runToEnd('api', apart, env);
        expect([ended.code, ended.stdout]).toEqual([1, '']);
        return complaint(ended);
      };
      expect(await complaints({})).toEqual([expect.stringMatching(/^this role needs DATABASE_URL and SIMULATOR_URL/)]);
      const SIMULATOR_URL = 'http://127.0.0.1:9';
      expect(await complaints({ SIMULATOR_URL, DATABASE_URL: 'postgres://u:p@127.0.0.1:9/x' })).toEqual([expect.stringMatching(/ECONNREFUSED/)]);
      expect(await complaints({ SIMULATOR_URL, DATABASE_URL: 'postgres://u:p@localhost:9/x' })).toEqual([expect.stringMatching(/ECONNREFUSED/)]);
      const wrong = new URL(process.env.TEST_POSTGRES_URL!);
      wrong.password = 'wrong';
      expect(await complaints({ SIMULATOR_URL, DATABASE_URL: wrong.toString() })).toEqual([expect.stringMatching(/^password authentication failed/)]);
    } finally {
      await apart.remove();
    }
  });
});
