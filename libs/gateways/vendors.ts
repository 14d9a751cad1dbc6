/** The processors of merchant accounts: their addresses, the form of their credentials, and how an adapter is made from an account. */
import { type MerchantAccount, credentialsRefOf, type Vendor } from '#accounts';
import { type Clock, ServiceError } from '#kernel';
import type { PaymentGateway } from '#payments';
import { AUTHORIZE_NET_ENDPOINTS, createAuthorizeNetGateway } from './authorize-net/authorize-net.js';
import { createStripeGateway, STRIPE_ENDPOINT } from './stripe/stripe.js';
import type { GatewayOptions } from './transport/options.js';

/** The addresses of the processors. An installation sends card data and credentials to these hosts only. */
export const ENDPOINTS: Readonly<Record<Vendor, Readonly<Record<'sandbox' | 'production', string>>>> = {
  'authorize-net': AUTHORIZE_NET_ENDPOINTS,
  stripe: { sandbox: STRIPE_ENDPOINT, production: STRIPE_ENDPOINT },
};

/** The facts of a merchant account that its adapter needs. */
export type AdapterFacts = Pick<MerchantAccount, 'merchantAccount' | 'gateway' | 'environment' | 'settings' | 'repeats'>;

export interface AdapterContext {
  readonly clock: Clock;
  /** Replaces the address of a processor, for specs. */
  readonly endpoints?: Partial<Readonly<Record<Vendor, string>>>;
  readonly log?: GatewayOptions['log'];
  readonly onRefusedCredentials?: GatewayOptions['onRefusedCredentials'];
  readonly onRefusedLists?: GatewayOptions['onRefusedLists'];
  readonly onTestMode?: GatewayOptions['onTestMode'];
}

/** Makes the adapter of a merchant account. `credentials`: JSON, as {@link readCredentials} has checked it. */
export const createVendorGateway = (
  { merchantAccount, gateway, environment, settings: { cutOff, endpoint }, repeats }: AdapterFacts,
  credentials: string,
  { clock, endpoints = {}, log, onRefusedCredentials, onRefusedLists, onTestMode }: AdapterContext,
): PaymentGateway => {
  const options = {
    endpoint: endpoints[gateway] ?? endpoint ?? ENDPOINTS[gateway][environment],
    account: { gateway, merchantAccount, credentialsRef: credentialsRefOf(merchantAccount), environment },
    clock,
    ...(log && { log }),
    ...(onRefusedCredentials && { onRefusedCredentials }),
    ...(onRefusedLists && { onRefusedLists }),
    ...(onTestMode && { onTestMode }),
  };
  switch (gateway) {
    case 'authorize-net': {
      const { apiLoginId, transactionKey } = JSON.parse(credentials) as { apiLoginId: string; transactionKey: string };
      return createAuthorizeNetGateway({ ...options, credentials: { apiLoginId, transactionKey }, cutOff, refundsOnce: repeats === 'holds' });
    }
    case 'stripe': {
      const { secretKey } = JSON.parse(credentials) as { secretKey: string };
      return createStripeGateway({ ...options, credentials: { secretKey }, keysAreBound: repeats !== 'broken' });
    }
  }
};

const MAX_CREDENTIAL_LENGTH = 255;

const FIELDS: Readonly<Record<Vendor, readonly string[]>> = { 'authorize-net': ['apiLoginId', 'transactionKey'], stripe: ['secretKey'] };

/** Keys of Stripe name their environment. A restricted key begins with `rk_`. */
const STRIPE_KEY = /^(?:sk|rk)_(test|live)_\w+$/;

/**
 * Checks the text of a credentials file. Returns it as JSON with exactly the fields of the processor. Throws VALIDATION_ERROR, and never repeats a
 * value.
 */
export const readCredentials = (gateway: Vendor, environment: 'sandbox' | 'production', text: string): string => {
  const refuse = (why: string): never => {
    throw new ServiceError('VALIDATION_ERROR', `The credentials ${why}.`);
  };
  const names = FIELDS[gateway];
  let parsed: unknown;
  try {
    parsed = JSON.parse(text.replace(/^\uFEFF/, ''));
  } catch {
    // The error's own message quotes the text.
    return refuse('are not JSON');
  }
  if (parsed === null || typeof parsed !== 'object' || Array.isArray(parsed)) return refuse('must be one JSON object');
  const given = parsed as Readonly<Record<string, unknown>>;
  if (Object.keys(given).sort().join() !== [...names].sort().join())
    return refuse(`of ${gateway} must have exactly the fields ${names.join(' and ')}`);
  for (const name of names) {
    const value = given[name];
    if (typeof value !== 'string' || value.length === 0 || value.length > MAX_CREDENTIAL_LENGTH || !/^[\x21-\x7e]+$/.test(value))
      return refuse(`have no usable ${name}: it must be a text of 1 to ${MAX_CREDENTIAL_LENGTH} characters without spaces`);
  }
  if (gateway === 'stripe') {
    const match = STRIPE_KEY.exec(given.secretKey as string);
    if (!match) return refuse('must hold a secret key or a restricted key, which begins with sk_ or rk_');
    const keyEnvironment = match[1] === 'live' ? 'production' : 'sandbox';
    if (keyEnvironment !== environment) return refuse(`belong to ${keyEnvironment}, not to ${environment}`);
  }
  return JSON.stringify(Object.fromEntries(names.map((name) => [name, given[name]])));
};

const DESCRIBE_MS = 30_000;

/**
 * Asks the processor about the account behind the credentials. Returns its own id and name of the account. Throws VALIDATION_ERROR if the account
 * cannot be used: wrong credentials, test mode, another environment, or a setting that a person must change first.
 */
export const askVendor = async (
  facts: AdapterFacts,
  credentials: string,
  context: AdapterContext,
): Promise<{ readonly externalId: string; readonly name: string }> => {
  const refuse = (message: string): never => {
    throw new ServiceError('VALIDATION_ERROR', message);
  };
  const adapter = createVendorGateway(facts, credentials, { clock: context.clock, ...(context.endpoints && { endpoints: context.endpoints }) });
  try {
    const { externalId, name, environment, testMode, problems } = await adapter.describe(AbortSignal.timeout(DESCRIBE_MS)).catch((error: unknown) => {
      // Adapters put no credentials into their errors.
      throw new ServiceError('VALIDATION_ERROR', `The account cannot be described. ${error instanceof Error ? error.message : 'Unknown error'}`);
    });
    if (environment !== facts.environment) return refuse(`The account belongs to ${environment}, not to ${facts.environment}.`);
    if (testMode) return refuse(`The account is in test mode at ${facts.gateway}, so no money would move. Turn test mode off first.`);
    if (problems.length > 0) return refuse(problems.join(' '));
    return { externalId, name };
  } finally {
    adapter.close();
  }
};
