/**
 * The guard of the log wraps the event store. If the log is another one, or has lost events, the guard refuses every append.
 *
 * A check asks for the newest event that an earlier check found, and for every event acknowledged to this process since. It also asks for the marks
 * of other processes, checkpoints and signed heads. Checks run at the start, once a second, and before each call of a gateway. A store that cannot be
 * asked, or a standby that lags, is an outage and proves nothing (docs/decisions/0032-marks-and-checks.md).
 */
import { setMaxListeners } from 'node:events';
import { type Clock, orStopped, timestamp } from '#kernel';
import { type Logger, shared } from '#platform';
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
import type { Finding, Incident, Known, KnownMark, MarkBook, OwnMarks } from './marks.js';

/** The pause between two routine checks. A simulation may set a longer one. */
const CHECK_EVERY_MS = 1_000;
/** A check that found something is repeated once after this pause. */
const REPEAT_MS = 100;
/** A store that took this long has looked again by itself: a cluster whose leader may be deposed. */
const REPEATED_BY_STORE_MS = 3_000;
/** Between two looks for the newest signed head. Until then the checkpoint of the seal says as much. */
const HEAD_EVERY_MS = 60_000;
/** Between two error lines while an incident is open. */
const REPORT_EVERY_MS = 60_000;

export interface OwnLogOptions {
  readonly store: EventStore;
  readonly book: MarkBook;
  readonly installationId: string;
  readonly clock: Clock;
  readonly log: Pick<Logger, 'warn' | 'error'>;
  /**
   * True if an acknowledged append is itself a check: its session was checked first, and loses no event while it is open. True on Postgres: its log
   * can be restored or replaced only between sessions ({@link OwnLog.checkSession}).
   */
  readonly appendsProve: boolean;
  readonly checkEveryMs?: number;
  /** false: the caller says itself that an incident refuses its work. Default: an error line every minute. */
  readonly reportsIncident?: boolean;
  /** The newest signed head. null: nothing is signed. */
  readonly signedHead?: () => Promise<SealedPlace | null>;
}

/** The part of it that other work needs. */
export interface LogGate {
  /** The open incident. null: there is none that this process knows of. */
  readonly incident: Incident | null;
  /**
   * Resolves when a check that began after the call has found everything. If `appendsProve` is set, the append of `intent` is that check. Throws
   * {@link StoreIncident}; {@link Unavailable} or the error of the database if the check could not be made.
   */
  verified(intent: Position | null): Promise<void>;
  /** Call it before rows are made from events that were just read. It proves that those events belong to this log. Throws as {@link verified}. */
  verifiedRead(): Promise<void>;
  /** Throws {@link StoreIncident} while an incident is open. For work that must not begin then. */
  refuse(): void;
}

export class OwnLog implements EventStore, LogGate {
  incident: Incident | null = null;
  /** The newest event that a check of this process has found. */
  private confirmed: Mark | null = null;
  /** Events that this process was told of since then, in the order of their answers. */
  private acknowledged: Mark[] = [];
  /** Marks of others, as they were read last, and those of them that a check of this process has found. */
  private others: readonly KnownMark[] = [];
  private found: ReadonlySet<string> = new Set();
  private wholeAt = Number.NEGATIVE_INFINITY;
  private headAt = Number.NEGATIVE_INFINITY;
  private hasAppended = false;
  private written = '';
  private reportedAt = Number.NEGATIVE_INFINITY;
  private opened = manyListeners();
  private readonly checkEveryMs: number;

  constructor(private readonly options: OwnLogOptions) {
    this.checkEveryMs = options.checkEveryMs ?? CHECK_EVERY_MS;
  }

  // ---- checks

  /** The check of a start. Throws {@link Unavailable} and errors of the database. */
  begin(): Promise<void> {
    return this.check();
  }

  /** Checks once a second and keeps the marks of this process, until `stop` aborts. Then it keeps them a last time. */
  async run(stop: AbortSignal): Promise<void> {
    const { clock, log } = this.options;
    while (!stop.aborted) {
      await clock.sleep(this.checkEveryMs, stop);
      if (stop.aborted) break;
      // An outage of a store is reported where work fails. The next check comes in a second.
      await orStopped(this.check(), stop).catch((error: unknown) => {
        if (!stop.aborted && !(error instanceof Unavailable)) log.warn({ err: error }, 'the event store could not be checked');
      });
      await this.keepMarks();
    }
    await this.keepMarks();
  }

  /** Keeps the newest marks of this process where they outlive it. */
  async keepMarks(): Promise<void> {
    // A process that has appended nothing has no marks of its own.
    if (this.incident || !this.hasAppended) return;
    const own = this.marks();
    const text = JSON.stringify(own);
    if (text === this.written) return;
    try {
      await this.options.book.write(own);
      this.written = text;
    } catch (error) {
      this.options.log.warn({ err: error }, 'the newest event of this process could not be kept; the next try comes in a second');
    }
  }

  async verified(intent: Position | null): Promise<void> {
    this.refuse();
    if (intent !== null && this.options.appendsProve) return;
    await this.check();
    this.refuse();
  }

  async verifiedRead(): Promise<void> {
    // On Postgres events and rows lie in one database, and go back together.
    if (this.options.appendsProve) return this.refuse();
    return this.verified(null);
  }

  refuse(): void {
    if (this.incident) throw storeIncident(this.incident);
  }

  /** The first check of a new session for appends. Throws {@link StoreIncident}; then the session is not used. */
  async checkSession(missing: (marks: readonly Mark[]) => Promise<readonly Mark[]>): Promise<void> {
    const look = async () => {
      const wanted = [...this.own(), ...this.others];
      return findingOf(wanted, await missing(wanted.map(({ mark }) => mark)));
    };
    if ((await look()) === null) return;
    await this.options.clock.sleep(REPEAT_MS);
    const finding = await look();
    if (finding) await this.open(finding);
    this.refuse();
  }

  /** Each answer comes from a check that began after the call. */
  private readonly check = shared(() => this.checkOnce());

  private async checkOnce(): Promise<void> {
    const { clock } = this.options;
    const begun = clock.monotonic();
    let finding = await this.look();
    if (finding && clock.monotonic() - begun < REPEATED_BY_STORE_MS) {
      await clock.sleep(REPEAT_MS);
      finding = await this.look();
    }
    if (finding) await this.open(finding);
  }

  /** null: everything was found. */
  private async look(): Promise<Finding | null> {
    const { store, book, clock } = this.options;
    const begun = clock.monotonic();
    await this.tell();
    const before = this.incident;
    const known = await book.read();
    if (known.incident) this.enter(known.incident);
    // An incident that was found during the read is not closed by it.
    else if (before && before === this.incident) await this.leaveIfClosed(before);
    if (this.incident) return null;

    this.others = known.marks;
    const told = this.acknowledged.slice();
    const wanted = [...this.own(), ...known.marks.filter(({ mark }) => !this.found.has(nameOf(mark)))];
    // A mark that a check has found proves the identity too, and the end of the log moves only under a cut that loses the newest mark. An event that
    // was only acknowledged proves neither: a log of others may have told of it.
    const whole = !wanted.some(({ confirmed }) => confirmed) || begun - this.wholeAt >= this.checkEveryMs / 2;
    const [lost, other] = await Promise.all([store.missing(wanted.map(({ mark }) => mark)), whole ? this.otherLog() : null]);
    const finding = other ?? findingOf(wanted, lost) ?? (whole ? await this.outside(known.checkpoints) : null);
    if (finding) return finding;
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

  private async otherLog(): Promise<Finding | null> {
    const { store, installationId } = this.options;
    const inLog = await installationIn(store);
    if (inLog === installationId) return null;
    const is = inLog === null ? 'belongs to no installation' : `belongs to installation ${inLog}`;
    return { kind: 'other_log', message: `it ${is}, and this database to ${installationId}`, mark: null };
  }

  /** Places that must lie in the log: those of checkpoints, and that of the newest signed head. */
  private async outside(checkpoints: Known['checkpoints']): Promise<Finding | null> {
    const { store, clock, signedHead } = this.options;
    const end = checkpoints.length > 0 ? await store.head() : null;
    const beyond = checkpoints.find(({ position }) => end === null || position > end);
    // A node that is about to lose its leadership may name an earlier end. Its answer about a place is not believed at once.
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
    // This process stops at once, also if the database cannot be told now.
    this.enter({ ...finding, id: null, since: timestamp(clock.now()), foundBy: 'this process' });
    await this.tell().catch((error: unknown) => log.error({ err: error }, 'the incident could not be written down; the next try comes in a second'));
  }

  /** Writes an incident that this process found where other processes read it. Throws the error of the database; then it stays untold. */
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

  /** A person closed the incident. Drops the marks of this process that no check has found: they may come from another log. */
  private async leaveIfClosed(incident: Incident): Promise<void> {
    if (incident.id === null) return;
    if (!(await this.options.book.isClosed(incident.id))) {
      // The database went back behind the incident.
      this.incident = { ...incident, id: null };
      return this.tell();
    }
    if (this.incident !== incident) return;
    this.incident = null;
    this.written = '';
    this.acknowledged = [];
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
    this.acknowledged.push({ position: appended.position, id: events.at(-1)!.id.toLowerCase() });
    // A repeated append returns its old position. Any other append must get a position after `confirmed`; if it does not, the log is checked.
    if (confirmed && appended.position <= confirmed.position) void this.check().catch(() => undefined);
    return appended;
  }

  /** An append that is under way when an incident opens has an unknown outcome. Its caller need not wait for its time limit. */
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

/** The gate of a log that was found whole just now, although an incident is open: for the command that is about to close it. */
export const foundWhole: LogGate = {
  incident: null,
  verified: async () => undefined,
  verifiedRead: async () => undefined,
  refuse: () => undefined,
};

/** Each append that is under way listens to it. */
const manyListeners = (): AbortController => {
  const controller = new AbortController();
  setMaxListeners(0, controller.signal);
  return controller;
};

/** One line that says what is wrong and what to do first. */
const storeIncident = ({ kind, message }: Incident): StoreIncident =>
  new StoreIncident(
    `${kind === 'other_log' ? 'the event store is not the log of this installation' : 'the event store has lost events'}: ${message}; nothing is charged or changed; run payfold log status`,
  );

const nameOf = ({ position, id }: Mark): string => `${position}/${id}`;

const newest = (marks: readonly Mark[]): Mark | null =>
  marks.reduce<Mark | null>((last, mark) => (last && last.position >= mark.position ? last : mark), null);

const findingOf = (wanted: readonly KnownMark[], missing: readonly Mark[]): Finding | null => {
  const [first] = missing;
  if (!first) return null;
  const { where } = wanted.find(({ mark }) => nameOf(mark) === nameOf(first))!;
  const others = missing.length > 1 ? ` and ${missing.length - 1} more` : '';
  return { kind: 'lost_events', message: `it does not hold event ${first.id} at ${first.position}, ${where}${others}`, mark: first };
};
