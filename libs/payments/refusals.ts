/**
 * Refused attempts: charges that a case, a rule of the portal or a limit refused before their intent. Finance and support list them. Nothing began, so
 * there is no event, and a row holds no payer.
 *
 * Rows are best effort. They are written behind the answer, on a connection of their own, so no request waits for them or fails because of them. Rows
 * are lost if the process ends abruptly, if the database refuses them, or if the buffer is full.
 */
import { type Clock, type ErrorCode, type Ids, timestamp } from '#kernel';
import { type Client, type KeyRing, type Logger, type Migration, type Pool, purge, type Queryable, transaction } from '#platform';
import { refusedCardHash, type VelocitySubject } from './velocity.js';

export const refusalMigration: Migration = {
  name: '0041-refused-attempt',
  sql: `
    create table refused_attempt (
      refused_at timestamptz not null, id uuid not null, portal_id uuid not null, code text not null, reference_id text, card_hash bytea,
      attempts int not null default 1, primary key (refused_at, id));
    create index refused_attempt_portal on refused_attempt (portal_id, refused_at, id);
    create index refused_attempt_reference on refused_attempt (reference_id, refused_at, id) where reference_id is not null;
  `,
};

/** The refusals that make a row: E10 and E11, except RATE_LIMITED. */
const REFUSALS: ReadonlySet<ErrorCode> = new Set<ErrorCode>([
  'PAYMENT_BLOCKED',
  'PAYMENT_HELD',
  'PAYMENT_NOT_ALLOWED',
  'DECLINE_BLOCKED',
  'VELOCITY_LIMIT',
]);

/** In each second, this many attempts of a portal get a row each. The others are only counted, by code. */
export const ROWS_A_SECOND = 10;
export const REFUSALS_KEPT_DAYS = 90;
/** How long refusals gather before they are written. */
const GATHER_MS = 1_000;
/** The buffer holds this many pairs of portal and second. So it holds at most ten times as many rows. */
export const MAX_BUFFERED = 1_000;
const SECOND_MS = 1_000;
const DAY_MS = 86_400_000;

export interface Refusals {
  /** Notes an attempt that was refused with this code. Ignores codes that are no refusals. Must neither throw nor wait. */
  note(subject: VelocitySubject, code: ErrorCode): void;
}

export interface PostgresRefusals extends Refusals {
  /** Writes the rest, and notes nothing more. */
  stop(): Promise<void>;
}

/** One row. `cardHash` null: the row counts `attempts` further attempts of the second. */
interface Row {
  readonly id: string;
  readonly at: number;
  readonly portalId: string;
  readonly code: ErrorCode;
  readonly referenceId: string | null;
  readonly cardHash: Buffer | null;
  readonly attempts: number;
}

/** The refusals of one portal in one second. */
interface Second {
  readonly portalId: string;
  readonly startsAt: number;
  readonly rows: Row[];
  readonly further: Map<ErrorCode, number>;
}

/** `pool`: of its own, so that no request waits for its connection. */
export const postgresRefusals = (pool: Pool, keys: KeyRing, clock: Clock, ids: Ids, log: Pick<Logger, 'warn'>): PostgresRefusals => {
  let buffer = new Map<string, Second>();
  let lost = 0;
  let running: Promise<void> | null = null;
  const stopping = new AbortController();

  const writeAll = async (): Promise<void> => {
    while (buffer.size > 0) {
      await clock.sleep(GATHER_MS, stopping.signal);
      const seconds = [...buffer.values()];
      buffer = new Map();
      if (lost > 0) log.warn({ attempts: lost }, 'the buffer of refused attempts was full; they are not in the list');
      lost = 0;
      await transaction(pool, (client) => write(client, seconds, ids)).catch((error: unknown) =>
        log.warn(
          { err: error, attempts: seconds.reduce((sum, one) => sum + attemptsOf(one), 0) },
          'refused attempts could not be written; they are lost',
        ),
      );
    }
    running = null;
  };

  return {
    note: ({ portalId, referenceId, instrument }, code) => {
      if (!REFUSALS.has(code) || stopping.signal.aborted) return;
      const at = clock.now();
      const startsAt = Math.floor(at / SECOND_MS) * SECOND_MS;
      const name = `${portalId} ${startsAt}`;
      let second = buffer.get(name);
      if (!second) {
        if (buffer.size >= MAX_BUFFERED) {
          lost += 1;
          return;
        }
        buffer.set(name, (second = { portalId, startsAt, rows: [], further: new Map() }));
      }
      if (second.rows.length < ROWS_A_SECOND)
        second.rows.push({ id: ids.uuid(), at, portalId, code, referenceId, cardHash: refusedCardHash(keys, portalId, instrument), attempts: 1 });
      else second.further.set(code, (second.further.get(code) ?? 0) + 1);
      running ??= writeAll();
    },
    stop: async () => {
      stopping.abort('done');
      await running;
    },
  };
};

const attemptsOf = ({ rows, further }: Second): number => [...further.values()].reduce((sum, count) => sum + count, rows.length);

/** The lock under which processes write, one after the other. Otherwise two of them could exceed the limit of a second together. */
const LOCK = 7_041;

const write = async (client: Client, seconds: readonly Second[], ids: Ids): Promise<void> => {
  await client.query('select pg_advisory_xact_lock($1::bigint)', [LOCK]);
  const { rows: kept } = await client.query<{ rows: number }>(
    `select (select count(*)::int from refused_attempt r
             where r.portal_id = s.portal_id and r.refused_at >= s.at and r.refused_at < s.at + interval '1 second' and r.card_hash is not null) as rows
     from unnest($1::uuid[], $2::timestamptz[]) with ordinality as s (portal_id, at, number) order by s.number`,
    [seconds.map(({ portalId }) => portalId), seconds.map(({ startsAt }) => timestamp(startsAt))],
  );
  const rows = seconds.flatMap((second, index) => rowsOf(second, ROWS_A_SECOND - kept[index]!.rows, ids));
  await client.query(
    `insert into refused_attempt (id, refused_at, portal_id, code, reference_id, card_hash, attempts)
     select * from unnest($1::uuid[], $2::timestamptz[], $3::uuid[], $4::text[], $5::text[], $6::bytea[], $7::int[])`,
    [
      rows.map(({ id }) => id),
      rows.map(({ at }) => timestamp(at)),
      rows.map(({ portalId }) => portalId),
      rows.map(({ code }) => code),
      rows.map(({ referenceId }) => referenceId),
      rows.map((row) => row.cardHash),
      rows.map(({ attempts }) => attempts),
    ],
  );
};

/** The rows to write for a second: at most `room` rows of one attempt each, and a row for each code of the others. */
const rowsOf = ({ portalId, startsAt, rows, further }: Second, room: number, ids: Ids): Row[] => {
  const own = rows.slice(0, Math.max(0, room));
  const counts = new Map(further);
  for (const { code } of rows.slice(own.length)) counts.set(code, (counts.get(code) ?? 0) + 1);
  const others = [...counts].map(([code, attempts]): Row => ({ id: ids.uuid(), at: startsAt, portalId, code, referenceId: null, cardHash: null, attempts })); // prettier-ignore
  return [...own, ...others];
};

export interface RefusalQuery {
  readonly portalId: string | null;
  readonly referenceId: string | null;
  /** RFC 3339, inclusive; null: unbounded. */
  readonly from: string | null;
  /** RFC 3339, exclusive; null: unbounded. */
  readonly to: string | null;
  /** The last row of the page before. null: begin with the newest row. */
  readonly after: RefusalPlace | null;
  readonly limit: number;
}

export interface RefusalPlace {
  readonly refusedAt: string;
  readonly id: string;
}

export interface RefusedAttempt {
  readonly refusedAt: string;
  readonly portalId: string;
  readonly code: ErrorCode;
  /** null: the request had none, or the row counts several attempts. */
  readonly referenceId: string | null;
  /** Keyed hash of the card or token, as hex: equal for the same card on the same portal. null: the row counts several attempts. */
  readonly cardHash: string | null;
  /** 1, or how many further attempts of the second this row counts. */
  readonly attempts: number;
}

/** Refused attempts, newest first. `next` null: there are no more. */
export const listRefusals = async (
  db: Queryable,
  { portalId, referenceId, from, to, after, limit }: RefusalQuery,
): Promise<{ readonly refusals: readonly RefusedAttempt[]; readonly next: RefusalPlace | null }> => {
  const values: unknown[] = [from ?? '-infinity', to ?? 'infinity', limit];
  const value = (one: unknown) => `$${values.push(one)}`;
  const where = [
    'refused_at >= $1::timestamptz and refused_at < $2::timestamptz',
    ...(portalId === null ? [] : [`portal_id = ${value(portalId)}::uuid`]),
    ...(referenceId === null ? [] : [`reference_id = ${value(referenceId)}`]),
    ...(after === null ? [] : [`(refused_at, id) < (${value(after.refusedAt)}::timestamptz, ${value(after.id)}::uuid)`]),
  ];
  const { rows } = await db.query<{
    refused_at: Date;
    id: string;
    portal_id: string;
    code: ErrorCode;
    reference_id: string | null;
    card_hash: Buffer | null;
    attempts: number;
  }>(
    `select refused_at, id, portal_id, code, reference_id, card_hash, attempts from refused_attempt
     where ${where.join(' and ')} order by refused_at desc, id desc limit $3`,
    values,
  );
  const last = rows.length === limit ? rows.at(-1)! : null;
  return {
    refusals: rows.map((row) => ({
      refusedAt: row.refused_at.toISOString(),
      portalId: row.portal_id,
      code: row.code,
      referenceId: row.reference_id,
      cardHash: row.card_hash?.toString('hex') ?? null,
      attempts: row.attempts,
    })),
    next: last && { refusedAt: last.refused_at.toISOString(), id: last.id },
  };
};

/** Removes rows that are older than {@link REFUSALS_KEPT_DAYS}. */
export const purgeRefusals = (pool: Pool, now: number, stop?: AbortSignal): Promise<number> =>
  purge(async (limit) => {
    const { rowCount } = await pool.query(
      `delete from refused_attempt where ctid = any(array(
         select ctid from refused_attempt where refused_at < $1::timestamptz order by refused_at limit $2 for update skip locked))`,
      [timestamp(now - REFUSALS_KEPT_DAYS * DAY_MS), limit],
    );
    return rowCount ?? 0;
  }, stop);
