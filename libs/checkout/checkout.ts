/**
 * A hosted checkout: one visit of a payer to our page, from the partner's request to the way back. Stream `checkout-<checkoutId>`.
 *
 * At most one attempt is in flight, and at most one attempt is ever paid. An attempt begins only from `open`, at the exact revision (C66). The
 * payment's stream decides the outcome. This stream records the outcome too, so that every page can show it.
 */
import { type Cents, type Decider, type ErrorCode, type Json, ServiceError, unreachable } from '#kernel';

/** Lifetime of a session, counted from its start or its last extension. */
export const SESSION_LIFE_MS = 60 * 60_000;
/** Maximum number of extensions. A payer must have at least ten (WCAG 2.2.1), but a script must not extend a session for ever. */
export const MAX_EXTENSIONS = 24;
/** A shorter extension is not recorded. */
const MIN_EXTENSION_MS = 60_000;
/** Maximum number of attempts in one session. Rate limits and velocity limits apply to new sessions, so they slow down a card tester. */
export const MAX_ATTEMPTS = 10;
/** If the outcome is still unknown this long after the attempt began, the payer may leave. */
export const OFFER_TO_LEAVE_AFTER_MS = 30_000;

export interface CheckoutLine {
  readonly amountCents: Cents;
  readonly referenceId: string;
  readonly description: string | null;
  readonly metadata: Readonly<Record<string, Json>> | null;
}

/** The payer's data from the partner. The payer may correct the names, the e-mail and the postal code. */
export interface CheckoutPayer {
  readonly firstName?: string;
  readonly lastName?: string;
  readonly email?: string;
  readonly phone?: string;
  readonly line1?: string;
  readonly line2?: string;
  readonly city?: string;
  readonly state?: string;
  readonly zip?: string;
}

/** How the session began. A form or a link comes from the payer's browser. JSON comes from the partner's server. */
export type IntakeKind = 'form' | 'json' | 'link';

/**
 * The content of the partner's request (C58). It lies in a row beside the log (intake-rows.ts), since strangers may send it and the log is never
 * deleted.
 */
export interface CheckoutContent {
  readonly referenceId: string | null;
  readonly lineItems: readonly CheckoutLine[];
  readonly payer: CheckoutPayer;
  readonly returnUrl: string;
  readonly cancelUrl: string;
  /** Echoed to the partner unchanged. */
  readonly state: string | null;
  /** Language tag from the partner's request. null: the portal's language counts, or else the browser's. */
  readonly locale: string | null;
}

/** The part of the partner's request (C58) that the event holds. */
export interface CheckoutTerms {
  readonly checkoutId: string;
  readonly intake: IntakeKind;
  /** True if the request had a valid signature of the portal. */
  readonly signed: boolean;
  readonly portalId: string;
  /** The portal's owner. The payment belongs to this account (C66). */
  readonly accountId: string;
  readonly amountCents: Cents;
  /** SHA-256 of the content's row. In an event of version 1: the content itself. */
  readonly content: string | CheckoutContent;
  /** Keyed hash of the whole request. null: the request has no nonce. If a nonce is used again with another hash, the request is refused. */
  readonly fingerprint: string | null;
}

// Events. `at` is the event's recordedAt. Events hold no card data and no fee. The payment's stream records the charged amounts.

type Fact<Type extends string, Data> = { readonly type: Type; readonly at: string; readonly data: Data };

export type CheckoutEvent =
  | Fact<'CheckoutStarted', CheckoutTerms & { readonly opened: boolean; readonly expiresAt: string }>
  /** A browser opened a session that a server had started. */
  | Fact<'CheckoutOpened', Record<string, never>>
  | Fact<'CheckoutExtended', { readonly expiresAt: string }>
  | Fact<'AttemptStarted', { readonly attemptId: string; readonly paymentId: string }>
  /** The attempt took no money: it was refused, declined or abandoned, or its charge was voided. */
  | Fact<'AttemptDeclined', { readonly attemptId: string } & Refusal>
  | Fact<'OutcomeUnknown', { readonly attemptId: string; readonly paymentId: string }>
  | Fact<'CheckoutPaid', { readonly attemptId: string; readonly paymentId: string }>
  /** The payer went back to the partner with `result=unknown`. After this, the session accepts no further card. */
  | Fact<'PayerLeft', Record<string, never>>
  | Fact<'CheckoutCancelled', Record<string, never>>
  /** The partner got the result `expired`. Without this event, a valid link could still extend the session. */
  | Fact<'CheckoutExpired', Record<string, never>>;

/** Why an attempt took no money. `declineCode` tells apart two reasons that have the same code. */
export interface Refusal {
  readonly code: ErrorCode;
  readonly declineCode: string | null;
}

// State.

export interface Attempt {
  readonly attemptId: string;
  readonly paymentId: string;
  readonly startedAt: string;
}

interface Known {
  readonly terms: CheckoutTerms;
  /** True if a browser has ever got the cookie. */
  readonly opened: boolean;
  readonly startedAt: string;
  readonly expiresAt: string;
  readonly extensions: number;
  /** Ids of all attempts, oldest first. An attempt cannot begin again with one of these ids. */
  readonly attemptIds: readonly string[];
  readonly lastRefusal: Refusal | null;
}

export type Checkout =
  | { readonly phase: 'none' }
  | Open
  | (Known & { readonly phase: 'processing'; readonly attempt: Attempt })
  | (Known & { readonly phase: 'unknown'; readonly attempt: Attempt; readonly left: boolean })
  | (Known & { readonly phase: 'paid'; readonly attempt: Attempt })
  /** `afterUnknown`: nothing was charged in the end, but the partner had already got the result `unknown`. */
  | (Known & { readonly phase: 'cancelled'; readonly afterUnknown: boolean })
  | (Known & { readonly phase: 'expired' });

export type Open = Known & { readonly phase: 'open' };
export type KnownCheckout = Exclude<Checkout, { phase: 'none' }>;

const evolve = (checkout: Checkout, event: CheckoutEvent): Checkout => {
  const { at } = event;
  if (event.type === 'CheckoutStarted') {
    if (checkout.phase !== 'none') throw impossible(checkout, event);
    const { opened, expiresAt, ...terms } = event.data;
    return { phase: 'open', terms, opened, startedAt: at, expiresAt, extensions: 0, attemptIds: [], lastRefusal: null };
  }
  switch (event.type) {
    case 'CheckoutOpened':
      return { ...inPhase(checkout, event, 'open'), opened: true };
    case 'CheckoutExtended': {
      const open = inPhase(checkout, event, 'open');
      return { ...open, expiresAt: event.data.expiresAt, extensions: open.extensions + 1 };
    }
    case 'AttemptStarted': {
      const open = inPhase(checkout, event, 'open');
      const { attemptId, paymentId } = event.data;
      if (open.attemptIds.includes(attemptId)) throw impossible(checkout, event);
      return { ...open, phase: 'processing', attemptIds: [...open.attemptIds, attemptId], attempt: { attemptId, paymentId, startedAt: at } };
    }
    case 'AttemptDeclined': {
      const { attempt, ...rest } = underWay(checkout, event);
      const { attemptId, code, declineCode } = event.data;
      if (attempt.attemptId !== attemptId) throw impossible(checkout, event);
      const known = { ...rest, lastRefusal: { code, declineCode } };
      return rest.phase === 'unknown' && rest.left ? { ...known, phase: 'cancelled', afterUnknown: true } : { ...known, phase: 'open' };
    }
    case 'OutcomeUnknown':
      return { ...inPhase(checkout, event, 'processing'), phase: 'unknown', left: false };
    case 'CheckoutPaid': {
      const before = underWay(checkout, event);
      if (before.attempt.paymentId !== event.data.paymentId) throw impossible(checkout, event);
      return { ...before, phase: 'paid' };
    }
    case 'PayerLeft':
      return { ...inPhase(checkout, event, 'unknown'), left: true };
    case 'CheckoutCancelled':
      return { ...inPhase(checkout, event, 'open'), phase: 'cancelled', afterUnknown: false };
    case 'CheckoutExpired':
      return { ...inPhase(checkout, event, 'open'), phase: 'expired' };
    default:
      return unreachable(event);
  }
};

const impossible = (checkout: Checkout, event: CheckoutEvent) => new Error(`${event.type} cannot follow in phase ${checkout.phase}`);

const inPhase = <Phase extends Checkout['phase']>(checkout: Checkout, event: CheckoutEvent, phase: Phase): Extract<Checkout, { phase: Phase }> => {
  if (checkout.phase !== phase) throw impossible(checkout, event);
  return checkout as Extract<Checkout, { phase: Phase }>;
};

const underWay = (checkout: Checkout, event: CheckoutEvent) => {
  if (checkout.phase !== 'processing' && checkout.phase !== 'unknown') throw impossible(checkout, event);
  return checkout;
};

// Pages. Every route checks which page a visitor may see.

export type View = 'pay' | 'attempts_used_up' | 'processing' | 'receipt' | 'cancelled' | 'expired';

/** A session with its content. `content` null: its row is gone. */
export interface Shown {
  readonly checkout: KnownCheckout;
  readonly content: CheckoutContent | null;
}

/** The one page that a session shows now, for any requested page. Without its content, a session takes no card and leads nowhere. */
export const viewOf = ({ checkout, content }: Shown, now: number): View => {
  const view = viewByPhase(checkout, now);
  return content === null && view !== 'processing' && view !== 'receipt' ? 'expired' : view;
};

const viewByPhase = (checkout: KnownCheckout, now: number): View => {
  switch (checkout.phase) {
    case 'open':
      if (isLapsed(checkout, now)) return 'expired';
      return checkout.attemptIds.length >= MAX_ATTEMPTS ? 'attempts_used_up' : 'pay';
    case 'processing':
    case 'unknown':
      return 'processing';
    case 'paid':
      return 'receipt';
    case 'cancelled':
      return 'cancelled';
    case 'expired':
      return 'expired';
    default:
      return unreachable(checkout);
  }
};

const isLapsed = ({ expiresAt }: Open, now: number): boolean => now >= Date.parse(expiresAt);

/** Refusals that tell something about a case. */
const ABOUT_A_CASE: readonly ErrorCode[] = ['PAYMENT_BLOCKED', 'PAYMENT_HELD'];

/** The code of a refusal as a stranger may see it. Without a valid signature, nobody learns whether a case is blocked or held (C58). */
export const codeFor = ({ signed }: Pick<CheckoutTerms, 'signed'>, code: ErrorCode): ErrorCode =>
  !signed && ABOUT_A_CASE.includes(code) ? 'PAYMENT_NOT_ALLOWED' : code;

/** True if the outcome is unknown and OFFER_TO_LEAVE_AFTER_MS has passed. The payer may then go back without an outcome. */
export const mayLeave = (checkout: KnownCheckout, now: number): checkout is Extract<Checkout, { phase: 'unknown' }> =>
  checkout.phase === 'unknown' && now - Date.parse(checkout.attempt.startedAt) >= OFFER_TO_LEAVE_AFTER_MS;

// Commands.

type Ask<Type extends string, More = unknown> = { readonly type: Type; readonly at: string } & More;

export type CheckoutCommand =
  | Ask<'Start', { readonly terms: CheckoutTerms }>
  | Ask<'Open'>
  | Ask<'Extend'>
  | Ask<'StartAttempt', { readonly attemptId: string; readonly paymentId: string }>
  | Ask<'RecordDeclined', { readonly attemptId: string } & Refusal>
  | Ask<'RecordUnknown'>
  | Ask<'RecordPaid'>
  | Ask<'Leave'>
  | Ask<'Cancel'>
  | Ask<'Expire'>;

const decide = (checkout: Checkout, command: CheckoutCommand): readonly CheckoutEvent[] => {
  const { at } = command;
  if (command.type === 'Start') {
    if (checkout.phase !== 'none') throw refusal('The checkout has begun already.');
    const { terms } = command;
    return [{ type: 'CheckoutStarted', at, data: { ...terms, opened: terms.intake !== 'json', expiresAt: lifeFrom(at) } }];
  }
  if (checkout.phase === 'none') throw refusal('There is no such checkout.');
  switch (command.type) {
    case 'Open':
      return checkout.phase === 'open' && !checkout.opened ? [{ type: 'CheckoutOpened', at, data: {} }] : [];
    case 'Extend': {
      if (checkout.phase !== 'open') throw refusal('Only an open checkout can be extended.');
      const expiresAt = lifeFrom(at);
      if (Date.parse(expiresAt) - Date.parse(checkout.expiresAt) < MIN_EXTENSION_MS) return [];
      if (checkout.extensions >= MAX_EXTENSIONS) throw refusal('The checkout was extended too often.');
      return [{ type: 'CheckoutExtended', at, data: { expiresAt } }];
    }
    case 'StartAttempt': {
      const { attemptId, paymentId } = command;
      if (checkout.phase !== 'open' || viewByPhase(checkout, Date.parse(at)) !== 'pay') throw refusal('The checkout takes no card now.');
      if (checkout.attemptIds.includes(attemptId)) throw refusal('This attempt was made already.');
      return [{ type: 'AttemptStarted', at, data: { attemptId, paymentId } }];
    }
    case 'RecordDeclined': {
      const { attemptId, code, declineCode } = command;
      // The worker or another request has already recorded the outcome.
      if (!isUnderWay(checkout) || checkout.attempt.attemptId !== attemptId) return [];
      return [{ type: 'AttemptDeclined', at, data: { attemptId, code, declineCode } }];
    }
    case 'RecordUnknown':
      return checkout.phase === 'processing'
        ? [{ type: 'OutcomeUnknown', at, data: { attemptId: checkout.attempt.attemptId, paymentId: checkout.attempt.paymentId } }]
        : [];
    case 'RecordPaid':
      return isUnderWay(checkout)
        ? [{ type: 'CheckoutPaid', at, data: { attemptId: checkout.attempt.attemptId, paymentId: checkout.attempt.paymentId } }]
        : [];
    case 'Leave':
      if (!mayLeave(checkout, Date.parse(at))) throw refusal('The outcome is still being looked for.');
      return checkout.left ? [] : [{ type: 'PayerLeft', at, data: {} }];
    case 'Cancel':
      if (checkout.phase === 'cancelled') return [];
      if (checkout.phase !== 'open') throw refusal('Only an open checkout can be cancelled.');
      return [{ type: 'CheckoutCancelled', at, data: {} }];
    case 'Expire':
      if (checkout.phase === 'expired') return [];
      if (checkout.phase !== 'open' || !isLapsed(checkout, Date.parse(at))) throw refusal('The checkout has not expired.');
      return [{ type: 'CheckoutExpired', at, data: {} }];
    default:
      return unreachable(command);
  }
};

const isUnderWay = (checkout: Checkout): checkout is Extract<Checkout, { phase: 'processing' | 'unknown' }> =>
  checkout.phase === 'processing' || checkout.phase === 'unknown';

const lifeFrom = (at: string): string => new Date(Date.parse(at) + SESSION_LIFE_MS).toISOString();

const refusal = (message: string) => new ServiceError('INVALID_STATE', message);

export const checkout: Decider<Checkout, CheckoutCommand, CheckoutEvent> = { initial: { phase: 'none' }, decide, evolve };
