/** Checkout streams. */
import {
  type DecidedStreamType,
  defineEvents,
  type EventStore,
  execute,
  load,
  type Loaded,
  type LogGate,
  type Origin,
  readStreams,
} from '#eventstore';
import { type Clock, type ErrorCode, fold, type Ids, timestamp, unreachable } from '#kernel';
import { type KeyRing, type Logger, type PersonalKey, type PersonalKeys, purge } from '#platform';
import {
  type Checkout,
  checkout as decider,
  type CheckoutCommand,
  type CheckoutContent,
  type CheckoutEvent,
  type CheckoutTerms,
  type Shown,
} from './checkout.js';
import { contentOf, contentText, type IntakeRows, intakeRow, keyOfContent, type PurgedIntake } from './intake-rows.js';

type Started = Extract<CheckoutEvent, { type: 'CheckoutStarted' }>['data'];

/** Version 1 held the content, and did not say whether the request was signed. A link always was. */
const fromV1 = (data: Omit<Started, 'content' | 'signed'> & CheckoutContent): Started => {
  const { referenceId, lineItems, payer, returnUrl, cancelUrl, state, locale, ...rest } = data;
  return { ...rest, signed: rest.intake === 'link', content: { referenceId, lineItems, payer, returnUrl, cancelUrl, state, locale } };
};

export const checkoutEvents = defineEvents<CheckoutEvent>({
  CheckoutStarted: [fromV1],
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

export interface Session extends Shown {
  readonly checkoutId: string;
  readonly revision: bigint;
  /** The key of the content, which its payments use too. null: the content is gone, or of a release before keys. */
  readonly key: PersonalKey | null;
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

type OutcomeWatcher = (outcome: CheckoutOutcome, portalId: string) => void;

export interface SessionPorts {
  readonly store: EventStore;
  readonly ownLog: Pick<LogGate, 'verified'>;
  readonly rows: IntakeRows;
  readonly personal: PersonalKeys;
  readonly clock: Clock;
  readonly ids: Ids;
  readonly log: Logger;
}

export class CheckoutSessions {
  private readonly watchers = new Set<OutcomeWatcher>();

  constructor(private readonly ports: SessionPorts) {}

  /** `watcher` is called for each outcome that this process has recorded, for metrics and limits. */
  watch(watcher: OutcomeWatcher): void {
    this.watchers.add(watcher);
  }

  /** The present session. null: there is no session with this id. Throws the errors of the store and of the database. */
  async load(checkoutId: string): Promise<Session | null> {
    if (!CHECKOUT_ID.test(checkoutId)) return null;
    const [loaded, texts] = await Promise.all([load(this.ports.store, CHECKOUT_STREAM, checkoutId), this.ports.rows.read(checkoutId)]);
    if (loaded.revision === null || loaded.state.phase === 'none') return null;
    const { content } = loaded.state.terms;
    return sessionOf(loaded, typeof content === 'string' ? await this.opened(checkoutId, content, texts.get(content)) : { content, key: null });
  }

  private async opened(checkoutId: string, hash: string, text: string | undefined): Promise<OpenedContent> {
    if (text === undefined) return GONE;
    const keyId = keyOfContent(text);
    const opened = await this.ports.personal.open(keyId === null ? [] : [keyId]);
    const content = contentOf(checkoutId, text, hash, opened);
    if (content === 'changed') this.ports.log.error({ checkoutId }, 'the content of a checkout was changed; it takes no card');
    return typeof content === 'string' ? GONE : { content, key: keyId === null ? null : opened.key(keyId) };
  }

  /**
   * Begins the session. `exp`: unix seconds of the request; null: it has none. Throws VALIDATION_ERROR if the content is too large, Conflict if the
   * stream exists already, and the errors of the database and of the store.
   */
  async start(terms: Omit<CheckoutTerms, 'content'>, content: CheckoutContent, exp: string | null, origin: Origin): Promise<Session> {
    const { checkoutId } = terms;
    const { rows, clock, ids, personal } = this.ports;
    const text = contentText(content, ids.uuid());
    const key = await personal.take();
    const row = intakeRow(checkoutId, text, { key, exp, now: clock.realNow() });
    // An event must never name a row that a crash can lose.
    await rows.write(row);
    const begun = { type: 'Start', terms: { ...terms, content: row.hash } } as const;
    return this.executeOn({ id: checkoutId, state: decider.initial, revision: null, position: null }, { content, key }, begun, origin);
  }

  /** Deletes the contents that are no longer needed, and the keys of those that led to no payment. Returns the number of contents. */
  purge(nowMs: number, stop?: AbortSignal): Promise<number> {
    return purge(async (limit) => {
      const gone = await this.ports.rows.purge(timestamp(nowMs), limit);
      await this.discardKeys(gone);
      return gone.length;
    }, stop);
  }

  private async discardKeys(gone: readonly PurgedIntake[]): Promise<void> {
    const { store, ownLog, personal } = this.ports;
    const boxed = gone.flatMap((row) => (row.keyId === null ? [] : [{ ...row, keyId: row.keyId }]));
    if (boxed.length === 0) return;
    const streams = await readStreams(
      store,
      boxed.map(({ checkoutId }) => PREFIX + checkoutId),
    );
    // A payment of the session may use the key. If the log has lost the attempt, the key must stay.
    await ownLog.verified(null);
    const unused = boxed.filter(({ hash }, index) => {
      const state = fold(decider, streams[index]!.map(checkoutEvents.read));
      return state.phase !== 'none' && (state.terms.content !== hash || state.attemptIds.length === 0);
    });
    await personal.discard(unused.map(({ keyId }) => keyId));
  }

  /**
   * Decides the command and appends its events at the loaded revision. If there are none, nothing is appended. Throws ServiceError INVALID_STATE if
   * the phase does not allow the command, Conflict if another writer appended first, and the errors of the store.
   */
  execute({ checkoutId, checkout, content, key, revision }: Session, command: WithoutTime<CheckoutCommand>, origin: Origin): Promise<Session> {
    return this.executeOn({ id: checkoutId, state: checkout, revision, position: null }, { content, key }, command, origin);
  }

  private async executeOn(loaded: Loaded<Checkout>, opened: OpenedContent, command: WithoutTime<CheckoutCommand>, origin: Origin): Promise<Session> {
    const after = await execute(this.ports, CHECKOUT_STREAM, loaded, [{ ...command, at: timestamp(this.ports.clock.now()) }], origin);
    const outcome = after.revision === loaded.revision ? null : outcomeOf(command);
    const session = sessionOf(after, opened);
    if (outcome !== null) for (const watcher of this.watchers) watcher(outcome, session.checkout.terms.portalId);
    return session;
  }
}

type OpenedContent = Pick<Session, 'content' | 'key'>;
const GONE: OpenedContent = { content: null, key: null };

/** The session of a stream that has begun. */
const sessionOf = ({ id, state, revision }: Loaded<Checkout>, opened: OpenedContent): Session => ({
  checkoutId: id,
  checkout: state as Session['checkout'],
  ...opened,
  revision: revision!,
});

export type WithoutTime<Command> = Command extends unknown ? Omit<Command, 'at'> : never;
