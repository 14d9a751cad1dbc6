/**
 * A partner's webhook receiver, written only from the specification (section "Events"), without our code. It listens with real TLS on loopback. The
 * reason of each refusal goes to `refusals`.
 */
import { createHmac, timingSafeEqual } from 'node:crypto';
import type { IncomingMessage, ServerResponse } from 'node:http';
import { createServer, type Server } from 'node:https';
import type { AddressInfo, Socket } from 'node:net';
import { generate } from 'selfsigned';

export interface Certificate {
  readonly key: string;
  readonly cert: string;
}

const YEAR_MS = 365 * 86_400_000;

/** Makes a certificate authority, which can issue certificates. */
export const createAuthority = async (): Promise<{
  readonly cert: string;
  issue(name: string, options?: { expired?: boolean }): Promise<Certificate>;
}> => {
  const authority = await generate([{ name: 'commonName', value: 'Spec Authority' }], {
    keyType: 'ec',
    algorithm: 'sha256',
    extensions: [
      { name: 'basicConstraints', cA: true, critical: true },
      { name: 'keyUsage', keyCertSign: true, cRLSign: true, critical: true },
    ],
  });
  return {
    cert: authority.cert,
    issue: async (name, { expired = false } = {}) => {
      const { private: key, cert } = await generate([{ name: 'commonName', value: name }], {
        keyType: 'ec',
        algorithm: 'sha256',
        ca: { key: authority.private, cert: authority.cert },
        ...(expired && { notBeforeDate: new Date(Date.now() - 2 * YEAR_MS), notAfterDate: new Date(Date.now() - YEAR_MS) }),
        extensions: [
          { name: 'basicConstraints', cA: false },
          { name: 'extKeyUsage', serverAuth: true },
          { name: 'subjectAltName', altNames: [{ type: 2, value: name }] },
        ],
      });
      return { key, cert };
    },
  };
};

/** An event as the specification describes it. */
export interface ReceivedEvent {
  readonly id: string;
  readonly type: string;
  readonly createdAt: string;
  readonly data: Readonly<Record<string, unknown>>;
}

export interface Delivery {
  readonly event: ReceivedEvent;
  readonly headers: IncomingMessage['headers'];
  readonly body: Buffer;
  readonly receivedAt: number;
  readonly signedAt: number;
  readonly path: string;
}

const TOLERANCE_SECONDS = 300;

/** Checks a request by the specification. Throws if a rule is broken. */
export const verify = (
  headers: IncomingMessage['headers'],
  body: Buffer,
  secrets: readonly string[],
  nowMs = Date.now(),
): { event: ReceivedEvent; signedAt: number } => {
  const header = headers['service-signature'];
  const match = typeof header === 'string' ? /^t=(\d+),v1=([0-9a-f]{64})$/.exec(header) : null;
  if (!match) throw new Error(`no signature: ${String(header)}`);
  const [, t, v1] = match;
  const right = secrets.some((secret) =>
    timingSafeEqual(
      createHmac('sha256', secret)
        .update(Buffer.concat([Buffer.from(`${t}.`), body]))
        .digest(),
      Buffer.from(v1!, 'hex'),
    ),
  );
  if (!right) throw new Error('wrong signature');
  if (Math.abs(nowMs / 1000 - Number(t)) > TOLERANCE_SECONDS) throw new Error('too old');
  const event = JSON.parse(body.toString('utf8')) as ReceivedEvent;
  if (!event.id.startsWith('evt_')) throw new Error('no event id');
  if (headers['service-event-id'] !== event.id || headers['service-event-type'] !== event.type) throw new Error('headers and body differ');
  if (!/^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$/.test(event.createdAt)) throw new Error('createdAt is no date-time');
  return { event, signedAt: Number(t) };
};

/** The answer to a request. Default: 200 with an empty body. `number` counts requests from 1. */
export type Behaviour = (request: IncomingMessage, response: ServerResponse, number: number) => void;

export interface Receiver {
  readonly port: number;
  /** Every accepted request in order, with duplicates. */
  readonly deliveries: readonly Delivery[];
  /** The reasons of all refused requests. */
  readonly refusals: readonly string[];
  /** Requests so far, accepted or refused. */
  readonly requests: number;
  /** TLS connections so far. */
  readonly connections: number;
  /** The ids of the events in order of first arrival, without duplicates. */
  readonly ids: readonly string[];
  accept(secret: string): void;
  behave(behaviour: Behaviour | null): void;
  close(): Promise<void>;
}

const accepting: Behaviour = (_request, response) => void response.writeHead(200).end();
export const status =
  (code: number, headers: Record<string, string> = {}): Behaviour =>
  (_request, response) =>
    void response.writeHead(code, headers).end();

export const startReceiver = async (certificate: Certificate, port = 0): Promise<Receiver> => {
  const deliveries: Delivery[] = [];
  const refusals: string[] = [];
  const secrets: string[] = [];
  const sockets = new Set<Socket>();
  const seen = { requests: 0, connections: 0 };
  let behaviour = accepting;
  const server: Server = createServer({ ...certificate, keepAliveTimeout: 30_000 }, (request, response) => {
    seen.requests += 1;
    const number = seen.requests;
    const chunks: Buffer[] = [];
    request.on('data', (chunk: Buffer) => chunks.push(chunk));
    request.on('end', () => {
      const body = Buffer.concat(chunks);
      try {
        const { event, signedAt } = verify(request.headers, body, secrets);
        deliveries.push({ event, headers: request.headers, body, receivedAt: Date.now(), signedAt, path: request.url! });
      } catch (error) {
        refusals.push((error as Error).message);
        response.writeHead(400).end();
        return;
      }
      behaviour(request, response, number);
    });
    request.on('error', () => undefined);
  });
  server.on('secureConnection', () => (seen.connections += 1));
  server.on('connection', (socket: Socket) => {
    sockets.add(socket);
    socket.on('close', () => sockets.delete(socket)).on('error', () => undefined);
  });
  server.on('tlsClientError', () => undefined);
  await new Promise<void>((resolve) => server.listen(port, '127.0.0.1', resolve));
  return {
    port: (server.address() as AddressInfo).port,
    deliveries,
    refusals,
    get requests() {
      return seen.requests;
    },
    get connections() {
      return seen.connections;
    },
    get ids() {
      return [...new Set(deliveries.map(({ event }) => event.id))];
    },
    accept: (secret) => void secrets.push(secret),
    behave: (next) => (behaviour = next ?? accepting),
    close: () =>
      new Promise((resolve) => {
        for (const socket of sockets) socket.destroy();
        server.close(() => resolve());
      }),
  };
};
