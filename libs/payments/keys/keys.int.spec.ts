/** Tests the key store on real Postgres (T1–T12), and how `onceByKey` finishes a key after each result of a request (C12–C20). */
import { randomBytes } from 'node:crypto';
import { afterAll, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import { memoryEventStore } from '#eventstore';
import { ServiceError, systemClock } from '#kernel';
import { createLogger, createPool, KeyRing, migrate, newKeyRing, type Pool, systemIds } from '#platform';
import { answerEncoder } from '../../../apps/answers.js';
import { read, sent } from '../../../test/support/answers.js';
import { idempotencyContract, type SeenKey } from '../../../test/support/key-store.contract.js';
import { ownLogOver } from '../../../test/support/mark-book.js';
import { OPEN_CLAIMS } from '../../../test/support/payments.js';
import { memoryPersonalKeys } from '../../../test/support/personal-keys.js';
import { freshDatabase } from '../../../test/support/postgres.js';
import type { Claims } from './claims.js';
import type { ClaimRequest, IdempotencyStore, KeyName, Operation, Owned, StoredAnswer } from './key-store.js';
import { type KeyedWork, onceByKey } from './once-by-key.js';
import { idempotencyMigrations, postgresIdempotency, postgresKeyRows } from './postgres.js';

const ids = systemIds(() => systemClock.now());
const keys = newKeyRing();
const personal = memoryPersonalKeys();
const log = createLogger('silent', 'spec');

let database: Awaited<ReturnType<typeof freshDatabase>>;
/** Two replicas, each with connections of its own. */
let pools: Pool[];
let pool: Pool;
let stores: IdempotencyStore[];
let store: IdempotencyStore;
const ownLog = await ownLogOver(memoryEventStore(), systemClock);
beforeAll(async () => {
  database = await freshDatabase();
  pools = [1, 2].map((replica) => createPool(database.url, { name: `spec ${replica}`, max: 6, statementTimeoutMs: 2_000, lockTimeoutMs: 1_000 }));
  pool = pools[0]!;
  await migrate(pool, idempotencyMigrations);
  stores = pools.map((one) => postgresIdempotency(one, keys, ids));
  store = stores[0]!;
});
afterAll(async () => {
  await Promise.all(pools.map((one) => one.end()));
  await database.drop();
});

const ACCOUNT = ids.uuid();
/** The id is fixed, since test titles contain it: mutation testing selects tests by title. */
const PAYMENT = '0191b6a3-91c2-7d3e-8f40-15263748596a';
let drawn = 0;
const newKey = () => `key-${++drawn}`;

test('a connection that planned on an empty table still goes by the key when there are many', async () => {
  const fresh = await freshDatabase();
  const connection = createPool(fresh.url, { name: 'spec, by key', max: 1, byKey: true });
  try {
    await migrate(connection, idempotencyMigrations);
    const keyed = postgresIdempotency(connection, keys, ids);
    for (let round = 0; round < 30; round++) {
      const requests = Array.from({ length: 50 }, (_, number) => requestOf(`planned-${round}-${number}`));
      const claims = await Promise.all(requests.map((request) => keyed.claim(request)));
      const finished = claims.map((claimed, index) =>
        keyed.finish(keyed.name(ACCOUNT, requests[index]!.key), (claimed as Owned).fence, { to: 'completed', answer: ANSWER }),
      );
      expect(await Promise.all(finished)).toEqual(requests.map(() => true));
    }
    await connection.query('select pg_stat_force_next_flush()');
    const { rows } = await connection.query<{ scanned: number; read: number }>(
      `select seq_tup_read::int as scanned, (select idx_tup_read::int from pg_stat_user_indexes where indexrelname = 'idempotency_key_lease') as read
       from pg_stat_user_tables where relname = 'idempotency_key'`,
    );
    expect(rows).toEqual([{ scanned: 0, read: 0 }]);
  } finally {
    await connection.end();
    await fresh.drop();
  }
});

const REFUND: Operation = `refund:${PAYMENT}`;
const VOID: Operation = `void:${PAYMENT}`;
const OPERATIONS: Operation[] = ['create', REFUND, VOID];

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

/** `run` resolves with the view. */
type Work = Omit<KeyedWork<unknown>, 'run'> & { readonly run: (...given: Parameters<KeyedWork<unknown>['run']>) => Promise<unknown> };
const keyed = ({ run, ...work }: Work): KeyedWork<unknown> => ({ ...work, run: async (owner) => ({ view: await run(owner), replayed: false }) });
const ask = (
  key: string | null,
  work: Work,
  {
    from = store,
    heard = log,
    claims = OPEN_CLAIMS,
    ...change
  }: Partial<ClaimRequest> & { from?: IdempotencyStore; heard?: typeof log; claims?: Claims } = {},
) =>
  // prettier-ignore
  onceByKey(
    { idempotency: from, claims, answers: answerEncoder, personal, ownLog, ids, log: heard },
    { ...requestOf(key ?? '', change), key },
    keyed(work),
  );
/** A request as a partner's edge answers it. */
const once = (...given: Parameters<typeof ask>) => sent(ask(...given));

const rowOf = async (key: string, accountId = ACCOUNT) => {
  const { rows } = await pool.query<Record<string, unknown>>('select * from idempotency_key where api_account_id = $1 and key_hash = $2', [
    accountId,
    name(key).keyHash,
  ]);
  return rows[0];
};
const stateOf = async (key: string) => (await rowOf(key))?.state;
/** Moves a stored time back to let time pass. The key store reads only the database's clock. */
const moveBack = (column: 'lease_until' | 'expires_at', { accountId, keyHash }: KeyName, agoSeconds: number) =>
  pool.query(`update idempotency_key set ${column} = clock_timestamp() - make_interval(secs => $3) where api_account_id = $1 and key_hash = $2`, [
    accountId,
    keyHash,
    agoSeconds,
  ]);
const leaseEnds = (key: string, agoSeconds = 1) => moveBack('lease_until', name(key), agoSeconds);
const expires = (key: string, agoSeconds = 1) => moveBack('expires_at', name(key), agoSeconds);

idempotencyContract('Postgres', async () => ({
  stores: [stores[0]!, stores[1]!],
  rows: postgresKeyRows(pool),
  withRing: (ring) => postgresIdempotency(pool, ring, ids),
  rowOf: async ({ accountId, keyHash }) => {
    const { rows } = await pool.query<SeenKey>(
      `select state, operation, fence::text, payment_id as "paymentId", attempt_id as "attemptId", fp_kid as "fpKid", status, body,
              extract(epoch from lease_until)::float8 * 1000 as "leaseUntil", extract(epoch from created_at)::float8 * 1000 as "createdAt",
              extract(epoch from expires_at)::float8 * 1000 as "expiresAt"
       from idempotency_key where api_account_id = $1 and key_hash = $2`,
      [accountId, keyHash],
    );
    return rows[0];
  },
  leaseEnds: (of, agoSeconds) => moveBack('lease_until', of, agoSeconds),
  expires: (of, agoSeconds) => moveBack('expires_at', of, agoSeconds),
  now: () => Date.now(),
  close: async () => undefined,
}));

describe('the content of the table (1.7)', () => {
  test('the table holds neither key nor request as text (1.7)', async () => {
    const key = 'INV-2026-000123';
    await own(key, { fingerprintText: 'POST\n/payments\n{"cardNumber":"4242424242424242"}' });
    const { rows } = await pool.query<{ text: string }>('select k::text as text from idempotency_key k where key_hash = $1', [name(key).keyHash]);
    expect(rows[0]!.text).not.toMatch(/INV-2026|4242/);
    expect(rows[0]!.text).not.toContain(Buffer.from(key).toString('hex'));
  });

  test('a ring that lost the older key refuses rather than executing again', async () => {
    const without = new KeyRing('k2', new Map([['k2', randomBytes(32)]]));
    const key = newKey();
    await own(key);
    // The row gets the name that the new ring computes. The new ring cannot compute the row's fingerprint, so no fingerprint is equal.
    await pool.query('update idempotency_key set key_hash = $2 where key_hash = $1', [
      name(key).keyHash,
      postgresIdempotency(pool, without, ids).name(ACCOUNT, key).keyHash,
    ]);
    expect(await claim(key, {}, postgresIdempotency(pool, without, ids))).toEqual({ kind: 'mismatch' });
  });

  test.each([
    [undefined, 24],
    [48, 48],
    [1, 24],
  ])('an operator that sets %p hours keeps keys %p: longer than 24, never shorter (C20)', async (keepHours, kept) => {
    const key = newKey();
    await own(key, {}, postgresIdempotency(pool, keys, ids, keepHours === undefined ? {} : { keepHours }));
    const { created_at: from, expires_at: to } = (await rowOf(key)) as { created_at: Date; expires_at: Date };
    expect(Math.abs(to.getTime() - from.getTime() - kept * 3_600_000)).toBeLessThan(2_000);
  });
});

describe('a row that comes and goes between the claim and the look at it', () => {
  /** A key store that awaits `step` before each statement of a claim. */
  const stepping = (step: (statement: 'claim' | 'find') => Promise<unknown>): IdempotencyStore =>
    postgresIdempotency(
      Object.assign(Object.create(pool) as Pool, {
        query: async (statement: { name: string; text: string }) => {
          await step(statement.name === 'idempotency-claim' ? 'claim' : 'find');
          return pool.query(statement);
        },
      }),
      keys,
      ids,
    );
  test('given back in between, it is claimed', async () => {
    const key = newKey();
    const first = await own(key);
    const claimed = await claim(
      key,
      {},
      stepping(async (statement) => statement === 'find' && store.finish(name(key), first.fence, { to: 'given_back' })),
    );
    expect(claimed).toMatchObject({ kind: 'owned', tookOver: false });
  });
  test('owned at every claim, and gone at every look: the caller must come again, at once', async () => {
    const key = newKey();
    let owner: Owned;
    const claimed = await claim(
      key,
      {},
      stepping(async (statement) => {
        if (statement === 'claim') owner = await own(key);
        else await store.finish(name(key), owner.fence, { to: 'given_back' });
      }),
    );
    expect(claimed).toEqual({ kind: 'in_progress', retryAfterSeconds: 1 });
  });
});

describe('many keys in one statement', () => {
  const drawKeys = (count: number) => Array.from({ length: count }, newKey);
  test('replicas that claim and finish the same keys in opposite orders never wait for each other', async () => {
    for (let round = 0; round < 5; round++) {
      const drawn = drawKeys(100);
      const claimed = await Promise.all([
        ...drawn.map((key) => claim(key, { operation: REFUND }, stores[0])),
        ...drawn.toReversed().map((key) => claim(key, { operation: REFUND }, stores[1])),
      ]);
      const fences = drawn.map((_, index) =>
        claimed.flatMap((one, at) => ((at < 100 ? at : 199 - at) === index && one.kind === 'owned' ? [one.fence] : [])),
      );
      expect(fences.map(({ length }) => length)).toEqual(drawn.map(() => 1));
      const finished = await Promise.all([
        ...drawn.map((key, index) => stores[0]!.finish(name(key), fences[index]![0]!, { to: 'released' })),
        ...drawn.toReversed().map((key, index) => stores[1]!.finish(name(key), fences[99 - index]![0]!, { to: 'released' })),
      ]);
      expect(finished.filter(Boolean)).toHaveLength(100);
    }
  });
  test('a statement locks its rows in the order of their names', async () => {
    const claimed: Buffer[][] = [];
    const watched = new Proxy(pool, {
      get: (target, property) =>
        property !== 'query'
          ? (Reflect.get(target, property) as unknown)
          : (statement: { name?: string; values: [unknown, Buffer[]] }) => {
              if (statement.name === 'idempotency-claim') claimed.push(statement.values[1]);
              return target.query(statement as never);
            },
    });
    const from = postgresIdempotency(watched, keys, ids);
    await Promise.all(drawKeys(20).map((key) => claim(key, {}, from)));
    const names = claimed.flatMap((hashes) => hashes.map((hash) => hash.toString('hex')));
    expect(names).toHaveLength(20);
    expect(names).toEqual(names.toSorted());
  });
  test('of two requests under one key in one statement the first owns it, the second waits', async () => {
    const key = newKey();
    const [, , first, second] = await Promise.all([claim(newKey()), claim(newKey()), claim(key), claim(key)]);
    expect([first.kind, second.kind]).toEqual(['owned', 'in_progress']);
    expect((await rowOf(key))!.payment_id).toBe((first as Owned).paymentId);
  });
});

// ------------------------------------------------------------------------------------------------------------------------------------

describe('the state of a key after an answer (C15–C17)', () => {
  const failed = (code: ConstructorParameters<typeof ServiceError>[0], details: Record<string, unknown> = {}) => new ServiceError(code, 'x', details);
  const finished = async (operation: Operation, run: () => Promise<unknown>): Promise<string | undefined> => {
    const key = newKey();
    await once(key, { run }, { operation });
    return (await stateOf(key)) as string | undefined;
  };
  const refused = (operation: Operation, error: Error) => finished(operation, () => Promise.reject(error));

  test.each(OPERATIONS)('200 is stored: %s', async (operation) => expect(await finished(operation, async () => ({ id: 1 }))).toBe('completed'));
  test.each<[string, Operation, ServiceError, string | undefined]>([
    ['402', 'create', failed('PAYMENT_DECLINED', { id: PAYMENT }), 'completed'],
    ['VOID_FAILED that suggests a refund', VOID, failed('VOID_FAILED', { retryable: false, suggestedAction: 'refund' }), 'completed'],
    ['VOID_FAILED that suggests a retry', VOID, failed('VOID_FAILED', { retryable: true, suggestedAction: 'retry_void' }), undefined],
    ['400', 'create', failed('VALIDATION_ERROR'), undefined],
    ['403 portal', 'create', failed('PORTAL_ACCESS_DENIED'), undefined],
    ['403 blocked', 'create', failed('PAYMENT_BLOCKED'), undefined],
    ['409 held', 'create', failed('PAYMENT_HELD'), undefined],
    ['409 decline-blocked', 'create', failed('DECLINE_BLOCKED'), undefined],
    ['422 not allowed', 'create', failed('PAYMENT_NOT_ALLOWED'), undefined],
    ['429', 'create', failed('VELOCITY_LIMIT'), undefined],
    ['503', 'create', failed('GATEWAY_NOT_CONFIGURED'), undefined],
    ['501', 'create', failed('CAPTURE_NOT_SUPPORTED'), undefined],
    ['404', REFUND, failed('PAYMENT_NOT_FOUND'), undefined],
    ['422 state', REFUND, failed('INVALID_STATE'), undefined],
    ['422 state that suggests a refund', VOID, failed('INVALID_STATE', { suggestedAction: 'refund' }), undefined],
    ['503', VOID, failed('GATEWAY_NOT_CONFIGURED'), undefined],
    ['502 on create', 'create', failed('PAYMENT_GATEWAY_ERROR', { id: PAYMENT }), 'reserved'],
    ['504 on create', 'create', failed('PAYMENT_TIMEOUT', { id: PAYMENT }), 'reserved'],
    ['504 on refund', REFUND, failed('PAYMENT_TIMEOUT', { id: PAYMENT }), 'released'],
    ['502 on void', VOID, failed('PAYMENT_GATEWAY_ERROR'), 'released'],
    ['PARTIAL_REFUND_PENDING', REFUND, failed('PARTIAL_REFUND_PENDING'), 'released'],
    ['a create that found its stream fenced', 'create', failed('IDEMPOTENCY_RECONCILIATION_REQUIRED'), 'reserved'],
  ])('%s (%s)', async (_, operation, error, state) => expect(await refused(operation, error)).toBe(state));
  test('an answer that no event holds does not use the connections without durable commits (C27)', async () => {
    const gone = createPool(database.url, { name: 'gone', max: 1 });
    await gone.end();
    const from = postgresIdempotency(pool, keys, ids, { completions: gone });
    const [refused, voided, declined] = [newKey(), newKey(), newKey()];
    const settled = failed('VOID_FAILED', { retryable: false, suggestedAction: 'refund' });
    await once(refused, { run: () => Promise.reject(settled) }, { operation: VOID, from });
    expect(await stateOf(refused)).toBe('completed');
    // A takeover makes these again from the stream.
    await once(voided, { run: async () => ({ id: 1 }) }, { operation: VOID, from });
    expect(await stateOf(voided)).toBe('in_progress');
    await once(declined, { run: () => Promise.reject(failed('PAYMENT_DECLINED', { id: PAYMENT })) }, { from });
    expect(await stateOf(declined)).toBe('in_progress');
  });
  test('a fault of ours: 500, reserved on create, released else, and nothing of it in the answer', async () => {
    expect(await refused('create', new Error('4242424242424242'))).toBe('reserved');
    expect(await refused(REFUND, new Error('x'))).toBe('released');
    const answer = await once(newKey(), { run: () => Promise.reject(new Error('secret')) });
    expect(read(answer)).toMatchObject({ status: 500, code: 'INTERNAL_ERROR' });
    expect(answer.body).not.toContain('secret');
  });
  test('C17: a refusal of a *retried* refund or void does not loosen the key from its attempt', async () => {
    // The first try may get a 504, and the retry a 503 because no gateway is configured. If the 503 gave the key back, the next retry could begin a
    // second refund.
    for (const error of [
      failed('GATEWAY_NOT_CONFIGURED'),
      failed('INVALID_STATE'),
      failed('VOID_FAILED', { retryable: true, suggestedAction: 'retry_void' }),
    ]) {
      const key = newKey();
      const attempts: string[] = [];
      const retry = (outcome: Error) =>
        once(key, { run: async (owned) => (attempts.push(owned!.attemptId), Promise.reject(outcome)) }, { operation: REFUND });
      await retry(failed('PAYMENT_TIMEOUT'));
      await retry(error);
      expect(await stateOf(key)).toBe('released');
      await retry(failed('PAYMENT_TIMEOUT'));
      expect(new Set(attempts).size).toBe(1);
    }
  });
  test('T8: nor does the refusal of one that was taken over from a vanished owner', async () => {
    const key = newKey();
    const { attemptId } = await own(key, { operation: REFUND });
    await leaseEnds(key);
    await once(key, { run: () => Promise.reject(failed('INVALID_STATE')) }, { operation: REFUND });
    expect(await rowOf(key)).toMatchObject({ state: 'released', attempt_id: attemptId });
  });
  test.each([
    ['200', async () => ({ id: PAYMENT }), 'completed'],
    ['VOID_FAILED that suggests a refund', () => Promise.reject(failed('VOID_FAILED', { retryable: false, suggestedAction: 'refund' })), 'completed'],
    ['504', () => Promise.reject(failed('PAYMENT_TIMEOUT')), 'released'],
  ])('a retry that is answered %s is kept as a first try is (C15, C17)', async (_, run: () => Promise<unknown>, state) => {
    const key = newKey();
    await store.finish(name(key), (await own(key, { operation: VOID })).fence, { to: 'released' });
    await once(key, { run }, { operation: VOID });
    expect(await stateOf(key)).toBe(state);
  });
  test('a key that had expired is given back by a refusal, as any new one (C15)', async () => {
    const key = newKey();
    await store.finish(name(key), (await own(key, { operation: REFUND })).fence, { to: 'completed', answer: ANSWER });
    await expires(key);
    await once(key, { run: () => Promise.reject(failed('INVALID_STATE')) }, { operation: REFUND });
    expect(await rowOf(key)).toBeUndefined();
  });
});

describe('onceByKey', () => {
  let runs: number;
  beforeEach(() => {
    runs = 0;
  });
  const counted: Work = { run: async () => ({ run: ++runs }) };
  const refusal = async (call: Promise<unknown>) => call.then(() => null, (error: unknown) => error as ServiceError); // prettier-ignore

  test('without a key it just runs', async () => {
    const work: Work = { run: async (owned) => ({ owned, run: ++runs }) };
    expect((await once(null, work)).body).toBe('{"success":true,"data":{"owned":null,"run":1}}');
    expect((await once(null, work)).body).toBe('{"success":true,"data":{"owned":null,"run":2}}');
  });
  test('with one it runs once, and replays the very bytes', async () => {
    const key = newKey();
    const first = await once(key, counted);
    expect(first.replayed).toBe(false);
    expect(await once(key, counted)).toEqual({ status: 200, body: first.body, replayed: true });
    expect(runs).toBe(1);
  });
  test('a result of an earlier execution is sent as a replay, and stored as the answer', async () => {
    const key = newKey();
    const answer = { status: 200, body: '{"success":true,"data":{"id":1}}', replayed: true };
    const executedEarlier = (from: string | null) =>
      sent(
        onceByKey(
          { idempotency: store, claims: OPEN_CLAIMS, answers: answerEncoder, personal, ownLog, ids, log },
          { ...requestOf(from ?? ''), key: from },
          { run: async () => ({ view: { id: 1 }, replayed: true }) },
        ),
      );
    expect(await executedEarlier(key)).toEqual(answer);
    expect(await stateOf(key)).toBe('completed');
    expect(await once(key, counted)).toEqual(answer);
    expect(await executedEarlier(null)).toEqual(answer);
  });
  test('after 24 h the key executes as new (C20)', async () => {
    const key = newKey();
    const takeOver = () => Promise.reject(new Error('nobody vanished'));
    await once(key, { ...counted, takeOver });
    await expires(key);
    expect((await once(key, { ...counted, takeOver })).body).toBe('{"success":true,"data":{"run":2}}');
  });
  test('10 at once: one runs, the others must wait; afterwards all replay', async () => {
    const key = newKey();
    let finish!: () => void;
    const slow: Work = { run: () => new Promise((done) => (finish = () => done({ run: ++runs }))) };
    const calls = Array.from({ length: 10 }, (_, index) => refusal(ask(key, slow, { from: stores[index % 2]! })));
    const waiting = await Promise.race([Promise.all(calls), new Promise<null>((done) => setTimeout(done, 300, null))]);
    expect(waiting).toBeNull();
    finish();
    const errors = (await Promise.all(calls)).filter((error) => error instanceof ServiceError);
    expect(errors).toHaveLength(9);
    for (const error of errors) expect([error.code, error.options.retryAfterSeconds]).toEqual(['IDEMPOTENCY_IN_PROGRESS', 5]);
    expect((await once(key, slow)).body).toBe('{"success":true,"data":{"run":1}}');
    expect(runs).toBe(1);
  });
  test('mismatch 409; reserved 409 with the work’s answer about the payment', async () => {
    const key = newKey();
    await once(key, counted);
    const mismatch = refusal(ask(key, counted, { fingerprintText: 'another body' }));
    expect((await mismatch)?.code).toBe('IDEMPOTENCY_MISMATCH');
    const failing = newKey();
    const work: Work = {
      run: () => Promise.reject(new ServiceError('PAYMENT_TIMEOUT', 'x')),
      reconciliationRequired: async ({ paymentId: id }) => new ServiceError('IDEMPOTENCY_RECONCILIATION_REQUIRED', 'x', { id }),
    };
    await once(failing, work);
    const { payment_id: id } = (await rowOf(failing))!;
    expect((await refusal(ask(failing, work)))?.details).toEqual({ id });
  });

  describe('claims are closed (C76)', () => {
    const closed: Claims = { isOpen: false, mayBeLost: true, begun: async () => undefined };
    test('a stored answer is replayed, another body is a mismatch; everything else is 503, and nothing is claimed', async () => {
      const [done, running, fresh, failed] = [newKey(), newKey(), newKey(), newKey()];
      const first = await once(done, counted);
      await own(running);
      await once(failed, { run: () => Promise.reject(new ServiceError('PAYMENT_TIMEOUT', 'x')) });
      expect(await once(done, counted, { claims: closed })).toEqual({ ...first, replayed: true });
      expect((await refusal(ask(done, counted, { claims: closed, fingerprintText: 'another body' })))?.code).toBe('IDEMPOTENCY_MISMATCH');
      for (const key of [running, fresh, failed]) {
        const before = await rowOf(key);
        const error = await refusal(ask(key, counted, { claims: closed }));
        expect([error?.code, error?.status, error?.options.retryAfterSeconds]).toEqual(['IDEMPOTENCY_UNAVAILABLE', 503, 1]);
        expect(await rowOf(key)).toEqual(before);
      }
      expect(runs).toBe(1);
    });
    test('a request without a key goes on (C19)', async () => {
      expect((await once(null, counted, { claims: closed })).status).toBe(200);
    });
    test('the first request of a process waits until claims were opened', async () => {
      const opening = { isOpen: false, mayBeLost: true, begun: async () => void (opening.isOpen = true) };
      expect((await once(newKey(), counted, { claims: opening })).status).toBe(200);
    });
    test.each([
      [false, undefined],
      [true, 'in_progress'],
    ] as const)('they close while a claim is under way (taken over: %s): nothing runs', async (tookOver, state) => {
      // prettier-ignore
      const key = newKey();
      if (tookOver) {
        await own(key, { operation: REFUND });
        await leaseEnds(key);
      }
      const closing = { ...OPEN_CLAIMS } as { -readonly [Name in keyof Claims]: Claims[Name] };
      const from: IdempotencyStore = { ...store, claim: (request) => ((closing.isOpen = false), store.claim(request)) };
      expect((await refusal(ask(key, counted, { from, claims: closing, operation: REFUND })))?.code).toBe('IDEMPOTENCY_UNAVAILABLE');
      expect([runs, await stateOf(key)]).toEqual([0, state]);
    });
  });

  describe('the store fails', () => {
    const failing = new ServiceError('VALIDATION_ERROR', 'x');
    const broken = (method: keyof IdempotencyStore): IdempotencyStore => ({
      ...store,
      [method]: () => Promise.reject(new Error('connection refused')),
    });
    test('T11, C19: at the claim → 503, nothing runs; requests without a key go on', async () => {
      const error = await refusal(ask(newKey(), counted, { from: broken('claim') }));
      expect([error?.code, error?.status, error?.options.retryAfterSeconds, runs]).toEqual(['IDEMPOTENCY_UNAVAILABLE', 503, 1, 0]);
      expect((await once(null, counted, { from: broken('claim') })).status).toBe(200);
    });
    test('T11: a real database that is away', async () => {
      const away = createPool('postgres://nobody@127.0.0.1:1/none', { name: 'away', max: 1 });
      const error = await refusal(ask(newKey(), counted, { from: postgresIdempotency(away, keys, ids) }));
      expect([error?.code, runs]).toEqual(['IDEMPOTENCY_UNAVAILABLE', 0]);
      await away.end();
    });
    test('S5: at the ending → the answer goes out all the same; the lease’s end lets the stream tell it again', async () => {
      const key = newKey();
      const first = await once(key, counted, { from: broken('finish') });
      expect([first.status, await stateOf(key)]).toEqual([200, 'in_progress']);
      await leaseEnds(key);
      const again = await once(key, { ...counted, takeOver: async () => ({ view: { run: 1 } }) });
      expect(again).toMatchObject({ body: first.body, replayed: true });
      expect([runs, await stateOf(key)]).toEqual([1, 'completed']);
    });
    test('each fault is in the log, with its cause', async () => {
      const logged = async (fails: () => Promise<unknown>) => {
        const lines: string[] = [];
        heard = createLogger('warn', 'spec', { write: (line) => lines.push(line) });
        await fails().catch(() => undefined);
        return lines.map((line) => (JSON.parse(line) as { err?: { message: string } }).err?.message);
      };
      let heard = log;
      const run = (key: string, work: Work, from = store) => ask(key, work, { from, heard });
      expect(await logged(() => run(newKey(), counted, broken('claim')))).toEqual(['connection refused']);
      expect(await logged(() => run(newKey(), counted, broken('finish')))).toEqual(['connection refused']);
      expect(await logged(() => run(newKey(), { run: () => Promise.reject(new Error('a fault of ours')) }))).toEqual(['a fault of ours']);
      expect(await logged(() => run(newKey(), { run: () => Promise.reject(failing) }))).toEqual([]);
      const key = newKey();
      await own(key);
      await leaseEnds(key);
      expect(await logged(() => run(key, { ...counted, takeOver: () => Promise.reject(new Error('the store is away')) }))).toEqual([
        'the store is away',
      ]);
    });
    test('double fault: a 5xx whose ending failed may later be answered with its true result (1.4)', async () => {
      const key = newKey();
      await once(key, { run: () => Promise.reject(new ServiceError('PAYMENT_TIMEOUT', 'x')) }, { from: broken('finish') });
      expect(await stateOf(key)).toBe('in_progress');
      await leaseEnds(key);
      const work: Work = { ...counted, takeOver: async () => ({ view: { n: 1 } }) };
      expect(await once(key, work)).toMatchObject({ body: ANSWER.body, replayed: true });
      // Invariant d: a completed key never needs reconciliation.
      expect(await once(key, work)).toMatchObject({ body: ANSWER.body, replayed: true });
      expect(runs).toBe(0);
    });
  });

  describe('T7: a create of a vanished owner is never executed again', () => {
    const vanished = async () => {
      const key = newKey();
      const owned = await own(key);
      await leaseEnds(key);
      return { key, owned };
    };
    const reconciliationRequired = async ({ paymentId: id }: { paymentId: string }) =>
      new ServiceError('IDEMPOTENCY_RECONCILIATION_REQUIRED', 'x', { id });
    test('reserved → 409 RECONCILIATION_REQUIRED', async () => {
      const { key, owned } = await vanished();
      const error = await refusal(ask(key, { ...counted, takeOver: async () => 'reserved', reconciliationRequired }));
      expect([error?.code, error?.details]).toEqual(['IDEMPOTENCY_RECONCILIATION_REQUIRED', { id: owned.paymentId }]);
      expect([await stateOf(key), runs]).toEqual(['reserved', 0]);
    });
    test('the stream cannot be read or fenced → 409 IN_PROGRESS, Retry-After 5; the row stays in progress', async () => {
      for (const takeOver of [async () => 'cannot_tell' as const, () => Promise.reject(new Error('the store is away'))]) {
        const { key } = await vanished();
        const error = await refusal(ask(key, { ...counted, takeOver, reconciliationRequired }));
        expect([error?.code, error?.options.retryAfterSeconds]).toEqual(['IDEMPOTENCY_IN_PROGRESS', 5]);
        expect([await stateOf(key), runs]).toEqual(['in_progress', 0]);
      }
    });
    test('the row cannot be finished → no 500: the stream is fenced, and the key store records it later', async () => {
      const { key } = await vanished();
      const failing: IdempotencyStore = { ...store, finish: () => Promise.reject(new Error('connection refused')) };
      const error = await refusal(ask(key, { ...counted, takeOver: async () => 'reserved', reconciliationRequired }, { from: failing }));
      expect(error?.code).toBe('IDEMPOTENCY_RECONCILIATION_REQUIRED');
      await leaseEnds(key);
      const again = await once(key, { ...counted, takeOver: async () => ({ view: { n: 1 } }) }, { from: failing });
      expect(again).toMatchObject({ body: ANSWER.body, replayed: true });
    });
    test('10 at once: one takes over, the others wait', async () => {
      const { key } = await vanished();
      let takeovers = 0;
      const takeOver = async () => (takeovers++, { view: { n: 1 } });
      const outcomes = await Promise.all(Array.from({ length: 10 }, (_, index) => once(key, { ...counted, takeOver }, { from: stores[index % 2]! }).then((answer) => read(answer).code ?? answer.status))); // prettier-ignore
      expect(takeovers).toBe(1);
      expect(outcomes.filter((outcome) => outcome === 200 || outcome === 'IDEMPOTENCY_IN_PROGRESS')).toHaveLength(10);
      expect(runs).toBe(0);
    });
  });

  describe('refunds and voids', () => {
    test('T8: after its owner vanished it runs again under the same attempt', async () => {
      const key = newKey();
      const { attemptId } = await own(key, { operation: REFUND });
      await leaseEnds(key);
      const answer = await once(key, { run: async (owned) => ({ same: owned!.attemptId === attemptId }) }, { operation: REFUND });
      expect(answer.body).toBe('{"success":true,"data":{"same":true}}');
    });
    test('a renewed attempt is on the row before it is used; an owner that lost the fence gets 409 and begins nothing', async () => {
      const key = newKey();
      const seen: unknown[] = [];
      const renewing: Work = {
        run: async (owned) => (seen.push(owned!.attemptId, await owned!.renew(), (await rowOf(key))!.attempt_id), {}),
      };
      expect((await once(key, renewing, { operation: REFUND })).status).toBe(200);
      const [drawnFirst, renewed, written] = seen;
      expect([renewed, written]).toEqual([written, expect.stringMatching(/^[0-9a-f-]{36}$/)]);
      expect(renewed).not.toBe(drawnFirst);

      const lost = newKey();
      const answer = await once(
        lost,
        {
          run: async (owned) => {
            await leaseEnds(lost);
            await own(lost, { operation: REFUND });
            await owned!.renew();
            return { run: ++runs };
          },
        },
        { operation: REFUND },
      );
      expect([read(answer).code, runs]).toEqual(['IDEMPOTENCY_IN_PROGRESS', 0]);
      expect(await stateOf(lost)).toBe('in_progress');
    });
  });
});

test('the store is writable, not just readable', async () => expect(await store.ping()).toBe(true));
