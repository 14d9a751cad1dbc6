/**
 * The checkpoint of a projection: the position that the projection has applied, a lease, and the event that stopped the projection.
 *
 * {@link Checkpoint} is a port. The implementations for Postgres and for the simulation pass one contract (test/support/checkpoint.contract.ts).
 *
 * Rows and checkpoint are committed in one transaction. Its first statement is a compare-and-set:
 *
 *     update projection_checkpoint set position = $new where name = $1 and position = $old and epoch = $mine
 *
 * A second worker waits for the lock on that row, finds another position, and writes nothing.
 */
import { DatabaseUnavailable, transaction, type Client, type Migration, type Pool, type Queryable } from '#platform';
import { type Mark, OutcomeUnknown, type Position, Unavailable } from './event-store.js';

/** Checkpoints with their leases, and the events that stopped a projection. Position '' is the start of the log. */
export const projectionCheckpointMigration: Migration = {
  name: '0011-projection-checkpoint',
  sql: `
create table projection_checkpoint (
  name text primary key,
  position text collate "C" not null,
  epoch bigint not null,
  owner uuid,
  lease_until timestamptz,
  updated_at timestamptz not null default clock_timestamp(),
  check ((owner is null) = (lease_until is null))
) with (fillfactor = 50);

create table projection_failure (
  name text not null,
  position text collate "C" not null,
  event_id uuid,
  stream text,
  type text,
  message text not null,
  stack text not null,
  attempts int not null default 1,
  failed_at timestamptz not null default clock_timestamp(),
  resolved_at timestamptz,
  primary key (name, position)
);
`,
};

/** A position of a checkpoint under one owner. '' is the start of the log. */
export interface Place {
  readonly position: string;
  /** Goes up with each new owner and with each reset. */
  readonly epoch: string;
}

export interface Lease {
  readonly owner: string;
  readonly ms: number;
}

export interface CheckpointFailure {
  /** null: no event failed; the log cannot be read from the checkpoint on. */
  readonly event: { readonly position: Position; readonly id: string; readonly stream: string; readonly type: string } | null;
  readonly message: string;
  readonly stack: string;
}

export interface CheckpointStatus {
  /** null: nothing applied yet. */
  readonly position: Position | null;
  /** Number of new owners and resets so far. */
  readonly epoch: bigint;
  /** True while some worker holds the lease. */
  readonly leased: boolean;
  readonly updatedAt: Date | null;
  /** The first failure that is not resolved. null: there is none. */
  readonly failure: { readonly position: Position | null; readonly eventId: string | null; readonly message: string; readonly failedAt: Date } | null;
}

/** `Tx`: the transaction in which a projection writes its rows. */
export interface Checkpoint<Tx = Client> {
  /** Takes the lease, or extends the lease of the same owner. null: another owner holds it. A new owner raises the epoch. */
  take(lease: Lease): Promise<Place | null>;
  /** Extends the lease. false: this owner no longer holds it under this epoch. */
  renew(lease: Lease, epoch: string): Promise<boolean>;
  /** Gives the lease back, if this owner holds it. */
  release(owner: string): Promise<void>;
  /** The place that the projection has reached. If there is no checkpoint yet, creates one at the start of the log. */
  look(): Promise<Place & { readonly leased: boolean }>;
  /** Only the position. '': the projection never ran. */
  position(): Promise<string>;
  /**
   * Moves the checkpoint from `from` to `to`, then runs `apply` in the same transaction. `last`: the last applied event, or null. Extends the lease
   * if this owner holds it. If the checkpoint is not at `from`, throws {@link Moved} and does not run `apply`. Throws {@link HandlerFault} if `apply`
   * failed and the connection did not. After any other error the outcome may be unknown.
   */
  commit(from: Place, to: Position, lease: Lease, apply: ((tx: Tx) => Promise<void>) | null, last?: Mark | null): Promise<void>;
  /** Records why the projection stopped. The first commit to this position or a later one resolves the failure. */
  recordFailure(failure: CheckpointFailure): Promise<void>;
  status(): Promise<CheckpointStatus>;
}

/**
 * The compare-and-set found another position or epoch: another worker moved or took over the checkpoint, or it was reset. Or an earlier commit of
 * this worker succeeded and its answer was lost.
 */
export class Moved extends Error {}

/** An error of the handler itself, kept as `cause`. The connection was healthy. */
export class HandlerFault extends Error {}

/**
 * Runs a handler. If its error has no code and the connection still answers, throws {@link HandlerFault}. The text of an error does not decide,
 * because "the account is closed" is not a lost connection.
 */
export const runHandler = async (handler: () => Promise<void>, answers: () => Promise<boolean>): Promise<void> => {
  try {
    await handler();
  } catch (error) {
    const isOwn =
      !(error instanceof Unavailable || error instanceof OutcomeUnknown || error instanceof DatabaseUnavailable) &&
      (error as { code?: unknown } | undefined)?.code === undefined;
    if (isOwn && (await answers())) throw new HandlerFault(String(error), { cause: error });
    throw error;
  }
};

export const asPosition = (text: string): Position | null => (text === '' ? null : (text as Position));

export interface PostgresCheckpointOptions {
  /** The `search_path` while `apply` runs. A rebuild uses it to write into another schema (`rm_list_2_new, public`). */
  readonly searchPath?: string;
}

/** Uses at most two connections at once. */
export const postgresCheckpoint = (pool: Pool, name: string, options: PostgresCheckpointOptions = {}): Checkpoint =>
  new PostgresCheckpoint(pool, name, options);

class PostgresCheckpoint implements Checkpoint {
  /** True: a recorded failure may be unresolved, so the next `commit` resolves failures too. */
  private unresolved = false;

  constructor(
    private readonly pool: Pool,
    private readonly name: string,
    private readonly options: PostgresCheckpointOptions,
  ) {}

  async take({ owner, ms }: Lease): Promise<Place | null> {
    // Standby workers call `take` often, so the first statement only reads.
    const held = await this.pool.query('select from projection_checkpoint where name = $1 and owner <> $2 and lease_until >= clock_timestamp()', [
      this.name,
      owner,
    ]);
    if (held.rowCount !== 0) return null;
    const { rows } = await this.pool.query<Place & { unresolved: boolean }>(
      `insert into projection_checkpoint as c (name, position, epoch, owner, lease_until)
       values ($1, '', 1, $2, clock_timestamp() + $3::int * interval '1 millisecond')
       on conflict (name) do update
         set owner = excluded.owner, lease_until = excluded.lease_until, epoch = c.epoch + (c.owner is distinct from excluded.owner)::int
         where c.owner is null or c.owner = excluded.owner or c.lease_until < clock_timestamp()
       returning position, epoch, exists (select from projection_failure f where f.name = $1 and f.resolved_at is null) as unresolved`,
      [this.name, owner, ms],
    );
    return rows[0] ? this.found(rows[0]) : null;
  }

  async renew({ owner, ms }: Lease, epoch: string): Promise<boolean> {
    const { rowCount } = await this.pool.query(
      `update projection_checkpoint set lease_until = clock_timestamp() + $4::int * interval '1 millisecond' where name = $1 and owner = $2 and epoch = $3`,
      [this.name, owner, epoch, ms],
    );
    return rowCount !== 0;
  }

  async release(owner: string): Promise<void> {
    await this.pool.query('update projection_checkpoint set owner = null, lease_until = null where name = $1 and owner = $2', [this.name, owner]);
  }

  async look(): Promise<Place & { leased: boolean }> {
    for (;;) {
      const { rows } = await this.pool.query<Place & { leased: boolean; unresolved: boolean }>(
        `select position, epoch, coalesce(lease_until >= clock_timestamp(), false) as leased,
                exists (select from projection_failure f where f.name = c.name and f.resolved_at is null) as unresolved
         from projection_checkpoint c where name = $1`,
        [this.name],
      );
      if (rows[0]) return this.found(rows[0]);
      await this.pool.query(`insert into projection_checkpoint (name, position, epoch) values ($1, '', 0) on conflict do nothing`, [this.name]);
    }
  }

  private found<Found extends { unresolved: boolean }>({ unresolved, ...found }: Found): Omit<Found, 'unresolved'> {
    this.unresolved = unresolved;
    return found;
  }

  async position(): Promise<string> {
    const { rows } = await this.pool.query<{ position: string }>('select position from projection_checkpoint where name = $1', [this.name]);
    return rows[0]?.position ?? '';
  }

  async commit(from: Place, to: Position, lease: Lease, apply: ((client: Client) => Promise<void>) | null, last: Mark | null = null): Promise<void> {
    if (!apply && !this.unresolved) return this.advance(this.pool, from, to, lease, last);
    await transaction(this.pool, async (client) => {
      await this.advance(client, from, to, lease, last);
      if (this.unresolved)
        await client.query(
          'update projection_failure set resolved_at = clock_timestamp() where name = $1 and resolved_at is null and position <= $2',
          [this.name, to],
        );
      if (!apply) return;
      if (this.options.searchPath !== undefined) await client.query(`select set_config('search_path', $1, true)`, [this.options.searchPath]);
      await runHandler(
        () => apply(client),
        () => client.query('select').then(Boolean, () => false),
      );
    });
  }

  private async advance(db: Queryable, from: Place, to: Position, lease: Lease, last: Mark | null): Promise<void> {
    const { rowCount } = await db.query({
      name: 'projection_advance',
      text: `update projection_checkpoint set position = $4, updated_at = clock_timestamp(),
               event_position = coalesce($7, event_position), event_id = coalesce($8, event_id),
               lease_until = case owner when $5 then clock_timestamp() + $6::int * interval '1 millisecond' else lease_until end
             where name = $1 and position = $2 and epoch = $3`,
      values: [this.name, from.position, from.epoch, to, lease.owner, lease.ms, last?.position ?? null, last?.id ?? null],
    });
    if (rowCount !== 1) throw new Moved();
  }

  async recordFailure({ event, message, stack }: CheckpointFailure): Promise<void> {
    // Set before the statement, because the statement may succeed without an answer.
    this.unresolved = true;
    await this.pool.query(
      `insert into projection_failure as f (name, position, event_id, stream, type, message, stack)
       values ($1, coalesce($2, (select position from projection_checkpoint where name = $1), ''), $3, $4, $5, $6, $7)
       on conflict (name, position) do update set message = excluded.message, stack = excluded.stack, event_id = excluded.event_id,
         stream = excluded.stream, type = excluded.type, attempts = f.attempts + 1, failed_at = clock_timestamp(), resolved_at = null`,
      [this.name, event?.position ?? null, event?.id ?? null, event?.stream ?? null, event?.type ?? null, message, stack],
    );
  }

  async status(): Promise<CheckpointStatus> {
    const { rows } = await this.pool.query<{
      position: string;
      epoch: string;
      leased: boolean;
      updated_at: Date;
      failed_position: string | null;
      event_id: string | null;
      message: string | null;
      failed_at: Date | null;
    }>(
      `select c.position, c.epoch, coalesce(c.lease_until >= clock_timestamp(), false) as leased, c.updated_at,
              f.position as failed_position, f.event_id, f.message, f.failed_at
       from projection_checkpoint c
       left join lateral (select * from projection_failure f where f.name = c.name and f.resolved_at is null order by f.position limit 1) f on true
       where c.name = $1`,
      [this.name],
    );
    const row = rows[0];
    return {
      position: asPosition(row?.position ?? ''),
      epoch: BigInt(row?.epoch ?? 0),
      leased: row?.leased ?? false,
      updatedAt: row?.updated_at ?? null,
      failure: row?.failed_at
        ? { position: asPosition(row.failed_position ?? ''), eventId: row.event_id, message: row.message ?? '', failedAt: row.failed_at }
        : null,
    };
  }
}

// ---- checkpoints in Postgres only

/** Locks the checkpoint for the rest of the transaction, so that no worker applies events meanwhile. null: the projection never ran. */
export const lockCheckpoint = async (
  client: Client,
  name: string,
): Promise<{ readonly position: Position | null; readonly last: Mark | null } | null> => {
  const { rows } = await client.query<{ position: string; event_position: Position | null; event_id: string | null }>(
    'select position, event_position, event_id from projection_checkpoint where name = $1 for update',
    [name],
  );
  if (!rows[0]) return null;
  const { position, event_position: at, event_id: id } = rows[0];
  return { position: asPosition(position), last: at !== null && id !== null ? { position: at, id } : null };
};

/**
 * Sets a checkpoint to a position (null: the start of the log). `last`: the last applied event. If workers use the checkpoint, call it in the
 * transaction that also changes the rows. The epoch goes up, so a worker in the middle of a batch cannot commit its batch. Never reset a reactor,
 * because its effects cannot be undone.
 */
export const resetCheckpoint = async (client: Client, name: string, position: Position | null, last: Mark | null = null): Promise<void> => {
  await client.query(
    `insert into projection_checkpoint as c (name, position, epoch, event_position, event_id) values ($1, $2, 1, $3, $4)
     on conflict (name) do update set position = excluded.position, epoch = c.epoch + 1, owner = null, lease_until = null, updated_at = clock_timestamp(),
       event_position = excluded.event_position, event_id = excluded.event_id`,
    [name, position ?? '', last?.position ?? null, last?.id ?? null],
  );
  await client.query('update projection_failure set resolved_at = clock_timestamp() where name = $1 and resolved_at is null', [name]);
};

/** Removes a checkpoint with its failures. */
export const dropCheckpoint = async (client: Client, name: string): Promise<void> => {
  await client.query('delete from projection_checkpoint where name = $1', [name]);
  await client.query('delete from projection_failure where name = $1', [name]);
};
