/**
 * The line-item register against the journal: over random histories both folds say the same of each account, rule and booked time, event by event.
 * Examples then show the rows of each movement.
 */
import { describe, expect, test } from '@jest/globals';
import fc from 'fast-check';
import type { Recorded } from '#eventstore';
import type { Json } from '#kernel';
import {
  type Dispute,
  DISPUTE_STATUSES,
  type Leg,
  type Payment,
  payment as decider,
  type PaymentCommand,
  type PaymentEvent,
  type PaymentTerms,
  remaining,
} from '#payments';
import { uuidV5 } from '#platform';
import type { RecordedLine, SettlementEvent } from '#settlement';
import { type JournalEntry, journalise } from './journal.js';
import { movePayment, moveSettlement, shareOut } from './line-movements.js';
import { type LineSums, postingsOf } from './line-postings.js';
import { type Added, addEvent, COLUMNS, nothingAdded, paymentsOf } from './line-rows.js';
import { type Books, firstRules } from './postings.js';

const RULES = firstRules();
const ACCOUNT = '01890000-0000-7000-8000-00000000000a';
const PORTAL = '01890000-0000-7000-8000-000000000001';
const OTHER_PORTAL = '01890000-0000-7000-8000-000000000009';
const PAYMENT = '01890000-0000-7000-8000-000000000002';
const AT = '2026-03-01T10:00:00.000Z';
const CLOSED = '2026-03-02T05:00:00.000Z';
const LINES = ['1', '2', '3'].map((digit) => `01890000-0000-7000-8000-0000000000d${digit}`);
/** Merchant accounts whose names need quoting in the names of accounts. */
const AGENCY_MID = 'mid agency: 1';
const FEES_MID = 'mid/feés';

type Fact = { readonly stream: string; readonly type: string; readonly data: object };

/** A row of the register, by column. */
type Row = Readonly<Record<(typeof COLUMNS)[number][0], string | null>>;
const rowOf = (values: readonly (string | null)[]): Row =>
  Object.fromEntries(COLUMNS.map(([name], index) => [name, values[index]])) as unknown as Row;

interface Posted {
  readonly rows: readonly Row[];
  readonly entries: readonly JournalEntry[];
}

/** Gives facts to both folds. Returns what each event adds. The state of the register goes through JSON between events, as in the database. */
const post = (facts: readonly Fact[], actor: 'partner' | 'system' = 'partner'): Posted[] => {
  const known = new Map<string, { revision: bigint; books: Books }>();
  let stored: Added = nothingAdded(null);
  let closedTo: string | null = null;
  return facts.map(({ stream, type, data }, index) => {
    const before = known.get(stream) ?? { revision: -1n, books: null };
    const revision = before.revision + 1n;
    const recordedAt = new Date(Date.parse(AT) + index).toISOString();
    const event = {
      position: String(index + 1).padStart(20, '0'),
      stream,
      type,
      id: `01890000-0000-7000-8000-1${String(index).padStart(11, '0')}`,
      revision,
      v: type === 'PaymentInitiated' ? 3 : /^(Void|Refund)Requested$|^PaymentDeclined$|^ReversalAcknowledged$/.test(type) ? 2 : 1,
      data: data as Json,
      meta: { recordedAt, actor: { type: actor, id: 'spec' }, correlationId: 'spec' },
    } as unknown as Recorded;
    const { books, entries } = journalise(event, before.books, { closedTo, rules: RULES });
    known.set(stream, { revision, books });
    if (type === 'PeriodClosed') closedTo = (data as { to: string }).to;
    const added = nothingAdded(stored.closedTo);
    for (const id of [paymentsOf(event)].flat()) {
      const state = stored.payments.get(id);
      if (state) added.payments.set(id, { revision: state.revision, payment: JSON.parse(JSON.stringify(state.payment)) as never });
    }
    addEvent(added, event);
    stored = { ...added, payments: new Map([...stored.payments, ...added.payments]) };
    return { rows: added.rows.map(rowOf), entries };
  });
};

const sumsOf = (row: Row): LineSums => ({
  movement: row.movement as LineSums['movement'],
  rule: row.rule as LineSums['rule'],
  merchantAccount: row.merchant_account,
  portalId: row.portal_id,
  ledgerAccount: row.ledger_account,
  principalCents: Number(row.principal_cents),
  feeCents: Number(row.fee_cents),
  processorFeeCents: Number(row.processor_fee_cents),
});

/** Cents by account, rule and booked time, as the rows have them, less what the entries have. Nothing is left if both agree. */
const untied = ({ rows, entries }: Posted): Record<string, number> => {
  const sums: Record<string, number> = {};
  const add = (name: string, cents: number) => (sums[name] = (sums[name] ?? 0) + cents);
  for (const row of rows) for (const { account, rule, cents } of postingsOf(sumsOf(row))) add(`${account} ${rule} ${row.booked_at}`, cents);
  for (const { rule, bookedAt, postings } of entries) for (const { account, cents } of postings) add(`${account} ${rule} ${bookedAt}`, -cents);
  return Object.fromEntries(Object.entries(sums).filter(([, cents]) => cents !== 0));
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Histories of a payment, made by the decider.

const termsOf = (amounts: readonly number[], fees: readonly number[], chargeMode: 'separate' | 'combined'): PaymentTerms => {
  const sum = (cents: readonly number[]) => cents.reduce((total, one) => total + one, 0);
  const [principal, fee] = [sum(amounts), sum(fees)];
  const leg = (name: Leg, principalCents: number, feeCents: number, merchantAccount: string) => ({
    leg: name,
    principalCents,
    feeCents,
    account: { gateway: 'simulator', merchantAccount, credentialsRef: 'sandbox', environment: 'sandbox' as const },
    references: { charge: `c-${name}`, reversal: `r-${name}` },
  });
  return {
    accountId: ACCOUNT,
    portalId: PORTAL,
    referenceId: 'CASE-1',
    amountCents: principal,
    serviceFeeCents: fee,
    feeVersion: 1,
    chargeMode,
    lineItems: amounts.map((amountCents, index) => ({
      id: LINES[index]!,
      amountCents,
      serviceFeeCents: fees[index]!,
      referenceId: `INV-${index + 1}`,
      coding: index === 0 ? { fund: '402' } : null,
    })),
    personal: null,
    paymentMethod: { type: 'card', brand: 'visa', last4: '4242' },
    legs:
      chargeMode === 'combined'
        ? [leg('combined', principal, fee, AGENCY_MID)]
        : [leg('principal', principal, 0, AGENCY_MID), ...(fee > 0 ? [leg('fee', 0, fee, FEES_MID)] : [])],
  };
};

type Step =
  | { readonly do: 'void'; readonly upTo: number }
  | { readonly do: 'refund'; readonly cents: number | null; readonly fee: boolean; readonly upTo: number; readonly staff: boolean }
  | { readonly do: 'settle'; readonly leg: number; readonly accepted: boolean; readonly more: number; readonly batch: string }
  | { readonly do: 'withdraw'; readonly leg: number; readonly batch: string }
  | {
      readonly do: 'dispute';
      readonly id: number;
      readonly status: Dispute['status'];
      readonly share: number;
      readonly leg: Leg | null;
    };
type Ending = 'charged' | 'resolved' | 'declined' | 'undone' | 'returned';

/** The events of a payment that goes through these steps. A refused command changes nothing. */
const eventsOf = (terms: PaymentTerms, ending: Ending, steps: readonly Step[]): PaymentEvent[] => {
  const events: PaymentEvent[] = [];
  let payment: Payment = decider.initial;
  const run = (command: PaymentCommand): boolean => {
    let decided: readonly PaymentEvent[];
    try {
      decided = decider.decide(payment, command);
    } catch (error) {
      if ((error as { code?: string }).code === undefined) throw error;
      return false;
    }
    for (const event of decided) {
      payment = decider.evolve(payment, event);
      events.push(event);
    }
    return decided.length > 0;
  };
  run({ type: 'Initiate', at: AT, attemptId: 'a0', idempotency: null, terms });
  const charge = {
    confirmationNumber: 'ABCD-EFGH-JK',
    legs: terms.legs.map(({ leg }) => ({ leg, transactionId: `ch-${leg}`, authCode: ending === 'resolved' ? '' : 'A1', avs: null, cvv: null })),
  };
  if (ending === 'charged') run({ type: 'RecordChargeOutcome', at: AT, attemptId: 'a0', outcome: { kind: 'charged', ...charge } });
  else if (ending === 'declined')
    run({
      type: 'RecordChargeOutcome',
      at: AT,
      attemptId: 'a0',
      outcome: { kind: 'declined', leg: terms.legs[0]!.leg, code: 'generic_decline', transactionId: null, raw: null, avs: null, cvv: null },
    });
  else {
    run({ type: 'StartReconciliation', at: AT, attemptId: 'a0' });
    if (ending === 'resolved') run({ type: 'Resolve', at: AT, as: 'succeeded', charge, evidence: 'seen', by: 'me', forced: false });
    else if (ending === 'returned') {
      run({ type: 'RequestReturn', at: AT, exceptionId: 'x1' });
      run({ type: 'Resolve', at: AT, as: 'voided', charge: null, evidence: 'sent back', by: 'me', forced: false });
    } else {
      const findings = terms.legs.map(({ leg }) => ({ leg, found: 'reversed' as const, transactionId: `ch-${leg}` }));
      run({ type: 'RecordChargeFindings', at: AT, attemptId: 'a0', findings });
    }
  }
  let attempts = 0;
  const references = (leg: Leg) => ({ void: `v-${leg}`, refund: `f-${leg}` });
  const legAt = (index: number) => (payment.phase === 'charged' ? payment.legs[index % payment.legs.length]! : null);
  for (const step of steps) {
    if (step.do === 'void' || step.do === 'refund') {
      const attemptId = `a${attempts + 1}`;
      const common = { at: AT, attemptId, idempotency: null, personal: null, references };
      const asked =
        step.do === 'void'
          ? run({ type: 'RequestVoid', initiatedBy: 'partner', ...common })
          : run({
              type: 'RequestRefund',
              ...common,
              initiatedBy: step.staff ? 'staff' : 'partner',
              amountCents:
                step.cents === null ? null : Math.max(1, Math.min(step.cents, payment.phase === 'charged' ? remaining(payment).principal : 0)),
              includeFee: step.fee,
              capabilities: () => ({ partialVoid: true, refundUnsettled: step.staff }),
            });
      if (!asked || payment.phase !== 'charged') continue;
      attempts += 1;
      for (const { leg, means } of payment.attempts.at(-1)!.legs.slice(0, step.upTo))
        run({ type: 'RecordLegReturned', at: AT, attemptId, leg, means, transactionId: `${attemptId}-${leg}` });
      run({ type: 'EndReversal', at: AT, attemptId, unfinished: 'rejected' });
    } else if (step.do === 'settle') {
      const leg = legAt(step.leg);
      if (!leg) continue;
      const grossCents = leg.principalCents + leg.feeCents - leg.principalReturnedCents - leg.feeReturnedCents + step.more;
      run({
        type: 'RecordSettlement',
        at: AT,
        leg: leg.leg,
        batchId: step.batch,
        closedAt: CLOSED,
        accepted: step.accepted,
        grossCents,
        feeCents: 7,
      });
    } else if (step.do === 'withdraw') {
      const leg = legAt(step.leg);
      if (leg) run({ type: 'WithdrawSettlement', at: AT, leg: leg.leg, batchId: step.batch });
    } else {
      const disputeId = `d${step.id}`;
      const isKnown = payment.phase === 'charged' && payment.disputes.some((one) => one.disputeId === disputeId);
      const total =
        step.leg === 'principal' ? terms.amountCents : step.leg === 'fee' ? terms.serviceFeeCents : terms.amountCents + terms.serviceFeeCents;
      const dispute: Dispute = {
        disputeId,
        status: step.status,
        stage: 'chargeback',
        reasonCode: '1',
        personal: null,
        disputedAmountCents: Math.max(1, Math.floor(total * step.share)),
        ...(step.leg !== null && { leg: step.leg }),
        openedOn: '2026-03-05',
        dueDate: '2026-03-20',
      };
      // Each update has a new stage, so an update to the same status is an event, too.
      if (isKnown) run({ type: 'UpdateDispute', at: AT, disputeId, status: step.status, stage: `stage ${events.length}` });
      else run({ type: 'OpenDispute', at: AT, dispute });
    }
  }
  return events;
};

const factsOf = (paymentId: string, events: readonly PaymentEvent[]): Fact[] =>
  events.map(({ type, data }) => ({ stream: `payment-${paymentId}`, type, data }));

// ------------------------------------------------------------------------------------------------------------------------------------
// Random histories.

const share = fc.double({ min: 0.01, max: 1.3, noNaN: true });
const STEP: fc.Arbitrary<Step> = fc.oneof(
  fc.record({ do: fc.constant('void' as const), upTo: fc.nat(2) }),
  { weight: 3, arbitrary: fc.record({ do: fc.constant('refund' as const), cents: fc.option(fc.integer({ min: 1, max: 30_000 })), fee: fc.boolean(), upTo: fc.nat(2), staff: fc.boolean() }) }, // prettier-ignore
  { weight: 2, arbitrary: fc.record({ do: fc.constant('settle' as const), leg: fc.nat(1), accepted: fc.constantFrom(true, true, true, false), more: fc.constantFrom(0, 0, -3, 5), batch: fc.constantFrom('b1', 'b2') }) }, // prettier-ignore
  fc.record({ do: fc.constant('withdraw' as const), leg: fc.nat(1), batch: fc.constantFrom('b1', 'b2') }),
  { weight: 3, arbitrary: fc.record({ do: fc.constant('dispute' as const), id: fc.nat(1), status: fc.constantFrom(...DISPUTE_STATUSES), share, leg: fc.constantFrom(null, null, 'principal' as const, 'fee' as const, 'combined' as const) }) }, // prettier-ignore
);
const LIFE = fc
  .record({
    amounts: fc.array(fc.integer({ min: 1, max: 9_999_999 }), { minLength: 1, maxLength: 3 }),
    fee: fc.oneof(fc.constant(0), fc.integer({ min: 1, max: 99_999 })),
    mode: fc.constantFrom('separate' as const, 'combined' as const),
    ending: fc.constantFrom<Ending>('charged', 'charged', 'charged', 'resolved', 'declined', 'undone', 'returned'),
    steps: fc.array(STEP, { maxLength: 14 }),
  })
  .map(({ amounts, fee, mode, ending, steps }) => eventsOf(termsOf(amounts, shareOut(fee, amounts), mode), ending, steps));

/** Transactions of refunds that the payments make, and others. */
const TRANSACTIONS = ['a1-combined', 'a1-principal', 'a1-fee', 'a2-principal', 'a2-combined', 't'] as const;
const LINE: fc.Arbitrary<RecordedLine> = fc
  .record({
    number: fc.nat(500),
    type: fc.constantFrom('sale' as const, 'refund' as const, 'refund' as const, 'refund_failure' as const, 'chargeback' as const, 'chargeback_reversal' as const, 'fee' as const, 'adjustment' as const), // prettier-ignore
    accepted: fc.constantFrom(true, true, false),
    // Half of them are made to be a refund of the payment.
    isRefund: fc.boolean(),
    grossCents: fc.integer({ min: -5_000, max: 5_000 }),
    feeCents: fc.integer({ min: -50, max: 50 }),
    result: fc.constantFrom('MATCHED' as const, 'AMOUNT_MISMATCH' as const, 'MISSING_HERE' as const, 'STATUS_MISMATCH' as const),
    paymentId: fc.constantFrom(null, PAYMENT, '01890000-0000-7000-8000-0000000000ff'),
    expectedCents: fc.option(fc.integer({ min: -5_000, max: 5_000 })),
    transactionId: fc.constantFrom(...TRANSACTIONS),
    isUndone: fc.constantFrom(true, false, false, false),
  })
  .map(({ isRefund, isUndone, ...one }): RecordedLine => ({
    ref: null,
    leg: null,
    netCents: one.grossCents - one.feeCents,
    ...one,
    ...(isRefund && { type: 'refund', accepted: true, result: 'MATCHED', paymentId: PAYMENT, grossCents: 0 - Math.abs(one.grossCents) }),
    ...(isUndone && { undone: true }),
  }));
const BATCH = { gateway: 'simulator', merchantAccount: AGENCY_MID, batchId: 'b1', closedAt: CLOSED };
const SETTLED = 'settlement-simulator-mid-b1';
const ACCOUNTS = [
  'equity:adjustment', 'assets:bank:operating', 'assets:processor:m:unsettled', 'assets:processor:m:in_transit', 'assets:disputes:m', 'assets:dispute_suspense:m', 'liabilities:suspense:m',
  `liabilities:agency:${PORTAL}:payable`, `revenue:service_fee:${PORTAL}`, `revenue:service_fee_refunded:${PORTAL}`, `expense:chargeback_loss:${PORTAL}`,
  'expense:processing:m', 'expense:dispute_fee:m',
] as const; // prettier-ignore
const OTHER: fc.Arbitrary<Fact> = fc.oneof(
  { weight: 3, arbitrary: fc.array(LINE, { maxLength: 4 }).map((lines) => ({ stream: SETTLED, type: 'SettlementLinesRecorded', data: { ...BATCH, lines } })) }, // prettier-ignore
  fc
    .array(fc.record({ before: fc.option(LINE), after: fc.option(LINE) }), { maxLength: 3 })
    .map((corrections) => ({ stream: SETTLED, type: 'SettlementLinesCorrected', data: { ...BATCH, fundedOn: null, fileId: null, reference: null, corrections: corrections.filter(({ before, after }) => before ?? after).map(({ before, after }) => ({ before, after: after && { ...after, number: before?.number ?? after.number } })) } })), // prettier-ignore
  fc.record({ netCents: fc.integer({ min: -900, max: 900 }), agency: fc.boolean() }).map(({ netCents, agency }) => ({ stream: SETTLED, type: 'BatchFunded', data: { ...BATCH, fundedOn: '2026-03-02', netCents, ...(agency && { agencyPortalId: PORTAL }) } })), // prettier-ignore
  fc.record({ resolution: fc.constantFrom('settles', 'refund', 'adopt', 'no_posting'), suspenseCents: fc.integer({ min: -900, max: 900 }), feeCents: fc.integer({ min: -9, max: 9 }), paymentId: fc.constantFrom(null, PAYMENT) }).map((one) => ({ stream: 'exception-1', type: 'ExceptionResolved', data: { ...one, reason: 'r', by: 'me', merchantAccount: AGENCY_MID, portalId: one.resolution === 'adopt' ? OTHER_PORTAL : null, ...(one.resolution !== 'adopt' && { feeCents: 0 }) } })), // prettier-ignore
  fc.record({ cents: fc.integer({ min: 1, max: 900 }), accounts: fc.shuffledSubarray([...ACCOUNTS], { minLength: 2, maxLength: 2 }) }).map(({ cents, accounts }) => ({ stream: 'adjustment-1', type: 'ManualAdjustment', data: { postings: [{ account: accounts[0], cents }, { account: accounts[1], cents: -cents }], effectiveAt: '2026-02-01T01:00:00+01:00', reason: 'r', by: 'me', adjustmentId: '1' } })), // prettier-ignore
  fc.record({ cents: fc.integer({ min: 1, max: 900 }), type: fc.constantFrom('AgencyRemitted', 'AgencyRemittanceReversed') }).map(({ cents, type }) => ({ stream: `remittance-${PORTAL}`, type, data: { remittanceId: '1', portalId: PORTAL, cents, on: '2026-02-01', by: 'me' } })), // prettier-ignore
);
/** Two payments, whose events and other events stand in a random order. The order within a payment stays. */
const HISTORY = fc
  .record({ one: LIFE, other: LIFE, others: fc.array(OTHER, { maxLength: 6 }), order: fc.array(fc.nat(2), { maxLength: 60 }), closed: fc.nat(40) })
  .map(({ one, other, others, order, closed }) => {
    const queues: Fact[][] = [factsOf(PAYMENT, one), factsOf('01890000-0000-7000-8000-000000000003', other), others];
    const facts: Fact[] = [];
    for (const pick of order) {
      const next = queues[pick]!.shift();
      if (next) facts.push(next);
    }
    facts.push(...queues.flat());
    const to = '2026-03-03T00:00:00.000Z';
    facts.splice(closed, 0, { stream: 'adjustment-periods', type: 'PeriodClosed', data: { from: null, to, by: 'me' } });
    return facts;
  });

describe('over random histories', () => {
  test('each event moves the same cents in the register and in the journal: by account, rule and booked time', () => {
    const seen = new Set<string>();
    fc.assert(
      fc.property(HISTORY, (facts) => {
        for (const posted of post(facts)) {
          expect(untied(posted)).toEqual({});
          for (const { movement, line_id: line } of posted.rows) seen.add(line === null ? `${movement} without a line` : movement!);
        }
      }),
      // The seed is fixed, so that every run reaches all of the movements below.
      { numRuns: 250, seed: 1 },
    );
    // Without these movements, the test would prove nothing about them.
    const needed = [
        'charge', 'void', 'refund', 'rejected', 'settled', 'settled without a line', 'settlement_withdrawn', 'refund_settled',
        'refund_settled without a line', 'undone_settled without a line', 'dispute_opened', 'dispute_recovered', 'dispute_reopened', 'dispute_lost', 'dispute_won_back', 'dispute_excess without a line',
        'processor_fee without a line', 'dispute_fee without a line', 'unexplained without a line', 'funded without a line', 'adopted without a line',
        'suspense_resolved without a line', 'adjustment without a line', 'remitted without a line',
      ]; // prettier-ignore
    expect(needed.filter((movement) => !seen.has(movement))).toEqual([]);
  });

  test('the rows of a line sum to what the line still owes, and what was withdrawn from a batch is gone from the line', () => {
    fc.assert(
      fc.property(LIFE, (events) => {
        const payment = events.reduce(decider.evolve, decider.initial);
        const rows = post(factsOf(PAYMENT, events)).flatMap((posted) => posted.rows);
        if (payment.phase !== 'charged') {
          expect(rows).toEqual([]);
          return;
        }
        const sum = (of: readonly Row[], column: 'principal_cents' | 'fee_cents') => of.reduce((total, row) => total + Number(row[column]), 0);
        payment.terms.lineItems.forEach((line, index) => {
          const own = rows.filter(({ line_id: id }) => id === line.id);
          const owed = own.filter(({ movement }) => /^(charge|void|refund)$/.test(movement!));
          const { principalReturnedCents, feeReturnedCents } = payment.lines[index]!;
          expect([sum(owed, 'principal_cents'), sum(owed, 'fee_cents')]).toEqual([
            line.amountCents - principalReturnedCents,
            line.serviceFeeCents - feeReturnedCents,
          ]);
          for (const { leg, settledBatchId } of payment.legs) {
            const inBatch = own.filter((row) => row.leg === leg && /^(settled|settlement_withdrawn)$/.test(row.movement!));
            if (settledBatchId === null) expect([sum(inBatch, 'principal_cents') + 0, sum(inBatch, 'fee_cents') + 0]).toEqual([0, 0]);
          }
        });
      }),
      { numRuns: 120, seed: 2 },
    );
  });

  test('shares sum to the cents, each share has the sign of the cents, and differs by less than a cent from its exact part', () =>
    fc.assert(
      fc.property(
        fc.integer({ min: -9_999_999_999, max: 9_999_999_999 }),
        fc.array(fc.nat(99_999_999), { minLength: 1, maxLength: 6 }),
        (cents, weights) => {
          const shares = shareOut(cents, weights);
          const all = weights.reduce((sum, weight) => sum + weight, 0);
          if (all === 0) return expect(shares.every((one) => one === 0)).toBe(true);
          expect(shares.reduce((sum, one) => sum + one, 0)).toBe(cents);
          shares.forEach((one, index) => expect(Math.abs(one - (cents * weights[index]!) / all)).toBeLessThan(1));
        },
      ),
    ));

  test('equal remainders: the lower index is first; no cents and no weights give no shares', () => {
    expect(shareOut(2, [1, 1, 1])).toEqual([1, 1, 0]);
    expect(shareOut(-2, [1, 1, 1])).toEqual([-1, -1, 0]);
    expect(shareOut(5, [1, 2, 1, 2])).toEqual([1, 2, 1, 1]);
    expect(shareOut(0, [3, 4])).toEqual([0, 0]);
    expect(shareOut(7, [0, 0])).toEqual([0, 0]);
  });
});

// ------------------------------------------------------------------------------------------------------------------------------------
// One movement after the other.

/** 100.00 in three lines, with a fee of 3.25. */
const AMOUNTS = [3_333, 3_333, 3_334];
const FEES = [108, 108, 109];
const paid = (mode: 'separate' | 'combined', ...steps: readonly Step[]) =>
  post(factsOf(PAYMENT, eventsOf(termsOf(AMOUNTS, FEES, mode), 'charged', steps))).flatMap(({ rows }) => rows);
const shown = (rows: readonly Row[]) =>
  rows.map((row) => [
    row.movement,
    row.leg,
    row.line_number === null ? null : Number(row.line_number),
    Number(row.principal_cents),
    Number(row.fee_cents),
    Number(row.processor_fee_cents),
  ]);
const after = (rows: readonly Row[], movement: string) => rows.slice(rows.findIndex((row) => row.movement === movement));
const settle = (leg: number, more = 0): Step => ({ do: 'settle', leg, accepted: true, more, batch: 'b1' });
const dispute = (status: Dispute['status'], of: number, leg: Leg | null = null, id = 0): Step => ({ do: 'dispute', id, status, share: of, leg });

describe('one movement after the other', () => {
  test('a charge, by leg and line', () => {
    expect(shown(paid('combined'))).toEqual([
      ['charge', 'combined', 1, 3_333, 108, 0],
      ['charge', 'combined', 2, 3_333, 108, 0],
      ['charge', 'combined', 3, 3_334, 109, 0],
    ]);
    expect(shown(paid('separate'))).toEqual([
      ['charge', 'principal', 1, 3_333, 0, 0],
      ['charge', 'principal', 2, 3_333, 0, 0],
      ['charge', 'principal', 3, 3_334, 0, 0],
      ['charge', 'fee', 1, 0, 108, 0],
      ['charge', 'fee', 2, 0, 108, 0],
      ['charge', 'fee', 3, 0, 109, 0],
    ]);
  });

  test('a row shows its line, its payment and its transaction', () => {
    const [first, second] = paid('combined');
    expect(first).toEqual({
      position: '00000000000000000002',
      number: '0',
      line_number: '1',
      movement_id: first!.movement_id,
      account_id: ACCOUNT,
      portal_id: PORTAL,
      payment_id: PAYMENT,
      line_id: LINES[0],
      principal_cents: '3333',
      fee_cents: '108',
      processor_fee_cents: '0',
      recorded_at: '2026-03-01T10:00:00.001Z',
      effective_at: AT.replace('000Z', '001Z'),
      booked_at: AT.replace('000Z', '001Z'),
      movement: 'charge',
      family: 'owed',
      rule: 'R1',
      leg: 'combined',
      reference_id: 'INV-1',
      payment_reference_id: 'CASE-1',
      coding: '{"fund":"402"}',
      gateway: 'simulator',
      merchant_account: AGENCY_MID,
      ledger_account: null,
      transaction_id: 'ch-combined',
      auth_code: 'A1',
      brand: 'visa',
      last4: '4242',
      confirmation_number: 'ABCD-EFGH-JK',
      batch_id: null,
      initiated_by: 'partner',
    });
    expect(second).toMatchObject({ number: '1', line_number: '2', line_id: LINES[1], coding: null });
    expect(first!.movement_id).toMatch(/^[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/);
  });

  test('every movement has an id of its own, and the same events give the same ids', () => {
    const ids = paid('separate', settle(0), settle(1), dispute('lost', 1), dispute('debited', 1)).map((row) => row.movement_id);
    expect(new Set(ids).size).toBe(ids.length);
    expect(paid('separate', settle(0), settle(1), dispute('lost', 1), dispute('debited', 1)).map((row) => row.movement_id)).toEqual(ids);
  });

  test('the id of a row names its event, its movement and its line; a second leg of the line is number 2', () => {
    const rows = paid('separate', settle(0, 40));
    const idOf = (index: number, name: string) => uuidV5(`01890000-0000-7000-8000-1${String(index).padStart(11, '0')}`, name);
    expect(rows.map((row) => row.movement_id)).toEqual([
      ...LINES.map((id) => idOf(1, `charge/${id}`)),
      ...LINES.map((id) => idOf(1, `charge/${id}/2`)),
      ...LINES.map((id) => idOf(2, `settled/${id}`)),
      idOf(2, 'settled/'),
    ]);
  });

  test('each leg shows its own merchant account and its own transaction', () => {
    const legs = paid('separate').map((row) => [row.leg, row.merchant_account, row.transaction_id]);
    expect(legs.slice(2, 4)).toEqual([
      ['principal', AGENCY_MID, 'ch-principal'],
      ['fee', FEES_MID, 'ch-fee'],
    ]);
  });

  test('a card token: the rows show the card that the gateway named with the charge, also if it named it with the second leg only', () => {
    const [initiated, created] = factsOf(PAYMENT, eventsOf(termsOf([100], [3], 'separate'), 'charged', []));
    const { legs, ...data } = created!.data as Extract<PaymentEvent, { type: 'PaymentCreated' }>['data'];
    const named = { ...created!, data: { ...data, legs: [legs[0]!, { ...legs[1]!, card: { brand: 'amex', last4: '0005' } }] } };
    expect(post([initiated!, named])[1]!.rows.map(({ brand, last4 }) => [brand, last4])).toEqual([
      ['amex', '0005'],
      ['amex', '0005'],
    ]);
  });

  test('a charge that staff resolved has no authorization code; a payment without a charge has no rows', () => {
    const rows = (ending: Ending) => post(factsOf(PAYMENT, eventsOf(termsOf([100], [3], 'combined'), ending, []))).flatMap((one) => one.rows);
    expect(rows('resolved').map((row) => [row.movement, row.transaction_id, row.auth_code])).toEqual([['charge', 'ch-combined', null]]);
    for (const ending of ['declined', 'undone', 'returned'] as const) expect(rows(ending)).toEqual([]);
  });

  test('a void before settlement, and a refund after it, by the lines of the request', () => {
    const rows = paid('combined', { do: 'refund', cents: 3_400, fee: false, upTo: 2, staff: false });
    expect(shown(after(rows, 'void'))).toEqual([
      ['void', 'combined', 1, -1_133, 0, 0],
      ['void', 'combined', 2, -1_133, 0, 0],
      ['void', 'combined', 3, -1_134, 0, 0],
    ]);
    expect(after(rows, 'void')[0]).toMatchObject({ transaction_id: 'a1-combined', initiated_by: 'partner', family: 'owed' });
    const refunded = paid('combined', settle(0), { do: 'refund', cents: null, fee: true, upTo: 2, staff: true });
    expect(shown(after(refunded, 'refund'))).toEqual([
      ['refund', 'combined', 1, -3_333, -108, 0],
      ['refund', 'combined', 2, -3_333, -108, 0],
      ['refund', 'combined', 3, -3_334, -109, 0],
    ]);
    expect(after(refunded, 'refund')[0]).toMatchObject({ transaction_id: 'a1-combined', initiated_by: 'staff' });
  });

  test('charged apart: each leg gives back its own part, also if the other one never does', () => {
    const rows = paid('separate', settle(0), settle(1), { do: 'refund', cents: null, fee: true, upTo: 1, staff: true });
    expect(shown(after(rows, 'refund')).map(([movement, leg, , principal, fee]) => [movement, leg, principal, fee])).toEqual([
      ['refund', 'principal', -3_333, 0],
      ['refund', 'principal', -3_333, 0],
      ['refund', 'principal', -3_334, 0],
    ]);
  });

  test('a settled sale: its own cents by line, and the processor’s fee by largest remainder', () => {
    const rows = paid('combined', settle(0));
    expect(shown(after(rows, 'settled'))).toEqual([
      ['settled', 'combined', 1, 3_333, 108, -2],
      ['settled', 'combined', 2, 3_333, 108, -2],
      ['settled', 'combined', 3, 3_334, 109, -3],
    ]);
    expect(after(rows, 'settled')[0]).toMatchObject({ batch_id: 'b1', effective_at: CLOSED, family: 'in_transit', rule: 'R4' });
  });

  test('a sale that settled too little is shared; what settled too much belongs to no line', () => {
    expect(shown(after(paid('combined', settle(0, -25)), 'settled'))).toEqual([
      ['settled', 'combined', 1, 3_325, 108, -2],
      ['settled', 'combined', 2, 3_325, 108, -2],
      ['settled', 'combined', 3, 3_325, 109, -3],
    ]);
    expect(shown(after(paid('combined', settle(0, 40)), 'settled'))).toEqual([
      ['settled', 'combined', 1, 3_333, 108, -2],
      ['settled', 'combined', 2, 3_333, 108, -2],
      ['settled', 'combined', 3, 3_334, 109, -3],
      ['settled', 'combined', null, 40, 0, 0],
    ]);
  });

  test('a withdrawn settlement takes the shares back that were settled, and the leg can settle again', () => {
    const rows = paid('combined', settle(0, 40), { do: 'withdraw', leg: 0, batch: 'b1' }, settle(0));
    expect(shown(after(rows, 'settlement_withdrawn'))).toEqual([
      ['settlement_withdrawn', 'combined', 1, -3_333, -108, 2],
      ['settlement_withdrawn', 'combined', 2, -3_333, -108, 2],
      ['settlement_withdrawn', 'combined', 3, -3_334, -109, 3],
      ['settlement_withdrawn', 'combined', null, -40, 0, 0],
      ['settled', 'combined', 1, 3_333, 108, -2],
      ['settled', 'combined', 2, 3_333, 108, -2],
      ['settled', 'combined', 3, 3_334, 109, -3],
    ]);
  });

  test('a void after the settlement does not change what a withdrawal takes back', () => {
    const [initiated, created] = factsOf(PAYMENT, eventsOf(termsOf([1_000, 1_000], [0, 0], 'combined'), 'charged', []));
    const of = (type: string, data: object) => ({ stream: `payment-${PAYMENT}`, type, data });
    const money = { leg: 'combined', batchId: 'b1', closedAt: CLOSED, grossCents: 2_000, feeCents: 0 };
    const lines = [{ lineItemId: LINES[0], principalCents: 600, feeCents: 0 }];
    const posted = post([
      initiated!,
      created!,
      of('PaymentSettled', money),
      of('VoidRequested', { attemptId: 'a1', initiatedBy: 'partner', reason: null, legs: [], lines, completes: null, idempotency: null }),
      of('PaymentVoided', { attemptId: 'a1', leg: 'combined', principalCents: 600, feeCents: 0, transactionId: 'v1' }),
      of('SettlementWithdrawn', money),
      of('SettlementRejected', { leg: 'combined', batchId: 'b2', closedAt: CLOSED }),
    ]);
    expect(posted.map(untied)).toEqual(posted.map(() => ({})));
    expect(shown(posted.slice(4).flatMap(({ rows }) => rows))).toEqual([
      ['void', 'combined', 1, -600, 0, 0],
      ['settlement_withdrawn', 'combined', 1, -1_000, 0, 0],
      ['settlement_withdrawn', 'combined', 2, -1_000, 0, 0],
      ['rejected', 'combined', 1, -400, 0, 0],
      ['rejected', 'combined', 2, -1_000, 0, 0],
    ]);
    expect(posted[6]!.rows[0]).toMatchObject({ batch_id: 'b2', rule: 'R14', family: 'owed', effective_at: CLOSED });
  });

  test('a dispute: principal and fee each by largest remainder over the lines', () => {
    const rows = paid('combined', dispute('debited', 0.5));
    expect(shown(after(rows, 'dispute_opened'))).toEqual([
      ['dispute_opened', 'combined', 1, -1_667, -54, 0],
      ['dispute_opened', 'combined', 2, -1_666, -54, 0],
      ['dispute_opened', 'combined', 3, -1_667, -54, 0],
    ]);
    expect(after(rows, 'dispute_opened')[0]).toMatchObject({
      family: 'disputes',
      transaction_id: 'ch-combined',
      effective_at: '2026-03-05T00:00:00.000Z',
      batch_id: null,
    });
  });

  test.each([
    [['debited'], ['opened-']],
    [['debited', 'in_dispute'], ['opened-']],
    [
      ['debited', 'lost'],
      ['opened-', 'lost-'],
    ],
    [['lost'], ['opened-', 'lost-']],
    [
      ['debited', 'recovered'],
      ['opened-', 'recovered+'],
    ],
    [
      ['debited', 'lost', 'recovered'],
      ['opened-', 'lost-', 'won_back+'],
    ],
    [
      ['lost', 'in_dispute'],
      ['opened-', 'lost-', 'won_back+', 'reopened-'],
    ],
    [
      ['lost', 'in_dispute', 'lost'],
      ['opened-', 'lost-', 'won_back+', 'reopened-', 'lost-'],
    ],
    [
      ['debited', 'recovered', 'debited'],
      ['opened-', 'recovered+', 'opened-'],
    ],
    [['recovered'], []],
    // Only the stage changes.
    [['debited', 'debited'], ['opened-']],
    [
      ['lost', 'lost'],
      ['opened-', 'lost-'],
    ],
    [
      ['debited', 'recovered', 'recovered'],
      ['opened-', 'recovered+'],
    ],
  ] as const)('a dispute that goes %j moves %j', (statuses, moved) => {
    const rows = post(factsOf(PAYMENT, eventsOf(termsOf([900], [0], 'combined'), 'charged', statuses.map((status) => dispute(status, 1))))); // prettier-ignore
    const found = rows.flatMap((one) => one.rows).slice(1);
    expect(found.map(({ movement, principal_cents: cents }) => `${movement!.replace('dispute_', '')}${Number(cents) > 0 ? '+' : '-'}`)).toEqual(
      moved,
    );
    expect(found.every(({ principal_cents: cents }) => Math.abs(Number(cents)) === 900)).toBe(true);
  });

  test('a dispute takes the named leg, else the legs in order as far as other disputes have left of them, and the rest from the first', () => {
    const legs = (...steps: readonly Step[]) =>
      paid('separate', ...steps)
        .filter(({ movement }) => movement === 'dispute_opened')
        .reduce<Record<string, number>>((sums, row) => {
          const cents = Number(row.principal_cents) + Number(row.fee_cents);
          return { ...sums, [row.leg!]: (sums[row.leg!] ?? 0) + cents };
        }, {});
    expect(legs(dispute('debited', 1))).toEqual({ principal: -10_000, fee: -325 });
    expect(legs(dispute('debited', 1, 'fee'))).toEqual({ fee: -325 });
    expect(legs(dispute('debited', 0.5, 'principal'), dispute('debited', 0.5, null, 1))).toEqual({ principal: -10_000, fee: -162 });
    expect(legs(dispute('debited', 1, 'principal'), dispute('debited', 0.01, null, 1))).toEqual({ principal: -10_000, fee: -103 });
    // A recovered dispute leaves its leg free again. What exceeds all legs is no cent of a line.
    expect(legs(dispute('debited', 1), dispute('recovered', 1), dispute('debited', 1, null, 1))).toEqual({ principal: -20_000, fee: -650 });
    const twice = [dispute('debited', 1), dispute('debited', 0.1, null, 1)];
    expect(legs(...twice)).toEqual({ principal: -10_000, fee: -325 });
    expect(shown(after(paid('separate', ...twice), 'dispute_excess'))).toEqual([['dispute_excess', 'principal', null, -1_032, 0, 0]]);
  });
});

describe('lines of batches', () => {
  const line = (change: Partial<RecordedLine>): RecordedLine => ({
    number: 0,
    transactionId: 't',
    ref: null,
    type: 'sale',
    accepted: true,
    grossCents: 500,
    feeCents: 9,
    netCents: 491,
    result: 'MATCHED',
    paymentId: null,
    leg: null,
    expectedCents: null,
    ...change,
  });
  const refunded = factsOf(
    PAYMENT,
    eventsOf(termsOf(AMOUNTS, FEES, 'combined'), 'charged', [settle(0), { do: 'refund', cents: 3_400, fee: false, upTo: 1, staff: false }]),
  );
  const ofBatch = (type: string, data: object): Fact => ({ stream: SETTLED, type, data: { ...BATCH, ...data } });
  const recorded = (...lines: readonly RecordedLine[]) => {
    const posted = post([...refunded, ofBatch('SettlementLinesRecorded', { lines })]).at(-1)!;
    expect(untied(posted)).toEqual({});
    return posted.rows;
  };
  const refund = line({
    type: 'refund',
    transactionId: 'a1-combined',
    paymentId: PAYMENT,
    leg: 'combined',
    grossCents: -3_400,
    feeCents: -3,
    netCents: -3_397,
  });

  test('a refund: its own lines, and a fee that comes back', () => {
    const rows = recorded(refund);
    expect(shown(rows)).toEqual([
      ['refund_settled', 'combined', 1, -1_133, 0, 1],
      ['refund_settled', 'combined', 2, -1_133, 0, 1],
      ['refund_settled', 'combined', 3, -1_134, 0, 1],
    ]);
    expect(rows[0]).toMatchObject({ batch_id: 'b1', transaction_id: 'a1-combined', account_id: ACCOUNT, portal_id: PORTAL, rule: "R4'" });
    expect(shown(recorded(line({ ...refund, result: 'AMOUNT_MISMATCH', grossCents: -3_500, feeCents: 0 }))).at(-1)).toEqual(['refund_settled', 'combined', null, -100, 0, 0]); // prettier-ignore
  });
  test('a refund that was sent for an exception belongs to no line', () => {
    const sent = line({ type: 'refund', transactionId: 'sent', paymentId: PAYMENT, leg: 'combined', grossCents: -700, feeCents: 2 });
    expect(shown(recorded(sent))).toEqual([['refund_settled', 'combined', null, -700, 0, -2]]);
    expect(shown(recorded({ ...sent, paymentId: null, leg: null }))).toEqual([['refund_settled', null, null, -700, 0, -2]]);
  });
  test('a charge that was undone, and the refund that undid it: no line of the payment, and only the fee stays', () => {
    const undone = factsOf(PAYMENT, eventsOf(termsOf(AMOUNTS, FEES, 'combined'), 'undone', []));
    const sale = line({ transactionId: 'ch-combined', paymentId: PAYMENT, leg: 'combined', grossCents: 10_325, feeCents: 330, undone: true });
    const back = { ...sale, number: 1, type: 'refund' as const, transactionId: 'rf', grossCents: -10_325, feeCents: 0 };
    const fee = { ...sale, number: 2, type: 'fee' as const, grossCents: 0, feeCents: 5, netCents: -5 };
    const both = post([...undone, ofBatch('SettlementLinesRecorded', { lines: [sale, back, fee] })]).at(-1)!;
    expect(untied(both)).toEqual({});
    expect(shown(both.rows)).toEqual([
      ['undone_settled', 'combined', null, 10_325, 0, -330],
      ['undone_settled', 'combined', null, -10_325, 0, 0],
      ['processor_fee', 'combined', null, 0, 0, -5],
    ]);
    expect(both.rows[0]).toMatchObject({ rule: 'R21', family: 'in_transit', payment_id: PAYMENT, transaction_id: 'ch-combined', batch_id: 'b1' });
    const accounts = both.rows.flatMap((row) => postingsOf(sumsOf(row)));
    const sum = (name: RegExp) => accounts.filter(({ account }) => name.test(account)).reduce((total, { cents }) => total + cents, 0);
    expect([sum(/suspense/), sum(/:unsettled$/), sum(/:in_transit$/), sum(/^expense:processing/)]).toEqual([0, 0, -335, 335]);

    const corrections = [{ before: sale, after: { ...sale, result: 'STATUS_MISMATCH', undone: undefined } }];
    const corrected = post([
      ...undone,
      ofBatch('SettlementLinesRecorded', { lines: [sale] }),
      ofBatch('SettlementLinesCorrected', { fundedOn: null, fileId: null, reference: null, corrections }),
    ]).at(-1)!;
    expect(untied(corrected)).toEqual({});
    expect(shown(corrected.rows)).toEqual([
      ['undone_settled', 'combined', null, -10_325, 0, 330],
      ['unexplained', 'combined', null, 10_325, 0, -330],
    ]);
  });
  test('a refund that failed later is unexplained until it is sent again', () => {
    const failure = line({ type: 'refund_failure', result: 'REFUND_FAILED', transactionId: 'a1-combined', paymentId: PAYMENT, leg: 'combined', grossCents: 3_400, feeCents: 0 }); // prettier-ignore
    expect(shown(recorded(failure))).toEqual([['unexplained', 'combined', null, 3_400, 0, 0]]);
  });
  test('lines that fit nothing, fees, chargebacks and adjustments', () => {
    expect(shown(recorded(line({ result: 'MISSING_HERE' })))).toEqual([['unexplained', null, null, 500, 0, -9]]);
    expect(shown(recorded(line({ result: 'STATUS_MISMATCH', paymentId: PAYMENT, leg: 'combined' })))).toEqual([
      ['unexplained', 'combined', null, 500, 0, -9],
    ]);
    expect(shown(recorded(line({ type: 'fee', grossCents: 0, feeCents: 40, netCents: -40 })))).toEqual([['processor_fee', null, null, 0, 0, -40]]);
    expect(shown(recorded(line({ type: 'adjustment' })))).toEqual([['unexplained', null, null, 491, 0, 0]]);
    expect(shown(recorded(line({ type: 'chargeback', expectedCents: -600, grossCents: -650 })))).toEqual([
      ['dispute_fee', null, null, 0, 0, -9],
      ['unexplained', null, null, -50, 0, 0],
    ]);
    expect(shown(recorded(line({ type: 'chargeback_reversal', expectedCents: null })))).toEqual([['dispute_fee', null, null, 0, 0, -9]]);
    expect(recorded(line({}), line({ type: 'refund', accepted: false }), line({ result: 'AMOUNT_MISMATCH' }))).toEqual([]);
  });
  test('a corrected line: what it moved goes back, and the new line moves', () => {
    const now = { ...refund, grossCents: -3_000, feeCents: 0, netCents: -3_000, result: 'AMOUNT_MISMATCH' as const };
    const posted = post([
      ...refunded,
      ofBatch('SettlementLinesRecorded', { lines: [refund] }),
      ofBatch('SettlementLinesCorrected', { fundedOn: null, fileId: null, reference: null, corrections: [{ before: refund, after: now }, { before: line({ result: 'MISSING_HERE' }), after: null }] }), // prettier-ignore
    ]).at(-1)!;
    expect(untied(posted)).toEqual({});
    expect(shown(posted.rows)).toEqual([
      ['settlement_withdrawn', 'combined', 1, 1_133, 0, -1],
      ['settlement_withdrawn', 'combined', 2, 1_133, 0, -1],
      ['settlement_withdrawn', 'combined', 3, 1_134, 0, -1],
      ['refund_settled', 'combined', 1, -1_000, 0, 0],
      ['refund_settled', 'combined', 2, -1_000, 0, 0],
      ['refund_settled', 'combined', 3, -1_000, 0, 0],
      ['unexplained', null, null, -500, 0, 9],
    ]);
  });
  test('a corrected refund: the service fee of its lines goes back, too', () => {
    const whole = factsOf(
      PAYMENT,
      eventsOf(termsOf(AMOUNTS, FEES, 'combined'), 'charged', [settle(0), { do: 'refund', cents: null, fee: true, upTo: 1, staff: false }]),
    );
    const before = { ...refund, grossCents: -10_325, feeCents: 0 };
    const corrections = [{ before, after: null }];
    const posted = post([
      ...whole,
      ofBatch('SettlementLinesRecorded', { lines: [before] }),
      ofBatch('SettlementLinesCorrected', { fundedOn: null, fileId: null, reference: null, corrections }),
    ]);
    expect(shown(posted.slice(-2).flatMap(({ rows }) => rows))).toEqual([
      ['refund_settled', 'combined', 1, -3_333, -108, 0],
      ['refund_settled', 'combined', 2, -3_333, -108, 0],
      ['refund_settled', 'combined', 3, -3_334, -109, 0],
      ['settlement_withdrawn', 'combined', 1, 3_333, 108, 0],
      ['settlement_withdrawn', 'combined', 2, 3_333, 108, 0],
      ['settlement_withdrawn', 'combined', 3, 3_334, 109, 0],
    ]);
  });
  test('a funded batch: its money leaves the transit, to the operator or to an agency', () => {
    const funded = (change: object) => post([ofBatch('BatchFunded', { fundedOn: '2026-03-04', netCents: 900, ...change })])[0]!.rows;
    expect(funded({})).toMatchObject([
      { movement: 'funded', rule: 'R6', principal_cents: '-900', portal_id: null, batch_id: 'b1', effective_at: '2026-03-04T00:00:00.000Z' },
    ]);
    expect(funded({ agencyPortalId: PORTAL })).toMatchObject([{ movement: 'funded', rule: "R6'", principal_cents: '-900', portal_id: PORTAL }]);
    expect(funded({ netCents: 0 })).toEqual([]);
    for (const type of ['SettlementBatchRecorded', 'SettlementBatchListed']) expect(post([ofBatch(type, {})])[0]!.rows).toEqual([]);
  });
});

describe('decisions of staff', () => {
  const of = (stream: string, type: string, data: object) => post([{ stream, type, data }], 'system')[0]!.rows;
  test('a resolved exception', () => {
    const resolved = (change: object) => {
      const data = { reason: 'r', by: 'me', merchantAccount: 'm', suspenseCents: 900, paymentId: null, portalId: null, feeCents: 0, ...change };
      const event = { stream: 'exception-1', type: 'ExceptionResolved', data };
      return post([...factsOf(PAYMENT, eventsOf(termsOf([100], [3], 'combined'), 'charged', [])), event]).at(-1)!.rows;
    };
    expect(resolved({ resolution: 'adopt', portalId: OTHER_PORTAL, feeCents: 25 })).toMatchObject([
      { movement: 'adopted', family: 'owed', principal_cents: '875', fee_cents: '25', portal_id: OTHER_PORTAL, line_id: null, account_id: null },
    ]);
    expect(resolved({ resolution: 'settles', paymentId: PAYMENT })).toMatchObject([
      { movement: 'suspense_resolved', family: 'suspense', principal_cents: '900', portal_id: PORTAL, account_id: ACCOUNT, line_id: null },
    ]);
    expect(resolved({ resolution: 'adopt', portalId: OTHER_PORTAL, paymentId: PAYMENT })).toMatchObject([
      { portal_id: OTHER_PORTAL, payment_id: PAYMENT },
    ]);
    expect(resolved({ resolution: 'no_posting' })).toEqual([]);
    expect(resolved({ resolution: 'settles', suspenseCents: 0 })).toEqual([]);
    expect(of('exception-1', 'ExceptionAssigned', { to: 'me', by: 'me' })).toEqual([]);
  });
  test.each([
    [`liabilities:agency:${PORTAL}:payable`, 'owed', 'principal_cents', '-70', PORTAL],
    [`revenue:service_fee:${PORTAL}`, 'owed', 'fee_cents', '-70', PORTAL],
    [`revenue:service_fee_refunded:${PORTAL}`, 'owed', 'fee_cents', '-70', PORTAL],
    [`expense:chargeback_loss:${PORTAL}`, 'owed', 'fee_cents', '-70', PORTAL],
    ['expense:processing:m', 'in_transit', 'processor_fee_cents', '-70', null],
    ['expense:dispute_fee:m', 'in_transit', 'processor_fee_cents', '-70', null],
    ['assets:processor:m:in_transit', 'in_transit', 'principal_cents', '70', null],
    ['assets:processor:in_transit:unsettled', 'other', 'principal_cents', '70', null],
    ['assets:disputes:m', 'disputes', 'principal_cents', '-70', null],
    ['assets:dispute_suspense:m', 'disputes', 'principal_cents', '-70', null],
    ['liabilities:suspense:m', 'suspense', 'principal_cents', '70', null],
    [`liabilities:suspense:${PORTAL}`, 'suspense', 'principal_cents', '70', null],
    ['assets:bank:operating', 'other', 'principal_cents', '70', null],
    ['equity:adjustment', 'other', 'principal_cents', '70', null],
  ])('an adjustment of %s', (account, family, column, cents, portalId) => {
    const other = account === 'equity:adjustment' ? 'assets:bank:operating' : 'equity:adjustment';
    const postings = [{ account, cents: 70 }, { account: other, cents: -70 }]; // prettier-ignore
    const data = { adjustmentId: '1', postings, effectiveAt: '2026-02-01T01:00:00+01:00', reason: 'r', by: 'me' };
    const [row, counterpart] = of('adjustment-1', 'ManualAdjustment', data);
    expect(counterpart).toMatchObject({ family: 'other', ledger_account: other, principal_cents: '-70' });
    const zeros = { principal_cents: '0', fee_cents: '0', processor_fee_cents: '0' };
    expect(row).toMatchObject({ movement: 'adjustment', family, ledger_account: account, portal_id: portalId, ...zeros, [column]: cents, effective_at: '2026-02-01T00:00:00.000Z', initiated_by: 'system' }); // prettier-ignore
  });
  test('a remittance, and its reversal', () => {
    const data = { remittanceId: '1', portalId: PORTAL, cents: 900, on: '2026-02-01', by: 'me' };
    expect(of(`remittance-${PORTAL}`, 'AgencyRemitted', data)).toMatchObject([
      { movement: 'remitted', family: 'owed', principal_cents: '-900', portal_id: PORTAL, effective_at: '2026-02-01T00:00:00.000Z' },
    ]);
    expect(of(`remittance-${PORTAL}`, 'AgencyRemittanceReversed', data)).toMatchObject([{ movement: 'remitted', principal_cents: '900' }]);
  });
  test('a period, a change of a rule and an imported file move nothing; after a closing, earlier facts are booked at its end', () => {
    const closed = { stream: 'adjustment-periods', type: 'PeriodClosed', data: { from: null, to: '2026-03-03T00:00:00.000Z', by: 'me' } };
    const rule = { stream: 'adjustment-rules', type: 'PostingRuleChanged', data: { rule: 'R1', version: 1 } };
    const balance = { stream: 'adjustment-periods', type: 'TrialBalanceRecorded', data: { to: '2026-03-04T00:00:00.000Z', position: '1', opening: [], closing: [], entries: 0, digest: '' } }; // prettier-ignore
    const remitted = (on: string) => ({ stream: `remittance-${PORTAL}`, type: 'AgencyRemitted', data: { remittanceId: on, portalId: PORTAL, cents: 1, on, by: 'me' } }); // prettier-ignore
    const added = nothingAdded(null);
    const event = ({ stream, type, data }: Fact, index: number) =>
      ({ stream, type, data, v: 1, id: PAYMENT, revision: 0n, position: String(index), meta: { recordedAt: AT, actor: { type: 'staff' } } }) as unknown as Recorded; // prettier-ignore
    const file = { stream: 'settlement-file-1', type: 'SettlementFileImported', data: {} };
    [remitted('2026-03-02'), closed, rule, balance, file, remitted('2026-03-02'), remitted('2026-03-03'), remitted('2026-03-04')].forEach(
      (one, index) => addEvent(added, event(one, index)),
    );
    expect(added.rows.map(rowOf).map((row) => [row.position, row.booked_at])).toEqual([
      ['0', '2026-03-02T00:00:00.000Z'],
      ['5', '2026-03-03T00:00:00.000Z'],
      ['6', '2026-03-03T00:00:00.000Z'],
      ['7', '2026-03-04T00:00:00.000Z'],
    ]);
    expect(added.periods).toEqual([{ position: '1', closedTo: '2026-03-03T00:00:00.000Z' }]);
    expect([...added.days.values()]).toEqual([
      { bookedOn: '2026-03-02', recordedOn: '2026-03-01', first: '0', last: '0' },
      { bookedOn: '2026-03-03', recordedOn: '2026-03-01', first: '5', last: '6' },
      { bookedOn: '2026-03-04', recordedOn: '2026-03-01', first: '7', last: '7' },
    ]);
    expect(added.deposits).toEqual([]);
  });
  test('only a funded batch is a deposit, on its day of funding; a withdrawn funding takes it back', () => {
    const added = nothingAdded(null);
    const data = { ...BATCH, fundedOn: '2026-03-04', netCents: 900 };
    ['SettlementBatchRecorded', 'BatchFunded', 'BatchFundingWithdrawn'].forEach(
      (type, index) =>
      addEvent(added, { stream: SETTLED, type, data, v: 1, id: PAYMENT, revision: BigInt(index), position: String(index), meta: { recordedAt: AT, actor: { type: 'system' } } } as unknown as Recorded), // prettier-ignore
    );
    const { gateway, merchantAccount, batchId } = BATCH;
    expect(added.deposits).toEqual([
      { position: '1', depositId: PAYMENT, gateway, merchantAccount, batchId, depositedOn: '2026-03-04', sign: 1, recordedAt: AT },
      { position: '2', depositId: PAYMENT, gateway, merchantAccount, batchId, depositedOn: '2026-03-04', sign: -1, recordedAt: AT },
    ]);
  });
});

describe('what must stop the register', () => {
  const [initiated, created] = factsOf(PAYMENT, eventsOf(termsOf([100], [3], 'combined'), 'charged', []));
  const event = ({ stream, type, data }: Fact, revision: number) =>
    ({
      stream,
      type,
      data,
      v: type === 'PaymentInitiated' ? 3 : 1,
      id: PAYMENT,
      revision: BigInt(revision),
      position: String(revision),
      meta: { recordedAt: AT, actor: { type: 'partner' } },
    }) as unknown as Recorded;
  const apply = (...facts: readonly (readonly [Fact, number])[]) => {
    const added = nothingAdded(null);
    for (const [fact, revision] of facts) addEvent(added, event(fact, revision));
    return added;
  };
  const of = (type: string, data: object): Fact => ({ stream: `payment-${PAYMENT}`, type, data });
  const SALE = { leg: 'combined', batchId: 'b', closedAt: CLOSED, grossCents: 1, feeCents: 0 };
  test.each([
    ['a missing revision', [[initiated!, 0], [created!, 2]], 'revision 2 does not follow 0'],
    ['a payment that did not begin', [[created!, 0]], 'of a payment that did not begin'],
    ['a second charge', [[initiated!, 0], [created!, 1], [created!, 2]], 'charged twice'],
    ['a leg that was not charged', [[initiated!, 0], [of('PaymentSettled', SALE), 1]], 'of a leg that was not charged'],
    ['another leg', [[initiated!, 0], [created!, 1], [of('SettlementRejected', { leg: 'fee', batchId: 'b', closedAt: CLOSED }), 2]], 'SettlementRejected of a leg'],
    ['a void of another leg', [[initiated!, 0], [created!, 1], [of('PaymentVoided', { attemptId: 'a9', leg: 'fee', principalCents: 1, feeCents: 0, transactionId: 't' }), 2]], 'void of a leg'],
    ['a dispute of a payment that was not charged', [[initiated!, 0], [of('PaymentDisputed', { disputeId: 'd', status: 'debited', disputedAmountCents: 1, openedOn: '2026-03-05' }), 1]], 'PaymentDisputed of a leg'],
    ['a withdrawn settlement that was not recorded', [[initiated!, 0], [created!, 1], [of('SettlementWithdrawn', SALE), 2]], 'that was not recorded'],
    ['a settlement that is withdrawn twice', [[initiated!, 0], [created!, 1], [of('PaymentSettled', SALE), 2], [of('SettlementWithdrawn', SALE), 3], [of('SettlementWithdrawn', SALE), 4]], 'that was not recorded'],
    ['a void that nobody requested', [[initiated!, 0], [created!, 1], [of('PaymentVoided', { attemptId: 'a9', leg: 'combined', principalCents: 1, feeCents: 0, transactionId: 't' }), 2]], 'that nobody requested'],
    ['an unknown event', [[of('PaymentForgotten', {}), 0]], 'PaymentForgotten'],
  ] as const)('%s', (_name, facts, message) => expect(() => apply(...facts)).toThrow(message)); // prettier-ignore
  test('a new type of event, of settlement line or of rule, for which the register has no movement yet', () => {
    const unknown = (data: object) => ({ type: 'Unknown', at: AT, data });
    expect(() => movePayment(PAYMENT, null, unknown({}) as never, 'partner')).toThrow('Unknown');
    const settlement = (event: object) => moveSettlement(event as SettlementEvent, () => null, 'system');
    expect(() => settlement(unknown({}))).toThrow('Unknown');
    const lines = [{ type: 'gift', accepted: true, result: 'MATCHED', grossCents: 1, feeCents: 0, netCents: 1 }];
    expect(() => settlement({ type: 'SettlementLinesRecorded', data: { ...BATCH, lines } })).toThrow('gift');
    expect(() => postingsOf({ rule: 'R99', principalCents: 1, feeCents: 0, processorFeeCents: 0 } as unknown as LineSums)).toThrow('R99');
  });
  test('a missing first event', () => expect(() => apply([created!, 1])).toThrow('revision 1 does not follow an absent row'));
  test('an attempt that has ended is forgotten', () => {
    const attempt = { attemptId: 'a1', initiatedBy: 'partner', reason: null, legs: [], lines: [], completes: null, idempotency: null };
    const added = apply([initiated!, 0], [created!, 1], [{ ...of('VoidRequested', attempt) }, 2], [of('ReversalEnded', { attemptId: 'a1' }), 3]);
    expect(added.payments.get(PAYMENT)).toMatchObject({ revision: 3n, payment: { attempts: {} } });
  });
});

test('postings: an account without cents is left out, and a row of the processor’s fee posts only that fee', () => {
  const zeros = { movement: 'charge', rule: 'R1', merchantAccount: 'm', portalId: 'p', ledgerAccount: null, principalCents: 0, feeCents: 0, processorFeeCents: 0 } as const; // prettier-ignore
  expect(postingsOf({ ...zeros, principalCents: 500 })).toEqual([
    { account: 'assets:processor:m:unsettled', rule: 'R1', cents: 500 },
    { account: 'liabilities:agency:p:payable', rule: 'R1', cents: -500 },
  ]);
  expect(postingsOf({ ...zeros, movement: 'processor_fee', rule: 'R5', processorFeeCents: -40 })).toEqual([
    { account: 'assets:processor:m:in_transit', rule: 'R5', cents: -40 },
    { account: 'expense:processing:m', rule: 'R5', cents: 40 },
  ]);
});

describe('the payments that an event needs', () => {
  const of = (stream: string, type: string, data: object, revision = 0n) =>
    [paymentsOf({ stream, type, data, v: 1, revision, meta: { recordedAt: AT } } as unknown as Recorded)].flat();
  const one = (change: object) => ({ type: 'refund', accepted: true, result: 'MATCHED', paymentId: PAYMENT, ...change });
  test('are its own, those of lines that move by themselves, and that of a resolved exception', () => {
    expect(of(`payment-${PAYMENT}`, 'PaymentCreated', {}, 1n)).toEqual([PAYMENT]);
    expect(of(`payment-${PAYMENT}`, 'PaymentInitiated', {})).toEqual([]);
    const lines = [
      one({}),
      one({ accepted: false }),
      one({ type: 'sale' }),
      one({ paymentId: null }),
      one({ type: 'sale', result: 'STATUS_MISMATCH' }),
    ];
    expect(of(SETTLED, 'SettlementLinesRecorded', { lines })).toEqual([PAYMENT, PAYMENT]);
    expect(of(SETTLED, 'SettlementLinesCorrected', { corrections: [{ before: one({}), after: null }, { before: null, after: one({}) }] })).toEqual([PAYMENT, PAYMENT]); // prettier-ignore
    expect(of(SETTLED, 'BatchFunded', {})).toEqual([]);
    expect(of('exception-1', 'ExceptionResolved', { paymentId: PAYMENT })).toEqual([PAYMENT]);
    expect(of('exception-1', 'ExceptionResolved', { paymentId: null })).toEqual([]);
    expect(of('exception-1', 'ExceptionOpened', { paymentId: PAYMENT })).toEqual([]);
    expect(of('exception-1', 'ExceptionAssigned', {})).toEqual([]);
    expect(of(`remittance-${PORTAL}`, 'AgencyRemitted', {})).toEqual([]);
  });
});
