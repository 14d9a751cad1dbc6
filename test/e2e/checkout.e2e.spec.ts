/** Hosted checkout over HTTP (specification, Hosted checkout; C58–C60, C66): intake, the session's states, paying, the way back. */
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { formOf, intakeOf, Payer, checkoutPortal, readReturn, type Portal, SHOP, textOf } from '../support/checkout.js';
import { type Service, startService, type TestAccount } from '../support/service.js';

let service: Service;
let account: TestAccount;
let portal: Portal;
const payer = () => new Payer(service.urls[0]!);

beforeAll(async () => {
  service = await startService();
  account = await service.account();
  portal = await checkoutPortal(service, account);
});
afterAll(() => service.stop());

test('smoke', async () => {
  const one = payer();
  const id = await one.begin(intakeOf(portal));
  const page = await one.open(`/checkout/${id}`);
  const paid = await one.submit(id, { ...formOf(page.text), card_number: '4242 4242 4242 4242', expiry: '12/30', security_code: '737' });
  const receipt = await one.open(paid.location);
  const done = await one.send(`/checkout/${id}/done`);
  expect([page.status, paid.status, receipt.status, done.status]).toEqual([200, 303, 200, 303]);
  expect(textOf(receipt.text)).toContain('Payment complete $128.63');
  expect(done.location).toContain(SHOP);
  expect(readReturn(portal.signingSecret, 'return', done.location)).toMatchObject({ right: true, result: 'paid' });
});
