/** Examples of the OpenAPI document: one for each operation, one for each status of an error. A spec validates them against their schemas. */

const PAYMENT_ID = '01a1fe14-55ea-7d72-9ef7-b67d168fcaac';
const PORTAL_ID = '08fa4a98-97e7-51b1-b2b2-fbf7c51b49b1';
const LINE_ID = '01a1fe14-55f3-737c-a731-d1b064f8a5ce';
const AT = '2026-11-21T12:28:28.063Z';

const PAYMENT = {
  id: PAYMENT_ID,
  status: 'succeeded',
  captureMode: 'sale',
  currency: 'USD',
  amountCents: 12_500,
  serviceFeeCents: 363,
  totalChargedCents: 12_863,
  refundedAmountCents: 0,
  remainingRefundableAmountCents: 12_863,
  authorizedAmountCents: 0,
  capturedAmountCents: 12_863,
  confirmationNumber: 'N53D-D87R-1V',
  portalId: PORTAL_ID,
  referenceId: 'CASE-7',
  payer: { firstName: 'Ada', email: 'ada@example.org', address: { zip: '97201', country: 'US' } },
  paymentMethod: { type: 'card', brand: 'visa', last4: '4242' },
  gateway: { transactionId: 'ch_NKQ93ACPVEQB1T4F', authCode: 'FKA8F9' },
  lineItems: [
    {
      id: LINE_ID,
      amountCents: 12_500,
      serviceFeeCents: 363,
      status: 'succeeded',
      refundedAmountCents: 0,
      remainingRefundableAmountCents: 12_863,
      referenceId: 'WATER-2041',
      description: 'Water bill',
      metadata: { parcel: '14-220' },
    },
  ],
  settlement: { status: 'unsettled', settledAt: null },
  expiresAt: null,
  capturedAt: AT,
  createdAt: AT,
  updatedAt: AT,
};

const ok = (data: object) => ({ success: true, data });

/** By `operationId`: the body of a request, and the answer 200. */
export const EXAMPLES: Readonly<Record<string, { readonly request?: object; readonly answer?: object }>> = {
  createPayment: {
    request: {
      portalId: PORTAL_ID,
      referenceId: 'CASE-7',
      amountCents: 12_500,
      paymentMethod: { type: 'card', cardNumber: '4242 4242 4242 4242', expirationDate: '12/30', cvv: '123' },
      lineItems: [{ amountCents: 12_500, referenceId: 'WATER-2041', description: 'Water bill', metadata: { parcel: '14-220' } }],
      payer: { firstName: 'Ada', email: 'ada@example.org', address: { zip: '97201' } },
    },
    answer: ok(PAYMENT),
  },
  getPayment: { answer: ok(PAYMENT) },
  listPayments: { answer: ok({ payments: [PAYMENT], nextCursor: null }) },
  refundPayment: {
    request: { amountCents: 2_500, reason: 'overcharged' },
    answer: ok({
      id: PAYMENT_ID,
      target: 'group',
      reversalType: 'void',
      amountCents: 2_500,
      currency: 'USD',
      reason: 'overcharged',
      status: 'succeeded',
      remainingRefundableAmountCents: 10_363,
      gateway: { transactionId: 'vd_3GN32BG39JE3GCRS' },
      createdAt: AT,
    }),
  },
  voidPayment: {
    request: { reason: 'entered twice' },
    answer: ok({
      id: PAYMENT_ID,
      amountCents: 12_863,
      currency: 'USD',
      reason: 'entered twice',
      status: 'voided',
      voidedLineItems: [{ id: LINE_ID, amountCents: 12_500 }],
      voidedServiceFeeCents: 363,
      gateway: { transactionId: 'vd_3GN32BG39JE3GCRS' },
      createdAt: AT,
    }),
  },
  quoteFee: { answer: ok({ portalId: PORTAL_ID, amountCents: 12_500, serviceFeeCents: 363, totalChargedCents: 12_863, currency: 'USD' }) },
  createAccessToken: {
    request: {},
    answer: ok({ accessToken: 'eyJhbGciOiJFZERTQSIs…', tokenType: 'Bearer', expiresIn: 3_600, expiresAt: '2026-11-21T13:28:28.000Z' }),
  },
  startCheckout: {
    request: {
      portal_id: PORTAL_ID,
      amount_cents: 12_500,
      line_items: [{ amount_cents: 12_500, reference_id: 'WATER-2041', description: 'Water bill' }],
      return_url: 'https://agency.example/pay/done',
      cancel_url: 'https://agency.example/pay/cancelled',
      reference_id: 'CASE-7',
    },
  },
};

const failed = (message: string, details?: object) => ({ success: false, message, ...(details && { details }) });
const invalid = (message: string) => failed(message, { code: 'VALIDATION_ERROR' });

/** Errors by status: the meaning, and an example. */
export const FAILURES: Readonly<Record<number, { readonly description: string; readonly example: object }>> = {
  400: {
    description: 'The request is malformed, or a field is invalid. Nothing was done.',
    example: failed('amountCents is required.', { code: 'VALIDATION_ERROR', errors: [{ field: 'amountCents', message: 'is required' }] }),
  },
  401: { description: 'The credentials are missing, wrong or expired.', example: failed('The credentials are missing or invalid.') },
  402: {
    description: 'The card was declined. The payment is recorded as `failed`.',
    example: failed('The card was declined.', { code: 'PAYMENT_DECLINED', id: PAYMENT_ID, declineCode: 'insufficient_funds' }),
  },
  403: {
    description: 'The portal, the case or the account does not allow it. Nothing was done.',
    example: failed('The portal is unknown or not granted.', { code: 'PORTAL_ACCESS_DENIED' }),
  },
  404: { description: 'There is no such payment.', example: failed('There is no such payment.', { code: 'PAYMENT_NOT_FOUND' }) },
  408: { description: 'The request took too long to arrive.', example: invalid('The request took too long.') },
  409: {
    description: 'The key is in use or stands for another request, or the case or card is held.',
    example: failed('The first request with this key is still running.', { code: 'IDEMPOTENCY_IN_PROGRESS' }),
  },
  413: { description: 'The body is too large.', example: invalid('The body is too large.') },
  422: {
    description: 'The state of the payment, or a rule of the portal, does not allow it.',
    example: failed('Refund exceeds remaining principal: 10000 cents remain.', { code: 'INVALID_STATE' }),
  },
  429: {
    description: 'Too many requests. Nothing was done. Send the same request again after `Retry-After`.',
    example: failed('Too many requests of this account are waiting.', { code: 'RATE_LIMITED' }),
  },
  431: { description: 'The headers are too large.', example: invalid('The headers are too large.') },
  500: {
    description: 'An unexpected error. The outcome is not known.',
    example: failed('An unexpected error occurred.', { code: 'INTERNAL_ERROR' }),
  },
  501: {
    description: 'The service does not offer this. Nothing was done.',
    example: failed('Only immediate sales are supported.', { code: 'CAPTURE_NOT_SUPPORTED' }),
  },
  502: {
    description: 'The gateway certainly did not do it; or, on `PARTIAL_REFUND_PENDING`, it did a part of it.',
    example: failed('The gateway failed. Nothing was charged.', { code: 'PAYMENT_GATEWAY_ERROR', id: PAYMENT_ID }),
  },
  503: {
    description: 'Not possible now. This request charged or returned nothing.',
    example: failed('Idempotency keys cannot be written now.', { code: 'IDEMPOTENCY_UNAVAILABLE' }),
  },
  504: {
    description: 'The outcome is not known. Read the payment before you charge again.',
    example: failed('The outcome is not known.', { code: 'PAYMENT_TIMEOUT', id: PAYMENT_ID }),
  },
};
