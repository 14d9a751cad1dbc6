import { describe, expect, test } from '@jest/globals';
import { fold, ServiceError } from '#kernel';
import { account, type AccountCommand, type AccountEvent, type ApiKeyRecord } from './account.js';

const accountId = '018f0000-0000-7000-8000-000000000001';
const key = (keyId: string): ApiKeyRecord => ({ keyId, lookupId: `LOOKUP${keyId}`, environment: 'test', secretHash: 'aGFzaA==', kid: 'k1' });

const created: AccountEvent = { type: 'AccountCreated', data: { accountId, name: 'City of Springfield' } };
const issued = (keyId: string): AccountEvent => ({ type: 'ApiKeyIssued', data: { accountId, key: key(keyId) } });
const rotated = (endedKeyIds: string[], keyId: string): AccountEvent => ({
  type: 'ApiKeysRotated',
  data: { accountId, endedKeyIds, key: key(keyId) },
});
const revoked = (keyId: string): AccountEvent => ({ type: 'ApiKeyRevoked', data: { accountId, keyId } });
const deactivated: AccountEvent = { type: 'AccountDeactivated', data: { accountId } };
const reactivated: AccountEvent = { type: 'AccountReactivated', data: { accountId } };

const given = (...facts: AccountEvent[]) => ({
  when: (command: AccountCommand) => ({
    then: (...expected: AccountEvent[]) => expect(account.decide(fold(account, facts), command)).toEqual(expected),
    thenRefused: (code: string, message: RegExp) => {
      const run = () => account.decide(fold(account, facts), command);
      expect(run).toThrow(ServiceError);
      expect(run).toThrow(message);
      expect(run).toThrow(expect.objectContaining({ code }));
    },
  }),
});

describe('an API account', () => {
  test('is created with its name, trimmed', () => given().when({ type: 'CreateAccount', accountId, name: ' City of Springfield ' }).then(created));
  test('is created once', () =>
    given(created)
      .when({ type: 'CreateAccount', accountId, name: 'Again' })
      .thenRefused('INVALID_STATE', /already exists/));
  test.each(['', '   ', 'x'.repeat(201)])('needs a name of 1 to 200 characters: %j', (name) =>
    given()
      .when({ type: 'CreateAccount', accountId, name })
      .thenRefused('VALIDATION_ERROR', /^name must have 1 to 200 characters/),
  );
  test.each(['two\nlines', 'nul\0', '\ud800'])('takes no control characters and no lone surrogates in its name: %j', (name) =>
    given()
      .when({ type: 'CreateAccount', accountId, name })
      .thenRefused('VALIDATION_ERROR', /control characters/),
  );
  test('gets keys', () =>
    given(created)
      .when({ type: 'IssueApiKey', key: key('1') })
      .then(issued('1')));
  test('may have several keys at once', () =>
    given(created, issued('1'))
      .when({ type: 'IssueApiKey', key: key('2') })
      .then(issued('2')));
  test('rotation ends every key in force and begins the new one in one fact (Authentication 3)', () =>
    given(created, issued('1'), issued('2'))
      .when({ type: 'RotateApiKeys', key: key('3') })
      .then(rotated(['1', '2'], '3')));
  test('a key that was rotated before is not ended twice', () =>
    given(created, issued('1'), rotated(['1'], '2'))
      .when({ type: 'RotateApiKeys', key: key('3') })
      .then(rotated(['2'], '3')));
  test('one key is ended, the others stay', () =>
    given(created, issued('1'), issued('2')).when({ type: 'RevokeApiKey', keyId: '1' }).then(revoked('1')));
  test('ending a key a second time, or one that a rotation ended, changes nothing', () => {
    given(created, issued('1'), revoked('1')).when({ type: 'RevokeApiKey', keyId: '1' }).then();
    given(created, issued('1'), rotated(['1'], '2'))
      .when({ type: 'RevokeApiKey', keyId: '1' })
      .then();
  });
  test('a key of another account is refused', () =>
    given(created, issued('1'))
      .when({ type: 'RevokeApiKey', keyId: '2' })
      .thenRefused('VALIDATION_ERROR', /no such key/));
  test('a rotation does not end a revoked key again', () =>
    given(created, issued('1'), issued('2'), revoked('1'))
      .when({ type: 'RotateApiKeys', key: key('3') })
      .then(rotated(['2'], '3')));
  test('is deactivated and reactivated', () => {
    given(created).when({ type: 'DeactivateAccount' }).then(deactivated);
    given(created, deactivated).when({ type: 'ReactivateAccount' }).then(reactivated);
  });
  test('keeps personal data until it gets a retention of 1 to 99 years; none keeps it again', () => {
    const retention = (years: number | null): AccountEvent => ({ type: 'AccountRetentionSet', data: { accountId, years } });
    expect(fold(account, [created])).toMatchObject({ retentionYears: null });
    expect(fold(account, [created, retention(7)])).toMatchObject({ retentionYears: 7 });
    for (const years of [1, 99]) given(created).when({ type: 'SetRetention', years }).then(retention(years));
    given(created, retention(7)).when({ type: 'SetRetention', years: null }).then(retention(null));
    given(created, retention(7)).when({ type: 'SetRetention', years: 7 }).then();
    given(created).when({ type: 'SetRetention', years: null }).then();
    for (const years of [0, 100, 1.5, -1])
      given(created)
        .when({ type: 'SetRetention', years })
        .thenRefused('VALIDATION_ERROR', /^years must be 1 to 99, or none/);
    given()
      .when({ type: 'SetRetention', years: 7 })
      .thenRefused('VALIDATION_ERROR', /no such account/);
  });
  test('deactivating or reactivating a second time changes nothing', () => {
    given(created, deactivated).when({ type: 'DeactivateAccount' }).then();
    given(created, deactivated, reactivated).when({ type: 'ReactivateAccount' }).then();
  });
  test('a deactivated account may rotate a leaked key before it is reactivated', () =>
    given(created, issued('1'), deactivated)
      .when({ type: 'RotateApiKeys', key: key('2') })
      .then(rotated(['1'], '2')));
  test.each<AccountCommand>([
    { type: 'IssueApiKey', key: key('1') },
    { type: 'RotateApiKeys', key: key('1') },
    { type: 'RevokeApiKey', keyId: '1' },
    { type: 'DeactivateAccount' },
    { type: 'ReactivateAccount' },
  ])('that does not exist refuses $type', (command) =>
    given()
      .when(command)
      .thenRefused('VALIDATION_ERROR', /no such account/),
  );
});

describe('the fold of an account', () => {
  test('keeps ended keys, marked', () =>
    expect(fold(account, [created, issued('1'), rotated(['1'], '2'), deactivated])).toEqual({
      accountId,
      name: 'City of Springfield',
      status: 'deactivated',
      deactivations: 1,
      retentionYears: null,
      keys: [
        { ...key('1'), revoked: true },
        { ...key('2'), revoked: false },
      ],
    }));
  test('an impossible history is a fault, not forgiven', () => {
    expect(() => fold(account, [issued('1')])).toThrow('begins without');
    expect(() => fold(account, [created, created])).toThrow('twice');
    expect(() => fold(account, [created, { type: 'AccountRenamed' } as unknown as AccountEvent])).toThrow('unhandled case');
  });
});
