/** The faults of the double, by name. Each can be limited to one operation, one reference and a number of times. */

export const OPERATIONS = [
  'create',
  'confirm',
  'cancel',
  'update',
  'intent',
  'intents',
  'refund',
  'one_refund',
  'refunds',
  'charge',
  'payouts',
  'payout',
  'lines',
  'disputes',
  'dispute',
  'account',
  'balance',
] as const;
export type Operation = (typeof OPERATIONS)[number];

/** For each fault its effect. `executed`: the request has its effect, and its answer is stored under its key, as without the fault. */
export const FAULTS = {
  cut_before: 'nothing is executed; the connection breaks',
  hang_before: 'nothing is executed; no answer comes',
  http_500_before: 'nothing is executed; HTTP 500 without a readable body',
  http_503: 'nothing is executed; HTTP 503',
  redirect: 'nothing is executed; HTTP 302 to another address',
  rate_limit: 'nothing is executed; 429 rate_limit',
  lock_timeout: 'nothing is executed; 429 lock_timeout',
  key_in_use: 'nothing is executed; 409 idempotency_key_in_use',
  conflict_bare: 'nothing is executed; 409 idempotency_error without a code',
  too_many_bare: 'nothing is executed; 429 without a code',
  unauthorized: 'nothing is executed; 401',
  forbidden: 'nothing is executed; 403, as for a restricted key without the permission',
  stored_500: 'nothing is executed; 500, stored under the key',
  executed_500: 'executed; 500, stored under the key',
  slow: 'executed and answered after `ms`; the key is in use and the object is locked meanwhile',
  late: 'no answer comes; executed after `ms`; the key is in use and the object is locked meanwhile',
  processing: 'a confirmed intent is processing for `ms` of the clock of the double, and has then succeeded',
  cut_after: 'executed; the connection breaks before an answer',
  hang: 'executed; no answer comes',
  half: 'executed; the connection breaks within the answer',
  http_500: 'executed; HTTP 500 without a readable body',
  html: 'executed; a page in HTML with HTTP 200',
  huge: 'executed; the answer has one more megabyte of spaces',
  empty: 'executed; an empty body',
  not_json: 'executed; a body that is no JSON',
  bom: 'executed; the answer begins with a byte order mark',
  numbers: 'executed; numbers are text',
  nulls: 'executed; empty lists and empty objects are null',
  absent: 'executed; members that are null are absent',
  error_200: 'executed; the answer is an error with HTTP 200',
  other_ref: 'executed; the metadata names another reference',
  no_ref: 'executed; there is no metadata',
  no_card: 'executed; the answer does not name the card',
  no_error: 'executed; the intent in the answer has no last error',
  other_amount: 'executed; the answer names another amount',
  partial: 'executed; less than the amount was received',
  other_id: 'executed; the answer names another object',
  id_zero: 'executed; the answer names the object 0',
  echo_key: 'executed; the answer repeats the secret key',
  echo_card: 'executed; the answer repeats a card number',
  unknown_status: 'executed; the answer has a status that nobody knows',
  unknown_error: 'nothing is executed; 400 with a code that nobody knows',
  card_error_beside: 'executed; 402 card_error, beside the intent as it is after the execution',
  keys_unbound: 'a key is not bound to the endpoint of its first use, but to each endpoint by itself',
  keys_forgotten: 'no key is known any more',
  refunds_exceed: 'refunds of more than remains are executed',
  pages_twice: 'each page of a list repeats the last item of the page before',
  pages_empty: 'each page of a list is empty, and says that there is more',
  clock_wrong: 'the header `date` of answers is wrong by `ms`',
} as const;
export type FaultName = keyof typeof FAULTS;

/** Before the request is executed. */
export const BEFORE: readonly FaultName[] = [
  'cut_before',
  'hang_before',
  'http_500_before',
  'http_503',
  'redirect',
  'rate_limit',
  'lock_timeout',
  'key_in_use',
  'conflict_bare',
  'too_many_bare',
  'unauthorized',
  'forbidden',
  'unknown_error',
];
/** While it is executed. */
export const WITHIN: readonly FaultName[] = ['stored_500', 'executed_500', 'slow', 'late'];
/** In its answer. */
export const AFTER: readonly FaultName[] = [
  'cut_after',
  'hang',
  'half',
  'http_500',
  'html',
  'huge',
  'empty',
  'not_json',
  'bom',
  'numbers',
  'nulls',
  'absent',
  'error_200',
  'other_ref',
  'no_ref',
  'no_card',
  'no_error',
  'other_amount',
  'partial',
  'other_id',
  'id_zero',
  'echo_key',
  'echo_card',
  'unknown_status',
  'card_error_beside',
];
/** These faults stand until they are cleared, unless `times` says otherwise. */
export const STANDING: readonly FaultName[] = ['keys_unbound', 'keys_forgotten', 'refunds_exceed', 'pages_twice', 'pages_empty', 'clock_wrong'];

export interface Fault {
  readonly name: FaultName;
  readonly op: Operation | '*';
  /** The reference of the request's metadata, or its idempotency key. null: any. */
  readonly ref: string | null;
  /** null: until it is cleared. */
  times: number | null;
  readonly ms: number;
}
