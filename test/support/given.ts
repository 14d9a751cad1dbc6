/** Histories of a payment for specs: `given(facts).when(command).then(facts)`, and functions that make these facts and commands. */
import { expect } from '@jest/globals';
import { type Cents, fold, type Reveal, ServiceError } from '#kernel';
// These imports bypass the lib's index.ts and use only pure files. So specs of rules need no web server and load fast enough for mutation testing.
import {
  type Charged,
  type Dispute,
  type Intent,
  type Leg,
  type LegMove,
  type LegTerms,
  type Means,
  type Payment,
  payment as decider,
  type PaymentCommand,
  type PaymentEvent,
  type PaymentTerms,
  paymentView,
  type PaymentView,
  type RequestRefund,
  type RequestVoid,
  type ReversalEnd,
  type ReversalRequest,
  type VisiblePayment,
} from '#payments';

export const PAYMENT = '018f0000-0000-7000-8000-000000000001';
export const ACCOUNT = '018f0000-0000-7000-8000-00000000000a';
export const PORTAL = '018f0000-0000-7000-8000-00000000000b';
export const ATTEMPT = '018f0000-0000-7000-8000-00000000000c';
const LINES = ['018f0000-0000-7000-8000-0000000000d1', '018f0000-0000-7000-8000-0000000000d2', '018f0000-0000-7000-8000-0000000000d3'];

/** The time of every fact that has no time of its own. */
export const AT = '2026-01-05T10:00:00.000Z';
export const LATER = '2026-01-05T11:00:00.000Z';

const accountOf = (leg: Leg) =>
  ({
    gateway: 'simulator',
    merchantAccount: leg === 'fee' ? 'm-fee' : 'm',
    credentialsRef: 'sandbox',
    environment: 'sandbox',
  }) as const;

const legOf = (leg: Leg, principalCents: Cents, feeCents: Cents): LegTerms => ({
  leg,
  principalCents,
  feeCents,
  account: accountOf(leg),
  references: { charge: `${leg}-charge`, reversal: `${leg}-reversal` },
});

const termsOf = (lines: readonly (readonly [amountCents: Cents, feeCents: Cents])[], chargeMode: PaymentTerms['chargeMode']): PaymentTerms => {
  const amountCents = lines.reduce((sum, [amount]) => sum + amount, 0);
  const serviceFeeCents = lines.reduce((sum, [, fee]) => sum + fee, 0);
  return {
    accountId: ACCOUNT,
    portalId: PORTAL,
    referenceId: 'CASE-1',
    amountCents,
    serviceFeeCents,
    feeVersion: 1,
    chargeMode,
    lineItems: lines.map(([amount, fee], index) => ({
      id: LINES[index]!,
      amountCents: amount,
      serviceFeeCents: fee,
      referenceId: `INV-${index + 1}`,
      coding: null,
    })),
    personal: null,
    paymentMethod: { type: 'card', brand: 'visa', last4: '4242' },
    legs:
      chargeMode === 'combined'
        ? [legOf('combined', amountCents, serviceFeeCents)]
        : [legOf('principal', amountCents, 0), ...(serviceFeeCents > 0 ? [legOf('fee', 0, serviceFeeCents)] : [])],
  };
};

/** 100.00 and a fee of 3.25, as two charges: the example of C33. */
const THREE_LINES = [
  [3333, 108],
  [3333, 108],
  [3334, 109],
] as const;
export const separate = termsOf(THREE_LINES, 'separate');
export const combined = termsOf(THREE_LINES, 'combined');
/** 100.00 without a fee. */
export const feeless = termsOf([[10_000, 0]], 'separate');
export const withLines = (amounts: readonly Cents[], chargeMode: PaymentTerms['chargeMode'] = 'separate') =>
  termsOf(
    amounts.map((amount) => [amount, 0] as const),
    chargeMode,
  );

// Facts.

export const initiated = (terms: PaymentTerms = separate, at = AT): PaymentEvent => ({
  type: 'PaymentInitiated',
  at,
  data: { attemptId: ATTEMPT, ...terms, idempotency: null },
});

export const chargeOf = (terms: PaymentTerms) => ({
  confirmationNumber: 'ABCD-EFGH-JK',
  legs: terms.legs.map(({ leg }) => ({ leg, transactionId: `ch_${leg}`, authCode: 'A1', avs: null, cvv: null })),
});
export const created = (terms: PaymentTerms = separate, at = AT): PaymentEvent => ({
  type: 'PaymentCreated',
  at,
  data: { attemptId: ATTEMPT, ...chargeOf(terms) },
});
/** A charge that was approved. */
export const charged = (terms: PaymentTerms = separate): PaymentEvent[] => [initiated(terms), created(terms)];

export const declined: PaymentEvent = {
  type: 'PaymentDeclined',
  at: AT,
  data: { attemptId: ATTEMPT, leg: 'principal', declineCode: 'insufficient_funds', transactionId: 'ch_x', raw: null, avs: 'match', cvv: 'no_match' },
};
export const failed: PaymentEvent = { type: 'PaymentFailed', at: AT, data: { attemptId: ATTEMPT, reason: 'not processed' } };
export const unknown: PaymentEvent = { type: 'PaymentOutcomeUnknown', at: AT, data: { attemptId: ATTEMPT, leg: 'principal', cause: 'timeout' } };
export const fenced = (attemptId = ATTEMPT): PaymentEvent => ({ type: 'ReconciliationStarted', at: AT, data: { attemptId } });
export const abandoned: PaymentEvent = {
  type: 'PaymentAbandoned',
  at: AT,
  data: { attemptId: ATTEMPT, accountId: ACCOUNT, reason: 'the request vanished before it began' },
};
export const settled = (leg: Leg, batchId = 'bat_1'): PaymentEvent => ({
  type: 'PaymentSettled',
  at: AT,
  data: { leg, batchId, closedAt: AT, grossCents: 10_000, feeCents: 30 },
});
export const settlementRejected = (leg: Leg): PaymentEvent => ({ type: 'SettlementRejected', at: AT, data: { leg, batchId: 'bat_1', closedAt: AT } });

export const dispute = (change: Partial<Dispute> = {}): Dispute => ({
  disputeId: '018f0000-0000-7000-8000-0000000000e1',
  status: 'debited',
  stage: 'chargeback',
  reasonCode: '10.4',
  personal: { clear: { reason: 'fraud' } },
  disputedAmountCents: 4_000,
  openedOn: '2026-01-05',
  dueDate: '2026-01-25',
  ...change,
});
export const disputed = (change: Partial<Dispute> = {}): PaymentEvent => ({ type: 'PaymentDisputed', at: AT, data: dispute(change) });

export const referencesOf = (attemptId: string) => (leg: Leg) => ({ void: `${attemptId}-${leg}-void`, refund: `${attemptId}-${leg}-refund` });
export const move = (attemptId: string, leg: Leg, principalCents: Cents, feeCents: Cents, means: Means = 'void'): LegMove => ({
  leg,
  principalCents,
  feeCents,
  means,
  references: referencesOf(attemptId)(leg),
});

/** The lines' shares of the principal, without a fee. */
export const principals = (...cents: readonly Cents[]) => cents.map((one) => [one, 0] as const);

type Asked = Partial<Omit<ReversalRequest, 'attemptId' | 'lines'>> & {
  readonly legs: readonly LegMove[];
  readonly lines: readonly (readonly [Cents, Cents])[];
};
const requestOf = (attemptId: string, { lines, ...asked }: Asked): ReversalRequest & Intent => ({
  attemptId,
  idempotency: null,
  initiatedBy: 'partner',
  personal: null,
  asked: { amountCents: null, includeFee: false },
  completes: null,
  ...asked,
  lines: lines.map(([principalCents, feeCents], index) => ({ lineItemId: LINES[index]!, principalCents, feeCents })),
});
export const refundRequested = (attemptId: string, asked: Asked, at = AT): PaymentEvent => ({
  type: 'RefundRequested',
  at,
  data: requestOf(attemptId, asked),
});
export const voidRequested = (attemptId: string, asked: Asked, at = AT): PaymentEvent => ({
  type: 'VoidRequested',
  at,
  data: requestOf(attemptId, { asked: { amountCents: null, includeFee: true }, ...asked }),
});

export const returned = (attemptId: string, leg: Leg, principalCents: Cents, feeCents: Cents, means: Means = 'void'): PaymentEvent => ({
  type: means === 'void' ? 'PaymentVoided' : leg === 'fee' ? 'FeeRefunded' : 'PaymentRefunded',
  at: AT,
  data: { attemptId, leg, principalCents, feeCents, transactionId: `${attemptId}-${leg}-txn` },
});
export const ended = (
  attemptId: string,
  end: Pick<ReversalEnd, 'outcome'> & Partial<Omit<ReversalEnd, 'attemptId' | 'outcome'>>,
  at = AT,
): PaymentEvent => ({
  type: 'ReversalEnded',
  at,
  data: { attemptId, operation: 'refund', reversalType: null, amountCents: 0, personal: null, initiatedBy: 'partner', ...end },
});
export const acknowledged = (attemptId: string): PaymentEvent => ({ type: 'ReversalAcknowledged', at: AT, data: { attemptId, idempotency: null } });

/** The lines' shares when all money of the payment `separate` is returned. */
const WHOLE = { principal: principals(3333, 3333, 3334), both: THREE_LINES, fee: [108, 108, 109].map((fee) => [0, fee] as const) };
export const wholeLines = WHOLE;

export const voided = (attemptId: string): PaymentEvent[] => [
  voidRequested(attemptId, { legs: [move(attemptId, 'principal', 10_000, 0), move(attemptId, 'fee', 0, 325)], lines: WHOLE.both }),
  returned(attemptId, 'principal', 10_000, 0),
  returned(attemptId, 'fee', 0, 325),
  ended(attemptId, { operation: 'void', outcome: 'completed', reversalType: 'void', amountCents: 10_325 }),
];
/** The principal was voided, the fee was not (C27). */
export const halfVoided = (attemptId: string): PaymentEvent[] => [
  voidRequested(attemptId, { legs: [move(attemptId, 'principal', 10_000, 0), move(attemptId, 'fee', 0, 325)], lines: WHOLE.both }),
  returned(attemptId, 'principal', 10_000, 0),
  ended(attemptId, { operation: 'void', outcome: 'partial', reversalType: 'void', amountCents: 10_000 }),
];
/** The principal was returned, the fee was not: PARTIAL_REFUND_PENDING (C38). */
export const halfRefunded = (attemptId: string, asked: Partial<Omit<ReversalRequest, 'attemptId' | 'lines' | 'legs'>> = {}): PaymentEvent[] => [
  refundRequested(attemptId, {
    legs: [move(attemptId, 'principal', 10_000, 0), move(attemptId, 'fee', 0, 325)],
    lines: WHOLE.both,
    asked: { amountCents: null, includeFee: true },
    ...asked,
  }),
  returned(attemptId, 'principal', 10_000, 0),
  ended(attemptId, { outcome: 'partial', reversalType: 'void', amountCents: 10_000, ...(asked.initiatedBy && { initiatedBy: asked.initiatedBy }) }),
];
/** The whole principal was returned, and the fee was kept. */
export const principalRefunded = (attemptId: string): PaymentEvent[] => [
  refundRequested(attemptId, { legs: [move(attemptId, 'principal', 10_000, 0)], lines: WHOLE.principal }),
  returned(attemptId, 'principal', 10_000, 0),
  ended(attemptId, { outcome: 'completed', reversalType: 'void', amountCents: 10_000 }),
];
/** A part of the principal was returned. */
export const partRefunded = (attemptId: string, lines: readonly Cents[], means: Means = 'void'): PaymentEvent[] => {
  const amountCents = lines.reduce((sum, line) => sum + line, 0);
  return [
    refundRequested(attemptId, {
      legs: [move(attemptId, 'principal', amountCents, 0, means)],
      lines: lines.map((line) => [line, 0] as const),
      asked: { amountCents, includeFee: false },
    }),
    returned(attemptId, 'principal', amountCents, 0, means),
    ended(attemptId, { outcome: 'completed', reversalType: means, amountCents }),
  ];
};

// Commands.

export const requestVoid = (attemptId: string, change: Partial<RequestVoid> = {}): RequestVoid => ({
  type: 'RequestVoid',
  at: LATER,
  attemptId,
  idempotency: null,
  initiatedBy: 'partner',
  personal: null,
  references: referencesOf(attemptId),
  ...change,
});
/** By default the gateway can void a part of a charge and cannot refund before settlement, like the simulator. */
export const requestRefund = (attemptId: string, change: Partial<RequestRefund> = {}): RequestRefund => ({
  type: 'RequestRefund',
  at: LATER,
  attemptId,
  idempotency: null,
  initiatedBy: 'partner',
  personal: null,
  references: referencesOf(attemptId),
  amountCents: null,
  includeFee: false,
  capabilities: () => ({ partialVoid: true, refundUnsettled: false }),
  ...change,
});

// Telling.

export const stateOf = (...facts: readonly PaymentEvent[]): Payment => fold(decider, facts);
export const visible = (...facts: readonly PaymentEvent[]): VisiblePayment => {
  const state = stateOf(...facts);
  if (state.phase === 'none' || state.phase === 'abandoned') throw new Error(`no payment: ${state.phase}`);
  return state;
};
export const chargedState = (...facts: readonly PaymentEvent[]): Charged => {
  const state = stateOf(...facts);
  if (state.phase !== 'charged') throw new Error(`not charged: ${state.phase}`);
  return state;
};
export const viewOf = (...facts: readonly PaymentEvent[]): PaymentView => paymentView(PAYMENT, visible(...facts), IN_CLEAR);

/** Shows texts that stand in clear. A box cannot be opened with it. */
export const IN_CLEAR: Reveal = {
  content: (personal) => (personal !== null && 'clear' in personal ? personal.clear : null),
  erasedAt: () => null,
};

const atLater = (event: PaymentEvent): PaymentEvent => ({ ...event, at: LATER });

/** The resulting facts have the time of the command. The functions above make facts with the time AT, so expected facts get the time LATER here. */
export const given = (...facts: readonly PaymentEvent[]) => ({
  when: (command: PaymentCommand) => {
    const decide = () => decider.decide(stateOf(...facts), command);
    return {
      then: (...expected: readonly PaymentEvent[]) => {
        const decided = decide();
        expect(decided).toEqual(expected.map(atLater));
        // The resulting events must fold. Otherwise the stream could not be read.
        fold(decider, [...facts, ...decided]);
      },
      thenNothing: () => expect(decide()).toEqual([]),
      thenRefused: (code: string, message: RegExp = /./, details: Readonly<Record<string, unknown>> = {}) => {
        let error: unknown;
        try {
          decide();
        } catch (thrown) {
          error = thrown;
        }
        expect(error).toBeInstanceOf(ServiceError);
        const { code: was, message: said, details: told } = error as ServiceError;
        expect({ code: was, message: said, ...told }).toEqual({ code, message: expect.stringMatching(message), ...details });
      },
      /** The command must fail with an internal error and not with a refusal. */
      thenFails: (message: RegExp) => {
        expect(decide).toThrow(message);
        expect(decide).not.toThrow(ServiceError);
      },
    };
  },
});
