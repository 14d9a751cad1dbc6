/** The adapter against the double over real sockets: each outcome, duplicates, scans, finalize, batches and every answer that is not as it should be. */
import { type ChildProcess, spawn } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { inspect } from 'node:util';
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import { randomBytes } from 'node:crypto';
import { timestamp } from '#kernel';
import { crockford } from '#platform';
import { type ChargeCall, type GatewayAccount, type Op, type PaymentGateway, type PaymentInstrument, Secret, type SettledBatch, type SettlementRecord, UnknownCursor } from '#payments'; // prettier-ignore
import { type Fault } from '../../../test/doubles/authorize-net/faults.js';
import { type AuthorizeNetDouble, DEFAULT_MERCHANTS, startAuthorizeNetDouble } from '../../../test/doubles/authorize-net/server.js';
import { MovableClock } from '../../../test/support/clock.js';
import { eventually } from '../../../test/support/eventually.js';
import { type AuthorizeNetOptions, createAuthorizeNetGateway, DETAILS_API_PROBLEM } from './authorize-net.js';
import { cutOffAfter, decidedBy } from './cut-off.js';
import { requestsOf } from './requests.js';

const CARD = '4111111111111111';
/** The last cut-off was three hours ago, so that no test meets one by chance. */
const cutOff = { time: new Date(Date.now() - 3 * 3_600_000).toISOString().slice(11, 16), timeZone: 'UTC' };
const MERCHANT = { ...DEFAULT_MERCHANTS[0]!, cutOff };
const { apiLoginId, transactionKey } = MERCHANT;
const account: GatewayAccount = {
  gateway: 'authorize-net',
  merchantAccount: 'shop',
  credentialsRef: 'merchant-account:shop',
  environment: 'sandbox',
};
const MINUTE_MS = 60_000;
const HOUR_MS = 60 * MINUTE_MS;
const DAY_MS = 24 * HOUR_MS;
const MEBIBYTE = 1024 * 1024;

const drawRef = () => crockford(randomBytes(13), 20);
const soon = () => AbortSignal.timeout(15_000);
const card = (number = CARD, cvv = '900'): PaymentInstrument => ({
  type: 'card',
  number: new Secret(number),
  expiry: { month: 1, year: 2041 },
  cvv: new Secret(cvv),
});

let clock: MovableClock;
let double: AuthorizeNetDouble;
let gateway: PaymentGateway;
let logged: unknown[];
let cleanUps: (() => unknown)[];

const opened = (options: Partial<AuthorizeNetOptions> = {}): PaymentGateway => {
  const made = createAuthorizeNetGateway({
    endpoint: double.endpoint,
    account,
    clock,
    credentials: { apiLoginId, transactionKey },
    cutOff,
    listGapMs: 0,
    log: (message, fields) => logged.push([message, fields]),
    ...options,
  });
  cleanUps.push(() => made.close());
  return made;
};

/** A new file for a double. It is removed after the test. */
const doubleFile = (): string => {
  const folder = mkdtempSync(join(tmpdir(), 'payfold-double-'));
  cleanUps.push(() => rmSync(folder, { recursive: true, force: true }));
  return join(folder, 'double.jsonl');
};
const started = async (options: { delayMs?: number } = {}): Promise<AuthorizeNetDouble> => {
  const made = await startAuthorizeNetDouble({ file: doubleFile(), ...options });
  made.vendor.setMerchant(MERCHANT);
  cleanUps.push(() => made.close());
  return made;
};

beforeEach(async () => {
  [clock, logged, cleanUps] = [new MovableClock(), [], []];
  double = await started();
  gateway = opened();
});
afterEach(async () => {
  for (const cleanUp of cleanUps.reverse()) await cleanUp();
});

/** Moves both clocks. */
const advance = (ms: number): void => {
  clock.advance(ms);
  double.vendor.moveTo(double.vendor.ahead + ms);
};
const fault = (name: Fault['name'], fields: Partial<Fault> = {}): void => {
  double.vendor.setFault({ name, op: '*', ref: null, times: 1, ms: 0, code: 2, reason: 2, ...fields });
};
const passBatch = () => double.vendor.closeNow(apiLoginId);
const sales = (ref: string) => double.vendor.all(apiLoginId).filter((one) => one.ref === ref && one.status !== 'declined');

const base = (ref: string, begunAt = timestamp(clock.now())) => ({ ref, account, leg: 'principal', begunAt }) as const;
const charge = (ref = drawRef(), fields: Partial<ChargeCall> = {}, by = gateway) =>
  by.charge({ ...base(ref), amountCents: 1_000, instrument: card(), ...fields }, soon());
const charged = async (ref = drawRef(), fields: Partial<ChargeCall> = {}): Promise<string> => {
  const outcome = await charge(ref, fields);
  if (outcome.kind !== 'approved') throw new Error(`not approved: ${JSON.stringify(outcome)}`);
  return outcome.txn.transactionId;
};
const voidIt = (chargeTransactionId: string, ref = drawRef()) =>
  gateway.void({ ...base(ref), chargeTransactionId, amountCents: 1_000, askedBy: 'void' }, soon());
const refund = (chargeTransactionId: string, amountCents = 400, ref = drawRef(), last4 = '1111') =>
  gateway.refund({ ...base(ref), chargeTransactionId, amountCents, last4 }, soon());
const asked = (ref: string, op: Op, chargeTransactionId: string | null, begunAt?: string, amountCents = 1_000) =>
  ({ ...base(ref, begunAt), op, amountCents, chargeTransactionId, last4: '1111' }) as const;
const finalize = (ref: string, op: Op = 'charge', chargeTransactionId: string | null = null, begunAt?: string, amountCents = 1_000) =>
  gateway.finalize(asked(ref, op, chargeTransactionId, begunAt, amountCents), soon());
const lookup = (ref: string, op: Op = 'charge', chargeTransactionId: string | null = null) =>
  gateway.lookup(asked(ref, op, chargeTransactionId), soon());
const listCalls = () => (double.calls.unsettled ?? 0) + (double.calls.batches ?? 0) + (double.calls.batch ?? 0);

/** Nothing that was logged or returned may hold the card or the key. */
const holdsNoSecret = (...values: unknown[]): void => {
  const text = inspect([...values, logged], { depth: 20 });
  for (const secret of [CARD, transactionKey]) expect(text).not.toContain(secret);
};

describe('charge', () => {
  test('is approved, with the checks and the card', async () => {
    const ref = drawRef();
    const payer = { firstName: 'Ada', email: 'ada@example.org', phone: '555', address: { line1: '1 Main St', zip: '46205' } };
    const outcome = await charge(ref, { payer });
    expect(outcome).toEqual({
      kind: 'approved',
      txn: {
        transactionId: expect.stringMatching(/^6\d{10}$/),
        authCode: expect.stringMatching(/^[A-Z0-9]{6}$/),
        avs: 'no_match',
        cvv: 'match',
        card: { brand: 'visa', last4: '1111' },
      },
    });
    expect(sales(ref)).toMatchObject([{ amountCents: 1_000, status: 'capturedPendingSettlement' }]);
  });

  test.each([
    [1, '0.01'],
    [29, '0.29'],
    [1_235, '12.35'],
    [99_999_999, '999999.99'],
  ])('%i cents are sent and read as %s dollars', async (amountCents) => {
    const ref = drawRef();
    await charged(ref, { amountCents });
    expect(sales(ref)).toMatchObject([{ amountCents }]);
    expect(await lookup(ref)).toMatchObject({ found: true, amountCents });
  });

  test.each<[number, number, string]>([
    [2, 2, 'generic_decline'],
    [2, 3, 'generic_decline'],
    [2, 4, 'generic_decline'],
    [2, 27, 'postal_code_mismatch'],
    [2, 45, 'postal_code_mismatch'],
    [2, 127, 'postal_code_mismatch'],
    [2, 44, 'cvv_mismatch'],
    [2, 65, 'cvv_mismatch'],
    [3, 78, 'cvv_mismatch'],
    [3, 8, 'expired_card'],
    [2, 317, 'expired_card'],
    [3, 6, 'generic_decline'],
    [3, 7, 'generic_decline'],
    [3, 17, 'generic_decline'],
    [3, 28, 'generic_decline'],
    [3, 37, 'generic_decline'],
    [2, 315, 'generic_decline'],
    [2, 316, 'generic_decline'],
    [2, 9_999, 'generic_decline'],
  ])('response %i with reason %i is a decline: %s', async (code, reason, expected) => {
    fault('reason', { code, reason });
    const ref = drawRef();
    expect(await charge(ref)).toMatchObject({ kind: 'declined', decline: { code: expected, raw: `response ${code}, reason ${reason}` } });
    expect(sales(ref)).toEqual([]);
  });

  test.each([5, 13, 19, 25, 33, 57, 153, 9_999])('response 3 with reason %i: certainly nothing happened', async (reason) => {
    fault('reason', { code: 3, reason });
    expect(await charge()).toEqual({ kind: 'not_processed', answered: true, raw: `response 3, reason ${reason}` });
  });

  test.each([36, 52, 120, 121, 122, 127, 141, 145, 152, 165, 181])(
    'response 3 with reason %i: an authorisation may stand, so the outcome is unknown, and never "charge again"',
    async (reason) => {
      fault('reason', { code: 3, reason });
      expect(await charge()).toEqual({ kind: 'unknown', cause: 'unreadable', raw: `response 3, reason ${reason}` });
      const id = await charged();
      fault('reason', { op: 'void', code: 3, reason });
      expect(await voidIt(id)).toMatchObject({ kind: 'unknown' });
      passBatch();
      fault('reason', { op: 'refund', code: 3, reason });
      expect(await refund(id)).toMatchObject({ kind: 'unknown' });
    },
  );

  test.each([2, 4, 5, 6, 8, 9, 10, 11, 13, 14, 15, 16, 45, 104, 124])(
    'a refusal of the whole request, E-code %i: certainly nothing happened',
    async (code) => {
      for (const reason of [1, 2]) {
        fault('refused', { op: 'charge', code, reason });
        expect(await charge()).toEqual({ kind: 'not_processed', answered: false, raw: `E${String(code).padStart(5, '0')}` });
      }
      const id = await charged();
      fault('refused', { op: 'void', code });
      expect(await voidIt(id)).toMatchObject({ kind: 'not_processed', answered: false });
      fault('refused', { op: 'details', code });
      expect(await finalize(drawRef(), 'void', id)).toEqual({ kind: 'cannot_tell', why: 'unreachable' });
    },
  );

  test.each([1, 27, 49, 53, 101, 102, 103, 141, 155, 999])('E-code %i may come after an execution: unknown', async (code) => {
    for (const reason of [1, 2]) {
      fault('refused', { op: 'charge', code, reason });
      expect((await charge()).kind).toBe('unknown');
    }
  });

  test('faults of the account count as refused credentials, and those of the request do not', async () => {
    let refusals = 0;
    gateway = opened({ onRefusedCredentials: () => (refusals += 1) });
    for (const code of [5, 6, 7, 8, 9, 10, 124]) {
      fault('refused', { op: 'charge', code });
      await charge();
    }
    expect(refusals).toBe(7);
    for (const code of [2, 3, 4, 11, 13, 14, 15, 16, 45, 104]) {
      fault('refused', { op: 'charge', code });
      await charge();
    }
    expect(refusals).toBe(7);
  });

  test('a part that a prepaid card gave must not stand: it is undone, now and when a list shows it', async () => {
    fault('partial');
    const ref = drawRef();
    const outcome = await charge(ref);
    expect(outcome).toEqual({ kind: 'held', why: 'partial', transactionId: expect.any(String), raw: 'response 1, reason 1' });
    expect(sales(ref)).toMatchObject([{ amountCents: 500 }]);
    expect(await finalize(ref)).toMatchObject({ kind: 'executed', result: { kind: 'held', why: 'partial' } });
    expect(await voidIt((outcome as { transactionId: string }).transactionId)).toMatchObject({ kind: 'approved' });
    expect(await finalize(ref)).toMatchObject({ kind: 'undone' });
  });

  test('text that XML cannot hold is left out for the vendor, and the currency is named', async () => {
    const payer = { firstName: 'A\u0000d\u000ba\ud800', lastName: '\ufffe\u{1f600}', address: { line1: 'Main\u001f St\t1', city: '\uffff' } };
    expect(await charge(drawRef(), { payer })).toMatchObject({ kind: 'approved' });
    const { transactionRequest } = (
      JSON.parse(
        requestsOf({ apiLoginId, transactionKey }).charge(
          { ...base(drawRef()), amountCents: 1, instrument: card(), payer },
          card() as Extract<PaymentInstrument, { type: 'card' }>,
        ),
      ) as { createTransactionRequest: { transactionRequest: object } }
    ).createTransactionRequest;
    expect(transactionRequest).toMatchObject({ currencyCode: 'USD', billTo: { firstName: 'Ada', lastName: '\u{1f600}', address: 'Main St\t1' } });
    expect(JSON.stringify(transactionRequest)).not.toContain('city');
    expect(requestsOf({ apiLoginId, transactionKey }).refund({ ...base(drawRef()), chargeTransactionId: '1', amountCents: 1, last4: '1111' }, '1111')).toContain('"currencyCode":"USD"'); // prettier-ignore
  });

  test('an expired card and an invalid number are declined by the vendor', async () => {
    expect(await charge(drawRef(), { instrument: { ...card(), expiry: { month: 1, year: 2020 } } as PaymentInstrument })).toMatchObject({ decline: { code: 'expired_card' } }); // prettier-ignore
    expect(await charge(drawRef(), { instrument: card('4111111111111112') })).toMatchObject({ decline: { code: 'generic_decline' } });
  });

  test.each<[Fault['name'], string, object]>([
    ['e00003', 'the vendor refuses the form', { kind: 'not_processed', answered: false, raw: 'E00003' }],
    ['e00007', 'the vendor refuses the credentials', { kind: 'not_processed', answered: false, raw: 'E00007' }],
    ['e00001', 'an error of the vendor', { kind: 'unknown', cause: 'unreadable' }],
    ['http_500_before', 'an error of a server', { kind: 'unknown', cause: 'http_5xx' }],
    ['http_503', 'a server that is away', { kind: 'unknown', cause: 'http_5xx' }],
    ['cut_before', 'a cut after the first byte', { kind: 'unknown', cause: 'disconnected' }],
    ['redirect', 'a redirect is not followed', { kind: 'unknown', cause: 'unreadable', raw: 'HTTP 302' }],
  ])('%s: %s', async (name, _, expected) => {
    fault(name);
    const ref = drawRef();
    const outcome = await charge(ref);
    expect(outcome).toMatchObject(expected);
    expect(sales(ref)).toEqual([]);
    holdsNoSecret(outcome);
  });

  test('refused credentials are logged with the account, and never with the key', async () => {
    let refusals = 0;
    gateway = opened({ credentials: { apiLoginId, transactionKey: 'wrong-key-0000001' }, onRefusedCredentials: () => (refusals += 1) });
    expect(await charge()).toMatchObject({ kind: 'not_processed', answered: false });
    expect(refusals).toBe(1);
    expect(logged).toEqual([[expect.stringContaining('refuses the credentials'), { merchantAccount: 'shop' }]]);
    expect(JSON.stringify(logged)).not.toContain('wrong-key');
  });

  test('no byte was sent: certainly nothing happened', async () => {
    const server = createServer();
    await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
    const { port } = server.address() as { port: number };
    await new Promise((resolve) => server.close(resolve));
    expect(await charge(drawRef(), {}, opened({ endpoint: `http://127.0.0.1:${port}/xml/v1/request.api` }))).toMatchObject({ kind: 'not_processed', answered: false }); // prettier-ignore
  });

  test('a charge is not sent later than 55 s after its intent', async () => {
    expect(await charge(drawRef(), { begunAt: timestamp(clock.now() - 55_100) })).toMatchObject({ kind: 'not_processed', answered: false });
    expect(await charge(drawRef(), { begunAt: 'never' })).toMatchObject({ kind: 'not_processed', answered: false });
    expect(double.calls.charge).toBeUndefined();
    expect(await charge(drawRef(), { begunAt: timestamp(clock.now() - 50_000) })).toMatchObject({ kind: 'approved' });
  });

  test('a token is not sent', async () => {
    expect(await charge(drawRef(), { instrument: { type: 'card_token', token: new Secret('tok') } })).toMatchObject({ kind: 'rejected', why: 'unsupported' }); // prettier-ignore
    expect(double.calls.charge).toBeUndefined();
  });

  test('no answer before the deadline: the outcome is unknown, and the charge can be found', async () => {
    fault('hang');
    const ref = drawRef();
    expect(await gateway.charge({ ...base(ref), amountCents: 1_000, instrument: card() }, AbortSignal.timeout(300))).toMatchObject({ kind: 'unknown', cause: 'timeout' }); // prettier-ignore
    expect(await finalize(ref)).toMatchObject({ kind: 'executed', result: { kind: 'approved' } });
  });
});

describe('answers that are not as they should be', () => {
  test.each<Fault['name']>([
    'half',
    'html',
    'huge',
    'empty',
    'not_json',
    'http_500',
    'cut_after',
    'other_ref',
    'no_ref',
    'echo_card',
    'echo_key',
    'id_zero',
    'error_too',
    'split_tender',
    'unknown_code',
    'other_amount',
  ])('%s: never approved, and nothing secret in what is logged or returned', async (name) => {
    fault(name);
    const outcome = await charge();
    expect(outcome.kind).toBe('unknown');
    holdsNoSecret(outcome);
  });

  test.each<Fault['name']>(['numbers', 'entities', 'nulls', 'no_bom'])('%s: the same meaning in another form', async (name) => {
    fault(name);
    const ref = drawRef();
    const outcome = await charge(ref);
    expect(outcome).toMatchObject({ kind: 'approved', txn: { card: { last4: '1111' } } });
    for (const op of ['unsettled', 'details', 'batches'] as const) fault(name, { op, times: null });
    expect(await finalize(ref)).toEqual({ kind: 'executed', result: outcome });
  });

  test.each<Fault['name']>(['id_zero', 'split_tender', 'other_amount'])('%s is an alarm', async (name) => {
    fault(name);
    await charge();
    expect(logged).toEqual([[expect.stringContaining('does not count'), { merchantAccount: 'shop', raw: 'response 1, reason 1' }]]);
  });

  test('an account in test mode never approves', async () => {
    const id = await charged();
    let stops = 0;
    gateway = opened({ onTestMode: () => (stops += 1) });
    double.vendor.setMerchant({ ...MERCHANT, testMode: true });
    expect(await charge()).toEqual({ kind: 'not_processed', answered: false, raw: 'test mode' });
    expect(stops).toBe(1);
    fault('test_mode', { op: 'void' });
    expect(await voidIt(id)).toMatchObject({ kind: 'not_processed', answered: false });
    fault('refused', { op: 'charge', code: 9 });
    expect(await charge()).toMatchObject({ kind: 'not_processed', answered: false });
    expect(stops).toBe(3);
  });

  test.each<Fault['name']>(['half', 'html', 'huge', 'empty', 'not_json', 'http_500', 'cut_after', 'other_ref', 'unknown_code', 'e00001'])(
    '%s: no void or refund is approved by it',
    async (name) => {
      const id = await charged();
      fault(name, { op: 'void' });
      expect((await voidIt(id)).kind).toBe('unknown');
      const settled = await charged();
      passBatch();
      fault(name, { op: 'refund' });
      expect((await refund(settled)).kind).toBe('unknown');
    },
  );

  test.each<Fault['name']>(['half', 'html', 'empty', 'not_json', 'http_500', 'cut_after', 'echo_key', 'e00001', 'e00007'])(
    '%s in a list or in details: nobody can tell',
    async (name) => {
      const ref = drawRef();
      const id = await charged(ref);
      for (const op of ['unsettled', 'details'] as const) {
        fault(name, { op });
        expect(await finalize(ref)).toEqual({ kind: 'cannot_tell', why: 'unreachable' });
      }
      fault(name, { op: 'details' });
      expect(await finalize(drawRef(), 'void', id)).toEqual({ kind: 'cannot_tell', why: 'unreachable' });
      fault(name, { op: 'details' });
      await expect(gateway.transaction!(id, soon())).rejects.toThrow('Authorize.Net');
      holdsNoSecret();
    },
  );

  test('an unknown status in details is never an approval', async () => {
    const ref = drawRef();
    const id = await charged(ref);
    double.vendor.setStatus(double.vendor.transaction(apiLoginId, id)!, 'somethingNew' as never);
    expect(await finalize(ref)).toEqual({ kind: 'cannot_tell', why: 'unreachable' });
    expect(await finalize(drawRef(), 'void', id)).toEqual({ kind: 'cannot_tell', why: 'unreachable' });
  });
});

describe('held for review', () => {
  test.each([
    [252, 'voided'],
    [253, 'declined'],
  ])('reason %i is no approval, and a void undoes it', async (reason, afterwards) => {
    fault('held', { reason });
    const ref = drawRef();
    const outcome = await charge(ref);
    expect(outcome).toEqual({ kind: 'held', transactionId: expect.any(String), raw: `response 4, reason ${reason}` });
    const { transactionId } = outcome as { transactionId: string };
    expect(await finalize(ref)).toEqual({ kind: 'executed', result: outcome });
    expect(await lookup(ref)).toMatchObject({ state: 'held' });
    expect(await finalize(drawRef(), 'reversal', transactionId)).toEqual({ kind: 'cannot_tell', why: 'held' });

    expect(await voidIt(transactionId)).toEqual({ kind: 'approved', txn: { transactionId } });
    expect(sales(ref).map(({ status }) => status)).toEqual(afterwards === 'voided' ? ['voided'] : []);
    expect(await finalize(drawRef(), 'reversal', transactionId)).toMatchObject({ kind: 'executed', result: { kind: 'approved' } });
    expect(await voidIt(transactionId)).toMatchObject({ kind: 'approved', txn: { transactionId } });
  });

  test('reason 193 with another response code is held too', async () => {
    fault('reason', { code: 2, reason: 193 });
    expect((await charge()).kind).toBe('held');
  });

  test('a person approves it: the void then undoes a charge', async () => {
    fault('held', { reason: 253 });
    const { transactionId } = (await charge()) as { transactionId: string };
    double.vendor.setStatus(double.vendor.transaction(apiLoginId, transactionId)!, 'capturedPendingSettlement');
    expect(await voidIt(transactionId)).toMatchObject({ kind: 'approved' });
  });
});

describe('duplicates', () => {
  test('a repeated charge is answered the same, and charges once', async () => {
    const ref = drawRef();
    const first = await charge(ref);
    expect(await charge(ref)).toEqual(first);
    expect(sales(ref)).toHaveLength(1);
  });

  test('charges that race are one', async () => {
    const ref = drawRef();
    const outcomes = await Promise.all(Array.from({ length: 20 }, () => charge(ref)));
    for (const outcome of outcomes) expect(outcome).toEqual(outcomes[0]);
    expect(outcomes[0]!.kind).toBe('approved');
    expect(sales(ref)).toHaveLength(1);
  });

  test('a repeated decline is a decline', async () => {
    const ref = drawRef();
    const declined = await charge(ref, { payer: { address: { zip: '46282' } } });
    expect(declined).toMatchObject({ kind: 'declined', decline: { code: 'generic_decline' } });
    expect(await charge(ref, { payer: { address: { zip: '46282' } } })).toEqual(declined);
  });

  test('a repeated charge that was held is held', async () => {
    fault('held', { reason: 252 });
    const ref = drawRef();
    const held = await charge(ref);
    expect(await charge(ref)).toEqual(held);
  });

  test('an answer that does not name the original: it is found in the lists', async () => {
    const ref = drawRef();
    const first = await charge(ref);
    fault('duplicate_unnamed', { times: null });
    expect(await charge(ref)).toEqual(first);
    passBatch();
    expect(await charge(ref)).toEqual(first);
  });

  test('a duplicate of somebody else’s charge: nothing happened for ours, and it is no decline', async () => {
    await charged();
    fault('duplicate_foreign');
    const ref = drawRef();
    expect(await charge(ref)).toEqual({ kind: 'not_processed', answered: true, raw: 'response 3, reason 11' });
    expect(sales(ref)).toEqual([]);
  });

  test('a duplicate that cannot be read is unknown, and never a decline', async () => {
    const ref = drawRef();
    await charged(ref);
    fault('html', { op: 'details' });
    expect(await charge(ref)).toMatchObject({ kind: 'unknown' });
    fault('reason', { code: 3, reason: 11 });
    expect(await charge(drawRef())).toMatchObject({ kind: 'unknown' });
  });

  test('a charge that was voided meanwhile is not approved again', async () => {
    const ref = drawRef();
    await voidIt(await charged(ref));
    expect(await charge(ref)).toMatchObject({ kind: 'rejected', why: 'already_reversed' });
  });
});

describe('void', () => {
  test('undoes a charge, as often as it is asked', async () => {
    const ref = drawRef();
    const transactionId = await charged(ref);
    const voided = await voidIt(transactionId);
    expect(voided).toEqual({ kind: 'approved', txn: { transactionId } });
    expect(await voidIt(transactionId)).toEqual({ kind: 'approved', txn: { transactionId, before: true } });
    expect(sales(ref)).toMatchObject([{ status: 'voided' }]);
  });

  test('after the batch it is refused, also between cut-off and settlement', async () => {
    const transactionId = await charged();
    advance(DAY_MS);
    double.vendor.tick();
    expect(await voidIt(transactionId)).toMatchObject({ kind: 'rejected', why: 'already_settled' });
    fault('batch_pending', { times: null });
    const pending = await charged();
    advance(DAY_MS);
    expect(await voidIt(pending)).toMatchObject({ kind: 'rejected', why: 'already_settled' });
  });

  test('a transaction that is not there', async () => {
    expect(await voidIt('60999999999')).toMatchObject({ kind: 'rejected', why: 'not_found' });
    expect(await voidIt('ch_1')).toMatchObject({ kind: 'rejected', why: 'not_found' });
  });

  test('the answer is lost: the charge’s own state says that it was voided', async () => {
    const transactionId = await charged();
    fault('cut_after', { op: 'void' });
    expect(await voidIt(transactionId)).toMatchObject({ kind: 'unknown' });
    expect(await finalize(drawRef(), 'void', transactionId)).toEqual({ kind: 'executed', result: { kind: 'approved', txn: { transactionId } } });
  });

  test('a void with a last moment is not sent later', async () => {
    const chargeTransactionId = await charged();
    const call = { ...base(drawRef()), chargeTransactionId, amountCents: 1_000, askedBy: 'reversal' } as const;
    expect(await gateway.void({ ...call, notAfter: timestamp(clock.now() - 1) }, soon())).toMatchObject({ kind: 'not_processed', answered: false });
    expect(double.calls.void).toBeUndefined();
  });
});

describe('refund', () => {
  const settled = async (): Promise<string> => {
    const id = await charged();
    passBatch();
    return id;
  };

  test('returns a part, and no more than there is', async () => {
    const id = await settled();
    const first = await refund(id, 400);
    expect(first).toMatchObject({ kind: 'approved', txn: { transactionId: expect.not.stringMatching(id) } });
    expect(await refund(id, 601)).toMatchObject({ kind: 'rejected', why: 'exceeds' });
    expect(await refund(id, 600)).toMatchObject({ kind: 'approved' });
    expect(await refund(id, 1)).toMatchObject({ kind: 'rejected', why: 'exceeds' });
  });

  test('without the last four digits they are asked for', async () => {
    expect(await refund(await settled(), 400, drawRef(), '')).toMatchObject({ kind: 'approved' });
  });

  test('before the batch, of a voided charge, of none', async () => {
    const open = await charged();
    expect(await refund(open)).toMatchObject({ kind: 'rejected', why: 'not_settled' });
    await voidIt(open);
    expect(await refund(open)).toMatchObject({ kind: 'rejected', why: 'already_reversed' });
    expect(await refund('60999999999')).toMatchObject({ kind: 'rejected', why: 'not_found' });
  });

  test('a repeated refund is executed once', async () => {
    const id = await settled();
    const ref = drawRef();
    const first = await refund(id, 400, ref);
    expect(await refund(id, 400, ref)).toEqual(first);
    fault('duplicate_unnamed', { times: null });
    expect(await refund(id, 400, ref)).toEqual(first);
    expect(sales(ref)).toHaveLength(1);
  });

  test('that a repeat is safe must be proved first', () => {
    expect(gateway.capabilities.repeatSafeMs).toEqual({ void: Infinity, refund: 0 });
    expect(opened({ refundsOnce: true }).capabilities.repeatSafeMs.refund).toBe(7.5 * HOUR_MS);
  });

  test('a lost answer is found by the reference', async () => {
    const id = await settled();
    const ref = drawRef();
    fault('cut_after', { op: 'refund' });
    expect(await refund(id, 400, ref)).toMatchObject({ kind: 'unknown' });
    const found = await finalize(ref, 'refund', id, undefined, 400);
    expect(found).toMatchObject({ kind: 'executed', result: { kind: 'approved' } });
    passBatch();
    expect(await finalize(ref, 'refund', id, undefined, 400)).toEqual(found);
  });

  test('a refund that its batch rejects has returned nothing', async () => {
    const id = await settled();
    const [ref, begunAt] = [drawRef(), timestamp(clock.now())];
    fault('cut_after', { op: 'refund' });
    expect(await refund(id, 400, ref)).toMatchObject({ kind: 'unknown' });
    fault('settlement_error');
    passBatch();
    expect(await finalize(ref, 'refund', id, begunAt, 400)).toMatchObject({
      kind: 'executed',
      result: { kind: 'rejected', why: 'settlement_rejected' },
    });
  });

  test('a refund that never arrived: not visible, and never after its batch', async () => {
    const id = await settled();
    const [ref, begunAt] = [drawRef(), timestamp(clock.now())];
    expect(await finalize(ref, 'refund', id, begunAt, 400)).toMatchObject({ kind: 'cannot_tell', why: 'not_visible' });
    advance(3 * DAY_MS);
    expect(await finalize(ref, 'refund', id, begunAt, 400)).toEqual({ kind: 'never' });
  });
});

describe('look-up and finalize by scans', () => {
  const foreigners = () => {
    for (const kind of ['authorizedPendingCapture', 'FDSPendingReview'] as const)
      double.vendor.store({ merchant: apiLoginId, type: 'authOnlyTransaction', ref: 'INV-7', amountCents: 500, last4: '0027', brand: 'Visa', submitMs: double.vendor.nowMs - 20 * DAY_MS, visibleMs: 0, refTransId: null, responseCode: 1, reason: 1, authCode: 'F', avs: 'P', cvv: 'P', fingerprint: '', status: kind }); // prettier-ignore
  };

  test('finds a charge among the unsettled and in its batch', async () => {
    foreigners();
    const ref = drawRef();
    const transactionId = await charged(ref);
    expect(await lookup(ref)).toMatchObject({ found: true, state: 'approved', transactionId, amountCents: 1_000 });
    const batch = passBatch()!;
    expect(await lookup(ref)).toMatchObject({ found: true, state: 'settled', batchId: batch.id });
    expect(await lookup(drawRef())).toEqual({ found: false });
    expect(await lookup(drawRef(), 'void', transactionId)).toMatchObject({ found: true, state: 'settled' });
    expect(await lookup(drawRef(), 'void')).toEqual({ found: false });
  });

  test('those who ask together share one scan', async () => {
    const refs = Array.from({ length: 20 }, () => drawRef());
    await Promise.all(refs.slice(0, 10).map((ref) => charged(ref)));
    const answers = await Promise.all(refs.map((ref) => finalize(ref)));
    expect(answers.slice(0, 10).map(({ kind }) => kind)).toEqual(Array(10).fill('executed'));
    expect(answers.slice(10)).toEqual(
      Array(10).fill(expect.objectContaining({ kind: 'cannot_tell', why: 'not_visible', until: expect.any(String) })),
    );
    expect(listCalls()).toBeLessThanOrEqual(3);
  });

  test('all pages are read, and a scan stops at transactions that are older than the question', async () => {
    double.vendor.seed({
      merchant: apiLoginId,
      count: 5_000,
      amountCents: 100,
      submitMs: double.vendor.nowMs - 2 * DAY_MS,
      label: 'A',
      settled: false,
    });
    const ref = drawRef();
    await charged(ref);
    double.vendor.seed({ merchant: apiLoginId, count: 1_500, amountCents: 100, submitMs: double.vendor.nowMs, label: 'B', settled: false });
    expect(await lookup(ref)).toMatchObject({ found: true });
    expect(double.calls.unsettled).toBe(2);
  });

  test('a scan that began before a question does not prove absence; the next one does', async () => {
    double = await started({ delayMs: 400 });
    gateway = opened();
    double.vendor.seed({ merchant: apiLoginId, count: 3_500, amountCents: 100, submitMs: double.vendor.nowMs, label: 'S', settled: false });
    const first = finalize(drawRef());
    await eventually(() => (double.calls.unsettled ?? 0) >= 2);
    const ref = drawRef();
    await charged(ref);
    const late = await finalize(ref);
    expect(late).toEqual({ kind: 'cannot_tell', why: 'in_flight', until: expect.any(String) });
    expect(Date.parse((late as { until: string }).until)).toBeGreaterThan(clock.now());
    expect(await first).toMatchObject({ kind: 'cannot_tell', why: 'in_flight' });
    expect(await eventually(async () => (await finalize(ref).then((one) => one.kind === 'executed' && one)) || false)).toMatchObject({ result: { kind: 'approved' } }); // prettier-ignore
  });

  test('the result of a scan is kept, but a new question gets a new scan', async () => {
    const ref = drawRef();
    expect(await finalize(ref)).toMatchObject({ why: 'not_visible' });
    const calls = listCalls();
    await charged(ref);
    expect(await finalize(ref)).toMatchObject({ kind: 'executed' });
    expect(listCalls()).toBeGreaterThan(calls);
    const again = listCalls();
    expect(await finalize(ref)).toMatchObject({ kind: 'executed' });
    expect(listCalls()).toBe(again);
  });

  test('a charge that is visible only after 3 minutes is found then', async () => {
    fault('hidden', { op: 'charge', ms: 3 * MINUTE_MS });
    fault('cut_after', { op: 'charge' });
    const [ref, begunAt] = [drawRef(), timestamp(clock.now())];
    await charge(ref);
    expect(await finalize(ref, 'charge', null, begunAt)).toMatchObject({ kind: 'cannot_tell', why: 'not_visible' });
    advance(3 * MINUTE_MS + 1_000);
    expect(await finalize(ref, 'charge', null, begunAt)).toMatchObject({ kind: 'executed', result: { kind: 'approved' } });
  });

  test('a charge that was voided is undone', async () => {
    const ref = drawRef();
    const transactionId = await charged(ref);
    await voidIt(transactionId);
    expect(await finalize(ref)).toEqual({ kind: 'undone', transactionId });
  });

  test('another amount under our reference is an alarm, and nobody can tell', async () => {
    const ref = drawRef();
    await charged(ref);
    expect(await finalize(ref, 'charge', null, undefined, 999)).toEqual({ kind: 'cannot_tell', why: 'unreachable' });
    expect(JSON.stringify(logged)).toContain('another amount');
  });

  test('two transactions under one reference are an alarm', async () => {
    fault('no_duplicates', { times: null });
    const ref = drawRef();
    await charged(ref);
    await charged(ref);
    expect(await finalize(ref)).toMatchObject({ kind: 'executed', result: { kind: 'approved' } });
    expect(JSON.stringify(logged)).toContain('two transactions');
  });

  test('a reversal without its charge was never sent; one of an open charge may still arrive', async () => {
    expect(await finalize(drawRef(), 'reversal')).toEqual({ kind: 'never' });
    const id = await charged();
    expect(await finalize(drawRef(), 'reversal', id)).toEqual({ kind: 'cannot_tell', why: 'not_visible' });
    passBatch();
    expect(await finalize(drawRef(), 'reversal', id)).toEqual({ kind: 'never' });
  });
});

describe('never', () => {
  const gone = async (): Promise<{ ref: string; begunAt: string; until: string }> => {
    const [ref, begunAt] = [drawRef(), timestamp(clock.now())];
    const answer = await finalize(ref, 'charge', null, begunAt);
    expect(answer).toMatchObject({ kind: 'cannot_tell', why: 'not_visible', until: expect.any(String) });
    return { ref, begunAt, until: (answer as { until: string }).until };
  };
  const toUntil = (until: string, more = 0) => advance(Date.parse(until) - clock.now() + more);

  test('is said only after the batch, and from then on', async () => {
    await charged();
    const { ref, begunAt, until } = await gone();
    toUntil(until, -MINUTE_MS);
    expect(await finalize(ref, 'charge', null, begunAt)).toMatchObject({ kind: 'cannot_tell', why: 'not_visible', until });
    toUntil(until, MINUTE_MS);
    expect(await finalize(ref, 'charge', null, begunAt)).toEqual({ kind: 'never' });
    expect(await finalize(ref, 'charge', null, begunAt)).toEqual({ kind: 'never' });
    expect(await charge(ref, { begunAt })).toMatchObject({ kind: 'not_processed', answered: false });
  });

  test('foreign transactions that no batch takes do not stand in its way', async () => {
    for (const status of ['authorizedPendingCapture', 'FDSPendingReview'] as const)
      double.vendor.store({ merchant: apiLoginId, type: 'authOnlyTransaction', ref: 'INV-8', amountCents: 500, last4: '0027', brand: 'Visa', submitMs: double.vendor.nowMs - DAY_MS, visibleMs: 0, refTransId: null, responseCode: 1, reason: 1, authCode: 'F', avs: 'P', cvv: 'P', fingerprint: '', status }); // prettier-ignore
    const { ref, begunAt, until } = await gone();
    toUntil(until, MINUTE_MS);
    expect(await finalize(ref, 'charge', null, begunAt)).toEqual({ kind: 'never' });
  });

  test('until then, the answer about a charge names the cut-off, after which it cannot be voided', async () => {
    const begunAt = timestamp(clock.now());
    const until = timestamp(decidedBy(cutOff, Date.parse(begunAt)).untilMs);
    const voidableUntil = timestamp(Date.parse(until) - 6 * HOUR_MS);
    expect(voidableUntil.slice(11, 16)).toBe(cutOff.time);
    expect(await finalize(drawRef(), 'charge', null, begunAt)).toEqual({ kind: 'cannot_tell', why: 'not_visible', until, voidableUntil });
    expect(await finalize(drawRef(), 'refund', await charged(), begunAt)).toEqual({ kind: 'cannot_tell', why: 'not_visible', until });
    gateway = opened({ cutOff: null });
    expect(await finalize(drawRef(), 'charge', null, begunAt)).toEqual({ kind: 'cannot_tell', why: 'not_visible', until: expect.any(String) });
  });

  test('is not said about a refund while a repeat of it may have missed the batch', async () => {
    const id = await charged();
    passBatch();
    gateway = opened({ refundsOnce: true });
    // The batch after the first sending is settled long before the last repeat may be sent.
    advance(cutOffAfter(cutOff, clock.now()) - clock.now() - 15 * MINUTE_MS);
    const [ref, begunAt] = [drawRef(), timestamp(clock.now())];
    const first = decidedBy(cutOff, Date.parse(begunAt)).untilMs;
    const until = timestamp(decidedBy(cutOff, Date.parse(begunAt) + 7.5 * HOUR_MS).untilMs);
    expect(Date.parse(until)).toBeGreaterThan(first);
    toUntil(timestamp(first), MINUTE_MS);
    expect(await finalize(ref, 'refund', id, begunAt, 400)).toEqual({ kind: 'cannot_tell', why: 'not_visible', until });
    toUntil(until, MINUTE_MS);
    expect(await finalize(ref, 'refund', id, begunAt, 400)).toEqual({ kind: 'never' });
  });

  test('is not said while a batch is not settled', async () => {
    await charged();
    fault('batch_pending', { times: null });
    const { ref, begunAt, until } = await gone();
    toUntil(until, MINUTE_MS);
    expect(await finalize(ref, 'charge', null, begunAt)).toMatchObject({ kind: 'cannot_tell', why: 'not_visible' });
    double.vendor.heal('batch_pending');
    expect(await finalize(ref, 'charge', null, begunAt)).toEqual({ kind: 'never' });
  });

  test('is not said while a transaction from before the cut-off still waits', async () => {
    const { ref, begunAt, until } = await gone();
    toUntil(until, MINUTE_MS);
    double.vendor.store({ merchant: apiLoginId, type: 'authCaptureTransaction', ref: 'INV-9', amountCents: 500, last4: '0027', brand: 'Visa', submitMs: Date.parse(begunAt), visibleMs: 0, refTransId: null, responseCode: 1, reason: 1, authCode: 'F', avs: 'P', cvv: 'P', fingerprint: '', status: 'pendingSettlement' as never }); // prettier-ignore
    const stuck = double.vendor.unsettled(apiLoginId).at(-1)!;
    expect(await finalize(ref, 'charge', null, begunAt)).toEqual({ kind: 'never' });
    // Only after the call: the double would close its batch.
    double.vendor.tick = () => undefined;
    double.vendor.setStatus(stuck, 'capturedPendingSettlement');
    const { ref: other } = { ref: drawRef() };
    expect(await finalize(other, 'charge', null, begunAt)).toMatchObject({ kind: 'cannot_tell', why: 'not_visible' });
  });

  test('an eCheck that waits for days does not stand in its way', async () => {
    const { ref, begunAt, until } = await gone();
    toUntil(until, MINUTE_MS);
    double.vendor.store({ merchant: apiLoginId, type: 'authCaptureTransaction', ref: 'INV-10', amountCents: 500, last4: '0027', brand: 'eCheck', submitMs: Date.parse(begunAt), visibleMs: 0, refTransId: null, responseCode: 1, reason: 1, authCode: 'F', avs: 'P', cvv: 'P', fingerprint: '', status: 'capturedPendingSettlement' }); // prettier-ignore
    double.vendor.tick = () => undefined;
    expect(double.vendor.unsettled(apiLoginId).at(-1)).toMatchObject({ brand: 'eCheck', status: 'capturedPendingSettlement' });
    expect(await finalize(ref, 'charge', null, begunAt)).toEqual({ kind: 'never' });
  });

  test('is not said of a charge that was not visible at first', async () => {
    fault('hidden', { op: 'charge', ms: 6 * HOUR_MS });
    fault('cut_after', { op: 'charge' });
    const [ref, begunAt] = [drawRef(), timestamp(clock.now())];
    await charge(ref);
    const answer = await finalize(ref, 'charge', null, begunAt);
    expect(answer).toMatchObject({ why: 'not_visible' });
    toUntil((answer as { until: string }).until, MINUTE_MS);
    expect(await finalize(ref, 'charge', null, begunAt)).toMatchObject({ kind: 'executed', result: { kind: 'approved' } });
  });

  test('without a known cut-off, two days pass', async () => {
    gateway = opened({ cutOff: null });
    const { begunAt, until } = await gone();
    expect(Date.parse(until) - Date.parse(begunAt)).toBe(2 * DAY_MS);
  });
});

describe('batches', () => {
  interface Read {
    readonly batch: Omit<SettledBatch, 'lines'>;
    readonly lines: readonly SettlementRecord[];
  }
  const read = async (cursor: string | null = null): Promise<Read[]> => {
    const all: Read[] = [];
    for await (const { lines, ...batch } of gateway.settlements(cursor, soon())) {
      const records: SettlementRecord[] = [];
      for await (const record of lines) records.push(record);
      all.push({ batch, lines: records });
    }
    return all;
  };

  test('lists sales and refunds with our references; voided, declined and foreign lines', async () => {
    const [sale, declined, voided] = [drawRef(), drawRef(), drawRef()];
    const id = await charged(sale);
    await charge(declined, { payer: { address: { zip: '46282' } } });
    await voidIt(await charged(voided));
    double.vendor.store({ merchant: apiLoginId, type: 'authCaptureTransaction', ref: 'INV-1', amountCents: 700, last4: '0027', brand: 'Visa', submitMs: double.vendor.nowMs, visibleMs: 0, refTransId: null, responseCode: 1, reason: 1, authCode: 'F', avs: 'P', cvv: 'P', fingerprint: '', status: 'capturedPendingSettlement' }); // prettier-ignore
    passBatch();
    const returned = drawRef();
    await refund(id, 400, returned);
    advance(HOUR_MS);
    passBatch();
    const [first, second] = await read();
    expect(first!.lines).toEqual([
      { transactionId: id, ref: sale, type: 'sale', accepted: true, grossCents: 1_000, feeCents: 0, netCents: 1_000 },
      { transactionId: expect.any(String), type: 'sale', accepted: true, grossCents: 700, feeCents: 0, netCents: 700 },
    ]);
    expect(second!.lines).toEqual([
      { transactionId: expect.any(String), ref: returned, type: 'refund', accepted: true, grossCents: -400, feeCents: 0, netCents: -400 },
    ]);
    expect(first!.batch).toEqual({
      batchId: expect.any(String),
      closedAt: expect.stringMatching(/^\d{4}-\d\d-\d\dT.*\.000Z$/),
      cursor: expect.any(String),
    });
  });

  test('goes on after the cursor, and lists nothing twice', async () => {
    await charged();
    passBatch();
    const [first] = await read();
    expect(await read(first!.batch.cursor)).toEqual([]);
    advance(HOUR_MS);
    await charged();
    passBatch();
    const next = await read(first!.batch.cursor);
    expect(next).toHaveLength(1);
    expect(await read(next[0]!.batch.cursor)).toEqual([]);
    advance(40 * DAY_MS);
    expect(await read(next[0]!.batch.cursor)).toEqual([]);
    await charged();
    passBatch();
    expect(await read(next[0]!.batch.cursor)).toHaveLength(1);
  });

  test('a batch that is listed late is still found', async () => {
    await charged();
    fault('batch_late', { op: 'batch', ms: DAY_MS });
    const late = passBatch()!;
    advance(HOUR_MS);
    await charged();
    const early = passBatch()!;
    const [seen] = await read();
    expect(seen!.batch.batchId).toBe(early.id);
    advance(DAY_MS);
    const [found] = await read(seen!.batch.cursor);
    expect(found!.batch.batchId).toBe(late.id);
    expect(await read(found!.batch.cursor)).toEqual([]);
  });

  test('a batch that is listed twice is one', async () => {
    await charged();
    passBatch();
    fault('batch_twice', { times: null });
    const all = await read();
    expect(all).toHaveLength(1);
    expect(all[0]!.lines).toHaveLength(1);
  });

  test('a batch that grows is listed again', async () => {
    const refs = [drawRef(), drawRef()];
    for (const ref of refs) await charged(ref);
    fault('batch_growing', { times: null, ms: HOUR_MS });
    passBatch();
    const [first] = await read();
    expect(first!.lines.map(({ ref }) => ref)).toEqual(refs.slice(0, 1));
    advance(2 * HOUR_MS);
    const [grown] = await read(first!.batch.cursor);
    expect(grown!.lines.map(({ ref }) => ref)).toEqual(refs);
    expect(await read(grown!.batch.cursor)).toEqual([]);
  });

  test('a batch that is not settled is not listed', async () => {
    await charged();
    fault('batch_pending', { times: null });
    advance(DAY_MS);
    expect(await read()).toEqual([]);
    double.vendor.heal('batch_pending');
    expect(await read()).toHaveLength(1);
  });

  test('lines of a rejected batch are not accepted, and keep their kind', async () => {
    const id = await charged();
    passBatch();
    const [sale, returned] = [drawRef(), drawRef()];
    await charged(sale);
    await refund(id, 400, returned);
    advance(HOUR_MS);
    fault('settlement_error', { op: 'batch' });
    passBatch();
    const [, rejected] = await read();
    expect(rejected!.lines).toMatchObject([
      { ref: sale, type: 'sale', accepted: false, grossCents: 1_000 },
      { ref: returned, type: 'refund', accepted: false, grossCents: -400 },
    ]);
  });

  test.each<[status: string, type: string, grossCents: number]>([
    ['somethingNew', 'adjustment', 1_000],
    ['couldNotVoid', 'adjustment', 1_000],
    ['returnedItem', 'adjustment', -1_000],
    ['refundSomehow', 'adjustment', -1_000],
    ['chargeback', 'chargeback', -1_000],
    ['chargebackReversal', 'chargeback_reversal', 1_000],
    ['settledSuccessfully', 'sale', 1_000],
  ])('a line of status %s is of the type %s: never left out, and a sale only if it is one', async (status, type, grossCents) => {
    const id = await charged();
    passBatch();
    double.vendor.setStatus(double.vendor.transaction(apiLoginId, id)!, status as never);
    expect((await read())[0]!.lines).toMatchObject([{ transactionId: id, type, grossCents, netCents: grossCents }]);
  });

  test.each(['', 'x', '17e3', '1700000000000 12', '1700000000000 12:x', '1700000000000  12:1', 'null'])(
    'the cursor %p cannot be read',
    async (cursor) => {
      await expect(read(cursor)).rejects.toBeInstanceOf(UnknownCursor);
    },
  );

  test('a cursor stays short, however many batches there are', async () => {
    for (let n = 0; n < 150; n++) {
      double.vendor.seed({
        merchant: apiLoginId,
        count: 1,
        amountCents: 100,
        submitMs: double.vendor.nowMs - n * 1_000,
        label: `N${n}X`,
        settled: true,
      });
    }
    const all = await read();
    expect(all).toHaveLength(150);
    expect(all.at(-1)!.batch.cursor.length).toBeLessThanOrEqual(1_024);
  });

  test('200,000 lines are read with constant memory', async () => {
    const child: ChildProcess = spawn(process.execPath, ['dist/test/doubles/authorize-net/main.js', '--file', doubleFile()], {
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    cleanUps.push(() => child.kill('SIGKILL'));
    const { url } = JSON.parse(await new Promise<string>((resolve) => child.stdout!.once('data', (text) => resolve(String(text)))));
    const seed = { merchant: apiLoginId, count: 200_000, amountCents: 101, label: 'M', settled: true };
    expect((await fetch(`${url}/_double/seed`, { method: 'POST', body: JSON.stringify(seed) })).status).toBe(200);
    gateway = opened({ endpoint: `${url}/xml/v1/request.api` });
    let [lines, cents, most] = [0, 0, 0];
    const begun = process.memoryUsage().heapUsed;
    for await (const batch of gateway.settlements(null, AbortSignal.timeout(240_000)))
      for await (const { grossCents } of batch.lines) {
        [lines, cents] = [lines + 1, cents + grossCents];
        if (lines % 1_000 === 0) most = Math.max(most, process.memoryUsage().heapUsed - begun);
      }
    expect([lines, cents]).toEqual([200_000, 200_000 * 101]);
    expect(most).toBeLessThan(300 * MEBIBYTE);
  });
});

describe('describe, and the setting "Transaction Details API"', () => {
  test('names the account', async () => {
    expect(await gateway.describe(soon())).toEqual({
      externalId: MERCHANT.gatewayId,
      name: MERCHANT.name,
      environment: 'sandbox',
      testMode: false,
      timeZone: 'UTC',
      problems: [],
    });
  });

  test('reads a name with entities, and test mode', async () => {
    fault('entities', { op: 'merchant' });
    double.vendor.setMerchant({ ...MERCHANT, testMode: true });
    expect(await gateway.describe(soon())).toMatchObject({ name: `O'Neill & Sons <${MERCHANT.name}>`, testMode: true });
  });

  test('refused credentials and an answer that cannot be read', async () => {
    await expect(opened({ credentials: { apiLoginId, transactionKey: 'wrong' } }).describe(soon())).rejects.toThrow('E00007');
    for (const name of ['html', 'half', 'empty'] as const) {
      fault(name, { op: 'merchant' });
      await expect(gateway.describe(soon())).rejects.toThrow('Authorize.Net did not answer');
    }
  });

  test('a clock that is 10 minutes wrong is a problem', async () => {
    fault('clock_wrong', { times: null, ms: 10 * MINUTE_MS });
    expect((await gateway.describe(soon())).problems).toEqual([expect.stringMatching(/differs from the clock of Authorize.Net by \d{3} s/)]);
  });

  test('E00011 is passed on each time that a list is refused', async () => {
    let refused = 0;
    const told = opened({ onRefusedLists: () => (refused += 1) });
    expect([told.mayCharge!(), refused]).toEqual([true, 0]);
    fault('details_api_off', { times: null });
    await told.describe(soon());
    expect([told.mayCharge!(), refused]).toEqual([false, 2]);
    double.vendor.heal('details_api_off');
    await told.describe(soon());
    expect([told.mayCharge!(), refused]).toEqual([true, 2]);
  });

  test('E00011: a problem with the way to the setting', async () => {
    fault('details_api_off', { times: null });
    expect((await gateway.describe(soon())).problems).toEqual([DETAILS_API_PROBLEM]);
  });

  test('E00011 met later: no new charges, an alarm, and charges again when the setting is on', async () => {
    const ref = drawRef();
    await charged(ref);
    fault('details_api_off', { times: null });
    expect(await finalize(ref)).toEqual({ kind: 'cannot_tell', why: 'unreachable' });
    expect(logged).toEqual([[expect.stringContaining('No new charges'), { merchantAccount: 'shop' }]]);
    expect(await charge()).toEqual({ kind: 'not_processed', answered: false, raw: 'E00011' });
    double.vendor.heal('details_api_off');
    expect(await charge()).toMatchObject({ kind: 'not_processed' });
    advance(31_000);
    expect(await charge()).toMatchObject({ kind: 'approved' });
  });
});

test('lists of the background are asked for at most five times a second; calls that move money do not wait', async () => {
  // This clock counts pauses, and jumps over them.
  const pauses: number[] = [];
  class Counting extends MovableClock {
    override sleep(ms: number): Promise<void> {
      pauses.push(ms);
      this.advance(ms);
      return Promise.resolve();
    }
  }
  const paced = createAuthorizeNetGateway({ endpoint: double.endpoint, account, clock: new Counting(), credentials: { apiLoginId, transactionKey }, cutOff }); // prettier-ignore
  cleanUps.push(() => paced.close());
  for await (const _ of paced.settlements(null, soon()));
  // The lists of two years, one for each month. A pause is shorter by the time that an answer took.
  const calls = listCalls();
  expect(calls).toBeGreaterThan(20);
  expect(pauses.reduce((sum, ms) => sum + ms, 0)).toBeGreaterThan((calls - 1) * 100);
  expect(Math.max(...pauses)).toBeLessThanOrEqual(200);
  pauses.length = 0;
  for (let index = 0; index < 10; index++) expect(await charge(drawRef(), {}, paced)).toMatchObject({ kind: 'approved' });
  expect(pauses).toEqual([]);
});

test('a transaction is shown by its own id', async () => {
  const ref = drawRef();
  const id = await charged(ref);
  expect(await gateway.transaction!(id, soon())).toEqual({ transactionId: id, ref, op: 'charge', state: 'approved', amountCents: 1_000, chargeTransactionId: null }); // prettier-ignore
  passBatch();
  const returned = await refund(id, 400);
  const refundId = (returned as { txn: { transactionId: string } }).txn.transactionId;
  expect(await gateway.transaction!(refundId, soon())).toMatchObject({ op: 'refund', amountCents: 400, chargeTransactionId: id });
  expect(await gateway.transaction!('60999999999', soon())).toBeNull();
  expect(await gateway.transaction!('pi_1', soon())).toBeNull();
});
