/**
 * The change feed: the events of the log in its order, and the payments that changed, for jobs of finance that keep a copy
 * (docs/decisions/0053-change-feed.md).
 *
 * A reader names the place `after` which it reads, and gets `next`, the place for its next call. It stores `next` together with what it has done. So it
 * gets each event at least once, also after a crash. Places are positions of the log. An event has its position before any reader can see it, and no
 * event comes later between two positions. So no late event is missed.
 */
import { isInScope, type Scope } from '#accounts';
import { type Actor, type EventStore, NotInTheLog, type Position, readAhead, readStreams, type Recorded, type Subscription } from '#eventstore';
import { type Clock, CLOSED, type Json, ServiceError } from '#kernel';
import { type AuditedPayment, auditedPayment, isVisible, PAGE_BYTES, paymentEvents, paymentIdOf, paymentStream, postgresListRows } from '#payments';
import type { Queryable } from '#platform';
import { isEventType, publicData } from './public-data.js';

export interface FeedPorts {
  readonly store: EventStore;
  readonly db: Queryable;
}

export interface FeedEvent {
  readonly position: string;
  readonly stream: string;
  readonly revision: number;
  readonly eventId: string;
  readonly type: string;
  /** The version of `data`, as it was written. */
  readonly version: number;
  readonly recordedAt: string;
  /** When the event took effect, if that differs from `recordedAt`. */
  readonly effectiveAt: string | null;
  readonly actorType: Actor['type'];
  /** The public part (`public-data.ts`). */
  readonly data: Json;
}

interface Page {
  /** The place for the next call. Everything up to here is in this page or does not pass the filter. null: the log is empty. */
  readonly next: string | null;
  /** True if nothing followed when the page was read. */
  readonly end: boolean;
}
export interface EventPage extends Page {
  readonly events: readonly FeedEvent[];
}

export interface ChangedPayment {
  /** The payment as it is now. */
  readonly payment: AuditedPayment;
  /** Revision of the last event in `payment`. */
  readonly revision: number;
  /** Position of the last event of the payment in (after, next]. */
  readonly position: string;
}
export interface ChangedPage extends Page {
  readonly payments: readonly ChangedPayment[];
}

export interface FeedQuery {
  /** null: from the start of the log. */
  readonly after: string | null;
  readonly limit: number;
  /** Event types. null: all. */
  readonly types: ReadonlySet<string> | null;
}

/** If events are filtered, a page looks at this many. So it may have few events, or none, and `end` false. */
export const LOOKED_AT = 2_000;
/** Payments that are read together from the list. */
const PAYMENTS_AT_ONCE = 100;
/** About so many events change a payment in one page. A page of payments looks at this many for each. */
const EVENTS_OF_PAYMENT = 4;

/** Refuses types that no event has, which would wait for ever. */
export const feedTypes = (text: string | undefined): ReadonlySet<string> | null => {
  if (text === undefined) return null;
  const types = text.split(',');
  const unknown = types.filter((type) => !isEventType(type));
  if (unknown.length > 0) throw new ServiceError('VALIDATION_ERROR', 'types must name types of events, separated by commas.');
  return new Set(types);
};

/** True if the text is a position of the log up to `head`. Each kind of store writes positions in its own form, and their order is the order of text. */
export const isPlaceIn = (head: Position | null, place: string): place is Position => {
  const form = (text: string) => text.replace(/\d/g, '0');
  return head !== null && form(place) === form(head) && place <= head;
};

/** Throws 400 for a place that is not one of this log. */
const placeIn = (head: Position | null, after: string | null): Position | null => {
  if (after !== null && !isPlaceIn(head, after)) throw notAPlace();
  return after;
};
const notAPlace = () =>
  new ServiceError('VALIDATION_ERROR', 'after is no place of this log. Use the next of an earlier answer, or read from the start.');

/** Turns the store's refusal of a place into a 400. */
async function* inLog(batches: AsyncIterable<readonly Recorded[]>): AsyncGenerator<readonly Recorded[], void, void> {
  try {
    yield* batches;
  } catch (error) {
    throw error instanceof NotInTheLog ? notAPlace() : error;
  }
}

const newerRelease = ({ type, v, position }: Recorded) =>
  new ServiceError(
    'RATE_LIMITED',
    `Position ${position} has ${type} version ${v}, which this process does not know. Send the request again when the upgrade is complete.`,
    {},
    { status: 503, retryAfterSeconds: 60 },
  );

/** The account and portal of a payment, which never change. null: its stream has none, because nothing was ever to be charged. */
type Owner = { readonly accountId: string; readonly portalId: string } | null;
type Owners = ReadonlyMap<string, Owner>;

const isPayment = ({ stream }: Recorded): boolean => stream.startsWith(paymentStream(''));

/** The owners of all payments that have an event here. The list may lag behind the log, so a payment without a row is looked up in its stream. */
const ownersOf = async ({ store, db }: FeedPorts, events: readonly Recorded[]): Promise<Owners> => {
  const ids = [...new Set(events.filter(isPayment).map(({ stream }) => paymentIdOf(stream)))];
  if (ids.length === 0) return new Map();
  const { rows } = await db.query<{ payment_id: string; account_id: string; portal_id: string }>(
    'select payment_id, account_id, portal_id from payment_list where payment_id = any($1::uuid[])',
    [ids],
  );
  const owners = new Map<string, Owner>(rows.map((row) => [row.payment_id, { accountId: row.account_id, portalId: row.portal_id }]));
  const missing = ids.filter((id) => !owners.has(id));
  const streams = missing.length === 0 ? [] : await readStreams(store, missing.map(paymentStream));
  for (const [index, id] of missing.entries()) {
    const first = streams[index]![0] && paymentEvents.read(streams[index]![0]);
    owners.set(id, first?.type === 'PaymentInitiated' ? first.data : null);
  }
  return owners;
};

/** The events in scope with these types. A scope with limits has the events of its payments. */
const filtered = async (
  scope: Scope,
  types: ReadonlySet<string> | null,
  events: readonly Recorded[],
  owners: (events: readonly Recorded[]) => Promise<Owners>,
): Promise<readonly Recorded[]> => {
  const wanted = types === null ? events : events.filter(({ type }) => types.has(type));
  if (scope === null || wanted.length === 0) return wanted;
  const known = await owners(wanted);
  return wanted.filter((event) => {
    const owner = isPayment(event) ? (known.get(paymentIdOf(event.stream)) ?? null) : null;
    return owner !== null && isInScope(scope, owner);
  });
};

/** Shows events in order, up to `limit`. If this release does not know an event, ends before it. Throws 503 if that is the first one. */
const shown = (events: readonly Recorded[], limit: number): { readonly events: FeedEvent[]; readonly stoppedAt: Recorded | null } => {
  const page: FeedEvent[] = [];
  for (const recorded of events.slice(0, limit)) {
    const data = publicData(recorded);
    if (data === null) return { events: page, stoppedAt: recorded };
    const { position, stream, revision, id, type, v, meta } = recorded;
    page.push({
      position,
      stream,
      revision: Number(revision),
      eventId: id,
      type,
      version: v,
      recordedAt: meta.recordedAt,
      effectiveAt: meta.effectiveAt ?? null,
      actorType: meta.actor.type,
      data,
    });
  }
  return { events: page, stoppedAt: null };
};

/**
 * A page of the feed for a key. Throws 400 if `after` is no place of this log, and 503 at an event of a newer release. `head`: the end of the log when
 * the page was read.
 */
export const eventPage = async (ports: FeedPorts, scope: Scope, { after, limit, types }: FeedQuery): Promise<EventPage & { head: string | null }> => {
  const head = await ports.store.head();
  const place = placeIn(head, after);
  const events: FeedEvent[] = [];
  if (head === null) return { events, next: after, end: true, head };
  const isFiltered = scope !== null || types !== null;
  let next: string | null = after;
  const batches = ports.store.readAll(place, { max: isFiltered ? Math.max(limit, LOOKED_AT) : limit, until: head });
  for await (const batch of inLog(readAhead(batches))) {
    const matching = await filtered(scope, types, batch, (some) => ownersOf(ports, some));
    const page = shown(matching, limit - events.length);
    events.push(...page.events);
    if (page.stoppedAt !== null) {
      if (events.length === 0) throw newerRelease(page.stoppedAt);
      next = events.at(-1)!.position;
      break;
    }
    next = page.events.length < matching.length ? events.at(-1)!.position : batch.at(-1)!.position;
    if (events.length === limit) break;
  }
  return { events, next, end: next === head, head };
};

/** The place up to which the list has all events. Its checkpoint may lag behind events that do not concern it. */
const listIsTrueTo = async (store: EventStore, until: Position | null, head: Position): Promise<Position | null> => {
  if (until !== null && until >= head) return head;
  for await (const [missing] of store.readAll(until, { max: 1, until: head, streamPrefixes: [paymentStream('')] })) return missing ? until : head;
  return head;
};

/**
 * A page of the payments that changed. Throws 400 if `after` is no place of this log. `until`: the checkpoint of the list. `next` never passes it, so
 * the page is true up to `next` while the list stands still.
 */
export const changedPayments = async (
  { store, db }: FeedPorts,
  scope: Scope,
  { after, limit, until }: { readonly after: string | null; readonly limit: number; readonly until: string | null },
): Promise<ChangedPage & { head: string | null }> => {
  const head = await store.head();
  const place = placeIn(head, after);
  const to = head === null ? null : await listIsTrueTo(store, until as Position | null, head);
  if (head === null || to === null || (after !== null && after >= to)) return { payments: [], next: after, end: head === after, head };
  const looked: { readonly id: string; readonly position: string }[] = [];
  const most = scope === null ? Math.min(LOOKED_AT, limit * EVENTS_OF_PAYMENT) : LOOKED_AT;
  for await (const batch of inLog(store.readAll(place, { max: most, until: to, streamPrefixes: [paymentStream('')] })))
    for (const { stream, position } of batch) looked.push({ id: paymentIdOf(stream), position });
  /** The payments, in the order of their first events here. */
  const touched: { readonly id: string; readonly first: number }[] = [];
  const ids = new Set<string>();
  for (const [first, { id }] of looked.entries()) if (ids.size < ids.add(id).size) touched.push({ id, first });

  const views = new Map<string, Omit<ChangedPayment, 'position'>>();
  let bytes = 0;
  /** Number of the looked events that this page answers for. */
  let answered = looked.length;
  for (let from = 0; from < touched.length && answered === looked.length; from += PAYMENTS_AT_ONCE) {
    const group = touched.slice(from, from + PAYMENTS_AT_ONCE);
    const rows = new Map((await postgresListRows(db).read(group.map(({ id }) => id))).map((row) => [row.paymentId, row]));
    for (const { id, first } of group) {
      if (views.size === limit || bytes > PAGE_BYTES) {
        answered = first;
        break;
      }
      const row = rows.get(id);
      // A stream without a charge has no row.
      if (!row || !isVisible(row.payment) || !isInScope(scope, row.payment.terms)) continue;
      const payment = auditedPayment(id, row.payment, CLOSED);
      views.set(id, { payment, revision: Number(row.revision) });
      bytes += Buffer.byteLength(JSON.stringify(payment));
    }
  }
  const last = new Map(looked.slice(0, answered).map(({ id, position }) => [id, position]));
  const payments = [...views]
    .map(([id, view]) => ({ ...view, position: last.get(id)! }))
    .sort((one, other) => (one.position < other.position ? -1 : 1));
  const isWhole = answered === looked.length && looked.length < most;
  const next = isWhole ? to : looked[answered - 1]!.position;
  return { payments, next, end: next === head, head };
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Waiting for events.

/** Readers that may wait at the same time, in one process. */
export const MAX_WAITS = 64;
/** Of one key. */
export const MAX_WAITS_PER_KEY = 4;
/** Longest wait, in seconds. */
export const MAX_WAIT_SECONDS = 30;
/** Value of `Retry-After` for a reader that finds no seat, in seconds. */
const RETRY_SECONDS = 5;
/** The subscription is kept for this long after the last reader, who may come back. */
const LINGER_MS = 60_000;
/** Batches that may queue up for a reader. One that has more reads a page again. */
const MAX_QUEUED = 20;

/** Events of the subscription. All readers of a batch share what is looked up for it. */
interface Batch {
  readonly events: readonly Recorded[];
  readonly owners: () => Promise<Owners>;
  readonly head: () => Promise<string | null>;
}

/** The place of a reader that may wait. It collects the events that arrive from the moment at which it was taken. */
export interface Seat {
  /** True if everything up to `after` arrived before this seat was taken, and nothing else. Then no page needs to be read before the wait. */
  isAt(after: string | null): boolean;
  /**
   * The first events after `after` that pass the filter, as soon as there are any. Without such events: an empty page after `waitMs`, or when `signal`
   * aborts. Call this once, after a page that reached the end of the log was read, or if {@link isAt}.
   */
  wait(scope: Scope, query: FeedQuery, waitMs: number, signal: AbortSignal): Promise<EventPage & { head: string | null }>;
  leave(): void;
}

/** All readers of a process that wait. They share one subscription to the log, so a reader that waits costs nothing. */
export class FeedWaits {
  private readonly seats = new Set<WaitingReader>();
  private following: Promise<Subscription> | null = null;
  private subscription: Subscription | null = null;
  /** Every event up to here has arrived. */
  private position: string | null = null;
  private lingering = new AbortController();
  private isClosed = false;

  constructor(
    private readonly ports: FeedPorts,
    private readonly clock: Clock,
  ) {}

  /** The number of taken seats. */
  get taken(): number {
    return this.seats.size;
  }

  /** Throws 429 with `Retry-After` if too many readers wait, in this process or with this key. */
  async take(keyId: string): Promise<Seat> {
    const ofKey = [...this.seats].filter((seat) => seat.keyId === keyId).length;
    if (this.seats.size >= MAX_WAITS || ofKey >= MAX_WAITS_PER_KEY)
      throw new ServiceError(
        'RATE_LIMITED',
        `${ofKey >= MAX_WAITS_PER_KEY ? `${MAX_WAITS_PER_KEY} readers with this key` : `${MAX_WAITS} readers`} wait, and no more may. Send the request again later, or without wait.`,
        {},
        { retryAfterSeconds: RETRY_SECONDS },
      );
    const seat: WaitingReader = new WaitingReader(keyId, this.ports, this.clock, () => this.leave(seat));
    this.seats.add(seat);
    this.lingering.abort('a reader waits');
    try {
      // The subscription begins at the end of the log. Every later page of this reader is read up to there, or further.
      if (this.isClosed) seat.end();
      else await (this.following ??= this.follow());
    } catch (error) {
      this.following = null;
      seat.leave();
      throw error;
    }
    seat.begin(this.position);
    return seat;
  }

  /** Ends all waits: each reader gets an empty page. */
  async close(): Promise<void> {
    this.isClosed = true;
    for (const seat of this.seats) seat.end();
    this.lingering.abort('closed');
    await this.unfollow();
  }

  private leave(seat: WaitingReader): void {
    if (!this.seats.delete(seat) || this.seats.size > 0 || this.isClosed) return;
    const { signal } = (this.lingering = new AbortController());
    void this.clock.sleep(LINGER_MS, signal).then(() => (signal.aborted ? undefined : this.unfollow()));
  }

  private async follow(): Promise<Subscription> {
    const { store } = this.ports;
    const head = await store.head();
    this.position = head;
    this.subscription = store.subscribe(head);
    void this.pass(this.subscription);
    return this.subscription;
  }

  private async unfollow(): Promise<void> {
    const { following } = this;
    this.following = this.subscription = null;
    await (await following?.catch(() => null))?.close();
  }

  /** Hands events to all seats. If the subscription fails, all waits end: the next page says what is wrong with the log. */
  private async pass(subscription: Subscription): Promise<void> {
    try {
      for await (const item of subscription) {
        if (item.kind !== 'events' || this.subscription !== subscription) continue;
        const { events } = item;
        let [owners, head]: [Promise<Owners> | null, Promise<string | null> | null] = [null, null];
        const batch: Batch = {
          events,
          owners: () => (owners ??= ownersOf(this.ports, events)),
          head: () => (head ??= this.ports.store.head()),
        };
        this.position = events.at(-1)!.position;
        for (const seat of this.seats) seat.offer(batch);
      }
    } catch {
      for (const seat of this.seats) seat.end();
      await this.unfollow();
    }
  }
}

class WaitingReader implements Seat {
  private readonly queue: Batch[] = [];
  private begunAt: string | null | undefined;
  /** Aborted at the end of all waits, and if events are lost to this reader. */
  private readonly ended = new AbortController();
  private wake: () => void = () => undefined;

  constructor(
    readonly keyId: string,
    private readonly ports: FeedPorts,
    private readonly clock: Clock,
    readonly leave: () => void,
  ) {}

  /** Events after this place will be offered, or were offered already. */
  begin(position: string | null): void {
    this.begunAt = this.queue.length === 0 ? position : undefined;
  }

  isAt(after: string | null): boolean {
    return after !== null && after === this.begunAt;
  }

  offer(batch: Batch): void {
    if (this.ended.signal.aborted) return;
    if (this.queue.length === MAX_QUEUED) return this.end();
    this.queue.push(batch);
    this.wake();
  }

  end(): void {
    this.ended.abort('ended');
    this.wake();
  }

  async wait(scope: Scope, { after, limit, types }: FeedQuery, waitMs: number, signal: AbortSignal): Promise<EventPage & { head: string | null }> {
    const timer = new AbortController();
    let isLate = false;
    const isOver = () => isLate || signal.aborted || this.ended.signal.aborted;
    const stop = () => this.wake();
    signal.addEventListener('abort', stop, { once: true });
    void this.clock.sleep(waitMs, timer.signal).then(() => {
      isLate = true;
      this.wake();
    });
    let next = after;
    try {
      for (;;) {
        for (let batch = this.queue.shift(); batch !== undefined; batch = this.queue.shift()) {
          const fresh = batch.events.filter(({ position }) => next === null || position > next);
          if (fresh.length === 0) continue;
          const matching = await filtered(scope, types, fresh, batch.owners);
          const page = shown(matching, limit);
          if (page.stoppedAt !== null && page.events.length === 0) throw newerRelease(page.stoppedAt);
          next = page.events.length < matching.length ? page.events.at(-1)!.position : fresh.at(-1)!.position;
          if (page.events.length === 0) continue;
          const head = await batch.head();
          return { events: page.events, next, end: next === head, head };
        }
        if (isOver()) break;
        await new Promise<void>((woken) => (this.wake = woken));
      }
      const head = await this.ports.store.head();
      return { events: [], next, end: next === head, head };
    } finally {
      timer.abort('answered');
      signal.removeEventListener('abort', stop);
    }
  }
}
