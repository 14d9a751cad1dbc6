/**
 * A real browser (Chromium from npm) and its sites, for specs of hosted checkout. The service is `pay.test` behind TLS, a partner is `shop.test`, and
 * an attacker is `evil.test`. As in production, these are three different sites.
 */
import { execFile } from 'node:child_process';
import { existsSync } from 'node:fs';
import { mkdtemp, rm } from 'node:fs/promises';
import { createServer as createHttpsServer, type Server } from 'node:https';
import type { IncomingMessage, ServerResponse } from 'node:http';
import { connect, type AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createServer as createTlsServer } from 'node:tls';
import { promisify } from 'node:util';
import { type Browser, type BrowserContext, type BrowserContextOptions, chromium, type Page } from 'playwright-core';
import { generate } from 'selfsigned';

export interface TestBrowser {
  readonly browser: Browser;
  /** A new browser window with its own cookies and history. */
  context(options?: BrowserContextOptions): Promise<BrowserContext>;
  close(): Promise<void>;
}

/** A complete Chromium of this machine, if one is installed. It has a back/forward cache, which the headless shell from npm lacks. */
export const installedChromium = ['/usr/bin/chromium', '/usr/bin/chromium-browser', '/usr/bin/google-chrome'].find((path) => existsSync(path));

const UNPACK = `import('@sparticuz/chromium').then(({ default: chromium }) => chromium.executablePath()).then((path) => process.stdout.write(path))`;

const unpacked = async (directory: string): Promise<string> => {
  const { stdout } = await promisify(execFile)(process.execPath, ['--input-type=module', '-e', UNPACK], {
    cwd: new URL('../../', import.meta.url).pathname,
    env: { ...process.env, TMPDIR: directory },
  });
  return stdout;
};

/**
 * Unpacks Chromium into a new directory and starts it. The npm package unpacks into the temp dir, where two runs at once would write the same file.
 * So a process with another temp dir unpacks it. `installed`: uses this browser of the machine instead.
 */
export const startBrowser = async ({ installed }: { readonly installed?: string } = {}): Promise<TestBrowser> => {
  const directory = await mkdtemp(join(tmpdir(), 'payfold-chromium-'));
  const remove = () => rm(directory, { recursive: true, force: true });
  try {
    const executablePath = installed ?? (await unpacked(directory));
    const browser = await chromium.launch({
      executablePath,
      args: ['--no-sandbox', '--host-resolver-rules=MAP *.test 127.0.0.1'],
      // By default Playwright turns the back/forward cache off with this option. With the cache, Back behaves as for users.
      ignoreDefaultArgs: ['--disable-back-forward-cache'],
    });
    return {
      browser,
      context: (options = {}) => browser.newContext({ ignoreHTTPSErrors: true, locale: 'en-US', timezoneId: 'America/Chicago', ...options }),
      close: async () => {
        await browser.close();
        await remove();
      },
    };
  } catch (error) {
    await remove();
    throw error;
  }
};

/** Collects console errors of the page and refusals by its security policy. Our pages must cause none. */
export const complaintsOf = (page: Page): string[] => {
  const complaints: string[] = [];
  page.on('console', (message) => {
    // The console also reports pages with status 403 or 422, which are expected. A missing asset is an error.
    if (message.text().startsWith('Failed to load resource') && !message.location().url.includes('/assets/')) return;
    if (message.type() === 'error' || message.type() === 'warning') complaints.push(`${message.type()}: ${message.text()}`);
  });
  page.on('pageerror', (error) => complaints.push(`script: ${error.message}`));
  return complaints;
};

export type Handler = (request: IncomingMessage & { readonly body: string }, response: ServerResponse) => void;

export interface Sites {
  /** `https://pay.test:port`. */
  readonly payUrl: string;
  /** `https://shop.test:port`. `evilUrl` is the same server as `https://evil.test:port`. */
  readonly shopUrl: string;
  readonly evilUrl: string;
  /** Sets the service that answers behind pay.test. */
  lead(serviceUrl: string): void;
  /** Answers of shop.test and evil.test, by path. Any other path gets a page with the heading "shop" and the path. */
  readonly pages: Map<string, (request: IncomingMessage & { readonly body: string }) => string | { status: number; location: string }>;
  /** Every request to shop.test or evil.test, in order. */
  readonly visits: { readonly host: string; readonly method: string; readonly url: string; readonly body: string }[];
  close(): Promise<void>;
}

const LOOPBACK = '127.0.0.1';

export const startSites = async (): Promise<Sites> => {
  const names = ['pay.test', 'shop.test', 'evil.test'];
  const { private: key, cert } = await generate([{ name: 'commonName', value: 'test' }], {
    keyType: 'ec',
    extensions: [{ name: 'subjectAltName', altNames: names.map((value) => ({ type: 2 as const, value })) }],
  });
  let target = { host: LOOPBACK, port: 0 };
  const sockets = new Set<{ destroy(): unknown }>();
  // The TLS proxy does not change the bytes, so the browser gets exactly the service's answers.
  const front = createTlsServer({ key, cert, ALPNProtocols: ['http/1.1'] }, (inbound) => {
    const outbound = connect(target.port, target.host);
    for (const [socket, other] of [
      [inbound, outbound],
      [outbound, inbound],
    ] as const) {
      sockets.add(socket);
      socket.on('error', () => other.destroy());
      socket.on('close', () => {
        sockets.delete(socket);
        other.destroy();
      });
      socket.pipe(other);
    }
  });
  const pages: Sites['pages'] = new Map();
  const visits: Sites['visits'] = [];
  const shop: Server = createHttpsServer({ key, cert }, (request, response) => {
    const chunks: Buffer[] = [];
    request.on('data', (chunk: Buffer) => chunks.push(chunk));
    request.on('end', () => {
      const body = Buffer.concat(chunks).toString();
      const url = request.url ?? '/';
      const path = url.split('?')[0]!;
      if (path === '/favicon.ico') return response.writeHead(204).end();
      visits.push({ host: request.headers.host ?? '', method: request.method ?? '', url, body });
      const made = pages.get(path)?.(Object.assign(request, { body })) ?? `<!doctype html><title>shop</title><h1>shop ${path}</h1>`;
      if (typeof made === 'string') response.writeHead(200, { 'content-type': 'text/html; charset=utf-8' }).end(made);
      else response.writeHead(made.status, { location: made.location }).end();
    });
  });
  shop.on('connection', (socket) => {
    sockets.add(socket);
    socket.on('close', () => sockets.delete(socket));
  });
  const listen = (server: { listen(port: number, host: string, done: () => void): unknown; address(): unknown }) =>
    new Promise<number>((done) => server.listen(0, LOOPBACK, () => done((server.address() as AddressInfo).port)));
  const [frontPort, shopPort] = [await listen(front), await listen(shop)];
  return {
    payUrl: `https://pay.test:${frontPort}`,
    shopUrl: `https://shop.test:${shopPort}`,
    evilUrl: `https://evil.test:${shopPort}`,
    lead: (serviceUrl) => {
      const { hostname: host, port } = new URL(serviceUrl);
      target = { host, port: Number(port) };
    },
    pages,
    visits,
    close: async () => {
      for (const socket of sockets) socket.destroy();
      await Promise.all([front, shop].map((server) => new Promise((done) => server.close(done))));
    },
  };
};
