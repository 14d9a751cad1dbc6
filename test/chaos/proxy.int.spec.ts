/**
 * Each toxic of the proxy has its effect on a connection. After healing, new connections are unharmed. Times have only lower limits, for busy
 * machines.
 */
import { afterEach, beforeEach, expect, test } from '@jest/globals';
import { connect, createServer, type Server, type Socket } from 'node:net';
import { Random } from '../../apps/demo/city.js';
import { eventually } from '../support/eventually.js';
import { type Proxy, startProxy } from './proxy.js';

let server: Server;
let proxy: Proxy;
const atServer: Socket[] = [];
const atClient: Client[] = [];

beforeEach(async () => {
  server = createServer({ allowHalfOpen: true }, (socket) => {
    atServer.push(socket);
    // The server echoes all data. It closes its side after the client has closed its own.
    socket.on('error', () => undefined).on('end', () => socket.end());
    socket.pipe(socket, { end: false });
  });
  await new Promise<void>((listening) => server.listen(0, '127.0.0.1', listening));
  proxy = await startProxy((server.address() as { port: number }).port, new Random(7));
});

afterEach(async () => {
  for (const { socket } of atClient.splice(0)) socket.destroy();
  await proxy.close();
  for (const socket of atServer.splice(0)) socket.destroy();
  await new Promise((closed) => server.close(closed));
});

interface Client {
  readonly socket: Socket;
  received: string;
  pieces: number;
  ended: boolean;
  closed: string | null;
}

const open = async (): Promise<Client> => {
  const socket = connect(proxy.port, '127.0.0.1');
  const client: Client = { socket, received: '', pieces: 0, ended: false, closed: null };
  socket.setEncoding('utf8').on('data', (text: string) => {
    client.received += text;
    client.pieces += 1;
  });
  socket.once('end', () => (client.ended = true));
  socket.once('error', (error: NodeJS.ErrnoException) => (client.closed = error.code!)).once('close', () => (client.closed ??= 'closed'));
  atClient.push(client);
  await new Promise<void>((opened) => socket.once('connect', opened).once('error', () => opened()));
  return client;
};

const echo = async (client: Client, text: string): Promise<number> => {
  const begun = performance.now();
  const wanted = client.received + text;
  client.socket.write(text);
  await eventually(() => client.received === wanted, { everyMs: 1 });
  return performance.now() - begun;
};

test('without a toxic everything passes, both ways, and ends as it was ended', async () => {
  const client = await open();
  await echo(client, 'x'.repeat(300_000));
  client.socket.end();
  await eventually(() => client.ended && client.closed === 'closed');
  expect(proxy.harmed).toBe(0);
});

test('latency holds every piece back, in order', async () => {
  const client = await open();
  proxy.poison({ kind: 'latency', latencyMs: 60, jitterMs: 20 }, { direction: 'downstream' });
  expect(await echo(client, 'one')).toBeGreaterThanOrEqual(39);
  for (const text of ['a', 'b', 'c', 'd']) client.socket.write(text);
  await eventually(() => client.received === 'oneabcd');
  expect(proxy.harmed).toBe(1);
});

test('bandwidth lets so many bytes a second through', async () => {
  const client = await open();
  proxy.poison({ kind: 'bandwidth', bytesPerSecond: 20_000 }, { direction: 'upstream' });
  expect(await echo(client, 'x'.repeat(5_000))).toBeGreaterThanOrEqual(190);
});

test('a slicer cuts one write into many pieces, and loses none', async () => {
  const client = await open();
  await echo(client, 'x'.repeat(200));
  const whole = client.pieces;
  proxy.poison({ kind: 'slicer', averageBytes: 8, delayMs: 2 }, { direction: 'downstream' });
  await echo(client, Array.from({ length: 100 }, (_, n) => n % 10).join(''));
  expect(client.pieces - whole).toBeGreaterThan(5);
});

test('a black hole takes everything and says nothing; healed, the connection with the hole is ended, and the next one is whole', async () => {
  const client = await open();
  await echo(client, 'before');
  proxy.poison({ kind: 'timeout' });
  client.socket.write('lost');
  await eventually(() => proxy.harmed === 1);
  const other = await open();
  other.socket.end('lost too');
  await eventually(() => proxy.harmed === 2);
  expect([client.received, client.closed, other.received, other.ended]).toEqual(['before', null, '', false]);
  proxy.heal();
  await eventually(() => client.closed !== null && other.closed !== null);
  await echo(await open(), 'after');
});

test('a peer that resets does so to a connection that stands', async () => {
  const client = await open();
  await echo(client, 'before');
  proxy.poison({ kind: 'reset_peer', afterMs: 30 });
  await eventually(() => client.closed === 'ECONNRESET');
});

test('a slow close arrives late, and the other half of the connection goes on meanwhile', async () => {
  const client = await open();
  await echo(client, 'before');
  proxy.poison({ kind: 'slow_close', delayMs: 100 }, { direction: 'upstream' });
  const begun = performance.now();
  client.socket.end();
  atServer[0]!.write('still here');
  await eventually(() => client.received === 'beforestill here', { everyMs: 1 });
  await eventually(() => client.ended, { everyMs: 1 });
  expect(performance.now() - begun).toBeGreaterThanOrEqual(99);
});

test('limited data ends the connection behind so many bytes', async () => {
  const client = await open();
  proxy.poison({ kind: 'limit_data', bytes: 10 }, { direction: 'downstream' });
  client.socket.write('x'.repeat(50));
  await eventually(() => client.closed !== null);
  expect(client.received).toBe('x'.repeat(10));
});

test('down: connections break, new ones are refused; healed, they are taken again', async () => {
  const client = await open();
  await echo(client, 'before');
  proxy.poison({ kind: 'down' });
  await eventually(() => client.closed === 'ECONNRESET');
  const refused = await open();
  await eventually(() => refused.closed === 'ECONNRESET');
  expect(proxy.harmed).toBe(2);
  proxy.heal();
  await echo(await open(), 'after');
});

test('a share of the connections is harmed, the others are not', async () => {
  proxy.poison({ kind: 'down' }, { share: 0.5 });
  const clients: Client[] = [];
  for (let n = 0; n < 40; n++) clients.push(await open());
  for (const client of clients) client.socket.write('alive');
  await eventually(() => clients.every(({ closed, received }) => closed !== null || received === 'alive'));
  const refused = clients.filter(({ closed }) => closed !== null).length;
  expect([refused > 5, refused < 35]).toEqual([true, true]);
});
