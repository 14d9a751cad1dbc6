/** A server that accepts every connection and never answers. */
import { createServer, type Socket } from 'node:net';

export interface SilentServer {
  readonly port: number;
  /** Connections so far. */
  readonly accepted: () => number;
  close(): Promise<void>;
}

export const silentServer = async (port = 0): Promise<SilentServer> => {
  const sockets = new Set<Socket>();
  let accepted = 0;
  const server = createServer((socket) => {
    accepted += 1;
    sockets.add(socket);
    socket.on('error', () => undefined).resume();
    socket.on('close', () => sockets.delete(socket));
  });
  await new Promise<void>((listening, fail) => server.once('error', fail).listen(port, '127.0.0.1', listening));
  return {
    port: (server.address() as { port: number }).port,
    accepted: () => accepted,
    close: async () => {
      for (const socket of sockets) socket.destroy();
      await new Promise((closed) => server.close(closed));
    },
  };
};
