/** Receives bodies. Credentials are checked before, so a guard calls {@link receiveBody} (docs/contract.md#order-of-evaluation). */
import type { CanActivate, ExecutionContext } from '@nestjs/common';
import type { FastifyReply, FastifyRequest } from 'fastify';
import type { IncomingMessage } from 'node:http';
import { ServiceError } from '#kernel';
import { connectionOf } from './connections.js';
import { MAX_BODY_BYTES } from './strict-json.js';

/** Bytes that every body may take. Only larger bodies count in the limits of {@link Connections}, so an ordinary request always has its memory. */
const FREE_BODY_BYTES = 16 * 1024;
/** Pieces in which a body may come. Each piece costs time, also one of a single byte. */
const MAX_PIECES = 4_096;
/** Seconds after which a client may send a body again that found no memory. */
const RETRY_SECONDS = 1;

/**
 * Reads the body of a POST into `request.body`, as a Buffer. No other method has a body that counts. `isStranger`: the request has no credentials. A
 * large body counts in the limits of {@link Connections} until its request is answered.
 */
export const receiveBody = async (request: FastifyRequest, reply: FastifyReply, { isStranger = false } = {}): Promise<void> => {
  if (request.method !== 'POST' || !hasBody(request.raw)) return;
  // The client waits for its credentials to be checked.
  if (request.headers.expect !== undefined) reply.raw.writeContinue();
  const { raw: response } = reply;
  const { socket } = request.raw;
  const { bytes, counted } = await bytesOf(request.raw, isStranger);
  request.body = bytes;
  if (counted === 0) return;
  // If the connection ends, the answer to a pipelined request may emit no `close`, but the socket does.
  const giveBack = () => {
    response.off('close', giveBack);
    socket.off('close', giveBack);
    connectionOf(request.raw).takeForBody(-counted, isStranger);
  };
  if (response.closed || socket.destroyed) return giveBack();
  response.once('close', giveBack);
  socket.once('close', giveBack);
};

/** The body that {@link receiveBody} has read. Empty: the request has none. */
export const receivedBody = ({ body, method, raw }: FastifyRequest): Buffer => {
  if (Buffer.isBuffer(body)) return body;
  if (method === 'POST' && hasBody(raw)) throw new Error('no guard has received the body');
  return Buffer.alloc(0);
};

/** Receives the body of a request that needs no credentials. */
export const bodyGuard: CanActivate = {
  canActivate: async (context: ExecutionContext) => {
    const http = context.switchToHttp();
    await receiveBody(http.getRequest<FastifyRequest>(), http.getResponse<FastifyReply>(), { isStranger: true });
    return true;
  },
};

export const hasBody = (raw: IncomingMessage): boolean => announcedBytes(raw) > 0;

/** Bytes of a body that has not been read: as its head says, or the most that a body may have. 0: the request has no body. */
export const announcedBytes = ({ headers }: IncomingMessage): number =>
  Number(headers['content-length'] ?? (headers['transfer-encoding'] === undefined ? 0 : MAX_BODY_BYTES));

export const bodyTooLarge = (): ServiceError => new ServiceError('VALIDATION_ERROR', 'The body is larger than 256 KiB.', {}, { status: 413 });

const noMemory = ({ headers }: IncomingMessage): ServiceError =>
  new ServiceError(
    headers['idempotency-key'] === undefined ? 'INTERNAL_ERROR' : 'IDEMPOTENCY_UNAVAILABLE',
    'The service receives too many large bodies at this time. Nothing was done. Send the request again.',
    {},
    { status: 503, retryAfterSeconds: RETRY_SECONDS },
  );

/** Copies the body into one buffer. A list of the pieces would take many times the memory of a body that comes byte by byte. */
const bytesOf = (raw: IncomingMessage, isStranger: boolean): Promise<{ readonly bytes: Buffer; readonly counted: number }> =>
  new Promise((resolve, reject) => {
    const { takeForBody } = connectionOf(raw);
    const announced = announcedBytes(raw);
    let bytes = Buffer.allocUnsafe(Math.min(announced, FREE_BODY_BYTES));
    let length = 0;
    let pieces = 0;
    let counted = 0;
    const stop = () => void raw.off('data', take).off('end', end).off('close', cut);
    const refuse = (error: ServiceError) => {
      stop();
      takeForBody(-counted, isStranger);
      reject(error);
    };
    const take = (piece: Buffer) => {
      const needed = length + piece.length;
      if (needed > MAX_BODY_BYTES) return refuse(bodyTooLarge());
      pieces += 1;
      if (pieces > MAX_PIECES) return refuse(new ServiceError('VALIDATION_ERROR', `The body has more than ${MAX_PIECES} pieces.`));
      if (needed > bytes.length) {
        const larger = Math.min(announced, Math.max(needed, 2 * bytes.length));
        if (!takeForBody(larger - bytes.length, isStranger)) return refuse(noMemory(raw));
        counted += larger - bytes.length;
        bytes = Buffer.concat([bytes.subarray(0, length)], larger);
      }
      piece.copy(bytes, length);
      length = needed;
    };
    const end = () => {
      stop();
      resolve({ bytes: bytes.subarray(0, length), counted });
    };
    const cut = () => refuse(new ServiceError('VALIDATION_ERROR', 'The body did not arrive.'));
    if (raw.destroyed) return cut();
    raw.on('data', take).on('end', end).on('close', cut);
  });
