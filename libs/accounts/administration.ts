/** Commands of an operator on accounts, keys, portals and cases. */
import { type Clock, type Ids, inClear, isBox, type Personal, ServiceError, timestamp } from '#kernel';
import { hashedUuid, holdsCardNumber, type KeyRing, type PersonalKeys } from '#platform';
import { type Actor, change, type DecidedStreamType, type DomainEvent, type EventStore, load, type Position } from '#eventstore';
import type { Account, AccountCommand } from './account.js';
import { keyEnvironment, newApiKey, newSecret } from './api-key.js';
import { type Case, type CaseCommand, type CaseReason, caseReasonContext, validReason } from './case-restriction.js';
import { ACCOUNT_STREAM, CASE_STREAM, caseStreamId, PORTAL_STREAM } from './events.js';
import {
  type CheckoutConfig,
  type FeeConfig,
  type LimitScope,
  NO_FEE,
  type Portal,
  type PortalCommand,
  type PortalGateway,
  type PortalRules,
  type SealedSecret,
  type VelocityLimits,
} from './portal.js';

export interface AdministrationDeps {
  readonly store: EventStore;
  readonly clock: Clock;
  readonly ids: Ids;
  readonly keys: KeyRing;
  /** Seals the reasons of cases. */
  readonly personal: Pick<PersonalKeys, 'take' | 'open'>;
  readonly environment: 'sandbox' | 'production';
  /** True: names, reasons and reference ids that hold a card number are refused (C9). */
  readonly cardInTextCheck: boolean;
  readonly actor: Actor;
}

/**
 * The state after a command. `position`: the stream's last event; a read model that has reached this position shows the change. null: the stream has
 * no event.
 */
export interface Done<State> {
  readonly state: State;
  readonly position: Position | null;
}

/** A complete API key: shown once, not stored. */
export interface NewKey {
  readonly keyId: string;
  readonly apiKey: string;
}

export interface NewPortal {
  /** The first account owns the portal (C66). The others get access. */
  readonly accountIds: readonly string[];
  readonly name: string;
  readonly gateway: 'simulator' | 'none';
  readonly fee: FeeConfig;
}

export interface CaseChange {
  readonly portalId: string;
  readonly referenceId: string;
  readonly kind: 'block' | 'hold' | 'allow';
  /** End of the restriction, RFC 3339. null: until it is removed. Not used for `allow`. */
  readonly until: string | null;
  readonly reason: string | null;
}

/**
 * Every method throws the errors of the store, and a ServiceError for a mistake of the operator: 404 for an unknown account, PORTAL_ACCESS_DENIED for
 * an unknown portal, VALIDATION_ERROR for values out of range. A command that would change nothing appends nothing and succeeds.
 */
export class Administration {
  constructor(private readonly deps: AdministrationDeps) {}

  /** The same commands with another actor. */
  as(actor: Actor): Administration {
    return new Administration({ ...this.deps, actor });
  }

  // Accounts and keys.

  /** The present state of an account. Throws 404 for an unknown account. */
  async account(accountId: string): Promise<Account> {
    const { state } = await load(this.deps.store, ACCOUNT_STREAM, accountId);
    if (!state) throw new ServiceError('VALIDATION_ERROR', 'There is no such account.', {}, { status: 404 });
    return state;
  }

  async createAccount(name: string, accountId = this.deps.ids.uuid()): Promise<Done<Account>> {
    this.checkText('name', name);
    return this.changeAccount(accountId, { type: 'CreateAccount', accountId, name });
  }

  deactivateAccount(accountId: string): Promise<Done<Account>> {
    return this.changeAccount(accountId, { type: 'DeactivateAccount' });
  }

  reactivateAccount(accountId: string): Promise<Done<Account>> {
    return this.changeAccount(accountId, { type: 'ReactivateAccount' });
  }

  /** Personal data of the account's payments is erased this many years after their newest event. null: it is kept. */
  setRetention(accountId: string, years: number | null): Promise<Done<Account>> {
    return this.changeAccount(accountId, { type: 'SetRetention', years });
  }

  async issueKey(accountId: string): Promise<Done<Account> & NewKey> {
    const { apiKey, record } = this.drawKey();
    return { ...(await this.changeAccount(accountId, { type: 'IssueApiKey', key: record })), keyId: record.keyId, apiKey };
  }

  /** Ends every key of the account and issues a new one. Tokens that were issued before stay valid (specification, Authentication 3). */
  async rotateKeys(accountId: string): Promise<Done<Account> & NewKey> {
    const { apiKey, record } = this.drawKey();
    return { ...(await this.changeAccount(accountId, { type: 'RotateApiKeys', key: record })), keyId: record.keyId, apiKey };
  }

  /** Ends one key. Tokens that were issued before stay valid. A key that has ended stays as it is. */
  revokeKey(accountId: string, keyId: string): Promise<Done<Account>> {
    return this.changeAccount(accountId, { type: 'RevokeApiKey', keyId });
  }

  private drawKey() {
    return newApiKey(this.deps.ids.uuid(), keyEnvironment(this.deps.environment), this.deps.keys);
  }

  private async changeAccount(accountId: string, command: AccountCommand): Promise<Done<Account>> {
    const { state, position } = await this.change(ACCOUNT_STREAM, accountId, command);
    return { state: state!, position };
  }

  // Portals.

  /** The present state of a portal. Throws PORTAL_ACCESS_DENIED for an unknown portal. */
  async portal(portalId: string): Promise<Portal> {
    const { state } = await load(this.deps.store, PORTAL_STREAM, portalId);
    if (!state) throw new ServiceError('PORTAL_ACCESS_DENIED', 'There is no such portal.');
    return state;
  }

  /** `signingSecret` is shown once. The stream holds it encrypted. */
  async createPortal(
    { accountIds, name, gateway, fee }: NewPortal,
    portalId = this.deps.ids.uuid(),
  ): Promise<Done<Portal> & { readonly signingSecret: string }> {
    this.checkText('name', name);
    const [ownerAccountId, ...grantedAccountIds] = accountIds;
    if (ownerAccountId === undefined) throw new ServiceError('VALIDATION_ERROR', 'A portal belongs to at least one account.');
    for (const accountId of accountIds) await this.account(accountId);
    const { signingSecret, sealed } = this.drawSigningSecret(portalId);
    const done = await this.changePortal(portalId, {
      type: 'CreatePortal',
      portalId,
      name,
      ownerAccountId,
      grantedAccountIds,
      gateway: gatewayOf(portalId, gateway),
      fee,
      signingSecret: sealed,
    });
    return { ...done, signingSecret };
  }

  private drawSigningSecret(portalId: string): { signingSecret: string; sealed: SealedSecret } {
    const signingSecret = `psec_${keyEnvironment(this.deps.environment)}_${newSecret()}`;
    return { signingSecret, sealed: this.deps.keys.seal(signingSecret, signingSecretContext(portalId)) };
  }

  /**
   * Adds a second signing secret, which is returned only here. Links that are signed with it are accepted from now on. Return addresses are signed
   * with it only after {@link activateSigningSecret}.
   */
  async stageSigningSecret(portalId: string): Promise<Done<Portal> & { readonly signingSecret: string }> {
    const { signingSecret, sealed } = this.drawSigningSecret(portalId);
    return { ...(await this.changePortal(portalId, { type: 'StageSigningSecret', signingSecret: sealed })), signingSecret };
  }

  /** The staged secret replaces the active one. */
  activateSigningSecret(portalId: string): Promise<Done<Portal>> {
    return this.changePortal(portalId, { type: 'ActivateSigningSecret' });
  }

  /** Fields that `change` lacks stay as they are. A changed field makes a new fee version. */
  changeFee(portalId: string, change: Partial<FeeConfig>): Promise<Done<Portal>> {
    return this.changePortal(portalId, { type: 'ChangeFee', change });
  }

  async grantAccess(portalId: string, accountId: string): Promise<Done<Portal>> {
    await this.account(accountId);
    return this.changePortal(portalId, { type: 'GrantAccess', accountId });
  }

  revokeAccess(portalId: string, accountId: string): Promise<Done<Portal>> {
    return this.changePortal(portalId, { type: 'RevokeAccess', accountId });
  }

  /** Replaces all limits of one scope. With `attempts` and `declines` null, the scope has no limit. */
  setLimits(portalId: string, scope: LimitScope, limits: VelocityLimits): Promise<Done<Portal>> {
    return this.changePortal(portalId, { type: 'SetLimits', scope, limits });
  }

  /** Rules that `change` lacks stay as they are. null removes a rule. */
  setRules(portalId: string, change: Partial<PortalRules>): Promise<Done<Portal>> {
    return this.changePortal(portalId, { type: 'SetRules', change });
  }

  /** Replaces the keys of line metadata that charges copy to `coding`. None: nothing is copied. */
  async setCoding(portalId: string, keys: readonly string[]): Promise<Done<Portal>> {
    for (const key of keys) this.checkText('a key', key);
    return this.changePortal(portalId, { type: 'SetCoding', keys });
  }

  setGateway(portalId: string, gateway: NewPortal['gateway']): Promise<Done<Portal>> {
    return this.changePortal(portalId, { type: 'SetGateway', gateway: gatewayOf(portalId, gateway) });
  }

  async configureCheckout(portalId: string, change: Partial<CheckoutConfig>): Promise<Done<Portal>> {
    this.checkText('agencyName', change.agencyName ?? null);
    for (const address of change.allow ?? []) for (const text of [address, percentDecoded(address)]) this.checkText('an allowed address', text);
    return this.changePortal(portalId, { type: 'ConfigureCheckout', change });
  }

  private async changePortal(portalId: string, command: PortalCommand): Promise<Done<Portal>> {
    const { state, position } = await this.change(PORTAL_STREAM, portalId, command);
    return { state: state!, position };
  }

  // Cases.

  /** Blocks or holds a case of the portal, or removes its restriction. */
  async restrictCase({ portalId, referenceId, kind, until, reason }: CaseChange): Promise<Done<Case>> {
    this.checkText('referenceId', referenceId);
    this.checkText('reason', reason);
    await this.portal(portalId);
    const at = timestamp(this.deps.clock.now());
    const caseId = caseStreamId(portalId, referenceId);
    const personal = await this.sealedReason(caseId, validReason(reason));
    const command: CaseCommand =
      kind === 'allow'
        ? { type: 'AllowCase', portalId, referenceId, personal }
        : { type: kind === 'block' ? 'BlockCase' : 'HoldCase', portalId, referenceId, until, personal, at };
    const { state, position } = await this.change(CASE_STREAM, caseId, command);
    return { state: state ?? { portalId, referenceId, restriction: null }, position };
  }

  /** Seals under the key of the present reason, so that a repeated command makes the same box and changes nothing. */
  private async sealedReason(caseId: string, reason: string | null): Promise<Personal<CaseReason>> {
    if (reason === null) return null;
    const { store, personal } = this.deps;
    const present = (await load(store, CASE_STREAM, caseId)).state?.restriction?.personal ?? null;
    if (present && !isBox(present) && present.clear.reason === reason) return inClear({ reason });
    const known = isBox(present) ? (await personal.open([present.key])).key(present.key) : null;
    return (known ?? (await personal.take())).seal({ reason }, caseReasonContext(caseId));
  }

  private change<State, Command, Event extends DomainEvent>(
    type: DecidedStreamType<State, Command, Event>,
    id: string,
    command: Command,
  ): Promise<Done<State>> {
    const { actor, ids } = this.deps;
    const busy = () => new ServiceError('INVALID_STATE', 'Somebody else keeps changing this; try again.');
    return change(this.deps, type, id, command, { actor, correlationId: ids.uuid() }, busy);
  }

  private checkText(field: string, text: string | null) {
    if (text !== null && this.deps.cardInTextCheck && holdsCardNumber(text))
      throw new ServiceError('VALIDATION_ERROR', `${field} seems to hold a card number.`);
  }
}

const percentDecoded = (text: string): string => {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
};

/**
 * The gateway of a portal. At the simulator each portal gets two merchant accounts of its own, one for the agency's money and one for the fee. So
 * batches and balances of portals stay separate.
 */
const gatewayOf = (portalId: string, gateway: NewPortal['gateway']): PortalGateway | null =>
  gateway === 'none'
    ? null
    : {
        gateway: 'simulator',
        merchantAccount: `agency-${portalId}`,
        feeMerchantAccount: `fee-${portalId}`,
        credentialsRef: 'simulator',
        environment: 'sandbox',
      };

const signingSecretContext = (portalId: string) => `portal-${portalId}/signingSecret`;

/** The portal's signing secret in clear text, for `sig` of hosted checkout (C60). Never log this secret. */
export const openSigningSecret = (keys: KeyRing, { portalId, signingSecret }: Pick<Portal, 'portalId' | 'signingSecret'>): string =>
  keys.open(signingSecret, signingSecretContext(portalId));

/** Every secret that may sign a link or an intake: the active one and the staged one, in clear text. Never log these secrets. */
export const openAcceptedSecrets = (keys: KeyRing, portal: Pick<Portal, 'portalId' | 'signingSecret' | 'stagedSecret'>): readonly string[] =>
  [portal.signingSecret, portal.stagedSecret]
    .filter((sealed) => sealed !== null)
    .map((sealed) => openSigningSecret(keys, { portalId: portal.portalId, signingSecret: sealed }));

/** The account, portal and key that the first start of a sandbox prints. */
export interface SandboxDefaults extends NewKey {
  readonly accountId: string;
  readonly portalId: string;
  readonly signingSecret: string | null;
  readonly position: Position | null;
}

/** 2.5 % + 50 cents. */
export const SANDBOX_FEE: FeeConfig = { ...NO_FEE, flatCents: 50, percentBps: 250 };

/**
 * Creates account, portal and key of a new sandbox. null: the account already has a key. Ids are fixed and the key is issued last, so the next start
 * can complete the work of an interrupted start. `signingSecret` is null if an earlier start created the portal.
 */
export const createSandboxDefaults = async (administration: Administration): Promise<SandboxDefaults | null> => {
  const accountId = hashedUuid('payfold', 'sandbox', 'account');
  const portalId = hashedUuid('payfold', 'sandbox', 'portal');
  const present = await orNull(administration.account(accountId));
  if (present && present.keys.length > 0) return null;
  if (!present) await administration.createAccount('Sandbox', accountId);
  const madePortal = (await orNull(administration.portal(portalId)))
    ? null
    : await administration.createPortal({ accountIds: [accountId], name: 'Sandbox portal', gateway: 'simulator', fee: SANDBOX_FEE }, portalId);
  const { keyId, apiKey, position } = await administration.issueKey(accountId);
  return { accountId, portalId, keyId, apiKey, signingSecret: madePortal?.signingSecret ?? null, position };
};

const orNull = async <T>(state: Promise<T>): Promise<T | null> => {
  try {
    return await state;
  } catch (error) {
    if (error instanceof ServiceError) return null;
    throw error;
  }
};
