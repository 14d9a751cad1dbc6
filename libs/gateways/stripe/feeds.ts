/**
 * Payouts, disputes and the description of a Stripe account.
 *
 * Stripe lists newest first. A feed reads what was created since its cursor, and goes on with the oldest. Some objects are not final when they are
 * first seen: a payout whose lines are not known yet, or an inquiry that may become a dispute. The cursor names them, and the next reading asks for
 * each by its id.
 */
import type { Clock } from '#kernel';
import { timestamp } from '#kernel';
import {
  type AccountDescription,
  type DisputeStatus,
  type GatewayDispute,
  type GoneDispute,
  MAX_CURSOR_CHARACTERS,
  type PaymentGateway,
  type SettledBatch,
  type SettlementRecord,
  UnknownCursor,
} from '#payments';
import { clockProblems } from '../transport/clocks.js';
import type { Pace } from '../transport/pace.js';
import type { Answered, CallTerms, StripeCall } from './client.js';
import { type Fields, fieldsOf, idOf, isFields, textOf, wholeOf } from './fields.js';

/** Of one list. Stripe's maximum. */
const PAGE = 100;

/**
 * Pages of one list, of {@link PAGE} objects each. No payout has half a million lines. A list that goes on is a fault of the vendor: the reading ends,
 * and the next one goes on at the cursor.
 */
export const MAX_PAGES = 5_000;
/** Pages of one list that show nothing new. */
const MAX_EMPTY_PAGES = 3;

/** Stripe could not be asked, or its answer could not be read. Its own text is not quoted. */
export class StripeUnanswered extends Error {
  constructor(what: string, answered: Answered | null) {
    const cause =
      answered === null || answered.kind === 'ok'
        ? 'the answer cannot be read'
        : answered.kind === 'refused'
          ? `HTTP ${answered.status} ${answered.code || answered.type}`
          : answered.raw;
    super(`Stripe did not answer with ${what}: ${cause}`);
    this.name = 'StripeUnanswered';
  }
}

export interface FeedPorts {
  readonly clock: Clock;
  /** Makes a call, and repeats it while it is refused only for now. */
  readonly patiently: (make: StripeCall, terms: CallTerms) => Promise<Answered>;
  readonly pace: Pace;
  readonly merchantAccount: string;
  readonly log: (message: string, fields: object) => void;
}

type Feeds = Required<Pick<PaymentGateway, 'settlements' | 'disputes' | 'describe'>>;

/** An object may appear in its list this long after its own time, in seconds. So the last part of a feed is listed again. */
const OVERLAP_S = 600;

/** A place in a feed. `at`: the list is read from this second on. `ids`: objects from then on that were read. `open`: objects that were not final. */
interface Place {
  readonly at: number;
  readonly ids: readonly string[];
  readonly open: readonly string[];
}
const BEGINNING: Place = { at: 0, ids: [], open: [] };

const isIds = (value: unknown): value is string[] => Array.isArray(value) && value.every((id) => idOf(id) !== null);

const readPlace = (cursor: string | null): Place => {
  if (cursor === null) return BEGINNING;
  try {
    const [version, at, ids, open] = JSON.parse(cursor) as unknown[];
    if (version === 1 && wholeOf(at) === at && isIds(ids) && isIds(open)) return { at: at as number, ids, open };
  } catch {
    // Not ours.
  }
  throw new UnknownCursor(cursor.slice(0, 64));
};

/** An object of a feed. `later`: it is not final. `never`: it is nothing for us, and stays so. */
interface Item {
  readonly id: string;
  readonly created: number;
  readonly what: 'ready' | 'later' | 'never';
  readonly thing: Fields;
}

/** The place up to which a feed was read. */
class Progress {
  private newest: number;
  /** The objects of the overlap, with their seconds. */
  private readonly ids: Map<string, number>;
  /** The objects that are not final, with their seconds. Those of the cursor that were not asked for yet have the second 0. */
  private readonly open: Map<string, number>;

  constructor(private readonly place: Place) {
    this.newest = place.at;
    this.ids = new Map(place.ids.map((id) => [id, place.at]));
    this.open = new Map(place.open.map((id) => [id, 0]));
  }

  passed({ id, created, what }: Item): void {
    if (what === 'later') this.open.set(id, created);
    else this.open.delete(id);
    this.read(id, created);
  }

  /** The object was read, now or before. */
  read(id: string, created: number): void {
    this.newest = Math.max(this.newest, created);
    this.ids.set(id, created);
    for (const [one, at] of this.ids) if (at < this.from) this.ids.delete(one);
  }

  private get from(): number {
    return Math.max(this.place.at, this.newest - OVERLAP_S);
  }

  get cursor(): string {
    // If the overlap holds too many to name, it becomes shorter.
    for (const from of [this.from, ...[...this.ids.values()].filter((at) => at > this.from).sort((a, b) => a - b)]) {
      const ids = [...this.ids].filter(([, at]) => at >= from).map(([id]) => id);
      const whole = JSON.stringify([1, from, ids, [...this.open.keys()]]);
      if (whole.length <= MAX_CURSOR_CHARACTERS) return whole;
    }
    // Too many to name. Everything since the oldest of them is read again, and nothing of it is recorded twice.
    return JSON.stringify([1, Math.min(this.newest, ...this.open.values()), [], []]);
  }
}

const DISPUTES: Readonly<Record<string, DisputeStatus>> = {
  needs_response: 'debited',
  under_review: 'in_dispute',
  won: 'recovered',
  lost: 'lost',
  appeal_needs_response: 'in_dispute',
  appeal_under_review: 'in_dispute',
};
/** These statuses of disputes are final, and no money has moved. If such a dispute was reported before, its money is back. */
const NO_DISPUTE = ['warning_closed', 'prevented'];
const FEES = ['stripe_fee', 'stripe_fx_fee', 'tax_fee', 'application_fee'];

const dayOf = (seconds: number): string => timestamp(seconds * 1_000).slice(0, 10);
const isOurPayout = (payout: Fields): boolean => payout.automatic === true || textOf(payout.reconciliation_status) !== 'not_applicable';

export const createFeeds = ({ clock, patiently, pace, merchantAccount, log }: FeedPorts): Feeds => {
  const askedWithDate = async (make: StripeCall, what: string, signal: AbortSignal): Promise<Extract<Answered, { kind: 'ok' }>> => {
    await pace(signal);
    const answered = await patiently(make, { signal, isList: true });
    if (answered.kind !== 'ok') throw new StripeUnanswered(what, answered);
    return answered;
  };
  const asked = async (make: StripeCall, what: string, signal: AbortSignal): Promise<Fields> => (await askedWithDate(make, what, signal)).value;
  /** One object by its id. null: the account has none. */
  const askedById = async (make: StripeCall, what: string, id: string, signal: AbortSignal): Promise<Fields | null> => {
    await pace(signal);
    const answered = await patiently(make, { signal, isList: true });
    if (answered.kind === 'ok') return answered.value;
    if (answered.kind !== 'refused' || (answered.status !== 404 && answered.code !== 'resource_missing')) throw new StripeUnanswered(what, answered);
    log('Stripe does not know an object that it has shown before', { merchantAccount, id });
    return null;
  };

  /** The members of a list, page by page. A member that the page before has shown is passed over. */
  async function* listed(
    what: string,
    list: (page: { limit: number; starting_after?: string }) => StripeCall,
    signal: AbortSignal,
  ): AsyncIterable<Fields> {
    let before: ReadonlySet<string> = new Set();
    let after: string | null = null;
    let empty = 0;
    for (let count = 1; count <= MAX_PAGES; count += 1) {
      const page = await asked(list({ limit: PAGE, ...(after !== null && { starting_after: after }) }), what, signal);
      const data = page.data ?? [];
      if (!Array.isArray(data) || !data.every((item) => isFields(item) && idOf(item.id) !== null)) throw new StripeUnanswered(what, null);
      const items = data as Fields[];
      const ids = items.map(({ id }) => id as string);
      for (const item of items) if (!before.has(item.id as string)) yield item;
      if (page.has_more !== true) return;
      const last: string | null = ids.at(-1) ?? null;
      empty = ids.every((id) => before.has(id)) ? empty + 1 : 0;
      if (empty > MAX_EMPTY_PAGES || last === null || last === after) throw new StripeUnanswered(`${what} that end`, null);
      [before, after] = [new Set(ids), last];
    }
    throw new StripeUnanswered(`${what} on at most ${MAX_PAGES} pages`, null);
  }

  /** The objects of a feed after a place, oldest first. The open ones of the place come first. */
  async function* items(
    what: string,
    place: Place,
    progress: Progress,
    list: (page: { limit: number; starting_after?: string; created: { gte: number } }) => StripeCall,
    retrieve: (id: string) => StripeCall,
    judge: (thing: Fields) => Item['what'],
    signal: AbortSignal,
  ): AsyncIterable<Item> {
    const itemOf = (thing: Fields): Item => {
      const [id, created] = [idOf(thing.id), wholeOf(thing.created)];
      if (id === null || created === null) throw new StripeUnanswered(what, null);
      return { id, created, what: judge(thing), thing };
    };
    for (const id of place.open) {
      const thing = await askedById(retrieve(id), what, id, signal);
      // It stays open, so that it is asked for again.
      yield thing ? itemOf(thing) : { id, created: 0, what: 'later', thing: {} };
    }
    const fresh: Item[] = [];
    const known = new Set([...place.ids, ...place.open]);
    for await (const thing of listed(what, (page) => list({ ...page, created: { gte: place.at } }), signal)) {
      const item = itemOf(thing);
      if (!known.has(item.id)) fresh.push(item);
      else if (!place.open.includes(item.id)) progress.read(item.id, item.created);
    }
    yield* fresh.reverse();
  }

  /** True: it is in another currency, so it belongs to another program of the merchant. */
  const isForeign = (what: 'payout' | 'dispute', thing: Fields): boolean => {
    const foreign = textOf(thing.currency) !== 'usd';
    if (foreign) log(`a ${what} in another currency is passed over`, { merchantAccount, [what]: idOf(thing.id) });
    return foreign;
  };

  // ---- Payouts ------------------------------------------------------------------------------------------------------------------

  const judgePayout = (payout: Fields): Item['what'] => {
    // Stripe does not know what a manual payout pays out.
    if (!isOurPayout(payout)) return 'never';
    if (isForeign('payout', payout)) return 'never';
    return textOf(payout.reconciliation_status) === 'completed' ? 'ready' : 'later';
  };

  /** null: the payout's own transaction. */
  const recordOf = (txn: Fields, payoutId: string): SettlementRecord | null => {
    const id = idOf(txn.id);
    const [amount, fee, net] = [wholeOf(txn.amount), wholeOf(txn.fee) ?? 0, wholeOf(txn.net)];
    if (id === null || amount === null || net === null || net !== amount - fee || textOf(txn.currency) !== 'usd')
      throw new StripeUnanswered('lines of a payout', null);
    const source = fieldsOf(txn.source);
    const sourceId = idOf(txn.source);
    const [type, category] = [textOf(txn.type), textOf(txn.reporting_category)];
    if (type === 'payout' && sourceId === payoutId) return null;
    const cents = { accepted: true, grossCents: amount, feeCents: fee, netCents: net };
    const ref = textOf(fieldsOf(source.metadata).payfold_ref);
    const ours = /^[0-9A-Za-z]{20}$/.test(ref) ? { ref } : {};
    const intentId = idOf(source.payment_intent);
    switch (type) {
      case 'charge':
      case 'payment':
        return { type: 'sale', transactionId: intentId ?? sourceId ?? id, ...ours, ...cents };
      case 'refund':
      case 'payment_refund':
        return { type: 'refund', transactionId: sourceId ?? id, ...ours, ...cents };
      case 'refund_failure':
      case 'payment_failure_refund':
        return { type: 'refund_failure', transactionId: sourceId ?? id, ...ours, ...cents };
      default:
    }
    // A dispute is a line of the charge that it disputes.
    const disputed = intentId ?? idOf(source.charge);
    if (category === 'dispute' && disputed !== null) return { type: 'chargeback', transactionId: disputed, ...cents };
    if (category === 'dispute_reversal' && disputed !== null) return { type: 'chargeback_reversal', transactionId: disputed, ...cents };
    // Some failed refunds come as adjustments.
    if (category === 'refund_failure') return { type: 'refund_failure', transactionId: sourceId ?? id, ...ours, ...cents };
    if (FEES.includes(type) || category === 'fee' || category === 'network_cost')
      return { type: 'fee', transactionId: id, accepted: true, grossCents: 0, feeCents: 0 - net, netCents: net };
    return { type: 'adjustment', transactionId: id, ...cents };
  };

  async function* linesOf(payout: Fields, payoutId: string, signal: AbortSignal): AsyncIterable<SettlementRecord> {
    const amount = wholeOf(payout.amount);
    let sum = 0;
    const list =
      (page: { limit: number; starting_after?: string }): StripeCall =>
      (stripe, terms) =>
        stripe.balanceTransactions.list({ ...page, payout: payoutId, expand: ['data.source'] }, terms);
    for await (const txn of listed('lines of a payout', list, signal)) {
      const record = recordOf(txn, payoutId);
      if (!record) continue;
      sum += record.netCents;
      yield record;
    }
    // The lines of a payout add up to its amount. Otherwise a line is missing, and the batch must not count as complete.
    if (sum !== amount) throw new StripeUnanswered(`lines of payout ${payoutId} that add up to its amount`, null);
  }

  async function* settlements(cursor: string | null, signal: AbortSignal): AsyncIterable<SettledBatch> {
    const place = readPlace(cursor);
    const progress = new Progress(place);
    const all = items(
      'payouts',
      place,
      progress,
      (page) => (stripe, terms) => stripe.payouts.list(page, terms),
      (id) => (stripe, terms) => stripe.payouts.retrieve(id, {}, terms),
      judgePayout,
      signal,
    );
    for await (const item of all) {
      progress.passed(item);
      if (item.what !== 'ready') continue;
      const { id, created, thing } = item;
      const arrival = wholeOf(thing.arrival_date);
      const hasFailed = ['failed', 'canceled'].includes(textOf(thing.status));
      yield {
        batchId: id,
        closedAt: timestamp(created * 1_000),
        // The money of a failed payout comes back, and a later payout holds it again.
        ...(arrival !== null && !hasFailed && { fundedOn: dayOf(arrival) }),
        cursor: progress.cursor,
        lines: linesOf(thing, id, signal),
      };
    }
  }

  // ---- Disputes -----------------------------------------------------------------------------------------------------------------

  const judgeDispute = (dispute: Fields): Item['what'] => {
    if (isForeign('dispute', dispute)) return 'never';
    const status = textOf(dispute.status);
    if (Object.hasOwn(DISPUTES, status)) return 'ready';
    const what = NO_DISPUTE.includes(status) ? 'never' : 'later';
    log('a dispute moves no money', { merchantAccount, dispute: idOf(dispute.id), status: /^[a-z_]{1,40}$/.test(status) ? status : 'unknown' });
    return what;
  };

  const disputeOf = ({ id, created, thing }: Item): GatewayDispute => {
    const status = textOf(thing.status);
    const chargeTransactionId = idOf(thing.payment_intent) ?? idOf(thing.charge);
    const amountCents = wholeOf(thing.amount);
    if (chargeTransactionId === null || amountCents === null) throw new StripeUnanswered('a dispute', null);
    const word = (value: unknown) => (/^[0-9A-Za-z_. -]{1,64}$/.test(textOf(value)) ? textOf(value) : '');
    const reason = word(thing.reason) || 'unknown';
    const evidence = fieldsOf(thing.evidence_details);
    const dueBy = wholeOf(evidence.due_by);
    return {
      externalId: id,
      chargeTransactionId,
      ref: textOf(fieldsOf(fieldsOf(thing.charge).metadata).payfold_ref) || null,
      status: DISPUTES[status] ?? 'recovered',
      stage: status,
      reasonCode: word(fieldsOf(fieldsOf(thing.payment_method_details).card).network_reason_code) || reason,
      reason,
      amountCents,
      openedOn: dayOf(created),
      dueDate: dueBy !== null && evidence.past_due !== true && status.endsWith('needs_response') ? dayOf(dueBy) : null,
    };
  };

  async function* disputes(
    open: readonly string[],
    cursor: string | null,
    signal: AbortSignal,
  ): AsyncIterable<(GatewayDispute | GoneDispute) & { readonly cursor: string }> {
    const place = readPlace(cursor);
    const progress = new Progress(place);
    const retrieve =
      (id: string): StripeCall =>
      (stripe, terms) =>
        stripe.disputes.retrieve(id, { expand: ['charge'] }, terms);
    for (const id of new Set(open)) {
      if (idOf(id) === null || place.open.includes(id)) continue;
      const thing = await askedById(retrieve(id), 'a dispute', id, signal);
      if (!thing) {
        yield { externalId: id, gone: true, cursor: progress.cursor };
        continue;
      }
      const created = wholeOf(thing.created);
      if (idOf(thing.id) !== id || created === null) throw new StripeUnanswered('a dispute', null);
      const item: Item = { id, created, what: judgeDispute(thing), thing };
      // The dispute was reported before, so its end is reported too.
      if (item.what === 'ready' || NO_DISPUTE.includes(textOf(thing.status))) yield { ...disputeOf(item), cursor: progress.cursor };
    }
    const all = items(
      'disputes',
      place,
      progress,
      (page) => (stripe, terms) => stripe.disputes.list({ ...page, expand: ['data.charge'] }, terms),
      retrieve,
      judgeDispute,
      signal,
    );
    for await (const item of all) {
      progress.passed(item);
      if (item.what === 'ready' && !open.includes(item.id)) yield { ...disputeOf(item), cursor: progress.cursor };
    }
  }

  // ---- The account --------------------------------------------------------------------------------------------------------------

  /** The lists that the adapter reads. A restricted key needs a permission for each. */
  const READS: readonly [string, StripeCall][] = [
    ['PaymentIntents', (stripe, terms) => stripe.paymentIntents.list({ limit: 1 }, terms)],
    ['Charges and Refunds', (stripe, terms) => stripe.refunds.list({ limit: 1 }, terms)],
    ['Payouts', (stripe, terms) => stripe.payouts.list({ limit: 1 }, terms)],
    ['Balance transactions', (stripe, terms) => stripe.balanceTransactions.list({ limit: 1 }, terms)],
    ['Disputes', (stripe, terms) => stripe.disputes.list({ limit: 1 }, terms)],
  ];

  const describe = async (signal: AbortSignal): Promise<AccountDescription> => {
    const about = await asked((stripe, terms) => stripe.accounts.retrieveCurrent({}, terms), 'the account', signal);
    const { value: balance, date } = await askedWithDate((stripe, terms) => stripe.balance.retrieve({}, terms), 'the balance', signal);
    const externalId = idOf(about.id);
    if (externalId === null || typeof balance.livemode !== 'boolean') throw new StripeUnanswered('the account', null);
    const settings = fieldsOf(about.settings);
    const dashboard = fieldsOf(settings.dashboard);
    const problems: string[] = [...clockProblems('Stripe', date, clock)];
    if (about.charges_enabled === false) problems.push('Stripe does not let this account charge; complete it under Settings, Business.');
    if (about.payouts_enabled === false) problems.push('Stripe does not pay this account out; complete it under Settings, Business.');
    if (textOf(about.default_currency) !== 'usd') problems.push('The default currency of this account must be USD.');
    const { interval } = fieldsOf(fieldsOf(settings.payouts).schedule);
    if (interval === 'manual')
      problems.push('Payouts of this account are manual, so Stripe names no lines of theirs; make them automatic under Settings, Payouts.');
    for (const [name, read] of READS) {
      const answered = await patiently(read, { signal, isList: true });
      if (answered.kind === 'refused' && answered.status === 403)
        problems.push(`The restricted key may not read ${name}; give it this permission under Developers, API keys.`);
      else if (answered.kind !== 'ok') throw new StripeUnanswered(name, answered);
    }
    const timeZone = textOf(dashboard.timezone);
    return {
      externalId,
      name: (textOf(dashboard.display_name) || textOf(fieldsOf(about.business_profile).name) || externalId).slice(0, 200),
      environment: balance.livemode ? 'production' : 'sandbox',
      testMode: false,
      ...(/^[A-Za-z_+/0-9-]{1,64}$/.test(timeZone) && { timeZone }),
      problems,
    };
  };

  return { settlements, disputes, describe };
};
