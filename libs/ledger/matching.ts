/**
 * Settlement matching beyond the processor's own interface: files are imported (once per hash; a corrected one supersedes, nothing is overwritten), and whatever
 * does not match becomes an exception with a life of its own: opened, assigned, explained, resolved by a person. The life is events; the table is a read model.
 */
import { basename } from 'node:path';
import { Conflict, type EventStore, type NewEvent, type ReadModel, type Recorded, upcasters } from '#eventstore';
import { fold, type Json, ServiceError, timestamp } from '#kernel';
import {
  type BatchSummary,
  correctBatch,
  type GatewayAccount,
  isRecorded,
  LATE_AFTER_DAYS,
  type Leg,
  type Owner,
  recordBatch,
  recordFunding,
  refuseStaffText,
  type SettlementPorts,
} from '#payments';
import { hashedUuid, type Migration, type Queryable } from '#platform';
import {
  exceptionStream,
  type ExceptionEvent,
  type ExceptionKind,
  type ExceptionStatus,
  type OpenedException,
  type Resolution,
  settlementException,
} from './exception.js';
import { toExceptionEvent } from './journal.js';
import { checkFile, type FileBatch, fileBatches, RefusedFile } from './settlement-file.js';

upcasters.register({ SettlementFileImported: [] });

// ------------------------------------------------------------------------------------------------------------------------------------
// Files.

const fileStream = (sha256: string): string => `settlement-file-${sha256}`;

export interface FileImported {
  readonly sha256: string;
  /** Taken before: nothing was done. */
  readonly repeated: boolean;
  readonly lines: number;
  /** Lines of batches that were recorded before and that this file corrects. */
  readonly corrected: number;
  readonly batches: readonly BatchSummary[];
}

/**
 * Imports a file. It is read to its end first, and refused as a whole with {@link RefusedFile}; after that each batch is recorded or corrected by itself, all of
 * which may be repeated, and the file is recorded last: a crash in between is mended by importing it again.
 */
export const importSettlementFile = async (
  ports: SettlementPorts,
  file: string,
  { merchantAccount, by, onLines }: { readonly merchantAccount: string | null; readonly by: Owner; readonly onLines?: (lines: number) => void },
  signal: AbortSignal,
): Promise<FileImported> => {
  const { store, register, payments } = ports;
  const { sha256, lines } = await checkFile(file);
  const before = await importedFile(store, sha256);
  if (before) return { ...before, repeated: true };
  await register.caughtUp();
  const batches: BatchSummary[] = [];
  let [corrected, done] = [0, 0];
  for await (const batch of fileBatches(file)) {
    signal.throwIfAborted();
    const account = await accountOf(ports, batch, merchantAccount);
    const { batchId, closedAt, fundedOn } = batch;
    const name = { gateway: account.gateway, merchantAccount: account.merchantAccount, batchId };
    if (await isRecorded(store, name)) corrected += await correctBatch(ports, account, { batchId, closedAt, fundedOn }, batch.lines, sha256);
    else await recordBatch(ports, account, { batchId, closedAt, fundedOn, lines: each(batch.lines) }, signal);
    batches.push({ batchId, count: batch.lines.length, amountCents: batch.lines.reduce((sum, { grossCents }) => sum + grossCents, 0) });
    onLines?.((done += batch.lines.length));
  }
  await register.caughtUp();
  await recordFunding(ports);
  const data = { sha256, name: basename(file), lines, corrected, batches: batches as unknown as Json };
  const meta = { recordedAt: timestamp(payments.clock.now()), ...by };
  try {
    await store.append(fileStream(sha256), 'no_stream', [
      { id: hashedUuid('settlement-file', sha256), type: 'SettlementFileImported', v: 1, data, meta },
    ]);
  } catch (error) {
    if (!(error instanceof Conflict)) throw error; // imported by somebody else at the same time: the same file, the same result
  }
  return { sha256, repeated: false, lines, corrected, batches };
};

const importedFile = async (store: EventStore, sha256: string): Promise<Omit<FileImported, 'repeated'> | null> => {
  for await (const { data } of store.read(fileStream(sha256))) {
    const { lines, corrected, batches } = data as unknown as FileImported;
    return { sha256, lines, corrected, batches };
  }
  return null;
};

const each = async function* <T>(items: readonly T[]): AsyncIterable<T> {
  yield* items;
};

const LOOKED_AT_LINES = 200;

/** A file does not name its merchant account: it is the one that was asked for, or that of the recorded batch, or that of most of its transactions. */
const accountOf = async ({ register }: SettlementPorts, { batchId, lines }: FileBatch, asked: string | null): Promise<GatewayAccount> => {
  const accounts = await register.accounts();
  if (asked !== null) {
    const found = accounts.filter((one) => one.merchantAccount === asked);
    if (found.length !== 1) throw new RefusedFile(null, `merchant account ${asked} was never charged here`);
    return found[0]!;
  }
  const recorded = await register.accountOfBatch(batchId);
  if (recorded) return recorded;
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
  if (!most) throw new RefusedFile(null, `batch ${batchId} holds no transaction of ours: name its merchant account`);
  return most[0];
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Opening exceptions.

const DETECTED_PER_ROUND = 500;

/** Opens an exception for every line that did not match, and for every charge that its processor has not settled for days. Safe to repeat. Returns how many. */
export const openExceptions = async (
  { store, payments: { clock } }: SettlementPorts,
  db: Queryable,
  cases: { caughtUp(): Promise<void> },
): Promise<number> => {
  await cases.caughtUp();
  const now = timestamp(clock.now());
  const { rows: lines } = await db.query<Record<string, string> & { line: number }>(
    `select * from settlement_exception d where not exists (select from settlement_case c where c.exception_id = d.exception_id) order by recorded_at limit $1`,
    [DETECTED_PER_ROUND],
  );
  const { rows: waiting } = await db.query<Record<string, string>>(
    `select t.*, b.closed_at from gateway_transaction t
     left join lateral (select max(closed_at) as closed_at from settlement_batch b where b.gateway = t.gateway and b.merchant_account = t.merchant_account) b on true
     where t.settled_batch_id is null and not t.rejected and t.moved_at < $1::timestamptz - $2::int * interval '1 day' and t.amount_cents > t.voided_cents
       and t.op = 'charge' and not exists (select from settlement_case c where c.ref = t.ref and c.kind = 'MISSING_AT_GATEWAY')
     order by t.moved_at limit $3`,
    [now, LATE_AFTER_DAYS, DETECTED_PER_ROUND],
  );
  const opened: OpenedException[] = [
    ...lines.map((row) => ({
      exceptionId: row.exception_id!,
      kind: row.kind as ExceptionKind,
      gateway: row.gateway!,
      merchantAccount: row.merchant_account!,
      batchId: row.batch_id!,
      line: row.line < 0 ? null : row.line,
      transactionId: row.transaction_id === '' ? null : row.transaction_id!,
      ref: row.ref ?? null,
      paymentId: row.payment_id ?? null,
      leg: (row.leg ?? null) as Leg | null,
      grossCents: Number(row.gross_cents),
      expectedCents: row.expected_cents === null ? null : Number(row.expected_cents),
      suspenseCents: Number(row.suspense_cents),
    })),
    ...waiting.map((row) => ({
      exceptionId: hashedUuid('settlement-exception', 'MISSING_AT_GATEWAY', row.ref!),
      kind: 'MISSING_AT_GATEWAY' as const,
      gateway: row.gateway!,
      merchantAccount: row.merchant_account!,
      batchId: null,
      line: null,
      transactionId: row.transaction_id!,
      ref: row.ref!,
      paymentId: row.payment_id!,
      leg: row.leg as Leg,
      grossCents: null,
      expectedCents: Number(row.amount_cents) - Number(row.voided_cents),
      suspenseCents: 0,
    })),
  ];
  for (const one of opened) {
    const [event] = settlementException.decide(null, { type: 'Open', at: now, opened: one });
    await store
      .append(exceptionStream(one.exceptionId), 'no_stream', [newEvent(hashedUuid('exception-opened', one.exceptionId), event!, SYSTEM)])
      .catch((error: unknown) => {
        if (!(error instanceof Conflict)) throw error; // opened by another worker
      });
  }
  if (opened.length > 0) await cases.caughtUp();
  return opened.length;
};

const SYSTEM: Owner = { actor: { type: 'system', id: 'settlement' }, correlationId: 'settlement' };

const newEvent = (id: string, { type, at, data }: ExceptionEvent, { actor, correlationId }: Owner): NewEvent => ({
  id,
  type,
  v: 1,
  data: data as unknown as Json,
  meta: { recordedAt: at, actor, correlationId },
});

// ------------------------------------------------------------------------------------------------------------------------------------
// What people do with them.

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
    };

const MAX_ROUNDS = 5;

/** Refuses with VALIDATION_ERROR (unknown exception 404, bad words) and INVALID_STATE. */
export const changeException = async (
  { store, payments: { clock, ids } }: SettlementPorts,
  exceptionId: string,
  change: ExceptionChange,
  owner: Owner,
): Promise<void> => {
  if (change.type === 'Assign') refuseStaffText('to', change.to, 200);
  else refuseStaffText('reason', change.reason);
  for (let round = 1; ; round++) {
    const events: Recorded[] = [];
    for await (const event of store.read(exceptionStream(exceptionId))) events.push(event);
    const state = fold(settlementException, events.map(toExceptionEvent));
    const decided = settlementException.decide(state, { ...change, at: timestamp(clock.now()) });
    try {
      await store.append(
        exceptionStream(exceptionId),
        events.at(-1)!.revision,
        decided.map((event) => newEvent(ids.uuid(), event, owner)),
      );
      return;
    } catch (error) {
      if (!(error instanceof Conflict)) throw error;
      if (round >= MAX_ROUNDS) throw new ServiceError('INVALID_STATE', 'The exception is being changed by somebody else; try again.');
    }
  }
};

// ------------------------------------------------------------------------------------------------------------------------------------
// The read model.

/** Name of the projection and of its checkpoint. */
export const EXCEPTIONS = 'exceptions';
const TABLE = `
  create table settlement_case (
    exception_id uuid primary key, kind text not null, status text not null, gateway text not null, merchant_account text not null, batch_id text, line int,
    transaction_id text, ref text, payment_id uuid, leg text, gross_cents bigint, expected_cents bigint, suspense_cents bigint not null, assigned_to text,
    reason text, resolution text, changed_by text, opened_at timestamptz not null, changed_at timestamptz not null)`;
const INDEXES = `create index settlement_case_status on settlement_case (status, opened_at); create index settlement_case_ref on settlement_case (ref)`;

export const exceptionMigration: Migration = { name: '0104-settlement-case', sql: `${TABLE}; ${INDEXES}` };

export const exceptionModel: ReadModel = {
  projection: { name: EXCEPTIONS, streamPrefixes: ['exception-'], apply: (client, events) => applyExceptions(client, events) },
  tables: ['settlement_case'],
  createTables: TABLE,
  createIndexes: INDEXES,
};

const applyExceptions = async (client: Queryable, events: readonly Recorded[]): Promise<void> => {
  for (const recorded of events) {
    const event = toExceptionEvent(recorded);
    const exceptionId = recorded.stream.slice('exception-'.length);
    if (event.type === 'ExceptionOpened') {
      const { kind, gateway, merchantAccount, batchId, line, transactionId, ref, paymentId, leg, grossCents, expectedCents, suspenseCents } =
        event.data;
      await client.query(
        `insert into settlement_case (exception_id, kind, status, gateway, merchant_account, batch_id, line, transaction_id, ref, payment_id, leg, gross_cents,
           expected_cents, suspense_cents, opened_at, changed_at)
         values ($1, $2, 'opened', $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $14) on conflict do nothing`,
        [
          exceptionId,
          kind,
          gateway,
          merchantAccount,
          batchId,
          line,
          transactionId,
          ref,
          paymentId,
          leg,
          grossCents,
          expectedCents,
          suspenseCents,
          event.at,
        ],
      );
      continue;
    }
    const status: ExceptionStatus = event.type === 'ExceptionAssigned' ? 'assigned' : event.type === 'ExceptionExplained' ? 'explained' : 'resolved';
    const { by } = event.data;
    const to = event.type === 'ExceptionAssigned' ? event.data.to : null;
    const reason = event.type === 'ExceptionAssigned' ? null : event.data.reason;
    const resolution = event.type === 'ExceptionResolved' ? event.data.resolution : null;
    await client.query(
      `update settlement_case set status = $2, assigned_to = coalesce($3, assigned_to), reason = coalesce($4, reason), resolution = coalesce($5, resolution),
         changed_by = $6, changed_at = $7 where exception_id = $1`,
      [exceptionId, status, to, reason, resolution, by, event.at],
    );
  }
};

export interface ExceptionRow extends OpenedException {
  readonly status: ExceptionStatus;
  readonly assignedTo: string | null;
  readonly reason: string | null;
  readonly resolution: Resolution | null;
  readonly changedBy: string | null;
  readonly openedAt: string;
  readonly changedAt: string;
  /** Whole days since it was opened, while it is not resolved. */
  readonly ageDays: number | null;
}

const MAX_ROWS = 10_000;
const DAY_MS = 86_400_000;

/** Exceptions, oldest first; open ones unless a status is named. `now`: milliseconds since the epoch. */
export const exceptionRows = async (
  db: Queryable,
  { status, now }: { readonly status: string | null; readonly now: number },
): Promise<ExceptionRow[]> => {
  const { rows } = await db.query<Record<string, string> & { line: number | null; opened_at: Date; changed_at: Date }>(
    `select * from settlement_case where case when $1::text is null then status <> 'resolved' else status = $1 end order by opened_at, exception_id limit $2`,
    [status, MAX_ROWS],
  );
  const cents = (value: string | undefined | null) => (value === null || value === undefined ? null : Number(value));
  return rows.map((row) => ({
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
    ageDays: row.status === 'resolved' ? null : Math.max(0, Math.floor((now - row.opened_at.getTime()) / DAY_MS)),
  }));
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
  /** Whole days that its money has been on the way: closed and not funded. */
  readonly inTransitDays: number | null;
}

/** Batches that were known at an instant (null: now), with what was known of their funding; `now` counts the days in transit. */
export const batchesAsOf = async (db: Queryable, asOf: string | null, now: number): Promise<BatchThen[]> => {
  const { rows } = await db.query<
    Record<string, string> & Record<'closed_at' | 'recorded_at', Date> & { funded_at: Date | null; line_count: number }
  >(
    `select *, funded_on::text as funds from settlement_batch where recorded_at <= $1::timestamptz order by closed_at, gateway, merchant_account, batch_id limit $2`,
    [asOf ?? 'infinity', MAX_ROWS],
  );
  return rows.map((row) => {
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
      inTransitDays:
        fundedAt === null ? Math.max(0, Math.floor(((asOf === null ? now : Date.parse(asOf)) - row.closed_at.getTime()) / DAY_MS)) : null,
    };
  });
};
