/**
 * Adjustments by hand, closed periods, and changes of posting rules. Pure.
 *
 * Each adjustment has a stream of its own (`adjustment-<id>`). All closings of periods share one stream (`adjustment-periods`), which keeps them in
 * order. All changes of rules share another (`adjustment-rules`).
 */
import { type Decider, ServiceError, sumCents, unreachable } from '#kernel';
import { isAccount } from './chart.js';
import { isMidnight } from './days.js';

type Fact<Type extends string, Data> = { readonly type: Type; readonly at: string; readonly data: Data };

export interface AccountBalance {
  readonly account: string;
  readonly debitCents: number;
  readonly creditCents: number;
}

export type ManualAdjustment = Fact<
  'ManualAdjustment',
  {
    readonly adjustmentId: string;
    readonly postings: readonly { readonly account: string; readonly cents: number }[];
    /** RFC 3339: when the adjustment takes effect. */
    readonly effectiveAt: string;
    readonly reason: string;
    readonly by: string;
  }
>;

export type PeriodEvent =
  /** After this event, no entry is booked before `to`. */
  | Fact<'PeriodClosed', { readonly from: string | null; readonly to: string; readonly by: string }>
  /**
   * The balances before the period (`opening`) and at its end (`closing`), at the position of the PeriodClosed. Every verification compares them with
   * the journal.
   */
  | Fact<
      'TrialBalanceRecorded',
      {
        readonly to: string;
        /** Position of the PeriodClosed in the log. */
        readonly position: string;
        readonly opening: readonly AccountBalance[];
        readonly closing: readonly AccountBalance[];
        readonly entries: number;
        /** SHA-256 over the period's entries, in order. */
        readonly digest: string;
      }
    >;

/** After this event, the rule posts under this version. */
export type PostingRuleChanged = Fact<'PostingRuleChanged', { readonly rule: string; readonly version: number }>;

export type AdjustmentEvent = ManualAdjustment | PeriodEvent | PostingRuleChanged;

/** The largest amount of one posting. A larger amount is more likely a typing error. */
const MAX_ADJUSTMENT_CENTS = 100_000_000_000;
const MAX_ADJUSTMENT_POSTINGS = 20;

/**
 * Makes the event of an adjustment. Throws VALIDATION_ERROR for postings that do not balance, for an unknown account, and for other invalid postings.
 */
export const adjust = (at: string, data: ManualAdjustment['data']): ManualAdjustment => {
  const refuse = (message: string) => new ServiceError('VALIDATION_ERROR', message);
  const { postings } = data;
  if (postings.length < 2 || postings.length > MAX_ADJUSTMENT_POSTINGS) throw refuse(`An adjustment has 2 to ${MAX_ADJUSTMENT_POSTINGS} postings.`);
  for (const { account, cents } of postings) {
    if (!isAccount(account)) throw refuse(`${account} is no account of the chart.`);
    if (!Number.isSafeInteger(cents) || cents === 0 || Math.abs(cents) > MAX_ADJUSTMENT_CENTS) throw refuse('Postings are whole cents, not zero.');
  }
  if (new Set(postings.map(({ account }) => account)).size < postings.length) throw refuse('An adjustment names each account once.');
  if (sumCents(postings, ({ cents }) => cents) !== 0) throw refuse('Debits and credits of an adjustment must be equal.');
  return { type: 'ManualAdjustment', at, data };
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Periods.

export interface Periods {
  /** End of the last closed period (RFC 3339). null: no period is closed. */
  readonly closedTo: string | null;
  /** The closed period whose trial balance is not recorded yet. */
  readonly open: { readonly from: string | null; readonly to: string } | null;
  /** The newest trial balance: the sums of all entries that are booked before its period's end. */
  readonly closing: readonly AccountBalance[];
}

export type PeriodCommand =
  | { readonly type: 'ClosePeriod'; readonly at: string; readonly to: string; readonly by: string }
  | { readonly type: 'RecordTrialBalance'; readonly at: string; readonly balance: Extract<PeriodEvent, { type: 'TrialBalanceRecorded' }>['data'] };

const evolve = (periods: Periods, event: PeriodEvent): Periods => {
  switch (event.type) {
    case 'PeriodClosed': {
      const { from, to } = event.data;
      if (periods.open || periods.closedTo !== from || (from !== null && to <= from))
        throw new Error('impossible history: periods closed out of order');
      return { ...periods, closedTo: to, open: { from, to } };
    }
    case 'TrialBalanceRecorded':
      if (periods.open?.to !== event.data.to) throw new Error('impossible history: a trial balance of no closing');
      return { ...periods, open: null, closing: event.data.closing };
    default:
      return unreachable(event);
  }
};

const decide = (periods: Periods, command: PeriodCommand): readonly PeriodEvent[] => {
  if (command.type === 'RecordTrialBalance')
    return periods.open?.to === command.balance.to ? [{ type: 'TrialBalanceRecorded', at: command.at, data: command.balance }] : [];
  const { at, to, by } = command;
  const { closedTo } = periods;
  if (to === closedTo) return [];
  if (closedTo !== null && to < closedTo) throw new ServiceError('INVALID_STATE', `The books are closed to ${closedTo} already.`);
  if (!isMidnight(to)) throw new ServiceError('VALIDATION_ERROR', 'A period ends when a day begins, at 00:00 UTC.');
  if (to > at) throw new ServiceError('VALIDATION_ERROR', 'A period can be closed only when it is over.');
  return [{ type: 'PeriodClosed', at, data: { from: closedTo, to, by } }];
};

export const periods: Decider<Periods, PeriodCommand, PeriodEvent> = { initial: { closedTo: null, open: null, closing: [] }, decide, evolve };

/** The time at which an entry is booked: its effective time, or the end of the closed periods if that end is later. Closed periods never change. */
export const bookedAt = (effectiveAt: string, closedTo: string | null): string =>
  closedTo !== null && effectiveAt < closedTo ? closedTo : effectiveAt;

// ------------------------------------------------------------------------------------------------------------------------------------
// Posting rules.

/** The version of each rule that was ever changed. All other rules are in their first version. */
export type RuleVersions = Readonly<Record<string, number>>;

export interface ChangePostingRules {
  readonly at: string;
  /** The newest version of each rule in this release. */
  readonly newest: RuleVersions;
}

const FIRST_VERSION = 1;

/** A rule never goes back to an older version. To undo a change, add a new version that posts like the older one. */
export const postingRuleVersions: Decider<RuleVersions, ChangePostingRules, PostingRuleChanged> = {
  initial: {},
  decide: (versions, { at, newest }) =>
    Object.entries(newest)
      .filter(([rule, version]) => version > (versions[rule] ?? FIRST_VERSION))
      .map(([rule, version]) => ({ type: 'PostingRuleChanged', at, data: { rule, version } })),
  evolve: (versions, { data: { rule, version } }) => {
    if (version <= (versions[rule] ?? FIRST_VERSION)) throw new Error(`impossible history: posting rule ${rule} goes back to version ${version}`);
    return { ...versions, [rule]: version };
  },
};
