/** Closes an HTTP listener. Requests in flight are completed. A request that its client does not finish cannot hold up the close. */
import { type Socket, Server as TcpServer } from 'node:net';
import type { NestFastifyApplication } from '@nestjs/platform-fastify';
import type { FastifyInstance } from 'fastify';
import type { Clock } from '#kernel';
import { connectionOf } from '#platform/http';

const GRACE_POLL_MS = 25;
const CLOSE_IDLE_EVERY_MS = 250;
/** The longest time to accept connections that wait. */
const ACCEPT_MS = 1_000;
/** In a longer turn of the event loop, a connection may come after the turn has accepted one. The close would reset it. */
const SHORT_TURN_MS = 1;
/** The longest time until requests that have come begin. */
const BEGIN_MS = 1_000;
/** After the grace, a client that has begun a request has this long to finish it. A request that is not whole has changed nothing. */
const WHOLE_REQUEST_MS = 10_000;

/**
 * Returns the function that closes the listener. The function accepts the connections that wait, and then no more. From its call on, each answer
 * asks its client to close the connection, and clients have `graceMs` to do so. Requests in flight are finished.
 */
export const gracefulClose = (fastify: FastifyInstance, clock: Clock): ((app: NestFastifyApplication, graceMs: number) => Promise<void>) => {
  let leaving = false;
  let accepted = 0;
  const sockets = new Set<Socket>();
  fastify.server.on('connection', (socket: Socket) => {
    accepted += 1;
    sockets.add(socket);
    socket.once('close', () => sockets.delete(socket));
  });
  fastify.addHook('onSend', (_request, reply, payload, done) => {
    if (leaving) void reply.header('connection', 'close');
    done(null, payload);
  });
  return async (app, graceMs) => {
    const server = app.getHttpServer();
    const listening = server.listening;
    leaving = true;
    // Accepts connections until a short turn of the event loop brings none, because a close resets those that wait. Each turn accepts one, and the
    // second `setImmediate` calls back after a whole turn. The plain TCP `close` is used, because the HTTP `close` would also close idle connections.
    const acceptUntil = performance.now() + ACCEPT_MS;
    for (let isQuiet = false; !isQuiet && performance.now() < acceptUntil;) {
      const [before, begun] = [accepted, performance.now()];
      await new Promise((next) => setImmediate(() => setImmediate(next)));
      isQuiet = accepted === before && performance.now() - begun < SHORT_TURN_MS;
    }
    const closed = listening ? new Promise<void>((done) => TcpServer.prototype.close.call(server, () => done())) : Promise.resolve();
    for (let waited = 0; waited < graceMs && sockets.size > 0; waited += GRACE_POLL_MS) await clock.sleep(GRACE_POLL_MS);
    // Node counts a connection as idle while its next request waits for a turn of the event loop.
    const somethingWaits = () => [...sockets].some((socket) => connectionOf({ socket }).holdsBytes);
    for (let waited = 0; waited < BEGIN_MS && somethingWaits(); waited += GRACE_POLL_MS) await clock.sleep(GRACE_POLL_MS);
    // An answer whose headers were sent before the stop did not ask its client to close. After this answer, its idle connection would keep the server
    // open for a minute. Node does not count a connection without a whole request as idle, and no longer checks its time limits.
    let waited = 0;
    const closeIdle = setInterval(() => {
      waited += CLOSE_IDLE_EVERY_MS;
      // Before `setImmediate` calls back, the event loop reads what has arrived.
      setImmediate(() => {
        server.closeIdleConnections();
        for (const socket of sockets) {
          const { holdsBytes, isAnswering } = connectionOf({ socket });
          if ((socket.bytesRead === 0 && !holdsBytes) || (waited >= WHOLE_REQUEST_MS && !isAnswering)) socket.destroy();
        }
      });
    }, CLOSE_IDLE_EVERY_MS);
    const closing = app.close().catch((error: NodeJS.ErrnoException) => {
      if (error.code !== 'ERR_SERVER_NOT_RUNNING') throw error;
    });
    await Promise.all([closing, closed]).finally(() => clearInterval(closeIdle));
  };
};
