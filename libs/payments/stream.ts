import { hash } from 'node:crypto';
import { canonicalJson, type Clock, type Deadline, fold, type Ids, inClear, type Json, type Personal, ServiceError } from '#kernel';
import {
  type AppendOptions,
  defineEvents,
  type DecidedStreamType,
  type EventStore,
  execute,
  load,
  type Origin,
  type Position,
  readStreams,
  type Recorded,
  retryOnConflict,
} from '#eventstore';
import {
  type Checks,
  disputeContext,
  type Intent,
  type KeyedEvent,
  type LineItem,
  type LineTexts,
  payment as decider,
  type Payer,
  type Payment,
  type PaymentCommand,
  type PaymentEvent,
  type PaymentTerms,
  type Reason,
  reasonContext,
  termsContext,
} from './payment.js';
import type { PaymentPorts } from './charge.js';
import { excessEvidence, raiseStaffTask } from './staff.js';

/** Upcasts to version 2. Events of version 1 did not name the key of their request. */
const withoutKey = <Data extends Pick<Intent, 'idempotency'>>(data: Omit<Data, 'idempotency'>): Data => ({ ...data, idempotency: null }) as Data;

/** Upcast to version 3. Lines of version 2 had no coding. */
const withoutCoding = ({ lineItems, ...data }: InitiatedInClear<Omit<LineItem, 'coding'>>): InitiatedInClear<LineItem> => ({
  ...data,
  lineItems: lineItems.map((line) => ({ ...line, coding: null })),
});
type Initiated = Intent & PaymentTerms;
type InitiatedInClear<Line> = Omit<Initiated, 'lineItems' | 'personal'> & {
  readonly lineItems: readonly (Line & LineTexts)[];
  readonly payer: Payer | null;
};

/** Upcast to version 4. Version 3 held payer and texts of lines in clear. */
const termsInClear = ({ payer, lineItems, ...data }: InitiatedInClear<LineItem>): Initiated => {
  const lines = lineItems.map(({ description, metadata }) => ({ description, metadata }));
  const isEmpty = payer === null && lines.every(({ description, metadata }) => description === null && metadata === null);
  return {
    ...data,
    lineItems: lineItems.map(({ description: _, metadata: __, ...line }) => line),
    personal: isEmpty ? null : inClear({ payer, lines }),
  };
};

/** Upcast from the version that held the reason in clear. */
const reasonInClear = <Data extends { readonly personal: Personal<Reason> }>({
  reason,
  ...data
}: Omit<Data, 'personal'> & { readonly reason: string | null }): Data =>
  ({ ...data, personal: reason === null ? null : inClear({ reason }) }) as unknown as Data;

/** Upcast to version 2. Version 1 dropped the results of AVS and CVV. */
const withoutChecks = <Data extends Checks>(data: Omit<Data, keyof Checks>): Data => ({ ...data, avs: null, cvv: null }) as Data;

/**
 * Upcast to a version whose new fields are absent in the old one. The version rises all the same: a release that does not know the fields must not
 * read the event.
 */
const asItWas = <Data>(data: Data): Data => data;

export const paymentEvents = defineEvents<PaymentEvent>({
  PaymentInitiated: [withoutKey, withoutCoding, termsInClear],
  PaymentCreated: [asItWas],
  PaymentDeclined: [withoutChecks, asItWas, asItWas],
  PaymentFailed: [asItWas],
  PaymentOutcomeUnknown: [],
  PaymentAbandoned: [],
  PaymentLost: [],
  ReconciliationStarted: [],
  VoidRequested: [withoutKey, reasonInClear],
  RefundRequested: [withoutKey, reasonInClear],
  PaymentVoided: [asItWas],
  PaymentRefunded: [asItWas],
  FeeRefunded: [asItWas],
  RefundFailed: [],
  ReturnedElsewhere: [],
  ReversalEnded: [reasonInClear],
  ReversalAcknowledged: [withoutKey],
  PaymentSettled: [],
  SettlementRejected: [],
  SettlementWithdrawn: [],
  PaymentDisputed: [reasonInClear, asItWas],
  ReturnRequested: [],
  PaymentResolved: [],
});

/** The text about a person in an event, with the context of its box. null: the event has no such field. */
export const textOf = (
  paymentId: string,
  { type, data }: PaymentEvent,
): { readonly personal: Personal<unknown>; readonly context: string } | null => {
  switch (type) {
    case 'PaymentInitiated':
      return { personal: data.personal, context: termsContext(paymentId) };
    case 'VoidRequested':
    case 'RefundRequested':
    case 'ReversalEnded':
      return { personal: data.personal, context: reasonContext(paymentId, data.attemptId) };
    case 'PaymentDisputed':
      return { personal: data.personal, context: disputeContext(paymentId, data.disputeId) };
    default:
      return null;
  }
};

const NAMES_A_KEY: ReadonlySet<string> = new Set<KeyedEvent['type']>([
  'PaymentInitiated',
  'VoidRequested',
  'RefundRequested',
  'ReversalAcknowledged',
]);

/**
 * The event as it is shown outside. A SHA-256 replaces the key of the request: proofs stay checkable, and the hashes of the key store stay hidden
 * (docs/decisions/0030-keys-in-events.md).
 */
export const shownEvent = <Shown extends { readonly type: string; readonly data: unknown }>(event: Shown): Shown => {
  if (!NAMES_A_KEY.has(event.type)) return event;
  const { idempotency } = event.data as { readonly idempotency?: Json };
  if (idempotency === undefined || idempotency === null) return event;
  return { ...event, data: { ...(event.data as object), idempotency: hash('sha256', canonicalJson(idempotency)) } };
};

const PREFIX = 'payment-';
export const paymentStream = (paymentId: string): string => PREFIX + paymentId;
export const paymentIdOf = (stream: string): string => stream.slice(PREFIX.length);

const PAYMENT_STREAM: DecidedStreamType<Payment, PaymentCommand, PaymentEvent> = {
  prefix: PREFIX,
  events: paymentEvents,
  decider,
  // Facts of settlement take effect when their batch closed.
  effectiveAt: ({ type, data }) =>
    type === 'PaymentSettled' || type === 'SettlementRejected' || type === 'SettlementWithdrawn' ? data.closedAt : null,
};

/** A longer stream causes a warning in the process's log, but no refusal (docs/contract.md#streams-and-appends). */
export const LONG_STREAM_EVENTS = 200;

/** `forMs`: how long an append may be repeated. `leftMs`: the time that the request has left. `isIntent`: as in {@link AppendOptions}. */
export interface AppendBudget extends Pick<AppendOptions, 'isIntent'> {
  readonly forMs: (leftMs: number) => number;
}
/** The append of an outcome is repeated for at least 4 s, even if the request has no time left. */
export const OUTCOME: AppendBudget = { forMs: (leftMs) => Math.max(leftMs, 4_000) };
/** The append of a fence, before the gateway is asked what became of an attempt. */
export const FENCE: AppendBudget = { ...OUTCOME, isIntent: true };
/** The append of an intent leaves 3 s for the gateway call. With less than 2 s left, the call is not sent (C42). */
export const INTENT: AppendBudget = { forMs: (leftMs) => leftMs - 3_000, isIntent: true };

/**
 * An append to a stream that was read longer ago counts as a conflict. A process that stood still for so long may have read it from a log that was not
 * ours, and the revision can fit by accident (C76). Every request, every try of recovery and every command of staff ends sooner. The host's time
 * counts, since the monotonic clock stops while a machine is suspended.
 */
export const READ_TOO_LONG_AGO_MS = 60_000;

export interface LoadedPayment {
  readonly paymentId: string;
  readonly payment: Payment;
  /** null: the stream does not exist. */
  readonly revision: bigint | null;
  /** When it was read or last appended to, by the host's time, in ms since the epoch. */
  readonly readAt: number;
  /** The position of the newest event that this process has just appended. null: it has appended none. */
  readonly appendedAt?: Position | null;
}

export class PaymentStreams {
  constructor(
    readonly store: EventStore,
    private readonly clock: Clock,
    private readonly ids: Ids,
    /** Absent: no task is raised. */
    private readonly log?: PaymentPorts['log'],
  ) {}

  /** Folds the stream. Throws Unavailable. */
  async load(paymentId: string): Promise<LoadedPayment> {
    const readAt = this.clock.realNow();
    const { state, revision } = await load(this.store, PAYMENT_STREAM, paymentId);
    return { paymentId, payment: state, revision, readAt };
  }

  /** Folds several streams, which are read in one statement. Throws Unavailable. */
  async loadAll(paymentIds: readonly string[]): Promise<ReadonlyMap<string, LoadedPayment>> {
    const readAt = this.clock.realNow();
    const streams = await readStreams(this.store, paymentIds.map(paymentStream));
    return new Map(
      paymentIds.map((paymentId, index) => {
        const events = streams[index]!;
        const payment = fold(decider, events.map(paymentEvents.read));
        return [paymentId, { paymentId, payment, revision: events.at(-1)?.revision ?? null, readAt }];
      }),
    );
  }

  /** All events of the stream, in order. */
  async events(paymentId: string): Promise<Recorded[]> {
    const events: Recorded[] = [];
    for await (const recorded of this.store.read(paymentStream(paymentId))) events.push(recorded);
    return events;
  }

  /**
   * Decides, appends at the loaded revision, and returns the new state. Appends nothing if there are no events. Repeats an append of unknown outcome
   * within `budget`. Throws the errors of `decide`, and Conflict, OutcomeUnknown, Unavailable.
   */
  async execute(
    { paymentId, payment, revision, readAt }: LoadedPayment,
    commands: readonly PaymentCommand[],
    origin: Origin,
    deadline: Deadline,
    { forMs, ...budget }: AppendBudget = OUTCOME,
  ): Promise<LoadedPayment> {
    const ports = { store: this.store, clock: this.clock, ids: this.ids };
    const loaded = { id: paymentId, state: payment, revision, position: null };
    const begunAt = this.clock.realNow();
    const limits = { ...budget, forMs: forMs(deadline.leftMs), notAfter: readAt + READ_TOO_LONG_AGO_MS };
    const done = await execute(ports, PAYMENT_STREAM, loaded, commands, origin, limits);
    if (done !== loaded) await this.raiseExcess(paymentId, done.state, origin);
    return { paymentId, payment: done.state, revision: done.revision, readAt: done === loaded ? readAt : begunAt, appendedAt: done.position };
  }

  /**
   * Raises the task of disputes that take more than remained, when they come and when a return overtakes them. The events are recorded, so this never
   * fails. If a process dies before this call, the next report of the dispute makes it again.
   */
  async raiseExcess(paymentId: string, payment: Payment, origin: Origin): Promise<void> {
    const { store, clock, ids, log } = this;
    const evidence = excessEvidence(payment);
    if (!evidence || !log) return;
    await raiseStaffTask({ clock, ids, log }, store, paymentId, 'dispute_after_return', evidence, origin).catch((error: unknown) =>
      log.error({ paymentId, err: error }, 'a dispute takes money that was returned before, and its task could not be recorded'),
    );
  }
}

/** How many times a decision is tried in all, if another writer appends first each time. */
export const CONFLICT_ROUNDS = 4;

/**
 * Runs `work`, which loads and decides. Runs it again if another request appended first. After {@link CONFLICT_ROUNDS} rounds, throws INVALID_STATE.
 */
export const retryingConflicts = <T>(work: () => Promise<T>): Promise<T> =>
  retryOnConflict(work, () => new ServiceError('INVALID_STATE', 'The payment is being changed by another request; try again.'), CONFLICT_ROUNDS);
