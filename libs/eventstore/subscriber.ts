/**
 * The one way to follow the log: a projection or reactor gets events in order and writes rows; the rows and the place in the log that they stand
 * for are committed in one transaction. Delivery by the store is at least once; what counts is decided by the compare-and-set on the checkpoint:
 *
 *   update projection_checkpoint set position = $new where name = $1 and position = $old and epoch = $mine
 *
 * It is the first statement of the transaction, so a second worker waits for the row, finds another position, and has done nothing. Two workers,
 * a repeated batch, a crash between commit and answer, a worker that was asleep for an hour: none of them applies an event twice or passes one over.
 * The lease on top only saves work: with it, one worker is active per projection and the others stand by.
 *
 * Use: `const list = createSubscriber({ name: 'payment-list', streamPrefixes: ['payment-'], apply }, { store, pool })`, then in a worker
 * `list.start()` … `await list.stop()`; in a command `await list.runUntil(position, { timeoutMs })`; in a process that only reads,
 * `watchProjection` and `projectionStatus`. A rebuild runs the same `apply` from zero under another name into another schema (`searchPath`).
 */
import { systemClock, type Clock } from '#kernel';
import { DatabaseUnavailable, transaction, uuidV7, type Client, type Logger, type Migration, type Pool, type Queryable } from '#platform';
import { OutcomeUnknown, Unavailable, type EventStore, type Position, type Recorded, type SubscriptionItem } from './event-store.js';
import { BeyondTheEnd } from './codec.js';

/** Checkpoints with their leases, and the events that stopped a projection. Position '' is the start of the log. */
export const projectionCheckpointMigration: Migration = {
  name: '0011-projection-checkpoint',
  sql: `
create table projection_checkpoint (
  name text primary key,
  position text collate "C" not null,
  epoch bigint not null,
  owner uuid,
  lease_until timestamptz,
  updated_at timestamptz not null default clock_timestamp(),
  check ((owner is null) = (lease_until is null))
) with (fillfactor = 50);

create table projection_failure (
  name text not null,
  position text collate "C" not null,
  event_id uuid,
  stream text,
  type text,
  message text not null,
  stack text not null,
  attempts int not null default 1,
  failed_at timestamptz not null default clock_timestamp(),
  resolved_at timestamptz,
  primary key (name, position)
);
`,
};

/** Events per transaction; 200 to 1000 measured best, 5000 slower. */
const BATCH_EVENTS = 500;
/** A worker that died is replaced after this long; a living one renews three times as often. */
const LEASE_MS = 10_000;
/** A worker that stands by looks this often in the time of a lease whether it is free. */
const STANDBY_LOOKS = 10;
/** A place that moved without events (the filter passed none) is saved this often at most; waiters in this process need not wait for it. */
const SAVE_PLACE_MS = 250;
/** How long the last of the events that came while others lingered may take to be handed over. */
const GATHER_MS = 5;
/** How often another process' checkpoint is looked at while somebody waits for it. */
const WATCH_MS = 25;
/** A command waits for the worker that holds the lease as long as it moves on this often; else it takes part. */
const PATIENCE_MS = 250;
/** Also how far behind a projection may be when a database that was away is back. */
const BACKOFF_MS = { first: 50, most: 1_000 } as const;
/** A single event that fails is tried once more before it counts as poison. */
const POISON_ATTEMPTS = 2;

/** What follows the log. */
export interface Projection {
  readonly name: string;
  /** Key of the checkpoint; default: the name. A read model has one for each shape. */
  readonly checkpoint?: string;
  /** Streams that it gets; all of ours where it is left out. */
  readonly streamPrefixes?: readonly string[];
  /**
   * How long events wait for more, so that they are written together; default 0. Under load one transaction then serves hundreds of events instead of a few, and
   * most payments are written once instead of once per event. Nobody has to wait for it: {@link Subscriber.runUntil} and, in the process where it runs,
   * {@link Subscriber.caughtUpTo} end it.
   */
  readonly lingerMs?: number;
  /**
   * Writes the rows for events, in order, through `client`, inside the transaction that moves the checkpoint. Names of tables are unqualified, so that
   * a rebuild can aim it at another schema. Whatever it throws rolls the transaction back: an error of the connection or the server is tried again,
   * any other stops the projection at the event. Types that it does not know it ignores.
   */
  readonly apply: (client: Client, events: readonly Recorded[], log?: ProjectionLog) => Promise<void>;
}

export type ProjectionLog = Pick<Logger, 'warn'>;

export interface SubscriberOptions {
  readonly store: EventStore;
  /** Where rows and checkpoint lie. At most two connections are used at once. */
  readonly pool: Pool;
  readonly clock?: Clock;
  /** `search_path` while `apply` runs, for a rebuild into a schema of its own (`rm_list_2, public`). */
  readonly searchPath?: string;
  readonly batchEvents?: number;
  readonly leaseMs?: number;
  /** For what `apply` notices. */
  readonly log?: ProjectionLog;
  /** A UUID. Never that of another process that may be alive. Default: a new one. */
  readonly owner?: string;
  /** Hears of every error: those that are tried again, and the one that stops the projection. */
  readonly onError?: (error: Error, what: { readonly name: string; readonly retrying: boolean }) => void;
}

/** `standby`: another worker holds the lease. `failed`: stopped at an event until it is started again; not healthy. */
export type SubscriberState = 'stopped' | 'standby' | 'active' | 'failed';

export interface Subscriber {
  readonly name: string;
  readonly state: SubscriberState;
  /** Why `state` is `failed`. */
  readonly failure: ProjectionFailed | null;
  /** The error that is being retried at present, null while all is well. */
  readonly retrying: Error | null;
  /** Follows the log until {@link stop}. Starting a failed one tries again. */
  start(): void;
  /** Finishes the batch at hand, gives the lease back. */
  stop(): Promise<void>;
  /**
   * Brings the projection up to a position (of an append, or `head()`) and returns; needs no `start()`. Safe beside running workers: while one of
   * them moves on it is waited for, otherwise events are applied here, under the same compare-and-set.
   * Throws {@link ProjectionFailed} at a poison event and Unavailable when the time is up.
   */
  runUntil(until: Position, options: { timeoutMs: number; onProgress?: (position: Position) => void }): Promise<void>;
  /** True as soon as the rows contain everything up to `position`, false when the time is up. Wherever the projection runs. */
  caughtUpTo(position: Position | null, timeoutMs: number): Promise<boolean>;
  status(): Promise<ProjectionStatus>;
}

export interface ProjectionStatus {
  readonly name: string;
  /** null: nothing applied yet. */
  readonly position: Position | null;
  readonly head: Position | null;
  /** Events of all streams between the two; null where the store's positions do not count events. */
  readonly lagEvents: number | null;
  /** Age of the oldest event that is not applied yet, 0 where there is none. */
  readonly lagMs: number;
  /** Take-overs so far. */
  readonly epoch: bigint;
  /** True while some worker holds the lease. */
  readonly leased: boolean;
  readonly updatedAt: Date | null;
  readonly failure: { readonly position: Position | null; readonly eventId: string | null; readonly message: string; readonly failedAt: Date } | null;
}

/** A projection cannot go on: the event, and why (`cause`). */
export class ProjectionFailed extends Error {
  constructor(
    readonly projection: string,
    /** null: not an event, but the log itself cannot be read on. */
    readonly event: Recorded | null,
    cause: Error,
  ) {
    super(
      event ? `${projection} stopped at ${event.type} ${event.id} (${event.position}): ${cause.message}` : `${projection} stopped: ${cause.message}`,
      {
        cause,
      },
    );
    this.name = 'ProjectionFailed';
  }
}

/** A place in the log under the rule of one owner. `position` '' is the start. */
interface Place {
  readonly position: string;
  readonly epoch: string;
}

/** The compare-and-set found another position: somebody else applied, or our own commit had arrived after all. */
class Moved extends Error {}
/** The place is no longer ours: another worker took over, or the checkpoint was reset. */
class Lost extends Error {}

/** The handler's own fault, however its message reads: the connection was well. */
class HandlerFault extends Error {}

const isTransient = (error: unknown): boolean =>
  !(error instanceof HandlerFault || error instanceof ProjectionFailed) &&
  (error instanceof Unavailable || error instanceof OutcomeUnknown || error instanceof DatabaseUnavailable);

const asPosition = (text: string): Position | null => (text === '' ? null : (text as Position));

export const createSubscriber = (projection: Projection, options: SubscriberOptions): Subscriber => new LogSubscriber(projection, options);

class LogSubscriber implements Subscriber {
  readonly name: string;
  state: SubscriberState = 'stopped';
  failure: ProjectionFailed | null = null;
  retrying: Error | null = null;
  private readonly checkpoint: string;
  private readonly clock: Clock;
  private readonly owner: string;
  private readonly leaseMs: number;
  private readonly batchEvents: number;
  private readonly watch: Watch;
  private running: { stop: AbortController; done: Promise<void> } | null = null;
  /** Ends the linger at hand. */
  private wakeUp: () => void = () => undefined;
  /** A failure was recorded earlier; it is marked as resolved with the first commit that passes it. */
  private unresolved = false;

  constructor(
    private readonly projection: Projection,
    private readonly options: SubscriberOptions,
  ) {
    this.name = projection.name;
    this.checkpoint = projection.checkpoint ?? projection.name;
    this.clock = options.clock ?? systemClock;
    this.owner = options.owner ?? uuidV7(this.clock.now());
    this.leaseMs = options.leaseMs ?? LEASE_MS;
    this.batchEvents = options.batchEvents ?? BATCH_EVENTS;
    this.watch = new Watch(options.pool, this.checkpoint, this.clock);
  }

  start(): void {
    if (this.running) return;
    this.failure = null;
    const stop = new AbortController();
    this.running = { stop, done: this.run(stop.signal) };
  }

  async stop(): Promise<void> {
    const running = this.running;
    if (!running) return;
    running.stop.abort();
    await running.done;
    if (this.running === running) this.running = null;
    if (this.state !== 'failed') this.state = 'stopped';
  }

  caughtUpTo(position: Position | null, timeoutMs: number): Promise<boolean> {
    const caughtUp = this.watch.caughtUpTo(position, timeoutMs);
    if (this.watch.awaited) this.wakeUp();
    return caughtUp;
  }

  status(): Promise<ProjectionStatus> {
    const { store, pool, clock } = this.options;
    return projectionStatus({ store, pool, name: this.name, checkpoint: this.checkpoint, streamPrefixes: this.projection.streamPrefixes, clock });
  }

  // ---- working as one of several workers

  private async run(signal: AbortSignal): Promise<void> {
    for (let tries = 0; !signal.aborted;) {
      try {
        const place = await this.takeLease();
        if (!place) {
          this.state = 'standby';
          await this.clock.sleep(this.leaseMs / STANDBY_LOOKS, signal);
          continue;
        }
        this.state = 'active';
        tries = 0;
        await this.follow(place, signal);
      } catch (thrown) {
        const error = thrown instanceof BeyondTheEnd ? await this.lostOr(thrown) : thrown;
        if (error instanceof Lost || error instanceof Moved) {
          this.watch.forget();
          continue;
        }
        if (isTransient(error)) {
          await this.pause(error as Error, tries++, signal);
          continue;
        }
        await this.fail(error);
        break;
      }
    }
    await this.releaseLease();
    // A failed subscriber may be started again.
    if (this.state === 'failed') this.running = null;
  }

  /** The log ends before our place. Where the checkpoint does not reach it either, database and log went back together, and the checkpoint says where to go on. */
  private lostOr(beyond: BeyondTheEnd): Promise<unknown> {
    return this.lookUp().then(
      ({ position }) => (position < beyond.after ? new Lost() : beyond),
      (error: unknown) => error,
    );
  }

  private async follow(place: Place, stop: AbortSignal): Promise<void> {
    const ended = new AbortController();
    const subscription = this.options.store.subscribe(asPosition(place.position), { streamPrefixes: this.projection.streamPrefixes });
    const end = () => {
      ended.abort();
      void subscription.close().catch(() => undefined);
    };
    stop.addEventListener('abort', end, { once: true });
    if (stop.aborted) end();
    const renewing = this.keepLease(place, ended.signal, end);
    try {
      const items = subscription[Symbol.asyncIterator]();
      // The next batch is read while this one is written.
      const pull = () => {
        const item = items.next();
        item.catch(() => undefined);
        return item;
      };
      let next = pull();
      let seen = null as Position | null;
      let savedAt = this.clock.monotonic();
      const { lingerMs = 0 } = this.projection;
      let full = false;
      for (;;) {
        const turn: IteratorResult<SubscriptionItem, unknown> | 'late' =
          seen === null ? await next : await this.orAfter(next, savedAt + Math.max(SAVE_PLACE_MS, lingerMs));
        if (ended.signal.aborted) return;
        if (turn === 'late') {
          place = await this.moveOn(place, seen!);
          seen = null;
          savedAt = this.clock.monotonic();
          continue;
        }
        if (turn.done) return;
        next = pull();
        if (turn.value.kind === 'events') {
          const events = [...turn.value.events];
          if (lingerMs > 0) {
            // Not where a full batch shows that more than that was waiting.
            if (!full) await this.linger(lingerMs, ended.signal);
            const until = this.clock.monotonic() + GATHER_MS;
            while (events.length < this.batchEvents && !ended.signal.aborted) {
              const more = await this.orAfter(next, until);
              if (more === 'late' || more.done) break;
              next = pull();
              if (more.value.kind === 'events') events.push(...more.value.events);
              else if (more.value.kind === 'checkpoint') seen = more.value.position;
              // The end of the page that came before: what others have waited for meanwhile is behind it.
              else if (this.watch.awaited) break;
            }
            full = events.length >= this.batchEvents;
          }
          if (ended.signal.aborted) return;
          place = await this.applyAll(place, events, ended.signal);
          if (ended.signal.aborted) return;
          if (seen !== null && seen <= place.position) seen = null;
          // A checkpoint behind the events counts now that they are written.
          if (seen !== null) this.watch.passed(seen);
        } else if (turn.value.kind === 'checkpoint' && turn.value.position > place.position) {
          seen = turn.value.position;
          this.watch.passed(seen);
        }
      }
    } finally {
      stop.removeEventListener('abort', end);
      end();
      await Promise.all([subscription.close().catch(() => undefined), renewing]);
    }
  }

  /** Sleeps unless somebody in this process waits for the projection, or begins to. */
  private async linger(ms: number, stop: AbortSignal): Promise<void> {
    if (this.watch.awaited) return;
    const awake = new AbortController();
    const wake = () => awake.abort('awaited or stopped');
    this.wakeUp = wake;
    stop.addEventListener('abort', wake, { once: true });
    await this.clock.sleep(ms, stop.aborted ? stop : awake.signal);
    stop.removeEventListener('abort', wake);
  }

  private async orAfter<T>(item: Promise<T>, at: number): Promise<T | 'late'> {
    const timer = new AbortController();
    try {
      return await Promise.race([item, this.clock.sleep(Math.max(0, at - this.clock.monotonic()), timer.signal).then(() => 'late' as const)]);
    } finally {
      timer.abort('late or not');
    }
  }

  private async takeLease(): Promise<Place | null> {
    const { pool } = this.options;
    const held = await pool.query('select from projection_checkpoint where name = $1 and owner <> $2 and lease_until >= clock_timestamp()', [
      this.checkpoint,
      this.owner,
    ]);
    if (held.rowCount !== 0) return null;
    const { rows } = await pool.query<Place & { unresolved: boolean }>(
      `insert into projection_checkpoint as c (name, position, epoch, owner, lease_until)
       values ($1, '', 1, $2, clock_timestamp() + $3::int * interval '1 millisecond')
       on conflict (name) do update
         set owner = excluded.owner, lease_until = excluded.lease_until, epoch = c.epoch + (c.owner is distinct from excluded.owner)::int
         where c.owner is null or c.owner = excluded.owner or c.lease_until < clock_timestamp()
       returning position, epoch, exists (select from projection_failure f where f.name = $1 and f.resolved_at is null) as unresolved`,
      [this.checkpoint, this.owner, this.leaseMs],
    );
    if (rows[0]) this.unresolved = rows[0].unresolved;
    return rows[0] ?? null;
  }

  private async keepLease(place: Place, signal: AbortSignal, onLost: () => void): Promise<void> {
    for (;;) {
      await this.clock.sleep(this.leaseMs / 3, signal);
      if (signal.aborted) return;
      try {
        const { rowCount } = await this.options.pool.query(
          `update projection_checkpoint set lease_until = clock_timestamp() + $4::int * interval '1 millisecond' where name = $1 and owner = $2 and epoch = $3`,
          [this.checkpoint, this.owner, place.epoch, this.leaseMs],
        );
        if (rowCount === 0) return onLost();
      } catch {
        // Without the database nobody can take over either; the compare-and-set decides in any case.
      }
    }
  }

  private async releaseLease(): Promise<void> {
    await this.options.pool
      .query('update projection_checkpoint set owner = null, lease_until = null where name = $1 and owner = $2', [this.checkpoint, this.owner])
      .catch(() => undefined);
  }

  // ---- working once

  async runUntil(until: Position, { timeoutMs, onProgress }: { timeoutMs: number; onProgress?: (position: Position) => void }): Promise<void> {
    const deadline = this.clock.monotonic() + timeoutMs;
    const late = () => this.clock.monotonic() >= deadline;
    const never = new AbortController();
    let last: Error | undefined;
    let moving = null as { position: string; at: number } | null;
    let tries = 0;
    do {
      try {
        const place = await this.lookUp();
        if (place.position >= until) return this.watch.passed(place.position as Position);
        const now = this.clock.monotonic();
        if (place.leased) {
          if (place.position !== moving?.position) moving = { position: place.position, at: now };
          if (now - moving.at < PATIENCE_MS) {
            if (place.position !== '') onProgress?.(place.position as Position);
            // The worker may be this one.
            this.wakeUp();
            await this.clock.sleep(WATCH_MS);
            continue;
          }
        }
        await this.takePart(place, until, late, onProgress);
        tries = 0;
      } catch (error) {
        if (error instanceof Lost || error instanceof Moved) continue;
        if (!isTransient(error)) throw await this.record(error);
        last = error as Error;
        await this.pause(last, tries++, never.signal);
      }
    } while (!late());
    throw new Unavailable(`${this.name} did not reach ${until} within ${timeoutMs} ms${last ? `: ${last.message}` : ''}`, { cause: last });
  }

  private async takePart(place: Place, until: Position, late: () => boolean, onProgress?: (position: Position) => void): Promise<void> {
    const pages = this.options.store.readAll(asPosition(place.position), { until, streamPrefixes: this.projection.streamPrefixes });
    for await (const events of readAhead(pages)) {
      place = await this.applyAll(place, events, null);
      onProgress?.(place.position as Position);
      if (late()) return;
    }
    if (place.position < until) await this.moveOn(place, until);
  }

  /** Where the projection stands, made where it never ran. */
  private async lookUp(): Promise<Place & { leased: boolean }> {
    const { pool } = this.options;
    for (;;) {
      const { rows } = await pool.query<Place & { leased: boolean; unresolved: boolean }>(
        `select position, epoch, coalesce(lease_until >= clock_timestamp(), false) as leased,
                exists (select from projection_failure f where f.name = c.name and f.resolved_at is null) as unresolved
         from projection_checkpoint c where name = $1`,
        [this.checkpoint],
      );
      if (rows[0]) {
        this.unresolved = rows[0].unresolved;
        return rows[0];
      }
      await pool.query(`insert into projection_checkpoint (name, position, epoch) values ($1, '', 0) on conflict do nothing`, [this.checkpoint]);
    }
  }

  // ---- applying

  /**
   * Applies events in as few transactions as it can. A batch that fails for a reason of its own is halved until the event that cannot be applied stands
   * alone; those before it are committed. Returns early when `stop` aborts (between transactions).
   */
  private async applyAll(place: Place, events: readonly Recorded[], stop: AbortSignal | null): Promise<Place> {
    let rest = events.filter(({ position }) => position > place.position);
    let size = this.batchEvents;
    for (let [tries, attempts] = [0, 0]; rest.length > 0 && !stop?.aborted;) {
      const batch = rest.slice(0, size);
      try {
        place = await this.commit(place, batch, batch.at(-1)!.position);
        rest = rest.slice(batch.length);
        size = Math.min(this.batchEvents, size * 2);
        tries = attempts = 0;
      } catch (error) {
        if (error instanceof Moved) {
          place = await this.catchUpWith(place);
          rest = rest.filter(({ position }) => position > place.position);
        } else if (isTransient(error)) {
          // Outside of a worker the caller decides how long to go on.
          if (!stop) throw error;
          await this.pause(error as Error, tries++, stop);
        } else if (batch.length > 1) size = Math.ceil(batch.length / 2);
        else if (++attempts >= POISON_ATTEMPTS) throw new ProjectionFailed(this.name, batch[0]!, causeOf(error));
      }
    }
    return place;
  }

  private async moveOn(place: Place, to: Position): Promise<Place> {
    try {
      return await this.commit(place, [], to);
    } catch (error) {
      if (error instanceof Moved) return this.catchUpWith(place);
      throw error;
    }
  }

  private async commit(place: Place, events: readonly Recorded[], to: Position): Promise<Place> {
    const { pool } = this.options;
    if (events.length === 0 && !this.unresolved) await this.advance(pool, place, to);
    else
      await transaction(pool, async (client) => {
        await this.advance(client, place, to);
        if (this.unresolved)
          await client.query(
            'update projection_failure set resolved_at = clock_timestamp() where name = $1 and resolved_at is null and position <= $2',
            [this.checkpoint, to],
          );
        if (events.length > 0) await this.applyRows(client, events);
      });
    this.retrying = null;
    this.watch.passed(to);
    return { position: to, epoch: place.epoch };
  }

  /** The compare-and-set; throws {@link Moved}. */
  private async advance(db: Queryable, place: Place, to: Position): Promise<void> {
    const { rowCount } = await db.query({
      name: 'projection_advance',
      text: `update projection_checkpoint set position = $4, updated_at = clock_timestamp(),
               lease_until = case owner when $5 then clock_timestamp() + $6::int * interval '1 millisecond' else lease_until end
             where name = $1 and position = $2 and epoch = $3`,
      values: [this.checkpoint, place.position, place.epoch, to, this.owner, this.leaseMs],
    });
    if (rowCount !== 1) throw new Moved();
  }

  private async applyRows(client: Client, events: readonly Recorded[]): Promise<void> {
    if (this.options.searchPath !== undefined) await client.query(`select set_config('search_path', $1, true)`, [this.options.searchPath]);
    try {
      await this.projection.apply(client, events, this.options.log);
    } catch (error) {
      // "the account is closed" is no lost connection: where the connection still answers, an error without a code is the handler's own.
      const itsOwn =
        !(error instanceof Unavailable || error instanceof OutcomeUnknown || error instanceof DatabaseUnavailable) &&
        (error as { code?: unknown } | undefined)?.code === undefined;
      if (itsOwn && (await client.query('select').then(Boolean, () => false))) throw new HandlerFault(String(error), { cause: error });
      throw error;
    }
  }

  /** After a compare-and-set that found another position: goes on from there, or throws where the place is no longer ours. */
  private async catchUpWith(place: Place): Promise<Place> {
    const found = await this.lookUp();
    // Behind what we committed: the database was restored under us. Begin again from what it says.
    if (found.epoch !== place.epoch || found.position < place.position) throw new Lost();
    if (found.position !== '') this.watch.passed(found.position as Position);
    return { position: found.position, epoch: found.epoch };
  }

  // ---- failing

  private async pause(error: Error, tries: number, signal: AbortSignal): Promise<void> {
    this.retrying = error;
    this.options.onError?.(error, { name: this.name, retrying: true });
    await this.clock.sleep(Math.min(BACKOFF_MS.most, BACKOFF_MS.first * 2 ** Math.min(tries, 10)), signal);
  }

  private async fail(error: unknown): Promise<void> {
    this.failure = await this.record(error);
    this.retrying = null;
    this.state = 'failed';
    this.options.onError?.(this.failure, { name: this.name, retrying: false });
  }

  /** Writes the failure down for operators. Where even that fails, the next start meets the same event. */
  private async record(error: unknown): Promise<ProjectionFailed> {
    const failed = error instanceof ProjectionFailed ? error : new ProjectionFailed(this.name, null, causeOf(error));
    const { event, cause } = failed;
    const { message, stack } = cause as Error;
    await this.options.pool
      .query(
        `insert into projection_failure as f (name, position, event_id, stream, type, message, stack)
         values ($1, coalesce($2, (select position from projection_checkpoint where name = $1), ''), $3, $4, $5, $6, $7)
         on conflict (name, position) do update set message = excluded.message, stack = excluded.stack, event_id = excluded.event_id,
           stream = excluded.stream, type = excluded.type, attempts = f.attempts + 1, failed_at = clock_timestamp(), resolved_at = null`,
        [this.checkpoint, event?.position ?? null, event?.id ?? null, event?.stream ?? null, event?.type ?? null, message, stack ?? ''],
      )
      .catch(() => undefined);
    this.unresolved = true;
    return failed;
  }
}

const causeOf = (error: unknown): Error => {
  const cause = error instanceof HandlerFault ? (error.cause ?? error) : error;
  return cause instanceof Error ? cause : new Error(String(cause));
};

/** Reads the next batch while the present one is worked on. */
export async function* readAhead<T>(pages: AsyncIterable<T>): AsyncGenerator<T, void, void> {
  const items = pages[Symbol.asyncIterator]();
  const pull = () => {
    const item = items.next();
    item.catch(() => undefined);
    return item;
  };
  try {
    for (let next = pull(); ;) {
      const item = await next;
      if (item.done) return;
      next = pull();
      yield item.value;
    }
  } finally {
    await items.return?.();
  }
}

// ---- from outside

/** Waits for a projection that runs elsewhere; one poll serves all that wait. */
export interface ProjectionWatch {
  /** As {@link Subscriber.caughtUpTo}. While the database is away it waits on. */
  caughtUpTo(position: Position | null, timeoutMs: number): Promise<boolean>;
}

export const watchProjection = (pool: Queryable, name: string, clock: Clock = systemClock): ProjectionWatch => new Watch(pool, name, clock);

/**
 * What was seen longer ago, and lies beyond what somebody waits for, is asked for again: a database that was restored went back. Longer than a worker may take to save
 * a place that it has passed already.
 */
const TRUST_SEEN_MS = 2_000;

class Watch implements ProjectionWatch {
  private seen = '';
  private seenAt = Number.NEGATIVE_INFINITY;
  private polling = false;
  private readonly waiting = new Set<{ readonly position: Position; readonly wake: AbortController; passed: boolean }>();

  constructor(
    private readonly pool: Queryable,
    private readonly name: string,
    private readonly clock: Clock,
  ) {}

  get awaited(): boolean {
    return this.waiting.size > 0;
  }

  passed(position: Position): void {
    if (position > this.seen) this.learn(position);
  }

  /** The checkpoint is no longer where it was. */
  forget(): void {
    this.seen = '';
  }

  async caughtUpTo(position: Position | null, timeoutMs: number): Promise<boolean> {
    if (position === null || this.seen === position) return true;
    if (this.seen > position && this.isFresh) return true;
    const waiter = { position, wake: new AbortController(), passed: false };
    this.waiting.add(waiter);
    if (!this.polling) void this.poll();
    await this.clock.sleep(timeoutMs, waiter.wake.signal);
    this.waiting.delete(waiter);
    return waiter.passed;
  }

  private get isFresh(): boolean {
    return this.clock.monotonic() - this.seenAt < TRUST_SEEN_MS;
  }

  private learn(position: string): void {
    this.seen = position;
    this.seenAt = this.clock.monotonic();
    for (const waiter of this.waiting)
      if (waiter.position <= position) {
        waiter.passed = true;
        waiter.wake.abort('passed');
      }
  }

  private async poll(): Promise<void> {
    this.polling = true;
    while (this.waiting.size > 0) {
      try {
        const { rows } = await this.pool.query<{ position: string }>('select position from projection_checkpoint where name = $1', [this.name]);
        const position = rows[0]?.position ?? '';
        if (position >= this.seen || !this.isFresh) this.learn(position);
      } catch {
        // The waiters end by their own time.
      }
      if (this.waiting.size > 0) await this.clock.sleep(WATCH_MS);
    }
    this.polling = false;
  }
}

/** Where a projection stands, whoever runs it. Throws Unavailable, or the database's error. */
export const projectionStatus = async (of: {
  store: EventStore;
  pool: Queryable;
  name: string;
  /** Default: the name. */
  checkpoint?: string;
  streamPrefixes?: readonly string[] | undefined;
  clock?: Clock | undefined;
}): Promise<ProjectionStatus> => {
  const { store, pool, name, checkpoint = name, streamPrefixes } = of;
  const clock = of.clock ?? systemClock;
  const { rows } = await pool.query<{
    position: string;
    epoch: string;
    leased: boolean;
    updated_at: Date;
    failed_position: string | null;
    event_id: string | null;
    message: string | null;
    failed_at: Date | null;
  }>(
    `select c.position, c.epoch, coalesce(c.lease_until >= clock_timestamp(), false) as leased, c.updated_at,
            f.position as failed_position, f.event_id, f.message, f.failed_at
     from projection_checkpoint c
     left join lateral (select * from projection_failure f where f.name = c.name and f.resolved_at is null order by f.position limit 1) f on true
     where c.name = $1`,
    [checkpoint],
  );
  const row = rows[0];
  const position = asPosition(row?.position ?? '');
  const head = await store.head();
  const behind = head !== null && (position === null || position < head);
  let lagMs = 0;
  if (behind)
    for await (const [oldest] of store.readAll(position, { max: 1, ...(streamPrefixes && { streamPrefixes }) }))
      if (oldest) lagMs = Math.max(0, clock.now() - oldest.storedAt.getTime());
  return {
    name,
    position,
    head,
    lagEvents: behind ? eventsBetween(position, head) : 0,
    lagMs,
    epoch: BigInt(row?.epoch ?? 0),
    leased: row?.leased ?? false,
    updatedAt: row?.updated_at ?? null,
    failure: row?.message
      ? { position: asPosition(row.failed_position ?? ''), eventId: row.event_id, message: row.message, failedAt: row.failed_at! }
      : null,
  };
};

/** Where a projection stands against the head, without what it costs to say how old its oldest event is. */
export const projectionPlace = async (
  store: EventStore,
  pool: Queryable,
  name: string,
): Promise<{ readonly position: Position | null; readonly head: Position | null; readonly lagEvents: number | null }> => {
  const { rows } = await pool.query<{ position: string }>('select position from projection_checkpoint where name = $1', [name]);
  const position = asPosition(rows[0]?.position ?? '');
  const head = await store.head();
  return { position, head, lagEvents: head !== null && (position === null || position < head) ? eventsBetween(position, head) : 0 };
};

/** Positions of one number have no gaps (Postgres, memory), so they count events; KurrentDB's are byte offsets. */
const eventsBetween = (position: Position | null, head: Position): number | null =>
  /^\d+$/.test(head) && /^\d*$/.test(position ?? '') ? Number(BigInt(head) - BigInt(position ?? 0)) : null;

/**
 * Refuses an event store that the read models have never followed: payments would be begun in a log that nobody reads. Places of KurrentDB have two parts, those of
 * Postgres one.
 */
export const requireOwnStore = async (db: Queryable, onKurrentdb: boolean): Promise<void> => {
  const { rows } = await db.query<{ kurrentdb: boolean }>(
    `select position like '%:%' as kurrentdb from projection_checkpoint where position <> '' order by updated_at desc limit 1`,
  );
  const [known] = rows;
  if (!known || known.kurrentdb === onKurrentdb) return;
  throw new Error(
    known.kurrentdb
      ? 'the events of this database lie in KurrentDB; set KURRENTDB_URL'
      : 'the events of this database lie in Postgres; unset KURRENTDB_URL, or take another database',
  );
};

export interface Checkpoint {
  readonly name: string;
  readonly position: Position | null;
  readonly epoch: bigint;
}

/**
 * The checkpoint, locked for the rest of the transaction: nobody applies meanwhile. For the swap of a rebuild: lock both, compare, switch, commit.
 * null where the projection never ran.
 */
export const lockCheckpoint = async (client: Client, name: string): Promise<Checkpoint | null> => {
  const { rows } = await client.query<{ position: string; epoch: string }>(
    'select position, epoch from projection_checkpoint where name = $1 for update',
    [name],
  );
  return rows[0] ? { name, position: asPosition(rows[0].position), epoch: BigInt(rows[0].epoch) } : null;
};

/**
 * Puts a checkpoint to a position (null: the start of the log) in the transaction that also empties, fills or swaps the rows. The epoch counts up, so a
 * worker in the middle of a batch loses its place and begins again from here. Never for a reactor, whose effects left the house.
 */
export const resetCheckpoint = async (client: Client, name: string, position: Position | null): Promise<void> => {
  await client.query(
    `insert into projection_checkpoint as c (name, position, epoch) values ($1, $2, 1)
     on conflict (name) do update set position = excluded.position, epoch = c.epoch + 1, owner = null, lease_until = null, updated_at = clock_timestamp()`,
    [name, position ?? ''],
  );
  await client.query('update projection_failure set resolved_at = clock_timestamp() where name = $1 and resolved_at is null', [name]);
};

/** Removes a checkpoint, for the old side of a swapped rebuild. */
export const dropCheckpoint = async (client: Client, name: string): Promise<void> => {
  await client.query('delete from projection_checkpoint where name = $1', [name]);
  await client.query('delete from projection_failure where name = $1', [name]);
};
