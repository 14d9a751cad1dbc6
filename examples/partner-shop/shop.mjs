// A partner's shop in one file: sends a payer's browser through Payfold's hosted checkout and verifies what comes back. Plain Node, no packages.
//
//   npm start                                  in one terminal
//   node examples/partner-shop/shop.mjs        in another; then open the address that it prints
//
// Without settings it makes itself an account, a portal with checkout on, and an API key in the running sandbox, by the command line of the checkout.
// With PAYFOLD_URL, PAYFOLD_API_KEY, PAYFOLD_PORTAL and PAYFOLD_SIGNING_SECRET it uses those. SHOP_PORT (4443): where the shop listens.
// It finds the service by DATA_DIR/runtime.json (.payfold/runtime.json).
import { execFile } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { createServer } from 'node:https';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { sign, verify } from '../../docs/checkout/verify.mjs';
import { selfSigned } from './certificate.mjs';

const port = Number(process.env.SHOP_PORT ?? 4443);
const run = promisify(execFile);

const payfold = async (...args) => {
  const { stdout } = await run(process.execPath, [new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname, '--json', ...args]);
  return JSON.parse(stdout);
};

/** The address of the running service. The error says what to do if there is none. */
const findService = async () => {
  const runtime = join(process.env.DATA_DIR ?? '.payfold', 'runtime.json');
  let url = process.env.PAYFOLD_URL;
  try {
    url ??= JSON.parse(readFileSync(runtime, 'utf8')).apiUrl;
  } catch {
    throw new Error(`no running service: ${runtime} cannot be read. Run "npm start" first, or set PAYFOLD_URL.`);
  }
  const ready = await fetch(`${url}/readyz`).catch(() => null);
  if (!ready?.ok) throw new Error(`the service at ${url} does not answer, or is not ready. Run "npm start" first, or set PAYFOLD_URL.`);
  return url;
};

/** The values that the operator of Payfold gives to a partner. */
const agreement = async (shop, url) => {
  const { PAYFOLD_API_KEY: apiKey, PAYFOLD_PORTAL: portalId, PAYFOLD_SIGNING_SECRET: secret } = process.env;
  if (apiKey && portalId && secret) return { url, apiKey, portalId, secret };
  process.stdout.write('making an account, a portal and a key …\n');
  const { accountId } = await payfold('accounts', 'create', '--name', 'Partner shop');
  const fee = ['--fee-percent-bps', '250', '--fee-flat-cents', '50'];
  const portal = await payfold('portals', 'create', '--account', accountId, '--name', 'Partner shop', ...fee);
  const settings = ['--enable', '--allow', `${shop}/pay`, '--agency-name', 'City of Riverton', '--colour', '#0b4f6c'];
  await payfold('portals', 'checkout', portal.portalId, ...settings);
  const key = await payfold('keys', 'issue', '--account', accountId);
  return { url, apiKey: key.apiKey, portalId: portal.portalId, secret: portal.signingSecret };
};

const LINES = [
  { amount_cents: 10_000, reference_id: 'WTR-2041', description: 'Water, March' },
  { amount_cents: 2_500, reference_id: 'WTR-2042', description: 'Sewer, March' },
];
const escape = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const page = (title, body) =>
  `<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>${title}</title>
<style>body{font:17px/1.5 system-ui,sans-serif;max-width:38rem;margin:3rem auto;padding:0 1rem}button{font:inherit;padding:.6rem 1.2rem}pre{background:#eee;padding:1rem;overflow:auto}.good{color:#17683f}.bad{color:#b3261e}</style>
<h1>${title}</h1>${body}`;

/** Results of the checkouts that have come back. The same result again is a replay, or a payer who pressed Back. `unknown` may be followed by `paid`. */
const seen = new Set();

const main = async () => {
  const shop = `https://localhost:${port}`;
  const service = await findService();
  // Nothing is created if the port is taken.
  const server = createServer(selfSigned('localhost'));
  await new Promise((resolve, reject) => server.once('error', reject).listen(port, '127.0.0.1', resolve)).catch((error) => {
    throw new Error(`the shop cannot listen on port ${port} (${error.code}). Set SHOP_PORT to another one.`);
  });
  const { url, apiKey, portalId, secret } = await agreement(shop, service);
  const request = {
    portal_id: portalId,
    amount_cents: '12500',
    line_items: JSON.stringify(LINES),
    return_url: `${shop}/pay/done?bill=7`,
    cancel_url: `${shop}/pay/cancelled`,
    reference_id: 'BILL-7',
    payer_first_name: 'Maria',
  };
  /** A link as it would be in a mail. One nonce, one payment. */
  const link = () => {
    const address = `${url}/api/v1/payer/intake/link`;
    const nonce = `bill-7-${Date.now()}-${Math.random().toString(36).slice(2)}`;
    const pairs = Object.entries({ ...request, exp: String(Math.floor(Date.now() / 1000) + 86_400), nonce });
    return `${address}?${new URLSearchParams([...pairs, ['sig', sign(secret, 'link', address, pairs)]])}`;
  };

  const home = () =>
    page(
      'Water bill',
      `<p>March, $125.00</p>
<form method="post" action="${url}/api/v1/payer/intake">
${Object.entries(request)
  .map(([name, value]) => `<input type="hidden" name="${name}" value="${escape(value)}">`)
  .join('\n')}
<button>Pay now</button></form>
<p>Or by the link of a mail: <a id="link" href="${escape(link())}">pay bill 7</a></p>`,
    );

  /** The signature proves that Payfold sent the payer. The API gives the present state. Only both together are a paid bill. */
  const done = async (address) => {
    const said = verify([secret], 'return', address);
    const again = seen.has(`${said.checkout_id} ${said.result}`);
    seen.add(`${said.checkout_id} ${said.result}`);
    const answer = await fetch(`${url}/api/partner/v1/payments/${said.payment_id}`, { headers: { authorization: `ApiKey ${apiKey}` } });
    const { data } = await answer.json();
    const paid = data.status === 'succeeded' && data.amountCents === 12_500 && data.referenceId === 'BILL-7';
    const verdict = again ? 'This bill was settled before' : paid ? 'Payment verified' : `Not paid: ${data.status}`;
    process.stdout.write(`${verdict}: ${said.payment_id}\n`);
    return page(
      verdict,
      `<p class="${paid ? 'good' : 'bad'}">Confirmation ${escape(said.confirmation_number ?? 'none yet')}</p><pre>${escape(JSON.stringify(said, null, 2))}</pre><p><a href="/">Back to the bill</a></p>`,
    );
  };
  const cancelled = (address) => {
    const said = verify([secret], 'cancel', address);
    process.stdout.write(`not paid: ${said.result} ${said.error ?? ''}\n`);
    return page('Not paid', `<pre>${escape(JSON.stringify(said, null, 2))}</pre><p><a href="/">Back to the bill</a></p>`);
  };

  server.on('request', async (asked, response) => {
    const address = `${shop}${asked.url}`;
    const send = (status, html) => response.writeHead(status, { 'content-type': 'text/html; charset=utf-8', 'cache-control': 'no-store' }).end(html);
    try {
      const path = asked.url.split('?')[0];
      if (path === '/') send(200, home());
      else if (path === '/pay/done') send(200, await done(address));
      else if (path === '/pay/cancelled') send(200, cancelled(address));
      else send(404, page('Nothing here', ''));
    } catch (error) {
      process.stdout.write(`refused: ${error.message}\n`);
      send(400, page('Not verified', `<p class="bad">${escape(error.message)}</p>`));
    }
  });
  process.stdout.write(`open ${shop}/ (its certificate is self-signed: your browser will warn)\n`);
};

main().catch((error) => {
  process.stderr.write(`${error.stderr || error.message}\n`);
  process.exit(1);
});
