import { describe, expect, test } from '@jest/globals';
import { fold, ServiceError } from '#kernel';
import { type Guarantee, isMerchantAccountId, merchantAccount, type MerchantAccountCommand, type MerchantAccountEvent } from './merchant-account.js';

const credentials = { kid: 'k1', ciphertext: 'c2VhbGVk' };
const settings = { cutOff: { time: '16:00', timeZone: 'America/Los_Angeles' }, endpoint: null };
const account = {
  merchantAccount: 'city-water',
  gateway: 'authorize-net',
  environment: 'sandbox',
  name: 'City water',
  externalId: '700001',
  settings,
  credentials,
} as const;
const add = { type: 'AddMerchantAccount', ...account } as const;
const added: MerchantAccountEvent = { type: 'MerchantAccountAdded', data: account };
const id = { merchantAccount: 'city-water' };
const disabled = (scope: 'charges' | 'everything'): MerchantAccountEvent => ({
  type: 'MerchantAccountDisabled',
  data: { ...id, scope, reason: 'key leaked' },
});
const disable = (scope: 'charges' | 'everything') => ({ type: 'Disable', scope, reason: ' key leaked ' }) as const;
const enabled: MerchantAccountEvent = { type: 'MerchantAccountEnabled', data: id };
const found = (guarantee: string, result: Guarantee['result']): Guarantee => ({ guarantee, result, detail: '' });
const checkedIn = (runId: string, ...guarantees: Guarantee[]): MerchantAccountEvent => ({
  type: 'MerchantAccountChecked',
  data: { ...id, runId, guarantees },
});
const checked = (...guarantees: Guarantee[]) => checkedIn('r1', ...guarantees);

const given = (...facts: MerchantAccountEvent[]) => ({
  when: (command: MerchantAccountCommand) => ({
    then: (...expected: MerchantAccountEvent[]) => expect(merchantAccount.decide(fold(merchantAccount, facts), command)).toEqual(expected),
    thenRefused: (code: string, message: RegExp) => {
      const run = () => merchantAccount.decide(fold(merchantAccount, facts), command);
      expect(run).toThrow(ServiceError);
      expect(run).toThrow(message);
      expect(run).toThrow(expect.objectContaining({ code }));
    },
  }),
});
const stateAfter = (...facts: MerchantAccountEvent[]) => fold(merchantAccount, facts)!;

describe('a merchant account', () => {
  test('is added, active, with sealed credentials', () => {
    given().when(add).then(added);
    expect(stateAfter(added)).toEqual({ ...account, status: 'active', lastCheck: null, openCheck: null, repeats: null });
  });
  test('is added once', () =>
    given(added)
      .when(add)
      .thenRefused('VALIDATION_ERROR', /a merchant account city-water already/));
  test.each(['a', '-a', 'A1', 'a_b', 'a b', 'a'.repeat(41), 'ä1', ''])(
    'has an id that fits into the name of a stream, which %j does not',
    (merchantAccount) => {
      expect(isMerchantAccountId(merchantAccount)).toBe(false);
      given()
        .when({ ...add, merchantAccount })
        .thenRefused('VALIDATION_ERROR', /2 to 40/);
    },
  );
  test('may have the shortest and the longest id', () => expect(['a1', '0-', 'a'.repeat(40)].every(isMerchantAccountId)).toBe(true));
  test('must exist before anything else is done with it', () =>
    given()
      .when({ type: 'Enable' })
      .thenRefused('VALIDATION_ERROR', /no such merchant account/));
});

describe('settings', () => {
  const withSettings = (change: object) => given().when({ ...add, settings: { ...settings, ...change } });
  test.each(['24:00', '9:00', '09:60', '', '09:00:00'])('a cut-off is a time of day, not %j', (time) =>
    withSettings({ cutOff: { time, timeZone: 'UTC' } }).thenRefused('VALIDATION_ERROR', /HH:MM/),
  );
  test.each(['Pacific', 'America/Nowhere', ''])('a cut-off has an IANA time zone, not %j', (timeZone) =>
    withSettings({ cutOff: { time: '16:00', timeZone } }).thenRefused('VALIDATION_ERROR', /IANA/),
  );
  test('Stripe has no cut-off', () =>
    given()
      .when({ ...add, gateway: 'stripe' })
      .thenRefused('VALIDATION_ERROR', /authorize-net only/));
  test.each(['http://127.0.0.1:4000/xml', 'http://localhost:4000', 'http://[::1]:4000', 'https://proxy.example/path'])(
    'an endpoint may be %s',
    (endpoint) => withSettings({ endpoint }).then({ type: 'MerchantAccountAdded', data: { ...account, settings: { ...settings, endpoint } } }),
  );
  test.each(['http://proxy.example', 'ftp://127.0.0.1', 'https://user@proxy.example', 'https://proxy.example?x=1', 'nowhere', ''])(
    'an endpoint that would show the credentials, or is none, is refused: %j',
    (endpoint) => withSettings({ endpoint }).thenRefused('VALIDATION_ERROR', /https address/),
  );
  test('an endpoint belongs to the sandbox', () =>
    given()
      .when({ ...add, environment: 'production', settings: { ...settings, endpoint: 'https://proxy.example' } })
      .thenRefused('VALIDATION_ERROR', /sandbox only/));
  test('a change keeps the settings that it does not name, and nothing new is no event', () => {
    given(added)
      .when({ type: 'ChangeSettings', change: { cutOff: null } })
      .then({ type: 'MerchantAccountSettingsChanged', data: { ...id, name: 'City water', settings: { cutOff: null, endpoint: null } } });
    given(added)
      .when({ type: 'ChangeSettings', change: { name: ' Water ' } })
      .then({ type: 'MerchantAccountSettingsChanged', data: { ...id, name: 'Water', settings } });
    given(added)
      .when({ type: 'ChangeSettings', change: { name: 'City water', endpoint: null } })
      .then();
  });
});

describe('credentials', () => {
  const newer = { kid: 'k2', ciphertext: 'bmV3ZXI=' };
  test('are replaced by others of the same account', () => {
    const rotated: MerchantAccountEvent = { type: 'MerchantAccountCredentialsRotated', data: { ...id, credentials: newer } };
    given(added).when({ type: 'RotateCredentials', externalId: '700001', credentials: newer }).then(rotated);
    expect(stateAfter(added, rotated)).toMatchObject({ credentials: newer, status: 'active' });
  });
  test('of another account are refused', () =>
    given(added)
      .when({ type: 'RotateCredentials', externalId: '700002', credentials: newer })
      .thenRefused('VALIDATION_ERROR', /belong to another account: 700002, not 700001/));
});

describe('disabling', () => {
  test('for charges, then for everything, then enabling', () => {
    given(added).when(disable('charges')).then(disabled('charges'));
    expect(stateAfter(added, disabled('charges')).status).toBe('charges_disabled');
    given(added, disabled('charges')).when(disable('everything')).then(disabled('everything'));
    expect(stateAfter(added, disabled('charges'), disabled('everything')).status).toBe('disabled');
    given(added, disabled('everything')).when({ type: 'Enable' }).then(enabled);
    expect(stateAfter(added, disabled('everything'), enabled).status).toBe('active');
  });
  test('twice, or enabling an active account, is no event', () => {
    given(added, disabled('charges')).when(disable('charges')).then();
    given(added, disabled('everything')).when(disable('everything')).then();
    given(added).when({ type: 'Enable' }).then();
  });
  test('for less than before is refused', () =>
    given(added, disabled('everything'))
      .when(disable('charges'))
      .thenRefused('INVALID_STATE', /Enable it first/));
  test('needs a reason', () =>
    given(added)
      .when({ ...disable('charges'), reason: ' ' })
      .thenRefused('VALIDATION_ERROR', /^reason/));
});

describe('a check', () => {
  test('is recorded with what it found', () =>
    given(added)
      .when({ type: 'RecordCheck', runId: 'r1', guarantees: [found('g1', 'holds')] })
      .then(checked(found('g1', 'holds'))));
  test('the newest full check says whether a call may be repeated', () => {
    expect(stateAfter(added, checked(found('g1', 'holds'), found('g8', 'holds')))).toMatchObject({ repeats: 'holds' });
    for (const result of ['broken', 'later', 'not_applicable'] as const)
      expect(stateAfter(added, checked(found('g8', 'holds')), checked(found('g8', result)))).toMatchObject({ repeats: result });
  });
  test('a check that waits for its batch can be resumed, also after a quick check', () => {
    const [waits, quick] = [checkedIn('r1', found('g7', 'later')), checkedIn('r2', found('g1', 'holds'))];
    const openAfter = (...events: readonly MerchantAccountEvent[]) => stateAfter(added, ...events).openCheck?.runId ?? null;
    expect(openAfter(waits)).toBe('r1');
    expect(openAfter(waits, quick)).toBe('r1');
    expect(openAfter(waits, quick, checkedIn('r1', found('g7', 'holds')))).toBeNull();
    expect(openAfter(waits, checkedIn('r3', found('g7', 'later')))).toBe('r3');
    expect(openAfter(quick)).toBeNull();
  });
  test('a quick check does not change that', () =>
    expect(stateAfter(added, checked(found('g8', 'holds')), checked(found('g1', 'holds')))).toMatchObject({
      repeats: 'holds',
      lastCheck: { guarantees: [found('g1', 'holds')] },
    }));
});
