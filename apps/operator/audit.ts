/** `payfold audit`: the sealed log, its proofs, and the comparison of books and events. */
import { lstatSync, readFileSync, rmSync, statSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { Argument, type Command, Option } from 'commander';
import type { AuditRole, Difference, DriftReport, Findings, KeyTerms, PassState, ReportName } from '#audit';
import type { Position, ReadModel } from '#eventstore';
import { decimal, dollars, ServiceError, timestamp } from '#kernel';
import type { Check } from '#ledger';
import { readOwnFile, RELEASE, writeOwnFile } from '#platform';
import type { Services } from '../services.js';
import {
  each,
  fields,
  inDollars,
  inForceOrShown,
  moment,
  loginName,
  print,
  progressBar,
  table,
  type Terminal,
  UsageError,
  uuid,
  wholeNumber,
  personName,
  withPersonal,
} from './terminal.js';

/** How long to wait for the seal and the read models. At their first run they read the whole log. */
const CATCH_UP_MS = 30 * 60_000;
/**
 * Default of `--timeout-seconds`. The wait is short, because a worker normally keeps the seal and the read models at the end of the log. `audit
 * verify` gives its verdict even if one of them does not reach the end.
 */
const VERIFY_WAIT_SECONDS = 300;
/** `--place` stores the progress of a verification after each step, and within a step at most this often, in ms. */
const KEEP_PLACE_MS = 1_000;

/**
 * Writes a file that only its owner can read, in place of one that lies there. Nothing is written through a link, and only an ordinary file is
 * replaced: somebody else may have put something there.
 */
const writePrivately = (file: string, value: unknown): void => {
  try {
    const there = lstatSync(file, { throwIfNoEntry: false });
    if (there && !there.isFile()) throw new ServiceError('VALIDATION_ERROR', `${file} is no ordinary file, so it is not written.`);
    writeOwnFile(file, `${JSON.stringify(value, null, 1)}\n`);
  } catch (error) {
    if (error instanceof ServiceError) throw error;
    throw new ServiceError('VALIDATION_ERROR', `${file} cannot be written (${(error as NodeJS.ErrnoException).code}).`);
  }
};

export const addAudit = (program: Command, { action }: Terminal): void => {
  const audit = program.command('audit').description('proofs and checks of the ledger');

  audit
    .command('verify')
    .description('read every event again: the sealed log, its signed heads, the read models and the books')
    .option(
      '--timeout-seconds <seconds>',
      'how long to wait for the seal and the read models to reach the end of the log',
      wholeNumber,
      VERIFY_WAIT_SECONDS,
    )
    .addOption(
      new Option(
        '--from-head <file>',
        'verify only what came after a signed head, which you trust; checked with the key and the stored tiles',
      ).conflicts('full'),
    )
    .option('--full', 'verify everything (default)')
    .option('--place <file>', 'keep the progress in a file; after an interruption, the same command goes on from there')
    .action(
      action(async ({ services, clock }, { timeoutSeconds, fromHead, place }: { timeoutSeconds: number; fromHead?: string; place?: string }) => {
        const note = fromHead === undefined ? null : readHead(fromHead);
        const before = place === undefined ? null : readPlace(place);
        const all = await services();
        const { beginPass, find, logState, passChecks, runPass, trustedHead, UntrustedHead } = await import('#audit');
        const { journalModel, journalPayments, lineRegisterModel } = await import('#ledger');
        const ports = { ...all.seal, headFolder: all.seal.folder };
        // The wait below may be long.
        if (before && before.origin !== (await logState(all.pool)).origin) throw anotherPlace(place!);
        const waitMs = timeoutSeconds * 1_000;
        const [sealing, behind] = await Promise.all([sealed(all, waitMs), notLevel(all, await reportModels(), waitMs)]);
        const from =
          note === null
            ? null
            : await trustedHead(ports, note).catch((error: unknown) => {
                throw error instanceof UntrustedHead ? new Error(`${fromHead}: ${error.message}`) : error;
              });
        const { origin, ...now } = await logState(all.pool);
        if (before && before.pass.log.from.size !== (from?.size ?? 0)) throw anotherPlace(place!);
        if (before && before.pass.log.end.size > now.size)
          throw new Error(
            `${place} was written when ${before.pass.log.end.size} events were sealed; only ${now.size} are sealed now: events were lost`,
          );
        const pass = before?.pass ?? (await beginPass(ports, from && { size: from.size, position: from.position }, now));
        const begunAt = before?.begunAt ?? timestamp(clock.now());
        if (before) process.stderr.write(`goes on with the verification that began at ${begunAt}\n`);
        const keep = () => place !== undefined && writePrivately(place, { release: RELEASE, origin, begunAt, pass } satisfies Place);
        keep();
        const { size, position } = pass.log.end;
        const { models, journal, books, lines } = pass.found;
        const concerned: Readonly<Record<string, readonly Findings[]>> = {
          [lineRegisterModel.name]: [lines],
          [journalModel.name]: [journal, books, lines],
        };
        for (const { name, reason } of behind)
          for (const findings of concerned[name] ?? [models])
            // A run before may have found it.
            if (!findings.named.includes(reason)) find(findings, reason);
        let bar: ReturnType<typeof progressBar> | null = null;
        let shown: string | null = null;
        const totals = { events: size - (from?.size ?? 0), payments: from ? null : await journalPayments(all.pool) };
        const onProgress = (what: 'events' | 'payments', done: number) => {
          // An incremental pass compares payments while it reads events. Its bar shows the events.
          if (from && what === 'payments') return;
          if (shown !== what) {
            bar?.stop();
            bar = progressBar(what, totals[what]);
            shown = what;
          }
          bar?.update(done);
        };
        try {
          let kept = { step: pass.step, atMs: clock.monotonic() };
          for await (const _page of runPass(ports, pass, { ...VERIFY_AT_ONCE, onProgress })) {
            if (pass.step === kept.step && clock.monotonic() - kept.atMs < KEEP_PLACE_MS) continue;
            keep();
            kept = { step: pass.step, atMs: clock.monotonic() };
          }
        } finally {
          (bar as ReturnType<typeof progressBar> | null)?.stop();
        }
        if (place !== undefined) rmSync(place, { force: true });
        return reported({ position: position === '' ? null : position, size, root: pass.root }, [...sealing, ...passChecks(pass)]);
      }),
    );

  audit
    .command('drift')
    .description('compare replay, list, journal and settlement of every payment, and the line items with the journal; prints only differences')
    .action(
      action(async ({ services }) => {
        const all = await services();
        await allCaughtUp(all);
        const { payments, position, digest, entries, differences } = await driftOf(all, null);
        const said = `verified ${payments} payments up to position ${position ?? 'none'}, ${entries} entries, digest ${digest}`;
        return {
          json: { ok: differences.length === 0, payments, position, entries, digest, differences },
          text: [...differences.map(inWords), said].join('\n'),
          exitCode: differences.length === 0 ? 0 : 1,
        };
      }),
    );

  audit
    .command('prove')
    .description('write the events of a payment with proofs that they are in the signed log; verify.mjs checks them')
    .argument('<payment>', 'payment id', uuid)
    .requiredOption('--out <file>', 'where to write')
    .action(
      action(async ({ services }, paymentId: string, { out }: { out: string }) => {
        const all = await services();
        const { provePayment, openHead, headKeys } = await import('#audit');
        const checks = await sealed(all);
        const proofs = await provePayment(all.seal, paymentId);
        const head = openHead(proofs.head, headKeys(proofs.head.split('\n')[0]!, all.keys));
        writePrivately(out, proofs);
        const detail = `${proofs.events.length} events are in the log of ${head.size} events, signed at ${head.at}; written to ${out}`;
        return reported({ position: head.position, size: head.size, root: head.root.toString('base64') }, [
          ...checks,
          { name: 'inclusion', ok: true, detail },
        ]);
      }),
    );

  audit
    .command('consistency')
    .description('prove that the later of two signed heads only appended to the earlier one')
    .argument('<head>', 'file of a signed head')
    .argument('<head>', 'file of another')
    .option('--out <file>', 'write the proof; verify.mjs checks it')
    .action(
      action(async ({ services }, first: string, second: string, { out }: { out?: string }) => {
        const notes = [first, second].map(readHead);
        const all = await services();
        const { proveConsistency } = await import('#audit');
        const { heads, ...proof } = await proveConsistency(all.seal, notes[0]!, notes[1]!);
        if (out !== undefined) writePrivately(out, proof);
        const [before, after] = heads;
        const detail = `the ${after.size} events signed at ${after.at} begin with the ${before.size} signed at ${before.at}`;
        return reported({ position: after.position, size: after.size, root: after.root.toString('base64') }, [
          { name: 'consistency', ok: true, detail },
        ]);
      }),
    );

  audit
    .command('close-period')
    .description('close the books to a time: from now on nothing is booked before it; its trial balance is recorded and a head signed')
    .requiredOption('--to <time>', 'end of the period, exclusive', moment)
    .option('--by <name>', 'name of the person who decides', personName, loginName())
    .action(
      action(
        async ({ services }, { to, by }: { to: string; by: string }) => {
          const all = await services();
          const { SignLog } = await import('#audit/module');
          const { ClosePeriod } = await import('#ledger/module');
          const balance = await all.commands.execute(new ClosePeriod(to, by));
          const checks = await sealed(all);
          const signed = await all.commands.execute(new SignLog());
          const detail = `closed to ${to}: ${balance.entries} entries, digest ${balance.digest}`;
          const { position, size, root } = signed!.head;
          return reported({ position, size, root: root.toString('base64') }, [...checks, { name: 'period', ok: true, detail }]);
        },
        { asks: ({ to }: { to: string }) => `Nothing can be booked before ${to} any more.` },
      ),
    );

  audit
    .command('pack')
    .description('write the evidence of a period into a new folder: reports, journal, events with proofs, drift, exceptions, manifest, verifier')
    .requiredOption('--from <time>', 'begin of the period', moment)
    .requiredOption('--to <time>', 'end of the period, exclusive', moment)
    .requiredOption('--out <folder>', 'folder to make')
    .action(
      action(async ({ services, clock }, { from, to, out }: { from: string; to: string; out: string }) => {
        // Further events of the period may come. The pack would show a part of the period as the whole period.
        if (to > timestamp(clock.now())) throw new ServiceError('VALIDATION_ERROR', `--to ${to} lies in the future; the period is not over.`);
        const all = await services();
        const { writePack } = await import('#audit');
        const checks = await sealed(all);
        const verifier = fileURLToPath(new URL('../../../apps/operator/verify.mjs', import.meta.url));
        const pack = await writePack(
          { ...all.seal, db: all.pool, reached: (position) => modelsReach(all, position) },
          { from, to, out, version: RELEASE, verifier },
        );
        const { position, size, root, files, drift, tie } = pack;
        const loose = tie.filter(({ differenceCents }) => differenceCents !== 0);
        return reported({ position, size, root }, [
          ...checks,
          { name: 'drift', ok: drift.differences.length === 0, detail: `${drift.differences.length} differences over ${drift.payments} payments` },
          { name: 'lines', ok: loose.length === 0, detail: `${loose.length} of ${tie.length} accounts in which line items and journal differ` },
          {
            name: 'pack',
            ok: true,
            detail: `${files.length} files in ${out}; check them with a verify.mjs that you trust: node verify.mjs pack ${out} --key FILE`,
          },
        ]);
      }),
    );

  audit
    .command('export')
    .description('write one report to stdout')
    .addArgument(new Argument('[report]', 'which').choices(REPORT_NAMES))
    .addOption(new Option('--columns <report>', 'print what every column of a report means, and no rows').choices(REPORT_NAMES))
    .addOption(new Option('--format <format>', 'what to write; table: for people, with dollars').choices(['csv', 'ndjson', 'table']).default('csv'))
    .option('--from <time>', 'from a time on', moment)
    .option('--to <time>', 'before a time', moment)
    .option('--as-of <time>', 'as it was known at a time (reports over the journal)', moment)
    .option('--after <place>', 'go on after a place, as the manifest on stderr names it; of line-items: what came since a place of the log')
    .option('--digest', 'compare the read models with their replay first, and put the digest of both into the manifest')
    .addOption(withPersonal())
    .action(
      action(async ({ services }, name: ReportName | undefined, options: ExportOptions) => {
        const { columns, format, from = null, to = null, asOf = null, after = null, digest = false, withPersonal: opens = false } = options;
        if ((name === undefined) === (columns === undefined)) throw new UsageError('name one report, or one with --columns');
        if (columns !== undefined) {
          const { columnsOf } = await import('#audit');
          const rows = columnsOf(columns);
          return {
            json: rows,
            text: table(
              ['COLUMN', 'MEANING'],
              rows.map((row) => [row.column, row.meaning]),
            ),
          };
        }
        const all = await services();
        const { exportReport, projectionDigest } = await import('#audit');
        const { EVERYTHING } = await import('#accounts');
        if (digest) await allCaughtUp(all);
        const projected = digest ? projectionDigest(await driftOf(all, null)) : null;
        const position = await allCaughtUp(all);
        const ports = { store: all.store, db: all.pool, ...(opens && { personal: all.personal }) };
        const { pieces, manifest, rows } = exportReport(
          ports,
          EVERYTHING,
          name!,
          format === 'table' ? 'ndjson' : format,
          { from, to, asOf, after },
          position,
          projected,
        );
        const opening = opens ? await all.openings.begin({ actor: `staff ${loginName()}`, report: `audit export ${name}` }) : null;
        try {
          if (format === 'table') await print(`${await asTable(pieces)}\n`);
          else for await (const piece of pieces) await print(piece);
        } finally {
          await opening?.shown(rows());
        }
        process.stderr.write(`${JSON.stringify(await manifest())}\n`);
        return { json: null, text: '', printed: true };
      }),
    );

  audit
    .command('statement')
    .description('the statement of an agency for a month: opening, movements, fees, payments, closing, deposits')
    .argument('<portal>', 'the agency’s portal', uuid)
    .requiredOption('--period <month>', 'YYYY-MM')
    .option('--zone <zone>', 'time zone of the month, such as America/Chicago; UTC otherwise')
    .addOption(new Option('--format <format>', 'csv: a line for each figure').choices(['csv']))
    .action(
      action(async ({ services }, portalId: string, { period, zone, format }: { period: string; zone?: string; format?: 'csv' }) => {
        const all = await services();
        const { EVERYTHING } = await import('#accounts');
        const { statementCsv, statementItems, statementOf } = await import('#audit');
        const position = await allCaughtUp(all);
        const statement = await statementOf({ store: all.store, db: all.pool, position }, EVERYTHING, { portalId, period, zone });
        if (format === 'csv') {
          await print(statementCsv(statement));
          return { json: null, text: '', printed: true };
        }
        const { name, from, to, final, deposits } = statement;
        const heading: [string, string][] = [
          ['agency', name],
          ['from', from],
          ['to', to],
          ['final', final ? `yes, closed at position ${statement.position}, digest ${statement.digest}` : 'no, the month is not closed'],
        ];
        const items = table(
          ['ITEM', 'USD'],
          statementItems(statement).map(([item, cents]) => [item, decimal(cents)]),
        );
        const paid = table(
          ['DEPOSIT', 'MERCHANT ACCOUNT', 'BATCH', 'PRINCIPAL', 'FEE', 'PROCESSOR FEE'],
          deposits.map((one) => [
            one.depositedOn,
            one.merchantAccount,
            one.batchId,
            ...[one.principalCents, one.feeCents, one.processorFeeCents].map(decimal),
          ]),
        );
        return { json: statement, text: [fields(heading), items, ...(deposits.length === 0 ? [] : [paid])].join('\n\n') };
      }),
    );

  const keys = audit.command('keys').description('read-only keys for /audit/v1');
  keys
    .command('issue')
    .description('issue a key; it is shown once')
    .requiredOption('--name <name>', 'whose it is')
    .addOption(
      new Option('--role <role>', 'what it may read; agency: for an agency’s own people, needs --portal')
        .choices(['finance', 'auditor', 'agency'])
        .makeOptionMandatory(),
    )
    .option('--account <account>', 'payments of this account; may be given several times', each(uuid))
    .option(
      '--portal <portal>',
      'payments of this portal, and its reports; may be given several times; with --account: payments of either',
      each(uuid),
    )
    .option('--personal', 'it may ask for personal data of payers')
    .action(
      action(async ({ administration, services }, { name, role, account: accounts = [], portal: portals = [], personal = false }: IssueOptions) => {
        if (role === 'agency' && portals.length === 0) throw new UsageError('--role agency needs --portal');
        for (const account of accounts) await administration.account(account);
        for (const portal of portals) await administration.portal(portal);
        const scope = accounts.length + portals.length === 0 ? null : { accounts, portals };
        const all = await services();
        const { auditKeyModel } = await import('#audit');
        const { IssueAuditKey } = await import('#audit/module');
        const actor = { type: 'operator', id: loginName() } as const;
        const { position, keyId, auditKey } = await all.commands.execute(new IssueAuditKey({ name, role, scope, personal }, actor));
        await inForceOrShown(all.readModels.inForce(auditKeyModel, position, KEY_MS), 'audit key', auditKey, keyId);
        return {
          json: { keyId, auditKey, name, role, scope, personal },
          text: `${auditKey}\n\nIt is shown this once (key ${keyId}, ${role}, ${scopeText(scope)}).`,
        };
      }),
    );
  keys
    .command('list')
    .description('keys, without their secrets')
    .action(
      action(async ({ services }) => {
        const all = await services();
        const { auditKeyModel, listAuditKeys } = await import('#audit');
        await all.readModels.caughtUp(auditKeyModel, KEY_MS);
        const rows = await listAuditKeys(all.pool);
        return {
          json: rows,
          text: table(
            ['KEY', 'NAME', 'ROLE', 'READS', 'PERSONAL', 'ISSUED', 'REVOKED'],
            rows.map((row) => [row.keyId, row.name, row.role, scopeText(row.scope), row.personal ? 'yes' : '', row.issuedAt, row.revokedAt ?? '']),
          ),
        };
      }),
    );
  keys
    .command('revoke')
    .description('end a key; the next request with it is refused')
    .argument('<key>', 'key id', uuid)
    .action(
      action(
        async ({ services }, keyId: string) => {
          const all = await services();
          const { auditKeyModel, listAuditKeys } = await import('#audit');
          const { RevokeAuditKey } = await import('#audit/module');
          const position = await all.commands.execute(new RevokeAuditKey(keyId, { type: 'operator', id: loginName() }));
          await all.readModels.inForce(auditKeyModel, position, KEY_MS);
          const row = (await listAuditKeys(all.pool)).find((one) => one.keyId === keyId)!;
          return { json: row, text: `${keyId} is revoked` };
        },
        { asks: (keyId: string) => `Audit key ${keyId} stops working.` },
      ),
    );
};

const scopeText = (scope: KeyTerms['scope']): string =>
  scope === null
    ? 'everything'
    : [...scope.accounts.map((account) => `account ${account}`), ...scope.portals.map((portal) => `portal ${portal}`)].join(', ');

interface IssueOptions {
  readonly name: string;
  readonly role: AuditRole;
  readonly account?: readonly string[];
  readonly portal?: readonly string[];
  readonly personal?: boolean;
}

const KEY_MS = 30_000;
/** The names of `REPORTS`. A second list lets help and wrong usage answer without loading the ledger. A spec compares both lists. */
const REPORT_NAMES: readonly ReportName[] = ['payments', 'transactions', 'reversals', 'fees', 'payable', 'batches', 'disputes', 'open', 'trial-balance', 'attempts', 'webhooks', 'staff-actions', 'line-items', 'deposits']; // prettier-ignore

interface ExportOptions {
  readonly columns?: ReportName;
  readonly format: 'csv' | 'ndjson' | 'table';
  readonly from?: string | null;
  readonly to?: string | null;
  readonly asOf?: string | null;
  readonly after?: string | null;
  readonly digest?: boolean;
  readonly withPersonal?: boolean;
}

const reportModels = async (): Promise<readonly ReadModel[]> => {
  const { paymentListModel, staffWorkModel } = await import('#payments');
  const { exceptionModel, paymentRegisterModel } = await import('#settlement');
  const { journalModel, lineRegisterModel } = await import('#ledger');
  return [paymentListModel, paymentRegisterModel, journalModel, lineRegisterModel, exceptionModel, staffWorkModel];
};

/** Brings the read models of reports up to the end of the log. Returns that position. */
export const allCaughtUp = async (all: Services): Promise<string | null> => {
  const head = await all.store.head();
  if (head !== null) await modelsReach(all, head);
  return head;
};
const modelsReach = async ({ readModels }: Services, position: Position): Promise<void> => {
  for (const model of await reportModels()) await readModels.of(model).runUntil(position, { timeoutMs: CATCH_UP_MS });
};

/** A read model that is not at the end of the log. Its rows cannot be compared in full. */
interface NotLevel {
  readonly name: string;
  readonly reason: string;
}

/** Brings read models up to the end of the log. Returns those that failed, were too slow, or have a checkpoint beyond the end. */
const notLevel = async ({ store, pool, readModels }: Services, models: readonly ReadModel[], timeoutMs: number): Promise<NotLevel[]> => {
  const { checkpointOf, postgresCheckpoint, ProjectionFailed, projectionPlace, Unavailable } = await import('#eventstore');
  const head = await store.head();
  const looked = models.map(async (model): Promise<NotLevel[]> => {
    const { name } = model;
    try {
      if (head !== null) await readModels.of(model).runUntil(head, { timeoutMs });
    } catch (error) {
      if (!(error instanceof ProjectionFailed || error instanceof Unavailable)) throw error;
      return [{ name, reason: `not compared in full: ${error.message}` }];
    }
    const { position, head: end } = await projectionPlace(store, postgresCheckpoint(pool, checkpointOf(model)));
    if (position === null || (end !== null && position <= end)) return [];
    return [{ name, reason: `${name} has applied events up to position ${position}, and the log ends at ${end ?? 'its start'}` }];
  });
  return (await Promise.all(looked)).flat();
};

/** Compares the read models with the log. Does not bring them up to date first. */
const driftOf = async (all: Services, streams: number | null): Promise<DriftReport> => {
  const { findDrift } = await import('#audit');
  const { journalPayments } = await import('#ledger');
  const bar = progressBar('payments', await journalPayments(all.pool));
  try {
    return await findDrift(all.seal, { streams, onProgress: (payments) => bar.update(payments) });
  } finally {
    bar.stop();
  }
};

/** How much of the log, and how many payments, `audit verify` compares in one page. */
const VERIFY_AT_ONCE = { eventsAtOnce: 16_384, paymentsAtOnce: 100 } as const;

/** The file of `--place`: how far a verification came. */
interface Place {
  /** The state of a verification can differ between releases. */
  readonly release: string;
  /** The name of the sealed log. */
  readonly origin: string;
  readonly begunAt: string;
  readonly pass: PassState;
}
const anotherPlace = (file: string) => new UsageError(`${file} is the place of another verification; remove it to begin anew`);
/** Reads the file of `--place`. Throws if others can read or write it. null: there is none yet. */
const readPlace = (file: string): Place | null => {
  const text = readOwnFile(file, { secret: true });
  if (text === null) return null;
  try {
    const place = JSON.parse(text) as Partial<Place>;
    if (place.release === RELEASE && place.origin && place.begunAt && place.pass?.log) return place as Place;
  } catch {
    // No JSON.
  }
  throw new UsageError(`${file} was not written by \`audit verify --place\` of this release; remove it to begin anew`);
};
const inWords = ({ paymentId, position, message }: Difference): string =>
  `${paymentId === null ? '' : `payment ${paymentId}: `}${inDollars(message)}${position === null ? '' : ` (position ${position})`}`;

/** More rows are no table for people, and all of them are measured before the first is printed. */
const MAX_TABLE_ROWS = 5_000;

/** The lines of a report as a table. Columns in cents are shown in dollars. */
const asTable = async (pieces: AsyncIterable<string>): Promise<string> => {
  const rows: Readonly<Record<string, unknown>>[] = [];
  let rest = '';
  for await (const piece of pieces) {
    const lines = (rest + piece).split('\n');
    rest = lines.pop()!;
    rows.push(...lines.map((line) => JSON.parse(line) as Record<string, unknown>));
    if (rows.length > MAX_TABLE_ROWS) throw new UsageError(`a table has at most ${MAX_TABLE_ROWS} rows; name a shorter time, or --format csv`);
  }
  const columns = Object.keys(rows[0] ?? {});
  const shown = (column: string, value: unknown): string => {
    if (typeof value === 'string') return value;
    if (value === null) return '';
    return typeof value === 'number' && column.endsWith('_cents') ? dollars(value) : JSON.stringify(value);
  };
  return table(
    columns.map((column) => column.replace(/_cents$/, '').toUpperCase()),
    rows.map((row) => columns.map((column) => shown(column, row[column]))),
  );
};

const readHead = (file: string): string => {
  try {
    // A pipe could keep the command waiting.
    if (!statSync(file).isFile()) throw new UsageError(`${file} is no ordinary file`);
    return readFileSync(file, 'utf8');
  } catch (error) {
    if (error instanceof UsageError) throw error;
    throw new UsageError(`${file} cannot be read (${(error as NodeJS.ErrnoException).code})`);
  }
};

/**
 * Brings the seal up to the end of the log. If this fails, returns a failed check and does not throw. The part that is already sealed can still be
 * verified.
 */
const sealed = async ({ store, reactors }: Services, timeoutMs = CATCH_UP_MS): Promise<Check[]> => {
  const head = await store.head();
  const { ProjectionFailed, Unavailable } = await import('#eventstore');
  try {
    if (head !== null) await reactors.logSeal.runUntil(head, { timeoutMs });
    return [];
  } catch (error) {
    if (!(error instanceof ProjectionFailed || error instanceof Unavailable)) throw error;
    return [{ name: 'seal', ok: false, detail: error.message }];
  }
};

export const reported = (state: { position: string | null; size: number; root: string }, checks: readonly Check[]) => {
  const ok = checks.every((check) => check.ok);
  return {
    json: { ok, ...state, checks },
    text: `${table(
      ['CHECK', 'RESULT', 'DETAIL'],
      checks.map(({ name, ok: good, detail }) => [name, good ? 'ok' : 'FAILED', inDollars(detail)]),
    )}\n\n${state.size} events, root ${state.root}`,
    exitCode: ok ? (0 as const) : (1 as const),
  };
};
