/** The event types of this lib, each at its newest version, and how a stored one is read. */
import { type Recorded, type Upcast, upcast, upcasters } from '#eventstore';
import type { AccountEvent } from './account.js';
import type { CaseEvent } from './case-restriction.js';
import { checkoutConfiguredFromV1, type PortalEvent } from './portal.js';

type EventType = (AccountEvent | PortalEvent | CaseEvent)['type'];

const TYPES = {
  AccountCreated: [],
  ApiKeyIssued: [],
  ApiKeysRotated: [],
  AccountDeactivated: [],
  AccountReactivated: [],
  PortalCreated: [],
  PortalFeeChanged: [],
  PortalAccessGranted: [],
  PortalAccessRevoked: [],
  PortalLimitsSet: [],
  PortalRulesSet: [],
  PortalGatewaySet: [],
  PortalCheckoutConfigured: [checkoutConfiguredFromV1],
  PortalSigningSecretStaged: [],
  PortalSigningSecretActivated: [],
  CaseBlocked: [],
  CaseHeld: [],
  CaseAllowed: [],
} satisfies Record<EventType, readonly Upcast[]>;

upcasters.register(TYPES);

/** The schema version that is written. */
export const newestVersion = (type: EventType): number => TYPES[type].length + 1;

/** The fact in a stored event, in its newest version. The deciders refuse types that they do not know. */
export const factOf = <Event>(recorded: Recorded): Event => {
  const { type, data } = upcast(recorded);
  return { type, data } as unknown as Event;
};
