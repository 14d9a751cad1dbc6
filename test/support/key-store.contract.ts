/**
 * The contract of every key store: the state machine of a key's row (T1–T12). The suite runs against Postgres and against the simulation's store. So
 * a proof with the simulated store also holds for Postgres. Each test uses its own keys.
 */
import { randomBytes } from 'node:crypto';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { systemClock } from '#kernel';
import { KeyRing, systemIds } from '#platform';
import {
  type ClaimRequest,
  type IdempotencyStore,
  type IntentEvent,
  type KeyName,
  type KeyRows,
  LEASE_SECONDS,
  type Operation,
  type Owned,
  type RestoredKey,
  type StoredAnswer,
} from '#payments';

/** The fields of a row that tests check. Times are milliseconds since 1970, by the store's clock. */
export interface SeenKey {
  readonly state: string;
  readonly operation: string;
  readonly fence: string;
  readonly paymentId: string;
  readonly attemptId: string;
  readonly fpKid: string;
  readonly status: number | null;
  readonly body: string | null;
  readonly leaseUntil: number | null;
  readonly createdAt: number;
  readonly expiresAt: number;
}

export interface KeysUnderTest {
  /** The stores of two replicas. Both use the same rows. */
  readonly stores: readonly [IdempotencyStore, IdempotencyStore];
  readonly rows: KeyRows;
  /** A store that uses the same rows with another key ring. */
  withRing(ring: KeyRing): IdempotencyStore;
  rowOf(name: KeyName): Promise<SeenKey | undefined>;
  /** Changes the stored times: the lease ended, or the key expired, `agoSeconds` ago by the store's clock. */
  leaseEnds(name: KeyName, agoSeconds: number): Promise<unknown>;
  expires(name: KeyName, agoSeconds: number): Promise<unknown>;
  now(): number;
  close(): Promise<unknown>;
}

const ids = systemIds(() => systemClock.now());
/** The store keeps an intent as it is. */
const INTENT = { type: 'VoidRequested', at: '2026-01-05T10:00:00.000Z', data: { attemptId: 'a' } } as unknown as IntentEvent;

export const idempotencyContract = (storeName: string, open: () => Promise<KeysUnderTest>): void => {
  describe(`the key store contract: ${storeName}`, () => {
    let under: KeysUnderTest;
    let stores: readonly [IdempotencyStore, IdempotencyStore];
    let store: IdempotencyStore;
    beforeAll(async () => {
      under = await open();
      ({ stores } = under);
      store = stores[0];
    });
    afterAll(() => under.close());

    const ACCOUNT = ids.uuid();
    const PAYMENT = ids.uuid();
    let drawn = 0;
    const newKey = () => `key-${++drawn}`;

    const REFUND: Operation = `refund:${PAYMENT}`;
    const VOID: Operation = `void:${PAYMENT}`;
    const OPERATIONS: Operation[] = ['create', REFUND, VOID];
    /** The state of a key after a 5xx. */
    const afterFailure = (operation: Operation) => (operation === 'create' ? 'reserved' : 'released');

    const BODY = 'POST\n/payments\n{}';
    const requestOf = (key: string, change: Partial<ClaimRequest> = {}): ClaimRequest => ({
      accountId: ACCOUNT,
      key,
      operation: 'create',
      fingerprintText: BODY,
      loggedText: `${change.fingerprintText ?? BODY} as logged`,
      ...change,
    });
    const claim = (key: string, change: Partial<ClaimRequest> = {}, from = store) => from.claim(requestOf(key, change));
    const own = async (key: string, change: Partial<ClaimRequest> = {}, from = store): Promise<Owned> => {
      const claimed = await claim(key, change, from);
      if (claimed.kind !== 'owned') throw new Error(`not owned: ${claimed.kind}`);
      return claimed;
    };
    const name = (key: string, accountId = ACCOUNT) => store.name(accountId, key);
    const ANSWER: StoredAnswer = { status: 200, body: '{"success":true,"data":{"n":1}}' };
    const replayOf = (answer: StoredAnswer) => ({ kind: 'replay', answer, paymentId: expect.any(String), attemptId: expect.any(String) });
    const rowOf = (key: string) => under.rowOf(name(key));
    const stateOf = async (key: string) => (await rowOf(key))?.state;
    const leaseEnds = (key: string, agoSeconds = 1) => under.leaseEnds(name(key), agoSeconds);
    const expires = (key: string, agoSeconds = 1) => under.expires(name(key), agoSeconds);

    describe.each(OPERATIONS)('the row of a key: %s', (operation) => {
      const asked = { operation };

      test('T1: an absent key is claimed: payment and attempt are drawn, the lease runs', async () => {
        const key = newKey();
        const owned = await own(key, asked);
        expect(owned).toMatchObject({ tookOver: false, fence: expect.stringMatching(/^\d+$/) });
        const row = await rowOf(key);
        expect(row).toMatchObject({
          state: 'in_progress',
          operation,
          paymentId: owned.paymentId,
          attemptId: owned.attemptId,
          status: null,
          body: null,
        });
        const lease = row!.leaseUntil! - row!.createdAt;
        expect(Math.abs(lease - LEASE_SECONDS * 1000)).toBeLessThan(2_000);
        const kept = row!.expiresAt - row!.createdAt;
        expect(Math.abs(kept - 24 * 3_600_000)).toBeLessThan(2_000);
      });

      test('T1: after 24 h a completed key is as good as new: another request, payment and attempt', async () => {
        const key = newKey();
        const first = await own(key, asked);
        await store.finish(name(key), first.fence, { to: 'completed', answer: ANSWER });
        await expires(key);
        const second = await own(key, { ...asked, fingerprintText: 'another body' });
        // An expired key is not taken over, because the work of another request must not continue.
        expect(second.tookOver).toBe(false);
        expect(second.fence).not.toBe(first.fence);
        expect(second.paymentId).not.toBe(first.paymentId);
        expect(second.attemptId).not.toBe(first.attemptId);
        expect(await rowOf(key)).toMatchObject({ state: 'in_progress', status: null, body: null });
        expect((await rowOf(key))!.expiresAt).toBeGreaterThan(under.now() + 23 * 3_600_000);
      });

      test('T2: another body or operation is a mismatch in every state, and changes nothing', async () => {
        for (const state of ['in_progress', 'lease over', 'completed', 'failed'] as const) {
          const key = newKey();
          const { fence } = await own(key, asked);
          if (state === 'lease over') await leaseEnds(key);
          if (state === 'completed') await store.finish(name(key), fence, { to: 'completed', answer: ANSWER });
          if (state === 'failed') await store.finish(name(key), fence, { to: afterFailure(operation) });
          const before = await rowOf(key);
          expect(await claim(key, { ...asked, fingerprintText: 'another body' })).toEqual({ kind: 'mismatch' });
          expect(await claim(key, { operation: operation === VOID ? REFUND : VOID })).toEqual({ kind: 'mismatch' });
          expect(await rowOf(key)).toEqual(before);
        }
      });

      test('T3: a completed key replays status and bytes, as often as it is asked', async () => {
        const key = newKey();
        const { fence, paymentId, attemptId } = await own(key, asked);
        const answer = { status: 402, body: '{"metadata":{"é":"\\u2028 \\"x\\""}}' };
        expect(await store.finish(name(key), fence, { to: 'completed', answer })).toBe(true);
        for (const from of stores) expect(await claim(key, asked, from)).toEqual({ kind: 'replay', answer, paymentId, attemptId });
      });

      test('T4: in progress, Retry-After between 1 and 5 seconds', async () => {
        const key = newKey();
        await own(key, asked);
        expect(await claim(key, asked)).toEqual({ kind: 'in_progress', retryAfterSeconds: 5 });
        await leaseEnds(key, -2.5);
        expect(await claim(key, asked)).toEqual({ kind: 'in_progress', retryAfterSeconds: 3 });
        await leaseEnds(key, -0.3);
        expect(await claim(key, asked)).toEqual({ kind: 'in_progress', retryAfterSeconds: 1 });
      });

      test('T7, T8: a lease that is over is taken over with a new fence; payment and attempt stay', async () => {
        const key = newKey();
        const first = await own(key, asked);
        await leaseEnds(key);
        const second = await own(key, asked, stores[1]);
        expect(second).toMatchObject({ tookOver: true, paymentId: first.paymentId, attemptId: first.attemptId });
        expect(second.fence).not.toBe(first.fence);
      });

      test('T7, T8: also when the key has expired meanwhile: its begun work is looked at, not forgotten', async () => {
        const key = newKey();
        const first = await own(key, asked);
        await leaseEnds(key);
        await expires(key);
        expect(await claim(key, { ...asked, fingerprintText: 'another body' })).toEqual({ kind: 'mismatch' });
        expect(await own(key, asked)).toMatchObject({ tookOver: true, paymentId: first.paymentId, attemptId: first.attemptId });
      });

      test('T9, T10: only the owner finishes; a former one changes nothing', async () => {
        const key = newKey();
        const first = await own(key, asked);
        await leaseEnds(key);
        const second = await own(key, asked);
        for (const settlement of [{ to: 'completed', answer: ANSWER }, { to: afterFailure(operation) }, { to: 'given_back' }] as const)
          expect(await store.finish(name(key), first.fence, settlement)).toBe(false);
        expect(await store.renewAttempt(name(key), first.fence, ids.uuid())).toBe(false);
        expect(await rowOf(key)).toMatchObject({ state: 'in_progress', fence: second.fence, attemptId: first.attemptId });
        expect(await store.finish(name(key), second.fence, { to: 'completed', answer: ANSWER })).toBe(true);
        // A finished key stays finished, even for its owner.
        expect(await store.finish(name(key), second.fence, { to: afterFailure(operation) })).toBe(false);
        expect(await store.finish(name(key), second.fence, { to: 'given_back' })).toBe(false);
        expect(await stateOf(key)).toBe('completed');
      });

      test('T9: given back, the key is free for anything; the next fence is another one, and the former owner touches it no more', async () => {
        const key = newKey();
        const first = await own(key, asked);
        expect(await store.finish(name(key), first.fence, { to: 'given_back' })).toBe(true);
        expect(await rowOf(key)).toBeUndefined();
        const second = await own(key, { ...asked, fingerprintText: 'another body' });
        expect(second.tookOver).toBe(false);
        expect(second.fence).not.toBe(first.fence);
        expect(await store.finish(name(key), first.fence, { to: 'given_back' })).toBe(false);
        expect(await store.finish(name(key), first.fence, { to: afterFailure(operation) })).toBe(false);
        expect(await stateOf(key)).toBe('in_progress');
      });

      test('T12: an expired key is purged; a live one and one in progress are not', async () => {
        const [completed, live, running] = [newKey(), newKey(), newKey()];
        await store.finish(name(completed), (await own(completed, asked)).fence, { to: 'completed', answer: ANSWER });
        await store.finish(name(live), (await own(live, asked)).fence, { to: 'completed', answer: ANSWER });
        await own(running, asked);
        await expires(completed);
        await expires(running);
        await store.purge(1_000, async () => true);
        expect(await rowOf(completed)).toBeUndefined();
        expect(await stateOf(live)).toBe('completed');
        expect(await stateOf(running)).toBe('in_progress');
      });
    });

    describe('after a 5xx', () => {
      test('T5: a create’s key is reserved: it never has an owner again, lease or not', async () => {
        const key = newKey();
        const { fence, paymentId } = await own(key);
        await store.finish(name(key), fence, { to: 'reserved' });
        for (let round = 0; round < 3; round++) expect(await claim(key)).toMatchObject({ kind: 'reserved', paymentId });
        await expires(key);
        expect(await claim(key)).toMatchObject({ kind: 'reserved', paymentId });
        expect(await claim(key, { fingerprintText: 'another body' })).toEqual({ kind: 'mismatch' });
      });

      test('T6, C17: a refund’s key is released, bound to body and attempt', async () => {
        const key = newKey();
        const first = await own(key, { operation: REFUND });
        await store.finish(name(key), first.fence, { to: 'released' });
        expect(await claim(key, { operation: REFUND, fingerprintText: 'another body' })).toEqual({ kind: 'mismatch' });
        const second = await own(key, { operation: REFUND });
        expect(second).toMatchObject({ tookOver: true, attemptId: first.attemptId, paymentId: first.paymentId });
        expect(second.fence).not.toBe(first.fence);
      });

      test('T7, T8: a takeover learns whether a call of the gateway may have begun', async () => {
        for (const operation of OPERATIONS) {
          const key = newKey();
          const first = await own(key, { operation });
          expect(first.begun).toBe(false);
          await leaseEnds(key);
          const second = await own(key, { operation });
          expect([second.begun, second.claimedAt]).toEqual([false, first.claimedAt]);
          expect(await store.holds(name(key), second.fence, second.attemptId, INTENT)).toBe(true);
          await leaseEnds(key);
          const third = await own(key, { operation });
          expect(third).toMatchObject({ tookOver: true, begun: INTENT });
          await store.finish(name(key), third.fence, { to: afterFailure(operation) });
          if (operation === 'create') expect(await claim(key)).toMatchObject({ kind: 'reserved', attemptId: third.attemptId, begun: INTENT });
          else {
            const again = await own(key, { operation });
            expect(again.begun).toEqual(INTENT);
            await store.renewAttempt(name(key), again.fence, ids.uuid());
            await leaseEnds(key);
            expect((await own(key, { operation })).begun).toBe(false);
          }
        }
      });

      test('a key is held by its owner only, and only for its present attempt', async () => {
        const key = newKey();
        const { fence, attemptId } = await own(key, { operation: VOID });
        const holds = (...given: readonly [fence: string, attemptId: string]) => store.holds(name(key), ...given, INTENT);
        expect(await holds(fence, attemptId)).toBe(true);
        expect(await holds(String(BigInt(fence) + 1n), attemptId)).toBe(false);
        expect(await store.holds(name(newKey()), fence, attemptId, INTENT)).toBe(false);
        const renewed = ids.uuid();
        await store.renewAttempt(name(key), fence, renewed);
        expect([await holds(fence, attemptId), await holds(fence, renewed)]).toEqual([false, true]);
        await store.finish(name(key), fence, { to: 'released' });
        expect(await holds(fence, renewed)).toBe(false);
      });

      test('C17: the attempt is renewed by the owner, and the next claim finds the new one', async () => {
        const key = newKey();
        const { fence } = await own(key, { operation: VOID });
        const renewed = ids.uuid();
        expect(await store.renewAttempt(name(key), fence, renewed)).toBe(true);
        await store.finish(name(key), fence, { to: 'released' });
        expect(await store.renewAttempt(name(key), fence, ids.uuid())).toBe(false);
        expect((await own(key, { operation: VOID })).attemptId).toBe(renewed);
      });

      test('C16, T12: a reserved key leaves 24 h later at the earliest, and only when its payment is resolved', async () => {
        const key = newKey();
        const { fence, paymentId } = await own(key);
        await store.finish(name(key), fence, { to: 'reserved' });
        const asked: string[] = [];
        const purge = (resolved: boolean) => store.purge(1_000, async ({ paymentId: id }) => (asked.push(id), resolved));
        await purge(true);
        expect(asked).not.toContain(paymentId);
        await expires(key);
        await purge(false);
        expect(asked).toContain(paymentId);
        expect(await stateOf(key)).toBe('reserved');
        await purge(true);
        expect(await rowOf(key)).toBeUndefined();
        expect((await own(key)).tookOver).toBe(false);
      });

      test('C17, T12: a released key leaves only when its attempt says so; until then it is bound to body and attempt', async () => {
        const key = newKey();
        const first = await own(key, { operation: REFUND });
        await store.finish(name(key), first.fence, { to: 'released' });
        await expires(key);
        expect(await claim(key, { operation: REFUND, fingerprintText: 'another body' })).toEqual({ kind: 'mismatch' });
        const second = await own(key, { operation: REFUND });
        expect(second).toMatchObject({ tookOver: true, attemptId: first.attemptId });
        await store.finish(name(key), second.fence, { to: 'released' });
        const asked: unknown[] = [];
        await store.purge(1_000, async (bound) => (asked.push(bound), false));
        expect(asked).toContainEqual(expect.objectContaining({ attemptId: first.attemptId, operation: REFUND }));
        expect(await stateOf(key)).toBe('released');
        await store.purge(1_000, async () => true);
        expect(await rowOf(key)).toBeUndefined();
      });

      test('the answer of a refund that comes late is kept for a day from then; that of a create is not', async () => {
        for (const [operation, hours] of [
          [REFUND, 24],
          ['create', 0],
        ] as const) {
          const key = newKey();
          const { fence } = await own(key, { operation });
          await expires(key);
          await store.finish(name(key), fence, { to: 'completed', answer: ANSWER });
          expect(Math.abs((await rowOf(key))!.expiresAt - under.now() - hours * 3_600_000)).toBeLessThan(5_000);
        }
      });

      test('T12: payments that stay open do not keep other expired keys from being purged', async () => {
        const open = [newKey(), newKey(), newKey()];
        for (const [index, key] of open.entries()) {
          await store.finish(name(key), (await own(key)).fence, { to: 'reserved' });
          await expires(key, 1_000 - index);
        }
        const done = newKey();
        await store.finish(name(done), (await own(done)).fence, { to: 'completed', answer: ANSWER });
        await expires(done);
        for (let round = 0; round < 4; round++) await store.purge(2, async () => false);
        expect(await rowOf(done)).toBeUndefined();
        for (const key of open) expect(await stateOf(key)).toBe('reserved');
        await store.purge(1_000, async () => true);
      });

      test('T12: the purge says how many keys left, however few it takes at once', async () => {
        await store.purge(1_000, async () => true);
        for (const to of ['completed', 'completed', 'completed', 'reserved', 'reserved'] as const) {
          const key = newKey();
          await store.finish(name(key), (await own(key)).fence, to === 'completed' ? { to, answer: ANSWER } : { to });
          await expires(key);
        }
        expect(await store.purge(2, async () => true)).toBe(5);
        expect(await store.purge(2, async () => true)).toBe(0);
      });

      test('T12: a stop leaves the rows behind the one at hand to the next purge', async () => {
        await store.purge(1_000, async () => true);
        const keys = [newKey(), newKey(), newKey()];
        for (const key of keys) {
          await store.finish(name(key), (await own(key)).fence, { to: 'reserved' });
          await expires(key);
        }
        const stop = new AbortController();
        const purged = await store.purge(2, async () => (stop.abort(), true), stop.signal);
        expect(purged).toBe(1);
        expect(await store.purge(1, async () => true)).toBe(2);
      });

      test('T12: a payment that cannot be read keeps its own key, and no other', async () => {
        const [unreadable, resolved] = [newKey(), newKey()];
        const paymentIds: string[] = [];
        for (const [index, key] of [unreadable, resolved].entries()) {
          const { fence, paymentId } = await own(key);
          paymentIds.push(paymentId);
          await store.finish(name(key), fence, { to: 'reserved' });
          await expires(key, 1_000 - index);
        }
        await store.purge(1, ({ paymentId }) =>
          paymentId === paymentIds[0] ? Promise.reject(new Error('the store is away')) : Promise.resolve(true),
        );
        expect(await stateOf(unreadable)).toBe('reserved');
        expect(await rowOf(resolved)).toBeUndefined();
      });
    });

    describe('scope (C12)', () => {
      test('two accounts with one key know nothing of each other', async () => {
        const key = newKey();
        const other = ids.uuid();
        const first = await own(key);
        const second = await own(key, { accountId: other, fingerprintText: 'another body' });
        expect(second.paymentId).not.toBe(first.paymentId);
        await store.finish(name(key), first.fence, { to: 'completed', answer: ANSWER });
        expect(await store.finish(name(key, other), first.fence, { to: 'given_back' })).toBe(false);
        expect(await claim(key, { accountId: other, fingerprintText: 'another body' })).toMatchObject({ kind: 'in_progress' });
        expect(await claim(key)).toMatchObject({ kind: 'replay' });
      });
    });

    describe('contenders', () => {
      const race = (claims: number, one: (index: number) => Promise<unknown>) =>
        Promise.all(Array.from({ length: claims }, (_, index) => one(index)));
      const fences = async (key: string, change: Partial<ClaimRequest>) => {
        const claimed = await race(10, (index) => claim(key, change, stores[index % 2]));
        return claimed as Awaited<ReturnType<typeof claim>>[];
      };

      test('10 at once for each of 60 keys over two replicas: exactly one winner, the others wait', async () => {
        await Promise.all(
          Array.from({ length: 60 }, async () => {
            const key = newKey();
            const claimed = await fences(key, {});
            expect(claimed.filter(({ kind }) => kind === 'owned')).toHaveLength(1);
            expect(claimed.filter(({ kind }) => kind === 'in_progress')).toHaveLength(9);
          }),
        );
      });

      test.each(OPERATIONS)('10 at once for each of 30 leases that are over: exactly one taker with a fence of its own (%s)', async (operation) => {
        const taken = await Promise.all(
          Array.from({ length: 30 }, async () => {
            const key = newKey();
            const first = await own(key, { operation });
            await leaseEnds(key);
            const owners = (await fences(key, { operation })).filter((claimed) => claimed.kind === 'owned');
            expect(owners).toHaveLength(1);
            expect(owners[0]!.paymentId).toBe(first.paymentId);
            return owners[0]!.fence;
          }),
        );
        expect(new Set(taken).size).toBe(30);
      });

      test('a released key has one taker among many', async () => {
        const key = newKey();
        await store.finish(name(key), (await own(key, { operation: REFUND })).fence, { to: 'released' });
        expect((await fences(key, { operation: REFUND })).filter(({ kind }) => kind === 'owned')).toHaveLength(1);
      });

      test('different bodies at once: one is executed, of the others none', async () => {
        const key = newKey();
        const claimed = (await race(10, (index) => claim(key, { fingerprintText: `body ${index}` }, stores[index % 2]))) as { kind: string }[];
        expect(claimed.map(({ kind }) => kind).sort()).toEqual([...Array<string>(9).fill('mismatch'), 'owned']);
      });

      test('sweepers at once share the stale creates between them, and leave refunds alone (T7)', async () => {
        const stale = await Promise.all(Array.from({ length: 20 }, newKey).map(async (key) => ({ key, ...(await own(key)) })));
        const refund = newKey();
        await own(refund, { operation: REFUND });
        for (const { key } of stale) await leaseEnds(key);
        await leaseEnds(refund);
        const swept = (await race(4, (index) => stores[index % 2]!.takeOverStale(100))) as Awaited<ReturnType<IdempotencyStore['takeOverStale']>>[];
        const rows = swept.flat().filter((row) => stale.some(({ paymentId }) => paymentId === row.paymentId));
        expect(rows).toHaveLength(20);
        expect(new Set(rows.map(({ fence }) => fence)).size).toBe(20);
        for (const row of rows) {
          const { fence, attemptId } = stale.find(({ paymentId }) => paymentId === row.paymentId)!;
          expect(row.fence).not.toBe(fence);
          expect(row).toMatchObject({ tookOver: true, attemptId, accountId: ACCOUNT });
          expect(await store.finish(row, row.fence, { to: 'reserved' })).toBe(true);
        }
        expect(swept.flat().some(({ paymentId }) => paymentId === PAYMENT)).toBe(false);
        expect(await stateOf(refund)).toBe('in_progress');
      });

      test('the row of a create can be looked up without the body, and taken over alone', async () => {
        const [one, other, refund] = [newKey(), newKey(), newKey()];
        const name = store.name(ACCOUNT, one);
        expect(await store.ofCreate(name)).toBeNull();
        const { paymentId } = await own(one);
        await own(other);
        await own(refund, { operation: REFUND });
        expect(await store.ofCreate(name)).toMatchObject({ state: 'in_progress', paymentId });
        expect((await store.ofCreate(name))!.leaseLeft).toBeGreaterThan(0);
        expect(await store.ofCreate(store.name(ACCOUNT, refund))).toBeNull();
        await leaseEnds(one);
        await leaseEnds(other);
        expect((await store.ofCreate(name))!.leaseLeft).toBeLessThanOrEqual(0);
        const taken = await store.takeOverStale(100, name);
        expect(taken.map((row) => row.paymentId)).toEqual([paymentId]);
        expect(await store.finish(name, taken[0]!.fence, { to: 'completed', answer: ANSWER })).toBe(true);
        expect(await store.ofCreate(name)).toMatchObject({ state: 'completed', paymentId, leaseLeft: null });
        expect((await store.ofCreate(store.name(ACCOUNT, other)))!.leaseLeft).toBeLessThanOrEqual(0);
      });
    });

    describe('a look', () => {
      const look = (key: string, change: Partial<ClaimRequest> = {}) => store.look(requestOf(key, change));

      test.each(OPERATIONS)('finds the same as a claim, and claims nothing: %s', async (operation) => {
        const key = newKey();
        expect(await look(key, { operation })).toBeNull();
        expect(await rowOf(key)).toBeUndefined();
        const { fence } = await own(key, { operation });
        expect(await look(key, { operation })).toMatchObject({ kind: 'in_progress' });
        expect(await look(key, { operation, fingerprintText: 'another body' })).toEqual({ kind: 'mismatch' });
        expect(await look(key, { operation: operation === VOID ? REFUND : VOID })).toEqual({ kind: 'mismatch' });
        await store.finish(name(key), fence, { to: 'completed', answer: ANSWER });
        const before = await rowOf(key);
        expect(await look(key, { operation })).toEqual(replayOf(ANSWER));
        expect(await look(key, { operation, fingerprintText: 'another body' })).toEqual({ kind: 'mismatch' });
        expect(await rowOf(key)).toEqual(before);
      });

      test('finds nothing where a claim would own the key, and still finds a mismatch', async () => {
        const [expired, stale, released] = [newKey(), newKey(), newKey()];
        await store.finish(name(expired), (await own(expired)).fence, { to: 'completed', answer: ANSWER });
        await expires(expired);
        expect(await look(expired, { fingerprintText: 'another body' })).toBeNull();
        await own(stale);
        await leaseEnds(stale);
        await store.finish(name(released), (await own(released, { operation: VOID })).fence, { to: 'released' });
        for (const [key, operation] of [
          [expired, 'create'],
          [stale, 'create'],
          [released, VOID],
        ] as const) {
          // prettier-ignore
          const before = await rowOf(key);
          expect(await look(key, { operation })).toBeNull();
          expect(await rowOf(key)).toEqual(before);
        }
        expect(await look(stale, { fingerprintText: 'another body' })).toEqual({ kind: 'mismatch' });
        expect(await look(released, { operation: VOID, fingerprintText: 'another body' })).toEqual({ kind: 'mismatch' });
      });

      test('finds a reserved key, for ever', async () => {
        const key = newKey();
        const { fence, paymentId } = await own(key);
        await store.finish(name(key), fence, { to: 'reserved' });
        await expires(key);
        expect(await look(key)).toMatchObject({ kind: 'reserved', paymentId });
      });
    });

    describe('rows from the log', () => {
      const hourAgo = () => new Date(under.now() - 3_600_000).toISOString();
      const logged = (key: string, change: Partial<RestoredKey> = {}, asked: Partial<ClaimRequest> = {}): RestoredKey => ({
        key: store.recorded(requestOf(key, asked)),
        paymentId: ids.uuid(),
        attemptId: ids.uuid(),
        at: hourAgo(),
        state: 'completed',
        answer: change.state === undefined || change.state === 'completed' ? ANSWER : null,
        ...change,
      });
      const restore = (row: RestoredKey, replaces: string | null = null) => under.rows.restore([{ row, replaces }]);

      test('an absent row is made: the next claim finds it, in the form of the log', async () => {
        const key = newKey();
        const row = logged(key);
        expect(await under.rows.find([name(key)])).toEqual([null]);
        expect(await restore(row)).toBe(1);
        expect(await rowOf(key)).toMatchObject({ state: 'completed', paymentId: row.paymentId, attemptId: row.attemptId, ...ANSWER });
        expect(await claim(key)).toEqual(replayOf(ANSWER));
        expect(await store.look(requestOf(key))).toEqual(replayOf(ANSWER));
        // The log has only the last four digits. Another card with the same four digits matches.
        expect(await claim(key, { fingerprintText: 'another card', loggedText: requestOf(key).loggedText })).toMatchObject({ kind: 'replay' });
        expect(await claim(key, { fingerprintText: 'another body' })).toEqual({ kind: 'mismatch' });
        expect(await store.look(requestOf(key, { fingerprintText: 'another body' }))).toEqual({ kind: 'mismatch' });
        expect(await claim(key, { operation: REFUND })).toEqual({ kind: 'mismatch' });
      });

      test('it is kept for 24 hours from its intent on, and then free', async () => {
        const key = newKey();
        const row = logged(key);
        await restore(row);
        expect((await rowOf(key))!.expiresAt).toBeCloseTo(Date.parse(row.at) + 24 * 3_600_000, -3);
        await expires(key);
        expect(await own(key, { fingerprintText: 'another body' })).toMatchObject({ tookOver: false });
      });

      test.each([
        ['in_progress', 'create'],
        ['in_progress', REFUND],
        ['released', VOID],
      ] as const)('%s, it is taken over: %s', async (state, operation) => {
        const key = newKey();
        const row = logged(key, { state }, { operation });
        await restore(row);
        expect(await claim(key, { operation, fingerprintText: 'another body' })).toEqual({ kind: 'mismatch' });
        const owned = await own(key, { operation });
        expect(owned).toMatchObject({ tookOver: true, paymentId: row.paymentId, attemptId: row.attemptId });
        // From here on, the row behaves like any other.
        expect(await store.finish(name(key), owned.fence, { to: 'completed', answer: ANSWER })).toBe(true);
        expect(await claim(key, { operation })).toEqual(replayOf(ANSWER));
      });

      test('of a young intent it has a lease: its request may still be running', async () => {
        const key = newKey();
        await restore(logged(key, { state: 'in_progress', at: new Date(under.now()).toISOString() }));
        expect(await under.rows.find([name(key)])).toMatchObject([{ isLeased: true }]);
        expect(await claim(key)).toMatchObject({ kind: 'in_progress' });
      });

      test('a reserved one stays reserved, under the id of the log', async () => {
        const key = newKey();
        const row = logged(key, { state: 'reserved' });
        await restore(row);
        expect(await claim(key)).toMatchObject({ kind: 'reserved', paymentId: row.paymentId });
      });

      test('a row is replaced only as it was found, and its owner has lost it then', async () => {
        const key = newKey();
        const { fence, attemptId } = await own(key, { operation: REFUND });
        expect(await under.rows.find([name(key)])).toMatchObject([{ fence, attemptId, state: 'in_progress', isLeased: true, isFree: false }]);
        const row = logged(key, { state: 'released' }, { operation: REFUND });
        expect(await restore(row)).toBe(0);
        expect(await restore(row, String(BigInt(fence) + 1_000n))).toBe(0);
        expect(await rowOf(key)).toMatchObject({ fence, attemptId });
        expect(await restore(row, fence)).toBe(1);
        expect(await rowOf(key)).toMatchObject({ state: 'released', attemptId: row.attemptId });
        expect(await store.finish(name(key), fence, { to: 'completed', answer: ANSWER })).toBe(false);
        expect(await store.renewAttempt(name(key), fence, ids.uuid())).toBe(false);
        expect(await own(key, { operation: REFUND })).toMatchObject({ tookOver: true, attemptId: row.attemptId });
      });

      test('many at once, in the order of their names; one that changed meanwhile is left alone', async () => {
        const [absent, claimed, expired] = [newKey(), newKey(), newKey()];
        const { fence } = await own(claimed);
        await store.finish(name(expired), (await own(expired)).fence, { to: 'completed', answer: ANSWER });
        await expires(expired);
        const found = await under.rows.find([name(absent), name(claimed), name(expired)]);
        expect(found).toMatchObject([null, { fence, isFree: false }, { isLeased: false, isFree: true }]);
        const rows = [absent, claimed, expired].map((key) => logged(key, { state: 'reserved' }));
        expect(await under.rows.restore(rows.map((row, index) => ({ row, replaces: index === 1 ? null : (found[index]?.fence ?? null) })))).toBe(2);
        expect(await Promise.all([absent, claimed, expired].map(stateOf))).toEqual(['reserved', 'in_progress', 'reserved']);
        expect(await under.rows.restore([])).toBe(0);
      });

      test('after a rotation of the key ring it is still recognised', async () => {
        const old = randomBytes(32);
        const before = under.withRing(new KeyRing('old', new Map([['old', old]])));
        const after = under.withRing(new KeyRing('new', new Map([['old', old], ['new', randomBytes(32)]]))); // prettier-ignore
        const key = newKey();
        await restore({ ...logged(key), key: before.recorded(requestOf(key)) });
        expect(await claim(key, {}, after)).toEqual(replayOf(ANSWER));
        expect(await claim(key, { fingerprintText: 'another body' }, after)).toEqual({ kind: 'mismatch' });
        expect(after.recorded(requestOf(key))).toMatchObject({ kid: 'new', keyHash: before.recorded(requestOf(key)).keyHash });
      });
    });

    describe('a rotated key ring (1.7)', () => {
      const old = randomBytes(32);
      const before = new KeyRing('old', new Map([['old', old]]));
      const after = new KeyRing('new', new Map([['old', old], ['new', randomBytes(32)]])); // prettier-ignore
      const rotated = () => [before, after].map((ring) => under.withRing(ring)) as [IdempotencyStore, IdempotencyStore];

      test('a fingerprint under an older key id still replays, and still mismatches', async () => {
        const [first, second] = rotated();
        const key = newKey();
        const { fence } = await own(key, {}, first);
        await first.finish(first.name(ACCOUNT, key), fence, { to: 'completed', answer: ANSWER });
        expect(await claim(key, {}, second)).toEqual(replayOf(ANSWER));
        expect(await claim(key, { fingerprintText: 'another body' }, second)).toEqual({ kind: 'mismatch' });
      });
      test('a key in progress, and one released, are recognised across the rotation', async () => {
        const [first, second] = rotated();
        const [running, released] = [newKey(), newKey()];
        await own(running, {}, first);
        expect(await claim(running, {}, second)).toMatchObject({ kind: 'in_progress' });
        const { fence, attemptId } = await own(released, { operation: REFUND }, first);
        await first.finish(first.name(ACCOUNT, released), fence, { to: 'released' });
        expect(await own(released, { operation: REFUND }, second)).toMatchObject({ tookOver: true, attemptId });
      });
      test('new keys are fingerprinted under the current one', async () => {
        const [, second] = rotated();
        const key = newKey();
        await own(key, {}, second);
        expect((await under.rowOf(second.name(ACCOUNT, key)))!.fpKid).toBe('new');
      });
    });
  });
};
