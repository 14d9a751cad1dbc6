/**
 * The order of the elements in each request, as the vendor's schema (AnetApiSchema.xsd) gives it. The vendor reads JSON by the same schema: an element
 * out of order is refused with E00003. `sdk.int.spec.ts` compares this order with the classes of the vendor's SDK.
 */

/** The children of an element in order. `true`: a value. */
export interface Elements {
  readonly [name: string]: Elements | true;
}

const AUTHENTICATION: Elements = {
  name: true,
  transactionKey: true,
  sessionToken: true,
  password: true,
  impersonationAuthentication: true,
  fingerPrint: true,
  clientKey: true,
  accessToken: true,
  mobileDeviceId: true,
};
const REQUEST: Elements = { merchantAuthentication: AUTHENTICATION, clientId: true, refId: true };
const ADDRESS: Elements = {
  firstName: true,
  lastName: true,
  company: true,
  address: true,
  city: true,
  state: true,
  zip: true,
  country: true,
  phoneNumber: true,
  faxNumber: true,
  email: true,
};
const AMOUNT: Elements = { amount: true, name: true, description: true };

export const TRANSACTION_REQUEST: Elements = {
  transactionType: true,
  amount: true,
  currencyCode: true,
  payment: {
    creditCard: {
      cardNumber: true,
      expirationDate: true,
      cardCode: true,
      isPaymentToken: true,
      cryptogram: true,
      tokenRequestorName: true,
      tokenRequestorId: true,
      tokenRequestorEci: true,
    },
  },
  profile: true,
  solution: true,
  callId: true,
  terminalNumber: true,
  authCode: true,
  refTransId: true,
  splitTenderId: true,
  order: { invoiceNumber: true, description: true },
  lineItems: true,
  tax: AMOUNT,
  duty: AMOUNT,
  shipping: AMOUNT,
  taxExempt: true,
  poNumber: true,
  customer: { type: true, id: true, email: true },
  billTo: ADDRESS,
  shipTo: ADDRESS,
  customerIP: true,
  cardholderAuthentication: true,
  retail: true,
  employeeId: true,
  transactionSettings: { setting: { settingName: true, settingValue: true } },
  userFields: true,
};

const PAGING: Elements = { limit: true, offset: true };
const SORTING: Elements = { orderBy: true, orderDescending: true };

/** The requests that the double answers. */
export const REQUESTS = {
  createTransactionRequest: { ...REQUEST, transactionRequest: TRANSACTION_REQUEST },
  updateHeldTransactionRequest: { ...REQUEST, heldTransactionRequest: { action: true, refTransId: true } },
  getTransactionDetailsRequest: { ...REQUEST, transId: true },
  getUnsettledTransactionListRequest: { ...REQUEST, status: true, sorting: SORTING, paging: PAGING },
  getSettledBatchListRequest: { ...REQUEST, includeStatistics: true, firstSettlementDate: true, lastSettlementDate: true },
  getTransactionListRequest: { ...REQUEST, batchId: true, sorting: SORTING, paging: PAGING },
  getMerchantDetailsRequest: REQUEST,
  authenticateTestRequest: REQUEST,
} as const satisfies Record<string, Elements>;

export type RequestName = keyof typeof REQUESTS;

const isObject = (value: unknown): value is Record<string, unknown> => value !== null && typeof value === 'object' && !Array.isArray(value);

/** The first element that is unknown or out of order. null: all elements are in order. A list is one element that repeats. */
export const outOfOrder = (value: unknown, elements: Elements | true): string | null => {
  if (elements === true) return null;
  for (const one of Array.isArray(value) ? (value as unknown[]) : [value]) {
    if (!isObject(one)) continue;
    const order = Object.keys(elements);
    let last = -1;
    for (const [name, child] of Object.entries(one)) {
      const place = order.indexOf(name);
      if (place <= last) return name;
      last = place;
      const below = outOfOrder(child, elements[name]!);
      if (below) return below;
    }
  }
  return null;
};
