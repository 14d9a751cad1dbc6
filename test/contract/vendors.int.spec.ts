/** The contract of every gateway, against the doubles of both processors, over real sockets. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect } from '@jest/globals';
import { type AuthorizeNetOptions, createAuthorizeNetGateway, createStripeGateway } from '#gateways';
import { type GatewayAccount, type PaymentInstrument, Secret } from '#payments';
import { DEFAULT_MERCHANTS, startAuthorizeNetDouble } from '../doubles/authorize-net/server.js';
import { controlOf } from '../doubles/stripe/control.js';
import { startStripeDouble } from '../doubles/stripe/server.js';
import { MovableClock } from '../support/clock.js';
import { gatewayContract } from './gateway.js';

const DAY_MS = 86_400_000;
const NOWHERE = 'http://127.0.0.1:9';
const accountOf = (gateway: string, merchantAccount: string): GatewayAccount => ({
  gateway,
  merchantAccount,
  credentialsRef: `merchant-account:${merchantAccount}`,
  environment: 'sandbox',
});
const folderOf = () => {
  const folder = mkdtempSync(join(tmpdir(), 'payfold-contract-'));
  return { file: join(folder, 'double.jsonl'), remove: () => rmSync(folder, { recursive: true }) };
};
/** Waits of the adapters end at once. Business time moves only by `advance`. */
class HastyClock extends MovableClock {
  override sleep(): Promise<void> {
    return new Promise((resolve) => void setTimeout(resolve, 1));
  }
}

// Its last cut-off was three hours ago, so that no test meets one by chance.
const cutOff = { time: new Date(Date.now() - 3 * 3_600_000).toISOString().slice(11, 16), timeZone: 'UTC' };
const [SHOP, OTHER] = DEFAULT_MERCHANTS.map((merchant) => ({ ...merchant, cutOff })) as [
  (typeof DEFAULT_MERCHANTS)[0],
  (typeof DEFAULT_MERCHANTS)[0],
];
const card = (number: string): PaymentInstrument => ({
  type: 'card',
  number: new Secret(number),
  expiry: { month: 1, year: 2041 },
  cvv: new Secret('900'),
});
const authorizeNet = (endpoint: string, merchant: typeof SHOP, clock: AuthorizeNetOptions['clock']) =>
  createAuthorizeNetGateway({
    endpoint,
    account: accountOf('authorize-net', merchant.apiLoginId),
    clock,
    credentials: { apiLoginId: merchant.apiLoginId, transactionKey: merchant.transactionKey },
    cutOff,
    listGapMs: 0,
  });

const AUTHORIZE_NET = { holds: true, namesTransactions: true, voidsWhole: true };
gatewayContract('authorize-net, against its double', authorizeNet(NOWHERE, SHOP, new MovableClock()).capabilities, AUTHORIZE_NET, async () => {
  const { file, remove } = folderOf();
  const clock = new MovableClock();
  const double = await startAuthorizeNetDouble({ file });
  for (const merchant of [SHOP, OTHER]) double.vendor.setMerchant(merchant);
  // Somebody else's transactions that never come into a batch. They must not keep `finalize` from an answer.
  for (const status of ['auth_only', 'held']) {
    const body = JSON.stringify({ merchant: SHOP.apiLoginId, status, submitMs: clock.now() - 2 * DAY_MS });
    expect((await fetch(`${double.url}/_double/foreign`, { method: 'POST', body })).status).toBe(200);
  }
  const foreign = () => double.vendor.unsettled(SHOP.apiLoginId).flatMap(({ ref, status }) => (ref === 'INV-1' ? [status] : []));
  const [gateway, another] = [authorizeNet(double.endpoint, SHOP, clock), authorizeNet(double.endpoint, OTHER, clock)];
  return {
    gateway,
    another,
    account: accountOf('authorize-net', SHOP.apiLoginId),
    approved: () => card('4111111111111111'),
    declined: () => card('4000000000000002'),
    held: () => {
      double.vendor.setFault({ name: 'held', op: 'charge', ref: null, times: 1, ms: 0, code: 4, reason: 252 });
      return card('4111111111111111');
    },
    last4: '1111',
    now: () => clock.now(),
    advance: async (ms) => {
      clock.advance(ms);
      double.vendor.moveTo(double.vendor.ahead + ms);
    },
    passBatch: async () => double.vendor.closeNow(SHOP.apiLoginId),
    close: async () => {
      gateway.close();
      another.close();
      const stayed = foreign();
      await double.close();
      remove();
      expect(stayed).toEqual(['authorizedPendingCapture', 'FDSPendingReview']);
    },
  };
});

const stripe = (endpoint: string, name: 'one' | 'two', clock: AuthorizeNetOptions['clock']) =>
  createStripeGateway({ endpoint, account: accountOf('stripe', name), clock, credentials: { secretKey: `sk_test_double_${name}_0001` } });
const token = (text: string): PaymentInstrument => ({ type: 'card_token', token: new Secret(text) });

gatewayContract('stripe, against its double', stripe(NOWHERE, 'one', new MovableClock()).capabilities, { namesTransactions: true }, async () => {
  const { file, remove } = folderOf();
  const clock = new HastyClock();
  const double = await startStripeDouble({ file });
  const control = controlOf(double.url);
  const [gateway, another] = [stripe(double.url, 'one', clock), stripe(double.url, 'two', clock)];
  return {
    gateway,
    another,
    account: accountOf('stripe', 'one'),
    approved: () => token('pm_card_visa'),
    declined: () => token('pm_card_chargeDeclined'),
    last4: '4242',
    now: () => clock.now(),
    advance: async (ms) => {
      clock.advance(ms);
      await control.advance(ms);
    },
    passBatch: () => control.payOut(),
    close: async () => {
      gateway.close();
      another.close();
      await double.close();
      remove();
    },
  };
});
