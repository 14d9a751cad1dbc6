/** Compares a log with everything that is known to have been in it, for a person who looks at an incident. */
import type { EventStore, Mark, Position } from './event-store.js';
import type { SealedPlace } from './installation.js';
import type { MarkBook } from './marks.js';

/** One thing that remembers a place of the log, and whether the log bears it out. */
export interface Examined {
  readonly where: string;
  readonly position: Position;
  /** null: only the place is known. */
  readonly eventId: string | null;
  /** false: its append was acknowledged, but no check has found it since. Another log may have acknowledged it. */
  readonly confirmed: boolean;
  readonly held: boolean;
}

export interface ExaminePorts {
  readonly store: EventStore;
  readonly book: MarkBook;
  readonly signedHead: () => Promise<SealedPlace | null>;
}

/** Marks of processes, files and checkpoints, the places of checkpoints, and the newest signed head. */
export const examineLog = async ({ store, book, signedHead }: ExaminePorts): Promise<readonly Examined[]> => {
  const [known, end, head] = [await book.read(), await store.head(), await signedHead()];
  const missing = new Set((await store.missing(known.marks.map(({ mark }) => mark))).map(({ position, id }) => `${position}/${id}`));
  const event = head && (await store.eventAt(head.position));
  return [
    ...known.marks.map(({ where, mark: { position, id }, confirmed }) => {
      return { where, position, eventId: id, confirmed, held: !missing.has(`${position}/${id}`) };
    }),
    ...known.checkpoints.map(({ name, position }) => {
      return { where: `the place of the checkpoint ${name}`, position, eventId: null, confirmed: true, held: end !== null && position <= end };
    }),
    ...(head ? [{ where: head.where, position: head.position, eventId: null, confirmed: true, held: event !== null && head.isEvent(event) }] : []),
  ];
};

/** Nothing of it is lost. An event that no check has found may be of a log that was not ours. It is lost only if something of ours speaks of it. */
export const isWhole = (places: readonly Examined[]): boolean => places.every(({ held, confirmed }) => held || !confirmed);

/** The events that no check has found and that the log does not hold. */
export const unheldMarks = (places: readonly Examined[]): readonly Mark[] =>
  places.flatMap(({ held, position, eventId }) => (held || eventId === null ? [] : [{ position, id: eventId }]));
