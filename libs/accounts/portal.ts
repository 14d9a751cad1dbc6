/**
 * A portal: an agency's payment configuration, and the accounts that may use it. Stream `portal-<portalId>`.
 *
 * The intent of a payment names its fee version, and this stream still holds that version.
 */
import { canonicalJson, type Cents, type Decider, isCents, MAX_AMOUNT_CENTS, parseUrl, ServiceError, unreachable } from '#kernel';
import { validName } from './account.js';
import { chargesOnce, takesCardNumbers } from './merchant-account.js';

/** 100 %. A higher percentage is probably a misplaced decimal point. */
export const MAX_PERCENT_BPS = 10_000;
/** 31 days. The longest window determines how long velocity rows are kept. */
export const MAX_WINDOW_SECONDS = 2_678_400;
/** Largest number of attempts or declines that a limit may have. To count more rows would be slow. */
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
  /** `separate`: the fee is a charge of its own (C41). */
  readonly chargeMode: ChargeMode;
}

/** Defaults of `portals create`. */
export const NO_FEE: FeeConfig = { flatCents: 0, percentBps: 0, minCents: 0, maxCents: null, chargeMode: 'separate' };

/** The gateway that a portal charges through, with the fields of `GatewayAccount`. The fee of a separate charge goes to `feeMerchantAccount`. */
export interface PortalGateway {
  readonly gateway: string;
  readonly merchantAccount: string;
  readonly feeMerchantAccount: string;
  readonly credentialsRef: string;
  /** The credentials of `feeMerchantAccount`. Absent: `credentialsRef`. */
  readonly feeCredentialsRef?: string;
  readonly environment: 'sandbox' | 'production';
}

export const LIMIT_SCOPES = ['card', 'case'] as const;
export type LimitScope = (typeof LIMIT_SCOPES)[number];

/** C53, C70. After this number of attempts or declines within the window, the next attempt is refused. null: no limit. */
export interface VelocityLimits {
  readonly attempts: number | null;
  readonly declines: number | null;
  readonly windowSeconds: number;
  /**
   * Seconds for which a card is refused with `DECLINE_BLOCKED`; only for scope `card` with `declines`. null: the card is refused with
   * `VELOCITY_LIMIT` until the oldest decline leaves the window.
   */
  readonly blockSeconds: number | null;
}

/** Brands of C11 that a rule may allow. */
export const RULE_BRANDS = ['visa', 'mastercard', 'amex', 'discover', 'diners', 'jcb', 'unionpay', 'unknown'] as const;
export type RuleBrand = (typeof RULE_BRANDS)[number];

/**
 * Rules for payments. A payment that breaks a rule is refused with `PAYMENT_NOT_ALLOWED` (C70). null: no such rule. `minCents` and `maxCents` are
 * inclusive bounds of `amountCents`.
 */
export interface PortalRules {
  readonly minCents: Cents | null;
  readonly maxCents: Cents | null;
  readonly brands: readonly RuleBrand[] | null;
}

/** Keys of line metadata that a charge copies to the lines' `coding`, for the general ledger. */
export const MAX_CODING_KEYS = 5;
const CODING_WORD = /^[\w.:/-]{1,64}$/;
/** True for a key of coding and for a value of one: a code of the general ledger, and never free text. */
export const isCodingWord = (text: string): boolean => CODING_WORD.test(text);

export const CHECKOUT_LOCALES = ['en', 'es'] as const;
export type CheckoutLocale = (typeof CHECKOUT_LOCALES)[number];

export interface CheckoutConfig {
  readonly enabled: boolean;
  /** `https://host[:port][/path-prefix]`, normalised, without a trailing slash. The host may begin with `*.`. */
  readonly allow: readonly string[];
  readonly requireSignedIntake: boolean;
  /** The heading of each page. null: the portal's own name. */
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
  /** From the next charge on. No keys: nothing is copied. */
  | { readonly type: 'PortalCodingSet'; readonly data: { readonly portalId: string; readonly keys: readonly string[] } }
  | { readonly type: 'PortalGatewaySet'; readonly data: { readonly portalId: string; readonly gateway: PortalGateway | null } }
  | { readonly type: 'PortalCheckoutConfigured'; readonly data: { readonly portalId: string; readonly checkout: CheckoutConfig } }
  /**
   * A new signing secret was added. Links that are signed with the new or the active secret are accepted. Return addresses are still signed with the
   * active secret.
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

interface PortalCreatedV1 extends Omit<Extract<PortalEvent, { type: 'PortalCreated' }>['data'], 'gateway'> {
  readonly gateway: Omit<PortalGateway, 'feeCredentialsRef'> | null;
}

/** In version 1, both merchant accounts of a gateway had the same credentials. */
export const portalCreatedFromV1 = (data: PortalCreatedV1): Extract<PortalEvent, { type: 'PortalCreated' }>['data'] => data;
export const gatewaySetFromV1 = (data: Pick<PortalCreatedV1, 'portalId' | 'gateway'>): Extract<PortalEvent, { type: 'PortalGatewaySet' }>['data'] =>
  data;

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
  /** The keys of line metadata that a charge copies to `coding`. */
  readonly coding: readonly string[];
  readonly checkout: CheckoutConfig;
  readonly signingSecret: SealedSecret;
  /** The next signing secret, between staging and activation. */
  readonly stagedSecret: SealedSecret | null;
  /** Every account that ever had access, by id. An account with `revoked` may still read the portal (C46, C47). */
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
      coding: [],
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
    case 'PortalCodingSet':
      return { ...state, coding: event.data.keys };
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

// Commands. Fields that a `change` lacks stay as they are.

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
  /** Replaces all limits of one scope. With `attempts` and `declines` null, the scope has no limit. */
  | { readonly type: 'SetLimits'; readonly scope: LimitScope; readonly limits: VelocityLimits }
  | { readonly type: 'SetRules'; readonly change: Partial<PortalRules> }
  /** Replaces all keys. */
  | { readonly type: 'SetCoding'; readonly keys: readonly string[] }
  /** `disableCheckout`: turns hosted checkout off, if it is on. */
  | { readonly type: 'SetGateway'; readonly gateway: PortalGateway | null; readonly disableCheckout?: boolean }
  | { readonly type: 'ConfigureCheckout'; readonly change: Partial<CheckoutConfig> }
  /** Replaces an earlier staged secret, which may be lost. */
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
      refuseTwoCharges(portal.gateway, fee);
      return same(fee, portal.fee) ? [] : [{ type: 'PortalFeeChanged', data: { portalId, feeVersion: portal.feeVersion + 1, fee } }];
    }
    case 'GrantAccess': {
      const { accountId } = command;
      return portal.access[accountId] === 'granted' ? [] : [{ type: 'PortalAccessGranted', data: { portalId, accountId } }];
    }
    case 'RevokeAccess': {
      const { accountId } = command;
      // This is probably a mistake of the operator, so it is refused.
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
    case 'SetCoding': {
      const keys = validCoding(command.keys);
      return same(keys, portal.coding) ? [] : [{ type: 'PortalCodingSet', data: { portalId, keys } }];
    }
    case 'SetGateway': {
      const { gateway, disableCheckout = false } = command;
      const checkout = disableCheckout ? { ...portal.checkout, enabled: false } : portal.checkout;
      refuseTwoCharges(gateway, portal.fee);
      if (checkout.enabled && gateway !== null && !takesCardNumbers(gateway.gateway))
        refuse(`Hosted checkout takes card numbers, and ${gateway.gateway} takes none: turn hosted checkout off first.`);
      return [
        ...(same(checkout, portal.checkout) ? [] : [{ type: 'PortalCheckoutConfigured', data: { portalId, checkout } } as const]),
        ...(same(gateway, portal.gateway) ? [] : [{ type: 'PortalGatewaySet', data: { portalId, gateway } } as const]),
      ];
    }
    case 'ConfigureCheckout': {
      const checkout = validCheckout({ ...portal.checkout, ...command.change });
      if (checkout.enabled && portal.gateway !== null && !takesCardNumbers(portal.gateway.gateway))
        refuse(`Hosted checkout takes card numbers, and this portal's gateway ${portal.gateway.gateway} takes none.`);
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
  refuseTwoCharges(gateway, command.fee);
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

/** Refuses a fee that would need a second charge at a gateway whose tokens work once. */
const refuseTwoCharges = (gateway: PortalGateway | null, { chargeMode }: FeeConfig): void => {
  if (gateway === null || !chargesOnce(gateway.gateway)) return;
  if (chargeMode !== 'combined') refuse(`At ${gateway.gateway} principal and fee must be one charge: the charge mode must be combined.`);
  if (gateway.merchantAccount !== gateway.feeMerchantAccount) refuse(`At ${gateway.gateway} principal and fee must go to the same merchant account.`);
};

const isWholeNumber = (value: number, from: number, to: number) =>
  Number.isSafeInteger(value) && value >= from && value <= to && !Object.is(value, -0);

const centsFrom0 = (field: string, cents: Cents) => {
  if (!isWholeNumber(cents, 0, MAX_AMOUNT_CENTS)) refuse(`${field} must be whole cents, 0 to ${MAX_AMOUNT_CENTS}.`);
};

/** Checks the rules of C32: whole cents up to the limit of a payment, at most 100 %, minimum not above maximum. */
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
  // C70 defines a block only for declines of a card.
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
  // An empty list would refuse every card.
  if (rules.brands.length === 0) refuse('brands must name at least one brand.');
  return { minCents, maxCents, brands: RULE_BRANDS.filter((brand) => rules.brands?.includes(brand)) };
};

const validCoding = (keys: readonly string[]): readonly string[] => {
  for (const key of keys) if (!isCodingWord(key)) refuse('keys must be 1 to 64 letters, digits, or _ . : / - each.');
  const unique = [...new Set(keys)];
  if (unique.length > MAX_CODING_KEYS) refuse(`A portal has at most ${MAX_CODING_KEYS} coding keys.`);
  return unique;
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

/** One entry of the allow-list in its normal form. Checkout parses and compares addresses; a string prefix would not be safe. */
const allowedAddress = (text: string): string => {
  const wrong = (): never =>
    refuse('An allowed address reads https://host[:port][/path-prefix], without user, query or fragment; the host is a name.');
  const url = text.length > MAX_ADDRESS_LENGTH || /[\\\s\p{Cc}@?#]/u.test(text) ? null : parseUrl(text);
  if (!url) return wrong();
  const { protocol, hostname, origin, pathname } = url;
  if (protocol !== 'https:' || IPV4_LITERAL.test(hostname)) return wrong();
  if (!PLAIN_HOST.test(hostname) && !WILDCARD_HOST.test(hostname)) return wrong();
  return `${origin}${pathname.replace(/\/+$/, '')}`;
};

// Helpers.

const existing = (state: Portal | null): Portal => {
  if (!state) throw new ServiceError('PORTAL_ACCESS_DENIED', 'There is no such portal.');
  return state;
};

/** Adds defaults for the fields that a state of an older release lacks. */
export const asNow = (stored: Portal): Portal => ({
  ...stored,
  coding: stored.coding ?? [],
  checkout: { ...CHECKOUT_OFF, ...stored.checkout },
  stagedSecret: stored.stagedSecret ?? null,
});

const same = (a: unknown, b: unknown) => canonicalJson(a) === canonicalJson(b);

export const portal: Decider<Portal | null, PortalCommand, PortalEvent> = { initial: null, decide, evolve };
