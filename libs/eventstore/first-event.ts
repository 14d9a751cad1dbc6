/**
 * A read over the connection that appends use. The client's own reads go over a connection of its native part, so they say nothing about the server
 * that gets the appends.
 */
import type { CallOptions, Metadata } from '@grpc/grpc-js';
import type { StreamsClient } from '@kurrent/kurrentdb-client/generated/kurrentdb/protocols/v1/streams_grpc_pb.js';
import type { ReadResp } from '@kurrent/kurrentdb-client/generated/kurrentdb/protocols/v1/streams_pb.js';

/** The id of the first event of a stream. null: there is no such stream. Throws the error of the call. */
export const firstEventId = async (service: StreamsClient, stream: string, metadata: Metadata, options: CallOptions): Promise<string | null> => {
  const [{ default: messages }, { default: shared }] = await Promise.all([
    import('@kurrent/kurrentdb-client/generated/kurrentdb/protocols/v1/streams_pb.js'),
    import('@kurrent/kurrentdb-client/generated/kurrentdb/protocols/v1/shared_pb.js'),
  ]);
  const { Options } = messages.ReadReq;
  const empty = new shared.Empty();
  const name = new shared.StreamIdentifier().setStreamName(Buffer.from(stream));
  const asked = new Options()
    .setStream(new Options.StreamOptions().setStreamIdentifier(name).setStart(empty))
    .setReadDirection(Options.ReadDirection.FORWARDS)
    .setCount('1')
    .setNoFilter(empty)
    .setUuidOption(new Options.UUIDOption().setString(empty))
    .setControlOption(new Options.ControlOption().setCompatibility(1));
  const call = service.read(new messages.ReadReq().setOptions(asked), metadata, options);
  return new Promise((resolve, reject) => {
    let id: string | null = null;
    call
      .on('data', (response: ReadResp) => (id ??= response.getEvent()?.getEvent()?.getId()?.getString().toLowerCase() ?? null))
      .on('end', () => resolve(id))
      .on('error', reject);
  });
};
