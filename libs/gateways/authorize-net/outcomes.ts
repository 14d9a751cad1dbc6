/**
 * What an answer of the vendor means. Pure. Only a complete answer for our own reference can approve, and a word that is not known never does.
 *
 * | answer | outcome of a charge |
 * |---|---|
 * | code 1, our refId, a transaction id | `approved` |
 * | the same with a smaller amount approved of a prepaid card | `held`, since it must not stand |
 * | of test mode, without an id | `not_processed`, and the account stops |
 * | code 1 with id 0, of test mode with an id, with a split tender or another amount | `unknown`, and an alarm |
 * | code 4, or reason 193, 252, 253 | `held` |
 * | reason 11 | the transaction of our reference is looked up |
 * | code 2, and code 3 with a reason that is about the card | `declined` |
 * | code 3 with a reason after an authorisation that may stand ({@link MAY_STAND}) | `unknown` |
 * | another code 3 | `not_processed`, answered |
 * | neither code nor transaction id, and only codes of {@link REFUSALS} | `not_processed`, not answered: the vendor refused the whole request |
 * | anything else | `unknown` |
 *
 * `raw` holds codes only. The texts of the vendor are not kept, since a fault could put anything into them.
 */
import type { ChargeTxn, Check, NamedTransaction, Outcome } from '#payments';
import { centsOf, type Fields, fieldsOf, idOf, isOk, listOf, messageCodes, textOf } from './answers.js';
import { DECLINES, DUPLICATE, HELD_REASONS, MAY_STAND, OPERATIONS, PARTLY_APPROVED, REFUSALS, STATUSES } from './codes.js';

type State = NamedTransaction['state'];

/** Postal code: Y, X, W, Z match; A and N do not. */
const AVS: Readonly<Record<string, Check>> = { Y: 'match', X: 'match', W: 'match', Z: 'match', A: 'no_match', N: 'no_match' };
const CVV: Readonly<Record<string, Check>> = { M: 'match', N: 'no_match' };
const checksOf = (avs: unknown, cvv: unknown) => ({ avs: AVS[textOf(avs)] ?? 'not_checked', cvv: CVV[textOf(cvv)] ?? 'not_checked' }) as const;

const BRANDS: Readonly<Record<string, string>> = {
  visa: 'visa',
  mastercard: 'mastercard',
  americanexpress: 'amex',
  discover: 'discover',
  dinersclub: 'diners',
  jcb: 'jcb',
  chinaunionpay: 'unionpay',
};
const last4Of = (masked: unknown): string | null => /^X{4}(\d{4})$/.exec(textOf(masked))?.[1] ?? null;
const cardOf = (type: unknown, masked: unknown) => {
  const last4 = last4Of(masked);
  return last4 === null ? {} : { card: { brand: BRANDS[textOf(type).toLowerCase()] ?? 'unknown', last4 } };
};

/** An answer to createTransactionRequest or updateHeldTransactionRequest that is for our reference. */
export interface TransactionAnswer {
  readonly code: number;
  /** 0: the answer names no reason. */
  readonly reason: number;
  readonly transactionId: string | null;
  readonly isOk: boolean;
  readonly response: Fields;
}

export type ReadTransaction =
  | { readonly kind: 'transaction'; readonly transaction: TransactionAnswer }
  /** `code`: the message code of the refusal. */
  | { readonly kind: 'refused'; readonly code: string }
  | { readonly kind: 'unreadable'; readonly raw: string };

/** Reads an answer that must be for `ref`. */
export const readTransaction = (answer: Fields, ref: string): ReadTransaction => {
  const response = fieldsOf(answer.transactionResponse);
  const codes = messageCodes(answer);
  const transactionId = idOf(response.transId);
  // A refusal may come with other members, such as SupplementalDataQualificationIndicator.
  if (textOf(response.responseCode) === '' && transactionId === null)
    return codes.length > 0 && codes.every((code) => Object.hasOwn(REFUSALS, code)) && !isOk(answer)
      ? { kind: 'refused', code: codes[0]! }
      : { kind: 'unreadable', raw: `no transaction, ${wordOf(codes[0] ?? '')}` };
  if (textOf(answer.refId) !== ref) return { kind: 'unreadable', raw: 'an answer for another reference' };
  const responseCode = Number(/^[1-4]$/.exec(textOf(response.responseCode))?.[0] ?? 0);
  const [reasons, notes] = [listOf(response.errors), listOf(response.messages)];
  if (responseCode === 0 || reasons === null || notes === null) return { kind: 'unreadable', raw: 'an unknown response code' };
  const reason = Number(/^\d{1,5}$/.exec(textOf(reasons[0]?.errorCode) || textOf(notes[0]?.code))?.[0] ?? 0);
  return { kind: 'transaction', transaction: { code: responseCode, reason, transactionId, isOk: isOk(answer), response } };
};

const wordOf = (code: string): string => (/^[EI]\d{5}$/.test(code) ? code : 'no code');
export const rawOf = ({ code, reason }: Pick<TransactionAnswer, 'code' | 'reason'>): string => `response ${code}, reason ${reason}`;

const isSet = (value: unknown): boolean => !['', '0', 'false'].includes(value === true ? 'true' : textOf(value));

/** True if the account is in test mode: the answer may be an approval, and no money has moved. */
export const isOfTestMode = ({ transactionId, response }: TransactionAnswer): boolean => transactionId === null && isSet(response.testRequest);

/** The amounts of a prepaid card. null: the answer names none. */
const prepaidOf = ({ response }: TransactionAnswer): { readonly requested: number | null; readonly approved: number | null } | null => {
  const { requestedAmount, approvedAmount } = fieldsOf(response.prePaidCard);
  const isNamed = textOf(requestedAmount) !== '' || textOf(approvedAmount) !== '';
  return isNamed ? { requested: centsOf(requestedAmount), approved: centsOf(approvedAmount) } : null;
};

/** True if the vendor took less than we asked for. The transaction is ours, so it can be undone. */
const isPartial = (transaction: TransactionAnswer, amountCents: number): boolean => {
  const prepaid = prepaidOf(transaction);
  const isLess = prepaid !== null && prepaid.requested === amountCents && prepaid.approved !== null && prepaid.approved < amountCents;
  return transaction.transactionId !== null && (isLess || transaction.reason === PARTLY_APPROVED);
};

/** True if the approval must never count: it has no id, has one in test mode, is of a split tender, or is of another amount. */
const isFalseApproval = (transaction: TransactionAnswer, amountCents: number): boolean => {
  const prepaid = prepaidOf(transaction);
  const isOther = prepaid !== null && (prepaid.requested !== amountCents || prepaid.approved !== amountCents);
  const { transactionId, response } = transaction;
  return transactionId === null || isSet(response.testRequest) || isSet(response.splitTenderId) || isOther;
};

export type ChargeAnswer =
  | Outcome<ChargeTxn>
  /** `originalId`: the transaction that the vendor names. null: it names none. */
  | { readonly kind: 'duplicate'; readonly originalId: string | null };

/** What an answer to a charge means. `alarm` is called for an approval that cannot be true. */
export const chargeAnswer = (transaction: TransactionAnswer, amountCents: number, alarm: (what: string) => void): ChargeAnswer => {
  const { code, reason, transactionId, response } = transaction;
  const raw = rawOf(transaction);
  const checks = checksOf(response.avsResultCode, response.cvvResultCode);
  if ((code === 1 || code === 4) && isPartial(transaction, amountCents)) return { kind: 'held', transactionId: transactionId!, why: 'partial', raw };
  if (code === 4 || HELD_REASONS.includes(reason))
    return transactionId === null ? { kind: 'unknown', cause: 'unreadable', raw } : { kind: 'held', transactionId, raw };
  if (reason === DUPLICATE && code !== 1) return { kind: 'duplicate', originalId: transactionId };
  if (code === 2 || (code === 3 && DECLINES[reason] !== undefined && MAY_STAND[reason] === undefined))
    return {
      kind: 'declined',
      decline: { code: DECLINES[reason] ?? 'generic_decline', raw, ...checks },
      ...(transactionId !== null && { transactionId }),
    };
  if (code === 3)
    return MAY_STAND[reason] === undefined ? { kind: 'not_processed', answered: true, raw } : { kind: 'unknown', cause: 'unreadable', raw };
  if (isFalseApproval(transaction, amountCents)) {
    alarm('the vendor approved a charge with the id 0, in test mode, or of another amount; it does not count');
    return { kind: 'unknown', cause: 'unreadable', raw };
  }
  if (!transaction.isOk || reason !== 1) return { kind: 'unknown', cause: 'unreadable', raw };
  return {
    kind: 'approved',
    txn: {
      transactionId: transactionId!,
      authCode: textOf(response.authCode),
      ...checks,
      ...cardOf(response.accountType, response.accountNumber),
    },
  };
};

/** The state of a transaction by its status. null: the status is not known. */
export const stateOf = (status: unknown): State | null => STATUSES[textOf(status)]?.[0] ?? null;

/** The states of a transaction that waits for its batch. */
export const AWAITS_BATCH: readonly string[] = ['capturedPendingSettlement', 'refundPendingSettlement'];

/** A transaction as getTransactionDetails shows it. */
export interface TransactionDetails {
  readonly transactionId: string;
  readonly ref: string;
  readonly op: 'charge' | 'refund';
  readonly state: State;
  readonly amountCents: number;
  readonly chargeTransactionId: string | null;
  readonly batchId: string | null;
  readonly code: number;
  readonly reason: number;
  readonly authCode: string;
  readonly avs: Check;
  readonly cvv: Check;
  readonly card?: { readonly brand: string; readonly last4: string };
  readonly last4: string | null;
}

/** Reads the details of a transaction. null: they cannot be read, or are of another transaction. */
export const detailsOf = (answer: Fields, transactionId: string): TransactionDetails | null => {
  const one = fieldsOf(answer.transaction);
  const op = OPERATIONS[textOf(one.transactionType)];
  const status = stateOf(one.transactionStatus);
  const amountCents = centsOf(textOf(one.settleAmount) || textOf(one.authAmount));
  if (!isOk(answer) || idOf(one.transId) !== transactionId || op === undefined || status === null || amountCents === null) return null;
  const batch = fieldsOf(one.batch);
  const batchId = idOf(batch.batchId);
  // Between the cut-off and the settlement, a transaction is in a batch and keeps its status. It can no longer be voided.
  const state = batchId !== null && status === 'approved' ? 'settling' : status;
  const { cardNumber, cardType } = fieldsOf(fieldsOf(one.payment).creditCard);
  return {
    transactionId,
    ref: textOf(fieldsOf(one.order).invoiceNumber),
    op,
    state,
    // A declined transaction settles nothing, so only its authorisation names the amount.
    amountCents: amountCents === 0 ? (centsOf(one.requestedAmount) ?? centsOf(one.authAmount) ?? 0) : amountCents,
    chargeTransactionId: op === 'refund' ? idOf(one.refTransId) : null,
    batchId,
    code: Number(textOf(one.responseCode)),
    reason: Number(textOf(one.responseReasonCode)),
    authCode: textOf(one.authCode),
    ...checksOf(one.AVSResponse, one.cardCodeResponse),
    ...cardOf(cardType, cardNumber),
    last4: last4Of(cardNumber),
  };
};

/** The outcome of a charge that the vendor shows. A smaller amount must not stand. null: its amount is larger, so it cannot be ours. */
export const chargeFromDetails = (details: TransactionDetails, amountCents: number): Outcome<ChargeTxn> | null => {
  const { transactionId, authCode, avs, cvv, card } = details;
  const raw = rawOf(details);
  switch (details.state) {
    case 'held':
      return { kind: 'held', transactionId, raw };
    case 'declined':
      return { kind: 'declined', decline: { code: DECLINES[details.reason] ?? 'generic_decline', raw, avs, cvv }, transactionId };
    case 'voided':
      return { kind: 'rejected', why: 'already_reversed', raw };
    case 'approved':
    case 'settling':
    case 'settled':
    case 'settlement_rejected':
      if (details.amountCents < amountCents) return { kind: 'held', transactionId, why: 'partial', raw };
      return details.amountCents === amountCents ? { kind: 'approved', txn: { transactionId, authCode, avs, cvv, ...(card && { card }) } } : null;
  }
};
