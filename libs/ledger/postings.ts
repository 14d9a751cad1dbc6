/**
 * The posting rules R1 to R17 and R20 to R22: how each fact changes the books. Pure.
 *
 * Only facts about money are posted. A request, a decline, a failure or an unknown outcome posts nothing.
 *
 * Order of this file: entries; the books of a payment; the rules in all their versions; then the facts of payments, of settlement, of
 * adjustments, and of remittances.
 */
import { canonicalJson, type Cents, sumCents, unreachable } from '#kernel';
import { type Dispute, type DisputeStatus, type Leg, type LegTerms, type PaymentEvent, sharedByTotal, type Taken } from '#payments';
import type { ExceptionEvent, LineCorrection, RecordedLine, SettlementEvent } from '#settlement';
import type { AdjustmentEvent } from './adjustment.js';
import { account, OPERATING_BANK } from './chart.js';
import { beginOf } from './days.js';
import type { RemittanceEvent } from './remittance.js';

export interface Posting {
  readonly account: string;
  /** Debit positive, credit negative, never 0. */
  readonly cents: number;
}

/** One balanced entry of the journal. Its id, its position and the time at which it was recorded come from its event. */
export interface Entry {
  readonly rule: Rule;
  /** Number of the settlement line, if the event holds several lines; otherwise null. An event has at most one entry for each rule and part. */
  readonly part: number | null;
  readonly paymentId: string | null;
  /** When the entry took effect (RFC 3339). This time may be earlier than the time at which we recorded the event. */
  readonly effectiveAt: string;
  readonly postings: readonly Posting[];
}

/** Debits and credits of an entry. An account may occur twice, and cents may be 0 or negative. */
interface Sides {
  readonly debits: readonly Posting[];
  readonly credits: readonly Posting[];
}

/** The line, the payment and the time that an entry belongs to. */
interface When {
  readonly part?: number | null;
  readonly paymentId: string | null;
  readonly effectiveAt: string;
}

/** Makes an entry: sums each account and drops zeros. Throws if the sides do not balance. The projection then stops. */
const balanced = (rule: Rule, { part = null, paymentId, effectiveAt }: When, { debits, credits }: Sides): Entry[] => {
  // An entry has few postings, so a search is faster than a map.
  const sums: { account: string; cents: number }[] = [];
  const add = (name: string, cents: number) => {
    const sum = sums.find(({ account: known }) => known === name);
    if (sum) sum.cents += cents;
    else sums.push({ account: name, cents });
  };
  for (const { account: name, cents } of debits) add(name, cents);
  for (const { account: name, cents } of credits) add(name, -cents);
  const postings = sums.filter(({ cents }) => cents !== 0);
  if (postings.length === 0) return [];
  const made: Entry = { rule, part, paymentId, effectiveAt, postings };
  refuseUnbalanced(made);
  return [made];
};

/** Invariant 1: debits equal credits, at least two postings, whole cents. */
export const refuseUnbalanced = ({ rule, postings }: Entry): void => {
  let sum = 0;
  let whole = postings.length >= 2;
  for (const { cents } of postings) {
    sum += cents;
    whole &&= cents !== 0 && Number.isSafeInteger(cents) && Number.isSafeInteger(sum);
  }
  if (!whole || sum !== 0)
    throw new Error(`${rule} does not balance: ${postings.map((posting) => `${posting.account} ${posting.cents}`).join(', ')}`);
};

const on = (name: string, cents: number): Posting => ({ account: name, cents });

/** The entry of a rule, in the version that is in force. */
const entry = <R extends Rule>(rules: RulesInForce, rule: R, when: When, input: RuleInputs[R]): Entry[] =>
  balanced(rule, when, rules[rule].post(input));

/** The entry that cancels an entry of this rule: debits and credits are exchanged. */
const mirrored = <R extends Rule>(rules: RulesInForce, rule: R, when: When, input: RuleInputs[R]): Entry[] => {
  const { debits, credits } = rules[rule].post(input);
  return balanced(rule, when, { debits: credits, credits: debits });
};

// ------------------------------------------------------------------------------------------------------------------------------------
// The state of a payment that the rules need. It is plain JSON, since the projection stores it.

interface BookedLeg {
  readonly leg: Leg;
  readonly mid: string;
  /** The cents that were charged. */
  readonly principalCents: Cents;
  readonly feeCents: Cents;
  /** Voided cents. They never settle. */
  readonly voidedPrincipalCents: Cents;
  readonly voidedFeeCents: Cents;
}

interface BookedDispute {
  readonly status: DisputeStatus;
  readonly shares: readonly DisputeShare[];
}
/** The cents that a dispute takes from one leg. */
interface DisputeShare extends Taken {
  readonly mid: string;
}

export interface PaymentBooks {
  readonly portalId: string;
  readonly charged: boolean;
  readonly legs: readonly BookedLeg[];
  readonly disputes: Readonly<Record<string, BookedDispute>>;
}

/** null: the payment has no intent yet, or was abandoned before it had one (C64). */
export type Books = PaymentBooks | null;

export interface Posted {
  readonly books: Books;
  readonly entries: readonly Entry[];
}

// ------------------------------------------------------------------------------------------------------------------------------------
// The rules.

interface AccountCents {
  readonly mid: string;
  readonly cents: Cents;
}
interface AgencyCents extends AccountCents {
  readonly portalId: string;
}
interface ChargedLegs {
  readonly portalId: string;
  readonly legs: readonly BookedLeg[];
}
interface LegShare {
  readonly portalId: string;
  readonly mid: string;
  readonly principalCents: Cents;
  readonly feeCents: Cents;
}
interface DisputedCents {
  readonly portalId: string;
  readonly shares: readonly DisputeShare[];
}

interface RuleInputs {
  R1: ChargedLegs;
  R2: ChargedLegs;
  R3: LegShare;
  R4: AccountCents;
  "R4'": AccountCents;
  R5: AccountCents;
  R6: AccountCents;
  "R6'": AgencyCents;
  R7: AgencyCents;
  R8: AgencyCents;
  R9: DisputedCents;
  R11: DisputedCents;
  R12: DisputedCents;
  "R12'": DisputedCents;
  "R12''": DisputedCents;
  R13: AccountCents;
  R14: LegShare;
  R15: AccountCents;
  /** `adopted`: the agency that gets the money, and its fee. null: the money goes to the unsettled account of the processor. */
  R16: AccountCents & { readonly adopted: { readonly portalId: string; readonly feeCents: Cents } | null };
  R17: { readonly postings: readonly Posting[] };
  R20: { readonly portalId: string; readonly cents: Cents };
  /** Cents are negative for the refund that undid the charge. */
  R21: AccountCents;
  /** Cents are negative if they are given back. */
  R22: { readonly parts: readonly AccountCents[] };
}

export type Rule = keyof RuleInputs;

type Post<R extends Rule> = (input: RuleInputs[R]) => Sides;

/** The versions of every rule, oldest first. Version n is element n − 1. A version that was ever in force must not be changed. */
export type PostingRules = { readonly [R in Rule]: readonly [Post<R>, ...Post<R>[]] };

const principalOf = (parts: readonly { readonly principalCents: Cents }[]): Cents => sumCents(parts, ({ principalCents }) => principalCents);
const feeOf = (parts: readonly { readonly feeCents: Cents }[]): Cents => sumCents(parts, ({ feeCents }) => feeCents);
const eachOf = (shares: readonly DisputeShare[], name: (mid: string) => string): readonly Posting[] =>
  shares.map(({ mid, principalCents, feeCents }) => on(name(mid), principalCents + feeCents));
/** The agency bears the principal of a lost dispute, and the operator bears the fee. */
const borneBy = ({ portalId, shares }: DisputedCents): readonly Posting[] => [
  on(account.payable(portalId), principalOf(shares)),
  on(account.chargebackLoss(portalId), feeOf(shares)),
];

/** To change a rule, add a version at the end. A PostingRuleChanged puts the version in force. Entries before that event do not change. */
export const POSTING_RULES: PostingRules = {
  R1: [
    ({ portalId, legs }) => ({
      debits: legs.map(({ mid, principalCents }) => on(account.unsettled(mid), principalCents)),
      credits: [on(account.payable(portalId), principalOf(legs))],
    }),
  ],
  R2: [
    ({ portalId, legs }) => ({
      debits: legs.map(({ mid, feeCents }) => on(account.unsettled(mid), feeCents)),
      credits: [on(account.serviceFee(portalId), feeOf(legs))],
    }),
  ],
  R3: [
    ({ portalId, mid, principalCents, feeCents }) => ({
      debits: [on(account.payable(portalId), principalCents), on(account.serviceFee(portalId), feeCents)],
      credits: [on(account.unsettled(mid), principalCents + feeCents)],
    }),
  ],
  R4: [({ mid, cents }) => ({ debits: [on(account.inTransit(mid), cents)], credits: [on(account.unsettled(mid), cents)] })],
  "R4'": [({ mid, cents }) => ({ debits: [on(account.inTransit(mid), cents)], credits: [on(account.unsettled(mid), cents)] })],
  // Cents are negative if the processor gives a fee back.
  R5: [({ mid, cents }) => ({ debits: [on(account.processing(mid), cents)], credits: [on(account.inTransit(mid), cents)] })],
  R6: [({ mid, cents }) => ({ debits: [on(account.bank(OPERATING_BANK), cents)], credits: [on(account.inTransit(mid), cents)] })],
  "R6'": [({ portalId, mid, cents }) => ({ debits: [on(account.payable(portalId), cents)], credits: [on(account.inTransit(mid), cents)] })],
  R7: [({ portalId, mid, cents }) => ({ debits: [on(account.payable(portalId), cents)], credits: [on(account.unsettled(mid), cents)] })],
  R8: [({ portalId, mid, cents }) => ({ debits: [on(account.serviceFeeRefunded(portalId), cents)], credits: [on(account.unsettled(mid), cents)] })],
  R9: [({ shares }) => ({ debits: eachOf(shares, account.disputes), credits: eachOf(shares, account.inTransit) })],
  R11: [(input) => ({ debits: borneBy(input), credits: eachOf(input.shares, account.disputes) })],
  R12: [({ shares }) => ({ debits: eachOf(shares, account.inTransit), credits: eachOf(shares, account.disputes) })],
  "R12'": [(input) => ({ debits: eachOf(input.shares, account.inTransit), credits: borneBy(input) })],
  "R12''": [(input) => ({ debits: eachOf(input.shares, account.disputes), credits: borneBy(input) })],
  R13: [({ mid, cents }) => ({ debits: [on(account.disputeFee(mid), cents)], credits: [on(account.inTransit(mid), cents)] })],
  R14: [
    ({ portalId, mid, principalCents, feeCents }) => ({
      debits: [on(account.payable(portalId), principalCents), on(account.serviceFee(portalId), feeCents)],
      credits: [on(account.unsettled(mid), principalCents + feeCents)],
    }),
  ],
  R15: [({ mid, cents }) => ({ debits: [on(account.inTransit(mid), cents)], credits: [on(account.suspense(mid), cents)] })],
  R16: [
    ({ mid, cents, adopted }) => ({
      debits: [on(account.suspense(mid), cents)],
      credits:
        adopted === null
          ? [on(account.unsettled(mid), cents)]
          : [on(account.payable(adopted.portalId), cents - adopted.feeCents), on(account.serviceFee(adopted.portalId), adopted.feeCents)],
    }),
  ],
  R17: [({ postings }) => ({ debits: postings, credits: [] })],
  R20: [({ portalId, cents }) => ({ debits: [on(account.payable(portalId), cents)], credits: [on(account.bank(OPERATING_BANK), cents)] })],
  // Of a charge and the refund that undid it. No charge was posted, so the account is 0 again when both have settled.
  R21: [({ mid, cents }) => ({ debits: [on(account.inTransit(mid), cents)], credits: [on(account.unsettled(mid), cents)] })],
  // Beyond what remained of the payment, so the agency does not bear it. Staff decide.
  R22: [
    ({ parts }) => ({
      debits: parts.map(({ mid, cents }) => on(account.disputeSuspense(mid), cents)),
      credits: parts.map(({ mid, cents }) => on(account.inTransit(mid), cents)),
    }),
  ],
};

/** The version of each rule that is in force at a position of the log. */
export type RulesInForce = { readonly [R in Rule]: { readonly version: number; readonly post: Post<R> } };

/** Before any change: every rule in its first version. */
export const firstRules = (table: PostingRules = POSTING_RULES): RulesInForce =>
  Object.fromEntries(Object.entries(table).map(([rule, [post]]) => [rule, { version: 1, post }])) as unknown as RulesInForce;

/** The rules in force after a change. Throws if this release lacks the changed rule or its new version. */
export const rulesAfter = (
  rules: RulesInForce,
  { rule, version }: { readonly rule: string; readonly version: number },
  table: PostingRules = POSTING_RULES,
): RulesInForce => {
  const versions = new Map<string, readonly unknown[]>(Object.entries(table)).get(rule);
  if (!versions) throw new Error(`posting rule ${rule} is unknown to this program; a newer Payfold changed it`);
  const post = versions[version - 1];
  if (!post)
    throw new Error(
      `posting rule ${rule} counts in version ${version}, this program knows versions up to ${versions.length}; a newer Payfold changed it`,
    );
  return { ...rules, [rule]: { version, post } };
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Payments.

/**
 * The entries of a payment's event, and the next state of its books. The entries take effect at the time in the event's data, such as `closedAt`.
 * Without such a time, they take effect at the time of the event.
 */
export const postPayment = (rules: RulesInForce, paymentId: string, books: Books, event: PaymentEvent): Posted => {
  const now = { paymentId, effectiveAt: event.at };
  const same = { books, entries: [] };
  switch (event.type) {
    case 'PaymentInitiated':
      return { books: { portalId: event.data.portalId, charged: false, legs: event.data.legs.map(bookedLeg), disputes: {} }, entries: [] };
    case 'PaymentLost':
      return { books: books ?? { portalId: event.data.portalId, charged: false, legs: [], disputes: {} }, entries: [] };
    case 'PaymentCreated':
      return charged(rules, begun(books, event), now);
    case 'PaymentResolved':
      return event.data.as === 'succeeded' ? charged(rules, begun(books, event), now) : same;
    case 'PaymentVoided': {
      const before = begun(books, event);
      // If the charge was pending or unknown, no charge was posted. So nothing is taken back.
      return before.charged ? voided(rules, before, event.data.leg, event.data, now) : same;
    }
    case 'PaymentRefunded':
    case 'FeeRefunded': {
      const before = begun(books, event);
      const { portalId } = before;
      const { mid } = legOf(before, event.data.leg, event);
      const { principalCents, feeCents } = event.data;
      return {
        books,
        entries: [
          ...entry(rules, 'R7', now, { portalId, mid, cents: principalCents }),
          ...entry(rules, 'R8', now, { portalId, mid, cents: feeCents }),
        ],
      };
    }
    case 'PaymentSettled': {
      const { mid } = legOf(begun(books, event), event.data.leg, event);
      const { grossCents, feeCents, closedAt } = event.data;
      const closed = { paymentId, effectiveAt: closedAt };
      return {
        books,
        entries: [...entry(rules, 'R4', closed, { mid, cents: grossCents }), ...entry(rules, 'R5', closed, { mid, cents: feeCents })],
      };
    }
    case 'SettlementWithdrawn': {
      // Cancels the entries R4 and R5 of the settlement that no longer holds.
      const { mid } = legOf(begun(books, event), event.data.leg, event);
      const { grossCents, feeCents, closedAt } = event.data;
      const closed = { paymentId, effectiveAt: closedAt };
      return {
        books,
        entries: [...mirrored(rules, 'R4', closed, { mid, cents: grossCents }), ...entry(rules, 'R5', closed, { mid, cents: -feeCents })],
      };
    }
    case 'SettlementRejected': {
      const before = begun(books, event);
      const leg = legOf(before, event.data.leg, event);
      const rejected = {
        portalId: before.portalId,
        mid: leg.mid,
        principalCents: leg.principalCents - leg.voidedPrincipalCents,
        feeCents: leg.feeCents - leg.voidedFeeCents,
      };
      return { books, entries: entry(rules, 'R14', { paymentId, effectiveAt: event.data.closedAt }, rejected) };
    }
    case 'PaymentDisputed':
      return disputed(rules, begun(books, event), paymentId, event.at, event.data);
    case 'PaymentDeclined':
    case 'PaymentFailed':
    case 'PaymentOutcomeUnknown':
    case 'PaymentAbandoned':
    case 'ReconciliationStarted':
    case 'VoidRequested':
    case 'RefundRequested':
    case 'ReturnRequested':
    case 'RefundFailed':
    case 'ReturnedElsewhere':
    case 'ReversalEnded':
    case 'ReversalAcknowledged':
      return same;
    default:
      return unreachable(event);
  }
};

const bookedLeg = ({ leg, account: { merchantAccount }, principalCents, feeCents }: LegTerms): BookedLeg => ({
  leg,
  mid: merchantAccount,
  principalCents,
  feeCents,
  voidedPrincipalCents: 0,
  voidedFeeCents: 0,
});

const begun = (books: Books, event: PaymentEvent): PaymentBooks => {
  if (!books) throw new Error(`impossible history: ${event.type} of a payment that did not begin`);
  return books;
};

const legOf = (books: PaymentBooks, name: Leg | null, event: PaymentEvent): BookedLeg => {
  const leg = books.legs.find((candidate) => candidate.leg === name);
  if (!leg || !books.charged) throw new Error(`impossible history: ${event.type} of a leg that was not charged`);
  return leg;
};

const charged = (rules: RulesInForce, books: PaymentBooks, when: When): Posted => {
  if (books.charged) throw new Error('impossible history: charged twice');
  return { books: { ...books, charged: true }, entries: [...entry(rules, 'R1', when, books), ...entry(rules, 'R2', when, books)] };
};

const voided = (
  rules: RulesInForce,
  books: PaymentBooks,
  name: Leg | null,
  { principalCents, feeCents }: { readonly principalCents: Cents; readonly feeCents: Cents },
  when: When,
): Posted => {
  const leg = books.legs.find((candidate) => candidate.leg === name);
  if (!leg) throw new Error(`impossible history: a void of the ${name} leg, which was not charged`);
  const after = { ...leg, voidedPrincipalCents: leg.voidedPrincipalCents + principalCents, voidedFeeCents: leg.voidedFeeCents + feeCents };
  if (after.voidedPrincipalCents > leg.principalCents || after.voidedFeeCents > leg.feeCents)
    throw new Error(`impossible history: more voided than was charged on the ${name} leg`);
  return {
    books: { ...books, legs: books.legs.map((one) => (one === leg ? after : one)) },
    entries: entry(rules, 'R3', when, { portalId: books.portalId, mid: leg.mid, principalCents, feeCents }),
  };
};

/**
 * Posts only if the disputed money moves, or if another party bears it now. A new stage alone posts nothing (R10). If a dispute that stands takes other
 * cents than before, the old ones are given back, and the new ones are taken.
 */
const disputed = (rules: RulesInForce, books: PaymentBooks, paymentId: string, at: string, dispute: Dispute): Posted => {
  const { portalId } = books;
  const before = books.disputes[dispute.disputeId];
  const shares = dispute.taken?.map((taken) => ({ ...taken, mid: midOf(books, taken) })) ?? before?.shares ?? sharesByTotal(books, dispute);
  const was = before === undefined || before.status === 'recovered' ? 'not_taken' : before.status === 'lost' ? 'lost' : 'open';
  const is = dispute.status === 'recovered' ? 'not_taken' : dispute.status === 'lost' ? 'lost' : 'open';
  const when = { paymentId, effectiveAt: before ? at : `${dispute.openedOn}T00:00:00.000Z` };

  const move = (from: typeof was, to: typeof is, moved: readonly DisputeShare[]): Entry[] => {
    const post = (rule: 'R9' | 'R11' | 'R12' | "R12'" | "R12''") => entry(rules, rule, when, { portalId, shares: moved });
    const entries = {
      'not_taken open': () => post('R9'),
      'not_taken lost': () => [...post('R9'), ...post('R11')],
      'open lost': () => post('R11'),
      'open not_taken': () => post('R12'),
      'lost not_taken': () => post("R12'"),
      'lost open': () => post("R12''"),
    };
    const change = `${from} ${to}`;
    return change in entries ? entries[change as keyof typeof entries]() : [];
  };
  const isSame = was === 'not_taken' || is === 'not_taken' || canonicalJson(before!.shares) === canonicalJson(shares);
  const moved = isSame
    ? move(was, is, was === 'not_taken' ? shares : before!.shares)
    : [...move(was, 'not_taken', before!.shares), ...move('not_taken', is, shares)];
  const excess = (sign: 1 | -1, stands: boolean, all: readonly DisputeShare[] = []): AccountCents[] =>
    stands ? all.map(({ mid, excessCents = 0 }) => ({ mid, cents: sign * excessCents })) : [];
  const parts = [...excess(-1, was !== 'not_taken', before?.shares), ...excess(1, is !== 'not_taken', shares)];
  return {
    books: { ...books, disputes: { ...books.disputes, [dispute.disputeId]: { status: dispute.status, shares } } },
    entries: [...moved, ...entry(rules, 'R22', when, { parts })],
  };
};

const midOf = ({ legs }: PaymentBooks, { leg: name }: Taken): string => {
  const leg = legs.find(({ leg }) => leg === name);
  if (!leg) throw new Error(`impossible history: a dispute of the ${name} leg, which was not charged`);
  return leg.mid;
};

const sharesByTotal = (books: PaymentBooks, dispute: Dispute): readonly DisputeShare[] => {
  const standing = Object.values(books.disputes).flatMap(({ status, shares }) => (status === 'recovered' ? [] : shares));
  return sharedByTotal(books.legs, standing, dispute).map(({ leg, principalCents, feeCents }) => ({
    leg,
    mid: midOf(books, { leg, principalCents, feeCents }),
    principalCents,
    feeCents,
  }));
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Settlement: lines that are not in the payment's own stream, and funding.

export const postSettlement = (rules: RulesInForce, event: SettlementEvent): readonly Entry[] => {
  switch (event.type) {
    case 'SettlementLinesRecorded': {
      const { merchantAccount: mid, closedAt, lines } = event.data;
      return lines.flatMap((line) => lineEntries(rules, mid, closedAt, line));
    }
    case 'SettlementLinesCorrected': {
      const { merchantAccount: mid, closedAt, corrections } = event.data;
      return corrections.flatMap((correction) => correctionEntries(rules, mid, closedAt, correction));
    }
    case 'BatchFunded':
    case 'BatchFundingWithdrawn': {
      const { merchantAccount: mid, fundedOn, netCents, agencyPortalId: portalId } = event.data;
      const cents = event.type === 'BatchFunded' ? netCents : 0 - netCents;
      const when = { paymentId: null, effectiveAt: `${fundedOn}T00:00:00.000Z` };
      return portalId === undefined ? entry(rules, 'R6', when, { mid, cents }) : entry(rules, "R6'", when, { portalId, mid, cents });
    }
    case 'SettlementBatchRecorded':
    case 'SettlementBatchListed':
      return [];
    default:
      return unreachable(event);
  }
};

/**
 * The entries of one settlement line. A rejected line moves no money. If a sale matches a payment, the events of the payment post it (R4, R5). R14
 * also follows from an event of the payment.
 */
const lineEntries = (rules: RulesInForce, mid: string, closedAt: string, line: RecordedLine): readonly Entry[] => {
  const { number, type, accepted, grossCents: gross, feeCents: fee, netCents: net, result, paymentId } = line;
  if (!accepted) return [];
  const when = { part: number, paymentId, effectiveAt: closedAt };
  const post = (rule: "R4'" | 'R5' | 'R13' | 'R15' | 'R21', cents: Cents) => entry(rules, rule, when, { mid, cents });
  if (result !== 'MATCHED' && result !== 'AMOUNT_MISMATCH') return [...post('R15', gross), ...post('R5', fee)];
  if (line.undone && (type === 'sale' || type === 'refund')) return [...post('R21', gross), ...post('R5', fee)];
  switch (type) {
    case 'sale': // posted from the payment's own stream
      return [];
    case 'refund':
      return [...post("R4'", gross), ...post('R5', fee)];
    case 'chargeback':
    case 'chargeback_reversal':
      // The events of the dispute post the money itself (R9, R12). The fee of the line is the dispute fee (R13). A gross amount that differs from the
      // expected cents is unexplained (R15).
      return [...post('R13', fee), ...post('R15', line.expectedCents === null ? 0 : gross - line.expectedCents)];
    case 'fee':
      return post('R5', -net);
    case 'refund_failure':
      return [...post('R15', gross), ...post('R5', fee)];
    case 'adjustment':
      return post('R15', net);
    default:
      return unreachable(type);
  }
};

/**
 * The entries of a corrected line. For each rule: the postings of the new line, less those of the old line. Both use the rule versions in force at
 * the correction.
 */
const correctionEntries = (rules: RulesInForce, mid: string, closedAt: string, { before, after }: LineCorrection): readonly Entry[] => {
  const now = after === null ? [] : lineEntries(rules, mid, closedAt, after);
  const then = before === null ? [] : lineEntries(rules, mid, closedAt, before);
  const line = (after ?? before)!;
  const changed = [...new Set([...then, ...now].map(({ rule }) => rule))];
  return changed.flatMap((rule) => {
    const of = (entries: readonly Entry[]) => entries.filter((one) => one.rule === rule).flatMap(({ postings }) => postings);
    return balanced(rule, { part: line.number, paymentId: line.paymentId, effectiveAt: closedAt }, { debits: of(now), credits: of(then) });
  });
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Decisions of people: resolved exceptions, which take money out of suspense, and adjustments.

export const postException = (rules: RulesInForce, event: ExceptionEvent): readonly Entry[] => {
  if (event.type !== 'ExceptionResolved' || event.data.resolution === 'no_posting') return [];
  const { resolution, merchantAccount: mid, suspenseCents: cents, paymentId, portalId, feeCents } = event.data;
  const when = { paymentId, effectiveAt: event.at };
  // `settles`: the line settles an unsettled charge or refund. `refund`: the money goes back through the processor. A later settlement line then
  // takes it out of the unsettled account.
  if (resolution === 'settles' || resolution === 'refund') return entry(rules, 'R16', when, { mid, cents, adopted: null });
  if (portalId === null) throw new Error('R16: money is adopted for an agency');
  return entry(rules, 'R16', when, { mid, cents, adopted: { portalId, feeCents } });
};

export const postAdjustment = (rules: RulesInForce, event: AdjustmentEvent): readonly Entry[] =>
  event.type === 'ManualAdjustment' ? entry(rules, 'R17', { paymentId: null, effectiveAt: event.data.effectiveAt }, event.data) : [];

/** A remittance to an agency, or the second entry that takes it back. */
export const postRemittance = (rules: RulesInForce, { type, data }: RemittanceEvent): readonly Entry[] => {
  const post = type === 'AgencyRemitted' ? entry : mirrored;
  return post(rules, 'R20', { paymentId: null, effectiveAt: beginOf(data.on) }, data);
};

/** Every rule in words, as journals show it. */
export const RULE_WORDS: Readonly<Record<Rule, string>> = {
  R1: 'principal charged',
  R2: 'service fee charged',
  R3: 'voided',
  R4: 'sale settled',
  "R4'": 'refund settled',
  R5: 'processor fee',
  R6: 'batch funded',
  "R6'": 'batch funded to the agency',
  R7: 'principal refunded',
  R8: 'service fee refunded',
  R9: 'dispute: amount taken back',
  R11: 'dispute lost',
  R12: 'dispute recovered',
  "R12'": 'dispute recovered after it was lost',
  "R12''": 'dispute reopened after it was lost',
  R13: 'dispute fee',
  R14: 'settlement rejected',
  R15: 'unexplained settlement line',
  R16: 'suspense resolved',
  R17: 'adjustment by hand',
  R20: 'agency paid',
  R21: 'undone charge settled',
  R22: 'dispute: taken beyond what remained',
};
