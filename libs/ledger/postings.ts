/**
 * The posting rules R1 to R17: what each fact does to the books. Pure. A posting follows a fact about money, never a request: what was asked for, declined,
 * failed or is unknown posts nothing.
 *
 * Read from top to bottom: entries, what the rules must remember of a payment, the rules of payments, of settlement, of adjustments.
 */
import { type Cents, proRata, sumCents, unreachable } from '#kernel';
import type { Dispute, DisputeStatus, Leg, LegTerms, PaymentEvent } from '#payments';
import type { ExceptionEvent, LineCorrection, RecordedLine, SettlementEvent } from '#settlement';
import type { AdjustmentEvent } from './adjustment.js';
import { account, OPERATING_BANK } from './chart.js';

/** Counts up when a rule's postings change: entries of both versions keep ids of their own. */
export const RULE_VERSION = 1;

export type Rule =
  | 'R1' | 'R2' | 'R3' | 'R4' | "R4'" | 'R5' | 'R6' | "R6'" | 'R7' | 'R8' | 'R9' | 'R11' | 'R12' | "R12'" | "R12''" | 'R13' | 'R14' | 'R15' | 'R16' | 'R17'; // prettier-ignore

export interface Posting {
  readonly account: string;
  /** Debit positive, credit negative, never 0. */
  readonly cents: number;
}

/** One balanced entry of the journal. Its event gives it its id, its place and the time at which it was recorded. */
export interface Entry {
  readonly rule: Rule;
  /** Of the settlement line, where an event holds several; null else. One entry per (event, rule, part). */
  readonly part: number | null;
  readonly paymentId: string | null;
  /** When it took effect in the world (RFC 3339); recorded is when we learned of it. */
  readonly effectiveAt: string;
  readonly postings: readonly Posting[];
}

/** Debits and credits of an entry, zeros left out and each account once. Throws where they do not balance: the projection must stop, not guess. */
const entry = (
  rule: Rule,
  { part = null, paymentId, effectiveAt }: { part?: number | null; paymentId: string | null; effectiveAt: string },
  debits: readonly Posting[],
  credits: readonly Posting[],
): Entry[] => {
  // They are few: looking through them is cheaper than a map, and this runs for every entry there is.
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

// ------------------------------------------------------------------------------------------------------------------------------------
// What the rules remember of a payment. Plain JSON, since the projection stores it.

interface BookedLeg {
  readonly leg: Leg;
  readonly mid: string;
  /** As charged. */
  readonly principalCents: Cents;
  readonly feeCents: Cents;
  /** Of it, what never settles. */
  readonly voidedPrincipalCents: Cents;
  readonly voidedFeeCents: Cents;
}

interface BookedDispute {
  readonly status: DisputeStatus;
  readonly shares: readonly DisputeShare[];
}
/** A dispute's cents on one merchant account. */
interface DisputeShare {
  readonly leg: Leg;
  readonly mid: string;
  readonly principalCents: Cents;
  readonly feeCents: Cents;
}

export interface PaymentBooks {
  readonly portalId: string;
  readonly charged: boolean;
  readonly legs: readonly BookedLeg[];
  readonly disputes: Readonly<Record<string, BookedDispute>>;
}

/** null: the payment has not begun, or never will (C64). */
export type Books = PaymentBooks | null;

export interface Posted {
  readonly books: Books;
  readonly entries: readonly Entry[];
}

// ------------------------------------------------------------------------------------------------------------------------------------
// Payments.

/** What an event of a payment posts, and what is to be remembered of it. `closedAt`-like times of the data decide `effectiveAt`, else the time of recording. */
export const postPayment = (paymentId: string, books: Books, event: PaymentEvent): Posted => {
  const now = { paymentId, effectiveAt: event.at };
  const same = { books, entries: [] };
  switch (event.type) {
    case 'PaymentInitiated':
      return { books: { portalId: event.data.portalId, charged: false, legs: event.data.legs.map(bookedLeg), disputes: {} }, entries: [] };
    case 'PaymentCreated':
      return charged(begun(books, event), now);
    case 'PaymentResolved':
      return event.data.as === 'succeeded' ? charged(begun(books, event), now) : same;
    case 'PaymentVoided': {
      const before = begun(books, event);
      // Out of pending or unknown: nothing was captured, so nothing is taken back.
      return before.charged ? voided(before, event.data.leg, event.data, now) : same;
    }
    case 'PaymentRefunded':
    case 'FeeRefunded': {
      const before = begun(books, event);
      const { mid } = legOf(before, event.data.leg, event);
      const { principalCents: principal, feeCents: fee } = event.data;
      return {
        books,
        entries: [
          ...entry('R7', now, [on(account.payable(before.portalId), principal)], [on(account.unsettled(mid), principal)]),
          ...entry('R8', now, [on(account.serviceFeeRefunded(before.portalId), fee)], [on(account.unsettled(mid), fee)]),
        ],
      };
    }
    case 'PaymentSettled': {
      const { mid } = legOf(begun(books, event), event.data.leg, event);
      const { grossCents: gross, feeCents: fee, closedAt } = event.data;
      const closed = { paymentId, effectiveAt: closedAt };
      return {
        books,
        entries: [...entry('R4', closed, [on(account.inTransit(mid), gross)], [on(account.unsettled(mid), gross)]), ...withheld(mid, fee, closed)],
      };
    }
    case 'SettlementWithdrawn': {
      // R4 and R5 of the fact that holds no longer, mirrored.
      const { mid } = legOf(begun(books, event), event.data.leg, event);
      const { grossCents: gross, feeCents: fee, closedAt } = event.data;
      const closed = { paymentId, effectiveAt: closedAt };
      return {
        books,
        entries: [...entry('R4', closed, [on(account.unsettled(mid), gross)], [on(account.inTransit(mid), gross)]), ...withheld(mid, -fee, closed)],
      };
    }
    case 'SettlementRejected': {
      const before = begun(books, event);
      const leg = legOf(before, event.data.leg, event);
      const [principal, fee] = [leg.principalCents - leg.voidedPrincipalCents, leg.feeCents - leg.voidedFeeCents];
      return {
        books,
        entries: entry(
          'R14',
          { paymentId, effectiveAt: event.data.closedAt },
          [on(account.payable(before.portalId), principal), on(account.serviceFee(before.portalId), fee)],
          [on(account.unsettled(leg.mid), principal + fee)],
        ),
      };
    }
    case 'PaymentDisputed':
      return disputed(begun(books, event), paymentId, event.at, event.data);
    case 'PaymentDeclined':
    case 'PaymentFailed':
    case 'PaymentOutcomeUnknown':
    case 'PaymentAbandoned':
    case 'ReconciliationStarted':
    case 'VoidRequested':
    case 'RefundRequested':
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

type When = { readonly paymentId: string; readonly effectiveAt: string };

const charged = (books: PaymentBooks, when: When): Posted => {
  if (books.charged) throw new Error('impossible history: charged twice');
  const { portalId } = books;
  const part = (cents: (leg: BookedLeg) => Cents) => books.legs.map((leg) => on(account.unsettled(leg.mid), cents(leg)));
  const principal = sumCents(books.legs, (leg) => leg.principalCents);
  const fee = sumCents(books.legs, (leg) => leg.feeCents);
  return {
    books: { ...books, charged: true },
    entries: [
      ...entry('R1', when, part((leg) => leg.principalCents), [on(account.payable(portalId), principal)]), // prettier-ignore
      ...entry('R2', when, part((leg) => leg.feeCents), [on(account.serviceFee(portalId), fee)]), // prettier-ignore
    ],
  };
};

const voided = (books: PaymentBooks, name: Leg | null, part: { readonly principalCents: Cents; readonly feeCents: Cents }, when: When): Posted => {
  const leg = books.legs.find((candidate) => candidate.leg === name);
  if (!leg) throw new Error(`impossible history: a void of the ${name} leg, which was not charged`);
  const { principalCents: principal, feeCents: fee } = part;
  const after = { ...leg, voidedPrincipalCents: leg.voidedPrincipalCents + principal, voidedFeeCents: leg.voidedFeeCents + fee };
  if (after.voidedPrincipalCents > leg.principalCents || after.voidedFeeCents > leg.feeCents)
    throw new Error(`impossible history: more voided than was charged on the ${name} leg`);
  return {
    books: { ...books, legs: books.legs.map((one) => (one === leg ? after : one)) },
    entries: entry(
      'R3',
      when,
      [on(account.payable(books.portalId), principal), on(account.serviceFee(books.portalId), fee)],
      [on(account.unsettled(leg.mid), principal + fee)],
    ),
  };
};

/** Posted only when it flips whether the money is taken back, or who bears it; a change of stage alone posts nothing (R10). */
const disputed = (books: PaymentBooks, paymentId: string, at: string, dispute: Dispute): Posted => {
  const before = books.disputes[dispute.disputeId];
  const shares = before?.shares ?? sharesOf(books, dispute);
  const was = before === undefined || before.status === 'recovered' ? 'not_taken' : before.status === 'lost' ? 'lost' : 'open';
  const is = dispute.status === 'recovered' ? 'not_taken' : dispute.status === 'lost' ? 'lost' : 'open';
  const when = { paymentId, effectiveAt: before ? at : `${dispute.openedOn}T00:00:00.000Z` };

  const each = (name: (mid: string) => string) => shares.map((share) => on(name(share.mid), share.principalCents + share.feeCents));
  const open = each(account.disputes);
  const transit = each(account.inTransit);
  const borne = [
    on(
      account.payable(books.portalId),
      sumCents(shares, (share) => share.principalCents),
    ),
    on(
      account.chargebackLoss(books.portalId),
      sumCents(shares, (share) => share.feeCents),
    ),
  ];
  const entries = {
    'not_taken open': () => entry('R9', when, open, transit),
    'not_taken lost': () => [...entry('R9', when, open, transit), ...entry('R11', when, borne, open)],
    'open lost': () => entry('R11', when, borne, open),
    'open not_taken': () => entry('R12', when, transit, open),
    'lost not_taken': () => entry("R12'", when, transit, borne),
    'lost open': () => entry("R12''", when, open, borne),
  };
  const change = `${was} ${is}`;
  return {
    books: { ...books, disputes: { ...books.disputes, [dispute.disputeId]: { status: dispute.status, shares } } },
    entries: change in entries ? entries[change as keyof typeof entries]() : [],
  };
};

/**
 * Disputed cents by leg: the leg that the processor named; else the principal's charge first, then the fee's, as far as disputes that stand have left of them.
 * Pro rata over principal and fee where one transaction carried both.
 */
const sharesOf = (books: PaymentBooks, { leg: named, disputedAmountCents }: Dispute): readonly DisputeShare[] => {
  const standing = Object.values(books.disputes).flatMap(({ status, shares }) => (status === 'recovered' ? [] : shares));
  const legs = books.legs.filter(({ leg }) => named === undefined || leg === named);
  let left = disputedAmountCents;
  const taken = legs.map(({ leg, principalCents, feeCents }) => {
    const before = sumCents(standing, (share) => (share.leg === leg ? share.principalCents + share.feeCents : 0));
    const cents = Math.min(left, Math.max(0, principalCents + feeCents - before));
    left -= cents;
    return cents;
  });
  // More than was charged is disputed by now: the rest falls where the money was.
  taken[0]! += left;
  return legs.flatMap(({ leg, mid, principalCents, feeCents }, index) => {
    const cents = taken[index]!;
    if (cents === 0) return [];
    const [principal, fee] = proRata(cents, [principalCents, feeCents]) as [Cents, Cents];
    return [{ leg, mid, principalCents: principal, feeCents: fee }];
  });
};

/** R5, mirrored where the processor gives a fee back. */
const withheld = (mid: string, cents: number, when: Omit<When, 'paymentId'> & { paymentId: string | null; part?: number }): Entry[] =>
  entry('R5', when, [on(account.processing(mid), cents)], [on(account.inTransit(mid), cents)]);

// ------------------------------------------------------------------------------------------------------------------------------------
// Settlement: lines that are not told in the payment's own stream, and funding.

export const postSettlement = (event: SettlementEvent): readonly Entry[] => {
  switch (event.type) {
    case 'SettlementLinesRecorded': {
      const { merchantAccount: mid, closedAt, lines } = event.data;
      return lines.flatMap((line) => lineEntries(mid, closedAt, line));
    }
    case 'SettlementLinesCorrected': {
      const { merchantAccount: mid, closedAt, corrections } = event.data;
      return corrections.flatMap((correction) => correctionEntries(mid, closedAt, correction));
    }
    case 'BatchFunded': {
      const { merchantAccount: mid, fundedOn, netCents: net, agencyPortalId } = event.data;
      const when = { paymentId: null, effectiveAt: `${fundedOn}T00:00:00.000Z` };
      const transit = [on(account.inTransit(mid), net)];
      return agencyPortalId === undefined
        ? entry('R6', when, [on(account.bank(OPERATING_BANK), net)], transit)
        : entry("R6'", when, [on(account.payable(agencyPortalId), net)], transit);
    }
    case 'SettlementBatchRecorded':
    case 'SettlementBatchListed':
      return [];
    default:
      return unreachable(event);
  }
};

/** A sale whose payment knows of it is posted there (R4, R5), and taken back there. Rejected lines move nothing; R14 stands with the payment. */
const lineEntries = (mid: string, closedAt: string, line: RecordedLine): readonly Entry[] => {
  const { number, type, accepted, grossCents: gross, feeCents: fee, netCents: net, result, paymentId } = line;
  if (!accepted) return [];
  const when = { part: number, paymentId, effectiveAt: closedAt };
  const unexplained = (cents: number) => entry('R15', when, [on(account.inTransit(mid), cents)], [on(account.suspense(mid), cents)]);
  if (result !== 'MATCHED' && result !== 'AMOUNT_MISMATCH') return [...unexplained(gross), ...withheld(mid, fee, when)];
  switch (type) {
    case 'sale': // told in its payment's stream
      return [];
    case 'refund':
      return [...entry("R4'", when, [on(account.inTransit(mid), gross)], [on(account.unsettled(mid), gross)]), ...withheld(mid, fee, when)];
    case 'chargeback':
    case 'chargeback_reversal':
      // The money itself was posted with the dispute (R9, R12): what is withheld on top is its fee, and what differs nobody has explained.
      return [
        ...entry('R13', when, [on(account.disputeFee(mid), fee)], [on(account.inTransit(mid), fee)]),
        ...unexplained(line.expectedCents === null ? 0 : gross - line.expectedCents),
      ];
    case 'fee':
      return withheld(mid, -net, when);
    case 'adjustment':
      return unexplained(net);
    default:
      return unreachable(type);
  }
};

/** A corrected line: what it means now, less what it meant before, rule by rule. */
const correctionEntries = (mid: string, closedAt: string, { before, after }: LineCorrection): readonly Entry[] => {
  const now = after === null ? [] : lineEntries(mid, closedAt, after);
  const then = before === null ? [] : lineEntries(mid, closedAt, before);
  const line = (after ?? before)!;
  const rules = [...new Set([...then, ...now].map(({ rule }) => rule))];
  return rules.flatMap((rule) => {
    const of = (entries: readonly Entry[]) => entries.filter((one) => one.rule === rule).flatMap(({ postings }) => postings);
    return entry(rule, { part: line.number, paymentId: line.paymentId, effectiveAt: closedAt }, of(now), of(then));
  });
};

// ------------------------------------------------------------------------------------------------------------------------------------
// What people decide: exceptions out of suspense, adjustments.

export const postException = (event: ExceptionEvent): readonly Entry[] => {
  if (event.type !== 'ExceptionResolved' || event.data.resolution === 'no_posting') return [];
  const { resolution, merchantAccount: mid, suspenseCents: cents, paymentId } = event.data;
  const when = { paymentId, effectiveAt: event.at };
  const out = [on(account.suspense(mid), cents)];
  // It settles what stands here as unsettled, or goes back through the processor, whose line will take it out of there again.
  if (resolution === 'settles' || resolution === 'refund') return entry('R16', when, out, [on(account.unsettled(mid), cents)]);
  const { portalId, feeCents } = event.data;
  if (portalId === null) throw new Error('R16: money is adopted for an agency');
  return entry('R16', when, out, [on(account.payable(portalId), cents - feeCents), on(account.serviceFee(portalId), feeCents)]);
};

export const postAdjustment = (event: AdjustmentEvent): readonly Entry[] =>
  event.type === 'ManualAdjustment'
    ? entry(
        'R17',
        { paymentId: null, effectiveAt: event.data.effectiveAt },
        event.data.postings.map(({ account: name, cents }) => on(name, cents)),
        [],
      )
    : [];

/** Every rule in words, for the readers of journals. */
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
};
