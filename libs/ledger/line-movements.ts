/**
 * The line-item register as pure functions: the movements of money that follow from each event, by the line of the payment that they belong to.
 *
 * This is a second fold over the same events as the journal. It shares no code with it, so a fault in one of them breaks the tie between both
 * (docs/decisions/0052-register-as-a-second-fold.md). Each entry of the journal has its movements here: line-postings.ts says which.
 *
 * Order of this file: movements; shares of cents; payments; settlement; decisions of staff.
 */
import { type Cents, unreachable } from '#kernel';
import type { ApprovedCharge, Coding, Dispute, Initiator, Leg, LegReturned, PaymentEvent } from '#payments';
import type { ExceptionEvent, RecordedLine, SettlementEvent } from '#settlement';
import type { ManualAdjustment } from './adjustment.js';
import { columnOf, portalIn } from './line-postings.js';
import type { RemittanceEvent } from './remittance.js';

export type Family = 'owed' | 'in_transit' | 'disputes' | 'suspense' | 'other';

/** Each movement, with its family. */
export const FAMILIES = {
  charge: 'owed',
  void: 'owed',
  refund: 'owed',
  rejected: 'owed',
  settled: 'in_transit',
  settlement_withdrawn: 'in_transit',
  refund_settled: 'in_transit',
  undone_settled: 'in_transit',
  dispute_opened: 'disputes',
  dispute_recovered: 'disputes',
  dispute_reopened: 'disputes',
  dispute_excess: 'disputes',
  dispute_lost: 'owed',
  dispute_won_back: 'owed',
  processor_fee: 'in_transit',
  dispute_fee: 'in_transit',
  unexplained: 'in_transit',
  funded: 'in_transit',
  adopted: 'owed',
  suspense_resolved: 'suspense',
  remitted: 'owed',
} as const satisfies Readonly<Record<string, Family>>;

/** The rule of the books that a movement follows from. Service fees and processor fees may have a rule of their own (line-postings.ts). */
export type LineRule =
  | 'R1' | 'R3' | 'R4' | "R4'" | 'R5' | 'R6' | "R6'" | 'R7' | 'R9' | 'R11' | 'R12' | "R12'" | "R12''" | 'R13' | 'R14' | 'R15' | 'R16' | 'R17' | 'R20' | 'R21' | 'R22'; // prettier-ignore

/** A row of the register. Cents are positive towards agency and operator. */
export interface Movement {
  readonly movement: keyof typeof FAMILIES | 'adjustment';
  readonly family: Family;
  readonly rule: LineRule;
  readonly paymentId: string | null;
  /** null: the movement belongs to no payment that is known here. */
  readonly of: MovementOf | null;
  /** Index of the payment's line. null: no line explains the movement. */
  readonly line: number | null;
  readonly leg: Leg | null;
  readonly principalCents: Cents;
  readonly feeCents: Cents;
  readonly processorFeeCents: Cents;
  readonly portalId: string | null;
  readonly gateway: string | null;
  readonly merchantAccount: string | null;
  /** Only of an adjustment: its account in the books. */
  readonly ledgerAccount: string | null;
  readonly transactionId: string | null;
  readonly authCode: string | null;
  readonly batchId: string | null;
  readonly initiatedBy: string;
  /** RFC 3339, as the event has it. */
  readonly effectiveAt: string;
}

/** The fields that all movements of a payment have in common. */
export type MovementOf = Pick<PaymentLines, 'accountId' | 'referenceId' | 'brand' | 'last4' | 'confirmationNumber' | 'lines'>;

/** The fields that a movement may lack. */
const NOTHING = {
  paymentId: null, of: null, line: null, leg: null, principalCents: 0, feeCents: 0, processorFeeCents: 0, portalId: null, gateway: null,
  merchantAccount: null, ledgerAccount: null, transactionId: null, authCode: null, batchId: null,
} as const; // prettier-ignore

const moves = ({ principalCents, feeCents, processorFeeCents }: Movement): boolean =>
  principalCents !== 0 || feeCents !== 0 || processorFeeCents !== 0;

// ------------------------------------------------------------------------------------------------------------------------------------
// Shares of cents.

/** The cents of one line: principal and service fee. */
export type LineCents = readonly [principalCents: Cents, feeCents: Cents];

const sumOf = (cents: readonly Cents[]): Cents => cents.reduce((sum, one) => sum + one, 0);
const bothOf = ([principal, fee]: LineCents): Cents => principal + fee;
/** Without negative zeros. */
const signed = (sign: 1 | -1, cents: Cents): Cents => (sign === 1 ? cents : 0 - cents);

/**
 * Shares out cents by largest remainder over weights that are not negative. Among equal remainders the lower index is first. If all weights are 0,
 * nothing is shared.
 */
export const shareOut = (cents: Cents, weights: readonly Cents[]): Cents[] => {
  if (cents < 0) return shareOut(0 - cents, weights).map((share) => 0 - share);
  const all = sumOf(weights);
  if (all === 0) return weights.map(() => 0);
  const parts = weights.map((weight) => {
    const exact = BigInt(cents) * BigInt(weight);
    return { cents: Number(exact / BigInt(all)), rest: Number(exact % BigInt(all)) };
  });
  const missing = cents - sumOf(parts.map((part) => part.cents));
  // The sort is stable, so equal remainders stay in the order of their index.
  const byRest = [...parts].sort((one, other) => other.rest - one.rest);
  for (const part of byRest.slice(0, missing)) part.cents += 1;
  return parts.map((part) => part.cents);
};

/** A share of settled cents. `line` null: the part that no line explains. */
export type Share = readonly [line: number | null, principalCents: Cents, feeCents: Cents, processorFeeCents: Cents];

/**
 * Shares settled cents and the processor's fee over lines that have these cents. Lines explain at most their own cents. `sign`: −1 for a refund,
 * whose cents are negative.
 */
const spread = (cents: Cents, processorFeeCents: Cents, lines: readonly LineCents[], sign: 1 | -1): Share[] => {
  const weights = lines.map(bothOf);
  const explained = Math.max(0, Math.min(signed(sign, cents), sumOf(weights)));
  const ofLines = shareOut(explained, weights);
  const ofFee = shareOut(processorFeeCents, weights);
  const shares = lines.map((line, index): Share => {
    const [principal, fee] = shareOut(ofLines[index]!, line) as [Cents, Cents];
    return [index, signed(sign, principal), signed(sign, fee), ofFee[index]!];
  });
  return [...shares, [null, cents - signed(sign, explained), 0, processorFeeCents - sumOf(ofFee)]];
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Payments. The state is plain JSON, since the projection stores it.

/** A line of a payment, as its movements show it. */
export interface PaymentLine {
  readonly id: string;
  readonly cents: LineCents;
  readonly referenceId: string;
  readonly coding: Coding | null;
}

export interface PaymentLines {
  readonly accountId: string;
  readonly portalId: string;
  readonly referenceId: string | null;
  readonly brand: string;
  readonly last4: string;
  readonly initiatedBy: string;
  /** null: nothing was charged. */
  readonly confirmationNumber: string | null;
  readonly lines: readonly PaymentLine[];
  readonly legs: readonly LegLines[];
  /** The lines of each refund or void that has not ended. */
  readonly attempts: Readonly<Record<string, AttemptLines>>;
  /** For each transaction of a refund: the cents that it gave back, by line. */
  readonly refunds: Readonly<Record<string, readonly LineCents[]>>;
  readonly disputes: Readonly<Record<string, DisputeLines>>;
}

interface LegLines {
  readonly leg: Leg;
  readonly gateway: string;
  readonly merchantAccount: string;
  readonly transactionId: string | null;
  readonly authCode: string | null;
  readonly principalCents: Cents;
  readonly feeCents: Cents;
  /** The cents of each line that this leg charged, less voids. */
  readonly left: readonly LineCents[];
  /** The shares in the batch that settled the leg. null: it is in no batch. */
  readonly settled: readonly Share[] | null;
}

interface AttemptLines {
  readonly initiatedBy: Initiator;
  /** By line of the payment. */
  readonly lines: readonly LineCents[];
}

interface DisputeLines {
  readonly status: Dispute['status'];
  /** `excess`: cents beyond what remained of the payment. Absent: none. */
  readonly legs: readonly { readonly leg: Leg; readonly cents: Cents; readonly shares: readonly Share[]; readonly excess?: Cents }[];
}

export interface Moved {
  readonly payment: PaymentLines | null;
  readonly movements: readonly Movement[];
}

const NO_CENTS: LineCents = [0, 0];

/** The movements of a payment's event, and the next state. `actor`: type of the actor of the event. */
export const movePayment = (paymentId: string, before: PaymentLines | null, event: PaymentEvent, actor: string): Moved => {
  switch (event.type) {
    case 'PaymentInitiated':
      return { payment: begin(event.data, actor), movements: [] };
    case 'PaymentCreated':
      return charge(paymentId, known(before, event), event.data, event.at);
    case 'PaymentResolved':
      return event.data.charge ? charge(paymentId, known(before, event), event.data.charge, event.at) : { payment: before, movements: [] };
    case 'VoidRequested':
    case 'RefundRequested': {
      const payment = known(before, event);
      const { attemptId, initiatedBy, lines: asked } = event.data;
      const lines = payment.lines.map(({ id }): LineCents => {
        const line = asked.find(({ lineItemId }) => lineItemId === id);
        return line ? [line.principalCents, line.feeCents] : NO_CENTS;
      });
      return { payment: { ...payment, attempts: { ...payment.attempts, [attemptId]: { initiatedBy, lines } } }, movements: [] };
    }
    case 'PaymentVoided':
      // A charge that was never made moved nothing. If its intent is lost, no line is known.
      return before === null || before.confirmationNumber === null
        ? { payment: before, movements: [] }
        : giveBack(paymentId, before, event.data, 'void', event.at);
    case 'PaymentRefunded':
    case 'FeeRefunded':
      return giveBack(paymentId, known(before, event), event.data, 'refund', event.at);
    case 'ReversalEnded': {
      const payment = known(before, event);
      const { [event.data.attemptId]: _ended, ...attempts } = payment.attempts;
      return { payment: { ...payment, attempts }, movements: [] };
    }
    case 'PaymentSettled': {
      const payment = known(before, event);
      const { leg: name, batchId, closedAt, grossCents, feeCents } = event.data;
      const leg = chargedLeg(payment, name, event);
      const settled = spread(grossCents, 0 - feeCents, leg.left, 1);
      return {
        payment: withLeg(payment, { ...leg, settled }),
        movements: legMovements(paymentId, payment, leg, settled, { movement: 'settled', rule: 'R4', batchId, effectiveAt: closedAt, actor }),
      };
    }
    case 'SettlementWithdrawn': {
      const payment = known(before, event);
      const { leg: name, batchId, closedAt } = event.data;
      const leg = chargedLeg(payment, name, event);
      if (!leg.settled) throw new Error('impossible history: a withdrawn settlement that was not recorded');
      const shares = negated(leg.settled);
      const as = { movement: 'settlement_withdrawn', rule: 'R4', batchId, effectiveAt: closedAt, actor } as const;
      return { payment: withLeg(payment, { ...leg, settled: null }), movements: legMovements(paymentId, payment, leg, shares, as) };
    }
    case 'SettlementRejected': {
      const payment = known(before, event);
      const { leg: name, batchId, closedAt } = event.data;
      const leg = chargedLeg(payment, name, event);
      const shares = negated(leg.left.map(([principal, fee], line): Share => [line, principal, fee, 0]));
      const as = { movement: 'rejected', rule: 'R14', batchId, effectiveAt: closedAt, actor } as const;
      return { payment, movements: legMovements(paymentId, payment, leg, shares, as) };
    }
    case 'PaymentDisputed':
      return dispute(paymentId, known(before, event), event.data, event.at, actor);
    case 'PaymentDeclined':
    case 'PaymentFailed':
    case 'PaymentOutcomeUnknown':
    case 'PaymentAbandoned':
    case 'PaymentLost':
    case 'ReconciliationStarted':
    case 'RefundFailed':
    case 'ReturnedElsewhere':
    case 'ReturnRequested':
    case 'ReversalAcknowledged':
      return { payment: before, movements: [] };
    default:
      return unreachable(event);
  }
};

const known = (payment: PaymentLines | null, { type }: PaymentEvent): PaymentLines => {
  if (!payment) throw new Error(`impossible history: ${type} of a payment that did not begin`);
  return payment;
};

const chargedLeg = ({ legs, confirmationNumber }: PaymentLines, name: Leg | null, { type }: { readonly type: string }): LegLines => {
  const leg = legs.find((one) => one.leg === name);
  if (!leg || confirmationNumber === null) throw new Error(`impossible history: ${type} of a leg that was not charged`);
  return leg;
};

const withLeg = (payment: PaymentLines, leg: LegLines): PaymentLines => ({
  ...payment,
  legs: payment.legs.map((one) => (one.leg === leg.leg ? leg : one)),
});

const begin = (terms: Extract<PaymentEvent, { type: 'PaymentInitiated' }>['data'], initiatedBy: string): PaymentLines => ({
  accountId: terms.accountId,
  portalId: terms.portalId,
  referenceId: terms.referenceId,
  brand: terms.paymentMethod.brand,
  last4: terms.paymentMethod.last4,
  initiatedBy,
  confirmationNumber: null,
  lines: terms.lineItems.map((line) => ({
    id: line.id,
    cents: [line.amountCents, line.serviceFeeCents],
    referenceId: line.referenceId,
    coding: line.coding,
  })),
  legs: terms.legs.map(({ leg, account: { gateway, merchantAccount }, principalCents, feeCents }) => ({
    leg,
    gateway,
    merchantAccount,
    transactionId: null,
    authCode: null,
    principalCents,
    feeCents,
    left: terms.lineItems.map((line): LineCents => [leg === 'fee' ? 0 : line.amountCents, leg === 'principal' ? 0 : line.serviceFeeCents]),
    settled: null,
  })),
  attempts: {},
  refunds: {},
  disputes: {},
});

const charge = (paymentId: string, before: PaymentLines, { confirmationNumber, legs }: ApprovedCharge, at: string): Moved => {
  if (before.confirmationNumber !== null) throw new Error('impossible history: charged twice');
  const card = legs.find((leg) => leg.card)?.card;
  const payment = {
    ...before,
    ...(card && { brand: card.brand, last4: card.last4 }),
    confirmationNumber,
    legs: before.legs.map((leg) => {
      const { transactionId, authCode } = legs.find((one) => one.leg === leg.leg)!;
      return { ...leg, transactionId, authCode: authCode || null };
    }),
  };
  const as = { movement: 'charge', rule: 'R1', batchId: null, effectiveAt: at, actor: payment.initiatedBy } as const;
  const sharesOf = ({ left }: LegLines) => left.map(([principal, fee], line): Share => [line, principal, fee, 0]);
  return { payment, movements: payment.legs.flatMap((leg) => legMovements(paymentId, payment, leg, sharesOf(leg), as)) };
};

/** Money of a leg came back: the lines of the request, as far as this leg carries their principal and their fee. */
const giveBack = (paymentId: string, before: PaymentLines, event: LegReturned, movement: 'void' | 'refund', at: string): Moved => {
  const leg = chargedLeg(before, event.leg, { type: movement });
  const attempt = before.attempts[event.attemptId];
  if (!attempt) throw new Error(`impossible history: a ${movement} that nobody requested`);
  const back = attempt.lines.map(([principal, fee]): LineCents => [event.principalCents > 0 ? principal : 0, event.feeCents > 0 ? fee : 0]);
  const payment =
    movement === 'void'
      ? withLeg(before, { ...leg, left: leg.left.map(([principal, fee], line): LineCents => [principal - back[line]![0], fee - back[line]![1]]) })
      : { ...before, refunds: { ...before.refunds, [event.transactionId!]: back } };
  const shares = negated(back.map(([principal, fee], line): Share => [line, principal, fee, 0]));
  const as = { movement, rule: movement === 'void' ? 'R3' : 'R7', batchId: null, effectiveAt: at, actor: attempt.initiatedBy } as const;
  return { payment, movements: legMovements(paymentId, before, { ...leg, transactionId: event.transactionId }, shares, as) };
};

const negated = (shares: readonly Share[]): Share[] =>
  shares.map(([line, principal, fee, processorFee]) => [line, 0 - principal, 0 - fee, 0 - processorFee]);

interface As {
  readonly movement: keyof typeof FAMILIES;
  readonly rule: LineRule;
  readonly batchId: string | null;
  readonly effectiveAt: string;
  readonly actor: string;
}

/** The movements of a leg, one for each share that moves something. */
const legMovements = (
  paymentId: string,
  payment: PaymentLines,
  { leg, gateway, merchantAccount, transactionId, authCode }: LegLines,
  shares: readonly Share[],
  { movement, rule, batchId, effectiveAt, actor }: As,
): Movement[] =>
  shares
    .map(([line, principalCents, feeCents, processorFeeCents]): Movement => ({
      movement,
      family: FAMILIES[movement],
      rule,
      paymentId,
      of: payment,
      line,
      leg,
      principalCents,
      feeCents,
      processorFeeCents,
      portalId: payment.portalId,
      gateway,
      merchantAccount,
      ledgerAccount: null,
      transactionId,
      authCode,
      batchId,
      initiatedBy: actor,
      effectiveAt,
    }))
    .filter(moves);

// Disputes.

/** Where the disputed money is: with us, with the processor while the dispute is open, or lost. */
const placeOf = (status: Dispute['status'] | undefined): 'here' | 'open' | 'lost' =>
  status === undefined || status === 'recovered' ? 'here' : status === 'lost' ? 'lost' : 'open';

const dispute = (paymentId: string, before: PaymentLines, data: Dispute, at: string, actor: string): Moved => {
  const earlier = before.disputes[data.disputeId];
  const legs = data.taken ? takenLegs(before, data.taken) : (earlier?.legs ?? disputedLegs(before, data));
  const [was, is] = [placeOf(earlier?.status), placeOf(data.status)];
  const effectiveAt = earlier ? at : `${data.openedOn}T00:00:00.000Z`;
  const as = (movement: keyof typeof FAMILIES, rule: LineRule): As => ({ movement, rule, batchId: null, effectiveAt, actor });
  const moved = (of: DisputeLines['legs'], movement: keyof typeof FAMILIES, rule: LineRule, sign: 1 | -1) =>
    of.flatMap(({ leg, shares }) => {
      const one = chargedLeg(before, leg, { type: 'PaymentDisputed' });
      return legMovements(paymentId, before, one, sign === 1 ? shares : negated(shares), as(movement, rule));
    });
  const step = (from: typeof was, to: typeof is, of: DisputeLines['legs']): Movement[] => [
    ...(from === 'here' && to !== 'here' ? moved(of, 'dispute_opened', 'R9', -1) : []),
    ...(from === 'open' && to === 'here' ? moved(of, 'dispute_recovered', 'R12', 1) : []),
    ...(from !== 'lost' && to === 'lost' ? moved(of, 'dispute_lost', 'R11', -1) : []),
    ...(from === 'lost' && to !== 'lost' ? moved(of, 'dispute_won_back', to === 'here' ? "R12'" : "R12''", 1) : []),
    ...(from === 'lost' && to === 'open' ? moved(of, 'dispute_reopened', "R12''", -1) : []),
  ];
  // The dispute stands on, and takes other cents: those of before come back first.
  const isOther = was !== 'here' && is !== 'here' && centsOf(earlier!.legs) !== centsOf(legs);
  const movements = isOther ? [...step(was, 'here', earlier!.legs), ...step('here', is, legs)] : step(was, is, was === 'here' ? legs : earlier!.legs);
  const excess = (of: DisputeLines['legs'], sign: 1 | -1) =>
    of.flatMap(({ leg, excess: cents = 0 }) =>
      legMovements(
        paymentId,
        before,
        chargedLeg(before, leg, { type: 'PaymentDisputed' }),
        [[null, sign * cents, 0, 0]],
        as('dispute_excess', 'R22'),
      ),
    );
  return {
    payment: { ...before, disputes: { ...before.disputes, [data.disputeId]: { status: data.status, legs } } },
    movements: [...movements, ...(was === 'here' ? [] : excess(earlier!.legs, 1)), ...(is === 'here' ? [] : excess(legs, -1))],
  };
};

/** The cents of a dispute as text, without legs that it does not touch. */
const centsOf = (legs: DisputeLines['legs']): string => JSON.stringify(legs.filter(({ cents, excess = 0 }) => cents + excess > 0));

/** What the event says that the dispute takes, by leg and line. */
const takenLegs = ({ lines }: PaymentLines, taken: NonNullable<Dispute['taken']>): DisputeLines['legs'] =>
  taken.map(({ leg, principalCents, feeCents, excessCents: excess }) => ({
    leg,
    cents: principalCents + feeCents,
    shares: byLine(lines, principalCents, feeCents),
    ...(excess !== undefined && { excess }),
  }));

/**
 * The disputed cents by leg and line. They go to the leg that the dispute names, else to the legs in order. A leg gives at most what other disputes
 * have left of it; the rest goes to the first leg. Within a leg, principal and fee share the cents, and then the lines share each of them.
 */
const disputedLegs = ({ legs: all, disputes, lines }: PaymentLines, { leg: named, disputedAmountCents }: Dispute): DisputeLines['legs'] => {
  const legs = all.filter(({ leg }) => named === undefined || leg === named);
  /** The cents that other disputes hold of a leg. */
  const takenOf = (name: Leg) =>
    sumOf(
      Object.values(disputes)
        .filter(({ status }) => placeOf(status) !== 'here')
        .flatMap((one) => one.legs.filter(({ leg }) => leg === name).map(({ cents }) => cents)),
    );
  const free = legs.map(({ leg, principalCents, feeCents }) => Math.max(0, principalCents + feeCents - takenOf(leg)));
  const excess = Math.max(0, disputedAmountCents - sumOf(free));
  let left = disputedAmountCents;
  return legs.map(({ leg, principalCents, feeCents }, index) => {
    const taken = Math.min(left, free[index]!);
    left -= taken;
    const cents = taken + (index === 0 ? excess : 0);
    const [principal, fee] = shareOut(cents, [principalCents, feeCents]) as [Cents, Cents];
    return { leg, cents, shares: byLine(lines, principal, fee) };
  });
};

const byLine = (lines: readonly PaymentLine[], principalCents: Cents, feeCents: Cents): Share[] => {
  const principals = shareOut(
    principalCents,
    lines.map(({ cents }) => cents[0]),
  );
  const fees = shareOut(
    feeCents,
    lines.map(({ cents }) => cents[1]),
  );
  const shares = lines.map((_, line): Share => [line, principals[line]!, fees[line]!, 0]);
  return [...shares, [null, principalCents - sumOf(principals), feeCents - sumOf(fees), 0]];
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Settlement: lines that are not in the payment's own stream, and funding.

/** The state of a payment that a batch or an exception names. null: it is not known. */
export type FindPayment = (paymentId: string | null) => PaymentLines | null;

/** The movements of a batch's event. */
export const moveSettlement = (event: SettlementEvent, find: FindPayment, actor: string): Movement[] => {
  switch (event.type) {
    case 'SettlementLinesRecorded':
      return event.data.lines.flatMap((line) => moveLine(event.data, line, find, actor));
    case 'SettlementLinesCorrected':
      return event.data.corrections.flatMap(({ before, after }) => [
        ...(before === null ? [] : moveLine(event.data, before, find, actor).map(takenBack)),
        ...(after === null ? [] : moveLine(event.data, after, find, actor)),
      ]);
    case 'BatchFunded':
    case 'BatchFundingWithdrawn': {
      const { gateway, merchantAccount, batchId, fundedOn, netCents, agencyPortalId } = event.data;
      const funded: Movement = {
        ...NOTHING,
        movement: 'funded',
        family: 'in_transit',
        rule: agencyPortalId === undefined ? 'R6' : "R6'",
        principalCents: event.type === 'BatchFunded' ? 0 - netCents : netCents,
        portalId: agencyPortalId ?? null,
        gateway,
        merchantAccount,
        batchId,
        initiatedBy: actor,
        effectiveAt: `${fundedOn}T00:00:00.000Z`,
      };
      return [funded].filter(moves);
    }
    case 'SettlementBatchRecorded':
    case 'SettlementBatchListed':
      return [];
    default:
      return unreachable(event);
  }
};

/** What a corrected line moved goes back. */
const takenBack = (one: Movement): Movement => ({
  ...one,
  movement: one.movement === 'refund_settled' ? 'settlement_withdrawn' : one.movement,
  principalCents: 0 - one.principalCents,
  feeCents: 0 - one.feeCents,
  processorFeeCents: 0 - one.processorFeeCents,
});

interface Batch {
  readonly gateway: string;
  readonly merchantAccount: string;
  readonly batchId: string;
  readonly closedAt: string;
}

/** The movements of one settlement line. */
const moveLine = ({ gateway, merchantAccount, batchId, closedAt }: Batch, line: RecordedLine, find: FindPayment, actor: string): Movement[] => {
  if (!movesByItself(line)) return [];
  const { type, grossCents, feeCents, netCents, expectedCents, paymentId, transactionId } = line;
  const payment = find(paymentId);
  const one = (movement: keyof typeof FAMILIES, rule: LineRule, [index, principal, fee, processorFee]: Share): Movement => ({
    ...NOTHING,
    movement,
    family: FAMILIES[movement],
    rule,
    paymentId,
    of: payment,
    line: index,
    leg: line.leg,
    principalCents: principal,
    feeCents: fee,
    processorFeeCents: processorFee,
    portalId: payment?.portalId ?? null,
    gateway,
    merchantAccount,
    transactionId,
    batchId,
    initiatedBy: actor,
    effectiveAt: closedAt,
  });
  const moved = (): Movement[] => {
    const unexplained = one('unexplained', 'R15', [null, grossCents, 0, 0 - feeCents]);
    if (!isMatched(line)) return [unexplained];
    // Of a charge that was undone. Nothing of the payment's lines was charged, so no line explains it.
    const undone = one('undone_settled', 'R21', [null, grossCents, 0, 0 - feeCents]);
    switch (type) {
      case 'sale': // Any other matched sale does not move by itself.
        return [undone];
      case 'refund_failure':
        return [unexplained];
      case 'refund':
        if (line.undone) return [undone];
        // The lines of this refund. A refund that was sent for an exception has none.
        return spread(grossCents, 0 - feeCents, payment?.refunds[transactionId] ?? [], -1).map((share) => one('refund_settled', "R4'", share));
      case 'chargeback':
      case 'chargeback_reversal':
        // The event of the dispute moves the money. The fee of this line is the processor's fee for the dispute.
        return [
          one('dispute_fee', 'R13', [null, 0, 0, 0 - feeCents]),
          one('unexplained', 'R15', [null, expectedCents === null ? 0 : grossCents - expectedCents, 0, 0]),
        ];
      case 'fee':
        return [one('processor_fee', 'R5', [null, 0, 0, netCents])];
      case 'adjustment':
        return [one('unexplained', 'R15', [null, netCents, 0, 0])];
      default:
        return unreachable(type);
    }
  };
  return moved().filter(moves);
};

const isMatched = ({ result }: RecordedLine): boolean => result === 'MATCHED' || result === 'AMOUNT_MISMATCH';

/** False for a rejected line, which moves nothing, and for a matched sale whose payment has the event. */
const movesByItself = (line: RecordedLine): boolean => line.accepted && !(isMatched(line) && line.type === 'sale' && !line.undone);

/** The payments that {@link moveSettlement} looks up. */
export const paymentsOfBatch = (event: SettlementEvent): string[] => {
  if (event.type === 'SettlementLinesRecorded') return paymentsOfLines(event.data.lines);
  if (event.type === 'SettlementLinesCorrected') return paymentsOfLines(event.data.corrections.flatMap(({ before, after }) => [before, after]));
  return [];
};

const paymentsOfLines = (lines: readonly (RecordedLine | null)[]): string[] =>
  lines.flatMap((line) => (line && movesByItself(line) ? (line.paymentId ?? []) : []));

// ------------------------------------------------------------------------------------------------------------------------------------
// Decisions of staff. No line explains them.

/** A resolved exception takes money out of suspense. */
export const moveException = (event: ExceptionEvent, find: FindPayment, actor: string): Movement[] => {
  if (event.type !== 'ExceptionResolved' || event.data.resolution === 'no_posting') return [];
  const { resolution, merchantAccount, suspenseCents, paymentId, portalId, feeCents } = event.data;
  const payment = find(paymentId);
  const movement = resolution === 'adopt' ? 'adopted' : 'suspense_resolved';
  const resolved: Movement = {
    ...NOTHING,
    movement,
    family: FAMILIES[movement],
    rule: 'R16',
    paymentId,
    of: payment,
    principalCents: suspenseCents - feeCents,
    feeCents,
    portalId: portalId ?? payment?.portalId ?? null,
    merchantAccount,
    initiatedBy: actor,
    effectiveAt: event.at,
  };
  return [resolved].filter(moves);
};

/** The postings of an adjustment, each a movement of its own. */
export const moveAdjustment = (event: ManualAdjustment, actor: string): Movement[] =>
  event.data.postings.map(({ account, cents }): Movement => {
    const { family, column, sign } = columnOf(account);
    return {
      ...NOTHING,
      movement: 'adjustment',
      family,
      rule: 'R17',
      [column]: signed(sign, cents),
      portalId: portalIn(account),
      ledgerAccount: account,
      initiatedBy: actor,
      effectiveAt: event.data.effectiveAt,
    };
  });

/** A payment to an agency, or its reversal. */
export const moveRemittance = ({ type, data }: RemittanceEvent, actor: string): Movement[] => [
  {
    ...NOTHING,
    movement: 'remitted',
    family: 'owed',
    rule: 'R20',
    principalCents: type === 'AgencyRemitted' ? 0 - data.cents : data.cents,
    portalId: data.portalId,
    initiatedBy: actor,
    effectiveAt: `${data.on}T00:00:00.000Z`,
  },
];
