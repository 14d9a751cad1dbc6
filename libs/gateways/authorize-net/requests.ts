/**
 * The requests as the vendor's schema has them. The order of the fields matters: the vendor refuses an element out of order with E00003, also in
 * JSON.
 */
import { decimal } from '#kernel';
import type { PaymentInstrument, RefundCall, VoidCall, ChargeCall } from '#payments';

export interface Credentials {
  readonly apiLoginId: string;
  readonly transactionKey: string;
}

/**
 * The vendor refuses a second transaction of equal data within this many seconds: its greatest value. The data includes our reference, as the invoice
 * number. So this is one check per reference.
 */
const DUPLICATE_WINDOW_S = '28800';

const SETTINGS = {
  setting: [
    { settingName: 'allowPartialAuth', settingValue: 'false' },
    { settingName: 'duplicateWindow', settingValue: DUPLICATE_WINDOW_S },
    { settingName: 'emailCustomer', settingValue: 'false' },
  ],
};
const REFUND_SETTINGS = { setting: [{ settingName: 'duplicateWindow', settingValue: DUPLICATE_WINDOW_S }] };

/** An account may have several currencies. Without this, its default one would count. */
const CURRENCY = 'USD';

/** Transactions of one page: the vendor's maximum. */
export const PAGE_LIMIT = 1_000;

/** The lengths that the vendor allows. */
const LENGTHS = { firstName: 50, lastName: 50, address: 60, city: 40, state: 40, zip: 20, country: 60 } as const;

/** Characters that XML 1.0 cannot hold. The vendor reads JSON as XML, so one of them makes the whole request unreadable (E00003). */
const NO_XML = /[^\t\n\r\u{20}-\u{d7ff}\u{e000}-\u{fffd}\u{10000}-\u{10ffff}]/gu;

const cut = (text: string, length: number): string => Array.from(text.replace(NO_XML, '').trim()).slice(0, length).join('');

const present = (fields: Record<string, string | undefined>): Record<string, string> =>
  Object.fromEntries(Object.entries(fields).filter((entry): entry is [string, string] => entry[1] !== undefined && entry[1] !== ''));

/** The payer's name and address, for the vendor's checks. null: there is nothing to send. The e-mail address and the telephone number are not sent. */
const billTo = (payer: ChargeCall['payer']): Record<string, string> | null => {
  const { firstName, lastName, address = {} } = payer ?? {};
  const street = [address.line1, address.line2].filter((line) => line !== undefined && line !== '').join(' ');
  const { city, state, zip, country } = address;
  const fields = { firstName, lastName, address: street, city, state, zip, country };
  const texts = Object.entries(fields).map(([name, text]) => [name, text && cut(text, LENGTHS[name as keyof typeof LENGTHS])]);
  const given = present(Object.fromEntries(texts) as Record<string, string | undefined>);
  return Object.keys(given).length === 0 ? null : given;
};

const cardFields = ({ number, expiry, cvv }: Extract<PaymentInstrument, { type: 'card' }>) => ({
  cardNumber: number.reveal(),
  expirationDate: `${expiry.year}-${String(expiry.month).padStart(2, '0')}`,
  ...(cvv.reveal() !== '' && { cardCode: cvv.reveal() }),
});

/** The requests of one merchant account. Each is the text of a body. */
export const requestsOf = ({ apiLoginId, transactionKey }: Credentials) => {
  const request = (name: string, ref: string | null, fields: object): string =>
    JSON.stringify({ [name]: { merchantAuthentication: { name: apiLoginId, transactionKey }, ...(ref !== null && { refId: ref }), ...fields } });
  const paging = (page: number, orderBy: 'id' | 'submitTimeUTC', orderDescending: boolean, limit = PAGE_LIMIT) => ({
    sorting: { orderBy, orderDescending },
    paging: { limit, offset: page },
  });
  return {
    charge({ ref, amountCents, payer, payerIp }: ChargeCall, card: Extract<PaymentInstrument, { type: 'card' }>): string {
      const address = billTo(payer);
      return request('createTransactionRequest', ref, {
        transactionRequest: {
          transactionType: 'authCaptureTransaction',
          amount: decimal(amountCents),
          currencyCode: CURRENCY,
          payment: { creditCard: cardFields(card) },
          order: { invoiceNumber: ref },
          ...(address && { billTo: address }),
          ...(payerIp !== undefined && { customerIP: payerIp }),
          transactionSettings: SETTINGS,
        },
      });
    },
    void: ({ ref, chargeTransactionId }: VoidCall): string =>
      request('createTransactionRequest', ref, {
        transactionRequest: { transactionType: 'voidTransaction', refTransId: chargeTransactionId },
      }),
    refund: ({ ref, amountCents, chargeTransactionId }: RefundCall, last4: string): string =>
      request('createTransactionRequest', ref, {
        transactionRequest: {
          transactionType: 'refundTransaction',
          amount: decimal(amountCents),
          currencyCode: CURRENCY,
          payment: { creditCard: { cardNumber: last4, expirationDate: 'XXXX' } },
          refTransId: chargeTransactionId,
          order: { invoiceNumber: ref },
          transactionSettings: REFUND_SETTINGS,
        },
      }),
    declineHeld: (ref: string, transactionId: string): string =>
      request('updateHeldTransactionRequest', ref, { heldTransactionRequest: { action: 'decline', refTransId: transactionId } }),
    details: (transactionId: string): string => request('getTransactionDetailsRequest', null, { transId: transactionId }),
    /** One page of the unsettled transactions, the newest first. Pages are counted from 1. */
    unsettled: (page: number, limit?: number): string =>
      request('getUnsettledTransactionListRequest', null, paging(page, 'submitTimeUTC', true, limit)),
    /** Batches settled between two times of at most 31 days. */
    batches: (fromMs: number, toMs: number): string =>
      request('getSettledBatchListRequest', null, {
        includeStatistics: true,
        firstSettlementDate: seconds(fromMs),
        lastSettlementDate: seconds(toMs),
      }),
    batch: (batchId: string, page: number): string => request('getTransactionListRequest', null, { batchId, ...paging(page, 'id', false) }),
    merchant: (): string => request('getMerchantDetailsRequest', null, {}),
  };
};
export type Requests = ReturnType<typeof requestsOf>;

const seconds = (ms: number): string => `${new Date(ms).toISOString().slice(0, 19)}Z`;
