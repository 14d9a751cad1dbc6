/** The faults of the double, by name. Each can be limited to one operation, one reference and a number of times. */

export const OPERATIONS = ['charge', 'void', 'refund', 'held', 'details', 'unsettled', 'batches', 'batch', 'merchant', 'test'] as const;
export type Operation = (typeof OPERATIONS)[number];

/** For each fault its effect. `executed`: the transaction is stored, as without the fault. */
export const FAULTS = {
  cut_before: 'nothing is executed; the connection breaks',
  cut_after: 'executed; the connection breaks before an answer',
  half: 'executed; the connection breaks within the answer',
  hang_before: 'nothing is executed; no answer comes',
  hang: 'executed; no answer comes',
  delay: 'executed and answered after `ms`',
  late: 'no answer comes; executed after `ms`',
  http_500_before: 'nothing is executed; HTTP 500',
  http_500: 'executed; HTTP 500 without a readable body',
  http_503: 'nothing is executed; HTTP 503',
  html: 'executed; a page in HTML with HTTP 200',
  huge: 'executed; the answer has one more megabyte of spaces',
  empty: 'executed; an empty body',
  not_json: 'executed; a body that is no JSON',
  redirect: 'nothing is executed; HTTP 302 to another address',
  no_bom: 'executed; the answer has no byte order mark',
  numbers: 'executed; codes and ids are numbers in the answer, amounts are text',
  entities: 'executed; the texts in the answer hold XML entities',
  nulls: 'executed; elements without a value are null',
  other_ref: 'executed; the answer names another refId',
  no_ref: 'executed; the answer names no refId',
  echo_card: 'executed; the answer repeats the card number',
  echo_key: 'executed; the answer repeats the transaction key',
  id_zero: 'executed; the answer names the transaction 0',
  partial: 'half of the amount is executed; the answer is an approval of a prepaid card with both amounts',
  split_tender: 'executed; the answer names a splitTenderId',
  test_mode: 'nothing is executed; the answer is an approval of test mode',
  error_too: 'executed; the answer is an approval, and its messages are the error E00013',
  same_id: 'executed; the answer names the newest transaction of another reference',
  unknown_code: 'executed; the answer has the response code 9',
  other_amount: 'executed; the answer is of another transaction',
  reason: 'answers `code` and `reason`; code 2 is stored as declined, code 3 is not stored',
  held: 'the transaction is held for review with `reason` (252: authorised, 253: not authorised)',
  duplicate_unnamed: 'the answer to a duplicate does not name the original',
  duplicate_foreign: 'nothing is executed; the answer is a duplicate of the newest transaction of another reference',
  no_duplicates: 'duplicates are executed again',
  refunds_repeat: 'duplicates of refunds are executed again',
  refunds_exceed: 'refunds of more than remains are executed',
  void_settled: 'a void of a settled transaction is answered as done',
  hidden: 'the transaction is in no list for `ms`, and in no details',
  undone_unlisted: 'voided and declined transactions are in no list',
  no_invoice: 'executed; transactions in the answer have no invoice number',
  details_api_off: 'lists and details answer E00011',
  e00001: 'nothing is executed; E00001',
  e00003: 'nothing is executed; E00003',
  e00007: 'nothing is executed; E00007',
  refused: 'nothing is executed; the E-code of the number `code`; with `reason` 1, an element transactionResponse without code and id',
  batch_late: 'the next batch is listed `ms` after it was settled',
  batch_twice: 'the list of batches names each batch twice',
  batch_growing: 'the last line of each batch is listed only after `ms`',
  batch_pending: 'no batch is settled while this fault stands',
  settlement_error: 'the next batch ends with settlementError',
  clock_wrong: 'the clock of the double is wrong by `ms` in answers',
} as const;
export type FaultName = keyof typeof FAULTS;

export interface Fault {
  readonly id: number;
  readonly name: FaultName;
  readonly op: Operation | '*';
  readonly ref: string | null;
  /** null: until it is cleared. */
  readonly times: number | null;
  readonly ms: number;
  readonly code: number;
  readonly reason: number;
}
