/** An API account. Its stream is `account-<accountId>`. Of each key, the stream holds the look-up part and a keyed hash of the secret (C51). */
import { type Decider, ServiceError, unreachable } from '#kernel';

/** Longest name of an account, portal or agency, in UTF-16 units. */
export const MAX_NAME_LENGTH = 200;

/** The environment that a key was issued in. The other environment refuses the key (C51). */
export type KeyEnvironment = 'test' | 'live';

/** The recorded part of an API key. */
export interface ApiKeyRecord {
  readonly keyId: string;
  /** The look-up part of the key text: 16 characters, unique, not secret. */
  readonly lookupId: string;
  readonly environment: KeyEnvironment;
  /** HMAC-SHA256 of the secret under the key ring's purpose `api-key`, base64. */
  readonly secretHash: string;
  /** Id of the master key that made the hash. */
  readonly kid: string;
}

// Events.

export type AccountEvent =
  | { readonly type: 'AccountCreated'; readonly data: { readonly accountId: string; readonly name: string } }
  | { readonly type: 'ApiKeyIssued'; readonly data: { readonly accountId: string; readonly key: ApiKeyRecord } }
  /** One event ends the old keys and adds the new one, so that there is no time without a valid key. */
  | {
      readonly type: 'ApiKeysRotated';
      readonly data: { readonly accountId: string; readonly endedKeyIds: readonly string[]; readonly key: ApiKeyRecord };
    }
  | { readonly type: 'ApiKeyRevoked'; readonly data: { readonly accountId: string; readonly keyId: string } }
  | { readonly type: 'AccountDeactivated'; readonly data: { readonly accountId: string } }
  | { readonly type: 'AccountReactivated'; readonly data: { readonly accountId: string } }
  /** Personal data of a payment is erased this many years after the payment's newest event. null: it is kept. */
  | { readonly type: 'AccountRetentionSet'; readonly data: { readonly accountId: string; readonly years: number | null } };

// State.

export type AccountStatus = 'active' | 'deactivated';

export interface Account {
  readonly accountId: string;
  readonly name: string;
  readonly status: AccountStatus;
  /** How often the account was deactivated. An access token of before the last time is dead (C52). */
  readonly deactivations: number;
  /** Years after which personal data of a payment is erased, counted from the payment's newest event. null: it is kept. */
  readonly retentionYears: number | null;
  /** Every key ever issued, oldest first. Ended keys stay, marked as revoked. */
  readonly keys: readonly (ApiKeyRecord & { readonly revoked: boolean })[];
}

const evolve = (state: Account | null, event: AccountEvent): Account => {
  switch (event.type) {
    case 'AccountCreated':
      if (state) throw new Error(`account ${state.accountId} was created twice`);
      return { ...event.data, status: 'active', deactivations: 0, retentionYears: null, keys: [] };
    case 'ApiKeyIssued': {
      const before = created(state);
      return { ...before, keys: [...before.keys, { ...event.data.key, revoked: false }] };
    }
    case 'ApiKeysRotated': {
      const before = created(state);
      const ended = new Set(event.data.endedKeyIds);
      return {
        ...before,
        keys: [...before.keys.map((key) => (ended.has(key.keyId) ? { ...key, revoked: true } : key)), { ...event.data.key, revoked: false }],
      };
    }
    case 'ApiKeyRevoked': {
      const before = created(state);
      return { ...before, keys: before.keys.map((key) => (key.keyId === event.data.keyId ? { ...key, revoked: true } : key)) };
    }
    case 'AccountDeactivated': {
      const before = created(state);
      return { ...before, status: 'deactivated', deactivations: before.deactivations + 1 };
    }
    case 'AccountReactivated':
      return { ...created(state), status: 'active' };
    case 'AccountRetentionSet':
      return { ...created(state), retentionYears: event.data.years };
    default:
      return unreachable(event);
  }
};

const created = (state: Account | null): Account => {
  if (!state) throw new Error('account stream begins without AccountCreated');
  return state;
};

// Commands.

export type AccountCommand =
  | { readonly type: 'CreateAccount'; readonly accountId: string; readonly name: string }
  | { readonly type: 'IssueApiKey'; readonly key: ApiKeyRecord }
  | { readonly type: 'RotateApiKeys'; readonly key: ApiKeyRecord }
  | { readonly type: 'RevokeApiKey'; readonly keyId: string }
  | { readonly type: 'DeactivateAccount' }
  | { readonly type: 'ReactivateAccount' }
  | { readonly type: 'SetRetention'; readonly years: number | null };

export const MAX_RETENTION_YEARS = 99;

const decide = (state: Account | null, command: AccountCommand): readonly AccountEvent[] => {
  if (command.type === 'CreateAccount') {
    if (state) throw new ServiceError('INVALID_STATE', 'The account already exists.');
    return [{ type: 'AccountCreated', data: { accountId: command.accountId, name: validName('name', command.name) } }];
  }
  // A deactivated account may get new keys, so that a leaked key can be rotated before the reactivation.
  const { accountId, status, retentionYears, keys } = existing(state);
  switch (command.type) {
    case 'IssueApiKey':
      return [{ type: 'ApiKeyIssued', data: { accountId, key: command.key } }];
    case 'RotateApiKeys': {
      const endedKeyIds = keys.filter((key) => !key.revoked).map((key) => key.keyId);
      return [{ type: 'ApiKeysRotated', data: { accountId, endedKeyIds, key: command.key } }];
    }
    case 'RevokeApiKey': {
      const key = keys.find(({ keyId }) => keyId === command.keyId);
      if (!key) throw new ServiceError('VALIDATION_ERROR', 'There is no such key.', {}, { status: 404 });
      return key.revoked ? [] : [{ type: 'ApiKeyRevoked', data: { accountId, keyId: key.keyId } }];
    }
    case 'DeactivateAccount':
      return status === 'deactivated' ? [] : [{ type: 'AccountDeactivated', data: { accountId } }];
    case 'ReactivateAccount':
      return status === 'active' ? [] : [{ type: 'AccountReactivated', data: { accountId } }];
    case 'SetRetention': {
      const { years } = command;
      if (years !== null && !(Number.isInteger(years) && years >= 1 && years <= MAX_RETENTION_YEARS))
        throw new ServiceError('VALIDATION_ERROR', `years must be 1 to ${MAX_RETENTION_YEARS}, or none.`);
      return years === retentionYears ? [] : [{ type: 'AccountRetentionSet', data: { accountId, years } }];
    }
    default:
      return unreachable(command);
  }
};

const existing = (state: Account | null): Account => {
  if (!state) throw new ServiceError('VALIDATION_ERROR', 'There is no such account.', {}, { status: 404 });
  return state;
};

const CONTROL_OR_SURROGATE = /[\p{Cc}\p{Surrogate}]/u;

/**
 * Trims and checks a text of one line: 1–`max` UTF-16 units, no control characters, no lone surrogates. The VALIDATION_ERROR names the field and does
 * not repeat the value.
 */
export const validLine = (field: string, value: string, max: number): string => {
  const text = value.trim();
  if (text.length < 1 || text.length > max) throw new ServiceError('VALIDATION_ERROR', `${field} must have 1 to ${max} characters.`);
  if (CONTROL_OR_SURROGATE.test(text)) throw new ServiceError('VALIDATION_ERROR', `${field} must not hold control characters.`);
  return text;
};

export const validName = (field: string, value: string): string => validLine(field, value, MAX_NAME_LENGTH);

export const account: Decider<Account | null, AccountCommand, AccountEvent> = { initial: null, decide, evolve };
