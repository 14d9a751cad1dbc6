// Verifies an address that Payfold sent a payer back to, and signs launch links. Plain Node, no packages. As a command:
//   PAYFOLD_SIGNING_SECRET=psec_… node verify.mjs return 'https://agency.example/pay/done?…' [NOW]
// return or cancel: the kind of the address. NOW: Unix seconds instead of the clock, to try the test vectors of the guide.
import { createHmac, timingSafeEqual } from 'node:crypto';
import { pathToFileURL } from 'node:url';

const TOLERANCE_SECONDS = 300;

const encode = (text) => encodeURIComponent(text).replace(/[!'()*]/g, (c) => `%${c.charCodeAt(0).toString(16).toUpperCase()}`);
const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);

/** `kind`: return, cancel, link or intake. `pairs`: [name, value][], decoded; `sig` among them is left out. */
export const sign = (secret, kind, address, pairs) => {
  const { origin, pathname } = new URL(address);
  const query = pairs
    .filter(([name]) => name !== 'sig')
    .map(([name, value]) => [encode(name), encode(value)])
    .sort(([a, x], [b, y]) => compare(a, b) || compare(x, y))
    .map(([name, value]) => `${name}=${value}`)
    .join('&');
  return createHmac('sha256', secret).update(`v1\n${kind}\n${origin}${pathname}\n${query}`).digest('hex');
};

/** The parameters of the address, or an Error that names the fault. `secrets`: one, or two while you change it. */
export const verify = (secrets, kind, address, nowSeconds = Date.now() / 1000) => {
  const url = new URL(address);
  const pairs = [...url.searchParams];
  const given = Buffer.from(url.searchParams.get('sig') ?? '', 'hex');
  const right = secrets.some((secret) => {
    const expected = Buffer.from(sign(secret, kind, address, pairs), 'hex');
    return given.length === expected.length && timingSafeEqual(given, expected);
  });
  if (!right) throw new Error('the signature does not match');
  if (Math.abs(nowSeconds - Number(url.searchParams.get('t'))) > TOLERANCE_SECONDS) throw new Error('the signature is too old');
  return Object.fromEntries(pairs);
};

if (process.argv[1] && import.meta.url === pathToFileURL(process.argv[1]).href) {
  const [, , kind, address, now] = process.argv;
  if (!address || !process.env.PAYFOLD_SIGNING_SECRET) {
    console.error("PAYFOLD_SIGNING_SECRET=psec_… node verify.mjs return|cancel 'https://agency.example/pay/done?…' [NOW]");
    process.exit(2);
  }
  try {
    console.log(JSON.stringify(verify([process.env.PAYFOLD_SIGNING_SECRET], kind, address, now === undefined ? undefined : Number(now))));
  } catch (error) {
    console.error(error.message);
    process.exitCode = 1;
  }
}
