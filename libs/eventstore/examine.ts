/** Compares a log with the events that were in it, for a person who examines an incident. */
import type { EventStore, Mark, Position } from './event-store.js';
import type { SealedPlace } from './installation.js';
import type { MarkBook } from './marks.js';

/** One place of the log that a process, a checkpoint or a signed head remembers. `held`: the log still has that place. */
export interface Examined {
  readonly where: string;
  readonly position: Position;
  /** null: only the position is known. */
  readonly eventId: string | null;
  /** false: the append was acknowledged, but no check has found the event since. The event may be in another log. */
  readonly confirmed: boolean;
  readonly held: boolean;
}

export interface ExaminePorts {
  readonly store: EventStore;
  readonly book: MarkBook;
  readonly signedHead: () => Promise<SealedPlace | null>;
}

/** Compares the log with the marks of processes, files and checkpoints, the positions of checkpoints, and the newest signed head. */
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

/** True if the log has every confirmed place. A place that is not confirmed does not count: its event may be in another log. */
export const isWhole = (places: readonly Examined[]): boolean => places.every(({ held, confirmed }) => held || !confirmed);

/** The marks whose event the log does not have. For a whole log ({@link isWhole}), none of these marks is confirmed. */
export const unheldMarks = (places: readonly Examined[]): readonly Mark[] =>
  places.flatMap(({ held, position, eventId }) => (held || eventId === null ? [] : [{ position, id: eventId }]));
