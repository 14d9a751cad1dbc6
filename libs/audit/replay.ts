/**
 * Reads the history of payments: a payment at a revision, a log position or an instant; the list at an instant; the timeline of a payment. Each state
 * is folded from the events.
 */
import { isInScope, type Scope } from '#accounts';
import { type Actor, type EventStore, readStreams, type Recorded } from '#eventstore';
import { CLOSED, type Json, keysIn, type Reveal, ServiceError } from '#kernel';
import {
  type AuditedPayment,
  auditedPayment,
  isVisible,
  keysOfPayment,
  listPlaces,
  PAGE_BYTES,
  type Payment,
  payment as decider,
  paymentEvents,
  type PaymentStatus,
  paymentStream,
  shownEvent,
  statusOf,
  textOf,
  type VisiblePayment,
} from '#payments';
import type { PersonalKeys, Queryable } from '#platform';
import { type Books, journalise, policyAt, type PostingRules, rulePolicies } from '#ledger';

/** Where a replay ends. Default: at the last event. */
export interface Until {
  /** RFC 3339, inclusive. Events that were recorded later do not count. */
  readonly asOf?: string | undefined;
  readonly revision?: bigint | undefined;
  /** A position in the log, inclusive. */
  readonly position?: string | undefined;
}

const isWithin = ({ asOf, revision, position }: Until, event: Recorded): boolean =>
  (asOf === undefined || event.meta.recordedAt <= asOf) &&
  (revision === undefined || event.revision <= revision) &&
  (position === undefined || event.position <= position);

const until = (events: readonly Recorded[], end: Until): readonly Recorded[] => events.filter((event) => isWithin(end, event));

const foldPayment = (events: readonly Recorded[]): Payment => {
  let payment: Payment = decider.initial;
  for (const event of events) payment = decider.evolve(payment, paymentEvents.read(event));
  return payment;
};

/** What a reader sees of personal data under these keys. */
export type Reader = (keyIds: readonly string[]) => Promise<Reveal>;

/** Sees no personal data. */
export const closedReader: Reader = async () => CLOSED;

/** Sees personal data if `opens`, else only whether it was erased. */
export const readerOf = (personal: Pick<PersonalKeys, 'open' | 'erasures'>, opens: boolean): Reader =>
  opens ? (keyIds) => personal.open(keyIds) : (keyIds) => personal.erasures(keyIds);

const notFound = () => new ServiceError('PAYMENT_NOT_FOUND', 'Payment not found.');

export interface PaymentThen {
  readonly payment: AuditedPayment;
  /** Revision of the last event that was folded. */
  readonly revision: number;
  readonly position: string;
}

/** A payment as it was at `end`. If it did not exist then, or is out of scope → PAYMENT_NOT_FOUND. */
export const paymentAsOf = async (
  store: EventStore,
  scope: Scope,
  paymentId: string,
  end: Until,
  reader: Reader = closedReader,
): Promise<PaymentThen> => {
  const events: Recorded[] = [];
  for await (const event of store.read(paymentStream(paymentId))) events.push(event);
  const told = until(events, end);
  const payment = foldPayment(told);
  const last = told.at(-1);
  if (!last || !isVisible(payment) || !isInScope(scope, payment.terms)) throw notFound();
  return {
    payment: auditedPayment(paymentId, payment, await reader(keysOfPayment(payment))),
    revision: Number(last.revision),
    position: last.position,
  };
};

/** One event of a payment's timeline. */
export interface Moment {
  readonly revision: number;
  readonly position: string;
  readonly eventId: string;
  readonly type: string;
  readonly version: number;
  readonly recordedAt: string;
  readonly effectiveAt: string | null;
  /** `id` null: the name of a person of staff, which the reader must not see. */
  readonly actor: { readonly type: Actor['type']; readonly id: string | null };
  readonly correlationId: string;
  /** Status of the payment after this event. null: the payment is not visible yet. */
  readonly status: PaymentStatus | null;
  /** Version of the fee configuration that gave the service fee. null: the event is no PaymentInitiated. */
  readonly feeVersion: number | null;
  /** Posting rules that make journal entries from this event. */
  readonly rules: readonly string[];
  /** Includes the gateway's references and transaction ids. `personal`: the opened text; absent for a reader who sees none, and if it was erased. */
  readonly data: Json;
}

/**
 * All events of a payment up to `end`, each with the status after it and its posting rules. If there is none, or the payment is out of scope →
 * PAYMENT_NOT_FOUND. `rules`: only a spec passes them, to test a new version.
 */
export const timeline = async (
  store: EventStore,
  scope: Scope,
  paymentId: string,
  end: Until = {},
  { rules, reader = closedReader }: { readonly rules?: PostingRules; readonly reader?: Reader } = {},
): Promise<Moment[]> => {
  let payment: Payment = decider.initial;
  let books: Books = null;
  const moments: Moment[] = [];
  const texts: ReturnType<typeof textOf>[] = [];
  const policies = await rulePolicies(store, rules);
  for await (const recorded of store.read(paymentStream(paymentId))) {
    if (!isWithin(end, recorded)) continue;
    const event = paymentEvents.read(recorded);
    payment = decider.evolve(payment, event);
    const posted = journalise(recorded, books, policyAt(policies, recorded.position));
    books = posted.books;
    const { meta } = recorded;
    moments.push({
      revision: Number(recorded.revision),
      position: recorded.position,
      eventId: recorded.id,
      type: recorded.type,
      version: recorded.v,
      recordedAt: meta.recordedAt,
      effectiveAt: meta.effectiveAt ?? null,
      actor: meta.actor,
      correlationId: meta.correlationId,
      status: isVisible(payment) ? statusOf(payment) : null,
      feeVersion: event.type === 'PaymentInitiated' ? event.data.feeVersion : null,
      rules: posted.entries.map(({ rule }) => rule),
      data: shownEvent(event).data as unknown as Json,
    });
    texts.push(textOf(paymentId, event));
  }
  // An abandoned stream has no account and no portal.
  const isInside = scope === null || (isVisible(payment) && isInScope(scope, payment.terms));
  if (moments.length === 0 || !isInside) throw notFound();
  const reveal = await reader(keysIn(texts.map((text) => text?.personal ?? null)));
  return moments.map((moment, index) => {
    const text = texts[index]!;
    if (!text) return moment;
    const { personal: _, ...data } = moment.data as Record<string, Json>;
    const shown = reveal.content(text.personal, text.context) as Json;
    return { ...moment, data: shown === null ? data : { ...data, personal: shown } };
  });
};

/** The moment without names of staff, for a key that must not read them. */
export const withoutStaffNames = (moment: Moment): Moment => {
  const { actor, data } = moment;
  const isPerson = actor.type === 'staff' || actor.type === 'operator';
  return {
    ...moment,
    actor: isPerson ? { ...actor, id: null } : actor,
    // `by` is the name of the person who resolved a payment.
    data: moment.type === 'PaymentResolved' ? { ...(data as Record<string, Json>), by: null } : data,
  };
};

export interface ListThenQuery {
  /** RFC 3339; null: now. */
  readonly asOf: string | null;
  readonly accountId: string | null;
  readonly portalId: string | null;
  /** Bounds of createdAt: `from` is inclusive, `to` is exclusive. */
  readonly from: string | null;
  readonly to: string | null;
  readonly status: PaymentStatus | null;
  /** The last payment of the page before. */
  readonly after: { readonly createdAt: string; readonly id: string } | null;
  readonly limit: number;
}

/**
 * Number of payments that are read and folded together. If only a fold shows whether a payment belongs to a page, the page folds at least this many,
 * because most may not belong to it.
 */
export const LOOK_AT = 250;

/**
 * Folds payments as they were at an instant, in the given order. Ends when `limit` of them fit, or after {@link PAGE_BYTES}. `looked`: the number of
 * payments that were folded.
 */
export const foldPage = async (
  store: EventStore,
  ids: readonly string[],
  { asOf, limit }: Pick<ListThenQuery, 'asOf' | 'limit'>,
  fits: (payment: VisiblePayment) => boolean,
  reader: Reader,
): Promise<{ readonly payments: PaymentThen['payment'][]; readonly looked: number }> => {
  const payments: PaymentThen['payment'][] = [];
  let bytes = 0;
  for (let from = 0; from < ids.length; from += LOOK_AT) {
    const some = ids.slice(from, from + LOOK_AT);
    const streams = await readStreams(store, some.map(paymentStream));
    const folded = streams.map((events) => {
      const payment = foldPayment(until(events, { asOf: asOf ?? undefined }));
      return isVisible(payment) && fits(payment) ? payment : null;
    });
    const reveal = await reader([...new Set(folded.flatMap((payment) => (payment ? keysOfPayment(payment) : [])))]);
    for (const [index, id] of some.entries()) {
      const payment = folded[index]!;
      if (payment === null) continue;
      const shown = auditedPayment(id, payment, reveal);
      payments.push(shown);
      bytes += Buffer.byteLength(JSON.stringify(shown));
      if (payments.length === limit || bytes > PAGE_BYTES) return { payments, looked: from + index + 1 };
    }
  }
  return { payments, looked: ids.length };
};

/**
 * A page of the list in scope as it was at an instant, newest first. Folds at most `limit` payments, or {@link LOOK_AT} if that is more
 * and a status at an earlier time is requested.
 * It also ends after {@link PAGE_BYTES}. `next` null: the list has ended. A page can have fewer payments than `limit`, or none, and still have a `next`.
 */
export const listAsOf = async (
  { store, db }: { readonly store: EventStore; readonly db: Queryable },
  scope: Scope,
  { asOf, accountId, portalId, from, to, status, after, limit }: ListThenQuery,
  reader: Reader = closedReader,
): Promise<{ readonly payments: PaymentThen['payment'][]; readonly next: ListThenQuery['after'] }> => {
  // Without `asOf`, the rows hold the status of each payment.
  const ofStatus = asOf === null ? status : null;
  const size = status === ofStatus ? limit : Math.max(limit, LOOK_AT);
  // A payment never leaves the list and never moves in it. The present rows include all payments of that instant.
  const end = Math.min(to === null ? Number.POSITIVE_INFINITY : Date.parse(to), asOf === null ? Number.POSITIVE_INFINITY : Date.parse(asOf) + 1);
  const filters = { portalId, status: ofStatus, from: from === null ? null : Date.parse(from), to: Number.isFinite(end) ? end : null };
  const places = await listPlaces(db, scope, accountId, filters, after, size);
  const ids = places.map(({ id }) => id);
  const { payments, looked } = await foldPage(store, ids, { asOf, limit }, (payment) => status === null || statusOf(payment) === status, reader); // prettier-ignore
  return { payments, next: looked === places.length && places.length < size ? null : places[looked - 1]! };
};
