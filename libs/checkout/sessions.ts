/** Checkout streams: loading is a fold, appending is at the loaded revision, and an append of which nobody knows the outcome is repeated under the same ids. */
import { type Actor, appendAgain, type EventStore, type NewEvent, type Recorded, upcast, upcasters } from '#eventstore';
import { type Clock, type Ids, type Json, timestamp } from '#kernel';
import type { KeyRing } from '#platform';
import { type Checkout, checkout as decider, type CheckoutCommand, type CheckoutEvent, type KnownCheckout } from './checkout.js';

/** Schema version of each event type; only the newest is written. */
const VERSION = 1;
const CHECKOUT_EVENT_TYPES: readonly CheckoutEvent['type'][] = [
  'CheckoutStarted',
  'CheckoutOpened',
  'CheckoutExtended',
  'AttemptStarted',
  'AttemptDeclined',
  'OutcomeUnknown',
  'CheckoutPaid',
  'PayerLeft',
  'CheckoutCancelled',
  'CheckoutExpired',
];
upcasters.register(Object.fromEntries(CHECKOUT_EVENT_TYPES.map((type) => [type, []])));

/** Repetitions of an append whose outcome the store could not tell. */

const PREFIX = 'checkout-';
export const CHECKOUT_STREAMS: readonly string[] = [PREFIX];
export const checkoutIdOf = (stream: string): string => stream.slice(PREFIX.length);

/** Types that are not ours stop the fold rather than being guessed at. */
export const toCheckoutEvent = (recorded: Recorded): CheckoutEvent => {
  const { type, data, meta } = upcast(recorded);
  return { type, data, at: meta.recordedAt } as unknown as CheckoutEvent;
};

const CHECKOUT_ID = /^cs_[\w-]{32}$/;
const ID_BYTES = 24;

/**
 * `cs_` and 24 bytes that nobody can guess: a keyed hash of what must be new, or of portal and nonce where there is one. So one nonce is one stream, and the
 * store's own "no stream yet" makes it single use, on however many processes. Under the oldest key of the ring: it must stay the same for as long as a link.
 */
export const newCheckoutId = (keys: KeyRing, of: { readonly fresh: string } | { readonly portalId: string; readonly nonce: string }): string =>
  `cs_${keys.mac('checkout', JSON.stringify(of), keys.kids[0]).subarray(0, ID_BYTES).toString('base64url')}`;

export interface Session {
  readonly checkoutId: string;
  readonly checkout: KnownCheckout;
  readonly revision: bigint;
}

/** Who acts, and in which request. */
export interface By {
  readonly actor: Actor;
  readonly correlationId: string;
}

export class CheckoutSessions {
  constructor(
    private readonly store: EventStore,
    private readonly clock: Clock,
    private readonly ids: Ids,
  ) {}

  /** The session as it is now; null for an id that never was one. Throws Unavailable. */
  async load(checkoutId: string): Promise<Session | null> {
    if (!CHECKOUT_ID.test(checkoutId)) return null;
    let checkout: Checkout = decider.initial;
    let revision: bigint | null = null;
    for await (const recorded of this.store.read(PREFIX + checkoutId)) {
      checkout = decider.evolve(checkout, toCheckoutEvent(recorded));
      revision = recorded.revision;
    }
    return checkout.phase === 'none' || revision === null ? null : { checkoutId, checkout, revision };
  }

  /** Begins the stream. Throws Conflict where it has begun, and what the store throws. */
  async start(command: Omit<Extract<CheckoutCommand, { type: 'Start' }>, 'at'>, by: By): Promise<Session> {
    return (await this.append(command.terms.checkoutId, decider.initial, null, { ...command, at: this.now() }, by))!;
  }

  /**
   * Decides and appends at the loaded revision; a command from which nothing follows appends nothing. Throws ServiceError INVALID_STATE where the phase does
   * not allow it, Conflict where somebody else appended first, and what the store throws.
   */
  async execute(session: Session, command: WithoutTime<CheckoutCommand>, by: By): Promise<Session> {
    const appended = await this.append(session.checkoutId, session.checkout, session.revision, { ...command, at: this.now() }, by);
    return appended ?? session;
  }

  private now(): string {
    return timestamp(this.clock.now());
  }

  private async append(checkoutId: string, before: Checkout, revision: bigint | null, command: CheckoutCommand, by: By): Promise<Session | null> {
    const events = decider.decide(before, command);
    if (events.length === 0) return null;
    const written = events.map(({ type, at, data }): NewEvent => ({
      id: this.ids.uuid(),
      type,
      v: VERSION,
      data: data as unknown as Json,
      meta: { recordedAt: at, ...by },
    }));
    const appended = await appendAgain(this.store, this.clock, PREFIX + checkoutId, revision ?? 'no_stream', written);
    const after = events.reduce((state, event) => decider.evolve(state, event), before);
    return { checkoutId, checkout: after as KnownCheckout, revision: appended.revision };
  }
}

type WithoutTime<Command> = Command extends unknown ? Omit<Command, 'at'> : never;
