/**
 * `npm run pan-grep -- [--rounds N]`: sends card numbers and security codes through every entrance of its own service. Then it searches every place
 * where the service leaves data: answers, the log at level debug, metrics, all rows of all tables, and the data directory. That directory holds
 * Postgres' files, the write-ahead log and the processor's journal.
 *
 * Before the search, leaks are planted in such places, and one in each spelling. Exit 1 if another card is found, or if a planted card is not found.
 */
import { readFileSync, readdirSync, statSync } from 'node:fs';
import { appendFile, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { createPool, freePort, type Pool } from '#platform';
import { controlKeyOf, createSimulatorControl } from '../../apps/simulator/control.js';
import { adminUrlOf, DataDir, launch, runtimeOf, start, welcomeOf } from '../support/processes.js';
import { writeReport } from '../support/report.js';
import { type Sink, tablesOf } from '../support/sinks.js';
import { driveCards, newCard, SHOP, SPELLINGS } from './drive.js';
import { CardSearch, securityCodes } from './scan.js';

const { values } = parseArgs({ options: { rounds: { type: 'string', default: '5' } } });

const filesOf = (directory: string): Sink[] =>
  readdirSync(directory, { recursive: true, encoding: 'utf8' })
    .map((name) => join(directory, name))
    .filter((path) => statSync(path).isFile())
    .map((path) => ({ name: `file ${path.slice(directory.length + 1)}`, bytes: readFileSync(path) }));

/** The leaks to plant: one for each kind of place, in the spellings that programs use. */
const LEAKS: readonly { readonly name: string; readonly plant: (card: string, places: { pool: Pool; dataDir: string }) => Promise<Sink | void>; }[] = [
  { name: 'a log line', plant: async (card) => ({ name: 'log', bytes: Buffer.from(`{"level":20,"msg":"body","body":{"cardNumber":"${card}"}}\n`) }) },
  { name: 'a log line, in groups', plant: async (card) => ({ name: 'log', bytes: Buffer.from(`refused ${card.replaceAll(/(\d{4})(?=\d)/g, '$1 ')}`) }) },
  { name: 'an answer', plant: async (card) => ({ name: 'answer', bytes: Buffer.from(`{"success":false,"message":"${card} is not valid"}`) }) },
  { name: 'a metric’s label', plant: async (card) => ({ name: 'metrics', bytes: Buffer.from(`x_total{route="/payments/${card}"} 1\n`) }) },
  { name: 'an event’s metadata', plant: async (card, { pool }) => void (await pool.query(`update es.events set meta = (meta::jsonb || jsonb_build_object('card', $1::text))::json where position = 1`, [card])) },
  { name: 'a table, as hex', plant: async (card, { pool }) => void (await pool.query('create table leak_hex as select encode($1::bytea, $2) as value', [Buffer.from(card), 'hex'])) },
  { name: 'a table, as base64 within something', plant: async (card, { pool }) => void (await pool.query('create table leak_base64 as select $1::text as value', [Buffer.from(`x{"pan":"${card}"}`).toString('base64')])) },
  { name: 'a row that was deleted again', plant: async (card, { pool }) => { await pool.query('create table leak_deleted (value text)'); await pool.query('insert into leak_deleted values ($1)', [card]); await pool.query('delete from leak_deleted'); } },
  { name: 'a file', plant: async (card, { dataDir }) => writeFile(join(dataDir, 'dump.bin'), Buffer.concat([Buffer.alloc(1_000, 7), Buffer.from(card, 'utf16le')])) },
  { name: 'the processor’s journal', plant: async (card, { dataDir }) => appendFile(join(dataDir, 'simulator', 'leak.log'), encodeURIComponent(card.replaceAll(/(\d{4})(?=\d)/g, '$1 '))) },
  ...SPELLINGS.map((spell, index) => ({
    name: `spelling ${index + 1} (${spell('4242424242424242')})`,
    plant: async (card: string, { dataDir }: { dataDir: string }) => writeFile(join(dataDir, `spelled-${index}.txt`), `pay ${spell(card)} now`),
  })),
]; // prettier-ignore

/** The log after the text that the first start prints. That text has a `curl` command with a test card. */
const afterWelcome = (stdout: string): string => stdout.slice(stdout.indexOf('\nready '));

const rounds = Number(values.rounds);
const begun = performance.now();
const dataDir = await DataDir.create();
try {
  const metricsPort = await freePort();
  const service = await start('standalone', dataDir, { LOG_LEVEL: 'debug', METRICS_PORT: String(metricsPort) });
  const { apiKey, portalId } = welcomeOf(service.stdout())!;
  const { apiUrl, simulatorUrl } = runtimeOf(dataDir);
  const operator = fileURLToPath(new URL('../../apps/operator/main.js', import.meta.url));
  const { code, stderr } = await launch([operator, 'portals', 'checkout', portalId, '--enable', '--allow', `${SHOP}/pay`], dataDir).exited;
  if (code !== 0) throw new Error(`hosted checkout is not on: ${stderr}`);
  const driven = await driveCards({ url: apiUrl, apiKey, portalId, bank: createSimulatorControl(simulatorUrl, controlKeyOf(dataDir.data)), rounds });
  const metrics = await (await fetch(`http://127.0.0.1:${metricsPort}/metrics`)).text();

  const pool = createPool(adminUrlOf(dataDir), { name: 'pan-grep', max: 1, statementTimeoutMs: 0 });
  const sinks: Sink[] = [
    // The pay page of the sandbox shows one public test number. Answers may hold no other card number.
    { name: 'answers', bytes: Buffer.from(driven.answers.replaceAll('Try card 4242 4242 4242 4242', '')) },
    { name: 'metrics', bytes: Buffer.from(metrics) },
    ...(await tablesOf(pool)),
  ];
  // Leaks are planted after the rows were read and before the files are read. So a leak in a table must be found in Postgres' files. Each leak has
  // its own card.
  const planted = new Map<string, string>();
  for (const { name, plant } of LEAKS) {
    const card = newCard();
    planted.set(card, name);
    const sink = await plant(card, { pool, dataDir: dataDir.data });
    if (sink) sinks.push({ ...sink, name: `planted ${sink.name}` });
  }
  await pool.query('checkpoint');
  await pool.end();
  // Kill the service, so that it cannot clean up files.
  await service.killTree();
  sinks.push({ name: 'log', bytes: Buffer.from(afterWelcome(service.stdout()) + service.stderr()) }, ...filesOf(dataDir.data));

  const search = new CardSearch([...driven.cards, ...planted.keys()]);
  const hits: { sink: string; digits: string; form: string; around: string }[] = [];
  const seen = new Set<string>();
  for (const { name, bytes } of sinks) {
    for (const found of search.scan(bytes)) {
      if (planted.has(found.digits)) seen.add(found.digits);
      else hits.push({ sink: name, ...found });
    }
    for (const text of securityCodes(bytes)) hits.push({ sink: name, digits: '', form: 'security code', around: text });
  }
  const missed = [...planted].filter(([card]) => !seen.has(card)).map(([, name]) => name);
  const bytes = sinks.reduce((sum, sink) => sum + sink.bytes.length, 0);
  for (const { sink, form, around } of hits.slice(0, 20)) console.log(`✗ ${sink}: ${form}: ${around}`);
  for (const name of missed) console.log(`✗ planted and not found: ${name}`);
  console.log(
    `${driven.cards.length} card numbers in ${driven.requests} requests; ${sinks.length} places, ${(bytes / 1_048_576).toFixed(0)} MiB searched: ${hits.length} hits, ${planted.size - missed.length} of ${planted.size} planted leaks found`,
  );
  writeReport('pan-grep', {
    seconds: Math.round((performance.now() - begun) / 1_000),
    cards: driven.cards.length,
    requests: driven.requests,
    places: sinks.length,
    mebibytes: Math.round(bytes / 1_048_576),
    hits: hits.length,
    planted: planted.size,
    plantedFound: planted.size - missed.length,
  });
  if (hits.length > 0 || missed.length > 0) process.exitCode = 1;
} finally {
  await dataDir.remove();
}
