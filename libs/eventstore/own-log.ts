/**
 * The guard of the log wraps the event store. It refuses every append if the log is another one or has lost events.
 *
 * A check asks the log for the newest event that an earlier check found, and for every event acknowledged to this process since. It also asks for the
 * marks of other processes, checkpoints and signed heads. Checks run at the start, once a second, and before each call of a gateway. On Postgres, the
 * append before that call is the check. A store that cannot be asked counts as an outage, not as a loss (docs/decisions/0032-marks-and-checks.md).
 */
import { setMaxListeners } from 'node:events';
import { type Clock, type Json, orStopped, timestamp } from '#kernel';
import { batched, type Logger, shared } from '#platform';
import {
  type EventStore,
  type Expected,
  type Mark,
  type NewEvent,
  OutcomeUnknown,
  type Position,
  StoreIncident,
  Unavailable,
} from './event-store.js';
import { installationIn, type SealedPlace } from './installation.js';
import type { Finding, Incident, KeptIntent, Known, KnownMark, MarkBook, OwnMarks } from './marks.js';

/** Intents of one write to MARKS_DIR. */
const MOST_KEPT_AT_ONCE = 1_000;
/** The pause between two routine checks. */
const CHECK_EVERY_MS = 1_000;
/** A check that found a fault is repeated once after this pause. */
const REPEAT_MS = 100;
/** A check that found a fault is not repeated if it took this long. In a cluster the store itself has repeated the read by then. */
const REPEATED_BY_STORE_MS = 3_000;
/** Pause between two checks of the newest signed head. The seal's checkpoint, which covers as much, is checked more often. */
const HEAD_EVERY_MS = 60_000;
/** Pause between two error lines while an incident is open. */
const REPORT_EVERY_MS = 60_000;

export interface OwnLogOptions {
  readonly store: EventStore;
  readonly book: MarkBook;
  readonly installationId: string;
  readonly clock: Clock;
  readonly log: Pick<Logger, 'warn' | 'error'>;
  /**
   * True if an acknowledged append is itself a check. On Postgres, a log can be restored or replaced only between sessions, and each session is
   * checked before its first append ({@link OwnLog.checkSession}).
   */
  readonly appendsProve: boolean;
  readonly checkEveryMs?: number;
  /** false: no error lines for an incident, because the caller reports it. Default: an error line every minute. */
  readonly reportsIncident?: boolean;
  /** The newest signed head. null: nothing is signed. */
  readonly signedHead?: () => Promise<SealedPlace | null>;
}

/** The guard's checks, for code that does not need the event store. */
export interface LogGate {
  /** The open incident. null: there is none that this process knows of. */
  readonly incident: Incident | null;
  /**
   * Resolves when a check that began after the call has found every mark. `intent`: the position of the append just before the call. With
   * `appendsProve`, that append is the check. Throws {@link StoreIncident}. If the check cannot be made, throws {@link Unavailable} or the error of
   * the database.
   *
   * `kept`: what is needed to make the intent again. It is kept outside of the log before this resolves. So a loss of the intent is noticed, and the
   * gateway can be asked, also if the process dies at once. Throws if it cannot be kept.
   */
  verified(intent: Position | null, kept?: Json): Promise<void>;
  /** Opens an incident, unless one is open: the log lacks an event that other evidence shows. `message`: "it does not hold …". */
  report(message: string): Promise<void>;
  /**
   * Proves that the events which were just read belong to this log. `last`: the last of them; null: only the end of the log was read. Call it before
   * rows are made from these events. False: the log does not hold `last`, because another log answered the read. Read again. Throws as
   * {@link verified}.
   */
  verifiedRead(last: Mark | null): Promise<boolean>;
  /** Throws {@link StoreIncident} while an incident is open. */
  refuse(): void;
}

export class OwnLog implements EventStore, LogGate {
  incident: Incident | null = null;
  /** The newest event that a check of this process has found. */
  private confirmed: Mark | null = null;
  /** Events whose appends were acknowledged to this process since the last check, in the order of the answers. */
  private acknowledged: Mark[] = [];
  /** The newest event whose append was acknowledged to this process. */
  private newestTold: Mark | null = null;
  /** The marks of other processes, files and checkpoints that a check of this process has found. */
  private found: ReadonlySet<string> = new Set();
  /** The last events of reads that wait for a check. */
  private readonly reads = new Set<{ readonly mark: Mark; isHeld: boolean }>();
  private wholeAt = Number.NEGATIVE_INFINITY;
  private headAt = Number.NEGATIVE_INFINITY;
  private hasAppended = false;
  /** The server of the last session for appends. null: there was none. */
  private server: string | null = null;
  private written = '';
  private reportedAt = Number.NEGATIVE_INFINITY;
  private opened = manyListeners();
  private readonly checkEveryMs: number;

  get installationId(): string {
    return this.options.installationId;
  }

  constructor(private readonly options: OwnLogOptions) {
    this.checkEveryMs = options.checkEveryMs ?? CHECK_EVERY_MS;
  }

  // ---- checks

  /** The check of a start. Throws {@link Unavailable} and errors of the database. */
  begin(): Promise<void> {
    return this.check();
  }

  /** Checks the log and writes the marks of this process once a second, until `stop` aborts. Then writes the marks once more. */
  async run(stop: AbortSignal): Promise<void> {
    const { book, clock, log } = this.options;
    while (!stop.aborted) {
      await clock.sleep(this.checkEveryMs, stop);
      if (stop.aborted) break;
      const forget = book.turn();
      // An outage is not reported here. The work that fails reports it.
      const isWhole = await orStopped(this.check(), stop).then(
        () => this.incident === null,
        (error: unknown) => {
          if (!stop.aborted && !(error instanceof Unavailable)) log.warn({ err: error }, 'the event store could not be checked');
          return false;
        },
      );
      // The marks of this check cover the intents before it.
      if ((await this.keepMarks()) && isWhole)
        await forget().catch((error: unknown) => log.warn({ err: error }, 'kept intents could not be deleted'));
    }
    await this.keepMarks();
  }

  /** Writes the newest marks of this process to the mark book. false: they could not be written. */
  async keepMarks(): Promise<boolean> {
    // A process that has appended nothing writes no marks. In an incident, what was acknowledged before it must be kept: a resume asks for it.
    if (!this.hasAppended) return true;
    const own = this.marks();
    const text = JSON.stringify(own);
    if (text === this.written) return true;
    try {
      await this.options.book.write(own);
      this.written = text;
      return true;
    } catch (error) {
      this.options.log.warn({ err: error }, 'the newest event of this process could not be kept; the next try comes in a second');
      return false;
    }
  }

  async verified(intent: Position | null, kept?: Json): Promise<void> {
    this.refuse();
    const keeping = kept === undefined ? null : this.keepIntent({ mark: this.newestTold ?? this.confirmed, intent: kept });
    await Promise.all([keeping, intent !== null && this.options.appendsProve ? null : this.check()]);
    this.refuse();
  }

  async report(message: string): Promise<void> {
    if (!this.incident) await this.open({ kind: 'lost_events', message, mark: null });
  }

  /** Intents of requests that arrive together share one write. */
  private readonly keepIntent = batched(
    async (intents: readonly KeptIntent[]) => {
      await this.options.book.keep(intents).catch((error: unknown) => {
        this.options.log.error({ err: error }, 'intents cannot be kept in MARKS_DIR, so their gateway calls do not begin');
        throw error;
      });
      return intents.map(() => true);
    },
    { maxItems: MOST_KEPT_AT_ONCE, inFlight: 1 },
  );

  async verifiedRead(last: Mark | null): Promise<boolean> {
    // On Postgres, events and rows are in one database and can only be restored together. So no check is needed.
    if (this.options.appendsProve) {
      this.refuse();
      return true;
    }
    if (last === null) {
      await this.verified(null);
      return true;
    }
    const read = { mark: last, isHeld: false };
    this.reads.add(read);
    try {
      await this.verified(null);
      return read.isHeld;
    } finally {
      this.reads.delete(read);
    }
  }

  refuse(): void {
    if (this.incident) throw storeIncident(this.incident);
  }

  /**
   * Checks the marks over a new session for appends. If it throws, the caller must not use the session. `server`: a name that changes when the server
   * is started again or replaced.
   */
  async checkSession(missing: (marks: readonly Mark[]) => Promise<readonly Mark[]>, server: string): Promise<void> {
    const { book, clock } = this.options;
    // Other processes write their marks once a second. What they were told just before the restart is in the book or in an incident after this time.
    if (this.server !== null && server !== this.server) await clock.sleep(2 * this.checkEveryMs);
    const look = async () => {
      const { marks, incident } = await book.read({ fresh: true });
      if (incident) this.enter(incident);
      this.refuse();
      const wanted = [...this.own(), ...marks];
      return findingOf(wanted, await missing(wanted.map(({ mark }) => mark)));
    };
    await this.openIfFound(look, () => true);
    this.refuse();
    this.server = server;
  }

  /** Checks the log before the first append over a connection to KurrentDB. Throws {@link StoreIncident}, {@link Unavailable} and errors of the database. */
  async checkConnection(): Promise<void> {
    await this.check();
    this.refuse();
  }

  /** Each answer comes from a check that began after the call. */
  private readonly check = shared(() => this.checkOnce());

  private async checkOnce(): Promise<void> {
    const { clock, appendsProve } = this.options;
    const begun = clock.monotonic();
    await this.openIfFound(
      () => this.look(),
      () => appendsProve || clock.monotonic() - begun < REPEATED_BY_STORE_MS,
    );
  }

  /** Opens an incident if a look finds a fault, and finds it again when it is repeated. */
  private async openIfFound(look: () => Promise<Finding | null>, isRepeated: () => boolean): Promise<void> {
    let finding = await look();
    if (finding && isRepeated()) {
      await this.options.clock.sleep(REPEAT_MS);
      finding = await look();
    }
    if (finding) await this.open(finding);
  }

  /** Looks at the log once. null: every mark was found, or an incident is open. */
  private async look(): Promise<Finding | null> {
    const { store, book, clock } = this.options;
    const begun = clock.monotonic();
    await this.tell();
    if (this.incident && !(await this.hasEnded(this.incident))) return null;
    const told = this.acknowledged.slice();
    const own = this.own();
    // `whole`: also check the identity and the end of the log. If the log has a confirmed mark, it is ours and was not cut. So with a confirmed mark,
    // identity and end are checked less often. A mark that was only acknowledged proves nothing: another log may have acknowledged it.
    const whole = !own.some(({ confirmed }) => confirmed) || begun - this.wholeAt >= this.checkEveryMs / 2;
    // Each check reads the book. A virtual machine that was suspended cannot tell how old its copy of the book is.
    const reads = [...this.reads];
    const marks = [...own, ...reads].map(({ mark }) => mark);
    const asking = Promise.all([store.missing(marks), whole ? this.otherLog() : null]);
    asking.catch(() => undefined);
    // An incident that another process has written down counts also while the store does not answer.
    const known = await book.read();
    if (known.incident) this.enter(known.incident);
    if (this.incident) return null;
    const [missing, other] = await asking;
    for (const read of reads) read.isHeld = !missing.some((mark) => nameOf(mark) === nameOf(read.mark));
    if (this.incident) return null;
    const others = known.marks.filter(({ mark }) => !this.found.has(nameOf(mark)));
    const lostOfOthers = others.length > 0 ? await store.missing(others.map(({ mark }) => mark)) : [];
    const wanted = [...own, ...others];
    const lost = findingOf(wanted, [...missing, ...lostOfOthers]);
    // The incident names what the log is now. A log without identity that holds an event which a check has found before is ours.
    const stranger = whole ? other : lost && (await this.otherLog());
    const absent = new Set([...missing, ...lostOfOthers].map(nameOf));
    const isOurs = stranger?.inLog === null && wanted.some(({ confirmed, mark }) => confirmed && !absent.has(nameOf(mark)));
    const finding = (isOurs ? null : stranger?.finding) ?? lost ?? (isOurs ? { ...stranger.finding, kind: 'lost_events' as const } : null);
    if (finding) return finding;
    const beyond = whole ? await this.outside(known.checkpoints) : null;
    if (beyond) return beyond;
    if (whole) this.wholeAt = begun;
    this.found = new Set(known.marks.map(({ mark }) => nameOf(mark)));
    this.confirmed = newest(wanted.map(({ mark }) => mark));
    const checked = new Set(told);
    this.acknowledged = this.acknowledged.filter((mark) => !checked.has(mark));
    return null;
  }

  private marks(): OwnMarks {
    return { acknowledged: newest(this.acknowledged) ?? this.confirmed, confirmed: this.confirmed };
  }

  private own(): KnownMark[] {
    const marks = this.confirmed ? [{ where: 'the newest event that a check of this process has found', mark: this.confirmed, confirmed: true }] : [];
    return [...marks, ...this.acknowledged.map((mark) => ({ where: 'an event that this process has appended', mark, confirmed: false }))];
  }

  /** `inLog`: the installation that the log names. null: none. */
  private async otherLog(): Promise<{ readonly finding: Finding; readonly inLog: string | null } | null> {
    const { store, installationId } = this.options;
    const inLog = await installationIn(store);
    if (inLog === installationId) return null;
    const is = inLog !== null ? `belongs to installation ${inLog}` : (await store.head()) === null ? 'is empty' : 'belongs to no installation';
    return { finding: { kind: 'other_log', message: `it ${is}, and this database belongs to ${installationId}`, mark: null }, inLog };
  }

  /** Checks that the log reaches every checkpoint and holds the event of the newest signed head. */
  private async outside(checkpoints: Known['checkpoints']): Promise<Finding | null> {
    const { store, clock, signedHead } = this.options;
    const end = checkpoints.length > 0 ? await store.head() : null;
    const beyond = checkpoints.find(({ position }) => end === null || position > end);
    // A deposed leader may report an end that is too early. In a cluster, `eventAt` reads again for some seconds.
    if (beyond && !(await store.eventAt(beyond.position))) {
      const message = `it ends at ${end ?? 'its start'}, before ${beyond.position}, where the checkpoint ${beyond.name} stands`;
      return { kind: 'lost_events', message, mark: null };
    }
    if (!signedHead || clock.monotonic() - this.headAt < HEAD_EVERY_MS) return null;
    const head = await signedHead();
    const event = head && (await store.eventAt(head.position));
    if (head && !(event && head.isEvent(event)))
      return { kind: 'lost_events', message: `it does not hold the event at ${head.position} that ${head.where} covers`, mark: null };
    this.headAt = clock.monotonic();
    return null;
  }

  // ---- the incident

  private async open(finding: Finding): Promise<void> {
    const { log, clock } = this.options;
    // Stops the appends of this process first, because the database may not be able to record the incident now.
    this.enter({ ...finding, id: null, since: timestamp(clock.realNow()), foundBy: 'this process' });
    await this.tell().catch((error: unknown) => log.error({ err: error }, 'the incident could not be written down; the next try comes in a second'));
  }

  /**
   * Writes an incident that this process found to the mark book, where other processes read it. Throws the error of the database; the next check
   * tries again.
   */
  private async tell(): Promise<void> {
    const { book } = this.options;
    if (!this.incident || this.incident.id !== null) return;
    const { kind, message, mark } = this.incident;
    this.incident = await book.open({ kind, message, mark });
    await book.write(this.marks());
  }

  private enter(incident: Incident): void {
    const { clock, log } = this.options;
    this.incident = incident;
    this.opened.abort();
    if (this.options.reportsIncident === false || clock.monotonic() - this.reportedAt < REPORT_EVERY_MS) return;
    this.reportedAt = clock.monotonic();
    log.error({ kind: incident.kind, since: incident.since, foundBy: incident.foundBy }, storeIncident(incident).message);
  }

  private async hasEnded(before: Incident): Promise<boolean> {
    const { incident } = await this.options.book.read();
    if (incident) this.enter(incident);
    // A newer incident, which another check opened during the read, must stay.
    else if (before === this.incident) await this.leaveIfClosed(before);
    return this.incident === null;
  }

  /**
   * Ends the incident if a person has closed it. Also drops the marks of this process that no check has found, because they may come from another
   * log.
   */
  private async leaveIfClosed(incident: Incident): Promise<void> {
    if (incident.id === null) return;
    if (!(await this.options.book.isClosed(incident.id))) {
      // A restored database does not have the incident, so the incident is written again.
      this.incident = { ...incident, id: null };
      return this.tell();
    }
    if (this.incident !== incident) return;
    this.incident = null;
    this.written = '';
    this.acknowledged = [];
    this.newestTold = null;
    this.found = new Set();
    this.opened = manyListeners();
    this.reportedAt = Number.NEGATIVE_INFINITY;
  }

  // ---- the event store

  async append(stream: string, expected: Expected, events: readonly NewEvent[], options?: { timeoutMs?: number }) {
    this.refuse();
    const confirmed = this.confirmed;
    const appending = this.options.store.append(stream, expected, events, options);
    const appended = await this.orIncident(appending);
    this.hasAppended = true;
    const mark = { position: appended.position, id: events.at(-1)!.id.toLowerCase() };
    this.acknowledged.push(mark);
    if (!this.newestTold || mark.position > this.newestTold.position) this.newestTold = mark;
    // The append was a repeat, or the log was exchanged: a new event gets a position after `confirmed`.
    if (confirmed && appended.position <= confirmed.position) void this.check().catch(() => undefined);
    return appended;
  }

  /** If an incident opens during an append, throws OutcomeUnknown at once, without the wait for the time limit. */
  private async orIncident<T>(appending: Promise<T>): Promise<T> {
    const { signal } = this.opened;
    let stop: () => void = () => undefined;
    const incident = new Promise<never>((_, reject) => {
      stop = () => reject(new OutcomeUnknown('an incident of the event store opened during the append'));
      signal.addEventListener('abort', stop, { once: true });
    });
    try {
      return await Promise.race([appending, incident]);
    } finally {
      signal.removeEventListener('abort', stop);
      appending.catch(() => undefined);
    }
  }

  read: EventStore['read'] = (...given) => this.options.store.read(...given);
  readAll: EventStore['readAll'] = (...given) => this.options.store.readAll(...given);
  subscribe: EventStore['subscribe'] = (...given) => this.options.store.subscribe(...given);
  head: EventStore['head'] = () => this.options.store.head();
  missing: EventStore['missing'] = (marks) => this.options.store.missing(marks);
  eventAt: EventStore['eventAt'] = (position) => this.options.store.eventAt(position);
  close: EventStore['close'] = () => this.options.store.close();
  get readStreams(): EventStore['readStreams'] {
    const { store } = this.options;
    return store.readStreams && ((streams) => store.readStreams!(streams));
  }
}

/** A gate that never refuses. For a command that has just found the log whole and is about to close the incident. */
export const foundWhole: LogGate = {
  incident: null,
  verified: async () => undefined,
  verifiedRead: async () => true,
  report: async () => undefined,
  refuse: () => undefined,
};

/** Each append in flight adds a listener, so the limit of listeners is removed. */
const manyListeners = (): AbortController => {
  const controller = new AbortController();
  setMaxListeners(0, controller.signal);
  return controller;
};

/** The error of an incident, in one line. */
const storeIncident = ({ kind, message }: Incident): StoreIncident =>
  new StoreIncident(
    `${kind === 'other_log' ? 'the event store is not the log of this installation' : 'the event store has lost events'}: ${message}; nothing is charged or changed; run payfold log status`,
  );

const nameOf = ({ position, id }: Mark): string => `${position}/${id}`;

const newest = (marks: readonly Mark[]): Mark | null =>
  marks.reduce<Mark | null>((last, mark) => (last && last.position >= mark.position ? last : mark), null);

const findingOf = (wanted: readonly KnownMark[], missing: readonly Mark[]): Finding | null => {
  const names = new Set(missing.map(nameOf));
  const lost = wanted.filter(({ mark }) => names.has(nameOf(mark)));
  const [first] = lost;
  if (!first) return null;
  const { mark, where } = first;
  const others = lost.length > 1 ? ` and ${lost.length - 1} more` : '';
  return { kind: 'lost_events', message: `it does not hold event ${mark.id} at ${mark.position}, ${where}${others}`, mark };
};
