/** Tests the rules of a payment (docs/contract.md#money-and-states, C32 to C40, C61, C67) with events and commands. */
import { describe, expect, test } from '@jest/globals';
import {
  abandoned,
  ACCOUNT,
  acknowledged,
  AT,
  ATTEMPT,
  charged,
  chargedState,
  chargeOf,
  combined,
  created,
  declined,
  dispute,
  disputed,
  ended,
  failed,
  feeless,
  fenced,
  given,
  halfRefunded,
  halfVoided,
  IN_CLEAR,
  initiated,
  LATER,
  move,
  partRefunded,
  PAYMENT,
  principalRefunded,
  principals,
  refundRequested,
  requestRefund,
  requestVoid,
  returned,
  separate,
  settled,
  settlementRejected,
  stateOf,
  unknown,
  viewOf,
  visible,
  voided,
  voidRequested,
  wholeLines,
  withLines,
} from '../../test/support/given.js';
import { fold } from '#kernel';
import {
  attemptOf,
  completedMeanwhile,
  type Dispute,
  DISPUTE_STATUSES,
  disputedCents,
  isVisible,
  MAX_ATTEMPTS,
  MAX_REVERSALS,
  openOf,
  partialRefund,
  payment as decider,
  type PaymentCommand,
  type PaymentEvent,
  type RequestRefund,
  resultOf,
  type ReversalAttempt,
  STAFF_REPEAT_MS,
  statusOf,
  untoldAttempt,
} from './payment.js';
import type { Leg } from './gateway/gateway.js';
import { refundView, voidView } from './payment.view.js';

const voidFailed = { retryable: false, suggestedAction: 'refund' };
const exceeds = (cents: number) => new RegExp(`^Refund exceeds remaining principal: ${cents} cents remain$`);

describe('creating a payment', () => {
  const initiate = { type: 'Initiate', at: LATER, attemptId: ATTEMPT, idempotency: null, terms: separate } as const;
  test('the intent comes first, and names every reference that the attempt may ever use (C61)', () => {
    given().when(initiate).then(initiated());
    for (const { references } of separate.legs) expect(references).toEqual({ charge: expect.any(String), reversal: expect.any(String) });
  });
  test('terms that do not add up are our fault, not the caller’s', () => {
    given()
      .when({ ...initiate, terms: { ...separate, amountCents: 9_999 } })
      .thenFails(/lines do not sum/);
    given()
      .when({ ...initiate, terms: { ...separate, serviceFeeCents: 324 } })
      .thenFails(/fee was not shared/);
    given()
      .when({ ...initiate, terms: { ...separate, legs: separate.legs.slice(0, 1) } })
      .thenFails(/legs do not sum/);
  });
  test('a payment begins once, and never after its stream was fenced (C64)', () => {
    given(initiated())
      .when(initiate)
      .thenFails(/begun before/);
    given(abandoned)
      .when(initiate)
      .thenFails(/begun before/);
  });
  test('a create that never began is fenced: no payment (C64)', () => {
    const abandon = { type: 'Abandon', at: LATER, attemptId: ATTEMPT, accountId: ACCOUNT, reason: 'the request vanished before it began' } as const;
    given().when(abandon).then(abandoned);
    given(abandoned).when(abandon).thenNothing();
    given(initiated()).when(abandon).thenNothing();
    expect(isVisible(stateOf(abandoned))).toBe(false);
    expect(isVisible(stateOf())).toBe(false);
  });

  const outcome = (what: Extract<PaymentCommand, { type: 'RecordChargeOutcome' }>['outcome'], attemptId = ATTEMPT) =>
    ({ type: 'RecordChargeOutcome', at: LATER, attemptId, outcome: what }) as const;
  const approved = outcome({ kind: 'charged', ...chargeOf(separate) });
  test('approved → succeeded', () => given(initiated()).when(approved).then(created()));
  test('declined → failed', () =>
    given(initiated())
      .when(
        outcome({ kind: 'declined', leg: 'principal', code: 'insufficient_funds', transactionId: 'ch_x', raw: null, avs: 'match', cvv: 'no_match' }),
      )
      .then(declined));
  test('certainly not processed → failed', () =>
    given(initiated())
      .when(outcome({ kind: 'failed', reason: 'not processed' }))
      .then(failed));
  test('anything else → unknown', () =>
    given(initiated())
      .when(outcome({ kind: 'unknown', leg: 'principal', cause: 'timeout' }))
      .then(unknown));
  test.each([
    ['unknown', [initiated(), unknown]],
    ['fenced by recovery', [initiated(), fenced()]],
    ['succeeded', charged()],
    ['failed', [initiated(), declined]],
  ])('an outcome that comes late changes nothing: %s (C29)', (_, facts) =>
    given(...facts)
      .when(approved)
      .thenNothing(),
  );
  test('the gateway’s reason of a decline is kept; a certain failure has no reason', () => {
    expect(stateOf(initiated(), declined)).toMatchObject({ phase: 'failed', declineCode: 'insufficient_funds' });
    expect(stateOf(initiated(), failed)).toMatchObject({ phase: 'failed', declineCode: null });
  });
  test('a leg that was charged and taken back stands in the fact, and nothing where none was (C41)', () => {
    const takenBack = [{ leg: 'principal', amountCents: 10_000, transactionId: 'ch_principal', voidTransactionId: 'vd_principal' }] as const;
    const declinedFee = { leg: 'fee', transactionId: 'ch_fee', raw: '51', avs: null, cvv: 'match' } as const;
    const fee = outcome({ kind: 'declined', code: 'generic_decline', ...declinedFee, takenBack });
    given(initiated())
      .when(fee)
      .then({ type: 'PaymentDeclined', at: AT, data: { attemptId: ATTEMPT, declineCode: 'generic_decline', ...declinedFee, takenBack } });
    given(initiated())
      .when(outcome({ kind: 'failed', reason: 'not processed', takenBack }))
      .then({ type: 'PaymentFailed', at: AT, data: { attemptId: ATTEMPT, reason: 'not processed', takenBack } });
    for (const none of [{ takenBack: [] }, {}]) {
      const [event] = decider.decide(stateOf(initiated()), outcome({ kind: 'failed', reason: 'not processed', ...none }));
      expect(Object.keys(event!.data)).toEqual(['attemptId', 'reason']);
    }
  });
  test('another attempt’s outcome changes nothing', () =>
    given(initiated())
      .when(outcome({ kind: 'failed', reason: 'x' }, PAYMENT))
      .thenNothing());
});

describe('unknown becomes voided or failed, never succeeded by itself (C29)', () => {
  const found = (...findings: Extract<PaymentCommand, { type: 'RecordChargeFindings' }>['findings'][number][]) =>
    ({ type: 'RecordChargeFindings', at: LATER, attemptId: ATTEMPT, findings }) as const;
  const undone = (leg: 'principal' | 'fee', principalCents: number, feeCents: number): PaymentEvent => ({
    type: 'PaymentVoided',
    at: AT,
    data: { attemptId: ATTEMPT, leg, principalCents, feeCents, transactionId: `rv_${leg}` },
  });
  const neverProcessed: PaymentEvent = {
    type: 'PaymentVoided',
    at: AT,
    data: { attemptId: ATTEMPT, leg: null, principalCents: 0, feeCents: 0, transactionId: null },
  };
  const open = [initiated(), unknown, fenced()];

  test('recovery fences pending and unknown, once', () => {
    const start = { type: 'StartReconciliation', at: LATER, attemptId: ATTEMPT } as const;
    given(initiated()).when(start).then(fenced());
    given(initiated(), unknown).when(start).then(fenced());
    given(...open)
      .when(start)
      .thenNothing();
    given(...charged())
      .when(start)
      .thenNothing();
    expect(statusOf(visible(initiated(), fenced()))).toBe('unknown');
  });
  test('a leg that stands is undone → voided, one fact a leg', () => {
    const both = found(
      { leg: 'principal', found: 'reversed', transactionId: 'rv_principal' },
      { leg: 'fee', found: 'reversed', transactionId: 'rv_fee' },
    );
    given(...open)
      .when(both)
      .then(undone('principal', 10_000, 0), undone('fee', 0, 325));
    given(...open)
      .when(found({ leg: 'principal', found: 'reversed', transactionId: 'rv_principal' }, { leg: 'fee', found: 'never' }))
      .then(undone('principal', 10_000, 0));
  });
  test('nothing was ever processed → voided, nothing captured', () =>
    given(...open)
      .when(found({ leg: 'principal', found: 'never' }, { leg: 'fee', found: 'never' }))
      .then(neverProcessed));
  test('the gateway shows a decline → failed', () =>
    given(...open)
      .when(
        found(
          { leg: 'principal', found: 'declined', code: 'insufficient_funds', transactionId: 'ch_x', avs: 'match', cvv: 'no_match' },
          { leg: 'fee', found: 'never' },
        ),
      )
      .then(declined));
  test('of a payment with one leg that leg is all there is to look at', () =>
    given(initiated(combined), unknown, fenced())
      .when(found({ leg: 'combined', found: 'never' }))
      .then(neverProcessed));
  test('a decline of one leg beside another that was undone → voided: money moved, and came back', () =>
    given(...open)
      .when(
        found(
          { leg: 'principal', found: 'reversed', transactionId: 'rv_principal' },
          { leg: 'fee', found: 'declined', code: 'generic_decline', transactionId: null, avs: null, cvv: null },
        ),
      )
      .then(undone('principal', 10_000, 0)));
  test('a decline of the fee alone → failed', () =>
    given(...open)
      .when(
        found(
          { leg: 'principal', found: 'never' },
          { leg: 'fee', found: 'declined', code: 'generic_decline', transactionId: null, avs: 'not_checked', cvv: null },
        ),
      )
      .then({
        type: 'PaymentDeclined',
        at: AT,
        data: { attemptId: ATTEMPT, leg: 'fee', declineCode: 'generic_decline', transactionId: null, raw: null, avs: 'not_checked', cvv: null },
      }));
  test('every leg was looked at, or nothing is decided (C61)', () =>
    given(...open)
      .when(found({ leg: 'principal', found: 'never' }))
      .thenFails(/a leg was not looked at/));
  test('findings about a payment that is not unknown, or of another attempt, change nothing', () => {
    const never = found({ leg: 'principal', found: 'never' }, { leg: 'fee', found: 'never' });
    given(initiated()).when(never).thenNothing();
    given(...charged())
      .when(never)
      .thenNothing();
    given(...open)
      .when({ ...never, attemptId: PAYMENT })
      .thenNothing();
  });
  test.each<[string, PaymentEvent[]]>([
    ['reversed', [undone('principal', 10_000, 0), undone('fee', 0, 325)]],
    ['never processed', [neverProcessed]],
  ])('voided out of unknown, %s: captured 0, no confirmation', (_, facts) => {
    const view = viewOf(...open, ...facts);
    expect(view).toMatchObject({
      status: 'voided',
      capturedAmountCents: 0,
      refundedAmountCents: 0,
      remainingRefundableAmountCents: 0,
      confirmationNumber: null,
      capturedAt: null,
      gateway: { transactionId: null, authCode: null },
    });
    expect(
      view.lineItems.map(({ status, refundedAmountCents, remainingRefundableAmountCents: left }) => [status, refundedAmountCents, left]),
    ).toEqual(Array(3).fill(['voided', 0, 0]));
  });
  test('money that staff send back: announced once for each exception, only while unknown; from then on no success (C75)', () => {
    const request = { type: 'RequestReturn', at: LATER, exceptionId: 'exception-1' } as const;
    const announced = (exceptionId = 'exception-1'): PaymentEvent => ({ type: 'ReturnRequested', at: AT, data: { exceptionId } });
    given(...open)
      .when(request)
      .then(announced());
    given(initiated(), unknown).when(request).then(fenced(), announced());
    given(...open, announced())
      .when(request)
      .thenNothing();
    given(...open, announced())
      .when({ ...request, exceptionId: 'exception-2' })
      .then(announced('exception-2'));
    given(...charged())
      .when(request)
      .thenRefused('INVALID_STATE', /The payment is succeeded/);
    given(initiated())
      .when(request)
      .thenRefused('INVALID_STATE', /The payment is pending/);
    given()
      .when(request)
      .thenRefused('INVALID_STATE', /no such payment/);
    const resolve = {
      type: 'Resolve',
      at: LATER,
      as: 'succeeded',
      charge: chargeOf(separate),
      evidence: 'ticket 7',
      by: 'op',
      forced: true,
    } as const;
    given(...open, announced())
      .when(resolve)
      .thenRefused('INVALID_STATE', /begun for exception exception-1; it cannot be resolved as succeeded any more/);
    given(...open, announced())
      .when({ ...resolve, as: 'voided' })
      .then({ type: 'PaymentResolved', at: AT, data: { as: 'voided', charge: null, evidence: 'ticket 7', by: 'op', forced: true } });
    expect(() => visible(initiated(), announced())).toThrow('impossible history');
  });
  test('only a person resolves otherwise, and only an unknown outcome (C29, C69)', () => {
    const resolve = { type: 'Resolve', at: LATER, as: 'voided', charge: null, evidence: 'ticket 7', by: 'op', forced: false } as const;
    const resolved = (as: 'succeeded' | 'voided' | 'failed', charge: ReturnType<typeof chargeOf> | null): PaymentEvent => ({
      type: 'PaymentResolved',
      at: AT,
      data: { as, charge, evidence: 'ticket 7', by: 'op', forced: false },
    });
    given(...open)
      .when(resolve)
      .then(resolved('voided', null));
    given(...open)
      .when({ ...resolve, as: 'succeeded', charge: chargeOf(separate) })
      .then(resolved('succeeded', chargeOf(separate)));
    given(...open)
      .when({ ...resolve, as: 'failed', charge: chargeOf(separate) })
      .then(resolved('failed', null));
    given(...open)
      .when({ ...resolve, as: 'succeeded' })
      .thenRefused('INVALID_STATE', /needs the transactions/);
    for (const facts of [[initiated()], charged(), [initiated(), declined]])
      given(...facts)
        .when(resolve)
        .thenRefused('INVALID_STATE', /unknown outcome/);
    expect(viewOf(...open, resolved('succeeded', chargeOf(separate))).status).toBe('succeeded');
    expect(viewOf(...open, resolved('failed', null)).status).toBe('failed');
    expect(viewOf(...open, resolved('voided', null)).status).toBe('voided');
  });
});

describe('the states and their money: captured = refunded + remaining (docs/contract.md#money-and-states)', () => {
  const separateView = (...facts: PaymentEvent[]) => {
    const { status, capturedAmountCents, refundedAmountCents, remainingRefundableAmountCents } = viewOf(...facts);
    return [status, capturedAmountCents, refundedAmountCents, remainingRefundableAmountCents];
  };
  test.each<[string, PaymentEvent[], [string, number, number, number]]>([
    ['begun', [initiated()], ['pending', 0, 0, 0]],
    ['declined', [initiated(), declined], ['failed', 0, 0, 0]],
    ['not processed', [initiated(), failed], ['failed', 0, 0, 0]],
    ['unknown', [initiated(), unknown], ['unknown', 0, 0, 0]],
    ['charged', charged(), ['succeeded', 10_325, 0, 10_325]],
    ['a void incomplete (C27)', [...charged(), ...halfVoided('A')], ['succeeded', 10_325, 10_000, 325]],
    ['voided', [...charged(), ...voided('A')], ['voided', 10_325, 10_325, 0]],
    ['a part refunded', [...charged(), ...partRefunded('A', [333, 333, 334])], ['partially_refunded', 10_325, 1_000, 9_325]],
    ['all principal refunded, the fee kept (C21)', [...charged(), ...principalRefunded('A')], ['partially_refunded', 10_325, 10_000, 325]],
    ['PARTIAL_REFUND_PENDING', [...charged(), ...halfRefunded('A')], ['partially_refunded', 10_325, 10_000, 325]],
    ['settled', [...charged(), settled('principal'), settled('fee')], ['succeeded', 10_325, 0, 10_325]],
    ['settlement rejected (C67)', [...charged(), settlementRejected('principal')], ['succeeded', 10_325, 0, 10_325]],
    ['disputed (C30)', [...charged(), disputed()], ['succeeded', 10_325, 0, 10_325]],
  ])('%s', (_, facts, expected) => expect(separateView(...facts)).toEqual(expected));

  test('as much principal left as fee is not nothing', () => {
    const facts = [...charged(), ...partRefunded('A', [3_225, 3_225, 3_225])];
    expect(separateView(...facts)).toEqual(['partially_refunded', 10_325, 9_675, 650]);
    expect(decideRefund(facts, { includeFee: true })[0]!.data.legs).toEqual([move('Z', 'principal', 325, 0), move('Z', 'fee', 0, 325)]);
  });
  test('a full refund carried out as a void ends in refunded, not voided (C22)', () => {
    const facts = [
      ...charged(feeless),
      refundRequested('A', { legs: [move('A', 'principal', 10_000, 0)], lines: principals(10_000) }),
      returned('A', 'principal', 10_000, 0, 'void'),
      ended('A', { outcome: 'completed', reversalType: 'void', amountCents: 10_000 }),
    ];
    expect(separateView(...facts)).toEqual(['refunded', 10_000, 10_000, 0]);
  });
  test('a refund of the fee after an incomplete void ends in refunded (C27)', () => {
    const facts = [
      ...charged(),
      ...halfVoided('A'),
      refundRequested('B', { legs: [move('B', 'fee', 0, 325)], lines: wholeLines.fee, asked: { amountCents: null, includeFee: true } }),
      returned('B', 'fee', 0, 325, 'void'),
      ended('B', { outcome: 'completed', reversalType: 'void', amountCents: 325 }),
    ];
    expect(separateView(...facts)).toEqual(['refunded', 10_325, 10_325, 0]);
  });
  test('reserved fields (C11)', () => {
    expect(viewOf(...charged())).toMatchObject({
      id: PAYMENT,
      captureMode: 'sale',
      currency: 'USD',
      authorizedAmountCents: 0,
      expiresAt: null,
      capturedAmountCents: 10_325,
      capturedAt: AT,
      confirmationNumber: 'ABCD-EFGH-JK',
      referenceId: 'CASE-1',
      totalChargedCents: 10_325,
      createdAt: AT,
    });
    for (const facts of [[initiated()], [initiated(), declined], [initiated(), unknown]])
      expect(viewOf(...facts)).toMatchObject({ capturedAmountCents: 0, capturedAt: null, confirmationNumber: null, totalChargedCents: 10_325 });
  });
  test('the gateway shown is that of the principal leg (C41)', () => {
    expect(viewOf(...charged()).gateway).toEqual({ transactionId: 'ch_principal', authCode: 'A1' });
    expect(viewOf(...charged(combined)).gateway).toEqual({ transactionId: 'ch_combined', authCode: 'A1' });
  });
  test('createdAt and updatedAt are those of the first and the last event (C2)', () => {
    expect(viewOf(initiated(), created(separate, LATER))).toMatchObject({ createdAt: AT, capturedAt: LATER, updatedAt: LATER });
  });
  test.each<[string, PaymentEvent[]]>([
    ['a decline', [initiated(), declined]],
    ['a failure', [initiated(), failed]],
    ['an unknown outcome', [initiated(), unknown]],
    ['a fence', [initiated(), fenced()]],
    ['what was never processed', [initiated(), fenced(), { type: 'PaymentVoided', at: AT, data: { attemptId: ATTEMPT, leg: null, principalCents: 0, feeCents: 0, transactionId: null } }]], // prettier-ignore
    ['a charge undone', [initiated(), fenced(), returned(ATTEMPT, 'principal', 10_000, 0)]],
    ['its second leg undone', [initiated(), fenced(), returned(ATTEMPT, 'principal', 10_000, 0), returned(ATTEMPT, 'fee', 0, 325)]],
    ['a decision of staff', [initiated(), unknown, { type: 'PaymentResolved', at: AT, data: { as: 'failed', charge: null, evidence: 'e', by: 'b', forced: false } }]], // prettier-ignore
    ['a refund asked for', [...charged(), ...partRefunded('A', [1, 0, 0]).slice(0, 1)]],
    ['a void asked for', [...charged(), ...voided('A').slice(0, 1)]],
    ['a leg returned', [...charged(), ...partRefunded('A', [1, 0, 0]).slice(0, 2)]],
    ['a reversal ended', [...charged(), ...partRefunded('A', [1, 0, 0])]],
    ['a reversal fenced', [...charged(), ...partRefunded('A', [1, 0, 0]).slice(0, 1), fenced('A')]],
    ['a result told', [...charged(), ...partRefunded('A', [1, 0, 0]), acknowledged('A')]],
    ['a settlement', [...charged(), settled('principal')]],
    ['a settlement rejected', [...charged(), settlementRejected('principal')]],
    ['a dispute', [...charged(), disputed()]],
  ])('updatedAt is that of %s', (_, facts) => {
    const last = { ...facts.at(-1)!, at: LATER } as PaymentEvent;
    expect(viewOf(...facts.slice(0, -1), last)).toMatchObject({ createdAt: AT, updatedAt: LATER });
  });
});

describe('line items (C28, C33, C34)', () => {
  const lines = (...facts: PaymentEvent[]) =>
    viewOf(...facts).lineItems.map(({ status, refundedAmountCents, remainingRefundableAmountCents }) => [
      status,
      refundedAmountCents,
      remainingRefundableAmountCents,
    ]);
  test('show the payment’s own status while pending, failed, unknown', () => {
    expect(lines(initiated())).toEqual(Array(3).fill(['pending', 0, 0]));
    expect(lines(initiated(), declined)).toEqual(Array(3).fill(['failed', 0, 0]));
    expect(lines(initiated(), unknown)).toEqual(Array(3).fill(['unknown', 0, 0]));
  });
  test('are succeeded while a void is incomplete, voided when it is whole', () => {
    expect(lines(...charged(), ...halfVoided('A'))).toEqual([
      ['succeeded', 3333, 108],
      ['succeeded', 3333, 108],
      ['succeeded', 3334, 109],
    ]);
    expect(lines(...charged(), ...voided('A'))).toEqual([
      ['voided', 3441, 0],
      ['voided', 3441, 0],
      ['voided', 3443, 0],
    ]);
  });
  test('count principal and fee: refunded when both came back, partially_refunded while the fee is kept', () => {
    expect(lines(...charged(), ...principalRefunded('A'))).toEqual([
      ['partially_refunded', 3333, 108],
      ['partially_refunded', 3333, 108],
      ['partially_refunded', 3334, 109],
    ]);
    const whole = [...halfRefunded('A').slice(0, 2), returned('A', 'fee', 0, 325), ended('A', { outcome: 'completed', amountCents: 10_325 })];
    expect(lines(...charged(), ...whole)).toEqual([
      ['refunded', 3441, 0],
      ['refunded', 3441, 0],
      ['refunded', 3443, 0],
    ]);
  });
  test('else follow their own amounts', () => {
    const facts = [
      ...charged(withLines([100, 9_900, 100])),
      refundRequested('A', {
        legs: [move('A', 'principal', 101, 0)],
        lines: principals(100, 1, 0),
        asked: { amountCents: 101, includeFee: false },
      }),
      returned('A', 'principal', 101, 0),
      ended('A', { outcome: 'completed', reversalType: 'void', amountCents: 101 }),
    ];
    expect(lines(...facts)).toEqual([
      ['refunded', 100, 0],
      ['partially_refunded', 1, 9_899],
      ['succeeded', 0, 100],
    ]);
  });
});

describe('voiding (C25–C27)', () => {
  const wholeVoid = voidRequested('A', { legs: [move('A', 'principal', 10_000, 0), move('A', 'fee', 0, 325)], lines: wholeLines.both });
  test('covers principal, then fee (C26), and names the references of both operations on each leg (C61)', () => {
    given(...charged())
      .when(requestVoid('A'))
      .then(wholeVoid);
    expect(move('A', 'fee', 0, 325).references).toEqual({ void: expect.any(String), refund: expect.any(String) });
  });
  test('combined mode has one leg, a payment without fee no fee leg (C35, C62)', () => {
    given(...charged(combined))
      .when(requestVoid('A'))
      .then(voidRequested('A', { legs: [move('A', 'combined', 10_000, 325)], lines: wholeLines.both }));
    given(...charged(feeless))
      .when(requestVoid('A'))
      .then(voidRequested('A', { legs: [move('A', 'principal', 10_000, 0)], lines: principals(10_000) }));
  });
  test('a retry of an incomplete void covers the fee only, and completes it (C27)', () =>
    given(...charged(), ...halfVoided('A'))
      .when(requestVoid('B'))
      .then(voidRequested('B', { legs: [move('B', 'fee', 0, 325)], lines: wholeLines.fee, completes: 'A' })));
  test('a retry of an incomplete void covers the missing leg, either of the two', () => {
    const facts = [
      ...charged(),
      voidRequested('A', { legs: [move('A', 'principal', 10_000, 0), move('A', 'fee', 0, 325)], lines: wholeLines.both }),
      returned('A', 'fee', 0, 325),
      ended('A', { operation: 'void', outcome: 'partial', reversalType: 'void', amountCents: 325 }),
    ];
    given(...facts)
      .when(requestVoid('B'))
      .then(voidRequested('B', { legs: [move('B', 'principal', 10_000, 0)], lines: wholeLines.principal, completes: 'A' }));
  });
  test.each(['rejected', 'never_executed'] as const)('after a void that was %s it is a void of its own', (outcome) =>
    given(
      ...charged(),
      voidRequested('A', { legs: [move('A', 'principal', 10_000, 0)], lines: wholeLines.principal }),
      ended('A', { operation: 'void', outcome }),
    )
      .when(requestVoid('B'))
      .then(voidRequested('B', { legs: [move('B', 'principal', 10_000, 0), move('B', 'fee', 0, 325)], lines: wholeLines.both })),
  );
  test.each<[string, PaymentEvent[]]>([
    ['voided', [...charged(), ...voided('A')]],
    ['pending', [initiated()]],
    ['unknown', [initiated(), unknown]],
    ['failed', [initiated(), failed]],
    ['partially_refunded', [...charged(), ...partRefunded('A', [333, 333, 334])]],
    ['partially_refunded (all principal)', [...charged(), ...principalRefunded('A')]],
    ['partially_refunded (partial pending)', [...charged(), ...halfRefunded('A')]],
  ])('only from succeeded: not %s (C25)', (_, facts) =>
    given(...facts)
      .when(requestVoid('Z'))
      .thenRefused('INVALID_STATE', /cannot be voided|partially_refunded/),
  );
  test.each<[string, PaymentEvent[]]>([
    ['nothing', []],
    ['an abandoned stream', [abandoned]],
  ])('%s is not found (C7, C64)', (_, facts) => {
    given(...facts)
      .when(requestVoid('A'))
      .thenRefused('PAYMENT_NOT_FOUND');
    given(...facts)
      .when(requestRefund('A'))
      .thenRefused('PAYMENT_NOT_FOUND');
  });
  test.each<[string, PaymentEvent[]]>([
    ['the principal', [...charged(), settled('principal')]],
    ['the fee alone', [...charged(), settled('fee')]],
    ['the fee, after the principal was voided', [...charged(), ...halfVoided('A'), settled('fee')]],
  ])('is refused before any call once %s has settled: refund instead (C27)', (_, facts) =>
    given(...facts)
      .when(requestVoid('B'))
      .thenRefused('VOID_FAILED', /settled/, voidFailed),
  );
  test.each(['debited', 'in_dispute', 'lost'] as const)('is refused with a dispute that is %s (C30)', (status) =>
    given(...charged(), disputed({ status }))
      .when(requestVoid('A'))
      .thenRefused('INVALID_STATE', /disputed/),
  );
  test('goes on once the dispute is recovered (C30)', () =>
    given(...charged(), disputed({ status: 'recovered' }))
      .when(requestVoid('A'))
      .then(wholeVoid));
  test('and refund are refused when the settlement was rejected (C67)', () => {
    for (const leg of ['principal', 'fee'] as const) {
      given(...charged(), settlementRejected(leg))
        .when(requestVoid('A'))
        .thenRefused('INVALID_STATE', /settlement .* was rejected/i);
      given(...charged(), settlementRejected(leg))
        .when(requestRefund('A'))
        .thenRefused('INVALID_STATE', /settlement .* was rejected/i);
    }
  });
  test('and refund are refused while another is open (C31)', () => {
    for (const open of [wholeVoid, refundRequested('A', { legs: [move('A', 'principal', 10_000, 0)], lines: wholeLines.principal })]) {
      given(...charged(), open)
        .when(requestVoid('B'))
        .thenRefused('INVALID_STATE', /in progress/);
      for (const includeFee of [false, true])
        given(...charged(), open)
          .when(requestRefund('B', { includeFee }))
          .thenRefused('INVALID_STATE', /in progress/);
    }
  });
});

describe('refunding (C21–C24, C30, C34–C39)', () => {
  const capabilities = (partialVoid: boolean, refundUnsettled: boolean) => () => ({ partialVoid, refundUnsettled });

  test('without amountCents: all remaining principal, the fee stays', () =>
    given(...charged())
      .when(requestRefund('A'))
      .then(refundRequested('A', { legs: [move('A', 'principal', 10_000, 0)], lines: wholeLines.principal })));
  test('with amountCents: that much principal over the lines (C34), the fee stays', () =>
    given(...charged())
      .when(requestRefund('A', { amountCents: 1_000 }))
      .then(
        refundRequested('A', {
          legs: [move('A', 'principal', 1_000, 0)],
          lines: principals(333, 333, 334),
          asked: { amountCents: 1_000, includeFee: false },
        }),
      ));
  test('a later part goes over the remaining amounts of the lines (C34)', () => {
    given(...charged(), ...partRefunded('A', [333, 333, 334]))
      .when(requestRefund('B', { amountCents: 1 }))
      .then(
        refundRequested('B', {
          legs: [move('B', 'principal', 1, 0)],
          lines: principals(1, 0, 0),
          asked: { amountCents: 1, includeFee: false },
        }),
      );
    given(...charged(), ...partRefunded('A', [333, 333, 334]), ...partRefunded('B', [1, 0, 0]))
      .when(requestRefund('C'))
      .then(
        refundRequested('C', {
          legs: [move('C', 'principal', 8_999, 0)],
          lines: principals(2_999, 3_000, 3_000),
        }),
      );
  });
  const includeFee = { asked: { amountCents: null, includeFee: true } } as const;
  test('with include_fee: principal first, then fee (C39), each line its own share', () => {
    given(...charged())
      .when(requestRefund('A', { includeFee: true }))
      .then(refundRequested('A', { legs: [move('A', 'principal', 10_000, 0), move('A', 'fee', 0, 325)], lines: wholeLines.both, ...includeFee }));
    given(...charged(combined))
      .when(requestRefund('A', { includeFee: true }))
      .then(refundRequested('A', { legs: [move('A', 'combined', 10_000, 325)], lines: wholeLines.both, ...includeFee }));
  });
  test('with include_fee after the principal went back: the fee (rule 2 of the specification)', () =>
    given(...charged(), ...principalRefunded('A'))
      .when(requestRefund('B', { includeFee: true }))
      .then(refundRequested('B', { legs: [move('B', 'fee', 0, 325)], lines: wholeLines.fee, ...includeFee })));
  test('with include_fee where there is no fee: a plain full refund (C35)', () =>
    given(...charged(feeless))
      .when(requestRefund('A', { includeFee: true }))
      .then(refundRequested('A', { legs: [move('A', 'principal', 10_000, 0)], lines: principals(10_000), ...includeFee })));
  test('include_fee with amountCents: equal to the remainder is a full refund, smaller 400, larger 422 (C36)', () => {
    const asked = (amountCents: number) => requestRefund('A', { includeFee: true, amountCents });
    given(...charged())
      .when(asked(10_000))
      .then(
        refundRequested('A', {
          legs: [move('A', 'principal', 10_000, 0), move('A', 'fee', 0, 325)],
          lines: wholeLines.both,
          asked: { amountCents: 10_000, includeFee: true },
        }),
      );
    given(...charged())
      .when(asked(9_999))
      .thenRefused('VALIDATION_ERROR', /include_fee/);
    given(...charged())
      .when(asked(10_001))
      .thenRefused('INVALID_STATE', exceeds(10_000));
  });
  test('more than the remainder is refused, and the message names the remainder (C37)', () => {
    given(...charged())
      .when(requestRefund('A', { amountCents: 10_001 }))
      .thenRefused('INVALID_STATE', exceeds(10_000));
    given(...charged(), ...partRefunded('A', [333, 333, 334]))
      .when(requestRefund('B', { amountCents: 9_001 }))
      .thenRefused('INVALID_STATE', exceeds(9_000));
  });
  test('nothing left: 0 cents remain (C37)', () => {
    given(...charged(), ...principalRefunded('A'))
      .when(requestRefund('B'))
      .thenRefused('INVALID_STATE', exceeds(0));
    given(...charged(), ...voided('A'))
      .when(requestRefund('B', { includeFee: true }))
      .thenRefused('INVALID_STATE', exceeds(0));
  });
  test.each<[string, PaymentEvent[]]>([
    ['pending', [initiated()]],
    ['unknown', [initiated(), unknown]],
    ['failed', [initiated(), declined]],
  ])('nothing was captured: %s cannot be refunded', (status, facts) => {
    for (const includeFee of [false, true])
      given(...facts)
        .when(requestRefund('A', { includeFee }))
        .thenRefused('INVALID_STATE', new RegExp(`${status} payment cannot be refunded`));
  });

  describe('before settlement it is a void, after it a refund (rule 4, C23, C24)', () => {
    const movesOf = (facts: readonly PaymentEvent[], change: Parameters<typeof requestRefund>[1]) => {
      const [event] = decideRefund(facts, change);
      return event!.data.legs.map(({ leg, means: how }) => [leg, how]);
    };
    test('a whole leg is voided with any gateway', () => {
      expect(movesOf(charged(), { capabilities: capabilities(false, false) })).toEqual([['principal', 'void']]);
      expect(movesOf(charged(combined), { includeFee: true, capabilities: capabilities(false, true) })).toEqual([['combined', 'void']]);
    });
    test('the principal without its fee is a whole leg of a separate charge, and a part of a combined one', () => {
      expect(movesOf(charged(), { capabilities: capabilities(false, false) })).toEqual([['principal', 'void']]);
      given(...charged(combined))
        .when(requestRefund('A', { capabilities: capabilities(false, false) }))
        .thenRefused('INVALID_STATE', /possible after settlement/);
    });
    test('a part: void if the gateway can lower the amount, else refund if it can refund unsettled, else 422', () => {
      const part = { amountCents: 1_000 };
      expect(movesOf(charged(), { ...part, capabilities: capabilities(true, true) })).toEqual([['principal', 'void']]);
      expect(movesOf(charged(), { ...part, capabilities: capabilities(false, true) })).toEqual([['principal', 'refund']]);
      given(...charged())
        .when(requestRefund('A', { ...part, capabilities: capabilities(false, false) }))
        .thenRefused('INVALID_STATE', /partial refund is possible after settlement/);
    });
    test('after settlement it is a refund, leg by leg', () => {
      expect(movesOf([...charged(), settled('principal')], { includeFee: true })).toEqual([
        ['principal', 'refund'],
        ['fee', 'void'],
      ]);
      expect(movesOf([...charged(), settled('principal'), settled('fee')], { includeFee: true })).toEqual([
        ['principal', 'refund'],
        ['fee', 'refund'],
      ]);
    });
    test('a leg on which a refund was made is refunded ever after, never voided, whether the stream knows of a batch or not (C24)', () => {
      const facts = [...charged(), ...partRefunded('A', [333, 333, 334], 'refund')];
      for (const able of [capabilities(true, true), capabilities(true, false), capabilities(false, false)]) {
        expect(movesOf(facts, { capabilities: able })).toEqual([['principal', 'refund']]);
        expect(movesOf(facts, { amountCents: 1, capabilities: able })).toEqual([['principal', 'refund']]);
      }
    });
    test('the rest after a partial void is voided whole', () => {
      const facts = [...charged(), ...partRefunded('A', [333, 333, 334], 'void')];
      expect(movesOf(facts, { capabilities: capabilities(false, false) })).toEqual([['principal', 'void']]);
    });
  });

  describe('disputes keep their amount from being refunded (C30)', () => {
    const open = (facts: readonly PaymentEvent[], change: Parameters<typeof dispute>[0] = {}): PaymentEvent[] => [
      ...facts,
      ...decider.decide(fold(decider, facts), { type: 'OpenDispute', at: AT, dispute: dispute(change) }),
    ];
    const refused = (facts: readonly PaymentEvent[], change: Parameters<typeof requestRefund>[1], left: number, why = '') =>
      given(...facts)
        .when(requestRefund('Z', change))
        .thenRefused('INVALID_STATE', new RegExp(`^Refund exceeds remaining principal: ${left} cents remain${why}$`));
    const FEE = '; a dispute takes the service fee';

    test.each([
      ['a dispute whose event says what it takes', open(charged())],
      ['one of an older release', [...charged(), disputed()]],
    ])('%s takes principal, and no part of the fee can stand in for it', (_name, facts) => {
      refused(facts, { amountCents: 6_325 }, 6_000);
      refused(facts, { amountCents: 6_001 }, 6_000);
      expect(decideRefund(facts, { amountCents: 6_000 })).toHaveLength(1);
      // Never silently smaller.
      refused(facts, {}, 6_000);
      refused(facts, { includeFee: true }, 6_000);
      refused(facts, { includeFee: true, amountCents: 10_000 }, 6_000);
      refused(facts, { amountCents: 10_001 }, 6_000);
    });
    test('12500 and a fee of 363, 5000 in dispute: 7500 can be refunded, 7863 cannot', () => {
      const fee = separate.legs.filter(({ leg }) => leg === 'fee').map((leg) => ({ ...leg, feeCents: 363 }));
      const plain = withLines([12_500]);
      const terms = { ...plain, serviceFeeCents: 363, lineItems: plain.lineItems.map((line) => ({ ...line, serviceFeeCents: 363 })), legs: [...plain.legs, ...fee] }; // prettier-ignore
      const facts = open([...charged(terms), settled('principal'), settled('fee')], { disputedAmountCents: 5_000 });
      refused(facts, { amountCents: 7_863 }, 7_500);
      expect(decideRefund(facts, { amountCents: 7_500 })).toHaveLength(1);
    });
    test('the fee goes back whole or not at all: if a dispute takes a part of it, it stays', () => {
      const onFee = open(charged(), { leg: 'fee', disputedAmountCents: 1 });
      refused(onFee, { includeFee: true }, 10_000, FEE);
      expect(decideRefund(onFee, {})).toHaveLength(1);
      // In one charge, both take part in proportion to what remains: 4000 of 10325 are 3874 and 126.
      const inOne = open(charged(combined));
      refused(inOne, { amountCents: 6_127 }, 6_126);
      expect(decideRefund(inOne, { amountCents: 6_126 })).toHaveLength(1);
      refused(open(charged(), { disputedAmountCents: 10_325 }), { amountCents: 1 }, 0);
    });
    const takenBy = (facts: readonly PaymentEvent[]) => chargedState(...facts).disputes.map(({ taken }) => taken);
    const share = (leg: Leg, principalCents: number, feeCents: number, excessCents?: number) =>
      ({ leg, principalCents, feeCents, ...(excessCents !== undefined && { excessCents }) }); // prettier-ignore
    test('a dispute takes what remains: the principal first, then the fee, and the rest in excess', () => {
      const refunded = [...charged(), ...partRefunded('A', [3000, 3000, 3000])];
      expect(takenBy(open(refunded))).toEqual([[share('principal', 1_000, 0, 2_675), share('fee', 0, 325)]]);
      expect(takenBy(open(refunded, { leg: 'principal' }))).toEqual([[share('principal', 1_000, 0, 3_000)]]);
      expect(takenBy(open([...charged(), ...halfRefunded('A')], { leg: 'principal' }))).toEqual([[share('principal', 0, 0, 4_000)]]);
      // A second dispute gets what the first one left.
      const two = open(open(charged(), { disputedAmountCents: 9_000 }), { disputeId: PAYMENT, disputedAmountCents: 2_000 });
      expect(takenBy(two)).toEqual([[share('principal', 9_000, 0)], [share('principal', 1_000, 0, 675), share('fee', 0, 325)]]);
    });
    test('nothing remains of a leg whose settlement was rejected', () =>
      expect(takenBy(open([...charged(), settlementRejected('principal')], { leg: 'principal' }))).toEqual([[share('principal', 0, 0, 4_000)]]));
    const move = (facts: readonly PaymentEvent[], change: { status?: Dispute['status']; amountCents?: number }): PaymentEvent[] => [
      ...facts,
      ...decider.decide(fold(decider, facts), {
        type: 'UpdateDispute',
        at: AT,
        disputeId: dispute().disputeId,
        status: null,
        stage: null,
        ...change,
      }),
    ];
    test('lost, it keeps its shares; recovered, everything is free; reopened, they are made again of what remains then', () => {
      const lost = move(open(charged()), { status: 'lost' });
      expect(takenBy(lost)).toEqual([[share('principal', 4_000, 0)]]);
      refused(lost, { amountCents: 6_001 }, 6_000);
      const won = move(lost, { status: 'recovered' });
      expect(decideRefund(won, {})).toHaveLength(1);
      const reopened = move([...won, ...partRefunded('A', [2500, 2500, 2500])], { status: 'in_dispute' });
      expect(takenBy(reopened)).toEqual([[share('principal', 2_500, 0, 1_175), share('fee', 0, 325)]]);
      refused(reopened, { amountCents: 1 }, 0);
    });
    test('a corrected amount is taken anew, within the bounds of an opening; of a recovered dispute it waits', () => {
      expect(takenBy(move(open(charged()), { amountCents: 10_100 }))).toEqual([[share('principal', 10_000, 0), share('fee', 0, 100)]]);
      expect(takenBy(move([...charged(), disputed()], { amountCents: 1 }))).toEqual([[share('principal', 1, 0)]]);
      const waits = move(open(charged(), { status: 'recovered' }), { amountCents: 5 });
      expect(takenBy(waits)).toEqual([[]]);
      expect(takenBy(move(waits, { status: 'lost' }))).toEqual([[share('principal', 5, 0)]]);
      expect(move(open(charged()), { amountCents: 4_000 })).toHaveLength(3);
      expect(() => move(open(charged()), { amountCents: 10_326 })).toThrow('1 to 10325 cents');
      expect(() => move(open(charged()), { amountCents: 0 })).toThrow('1 to 10325 cents');
    });
    test('a return that was under way when the dispute came takes the same cents: they become excess before it is recorded', () => {
      const begun = [...charged(), ...decideRefund(charged(), { includeFee: true })];
      const both = open(open(begun, { disputedAmountCents: 9_000 }), { disputeId: PAYMENT, disputedAmountCents: 500 });
      const record = (leg: Leg) => ({ type: 'RecordLegReturned', at: AT, attemptId: 'Z', leg, means: 'void', transactionId: 't' }) as const;
      const returned = decider.decide(fold(decider, both), record('principal'));
      // The newest dispute gives way first.
      expect(
        returned.map(({ type, data }) => [type, (data as { disputeId?: string }).disputeId, (data as { overtakenBy?: string }).overtakenBy]),
      ).toEqual([
        ['PaymentDisputed', PAYMENT, 'Z'],
        ['PaymentDisputed', dispute().disputeId, 'Z'],
        ['PaymentVoided', undefined, undefined],
      ]);
      expect(takenBy([...both, ...returned])).toEqual([[share('principal', 0, 0, 500)], [share('principal', 0, 0, 9_000)]]);
      // The state holds no trace of the return, so later events of the dispute do not name it.
      expect(chargedState(...both, ...returned).disputes.some((one) => 'overtakenBy' in one)).toBe(false);
      // A return that leaves enough, and a recovered dispute, change nothing.
      const part = [...charged(), ...decideRefund(charged(), { amountCents: 1_000 })];
      expect(decider.decide(fold(decider, open(part, { disputedAmountCents: 9_000 })), record('principal'))).toHaveLength(1);
      expect(decider.decide(fold(decider, open(begun, { status: 'recovered' })), record('principal'))).toHaveLength(1);
      // Only the cents of both become excess.
      const over = open(part, { disputedAmountCents: 9_400 });
      expect(takenBy([...over, ...decider.decide(fold(decider, over), record('principal'))])).toEqual([[share('principal', 9_000, 0, 400)]]);
    });
    test('debited, in_dispute and lost count, recovered does not; several add up', () => {
      for (const status of ['debited', 'in_dispute', 'lost'] as const)
        expect(disputedCents(chargedState(...charged(), disputed({ status })))).toBe(4_000);
      expect(disputedCents(chargedState(...charged(), disputed({ status: 'recovered' })))).toBe(0);
      expect(disputedCents(chargedState(...charged(), disputed(), disputed({ disputeId: PAYMENT, disputedAmountCents: 5 })))).toBe(4_005);
    });
    test('staff refunds obey the same rule', () => refused(open(charged()), { initiatedBy: 'staff' }, 6_000));
    test('more disputed than remains: nothing is free, never less', () =>
      given(...charged(), ...partRefunded('A', [3000, 3000, 3000]), disputed())
        .when(requestRefund('B', { amountCents: 1 }))
        .thenRefused('INVALID_STATE', exceeds(0)));
  });

  describe('completing a PARTIAL_REFUND_PENDING (C38)', () => {
    const completion = (change: Parameters<typeof requestRefund>[1]) => decideRefund([...charged(), ...halfRefunded('A')], change)[0]!.data;
    test('include_fee without amountCents, under any key, moves the fee and completes the first attempt', () => {
      expect(completion({ includeFee: true })).toMatchObject({ completes: 'A', legs: [move('Z', 'fee', 0, 325)] });
    });
    test('include_fee with the amount of the first request, or with its result, too', () => {
      const first = [...charged(), ...halfRefunded('A', { asked: { amountCents: 10_000, includeFee: true } })];
      expect(decideRefund(first, { includeFee: true, amountCents: 10_000 })[0]!.data).toMatchObject({
        completes: 'A',
        legs: [move('Z', 'fee', 0, 325)],
      });
      expect(completion({ includeFee: true, amountCents: 10_000 })).toMatchObject({ completes: 'A' });
    });
    test('another amount is compared with the remainder: nothing', () =>
      given(...charged(), ...halfRefunded('A'))
        .when(requestRefund('B', { includeFee: true, amountCents: 5_000 }))
        .thenRefused('INVALID_STATE', exceeds(0)));
    test('without include_fee nothing is completed', () =>
      given(...charged(), ...halfRefunded('A'))
        .when(requestRefund('B'))
        .thenRefused('INVALID_STATE', exceeds(0)));
    test('the other kind of actor starts a refund of its own', () => {
      expect(completion({ includeFee: true, initiatedBy: 'staff' })).toMatchObject({ completes: null, legs: [move('Z', 'fee', 0, 325)] });
      const staff = [...charged(), ...halfRefunded('A', { initiatedBy: 'staff' })];
      expect(decideRefund(staff, { includeFee: true })[0]!.data).toMatchObject({ completes: null });
      expect(partialRefund(chargedState(...staff), 'staff')?.attemptId).toBe('A');
      expect(partialRefund(chargedState(...staff), 'partner')).toBeUndefined();
    });
    test('a completion that came to nothing leaves it to be completed', () => {
      for (const outcome of ['rejected', 'never_executed'] as const) {
        const facts = [
          ...charged(),
          ...halfRefunded('A'),
          refundRequested('B', {
            legs: [move('B', 'fee', 0, 325)],
            lines: wholeLines.fee,
            asked: { amountCents: null, includeFee: true },
            completes: 'A',
          }),
          ended('B', { outcome }),
        ];
        expect(decideRefund(facts, { includeFee: true })[0]!.data).toMatchObject({ completes: 'A', legs: [move('Z', 'fee', 0, 325)] });
      }
    });
    test('without an amount, although one was named at first', () => {
      const first = [...charged(), ...halfRefunded('A', { asked: { amountCents: 10_000, includeFee: true } })];
      expect(decideRefund(first, { includeFee: true })[0]!.data).toMatchObject({ completes: 'A' });
    });
    test('not once the fee came back by the other kind of actor', () => {
      const facts = [
        ...charged(),
        ...halfRefunded('A'),
        refundRequested('S', { legs: [move('S', 'fee', 0, 325)], lines: wholeLines.fee, initiatedBy: 'staff' }),
        returned('S', 'fee', 0, 325),
        ended('S', { outcome: 'completed', amountCents: 325, initiatedBy: 'staff' }),
      ];
      expect(partialRefund(chargedState(...facts), 'partner')).toBeUndefined();
      given(...facts)
        .when(requestRefund('B', { includeFee: true }))
        .thenRefused('INVALID_STATE', exceeds(0));
    });
    test('a refund of the fee that an incomplete void left here completes no refund', () =>
      expect(decideRefund([...charged(), ...halfVoided('A')], { includeFee: true })[0]!.data).toMatchObject({
        completes: null,
        legs: [move('Z', 'fee', 0, 325)],
      }));
    test('obeys disputes, too', () =>
      given(...charged(), ...halfRefunded('A'), disputed({ disputedAmountCents: 1, taken: [{ leg: 'fee', principalCents: 0, feeCents: 1 }] }))
        .when(requestRefund('B', { includeFee: true }))
        .thenRefused('INVALID_STATE', /0 cents remain; a dispute takes the service fee$/));
  });
});

describe('how many refunds and voids a payment takes', () => {
  const failures = (count: number) =>
    Array.from({ length: count }, (_, n) => [
      refundRequested(`F${n}`, { legs: [move(`F${n}`, 'principal', 10_000, 0)], lines: wholeLines.principal }),
      ended(`F${n}`, { outcome: 'never_executed' }),
    ]).flat();
  const cents = (count: number) => Array.from({ length: count }, (_, n) => partRefunded(`R${n}`, [1, 0, 0])).flat();
  test('those that returned nothing do not count, so that bad hours of a gateway leave it refundable', () => {
    expect(decideRefund([...charged(), ...failures(MAX_REVERSALS)], {})).toHaveLength(1);
  });
  test('a limited number that returned money, but a begun one may be completed (refund rule 5)', () => {
    given(...charged(), ...cents(MAX_REVERSALS))
      .when(requestRefund('Z'))
      .thenRefused('INVALID_STATE', /at most 100/);
    const rest = 10_000 - (MAX_REVERSALS - 1);
    const begun = [
      refundRequested('A', {
        legs: [move('A', 'principal', rest, 0), move('A', 'fee', 0, 325)],
        lines: [
          [rest - 6_667, 108],
          [3_333, 108],
          [3_334, 109],
        ],
        asked: { amountCents: null, includeFee: true },
      }),
      returned('A', 'principal', rest, 0),
      ended('A', { outcome: 'partial', reversalType: 'void', amountCents: rest }),
    ];
    expect(decideRefund([...charged(), ...cents(MAX_REVERSALS - 1), ...begun], { includeFee: true })).toHaveLength(1);
  });
  test('so many in all for the partner; staff may go on', () => {
    const many = [...charged(), ...failures(MAX_ATTEMPTS)];
    given(...many)
      .when(requestRefund('Z'))
      .thenRefused('INVALID_STATE', /ask support/);
    expect(decideRefund(many, { initiatedBy: 'staff' })).toHaveLength(1);
  });
});

const decideRefund = (facts: readonly PaymentEvent[], change: Parameters<typeof requestRefund>[1]) =>
  decider.decide(stateOf(...facts), requestRefund('Z', change)) as readonly Extract<PaymentEvent, { type: 'RefundRequested' }>[];

describe('legs come back, and an attempt ends (C39, C61)', () => {
  const request = refundRequested('A', {
    legs: [move('A', 'principal', 10_000, 0), move('A', 'fee', 0, 325)],
    lines: wholeLines.both,
    asked: { amountCents: null, includeFee: true },
    personal: { clear: { reason: 'asked by phone' } },
  });
  const record = (leg: 'principal' | 'fee', means: 'void' | 'refund') =>
    ({ type: 'RecordLegReturned', at: LATER, attemptId: 'A', leg, means, transactionId: `A-${leg}-txn` }) as const;
  const end = { type: 'EndReversal', at: LATER, attemptId: 'A' } as const;
  const open = [...charged(), request];
  const principal = returned('A', 'principal', 10_000, 0);

  test('by void or by refund; a refunded fee has a name of its own', () => {
    given(...open)
      .when(record('principal', 'void'))
      .then(principal);
    given(...open)
      .when(record('principal', 'refund'))
      .then(returned('A', 'principal', 10_000, 0, 'refund'));
    given(...open, principal)
      .when(record('fee', 'refund'))
      .then(returned('A', 'fee', 0, 325, 'refund'));
    given(...open, principal)
      .when(record('fee', 'void'))
      .then(returned('A', 'fee', 0, 325));
  });
  test('a leg comes back once, and none after the end', () => {
    given(...open, principal)
      .when(record('principal', 'void'))
      .thenNothing();
    given(...open, principal, ended('A', { outcome: 'partial', reversalType: 'void', amountCents: 10_000 }))
      .when(record('fee', 'void'))
      .thenNothing();
  });
  test('a leg that was not asked for is a fault of ours, and so is an attempt that is not there', () => {
    given(...charged(feeless))
      .when(record('fee', 'void'))
      .thenFails(/no attempt to return/);
    given(...charged(), refundRequested('A', { legs: [move('A', 'principal', 10_000, 0)], lines: wholeLines.principal }))
      .when(record('fee', 'void'))
      .thenFails(/no attempt to return/);
    for (const facts of [[initiated()], charged()]) {
      given(...facts)
        .when(record('principal', 'void'))
        .thenFails(/no attempt to return/);
      given(...facts)
        .when(end)
        .thenFails(/no attempt to end/);
    }
  });
  test.each<[string, PaymentEvent[], Partial<typeof end & { unfinished: 'rejected' | 'never_executed' }>, Parameters<typeof ended>[1]]>([
    ['both legs: completed', [principal, returned('A', 'fee', 0, 325)], {}, { outcome: 'completed', reversalType: 'void', amountCents: 10_325 }],
    [
      'legs differ: refund (C24)',
      [principal, returned('A', 'fee', 0, 325, 'refund')],
      {},
      { outcome: 'completed', reversalType: 'refund', amountCents: 10_325 },
    ],
    ['one leg: partial', [principal], { unfinished: 'rejected' }, { outcome: 'partial', reversalType: 'void', amountCents: 10_000 }],
    ['no leg, refused', [], { unfinished: 'rejected' }, { outcome: 'rejected' }],
    ['no leg, never sent', [], { unfinished: 'never_executed' }, { outcome: 'never_executed' }],
  ])('%s', (_, facts, how, expected) => {
    given(...open, ...facts)
      .when({ ...end, ...how })
      .then(ended('A', { ...expected, personal: { clear: { reason: 'asked by phone' } } }));
  });
  test('an attempt with a leg missing ends only for a reason, and only once', () => {
    given(...open, principal)
      .when(end)
      .thenFails(/only for a reason/);
    given(...charged(), ...voided('A'))
      .when(end)
      .thenNothing();
  });
  test('an attempt left open is fenced once; an ended one not any more', () => {
    const start = { type: 'StartReconciliation', at: LATER, attemptId: 'A' } as const;
    given(...open)
      .when(start)
      .then(fenced('A'));
    given(...open, fenced('A'))
      .when(start)
      .thenNothing();
    given(...charged(), ...voided('A'))
      .when(start)
      .thenNothing();
    expect(statusOf(visible(...open, fenced('A')))).toBe('succeeded');
    for (const facts of [
      [initiated(), declined],
      [initiated(), failed],
    ])
      given(...facts)
        .when(start)
        .thenNothing();
  });
  test('a caller that learned of an open attempt, or lost its first answer, is recorded once (C18)', () => {
    const acknowledge = { type: 'AcknowledgeReversal', at: LATER, attemptId: 'A', toldAs: null } as const;
    const done = [...open, fenced('A'), principal, returned('A', 'fee', 0, 325), ended('A', { outcome: 'completed', amountCents: 10_325 })];
    given(...done)
      .when(acknowledge)
      .then(acknowledged('A'));
    given(...done, acknowledged('A'))
      .when(acknowledge)
      .thenNothing();
    given(...charged(), ...voided('A'))
      .when(acknowledge)
      .then(acknowledged('A'));
    given(...open)
      .when(acknowledge)
      .thenNothing();
    for (const facts of [[initiated()], [initiated(), declined], charged()])
      given(...facts)
        .when(acknowledge)
        .thenNothing();
  });
});

describe('the work that recovery finds', () => {
  const openAfter = (...facts: PaymentEvent[]) => openOf(stateOf(...facts));
  test('a charge without an outcome, since the charge was requested', () => {
    const open = { attemptId: (initiated() as { data: { attemptId: string } }).data.attemptId, since: AT };
    expect(openAfter(initiated())).toEqual(open);
    expect(openAfter(initiated(), unknown)).toEqual(open);
  });
  test('a reversal without an end, since the reversal was requested', () => {
    const requested = voidRequested('A', { legs: [move('A', 'principal', 10_000, 0), move('A', 'fee', 0, 325)], lines: wholeLines.both });
    const [attempt] = chargedState(...charged(), requested).attempts;
    expect(openAfter(...charged(), requested)).toEqual({ attemptId: attempt!.attemptId, since: attempt!.requestedAt });
  });
  test.each<[string, PaymentEvent[]]>([
    ['nothing', []],
    ['declined', [initiated(), declined]],
    ['charged', charged()],
    ['voided', [...charged(), ...voided('A')]],
  ])('none: %s', (_, facts) => expect(openAfter(...facts)).toBeNull());
});

describe('a repeat without a key finds the attempt whose caller got a 5xx (C18)', () => {
  const request = (attemptId: string, initiatedBy: 'partner' | 'staff' = 'partner') =>
    refundRequested(attemptId, {
      legs: [move(attemptId, 'principal', 1_000, 0)],
      lines: principals(333, 333, 334),
      asked: { amountCents: 1_000, includeFee: false },
      initiatedBy,
    });
  const done = (attemptId: string) => [returned(attemptId, 'principal', 1_000, 0), ended(attemptId, { outcome: 'completed', amountCents: 1_000 })];
  const asked = { amountCents: 1_000, includeFee: false };
  const find = (
    facts: readonly PaymentEvent[],
    change: { operation?: 'void' | 'refund'; by?: 'partner' | 'staff'; asked?: typeof asked; at?: string } = {},
  ) =>
    untoldAttempt(
      chargedState(...charged(), ...facts),
      change.operation ?? 'refund',
      change.by ?? 'partner',
      change.asked ?? asked,
      change.at ?? LATER,
    )?.attemptId;
  const resolved = [request('A'), fenced('A'), ...done('A')];

  test('by the same kind of actor, operation, amount and fee type', () => {
    expect(find(resolved)).toBe('A');
    expect(find(resolved, { by: 'staff' })).toBeUndefined();
    expect(find(resolved, { operation: 'void' })).toBeUndefined();
    expect(find(resolved, { asked: { amountCents: 999, includeFee: false } })).toBeUndefined();
    expect(find(resolved, { asked: { amountCents: 1_000, includeFee: true } })).toBeUndefined();
  });
  test('within 24 hours of the request', () => {
    expect(find(resolved, { at: '2026-01-06T10:00:00.000Z' })).toBe('A');
    expect(find(resolved, { at: '2026-01-06T10:00:00.001Z' })).toBeUndefined();
  });
  test('once', () => expect(find([...resolved, acknowledged('A')])).toBeUndefined());
  test('not one that its own request finished, or that did not succeed', () => {
    expect(find([request('A'), ...done('A')])).toBeUndefined();
    expect(find([request('A'), fenced('A'), ended('A', { outcome: 'never_executed' })])).toBeUndefined();
    expect(find([request('A'), fenced('A')])).toBeUndefined();
  });
  test('one after the other, where there are several', () => {
    const two = [...resolved, acknowledged('A'), request('B'), fenced('B'), ...done('B')];
    expect(find(two)).toBe('B');
  });
});

describe('the same refund or void of staff again (C56)', () => {
  const asked = { amountCents: 1_000, includeFee: false };
  const attempt = (attemptId: string, initiatedBy: 'partner' | 'staff', outcome: 'completed' | 'never_executed' = 'completed') => [
    refundRequested(attemptId, { legs: [move(attemptId, 'principal', 1_000, 0)], lines: principals(333, 333, 334), asked, initiatedBy }),
    ...(outcome === 'completed' ? [returned(attemptId, 'principal', 1_000, 0)] : []),
    ended(attemptId, { outcome, amountCents: outcome === 'completed' ? 1_000 : 0, initiatedBy }),
  ];
  const laterBy = (ms: number) => new Date(Date.parse(AT) + ms).toISOString();
  const soon = { at: laterBy(1) };
  const again = (change: Partial<RequestRefund> = {}) =>
    requestRefund('B', { ...asked, ...soon, initiatedBy: 'staff', refusesRepeat: true, ...change });
  const refused = /^The same refund, of 10.00, was completed at 2026-01-05T10:00:00.000Z\.$/;

  test('within ten minutes of its end it is refused, also on a host whose clock is behind', () => {
    for (const at of [laterBy(0), laterBy(STAFF_REPEAT_MS - 1), laterBy(-60_000)])
      given(...charged(), ...attempt('A', 'staff'))
        .when(again({ at }))
        .thenRefused('INVALID_STATE', refused);
    expect(decider.decide(chargedState(...charged(), ...attempt('A', 'staff')), again({ at: laterBy(STAFF_REPEAT_MS) }))).toHaveLength(1);
  });
  test('another amount, one of a partner, one that moved nothing, or a caller that means another one: taken', () => {
    for (const [facts, command] of [
      [attempt('A', 'staff'), again({ amountCents: 1_001 })],
      [attempt('A', 'staff'), again({ refusesRepeat: false })],
      [attempt('A', 'partner'), again()],
      [attempt('A', 'staff', 'never_executed'), again()],
      [attempt('A', 'staff'), requestRefund('B', { ...asked, ...soon })],
    ] as const)
      expect(decider.decide(chargedState(...charged(), ...facts), command)).toHaveLength(1);
  });
  test('the completion of a partial refund is never refused; a third one has nothing to return', () => {
    const all = { amountCents: null, includeFee: true };
    const partial = [
      refundRequested('A', {
        legs: [move('A', 'principal', 10_000, 0), move('A', 'fee', 0, 325)],
        lines: wholeLines.both,
        asked: all,
        initiatedBy: 'staff',
      }),
      returned('A', 'principal', 10_000, 0),
      ended('A', { outcome: 'partial', amountCents: 10_000, initiatedBy: 'staff' }),
    ];
    const [event] = decider.decide(chargedState(...charged(), ...partial), again(all));
    expect(event).toMatchObject({ data: { completes: 'A', legs: [{ leg: 'fee', feeCents: 325 }] } });
  });
});

describe('an attempt whose caller got a 5xx although it had ended (C18)', () => {
  const done = [...charged(), ...partRefunded('A', [333, 333, 334])];
  const asked = { amountCents: 1_000, includeFee: false };
  const told = { type: 'StartReconciliation', at: LATER, attemptId: 'A', untold: true } as const;
  test('is fenced once, unless a caller has got its result', () => {
    given(...done)
      .when(told)
      .then(fenced('A'));
    given(...done, fenced('A'))
      .when(told)
      .thenNothing();
    for (const meanwhile of [[fenced('A')], []])
      given(...done, ...meanwhile, acknowledged('A'))
        .when(told)
        .thenNothing();
    given(...done)
      .when({ ...told, untold: false })
      .thenNothing();
    given(...done)
      .when({ ...told, attemptId: 'another' })
      .thenNothing();
  });
  test('is found by the repeat without a key', () => {
    expect(untoldAttempt(chargedState(...done), 'refund', 'partner', asked, LATER)).toBeUndefined();
    expect(untoldAttempt(chargedState(...done, fenced('A')), 'refund', 'partner', asked, LATER)?.attemptId).toBe('A');
  });
  test('its result belongs to the key that got it, by the attempt that this key is bound to', () => {
    const recordedKey = { keySpace: 'S', keyHash: '0a', fingerprint: '0b', kid: 'k1', operation: 'refund:P' };
    const keyed: PaymentEvent = { type: 'ReversalAcknowledged', at: LATER, data: { attemptId: 'A', toldAs: 'K', idempotency: recordedKey } };
    given(...done, fenced('A'))
      .when({ type: 'AcknowledgeReversal', at: LATER, attemptId: 'A', toldAs: { attemptId: 'K', idempotency: recordedKey } })
      .then(keyed);
    const state = chargedState(...done, fenced('A'), keyed);
    expect(resultOf(state, 'K')?.attemptId).toBe('A');
    expect(resultOf(state, 'A')?.attemptId).toBe('A');
    expect(resultOf(state, 'L')).toBeUndefined();
    expect(resultOf(chargedState(...done, fenced('A'), acknowledged('A')), 'K')).toBeUndefined();
  });
});

describe('a retry that is to complete the fee finds that it came back meanwhile (C27, C38)', () => {
  /**
   * The principal was returned, and the caller got PARTIAL_REFUND_PENDING or retry_void. In `finished`, recovery has found that the fee was returned
   * as well.
   */
  const begun = (operation: 'void' | 'refund', initiatedBy: 'partner' | 'staff' = 'partner') => [
    ...charged(),
    (operation === 'void' ? voidRequested : refundRequested)('A', {
      legs: [move('A', 'principal', 10_000, 0), move('A', 'fee', 0, 325)],
      lines: wholeLines.both,
      asked: { amountCents: null, includeFee: true },
      initiatedBy,
    }),
    returned('A', 'principal', 10_000, 0),
    fenced('A'),
  ];
  const finished = (...of: Parameters<typeof begun>) => [
    ...begun(...of),
    returned('A', 'fee', 0, 325),
    ended('A', { operation: of[0], outcome: 'completed', reversalType: 'void', amountCents: 10_325 }),
  ];
  const whole = { amountCents: null, includeFee: true };
  const find = (facts: readonly PaymentEvent[], operation: 'void' | 'refund' = 'refund', by: 'partner' | 'staff' = 'partner', asked: { amountCents: number | null; includeFee: boolean } = whole) =>
    completedMeanwhile(chargedState(...facts), operation, by, asked)?.attemptId; // prettier-ignore

  test('the same operation by the same kind of actor, fee included, with no amount or the whole principal', () => {
    expect(find(finished('refund'))).toBe('A');
    expect(find(finished('void'), 'void')).toBe('A');
    expect(find(finished('refund', 'staff'), 'refund', 'staff')).toBe('A');
    expect(find(finished('refund'), 'refund', 'partner', { amountCents: 10_000, includeFee: true })).toBe('A');
    expect(find(finished('refund'), 'void')).toBeUndefined();
    expect(find(finished('void'), 'refund')).toBeUndefined();
    expect(find(finished('refund'), 'refund', 'staff')).toBeUndefined();
    expect(find(finished('refund'), 'refund', 'partner', { amountCents: null, includeFee: false })).toBeUndefined();
    expect(find(finished('refund'), 'refund', 'partner', { amountCents: 9_999, includeFee: true })).toBeUndefined();
  });
  test('once', () => expect(find([...finished('refund'), acknowledged('A')])).toBeUndefined());
  test('not while it is open, nor when the fee stayed here', () => {
    expect(find(begun('refund'))).toBeUndefined();
    expect(find([...begun('refund'), ended('A', { outcome: 'partial', reversalType: 'void', amountCents: 10_000 })])).toBeUndefined();
  });
  test('not one whose caller knows of no part: fenced before anything came back, after its end, or never', () => {
    const [initiatedFact, createdFact, requested, principal, fence, fee, end] = finished('refund') as [PaymentEvent, PaymentEvent, PaymentEvent, PaymentEvent, PaymentEvent, PaymentEvent, PaymentEvent]; // prettier-ignore
    const start = [initiatedFact, createdFact, requested];
    expect(find([...start, fence, principal, fee, end])).toBeUndefined();
    expect(find([...start, principal, fee, end, fence])).toBeUndefined();
    expect(find([...start, principal, fee, end])).toBeUndefined();
  });
});

describe('settlement and disputes', () => {
  const settledAt = (leg: 'principal' | 'fee', closedAt: string): PaymentEvent => ({
    type: 'PaymentSettled',
    at: LATER,
    data: { leg, batchId: 'bat_2', closedAt, grossCents: 10_000, feeCents: 30 },
  });
  const withdrawn: PaymentEvent = {
    type: 'SettlementWithdrawn',
    at: LATER,
    data: { leg: 'principal', batchId: 'bat_1', closedAt: AT, grossCents: 10_000, feeCents: 30 },
  };
  const settle = (leg: 'principal' | 'fee' | 'combined', accepted = true) =>
    ({ type: 'RecordSettlement', at: LATER, leg, batchId: 'bat_1', closedAt: AT, accepted, grossCents: 10_000, feeCents: 30 }) as const;
  test('a leg settles once, or its settlement is rejected once (C67)', () => {
    given(...charged())
      .when(settle('principal'))
      .then(settled('principal'));
    given(...charged())
      .when(settle('fee', false))
      .then(settlementRejected('fee'));
    given(...charged(), settled('principal'))
      .when(settle('principal'))
      .thenNothing();
    given(...charged(), settlementRejected('principal'))
      .when(settle('principal'))
      .thenNothing();
    given(...charged())
      .when(settle('combined'))
      .thenFails(/no charged combined leg/);
  });
  test('a later change of its batch replaces the fact; another batch changes nothing; a leg that is in no batch is unsettled again', () => {
    const [was] = [...decider.decide(fold(decider, charged()), settle('principal'))];
    const less = { ...settle('principal'), grossCents: 9_000, feeCents: 29 };
    given(...charged(), was!)
      .when(less)
      .then(withdrawn, { ...was!, data: { ...was!.data, grossCents: 9_000, feeCents: 29 } } as PaymentEvent);
    given(...charged(), was!)
      .when(settle('principal', false))
      .then(withdrawn, settlementRejected('principal'));
    given(...charged(), was!)
      .when({ ...less, batchId: 'bat_2' })
      .thenNothing();
    const withdraw = { type: 'WithdrawSettlement', at: LATER, leg: 'principal', batchId: 'bat_1' } as const;
    given(...charged(), was!)
      .when(withdraw)
      .then(withdrawn);
    given(...charged(), was!)
      .when({ ...withdraw, batchId: 'bat_2' })
      .thenNothing();
    given(...charged(), was!, withdrawn)
      .when(withdraw)
      .thenNothing();
    given(...charged(), was!)
      .when({ ...withdraw, leg: 'fee' })
      .thenNothing();
    given(initiated(), unknown).when(withdraw).thenNothing();
    given(...charged(), was!, withdrawn)
      .when({ ...less, batchId: 'bat_2' })
      .then({ ...was!, data: { ...was!.data, batchId: 'bat_2', grossCents: 9_000, feeCents: 29 } } as PaymentEvent);
    expect(() => fold(decider, [...charged(), was!, withdrawn, withdrawn])).toThrow(/impossible/);
  });
  test('a correction of the fee alone, or of the gross alone, is one', () => {
    for (const [grossCents, feeCents] of [
      [10_000, 31],
      [9_999, 30],
    ] as const)
      // prettier-ignore
      expect(
        decider.decide(stateOf(...charged(), settled('principal')), { ...settle('principal'), grossCents, feeCents }).map(({ type }) => type),
      ).toEqual(['SettlementWithdrawn', 'PaymentSettled']);
  });
  test('a rejected leg says nothing new, whichever batch names it', () => {
    for (const again of [
      settle('principal', false),
      { ...settle('principal', false), batchId: 'bat_2' },
      { ...settle('principal'), batchId: 'bat_2' },
    ])
      given(...charged(), settlementRejected('principal'))
        .when(again)
        .thenNothing();
  });
  test.each<[string, PaymentEvent[], object | null]>([
    ['a pending payment', [initiated()], null],
    ['a failed payment', [initiated(), failed], null],
    ['a payment of unknown outcome', [initiated(), unknown], null],
    ['a charge in no batch', charged(), { status: 'unsettled', settledAt: null }],
    ['one leg settled', [...charged(), settled('fee')], { status: 'settled', settledAt: AT }],
    [
      'both legs settled: the first batch counts',
      [...charged(), settledAt('principal', LATER), settled('fee')],
      { status: 'settled', settledAt: AT },
    ],
    ['one leg rejected', [...charged(), settlementRejected('fee')], { status: 'rejected', settledAt: null }],
    ['one leg settled, the other rejected', [...charged(), settled('principal'), settlementRejected('fee')], { status: 'rejected', settledAt: AT }],
    ['the settlement withdrawn', [...charged(), settled('principal'), withdrawn], { status: 'unsettled', settledAt: null }],
    ['the principal voided, the fee in no batch', [...charged(), ...halfVoided('v')], { status: 'unsettled', settledAt: null }],
    ['the principal voided, the fee settled', [...charged(), ...halfVoided('v'), settled('fee')], { status: 'settled', settledAt: AT }],
    ['a voided leg does not count', [...charged(), settled('principal'), ...halfVoided('v')], { status: 'unsettled', settledAt: null }],
    ['all voided', [...charged(), ...voided('v')], { status: 'unsettled', settledAt: null }],
    [
      'a leg that was refunded counts',
      [...charged(), settled('principal'), ...partRefunded('r', [3333, 3333, 3334], 'refund')],
      { status: 'settled', settledAt: AT },
    ],
    ['a leg voided in part counts', [...charged(), ...partRefunded('r', [100, 0, 0]), settled('principal')], { status: 'settled', settledAt: AT }],
  ])('%s (C73)', (_, facts, expected) => expect(viewOf(...facts).settlement).toEqual(expected));
  test('settling one leg leaves the other as it is', () => {
    const state = chargedState(...charged(), settled('fee'));
    expect(state.legs.map(({ leg, settledBatchId }) => [leg, settledBatchId])).toEqual([
      ['principal', null],
      ['fee', 'bat_1'],
    ]);
    expect(chargedState(...charged(), settlementRejected('fee')).legs.map(({ settlementRejected: rejected }) => rejected)).toEqual([false, true]);
  });
  test('a withdrawal of a fact that does not stand is impossible', () => {
    const data = { leg: 'principal', batchId: 'bat_1', closedAt: AT, grossCents: 10_000, feeCents: 30 } as const;
    for (const change of [{ batchId: 'bat_2' }, { grossCents: 9_999 }, { feeCents: 31 }, { leg: 'fee' as const }])
      expect(() => stateOf(...charged(), settled('principal'), { type: 'SettlementWithdrawn', at: AT, data: { ...data, ...change } })).toThrow(
        /impossible/,
      );
    expect(chargedState(...charged(), settled('principal'), { type: 'SettlementWithdrawn', at: AT, data }).legs[0]).toMatchObject({
      settledBatchId: null,
      settledGrossCents: null,
      settledFeeCents: null,
    });
  });
  test('evidence for an unknown payment never charges it (C29)', () =>
    given(initiated(), unknown)
      .when(settle('principal'))
      .thenFails(/no charged/));

  const open = (what: Parameters<typeof dispute>[0] = {}) => ({ type: 'OpenDispute', at: LATER, dispute: dispute(what) }) as const;
  /** The dispute with what it takes of a payment of which nothing was returned. */
  const taking = (what: Parameters<typeof dispute>[0] = {}) => {
    const { leg = 'principal', disputedAmountCents, status } = dispute(what);
    const principal = leg === 'fee' ? 0 : Math.min(disputedAmountCents, 10_000);
    const shares = [{ leg: 'principal' as const, principalCents: principal, feeCents: 0 }, { leg: 'fee' as const, principalCents: 0, feeCents: disputedAmountCents - principal }]; // prettier-ignore
    return disputed({ ...what, taken: status === 'recovered' ? [] : shares.filter((share) => share.principalCents + share.feeCents > 0), ...what });
  };
  const TAKEN = [{ leg: 'principal', principalCents: 4_000, feeCents: 0 }] as const;
  const update = (what: { status?: Dispute['status']; stage?: string; disputeId?: string }) =>
    ({ type: 'UpdateDispute', at: LATER, disputeId: dispute({}).disputeId, status: null, stage: null, ...what }) as const;
  test('a dispute opens; a change of status, stage or both is one fact; no change is none (C57)', () => {
    given(...charged())
      .when(open())
      .then(taking());
    given(...charged(), disputed())
      .when(update({}))
      .thenNothing();
    given(...charged(), disputed())
      .when(update({ status: 'lost' }))
      .then(taking({ status: 'lost' }));
    given(...charged(), disputed())
      .when(update({ status: 'lost', stage: 'arbitration' }))
      .then(taking({ status: 'lost', stage: 'arbitration' }));
    given(...charged(), disputed())
      .when(update({ stage: 'arbitration' }))
      .then(taking({ stage: 'arbitration' }));
    given(...charged(), disputed({ status: 'lost' }))
      .when(update({ status: 'debited', stage: dispute({}).stage }))
      .then(taking({ status: 'debited' }));
  });
  test.each(DISPUTE_STATUSES.flatMap((from) => DISPUTE_STATUSES.filter((to) => to !== from).map((to) => [from, to] as const)))(
    'any status may follow any other: %s → %s (C30)',
    (from, to) =>
      given(...charged(), disputed({ status: from }))
        .when(update({ status: to }))
        .then(taking({ status: to, taken: TAKEN })),
  );
  test('opened again with the same terms it is the same dispute, in any state; with other terms it is refused', () => {
    given(...charged(), disputed({ status: 'lost' }))
      .when(open())
      .thenNothing();
    given(...charged(), disputed())
      .when(open({ disputedAmountCents: dispute({}).disputedAmountCents - 1 }))
      .thenRefused('INVALID_STATE', /other terms/);
    for (const other of [
      { reasonCode: '13.1' },
      { personal: { clear: { reason: 'not received' } } },
      { openedOn: '2026-01-06' },
      { dueDate: '2026-01-26' },
      { leg: 'principal' as const },
    ])
      given(...charged(), disputed())
        .when(open(other))
        .thenRefused('INVALID_STATE', /other terms/);
    given(...charged(), disputed())
      .when(open({ status: 'lost', stage: 'arbitration' }))
      .thenNothing();
    const source = { gateway: 'stripe', merchantAccount: 'cards', externalId: 'dp_1' };
    given(...charged(), disputed({ source }))
      .when(open({ source: { ...source } }))
      .thenNothing();
    for (const other of [{}, { source: { ...source, externalId: 'dp_2' } }])
      given(...charged(), disputed({ source }))
        .when(open(other))
        .thenRefused('INVALID_STATE', /other terms/);
    given(...charged(), disputed())
      .when(open({ disputeId: PAYMENT }))
      .then(taking({ disputeId: PAYMENT, taken: TAKEN }));
  });
  test('one that was never opened cannot be moved on', () =>
    given(...charged(), disputed())
      .when(update({ disputeId: 'another', status: 'lost' }))
      .thenRefused('INVALID_STATE', /no such dispute/));
  test('a change of one dispute leaves another as it is', () => {
    const state = chargedState(...charged(), disputed(), disputed({ disputeId: PAYMENT, disputedAmountCents: 5 }), disputed({ status: 'lost' }));
    expect(state.disputes.map(({ disputeId, status }) => [disputeId, status]).sort()).toEqual(
      [[PAYMENT, 'debited'], [dispute().disputeId, 'lost']].sort(), // prettier-ignore
    );
    expect(disputedCents(state)).toBe(4_005);
  });
  test('on no payment there is none (C64)', () => {
    for (const facts of [[], [abandoned]]) {
      given(...facts)
        .when(open())
        .thenRefused('PAYMENT_NOT_FOUND');
      given(...facts)
        .when(update({ status: 'lost' }))
        .thenRefused('PAYMENT_NOT_FOUND');
    }
  });
  test('of 1 cent up to the captured amount, on a charged payment (C30)', () => {
    given(...charged())
      .when(open({ disputedAmountCents: 10_325 }))
      .then(taking({ disputedAmountCents: 10_325 }));
    given(...charged())
      .when(open({ disputedAmountCents: 10_326 }))
      .thenRefused('VALIDATION_ERROR', /1 to 10325/);
    given(...charged())
      .when(open({ disputedAmountCents: 0 }))
      .thenRefused('VALIDATION_ERROR', /1 to 10325/);
    for (const disputedAmountCents of [-1, 0.5, 1.5, NaN])
      given(...charged())
        .when(open({ disputedAmountCents }))
        .thenRefused('VALIDATION_ERROR', /1 to 10325/);
    given(...charged())
      .when(open({ disputedAmountCents: 1 }))
      .then(taking({ disputedAmountCents: 1 }));
    given(initiated(), unknown)
      .when(open())
      .thenRefused('INVALID_STATE', /charged payment only/);
    given(...charged())
      .when(open({ leg: 'fee', disputedAmountCents: 325 }))
      .then(taking({ leg: 'fee', disputedAmountCents: 325 }));
    given(...charged())
      .when(open({ leg: 'fee', disputedAmountCents: 326 }))
      .thenRefused('VALIDATION_ERROR', /1 to 325/);
    given(...charged())
      .when(open({ leg: 'combined' }))
      .thenRefused('VALIDATION_ERROR', /no combined charge; it has: principal, fee/);
  });
});

describe('results (C38)', () => {
  const attempt = (facts: readonly PaymentEvent[], attemptId: string): ReversalAttempt => attemptOf(stateOf(...facts), attemptId)!;
  const completion = [
    refundRequested(
      'B',
      {
        legs: [move('B', 'fee', 0, 325)],
        lines: wholeLines.fee,
        asked: { amountCents: null, includeFee: true },
        completes: 'A',
        personal: { clear: { reason: 'again' } },
      },
      LATER,
    ),
    returned('B', 'fee', 0, 325, 'refund'),
    ended('B', { outcome: 'completed', reversalType: 'refund', amountCents: 325 }, LATER),
  ];
  test('of a refund: everything it returned, the principal leg’s transaction', () => {
    const facts = [...charged(), ...partRefunded('A', [333, 333, 334])];
    expect(refundView(PAYMENT, chargedState(...facts), attempt(facts, 'A'), IN_CLEAR)).toEqual({
      id: PAYMENT,
      target: 'group',
      reversalType: 'void',
      amountCents: 1_000,
      currency: 'USD',
      reason: null,
      status: 'succeeded',
      remainingRefundableAmountCents: 9_325,
      gateway: { transactionId: 'A-principal-txn' },
      createdAt: AT,
    });
  });
  test('stays the same after every later refund (T7)', () => {
    const facts = [...charged(), ...partRefunded('A', [333, 333, 334])];
    const first = refundView(PAYMENT, chargedState(...facts), attempt(facts, 'A'), IN_CLEAR);
    const later = [...facts, ...partRefunded('B', [1, 0, 0])];
    expect(refundView(PAYMENT, chargedState(...later), attempt(later, 'A'), IN_CLEAR)).toEqual(first);
  });
  test('of a refund completed later: one refund, principal and fee, the same under either attempt', () => {
    const facts = [...charged(), ...halfRefunded('A', { personal: { clear: { reason: 'first' } } }), ...completion];
    const first = refundView(PAYMENT, chargedState(...facts), attempt(facts, 'A'), IN_CLEAR);
    expect(first).toMatchObject({
      amountCents: 10_325,
      reversalType: 'refund',
      reason: 'first',
      remainingRefundableAmountCents: 0,
      gateway: { transactionId: 'A-principal-txn' },
      createdAt: LATER,
    });
    expect({ ...refundView(PAYMENT, chargedState(...facts), attempt(facts, 'B'), IN_CLEAR), reason: 'first' }).toEqual(first);
  });
  test('of an earlier refund stays its own when a later one is completed', () => {
    const part = [...charged(), ...partRefunded('P', [333, 333, 334])];
    const rest = [
      refundRequested('A', {
        legs: [move('A', 'principal', 9_000, 0), move('A', 'fee', 0, 325)],
        lines: [[3_000, 108], [3_000, 108], [3_000, 109]], // prettier-ignore
        asked: { amountCents: null, includeFee: true },
      }),
      returned('A', 'principal', 9_000, 0),
      ended('A', { outcome: 'partial', reversalType: 'void', amountCents: 9_000 }),
      ...completion,
    ];
    const facts = [...part, ...rest];
    expect(refundView(PAYMENT, chargedState(...facts), attempt(facts, 'P'), IN_CLEAR)).toEqual(
      refundView(PAYMENT, chargedState(...part), attempt(part, 'P'), IN_CLEAR),
    );
    expect(refundView(PAYMENT, chargedState(...facts), attempt(facts, 'A'), IN_CLEAR)).toMatchObject({ amountCents: 9_325 });
  });
  test('there is none of an attempt that is open, or returned nothing', () => {
    const open = [...charged(), ...halfRefunded('A').slice(0, 2)];
    const nothing = [...charged(), refundRequested('A', { legs: [move('A', 'principal', 10_000, 0)], lines: wholeLines.principal }), ended('A', { outcome: 'rejected' })]; // prettier-ignore
    for (const facts of [open, nothing]) {
      expect(() => refundView(PAYMENT, chargedState(...facts), attempt(facts, 'A'), IN_CLEAR)).toThrow(/without a refund/);
      expect(() => voidView(PAYMENT, chargedState(...facts), attempt(facts, 'A'), IN_CLEAR)).toThrow(/without a void/);
    }
  });
  test('of a refund of the fee alone: the fee leg’s transaction', () => {
    const facts = [
      ...charged(),
      ...principalRefunded('A'),
      ...completion.map((event) => (event.type === 'RefundRequested' ? { ...event, data: { ...event.data, completes: null } } : event)),
    ];
    expect(refundView(PAYMENT, chargedState(...facts), attempt(facts, 'B'), IN_CLEAR)).toMatchObject({
      amountCents: 325,
      gateway: { transactionId: 'B-fee-txn' },
    });
  });
  test('of a void: the whole payment, lines and fee apart', () => {
    const facts = [...charged(), ...voided('A')];
    expect(voidView(PAYMENT, chargedState(...facts), attempt(facts, 'A'), IN_CLEAR)).toEqual({
      id: PAYMENT,
      amountCents: 10_325,
      currency: 'USD',
      reason: null,
      status: 'voided',
      voidedLineItems: separate.lineItems.map(({ id, amountCents }) => ({ id, amountCents })),
      voidedServiceFeeCents: 325,
      gateway: { transactionId: 'A-principal-txn' },
      createdAt: AT,
    });
  });
  test('of a void completed by a retry: principal and fee (C27)', () => {
    const facts = [
      ...charged(),
      ...halfVoided('A'),
      voidRequested('B', { legs: [move('B', 'fee', 0, 325)], lines: wholeLines.fee, completes: 'A' }),
      returned('B', 'fee', 0, 325),
      ended('B', { operation: 'void', outcome: 'completed', reversalType: 'void', amountCents: 325 }),
    ];
    expect(voidView(PAYMENT, chargedState(...facts), attempt(facts, 'B'), IN_CLEAR)).toMatchObject({
      amountCents: 10_325,
      voidedServiceFeeCents: 325,
      voidedLineItems: separate.lineItems.map(({ id, amountCents }) => ({ id, amountCents })),
      gateway: { transactionId: 'A-principal-txn' },
    });
  });
});

describe('a history that cannot be is refused, not repaired', () => {
  const request = refundRequested('A', { legs: [move('A', 'principal', 10_000, 0)], lines: wholeLines.principal });
  const done = ended('A', { outcome: 'completed', amountCents: 10_000 });
  test.each<[string, PaymentEvent[]]>([
    ['an outcome without an intent', [created()]],
    ['two intents', [initiated(), initiated()]],
    ['an intent after the fence', [abandoned, initiated()]],
    ['a fence after the intent', [initiated(), abandoned]],
    ['two outcomes', [...charged(), created()]],
    ['a charge after a decline', [initiated(), declined, created()]],
    ['a charge out of unknown (C29)', [initiated(), unknown, created()]],
    ['a decline after a charge', [...charged(), declined]],
    ['a decline after a failure', [initiated(), failed, declined]],
    ['a fence after a failure', [initiated(), failed, fenced()]],
    ['a refund before it was charged', [initiated(), returned('A', 'principal', 10_000, 0, 'refund')]],
    ['a charge after the fence (C29)', [initiated(), fenced(), created()]],
    ['a failure out of unknown: only recovery’s findings resolve it', [initiated(), unknown, failed]],
    ['a charge undone while it may still succeed', [initiated(), returned(ATTEMPT, 'principal', 10_000, 0)]],
    ['a charge without one of its legs', [initiated(), created(feeless)]],
    ['a refund of what was never charged', [initiated(), request]],
    [
      'two open attempts',
      [
        ...charged(),
        request,
        refundRequested('B', {
          legs: [move('B', 'principal', 1, 0)],
          lines: principals(1, 0, 0),
        }),
      ],
    ],
    ['one attempt twice', [...charged(), ...partRefunded('A', [1, 0, 0]), ...partRefunded('A', [1, 0, 0])]],
    ['money back without an attempt', [...charged(), returned('A', 'principal', 10_000, 0)]],
    ['a leg that was not asked for', [...charged(), request, returned('A', 'fee', 0, 325)]],
    ['a leg twice', [...charged(), request, returned('A', 'principal', 10_000, 0), returned('A', 'principal', 10_000, 0)]],
    ['other cents than were asked', [...charged(), request, returned('A', 'principal', 9_999, 0)]],
    [
      'another fee than was asked',
      [
        ...charged(combined),
        refundRequested('A', { legs: [move('A', 'combined', 10_000, 325)], lines: wholeLines.both }),
        returned('A', 'combined', 10_000, 324),
      ],
    ],
    ['a part of a leg twice', [...charged(), ...partRefunded('A', [333, 333, 334]).slice(0, 2), returned('A', 'principal', 1_000, 0)]],
    [
      'money back without a transaction',
      [
        ...charged(),
        request,
        { type: 'PaymentVoided', at: AT, data: { attemptId: 'A', leg: 'principal', principalCents: 10_000, feeCents: 0, transactionId: null } },
      ],
    ],
    [
      'lines whose fees do not sum to the legs',
      [
        ...charged(),
        refundRequested('A', {
          legs: [move('A', 'principal', 10_000, 0), move('A', 'fee', 0, 325)],
          lines: [
            [3_333, 108],
            [3_333, 108],
            [3_334, 108],
          ],
        }),
      ],
    ],
    [
      'more than the leg has left',
      [
        ...charged(),
        ...partRefunded('A', [333, 333, 334]),
        refundRequested('B', {
          legs: [move('B', 'principal', 9_001, 0)],
          lines: principals(3_001, 3_000, 3_000),
        }),
        returned('B', 'principal', 9_001, 0),
      ],
    ],
    [
      'more than a line has left',
      [
        ...charged(),
        refundRequested('A', {
          legs: [move('A', 'principal', 3_334, 0)],
          lines: principals(3_334, 0, 0),
        }),
        returned('A', 'principal', 3_334, 0),
      ],
    ],
    [
      'lines that do not sum to the legs',
      [
        ...charged(),
        refundRequested('A', {
          legs: [move('A', 'principal', 1_000, 0)],
          lines: principals(333, 333, 333),
        }),
      ],
    ],
    ['the end of an attempt that never began', [...charged(), done]],
    ['an end twice', [...charged(), request, returned('A', 'principal', 10_000, 0), done, done]],
    ['money back after the end', [...charged(), request, ended('A', { outcome: 'never_executed' }), returned('A', 'principal', 10_000, 0)]],
    ['an attempt told that never was', [...charged(), acknowledged('A')]],
    ['a fence on an attempt that never was', [...charged(), fenced('A')]],
    ['a second fence on an attempt', [...charged(), ...partRefunded('A', [1, 0, 0]), fenced('A'), fenced('A')]],
    ['settlement of a leg that is not there', [...charged(feeless), settled('fee')]],
    ['settlement of what was never charged', [initiated(), unknown, settled('principal')]],
    ['a dispute on what was never charged', [initiated(), disputed()]],
    [
      'a resolution of what is not unknown',
      [initiated(), { type: 'PaymentResolved', at: AT, data: { as: 'voided', charge: null, evidence: '', by: 'op', forced: false } }],
    ],
  ])('%s', (_, facts) => expect(() => stateOf(...facts)).toThrow());
});
