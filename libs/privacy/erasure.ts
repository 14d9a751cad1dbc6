/**
 * An erasure of personal data: the stream `erasure-<erasureId>`. Its events name the keys that are destroyed, and where they were used. They hold no
 * personal data, not even the e-mail address that was asked for. The event comes first; a projection destroys the keys (erasures.ts).
 */
import { type DecidedStreamType, defineEvents } from '#eventstore';
import { ServiceError } from '#kernel';

/** How the payments were chosen. */
export type ErasureCause = 'payment' | 'email' | 'retention';

/** Why personal data is erased: the person asked for it, its time is over, or a court or an authority ordered it. */
export const REASON_CODES = ['request', 'retention', 'order'] as const;
export type ReasonCode = (typeof REASON_CODES)[number];

/** A use of a key. A key may be used in several streams: those of a checkout and of its payments. */
export interface Subject {
  readonly stream: string;
  readonly keyId: string;
}

/** Subjects of one event. A larger erasure has several events in its stream. */
export const MAX_SUBJECTS = 500;

export type ErasureEvent = {
  readonly type: 'PersonalDataErased';
  readonly at?: string;
  readonly data: {
    readonly erasureId: string;
    readonly cause: ErasureCause;
    readonly reasonCode: ReasonCode;
    /** At most {@link MAX_SUBJECTS}. */
    readonly subjects: readonly Subject[];
  };
};
export type Erased = ErasureEvent['data'];

export const erasureEvents = defineEvents<ErasureEvent>({ PersonalDataErased: [] });

export type ErasureCommand = { readonly type: 'Erase' } & Erased;

const PREFIX = 'erasure-';
export const ERASURE_STREAMS: readonly string[] = [PREFIX];
export const erasureStream = (erasureId: string): string => PREFIX + erasureId;
export const erasureIdOf = (stream: string): string => stream.slice(PREFIX.length);

/** The state is the number of events. Later events of a large erasure depend on no earlier one. */
export const ERASURE_STREAM: DecidedStreamType<number, ErasureCommand, ErasureEvent> = {
  prefix: PREFIX,
  events: erasureEvents,
  decider: {
    initial: 0,
    evolve: (events) => events + 1,
    decide: (_, { erasureId, cause, reasonCode, subjects }) => {
      if (subjects.length < 1 || subjects.length > MAX_SUBJECTS)
        throw new ServiceError('VALIDATION_ERROR', `An event of an erasure has 1 to ${MAX_SUBJECTS} subjects.`);
      return [{ type: 'PersonalDataErased', data: { erasureId, cause, reasonCode, subjects } }];
    },
  },
};

/**
 * The subjects of several payments, in groups of at most {@link MAX_SUBJECTS} for one event each. A subject that two payments share is named once.
 */
export const subjectGroups = (payments: readonly { readonly subjects: readonly Subject[] }[]): readonly (readonly Subject[])[] => {
  const all = new Map(payments.flatMap(({ subjects }) => subjects).map((subject) => [`${subject.keyId} ${subject.stream}`, subject]));
  const subjects = [...all.values()];
  return Array.from({ length: Math.ceil(subjects.length / MAX_SUBJECTS) }, (_, index) =>
    subjects.slice(index * MAX_SUBJECTS, (index + 1) * MAX_SUBJECTS),
  );
};
