/** How an HTTP listener ends: every request in flight is completed, and no connection closes while its client writes to it. */
import type { Server } from 'node:http';
import { Server as TcpServer } from 'node:net';
import type { NestFastifyApplication } from '@nestjs/platform-fastify';
import type { FastifyInstance } from 'fastify';
import type { Clock } from '#kernel';

const GRACE_POLL_MS = 25;
const CLOSE_IDLE_EVERY_MS = 250;

/**
 * Closes a listener: it stops accepting and finishes the requests in flight. The next answer on an open connection asks its client to close. Clients
 * have `graceMs` for that. They are asked only after accepting has stopped, since they would connect again at once.
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
    // It runs right after the loop has accepted all waiting connections. It uses the plain server's method, since the method of the HTTP server would
    // also close idle connections.
    await new Promise((next) => setImmediate(next));
    leaving = true;
    const closed = listening ? new Promise<void>((done) => TcpServer.prototype.close.call(server, () => done())) : Promise.resolve();
    for (let waited = 0; waited < graceMs && (await connectionsOf(server)) > 0; waited += GRACE_POLL_MS) await clock.sleep(GRACE_POLL_MS);
    // Such a connection sent its headers before the stop began. It is idle now, and would keep the server open for a minute.
    const closeIdle = setInterval(() => server.closeIdleConnections(), CLOSE_IDLE_EVERY_MS);
    const closing = app.close().catch((error: NodeJS.ErrnoException) => {
      if (error.code !== 'ERR_SERVER_NOT_RUNNING') throw error;
    });
    await Promise.all([closing, closed]).finally(() => clearInterval(closeIdle));
  };
};

const connectionsOf = (server: Server): Promise<number> => new Promise((tell) => server.getConnections((error, count) => tell(error ? 0 : count)));
