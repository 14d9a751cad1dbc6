/**
 * The sandbox cards and tokens. Only these are approved: a real card must not work in a sandbox. Public test numbers keep their public meaning. The
 * other numbers are in the block 4000 0077 7, which no issuer owns.
 */
import type { Check, DeclineCode, Leg } from './processor.js';

/** A special behaviour of a charge. It is stored with the charge, so a change of this table does not affect earlier charges. */
export type Quirk =
  /** The charge is executed, but its answer lacks fields. Finalize and look-up know the charge. */
  | 'answer_incomplete'
  /** Finalize and look-up always answer `cannot_tell`. */
  | 'cannot_tell'
  /** The charge is captured at once. A void is rejected as settled, and a refund works before the batch closes. */
  | 'void_rejected'
  /** The first void for a void request is not processed. */
  | 'first_void_fails'
  /** The first void or refund for a refund request is not processed. */
  | 'first_refund_reversal_fails'
  /** The charge settles at once, in a batch of its own. */
  | 'settles_at_once'
  /** This charge is rejected when its batch settles (C67). */
  | 'settlement_rejected'
  /** When the charge settles, a dispute is opened. */
  | 'disputed_after_settlement';

export interface Fixture {
  /** A fixed name, because it is written with every charge. It holds no digits of the card. */
  readonly name: string;
  readonly result:
    | { readonly kind: 'approved' }
    | { readonly kind: 'declined'; readonly code: DeclineCode; readonly message: string; readonly avs?: Check; readonly cvv?: Check }
    | { readonly kind: 'not_processed'; readonly message: string }
    /** The processor never gets the call, so nothing happens. The caller gets an incomplete answer. */
    | { readonly kind: 'never_reached' };
  /** Legs that the fixture affects. Omitted: all legs. Other legs are approved. */
  readonly legs?: readonly Leg[];
  readonly delayMs?: number;
  readonly quirks?: readonly Quirk[];
}

const DELAYED_FAILURE_MS = 3_000;
const SLOW_APPROVAL_MS = 5_000;

const approved = { kind: 'approved' } as const;
const declined = (code: DeclineCode, message: string, checks: { avs?: Check; cvv?: Check } = {}) =>
  ({ kind: 'declined', code, message, ...checks }) as const;
/** With these legs, the behaviour happens once for each payment, and not once for each leg. */
const NOT_FEE: readonly Leg[] = ['principal', 'combined'];

/** By card number. */
export const CARDS: Readonly<Record<string, Fixture>> = {
  '4242424242424242': { name: 'approved', result: approved },
  '4111111111111111': { name: 'approved', result: approved },
  '5555555555554444': { name: 'approved', result: approved },
  '378282246310005': { name: 'approved', result: approved },
  '6011111111111117': { name: 'approved', result: approved },
  '4000007770000000205': { name: 'approved', result: approved },
  '6205500000000000004': { name: 'approved', result: approved },
  '4000000000000002': { name: 'declined', result: declined('generic_decline', 'do not honor') },
  '4000000000009995': { name: 'insufficient_funds', result: declined('insufficient_funds', 'insufficient funds') },
  '4000000000006975': { name: 'card_limit_exceeded', result: declined('card_limit_exceeded', 'exceeds the limit of the card') },
  '4000000000000069': { name: 'expired_card', result: declined('expired_card', 'expired card') },
  '4000000000000127': { name: 'cvv_mismatch', result: declined('cvv_mismatch', 'security code does not match', { cvv: 'no_match' }) },
  '4000007770004619': { name: 'postal_code_mismatch', result: declined('postal_code_mismatch', 'postal code does not match', { avs: 'no_match' }) },
  '4000007770005020': { name: 'gateway_error', result: { kind: 'not_processed', message: 'the processor failed' } },
  '4000007770005129': {
    name: 'delayed_gateway_error',
    result: { kind: 'not_processed', message: 'the processor failed' },
    delayMs: DELAYED_FAILURE_MS,
  },
  '4000007770005046': { name: 'unreadable', result: approved, quirks: ['answer_incomplete'] },
  '4000007770005145': { name: 'unreadable_unresolvable', result: approved, quirks: ['answer_incomplete', 'cannot_tell'] },
  '4000007770005244': { name: 'unreadable_never_reached', result: { kind: 'never_reached' } },
  '4000007770004221': { name: 'void_rejected', result: approved, quirks: ['void_rejected'] },
  '4000007770004023': { name: 'fee_declined', result: declined('generic_decline', 'do not honor'), legs: ['fee'] },
  '4000007770004320': { name: 'fee_void_fails_once', result: approved, legs: ['fee'], quirks: ['first_void_fails'] },
  '4000007770007026': { name: 'fee_refund_fails_once', result: approved, legs: ['fee'], quirks: ['first_refund_reversal_fails'] },
  '4000007770002001': { name: 'settles_at_once', result: approved, quirks: ['settles_at_once'] },
  '4000007770004304': { name: 'settlement_rejected', result: approved, quirks: ['settlement_rejected'] },
  '4000007770002050': { name: 'slow_approval', result: approved, legs: NOT_FEE, delayMs: SLOW_APPROVAL_MS },
  '4000007770009006': { name: 'disputed', result: approved, legs: NOT_FEE, quirks: ['disputed_after_settlement'] },
};

/** By card token. A token may be charged again. */
export const TOKENS: Readonly<Record<string, Fixture>> = {
  tok_sandbox_approved: { name: 'approved', result: approved },
  tok_sandbox_gateway_error: { name: 'gateway_error', result: { kind: 'not_processed', message: 'the processor failed' } },
  tok_sandbox_incomplete_response: { name: 'unreadable', result: approved, quirks: ['answer_incomplete'] },
};

const PLAIN: Fixture = { name: 'approved', result: approved };
const FOREIGN: Fixture = { name: 'not_a_fixture', result: declined('generic_decline', 'not a sandbox fixture card') };

export const fixtureFor = (instrument: { readonly number: string } | { readonly token: string }, leg: Leg): Fixture => {
  const [table, key] = 'number' in instrument ? [CARDS, instrument.number] : [TOKENS, instrument.token];
  const fixture = Object.hasOwn(table, key) ? table[key]! : FOREIGN;
  return fixture.legs && !fixture.legs.includes(leg) ? { ...PLAIN, name: fixture.name } : fixture;
};
