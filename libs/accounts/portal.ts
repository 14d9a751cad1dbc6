/**
 * A portal: an agency's payment configuration, and the accounts that may use it. Stream `portal-<portalId>`.
 *
 * The configuration is kept as events, not as one row. The intent of a payment names the fee version that the payment was charged under, and this
 * stream can still show that version.
 */
import { canonicalJson, type Cents, type Decider, isCents, MAX_AMOUNT_CENTS, ServiceError, unreachable } from '#kernel';
import { validName } from './account.js';

/** 100 %. A higher percentage is probably a misplaced decimal point. */
export const MAX_PERCENT_BPS = 10_000;
/** 31 days: the longest window decides how long velocity rows are kept. */
export const MAX_WINDOW_SECONDS = 2_678_400;
/**
 * Largest number of attempts or declines that a limit may have. A larger limit would have no effect in practice, and counting that many rows would be
 * slow.
 */
export const MAX_VELOCITY_COUNT = 10_000;
export const MAX_ALLOWED_ADDRESSES = 50;
export const MAX_ADDRESS_LENGTH = 2_048;

export type ChargeMode = 'separate' | 'combined';

/** C32: `fee = clamp(flatCents + floor((amountCents · percentBps + 5000) / 10000), minCents, maxCents)`. */
export interface FeeConfig {
  readonly flatCents: Cents;
  /** Hundredths of a percent: 250 is 2.5 %. */
  readonly percentBps: number;
  readonly minCents: Cents;
  /** null: no upper bound. */
  readonly maxCents: Cents | null;
  /** Whether the fee is a charge of its own (C41). */
  readonly chargeMode: ChargeMode;
}

/** Defaults of `portals create`. */
export const NO_FEE: FeeConfig = { flatCents: 0, percentBps: 0, minCents: 0, maxCents: null, chargeMode: 'separate' };

/** The gateway that a portal charges through, with the fields of `GatewayAccount`. The fee leg of a separate charge goes to `feeMerchantAccount`. */
export interface PortalGateway {
  readonly gateway: string;
  readonly merchantAccount: string;
  readonly feeMerchantAccount: string;
  readonly credentialsRef: string;
  readonly environment: 'sandbox' | 'production';
}

export const LIMIT_SCOPES = ['card', 'case'] as const;
export type LimitScope = (typeof LIMIT_SCOPES)[number];

/** C53, C70. Within the window, the given number of attempts (or declines) is allowed. The next attempt is refused. null: no limit. */
export interface VelocityLimits {
  readonly attempts: number | null;
  readonly declines: number | null;
  readonly windowSeconds: number;
  /**
   * Only for scope `card` with `declines`: for how long a card is refused with `DECLINE_BLOCKED`. null: the card is refused with `VELOCITY_LIMIT`
   * until the oldest decline leaves the window.
   */
  readonly blockSeconds: number | null;
}

/** Brands of C11 that a rule may allow. */
export const RULE_BRANDS = ['visa', 'mastercard', 'amex', 'discover', 'diners', 'jcb', 'unionpay', 'unknown'] as const;
export type RuleBrand = (typeof RULE_BRANDS)[number];

/**
 * Conditions on a payment. A payment that does not meet one is refused with `PAYMENT_NOT_ALLOWED` (C70). null: no such rule. The bounds apply to
 * `amountCents`, inclusive.
 */
export interface PortalRules {
  readonly minCents: Cents | null;
  readonly maxCents: Cents | null;
  readonly brands: readonly RuleBrand[] | null;
}

/** Languages of the checkout pages. */
export const CHECKOUT_LOCALES = ['en', 'es'] as const;
export type CheckoutLocale = (typeof CHECKOUT_LOCALES)[number];

/** Settings of hosted checkout. */
export interface CheckoutConfig {
  readonly enabled: boolean;
  /** `https://host[:port][/path-prefix]`, normalised, no trailing slash; the host may begin with `*.`. */
  readonly allow: readonly string[];
  readonly requireSignedIntake: boolean;
  /** The heading of each page; null: the portal's own name. */
  readonly agencyName: string | null;
  /** Colour of the button and of the heading, `#rrggbb`, lower case. null: the default colour of the checkout pages. */
  readonly colour: string | null;
  /** Language of a page if the partner names none. null: the browser's language. */
  readonly locale: CheckoutLocale | null;
}

const CHECKOUT_OFF: CheckoutConfig = { enabled: false, allow: [], requireSignedIntake: false, agencyName: null, colour: null, locale: null };

/** A secret that `KeyRing.seal` encrypted. */
export interface SealedSecret {
  readonly kid: string;
  readonly ciphertext: string;
}

// Events.

export type PortalEvent =
  | {
      readonly type: 'PortalCreated';
      readonly data: {
        readonly portalId: string;
        readonly name: string;
        readonly ownerAccountId: string;
        readonly gateway: PortalGateway | null;
        readonly feeVersion: number;
        readonly fee: FeeConfig;
        readonly signingSecret: SealedSecret;
      };
    }
  | { readonly type: 'PortalFeeChanged'; readonly data: { readonly portalId: string; readonly feeVersion: number; readonly fee: FeeConfig } }
  | { readonly type: 'PortalAccessGranted'; readonly data: { readonly portalId: string; readonly accountId: string } }
  | { readonly type: 'PortalAccessRevoked'; readonly data: { readonly portalId: string; readonly accountId: string } }
  | {
      readonly type: 'PortalLimitsSet';
      readonly data: { readonly portalId: string; readonly scope: LimitScope; readonly limits: VelocityLimits | null };
    }
  | { readonly type: 'PortalRulesSet'; readonly data: { readonly portalId: string; readonly rules: PortalRules } }
  | { readonly type: 'PortalGatewaySet'; readonly data: { readonly portalId: string; readonly gateway: PortalGateway | null } }
  | { readonly type: 'PortalCheckoutConfigured'; readonly data: { readonly portalId: string; readonly checkout: CheckoutConfig } }
  /**
   * A new signing secret was added. The active one stays active: addresses that lead back to the partner are signed with it. Links that are signed
   * with one of the two secrets are accepted.
   */
  | { readonly type: 'PortalSigningSecretStaged'; readonly data: { readonly portalId: string; readonly signingSecret: SealedSecret } }
  /** The staged secret replaced the active one, which is no longer accepted. */
  | { readonly type: 'PortalSigningSecretActivated'; readonly data: { readonly portalId: string } };

type CheckoutConfigured = Extract<PortalEvent, { type: 'PortalCheckoutConfigured' }>['data'];

/** Version 1 had neither colour nor language. */
interface CheckoutConfiguredV1 {
  readonly portalId: string;
  readonly checkout: Omit<CheckoutConfig, 'colour' | 'locale'>;
}

export const checkoutConfiguredFromV1 = ({ portalId, checkout }: CheckoutConfiguredV1): CheckoutConfigured => ({
  portalId,
  checkout: { ...checkout, colour: null, locale: null },
});

// State.

export interface Portal {
  readonly portalId: string;
  readonly name: string;
  /** Payments of hosted checkout belong to this account (C66). */
  readonly ownerAccountId: string;
  readonly gateway: PortalGateway | null;
  readonly fee: FeeConfig;
  readonly feeVersion: number;
  readonly limits: Readonly<Record<LimitScope, VelocityLimits | null>>;
  readonly rules: PortalRules;
  readonly checkout: CheckoutConfig;
  readonly signingSecret: SealedSecret;
  /** The next signing secret, between staging and activation. */
  readonly stagedSecret: SealedSecret | null;
  /** Every account that ever had access, and whether it has access now. An account that lost access may still read the portal (C46, C47). */
  readonly access: Readonly<Record<string, 'granted' | 'revoked'>>;
}

const evolve = (state: Portal | null, event: PortalEvent): Portal => {
  if (event.type === 'PortalCreated') {
    if (state) throw new Error(`portal ${state.portalId} was created twice`);
    const { ownerAccountId } = event.data;
    return {
      ...event.data,
      limits: { card: null, case: null },
      rules: { minCents: null, maxCents: null, brands: null },
      checkout: CHECKOUT_OFF,
      stagedSecret: null,
      access: { [ownerAccountId]: 'granted' },
    };
  }
  if (!state) throw new Error('portal stream begins without PortalCreated');
  switch (event.type) {
    case 'PortalFeeChanged':
      return { ...state, fee: event.data.fee, feeVersion: event.data.feeVersion };
    case 'PortalAccessGranted':
      return { ...state, access: { ...state.access, [event.data.accountId]: 'granted' } };
    case 'PortalAccessRevoked':
      return { ...state, access: { ...state.access, [event.data.accountId]: 'revoked' } };
    case 'PortalLimitsSet':
      return { ...state, limits: { ...state.limits, [event.data.scope]: event.data.limits } };
    case 'PortalRulesSet':
      return { ...state, rules: event.data.rules };
    case 'PortalGatewaySet':
      return { ...state, gateway: event.data.gateway };
    case 'PortalCheckoutConfigured':
      return { ...state, checkout: event.data.checkout };
    case 'PortalSigningSecretStaged':
      return { ...state, stagedSecret: event.data.signingSecret };
    case 'PortalSigningSecretActivated':
      if (!state.stagedSecret) throw new Error(`portal ${state.portalId} has no staged signing secret to activate`);
      return { ...state, signingSecret: state.stagedSecret, stagedSecret: null };
    default:
      return unreachable(event);
  }
};

// Commands. Parts that a change does not name stay as they are.

export type PortalCommand =
  | {
      readonly type: 'CreatePortal';
      readonly portalId: string;
      readonly name: string;
      readonly ownerAccountId: string;
      /** Further accounts that get access. */
      readonly grantedAccountIds: readonly string[];
      readonly gateway: PortalGateway | null;
      readonly fee: FeeConfig;
      readonly signingSecret: SealedSecret;
    }
  | { readonly type: 'ChangeFee'; readonly change: Partial<FeeConfig> }
  | { readonly type: 'GrantAccess'; readonly accountId: string }
  | { readonly type: 'RevokeAccess'; readonly accountId: string }
  /** Sets all limits of one scope. Limits without `attempts` and `declines` turn the scope off. */
  | { readonly type: 'SetLimits'; readonly scope: LimitScope; readonly limits: VelocityLimits }
  | { readonly type: 'SetRules'; readonly change: Partial<PortalRules> }
  | { readonly type: 'SetGateway'; readonly gateway: PortalGateway | null }
  | { readonly type: 'ConfigureCheckout'; readonly change: Partial<CheckoutConfig> }
  /** Staging again replaces the staged secret, in case that secret was lost before the partner received it. */
  | { readonly type: 'StageSigningSecret'; readonly signingSecret: SealedSecret }
  | { readonly type: 'ActivateSigningSecret' };

type Ask<T extends PortalCommand['type']> = Extract<PortalCommand, { type: T }>;

// Decisions.

const decide = (state: Portal | null, command: PortalCommand): readonly PortalEvent[] => {
  if (command.type === 'CreatePortal') return create(state, command);
  const portal = existing(state);
  const { portalId } = portal;
  switch (command.type) {
    case 'ChangeFee': {
      const fee = validFee({ ...portal.fee, ...command.change });
      return same(fee, portal.fee) ? [] : [{ type: 'PortalFeeChanged', data: { portalId, feeVersion: portal.feeVersion + 1, fee } }];
    }
    case 'GrantAccess': {
      const { accountId } = command;
      return portal.access[accountId] === 'granted' ? [] : [{ type: 'PortalAccessGranted', data: { portalId, accountId } }];
    }
    case 'RevokeAccess': {
      const { accountId } = command;
      // To revoke access that an account never had is probably a mistake of the operator.
      if (!portal.access[accountId]) throw new ServiceError('INVALID_STATE', 'The account never had access to this portal.');
      return portal.access[accountId] === 'revoked' ? [] : [{ type: 'PortalAccessRevoked', data: { portalId, accountId } }];
    }
    case 'SetLimits': {
      const { scope } = command;
      const limits = validLimits(scope, command.limits);
      return same(limits, portal.limits[scope]) ? [] : [{ type: 'PortalLimitsSet', data: { portalId, scope, limits } }];
    }
    case 'SetRules': {
      const rules = validRules({ ...portal.rules, ...command.change });
      return same(rules, portal.rules) ? [] : [{ type: 'PortalRulesSet', data: { portalId, rules } }];
    }
    case 'SetGateway':
      return same(command.gateway, portal.gateway) ? [] : [{ type: 'PortalGatewaySet', data: { portalId, gateway: command.gateway } }];
    case 'ConfigureCheckout': {
      const checkout = validCheckout({ ...portal.checkout, ...command.change });
      return same(checkout, portal.checkout) ? [] : [{ type: 'PortalCheckoutConfigured', data: { portalId, checkout } }];
    }
    case 'StageSigningSecret':
      return [{ type: 'PortalSigningSecretStaged', data: { portalId, signingSecret: command.signingSecret } }];
    case 'ActivateSigningSecret':
      if (!portal.stagedSecret) throw new ServiceError('INVALID_STATE', 'No signing secret is staged.');
      return [{ type: 'PortalSigningSecretActivated', data: { portalId } }];
    default:
      return unreachable(command);
  }
};

const create = (state: Portal | null, command: Ask<'CreatePortal'>): PortalEvent[] => {
  if (state) throw new ServiceError('INVALID_STATE', 'The portal already exists.');
  const { portalId, ownerAccountId, gateway, signingSecret } = command;
  const granted = [...new Set(command.grantedAccountIds)].filter((accountId) => accountId !== ownerAccountId);
  return [
    {
      type: 'PortalCreated',
      data: { portalId, name: validName('name', command.name), ownerAccountId, gateway, feeVersion: 1, fee: validFee(command.fee), signingSecret },
    },
    ...granted.map((accountId): PortalEvent => ({ type: 'PortalAccessGranted', data: { portalId, accountId } })),
  ];
};

// Validation: VALIDATION_ERROR with the name of the field.

const refuse = (message: string): never => {
  throw new ServiceError('VALIDATION_ERROR', message);
};

const isWholeNumber = (value: number, from: number, to: number) =>
  Number.isSafeInteger(value) && value >= from && value <= to && !Object.is(value, -0);

const centsFrom0 = (field: string, cents: Cents) => {
  if (!isWholeNumber(cents, 0, MAX_AMOUNT_CENTS)) refuse(`${field} must be whole cents, 0 to ${MAX_AMOUNT_CENTS}.`);
};

/** Checks the rules of C32: whole cents up to one payment's limit, at most 100 %, minimum not above maximum. */
export const validFee = (fee: FeeConfig): FeeConfig => {
  const { flatCents, percentBps, minCents, maxCents, chargeMode } = fee;
  centsFrom0('flatCents', flatCents);
  if (!isWholeNumber(percentBps, 0, MAX_PERCENT_BPS)) refuse(`percentBps must be a whole number, 0 to ${MAX_PERCENT_BPS} (hundredths of a percent).`);
  centsFrom0('minCents', minCents);
  if (maxCents !== null) {
    centsFrom0('maxCents', maxCents);
    if (maxCents < minCents) refuse('maxCents must not be below minCents.');
  }
  if (chargeMode !== 'separate' && chargeMode !== 'combined') refuse('chargeMode must be separate or combined.');
  return { flatCents, percentBps, minCents, maxCents, chargeMode };
};

const validLimits = (scope: LimitScope, limits: VelocityLimits): VelocityLimits | null => {
  const { attempts, declines, windowSeconds, blockSeconds } = limits;
  for (const [field, count] of [
    ['attempts', attempts],
    ['declines', declines],
  ] as const)
    if (count !== null && !isWholeNumber(count, 1, MAX_VELOCITY_COUNT)) refuse(`${field} must be a whole number, 1 to ${MAX_VELOCITY_COUNT}.`);
  for (const [field, seconds] of [
    ['windowSeconds', windowSeconds],
    ['blockSeconds', blockSeconds ?? 1],
  ] as const)
    if (!isWholeNumber(seconds, 1, MAX_WINDOW_SECONDS)) refuse(`${field} must be a whole number of seconds, 1 to ${MAX_WINDOW_SECONDS}.`);
  // C70 defines a block only for declines of a card. Elsewhere `blockSeconds` would have no effect, so it is refused.
  if (blockSeconds !== null && (scope !== 'card' || declines === null)) refuse('blockSeconds applies to declines of scope card only.');
  return attempts === null && declines === null ? null : { attempts, declines, windowSeconds, blockSeconds };
};

const validRules = (rules: PortalRules): PortalRules => {
  const { minCents, maxCents } = rules;
  for (const [field, cents] of [
    ['minCents', minCents],
    ['maxCents', maxCents],
  ] as const)
    if (cents !== null && !isCents(cents)) refuse(`${field} must be whole cents, 1 to ${MAX_AMOUNT_CENTS}.`);
  if (minCents !== null && maxCents !== null && maxCents < minCents) refuse('maxCents must not be below minCents.');
  if (rules.brands === null) return { minCents, maxCents, brands: null };
  for (const brand of rules.brands) if (!RULE_BRANDS.includes(brand)) refuse(`brands must be of ${RULE_BRANDS.join(', ')}.`);
  // An empty list would refuse every card. To refuse every card, an operator can remove the gateway instead.
  if (rules.brands.length === 0) refuse('brands must name at least one brand.');
  return { minCents, maxCents, brands: RULE_BRANDS.filter((brand) => rules.brands?.includes(brand)) };
};

const COLOUR = /^#[0-9a-f]{6}$/;

const validCheckout = ({ enabled, allow, requireSignedIntake, agencyName, colour, locale }: CheckoutConfig): CheckoutConfig => {
  const addresses = [...new Set(allow.map(allowedAddress))];
  if (addresses.length > MAX_ALLOWED_ADDRESSES) refuse(`The allow-list holds at most ${MAX_ALLOWED_ADDRESSES} addresses.`);
  const hex = colour?.toLowerCase() ?? null;
  if (hex !== null && !COLOUR.test(hex)) refuse('colour must read #rrggbb.');
  if (locale !== null && !CHECKOUT_LOCALES.includes(locale)) refuse(`locale must be of ${CHECKOUT_LOCALES.join(', ')}.`);
  return {
    enabled,
    allow: addresses,
    requireSignedIntake,
    agencyName: agencyName === null ? null : validName('agencyName', agencyName),
    colour: hex,
    locale,
  };
};

const WILDCARD_HOST = /^\*(?:\.[a-z0-9-]+){2,}$/;
const PLAIN_HOST = /^[a-z0-9-]+(?:\.[a-z0-9-]+)*$/;
const IPV4_LITERAL = /^\d{1,3}(?:\.\d{1,3}){3}$/;

/** One entry of the allow-list in its normal form. Checkout compares addresses after parsing them, never by a string prefix. */
const allowedAddress = (text: string): string => {
  const wrong = (): never =>
    refuse('An allowed address reads https://host[:port][/path-prefix], without user, query or fragment; the host is a name.');
  if (text.length > MAX_ADDRESS_LENGTH || /[\\\s\p{Cc}@?#]/u.test(text) || !URL.canParse(text)) return wrong();
  const { protocol, hostname, origin, pathname } = new URL(text);
  if (protocol !== 'https:' || IPV4_LITERAL.test(hostname)) return wrong();
  if (!PLAIN_HOST.test(hostname) && !WILDCARD_HOST.test(hostname)) return wrong();
  return `${origin}${pathname.replace(/\/+$/, '')}`;
};

// Helpers.

const existing = (state: Portal | null): Portal => {
  if (!state) throw new ServiceError('PORTAL_ACCESS_DENIED', 'There is no such portal.');
  return state;
};

/** A state that an older release stored, with defaults for the fields that were added later. */
export const asNow = (stored: Portal): Portal => ({
  ...stored,
  checkout: { ...CHECKOUT_OFF, ...stored.checkout },
  stagedSecret: stored.stagedSecret ?? null,
});

const same = (a: unknown, b: unknown) => canonicalJson(a) === canonicalJson(b);

export const portal: Decider<Portal | null, PortalCommand, PortalEvent> = { initial: null, decide, evolve };
