/** The evidence pack: honest packs pass the standalone verifier, and forged ones fail, also if all their hashes are made anew. */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { execFile } from 'node:child_process';
import { hash } from 'node:crypto';
import { cpSync, existsSync, mkdtempSync, readFileSync, renameSync, rmSync, statSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { headKeys, proveConsistency, signLog, signManifest, writePack } from '#audit';
import { adjustBooks, closePeriod, journalModel, type PeriodPorts } from '#ledger';
import { type KeyRing, newKeyRing } from '#platform';
import { type BusyDay, busyDay, settle } from '../support/books.js';
import { everySubscriber, paymentOf, type Service, startService } from '../support/service.js';

const VERIFIER = join(import.meta.dirname, '../../apps/operator/verify.mjs');
/** A range that contains the busy day, also the days by which its clock was moved forward. */
const FROM = '2020-01-01T00:00:00.000Z';
const TO = '2100-01-01T00:00:00.000Z';
const DAY_MS = 86_400_000;

let service: Service;
let day: BusyDay;
let folder: string;
let origin: string;
/** The begin of the second period. The log before it ends with a signed head. */
let second: string;
beforeAll(async () => {
  service = await startService();
  folder = mkdtempSync(join(tmpdir(), 'payfold-pack-'));
  day = await busyDay(service);
  ({ origin } = (await sign()).head);
  writeFileSync(join(folder, 'keys.txt'), vkeyOf(service.services.keys));
  await pack('first');
  service.clock.advance(60_000);
  second = now();
  // Payments of before go on in the second period.
  const { client } = day.partner;
  for (const { id } of (await client.list({ status: 'succeeded', limit: 2 })).data.payments) await client.refund(id, { amountCents: 7 });
  await client.created(
    paymentOf(day.separate, {
      amountCents: 500,
      lineItems: [{ amountCents: 500, referenceId: String.raw`'=1;'=2\u001b`, description: 'one\u2028two' }],
    }),
  );
  await settle(service);
  await pack('second', second);
}, 600_000);
afterAll(async () => {
  rmSync(folder, { recursive: true, force: true });
  await service.stop();
});

const now = () => new Date(service.clock.now()).toISOString();
const vkeyOf = (keys: KeyRing) => headKeys(origin, keys)[0]!.vkey;
const caughtUp = async () => {
  const head = (await service.services.store.head())!;
  for (const projection of everySubscriber(service.services)) await projection.runUntil(head, { timeoutMs: 20_000 });
};
const sign = async () => {
  await caughtUp();
  return (await signLog(service.services.seal))!;
};
const pack = async (name: string, from = FROM, to = TO) => {
  await caughtUp();
  const ports = { ...service.services.seal, db: service.services.pool, reached: caughtUp };
  return writePack(ports, { from, to, out: join(folder, name), version: '0', verifier: VERIFIER });
};
const verify = (path: string, ...options: string[]) =>
  promisify(execFile)(process.execPath, [VERIFIER, 'pack', path, ...options]).then(
    ({ stdout }) => stdout,
    (error: { stderr: string }) => error.stderr,
  );
const trusted = () => ['--key', join(folder, 'keys.txt')];

interface Manifest {
  keys: string[];
  query: { from: string; to: string };
  position: string;
  size: number;
  root: string;
  events: { first: number; last: number; subtrees: string[]; consistency: string[] };
  tie: { account: string; journalCents: number; linesCents: number; differenceCents: number }[];
  files: { file: string; title: string; rows: number; bytes: number; sha256: string; totals: Record<string, number> }[];
}
interface Forgery {
  readonly manifest: Manifest;
  readonly path: string;
  readonly text: (file: string) => string;
  /** Rewrites a file. `rows`: the number of rows that the manifest then names. */
  readonly change: (file: string, made: (text: string) => string, rows?: number) => void;
  /** Rewrites the lines of a file, and names their number in the manifest. */
  readonly lines: (file: string, made: (lines: string[]) => string[]) => void;
}

let forgeries = 0;
/** Copies a pack, changes it, makes all hashes anew, and verifies. `keys`: the manifest is signed with them. null: the old signature is left. */
const forged = async (name: string, keys: KeyRing | null, change: (forgery: Forgery) => void): Promise<string> => {
  const path = join(folder, `forged-${++forgeries}`);
  cpSync(join(folder, name), path, { recursive: true });
  const manifest = JSON.parse(readFileSync(join(path, 'manifest.json'), 'utf8')) as Manifest;
  const forgery: Forgery = {
    manifest,
    path,
    text: (file) => readFileSync(join(path, file), 'utf8'),
    change: (file, made, rows) => {
      writeFileSync(join(path, file), made(readFileSync(join(path, file), 'utf8')));
      const entry = manifest.files.find((one) => one.file === file)!;
      if (rows !== undefined) entry.rows = rows;
    },
    lines: (file, made) => {
      const lines = made(readFileSync(join(path, file), 'utf8').trimEnd().split('\n'));
      forgery.change(file, () => `${lines.join('\n')}\n`, lines.length);
    },
  };
  change(forgery);
  for (const one of manifest.files) {
    const file = join(path, one.file);
    if (!existsSync(file) || !statSync(file).isFile()) continue;
    const bytes = readFileSync(file);
    [one.bytes, one.sha256] = [bytes.length, hash('sha256', bytes, 'hex')];
  }
  const text = `${JSON.stringify(manifest, null, 1)}\n`;
  writeFileSync(join(path, 'manifest.json'), text);
  if (keys) writeFileSync(join(path, 'manifest.note'), signManifest(origin, text, keys));
  const said = await verify(path, ...trusted());
  rmSync(path, { recursive: true });
  return said;
};

/** Changes a line of JSON. */
const edited = (line: string, change: (value: never) => void): string => {
  const value = JSON.parse(line) as never;
  change(value);
  return JSON.stringify(value);
};
const ONLY_ENTRY = /^[\s\S]*?\n\n(?=\d{4}-)[\s\S]*?\n\n/;
const inventPayment = ({ text, change, lines }: Forgery) => {
  const invented = text('payments.csv')
    .split('\r\n')[1]!
    .replace(/^[^,]*/, '01890000-0000-7000-8000-000000000001');
  change('payments.csv', (csv) => `${csv}${invented}\r\n`);
  lines('payments.ndjson', (rows) => [...rows, edited(rows[0]!, (row: { payment_id: string }) => (row.payment_id = '01890000-0000-7000-8000-000000000001'))]); // prettier-ignore
};
const cutEvents = ({ lines }: Forgery) => lines('events.ndjson', (events) => events.slice(0, 50));
const cutJournal = ({ change, lines }: Forgery) => {
  lines('journal.ndjson', ([entry]) => [entry!]);
  change('journal.hledger', (text) => ONLY_ENTRY.exec(text)![0], 1);
  change('journal.csv', (text) => `${text.split('\r\n').slice(0, 3).join('\r\n')}\r\n`, 1);
};

/** Moves 5 cents between two opening balances, in every form of the trial balance. */
const shiftOpening = ({ change, text, lines, manifest }: Forgery) => {
  const rows = text('trial-balance.ndjson').trimEnd().split('\n');
  lines('trial-balance.ndjson', () =>
    rows.map((line, at) =>
      edited(line, (row: { opening_cents: number; closing_cents: number }) => {
        row.opening_cents += [-5, 5][at] ?? 0;
        row.closing_cents += [-5, 5][at] ?? 0;
      }),
    ),
  );
  const shifted = text('trial-balance.ndjson')
    .trimEnd()
    .split('\n')
    .map((line) => JSON.parse(line) as Record<string, number | string>);
  change('trial-balance.csv', (csv) => `${[csv.split('\r\n')[0], ...shifted.map((row) => Object.values(row).join(','))].join('\r\n')}\r\n`);
  const accounts = shifted.map((row) => ({ account: row.account, openingCents: row.opening_cents, debitCents: row.debit_cents, creditCents: row.credit_cents, closingCents: row.closing_cents })); // prettier-ignore
  change('trial-balance.json', () => `${JSON.stringify({ ...manifest.query, accounts }, null, 1)}\n`);
};

describe('an honest pack', () => {
  test('passes from the begin of the log on: events, journal, trial balance and openings are made again', async () => {
    const said = await verify(join(folder, 'first'), ...trusted());
    expect(said).toMatch(
      new RegExp(
        `^ok: the manifest was signed with a key that you trust
ok: 39 files are those of the manifest, with its numbers of rows and its sums
ok: the newest head, of \\d+ events, was signed at \\S+
ok: the \\d+ events between the begin of the log and the head of \\d+ events, signed at \\S+, are complete
ok: 0 other events are in the log of the newest head
ok: the \\d+ entries of the journal from ${FROM} to ${TO} are what those events post
ok: the trial balance follows from those entries
ok: the openings follow from the events: the pack begins where the log begins
ok: the line items come to the sums of the journal in \\d+ accounts, as the signed manifest names them
ok: not made again here, only signed: the other reports, the exceptions, and the drift report, which names 0 differences
$`,
      ),
    );
    expect(await verify(join(folder, 'first'))).toContain('ok: the manifest was signed with a key that it names itself');
  });
  test('passes from a later head on: payments of before come with their history, and openings are named as signed only', async () => {
    const said = await verify(join(folder, 'second'), ...trusted());
    expect(said).toMatch(
      /^ok: the \d+ events between the head of \d+ events, signed at \S+, and the head of \d+ events, signed at \S+, are complete$/m,
    );
    expect(said).toMatch(/^ok: the openings are those of the signed manifest: they come from events before the pack/m);
    expect(said).not.toContain('NOT OK');
    const { size } = JSON.parse(readFileSync(join(folder, 'second', 'manifest.json'), 'utf8')) as Manifest;
    const count = (name: string) =>
      readFileSync(join(folder, 'second', name), 'utf8')
        .trimEnd()
        .split('\n').length;
    expect(count('events.ndjson')).toBeLessThan(size / 2);
    expect(readFileSync(join(folder, 'second', 'other-events.ndjson'), 'utf8')).toContain('"type":"PaymentInitiated"');
  });
  test('passes while the log goes on: what came after its head is not in its sums', async () => {
    await caughtUp();
    const ports = {
      ...service.services.seal,
      db: service.services.pool,
      // The payment comes after the head was signed, and before the balances are read.
      reached: async () => {
        await day.partner.client.created(paymentOf(day.combined));
        await caughtUp();
      },
    };
    await writePack(ports, { from: second, to: TO, out: join(folder, 'busy'), version: '0', verifier: VERIFIER });
    expect(await verify(join(folder, 'busy'), ...trusted())).toContain('ok: the trial balance follows');
  });
  test('passes in several passes over its payments', async () => {
    const script = `import { checkPack } from ${JSON.stringify(VERIFIER)};
      console.log((await checkPack(process.argv[1], null, 3)).join('\\n'));`;
    const { stdout } = await promisify(execFile)(process.execPath, ['--input-type=module', '-e', script, join(folder, 'first')]);
    expect(stdout).toContain('the trial balance follows');
  });
});

describe('a pack that was forged without the key, with all hashes made anew, fails', () => {
  test.each([
    ['invented payments', inventPayment],
    ['events cut to 50', cutEvents],
    ['a journal cut to one entry', cutJournal],
    ['another period', ({ manifest }: Forgery) => void (manifest.query.to = '2099-01-01T00:00:00.000Z')],
    ['nothing but one blank more in the manifest', ({ manifest }: Forgery) => void (manifest.files[0]!.title += ' ')],
  ])('%s: the signature is of another manifest; a signature of a stranger is not trusted', async (_name, change) => {
    expect(await forged('first', null, change)).toBe('NOT OK: manifest.json is not the manifest that was signed\n');
    const stranger = newKeyRing();
    const named = (forgery: Forgery) => {
      change(forgery);
      forgery.manifest.keys = [vkeyOf(stranger)];
    };
    expect(await forged('first', stranger, named)).toBe('NOT OK: no trusted key signed this manifest\n');
  });
  test('the signature is missing, as in a pack of 0.1.0, or is that of a head', async () => {
    const without = await forged('first', null, ({ path }) => rmSync(join(path, 'manifest.note')));
    expect(without).toBe('NOT OK: manifest.note is missing: the manifest of this pack is not signed\n');
    const head = await forged('first', null, ({ path, text }) => writeFileSync(join(path, 'manifest.note'), text('head.txt')));
    expect(head).toBe('NOT OK: manifest.json is not the manifest that was signed\n');
  });
});

/** So the checks below do not depend on the signature. They also find what a service does that signs wrong files. */
describe('a pack that was forged and signed with the right key fails all the same', () => {
  const signedForgery = (name: string, change: (forgery: Forgery) => void) => forged(name, service.services.keys, change);
  test.each<[string, RegExp, (forgery: Forgery) => void]>([
    ['events cut to 50', /events\.ndjson has 50 of the \d+ events between the heads/, cutEvents],
    ['an event left out', /events\.ndjson goes on with event 8 of the log, and event 7 is missing/, ({ lines }) => lines('events.ndjson', (events) => events.filter((_, at) => at !== 7))], // prettier-ignore
    ['an event put in, and one left out', /the events of events\.ndjson are not those between the heads: one was changed, put in or exchanged/, ({ lines }) => lines('events.ndjson', (events) => events.map((line, at) => (at === 7 ? edited(events[8]!, (one: { leaf: number }) => (one.leaf = 7)) : line)))], // prettier-ignore
    ['an event changed', /the events of events\.ndjson are not those between the heads: .*/, ({ change }) => change('events.ndjson', (text) => text.replace('"amountCents":10000', '"amountCents":20000'))], // prettier-ignore
    ['a journal cut to one entry', /the journal lacks the entry R2 \(service fee charged\) of the event at position \S+/, cutJournal],
    ['an entry left out', /the journal lacks the entry R1 \(principal charged\) of the event at position \S+; it goes on at position \S+/, ({ lines }) => lines('journal.ndjson', (entries) => entries.slice(2))], // prettier-ignore
    ['an entry put in', /the journal has an entry at position \S+ that its event does not post/, ({ lines }) => lines('journal.ndjson', (entries) => [...entries.slice(0, 3), ...entries.slice(2)])], // prettier-ignore
    ['an entry at the end', /the journal has an entry at position 9{20} that no event between the heads posts/, ({ lines }) => lines('journal.ndjson', (entries) => [...entries, edited(entries[0]!, (one: { position: string }) => (one.position = '9'.repeat(20)))])], // prettier-ignore
    ['an entry of another amount', /the journal's entry R1 \(principal charged\) of the event at position \S+ is not what the event posts/, ({ change }) => change('journal.ndjson', (text) => text.replace('"cents":4000}', '"cents":9000}').replace('"cents":-4000}', '"cents":-9000}'))], // prettier-ignore
    ['an entry of another time', /the journal's entry R1 \(principal charged\) .* is not what the event posts/, ({ change }) => change('journal.ndjson', (text) => text.replace(/"bookedAt":"20../, '"bookedAt":"2030'))], // prettier-ignore
    ['another journal for hledger', /journal\.hledger does not hold the entries of journal\.ndjson/, ({ change }) => change('journal.hledger', (text) => text.replace('USD 40.00', 'USD 50.00'))], // prettier-ignore
    ['another journal as CSV', /journal\.csv does not hold the entries of journal\.ndjson/, ({ change }) => change('journal.csv', (text) => text.replace(',4000,0', ',5000,0'))], // prettier-ignore
    ['an invented payment', /payments\.csv has \d+ rows, not the \d+ that the manifest names/, inventPayment],
    ['an invented payment, in one form only', /payments\.csv does not hold the rows of payments\.ndjson/, ({ change }) => change('payments.csv', (text) => text.replace(',10000,', ',90000,'))], // prettier-ignore
    ['other sums', /the sums of fees\.csv are not those that the manifest names/, ({ manifest }) => void (manifest.files.find(({ file }) => file === 'fees.csv')!.totals.net_cents! += 1)], // prettier-ignore
    ['a balance of another amount', /trial-balance\.json does not hold the rows of trial-balance\.ndjson/, ({ change }) => change('trial-balance.json', (text) => text.replace(/"closingCents": -?/, '$&1'))], // prettier-ignore
    ['an exception left out', /exceptions\.ndjson has \d+ rows, not the \d+ that the manifest names/, ({ manifest }) => void (manifest.files.find(({ file }) => file === 'exceptions.ndjson')!.rows += 1)], // prettier-ignore
    ['a drift report of another run', /drift\.json has another digest than the manifest names/, ({ change }) => change('drift.json', (text) => text.replace(/"digest": "./, '"digest": "_'))], // prettier-ignore
    ['a head of another size', /head\.txt is not the head that the manifest names/, ({ manifest }) => void (manifest.size += 1)],
    ['line items with a difference', /\S+: the line items come to -?\d+ cents, the journal to -?\d+/, ({ manifest }) => { manifest.tie[0]!.linesCents += 1; manifest.tie[0]!.differenceCents = 1; }], // prettier-ignore
    ['line items with a hidden difference', /\S+: the line items come to -?\d+ cents, the journal to -?\d+/, ({ manifest }) => void (manifest.tie[0]!.linesCents += 1)], // prettier-ignore
    ['a tie of another journal', /\S+: the tie says -?\d+ cents of the journal, the trial balance says -?\d+/, ({ manifest }) => void (manifest.tie[0]!.journalCents += 1)], // prettier-ignore
    ['a tie without an account', /\S+: the tie does not name it, and it moved -?\d+ cents/, ({ manifest }) => void (manifest.tie = manifest.tie.filter(({ account }) => !account.endsWith(':payable')))], // prettier-ignore
    ['a file left out', /fees\.csv is missing/, ({ path }) => rmSync(join(path, 'fees.csv'))],
    ['a file left out, and not named', /the manifest does not name drift\.json/, ({ manifest, path }) => { rmSync(join(path, 'drift.json')); manifest.files = manifest.files.filter(({ file }) => file !== 'drift.json'); }], // prettier-ignore
    ['a file more', /notes\.txt is in the folder, but the manifest does not name it/, ({ path }) => writeFileSync(join(path, 'notes.txt'), '')],
    ['a file more, which is named', /the manifest names notes\.txt, which no pack has/, ({ manifest, path }) => { writeFileSync(join(path, 'notes.txt'), ''); manifest.files.push({ ...manifest.files[0]!, file: 'notes.txt' }); }], // prettier-ignore
    ['a file named twice', /the manifest names a file twice/, ({ manifest }) => void manifest.files.push(manifest.files[0]!)],
    ['a path instead of a name', /the manifest names "\.\.\/keys\.txt": no file of a pack has a path/, ({ manifest }) => void (manifest.files[0]!.file = '../keys.txt')], // prettier-ignore
    ['a link instead of a file', /fees\.csv is no ordinary file/, ({ path }) => { renameSync(join(path, 'fees.csv'), join(folder, 'elsewhere.csv')); symlinkSync(join(folder, 'elsewhere.csv'), join(path, 'fees.csv')); }], // prettier-ignore
  ])('%s', async (_name, message, change) => {
    expect(await signedForgery('first', change)).toMatch(new RegExp(`^NOT OK: ${message.source}\n$`));
  });
  test('a trial balance of another opening, in every form', async () => {
    expect(await signedForgery('first', shiftOpening)).toMatch(/NOT OK: \S+: its opening by the events is 0 cents, the trial balance says -?5/);
  });
  test('the history of a payment cut, or given twice', async () => {
    const isPayment = (line: string) => line.includes('"stream":"payment-');
    const cut = (lines: string[]) => lines.filter((line) => !(isPayment(line) && line.includes('"type":"PaymentCreated"')));
    expect(await signedForgery('second', ({ lines }) => lines('other-events.ndjson', cut))).toMatch(/NOT OK: .* revision \d of payment-\S+ does not follow; 1 is missing/); // prettier-ignore
    expect(await signedForgery('second', ({ lines }) => lines('other-events.ndjson', (all) => all.filter((line) => !isPayment(line))))).toMatch(/does not follow; 0 is missing/); // prettier-ignore
    expect(await signedForgery('second', ({ lines }) => lines('other-events.ndjson', (all) => [...all, all.find(isPayment)!]))).toMatch(/revision 0 of payment-\S+ does not follow/); // prettier-ignore
    const changed = (text: string) => text.replace(/"amountCents":\d+/, '"amountCents":1');
    expect(await signedForgery('second', ({ change }) => change('other-events.ndjson', changed))).toMatch(
      /the event at position \S+ is not in the log/,
    );
  });
  test('events that begin after the period, or end before the log does', async () => {
    // The forger takes an honest later head as the first one, or an honest earlier head as the last one.
    const late = await signedForgery('second', ({ manifest }) => void (manifest.query.from = FROM));
    expect(late).toMatch(/NOT OK: the first head was signed at \S+, after the period began/);
    const [earlier, later] = ['first', 'second'].map((name) => JSON.parse(readFileSync(join(folder, name, 'manifest.json'), 'utf8')) as Manifest);
    const [before, after] = ['first', 'second'].map((name) => readFileSync(join(folder, name, 'head.txt'), 'utf8'));
    const { proof } = await proveConsistency(service.services.seal, before!, after!);
    const early = await signedForgery('first', ({ manifest, change }) => {
      change('head.txt', () => after!);
      Object.assign(manifest, { position: later!.position, size: later!.size, root: later!.root });
      manifest.events.consistency = [...proof];
    });
    expect(earlier!.size).toBeLessThan(later!.size);
    expect(early).toContain('NOT OK: the events end before the newest head, and the period was not closed by then');
  });
});

describe('closed periods', () => {
  const ports = (): PeriodPorts => {
    const { store, pool, clock, ids, readModels } = service.services;
    return { store, db: pool, clock, ids, journalReached: (position) => readModels.of(journalModel).runUntil(position, { timeoutMs: 20_000 }) };
  };
  const midnight = () => `${now().slice(0, 10)}T00:00:00.000Z`;
  const eventsOf = (name: string) =>
    readFileSync(join(folder, name, 'events.ndjson'), 'utf8')
      .trimEnd()
      .split('\n').length;

  test('a pack ends where its period was closed; the next one takes its openings from there; balances and digest are those of the closing', async () => {
    const [begin, pay] = [midnight(), () => day.partner.client.created(paymentOf(day.separate))];
    await caughtUp();
    await closePeriod(ports(), begin, 'Dana');
    const { head } = await sign();
    await pay();
    // A late fact is booked in the next period.
    const postings = [{ account: 'assets:bank:operating', cents: 700 }, { account: 'equity:adjustment', cents: -700 }]; // prettier-ignore
    await adjustBooks(ports(), { adjustmentId: service.services.ids.uuid(), postings, effectiveAt: FROM, reason: 'found later', by: 'Dana' }, true);
    await pack('closed', FROM, begin);
    expect(eventsOf('closed')).toBe(head.size);
    const closed = await verify(join(folder, 'closed'), ...trusted());
    expect(closed).toContain(
      `ok: the closing balances and the digest of the journal are those that were recorded when the period to ${begin} was closed`,
    );
    expect(closed).toMatch(/^ok: 0 other events/m);

    await sign();
    service.clock.advance(DAY_MS);
    const end = midnight();
    await pay();
    await caughtUp();
    await closePeriod(ports(), end, 'Dana');
    await pack('middle', begin, end);
    const middle = await verify(join(folder, 'middle'), ...trusted());
    expect(middle).toContain(
      `ok: the closing balances and the digest of the journal are those that were recorded when the period to ${end} was closed`,
    );
    await pack('after', end);
    const after = await verify(join(folder, 'after'), ...trusted());
    expect(after).toMatch(
      new RegExp(`^ok: the openings are those that the event at position \\S+ recorded when the period to ${end} was closed$`, 'm'),
    );
    expect(after).not.toContain('NOT OK');
    expect(eventsOf('after')).toBeLessThan(20);
    expect(await forged('after', service.services.keys, shiftOpening)).toMatch(/NOT OK: \S+: its opening, recorded when the period to \S+ was closed, is -?\d+ cents, the trial balance says -?\d+/); // prettier-ignore
  });
});
