/**
 * The register: a read model over the streams of payments and settlement, in which other code finds payments. It holds gateway transactions with
 * their payments, gateway accounts, disputes, and recorded batches with their exceptions.
 */
import type { ReadModel, Recorded } from '#eventstore';
import type { Cents } from '#kernel';
import { collect, everyRow, hashedUuid, type Pool, type Queryable } from '#platform';
import {
  type ApprovedCharge,
  type Charge,
  type Dispute,
  type DisputeStatus,
  type GatewayAccount,
  gatewayRef,
  lateAfterDays,
  type Leg,
  LEGS,
  type PaymentEvent,
  paymentEvents,
  paymentIdOf,
  type PaymentTerms,
  undoneBy,
  undoneByRequest,
  type UndoneCharge,
} from '#payments';
import { exceptionEvents, exceptionIdOf, settlementEvents } from './events.js';
import type { ExceptionEvent, ExceptionKind } from './exception.js';
import { isSettledLine, isSettlementStream, type LineCorrection, type RecordedLine, type SettlementEvent, unexplainedCents } from './batch.js';

// The columns of gateway_transaction stand in the order that leaves no gaps between them: a store holds two rows of it for each payment.
const TABLES = `
  create table gateway_account (
    gateway text not null, merchant_account text not null, credentials_ref text not null, environment text not null,
    primary key (gateway, merchant_account));
  create table gateway_transaction (
    amount_cents bigint not null, voided_cents bigint not null default 0, moved_at timestamptz, payment_id uuid, attempt_id uuid not null,
    ref text not null, gateway text not null, merchant_account text not null, leg text not null, op text not null, transaction_id text,
    settled_batch_id text, exception_id uuid, rejected boolean not null default false, auth_code text, brand text, last4 text, avs text, cvv text);
  create table dispute (
    dispute_id uuid not null primary key, payment_id uuid not null, status text not null, stage text not null, reason_code text not null,
    disputed_amount_cents bigint not null, opened_on date not null, due_date date not null, updated_at timestamptz not null);
  create table settlement_batch (
    gateway text not null, merchant_account text not null, batch_id text not null, closed_at timestamptz not null, funded_on date, line_count int not null,
    gross_cents bigint not null, fee_cents bigint not null, net_cents bigint not null, listed_position text collate "C", funded boolean not null,
    recorded_at timestamptz not null, funded_at timestamptz, funded_cents bigint,
    primary key (gateway, merchant_account, batch_id));
  create table settlement_begun (
    batch_id text not null, gateway text not null, merchant_account text not null, primary key (batch_id, gateway, merchant_account));
  create table settlement_exception (
    exception_id uuid not null primary key, gateway text not null, merchant_account text not null, batch_id text not null, line int not null,
    kind text not null, type text not null, transaction_id text not null, ref text, payment_id uuid, leg text, gross_cents bigint not null,
    expected_cents bigint, suspense_cents bigint not null, recorded_at timestamptz not null, position text collate "C" not null,
    superseded boolean not null default false, opened boolean not null default false, ended boolean not null default false,
    resolved_cents bigint not null default 0, settles boolean not null default false)`;
// The worker looks every 20 s for what it must open or supersede. The last three indexes hold only that, so an idle round reads nothing.
const INDEXES = `
  alter table gateway_transaction add constraint gateway_transaction_pkey primary key (ref);
  create index gateway_transaction_id on gateway_transaction (transaction_id) where transaction_id is not null;
  create index gateway_transaction_waiting on gateway_transaction (moved_at)
    where settled_batch_id is null and not rejected and moved_at is not null and amount_cents > voided_cents;
  create index gateway_transaction_moved on gateway_transaction (moved_at) where moved_at is not null;
  create index gateway_transaction_settled on gateway_transaction (settled_batch_id) where settled_batch_id is not null;
  create index gateway_transaction_sent on gateway_transaction (exception_id) where exception_id is not null;
  create index gateway_transaction_payment on gateway_transaction (payment_id);
  create index settlement_batch_listed on settlement_batch (gateway, merchant_account, listed_position) where listed_position is not null;
  create index settlement_batch_closed on settlement_batch (closed_at, gateway, merchant_account, batch_id);
  create index settlement_batch_funding on settlement_batch (funded_on) where not funded;
  create index dispute_due on dispute (due_date, dispute_id);
  create index dispute_open on dispute (due_date, dispute_id) where status <> 'recovered';
  create index dispute_recovered on dispute (updated_at) where status = 'recovered';
  create index settlement_exception_payment on settlement_exception (payment_id);
  create index settlement_exception_batch on settlement_exception (batch_id, line);
  create index settlement_exception_unopened on settlement_exception (recorded_at) where not opened and not superseded;
  create index settlement_exception_ending on settlement_exception (exception_id) where superseded and opened and not ended;
  create index settlement_exception_corrected on settlement_exception (exception_id) where superseded and resolved_cents <> 0;
  create index settlement_exception_settles on settlement_exception (payment_id) where settles;
  create index settlement_exception_transaction on settlement_exception (transaction_id);
  create index settlement_exception_unknown on settlement_exception (gateway, merchant_account)
    where kind = 'MISSING_HERE' and type = 'refund' and ref is null and payment_id is null and not superseded and not ended;
  create index settlement_exception_short on settlement_exception (exception_id)
    where kind = 'AMOUNT_MISMATCH' and type = 'sale' and not superseded and expected_cents > gross_cents`;

/** The register collects events for this long before it writes. Call `caughtUp` for the newest state. */
const GATHER_MS = 1_000;

export const paymentRegisterModel: ReadModel = {
  name: 'payment-register',
  shape: 10,
  streamPrefixes: ['payment-', 'settlement-', 'exception-'],
  gatherMs: GATHER_MS,
  tables: ['gateway_account', 'gateway_transaction', 'dispute', 'settlement_batch', 'settlement_begun', 'settlement_exception'],
  createTables: TABLES,
  createIndexes: INDEXES,
  apply: (client, events) => applyRegister(client, events),
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Writing: a batch of events becomes a few statements. Some statements add to stored values. The checkpoint guarantees that each event is applied
// once.

interface TransactionRow {
  readonly ref: string;
  readonly account: GatewayAccount;
  readonly paymentId: string;
  readonly leg: Leg;
  readonly op: 'charge' | 'refund';
  readonly attemptId: string;
  readonly amountCents: Cents;
  transactionId: string | null;
  /** When the processor moved the money. null: it has not. */
  movedAt: string | null;
  card: Pick<PaymentTerms['paymentMethod'], 'brand' | 'last4'>;
  approval: Approval | null;
}

/** The processor's approval of a charge. `authCode` is empty if staff resolved the payment, since they know none. */
type Approval = Pick<Charge['legs'][number], 'authCode' | 'avs' | 'cvv'>;

/** A transaction id for a row that is already in the table. */
interface LateId {
  readonly paymentId: string;
  readonly leg: Leg;
  /** null: the id belongs to the leg's charge. */
  readonly refundAttemptId: string | null;
  readonly transactionId: string;
  readonly at: string;
  /** null: the id belongs to a refund. */
  readonly approval: Approval | null;
  /** The card behind a token. Absent: the row has the card, or nobody knows it. */
  readonly card?: TransactionRow['card'] | undefined;
}

/** An attempt that is unknown or fenced. If it is a charge, a refund may undo it, and a batch may list that refund before our log names it. */
interface UnknownAttempt {
  readonly paymentId: string;
  readonly attemptId: string;
}

/** A charge of a payment that was never charged, and the refund that undid it. Both settle. */
interface UndoneRow extends UndoneCharge {
  readonly paymentId: string;
  readonly attemptId: string;
  readonly at: string;
}

/** A reduction of a charge: voided cents, which never settle, or a rejection by the processor. */
interface Lessened {
  readonly paymentId: string;
  readonly leg: Leg;
  readonly voidedCents: Cents;
  readonly rejected: boolean;
}

const applyRegister = async (client: Queryable, events: readonly Recorded[]): Promise<void> => {
  const rows = new Map<string, TransactionRow>();
  const lateIds: LateId[] = [];
  const disputes = new Map<string, Dispute & { paymentId: string; at: string }>();
  const refunds: { paymentId: string; event: PaymentEvent & { type: 'RefundRequested' } }[] = [];
  const settled: { recorded: Recorded; event: SettlementEvent | ExceptionEvent }[] = [];
  const nameOf = (paymentId: string, leg: Leg, attemptId: string | null) => `${paymentId} ${leg} ${attemptId ?? ''}`;
  const identify = (late: LateId) => {
    const row = rows.get(nameOf(late.paymentId, late.leg, late.refundAttemptId));
    if (row) [row.transactionId, row.movedAt, row.approval, row.card] = [late.transactionId, late.at, late.approval, late.card ?? row.card];
    else lateIds.push(late);
  };
  const lessened: Lessened[] = [];
  const elsewhere: { paymentId: string; recorded: Recorded; event: PaymentEvent & { type: 'ReturnedElsewhere' } }[] = [];
  const unknown: UnknownAttempt[] = [];
  const undone: UndoneRow[] = [];
  const undo = (paymentId: string, attemptId: string, at: string, charges: readonly UndoneCharge[]) => {
    for (const charge of charges) {
      const { leg, chargeTransactionId: transactionId } = charge;
      identify({ paymentId, leg, refundAttemptId: null, transactionId, at, approval: null });
      undone.push({ ...charge, paymentId, attemptId, at });
    }
  };

  for (const recorded of events) {
    if (isSettlementStream(recorded.stream)) {
      settled.push({ recorded, event: settlementEvents.read(recorded) });
      continue;
    }
    if (recorded.stream.startsWith('exception-')) {
      settled.push({ recorded, event: exceptionEvents.read(recorded) });
      continue;
    }
    // Skip streams of imported files, which have the same prefix as batches.
    if (!recorded.stream.startsWith('payment-')) continue;
    const paymentId = paymentIdOf(recorded.stream);
    const event = paymentEvents.read(recorded);
    switch (event.type) {
      case 'PaymentInitiated':
        for (const { leg, account, references, principalCents, feeCents } of event.data.legs)
          rows.set(nameOf(paymentId, leg, null), {
            ref: references.charge,
            account,
            paymentId,
            leg,
            op: 'charge',
            attemptId: event.data.attemptId,
            amountCents: principalCents + feeCents,
            transactionId: null,
            movedAt: null,
            card: event.data.paymentMethod,
            approval: null,
          });
        break;
      case 'PaymentCreated':
      case 'PaymentResolved': {
        const charge: ApprovedCharge | null = event.type === 'PaymentCreated' ? event.data : event.data.charge;
        for (const { leg, transactionId, card, ...approval } of charge?.legs ?? [])
          identify({ paymentId, leg, refundAttemptId: null, transactionId, at: event.at, approval, card });
        break;
      }
      case 'PaymentOutcomeUnknown':
      case 'PaymentLost':
      case 'ReconciliationStarted':
        unknown.push({ paymentId, attemptId: event.data.attemptId });
        break;
      case 'RefundRequested':
        refunds.push({ paymentId, event });
        break;
      case 'PaymentRefunded':
      case 'FeeRefunded': {
        const { leg, attemptId, transactionId } = event.data;
        if (leg !== null && transactionId !== null)
          lateIds.push({ paymentId, leg, refundAttemptId: attemptId, transactionId, at: event.at, approval: null });
        break;
      }
      case 'PaymentDeclined':
      case 'PaymentFailed':
        undo(paymentId, event.data.attemptId, event.at, undoneByRequest(event.data));
        break;
      case 'PaymentVoided':
        if (event.data.undone) undo(paymentId, event.data.attemptId, event.at, undoneBy(event.data));
        else if (event.data.leg !== null)
          lessened.push({ paymentId, leg: event.data.leg, voidedCents: event.data.principalCents + event.data.feeCents, rejected: false });
        break;
      case 'ReturnedElsewhere':
        elsewhere.push({ paymentId, recorded, event });
        break;
      case 'SettlementRejected':
        lessened.push({ paymentId, leg: event.data.leg, voidedCents: 0, rejected: true });
        break;
      case 'PaymentDisputed':
        disputes.set(event.data.disputeId, { ...event.data, paymentId, at: event.at });
        break;
      default:
        break; // Other events change no transaction.
    }
  }
  await writeTransactions(client, [...rows.values()]);
  await writeRefunds(client, refunds);
  await writeTransactionIds(client, lateIds);
  await writeReversals(client, unknown);
  await writeUndone(client, undone);
  await writeLessened(client, lessened);
  await writeDisputes(client, [...disputes.values()]);
  for (const one of elsewhere) await writeElsewhere(client, one);
  // Exceptions are opened and ended between settlement events, so all of them keep the order of the log.
  // A large batch may open thousands of exceptions. Those that come one after another are noted in one statement.
  let opened: string[] = [];
  const noteOpened = async () => {
    if (opened.length > 0) await writeOpened(client, opened);
    opened = [];
  };
  for (const { recorded, event } of settled) {
    if (event.type === 'ExceptionOpened') {
      opened.push(exceptionIdOf(recorded));
      continue;
    }
    await noteOpened();
    if (isExceptionEvent(event)) await writeProgress(client, recorded, event);
    else await writeSettlement(client, recorded, event);
  }
  await noteOpened();
};

const isExceptionEvent = (event: SettlementEvent | ExceptionEvent): event is ExceptionEvent => event.type.startsWith('Exception');

/** Marks exceptions of lines as opened. An exception of a missing transaction has no row here. */
const writeOpened = async (client: Queryable, exceptionIds: readonly string[]): Promise<void> => {
  await client.query({
    name: 'register-exceptions-opened',
    text: 'update settlement_exception set opened = true where exception_id = any($1::uuid[])',
    values: [exceptionIds],
  });
};

/** Notes how an exception ended, or the refund that staff send for it. */
const writeProgress = async (client: Queryable, recorded: Recorded, event: ExceptionEvent): Promise<void> => {
  if (event.type === 'ExceptionRefundRequested' || event.type === 'ExceptionRefundEnded')
    return writeSentRefund(client, exceptionIdOf(recorded), event);
  if (event.type !== 'ExceptionResolved' && event.type !== 'ExceptionSuperseded') return;
  const [resolvedCents, settles] = event.type === 'ExceptionResolved' ? [event.data.suspenseCents, event.data.resolution === 'settles'] : [0, false];
  await client.query({
    name: 'register-exception-progress',
    text: 'update settlement_exception set opened = true, ended = true, resolved_cents = $2, settles = $3 where exception_id = $1',
    values: [exceptionIdOf(recorded), resolvedCents, settles],
  });
};

/** A refund that staff send for an exception is a transaction of ours, so its own line in a batch finds it. */
const writeSentRefund = async (
  client: Queryable,
  exceptionId: string,
  event: Extract<ExceptionEvent, { type: 'ExceptionRefundRequested' | 'ExceptionRefundEnded' }>,
): Promise<void> => {
  if (event.type === 'ExceptionRefundRequested') {
    const { ref, account, paymentId, leg, attemptId, amountCents, last4 } = event.data;
    // If the refund belongs to a payment, the card is that of its charge. Otherwise staff may have given the last four digits.
    await client.query(
      `insert into gateway_transaction (ref, gateway, merchant_account, payment_id, leg, op, attempt_id, amount_cents, exception_id, brand, last4)
       select u.ref, u.gateway, u.merchant_account, u.payment_id, u.leg, 'refund', u.attempt_id, u.amount_cents, u.exception_id, c.brand, coalesce(c.last4, u.last4)
       from (values ($1, $2, $3, $4::uuid, $5, $6::uuid, $7::bigint, $8::uuid, $9)) as u (ref, gateway, merchant_account, payment_id, leg, attempt_id, amount_cents, exception_id, last4)
       left join gateway_transaction c on c.payment_id = u.payment_id and c.leg = u.leg and c.op = 'charge'
       on conflict (ref) do nothing`,
      [ref, account.gateway, account.merchantAccount, paymentId, leg, attemptId, amountCents, exceptionId, last4],
    );
  } else if (event.data.transactionId !== null)
    await client.query('update gateway_transaction set transaction_id = $3, moved_at = $4 where exception_id = $1 and attempt_id = $2', [
      exceptionId,
      event.data.attemptId,
      event.data.transactionId,
      event.at,
    ]);
};

const writeTransactions = async (client: Queryable, rows: readonly TransactionRow[]): Promise<void> => {
  if (rows.length === 0) return;
  await client.query({
    name: 'register-accounts',
    text: `
      insert into gateway_account (gateway, merchant_account, credentials_ref, environment)
      select distinct on (gateway, merchant_account) * from unnest($1::text[], $2::text[], $3::text[], $4::text[])
        as u (gateway, merchant_account, credentials_ref, environment)
      where not exists (select from gateway_account a where a.gateway = u.gateway and a.merchant_account = u.merchant_account)
      on conflict do nothing`,
    values: [
      rows.map(({ account }) => account.gateway),
      rows.map(({ account }) => account.merchantAccount),
      rows.map(({ account }) => account.credentialsRef),
      rows.map(({ account }) => account.environment),
    ],
  });
  await client.query({
    name: 'register-transactions',
    text: `
      insert into gateway_transaction (ref, gateway, merchant_account, payment_id, leg, op, attempt_id, amount_cents, transaction_id, moved_at,
        brand, last4, auth_code, avs, cvv)
      select * from unnest($1::text[], $2::text[], $3::text[], $4::uuid[], $5::text[], $6::text[], $7::uuid[], $8::bigint[], $9::text[], $10::timestamptz[],
        $11::text[], $12::text[], $13::text[], $14::text[], $15::text[])
      on conflict (ref) do nothing`,
    values: [
      rows.map(({ ref }) => ref),
      rows.map(({ account }) => account.gateway),
      rows.map(({ account }) => account.merchantAccount),
      rows.map(({ paymentId }) => paymentId),
      rows.map(({ leg }) => leg),
      rows.map(({ op }) => op),
      rows.map(({ attemptId }) => attemptId),
      rows.map(({ amountCents }) => amountCents),
      rows.map(({ transactionId }) => transactionId),
      rows.map(({ movedAt }) => movedAt),
      rows.map(({ card }) => card.brand),
      rows.map(({ card }) => card.last4),
      ...approvalColumns(rows),
    ],
  });
};

/** The columns auth_code, avs and cvv of rows. */
const approvalColumns = (rows: readonly { readonly approval: Approval | null }[]): (string | null)[][] => [
  rows.map(({ approval }) => approval?.authCode || null),
  rows.map(({ approval }) => approval?.avs ?? null),
  rows.map(({ approval }) => approval?.cvv ?? null),
];

/** A refund goes through the account that charged the leg (C68). The row of the charge names this account. */
const writeRefunds = async (
  client: Queryable,
  refunds: readonly { paymentId: string; event: PaymentEvent & { type: 'RefundRequested' } }[],
): Promise<void> => {
  const moves = refunds.flatMap(({ paymentId, event }) => event.data.legs.map((move) => ({ paymentId, attemptId: event.data.attemptId, ...move })));
  if (moves.length === 0) return;
  await client.query({
    name: 'register-refunds',
    text: `
      insert into gateway_transaction (ref, gateway, merchant_account, payment_id, leg, op, attempt_id, amount_cents, brand, last4)
      select u.ref, c.gateway, c.merchant_account, u.payment_id, u.leg, 'refund', u.attempt_id, u.amount_cents, c.brand, c.last4
      from unnest($1::text[], $2::uuid[], $3::text[], $4::uuid[], $5::bigint[]) as u (ref, payment_id, leg, attempt_id, amount_cents)
      join gateway_transaction c on c.payment_id = u.payment_id and c.leg = u.leg and c.op = 'charge'
      on conflict (ref) do nothing`,
    values: [
      moves.map(({ references }) => references.refund),
      moves.map(({ paymentId }) => paymentId),
      moves.map(({ leg }) => leg),
      moves.map(({ attemptId }) => attemptId),
      moves.map(({ principalCents, feeCents }) => principalCents + feeCents),
    ],
  });
};

const writeTransactionIds = async (client: Queryable, ids: readonly LateId[]): Promise<void> => {
  if (ids.length === 0) return;
  await client.query({
    name: 'register-transaction-ids',
    text: `
      update gateway_transaction g
      set transaction_id = u.transaction_id, moved_at = u.moved_at, auth_code = u.auth_code, avs = u.avs, cvv = u.cvv,
        brand = coalesce(u.brand, g.brand), last4 = coalesce(u.last4, g.last4)
      from unnest($1::uuid[], $2::text[], $3::uuid[], $4::text[], $5::timestamptz[], $6::text[], $7::text[], $8::text[], $9::text[], $10::text[])
        as u (payment_id, leg, refund_attempt_id, transaction_id, moved_at, auth_code, avs, cvv, brand, last4)
      where g.payment_id = u.payment_id and g.leg = u.leg
        and case when u.refund_attempt_id is null then g.op = 'charge' else g.op = 'refund' and g.attempt_id = u.refund_attempt_id end`,
    values: [
      ids.map(({ paymentId }) => paymentId),
      ids.map(({ leg }) => leg),
      ids.map(({ refundAttemptId }) => refundAttemptId),
      ids.map(({ transactionId }) => transactionId),
      ids.map(({ at }) => at),
      ...approvalColumns(ids),
      ids.map(({ card }) => card?.brand ?? null),
      ids.map(({ card }) => card?.last4 ?? null),
    ],
  });
};

/**
 * Adds a refund row for each reference that can undo a charge of these attempts, so that a refund in a batch finds its payment. Until the log names the
 * refund, the row has no transaction and is never reported as missing. The attempt of a refund or a void has no charge, so it gets no row.
 */
const writeReversals = async (client: Queryable, attempts: readonly UnknownAttempt[]): Promise<void> => {
  const reversals = attempts.flatMap(({ paymentId, attemptId }) =>
    LEGS.map((leg) => ({ paymentId, attemptId, leg, ref: gatewayRef(attemptId, leg, 'reversal') })),
  );
  if (reversals.length === 0) return;
  await client.query({
    name: 'register-reversals',
    text: `
      insert into gateway_transaction (ref, gateway, merchant_account, payment_id, leg, op, attempt_id, amount_cents)
      select u.ref, c.gateway, c.merchant_account, c.payment_id, c.leg, 'refund', c.attempt_id, c.amount_cents
      from unnest($1::text[], $2::uuid[], $3::text[], $4::uuid[]) as u (ref, payment_id, leg, attempt_id)
      join gateway_transaction c on c.payment_id = u.payment_id and c.leg = u.leg and c.op = 'charge' and c.attempt_id = u.attempt_id
      on conflict (ref) do nothing`,
    values: [
      reversals.map(({ ref }) => ref),
      reversals.map(({ paymentId }) => paymentId),
      reversals.map(({ leg }) => leg),
      reversals.map(({ attemptId }) => attemptId),
    ],
  });
};

/** The refund of an undone charge has the reference of the charge's reversal. */
const writeUndone = async (client: Queryable, rows: readonly UndoneRow[]): Promise<void> => {
  for (const { paymentId, leg, attemptId, amountCents, refundTransactionId, at } of rows)
    await client.query({
      name: 'register-undone',
      text: `
        insert into gateway_transaction (ref, gateway, merchant_account, payment_id, leg, op, attempt_id, amount_cents, transaction_id, moved_at, brand, last4)
        select $3, gateway, merchant_account, payment_id, leg, 'refund', attempt_id, $4, $5, $6, brand, last4
        from gateway_transaction where payment_id = $1 and leg = $2 and op = 'charge'
        on conflict (ref) do update set amount_cents = excluded.amount_cents, transaction_id = excluded.transaction_id, moved_at = excluded.moved_at,
          brand = excluded.brand, last4 = excluded.last4`,
      values: [paymentId, leg, gatewayRef(attemptId, leg, 'reversal'), amountCents, refundTransactionId, at],
    });
};

const writeLessened = async (client: Queryable, rows: readonly Lessened[]): Promise<void> => {
  for (const { paymentId, leg, voidedCents, rejected } of rows)
    await client.query({
      name: 'register-lessened',
      text: `update gateway_transaction set voided_cents = voided_cents + $3, rejected = rejected or $4 where payment_id = $1 and leg = $2 and op = 'charge'`,
      values: [paymentId, leg, voidedCents, rejected],
    });
};

/**
 * A return that was made elsewhere is an exception until staff have decided. Its type is that of the line which the processor has for it: a voided
 * charge has none, so it is not reported as missing.
 */
const writeElsewhere = async (
  client: Queryable,
  { paymentId, recorded, event }: { paymentId: string; recorded: Recorded; event: PaymentEvent & { type: 'ReturnedElsewhere' } },
): Promise<void> => {
  const { returnId, leg, transactionId, status } = event.data;
  await client.query(
    `insert into settlement_exception (exception_id, gateway, merchant_account, batch_id, line, kind, type, transaction_id, payment_id, leg, gross_cents,
       suspense_cents, recorded_at, position)
     select $1, gateway, merchant_account, '', -1, 'RETURNED_ELSEWHERE', case when transaction_id = $4 then 'sale' else 'refund' end, coalesce($4, ''),
       payment_id, leg, 0, 0, $5, $6 from gateway_transaction where payment_id = $2 and leg = $3 and op = 'charge'
     on conflict (exception_id) do update set transaction_id = excluded.transaction_id, type = excluded.type, superseded = $7`,
    [returnId, paymentId, leg, transactionId, recorded.meta.recordedAt, recorded.position, status !== 'found'],
  );
};

const writeDisputes = async (client: Queryable, disputes: readonly (Dispute & { paymentId: string; at: string })[]): Promise<void> => {
  for (const { disputeId, paymentId, status, stage, reasonCode, disputedAmountCents, openedOn, dueDate, at } of disputes)
    await client.query(
      `insert into dispute (dispute_id, payment_id, status, stage, reason_code, disputed_amount_cents, opened_on, due_date, updated_at)
       values ($1, $2, $3, $4, $5, $6, $7, $8, $9)
       on conflict (dispute_id) do update set status = excluded.status, stage = excluded.stage,
         disputed_amount_cents = excluded.disputed_amount_cents, updated_at = excluded.updated_at`,
      [disputeId, paymentId, status, stage, reasonCode, disputedAmountCents, openedOn, dueDate, at],
    );
};

const writeSettlement = async (client: Queryable, recorded: Recorded, event: SettlementEvent): Promise<void> => {
  const { stream, position, meta } = recorded;
  const { gateway, merchantAccount, batchId } = event.data;
  const key = [gateway, merchantAccount, batchId];
  const at = meta.recordedAt;
  switch (event.type) {
    case 'SettlementLinesRecorded':
      await client.query('insert into settlement_begun (batch_id, gateway, merchant_account) values ($3, $1, $2) on conflict do nothing', key);
      return writeLines(client, { stream, key, closedAt: event.data.closedAt, position, at }, event.data.lines);
    case 'SettlementLinesCorrected': {
      const { corrections, closedAt, fundedOn } = event.data;
      const of = { stream: `${stream}@${recorded.revision}`, key, closedAt, position, at };
      await takeBackLines(client, of, corrections);
      const after = corrections.flatMap((correction) => correction.after ?? []);
      await writeLines(client, of, after);
      const change = (part: 'grossCents' | 'feeCents' | 'netCents') =>
        corrections.reduce((sum, one) => sum + (one.after?.accepted ? one.after[part] : 0) - (one.before?.accepted ? one.before[part] : 0), 0);
      const { rows } = await client.query<{ net_cents: string; funded_cents: string | null }>(
        `update settlement_batch set gross_cents = gross_cents + $4, fee_cents = fee_cents + $5, net_cents = net_cents + $6,
           line_count = line_count + $7, funded_on = $8, closed_at = $9
         where gateway = $1 and merchant_account = $2 and batch_id = $3 returning net_cents, funded_cents`,
        [
          ...key,
          change('grossCents'),
          change('feeCents'),
          change('netCents'),
          after.length - corrections.filter(({ before }) => before).length,
          fundedOn,
          closedAt,
        ],
      );
      // If the batch was funded before this correction, the paid amount may differ from the net amount.
      const fundedCents = rows[0]?.funded_cents ?? null;
      if (fundedCents !== null && fundedCents !== rows[0]!.net_cents)
        await writeMismatch(client, of, 'FUNDING_MISMATCH', Number(fundedCents), Number(rows[0]!.net_cents));
      else if (fundedCents !== null) await client.query(END_FUNDING_MISMATCH, key);
      return;
    }
    case 'SettlementBatchRecorded': {
      const { closedAt, fundedOn, lineCount, grossCents, feeCents, netCents, listed } = event.data;
      await client.query(
        `insert into settlement_batch
           (gateway, merchant_account, batch_id, closed_at, funded_on, line_count, gross_cents, fee_cents, net_cents, listed_position, funded, recorded_at)
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, false, $11) on conflict do nothing`,
        [...key, closedAt, fundedOn, lineCount, grossCents, feeCents, netCents, listed ? position : null, at],
      );
      return;
    }
    case 'SettlementBatchListed': {
      const { fundedOn, netCents, differing } = event.data;
      const { rows } = await client.query<{ net_cents: string }>(
        `update settlement_batch set listed_position = $4, funded_on = coalesce(funded_on, $5::date)
         where gateway = $1 and merchant_account = $2 and batch_id = $3 returning net_cents`,
        [...key, position, fundedOn],
      );
      if (differing > 0)
        await writeMismatch(
          client,
          { stream, key, closedAt: event.data.closedAt, position, at },
          'SOURCE_MISMATCH',
          netCents,
          Number(rows[0]!.net_cents),
        );
      return;
    }
    case 'BatchFunded': {
      const { fundedOn, netCents: fundedCents } = event.data;
      const { rows } = await client.query<{ net_cents: string }>(
        `update settlement_batch set funded = true, funded_at = $4, funded_cents = $5 where gateway = $1 and merchant_account = $2 and batch_id = $3
         returning net_cents`,
        [...key, meta.recordedAt, fundedCents],
      );
      if (!rows[0] || Number(rows[0].net_cents) === fundedCents) return;
      // A batch that is funded again may need a second exception.
      for (const name of [stream, `${stream}@${recorded.revision}`]) {
        const of = { stream: name, key, closedAt: fundedOn, position, at };
        if (await writeMismatch(client, of, 'FUNDING_MISMATCH', fundedCents, Number(rows[0].net_cents))) return;
      }
      return;
    }
    case 'BatchFundingWithdrawn':
      await client.query(
        'update settlement_batch set funded = false, funded_at = null, funded_cents = null where gateway = $1 and merchant_account = $2 and batch_id = $3',
        key,
      );
      await client.query(END_FUNDING_MISMATCH, key);
  }
};

interface LinesOf {
  /** The ids of exceptions are computed from this text. */
  readonly stream: string;
  readonly key: readonly string[];
  readonly closedAt: string;
  readonly position: string;
  readonly at: string;
}

/** True if a line settles a sale or a refund. Lines of fees and chargebacks name the same transaction, but settle nothing. */
const settles = (line: RecordedLine): boolean => line.accepted && isSettledLine(line);

/**
 * Withdraws lines that a correction changed or removed. Their exceptions are superseded, and their transactions are no longer settled. If no
 * corrected line settles a transaction again, it gets the exception MISSING_AT_GATEWAY.
 */
const takeBackLines = async (client: Queryable, of: LinesOf, corrections: readonly LineCorrection[]): Promise<void> => {
  const before = corrections.flatMap((correction) => correction.before ?? []);
  if (before.length === 0) return;
  await client.query(
    `update settlement_exception set superseded = true
     where gateway = $1 and merchant_account = $2 and batch_id = $3 and line = any($4::int[]) and position < $5`,
    [...of.key, before.map(({ number }) => number), of.position],
  );
  const { rows } = await client.query<{ ref: string; payment_id: string; leg: Leg; op: 'charge' | 'refund'; transaction_id: string; cents: string }>(
    `update gateway_transaction set settled_batch_id = null
     where gateway = $1 and merchant_account = $2 and settled_batch_id = $3 and transaction_id = any($4::text[])
     returning ref, payment_id, leg, op, transaction_id, amount_cents - voided_cents as cents`,
    [...of.key, before.filter(settles).map(({ transactionId }) => transactionId)],
  );
  const there = new Set(corrections.flatMap(({ after }) => (after && settles(after) ? [after.transactionId] : [])));
  const numberOf = new Map(before.map(({ transactionId, number }) => [transactionId, number]));
  for (const { ref, payment_id: paymentId, leg, op, transaction_id: transactionId, cents } of rows.filter((row) => !there.has(row.transaction_id)))
    await client.query(
      `insert into settlement_exception (exception_id, gateway, merchant_account, batch_id, line, kind, type, transaction_id, ref, payment_id, leg, gross_cents,
         expected_cents, suspense_cents, recorded_at, position)
       values ($1, $2, $3, $4, -1, 'MISSING_AT_GATEWAY', $5, $6, $7, $8, $9, 0, $10, 0, $11, $12) on conflict do nothing`,
      [
        hashedUuid('settlement-exception', of.stream, numberOf.get(transactionId)!, 'MISSING_AT_GATEWAY'),
        ...of.key,
        op === 'charge' ? 'sale' : 'refund',
        transactionId,
        ref,
        paymentId,
        leg,
        op === 'charge' ? Number(cents) : -Number(cents),
        of.at,
        of.position,
      ],
    );
};

const writeLines = async (client: Queryable, of: LinesOf, lines: readonly RecordedLine[]): Promise<void> => {
  const matched = lines.filter(settles);
  const { rows } = await client.query<{ transaction_id: string }>(
    `update gateway_transaction set settled_batch_id = $3
     where gateway = $1 and merchant_account = $2 and transaction_id = any($4::text[]) and settled_batch_id is null
     returning case when moved_at + $5::int * interval '1 day' < $6::timestamptz then transaction_id end as transaction_id`,
    [...of.key, matched.map(({ transactionId }) => transactionId), lateAfterDays(of.key[0]!), of.closedAt],
  );
  // An earlier correction may have taken these transactions out of the batch.
  await client.query(
    `update settlement_exception set superseded = true where gateway = $1 and merchant_account = $2 and batch_id = $3 and line = -1
       and kind = 'MISSING_AT_GATEWAY' and transaction_id = any($4::text[]) and not superseded`,
    [...of.key, matched.map(({ transactionId }) => transactionId)],
  );
  const late = new Set(rows.map((row) => row.transaction_id));
  for (const line of lines) {
    if (line.result !== 'MATCHED') await writeException(client, of, line, line.result, unexplainedCents(line));
    else if (line.accepted && line.netCents !== line.grossCents - line.feeCents) await writeException(client, of, line, 'FEE_MISMATCH', 0);
    if (late.has(line.transactionId)) await writeException(client, of, line, 'LATE', 0);
  }
};

const writeException = async (
  client: Queryable,
  { stream, key, position, at }: LinesOf,
  line: RecordedLine,
  kind: string,
  suspenseCents: number,
): Promise<void> => {
  const { number, result, type, transactionId, ref, paymentId, leg, grossCents, feeCents, netCents, expectedCents } = line;
  // The id of an exception for the line's own result is made from stream and line number. The ids of the line's other exceptions also contain the
  // kind.
  const id = kind === result ? hashedUuid('settlement-exception', stream, number) : hashedUuid('settlement-exception', stream, number, kind);
  await client.query(
    `insert into settlement_exception (exception_id, gateway, merchant_account, batch_id, line, kind, type, transaction_id, ref, payment_id, leg, gross_cents,
       expected_cents, suspense_cents, recorded_at, position)
     values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16) on conflict do nothing`,
    [
      id,
      ...key,
      number,
      kind,
      type,
      transactionId,
      ref,
      paymentId,
      leg,
      kind === 'FEE_MISMATCH' ? netCents : grossCents,
      kind === 'FEE_MISMATCH' ? grossCents - feeCents : expectedCents,
      suspenseCents,
      at,
      position,
    ],
  );
};

const END_FUNDING_MISMATCH = `update settlement_exception set superseded = true
  where gateway = $1 and merchant_account = $2 and batch_id = $3 and line = -1 and kind = 'FUNDING_MISMATCH'`;

/** Writes an exception of a whole batch. Its line is -1. Resolves to false if its id is taken. */
const writeMismatch = async (
  client: Queryable,
  { stream, key, position, at }: LinesOf,
  kind: 'FUNDING_MISMATCH' | 'SOURCE_MISMATCH',
  saidCents: number,
  expectedCents: number,
): Promise<boolean> => {
  const { rowCount } = await client.query(
    `insert into settlement_exception (exception_id, gateway, merchant_account, batch_id, line, kind, type, transaction_id, gross_cents, expected_cents,
       suspense_cents, recorded_at, position)
     values ($1, $2, $3, $4, -1, $5, 'batch', '', $6, $7, 0, $8, $9) on conflict do nothing`,
    [hashedUuid('settlement-exception', stream, kind), ...key, kind, saidCents, expectedCents, at, position],
  );
  return rowCount === 1;
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Reading.

export interface RegisteredTransaction {
  readonly ref: string;
  readonly transactionId: string | null;
  /** null: a refund of money that belongs to no payment. */
  readonly paymentId: string | null;
  readonly leg: Leg;
  readonly op: 'charge' | 'refund';
  readonly attemptId: string;
  readonly merchantAccount: string;
  readonly settledBatchId: string | null;
  /** The exception for which staff sent this refund. null: the payment's own transaction. */
  readonly exceptionId: string | null;
}

export interface RegisteredDispute extends Omit<Dispute, 'personal'> {
  readonly paymentId: string;
  readonly updatedAt: string;
}

export interface RegisteredBatch {
  readonly account: GatewayAccount;
  readonly batchId: string;
  readonly netCents: number;
  readonly fundedOn: string;
}

export interface Register {
  /** Waits until the register has applied all events appended so far. */
  caughtUp(): Promise<void>;
  /** Every gateway account that was ever charged. */
  accounts(): Promise<GatewayAccount[]>;
  /** Finds transactions by transaction id or by our reference, in all accounts of the gateway. A line may come from the wrong account. */
  transactions(gateway: string, transactionIds: readonly string[], refs: readonly string[]): Promise<RegisteredTransaction[]>;
  /** Accounts with a recorded batch of this id, complete or not. Two accounts may use the same batch id. */
  accountsOfBatch(batchId: string): Promise<GatewayAccount[]>;
  /** Batches that are not funded yet and whose day of funding has come. `today`: YYYY-MM-DD. */
  fundable(today: string): Promise<RegisteredBatch[]>;
  /** For each leg: the transaction of a settled sale that does not fit the payment's state. */
  settledUnknown(paymentId: string): Promise<Readonly<Partial<Record<Leg, string>>>>;
  /** For each leg: the cents that went back by refunds for exceptions. */
  sentBack(paymentId: string): Promise<Readonly<Partial<Record<Leg, Cents>>>>;
  /** An accepted line of this refund and amount that did not match, because the refund had no outcome yet. null: there is none. */
  settledRefund(account: GatewayAccount, ref: string, amountCents: Cents): Promise<{ readonly transactionId: string } | null>;
  /** The exceptions of this kind of lines with this transaction, in the order of the log. `superseded`: the line was corrected. */
  exceptionsOf(
    account: Pick<GatewayAccount, 'gateway' | 'merchantAccount'>,
    transactionId: string,
    kinds: readonly ExceptionKind[],
  ): Promise<readonly { readonly exceptionId: string; readonly superseded: boolean }[]>;
  /**
   * Charges before a time that are in no batch, and refunds in batches that belong to nothing here: the next `limit` of each, and at the end the first
   * ones again. `charge` null: a refund. The processor may say that money went back at its own page.
   */
  unexplained(
    account: GatewayAccount,
    chargedBefore: string,
    limit: number,
  ): Promise<readonly { readonly transactionId: string; readonly charge: { readonly paymentId: string; readonly leg: Leg } | null }[]>;
  /** All disputes: open ones first, each group by due date. */
  disputes(): Promise<RegisteredDispute[]>;
  dispute(disputeId: string): Promise<RegisteredDispute | null>;
}

/** Goes on where the last call for the account ended. A full page leads on; after a shorter one, the next call begins anew. */
const unexplainedIn = (pool: Pool): Register['unexplained'] => {
  /** The last rows of the last call. undefined: begin anew. */
  const places = new Map<
    string,
    { readonly charge: { charged_at: string; ref: string } | undefined; readonly refund: { exception_id: string } | undefined }
  >();
  return async ({ gateway, merchantAccount }, chargedBefore, limit) => {
    const account = JSON.stringify([gateway, merchantAccount]);
    const after = places.get(account);
    const [charges, refunds] = await Promise.all([
      pool.query<{ transaction_id: string; payment_id: string; leg: Leg; charged_at: string; ref: string }>(
        `select transaction_id, payment_id, leg, moved_at::text as charged_at, ref from gateway_transaction t
         where gateway = $1 and merchant_account = $2 and op = 'charge' and moved_at < $3 and settled_batch_id is null and not rejected
           and amount_cents > voided_cents and (moved_at, ref) > (coalesce($5::timestamptz, '-infinity'), coalesce($6, ''))
           and not exists (select from settlement_exception d where d.payment_id = t.payment_id
             and d.transaction_id = t.transaction_id and d.type = 'sale' and not d.superseded)
         order by moved_at, ref limit $4`,
        [gateway, merchantAccount, chargedBefore, limit, after?.charge?.charged_at, after?.charge?.ref],
      ),
      pool.query<{ transaction_id: string; exception_id: string }>(
        `select transaction_id, exception_id from settlement_exception
         where gateway = $1 and merchant_account = $2 and kind = 'MISSING_HERE' and type = 'refund' and ref is null and payment_id is null
           and not superseded and not ended and ($4::uuid is null or exception_id > $4::uuid) order by exception_id limit $3`,
        [gateway, merchantAccount, limit, after?.refund?.exception_id],
      ),
    ]);
    places.set(account, { charge: charges.rows[limit - 1], refund: refunds.rows[limit - 1] });
    return [
      ...charges.rows.map((row) => ({ transactionId: row.transaction_id, charge: { paymentId: row.payment_id, leg: row.leg } })),
      ...refunds.rows.map((row) => ({ transactionId: row.transaction_id, charge: null })),
    ];
  };
};

export const postgresRegister = (pool: Pool, caughtUp: () => Promise<void>): Register => {
  const unexplained = unexplainedIn(pool);
  return {
    caughtUp,
    accounts: async () => {
      const { rows } = await pool.query<Record<string, string>>(
        'select gateway, merchant_account, credentials_ref, environment from gateway_account order by gateway, merchant_account',
      );
      return rows.map(accountOf);
    },
    transactions: async (gateway, transactionIds, refs) => {
      const { rows } = await pool.query<Record<string, string>>(
        `select ref, transaction_id, payment_id, leg, op, attempt_id, merchant_account, settled_batch_id, exception_id from gateway_transaction
         where gateway = $1 and (ref = any($3::text[]) or transaction_id = any($2::text[]))`,
        [gateway, transactionIds, refs],
      );
      return rows.map((row) => ({
        ref: row.ref!,
        transactionId: row.transaction_id ?? null,
        paymentId: row.payment_id ?? null,
        leg: row.leg as Leg,
        op: row.op as 'charge' | 'refund',
        attemptId: row.attempt_id!,
        merchantAccount: row.merchant_account!,
        settledBatchId: row.settled_batch_id ?? null,
        exceptionId: row.exception_id ?? null,
      }));
    },
    accountsOfBatch: async (batchId) => {
      const { rows } = await pool.query<Record<string, string>>(
        `select a.* from settlement_begun b join gateway_account a on a.gateway = b.gateway and a.merchant_account = b.merchant_account
         where b.batch_id = $1 order by a.gateway, a.merchant_account`,
        [batchId],
      );
      return rows.map(accountOf);
    },
    fundable: async (today) => {
      const rows = everyRow<Record<string, string>>(async (after, limit) => {
        const page = await pool.query<Record<string, string>>(
          `select b.gateway, b.merchant_account, a.credentials_ref, a.environment, b.batch_id, b.net_cents, b.funded_on::text, b.closed_at::text
           from settlement_batch b join gateway_account a on a.gateway = b.gateway and a.merchant_account = b.merchant_account
           where not b.funded and b.funded_on <= $1::date
             and ($2::date is null
               or (b.funded_on, b.closed_at, b.batch_id, b.gateway, b.merchant_account) > ($2, $3::timestamptz, $4::text, $5::text, $6::text))
           order by b.funded_on, b.closed_at, b.batch_id, b.gateway, b.merchant_account limit $7`,
          [today, after?.funded_on, after?.closed_at, after?.batch_id, after?.gateway, after?.merchant_account, limit],
        );
        return page.rows;
      });
      return (await collect(rows)).map((row) => ({
        account: accountOf(row),
        batchId: row.batch_id!,
        netCents: Number(row.net_cents),
        fundedOn: row.funded_on!,
      }));
    },
    settledUnknown: async (paymentId) => {
      const { rows } = await pool.query<{ leg: Leg; transaction_id: string }>(
        `select leg, transaction_id from settlement_exception
         where payment_id = $1 and kind = 'STATUS_MISMATCH' and type = 'sale' and suspense_cents <> 0 and leg is not null and not superseded`,
        [paymentId],
      );
      return Object.fromEntries(rows.map((row) => [row.leg, row.transaction_id]));
    },
    sentBack: async (paymentId) => {
      const { rows } = await pool.query<{ leg: Leg; cents: string }>(
        `select leg, sum(amount_cents)::bigint as cents from gateway_transaction
         where payment_id = $1 and exception_id is not null and op = 'refund' and moved_at is not null group by leg`,
        [paymentId],
      );
      return Object.fromEntries(rows.map((row) => [row.leg, Number(row.cents)]));
    },
    settledRefund: async ({ gateway, merchantAccount }, ref, amountCents) => {
      const { rows } = await pool.query<{ transaction_id: string }>(
        `select transaction_id from settlement_exception
         where gateway = $1 and merchant_account = $2 and ref = $3 and type = 'refund' and suspense_cents = $4 and not superseded`,
        [gateway, merchantAccount, ref, -amountCents],
      );
      return rows[0] ? { transactionId: rows[0].transaction_id } : null;
    },
    exceptionsOf: async ({ gateway, merchantAccount }, transactionId, kinds) => {
      const { rows } = await pool.query<{ exception_id: string; superseded: boolean }>(
        `select exception_id, superseded from settlement_exception
         where gateway = $1 and merchant_account = $2 and transaction_id = $3 and kind = any($4::text[]) order by position, line`,
        [gateway, merchantAccount, transactionId, kinds],
      );
      return rows.map((row) => ({ exceptionId: row.exception_id, superseded: row.superseded }));
    },
    unexplained,
    disputes: async () => {
      const rows = everyRow<StoredDispute>(async (after, limit) => {
        const page = await pool.query<StoredDispute>(
          `select ${DISPUTE} from dispute where $1::date is null or (due_date, dispute_id) > ($1, $2::uuid) order by due_date, dispute_id limit $3`,
          [after?.due_date, after?.dispute_id, limit],
        );
        return page.rows;
      });
      const all = (await collect(rows)).map(toDispute);
      // Do not sort by status in SQL. If a status changed between two pages, a dispute could be missing or come twice.
      return [...all.filter(isOpen), ...all.filter((dispute) => !isOpen(dispute))];
    },
    dispute: async (disputeId) => {
      const { rows } = await pool.query<StoredDispute>(`select ${DISPUTE} from dispute where dispute_id = $1`, [disputeId]);
      return rows[0] ? toDispute(rows[0]) : null;
    },
  };
};

const accountOf = (row: Readonly<Record<string, string>>): GatewayAccount => ({
  gateway: row.gateway!,
  merchantAccount: row.merchant_account!,
  credentialsRef: row.credentials_ref!,
  environment: row.environment as GatewayAccount['environment'],
});

type StoredDispute = Record<string, string> & { updated_at: Date };

const DISPUTE = 'dispute_id, payment_id, status, stage, reason_code, disputed_amount_cents, opened_on::text, due_date::text, updated_at';

const isOpen = ({ status }: RegisteredDispute): boolean => status === 'debited' || status === 'in_dispute';

const toDispute = (row: StoredDispute): RegisteredDispute => ({
  disputeId: row.dispute_id!,
  paymentId: row.payment_id!,
  status: row.status as DisputeStatus,
  stage: row.stage!,
  reasonCode: row.reason_code!,
  disputedAmountCents: Number(row.disputed_amount_cents),
  openedOn: row.opened_on!,
  dueDate: row.due_date!,
  updatedAt: row.updated_at.toISOString(),
});
