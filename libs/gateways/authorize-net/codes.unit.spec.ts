/**
 * The table of the vendor's codes: each code or status, its outcome, and the page that shows the same table. What a caller gets for an outcome is in
 * libs/payments/vendor-gateways.int.spec.ts.
 */
import { readFileSync } from 'node:fs';
import { describe, expect, test } from '@jest/globals';
import { DECLINES, MAY_STAND, REFUSALS, STATUSES, TEST_MODE } from './codes.js';
import { chargeAnswer, readTransaction, stateOf } from './outcomes.js';

const REF = 'PF000000000000000001';
const page = readFileSync('docs/processors.md', 'utf8');
/** The cells of the table under this heading, without the heading. */
const tableOf = (heading: string): string[][] => {
  const lines = page.split('\n');
  const from = lines.findIndex((line) => line.startsWith(`| ${heading} `));
  const to = lines.findIndex((line, index) => index > from && !line.startsWith('|'));
  return lines.slice(from + 2, to).map((line) =>
    line
      .split('|')
      .slice(1, -1)
      .map((cell) => cell.trim()),
  );
};
const answers = tableOf('Answer of Authorize.Net');
/** The numbers that a cell names, as E-codes. */
const codesIn = (cell: string): string[] => [...cell.matchAll(/\bE?(\d+)\b/g)].map(([, digits]) => `E${digits!.padStart(5, '0')}`);
const reasonsIn = (cell: string): number[] => [...cell.replace(/^code \d/, '').matchAll(/\d+/g)].map(([digits]) => Number(digits));
const rowOf = (start: string): string[] => answers.find(([first]) => first!.startsWith(start))!;

const refusal = (code: string, more: object = {}) => ({ refId: REF, messages: { resultCode: 'Error', message: [{ code, text: 'T' }] }, ...more });
const transaction = (responseCode: number, reason: number) => ({
  refId: REF,
  transactionResponse: { responseCode: String(responseCode), transId: '60000000001', errors: [{ errorCode: String(reason), errorText: 'T' }] },
  messages: { resultCode: 'Ok', message: [{ code: 'I00001', text: 'T' }] },
});
const outcomeOf = (responseCode: number, reason: number): string => {
  const read = readTransaction(transaction(responseCode, reason), REF);
  if (read.kind !== 'transaction') return read.kind;
  return chargeAnswer(read.transaction, 1_000, () => undefined).kind;
};

describe('the table of codes', () => {
  test('the page names each refusal of a whole request, under what it means', () => {
    const of = (what: string) =>
      Object.entries(REFUSALS)
        .filter(([, refused]) => refused.of === what)
        .map(([code]) => code);
    expect([...codesIn(rowOf('E00002')[0]!), 'E00011'].sort()).toEqual(of('request').sort());
    expect(codesIn(rowOf('E00005')[0]!)).toEqual(of('account'));
    expect(codesIn(rowOf('E00104')[0]!)).toEqual(of('vendor'));
    for (const row of [rowOf('E00002'), rowOf('E00011'), rowOf('E00104'), rowOf('E00005')]) expect(row[2]).toMatch(/^nothing was executed/);
    for (const code of [...codesIn(rowOf('E00001')[0]!), ...codesIn(rowOf('E00141')[0]!)]) expect(REFUSALS).not.toHaveProperty(code);
    expect([rowOf('E00001')[2], rowOf('E00141')[2]]).toEqual([expect.stringMatching(/^unknown/), expect.stringMatching(/^unknown/)]);
    expect(REFUSALS[TEST_MODE]).toMatchObject({ of: 'account' });
  });

  test('the page quotes the text of the codes that it explains', () => {
    for (const code of ['E00011', 'E00104']) expect(rowOf(code)[1]).toBe(`"${REFUSALS[code]!.text}"`);
  });

  test.each(Object.keys(REFUSALS))('%s without a transaction is a refusal; beside a transaction it is none', (code) => {
    expect(readTransaction(refusal(code), REF)).toEqual({ kind: 'refused', code });
    const supplement = { transactionResponse: { SupplementalDataQualificationIndicator: 0 } };
    expect(readTransaction(refusal(code, supplement), REF)).toEqual({ kind: 'refused', code });
    for (const transactionResponse of [{ transId: '60000000001' }, { responseCode: '3', transId: '60000000001' }])
      expect(readTransaction(refusal(code, { transactionResponse }), REF).kind).not.toBe('refused');
    // A refusal with the word Ok, or beside a code that may come after an execution.
    const mixed = { messages: { resultCode: 'Error', message: [{ code }, { code: 'E00001' }] } };
    expect(readTransaction({ refId: REF, ...mixed }, REF).kind).toBe('unreadable');
    expect(readTransaction({ refId: REF, messages: { resultCode: 'Ok', message: [{ code }] } }, REF).kind).toBe('unreadable');
  });

  test.each(['E00001', 'E00049', 'E00053', 'E00101', 'E00141', 'E00155', 'E99999'])('%s may come after an execution', (code) => {
    expect(readTransaction(refusal(code), REF).kind).toBe('unreadable');
  });

  test('the page names each reason after which an authorisation may stand', () => {
    const rows = answers.filter(([first]) => first!.startsWith('code 3, reasons'));
    expect(rows.map(([, , outcome]) => outcome)).toEqual(['unknown', 'unknown']);
    expect(rows.flatMap(([first]) => reasonsIn(first!)).sort((a, b) => a - b)).toEqual(Object.keys(MAY_STAND).map(Number));
  });

  test.each(Object.keys(MAY_STAND).map(Number))('reason %i: unknown under code 3, declined under code 2', (reason) => {
    expect([outcomeOf(3, reason), outcomeOf(2, reason)]).toEqual(['unknown', 'declined']);
  });

  test('a reason about the card is a decline; another reason of code 3 was not processed', () => {
    for (const reason of Object.keys(DECLINES).map(Number)) {
      expect(outcomeOf(2, reason)).toBe('declined');
      if (MAY_STAND[reason] === undefined) expect(outcomeOf(3, reason)).toBe('declined');
    }
    for (const reason of [5, 19, 25, 57, 153, 9_999]) expect(outcomeOf(3, reason)).toBe('not_processed');
  });

  test('the page and the table agree about each status of a line', () => {
    const rows = tableOf('Line of a batch at Authorize.Net').map(([names, meaning]) => ({
      names: [...names!.matchAll(/`(\w+)`/g)].map(([, name]) => name!),
      meaning: meaning!,
    }));
    const meaningOf = (name: string) => STATUSES[name]![1];
    const [money, disputes, exceptions, nothing] = rows.map(({ names }) => names);
    expect(money!.map(meaningOf)).toEqual(['sale', 'refund', 'rejected']);
    expect(disputes!.map(meaningOf)).toEqual(['chargeback', 'chargeback_reversal']);
    expect(exceptions!.map(meaningOf)).toEqual(['adjustment', 'adjustment']);
    const ofNothing = Object.keys(STATUSES).filter((name) => meaningOf(name) === 'nothing');
    expect([...nothing!].sort()).toEqual(ofNothing.sort());
  });

  test('a status that the schema does not have is no state; a sale is one status only', () => {
    for (const status of ['', 'settled', 'constructor', '__proto__', 'somethingNew']) expect(stateOf(status)).toBeNull();
    expect(Object.keys(STATUSES).filter((name) => STATUSES[name]![1] === 'sale')).toEqual(['settledSuccessfully']);
    expect(stateOf('couldNotVoid')).toBe('approved');
  });
});
