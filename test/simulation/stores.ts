/**
 * The stores of the simulation, except for the tables (tables.ts). Each passes the contract suite of the real store, if there is one. A class holds
 * the state that all replicas share. A function gives one replica access to this state through the simulator.
 */
import type { ChargeTerms, Directory, PortalAccess } from '#accounts';
import {
  type EventStore,
  type LogGate,
  type MarkBook,
  OutcomeUnknown,
  type Position,
  type Recorded,
  type SubscriptionItem,
  Unavailable,
} from '#eventstore';
import { type Ids, timestamp } from '#kernel';
import {
  type BatchName,
  type FeedRows,
  isSettledLine,
  isSettlementStream,
  type RecordedLine,
  type Register,
  type RegisteredDispute,
  type RegisteredTransaction,
  type SettlementEvent,
  batchStreamId,
  settlementEvents,
} from '#settlement';
import {
  type Claim,
  type ClaimRequest,
  type ClaimsDatabase,
  type FoundKey,
  type GatewayAccount,
  gatewayRef,
  type IdempotencyStore,
  KEEP_HOURS,
  type CreateKey,
  type IntentEvent,
  type KeyAttempt,
  type KeyName,
  keyNameOf,
  type KeyRows,
  LEASE_SECONDS,
  type LegTerms,
  type Owned,
  paymentEvents,
  paymentIdOf,
  recordedKey,
  type RecoveryWork,
  type RestoredKey,
  type StoredAnswer,
  undoneBy,
  undoneByRequest,
  type UndoneCharge,
  type Velocity,
} from '#payments';
import type { KeyRing } from '#platform';
import type { Marks } from '../support/mark-book.js';
import type { Process, Simulator, Store } from './simulator.js';
import { lostConnection, type Tables } from './tables.js';

// ------------------------------------------------------------------------------------------------------------------------------------
// The log: the product's own memory store behind the simulator.

/** How late an append may still take place after its caller has given up. */
const LATE_APPEND_MS = [500, 15_000] as const;
/** How long a new event takes to reach a subscriber. */
const DELIVERY_MS = 2_000;

/** `inUseAt`: the log that answered at a time. A late append takes effect in the log to which it was sent. */
export const simulatedLog = (
  sim: Simulator,
  process: Process,
  log: EventStore,
  inUseAt: (time: number) => Pick<EventStore, 'append'> = () => log,
): EventStore => {
  const away = (): never => {
    throw new Unavailable('the log is away');
  };
  const read = <T>(name: string, effect: () => Promise<T>, idle = false) =>
    sim.call<T>(process, { store: 'log', name, effect, failed: away, latencyMs: 5, idle });
  return {
    append: (stream, expected, events) =>
      sim.call(process, {
        store: 'log',
        name: `append.${events.map(({ type }) => type).join('+')}`,
        effect: (sentAt) => inUseAt(sentAt).append(stream, expected, events),
        failed: (kind) => {
          if (kind === 'lost' || sim.rng.chance(0.3)) throw new OutcomeUnknown('the log did not answer an append');
          return away();
        },
        lateMs: LATE_APPEND_MS,
      }),
    read: async function* (stream, from, max) {
      yield* await read('read', () => collect(log.read(stream, from, max)));
    },
    readAll: async function* (after, options) {
      yield* await read('readAll', () => collect(log.readAll(after, options)), true);
    },
    subscribe: (after, options) => {
      const inner = log.subscribe(after, options);
      const items = (async function* (): AsyncGenerator<SubscriptionItem> {
        for await (const item of inner) {
          // A real subscription survives outages. So the event is delivered even if this call fails.
          const delivered = await sim.call(process, {
            store: 'log',
            name: 'subscription',
            effect: () => null,
            failed: () => null,
            latencyMs: DELIVERY_MS,
            idle: true,
          });
          if (delivered === null) yield item;
        }
      })();
      return { [Symbol.asyncIterator]: () => items, close: () => inner.close() };
    },
    head: () => read('head', () => log.head(), true),
    missing: (marks) => read('missing', () => log.missing(marks), true),
    eventAt: (position) => read('eventAt', () => log.eventAt(position), true),
    close: async () => undefined,
  };
};

/** The marks are in the database. After each restart, a process writes its marks under a new name. */
export const simulatedMarkBook = (marks: Marks, { id, incarnation }: Process, statement: Statement): MarkBook => {
  const book = marks.bookOf(`${id}${incarnation}`);
  return {
    read: async () => await statement('marks.read', () => book.read(), true),
    write: async (own) => await statement('marks.write', () => book.write(own), true),
    open: async (found) => await statement('incident.open', () => book.open(found)),
    isClosed: async (id) => await statement('incident.isClosed', () => book.isClosed(id), true),
    keep: async (intents) => await statement('marks.keep', () => book.keep(intents)),
    turn: () => book.turn(),
  };
};

export const collect = async <T>(items: AsyncIterable<T>): Promise<T[]> => {
  const all: T[] = [];
  for await (const item of items) all.push(item);
  return all;
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Idempotency keys: the rules of the table and its statements, in memory (T1 to T12).

export interface KeyRow {
  readonly accountId: string;
  readonly keyHash: Buffer;
  operation: string;
  fp: Buffer;
  fpKid: string;
  fpFromLog: boolean;
  state: 'in_progress' | 'completed' | 'reserved' | 'released';
  fence: number;
  leaseUntil: number | null;
  paymentId: string;
  attemptId: string;
  status: number | null;
  body: string | null;
  createdAt: number;
  expiresAt: number;
  begun: KeyAttempt['begun'];
}

const attemptIn = ({ paymentId, attemptId, createdAt, begun }: KeyRow): KeyAttempt => ({
  paymentId,
  attemptId,
  claimedAt: timestamp(createdAt),
  begun,
});

type ClaimRow = Pick<KeyRow, 'accountId' | 'keyHash' | 'operation' | 'fp' | 'fpKid' | 'fpFromLog' | 'paymentId' | 'attemptId'>;

const HOUR_MS = 3_600_000;
const rowName = ({ accountId, keyHash }: KeyName) => `${accountId}/${keyHash.toString('hex')}`;

/** The rows and the clock that all replicas share. Each method is one SQL statement of the product. */
export class KeyTable {
  readonly rows = new Map<string, KeyRow>();
  /** The number of fences so far. A fence is never drawn twice, also after the database went back. */
  fences = 0;
  /** The timeline of the database. It rises when a standby is promoted. */
  timeline = 1;
  /** How often the server was started. */
  starts = 1;
  /** When a process last noticed that the database went back. */
  noticedAt: number | null = null;
  constructor(
    readonly now: () => number,
    readonly leaseSeconds: number = LEASE_SECONDS,
    readonly keepHours: number = KEEP_HOURS,
  ) {}

  /**
   * Makes a copy of the table. The returned function puts the copy in place of the table. `restarted`: the server lost its last commits at a restart,
   * on the same timeline, and other writes passed the known position before anybody looked. Otherwise a standby is promoted.
   */
  copied(): (how: 'promoted' | 'restarted') => void {
    const rows = [...this.rows].map(([name, row]) => [name, { ...row }] as const);
    const { noticedAt } = this;
    return (how) => {
      this.rows.clear();
      for (const [name, row] of rows) this.rows.set(name, { ...row });
      Object.assign(this, { noticedAt, starts: this.starts + 1, timeline: this.timeline + (how === 'promoted' ? 1 : 0) });
    };
  }

  find(name: KeyName): KeyRow | undefined {
    return this.rows.get(rowName(name));
  }

  beginsAnew(row: KeyRow): boolean {
    return row.expiresAt <= this.now() && row.state === 'completed';
  }

  /** No request runs under the key, and it has no answer. */
  private hasNoAnswer({ state, operation, leaseUntil }: KeyRow): boolean {
    return state === 'reserved' || state === 'released' || (state === 'in_progress' && operation !== 'create' && leaseUntil! < this.now());
  }

  claim(claimed: ClaimRow): { row: KeyRow; tookOver: boolean } | null {
    const before = this.find(claimed);
    const anew = !before || this.beginsAnew(before);
    const now = this.now();
    if (before && !anew) {
      const free = before.state === 'released' || (before.state === 'in_progress' && before.leaseUntil! < now);
      const same = before.fp.equals(claimed.fp) && before.fpFromLog === claimed.fpFromLog && before.operation === claimed.operation;
      if (!free || !same) return null;
    }
    const row: KeyRow = {
      ...claimed,
      state: 'in_progress',
      fence: ++this.fences,
      leaseUntil: now + this.leaseSeconds * 1000,
      paymentId: anew ? claimed.paymentId : before.paymentId,
      attemptId: anew ? claimed.attemptId : before.attemptId,
      status: null,
      body: null,
      createdAt: anew ? now : before.createdAt,
      expiresAt: anew ? now + this.keepHours * HOUR_MS : before.expiresAt,
      begun: anew ? false : before.begun,
    };
    this.rows.set(rowName(claimed), row);
    return { row: { ...row }, tookOver: !anew };
  }

  owned(name: KeyName, fence: string): KeyRow | undefined {
    const row = this.find(name);
    return row?.state === 'in_progress' && String(row.fence) === fence ? row : undefined;
  }

  finish(name: KeyName, fence: string, to: 'completed' | 'reserved' | 'released', answer: StoredAnswer | null): boolean {
    const row = this.owned(name, fence);
    if (!row) return false;
    if ((to === 'reserved') !== (row.operation === 'create') && to !== 'completed') throw new Error(`a ${row.operation} cannot be ${to}`);
    const again = to === 'completed' && row.operation !== 'create' ? this.now() + this.keepHours * HOUR_MS : 0;
    const expiresAt = Math.max(row.expiresAt, again);
    Object.assign(row, { state: to, leaseUntil: null, status: answer?.status ?? null, body: answer?.body ?? null, expiresAt });
    if (to === 'completed') row.begun = false;
    return true;
  }

  giveBack(name: KeyName, fence: string): boolean {
    return this.owned(name, fence) !== undefined && this.rows.delete(rowName(name));
  }

  holds(name: KeyName, fence: string, attemptId: string, intent: IntentEvent): boolean {
    const row = this.owned(name, fence);
    if (row?.attemptId !== attemptId) return false;
    row.begun = intent;
    return true;
  }

  renewAttempt(name: KeyName, fence: string, attemptId: string): boolean {
    const row = this.owned(name, fence);
    if (row) Object.assign(row, { attemptId, begun: false });
    return row !== undefined;
  }

  look(name: KeyName): FoundKey | null {
    const row = this.find(name);
    if (!row) return null;
    const { fence, paymentId, attemptId, state, leaseUntil } = row;
    return {
      fence: String(fence),
      paymentId,
      attemptId,
      state,
      isLeased: leaseUntil !== null && leaseUntil >= this.now(),
      isFree: this.beginsAnew(row),
    };
  }

  /** Makes a row if there is none, or replaces the row with the fence `replaces`. Returns true if it did. */
  restore({ key, paymentId, attemptId, at, state, answer }: RestoredKey, replaces: string | null): boolean {
    const name = keyNameOf(key);
    const before = this.find(name);
    if (before && String(before.fence) !== replaces) return false;
    const createdAt = Date.parse(at);
    this.rows.set(rowName(name), {
      ...name,
      operation: key.operation,
      fp: Buffer.from(key.fingerprint, 'hex'),
      fpKid: key.kid,
      fpFromLog: true,
      state,
      fence: ++this.fences,
      leaseUntil: state === 'in_progress' ? createdAt + this.leaseSeconds * 1000 : null,
      paymentId,
      attemptId,
      status: answer?.status ?? null,
      body: answer?.body ?? null,
      createdAt,
      expiresAt: createdAt + this.keepHours * HOUR_MS,
      begun: null,
    });
    return true;
  }

  ofCreate(name: KeyName): CreateKey | null {
    const row = this.find(name);
    if (!row || row.operation !== 'create' || row.state === 'released' || (row.state === 'completed' && row.expiresAt <= this.now())) return null;
    return { state: row.state, ...attemptIn(row), leaseLeft: row.state === 'in_progress' ? (row.leaseUntil! - this.now()) / 1000 : null };
  }

  takeOverStale(limit: number, only?: KeyName): KeyRow[] {
    const stale = [...this.rows.values()]
      .filter((row) => !only || rowName(row) === rowName(only))
      .filter(({ state, operation, leaseUntil }) => state === 'in_progress' && operation === 'create' && leaseUntil! < this.now())
      .sort((a, b) => a.leaseUntil! - b.leaseUntil!)
      .slice(0, limit);
    for (const row of stale) Object.assign(row, { fence: ++this.fences, leaseUntil: this.now() + this.leaseSeconds * 1000 });
    return stale.map((row) => ({ ...row }));
  }

  private expired(): KeyRow[] {
    return [...this.rows.values()].filter(({ expiresAt }) => expiresAt <= this.now()).sort((a, b) => a.expiresAt - b.expiresAt);
  }

  purge(limit: number): number {
    const gone = this.expired()
      .filter(({ state }) => state === 'completed')
      .slice(0, limit);
    for (const row of gone) this.rows.delete(rowName(row));
    return gone.length;
  }

  expiredWithoutAnswer(limit: number, offset: number): KeyRow[] {
    return this.expired()
      .filter((row) => this.hasNoAnswer(row))
      .slice(offset, offset + limit);
  }

  deleteWithoutAnswer(row: KeyRow): number {
    const present = this.find(row);
    return present && this.hasNoAnswer(present) && present.fence === row.fence && this.rows.delete(rowName(row)) ? 1 : 0;
  }
}

/** Runs one statement on the table: directly, or through the simulator. */
export type Statement = <T>(name: string, effect: () => T, idle?: boolean) => Promise<T>;

const CLAIM_ROUNDS = 3;
const MAX_RETRY_AFTER_SECONDS = 5;

/** One replica's access to the table. Runs the same statements in the same order as the Postgres key store. */
export const memoryIdempotency = (table: KeyTable, keys: KeyRing, ids: Ids, statement: Statement): IdempotencyStore => {
  const name = (accountId: string, key: string): KeyName => ({ accountId, keyHash: keys.mac('idempotency-key', key, keys.kids[0]) });
  const owned = (row: KeyRow, tookOver: boolean): Owned => ({
    kind: 'owned',
    fence: String(row.fence),
    tookOver,
    ...attemptIn(row),
  });
  const fingerprintOf = ({ fingerprintText, loggedText }: ClaimRequest, { kid, fromLog }: { kid: string; fromLog: boolean }) =>
    keys.mac('fingerprint', fromLog ? loggedText : fingerprintText, kid);
  const classify = (row: KeyRow, operation: string, fp: Buffer): Exclude<Claim, Owned> => {
    if (!row.fp.equals(fp) || row.operation !== operation) return { kind: 'mismatch' };
    if (row.state === 'completed')
      return { kind: 'replay', answer: { status: row.status!, body: row.body! }, paymentId: row.paymentId, attemptId: row.attemptId };
    if (row.state === 'reserved') return { kind: 'reserved', ...attemptIn(row) };
    const left = row.leaseUntil === null ? 1 : Math.ceil((row.leaseUntil - table.now()) / 1000);
    return { kind: 'in_progress', retryAfterSeconds: Math.min(MAX_RETRY_AFTER_SECONDS, Math.max(1, left)) };
  };
  return {
    name,
    recorded: (request) => recordedKey(keys, name(request.accountId, request.key), request),
    look: async (request) => {
      const row = await statement('look', () => table.find(name(request.accountId, request.key)), true);
      if (!row || table.beginsAnew(row)) return null;
      const form = { kid: row.fpKid, fromLog: row.fpFromLog };
      const found = keys.kids.includes(form.kid) ? classify(row, request.operation, fingerprintOf(request, form)) : ({ kind: 'mismatch' } as const);
      return found.kind === 'in_progress' && (row.leaseUntil ?? 0) < table.now() ? null : found;
    },
    claim: async (request: ClaimRequest) => {
      const { accountId, key, operation } = request;
      const at = name(accountId, key);
      let form = { kid: keys.current, fromLog: false };
      for (let round = 1; ; round++) {
        const fp = fingerprintOf(request, form);
        const claimed: ClaimRow = { ...at, operation, fp, fpKid: form.kid, fpFromLog: form.fromLog, paymentId: ids.uuid(), attemptId: ids.uuid() };
        const won = await statement('claim', () => table.claim(claimed));
        if (won) return owned(won.row, won.tookOver);
        const row = await statement('claim.find', () => table.find(at));
        const isOther = row && (row.fpKid !== form.kid || row.fpFromLog !== form.fromLog);
        if (isOther && keys.kids.includes(row.fpKid) && round < CLAIM_ROUNDS) form = { kid: row.fpKid, fromLog: row.fpFromLog };
        else if (row) return classify(row, operation, fp);
        else if (round >= CLAIM_ROUNDS) return { kind: 'in_progress', retryAfterSeconds: 1 };
      }
    },
    finish: (at, fence, ending) =>
      statement(`finish.${ending.to}`, () =>
        ending.to === 'given_back' ? table.giveBack(at, fence) : table.finish(at, fence, ending.to, ending.to === 'completed' ? ending.answer : null),
      ),
    holds: (at, fence, attemptId, intent) => statement('holds', () => table.holds(at, fence, attemptId, intent)),
    renewAttempt: (at, fence, attemptId) => statement('renewAttempt', () => table.renewAttempt(at, fence, attemptId)),
    ofCreate: (name) => statement('ofCreate', () => table.ofCreate(name), true),
    takeOverStale: async (limit, only) => {
      const rows = await statement('takeOverStale', () => table.takeOverStale(limit, only), true);
      return rows.map((row) => ({ ...owned(row, true), accountId: row.accountId, keyHash: row.keyHash }));
    },
    purge: async (limit, resolved, stop) => {
      let deleted = 0;
      for (let gone = limit; gone === limit && !stop?.aborted; deleted += gone) gone = await statement('purge', () => table.purge(limit), true);
      for (let kept = 0; ;) {
        const rows = await statement('purge.open', () => table.expiredWithoutAnswer(limit, kept), true);
        for (const row of rows) {
          if (stop?.aborted) break;
          if (await resolved({ accountId: row.accountId, operation: row.operation, ...attemptIn(row) }).catch(() => false))
            deleted += await statement('purge.delete', () => table.deleteWithoutAnswer(row));
          else kept += 1;
        }
        if (rows.length < limit || stop?.aborted) return deleted;
      }
    },
    ping: () => statement('ping', () => true, true),
  };
};

/** The rows of the key table, for the subscriber that compares them with the log. */
export const simulatedKeyRows = (table: KeyTable, statement: Statement): KeyRows => ({
  find: (names) => statement('rows.find', () => names.map((name) => table.look(name)), true),
  restore: (rows) => statement('rows.restore', () => rows.filter(({ row, replaces }) => table.restore(row, replaces)).length),
});

/** The same as `postgresClaims`. `position`: the checkpoint of the subscriber `keys`. */
export const simulatedClaims = (table: KeyTable, statement: Statement, position: ClaimsDatabase['position']): ClaimsDatabase => ({
  // Claims, takeovers and restores draw a new fence each. So the newest fence serves as the position in the write-ahead log.
  place: () =>
    statement(
      'place',
      () => ({ systemId: 'keys', timeline: String(table.timeline), position: String(table.fences), startedAt: String(table.starts) }),
      true,
    ),
  noticed: () =>
    statement(
      'noticed',
      () => {
        const { noticedAt } = table;
        return noticedAt === null ? { at: null, secondsAgo: null } : { at: String(noticedAt), secondsAgo: (table.now() - noticedAt) / 1000 };
      },
      true,
    ),
  notice: () => statement('notice', () => void (table.noticedAt = table.now())),
  position,
  // In the simulation, every connection breaks when the database goes back.
  reconnect: () => undefined,
});

/** Statements over one connection, which breaks when the table goes back. Each new connection is compared before its first use. */
export const comparedStatement = (table: KeyTable, statement: Statement, verify: (place: ClaimsDatabase['place']) => Promise<void>): Statement => {
  let connected: number | null = null;
  const over =
    (starts: number): Statement =>
    (name, effect, idle) =>
      statement(name, () => (table.starts === starts ? effect() : lostConnection()), idle);
  return async (name, effect, idle) => {
    const { starts } = table;
    if (connected !== starts) {
      const connection = simulatedClaims(table, over(starts), async () => '');
      await verify(() => connection.place());
      connected = starts;
    }
    return over(starts)(name, effect, idle);
  };
};

/** How late a statement may still run after its client has lost the connection. The upper limit is the server's statement timeout. */
const LATE_STATEMENT_MS = [50, 2_000] as const;

/** Sends the statements of a replica to one of the databases, through the simulator. */
export const simulatedStatement =
  (sim: Simulator, process: Process, store: Store): Statement =>
  (name, effect, idle = false) =>
    sim.call(process, { store, name, effect, failed: lostConnection, idle, ...(!idle && store === 'keys' && { lateMs: LATE_STATEMENT_MS }) });

export const directStatement: Statement = async (_name, effect) => effect();

// ------------------------------------------------------------------------------------------------------------------------------------
// Recovery's work, velocity, directory.

/** The same as `postgresRecoveryWork`, on the rows of the simulated list. */
export const simulatedRecoveryWork = (tables: Tables, statement: Statement): RecoveryWork => ({
  due: ({ begunBefore, begunAfter, nextTryBefore, nextTryAfter }) =>
    statement(
      'recovery.due',
      () =>
        [...tables.list.values()]
          .filter(({ openSince }) => openSince !== null && (openSince < begunBefore || openSince > begunAfter))
          .map((row) => ({ paymentId: row.paymentId, attemptId: row.openAttemptId!, since: row.openSince! }))
          .map((open) => ({ ...open, tried: tables.tries.get(`${open.paymentId} ${open.attemptId}`) }))
          .filter(({ tried }) => !tried || tried.nextTryAt <= nextTryBefore || tried.nextTryAt > nextTryAfter)
          .sort((a, b) => (a.since < b.since ? -1 : a.since > b.since ? 1 : a.paymentId < b.paymentId ? -1 : 1))
          .map(({ tried, ...open }) => ({ ...open, tries: tried?.tries ?? 0, until: tried?.until ?? null })),
      true,
    ),
  record: ({ paymentId, attemptId, tries, nextTryAt, outcome, until }) =>
    statement('recovery.record', () => {
      const name = `${paymentId} ${attemptId}`;
      if (outcome === 'resolved') tables.tries.delete(name);
      else tables.tries.set(name, { tries, nextTryAt, outcome, until });
    }),
  hurry: (nextTryAt) =>
    statement('recovery.hurry', () => {
      for (const [name, tried] of tables.tries)
        if (tried.outcome === 'open' && tried.nextTryAt > nextTryAt)
          tables.tries.set(name, { ...tried, tries: Math.max(0, tried.tries - 1), nextTryAt });
    }),
});

type Registered = RegisteredTransaction & { settledBatchId: string | null; transactionId: string | null };

const accountName = ({ gateway, merchantAccount }: { gateway: string; merchantAccount: string }) => `${gateway} ${merchantAccount}`;

/** The look-ups of settlement and disputes. `caughtUp` applies the new events of the log, as the projection of the real register does. */
export const simulatedRegister = (log: EventStore, ownLog: Pick<LogGate, 'verifiedRead'>): Register => {
  const accounts = new Map<string, GatewayAccount>();
  const transactions = new Map<string, Registered>();
  const disputes = new Map<string, RegisteredDispute>();
  const batches: (Extract<SettlementEvent, { type: 'SettlementBatchRecorded' }>['data'] & { funded: boolean })[] = [];
  const begun = new Map<string, BatchName>();
  let seen: Position | null = null;
  const gatewayOf = new Map<string, string>();
  const register = (paymentId: string, account: GatewayAccount, op: 'charge' | 'refund', ref: string, leg: LegTerms['leg'], attemptId: string) => {
    transactions.set(ref, {
      ref,
      transactionId: null,
      paymentId,
      leg,
      op,
      attemptId,
      merchantAccount: account.merchantAccount,
      settledBatchId: null,
      exceptionId: null,
    });
    gatewayOf.set(ref, account.gateway);
  };
  const of = (paymentId: string, leg: string, op: 'charge' | 'refund', attemptId?: string) =>
    [...transactions.values()].find(
      (one) => one.paymentId === paymentId && one.leg === leg && one.op === op && (attemptId === undefined || one.attemptId === attemptId),
    );
  const identify = (found: Registered | undefined, transactionId: string | null) => {
    if (found) found.transactionId = transactionId;
  };
  const settle = ({ gateway, merchantAccount, batchId }: BatchName, lines: readonly RecordedLine[], settled: boolean) => {
    const ids = new Set(lines.filter((line) => line.accepted && isSettledLine(line)).map(({ transactionId }) => transactionId));
    for (const one of transactions.values())
      if (gatewayOf.get(one.ref) === gateway && one.merchantAccount === merchantAccount && one.transactionId !== null && ids.has(one.transactionId))
        if (settled) one.settledBatchId ??= batchId;
        else if (one.settledBatchId === batchId) one.settledBatchId = null;
  };
  const accountOf = (charge: Registered): GatewayAccount =>
    accounts.get(accountName({ gateway: gatewayOf.get(charge.ref)!, merchantAccount: charge.merchantAccount }))!;
  const undo = (paymentId: string, attemptId: string, charges: readonly UndoneCharge[]) => {
    for (const { leg, chargeTransactionId, refundTransactionId } of charges) {
      const charge = of(paymentId, leg, 'charge')!;
      const ref = gatewayRef(attemptId, leg, 'reversal');
      identify(charge, chargeTransactionId);
      register(paymentId, accountOf(charge), 'refund', ref, leg, attemptId);
      identify(transactions.get(ref), refundTransactionId);
    }
  };
  const settledUnknown = new Map<string, Partial<Record<LegTerms['leg'], string>>>();
  const applySettlement = (event: SettlementEvent) => {
    if (event.type === 'SettlementLinesRecorded')
      for (const { paymentId, leg, type, result, accepted, transactionId } of event.data.lines)
        if (paymentId !== null && leg !== null && type === 'sale' && accepted && result === 'STATUS_MISMATCH')
          settledUnknown.set(paymentId, { ...settledUnknown.get(paymentId), [leg]: transactionId });
    const batch = batches.find((one) => batchStreamId(one) === batchStreamId(event.data));
    switch (event.type) {
      case 'SettlementLinesRecorded':
        begun.set(batchStreamId(event.data), event.data);
        settle(event.data, event.data.lines, true);
        return;
      case 'SettlementBatchRecorded':
        batches.push({ ...event.data, funded: false });
        return;
      case 'SettlementBatchListed':
        batches[batches.indexOf(batch!)] = { ...batch!, fundedOn: batch!.fundedOn ?? event.data.fundedOn };
        return;
      case 'SettlementLinesCorrected': {
        const { corrections, fundedOn } = event.data;
        const before = corrections.flatMap((one) => one.before ?? []);
        const after = corrections.flatMap((one) => one.after ?? []);
        settle(event.data, before, false);
        settle(event.data, after, true);
        const net = (lines: readonly RecordedLine[]) => lines.reduce((sum, line) => sum + (line.accepted ? line.netCents : 0), 0);
        batches[batches.indexOf(batch!)] = { ...batch!, fundedOn, netCents: batch!.netCents + net(after) - net(before) };
        return;
      }
      case 'BatchFunded':
      case 'BatchFundingWithdrawn':
        batch!.funded = event.type === 'BatchFunded';
        return;
    }
  };
  const apply = (recorded: Recorded) => {
    if (isSettlementStream(recorded.stream)) return applySettlement(settlementEvents.read(recorded));
    const paymentId = paymentIdOf(recorded.stream);
    const event = paymentEvents.read(recorded);
    if (event.type === 'PaymentInitiated')
      for (const { leg, account, references } of event.data.legs) {
        accounts.set(accountName(account), account);
        register(paymentId, account, 'charge', references.charge, leg, event.data.attemptId);
      }
    if (event.type === 'PaymentCreated' || event.type === 'PaymentResolved')
      for (const { leg, transactionId } of (event.type === 'PaymentCreated' ? event.data : event.data.charge)?.legs ?? [])
        identify(of(paymentId, leg, 'charge'), transactionId);
    if (event.type === 'PaymentOutcomeUnknown' || event.type === 'ReconciliationStarted')
      for (const charge of [...transactions.values()]) {
        const { leg, op, attemptId } = charge;
        const ref = gatewayRef(attemptId, leg, 'reversal');
        if (charge.paymentId === paymentId && op === 'charge' && attemptId === event.data.attemptId && !transactions.has(ref))
          register(paymentId, accountOf(charge), 'refund', ref, leg, attemptId);
      }
    if (event.type === 'RefundRequested')
      for (const { leg, references } of event.data.legs) {
        const account = accountOf(of(paymentId, leg, 'charge')!);
        register(paymentId, account, 'refund', references.refund, leg, event.data.attemptId);
      }
    if (event.type === 'PaymentRefunded' || event.type === 'FeeRefunded')
      identify(of(paymentId, event.data.leg!, 'refund', event.data.attemptId), event.data.transactionId);
    if (event.type === 'PaymentDeclined' || event.type === 'PaymentFailed') undo(paymentId, event.data.attemptId, undoneByRequest(event.data));
    if (event.type === 'PaymentVoided') undo(paymentId, event.data.attemptId, undoneBy(event.data));
    if (event.type === 'PaymentDisputed') disputes.set(event.data.disputeId, { ...event.data, paymentId, updatedAt: event.at });
  };
  return {
    caughtUp: async () => {
      const pages = await collect(log.readAll(seen, { streamPrefixes: ['payment-', 'settlement-'] }));
      const events = pages.flat();
      const last = events.at(-1) ?? null;
      if (last && !(await ownLog.verifiedRead(last))) return;
      for (const event of events) {
        if (seen !== null && event.position <= seen) continue;
        apply(event);
        seen = event.position;
      }
    },
    accounts: async () => [...accounts.values()],
    transactions: async (gateway, transactionIds, refs) =>
      [...transactions.values()].filter(
        ({ ref, transactionId }) =>
          gatewayOf.get(ref) === gateway && (refs.includes(ref) || (transactionId !== null && transactionIds.includes(transactionId))),
      ),
    accountsOfBatch: async (batchId) =>
      [...begun.values()].filter((batch) => batch.batchId === batchId).map((batch) => accounts.get(accountName(batch))!),
    fundable: async (today) =>
      batches
        .filter(({ funded, fundedOn }) => !funded && fundedOn !== null && fundedOn <= today)
        .map((batch) => ({
          account: accounts.get(accountName(batch))!,
          batchId: batch.batchId,
          netCents: batch.netCents,
          fundedOn: batch.fundedOn!,
        })),
    disputes: async () => [...disputes.values()],
    dispute: async (disputeId) => disputes.get(disputeId) ?? null,
    settledUnknown: async (paymentId) => settledUnknown.get(paymentId) ?? {},
    // Nobody sends refunds of exceptions here.
    sentBack: async () => ({}),
    settledRefund: async () => null,
    exceptionsOf: async () => [],
    unexplained: async () => [],
  };
};

/** Counts attempts and refuses none, since limits are off by default. The oracle checks the counts. */
export class VelocityCounts {
  readonly attempts = new Map<string, number>();
  port(statement: Statement): Velocity {
    return {
      admit: (_subject, _limits, entryId) =>
        statement('velocity.admit', () => void this.attempts.set(entryId, (this.attempts.get(entryId) ?? 0) + 1)),
      withdraw: (_subject, _limits, entryId) => statement('velocity.withdraw', () => void this.attempts.delete(entryId)),
      recordDecline: (_subject, _limits, entryId) => statement('velocity.decline', () => void entryId).catch(() => undefined),
    };
  }
}

/** The rows of the processors' feeds. Every feed is due at once. */
export class FeedNotes {
  private readonly rows = new Map<string, { readonly row: string; cursor: string | null }>();
  private forgotten = 0;
  private readonly open = new Map<string, Set<string>>();

  port(statement: Statement): FeedRows {
    const nameOf = (account: GatewayAccount, feed: string) => `${accountName(account)} ${feed}`;
    const openOf = (account: GatewayAccount) => getOrMake(this.open, accountName(account), () => new Set<string>());
    return {
      claim: (account, feed) =>
        statement('feed.claim', () => {
          const row = getOrMake(this.rows, nameOf(account, feed), () => ({ row: String(this.forgotten), cursor: null }));
          return { ...row, failures: 0 };
        }),
      passed: (account, feed, { row }, cursor) =>
        statement('feed.passed', () => {
          const present = this.rows.get(nameOf(account, feed));
          if (present?.row === row) present.cursor = cursor;
        }),
      ended: (account, feed) => statement('feed.ended', () => void nameOf(account, feed)),
      openDisputes: (account) => statement('feed.openDisputes', () => [...openOf(account)]),
      disputeSeen: (account, id, isOpen) => statement('feed.disputeSeen', () => void (isOpen ? openOf(account).add(id) : openOf(account).delete(id))),
    };
  }

  forget(): void {
    this.rows.clear();
    this.forgotten += 1;
  }
}

const getOrMake = <K, V>(map: Map<K, V>, key: K, make: () => V): V => {
  const found = map.get(key) ?? make();
  map.set(key, found);
  return found;
};

/** Changes that an operator makes to the fixed directory during a run. */
export interface DirectoryChanges {
  readonly revoked: Set<string>;
}

export const simulatedDirectory = (inner: Directory, statement: Statement, changes: DirectoryChanges): Directory => {
  const access = (portalId: string, found: PortalAccess): PortalAccess => (found === 'granted' && changes.revoked.has(portalId) ? 'revoked' : found);
  const ask = <T>(name: string, effect: () => Promise<T>) => statement(`directory.${name}`, effect) as Promise<T>;
  return {
    findApiKey: (lookupId) => ask('findApiKey', () => inner.findApiKey(lookupId)),
    account: (accountId) => ask('account', () => inner.account(accountId)),
    accounts: () => ask('accounts', () => inner.accounts()),
    portal: (portalId) => ask('portal', () => inner.portal(portalId)),
    portals: () => ask('portals', () => inner.portals()),
    grant: async (accountId, portalId) => access(portalId, await ask('grant', () => inner.grant(accountId, portalId))),
    restrictedCases: (portalId, referenceId) => ask('restrictedCases', () => inner.restrictedCases(portalId, referenceId)),
    chargeTerms: async (accountId, portalId, referenceId): Promise<ChargeTerms> => {
      const terms = await ask('chargeTerms', () => inner.chargeTerms(accountId, portalId, referenceId));
      return { ...terms, access: access(portalId, terms.access) };
    },
    merchantAccount: (id) => ask('merchantAccount', () => inner.merchantAccount(id)),
    merchantAccounts: () => ask('merchantAccounts', () => inner.merchantAccounts()),
  };
};
