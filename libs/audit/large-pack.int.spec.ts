/** A large evidence pack: the standalone verifier reads it in little memory. */
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { execFile } from 'node:child_process';
import { hash } from 'node:crypto';
import { closeSync, mkdtempSync, openSync, readFileSync, rmSync, statSync, writeFileSync, writeSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import type { Recorded } from '#eventstore';
import type { Json } from '#kernel';
import { type Books, csvLine, firstRules, journalHeading, journalise, journalText, ndjsonLines } from '#ledger';
import type { PaymentEvent } from '#payments';
import { newKeyRing } from '#platform';
import { combined, created, initiated } from '../../test/support/given.js';
import { REPORTS } from './exports.js';
import { headKeys, signHead, signManifest } from './head.js';
import { eventHash, GrowingTree, leafOf } from './merkle.js';

const VERIFIER = new URL('../../apps/operator/verify.mjs', import.meta.url).href;
const PAYMENTS = 12_000;
/** The verifier may keep so many payments at once. It then reads the pack three times. */
const PAYMENTS_AT_ONCE = 4_000;
/** Heap of the verifier in MiB. It is a fraction of the pack. */
const HEAP_MIB = 24;
const ORIGIN = 'payfold/log/large';
const [FROM, TO, AT] = ['2026-01-01T00:00:00.000Z', '2026-02-01T00:00:00.000Z', '2026-01-05T10:00:00.000Z'];

const keys = newKeyRing();
let folder: string;
beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'payfold-large-pack-'));
  writeLargePack();
}, 300_000);
afterAll(() => rmSync(folder, { recursive: true, force: true }));

/** Writes the pack of a log that holds only charged and settled payments, as `writePack` would write it. */
const writeLargePack = (): void => {
  const files: { file: string; title: string; rows: number; totals: object; bytes: number; sha256: string }[] = [];
  const named = (file: string, rows: number, totals: object = {}) => {
    const path = join(folder, file);
    files.push({ file, title: file, rows, totals, bytes: statSync(path).size, sha256: hash('sha256', readFileSync(path), 'hex') });
  };
  const write = (file: string, text: string, rows: number, totals: object = {}) => {
    writeFileSync(join(folder, file), text);
    named(file, rows, totals);
  };
  const NAMES = ['events.ndjson', 'journal.ndjson', 'journal.csv', 'journal.hledger'] as const;
  const open = Object.fromEntries(NAMES.map((name) => [name, openSync(join(folder, name), 'w')])) as Record<(typeof NAMES)[number], number>;
  const texts = { 'journal.ndjson': journalText('ndjson'), 'journal.csv': journalText('csv'), 'journal.hledger': journalText('hledger') };
  writeSync(open['journal.csv'], journalHeading('csv'));
  writeSync(open['journal.hledger'], journalHeading('hledger'));
  const tree = new GrowingTree();
  const sums = new Map<string, { debit: number; credit: number }>();
  let entries = 0;
  const closedAt = '2026-01-06T05:00:00.000Z';
  const settled = { type: 'PaymentSettled', at: AT, data: { leg: 'combined', batchId: 'b1', closedAt, grossCents: 10_325, feeCents: 30 } } as const;
  const history: PaymentEvent[] = [initiated(combined, AT), created(combined, AT), settled];
  // All payments begin before the first one goes on. So a reader has to know all of them.
  const states: Books[] = Array.from({ length: PAYMENTS }, () => null);
  for (const [revision, { type, data }] of history.entries())
    for (let number = 0; number < PAYMENTS; number++) {
      const id = `01890000-0000-7000-8${revision}00-${String(number).padStart(12, '0')}`;
      const position = String(tree.size + 1).padStart(20, '0');
      const meta = { recordedAt: AT, actor: { type: 'system', id: 'spec' }, correlationId: 'spec' } as const;
      const stream = `payment-01890000-0000-7000-8000-${String(number).padStart(12, '0')}`;
      const event = { position, stream, revision: BigInt(revision), type, id, v: 1, data: data as Json, meta } as unknown as Recorded;
      writeSync(open['events.ndjson'], `${JSON.stringify({ leaf: tree.size, event: leafOf(event) })}\n`);
      tree.add(eventHash(event));
      const posted = journalise(event, states[number]!, { closedTo: null, rules: firstRules() });
      states[number] = posted.books;
      for (const entry of posted.entries) {
        entries += 1;
        for (const name of ['journal.ndjson', 'journal.csv', 'journal.hledger'] as const) writeSync(open[name], texts[name](entry));
        for (const { account, cents } of entry.postings) {
          const { debit, credit } = sums.get(account) ?? { debit: 0, credit: 0 };
          sums.set(account, { debit: debit + Math.max(cents, 0), credit: credit + Math.max(-cents, 0) });
        }
      }
    }
  for (const name of NAMES) {
    closeSync(open[name]);
    named(name, name === 'events.ndjson' ? tree.size : entries);
  }
  const rows = [...sums]
    .sort(([one], [other]) => (one < other ? -1 : 1))
    .map(([account, { debit, credit }]) => [account, 0, debit, credit, debit - credit]);
  for (const [name, { columns }] of Object.entries(REPORTS)) {
    const cells = name === 'trial-balance' ? rows : [];
    const turnover = rows.reduce((total, [, , debit]) => total + (debit as number), 0);
    const totals = name === 'trial-balance' ? { opening_cents: 0, debit_cents: turnover, credit_cents: turnover, closing_cents: 0 } : {};
    write(`${name}.csv`, csvLine(columns) + cells.map(csvLine).join(''), cells.length, totals);
    write(`${name}.ndjson`, cells.map(ndjsonLines(columns)).join(''), cells.length, totals);
  }
  const accounts = rows.map(([account, openingCents, debitCents, creditCents, closingCents]) => ({ account, openingCents, debitCents, creditCents, closingCents })); // prettier-ignore
  write('trial-balance.json', JSON.stringify({ from: FROM, to: TO, accounts }), accounts.length);
  for (const name of ['other-events.ndjson', 'exceptions.ndjson', 'verify.mjs']) write(name, '', 0);
  write('drift.json', JSON.stringify({ digest: '', differences: [] }), 0);
  const position = String(tree.size).padStart(20, '0');
  const note = signHead({ origin: ORIGIN, size: tree.size, root: tree.root(), at: TO, position }, keys);
  for (const name of ['head.txt', 'last-head.txt']) write(name, note, 1);
  const events = { first: 0, last: tree.size, subtrees: [], consistency: [] };
  const tie = rows.map(([account, , , , cents]) => ({ account, journalCents: cents, linesCents: cents, differenceCents: 0 }));
  const manifest = JSON.stringify({ query: { from: FROM, to: TO }, position, size: tree.size, root: tree.root().toString('base64'), events, digest: '', tie, keys: [], files }); // prettier-ignore
  writeFileSync(join(folder, 'manifest.json'), manifest);
  writeFileSync(join(folder, 'manifest.note'), signManifest(ORIGIN, manifest, keys));
};

test('is verified in a heap that is a fraction of the pack', async () => {
  const size = ['events.ndjson', 'journal.ndjson'].reduce((total, name) => total + statSync(join(folder, name)).size, 0);
  expect(size).toBeGreaterThan(2 * HEAP_MIB * 1024 * 1024);
  const script = `import { checkPack } from ${JSON.stringify(VERIFIER)};
    console.log((await checkPack(process.argv[1], [process.argv[2]], ${PAYMENTS_AT_ONCE})).join('\\n'));`;
  const { vkey } = headKeys(ORIGIN, keys)[0]!;
  const { stdout } = await promisify(execFile)(process.execPath, [`--max-old-space-size=${HEAP_MIB}`, '--input-type=module', '-e', script, folder, vkey]); // prettier-ignore
  expect(stdout).toContain(`the ${4 * PAYMENTS} entries of the journal from ${FROM} to ${TO} are what those events post`);
  expect(stdout).toContain('the trial balance follows from those entries');
});
