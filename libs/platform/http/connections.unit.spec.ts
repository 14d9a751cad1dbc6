import { createServer } from 'node:http';
import { type AddressInfo, connect } from 'node:net';
import { afterEach, beforeEach, expect, test } from '@jest/globals';
import { addressGroup, connectionOf, Connections } from './connections.js';

const later = () => new Promise((next) => setTimeout(next, 50));

/** A server that answers nothing, and the URLs of the requests that have begun on it. */
let server: ReturnType<typeof createServer>;
let begun: string[];
beforeEach(async () => {
  begun = [];
  server = createServer((request, response) => {
    connectionOf(request).began(request, response);
    request.resume();
    begun.push(request.url!);
  });
  Object.assign(server, { pauseOnConnect: true });
  const connections = new Connections(512);
  server.on('connection', (socket) => connections.add(socket, 'refused'));
  await new Promise<void>((done) => server.listen(0, '127.0.0.1', done));
});
afterEach(() => {
  server.closeAllConnections();
  server.close();
});

const pipelined = (count: number) => Array.from({ length: count }, (_, index) => `GET /${index} HTTP/1.1\r\nhost: test\r\n\r\n`).join('');
const HEAD = 'POST /body HTTP/1.1\r\nhost: test\r\ncontent-length: 9000\r\n\r\n';

test.each([0, 1, 2, 3, 4])('at most two unanswered requests are parsed, also if the last %i bytes of a head come in a second read', async (split) => {
  const client = connect((server.address() as AddressInfo).port, '127.0.0.1').setNoDelay();
  client.on('error', () => undefined);
  const bytes = HEAD + ' '.repeat(9_000) + pipelined(500);
  client.write(bytes.slice(0, HEAD.length - split));
  await later();
  client.write(bytes.slice(HEAD.length - split));
  while (begun.length < 2) await later();
  await later();
  expect(begun).toEqual(['/body', '/0']);
});

test.each([
  ['192.0.2.7', '192.0.2.7'],
  ['::ffff:192.0.2.7', '192.0.2.7'],
  ['2001:db8:1:2:3:4:5:6', '2001:db8:1:2::/64'],
  ['2001:db8:1:2::9', '2001:db8:1:2::/64'],
  ['2001:db8::9', '2001:db8:0:0::/64'],
  ['fe80::1%eth0', 'fe80:0:0:0::/64'],
  ['::1', '0:0:0:0::/64'],
  ['', ''],
])('clients are counted by address, or by their /64 network: %s → %s', (address, group) => {
  expect(addressGroup(address)).toBe(group);
});
