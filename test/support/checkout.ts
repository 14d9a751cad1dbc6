/**
 * A payer without a browser, for specs of hosted checkout. The payer keeps cookies by path, and reads and sends the form of a page. Redirects are
 * followed only by `open`. Signatures are made and checked as a partner does, without the service's code.
 */
import { createHmac } from 'node:crypto';
import { request as httpRequest } from 'node:http';
import type { CheckoutConfig } from '#accounts';
import { CARD, expiryIn, type Service, type TestAccount } from './service.js';

export const SHOP = 'https://shop.test';
export const INTAKE = '/api/v1/payer/intake';

export interface Portal {
  readonly portalId: string;
  readonly signingSecret: string;
}

/** Makes a portal with hosted checkout enabled. */
export const checkoutPortal = async (service: Service, account: TestAccount, change: Partial<CheckoutConfig> = {}): Promise<Portal> => {
  const made = await service.admin.createPortal({
    accountIds: [account.accountId],
    name: 'Riverton',
    gateway: 'simulator',
    fee: { flatCents: 50, percentBps: 250, minCents: 0, maxCents: null, chargeMode: 'separate' },
  });
  const { portalId } = made.state;
  await service.administer(
    service.admin.configureCheckout(portalId, { enabled: true, allow: [`${SHOP}/pay`], agencyName: 'City of Riverton', ...change }),
  );
  return { portalId, signingSecret: made.signingSecret };
};

// Signatures, written from the documentation.

const rfc3986 = (text: string) =>
  [...Buffer.from(text, 'utf8')]
    .map((byte) =>
      /[A-Za-z0-9\-._~]/.test(String.fromCharCode(byte)) ? String.fromCharCode(byte) : `%${byte.toString(16).toUpperCase().padStart(2, '0')}`,
    )
    .join('');

export const signatureOf = (secret: string, kind: string, address: string, pairs: readonly (readonly [string, string])[]): string => {
  const query = pairs
    .filter(([name]) => name !== 'sig')
    .map(([name, value]) => [rfc3986(name), rfc3986(value)] as const)
    .sort(([a, x], [b, y]) => (a === b ? (x < y ? -1 : 1) : a < b ? -1 : 1))
    .map((pair) => pair.join('='))
    .join('&');
  return createHmac('sha256', secret).update(['v1', kind, address, query].join('\n')).digest('hex');
};

/** Checks the signature of an address to which a browser was redirected. Returns the parameters. */
export const readReturn = (secret: string, kind: 'return' | 'cancel', location: string) => {
  const url = new URL(location);
  const pairs = [...url.searchParams];
  const right = signatureOf(secret, kind, url.origin + url.pathname, pairs) === url.searchParams.get('sig');
  return { right, address: url.origin + url.pathname, ...Object.fromEntries(pairs) } as { right: boolean; address: string; [name: string]: unknown };
};

// The parameters to send.

export const LINES = [
  { amount_cents: 10_000, reference_id: 'WTR-2041', description: 'Water' },
  { amount_cents: 2_500, reference_id: 'WTR-2042', description: 'Sewer', metadata: { ward: 4 } },
];

export type Fields = Readonly<Record<string, string>>;
export const intakeOf = ({ portalId }: Pick<Portal, 'portalId'>, more: Readonly<Record<string, string | undefined>> = {}): Fields =>
  Object.fromEntries(
    Object.entries({
      portal_id: portalId,
      amount_cents: '12500',
      line_items: JSON.stringify(LINES),
      return_url: `${SHOP}/pay/done?case=A%26B+7`,
      cancel_url: `${SHOP}/pay/cancelled`,
      reference_id: 'CASE-7',
      state: 'xyz',
      ...more,
    }).filter((pair): pair is [string, string] => pair[1] !== undefined),
  );

export const formText = (fields: Readonly<Record<string, string>>): string => new URLSearchParams(fields).toString();

export const signedFields = (secret: string, kind: 'link' | 'intake', address: string, fields: Fields): Fields => ({
  ...fields,
  sig: signatureOf(secret, kind, address, Object.entries(fields)),
});

// The payer.

export interface Reply {
  readonly status: number;
  readonly headers: Readonly<Record<string, string>>;
  readonly setCookie: readonly string[];
  readonly text: string;
  /** The target of a redirect. */
  readonly location: string;
}

export interface Asked {
  readonly method?: string;
  readonly headers?: Readonly<Record<string, string | null>>;
  readonly body?: string;
}

export const CARD_FORM = { card_number: CARD.approved, expiry: expiryIn(30), security_code: '737' } as const;

export class Payer {
  /** By path. */
  readonly cookies = new Map<string, string>();
  constructor(
    readonly url: string,
    /** The browser's `Origin`. */
    readonly origin = url,
    /** The browser's address, as the operator's proxy reports it. null: there is no proxy. */
    readonly address: string | null = null,
  ) {}

  /** A second tab of the same browser, with the same cookies. */
  tab(): Payer {
    const tab = new Payer(this.url, this.origin, this.address);
    for (const [path, cookie] of this.cookies) tab.cookies.set(path, cookie);
    return tab;
  }

  send(path: string, { method = 'GET', headers = {}, body }: Asked = {}): Promise<Reply> {
    const target = new URL(path, this.url);
    const own = [...this.cookies].filter(([prefix]) => target.pathname.startsWith(prefix)).map(([, cookie]) => cookie);
    const all: Record<string, string | null> = {
      ...(own.length > 0 ? { cookie: own.join('; ') } : {}),
      'x-forwarded-for': this.address,
      ...(method === 'POST' ? { origin: this.origin, 'sec-fetch-site': 'same-origin', 'content-type': 'application/x-www-form-urlencoded' } : {}),
      ...headers,
    };
    const sent = Object.fromEntries(Object.entries(all).filter((pair): pair is [string, string] => pair[1] !== null));
    return new Promise((resolve, reject) => {
      const request = httpRequest(target, { method, headers: sent, agent: false }, (response) => {
        const chunks: Buffer[] = [];
        response.on('data', (chunk: Buffer) => chunks.push(chunk));
        response.on('error', reject);
        response.on('end', () => {
          const setCookie = response.headers['set-cookie'] ?? [];
          for (const line of setCookie) {
            const [pair, ...attributes] = line.split(';').map((part) => part.trim());
            const prefix = attributes.find((attribute) => attribute.startsWith('Path='))?.slice('Path='.length) ?? '/';
            this.cookies.set(prefix, pair!);
          }
          resolve({
            status: response.statusCode!,
            headers: response.headers as Record<string, string>,
            setCookie,
            text: Buffer.concat(chunks).toString('utf8'),
            location: response.headers.location ?? '',
          });
        });
      });
      request.on('error', reject);
      request.end(body);
    });
  }

  /** Sends a GET, and follows redirects within this service. */
  async open(path: string): Promise<Reply & { readonly path: string }> {
    for (let hops = 0; hops < 8; hops++) {
      const reply = await this.send(path);
      if (reply.status !== 303 || /^https:/.test(reply.location)) return { ...reply, path };
      path = reply.location;
    }
    throw new Error('redirected for ever');
  }

  intake(fields: Fields): Promise<Reply> {
    // The partner's page sends the form, so the request is cross-site.
    return this.send(INTAKE, { method: 'POST', body: formText(fields), headers: { origin: SHOP, 'sec-fetch-site': 'cross-site' } });
  }

  /** Sends a form intake, which must begin a session. Returns the session's id. */
  async begin(fields: Fields): Promise<string> {
    const reply = await this.intake(fields);
    const id = /^\/checkout\/(cs_[\w-]{32})$/.exec(reply.location)?.[1];
    if (reply.status !== 303 || id === undefined) throw new Error(`no session: ${reply.status} ${reply.location} ${reply.text}`);
    return id;
  }

  submit(id: string, fields: Readonly<Record<string, string>>, asked: Asked = {}): Promise<Reply> {
    return this.send(`/checkout/${id}/pay`, { ...asked, method: 'POST', body: formText(fields) });
  }

  /** Presses the button by which the session's page leads back to the partner, and follows the page after it. Returns the redirect to the partner. */
  async leave(id: string, way: 'done' | 'cancel'): Promise<Reply> {
    const path = `/checkout/${id}/${way}`;
    const { text } = await this.open(`/checkout/${id}`);
    const action = `action="${path}"`;
    if (!text.includes(action)) return this.send(path);
    const left = await this.send(path, { method: 'POST', body: formText(formOf(text, action)) });
    const onward = /<meta http-equiv="refresh" content="0;url=([^"]+)"/.exec(left.text)?.[1];
    return onward === undefined ? left : this.send(onward);
  }

  /** Opens the page, fills the form in and sends it. */
  async pay(id: string, fields: Readonly<Record<string, string>> = {}): Promise<Reply> {
    const page = await this.send(`/checkout/${id}`);
    return this.submit(id, { ...formOf(page.text), ...CARD_FORM, ...fields });
  }
}

const unescaped = (text: string) =>
  text.replaceAll('&quot;', '"').replaceAll('&lt;', '<').replaceAll('&gt;', '>').replaceAll('&#39;', "'").replaceAll('&amp;', '&');

/** The fields of a form on a page, as a browser would send them. `mark`: an attribute of the form. */
export const formOf = (html: string, mark = 'id="pay"'): Record<string, string> => {
  const form = html.match(/<form[^>]*>[^]*?<\/form>/g)?.find((text) => text.split('>')[0]!.includes(mark));
  if (form === undefined) throw new Error(`there is no form:\n${textOf(html)}`);
  return Object.fromEntries(
    [...form.matchAll(/<input((?:"[^"]*"|[^>"])*)>/g)].map(([, attributes]) => {
      const attribute = (name: string) => new RegExp(`\\b${name}="([^"]*)"`).exec(attributes!)?.[1];
      return [attribute('name')!, unescaped(attribute('value') ?? '')];
    }),
  );
};

/** The text of a page, without its tags. */
export const textOf = (html: string): string =>
  unescaped(html.replace(/<(script|style)[^]*?<\/\1>/g, '').replace(/<[^>]+>/g, ' '))
    .replace(/\s+/g, ' ')
    .trim();
