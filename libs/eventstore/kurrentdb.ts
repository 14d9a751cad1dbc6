/**
 * The event store on KurrentDB, or EventStoreDB from 22.10.
 *
 * The official client is an optional peer dependency, and is loaded only when a store is opened. Installations without KurrentDB need neither its
 * native part nor the licence of that part.
 *
 * The adapter adds these safeguards to the client, each for a failure that was seen (docs/contract.md#the-kurrentdb-client):
 *
 * - Appends use the unary call, never the client's shared batch stream. When that stream has ended without an error, its next append waits for ever
 *   (K7).
 * - Our own timer ends every call that gets no answer. Some promises of the client stay pending for ever (K1, K12).
 * - Reads are our own calls over the channel of the appends. The client's reads ignore deadlines, hang if an earlier read was left early, hide the
 *   reason of a refusal, and use another connection (K5, K9, K15, K18).
 * - A channel is closed when its connection ends, and the client makes another one. So a channel is one connection to one server. After a
 *   reconnect, the address may lead to another log. So the log is checked on each new channel before the first append (K18).
 * - A client whose calls keep failing, reads included, is replaced. It does not find a new leader by itself (K7, K8).
 * - After a conflict the stream is read, and the events are compared by id. An earlier try of this append may have caused the conflict (K12).
 * - Positions of reads are inclusive, positions of subscriptions exclusive (K10).
 * - If the log ends before a known event, the log is read again for some seconds. The node may be a deposed leader (K16).
 * - A reader has one queue and one supervised subscription. When the subscription ends, a new one begins with the last of our events in the queue,
 *   and drops that event (K3, K4, K13). If the new subscription begins with another event, the log was exchanged.
 * - Errors that the client throws outside of a call do not end the process, nor do its unhandled rejections (K2, K6, K13).
 */
import type { GossipClient } from '@kurrent/kurrentdb-client/generated/kurrentdb/protocols/v1/gossip_grpc_pb.js';
import type { CallOptions, Channel, Metadata } from '@grpc/grpc-js';
import type { StreamsClient } from '@kurrent/kurrentdb-client/generated/kurrentdb/protocols/v1/streams_grpc_pb.js';
import type { EventData, KurrentDBClient, Position as LogPosition, ResolvedEvent } from '@kurrent/kurrentdb-client';
import { setMaxListeners } from 'node:events';
import { Writable } from 'node:stream';
import { orStopped, systemClock, within, type Clock } from '#kernel';
import { shared } from '#platform';
import { BeyondTheEnd, matchesPrefix, NoEventThere, NotInTheLog, serialise, sizeOf, type Serialised } from './codec.js';
import {
  Conflict,
  OutcomeUnknown,
  StoreIncident,
  Unavailable,
  UnreadableStream,
  type EventStore,
  type Expected,
  type Mark,
  type Meta,
  type NewEvent,
  type Position,
  type Recorded,
  type Subscription,
  type SubscriptionItem,
} from './event-store.js';
import { readEvents, type LogRead, type ReadRequest, type StreamRead } from './kurrentdb-read.js';
import { silentSeeds, withoutSeeds } from './seeds.js';

type Client = KurrentDBClient;
type Credentials = { readonly username: string; readonly password: string };
type Driver = typeof import('@kurrent/kurrentdb-client');

/** Every time limit of this adapter, in milliseconds. Only fault tests change them. */
export interface KurrentDbTimings {
  /** An append with all its tries, unless the caller gives a limit. */
  readonly appendMs: number;
  /** One try of an append: the deadline that the server gets. */
  readonly tryMs: number;
  /** Our own timer ends a call this long after its deadline, if the client does not. */
  readonly graceMs: number;
  /** The pause before an append is repeated. The server drops a repeat that arrives before the original is replicated. */
  readonly retryMs: number;
  /**
   * `readMs`: a read with all its tries. `readStallMs`: the longest time without an event. The first read of a client waits one `discoveryInterval`.
   */
  readonly readMs: number;
  readonly readStallMs: number;
  /** How long a subscription may take until the server confirms it. */
  readonly confirmMs: number;
  /** A subscription that delivers nothing for this long may be dead. So its position is compared with the head. */
  readonly silenceMs: number;
  /** A client is replaced when its calls have failed for this long without a success. Also the minimum time between two replacements. */
  readonly replaceMs: number;
  /**
   * A deposed leader still answers reads for up to 3 s. Its log may end too early, or hold an event that the new leader has replaced. So an event
   * counts as missing only if all reads during this time lack it.
   */
  readonly deposedMs: number;
  readonly backoffMs: number;
  readonly backoffMostMs: number;
}

const TIMINGS: KurrentDbTimings = {
  appendMs: 5_000,
  tryMs: 2_000,
  graceMs: 500,
  retryMs: 200,
  readMs: 5_000,
  readStallMs: 2_000,
  confirmMs: 5_000,
  silenceMs: 5_000,
  replaceMs: 2_000,
  deposedMs: 5_000,
  backoffMs: 100,
  backoffMostMs: 2_000,
};

/** After this many transport failures in a row, the client is replaced before `replaceMs` has passed. */
const REPLACE_AFTER_FAILURES = 64;
/** Limits of the appends in flight: their number and their bytes. When a server dies, only these appends stay without an answer. */
const APPENDS_IN_FLIGHT = 128;
const BYTES_IN_FLIGHT = 8_000_000;
/** Maximum number of appends in the queue. Further appends are refused at once. */
const QUEUED_APPENDS = 4_096;
/** Events per read. */
const PAGE_EVENTS = 500;
/** Marks at most this far apart are read in one page. One read costs about as much as 32 KiB of events. */
const MARKS_APART_BYTES = 32n * 1024n;
/** Maximum number of reads of marks at the same time. */
const PARALLEL_MARK_READS = 8;
/** A subscription is paused when this many events wait for their reader, and resumed at half of that. */
const QUEUED_EVENTS = 1_000;
const FOREIGN_EVERY_MS = 60_000;
/**
 * Options that are added to the URL if it does not name them. The client then looks for the leader for 5 s instead of 1 s. The client's first read
 * waits one `discoveryInterval`, which is 500 ms by default.
 */
const URL_DEFAULTS = { maxDiscoverAttempts: 50, discoveryInterval: 100 } as const;

export interface KurrentDbOptions {
  readonly clock?: Clock;
  /** The installation of the log. Its events name it; events that name another one are skipped. null: not known yet. */
  readonly installationId?: () => string | null;
  /** Checks the log by reads of this store, before the first append over each connection. If it throws, nothing is appended over the connection. */
  readonly checkConnection?: () => Promise<void>;
  /** Called for faults that the adapter repairs itself, such as a subscription that ended or a client that was replaced. */
  readonly onTrouble?: (message: string, error?: Error) => void;
  /**
   * Called for a stream into which another program or another installation wrote, at most once a minute for all streams. Their events are skipped.
   * `installation`: null for another program.
   */
  readonly onForeign?: (stream: string, installation: string | null) => void;
  readonly timings?: Partial<KurrentDbTimings>;
}

/**
 * Opens the store. `url` has the form that KurrentDB documents: `kurrentdb://[user:password@]host:port[,host:port…]?tls=…`, plaintext or TLS. The
 * server need not run yet. Throws if the client package is missing or the URL is wrong. The error does not repeat the URL, which may hold a password.
 */
export const createKurrentDbEventStore = async (url: string, options: KurrentDbOptions = {}): Promise<EventStore> => {
  const driver = await loadDriver();
  const store = new KurrentDbEventStore(driver, url, options);
  await store.warmUp();
  return store;
};

const loadDriver = async (): Promise<Driver> => {
  try {
    return await import('@kurrent/kurrentdb-client');
  } catch (error) {
    throw new Error(
      `KURRENTDB_URL is set, but its client cannot be loaded (npm install @kurrent/kurrentdb-client@1.3): ${(error as Error).message}`,
      { cause: error },
    );
  }
};

// ---- what errors mean

/** The meaning of a failed call. `unsent`: nothing reached the server. `lost`: the server may have executed it. `fault`: a repeat would not help. */
type Verdict = 'conflict' | 'unsent' | 'lost' | 'fault';

/** A call that our own timer ended. */
class NoAnswer extends Error {}
/** A repeat would end with the same error. */
class Fault extends Error {}
/** The log behind the connection of an append was not checked. Nothing was sent. */
class Unchecked extends Error {}

/** The verdict for each `type` of the client's errors. Some transport errors have no `type`; their gRPC `code` decides (K2). */
const BY_TYPE: Readonly<Record<string, Verdict>> = {
  'wrong-expected-version': 'conflict',
  'not-leader': 'unsent',
  unavailable: 'lost',
  cancelled: 'lost',
  timeout: 'lost',
  'deadline-exceeded': 'lost',
  unknown: 'lost',
};
const GRPC_INVALID_ARGUMENT = 3;
const REFUSED_READ = /ReadAllResult: InvalidPosition/;
/** States of a channel, by the numbers of gRPC. */
const READY = 2;
const TRANSIENT_FAILURE = 3;
const SHUTDOWN = 4;
const stateOf = (channel: Channel): number => channel.getConnectivityState(false);
const GRPC_LOST = [1, 2, 4, 8, 10, 13, 14, 15];
const NEVER_CONNECTED = /Failed to discover|Channel has been shut down|No connection established|ECONNREFUSED|ENOTFOUND|Name resolution failed/i;

/** True if the server refused a read or a subscription because no event begins at its position. */
const isNoBoundary = (error: unknown): boolean => {
  const { code, message } = error as { code?: unknown; message?: string };
  return REFUSED_READ.test(message ?? '') || (code === GRPC_INVALID_ARGUMENT && /invalid position/i.test(message ?? ''));
};

const judge = (error: unknown): Verdict => {
  const { type, code, message } = error as { type?: string; code?: unknown; message?: string };
  if (error instanceof Unchecked || NEVER_CONNECTED.test(message ?? '')) return 'unsent';
  if (error instanceof NoAnswer) return 'lost';
  if (error instanceof Fault || error instanceof NotInTheLog || error instanceof TypeError) return 'fault';
  // Of the errors of type `unknown`, only "BadRequest" and a refused position are our fault. After others, such as "Server Is Not Ready", a repeat helps.
  if (/BadRequest/.test(message ?? '') || isNoBoundary(error)) return 'fault';
  if (type !== undefined) return BY_TYPE[type] ?? 'fault';
  if (typeof code === 'number') return GRPC_LOST.includes(code) ? 'lost' : 'fault';
  return 'lost';
};

const isTransport = (verdict: Verdict) => verdict === 'unsent' || verdict === 'lost';
const asError = (error: unknown): Error => (error instanceof Error ? error : new Error(String(error)));
/** A text for any error. Some errors of the client have no message. */
const describe = (error: unknown) => asError(error).message || (error as { type?: string }).type || asError(error).name;

// ---- positions and events

const POSITION = /^(\d{20}):(\d{20})$/;
/** The text has both the commit and the prepare position. On some servers a read from the commit position alone skips an event (KurrentDB #4970). */
const toText = ({ commit, prepare }: LogPosition): Position => `${String(commit).padStart(20, '0')}:${String(prepare).padStart(20, '0')}` as Position;
const fromText = (position: Position): LogPosition => {
  const [, commit, prepare] = POSITION.exec(position) ?? [];
  if (!commit || !prepare) throw new Fault(`"${position}" is not a position of KurrentDB; was the kind of store changed under a checkpoint?`);
  return { commit: BigInt(commit), prepare: BigInt(prepare) };
};

/** Sorts the positions and divides them into groups. A group ends where the next position is further away than {@link MARKS_APART_BYTES}. */
const runsOf = (positions: readonly Position[]): Position[][] => {
  const runs: Position[][] = [];
  for (const position of [...new Set(positions)].sort()) {
    const run = runs.at(-1);
    if (run && fromText(position).commit - fromText(run.at(-1)!).commit <= MARKS_APART_BYTES) run.push(position);
    else runs.push([position]);
  }
  return runs;
};

/** Returns null for {@link NoEventThere}, and throws any other error. */
const noneAt = (error: unknown): null => {
  if (error instanceof NoEventThere) return null;
  throw error;
};

/**
 * Matches every stream except system streams, which begin with `$`. The seal of an older worker must cover the streams of a newer release too, so
 * there is no filter by our prefixes.
 */
const NOT_A_SYSTEM_STREAM = '^[^$]';

/**
 * True if a Payfold of any release wrote the event. Only the bytes of the event decide, so all releases seal the same events. Events whose type
 * begins with `$`, such as links, come from the server.
 */
const isOurs = ({ type, isJson, metadata }: LogEvent): boolean => {
  if (type.startsWith('$') || !isJson || typeof metadata !== 'object' || metadata === null || metadata instanceof Uint8Array) return false;
  const { v, actor, correlationId } = metadata as Partial<Record<string, unknown>>;
  return typeof v === 'number' && typeof actor === 'object' && typeof correlationId === 'string';
};

/** One event of the log. `event` is null if Payfold did not write it, or if another installation did: then that event is in `other`. */
interface Logged {
  readonly stream: string;
  readonly id: string;
  readonly position: Position;
  readonly event: Recorded | null;
  readonly other: Recorded | null;
}

const logged = (resolved: ResolvedEvent, installationId: string | null): Logged => {
  const event = eventOf(resolved);
  const written = isOurs(event) ? toRecorded(event) : null;
  const isOther = installationId !== null && (written?.meta.installation ?? installationId) !== installationId;
  return {
    stream: event.streamId,
    id: event.id.toLowerCase(),
    position: toText(event.position),
    event: isOther ? null : written,
    other: isOther ? written : null,
  };
};

type LogEvent = ReturnType<typeof eventOf>;
const eventOf = ({ event }: ResolvedEvent) => {
  if (!event?.position) throw new Fault('KurrentDB gave an event without a position; servers before 22.10 are not supported');
  return { ...event, position: event.position };
};

/** Converts an event of a stream that a command reads. Throws {@link UnreadableStream} if the event is not ours. */
const recorded = (resolved: ResolvedEvent, installationId: string | null): Recorded => {
  const { stream, event, other } = logged(resolved, installationId);
  if (event) return event;
  const whose = other ? `an event of installation ${other.meta.installation}` : 'not an event of Payfold';
  throw new UnreadableStream(stream, `@${eventOf(resolved).revision}: ${whose}`);
};

const toRecorded = ({ streamId, id, revision, type, data, metadata, created, position }: LogEvent): Recorded => {
  const { v, ...meta } = metadata as unknown as Meta & { v: number };
  return {
    id: id.toLowerCase(),
    type,
    v,
    data: data as Recorded['data'],
    meta,
    stream: streamId,
    revision,
    position: toText(position),
    storedAt: created,
  };
};

/**
 * Makes the events for the client. `metadata` is sent as the bytes of the checked text. `data` is sent as an object, and the client turns it into the
 * same text again.
 */
const outgoing = (driver: Driver, events: readonly NewEvent[], serialised: readonly Serialised[]): EventData[] =>
  serialised.map(({ id, data, meta }, index) =>
    driver.jsonEvent({ id, type: events[index]!.type, data: JSON.parse(data) as never, metadata: new Uint8Array(Buffer.from(meta)) }),
  );

// ---- the client, and when to take a new one

type UnaryAppend = (...args: unknown[]) => unknown;
interface Service {
  append?: UnaryAppend;
  getChannel(): Channel;
}

/** Parts of the client that its types do not show. */
interface Internals {
  handleError: (client: Pick<Service, 'getChannel'>, error: Error) => Promise<void>;
  getGRPCClient: (service: unknown, name: string) => Promise<Service>;
  getChannel: () => Promise<Channel>;
  supports: () => Promise<boolean>;
  callArguments: (options: { requiresLeader: boolean; deadline: number; credentials?: Credentials }) => [Metadata, CallOptions];
}

/**
 * Runs `refuse` before each append, at the last moment before gRPC takes the call. If `refuse` or `append` throws, as gRPC does on a closed channel,
 * the error goes to the callback of the call. The client calls `append` inside an async promise executor, where an error would end the process.
 */
const refusing = (service: Service, refuse: () => void): Service => {
  const { append } = service;
  if (!append || Object.hasOwn(service, 'append')) return service;
  service.append = (...args) => {
    try {
      refuse();
      return append.apply(service, args);
    } catch (error) {
      const reply = args.at(-1) as (error: unknown) => void;
      queueMicrotask(() => reply(error));
      return new Writable({ objectMode: true, write: (_chunk, _encoding, done) => done() });
    }
  };
  return service;
};

/** Each subscription of a client adds a listener. */
const retirement = (): AbortController => {
  const controller = new AbortController();
  setMaxListeners(0, controller.signal);
  return controller;
};

class Connection {
  private client: Client;
  private retirement = retirement();
  private failures = 0;
  private failingSince: number | null = null;
  private replacedAt = Number.NEGATIVE_INFINITY;
  private readonly url: string;
  private silent: readonly string[] = [];
  private askedAt = Number.NEGATIVE_INFINITY;
  private readonly watched = new WeakSet<Channel>();
  /** Channels whose log was checked. */
  private readonly checked = new WeakSet<Channel>();
  /** The credentials of the URL, decoded, for subscriptions. */
  readonly user: { credentials?: Credentials } = {};
  /**
   * With credentials the client uses the unary call for appends. So if a plaintext URL has no credentials, invented ones are passed. The client never
   * sends credentials over plaintext.
   */
  readonly unary: { credentials?: Credentials };

  constructor(
    private readonly driver: Driver,
    url: string,
    private readonly clock: Clock,
    private readonly timings: KurrentDbTimings,
    private readonly onTrouble: NonNullable<KurrentDbOptions['onTrouble']>,
    private readonly checkConnection: KurrentDbOptions['checkConnection'],
  ) {
    this.url = Object.entries(URL_DEFAULTS)
      .filter(([name]) => !new RegExp(`[?&]${name}=`, 'i').test(url))
      .reduce((text, [name, value]) => `${text}${text.includes('?') ? '&' : '?'}${name}=${value}`, url);
    const [, user, password] = /^[^:]+:\/\/([^:@/,]+):([^@]+)@/.exec(url) ?? [];
    if (user && password) this.user = { credentials: { username: decodeURIComponent(user), password: decodeURIComponent(password) } };
    this.unary =
      this.user.credentials || !/[?&]tls=false/i.test(url) ? this.user : { credentials: { username: 'plaintext', password: 'never sent' } };
    this.client = this.open();
  }

  /** Finds silent addresses and replaces the first client by one without them. Must be called before any other call. */
  async begin(): Promise<void> {
    await this.askSeeds();
    if (this.silent.length > 0) this.replace();
  }

  get current(): Client {
    return this.client;
  }

  /** Aborts when the present client is replaced. A replaced client ends its subscriptions without an error, so followers need this signal. */
  get retired(): AbortSignal {
    return this.retirement.signal;
  }

  succeeded(client: Client): void {
    if (client !== this.client) return;
    this.failures = 0;
    this.failingSince = null;
  }

  /** Counts a transport failure of a call that began at `since`. */
  failed(client: Client, since: number, error: unknown): void {
    if (client !== this.client) return;
    const now = this.clock.monotonic();
    this.failures += 1;
    this.failingSince ??= since;
    // `askSeeds` looks for silent addresses. The next client leaves out those that it has found.
    if (now - this.askedAt >= this.timings.replaceMs) void this.askSeeds();
    if (this.failures < REPLACE_AFTER_FAILURES && now - this.failingSince < this.timings.replaceMs) return;
    if (now - this.replacedAt < this.timings.replaceMs) return;
    this.replacedAt = now;
    this.failures = 0;
    this.failingSince = null;
    this.onTrouble('the KurrentDB client is replaced', asError(error));
    this.replace();
  }

  private replace(): void {
    const { client, retirement: before } = this;
    this.retirement = retirement();
    this.client = this.open();
    before.abort();
    void this.retire(client);
  }

  private async askSeeds(): Promise<void> {
    this.askedAt = this.clock.monotonic();
    const before = this.silent;
    this.silent = await silentSeeds(this.url, this.clock);
    if (this.silent.length > 0 && this.silent.join() !== before.join())
      this.onTrouble(`${this.silent.join(', ')} of KURRENTDB_URL does not answer; it is left out until the next client`);
  }

  close(): Promise<void> {
    return this.retire(this.client);
  }

  /** False if the server says that it is the only node. True if the server does not answer. */
  async isCluster(): Promise<boolean> {
    const asking = async () => {
      const [{ default: gossip }, { default: shared }] = await Promise.all([
        import('@kurrent/kurrentdb-client/generated/kurrentdb/protocols/v1/gossip_grpc_pb.js'),
        import('@kurrent/kurrentdb-client/generated/kurrentdb/protocols/v1/shared_pb.js'),
      ]);
      const service = await (this.client as unknown as Internals).getGRPCClient(gossip.GossipClient, 'gossip');
      return new Promise<boolean>((resolve, reject) =>
        (service as unknown as GossipClient).read(new shared.Empty(), (error, info) =>
          error ? reject(error) : resolve(info.getMembersList().length > 1),
        ),
      );
    };
    return within(this.clock, this.timings.graceMs, asking(), () => new NoAnswer()).catch(() => true);
  }

  private open(): Client {
    const client = this.connect();
    const internals = client as unknown as Internals;
    // After an error the client starts a clean-up and does not handle its rejection.
    const handleError = internals.handleError;
    internals.handleError = (failed, error) => handleError(failed, error).catch(() => undefined);
    const getChannel = internals.getChannel;
    internals.getChannel = async () => {
      const channel = await getChannel();
      if (!this.watched.has(channel)) this.watch(internals, channel);
      return channel;
    };
    const getGRPCClient = internals.getGRPCClient;
    internals.getGRPCClient = async (kind, name) => {
      const service = await getGRPCClient(kind, name);
      return refusing(service, () => {
        if (this.checkConnection && !this.checked.has(service.getChannel())) throw new Unchecked('the connection was replaced before the append');
      });
    };
    // Over TLS without credentials, the client asks whether the server supports the batch stream. The answer false makes the client use the unary
    // call.
    if (!this.unary.credentials) internals.supports = async () => false;
    return client;
  }

  /** Closes the channel at once when its connection ends. Else gRPC would send waiting calls over a new connection, maybe to another server. */
  private watch(internals: Internals, channel: Channel): void {
    this.watched.add(channel);
    const state = stateOf(channel);
    if (state === SHUTDOWN) return;
    channel.watchConnectivityState(state, Number.POSITIVE_INFINITY, () => {
      const now = stateOf(channel);
      if (now === SHUTDOWN) return;
      // A channel that connects again after a failure may move to another server in silence, when its name is resolved again.
      if (state !== READY && now !== TRANSIENT_FAILURE) return this.watch(internals, channel);
      channel.close();
      // `handleError` makes the client open another channel.
      void internals.handleError({ getChannel: () => channel }, new this.driver.UnavailableError(undefined, 'the connection has ended'));
    });
  }

  /** One bounded read. `deadline`: milliseconds from now. Throws the error of the call, as the client shows it. */
  async *read(client: Client, request: ReadRequest, deadline: number): AsyncGenerator<ResolvedEvent, void, void> {
    const service = await this.streamsOf(client);
    const internals = client as unknown as Internals;
    const call = internals.callArguments({ requiresLeader: true, deadline, ...this.unary });
    try {
      yield* readEvents(service, request, ...call);
    } catch (error) {
      // `handleError` makes the client look for another leader or reconnect.
      void internals.handleError(service as unknown as Service, asError(error));
      throw this.driver.convertToCommandError(asError(error));
    }
  }

  /** Checks the log behind the present connection, unless that was done. Throws {@link Unchecked} if that cannot be done, or StoreIncident. */
  async requireChecked(client: Client): Promise<void> {
    if (!this.checkConnection) return;
    const { getChannel } = client as unknown as Internals;
    const channel = await getChannel();
    if (this.checked.has(channel)) return;
    await this.checkConnection().catch((error: unknown) => {
      throw error instanceof StoreIncident ? error : new Unchecked(`its log could not be checked: ${describe(error)}`, { cause: error });
    });
    // If the client still uses this channel, the reads of the check went over it. Otherwise they may have gone to another server.
    if (client !== this.client || (await getChannel()) !== channel) throw new Unchecked('the connection was replaced during the check of its log');
    this.checked.add(channel);
  }

  private async streamsOf(client: Client): Promise<StreamsClient> {
    const { default: services } = await import('@kurrent/kurrentdb-client/generated/kurrentdb/protocols/v1/streams_grpc_pb.js');
    return (await (client as unknown as Internals).getGRPCClient(services.StreamsClient, 'streams')) as unknown as StreamsClient;
  }

  private connect(): Client {
    let what: string;
    try {
      return this.driver.KurrentDBClient.connectionString(withoutSeeds(this.url, this.silent));
    } catch (error) {
      // The client's error is not passed on, because it repeats the URL with its password.
      const { name, message } = error as Error;
      what = /^Unexpected .*? at position \d+, expected .*?\./.exec(message)?.[0].replace(/".*?"/, 'text') ?? name;
    }
    throw new Error(`KURRENTDB_URL is not a URL of KurrentDB: ${what}`);
  }

  /** Cancels running calls and closes the channel, which `dispose()` leaves open. Waits at most `graceMs` for each. Never throws. */
  private async retire(client: Client): Promise<void> {
    const quietly = (work: Promise<unknown>) => within(this.clock, this.timings.graceMs, work, () => new NoAnswer()).catch(() => undefined);
    await quietly(client.dispose());
    await quietly((client as unknown as Internals).getChannel().then((channel) => channel.close()));
  }
}

// ---- the store

class KurrentDbEventStore implements EventStore {
  private readonly clock: Clock;
  private readonly timings: KurrentDbTimings;
  private readonly connection: Connection;
  private readonly slots: Slots;
  private readonly followers = new Set<Follower>();
  private readonly onTrouble: NonNullable<KurrentDbOptions['onTrouble']>;
  private readonly onForeign: NonNullable<KurrentDbOptions['onForeign']>;
  private readonly installationId: () => string | null;
  private foreignAgainAt = Number.NEGATIVE_INFINITY;
  private closed = false;

  constructor(
    private readonly driver: Driver,
    url: string,
    options: KurrentDbOptions,
  ) {
    this.clock = options.clock ?? systemClock;
    this.timings = { ...TIMINGS, ...options.timings };
    this.onTrouble = options.onTrouble ?? (() => undefined);
    this.onForeign = options.onForeign ?? (() => undefined);
    this.installationId = options.installationId ?? (() => null);
    this.connection = new Connection(driver, url, this.clock, this.timings, this.onTrouble, options.checkConnection);
    this.slots = new Slots(this.clock);
  }

  async warmUp(): Promise<void> {
    await this.connection.begin();
    await this.head().catch((error: unknown) => this.onTrouble('KurrentDB does not answer yet', asError(error)));
  }

  async append(stream: string, expected: Expected, events: readonly NewEvent[], options: { timeoutMs?: number } = {}) {
    const installation = this.installationId();
    const named = installation === null ? events : events.map((event) => ({ ...event, meta: { ...event.meta, installation } }));
    const serialised = serialise(stream, expected, named);
    const deadline = this.clock.monotonic() + (options.timeoutMs ?? this.timings.appendMs);
    const bytes = sizeOf(serialised);
    this.open();
    const release = await this.slots.take(bytes, deadline);
    try {
      return await this.appendUntil(deadline, stream, expected, serialised, outgoing(this.driver, named, serialised));
    } finally {
      release();
    }
  }

  /** Appends. Repeats the same ids at the same revision until the store has answered or the time is up. */
  private async appendUntil(deadline: number, stream: string, expected: Expected, serialised: readonly Serialised[], events: EventData[]) {
    let maybe = false;
    for (;;) {
      const client = this.connection.current;
      const begun = this.clock.monotonic();
      let failure: Error;
      try {
        await within(
          this.clock,
          deadline - begun,
          this.connection.requireChecked(client),
          () => new Unchecked('its log could not be checked in time'),
        );
        const tryMs = Math.max(1, Math.min(this.timings.tryMs, deadline - this.clock.monotonic()));
        const result = await within(
          this.clock,
          tryMs + this.timings.graceMs,
          client.appendToStream(stream, events, {
            streamState: expected,
            deadline: Math.ceil(tryMs),
            requiresLeader: true,
            ...this.connection.unary,
          }),
          () => new NoAnswer(`no answer within ${Math.ceil(tryMs)} ms`),
        );
        this.connection.succeeded(client);
        if (result.position) return { revision: result.nextExpectedRevision, position: toText(result.position) };
        // The server recognised a repeat and no longer knows the position of the original.
        return (await this.readBack(stream, expected, serialised)) ?? this.vanished(stream);
      } catch (error) {
        if (error instanceof StoreIncident) throw maybe ? new OutcomeUnknown(`${stream}: ${error.message}`, { cause: error }) : error;
        const verdict = judge(error);
        failure = asError(error);
        if (verdict === 'conflict') {
          this.connection.succeeded(client);
          const outcome = await this.settle(stream, expected, serialised, error as { actualState?: bigint | string });
          if (!(outcome instanceof Unavailable)) return outcome;
          // The stream cannot be read now, and an earlier try of this append may have caused the conflict.
          failure = outcome;
          maybe = true;
        } else if (isTransport(verdict)) {
          if (!(error instanceof Unchecked)) this.connection.failed(client, begun, error);
          maybe ||= verdict === 'lost';
          // Without a revision, the server recognises a repeat only while it remembers the event ids. So the append is not repeated.
          if (verdict === 'lost' && expected === 'any') throw new OutcomeUnknown(`${stream}: ${describe(error)}`, { cause: error });
        } else {
          const message = `${stream}: KurrentDB refused the append: ${describe(error)}`;
          // If the answer of an earlier try was lost, that try may have appended the events.
          throw maybe ? new OutcomeUnknown(message, { cause: error }) : new Error(message, { cause: error });
        }
      }
      if (this.closed || this.clock.monotonic() + this.timings.retryMs >= deadline)
        throw maybe
          ? new OutcomeUnknown(`${stream}: KurrentDB did not say in time whether it appended: ${describe(failure)}`, { cause: failure })
          : new Unavailable(`${stream}: KurrentDB could not be reached in time; nothing was appended: ${describe(failure)}`, { cause: failure });
      await this.clock.sleep(this.timings.retryMs);
    }
  }

  /**
   * Decides what a conflict means. If the stream has exactly these events after the expected revision, returns the place of the last one. If it has
   * others, throws Conflict. If it cannot be read, returns Unavailable.
   */
  private async settle(stream: string, expected: Expected, serialised: readonly Serialised[], { actualState }: { actualState?: bigint | string }) {
    const actual = typeof actualState === 'bigint' ? actualState : actualState === 'no_stream' ? null : undefined;
    try {
      const ours = await this.readBack(stream, expected, serialised);
      if (ours) return ours;
    } catch (error) {
      if (error instanceof Unavailable) return error;
      throw error;
    }
    throw new Conflict(stream, expected, actual);
  }

  /** The revision and position of the last of these events. null: they do not follow the expected revision directly. */
  private async readBack(stream: string, expected: Expected, serialised: readonly Serialised[]) {
    if (expected === 'any') return null;
    const found: Recorded[] = [];
    for await (const event of this.read(stream, expected === 'no_stream' ? 0n : expected + 1n, serialised.length)) found.push(event);
    const last = found.at(-1);
    if (!last || found.length < serialised.length || found.some(({ id }, index) => id !== serialised[index]!.id)) return null;
    return { revision: last.revision, position: last.position };
  }

  private vanished(stream: string): never {
    throw new Fault(`${stream}: KurrentDB knows the events as appended but cannot show them; was the stream deleted or cut?`);
  }

  async *read(stream: string, from = 0n, max = Number.POSITIVE_INFINITY): AsyncGenerator<Recorded, void, void> {
    for (let left = max; left > 0;) {
      const count = Math.min(left, PAGE_EVENTS);
      const events = await this.page({ stream, from, maxCount: count });
      for (const event of events) yield event;
      if (events.length < count) return;
      left -= events.length;
      from = events.at(-1)!.revision + 1n;
    }
  }

  async *readAll(...[after, options = {}]: Parameters<EventStore['readAll']>): AsyncGenerator<readonly Recorded[], void, void> {
    for await (const page of this.logPages(after, options)) {
      const events = page.flatMap(({ event }) => event ?? []);
      if (events.length > 0) yield events;
    }
  }

  /** Reads the log from its start up to the first event of another program. */
  async foreignStream(): Promise<string | null> {
    for await (const page of this.logPages(null, {})) {
      const foreign = page.find(({ event }) => event === null);
      if (foreign) return foreign.stream;
    }
    return null;
  }

  private async *logPages(
    after: Position | null,
    { max = Number.POSITIVE_INFINITY, until, streamPrefixes, onForeign }: NonNullable<Parameters<EventStore['readAll']>[1]>,
  ): AsyncGenerator<readonly Logged[], void, void> {
    const { streamNameFilter } = this.driver;
    const filter = streamPrefixes ? streamNameFilter({ prefixes: [...streamPrefixes] }) : streamNameFilter({ regex: NOT_A_SYSTEM_STREAM });
    let position = after;
    for (let left = max; left > 0;) {
      if (until !== undefined && position !== null && position >= until) return;
      // The read includes the event at `position`. So ask for one event more, and drop that one.
      const count = Math.min(left, PAGE_EVENTS) + (position === null ? 0 : 1);
      const page = (await this.readLog({ from: position === null ? 'start' : fromText(position), maxCount: count, filter })).map(this.logged);
      const known = position ?? '';
      // The page is empty if no event from the position on passes the filter, or if the log ends before the position. In the second case `headBehind`
      // throws.
      if (page.length === 0 && position !== null) await this.headBehind(position);
      const events = page.filter((event) => event.position > known && (until === undefined || event.position <= until)).slice(0, left);
      await this.requireHeld(events, onForeign);
      yield events;
      // Only our events count. The next read goes on after the last event that was handed out.
      left -= events.filter(({ event }) => event !== null).length;
      if (page.length < count || (until !== undefined && page.at(-1)!.position >= until)) return;
      position = events.at(-1)?.position ?? page.at(-1)!.position;
    }
  }

  subscribe(after: Position | null, { streamPrefixes }: { streamPrefixes?: readonly string[] } = {}): Subscription {
    const follower: Follower = new Follower(
      {
        driver: this.driver,
        clock: this.clock,
        timings: this.timings,
        connection: this.connection,
        onTrouble: this.onTrouble,
        onForeign: (stream, installation) => this.foreign(stream, installation),
        logged: this.logged,
        requireHeld: (page) => this.requireHeld(page),
        headBehind: (position, signal) => this.headBehind(position, signal),
        head: () => this.head(),
        placeOf: (position) => this.placeOf(position),
      },
      after,
      streamPrefixes,
      () => this.followers.delete(follower),
    );
    this.followers.add(follower);
    return follower;
  }

  async missing(marks: readonly Mark[]): Promise<readonly Mark[]> {
    const begun = this.clock.monotonic();
    for (;;) {
      const missing = await this.missingNow(marks);
      if (missing.length === 0 || !(await this.mayBeDeposed(begun))) return missing;
      await this.clock.sleep(this.timings.retryMs);
    }
  }

  private async missingNow(marks: readonly Mark[]): Promise<readonly Mark[]> {
    const runs = runsOf(marks.map(({ position }) => position)).reverse();
    const idAt = new Map<Position, string>();
    let end: Position | null = null;
    const readRuns = async () => {
      for (let run = runs.pop(); run; run = runs.pop()) {
        if (end !== null && run[0]! > end) continue;
        const beyond = await this.readRun(run, idAt);
        if (beyond !== null && (end === null || beyond < end)) end = beyond;
      }
    };
    await Promise.all(Array.from({ length: PARALLEL_MARK_READS }, readRuns));
    return marks.filter(({ position, id }) => idAt.get(position) !== id);
  }

  /**
   * Puts the id of each event at these positions into `idAt`. Each page begins at the first of these positions that is not read yet, and
   * asks for as many events as positions are left. Resolves with the first of these positions beyond the end of the log. null: there is none.
   */
  private async readRun(positions: readonly Position[], idAt: Map<Position, string>): Promise<Position | null> {
    for (let next = 0; next < positions.length;) {
      const left = positions.length - next;
      const page = await this.eventsFrom(positions[next]!, Math.min(PAGE_EVENTS, left)).catch(noneAt);
      if (page?.length === 0) return positions[next]!;
      for (const { position, id } of page ?? []) idAt.set(position, id);
      const last = page?.at(-1)!.position ?? '';
      next += 1;
      while (next < positions.length && positions[next]! <= last) next += 1;
    }
    return null;
  }

  async eventAt(position: Position): Promise<Recorded | null> {
    const first = (await this.eventsFrom(position, 1).catch(noneAt))?.[0];
    return first?.position === position ? first.event : null;
  }

  /**
   * Our event at a position, and the position of the event before it. null: another program wrote the event, or the event was removed. Throws
   * NoEventThere.
   */
  private async placeOf(position: Position): Promise<Place | null> {
    const [first] = await this.eventsFrom(position, 1);
    if (first?.position !== position || first.event === null) return null;
    const filter = this.driver.streamNameFilter({ regex: NOT_A_SYSTEM_STREAM });
    const [before] = await this.readLog({ from: fromText(position), isBackwards: true, maxCount: 1, filter });
    return { position, id: first.id, before: before ? this.logged(before).position : null };
  }

  /**
   * Events of the log from a position on, including the server's own events: a read with a filter takes several times as long. Empty: the position
   * lies beyond the end. Throws NoEventThere.
   */
  private async eventsFrom(position: Position, maxCount: number): Promise<readonly Logged[]> {
    const begun = this.clock.monotonic();
    for (;;) {
      const page = await this.readLog({ from: fromText(position), maxCount });
      if (page.length > 0 || !(await this.mayBeDeposed(begun))) return page.map(this.logged);
      await this.clock.sleep(this.timings.retryMs);
    }
  }

  /** Returns the head. Throws BeyondTheEnd if at least two reads show a head before the position. */
  private async headBehind(position: Position, signal?: AbortSignal): Promise<Position> {
    const begun = this.clock.monotonic();
    for (let look = 1; ; look++) {
      const head = await this.head();
      if (head !== null && position <= head) return head;
      if (signal?.aborted || (look > 1 && !(await this.mayBeDeposed(begun)))) throw new BeyondTheEnd(position, head);
      await this.clock.sleep(this.timings.retryMs, signal);
    }
  }

  /** True while a read that lacks an event may come from a deposed leader. `since`: when the first such read began. */
  private async mayBeDeposed(since: number): Promise<boolean> {
    return this.clock.monotonic() - since < this.timings.deposedMs && (await this.connection.isCluster());
  }

  /** Each answer comes from a read that began after the call. */
  readonly head = shared(() => this.readHead());

  private async readHead(): Promise<Position | null> {
    const filter = this.driver.streamNameFilter({ regex: NOT_A_SYSTEM_STREAM });
    const [last] = await this.readLog({ from: 'end', isBackwards: true, maxCount: 1, filter });
    return last?.event?.position ? toText(last.event.position) : null;
  }

  async close(): Promise<void> {
    this.closed = true;
    await Promise.all([...this.followers].map((follower) => follower.close()));
    await this.slots.drained();
    await this.connection.close();
  }

  /** Reports at most one foreign stream a minute, because every subscription gets the same foreign events. */
  private foreign(stream: string, installation: string | null): void {
    const now = this.clock.monotonic();
    if (now < this.foreignAgainAt) return;
    this.foreignAgainAt = now + FOREIGN_EVERY_MS;
    this.onForeign(stream, installation);
  }

  private readonly logged = (resolved: ResolvedEvent): Logged => logged(resolved, this.installationId());

  /**
   * Calls `onForeign` with the events of another installation. Throws Unavailable if our log does not hold the last of them: then another log has
   * answered the read, and its events must not be skipped.
   */
  private async requireHeld(page: readonly Logged[], onForeign?: (event: Recorded) => void): Promise<void> {
    const others = page.flatMap(({ other }) => other ?? []);
    const last = others.at(-1);
    if (!last) return;
    if ((await this.missing([last])).length > 0) throw new Unavailable('another log has answered a read');
    for (const event of others) {
      this.foreign(event.stream, event.meta.installation!);
      onForeign?.(event);
    }
  }

  private open(): void {
    if (this.closed) throw new Unavailable('the event store is closed');
  }

  /** All events of one bounded read of a stream. Empty: there is no such stream. Throws UnreadableStream for a deleted stream. */
  private async page(request: StreamRead): Promise<Recorded[]> {
    const events = await this.raw(request).catch((error: unknown) => {
      const { type } = (asError(error).cause ?? {}) as { type?: string };
      throw type === 'stream-deleted' ? new UnreadableStream(request.stream, ': it was deleted') : error;
    });
    return events.map((event) => recorded(event, this.installationId()));
  }

  /** A bounded read of the log. Throws NoEventThere if no event begins at the position. */
  private readLog(request: LogRead): Promise<ResolvedEvent[]> {
    return this.raw(request).catch((error: unknown) => {
      throw typeof request.from === 'object' && isNoBoundary((error as Error).cause ?? {}) ? new NoEventThere(toText(request.from)) : error;
    });
  }

  /** Runs a bounded read, and repeats it until it succeeds or the time is up. */
  private async raw(request: ReadRequest): Promise<ResolvedEvent[]> {
    const deadline = this.clock.monotonic() + this.timings.readMs;
    for (;;) {
      this.open();
      const client = this.connection.current;
      const begun = this.clock.monotonic();
      try {
        const events = await this.drain(this.connection.read(client, request, deadline - begun), deadline);
        this.connection.succeeded(client);
        return events;
      } catch (error) {
        if (!isTransport(judge(error))) {
          this.connection.succeeded(client);
          throw new Fault(`KurrentDB refused the read: ${describe(error)}`, { cause: error });
        }
        this.connection.failed(client, begun, error);
        if (this.clock.monotonic() + this.timings.retryMs >= deadline) throw new Unavailable(`KurrentDB: ${describe(error)}`, { cause: error });
        await this.clock.sleep(this.timings.retryMs);
      }
    }
  }

  /**
   * Takes all events of a read. Throws NoAnswer if no event comes for `readStallMs`, or at the deadline.
   */
  private async drain(events: AsyncIterable<ResolvedEvent>, deadline: number): Promise<ResolvedEvent[]> {
    const done = new AbortController();
    const taken: ResolvedEvent[] = [];
    let progress = this.clock.monotonic();
    const reading = async () => {
      for await (const event of events) {
        taken.push(event);
        progress = this.clock.monotonic();
      }
      return taken;
    };
    const watching = async () => {
      for (;;) {
        const end = Math.min(progress + this.timings.readStallMs, Math.max(deadline, progress));
        const left = end - this.clock.monotonic();
        if (left <= 0) throw new NoAnswer('a read stalled');
        await this.clock.sleep(Math.ceil(left), done.signal);
        if (done.signal.aborted) return taken;
      }
    };
    try {
      return await Promise.race([reading(), watching()]);
    } finally {
      done.abort('done');
    }
  }
}

/** Limits the number and the bytes of appends in flight. Further appends wait in order. */
class Slots {
  private count = 0;
  private bytes = 0;
  private readonly waiting: { readonly bytes: number; readonly wake: AbortController; granted: boolean }[] = [];

  constructor(private readonly clock: Clock) {}

  /** Resolves with the release function once the append may be sent. Throws Unavailable if the queue is full or the deadline passes first. */
  async take(bytes: number, deadline: number): Promise<() => void> {
    if (this.waiting.length > 0 || !this.fits(bytes)) {
      if (this.waiting.length >= QUEUED_APPENDS) throw new Unavailable(`${this.waiting.length} appends wait for KurrentDB already`);
      const turn = { bytes, wake: new AbortController(), granted: false };
      this.waiting.push(turn);
      await this.clock.sleep(Math.max(0, deadline - this.clock.monotonic()), turn.wake.signal);
      if (!turn.granted) {
        this.waiting.splice(this.waiting.indexOf(turn), 1);
        throw new Unavailable('no append was possible in time; nothing was appended');
      }
      if (this.clock.monotonic() >= deadline) {
        this.release(bytes);
        throw new Unavailable('no append was possible in time; nothing was appended');
      }
    } else this.add(bytes);
    return () => this.release(bytes);
  }

  async drained(): Promise<void> {
    while (this.count > 0) await this.clock.sleep(20);
  }

  private release(bytes: number): void {
    this.count -= 1;
    this.bytes -= bytes;
    for (let next = this.waiting[0]; next && this.fits(next.bytes); next = this.waiting[0]) {
      this.waiting.shift();
      this.add(next.bytes);
      next.granted = true;
      next.wake.abort('done');
    }
  }

  private fits(bytes: number): boolean {
    return this.count < APPENDS_IN_FLIGHT && (this.count === 0 || this.bytes + bytes <= BYTES_IN_FLIGHT);
  }

  private add(bytes: number): void {
    this.count += 1;
    this.bytes += bytes;
  }
}

// ---- following

interface FollowerPorts {
  readonly driver: Driver;
  readonly clock: Clock;
  readonly timings: KurrentDbTimings;
  readonly connection: Connection;
  readonly onTrouble: NonNullable<KurrentDbOptions['onTrouble']>;
  readonly onForeign: (stream: string, installation: string | null) => void;
  readonly logged: (resolved: ResolvedEvent) => Logged;
  readonly requireHeld: (page: readonly Logged[]) => Promise<void>;
  readonly head: () => Promise<Position | null>;
  readonly headBehind: (position: Position, signal: AbortSignal) => Promise<Position>;
  readonly placeOf: (position: Position) => Promise<Place | null>;
}

/** One of our events, and the position of the event before it (null: there is none). A subscription after `before` begins with our event. */
interface Place extends Mark {
  readonly before: Position | null;
}

/**
 * A catch-up subscription without end.
 *
 * Every event of the log passes through one queue, except events of system streams. For events that the reader did not ask for, the reader gets a
 * `checkpoint` after all events that it covers. The server's own checkpoints are not used. They can come before events that they cover, and some
 * servers send wrong ones (KurrentDB #4892, #4970).
 *
 * When a subscription ends, the next one begins with the last of our events that entered the queue. If the server sends another event first, its log
 * was exchanged. An event that arrives twice is dropped.
 */
class Follower implements Subscription {
  private readonly queue: Logged[] = [];
  private readonly stop = new AbortController();
  private wake = new AbortController();
  private seen: Position | null;
  /** The last of our events up to `seen`. null: not known yet, or there is none. */
  private place: Place | null = null;
  /**
   * The head when the present subscription began. A reader at this position has caught up. null: the log was empty. undefined: the head is not known
   * yet, or the reader already got `caught_up`.
   */
  private target: Position | null | undefined;
  private failure: Error | null = null;
  private resume: (() => void) | null = null;
  private readonly supervised: Promise<void>;
  private readonly items: AsyncGenerator<SubscriptionItem, void, void>;

  constructor(
    private readonly ports: FollowerPorts,
    after: Position | null,
    private readonly prefixes: readonly string[] | undefined,
    private readonly onClosed: () => void,
  ) {
    this.seen = after;
    this.items = this.handOut();
    this.supervised = this.supervise();
  }

  [Symbol.asyncIterator](): AsyncIterator<SubscriptionItem> {
    return this.items;
  }

  async close(): Promise<void> {
    this.stop.abort();
    this.wake.abort('done');
    await this.supervised;
    await this.items.return();
    this.onClosed();
  }

  private async *handOut(): AsyncGenerator<SubscriptionItem, void, void> {
    while (!this.stop.signal.aborted) {
      if (this.queue.length > 0) {
        const batch = this.queue.splice(0, PAGE_EVENTS);
        if (this.queue.length <= QUEUED_EVENTS / 2) this.resume?.();
        await this.ports.requireHeld(batch);
        const events = batch.flatMap(({ event }) => (event && matchesPrefix(event.stream, this.prefixes) ? event : []));
        const last = batch.at(-1)!;
        if (events.length > 0) yield { kind: 'events', events };
        if (events.at(-1) !== last.event) yield { kind: 'checkpoint', position: last.position };
      } else if (this.failure) throw this.failure;
      else if (this.target === null || (this.target !== undefined && this.seen !== null && this.seen >= this.target)) {
        this.target = undefined;
        yield { kind: 'caught_up' };
      } else {
        this.wake = new AbortController();
        await this.ports.clock.sleep(this.ports.timings.silenceMs, this.wake.signal);
      }
    }
  }

  private async supervise(): Promise<void> {
    const { clock, timings, onTrouble } = this.ports;
    for (let failures = 0; !this.stop.signal.aborted;) {
      const before = this.seen;
      try {
        await orStopped(this.checkPlace(), this.stop.signal);
        await this.session();
      } catch (error) {
        if (this.stop.signal.aborted) return;
        if (!(error instanceof Unavailable) && !isTransport(judge(error))) {
          this.failure = asError(error);
          this.wake.abort('done');
          return;
        }
        onTrouble('a subscription ended and is taken up again', asError(error));
      }
      failures = this.seen === before ? failures + 1 : 0;
      await clock.sleep(Math.min(timings.backoffMostMs, timings.backoffMs * 2 ** Math.min(failures, 10)), this.stop.signal);
    }
  }

  /**
   * Checks the position before a subscription begins. Throws for a position beyond the end of the log, and for a position where no event begins.
   * Beyond the end, the server would confirm the subscription and never send an event.
   */
  private async checkPlace(): Promise<void> {
    const { head, headBehind, placeOf } = this.ports;
    if (this.seen !== null) this.place ??= await placeOf(this.seen);
    this.target = this.seen === null ? await head() : await headBehind(this.seen, this.stop.signal);
    this.wake.abort('done');
  }

  /** Runs one subscription of the client until it ends. */
  private async session(): Promise<void> {
    const { driver, clock, timings, connection } = this.ports;
    const client = connection.current;
    const begun = clock.monotonic();
    const over = new AbortController();
    let confirmed = false;
    let heard = begun;
    const { place } = this;
    const after = place ? place.before : this.seen;
    let isSameLog = place === null;
    const subscription = client.subscribeToAll({
      fromPosition: after === null ? driver.START : fromText(after),
      filter: driver.streamNameFilter({ regex: NOT_A_SYSTEM_STREAM }),
      ...connection.user,
    });
    const ended = new Promise<void>((resolve, reject) => {
      this.stop.signal.addEventListener('abort', () => resolve(), { once: true, signal: over.signal });
      connection.retired.addEventListener('abort', () => reject(new NoAnswer('its client was replaced')), { once: true, signal: over.signal });
      subscription
        .on('confirmation', () => {
          confirmed = true;
          heard = clock.monotonic();
          connection.succeeded(client);
        })
        .on('data', (resolved: ResolvedEvent) => {
          confirmed = true;
          heard = clock.monotonic();
          try {
            const next = this.ports.logged(resolved);
            if (!isSameLog && (next.position !== place!.position || next.id !== place!.id)) throw new NoEventThere(place!.position, place!.id);
            isSameLog = true;
            this.take(next);
          } catch (error) {
            reject(asError(error));
          }
          if (this.queue.length >= QUEUED_EVENTS) {
            subscription.pause();
            this.resume = () => {
              this.resume = null;
              heard = clock.monotonic();
              subscription.resume();
            };
          }
        })
        .on('end', () => reject(new NoAnswer('the server ended the subscription')))
        .on('close', () => reject(new NoAnswer('the subscription was closed')))
        // This listener is never removed: without it, an error after the end of the subscription would end the process.
        .on('error', (error) => reject(isNoBoundary(error) ? new NoEventThere(after!) : error));
    });
    const watched = async () => {
      for (;;) {
        await clock.sleep(confirmed ? timings.silenceMs : timings.confirmMs, over.signal);
        if (over.signal.aborted) return;
        if (!confirmed) throw new NoAnswer('a subscription was not confirmed');
        if (this.resume || clock.monotonic() - heard < timings.silenceMs) continue;
        const [seen, head] = [this.seen, await this.ports.head().catch(() => undefined)];
        if (head === undefined || seen === head) continue;
        // This error ends the subscription. Before the next one, `checkPlace` checks the position.
        if (seen !== null && (head === null || seen > head)) throw new NoAnswer(`a subscription stands at ${seen}, and the log ends before it`);
        // The log has an event that this subscription has not delivered. Wait `retryMs` for the event.
        await clock.sleep(timings.retryMs, over.signal);
        if (over.signal.aborted) return;
        if (this.seen === seen && !this.resume) throw new NoAnswer(`a subscription stayed silent although the log went on to ${head}`);
      }
    };
    try {
      await Promise.race([ended, watched()]);
    } catch (error) {
      // A confirmed subscription that ends with an error was healthy until now. So its failure begins now.
      const since = confirmed && !(error instanceof NoAnswer) ? clock.monotonic() : begun;
      if (isTransport(judge(error))) connection.failed(client, since, error);
      throw error;
    } finally {
      over.abort('done');
      this.resume = null;
      ended.catch(() => undefined);
      void subscription.unsubscribe().catch(() => undefined);
      subscription.destroy();
    }
  }

  private take(next: Logged): void {
    if (this.seen !== null && next.position <= this.seen) return;
    if (next.event === null) this.ports.onForeign(next.stream, next.other?.meta.installation ?? null);
    else this.place = { position: next.position, id: next.id, before: this.seen };
    this.seen = next.position;
    this.queue.push(next);
    this.wake.abort('done');
  }
}
