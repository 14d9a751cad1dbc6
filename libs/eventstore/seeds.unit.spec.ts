import { createServer } from 'node:http2';
import { afterEach, expect, test } from '@jest/globals';
import { systemClock } from '#kernel';
import { silentServer } from '../../test/support/silent-server.js';
import { silentSeeds, withoutSeeds } from './seeds.js';

const cleanUps: (() => unknown)[] = [];
afterEach(async () => {
  for (const cleanUp of cleanUps.splice(0)) await cleanUp();
});

test.each([
  ['two are left', 'esdb://ops:p%40ss@a:1,b:2,c?tls=true', ['b:2'], 'esdb://ops:p%40ss@a:1,c?tls=true'],
  ['one is left: named twice, so that the client asks it for the leader', 'kdb://a:1,b:2/?tls=false', ['a:1'], 'kdb://b:2,b:2/?tls=false'],
  ['none would be left', 'kdb://a:1,b:2', ['a:1', 'b:2'], 'kdb://a:1,b:2'],
  ['none is silent', 'kdb://a:1,b:2', [], 'kdb://a:1,b:2'],
  ['a URL with one address', 'kdb://a:1?tls=false', ['a:1'], 'kdb://a:1?tls=false'],
  ['a DNS name for a cluster', 'kdb+discover://a:1,b:2', ['a:1'], 'kdb+discover://a:1,b:2'],
])('silent addresses are left out of a URL: %s', (_what, url, silent, left) => {
  expect(withoutSeeds(url, silent)).toBe(left);
});

test('silent is an address that accepts and never answers; not one that refuses, fails or answers anything', async () => {
  const silent = await silentServer();
  const answers = createServer((_request, response) => response.writeHead(404).end());
  const { port } = await new Promise<{ port: number }>((listening) =>
    answers.listen(0, '127.0.0.1', () => listening(answers.address() as { port: number })),
  );
  cleanUps.push(
    () => silent.close(),
    () => answers.close(),
  );
  const seeds = `127.0.0.1:${port},127.0.0.1:${silent.port},127.0.0.1:9,not-a-host.invalid:1`;
  expect(await silentSeeds(`kdb://${seeds}?tls=false`, systemClock)).toEqual([`127.0.0.1:${silent.port}`]);
  // The first server has no TLS. Its error over TLS counts as an answer.
  expect(await silentSeeds(`kdb://${seeds}`, systemClock)).toEqual([`127.0.0.1:${silent.port}`]);
});
