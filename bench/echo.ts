/**
 * A bare HTTP server for `bench -- processors`: `echo.js TARGET`. It passes the first request of each path on to TARGET and keeps the answer. It
 * answers every later request of that path at once, with the reference of that request. It keeps no byte order mark and no header but the type.
 * Prints `{"url"}`.
 */
import { createServer, type IncomingHttpHeaders } from 'node:http';
import type { AddressInfo } from 'node:net';

const REF = /[0-9A-HJKMNP-TV-Z]{20}/;
const target = process.argv[2]!;

interface Kept {
  readonly status: number;
  readonly type: string;
  readonly ref: string;
  readonly text: string;
}
const kept = new Map<string, Promise<Kept>>();
const refIn = (headers: IncomingHttpHeaders, body: string): string =>
  REF.exec(String(headers['idempotency-key'] ?? ''))?.[0] ?? REF.exec(body)?.[0] ?? '';
const ask = async (path: string, headers: IncomingHttpHeaders, body: string): Promise<Kept> => {
  const { host: _, connection: __, 'content-length': ___, ...rest } = headers;
  const answer = await fetch(`${target}${path}`, { method: 'POST', headers: rest as Record<string, string>, body });
  return { status: answer.status, type: answer.headers.get('content-type') ?? '', ref: refIn(headers, body), text: await answer.text() };
};

const server = createServer((request, response) => {
  const chunks: Buffer[] = [];
  request.on('data', (chunk: Buffer) => chunks.push(chunk));
  request.on('end', () => {
    const body = Buffer.concat(chunks).toString();
    const path = request.url ?? '/';
    const known = kept.get(path) ?? ask(path, request.headers, body);
    kept.set(path, known);
    void known.then(
      ({ status, type, ref, text }) => {
        const answer = ref === '' ? text : text.replaceAll(ref, refIn(request.headers, body));
        response.writeHead(status, { 'content-type': type, 'content-length': Buffer.byteLength(answer) }).end(answer);
      },
      () => response.writeHead(502).end(),
    );
  });
});
server.keepAliveTimeout = 65_000;
server.listen(0, '127.0.0.1', () =>
  process.stdout.write(`${JSON.stringify({ url: `http://127.0.0.1:${(server.address() as AddressInfo).port}` })}\n`),
);
