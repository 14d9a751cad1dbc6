/**
 * Unit tests of settlement batches: how a line is judged against its payment (C23, C24, C29, ledger-audit 2.3), and how a batch is folded from its
 * stream.
 */
import { describe, expect, test } from '@jest/globals';
import { fold } from '#kernel';
import { payment as decider, type PaymentEvent, type SettlementRecord } from '#payments';
import {
  emptyBatch,
  evolveBatch,
  isSettledLine,
  isSettledSale,
  isSettlementStream,
  judgeLine,
  judgeSentRefund,
  type LineCorrection,
  type RecordedLine,
  type Registered,
  type SettlementEvent,
  batchStreamId,
  unexplainedCents,
  linesOf,
} from './batch.js';
import {
  AT,
  ATTEMPT,
  charged,
  combined,
  declined,
  disputed,
  ended,
  fenced,
  initiated,
  LATER,
  move,
  principals,
  refundRequested,
  returned,
  settled,
  settlementRejected,
  unknown,
  voidRequested,
  wholeLines,
} from '../../test/support/given.js';

const NOW = Date.parse(AT) + 60_000;
const HOUR = 3_600_000;
const BATCH = { merchantAccount: 'm', batchId: 'bat_1' };
const line = (change: Partial<SettlementRecord> = {}): SettlementRecord => ({
  transactionId: 'ch_principal',
  type: 'sale',
  accepted: true,
  grossCents: 10_000,
  feeCents: 230,
  netCents: 9_770,
  ...change,
});
const registered = (change: Partial<Registered> = {}): Registered => ({
  paymentId: 'p',
  leg: 'principal',
  op: 'charge',
  attemptId: 'a',
  merchantAccount: 'm',
  settledBatchId: null,
  ...change,
});
const judge = (facts: readonly PaymentEvent[], change: Partial<SettlementRecord> = {}, found: Partial<Registered> = {}, now = NOW) =>
  judgeLine(line(change), BATCH, registered(found), fold(decider, facts), now);

/** `asked`: a request to return 2,500 cents of the principal. `cameBack`: the same request and its end. The money came back by `means`. */
const asked = (means: 'void' | 'refund') =>
  refundRequested('R', { legs: [move('R', 'principal', 2_500, 0, means)], lines: principals(833, 833, 834) });
const cameBack = (means: 'void' | 'refund') => [
  asked(means),
  returned('R', 'principal', 2_500, 0, means),
  ended('R', { outcome: 'completed', reversalType: means, amountCents: 2_500 }),
];

describe('a line that names a refund for an exception (C75)', () => {
  const found = { leg: 'combined', op: 'refund', attemptId: 'a', merchantAccount: 'm', settledBatchId: null } as const;
  const refund = (transactionId: string | null) =>
    ({ attemptId: 'a', amountCents: 10_000, requestedAt: AT, transactionId }) as Parameters<typeof judgeSentRefund>[3];
  const judge = (change: Partial<SettlementRecord>, transactionId: string | null = 'rf_1', now = NOW) => {
    const judgement = judgeSentRefund(
      line({ transactionId: 'rf_1', type: 'refund', grossCents: -10_000, ...change }),
      BATCH,
      found,
      refund(transactionId),
      now,
    );
    return judgement === 'wait' ? 'wait' : judgement.result;
  };

  test.each([
    ['the refund', {}, 'MATCHED'],
    ['another amount', { grossCents: -9_000 }, 'AMOUNT_MISMATCH'],
    ['refused by the processor', { accepted: false }, 'STATUS_MISMATCH'],
    ['another transaction', { transactionId: 'rf_2' }, 'STATUS_MISMATCH'],
    ['a fee of the refund', { type: 'fee', grossCents: 0, feeCents: 30, netCents: -30 }, 'MATCHED'],
    ['an adjustment', { type: 'adjustment', grossCents: -10 }, 'MISSING_HERE'],
    ['a sale under its reference', { type: 'sale', grossCents: 10_000 }, 'DUPLICATE_AT_GATEWAY'],
    ['a refund that failed later', { type: 'refund_failure', grossCents: 10_000, feeCents: 0, netCents: 10_000 }, 'REFUND_FAILED'],
  ] as const)('%s is %s', (_, change, result) => expect(judge(change)).toBe(result));

  test('waits an hour for the outcome of the refund', () => {
    expect(judge({}, null)).toBe('wait');
    expect(judge({}, null, NOW + HOUR)).toBe('STATUS_MISMATCH');
  });
});

describe('a sale', () => {
  const ok = { result: 'MATCHED', expectedCents: null, settles: true };
  test('of a charge matches, and settles its leg', () => {
    expect(judge(charged())).toEqual(ok);
    expect(judge(charged(), { transactionId: 'ch_fee', grossCents: 325 }, { leg: 'fee', merchantAccount: 'm' })).toEqual(ok);
    expect(judge(charged(combined), { transactionId: 'ch_combined', grossCents: 10_325 }, { leg: 'combined' })).toEqual(ok);
  });
  test('of more or less does not, and settles its leg all the same', () => {
    for (const grossCents of [9_999, 10_001])
      expect(judge(charged(), { grossCents })).toEqual({ result: 'AMOUNT_MISMATCH', expectedCents: 10_000, settles: true });
  });
  test('is expected without the voided part, and with the refunded one', () => {
    expect(judge([...charged(), ...cameBack('void')], { grossCents: 7_500 })).toEqual(ok);
    expect(judge([...charged(), ...cameBack('void')])).toMatchObject({ result: 'AMOUNT_MISMATCH', expectedCents: 7_500 });
    expect(judge([...charged(), ...cameBack('refund')])).toEqual(ok);
    // A void of a part of the principal does not change the expected fee.
    expect(judge([...charged(), ...cameBack('void')], { transactionId: 'ch_fee', grossCents: 325 }, { leg: 'fee' })).toEqual(ok);
  });
  test('of a leg that was voided whole is a contradiction', () => {
    const voided = [
      voidRequested('V', { legs: [move('V', 'principal', 10_000, 0), move('V', 'fee', 0, 325)], lines: wholeLines.both }),
      returned('V', 'principal', 10_000, 0),
      returned('V', 'fee', 0, 325),
      ended('V', { outcome: 'completed', reversalType: 'void', amountCents: 10_325 }),
    ];
    expect(judge([...charged(), ...voided])).toEqual({ result: 'STATUS_MISMATCH', expectedCents: 0, settles: false });
  });
  test('of another transaction under our reference, or of a refund’s, was paid twice', () => {
    const twice = { result: 'DUPLICATE_AT_GATEWAY', expectedCents: null, settles: false };
    expect(judge(charged(), { transactionId: 'ch_other' })).toEqual(twice);
    expect(judge(charged(), {}, { op: 'refund' })).toEqual(twice);
  });
  test('again in another batch was paid twice, in the same batch it is the same line, read again', () => {
    const before = [...charged(), settled('principal', 'bat_0')];
    expect(judge(before)).toMatchObject({ result: 'DUPLICATE_AT_GATEWAY', settles: false });
    // The register's batch does not count, since the register may lag behind a correction.
    expect(judge(charged(), {}, { settledBatchId: 'bat_0' })).toEqual(ok);
    expect(judge([...charged(), settled('principal', 'bat_1')])).toEqual(ok);
    expect(judge(charged(), {}, { settledBatchId: 'bat_1' })).toEqual(ok);
  });
  test('while a reversal is under way waits for its end, an hour at most; not where the leg has settled already', () => {
    const open = [...charged(), asked('void')];
    expect(judge(open)).toBe('wait');
    expect(judge(open, {}, {}, Date.parse(AT) + HOUR - 1)).toBe('wait');
    expect(judge(open, {}, {}, Date.parse(AT) + HOUR)).toEqual(ok);
    expect(judge([...charged(), settled('principal', 'bat_1'), asked('refund')])).toEqual(ok);
  });
});

describe('for any line', () => {
  test('on another merchant account than was charged', () =>
    expect(judge(charged(), {}, { merchantAccount: 'other' })).toEqual({ result: 'WRONG_ACCOUNT', expectedCents: null, settles: false }));
  test('a payment that is being charged waits; unknown and failed are contradictions (C29)', () => {
    expect(judge([initiated()])).toBe('wait');
    for (const outcome of [unknown, declined])
      expect(judge([initiated(), outcome])).toEqual({ result: 'STATUS_MISMATCH', expectedCents: 0, settles: false });
  });
  test('a leg that the payment does not have', () =>
    expect(judge(charged(), {}, { leg: 'combined' })).toMatchObject({ result: 'STATUS_MISMATCH', settles: false }));
});

describe('a refund', () => {
  const refund = { type: 'refund', transactionId: 'R-principal-txn', grossCents: -2_500 } as const;
  test('that was made here matches by transaction and amount', () => {
    expect(judge([...charged(), ...cameBack('refund')], refund)).toEqual({ result: 'MATCHED', expectedCents: null, settles: false });
    expect(judge([...charged(), ...cameBack('refund')], { ...refund, grossCents: -2_499 })).toEqual({
      result: 'AMOUNT_MISMATCH',
      expectedCents: -2_500,
      settles: false,
    });
  });
  test('that was not made here, or was a void, or of another leg, is a contradiction', () => {
    for (const facts of [charged(), [...charged(), ...cameBack('void')]])
      expect(judge(facts, refund)).toEqual({ result: 'STATUS_MISMATCH', expectedCents: 0, settles: false });
    expect(judge([...charged(), ...cameBack('refund')], { ...refund, transactionId: 'rf_other' })).toMatchObject({ result: 'STATUS_MISMATCH' });
    expect(judge([...charged(), ...cameBack('refund')], refund, { leg: 'fee' })).toMatchObject({ result: 'STATUS_MISMATCH' });
  });
  test('that is under way waits, an hour at most', () => {
    expect(judge([...charged(), asked('refund')], refund)).toBe('wait');
    expect(judge([...charged(), asked('refund')], refund, {}, NOW + HOUR)).toMatchObject({ result: 'STATUS_MISMATCH' });
  });
  test('in a second batch was made twice', () => {
    const facts = [...charged(), ...cameBack('refund')];
    expect(judge(facts, refund, { settledBatchId: 'bat_0' })).toMatchObject({ result: 'DUPLICATE_AT_GATEWAY' });
    expect(judge(facts, refund, { settledBatchId: 'bat_1' })).toMatchObject({ result: 'MATCHED' });
  });
});

describe('a charge that was undone by a refund, so that its payment was never charged (R21)', () => {
  const takenBack = { leg: 'combined', principalCents: 10_000, feeCents: 325, transactionId: 'rf_1' } as const;
  const undone = { means: 'refund', chargeTransactionId: 'ch_combined' } as const;
  const byRecovery: PaymentEvent[] = [
    initiated(combined),
    unknown,
    fenced(),
    { type: 'PaymentVoided', at: AT, data: { attemptId: ATTEMPT, ...takenBack, undone } },
  ];
  const byRequest: PaymentEvent[] = [
    initiated(combined),
    {
      type: 'PaymentFailed',
      at: AT,
      data: {
        attemptId: ATTEMPT,
        reason: 'not processed',
        takenBack: [{ leg: 'combined', amountCents: 10_325, transactionId: 'ch_combined', voidTransactionId: 'rf_1', means: 'refund' }],
      },
    },
  ];
  const sale = { transactionId: 'ch_combined', grossCents: 10_325 } as const;
  const refund = { type: 'refund', transactionId: 'rf_1', grossCents: -10_325, feeCents: 0, netCents: -10_325 } as const;
  const found = { leg: 'combined', op: 'charge' } as const;
  const matched = { result: 'MATCHED', expectedCents: null, settles: false, undone: true };
  const contradiction = { result: 'STATUS_MISMATCH', expectedCents: 0, settles: false };

  test.each([
    ['recovery', byRecovery],
    ['its own request', byRequest],
  ])('by %s: sale, refund and fee match, and nothing settles the payment', (_, facts) => {
    expect(judge(facts, sale, found)).toEqual(matched);
    expect(judge(facts, refund, found)).toEqual(matched);
    expect(judge(facts, { ...sale, type: 'fee', grossCents: 0, feeCents: 30, netCents: -30 }, found)).toEqual(matched);
  });
  test('another amount is a mismatch, which settles with the undone charge', () => {
    expect(judge(byRecovery, { ...sale, grossCents: 10_000 }, found)).toEqual({ ...matched, result: 'AMOUNT_MISMATCH', expectedCents: 10_325 });
    expect(judge(byRecovery, { ...refund, grossCents: -10_000 }, found)).toEqual({ ...matched, result: 'AMOUNT_MISMATCH', expectedCents: -10_325 });
  });
  test('another transaction, another leg, or one of both rejected is a contradiction', () => {
    for (const change of [
      { ...sale, transactionId: 'ch_other' },
      { ...refund, transactionId: 'rf_other' },
      { ...sale, accepted: false },
      { ...refund, accepted: false },
      { ...sale, type: 'chargeback' },
    ] as const)
      expect(judge(byRecovery, change, found)).toEqual(contradiction);
    expect(judge(byRecovery, sale, { ...found, leg: 'fee' })).toEqual(contradiction);
    // Without the refund, no transaction of a voided payment settles.
    const voided: PaymentEvent = { type: 'PaymentVoided', at: AT, data: { attemptId: ATTEMPT, ...takenBack } };
    expect(judge([initiated(combined), unknown, fenced(), voided], sale, found)).toEqual(contradiction);
  });
  test('in a second batch it was made twice', () => {
    for (const line_ of [sale, refund]) {
      expect(judge(byRecovery, line_, { ...found, settledBatchId: 'bat_0' })).toMatchObject({ result: 'DUPLICATE_AT_GATEWAY' });
      expect(judge(byRecovery, line_, { ...found, settledBatchId: 'bat_1' })).toEqual(matched);
    }
  });
  test('its recorded sale is no sale of a payment, but settles its own transaction, and nothing of it is unexplained', () => {
    const recorded: RecordedLine = { ...line(sale), ref: null, number: 0, result: 'MATCHED', paymentId: 'p', leg: 'combined', expectedCents: null, undone: true }; // prettier-ignore
    expect([isSettledSale(recorded), isSettledLine(recorded), unexplainedCents(recorded)]).toEqual([false, true, 0]);
  });
});

describe('a refund that fails after it was settled', () => {
  const failure = { type: 'refund_failure', transactionId: 'R-principal-txn', grossCents: 2_500, feeCents: 0, netCents: 2_500 } as const;
  test('is an exception of its payment, in any state', () => {
    const facts = [charged(), [...charged(), ...cameBack('refund')], [initiated(), declined], [initiated(), unknown]];
    for (const one of facts) expect(judge(one, failure)).toEqual({ result: 'REFUND_FAILED', expectedCents: 0, settles: false });
  });
  test('has all its cents in suspense', () => {
    const recorded: RecordedLine = { ...line(failure), ref: null, number: 0, result: 'REFUND_FAILED', paymentId: 'p', leg: 'principal', expectedCents: 0 }; // prettier-ignore
    expect([unexplainedCents(recorded), isSettledLine(recorded)]).toEqual([2_500, false]);
  });
});

describe('other lines', () => {
  const open = [...charged(), disputed()];
  const recovered = [...charged(), disputed({ status: 'recovered' })];
  test.each([
    ['a chargeback of what is disputed', 'chargeback', -4_000, open, 'MATCHED', null],
    ['a chargeback of something else', 'chargeback', -3_999, open, 'AMOUNT_MISMATCH', -4_000],
    ['a chargeback without a dispute', 'chargeback', -4_000, charged(), 'STATUS_MISMATCH', 0],
    ['a chargeback whose dispute was recovered', 'chargeback', -4_000, recovered, 'STATUS_MISMATCH', 0],
    ['a chargeback that comes back with its dispute recovered', 'chargeback_reversal', 4_000, recovered, 'MATCHED', null],
    ['a chargeback that comes back in part', 'chargeback_reversal', 3_999, recovered, 'AMOUNT_MISMATCH', 4_000],
    ['a chargeback that comes back too early', 'chargeback_reversal', 4_000, open, 'STATUS_MISMATCH', 0],
    ['a fee', 'fee', -10, charged(), 'MATCHED', null],
    ['an adjustment', 'adjustment', 10, charged(), 'MISSING_HERE', null],
  ] as const)('%s', (_, type, grossCents, facts, result, expectedCents) => {
    expect(judge(facts, { type, grossCents })).toEqual({ result, expectedCents, settles: false });
  });
  test('a sale that was rejected before and is accepted now is a contradiction; rejected again it is the same', () => {
    const before = [...charged(), settlementRejected('principal')];
    expect(judge(before)).toEqual({ result: 'STATUS_MISMATCH', expectedCents: 0, settles: false });
    expect(judge(before, { accepted: false })).toMatchObject({ result: 'MATCHED' });
  });
  test('a refund that came back rejected is a contradiction', () => {
    const refund = { type: 'refund', transactionId: 'R-principal-txn', grossCents: -2_500, accepted: false } as const;
    expect(judge([...charged(), ...cameBack('refund')], refund)).toEqual({ result: 'STATUS_MISMATCH', expectedCents: -2_500, settles: false });
  });
});

describe('the unexplained part of a recorded line', () => {
  const recorded = (change: Partial<RecordedLine>): RecordedLine => ({
    ...line(),
    ref: null,
    number: 0,
    result: 'MATCHED',
    paymentId: null,
    leg: null,
    expectedCents: null,
    ...change,
  });
  test.each<[string, Partial<RecordedLine>, number]>([
    ['a line that fits', {}, 0],
    ['a sale with another amount: the payment settles with it', { result: 'AMOUNT_MISMATCH', expectedCents: 9_000 }, 0],
    ['all of a sale that belongs nowhere', { result: 'MISSING_HERE' }, 10_000],
    ['all of a sale that was paid twice', { result: 'DUPLICATE_AT_GATEWAY' }, 10_000],
    ['all of a sale on another account', { result: 'WRONG_ACCOUNT' }, 10_000],
    ['all of a refund that was not made here', { type: 'refund', result: 'STATUS_MISMATCH', grossCents: -2_500, expectedCents: 0 }, -2_500],
    ['nothing of a line that was not accepted', { result: 'MISSING_HERE', accepted: false }, 0],
    ['a chargeback that fits', { type: 'chargeback', grossCents: -4_000 }, 0],
    ['what a chargeback differs by', { type: 'chargeback', result: 'AMOUNT_MISMATCH', grossCents: -3_999, expectedCents: -4_000 }, 1],
    [
      'what a chargeback that comes back differs by',
      { type: 'chargeback_reversal', result: 'AMOUNT_MISMATCH', grossCents: 3_999, expectedCents: 4_000 },
      -1,
    ],
    ['a refund with another amount', { type: 'refund', result: 'AMOUNT_MISMATCH', grossCents: -2_499, expectedCents: -2_500 }, 0],
    ['a fee', { type: 'fee', grossCents: 0, feeCents: 10, netCents: -10 }, 0],
    ['the net of an adjustment, matched or not', { type: 'adjustment', grossCents: 0, feeCents: 5, netCents: -5 }, -5],
  ])('%s', (_, change, cents) => expect(unexplainedCents(recorded(change))).toBe(cents));

  test('a sale settles its payment, and so does a refund its line, with our amount or another; nothing else does', () => {
    const types = ['sale', 'refund', 'chargeback', 'chargeback_reversal', 'fee', 'adjustment'] as const;
    const results = ['MATCHED', 'AMOUNT_MISMATCH', 'MISSING_HERE', 'STATUS_MISMATCH', 'DUPLICATE_AT_GATEWAY', 'WRONG_ACCOUNT'] as const;
    const those = (holds: (one: RecordedLine) => boolean) =>
      types.flatMap((type) => results.filter((result) => holds(recorded({ type, result }))).map((result) => `${type} ${result}`));
    expect(those(isSettledSale)).toEqual(['sale MATCHED', 'sale AMOUNT_MISMATCH']);
    expect(those(isSettledLine)).toEqual(['sale MATCHED', 'sale AMOUNT_MISMATCH', 'refund MATCHED', 'refund AMOUNT_MISMATCH']);
  });
});

describe('a batch', () => {
  const name = { gateway: 'simulator', merchantAccount: 'm', batchId: 'bat_1' };
  const recorded = (number: number): RecordedLine => ({
    ...line(),
    ref: null,
    number,
    result: 'MATCHED',
    paymentId: null,
    leg: null,
    expectedCents: null,
  });
  const lines = (...numbers: number[]): SettlementEvent => ({
    type: 'SettlementLinesRecorded',
    at: AT,
    data: { ...name, closedAt: AT, lines: numbers.map(recorded) },
  });
  const complete = (lineCount: number): SettlementEvent => ({
    type: 'SettlementBatchRecorded',
    at: AT,
    data: { ...name, closedAt: AT, fundedOn: null, lineCount, grossCents: 0, feeCents: 0, netCents: 0, listed: true },
  });
  const funded: SettlementEvent = { type: 'BatchFunded', at: AT, data: { ...name, fundedOn: '2026-01-06', netCents: 0 } };
  const after = (...events: SettlementEvent[]) => events.reduce(evolveBatch, emptyBatch);

  test('has a stream that no other batch shares, with any names', () => {
    const stream = (merchantAccount: string, batchId: string) => batchStreamId({ gateway: 'simulator', merchantAccount, batchId });
    expect(stream('agency-1', '2026-11')).not.toBe(stream('agency', '1-2026-11'));
    expect(stream('a%2Db', 'c')).not.toBe(stream('a-b', 'c'));
    expect(stream('agency-1', '2026-11')).toBe('simulator-agency%2D1-2026%2D11');
    for (const other of ['settlement-file-abc', 'payment-1', 'settlements-a-b-c', 'payment-a-b-c', 'settlement-a-b-c-d'])
      expect(isSettlementStream(other)).toBe(false);
    expect(isSettlementStream(`settlement-${stream('agency-1', '2026-11')}`)).toBe(true);
  });
  test('reported by a file it may be listed by the interface once, after its end, with its day of funding if that was missing', () => {
    const told = (fundedOn: string | null): SettlementEvent => {
      const end = complete(1);
      return { ...end, data: { ...end.data, listed: false, fundedOn } } as SettlementEvent;
    };
    const listed: SettlementEvent = {
      type: 'SettlementBatchListed',
      at: AT,
      data: { ...name, closedAt: AT, fundedOn: '2026-01-06', lineCount: 1, grossCents: 0, feeCents: 0, netCents: 0, differing: 0 },
    };
    expect(after(lines(0), told(null))).toMatchObject({ listed: false, fundedOn: null });
    expect(after(lines(0), told(null), listed)).toMatchObject({ listed: true, fundedOn: '2026-01-06' });
    expect(after(lines(0), told('2026-01-05'), listed)).toMatchObject({ fundedOn: '2026-01-05' });
    expect(after(lines(0), complete(1))).toMatchObject({ listed: true });
    for (const events of [
      [lines(0), listed],
      [lines(0), complete(1), listed],
      [lines(0), told(null), listed, listed],
    ])
      expect(() => after(...events)).toThrow(/impossible history/);
  });
  describe('corrected after its end', () => {
    const corrected = (corrections: readonly LineCorrection[], fileId: string | null = 'f', fundedOn: string | null = null): SettlementEvent => ({
      type: 'SettlementLinesCorrected',
      at: AT,
      data: { ...name, closedAt: AT, fundedOn, fileId, reference: null, corrections },
    });
    const whole = [lines(0, 1, 2), complete(3)];
    const now = { ...recorded(1), grossCents: 9_000 };
    test('a line is replaced, taken away or added, and the lines stay in their order', () => {
      const of = (...corrections: LineCorrection[]) => linesOf(after(...whole, corrected(corrections)));
      expect(of({ before: recorded(1), after: now })).toEqual([recorded(0), now, recorded(2)]);
      expect(of({ before: recorded(1), after: null })).toEqual([recorded(0), recorded(2)]);
      expect(of({ before: recorded(0), after: { ...recorded(5) } }, { before: null, after: recorded(4) }).map(({ number }) => number)).toEqual([1, 2, 4, 5]); // prettier-ignore
      const twice = after(...whole, corrected([{ before: recorded(1), after: null }]), corrected([{ before: null, after: now }]));
      expect(linesOf(twice)).toEqual([recorded(0), now, recorded(2)]);
      expect(twice.lineCount).toBe(3);
    });
    test('by a file or by the interface; a line of a file counts from then on; the day of funding is the newest known', () => {
      expect(after(...whole)).toMatchObject({ correctedByFile: false, fundedOn: null });
      expect(after(...whole, corrected([], null, '2026-01-07'))).toMatchObject({ correctedByFile: false, fundedOn: '2026-01-07' });
      expect(after(...whole, corrected([], 'f', '2026-01-07'))).toMatchObject({ correctedByFile: true });
      expect(after(...whole, corrected([], 'f', '2026-01-07'), corrected([], null))).toMatchObject({ correctedByFile: true, fundedOn: null });
    });
    test('not before its end, nor a line that is not there', () => {
      for (const events of [
        [lines(0), corrected([])],
        [...whole, corrected([{ before: recorded(3), after: null }])],
      ])
        expect(() => after(...events)).toThrow(/impossible history/);
    });
  });
  test('is closed when its first lines say so, until its end says otherwise', () => {
    const closed = (event: SettlementEvent, closedAt: string) => ({ ...event, data: { ...event.data, closedAt } }) as SettlementEvent;
    expect(emptyBatch.closedAt).toBeNull();
    expect(after(lines(0), closed(lines(1), LATER)).closedAt).toBe(AT);
    expect(after(lines(0), closed(complete(1), LATER)).closedAt).toBe(LATER);
  });
  test('its lines in order, then its end, then its funding', () => {
    expect(after(lines(0, 1), lines(2))).toMatchObject({ complete: false, funded: false });
    expect(linesOf(after(lines(0, 1), lines(2))).map(({ number }) => number)).toEqual([0, 1, 2]);
    expect(after(lines(0), complete(1))).toMatchObject({ complete: true, funded: false });
    expect(after(lines(0), complete(1), funded)).toMatchObject({ complete: true, funded: true });
  });
  test.each([
    ['a line that was passed over', [lines(0, 2)]],
    ['a line twice', [lines(0), lines(0)]],
    ['a line after the end', [lines(0), complete(1), lines(1)]],
    ['an end of other lines', [lines(0), complete(2)]],
    ['a second end', [lines(0), complete(1), complete(1)]],
    ['funding before the end', [lines(0), funded]],
    ['funding twice', [lines(0), complete(1), funded, funded]],
  ])('%s cannot be', (_, events) => expect(() => after(...events)).toThrow(/impossible history/));
});
