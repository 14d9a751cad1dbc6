/**
 * HTTP for payers: security headers for all payer paths, the session's cookie, pages and redirects, and the check that a form comes from our page.
 */
import type { FastifyInstance, FastifyReply, FastifyRequest } from 'fastify';
import type { CheckoutPorts } from '#checkout';
import type { KeyRing } from '#platform';
import type { RateLimits } from './rate-limits.js';

/** Services that the payer controllers need. */
export interface CheckoutServices {
  readonly ports: CheckoutPorts;
  readonly keys: KeyRing;
  /** The address at which payers reach this service, without a trailing slash. Its scheme decides the name of the cookie and whether HSTS is sent. */
  readonly publicUrl: string;
  readonly sandbox: boolean;
  readonly limits: RateLimits;
  /** Number of the operator's own proxies in front of this service. */
  readonly proxyHops: number;
}
export const CHECKOUT_SERVICES = Symbol('checkout services');

export const INTAKE_PATH = '/api/v1/payer/intake';
export const LINK_PATH = `${INTAKE_PATH}/link`;

/**
 * True if a payer reads a refusal of this path and status. False: a program reads it. On the pages, a payer reads every refusal. At the intake, 404
 * and 405 are for a program, since a wrong path or method is a fault of a program.
 */
export const isForPayers = (path: string, status: number): boolean =>
  path === '/checkout' || path.startsWith('/checkout/') || ((path === INTAKE_PATH || path === LINK_PATH) && status !== 404 && status !== 405);

/** Paths that a payer's browser requests. */
const isPayerPath = (path: string): boolean => path === '/checkout' || path.startsWith('/checkout/') || path.startsWith('/api/v1/payer/');

/** The referrer policy is `same-origin`: with `no-referrer`, browsers would send our own forms with `Origin: null`. */
const SECURITY_HEADERS = {
  'content-security-policy':
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
  'referrer-policy': 'same-origin',
  'x-frame-options': 'DENY',
  'cache-control': 'no-store',
  'x-content-type-options': 'nosniff',
  'cross-origin-opener-policy': 'same-origin',
  'permissions-policy': 'camera=(), microphone=(), geolocation=()',
  'x-robots-tag': 'noindex',
} as const;
const HSTS = 'max-age=63072000; includeSubDomains';

/** All answers on payer paths get the headers, including refusals of the framework. */
export const addSecurityHeaders = (fastify: FastifyInstance, publicUrl: string): void => {
  const headers = { ...SECURITY_HEADERS, ...(publicUrl.startsWith('https:') ? { 'strict-transport-security': HSTS } : {}) };
  fastify.addHook('onRequest', (request: FastifyRequest, reply: FastifyReply, done) => {
    const path = request.url.split('?')[0]!;
    if (!isPayerPath(path)) return done();
    void reply.headers(headers);
    // Some of our GETs open or leave a session, and a HEAD must not do this. No payer's browser sends a HEAD for a page.
    if (request.method === 'HEAD' && (path.startsWith('/checkout/') || path === LINK_PATH))
      return void reply.status(405).header('allow', 'GET, POST').send();
    done();
  });
};

// The cookie's name. Browsers refuse `__Secure-` over http, so a sandbox on a laptop uses the plain name.

const isHttps = (publicUrl: string) => publicUrl.startsWith('https:');
const cookieName = (publicUrl: string) => (isHttps(publicUrl) ? '__Secure-co' : 'co');

export const setCookie = (reply: FastifyReply, publicUrl: string, checkoutId: string, value: string): void => {
  const secure = isHttps(publicUrl) ? '; Secure' : '';
  void reply.header('set-cookie', `${cookieName(publicUrl)}=${value}; Path=/checkout/${checkoutId}; HttpOnly; SameSite=Lax${secure}`);
};

/** All values of cookies with our name. A browser sends the one with the longest path first. Another site may have set one with this name too. */
export const cookiesOf = (request: FastifyRequest, publicUrl: string): string[] => {
  const prefix = `${cookieName(publicUrl)}=`;
  return (request.headers.cookie ?? '')
    .split(';')
    .map((part) => part.trim())
    .filter((part) => part.startsWith(prefix))
    .map((part) => part.slice(prefix.length));
};

/**
 * True if a POST comes from one of our own pages. Browsers say so in `Sec-Fetch-Site`, if they know this header. They always name the page's origin
 * in `Origin` (`null` from a sandboxed frame). In a sandbox on a laptop, the service may be opened under another host than that of PUBLIC_URL. Then
 * the requested host counts.
 */
export const isFromOurPage = ({ headers }: FastifyRequest, { publicUrl, sandbox }: Pick<CheckoutServices, 'publicUrl' | 'sandbox'>): boolean => {
  const site = headers['sec-fetch-site'];
  if (site !== undefined && site !== 'same-origin') return false;
  const { origin, protocol } = new URL(publicUrl);
  return headers.origin === origin || (sandbox && headers.host !== undefined && headers.origin === `${protocol}//${headers.host}`);
};

export const isForm = ({ headers }: FastifyRequest): boolean =>
  /^application\/x-www-form-urlencoded\s*(;|$)/i.test(headers['content-type'] ?? '') && headers['content-encoding'] === undefined;
export const isJson = ({ headers }: FastifyRequest): boolean =>
  /^application\/json\s*(;|$)/i.test(headers['content-type'] ?? '') && headers['content-encoding'] === undefined;

export const bytesOf = ({ body }: FastifyRequest): Uint8Array => (Buffer.isBuffer(body) ? body : Buffer.alloc(0));

export const sendPage = (reply: FastifyReply, status: number, html: string): void => {
  void reply.status(status).header('content-type', 'text/html; charset=utf-8').send(html);
};

/** 303: the next request is a GET, also after a POST. */
export const redirect = (reply: FastifyReply, location: string, body = ''): void => {
  void reply.status(303).header('location', location).header('content-type', 'text/plain; charset=utf-8').send(body);
};
