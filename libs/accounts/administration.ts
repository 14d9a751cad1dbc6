/** Commands of an operator on accounts, keys, portals, cases and merchant accounts. */
import { type Clock, type Ids, inClear, isBox, type Personal, ServiceError, timestamp } from '#kernel';
import { controlsInText, hashedUuid, holdsCardNumber, type KeyRing, type PersonalKeys } from '#platform';
import { type Actor, change, type DecidedStreamType, type DomainEvent, type EventStore, load, type Position } from '#eventstore';
import type { Account, AccountCommand } from './account.js';
import { keyEnvironment, newApiKey, newSecret } from './api-key.js';
import { type Case, type CaseCommand, type CaseReason, caseReasonContext, validReason } from './case-restriction.js';
import { ACCOUNT_STREAM, CASE_STREAM, caseStreamId, MERCHANT_ACCOUNT_STREAM, PORTAL_STREAM } from './events.js';
import {
  credentialsRefOf,
  type DisabledScope,
  type Guarantee,
  type MerchantAccount,
  type MerchantAccountCommand,
  type MerchantAccountSettings,
  noMerchantAccount,
  type Vendor,
} from './merchant-account.js';
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
  readonly gateway: GatewayChoice;
  readonly fee: FeeConfig;
}

/** The gateway of a portal. `principal`, `fee`: ids of merchant accounts, which may be the same. */
export type GatewayChoice = 'simulator' | 'none' | { readonly gateway: Vendor; readonly principal: string; readonly fee: string };

export interface NewMerchantAccount {
  readonly merchantAccount: string;
  readonly gateway: Vendor;
  readonly environment: 'sandbox' | 'production';
  readonly name: string;
  readonly settings: MerchantAccountSettings;
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
      gateway: await this.gatewayOf(portalId, gateway),
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

  /** `disableCheckout`: turns hosted checkout off too. */
  async setGateway(portalId: string, choice: GatewayChoice, disableCheckout = false): Promise<Done<Portal>> {
    return this.changePortal(portalId, { type: 'SetGateway', gateway: await this.gatewayOf(portalId, choice), disableCheckout });
  }

  /** Throws VALIDATION_ERROR for a merchant account that is unknown, disabled, of another gateway or of another environment. */
  async refuseGateway(choice: GatewayChoice): Promise<void> {
    if (choice === 'none' || choice === 'simulator') return;
    const { gateway, principal, fee } = choice;
    for (const id of new Set([principal, fee])) {
      const account = await this.merchantAccount(id);
      const refuse = (why: string) => new ServiceError('VALIDATION_ERROR', `The merchant account ${id} ${why}.`);
      if (account.gateway !== gateway) throw refuse(`is one of ${account.gateway}, not of ${gateway}`);
      if (account.environment !== this.deps.environment)
        throw refuse(`belongs to ${account.environment}, this installation to ${this.deps.environment}`);
      if (account.status !== 'active') throw refuse('is disabled');
    }
  }

  private async gatewayOf(portalId: string, choice: GatewayChoice): Promise<PortalGateway | null> {
    if (choice === 'none') return null;
    if (choice === 'simulator') return simulatorOf(portalId);
    await this.refuseGateway(choice);
    const { gateway, principal, fee } = choice;
    return {
      gateway,
      merchantAccount: principal,
      feeMerchantAccount: fee,
      credentialsRef: credentialsRefOf(principal),
      ...(fee !== principal && { feeCredentialsRef: credentialsRefOf(fee) }),
      environment: this.deps.environment,
    };
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

  // Merchant accounts.

  /** The present state of a merchant account. Throws 404 for an unknown one. */
  async merchantAccount(id: string): Promise<MerchantAccount> {
    const { state } = await load(this.deps.store, MERCHANT_ACCOUNT_STREAM, id);
    if (!state) throw noMerchantAccount();
    return state;
  }

  /** Throws the refusals of {@link addMerchantAccount} that need no answer of the processor. */
  async refuseNewMerchantAccount(account: NewMerchantAccount): Promise<void> {
    const { environment, merchantAccount } = account;
    this.checkText('name', account.name);
    if (environment !== this.deps.environment)
      throw new ServiceError('VALIDATION_ERROR', `This installation belongs to ${this.deps.environment}, and takes no account of ${environment}.`);
    const { state } = await load(this.deps.store, MERCHANT_ACCOUNT_STREAM, merchantAccount);
    const notYet = { externalId: 'not known yet', credentials: { kid: '', ciphertext: '' } };
    MERCHANT_ACCOUNT_STREAM.decider.decide(state, { type: 'AddMerchantAccount', ...account, ...notYet });
  }

  /**
   * `externalId`: the processor's own id of the account behind the credentials. `credentials`: JSON, kept encrypted. `known`: all merchant accounts of
   * the installation. The caller makes sure that no other process adds one meanwhile.
   */
  async addMerchantAccount(
    account: NewMerchantAccount,
    externalId: string,
    credentials: string,
    known: readonly MerchantAccount[],
  ): Promise<Done<MerchantAccount>> {
    const { merchantAccount, gateway, environment } = account;
    await this.refuseNewMerchantAccount(account);
    const same = known.find((one) => one.gateway === gateway && one.environment === environment && one.externalId === externalId);
    if (same && same.merchantAccount !== merchantAccount)
      throw new ServiceError('VALIDATION_ERROR', `Account ${externalId} of ${gateway} is there already, as ${same.merchantAccount}.`);
    const sealed = this.deps.keys.seal(credentials, credentialsContext(merchantAccount));
    return this.changeMerchantAccount(merchantAccount, { type: 'AddMerchantAccount', ...account, externalId, credentials: sealed });
  }

  /** Replaces the credentials by others of the same account. Every process uses them within seconds. */
  rotateCredentials(id: string, externalId: string, credentials: string): Promise<Done<MerchantAccount>> {
    return this.changeMerchantAccount(id, {
      type: 'RotateCredentials',
      externalId,
      credentials: this.deps.keys.seal(credentials, credentialsContext(id)),
    });
  }

  /** Throws the refusals of {@link changeMerchantSettings}, and changes nothing. */
  refuseMerchantSettings(account: MerchantAccount, change: Partial<MerchantAccountSettings & { readonly name: string }>): void {
    this.checkText('name', change.name ?? null);
    MERCHANT_ACCOUNT_STREAM.decider.decide(account, { type: 'ChangeSettings', change });
  }

  /** Settings that `change` lacks stay as they are. */
  async changeMerchantSettings(id: string, change: Partial<MerchantAccountSettings & { readonly name: string }>): Promise<Done<MerchantAccount>> {
    this.checkText('name', change.name ?? null);
    return this.changeMerchantAccount(id, { type: 'ChangeSettings', change });
  }

  async disableMerchantAccount(id: string, scope: DisabledScope, reason: string): Promise<Done<MerchantAccount>> {
    this.checkText('reason', reason);
    return this.changeMerchantAccount(id, { type: 'Disable', scope, reason });
  }

  enableMerchantAccount(id: string): Promise<Done<MerchantAccount>> {
    return this.changeMerchantAccount(id, { type: 'Enable' });
  }

  /** Records what a check of the processor's guarantees has found. */
  recordMerchantCheck(id: string, runId: string, guarantees: readonly Guarantee[]): Promise<Done<MerchantAccount>> {
    return this.changeMerchantAccount(id, { type: 'RecordCheck', runId, guarantees });
  }

  private async changeMerchantAccount(id: string, command: MerchantAccountCommand): Promise<Done<MerchantAccount>> {
    const { state, position } = await this.change(MERCHANT_ACCOUNT_STREAM, id, command);
    return { state: state!, position };
  }

  // Cases.

  /**
   * Blocks or holds a case of the portal, or removes its restriction. `restricted`: the reference ids of restricted look-alikes, from a directory
   * that is level with the log. `allow` removes their restrictions too. After a fault, the caller can repeat the call.
   */
  async restrictCase(change: CaseChange, restricted: readonly string[] = []): Promise<Done<Case>> {
    // A case of an older release may hold a control character in its reference, and must be allowed again.
    this.checkText('referenceId', change.referenceId, change.kind !== 'allow');
    this.checkText('reason', change.reason);
    await this.portal(change.portalId);
    const others = change.kind === 'allow' ? restricted.filter((one) => one !== change.referenceId) : [];
    let last: Position | null = null;
    for (const referenceId of others) last = (await this.restrictOne({ ...change, referenceId })).position;
    const { state, position } = await this.restrictOne(change);
    return { state, position: last === null || (position !== null && position > last) ? position : last };
  }

  private async restrictOne({ portalId, referenceId, kind, until, reason }: CaseChange): Promise<Done<Case>> {
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

  private checkText(field: string, text: string | null, isNew = true) {
    const fault = text !== null && isNew ? controlsInText(text, { multiline: field === 'reason' }) : null;
    if (fault) throw new ServiceError('VALIDATION_ERROR', `${field} ${fault}.`);
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
 * At the simulator each portal gets two merchant accounts of its own, one for the agency's money and one for the fee. So batches and balances of
 * portals stay separate.
 */
const simulatorOf = (portalId: string): PortalGateway => ({
  gateway: 'simulator',
  merchantAccount: `agency-${portalId}`,
  feeMerchantAccount: `fee-${portalId}`,
  credentialsRef: 'simulator',
  environment: 'sandbox',
});

const credentialsContext = (merchantAccountId: string) => `merchant-account-${merchantAccountId}/credentials`;

/** The credentials of a merchant account in clear text, as JSON. Throws if the key ring cannot open them. Never log them. */
export const openCredentials = (keys: KeyRing, { merchantAccount, credentials }: Pick<MerchantAccount, 'merchantAccount' | 'credentials'>): string =>
  keys.open(credentials, credentialsContext(merchantAccount));

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
