/**
 * Import of settlement files, and settlement exceptions.
 *
 * Each file is imported once, by its hash. A corrected file supersedes an earlier one, and the stream keeps both. Every difference becomes an
 * exception, which a person resolves.
 */
import { createHash } from 'node:crypto';
import { basename } from 'node:path';
import type { Scope } from '#accounts';
import { type EventStore, load, type Origin, type ReadModel, type Recorded, recordOnce } from '#eventstore';
import { ServiceError, timestamp } from '#kernel';
import { changeCase } from './case.js';
import { decideElsewhere, LINE_KINDS, settleLineOf } from './elsewhere.js';
import { type BatchSummary, batchOf, lateLine, recordBatch, recordFunding, type SettlementPorts, wrongHead } from './record.js';
import {
  type GatewayAccount,
  lateAfterDays,
  type Leg,
  paymentScopeCondition,
  refuseClearText,
  refuseStaffText,
  repeatedTransactions,
} from '#payments';
import { linesOf, nameOfLine } from './batch.js';
import { everyRow, hashedUuid, type Queryable } from '#platform';
import {
  type ExceptionEvent,
  type ExceptionKind,
  type ExceptionStatus,
  isEnded,
  OPEN_STATUSES,
  type OpenedException,
  type Resolution,
} from './exception.js';
import { EXCEPTION_STREAM, exceptionEvents, exceptionIdOf, type SettlementFileImported, settlementFileEvents } from './events.js';
import { type FileBatch, fileBatches, RefusedFile } from './file.js';

// ------------------------------------------------------------------------------------------------------------------------------------
// Files.

const fileStream = (sha256: string): string => `settlement-file-${sha256}`;

export interface FileImported {
  readonly sha256: string;
  /** True if the file was imported before. Then nothing was done now. */
  readonly repeated: boolean;
  readonly lines: number;
  /** Number of corrections that this file made to earlier batches: changed lines, and changed days of funding. */
  readonly corrected: number;
  readonly batches: readonly BatchSummary[];
}

export interface ImportOptions {
  /** Merchant account of the file. null: {@link accountOf} finds it for each batch. */
  readonly merchantAccount: string | null;
  /** Imports a file that was imported before. For example, another file has changed its batches since. */
  readonly again?: boolean;
  /** True: its dates may be long ago. */
  readonly old?: boolean;
  readonly by: Origin;
  /** Called with the number of lines recorded so far. */
  readonly onLines?: (lines: number) => void;
}

/**
 * Imports a file in two readings. The first reading checks the whole file. If it has a fault, or the merchant account of a batch is unclear, the file
 * is refused with {@link RefusedFile}. The second reading records or corrects each batch. A batch that has changed since the first reading is
 * refused. The import of the file is recorded last. After a crash, run the import again.
 */
export const importSettlementFile = async (
  ports: SettlementPorts,
  file: string,
  { merchantAccount, again = false, old = false, by, onLines }: ImportOptions,
  signal: AbortSignal,
): Promise<FileImported> => {
  const { store, register, payments } = ports;
  await register.caughtUp();
  const checked = new Map<string, { readonly account: GatewayAccount; readonly digest: string }>();
  let lines = 0;
  let refused: RefusedFile | null = null;
  const sha256 = await readFile(file, async (batch) => {
    signal.throwIfAborted();
    lines += batch.lines.length;
    try {
      const account = await accountOf(ports, batch, merchantAccount);
      await refuseWrongDates(ports, account, batch, old);
      checked.set(batch.batchId, { account, digest: digestOf(batch) });
    } catch (error) {
      if (!(error instanceof RefusedFile)) throw error;
      refused ??= error; // Thrown below, unless this file was imported before.
    }
  });
  const before = await importedFile(store, sha256);
  if (before && !again) return { ...before, repeated: true };
  if (refused) throw refused as RefusedFile;

  const batches: BatchSummary[] = [];
  let [corrected, done] = [0, 0];
  const changed = () =>
    new RefusedFile(null, 'the file changed while it was being imported; import it again, which corrects what was recorded of it');
  const sha256Again = await readFile(file, async (batch) => {
    const { batchId, closedAt, fundedOn } = batch;
    const { account, digest } = checked.get(batchId) ?? {};
    if (!account || digest !== digestOf(batch)) throw changed();
    const recorded = await recordBatch(ports, account, { batchId, closedAt, fundedOn, lines: each(batch.lines) }, sha256, signal);
    corrected += recorded.corrected;
    batches.push({ batchId, count: recorded.count, amountCents: recorded.amountCents });
    onLines?.((done += batch.lines.length));
    // Bring the register up to date. The next batch is matched with what this batch settled.
    await register.caughtUp();
  });
  if (sha256Again !== sha256) throw changed();
  await recordFunding(ports);
  const event: SettlementFileImported = { type: 'SettlementFileImported', data: { sha256, name: basename(file), lines, corrected, batches } };
  // If another process imports the file at the same time, both record the same event.
  await recordOnce({ store, clock: payments.clock }, settlementFileEvents, fileStream(sha256), event, hashedUuid('settlement-file', sha256), by);
  return { sha256, repeated: false, lines, corrected, batches };
};

/** Reads a file batch by batch. Resolves to the SHA-256 of its bytes. */
const readFile = async (file: string, onBatch: (batch: FileBatch) => Promise<void>): Promise<string> => {
  const hash = createHash('sha256');
  for await (const batch of fileBatches(file, (bytes) => hash.update(bytes))) await onBatch(batch);
  return hash.digest('hex');
};

/** Hashes line by line. The text of a large batch would take 30 MB, and its bytes as much again. */
const digestOf = ({ lines, ...head }: FileBatch): string => {
  const hash = createHash('sha256').update(JSON.stringify(head));
  for (const line of lines) hash.update(`\n${JSON.stringify(line)}`);
  return hash.digest('base64');
};

const importedFile = async (store: EventStore, sha256: string): Promise<Omit<FileImported, 'repeated'> | null> => {
  for await (const recorded of store.read(fileStream(sha256))) {
    const { lines, corrected, batches } = settlementFileEvents.read(recorded).data;
    return { sha256, lines, corrected, batches };
  }
  return null;
};

const each = async function* <T>(items: readonly T[]): AsyncIterable<T> {
  yield* items;
};

/** Refuses dates that cannot be true. Those of a recorded batch may be corrected. */
const refuseWrongDates = async (ports: SettlementPorts, account: GatewayAccount, batch: FileBatch, old: boolean): Promise<void> => {
  const { batchId, closedAt, fundedOn, row, lines } = batch;
  const { gateway, merchantAccount } = account;
  const recorded = await batchOf(ports.store, { gateway, merchantAccount, batchId });
  const wrong = wrongHead({ closedAt, fundedOn: fundedOn ?? recorded.fundedOn }, ports.payments.clock.now(), old);
  if (wrong !== null) throw new RefusedFile(row, wrong);
  for (let first = 0; first < lines.length; first += LOOKED_AT_LINES) {
    const late = await lateLine(ports, account, closedAt, lines.slice(first, first + LOOKED_AT_LINES));
    if (late) throw new RefusedFile(row + first + late.index, late.why);
  }
};

const LOOKED_AT_LINES = 200;

/**
 * Finds the merchant account of a batch, since a file does not name it. The choices, in this order: the account `asked`; an account whose recorded
 * batch with this id shares a line with the file; the account of most transactions among the first lines.
 */
const accountOf = async (ports: SettlementPorts, { batchId, lines }: FileBatch, asked: string | null): Promise<GatewayAccount> => {
  const { register, store } = ports;
  const accounts = await register.accounts();
  const wanted = asked === null ? [] : accounts.filter((one) => one.merchantAccount === asked);
  if (asked !== null && wanted.length !== 1) throw new RefusedFile(null, `merchant account ${asked} was never charged here`);

  const begun = await register.accountsOfBatch(batchId);
  const names = new Set(begun.length === 0 ? [] : lines.map(nameOfLine));
  const same: GatewayAccount[] = [];
  for (const account of begun) {
    const recorded = await batchOf(store, { gateway: account.gateway, merchantAccount: account.merchantAccount, batchId });
    if (linesOf(recorded).some((line) => names.has(nameOfLine(line)))) same.push(account);
  }
  const isWanted = (one: GatewayAccount) => one.gateway === wanted[0]?.gateway && one.merchantAccount === wanted[0].merchantAccount;
  if (wanted[0]) {
    const other = same.find((one) => !isWanted(one));
    if (other && !begun.some(isWanted))
      throw new RefusedFile(null, `batch ${batchId} is recorded on merchant account ${other.merchantAccount}; it is not recorded again on ${asked}`);
    return wanted[0];
  }
  if (same[0]) return same[0];

  const some = lines.slice(0, LOOKED_AT_LINES);
  const counts = new Map<GatewayAccount, number>();
  for (const gateway of new Set(accounts.map((one) => one.gateway)))
    for (const { merchantAccount } of await register.transactions(
      gateway,
      some.map((line) => line.transactionId),
      some.flatMap(({ ref }) => ref ?? []),
    )) {
      const account = accounts.find((one) => one.gateway === gateway && one.merchantAccount === merchantAccount)!;
      counts.set(account, (counts.get(account) ?? 0) + 1);
    }
  const [most] = [...counts].sort(([, a], [, b]) => b - a);
  if (most) return most[0];
  // No transaction and no recorded line is known. If only one account has a batch with this id, take that account.
  if (begun.length === 1) return begun[0]!;
  throw new RefusedFile(null, `batch ${batchId} holds no transaction of ours: name its merchant account (--merchant-account)`);
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Opening exceptions.

const DETECTED_PER_ROUND = 500;
const OPENED_AT_ONCE = 16;

/**
 * Opens an exception for each line that did not match, for each charge or refund that was in no batch for days, and for each resolution whose amount
 * a later correction made wrong. Supersedes exceptions whose line was corrected or whose transaction has settled.
 *
 * Safe to repeat. Works in rounds until nothing is left or `stop` aborts. Returns the number of opened exceptions.
 */
export const openExceptions = async (
  ports: SettlementPorts,
  db: Queryable,
  cases: { caughtUp(): Promise<void> },
  stop?: AbortSignal,
): Promise<number> => {
  // The rows of both models say what is opened and what has ended.
  const caughtUp = async () => void (await Promise.all([ports.register.caughtUp(), cases.caughtUp()]));
  await caughtUp();
  let total = 0;
  for (;;) {
    // Supersede first. The amount in suspense of a line depends on its exceptions that are not superseded.
    const superseded = (await supersede(ports, db)) + (await closeAdopted(ports, db));
    if (superseded > 0) await caughtUp();
    const now = timestamp(ports.payments.clock.now());
    const [lines, late, wrong, repeated] = [await newLines(db), await missing(db, now), await wrongInSuspense(db), await repeatedAtGateway(db)];
    const opened = [...lines, ...late, ...uniqueById(wrong), ...repeated];
    const open = (one: OpenedException) =>
      changeCase(ports, one.exceptionId, { type: 'Open', at: now, opened: one }, SYSTEM, hashedUuid('exception-opened', one.exceptionId));
    // Each exception has a stream of its own. Postgres commits simultaneous appends together.
    for (let first = 0; first < opened.length; first += OPENED_AT_ONCE) {
      const ends = await Promise.allSettled(opened.slice(first, first + OPENED_AT_ONCE).map(open));
      for (const end of ends) if (end.status === 'rejected') throw end.reason;
    }
    if (opened.length > 0) await caughtUp();
    total += opened.length;
    const mayHaveMore = [superseded, lines.length, late.length, wrong.length].some((count) => count === DETECTED_PER_ROUND);
    if (!mayHaveMore || stop?.aborted) return total;
  }
};

/** Removes duplicates. `wrongInSuspense` finds a line once for each of its resolved exceptions. */
const uniqueById = (found: readonly OpenedException[]): OpenedException[] => [...new Map(found.map((one) => [one.exceptionId, one])).values()];

/** Supersedes exceptions whose cause is gone. If a person resolves one at the same time, the resolution wins. */
const supersede = async (ports: SettlementPorts, db: Queryable): Promise<number> => {
  const { rows } = await db.query<{ exception_id: string; reason: string }>(
    `select exception_id, case d.kind when 'RETURNED_ELSEWHERE' then 'staff have decided' else 'its line was corrected by a later file' end as reason from settlement_exception d join settlement_case c using (exception_id)
     where d.superseded and d.opened and not d.ended and c.status not in ('resolved', 'superseded')
     union all
     select c.exception_id, 'it settled in batch ' || t.settled_batch_id from settlement_case c
     cross join lateral (select settled_batch_id from gateway_transaction where ref = c.ref limit 1) as t
     where c.kind = 'MISSING_AT_GATEWAY' and c.status = any($2::text[]) and t.settled_batch_id is not null
     limit $1`,
    [DETECTED_PER_ROUND, OPEN_STATUSES],
  );
  for (const { exception_id: exceptionId, reason } of rows) {
    const command = { type: 'Supersede', at: timestamp(ports.payments.clock.now()), reason, by: 'settlement' } as const;
    await changeCase(ports, exceptionId, command, SYSTEM, hashedUuid('exception-superseded', exceptionId));
  }
  return rows.length;
};

/**
 * Ends exceptions of refund lines whose refund staff have adopted. An import may have read the line before it could know that. The attempt of an adopted
 * return has the id of its exception.
 */
const closeAdopted = async (ports: SettlementPorts, db: Queryable): Promise<number> => {
  const { rows } = await db.query<{ exception_id: string; payment_id: string }>(
    `select c.exception_id, t.payment_id from settlement_case c
     join gateway_transaction t on t.gateway = c.gateway and t.merchant_account = c.merchant_account and t.transaction_id = c.transaction_id
     join settlement_exception e on e.exception_id = t.attempt_id and e.kind = 'RETURNED_ELSEWHERE'
     where c.status = any($2::text[]) and c.kind = any($3::text[]) and not c.sending and t.op = 'refund' and c.suspense_cents = -t.amount_cents limit $1`,
    [DETECTED_PER_ROUND, OPEN_STATUSES, LINE_KINDS],
  );
  for (const { exception_id: exceptionId, payment_id: paymentId } of rows) await settleLineOf(ports, exceptionId, paymentId, SYSTEM);
  return rows.length;
};

/** SQL for the amount of a line that should be in suspense, minus the amounts of its exceptions that are not superseded. */
const IN_SUSPENSE = `
  coalesce((select sum(e.suspense_cents) from settlement_exception e where e.gateway = d.gateway and e.merchant_account = d.merchant_account
      and e.batch_id = d.batch_id and e.line = d.line and not e.superseded), 0)
  - coalesce((select sum(c.suspense_cents) from settlement_case c where c.gateway = d.gateway and c.merchant_account = d.merchant_account
      and c.batch_id = d.batch_id and c.line = d.line and c.status <> 'superseded'), 0)`;

/** SQL that is true if an exception of this line must still be superseded. Such a line is left out for now. */
const IS_ENDING = `
  exists (select from settlement_exception o join settlement_case c using (exception_id) where o.gateway = d.gateway and o.merchant_account = d.merchant_account
    and o.batch_id = d.batch_id and o.line = d.line and o.superseded and c.status not in ('resolved', 'superseded'))`;

const newLines = async (db: Queryable): Promise<OpenedException[]> => {
  const { rows } = await db.query<Record<string, string> & { line: number }>(
    `select d.*, case when d.suspense_cents = 0 then 0 else ${IN_SUSPENSE} end as left_cents from settlement_exception d
     where not d.opened and not d.superseded and not exists (select from settlement_case c where c.exception_id = d.exception_id) and not ${IS_ENDING} order by d.recorded_at limit $1`,
    [DETECTED_PER_ROUND],
  );
  return rows.map((row) => ({
    exceptionId: row.exception_id!,
    kind: row.kind as ExceptionKind,
    gateway: row.gateway!,
    merchantAccount: row.merchant_account!,
    batchId: row.batch_id || null,
    line: row.line < 0 ? null : row.line,
    transactionId: row.transaction_id || null,
    ref: row.ref ?? null,
    paymentId: row.payment_id ?? null,
    leg: (row.leg ?? null) as Leg | null,
    grossCents: Number(row.gross_cents),
    expectedCents: row.expected_cents === null ? null : Number(row.expected_cents),
    suspenseCents: Number(row.left_cents),
  }));
};

/** Charges and refunds that are in no batch after the days of {@link lateAfterDays}. A transaction that has an exception through its line is left out. */
const missing = async (db: Queryable, now: string): Promise<OpenedException[]> => {
  const { rows: gateways } = await db.query<{ gateway: string }>('select distinct gateway from gateway_account');
  if (gateways.length === 0) return [];
  const days = Object.fromEntries(gateways.map(({ gateway }) => [gateway, lateAfterDays(gateway)]));
  const { rows } = await db.query<Record<string, string>>(
    `select t.*, (select count(*) from settlement_case c where c.ref = t.ref and c.kind = 'MISSING_AT_GATEWAY') as before from gateway_transaction t
     where t.settled_batch_id is null and not t.rejected and t.moved_at is not null and t.amount_cents > t.voided_cents
       and t.moved_at < $1::timestamptz - $2::int * interval '1 day' and t.moved_at < $1::timestamptz - ($4::json ->> t.gateway)::int * interval '1 day'
       and not exists (select from settlement_case c where c.ref = t.ref and c.kind = 'MISSING_AT_GATEWAY' and c.status <> 'superseded')
       and not exists (select from settlement_exception d where (d.payment_id = t.payment_id or t.payment_id is null and d.payment_id is null)
         and d.gateway = t.gateway and d.merchant_account = t.merchant_account and d.transaction_id = t.transaction_id
         and d.type = case t.op when 'charge' then 'sale' else 'refund' end and not d.superseded)
     order by t.moved_at limit $3`,
    [now, Math.min(...Object.values(days)), DETECTED_PER_ROUND, JSON.stringify(days)],
  );
  return rows.map((row) => {
    const expectedCents = Number(row.amount_cents) - Number(row.voided_cents);
    return {
      // If an earlier exception of the same transaction was superseded, the new one gets another id.
      exceptionId: hashedUuid('settlement-exception', 'MISSING_AT_GATEWAY', row.ref!, ...(row.before === '0' ? [] : [row.before!])),
      kind: 'MISSING_AT_GATEWAY',
      gateway: row.gateway!,
      merchantAccount: row.merchant_account!,
      batchId: null,
      line: null,
      transactionId: row.transaction_id!,
      ref: row.ref!,
      paymentId: row.payment_id ?? null,
      leg: row.leg as Leg,
      grossCents: null,
      expectedCents: row.op === 'charge' ? expectedCents : -expectedCents,
      suspenseCents: 0,
    };
  });
};

/** Charges that the processor answered with the transaction of another charge, and that have no exception yet. */
const repeatedAtGateway = async (db: Queryable): Promise<OpenedException[]> => {
  const repeated = await repeatedTransactions(db);
  if (repeated.length === 0) return [];
  const refs = repeated.flatMap((one) => one.refs);
  const { rows } = await db.query<{ ref: string; payment_id: string | null; leg: Leg; has_case: boolean }>(
    `select t.ref, t.payment_id, t.leg, exists (select from settlement_case c where c.ref = t.ref and c.kind = 'DUPLICATE_AT_GATEWAY') as has_case
     from gateway_transaction t where t.ref = any($1::text[])`,
    [refs],
  );
  const byRef = new Map(rows.map((row) => [row.ref, row]));
  return repeated.flatMap(({ gateway, merchantAccount, transactionId, refs: of }) =>
    of.flatMap((ref): OpenedException[] => {
      const row = byRef.get(ref);
      // The register may not have the charge yet.
      if (!row || row.has_case) return [];
      const found = { gateway, merchantAccount, transactionId, ref, paymentId: row.payment_id, leg: row.leg } as const;
      const exceptionId = hashedUuid('settlement-exception', 'DUPLICATE_AT_GATEWAY', ref);
      const nothing = { batchId: null, line: null, grossCents: null, expectedCents: null, suspenseCents: 0 } as const;
      return [{ exceptionId, kind: 'DUPLICATE_AT_GATEWAY', ...found, ...nothing }];
    }),
  );
};

/** Corrected lines whose resolved exceptions took a wrong amount out of suspense. */
const wrongInSuspense = async (db: Queryable): Promise<OpenedException[]> => {
  const { rows } = await db.query<Record<string, string> & { line: number }>(
    `select * from (
       select d.*, ${IN_SUSPENSE} as left_cents,
         (select count(*) from settlement_case c where c.gateway = d.gateway and c.merchant_account = d.merchant_account and c.batch_id = d.batch_id
            and c.line = d.line and c.kind = 'SUSPENSE_MISMATCH') as before
       from settlement_exception d
       where d.superseded and d.resolved_cents <> 0 and d.line >= 0
         and d.exception_id in (select c.exception_id from settlement_case c where c.status = 'resolved' and c.suspense_cents <> 0)
         and not exists (select from settlement_exception e where e.gateway = d.gateway and e.merchant_account = d.merchant_account and e.batch_id = d.batch_id
           and e.line = d.line and not e.superseded and not exists (select from settlement_case c where c.exception_id = e.exception_id))
         and not ${IS_ENDING}
     ) as corrected where left_cents <> 0 order by recorded_at limit $1`,
    [DETECTED_PER_ROUND],
  );
  return rows.map((row) => ({
    exceptionId: hashedUuid('settlement-exception', 'SUSPENSE_MISMATCH', row.gateway!, row.merchant_account!, row.batch_id!, row.line, row.before!),
    kind: 'SUSPENSE_MISMATCH',
    gateway: row.gateway!,
    merchantAccount: row.merchant_account!,
    batchId: row.batch_id!,
    line: row.line,
    transactionId: row.transaction_id!,
    ref: row.ref ?? null,
    paymentId: row.payment_id ?? null,
    leg: (row.leg ?? null) as Leg | null,
    grossCents: null,
    expectedCents: null,
    suspenseCents: Number(row.left_cents),
  }));
};

const SYSTEM: Origin = { actor: { type: 'system', id: 'settlement' }, correlationId: 'settlement' };

// ------------------------------------------------------------------------------------------------------------------------------------
// Commands of people.

export type ExceptionChange =
  | { readonly type: 'Assign'; readonly to: string; readonly by: string }
  | { readonly type: 'Explain'; readonly reason: string; readonly by: string }
  | {
      readonly type: 'Resolve';
      readonly resolution: Resolution;
      readonly reason: string;
      readonly by: string;
      readonly portalId: string | null;
      readonly feeCents: number;
      /** The refund that was made elsewhere, if the exception names none. */
      readonly transactionId?: string | null;
    };

/** Executes a person's command on an exception. Throws VALIDATION_ERROR (404 for an unknown exception) or INVALID_STATE. */
export const changeException = async (ports: SettlementPorts, exceptionId: string, change: ExceptionChange, origin: Origin): Promise<void> => {
  const { clock } = ports.payments;
  if (change.type === 'Assign') refuseStaffText('to', change.to, 200);
  else refuseClearText('reason', change.reason);
  if (change.type === 'Resolve') {
    if (change.resolution === 'settles') await refuseNothingToSettle(ports, exceptionId);
    if (await decideElsewhere(ports, exceptionId, change, origin)) return;
    const { state } = await load(ports.store, EXCEPTION_STREAM, exceptionId);
    if (change.transactionId && state?.opened.kind !== 'RETURNED_ELSEWHERE')
      throw new ServiceError('VALIDATION_ERROR', 'Name a transaction only to adopt a RETURNED_ELSEWHERE.');
  }
  await changeCase(ports, exceptionId, { ...change, at: timestamp(clock.now()) }, origin);
};

/**
 * Refuses the resolution `settles` if the payment has nothing to settle. A positive amount needs a charged leg that is neither settled nor rejected.
 * A negative amount needs only a charged payment.
 */
const refuseNothingToSettle = async ({ store, payments }: SettlementPorts, exceptionId: string): Promise<void> => {
  const opened = (await load(store, EXCEPTION_STREAM, exceptionId)).state?.opened;
  // The decider refuses this case with its own message.
  if (!opened || opened.suspenseCents === 0) return;
  const payment = opened.paymentId === null ? null : (await payments.streams.load(opened.paymentId)).payment;
  const stands =
    payment?.phase === 'charged' &&
    (opened.suspenseCents < 0 ||
      payment.legs.some((leg) => (opened.leg === null || leg.leg === opened.leg) && leg.settledBatchId === null && !leg.settlementRejected));
  if (!stands)
    throw new ServiceError(
      'INVALID_STATE',
      'Nothing of the payment stands here as unsettled: resolve the payment first, or resolve this with refund or adopt.',
    );
};

// ------------------------------------------------------------------------------------------------------------------------------------
// The read model.

const TABLE = `
  create table settlement_case (
    exception_id uuid primary key, kind text not null, status text not null, gateway text not null, merchant_account text not null, batch_id text, line int,
    transaction_id text, ref text, payment_id uuid, leg text, gross_cents bigint, expected_cents bigint, suspense_cents bigint not null, sending boolean not null default false, assigned_to text,
    reason text, resolution text, changed_by text, opened_at timestamptz not null, changed_at timestamptz not null)`;
const INDEXES = `create index settlement_case_status on settlement_case (status, opened_at); create index settlement_case_ref on settlement_case (ref);
  create index settlement_case_batch on settlement_case (batch_id, line); create index settlement_case_sending on settlement_case (changed_at) where sending`;

export const exceptionModel: ReadModel = {
  name: 'exceptions',
  shape: 2,
  streamPrefixes: ['exception-'],
  tables: ['settlement_case'],
  createTables: TABLE,
  createIndexes: INDEXES,
  apply: (client, events) => applyExceptions(client, events),
};

const STATUS_AFTER = {
  ExceptionAssigned: 'assigned',
  ExceptionExplained: 'explained',
  ExceptionResolved: 'resolved',
  ExceptionSuperseded: 'superseded',
} as const satisfies Partial<Record<ExceptionEvent['type'], ExceptionStatus>>;

const applyExceptions = async (client: Queryable, events: readonly Recorded[]): Promise<void> => {
  // A large batch may open thousands of exceptions. Those that come one after another are written in one statement.
  let opened: Opened[] = [];
  const writeOpened = async () => {
    if (opened.length > 0) await insertOpened(client, opened);
    opened = [];
  };
  for (const recorded of events) {
    const event = exceptionEvents.read(recorded);
    const exceptionId = exceptionIdOf(recorded);
    if (event.type === 'ExceptionOpened') {
      opened.push({ ...event.data, exceptionId, at: event.at });
      continue;
    }
    await writeOpened();
    if (event.type === 'ExceptionRefundRequested' || event.type === 'ExceptionRefundEnded') {
      // If the money went back, recovery still has to resolve the exception.
      const sending = event.type === 'ExceptionRefundRequested' || event.data.transactionId !== null;
      await client.query('update settlement_case set sending = $2, changed_at = $3 where exception_id = $1', [exceptionId, sending, event.at]);
      continue;
    }
    const status = STATUS_AFTER[event.type];
    const { by } = event.data;
    const to = event.type === 'ExceptionAssigned' ? event.data.to : null;
    const reason = event.type === 'ExceptionAssigned' ? null : event.data.reason;
    const resolution = event.type === 'ExceptionResolved' ? event.data.resolution : null;
    await client.query(
      `update settlement_case set status = $2, assigned_to = coalesce($3, assigned_to), reason = coalesce($4, reason), resolution = coalesce($5, resolution),
         changed_by = $6, changed_at = $7, sending = sending and $2 <> 'resolved' where exception_id = $1`,
      [exceptionId, status, to, reason, resolution, by, event.at],
    );
  }
  await writeOpened();
};

type Opened = OpenedException & { readonly at: string };

const insertOpened = async (client: Queryable, opened: readonly Opened[]): Promise<void> => {
  const column = (name: keyof Opened) => opened.map((one) => one[name]);
  await client.query({
    name: 'exceptions-opened',
    text: `insert into settlement_case (exception_id, kind, status, gateway, merchant_account, batch_id, line, transaction_id, ref, payment_id, leg, gross_cents,
         expected_cents, suspense_cents, opened_at, changed_at)
       select exception_id, kind, 'opened', gateway, merchant_account, batch_id, line, transaction_id, ref, payment_id, leg, gross_cents, expected_cents,
         suspense_cents, at, at
       from unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::int[], $7::text[], $8::text[], $9::uuid[], $10::text[], $11::bigint[],
         $12::bigint[], $13::bigint[], $14::timestamptz[]) as u (exception_id, kind, gateway, merchant_account, batch_id, line, transaction_id, ref, payment_id,
         leg, gross_cents, expected_cents, suspense_cents, at)
       on conflict do nothing`,
    values: [
      column('exceptionId'),
      column('kind'),
      column('gateway'),
      column('merchantAccount'),
      column('batchId'),
      column('line'),
      column('transactionId'),
      column('ref'),
      column('paymentId'),
      column('leg'),
      column('grossCents'),
      column('expectedCents'),
      column('suspenseCents'),
      column('at'),
    ],
  });
};

export interface ExceptionRow extends OpenedException {
  readonly status: ExceptionStatus;
  readonly assignedTo: string | null;
  readonly reason: string | null;
  readonly resolution: Resolution | null;
  readonly changedBy: string | null;
  readonly openedAt: string;
  readonly changedAt: string;
  /** Whole days since the exception was opened. null: it is resolved or superseded. */
  readonly ageDays: number | null;
}

const DAY_MS = 86_400_000;

type StoredException = Record<string, string> & { line: number | null; opened_at: Date; changed_at: Date; in_scope: boolean };

/** Exceptions of one status whose payment is in scope, oldest first. An exception without a payment is in no scope with limits. `status` null: all open ones. `now`: milliseconds since 1970. */
export const exceptionRows = async function* (
  db: Queryable,
  scope: Scope,
  { status, now }: { readonly status: string | null; readonly now: number },
): AsyncGenerator<ExceptionRow, void, void> {
  const stored = everyRow<StoredException>(async (after, limit) => {
    const values: unknown[] = [status === null ? OPEN_STATUSES : [status], after?.opened_at_text, after?.exception_id, limit];
    const inScope = paymentScopeCondition(scope, 'c.payment_id', (value) => `$${values.push(value)}`);
    const { rows } = await db.query<StoredException>(
      `select c.*, c.opened_at::text as opened_at_text, ${inScope} as in_scope from unnest($1::text[]) as s (status) cross join lateral (
         select * from settlement_case where status = s.status
           and ($2::timestamptz is null or (opened_at, exception_id) > ($2, $3::uuid)) order by opened_at, exception_id limit $4) as c
       order by c.opened_at, c.exception_id limit $4`,
      values,
    );
    return rows;
  });
  // A row out of scope is read only for its place: exceptions are few, and have no account of their own.
  for await (const row of stored) if (row.in_scope) yield exceptionRow(row, now);
};

const exceptionRow = (row: StoredException, now: number): ExceptionRow => {
  const cents = (value: string | undefined | null) => (value === null || value === undefined ? null : Number(value));
  return {
    exceptionId: row.exception_id!,
    kind: row.kind as ExceptionKind,
    status: row.status as ExceptionStatus,
    gateway: row.gateway!,
    merchantAccount: row.merchant_account!,
    batchId: row.batch_id ?? null,
    line: row.line,
    transactionId: row.transaction_id ?? null,
    ref: row.ref ?? null,
    paymentId: row.payment_id ?? null,
    leg: (row.leg ?? null) as Leg | null,
    grossCents: cents(row.gross_cents),
    expectedCents: cents(row.expected_cents),
    suspenseCents: Number(row.suspense_cents),
    assignedTo: row.assigned_to ?? null,
    reason: row.reason ?? null,
    resolution: (row.resolution ?? null) as Resolution | null,
    changedBy: row.changed_by ?? null,
    openedAt: row.opened_at.toISOString(),
    changedAt: row.changed_at.toISOString(),
    ageDays: isEnded(row.status as ExceptionStatus) ? null : Math.max(0, Math.floor((now - row.opened_at.getTime()) / DAY_MS)),
  };
};

export interface BatchThen {
  readonly gateway: string;
  readonly merchantAccount: string;
  readonly batchId: string;
  readonly closedAt: string;
  readonly recordedAt: string;
  readonly fundedOn: string | null;
  readonly fundedAt: string | null;
  readonly lineCount: number;
  readonly grossCents: number;
  readonly feeCents: number;
  readonly netCents: number;
  /** Whole days since the batch was closed. null: the batch is funded. */
  readonly inTransitDays: number | null;
}

type StoredBatch = Record<string, string> & Record<'closed_at' | 'recorded_at', Date> & { funded_at: Date | null; line_count: number };

/**
 * Batches that were recorded by `asOf` (null: by now). `fundedAt` and `inTransitDays` are as of that instant. All other fields have their present
 * values.
 */
export const batchesAsOf = async function* (db: Queryable, asOf: string | null, now: number): AsyncGenerator<BatchThen, void, void> {
  const stored = everyRow<StoredBatch>(async (after, limit) => {
    const { rows } = await db.query<StoredBatch>(
      `select *, funded_on::text as funds, closed_at::text as closed_at_text from settlement_batch
       where recorded_at <= $1::timestamptz
         and ($2::timestamptz is null or (closed_at, gateway, merchant_account, batch_id) > ($2, $3::text, $4::text, $5::text))
       order by closed_at, gateway, merchant_account, batch_id limit $6`,
      [asOf ?? 'infinity', after?.closed_at_text, after?.gateway, after?.merchant_account, after?.batch_id, limit],
    );
    return rows;
  });
  for await (const row of stored) yield batchThen(row, asOf, now);
};

const batchThen = (row: StoredBatch, asOf: string | null, now: number): BatchThen => {
  const fundedAt = row.funded_at && (asOf === null || row.funded_at.toISOString() <= asOf) ? row.funded_at.toISOString() : null;
  return {
    gateway: row.gateway!,
    merchantAccount: row.merchant_account!,
    batchId: row.batch_id!,
    closedAt: row.closed_at.toISOString(),
    recordedAt: row.recorded_at.toISOString(),
    fundedOn: row.funds ?? null,
    fundedAt,
    lineCount: row.line_count,
    grossCents: Number(row.gross_cents),
    feeCents: Number(row.fee_cents),
    netCents: Number(row.net_cents),
    inTransitDays: fundedAt === null ? Math.max(0, Math.floor(((asOf === null ? now : Date.parse(asOf)) - row.closed_at.getTime()) / DAY_MS)) : null,
  };
};
