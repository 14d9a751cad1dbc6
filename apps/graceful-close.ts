/** Closes an HTTP listener. Every request in flight is completed, and no connection is closed while its client writes to it. */
import type { Server } from 'node:http';
import { Server as TcpServer } from 'node:net';
import type { NestFastifyApplication } from '@nestjs/platform-fastify';
import type { FastifyInstance } from 'fastify';
import type { Clock } from '#kernel';

const GRACE_POLL_MS = 25;
const CLOSE_IDLE_EVERY_MS = 250;

/**
 * Returns the function that closes the listener. It stops accepting connections and finishes the requests in flight. The next answer on an open
 * connection asks its client to close it, and clients have `graceMs` to do so. They are asked only after accepting has stopped, since otherwise they
 * would connect again at once.
 */
export const gracefulClose = (fastify: FastifyInstance, clock: Clock): ((app: NestFastifyApplication, graceMs: number) => Promise<void>) => {
  let leaving = false;
  fastify.addHook('onSend', (_request, reply, payload, done) => {
    if (leaving) void reply.header('connection', 'close');
    done(null, payload);
  });
  return async (app, graceMs) => {
    const server = app.getHttpServer();
    const listening = server.listening;
    // `setImmediate` calls back right after the event loop has accepted all waiting connections. Then the `close` of the plain TCP server is called,
    // since the `close` of the HTTP server would also close idle connections.
    await new Promise((next) => setImmediate(next));
    leaving = true;
    const closed = listening ? new Promise<void>((done) => TcpServer.prototype.close.call(server, () => done())) : Promise.resolve();
    for (let waited = 0; waited < graceMs && (await connectionsOf(server)) > 0; waited += GRACE_POLL_MS) await clock.sleep(GRACE_POLL_MS);
    // If an answer's headers were sent before the stop, they did not ask the client to close. When that answer is complete, its connection is idle
    // and would keep the server open for a minute.
    const closeIdle = setInterval(() => server.closeIdleConnections(), CLOSE_IDLE_EVERY_MS);
    const closing = app.close().catch((error: NodeJS.ErrnoException) => {
      if (error.code !== 'ERR_SERVER_NOT_RUNNING') throw error;
    });
    await Promise.all([closing, closed]).finally(() => clearInterval(closeIdle));
  };
};

const connectionsOf = (server: Server): Promise<number> => new Promise((tell) => server.getConnections((error, count) => tell(error ? 0 : count)));
