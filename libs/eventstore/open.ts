/**
 * Opens the event store that the configuration names, and makes sure that the log belongs to this installation. Also lists the tables of this lib.
 */
import { orStopped, within } from '#kernel';
import type { Logger, Migration, Pool } from '#platform';
import { projectionCheckpointMigration } from './checkpoint.js';
import { type EventStore, Unavailable } from './event-store.js';
import { installationMigration, type InstallationPorts, requireOwnLog, requirePlace, settleInstallation } from './installation.js';
import { createKurrentDbEventStore } from './kurrentdb.js';
import { markMigration, postgresMarkBook } from './marks.js';
import { OwnLog, type OwnLogOptions } from './own-log.js';
import { createPostgresEventStore, eventStoreMigration } from './postgres.js';
import { readModelMigration } from './read-model.js';

/** A start gives up if the event store does not answer within this time, so that its supervisor sees the reason soon. */
const ANSWERS_WITHIN_MS = 8_000;

/** Tables of this lib, for `migrate`. */
export const eventStoreMigrations: readonly Migration[] = [
  eventStoreMigration,
  projectionCheckpointMigration,
  readModelMigration,
  installationMigration,
  markMigration,
];

export interface GuardOptions extends Omit<InstallationPorts, 'store'>, Pick<OwnLogOptions, 'signedHead' | 'log' | 'reportsIncident'> {
  /** The pool for checks. It is separate so that slow requests do not delay the checks. Default: `pool`. */
  readonly checkPool?: Pool;
  /** `MARKS_DIR`. */
  readonly marksDir: string;
  /** Identifies this process in its marks. */
  readonly process: { readonly id: string; readonly name: string; readonly pid: number };
  /** Brings the tables up to this release, or throws. */
  readonly prepare: () => Promise<void>;
}

export interface OpenLogOptions extends GuardOptions {
  /** Wraps the adapter. The guard then wraps the result. */
  readonly wrap?: (store: EventStore) => EventStore;
  /** Ends the waits of {@link openOwnLog}, which then throws the reason of the signal. */
  readonly stop?: AbortSignal | undefined;
}

/** Checks the log for an adapter. */
export interface LogGuard {
  readonly installationId: string;
  /** For Postgres: see {@link OwnLog.checkSession}. */
  checkSession?(missing: EventStore['missing'], server: string): Promise<void>;
  /** For KurrentDB: see {@link OwnLog.checkConnection}. */
  checkConnection(): Promise<void>;
}

/**
 * Opens the adapter for KurrentDB if its URL is configured, else the adapter for Postgres. The store has no guard: it does not refuse the log of
 * another installation. `guard`: returns the guard, or null while the log is being opened. With a guard, the log is checked before the first append
 * over each new session or connection.
 */
export const openEventStore = async (
  kurrentdbUrl: string | null,
  databaseUrl: string,
  log: Pick<Logger, 'warn' | 'error'>,
  guard?: () => LogGuard | null,
): Promise<EventStore> =>
  kurrentdbUrl === null
    ? createPostgresEventStore(databaseUrl, guard && { checkSession: async (missing, server) => guard()?.checkSession?.(missing, server) })
    : createKurrentDbEventStore(kurrentdbUrl, {
        ...(guard && { installationId: () => guard()?.installationId ?? null, checkConnection: async () => guard()?.checkConnection() }),
        onTrouble: (message, error) => log.warn({ err: error }, message),
        onForeign: (stream, installation) =>
          installation === null
            ? log.error({ stream }, 'another program writes to the event store; its events are skipped')
            : log.error({ stream, installation }, 'another installation wrote to the event store; its events are skipped'),
      });

/**
 * Opens the log of the installation, for every process and command. Refuses a log that does not belong to the database, before anything is changed.
 * If the log has lost events, the result has an incident, which the process can report (C76).
 */
export const openOwnLog = async (options: OpenLogOptions): Promise<OwnLog> => {
  let own: OwnLog | null = null;
  const { kurrentdbUrl, databaseUrl, log, stop, wrap = (store) => store } = options;
  await requirePlace(options);
  const opening = openEventStore(kurrentdbUrl, databaseUrl, log, () => own);
  const until = options.clock.monotonic() + ANSWERS_WITHIN_MS;
  const bare = await within(options.clock, ANSWERS_WITHIN_MS, opening, away).catch((error: unknown) => {
    void opening.then((late) => late.close()).catch(() => undefined);
    throw error;
  });
  try {
    return (own = await orStopped(guardLog(wrap(bare), options, Math.max(0, until - options.clock.monotonic())), stop));
  } catch (error) {
    await bare.close();
    throw error;
  }
};

const away = () => new Unavailable('KurrentDB does not answer');

/** Puts the guard around an opened store. Refuses a log as {@link openOwnLog} does. `answersWithinMs`: the limit for the first check of a log on KurrentDB. */
export const guardLog = async (store: EventStore, options: GuardOptions, answersWithinMs = ANSWERS_WITHIN_MS): Promise<OwnLog> => {
  const { kurrentdbUrl, databaseUrl, pool, marksDir, process, clock, log, prepare, newId, sealedEnd, signedHead } = options;
  const installation = { pool, store, clock, newId, kurrentdbUrl, databaseUrl, sealedEnd };
  if (kurrentdbUrl !== null) await within(clock, answersWithinMs, requireOwnLog(installation), away);
  else if (await hasLog(pool)) await requireOwnLog(installation);
  await prepare();
  const installationId = await settleInstallation(installation);
  const { id: processId, name, pid } = process;
  const own = new OwnLog({
    store,
    book: postgresMarkBook({ pool: options.checkPool ?? pool, folder: marksDir, installationId, processId, name, pid, clock }),
    installationId,
    clock,
    log,
    appendsProve: kurrentdbUrl === null,
    ...(signedHead && { signedHead }),
    ...(options.reportsIncident !== undefined && { reportsIncident: options.reportsIncident }),
  });
  await own.begin();
  return own;
};

/** False if the database has no table for events yet. */
const hasLog = async (pool: Pool): Promise<boolean> => {
  const { rows } = await pool.query<{ found: boolean }>(`select to_regclass('es.events') is not null as found`);
  return rows[0]!.found;
};
