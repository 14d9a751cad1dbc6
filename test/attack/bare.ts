/** A server that does nothing but answer, in a process of its own. `npm run attack -- --control` sends floods to it. */
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';

const server = createServer((request, response) => request.resume().on('end', () => response.writeHead(429, { 'content-length': 0 }).end()));
server.listen(0, '127.0.0.1', () => process.send!((server.address() as AddressInfo).port));
process.once('disconnect', () => process.exit());
