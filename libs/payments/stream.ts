/** Payment streams: loading is a fold, appending is at an exact revision, and an append of which nobody knows the outcome is repeated under the same ids. */
import { type Clock, type Deadline, type Ids, type Json, ServiceError } from '#kernel';
import { type Actor, appendAgain, Conflict, type EventStore, type NewEvent, type Recorded, Unavailable, upcast, upcasters } from '#eventstore';
import { payment as decider, type Payment, type PaymentCommand, type PaymentEvent } from './payment.js';

/** Schema version of each payment event type; only the newest is written. The steps from older versions stand here when there are any. */
const VERSION = 1;
const PAYMENT_EVENT_TYPES: readonly PaymentEvent['type'][] = [
  'PaymentInitiated',
  'PaymentCreated',
  'PaymentDeclined',
  'PaymentFailed',
  'PaymentOutcomeUnknown',
  'PaymentAbandoned',
  'ReconciliationStarted',
  'VoidRequested',
  'RefundRequested',
  'PaymentVoided',
  'PaymentRefunded',
  'FeeRefunded',
  'ReversalEnded',
  'ReversalAcknowledged',
  'PaymentSettled',
  'SettlementRejected',
  'SettlementWithdrawn',
  'PaymentDisputed',
  'PaymentResolved',
];
upcasters.register(Object.fromEntries(PAYMENT_EVENT_TYPES.map((type) => [type, []])));

/** A stream this long is no normal payment: alarm, do not refuse (event-store.md 3). */
export const LONG_STREAM_EVENTS = 200;

/** Pause before an append is repeated; KurrentDB drops a retry that comes before the original is replicated. */
/** Milliseconds that an append may be repeated for, of what is left of the request. */
export type AppendBudget = (leftMs: number) => number;
/** An outcome is worth trying to record for 4 s even when the request's own time is up. */
export const OUTCOME: AppendBudget = (leftMs) => Math.max(leftMs, 4_000);
/** An intent must leave time for what it announces: a gateway call that would get less than 2 s is not sent (C42). */
export const INTENT: AppendBudget = (leftMs) => leftMs - 3_000;

export const paymentStream = (paymentId: string): string => `payment-${paymentId}`;
export const paymentIdOf = (stream: string): string => stream.slice('payment-'.length);

/** Payment events of an append or of a read; other types in a payment stream stop the fold rather than being guessed at. */
export const toPaymentEvent = (recorded: Recorded): PaymentEvent => {
  const { type, data, meta } = upcast(recorded);
  return { type, data, at: meta.recordedAt } as unknown as PaymentEvent;
};

export interface Loaded {
  readonly paymentId: string;
  readonly payment: Payment;
  /** null: the stream does not exist. */
  readonly revision: bigint | null;
}

export interface Owner {
  readonly actor: Actor;
  readonly correlationId: string;
}

export class PaymentStreams {
  constructor(
    private readonly store: EventStore,
    private readonly clock: Clock,
    private readonly ids: Ids,
  ) {}

  /** Folds the stream. Throws Unavailable. */
  async load(paymentId: string): Promise<Loaded> {
    let revision: bigint | null = null;
    let payment: Payment = decider.initial;
    for await (const recorded of this.store.read(paymentStream(paymentId))) {
      payment = decider.evolve(payment, toPaymentEvent(recorded));
      revision = recorded.revision;
    }
    return { paymentId, payment, revision };
  }

  /** All events of the stream, in order. */
  async events(paymentId: string): Promise<Recorded[]> {
    const events: Recorded[] = [];
    for await (const recorded of this.store.read(paymentStream(paymentId))) events.push(recorded);
    return events;
  }

  /**
   * Decides and appends at the loaded revision. Returns the state after it; no events, no append. While the store cannot say whether it
   * appended, the same ids are sent again until the deadline. Throws what `decide` refuses, {@link Conflict}, OutcomeUnknown, Unavailable.
   */
  async execute(
    loaded: Loaded,
    commands: readonly PaymentCommand[],
    owner: Owner,
    deadline: Deadline,
    budget: AppendBudget = OUTCOME,
  ): Promise<Loaded> {
    const events: PaymentEvent[] = [];
    let { payment } = loaded;
    for (const command of commands) {
      const decided = decider.decide(payment, command);
      payment = decided.reduce((state, event) => decider.evolve(state, event), payment);
      events.push(...decided);
    }
    if (events.length === 0) return loaded;
    const stream = paymentStream(loaded.paymentId);
    const expected = loaded.revision ?? 'no_stream';
    const written = events.map((event) => this.toNewEvent(event, owner));
    const leftMs = budget(deadline.leftMs);
    if (leftMs <= 0) throw new Unavailable('no time left to append');
    const { revision } = await appendAgain(this.store, this.clock, stream, expected, written, leftMs);
    return { paymentId: loaded.paymentId, payment, revision };
  }

  private toNewEvent({ type, at, data }: PaymentEvent, { actor, correlationId }: Owner): NewEvent {
    // Drawn once per run of an owner and kept for its retries: a retry is recognised, and two owners always conflict (recovery.md 1.8).
    const effectiveAt = effectiveAtOf({ type, at, data } as PaymentEvent);
    const meta = { recordedAt: at, ...(effectiveAt !== null && { effectiveAt }), actor, correlationId };
    return { id: this.ids.uuid(), type, v: VERSION, data: data as unknown as Json, meta };
  }
}

/** When a fact took effect in the world, where that is not when we learned of it: a batch when it closed, a dispute on the day that it was opened. */
const effectiveAtOf = ({ type, data }: PaymentEvent): string | null => {
  if (type === 'PaymentSettled' || type === 'SettlementRejected' || type === 'SettlementWithdrawn') return data.closedAt;
  return null;
};

/** How often somebody else may append first. */
export const CONFLICT_ROUNDS = 4;

/** Repeats `work` on Conflict: somebody else appended first, so load and decide again. At most `rounds`; then the payment is too busy to answer. */
export const retryingConflicts = async <T>(work: () => Promise<T>, rounds = CONFLICT_ROUNDS): Promise<T> => {
  for (let round = 1; ; round++) {
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof Conflict)) throw error;
      if (round >= rounds) throw new ServiceError('INVALID_STATE', 'The payment is being changed by another request; try again.');
    }
  }
};
