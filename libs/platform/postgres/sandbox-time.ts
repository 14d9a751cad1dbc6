/**
 * The time of a sandbox (docs/decisions/0048-two-clocks.md). One row says how far business time is ahead of the hosts' clocks. `payfold sandbox advance`
 * raises it, and every process of the sandbox follows.
 *
 * Two advisory locks let all processes move at one moment. A process holds a share of RUNNING while work that moves money may begin in it. The command
 * takes MOVING. The processes see that, let no more work begin, and give up their share when the work under way has ended. When the command holds
 * RUNNING alone, it changes the row. Then each process takes a share again, reads the row, and goes on.
 *
 * The locks end with their connection. So a killed command or process blocks no other one.
 */
import { type Clock, orStopped, SandboxClock, ServiceError, systemClock, timestamp } from '#kernel';
import type { Logger } from '../logging.js';
import type { Client, Pool, Queryable } from './pool.js';
import type { Migration } from './schema.js';

export const sandboxTimeMigration: Migration = {
  name: '0013-sandbox-time',
  sql: `
    create table sandbox_time (one bool primary key default true check (one), ahead_ms bigint not null default 0 check (ahead_ms >= 0));
    insert into sandbox_time default values;
  `,
};

const MOVING = 7_205_113;
const RUNNING = 7_205_114;

/** Each process tries the locks this often: `open` while work may begin, `closed` while it may not. */
const LOOK_EVERY_MS = { open: 500, closed: 100 };
/** The same failure is logged at most once in this time. */
const REPORT_EVERY_MS = 60_000;
/** The command waits this long for the lock that another command may hold. */
const OTHER_COMMAND_MS = 5_000;
/** The command waits this long for the work under way: longer than a request lasts with the append of its outcome. */
const UNDER_WAY_MS = 45_000;
const POLL_MS = 50;
/** Longest move. Time never goes back, so a typing error in the year must be refused. */
const MAX_STEP_DAYS = 366;
const DAY_MS = 86_400_000;

const aheadIn = async (db: Queryable): Promise<number> => {
  const { rows } = await db.query<{ ahead_ms: string }>('select ahead_ms from public.sandbox_time');
  return Number(rows[0]!.ahead_ms);
};

const says = async (db: Queryable, question: string, lock: number): Promise<boolean> => {
  const { rows } = await db.query<{ yes: boolean }>(`select ${question}($1) as yes`, [lock]);
  return rows[0]!.yes;
};

/** For production, whose time never moves. Throws if the database is one of a sandbox whose time was moved. */
export const refuseMovedTime = async (db: Queryable): Promise<void> => {
  const aheadMs = await aheadIn(db);
  if (aheadMs > 0)
    throw new Error(`the time of this database was moved ahead by ${Math.ceil(aheadMs / DAY_MS)} days with payfold sandbox advance; production does not start on it`); // prettier-ignore
};

/** A clock with the business time of the database, for a command that only writes an event. */
export const clockOf = async (db: Queryable): Promise<Clock> => {
  const clock = new SandboxClock();
  clock.moveTo(await aheadIn(db));
  return clock;
};

/** Keeps one process at the time of its sandbox. */
export class SandboxTime {
  readonly clock: SandboxClock;
  private open = false;
  /** True while this process holds its share of RUNNING. */
  private shares = false;
  private underWay = 0;
  private closed = new AbortController();
  /** The connection that holds the share. */
  private client: Client | null = null;
  private wake = new AbortController();
  private readonly watchers = new Set<() => void>();
  private readonly stopped = new AbortController();
  private following: Promise<void> = Promise.resolve();

  constructor(
    /** null: in a command, which logs nothing. */
    private readonly log: Pick<Logger, 'info' | 'warn'> | null,
    host: Clock = systemClock,
  ) {
    this.clock = new SandboxClock(host);
  }

  /** False while the time is moved, and while this process cannot read it. */
  get isOpen(): boolean {
    return this.open;
  }

  /** Aborts as soon as the time begins to move: for work that takes long and can go on later. */
  get closing(): AbortSignal {
    return this.closed.signal;
  }

  /** `watcher` is called after each move. */
  watch(watcher: () => void): void {
    this.watchers.add(watcher);
  }

  /** Runs work that may move money. If it may not begin now, throws `refused()`. */
  async run<T>(work: () => Promise<T>, refused: () => Error): Promise<T> {
    if (!this.open) throw refused();
    this.underWay += 1;
    try {
      return await work();
    } finally {
      this.underWay -= 1;
    }
  }

  /** Resolves when this process has the time of the database. Uses one connection of the pool from then on. */
  async begin(pool: Pool, stop?: AbortSignal): Promise<void> {
    try {
      const look = () => orStopped(this.look(pool), stop);
      for (await look(); !this.open; await look()) await orStopped(this.clock.sleep(LOOK_EVERY_MS.closed), stop);
    } catch (error) {
      this.lose();
      throw error;
    }
    this.following = this.follow(pool);
  }

  /** Resolves when the time of this process is this far ahead, or when it stops. */
  async reaches(aheadMs: number): Promise<void> {
    while (!(this.open && this.clock.aheadMs >= aheadMs) && !this.stopped.signal.aborted) await this.clock.sleep(POLL_MS);
  }

  async stop(): Promise<void> {
    this.stopped.abort();
    this.wake.abort();
    // A database that does not answer must not hold up the end: closing the connection ends its statement.
    this.lose();
    await this.following;
  }

  private async follow(pool: Pool): Promise<void> {
    const { clock, log } = this;
    let reportedAt = Number.NEGATIVE_INFINITY;
    while (!this.stopped.signal.aborted) {
      await clock.sleep(this.open ? LOOK_EVERY_MS.open : LOOK_EVERY_MS.closed, this.wake.signal);
      if (this.stopped.signal.aborted) break;
      this.wake = new AbortController();
      await this.look(pool).catch((error: unknown) => {
        this.lose();
        if (clock.monotonic() - reportedAt < REPORT_EVERY_MS) return;
        reportedAt = clock.monotonic();
        log?.warn({ err: error }, 'the time of the sandbox cannot be read; nothing that moves money begins');
      });
    }
    this.lose();
  }

  private async connect(pool: Pool): Promise<Client> {
    const client = (this.client = await pool.connect());
    // The share ends with the connection.
    const ended = () => {
      if (this.client !== client) return;
      this.lose();
      this.wake.abort();
    };
    client.once('error', ended);
    client.once('end', ended);
    return client;
  }

  /** Closes the connection, and with it the share. */
  private lose(): void {
    const { client } = this;
    this.client = null;
    this.shares = false;
    this.close();
    client?.release(true);
  }

  private close(): void {
    this.open = false;
    this.closed.abort('the time is moved');
  }

  private reopen(): void {
    if (this.closed.signal.aborted) this.closed = new AbortController();
    this.open = true;
  }

  private async look(pool: Pool): Promise<void> {
    const client = this.client ?? (await this.connect(pool));
    const isMoving = !(await says(client, 'pg_try_advisory_xact_lock_shared', MOVING));
    if (this.shares) {
      if (isMoving) this.close();
      else this.reopen();
      if (!isMoving || this.underWay > 0) return;
      await client.query('select pg_advisory_unlock_shared($1)', [RUNNING]);
      this.shares = false;
    } else if (!isMoving && (await says(client, 'pg_try_advisory_lock_shared', RUNNING))) {
      // The row is read under the share: it cannot change before this process gives its share up.
      const aheadMs = await aheadIn(client);
      // Without its connection, the process has no share.
      if (this.client !== client) return;
      // The connection was lost, and the time was moved meanwhile. The work under way ends at the time at which it began.
      if (this.underWay > 0 && aheadMs !== this.clock.aheadMs) {
        await client.query('select pg_advisory_unlock_shared($1)', [RUNNING]);
        return;
      }
      this.shares = true;
      this.reopen();
      if (!this.clock.moveTo(aheadMs)) return;
      this.log?.info({ aheadMs, now: timestamp(this.clock.now()) }, 'the time of the sandbox was moved ahead');
      for (const watcher of this.watchers) watcher();
    }
  }
}

export interface MovedTime {
  readonly from: string;
  readonly to: string;
  /** How far business time is ahead of the host's clock now. */
  readonly aheadMs: number;
}

/**
 * Moves business time to `toMs`, in one transaction with `move`. Throws INVALID_STATE or VALIDATION_ERROR if nothing was moved. If the connection
 * breaks during the commit, the error is of the database, and the time may have moved.
 */
export const advanceSandboxTime = async (
  pool: Pool,
  clock: Clock,
  toMs: number,
  move: (client: Client, spanMs: number) => Promise<void>,
): Promise<MovedTime> => {
  const client = await pool.connect();
  try {
    const take = async (lock: number, forMs: number, refusal: string) => {
      for (const until = clock.monotonic() + forMs; !(await says(client, 'pg_try_advisory_lock', lock)); await clock.sleep(POLL_MS))
        if (clock.monotonic() >= until) throw new ServiceError('INVALID_STATE', `${refusal}; nothing was moved.`);
    };
    // Postgres ends a transaction that says nothing for a minute. So a command that is suspended holds nobody up for longer.
    await client.query('begin');
    await take(MOVING, OTHER_COMMAND_MS, 'Another command is moving the time');
    await take(RUNNING, UNDER_WAY_MS, 'Work that began before does not end; try again');
    const before = await aheadIn(client);
    const fromMs = clock.realNow() + before;
    const spanMs = toMs - fromMs;
    if (spanMs <= 0) throw new ServiceError('VALIDATION_ERROR', `Time goes forward only: it is ${timestamp(fromMs)} now.`);
    if (spanMs > MAX_STEP_DAYS * DAY_MS)
      throw new ServiceError('VALIDATION_ERROR', `--to must be at most ${MAX_STEP_DAYS} days ahead: it is ${timestamp(fromMs)} now.`);
    await client.query('update public.sandbox_time set ahead_ms = $1', [before + spanMs]);
    await move(client, spanMs);
    await client.query('commit');
    return { from: timestamp(fromMs), to: timestamp(toMs), aheadMs: before + spanMs };
  } finally {
    // Closing the connection rolls back what was not committed, and frees both locks.
    client.release(true);
  }
};
