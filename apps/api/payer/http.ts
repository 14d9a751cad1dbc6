/** HTTP for payers: security headers, the session's cookie, pages, redirects, and the check that a form comes from our page. */
import type { FastifyInstance, FastifyReply, FastifyRequest } from 'fastify';
import type { CheckoutPorts } from '#checkout';
import type { KeyRing, Slots } from '#platform';
import type { RateLimits } from './rate-limits.js';

/** Services that the payer controllers need. */
export interface CheckoutServices {
  readonly ports: CheckoutPorts;
  readonly slots: Slots;
  readonly keys: KeyRing;
  /** The address of this service for payers, without a trailing slash. Its scheme decides the cookie's name and whether HSTS is sent. */
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
 * True if a payer reads the refusal, false if a program reads it. At the intake, 404 and 405 are for a program: a wrong path or method is a program's
 * fault.
 */
export const isForPayers = (path: string, status: number): boolean =>
  path === '/checkout' || path.startsWith('/checkout/') || ((path === INTAKE_PATH || path === LINK_PATH) && status !== 404 && status !== 405);

/**
 * The matched route, or the decoded path of a request that matches none. A raw URL can spell a path in many ways: encoded, or with scheme and host.
 * A path that cannot be decoded stays as it is.
 */
export const routeOf = ({ routeOptions, url }: FastifyRequest): string => {
  if (routeOptions.url !== undefined) return routeOptions.url;
  const path = url.replace(/^[a-z][a-z\d+.-]*:\/\/[^/?#]*/i, '').split(/[?#]/)[0]!;
  try {
    return decodeURIComponent(path);
  } catch {
    return path;
  }
};

const isPayerPath = (path: string): boolean => path === '/checkout' || path.startsWith('/checkout/') || path.startsWith('/api/v1/payer/');

/** The headers of pages. With the referrer policy `no-referrer`, browsers would send our own forms with `Origin: null`. */
const PAGE_HEADERS = {
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

/** The headers of every page on the origin of PUBLIC_URL. */
export const pageHeaders = (publicUrl: string) => ({
  ...PAGE_HEADERS,
  ...(publicUrl.startsWith('https:') ? { 'strict-transport-security': HSTS } : {}),
});

/** Adds the headers to all answers on payer paths, including refusals of the framework. */
export const addSecurityHeaders = (fastify: FastifyInstance, publicUrl: string): void => {
  const headers = pageHeaders(publicUrl);
  fastify.addHook('onRequest', (request: FastifyRequest, reply: FastifyReply, done) => {
    const path = routeOf(request);
    if (!isPayerPath(path)) return done();
    void reply.headers(headers);
    // A GET on these paths may open a session, or record the outcome of its attempt. A HEAD must not do so, and no payer's browser sends one for a page.
    if (request.method === 'HEAD' && (path.startsWith('/checkout/') || path === LINK_PATH))
      return void reply.status(405).header('allow', 'GET, POST').send();
    // A prefetch must not do it either. After this refusal, the browser loads the page when the payer goes there.
    if (request.method === 'GET' && path.startsWith('/checkout/') && String(request.headers['sec-purpose']).includes('prefetch'))
      return void reply.status(503).send();
    done();
  });
};

// Browsers refuse `__Secure-` over http, so a sandbox on a laptop uses the plain name.

const isHttps = (publicUrl: string) => publicUrl.startsWith('https:');
const cookieName = (publicUrl: string) => (isHttps(publicUrl) ? '__Secure-co' : 'co');

export const setCookie = (reply: FastifyReply, publicUrl: string, checkoutId: string, value: string): void => {
  const secure = isHttps(publicUrl) ? '; Secure' : '';
  void reply.header('set-cookie', `${cookieName(publicUrl)}=${value}; Path=/checkout/${checkoutId}; HttpOnly; SameSite=Lax${secure}`);
};

/** All values of cookies with our name. Another site may have set one, too. A browser sends the cookie with the longest path first. */
export const cookiesOf = (request: FastifyRequest, publicUrl: string): string[] => {
  const prefix = `${cookieName(publicUrl)}=`;
  return (request.headers.cookie ?? '')
    .split(';')
    .map((part) => part.trim())
    .filter((part) => part.startsWith(prefix))
    .map((part) => part.slice(prefix.length));
};

/**
 * True if a POST comes from one of our own pages. If the browser sends `Sec-Fetch-Site`, its value must be `same-origin`. `Origin` must be the origin
 * of PUBLIC_URL. A sandbox may also be opened under another host, so there the requested host is accepted too.
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

export const sendPage = (reply: FastifyReply, status: number, html: string): void => {
  void reply.status(status).header('content-type', 'text/html; charset=utf-8').send(html);
};

/** 303: the next request is a GET, also after a POST. */
export const redirect = (reply: FastifyReply, location: string, body = ''): void => {
  void reply.status(303).header('location', location).header('content-type', 'text/plain; charset=utf-8').send(body);
};
