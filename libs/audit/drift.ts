/**
 * Drift: a difference between the events and the rows of the read models.
 *
 * Each payment is replayed from its stream. The result is compared with its row in the list, its entries in the journal, and the settlement records
 * of its charges. A row is compared with the events up to the row's own revision, so the check can run while the service runs. A row that misses
 * events is a difference only if the read model's checkpoint has passed them.
 */
import { createHash } from 'node:crypto';
import { checkpointOf, type EventStore, NotInTheLog, type Position, readStreams, type Recorded } from '#eventstore';
import { canonicalJson, sumCents } from '#kernel';
import {
  cents as bothOf,
  type Charged,
  isVisible,
  paymentListModel,
  paymentIdOf,
  paymentListRow,
  payment as decider,
  type Payment,
  paymentStream,
  paymentEvents,
  standing,
  undoneCharges,
} from '#payments';
import { paymentRegisterModel } from '#settlement';
import { ALL_AS_TEXT, collect, everyRow, type Migration, type Pool, type Queryable } from '#platform';
import { checkBooks } from './check-books.js';
import { checkTie } from './tie.js';
import {
  type Books,
  entriesAt,
  entriesOfPayments,
  entryLine,
  ISO,
  journalModel,
  type JournalEntry,
  journalise,
  lineRegisterModel,
  linesOfPayments,
  policyAt,
  type PolicyFrom,
  type PostingRules,
  readPolicies,
  type Rule,
} from '#ledger';

/** `balance_before`: a warning. The dispute was recorded before its events said what it takes of the payment (C30). */
export type DriftKind = 'list' | 'journal' | 'amounts' | 'settlement' | 'books' | 'lines' | 'balances' | 'balance_before';
export const isWarning = ({ kind }: Pick<Difference, 'kind'>): boolean => kind === 'balance_before';

export interface Difference {
  readonly kind: DriftKind;
  readonly paymentId: string | null;
  /** Log position of the event at which rows and events differ. null: no single event, for example a sum. */
  readonly position: string | null;
  readonly message: string;
}

export interface DriftReport {
  readonly payments: number;
  /** Checkpoint of the journal when the check began. Entries up to here were counted. null: the journal has applied no event. */
  readonly position: string | null;
  /** SHA-256 over one line per payment (id, revision and folded state), in the order of the ids. */
  readonly digest: string;
  /** Number of journal entries that follow from the events up to `position`. */
  readonly entries: number;
  readonly differences: readonly Difference[];
}

export interface DriftPorts {
  readonly store: EventStore;
  readonly db: Queryable;
  readonly now: () => number;
  /** Default: the posting rules of this release. A spec passes other rules to test a new version. */
  readonly rules?: PostingRules;
}

/** A report lists at most this many differences of payments. Further ones are counted by kind. */
export const MAX_DIFFERENCES = 1_000;
/** Number of payments in a page. Small pages keep garbage collection cheap: few rows are in use at the same time. */
const PAGE_PAYMENTS = 100;
/** Number of pages that are read ahead while one page is compared. */
const PAGES_AHEAD = 3;
/**
 * For this long after a PaymentSettled event, a missing settlement line is no difference. The line is recorded shortly after the event. If the
 * process dies before that, the next round of settlement records the line. The sweep compares such a payment again after this time.
 */
const LINE_FOLLOWS_MS = 10 * 60_000;

export interface Checkpoints {
  /** Time of the database at which the checkpoints were read, with microseconds. All rows and events that are compared were read after it. */
  readonly readAt: string;
  readonly list: string;
  readonly journal: string;
  readonly register: string;
  readonly lines: string;
  readonly policies: readonly PolicyFrom[];
}

export const readCheckpoints = async ({ db, rules }: DriftPorts): Promise<Checkpoints> => {
  const { rows } = await db.query<{ read_at: string; name: string | null; position: string }>(
    'select clock_timestamp()::text as read_at, name, position from (select) one left join projection_checkpoint on name = any($1::text[])',
    [[paymentListModel, journalModel, paymentRegisterModel, lineRegisterModel].map(checkpointOf)],
  );
  const at = (name: string) => rows.find((row) => row.name === name)?.position ?? '';
  return {
    readAt: rows[0]!.read_at,
    list: at(checkpointOf(paymentListModel)),
    journal: at(checkpointOf(journalModel)),
    register: at(checkpointOf(paymentRegisterModel)),
    lines: at(checkpointOf(lineRegisterModel)),
    policies: await readPolicies(db, rules),
  };
};

/** Columns of the list other than its state, in the order of `found` in the query below. */
const FOUND_UNDER = ['account', 'portal', 'creation', 'status', 'open attempt', 'open since'] as const;

interface Rows {
  readonly list: ReadonlyMap<string, { readonly revision: bigint; readonly found: readonly (string | null)[]; readonly state: unknown }>;
  readonly journal: ReadonlyMap<string, { readonly revision: bigint; readonly books: Books }>;
  readonly entries: ReadonlyMap<string, readonly JournalEntry[]>;
  readonly settled: ReadonlyMap<string, ReadonlyMap<string, string>>;
}

const readRows = async (db: Queryable, ids: readonly string[]): Promise<Rows> => {
  // Await the three reads together. If a later read failed while an earlier one was awaited, its rejection would be unhandled.
  const [list, journal, legs] = await Promise.all([
    db.query<{ payment_id: string; revision: string; found: (string | null)[]; state: string }>({
      name: 'drift-list',
      text: `select payment_id, revision, array[account_id::text, portal_id::text, ${ISO('created_at')}, status, open_attempt_id::text, ${ISO('open_since')}] as found, state
             from payment_list where payment_id = any($1::uuid[])`,
      values: [ids],
    }),
    db.query<{ payment_id: string; revision: string; books: Books }>({
      name: 'drift-journal',
      text: 'select payment_id, revision, books from journal_payment where payment_id = any($1::uuid[])',
      values: [ids],
    }),
    readSettled(db, ids),
  ]);
  // Read the entries after the `journal_payment` rows. `checkPayment` leaves out entries that are newer than those rows.
  const entries = await entriesOfPayments(db, ids);
  return {
    list: new Map(list.rows.map((row) => [row.payment_id, { revision: BigInt(row.revision), found: row.found, state: jsonOrText(row.state) }])),
    journal: new Map(journal.rows.map((row) => [row.payment_id, { revision: BigInt(row.revision), books: row.books }])),
    entries: grouped(entries),
    settled: legs,
  };
};

/** The parsed JSON. If somebody has changed a row so that it is not JSON: its text. */
const jsonOrText = (text: string): unknown => {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
};

/** For each payment: the batch that settled each leg, according to the processor's lines. */
const readSettled = async (db: Queryable, ids: readonly string[]): Promise<ReadonlyMap<string, ReadonlyMap<string, string>>> => {
  const { rows } = await db.query<{ payment_id: string; leg: string; settled_batch_id: string }>({
    name: 'drift-settled',
    text: `select payment_id, leg, settled_batch_id from gateway_transaction where payment_id = any($1::uuid[]) and op = 'charge' and settled_batch_id is not null`,
    values: [ids],
  });
  const payments = new Map<string, Map<string, string>>();
  for (const { payment_id: id, leg, settled_batch_id: batchId } of rows) {
    const legs = payments.get(id);
    if (legs) legs.set(leg, batchId);
    else payments.set(id, new Map([[leg, batchId]]));
  }
  return payments;
};

const grouped = (entries: readonly JournalEntry[]): Map<string, JournalEntry[]> => {
  const groups = new Map<string, JournalEntry[]>();
  for (const entry of entries) {
    const group = groups.get(entry.paymentId!);
    if (group) group.push(entry);
    else groups.set(entry.paymentId!, [entry]);
  }
  return groups;
};

/** Rules for events of a payment's own stream. An entry of a settlement line has the line in `part`. */
const PAYMENT_RULES: readonly Rule[] = ['R1', 'R2', 'R3', 'R4', 'R5', 'R7', 'R8', 'R9', 'R11', 'R12', "R12'", "R12''", 'R14', 'R22'];
const isOfPayment = ({ rule, part }: JournalEntry): boolean => part === null && PAYMENT_RULES.includes(rule);

/** The differences of one payment. `again`: a settlement line may still follow, so the payment must be compared again. */
interface LookedAt {
  readonly differences: readonly Difference[];
  readonly again: boolean;
}

const checkPayment = (id: string, events: readonly Recorded[], at: Checkpoints, rows: Rows, now: number): LookedAt => {
  const differences: Difference[] = [];
  let again = false;
  const differs = (kind: DriftKind, position: string | null, message: string) => differences.push({ kind, paymentId: id, position, message });
  const row = rows.list.get(id);
  const booked = rows.journal.get(id);

  let payment: Payment = decider.initial;
  let books: Books = null;
  let [inList, inJournal] = [decider.initial, decider.initial];
  let booksThen: Books = null;
  const expected: JournalEntry[] = [];
  let settledAt = new Map<string, string>();
  for (const recorded of events) {
    const event = paymentEvents.read(recorded);
    payment = decider.evolve(payment, event);
    const posted = journalise(recorded, books, policyAt(at.policies, recorded.position));
    books = posted.books;
    if (row && recorded.revision <= row.revision) inList = payment;
    if (booked && recorded.revision <= booked.revision) {
      inJournal = payment;
      booksThen = books;
      expected.push(...posted.entries);
    }
    if (event.type === 'PaymentSettled' || event.type === 'SettlementWithdrawn') settledAt = settledAt.set(event.data.leg, recorded.meta.recordedAt);
  }
  const reached = (checkpoint: string) => events.findLast(({ position }) => position <= checkpoint);

  // List: compare the payment's row.
  const listed = reached(at.list);
  const last = events.at(-1)?.position ?? null;
  if (row && row.revision >= BigInt(events.length))
    differs('list', last, `its row is at revision ${row.revision}, its stream ends at ${events.length - 1}`);
  else if (!row && listed && isVisible(payment)) differs('list', listed.position, 'it has no row in the list');
  else if (row && listed && row.revision < listed.revision)
    differs('list', listed.position, `its row stands at revision ${row.revision}, the list has passed ${listed.revision}`); // prettier-ignore
  else if (row && isVisible(inList)) {
    if (!isSame(inList, row.state)) differs('list', events[Number(row.revision)]!.position, `its row says ${firstDifference(inList, row.state)}`);
    else {
      const under = paymentListRow({ paymentId: id, revision: row.revision, payment: inList }).slice(1, 1 + FOUND_UNDER.length);
      for (const [index, name] of FOUND_UNDER.entries())
        if (row.found[index] !== under[index])
          differs('list', events[Number(row.revision)]!.position, `its row is found under ${name} ${row.found[index]} instead of ${under[index]}`);
    }
  }

  // Journal: compare the entries one by one, and their sums with the amounts of the payment.
  const journalled = reached(at.journal);
  // Leave out entries that are newer than the payment's `journal_payment` row.
  const through = booked ? (events[Number(booked.revision)]?.position ?? '') : at.journal;
  const stored = (rows.entries.get(id) ?? []).filter((entry) => isOfPayment(entry) && entry.position <= through);
  if (journalled && (!booked || booked.revision < journalled.revision))
    differs('journal', journalled.position, `the journal has passed revision ${journalled.revision} without it`);
  else if (booked) {
    if (!isSame(booksThen, booked.books))
      differs('journal', last, `what the journal remembers of it says ${firstDifference(booksThen, booked.books)}`);
    compareEntries(expected, stored, (position, message) => differs('journal', position, message));
    if (isVisible(inJournal)) for (const message of wrongAmounts(inJournal, stored)) differs('amounts', last, message);
  } else for (const extra of stored) differs('journal', extra.position, `entry ${extra.entryId} (${extra.rule}) belongs to no event`);

  // Settlement: compare each leg with the processor's lines.
  const evidence = rows.settled.get(id);
  const legs = payment.phase === 'charged' ? payment.legs : [];
  for (const { leg, settledBatchId } of legs) {
    const line = evidence?.get(leg) ?? null;
    if (line === settledBatchId || (last !== null && last > at.register)) continue;
    if (settledAt.has(leg) && now - Date.parse(settledAt.get(leg)!) < LINE_FOLLOWS_MS) again = true;
    else differs('settlement', last, `its ${leg} leg settled in ${settledBatchId ?? 'no batch'}, the processor's lines say ${line ?? 'none'}`);
  }
  // A charge that was undone by a refund settles, too.
  const undone = undoneCharges(payment);
  const strange = payment.phase === 'charged' ? [] : [...(evidence ?? [])].filter(([leg]) => !undone.some((one) => one.leg === leg));
  if (strange.length > 0)
    differs('settlement', last, `it was not charged, and lines of ${strange.map(([, batchId]) => batchId).join(', ')} settled it`);
  return { differences, again };
};

/** True if two values are equal as JSON. Plain JSON is compared first, since canonical JSON is ten times slower. */
const isSame = (a: unknown, b: unknown): boolean => JSON.stringify(a) === JSON.stringify(b) || canonicalJson(a) === canonicalJson(b);

const ordered = ({ entryId, eventId, position, number, rule, part, paymentId, recordedAt, effectiveAt, bookedAt, postings }: JournalEntry) => [
  entryId,
  eventId,
  position,
  number,
  rule,
  part,
  paymentId,
  recordedAt,
  effectiveAt,
  bookedAt,
  postings,
];

const compareEntries = (
  expected: readonly JournalEntry[],
  stored: readonly JournalEntry[],
  differs: (position: string, message: string) => void,
): void => {
  const byId = new Map(stored.map((entry) => [entry.entryId, entry]));
  for (const entry of expected) {
    const found = byId.get(entry.entryId);
    byId.delete(entry.entryId);
    if (!found) differs(entry.position, `entry ${entry.entryId} (${entry.rule}) is missing`);
    else if (!isSame(ordered(entry), ordered(found)))
      differs(entry.position, `entry ${entry.entryId} (${entry.rule}) says ${firstDifference(entry, found)}`);
  }
  for (const extra of byId.values()) differs(extra.position, `entry ${extra.entryId} (${extra.rule}) belongs to no event`);
};

/** Compares the amounts of the payment with sums over its journal entries. Returns one message per difference. */
const wrongAmounts = (payment: Exclude<Payment, { phase: 'none' | 'abandoned' }>, entries: readonly JournalEntry[]): string[] => {
  const charge: Charged | null = payment.phase === 'charged' ? payment : null;
  const legs = charge?.legs ?? [];
  const sums = { principal: 0, fee: 0, principalBack: 0, feeBack: 0, disputed: 0, excess: 0 };
  for (const { rule, postings } of entries)
    for (const { account, cents } of postings)
      if (account.startsWith('liabilities:agency')) {
        if (rule === 'R1') sums.principal -= cents;
        else if (rule === 'R3' || rule === 'R7') sums.principalBack += cents;
      } else if (account.startsWith('revenue:')) {
        if (rule === 'R2') sums.fee -= cents;
        else if (rule === 'R3' || rule === 'R8') sums.feeBack += cents;
      } else if (account.startsWith('assets:disputes:')) sums.disputed += cents;
      else if (account.startsWith('assets:dispute_suspense:')) sums.excess += cents;
  const open = (charge?.disputes ?? []).filter(({ status }) => status === 'debited' || status === 'in_dispute');
  const figures: readonly [what: string, replay: number, journal: number][] = [
    ['principal charged', charge ? payment.terms.amountCents : 0, sums.principal],
    ['service fee charged', charge ? payment.terms.serviceFeeCents : 0, sums.fee],
    ['principal returned', sumCents(legs, (leg) => leg.principalReturnedCents), sums.principalBack],
    ['service fee returned', sumCents(legs, (leg) => leg.feeReturnedCents), sums.feeBack],
    ['taken back by disputes', sumCents(standing(open), bothOf), sums.disputed],
    ['taken back in excess', sumCents(standing(charge?.disputes ?? []), ({ excessCents = 0 }) => excessCents), sums.excess],
  ];
  return figures
    .filter(([, replay, journal]) => replay !== journal)
    .map(([what, replay, journal]) => `${what}: ${replay} cents by its events, ${journal} cents by the journal`);
};

/** Text that names the first field in which two values differ, with both values. */
const firstDifference = (right: unknown, wrong: unknown, path = ''): string => {
  const [a, b] = [right, wrong] as [Record<string, unknown>, Record<string, unknown>];
  if (a !== null && b !== null && typeof a === 'object' && typeof b === 'object')
    for (const key of new Set([...Object.keys(a), ...Object.keys(b)]))
      if (canonicalJson(a[key] ?? null) !== canonicalJson(b[key] ?? null))
        return firstDifference(a[key], b[key], path === '' ? key : `${path}.${key}`);
  return `${path} ${canonicalJson(wrong ?? null).slice(0, 200)} instead of ${canonicalJson(right ?? null).slice(0, 200)}`;
};

// ------------------------------------------------------------------------------------------------------------------------------------
// First, all rows are compared as text, without parsing them. Only payments whose text differs are compared field by field (`checkPayment`).

/** The rows of one payment in the list, the journal and the register, as text. */
interface Told {
  /** Columns in the order of `paymentListRow`. */
  readonly list?: readonly (string | null)[];
  readonly journal?: readonly [revision: string, books: string | null];
  readonly lines?: string;
  readonly settled?: ReadonlyMap<string, string>;
}

const readTold = async (db: Queryable, ids: readonly string[]): Promise<ReadonlyMap<string, Told>> => {
  const asText = { values: [ids] as unknown[], rowMode: 'array' as const, types: ALL_AS_TEXT };
  const [list, journal, settled] = await Promise.all([
    db.query<[id: string, ...(string | null)[]]>({
      name: 'drift-list-text',
      text: `select payment_id, account_id, portal_id, ${ISO('created_at')}, status, open_attempt_id, ${ISO('open_since')}, revision, state
             from payment_list where payment_id = any($1::uuid[])`,
      ...asText,
    }),
    db.query<[id: string, ...NonNullable<Told['journal']>]>({
      name: 'drift-journal-text',
      text: 'select payment_id, revision, books from journal_payment where payment_id = any($1::uuid[])',
      ...asText,
    }),
    readSettled(db, ids),
  ]);
  // Read the entries after the `journal_payment` rows. If the journal posts entries between the two reads, the payment is compared field by field.
  const lines = await linesOfPayments(db, ids, PAYMENT_RULES);
  const told = new Map<string, { -readonly [Field in keyof Told]: Told[Field] }>(ids.map((id) => [id, {}]));
  for (const row of list.rows) told.get(row[0])!.list = row;
  for (const [id, ...row] of journal.rows) told.get(id)!.journal = row;
  for (const [id, text] of lines) told.get(id)!.lines = text;
  for (const [id, legs] of settled) told.get(id)!.settled = legs;
  return told;
};

interface Replayed {
  readonly payment: Payment;
  /** Expected row of the list. Its last column is the folded state. null: no row is expected. */
  readonly row: readonly (string | null)[] | null;
  /** Revision of the payment's last event. */
  readonly revision: string;
  readonly books: Books;
  readonly entries: readonly JournalEntry[];
  /** An event of a dispute does not say what it takes. */
  readonly sharedByTotal: boolean;
}

const replay = (paymentId: string, events: readonly Recorded[], at: Checkpoints): Replayed => {
  let payment: Payment = decider.initial;
  let books: Books = null;
  const entries: JournalEntry[] = [];
  let sharedByTotal = false;
  for (const recorded of events) {
    const event = paymentEvents.read(recorded);
    payment = decider.evolve(payment, event);
    sharedByTotal ||= event.type === 'PaymentDisputed' && event.data.taken === undefined;
    const posted = journalise(recorded, books, policyAt(at.policies, recorded.position));
    books = posted.books;
    entries.push(...posted.entries);
  }
  const row = isVisible(payment) ? paymentListRow({ paymentId, revision: BigInt(events.length - 1), payment }) : null;
  return { payment, row, revision: String(events.length - 1), books, entries, sharedByTotal };
};

/**
 * After each entry, an agency's balance of a payment is 0 or more, and at most the principal. A rejected settlement takes the charge out of the books
 * whatever was returned of it; staff have a task about it (C67).
 */
const wrongBalance = (paymentId: string, { payment, entries, sharedByTotal }: Replayed): Difference | null => {
  if (payment.phase !== 'charged' || payment.legs.some(({ settlementRejected }) => settlementRejected)) return null;
  let balance = 0;
  for (const { postings, position, rule } of entries) {
    for (const { account, cents } of postings) if (account.startsWith('liabilities:agency:')) balance -= cents;
    if (balance >= 0 && balance <= payment.terms.amountCents) continue;
    const kind = sharedByTotal ? 'balance_before' : 'balances';
    return { kind, paymentId, position, message: `after ${rule}, the agency's balance of it is ${balance} of ${payment.terms.amountCents} cents` };
  }
  return null;
};

/** null: the events cannot be replayed. An event that was changed in the store may have any content. */
const replayOrNull = (...given: Parameters<typeof replay>): Replayed | null => {
  try {
    return replay(...given);
  } catch {
    return null;
  }
};

/** True if all rows agree with the whole stream. If false, the rows may also be only behind the stream. */
const agrees = ({ payment, row, revision, books, entries }: Replayed, { list, journal, lines = '', settled }: Told): boolean => {
  if (!list || !row || !isVisible(payment) || !journal) return false;
  const legs = payment.phase === 'charged' ? payment.legs : [];
  return (
    row.every((value, index) => value === list[index]) &&
    journal[0] === revision &&
    journal[1] === JSON.stringify(books) &&
    lines === entries.map(entryLine).join('\n') &&
    wrongAmounts(payment, entries).length === 0 &&
    legs.every(({ leg, settledBatchId }) => (settled?.get(leg) ?? null) === settledBatchId) &&
    (settled === undefined || payment.phase === 'charged')
  );
};

export interface Checked {
  /** {@link Checkpoints}. */
  readonly readAt: string;
  readonly differences: readonly Difference[];
  /** Ids of payments that must be compared again later: a settlement line may still follow. */
  readonly again: readonly string[];
  /** One line for each payment (id, revision, state), in the order of the given ids. */
  readonly texts: string[];
  /** Number of journal entries that follow from the payments' events in the counted part of the log. */
  readonly entries: number;
  /** Number of payments without an event between `since` and `after` of the counted part. */
  readonly first: number;
}

/**
 * The part of the log whose entries are counted: after one position, up to another ('': none). If a larger part that begins at `since` is read piece
 * by piece, a payment counts in the piece with its first event.
 */
export interface CountedPart {
  readonly since: string;
  readonly after: string;
  readonly until: string;
}
const upTo = (until: string): CountedPart => ({ since: '', after: '', until });

/** Compares the payments `ids`. */
export const checkPayments = async (ports: DriftPorts, ids: readonly string[], counted: CountedPart = upTo('')): Promise<Checked> =>
  checkRead(ports, await read(ports, ids), counted);

export interface ReadPage {
  readonly ids: readonly string[];
  readonly at: Checkpoints;
  readonly told: ReadonlyMap<string, Told>;
  readonly streams: readonly (readonly Recorded[])[];
}

const read = async (ports: DriftPorts, ids: readonly string[]): Promise<ReadPage> => {
  const { store, db } = ports;
  // Read checkpoints, rows and events in this order. Each row is then at least as new as its checkpoint, and the events are at least as new as the
  // rows.
  const at = await readCheckpoints(ports);
  const told = await readTold(db, ids);
  return { ids, at, told, streams: await readStreams(store, ids.map(paymentStream), { skipUnreadable: true }) };
};

export const checkRead = async (ports: DriftPorts, { ids, at, told, streams }: ReadPage, counted: CountedPart): Promise<Checked> => {
  const { since, after, until } = counted;
  const texts: string[] = [];
  const doubtful: string[] = [];
  const balances: Difference[] = [];
  let [entries, first] = [0, 0];
  for (const [index, id] of ids.entries()) {
    const replayed = replayOrNull(id, streams[index]!, at);
    if (!replayed) {
      doubtful.push(id);
      texts.push(`${id} cannot be replayed\n`);
      continue;
    }
    if (!agrees(replayed, told.get(id)!)) doubtful.push(id);
    const wrong = wrongBalance(id, replayed);
    if (wrong) balances.push(wrong);
    texts.push(`${id} ${replayed.revision} ${replayed.row?.at(-1) ?? JSON.stringify(replayed.payment)}\n`);
    for (const { position } of replayed.entries) if (position > after && position <= until) entries += 1;
    if (!streams[index]!.some(({ position }) => position > since && position <= after)) first += 1;
  }
  const { differences, again } = await lookClosely(ports, doubtful);
  return { readAt: at.readAt, differences: [...differences, ...balances], again, texts, entries, first };
};

const lookClosely = async (ports: DriftPorts, ids: readonly string[]): Promise<Pick<Checked, 'differences' | 'again'>> => {
  if (ids.length === 0) return { differences: [], again: [] };
  const { store, db, now } = ports;
  const at = await readCheckpoints(ports);
  const rows = await readRows(db, ids);
  const streams = await readStreams(store, ids.map(paymentStream), { skipUnreadable: true });
  const looked = ids.map((id, index): LookedAt => {
    const events = streams[index]!;
    try {
      return checkPayment(id, events, at, rows, now());
    } catch (error) {
      const message = `its events cannot be replayed: ${(error as Error).message}`;
      return { differences: [{ kind: 'list', paymentId: id, position: events.at(-1)?.position ?? null, message }], again: false };
    }
  });
  return { differences: looked.flatMap(({ differences }) => differences), again: ids.filter((_, index) => looked[index]!.again) };
};

/** Ids of payments in the list or the journal, ascending, beginning after the id `after`. */
export const paymentIdsAfter = async (db: Queryable, after: string | null, limit = PAGE_PAYMENTS): Promise<string[]> => {
  const { rows } = await db.query<{ payment_id: string }>({
    name: 'drift-ids',
    text: `select payment_id from (
             (select payment_id from journal_payment where payment_id > $1 order by payment_id limit $2)
             union (select payment_id from payment_list where payment_id > $1 order by payment_id limit $2)) as known
           order by payment_id limit $2`,
    values: [after ?? '00000000-0000-0000-0000-000000000000', limit],
  });
  return rows.map((row) => row.payment_id);
};

export const newestPaymentId = async (db: Queryable): Promise<string | null> => {
  const { rows } = await db.query<{ payment_id: string }>(
    `select payment_id from (
       (select payment_id from journal_payment order by payment_id desc limit 1)
       union (select payment_id from payment_list order by payment_id desc limit 1)) as known order by payment_id desc limit 1`,
  );
  return rows[0]?.payment_id ?? null;
};

/**
 * Pages of payments in the order of their ids, after one id up to another. While the caller compares one page, the next pages are read. A page holds
 * at most `limit` payments.
 */
export const readPages = async function* (
  ports: DriftPorts,
  after: string | null,
  until: string | null,
  limit = PAGE_PAYMENTS,
): AsyncGenerator<ReadPage, void, void> {
  const reading: Promise<ReadPage>[] = [];
  while (until !== null) {
    const ids = (await paymentIdsAfter(ports.db, after, limit)).filter((id) => id <= until);
    if (ids.length === 0) break;
    const page = read(ports, ids);
    // The caller gets the error when it awaits this page. Until then, this handler prevents an unhandled rejection.
    page.catch(() => undefined);
    reading.push(page);
    if (reading.length > PAGES_AHEAD) yield await reading.shift()!;
    after = ids.at(-1)!;
  }
  for (const page of reading) yield await page;
};

/**
 * Compares all payments, all other journal entries, the totals of the books, and the line-item register with the journal. `streams`: number of payment
 * streams in the log, if known.
 */
export const findDrift = async (
  ports: DriftPorts & { readonly db: Pool },
  { streams = null, onProgress }: { streams?: number | null; onProgress?: (payments: number) => void } = {},
): Promise<DriftReport> => {
  const differences: Difference[] = [];
  const unlisted = new Map<DriftKind, number>();
  const digest = createHash('sha256');
  const { journal: position, lines } = await readCheckpoints(ports);
  let [payments, entries] = [0, 0];
  for await (const page of readPages(ports, null, await newestPaymentId(ports.db))) {
    const checked = await checkRead(ports, page, upTo(position));
    digest.update(checked.texts.join(''));
    for (const difference of checked.differences)
      if (isWarning(difference)) continue;
      else if (differences.length < MAX_DIFFERENCES) differences.push(difference);
      else unlisted.set(difference.kind, (unlisted.get(difference.kind) ?? 0) + 1);
    payments += page.ids.length;
    entries += checked.entries;
    onProgress?.(payments);
  }
  for (const [kind, count] of unlisted)
    differences.push({ kind, paymentId: null, position: null, message: `${count} more differences of this kind (${kind}) are not listed` });
  if (streams !== null && streams > payments)
    differences.push({
      kind: 'list',
      paymentId: null,
      position: null,
      message: `the log holds ${streams} payments, list and journal know ${payments}`,
    });
  for await (const others of checkOtherEntries(ports, '', position)) {
    differences.push(...others.differences);
    entries += others.entries;
  }
  for await (const { wrong } of checkBooks(ports.db, { after: '', until: position, expected: entries, full: true }))
    differences.push(...wrong.map((found) => ({ kind: 'books', paymentId: null, ...found }) as const));
  // The part that both have applied. A lag of one of them is no difference.
  for await (const { wrong } of checkTie(ports.db, '', lines < position ? lines : position))
    differences.push(...wrong.map((found) => ({ kind: 'lines', paymentId: null, ...found }) as const));
  return { payments, position: position === '' ? null : position, digest: digest.digest('hex'), entries, differences };
};

interface OtherEntries {
  readonly position: Position;
  readonly differences: Difference[];
  /** Number of entries that follow from the events of this page. */
  readonly entries: number;
}

/** Compares the entries of settlement, exceptions, adjustments and remittances with their events, after one position up to another, page by page. */
export const checkOtherEntries = async function* (ports: DriftPorts, after: string, until: string): AsyncGenerator<OtherEntries, void, void> {
  const { store, db } = ports;
  if (after >= until) return;
  const { policies } = await readCheckpoints(ports);
  const streamPrefixes = ['settlement-', 'exception-', 'adjustment-', 'remittance-'];
  for await (const events of store.readAll((after || null) as Position | null, { until: until as Position, streamPrefixes })) {
    const differences: Difference[] = [];
    const differs = (position: string, message: string) => void differences.push({ kind: 'journal', paymentId: null, position, message });
    const expected = events.flatMap((recorded) => {
      try {
        return journalise(recorded, null, policyAt(policies, recorded.position)).entries;
      } catch (error) {
        differs(recorded.position, `the event cannot be posted again: ${(error as Error).message}`);
        return [];
      }
    });
    const stored = await entriesAt(
      db,
      events.map(({ position }) => position),
    );
    compareEntries(expected, stored, differs);
    yield { position: events.at(-1)!.position, differences, entries: expected.length };
  }
};

// ------------------------------------------------------------------------------------------------------------------------------------
// The sweep follows the log at low priority and compares the payments that changed. Any worker can take the next round.

export const driftMigration: Migration = {
  name: '0102-drift',
  sql: `
create table drift_sweep (
  one bool primary key default true check (one),
  after uuid,
  busy_until timestamptz,
  payments bigint not null,
  completed_at timestamptz
);
insert into drift_sweep (payments) values (0);

create table drift_difference (
  payment_id uuid not null,
  kind text not null,
  position text collate "C",
  message text not null,
  found_at timestamptz not null default now(),
  primary key (payment_id, kind)
);
`,
};

export const driftPassMigration: Migration = {
  name: '0105-drift-pass',
  sql: 'alter table drift_sweep add column until uuid',
};

/** `position`: the sweep has looked at the payments of all events up to here. null: it has not begun. */
export const driftFollowMigration: Migration = {
  name: '0106-drift-follow',
  sql: `
alter table drift_sweep add column position text collate "C";
alter table drift_difference add column looked_at timestamptz not null default now();
`,
};

export const driftAgainMigration: Migration = {
  name: '0108-drift-again',
  sql: `
create table drift_again (
  payment_id uuid primary key,
  due_at timestamptz not null
);
create index drift_again_due on drift_again (due_at);
`,
};

/** After this number of events, a round of the sweep ends. */
const SWEPT_EVENTS = 2_000;
/** Number of payments that are compared without a pause. A request may have to wait for these few milliseconds. */
export const SWEPT_AT_ONCE = 40;
/** At most this many payments whose settlement line was missing are compared again in a round. */
const AGAIN_PER_ROUND = 400;
/** If a worker dies during its round, another worker can begin a round after this time without progress. */
const ROUND_SECONDS = 60;
/** A payment that differs is compared again after this time, until it is right. */
const LOOK_AGAIN_SECONDS = 60;

export interface Swept {
  readonly differences: readonly Difference[];
  /** True if the sweep has looked at all payments that changed. */
  readonly level: boolean;
}

/**
 * One round of the sweep. Compares the payments of the next events of the log, and payments that differed before. The end of the round is fixed when
 * it begins: no event that list, journal or register have not applied. null: another worker does this round, or a read model is being built.
 * `goOn` is awaited between two groups of payments, so that requests can run. If it returns false, the round ends early.
 *
 * At its first round, the sweep begins at the present end of the log. A full verification compares the payments before it.
 */
export const sweepDrift = async (ports: DriftPorts, goOn: () => Promise<boolean> = () => Promise.resolve(true)): Promise<Swept | null> => {
  const { store, db } = ports;
  const { list, journal, register } = await readCheckpoints(ports);
  const applied = [list, journal, register].sort()[0]!;
  const due = await dueAgain(db);
  const known = [...new Set([...(await knownDifferences(db)), ...due])];
  if (known.length === 0 && (await db.query('select from drift_sweep where position >= $1', [applied])).rowCount === 1)
    return { differences: [], level: true };
  const { rows } = await db.query<{ position: string }>(
    `update drift_sweep set busy_until = now() + $1::int * interval '1 second', position = coalesce(position, $2)
     where (busy_until is null or busy_until < now()) and $2 <> '' returning position`,
    [ROUND_SECONDS, applied],
  );
  if (!rows[0]) return null;
  const differences: Difference[] = [];
  const compare = async (ids: readonly string[]): Promise<boolean> => {
    for (let from = 0; from < ids.length; from += SWEPT_AT_ONCE) {
      const group = ids.slice(from, from + SWEPT_AT_ONCE);
      const checked = await checkPayments(ports, group);
      await keepDifferences(db, group, checked);
      await lookAgain(db, group, checked.again);
      differences.push(...checked.differences);
      if (!(await goOn())) return false;
    }
    return true;
  };
  const move = (to: string, busySeconds: number) =>
    db.query(`update drift_sweep set position = $1, busy_until = now() + $2::int * interval '1 second'`, [to, busySeconds]);
  let { position } = rows[0];
  let [left, goes] = [SWEPT_EVENTS, await compare(known)];
  if (goes && position < applied)
    for await (const events of store.readAll((position || null) as Position | null, {
      until: applied as Position,
      streamPrefixes: ['payment-'],
    })) {
      goes = await compare([...new Set(events.map(({ stream }) => paymentIdOf(stream)))]);
      if (!goes) break;
      position = events.at(-1)!.position;
      left -= events.length;
      await move(position, ROUND_SECONDS);
      if (left <= 0) break;
    }
  const level = goes && left > 0 && due.length < AGAIN_PER_ROUND;
  await move(goes && left > 0 && applied > position ? applied : position, 0);
  return { differences, level };
};

/** Payments that differed, and that were not looked at for a while. */
const knownDifferences = async (db: Queryable): Promise<string[]> => {
  const { rows } = await db.query<{ payment_id: string }>(
    `select payment_id from drift_difference where looked_at < now() - $1::int * interval '1 second' group by payment_id order by min(looked_at) limit $2`,
    [LOOK_AGAIN_SECONDS, SWEPT_AT_ONCE],
  );
  return rows.map((row) => row.payment_id);
};

/** Payments whose settlement line was missing, and should be there now. */
const dueAgain = async (db: Queryable): Promise<string[]> => {
  const { rows } = await db.query<{ payment_id: string }>('select payment_id from drift_again where due_at <= now() order by due_at limit $1', [
    AGAIN_PER_ROUND,
  ]);
  return rows.map((row) => row.payment_id);
};

/** Of the payments `ids`, which were just compared, those in `again` are compared again when their settlement line should be there. */
const lookAgain = async (db: Queryable, ids: readonly string[], again: readonly string[]): Promise<void> => {
  await db.query(
    `with ended as (delete from drift_again where payment_id = any($1::uuid[]) and not payment_id = any($2::uuid[]))
     insert into drift_again (payment_id, due_at) select id, now() + $3::int * interval '1 millisecond' from unnest($2::uuid[]) as id
     on conflict (payment_id) do update set due_at = excluded.due_at`,
    [ids, again, LINE_FOLLOWS_MS],
  );
};

/**
 * Stores the differences of payments that were compared. Stored differences of these payments that no longer exist are deleted. A payment may have
 * been compared by somebody else meanwhile. What was read later stays.
 */
export const keepDifferences = async (
  db: Queryable,
  ids: readonly string[],
  { differences, readAt }: Pick<Checked, 'differences' | 'readAt'>,
): Promise<void> => {
  await db.query(
    `delete from drift_difference where payment_id = any($1::uuid[]) and not (payment_id::text || kind = any($2::text[])) and looked_at < $3::timestamptz`,
    [ids, differences.map(({ paymentId, kind }) => `${paymentId}${kind}`), readAt],
  );
  for (const { paymentId, kind, position, message } of differences)
    await db.query(
      `insert into drift_difference as kept (payment_id, kind, position, message, looked_at) values ($1, $2, $3, $4, $5)
       on conflict (payment_id, kind) do update set position = excluded.position, message = excluded.message, looked_at = excluded.looked_at
       where kept.looked_at < excluded.looked_at`,
      [paymentId, kind, position, message, readAt],
    );
};

/** The stored differences, and the progress of the sweep. */
export const driftFound = async (db: Queryable) => {
  const { rows: sweep } = await db.query<{ payments: string; completed_at: Date | null }>('select payments, completed_at from drift_sweep');
  const found = everyRow<FoundDifference>(async (after, limit) => {
    const { rows } = await db.query<FoundDifference>(
      `select payment_id, kind, position, message, found_at, found_at::text as found_at_text from drift_difference
       where $1::timestamptz is null or (found_at, payment_id, kind) > ($1, $2::uuid, $3::text) order by found_at, payment_id, kind limit $4`,
      [after?.found_at_text, after?.payment_id, after?.kind, limit],
    );
    return rows;
  });
  return {
    payments: Number(sweep[0]?.payments ?? 0),
    completedAt: sweep[0]?.completed_at?.toISOString() ?? null,
    differences: (await collect(found)).map(({ payment_id: paymentId, kind, position, message, found_at: at }) => ({
      paymentId,
      kind,
      position,
      message,
      foundAt: at.toISOString(),
    })),
  };
};

interface FoundDifference {
  readonly payment_id: string;
  readonly kind: DriftKind;
  readonly position: string | null;
  readonly message: string;
  readonly found_at: Date;
  /** `found_at` with microseconds, which a Date does not hold. */
  readonly found_at_text: string;
}

export interface DriftFigures {
  readonly differences: number;
  /** Seconds since all payments were last compared. null: that was never done. */
  readonly lastRunSeconds: number | null;
  /** Age of the oldest event of a payment that the sweep has not looked at. 0: there is none. null: the sweep has not begun, or its place is not in the log. */
  readonly oldestSeconds: number | null;
}

/** For metrics. */
export const driftFigures = async ({ store, db }: DriftPorts): Promise<DriftFigures> => {
  const { rows } = await db.query<{ differences: string; seconds: string | null; position: string | null; now: Date }>(
    `select (select count(*) from drift_difference where kind <> 'balance_before') as differences, extract(epoch from now() - completed_at) as seconds, position, now() from drift_sweep`,
  );
  const { differences, seconds, position, now } = rows[0]!;
  let oldestSeconds = position === null ? null : 0;
  try {
    if (position !== null)
      for await (const [oldest] of store.readAll((position || null) as Position | null, { max: 1, streamPrefixes: ['payment-'] }))
        if (oldest) oldestSeconds = Math.max(0, now.getTime() - oldest.storedAt.getTime()) / 1_000;
  } catch (error) {
    if (!(error instanceof NotInTheLog)) throw error;
    oldestSeconds = null;
  }
  return { differences: Number(differences), lastRunSeconds: seconds === null ? null : Number(seconds), oldestSeconds };
};
