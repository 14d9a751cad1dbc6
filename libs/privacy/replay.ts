/**
 * After a restore: a backup of the database brings erased keys back. The erasure files say which. A start is refused while one of these keys is there,
 * and `payments erase --replay` erases it again.
 */
import { type EventStore, execute, load, type LogGate, type Origin, type Position, readStreams } from '#eventstore';
import { ServiceError } from '#kernel';
import { staff } from '#payments';
import { type Queryable, transaction } from '#platform';
import type { PrivacyPorts } from './erase.js';
import { ERASURE_STREAM, erasureStream } from './erasure.js';
import { erasureFiles, type ErasureLine, readErasures } from './erasure-files.js';
import { destroy, destroyed } from './erasures.js';

/** A start waits at most this long for the erasures that are not applied yet. */
const APPLIED_MS = 60_000;
/** Keys that one statement looks up. */
const KEYS_A_STATEMENT = 10_000;

export interface Revived {
  readonly file: string;
  /** Number of keys that the file names and the database has. */
  readonly keys: number;
}

/** The files that name a key which the database still has. Every file is read: a backup may be of any age. */
export const revivedKeys = async (db: Queryable, folder: string): Promise<readonly Revived[]> => {
  const revived: Revived[] = [];
  for (const file of erasureFiles(folder)) {
    const keys = await keptOf(db, readErasures(file));
    if (keys > 0) revived.push({ file, keys });
  }
  return revived;
};

/** Number of keys of these lines that the database still has. */
const keptOf = async (db: Queryable, lines: readonly ErasureLine[]): Promise<number> => {
  const ids = [...new Set(lines.flatMap(({ data }) => data.subjects.map(({ keyId }) => keyId)))];
  let kept = 0;
  for (let from = 0; from < ids.length; from += KEYS_A_STATEMENT) {
    const { rows } = await db.query<{ count: string }>('select count(*) as count from personal_key where key_id = any ($1::uuid[])', [
      ids.slice(from, from + KEYS_A_STATEMENT),
    ]);
    kept += Number(rows[0]!.count);
  }
  return kept;
};

/**
 * Throws an error of one line while an erasure file names a key that the database still has. First applies the erasures of the log that are not applied
 * yet: a crash between event and deletion, or an older database beside the present log, needs nobody. During an incident nothing is applied.
 */
export const refuseRevivedKeys = async (
  ports: Pick<PrivacyPorts, 'db' | 'store' | 'readModels' | 'models' | 'folder'>,
  { incident }: Pick<LogGate, 'incident'> = { incident: null },
): Promise<void> => {
  if ((await revivedKeys(ports.db, ports.folder)).length === 0) return;
  const head = incident ? null : await ports.store.head();
  if (head !== null)
    await ports.readModels
      .of(ports.models.erasures)
      .runUntil(head, { timeoutMs: APPLIED_MS })
      .catch((error: unknown) => {
        throw new Error(`the erasures of the log cannot be applied: ${(error as Error).message}`, { cause: error });
      });
  const [first] = await revivedKeys(ports.db, ports.folder);
  if (!first) return;
  throw new Error(
    `${first.file} names ${first.keys} erased key${first.keys === 1 ? '' : 's'} that the database still has, as after a restore of a backup; run payfold payments erase --replay ${first.file} --by NAME --apply`,
  );
};

export interface ReplayRequest {
  readonly file: string;
  readonly by: string;
  /** False: only the plan. Nothing is changed. */
  readonly apply: boolean;
}

export interface Replayed {
  readonly file: string;
  /** Number of erasure events in the file. */
  readonly events: number;
  /** Of them, those that the log did not have, and that were recorded again. In a plan: that would be. */
  readonly recorded: number;
  /** Number of keys that the database had, and that were destroyed. In a plan: that would be. */
  readonly keys: number;
}

/**
 * Erases again what a file names. An event that the log has lost is recorded again under its old id. Repeating it changes nothing. Throws
 * VALIDATION_ERROR for a file that cannot be read, and the errors of the store and of the database.
 */
export const replayErasures = async (ports: PrivacyPorts, { file, by, apply }: ReplayRequest): Promise<Replayed> => {
  const origin = staff(by, ports.ids.uuid());
  const lines = linesOf(file);
  const lost = await lostLines(ports.store, lines);
  const keys = await keptOf(ports.db, lines);
  const replayed = { file, events: lines.length, recorded: lost.length, keys };
  if (!apply) return replayed;
  let position: Position | null = null;
  for (const line of lost) position = (await recordAgain(ports, line, origin)) ?? position;
  if (position !== null) await destroyed(ports, position);
  // The log has the other events, and its projection has passed them. So their keys came from an older copy of the table of keys.
  for (const { data, erasedAt } of lines) await transaction(ports.db, (client) => destroy(client, data, erasedAt));
  return replayed;
};

const linesOf = (file: string): readonly ErasureLine[] => {
  try {
    return readErasures(file);
  } catch (error) {
    throw new ServiceError('VALIDATION_ERROR', `${(error as Error).message}.`);
  }
};

/** The lines whose events are not in the log. */
const lostLines = async (store: EventStore, lines: readonly ErasureLine[]): Promise<readonly ErasureLine[]> => {
  const erasureIds = [...new Set(lines.map(({ data }) => data.erasureId))];
  const streams = await readStreams(store, erasureIds.map(erasureStream));
  const known = new Set(streams.flat().map(({ id }) => id));
  return lines.filter(({ eventId }) => !known.has(eventId));
};

const recordAgain = async (ports: PrivacyPorts, { eventId, data }: ErasureLine, origin: Origin): Promise<Position | null> => {
  const loaded = await load(ports.store, ERASURE_STREAM, data.erasureId);
  return (await execute(ports, ERASURE_STREAM, loaded, [{ type: 'Erase', ...data }], origin, { eventId })).position;
};
