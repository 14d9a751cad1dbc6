/**
 * The only way to use a stream: fold its events into a state, decide, and append at the revision that was read.
 *
 * An append with an unknown outcome is repeated with the same event ids, and the store recognises the repeat. Every other append has new event ids.
 * So two processes that append at the same revision always conflict (T2).
 */
import { type Clock, type Decider, type Ids, timestamp } from '#kernel';
import {
  type Actor,
  Conflict,
  type EventStore,
  type Expected,
  type NewEvent,
  OutcomeUnknown,
  type Position,
  ReadOnly,
  Unavailable,
} from './event-store.js';
import type { DomainEvent, EventTypes } from './events.js';

export interface StreamPorts {
  readonly store: Pick<EventStore, 'append' | 'read'>;
  readonly clock: Clock;
  readonly ids: Ids;
}

/** A kind of stream. Its `prefix` and an id make a stream's name. */
export interface StreamType<State, Event extends DomainEvent> {
  readonly prefix: string;
  readonly events: EventTypes<Event>;
  readonly decider: Pick<Decider<State, never, Event>, 'initial' | 'evolve'>;
  /** RFC 3339: when an event took effect in the world. null: at the time when it was recorded. */
  readonly effectiveAt?: (event: Event) => string | null;
}

/** A kind of stream with commands. */
export interface DecidedStreamType<State, Command, Event extends DomainEvent> extends StreamType<State, Event> {
  readonly decider: Decider<State, Command, Event>;
}

/** A stream as it was read. `revision` and `position` are those of its last event; null: there is no such stream. */
export interface Loaded<State> {
  readonly id: string;
  readonly state: State;
  readonly revision: bigint | null;
  readonly position: Position | null;
}

/** The actor and the request that caused the events. */
export interface Origin {
  readonly actor: Actor;
  readonly correlationId: string;
}

export interface AppendOptions {
  /** Milliseconds for which an append may be repeated. Default: {@link MAX_APPEND_TRIES} tries. */
  readonly forMs?: number;
  /** Nothing is sent later than this, by the host's time in ms since the epoch: what was read counts as outdated. Default: no limit. */
  readonly notAfter?: number;
  /**
   * True: a call to a gateway follows. If the store takes no writes, the append is not repeated, since the outcome of the call could not be recorded
   * either. Default: it is repeated.
   */
  readonly isIntent?: boolean;
  /** Id of the first event. With a fixed id, the store recognises the event of a repeated command. Default: a new id. */
  readonly eventId?: string;
}

/** Folds a stream. Throws Unavailable, and UnreadableEvent for an event that this release cannot read. */
export const load = async <State, Event extends DomainEvent>(
  store: Pick<EventStore, 'read'>,
  { prefix, events, decider }: StreamType<State, Event>,
  id: string,
): Promise<Loaded<State>> => {
  let loaded: Loaded<State> = { id, state: decider.initial, revision: null, position: null };
  for await (const recorded of store.read(prefix + id))
    loaded = { id, state: decider.evolve(loaded.state, events.read(recorded)), revision: recorded.revision, position: recorded.position };
  return loaded;
};

/** Appends events that were decided on the loaded state. Throws Conflict, OutcomeUnknown, Unavailable. */
export const append = async <State, Event extends DomainEvent>(
  { store, clock, ids }: StreamPorts,
  { prefix, events: types, decider, effectiveAt }: StreamType<State, Event>,
  { id, state, revision }: Loaded<State>,
  events: readonly Event[],
  { actor, correlationId }: Origin,
  { eventId, ...limits }: AppendOptions = {},
): Promise<Loaded<State>> => {
  // The fold comes before the append: an event that cannot be folded must never reach the log.
  const after = events.reduce((before, event) => decider.evolve(before, event), state);
  const written = events.map((event, index) => {
    const effective = effectiveAt?.(event) ?? null;
    const meta = {
      recordedAt: event.at ?? timestamp(clock.now()),
      ...(effective !== null && { effectiveAt: effective }),
      actor,
      correlationId,
    };
    return types.write(event, index === 0 && eventId !== undefined ? eventId : ids.uuid(), meta);
  });
  const appended = await appendRepeatedly(store, clock, prefix + id, revision ?? 'no_stream', written, limits);
  return { id, state: after, revision: appended.revision, position: appended.position };
};

/**
 * Decides the commands in order and appends their events together. Without events nothing is appended. Throws the errors of `append` and `decide`.
 */
export const execute = async <State, Command, Event extends DomainEvent>(
  ports: StreamPorts,
  type: DecidedStreamType<State, Command, Event>,
  loaded: Loaded<State>,
  commands: readonly Command[],
  origin: Origin,
  options: AppendOptions = {},
): Promise<Loaded<State>> => {
  const { decider } = type;
  const events: Event[] = [];
  let { state } = loaded;
  for (const command of commands) {
    const decided = decider.decide(state, command);
    state = decided.reduce((before, event) => decider.evolve(before, event), state);
    events.push(...decided);
  }
  return events.length === 0 ? loaded : append(ports, type, loaded, events, origin, options);
};

/** After this many rounds with a conflict, the stream counts as too busy. */
export const MAX_CONFLICT_ROUNDS = 5;

/**
 * Repeats `work` while it throws {@link Conflict}. `work` must load the stream and decide again each time. Throws `busy()` after `rounds` conflicts.
 */
export const retryOnConflict = async <T>(work: () => Promise<T>, busy: () => Error, rounds = MAX_CONFLICT_ROUNDS): Promise<T> => {
  for (let round = 1; ; round++) {
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof Conflict)) throw error;
      if (round >= rounds) throw busy();
    }
  }
};

/**
 * Loads a stream and executes one command on it. After a conflict, loads and decides again. Throws `busy()`, the errors of `decide`, and the errors
 * of the store.
 */
export const change = <State, Command, Event extends DomainEvent>(
  ports: StreamPorts,
  type: DecidedStreamType<State, Command, Event>,
  id: string,
  command: Command,
  origin: Origin,
  busy: () => Error,
  options: AppendOptions = {},
): Promise<Loaded<State>> => retryOnConflict(async () => execute(ports, type, await load(ports.store, type, id), [command], origin, options), busy);

/**
 * Begins a stream with one event. true: this call or an earlier one with the same `eventId` recorded the event. false: the stream begins with another
 * event.
 */
export const recordOnce = async <Event extends DomainEvent>(
  ports: Omit<StreamPorts, 'ids'>,
  events: EventTypes<Event>,
  stream: string,
  event: Event,
  eventId: string,
  { actor, correlationId }: Origin,
): Promise<boolean> => {
  const meta = { recordedAt: event.at ?? timestamp(ports.clock.now()), actor, correlationId };
  try {
    await appendRepeatedly(ports.store, ports.clock, stream, 'no_stream', [events.write(event, eventId, meta)]);
    return true;
  } catch (error) {
    if (error instanceof Conflict) return false;
    throw error;
  }
};

const RETRY_APPEND_MS = 250;
/** Maximum number of tries of an append without `forMs`. */
const MAX_APPEND_TRIES = 5;

/**
 * Appends the events, and repeats the append while its outcome is unknown. With `forMs`, also repeats while the store cannot be reached. Throws a
 * Conflict at once. After `notAfter`, sends nothing and throws a Conflict, as if another writer had been first. After a lost answer, any other error
 * becomes {@link OutcomeUnknown}.
 *
 * If the store takes no writes, it cannot recognise a repeat. Then the log is read: it may hold the events of the first try.
 */
export const appendRepeatedly = async (
  store: Pick<EventStore, 'append' | 'read'>,
  clock: Clock,
  stream: string,
  expected: Exclude<Expected, 'any'>,
  events: readonly NewEvent[],
  { forMs, notAfter = Number.POSITIVE_INFINITY, isIntent = false }: Omit<AppendOptions, 'eventId'> = {},
): ReturnType<EventStore['append']> => {
  if (forMs !== undefined && forMs <= 0) throw new Unavailable('no time left to append');
  const until = forMs === undefined ? Number.POSITIVE_INFINITY : clock.monotonic() + forMs;
  let maybeAppended = false;
  for (let tries = 1; ; tries++) {
    if (clock.realNow() > notAfter)
      throw maybeAppended ? new OutcomeUnknown(`${stream}: the answer was lost`) : new Conflict(stream, expected, undefined);
    try {
      return await store.append(stream, expected, events);
    } catch (error) {
      if (error instanceof Conflict) throw error;
      maybeAppended ||= error instanceof OutcomeUnknown;
      const readOnly = error instanceof ReadOnly;
      if (readOnly && !maybeAppended && isIntent) throw error;
      const held = readOnly && maybeAppended && !isIntent ? await heldBy(store, stream, expected, events).catch(() => null) : null;
      if (held) return held;
      const again = error instanceof OutcomeUnknown || (error instanceof Unavailable && (maybeAppended || forMs !== undefined));
      const over = forMs === undefined ? tries >= MAX_APPEND_TRIES : clock.monotonic() + RETRY_APPEND_MS >= until;
      if (!again || over) throw maybeAppended ? asUnknown(error as Error) : error;
      await clock.sleep(RETRY_APPEND_MS);
    }
  }
};

/** The events, if the stream holds them right after `expected`. null: it does not. */
const heldBy = async (
  store: Pick<EventStore, 'read'>,
  stream: string,
  expected: Exclude<Expected, 'any'>,
  events: readonly NewEvent[],
): Promise<{ revision: bigint; position: Position } | null> => {
  let count = 0;
  for await (const { id, revision, position } of store.read(stream, expected === 'no_stream' ? 0n : expected + 1n, events.length)) {
    if (id !== events[count]!.id) return null;
    count += 1;
    if (count === events.length) return { revision, position };
  }
  return null;
};

const asUnknown = (error: Error): OutcomeUnknown => (error instanceof OutcomeUnknown ? error : new OutcomeUnknown(error.message, { cause: error }));
