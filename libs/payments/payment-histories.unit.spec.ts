/** Tests random valid histories of a payment: the amounts always add up (docs/contract.md#money-and-states). */
import { describe, expect, test } from '@jest/globals';
import fc from 'fast-check';
import { CLOSED, fold, ServiceError } from '#kernel';
import { AT, created, dispute, initiated, LATER, PAYMENT, requestRefund, requestVoid, separate, withLines } from '../../test/support/given.js';
import { feeByLine } from './fee.js';
import {
  attemptOf,
  cents,
  type Charged,
  DISPUTE_STATUSES,
  elsewhereOf,
  isVisible,
  openAttempt,
  type Payment,
  payment as decider,
  type PaymentCommand,
  type PaymentEvent,
  remaining,
  unreturned,
} from './payment.js';
import { paymentView } from './payment.view.js';

describe('in every history', () => {
  type Step =
    | { kind: 'refund'; part: number; includeFee: boolean; staff: boolean; gateway: Gateway }
    | { kind: 'void'; gateway: Gateway }
    | { kind: 'settle'; leg: number; accepted: boolean }
    | { kind: 'dispute'; cents: number; status: number }
    | { kind: 'elsewhere'; leg: number; part: number; means: 'void' | 'refund'; adopt: boolean }
    | { kind: 'tell'; attempt: number };
  /** The gateway's answer for each leg of an attempt, in order, and the gateway's capabilities. */
  interface Gateway {
    readonly legs: readonly ('void' | 'refund' | 'rejected' | 'not_processed' | 'unknown')[];
    /** The result of `finalize` for a leg whose answer was `unknown`. */
    readonly found: 'void' | 'refund' | 'never';
    readonly partialVoid: boolean;
    readonly refundUnsettled: boolean;
  }
  const gateway: fc.Arbitrary<Gateway> = fc.record({
    legs: fc.array(fc.constantFrom('void', 'void', 'refund', 'rejected', 'not_processed', 'unknown'), { minLength: 2, maxLength: 2 }),
    found: fc.constantFrom('void', 'refund', 'never'),
    partialVoid: fc.boolean(),
    refundUnsettled: fc.boolean(),
  });
  const step: fc.Arbitrary<Step> = fc.oneof(
    {
      weight: 6,
      arbitrary: fc.record({
        kind: fc.constant('refund' as const),
        part: fc.integer({ min: 0, max: 12 }),
        includeFee: fc.boolean(),
        staff: fc.boolean(),
        gateway,
      }),
    },
    { weight: 2, arbitrary: fc.record({ kind: fc.constant('void' as const), gateway }) },
    { weight: 1, arbitrary: fc.record({ kind: fc.constant('settle' as const), leg: fc.nat(1), accepted: fc.boolean() }) },
    { weight: 1, arbitrary: fc.record({ kind: fc.constant('dispute' as const), cents: fc.integer({ min: 1, max: 5_000 }), status: fc.nat(3) }) },
    {
      weight: 2,
      arbitrary: fc.record({
        kind: fc.constant('elsewhere' as const),
        leg: fc.nat(1),
        part: fc.integer({ min: 1, max: 10 }),
        means: fc.constantFrom('void' as const, 'refund' as const),
        adopt: fc.boolean(),
      }),
    },
    { weight: 1, arbitrary: fc.record({ kind: fc.constant('tell' as const), attempt: fc.nat(5) }) },
  );
  const termsArbitrary = fc
    .record({
      lines: fc.array(fc.integer({ min: 1, max: 20_000 }), { minLength: 1, maxLength: 3 }),
      fee: fc.nat(900),
      mode: fc.constantFrom('separate' as const, 'combined' as const),
    })
    .map(({ lines, fee, mode }) => {
      const plain = withLines(lines, mode);
      const shares = feeByLine(fee, lines);
      return {
        ...plain,
        serviceFeeCents: fee,
        lineItems: plain.lineItems.map((line, index) => ({ ...line, serviceFeeCents: shares[index]! })),
        legs:
          mode === 'combined'
            ? plain.legs.map((leg) => ({ ...leg, feeCents: fee }))
            : [...plain.legs, ...(fee > 0 ? separate.legs.filter(({ leg }) => leg === 'fee').map((leg) => ({ ...leg, feeCents: fee })) : [])],
      };
    });

  const check = (state: Payment): void => {
    if (!isVisible(state)) return;
    const view = paymentView(PAYMENT, state, CLOSED);
    const { capturedAmountCents: captured, refundedAmountCents: refunded, remainingRefundableAmountCents: left, status, lineItems } = view;
    expect(captured).toBe(refunded + left);
    expect([captured, refunded, left].every((cents) => cents >= 0)).toBe(true);
    expect([0, view.totalChargedCents]).toContain(captured);
    const sum = (of: (line: (typeof lineItems)[number]) => number) => lineItems.reduce((total, line) => total + of(line), 0);
    expect(sum((line) => line.amountCents)).toBe(view.amountCents);
    expect(sum((line) => line.serviceFeeCents)).toBe(view.serviceFeeCents);
    expect(sum((line) => line.refundedAmountCents)).toBe(refunded);
    expect(sum((line) => line.remainingRefundableAmountCents)).toBe(left);
    for (const line of lineItems)
      if (captured > 0) expect(line.refundedAmountCents + line.remainingRefundableAmountCents).toBe(line.amountCents + line.serviceFeeCents);
    if (state.phase !== 'charged') return;

    // Legs and lines agree, for the principal and for the fee.
    const due = remaining(state);
    const { terms, lines } = state;
    expect(lines.reduce((total, line) => total + line.principalReturnedCents, 0)).toBe(terms.amountCents - due.principal);
    expect(lines.reduce((total, line) => total + line.feeReturnedCents, 0)).toBe(terms.serviceFeeCents - due.fee);
    lines.forEach((line, index) => {
      expect(line.principalReturnedCents).toBeLessThanOrEqual(terms.lineItems[index]!.amountCents);
      // We return a fee whole. A return that was made elsewhere may return a part of it.
      if (elsewhereOf(state).length === 0) expect([0, terms.lineItems[index]!.serviceFeeCents]).toContain(line.feeReturnedCents);
      expect(line.feeReturnedCents).toBeLessThanOrEqual(terms.lineItems[index]!.serviceFeeCents);
    });
    const moved = state.attempts.flatMap((attempt) => attempt.returned);
    expect(moved.reduce((total, part) => total + part.principalCents + part.feeCents, 0)).toBe(refunded);
    // C21, C22, C27: the status follows from the amounts and from the operation that returned money last.
    const last = state.attempts.filter((attempt) => attempt.returned.length > 0).at(-1)?.operation;
    if (left === 0) expect(status).toBe(last === 'void' ? 'voided' : 'refunded');
    else if (refunded === 0) expect(status).toBe('succeeded');
    else expect(status).toBe(last === 'void' ? 'succeeded' : 'partially_refunded');
    // C24: after the first refund on a leg, no void follows on that leg.
    for (const { leg } of state.legs) {
      const means = moved.filter((part) => part.leg === leg).map((part) => part.means);
      expect(means.lastIndexOf('void')).toBeLessThan(means.includes('refund') ? means.indexOf('refund') : means.length);
    }
    expect(state.attempts.filter(({ ended: end }) => end === null).length).toBeLessThanOrEqual(1);
  };

  /**
   * Runs a history and checks every state. Each state goes through JSON and back before the next step. `ignoresElsewhere`: a fault, for the canary.
   */
  const play = (terms: Parameters<typeof initiated>[0], steps: readonly Step[], ignoresElsewhere = false): PaymentEvent[] => {
    /** Cents that went back at the processor, and were not dismissed. */
    let goneElsewhere = 0;
    const facts: PaymentEvent[] = [];
    let state: Payment = decider.initial;
    const add = (events: readonly PaymentEvent[]) => {
      for (const event of events) {
        facts.push(event);
        state = decider.evolve(JSON.parse(JSON.stringify(state)) as Payment, JSON.parse(JSON.stringify(event)) as PaymentEvent);
        check(state);
      }
    };
    const ask = (command: PaymentCommand): boolean => {
      try {
        const events = decider.decide(state, command);
        add(events);
        return events.length > 0;
      } catch (error) {
        // Only refusals are expected here. Any other error is a fault.
        if (!(error instanceof ServiceError)) throw error;
        return false;
      }
    };
    add([initiated(terms), created(terms)]);
    let drawn = 0;
    const run = (attemptId: string, operation: 'void' | 'refund', { legs, found }: Gateway) => {
      const { legs: moves } = attemptOf(state, attemptId)!;
      for (const [index, { leg, means }] of moves.entries()) {
        const did = legs[index]!;
        if (did === 'void' || did === 'refund') {
          // C24: a requested void is executed only as a void. A requested refund may be executed as either, unless the move is planned as a refund.
          const how = operation === 'void' ? 'void' : means === 'refund' ? 'refund' : did;
          ask({ type: 'RecordLegReturned', at: LATER, attemptId, leg, means: how, transactionId: `t${++drawn}` });
          continue;
        }
        if (did === 'unknown') {
          ask({ type: 'StartReconciliation', at: LATER, attemptId });
          if (found !== 'never') {
            const how = operation === 'void' ? 'void' : means === 'refund' ? 'refund' : found;
            ask({ type: 'RecordLegReturned', at: LATER, attemptId, leg, means: how, transactionId: `t${++drawn}` });
          }
        }
        ask({ type: 'EndReversal', at: LATER, attemptId, unfinished: did === 'rejected' ? 'rejected' : 'never_executed' });
        return;
      }
      ask({ type: 'EndReversal', at: LATER, attemptId });
    };
    for (const one of steps) {
      const attemptId = `attempt-${++drawn}`;
      if (one.kind === 'refund') {
        const { partialVoid, refundUnsettled } = one.gateway;
        const left = remaining(state as Charged).principal;
        const amountCents = one.part > 10 ? null : Math.max(1, Math.floor((left * one.part) / 10));
        const asked = requestRefund(attemptId, {
          amountCents,
          includeFee: one.includeFee,
          initiatedBy: one.staff ? 'staff' : 'partner',
          capabilities: () => ({ partialVoid, refundUnsettled }),
        });
        if (ask(asked)) run(attemptId, 'refund', one.gateway);
      } else if (one.kind === 'void') {
        if (ask(requestVoid(attemptId))) run(attemptId, 'void', one.gateway);
      } else if (one.kind === 'settle') {
        const leg = (state as Charged).legs[one.leg % (state as Charged).legs.length]!;
        ask({ type: 'RecordSettlement', at: LATER, leg: leg.leg, batchId: 'b', closedAt: AT, accepted: one.accepted, grossCents: 1, feeCents: 0 });
      } else if (one.kind === 'dispute') {
        const { disputes } = state as Charged;
        const status = DISPUTE_STATUSES[one.status]!;
        if (disputes.length === 0) ask({ type: 'OpenDispute', at: LATER, dispute: dispute({ disputedAmountCents: one.cents, status }) });
        else ask({ type: 'UpdateDispute', at: LATER, disputeId: disputes[0]!.disputeId, status, stage: null });
      } else if (one.kind === 'elsewhere') {
        const { legs } = state as Charged;
        const { leg, ...charge } = legs[one.leg % legs.length]!;
        const left = cents(unreturned({ leg, ...charge }));
        const amountCents = one.means === 'void' ? left : Math.ceil((left * one.part) / 10);
        const transactionId = `elsewhere-${++drawn}`;
        if (ask({ type: 'NoteReturn', at: LATER, returnId: attemptId, leg, transactionId })) {
          // Until staff have decided, nothing else returns money.
          expect(ask(requestRefund(`${attemptId}-blocked`, { includeFee: true })) || ask(requestVoid(`${attemptId}-blocked`))).toBe(false);
          const references = (name: string) => ({ void: `v-${attemptId}-${name}`, refund: `r-${attemptId}-${name}` });
          const adopt: PaymentCommand = { type: 'AdoptReturn', at: LATER, returnId: attemptId, means: one.means, returns: [{ leg, amountCents, transactionId }], personal: null, references }; // prettier-ignore
          const adopted = one.adopt && (ignoresElsewhere || ask(adopt));
          if (adopted) goneElsewhere += amountCents;
          expect(adopted && ask(adopt)).toBe(ignoresElsewhere && adopted);
          ask({ type: 'DismissReturn', at: LATER, returnId: attemptId });
        }
      } else {
        const { attempts } = state as Charged;
        if (attempts.length > 0)
          ask({ type: 'AcknowledgeReversal', at: LATER, attemptId: attempts[one.attempt % attempts.length]!.attemptId, toldAs: null });
      }
      expect(openAttempt(state as Charged)).toBeUndefined();
    }
    const recorded = (state as Charged).attempts.filter((attempt) =>
      elsewhereOf(state as Charged).some(({ returnId }) => returnId === attempt.attemptId),
    );
    expect(recorded.flatMap(({ returned }) => returned).reduce((sum, part) => sum + cents(part), 0)).toBe(goneElsewhere);
    // The list stores the folded state as JSON. Folding all events must give exactly the same state.
    expect(JSON.parse(JSON.stringify(fold(decider, facts)))).toEqual(JSON.parse(JSON.stringify(state)));
    return facts;
  };

  test('captured = refunded + remaining, lines sum to the payment, refunded never exceeds, the status is derived, the state survives JSON', () => {
    const seen = new Set<string>();
    fc.assert(
      fc.property(termsArbitrary, fc.array(step, { maxLength: 8 }), (terms, steps) => {
        for (const { type } of play(terms, steps)) seen.add(type);
      }),
      // The seed is fixed, so that every run reaches all of the events below.
      { numRuns: 300, seed: 1 },
    );
    // Without these events, the test would prove nothing about them.
    for (const type of [
      'PaymentVoided',
      'PaymentRefunded',
      'FeeRefunded',
      'ReconciliationStarted',
      'ReversalAcknowledged',
      'PaymentSettled',
      'PaymentDisputed',
      'ReturnedElsewhere',
    ])
      expect(seen).toContain(type);
  });

  test('canary: a return elsewhere ignored is found', () => {
    const property = fc.property(termsArbitrary, fc.array(step, { maxLength: 8 }), (terms, steps) => void play(terms, steps, true));
    expect(fc.check(property, { numRuns: 300, seed: 1 }).failed).toBe(true);
  });

  test('a repeated fact never counts money twice: it is refused, or changes no cent', () =>
    fc.assert(
      fc.property(termsArbitrary, fc.array(step, { minLength: 1, maxLength: 6 }), fc.nat(), (terms, steps, pick) => {
        const facts = play(terms, steps);
        const twice = pick % facts.length;
        const whole = fold(decider, facts);
        let again: Payment;
        try {
          again = fold(decider, [...facts.slice(0, twice + 1), ...facts.slice(twice)]);
        } catch {
          return;
        }
        expect(isVisible(again) && isVisible(whole) && moneyOf(again)).toEqual(isVisible(whole) && moneyOf(whole));
      }),
      { numRuns: 300 },
    ));
  const moneyOf = (state: Parameters<typeof paymentView>[1]) => {
    const { refundedAmountCents, remainingRefundableAmountCents, lineItems } = paymentView(PAYMENT, state, CLOSED);
    return { refundedAmountCents, remainingRefundableAmountCents, lines: lineItems.map((line) => line.refundedAmountCents) };
  };
});
