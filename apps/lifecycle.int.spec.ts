/** The listener of metrics. */
import { expect, test } from '@jest/globals';
import { once } from 'node:events';
import { connect } from 'node:net';
import { Registry } from 'prom-client';
import { serveMetrics } from './lifecycle.js';

test('a request with two Host headers gets 400, a request with one is answered', async () => {
  const health = { ok: true, checks: {} } as never;
  const server = await serveMetrics(0, { metrics: async () => new Registry(), live: () => health, ready: async () => health });
  try {
    const { port } = server.address() as { port: number };
    const statusOf = async (hosts: string) => {
      const socket = connect(port, '127.0.0.1');
      let text = '';
      socket.setEncoding('utf8').on('data', (piece: string) => (text += piece));
      socket.write(`GET /healthz HTTP/1.1\r\n${hosts}connection: close\r\n\r\n`);
      await once(socket, 'close');
      return text.split(' ')[1];
    };
    expect(await statusOf('host: a\r\n')).toBe('200');
    expect(await statusOf('host: a\r\nhost: b\r\n')).toBe('400');
  } finally {
    server.close();
  }
});
