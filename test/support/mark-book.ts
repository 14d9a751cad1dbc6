/** Marks and the incident of an installation in memory, for specs and the simulation. All processes of an installation share one. */
import {
  type EventStore,
  type Finding,
  type Incident,
  INSTALLATION_STREAM,
  installationEvents,
  type Known,
  type MarkBook,
  OwnLog,
  type OwnMarks,
  type Position,
} from '#eventstore';
import { type Clock, timestamp } from '#kernel';
import { createLogger } from '#platform';

export class Marks {
  readonly rows = new Map<string, OwnMarks>();
  incident: Incident | null = null;
  /** Incidents that a person has closed. */
  private readonly closed = new Set<string>();
  private incidents = 0;

  constructor(
    private readonly clock: Pick<Clock, 'now'>,
    private readonly checkpoints: () => Known['checkpoints'] = () => [],
  ) {}

  close(): void {
    if (this.incident?.id) this.closed.add(this.incident.id);
    this.incident = null;
  }

  /** The book of one process. */
  bookOf(process: string): MarkBook {
    return {
      read: async () => ({
        marks: [...this.rows].flatMap(([name, { acknowledged, confirmed }]) =>
          name === process
            ? []
            : [
                ...(acknowledged ? [{ where: `the acknowledged event of ${name}`, mark: acknowledged, confirmed: false }] : []),
                ...(confirmed ? [{ where: `the confirmed event of ${name}`, mark: confirmed, confirmed: true }] : []),
              ],
        ),
        checkpoints: this.checkpoints().filter(({ position }) => position !== ('' as Position)),
        incident: this.incident,
      }),
      write: async (own) => void this.rows.set(process, own),
      open: async (found: Finding) =>
        (this.incident ??= { ...found, id: String(++this.incidents), since: timestamp(this.clock.now()), foundBy: process }),
      isClosed: async (id) => this.closed.has(id),
    };
  }
}

/** The guard of a log in memory, as one process has it. */
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
