import { beforeEach, describe, expect, test } from '@jest/globals';
import { type Clock, isBox, ServiceError, systemClock } from '#kernel';
import { newKeyRing, systemIds } from '#platform';
import { Conflict, type EventStore, memoryEventStore, type NewEvent, OutcomeUnknown, Unavailable } from '#eventstore';
import { Administration, type AdministrationDeps, createSandboxDefaults, openSigningSecret } from './administration.js';
import { caseReasonContext } from './case-restriction.js';
import { caseStreamId, gatewaysOfAllTime } from './events.js';
import { NO_FEE } from './portal.js';
import { memoryPersonalKeys } from '../../test/support/personal-keys.js';

const NOW = Date.parse('2026-01-05T10:00:00.000Z');
const NOBODY = '018f0000-0000-7000-8000-00000000dead';
const clock: Clock = { now: () => NOW, realNow: () => NOW, monotonic: () => 0, sleep: async () => undefined };

let store: EventStore;
let deps: AdministrationDeps;
let administration: Administration;
beforeEach(() => {
  store = memoryEventStore();
  deps = {
    store,
    clock,
    ids: systemIds(() => systemClock.now()),
    keys: newKeyRing(),
    personal: memoryPersonalKeys(),
    environment: 'sandbox',
    cardInTextCheck: true,
    actor: { type: 'operator', id: 'jane' },
  };
  administration = new Administration(deps);
});

const eventsOf = async (stream?: string) => {
  const events = [];
  for await (const batch of store.readAll(null)) events.push(...batch.filter((event) => !stream || event.stream === stream));
  return events;
};
const refusal = async (attempt: Promise<unknown>) => {
  const error = await attempt.then(
    () => null,
    (thrown: unknown) => thrown,
  );
  expect(error).toBeInstanceOf(ServiceError);
  const { code, status, message } = error as ServiceError;
  return { code, status, message };
};
const newPortal = (accountId: string) => administration.createPortal({ accountIds: [accountId], name: 'Water', gateway: 'simulator', fee: NO_FEE });

test('the log names every gateway that a portal has had, once each', async () => {
  const { state } = await administration.createAccount('City');
  const portals = [await newPortal(state.accountId), await newPortal(state.accountId)];
  await administration.setGateway(portals[0]!.state.portalId, 'none');
  const [first, second] = portals.map((portal) => portal.state.gateway);
  expect(await gatewaysOfAllTime(store)).toEqual([first, second]);
});

describe('a command of an operator', () => {
  test('leaves a fact that names the operator and the moment', async () => {
    const { state, position } = await administration.createAccount('City');
    const [event] = await eventsOf();
    expect(event).toMatchObject({
      stream: `account-${state.accountId}`,
      revision: 0n,
      position,
      type: 'AccountCreated',
      v: 1,
      meta: { actor: { type: 'operator', id: 'jane' }, recordedAt: '2026-01-05T10:00:00.000Z' },
    });
  });
  test('that changes nothing appends nothing, and names the position of the present state', async () => {
    const { state } = await administration.createAccount('City');
    const first = await administration.deactivateAccount(state.accountId);
    const again = await administration.deactivateAccount(state.accountId);
    expect(again).toEqual(first);
    expect(await eventsOf()).toHaveLength(2);
  });
  test('about an unknown account: 404', async () => {
    for (const attempt of [administration.issueKey(NOBODY), administration.deactivateAccount(NOBODY), newPortal(NOBODY)])
      expect(await refusal(attempt)).toEqual({ code: 'VALIDATION_ERROR', status: 404, message: 'There is no such account.' });
    const { portalId } = (await newPortal((await administration.createAccount('City')).state.accountId)).state;
    expect(await refusal(administration.grantAccess(portalId, NOBODY))).toMatchObject({ status: 404 });
  });
  test('about an unknown portal: PORTAL_ACCESS_DENIED', async () => {
    const change = { portalId: NOBODY, referenceId: 'c', kind: 'block', until: null, reason: null } as const;
    for (const attempt of [administration.changeFee(NOBODY, {}), administration.portal(NOBODY), administration.restrictCase(change)])
      expect(await refusal(attempt)).toMatchObject({ code: 'PORTAL_ACCESS_DENIED', status: 403 });
  });
  test('a portal needs an account', async () =>
    expect(await refusal(administration.createPortal({ accountIds: [], name: 'P', gateway: 'none', fee: NO_FEE }))).toMatchObject({
      code: 'VALIDATION_ERROR',
    }));
});

describe('two operators at once', () => {
  test('the second decides again after the first: no key gets lost', async () => {
    const { accountId } = (await administration.createAccount('City')).state;
    await Promise.all([1, 2, 3, 4].map(() => administration.issueKey(accountId)));
    expect((await administration.account(accountId)).keys).toHaveLength(4);
  });
  test('gives up on a stream that never rests', async () => {
    const busy = new Administration({
      ...deps,
      store: Object.assign(Object.create(store) as EventStore, {
        append: async (stream: string) => {
          throw new Conflict(stream, 0n, 1n);
        },
      }),
    });
    expect(await refusal(busy.createAccount('City'))).toMatchObject({ code: 'INVALID_STATE' });
  });
});

describe('an append of unknown outcome', () => {
  const flaky = (failures: number, appended: boolean) => {
    const calls: { ids: string[]; expected: unknown }[] = [];
    const append: EventStore['append'] = async (stream, expected, events: readonly NewEvent[]) => {
      calls.push({ ids: events.map(({ id }) => id), expected });
      if (calls.length > failures) return store.append(stream, expected, events);
      if (appended) await store.append(stream, expected, events);
      throw new OutcomeUnknown('timeout');
    };
    return { calls, administration: new Administration({ ...deps, store: Object.assign(Object.create(store) as EventStore, { append }) }) };
  };
  test.each([true, false])('is repeated under the same ids and revision (it had happened: %s)', async (appended) => {
    const { calls, administration } = flaky(2, appended);
    const { state } = await administration.createAccount('City');
    expect(calls).toHaveLength(3);
    expect(new Set(calls.map((call) => JSON.stringify(call))).size).toBe(1);
    expect(await eventsOf(`account-${state.accountId}`)).toHaveLength(1);
  });
  test('and in the end says that it does not know', async () => {
    const { calls, administration } = flaky(99, false);
    await expect(administration.createAccount('City')).rejects.toThrow(OutcomeUnknown);
    expect(calls).toHaveLength(5);
  });
  test.each([new Unavailable('away'), new Error('refused')])('a later command does not say either that it did not happen: %s', async (after) => {
    let calls = 0;
    const append: EventStore['append'] = async (stream, expected, events) => {
      if (calls++ > 0) throw after;
      await store.append(stream, expected, events);
      throw new OutcomeUnknown('timeout');
    };
    const cut = new Administration({ ...deps, store: Object.assign(Object.create(store) as EventStore, { append }) });
    await expect(cut.createAccount('City')).rejects.toThrow(OutcomeUnknown);
  });
  test('a store that is away is not asked again', async () => {
    let calls = 0;
    const append: EventStore['append'] = async () => {
      calls += 1;
      throw new Unavailable('away');
    };
    const cut = new Administration({ ...deps, store: Object.assign(Object.create(store) as EventStore, { append }) });
    await expect(cut.createAccount('City')).rejects.toThrow(Unavailable);
    expect(calls).toBe(1);
  });
});

describe('secrets', () => {
  test('neither API keys nor signing secrets stand in events', async () => {
    const { accountId } = (await administration.createAccount('City')).state;
    const keys = [await administration.issueKey(accountId), await administration.rotateKeys(accountId)];
    const { state, signingSecret } = await newPortal(accountId);
    expect(signingSecret).toMatch(/^psec_test_[0-9A-Za-z]{43}$/);
    const log = JSON.stringify((await eventsOf()).map(({ data, meta }) => ({ data, meta })));
    for (const secret of [...keys.map(({ apiKey }) => apiKey.slice(-43)), signingSecret, signingSecret.slice(-43)]) expect(log).not.toContain(secret);
    expect(openSigningSecret(deps.keys, state)).toBe(signingSecret);
  });
  test('a signing secret copied to another portal does not open', async () => {
    const { accountId } = (await administration.createAccount('City')).state;
    const { state } = await newPortal(accountId);
    expect(() => openSigningSecret(deps.keys, { ...state, portalId: NOBODY })).toThrow();
  });
  test('production keys and secrets say so', async () => {
    const production = new Administration({ ...deps, environment: 'production' });
    const { accountId } = (await production.createAccount('City')).state;
    expect((await production.issueKey(accountId)).apiKey).toMatch(/^pc_live_/);
    expect((await production.createPortal({ accountIds: [accountId], name: 'P', gateway: 'none', fee: NO_FEE })).signingSecret).toMatch(
      /^psec_live_/,
    );
  });
  test('a card number in a name, a reason or a reference id is refused without repeating it (C9), unless the check is off', async () => {
    const card = '4242 4242 4242 4242';
    const { accountId } = (await administration.createAccount('City')).state;
    const { portalId } = (await newPortal(accountId)).state;
    const change = { portalId, referenceId: 'c', kind: 'block', until: null, reason: null } as const;
    for (const attempt of [
      administration.createAccount(card),
      administration.createPortal({ accountIds: [accountId], name: card, gateway: 'none', fee: NO_FEE }),
      administration.configureCheckout(portalId, { agencyName: card }),
      administration.configureCheckout(portalId, { allow: ['https://agency.example', 'https://4242424242424242.example/pay'] }),
      administration.configureCheckout(portalId, { allow: ['https://agency.example/4242%204242%204242%204242'] }),
      administration.setCoding(portalId, [card]),
      administration.restrictCase({ ...change, referenceId: card.replaceAll(' ', '') }),
      administration.restrictCase({ ...change, reason: `paid with ${card}` }),
    ]) {
      const { code, message } = await refusal(attempt);
      expect([code, message.includes('4242')]).toEqual(['VALIDATION_ERROR', false]);
    }
    const unchecked = new Administration({ ...deps, cardInTextCheck: false });
    expect((await unchecked.restrictCase({ ...change, referenceId: '4242424242424242' })).state.restriction).not.toBeNull();
  });
});

describe('cases', () => {
  test('have streams by the hash of the reference id, events with the id itself', async () => {
    const { portalId } = (await newPortal((await administration.createAccount('City')).state.accountId)).state;
    const { state } = await administration.restrictCase({ portalId, referenceId: 'Fälle/3', kind: 'hold', until: null, reason: 'audit' });
    const personal = { key: expect.any(String), box: expect.any(String) };
    expect(state).toEqual({ portalId, referenceId: 'Fälle/3', restriction: { kind: 'held', until: null, personal } });
    const stream = `case-${caseStreamId(portalId, 'Fälle/3')}`;
    expect(stream).toMatch(new RegExp(`^case-${portalId}-[0-9a-f]{32}$`));
    expect((await eventsOf(stream))[0]!.data).toEqual({ portalId, referenceId: 'Fälle/3', until: null, personal });
  });
  test('keep the reason in a box, and a repeated command changes nothing', async () => {
    const { portalId } = (await newPortal((await administration.createAccount('City')).state.accountId)).state;
    const change = { portalId, referenceId: 'c', kind: 'block', until: null, reason: 'sold to Augustina' } as const;
    const { state } = await administration.restrictCase(change);
    const caseId = caseStreamId(portalId, 'c');
    const box = state.restriction!.personal;
    if (!isBox(box)) throw new Error('the reason is not in a box');
    expect(JSON.stringify((await eventsOf()).map(({ data }) => data))).not.toContain('Augustina');
    expect((await deps.personal.open([box.key])).content(box, caseReasonContext(caseId))).toEqual({ reason: 'sold to Augustina' });
    await administration.restrictCase(change);
    expect(await eventsOf(`case-${caseId}`)).toHaveLength(1);
    await administration.restrictCase({ ...change, reason: 'sold to Bob' });
    expect(await eventsOf(`case-${caseId}`)).toHaveLength(2);
  });
  test('of before boxes: the reason stands in clear, and the same command changes nothing', async () => {
    const { portalId } = (await newPortal((await administration.createAccount('City')).state.accountId)).state;
    const stream = `case-${caseStreamId(portalId, 'c')}`;
    const old = { id: NOBODY, type: 'CaseBlocked', v: 1, data: { portalId, referenceId: 'c', until: null, reason: 'sold' } };
    await store.append(stream, 'no_stream', [{ ...old, meta: { recordedAt: '2026-01-01T00:00:00.000Z', actor: deps.actor, correlationId: 'r' } }]);
    const change = { portalId, referenceId: 'c', kind: 'block', until: null } as const;
    const { state } = await administration.restrictCase({ ...change, reason: 'sold' });
    expect(state.restriction!.personal).toEqual({ clear: { reason: 'sold' } });
    expect(await eventsOf(stream)).toHaveLength(1);
    expect((await administration.restrictCase({ ...change, reason: 'burnt' })).state.restriction!.personal).toHaveProperty('box');
  });
  test('that never were restricted may be allowed', async () => {
    const { portalId } = (await newPortal((await administration.createAccount('City')).state.accountId)).state;
    const done = await administration.restrictCase({ portalId, referenceId: 'c', kind: 'allow', until: null, reason: null });
    expect(done).toEqual({ state: { portalId, referenceId: 'c', restriction: null }, position: null });
  });
});

describe('the first start of a sandbox', () => {
  test('makes an account, a portal with 2.5 % + 50 cents, and a key', async () => {
    const made = (await createSandboxDefaults(administration))!;
    expect(made.apiKey).toMatch(/^pc_test_/);
    const portal = await administration.portal(made.portalId);
    expect(portal).toMatchObject({
      ownerAccountId: made.accountId,
      fee: { flatCents: 50, percentBps: 250, minCents: 0, maxCents: null, chargeMode: 'separate' },
      gateway: { gateway: 'simulator', environment: 'sandbox' },
      checkout: { enabled: false },
    });
    expect(openSigningSecret(deps.keys, portal)).toBe(made.signingSecret);
    expect((await eventsOf()).at(-1)!.position).toBe(made.position);
  });
  test('a second start finds them and makes nothing', async () => {
    await createSandboxDefaults(administration);
    const before = await eventsOf();
    expect(await createSandboxDefaults(administration)).toBeNull();
    expect(await eventsOf()).toEqual(before);
  });
  test.each([0, 1, 2])('a start that was cut short after %i appends is completed by the next', async (appends) => {
    let left = appends;
    const append: EventStore['append'] = async (...args) => {
      if (left-- <= 0) throw new Unavailable('cut');
      return store.append(...args);
    };
    const cut = new Administration({ ...deps, store: Object.assign(Object.create(store) as EventStore, { append }) });
    await expect(createSandboxDefaults(cut)).rejects.toThrow('cut');
    const made = (await createSandboxDefaults(administration))!;
    expect((await administration.portal(made.portalId)).ownerAccountId).toBe(made.accountId);
    expect((await administration.account(made.accountId)).keys).toHaveLength(1);
    expect(made.signingSecret === null).toBe(appends === 2);
  });
});
