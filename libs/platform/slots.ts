import { type Clock, FairShare, type FairShareLimits, type Lane, ServiceError, type SlotRequest } from '#kernel';

export interface SlotsOptions extends FairShareLimits {
  /** The message to a refused caller. */
  readonly refusal: string;
  /** After this time, in seconds, a refused caller may try again. */
  readonly retryAfterSeconds: number;
  /** If others wait, a single slot that is held for longer is taken away: its holder waits for something else. Default: never. */
  readonly leaseMs?: number;
}

/** `share`: the account has more than its share waiting. `time`: no slot became free in time. */
export type SlotRefusal = 'share' | 'time';

/** A wait that the caller surrounds with something, for example to give back another slot meanwhile. */
export type Waiting = <T>(wait: () => Promise<T>) => Promise<T>;

/** After an absence, a request waits at most this long for its slot. Then it goes on without one, because its work has begun. */
const RESUME_MS = 1_000;

/** An account is alone again when no other one has taken a slot for this long. */
const ALONE_AFTER_MS = 10_000;

/** The right of a request to use something scarce. */
export interface Slot {
  /** How long the request has waited for the slot, in milliseconds. */
  readonly waitedMs: number;
  /** Gives the slot back. May be called again. */
  release(): void;
  /** Gives the slot back for the time of `work`, which waits for something else. Then takes a slot again, before new requests of the account. */
  away<T>(work: () => Promise<T>): Promise<T>;
}

interface Holder extends SlotRequest {
  /** When the lease began. */
  since: number;
  readonly admit: () => void;
  readonly admitted: Promise<void>;
}
const holderOf = ({ accountId, lane, slots }: SlotRequest): Holder => {
  let admit = () => {};
  const admitted = new Promise<void>((resolve) => (admit = resolve));
  return { accountId, lane, slots, since: 0, admit, admitted };
};

/** Waits for slots that are shared fairly among accounts ({@link FairShare}). */
export class Slots {
  private readonly share: FairShare<Holder>;
  /** In the order in which their lease ends. */
  private readonly leases = new Set<Holder>();
  private readonly watchers = new Set<(reason: SlotRefusal) => void>();
  private waitingNow = 0;
  private looking = false;
  private usedMs = Number.NEGATIVE_INFINITY;
  private lastAccount: string | null = null;
  /** The last time when two requests in a row came from different accounts. */
  private changedMs = Number.NEGATIVE_INFINITY;

  constructor(
    private readonly clock: Pick<Clock, 'monotonic' | 'sleep'>,
    private readonly options: SlotsOptions,
  ) {
    this.share = new FairShare(options);
  }

  /**
   * Takes a slot. Waits for at most `waitMs`, or until `gone` aborts. Throws RATE_LIMITED if the account has more than its share waiting, or if there
   * is no slot in time.
   */
  async take(request: SlotRequest, waitMs: number, { during, gone }: { during?: Waiting; gone?: AbortSignal } = {}): Promise<Slot> {
    if (gone?.aborted) throw this.refusal();
    const begun = this.clock.monotonic();
    if (this.lastAccount !== null && this.lastAccount !== request.accountId) this.changedMs = begun;
    this.lastAccount = request.accountId;
    this.share.isAlone = begun - this.changedMs >= ALONE_AFTER_MS;
    const holder = holderOf(request);
    const entered = this.share.enter(holder);
    if (entered === 'refused') throw this.refused('share');
    if (entered === 'admitted') this.lease(holder);
    else {
      const wait = () => this.waited(holder, waitMs, gone);
      if (!(await (during ? during(wait) : wait()))) throw gone?.aborted ? this.refusal() : this.refused('time');
    }
    return this.slotOf(holder, this.clock.monotonic() - begun);
  }

  /** For how long no request has held a slot or waited for one, in milliseconds. Infinity: since the process began. */
  get idleMs(): number {
    return this.share.isIdle ? this.clock.monotonic() - this.usedMs : 0;
  }

  /** How many requests of a lane wait. */
  waiting(lane: Lane): number {
    return this.share.waiting(lane);
  }

  /** Calls `watcher` for each request that was refused. */
  watch(watcher: (reason: SlotRefusal) => void): void {
    this.watchers.add(watcher);
  }

  private slotOf(first: Holder, waitedMs: number): Slot {
    let holder = first;
    let isOver = false;
    let absences = 0;
    return {
      waitedMs,
      release: () => {
        isOver = true;
        this.leave(holder);
      },
      away: async (work) => {
        if (absences++ === 0) this.leave(holder);
        try {
          return await work();
        } finally {
          absences -= 1;
          if (!isOver && absences === 0) {
            holder = holderOf({ ...first, lane: 'begun' });
            if (this.share.enter(holder) === 'admitted') this.lease(holder);
            else await this.waited(holder, RESUME_MS);
            // The answer was sent meanwhile, or the client is gone.
            if (isOver) this.leave(holder);
          }
        }
      },
    };
  }

  /** Waits until the holder is admitted. false: it is not admitted in time, and waits no longer. */
  private async waited(holder: Holder, ms: number, gone?: AbortSignal): Promise<boolean> {
    const over = new AbortController();
    this.waitingNow += 1;
    if (this.options.leaseMs !== undefined) void this.lookForLeases(this.options.leaseMs);
    const isAdmitted = await new Promise<boolean>((resolve) => {
      void holder.admitted.then(() => resolve(true));
      const giveUp = () => resolve(false);
      void this.clock.sleep(Math.max(0, ms), over.signal).then(giveUp);
      if (gone?.aborted) giveUp();
      else gone?.addEventListener('abort', giveUp, { once: true, signal: over.signal });
    });
    this.waitingNow -= 1;
    // Without a reason, Node would create a DOMException with a stack trace for every wait.
    over.abort('done');
    if (!isAdmitted) this.leave(holder);
    return isAdmitted;
  }

  private leave(holder: Holder): void {
    this.usedMs = this.clock.monotonic();
    this.leases.delete(holder);
    for (const next of this.share.leave(holder)) {
      this.lease(next);
      next.admit();
    }
  }

  private lease(holder: Holder): void {
    // A request of several slots holds something scarce until its end, for example a connection of a pool.
    if (this.options.leaseMs === undefined || holder.slots > 1) return;
    holder.since = this.clock.monotonic();
    this.leases.add(holder);
  }

  /** While requests wait, takes slots away whose lease is over. */
  private async lookForLeases(leaseMs: number): Promise<void> {
    if (this.looking) return;
    this.looking = true;
    while (this.waitingNow > 0) {
      const oldest = this.clock.monotonic() - leaseMs;
      for (const holder of this.leases) {
        if (holder.since > oldest) break;
        this.leave(holder);
      }
      await this.clock.sleep(leaseMs / 4);
    }
    this.looking = false;
  }

  private refused(reason: SlotRefusal): ServiceError {
    for (const watcher of this.watchers) watcher(reason);
    return this.refusal();
  }

  private refusal(): ServiceError {
    const { refusal, retryAfterSeconds } = this.options;
    return new ServiceError('RATE_LIMITED', refusal, {}, { retryAfterSeconds });
  }
}
