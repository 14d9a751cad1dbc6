/** The marks and the incident of an installation, in memory, for specs and the simulation. All processes of an installation share one object. */
import {
  type EventStore,
  type Finding,
  type Incident,
  type KeptIntent,
  INSTALLATION_STREAM,
  installationEvents,
  type KnownMark,
  type Mark,
  type MarkBook,
  OwnLog,
  type OwnMarks,
  type Position,
} from '#eventstore';
import { type Clock, timestamp } from '#kernel';
import { createLogger } from '#platform';

/** Marks of an ended process are forgotten after the same time as in the product. */
const FORGET_AFTER_MS = 60_000;

interface MarkedCheckpoint {
  readonly name: string;
  readonly position: Position;
  /** The last event that the projection applied. */
  readonly event?: Mark | null;
}

export class Marks {
  readonly rows = new Map<string, OwnMarks & { readonly writtenAt: number }>();
  incident: Incident | null = null;
  /** The number of incidents so far. `closed`: the ids of incidents that staff have closed. */
  incidents = 0;
  private readonly closed = new Set<string>();
  /** The kept intents of each process, in one list for each turn. They outlive every database. */
  readonly kept = new Map<string, KeptIntent[][]>();
  /** Events whose marks were dropped when an incident was closed. */
  private readonly forgotten = new Set<string>();

  constructor(
    private readonly clock: Pick<Clock, 'now'>,
    private readonly checkpoints: () => readonly MarkedCheckpoint[] = () => [],
  ) {}

  /** The book of one process. */
  bookOf(process: string): MarkBook {
    return {
      read: async () => {
        const checkpoints = this.checkpoints().filter(({ position }) => position !== ('' as Position));
        const ofProcesses = [...this.rows].flatMap(([name, { acknowledged, confirmed }]): KnownMark[] =>
          name === process
            ? []
            : [
                ...(acknowledged ? [{ where: `the acknowledged event of ${name}`, mark: acknowledged, confirmed: false }] : []),
                ...(confirmed ? [{ where: `the confirmed event of ${name}`, mark: confirmed, confirmed: true }] : []),
              ],
        );
        const ofFiles = [...this.kept].flatMap(([name, lists]): KnownMark[] =>
          name === process
            ? []
            : lists.flatMap((list) =>
                list.at(-1)?.mark ? [{ where: `the kept intents of ${name}`, mark: list.at(-1)!.mark!, confirmed: false }] : [],
              ),
        );
        const ofCheckpoints = checkpoints.flatMap(({ name, event }): KnownMark[] =>
          event ? [{ where: `the checkpoint ${name}`, mark: event, confirmed: true }] : [],
        );
        return {
          marks: [...ofProcesses, ...ofFiles, ...ofCheckpoints].filter(({ mark }) => !this.forgotten.has(mark.id)),
          checkpoints: checkpoints.map(({ name, position }) => ({ name, position })),
          incident: this.incident,
        };
      },
      write: async (own) => {
        const writtenAt = this.clock.now();
        this.rows.set(process, { ...own, writtenAt });
        const known = own.confirmed?.position ?? '';
        const isForgotten = (row: OwnMarks & { writtenAt: number }) =>
          writtenAt - row.writtenAt > FORGET_AFTER_MS && isUpTo(row.acknowledged, known) && isUpTo(row.confirmed, known);
        for (const [name, row] of this.rows) if (name !== process && isForgotten(row)) this.rows.delete(name);
      },
      keep: async (intents) => {
        const lists = this.kept.get(process) ?? [[]];
        this.kept.set(process, lists);
        lists.at(-1)!.push(...intents);
      },
      turn: () => {
        const lists = this.kept.get(process);
        if (!lists || lists.at(-1)!.length === 0) return async () => undefined;
        const old = lists.length;
        lists.push([]);
        return async () => void lists.splice(0, old);
      },
      open: async (found: Finding) =>
        (this.incident ??= { ...found, id: String(++this.incidents), since: timestamp(this.clock.now()), foundBy: process }),
      isClosed: async (id) => this.closed.has(id),
    };
  }

  /** As `closeIncident`. */
  close(forgotten: readonly Mark[] = []): void {
    if (this.incident?.id) this.closed.add(this.incident.id);
    this.incident = null;
    for (const { id } of forgotten) this.forgotten.add(id);
  }
}

const isUpTo = (mark: Mark | null, position: string): boolean => mark === null || mark.position <= position;

/** Makes the log guard of one process, for a log in memory. */
export const ownLogOver = async (store: EventStore, clock: Clock, marks = new Marks(clock), process = 'spec'): Promise<OwnLog> => {
  const installationId = INSTALLATION;
  await writeInstallation(store, clock);
  return new OwnLog({ store, book: marks.bookOf(process), installationId, clock, log: createLogger('silent', 'spec'), appendsProve: true });
};

export const writeInstallation = async (store: Pick<EventStore, 'append'>, clock: Pick<Clock, 'now'>): Promise<void> => {
  const recordedAt = timestamp(clock.now());
  const event = { type: 'InstallationCreated', data: { installationId: INSTALLATION, createdAt: recordedAt } } as const;
  const meta = { recordedAt, actor: { type: 'system', id: 'spec' }, correlationId: 'spec' } as const;
  await store.append(INSTALLATION_STREAM, 'no_stream', [installationEvents.write(event, INSTALLATION, meta)]);
};

export const INSTALLATION = '00000000-0000-7000-8000-00000000000f';
