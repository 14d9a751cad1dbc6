/**
 * The HTTP transport of the gateway adapters. It sends one request and reads its answer. It also reports whether any byte of the request may have
 * left this process.
 *
 * TLS is 1.2 or newer, and certificates are always checked. The transport follows no redirect and uses no proxy of the environment.
 */
import { Agent as HttpAgent, type IncomingHttpHeaders, type IncomingMessage, request as httpRequest } from 'node:http';
import { Agent as HttpsAgent, request as httpsRequest } from 'node:https';
import type { Socket } from 'node:net';
import { urlToHttpOptions } from 'node:url';
import type { Clock } from '#kernel';

/** The longest answer of a call that moves money. */
export const MONEY_ANSWER_BYTES = 64 * 1024;
/** The longest answer of a call that lists transactions. */
export const LIST_ANSWER_BYTES = 4 * 1024 * 1024;

/** A connection, with its TLS handshake, takes at most this long. */
const CONNECT_MS = 10_000;
/** Longer than any call that moves money may take. */
const SILENCE_MS = 30_000;
/** Processors close idle connections after a minute or more. We close them earlier: if one closes during a request, the outcome is unknown. */
const IDLE_CONNECTION_MS = 15_000;

/** How a request ended. `not_sent`: no byte of it left this process, so it had no effect. */
export type Exchange =
  | { readonly kind: 'answer'; readonly status: number; readonly headers: IncomingHttpHeaders; readonly text: string }
  | { readonly kind: 'not_sent'; readonly raw: string }
  | { readonly kind: 'unknown'; readonly cause: 'timeout' | 'unreadable' | 'disconnected' | 'http_5xx'; readonly raw: string };

export interface TransportOptions {
  /** The URL of the processor, `http:` or `https:`. */
  readonly endpoint: string;
  readonly clock: Pick<Clock, 'now'>;
  readonly timeouts?: {
    /** Default 10 s. */
    readonly connectMs?: number;
    /** A call ends if no data arrives for this long, even without an abort. Default 30 s. */
    readonly silenceMs?: number;
  };
  readonly maxConnections: number;
}

export interface TransportRequest {
  readonly method: 'GET' | 'POST' | 'DELETE';
  /** Path and query, from the root of the host. */
  readonly path: string;
  /** `content-length` is added. `content-type` of a body is `application/json` unless it is given. */
  readonly headers: Readonly<Record<string, string>>;
  readonly body: string | null;
  /** A longer answer is not read to its end. */
  readonly maxAnswerBytes: number;
  /** No byte is sent later, by business time in milliseconds since the epoch. NaN: no byte is sent. Default: no limit. */
  readonly notAfterMs?: number;
  readonly signal: AbortSignal;
}

export interface Transport {
  /** Sends one request and reads its answer. Never sends the request again, and never rejects. */
  exchange(request: TransportRequest): Promise<Exchange>;
  /** Closes all connections. */
  close(): void;
}

/** True if the connection can take the request's first byte. */
const isReady = (socket: Socket & { readonly secureConnecting?: boolean }): boolean => !socket.connecting && socket.secureConnecting !== true;

export const createTransport = ({
  endpoint,
  clock,
  timeouts: { connectMs = CONNECT_MS, silenceMs = SILENCE_MS } = {},
  maxConnections,
}: TransportOptions): Transport => {
  const { protocol, hostname, port } = urlToHttpOptions(new URL(endpoint));
  const isTls = protocol === 'https:';
  const pool = {
    keepAlive: true,
    maxSockets: maxConnections,
    maxFreeSockets: maxConnections,
    timeout: IDLE_CONNECTION_MS,
    scheduling: 'lifo',
  } as const;
  const agent = isTls ? new HttpsAgent({ ...pool, minVersion: 'TLSv1.2', rejectUnauthorized: true }) : new HttpAgent(pool);
  const open = isTls ? httpsRequest : httpRequest;

  const exchange = ({ method, path, headers, body, maxAnswerBytes, notAfterMs, signal }: TransportRequest): Promise<Exchange> =>
    new Promise((resolve) => {
      let sent = false;
      let status: number | null = null;
      let settled = false;
      let connecting: NodeJS.Timeout | undefined;
      const settle = (outcome: Exchange) => {
        if (settled) return;
        settled = true;
        clearTimeout(connecting);
        signal.removeEventListener('abort', onAbort);
        resolve(outcome);
      };
      /** Ends the call without a complete answer. */
      const lost = (cause: 'timeout' | 'unreadable' | 'disconnected', raw: string) => {
        if (!sent) return settle({ kind: 'not_sent', raw });
        settle({ kind: 'unknown', cause: status !== null && status >= 500 ? 'http_5xx' : cause, raw });
      };
      const onAbort = () => {
        lost('timeout', sent ? 'the deadline passed before an answer' : 'the deadline passed before a connection');
        outgoing?.destroy();
      };
      const onError = (error: NodeJS.ErrnoException) =>
        lost(error.code?.startsWith('HPE_') ? 'unreadable' : 'disconnected', error.code ?? 'connection failed');

      const read = (answer: IncomingMessage) => {
        const chunks: Buffer[] = [];
        let size = 0;
        status = answer.statusCode ?? 0;
        answer.on('data', (chunk: Buffer) => {
          size += chunk.length;
          chunks.push(chunk);
          if (size <= maxAnswerBytes) return;
          lost('unreadable', `an answer of more than ${maxAnswerBytes} bytes`);
          answer.destroy();
        });
        answer.on('end', () =>
          settle({ kind: 'answer', status: status ?? 0, headers: answer.headers, text: Buffer.concat(chunks).toString('utf8') }),
        );
        answer.on('error', onError);
        answer.on('close', () => lost('disconnected', 'the connection ended within the answer'));
      };

      /** Sends the request. Nothing of it was sent before, since its first byte goes out with its end. */
      const send = () => {
        clearTimeout(connecting);
        if (settled) return;
        if (notAfterMs !== undefined && !(clock.now() <= notAfterMs)) {
          settle({ kind: 'not_sent', raw: 'too late to send the call' });
          return void outgoing?.destroy();
        }
        sent = true;
        outgoing!.end(body ?? undefined);
      };

      let outgoing: ReturnType<typeof httpRequest> | null = null;
      if (signal.aborted) return settle({ kind: 'not_sent', raw: 'the deadline passed before the call' });
      signal.addEventListener('abort', onAbort);
      try {
        outgoing = open({
          agent,
          protocol,
          hostname,
          port,
          path,
          method,
          headers: {
            ...(body !== null && { 'content-type': 'application/json', 'content-length': String(Buffer.byteLength(body)) }),
            ...headers,
          },
        });
      } catch (error) {
        return settle({ kind: 'not_sent', raw: (error as NodeJS.ErrnoException).code ?? 'the request cannot be made' });
      }
      outgoing.on('socket', (socket) => {
        if (isReady(socket)) return send();
        socket.once(isTls ? 'secureConnect' : 'connect', send);
        connecting = setTimeout(() => {
          lost('timeout', 'no connection in time');
          outgoing?.destroy();
        }, connectMs);
      });
      // Some callers set no deadline, for example to read batches. A silent server must not hold them for ever.
      outgoing.setTimeout(silenceMs, () => onAbort());
      outgoing.on('response', read);
      outgoing.on('error', onError);
      outgoing.on('close', () => lost('disconnected', 'the connection ended before an answer'));
    });

  return { exchange, close: () => agent.destroy() };
};
