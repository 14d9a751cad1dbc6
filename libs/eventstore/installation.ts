/**
 * The identity of an installation. Its database and the stream `installation` of its log hold its id. A start refuses a database and a log that do
 * not belong together (docs/decisions/0031-a-log-has-an-identity.md).
 */
import { type Clock, timestamp } from '#kernel';
import type { Migration, Pool, Queryable } from '#platform';
import type { EventStore, Position, Recorded } from './event-store.js';
import { defineEvents, type DomainEvent } from './events.js';
import { storeAddress } from './hosts.js';
import { recordOnce } from './streams.js';

export interface InstallationCreated extends DomainEvent {
  readonly type: 'InstallationCreated';
  readonly data: {
    readonly installationId: string;
    /** RFC 3339. */
    readonly createdAt: string;
  };
}

export const installationEvents = defineEvents<InstallationCreated>({ InstallationCreated: [] });
export const INSTALLATION_STREAM = 'installation';

/** Only marks and checkpoints of this generation count. A later release can raise this number after a log has lost events for good. */
export const GENERATION = 1;

export const installationMigration: Migration = {
  name: '0015-installation',
  sql: `
create table installation (
  one bool primary key default true check (one),
  id uuid not null,
  generation int not null default ${GENERATION},
  -- pending: its event may not be in the log yet.
  state text not null default 'pending' check (state in ('pending', 'confirmed')),
  created_at timestamptz not null default clock_timestamp()
);
`,
};

/** An event of the log that the seal covers: its position, and a function that recognises it. */
export interface SealedPlace {
  /** The part of the seal that covers the event, for a message. */
  readonly where: string;
  readonly position: Position;
  readonly isEvent: (event: Recorded) => boolean;
}

export interface InstallationPorts {
  readonly pool: Pool;
  /** The store without its guard (`OwnLog`), because the guard needs the id of the installation first. */
  readonly store: EventStore;
  readonly clock: Clock;
  readonly newId: () => string;
  /** null: the log lies in Postgres, in this database. */
  readonly kurrentdbUrl: string | null;
  readonly databaseUrl: string;
  /** The last event that the seal of this database covers. null: nothing is sealed. Called only for a log of release 0.1.0. */
  readonly sealedEnd: (db: Queryable) => Promise<SealedPlace | null>;
}

interface Row {
  readonly id: string;
  readonly state: 'pending' | 'confirmed';
}

/** `known`: log and database hold the same id. `new`: the log has no identity yet. `refused`: why log and database do not belong together. */
type Belonging = { readonly is: 'known' | 'new' } | { readonly refused: string };

const LOOKS = 10;
const LOOK_AGAIN_MS = 200;

/** Throws if the database has followed a log in the other store than the configured one. Reads only the database, so it runs before a store is opened. */
export const requirePlace = async ({ pool, kurrentdbUrl }: Pick<InstallationPorts, 'pool' | 'kurrentdbUrl'>): Promise<void> => {
  const { seen, onKurrentdb } = await followed(pool);
  if (!seen || onKurrentdb === (kurrentdbUrl !== null)) return;
  const [place, advice] = onKurrentdb ? ['KurrentDB', 'set KURRENTDB_URL'] : ['Postgres', 'unset KURRENTDB_URL, or take another database'];
  throw new Error(`the events of this database lie in ${place}; ${advice}; nothing was changed`);
};

/**
 * Throws if the log does not belong to the database, and changes nothing. Runs before the migrations. Another process may be making the installation
 * now, so the log is refused only after {@link LOOKS} looks.
 */
export const requireOwnLog = async (ports: InstallationPorts): Promise<void> => {
  await requirePlace(ports);
  for (let look = 1; ; look++) {
    const found = await belonging(ports);
    if (!('refused' in found)) return;
    if (look >= LOOKS) throw new Error(`${found.refused}; nothing was changed`);
    await ports.clock.sleep(LOOK_AGAIN_MS);
  }
};

/**
 * Returns the id of the installation, and makes the id of a new one. Runs after the migrations. Writes the id to the database, then the event to the
 * log, then confirms the id in the database. If a process is killed in between, the next start completes the steps.
 */
export const settleInstallation = async (ports: InstallationPorts): Promise<string> => {
  const { pool, store, clock, newId } = ports;
  const present = await rowOf(pool);
  if (present?.state === 'confirmed') return present.id;
  if (!present) await pool.query('insert into installation (id) values ($1) on conflict do nothing', [newId()]);
  const { id } = (await rowOf(pool))!;
  const createdAt = timestamp(clock.now());
  const event: InstallationCreated = { type: 'InstallationCreated', data: { installationId: id, createdAt } };
  const origin = { actor: { type: 'system', id: 'first-start' } as const, correlationId: id };
  // The id of the event is the id of the installation. So if two processes make the same installation, the store recognises the second append as a
  // repeat.
  await recordOnce({ store, clock }, installationEvents, INSTALLATION_STREAM, event, id, origin);
  if ((await installationIn(store)) !== id) throw new Error(`${placeOf(ports)} was taken by another installation at this moment`);
  await pool.query(`update installation set state = 'confirmed' where id = $1`, [id]);
  return id;
};

/** The id of the installation that owns a log. null: the log has no identity. */
export const installationIn = async (store: Pick<EventStore, 'read'>): Promise<string | null> => {
  for await (const first of store.read(INSTALLATION_STREAM, 0n, 1)) return installationEvents.read(first).data.installationId;
  return null;
};

const belonging = async (ports: InstallationPorts): Promise<Belonging> => {
  const { pool, store, kurrentdbUrl } = ports;
  const { seen } = await followed(pool);
  // The log is read before the row. A first start writes the row before the event, so the row of a found event exists.
  const [inLog, head] = [await installationIn(store), await store.head()];
  const row = await rowOf(pool);
  const where = placeOf(ports);
  if (inLog !== null) {
    if (row?.id === inLog) return { is: 'known' };
    return {
      refused: `${where} belongs to installation ${inLog}, and this database to ${row ? `installation ${row.id}` : 'none yet'}; set KURRENTDB_URL and DATABASE_URL to the stores of one installation`,
    };
  }
  if (row?.state === 'confirmed')
    return { refused: `${where} is not the log of installation ${row.id}: it ${head === null ? 'is empty' : 'belongs to no installation'}` };
  if (head === null)
    return seen ? { refused: `${where} is empty, but this database has followed a log up to ${seen}; set KURRENTDB_URL to that log` } : { is: 'new' };
  // The log has events but no identity. It belongs to release 0.1.0 or to another program.
  const foreign = seen ? null : await store.foreignStream?.();
  if (foreign)
    return {
      refused: `the event store at KURRENTDB_URL holds the stream ${foreign}, which Payfold did not write; it must belong to one installation alone`,
    };
  if (!seen && kurrentdbUrl !== null)
    return { refused: `${where} holds events, and this database is new; set DATABASE_URL to the database that belongs to this log` };
  return seen ? adoptable(ports, head, where) : { is: 'new' };
};

/** Accepts a log of release 0.1.0, which has no identity, if this database has followed it. */
const adoptable = async ({ pool, store, sealedEnd }: InstallationPorts, head: Position, where: string): Promise<Belonging> => {
  const sealed = await sealedEnd(pool);
  if (sealed) {
    const event = sealed.position <= head ? await store.eventAt(sealed.position) : null;
    return event && sealed.isEvent(event)
      ? { is: 'new' }
      : { refused: `${where} is not the log that this database has sealed up to ${sealed.position}` };
  }
  const { rows } = await pool.query<{ name: string; position: Position }>(`select name, position from projection_checkpoint where position <> ''`);
  for (const { name, position } of rows)
    if (position > head || !(await store.eventAt(position)))
      return { refused: `${where} is not the log that this database has followed: it has no event at ${position}, where ${name} stands` };
  return { is: 'new' };
};

const rowOf = async (db: Queryable): Promise<Row | null> => {
  if (!(await exists(db, 'installation'))) return null;
  const { rows } = await db.query<Row>('select id, state from public.installation');
  return rows[0] ?? null;
};

/**
 * `seen`: the position of the checkpoint that was updated last. null: no projection of this database has followed a log. `onKurrentdb`: the position
 * has two parts, as only KurrentDB makes them.
 */
const followed = async (db: Queryable): Promise<{ readonly seen: string | null; readonly onKurrentdb: boolean }> => {
  const none = { seen: null, onKurrentdb: false };
  if (!(await exists(db, 'projection_checkpoint'))) return none;
  const { rows } = await db.query<{ seen: string; onKurrentdb: boolean }>(
    `select position as seen, position like '%:%' as "onKurrentdb" from projection_checkpoint where position <> '' order by updated_at desc limit 1`,
  );
  return rows[0] ?? none;
};

const exists = async (db: Queryable, table: string): Promise<boolean> => {
  const { rows } = await db.query<{ found: boolean }>('select to_regclass($1) is not null as found', [`public.${table}`]);
  return rows[0]!.found;
};

const placeOf = ({ kurrentdbUrl, databaseUrl }: Pick<InstallationPorts, 'kurrentdbUrl' | 'databaseUrl'>): string =>
  `the event store at ${storeAddress(kurrentdbUrl, databaseUrl)}`;
