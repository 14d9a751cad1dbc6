import { connect } from 'node:net';
import { expect, test } from '@jest/globals';
import { Module } from '@nestjs/common';
import { NestFactory } from '@nestjs/core';
import type { NestFastifyApplication } from '@nestjs/platform-fastify';
import type { FastifyInstance } from 'fastify';
import { systemClock } from '#kernel';
import { createLogger } from '#platform';
import { createHttpAdapter } from '#platform/http';
import { gracefulClose } from './graceful-close.js';

@Module({})
class Nothing {}

const CLIENTS = 100;

/** Connects within this call: the system makes the connection before the server has accepted it. */
const answerOn = (port: number): Promise<string> =>
  new Promise((resolve, reject) => {
    let answer = '';
    connect({ port, host: '127.0.0.1' })
      .on('error', reject)
      .on('data', (bytes) => (answer += bytes.toString('latin1')))
      .on('close', () => resolve(answer))
      .write('GET /nothing HTTP/1.1\r\nhost: test\r\n\r\n');
  });

test('requests on connections that wait to be accepted are answered before the server closes', async () => {
  const adapter = createHttpAdapter({ log: createLogger('silent', 'spec'), now: () => systemClock.now(), connectionsPerAddress: null });
  const close = gracefulClose(adapter.getInstance<FastifyInstance>(), systemClock);
  const app = await NestFactory.create<NestFastifyApplication>(Nothing, adapter, { logger: false, bodyParser: false });
  await app.listen(0, '127.0.0.1');
  const { port } = app.getHttpServer().address() as { port: number };
  const answers = Array.from({ length: CLIENTS }, () => answerOn(port));
  await close(app, 1_000);
  const statuses = (await Promise.all(answers)).map((answer) => answer.slice(0, 12));
  expect(statuses).toEqual(Array.from({ length: CLIENTS }, () => 'HTTP/1.1 404'));
});
