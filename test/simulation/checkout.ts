/**
 * Hosted checkout in the simulation: the handling of parsed payer requests, simulated payers, and the rules for their sessions.
 *
 * A session and its payment are two streams without a common idempotency key (C66). A crash between two appends makes them differ. They agree again
 * after a request, a waiting page or the worker's round has read both.
 */
import {
  checkout as decider,
  type CheckoutPorts,
  followNow,
  type IntakeRow,
  type KnownCheckout,
  mayLeave,
  pay,
  paymentOf,
  quoteOf,
  type Session,
  takeIn,
  checkoutEvents,
  type View,
  viewOf,
} from '#checkout';
import { Conflict, type Recorded, StoreIncident } from '#eventstore';
import { fold, ServiceError } from '#kernel';
import { gatewayRef, Secret, storeIncident } from '#payments';
import type { KeyRing } from '#platform';
import type { Check } from './audits.js';
import { type Bank, type CardKind, CARDS } from './bank.js';
import { CVV, type Exchange, type Intention, told } from './oracle.js';
import type { Outside } from './partners.js';
import { ACCOUNTS, AGENCY, type PortalTerms } from './service.js';

// ------------------------------------------------------------------------------------------------------------------------------------
// The payer's routes: the decisions of `apps/api/payer/checkout.controller.ts`, without its forms and pages.

/** A request from a payer's browser or from a partner's server. */
export type PayerAsk =
  | {
      readonly kind: 'check out';
      readonly nonce: string;
      readonly portal: PortalTerms;
      readonly lines: readonly number[];
      readonly reference: string;
    }
  | { readonly kind: 'look'; readonly checkoutId: string }
  | { readonly kind: 'submit'; readonly checkoutId: string; readonly attemptId: string; readonly card: CardKind }
  | { readonly kind: 'leave'; readonly checkoutId: string }
  | { readonly kind: 'cancel'; readonly checkoutId: string };

/** The facts that a page of the session shows. */
export interface Page {
  readonly checkoutId: string;
  readonly view: View;
  /** The payment of the attempt that is in flight, or that paid. */
  readonly paymentId: string | null;
  /** Attempts that the session has recorded. */
  readonly attemptIds: readonly string[];
  readonly mayLeave: boolean;
}

const page = ({ checkoutId, checkout, content }: Session, now: number): Page => ({
  checkoutId,
  view: viewOf({ checkout, content }, now),
  paymentId: 'attempt' in checkout ? checkout.attempt.paymentId : null,
  attemptIds: checkout.attemptIds,
  mayLeave: mayLeave(checkout, now),
});

export const servePayer = async (ports: CheckoutPorts, keys: KeyRing, ask: PayerAsk, requestId: string): Promise<Page> => {
  const { sessions, directory, payments } = ports;
  const now = () => payments.clock.now();
  if (ask.kind === 'check out') {
    const outcome = await takeIn(ports, keys, intake(ask), { actor: { type: 'payer', id: 'intake' }, correlationId: requestId });
    if (outcome.to === 'too_many') throw new Error('the simulation has no rate limits');
    if (outcome.to !== 'session') throw new ServiceError(outcome.code, outcome.message);
    return page(outcome.session, now());
  }
  const by = { actor: { type: 'payer', id: ask.checkoutId }, correlationId: requestId } as const;
  const refuseInIncident = () => {
    if (payments.ownLog.incident) throw storeIncident();
  };
  if (ask.kind === 'submit') refuseInIncident();
  const session = await sessions.load(ask.checkoutId);
  const portal = session && (await directory.portal(session.checkout.terms.portalId));
  if (!session || !portal) refuseInIncident();
  if (!session || !portal) throw new ServiceError('PAYMENT_NOT_FOUND', 'There is no such checkout.');
  const settled = async (from: Session, change: () => Promise<Session>): Promise<Session> => {
    try {
      return await change();
    } catch (error) {
      const isRefused =
        error instanceof Conflict || error instanceof StoreIncident || (error instanceof ServiceError && error.code === 'INVALID_STATE');
      if (!isRefused) throw error;
      return (await sessions.load(from.checkoutId)) ?? from;
    }
  };
  const followed = () => settled(session, () => followNow(ports, session, by));
  const view = viewOf(session, now());
  if (view === 'pay') refuseInIncident();
  switch (ask.kind) {
    case 'look':
      return page(view === 'processing' ? await followed() : session, now());
    case 'submit': {
      const { attemptId, card } = ask;
      if (view !== 'pay' || session.checkout.attemptIds.includes(attemptId)) return page(session, now());
      const quotedTotalCents = quoteOf(session.checkout.terms, portal).totalCents;
      const instrument = { type: 'card', number: new Secret(CARDS[card]), expiry: { month: 12, year: 2040 }, cvv: new Secret(CVV) } as const;
      return page(
        await settled(session, () =>
          pay(ports, session, { attemptId, quotedTotalCents, instrument, payer: {}, gateway: portal.gateway!.gateway }, by),
        ),
        now(),
      );
    }
    case 'leave': {
      const latest = await followed();
      if (!mayLeave(latest.checkout, now()) || !(await paymentOf(ports, latest.checkout.attempt))) return page(latest, now());
      return page(await settled(latest, () => sessions.execute(latest, { type: 'Leave' }, by)), now());
    }
    case 'cancel':
      if (view === 'processing' || view === 'receipt') return page(session, now());
      return page(await settled(session, () => sessions.execute(session, { type: view === 'expired' ? 'Expire' : 'Cancel' }, by)), now());
  }
};

/** The intake request of a partner's server. Requests with the same nonce open one session. */
const intake = ({ nonce, portal, lines, reference: referenceId }: Extract<PayerAsk, { kind: 'check out' }>): Parameters<typeof takeIn>[2] => ({
  kind: 'json',
  address: `${AGENCY}/intake`,
  pairs: new Map([
    ['portal_id', portal.portalId],
    ['cancel_url', `${AGENCY}/cancelled`],
    ['return_url', `${AGENCY}/done`],
    ['nonce', nonce],
    ['reference_id', referenceId],
    ['line_items', JSON.stringify(lines)],
  ]),
  content: () => ({
    referenceId,
    amountCents: lines.reduce((sum, cents) => sum + cents, 0),
    lineItems: lines.map((amountCents, index) => ({ amountCents, referenceId: `INV-${index + 1}`, description: null, metadata: null })),
    payer: {},
    state: null,
    locale: null,
  }),
  admitUnsigned: () => null,
});

// ------------------------------------------------------------------------------------------------------------------------------------
// Payers.

export interface Visit {
  readonly portal: PortalTerms;
  readonly lines: readonly number[];
  /** Cards to try, one after the other, while the page has a card form. */
  readonly cards: readonly CardKind[];
  readonly nonce: string;
  readonly reference: string;
  /** How the payer presses Pay twice: in one window (`click`), or in two windows at once (`window`). */
  readonly twice?: 'click' | 'window';
  /** The payer closes the browser after sending the card. The worker must finish the session. */
  readonly closes?: boolean;
  /** The payer cancels when no card is left (`afterwards`), or in a second window during a payment (`beside`). */
  readonly cancels?: 'afterwards' | 'beside';
  /** The payer goes back to the partner before there is an outcome, if the page allows it. */
  readonly leaves?: boolean;
}

const INTAKE_TRIES = 8;
const LOOKS = 40;
const LOOK_PAUSE_MS = [2_000, 8_000] as const;
/** The longest time between Pay in one window and Cancel in the other. */
const MIND_CHANGED_MS = 100;
/** After this many loads, the payer loads a waiting page less often. */
const PATIENT_LOOKS = 15;
const PATIENT_PAUSE_MS = [60_000, 120_000] as const;

/** Plays a payer in one session. The newest page decides the `belief` of the returned intention. */
export const checkOut = async (outside: Outside, visit: Visit): Promise<Intention> => {
  const { world, oracle } = outside;
  const { sim } = world;
  const ids = sim.ids();
  const amountCents = visit.lines.reduce((sum, cents) => sum + cents, 0);
  const asked = { amountCents, includeFee: true };
  const intention = oracle.intend({ kind: 'charge', actor: 'partner', accountId: ACCOUNTS[0], paymentId: null, asked });
  world.openCheckout();
  const ask = async (what: PayerAsk): Promise<Page | null> => pageOf(await outside.send(intention, what));

  const { portal, lines, nonce, reference } = visit;
  let begun: Page | null = null;
  for (let tries = 1; !begun; tries++) {
    if (tries > INTAKE_TRIES) return intention;
    if (tries > 1) await sim.wait(sim.rng.int(...LOOK_PAUSE_MS));
    begun = await ask({ kind: 'check out', nonce, portal, lines, reference });
  }
  const { checkoutId } = begun;
  const cards = [...visit.cards];
  const submitted: string[] = [];
  for (let look = 1; look <= LOOKS; look++) {
    const shown = await ask({ kind: 'look', checkoutId });
    // If the session has recorded every sent form and takes cards again, no money was taken.
    if (shown) intention.belief = shown.view === 'pay' && submitted.every((id) => shown.attemptIds.includes(id)) ? 'not paid' : null;
    switch (shown?.view) {
      case 'receipt':
        intention.belief = 'paid';
        intention.paymentId = shown.paymentId;
        return intention;
      case 'cancelled':
        // The session refuses a form that arrives later.
        intention.belief = 'not paid';
        return intention;
      case 'expired':
      case 'attempts_used_up':
        return intention;
      case 'pay': {
        const card = cards.shift();
        if (!card) {
          if (visit.cancels !== 'afterwards') return intention;
          await ask({ kind: 'cancel', checkoutId });
          break;
        }
        intention.belief = null;
        const unheard = submitted.at(-1);
        // If a sent form was lost, half of the payers send the same form again.
        const attemptId = unheard !== undefined && !shown.attemptIds.includes(unheard) && sim.rng.chance(0.5) ? unheard : ids.uuid();
        const other = visit.twice === 'window' ? ids.uuid() : attemptId;
        submitted.push(attemptId, other);
        const sent = [ask({ kind: 'submit', checkoutId, attemptId, card })];
        if (visit.twice) sent.push(ask({ kind: 'submit', checkoutId, attemptId: other, card }));
        if (visit.cancels === 'beside') sent.push(sim.wait(sim.rng.int(0, MIND_CHANGED_MS)).then(() => ask({ kind: 'cancel', checkoutId })));
        await Promise.all(sent);
        if (visit.closes) return intention;
        continue;
      }
      case 'processing':
        if (visit.leaves && shown.mayLeave) {
          await ask({ kind: 'leave', checkoutId });
          return intention;
        }
        break;
      case undefined:
    }
    const [least, most] = look < PATIENT_LOOKS ? LOOK_PAUSE_MS : PATIENT_PAUSE_MS;
    await sim.wait(sim.rng.int(least, most));
  }
  return intention;
};

const pageOf = ({ reply }: Exchange): Page | null => (reply?.status === 200 ? (told(reply).data as unknown as Page) : null);

// ------------------------------------------------------------------------------------------------------------------------------------
// The oracle on sessions.

/** The oracle's view of a payment: its stream, and its money at the bank. */
export interface PaymentBook {
  readonly paymentId: string;
  readonly phase: string;
  readonly netCents: number;
  readonly requestId: string;
  readonly intent: { readonly amountCents: number } | null;
}

/** Pages that are final. */
const FINAL: readonly View[] = ['receipt', 'cancelled'];

/** Checks that a session with a final page shows the same page in every later answer. */
export class PageJudge {
  private readonly last = new Map<string, { at: number; view: View }>();

  judge(exchange: Exchange, check: Check): void {
    const shown = pageOf(exchange);
    if (!shown) return;
    const before = this.last.get(shown.checkoutId);
    if (before && before.at <= exchange.sentAt && FINAL.includes(before.view))
      check(shown.view === before.view, `checkout: shown ${before.view}, then ${shown.view}`);
    if (!before || before.at < exchange.answeredAt) this.last.set(shown.checkoutId, { at: exchange.answeredAt, view: shown.view });
  }
}

/** Folds a session from its events. null: there is no session, or its events are impossible (a violation). */
export const sessionOf = (events: readonly Recorded[], check: Check): KnownCheckout | null => {
  try {
    const checkout = fold(decider, events.map(checkoutEvents.read));
    return checkout.phase === 'none' ? null : checkout;
  } catch (error) {
    check(false, `A6: ${(error as Error).message}`);
    return null;
  }
};

/** True if the service has no work left for a session. A session may stay unknown only if its payment is unknown, too. */
export const isSessionQuiet = (checkout: KnownCheckout, phaseOf: (paymentId: string) => string | undefined): boolean =>
  checkout.phase !== 'processing' && (checkout.phase !== 'unknown' || phaseOf(checkout.attempt.paymentId) === 'unknown');

/**
 * Checks the sessions after all faults have ended. A paid session has one charge, and any other session has none. The bank keeps no money of a
 * declined attempt. Its content is there. `submitted`: the session of a payer's request. null: it was another request.
 */
export const auditSessions = (
  streams: ReadonlyMap<string, readonly Recorded[]>,
  books: ReadonlyMap<string, PaymentBook>,
  submitted: (requestId: string) => string | null,
  bank: Bank,
  intakes: ReadonlyMap<string, IntakeRow>,
  check: Check,
): void => {
  const attempted = new Map<string, string>();
  for (const [checkoutId, events] of streams) {
    const session = sessionOf(events, check);
    if (!session) continue;
    const { content } = session.terms;
    check(typeof content === 'string' && intakes.get(`${checkoutId} ${content}`)?.hash === content, 'C58: a checkout whose content is nowhere');
    const attempts = events.filter(({ type }) => type === 'AttemptStarted').map(({ data }) => data as { attemptId: string; paymentId: string });
    const current = 'attempt' in session ? session.attempt.attemptId : null;
    let charged = 0;
    for (const { attemptId, paymentId } of attempts) {
      attempted.set(paymentId, checkoutId);
      const book = books.get(paymentId);
      if (book?.phase === 'charged') charged += 1;
      if (book?.intent) check(book.intent.amountCents === session.terms.amountCents, 'checkout: charged another amount than the session is for');
      const taken = (['principal', 'fee', 'combined'] as const).reduce((sum, leg) => sum + keptUnder(bank, gatewayRef(attemptId, leg, 'charge')), 0);
      if (attemptId !== current)
        check(taken === 0 && book?.phase !== 'charged', `checkout: an attempt was called declined, and the bank keeps ${taken} cents of it`);
      else if (session.phase === 'paid') check(book?.phase === 'charged', `checkout: paid, and its payment is ${book?.phase ?? 'nowhere'}`);
      else check(book?.phase === 'unknown', `checkout: ${session.phase} when everything runs again, and its payment is ${book?.phase ?? 'nowhere'}`);
    }
    check(charged === (session.phase === 'paid' ? 1 : 0), `A1: a checkout that is ${session.phase} was charged ${charged} times`);
  }
  for (const { paymentId, requestId, intent } of books.values()) {
    const session = intent && submitted(requestId);
    if (session) check(attempted.get(paymentId) === session, 'checkout: a payment that its session never began');
  }
};

/** Cents that the bank took under a reference and did not return. */
const keptUnder = (bank: Bank, ref: string): number => {
  const executed = bank.answers.get(ref);
  const result = executed?.result;
  const id = result?.kind === 'held' ? result.transactionId : result?.kind === 'approved' ? result.txn.transactionId : null;
  const charge = id === null ? undefined : bank.charges.get(id);
  return charge ? bank.remaining(charge) : 0;
};

/** The rows of unfinished sessions equal a replay of the log (A8). */
export const auditUnfinished = (streams: ReadonlyMap<string, readonly Recorded[]>, unfinished: ReadonlyMap<string, unknown>, check: Check): void => {
  for (const [checkoutId, events] of streams) {
    const session = sessionOf(events, check);
    const waits = session?.phase === 'processing' || session?.phase === 'unknown';
    check(unfinished.has(checkoutId) === waits, `A8: a checkout that is ${session?.phase} is${waits ? ' not' : ''} among the unfinished ones`);
  }
};
