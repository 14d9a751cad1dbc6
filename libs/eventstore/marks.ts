/**
 * Marks: events that are known to have been in the log, remembered by processes and checkpoints. This module also records incidents. Marks and
 * incidents are stored outside the log, so that a check notices an exchanged or cut log (docs/decisions/0032-marks-and-checks.md).
 *
 * {@link MarkBook} is a port. A process keeps its marks in the database and in a folder. The folder is needed because the database, too, may be
 * restored to an earlier state.
 */
import { type FileHandle, mkdir, open, readdir, readFile, rename, rm, stat, writeFile } from 'node:fs/promises';
import { hostname } from 'node:os';
import { join } from 'node:path';
import { type Clock, type Json, timestamp } from '#kernel';
import type { Migration, Pool } from '#platform';
import type { Mark, Position } from './event-store.js';
import { GENERATION } from './installation.js';

export const markMigration: Migration = {
  name: '0016-log-mark',
  sql: `
-- The newest event of each process, dead ones included, that is known to be in the log.
create table log_mark (
  process_id uuid primary key,
  name text not null,
  generation int not null,
  -- The newest event that an append of the process was told of, and the newest one that a check has found.
  acknowledged_position text collate "C", acknowledged_id uuid,
  confirmed_position text collate "C", confirmed_id uuid,
  written_at timestamptz not null default clock_timestamp()
);

create table store_incident (
  id bigint generated always as identity primary key,
  kind text not null check (kind in ('other_log', 'lost_events')),
  message text not null,
  position text collate "C",
  event_id uuid,
  found_by text not null,
  since timestamptz not null default clock_timestamp(),
  closed_at timestamptz, closed_by text, reason text,
  -- Events that no check has found, of a log that was not ours. Marks of them do not count any more.
  forgotten uuid[] not null default '{}',
  check ((closed_at is null) = (closed_by is null))
);
create unique index store_incident_open on store_incident ((true)) where closed_at is null;

-- The last event that the projection applied. null: none. The position also moves over events that it does not want.
alter table projection_checkpoint
  add column event_position text collate "C",
  add column event_id uuid,
  add column generation int not null default ${GENERATION};
`,
};

/** `other_log`: the log of another installation or of none. `lost_events`: our log, but events are missing that it had before. */
export type IncidentKind = 'other_log' | 'lost_events';

/** A fault of the log that a check has found. */
export interface Finding {
  readonly kind: IncidentKind;
  /** Part of the message of the incident: "it does not hold …". */
  readonly message: string;
  readonly mark: Mark | null;
}

export interface Incident extends Finding {
  /** null: the incident is not in the database. */
  readonly id: string | null;
  /** RFC 3339. */
  readonly since: string;
  /** Role, host and process id of the process that found it. */
  readonly foundBy: string;
}

/** A mark, and the place that remembers it. `confirmed`: a check has found the event of the mark. */
export interface KnownMark {
  readonly where: string;
  readonly mark: Mark;
  readonly confirmed: boolean;
}

export interface OwnMarks {
  readonly acknowledged: Mark | null;
  readonly confirmed: Mark | null;
}

/**
 * An intent whose gateway calls may begin, as it is kept outside of the log. `mark`: the newest event that the process knew of; null: none. `intent`: what its
 * writer needs to make the intent again.
 */
export interface KeptIntent {
  readonly mark: Mark | null;
  readonly intent: Json;
}

export interface Known {
  readonly marks: readonly KnownMark[];
  /** The position of each checkpoint. */
  readonly checkpoints: readonly { readonly name: string; readonly position: Position }[];
  readonly incident: Incident | null;
}

export interface MarkBook {
  /**
   * The marks of all other processes, of files and of checkpoints; the positions of checkpoints; the open incident. `fresh`: files are read again, too.
   */
  read(options?: { readonly fresh: boolean }): Promise<Known>;
  /** Replaces the marks of this process. */
  write(own: OwnMarks): Promise<void>;
  /** Opens an incident unless one is open. Returns the open incident. */
  open(found: Finding): Promise<Incident>;
  /** true: a person has closed this incident. false: the incident is open, or a restored database does not have it. */
  isClosed(id: string): Promise<boolean>;
  /** Keeps intents in a file. Resolves when they are on the disk. Calls must not overlap. */
  keep(intents: readonly KeptIntent[]): Promise<void>;
  /** Returns a function that forgets the intents that were kept before this call. */
  turn(): () => Promise<void>;
}

export interface MarkBookOptions {
  readonly pool: Pool;
  /** `MARKS_DIR`, outside the database. */
  readonly folder: string;
  readonly installationId: string;
  readonly processId: string;
  /** The role of the process. */
  readonly name: string;
  readonly pid: number;
  readonly clock: Pick<Clock, 'realNow' | 'monotonic'>;
}

/**
 * The mark files of other processes are read again after this time. Each process also writes its marks to its row, and every check reads the rows. The
 * files only add marks that a restored database has lost.
 */
const FILES_FRESH_MS = 200;

export const postgresMarkBook = (options: MarkBookOptions): MarkBook => {
  const { pool, folder, installationId, processId, clock } = options;
  const name = `${options.name} on ${hostname()}, process ${options.pid}`;
  let lastRead: { readonly at: number; readonly files: readonly FoundFile[] } | null = null;
  const recentFiles = async (fresh: boolean) => {
    const at = clock.monotonic();
    if (fresh || !lastRead || at - lastRead.at >= FILES_FRESH_MS) lastRead = { at, files: await readFiles(options) };
    return lastRead.files;
  };
  const kept = keptFiles(options, name);
  return {
    read: async ({ fresh } = { fresh: false }) => {
      const [{ forgotten, ...rows }, files] = await Promise.all([readRows(pool, processId), recentFiles(fresh)]);
      const marks = [...rows.marks, ...files.flatMap((file) => file.marks)];
      return { ...rows, marks: marks.filter(({ mark }) => !forgotten.has(mark.id)) };
    },
    write: async (own) => {
      await writeFileOf(folder, processId, { installationId, name, generation: GENERATION, ...own });
      await writeRow(pool, processId, name, own);
      if (own.confirmed) await forgetOlder(options, own.confirmed);
    },
    open: async ({ kind, message, mark }) => {
      await pool.query(
        `insert into store_incident (kind, message, position, event_id, found_by) values ($1, $2, $3, $4, $5) on conflict do nothing`,
        [kind, message, mark?.position ?? null, mark?.id ?? null, name],
      );
      const { incident } = await readRows(pool, processId);
      // If no incident is open now, a person has just closed the one that was open at the insert. With `id` null, the caller opens a new incident at
      // its next check.
      return incident ?? { id: null, kind, message, mark, since: timestamp(clock.realNow()), foundBy: name };
    },
    isClosed: async (id) => {
      const { rowCount } = await pool.query('select from store_incident where id = $1 and closed_at is not null', [id]);
      return rowCount === 1;
    },
    ...kept,
  };
};

/** Closes the open incident. `forgotten`: acknowledged events that no check has found; their marks no longer count. false: no incident was open. */
export const closeIncident = async (
  pool: Pool,
  forgotten: readonly Mark[],
  { by, reason }: { readonly by: string; readonly reason: string },
): Promise<boolean> => {
  const { rowCount } = await pool.query(
    'update store_incident set closed_at = clock_timestamp(), closed_by = $1, reason = $2, forgotten = $3 where closed_at is null',
    [by, reason, forgotten.map(({ id }) => id)],
  );
  return rowCount === 1;
};

// ---- the database

interface Row {
  readonly what: 'acknowledged' | 'confirmed' | 'checkpoint' | 'incident' | 'forgotten';
  readonly name: string;
  readonly position: string | null;
  readonly event_position: string | null;
  readonly event_id: string | null;
  readonly kind: IncidentKind | null;
  readonly message: string | null;
  readonly since: string | null;
}

/** One statement, because every process runs it every second. */
const READ = `
  select 'acknowledged' as what, name, null as position, acknowledged_position as event_position, acknowledged_id::text as event_id,
         null as kind, null as message, null::timestamptz as since
  from log_mark where process_id <> $1 and generation = $2 and acknowledged_position is not null
  union all select 'confirmed', name, null, confirmed_position, confirmed_id::text, null, null, null
  from log_mark where process_id <> $1 and generation = $2 and confirmed_position is not null
  union all select 'checkpoint', name, position, event_position, event_id::text, null, null, null
  from projection_checkpoint where generation = $2 and position <> ''
  union all select 'incident', found_by, id::text, position, event_id::text, kind, message, since from store_incident where closed_at is null
  union all select 'forgotten', '', null, null, unnest(forgotten)::text, null, null, null from store_incident where closed_at is not null`;

const readRows = async (pool: Pool, processId: string): Promise<Known & { readonly forgotten: ReadonlySet<string | null> }> => {
  const { rows } = await pool.query<Row & { since: Date | null }>({ name: 'log-marks', text: READ, values: [processId, GENERATION] });
  const markOf = ({ event_position: position, event_id: id }: Row): Mark | null =>
    position !== null && id !== null ? { position: position as Position, id } : null;
  const marks = rows.flatMap((row): KnownMark[] => {
    const mark = markOf(row);
    if (!mark || row.what === 'incident' || row.what === 'forgotten') return [];
    const confirmed = row.what !== 'acknowledged';
    return [{ where: row.what === 'checkpoint' ? `the checkpoint ${row.name}` : `the ${row.what} event of the ${row.name}`, mark, confirmed }];
  });
  const open = rows.find(({ what }) => what === 'incident');
  return {
    marks,
    forgotten: new Set(rows.flatMap(({ what, event_id: id }) => (what === 'forgotten' ? id : []))),
    checkpoints: rows.flatMap(({ what, name, position }) => (what === 'checkpoint' ? { name, position: position as Position } : [])),
    incident: open
      ? { id: open.position, kind: open.kind!, message: open.message!, mark: markOf(open), since: open.since!.toISOString(), foundBy: open.name }
      : null,
  };
};

const writeRow = (pool: Pool, processId: string, name: string, { acknowledged, confirmed }: OwnMarks) =>
  pool.query({
    name: 'log-mark-write',
    text: `insert into log_mark as m (process_id, name, generation, acknowledged_position, acknowledged_id, confirmed_position, confirmed_id)
           values ($1, $2, $3, $4, $5, $6, $7)
           on conflict (process_id) do update set acknowledged_position = excluded.acknowledged_position, acknowledged_id = excluded.acknowledged_id,
             confirmed_position = excluded.confirmed_position, confirmed_id = excluded.confirmed_id, written_at = clock_timestamp()`,
    values: [
      processId,
      name,
      GENERATION,
      acknowledged?.position ?? null,
      acknowledged?.id ?? null,
      confirmed?.position ?? null,
      confirmed?.id ?? null,
    ],
  });

// ---- the folder

const EXTENSION = '.json';
/** Files of kept intents: one JSON text a line. */
const KEPT_EXTENSION = '.intents';
const LINE_END = 0x0a;

interface FileHead {
  readonly installationId: string;
  readonly name: string;
  readonly generation: number;
}
interface MarkFile extends OwnMarks, FileHead {}

/**
 * A file that was written longer ago gets no more lines: another process may be about to delete it. Shorter than {@link FORGET_AFTER_SECONDS}.
 */
const KEPT_IN_ONE_FILE_MS = 30_000;
/** Files get zeros in advance. So a line changes no length, and costs the disk one write instead of two. */
const ZEROS = Buffer.alloc(262_144);

interface KeptFile {
  readonly file: string;
  readonly handle: FileHandle;
  length: number;
  used: number;
  /** Wall clock. */
  writtenAt: number;
}

/**
 * The intents of a process, in files of its own. Each check turns to another file. When the check has found every event, the files before it are
 * emptied, and used again.
 */
const keptFiles = ({ folder, processId, installationId, clock }: MarkBookOptions, name: string): Pick<MarkBook, 'keep' | 'turn'> => {
  let number = 0;
  const full: KeptFile[] = [];
  const empty: KeptFile[] = [];
  let present: KeptFile | null = null;
  /** Gets lines at this moment, so it is emptied later. */
  let busy: KeptFile | null = null;
  const mayGo = ({ writtenAt }: KeptFile) => clock.realNow() - writtenAt >= KEPT_IN_ONE_FILE_MS;
  const write = async (to: KeptFile, bytes: Buffer, at: number): Promise<void> => {
    to.writtenAt = clock.realNow();
    let done = 0;
    while (done < bytes.length) done += (await to.handle.write(bytes, done, bytes.length - done, at + done)).bytesWritten;
  };
  const remove = async ({ file, handle }: KeptFile): Promise<void> => {
    await handle.close();
    await rm(file, { force: true });
  };
  const leave = (): void => {
    if (present) full.push(present);
    present = null;
  };
  const fileNow = async (): Promise<KeptFile> => {
    if (present && mayGo(present)) leave();
    while (!present && empty.length > 0) {
      const next = empty.pop()!;
      if (mayGo(next)) await remove(next);
      else present = next;
    }
    if (present) return present;
    await mkdir(folder, { recursive: true, mode: 0o700 });
    const file = join(folder, `${processId}-${number++}${KEPT_EXTENSION}`);
    const made: KeptFile = { file, handle: await open(file, 'w', 0o600), length: 0, used: 0, writtenAt: clock.realNow() };
    // The name of a new file is on the disk only when its folder is.
    const directory = await open(folder);
    await directory.sync().finally(() => directory.close());
    return (present = made);
  };
  return {
    keep: async (intents) => {
      const to = (busy = await fileNow());
      const head: FileHead = { installationId, name, generation: GENERATION };
      const lines = Buffer.from(intents.map((kept) => `${JSON.stringify({ ...head, ...kept })}\n`).join(''));
      // Counted before they are written, so that also half a line is emptied before the file is used again.
      const at = to.used;
      to.used += lines.length;
      try {
        for (; to.used > to.length; to.length += ZEROS.length) await write(to, ZEROS, to.length);
        await write(to, lines, at);
        await to.handle.datasync();
      } catch (error) {
        // A line may be half written, so the next one goes to another file.
        leave();
        throw error;
      } finally {
        busy = null;
      }
    },
    turn: () => {
      if (present && present.used > 0) leave();
      const old = full.length;
      return async () => {
        for (const one of full.splice(0, old)) {
          if (one === busy || mayGo(one)) {
            if (one === busy) full.push(one);
            else await remove(one);
            continue;
          }
          // A crash may leave some of these lines. The log holds their intents.
          for (let at = 0; at < one.used; at += ZEROS.length) await write(one, ZEROS.subarray(0, Math.min(ZEROS.length, one.used - at)), at);
          one.used = 0;
          empty.push(one);
        }
      };
    },
  };
};

/** The lines of a file of kept intents, oldest first. A line that is half written does not count: its call did not begin. Nor does one that is half
 * emptied. */
const readKeptLines = async (file: string, last = false): Promise<readonly (KeptIntent & FileHead)[]> => {
  const bytes = await readFile(file).catch((error: NodeJS.ErrnoException) => {
    if (['ENOENT', 'EACCES'].includes(error.code ?? '')) return Buffer.alloc(0);
    throw error;
  });
  const end = bytes.lastIndexOf(LINE_END);
  if (end < 0) return [];
  const begin = last && end > 0 ? bytes.lastIndexOf(LINE_END, end - 1) + 1 : 0;
  const lines = bytes.subarray(begin, end).toString('utf8').split('\n');
  return lines.flatMap((line) => {
    try {
      return JSON.parse(line) as KeptIntent & FileHead;
    } catch (error) {
      if (error instanceof SyntaxError) return [];
      throw error;
    }
  });
};

/** Every intent that processes of the installation have kept and not forgotten, dead ones included. */
export const keptIntents = async ({ folder, installationId }: Pick<MarkBookOptions, 'folder' | 'installationId'>): Promise<readonly KeptIntent[]> => {
  const names = (await namesIn(folder)).filter((name) => name.endsWith(KEPT_EXTENSION)).sort();
  const lines = await Promise.all(names.map((name) => readKeptLines(join(folder, name))));
  return lines.flat().filter((line) => line.generation === GENERATION && line.installationId === installationId);
};

const namesIn = (folder: string): Promise<string[]> =>
  readdir(folder).catch((error: NodeJS.ErrnoException) => {
    if (error.code === 'ENOENT') return [];
    throw new Error(`MARKS_DIR cannot be read: ${error.message}`, { cause: error });
  });

interface FoundFile {
  readonly file: string;
  readonly marks: readonly KnownMark[];
}

/** Reads the mark files of other processes. Another installation may use the same folder; its files do not count. */
const readFiles = async ({ folder, processId, installationId }: MarkBookOptions): Promise<FoundFile[]> => {
  const files = await Promise.all(
    (await namesIn(folder))
      .filter((name) => (name.endsWith(EXTENSION) || name.endsWith(KEPT_EXTENSION)) && !name.startsWith(processId))
      .map(async (name) => {
        const file = join(folder, name);
        if (name.endsWith(KEPT_EXTENSION)) {
          // A log loses its end, so the newest mark is enough.
          const [line] = await readKeptLines(file, true);
          if (line && (line.generation !== GENERATION || line.installationId !== installationId)) return null;
          return { file, marks: line?.mark ? [{ where: `the newest event in ${file} (${line.name})`, mark: line.mark, confirmed: false }] : [] };
        }
        const held = await readMarkFile(file);
        if (held?.generation !== GENERATION || held.installationId !== installationId) return null;
        const marks = (['acknowledged', 'confirmed'] as const).flatMap((what) => {
          const mark = held[what];
          return mark ? { where: `the ${what} event in ${file} (${held.name})`, mark, confirmed: what === 'confirmed' } : [];
        });
        return { file, marks };
      }),
  );
  return files.filter((file) => file !== null);
};

/** null: the file is gone, is not a mark file, or cannot be read by this user. Files are replaced as a whole, so none is half written. */
const readMarkFile = async (file: string): Promise<MarkFile | null> => {
  try {
    return JSON.parse(await readFile(file, 'utf8')) as MarkFile;
  } catch (error) {
    if (error instanceof SyntaxError || ['ENOENT', 'EACCES'].includes((error as NodeJS.ErrnoException).code ?? '')) return null;
    throw error;
  }
};

const writeFileOf = async (folder: string, processId: string, content: MarkFile): Promise<void> => {
  await mkdir(folder, { recursive: true, mode: 0o700 });
  await replaceFile(join(folder, processId + EXTENSION), content);
};

const replaceFile = async (file: string, content: MarkFile): Promise<void> => {
  await writeFile(`${file}.new`, JSON.stringify(content), { mode: 0o600, flush: true });
  await rename(`${file}.new`, file);
};

/** Only marks that were written longer ago than this are deleted. A process may be about to replace a younger one. */
const FORGET_AFTER_SECONDS = 60;

/** Deletes marks of other processes that lie at or before a confirmed mark. They prove nothing more. */
const forgetOlder = async (options: MarkBookOptions, { position }: Mark): Promise<void> => {
  const { pool, processId, clock } = options;
  await pool.query({
    name: 'log-mark-forget',
    text: `delete from log_mark where process_id <> $1 and generation = $2 and written_at < clock_timestamp() - make_interval(secs => $4)
             and coalesce(acknowledged_position, '') <= $3 and coalesce(confirmed_position, '') <= $3`,
    values: [processId, GENERATION, position, FORGET_AFTER_SECONDS],
  });
  for (const { file, marks } of await readFiles(options)) {
    if (marks.some(({ mark }) => mark.position > position)) continue;
    const written = await stat(file).catch(() => null);
    if (written && clock.realNow() - written.mtimeMs > FORGET_AFTER_SECONDS * 1_000) await rm(file, { force: true });
  }
};
