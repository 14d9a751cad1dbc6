/** The events of this lib, and the kinds of streams that hold them. */
import { type DecidedStreamType, defineEvents, type StreamType } from '#eventstore';
import {
  type ChangePostingRules,
  type ManualAdjustment,
  type PeriodCommand,
  type PeriodEvent,
  type Periods,
  periods,
  type PostingRuleChanged,
  postingRuleVersions,
  type RuleVersions,
} from './adjustment.js';
import { type RemittanceCommand, type RemittanceEvent, type Remittances, remittances } from './remittance.js';
import { beginOf } from './days.js';

export const periodEvents = defineEvents<PeriodEvent>({ PeriodClosed: [], TrialBalanceRecorded: [] });
export const postingRuleEvents = defineEvents<PostingRuleChanged>({ PostingRuleChanged: [] });
export const manualAdjustmentEvents = defineEvents<ManualAdjustment>({ ManualAdjustment: [] });

export const remittanceEvents = defineEvents<RemittanceEvent>({ AgencyRemitted: [], AgencyRemittanceReversed: [] });

const PREFIX = 'adjustment-';

/** One stream holds all closings of periods, in order. */
export const PERIODS_STREAM: DecidedStreamType<Periods, PeriodCommand, PeriodEvent> = { prefix: PREFIX, events: periodEvents, decider: periods };
export const PERIODS_ID = 'periods';
export const PERIODS = PREFIX + PERIODS_ID;

/** One stream holds all changes of posting rules, in order. */
export const POSTING_RULES_STREAM: DecidedStreamType<RuleVersions, ChangePostingRules, PostingRuleChanged> = {
  prefix: PREFIX,
  events: postingRuleEvents,
  decider: postingRuleVersions,
};
export const POSTING_RULES_ID = 'rules';
export const RULE_CHANGES = PREFIX + POSTING_RULES_ID;

/** Each adjustment by hand has a stream of its own, with one event. */
export const ADJUSTMENT_STREAM: StreamType<ManualAdjustment | null, ManualAdjustment> = {
  prefix: PREFIX,
  events: manualAdjustmentEvents,
  decider: { initial: null, evolve: (_, event) => event },
  effectiveAt: ({ data }) => data.effectiveAt,
};

/** One stream for each portal holds its remittances, in order. */
export const REMITTANCE_STREAM: DecidedStreamType<Remittances, RemittanceCommand, RemittanceEvent> = {
  prefix: 'remittance-',
  events: remittanceEvents,
  decider: remittances,
  effectiveAt: ({ data }) => beginOf(data.on),
};
