/**
 * The only way to follow the log. A projection or reactor gets events in order and writes rows. Rows and checkpoint are committed in one transaction.
 *
 * The store delivers each event at least once. The compare-and-set on the checkpoint (checkpoint.ts) makes sure that each event is applied exactly
 * once, even with two workers or after a crash between commit and answer. The lease only saves work: one worker is active for each projection, and
 * the others stand by.
 *
 * Use: `const list = createSubscriber({ name: 'payment-list', streamPrefixes: ['payment-'], apply }, { store, checkpoint: postgresCheckpoint(pool,
 * 'payment-list') })`. A worker calls `list.start()` and later `await list.stop()`. A command calls `await list.runUntil(position, { timeoutMs })`. A
 * process that only reads uses `watchProjection` and `projectionStatus`.
 */
import { orStopped, systemClock, type Clock } from '#kernel';
import { DatabaseUnavailable, uuidV7, type Client, type Logger } from '#platform';
import { asPosition, HandlerFault, Moved, type Checkpoint, type CheckpointStatus, type Lease, type Place } from './checkpoint.js';
import { type EventStore, OutcomeUnknown, type Position, type Recorded, StoreIncident, type SubscriptionItem, Unavailable } from './event-store.js';
import { NotInTheLog } from './codec.js';
import type { LogGate } from './own-log.js';

/** Events per transaction. 200 to 1000 measured best, 5000 slower. */
const BATCH_EVENTS = 500;
/** After a failure, each success adds such a part of a full batch to the next one. */
const GROWTHS = 16;
/** Another worker takes over this long after the active one died. A living worker renews its lease three times in this time. */
const LEASE_MS = 10_000;
/** Within the time of one lease, a standby worker checks this many times whether the lease is free. */
const STANDBY_LOOKS = 10;
/** Minimum time between two saves of a position if no event passed the filter. */
const SAVE_PLACE_MS = 250;
/** How often the checkpoint is read while a caller waits for its position. */
const WATCH_MS = 25;
/** If the worker with the lease makes no progress for this long, a waiting command applies the events itself. */
const PATIENCE_MS = 250;
/** Pauses before retries. After an outage of the database, a projection may lag by the longest pause. */
const BACKOFF_MS = { first: 50, most: 1_000 } as const;
/** Pause between two checks whether the incident of the event store is still open. */
const INCIDENT_POLL_MS = 1_000;
/** Tries of a single event before it counts as poison. */
const POISON_ATTEMPTS = 2;
/**
 * If the log does not have the position of the checkpoint, the projection fails after this many tries. Another log may have answered for a moment.
 */
const PLACE_ATTEMPTS = 6;
/** If a subscription lived this long, the log had its position, and the tries are counted from 0 again. */
const PLACE_HELD_MS = 60_000;

/** A reader of the log. `Tx`: the transaction in which the projection writes its rows. */
export interface Projection<Tx = Client> {
  readonly name: string;
  /** Prefixes of the streams that the projection gets. Default: all streams of Payfold. */
  readonly streamPrefixes?: readonly string[];
  /**
   * How long events wait for further events, so that one transaction writes them together. Default 0. A caller of {@link Subscriber.runUntil} or
   * {@link Subscriber.caughtUpTo} in the same process ends the wait.
   */
  readonly gatherMs?: number;
  /**
   * Writes the rows for events, in order, in the transaction that moves the checkpoint. Must use unqualified table names, so that a rebuild can write
   * to another schema. Must ignore events of unknown types. An error rolls the transaction back. After an error of the connection or the server, the
   * events are applied again. Any other error stops the projection at the event.
   */
  readonly apply: (tx: Tx, events: readonly Recorded[], log?: ProjectionLog) => Promise<void>;
}

export type ProjectionLog = Pick<Logger, 'warn'>;

export interface SubscriberOptions<Tx = Client> {
  readonly store: EventStore;
  readonly checkpoint: Checkpoint<Tx>;
  readonly clock?: Clock;
  readonly batchEvents?: number;
  readonly leaseMs?: number;
  /** Checks before each write that the events belong to our log. While it throws {@link StoreIncident}, the projection waits. */
  readonly ownLog?: LogGate;
  /** The logger that `apply` gets. */
  readonly log?: ProjectionLog;
  /** Owner of the lease: a UUID that no other living process uses. Default: a new one. */
  readonly owner?: string;
  /** Called for every error. `retrying` false: the error stopped the projection. */
  readonly onError?: (error: Error, what: { readonly name: string; readonly retrying: boolean }) => void;
}

export interface RunUntilOptions {
  readonly timeoutMs: number;
  readonly stop?: AbortSignal | undefined;
  readonly onProgress?: (position: Position) => void;
}

/** `standby`: another worker holds the lease, or an incident is open. `failed`: an error stopped the projection; only a new start tries again. */
export type SubscriberState = 'stopped' | 'standby' | 'active' | 'failed';

export interface Subscriber {
  readonly name: string;
  readonly state: SubscriberState;
  /** The reason for the state `failed`. */
  readonly failure: ProjectionFailed | null;
  /** The error after which the subscriber now tries again. null: there is none. */
  readonly retrying: Error | null;
  /** Follows the log until {@link stop}. After a failure, begins again at the checkpoint. */
  start(): void;
  /** Finishes the current batch and gives the lease back. */
  stop(): Promise<void>;
  /**
   * Brings the projection up to a position (of an append, or `head()`). Needs no `start()`, and may be called while workers run. If no worker makes
   * progress, applies the events itself. Throws {@link ProjectionFailed} at a poison event, StoreIncident during an incident, and Unavailable when
   * the time is up. If `stop` aborts, throws its reason at once.
   */
  runUntil(until: Position, options: RunUntilOptions): Promise<void>;
  /** Resolves with true when the rows contain all events up to `position`, and with false when the time is up. Any process may run the projection. */
  caughtUpTo(position: Position | null, timeoutMs: number): Promise<boolean>;
  status(): Promise<ProjectionStatus>;
}

export interface ProjectionStatus extends CheckpointStatus {
  readonly name: string;
  readonly head: Position | null;
  /**
   * Events of all streams between position and head. null: the position lies beyond the head, or the store is KurrentDB, whose positions do not count
   * events.
   */
  readonly lagEvents: number | null;
  /** Age in milliseconds of the oldest event that is not applied yet. 0: there is none. null: the checkpoint is not in the log. */
  readonly lagMs: number | null;
}

/** A projection cannot go on. Names the event and the reason (`cause`). */
export class ProjectionFailed extends Error {
  constructor(
    readonly projection: string,
    /** null: the log cannot be read any further. */
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

/**
 * The worker must begin again at the checkpoint, for one of two reasons. It no longer owns the checkpoint: another worker took over, or the checkpoint
 * was reset or restored. Or the events that the worker has read are not in the log.
 */
class Lost extends Error {}

export const isTransient = (error: unknown): boolean =>
  !(error instanceof HandlerFault || error instanceof ProjectionFailed) &&
  (error instanceof Unavailable || error instanceof OutcomeUnknown || error instanceof DatabaseUnavailable);

export const createSubscriber = <Tx>(projection: Projection<Tx>, options: SubscriberOptions<Tx>): Subscriber =>
  new LogSubscriber(projection, options);

class LogSubscriber<Tx> implements Subscriber {
  readonly name: string;
  state: SubscriberState = 'stopped';
  failure: ProjectionFailed | null = null;
  retrying: Error | null = null;
  private readonly checkpoint: Checkpoint<Tx>;
  private readonly clock: Clock;
  private readonly lease: Lease;
  private readonly batchEvents: number;
  /** Number of events in the next transaction, at most {@link batchEvents}. */
  private size: number;
  private readonly watch: Watch;
  private running: { stop: AbortController; done: Promise<void> } | null = null;
  /** Ends the current wait for more events. */
  private wakeUp: () => void = () => undefined;

  constructor(
    private readonly projection: Projection<Tx>,
    private readonly options: SubscriberOptions<Tx>,
  ) {
    this.name = projection.name;
    this.checkpoint = options.checkpoint;
    this.clock = options.clock ?? systemClock;
    this.lease = { owner: options.owner ?? uuidV7(this.clock.realNow()), ms: options.leaseMs ?? LEASE_MS };
    this.batchEvents = options.batchEvents ?? BATCH_EVENTS;
    this.size = this.batchEvents;
    this.watch = new Watch(this.checkpoint, this.clock);
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
    return projectionStatus(this.projection, this.options);
  }

  // ---- working as one of several workers

  private async run(signal: AbortSignal): Promise<void> {
    for (let [tries, absent, begun] = [0, 0, 0]; !signal.aborted;) {
      try {
        const place = await this.checkpoint.take(this.lease);
        if (!place) {
          this.state = 'standby';
          await this.clock.sleep(this.lease.ms / STANDBY_LOOKS, signal);
          continue;
        }
        this.state = 'active';
        tries = 0;
        begun = this.clock.monotonic();
        await this.follow(place, signal);
      } catch (thrown) {
        const error = thrown instanceof NotInTheLog ? await this.lostOr(thrown) : thrown;
        if (error instanceof Lost || error instanceof Moved) {
          this.watch.forget();
          continue;
        }
        if (error instanceof StoreIncident) {
          this.state = 'standby';
          this.watch.forget();
          await this.clock.sleep(INCIDENT_POLL_MS, signal);
          continue;
        }
        if (isTransient(error)) {
          await this.pause(error as Error, tries++, signal);
          continue;
        }
        if (error instanceof NotInTheLog && this.options.ownLog) {
          if (this.clock.monotonic() - begun > PLACE_HELD_MS) absent = 0;
          if (++absent < PLACE_ATTEMPTS) {
            await this.pause(error, absent, signal);
            continue;
          }
        }
        await this.fail(error);
        break;
      }
    }
    await this.checkpoint.release(this.lease.owner).catch(() => undefined);
    // After a failure, `start` may run again without `stop`.
    if (this.state === 'failed') this.running = null;
  }

  /**
   * Returns the error to act on if our position is not in the log. {@link Lost}: database and log were restored together, so the projection goes on
   * from the checkpoint. If the check of the log fails, returns its error. Otherwise returns `gone`.
   */
  private async lostOr(gone: NotInTheLog): Promise<unknown> {
    try {
      const { position } = await this.checkpoint.look();
      if (position < gone.after) return new Lost();
      await this.options.ownLog?.verified(null);
      return gone;
    } catch (error) {
      return error;
    }
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
      const { gatherMs = 0 } = this.projection;
      let full = false;
      for (;;) {
        const turn: IteratorResult<SubscriptionItem, unknown> | 'late' =
          seen === null ? await next : await this.orAfter(next, savedAt + Math.max(SAVE_PLACE_MS, gatherMs));
        if (ended.signal.aborted) return;
        if (turn === 'late') {
          place = await this.moveOn(place, seen!);
          // If a command saved an earlier position first, the next turn saves ours.
          if (place.position >= seen!) seen = null;
          savedAt = this.clock.monotonic();
          continue;
        }
        if (turn.done) return;
        next = pull();
        if (turn.value.kind === 'events') {
          const events = [...turn.value.events];
          if (gatherMs > 0) {
            // After a full batch, more events are there already.
            if (!full) await this.gather(gatherMs, ended.signal);
            // All events that have arrived by now are written together.
            while (events.length < this.batchEvents && !ended.signal.aborted) {
              const more = await this.orAfter(next, this.clock.monotonic());
              if (more === 'late' || more.done) break;
              next = pull();
              if (more.value.kind === 'events') events.push(...more.value.events);
              else if (more.value.kind === 'checkpoint') seen = more.value.position;
              // The item is `caught_up`. If callers wait, write the events now.
              else if (this.watch.awaited) break;
            }
            full = events.length >= this.batchEvents;
          }
          if (ended.signal.aborted) return;
          place = await this.applyAll(place, events, ended.signal);
          if (ended.signal.aborted) return;
          if (seen !== null && seen <= place.position) seen = null;
          // The `checkpoint` came after the written events, so its position is reached too.
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

  /** Sleeps unless a caller in this process waits for the projection. */
  private async gather(ms: number, stop: AbortSignal): Promise<void> {
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

  private async keepLease(place: Place, signal: AbortSignal, onLost: () => void): Promise<void> {
    for (;;) {
      await this.clock.sleep(this.lease.ms / 3, signal);
      if (signal.aborted) return;
      try {
        if (!(await this.checkpoint.renew(this.lease, place.epoch))) return onLost();
      } catch {
        // Without the database no other worker can take the lease either. The compare-and-set protects the rows.
      }
    }
  }

  // ---- working once

  async runUntil(until: Position, { timeoutMs, stop, onProgress }: RunUntilOptions): Promise<void> {
    const deadline = this.clock.monotonic() + timeoutMs;
    const late = () => stop?.aborted === true || this.clock.monotonic() >= deadline;
    const never = new AbortController();
    let last: Error | undefined;
    let moving = null as { position: string; at: number } | null;
    let tries = 0;
    do {
      try {
        const place = await orStopped(this.checkpoint.look(), stop);
        if (place.position >= until) return this.watch.passed(place.position as Position);
        const now = this.clock.monotonic();
        if (place.leased) {
          if (place.position !== moving?.position) moving = { position: place.position, at: now };
          if (now - moving.at < PATIENCE_MS) {
            if (place.position !== '') onProgress?.(place.position as Position);
            // If the worker with the lease is in this process, end its wait for more events.
            this.wakeUp();
            await this.clock.sleep(WATCH_MS, stop);
            continue;
          }
        }
        await orStopped(this.takePart(place, until, late, onProgress), stop);
        tries = 0;
      } catch (error) {
        stop?.throwIfAborted();
        if (error instanceof Lost || error instanceof Moved) continue;
        if (error instanceof StoreIncident) throw error;
        if (!isTransient(error)) throw await this.record(error);
        last = error as Error;
        await this.pause(last, tries++, stop ?? never.signal);
      }
    } while (!late());
    stop?.throwIfAborted();
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

  // ---- applying

  /**
   * Applies events in as few transactions as possible. If a batch fails, the next try takes half of it. So an event at fault is alone at
   * last, and a batch that took too long becomes short enough. When `stop` aborts, returns after the current transaction.
   */
  private async applyAll(place: Place, events: readonly Recorded[], stop: AbortSignal | null): Promise<Place> {
    let rest = events.filter(({ position }) => position > place.position);
    for (let [tries, attempts] = [0, 0]; rest.length > 0 && !stop?.aborted;) {
      const batch = rest.slice(0, this.size);
      try {
        place = await this.commit(place, batch, batch.at(-1)!.position);
        rest = rest.slice(batch.length);
        this.size = Math.min(this.batchEvents, this.size + Math.ceil(this.batchEvents / GROWTHS));
        tries = attempts = 0;
      } catch (error) {
        if (error instanceof Lost || error instanceof StoreIncident) throw error;
        if (error instanceof Moved) {
          place = await this.catchUpWith(place);
          rest = rest.filter(({ position }) => position > place.position);
          continue;
        }
        this.size = Math.ceil(batch.length / 2);
        if (isTransient(error)) {
          // Only a worker passes `stop`. `runUntil` passes null and retries itself.
          if (!stop) throw error;
          await this.pause(error as Error, tries++, stop);
        } else if (batch.length === 1 && ++attempts >= POISON_ATTEMPTS) throw new ProjectionFailed(this.name, batch[0]!, causeOf(error));
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
    const last = events.at(-1) ?? null;
    const { ownLog } = this.options;
    if (ownLog && !(await ownLog.verifiedRead(last))) throw new Lost();
    await this.checkpoint.commit(place, to, this.lease, last && ((tx) => this.projection.apply(tx, events, this.options.log)), last);
    this.retrying = null;
    this.watch.passed(to);
    return { position: to, epoch: place.epoch };
  }

  /** Called after {@link Moved}. Returns the present place if this worker still owns the checkpoint. Otherwise throws {@link Lost}. */
  private async catchUpWith(place: Place): Promise<Place> {
    const found = await this.checkpoint.look();
    // Another worker owns the checkpoint, or a restored database has an older one.
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

  /** Records the failure for operators. An error of this write is ignored. */
  private async record(error: unknown): Promise<ProjectionFailed> {
    const failed = error instanceof ProjectionFailed ? error : new ProjectionFailed(this.name, null, causeOf(error));
    const { message, stack = '' } = failed.cause as Error;
    await this.checkpoint.recordFailure({ event: failed.event, message, stack }).catch(() => undefined);
    return failed;
  }
}

const causeOf = (error: unknown): Error => {
  const cause = error instanceof HandlerFault ? (error.cause ?? error) : error;
  return cause instanceof Error ? cause : new Error(String(cause));
};

/** Reads the next batch while the caller works on the present one. Throws the reason of `stop` as soon as it aborts. */
export async function* readAhead<T>(pages: AsyncIterable<T>, stop?: AbortSignal): AsyncGenerator<T, void, void> {
  const items = pages[Symbol.asyncIterator]();
  const pull = () => {
    const item = items.next();
    item.catch(() => undefined);
    return item;
  };
  try {
    for (let next = pull(); ;) {
      const item = await orStopped(next, stop);
      if (item.done) return;
      next = pull();
      yield item.value;
    }
  } finally {
    const ended = items.return?.();
    // After a stop, do not wait for a read in flight. It ends by its own time limit.
    if (stop?.aborted) ended?.catch(() => undefined);
    else await ended;
  }
}

// ---- from outside

/** Waits for a projection that any process runs. All callers share one poll. */
export interface ProjectionWatch {
  /** As {@link Subscriber.caughtUpTo}. Goes on waiting during an outage of the database. */
  caughtUpTo(position: Position | null, timeoutMs: number): Promise<boolean>;
}

export const watchProjection = (checkpoint: Pick<Checkpoint, 'position'>, clock: Clock = systemClock): ProjectionWatch =>
  new Watch(checkpoint, clock);

/**
 * A known position that is older than this is read again from the checkpoint, because the database may have been restored since. Longer than a worker
 * takes to save a position.
 */
const TRUST_SEEN_MS = 2_000;

class Watch implements ProjectionWatch {
  private seen = '';
  private seenAt = Number.NEGATIVE_INFINITY;
  private polling = false;
  private readonly waiting = new Set<{ readonly position: Position; readonly wake: AbortController; passed: boolean }>();

  constructor(
    private readonly checkpoint: Pick<Checkpoint, 'position'>,
    private readonly clock: Clock,
  ) {}

  get awaited(): boolean {
    return this.waiting.size > 0;
  }

  passed(position: Position): void {
    if (position > this.seen) this.learn(position);
  }

  /** Drops the last known position, because the checkpoint may now lie before it. */
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
        const position = await this.checkpoint.position();
        if (position >= this.seen || !this.isFresh) this.learn(position);
      } catch {
        // Each waiter ends by its own time limit.
      }
      if (this.waiting.size > 0) await this.clock.sleep(WATCH_MS);
    }
    this.polling = false;
  }
}

/** The status of a projection that any process runs. Throws Unavailable, or the database's error. */
export const projectionStatus = async (
  { name, streamPrefixes }: Pick<Projection, 'name' | 'streamPrefixes'>,
  { store, checkpoint, clock = systemClock }: Pick<SubscriberOptions, 'store' | 'clock'> & { readonly checkpoint: Pick<Checkpoint, 'status'> },
): Promise<ProjectionStatus> => {
  const status = await checkpoint.status();
  const { position } = status;
  const head = await store.head();
  const unknown = { name, ...status, head, lagEvents: null, lagMs: null };
  if (isBeyond(position, head)) return unknown;
  const behind = head !== null && position !== head;
  let lagMs = 0;
  try {
    if (behind)
      for await (const [oldest] of store.readAll(position, { max: 1, ...(streamPrefixes && { streamPrefixes }) }))
        if (oldest) lagMs = Math.max(0, clock.realNow() - oldest.storedAt.getTime());
  } catch (error) {
    if (error instanceof NotInTheLog) return unknown;
    throw error;
  }
  return { name, ...status, head, lagEvents: behind ? eventsBetween(position, head) : 0, lagMs };
};

/** The position of a projection and the head, without the cost of `lagMs`. */
export const projectionPlace = async (
  store: EventStore,
  checkpoint: Pick<Checkpoint, 'position'>,
): Promise<{ readonly position: Position | null; readonly head: Position | null; readonly lagEvents: number | null }> => {
  const position = asPosition(await checkpoint.position());
  const head = await store.head();
  if (isBeyond(position, head)) return { position, head, lagEvents: null };
  return { position, head, lagEvents: head !== null && position !== head ? eventsBetween(position, head) : 0 };
};

/** True if a checkpoint lies beyond the head, so that it is not in the log. The caller must read the checkpoint first and the head second. */
const isBeyond = (position: Position | null, head: Position | null): boolean => position !== null && (head === null || position > head);

/** Number of events between two positions. null for KurrentDB, because its positions are byte offsets and do not count events. */
export const eventsBetween = (position: Position | null, head: Position): number | null =>
  /^\d+$/.test(head) && /^\d*$/.test(position ?? '') ? Number(BigInt(head) - BigInt(position ?? 0)) : null;
