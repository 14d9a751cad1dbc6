/**
 * The limits of the audit listener. Requests of finance tools share the process and the database with payments. So they have connections of their
 * own, and only a few of them run at the same time (docs/operations.md#the-audit-listener).
 */
import { type CallHandler, type ExecutionContext, Inject, Injectable, type NestInterceptor } from '@nestjs/common';
import { once } from 'node:events';
import { performance } from 'node:perf_hooks';
import type { Writable } from 'node:stream';
import { lastValueFrom, type Observable, of } from 'rxjs';
import { type Clock, ServiceError, within } from '#kernel';
import type { Slots } from '#platform';
import type { Services } from '../services.js';

/**
 * Maximum number of requests that run at the same time, in one process. Each uses at most one connection. An export uses none while it waits for its
 * reader.
 */
const MAX_RUNNING = { exports: 4, queries: 3 } as const;
/** Connections for the look-up of audit keys, which comes before all limits. */
const KEY_CONNECTIONS = 1;
/** Connections of the pool of the audit listener. So requests that run do not wait for each other's connections. */
export const AUDIT_POOL_CONNECTIONS = MAX_RUNNING.exports + MAX_RUNNING.queries + KEY_CONNECTIONS;
/** Value of `Retry-After` for a refused request, in seconds. Most requests take less time. */
const RETRY_SECONDS = { exports: 10, queries: 1 } as const;
/** Rate at which a reader must take an export, in bytes a second. */
export const LEAST_BYTES_PER_SECOND = 16_384;
/** Additional time for each part of an export that the connection does not take at once, in ms. A link may pause for this long. */
export const PAUSE_MS = 10_000;
/** Longest time for a whole export, in ms. At the least rate, it is enough for 59 MB. A link of 10 Mbit/s carries 4.5 GB in this time. */
export const MAX_EXPORT_MS = 3_600_000;
/**
 * While the process serves partners and payers: length of a step and its rest together, as a multiple of the time for which the event loop was busy
 * meanwhile. At other times a rest has its least length.
 */
const SHARE = 4;
/** If no request of a partner or payer has been at work for this long, the process does not count as serving them. In ms. */
const IDLE_MS = 1_000;
/** Least and longest rest after a step, in ms. The starts of two steps are at least as far apart. A page of an export takes the event loop for 5 ms. */
const REST_MS = { least: 10, most: 300 } as const;

/** The method of the controller that answers exports. All other methods count as queries. */
const EXPORT_HANDLER = 'export';
/** The method that answers readers of the feed. Only while it reads a page, it counts as a query: it may wait for events. */
const FEED_HANDLER = 'events';

/** A limit that a request met. `exports`, `queries`, `waits`: it was refused. `rate`, `time`: its export was cut off. */
export type MetLimit = 'exports' | 'queries' | 'waits' | 'rate' | 'time';

/** An export was cut off. */
export class CutOff extends Error {
  constructor(readonly limit: 'rate' | 'time') {
    super(limit === 'rate' ? 'the reader took an export too slowly' : 'an export took too long');
    this.name = 'CutOff';
  }
}

/** Token of the services of the audit listener. Their pool is its own. */
export const AUDITED = Symbol('audited services');
/** Token of the function that counts the requests that met a limit. */
export const ON_LIMIT = Symbol('on limit');

/**
 * Lets all audit requests of a process take turns. While the process serves partners and payers, audit rests after each step until the step and its rest
 * have taken four times as long as the event loop was busy during the step. So about three quarters of the event loop stay for payments. A step is a
 * query, or a page of an export or of the feed.
 */
@Injectable()
export class Pace {
  private nextMs = 0;
  private readonly clock: Clock;
  private readonly slots: Pick<Slots, 'idleMs'>;

  /** Milliseconds for which the event loop has been busy since the process began. */
  busyMs = (): number => performance.eventLoopUtilization().active;

  constructor(@Inject(AUDITED) { clock, slots }: Pick<Services, 'clock'> & { readonly slots: Pick<Slots, 'idleMs'> }) {
    this.clock = clock;
    this.slots = slots;
  }

  async step<T>(work: () => Promise<T>): Promise<T> {
    const waitMs = Math.max(0, this.nextMs - this.clock.monotonic());
    this.nextMs = this.clock.monotonic() + waitMs + REST_MS.least;
    await this.clock.sleep(waitMs);
    const begunMs = this.clock.monotonic();
    const busyBefore = this.busyMs();
    try {
      return await work();
    } finally {
      // A step may wait long for Postgres. Such a wait takes no time of the event loop.
      const endMs = this.clock.monotonic();
      const restMs = this.slots.idleMs > IDLE_MS ? 0 : begunMs + SHARE * (this.busyMs() - busyBefore) - endMs;
      this.nextMs = Math.max(this.nextMs, endMs) + Math.min(REST_MS.most, Math.max(REST_MS.least, restMs));
    }
  }
}

/** Refuses a request with 503 if too many are running. A request runs until its handler has ended, also if its client is gone. */
@Injectable()
export class LimitRunning implements NestInterceptor {
  private readonly running = { exports: 0, queries: 0 };

  constructor(
    @Inject(ON_LIMIT) private readonly onLimit: (limit: MetLimit) => void,
    private readonly pace: Pace,
  ) {}

  async intercept(context: ExecutionContext, next: CallHandler): Promise<Observable<unknown>> {
    const { name } = context.getHandler();
    const work = () => lastValueFrom<unknown>(next.handle());
    return of(await (name === FEED_HANDLER ? work() : name === EXPORT_HANDLER ? this.run('exports', work) : this.query(work)));
  }

  /** Runs a query in its turn. */
  query<T>(work: () => Promise<T>): Promise<T> {
    return this.run('queries', () => this.pace.step(work));
  }

  private async run<T>(kind: 'exports' | 'queries', work: () => Promise<T>): Promise<T> {
    if (this.running[kind] >= MAX_RUNNING[kind]) {
      this.onLimit(kind);
      throw new ServiceError(
        'RATE_LIMITED',
        `${MAX_RUNNING[kind]} ${kind} of the audit API are running, and no more are allowed. Send the request again later.`,
        {},
        { status: 503, retryAfterSeconds: RETRY_SECONDS[kind] },
      );
    }
    this.running[kind] += 1;
    try {
      return await work();
    } finally {
      this.running[kind] -= 1;
    }
  }
}

/** The connection of an export, with the limits of its reader. */
export class Download {
  private readonly deadline: number;

  constructor(
    private readonly raw: Writable,
    private readonly clock: Clock,
  ) {
    this.deadline = clock.monotonic() + MAX_EXPORT_MS;
  }

  /** Writes a piece, and waits while the connection takes no more. Throws {@link CutOff}. */
  async write(piece: string): Promise<void> {
    if (this.clock.monotonic() >= this.deadline) throw new CutOff('time');
    if (!this.raw.write(piece)) await this.until('drain');
  }

  /** Ends the answer, and waits until the connection has taken all of it. Throws {@link CutOff}. */
  async end(): Promise<void> {
    this.raw.end();
    await this.until('finish');
  }

  /** Waits for an event of the connection, or until the connection is closed. Throws {@link CutOff}. */
  private async until(event: 'drain' | 'finish'): Promise<void> {
    if (this.raw.destroyed || this.raw.writableFinished) return;
    const leftMs = Math.max(0, this.deadline - this.clock.monotonic());
    const rateMs = PAUSE_MS + (this.raw.writableLength / LEAST_BYTES_PER_SECOND) * 1_000;
    const waiting = new AbortController();
    const either = Promise.race([once(this.raw, event, waiting), once(this.raw, 'close', waiting)]);
    // Without the abort, each wait would leave a listener on the connection.
    await within(this.clock, Math.min(leftMs, rateMs), either, () => new CutOff(leftMs < rateMs ? 'time' : 'rate')).finally(() => waiting.abort());
  }
}
