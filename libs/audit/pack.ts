/**
 * Exports of reports with a manifest (query, rows, control totals, position in the log, head, digest, SHA-256), and the evidence pack of a period.
 *
 * No file holds the time at which it was written. Two exports of the same period at the same log position have the same bytes.
 */
import { createHash, type Hash } from 'node:crypto';
import { createWriteStream, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { once } from 'node:events';
import { join } from 'node:path';
import type { EventStore, Position, Recorded } from '#eventstore';
import { ServiceError } from '#kernel';
import { collect, type KeyRing, type Pool } from '#platform';
import { type DriftReport, findDrift } from './drift.js';
import { REPORTS, type ReportName, type ReportPage, reportOf, type ReportQuery } from './exports.js';
import { headKeys } from './head.js';
import { csvLine, JOURNAL_START, type JournalFormat, journalHeading, journalPages, journalText, ndjsonLines, RULE_CHANGES } from '#ledger';
import { exceptionRows } from '#settlement';
import { proveEvents } from './prove.js';
import { newestHead, signLog } from './seal.js';

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
}

/** The text of a report, in pieces. `said` is updated before each piece. */
export const reportText = async function* (
  ports: { readonly store: EventStore; readonly db: Pool },
  name: ReportName,
  format: ExportFormat,
  query: ReportQuery,
  said: Exported,
): AsyncGenerator<string, void, void> {
  const report = reportOf(name);
  const { columns, totals } = report;
  if (format === 'csv' && query.after === null) yield csvLine(columns);
  const lineOf = format === 'csv' ? csvLine : ndjsonLines(columns);
  const summed = totals.map((total) => [total, columns.indexOf(total)] as const);
  for await (const { rows, after } of report.pages(ports, query)) {
    let text = '';
    for (const row of rows) {
      text += lineOf(row);
      for (const [total, index] of summed) said.totals[total] = (said.totals[total] ?? 0) + Number(row[index] ?? 0);
    }
    said.rows += rows.length;
    said.after = after;
    yield text;
  }
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

export interface ExportManifest extends Exported {
  readonly report: ReportName;
  readonly format: ExportFormat;
  readonly query: ReportQuery;
  /** Log position up to which the report is complete. null: no event is applied yet. */
  readonly position: string | null;
  /** The newest signed head of the log. null: no head is signed yet. */
  readonly head: { readonly size: number; readonly root: string } | null;
  /** Digest of all folded payments, from a drift check right before the export. null: the caller requested no digest. */
  readonly digest: ProjectionDigest | null;
  /** SHA-256 of all written bytes, including the heading. */
  readonly sha256: string;
}

/** A report as text, with its manifest. The manifest is complete after the last piece. */
export const exportReport = (
  ports: { readonly store: EventStore; readonly db: Pool },
  report: ReportName,
  format: ExportFormat,
  query: ReportQuery,
  position: string | null,
  digest: ProjectionDigest | null = null,
): { readonly pieces: AsyncGenerator<string, void, void>; readonly manifest: () => Promise<ExportManifest> } => {
  const said: Exported = { rows: 0, totals: {}, after: query.after };
  const hash = createHash('sha256');
  return {
    pieces: (async function* () {
      for await (const piece of reportText(ports, report, format, query, said)) {
        hash.update(piece);
        yield piece;
      }
    })(),
    manifest: async () => ({ report, format, query, position, head: await newestHead(ports.db), digest, ...said, sha256: hash.copy().digest('hex') }),
  };
};

export interface PackPorts {
  readonly store: EventStore;
  readonly db: Pool;
  readonly keys: KeyRing;
  readonly folder: string;
  readonly now: () => number;
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
}

/** Stream prefixes of accounts, portals, cases, staff and posting rules. Every pack holds all events of these streams, of any time. */
const CONFIGURATION = ['account-', 'portal-', 'case-', 'staff-', RULE_CHANGES];

/** Writes the evidence pack into a new folder. The sealer and the read models must have reached the log's head before. */
export const writePack = async (ports: PackPorts, { from, to, out, version, verifier, onProgress }: PackRequest): Promise<Pack> => {
  const { db, keys } = ports;
  if (from >= to) throw new ServiceError('VALIDATION_ERROR', 'The period must begin before it ends.');
  const signed = await signLog(ports);
  if (!signed) throw new ServiceError('INVALID_STATE', 'Nothing is sealed yet.');
  const { head, note } = signed;
  try {
    mkdirSync(out, { mode: FOLDER_MODE });
  } catch (error) {
    throw new ServiceError('VALIDATION_ERROR', `${out} cannot be made (${(error as NodeJS.ErrnoException).code}); a pack gets a folder of its own.`);
  }
  const files: ExportedFile[] = [];
  const query = { from, to, asOf: null, after: null };
  const write = async (name: string, title: string, pieces: AsyncIterable<string>, said: { rows: number; totals: Record<string, number> }) => {
    onProgress?.(name);
    const file = new HashedFile(out, name);
    for await (const piece of pieces) await file.write(piece);
    files.push({ file: name, title, rows: said.rows, totals: said.totals, ...(await file.end()) });
  };
  const piece = async function* (text: string): AsyncGenerator<string> {
    yield await Promise.resolve(text);
  };

  for (const name of Object.keys(REPORTS) as ReportName[])
    for (const format of ['csv', 'ndjson'] as const) {
      const said = { rows: 0, totals: {}, after: null };
      await write(`${name}.${format}`, reportOf(name).title, reportText(ports, name, format, query, said), said);
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
  const balances = trialBalance((await collect<ReportPage>(reportOf('trial-balance').pages(ports, query))).flatMap(({ rows }) => rows));
  await write('trial-balance.json', 'Trial balance: opening and closing', piece(`${JSON.stringify({ from, to, accounts: balances }, null, 1)}\n`), {
    rows: balances.length,
    totals: {},
  });

  const said = { rows: 0, totals: {} };
  await write(
    'events.ndjson',
    'Events of the period, and all of configuration, with proofs that they are in the signed log',
    provenEvents(ports, signed, from, to, said),
    said,
  );
  const exceptions = { rows: 0, totals: {} };
  await write('exceptions.ndjson', 'Settlement exceptions and their resolutions', exceptionText(db, Date.parse(to), exceptions), exceptions);
  const drift = await findDrift(ports);
  await write('drift.json', 'Replay against list, journal and settlement', piece(`${JSON.stringify(drift, null, 1)}\n`), {
    rows: drift.differences.length,
    totals: {},
  });
  await write('head.txt', 'Signed head of the log', piece(note), { rows: 1, totals: {} });
  await write('verify.mjs', 'Checks this pack: node verify.mjs pack FOLDER', piece(readFileSync(verifier, 'utf8')), { rows: 0, totals: {} });

  const manifest = {
    kind: 'payfold evidence pack',
    query: { from, to },
    position: head.position,
    size: head.size,
    root: head.root.toString('base64'),
    digest: drift.digest,
    keys: headKeys(head.origin, keys).map(({ vkey }) => vkey),
    version,
    files,
  };
  writeFileSync(join(out, 'manifest.json'), `${JSON.stringify(manifest, null, 1)}\n`, { flag: 'wx', mode: FILE_MODE });
  return { position: head.position, size: head.size, root: manifest.root, files, drift };
};

/** Exceptions as text: first the open ones, then resolved, then superseded ones. */
const exceptionText = async function* (db: Pool, now: number, said: { rows: number }): AsyncGenerator<string, void, void> {
  for (const status of [null, 'resolved', 'superseded'])
    for await (const row of exceptionRows(db, { status, now })) {
      said.rows += 1;
      yield `${JSON.stringify(row)}\n`;
    }
};

const trialBalance = (rows: readonly (readonly unknown[])[]) =>
  rows.map(([account, openingCents, debitCents, creditCents, closingCents]) => ({ account, openingCents, debitCents, creditCents, closingCents }));

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

const provenEvents = async function* (
  ports: PackPorts,
  signed: NonNullable<Awaited<ReturnType<typeof signLog>>>,
  from: string,
  to: string,
  said: { rows: number },
): AsyncGenerator<string, void, void> {
  const belongs = ({ stream, meta: { recordedAt, effectiveAt = recordedAt } }: Recorded) =>
    CONFIGURATION.some((prefix) => stream.startsWith(prefix)) || (recordedAt >= from && recordedAt < to) || (effectiveAt >= from && effectiveAt < to);
  for await (const events of ports.store.readAll(null, { until: signed.head.position as Position })) {
    const mine = events.filter(belongs);
    if (mine.length === 0) continue;
    said.rows += mine.length;
    yield (await proveEvents(ports, mine, signed)).events.map((event) => `${JSON.stringify(event)}\n`).join('');
  }
};
