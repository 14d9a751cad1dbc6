/**
 * Freezes a release: plays a day of payments on its build and writes the result to a folder. The folder has the log, the tables that the log cannot
 * make again, the processor's data directory and signed heads. It also has the master key, an evidence pack, a proof, and the answers that a later
 * release must still give. `frozen.e2e.spec.ts` loads this data into the present code.
 */
import { execFile } from 'node:child_process';
import { cp, mkdir, readFile, rm, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { promisify } from 'node:util';
import pg from 'pg';
import { controlKeyOf, createSimulatorControl } from '../../apps/simulator/control.js';
import { intakeOf, Payer, SHOP } from '../support/checkout.js';
import { eventually } from '../support/eventually.js';
import { freshDatabase } from '../support/postgres.js';
import { DataDir, type Environment, launch, newKey } from '../support/processes.js';
import { CARD, PAYMENTS, paymentOf } from '../support/service.js';

/** The address of the service for payers. */
export const PUBLIC = 'https://pay.riverton.example';
const BY = 'Kim Park';
const LINES = [
  { amountCents: 6_000, referenceId: 'WTR-1' },
  { amountCents: 4_000, referenceId: 'WTR-2' },
];
const UTC_DAY = /^\d{4}-\d{2}-\d{2}/;

export interface Answered {
  readonly path: string;
  readonly key: string;
  readonly body: object;
  readonly status: number;
  /** The body of the answer, byte for byte. */
  readonly text: string;
}

export interface Expected {
  readonly release: string;
  readonly frozenAt: string;
  readonly apiKey: string;
  /** Answers under keys. A replay must give the same bytes. */
  readonly answered: readonly Answered[];
  /** A refund whose outcome is unknown. */
  readonly open: Answered & { readonly paymentId: string };
  /** The answer of GET for each payment. */
  readonly payments: Readonly<Record<string, string>>;
  /** A checkout session that waits for its payer. `cookies`: the cookies of the payer's browser, by path. */
  readonly checkout: { readonly path: string; readonly cookies: readonly (readonly [string, string])[] };
  /** The end of the closed period, and the digest of its trial balance. */
  readonly period: { readonly to: string; readonly digest: string };
}

/** Empties `folder`, and freezes the build at `root` into it. */
export const freeze = async (root: string, folder: string): Promise<void> => {
  const dataDir = await DataDir.create();
  const database = await freshDatabase();
  try {
    await mkdir(dataDir.data);
    const { MIGRATIONS } = (await import(join(root, 'dist/apps/services.js'))) as { MIGRATIONS: readonly { name: string; sql: string }[] };
    const { version } = JSON.parse(await readFile(join(root, 'package.json'), 'utf8')) as { version: string };
    await rm(folder, { recursive: true, force: true });
    await mkdir(folder, { recursive: true });
    const expected = await play(root, version, dataDir, database.url, folder);
    await writeFile(join(folder, 'expected.json'), `${JSON.stringify(expected, null, 1)}\n`);
    const { applied, rows } = await contentOf(database.url);
    const migrations = MIGRATIONS.filter(({ name }) => applied.includes(name));
    await writeFile(join(folder, 'migrations.json'), `${JSON.stringify(migrations, null, 1)}\n`);
    await writeFile(join(folder, 'rows.ndjson'), `${rows.join('\n')}\n`);
    for (const name of ['master.key', 'heads', 'simulator']) await cp(join(dataDir.data, name), join(folder, name), { recursive: true });
  } finally {
    await dataDir.remove();
    await database.drop();
  }
};

const play = async (root: string, release: string, dataDir: DataDir, databaseUrl: string, folder: string): Promise<Expected> => {
  const run = (entry: string) => ['--enable-source-maps', join(root, 'dist/apps', entry, 'main.js')];
  const simulator = launch(run('simulator'), dataDir);
  const bankUrl = (JSON.parse((await simulator.firstLine(/^\{.*\}\n/m))[0]) as { url: string }).url;
  const env: Environment = { DATABASE_URL: databaseUrl, SIMULATOR_URL: bankUrl, PUBLIC_URL: PUBLIC, LOG_LEVEL: 'error' };
  const worker = launch(run('worker'), dataDir, env);
  const api = launch(run('api'), dataDir, env);
  const url = (await api.firstLine(/^ready (\S+)\n/m))[1]!;
  await worker.firstLine(/^ready/m);
  const payfold = async <T>(...args: string[]): Promise<T> => {
    const { code, stdout, stderr } = await launch([...run('operator'), ...args, '--json', '--yes'], dataDir, env).exited;
    if (code !== 0) throw new Error(`payfold ${args.join(' ')} ended with ${code}: ${stdout}${stderr}`);
    return (args[1] === 'pack' || stdout === '' ? null : JSON.parse(stdout)) as T;
  };
  const bank = createSimulatorControl(bankUrl, controlKeyOf(dataDir.data));

  const { accountId } = await payfold<{ accountId: string }>('accounts', 'create', '--name', 'Riverton Billing');
  const { apiKey } = await payfold<{ apiKey: string }>('keys', 'issue', '--account', accountId);
  const fee = ['--fee-flat-cents', '50', '--fee-percent-bps', '250'];
  const { portalId } = await payfold<{ portalId: string }>('portals', 'create', '--account', accountId, '--name', 'Riverton Water', ...fee);
  await payfold('portals', 'checkout', portalId, '--enable', '--allow', `${SHOP}/pay`, '--agency-name', 'City of Riverton');
  await payfold('portals', 'set-limits', portalId, '--scope', 'case', '--window-seconds', '3600', '--attempts', '50');
  await payfold('cases', 'hold', '--portal', portalId, '--reference', 'CASE-9', '--reason', 'the amount is under review');
  await payfold('audit', 'keys', 'issue', '--name', 'Reconciliation job', '--role', 'finance');

  const answered: Answered[] = [];
  const ask = async (path: string, body: object, key = newKey()): Promise<Answered & { readonly id: string }> => {
    const headers = { authorization: `ApiKey ${apiKey}`, 'content-type': 'application/json', 'idempotency-key': key };
    const answer = await fetch(url + path, { method: 'POST', headers, body: JSON.stringify(body) });
    const text = await answer.text();
    const { data, details } = JSON.parse(text) as { data?: { id: string }; details?: { id?: string } };
    return { path, key, body, status: answer.status, text, id: data?.id ?? details?.id ?? '' };
  };
  const done = async (status: number, path: string, body: object): Promise<string> => {
    const { id, ...answer } = await ask(path, body);
    if (answer.status !== status) throw new Error(`${path}: ${answer.status} ${answer.text}`);
    answered.push(answer);
    return id;
  };
  const create = (number: string = CARD.approved, status = 200) =>
    done(status, PAYMENTS, paymentOf(portalId, { number, referenceId: 'CASE-7', lineItems: LINES }));

  // Payments before settlement: one voided, one declined, one with a gateway error, one partly refunded. Three more will settle.
  await done(200, `${PAYMENTS}/${await create()}/void`, { reason: 'entered twice' });
  await create(CARD.declined, 402);
  await create(CARD.gatewayError, 502);
  await done(200, `${PAYMENTS}/${await create()}/refund`, { amountCents: 2_500 });
  const settled = [await create(), await create(), await create()];
  await bank.closeBatches();
  const isSettled = async () => {
    const events = await payfold<{ events?: readonly { type: string }[] }>('payments', 'show', settled.at(-1)!, '--events');
    return events.events?.some(({ type }) => type === 'PaymentSettled');
  };
  await eventually(isSettled, { timeoutMs: 60_000, everyMs: 1_000 });
  // After settlement: refunds by the partner and by staff, a dispute, an adjustment, and a closed period.
  await done(200, `${PAYMENTS}/${settled[0]!}/refund`, { feeType: 'include_fee' });
  await payfold('payments', 'refund', settled[1]!, '--amount-cents', '3000', '--reason', 'billed twice', '--by', BY);
  const today = UTC_DAY.exec(new Date().toISOString())![0];
  const dispute = ['--amount-cents', '4000', '--status', 'debited', '--stage', 'chargeback', '--reason-code', '13.1', '--reason', 'not received'];
  await payfold('disputes', 'open', '--payment', settled[1]!, ...dispute, '--opened-on', today, '--due-date', today);
  const yesterday = UTC_DAY.exec(new Date(Date.now() - 86_400_000).toISOString())![0];
  const adjustment = ['--effective-at', yesterday, '--debit', 'assets:bank:operating', '--credit', 'equity:adjustment', '--amount-cents', '700'];
  await payfold('ledger', 'adjust', ...adjustment, '--reason', 'interest of the bank', '--by', BY);
  const to = new Date().toISOString();
  const closed = JSON.stringify(await payfold('audit', 'close-period', '--to', today, '--by', BY));
  const digest = /digest ([0-9a-f]+)/.exec(closed)![1]!;
  await payfold('audit', 'pack', '--from', `${today}T00:00:00Z`, '--to', to, '--out', join(folder, 'pack'));
  await payfold('audit', 'prove', settled[0]!, '--out', join(folder, 'proof.json'));

  // Open work at the end: a checkout, and a refund with an unknown outcome.
  const payer = new Payer(url, PUBLIC);
  const checkout = { path: (await payer.intake(intakeOf({ portalId }))).location, cookies: [...payer.cookies] };
  for (const call of ['refund', 'lookup', 'finalize'] as const) await bank.arm({ match: { call }, answer: 'cut', times: null });
  const { id: _, ...open } = await ask(`${PAYMENTS}/${settled[2]!}/refund`, { amountCents: 1_000 });
  if (open.status !== 504) throw new Error(`the outcome of the refund is known: ${open.status} ${open.text}`);
  await bank.clearFaults();
  const payments: Record<string, string> = {};
  for (const id of new Set([...settled.slice(0, 2), ...answered.map(({ text }) => idIn(text))]))
    payments[id] = await (await fetch(`${url}${PAYMENTS}/${id}`, { headers: { authorization: `ApiKey ${apiKey}` } })).text();
  for (const process of [api, worker, simulator]) await process.stop();
  const frozenAt = new Date().toISOString();
  return { release, frozenAt, apiKey, answered, open: { ...open, paymentId: settled[2]! }, payments, checkout, period: { to, digest } };
};

const idIn = (text: string): string => {
  const { data, details } = JSON.parse(text) as { data?: { id: string; paymentId?: string }; details?: { id?: string } };
  return data?.paymentId ?? data?.id ?? details?.id ?? '';
};

/**
 * The names of the applied migrations, and all rows that the log cannot make again, including those of the log. Each row is a line with the table's
 * name and the row as JSON by Postgres.
 */
const contentOf = async (url: string): Promise<{ readonly applied: readonly string[]; readonly rows: readonly string[] }> => {
  const client = new pg.Client({ connectionString: url });
  await client.connect();
  try {
    const { rows: tables } = await client.query<{ name: string }>(
      `select format('%I.%I', schemaname, tablename) as name from pg_tables
       where schemaname in ('public', 'es') and tablename not in ('payfold_migration', 'payfold_process', 'read_model') order by 1`,
    );
    const lines: string[] = [];
    for (const { name } of tables) {
      // Leave out checkpoints with an @ in their name. They belong to read models, which are made again.
      const kept = name === 'public.projection_checkpoint' ? `where name not like '%@%'` : '';
      const { rows } = await client.query<{ line: string }>(`select row_to_json(t)::text as line from ${name} t ${kept}`);
      lines.push(...rows.map(({ line }) => `${name} ${line}`));
    }
    const { rows } = await client.query<{ name: string }>('select name from payfold_migration');
    return { applied: rows.map(({ name }) => name), rows: lines };
  } finally {
    await client.end();
  }
};

/** Runs the verifier from the frozen pack. Rejects if the verifier finds a difference. */
export const verifyWith = async (folder: string, ...args: string[]): Promise<string> =>
  (await promisify(execFile)(process.execPath, [join(folder, 'pack', 'verify.mjs'), ...args])).stdout;
