/**
 * The sums that the journal keeps, against sums that this spec adds up from all entries: for every pair of times around the edges of days, as of
 * several times, before and after periods were closed.
 */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import {
  type Actor,
  checkpointOf,
  createSubscriber,
  memoryEventStore,
  postgresCheckpoint,
  prepareReadModels,
  type Recorded,
  searchPathOf,
} from '#eventstore';
import type { Clock } from '#kernel';
import { createPool, migrate, type Pool, systemIds } from '#platform';
import { MIGRATIONS, READ_MODELS } from '../../apps/services.js';
import { Random } from '../../apps/demo/city.js';
import { freshDatabase } from '../../test/support/postgres.js';
import { type AccountBalance, adjust } from './adjustment.js';
import { type Balance, balances, balancesBefore, bookSumCents, movements, movementsByDay, suspenseCents } from './books.js';
import { dayOf, firstDayFrom, isMidnight } from './days.js';
import { manualAdjustmentEvents } from './events.js';
import { applyJournal, JOURNAL_END, JOURNAL_START, type JournalEntry, journalModel, journalPage, journalPages } from './journal.js';
import { closePeriod, type PeriodPorts, verifyPeriods } from './periods.js';
import { partsOf } from './sums.js';

const DAY_MS = 86_400_000;
const FIRST_DAY = Date.parse('2026-01-05T00:00:00.000Z');
const DAYS = 4;
const iso = (ms: number): string => new Date(ms).toISOString();
const day = (number: number): string => iso(FIRST_DAY + number * DAY_MS);
const ACTOR: Actor = { type: 'operator', id: 'spec' };
const SUSPENSE = ['liabilities:suspense:one', 'liabilities:suspense:two'] as const;
const ACCOUNTS = ['equity:adjustment', ...SUSPENSE, 'liabilities:agency:portal:payable', 'assets:bank:main', 'revenue:service_fee:portal'];
/** Times around the edges of days. Entries are recorded and take effect at these times. */
const EDGES = Array.from({ length: DAYS + 1 }, (_, number) => [-1, 0, 1, DAY_MS / 2].map((ms) => FIRST_DAY + number * DAY_MS + ms)).flat();

/** A clock that stands still until it is set. */
let now = FIRST_DAY;
const clock: Clock = {
  now: () => now,
  realNow: () => now,
  monotonic: () => performance.now(),
  sleep: (ms) => new Promise((wake) => setTimeout(wake, ms)),
};
const ids = systemIds(() => now);
const store = memoryEventStore({ now: () => now });
let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;

const follow = async () => {
  const subscriber = createSubscriber(journalModel, { store, checkpoint: postgresCheckpoint(pool, checkpointOf(journalModel)), clock });
  await subscriber.runUntil((await store.head())!, { timeoutMs: 20_000 });
};
const ports = (): PeriodPorts => ({ store, db: pool, clock, ids, journalReached: follow });

/** Records an adjustment at the time of the clock. */
const post = async (effectiveAt: string, postings: readonly { account: string; cents: number }[]) => {
  const adjustmentId = ids.uuid();
  const event = adjust(iso(now), { adjustmentId, postings, effectiveAt, reason: 'spec', by: 'Dana' });
  const meta = { recordedAt: iso(now), actor: ACTOR, correlationId: ids.uuid() };
  await store.append(`adjustment-${adjustmentId}`, 'no_stream', [manualAdjustmentEvents.write(event, ids.uuid(), meta)]);
};

const all = async (): Promise<JournalEntry[]> => {
  const found: JournalEntry[] = [];
  for await (const page of journalPages(pool, JOURNAL_START, { from: null, to: null, until: null })) found.push(...page);
  return found;
};

/** Sums by the name that `nameOf` gives, as lines of text. */
const summed = (entries: readonly JournalEntry[], nameOf: (account: string, entry: JournalEntry) => string): string[] => {
  const sums = new Map<string, [number, number]>();
  for (const entry of entries)
    for (const { account, cents } of entry.postings) {
      const name = nameOf(account, entry);
      const [debit, credit] = sums.get(name) ?? [0, 0];
      sums.set(name, cents > 0 ? [debit + cents, credit] : [debit, credit - cents]);
    }
  return [...sums].map(([name, [debit, credit]]) => `${name} ${debit} ${credit}`).sort();
};
const byAccount = (account: string): string => account;
const textOf = ({ account, debitCents, creditCents }: AccountBalance): string => `${account} ${debitCents} ${creditCents}`;
const BETWEEN = (from: string | null, to: string | null, asOf: string | null) => (entry: JournalEntry) =>
  (from === null || entry.bookedAt >= from) && (to === null || entry.bookedAt < to) && (asOf === null || entry.recordedAt <= asOf);

const random = new Random(34);
const TIMES = [null, ...EDGES.map(iso)];
/** An entry near the end of the history, one at the start of a day, and times before and after everything. */
const AS_OF = [null, day(1), iso(FIRST_DAY + 2 * DAY_MS - 1), iso(FIRST_DAY + 3 * DAY_MS + DAY_MS / 2), day(DAYS + 3)];

beforeAll(async () => {
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'books', max: 4, searchPath: searchPathOf(READ_MODELS) });
  await migrate(pool, MIGRATIONS);
  await prepareReadModels(pool, READ_MODELS, store);
  for (const [number, edge] of EDGES.entries()) {
    now = edge;
    for (let count = 0; count < 3; count++) {
      const [one, other] = [random.pick(ACCOUNTS), random.pick(ACCOUNTS)];
      if (one === other) continue;
      const cents = random.int(1, 5_000);
      // Some facts come late, up to two days. Each time of the history is the effective time of some.
      const effectiveAt = EDGES[Math.max(0, number - random.int(0, 8))]!;
      await post(iso(effectiveAt), [
        { account: one, cents },
        { account: other, cents: -cents },
      ]);
    }
    // Two periods are closed while facts of them still come late. The books follow some entries at once, and others only at the end.
    if (edge === FIRST_DAY + DAY_MS + 1) await closePeriod(ports(), day(1), 'Dana');
    if (edge === FIRST_DAY + 2 * DAY_MS + 1) await closePeriod(ports(), day(2), 'Dana');
    if (number % 5 === 0) await follow();
  }
  await follow();
});
afterAll(async () => {
  await pool.end();
  await database.drop();
});

test('a day begins at 00:00 UTC', () => {
  expect(dayOf('2026-01-05T23:59:59.999Z')).toBe('2026-01-05');
  expect(firstDayFrom('2026-01-05T00:00:00.000Z')).toBe('2026-01-05');
  expect(firstDayFrom('2026-01-05T00:00:00.001Z')).toBe('2026-01-06');
  expect(isMidnight('2026-01-05T00:00:00.000Z')).toBe(true);
  expect(isMidnight('2026-01-05T00:00:00.001Z')).toBe(false);
});

describe('the kept sums are those of the entries', () => {
  test('late facts of closed periods are in the history, so that the three days of an entry differ', async () => {
    const entries = await all();
    expect(entries.length).toBeGreaterThan(40);
    expect(entries.filter(({ effectiveAt, bookedAt }) => effectiveAt !== bookedAt).length).toBeGreaterThan(2);
    expect(entries.filter(({ effectiveAt, recordedAt }) => dayOf(effectiveAt) !== dayOf(recordedAt)).length).toBeGreaterThan(10);
  });

  test('from any time to any time, as of any time', async () => {
    const entries = await all();
    for (const asOf of AS_OF)
      for (const from of TIMES)
        for (const to of TIMES) {
          if (from !== null && to !== null && from > to) continue;
          const expected = entries.filter(BETWEEN(from, to, asOf));
          const ruled = (await movements(pool, { from, to, asOf })).map((row) => `${row.rule} ${textOf(row)}`).sort();
          expect([from, to, asOf, ruled]).toEqual([from, to, asOf, summed(expected, (account, { rule }) => `${rule} ${account}`)]);
        }
  });

  test('by day and for some accounts', async () => {
    const entries = await all();
    for (const asOf of AS_OF)
      for (const to of TIMES) {
        const expected = entries.filter(BETWEEN(day(1), to, asOf));
        const named = summed(expected, (account, entry) => `${dayOf(entry.bookedAt)} ${entry.rule} ${account}`);
        const rows = (await movementsByDay(pool, { from: day(1), to, asOf }, ['liabilities:%'])).map(
          (row) => `${row.day} ${row.rule} ${textOf(row)}`,
        );
        expect([to, asOf, rows.sort()]).toEqual([to, asOf, named.filter((line) => line.includes('liabilities:'))]);
        const some = (await movements(pool, { from: day(1), to, asOf }, ['liabilities:%'])).map((row) => textOf(row));
        expect(some.sort()).toEqual(summed(expected, byAccount).filter((line) => line.startsWith('liabilities:')));
      }
  });

  test('before any time, with what closed periods keep', async () => {
    const entries = await all();
    for (const asOf of AS_OF)
      for (const to of TIMES) {
        const expected = summed(entries.filter(BETWEEN(null, to, asOf)), byAccount);
        expect([to, asOf, (await balancesBefore(pool, to, asOf)).map(textOf)]).toEqual([to, asOf, expected]);
        const some = (await balancesBefore(pool, to, asOf, ['liabilities:%'])).map(textOf);
        expect([to, asOf, some]).toEqual([to, asOf, expected.filter((line) => line.startsWith('liabilities:'))]);
      }
  });

  test('as of a time, by effect, or both', async () => {
    const entries = await all();
    const signed = (rows: readonly Balance[]) => {
      expect(bookSumCents(rows)).toBe(0);
      for (const { debitCents, creditCents, balanceCents } of rows) expect(balanceCents).toBe(debitCents - creditCents);
      return rows.map(textOf);
    };
    for (const asOf of AS_OF)
      for (const effectiveTo of TIMES) {
        const counts = (entry: JournalEntry) =>
          (asOf === null || entry.recordedAt <= asOf) && (effectiveTo === null || entry.effectiveAt < effectiveTo);
        expect([asOf, effectiveTo, signed(await balances(pool, { asOf, effectiveTo }))]).toEqual([
          asOf,
          effectiveTo,
          summed(entries.filter(counts), byAccount),
        ]);
      }
  });

  test('money in suspense is the sum of what each account holds, whatever its sign', async () => {
    const held = (await balances(pool, { asOf: null, effectiveTo: null })).filter(({ account }) => account.startsWith('liabilities:suspense:'));
    expect(held.some(({ balanceCents }) => balanceCents !== 0)).toBe(true);
    expect(await suspenseCents(pool)).toBe(held.reduce((sum, { balanceCents }) => sum + Math.abs(balanceCents), 0));
  });

  test('a sum that a number cannot hold is refused', async () => {
    const client = await pool.connect();
    const largest = BigInt(Number.MAX_SAFE_INTEGER);
    const set = (column: string, cents: bigint) =>
      client.query(`update journal_balance set ${column} = $1::numeric where account = $2`, [String(cents), SUSPENSE[0]]);
    try {
      for (const column of ['debit_cents', 'credit_cents']) {
        await client.query('begin');
        await set(column, largest);
        await balances(client, { asOf: null, effectiveTo: null });
        await set(column, largest + 1n);
        await expect(balances(client, { asOf: null, effectiveTo: null })).rejects.toThrow(`${SUSPENSE[0]}: a sum beyond what a number can say`);
        await client.query('rollback');
      }
    } finally {
      client.release();
    }
  });
});

describe('pages of the journal', () => {
  test('hold the entries of any period, from any place on, up to any position', async () => {
    const entries = await all();
    const middle = entries[Math.floor(entries.length / 2)]!;
    for (const limit of [1, 7, 1_000])
      for (const from of TIMES)
        for (const to of [null, day(1), day(2), iso(FIRST_DAY + 2 * DAY_MS + 1), day(DAYS)])
          for (const after of [JOURNAL_START, middle, JOURNAL_END])
            for (const until of [null, middle.position, entries.at(-2)!.position]) {
              const found = await journalPage(pool, after, { from, to, until }, limit);
              const expected = entries
                .filter(BETWEEN(from, to, null))
                .filter(({ position }) => position > after.position && (until === null || position <= until))
                .slice(0, limit);
              const named = (rows: readonly JournalEntry[]) => rows.map(({ entryId }) => entryId);
              expect([limit, from, to, after.position, until, named(found)]).toEqual([limit, from, to, after.position, until, named(expected)]);
            }
  });
  test('a period whose parts of the log overlap is read once, in log order', async () => {
    const positions: string[] = [];
    for await (const page of journalPages(pool, JOURNAL_START, { from: day(0), to: day(DAYS), until: null }, 3))
      positions.push(...page.map(({ position }) => position));
    expect(positions).toEqual([...new Set(positions)].sort());
  });
});

test('the books sum up the balances of all accounts', () => {
  const one = { account: 'assets:bank:main', debitCents: 5, creditCents: 2, balanceCents: 3 };
  expect(bookSumCents([one, { ...one, balanceCents: 4 }])).toBe(7);
});

test('parts of the journal that touch or overlap are one part', async () => {
  const client = await pool.connect();
  const place = (position: number) => String(position).padStart(20, '0');
  try {
    await client.query('begin; truncate journal_day');
    for (const [booked, first, last] of [
      [0, 1, 5],
      [1, 5, 5],
      [2, 2, 4],
      [3, 8, 9],
      [4, 9, 12],
    ] as const)
      // prettier-ignore
      await client.query('insert into journal_day (booked_on, recorded_on, first_position, last_position) values ($1, $1, $2, $3)', [
        dayOf(day(booked)),
        place(first),
        place(last),
      ]);
    const found = async (from: string | null, to: string | null) => (await partsOf(client, from, to)).map(({ first, last }) => [+first, +last]);
    expect(await found(null, null)).toEqual([[1, 5], [8, 12]]); // prettier-ignore
    expect(await found(day(1), day(4))).toEqual([[2, 4], [5, 5], [8, 9]]); // prettier-ignore
    expect(await found(day(9), null)).toEqual([]);
  } finally {
    await client.query('rollback');
    client.release();
  }
});

describe('closed periods', () => {
  test('keep their trial balance, and a report as of a time near the closing still counts only what was recorded by then', async () => {
    const { rows } = await pool.query<{ to: string; accounts: string }>(
      'select closed_to::text as to, count(*) as accounts from journal_closing group by 1 order by 1',
    );
    expect(rows.map(({ to }) => to)).toEqual(['2026-01-06 00:00:00+00', '2026-01-07 00:00:00+00']);
    expect(await verifyPeriods(ports())).toEqual({ name: 'periods', ok: true, detail: '2 closed periods are what they were' });
  });

  test('a balance or an entry that was changed later is named', async () => {
    await pool.query('create table kept as table journal_closing');
    await pool.query(`update journal_closing set debit_cents = debit_cents + 1 where account = 'equity:adjustment'`);
    const balance = await verifyPeriods(ports());
    await pool.query('begin; truncate journal_closing; insert into journal_closing table kept; drop table kept; commit');
    expect(balance).toMatchObject({ ok: false });
    expect(balance.detail).toContain(`the journal keeps other balances of the period to ${day(1)} than those that were recorded`);
    expect(balance.detail).toContain(`the journal keeps other balances of the period to ${day(2)}`);
  });

  test('events that are applied again in one piece give the same sums', async () => {
    const client = await pool.connect();
    const tables = ['journal_entry', 'journal_total', 'journal_day', 'journal_balance', 'journal_closing'];
    const rows = async () => {
      const texts: string[] = [];
      for (const table of tables)
        texts.push(...(await client.query<{ text: string }>(`select t::text as text from ${table} t order by 1`)).rows.map(({ text }) => text));
      return texts;
    };
    const entries = await all();
    try {
      await client.query('begin');
      const before = await rows();
      await client.query(`truncate ${[...tables, 'journal_period', 'journal_rule', 'journal_payment'].join(', ')}`);
      const events: Recorded[] = [];
      for await (const page of store.readAll(null, { streamPrefixes: journalModel.streamPrefixes })) events.push(...page);
      await applyJournal(client, events);
      expect(await rows()).toEqual(before);

      // Both may lack the same, so the sums are compared with the entries, too.
      const whole = { from: null, to: null, asOf: null };
      const byRule = (await movementsByDay(client, whole, ['%'])).map((row) => `${row.day} ${row.rule} ${textOf(row)}`);
      expect(byRule.sort()).toEqual(summed(entries, (account, entry) => `${dayOf(entry.bookedAt)} ${entry.rule} ${account}`));
      expect((await balances(client, { asOf: null, effectiveTo: null })).map(textOf)).toEqual(summed(entries, byAccount));
      const { rows: closed } = await client.query<{ to: Date }>('select distinct closed_to as to from journal_closing order by 1');
      expect(closed.map(({ to }) => to.toISOString())).toEqual([day(1), day(2)]);
      for (const to of [day(1), day(2)]) {
        const parts = await partsOf(client, null, to);
        const booked = entries.filter(BETWEEN(null, to, null)).map(({ position }) => position);
        expect(booked.filter((position) => !parts.some(({ first, last }) => position >= first && position <= last))).toEqual([]);
        expect([parts[0]!.first, parts.at(-1)!.last]).toEqual([booked[0], booked.at(-1)]);
      }
    } finally {
      await client.query('rollback');
      client.release();
    }
  });
});
