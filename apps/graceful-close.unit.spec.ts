import { connect } from 'node:net';
import { expect, test } from '@jest/globals';
import { Module } from '@nestjs/common';
import { NestFactory } from '@nestjs/core';
import type { NestFastifyApplication } from '@nestjs/platform-fastify';
import type { FastifyInstance } from 'fastify';
import { systemClock } from '#kernel';
import { createLogger } from '#platform';
import { createHttpAdapter } from '#platform/http';
import { eventually } from '../test/support/eventually.js';
import { gracefulClose } from './graceful-close.js';

@Module({})
class Nothing {}

const CLIENTS = 100;

/** A client. `ask` sends a request. `ended` resolves to all that it has received. */
const client = (port: number) => {
  let received = '';
  const socket = connect({ port, host: '127.0.0.1' }).on('data', (bytes) => (received += bytes.toString('latin1')));
  const ended = new Promise<string>((resolve, reject) => socket.on('error', reject).on('close', () => resolve(received)));
  return { ask: () => socket.write('GET /nothing HTTP/1.1\r\nhost: test\r\n\r\n'), received: () => received, ended };
};
const answersIn = (text: string): number => text.split('HTTP/1.1 404').length - 1;

test.each([
  ['on connections that wait to be accepted', false, 1],
  ['of open connections that wait for their turn', true, 2],
])('requests %s are answered before the server closes', async (_, isOpen, expected) => {
  const adapter = createHttpAdapter({ log: createLogger('silent', 'spec'), now: () => systemClock.now(), connectionsPerAddress: null });
  const close = gracefulClose(adapter.getInstance<FastifyInstance>(), systemClock);
  const app = await NestFactory.create<NestFastifyApplication>(Nothing, adapter, { logger: false, bodyParser: false });
  await app.listen(0, '127.0.0.1');
  const { port } = app.getHttpServer().address() as { port: number };
  const clients = Array.from({ length: CLIENTS }, () => client(port));
  const ended = Promise.all(clients.map((one) => one.ended));
  for (const one of clients) one.ask();
  if (isOpen) {
    await eventually(() => clients.every((one) => answersIn(one.received()) === 1));
    for (const one of clients) one.ask();
  }
  await Promise.all([ended, close(app, 0)]);
  expect((await ended).map(answersIn)).toEqual(Array.from({ length: CLIENTS }, () => expected));
});
