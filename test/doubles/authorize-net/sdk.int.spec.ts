/**
 * The second oracle: the vendor's own SDK. It drives the double, and its classes give the order of elements. The SDK never calls back after a failed
 * connection, so each call has a time limit. Its log is off: it would hold whole requests.
 */
import { mkdtempSync, rmSync } from 'node:fs';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { requestsOf } from '../../../libs/gateways/authorize-net/requests.js';
import { Secret, type GatewayAccount } from '#payments';
import { type Elements, REQUESTS } from './elements.js';
import { type AuthorizeNetDouble, DEFAULT_MERCHANTS, startAuthorizeNetDouble } from './server.js';

/** The SDK has no types. */
type Loose = ReturnType<typeof JSON.parse>;
type Class = new (...given: unknown[]) => Record<string, (...given: unknown[]) => Loose>;
interface Sdk {
  readonly APIContracts: Readonly<Record<string, Class>>;
  readonly APIControllers: Readonly<Record<string, Class>>;
}
const { APIContracts: contracts, APIControllers: controllers } = createRequire(import.meta.url)('authorizenet') as Sdk;

const CALL_MS = 20_000;
/** The last cut-off was three hours ago, so that no test meets one by chance. */
const cutOff = { time: new Date(Date.now() - 3 * 3_600_000).toISOString().slice(11, 16), timeZone: 'UTC' };
const merchant = { ...DEFAULT_MERCHANTS[0]!, cutOff };
const CARD = '4111111111111111';

let folder: string;
let double: AuthorizeNetDouble;
beforeAll(async () => {
  folder = mkdtempSync(join(tmpdir(), 'payfold-double-'));
  double = await startAuthorizeNetDouble({ file: join(folder, 'double.jsonl') });
  double.vendor.setMerchant(merchant);
});
afterAll(async () => {
  await double.close();
  rmSync(folder, { recursive: true, force: true });
});

/** An object of the SDK with its properties set. */
const made = (name: string, properties: Record<string, unknown>): Loose => {
  const one = new contracts[name]!();
  for (const [property, value] of Object.entries(properties)) one[`set${property[0]!.toUpperCase()}${property.slice(1)}`]!(value);
  return one;
};

/** Runs a request through the SDK and returns its answer as an object of the SDK. */
const run = async (name: string, properties: Record<string, unknown>): Promise<Loose> => {
  const authentication = made('MerchantAuthenticationType', { name: merchant.apiLoginId, transactionKey: merchant.transactionKey });
  const request = made(`${name}Request`, { merchantAuthentication: authentication, ...properties });
  const controller = new controllers[`${name}Controller`]!(request.getJSON());
  controller.setEnvironment!(double.endpoint);
  const answer = await new Promise<unknown>((resolve, reject) => {
    const timer = setTimeout(() => reject(new Error(`the SDK did not call back for ${name}`)), CALL_MS);
    controller.execute!(() => (clearTimeout(timer), resolve(controller.getResponse!())));
  });
  return new contracts[`${name}Response`]!(answer);
};

const create = (properties: Record<string, unknown>, refId = 'SDK') =>
  run('CreateTransaction', { refId, transactionRequest: made('TransactionRequestType', properties) });
const cardOf = (cardNumber: string, expirationDate: string, cardCode?: string) =>
  made('PaymentType', { creditCard: made('CreditCardType', { cardNumber, expirationDate, ...(cardCode && { cardCode }) }) });
const window = made('ArrayOfSetting', { setting: [made('SettingType', { settingName: 'duplicateWindow', settingValue: '28800' })] });
const charge = async (invoiceNumber: string, amount = '10.01') =>
  create({
    transactionType: 'authCaptureTransaction',
    amount,
    payment: cardOf(CARD, '2031-01', '900'),
    order: made('OrderType', { invoiceNumber }),
    transactionSettings: window,
  });

describe('the SDK drives the double', () => {
  test('charge, duplicate, void', async () => {
    const approved = await charge('SDK-1');
    expect(approved.getMessages().getResultCode()).toBe('Ok');
    expect(approved.getRefId()).toBe('SDK');
    const response = approved.getTransactionResponse();
    expect([response.getResponseCode(), response.getAccountNumber(), response.getAccountType(), response.getCvvResultCode()]).toEqual([
      '1',
      'XXXX1111',
      'Visa',
      'M',
    ]);
    expect(response.getMessages().getMessage()[0].getCode()).toBe('1');
    const id = response.getTransId();

    const again = (await charge('SDK-1')).getTransactionResponse();
    expect([again.getResponseCode(), again.getErrors().getError()[0].getErrorCode(), again.getTransId()]).toEqual(['3', '11', id]);

    const voided = (await create({ transactionType: 'voidTransaction', refTransId: id })).getTransactionResponse();
    expect([voided.getResponseCode(), voided.getTransId()]).toEqual(['1', id]);
    const twice = (await create({ transactionType: 'voidTransaction', refTransId: id })).getTransactionResponse();
    expect(twice.getMessages().getMessage()[0].getCode()).toBe('310');
    const none = (await create({ transactionType: 'voidTransaction', refTransId: '999' })).getTransactionResponse();
    expect(none.getErrors().getError()[0].getErrorCode()).toBe('16');
  });

  test('lists, batches, refund', async () => {
    const ids = [];
    for (const n of [1, 2, 3]) ids.push((await charge(`SDK-L${n}`)).getTransactionResponse().getTransId());
    const sorting = made('TransactionListSorting', { orderBy: 'id', orderDescending: true });
    const unsettled = await run('GetUnsettledTransactionList', { sorting, paging: made('Paging', { limit: 2, offset: 1 }) });
    expect(
      unsettled
        .getTransactions()
        .getTransaction()
        .map((one: Loose) => one.getTransId()),
    ).toEqual([ids[2], ids[1]]);
    const next = await run('GetUnsettledTransactionList', { sorting, paging: made('Paging', { limit: 2, offset: 2 }) });
    expect(next.getTransactions().getTransaction()[0].getTransId()).toBe(ids[0]);

    const early = (
      await create({ transactionType: 'refundTransaction', amount: '4.00', payment: cardOf('1111', 'XXXX'), refTransId: ids[0] })
    ).getTransactionResponse();
    expect(early.getErrors().getError()[0].getErrorCode()).toBe('54');

    double.vendor.closeNow(merchant.apiLoginId);
    const batches = await run('GetSettledBatchList', { includeStatistics: true });
    const [batch] = batches.getBatchList().getBatch();
    expect([batch.getSettlementState(), batch.getPaymentMethod()]).toEqual(['settledSuccessfully', 'creditCard']);
    expect(batch.getStatistics().getStatistic()[0].getChargeCount()).toBe(3);
    const lines = await run('GetTransactionList', { batchId: batch.getBatchId(), paging: made('Paging', { limit: 1000, offset: 1 }) });
    expect(lines.getTotalNumInResultSet()).toBe(4);
    expect(
      lines
        .getTransactions()
        .getTransaction()
        .map((one: Loose) => one.getTransactionStatus())
        .sort(),
    ).toEqual(['settledSuccessfully', 'settledSuccessfully', 'settledSuccessfully', 'voided']);

    const refund = (
      await create({ transactionType: 'refundTransaction', amount: '4.00', payment: cardOf('1111', 'XXXX'), refTransId: ids[0] })
    ).getTransactionResponse();
    expect(refund.getResponseCode()).toBe('1');
    const details = (await run('GetTransactionDetails', { transId: refund.getTransId() })).getTransaction();
    expect([details.getTransactionStatus(), details.getRefTransId(), details.getAuthAmount()]).toEqual(['refundPendingSettlement', ids[0], 4]);
    expect((await run('GetTransactionDetails', { transId: '1' })).getMessages().getMessage()[0].getCode()).toBe('E00040');
    expect((await run('GetMerchantDetails', {})).getGatewayId()).toBe(merchant.gatewayId);
  });

  test('a held transaction is declined', async () => {
    double.vendor.setFault({ name: 'held', op: 'charge', ref: null, times: 1, ms: 0, code: 4, reason: 252 });
    const held = (await charge('SDK-H')).getTransactionResponse();
    expect(held.getResponseCode()).toBe('4');
    const decided = await run('UpdateHeldTransaction', {
      heldTransactionRequest: made('HeldTransactionRequestType', { action: 'decline', refTransId: held.getTransId() }),
    });
    expect(decided.getTransactionResponse().getResponseCode()).toBe('1');
    const details = (await run('GetTransactionDetails', { transId: held.getTransId() })).getTransaction();
    expect(details.getTransactionStatus()).toBe('voided');
  });
});

describe('the order of elements', () => {
  /** The properties of a class of the SDK, in the order of the schema. */
  const orderOf = (name: string): string[] => Object.keys(new contracts[name]!());
  const CLASSES: readonly [string, Elements | true | undefined][] = [
    ...Object.entries(REQUESTS).map(([name, elements]): [string, Elements] => [name[0]!.toUpperCase() + name.slice(1), elements]),
    ['MerchantAuthenticationType', REQUESTS.authenticateTestRequest.merchantAuthentication],
    ['TransactionRequestType', REQUESTS.createTransactionRequest.transactionRequest],
    ['HeldTransactionRequestType', REQUESTS.updateHeldTransactionRequest.heldTransactionRequest],
    ['Paging', REQUESTS.getTransactionListRequest.paging],
    ['TransactionListSorting', REQUESTS.getTransactionListRequest.sorting],
    ...(
      [
        ['PaymentType', 'payment'],
        ['OrderType', 'order'],
        ['CustomerDataType', 'customer'],
        ['CustomerAddressType', 'billTo'],
        ['ArrayOfSetting', 'transactionSettings'],
        ['ExtendedAmountType', 'tax'],
      ] as const
    ).map(([name, element]): [string, Elements | true | undefined] => [name, REQUESTS.createTransactionRequest.transactionRequest[element]]),
  ];

  test.each(CLASSES)('%s: the double has the order of the SDK', (name, elements) => {
    const known = Object.keys(elements as Elements);
    expect(known.length).toBeGreaterThan(0);
    expect(orderOf(name).filter((property) => known.includes(property))).toEqual(known);
  });

  test('the double knows each class of a card and of a setting', () => {
    const { payment, transactionSettings } = REQUESTS.createTransactionRequest.transactionRequest as Loose;
    expect(orderOf('CreditCardType').filter((name) => name in payment.creditCard)).toEqual(Object.keys(payment.creditCard));
    expect(orderOf('SettingType')).toEqual(Object.keys(transactionSettings.setting));
  });

  test('the requests of the adapter have the order of the SDK', () => {
    const requests = requestsOf({ apiLoginId: 'login', transactionKey: 'key' });
    const account: GatewayAccount = { gateway: 'authorize-net', merchantAccount: 'm', credentialsRef: 'c', environment: 'sandbox' };
    const base = { ref: 'R0000000000000000001', account, leg: 'principal', begunAt: '2026-01-01T00:00:00.000Z' } as const;
    const instrument = { type: 'card', number: new Secret(CARD), expiry: { month: 1, year: 2031 }, cvv: new Secret('900') } as const;
    const payer = { firstName: 'Ada', lastName: 'L', address: { line1: '1 Main St', city: 'Town', state: 'CA', zip: '90001', country: 'US' } };
    const bodies = [
      requests.charge({ ...base, amountCents: 1, instrument, payer, payerIp: '192.0.2.1' }, instrument),
      requests.void({ ...base, chargeTransactionId: '1', askedBy: 'void' }),
      requests.refund({ ...base, chargeTransactionId: '1', amountCents: 1, last4: '1111' }, '1111'),
      requests.declineHeld(base.ref, '1'),
      requests.details('1'),
      requests.unsettled(1),
      requests.batches(0, 1),
      requests.batch('1', 1),
      requests.merchant(),
    ];
    const CLASS_OF: Readonly<Record<string, string>> = {
      merchantAuthentication: 'MerchantAuthenticationType',
      transactionRequest: 'TransactionRequestType',
      heldTransactionRequest: 'HeldTransactionRequestType',
      payment: 'PaymentType',
      creditCard: 'CreditCardType',
      order: 'OrderType',
      billTo: 'CustomerAddressType',
      transactionSettings: 'ArrayOfSetting',
      setting: 'SettingType',
      paging: 'Paging',
      sorting: 'TransactionListSorting',
    };
    const check = (value: unknown, className: string): void => {
      for (const one of Array.isArray(value) ? value : [value]) {
        const names = Object.keys(one);
        expect(orderOf(className).filter((name) => names.includes(name))).toEqual(names);
        for (const name of names) if (typeof one[name] === 'object') check(one[name], CLASS_OF[name]!);
      }
    };
    for (const body of bodies) {
      const [[name, fields]] = Object.entries(JSON.parse(body)) as [[string, unknown]];
      check(fields, name[0]!.toUpperCase() + name.slice(1));
    }
  });
});
