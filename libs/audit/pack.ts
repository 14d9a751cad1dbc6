/**
 * Exports of reports with a manifest (query, rows, control totals, position in the log, head, digest, SHA-256), and the evidence pack of a period.
 *
 * No file holds the time at which it was written. Two exports of the same period at the same log position have the same bytes.
 */
import { createHash, type Hash } from 'node:crypto';
import { createWriteStream, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { once } from 'node:events';
import { join } from 'node:path';
import { EVERYTHING, type Scope } from '#accounts';
import { type EventStore, type Position, readStreams, type Recorded } from '#eventstore';
import { ServiceError, sumCents } from '#kernel';
import { paymentStream } from '#payments';
import { type KeyRing, type Pool, transaction } from '#platform';
import { type DriftReport, findDrift } from './drift.js';
import { refuseReport, REPORTS, type ReportName, type ReportPage, reportOf, type ReportPorts, type ReportQuery, trialRows } from './exports.js';
import { type Head, headKeys, signManifest } from './head.js';
import {
  type AccountBalance,
  balancesBefore,
  type Cell,
  csvLine,
  JOURNAL_START,
  type JournalFormat,
  journalHeading,
  journalPages,
  journalText,
  movements,
  ndjsonLines,
  PERIODS,
  recordedBalances,
  RULE_CHANGES,
} from '#ledger';
import { exceptionRows } from '#settlement';
import { consistencyProof, eventHash, GrowingTree, leafOf, rememberingTiles } from './merkle.js';
import { base64, proveEvents } from './prove.js';
import { headBefore, headCovering, newestHead, type SignedLog, signLog, storedTiles } from './seal.js';
import type { TieRow } from './tie.js';

export interface ExportedFile {
  readonly file: string;
  readonly title: string;
  readonly rows: number;
  readonly bytes: number;
  readonly sha256: string;
  /** Sums of the cents columns. */
  readonly totals: Readonly<Record<string, number>>;
}

/** A pack holds payers and amounts, so only its owner can read it. */
const FILE_MODE = 0o600;
const FOLDER_MODE = 0o700;

/** Writes text to a file, and counts and hashes its bytes. A write waits while the stream's buffer is full. */
class HashedFile {
  private readonly hash: Hash = createHash('sha256');
  private readonly stream;
  private bytes = 0;

  constructor(
    folder: string,
    readonly name: string,
  ) {
    this.stream = createWriteStream(join(folder, name), { flags: 'wx', mode: FILE_MODE });
    this.stream.on('error', () => undefined);
  }

  write = async (text: string): Promise<void> => {
    const bytes = Buffer.from(text, 'utf8');
    this.hash.update(bytes);
    this.bytes += bytes.length;
    if (this.stream.errored) throw this.stream.errored;
    if (!this.stream.write(bytes)) await once(this.stream, 'drain');
  };

  async end(): Promise<{ readonly bytes: number; readonly sha256: string }> {
    this.stream.end();
    await once(this.stream, 'close');
    if (this.stream.errored) throw this.stream.errored;
    return { bytes: this.bytes, sha256: this.hash.digest('hex') };
  }
}

export type ExportFormat = 'csv' | 'ndjson';

/** Progress of an export. */
export interface Exported {
  rows: number;
  /** Sums of the cents columns. */
  totals: Record<string, number>;
  /** `after` of the last page. A later export continues with it. null: no row was read. */
  after: string | null;
  /** Only of a report over the line-item register: the log position up to which it is complete, and its sums beside the journal's. */
  until?: string;
  tie?: readonly TieRow[];
}

/** The text of a report, in pieces. `said` is updated before each piece. A scope that may not read the report → 403. */
export const reportText = async function* (
  ports: ReportPorts,
  scope: Scope,
  name: ReportName,
  format: ExportFormat,
  query: ReportQuery,
  said: Exported,
  pages: AsyncIterable<ReportPage> | Iterable<ReportPage> = reportOf(name).pages(ports, scope, query),
): AsyncGenerator<string, void, void> {
  refuseReport(name, scope);
  const { columns: always, changesColumn, totals } = reportOf(name);
  const changes = changesColumn !== undefined && query.after !== null;
  const columns = changes ? [...always, changesColumn] : always;
  if (format === 'csv' && query.after === null) yield csvLine(columns);
  // The heading of changes waits for their first page. So a wrong place is refused before anything is written.
  let heading = format === 'csv' && changes ? csvLine(columns) : '';
  const lineOf = format === 'csv' ? csvLine : ndjsonLines(columns);
  const summed = totals.map((total) => [total, columns.indexOf(total)] as const);
  for await (const { rows, after, until, tie } of pages) {
    if (until !== undefined) said.until = until;
    if (tie !== undefined) said.tie = tie;
    let text = heading;
    heading = '';
    for (const row of rows) text += lineOf(row);
    // A report without rows has no totals.
    if (rows.length > 0)
      for (const [total, index] of summed) said.totals[total] = (said.totals[total] ?? 0) + sumCents(rows, (row) => Number(row[index] ?? 0));
    said.rows += rows.length;
    if (after !== null) said.after = after;
    yield text;
  }
};

/** Throws INVALID_STATE if the rows of an export do not sum to the journal. */
const refuseLooseTie = (tie: readonly TieRow[] = []): void => {
  const wrong = tie.filter(({ differenceCents }) => differenceCents !== 0);
  if (wrong.length === 0) return;
  const [{ account, journalCents, linesCents }] = wrong as [TieRow, ...TieRow[]];
  throw new ServiceError(
    'INVALID_STATE',
    `The lines of this export do not sum to the journal in ${wrong.length} accounts: see audit drift. ${account}: the journal has ${journalCents} cents, the lines have ${linesCents}.`,
  );
};

/** `sha256` is the digest of a {@link DriftReport}. */
export interface ProjectionDigest {
  readonly sha256: string;
  readonly payments: number;
  readonly position: string | null;
}

/** The digest for the manifest of an export. A row that differs from the replay of its events → INVALID_STATE. */
export const projectionDigest = ({ digest, payments, position, differences }: DriftReport): ProjectionDigest => {
  if (differences.length > 0) throw new ServiceError('INVALID_STATE', 'The read models are not what their replay says: see audit drift.');
  return { sha256: digest, payments, position };
};

export interface ExportManifest extends Omit<Exported, 'until'> {
  readonly report: ReportName;
  readonly format: ExportFormat;
  readonly query: ReportQuery;
  /** Log position up to which the report is complete. null: no event is applied yet. */
  readonly position: string | null;
  /** The newest signed head of the log. null: no head is signed yet, or the scope has limits, since a head counts the events of all. */
  readonly head: { readonly size: number; readonly root: string } | null;
  /** Digest of all folded payments, from a drift check right before the export. null: the caller requested no digest. */
  readonly digest: ProjectionDigest | null;
  /** SHA-256 of all written bytes, including the heading. */
  readonly sha256: string;
}

/**
 * A report as text, with its manifest. The manifest is complete after the last piece. If the rows do not sum to the journal, `manifest` throws
 * INVALID_STATE.
 */
export const exportReport = (
  ports: ReportPorts,
  scope: Scope,
  report: ReportName,
  format: ExportFormat,
  query: ReportQuery,
  position: string | null,
  digest: ProjectionDigest | null = null,
): {
  readonly pieces: AsyncGenerator<string, void, void>;
  readonly manifest: () => Promise<ExportManifest>;
  /** Number of rows that were read so far. */
  readonly rows: () => number;
} => {
  const said: Exported = { rows: 0, totals: {}, after: query.after };
  const hash = createHash('sha256');
  return {
    rows: () => said.rows,
    pieces: (async function* () {
      for await (const piece of reportText(ports, scope, report, format, { ...query, until: position }, said)) {
        hash.update(piece);
        yield piece;
      }
    })(),
    manifest: async () => {
      const { until, ...rest } = said;
      refuseLooseTie(said.tie);
      const head = scope === null ? await newestHead(ports.db) : null;
      return { report, format, query, position: until ?? position, head, digest, ...rest, sha256: hash.copy().digest('hex') };
    },
  };
};

export interface PackPorts {
  readonly store: EventStore;
  readonly db: Pool;
  readonly keys: KeyRing;
  readonly folder: string;
  readonly now: () => number;
  /** Brings the read models of the reports up to a position of the log. */
  readonly reached: (position: Position) => Promise<void>;
}

export interface PackRequest {
  /** The period, in RFC 3339: `from` is inclusive, `to` is exclusive. */
  readonly from: string;
  readonly to: string;
  readonly out: string;
  /** Release of the code, for the manifest. */
  readonly version: string;
  /** Path of the standalone verifier, which is copied into the pack. */
  readonly verifier: string;
  readonly onProgress?: (file: string) => void;
}

export interface Pack {
  readonly position: string;
  readonly size: number;
  readonly root: string;
  readonly files: readonly ExportedFile[];
  readonly drift: DriftReport;
  /** The sums of the line items beside those of the journal, by account. */
  readonly tie: readonly TieRow[];
}

/**
 * The manifest of a pack. It is signed with the key of the heads (`manifest.note`), so nobody without that key can make a pack or change one. The
 * standalone verifier demands every file, makes the journal again from the events, and compares.
 */
interface PackManifest {
  readonly kind: 'payfold evidence pack';
  readonly query: { readonly from: string; readonly to: string };
  /** The newest head: position, size and root. */
  readonly position: string;
  readonly size: number;
  readonly root: string;
  /**
   * `events.ndjson` holds the events after the first `first` events of the log, up to the first `last` ones. `subtrees`: the tree of the first ones.
   * `consistency`: proof that the newest head only added events to the head of the last ones.
   */
  readonly events: { readonly first: number; readonly last: number; readonly subtrees: readonly string[]; readonly consistency: readonly string[] };
  readonly digest: string;
  /** For each account: the sums of the journal and of `line-items` over the period. */
  readonly tie: readonly TieRow[];
  readonly keys: readonly string[];
  readonly version: string;
  readonly files: readonly ExportedFile[];
}

/** Stream prefixes of accounts, portals, cases, merchant accounts, staff, posting rules and closed periods. Every pack holds all events of these streams, of any time. */
const CONFIGURATION = ['account-', 'portal-', 'case-', 'merchant-account-', 'staff-', RULE_CHANGES, PERIODS];

/**
 * Writes the evidence pack into a new folder. The sealer must have reached the log's head before.
 *
 * The pack holds every event between two heads. All entries that are booked in the period come from these events, so the journal can be made again
 * from them. The earlier events of their payments and all events of configuration are added, each with a proof.
 */
export const writePack = async (ports: PackPorts, { from, to, out, version, verifier, onProgress }: PackRequest): Promise<Pack> => {
  const { db, keys } = ports;
  if (from >= to) throw new ServiceError('VALIDATION_ERROR', 'The period must begin before it ends.');
  const signed = await signLog(ports);
  if (!signed) throw new ServiceError('INVALID_STATE', 'Nothing is sealed yet.');
  const { head, note } = signed;
  await ports.reached(head.position as Position);
  const { first, last } = await headsAround(ports, from, to, signed);
  try {
    mkdirSync(out, { mode: FOLDER_MODE });
  } catch (error) {
    throw new ServiceError('VALIDATION_ERROR', `${out} cannot be made (${(error as NodeJS.ErrnoException).code}); a pack gets a folder of its own.`);
  }
  const files: ExportedFile[] = [];
  const query = { from, to, asOf: null, after: null, until: head.position };
  let tie: readonly TieRow[] = [];
  const end = async (file: HashedFile, title: string, said: { rows: number; totals: Record<string, number> }) => {
    files.push({ file: file.name, title, rows: said.rows, totals: said.totals, ...(await file.end()) });
  };
  const write = async (name: string, title: string, pieces: AsyncIterable<string>, said: { rows: number; totals: Record<string, number> }) => {
    onProgress?.(name);
    const file = new HashedFile(out, name);
    for await (const piece of pieces) await file.write(piece);
    await end(file, title, said);
  };
  const piece = async function* (text: string): AsyncGenerator<string> {
    yield await Promise.resolve(text);
  };

  const balances = await trialBalanceAt(db, from, to, head.position);
  for (const name of Object.keys(REPORTS) as ReportName[])
    for (const format of ['csv', 'ndjson'] as const) {
      const said: Exported = { rows: 0, totals: {}, after: null };
      const pages = name === 'trial-balance' ? [{ rows: balances, after: '' }] : undefined;
      await write(`${name}.${format}`, reportOf(name).title, reportText(ports, EVERYTHING, name, format, query, said, pages), said);
      if (said.tie) ({ tie } = said);
    }
  for (const format of ['csv', 'ndjson', 'hledger'] as const satisfies readonly JournalFormat[]) {
    const said = { rows: 0, totals: {} };
    await write(
      format === 'hledger' ? 'journal.hledger' : `journal.${format}`,
      'Journal',
      journalPieces(db, format, { from, to, until: head.position }, said),
      said,
    );
  }
  const accounts = balances.map(([account, openingCents, debitCents, creditCents, closingCents]) => ({ account, openingCents, debitCents, creditCents, closingCents })); // prettier-ignore
  await write('trial-balance.json', 'Trial balance: opening and closing', piece(`${JSON.stringify({ from, to, accounts }, null, 1)}\n`), {
    rows: accounts.length,
    totals: {},
  });

  const said = { rows: 0, totals: {} };
  const others = { rows: 0, totals: {} };
  const otherEvents = new HashedFile(out, 'other-events.ndjson');
  const addOthers = async (events: readonly Recorded[]) => {
    others.rows += events.length;
    await otherEvents.write((await proveEvents(ports, events, signed)).events.map((event) => `${JSON.stringify(event)}\n`).join(''));
  };
  const tree = await GrowingTree.of(rememberingTiles(storedTiles(db)), first?.head.size ?? 0);
  const subtrees = base64(tree.hashes());
  if (first) {
    refuseOtherRoot(tree, first.head);
    for await (const events of ports.store.readAll(null, { until: first.head.position as Position, streamPrefixes: CONFIGURATION }))
      await addOthers(events);
  }
  const between = eventsBetween(ports.store, tree, first?.head ?? null, last.head, said, addOthers);
  await write('events.ndjson', 'All events between first-head.txt (else the begin of the log) and last-head.txt', between, said);
  refuseOtherRoot(tree, last.head);
  if (last.head.size < head.size)
    for await (const events of ports.store.readAll(last.head.position as Position, {
      until: head.position as Position,
      streamPrefixes: CONFIGURATION,
    }))
      await addOthers(events);
  await end(
    otherEvents,
    'All other events of configuration, and the earlier events of payments, with proofs that they are in the signed log',
    others,
  );

  const exceptions = { rows: 0, totals: {} };
  await write('exceptions.ndjson', 'Settlement exceptions and their resolutions', exceptionText(db, Date.parse(to), exceptions), exceptions);
  const drift = await findDrift(ports);
  await write('drift.json', 'Replay against list, journal and settlement', piece(`${JSON.stringify(drift, null, 1)}\n`), {
    rows: drift.differences.length,
    totals: {},
  });
  const ONE = { rows: 1, totals: {} };
  await write('head.txt', 'Newest signed head of the log', piece(note), ONE);
  if (first) await write('first-head.txt', 'Signed head of the log before events.ndjson', piece(first.note), ONE);
  await write('last-head.txt', 'Signed head of the log after events.ndjson', piece(last.note), ONE);
  await write('verify.mjs', 'Checks this pack: node verify.mjs pack FOLDER', piece(readFileSync(verifier, 'utf8')), { rows: 0, totals: {} });

  const manifest: PackManifest = {
    kind: 'payfold evidence pack',
    query: { from, to },
    position: head.position,
    size: head.size,
    root: head.root.toString('base64'),
    events: {
      first: first?.head.size ?? 0,
      last: last.head.size,
      subtrees,
      consistency: base64(await consistencyProof(rememberingTiles(storedTiles(db)), last.head.size, head.size)),
    },
    digest: drift.digest,
    tie,
    keys: headKeys(head.origin, keys).map(({ vkey }) => vkey),
    version,
    files,
  };
  const text = `${JSON.stringify(manifest, null, 1)}\n`;
  writeFileSync(join(out, 'manifest.json'), text, { flag: 'wx', mode: FILE_MODE });
  writeFileSync(join(out, 'manifest.note'), signManifest(head.origin, text, keys), { flag: 'wx', mode: FILE_MODE });
  return { position: head.position, size: head.size, root: manifest.root, files, drift, tie };
};

/**
 * The heads around the events of a period. `first` was signed before the period began, and lies before every event whose entries are booked in the
 * period (null: no such head, so the pack begins with the log). `last` covers the closing of the period, since nothing later is booked in it. If the
 * period is open, `last` is the newest head.
 */
const headsAround = async (ports: PackPorts, from: string, to: string, newest: SignedLog): Promise<{ first: SignedLog | null; last: SignedLog }> => {
  const { db, store } = ports;
  let earliest: string | null = null;
  for await (const [entry] of journalPages(db, JOURNAL_START, { from, to, until: newest.head.position })) {
    earliest = entry!.position;
    break;
  }
  const closing = (await recordedBalances(store)).find(({ balance, position }) => balance.to >= to && position <= newest.head.position);
  const covering = closing && (await headCovering(ports, closing.position));
  const last = covering && covering.head.size < newest.head.size ? covering : newest;
  const first = await headBefore(ports, from, earliest);
  return { first: first && first.head.size <= last.head.size ? first : null, last };
};

const refuseOtherRoot = (tree: GrowingTree, head: Head): void => {
  if (tree.size !== head.size || !tree.root().equals(head.root))
    throw new Error(`the log does not hold the ${head.size} events that were signed at ${head.at}; payfold audit verify tells more`);
};

/** The events after one head and up to another, as text. `addEarlier` gets the events before the first head of the payments that go on after it. */
const eventsBetween = async function* (
  store: EventStore,
  tree: GrowingTree,
  first: Head | null,
  last: Head,
  said: { rows: number },
  addEarlier: (events: readonly Recorded[]) => Promise<void>,
): AsyncGenerator<string, void, void> {
  if (tree.size === last.size) return;
  for await (const events of store.readAll(first && (first.position as Position), { until: last.position as Position })) {
    let text = '';
    for (const event of events) {
      text += `${JSON.stringify({ leaf: tree.size, event: leafOf(event) })}\n`;
      tree.add(eventHash(event));
    }
    if (first) for await (const earlier of earlierEvents(store, events, first.position)) await addEarlier(earlier);
    said.rows += events.length;
    yield text;
  }
};

/** Number of streams that are read at once. */
const STREAMS_AT_ONCE = 100;

/** The events up to a position of all payments that have their first event after it among `events`. */
const earlierEvents = async function* (
  store: EventStore,
  events: readonly Recorded[],
  position: string,
): AsyncGenerator<readonly Recorded[], void, void> {
  const revisions = new Map<string, bigint>();
  for (const { stream, revision } of events) if (stream.startsWith(paymentStream('')) && !revisions.has(stream)) revisions.set(stream, revision);
  const goOn = [...revisions].filter(([, revision]) => revision > 0n);
  for (let from = 0; from < goOn.length; from += STREAMS_AT_ONCE) {
    const some = goOn.slice(from, from + STREAMS_AT_ONCE);
    const streams = await readStreams(
      store,
      some.map(([stream]) => stream),
    );
    const earlier = streams.flatMap((all, index) => {
      const before = all.filter(({ revision }) => revision < some[index]![1]);
      return before.length > 0 && before.at(-1)!.position <= position ? before : [];
    });
    if (earlier.length > 0) yield earlier;
  }
};

/** Number of an entry that is larger than any other. */
const MAX_NUMBER = 2_147_483_647;

/** The rows of the trial balance at a position of the log. The service may go on: entries of later events are taken out again. */
const trialBalanceAt = (db: Pool, from: string, to: string, position: string): Promise<readonly (readonly Cell[])[]> =>
  transaction(db, async (client) => {
    await client.query('set transaction isolation level repeatable read, read only');
    const byAccount = (rows: readonly AccountBalance[]) => {
      const sums = new Map<string, { debitCents: number; creditCents: number }>();
      for (const { account, debitCents, creditCents } of rows) {
        const { debitCents: debit, creditCents: credit } = sums.get(account) ?? { debitCents: 0, creditCents: 0 };
        sums.set(account, { debitCents: debit + debitCents, creditCents: credit + creditCents });
      }
      return sums;
    };
    const opening = byAccount(await balancesBefore(client, from, null));
    const moved = byAccount(await movements(client, { from, to, asOf: null }));
    for await (const page of journalPages(client, { position, number: MAX_NUMBER }, { from: null, to, until: null }))
      for (const { bookedAt, postings } of page)
        for (const { account, cents } of postings) {
          const sums = (bookedAt < from ? opening : moved).get(account)!;
          if (cents > 0) sums.debitCents -= cents;
          else sums.creditCents += cents;
        }
    const rowsOf = (sums: typeof opening): AccountBalance[] =>
      [...sums].flatMap(([account, { debitCents, creditCents }]) =>
        debitCents === 0 && creditCents === 0 ? [] : [{ account, debitCents, creditCents }],
      );
    return trialRows(rowsOf(opening), rowsOf(moved)).sort(([one], [other]) => (one! < other! ? -1 : 1));
  });

/** Exceptions as text: first the open ones, then resolved, then superseded ones. */
const exceptionText = async function* (db: Pool, now: number, said: { rows: number }): AsyncGenerator<string, void, void> {
  for (const status of [null, 'resolved', 'superseded'])
    for await (const row of exceptionRows(db, EVERYTHING, { status, now })) {
      said.rows += 1;
      yield `${JSON.stringify(row)}\n`;
    }
};

const journalPieces = async function* (
  db: Pool,
  format: JournalFormat,
  query: { readonly from: string; readonly to: string; readonly until: string },
  said: { rows: number },
): AsyncGenerator<string, void, void> {
  yield journalHeading(format);
  const text = journalText(format);
  for await (const page of journalPages(db, JOURNAL_START, query)) {
    said.rows += page.length;
    yield page.map(text).join('');
  }
};
