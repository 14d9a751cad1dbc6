/**
 * The simulator: virtual time, processes that crash and pause, and `call`. The product reaches everything outside of itself through `call`, except
 * time and ids.
 *
 * One event happens at a time, and all its consequences end before the next event. So the same seed gives the same history and the same hash.
 *
 * After a crash, the promises of that process never resolve. So the code after an `await` does not run, as after `kill -9`. A pause is like SIGSTOP:
 * replies and timers wait, but the clocks continue. A freeze is like a suspended virtual machine: the monotonic clock stops as well, so no deadline
 * passes.
 */
import { createHash } from 'node:crypto';
import { type Clock, type Ids } from '#kernel';
import { crockford, uuidV7 } from '#platform';

/** Mulberry32: small, fast, and good enough to choose faults with. */
export class Rng {
  private state: number;
  constructor(seed: number) {
    // Neighbouring seeds must not begin with similar numbers.
    this.state = Math.imul(seed + 1, 0x9e3779b1) >>> 0;
  }
  /** 32 random bits. */
  bits(): number {
    this.state = (this.state + 0x6d2b79f5) >>> 0;
    let t = this.state;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return (t ^ (t >>> 14)) >>> 0;
  }
  next(): number {
    return this.bits() / 4294967296;
  }
  /** Whole number from `low` to `high`, both included. */
  int(low: number, high: number): number {
    return low + Math.floor(this.next() * (high - low + 1));
  }
  chance(probability: number): boolean {
    return probability > 0 && this.next() < probability;
  }
  pick<T>(items: readonly T[]): T {
    return items[this.int(0, items.length - 1)]!;
  }
}

/** The stores. Each can be unavailable as a whole. */
export type Store = 'log' | 'keys' | 'gateway' | 'tables' | 'directory' | 'receiver';

/** Probabilities of faults per port call, and times in which a store is unavailable. Each seed draws its own (swarm testing). */
export interface Faults {
  /** The call has no effect, and the caller gets an error. */
  readonly drop: number;
  /** The call has its effect, but the answer is lost. */
  readonly lost: number;
  /** The call has its effect long after the caller has given up. */
  readonly late: number;
  /** The process is paused for 1–400 s. */
  readonly pause: number;
  /** The process dies, before or after the effect. */
  readonly crash: number;
  /** A request or its answer is lost between the client and the service. */
  readonly network: number;
  readonly outages: readonly { readonly store: Store; readonly fromMs: number; readonly toMs: number }[];
}

export const NO_FAULTS: Faults = { drop: 0, lost: 0, late: 0, pause: 0, crash: 0, network: 0, outages: [] };

/** A crash at the n-th port call, counted from 1 without idle polls. */
export interface CrashPoint {
  readonly index: number;
  readonly when: 'before' | 'after';
}

export class Process {
  incarnation = 0;
  up = true;
  pausedUntil = 0;
  /** How long the monotonic clock stood still in earlier freezes. */
  private frozenMs = 0;
  private freeze: { readonly from: number; readonly until: number } | null = null;
  /** Runs at each start, also after a crash. Makes all data in memory new. */
  onStart: () => void = () => undefined;
  /** Runs at a crash. Ends the connections of the process. */
  onCrash: () => void = () => undefined;
  constructor(
    readonly id: string,
    /** The error of its wall clock. */
    readonly skewMs = 0,
  ) {}

  stand(now: number, ms: number, frozen: boolean): void {
    this.frozenMs = this.missedMs(now);
    this.freeze = frozen ? { from: now, until: now + ms } : null;
    this.pausedUntil = now + ms;
  }

  /** A crash ends a pause or freeze: the next start begins with clocks that go. */
  end(now: number): void {
    this.frozenMs = this.missedMs(now);
    this.freeze = null;
    this.pausedUntil = 0;
  }

  missedMs(now: number): number {
    return this.frozenMs + (this.freeze ? Math.min(now, this.freeze.until) - this.freeze.from : 0);
  }
}

export interface PortCall<T> {
  readonly store: Store;
  readonly name: string;
  /** The effect of the call. It happens at one instant. `sentAt`: the time at which the process sent the call. */
  effect(sentAt: number): T | Promise<T>;
  /**
   * The result of a failed call for its caller: a value, or a thrown error. `dropped`: the effect does not happen. `lost`: the effect happened, or
   * may still happen.
   */
  failed(kind: 'dropped' | 'lost'): T;
  /** The least and the longest delay of a late effect. Absent: the effect is never late. */
  readonly lateMs?: readonly [number, number];
  /** Upper limit for the time of the request, and again for the time of the answer. */
  readonly latencyMs?: number;
  /** True for a poll. A poll is a crash point only if it found something. */
  readonly idle?: boolean;
}

interface Event {
  readonly at: number;
  readonly tie: number;
  readonly number: number;
  /** Returns true if it certainly resolved no promise. */
  readonly run: () => unknown;
}

const isBefore = (a: Event, b: Event) => a.at < b.at || (a.at === b.at && (a.tie < b.tie || (a.tie === b.tie && a.number < b.number)));

/** 2026-03-02T09:00:00Z: before any card of the simulation expires. */
export const EPOCH_MS = Date.UTC(2026, 2, 2, 9);
const RESTART_MS = [1_000, 30_000] as const;
const PAUSE_MS = [1_000, 400_000] as const;
/** The real setImmediate, since withoutRealTime replaces the global one. */
const turn = setImmediate;
/**
 * How many setImmediate callbacks are requested at once. All promise callbacks run between two of them. Node makes its costly check for input and
 * output only once for all TURNS callbacks.
 */
const TURNS = 64;

export interface Statistics {
  calls: number;
  drops: number;
  lost: number;
  late: number;
  outages: number;
  crashes: number;
  pauses: number;
  /** `exchanges`: logs that were exchanged. `incidents`: runs with an incident of the event store. */
  exchanges: number;
  incidents: number;
  /** How often the keys' database went back. */
  keyLosses: number;
}

export class Simulator {
  readonly rng: Rng;
  /** Ids have their own random numbers. Otherwise one additional id would change all later faults. */
  private readonly idRng: Rng;
  now = EPOCH_MS;
  faultsOn = true;
  readonly lines: string[] = [];
  readonly statistics: Statistics = {
    calls: 0,
    drops: 0,
    lost: 0,
    late: 0,
    outages: 0,
    crashes: 0,
    pauses: 0,
    exchanges: 0,
    incidents: 0,
    keyLosses: 0,
  };
  /** The number of port calls so far, without idle polls. */
  index = 0;
  /** Effects that were sent and have not taken place yet. */
  underway = 0;
  readonly names: string[] = [];
  private readonly heap: Event[] = [];
  private number = 0;

  constructor(
    readonly seed: number,
    public faults: Faults,
    private readonly crashPoints: readonly CrashPoint[] = [],
  ) {
    this.rng = new Rng(seed);
    this.idRng = new Rng(seed ^ 0x5bd1e995);
  }

  /** Time since the start, ms. */
  get elapsed(): number {
    return this.now - EPOCH_MS;
  }

  // ---- events

  at(delayMs: number, run: () => unknown): void {
    const event: Event = { at: this.now + delayMs, tie: this.rng.bits(), number: ++this.number, run };
    const { heap } = this;
    let index = heap.push(event) - 1;
    while (index > 0) {
      const parent = (index - 1) >> 1;
      if (!isBefore(event, heap[parent]!)) break;
      heap[index] = heap[parent]!;
      index = parent;
    }
    heap[index] = event;
  }

  private pop(): Event | undefined {
    const { heap } = this;
    const first = heap[0];
    const last = heap.pop();
    if (!first || !last || heap.length === 0) return first;
    let index = 0;
    for (;;) {
      let child = 2 * index + 1;
      if (child >= heap.length) break;
      if (child + 1 < heap.length && isBefore(heap[child + 1]!, heap[child]!)) child += 1;
      if (!isBefore(heap[child]!, last)) break;
      heap[index] = heap[child]!;
      index = child;
    }
    heap[index] = last;
    return first;
  }

  /** Runs until `done` returns true, until no event is left, or until `untilMs` since the start. Returns true if `done` ended the run. */
  run(done: () => boolean, untilMs = Number.POSITIVE_INFINITY): Promise<boolean> {
    return new Promise((resolve, reject) => {
      let ended = false;
      const end = (how: boolean) => {
        ended = true;
        resolve(how);
      };
      /** Runs events until one of them may have resolved a promise. Promise callbacks must run before the next event. */
      const step = () => {
        while (!ended) {
          if (done()) return end(true);
          const next = this.heap[0];
          if (!next || next.at - EPOCH_MS > untilMs) {
            if (Number.isFinite(untilMs)) this.now = Math.max(this.now, EPOCH_MS + untilMs);
            return end(false);
          }
          this.now = Math.max(this.now, next.at);
          this.pop();
          if (next.run() !== true) return;
        }
      };
      const turns = () => {
        for (let left = TURNS; left > 0; left--)
          turn(() => {
            try {
              step();
              if (left === 1 && !ended) turns();
            } catch (error) {
              ended = true;
              reject(asError(error));
            }
          });
      };
      turns();
    });
  }

  note(who: string, what: string): void {
    this.lines.push(`${this.elapsed}\t${who}\t${what}`);
  }

  hash(): string {
    return createHash('sha256').update(this.lines.join('\n')).digest('hex');
  }

  // ---- processes

  start(process: Process): void {
    process.onStart();
  }

  crash(process: Process, downMs = this.rng.int(...RESTART_MS)): void {
    this.statistics.crashes += 1;
    this.note(process.id, 'CRASH');
    process.incarnation += 1;
    process.up = false;
    process.end(this.now);
    process.onCrash();
    const { incarnation } = process;
    this.at(downMs, () => {
      if (process.incarnation !== incarnation) return;
      process.up = true;
      this.note(process.id, 'restarts');
      process.onStart();
    });
  }

  pause(process: Process, ms: number, frozen: boolean): void {
    this.statistics.pauses += 1;
    process.stand(this.now, ms, frozen);
    this.note(process.id, `${frozen ? 'FREEZES' : 'PAUSES'} for ${Math.round(ms / 1000)} s`);
  }

  /** Runs `deliver` in the process. A paused process runs it when it is resumed. After a crash it never runs. */
  private deliver(process: Process, incarnation: number, deliver: () => void): boolean | void {
    if (process.incarnation !== incarnation) return true;
    const pausedMs = process.pausedUntil - this.now;
    if (pausedMs <= 0) return deliver();
    this.at(pausedMs, () => this.deliver(process, incarnation, deliver));
    return true;
  }

  /** Every port call of the product goes through this function, which adds delays and the faults that the seed draws. */
  call<T>(process: Process, port: PortCall<T>): Promise<T> {
    const { incarnation } = process;
    const { rng, faults, faultsOn, statistics } = this;
    const { name, store, idle = false, latencyMs = 10 } = port;
    statistics.calls += 1;
    const planned = idle ? undefined : this.plannedCrash(name);
    return new Promise<T>((resolve, reject) => {
      if (planned === 'before') return this.crash(process);
      if (faultsOn && !idle) {
        if (rng.chance(faults.crash)) return this.crash(process);
        if (process.pausedUntil <= this.now && rng.chance(faults.pause)) this.pause(process, rng.int(...PAUSE_MS), rng.chance(0.5));
      }
      const away = faultsOn && this.isAway(store);
      if (away) statistics.outages += 1;
      const dropped = away || (faultsOn && rng.chance(faults.drop));
      const lost = faultsOn && rng.chance(faults.lost);
      const late = port.lateMs !== undefined && faultsOn && !dropped && rng.chance(faults.late);

      const answer = (told: Told<T>) =>
        this.at(rng.int(1, latencyMs), () => this.deliver(process, incarnation, () => (told.ok ? resolve(told.value) : reject(told.error))));
      const take = (happened: Told<T>) => {
        this.underway -= 1;
        const unheard = happened.ok && lost && !late;
        if (unheard) statistics.lost += 1;
        const found = idle && happened.ok && foundSomething(happened.value);
        if (!idle || found || !happened.ok)
          this.note(
            process.id,
            `${name} → ${unheard ? 'LOST' : happened.ok ? brief(happened.value) : briefError(happened.error)}${late ? ' (LATE)' : ''}`,
          );
        const crashes = planned === 'after' || (found && this.plannedCrash(name) !== undefined);
        if (process.incarnation === incarnation && (crashes || (faultsOn && (!idle || found) && rng.chance(faults.crash))))
          return this.crash(process);
        if (!late) answer(unheard ? attempt(() => port.failed('lost')) : happened);
      };

      // A paused process sends the call only when it is resumed.
      const heldMs = Math.max(0, process.pausedUntil - this.now);
      const sentAt = this.now + heldMs;
      if (dropped) {
        statistics.drops += 1;
        this.note(process.id, `${name} → DROPPED`);
        const told = attempt(() => port.failed('dropped'));
        this.at(heldMs, () => answer(told));
        return;
      }
      let delay = heldMs + rng.int(1, latencyMs);
      if (late) {
        statistics.late += 1;
        this.note(process.id, `${name} is LATE`);
        const told = attempt(() => port.failed('lost'));
        this.at(delay, () => answer(told));
        delay += rng.int(...port.lateMs);
      }
      this.underway += 1;
      this.at(delay, () => {
        if (heldMs > 0 && process.incarnation !== incarnation) {
          this.underway -= 1;
          return true;
        }
        const result = attempt(() => port.effect(sentAt));
        if (!result.ok || !(result.value instanceof Promise)) {
          take(result as Told<T>);
          return true;
        }
        result.value.then(
          (value) => take({ ok: true, value }),
          (error: unknown) => take({ ok: false, error: asError(error) }),
        );
        return false;
      });
    });
  }

  private plannedCrash(name: string): 'before' | 'after' | undefined {
    this.index += 1;
    if (this.crashPoints.length > 0 || this.faults === NO_FAULTS) this.names.push(name);
    return this.crashPoints.find(({ index }) => index === this.index)?.when;
  }

  private isAway(store: Store): boolean {
    const { elapsed } = this;
    return this.faults.outages.some((outage) => outage.store === store && elapsed >= outage.fromMs && elapsed < outage.toMs);
  }

  // ---- the time and the random ids that a process gets

  clock(process: Process): Clock {
    const { incarnation } = process;
    return {
      now: () => this.now + process.skewMs,
      realNow: () => this.now + process.skewMs,
      monotonic: () => this.elapsed - process.missedMs(this.now),
      sleep: (ms, signal) =>
        new Promise((resolve) => {
          if (signal?.aborted) return resolve();
          let done = false;
          const missedMs = process.missedMs(this.now);
          const wake = () => {
            if (done) return true;
            done = true;
            signal?.removeEventListener('abort', wake);
            resolve();
            return false;
          };
          signal?.addEventListener('abort', wake, { once: true });
          // A freeze stops the monotonic clock. So the timer is late by the time for which this clock stood still during the sleep.
          const due = (): unknown => {
            const late = process.missedMs(this.now) - missedMs;
            if (done || late <= extended) return done || this.deliver(process, incarnation, wake);
            this.at(late - extended, due);
            extended = late;
            return true;
          };
          let extended = 0;
          this.at(Math.max(0, ms), due);
        }),
    };
  }

  ids(process: { readonly skewMs: number } = { skewMs: 0 }): Ids {
    const bytes = (count: number) => Uint8Array.from({ length: count }, () => this.idRng.bits() & 0xff);
    return {
      uuid: () => uuidV7(this.now + process.skewMs, bytes(16)),
      confirmationNumber: () => crockford(bytes(8), 10).replace(/^(.{4})(.{4})(.{2})$/, '$1-$2-$3'),
    };
  }

  /** A timer for clients and for the bank's nightly run. They neither crash nor pause. */
  wait(ms: number): Promise<void> {
    return new Promise((resolve) => this.at(ms, () => resolve()));
  }
}

type Told<T> = { readonly ok: true; readonly value: T } | { readonly ok: false; readonly error: Error };

const asError = (error: unknown): Error => (error instanceof Error ? error : new Error(String(error)));

const attempt = <T>(work: () => T): Told<T> => {
  try {
    return { ok: true, value: work() };
  } catch (error) {
    return { ok: false, error: asError(error) };
  }
};

const foundSomething = (value: unknown) => (Array.isArray(value) ? value.length > 0 : typeof value === 'number' && value > 0);

/** A short form of a value, for a story. */
const brief = (value: unknown): string => {
  if (value === undefined || value === null) return 'ok';
  if (typeof value !== 'object') return JSON.stringify(value);
  if (Array.isArray(value)) return `${value.length}`;
  const { kind, why, code, status, revision } = value as Record<string, unknown>;
  if (typeof revision === 'bigint') return `revision ${revision}`;
  return [kind, why, code, status].filter((part) => typeof part === 'string' || typeof part === 'number').join(' ') || 'ok';
};

const briefError = ({ name, message }: Error): string => `${name}: ${message}`;

/**
 * Runs `work`. Meanwhile Date.now, Math.random, performance.now, setTimeout and setInterval throw, since they bypass the ports. If the product caught
 * such an error, this function throws it at the end.
 */
export const withoutRealTime = async <T>(work: () => Promise<T>): Promise<T> => {
  const { performance: realPerformance } = globalThis;
  // Jest shares the object `performance` between spec files. So this realm gets one of its own, and what another spec left behind keeps its clock.
  const ownPerformance = Object.create(realPerformance) as Performance;
  const places: readonly (readonly [object, string])[] = [
    [Date, 'now'],
    [Math, 'random'],
    [ownPerformance, 'now'],
    [globalThis, 'setTimeout'],
    [globalThis, 'setInterval'],
  ];
  const real = places.map(([place, name]) => [place, name, Reflect.get(place, name) as unknown] as const);
  Reflect.set(globalThis, 'performance', ownPerformance);
  const { setImmediate: realImmediate } = globalThis;
  // The product defers some work with setImmediate. This work must run before the simulated time moves on.
  Reflect.set(globalThis, 'setImmediate', (run: () => void) => queueMicrotask(run));
  const leaks: Error[] = [];
  for (const [place, name] of places)
    Reflect.set(place, name, () => {
      const leak = new Error(`${name} inside the simulation: not through a port`);
      leaks.push(leak);
      throw leak;
    });
  try {
    const result = await work();
    const [leak] = leaks;
    if (leak) throw leak;
    return result;
  } finally {
    for (const [place, name, before] of real) Reflect.set(place, name, before);
    Reflect.set(globalThis, 'performance', realPerformance);
    Reflect.set(globalThis, 'setImmediate', realImmediate);
  }
};
