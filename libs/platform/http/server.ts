/**
 * The HTTP server under Nest: Fastify with the limits of docs/contract.md#the-http-edge. Bodies stay bytes, so that a bad body is answered only after
 * authentication. Every refusal of the transport is answered in the envelope (C65).
 */
import { createServer, type IncomingMessage, type Server, type ServerResponse, STATUS_CODES } from 'node:http';
import type { Socket } from 'node:net';
import { FastifyAdapter } from '@nestjs/platform-fastify';
import { type FastifyInstance, type FastifyReply, type FastifyRequest } from 'fastify';
import { ServiceError } from '#kernel';
import { holdsCardNumber } from '../card-text.js';
import { uuidV7 } from '../ids.js';
import type { Logger } from '../logging.js';
import { bodyTooLarge, hasBody } from './body.js';
import { connectionOf, Connections } from './connections.js';
import { type Answer, errorAnswer } from './envelope.js';
import { answerFor, errorCodeOf, JSON_TYPE, sendAnswer } from './errors.filter.js';
import { MAX_BODY_BYTES } from './strict-json.js';

export const MAX_HEADER_BYTES = 8 * 1024;
const MAX_HEADERS = 64;
const HEADERS_TIMEOUT_MS = 10_000;
const REQUEST_TIMEOUT_MS = 30_000;
const CHECK_TIMEOUTS_EVERY_MS = 1_000;
/**
 * How long a connection may be silent within a request. Every answer takes less time, so only a client that does not send or read reaches the limit.
 */
const SILENT_MS = 120_000;
const KEEP_ALIVE_MS = 65_000;
const MAX_CONNECTIONS = 4_096;
const MAX_REQUESTS_PER_SOCKET = 10_000;
/** Seconds after which a client with too many connections may try again. */
const CONNECTIONS_RETRY_SECONDS = 1;
/** `type/subtype`, with or without parameters (RFC 9110, 8.3.1). */
const MEDIA_TYPE = /^[\w!#$%&'*+.^`|~-]+\/[\w!#$%&'*+.^`|~-]+\s*(;|$)/;
/** The `X-Request-Id` of a caller is used if it has this form. */
const REQUEST_ID = /^[\w.:-]{1,64}$/;

export interface Answered {
  readonly method: string;
  readonly route: string;
  readonly status: number;
  readonly seconds: number;
  /** The code of an error envelope. null: the envelope has no code. undefined: the answer is no error envelope. */
  readonly errorCode: string | null | undefined;
}

export interface ServerOptions {
  readonly log: Logger;
  readonly now: () => number;
  /** Called once per answered request, for metrics. */
  readonly onAnswer?: (request: Answered) => void;
  /** Headers of the answer to a URL that cannot be decoded. A browser may have opened it, so they are those of a page. */
  readonly badUrlHeaders?: Readonly<Record<string, string>>;
  /** Connections from one address. null: no limit. */
  readonly connectionsPerAddress: number | null;
  /** Shorter limits for tests of slow clients. */
  readonly timeouts?: { readonly headersMs?: number; readonly requestMs?: number; readonly silentMs?: number };
}

export const createHttpAdapter = (options: ServerOptions): FastifyAdapter => {
  const { log, now, badUrlHeaders = {} } = options;
  const adapter = new FastifyAdapter({
    serverFactory: (handler: Handler) => createLimitedServer(handler, options),
    genReqId: (request: IncomingMessage) => {
      const given = request.headers['x-request-id'];
      // The id is logged, so it must not hold a card number.
      return typeof given === 'string' && REQUEST_ID.test(given) && !holdsCardNumber(given) ? given : uuidV7(now());
    },
    requestIdHeader: false,
    logger: false,
    return503OnClosing: false,
    clientErrorHandler: refuseClient,
    // Fastify calls this for its own errors, such as a path that cannot be decoded.
    frameworkErrors: (error: unknown, request: FastifyRequest, reply: FastifyReply) => {
      addHeaders(request, reply);
      void reply.headers(badUrlHeaders);
      sendAnswer(reply, answerFor(error, log, String(request.id)));
    },
    // A parameter may be as long as a request line. So a long unknown id is answered like any unknown id.
    routerOptions: { ignoreTrailingSlash: false, maxParamLength: MAX_HEADER_BYTES },
  });
  const fastify = adapter.getInstance<FastifyInstance>();
  fastify.removeAllContentTypeParsers();
  // Fastify leaves the body unread. Guards receive it after they have checked credentials.
  fastify.addContentTypeParser('*', (_request, _body, done) => done(null));
  addHeadersAndMetrics(fastify, options);
  return adapter;
};

type Handler = (request: IncomingMessage, response: ServerResponse) => void;

const createLimitedServer = (handler: Handler, { timeouts = {}, connectionsPerAddress }: ServerOptions): Server => {
  const connections = new Connections(connectionsPerAddress);
  const handle = (request: IncomingMessage, response: ServerResponse) => {
    const connection = connectionOf(request);
    connection.began(request, response);
    const refused = refusalOf(request);
    if (!refused) return handler(request, response);
    const { status, body } = errorAnswer(refused);
    connection.readNoMore();
    response
      .writeHead(status, { 'content-type': JSON_TYPE, 'content-length': Buffer.byteLength(body), 'cache-control': 'no-store', connection: 'close' })
      .end(body);
  };
  const server = createServer(
    {
      maxHeaderSize: MAX_HEADER_BYTES,
      headersTimeout: timeouts.headersMs ?? HEADERS_TIMEOUT_MS,
      requestTimeout: timeouts.requestMs ?? REQUEST_TIMEOUT_MS,
      connectionsCheckingInterval: CHECK_TIMEOUTS_EVERY_MS,
      keepAliveTimeout: KEEP_ALIVE_MS,
      keepAlive: true,
      noDelay: true,
      // {@link refusalOf} refuses a missing Host header.
      requireHostHeader: false,
    },
    handle,
  );
  // 0: no limit. Beyond a limit, Node would drop headers without an error, perhaps the idempotency key.
  server.maxHeadersCount = 0;
  server.setTimeout(timeouts.silentMs ?? SILENT_MS);
  server.maxConnections = MAX_CONNECTIONS;
  server.maxRequestsPerSocket = MAX_REQUESTS_PER_SOCKET;
  // {@link Connections} begins to read. `createServer` of HTTP does not take this option.
  Object.assign(server, { pauseOnConnect: true });
  server.on('connection', (socket: Socket) => connections.add(socket, TOO_MANY_CONNECTIONS));
  // Without this listener, Node would ask for the body before the credentials are checked. The body guard asks for it.
  server.on('checkContinue', handle);
  server.on('checkExpectation', handle);
  return server;
};

const refusalOf = ({ rawHeaders, headers, headersDistinct, httpVersion }: IncomingMessage): ServiceError | null => {
  // Node's parser takes any version. 0.9 has no headers, and a proxy may frame 2.0 in another way.
  if (httpVersion !== '1.1' && httpVersion !== '1.0')
    return new ServiceError('VALIDATION_ERROR', 'The version of HTTP must be 1.0 or 1.1.', {}, { status: 505 });
  if (rawHeaders.length > 2 * MAX_HEADERS)
    return new ServiceError('VALIDATION_ERROR', `There are more than ${MAX_HEADERS} headers.`, {}, { status: 431 });
  if (headers.host === undefined && httpVersion === '1.1') return new ServiceError('VALIDATION_ERROR', 'The request needs a Host header.');
  // A proxy may take the first of two, and this process the last (RFC 9112, 3.2).
  if ((headersDistinct.host?.length ?? 0) > 1) return new ServiceError('VALIDATION_ERROR', 'The request has more than one Host header.');
  // HTTP/1.0 knows no chunks, so the end of such a body is not certain (RFC 9112, 6.1).
  if (headers['transfer-encoding'] !== undefined && httpVersion === '1.0')
    return new ServiceError('VALIDATION_ERROR', 'HTTP/1.0 has no Transfer-Encoding.');
  // Node itself refuses a body whose last coding is not `chunked`. It takes an empty coding for none, and ignores codings before `chunked`. A proxy may
  // read them otherwise (RFC 9112, 6.1).
  if (/^\s*$|,\s*(?:chunked\s*)?$/i.test(headers['transfer-encoding'] ?? 'chunked'))
    return new ServiceError('VALIDATION_ERROR', 'The only Transfer-Encoding that is understood is chunked.');
  if (headers.expect !== undefined && headers.expect.toLowerCase() !== '100-continue' && httpVersion === '1.1')
    return new ServiceError('VALIDATION_ERROR', 'Nothing but 100-continue can be expected.', {}, { status: 417 });
  return null;
};

/** The bytes of an answer that no request gets from Node, for example to bytes that are no HTTP. */
const rawAnswer = ({ status, body, retryAfterSeconds }: Answer): string => {
  const retryAfter = retryAfterSeconds === undefined ? '' : `retry-after: ${retryAfterSeconds}\r\n`;
  return `HTTP/1.1 ${status} ${STATUS_CODES[status]}\r\ncontent-type: ${JSON_TYPE}\r\ncontent-length: ${Buffer.byteLength(body)}\r\n${retryAfter}cache-control: no-store\r\nconnection: close\r\n\r\n${body}`;
};

const TOO_MANY_CONNECTIONS = rawAnswer(
  errorAnswer(
    new ServiceError('RATE_LIMITED', 'There are too many connections from this address.', {}, { retryAfterSeconds: CONNECTIONS_RETRY_SECONDS }),
  ),
);

/** Answers an invalid HTTP request: writes the envelope directly to the socket. */
const refuseClient = (error: NodeJS.ErrnoException, socket: Socket): void => {
  if (error.code === 'ECONNRESET' || !socket.writable) {
    socket.destroy();
    return;
  }
  const [status, message] =
    error.code === 'HPE_HEADER_OVERFLOW'
      ? ([431, `The headers are larger than ${MAX_HEADER_BYTES} bytes.`] as const)
      : error.code === 'ERR_HTTP_REQUEST_TIMEOUT'
        ? ([408, 'The request took too long to arrive.'] as const)
        : ([400, 'The request is not valid HTTP.'] as const);
  connectionOf({ socket }).refuse(rawAnswer(errorAnswer(new ServiceError('VALIDATION_ERROR', message, {}, { status }))));
};

const addHeaders = (request: FastifyRequest, reply: FastifyReply): void => {
  void reply.header('x-request-id', String(request.id)).header('cache-control', 'no-store').header('x-content-type-options', 'nosniff');
};

const addHeadersAndMetrics = (fastify: FastifyInstance, { log, onAnswer }: ServerOptions): void => {
  fastify.addHook('onRequest', (request: FastifyRequest, reply: FastifyReply, done) => {
    // Fastify would refuse a malformed content type before authentication. The type that replaces it is refused after authentication.
    const type = request.headers['content-type'];
    if (type !== undefined && !MEDIA_TYPE.test(type)) request.headers['content-type'] = 'application/octet-stream';
    addHeaders(request, reply);
    done();
  });
  fastify.addHook('preParsing', (request: FastifyRequest, _reply, _payload, done) => {
    if (Number(request.headers['content-length'] ?? 0) > MAX_BODY_BYTES) return done(bodyTooLarge());
    done();
  });
  fastify.addHook('onSend', ({ raw }: FastifyRequest, reply: FastifyReply, payload, done) => {
    if (hasBody(raw) && !raw.complete) {
      // The answer comes before the whole body. It is the last one, so the rest need not be read.
      void reply.header('connection', 'close');
      connectionOf(raw).readNoMore();
    }
    done(null, payload);
  });
  fastify.addHook('onResponse', (request: FastifyRequest, reply: FastifyReply, done) => {
    const route = request.routeOptions.url ?? 'unmatched';
    const { caller } = request as FastifyRequest & { caller?: { accountId: string } };
    log.debug(
      {
        requestId: String(request.id),
        accountId: caller?.accountId,
        method: request.method,
        route,
        status: reply.statusCode,
        ms: Math.round(reply.elapsedTime),
      },
      'answered',
    );
    onAnswer?.({ method: request.method, route, status: reply.statusCode, seconds: reply.elapsedTime / 1000, errorCode: errorCodeOf(reply) });
    done();
  });
};
