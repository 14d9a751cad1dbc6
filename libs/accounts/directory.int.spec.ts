import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { systemClock } from '#kernel';
import { createPool, newKeyRing, type Pool, systemIds, transaction } from '#platform';
import { type EventStore, memoryEventStore, type Position, type Recorded } from '#eventstore';
import { freshDatabase, makeTables } from '../../test/support/postgres.js';
import { Administration, openCredentials, openSigningSecret } from './administration.js';
import { parseApiKey } from './api-key.js';
import { applyDirectory, type Directory, directoryModel, MemoryDirectory, postgresDirectory } from './directory.js';
import { NO_FEE } from './portal.js';
import { memoryPersonalKeys } from '../../test/support/personal-keys.js';

const NOBODY = '018f0000-0000-7000-8000-00000000dead';
const keys = newKeyRing();

let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
beforeAll(async () => {
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'spec', max: 2 });
  await makeTables(pool, directoryModel);
});
afterAll(async () => {
  await pool.end();
  await database.drop();
});
afterEach(async () => {
  await pool.query('truncate directory_account, directory_api_key, directory_portal, directory_grant, directory_case, directory_merchant_account');
});

interface Subject {
  readonly directory: Directory;
  readonly apply: (events: readonly Recorded[]) => Promise<void>;
}

const subjects: Record<string, () => Subject> = {
  Postgres: () => ({ directory: postgresDirectory(pool), apply: (events) => transaction(pool, (client) => applyDirectory(client, events)) }),
  memory: () => {
    const directory = new MemoryDirectory();
    return { directory, apply: async (events) => directory.apply(events) };
  },
};

describe.each(Object.keys(subjects))('the directory on %s', (name) => {
  let subject: Subject;
  let directory: Directory;
  let store: EventStore;
  let administration: Administration;
  let seen: Position | null;

  beforeEach(() => {
    subject = subjects[name]!();
    directory = subject.directory;
    store = memoryEventStore();
    seen = null;
    administration = new Administration({
      store,
      clock: systemClock,
      ids: systemIds(() => systemClock.now()),
      keys,
      personal: memoryPersonalKeys(),
      environment: 'sandbox',
      cardInTextCheck: true,
      actor: { type: 'operator', id: 'spec' },
    });
  });

  const log = async (after: Position | null = null): Promise<Recorded[]> => {
    const events: Recorded[] = [];
    for await (const batch of store.readAll(after)) events.push(...batch);
    return events;
  };
  const project = async () => {
    const events = await log(seen);
    await subject.apply(events);
    seen = events.at(-1)?.position ?? seen;
  };
  const anAccount = async (title = 'City') => (await administration.createAccount(title)).state.accountId;
  const aPortal = async (...accountIds: string[]) =>
    administration.createPortal({ accountIds, name: 'Water', gateway: 'simulator', fee: { ...NO_FEE, percentBps: 250 } });

  test('knows nothing at first, and no id that is no UUID', async () => {
    expect(await directory.findApiKey('0123456789ABCDEF')).toBeNull();
    expect(await directory.accounts()).toEqual([]);
    for (const id of [NOBODY, 'x', '']) {
      expect(await directory.account(id)).toBeNull();
      expect(await directory.portal(id)).toBeNull();
      expect(await directory.grant(id, id)).toBeNull();
      expect(await directory.restrictedCases(id, 'c')).toEqual([]);
      expect(await directory.chargeTerms(id, id, 'c')).toEqual({
        accountStatus: null,
        access: null,
        portal: null,
        restrictions: [],
        merchantAccounts: {},
      });
    }
  });

  test('an account: name and status', async () => {
    const accountId = await anAccount();
    await project();
    expect(await directory.account(accountId)).toEqual({ accountId, name: 'City', status: 'active', deactivations: 0 });
    expect(await directory.account(accountId.toUpperCase())).toEqual({ accountId, name: 'City', status: 'active', deactivations: 0 });
    await administration.deactivateAccount(accountId);
    await project();
    expect(await directory.account(accountId)).toMatchObject({ status: 'deactivated', deactivations: 1 });
  });

  test('all accounts, oldest first', async () => {
    const first = await anAccount('A');
    const second = await anAccount('B');
    await project();
    expect((await directory.accounts()).map(({ accountId }) => accountId)).toEqual([first, second].sort());
  });

  test('an API key by its look-up id, with its account, in one answer (C51)', async () => {
    const accountId = await anAccount();
    const { apiKey, keyId } = await administration.issueKey(accountId);
    await project();
    const { lookupId, secret } = parseApiKey(apiKey)!;
    const found = (await directory.findApiKey(lookupId))!;
    expect({ ...found, secretHash: Buffer.from(found.secretHash) }).toEqual({
      keyId,
      accountId,
      accountStatus: 'active',
      environment: 'test',
      secretHash: keys.mac('api-key', secret),
      kid: keys.current,
      revoked: false,
    });
    await administration.deactivateAccount(accountId);
    await project();
    expect((await directory.findApiKey(lookupId))?.accountStatus).toBe('deactivated');
  });

  test('a rotated key is known as revoked, the new one is good', async () => {
    const accountId = await anAccount();
    const old = await administration.issueKey(accountId);
    const fresh = await administration.rotateKeys(accountId);
    await project();
    expect((await directory.findApiKey(parseApiKey(old.apiKey)!.lookupId))?.revoked).toBe(true);
    expect((await directory.findApiKey(parseApiKey(fresh.apiKey)!.lookupId))?.revoked).toBe(false);
  });

  test('a revoked key is known as revoked, the other one stays good', async () => {
    const accountId = await anAccount();
    const [old, fresh] = [await administration.issueKey(accountId), await administration.issueKey(accountId)];
    await administration.revokeKey(accountId, old.keyId);
    await project();
    expect((await directory.findApiKey(parseApiKey(old.apiKey)!.lookupId))?.revoked).toBe(true);
    expect((await directory.findApiKey(parseApiKey(fresh.apiKey)!.lookupId))?.revoked).toBe(false);
  });

  test('a portal as its stream folds, signing secret sealed', async () => {
    const accountId = await anAccount();
    const { state, signingSecret } = await aPortal(accountId);
    await administration.changeFee(state.portalId, { flatCents: 50 });
    await project();
    const found = (await directory.portal(state.portalId))!;
    expect(found).toEqual(await administration.portal(state.portalId));
    expect(found).toMatchObject({ feeVersion: 2, fee: { flatCents: 50, percentBps: 250 } });
    expect(await directory.portal(state.portalId.toUpperCase())).toEqual(found);
    expect(JSON.stringify(found)).not.toContain(signingSecret);
    expect(openSigningSecret(keys, found)).toBe(signingSecret);
  });

  test('grants: granted, revoked but once granted, never granted (C46, C47)', async () => {
    const [owner, other, stranger] = [await anAccount('A'), await anAccount('B'), await anAccount('C')];
    const { portalId } = (await aPortal(owner, other)).state;
    await administration.revokeAccess(portalId, other);
    await project();
    expect(await directory.grant(owner, portalId)).toBe('granted');
    expect(await directory.grant(owner.toUpperCase(), portalId.toUpperCase())).toBe('granted');
    expect(await directory.grant(other, portalId)).toBe('revoked');
    expect(await directory.grant(stranger, portalId)).toBeNull();
    expect(await directory.grant(owner, NOBODY)).toBeNull();
    await administration.grantAccess(portalId, other);
    await administration.revokeAccess(portalId, owner);
    await project();
    expect(await directory.grant(other, portalId)).toBe('granted');
    expect(await directory.grant(owner, portalId)).toBe('revoked');
  });

  test('cases, by the exact reference id', async () => {
    const { portalId } = (await aPortal(await anAccount())).state;
    const until = '2999-01-01T00:00:00.000Z';
    const restrict = (kind: 'block' | 'hold' | 'allow', referenceId: string) =>
      administration.restrictCase({ portalId, referenceId, kind, until: kind === 'hold' ? until : null, reason: kind === 'block' ? 'sold' : null });
    await restrict('block', 'Case 1');
    await restrict('hold', 'Case 2');
    await restrict('block', 'Fälle/3 💧');
    await project();
    expect(await directory.restrictedCases(portalId, 'Case 1')).toEqual([{ referenceId: 'Case 1', kind: 'blocked', until: null }]);
    expect(await directory.restrictedCases(portalId, 'Case 2')).toEqual([{ referenceId: 'Case 2', kind: 'held', until }]);
    expect(await directory.restrictedCases(portalId, 'Fälle/3 💧')).toHaveLength(1);
    expect(await directory.restrictedCases(portalId, 'Case 3')).toEqual([]);
    expect(await directory.restrictedCases(NOBODY, 'Case 1')).toEqual([]);
    await restrict('allow', 'Case 1');
    await restrict('block', 'Case 2');
    await project();
    expect(await directory.restrictedCases(portalId, 'Case 1')).toEqual([]);
    expect(await directory.restrictedCases(portalId, 'Case 2')).toEqual([{ referenceId: 'Case 2', kind: 'blocked', until: null }]);
  });

  test('a case under every look-alike of its reference, and all of them allowed by one (C70)', async () => {
    const accountId = await anAccount();
    const { portalId } = (await aPortal(accountId)).state;
    const restrict = async (kind: 'block' | 'hold' | 'allow', referenceId: string, others: readonly string[] = []) => {
      await administration.restrictCase({ portalId, referenceId, kind, until: null, reason: 'sold' }, others);
      await project();
    };
    const charged = async (referenceId: string) => (await directory.chargeTerms(accountId, portalId, referenceId)).restrictions;
    // The normal form of the longest reference has 4,590 characters. No index of Postgres holds them.
    await restrict('hold', '\uFDFA'.repeat(255));
    await restrict('block', 'CASE-É 7');
    await restrict('hold', 'case\u2011e\u0301  7');
    const both = [
      { kind: 'blocked', until: null },
      { kind: 'held', until: null },
    ];
    for (const sent of ['CASE-É 7', 'CASE-E\u0301 7', 'case-é 7', 'CASE\u2011É 7', ' CASE-É\u00A0\u00A07', 'CA\u200BSE-É 7'])
      expect([sent, await charged(sent)]).toEqual([sent, both]);
    expect(await charged('CASE-É 8')).toEqual([]);
    const lookAlikes = (await directory.restrictedCases(portalId, 'case-é 7')).map(({ referenceId }) => referenceId);
    expect(lookAlikes).toEqual(['CASE-É 7', 'case\u2011e\u0301  7']);
    await restrict('allow', 'Case-é 7', lookAlikes);
    for (const sent of ['CASE-É 7', 'case\u2011e\u0301  7']) expect(await charged(sent)).toEqual([]);
  });

  test('all that a charge depends on, in one answer', async () => {
    const [accountId, stranger] = [await anAccount('A'), await anAccount('B')];
    const { portalId } = (await aPortal(accountId)).state;
    await administration.restrictCase({ portalId, referenceId: 'c', kind: 'block', until: null, reason: null });
    await project();
    const portal = await directory.portal(portalId);
    const restrictions = [{ kind: 'blocked', until: null }];
    const merchantAccounts = {};
    expect(await directory.chargeTerms(accountId, portalId, 'c')).toEqual({
      accountStatus: 'active',
      access: 'granted',
      portal,
      restrictions,
      merchantAccounts,
    });
    expect(await directory.chargeTerms(accountId, portalId, 'd')).toEqual({
      accountStatus: 'active',
      access: 'granted',
      portal,
      restrictions: [],
      merchantAccounts,
    });
    expect(await directory.chargeTerms(accountId, portalId, null)).toEqual({
      accountStatus: 'active',
      access: 'granted',
      portal,
      restrictions: [],
      merchantAccounts,
    });
    expect(await directory.chargeTerms(stranger, portalId, null)).toEqual({
      accountStatus: 'active',
      access: null,
      portal,
      restrictions: [],
      merchantAccounts,
    });
    for (const unknown of [NOBODY, 'no-uuid'])
      expect(await directory.chargeTerms(accountId, unknown, 'c')).toEqual({
        accountStatus: 'active',
        access: null,
        portal: null,
        restrictions: [],
        merchantAccounts: {},
      });
    await administration.revokeAccess(portalId, accountId);
    await administration.deactivateAccount(accountId);
    await project();
    expect(await directory.chargeTerms(accountId, portalId, null)).toMatchObject({ accountStatus: 'deactivated', access: 'revoked' });
  });

  const addAccount = async (merchantAccount: string, externalId: string) =>
    administration.addMerchantAccount(
      { merchantAccount, gateway: 'authorize-net', environment: 'sandbox', name: 'City', settings: { cutOff: null, endpoint: null } },
      externalId,
      '{"apiLoginId":"a","transactionKey":"b"}',
      await directory.merchantAccounts(),
    );

  test('merchant accounts, and their status in the terms of a charge', async () => {
    const accountId = await anAccount();
    const { portalId } = (await aPortal(accountId)).state;
    await addAccount('water', '700001');
    await addAccount('fees', '700002');
    await project();
    expect(await directory.merchantAccounts()).toEqual([await administration.merchantAccount('fees'), await administration.merchantAccount('water')]);
    expect(await directory.merchantAccount('nobody')).toBeNull();
    await administration.setGateway(portalId, { gateway: 'authorize-net', principal: 'water', fee: 'fees' });
    await administration.disableMerchantAccount('fees', 'charges', 'audit');
    await project();
    const terms = await directory.chargeTerms(accountId, portalId, null);
    expect(terms.merchantAccounts).toEqual({ water: 'active', fees: 'charges_disabled' });
    expect(terms.portal!.gateway).toEqual({
      gateway: 'authorize-net',
      merchantAccount: 'water',
      feeMerchantAccount: 'fees',
      credentialsRef: 'merchant-account:water',
      feeCredentialsRef: 'merchant-account:fees',
      environment: 'sandbox',
    });
    // Several questions about one portal are answered by one statement.
    const asked = await Promise.all([accountId, accountId, NOBODY].map((id) => directory.chargeTerms(id, portalId, null)));
    expect(asked.map((one) => one.merchantAccounts)).toEqual([terms.merchantAccounts, terms.merchantAccounts, terms.merchantAccounts]);
    expect(await directory.merchantAccount('fees')).toEqual(await administration.merchantAccount('fees'));
  });

  test('one account of a processor has one name only, and a portal takes only an active account of its gateway', async () => {
    const accountId = await anAccount();
    const { portalId } = (await aPortal(accountId)).state;
    await addAccount('water', '700001');
    await project();
    await expect(addAccount('again', '700001')).rejects.toThrow('Account 700001 of authorize-net is there already, as water.');
    await expect(addAccount('water', '700001')).rejects.toThrow('There is a merchant account water already.');
    const set = (choice: Parameters<Administration['setGateway']>[1]) => administration.setGateway(portalId, choice);
    await expect(set({ gateway: 'authorize-net', principal: 'water', fee: 'nobody' })).rejects.toThrow('There is no such merchant account.');
    await expect(set({ gateway: 'stripe', principal: 'water', fee: 'water' })).rejects.toThrow('is one of authorize-net, not of stripe');
    await administration.disableMerchantAccount('water', 'charges', 'audit');
    await expect(set({ gateway: 'authorize-net', principal: 'water', fee: 'water' })).rejects.toThrow('The merchant account water is disabled.');
    await administration.enableMerchantAccount('water');
    expect((await set({ gateway: 'authorize-net', principal: 'water', fee: 'water' })).state.gateway).not.toHaveProperty('feeCredentialsRef');
  });

  test('credentials are kept encrypted, and open only in the place of their own account', async () => {
    await addAccount('water', '700001');
    const account = await administration.merchantAccount('water');
    expect(JSON.stringify((await log()).map(({ data }) => data))).not.toContain('transactionKey');
    expect(openCredentials(keys, account)).toBe('{"apiLoginId":"a","transactionKey":"b"}');
    expect(() => openCredentials(keys, { ...account, merchantAccount: 'fees' })).toThrow();
  });

  test('repeated events change nothing; a batch and single events have the same result', async () => {
    const accountId = await anAccount();
    const { apiKey } = await administration.issueKey(accountId);
    await administration.rotateKeys(accountId);
    const { portalId } = (await aPortal(accountId)).state;
    const events = await log();
    for (const event of events) await subject.apply([event]);
    await subject.apply(events);
    await subject.apply([]);
    expect(await directory.portal(portalId)).toEqual(await administration.portal(portalId));
    expect((await directory.findApiKey(parseApiKey(apiKey)!.lookupId))?.revoked).toBe(true);
  });

  test('a gap in a stream is a fault, not skipped', async () => {
    const accountId = await anAccount();
    await administration.deactivateAccount(accountId);
    await administration.reactivateAccount(accountId);
    const [first, , third] = await log();
    await expect(subject.apply([first!, third!])).rejects.toThrow('does not follow');
  });

  test('events of other streams are none of its business', async () => {
    const id = NOBODY;
    const meta = { recordedAt: '2026-01-01T00:00:00.000Z', actor: { type: 'system', id: 's' }, correlationId: id } as const;
    await store.append('payment-1', 'no_stream', [{ id, type: 'PaymentInitiated', v: 1, data: {}, meta }]);
    await project();
    expect(await directory.accounts()).toEqual([]);
  });
});

test('the two directories tell the same of a long random history', async () => {
  const store = memoryEventStore();
  const ids = systemIds(() => systemClock.now());
  const administration = new Administration({
    store,
    clock: systemClock,
    ids,
    keys,
    personal: memoryPersonalKeys(),
    environment: 'sandbox',
    cardInTextCheck: true,
    actor: { type: 'operator', id: 'spec' },
  });
  const accounts = [];
  for (let index = 0; index < 6; index++) accounts.push((await administration.createAccount(`A${index}`)).state.accountId);
  const portals = [];
  for (const accountId of accounts)
    portals.push((await administration.createPortal({ accountIds: [accountId], name: 'P', gateway: 'none', fee: NO_FEE })).state.portalId);
  let seed = 7;
  const draw = <T>(items: readonly T[]): T => items[(seed = (seed * 48_271) % 2_147_483_647) % items.length]!;
  const references = ['a', 'b', 'A\u200B'];
  for (let step = 0; step < 300; step++) {
    const [accountId, portalId, referenceId] = [draw(accounts), draw(portals), draw(references)];
    await draw([
      () => administration.deactivateAccount(accountId),
      () => administration.reactivateAccount(accountId),
      () => administration.rotateKeys(accountId),
      () => administration.grantAccess(portalId, accountId),
      () => administration.revokeAccess(portalId, accountId).catch(() => undefined),
      () => administration.changeFee(portalId, { flatCents: step }),
      () => administration.setRules(portalId, { minCents: step + 1 }),
      () => administration.restrictCase({ portalId, referenceId, kind: draw(['block', 'hold', 'allow']), until: null, reason: null }),
    ])();
  }
  const memory = new MemoryDirectory();
  const postgres = postgresDirectory(pool);
  const lookupIds: string[] = [];
  let batch: Recorded[] = [];
  for await (const events of store.readAll(null))
    for (const event of events) {
      memory.apply([event]);
      if (event.type === 'ApiKeysRotated') lookupIds.push((event.data as { key: { lookupId: string } }).key.lookupId);
      batch.push(event);
      if (batch.length < draw([1, 3, 50])) continue;
      await transaction(pool, (client) => applyDirectory(client, batch));
      batch = [];
    }
  await transaction(pool, (client) => applyDirectory(client, batch));
  expect(await postgres.accounts()).toEqual(await memory.accounts());
  expect(await postgres.portals()).toEqual(await memory.portals());
  for (const accountId of accounts)
    for (const portalId of portals)
      for (const referenceId of [...references, null])
        expect(await postgres.chargeTerms(accountId, portalId, referenceId)).toEqual(await memory.chargeTerms(accountId, portalId, referenceId));
  for (const lookupId of lookupIds) expect(await postgres.findApiKey(lookupId)).toEqual(await memory.findApiKey(lookupId));
});
