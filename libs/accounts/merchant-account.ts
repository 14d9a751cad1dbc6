/**
 * A merchant account at a processor: the credentials that charge, return and settle money there. Stream `merchant-account-<id>`.
 *
 * An account is never removed, because earlier payments are returned and settled through it.
 */
import { canonicalJson, type Decider, parseUrl, ServiceError, unreachable } from '#kernel';
import { validLine, validName } from './account.js';
import type { SealedSecret } from './portal.js';

/** The processors of merchant accounts, as `GatewayAccount.gateway` names them. The simulator needs no merchant account. */
export const VENDORS = ['authorize-net', 'stripe'] as const;
export type Vendor = (typeof VENDORS)[number];

/** Accounts of this processor close a batch each day, at a cut-off that the merchant chooses. */
const VENDORS_WITH_CUT_OFF: readonly Vendor[] = ['authorize-net'];

const MAX_REASON_LENGTH = 1_000;
const MAX_EXTERNAL_ID_LENGTH = 255;
const MAX_DETAIL_LENGTH = 1_000;
const MAX_ENDPOINT_LENGTH = 2_048;

/** When the day's batch closes: HH:MM in an IANA time zone. */
export interface BatchCutOff {
  readonly time: string;
  readonly timeZone: string;
}

export interface MerchantAccountSettings {
  /** null: not known, or the processor has none. */
  readonly cutOff: BatchCutOff | null;
  /** Another address of the processor. Sandbox only. null: the processor's own. */
  readonly endpoint: string | null;
}

export type GuaranteeResult = 'holds' | 'broken' | 'later' | 'not_applicable';

/** What a check has found about one guarantee of the processor. */
export interface Guarantee {
  /** `g1` to `g13`. */
  readonly guarantee: string;
  readonly result: GuaranteeResult;
  readonly detail: string;
}

/** `charges`: no new charge begins. `everything`: the account is not called at all. */
export type DisabledScope = 'charges' | 'everything';

// Events.

export type MerchantAccountEvent =
  | {
      readonly type: 'MerchantAccountAdded';
      readonly data: {
        readonly merchantAccount: string;
        readonly gateway: Vendor;
        readonly environment: 'sandbox' | 'production';
        readonly name: string;
        /** The processor's own id of the account. */
        readonly externalId: string;
        readonly settings: MerchantAccountSettings;
        readonly credentials: SealedSecret;
      };
    }
  | {
      readonly type: 'MerchantAccountCredentialsRotated';
      readonly data: { readonly merchantAccount: string; readonly credentials: SealedSecret };
    }
  | {
      readonly type: 'MerchantAccountSettingsChanged';
      readonly data: { readonly merchantAccount: string; readonly name: string; readonly settings: MerchantAccountSettings };
    }
  | {
      readonly type: 'MerchantAccountDisabled';
      readonly data: { readonly merchantAccount: string; readonly scope: DisabledScope; readonly reason: string };
    }
  | { readonly type: 'MerchantAccountEnabled'; readonly data: { readonly merchantAccount: string } }
  /** A check of the processor's guarantees. A check that was resumed is recorded again, with the same run id. */
  | {
      readonly type: 'MerchantAccountChecked';
      readonly data: { readonly merchantAccount: string; readonly runId: string; readonly guarantees: readonly Guarantee[] };
    };

// State.

/** `charges_disabled`: refunds, voids, look-ups and settlement go on. `disabled`: the account is not called at all. */
export type MerchantAccountStatus = 'active' | 'charges_disabled' | 'disabled';

interface Check {
  readonly runId: string;
  readonly guarantees: readonly Guarantee[];
}

export interface MerchantAccount {
  /** The operator's own name of the account: 2 to 40 characters. */
  readonly merchantAccount: string;
  readonly gateway: Vendor;
  readonly environment: 'sandbox' | 'production';
  readonly name: string;
  readonly externalId: string;
  readonly settings: MerchantAccountSettings;
  readonly credentials: SealedSecret;
  readonly status: MerchantAccountStatus;
  readonly lastCheck: Check | null;
  /** The newest check that waits for its batch. null: none. A quick check, which waits for nothing, leaves it as it is. */
  readonly openCheck: Check | null;
  /** What the newest full check found about repeated voids and refunds (guarantee g8). null: there was no full check. */
  readonly repeats: GuaranteeResult | null;
}

const evolve = (state: MerchantAccount | null, event: MerchantAccountEvent): MerchantAccount => {
  if (event.type === 'MerchantAccountAdded') {
    if (state) throw new Error(`merchant account ${state.merchantAccount} was added twice`);
    return { ...event.data, status: 'active', lastCheck: null, openCheck: null, repeats: null };
  }
  if (!state) throw new Error('merchant account stream begins without MerchantAccountAdded');
  switch (event.type) {
    case 'MerchantAccountCredentialsRotated':
      return { ...state, credentials: event.data.credentials };
    case 'MerchantAccountSettingsChanged':
      return { ...state, name: event.data.name, settings: event.data.settings };
    case 'MerchantAccountDisabled':
      return { ...state, status: statusOf(event.data.scope) };
    case 'MerchantAccountEnabled':
      return { ...state, status: 'active' };
    case 'MerchantAccountChecked': {
      const { runId, guarantees } = event.data;
      // A quick check says nothing about g8.
      const g8 = guarantees.find(({ guarantee }) => guarantee === 'g8');
      const lastCheck = { runId, guarantees };
      const ended = state.openCheck?.runId === runId ? null : state.openCheck;
      const openCheck = guarantees.some(({ result }) => result === 'later') ? lastCheck : ended;
      return { ...state, lastCheck, openCheck, repeats: g8?.result ?? state.repeats };
    }
    default:
      return unreachable(event);
  }
};

const statusOf = (scope: DisabledScope): MerchantAccountStatus => (scope === 'everything' ? 'disabled' : 'charges_disabled');

// Commands.

export type MerchantAccountCommand =
  | {
      readonly type: 'AddMerchantAccount';
      readonly merchantAccount: string;
      readonly gateway: Vendor;
      readonly environment: 'sandbox' | 'production';
      readonly name: string;
      readonly externalId: string;
      readonly settings: MerchantAccountSettings;
      readonly credentials: SealedSecret;
    }
  /** `externalId`: the account that the new credentials belong to. */
  | { readonly type: 'RotateCredentials'; readonly externalId: string; readonly credentials: SealedSecret }
  /** Fields that `change` lacks stay as they are. */
  | { readonly type: 'ChangeSettings'; readonly change: Partial<MerchantAccountSettings & { readonly name: string }> }
  | { readonly type: 'Disable'; readonly scope: DisabledScope; readonly reason: string }
  | { readonly type: 'Enable' }
  | { readonly type: 'RecordCheck'; readonly runId: string; readonly guarantees: readonly Guarantee[] };

const refuse = (message: string): never => {
  throw new ServiceError('VALIDATION_ERROR', message);
};

const decide = (state: MerchantAccount | null, command: MerchantAccountCommand): readonly MerchantAccountEvent[] => {
  if (command.type === 'AddMerchantAccount') {
    const { merchantAccount, gateway, environment, credentials } = command;
    if (!isMerchantAccountId(merchantAccount))
      return refuse('The id of a merchant account has 2 to 40 lower-case letters, digits and hyphens, and begins with a letter or digit.');
    if (state) return refuse(`There is a merchant account ${merchantAccount} already.`);
    const name = validName('name', command.name);
    const externalId = validLine('externalId', command.externalId, MAX_EXTERNAL_ID_LENGTH);
    const settings = validSettings(command, command.settings);
    return [{ type: 'MerchantAccountAdded', data: { merchantAccount, gateway, environment, name, externalId, settings, credentials } }];
  }
  if (!state) throw noMerchantAccount();
  const { merchantAccount } = state;
  switch (command.type) {
    case 'RotateCredentials':
      if (command.externalId !== state.externalId)
        return refuse(`The credentials belong to another account: ${command.externalId}, not ${state.externalId}.`);
      return [{ type: 'MerchantAccountCredentialsRotated', data: { merchantAccount, credentials: command.credentials } }];
    case 'ChangeSettings': {
      const { name: newName = state.name, ...change } = command.change;
      const name = validName('name', newName);
      const settings = validSettings(state, { ...state.settings, ...change });
      const isSame = name === state.name && canonicalJson(settings) === canonicalJson(state.settings);
      return isSame ? [] : [{ type: 'MerchantAccountSettingsChanged', data: { merchantAccount, name, settings } }];
    }
    case 'Disable': {
      const { scope } = command;
      const reason = validLine('reason', command.reason, MAX_REASON_LENGTH);
      if (state.status === statusOf(scope)) return [];
      // Otherwise a command with less scope would let the account be called again.
      if (state.status === 'disabled') throw new ServiceError('INVALID_STATE', 'The merchant account is disabled for everything. Enable it first.');
      return [{ type: 'MerchantAccountDisabled', data: { merchantAccount, scope, reason } }];
    }
    case 'Enable':
      return state.status === 'active' ? [] : [{ type: 'MerchantAccountEnabled', data: { merchantAccount } }];
    case 'RecordCheck': {
      const guarantees = command.guarantees.map(({ guarantee, result, detail }) => ({
        guarantee,
        result,
        detail: detail.slice(0, MAX_DETAIL_LENGTH),
      }));
      return [{ type: 'MerchantAccountChecked', data: { merchantAccount, runId: command.runId, guarantees } }];
    }
    default:
      return unreachable(command);
  }
};

export const noMerchantAccount = (): ServiceError => new ServiceError('VALIDATION_ERROR', 'There is no such merchant account.', {}, { status: 404 });

/** Ids are parts of stream names and of lines in files. */
export const isMerchantAccountId = (text: string): boolean => /^[a-z0-9][a-z0-9-]{1,39}$/.test(text);

const TIME_OF_DAY = /^(?:[01]\d|2[0-3]):[0-5]\d$/;

const validSettings = (
  { gateway, environment }: Pick<MerchantAccount, 'gateway' | 'environment'>,
  { cutOff, endpoint }: MerchantAccountSettings,
): MerchantAccountSettings => {
  if (cutOff !== null) {
    if (!VENDORS_WITH_CUT_OFF.includes(gateway)) return refuse(`A cut-off belongs to ${VENDORS_WITH_CUT_OFF.join(', ')} only.`);
    if (!TIME_OF_DAY.test(cutOff.time)) return refuse('The cut-off must be a time of day, HH:MM.');
    if (!isTimeZone(cutOff.timeZone)) return refuse('The time zone must be an IANA name, such as America/Los_Angeles.');
  }
  if (endpoint !== null) {
    if (environment !== 'sandbox') return refuse('Another endpoint is allowed in the sandbox only.');
    if (!isEndpoint(endpoint))
      return refuse('The endpoint must be an https address without user, query or fragment, or an http address of this host.');
  }
  return { cutOff: cutOff && { time: cutOff.time, timeZone: cutOff.timeZone }, endpoint };
};

const isTimeZone = (name: string): boolean => {
  try {
    return new Intl.DateTimeFormat('en-US', { timeZone: name }) instanceof Intl.DateTimeFormat;
  } catch {
    return false;
  }
};

const LOOPBACK: readonly string[] = ['127.0.0.1', '[::1]', 'localhost'];

/** Credentials are sent to the address, so they must not cross a network in clear text. */
const isEndpoint = (text: string): boolean => {
  const url = text.length > MAX_ENDPOINT_LENGTH || /[\s\p{Cc}@?#]/u.test(text) ? null : parseUrl(text);
  return url !== null && (url.protocol === 'https:' || (url.protocol === 'http:' && LOOPBACK.includes(url.hostname)));
};

export const merchantAccount: Decider<MerchantAccount | null, MerchantAccountCommand, MerchantAccountEvent> = { initial: null, decide, evolve };

/** `GatewayAccount.credentialsRef` of a merchant account. */
export const credentialsRefOf = (merchantAccountId: string): string => `merchant-account:${merchantAccountId}`;

/** What a portal needs of a gateway. The adapters' capabilities say the same. */
export const takesCardNumbers = (gateway: string): boolean => gateway !== 'stripe';
/** True: a token works for one charge only, so principal and fee must be one charge to one account. */
export const chargesOnce = (gateway: string): boolean => gateway === 'stripe';
