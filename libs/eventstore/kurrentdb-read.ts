/**
 * Bounded reads over the client's channel, the one that its appends use. The reads of the client itself go over another connection, of its native
 * part: that one says nothing about the server that gets the appends, and waits 40 ms for many answers, since it lacks `TCP_NODELAY`.
 */
import type { CallOptions, Metadata } from '@grpc/grpc-js';
import type { Filter, Position, ResolvedEvent } from '@kurrent/kurrentdb-client';
import type { StreamsClient } from '@kurrent/kurrentdb-client/generated/kurrentdb/protocols/v1/streams_grpc_pb.js';
import type { ReadResp } from '@kurrent/kurrentdb-client/generated/kurrentdb/protocols/v1/streams_pb.js';

/** A read of `maxCount` events of a stream, from a revision on. */
export interface StreamRead {
  readonly stream: string;
  readonly from: bigint;
  readonly maxCount: number;
}
/** A read of `maxCount` events of the log, from a position on, which is included. */
export interface LogRead {
  readonly from: Position | 'start' | 'end';
  readonly isBackwards?: boolean;
  readonly filter?: Filter;
  readonly maxCount: number;
}
export type ReadRequest = StreamRead | LogRead;

const load = async () => {
  const [{ default: messages }, { default: shared }, { default: events }] = await Promise.all([
    import('@kurrent/kurrentdb-client/generated/kurrentdb/protocols/v1/streams_pb.js'),
    import('@kurrent/kurrentdb-client/generated/kurrentdb/protocols/v1/shared_pb.js'),
    import('@kurrent/kurrentdb-client/dist/utils/convertGrpcEvent.js'),
  ]);
  return { messages, shared, convert: events.convertGrpcEvent };
};
let loaded: ReturnType<typeof load> | null = null;

/** Yields the events. Nothing, if there is no such stream. Throws the error of the call. */
export async function* readEvents(
  service: StreamsClient,
  request: ReadRequest,
  metadata: Metadata,
  options: CallOptions,
): AsyncGenerator<ResolvedEvent> {
  const { messages, shared, convert } = await (loaded ??= load());
  const { Options } = messages.ReadReq;
  const empty = new shared.Empty();
  const asked = new Options()
    .setCount(String(request.maxCount))
    .setReadDirection(Options.ReadDirection.FORWARDS)
    .setUuidOption(new Options.UUIDOption().setString(empty))
    .setControlOption(new Options.ControlOption().setCompatibility(1));
  if ('stream' in request) {
    const name = new shared.StreamIdentifier().setStreamName(Buffer.from(request.stream));
    asked.setStream(new Options.StreamOptions().setStreamIdentifier(name).setRevision(String(request.from))).setNoFilter(empty);
  } else {
    const { from, isBackwards = false, filter } = request;
    const all = new Options.AllOptions();
    if (from === 'start') all.setStart(empty);
    else if (from === 'end') all.setEnd(empty);
    else all.setPosition(new Options.Position().setCommitPosition(String(from.commit)).setPreparePosition(String(from.prepare)));
    asked.setAll(all);
    if (isBackwards) asked.setReadDirection(Options.ReadDirection.BACKWARDS);
    if (filter) {
      const names = new Options.FilterOptions.Expression();
      if ('regex' in filter) names.setRegex(filter.regex);
      else names.setPrefixList(filter.prefixes);
      asked.setFilter(new Options.FilterOptions().setStreamIdentifier(names).setCount(empty).setCheckpointintervalmultiplier(1));
    } else asked.setNoFilter(empty);
  }
  const call = service.read(new messages.ReadReq().setOptions(asked), metadata, options);
  try {
    for await (const response of call as AsyncIterable<ReadResp>) if (response.hasEvent()) yield convert(response.getEvent()!);
  } finally {
    call.cancel();
  }
}
