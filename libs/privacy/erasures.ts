/**
 * The projection of erasures: destroys the keys that an event names, and what was copied elsewhere. It can be rebuilt: each step may be repeated.
 *
 * The file is written before the transaction commits. So no key is destroyed that no file names. If the process dies between event and commit, the
 * next worker applies the event.
 */
import { type Position, type ReadModel, type ReadModels, type Recorded, Unavailable } from '#eventstore';
import { ServiceError } from '#kernel';
import { paymentIdOf } from '#payments';
import { type Client, NotOurs, postgresPersonalKeyRows } from '#platform';
import { forgetResponses } from '#webhooks';
import { ERASURE_STREAMS, type Erased, erasureEvents } from './erasure.js';
import { appendErasures, type ErasureLine } from './erasure-files.js';

const TABLES = `
  create table erasure (
    event_id uuid not null, erasure_id uuid not null, cause text not null, reason_code text not null, actor text not null, subjects int not null,
    erased_at timestamptz not null)`;
const INDEXES = 'alter table erasure add constraint erasure_pkey primary key (event_id)';

/** `folder`: `ERASURES_DIR`. null: for names and tables only; then no file is written. */
export const erasureModel = (folder: string | null): ReadModel => ({
  name: 'erasures',
  shape: 1,
  streamPrefixes: ERASURE_STREAMS,
  tables: ['erasure'],
  createTables: TABLES,
  createIndexes: INDEXES,
  rebuildsAnew: true,
  apply: (client, events) => applyErasures(client, folder, events),
});

const applyErasures = async (client: Client, folder: string | null, events: readonly Recorded[]): Promise<void> => {
  const lines: ErasureLine[] = [];
  for (const event of events) {
    const { data } = erasureEvents.read(event);
    const erasedAt = event.meta.recordedAt;
    await destroy(client, data, erasedAt);
    await client.query(
      `insert into erasure (event_id, erasure_id, cause, reason_code, actor, subjects, erased_at) values ($1, $2, $3, $4, $5, $6, $7)
       on conflict do nothing`,
      [event.id, data.erasureId, data.cause, data.reasonCode, `${event.meta.actor.type} ${event.meta.actor.id}`, data.subjects.length, erasedAt],
    );
    lines.push({ eventId: event.id, erasedAt, data });
  }
  if (folder === null) return;
  try {
    appendErasures(folder, lines);
  } catch (error) {
    // A full disk or a missing mount is an outage. The projection tries again until it is mended, and destroys nothing meanwhile.
    const reason = error instanceof NotOurs ? error.message : (error as NodeJS.ErrnoException).code;
    throw new Unavailable(`the erasure files in ${folder} cannot be written: ${reason}`, { cause: error });
  }
};

/** Destroys the keys and the answers of webhook endpoints. Repeating it changes nothing. */
export const destroy = async (client: Client, { erasureId, subjects }: Erased, at: string): Promise<void> => {
  await postgresPersonalKeyRows(client).forget([...new Set(subjects.map(({ keyId }) => keyId))], { erasureId, at });
  const payments = subjects.filter(({ stream }) => stream.startsWith('payment-')).map(({ stream }) => paymentIdOf(stream));
  await forgetResponses(client, [...new Set(payments)]);
};

export interface DestroyPorts {
  readonly readModels: ReadModels;
  readonly models: { readonly erasures: ReadModel };
}

/** How long a command waits for its keys to be destroyed. */
const DESTROYED_MS = 30_000;

/** Waits until the projection has destroyed the keys of all erasures up to a position. */
export const destroyed = async (
  { readModels, models }: DestroyPorts,
  position: Position,
  details: Readonly<Record<string, string>> = {},
): Promise<void> => {
  try {
    await readModels.of(models.erasures).runUntil(position, { timeoutMs: DESTROYED_MS });
  } catch (error) {
    const message = `The erasure is recorded, but the keys are not destroyed yet: ${(error as Error).message}. A worker goes on.`;
    throw new ServiceError('INVALID_STATE', message, details);
  }
};
