/**
 * Planted texts: names, e-mail addresses, telephone numbers, descriptions, metadata and reasons are sent through every entrance of a real process tree.
 * Then every place where the service leaves data is searched, before any erasure: all rows of all tables (as pg_dump shows them), the files of Postgres
 * with its write-ahead log, the files of the event store if that is not Postgres, the log at level debug, metrics, heads, packs, proofs and default
 * exports. Each planted leak must be found.
 */
import { execFile } from 'node:child_process';
import { appendFileSync, readdirSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { REPORTS } from '#audit';
import { createPool, freePort } from '#platform';
import { intakeOf, Payer, SHOP } from '../support/checkout.js';
import { eventually } from '../support/eventually.js';
import { eventsInPostgres, type FreshKurrentDb, freshKurrentDb } from '../support/kurrentdb-server.js';
import { adminUrlOf, DataDir, newKey, runtimeOf, start, welcomeOf } from '../support/processes.js';
import { search, type Sink, tablesOf } from '../support/sinks.js';
import { CARD, PAYMENTS, paymentOf } from '../support/service.js';

const LAUNCHER = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname;
const RUN_MS = 240_000;

// ------------------------------------------------------------------------------------------------------------------------------------
// The search.

describe('the search sees a text', () => {
  const text = 'Quillfeather of Elm Street';
  test.each([
    ['as it is', text],
    ['as hex', Buffer.from(text).toString('hex')],
    ...[0, 1, 2].map((pad): [string, string] => [
      `as base64 after ${pad} bytes`,
      Buffer.from(`${'x'.repeat(pad)}${text}, and more`).toString('base64'),
    ]),
    ['percent-encoded', encodeURIComponent(text)],
    ['in a form', text.replaceAll(' ', '+')],
    ['in capitals', text.toUpperCase()],
    ['in two-byte characters', Buffer.from(text, 'utf16le').toString('latin1')],
    ['backwards', [...text].reverse().join('')],
  ])('%s', (_, written) =>
    expect(search({ text }, [{ name: 'here', bytes: Buffer.from(`{"a":"${written}"}`, 'latin1') }])).toEqual(['text in here']),
  );
  test('and none where there is none', () =>
    expect(search({ text }, [{ name: 'here', bytes: Buffer.from('Quillfeather of Oak Street '.repeat(100)) }])).toEqual([]));
});

// ------------------------------------------------------------------------------------------------------------------------------------
// The service.

/** Every text that must stand nowhere in clear. No text is a part of another one, and none stands in the code. */
const token = (word: string) => `${word}${Math.random().toString(36).slice(2, 8)}quv`;
const TEXTS = {
  firstName: token('Ottoline'),
  lastName: token('Quillfeather'),
  email: `${token('ottoline')}@mail.example`,
  phone: `+1 555 ${String(Math.floor(Math.random() * 1e3)).padStart(3, '0')} 7${String(Math.floor(Math.random() * 1e6)).padStart(6, '0')}`,
  street: `17 ${token('Elmwood')} Crescent`,
  city: token('Riverdale'),
  description: `Water of ${token('Meadow')}`,
  metadata: token('Tenant'),
  voidReason: `entered twice by ${token('Ada')}`,
  refundReason: `moved to ${token('Oakham')}`,
  staffReason: `billed twice to ${token('Berta')}`,
  disputeReason: `not recognised by ${token('Clara')}`,
  caseReason: `court order against ${token('Dorian')}`,
  checkoutFirst: token('Evangeline'),
  checkoutLast: token('Fairweather'),
  checkoutEmail: `${token('evangeline')}@mail.example`,
  checkoutState: token('Basket'),
  checkoutLine: `Sewer of ${token('Gable')}`,
  abandonedName: token('Hyacinth'),
};

let dataDir: DataDir;
let kurrentDb: FreshKurrentDb;
const sinks: Sink[] = [];
/** Planted leaks, and where they were planted. */
const leaks: Record<string, string> = {};

const tables = async (): Promise<Sink[]> => {
  const pool = createPool(adminUrlOf(dataDir), { name: 'planted', max: 1, statementTimeoutMs: 0 });
  try {
    const found = await tablesOf(pool);
    // After the rows were read, so these must be found in the files of Postgres.
    leaks['a row'] = token('Leakrow');
    leaks['a deleted row'] = token('Leakgone');
    await pool.query('create table leak (value text)');
    await pool.query('insert into leak values ($1), ($2)', [leaks['a row'], leaks['a deleted row']]);
    await pool.query('delete from leak where value = $1', [leaks['a deleted row']]);
    await pool.query('checkpoint');
    return found;
  } finally {
    await pool.end();
  }
};

const filesBelow = (folder: string): Sink[] =>
  readdirSync(folder, { recursive: true, encoding: 'utf8' })
    .map((name) => join(folder, name))
    .filter((path) => statSync(path).isFile())
    .map((path) => ({ name: `file ${path.slice(folder.length + 1)}`, bytes: readFileSync(path) }));

beforeAll(async () => {
  dataDir = await DataDir.create();
  kurrentDb = await freshKurrentDb();
  const [metricsPort, auditPort] = [await freePort(), await freePort()];
  const env = { ...kurrentDb.env, LOG_LEVEL: 'debug', METRICS_PORT: String(metricsPort), AUDIT_PORT: String(auditPort) };
  const service = await start('standalone', dataDir, env);
  const { apiKey, portalId } = welcomeOf(service.stdout())!;
  const { apiUrl } = runtimeOf(dataDir);
  const payfold = (...args: string[]) =>
    new Promise<string>((done, fail) => {
      execFile(
        process.execPath,
        [LAUNCHER, ...args, '--yes'],
        {
          env: { ...kurrentDb.env, PATH: process.env.PATH, HOME: process.env.HOME, DATA_DIR: dataDir.data, LOG_LEVEL: 'debug' },
          cwd: dataDir.path,
          maxBuffer: 1 << 28,
        },
        (error, stdout, stderr) => {
          sinks.push({ name: `the log of payfold ${args.slice(0, 2).join(' ')}`, bytes: Buffer.from(stderr) });
          if (error && error.code !== 1) fail(new Error(`payfold ${args.join(' ')}: ${stderr}`));
          else done(stdout);
        },
      );
    });
  const post = async (path: string, body: object) => {
    const answer = await fetch(`${apiUrl}${path}`, {
      method: 'POST',
      headers: { authorization: `ApiKey ${apiKey}`, 'content-type': 'application/json', 'idempotency-key': newKey() },
      body: JSON.stringify(body),
    });
    return { status: answer.status, ...((await answer.json()) as { data?: { id: string }; details?: { id?: string } }) };
  };
  const { firstName, lastName, email, phone, street: line1, city, description, metadata } = TEXTS;
  const body = (number: string = CARD.approved) =>
    paymentOf(portalId, {
      number,
      payer: { firstName, lastName, email, phone, address: { line1, city, state: 'CA', zip: '90001', country: 'US' } },
      lineItems: [{ amountCents: 10_000, referenceId: 'WTR-1', description, metadata: { tenant: metadata } }],
    });
  const created = async (number?: string) => (await post(PAYMENTS, body(number))).data!.id;

  const account = JSON.parse(await payfold('--json', 'accounts', 'list')) as { accountId: string }[];
  // The name of an account stands in its event in clear.
  leaks['an event'] = token('Leakevent');
  await payfold('accounts', 'create', '--name', leaks['an event']);
  await payfold('webhooks', 'endpoints', 'add', '--account', account[0]!.accountId, '--url', 'https://hooks.riverton.example/payments');
  expect((await post(`${PAYMENTS}/${await created()}/void`, { reason: TEXTS.voidReason })).status).toBe(200);
  expect((await post(`${PAYMENTS}/${await created()}/refund`, { reason: TEXTS.refundReason, amountCents: 100 })).status).toBe(200);
  for (const number of [CARD.declined, CARD.gatewayError, CARD.unreadable]) await post(PAYMENTS, body(number));
  // A request that is refused.
  expect((await post(PAYMENTS, { ...body(), amountCents: 1 })).status).toBe(400);
  const disputed = await created(CARD.settlesAtOnce);
  await payfold('payments', 'refund', disputed, '--amount-cents', '100', '--reason', TEXTS.staffReason, '--by', 'Dana');
  const today = new Date().toISOString().slice(0, 10);
  const terms = ['--status', 'debited', '--stage', 'chargeback', '--reason-code', '10.4', '--opened-on', today, '--due-date', today];
  await payfold('disputes', 'open', '--payment', disputed, '--amount-cents', '500', '--reason', TEXTS.disputeReason, ...terms);
  await payfold('cases', 'hold', '--portal', portalId, '--reference', 'CASE-9', '--reason', TEXTS.caseReason);

  await payfold('portals', 'checkout', portalId, '--enable', '--allow', `${SHOP}/pay`);
  const form = (names: Readonly<Record<string, string>>) =>
    intakeOf({ portalId }, { state: TEXTS.checkoutState, line_items: JSON.stringify([{ amount_cents: 12_500, reference_id: 'S-1', description: TEXTS.checkoutLine }]), ...names }); // prettier-ignore
  const payer = new Payer(apiUrl);
  const session = await payer.begin(
    form({ payer_first_name: TEXTS.checkoutFirst, payer_last_name: TEXTS.checkoutLast, payer_email: TEXTS.checkoutEmail }),
  );
  await payer.pay(session, { card_number: CARD.declined });
  await payer.pay(session);
  // A payer who never pays.
  await new Payer(apiUrl).begin(form({ payer_first_name: TEXTS.abandonedName }));

  await payfold('settlement', 'close');
  for (const report of Object.keys(REPORTS)) sinks.push({ name: `export ${report}`, bytes: Buffer.from(await payfold('audit', 'export', report)) });
  sinks.push({ name: 'export journal', bytes: Buffer.from(await payfold('ledger', 'journal', '--format', 'ndjson')) });
  const { auditKey } = JSON.parse(await payfold('--json', 'audit', 'keys', 'issue', '--name', 'Job', '--role', 'auditor')) as { auditKey: string };
  for (const feed of ['events', 'changed-payments']) {
    const read = () => fetch(`http://127.0.0.1:${auditPort}/audit/v1/${feed}?limit=1000`, { headers: { authorization: `AuditKey ${auditKey}` } });
    const text = await eventually(async () => {
      const answer = await read();
      const found = await answer.text();
      return answer.status === 200 && found.includes(disputed) ? found : null;
    });
    sinks.push({ name: `feed ${feed}`, bytes: Buffer.from(text) });
  }
  const folder = join(dataDir.path, 'evidence');
  await payfold('audit', 'pack', '--from', '2020-01-01', '--to', new Date().toISOString(), '--out', folder);
  await payfold('audit', 'prove', disputed, '--out', join(dataDir.path, 'proof.json'));
  sinks.push(...filesBelow(folder).map(({ name, bytes }) => ({ name: `pack, ${name}`, bytes })));
  sinks.push({ name: 'proof', bytes: readFileSync(join(dataDir.path, 'proof.json')) });
  sinks.push({ name: 'metrics', bytes: Buffer.from(await (await fetch(`http://127.0.0.1:${metricsPort}/metrics`)).text()) });
  sinks.push(...(await tables()));
  leaks['a file'] = token('Leakfile');
  writeFileSync(join(dataDir.data, 'dump.bin'), Buffer.concat([Buffer.alloc(1_000, 7), Buffer.from(leaks['a file'], 'utf16le')]));
  leaks['the books of the processor'] = token('Leakbank');
  appendFileSync(join(dataDir.data, 'simulator', 'leak.log'), Buffer.from(`x{"name":"${leaks['the books of the processor']}"}`).toString('base64'));
  // Killed, so that nothing is cleaned up at the end.
  await service.killTree();
  leaks['a log line'] = token('Leaklog');
  const logged = `${service.stdout()}${service.stderr()}{"level":20,"payer":"${leaks['a log line']}"}\n`;
  sinks.push({ name: 'log', bytes: Buffer.from(logged) }, ...filesBelow(dataDir.data));
  if (kurrentDb.files) sinks.push(...filesBelow(kurrentDb.files).map(({ name, bytes }) => ({ name: `event store, ${name}`, bytes })));
}, RUN_MS);
afterAll(async () => {
  await dataDir?.remove();
  await kurrentDb?.stop();
});

test('no planted text stands in clear anywhere, before any erasure', () => expect(search(TEXTS, sinks)).toEqual([]));

test('the places are all there', () => {
  const names = sinks.map(({ name }) => name);
  for (const part of [
    ...(eventsInPostgres ? ['table es.events'] : ['event store, file ']),
    'table public.idempotency_key',
    'table public.webhook_event',
    'table public.checkout_intake',
    'table rm_payment_list_',
  ])
    expect(names.some((name) => name.startsWith(part))).toBe(true);
  expect(names.some((name) => /^file postgres\/pg_wal\/[0-9A-F]{24}$/.test(name))).toBe(true);
  expect(names.some((name) => /^file heads\/.*\.head$/.test(name))).toBe(true);
  expect(names).toEqual(expect.arrayContaining(['pack, file events.ndjson', 'feed events', 'feed changed-payments']));
});

test('each deliberate leak is found', () => {
  const found = search(leaks, sinks);
  if (!eventsInPostgres) expect(found.some((one) => one.startsWith('an event in event store, '))).toBe(true);
  expect(Object.keys(leaks).filter((name) => !found.some((one) => one.startsWith(`${name} in `)))).toEqual([]);
});
