// A till that may be killed at any time. It charges each intention at most once, and its record holds no card. Plain Node, no packages.
//
//   echo '{"cardNumber":"4242424242424242","expirationDate":"12/30","cvv":"123"}' | PAYFOLD_API_KEY=pc_… PORTAL=… node examples/no-card-on-disk/pay.mjs INTENTION CENTS
//
// PAYFOLD_URL   where the service is (http://127.0.0.1:3000)
// RECORD        the record (payments.ndjson): a line for each key and each outcome
//
// It exits with 0 if the intention is paid. 1: it is not paid, and a card may be asked for again. 2: the program must be started again.
import { appendFileSync, closeSync, existsSync, fsyncSync, openSync, readFileSync } from 'node:fs';
import { randomUUID } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';

const [intention, cents] = process.argv.slice(2);
const { PAYFOLD_URL = 'http://127.0.0.1:3000', PAYFOLD_API_KEY, PORTAL, RECORD = 'payments.ndjson' } = process.env;
const TIMEOUT_MS = 40_000;
const TRIES = 60;
/** The service forgets a key after 24 hours. Later, `absent` would not tell apart a key that never arrived from one that charged. */
const KEY_LIFE_MS = 20 * 3_600_000;

/** Writes a line, and waits until it is on the disk. It begins with a line end: a line before it may not be whole. */
const record = (line) => {
  const file = openSync(RECORD, 'a', 0o600);
  appendFileSync(file, `\n${JSON.stringify({ intention, at: Date.now(), ...line })}\n`);
  fsyncSync(file);
  closeSync(file);
};
const lines = (existsSync(RECORD) ? readFileSync(RECORD, 'utf8') : '').split('\n').flatMap((line) => {
  try {
    return [JSON.parse(line)];
  } catch {
    return [];
  }
});
const last = lines.findLast((line) => line.intention === intention);

const call = async (path, init = {}) => {
  const headers = { authorization: `ApiKey ${PAYFOLD_API_KEY}`, 'content-type': 'application/json', ...init.headers };
  const answer = await fetch(`${PAYFOLD_URL}/api/partner/v1/${path}`, { ...init, headers, signal: AbortSignal.timeout(TIMEOUT_MS) });
  return { status: answer.status, retryAfter: Number(answer.headers.get('retry-after') ?? 1), ...(await answer.json()) };
};

/** What a key has done: `paid`, `not_paid` (use a new key), or `absent` (use the same key). Waits while that is being decided. */
const outcomeOf = async (key) => {
  for (let tries = 0; tries < TRIES; tries++) {
    const { status, retryAfter, data } = await call(`payments?idempotencyKey=${encodeURIComponent(key)}`).catch(() => ({ status: 0, retryAfter: 1 }));
    const payment = data?.payments[0];
    if (status === 200 && data.keyState === 'absent') return 'absent';
    if (status === 200 && (!payment || ['failed', 'voided'].includes(payment.status))) return 'not_paid';
    if (status === 200 && !['pending', 'unknown'].includes(payment.status)) return 'paid';
    await sleep(retryAfter * 1_000);
  }
  return 'later';
};

const end = (outcome, key) => {
  if (last?.outcome !== outcome && ['paid', 'not_paid'].includes(outcome)) record({ key, outcome });
  console.log(`${intention}: ${outcome}`);
  process.exit({ paid: 0, not_paid: 1 }[outcome] ?? 2);
};

if (last?.outcome === 'paid') end('paid', last.key);
// The key of a request whose answer never came. Until its outcome is known, no other key may be used.
const open = last && !last.outcome ? last.key : null;
if (open && Date.now() - lines.find((line) => line.key === open).at > KEY_LIFE_MS) end('too old: look it up in the list of payments', open);
const before = open ? await outcomeOf(open) : 'absent';
if (before !== 'absent') end(before, open);

const card = JSON.parse(readFileSync(0, 'utf8'));
const key = open ?? `${intention}:${randomUUID()}`;
record({ key });
const lineItems = [{ amountCents: Number(cents), referenceId: intention }];
const body = JSON.stringify({ portalId: PORTAL, amountCents: Number(cents), lineItems, paymentMethod: { type: 'card', ...card } });
const answer = await call('payments', { method: 'POST', headers: { 'idempotency-key': key }, body }).catch((error) => error);
if (answer.status !== 200) console.error(answer.message);
end(await outcomeOf(key), key);
