/**
 * Finds payments by any mix of conditions. Names: a reference, a confirmation number, a transaction id. The others: the payer's e-mail address, the
 * card, an amount, a status, a portal, days.
 *
 * The read model `payment-find` has a row for each name of a payment. A row holds the hash of the name, not the name. So all rows have the same small
 * size. No two names have the same hash of 122 bits. So a page never shows a payment of another name. A row stays for ever: if a corrected file takes
 * a transaction away from a payment, its id still finds that payment. A second table has a row of traits for each payment: its card and its amounts.
 *
 * A page walks one index, that of the condition that fits the fewest payments. It looks at a limited number of rows, and the other conditions drop some.
 */
import { isInScope, type Scope } from '#accounts';
import type { EventStore, ReadModel, Recorded } from '#eventstore';
import { type Cents, ServiceError } from '#kernel';
import { cardOf, listPlaces, type PaymentEvent, paymentEvents, paymentIdOf, paymentScopeCondition, statusOf, type VisiblePayment } from '#payments';
import { hashedUuid, type Queryable } from '#platform';
import { ofMail, paymentsOfMail } from '#privacy';
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

/** The names among the parameters. A payment has several of them, so a search may name several. */
export const NAMES = ['lineReference', 'referenceId', 'confirmationNumber', 'transactionId'] as const satisfies readonly FindParameter[];

/** The hashes of all names of a search, and the faults of these. */
export const nameHashesOf = (by: FindBy): { readonly hashes: readonly string[]; readonly faults: ReturnType<typeof findFaults> } => {
  const given = NAMES.filter((name) => by[name] !== undefined);
  return {
    hashes: given.flatMap((name) => nameHashOf({ [name]: by[name] }) ?? []),
    faults: given.flatMap((name) => findFaults({ [name]: by[name] })),
  };
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

const TABLES = `
  create table payment_find (name_hash uuid not null, payment_id uuid not null);
  create table payment_trait (
    payment_id uuid not null, created_at timestamptz not null, account_id uuid not null, portal_id uuid not null, brand text not null, last4 text not null,
    amount_cents bigint not null, total_cents bigint not null)`;
// An id of a payment begins with its time. So the rows of one name lie in the order of their payments.
const INDEXES = `
  alter table payment_find add constraint payment_find_pkey primary key (name_hash, payment_id);
  alter table payment_trait add constraint payment_trait_pkey primary key (payment_id);
  create index payment_trait_created on payment_trait (created_at desc, payment_id desc);
  create index payment_trait_portal on payment_trait (portal_id, created_at desc, payment_id desc);
  create index payment_trait_last4 on payment_trait (last4, created_at desc, payment_id desc);
  create index payment_trait_amount on payment_trait (amount_cents, created_at desc, payment_id desc);
  create index payment_trait_total on payment_trait (total_cents, created_at desc, payment_id desc)`;
/** The read model may lag by this much. A caller of `runUntil` does not wait for it. */
const GATHER_MS = 1_000;

export const paymentFindModel: ReadModel = {
  name: 'payment-find',
  shape: 2,
  streamPrefixes: ['payment-', 'settlement-', 'exception-'],
  gatherMs: GATHER_MS,
  tables: ['payment_find', 'payment_trait'],
  createTables: TABLES,
  createIndexes: INDEXES,
  apply: async (client, events) => {
    await applyNames(client, events);
    await applyTraits(client, events);
  },
};

const applyTraits = async (client: Queryable, events: readonly Recorded[]): Promise<void> => {
  const read = events.filter(({ stream }) => stream.startsWith('payment-')).map((recorded) => ({ id: paymentIdOf(recorded.stream), event: paymentEvents.read(recorded) })); // prettier-ignore
  const made = read.flatMap(({ id, event }) => (event.type === 'PaymentInitiated' ? [{ id, at: event.at, ...event.data }] : []));
  if (made.length > 0)
    await client.query({
      name: 'find-traits',
      text: `
        insert into payment_trait (payment_id, created_at, account_id, portal_id, brand, last4, amount_cents, total_cents)
        select * from unnest($1::uuid[], $2::timestamptz[], $3::uuid[], $4::uuid[], $5::text[], $6::text[], $7::bigint[], $8::bigint[])
        on conflict do nothing`,
      values: [
        made.map(({ id }) => id),
        made.map(({ at }) => at),
        made.map(({ accountId }) => accountId),
        made.map(({ portalId }) => portalId),
        made.map(({ paymentMethod }) => paymentMethod.brand),
        made.map(({ paymentMethod }) => paymentMethod.last4),
        made.map(({ amountCents }) => amountCents),
        made.map(({ amountCents, serviceFeeCents }) => amountCents + serviceFeeCents),
      ],
    });
  // For a token, the gateway names the card with the charge.
  for (const { id, event } of read) {
    const card = event.type === 'PaymentCreated' ? event.data.legs.find((leg) => leg.card)?.card : undefined;
    if (card) await client.query('update payment_trait set brand = $2, last4 = $3 where payment_id = $1', [id, card.brand, card.last4]);
  }
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

/** What is known of the payments. null: nothing. All that is known must fit. */
export interface Known {
  readonly nameHashes: readonly string[];
  /** The keyed hash of the payer's e-mail address. */
  readonly mailMac: Buffer | null;
  readonly last4: string | null;
  readonly brand: string | null;
  /** Cents of the principal or of the total, from the first to the second. */
  readonly amount: readonly [from: Cents, to: Cents] | null;
}

export const NOTHING_KNOWN: Known = { nameHashes: [], mailMac: null, last4: null, brand: null, amount: null };

export interface FindQuery extends Omit<ListThenQuery, 'after'>, Known {
  /** Id of the last payment that the page before looked at. */
  readonly after: string | null;
}

export interface FoundPage {
  readonly payments: readonly PaymentThen['payment'][];
  readonly next: string | null;
}

interface FindPorts {
  readonly store: EventStore;
  readonly db: Queryable;
}

const BEYOND_ALL_IDS = 'ffffffff-ffff-ffff-ffff-ffffffffffff';
/** Rows of traits that a page looks at. They lie together in the index, and most of them in few blocks. */
const LOOK_AT_TRAITS = 500;

/** A payment that a page looks at. `fits` false: its rows say that it does not fit. true: its events decide. */
interface Looked {
  readonly id: string;
  readonly fits: boolean;
}

/**
 * A page of the payments in scope that fit, the newest first. It looks at `limit` payments, or at {@link LOOK_AT} if that is more and several things
 * must fit. So it can have fewer payments than `limit`, or none, and still have a `next`. Throws VALIDATION_ERROR if `after` is no payment.
 */
export const findPayments = async ({ store, db }: FindPorts, scope: Scope, query: FindQuery, reader: Reader = closedReader): Promise<FoundPage> => {
  const { nameHashes, mailMac, last4, brand, amount, asOf, accountId, portalId, from, to, status, limit } = query;
  const isAmount = (cents: Cents) => amount === null || (amount[0] <= cents && cents <= amount[1]);
  const fits = (payment: VisiblePayment): boolean =>
    isInScope(scope, payment.terms) &&
    (accountId === null || payment.terms.accountId === accountId) &&
    (portalId === null || payment.terms.portalId === portalId) &&
    (from === null || payment.createdAt >= from) &&
    (to === null || payment.createdAt < to) &&
    (last4 === null || cardOf(payment).last4 === last4) &&
    (brand === null || cardOf(payment).brand === brand) &&
    (isAmount(payment.terms.amountCents) || isAmount(payment.terms.amountCents + payment.terms.serviceFeeCents)) &&
    (status === null || statusOf(payment) === status);
  const isFiltered = nameHashes.length > 1 || [asOf, accountId, portalId, from, to, last4, brand, amount, status].some((known) => known !== null);
  const size = isFiltered ? Math.max(limit, LOOK_AT) : limit;
  // Most payments have succeeded. A walk by time finds them sooner than a merge of all accounts.
  const isRare = status !== null && status !== 'succeeded' && asOf === null;
  const exact = amount !== null && amount[0] === amount[1];
  const found = await (nameHashes.length > 0 || mailMac !== null
    ? lookByName(db, scope, query, size)
    : last4 === null && !exact && isRare
      ? lookInList(db, scope, query, size)
      : lookByTrait(db, scope, query, Math.max(size, LOOK_AT_TRAITS)));
  const rows = found.rows.slice(0, found.size);
  const ids = rows.filter((row) => row.fits).map(({ id }) => id);
  const { payments, looked } = await foldPage(store, ids, { asOf, limit }, fits, reader);
  if (looked < ids.length) return { payments, next: ids[looked - 1]! };
  return { payments, next: found.rows.length > found.size ? rows.at(-1)!.id : null };
};

/** One row more than `size` says that a further page follows. */
interface Found {
  readonly rows: readonly Looked[];
  readonly size: number;
}

const lookByName = async (db: Queryable, scope: Scope, { nameHashes, mailMac, after }: FindQuery, size: number): Promise<Found> => {
  const values: unknown[] = [];
  const bind = (value: unknown) => `$${values.push(value)}`;
  const [first, ...others] = nameHashes;
  // `next` must not name a payment out of scope. So the scope is a condition of the statement, and not of the fold.
  const inScope = paymentScopeCondition(scope, 'found.payment_id', bind);
  const named =
    first === undefined
      ? `(select payment_id from unnest(${bind(await paymentsOfMail(db, mailMac!, after, size + 1))}::uuid[]) as payment_id)`
      : '(select name_hash, payment_id from payment_find)';
  const where = first === undefined ? '' : `name_hash = ${bind(first)} and payment_id < ${bind(after ?? BEYOND_ALL_IDS)} and`;
  const also = [
    ...others.map((hash) => `exists (select from payment_find o where o.name_hash = ${bind(hash)} and o.payment_id = looked.payment_id)`),
    ...(first === undefined || mailMac === null ? [] : [ofMail('looked.payment_id', bind(mailMac))]),
  ];
  const { rows } = await db.query<Looked>(
    `select payment_id as id, ${also.join(' and ') || 'true'} as fits
     from (select payment_id from ${named} found where ${where} ${inScope} order by payment_id desc limit ${bind(size + 1)}) looked order by payment_id desc`,
    values,
  );
  return { rows, size };
};

/** When the last payment of the page before was made. */
const placeOf = async (db: Queryable, after: string): Promise<{ readonly id: string; readonly createdAt: string }> => {
  const { rows } = await db.query<{ created_at: Date }>('select created_at from payment_trait where payment_id = $1', [after]);
  if (!rows[0]) throw new ServiceError('VALIDATION_ERROR', 'cursor is not valid for this search.');
  return { id: after, createdAt: rows[0].created_at.toISOString() };
};

/** The list has a range for each status. */
const lookInList = async (db: Queryable, scope: Scope, query: FindQuery, size: number): Promise<Found> => {
  const { accountId, portalId, status, from, to, after } = query;
  const times = { from: from === null ? null : Date.parse(from), to: to === null ? null : Date.parse(to) };
  const places = await listPlaces(db, scope, accountId, { portalId, status, ...times }, after === null ? null : await placeOf(db, after), size + 1);
  return { rows: places.map(({ id }) => ({ id, fits: true })), size };
};

const lookByTrait = async (db: Queryable, scope: Scope, query: FindQuery, size: number): Promise<Found> => {
  const { last4, brand, amount, accountId, portalId, from, to, after } = query;
  const values: unknown[] = [];
  const bind = (value: unknown) => `$${values.push(value)}`;
  const place = after === null ? null : await placeOf(db, after);
  const between = [
    paymentScopeCondition(scope, 'found.payment_id', bind),
    ...(from === null ? [] : [`created_at >= ${bind(from)}::timestamptz`]),
    ...(to === null ? [] : [`created_at < ${bind(to)}::timestamptz`]),
    ...(place === null ? [] : [`(created_at, payment_id) < (${bind(place.createdAt)}::timestamptz, ${bind(place.id)}::uuid)`]),
  ];
  const newest = `order by created_at desc, payment_id desc limit ${bind(size + 1)}`;
  const walk = (condition: string) => `(select * from payment_trait found where ${[condition, ...between].join(' and ')} ${newest})`;
  const walks =
    last4 !== null
      ? walk(`last4 = ${bind(last4)}`)
      : amount !== null && amount[0] === amount[1]
        ? `(${walk(`amount_cents = ${bind(amount[0])}`)} union ${walk(`total_cents = ${bind(amount[0])}`)} ${newest})`
        : walk(portalId === null ? 'true' : `portal_id = ${bind(portalId)}`);
  const also = [
    ...(brand === null ? [] : [`brand = ${bind(brand)}`]),
    ...(accountId === null ? [] : [`account_id = ${bind(accountId)}`]),
    ...(portalId === null ? [] : [`portal_id = ${bind(portalId)}`]),
    ...(amount === null ? [] : [`(${['amount_cents', 'total_cents'].map((cents) => `${cents} between ${bind(amount[0])} and ${bind(amount[1])}`).join(' or ')})`]), // prettier-ignore
  ];
  const { rows } = await db.query<Looked>(
    `select payment_id as id, ${also.join(' and ') || 'true'} as fits from ${walks} looked order by created_at desc, payment_id desc`,
    values,
  );
  return { rows, size };
};

/** The most empty pages that {@link searchPayments} reads. */
const SEARCH_PAGES = 20;

/** As {@link findPayments}, for people: reads on while a page is empty, up to {@link SEARCH_PAGES} pages. */
export const searchPayments = async (ports: FindPorts, scope: Scope, query: FindQuery, reader: Reader = closedReader): Promise<FoundPage> => {
  let page = await findPayments(ports, scope, query, reader);
  for (let pages = 1; pages < SEARCH_PAGES && page.payments.length === 0 && page.next !== null; pages++)
    page = await findPayments(ports, scope, { ...query, after: page.next }, reader);
  return page;
};
