/**
 * The tables of the projections and of webhooks, in memory behind the simulator. A transaction writes at its commit. There are row locks, and
 * connections break. The ports over these tables pass the contract suites of the real ones (stores.unit.spec.ts).
 */
import { type IntakeRow, type IntakeRows, keyOfContent, type UnfinishedRows, type UnfinishedSession } from '#checkout';
import { type Checkpoint, type Lease, type Mark, Moved, type Place, type Position, runHandler } from '#eventstore';
import { PAGE_BYTES, paymentListRow, type PaymentListRows, type PaymentRow, type Resolution } from '#payments';
import { DatabaseUnavailable, type PersonalKeyRows, StatementTimeout, type WrappedKey } from '#platform';
import { WebhookTables } from './deliveries.js';
import { type Process, Rng, type Simulator } from './simulator.js';

interface CheckpointRow {
  position: string;
  epoch: number;
  owner: string | null;
  leaseUntil: number | null;
  updatedAt: number;
  /** The last event that the projection applied. */
  event: Mark | null;
}

interface FailureRow {
  readonly name: string;
  readonly position: string;
  readonly eventId: string | null;
  readonly message: string;
  readonly failedAt: number;
  isResolved: boolean;
}

export interface ListRow extends Pick<PaymentRow, 'paymentId' | 'revision'> {
  readonly accountId: string;
  readonly portalId: string;
  readonly createdAt: string;
  readonly status: string;
  readonly openAttemptId: string | null;
  readonly openSince: string | null;
  readonly state: string;
}

export interface Transaction {
  readonly writes: (() => void)[];
  readonly locked: Set<string>;
  lastStatementAt: number;
  ended: boolean;
}

/** Sends one call of a port to the tables: in an open transaction, or in a transaction of its own. `idle`: the call counts as a poll. */
export type Run = <T>(name: string, effect: (transaction: Transaction) => T | Promise<T>, idle?: boolean) => Promise<T>;

type Methods<Port> = {
  readonly [Method in keyof Port]: Port[Method] extends (...args: infer Args) => Promise<infer Answer>
    ? (transaction: Transaction, ...args: Args) => Answer | Promise<Answer>
    : never;
};

/**
 * A port over the tables. Each of its calls goes through `run` as one statement with the name `port.method`. `looks`: the methods that count as
 * polls.
 */
export const port = <Port extends object>(name: string, run: Run, looks: readonly (keyof Port)[], methods: Methods<Port>): Port =>
  Object.fromEntries(
    Object.entries<(transaction: Transaction, ...args: unknown[]) => unknown>(methods).map(([method, effect]) => [
      method,
      (...args: unknown[]) => run(`${name}.${method}`, (transaction) => effect(transaction, ...args), (looks as readonly string[]).includes(method)),
    ]),
  ) as Port;

/** The same values as `idle_in_transaction_session_timeout` and `lock_timeout` of the product's pools. */
const IDLE_IN_TRANSACTION_MS = 60_000;
const LOCK_TIMEOUT_MS = 10_000;
const LOCK_POLL_MS = 50;

const databaseError = (code: string, message: string) => new DatabaseUnavailable(message, { code });

export const lostConnection = (): never => {
  throw databaseError('ECONNRESET', 'Connection terminated unexpectedly');
};

/** The rows and the clock that all replicas share. */
export class Tables {
  readonly checkpoints = new Map<string, CheckpointRow>();
  readonly failures: FailureRow[] = [];
  readonly list = new Map<string, ListRow>();
  readonly tries = new Map<string, { tries: number; nextTryAt: string; outcome: Resolution; until: string | null }>();
  /** Checkouts without an outcome. */
  readonly unfinished = new Map<string, UnfinishedSession>();
  /** The contents of checkouts, by checkout and hash. */
  readonly intakes = new Map<string, IntakeRow>();
  /** The keys of personal data, and the times of their erasures. */
  readonly personalKeys = new Map<string, WrappedKey>();
  readonly erasedKeys = new Map<string, string>();
  readonly webhooks: WebhookTables;
  /** The listeners for due deliveries. Each process has one. */
  readonly listeners = new Map<Process, () => void>();
  private readonly locks = new Map<string, Transaction>();
  /** True only for a canary: the checkpoint moves before the commit of the rows. */
  splitTransactions = false;

  constructor(private readonly sim: Simulator) {
    this.webhooks = new WebhookTables(() => sim.now, new Rng(sim.seed ^ 0x27d4eb2f));
  }

  get now(): number {
    return this.sim.now;
  }

  begin(): Transaction {
    return { writes: [], locked: new Set(), lastStatementAt: this.sim.now, ended: false };
  }

  end(transaction: Transaction, how: 'commit' | 'rollback'): void {
    if (transaction.ended) return;
    transaction.ended = true;
    if (how === 'commit') for (const write of transaction.writes) write();
    for (const lock of transaction.locked) if (this.locks.get(lock) === transaction) this.locks.delete(lock);
  }

  /** Waits for a row lock. Throws a StatementTimeout after LOCK_TIMEOUT_MS. */
  async lock(name: string, transaction: Transaction): Promise<void> {
    const until = this.sim.now + LOCK_TIMEOUT_MS;
    for (;;) {
      const holder = this.locks.get(name);
      if (!holder || holder === transaction) break;
      if (this.sim.now - holder.lastStatementAt > IDLE_IN_TRANSACTION_MS) this.end(holder, 'rollback');
      else if (this.sim.now >= until) throw new StatementTimeout('canceling statement due to lock timeout', { code: '55P03' });
      else await this.sim.wait(LOCK_POLL_MS);
      // The client that waits for the lock is gone.
      if (transaction.ended) throw databaseError('57P01', 'terminating connection');
    }
    this.locks.set(name, transaction);
    transaction.locked.add(name);
  }

  statement<T>(transaction: Transaction, effect: (transaction: Transaction) => T | Promise<T>): T | Promise<T> {
    if (transaction.ended) throw databaseError('25P03', 'terminating connection due to idle-in-transaction timeout');
    transaction.lastStatementAt = this.sim.now;
    return effect(transaction);
  }

  /** Notifies the dispatchers that deliveries may be due. A notification may get lost. */
  ring(): void {
    for (const [process, hear] of this.listeners)
      void this.sim
        .call(process, { store: 'tables', name: 'notification', effect: () => true, failed: () => false, idle: true })
        .then((arrived) => arrived && hear());
  }
}

/** A replica's connections to the tables. */
export class Database {
  private readonly open = new Set<Transaction>();

  constructor(
    private readonly sim: Simulator,
    readonly process: Process,
    readonly tables: Tables,
  ) {}

  /** One statement, in a transaction of its own. */
  readonly run: Run = (name, effect, idle) => {
    const transaction = this.begin();
    const effectAndCommit = async () => {
      try {
        const result = await this.tables.statement(transaction, effect);
        this.end(transaction, 'commit');
        return result;
      } catch (error) {
        this.end(transaction, 'rollback');
        throw error;
      }
    };
    return this.send(name, effectAndCommit, () => this.end(transaction, 'rollback'), idle);
  };

  /** The same as `transaction` of libs/platform/postgres/pool.ts. */
  async transaction<T>(work: (run: Run) => Promise<T>): Promise<T> {
    const transaction = this.begin();
    let broken = false;
    const breaks = () => {
      broken = true;
      this.end(transaction, 'rollback');
    };
    const send = async <T>(name: string, effect: () => T | Promise<T>, idle?: boolean): Promise<T> =>
      broken ? lostConnection() : this.send(name, effect, breaks, idle);
    try {
      const result = await work((name, effect, idle) => send(name, () => this.tables.statement(transaction, effect), idle));
      await send('commit', () => {
        if (transaction.ended) throw databaseError('25P03', 'the transaction was ended by the server');
        this.end(transaction, 'commit');
      });
      return result;
    } catch (error) {
      await send('rollback', () => this.end(transaction, 'rollback'), true).catch(() => undefined);
      throw error;
    } finally {
      this.end(transaction, 'rollback');
    }
  }

  /** Called after a crash of the process: the server rolls back its transactions. */
  breakConnections(): void {
    for (const transaction of this.open) this.tables.end(transaction, 'rollback');
    this.open.clear();
    this.tables.listeners.delete(this.process);
  }

  private begin(): Transaction {
    const transaction = this.tables.begin();
    this.open.add(transaction);
    return transaction;
  }

  private end(transaction: Transaction, how: 'commit' | 'rollback'): void {
    this.tables.end(transaction, how);
    this.open.delete(transaction);
  }

  private send<T>(name: string, effect: () => T | Promise<T>, breaks: () => void, idle = false): Promise<T> {
    const failed = () => {
      breaks();
      return lostConnection();
    };
    return this.sim.call(this.process, { store: 'tables', name, idle, effect, failed });
  }
}

// ------------------------------------------------------------------------------------------------------------------------------------
// Checkpoints.

export const simulatedCheckpoint = (database: Database, name: string): Checkpoint<Run> => {
  const { run, tables } = database;
  const { checkpoints, failures } = tables;
  const unresolved = () => failures.filter((one) => one.name === name && !one.isResolved).sort((a, b) => (a.position < b.position ? -1 : 1));
  const isLeased = (row: CheckpointRow | undefined) => row !== undefined && row.leaseUntil !== null && row.leaseUntil >= tables.now;
  /** Locks the row until the end of the transaction, and reads it. */
  const locked = async (transaction: Transaction) => {
    await tables.lock(`checkpoint ${name}`, transaction);
    return checkpoints.get(name);
  };
  const start = (epoch: number): CheckpointRow => ({ position: '', epoch, owner: null, leaseUntil: null, updatedAt: tables.now, event: null });

  const advance = async (run: Run, from: Place, to: Position, { owner, ms }: Lease, last: Mark | null) => {
    const moved = await run('checkpoint.advance', async (transaction) => {
      const row = await locked(transaction);
      if (row?.position !== from.position || String(row.epoch) !== from.epoch) return false;
      const move = () => {
        Object.assign(row, { position: to, updatedAt: tables.now, ...(row.owner === owner && { leaseUntil: tables.now + ms }), ...(last && { event: { position: last.position, id: last.id } }) }); // prettier-ignore
        for (const failure of unresolved()) if (failure.position <= to) failure.isResolved = true;
      };
      if (tables.splitTransactions) move();
      else transaction.writes.push(move);
      return true;
    });
    if (!moved) throw new Moved();
  };

  return {
    // A subscriber makes these calls all the time. So they count as polls and are no crash points. A crash at the work that follows has the same
    // effect.
    ...port<Omit<Checkpoint, 'commit'>>('checkpoint', run, ['take', 'renew', 'release', 'look', 'position', 'recordFailure', 'status'], {
      take: async (transaction, { owner, ms }) => {
        const isHeldByAnother = (row?: CheckpointRow) => row?.owner !== owner && isLeased(row);
        if (isHeldByAnother(checkpoints.get(name))) return null;
        const row = (await locked(transaction)) ?? start(0);
        if (isHeldByAnother(row)) return null;
        const taken = { ...row, owner, epoch: row.epoch + (row.owner === owner ? 0 : 1), leaseUntil: tables.now + ms };
        transaction.writes.push(() => checkpoints.set(name, taken));
        return { position: taken.position, epoch: String(taken.epoch) };
      },
      renew: async (transaction, { owner, ms }, epoch) => {
        const row = await locked(transaction);
        if (row?.owner !== owner || String(row.epoch) !== epoch) return false;
        transaction.writes.push(() => (row.leaseUntil = tables.now + ms));
        return true;
      },
      release: async (transaction, owner) => {
        const row = await locked(transaction);
        if (row?.owner === owner) transaction.writes.push(() => Object.assign(row, { owner: null, leaseUntil: null }));
      },
      look: ({ writes }) => {
        const row = checkpoints.get(name) ?? start(0);
        writes.push(() => checkpoints.has(name) || checkpoints.set(name, row));
        return { position: row.position, epoch: String(row.epoch), leased: isLeased(row) };
      },
      position: () => checkpoints.get(name)?.position ?? '',
      recordFailure: ({ writes }, { event, message }) => {
        const position = event?.position ?? checkpoints.get(name)?.position ?? '';
        writes.push(() => {
          for (const failure of unresolved()) if (failure.position === position) failure.isResolved = true;
          failures.push({ name, position, eventId: event?.id ?? null, message, failedAt: tables.now, isResolved: false });
        });
      },
      status: () => {
        const row = checkpoints.get(name);
        const [failure] = unresolved();
        return {
          position: asPosition(row?.position ?? ''),
          epoch: BigInt(row?.epoch ?? 0),
          leased: isLeased(row),
          updatedAt: row ? new Date(row.updatedAt) : null,
          failure: failure
            ? { position: asPosition(failure.position), eventId: failure.eventId, message: failure.message, failedAt: new Date(failure.failedAt) }
            : null,
        };
      },
    }),

    commit: (from, to, lease, apply, last = null) => {
      if (!apply) return advance(run, from, to, lease, last);
      return database.transaction(async (run) => {
        await advance(run, from, to, lease, last);
        const answers = () =>
          run('ping', () => true, true).then(
            () => true,
            () => false,
          );
        await runHandler(() => apply(run), answers);
      });
    },
  };
};

const asPosition = (text: string): Position | null => (text === '' ? null : (text as Position));

// ------------------------------------------------------------------------------------------------------------------------------------
// The list, sessions without an outcome, and contents of checkouts.

export const simulatedListRows = ({ list }: Tables, run: Run): PaymentListRows =>
  port<PaymentListRows>('list', run, ['read', 'page'], {
    read: (_, paymentIds) =>
      paymentIds.flatMap((paymentId) => {
        const row = list.get(paymentId);
        return row ? { paymentId, revision: row.revision, payment: JSON.parse(row.state) as PaymentRow['payment'] } : [];
      }),

    write: ({ writes }, rows) => {
      const written = rows.map((row) => {
        const [paymentId, accountId, portalId, createdAt, status, openAttemptId, openSince, , state] = paymentListRow(row);
        return { paymentId, accountId, portalId, createdAt, status, openAttemptId, openSince, revision: row.revision, state } as ListRow;
      });
      writes.push(() => {
        for (const row of written) {
          const before = list.get(row.paymentId);
          if (!before || before.revision < row.revision) list.set(row.paymentId, row);
        }
      });
    },

    page: (_, accountId, { portalId, status, from, to }, after, limit) => {
      const found = [...list.values()]
        .filter((row) => row.accountId === accountId)
        .map((row) => ({ ...row, at: Date.parse(row.createdAt) }))
        .filter((row) => (portalId === null || row.portalId === portalId) && (status === null || row.status === status))
        .filter((row) => (from === null || row.at >= from) && (to === null || row.at < to))
        .filter((row) => after === null || row.at < after.createdAt || (row.at === after.createdAt && row.paymentId < after.id))
        .sort((a, b) => b.at - a.at || (a.paymentId < b.paymentId ? 1 : -1))
        .slice(0, limit + 1);
      let bytes = 0;
      const tooMany = found.findIndex(({ state }, index) => (bytes += Buffer.byteLength(state)) > PAGE_BYTES && index > 0);
      const rows = found.slice(0, tooMany < 0 ? limit : Math.min(limit, tooMany));
      return {
        rows: rows.map(({ paymentId, state }) => ({ paymentId, payment: JSON.parse(state) as PaymentRow['payment'] })),
        hasMore: rows.length < found.length,
      };
    },
  });

export const simulatedUnfinishedRows = ({ unfinished }: Tables, run: Run): UnfinishedRows =>
  port<UnfinishedRows>('unfinished', run, ['page'], {
    write: ({ writes }, sessions) => void writes.push(() => sessions.forEach((session) => unfinished.set(session.checkoutId, session))),
    remove: ({ writes }, checkoutIds) => void writes.push(() => checkoutIds.forEach((checkoutId) => unfinished.delete(checkoutId))),
    page: (_, after, until, limit) =>
      [...unfinished.values()]
        .filter(({ since, checkoutId }) => !after || since > after.since || (since === after.since && checkoutId > after.checkoutId))
        .filter(({ since }) => since <= until)
        .sort((a, b) => (a.since < b.since ? -1 : a.since > b.since ? 1 : a.checkoutId < b.checkoutId ? -1 : 1))
        .slice(0, limit)
        .map(({ checkoutId, since }) => ({ checkoutId, since })),
  });

export const simulatedPersonalKeyRows = ({ personalKeys, erasedKeys }: Tables, run: Run): PersonalKeyRows =>
  port<PersonalKeyRows>('personal', run, ['find'], {
    insert: ({ writes }, keys) => {
      const twice = keys.find(({ keyId }) => personalKeys.has(keyId));
      if (twice) throw new Error(`key ${twice.keyId} is there already`);
      writes.push(() => keys.forEach((key) => personalKeys.set(key.keyId, key)));
    },
    find: (_, keyIds) => keyIds.map((keyId) => ({ keyId, key: personalKeys.get(keyId) ?? null, erasedAt: erasedKeys.get(keyId) ?? null })),
    discard: ({ writes }, keyIds) => void writes.push(() => keyIds.forEach((keyId) => personalKeys.delete(keyId))),
    forget: ({ writes }, keyIds, { at }) =>
      void writes.push(() =>
        keyIds.forEach((keyId) => {
          personalKeys.delete(keyId);
          if (!erasedKeys.has(keyId)) erasedKeys.set(keyId, at);
        }),
      ),
  });

export const simulatedIntakeRows = ({ intakes }: Tables, run: Run): IntakeRows =>
  port<IntakeRows>('intakes', run, ['read'], {
    write: ({ writes }, row) => void writes.push(() => intakes.set(`${row.checkoutId} ${row.hash}`, row)),
    read: (_, checkoutId) => new Map([...intakes.values()].filter((row) => row.checkoutId === checkoutId).map(({ hash, text }) => [hash, text])),
    purge: ({ writes }, now, limit) => {
      const due = [...intakes]
        .filter(([, { purgeAt }]) => purgeAt <= now)
        .sort(([, a], [, b]) => (a.purgeAt < b.purgeAt ? -1 : 1))
        .slice(0, limit);
      writes.push(() => due.forEach(([key]) => intakes.delete(key)));
      return due.map(([, { checkoutId, hash, text }]) => ({ checkoutId, hash, keyId: keyOfContent(text) }));
    },
  });
