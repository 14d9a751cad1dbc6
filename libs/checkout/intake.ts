/**
 * Intake: makes a session from a partner's request, or refuses the request.
 *
 * A browser is redirected only to a checked address. Before `cancel_url` is checked, a refusal shows our own error page. After that, a refusal leads
 * back to the partner's `cancel_url` with an error code.
 */
import { openAcceptedSecrets, type Portal, takesCardNumbers } from '#accounts';
import { Conflict, type Origin } from '#eventstore';
import { type Cents, type ErrorCode, isUuid, ServiceError } from '#kernel';
import { loadGateways, refuseByTerms } from '#payments';
import { cardInText, holdsCardNumber, type KeyRing } from '#platform';
import { vetAddress, type Vetted } from './addresses.js';
import { type CheckoutContent, codeFor, type IntakeKind, viewOf } from './checkout.js';
import type { CheckoutPorts } from './pay.js';
import { newCheckoutId, type Session } from './sessions.js';
import { canonical, isSigned } from './signature.js';
import { cancelAddress } from './way-back.js';

/** A link is valid for at most this long. */
export const MAX_LINK_LIFE_SECONDS = 7 * 24 * 3_600;
const NONCE = /^[\w.~-]{16,64}$/;
const UNIX_SECONDS = /^[1-9]\d{8,10}$/;
const MAX_STATE_LENGTH = 512;
const MAX_REFERENCE_LENGTH = 255;

/** A partner's request. */
export interface IntakeRequest {
  readonly kind: IntakeKind;
  /** Our own address that received the request, as partners know it. It is the third line of the signed text. */
  readonly address: string;
  /** All parameters as text. The signature covers them (C58). */
  readonly pairs: ReadonlyMap<string, string>;
  /** Reads and checks the amount and the other content. Throws VALIDATION_ERROR. Called only after `cancel_url` was checked. */
  readonly content: () => IntakeContent;
  /** Asks the rate limits for a request without a valid signature. Returns the seconds to wait. null: the request is admitted. */
  readonly admitUnsigned: (portalId: string) => number | null;
  /** Called as soon as the owner of the portal is known. Throws RATE_LIMITED if the owner has too many requests waiting. */
  readonly admit?: (accountId: string) => Promise<void>;
}

/** The parameters of C58 that {@link IntakeRequest.content} reads. */
export type IntakeContent = Omit<CheckoutContent, 'returnUrl' | 'cancelUrl'> & { readonly amountCents: Cents };

export type IntakeOutcome =
  /** `bound`: true if this browser gets the session's cookie. Other browsers see only the public page of the session. */
  | { readonly to: 'session'; readonly session: Session; readonly bound: boolean }
  | { readonly to: 'cancel_url'; readonly location: string; readonly code: ErrorCode; readonly message: string }
  | { readonly to: 'error_page'; readonly code: ErrorCode; readonly message: string }
  | { readonly to: 'too_many'; readonly retryAfterSeconds: number };

export const takeIn = async (ports: CheckoutPorts, keys: KeyRing, request: IntakeRequest, origin: Origin): Promise<IntakeOutcome> => {
  const { pairs } = request;
  const portalId = pairs.get('portal_id')?.toLowerCase();
  if (!isUuid(portalId)) return { to: 'error_page', code: 'VALIDATION_ERROR', message: 'portal_id must be a UUID.' };
  const portal = await ports.directory.portal(portalId);
  // Both cases get the same answer, which does not reveal whether a portal exists.
  if (!portal || !takesCards(portal))
    return { to: 'error_page', code: 'PORTAL_ACCESS_DENIED', message: 'The portal is unknown, or hosted checkout is off.' };
  await request.admit?.(portal.ownerAccountId);
  const cancelUrl = vetted(pairs.get('cancel_url'), portal.checkout.allow);
  if (!cancelUrl.accepted) return { to: 'error_page', code: 'VALIDATION_ERROR', message: `cancel_url ${cancelUrl.why}.` };
  const signed = isRightlySigned(keys, portal, request);
  const retryAfterSeconds = signed ? null : request.admitUnsigned(portal.portalId);
  if (retryAfterSeconds !== null) return { to: 'too_many', retryAfterSeconds };
  try {
    return await accepted(ports, keys, portal, request, signed, cancelUrl.address, origin);
  } catch (error) {
    if (!(error instanceof ServiceError)) throw error;
    // The answer is signed by us. Where intake must be signed, it does not repeat what a stranger sent.
    const trusted = signed || !portal.checkout.requireSignedIntake;
    const told = {
      result: 'failed' as const,
      error: error.code,
      checkoutId: null,
      paymentId: null,
      referenceId: trusted ? echoed(pairs.get('reference_id'), MAX_REFERENCE_LENGTH) : null,
      state: trusted ? echoed(pairs.get('state'), MAX_STATE_LENGTH) : null,
    };
    const location = cancelAddress(keys, portal, trusted ? cancelUrl.address : withoutQuery(cancelUrl.address), told, ports.payments.clock.realNow());
    return { to: 'cancel_url', location, code: error.code, message: error.message };
  }
};

/** True if hosted checkout is on, and the portal's gateway takes the card numbers that it asks for. */
const takesCards = ({ checkout, gateway }: Portal): boolean => checkout.enabled && (gateway === null || takesCardNumbers(gateway.gateway));

const withoutQuery = (address: string): string => address.split('?')[0]!;

/** As {@link vetAddress}. An address that holds a card number is refused too, since events and answers hold the address (C9). */
const vetted = (text: unknown, allow: readonly string[]): Vetted => {
  const found = vetAddress(text, allow);
  const card = found.accepted && (cardInText(found.address) ?? cardInText(percentDecoded(found.address)));
  return card ? { accepted: false, why: 'holds a card number' } : found;
};
const percentDecoded = (text: string): string => {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
};

/** The value, if it may be sent back to the partner. null for a long value, and for a card number even if the check of free text is off (C9). */
const echoed = (value: string | undefined, max: number): string | null =>
  value !== undefined && value !== '' && value.length <= max && !holdsCardNumber(value) ? value : null;

const invalid = (message: string) => new ServiceError('VALIDATION_ERROR', message);

const accepted = async (
  ports: CheckoutPorts,
  keys: KeyRing,
  portal: Portal,
  request: IntakeRequest,
  signed: boolean,
  cancelUrl: string,
  origin: Origin,
): Promise<IntakeOutcome> => {
  const { kind, pairs } = request;
  if (!signed) refuseUnsigned(portal, request);
  const nonce = pairs.get('nonce');
  if (kind === 'link' && nonce === undefined) throw invalid('A link needs a nonce.');
  if (nonce !== undefined && !NONCE.test(nonce)) throw invalid('nonce must be 16 to 64 letters, digits or -._~.');
  const checkoutId = newCheckoutId(keys, nonce === undefined ? { fresh: ports.payments.ids.uuid() } : { portalId: portal.portalId, nonce });
  const fingerprint =
    nonce === undefined
      ? null
      : keys.mac('fingerprint', canonical(kind === 'link' ? 'link' : 'intake', request.address, pairs), keys.kids[0]).toString('base64url');

  const known = nonce === undefined ? null : await ports.sessions.load(checkoutId);
  if (known) return resumed(ports, known, fingerprint, request, origin);
  refuseLapsed(request, ports.payments.clock.realNow());
  const { amountCents, ...content } = request.content();
  const returnUrl = vetted(pairs.get('return_url'), portal.checkout.allow);
  if (!returnUrl.accepted) throw invalid(`return_url ${returnUrl.why}.`);
  const terms = await ports.directory.chargeTerms(portal.ownerAccountId, portal.portalId, content.referenceId);
  await loadGateways(ports.payments, terms);
  try {
    refuseByTerms(ports.payments, amountCents, terms);
  } catch (error) {
    throw error instanceof ServiceError ? forStranger(error, signed) : error;
  }
  try {
    const { portalId, ownerAccountId: accountId } = portal;
    const begun = { checkoutId, intake: kind, signed, portalId, accountId, amountCents, fingerprint };
    const addressed = { ...content, returnUrl: returnUrl.address, cancelUrl };
    const session = await ports.sessions.start(begun, addressed, pairs.get('exp') ?? null, origin);
    return { to: 'session', session, bound: kind !== 'json' };
  } catch (error) {
    // Another request used the same nonce at the same moment.
    const other = error instanceof Conflict && nonce !== undefined ? await ports.sessions.load(checkoutId) : null;
    if (!other) throw error;
    return resumed(ports, other, fingerprint, request, origin);
  }
};

const isRightlySigned = (keys: KeyRing, portal: Portal, { kind, address, pairs }: IntakeRequest): boolean => {
  const sig = pairs.get('sig');
  return sig !== undefined && isSigned(openAcceptedSecrets(keys, portal), kind === 'link' ? 'link' : 'intake', address, pairs, sig);
};

/** Refuses a request without a valid signature, except a POST without any, if the portal accepts that. */
const refuseUnsigned = (portal: Portal, { kind, pairs }: IntakeRequest): void => {
  if (pairs.get('sig') !== undefined) throw invalid('sig does not match.');
  if (kind === 'link') throw invalid('A link needs a sig.');
  if (portal.checkout.requireSignedIntake) throw invalid('This portal takes signed intake only: sig is missing.');
};

/** The refusal as the sender may see it. The message of a stranger is the same for every reason that {@link codeFor} hides. */
const forStranger = (error: ServiceError, signed: boolean): ServiceError => {
  const code = codeFor({ signed }, error.code);
  return signed || code !== 'PAYMENT_NOT_ALLOWED' ? error : new ServiceError(code, 'This payment cannot be made online.');
};

/** Refuses a request whose `exp` is past or too far in the future. A POST may omit `exp`. */
const refuseLapsed = ({ kind, pairs }: IntakeRequest, nowMs: number): void => {
  const exp = pairs.get('exp');
  if (exp === undefined) {
    if (kind === 'link') throw invalid('A link needs an exp.');
    return;
  }
  if (!UNIX_SECONDS.test(exp)) throw invalid('exp must be unix seconds.');
  const leftSeconds = Number(exp) - nowMs / 1_000;
  if (leftSeconds <= 0) throw invalid('The link has expired.');
  if (leftSeconds > MAX_LINK_LIFE_SECONDS) throw invalid(`exp must be at most ${MAX_LINK_LIFE_SECONDS / 86_400} days ahead.`);
};

/**
 * Handles a nonce that was used before: the result is the checkout that this nonce began. If only its time has run out, and the link is still valid,
 * the checkout is extended. A mail scanner may have opened the link before the payer. The browser gets no cookie for a checkout that has ended.
 */
const resumed = async (
  ports: CheckoutPorts,
  known: Session,
  fingerprint: string | null,
  request: IntakeRequest,
  origin: Origin,
): Promise<IntakeOutcome> => {
  if (known.checkout.terms.fingerprint !== fingerprint) throw invalid('This nonce was used with other content.');
  const { clock } = ports.payments;
  const { phase } = known.checkout;
  const bound = request.kind !== 'json' && (phase === 'open' || phase === 'processing' || phase === 'unknown');
  if (phase !== 'open' || known.content === null) return { to: 'session', session: known, bound };
  const lapsed = viewOf(known, clock.now()) === 'expired';
  if (lapsed) refuseLapsed(request, clock.realNow());
  try {
    const awake = lapsed ? await ports.sessions.execute(known, { type: 'Extend' }, origin) : known;
    return { to: 'session', session: bound ? await ports.sessions.execute(awake, { type: 'Open' }, origin) : awake, bound };
  } catch (error) {
    // Another request changed the session at the same moment. The page loads the present state.
    if (error instanceof Conflict) return { to: 'session', session: known, bound };
    throw error;
  }
};
