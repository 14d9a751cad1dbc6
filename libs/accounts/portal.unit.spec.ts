import { describe, expect, test } from '@jest/globals';
import { fold, ServiceError } from '#kernel';
import {
  asNow,
  type CheckoutConfig,
  type FeeConfig,
  NO_FEE,
  portal,
  type Portal,
  type PortalCommand,
  type PortalEvent,
  type PortalGateway,
  type PortalRules,
  type VelocityLimits,
} from './portal.js';

const portalId = '018f0000-0000-7000-8000-00000000000a';
const [owner, other, stranger] = [
  '018f0000-0000-7000-8000-000000000001',
  '018f0000-0000-7000-8000-000000000002',
  '018f0000-0000-7000-8000-000000000003',
];
const gateway: PortalGateway = {
  gateway: 'simulator',
  merchantAccount: 'm',
  feeMerchantAccount: 'f',
  credentialsRef: 'simulator',
  environment: 'sandbox',
};
const signingSecret = { kid: 'k1', ciphertext: 'c2VhbGVk' };
const fee: FeeConfig = { flatCents: 50, percentBps: 275, minCents: 0, maxCents: null, chargeMode: 'separate' };

const create = {
  type: 'CreatePortal',
  portalId,
  name: 'Water bills',
  ownerAccountId: owner,
  grantedAccountIds: [],
  gateway,
  fee,
  signingSecret,
} as const;
const created: PortalEvent = {
  type: 'PortalCreated',
  data: { portalId, name: 'Water bills', ownerAccountId: owner, gateway, feeVersion: 1, fee, signingSecret },
};
const granted = (accountId: string): PortalEvent => ({ type: 'PortalAccessGranted', data: { portalId, accountId } });
const revoked = (accountId: string): PortalEvent => ({ type: 'PortalAccessRevoked', data: { portalId, accountId } });

const given = (...facts: PortalEvent[]) => ({
  when: (command: PortalCommand) => ({
    then: (...expected: PortalEvent[]) => expect(portal.decide(fold(portal, facts), command)).toEqual(expected),
    thenRefused: (code: string, message: RegExp) => {
      const run = () => portal.decide(fold(portal, facts), command);
      expect(run).toThrow(ServiceError);
      expect(run).toThrow(message);
      expect(run).toThrow(expect.objectContaining({ code }));
    },
  }),
});

describe('a gateway whose tokens work once, and which takes no card numbers', () => {
  const stripe: PortalGateway = { ...gateway, gateway: 'stripe', feeMerchantAccount: 'm', credentialsRef: 'merchant-account:m' };
  const combined = { ...fee, chargeMode: 'combined' } as const;
  const atStripe: PortalEvent = { type: 'PortalGatewaySet', data: { portalId, gateway: stripe } };
  const combinedFee: PortalEvent = { type: 'PortalFeeChanged', data: { portalId, feeVersion: 2, fee: combined } };
  const open: PortalEvent = {
    type: 'PortalCheckoutConfigured',
    data: { portalId, checkout: { enabled: true, allow: [], requireSignedIntake: false, agencyName: null, colour: null, locale: null } },
  };
  const closed = { ...open, data: { portalId, checkout: { ...open.data.checkout, enabled: false } } };

  test('is set where principal and fee are one charge to one account', () =>
    given(created, combinedFee).when({ type: 'SetGateway', gateway: stripe }).then(atStripe));
  test('is refused with two charges', () => {
    given(created)
      .when({ type: 'SetGateway', gateway: stripe })
      .thenRefused('VALIDATION_ERROR', /must be one charge/);
    given()
      .when({ ...create, gateway: stripe })
      .thenRefused('VALIDATION_ERROR', /must be one charge/);
    given(created, combinedFee, atStripe)
      .when({ type: 'ChangeFee', change: { chargeMode: 'separate' } })
      .thenRefused('VALIDATION_ERROR', /must be one charge/);
  });
  test('is refused with two accounts', () =>
    given(created, combinedFee)
      .when({ type: 'SetGateway', gateway: { ...stripe, feeMerchantAccount: 'f' } })
      .thenRefused('VALIDATION_ERROR', /same merchant account/));
  test('is refused while hosted checkout is on, unless the same command turns it off', () => {
    given(created, combinedFee, open)
      .when({ type: 'SetGateway', gateway: stripe })
      .thenRefused('VALIDATION_ERROR', /^Hosted checkout takes card numbers/);
    given(created, combinedFee, open).when({ type: 'SetGateway', gateway: stripe, disableCheckout: true }).then(closed, atStripe);
  });
  test('keeps hosted checkout from being turned on, and lets its other settings change', () => {
    given(created, combinedFee, atStripe)
      .when({ type: 'ConfigureCheckout', change: { enabled: true } })
      .thenRefused('VALIDATION_ERROR', /takes none/);
    given(created, combinedFee, atStripe)
      .when({ type: 'ConfigureCheckout', change: { locale: 'es' } })
      .then({ type: 'PortalCheckoutConfigured', data: { portalId, checkout: { ...closed.data.checkout, locale: 'es' } } });
  });
});

describe('a portal', () => {
  test('belongs to its first account (C66)', () => given().when(create).then(created));
  test('further accounts are grants, each named once', () =>
    given()
      .when({ ...create, grantedAccountIds: [other, owner, other] })
      .then(created, granted(other)));
  test('may begin without a gateway (503 until it has one)', () =>
    given()
      .when({ ...create, gateway: null })
      .then({ ...created, data: { ...created.data, gateway: null } }));
  test('is created once', () =>
    given(created)
      .when(create)
      .thenRefused('INVALID_STATE', /already exists/));
  test('begins without limits and rules, hosted checkout off, only its owner admitted (C53)', () =>
    expect(fold(portal, [created])).toEqual({
      portalId,
      name: 'Water bills',
      ownerAccountId: owner,
      gateway,
      fee,
      feeVersion: 1,
      signingSecret,
      limits: { card: null, case: null },
      rules: { minCents: null, maxCents: null, brands: null },
      coding: [],
      checkout: { enabled: false, allow: [], requireSignedIntake: false, agencyName: null, colour: null, locale: null },
      stagedSecret: null,
      access: { [owner]: 'granted' },
    }));
  test.each<PortalCommand>([
    { type: 'ChangeFee', change: {} },
    { type: 'GrantAccess', accountId: other },
    { type: 'RevokeAccess', accountId: other },
    { type: 'SetGateway', gateway: null },
  ])('that does not exist refuses $type', (command) =>
    given()
      .when(command)
      .thenRefused('PORTAL_ACCESS_DENIED', /no such portal/),
  );
  test('an impossible history is a fault', () => {
    expect(() => fold(portal, [granted(other)])).toThrow('begins without');
    expect(() => fold(portal, [created, created])).toThrow('twice');
  });
});

describe('the service fee (C32)', () => {
  const changed = (feeVersion: number, change: Partial<FeeConfig>): PortalEvent => ({
    type: 'PortalFeeChanged',
    data: { portalId, feeVersion, fee: { ...fee, ...change } },
  });
  test('a change names the changed parts; the event keeps the whole configuration under the next version', () =>
    given(created)
      .when({ type: 'ChangeFee', change: { percentBps: 300 } })
      .then(changed(2, { percentBps: 300 })));
  test('versions count on', () =>
    given(created, changed(2, { percentBps: 300 }))
      .when({ type: 'ChangeFee', change: { maxCents: 5_000 } })
      .then(changed(3, { percentBps: 300, maxCents: 5_000 })));
  test('the upper bound can be taken away again', () =>
    given(created, changed(2, { maxCents: 100 }))
      .when({ type: 'ChangeFee', change: { maxCents: null } })
      .then(changed(3, {})));
  test('a change that changes nothing makes no version', () =>
    given(created)
      .when({ type: 'ChangeFee', change: { ...fee } })
      .then());
  test.each<[Partial<FeeConfig>, RegExp]>([
    [{ flatCents: -1 }, /flatCents must be whole cents/],
    [{ flatCents: 1.5 }, /flatCents/],
    [{ flatCents: -0 }, /flatCents/],
    [{ flatCents: 100_000_000 }, /flatCents/],
    [{ flatCents: Number.NaN }, /flatCents/],
    [{ percentBps: 10_001 }, /percentBps must be a whole number, 0 to 10000/],
    [{ percentBps: 2.5 }, /percentBps/],
    [{ minCents: -5 }, /minCents/],
    [{ maxCents: -5 }, /maxCents must be whole cents/],
    [{ minCents: 200, maxCents: 100 }, /maxCents must not be below minCents/],
    [{ chargeMode: 'both' as 'combined' }, /chargeMode must be separate or combined/],
  ])('refuses %j', (change, message) => {
    given(created).when({ type: 'ChangeFee', change }).thenRefused('VALIDATION_ERROR', message);
    given()
      .when({ ...create, fee: { ...NO_FEE, ...change } })
      .thenRefused('VALIDATION_ERROR', message);
  });
  test('zero everywhere is a configuration like any other (C35)', () =>
    given()
      .when({ ...create, fee: NO_FEE })
      .then({ ...created, data: { ...created.data, fee: NO_FEE } }));
});

describe('access (C46, C47)', () => {
  test('is granted and revoked', () => {
    given(created).when({ type: 'GrantAccess', accountId: other }).then(granted(other));
    given(created, granted(other)).when({ type: 'RevokeAccess', accountId: other }).then(revoked(other));
  });
  test('the owner may be revoked too', () => given(created).when({ type: 'RevokeAccess', accountId: owner }).then(revoked(owner)));
  test('that was revoked may be granted again', () =>
    given(created, granted(other), revoked(other)).when({ type: 'GrantAccess', accountId: other }).then(granted(other)));
  test('granted or revoked again changes nothing', () => {
    given(created).when({ type: 'GrantAccess', accountId: owner }).then();
    given(created, revoked(owner)).when({ type: 'RevokeAccess', accountId: owner }).then();
  });
  test('an account that never had access cannot lose it', () =>
    given(created)
      .when({ type: 'RevokeAccess', accountId: stranger })
      .thenRefused('INVALID_STATE', /never had access/));
  test('an earlier grant stays recorded', () =>
    expect(fold(portal, [created, granted(other), revoked(other)])?.access).toEqual({ [owner]: 'granted', [other]: 'revoked' }));
});

describe('velocity limits (C53, C70)', () => {
  const limits: VelocityLimits = { attempts: 5, declines: 3, windowSeconds: 600, blockSeconds: 900 };
  const set = (scope: 'card' | 'case', value: VelocityLimits | null): PortalEvent => ({
    type: 'PortalLimitsSet',
    data: { portalId, scope, limits: value },
  });
  test('are set per scope', () => {
    given(created).when({ type: 'SetLimits', scope: 'card', limits }).then(set('card', limits));
    given(created, set('card', limits))
      .when({ type: 'SetLimits', scope: 'case', limits: { ...limits, blockSeconds: null } })
      .then(set('case', { ...limits, blockSeconds: null }));
    expect(fold(portal, [created, set('card', limits)])?.limits).toEqual({ card: limits, case: null });
  });
  test('without attempts and declines the scope is off again', () => {
    const off = { attempts: null, declines: null, windowSeconds: 600, blockSeconds: null };
    given(created, set('card', limits)).when({ type: 'SetLimits', scope: 'card', limits: off }).then(set('card', null));
    given(created).when({ type: 'SetLimits', scope: 'card', limits: off }).then();
  });
  test.each<['card' | 'case', Partial<VelocityLimits>, RegExp]>([
    ['card', { attempts: 0 }, /attempts/],
    ['card', { declines: 1.5 }, /declines/],
    ['card', { attempts: 10_001 }, /attempts/],
    ['card', { windowSeconds: 0 }, /windowSeconds/],
    ['card', { windowSeconds: 2_678_401 }, /windowSeconds/],
    ['card', { blockSeconds: 0 }, /blockSeconds/],
    ['case', {}, /blockSeconds applies to declines of scope card only/],
    ['card', { declines: null }, /blockSeconds applies to declines of scope card only/],
  ])('scope %s refuses %j', (scope, change, message) =>
    given(created)
      .when({ type: 'SetLimits', scope, limits: { ...limits, ...change } })
      .thenRefused('VALIDATION_ERROR', message),
  );
});

describe('rules (C70)', () => {
  const set = (rules: PortalRules): PortalEvent => ({ type: 'PortalRulesSet', data: { portalId, rules } });
  test('a change names the changed parts', () => {
    given(created)
      .when({ type: 'SetRules', change: { minCents: 100 } })
      .then(set({ minCents: 100, maxCents: null, brands: null }));
    given(created, set({ minCents: 100, maxCents: null, brands: null }))
      .when({ type: 'SetRules', change: { brands: ['mastercard', 'visa', 'visa'] } })
      .then(set({ minCents: 100, maxCents: null, brands: ['visa', 'mastercard'] }));
  });
  test('null removes a rule', () =>
    given(created, set({ minCents: 100, maxCents: null, brands: ['visa'] }))
      .when({ type: 'SetRules', change: { minCents: null, brands: null } })
      .then(set({ minCents: null, maxCents: null, brands: null })));
  test.each<[Partial<PortalRules>, RegExp]>([
    [{ minCents: 0 }, /minCents/],
    [{ maxCents: 100_000_000 }, /maxCents/],
    [{ minCents: 200, maxCents: 100 }, /below/],
    [{ brands: [] }, /at least one brand/],
    [{ brands: ['maestro' as 'visa'] }, /brands must be of visa/],
  ])('refuses %j', (change, message) => given(created).when({ type: 'SetRules', change }).thenRefused('VALIDATION_ERROR', message));
});

describe('coding keys', () => {
  const set = (...keys: string[]): PortalEvent => ({ type: 'PortalCodingSet', data: { portalId, keys } });
  const ask = (...keys: string[]) => ({ type: 'SetCoding', keys }) as const;
  test('each key once, in the order of the command; the same keys again change nothing; none ends it', () => {
    given(created)
      .when(ask('gl', 'fund', 'gl'))
      .then(set('gl', 'fund'));
    given(created, set('gl', 'fund')).when(ask('gl', 'fund')).then();
    given(created, set('gl', 'fund')).when(ask('fund', 'gl')).then(set('fund', 'gl'));
    given(created, set('gl')).when(ask()).then(set());
    given(created).when(ask()).then();
  });
  test('a key has 1 to 64 letters, digits, or _ . : / -, and a portal has at most five', () => {
    const longest = 'x'.repeat(64);
    given(created).when(ask('GL_1.2:3/4-5', longest)).then(set('GL_1.2:3/4-5', longest));
    given(created)
      .when(ask('a', 'b', 'c', 'd', 'e', 'a'))
      .then(set('a', 'b', 'c', 'd', 'e'));
    for (const key of ['', 'a b', 'é', `${longest}x`, 'a\n'])
      given(created)
        .when(ask(key))
        .thenRefused('VALIDATION_ERROR', /keys must be/);
    given(created)
      .when(ask('a', 'b', 'c', 'd', 'e', 'f'))
      .thenRefused('VALIDATION_ERROR', /at most 5/);
  });
});

describe('the gateway (C47)', () => {
  const set = (value: PortalGateway | null): PortalEvent => ({ type: 'PortalGatewaySet', data: { portalId, gateway: value } });
  test('is taken away and given back', () => {
    given(created).when({ type: 'SetGateway', gateway: null }).then(set(null));
    given(created, set(null)).when({ type: 'SetGateway', gateway }).then(set(gateway));
    given(created).when({ type: 'SetGateway', gateway }).then();
    expect(fold(portal, [created, set(null)])?.gateway).toBeNull();
  });
});

describe('hosted checkout', () => {
  const configured = (checkout: CheckoutConfig): PortalEvent => ({ type: 'PortalCheckoutConfigured', data: { portalId, checkout } });
  const off: CheckoutConfig = { enabled: false, allow: [], requireSignedIntake: false, agencyName: null, colour: null, locale: null };
  test('a change names the changed parts', () => {
    given(created)
      .when({ type: 'ConfigureCheckout', change: { enabled: true } })
      .then(configured({ ...off, enabled: true }));
    given(created, configured({ ...off, enabled: true, agencyName: 'Springfield' }))
      .when({ type: 'ConfigureCheckout', change: { requireSignedIntake: true } })
      .then(configured({ ...off, enabled: true, requireSignedIntake: true, agencyName: 'Springfield' }));
  });
  test.each([
    ['https://Agency.example', 'https://agency.example'],
    ['https://agency.example/', 'https://agency.example'],
    ['https://agency.example:443/pay/', 'https://agency.example/pay'],
    ['https://agency.example:8443/pay/../done', 'https://agency.example:8443/done'],
    ['https://*.agency.gov', 'https://*.agency.gov'],
  ])('keeps the allowed address %s as %s', (address, kept) =>
    given(created)
      .when({ type: 'ConfigureCheckout', change: { allow: [address, address] } })
      .then(configured({ ...off, allow: [kept] })),
  );
  test.each([
    'http://agency.example',
    'agency.example',
    'https://user@agency.example',
    'https://agency.example/#x',
    'https://agency.example/?x=1',
    'https:\\\\agency.example',
    'https://agency.example/a b',
    'https://127.0.0.1/pay',
    'https://0x7f.1/pay',
    'https://2130706433/pay',
    'https://[::1]/pay',
    'https://*.gov',
    'https://a.*.gov',
    'https://agency.example.',
    `https://agency.example/${'x'.repeat(2_048)}`,
  ])('refuses the address %s', (address) =>
    given(created)
      .when({ type: 'ConfigureCheckout', change: { allow: [address] } })
      .thenRefused('VALIDATION_ERROR', /^An allowed address reads https/),
  );
  test('a colour is #rrggbb, a language one that the pages are written in', () => {
    given(created)
      .when({ type: 'ConfigureCheckout', change: { colour: '#0B5FFF', locale: 'es' } })
      .then(configured({ ...off, colour: '#0b5fff', locale: 'es' }));
    for (const colour of ['blue', '#fff', '#12345g', '#1234567', 'red;}body{display:none'])
      given(created)
        .when({ type: 'ConfigureCheckout', change: { colour } })
        .thenRefused('VALIDATION_ERROR', /^colour must read #rrggbb/);
    given(created)
      .when({ type: 'ConfigureCheckout', change: { locale: 'fr' as 'en' } })
      .thenRefused('VALIDATION_ERROR', /^locale must be of en, es/);
  });
  test('a signing secret is staged beside the active one and then takes its place', () => {
    const next = { kid: 'k1', ciphertext: 'next' };
    const staged: PortalEvent = { type: 'PortalSigningSecretStaged', data: { portalId, signingSecret: next } };
    const activated: PortalEvent = { type: 'PortalSigningSecretActivated', data: { portalId } };
    given(created).when({ type: 'StageSigningSecret', signingSecret: next }).then(staged);
    given(created, staged).when({ type: 'ActivateSigningSecret' }).then(activated);
    given(created)
      .when({ type: 'ActivateSigningSecret' })
      .thenRefused('INVALID_STATE', /No signing secret is staged/);
    given(created, staged, activated)
      .when({ type: 'ActivateSigningSecret' })
      .thenRefused('INVALID_STATE', /No signing secret is staged/);
    expect(fold(portal, [created, staged])).toMatchObject({ signingSecret, stagedSecret: next });
    expect(fold(portal, [created, staged, activated])).toMatchObject({ signingSecret: next, stagedSecret: null });
    expect(() => fold(portal, [created, activated])).toThrow('no staged signing secret');
  });
  test('a row that an earlier version stored gets the fields that came later', () => {
    const { stagedSecret: _, ...old } = fold(portal, [created])!;
    const { colour: _colour, locale: _locale, ...checkout } = old.checkout;
    expect(asNow({ ...old, checkout } as unknown as Portal)).toEqual(fold(portal, [created]));
  });
  test('at most 50 addresses', () =>
    given(created)
      .when({ type: 'ConfigureCheckout', change: { allow: Array.from({ length: 51 }, (_, index) => `https://a${index}.example`) } })
      .thenRefused('VALIDATION_ERROR', /at most 50/));
});
