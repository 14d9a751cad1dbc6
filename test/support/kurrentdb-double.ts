/**
 * A double of KurrentDB in this process, for faults that a real server rarely has. It implements the client's gRPC protocol (Streams, ServerFeatures,
 * Gossip) over real sockets. Its rules of revisions and idempotency are those of the real server, and the contract suite runs against both.
 */
import grpc from '@grpc/grpc-js';
import gossipServices from '@kurrent/kurrentdb-client/generated/kurrentdb/protocols/v1/gossip_grpc_pb.js';
import gossipMessages from '@kurrent/kurrentdb-client/generated/kurrentdb/protocols/v1/gossip_pb.js';
import featureServices from '@kurrent/kurrentdb-client/generated/kurrentdb/protocols/v1/serverfeatures_grpc_pb.js';
import featureMessages from '@kurrent/kurrentdb-client/generated/kurrentdb/protocols/v1/serverfeatures_pb.js';
import shared from '@kurrent/kurrentdb-client/generated/kurrentdb/protocols/v1/shared_pb.js';
import streamServices from '@kurrent/kurrentdb-client/generated/kurrentdb/protocols/v1/streams_grpc_pb.js';
import messages from '@kurrent/kurrentdb-client/generated/kurrentdb/protocols/v1/streams_pb.js';
import { randomUUID } from 'node:crypto';

type ReadReq = InstanceType<typeof messages.ReadReq>;
type ReadResp = InstanceType<typeof messages.ReadResp>;
type AppendReq = InstanceType<typeof messages.AppendReq>;
type AppendResp = InstanceType<typeof messages.AppendResp>;
type ReadCall = grpc.ServerWritableStream<ReadReq, ReadResp>;

interface StoredEvent {
  readonly stream: string;
  readonly revision: number;
  readonly position: number;
  readonly id: string;
  readonly type: string;
  readonly contentType: string;
  readonly data: Uint8Array;
  readonly metadata: Uint8Array;
  readonly createdMs: number;
}

type ProposedEvent = Pick<StoredEvent, 'id' | 'type' | 'contentType' | 'data' | 'metadata'>;

/**
 * The faults of an append. `hang`: no answer, nothing stored. `lost`: stored, no answer. `cut`: stored, then the connection breaks. `half_close`: the
 * call ends with OK and no reply. `late`: stored after the caller's deadline. `unavailable`, `unknown`, `not_ready`, `busy`, `not_leader`,
 * `bad_request`: errors as servers send them. `no_position`: success without a position. `conflict`: a false conflict, from a server that does not
 * recognise a repeated append.
 */
export type AppendFault =
  | 'hang'
  | 'lost'
  | 'cut'
  | 'half_close'
  | 'late'
  | 'unavailable'
  | 'not_ready'
  | 'not_ready_unknown'
  | 'busy'
  | 'not_leader'
  | 'bad_request'
  | 'no_position'
  | 'conflict';
/** Faults of a read. `stall`: half of the events, then nothing more. */
export type ReadFault = 'hang' | 'stall' | 'unavailable' | 'not_leader';
/**
 * Faults of a subscription. `unconfirmed`: accepted, never confirmed. `silent_end`: ends with OK after the stored events. `stall`: confirmed and
 * caught up, then nothing more. `duplicate`: sends every event twice. `early_checkpoint`: sends a checkpoint for the end of the log before the
 * events. `error`: breaks after three events.
 */
export type SubscriptionFault = 'unconfirmed' | 'silent_end' | 'stall' | 'duplicate' | 'early_checkpoint' | 'error';

const TICKS_PER_MS = 10_000n;
const NO_STREAM = -1;

export class KurrentDbDouble {
  /** `next*`: faults of the next calls, one for each call. `every*`: the fault of all other calls. */
  readonly nextAppends: AppendFault[] = [];
  readonly nextReads: ReadFault[] = [];
  readonly nextSubscriptions: SubscriptionFault[] = [];
  everyAppend: AppendFault | null = null;
  everyRead: ReadFault | null = null;
  everySubscription: SubscriptionFault | null = null;
  /** The port of the leader that this node reports. null: this node is the leader. */
  leaderPort: number | null = null;
  members: number[] = [];
  readonly calls = { append: 0, batchAppend: 0, read: 0, subscribe: 0, features: 0, gossip: 0, requiresLeader: 0, authorization: new Set<string>() };
  /** Positions of a real server are byte offsets. They rise with gaps. */
  bytesPerEvent = 137;
  readonly log: StoredEvent[];
  private readonly streams: Map<string, StoredEvent[]>;
  private readonly live: Set<(event: StoredEvent) => void>;
  private server: grpc.Server | null = null;
  private readonly held = new Set<grpc.ServerWritableStream<ReadReq, ReadResp> | grpc.ServerReadableStream<AppendReq, AppendResp>>();
  port = 0;

  /** `twin`: the first node of the cluster, whose log this node shares. */
  constructor(
    private readonly credentials: grpc.ServerCredentials = grpc.ServerCredentials.createInsecure(),
    twin?: KurrentDbDouble,
  ) {
    this.log = twin?.log ?? [];
    this.streams = twin?.streams ?? new Map();
    this.live = twin?.live ?? new Set();
  }

  /** Listens on loopback. A later start uses the same port. */
  async start(): Promise<this> {
    const server = new grpc.Server({ 'grpc.max_receive_message_length': 17 * 1024 * 1024 });
    server.addService(streamServices.StreamsService, {
      append: (call: grpc.ServerReadableStream<AppendReq, AppendResp>, reply: grpc.sendUnaryData<AppendResp>) => this.append(call, reply),
      // The adapter must not use the shared batch stream. The double counts such calls and never answers.
      batchAppend: () => void (this.calls.batchAppend += 1),
      read: (call: ReadCall) => this.read(call),
      delete: (_call: unknown, reply: grpc.sendUnaryData<never>) => reply({ code: grpc.status.UNIMPLEMENTED }),
      tombstone: (_call: unknown, reply: grpc.sendUnaryData<never>) => reply({ code: grpc.status.UNIMPLEMENTED }),
    });
    server.addService(featureServices.ServerFeaturesService, {
      getSupportedMethods: (_call: unknown, reply: grpc.sendUnaryData<unknown>) => {
        this.calls.features += 1;
        const methods = new featureMessages.SupportedMethods();
        methods.setEventStoreServerVersion('24.10.5');
        const batch = new featureMessages.SupportedMethod();
        batch.setServiceName('event_store.client.streams.streams');
        batch.setMethodName('batchappend');
        methods.addMethods(batch);
        reply(null, methods);
      },
    });
    server.addService(gossipServices.GossipService, {
      read: (_call: unknown, reply: grpc.sendUnaryData<unknown>) => {
        this.calls.gossip += 1;
        reply(null, this.gossip());
      },
    });
    this.port = await new Promise<number>((bound, fail) =>
      server.bindAsync(`127.0.0.1:${this.port}`, this.credentials, (error, port) => (error ? fail(error) : bound(port))),
    );
    this.server = server;
    return this;
  }

  /** Breaks every connection and stops listening, as `kill -9` does. Stored events stay. */
  kill(): void {
    this.held.clear();
    this.server?.forceShutdown();
    this.server = null;
  }

  url(options = 'tls=false', credentials = ''): string {
    return `kurrentdb://${credentials}127.0.0.1:${this.port}?${options}`;
  }

  /** Appends events as another client would. */
  write(stream: string, events: readonly { id?: string; type: string; data: unknown; meta?: unknown }[]): void {
    const bytes = (value: unknown) => Buffer.from(JSON.stringify(value));
    this.store(
      stream,
      events.map(({ id, type, data, meta }) => ({
        id: id ?? randomUUID(),
        type,
        contentType: 'application/json',
        data: bytes(data),
        metadata: bytes(meta ?? { v: 1, recordedAt: new Date().toISOString(), actor: { type: 'system', id: 'double' }, correlationId: randomUUID() }),
      })),
    );
  }

  /** Removes all events, as if the server's disk were replaced. */
  wipe(): void {
    this.keep(0);
  }

  /** Keeps only the first events, as if the server's disk were put back to an earlier copy. */
  keep(events: number): void {
    const kept = this.log.splice(0).slice(0, events);
    this.streams.clear();
    for (const event of kept) this.add(event);
  }

  /** Makes another server with the first events of this one. */
  copy(events = this.log.length): KurrentDbDouble {
    const made = new KurrentDbDouble();
    for (const event of this.log.slice(0, events)) made.add(event);
    return made;
  }

  // ---- appends

  private append(call: grpc.ServerReadableStream<AppendReq, AppendResp>, reply: grpc.sendUnaryData<AppendResp>): void {
    this.calls.append += 1;
    this.note(call.metadata);
    let options: ReturnType<AppendReq['getOptions']>;
    const events: ProposedEvent[] = [];
    call.on('error', () => undefined);
    call.on('data', (request: AppendReq) => {
      if (request.hasOptions()) options = request.getOptions();
      if (!request.hasProposedMessage()) return;
      const message = request.getProposedMessage()!;
      const metadata = message.getMetadataMap();
      events.push({
        id: uuidOf(message.getId()!),
        type: metadata.get('type')!,
        contentType: metadata.get('content-type')!,
        data: message.getData_asU8(),
        metadata: message.getCustomMetadata_asU8(),
      });
    });
    call.on('end', () => {
      // If the call was cancelled, the append did not arrive in full and is ignored.
      if (!options || events.length === 0 || call.cancelled) return;
      const stream = Buffer.from(options.getStreamIdentifier()!.getStreamName_asU8()).toString();
      const expected = options.hasAny() ? 'any' : options.hasNoStream() ? NO_STREAM : Number(options.getRevision());
      this.answer(this.nextAppends.shift() ?? this.everyAppend, call, reply, () => this.decide(stream, expected, events));
    });
  }

  private answer(
    fault: AppendFault | null,
    call: grpc.ServerReadableStream<AppendReq, AppendResp>,
    reply: grpc.sendUnaryData<AppendResp>,
    decide: () => AppendResp,
  ): void {
    switch (fault) {
      case null:
        return reply(null, decide());
      case 'conflict': {
        const response = new messages.AppendResp();
        response.setWrongExpectedVersion(new messages.AppendResp.WrongExpectedVersion());
        return reply(null, response);
      }
      case 'no_position': {
        const response = decide();
        response.getSuccess()?.clearPosition();
        return reply(null, response);
      }
      case 'hang':
        return;
      case 'lost':
        decide();
        return;
      case 'late':
        call.on('cancelled', () => setTimeout(decide, 50));
        return;
      case 'cut':
        decide();
        return reply({ code: grpc.status.UNAVAILABLE, details: 'Connection dropped' });
      case 'half_close':
        return (call as unknown as { end(): void; sendMetadata(m: grpc.Metadata): void }).sendMetadata(new grpc.Metadata());
      case 'unavailable':
        return reply({ code: grpc.status.UNAVAILABLE, details: 'no' });
      case 'not_ready':
        return reply({ code: grpc.status.UNAVAILABLE, details: 'Server Is Not Ready' });
      case 'not_ready_unknown':
        return reply({ code: grpc.status.UNKNOWN, details: 'Could not recognize Server Is Not Ready' });
      case 'busy':
        return reply({ code: grpc.status.RESOURCE_EXHAUSTED, details: 'Server Is Busy' });
      case 'bad_request':
        return reply({ code: grpc.status.UNKNOWN, details: 'Envelope callback expected WriteEventsCompleted, received BadRequest instead' });
      case 'not_leader':
        return reply({ code: grpc.status.NOT_FOUND, details: 'Leader info available', metadata: this.notLeader() });
    }
  }

  private decide(stream: string, expected: number | 'any', events: readonly ProposedEvent[]): AppendResp {
    const response = new messages.AppendResp();
    const present = this.streams.get(stream) ?? [];
    const last = present.length - 1;
    let end: StoredEvent;
    if (expected === 'any' || expected === last) end = this.store(stream, events);
    else if (expected < last && events.every(({ id }, index) => present[expected + 1 + index]?.id === id)) end = present[expected + events.length]!;
    else {
      const wrong = new messages.AppendResp.WrongExpectedVersion();
      if (last === NO_STREAM) wrong.setCurrentNoStream(new shared.Empty());
      else wrong.setCurrentRevision(String(last));
      if (expected === NO_STREAM) wrong.setExpectedNoStream(new shared.Empty());
      else wrong.setExpectedRevision(String(expected));
      response.setWrongExpectedVersion(wrong);
      return response;
    }
    const success = new messages.AppendResp.Success();
    success.setCurrentRevision(String(end.revision));
    const position = new messages.AppendResp.Position();
    position.setCommitPosition(String(end.position));
    position.setPreparePosition(String(end.position));
    success.setPosition(position);
    response.setSuccess(success);
    return response;
  }

  private store(stream: string, events: readonly ProposedEvent[]): StoredEvent {
    for (const event of events) {
      const revision = this.streams.get(stream)?.length ?? 0;
      const position = (this.log.at(-1)?.position ?? 0) + this.bytesPerEvent;
      const stored = { ...event, stream, revision, position, createdMs: Date.now() };
      this.add(stored);
      this.live.forEach((deliver) => deliver(stored));
    }
    return this.log.at(-1)!;
  }

  private add(event: StoredEvent): void {
    const present = this.streams.get(event.stream);
    if (present) present.push(event);
    else this.streams.set(event.stream, [event]);
    this.log.push(event);
  }

  // ---- reads

  private read(call: ReadCall): void {
    this.note(call.metadata);
    call.on('error', () => undefined);
    const options = call.request.getOptions()!;
    if (options.hasSubscription()) return this.subscribe(call);
    this.calls.read += 1;
    const fault = this.nextReads.shift() ?? this.everyRead;
    if (fault === 'hang') return;
    if (fault === 'unavailable') return void call.emit('error', { code: grpc.status.UNAVAILABLE, details: 'no' });
    if (fault === 'not_leader')
      return void call.emit('error', { code: grpc.status.NOT_FOUND, details: 'Leader info available', metadata: this.notLeader() });
    if (this.isRefused(options))
      return void call.emit('error', {
        code: grpc.status.UNKNOWN,
        details: `Unexpected ${options.hasFilter() ? 'Filtered' : ''}ReadAllResult: InvalidPosition`,
      });
    const found = this.select(options);
    if (!found) {
      const response = new messages.ReadResp();
      const missing = new messages.ReadResp.StreamNotFound();
      missing.setStreamIdentifier(options.getStream()!.getStreamIdentifier());
      response.setStreamNotFound(missing);
      call.write(response);
      return void call.end();
    }
    const events = found.slice(0, Number(options.getCount()));
    for (const event of fault === 'stall' ? events.slice(0, events.length / 2) : events) call.write(toResponse(event));
    if (fault !== 'stall') call.end();
  }

  private select(options: NonNullable<ReturnType<ReadReq['getOptions']>>): readonly StoredEvent[] | null {
    const backwards = options.getReadDirection() === messages.ReadReq.Options.ReadDirection.BACKWARDS;
    if (options.hasStream()) {
      const stream = this.streams.get(Buffer.from(options.getStream()!.getStreamIdentifier()!.getStreamName_asU8()).toString());
      if (!stream) return null;
      return stream.slice(options.getStream()!.hasRevision() ? Number(options.getStream()!.getRevision()) : 0);
    }
    const all = options.getAll()!;
    const passes = this.filter(options);
    const from = all.hasPosition() ? Number(all.getPosition()!.getCommitPosition()) : 0;
    if (backwards) return [...this.log].reverse().filter((event) => (all.hasEnd() || event.position < from) && passes(event));
    return this.log.filter((event) => event.position >= from && passes(event));
  }

  /**
   * True if a position is refused. A forward read may start at the first byte of an event or beyond the last event. A backward read may start only at
   * an event.
   */
  private isRefused(options: NonNullable<ReturnType<ReadReq['getOptions']>>): boolean {
    const position = options.getAll()?.getPosition();
    if (!position) return false;
    const [commit, prepare] = [Number(position.getCommitPosition()), Number(position.getPreparePosition())];
    const isBackwards = options.getReadDirection() === messages.ReadReq.Options.ReadDirection.BACKWARDS;
    const isBeyond = commit > (this.log.at(-1)?.position ?? 0);
    const isEvent = commit === 0 || this.log.some((event) => event.position === commit);
    return prepare > commit || (isBeyond ? isBackwards : !isEvent);
  }

  private filter(options: NonNullable<ReturnType<ReadReq['getOptions']>>): (event: StoredEvent) => boolean {
    const asked = options.getFilter()?.getStreamIdentifier();
    if (!asked) return () => true;
    const regex = asked.getRegex();
    if (regex !== '') return ({ stream }) => new RegExp(regex).test(stream);
    return ({ stream }) => asked.getPrefixList().some((prefix) => stream.startsWith(prefix));
  }

  private subscribe(call: ReadCall): void {
    this.calls.subscribe += 1;
    const fault = this.nextSubscriptions.shift() ?? this.everySubscription;
    this.held.add(call);
    if (fault === 'unconfirmed') return;
    const confirmation = new messages.ReadResp();
    const confirmed = new messages.ReadResp.SubscriptionConfirmation();
    confirmed.setSubscriptionId(randomUUID());
    confirmation.setConfirmation(confirmed);
    call.write(confirmation);
    const all = call.request.getOptions()!.getAll()!;
    const after = all.hasPosition() ? Number(all.getPosition()!.getCommitPosition()) : 0;
    const passes = this.filter(call.request.getOptions()!);
    if (this.isRefused(call.request.getOptions()!))
      return void call.emit('error', { code: grpc.status.INVALID_ARGUMENT, details: 'Trying to read from an invalid position.' });
    // A subscription from beyond the end is confirmed and gets no events, as on the real server.
    if (after > (this.log.at(-1)?.position ?? 0)) return;
    if (fault === 'early_checkpoint') this.checkpoint(call);
    let delivered = 0;
    const deliver = (event: StoredEvent) => {
      if (!passes(event) || call.cancelled || call.destroyed) return;
      if (fault === 'error' && ++delivered > 3) {
        this.live.delete(deliver);
        return void call.emit('error', { code: grpc.status.UNAVAILABLE, details: 'the leader changed' });
      }
      call.write(toResponse(event));
      if (fault === 'duplicate') call.write(toResponse(event));
    };
    this.log.filter((event) => event.position > after).forEach(deliver);
    this.checkpoint(call);
    const caughtUp = new messages.ReadResp();
    caughtUp.setCaughtUp(new messages.ReadResp.CaughtUp());
    call.write(caughtUp);
    if (fault === 'silent_end') return void call.end();
    if (fault === 'stall') return;
    this.live.add(deliver);
    call.on('cancelled', () => this.live.delete(deliver));
    call.on('close', () => this.live.delete(deliver));
  }

  private checkpoint(call: ReadCall): void {
    const response = new messages.ReadResp();
    const checkpoint = new messages.ReadResp.Checkpoint();
    const position = String(this.log.at(-1)?.position ?? 0);
    checkpoint.setCommitPosition(position);
    checkpoint.setPreparePosition(position);
    response.setCheckpoint(checkpoint);
    call.write(response);
  }

  // ---- cluster

  private gossip() {
    const info = new gossipMessages.ClusterInfo();
    for (const port of this.members.length > 0 ? this.members : [this.port]) {
      const member = new gossipMessages.MemberInfo();
      const id = new shared.UUID();
      id.setString(randomUUID());
      member.setInstanceId(id);
      const { FOLLOWER, LEADER } = gossipMessages.MemberInfo.VNodeState;
      member.setState(port === (this.leaderPort ?? this.port) ? LEADER : FOLLOWER);
      member.setIsAlive(true);
      const end = new gossipMessages.EndPoint();
      end.setAddress('127.0.0.1');
      end.setPort(port);
      member.setHttpEndPoint(end);
      info.addMembers(member);
    }
    return info;
  }

  private notLeader(): grpc.Metadata {
    const metadata = new grpc.Metadata();
    metadata.set('exception', 'not-leader');
    metadata.set('leader-endpoint-host', '127.0.0.1');
    metadata.set('leader-endpoint-port', String(this.leaderPort ?? this.port));
    return metadata;
  }

  private note(metadata: grpc.Metadata): void {
    if (metadata.get('requires-leader')[0] === 'true') this.calls.requiresLeader += 1;
    for (const value of metadata.get('authorization')) this.calls.authorization.add(String(value));
  }
}

const uuidOf = (uuid: InstanceType<typeof shared.UUID>): string => {
  if (uuid.hasString()) return uuid.getString();
  const { mostSignificantBits, leastSignificantBits } = uuid.getStructured()!.toObject();
  const hex = (value: string) => BigInt.asUintN(64, BigInt(value)).toString(16).padStart(16, '0');
  return `${hex(String(mostSignificantBits))}${hex(String(leastSignificantBits))}`.replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, '$1-$2-$3-$4-$5');
};

const toResponse = (event: StoredEvent): ReadResp => {
  const recorded = new messages.ReadResp.ReadEvent.RecordedEvent();
  const id = new shared.UUID();
  id.setString(event.id);
  recorded.setId(id);
  const stream = new shared.StreamIdentifier();
  stream.setStreamName(Buffer.from(event.stream));
  recorded.setStreamIdentifier(stream);
  recorded.setStreamRevision(String(event.revision));
  recorded.setCommitPosition(String(event.position));
  recorded.setPreparePosition(String(event.position));
  recorded
    .getMetadataMap()
    .set('type', event.type)
    .set('content-type', event.contentType)
    .set('created', String(BigInt(event.createdMs) * TICKS_PER_MS));
  recorded.setData(event.data);
  recorded.setCustomMetadata(event.metadata);
  const read = new messages.ReadResp.ReadEvent();
  read.setEvent(recorded);
  read.setCommitPosition(String(event.position));
  const response = new messages.ReadResp();
  response.setEvent(read);
  return response;
};
