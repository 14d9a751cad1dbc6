/** Personal data of payments: which keys a request opens or takes, and how stored answers are boxed (docs/decisions/0050-personal-data.md). */
import { isBox, nothingBegun, type Personal, type ServiceError } from '#kernel';
import { boxAsText, boxInText, type Logger, type OpenedKeys, type PersonalKey, type PersonalKeys } from '#platform';
import type { Operation, StoredAnswer } from './keys/key-store.js';
import { keysOfPayment, type Payment } from './payment.js';

/** The refusal of a request whose personal data cannot be sealed now. Nothing has begun. */
export const noPersonalKey = (log: Pick<Logger, 'error'>, cause: unknown): ServiceError => {
  log.error({ err: cause }, 'no key of personal data can be had; requests with texts are refused');
  return nothingBegun();
};

interface PersonalPorts {
  readonly personal: PersonalKeys;
  readonly log: Pick<Logger, 'error'>;
}

/** Opens every key of a payment. */
export const openPayment = ({ personal }: Pick<PersonalPorts, 'personal'>, payment: Payment): Promise<OpenedKeys> =>
  personal.open(keysOfPayment(payment));

/**
 * The key for a further text of a payment: one of its keys that is not erased, else a new one. Throws {@link noPersonalKey} if the database does not
 * answer.
 */
export const keyForPayment = async ({ personal, log }: PersonalPorts, payment: Payment): Promise<PersonalKey> => {
  try {
    const keyIds = keysOfPayment(payment);
    const opened = await personal.open(keyIds);
    return keyIds.map((keyId) => opened.key(keyId)).find((key) => key !== null) ?? (await personal.take());
  } catch (error) {
    throw noPersonalKey(log, error);
  }
};

/** The key of a text, if it was opened. null: the text has no key, or it is erased. */
export const keyOfText = (opened: OpenedKeys, personal: Personal<unknown>): PersonalKey | null => (isBox(personal) ? opened.key(personal.key) : null);

// ------------------------------------------------------------------------------------------------------------------------------------
// Stored answers of idempotency keys.

/** The payment and the operation of a stored answer. They bind its box to the row. */
export interface AnswerPlace {
  readonly paymentId: string;
  readonly operation: Operation;
}

const contextOf = ({ paymentId, operation }: AnswerPlace): string => `payment-${paymentId}/answer:${paymentId}:${operation}`;

/** The answer as it is stored. `key` null: the answer has no personal data, and is stored as it is. */
export const boxedAnswer = ({ status, body }: StoredAnswer, key: PersonalKey | null, place: AnswerPlace): StoredAnswer => ({
  status,
  body: key ? boxAsText(key.sealText(body, contextOf(place))) : body,
});

/** The answer as it was sent. null: its key is erased or missing. Throws the errors of the database. */
export const openedAnswer = async (
  { personal }: { readonly personal: Pick<PersonalKeys, 'open'> },
  { status, body }: StoredAnswer,
  place: AnswerPlace,
): Promise<StoredAnswer | null> => {
  const box = boxInText(body);
  if (!box) return { status, body };
  const key = (await personal.open([box.key])).key(box.key);
  return key && { status, body: key.openText(box, contextOf(place)) };
};
