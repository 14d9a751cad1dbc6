/**
 * Finds payments by a name: a reference, a confirmation number, a transaction id, or a card's last four digits with an amount.
 *
 * The read model `payment-find` has a row for each name of a payment. A row holds the hash of the name, not the name. So all rows have the same small
 * size. No two names have the same hash of 122 bits. So a page never shows a payment of another name. A row stays for ever: if a corrected file takes
 * a transaction away from a payment, its id still finds that payment.
 */
import type { Scope } from '#accounts';
import type { EventStore, ReadModel, Recorded } from '#eventstore';
import { hashedUuid, type Queryable } from '#platform';
import { type PaymentEvent, paymentEvents, paymentIdOf, paymentScopeCondition, type VisiblePayment, statusOf } from '#payments';
import { exceptionEvents, isSettledLine, isSettlementStream, type RecordedLine, settlementEvents } from '#settlement';
import { closedReader, foldPage, type ListThenQuery, LOOK_AT, type PaymentThen, type Reader } from './replay.js';

/** The kinds of names. They are also the parameters of the audit API and the options of the command line. */
export const FIND_PARAMETERS = ['lineReference', 'referenceId', 'confirmationNumber', 'transactionId', 'last4', 'amountCents'] as const;
export type FindParameter = (typeof FIND_PARAMETERS)[number];
/** The parameters of a request, as text. */
export type FindBy = Partial<Readonly<Record<FindParameter, string>>>;

const MAX_TEXT = 255;
const text = (value: string): string | null => (value.length < 1 || value.length > MAX_TEXT ? `must have 1 to ${MAX_TEXT} characters` : null);
const ofForm =
  (form: RegExp, message: string) =>
  (value: string): string | null =>
    form.test(value) ? null : message;

/** The fault of a value, or null. A fault never repeats the value, which may be a card number. */
const CHECKS: Readonly<Record<FindParameter, (value: string) => string | null>> = {
  lineReference: text,
  referenceId: text,
  confirmationNumber: ofForm(/^[0-9A-Z]{4}-[0-9A-Z]{4}-[0-9A-Z]{2}$/i, 'must look like ABCD-EFGH-JK'),
  transactionId: text,
  last4: ofForm(/^\d{4}$/, 'must be the last four digits of the card'),
  amountCents: ofForm(/^[1-9]\d{0,9}$/, 'must be whole cents, 1 or more'),
};

/** The faults of a request. A request has one parameter, or `last4` with `amountCents`. */
export const findFaults = (by: FindBy): readonly { readonly field: FindParameter; readonly message: string }[] => {
  const given = FIND_PARAMETERS.filter((name) => by[name] !== undefined);
  const faults = given.flatMap((field) => {
    const message = CHECKS[field](by[field]!);
    return message === null ? [] : [{ field, message }];
  });
  if ((by.last4 === undefined) !== (by.amountCents === undefined))
    faults.push({ field: by.last4 === undefined ? 'last4' : 'amountCents', message: 'is required: a card is found by both, last4 and amountCents' });
  const [, second] = given.filter((name) => name !== 'amountCents');
  if (second) faults.push({ field: second, message: 'is one too many: find by one at a time' });
  return faults;
};

/** The hash of the name in a request without faults. null: the request has no name. */
export const nameHashOf = ({ lineReference, referenceId, confirmationNumber, transactionId, last4, amountCents }: FindBy): string | null => {
  if (lineReference !== undefined) return HASH.lineReference(lineReference);
  if (referenceId !== undefined) return HASH.referenceId(referenceId);
  if (confirmationNumber !== undefined) return HASH.confirmationNumber(confirmationNumber.toUpperCase());
  if (transactionId !== undefined) return HASH.transactionId(transactionId);
  return last4 === undefined ? null : HASH.card(last4, Number(amountCents));
};

const HASH = {
  lineReference: (reference: string) => hashedUuid('lineReference', reference),
  referenceId: (reference: string) => hashedUuid('referenceId', reference),
  confirmationNumber: (number: string) => hashedUuid('confirmationNumber', number),
  transactionId: (id: string) => hashedUuid('transactionId', id),
  card: (last4: string, cents: number) => hashedUuid('card', last4, cents),
  /** For the read model only. `ExceptionRefundEnded` does not repeat the payment, so the attempt leads to it. */
  sentRefund: (attemptId: string) => hashedUuid('sentRefund', attemptId),
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Writing.

const TABLES = 'create table payment_find (name_hash uuid not null, payment_id uuid not null)';
// An id of a payment begins with its time. So the rows of one name lie in the order of their payments.
const INDEXES = 'alter table payment_find add constraint payment_find_pkey primary key (name_hash, payment_id)';
/** The read model may lag by this much. A caller of `runUntil` does not wait for it. */
const GATHER_MS = 1_000;

export const paymentFindModel: ReadModel = {
  name: 'payment-find',
  shape: 1,
  streamPrefixes: ['payment-', 'settlement-', 'exception-'],
  gatherMs: GATHER_MS,
  tables: ['payment_find'],
  createTables: TABLES,
  createIndexes: INDEXES,
  apply: (client, events) => applyNames(client, events),
};

const applyNames = async (client: Queryable, events: readonly Recorded[]): Promise<void> => {
  const rows: { readonly hash: string; readonly paymentId: string }[] = [];
  const sent: { readonly attemptId: string; readonly transactionId: string }[] = [];
  for (const recorded of events) {
    const { stream } = recorded;
    if (stream.startsWith('payment-')) {
      const paymentId = paymentIdOf(stream);
      for (const hash of namesIn(paymentEvents.read(recorded))) rows.push({ hash, paymentId });
    } else if (isSettlementStream(stream)) {
      for (const { transactionId, paymentId } of foreignLines(recorded))
        if (paymentId !== null) rows.push({ hash: HASH.transactionId(transactionId), paymentId });
    } else if (stream.startsWith('exception-')) {
      const { type, data } = exceptionEvents.read(recorded);
      if (type === 'ExceptionRefundRequested' && data.paymentId !== null)
        rows.push({ hash: HASH.sentRefund(data.attemptId), paymentId: data.paymentId });
      if (type === 'ExceptionRefundEnded' && data.transactionId !== null) sent.push({ attemptId: data.attemptId, transactionId: data.transactionId });
    }
  }
  if (rows.length > 0)
    await client.query({
      name: 'find-write',
      text: 'insert into payment_find (name_hash, payment_id) select * from unnest($1::uuid[], $2::uuid[]) on conflict do nothing',
      values: [rows.map(({ hash }) => hash), rows.map(({ paymentId }) => paymentId)],
    });
  // The request of a refund comes before its end, so its row is there by now.
  for (const { attemptId, transactionId } of sent)
    await client.query(
      'insert into payment_find (name_hash, payment_id) select $2::uuid, payment_id from payment_find where name_hash = $1::uuid on conflict do nothing',
      [HASH.sentRefund(attemptId), HASH.transactionId(transactionId)],
    );
};

/** The hashes of all names that an event gives to its payment. */
const namesIn = ({ type, data }: PaymentEvent): readonly string[] => {
  switch (type) {
    case 'PaymentInitiated': {
      const { amountCents, serviceFeeCents, referenceId, lineItems, paymentMethod } = data;
      // The payer saw the total in the checkout. If principal and fee are two charges, a card statement shows them apart.
      const amounts = serviceFeeCents === 0 ? [amountCents] : [amountCents, amountCents + serviceFeeCents];
      return [
        ...lineItems.map((line) => HASH.lineReference(line.referenceId)),
        ...(referenceId === null ? [] : [HASH.referenceId(referenceId)]),
        ...amounts.map((cents) => HASH.card(paymentMethod.last4, cents)),
      ];
    }
    case 'PaymentCreated':
      return [HASH.confirmationNumber(data.confirmationNumber), ...transactions(data.legs)];
    case 'PaymentResolved':
      return data.charge === null ? [] : [HASH.confirmationNumber(data.charge.confirmationNumber), ...transactions(data.charge.legs)];
    case 'PaymentDeclined':
    case 'PaymentFailed': {
      const takenBack = data.takenBack ?? [];
      return transactions([
        ...('transactionId' in data ? [data] : []),
        ...takenBack,
        ...takenBack.map(({ voidTransactionId: transactionId }) => ({ transactionId })),
      ]);
    }
    case 'PaymentVoided':
      return transactions([data, { transactionId: data.undone?.chargeTransactionId ?? null }]);
    case 'PaymentRefunded':
    case 'FeeRefunded':
      return transactions([data]);
    default:
      return []; // Other events name nothing new.
  }
};

const transactions = (of: readonly { readonly transactionId: string | null }[]): string[] =>
  of.flatMap(({ transactionId }) => (transactionId === null ? [] : [HASH.transactionId(transactionId)]));

/** The lines of a settlement event whose transaction may be missing in the payment's stream. The streams hold the transactions of all other lines. */
const foreignLines = (recorded: Recorded): readonly RecordedLine[] => {
  const { type, data } = settlementEvents.read(recorded);
  const lines =
    type === 'SettlementLinesRecorded' ? data.lines : type === 'SettlementLinesCorrected' ? data.corrections.flatMap(({ after }) => after ?? []) : [];
  return lines.filter((line) => !isSettledLine(line));
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Reading.

export interface FindQuery extends Omit<ListThenQuery, 'after'> {
  readonly nameHash: string;
  /** Id of the last payment of the page before. */
  readonly after: string | null;
}

const BEYOND_ALL_IDS = 'ffffffff-ffff-ffff-ffff-ffffffffffff';

/**
 * A page of the payments in scope with a name, the newest first. The other filters are those of the list. A page looks at `limit` payments, or at
 * {@link LOOK_AT} if that is more and a filter is given. So it can have fewer payments than `limit`, or none, and still have a `next`.
 */
export const findPayments = async (
  { store, db }: { readonly store: EventStore; readonly db: Queryable },
  scope: Scope,
  { nameHash, asOf, accountId, portalId, from, to, status, after, limit }: FindQuery,
  reader: Reader = closedReader,
): Promise<{ readonly payments: PaymentThen['payment'][]; readonly next: string | null }> => {
  const fits = (payment: VisiblePayment): boolean =>
    (accountId === null || payment.terms.accountId === accountId) &&
    (portalId === null || payment.terms.portalId === portalId) &&
    (from === null || payment.createdAt >= from) &&
    (to === null || payment.createdAt < to) &&
    (status === null || statusOf(payment) === status);
  const isFiltered = [asOf, accountId, portalId, from, to, status].some((filter) => filter !== null);
  const size = isFiltered ? Math.max(limit, LOOK_AT) : limit;
  const values: unknown[] = [nameHash, after ?? BEYOND_ALL_IDS, size + 1];
  // `next` must not name a payment out of scope. So the scope is a condition of the statement, and not of the fold.
  const inScope = paymentScopeCondition(scope, 'found.payment_id', (value) => `$${values.push(value)}`);
  const { rows } = await db.query<{ payment_id: string }>(
    `select payment_id from payment_find found where name_hash = $1 and payment_id < $2 and ${inScope} order by payment_id desc limit $3`,
    values,
  );
  const ids = rows.slice(0, size).map((row) => row.payment_id);
  const { payments, looked } = await foldPage(store, ids, { asOf, limit }, fits, reader);
  return { payments, next: looked < rows.length ? ids[looked - 1]! : null };
};
