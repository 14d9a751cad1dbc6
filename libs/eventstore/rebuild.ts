/**
 * Rebuilding a read model beside the live one (blue/green): the same handlers run from the start of the log into tables of a schema of their own, and when they
 * have caught up the tables change places in one short transaction. Readers see the old rows or the new ones, never a mixture, and never none.
 */
import { transaction, type Client, type Pool } from '#platform';
import type { EventStore, Position, Recorded } from './event-store.js';
import { createSubscriber, dropCheckpoint, lockCheckpoint, readAhead, resetCheckpoint, type Projection } from './subscriber.js';

/** A projection that can be made again from the log. Reactors, whose effects left the house, cannot. */
export interface ReadModel {
  readonly projection: Projection;
  /** Its tables, by their names in `public`. */
  readonly tables: readonly string[];
  /** Makes the tables, unqualified, without what slows loading down; then the rest. */
  readonly createTables: string;
  readonly createIndexes: string;
  /**
   * Fills the empty tables from the batches faster than `apply` could, at bounded memory. `late` is a connection of its own for what cannot go through
   * the first, which is busy copying. Returns what still has to go through `apply`, in order, once the indexes stand. Left out: everything goes through `apply`.
   */
  readonly load?: (client: Client, late: Client, batches: AsyncIterable<readonly Recorded[]>) => Promise<AsyncIterable<readonly Recorded[]>>;
}

export interface RebuildReport {
  readonly name: string;
  readonly position: Position | null;
  readonly events: number;
  readonly seconds: number;
  /** Rows per table, live before the swap and rebuilt; equal unless the live one was wrong. */
  readonly rows: readonly { readonly table: string; readonly live: number; readonly rebuilt: number }[];
}

/** Close enough to swap: the rest is applied while the live projection waits, which must be short. */
const SWAP_LAG_MS = 1_000;
const CATCH_UP_MS = 10 * 60_000;
const SWAP_MS = 60_000;
const REBUILD_LOCK = 7_205_111;

/** Rebuilds and swaps. One at a time per database. Throws what stops it; the live read model is untouched then. */
export const rebuild = async (
  model: ReadModel,
  options: { store: EventStore; pool: Pool; now: () => number; onProgress?: (done: { events: number; position: Position }) => void },
): Promise<RebuildReport> => {
  const { store, pool, now, onProgress } = options;
  const { projection } = model;
  const schema = `rebuild_${projection.name.replaceAll('-', '_')}`;
  const shadow = `${projection.name} (rebuild)`;
  const searchPath = `${schema}, public`;
  const started = now();
  const guard = await pool.connect();
  const client = await pool.connect();
  const late = await pool.connect();
  let events = 0;
  let clean = false;
  try {
    const { rows } = await guard.query<{ free: boolean }>('select pg_try_advisory_lock($1) as free', [REBUILD_LOCK]);
    if (!rows[0]!.free) throw new Error('another rebuild is running');
    // A long load is no long transaction: what it leaves behind after a crash is dropped by the next one.
    for (const connection of [client, late]) await connection.query(`set search_path = ${searchPath}`);
    for (const connection of [client, late]) await connection.query('set statement_timeout = 0');
    await client.query(`drop schema if exists ${schema} cascade; create schema ${schema}; ${model.createTables}`);

    const head = await store.head();
    const prefixes = projection.streamPrefixes ? { streamPrefixes: projection.streamPrefixes } : {};
    const counted = async function* () {
      if (head === null) return;
      for await (const batch of readAhead(store.readAll(null, { until: head, ...prefixes }))) {
        events += batch.length;
        // Folding never leaves its turn of the event loop: the question for the next page would be sent when this one is done.
        await new Promise((turned) => setImmediate(turned));
        yield batch;
        onProgress?.({ events, position: batch.at(-1)!.position });
      }
    };
    if (model.load) {
      const rest = await model.load(client, late, counted());
      await client.query(model.createIndexes);
      for await (const batch of rest) await projection.apply(client, batch);
    } else {
      await client.query(model.createIndexes);
      for await (const batch of counted()) await projection.apply(client, batch);
    }
    await client.query(`analyze ${model.tables.join(', ')}`);
    await transaction(pool, (one) => resetCheckpoint(one, shadow, head));

    const follower = createSubscriber({ ...projection, name: shadow }, { store, pool, searchPath });
    for (let lagMs = Number.POSITIVE_INFINITY; lagMs > SWAP_LAG_MS;) {
      const target = await store.head();
      if (target === null) break;
      const before = now();
      await follower.runUntil(target, { timeoutMs: CATCH_UP_MS });
      lagMs = now() - before;
    }

    const swapped = await transaction(pool, async (swap) => {
      // Whoever applies to the live tables waits from here on; what it has applied is applied to the new ones too, and then they change places.
      const live = await lockCheckpoint(swap, projection.name);
      if (live?.position) await follower.runUntil(live.position, { timeoutMs: SWAP_MS });
      const rebuilt = await lockCheckpoint(swap, shadow);
      const rows = [];
      for (const table of model.tables)
        rows.push({ table, live: await count(swap, `public.${table}`), rebuilt: await count(swap, `${schema}.${table}`) });
      await swap.query(`set local lock_timeout = '5s'`);
      for (const table of model.tables) await swap.query(`drop table public.${table}; alter table ${schema}.${table} set schema public`);
      await resetCheckpoint(swap, projection.name, rebuilt?.position ?? head);
      await dropCheckpoint(swap, shadow);
      await swap.query(`drop schema ${schema} cascade`);
      return { rows, position: rebuilt?.position ?? head };
    });
    clean = true;
    return { name: projection.name, ...swapped, events, seconds: (now() - started) / 1000 };
  } finally {
    // Session settings and the advisory lock must not travel to the next user of these connections. First those that may hold the tables, in a COPY that broke off.
    for (const connection of [client, late]) connection.release(true);
    if (!clean) await guard.query(`drop schema if exists ${schema} cascade`).catch(() => undefined);
    // The server hears of a closed connection a moment later; the next rebuild would find the lock taken.
    await guard.query('select pg_advisory_unlock($1)', [REBUILD_LOCK]).catch(() => undefined);
    guard.release(true);
  }
};

const count = async (client: Client, table: string): Promise<number> => {
  const { rows } = await client.query<{ count: string }>(`select count(*) as count from ${table}`);
  return Number(rows[0]!.count);
};
