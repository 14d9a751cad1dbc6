/**
 * The simulator forgets what settled 30 days ago. Younger references are answered as before, kept batches keep their lines, and a restart finds the
 * same state. A real process is killed while it deletes, and while it carries the journal of an older one over.
 */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync } from 'node:fs';
import { mkdir, mkdtemp, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { crc32 } from 'node:zlib';
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import { eventually } from '../../test/support/eventually.js';
import { startSimulatorProcess } from './child.js';
import { controlKeyOf, createSimulatorControl } from './control.js';
import { CARDS } from './fixtures.js';
import { Processor, type ProcessorRecord } from './processor.js';
import { openStore, type Store } from './store.js';

const DAY_MS = 86_400_000;
const ACCOUNTS = ['city-principal', 'city-fee'] as const;
const OPERATIONS = ['charge', 'void', 'refund'] as const;

const opened: { readonly store: Store; readonly directory: string }[] = [];
afterEach(async () => {
  for (const { store, directory } of opened.splice(0)) {
    await store.close();
    await rm(directory, { recursive: true, force: true });
  }
});

/** A processor with its store. Ids are numbers, so two processors with the same history draw the same ids. */
const open = async (drawn = 0, at?: string) => {
  const directory = at ?? (await mkdtemp(join(tmpdir(), 'payfold-forget-')));
  const store = await openStore(directory, () => Promise.reject(new Error('there is no journal')));
  opened.push({ store, directory });
  const processor = await Processor.open({ partialVoid: true, refundUnsettled: false }, store, (prefix) => `${prefix}${String(++drawn).padStart(16, '0')}`); // prettier-ignore
  return { processor, store, directory };
};
const close = async (directory: string) => {
  const [{ store }] = opened.splice(opened.findIndex((one) => one.directory === directory), 1) as [(typeof opened)[number]]; // prettier-ignore
  await store.close();
};

/** A small generator of numbers from 0 to 1, the same for each seed. */
const numbers = (seed: number) => () => {
  seed = (Math.imul(seed, 1_664_525) + 1_013_904_223) >>> 0;
  return seed / 2 ** 32;
};

/** Random work on a processor: `steps` operations from `from` to `to` (milliseconds). Returns every reference that was used. */
const work = (processor: Processor, next: () => number, from: number, to: number, steps: number, name: string): string[] => {
  const cards = Object.keys(CARDS);
  const charged: { account: string; id: string; amountCents: number }[] = [];
  const refs: string[] = [];
  for (let step = 0; step < steps; step++) {
    const at = new Date(from + ((to - from) * step) / steps).toISOString();
    const account = ACCOUNTS[Math.floor(next() * 2)]!;
    const ref = `${name}-${step}`;
    const kind = next();
    const charge = charged[Math.floor(next() * charged.length)];
    refs.push(ref);
    if (kind < 0.02) processor.closeBatch(account, at);
    else if (kind < 0.05) processor.finalize(account, at, ref, 'charge');
    else if (kind < 0.6 || !charge) {
      const number = next() < 0.5 ? cards[0]! : cards[Math.floor(next() * cards.length)]!;
      const amountCents = 100 + Math.floor(next() * 10_000);
      const { result } = processor.charge(account, at, { ref, leg: 'principal', amountCents, instrument: { number }, card: { brand: 'visa', last4: number.slice(-4) }, postalCodeGiven: false }); // prettier-ignore
      if (result.kind === 'approved') charged.push({ account, id: result.transactionId, amountCents });
    } else {
      const op = kind < 0.8 ? 'void' : 'refund';
      const amountCents = next() < 0.5 ? charge.amountCents : Math.ceil(charge.amountCents / 3);
      processor.reverse(charge.account, at, { ref, asked: { op, leg: 'principal', chargeTransactionId: charge.id, amountCents, askedBy: op } });
    }
  }
  return refs;
};

describe('after 30 days', () => {
  test.each([1, 2, 3, 4, 5])('younger references, batches and numbers stay as they were (history %i)', async (seed) => {
    const [start, cut, end] = [0, 60 * DAY_MS, 90 * DAY_MS].map((ms) => Date.parse('2026-01-01T00:00:00.000Z') + ms) as [number, number, number];
    const before = new Date(cut).toISOString();
    const history = async () => {
      const { processor, directory } = await open();
      const next = numbers(seed);
      const old = work(processor, next, start, cut, 1_500, 'old');
      const young = work(processor, next, cut, end, 700, 'young');
      return { processor, directory, old, young };
    };
    const { processor: whole, directory: wholeDirectory, old, young } = await history();
    const { processor: shrinking, directory: shrunkDirectory } = await history();
    const all = await whole.truth(0, 10_000);
    expect(await shrinking.truth(0, 10_000)).toEqual(all);
    const forgotten = await shrinking.forget(before);
    expect(forgotten).toBeGreaterThan(300);
    expect(await shrinking.forget(before)).toBe(0);

    const compare = async (kept: Processor) => {
      for (const account of ACCOUNTS) {
        const asked = (refs: readonly string[]) => refs.flatMap((ref) => OPERATIONS.map((op) => [ref, op] as const));
        expect(asked(young).map(([ref, op]) => kept.lookup(account, ref, op))).toEqual(
          asked(young).map(([ref, op]) => whole.lookup(account, ref, op)),
        );
        // A reference that was never used would get a tombstone.
        const used = asked(young).filter(([ref]) => whole.isAnswered(account, ref));
        const finalized = (one: Processor) => used.map(([ref, op]) => one.finalize(account, before, ref, op));
        expect(finalized(kept)).toEqual(finalized(whole));
        // An older reference gets the earlier answer, or it is unknown. A charge without an outcome stays.
        const known = asked(old).filter(([ref]) => kept.isAnswered(account, ref));
        expect(known.map(([ref, op]) => kept.lookup(account, ref, op))).toEqual(known.map(([ref, op]) => whole.lookup(account, ref, op)));
        const neverTold = all.filter(({ merchantAccount, fixture }) => merchantAccount === account && fixture === 'cannot_tell');
        for (const { ref } of neverTold) expect(kept.lookup(account, ref, 'charge')).toEqual({ found: 'cannot_tell' });
        const [batches, left] = [(await whole.batchesAfter(account, null, 10_000))!, (await kept.batchesAfter(account, null, 10_000))!];
        expect(left.length).toBeLessThan(batches.length);
        expect(left).toEqual(batches.filter(({ batchId }) => left.some((one) => one.batchId === batchId)));
        expect(left).toEqual(expect.arrayContaining(batches.filter(({ closedAt }, index) => closedAt >= before || index === batches.length - 1)));
        expect(await kept.batchesAfter(account, left.at(-1)!.batchId, 10)).toEqual([]);
        for (const { batchId, count } of left) {
          const { lines } = (await kept.linesOf(account, batchId, 0, 10_000))!;
          expect(lines).toHaveLength(count);
          expect(lines).toEqual((await whole.linesOf(account, batchId, 0, 10_000))!.lines);
        }
        const gone = batches.filter(({ batchId }) => !left.some((one) => one.batchId === batchId));
        for (const { batchId } of gone) {
          expect([kept.batch(account, batchId), await kept.batchesAfter(account, batchId, 10), await kept.linesOf(account, batchId, 0, 1)]).toEqual([null, null, null]); // prettier-ignore
        }
      }
      expect(await kept.listDisputes(null)).toEqual(
        (await whole.listDisputes(null)).filter(({ merchantAccount, ref }) => kept.isAnswered(merchantAccount, ref)),
      );
      // What is left of the older ones has the same state.
      const left = await kept.truth(0, 10_000);
      expect(left).toHaveLength(all.length - forgotten);
      expect(left).toEqual((await whole.truth(0, 10_000)).filter(({ number }) => left.some((one) => one.number === number)));
      expect(left).toEqual(expect.arrayContaining(all.filter(({ at }) => at >= before)));
    };
    await compare(shrinking);
    await close(wholeDirectory);
    await close(shrunkDirectory);
    const drawn = 1_000_000;
    const reopened = (await open(drawn, wholeDirectory)).processor;
    const { processor: reread } = await open(drawn, shrunkDirectory);
    expect(await reopened.truth(0, 10_000)).toEqual(all);

    // The same work gives the same results from here on, but for charges that are gone.
    const later = await Promise.all(
      [reopened, reread].map(async (one) => {
        for (const account of ACCOUNTS) one.closeBatch(account, new Date(end).toISOString());
        return Promise.all(ACCOUNTS.map(async (account) => (await one.batchesAfter(account, null, 10_000))!.at(-1)));
      }),
    );
    expect(later[1]).toEqual(later[0]);
  });

  test('the sums of a batch are those of its lines, also after voids, and pages of its lines begin anywhere', async () => {
    const { processor } = await open();
    work(processor, numbers(6), 0, 30 * DAY_MS, 2_000, 'one');
    let many = 0;
    for (const account of ACCOUNTS) {
      processor.closeBatch(account, new Date(31 * DAY_MS).toISOString());
      for (const batch of (await processor.batchesAfter(account, null, 10_000))!) {
        const { lines, more } = (await processor.linesOf(account, batch.batchId, 0, 10_000))!;
        expect(more).toBe(false);
        const sum = (of: (line: (typeof lines)[number]) => number) => lines.reduce((total, line) => total + of(line), 0);
        expect(batch).toMatchObject({
          count: lines.length,
          grossCents: sum((line) => (line.accepted ? line.grossCents : 0)),
          feeCents: sum((line) => line.feeCents),
          netCents: sum((line) => line.netCents),
        });
        if (lines.length < 10) continue;
        many += 1;
        for (const from of [0, 3, 6, 9, 4])
          expect(await processor.linesOf(account, batch.batchId, from, 3)).toEqual({ lines: lines.slice(from, from + 3), more: lines.length > from + 3 }); // prettier-ignore
      }
    }
    expect(many).toBeGreaterThan(5);
  });

  test('a refund of a charge that is forgotten is rejected, and moves no money', async () => {
    const { processor } = await open();
    const charge = (ref: string, at: string) =>
      processor.charge('city', at, { ref, leg: 'principal', amountCents: 100, instrument: { number: '4242424242424242' }, card: { brand: 'visa', last4: '4242' }, postalCodeGiven: false }); // prettier-ignore
    const { result } = charge('first', '2026-01-01T00:00:00.000Z');
    processor.closeBatch('city', '2026-01-02T00:00:00.000Z');
    charge('second', '2026-03-01T00:00:00.000Z');
    processor.closeBatch('city', '2026-03-02T00:00:00.000Z');
    expect(await processor.forget('2026-02-01T00:00:00.000Z')).toBe(1);
    const asked = { op: 'refund', leg: 'principal', chargeTransactionId: (result as { transactionId: string }).transactionId, amountCents: 100, askedBy: 'refund' } as const; // prettier-ignore
    expect(processor.reverse('city', '2026-03-03T00:00:00.000Z', { ref: 'third', asked }).result).toMatchObject({
      kind: 'rejected',
      why: 'not_found',
    });
  });
});

describe('a real process', () => {
  let dataDir: string;
  beforeEach(async () => {
    dataDir = await mkdtemp(join(tmpdir(), 'payfold-forget-'));
  });
  afterEach(() => rm(dataDir, { recursive: true, force: true }));
  const ENTRY = new URL('../../dist/apps/simulator/main.js', import.meta.url).pathname;
  const running = (onLog?: (line: string) => void) => startSimulatorProcess({ dataDir, entry: ENTRY, ...(onLog && { onLog }) });

  test('kill -9 while it forgets loses nothing that is young; the next start goes on', async () => {
    const directory = join(dataDir, 'simulator');
    const { processor, store } = await open(0, directory);
    const now = Date.now();
    work(processor, numbers(9), now - 90 * DAY_MS, now - 31 * DAY_MS, 10_000, 'old');
    for (const account of ACCOUNTS) processor.closeBatch(account, new Date(now - 31 * DAY_MS).toISOString());
    work(processor, numbers(10), now - 29 * DAY_MS, now, 3_000, 'young');
    const all = await processor.truth(0, 100_000);
    const young = all.filter(({ at }) => at >= new Date(now - 29 * DAY_MS).toISOString());
    await store.durable();
    await close(directory);

    /** What lies in the books, also what is forgotten and not deleted yet. */
    const rows = async () => {
      const { store } = await open(0, directory);
      let count = 0;
      for await (const [, entry] of store.list<{ record: ProcessorRecord }>('op/')) count += entry.record.type === 'forgotten' ? 0 : 1;
      await close(directory);
      return count;
    };
    /** The number of writes that are on disk. Each deletes a piece. */
    const writes = async () => Number((await readFile(join(directory, 'journal.ndjson'), 'utf8')).split('\n')[1]);
    const counts = [await rows()];
    expect(counts).toEqual([all.length]);
    for (let tries = 0; tries < 3; tries++) {
      const before = await writes();
      const simulator = await running();
      await eventually(async () => (await writes()) > before + 1, { everyMs: 1 });
      await simulator.kill();
      counts.push(await rows());
      const { processor } = await open(0, directory);
      expect((await processor.truth(0, 100_000)).filter(({ number }) => number >= young[0]!.number)).toEqual(young);
      await close(directory);
    }
    expect(counts).toEqual([...counts].sort((a, b) => b - a));
    expect(counts[1]).toBeLessThan(all.length);

    const said: string[] = [];
    const simulator = await running((line) => said.push(line));
    await eventually(() => said.some((line) => line.includes('that closed more than 30 days ago')) || counts.at(-1)! < all.length / 2);
    expect(await createSimulatorControl(simulator.url, controlKeyOf(dataDir)).truth(young[0]!.number)).toEqual(young);
    await simulator.stop();
    expect(await rows()).toBeLessThan(all.length / 2);
  });

  test('an older journal gives the same books, also if the carry-over is killed', async () => {
    const records: ProcessorRecord[] = [];
    const { processor, store } = await open();
    const apply = processor.apply.bind(processor);
    processor.apply = (record) => {
      records.push(record);
      apply(record);
    };
    const now = Date.now();
    work(processor, numbers(11), now - 20 * DAY_MS, now, 6_000, 'young');
    const expected = await processor.truth(0, 100_000);
    await store.durable();
    const line = (number: number, record: unknown) => {
      const covered = `"number":${number},"record":${JSON.stringify(record)}}`;
      return `{"crc":"${crc32(covered).toString(16).padStart(8, '0')}",${covered}\n`;
    };
    const file = join(dataDir, 'simulator', 'journal.ndjson');
    const journal = [{ type: 'journal', version: 1 }, ...records].map((record, number) => line(number, record)).join('');
    let killed = 0;
    for (let tries = 0; tries < 10 && killed === 0; tries++) {
      await rm(join(dataDir, 'simulator'), { recursive: true, force: true });
      await mkdir(join(dataDir, 'simulator'));
      await writeFile(file, journal);
      const child = spawn(process.execPath, [ENTRY], { env: { DATA_DIR: dataDir, SIMULATOR_PORT: '0' }, stdio: 'ignore' });
      await eventually(() => existsSync(join(dataDir, 'simulator', 'books.new', 'CURRENT')), { everyMs: 1 });
      child.kill('SIGKILL');
      await once(child, 'exit');
      if ((await readFile(file, 'utf8')) === journal) killed += 1;
    }
    expect(killed).toBe(1);

    const simulator = await running();
    expect(await createSimulatorControl(simulator.url, controlKeyOf(dataDir)).truth()).toEqual(expected);
    await simulator.stop();
    expect((await readFile(file, 'utf8')).split('\n')).toHaveLength(3);
  });
});
