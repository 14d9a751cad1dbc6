/** The events of this lib, and the kinds of streams that hold them. */
import { createHash } from 'node:crypto';
import { type DecidedStreamType, defineEvents, type EventStore, type Recorded } from '#eventstore';
import { inClear, lookAlike, type Personal } from '#kernel';
import { account, type Account, type AccountCommand, type AccountEvent } from './account.js';
import { type Case, type CaseCommand, type CaseEvent, type CaseReason, caseRestriction } from './case-restriction.js';
import { merchantAccount, type MerchantAccount, type MerchantAccountCommand, type MerchantAccountEvent } from './merchant-account.js';
import {
  checkoutConfiguredFromV1,
  gatewaySetFromV1,
  portal,
  type Portal,
  type PortalCommand,
  portalCreatedFromV1,
  type PortalEvent,
  type PortalGateway,
} from './portal.js';

export const accountEvents = defineEvents<AccountEvent>({
  AccountCreated: [],
  ApiKeyIssued: [],
  ApiKeysRotated: [],
  ApiKeyRevoked: [],
  AccountDeactivated: [],
  AccountReactivated: [],
  AccountRetentionSet: [],
});

export const portalEvents = defineEvents<PortalEvent>({
  PortalCreated: [portalCreatedFromV1],
  PortalFeeChanged: [],
  PortalAccessGranted: [],
  PortalAccessRevoked: [],
  PortalLimitsSet: [],
  PortalRulesSet: [],
  PortalCodingSet: [],
  PortalGatewaySet: [gatewaySetFromV1],
  PortalCheckoutConfigured: [checkoutConfiguredFromV1],
  PortalSigningSecretStaged: [],
  PortalSigningSecretActivated: [],
});

/** Upcast to version 2. Version 1 held the reason in clear. */
const reasonInClear = <Data extends { readonly personal: Personal<CaseReason> }>({
  reason,
  ...data
}: Omit<Data, 'personal'> & { readonly reason: string | null }): Data =>
  ({ ...data, personal: reason === null ? null : inClear({ reason }) }) as unknown as Data;

export const caseEvents = defineEvents<CaseEvent>({ CaseBlocked: [reasonInClear], CaseHeld: [reasonInClear], CaseAllowed: [reasonInClear] });

export const merchantAccountEvents = defineEvents<MerchantAccountEvent>({
  MerchantAccountAdded: [],
  MerchantAccountCredentialsRotated: [],
  MerchantAccountSettingsChanged: [],
  MerchantAccountDisabled: [],
  MerchantAccountEnabled: [],
  MerchantAccountChecked: [],
});

export const ACCOUNT_STREAM: DecidedStreamType<Account | null, AccountCommand, AccountEvent> = {
  prefix: 'account-',
  events: accountEvents,
  decider: account,
};

export const PORTAL_STREAM: DecidedStreamType<Portal | null, PortalCommand, PortalEvent> = {
  prefix: 'portal-',
  events: portalEvents,
  decider: portal,
};

export const CASE_STREAM: DecidedStreamType<Case | null, CaseCommand, CaseEvent> = {
  prefix: 'case-',
  events: caseEvents,
  decider: caseRestriction,
};

export const MERCHANT_ACCOUNT_STREAM: DecidedStreamType<MerchantAccount | null, MerchantAccountCommand, MerchantAccountEvent> = {
  prefix: 'merchant-account-',
  events: merchantAccountEvents,
  decider: merchantAccount,
};

const gatewaysIn = (events: readonly Recorded[]): readonly PortalGateway[] =>
  events.map(portalEvents.read).flatMap(({ type, data }) => (type === 'PortalCreated' || type === 'PortalGatewaySet' ? (data.gateway ?? []) : []));

/** Every gateway that any portal has ever had, read from the log. Earlier charges belong to a portal's earlier gateway. */
export const gatewaysOfAllTime = async (store: Pick<EventStore, 'readAll'>): Promise<readonly PortalGateway[]> => {
  const found = new Map<string, PortalGateway>();
  for await (const events of store.readAll(null, { streamPrefixes: [PORTAL_STREAM.prefix] }))
    for (const gateway of gatewaysIn(events)) found.set(JSON.stringify(gateway), gateway);
  return [...found.values()];
};

/** Every gateway that a portal has ever had. */
export const gatewaysOfPortal = async (store: Pick<EventStore, 'read'>, portalId: string): Promise<readonly PortalGateway[]> => {
  const events: Recorded[] = [];
  for await (const event of store.read(`${PORTAL_STREAM.prefix}${portalId}`)) events.push(event);
  return gatewaysIn(events);
};

/** Id of a case's stream. The reference id is hashed, because it may hold characters that the name of a stream must not hold. */
export const caseStreamId = (portalId: string, referenceId: string): string =>
  `${portalId}-${createHash('sha256').update(referenceId, 'utf8').digest('hex').slice(0, 32)}`;

/** Equal for all references of a portal that look alike. A hash, since the normal form of a reference can be too long for an index. */
export const lookAlikeId = (portalId: string, referenceId: string): string => caseStreamId(portalId, lookAlike(referenceId));
