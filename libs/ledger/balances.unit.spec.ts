/**
 * Random histories of refunds, voids and disputes, through the decider and all folds of the books (docs/contract.md C30). After each entry, the agency's
 * balance of a payment is never below 0 and never above its principal. Journal, line items and the standalone verifier say the same, and what
 * GET shows adds up.
 *
 * HISTORIES=50000 runs more of them.
 */
import { describe, expect, test } from '@jest/globals';
import fc from 'fast-check';
import type { Recorded } from '#eventstore';
import { CLOSED, ServiceError } from '#kernel';
import {
  cents,
  type Charged,
  DISPUTE_STATUSES,
  isVisible,
  LEGS,
  openAttempt,
  type Payment,
  payment as decider,
  type PaymentCommand,
  type PaymentEvent,
  paymentView,
  remaining,
  standing,
  unreturned,
} from '#payments';
import { AT, created, dispute, initiated, PAYMENT, requestRefund, requestVoid, separate, withLines } from '../../test/support/given.js';
import { journalise } from './journal.js';
import { movePayment, type PaymentLines } from './line-movements.js';
import { postingsOf } from './line-postings.js';
import { type Books, firstRules } from './postings.js';

const HISTORIES = Number(process.env.HISTORIES ?? 2_000);
/** Time for one history, in ms. A busy machine needs a hundredth of it. */
const HISTORY_MS = 30;

const RULES = firstRules();
// verify.mjs has no types.
interface Verifier {
  readonly createBooks: () => { readonly post: (event: object) => readonly { rule: string; effectiveAt: string; postings: object }[] };
}
const { createBooks } = (await import(new URL('../../apps/operator/verify.mjs', import.meta.url).href)) as Verifier;

// ------------------------------------------------------------------------------------------------------------------------------------
// Steps. A new kind of step is one more line of the table.

/** A step does nothing if the payment refuses it. `pick`: any number, for whatever the step must choose. */
type Step = readonly [kind: keyof typeof STEPS, pick: number, share: number];
interface World {
  readonly payment: Charged;
  readonly ask: (command: PaymentCommand) => boolean;
  readonly id: () => string;
}

const amount = (cents: number, share: number): number => Math.max(1, Math.round(cents * share));

/** Goes on with the open attempt: returns its next leg, or ends it. */
const goOn = ({ payment, ask, id }: World, isReturned: boolean): void => {
  const attempt = openAttempt(payment);
  if (!attempt) return;
  const { attemptId } = attempt;
  const next = attempt.legs[attempt.returned.length];
  if (next && isReturned) ask({ type: 'RecordLegReturned', at: AT, attemptId, leg: next.leg, means: next.means, transactionId: id() });
  else ask({ type: 'EndReversal', at: AT, attemptId, unfinished: 'rejected' });
};

const STEPS = {
  refund: ({ payment, ask, id }: World, pick: number, share: number) => {
    const amountCents = pick % 3 === 0 ? null : amount(remaining(payment).principal, share);
    const capabilities = () => ({ partialVoid: pick % 2 === 0, refundUnsettled: true });
    ask(requestRefund(id(), { amountCents, includeFee: pick % 4 < 2, initiatedBy: pick % 5 === 0 ? 'staff' : 'partner', capabilities }));
  },
  void: ({ ask, id }: World) => void ask(requestVoid(id())),
  return: (world: World) => goOn(world, true),
  end: (world: World) => goOn(world, false),
  // Made at the processor's own page, then adopted. It is a fact, so a dispute that takes the same cents does not refuse it.
  elsewhere: ({ payment, ask, id }: World, pick: number, share: number) => {
    const leg = payment.legs[pick % payment.legs.length]!;
    const note = { returnId: id(), leg: leg.leg, transactionId: id() };
    if (!ask({ type: 'NoteReturn', at: AT, ...note })) return;
    const means = pick % 2 === 0 && leg.settledBatchId === null && !leg.refunded ? 'void' : 'refund';
    const amountCents = amount(cents(unreturned(leg)), means === 'void' ? 1 : share);
    const references = (name: string) => ({ void: `${name}-void`, refund: `${name}-refund` });
    if (!ask({ type: 'AdoptReturn', at: AT, ...note, means, returns: [{ ...note, amountCents }], personal: null, references }))
      throw new Error(`a ${means} of ${amountCents} was refused`);
  },
  settle: ({ payment, ask }: World, pick: number) => {
    const { leg } = payment.legs[pick % payment.legs.length]!;
    ask({ type: 'RecordSettlement', at: AT, leg, batchId: 'b', closedAt: AT, accepted: true, grossCents: 1, feeCents: 0 });
  },
  open: ({ payment, ask, id }: World, pick: number, share: number) => {
    const leg = pick % 3 === 0 ? LEGS[pick % LEGS.length]! : undefined;
    const captured = payment.legs
      .filter((one) => leg === undefined || one.leg === leg)
      .reduce((sum, one) => sum + one.principalCents + one.feeCents, 0);
    const terms = dispute({ disputeId: id(), disputedAmountCents: amount(captured, share), status: DISPUTE_STATUSES[pick % 4]! });
    ask({ type: 'OpenDispute', at: AT, dispute: leg === undefined ? terms : { ...terms, leg } });
  },
  // Any status follows any other: lost, recovered, open again.
  move: ({ payment: { disputes }, ask }: World, pick: number) => {
    const one = disputes[pick % disputes.length];
    if (one) ask({ type: 'UpdateDispute', at: AT, disputeId: one.disputeId, status: DISPUTE_STATUSES[(pick >> 3) % 4]!, stage: null });
  },
  correct: ({ payment: { disputes }, ask }: World, pick: number, share: number) => {
    const one = disputes[pick % disputes.length];
    if (!one) return;
    const amountCents = amount(one.disputedAmountCents, share * 2);
    const status = pick % 2 === 0 ? null : DISPUTE_STATUSES[(pick >> 3) % 4]!;
    ask({ type: 'UpdateDispute', at: AT, disputeId: one.disputeId, status, stage: null, amountCents });
  },
};

const weighted = (weight: number, kind: keyof typeof STEPS) => ({ weight, arbitrary: fc.constant(kind) });
const KIND = fc.oneof(weighted(5, 'refund'), weighted(1, 'void'), weighted(1, 'elsewhere'), weighted(6, 'return'), weighted(4, 'end'), weighted(2, 'settle'), weighted(3, 'open'), weighted(4, 'move'), weighted(1, 'correct')); // prettier-ignore
const HISTORY = fc.record({
  lines: fc.array(fc.integer({ min: 1, max: 20_000 }), { minLength: 1, maxLength: 2 }),
  fee: fc.oneof(fc.constant(0), fc.integer({ min: 1, max: 900 })),
  mode: fc.constantFrom('separate' as const, 'combined' as const),
  steps: fc.array(fc.tuple(KIND, fc.nat(1_000), fc.oneof(fc.double({ min: 0, max: 1, noNaN: true }), fc.constant(1))), {
    minLength: 1,
    maxLength: 14,
  }),
});
type History = typeof HISTORY extends fc.Arbitrary<infer T> ? T : never;

const termsOf = ({ lines, fee, mode }: History) => {
  const plain = withLines(lines, mode);
  return {
    ...plain,
    serviceFeeCents: fee,
    lineItems: plain.lineItems.map((line, index) => ({ ...line, serviceFeeCents: index === 0 ? fee : 0 })),
    legs:
      mode === 'combined'
        ? plain.legs.map((leg) => ({ ...leg, feeCents: fee }))
        : [...plain.legs, ...(fee > 0 ? separate.legs.filter(({ leg }) => leg === 'fee').map((leg) => ({ ...leg, feeCents: fee })) : [])],
  };
};

// ------------------------------------------------------------------------------------------------------------------------------------
// What must hold.

/** Runs a history. Returns the first thing that is wrong. `written`: what a planted fault writes instead of an event. null: nothing. */
const wrongIn = (history: History, seen = new Set<string>(), written = (event: PaymentEvent): PaymentEvent | null => event): string | null => {
  const terms = termsOf(history);
  let payment: Payment = decider.initial;
  let books: Books = null;
  let lines: PaymentLines | null = null;
  let wrong = null as string | null;
  let number = 0;
  const sums = new Map<string, number>();
  const verifier = createBooks();
  const balance = (prefix: string) => [...sums].reduce((sum, [name, cents]) => (name.startsWith(prefix) ? sum + cents : sum), 0);
  const must = (holds: boolean, what: () => string) => {
    if (!holds) wrong ??= what();
  };

  const add = (decided: PaymentEvent) => {
    const event = written(decided);
    if (event === null) return;
    const { type, data } = event;
    if (event.type === 'ReturnedElsewhere') seen.add(event.data.status);
    payment = decider.evolve(payment, event);
    const common = { position: String(++number).padStart(20, '0'), stream: `payment-${PAYMENT}`, type, id: PAYMENT };
    const meta = { recordedAt: AT, actor: { type: 'system', id: 'spec' }, correlationId: 'spec' };
    const recorded = { ...common, revision: BigInt(number - 1), v: VERSIONS[type] ?? 1, data, meta } as unknown as Recorded;
    const posted = journalise(recorded, books, { closedTo: null, rules: RULES });
    books = posted.books;

    // Journal: after each entry, agency and operator have at least nothing and at most what was charged for them.
    const untied = new Map<string, number>();
    for (const { rule, effectiveAt, postings } of posted.entries) {
      seen.add(rule);
      for (const { account, cents } of postings) {
        sums.set(account, (sums.get(account) ?? 0) + cents);
        const name = `${account} ${rule} ${effectiveAt}`;
        untied.set(name, (untied.get(name) ?? 0) + cents);
      }
      const agency = 0 - balance('liabilities:agency:');
      must(agency >= 0 && agency <= terms.amountCents, () => `after ${rule} of ${type}, the agency has ${agency} of ${terms.amountCents}`);
      const fee = 0 - balance('revenue:') - balance('expense:chargeback_loss:');
      must(fee >= 0 && fee <= terms.serviceFeeCents, () => `after ${rule} of ${type}, the operator has a fee of ${fee} of ${terms.serviceFeeCents}`);
    }

    // The line items and the verifier say the same.
    const moved = movePayment(PAYMENT, lines, event, 'system');
    lines = moved.payment;
    for (const movement of moved.movements)
      for (const { account, rule, cents } of postingsOf(movement)) {
        const name = `${account} ${rule} ${movement.effectiveAt}`;
        untied.set(name, (untied.get(name) ?? 0) - cents);
      }
    for (const [name, cents] of untied) must(cents === 0, () => `${type}: journal and lines differ by ${cents} in ${name}`);
    const shown = ({ rule, effectiveAt, postings }: { rule: string; effectiveAt: string; postings: object }) => [rule, effectiveAt, postings];
    const made = verifier.post({ ...common, revision: number - 1, version: VERSIONS[type] ?? 1, data, metadata: meta });
    must(JSON.stringify(made.map(shown)) === JSON.stringify(posted.entries.map(shown)), () => `${type}: the verifier posts ${JSON.stringify(made)}`);

    if (payment.phase !== 'charged' || !isVisible(payment)) return;
    // What disputes take is what is disputed, and it lies where the books say.
    const taken = standing(payment.disputes);
    const sum = (of: readonly (typeof taken)[number][]) => of.reduce((total, one) => total + one.principalCents + one.feeCents, 0);
    const excess = taken.reduce((total, one) => total + (one.excessCents ?? 0), 0);
    if (excess > 0) seen.add('excess');
    const claimed = payment.disputes.reduce((total, one) => total + (one.status === 'recovered' ? 0 : one.disputedAmountCents), 0);
    must(excess + sum(taken) === claimed, () => `${claimed} are disputed, ${sum(taken)} and ${excess} are taken`);
    must(balance('assets:dispute_suspense:') === excess, () => `${excess} were taken in excess, suspense has ${balance('assets:dispute_suspense:')}`);
    const open = sum(standing(payment.disputes.filter(({ status }) => status !== 'lost')));
    must(balance('assets:disputes:') === open, () => `${open} are in open disputes, the books have ${balance('assets:disputes:')}`);
    // GET.
    const view = paymentView(PAYMENT, payment, CLOSED);
    const { capturedAmountCents: captured, refundedAmountCents: back, remainingRefundableAmountCents: left } = view;
    must(captured === back + left && back >= 0 && left >= 0, () => `GET shows ${captured} captured, ${back} refunded, ${left} remaining`);
  };

  const world = (): World => ({
    payment: payment as Charged,
    id: () => `00000000-0000-7000-8000-${String(++ids).padStart(12, '0')}`,
    ask: (command) => {
      try {
        const events = decider.decide(payment, command);
        for (const event of events) add(event);
        return events.length > 0;
      } catch (error) {
        if (!(error instanceof ServiceError)) throw error;
        return false;
      }
    },
  });
  let ids = 0;
  add(initiated(terms));
  add(created(terms));
  for (const [kind, pick, share] of history.steps as readonly Step[]) {
    STEPS[kind](world(), pick, share);
    seen.add(kind);
    if (wrong !== null) return `${kind}: ${wrong}`;
  }
  return null;
};

/** The newest version of each event, as it is written. */
const VERSIONS: Readonly<Record<string, number>> = {
  PaymentInitiated: 4,
  PaymentCreated: 2,
  VoidRequested: 3,
  RefundRequested: 3,
  PaymentVoided: 2,
  ReversalEnded: 2,
  PaymentDisputed: 3,
};

describe('over random histories', () => {
  test(
    'balances hold, journal, line items and verifier tie, and GET adds up',
    () => {
      const seen = new Set<string>();
      fc.assert(
        fc.property(HISTORY, (history) => expect(wrongIn(history, seen)).toBeNull()),
        { numRuns: HISTORIES, seed: 42 },
      );
      // Without these, the test would prove nothing about them.
      const needed = [...Object.keys(STEPS), 'adopted', 'excess', 'R3', 'R7', 'R8', 'R9', 'R11', 'R12', "R12'", "R12''", 'R22'];
      expect(needed.filter((one) => !seen.has(one))).toEqual([]);
    },
    60_000 + HISTORIES * HISTORY_MS,
  );

  /** True if a planted fault gives an agency a wrong balance in one of the histories. */
  const isFound = (fault: () => (event: PaymentEvent) => PaymentEvent | null): boolean => {
    const holds = (history: History) => !wrongIn(history, undefined, fault())?.includes('the agency has');
    return fc.check(fc.property(HISTORY, holds), { numRuns: 2_000, seed: 42, endOnFailure: true }).failed;
  };

  test('canary: disputes that are shared by the total are found', () => {
    const byTotal = (event: PaymentEvent): PaymentEvent => {
      if (event.type !== 'PaymentDisputed') return event;
      const { taken: _, ...data } = event.data;
      return { ...event, data };
    };
    expect(isFound(() => byTotal)).toBe(true);
  });

  test('canary: ignoring the overlap of a dispute and an adopted return is found', () => {
    const ignored = () => {
      const returnIds = new Set<string | undefined>();
      return (event: PaymentEvent) => {
        if (event.type === 'ReturnedElsewhere') returnIds.add(event.data.returnId);
        return event.type === 'PaymentDisputed' && returnIds.has(event.data.overtakenBy) ? null : event;
      };
    };
    expect(isFound(ignored)).toBe(true);
  });
});
