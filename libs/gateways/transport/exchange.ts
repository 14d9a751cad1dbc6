/**
 * The HTTP transport of the gateway adapters. It sends one request and reads the answer. It also reports whether any byte of the request may have
 * left this process.
 */
import { type IncomingMessage, request as httpRequest, type RequestOptions } from 'node:http';

/** A longer answer is not read to its end. */
const MAX_ANSWER_BYTES = 64 * 1024;

/** How a request ended. `not_sent`: no byte of it left this process, so it had no effect. */
export type Exchange =
  | { readonly kind: 'answer'; readonly status: number; readonly text: string }
  | { readonly kind: 'not_sent'; readonly raw: string }
  | { readonly kind: 'unknown'; readonly cause: 'timeout' | 'unreadable' | 'disconnected' | 'http_5xx'; readonly raw: string };

/** Sends one request and reads its answer. Never sends the request again, and never rejects. */
export const exchange = (
  to: Pick<RequestOptions, 'agent' | 'protocol' | 'hostname' | 'port'>,
  path: string,
  method: string,
  headers: Record<string, string>,
  body: string | null,
  signal: AbortSignal,
  silenceMs: number,
): Promise<Exchange> =>
  new Promise((resolve) => {
    let sent = false;
    let status: number | null = null;
    let settled = false;
    const settle = (outcome: Exchange) => {
      if (settled) return;
      settled = true;
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
        if (size <= MAX_ANSWER_BYTES) return;
        lost('unreadable', `an answer of more than ${MAX_ANSWER_BYTES} bytes`);
        answer.destroy();
      });
      answer.on('end', () => settle({ kind: 'answer', status: status ?? 0, text: Buffer.concat(chunks).toString('utf8') }));
      answer.on('error', onError);
      answer.on('close', () => lost('disconnected', 'the connection ended within the answer'));
    };

    let outgoing: ReturnType<typeof httpRequest> | null = null;
    if (signal.aborted) return settle({ kind: 'not_sent', raw: 'the deadline passed before the call' });
    signal.addEventListener('abort', onAbort);
    try {
      outgoing = httpRequest({
        ...to,
        path,
        method,
        headers: { ...headers, ...(body !== null && { 'content-type': 'application/json', 'content-length': String(Buffer.byteLength(body)) }) },
      });
    } catch (error) {
      return settle({ kind: 'not_sent', raw: (error as NodeJS.ErrnoException).code ?? 'the request cannot be made' });
    }
    outgoing.on('socket', (socket) => {
      // A new socket sends bytes only after its event `connect`. A kept-alive socket is connected already, so bytes may have left.
      if (!socket.connecting) sent = true;
      else socket.once('connect', () => (sent = true));
    });
    // Some callers set no deadline, for example to read batches. A silent server must not hold them for ever.
    outgoing.setTimeout(silenceMs, () => onAbort());
    outgoing.on('response', read);
    outgoing.on('error', onError);
    outgoing.on('close', () => lost('disconnected', 'the connection ended before an answer'));
    outgoing.end(body ?? undefined);
  });
