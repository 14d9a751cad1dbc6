// Drives the adapters of Authorize.Net and Stripe outside the service: charge, look up, take back, finalize, and read a settlement. Plain Node.
//
//   npm run build
//   node examples/processors/drive.mjs
//
// It starts a double of each vendor as a process of its own, and ends it. No money moves. Each line says what was asked and what the vendor answered.
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { randomInt } from 'node:crypto';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createAuthorizeNetGateway, createStripeGateway, Secret } from '../../dist/libs/gateways/index.js';
import { systemClock } from '../../dist/libs/kernel/index.js';

const folder = await mkdtemp(join(tmpdir(), 'payfold-processors-'));
const running = [];

/** Starts a double, and returns its address. */
const startDouble = async (name) => {
  const main = new URL(`../../dist/test/doubles/${name}/main.js`, import.meta.url).pathname;
  const double = spawn(process.execPath, [main, '--file', join(folder, `${name}.jsonl`)], { stdio: ['ignore', 'pipe', 'inherit'] });
  running.push(double);
  const line = await new Promise((resolve, reject) => {
    double.once('error', reject);
    double.once('exit', (code) => reject(new Error(`the double of ${name} ended with ${code}`)));
    double.stdout.once('data', (bytes) => resolve(String(bytes)));
  });
  return JSON.parse(line).url;
};
/** Asks a double for what only the vendor itself can do. */
const control = async (url, path) => {
  const answer = await fetch(`${url}/_double${path}`, { method: 'POST', body: '{}' });
  assert.ok(answer.ok, `${path} answered ${answer.status}`);
};

/** A reference: 20 characters of Crockford's base 32. */
const newRef = () => Array.from({ length: 20 }, () => '0123456789ABCDEFGHJKMNPQRSTVWXYZ'[randomInt(32)]).join('');
const soon = () => AbortSignal.timeout(20_000);
const accountOf = (gateway) => ({ gateway, merchantAccount: 'example', credentialsRef: 'merchant-account:example', environment: 'sandbox' });

/** Drives one adapter. `undo`: how it takes back a charge that is not settled. `finalized`: what it says of such a charge then. `closeBatch`: lets the vendor settle. */
const drive = async (name, gateway, { instrument, last4, undo, finalized, neverSent, closeBatch }) => {
  const say = (what, result) => process.stdout.write(`${name}: ${what}: ${JSON.stringify(result)}\n`);
  const account = accountOf(name);
  const base = (ref = newRef()) => ({ ref, account, leg: 'combined', begunAt: new Date(systemClock.now()).toISOString() });
  const about = (call, op, amountCents, chargeTransactionId = null) => ({ ...call, op, amountCents, chargeTransactionId, last4 });
  const charge = async (call, amountCents) => {
    const outcome = await gateway.charge({ ...call, amountCents, instrument }, soon());
    assert.equal(outcome.kind, 'approved', JSON.stringify(outcome));
    return outcome.txn.transactionId;
  };

  const [first, second] = [base(), base()];
  const firstId = await charge(first, 1_250);
  say('charged', firstId);

  const found = await gateway.lookup(about(first, 'charge', 1_250), soon());
  say('looked up', found);
  assert.deepEqual([found.found, found.transactionId, found.amountCents], [true, firstId, 1_250]);

  const undone = await gateway[undo]({ ...base(), chargeTransactionId: firstId, amountCents: 1_250, askedBy: 'void', last4 }, soon());
  say(undo, undone);
  assert.equal(undone.kind, 'approved');

  const ended = await gateway.finalize(about(first, 'charge', 1_250), soon());
  say('finalized the charge', ended);
  assert.equal(ended.kind, finalized);
  const never = await gateway.finalize(about(base(), 'charge', 1_250), soon());
  say('finalized a reference that was never sent', never);
  assert.equal(never.kind, neverSent);

  const secondId = await charge(second, 4_000);
  say('charged', secondId);
  await closeBatch();
  const lines = [];
  for await (const batch of gateway.settlements(null, soon())) for await (const line of batch.lines) lines.push(line);
  const sale = lines.find((line) => line.type === 'sale' && line.ref === second.ref);
  say('settled', sale);
  assert.deepEqual([sale?.transactionId, sale?.grossCents], [secondId, 4_000]);
  gateway.close();
};

const log = (message, fields) => process.stderr.write(`${message} ${JSON.stringify(fields)}\n`);
try {
  const authorizeNet = await startDouble('authorize-net');
  await drive(
    'authorize-net',
    createAuthorizeNetGateway({
      endpoint: `${authorizeNet}/xml/v1/request.api`,
      account: accountOf('authorize-net'),
      clock: systemClock,
      credentials: { apiLoginId: 'login-one', transactionKey: 'key-of-one-0001' },
      cutOff: { time: '16:00', timeZone: 'America/Los_Angeles' },
      log,
    }),
    {
      instrument: { type: 'card', number: new Secret('4111111111111111'), expiry: { month: 12, year: 2040 }, cvv: new Secret('900') },
      last4: '1111',
      undo: 'void',
      finalized: 'undone',
      // A charge that was lost on its way shows only when its batch has closed. The answer names the time.
      neverSent: 'cannot_tell',
      closeBatch: () => control(authorizeNet, '/batch'),
    },
  );

  const stripe = await startDouble('stripe');
  await drive(
    'stripe',
    createStripeGateway({
      endpoint: stripe,
      account: accountOf('stripe'),
      clock: systemClock,
      credentials: { secretKey: 'sk_test_double_one_0001' },
      log,
    }),
    {
      instrument: { type: 'card_token', token: new Secret('pm_card_visa') },
      last4: '4242',
      undo: 'refund',
      finalized: 'executed',
      neverSent: 'never',
      closeBatch: () => control(stripe, '/payouts'),
    },
  );
} finally {
  for (const double of running) {
    double.removeAllListeners('exit');
    double.kill();
  }
  await rm(folder, { recursive: true, force: true });
}
