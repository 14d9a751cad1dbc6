export { AccessTokens, authenticate, type AuthenticationDeps, type Caller, exchange, type TokenGrant } from './access-token.js';
export { type Account, MAX_RETENTION_YEARS } from './account.js';
export {
  Administration,
  type CaseChange,
  createSandboxDefaults,
  type Done,
  type GatewayChoice,
  type NewKey,
  type NewMerchantAccount,
  openAcceptedSecrets,
  openCredentials,
  openSigningSecret,
} from './administration.js';
export { keyEnvironment, newApiKey, newSecret } from './api-key.js';
export { chargeStopMigration, type ChargeStops, disableCharges, postgresChargeStops, type Stopped } from './charge-stops.js';
export { caseReasonContext, restrictionInForce } from './case-restriction.js';
export {
  type AccountFacts,
  type ChargeTerms,
  type Directory,
  directoryModel,
  findNamedKey,
  MemoryDirectory,
  oneAtATime,
  type PortalAccess,
  postgresDirectory,
} from './directory.js';
export { caseEvents, gatewaysOfAllTime, gatewaysOfPortal } from './events.js';
export { apiKeyUseMigration, lastKeyUses, postgresKeyUse } from './key-use.js';
export {
  type BatchCutOff,
  chargesOnce,
  credentialsRefOf,
  type DisabledScope,
  type Guarantee,
  type GuaranteeResult,
  isMerchantAccountId,
  type MerchantAccount,
  type MerchantAccountSettings,
  type MerchantAccountStatus,
  noMerchantAccount,
  takesCardNumbers,
  type Vendor,
  VENDORS,
} from './merchant-account.js';
export {
  type ChargeMode,
  CHECKOUT_LOCALES,
  type CheckoutConfig,
  type CheckoutLocale,
  type FeeConfig,
  isCodingWord,
  LIMIT_SCOPES,
  type LimitScope,
  MAX_CODING_KEYS,
  NO_FEE,
  type Portal,
  type PortalEvent,
  type PortalGateway,
  type PortalRules,
  RULE_BRANDS,
  type RuleBrand,
  type VelocityLimits,
} from './portal.js';
export { retentionsOf } from './retention.js';
export {
  type Bind,
  EVERYTHING,
  isInScope,
  portalNotFound,
  portalsInScope,
  refuseForeignPortal,
  type Scope,
  scopeCondition,
  type ScopeLimits,
} from './scope.js';
