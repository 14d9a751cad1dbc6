/**
 * Tests the posting rules over random histories of payments. The books always balance, and agree with the state of the payment (invariants 1 to 9).
 */
import { describe, expect, test } from '@jest/globals';
import fc from 'fast-check';
import type { DomainEvent, EventTypes, Recorded } from '#eventstore';
import { fold, type Json, sumCents } from '#kernel';
import {
  type Dispute,
  DISPUTE_STATUSES,
  cents,
  disputedCents,
  type Leg,
  type Payment,
  payment as decider,
  paymentEvents,
  type PaymentCommand,
  type PaymentEvent,
  type PaymentTerms,
  remaining,
  standing,
} from '#payments';
import { exceptionEvents, type RecordedLine, type SettlementEvent, settlementEvents, settlementException, settlementFileEvents } from '#settlement';
import { adjust, bookedAt, periods, postingRuleVersions } from './adjustment.js';
import { account, isAccount, typeOf } from './chart.js';
import { manualAdjustmentEvents, periodEvents, postingRuleEvents, remittanceEvents } from './events.js';
import { type JournalEntry, journalise } from './journal.js';
import {
  type Books,
  type Entry,
  firstRules,
  POSTING_RULES,
  postAdjustment,
  postException,
  type PostingRules,
  postPayment,
  postRemittance,
  postSettlement,
  refuseUnbalanced,
  rulesAfter,
  RULE_WORDS,
} from './postings.js';

const RULES = firstRules();

const PORTAL = '01890000-0000-7000-8000-000000000001';
const PAYMENT = '01890000-0000-7000-8000-000000000002';
const AT = '2026-03-01T10:00:00.000Z';
const CLOSED = '2026-03-02T05:00:00.000Z';

const termsOf = (principal: number, fee: number, chargeMode: 'separate' | 'combined'): PaymentTerms => {
  const at = (merchantAccount: string) => ({ gateway: 'simulator', merchantAccount, credentialsRef: 'sandbox', environment: 'sandbox' as const });
  const leg = (name: Leg, principalCents: number, feeCents: number, mid: string) => ({
    leg: name,
    principalCents,
    feeCents,
    account: at(mid),
    references: { charge: `c-${name}`, reversal: `r-${name}` },
  });
  return {
    accountId: PORTAL,
    portalId: PORTAL,
    referenceId: null,
    amountCents: principal,
    serviceFeeCents: fee,
    feeVersion: 1,
    chargeMode,
    lineItems: [{ id: 'l1', amountCents: principal, serviceFeeCents: fee, referenceId: 'r', coding: null }],
    personal: null,
    paymentMethod: { type: 'card', brand: 'visa', last4: '4242' },
    legs:
      chargeMode === 'combined'
        ? [leg('combined', principal, fee, 'mid-agency')]
        : [leg('principal', principal, 0, 'mid-agency'), ...(fee > 0 ? [leg('fee', 0, fee, 'mid-fees')] : [])],
  };
};

/** A payment and its books. `run` gives a command to the decider and posts the events that follow. A refused command changes nothing. */
class Life {
  payment: Payment = decider.initial;
  books: Books = null;
  readonly events: PaymentEvent[] = [];
  readonly entries: Entry[] = [];

  run(command: PaymentCommand): boolean {
    let decided: readonly PaymentEvent[];
    try {
      decided = decider.decide(this.payment, command);
    } catch (error) {
      if ((error as { code?: string }).code === undefined) throw error;
      return false;
    }
    for (const event of decided) {
      this.payment = decider.evolve(this.payment, event);
      const posted = postPayment(RULES, PAYMENT, this.books, event);
      this.books = posted.books;
      this.events.push(event);
      this.entries.push(...posted.entries);
    }
    return true;
  }

  balance(prefix: string): number {
    return sumCents(
      this.entries.flatMap(({ postings }) => postings).filter((posting) => posting.account.startsWith(prefix)),
      ({ cents }) => cents,
    );
  }
}

const STEPS = fc.array(
  fc.oneof(
    fc.record({ do: fc.constant('void' as const), upTo: fc.nat(2) }),
    fc.record({ do: fc.constant('refund' as const), share: fc.double({ min: 0.01, max: 1, noNaN: true }), fee: fc.boolean(), upTo: fc.nat(2) }),
    fc.record({ do: fc.constant('settle' as const), leg: fc.nat(1), accepted: fc.boolean() }),
    fc.record({ do: fc.constant('dispute' as const), id: fc.nat(1), status: fc.constantFrom(...DISPUTE_STATUSES), share: fc.double({ min: 0.01, max: 1, noNaN: true }), leg: fc.constantFrom(null, 'principal' as const, 'fee' as const, 'combined' as const) }), // prettier-ignore
  ),
  { maxLength: 14 },
);
const CASE = fc.record({
  principal: fc.integer({ min: 1, max: 99_999_999 }),
  fee: fc.oneof(fc.constant(0), fc.integer({ min: 1, max: 9_999_999 })),
  mode: fc.constantFrom('separate' as const, 'combined' as const),
  ending: fc.constantFrom('charged' as const, 'resolved' as const, 'declined' as const, 'voided' as const),
  steps: STEPS,
});

const live = ({ principal, fee, mode, ending, steps }: typeof CASE extends fc.Arbitrary<infer T> ? T : never): Life => {
  const life = new Life();
  const terms = termsOf(principal, fee, mode);
  life.run({ type: 'Initiate', at: AT, attemptId: 'a0', idempotency: null, terms });
  const charge = {
    confirmationNumber: 'X',
    legs: terms.legs.map(({ leg }) => ({ leg, transactionId: `t-${leg}`, authCode: '1', avs: null, cvv: null })),
  };
  switch (ending) {
    case 'charged':
      life.run({ type: 'RecordChargeOutcome', at: AT, attemptId: 'a0', outcome: { kind: 'charged', ...charge } });
      break;
    case 'declined':
      life.run({
        type: 'RecordChargeOutcome',
        at: AT,
        attemptId: 'a0',
        outcome: { kind: 'declined', leg: terms.legs[0]!.leg, code: 'generic_decline', transactionId: null, raw: null, avs: null, cvv: null },
      });
      break;
    default:
      life.run({ type: 'StartReconciliation', at: AT, attemptId: 'a0' });
      if (ending === 'resolved') life.run({ type: 'Resolve', at: AT, as: 'succeeded', charge, evidence: 'seen', by: 'me', forced: false });
      else
        life.run({
          type: 'RecordChargeFindings',
          at: AT,
          attemptId: 'a0',
          findings: terms.legs.map(({ leg }) => ({ leg, found: 'reversed' as const, transactionId: `t-${leg}` })),
        });
  }
  let attempts = 0;
  const references = (leg: Leg) => ({ void: `v-${leg}`, refund: `f-${leg}` });
  for (const step of steps) {
    switch (step.do) {
      case 'void':
      case 'refund': {
        const attemptId = `a${++attempts}`;
        const common = { at: AT, attemptId, idempotency: null, initiatedBy: 'partner' as const, personal: null, references };
        const asked =
          step.do === 'void'
            ? life.run({ type: 'RequestVoid', ...common })
            : life.run({
                type: 'RequestRefund',
                ...common,
                amountCents: step.fee ? null : Math.max(1, Math.floor(principal * step.share)),
                includeFee: step.fee,
                capabilities: () => ({ partialVoid: true, refundUnsettled: false }),
              });
        if (!asked || life.payment.phase !== 'charged') break;
        const moves = life.payment.attempts.at(-1)!.legs.slice(0, step.upTo);
        for (const { leg, means } of moves)
          life.run({ type: 'RecordLegReturned', at: AT, attemptId, leg, means, transactionId: `${attemptId}-${leg}` });
        life.run({ type: 'EndReversal', at: AT, attemptId, unfinished: 'rejected' });
        break;
      }
      case 'settle': {
        if (life.payment.phase !== 'charged') break;
        const leg = life.payment.legs[Math.min(step.leg, life.payment.legs.length - 1)]!;
        const booked = life.books!.legs.find((one) => one.leg === leg.leg)!;
        const grossCents = booked.principalCents + booked.feeCents - booked.voidedPrincipalCents - booked.voidedFeeCents;
        // A leg that was voided whole never settles.
        if (grossCents > 0)
          life.run({
            type: 'RecordSettlement',
            at: AT,
            leg: leg.leg,
            batchId: 'b1',
            closedAt: CLOSED,
            accepted: step.accepted,
            grossCents,
            feeCents: 7,
          });
        break;
      }
      case 'dispute': {
        const disputeId = `d${step.id}`;
        const known = life.payment.phase === 'charged' && life.payment.disputes.some((one) => one.disputeId === disputeId);
        const dispute: Dispute = {
          disputeId,
          status: step.status,
          stage: 'chargeback',
          reasonCode: '1',
          personal: null,
          disputedAmountCents: Math.max(
            1,
            Math.floor((step.leg === 'principal' ? principal : step.leg === 'fee' ? fee : principal + fee) * step.share),
          ),
          ...(step.leg !== null && { leg: step.leg }),
          openedOn: '2026-03-05',
          dueDate: '2026-03-20',
        };
        if (known) life.run({ type: 'UpdateDispute', at: AT, disputeId, status: step.status, stage: null });
        else life.run({ type: 'OpenDispute', at: AT, dispute });
      }
    }
  }
  return life;
};

describe('over random lives of a payment', () => {
  test('every entry balances, with two postings or more, in whole cents, on accounts of the chart (invariants 1, 2)', () => {
    fc.assert(
      fc.property(CASE, (one) => {
        for (const entry of live(one).entries) {
          refuseUnbalanced(entry);
          expect(entry.postings.every((posting) => isAccount(posting.account))).toBe(true);
        }
      }),
    );
  });

  test('no event posts under one rule twice (invariant 8)', () => {
    fc.assert(
      fc.property(CASE, (one) => {
        let books: Books = null;
        for (const event of live(one).events) {
          const posted = postPayment(RULES, PAYMENT, books, event);
          books = posted.books;
          const rules = posted.entries.map(({ rule, part }) => `${rule} ${part}`);
          expect(new Set(rules).size).toBe(rules.length);
        }
      }),
    );
  });

  test('balances of unsettled, transit, chargeback, payable and revenue accounts agree with the payment (invariants 3 to 6, 9)', () => {
    fc.assert(
      fc.property(CASE, (one) => {
        const life = live(one);
        const { payment } = life;
        if (payment.phase !== 'charged') {
          expect(life.entries).toEqual([]);
          return;
        }
        const returned = payment.attempts.flatMap((attempt) => attempt.returned);
        const sum = (means: 'void' | 'refund', part: 'principalCents' | 'feeCents', leg?: Leg) =>
          sumCents(
            returned.filter((back) => back.means === means && (leg === undefined || back.leg === leg)),
            (back) => back[part],
          );
        // Invariant 3: the unsettled balance is the sum of the legs without a batch, less their voids. All refunds are subtracted, since they wait
        // for a batch of their own.
        const unsettled = sumCents(payment.legs, ({ leg, principalCents, feeCents, settledBatchId, settlementRejected }) => {
          const sale = principalCents + feeCents - sum('void', 'principalCents', leg) - sum('void', 'feeCents', leg);
          return (settledBatchId !== null || settlementRejected ? 0 : sale) - sum('refund', 'principalCents', leg) - sum('refund', 'feeCents', leg);
        });
        expect(life.balance('assets:processor:mid-agency:unsettled') + life.balance('assets:processor:mid-fees:unsettled')).toBe(unsettled);
        // Invariant 4: the balance of disputes is the money of the disputes that are not decided yet.
        const undecided = sumCents(standing(payment.disputes.filter(({ status }) => status === 'debited' || status === 'in_dispute')), cents);
        expect(life.balance('assets:disputes:')).toBe(undecided);
        // What disputes take beyond what remained waits for staff.
        expect(life.balance('assets:dispute_suspense:')).toBe(sumCents(standing(payment.disputes), ({ excessCents = 0 }) => excessCents));
        // Invariants 5 and 6: the books show the remaining principal and fee, less rejected settlements. Lost disputes reduce the principal, too.
        const rejected = (part: 'principalCents' | 'feeCents') =>
          sumCents(
            payment.legs.filter(({ settlementRejected }) => settlementRejected),
            (leg) => leg[part] - sum('void', part, leg.leg),
          );
        const left = remaining(payment);
        expect(0 - life.balance('revenue:')).toBe(left.fee - rejected('feeCents'));
        const lost = payment.disputes.filter(({ status }) => status === 'lost');
        expect(0 - life.balance('liabilities:agency') - life.balance('expense:chargeback_loss')).toBe(
          left.principal - rejected('principalCents') - sumCents(standing(lost), cents),
        );
        // Invariant 9: the balance in transit is the settled money, less the processor's fees and the money that disputes took.
        const settled = payment.legs.filter(({ settledBatchId }) => settledBatchId !== null);
        const gross = sumCents(
          settled,
          ({ leg, principalCents, feeCents }) => principalCents + feeCents - sum('void', 'principalCents', leg) - sum('void', 'feeCents', leg),
        );
        expect(life.balance('assets:processor:mid-agency:in_transit') + life.balance('assets:processor:mid-fees:in_transit')).toBe(
          gross - 7 * settled.length - disputedCents(payment),
        );
      }),
      { numRuns: 400 },
    );
  });

  test('posting the same events again gives the same entries (invariant 11)', () => {
    fc.assert(
      fc.property(CASE, (one) => {
        const life = live(one);
        let books: Books = null;
        const again = life.events.flatMap((event) => {
          const posted = postPayment(RULES, PAYMENT, JSON.parse(JSON.stringify(books)) as Books, event);
          books = posted.books;
          return posted.entries;
        });
        expect(again).toEqual(life.entries);
      }),
    );
  });
});

describe('one rule after the other', () => {
  const charged = (mode: 'separate' | 'combined', steps: Parameters<typeof live>[0]['steps'] = []) =>
    live({ principal: 10_000, fee: 300, mode, ending: 'charged', steps });
  const shown = (entries: readonly Entry[]) =>
    entries.map(({ rule, postings }) => [rule, Object.fromEntries(postings.map((one) => [one.account, one.cents]))]);
  const name = {
    payable: account.payable(PORTAL),
    fee: account.serviceFee(PORTAL),
    refunded: account.serviceFeeRefunded(PORTAL),
    loss: account.chargebackLoss(PORTAL),
  };
  const agency = { unsettled: account.unsettled('mid-agency'), transit: account.inTransit('mid-agency'), disputes: account.disputes('mid-agency'), suspense: account.disputeSuspense('mid-agency') }; // prettier-ignore
  const fees = { unsettled: account.unsettled('mid-fees'), transit: account.inTransit('mid-fees'), disputes: account.disputes('mid-fees') };
  const dispute = (status: (typeof DISPUTE_STATUSES)[number], share = 1, leg: Leg | null = null, id = 0) => ({
    do: 'dispute' as const,
    id,
    status,
    share,
    leg,
  });

  test('R1, R2: a charge is owed to the agency, its fee is earned', () => {
    expect(shown(charged('separate').entries)).toEqual([
      ['R1', { [agency.unsettled]: 10_000, [name.payable]: -10_000 }],
      ['R2', { [fees.unsettled]: 300, [name.fee]: -300 }],
    ]);
  });
  test('R4, R5: a batch closes; its time is the effective one', () => {
    const { entries } = charged('combined', [{ do: 'settle', leg: 0, accepted: true }]);
    expect(shown(entries.slice(2))).toEqual([
      ['R4', { [agency.transit]: 10_300, [agency.unsettled]: -10_300 }],
      ['R5', { [account.processing('mid-agency')]: 7, [agency.transit]: -7 }],
    ]);
    expect(entries[2]!.effectiveAt).toBe(CLOSED);
  });
  test('R14: a rejected settlement takes everything back', () => {
    expect(shown(charged('combined', [{ do: 'settle', leg: 0, accepted: false }]).entries.slice(2))).toEqual([
      ['R14', { [name.payable]: 10_000, [name.fee]: 300, [agency.unsettled]: -10_300 }],
    ]);
  });
  test('R14 after a part was voided: the remaining principal and fee', () => {
    const { books } = charged('combined');
    const data = { attemptId: 'a', leg: 'combined' as const, principalCents: 4_000, feeCents: 100, transactionId: 't' };
    const after = postPayment(RULES, PAYMENT, books, { type: 'PaymentVoided', at: AT, data }).books;
    const rejected = { type: 'SettlementRejected' as const, at: AT, data: { leg: 'combined' as const, batchId: 'b1', closedAt: CLOSED } };
    expect(shown(postPayment(RULES, PAYMENT, after, rejected).entries)).toEqual([
      ['R14', { [name.payable]: 6_000, [name.fee]: 200, [agency.unsettled]: -6_200 }],
    ]);
  });
  test('R3, then R7 and R8: before settlement a void, after it a refund with its fee as contra revenue', () => {
    expect(shown(charged('combined', [{ do: 'refund', share: 1, fee: true, upTo: 2 }]).entries.slice(2))).toEqual([
      ['R3', { [name.payable]: 10_000, [name.fee]: 300, [agency.unsettled]: -10_300 }],
    ]);
    const settled = charged('combined', [{ do: 'settle', leg: 0, accepted: true }, { do: 'refund', share: 1, fee: true, upTo: 2 }]); // prettier-ignore
    expect(shown(settled.entries.slice(4))).toEqual([
      ['R7', { [name.payable]: 10_000, [agency.unsettled]: -10_000 }],
      ['R8', { [name.refunded]: 300, [agency.unsettled]: -300 }],
    ]);
  });
  test.each([
    [['debited'], ['R9']],
    [['debited', 'in_dispute'], ['R9']],
    [
      ['debited', 'lost'],
      ['R9', 'R11'],
    ],
    [['lost'], ['R9', 'R11']],
    [
      ['debited', 'recovered'],
      ['R9', 'R12'],
    ],
    [
      ['debited', 'lost', 'recovered'],
      ['R9', 'R11', "R12'"],
    ],
    [
      ['lost', 'in_dispute'],
      ['R9', 'R11', "R12''"],
    ],
    [
      ['debited', 'recovered', 'debited'],
      ['R9', 'R12', 'R9'],
    ],
    [['recovered'], []],
  ] as const)('a dispute that goes %j posts %j (R9 to R12)', (statuses, rules) => {
    const { entries } = charged('combined', statuses.map((status) => dispute(status))); // prettier-ignore
    expect(entries.slice(2).map(({ rule }) => rule)).toEqual(rules);
  });
  test('a lost dispute: the agency bears its principal, the operator the fee; by leg where they were charged apart', () => {
    expect(shown(charged('combined', [dispute('lost', 0.5)]).entries.slice(3))).toEqual([
      ['R11', { [name.payable]: 5_000, [name.loss]: 150, [agency.disputes]: -5_150 }],
    ]);
    expect(shown(charged('separate', [dispute('lost')]).entries.slice(2))).toEqual([
      ['R9', { [agency.disputes]: 10_000, [fees.disputes]: 300, [agency.transit]: -10_000, [fees.transit]: -300 }],
      ['R11', { [name.payable]: 10_000, [name.loss]: 300, [agency.disputes]: -10_000, [fees.disputes]: -300 }],
    ]);
  });

  test('the charge that the processor named is the one that is taken back; without a name it is the rest of the others', () => {
    expect(shown(charged('separate', [dispute('debited', 1, 'fee')]).entries.slice(2))).toEqual([
      ['R9', { [fees.disputes]: 300, [fees.transit]: -300 }],
    ]);
    const after = (...first: ReturnType<typeof dispute>[]) => shown(charged('separate', [...first, dispute('debited', 1, null, 1)]).entries).at(-1);
    expect(after(dispute('debited', 0.5, 'principal'))).toEqual(['R22', { [agency.suspense]: 5_000, [agency.transit]: -5_000 }]);
    // The first dispute has taken the whole fee leg. The second one goes to the principal leg, and what exceeds the principal waits for staff.
    expect(after(dispute('debited', 1, 'fee'))).toEqual(['R22', { [agency.suspense]: 300, [agency.transit]: -300 }]);
    const small = shown(charged('separate', [dispute('debited', 1, 'principal'), dispute('debited', 0.01, null, 1)]).entries).at(-1);
    expect(small).toEqual(['R9', { [fees.disputes]: 103, [fees.transit]: -103 }]);
    const given = shown(
      charged('separate', [dispute('debited', 1, 'principal'), dispute('recovered'), dispute('debited', 0.01, null, 1)]).entries,
    ).at(-1);
    expect(given).toEqual(['R9', { [agency.disputes]: 103, [agency.transit]: -103 }]);
  });

  const line = (over: Partial<RecordedLine>): RecordedLine => ({
    number: 3,
    transactionId: 't',
    ref: null,
    type: 'sale',
    accepted: true,
    grossCents: 500,
    feeCents: 20,
    netCents: 480,
    result: 'MISSING_HERE',
    paymentId: null,
    leg: null,
    expectedCents: null,
    ...over,
  });
  const batch = { gateway: 'simulator', merchantAccount: 'mid-agency', batchId: 'b1' };
  const lines = (...all: RecordedLine[]) =>
    shown(postSettlement(RULES, { type: 'SettlementLinesRecorded', at: AT, data: { ...batch, closedAt: CLOSED, lines: all } }));
  const suspense = account.suspense('mid-agency');
  const kept = account.processing('mid-agency');
  test('R15: an unexplained line goes into suspense; a rejected line moves nothing', () => {
    expect(lines(line({}))).toEqual([
      ['R15', { [agency.transit]: 500, [suspense]: -500 }],
      ['R5', { [kept]: 20, [agency.transit]: -20 }],
    ]);
    expect(lines(line({ accepted: false }))).toEqual([]);
  });
  test('a matched sale posts with its payment, a matched refund and fee here (R4′, R5, R13)', () => {
    expect(lines(line({ result: 'MATCHED' }))).toEqual([]);
    expect(lines(line({ result: 'MATCHED', type: 'refund', grossCents: -500, feeCents: 0, netCents: -500 }))).toEqual([
      ["R4'", { [agency.transit]: -500, [agency.unsettled]: 500 }],
    ]);
    expect(lines(line({ result: 'MATCHED', type: 'fee', grossCents: 0, feeCents: 995, netCents: -995 }))).toEqual([
      ['R5', { [kept]: 995, [agency.transit]: -995 }],
    ]);
    expect(lines(line({ result: 'MATCHED', type: 'chargeback', grossCents: -500, feeCents: 1_500, netCents: -2_000 }))).toEqual([
      ['R13', { [account.disputeFee('mid-agency')]: 1_500, [agency.transit]: -1_500 }],
    ]);
    expect(lines(line({ result: 'MATCHED', type: 'refund', grossCents: -500, feeCents: 20 }))).toEqual([
      ["R4'", { [agency.transit]: -500, [agency.unsettled]: 500 }],
      ['R5', { [kept]: 20, [agency.transit]: -20 }],
    ]);
    expect(lines(line({ result: 'AMOUNT_MISMATCH', expectedCents: 400 }))).toEqual([]);
  });
  test('R15: the difference of a dispute’s line, and every adjustment of the processor, must be explained', () => {
    for (const type of ['chargeback', 'chargeback_reversal'] as const)
      expect(lines(line({ result: 'AMOUNT_MISMATCH', type, grossCents: -500, feeCents: 0, expectedCents: -400 }))).toEqual([
        ['R15', { [agency.transit]: -100, [suspense]: 100 }],
      ]);
    expect(lines(line({ result: 'MATCHED', type: 'adjustment', grossCents: 0, feeCents: 5, netCents: -5 }))).toEqual([
      ['R15', { [agency.transit]: -5, [suspense]: 5 }],
    ]);
    for (const result of ['STATUS_MISMATCH', 'DUPLICATE_AT_GATEWAY', 'WRONG_ACCOUNT'] as const)
      expect(lines(line({ result, feeCents: 0 }))).toEqual([['R15', { [agency.transit]: 500, [suspense]: -500 }]]);
  });
  test('a corrected line posts the difference; a sale is taken back in its payment’s stream', () => {
    const corrected = (before: RecordedLine | null, after: RecordedLine | null) =>
      shown(
        postSettlement(RULES, {
          type: 'SettlementLinesCorrected',
          at: AT,
          data: { ...batch, closedAt: CLOSED, fundedOn: null, fileId: 'f', reference: null, corrections: [{ before, after }] },
        }),
      );
    expect(corrected(line({}), null)).toEqual([
      ['R15', { [agency.transit]: -500, [suspense]: 500 }],
      ['R5', { [kept]: -20, [agency.transit]: 20 }],
    ]);
    expect(corrected(line({}), line({ grossCents: 600 }))).toEqual([['R15', { [agency.transit]: 100, [suspense]: -100 }]]);
    expect(corrected(line({}), line({ result: 'MATCHED' }))).toEqual(corrected(line({}), null));
    expect(corrected(line({ result: 'MATCHED' }), null)).toEqual([]);
    const settlement = { leg: 'combined' as const, batchId: 'b1', closedAt: CLOSED, grossCents: 500, feeCents: 20 };
    const life = charged('combined', []);
    const post = (type: 'PaymentSettled' | 'SettlementWithdrawn') =>
      shown(postPayment(RULES, PAYMENT, life.books, { type, at: AT, data: settlement }).entries);
    expect(post('SettlementWithdrawn')).toEqual(
      post('PaymentSettled').map(([rule, postings]) => [
        rule,
        Object.fromEntries(Object.entries(postings as Record<string, number>).map(([name_, cents]) => [name_, 0 - cents])),
      ]),
    );
  });
  test('R21: a charge that was undone and the refund that undid it leave only the processor’s fee', () => {
    const sale = line({ result: 'MATCHED', undone: true, paymentId: PAYMENT, leg: 'combined', grossCents: 10_300, feeCents: 330, netCents: 9_970 });
    const refund = { ...sale, number: 4, type: 'refund' as const, grossCents: -10_300, feeCents: 0, netCents: -10_300 };
    const both = lines(sale, refund);
    expect(both).toEqual([
      ['R21', { [agency.transit]: 10_300, [agency.unsettled]: -10_300 }],
      ['R5', { [kept]: 330, [agency.transit]: -330 }],
      ['R21', { [agency.transit]: -10_300, [agency.unsettled]: 10_300 }],
    ]);
    const sum = (name_: string) => both.reduce((total, [, postings]) => total + ((postings as Record<string, number>)[name_] ?? 0), 0);
    expect([suspense, agency.unsettled, agency.transit, kept].map(sum)).toEqual([0, 0, -330, 330]);
    expect(lines({ ...sale, result: 'AMOUNT_MISMATCH', expectedCents: 10_400, feeCents: 0 })).toEqual([both[0]]);
    expect(lines({ ...sale, accepted: false }, { ...sale, type: 'fee', grossCents: 0, feeCents: 330, netCents: -330 })).toEqual([both[1]]);
    expect(lines({ ...sale, result: 'STATUS_MISMATCH', feeCents: 0 })).toEqual([['R15', { [agency.transit]: 10_300, [suspense]: -10_300 }]]);
  });
  test('a refund that fails later and is sent again: R15, R16, R4′; suspense and unsettled end as they were', () => {
    const of = { number: 0, paymentId: PAYMENT, leg: 'combined', feeCents: 0 } as const;
    const failure = line({ ...of, type: 'refund_failure', result: 'REFUND_FAILED', expectedCents: 0, grossCents: 4_000, netCents: 4_000 });
    const resolved = { resolution: 'refund', reason: 'r', by: 'me', merchantAccount: 'mid-agency', suspenseCents: 4_000, paymentId: PAYMENT, portalId: null, feeCents: 0 } as const; // prettier-ignore
    const again = line({ ...of, type: 'refund', result: 'MATCHED', grossCents: -4_000, netCents: -4_000 });
    expect([...lines(failure), ...shown(postException(RULES, { type: 'ExceptionResolved', at: AT, data: resolved })), ...lines(again)]).toEqual([
      ['R15', { [agency.transit]: 4_000, [suspense]: -4_000 }],
      ['R16', { [suspense]: 4_000, [agency.unsettled]: -4_000 }],
      ["R4'", { [agency.transit]: -4_000, [agency.unsettled]: 4_000 }],
    ]);
  });
  test('R6, R6′: funding reaches the operator’s bank, or the agency’s; a negative batch is mirrored', () => {
    const funded = (netCents: number, agencyPortalId?: string) =>
      shown(
        postSettlement(RULES, {
          type: 'BatchFunded',
          at: AT,
          data: { ...batch, fundedOn: '2026-03-03', netCents, ...(agencyPortalId && { agencyPortalId }) },
        }),
      );
    expect(funded(480)).toEqual([['R6', { 'assets:bank:operating': 480, [agency.transit]: -480 }]]);
    expect(funded(-480)).toEqual([['R6', { 'assets:bank:operating': -480, [agency.transit]: 480 }]]);
    expect(funded(480, PORTAL)).toEqual([["R6'", { [name.payable]: 480, [agency.transit]: -480 }]]);
    expect(funded(0)).toEqual([]);
  });
  test('R16: suspense is resolved into unsettled money, or adopted for an agency with its fee', () => {
    const opened = { exceptionId: 'e', kind: 'MISSING_HERE' as const, gateway: 'simulator', merchantAccount: 'mid-agency', batchId: 'b1', line: 3, transactionId: 't', ref: null, paymentId: null, leg: null, grossCents: 500, expectedCents: null, suspenseCents: 500 }; // prettier-ignore
    const resolve = (resolution: 'settles' | 'refund' | 'adopt' | 'no_posting', portalId: string | null, feeCents: number) =>
      settlementException
        .decide(
          { opened, status: 'opened', resolution: null, refund: null },
          { type: 'Resolve', at: AT, resolution, reason: 'r', by: 'me', portalId, feeCents },
        )
        .flatMap((event) => postException(RULES, event));
    expect(shown(resolve('refund', null, 0))).toEqual([['R16', { [suspense]: 500, [agency.unsettled]: -500 }]]);
    expect(shown(resolve('adopt', PORTAL, 20))).toEqual([['R16', { [suspense]: 500, [name.payable]: -480, [name.fee]: -20 }]]);
    expect(shown(resolve('settles', null, 0))).toEqual(shown(resolve('refund', null, 0)));
    expect(resolve('no_posting', null, 0)).toEqual([]);
    expect(postException(RULES, { type: 'ExceptionOpened', at: AT, data: opened })).toEqual([]);
    expect(() => resolve('adopt', null, 0)).toThrow('name its portal');
    const [adopted] = settlementException.decide(
      { opened, status: 'opened', resolution: null, refund: null },
      { type: 'Resolve', at: AT, resolution: 'adopt', reason: 'r', by: 'me', portalId: PORTAL, feeCents: 20 },
    );
    if (adopted?.type !== 'ExceptionResolved') throw new Error('not resolved');
    expect(postException(RULES, adopted)).toMatchObject([{ effectiveAt: AT, paymentId: null, part: null }]);
    expect(postException(RULES, { ...adopted, data: { ...adopted.data, paymentId: PAYMENT } })).toMatchObject([{ paymentId: PAYMENT }]);
    expect(() => postException(RULES, { ...adopted, data: { ...adopted.data, portalId: null } })).toThrow(/adopted for an agency/);
    expect(() => resolve('adopt', PORTAL, 501)).toThrow('part of the amount');
    // An earlier resolution took 500 cents out of suspense, and its line no longer exists. The new resolution books these cents in the opposite
    // direction.
    const back = settlementException
      .decide(
        { opened: { ...opened, kind: 'SUSPENSE_MISMATCH', suspenseCents: -500 }, status: 'opened', resolution: null, refund: null },
        { type: 'Resolve', at: AT, resolution: 'adopt', reason: 'r', by: 'me', portalId: PORTAL, feeCents: 20 },
      )
      .flatMap((event) => postException(RULES, event));
    expect(shown(back)).toEqual([['R16', { [suspense]: -500, [name.payable]: 480, [name.fee]: 20 }]]);
  });
  test('R17: an adjustment balances over accounts of the chart, or is refused', () => {
    const by = (postings: { account: string; cents: number }[]) =>
      adjust(AT, { adjustmentId: 'a', postings, effectiveAt: AT, reason: 'r', by: 'me' });
    expect(shown(postAdjustment(RULES, by([{ account: suspense, cents: 5 }, { account: 'equity:adjustment', cents: -5 }])))).toEqual([['R17', { [suspense]: 5, 'equity:adjustment': -5 }]]); // prettier-ignore
    expect(() => by([{ account: suspense, cents: 5 }, { account: 'equity:adjustment', cents: -4 }])).toThrow('must be equal'); // prettier-ignore
    expect(() => by([{ account: 'assets:cash', cents: 5 }, { account: 'equity:adjustment', cents: -5 }])).toThrow('no account'); // prettier-ignore
  });
  test('R20: a remittance pays the agency from the bank, and its reversal is the opposite entry', () => {
    const data = { remittanceId: '1', portalId: PORTAL, cents: 700, reference: 'W-1', on: '2026-03-02', advance: false, by: 'me' };
    const paid = postRemittance(RULES, { type: 'AgencyRemitted', at: AT, data });
    expect(shown(paid)).toEqual([['R20', { [name.payable]: 700, 'assets:bank:operating': -700 }]]);
    expect(paid[0]!.effectiveAt).toBe('2026-03-02T00:00:00.000Z');
    const back = { ...data, on: '2026-03-05', reason: 'came back' };
    const reversed = postRemittance(RULES, { type: 'AgencyRemittanceReversed', at: AT, data: back });
    expect(shown(reversed)).toEqual([['R20', { [name.payable]: -700, 'assets:bank:operating': 700 }]]);
    expect(reversed[0]!.effectiveAt).toBe('2026-03-05T00:00:00.000Z');
  });
});

describe('the effective time of an entry, and its owner', () => {
  const LATER = '2026-03-10T10:00:00.000Z';
  const charge = live({ principal: 10_000, fee: 300, mode: 'combined', ending: 'charged', steps: [] });
  const stamps = (entries: readonly Entry[]) => entries.map(({ rule, effectiveAt, paymentId, part }) => [rule, effectiveAt, paymentId, part]);
  const post = (books: Books, event: PaymentEvent) => stamps(postPayment(RULES, PAYMENT, books, event).entries);
  const leg = { leg: 'combined' as const, batchId: 'b1', closedAt: CLOSED };
  const money = { ...leg, grossCents: 10_300, feeCents: 7 };
  const back = { attemptId: 'a', leg: 'combined' as const, principalCents: 10_000, feeCents: 300, transactionId: 't' };
  const theirs = (rule: string, at: string) => [rule, at, PAYMENT, null];

  test('a charge, a void and a refund: when they were recorded', () => {
    expect(stamps(charge.entries)).toEqual([theirs('R1', AT), theirs('R2', AT)]);
    expect(post(charge.books, { type: 'PaymentVoided', at: LATER, data: back })).toEqual([theirs('R3', LATER)]);
    for (const type of ['PaymentRefunded', 'FeeRefunded'] as const)
      expect(post(charge.books, { type, at: LATER, data: back })).toEqual([theirs('R7', LATER), theirs('R8', LATER)]);
  });
  test('a settlement, its withdrawal and its rejection: when the batch was closed', () => {
    for (const type of ['PaymentSettled', 'SettlementWithdrawn'] as const)
      expect(post(charge.books, { type, at: LATER, data: money })).toEqual([theirs('R4', CLOSED), theirs('R5', CLOSED)]);
    expect(post(charge.books, { type: 'SettlementRejected', at: LATER, data: leg })).toEqual([theirs('R14', CLOSED)]);
  });
  test('a dispute takes effect on the day on which it was opened; its changes, when they were recorded', () => {
    const dispute: Dispute = { disputeId: 'd', status: 'debited', stage: 's', reasonCode: '1', personal: null, disputedAmountCents: 100, openedOn: '2026-03-05', dueDate: '2026-03-20' }; // prettier-ignore
    const opened = postPayment(RULES, PAYMENT, charge.books, { type: 'PaymentDisputed', at: LATER, data: dispute });
    expect(stamps(opened.entries)).toEqual([theirs('R9', '2026-03-05T00:00:00.000Z')]);
    expect(post(opened.books, { type: 'PaymentDisputed', at: LATER, data: { ...dispute, status: 'lost' } })).toEqual([theirs('R11', LATER)]);
  });
  const line: RecordedLine = { number: 3, transactionId: 't', ref: null, type: 'sale', accepted: true, grossCents: 500, feeCents: 20, netCents: 480, result: 'MISSING_HERE', paymentId: null, leg: null, expectedCents: null }; // prettier-ignore
  const batch = { gateway: 'simulator', merchantAccount: 'mid-agency', batchId: 'b1', closedAt: CLOSED };
  test('a line of a batch: when that was closed, as part of the batch, for the payment that it was found to belong to', () => {
    const recorded = (...lines: RecordedLine[]) =>
      stamps(postSettlement(RULES, { type: 'SettlementLinesRecorded', at: LATER, data: { ...batch, lines } }));
    expect(recorded(line, { ...line, number: 4, paymentId: PAYMENT, feeCents: 0 })).toEqual([
      ['R15', CLOSED, null, 3],
      ['R5', CLOSED, null, 3],
      ['R15', CLOSED, PAYMENT, 4],
    ]);
    const corrected = (before: RecordedLine | null, after: RecordedLine | null) =>
      stamps(postSettlement(RULES, { type: 'SettlementLinesCorrected', at: LATER, data: { ...batch, fundedOn: null, fileId: null, reference: null, corrections: [{ before, after }] } })); // prettier-ignore
    const plain = { ...line, feeCents: 0 };
    expect(corrected(null, plain)).toEqual([['R15', CLOSED, null, 3]]);
    expect(corrected(plain, null)).toEqual([['R15', CLOSED, null, 3]]);
    expect(corrected(plain, { ...plain, grossCents: 1, paymentId: PAYMENT })).toEqual([['R15', CLOSED, PAYMENT, 3]]);
    expect(corrected(plain, plain)).toEqual([]);
  });
  test('funding: its day; an adjustment: the time that it names', () => {
    expect(stamps(postSettlement(RULES, { type: 'BatchFunded', at: LATER, data: { ...batch, fundedOn: '2026-03-03', netCents: 1 } }))).toEqual([['R6', '2026-03-03T00:00:00.000Z', null, null]]); // prettier-ignore
    const postings = [{ account: 'equity:adjustment', cents: 5 }, { account: 'assets:bank:operating', cents: -5 }]; // prettier-ignore
    expect(stamps(postAdjustment(RULES, adjust(AT, { adjustmentId: 'a', postings, effectiveAt: CLOSED, reason: 'r', by: 'me' })))).toEqual([['R17', CLOSED, null, null]]); // prettier-ignore
  });
});

describe('facts that post nothing', () => {
  const begun = live({ principal: 10_000, fee: 300, mode: 'combined', ending: 'declined', steps: [] });
  const pending = postPayment(RULES, PAYMENT, null, begun.events[0]!).books;
  test.each(['voided', 'failed'] as const)('a decision that an unknown charge was %s', (as) => {
    const event = { type: 'PaymentResolved' as const, at: AT, data: { as, charge: null, evidence: 'e', by: 'me', forced: false } };
    expect(postPayment(RULES, PAYMENT, pending, event)).toEqual({ books: pending, entries: [] });
  });
  test('a charge that was undone before it counted', () => {
    const data = { attemptId: 'a', leg: 'combined' as const, principalCents: 10_000, feeCents: 300, transactionId: 't' };
    expect(postPayment(RULES, PAYMENT, pending, { type: 'PaymentVoided', at: AT, data })).toEqual({ books: pending, entries: [] });
  });
  test('a fence of a payment that never began (C64)', () =>
    expect(postPayment(RULES, PAYMENT, null, { type: 'PaymentAbandoned', at: AT, data: { attemptId: 'a', accountId: 'b', reason: 'r' } })).toEqual({
      books: null,
      entries: [],
    }));
  test('the closing of a period', () =>
    expect(postAdjustment(RULES, { type: 'PeriodClosed', at: AT, data: { from: null, to: AT, by: 'me' } })).toEqual([]));
  test('the end of a batch, and its listing', () => {
    const data = { gateway: 'simulator', merchantAccount: 'mid-agency', batchId: 'b1', closedAt: CLOSED, fundedOn: null, lineCount: 1, grossCents: 5, feeCents: 0, netCents: 5 }; // prettier-ignore
    const events: SettlementEvent[] = [
      { type: 'SettlementBatchRecorded', at: AT, data: { ...data, listed: true } },
      { type: 'SettlementBatchListed', at: AT, data: { ...data, differing: 0 } },
    ];
    expect(events.flatMap((event) => postSettlement(RULES, event))).toEqual([]);
  });
});

describe('an impossible fact is refused, and the projection stops', () => {
  const charge = (mode: 'separate' | 'combined') => live({ principal: 10_000, fee: 300, mode, ending: 'charged', steps: [] });
  const back = { attemptId: 'a', leg: 'combined' as Leg, principalCents: 10_000, feeCents: 300, transactionId: 't' };
  const settlement = { leg: 'combined' as Leg, batchId: 'b1', closedAt: CLOSED, grossCents: 1, feeCents: 0 };
  const of = (leg: Leg): PaymentEvent[] => [
    { type: 'PaymentRefunded', at: AT, data: { ...back, leg } },
    { type: 'FeeRefunded', at: AT, data: { ...back, leg } },
    { type: 'PaymentSettled', at: AT, data: { ...settlement, leg } },
    { type: 'SettlementWithdrawn', at: AT, data: { ...settlement, leg } },
    { type: 'SettlementRejected', at: AT, data: { ...settlement, leg } },
  ];
  test('money that moves on a payment that did not begin, was not charged, or has no such leg', () => {
    const { events } = charge('combined');
    const pending = postPayment(RULES, PAYMENT, null, events[0]!).books;
    for (const event of [events[1]!, { type: 'PaymentVoided' as const, at: AT, data: back }, ...of('combined')])
      expect(() => postPayment(RULES, PAYMENT, null, event)).toThrow(/did not begin/);
    for (const event of of('combined')) expect(() => postPayment(RULES, PAYMENT, pending, event)).toThrow(/was not charged/);
    for (const event of [...of('fee'), { type: 'PaymentVoided' as const, at: AT, data: { ...back, leg: 'fee' as const } }])
      expect(() => postPayment(RULES, PAYMENT, charge('combined').books, event)).toThrow(/was not charged/);
  });
  test('a second charge', () => {
    const { books, events } = charge('combined');
    expect(() => postPayment(RULES, PAYMENT, books, events[1]!)).toThrow(/charged twice/);
  });
  test('more voided than was charged, of the principal or of the fee, at once or bit by bit', () => {
    const { books } = charge('combined');
    const voids = (...parts: [number, number][]) =>
      parts.reduce((left: Books, [principalCents, feeCents]) => postPayment(RULES, PAYMENT, left, { type: 'PaymentVoided', at: AT, data: { ...back, principalCents, feeCents } }).books, books); // prettier-ignore
    expect(voids([10_000, 300])!.legs[0]).toMatchObject({ voidedPrincipalCents: 10_000, voidedFeeCents: 300 });
    expect(voids([4_000, 0], [6_000, 300])!.legs[0]).toMatchObject({ voidedPrincipalCents: 10_000, voidedFeeCents: 300 });
    for (const parts of [
      [[10_001, 0]],
      [[0, 301]],
      [
        [4_000, 0],
        [6_001, 0],
      ],
      [
        [0, 200],
        [0, 101],
      ],
    ] as [number, number][][])
      // prettier-ignore
      expect(() => voids(...parts)).toThrow(/more voided/);
  });
  test('an entry that does not balance, of one posting, of nothing, or of parts of a cent', () => {
    const of = (...cents: number[]): Entry => ({ rule: 'R17', part: null, paymentId: null, effectiveAt: AT, postings: cents.map((one, at) => ({ account: `a${at}`, cents: one })) }); // prettier-ignore
    for (const right of [of(5, -5), of(5, 5, -10)]) expect(() => refuseUnbalanced(right)).not.toThrow();
    for (const wrong of [
      of(),
      of(0),
      of(5),
      of(5, -4),
      of(5, -5, 0),
      of(0, 0),
      of(0.5, -0.5),
      of(2 ** 53, -(2 ** 53)),
      of(2 ** 53 - 1, 1, -(2 ** 53)),
    ])
      // prettier-ignore
      expect(() => refuseUnbalanced(wrong)).toThrow(/does not balance/);
  });
});

describe('the chart of accounts', () => {
  test('a name from outside can neither separate segments nor end an account, and stays one account', () => {
    for (const [text, named] of [
      ['mid-agency', 'mid-agency'],
      ['A.b_c@d+1-2', 'A.b_c@d+1-2'],
      ['a:b', 'a%3ab'],
      ['a  b', 'a%20%20b'],
      ['50%', '50%25'],
      ['é\n', '%e9%0a'],
      ['€', '%20ac'],
    ] as const) {
      expect(account.unsettled(text)).toBe(`assets:processor:${named}:unsettled`);
      expect(isAccount(account.unsettled(text))).toBe(true);
    }
  });
  test('every account of it is one, of a type that its name begins with', () => {
    const types = Object.values(account).map((name) => name('x')); // prettier-ignore
    for (const name of types) expect(isAccount(name)).toBe(true);
    expect(new Set(types.map(typeOf))).toEqual(new Set(['assets', 'liabilities', 'revenue', 'expense', 'equity']));
    expect(typeOf('liabilities:agency:x:payable')).toBe('liabilities');
  });
  test.each(['', 'assets', 'assets:cash', 'assets:bank:', 'assets:bank:a b', 'xassets:bank:a', 'assets:bank:a:b', 'equity:adjustment:x', ' equity:adjustment', 'assets:bank:%g1'])('%j is no account', (text) => expect(isAccount(text)).toBe(false)); // prettier-ignore
});

describe('versions of a rule', () => {
  /** The second version of R5 books the processor's fee against the service fees. */
  const table: PostingRules = {
    ...POSTING_RULES,
    R5: [...POSTING_RULES.R5, ({ mid, cents }) => ({ debits: [{ account: account.serviceFeeRefunded(PORTAL), cents }], credits: [{ account: account.inTransit(mid), cents }] })], // prettier-ignore
  };
  const first = firstRules(table);
  const second = rulesAfter(first, { rule: 'R5', version: 2 }, table);
  const settled = { type: 'PaymentSettled', at: AT, data: { leg: 'combined', batchId: 'b1', closedAt: CLOSED, grossCents: 10_300, feeCents: 7 } } as const; // prettier-ignore
  const { books } = live({ principal: 10_000, fee: 300, mode: 'combined', ending: 'charged', steps: [] });
  const postingsUnder = (rules: typeof first) => postPayment(rules, PAYMENT, books, settled).entries.map(({ rule, postings }) => [rule, postings]);
  const [gross] = postingsUnder(RULES);

  test('the first one posts until it changes, then the one that is in force; other rules stay as they are', () => {
    expect(Object.values(RULES).every(({ version }) => version === 1)).toBe(true);
    expect(postingsUnder(first)).toEqual(postingsUnder(RULES));
    expect(second).toEqual({ ...first, R5: { version: 2, post: table.R5[1] } });
    expect(postingsUnder(second)).toEqual([
      gross,
      [
        'R5',
        [
          { account: account.serviceFeeRefunded(PORTAL), cents: 7 },
          { account: account.inTransit('mid-agency'), cents: -7 },
        ],
      ],
    ]);
    expect(first.R5.version).toBe(1);
  });
  test.each([
    ['R99', 1, 'posting rule R99 is unknown to this program'],
    ['toString', 1, 'posting rule toString is unknown to this program'],
    ['R5', 3, 'posting rule R5 counts in version 3, this program knows versions up to 2'],
    ['R5', 0, 'posting rule R5 counts in version 0, this program knows versions up to 2'],
    ['R1', 2, 'posting rule R1 counts in version 2, this program knows versions up to 1'],
  ])('%s, version %i: a version that this release does not have is refused', (rule, version, message) =>
    expect(() => rulesAfter(first, { rule, version }, table)).toThrow(message),
  );
  test('a release of today has no version but the first, so none changed', () => {
    expect(() => rulesAfter(RULES, { rule: 'R5', version: 2 })).toThrow('knows versions up to 1');
    expect(postAdjustment(RULES, { type: 'PostingRuleChanged', at: AT, data: { rule: 'R5', version: 2 } })).toEqual([]);
  });
  test('each rule changes to the newest version once, and never back', () => {
    const change = { at: AT, newest: { R1: 1, R5: 3, R7: 2 } };
    const events = postingRuleVersions.decide(postingRuleVersions.initial, change);
    expect(events).toEqual([
      { type: 'PostingRuleChanged', at: AT, data: { rule: 'R5', version: 3 } },
      { type: 'PostingRuleChanged', at: AT, data: { rule: 'R7', version: 2 } },
    ]);
    const state = fold(postingRuleVersions, events);
    expect(state).toEqual({ R5: 3, R7: 2 });
    expect(postingRuleVersions.decide(state, change)).toEqual([]);
    expect(postingRuleVersions.decide(state, { at: AT, newest: { R1: 1, R5: 1, R7: 1 } })).toEqual([]);
    for (const version of [1, 2, 3]) expect(() => fold(postingRuleVersions, [...events, { ...events[0]!, data: { rule: 'R5', version } }])).toThrow('goes back'); // prettier-ignore
    expect(() => fold(postingRuleVersions, [{ ...events[0]!, data: { rule: 'R1', version: 1 } }])).toThrow('goes back');
  });
});

describe('periods', () => {
  test('are closed in order, when they are over, and once', () => {
    const close = (to: string) => ({ type: 'ClosePeriod' as const, at: AT, to, by: 'me' });
    const [closed] = periods.decide(periods.initial, close('2026-02-01T00:00:00.000Z'));
    const state = fold(periods, [closed!]);
    expect(periods.decide(state, close('2026-02-01T00:00:00.000Z'))).toEqual([]);
    expect(() => periods.decide(state, close('2026-01-01T00:00:00.000Z'))).toThrow('closed to');
    expect(() => periods.decide(state, close('2026-04-01T00:00:00.000Z'))).toThrow('over');
  });
  test('a late fact is booked at the first open instant, and keeps its effective time', () => {
    expect(bookedAt('2026-01-31T23:00:00.000Z', '2026-02-01T00:00:00.000Z')).toBe('2026-02-01T00:00:00.000Z');
    expect(bookedAt('2026-02-03T00:00:00.000Z', '2026-02-01T00:00:00.000Z')).toBe('2026-02-03T00:00:00.000Z');
    expect(bookedAt('2026-01-31T23:00:00.000Z', null)).toBe('2026-01-31T23:00:00.000Z');
  });
});

describe('the standalone verifier (apps/operator/verify.mjs), which shares no code with these rules,', () => {
  interface Verifier {
    readonly EVENTS: Readonly<Record<string, number>>;
    readonly RULES: Readonly<Record<string, readonly [string, ...unknown[]]>>;
    readonly createBooks: () => { readonly post: (event: object) => readonly object[] };
  }
  const verifier = import(new URL('../../apps/operator/verify.mjs', import.meta.url).href) as Promise<Verifier>;
  const STREAMS = ['payment-01890000-0000-7000-8000-000000000002', 'payment-01890000-0000-7000-8000-000000000003'] as const;
  const TO = '2026-03-03T00:00:00.000Z';

  /** The lines of journal.ndjson for these facts, by the verifier and by the service. */
  const bothPost = async (facts: readonly { stream: string; type: string; data: object }[]) => {
    const books = (await verifier).createBooks();
    const known = new Map<string, { revision: number; books: Books }>();
    let closedTo: string | null = null;
    const lines: { verifier: string[]; service: string[] } = { verifier: [], service: [] };
    for (const [index, { stream, type, data }] of facts.entries()) {
      const before = known.get(stream) ?? { revision: -1, books: null };
      const revision = before.revision + 1;
      const at = new Date(Date.parse(AT) + index).toISOString();
      const common = {
        position: String(index + 1).padStart(20, '0'),
        stream,
        type,
        id: `01890000-0000-7000-8000-1${String(index).padStart(11, '0')}`,
      };
      const meta = { recordedAt: at, actor: { type: 'system', id: 'spec' }, correlationId: 'spec' } as const;
      const event = { ...common, revision: BigInt(revision), v: 1, data: data as Json, meta } as unknown as Recorded;
      const posted = journalise(event, before.books, { closedTo, rules: RULES });
      known.set(stream, { revision, books: posted.books });
      lines.service.push(...posted.entries.map((entry) => JSON.stringify(written(entry))));
      lines.verifier.push(...books.post({ ...common, revision, version: 1, data, metadata: meta }).map((entry) => JSON.stringify(entry)));
      if (type === 'PeriodClosed') closedTo = (data as { to: string }).to;
    }
    return lines;
  };
  const written = ({ position, entryId, eventId, rule, part, paymentId, recordedAt, effectiveAt, bookedAt: booked, postings }: JournalEntry) =>
    ({ position, entryId, eventId, rule, part, description: RULE_WORDS[rule], paymentId, recordedAt, effectiveAt, bookedAt: booked, postings }); // prettier-ignore

  const LINE = fc
    .record({
      number: fc.nat(500),
      type: fc.constantFrom('sale' as const, 'refund' as const, 'refund_failure' as const, 'chargeback' as const, 'chargeback_reversal' as const, 'fee' as const, 'adjustment' as const), // prettier-ignore
      accepted: fc.boolean(),
      grossCents: fc.integer({ min: -5_000, max: 5_000 }),
      feeCents: fc.integer({ min: -50, max: 50 }),
      result: fc.constantFrom('MATCHED' as const, 'AMOUNT_MISMATCH' as const, 'MISSING_HERE' as const, 'STATUS_MISMATCH' as const),
      paymentId: fc.constantFrom(null, PAYMENT),
      expectedCents: fc.option(fc.integer({ min: -5_000, max: 5_000 })),
      isUndone: fc.boolean(),
    })
    .map(({ isUndone, ...one }): RecordedLine => ({
      transactionId: 't',
      ref: null,
      leg: null,
      netCents: one.grossCents - one.feeCents,
      ...one,
      ...(isUndone && { undone: true }),
    }));
  const BATCH = { gateway: 'simulator', merchantAccount: 'mid agency: 1', batchId: 'b1', closedAt: CLOSED };
  const SETTLED = 'settlement-simulator-mid-b1';
  const OTHER = fc.oneof(
    fc.array(LINE, { maxLength: 4 }).map((lines) => ({ stream: SETTLED, type: 'SettlementLinesRecorded', data: { ...BATCH, lines } })),
    fc
      .array(fc.record({ before: fc.option(LINE), after: LINE }), { maxLength: 3 })
      .chain((pairs) =>
        fc
          .boolean()
          .map((removed) =>
            pairs.map(({ before, after }) =>
              removed && before ? { before, after: null } : { before, after: { ...after, number: before?.number ?? after.number } },
            ),
          ),
      ) // prettier-ignore
      .map((corrections) => ({
        stream: SETTLED,
        type: 'SettlementLinesCorrected',
        data: { ...BATCH, fundedOn: null, fileId: null, reference: null, corrections },
      })),
    fc.record({ netCents: fc.integer({ min: -900, max: 900 }), agency: fc.boolean() }).map(({ netCents, agency }) => ({ stream: SETTLED, type: 'BatchFunded', data: { ...BATCH, fundedOn: '2026-03-02', netCents, ...(agency && { agencyPortalId: PORTAL }) } })), // prettier-ignore
    fc.record({ resolution: fc.constantFrom('settles', 'refund', 'adopt', 'no_posting'), suspenseCents: fc.integer({ min: -900, max: 900 }), feeCents: fc.integer({ min: -9, max: 9 }), paymentId: fc.constantFrom(null, PAYMENT) }).map((one) => ({ stream: 'exception-1', type: 'ExceptionResolved', data: { ...one, reason: 'r', by: 'me', merchantAccount: 'mid', portalId: one.resolution === 'adopt' ? PORTAL : null } })), // prettier-ignore
    fc.integer({ min: 1, max: 900 }).map((cents) => ({ stream: 'adjustment-1', type: 'ManualAdjustment', data: { postings: [{ account: 'equity:adjustment', cents }, { account: 'assets:bank:operating', cents: -cents }], effectiveAt: '2026-02-01T01:00:00+01:00', reason: 'r', by: 'me', adjustmentId: '1' } })), // prettier-ignore
    fc.record({ cents: fc.integer({ min: 1, max: 900 }), type: fc.constantFrom('AgencyRemitted', 'AgencyRemittanceReversed') }).map(({ cents, type }) => ({ stream: `remittance-${PORTAL}`, type, data: { remittanceId: '1', portalId: PORTAL, cents, on: '2026-02-01', by: 'me' } })), // prettier-ignore
  );

  test('makes the same lines of the journal from random lives of payments, settlement lines, corrections and decisions, around a closed period', async () => {
    await fc.assert(
      fc.asyncProperty(CASE, CASE, fc.array(OTHER, { maxLength: 6 }), fc.nat(30), async (one, other, others, at) => {
        const lives = [one, other].flatMap((of, index) => live(of).events.map(({ type, data }) => ({ stream: STREAMS[index]!, type, data })));
        const facts = [...lives, ...others];
        facts.splice(at, 0, { stream: 'adjustment-periods', type: 'PeriodClosed', data: { from: null, to: TO, by: 'me' } } as never);
        const lines = await bothPost(facts);
        expect(lines.verifier).toEqual(lines.service);
      }),
      { numRuns: 300 },
    );
  });
  test('knows every event, version and rule, and refuses any other', async () => {
    const { EVENTS, RULES: rules, createBooks } = await verifier;
    const versionsOf = <Event extends DomainEvent>({ names, version }: EventTypes<Event>) =>
      names.map((name: Event['type']) => [name, version(name)]);
    const known = [
      ...versionsOf(paymentEvents),
      ...versionsOf(settlementEvents),
      ...versionsOf(settlementFileEvents),
      ...versionsOf(exceptionEvents),
      ...versionsOf(periodEvents),
      ...versionsOf(postingRuleEvents),
      ...versionsOf(manualAdjustmentEvents),
      ...versionsOf(remittanceEvents),
    ];
    expect(EVENTS).toEqual(Object.fromEntries(known));
    expect(Object.entries(rules).map(([rule, [words, ...versions]]) => [rule, words, versions.length])).toEqual(
      Object.entries(POSTING_RULES).map(([rule, versions]) => [rule, RULE_WORDS[rule as keyof typeof RULE_WORDS], versions.length]),
    );
    const event = { position: '1', stream: STREAMS[0], type: 'PaymentCreated', revision: 0, version: 1, id: PAYMENT, data: {}, metadata: { recordedAt: AT } }; // prettier-ignore
    for (const [changed, message] of [
      [{ type: 'PaymentForgotten' }, 'PaymentForgotten at position 1: this verifier does not know it'],
      [{ version: 9 }, 'PaymentCreated at position 1: this verifier does not know it'],
      [{ revision: 2 }, 'revision 2 of payment-01890000-0000-7000-8000-000000000002 does not follow; 0 is missing'],
      [{}, 'or one that did not begin'],
      [{ stream: 'adjustment-rules', type: 'PostingRuleChanged', data: { rule: 'R4', version: 2 } }, 'does not know version 2 of R4'],
    ] as const)
      expect(() => createBooks().post({ ...event, ...changed })).toThrow(message);
  });
});
