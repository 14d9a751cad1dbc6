/**
 * The API of the double: one address, one request in JSON, one answer in JSON with a byte order mark. README.md names the source of each answer's
 * shape.
 */
import { outOfOrder, REQUESTS, type RequestName } from './elements.js';
import type { Fault, FaultName, Operation } from './faults.js';
import { type Batch, HELD_BY, type Merchant, type NewTransaction, REVIEW, type Status, type Transaction, type Vendor } from './vendor.js';

type Fields = Readonly<Record<string, unknown>>;

const DAY_MS = 86_400_000;
const MAX_PAGE = 1_000;
/** The vendor compares within two minutes if a request names no window. */
const DEFAULT_WINDOW_S = 120;
const MAX_WINDOW_S = 28_800;

/** The texts of the vendor's codes. */
const TEXTS: Readonly<Record<string, string>> = {
  I00001: 'Successful.',
  I00004: 'No records found.',
  E00001: 'An error occurred during processing. Please try again.',
  E00104: 'Server in maintenance',
  E00003: 'The element has an invalid child element.',
  E00007: 'User authentication failed due to invalid authentication values.',
  E00011: 'Access denied. You do not have permissions to call the Transaction Details API.',
  E00013: 'The field is invalid.',
  E00027: 'The transaction was unsuccessful.',
  E00040: 'The record cannot be found.',
};
const REASONS: Readonly<Record<number, string>> = {
  1: 'This transaction has been approved.',
  2: 'This transaction has been declined.',
  6: 'The credit card number is invalid.',
  8: 'The credit card has expired.',
  11: 'A duplicate transaction has been submitted.',
  16: 'The transaction cannot be found.',
  27: 'The transaction has been declined because of an AVS mismatch.',
  54: 'The referenced transaction does not meet the criteria for issuing a credit.',
  55: 'The sum of credits against the referenced transaction would exceed original debit amount.',
  252: 'Your order has been received. Thank you for your business!',
  253: 'Your order has been received. Thank you for your business!',
  310: 'This transaction has already been voided.',
};
const reasonText = (reason: number): string => REASONS[reason] ?? `Reason ${reason}.`;

/** Triggers of the vendor's testing guide. */
const AVS_BY_ZIP: Readonly<Record<string, string>> = {
  '46201': 'A',
  '46203': 'E',
  '46204': 'G',
  '46205': 'N',
  '46206': 'P',
  '46207': 'R',
  '46208': 'S',
  '46209': 'U',
  '46211': 'W',
  '46214': 'X',
  '46217': 'Z',
};
const CVV_BY_CODE: Readonly<Record<string, string>> = { '900': 'M', '901': 'N', '902': 'S', '903': 'U', '904': 'P' };
const DECLINE_ZIP = '46282';
/** The double's own trigger: this card is always declined. */
const DECLINED_CARD = '4000000000000002';

const BRANDS: readonly [RegExp, string][] = [
  [/^4/, 'Visa'],
  [/^(5[1-5]|2[2-7])/, 'MasterCard'],
  [/^3[47]/, 'AmericanExpress'],
  [/^(6011|64[4-9]|65)/, 'Discover'],
  [/^(30|36|38)/, 'DinersClub'],
  [/^35/, 'JCB'],
];
const brandOf = (number: string): string => BRANDS.find(([begins]) => begins.test(number))?.[1] ?? 'Visa';

const isFields = (value: unknown): value is Fields => value !== null && typeof value === 'object' && !Array.isArray(value);
const textOf = (value: unknown): string => (typeof value === 'string' ? value : typeof value === 'number' ? String(value) : '');
const within = (fields: unknown, ...path: string[]): unknown =>
  path.reduce<unknown>((value, name) => (isFields(value) ? value[name] : undefined), fields);

/** Dollars as text, to cents. null: no amount. */
const toCents = (value: unknown): number | null => {
  const match = /^(\d{1,13})(?:\.(\d{1,4}))?$/.exec(textOf(value));
  if (!match) return null;
  const fraction = (match[2] ?? '').padEnd(4, '0');
  return fraction.endsWith('00') ? Number(match[1]) * 100 + Number(fraction.slice(0, 2)) : null;
};
/** Cents as a number of dollars, as JSON of the vendor has it. */
const dollars = (cents: number): number => Number(`${Math.trunc(cents / 100)}.${String(cents % 100).padStart(2, '0')}`);
const dollarsText = (cents: number): string => dollars(cents).toFixed(2);

const passesLuhn = (number: string): boolean =>
  [...number].reverse().reduce((sum, digit, index) => {
    const value = Number(digit) * (index % 2 === 1 ? 2 : 1);
    return sum + (value > 9 ? value - 9 : value);
  }, 0) % 10 === 0; // prettier-ignore

/** Time in UTC. */
const utc = (ms: number): string => `${new Date(ms).toISOString().slice(0, 19)}Z`;
const local = (ms: number, { cutOff }: Merchant): string => new Date(ms).toLocaleString('sv-SE', { timeZone: cutOff.timeZone }).replace(' ', 'T');

const messages = (code: string) => ({ resultCode: code.startsWith('E') ? 'Error' : 'Ok', message: [{ code, text: TEXTS[code] ?? code }] });

export interface Call {
  readonly name: RequestName;
  readonly op: Operation;
  readonly merchant: Merchant | null;
  readonly fields: Fields;
  /** The invoice number of a charge or refund. null: the request has none. */
  readonly ref: string | null;
  /** For `echo_card`. */
  readonly cardNumber: string;
}

/** The request in a body. A text: the code of its refusal. */
export const readCall = (vendor: Vendor, body: string): Call | { readonly refused: string; readonly refId: string } => {
  let root: unknown;
  try {
    root = JSON.parse(body);
  } catch {
    return { refused: 'E00003', refId: '' };
  }
  const [name, ...more] = isFields(root) ? Object.keys(root) : [];
  if (name === undefined || more.length > 0 || !(name in REQUESTS)) return { refused: 'E00003', refId: '' };
  const known = name as RequestName;
  const fields = (root as Record<string, unknown>)[known];
  if (!isFields(fields) || outOfOrder(fields, REQUESTS[known]) !== null) return { refused: 'E00003', refId: '' };
  const refId = textOf(fields.refId);
  const number = textOf(within(fields, 'transactionRequest', 'payment', 'creditCard', 'cardNumber'));
  const ref = textOf(within(fields, 'transactionRequest', 'order', 'invoiceNumber'));
  if (refId.length > 20 || ref.length > 20 || number.length > 16) return { refused: 'E00003', refId };
  const merchant = vendor.merchant(textOf(within(fields, 'merchantAuthentication', 'name'))) ?? null;
  const isKnown = merchant !== null && textOf(within(fields, 'merchantAuthentication', 'transactionKey')) === merchant.transactionKey;
  return {
    name: known,
    op: operationOf(known, fields),
    merchant: isKnown ? merchant : null,
    fields,
    ref: ref === '' ? null : ref,
    cardNumber: number,
  };
};

const operationOf = (name: RequestName, fields: Fields): Operation => {
  switch (name) {
    case 'createTransactionRequest':
      return { voidTransaction: 'void', refundTransaction: 'refund' }[textOf(within(fields, 'transactionRequest', 'transactionType'))] as 'void' ?? 'charge'; // prettier-ignore
    case 'updateHeldTransactionRequest':
      return 'held';
    case 'getTransactionDetailsRequest':
      return 'details';
    case 'getUnsettledTransactionListRequest':
      return 'unsettled';
    case 'getSettledBatchListRequest':
      return 'batches';
    case 'getTransactionListRequest':
      return 'batch';
    case 'getMerchantDetailsRequest':
      return 'merchant';
    case 'authenticateTestRequest':
      return 'test';
  }
};

export const refusal = (code: string, refId = ''): Fields => ({ ...(refId !== '' && { refId }), messages: messages(code) });

const DETAILS_API: readonly Operation[] = ['details', 'unsettled', 'batches', 'batch'];

/** Executes a call and gives its answer. */
export const answer = (vendor: Vendor, call: Call): Fields => {
  const { merchant, op, ref, fields } = call;
  const refId = textOf(fields.refId);
  if (!merchant || vendor.use(['e00007'], op, ref)) return refusal('E00007', refId);
  for (const [fault, code] of [['e00001', 'E00001'], ['e00003', 'E00003']] as const) if (vendor.use([fault], op, ref)) return refusal(code, refId); // prettier-ignore
  const refused = vendor.use(['refused'], op, ref);
  if (refused) {
    const given = refusal(`E${String(refused.code).padStart(5, '0')}`, refId);
    return refused.reason === 1 ? { transactionResponse: { SupplementalDataQualificationIndicator: 0 }, ...given } : given;
  }
  if (DETAILS_API.includes(op) && vendor.standing('details_api_off')) return refusal('E00011', refId);
  vendor.tick();
  switch (op) {
    case 'charge':
      return charge(vendor, merchant, call);
    case 'void':
      return voided(vendor, merchant, call);
    case 'refund':
      return refund(vendor, merchant, call);
    case 'held':
      return decideHeld(vendor, merchant, call);
    case 'details':
      return details(vendor, merchant, refId, textOf(fields.transId));
    case 'unsettled':
      return listed(vendor, merchant, fields, vendor.unsettled(merchant.apiLoginId));
    case 'batches':
      return batches(vendor, merchant, fields);
    case 'batch':
      return batch(vendor, merchant, fields);
    case 'merchant':
      return merchantDetails(merchant, refId);
    case 'test':
      return { ...(refId !== '' && { refId }), messages: messages('I00001') };
  }
};

interface Answered {
  readonly code: number;
  readonly reason: number;
  readonly transId?: string;
  readonly refTransID?: string;
  readonly authCode?: string;
  readonly avs?: string;
  readonly cvv?: string;
  readonly last4?: string;
  readonly brand?: string;
  readonly testRequest?: '1';
  /** Of a prepaid card. */
  readonly prePaidCard?: Readonly<Record<'requestedAmount' | 'approvedAmount' | 'balanceOnCard', string>>;
}

/** The answer to createTransactionRequest. Codes 1 and 4 have messages, codes 2 and 3 have errors. */
const transactionAnswer = (refId: string, one: Answered): Fields => {
  const failed = one.code === 2 || one.code === 3;
  return {
    transactionResponse: {
      responseCode: String(one.code),
      authCode: one.authCode ?? '',
      avsResultCode: one.avs ?? 'P',
      cvvResultCode: one.cvv ?? '',
      cavvResultCode: '',
      transId: one.transId ?? '0',
      refTransID: one.refTransID ?? '',
      transHash: '',
      testRequest: one.testRequest ?? '0',
      accountNumber: one.last4 ? `XXXX${one.last4}` : '',
      accountType: one.brand ?? '',
      ...(one.prePaidCard && { prePaidCard: one.prePaidCard }),
      ...(failed
        ? { errors: [{ errorCode: String(one.reason), errorText: reasonText(one.reason) }] }
        : { messages: [{ code: String(one.reason), description: reasonText(one.reason) }] }),
      transHashSha2: '',
    },
    ...(refId !== '' && { refId }),
    messages: messages(failed ? 'E00027' : 'I00001'),
  };
};

const setting = (fields: Fields, name: string): string => {
  const settings = within(fields, 'transactionRequest', 'transactionSettings', 'setting');
  const found = (Array.isArray(settings) ? (settings as unknown[]) : [settings]).find((one) => textOf(within(one, 'settingName')) === name);
  return textOf(within(found, 'settingValue'));
};

const answerOf = (refId: string, txn: Transaction, also: Partial<Answered> = {}): Fields =>
  transactionAnswer(refId, {
    code: txn.responseCode,
    reason: txn.reason,
    transId: txn.id,
    refTransID: txn.refTransId ?? '',
    authCode: txn.authCode,
    avs: txn.avs,
    cvv: txn.cvv,
    last4: txn.last4,
    brand: txn.brand,
    ...also,
  });

/** The answer to a duplicate. It names the original only if the request named a window. */
const duplicateAnswer = (vendor: Vendor, call: Call, refId: string, earlier: Transaction): Fields => {
  const named = setting(call.fields, 'duplicateWindow') !== '' && !vendor.use(['duplicate_unnamed'], call.op, call.ref);
  const card = { last4: earlier.last4, brand: earlier.brand };
  if (!named) return transactionAnswer(refId, { code: 3, reason: 11, ...card });
  const { id, authCode, avs, cvv } = earlier;
  return transactionAnswer(refId, { code: 3, reason: 11, transId: id, avs, cvv, authCode: earlier.responseCode === 1 ? authCode : '', ...card });
};

/** The earlier transaction of the same data within the window of the request. */
const duplicateIn = (vendor: Vendor, call: Call, fingerprint: string): Transaction | null => {
  const named = setting(call.fields, 'duplicateWindow');
  const windowS = named === '' ? DEFAULT_WINDOW_S : Math.min(Number(named), MAX_WINDOW_S);
  const earlier = vendor.duplicateOf(fingerprint, windowS * 1_000);
  const again: readonly FaultName[] = call.op === 'refund' ? ['no_duplicates', 'refunds_repeat'] : ['no_duplicates'];
  return earlier && vendor.use(again, call.op, call.ref) ? null : earlier;
};

/** The data that the vendor compares, with the window. */
const comparedData = (merchant: Merchant, fields: Fields): (string | null)[] => {
  const request = fields.transactionRequest;
  const of = (...path: string[]) => textOf(within(request, ...path));
  const address = ['firstName', 'lastName', 'company', 'address', 'city', 'state', 'zip', 'country'].map((name) => of('billTo', name));
  return [
    merchant.apiLoginId,
    of('transactionType'),
    of('amount'),
    of('payment', 'creditCard', 'cardNumber'),
    of('payment', 'creditCard', 'expirationDate'),
    of('order', 'invoiceNumber'),
    of('poNumber'),
    of('customer', 'id'),
    ...address,
    setting(fields, 'duplicateWindow'),
  ];
};

const visibleMs = (vendor: Vendor, call: Call): number => {
  const hidden = vendor.use(['hidden'], call.op, call.ref);
  return hidden ? vendor.nowMs + hidden.ms : 0;
};

const stored = (vendor: Vendor, call: Call, txn: Omit<NewTransaction, 'submitMs' | 'visibleMs' | 'merchant' | 'ref'>, merchant: Merchant) =>
  vendor.store({ ...txn, merchant: merchant.apiLoginId, ref: call.ref ?? '', submitMs: vendor.nowMs, visibleMs: visibleMs(vendor, call) });

const charge = (vendor: Vendor, merchant: Merchant, call: Call): Fields => {
  const { fields, cardNumber } = call;
  const refId = textOf(fields.refId);
  const request = fields.transactionRequest;
  const type = textOf(within(request, 'transactionType'));
  const amountCents = toCents(within(request, 'amount'));
  if (amountCents === null || amountCents < 1 || (type !== 'authCaptureTransaction' && type !== 'authOnlyTransaction'))
    return refusal('E00003', refId);
  const card = { last4: cardNumber.slice(-4), brand: brandOf(cardNumber) };
  if (merchant.testMode) return testModeAnswer(call);
  if (!/^\d{13,16}$/.test(cardNumber) || !passesLuhn(cardNumber)) return transactionAnswer(refId, { code: 3, reason: 6, ...card });
  const expiry = /^(\d{4})-(\d\d)$/.exec(textOf(within(request, 'payment', 'creditCard', 'expirationDate')));
  if (expiry && Date.UTC(Number(expiry[1]), Number(expiry[2]), 2) < vendor.nowMs) return transactionAnswer(refId, { code: 3, reason: 8, ...card });

  const fingerprint = vendor.fingerprint(comparedData(merchant, fields));
  const foreign = vendor.use(['duplicate_foreign'], call.op, call.ref) ? vendor.newestOf(merchant.apiLoginId, call.ref) : null;
  const earlier = foreign ?? duplicateIn(vendor, call, fingerprint);
  if (earlier) return duplicateAnswer(vendor, call, refId, earlier);

  const zip = textOf(within(request, 'billTo', 'zip'));
  const avs = AVS_BY_ZIP[zip] ?? (zip === '' ? 'P' : 'Y');
  const cvv = CVV_BY_CODE[textOf(within(request, 'payment', 'creditCard', 'cardCode'))] ?? 'P';
  const customerIp = textOf(within(request, 'customerIP'));
  const shared = { type, amountCents, ...card, refTransId: null, avs, cvv, fingerprint, ...(customerIp !== '' && { customerIp }) } as const;
  const forced = vendor.use(['reason'], call.op, call.ref);
  if (forced?.code === 3) return transactionAnswer(refId, { code: 3, reason: forced.reason, avs, cvv, ...card });
  if (forced || zip === DECLINE_ZIP || cardNumber === DECLINED_CARD)
    return answerOf(
      refId,
      stored(vendor, call, { ...shared, status: 'declined', responseCode: 2, reason: forced?.reason ?? 2, authCode: '' }, merchant),
    );
  const authCode = vendor.fingerprint([fingerprint, String(vendor.nowMs)]).replace(/[^A-Z0-9]/g, '').padEnd(6, 'A').slice(0, 6); // prettier-ignore
  const held = vendor.use(['held'], call.op, call.ref);
  if (held) {
    const status = HELD_BY[held.reason] ?? 'FDSAuthorizedPendingReview';
    return answerOf(refId, stored(vendor, call, { ...shared, status, responseCode: 4, reason: held.reason, authCode }, merchant));
  }
  const status: Status = type === 'authOnlyTransaction' ? 'authorizedPendingCapture' : 'capturedPendingSettlement';
  if (vendor.use(['partial'], call.op, call.ref)) {
    const approved = Math.floor(amountCents / 2);
    const made = stored(vendor, call, { ...shared, amountCents: approved, status, responseCode: 1, reason: 1, authCode }, merchant);
    const prePaidCard = { requestedAmount: dollarsText(amountCents), approvedAmount: dollarsText(approved), balanceOnCard: '0.00' };
    return answerOf(refId, made, { prePaidCard });
  }
  return answerOf(refId, stored(vendor, call, { ...shared, status, responseCode: 1, reason: 1, authCode }, merchant));
};

const voided = (vendor: Vendor, merchant: Merchant, call: Call): Fields => {
  const { fields } = call;
  const refId = textOf(fields.refId);
  const refTransID = textOf(within(fields, 'transactionRequest', 'refTransId'));
  const forced = vendor.use(['reason'], 'void', call.ref);
  if (forced) return transactionAnswer(refId, { code: forced.code, reason: forced.reason, refTransID });
  const txn = vendor.transaction(merchant.apiLoginId, refTransID);
  const card = txn ? { last4: txn.last4, brand: txn.brand } : {};
  if (txn?.status === 'voided') return transactionAnswer(refId, { code: 1, reason: 310, refTransID, ...card });
  const canBeVoided =
    txn?.batchId === null && ['capturedPendingSettlement', 'authorizedPendingCapture', 'refundPendingSettlement'].includes(txn.status);
  if (!canBeVoided && txn?.status === 'settledSuccessfully' && vendor.use(['void_settled'], call.op, call.ref))
    return transactionAnswer(refId, { code: 1, reason: 1, transId: txn.id, refTransID: txn.id, authCode: txn.authCode, ...card });
  if (!canBeVoided) return transactionAnswer(refId, { code: 3, reason: 16, refTransID });
  vendor.setStatus(txn, 'voided');
  return transactionAnswer(refId, { code: 1, reason: 1, transId: txn.id, refTransID: txn.id, authCode: txn.authCode, ...card });
};

const refund = (vendor: Vendor, merchant: Merchant, call: Call): Fields => {
  const { fields, cardNumber } = call;
  const refId = textOf(fields.refId);
  const request = fields.transactionRequest;
  const refTransID = textOf(within(request, 'refTransId'));
  const amountCents = toCents(within(request, 'amount'));
  if (amountCents === null || amountCents < 1) return refusal('E00003', refId);
  const forced = vendor.use(['reason'], 'refund', call.ref);
  if (forced) return transactionAnswer(refId, { code: forced.code, reason: forced.reason, refTransID });
  const fingerprint = vendor.fingerprint([...comparedData(merchant, fields), refTransID]);
  const earlier = duplicateIn(vendor, call, fingerprint);
  if (earlier) return duplicateAnswer(vendor, call, refId, earlier);
  const txn = vendor.transaction(merchant.apiLoginId, refTransID);
  if (!txn || txn.status !== 'settledSuccessfully' || cardNumber.slice(-4) !== txn.last4)
    return transactionAnswer(refId, { code: 3, reason: 54, refTransID });
  const { last4, brand } = txn;
  const isTooMuch = vendor.refundedCents(txn) + amountCents > txn.amountCents;
  if (isTooMuch && !vendor.use(['refunds_exceed'], call.op, call.ref))
    return transactionAnswer(refId, { code: 3, reason: 55, refTransID, last4, brand });
  const made = { type: 'refundTransaction', amountCents, last4, brand, refTransId: txn.id, avs: 'P', cvv: '', fingerprint } as const;
  return answerOf(refId, stored(vendor, call, { ...made, status: 'refundPendingSettlement', responseCode: 1, reason: 1, authCode: '' }, merchant));
};

const decideHeld = (vendor: Vendor, merchant: Merchant, { fields }: Call): Fields => {
  const refId = textOf(fields.refId);
  const id = textOf(within(fields, 'heldTransactionRequest', 'refTransId'));
  const action = textOf(within(fields, 'heldTransactionRequest', 'action'));
  const txn = vendor.transaction(merchant.apiLoginId, id);
  if (!txn || !REVIEW.includes(txn.status)) return transactionAnswer(refId, { code: 3, reason: 16, refTransID: id });
  const declined: Status = txn.status === 'FDSPendingReview' ? 'declined' : 'voided';
  vendor.setStatus(txn, action === 'decline' ? declined : 'capturedPendingSettlement');
  return transactionAnswer(refId, { code: 1, reason: 1, transId: id, refTransID: id, last4: txn.last4, brand: txn.brand });
};

const batchFields = (merchant: Merchant, one: Batch) => ({
  batchId: one.id,
  settlementTimeUTC: utc(one.settleMs),
  settlementTimeLocal: local(one.settleMs, merchant),
  settlementState: one.state,
  paymentMethod: 'creditCard',
  marketType: 'eCommerce',
  product: 'Card Not Present',
});

const details = (vendor: Vendor, merchant: Merchant, refId: string, id: string): Fields => {
  if (!/^\d{1,20}$/.test(id)) return refusal('E00013', refId);
  const txn = vendor.transaction(merchant.apiLoginId, id);
  if (!txn || txn.visibleMs > vendor.nowMs) return refusal('E00040', refId);
  const inBatch = txn.batchId === null ? null : vendor.batch(merchant.apiLoginId, txn.batchId);
  return {
    transaction: {
      transId: txn.id,
      ...(txn.refTransId !== null && { refTransId: txn.refTransId }),
      submitTimeUTC: utc(txn.submitMs),
      submitTimeLocal: local(txn.submitMs, merchant),
      transactionType: txn.type,
      transactionStatus: txn.status,
      responseCode: txn.responseCode,
      responseReasonCode: txn.reason,
      responseReasonDescription: reasonText(txn.reason),
      ...(txn.authCode !== '' && { authCode: txn.authCode }),
      AVSResponse: txn.avs,
      ...(txn.cvv !== '' && { cardCodeResponse: txn.cvv }),
      ...(inBatch && { batch: batchFields(merchant, inBatch) }),
      order: { invoiceNumber: txn.ref, discountAmount: 0, taxIsAfterDiscount: false },
      authAmount: dollars(txn.amountCents),
      settleAmount: dollars(txn.amountCents),
      taxExempt: false,
      payment: { creditCard: { cardNumber: `XXXX${txn.last4}`, expirationDate: 'XXXX', cardType: txn.brand } },
      recurringBilling: false,
      product: 'Card Not Present',
      marketType: 'eCommerce',
    },
    ...(refId !== '' && { refId }),
    messages: messages('I00001'),
  };
};

const summary = (merchant: Merchant, txn: Transaction): Fields => ({
  transId: txn.id,
  submitTimeUTC: utc(txn.submitMs),
  submitTimeLocal: local(txn.submitMs, merchant),
  transactionStatus: txn.status,
  ...(txn.ref !== '' && { invoiceNumber: txn.ref }),
  accountType: txn.brand,
  accountNumber: `XXXX${txn.last4}`,
  settleAmount: dollars(txn.amountCents),
  marketType: 'eCommerce',
  product: 'Card Not Present',
  hasReturnedItems: false,
});

/** One page of a list. An empty list is absent. */
const listed = (vendor: Vendor, merchant: Merchant, fields: Fields, given: readonly Transaction[]): Fields => {
  const all = vendor.standing('undone_unlisted') ? given.filter(({ status }) => status !== 'voided' && status !== 'declined') : given;
  const refId = textOf(fields.refId);
  const limit = Number(textOf(within(fields, 'paging', 'limit')) || MAX_PAGE);
  const offset = Number(textOf(within(fields, 'paging', 'offset')) || 1);
  if (!(limit >= 1 && limit <= MAX_PAGE && offset >= 1)) return refusal('E00013', refId);
  const descending = String(within(fields, 'sorting', 'orderDescending')) === 'true';
  const from = (offset - 1) * limit;
  const slice = descending
    ? all.slice(Math.max(0, all.length - from - limit), Math.max(0, all.length - from)).reverse()
    : all.slice(from, from + limit);
  if (slice.length === 0) return { ...(refId !== '' && { refId }), messages: messages('I00004') };
  return {
    transactions: slice.map((txn) => summary(merchant, txn)),
    totalNumInResultSet: all.length,
    ...(refId !== '' && { refId }),
    messages: messages('I00001'),
  };
};

const membersOf = (vendor: Vendor, one: Batch): readonly Transaction[] => {
  const growing = vendor.standing('batch_growing');
  return growing && one.settleMs + growing.ms > vendor.nowMs ? one.members.slice(0, -1) : one.members;
};

const batches = (vendor: Vendor, merchant: Merchant, fields: Fields): Fields => {
  const refId = textOf(fields.refId);
  const at = (name: string, otherwise: number) => (textOf(fields[name]) === '' ? otherwise : Date.parse(textOf(fields[name])));
  const last = at('lastSettlementDate', vendor.nowMs);
  const first = at('firstSettlementDate', last - DAY_MS);
  if (!(first <= last) || last - first > 31 * DAY_MS) return refusal('E00013', refId);
  const found = vendor
    .batches(merchant.apiLoginId)
    .filter(({ settleMs, visibleMs }) => settleMs >= first && settleMs <= last && visibleMs <= vendor.nowMs);
  if (found.length === 0) return { ...(refId !== '' && { refId }), messages: messages('I00004') };
  const list = vendor.standing('batch_twice') ? [...found, ...found] : found;
  const withStatistics = String(fields.includeStatistics) === 'true';
  return {
    // The newest first: the order of the list is not documented.
    batchList: list
      .map((one) => ({ ...batchFields(merchant, one), ...(withStatistics && { statistics: statistics(membersOf(vendor, one)) }) }))
      .reverse(),
    ...(refId !== '' && { refId }),
    messages: messages('I00001'),
  };
};

/** The counts of a batch by brand. */
const statistics = (members: readonly Transaction[]): Fields[] => {
  const byBrand = new Map<string, { charge: number; chargeCents: number; refund: number; refundCents: number; void: number; decline: number; error: number }>(); // prettier-ignore
  for (const { brand, status, type, amountCents } of members) {
    const sums = byBrand.get(brand) ?? { charge: 0, chargeCents: 0, refund: 0, refundCents: 0, void: 0, decline: 0, error: 0 };
    byBrand.set(brand, sums);
    if (status === 'voided') sums.void += 1;
    else if (status === 'declined') sums.decline += 1;
    else if (status === 'settlementError') sums.error += 1;
    else if (type === 'refundTransaction') [sums.refund, sums.refundCents] = [sums.refund + 1, sums.refundCents + amountCents];
    else [sums.charge, sums.chargeCents] = [sums.charge + 1, sums.chargeCents + amountCents];
  }
  return [...byBrand].map(([accountType, sums]) => ({
    accountType,
    chargeAmount: dollars(sums.chargeCents),
    chargeCount: sums.charge,
    refundAmount: dollars(sums.refundCents),
    refundCount: sums.refund,
    voidCount: sums.void,
    declineCount: sums.decline,
    errorCount: sums.error,
  }));
};

const batch = (vendor: Vendor, merchant: Merchant, fields: Fields): Fields => {
  const found = vendor.batch(merchant.apiLoginId, textOf(fields.batchId));
  if (!found || found.visibleMs > vendor.nowMs) return refusal('E00040', textOf(fields.refId));
  return listed(vendor, merchant, fields, membersOf(vendor, found));
};

const merchantDetails = (merchant: Merchant, refId: string): Fields => ({
  isTestMode: merchant.testMode,
  processors: [{ name: 'First Data Nashville', id: 2, cardTypes: ['A', 'D', 'M', 'V'] }],
  merchantName: merchant.name,
  gatewayId: merchant.gatewayId,
  marketTypes: ['eCommerce'],
  productCodes: ['CNP'],
  paymentMethods: ['AmericanExpress', 'Discover', 'MasterCard', 'Visa'],
  currencies: ['USD'],
  publicClientKey: '',
  merchantTimeZone: merchant.cutOff.timeZone,
  ...(refId !== '' && { refId }),
  messages: messages('I00001'),
});

/** The answer as a fault changes it. */
export const changed = (vendor: Vendor, fault: Fault, given: Fields, call: Call): Fields => {
  const response = given.transactionResponse;
  const within1 = (also: Fields): Fields => (isFields(response) ? { ...given, transactionResponse: { ...response, ...also } } : given);
  /** The members stand before the messages. */
  const withPrepaid = (also: Fields, amount: string): Fields => {
    const { messages: notes, ...rest } = isFields(response) ? response : {};
    const prePaidCard = { requestedAmount: amount, approvedAmount: amount, balanceOnCard: '0.00' };
    return { ...given, transactionResponse: { ...rest, ...also, prePaidCard, messages: notes } };
  };
  switch (fault.name) {
    case 'other_ref':
      return { ...given, refId: 'ANOTHER0REFERENCE000' };
    case 'no_ref': {
      const { refId: _, ...rest } = given;
      return rest;
    }
    case 'echo_card':
      return within1({ accountNumber: call.cardNumber });
    case 'echo_key':
      return { ...given, sessionToken: textOf(within(call.fields, 'merchantAuthentication', 'transactionKey')) };
    case 'no_invoice':
      return eachIn(given, (value, name) => (name === 'invoiceNumber' ? undefined : value)) as Fields;
    case 'id_zero':
      return within1({ transId: '0' });
    case 'error_too':
      return { ...given, messages: messages('E00013') };
    case 'same_id':
      return within1({ transId: vendor.newestOf(call.merchant!.apiLoginId, call.ref)?.id ?? '0' });
    case 'split_tender':
      return within1({ splitTenderId: '115901' });
    case 'other_amount':
      return withPrepaid({ transId: '60999999999' }, dollarsText(999));
    case 'unknown_code':
      return within1({ responseCode: '9' });
    case 'numbers':
      return numbersAsText(given) as Fields;
    case 'entities':
      return withEntities(given) as Fields;
    case 'nulls':
      return withNulls(given) as Fields;
    default:
      return given;
  }
};

export const testModeAnswer = ({ fields, cardNumber }: Call): Fields => {
  const card = { last4: cardNumber.slice(-4), brand: brandOf(cardNumber) };
  return transactionAnswer(textOf(fields.refId), { code: 1, reason: 1, transId: '0', authCode: '000000', testRequest: '1', ...card });
};

const eachIn = (value: unknown, change: (value: unknown, name: string) => unknown, name = ''): unknown => {
  if (Array.isArray(value)) return value.map((one) => eachIn(one, change, name));
  if (isFields(value)) return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, eachIn(one, change, key)]));
  return change(value, name);
};
const AS_NUMBERS = ['responseCode', 'transId', 'errorCode', 'batchId', 'responseReasonCode'];
const numbersAsText = (given: unknown): unknown =>
  eachIn(given, (value, name) => {
    if (typeof value === 'number') return String(value);
    return AS_NUMBERS.includes(name) && typeof value === 'string' && /^[1-9]\d*$/.test(value) ? Number(value) : value;
  });
const withEntities = (given: unknown): unknown =>
  eachIn(given, (value, name) => (['text', 'description', 'errorText', 'merchantName'].includes(name) ? `O&apos;Neill &amp; Sons &lt;${String(value)}&gt;` : value)); // prettier-ignore
const withNulls = (given: unknown): unknown => eachIn(given, (value) => (value === '' ? null : value));
