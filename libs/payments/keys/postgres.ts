/** The key store on Postgres: each step of a key is one statement (C12–C20, T1–T12). */
import { timingSafeEqual } from 'node:crypto';
import { type Ids, systemClock } from '#kernel';
import { batched, type KeyRing, type Migration, type Pool, type Queryable } from '#platform';
import type { IntentEvent, RecordedKey } from '../payment.js';
import {
  type Claim,
  type ClaimRequest,
  type FoundKey,
  type IdempotencyStore,
  KEEP_HOURS,
  type KeyAttempt,
  type KeyName,
  type KeyRows,
  LEASE_SECONDS,
  MAX_RETRY_AFTER_SECONDS,
  keyNameOf,
  type Operation,
  type Owned,
  type KeyEnding,
  type StoredAnswer,
} from './key-store.js';

/** How often a claim is tried if its row vanishes between two statements, or holds another form of the fingerprint. */
const CLAIM_ROUNDS = 3;

export const idempotencyMigrations: readonly Migration[] = [
  {
    name: '0030-idempotency',
    sql: `
      create sequence idempotency_fence;
      create table idempotency_key (
        api_account_id uuid        not null,
        key_hash       bytea       not null check (octet_length(key_hash) = 32),
        operation      text        not null,
        fp             bytea       not null check (octet_length(fp) = 32),
        fp_kid         text        not null,
        state          text        not null check (state in ('in_progress', 'completed', 'reserved', 'released')),
        fence          bigint      not null default nextval('idempotency_fence'),
        lease_until    timestamptz,
        payment_id     uuid        not null,
        attempt_id     uuid        not null,
        status         int,
        body           text,
        created_at     timestamptz not null default clock_timestamp(),
        expires_at     timestamptz not null,
        primary key (api_account_id, key_hash),
        check ((state = 'completed') = (status is not null)),
        check ((state = 'in_progress') = (lease_until is not null)),
        check (not (state = 'reserved' and operation <> 'create')),
        check (not (state = 'released' and operation = 'create'))
      ) with (fillfactor = 70);
      create index idempotency_key_expiry on idempotency_key (expires_at);
      create index idempotency_key_lease on idempotency_key (lease_until) where state = 'in_progress';
    `,
  },
  {
    name: '0031-idempotency-lease',
    // The index is on the lease, not on the state. An index on the state would hold the dead entries of all keys that were finished since the last
    // vacuum. Each statement that names the state would read that index from end to end.
    sql: `
      drop index idempotency_key_lease;
      create index idempotency_key_lease on idempotency_key (lease_until) where lease_until is not null;
    `,
  },
  {
    name: '0032-idempotency-from-log',
    // Marks a fingerprint that came from the log. It uses the last four digits of the card instead of the number.
    sql: 'alter table idempotency_key add column fp_from_log boolean not null default false',
  },
  {
    name: '0051-idempotency-created',
    // The report `attempts` reads keys by time.
    run: 'concurrently',
    sql: 'create index concurrently if not exists idempotency_key_created on idempotency_key (created_at)',
  },
  {
    name: '0052-idempotency-random-fence',
    // A sequence goes back with its database and would give a fence twice. 59 random bits never do.
    sql: `alter table idempotency_key alter column fence set default
      (('x' || translate(left(gen_random_uuid()::text, 18), '-', ''))::bit(64)::bigint & 9223372036854775807)`,
  },
  {
    name: '0054-idempotency-begun',
    // The intent whose call of the gateway may have begun, as JSON. 'false': no call has begun. null: an older release or the log made the row.
    sql: 'alter table idempotency_key add column begun text',
  },
];

export interface IdempotencyOptions {
  /** How long a row is kept: 24 hours by the specification, longer if the operator wants it (C20). */
  readonly keepHours?: number;
  /**
   * Connections whose commits do not wait for the disk. They finish keys that a takeover could finish in the same way from the stream. Claims do not
   * use them: a claim must survive a crash of the database, since its owner may still run.
   */
  readonly completions?: Pool;
}

export const postgresIdempotency = (pool: Pool, keys: KeyRing, ids: Ids, options: IdempotencyOptions = {}): IdempotencyStore => {
  const keepHours = Math.max(options.keepHours ?? KEEP_HOURS, KEEP_HOURS);
  // The oldest master key of the ring hashes the names of rows. It must stay in the ring until all rows that it named have expired.
  const name = (accountId: string, key: string): KeyName => ({ accountId, keyHash: keys.mac('idempotency-key', key, keys.kids[0]) });

  const claimOnce = batched((rows: readonly ClaimRow[]) => claimRows(pool, rows), CLAIMS);
  const find = async ({ accountId, keyHash }: KeyName): Promise<FoundRow | undefined> => {
    const { rows } = await pool.query<FoundRow>({ name: 'idempotency-find', text: FIND, values: [accountId, keyHash] });
    return rows[0];
  };
  const claim = async (request: ClaimRequest): Promise<Claim> => {
    const { accountId, keyHash } = name(request.accountId, request.key);
    let form: FingerprintForm = { kid: keys.current, fromLog: false };
    for (let round = 1; ; round++) {
      const fingerprint = fingerprintOf(keys, request, form);
      const won = await claimOnce({
        accountId,
        keyHash,
        operation: request.operation,
        fingerprint,
        ...form,
        paymentId: ids.uuid(),
        attemptId: ids.uuid(),
        keepHours,
      });
      if (won) return won;
      const row = await find({ accountId, keyHash });
      if (row && (row.fp_kid !== form.kid || row.fp_from_log !== form.fromLog) && keys.kids.includes(row.fp_kid) && round < CLAIM_ROUNDS) {
        form = { kid: row.fp_kid, fromLog: row.fp_from_log };
        continue;
      }
      if (row) return classify(row, request.operation, fingerprint);
      // The row was given back or purged between the two statements, so the claim is repeated.
      if (round >= CLAIM_ROUNDS) return { kind: 'in_progress', retryAfterSeconds: 1 };
    }
  };

  const finishOnce = batched((rows: readonly FinishRow[]) => finishRows(options.completions ?? pool, rows, keepHours), CLAIMS);
  const finishDurably = batched((rows: readonly FinishRow[]) => finishRows(pool, rows, keepHours), CLAIMS);
  const finish = async ({ accountId, keyHash }: KeyName, fence: string, ending: KeyEnding): Promise<boolean> => {
    if (ending.to === 'given_back') {
      const { rowCount } = await pool.query({ name: 'idempotency-give-back', text: GIVE_BACK, values: [accountId, keyHash, fence] });
      return rowCount === 1;
    }
    const row = { accountId, keyHash, fence, to: ending.to };
    if (ending.to !== 'completed') return finishOnce({ ...row, answer: null });
    return (ending.unrecorded ? finishDurably : finishOnce)({ ...row, answer: ending.answer });
  };

  const beginOnce = batched((rows: readonly BeginRow[]) => beginRows(pool, rows), CLAIMS);

  const look = async (request: ClaimRequest): Promise<Exclude<Claim, Owned> | null> => {
    const row = await find(name(request.accountId, request.key));
    if (!row || row.begins_anew) return null;
    const form = { kid: row.fp_kid, fromLog: row.fp_from_log };
    const found = keys.kids.includes(form.kid)
      ? classify(row, request.operation, fingerprintOf(keys, request, form))
      : ({ kind: 'mismatch' } as const);
    return found.kind === 'in_progress' && (row.lease_left ?? 0) <= 0 ? null : found;
  };

  return {
    claim,
    look,
    finish,
    name,
    recorded: (request) => recordedKey(keys, name(request.accountId, request.key), request),
    renewAttempt: async ({ accountId, keyHash }, fence, attemptId) => {
      const { rowCount } = await pool.query(
        `update idempotency_key set attempt_id = $4, begun = 'false' where api_account_id = $1 and key_hash = $2 and fence = $3 and state = 'in_progress'`,
        [accountId, keyHash, fence, attemptId],
      );
      return rowCount === 1;
    },
    holds: ({ accountId, keyHash }, fence, attemptId, intent) => beginOnce({ accountId, keyHash, fence, attemptId, intent }),
    ofCreate: async (of) => {
      const row = await find(of);
      if (!row || row.begins_anew || row.operation !== 'create' || row.state === 'released') return null;
      return { state: row.state, ...attemptIn(row), leaseLeft: row.state === 'in_progress' ? (row.lease_left ?? 0) : null };
    },
    takeOverStale: async (limit, only) => {
      const { rows } = await pool.query<BoundRow>(TAKE_OVER_STALE, [LEASE_SECONDS, limit, only?.accountId ?? null, only?.keyHash ?? null]);
      return rows.map((row) => ({
        kind: 'owned',
        tookOver: true,
        accountId: row.api_account_id,
        keyHash: row.key_hash,
        fence: row.fence,
        ...attemptIn(row),
      }));
    },
    purge: async (limit, resolved, stop) => {
      let deleted = 0;
      for (let gone = limit; gone === limit && !stop?.aborted; deleted += gone) gone = (await pool.query(PURGE, [limit])).rowCount ?? 0;
      // The offset skips rows whose payment is still open, so that the next page holds other rows.
      for (let kept = 0; ;) {
        const { rows } = await pool.query<BoundRow & { operation: string }>(EXPIRED_WITHOUT_ANSWER, [limit, kept]);
        for (const row of rows) {
          if (stop?.aborted) break;
          const bound = { accountId: row.api_account_id, operation: row.operation, ...attemptIn(row) };
          // If a stream cannot be read, its row is kept.
          if (!(await resolved(bound).catch(() => false))) {
            kept += 1;
            continue;
          }
          const gone = await pool.query(
            `delete from idempotency_key k where api_account_id = $1 and key_hash = $2 and fence = $3 and ${WITHOUT_ANSWER}`,
            [row.api_account_id, row.key_hash, row.fence],
          );
          deleted += gone.rowCount ?? 0;
        }
        if (rows.length < limit || stop?.aborted) return deleted;
      }
    },
    ping: async () => {
      // A standby and a server that only reads can be read, but not written.
      const { rows } = await pool.query<{ ok: boolean }>(`select current_setting('transaction_read_only') = 'off' as ok`);
      return rows[0]!.ok;
    },
  };
};

/** Claims and restores lock rows in the order of this text. */
const nameOf = ({ accountId, keyHash }: KeyName) => `${accountId}/${keyHash.toString('hex')}`;

/** The implementation of {@link IdempotencyStore.recorded} for every key store. */
export const recordedKey = (keys: KeyRing, { accountId, keyHash }: KeyName, { operation, loggedText }: ClaimRequest): RecordedKey => ({
  keySpace: accountId,
  keyHash: keyHash.toString('hex'),
  fingerprint: keys.mac('fingerprint', loggedText).toString('hex'),
  kid: keys.current,
  operation,
});

export interface AttemptRow {
  payment_id: string;
  attempt_id: string;
  created_at: Date;
  begun: string | null;
}

export const attemptIn = ({ payment_id, attempt_id, created_at, begun }: AttemptRow): KeyAttempt => ({
  paymentId: payment_id,
  attemptId: attempt_id,
  claimedAt: created_at.toISOString(),
  begun: begun === null ? null : (JSON.parse(begun) as IntentEvent | false),
});

interface BoundRow extends AttemptRow {
  api_account_id: string;
  key_hash: Buffer;
  fence: string;
}

/** The master key of a fingerprint, and whether it covers `loggedText` (true) or `fingerprintText`. */
interface FingerprintForm {
  readonly kid: string;
  readonly fromLog: boolean;
}

const fingerprintOf = (keys: KeyRing, { fingerprintText, loggedText }: ClaimRequest, { kid, fromLog }: FingerprintForm): Buffer =>
  keys.mac('fingerprint', fromLog ? loggedText : fingerprintText, kid);

interface FoundRow extends AttemptRow {
  operation: string;
  fp: Buffer;
  fp_kid: string;
  fp_from_log: boolean;
  state: 'in_progress' | 'completed' | 'reserved' | 'released';
  lease_left: number | null;
  begins_anew: boolean;
  status: number | null;
  body: string | null;
}

/** The answers T2 to T5. The fingerprint is compared before the state. */
const classify = (row: FoundRow, operation: Operation, fingerprint: Buffer): Exclude<Claim, Owned> => {
  if (!timingSafeEqual(row.fp, fingerprint) || row.operation !== operation) return { kind: 'mismatch' };
  if (row.state === 'completed')
    return { kind: 'replay', answer: { status: row.status!, body: row.body! }, paymentId: row.payment_id, attemptId: row.attempt_id };
  if (row.state === 'reserved') return { kind: 'reserved', ...attemptIn(row) };
  return { kind: 'in_progress', retryAfterSeconds: Math.min(MAX_RETRY_AFTER_SECONDS, Math.max(1, Math.ceil(row.lease_left ?? 1))) };
};

/**
 * Claims that arrive together share one statement and one commit. Completions do the same. If a claim waits longer than `patience`, its request gets
 * a 503. If a completion waits longer, a takeover finishes the key.
 */
const CLAIMS = { maxItems: 100, inFlight: 2, patience: { ms: 5_000, clock: systemClock } } as const;

interface ClaimRow extends KeyName, FingerprintForm {
  readonly operation: Operation;
  readonly fingerprint: Buffer;
  readonly paymentId: string;
  readonly attemptId: string;
  readonly keepHours: number;
}

/**
 * Claims many keys in one statement. null: the existing row does not allow a claim. If a key occurs twice, only its first claim can succeed. Rows are
 * locked in the order of the keys, which prevents deadlocks.
 */
const claimRows = async (pool: Pool, rows: readonly ClaimRow[]): Promise<(Owned | null)[]> => {
  const first = new Map<string, ClaimRow>();
  for (const row of rows) if (!first.has(nameOf(row))) first.set(nameOf(row), row);
  const ordered = [...first.keys()].sort().map((name) => first.get(name)!);
  const { rows: won } = await pool.query<BoundRow>({
    name: 'idempotency-claim',
    text: CLAIM,
    values: [
      ordered.map(({ accountId }) => accountId),
      ordered.map(({ keyHash }) => keyHash),
      ordered.map(({ operation }) => operation),
      ordered.map(({ fingerprint }) => fingerprint),
      ordered.map(({ kid }) => kid),
      LEASE_SECONDS,
      ordered.map(({ paymentId }) => paymentId),
      ordered.map(({ attemptId }) => attemptId),
      ordered.map(({ keepHours }) => keepHours),
      ordered.map(({ fromLog }) => fromLog),
    ],
  });
  const owned = new Map(
    won.map((row): [string, Owned] => {
      const name = nameOf({ accountId: row.api_account_id, keyHash: row.key_hash });
      // A new or expired row gets the ids that were drawn for this claim. A row that was taken over keeps its own ids.
      const tookOver = row.payment_id !== first.get(name)!.paymentId;
      return [name, { kind: 'owned', fence: row.fence, tookOver, ...attemptIn(row) }];
    }),
  );
  return rows.map((row) => (first.get(nameOf(row)) === row ? (owned.get(nameOf(row)) ?? null) : null));
};

/** An expired key with an answer is free again. Without an answer it is not, since its attempt may still be open. Only the purge deletes such a key. */
const BEGINS_ANEW = `k.expires_at <= clock_timestamp() and k.state = 'completed'`;
/** No request runs under the key, and it has no answer. */
const WITHOUT_ANSWER = `(k.state in ('reserved', 'released') or (k.state = 'in_progress' and k.operation <> 'create' and k.lease_until < now()))`;

/** Times come from the database's clock. A claim never takes over a reserved row; only the purge removes it. */
const CLAIM = `
  insert into idempotency_key as k
    (api_account_id, key_hash, operation, fp, fp_kid, fp_from_log, state, lease_until, payment_id, attempt_id, expires_at, begun)
  select r.account_id, r.key_hash, r.operation, r.fp, r.kid, r.from_log, 'in_progress', clock_timestamp() + make_interval(secs => $6),
         r.payment_id, r.attempt_id, clock_timestamp() + make_interval(hours => r.keep_hours), 'false'
  from unnest($1::uuid[], $2::bytea[], $3::text[], $4::bytea[], $5::text[], $7::uuid[], $8::uuid[], $9::int[], $10::boolean[])
    r (account_id, key_hash, operation, fp, kid, payment_id, attempt_id, keep_hours, from_log)
  on conflict (api_account_id, key_hash) do update set
    operation = excluded.operation, fp = excluded.fp, fp_kid = excluded.fp_kid, fp_from_log = excluded.fp_from_log, state = 'in_progress', fence = excluded.fence,
    lease_until = excluded.lease_until, status = null, body = null,
    payment_id = case when ${BEGINS_ANEW} then excluded.payment_id else k.payment_id end,
    attempt_id = case when ${BEGINS_ANEW} then excluded.attempt_id else k.attempt_id end,
    created_at = case when ${BEGINS_ANEW} then excluded.created_at else k.created_at end,
    expires_at = case when ${BEGINS_ANEW} then excluded.expires_at else k.expires_at end,
    begun = case when ${BEGINS_ANEW} then excluded.begun else k.begun end
  where (${BEGINS_ANEW})
     or (k.fp = excluded.fp and k.fp_from_log = excluded.fp_from_log and k.operation = excluded.operation
         and (k.state = 'released' or (k.state = 'in_progress' and k.lease_until < clock_timestamp())))
  returning api_account_id, key_hash, fence::text, payment_id, attempt_id, created_at, begun`;

const FIND = `
  select operation, fp, fp_kid, fp_from_log, state, extract(epoch from lease_until - clock_timestamp())::float8 as lease_left,
         ${BEGINS_ANEW} as begins_anew, payment_id, attempt_id, created_at, begun, status, body
  from idempotency_key k where api_account_id = $1 and key_hash = $2`;

interface FinishRow extends KeyName {
  readonly fence: string;
  readonly to: 'completed' | 'reserved' | 'released';
  readonly answer: StoredAnswer | null;
}

/**
 * Runs an update of rows by their owners. Its first parameters are accounts, key hashes and fences, then `values`. true for each row that still belonged
 * to its owner. Each fence is used only once, so it identifies the row.
 */
const updateOwned = async (
  pool: Pool,
  query: { readonly name: string; readonly text: string },
  rows: readonly (KeyName & { readonly fence: string })[],
  ...values: readonly unknown[]
): Promise<boolean[]> => {
  const owners = [rows.map(({ accountId }) => accountId), rows.map(({ keyHash }) => keyHash), rows.map(({ fence }) => fence)];
  const { rows: updated } = await pool.query<{ fence: string }>({ ...query, values: [...owners, ...values] });
  const fences = new Set(updated.map(({ fence }) => fence));
  return rows.map(({ fence }) => fences.has(fence));
};

const finishRows = (pool: Pool, rows: readonly FinishRow[], keepHours: number): Promise<boolean[]> =>
  updateOwned(
    pool,
    { name: 'idempotency-finish', text: FINISH },
    rows,
    rows.map(({ to }) => to),
    rows.map(({ answer }) => answer?.status ?? null),
    rows.map(({ answer }) => answer?.body ?? null),
    keepHours,
  );

const LOCKED = `locked as materialized (
    select 1 from idempotency_key where (api_account_id, key_hash) in (select * from unnest($1::uuid[], $2::bytea[]))
    order by api_account_id, key_hash for update)`;

/**
 * Rows are locked in the same order as by claims. A plain join could deadlock. The answer of a refund or void is kept as long again,
 * because its attempt may have stayed open for longer than a key is kept.
 */
const FINISH = `
  with ${LOCKED}
  update idempotency_key k set state = r.state, lease_until = null, status = r.status, body = r.body,
    begun = case when r.state = 'completed' then 'false' else k.begun end,
    expires_at = case when r.state = 'completed' and k.operation <> 'create'
                      then greatest(k.expires_at, clock_timestamp() + make_interval(hours => $7)) else k.expires_at end
  from unnest($1::uuid[], $2::bytea[], $3::bigint[], $4::text[], $5::int[], $6::text[]) r (account_id, key_hash, fence, state, status, body)
  where (select count(*) from locked) >= 0 and k.api_account_id = r.account_id and k.key_hash = r.key_hash and k.fence = r.fence and k.state = 'in_progress'
  returning k.fence::text`;

interface BeginRow extends KeyName {
  readonly fence: string;
  readonly attemptId: string;
  readonly intent: IntentEvent;
}

/** true for each row that still belongs to its owner and attempt. It holds the intent then. */
const beginRows = (pool: Pool, rows: readonly BeginRow[]): Promise<boolean[]> =>
  updateOwned(
    pool,
    { name: 'idempotency-begin', text: BEGIN },
    rows,
    rows.map(({ attemptId }) => attemptId),
    rows.map(({ intent }) => JSON.stringify(intent)),
  );

/** Rows are locked in the same order as by claims. */
const BEGIN = `
  with ${LOCKED}
  update idempotency_key k set begun = r.begun
  from unnest($1::uuid[], $2::bytea[], $3::bigint[], $4::uuid[], $5::text[]) r (account_id, key_hash, fence, attempt_id, begun)
  where (select count(*) from locked) >= 0 and k.api_account_id = r.account_id and k.key_hash = r.key_hash and k.fence = r.fence
    and k.attempt_id = r.attempt_id and k.state = 'in_progress'
  returning k.fence::text`;

const GIVE_BACK = `delete from idempotency_key where api_account_id = $1 and key_hash = $2 and fence = $3 and state = 'in_progress'`;

// These statements compare with `now()`, one value for a statement. With `clock_timestamp()`, Postgres would read the whole index.
const PURGE = `
  delete from idempotency_key k using (
    select api_account_id, key_hash from idempotency_key
    where expires_at <= now() and state = 'completed'
    order by expires_at limit $1 for update skip locked) expired
  where k.api_account_id = expired.api_account_id and k.key_hash = expired.key_hash`;

const EXPIRED_WITHOUT_ANSWER = `
  select api_account_id, key_hash, fence::text, payment_id, attempt_id, created_at, begun, operation from idempotency_key k
  where expires_at <= now() and ${WITHOUT_ANSWER} order by expires_at, api_account_id, key_hash limit $1 offset $2`;

const TAKE_OVER_STALE = `
  update idempotency_key k set fence = default, lease_until = clock_timestamp() + make_interval(secs => $1)
  from (select api_account_id, key_hash from idempotency_key
        where state = 'in_progress' and operation = 'create' and lease_until < now()
          and ($3::uuid is null or (api_account_id = $3 and key_hash = $4::bytea))
        order by lease_until limit $2 for update skip locked) stale
  where k.api_account_id = stale.api_account_id and k.key_hash = stale.key_hash
  returning k.api_account_id, k.key_hash, k.fence::text, k.payment_id, k.attempt_id, k.created_at, k.begun`;

/** Finds the rows of many keys in one statement, by the primary key. */
const FIND_ROWS = `
  select k.fence::text, k.payment_id, k.attempt_id, k.state, coalesce(k.lease_until >= clock_timestamp(), false) as is_leased, ${BEGINS_ANEW} as is_free
  from unnest($1::uuid[], $2::bytea[]) with ordinality r (account_id, key_hash, number)
  left join idempotency_key k on k.api_account_id = r.account_id and k.key_hash = r.key_hash
  order by r.number`;

/**
 * Rows are locked in the same order as by claims. A replaced row gets a new fence, so that its former owner cannot change it. The lease and the
 * life of a row begin at the time of the event, or now if that is earlier: business time may be ahead of the database's clock
 * (docs/decisions/0048-two-clocks.md).
 */
const RESTORE = `
  insert into idempotency_key as k
    (api_account_id, key_hash, operation, fp, fp_kid, fp_from_log, state, lease_until, payment_id, attempt_id, status, body, created_at, expires_at)
  select r.account_id, r.key_hash, r.operation, r.fp, r.kid, true, r.state,
         case r.state when 'in_progress' then r.at + make_interval(secs => $12) end,
         r.payment_id, r.attempt_id, r.status, r.body, r.at, r.at + make_interval(hours => $13)
  from (
    select account_id, key_hash, operation, fp, kid, state, payment_id, attempt_id, least(recorded_at, clock_timestamp()) as at, status, body
    from unnest($1::uuid[], $2::bytea[], $3::text[], $4::bytea[], $5::text[], $6::text[], $7::uuid[], $8::uuid[], $9::timestamptz[], $10::int[], $11::text[])
      u (account_id, key_hash, operation, fp, kid, state, payment_id, attempt_id, recorded_at, status, body)) r
  on conflict (api_account_id, key_hash) do update set
    operation = excluded.operation, fp = excluded.fp, fp_kid = excluded.fp_kid, fp_from_log = true, state = excluded.state, fence = excluded.fence,
    lease_until = excluded.lease_until, payment_id = excluded.payment_id, attempt_id = excluded.attempt_id, status = excluded.status,
    body = excluded.body, created_at = excluded.created_at, expires_at = excluded.expires_at, begun = null
  where k.fence = any ($14::bigint[])`;

interface FoundKeyRow {
  fence: string | null;
  payment_id: string;
  attempt_id: string;
  state: FoundKey['state'];
  is_leased: boolean;
  is_free: boolean;
}

/** The rows of keys on Postgres. `db`: the transaction of the comparison, such as the one that moves the subscriber's checkpoint. */
export const postgresKeyRows = (db: Queryable, keepHours = KEEP_HOURS): KeyRows => ({
  find: async (names) => {
    const { rows } = await db.query<FoundKeyRow>({
      name: 'idempotency-find-rows',
      text: FIND_ROWS,
      values: [names.map(({ accountId }) => accountId), names.map(({ keyHash }) => keyHash)],
    });
    return rows.map(({ fence, payment_id: paymentId, attempt_id: attemptId, state, is_leased: isLeased, is_free: isFree }) =>
      fence === null ? null : { fence, paymentId, attemptId, state, isLeased, isFree },
    );
  },
  restore: async (restored) => {
    const rows = restored.map(({ row }) => ({ ...row, name: keyNameOf(row.key) })).sort((a, b) => (nameOf(a.name) < nameOf(b.name) ? -1 : 1));
    const { rowCount } = await db.query(RESTORE, [
      rows.map(({ name }) => name.accountId),
      rows.map(({ name }) => name.keyHash),
      rows.map(({ key }) => key.operation),
      rows.map(({ key }) => Buffer.from(key.fingerprint, 'hex')),
      rows.map(({ key }) => key.kid),
      rows.map(({ state }) => state),
      rows.map(({ paymentId }) => paymentId),
      rows.map(({ attemptId }) => attemptId),
      rows.map(({ at }) => at),
      rows.map(({ answer }) => answer?.status ?? null),
      rows.map(({ answer }) => answer?.body ?? null),
      LEASE_SECONDS,
      keepHours,
      // Each fence is used only once, so it identifies the row that is replaced.
      restored.flatMap(({ replaces }) => replaces ?? []),
    ]);
    return rowCount ?? 0;
  },
});
