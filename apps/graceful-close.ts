/** How an HTTP listener ends: nothing that is in flight breaks off, and nobody has a connection closed just as he writes to it. */
import type { Server } from 'node:http';
import { Server as TcpServer } from 'node:net';
import type { NestFastifyApplication } from '@nestjs/platform-fastify';
import type { FastifyInstance } from 'fastify';
import type { Clock } from '#kernel';

const GRACE_POLL_MS = 25;
const CLOSE_IDLE_EVERY_MS = 250;

/**
 * Closes a listener: it stops accepting and finishes the requests in flight. Clients with kept connections are asked to leave with their next answer.
 * They have `graceMs` to fetch it. They are asked only when nothing is accepted any more; else they would come right back.
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
    // Right after the loop has accepted what had come; and by the plain server's method, since the one of HTTP would close idle connections with it.
    await new Promise((next) => setImmediate(next));
    leaving = true;
    const closed = listening ? new Promise<void>((done) => TcpServer.prototype.close.call(server, () => done())) : Promise.resolve();
    for (let waited = 0; waited < graceMs && (await connectionsOf(server)) > 0; waited += GRACE_POLL_MS) await clock.sleep(GRACE_POLL_MS);
    // A connection whose answer had its headers before is idle afterwards, and would hold the server for a minute.
    const closeIdle = setInterval(() => server.closeIdleConnections(), CLOSE_IDLE_EVERY_MS);
    const closing = app.close().catch((error: NodeJS.ErrnoException) => {
      if (error.code !== 'ERR_SERVER_NOT_RUNNING') throw error;
    });
    await Promise.all([closing, closed]).finally(() => clearInterval(closeIdle));
  };
};

const connectionsOf = (server: Server): Promise<number> => new Promise((tell) => server.getConnections((error, count) => tell(error ? 0 : count)));
