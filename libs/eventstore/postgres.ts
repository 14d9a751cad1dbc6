/**
 * The event store on Postgres: one table, one function, group commit.
 *
 * An append takes its positions under a lock on the row `es.head`, which it holds until the commit. So positions have no gaps and follow the order of
 * commits. Numbers of a sequence do not follow the order of commits, so a reader could miss events. Appends that arrive while a batch is in flight go
 * into the next batch: many appends, one commit.
 */
import { systemClock, within, type Clock } from '#kernel';
import {
  ALL_AS_TEXT,
  batched,
  createPool,
  DatabaseUnavailable,
  isReadOnly,
  isRolledBack,
  StatementTimeout,
  type Client,
  type Migration,
  type Pool,
} from '#platform';
import { BeyondTheEnd, deserialise, LogGap, numericPosition, positionNumber, serialise, sizeOf, type Serialised } from './codec.js';
import { followPages, type Page, Tail } from './following.js';
import {
  Conflict,
  OutcomeUnknown,
  Unavailable,
  type EventStore,
  type Expected,
  type Mark,
  type NewEvent,
  type Position,
  ReadOnly,
  type Recorded,
  StoreIncident,
} from './event-store.js';

/** Schema `es`: the log, its head, and the append function. */
export const eventStoreMigration: Migration = {
  name: '0010-event-store',
  sql: `
create schema es;

-- One row, locked by every append. Nearly empty pages and an eager autovacuum keep its dead versions few.
create table es.head (
  one bool primary key default true check (one),
  position bigint not null
) with (fillfactor = 10, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
insert into es.head (position) values (0);

-- json, not jsonb: the bytes stay as they were written. No table of streams (a stream's revision is its last event's), no index on event ids.
create table es.events (
  position bigint primary key,
  stream_id text collate "C" not null,
  revision bigint not null,
  event_id uuid not null,
  type text not null,
  data json not null,
  meta json not null,
  stored_at timestamptz not null default clock_timestamp(),
  unique (stream_id, revision)
);

-- One call = many append requests in one commit. Per request: stream, expected revision (-1 no stream, -2 any), number of events.
-- Per event, in the order of the requests: its request (from 1), its ordinal in the request (from 1), id, type, data, meta.
-- Answer when every request stands at its expected revision, as nearly always: one row, request 0, 'ok', the head before the call; positions follow from it.
-- Else per request: 'ok' with last revision and position; 'duplicate', the same ids lie right after the expected revision already: a success with
-- the original revision and position; 'conflict', nothing written, with the present revision (-1 no stream). One bad request never fails the others.
-- Settings: JIT and re-planning cost more than the statement itself; a plan made on the empty table must not be a sequential scan for ever.
create function es.append_batch(
  p_stream text[], p_expected bigint[], p_count int[],
  p_request int[], p_ordinal int[], p_id uuid[], p_type text[], p_data text[], p_meta text[]
) returns table (request int, status text, revision bigint, last_position bigint)
language plpgsql set jit = off set enable_seqscan = off set plan_cache_mode = force_generic_plan as $$
declare
  v_head bigint;
begin
  -- A statement of its own: under READ COMMITTED the next one sees everything that was committed before the lock was granted.
  select h.position into v_head from es.head h where h.one for update;

  if not exists (
    select from unnest(p_stream, p_expected) asked(stream, expected)
    where asked.expected is distinct from
      coalesce((select e.revision from es.events e where e.stream_id = asked.stream order by e.revision desc limit 1), -1)
  ) then
    insert into es.events (position, stream_id, revision, event_id, type, data, meta)
    select v_head + event.nth, asked.stream, asked.expected + event.ordinal, event.id, event.type, event.data::json, event.meta::json
    from unnest(p_request, p_ordinal, p_id, p_type, p_data, p_meta) with ordinality event(request, ordinal, id, type, data, meta, nth)
    join unnest(p_stream, p_expected) with ordinality asked(stream, expected, request) on asked.request = event.request;
    update es.head h set position = v_head + cardinality(p_id) where h.one;
    perform pg_notify('es_appended', ''); -- one per call: a wake-up, never data
    return query values (0, 'ok', null::bigint, v_head);
    return;
  end if;

  return query
  with event as materialized (
    select * from unnest(p_request, p_ordinal, p_id, p_type, p_data, p_meta) u(request, ordinal, id, type, data, meta)
  ),
  asked as materialized (
    select u.request::int, u.stream, u.expected, u.count, coalesce(present.revision, -1) as present,
           row_number() over (partition by u.stream order by u.request) as nth
    from unnest(p_stream, p_expected, p_count) with ordinality u(stream, expected, count, request)
    left join lateral (
      select e.revision from es.events e where e.stream_id = u.stream order by e.revision desc limit 1
    ) present on true
  ),
  judged as materialized (
    select asked.*, known.last_position as known_position,
           case when asked.nth > 1 then 'conflict' -- a stream twice in one call: the caller sends it again
                when asked.expected in (-2, asked.present) then 'ok'
                when known.count = asked.count then 'duplicate'
                else 'conflict' end as status
    from asked
    left join lateral ( -- nothing is read here unless the expected revision lies behind
      select count(*)::int as count, max(e.position) as last_position
      from event join es.events e
        on e.stream_id = asked.stream and e.revision = asked.expected + event.ordinal and e.event_id = event.id
      where event.request = asked.request and asked.expected >= -1 and asked.expected < asked.present
    ) known on true
  ),
  placed as materialized (
    select judged.*,
           v_head + sum(case judged.status when 'ok' then judged.count else 0 end) over (order by judged.request) - judged.count as before
    from judged
  ),
  written as (
    insert into es.events (position, stream_id, revision, event_id, type, data, meta)
    select placed.before + event.ordinal, placed.stream, placed.present + event.ordinal, event.id, event.type, event.data::json, event.meta::json
    from event join placed on placed.request = event.request
    where placed.status = 'ok'
  ),
  moved as (
    update es.head h set position = t.last
    from (select max(placed.before + placed.count) as last from placed where placed.status = 'ok') t
    where h.one and t.last is not null
    returning pg_notify('es_appended', '')
  )
  select placed.request, placed.status,
         case placed.status when 'ok' then placed.present + placed.count
                            when 'duplicate' then placed.expected + placed.count
                            else placed.present end::bigint,
         case placed.status when 'ok' then (placed.before + placed.count)::bigint
                            when 'duplicate' then placed.known_position end
  from placed order by placed.request;
end $$;
`,
};

/** The default time limit of an append. Longer than a restart of Postgres (1–2 s). */
const APPEND_TIMEOUT_MS = 5_000;
/** How long the statement of a read may take. A read also waits at most this long for its statement. */
const READ_TIMEOUT_MS = 5_000;
const READ_CONNECTIONS = 8;
/** One statement reads the first pages of up to 16 streams. Two such statements run at a time, so the other connections serve other readers. */
const STREAMS_AT_ONCE = { maxItems: 16, inFlight: 2 } as const;
/** Events in the first page of a stream. Nearly every payment has fewer. The rest of a long stream is read alone. */
const FIRST_PAGE_EVENTS = 50;
/**
 * Maximum number of batches in flight, pipelined over one connection: while one batch commits, the next is sent. Measured: a second connection makes
 * appends 20 % slower, a third batch 10 %.
 */
const BATCHES_IN_FLIGHT = 2;
const BATCH_EVENTS = 256;
const BATCH_BYTES = 1_000_000;
/** Maximum number of appends in the queue. Further appends are refused at once. */
const QUEUED_APPENDS = 4_096;
const QUEUED_BYTES = 64_000_000;
/** How often the time limits of all appends are checked. A timer for each append would cost more. */
const SWEEP_MS = 25;
const BACKOFF_MS = { first: 25, most: 500 } as const;
/** Events per page of a read of the log. 200 to 1000 measured best for projections. */
const PAGE_EVENTS = 500;
/**
 * How often the log is polled in addition to NOTIFY. If a NOTIFY is lost, its event arrives at the next poll. `deaf`: no connection listens at
 * present.
 */
const POLL_MS = { listening: 5_000, deaf: 500 } as const;

export interface PostgresEventStoreOptions {
  readonly clock?: Clock;
  readonly readConnections?: number;
  /**
   * Called for each new session for appends, before its first append. `missing` asks over that session. `server`: the start time of the server. If the
   * function throws, the session is not used. Waiting appends get its {@link StoreIncident}. After an outage they are tried again.
   */
  readonly checkSession?: (missing: EventStore['missing'], server: string) => Promise<void>;
}

/**
 * Opens the store. Its connections: one for appends, one for LISTEN, and `readConnections` for reads, so that reads never delay an append. LISTEN
 * does not work through a pooler in transaction mode. The database must have {@link eventStoreMigration}. Errors are those of event-store.ts. A plain
 * `Error` is our fault (a limit, a missing table).
 */
export const createPostgresEventStore = (url: string, options: PostgresEventStoreOptions = {}): EventStore => {
  const clock = options.clock ?? systemClock;
  const pools = {
    append: createPool(url, { name: 'event append', max: 1 }),
    read: createPool(url, { name: 'event read', max: options.readConnections ?? READ_CONNECTIONS }),
    listen: createPool(url, { name: 'event listen', max: 1, listens: true }),
  };
  pools.append.options.pipeline = true;
  const reads = new Reads(pools.read, clock);
  const tail = new Tail(clock, (after) => reads.page(after, PAGE_EVENTS, undefined, undefined));
  const appends: Appends = new Appends(new Line(pools.append, clock, options.checkSession), clock, () => growth.announce());
  const growth = new Growth(pools.listen, clock, (session) => appends.isOwn(session));
  return {
    append: (stream, expected, events, { timeoutMs = APPEND_TIMEOUT_MS } = {}) => appends.add(stream, expected, events, timeoutMs),
    read: (stream, from = 0n, max = Number.POSITIVE_INFINITY) => reads.stream(stream, from, max),
    readStreams: (streams) => reads.streams(streams),
    readAll: (after, { max = Number.POSITIVE_INFINITY, until, streamPrefixes } = {}) => reads.log(after, max, until, streamPrefixes),
    subscribe: (after, { streamPrefixes } = {}) => {
      let begun = false;
      const subscription = followPages(
        {
          page: async (position, signal) => {
            for (let tries = 0; ; tries++) {
              try {
                // The log may have been exchanged since the last subscription, so check the cache before its first use.
                if (!begun) await tail.lookAgain();
                begun = true;
                const held = position === null ? null : await tail.page(position, PAGE_EVENTS, streamPrefixes);
                if (held) return held;
                const page = await reads.page(position, PAGE_EVENTS, undefined, streamPrefixes);
                if (page.atEnd && page.through !== null) tail.beginAt(page.through);
                return page;
              } catch (error) {
                if (!(error instanceof Unavailable) || signal.aborted) throw error;
                await clock.sleep(backoff(tries), signal);
              }
            }
          },
          growth: () => growth.count,
          grown: (count, signal) => growth.since(count, signal),
        },
        after,
      );
      const release = growth.follow();
      return {
        [Symbol.asyncIterator]: () => subscription[Symbol.asyncIterator](),
        close: async () => {
          await subscription.close().catch(() => undefined);
          release();
        },
      };
    },
    head: () => reads.head(),
    missing: (marks) => reads.missing(marks),
    eventAt: (position) => reads.eventAt(position),
    close: async () => {
      reads.close();
      await Promise.all([appends.close(), growth.close()]);
      await Promise.all(Object.values(pools).map((pool) => pool.end()));
    },
  };
};

const backoff = (tries: number): number => Math.min(BACKOFF_MS.most, BACKOFF_MS.first * 2 ** Math.min(tries, 10));

/** `ambiguous`: an earlier try may have appended the events, so a refusal of this try proves nothing. */
const refusedOrUnknown = (ambiguous: boolean, message: string, cause: Error): Error =>
  ambiguous ? new OutcomeUnknown(message, { cause }) : new Error(message, { cause });

/** Runs `work` on a connection of the pool. Closes the connection after any error that is not a refusal by the server. */
const withClient = async <T>(pool: Pool, work: (client: Client) => Promise<T>): Promise<T> => {
  const client = await pool.connect();
  let broken = false;
  const onError = () => (broken = true);
  client.on('error', onError);
  try {
    return await work(client);
  } catch (error) {
    broken ||= !isRolledBack(error);
    throw error;
  } finally {
    client.off('error', onError);
    client.release(broken);
  }
};

// ---- appends

interface Append {
  readonly stream: string;
  readonly expected: Expected;
  readonly events: readonly Serialised[];
  readonly bytes: number;
  readonly deadline: number;
  readonly resolve: (answer: { revision: bigint; position: Position }) => void;
  readonly reject: (error: Error) => void;
  inFlight: boolean;
  /** The answer of an earlier try was lost, so that try may have been committed. */
  ambiguous: boolean;
  /** Postgres refused a batch with this append. Each of its appends is now sent alone, so that only the faulty one fails. */
  alone: boolean;
  settled: boolean;
}

type AppendRow = [request: number, status: 'ok' | 'duplicate' | 'conflict', revision: string, position: string | null];

class Appends {
  private queue: Append[] = [];
  private queuedBytes = 0;
  /** Streams with an append in flight. The appends of this process to one stream keep their order. */
  private readonly busy = new Set<string>();
  private readonly sending: (readonly Append[])[] = [];
  /** Appends without an answer. */
  private unanswered = 0;
  private failures = 0;
  private paused = false;
  private scheduled = false;
  private sweeping = false;
  private closed = false;

  constructor(
    private readonly line: Line,
    private readonly clock: Clock,
    private readonly onAppended: () => void,
  ) {}

  add(stream: string, expected: Expected, newEvents: readonly NewEvent[], timeoutMs: number): Promise<{ revision: bigint; position: Position }> {
    return new Promise((resolve, reject) => {
      const events = serialise(stream, expected, newEvents);
      if (this.closed) return reject(new Unavailable('the event store is closed'));
      const bytes = sizeOf(events);
      if (this.queue.length >= QUEUED_APPENDS || this.queuedBytes + bytes > QUEUED_BYTES)
        return reject(new Unavailable(`${this.queue.length} appends wait for Postgres already`));
      const deadline = this.clock.monotonic() + timeoutMs;
      const append: Append = {
        stream,
        expected,
        events,
        bytes,
        deadline,
        resolve,
        reject,
        inFlight: false,
        ambiguous: false,
        alone: false,
        settled: false,
      };
      this.unanswered += 1;
      this.queue.push(append);
      this.queuedBytes += bytes;
      if (!this.sweeping) void this.sweep();
      this.schedule();
    });
  }

  /** True if the session is the one for our own appends. Its NOTIFY is ignored, because the answer of the append announces the growth. */
  isOwn(session: number | undefined): boolean {
    return session !== undefined && session === this.line.session;
  }

  async close(): Promise<void> {
    this.closed = true;
    while (this.unanswered > 0) await this.clock.sleep(SWEEP_MS);
    await this.line.close();
  }

  /** Sends the queue at the end of this turn of the event loop, so that all appends of the turn share a batch. */
  private schedule(): void {
    if (this.scheduled) return;
    this.scheduled = true;
    setImmediate(() => {
      this.scheduled = false;
      this.pump();
    });
  }

  private pump(): void {
    while (!this.paused && this.sending.length < BATCHES_IN_FLIGHT) {
      const appends = this.take();
      if (appends.length === 0) return;
      this.sending.push(appends);
      void this.run(appends).finally(() => {
        this.sending.splice(this.sending.indexOf(appends), 1);
        for (const { stream } of appends) this.busy.delete(stream);
        this.schedule();
      });
    }
  }

  /** The appends to send now: at most one for each stream, up to the limits of a batch. */
  private take(): Append[] {
    const taken: Append[] = [];
    const left: Append[] = [];
    let [events, bytes, index] = [0, 0, 0];
    for (; index < this.queue.length; index++) {
      const append = this.queue[index]!;
      if (append.settled) {
        this.queuedBytes -= append.bytes;
        continue;
      }
      if (taken.length > 0 && append.alone) break;
      if (taken.length > 0 && (events + append.events.length > BATCH_EVENTS || bytes + append.bytes > BATCH_BYTES)) break;
      if (this.busy.has(append.stream)) {
        left.push(append);
        continue;
      }
      taken.push(append);
      this.busy.add(append.stream);
      this.queuedBytes -= append.bytes;
      events += append.events.length;
      bytes += append.bytes;
      if (append.alone) {
        index++;
        break;
      }
    }
    this.queue = [...left, ...this.queue.slice(index)];
    return taken;
  }

  private async run(appends: readonly Append[]): Promise<void> {
    try {
      const client = await this.line.open();
      // Appends that timed out while connecting were reported as not appended; drop them.
      const sent = appends.filter(({ settled }) => !settled);
      if (sent.length === 0) return;
      let deadline = 0;
      for (const append of sent) {
        append.inFlight = true;
        deadline = Math.max(deadline, append.deadline);
      }
      // When the last time limit has passed, the driver gives up the statement and its connection.
      const waitMs = Math.ceil(deadline - this.clock.monotonic()) + SWEEP_MS;
      const { rows } = await client.query<AppendRow>({ ...appendQuery(sent), query_timeout: waitMs } as ReturnType<typeof appendQuery>);
      this.failures = 0;
      if (rows[0]?.[0] === 0) return this.allAppended(sent, BigInt(rows[0][3]!));
      for (const [request, status, revision, position] of rows) {
        const append = sent[request - 1]!;
        if (status === 'conflict') this.fail(append, new Conflict(append.stream, append.expected, revision === '-1' ? null : BigInt(revision)));
        else this.succeed(append, { revision: BigInt(revision), position: numericPosition(position!) });
      }
      this.onAppended();
    } catch (error) {
      this.recover(appends, error);
    }
  }

  private allAppended(sent: readonly Append[], headBefore: bigint): void {
    let position = headBefore;
    for (const append of sent) {
      const count = BigInt(append.events.length);
      position += count;
      this.succeed(append, {
        revision: append.expected === 'no_stream' ? count - 1n : (append.expected as bigint) + count,
        position: numericPosition(position),
      });
    }
    this.onAppended();
  }

  /** Puts the appends of a failed batch back at the head of the queue, with the same ids. The store recognises those that it has. */
  private recover(appends: readonly Append[], error: unknown): void {
    const cause = error as Error;
    const rolledBack = isRolledBack(error);
    const transient = error instanceof DatabaseUnavailable || error instanceof Unavailable;
    const readOnly = isReadOnly(error);
    // The next connection may lead to the server that takes writes.
    if (readOnly) this.line.drop();
    const again: Append[] = [];
    for (const append of appends) {
      append.ambiguous ||= append.inFlight && !rolledBack;
      append.inFlight = false;
      if (append.settled) continue;
      if (cause instanceof StoreIncident) {
        this.fail(append, append.ambiguous ? new OutcomeUnknown(cause.message, { cause }) : cause);
        continue;
      }
      if (readOnly) {
        const message = `${append.stream}: ${cause.message}`;
        this.fail(append, append.ambiguous ? new OutcomeUnknown(message, { cause }) : new ReadOnly(message, { cause }));
        continue;
      }
      if (append.ambiguous && append.expected === 'any')
        // Without a revision the store cannot tell a repeat from a second append.
        this.fail(append, new OutcomeUnknown(`${append.stream}: the connection was lost during the append`, { cause }));
      else if (!transient && appends.length === 1)
        this.fail(append, refusedOrUnknown(append.ambiguous, `${append.stream}: Postgres refused the append: ${cause.message}`, cause));
      else {
        append.alone ||= !transient;
        again.push(append);
        this.queuedBytes += append.bytes;
      }
    }
    this.queue = [...again, ...this.queue];
    if (!transient) return;
    this.paused = true;
    void this.clock.sleep(backoff(this.failures++)).then(() => {
      this.paused = false;
      this.schedule();
    });
  }

  /** Ends appends that have reached their time limit. Runs as long as any append has no answer. */
  private async sweep(): Promise<void> {
    this.sweeping = true;
    while (this.unanswered > 0) {
      await this.clock.sleep(SWEEP_MS);
      const now = this.clock.monotonic();
      for (const append of [this.queue, ...this.sending].flat()) {
        if (append.settled || append.deadline > now) continue;
        if (append.inFlight || append.ambiguous)
          this.fail(append, new OutcomeUnknown(`${append.stream}: no answer from Postgres in time; the append may have happened`));
        else this.fail(append, new Unavailable(`${append.stream}: Postgres could not be reached in time; nothing was appended`));
      }
    }
    this.sweeping = false;
  }

  private succeed(append: Append, answer: { revision: bigint; position: Position }): void {
    if (append.settled) return;
    append.settled = true;
    this.unanswered -= 1;
    append.resolve(answer);
  }

  private fail(append: Append, error: Error): void {
    if (append.settled) return;
    append.settled = true;
    this.unanswered -= 1;
    append.reject(error);
  }
}

/** The connection for appends. It is opened when needed, and again after a loss. */
class Line {
  /** The process id that Postgres gave to the session. undefined: there is no session. */
  session: number | undefined;
  private opening: Promise<Client> | null = null;
  /** Closes the connection, after the answers of what was sent. */
  drop: () => void = () => undefined;

  constructor(
    private readonly pool: Pool,
    private readonly clock: Clock,
    private readonly check: PostgresEventStoreOptions['checkSession'],
  ) {}

  open(): Promise<Client> {
    this.opening ??= this.connect();
    return this.opening;
  }

  async close(): Promise<void> {
    await this.opening?.catch(() => undefined);
    this.drop();
  }

  private async connect(): Promise<Client> {
    try {
      const client = await this.pool.connect();
      let held = true;
      this.drop = () => {
        if (!held) return;
        held = false;
        this.opening = null;
        this.session = undefined;
        client.release(true);
      };
      // A failed statement affects neither the connection nor the other batch on it.
      client.once('end', this.drop);
      await client.query({ text: SESSION, query_timeout: READ_TIMEOUT_MS } as { text: string });
      this.session = (client as { processID?: number }).processID;
      if (this.check) {
        const inTime = <T>(query: Promise<T>) =>
          within(this.clock, READ_TIMEOUT_MS, query, () => new StatementTimeout('Postgres did not answer: read timeout'));
        const missing = async (marks: readonly Mark[]) =>
          missingOf(
            (await inTime(client.query<[string, string | null, string]>({ ...missingQuery(marks), rowMode: 'array', types: ALL_AS_TEXT }))).rows,
          );
        const { rows } = await inTime(client.query<{ server: string }>('select pg_postmaster_start_time()::text as server'));
        await this.check(missing, rows[0]!.server);
      }
      return client;
    } catch (error) {
      this.drop();
      this.opening = null;
      throw error;
    }
  }
}

/** The database may have another default. In `es.append_batch`, the statement after the lock must see every earlier commit. */
const SESSION = `set default_transaction_isolation to 'read committed'`;

const APPEND = `select * from es.append_batch($1::text[], $2::bigint[], $3::int[], $4::int[], $5::int[], $6::uuid[], $7::text[], $8::text[], $9::text[])`;

const appendQuery = (appends: readonly Append[]) => {
  const events: Serialised[] = [];
  let [expected, counts, requests, ordinals, ids] = ['', '', '', '', ''];
  for (const [index, append] of appends.entries()) {
    expected += `,${append.expected === 'no_stream' ? -1 : append.expected === 'any' ? -2 : append.expected}`;
    counts += `,${append.events.length}`;
    for (const [ordinal, event] of append.events.entries()) {
      events.push(event);
      requests += `,${index + 1}`;
      ordinals += `,${ordinal + 1}`;
      ids += `,${event.id}`;
    }
  }
  const values = [
    textArray(appends, ({ stream }) => stream),
    ...[expected, counts, requests, ordinals, ids].map((list) => `{${list.slice(1)}}`),
    textArray(events, ({ type }) => type),
    textArray(
      events,
      ({ data }) => data,
      ({ dataBytes }) => dataBytes,
    ),
    textArray(
      events,
      ({ meta }) => meta,
      ({ metaBytes }) => metaBytes,
    ),
  ];
  return { name: 'es_append', text: APPEND, values, rowMode: 'array' as const };
};

const TEXT_OID = 25;
const ARRAY_HEADER_BYTES = 20;
const LENGTH_BYTES = 4;

/** A text[] in Postgres' binary form. The text form needs escaped quotes, which would be a third of the cost of an append. */
const textArray = <T>(items: readonly T[], text: (item: T) => string, size = (item: T) => Buffer.byteLength(text(item))): Buffer => {
  let total = ARRAY_HEADER_BYTES + items.length * LENGTH_BYTES;
  for (const item of items) total += size(item);
  const bytes = Buffer.allocUnsafe(total);
  bytes.writeInt32BE(1, 0); // Number of dimensions.
  bytes.writeInt32BE(0, 4); // No nulls.
  bytes.writeInt32BE(TEXT_OID, 8);
  bytes.writeInt32BE(items.length, 12);
  bytes.writeInt32BE(1, 16); // Lower bound.
  let at = ARRAY_HEADER_BYTES;
  for (const item of items) {
    const length = bytes.write(text(item), at + LENGTH_BYTES);
    bytes.writeInt32BE(length, at);
    at += LENGTH_BYTES + length;
  }
  return bytes;
};

// ---- reads

const COLUMNS = `e.position, e.stream_id, e.revision, e.event_id, e.type, e.data, e.meta, (extract(epoch from e.stored_at) * 1000)::bigint`;

type EventRow = [position: string, stream: string, revision: string, id: string, type: string, data: string, meta: string, storedAtMs: string];

const recorded = ([position, stream, revision, id, type, data, meta, storedAtMs]: EventRow): Recorded =>
  deserialise({ stream, revision: BigInt(revision), position: numericPosition(position), id, type, data, meta, storedAtMs: Number(storedAtMs) });

/** Reads a page of each of several streams. Each row begins with the number of its page. */
const READ_PAGES = `select asked.number, e.*
  from unnest($1::text[], $2::bigint[], $3::int[]) with ordinality as asked (stream, revision, most, number)
  cross join lateral (
    select ${COLUMNS} from es.events e where e.stream_id = asked.stream and e.revision >= asked.revision order by e.revision limit asked.most) e
  order by asked.number, e.revision`;

const READ_STREAMS = `select ${COLUMNS} from es.events e where e.stream_id = any($1::text[]) order by e.stream_id, e.revision`;

/**
 * Reads the head and the events up to it in one snapshot, so `through` is exact even with a filter. The lateral join with a limit uses the index. A
 * plain join would scan the log to its end for every page.
 */
const READ_LOG = `select h.position, ${COLUMNS}
  from es.head h
  left join lateral (
    select * from es.events o
    where o.position > $1::bigint and o.position <= least($1::bigint + $2::int, $3::bigint, h.position)
      and ($4::text[] is null or o.stream_id like any ($4::text[]))
    order by o.position limit $2::int) e on true
  order by e.position`;

/** Also returns whether the server is a standby. A standby may lag, so its answer proves nothing. */
const MISSING = `select pg_is_in_recovery(), m.position, m.id
  from (select) one left join (
    select m.position, m.id from unnest($1::bigint[], $2::uuid[]) m (position, id)
    where not exists (select from es.events e where e.position = m.position and e.event_id = m.id)) m on true`;

const EVENT_AT = `select pg_is_in_recovery(), ${COLUMNS} from (select) one left join es.events e on e.position = $1::bigint`;

const refuseStandby = (isInRecovery: string): void => {
  if (isInRecovery === 't') throw new Unavailable('Postgres: this server is a standby');
};

const missingQuery = (marks: readonly Mark[]) => ({
  name: 'es_missing',
  text: MISSING,
  values: [marks.map(({ position }) => String(positionNumber(position))), marks.map(({ id }) => id)],
});

const missingOf = (rows: readonly [isInRecovery: string, position: string | null, id: string][]): Mark[] => {
  refuseStandby(rows[0]![0]);
  return rows.flatMap(([, position, id]) => (position === null ? [] : { position: numericPosition(position), id }));
};

const unavailable = (error: DatabaseUnavailable): Unavailable => new Unavailable(`Postgres: ${error.message}`, { cause: error });

const MAX_BIGINT = '9223372036854775807';

interface StreamPage {
  readonly stream: string;
  readonly from: bigint;
  readonly most: number;
}

class Reads {
  private closed = false;
  private readonly firstPages: (page: StreamPage) => Promise<readonly EventRow[]>;

  constructor(
    private readonly pool: Pool,
    private readonly clock: Clock,
  ) {
    this.firstPages = batched((pages: readonly StreamPage[]) => this.pages(pages), { ...STREAMS_AT_ONCE, patience: { ms: READ_TIMEOUT_MS, clock } });
  }

  close(): void {
    this.closed = true;
  }

  async *stream(stream: string, from: bigint, max: number): AsyncGenerator<Recorded, void, void> {
    for (let left = max, isFirst = true; left > 0; isFirst = false) {
      const page = { stream, from, most: Math.min(left, isFirst ? FIRST_PAGE_EVENTS : PAGE_EVENTS) };
      const rows = isFirst ? await this.firstPage(page) : (await this.pages([page]))[0]!;
      for (const row of rows) yield recorded(row);
      if (rows.length < page.most) return;
      left -= rows.length;
      from += BigInt(rows.length);
    }
  }

  private async firstPage(page: StreamPage): Promise<readonly EventRow[]> {
    try {
      return await this.firstPages(page);
    } catch (error) {
      // The read has waited too long for its statement.
      throw error instanceof StatementTimeout ? unavailable(error) : error;
    }
  }

  private async pages(asked: readonly StreamPage[]): Promise<EventRow[][]> {
    const pages: EventRow[][] = asked.map(() => []);
    const values = [asked.map(({ stream }) => stream), asked.map(({ from }) => String(from)), asked.map(({ most }) => most)];
    for (const [number, ...row] of await this.query<[number: string, ...EventRow]>('es_read_pages', READ_PAGES, values))
      pages[Number(number) - 1]!.push(row);
    return pages;
  }

  async streams(streams: readonly string[]): Promise<Recorded[][]> {
    const found = new Map(streams.map((stream): [string, Recorded[]] => [stream, []]));
    for (const row of await this.query<EventRow>('es_read_streams', READ_STREAMS, [streams])) found.get(row[1])!.push(recorded(row));
    return streams.map((stream) => found.get(stream)!);
  }

  async *log(after: Position | null, max: number, until: Position | undefined, prefixes: readonly string[] | undefined) {
    let position = after;
    for (let left = max; left > 0;) {
      const { events, through, atEnd } = await this.page(position, PAGE_EVENTS, until, prefixes);
      if (events.length > 0) yield events.slice(0, left);
      left -= events.length;
      if (atEnd || through === position) return;
      position = through;
    }
  }

  /** Throws Unavailable, BeyondTheEnd, LogGap. */
  async page(after: Position | null, max: number, until: Position | undefined, prefixes: readonly string[] | undefined): Promise<Page> {
    const from = positionNumber(after);
    const patterns = prefixes === undefined ? null : prefixes.map((prefix) => `${prefix.replace(/[\\%_]/g, '\\$&')}%`);
    const rows = await this.query<[head: string, ...EventRow]>('es_read_log', READ_LOG, [
      String(from),
      max,
      until === undefined ? MAX_BIGINT : String(positionNumber(until)),
      patterns,
    ]);
    const head = BigInt(rows[0]![0]);
    if (from > head) throw new BeyondTheEnd(after!, head === 0n ? null : numericPosition(head));
    let characters = 0;
    const events = rows
      .filter((row) => row[1] !== null)
      .map(([, ...row]) => {
        characters += row[5].length + row[6].length;
        return recorded(row);
      });
    const bounds = [from + BigInt(max), head, ...(until === undefined ? [] : [positionNumber(until)])];
    const to = bounds.reduce((least, bound) => (bound < least ? bound : least));
    if (prefixes === undefined)
      // Positions have no gaps. If one is missing, an event was deleted or lost.
      for (let index = 0; index < Math.max(events.length, Number(to - from)); index++)
        if (events[index]?.position !== numericPosition(from + BigInt(index + 1))) throw new LogGap(numericPosition(from + BigInt(index + 1)));
    return { events, through: to > from ? numericPosition(to) : after, atEnd: to >= head, characters };
  }

  async head(): Promise<Position | null> {
    const [row] = await this.query<[string]>('es_head', 'select position from es.head', []);
    return row![0] === '0' ? null : numericPosition(row![0]);
  }

  async missing(marks: readonly Mark[]): Promise<readonly Mark[]> {
    const { name, text, values } = missingQuery(marks);
    return missingOf(await this.query<[string, string | null, string]>(name, text, values));
  }

  async eventAt(position: Position): Promise<Recorded | null> {
    const [[isInRecovery, ...row]] = (await this.query<[string, ...EventRow]>('es_event_at', EVENT_AT, [String(positionNumber(position))])) as [
      [string, ...EventRow],
    ];
    refuseStandby(isInRecovery);
    return row[0] === null ? null : recorded(row);
  }

  /** Repeats the query once after a lost connection. After a restart of Postgres, the pool still holds dead connections. */
  private async query<Row extends unknown[]>(name: string, text: string, values: unknown[]): Promise<Row[]> {
    for (let tries = 0; ; tries++) {
      if (this.closed) throw new Unavailable('the event store is closed');
      try {
        return await withClient(this.pool, async (client) => {
          const query = client.query<Row>({ name, text, values, rowMode: 'array', types: ALL_AS_TEXT });
          return (await within(this.clock, READ_TIMEOUT_MS, query, () => new StatementTimeout('Postgres did not answer: read timeout'))).rows;
        });
      } catch (error) {
        if (!(error instanceof DatabaseUnavailable)) throw error;
        if (tries === 0 && !isRolledBack(error) && !(error instanceof StatementTimeout)) continue;
        throw unavailable(error);
      }
    }
  }
}

// ---- wake-ups

/**
 * Signals that the log may have grown: at once for appends of this process, by NOTIFY for appends of others, and by a poll. All waiters are woken
 * together.
 */
class Growth {
  count = 0;
  private followers = 0;
  private listener: AbortController | null = null;
  private stopped: Promise<unknown> = Promise.resolve();
  private readonly waiting = new Set<AbortController>();
  private listening = false;
  /** Ends the current wait of the poll. Aborted when the listening connection is lost, because the poll must be faster then. */
  private pause = new AbortController();

  constructor(
    private readonly pool: Pool,
    private readonly clock: Clock,
    private readonly isOwn: (session: number | undefined) => boolean,
  ) {}

  announce(): void {
    this.count += 1;
    this.waiting.forEach((waiter) => waiter.abort('woken'));
  }

  async since(count: number, signal: AbortSignal): Promise<void> {
    if (this.count !== count || signal.aborted) return;
    const waiter = new AbortController();
    const stop = () => waiter.abort('stopped');
    signal.addEventListener('abort', stop, { once: true });
    this.waiting.add(waiter);
    await new Promise((woken) => waiter.signal.addEventListener('abort', woken, { once: true }));
    this.waiting.delete(waiter);
    signal.removeEventListener('abort', stop);
  }

  /** Adds a reader. Listens and polls while there is one. Returns the function that removes the reader. */
  follow(): () => void {
    this.followers += 1;
    if (!this.listener) {
      this.listener = new AbortController();
      this.stopped = Promise.all([this.listen(this.listener.signal), this.poll(this.listener.signal)]);
    }
    let released = false;
    return () => {
      if (released) return;
      released = true;
      this.followers -= 1;
      if (this.followers === 0) void this.close();
    };
  }

  async close(): Promise<void> {
    this.listener?.abort();
    this.listener = null;
    this.pause.abort('closed');
    this.announce();
    await this.stopped;
  }

  private async poll(signal: AbortSignal): Promise<void> {
    while (!signal.aborted) {
      this.pause = new AbortController();
      await this.clock.sleep(this.listening ? POLL_MS.listening : POLL_MS.deaf, this.pause.signal);
      this.announce();
    }
  }

  private async listen(signal: AbortSignal): Promise<void> {
    for (let tries = 0; !signal.aborted; tries++) {
      try {
        const client = await this.pool.connect();
        let lost: (error?: Error) => void = () => undefined;
        const ended = new Promise<void>((resolve) => (lost = () => resolve()));
        const stop = () => lost();
        client.on('error', lost).on('end', lost);
        client.on('notification', ({ processId }) => {
          if (!this.isOwn(processId)) this.announce();
        });
        signal.addEventListener('abort', stop, { once: true });
        try {
          await client.query('listen es_appended');
          tries = 0;
          this.listening = true;
          this.announce();
          if (!signal.aborted) await ended;
        } finally {
          this.listening = false;
          this.pause.abort('lost');
          signal.removeEventListener('abort', stop);
          client.release(true);
        }
      } catch {
        // Without a listener, the poll still wakes readers, only later.
      }
      if (!signal.aborted) await this.clock.sleep(backoff(tries), signal);
    }
  }
}
