/**
 * Event types, declared once per lib: `defineEvents<PaymentEvent>({ PaymentInitiated: [], PaymentCreated: [fromV1], … })`.
 *
 * Each step of a type converts the data of one version into the data of the next. Stored bytes never change. Readers see only the newest version, and
 * only the newest version is written. With `ahead`, a release also reads the version that the next release writes, so both can run side by side. Each
 * version has a JSON schema and a golden file in the lib's folder `events/`. How to add a version: docs/changing.md.
 */
import type { Json } from '#kernel';
import type { Meta, NewEvent, Recorded } from './event-store.js';

/** An event as deciders see it. `at`: RFC 3339, when the event was recorded. Set on every event that was read from the store. */
export interface DomainEvent {
  readonly type: string;
  readonly at?: string;
  readonly data: object;
}

/** Converts data of one version into data of the next. Must be pure, and must accept all data that the older version allowed. */
type Step = (data: never) => unknown;

/** Steps from version 1 to the newest version. The last step must return data of the newest version. */
type StepsTo<Data> = readonly [] | readonly [...Step[], (data: never) => Data];

/** The steps of each event type. The compiler refuses a missing type, and a last step that does not return the newest data. */
export type EventSteps<Event extends DomainEvent> = {
  readonly [Type in Event['type']]: StepsTo<Extract<Event, { readonly type: Type }>['data']>;
};

/** For each event type: converts the data of the version that the next release will write into the data of the present version. */
export type ReadsAhead<Event extends DomainEvent> = {
  readonly [Type in Event['type']]?: (data: never) => Extract<Event, { readonly type: Type }>['data'];
};

/** This release cannot read an event. The reader stops, because a state without that event would be wrong. */
export class UnreadableEvent extends Error {
  constructor(
    readonly event: Pick<Recorded, 'stream' | 'revision' | 'type' | 'v'>,
    reason: string,
  ) {
    super(`${event.stream}@${event.revision}: ${event.type} ${reason}`);
    this.name = 'UnreadableEvent';
  }
}

export interface EventTypes<Event extends DomainEvent> {
  readonly names: readonly Event['type'][];
  /** The version that is written: 1 plus the number of steps. */
  readonly version: (type: Event['type']) => number;
  /** The event in its newest version. Throws {@link UnreadableEvent} for an undeclared type, and for a version that this release cannot read. */
  readonly read: (recorded: Recorded) => Event;
  readonly write: (event: Event, id: string, meta: Meta) => NewEvent;
}

export const defineEvents = <Event extends DomainEvent>(types: EventSteps<Event>, ahead: ReadsAhead<Event> = {}): EventTypes<Event> => {
  const steps = new Map(Object.entries<readonly Step[]>(types));
  const stepsAhead = new Map(Object.entries<Step | undefined>(ahead));
  const version = (type: Event['type']) => steps.get(type)!.length + 1;
  return {
    names: [...steps.keys()],
    version,
    read: (recorded) => {
      const { type, v, meta } = recorded;
      const known = steps.get(type);
      if (!known) throw new UnreadableEvent(recorded, 'is no event that this program knows; it was written by another Payfold');
      const back = stepsAhead.get(type);
      const newest = known.length + 1;
      if (v > (back ? newest + 1 : newest))
        throw new UnreadableEvent(
          recorded,
          `has version ${v}, this program knows versions up to ${back ? newest + 1 : newest}; it was written by a newer Payfold`,
        );
      let { data }: { data: unknown } = recorded;
      if (v > newest) data = back!(data as never);
      for (let from = v; from <= known.length; from++) data = known[from - 1]!(data as never);
      return { type, data, at: meta.recordedAt } as unknown as Event;
    },
    write: ({ type, data }, id, meta) => ({ id, type, v: version(type), data: data as Json, meta }),
  };
};
