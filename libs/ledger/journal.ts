/**
 * The journal: a read model of all entries that the posting rules make from the log, of their sums by day and by account, and of the recorded trial
 * balances.
 *
 * Each entry has three times: when it was recorded, when it took effect, and when it is booked. The last two differ only if the entry took effect in
 * a closed period.
 *
 * The id of an entry is made from its event, its rule, and the version of the rule at the event. So a rebuild gives the same bytes. The projection
 * stops at an unbalanced entry, and at an unknown event, rule or version.
 */
import type { EventStore, ReadModel, Recorded } from '#eventstore';
import { exceptionEvents, isSettlementStream, settlementEvents, settlementFileEvents } from '#settlement';
import { paymentIdOf, paymentEvents } from '#payments';
import { type Queryable, uuidV5 } from '#platform';
import { bookedAt } from './adjustment.js';
import { manualAdjustmentEvents, periodEvents, PERIODS, postingRuleEvents, remittanceEvents, RULE_CHANGES } from './events.js';
import {
  type Books,
  type Entry,
  firstRules,
  postAdjustment,
  postException,
  type Posting,
  POSTING_RULES,
  type PostingRules,
  postPayment,
  postRemittance,
  postSettlement,
  refuseUnbalanced,
  type Rule,
  rulesAfter,
  type RulesInForce,
} from './postings.js';
import { type Closing, partsOf, writeClosings, writeSums } from './sums.js';

const JOURNAL_STREAMS = ['payment-', 'settlement-', 'exception-', 'adjustment-', 'remittance-'] as const;

const TABLES = `
  create table journal_entry (
    position text collate "C" not null, number int not null, entry_id uuid not null, event_id uuid not null, rule text not null, part int, payment_id uuid,
    recorded_at timestamptz not null, effective_at timestamptz not null, booked_at timestamptz not null, accounts text[] not null, cents bigint[] not null);
  create table journal_payment (payment_id uuid not null, revision bigint not null, books json);
  create table journal_period (position text collate "C" not null primary key, closed_to timestamptz not null);
  create table journal_rule (position text collate "C" not null primary key, rule text not null, version int not null);
  create table journal_total (
    account text not null, rule text not null, recorded_on date not null, effective_on date not null, booked_on date not null,
    debit_cents numeric not null, credit_cents numeric not null, primary key (account, rule, recorded_on, effective_on, booked_on));
  create table journal_day (
    booked_on date not null, recorded_on date not null, first_position text collate "C" not null, last_position text collate "C" not null,
    primary key (booked_on, recorded_on));
  create table journal_balance (account text not null primary key, debit_cents numeric not null, credit_cents numeric not null);
  create table journal_closing (
    closed_to timestamptz not null, account text not null, recorded_at timestamptz not null, debit_cents numeric not null, credit_cents numeric not null,
    primary key (closed_to, account))`;
// Rows are stored in log order, so times rise from block to block. For such rows a BRIN index is small and fast, once a range of blocks is summarised.
const INDEXES = `
  alter table journal_entry add constraint journal_entry_pkey primary key (position, number);
  alter table journal_payment add constraint journal_payment_pkey primary key (payment_id);
  create index journal_entry_payment on journal_entry (payment_id) where payment_id is not null;
  create index journal_entry_recorded on journal_entry using brin (recorded_at) with (pages_per_range = 16, autosummarize = on);
  create index journal_entry_effective on journal_entry using brin (effective_at) with (pages_per_range = 16, autosummarize = on);
  create index journal_entry_booked on journal_entry using brin (booked_at) with (pages_per_range = 16, autosummarize = on);
  create index journal_total_booked on journal_total (booked_on);
  create index journal_total_recorded on journal_total (recorded_on)`;

/** How long the projection may gather events. Reports do not show this delay: each report first brings the journal up to date. */
const GATHER_MS = 500;

export const journalModel: ReadModel = {
  name: 'journal',
  shape: 4,
  streamPrefixes: JOURNAL_STREAMS,
  gatherMs: GATHER_MS,
  tables: [
    'journal_entry',
    'journal_payment',
    'journal_period',
    'journal_rule',
    'journal_total',
    'journal_day',
    'journal_balance',
    'journal_closing',
  ],
  createTables: TABLES,
  createIndexes: INDEXES,
  apply: (client, events) => applyJournal(client, events),
};

/** An entry with the data from its event. */
export interface JournalEntry extends Entry {
  readonly entryId: string;
  readonly eventId: string;
  readonly position: string;
  /** Index among the entries of its event. */
  readonly number: number;
  readonly recordedAt: string;
  readonly bookedAt: string;
}

/** The posting rules and the last closed period that are in force for one event. */
export interface Policy {
  /** End of the last closed period. */
  readonly closedTo: string | null;
  readonly rules: RulesInForce;
}

/** The entries of one event. Throws if this program does not know the event's type or version, or if an entry does not balance. */
export const journalise = (
  recorded: Recorded,
  books: Books,
  { closedTo, rules }: Policy,
): { readonly books: Books; readonly entries: readonly JournalEntry[] } => {
  const posted = postingsOf(rules, recorded, books);
  const { position, id: eventId, meta } = recorded;
  const entries = posted.entries.map((made, number): JournalEntry => {
    refuseUnbalanced(made);
    const effectiveAt = instant(made.effectiveAt);
    return {
      rule: made.rule,
      part: made.part,
      paymentId: made.paymentId,
      effectiveAt,
      postings: made.postings,
      entryId: uuidV5(eventId, `${made.rule}.${rules[made.rule].version}${made.part === null ? '' : `/${made.part}`}`),
      eventId,
      position,
      number,
      recordedAt: meta.recordedAt,
      bookedAt: bookedAt(effectiveAt, closedTo),
    };
  });
  return { books: posted.books, entries };
};

/** The times of a processor may have an offset. All our times are UTC. */
const instant = (text: string): string => (text.length === 24 && text.endsWith('Z') ? text : new Date(Date.parse(text)).toISOString());

const postingsOf = (rules: RulesInForce, recorded: Recorded, books: Books): { readonly books: Books; readonly entries: readonly Entry[] } => {
  const { stream } = recorded;
  if (stream.startsWith('payment-')) return postPayment(rules, paymentIdOf(stream), books, paymentEvents.read(recorded));
  if (isSettlementStream(stream)) return { books, entries: postSettlement(rules, settlementEvents.read(recorded)) };
  if (stream.startsWith('exception-')) return { books, entries: postException(rules, exceptionEvents.read(recorded)) };
  if (stream.startsWith('adjustment-')) {
    const types = stream === PERIODS ? periodEvents : stream === RULE_CHANGES ? postingRuleEvents : manualAdjustmentEvents;
    return { books, entries: postAdjustment(rules, types.read(recorded)) };
  }
  if (stream.startsWith('remittance-')) return { books, entries: postRemittance(rules, remittanceEvents.read(recorded)) };
  settlementFileEvents.read(recorded); // Such an event posts nothing, but an unknown event type must stop the journal.
  return { books, entries: [] };
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Policies.

/** A policy, and the position of the event that set the policy. An empty position means the start of the log. */
export interface PolicyFrom extends Policy {
  readonly position: string;
}

type PolicyChange = { readonly position: string } & ({ readonly closedTo: string } | { readonly rule: string; readonly version: number });

const changed = (before: Policy, change: PolicyChange, table: PostingRules): PolicyFrom => {
  const { position } = change;
  return 'rule' in change
    ? { position, closedTo: before.closedTo, rules: rulesAfter(before.rules, change, table) }
    : { position, closedTo: change.closedTo, rules: before.rules };
};

/** All policies, in log order. */
const policiesAfter = (changes: readonly PolicyChange[], table: PostingRules): readonly [PolicyFrom, ...PolicyFrom[]] => {
  const policies: [PolicyFrom, ...PolicyFrom[]] = [{ position: '', closedTo: null, rules: firstRules(table) }];
  for (const change of changes) policies.push(changed(policies.at(-1)!, change, table));
  return policies;
};

/** All policies from the tables of the journal, in log order. */
export const readPolicies = async (db: Queryable, table: PostingRules = POSTING_RULES): Promise<readonly PolicyFrom[]> => {
  const { rows } = await db.query<{ position: string } & ({ rule: string; version: number } | { rule: null; closed_to: Date })>(
    `select position, null as rule, null as version, closed_to from journal_period
     union all select position, rule, version, null from journal_rule order by position`,
  );
  return policiesAfter(
    rows.map((row) => (row.rule === null ? { position: row.position, closedTo: row.closed_to.toISOString() } : row)),
    table,
  );
};

/** All policies from the log, without the tables. They hold only changes of posting rules: `closedTo` is always null. */
export const rulePolicies = async (store: Pick<EventStore, 'read'>, table: PostingRules = POSTING_RULES): Promise<readonly PolicyFrom[]> => {
  const changes: PolicyChange[] = [];
  for await (const recorded of store.read(RULE_CHANGES)) changes.push({ position: recorded.position, ...postingRuleEvents.read(recorded).data });
  return policiesAfter(changes, table);
};

/** The policy for an event at this position of the log. */
export const policyAt = (policies: readonly PolicyFrom[], position: string): Policy => policies.findLast((policy) => policy.position < position)!;

// ------------------------------------------------------------------------------------------------------------------------------------
// Writing.

interface Remembered {
  readonly revision: bigint;
  readonly books: Books;
}

/** The state of the fold between two events. */
interface Fold {
  readonly payments: Map<string, Remembered>;
  readonly entries: JournalEntry[];
  readonly changes: PolicyChange[];
  readonly closings: Closing[];
  policy: Policy;
}

const policyChangeOf = (recorded: Recorded): PolicyChange | null => {
  const { stream, position } = recorded;
  if (stream === RULE_CHANGES) return { position, ...postingRuleEvents.read(recorded).data };
  if (stream !== PERIODS) return null;
  const event = periodEvents.read(recorded);
  return event.type === 'PeriodClosed' ? { position, closedTo: event.data.to } : null;
};

const closingOf = (recorded: Recorded): Closing | null => {
  if (recorded.stream !== PERIODS) return null;
  const event = periodEvents.read(recorded);
  return event.type === 'TrialBalanceRecorded' ? { to: event.data.to, recordedAt: recorded.meta.recordedAt, sums: event.data.closing } : null;
};

const advance = (fold: Fold, recorded: Recorded, table: PostingRules): void => {
  const paymentId = recorded.stream.startsWith('payment-') ? paymentIdOf(recorded.stream) : null;
  const before = paymentId === null ? undefined : fold.payments.get(paymentId);
  if (paymentId !== null && recorded.revision !== (before ? before.revision + 1n : 0n))
    throw new Error(`${recorded.stream}: revision ${recorded.revision} does not follow ${before?.revision ?? 'an absent row'}`);
  const { books, entries } = journalise(recorded, before?.books ?? null, fold.policy);
  fold.entries.push(...entries);
  if (paymentId !== null) fold.payments.set(paymentId, { revision: recorded.revision, books });
  const change = policyChangeOf(recorded);
  if (change) {
    fold.changes.push(change);
    fold.policy = changed(fold.policy, change, table);
  }
  const closing = closingOf(recorded);
  if (closing) fold.closings.push(closing);
};

/** Writes the entries of events. A test passes another `table` to try a new version of a rule. */
export const applyJournal = async (client: Queryable, events: readonly Recorded[], table: PostingRules = POSTING_RULES): Promise<void> => {
  const fold: Fold = { payments: new Map(), entries: [], changes: [], closings: [], policy: (await readPolicies(client, table)).at(-1)! };
  const known = [
    ...new Set(events.filter(({ revision, stream }) => revision > 0n && stream.startsWith('payment-')).map(({ stream }) => paymentIdOf(stream))),
  ];
  if (known.length > 0) {
    const { rows } = await client.query<{ payment_id: string; revision: string; books: Books }>({
      name: 'journal-read',
      text: 'select payment_id, revision, books from journal_payment where payment_id = any($1::uuid[])',
      values: [known],
    });
    for (const { payment_id: id, revision, books } of rows) fold.payments.set(id, { revision: BigInt(revision), books });
  }
  for (const recorded of events) advance(fold, recorded, table);
  await writeEntries(client, fold.entries);
  await writeSums(client, fold.entries);
  await writeClosings(client, fold.closings);
  await writePayments(client, fold.payments);
  for (const change of fold.changes)
    await ('rule' in change
      ? client.query('insert into journal_rule (position, rule, version) values ($1, $2, $3)', [change.position, change.rule, change.version])
      : client.query('insert into journal_period (position, closed_to) values ($1, $2)', [change.position, change.closedTo]));
};

const COLUMNS = [
  'position', 'number', 'entry_id', 'event_id', 'rule', 'part', 'payment_id', 'recorded_at', 'effective_at', 'booked_at', 'accounts', 'cents',
]; // prettier-ignore

const columnsOf = (one: JournalEntry): (string | null)[] => [
  one.position,
  String(one.number),
  one.entryId,
  one.eventId,
  one.rule,
  one.part === null ? null : String(one.part),
  one.paymentId,
  one.recordedAt,
  one.effectiveAt,
  one.bookedAt,
  accountsText(one.postings),
  centsText(one.postings),
];
// Account names need no quotes in the text of a Postgres array.
const accountsText = (postings: readonly Posting[]): string => `{${postings.map(({ account }) => account).join(',')}}`;
const centsText = (postings: readonly Posting[]): string => `{${postings.map(({ cents }) => cents).join(',')}}`;

const writeEntries = async (client: Queryable, entries: readonly JournalEntry[]): Promise<void> => {
  if (entries.length === 0) return;
  const rows = entries.map(columnsOf);
  await client.query({
    name: 'journal-write',
    text: `
      insert into journal_entry (${COLUMNS.join(', ')})
      select u.position, u.number, u.entry_id, u.event_id, u.rule, u.part, u.payment_id, u.recorded_at, u.effective_at, u.booked_at, u.accounts::text[], u.cents::bigint[]
      from unnest($1::text[], $2::int[], $3::uuid[], $4::uuid[], $5::text[], $6::int[], $7::uuid[], $8::timestamptz[], $9::timestamptz[], $10::timestamptz[],
        $11::text[], $12::text[]) as u (${COLUMNS.join(', ')})`,
    values: COLUMNS.map((_, index) => rows.map((row) => row[index])),
  });
};

const writePayments = async (client: Queryable, payments: ReadonlyMap<string, Remembered>): Promise<void> => {
  if (payments.size === 0) return;
  const rows = [...payments];
  await client.query({
    name: 'journal-payment',
    text: `
      insert into journal_payment as p (payment_id, revision, books) select * from unnest($1::uuid[], $2::bigint[], $3::json[])
      on conflict (payment_id) do update set revision = excluded.revision, books = excluded.books`,
    values: [rows.map(([id]) => id), rows.map(([, { revision }]) => String(revision)), rows.map(([, { books }]) => books && JSON.stringify(books))],
  });
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Reading.

/** The place after the entry with this position and number. */
export interface JournalPlace {
  readonly position: string;
  readonly number: number;
}
export const JOURNAL_START: JournalPlace = { position: '', number: -1 };
/** After every entry: positions are digits and colons. */
export const JOURNAL_END: JournalPlace = { position: '~', number: 0 };

export interface JournalQuery {
  /** Entries booked from `from` (inclusive) to `to` (exclusive), RFC 3339. null: no limit. */
  readonly from: string | null;
  readonly to: string | null;
  /** Only entries of events up to this position. */
  readonly until: string | null;
}

type EntryRow = Record<'position' | 'entry_id' | 'event_id' | 'rule' | 'payment_id' | 'recorded' | 'effective' | 'booked', string> & {
  number: number;
  part: number | null;
  accounts: string[];
  cents: string[];
};

/** SQL that writes a time as we record it: ISO 8601 in UTC with milliseconds. */
export const ISO = (column: string): string => `to_char(${column}, 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')`;
const SELECT_ENTRY = `select position, number, entry_id, event_id, rule, part, payment_id, ${ISO('recorded_at')} as recorded, ${ISO('effective_at')} as effective,
  ${ISO('booked_at')} as booked, accounts, cents from journal_entry`;

const entryOf = (row: EntryRow): JournalEntry => ({
  entryId: row.entry_id,
  eventId: row.event_id,
  position: row.position,
  number: row.number,
  rule: row.rule as Entry['rule'],
  part: row.part,
  paymentId: row.payment_id,
  recordedAt: row.recorded,
  effectiveAt: row.effective,
  bookedAt: row.booked,
  postings: row.accounts.map((account, index) => ({ account, cents: Number(row.cents[index]) })),
});

/** Number of entries that are read at once. */
const PAGE_ENTRIES = 2_000;

/** Pages of entries after a place, in log order. A page is not empty. Only the parts of the journal are read in which such entries lie. */
export const journalPages = async function* (
  db: Queryable,
  after: JournalPlace,
  { from, to, until }: JournalQuery,
  limit = PAGE_ENTRIES,
): AsyncGenerator<JournalEntry[], void, void> {
  const end = until ?? JOURNAL_END.position;
  const begin = from === null ? Number.NEGATIVE_INFINITY : Date.parse(from);
  const finish = to === null ? Number.POSITIVE_INFINITY : Date.parse(to);
  const parts = from === null && to === null ? [{ first: after.position, last: end }] : await partsOf(db, from, to);
  for (const { first, last } of parts) {
    if (first > end) return;
    if (last < after.position) continue;
    let place = first > after.position ? { position: first, number: -1 } : after;
    for (;;) {
      const { rows } = await db.query<EntryRow>({
        name: 'journal-page',
        text: `${SELECT_ENTRY} where (position, number) > ($1, $2::int) and position <= $3 order by position, number limit $4::int`,
        values: [place.position, place.number, last < end ? last : end, limit],
      });
      // Nearly all entries of a part are booked in the period. A condition in the statement could make Postgres read another index for each page.
      const booked = rows.map(entryOf).filter((entry) => {
        const at = Date.parse(entry.bookedAt);
        return at >= begin && at < finish;
      });
      if (booked.length > 0) yield booked;
      if (rows.length < limit) break;
      place = rows.at(-1)!;
    }
  }
};

/** The next `limit` entries after a place, in log order. */
export const journalPage = async (db: Queryable, after: JournalPlace, query: JournalQuery, limit: number): Promise<JournalEntry[]> => {
  const found: JournalEntry[] = [];
  for await (const page of journalPages(db, after, query, limit)) {
    found.push(...page);
    if (found.length >= limit) break;
  }
  return found.slice(0, limit);
};

/** All entries of the events at these positions, in log order. */
export const entriesAt = async (db: Queryable, positions: readonly string[]): Promise<JournalEntry[]> => {
  const { rows } = await db.query<EntryRow>({
    name: 'journal-at',
    text: `${SELECT_ENTRY} where position = any($1::text[]) order by position, number`,
    values: [positions],
  });
  return rows.map(entryOf);
};

/** Entries of payments, in log order. */
export const entriesOfPayments = async (db: Queryable, paymentIds: readonly string[]): Promise<JournalEntry[]> => {
  const { rows } = await db.query<EntryRow>({
    name: 'journal-of-payments',
    text: `${SELECT_ENTRY} where payment_id = any($1::uuid[]) order by position, number`,
    values: [paymentIds],
  });
  return rows.map(entryOf);
};

/** An entry as one line of text. {@link ENTRY_LINE} makes the same line in SQL, so that rows and entries are compared without parsing. */
export const entryLine = ({ position, number, entryId, eventId, rule, recordedAt, effectiveAt, bookedAt, postings }: JournalEntry): string =>
  `${position} ${number} ${entryId} ${eventId} ${rule} ${sqlTime(recordedAt)} ${sqlTime(effectiveAt)} ${sqlTime(bookedAt)} ${accountsText(postings)} ${centsText(postings)}`;
const ENTRY_LINE = `concat_ws(' ', position, number, entry_id, event_id, rule, recorded_at, effective_at, booked_at, accounts, cents)`;
/** Writes a time as Postgres writes it in UTC: without trailing zeros in the fraction. */
const sqlTime = (iso: string): string => {
  let end = 23;
  while (iso[end - 1] === '0' && end > 20) end -= 1;
  return `${iso.slice(0, 10)} ${iso.slice(11, end === 20 ? 19 : end)}+00`;
};

/** For each payment, the entries of these rules as lines of text, in log order. Only events of the payment's own stream count. */
export const linesOfPayments = async (db: Queryable, paymentIds: readonly string[], rules: readonly Rule[]): Promise<ReadonlyMap<string, string>> => {
  const { rows } = await db.query<{ payment_id: string; lines: string }>({
    name: 'journal-lines-of-payments',
    text: `select payment_id, string_agg(${ENTRY_LINE}, E'\\n' order by position, number) as lines from journal_entry
           where payment_id = any($1::uuid[]) and part is null and rule = any($2::text[]) group by payment_id`,
    values: [paymentIds, rules],
  });
  return new Map(rows.map(({ payment_id: id, lines }) => [id, lines]));
};

/** An estimate of the number of payments whose events the journal has applied. It comes from Postgres, so no rows of a large table are read. */
export const journalPayments = async (db: Queryable): Promise<number> => {
  const { rows } = await db.query<{ count: string }>(
    `select case when reltuples < 0 then (select count(*) from journal_payment) else reltuples::bigint end as count
     from pg_class where oid = to_regclass('journal_payment')`,
  );
  return Number(rows[0]?.count ?? 0);
};
