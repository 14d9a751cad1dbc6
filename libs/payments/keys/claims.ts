/**
 * Decides whether keys may be claimed. The database of the keys "goes back" if it is restored to an earlier state. Rows of keys may then be missing,
 * although their intents are in the log. The same is possible after an exchange of the database, and at a start. No key is claimed until the
 * subscriber `keys` has made these rows (C76).
 *
 * To open claims, a process reads the log's head. It then waits until the subscriber's checkpoint has reached that head. The checkpoint is in the
 * same database and goes back with it.
 *
 * After the database went back, requests with earlier claims may still append intents until their lease ends. So the head is read only after one
 * lease time.
 *
 * The place of a database is its cluster id, its timeline and its position in the write-ahead log. A process reads the place over every new
 * connection, and once a second over an open one. If the place does not follow the furthest known place, the database went back. The process then
 * closes the claims of all processes. It also replaces its own connections, since old ones may lead to the former server.
 *
 * A server that was started again may have lost its last commits, and the position does not always show it: other writes may have passed the known
 * position. So after each start of the server, a process closes its own claims until the subscriber has reached the head that is read after that.
 */
import { readFileSync } from 'node:fs';
import { mkdir, rename, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { pid } from 'node:process';
import type { EventStore, LogGate, Subscriber } from '#eventstore';
import type { Clock } from '#kernel';
import {
  type DatabasePlace,
  databasePlace,
  DatabaseUnavailable,
  endConnections,
  follows,
  type Logger,
  type Migration,
  type Pool,
  type PoolOptions,
  type Queryable,
} from '#platform';
import { LEASE_SECONDS } from './key-store.js';
import { KEYS_FROM_LOG } from './from-log.js';

/** Time between two reads of the database's place, while claims are open and while they are closed. */
const LOOK_EVERY_MS = { open: 1_000, closed: 250 };
/** A start waits at most this long for claims to open. Then the process starts with closed claims. */
const START_WAIT_MS = 3_000;
/** Time limit of one try to bring the subscriber to the head. The next try continues from there. */
const CATCH_UP_MS = 2_000;
/** A message is logged at most once in this time. */
const REPORT_EVERY_MS = 60_000;

export const claimsMigration: Migration = {
  name: '0034-key-claims',
  sql: `
    -- When a process last noticed that the database went back. Every process closes its claims then.
    create table key_claims (one bool primary key default true check (one), noticed_at timestamptz);
    insert into key_claims default values;
  `,
};

export interface Claims {
  /** true: a key may be claimed. */
  readonly isOpen: boolean;
  /**
   * true: the database of the keys may go back while the log does not. Then a request must hold its key when its intent is in the log. Otherwise a
   * process that stood still since its claim could charge for a key that has been claimed anew.
   */
  readonly mayBeLost: boolean;
  /** Starts the gate if it is not running. Resolves when claims are open, but after 3 s at the latest. */
  begun(): Promise<void>;
}

/** The port to the database of the keys. */
export interface ClaimsDatabase {
  place(): ReturnType<typeof databasePlace>;
  /** When a process last noticed that the database went back: the time as text, and the seconds since then. null: never. */
  noticed(): Promise<{ readonly at: string | null; readonly secondsAgo: number | null }>;
  /** Records that the database went back, for all processes. */
  notice(): Promise<void>;
  /** The checkpoint of the subscriber `keys`, over a connection of the keys. Another pool may lead to another server. */
  position(): Promise<string>;
  /** Ends all connections, since old ones may lead to a server that was replaced. */
  reconnect(): void;
}

/** Keeps the place of the database in a file. The file outlives the process, and does not go back with the database. */
export interface KeptPlace {
  /** null: no place was kept yet. `damaged`: the kept place cannot be read. */
  read(): DatabasePlace | null | 'damaged';
  write(place: DatabasePlace): Promise<void>;
}

export interface ClaimsGateOptions {
  readonly database: ClaimsDatabase;
  readonly kept: KeptPlace;
  readonly store: Pick<EventStore, 'head'>;
  /** The subscriber that makes keys from the log. */
  readonly keys: Pick<Subscriber, 'runUntil'>;
  readonly ownLog: Pick<LogGate, 'incident'>;
  readonly clock: Clock;
  readonly log: Pick<Logger, 'info' | 'warn' | 'error'>;
  /** true: the log is in the database of the keys, so both go back together. */
  readonly isWithLog?: boolean;
  /** A simulation sets longer times, to compare less often. */
  readonly lookEveryMs?: typeof LOOK_EVERY_MS;
}

export class ClaimsGate implements Claims {
  isOpen = false;
  readonly mayBeLost: boolean;
  /** The furthest place of the database that this process knows. */
  private seen: DatabasePlace | null;
  private written = '';
  /** The number of times that this process closed its claims, for a loss or a restart. */
  private closings = 0;
  /** Ends the pause before the next look. */
  private wake = new AbortController();
  /** True while a loss that this process noticed is not recorded in the database. */
  private untold = false;
  /** The newest notice in the database when this process opened its claims. */
  private openedAfter: string | null = null;
  private readonly stopped = new AbortController();
  private running: { readonly begun: Promise<void>; readonly done: Promise<void> } | null = null;
  private readonly reportedAt = new Map<string, number>();

  constructor(private readonly options: ClaimsGateOptions) {
    this.mayBeLost = options.isWithLog !== true;
    const kept = options.kept.read();
    this.seen = kept === 'damaged' ? null : kept;
    // The kept place cannot be read, so a loss would not be recognised. The process acts as after a loss.
    if (kept === 'damaged') this.notice(null, null);
  }

  /** Checks a new connection. Throws if the database behind it went back, or is a standby. */
  readonly verify = async (place: ClaimsDatabase['place']): Promise<void> => {
    if (!(await this.isSameDatabase(place))) throw new DatabaseUnavailable('the database of the keys went back');
  };

  begun(): Promise<void> {
    if (!this.running) {
      let begun: () => void = () => undefined;
      const opening = new Promise<void>((resolve) => (begun = resolve));
      this.running = { begun: opening, done: this.run(begun) };
    }
    return this.running.begun;
  }

  async stop(): Promise<void> {
    this.stopped.abort();
    this.wake.abort();
    await this.running?.done;
  }

  private async run(begun: () => void): Promise<void> {
    const { clock, lookEveryMs = LOOK_EVERY_MS } = this.options;
    const { signal } = this.stopped;
    const until = clock.monotonic() + START_WAIT_MS;
    const timer = new AbortController();
    void clock.sleep(START_WAIT_MS, timer.signal).then(begun);
    while (!signal.aborted) {
      this.wake = new AbortController();
      await this.look().catch((error: unknown) => this.report('the keys cannot be compared with the log', { err: error }, 'warn'));
      if (this.isOpen || clock.monotonic() >= until) {
        begun();
        timer.abort();
      }
      await this.keepPlace().catch((error: unknown) => this.report('the place of the database could not be kept', { err: error }, 'warn'));
      await clock.sleep(this.isOpen ? lookEveryMs.open : lookEveryMs.closed, this.wake.signal);
    }
    begun();
    timer.abort();
    await this.keepPlace().catch(() => undefined);
  }

  // ---- the database

  /** false: the database went back, or is another one. Claims are closed then. */
  private async isSameDatabase(ask: ClaimsDatabase['place']): Promise<boolean> {
    // Connections may be checked at the same time. Each place must follow the one that was known before its query.
    const before = this.seen;
    const place = await ask();
    if (place === 'standby') throw new DatabaseUnavailable('the database of the keys is a standby');
    if (place === 'hidden') {
      this.report(
        'the database does not tell its place, so a restored or promoted one is noticed at a start only: grant pg_control_system()',
        {},
        'error',
      );
      return true;
    }
    const isSame = before === null || follows(place, before);
    if (!isSame) this.notice(before, place);
    else if (this.seen !== null && place.startedAt !== this.seen.startedAt) this.close();
    if (this.seen === null || follows(place, this.seen) || !isSame) this.seen = place;
    return isSame;
  }

  /** Closes claims. `before`: the known place; null: the kept place cannot be read. `now`: the place that the database shows. */
  private notice(before: DatabasePlace | null, now: DatabasePlace | null): void {
    this.close();
    this.untold = true;
    this.options.database.reconnect();
    this.report(
      `${before === null ? 'the kept place of the database of the keys is damaged' : 'the database of the keys went back or was exchanged'}: requests with a key get 503 until their keys are made from the log, for at least ${LEASE_SECONDS} s`,
      { before, now },
      'error',
    );
  }

  private close(): void {
    this.isOpen = false;
    this.closings += 1;
    // Claims are to be opened again as soon as possible.
    this.wake.abort();
  }

  /** Opens claims if that is safe now. Closes them if another process has noticed that the database went back. */
  private async look(): Promise<void> {
    const { database, store, keys, ownLog, log } = this.options;
    if (!(await this.isSameDatabase(() => database.place()))) return;
    const { closings } = this;
    if (this.untold) {
      await database.notice();
      if (closings === this.closings) this.untold = false;
    }
    const noticed = await database.noticed();
    if (this.isOpen && noticed.at === this.openedAfter) return;
    if (this.isOpen) log.warn('another process noticed that the database of the keys went back: claims are closed');
    this.isOpen = false;
    if (noticed.secondsAgo !== null && noticed.secondsAgo < LEASE_SECONDS) return;
    if (ownLog.incident) return;
    const head = await store.head();
    if (head !== null && (await database.position()) < head) {
      await keys.runUntil(head, { timeoutMs: CATCH_UP_MS });
      if ((await database.position()) < head) return;
    }
    if ((await database.noticed()).at !== noticed.at || closings !== this.closings) return;
    this.openedAfter = noticed.at;
    this.isOpen = true;
    if (noticed.at !== null || closings > 0) log.info({ head }, 'keys are claimed again: the log holds no other');
  }

  private async keepPlace(): Promise<void> {
    const text = JSON.stringify(this.seen);
    // The file keeps the old place until the notice is recorded in the database. If the process ends earlier, its next start notices the loss again.
    if (this.seen === null || this.untold || text === this.written) return;
    await this.options.kept.write(this.seen);
    this.written = text;
  }

  private report(message: string, fields: object, level: 'warn' | 'error'): void {
    const { clock, log } = this.options;
    if (clock.monotonic() - (this.reportedAt.get(message) ?? Number.NEGATIVE_INFINITY) < REPORT_EVERY_MS) return;
    this.reportedAt.set(message, clock.monotonic());
    log[level](fields, message);
  }
}

/** `pools`: the pools of the keys. The first pool is for claims. */
export const postgresClaims = (pools: readonly [Pool, ...Pool[]]): ClaimsDatabase => ({
  place: () => databasePlace(pools[0]),
  noticed: async () => {
    const { rows } = await pools[0].query<{ at: string | null; seconds_ago: number | null }>({
      name: 'key-claims',
      text: 'select noticed_at::text as at, extract(epoch from clock_timestamp() - noticed_at)::float8 as seconds_ago from key_claims',
    });
    return { at: rows[0]!.at, secondsAgo: rows[0]!.seconds_ago };
  },
  notice: async () => {
    await pools[0].query('update key_claims set noticed_at = clock_timestamp()');
  },
  position: async () => {
    const { rows } = await pools[0].query<{ position: string }>({
      name: 'key-checkpoint',
      text: 'select position from projection_checkpoint where name = $1',
      values: [KEYS_FROM_LOG],
    });
    return rows[0]?.position ?? '';
  },
  reconnect: () => pools.forEach(endConnections),
});

/** In `MARKS_DIR`. */
const PLACE_FILE = 'keys-database';

export const placeFile = (folder: string): KeptPlace => {
  const file = join(folder, PLACE_FILE);
  return {
    read: () => {
      try {
        return JSON.parse(readFileSync(file, 'utf8')) as DatabasePlace;
      } catch (error) {
        if ((error as NodeJS.ErrnoException).code === 'ENOENT') return null;
        if (error instanceof SyntaxError) return 'damaged';
        throw new Error(`${file} cannot be read: ${(error as Error).message}`, { cause: error });
      }
    },
    write: async (place) => {
      await mkdir(folder, { recursive: true, mode: 0o700 });
      await writeFile(`${file}.${pid}`, JSON.stringify(place), { mode: 0o600, flush: true });
      await rename(`${file}.${pid}`, file);
    },
  };
};

/** Opens the pools of the keys, and the gate that checks each of their connections. */
export const openClaims = (
  open: (which: 'claims' | 'completions', verify: NonNullable<PoolOptions['verify']>) => Pool,
  folder: string,
  options: Omit<ClaimsGateOptions, 'database' | 'kept'>,
): { readonly claims: ClaimsGate; readonly pool: Pool; readonly completions: Pool } => {
  const verify = (connection: Queryable): Promise<void> => claims.verify(() => databasePlace(connection));
  const pool = open('claims', verify);
  const completions = open('completions', verify);
  const claims = new ClaimsGate({ ...options, database: postgresClaims([pool, completions]), kept: placeFile(folder) });
  return { claims, pool, completions };
};
