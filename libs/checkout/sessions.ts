/** Checkout streams. */
import { type DecidedStreamType, defineEvents, type EventStore, execute, load, type Loaded, type Origin } from '#eventstore';
import { type Clock, type ErrorCode, type Ids, timestamp, unreachable } from '#kernel';
import type { KeyRing } from '#platform';
import { type Checkout, checkout as decider, type CheckoutCommand, type CheckoutEvent, type KnownCheckout } from './checkout.js';

export const checkoutEvents = defineEvents<CheckoutEvent>({
  CheckoutStarted: [],
  CheckoutOpened: [],
  CheckoutExtended: [],
  AttemptStarted: [],
  AttemptDeclined: [],
  OutcomeUnknown: [],
  CheckoutPaid: [],
  PayerLeft: [],
  CheckoutCancelled: [],
  CheckoutExpired: [],
});

const PREFIX = 'checkout-';
export const CHECKOUT_STREAMS: readonly string[] = [PREFIX];
export const checkoutIdOf = (stream: string): string => stream.slice(PREFIX.length);

const CHECKOUT_STREAM: DecidedStreamType<Checkout, CheckoutCommand, CheckoutEvent> = { prefix: PREFIX, events: checkoutEvents, decider };

const CHECKOUT_ID = /^cs_[\w-]{32}$/;
const ID_BYTES = 24;

/**
 * Makes the id of a session: `cs_` and 24 bytes that cannot be guessed. The bytes are a keyed hash of a new id or, if the request has a nonce, of
 * portal and nonce. A nonce always gives the same id, and a stream begins only once. So a nonce begins at most one session.
 *
 * The hash uses the oldest key of the ring. The id must stay the same while the link is valid.
 */
export const newCheckoutId = (keys: KeyRing, of: { readonly fresh: string } | { readonly portalId: string; readonly nonce: string }): string =>
  `cs_${keys.mac('checkout', JSON.stringify(of), keys.kids[0]).subarray(0, ID_BYTES).toString('base64url')}`;

export interface Session {
  readonly checkoutId: string;
  readonly checkout: KnownCheckout;
  readonly revision: bigint;
}

/**
 * What became of a session or of one of its attempts. `declined`: by the card's bank. `refused`: by our own rules. `gateway_error`: nothing was
 * charged. `voided`: a charge of unknown outcome was taken back. `left`: the payer went back to the partner without an outcome.
 */
export type CheckoutOutcome = 'started' | 'paid' | 'declined' | 'refused' | 'gateway_error' | 'voided' | 'unknown' | 'left' | 'cancelled' | 'expired';

const outcomeOf = (command: WithoutTime<CheckoutCommand>): CheckoutOutcome | null => {
  switch (command.type) {
    case 'Start':
      return 'started';
    case 'RecordPaid':
      return 'paid';
    case 'RecordUnknown':
      return 'unknown';
    case 'RecordDeclined':
      return REFUSALS[command.code] ?? 'refused';
    case 'Leave':
      return 'left';
    case 'Cancel':
      return 'cancelled';
    case 'Expire':
      return 'expired';
    case 'Open':
    case 'Extend':
    case 'StartAttempt':
      return null;
    default:
      return unreachable(command);
  }
};

const REFUSALS: Readonly<Partial<Record<ErrorCode, CheckoutOutcome>>> = {
  PAYMENT_DECLINED: 'declined',
  PAYMENT_GATEWAY_ERROR: 'gateway_error',
  PAYMENT_TIMEOUT: 'voided',
};

export class CheckoutSessions {
  private readonly watchers = new Set<(outcome: CheckoutOutcome) => void>();

  constructor(
    private readonly store: EventStore,
    private readonly clock: Clock,
    private readonly ids: Ids,
  ) {}

  /** `watcher` is called for each outcome that this process has recorded, for metrics. */
  watch(watcher: (outcome: CheckoutOutcome) => void): void {
    this.watchers.add(watcher);
  }

  /** The present session. null: there is no session with this id. Throws Unavailable. */
  async load(checkoutId: string): Promise<Session | null> {
    if (!CHECKOUT_ID.test(checkoutId)) return null;
    const loaded = await load(this.store, CHECKOUT_STREAM, checkoutId);
    return loaded.revision === null || loaded.state.phase === 'none' ? null : sessionOf(loaded);
  }

  /** Begins the session. Throws Conflict if its stream exists already, and the errors of the store. */
  start(command: Omit<Extract<CheckoutCommand, { type: 'Start' }>, 'at'>, origin: Origin): Promise<Session> {
    const { checkoutId } = command.terms;
    return this.executeOn({ id: checkoutId, state: decider.initial, revision: null, position: null }, command, origin);
  }

  /**
   * Decides the command and appends its events at the loaded revision. If there are none, nothing is appended. Throws ServiceError INVALID_STATE if
   * the phase does not allow the command, Conflict if another writer appended first, and the errors of the store.
   */
  execute({ checkoutId, checkout, revision }: Session, command: WithoutTime<CheckoutCommand>, origin: Origin): Promise<Session> {
    return this.executeOn({ id: checkoutId, state: checkout, revision, position: null }, command, origin);
  }

  private async executeOn(loaded: Loaded<Checkout>, command: WithoutTime<CheckoutCommand>, origin: Origin): Promise<Session> {
    const ports = { store: this.store, clock: this.clock, ids: this.ids };
    const after = await execute(ports, CHECKOUT_STREAM, loaded, [{ ...command, at: timestamp(this.clock.now()) }], origin);
    const outcome = after.revision === loaded.revision ? null : outcomeOf(command);
    if (outcome !== null) for (const watcher of this.watchers) watcher(outcome);
    return sessionOf(after);
  }
}

/** The session of a stream that has begun. */
const sessionOf = ({ id, state, revision }: Loaded<Checkout>): Session => ({ checkoutId: id, checkout: state as KnownCheckout, revision: revision! });

export type WithoutTime<Command> = Command extends unknown ? Omit<Command, 'at'> : never;
