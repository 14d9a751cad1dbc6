/**
 * `/openapi.json`, the same in OpenAPI 3.0, and `/docs`, the page that shows it. They need no credentials (C65). All are made once and served from memory, so that answers
 * which nobody reads hold no copies and no files.
 */
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import type { OpenAPIObject } from '@nestjs/swagger';
import type { FastifyInstance } from 'fastify';
import type { Config } from '#platform';
import { JSON_TYPE } from '#platform/http';
import { inOpenApi30 } from './api/openapi.js';
import { pageHeaders } from './api/payer/http.js';

const HTML_TYPE = 'text/html; charset=utf-8';
const SCRIPT_TYPE = 'text/javascript; charset=utf-8';
const STYLE_TYPE = 'text/css; charset=utf-8';

const START = `SwaggerUIBundle({ url: '/openapi.json', dom_id: '#docs', validatorUrl: null });\n`;
const page = (title: string): string =>
  `<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>${title}</title><link rel="icon" href="data:,"><link rel="stylesheet" href="/docs/swagger-ui.css"></head>
<body><div id="docs"></div><script src="/docs/swagger-ui-bundle.js"></script><script src="/docs/start.js"></script></body>
</html>
`;

/** Registers the routes. Without `apiDocs` there is no `/docs`. */
export const serveOpenApi = (
  fastify: FastifyInstance,
  document: OpenAPIObject,
  { apiDocs, publicUrl }: Pick<Config, 'apiDocs' | 'publicUrl'>,
): void => {
  for (const [path, served] of [
    ['/openapi.json', document],
    ['/openapi-3.0.json', inOpenApi30(document)],
  ] as const) {
    const json = Buffer.from(JSON.stringify(served));
    fastify.get(path, (_, reply) => reply.header('content-type', JSON_TYPE).send(json));
  }
  if (!apiDocs) return;
  // The page lies on the origin of the card pages, so it has their headers. Its icons are `data:` images.
  const headers = pageHeaders(publicUrl);
  const policy = headers['content-security-policy'].replace("img-src 'self'", "img-src 'self' data:");
  const fileOf = (name: string) => readFileSync(createRequire(import.meta.url).resolve(`swagger-ui-dist/${name}`));
  for (const [path, type, content] of [
    ['/docs', HTML_TYPE, Buffer.from(page(document.info.title))],
    ['/docs/start.js', SCRIPT_TYPE, Buffer.from(START)],
    ['/docs/swagger-ui-bundle.js', SCRIPT_TYPE, fileOf('swagger-ui-bundle.js')],
    ['/docs/swagger-ui.css', STYLE_TYPE, fileOf('swagger-ui.css')],
  ] as const)
    fastify.get(path, (_, reply) => reply.headers({ ...headers, 'content-security-policy': policy, 'content-type': type }).send(content));
};
