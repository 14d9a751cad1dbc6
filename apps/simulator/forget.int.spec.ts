/**
 * The simulator forgets what ended 30 days ago. Younger references are answered as before, kept batches keep their lines, and a restart finds the
 * same state. A real process is killed while it writes its journal anew.
 */
import { existsSync } from 'node:fs';
import { mkdtemp, rm, stat } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import { eventually } from '../../test/support/eventually.js';
import { startSimulatorProcess } from './child.js';
import { createSimulatorControl } from './control.js';
import { CARDS } from './fixtures.js';
import { openJournal } from './journal.js';
import { Processor, type ProcessorRecord } from './processor.js';

const DAY_MS = 86_400_000;
const ACCOUNTS = ['city-principal', 'city-fee'] as const;
const OPERATIONS = ['charge', 'void', 'refund'] as const;

/** A processor with its records. Ids are numbers, so two processors with the same history draw the same ids. */
const withRecords = (records: ProcessorRecord[] = [], drawn = 0) => {
  const processor = new Processor(
    { partialVoid: true, refundUnsettled: false },
    (record) => records.push(record),
    (prefix) => `${prefix}${String(++drawn).padStart(16, '0')}`,
  );
  return { processor, records };
};
const folded = (records: readonly ProcessorRecord[], drawn: number): Processor => {
  const { processor } = withRecords([], drawn);
  for (const record of records) processor.apply(record);
  return processor;
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
  test.each([1, 2, 3, 4, 5])('younger references, batches and numbers stay as they were (history %i)', (seed) => {
    const [start, cut, end] = [0, 60 * DAY_MS, 90 * DAY_MS].map((ms) => Date.parse('2026-01-01T00:00:00.000Z') + ms) as [number, number, number];
    const next = numbers(seed);
    const { processor, records } = withRecords();
    const old = work(processor, next, start, cut, 1_500, 'old');
    const young = work(processor, next, cut, end, 700, 'young');
    const drawn = 1_000_000;
    const whole = folded(records, drawn);
    const before = new Date(cut).toISOString();
    const remainder = processor.remainder(before);
    expect(remainder.dropped).toBeGreaterThan(300);
    expect(remainder.dropped + remainder.records.length - 1).toBe(records.length);
    const reread = folded(remainder.records, drawn);
    const shrunk = folded(records, drawn);
    shrunk.remainder(before).drop();

    for (const kept of [reread, shrunk]) {
      for (const account of ACCOUNTS) {
        const asked = (refs: readonly string[]) => refs.flatMap((ref) => OPERATIONS.map((op) => [ref, op] as const));
        expect(asked(young).map(([ref, op]) => kept.lookup(account, ref, op))).toEqual(
          asked(young).map(([ref, op]) => whole.lookup(account, ref, op)),
        );
        // A reference that was never used would get a tombstone.
        const used = asked(young).filter(([ref]) => whole.isAnswered(account, ref));
        const finalized = (one: Processor) => used.map(([ref, op]) => one.finalize(account, before, ref, op));
        expect(finalized(kept)).toEqual(finalized(whole));
        // An older reference is answered as before, or not known any more. A charge whose outcome is never told stays.
        const known = asked(old).filter(([ref]) => kept.isAnswered(account, ref));
        expect(known.map(([ref, op]) => kept.lookup(account, ref, op))).toEqual(known.map(([ref, op]) => whole.lookup(account, ref, op)));
        for (const record of records)
          if (record.type === 'operation' && record.merchantAccount === account && record.quirks?.includes('cannot_tell'))
            expect(kept.lookup(account, record.ref, 'charge')).toEqual({ found: 'cannot_tell' });
        const [all, left] = [whole.batchesAfter(account, null)!, kept.batchesAfter(account, null)!];
        expect(left.length).toBeLessThan(all.length);
        expect(left).toEqual(all.filter(({ batchId }) => left.some((one) => one.batchId === batchId)));
        expect(left).toEqual(expect.arrayContaining(all.filter(({ closedAt }, index) => closedAt >= before || index === all.length - 1)));
        expect(kept.batchesAfter(account, left.at(-1)!.batchId)).toEqual([]);
      }
      const first = whole.truth(0, 10_000).find(({ at }) => at >= before)!.number;
      expect(kept.truth(first, 10_000)).toEqual(whole.truth(first, 10_000));
    }
    // The same work gives the same results from here on, but for charges that are gone.
    const later = [whole, reread, shrunk].map((one) => {
      for (const account of ACCOUNTS) one.closeBatch(account, new Date(end).toISOString());
      return ACCOUNTS.map((account) => one.batchesAfter(account, null)!.at(-1));
    });
    expect(later[1]).toEqual(later[0]);
    expect(later[2]).toEqual(later[0]);
    expect(reread.truth(0, 10_000)).toEqual(shrunk.truth(0, 10_000));
  });

  test('a refund of a charge that is forgotten is rejected, and moves no money', () => {
    const { processor } = withRecords();
    const charge = (ref: string, at: string) =>
      processor.charge('city', at, { ref, leg: 'principal', amountCents: 100, instrument: { number: '4242424242424242' }, card: { brand: 'visa', last4: '4242' }, postalCodeGiven: false }); // prettier-ignore
    const { result } = charge('first', '2026-01-01T00:00:00.000Z');
    processor.closeBatch('city', '2026-01-02T00:00:00.000Z');
    charge('second', '2026-03-01T00:00:00.000Z');
    processor.closeBatch('city', '2026-03-02T00:00:00.000Z');
    processor.remainder('2026-02-01T00:00:00.000Z').drop();
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

  test('kill -9 while the journal is written anew loses nothing; the next start forgets, and starts from less', async () => {
    const file = join(dataDir, 'simulator', 'journal.ndjson');
    const journal = await openJournal<ProcessorRecord>(file, () => undefined, () => undefined); // prettier-ignore
    const { processor, records } = withRecords();
    const now = Date.now();
    work(processor, numbers(9), now - 90 * DAY_MS, now - 30 * DAY_MS, 10_000, 'old');
    work(processor, numbers(10), now - 29 * DAY_MS, now, 10_000, 'young');
    for (const record of records) journal.append(record);
    await journal.close();
    const { size } = await stat(file);
    const first = processor.truth(0, 100_000).find(({ at }) => at >= new Date(now - 29 * DAY_MS).toISOString())!.number;
    const expected = processor.truth(first, 100_000);

    let killed = 0;
    for (let tries = 0; tries < 3; tries++) {
      const simulator = await running();
      await eventually(() => existsSync(`${file}.new`) || tries > 0, { everyMs: 1 });
      if (existsSync(`${file}.new`)) killed += 1;
      await simulator.kill();
      const after = await stat(file);
      // Either the old file with every record, or the new one.
      const read: ProcessorRecord[] = [];
      const found = await openJournal<ProcessorRecord>(file, (record) => read.push(record), () => undefined); // prettier-ignore
      await found.close();
      if (after.size === size) expect(read).toEqual(records);
      expect(folded(read, 0).truth(first, 100_000)).toEqual(expected);
    }
    expect(killed).toBeGreaterThan(0);

    const said: string[] = [];
    const simulator = await running((line) => said.push(line));
    await eventually(async () => (await stat(file)).size < size);
    expect(await createSimulatorControl(simulator.url).truth(first)).toEqual(expected);
    await simulator.stop();
    expect((await stat(file)).size).toBeLessThan(size);
  });
});
