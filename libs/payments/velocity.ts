/**
 * Velocity: limits on attempts and declines per case and per card, for each portal, off by default (C53, C70).
 *
 * The windows slide and are exact: N attempts pass, and the next one is refused until the oldest has left the window. A card is stored only as a
 * keyed hash, in a table that holds no payments and no last four digits (docs/contract.md#card-data).
 */
import type { LimitScope, Portal, VelocityLimits } from '#accounts';
import { type Clock, ServiceError, timestamp } from '#kernel';
import { type Client, type KeyRing, type Migration, type Pool, purge, transaction } from '#platform';
import type { PaymentInstrument } from './gateway/gateway.js';

export const velocityMigration: Migration = {
  name: '0040-velocity',
  sql: `
    create table velocity_entry (
      portal_id uuid not null, scope text not null check (scope in ('card', 'case')), subject bytea not null, kid text not null,
      kind text not null check (kind in ('attempt', 'decline')), entry_id uuid not null, at timestamptz not null, expires_at timestamptz not null,
      primary key (portal_id, scope, subject, kind, entry_id));
    create index velocity_entry_window on velocity_entry (portal_id, scope, subject, kind, at);
    create index velocity_entry_expiry on velocity_entry (expires_at);
  `,
};

export interface VelocitySubject {
  readonly portalId: string;
  readonly referenceId: string | null;
  readonly instrument: PaymentInstrument;
}

type Limits = Portal['limits'];

export interface Velocity {
  /** Counts the attempt, or refuses it. DECLINE_BLOCKED comes before VELOCITY_LIMIT. */
  admit(subject: VelocitySubject, limits: Limits, entryId: string): Promise<void>;
  /** Takes back the count of an attempt that did not begin. */
  withdraw(subject: VelocitySubject, limits: Limits, entryId: string): Promise<void>;
  /** Counts a decline. Rejects if that fails. The charge is answered as usual then, since its outcome matters more. */
  recordDecline(subject: VelocitySubject, limits: Limits, entryId: string): Promise<void>;
}

/** A limit applied to one subject of one request. */
interface Window {
  readonly scope: LimitScope;
  readonly limit: VelocityLimits;
  readonly subject: Buffer;
}

export const postgresVelocity = (pool: Pool, keys: KeyRing, clock: Clock): Velocity => {
  const windows = (subject: VelocitySubject, limits: Limits): Window[] =>
    (['card', 'case'] as const).flatMap((scope) => {
      const limit = limits[scope];
      const text = scope === 'card' ? instrumentText(subject.instrument) : subject.referenceId;
      return limit === null || text === null ? [] : [{ scope, limit, subject: subjectHash(keys, scope, subject.portalId, text) }];
    });
  const record = (client: Client, portalId: string, { scope, limit, subject }: Window, kind: 'attempt' | 'decline', entryId: string) =>
    insertEntry(client, {
      portalId,
      scope,
      subject,
      kid: keys.current,
      kind,
      entryId,
      at: timestamp(clock.realNow()),
      keepSeconds: limit.windowSeconds + (limit.blockSeconds ?? 0),
    });

  return {
    admit: async (subject, limits, entryId) => {
      const checks = windows(subject, limits);
      if (checks.length === 0) return;
      await transaction(pool, async (client) => {
        // Attempts of one subject are counted one at a time. Otherwise two of them could both pass as the last allowed one.
        for (const { subject: hash } of [...checks].sort((a, b) => Buffer.compare(a.subject, b.subject)))
          await client.query('select pg_advisory_xact_lock($1::bigint)', [hash.readBigInt64BE(0).toString()]);
        const found = await Promise.all(checks.map((check) => refusal(client, subject.portalId, check, clock.realNow())));
        const refused = found.find((error) => error?.code === 'DECLINE_BLOCKED') ?? found.find((error) => error !== null);
        if (refused) throw refused;
        for (const check of checks) if (check.limit.attempts !== null) await record(client, subject.portalId, check, 'attempt', entryId);
      });
    },
    withdraw: async (subject, limits, entryId) => {
      for (const { scope, limit, subject: hash } of windows(subject, limits))
        if (limit.attempts !== null)
          await pool.query(`delete from velocity_entry where portal_id = $1 and scope = $2 and subject = $3 and kind = 'attempt' and entry_id = $4`, [
            subject.portalId,
            scope,
            hash,
            entryId,
          ]);
    },
    recordDecline: async (subject, limits, entryId) => {
      const checks = windows(subject, limits).filter(({ limit }) => limit.declines !== null);
      if (checks.length === 0) return;
      await transaction(pool, async (client) => {
        for (const check of checks) await record(client, subject.portalId, check, 'decline', entryId);
      });
    },
  };
};

const subjectHash = (keys: KeyRing, scope: LimitScope, portalId: string, text: string): Buffer => keys.mac('card', `${scope}\n${portalId}\n${text}`);

/**
 * A card or token of a refused attempt as a keyed hash, equal for the same card on the same portal until the master key is rotated. It differs from the
 * hash that velocity counts, so the two tables cannot be joined.
 */
export const refusedCardHash = (keys: KeyRing, portalId: string, instrument: PaymentInstrument): Buffer =>
  keys.mac('card', `refused\n${portalId}\n${instrumentText(instrument)}`);

const instrumentText = (instrument: PaymentInstrument): string =>
  instrument.type === 'card' ? instrument.number.reveal() : instrument.token.reveal();

const refusal = async (client: Client, portalId: string, { scope, limit, subject }: Window, now: number): Promise<ServiceError | null> => {
  const { windowSeconds, blockSeconds } = limit;
  if (limit.declines !== null) {
    const blocks = scope === 'card' && blockSeconds !== null;
    // A block may outlast the window of its declines, so older declines are read, too.
    const declines = await entriesSince(client, {
      portalId,
      scope,
      subject,
      kind: 'decline',
      since: now - (windowSeconds + (blocks ? blockSeconds : 0)) * 1000,
    });
    if (blocks) {
      const until = blockedUntil(declines, limit.declines, windowSeconds, blockSeconds);
      if (until !== null && until > now)
        return new ServiceError(
          'DECLINE_BLOCKED',
          'This card was declined repeatedly and is blocked for a while.',
          { retryAt: timestamp(until) },
          { retryAfterSeconds: Math.ceil((until - now) / 1000) },
        );
    } else if (declines.length >= limit.declines)
      return velocityLimit(scope, windowSeconds, declines[declines.length - limit.declines]! + windowSeconds * 1000, now);
  }
  if (limit.attempts !== null) {
    const attempts = await entriesSince(client, { portalId, scope, subject, kind: 'attempt', since: now - windowSeconds * 1000 });
    if (attempts.length >= limit.attempts)
      return velocityLimit(scope, windowSeconds, attempts[attempts.length - limit.attempts]! + windowSeconds * 1000, now);
  }
  return null;
};

/** The end of the newest block. A block starts when `declines` declines fall within one window. null: there was no block. */
const blockedUntil = (times: readonly number[], declines: number, windowSeconds: number, blockSeconds: number): number | null => {
  for (let last = times.length - 1; last >= declines - 1; last--)
    if (times[last]! - times[last - declines + 1]! < windowSeconds * 1000) return times[last]! + blockSeconds * 1000;
  return null;
};

const velocityLimit = (scope: 'card' | 'case', windowSeconds: number, retryAt: number, now: number) =>
  new ServiceError(
    'VELOCITY_LIMIT',
    `Too many recent attempts or declines for this ${scope}.`,
    { scope, windowSeconds, retryAt: timestamp(retryAt) },
    { retryAfterSeconds: Math.max(1, Math.ceil((retryAt - now) / 1000)) },
  );

const insertEntry = async (
  client: Client,
  entry: { portalId: string; scope: string; subject: Buffer; kid: string; kind: string; entryId: string; at: string; keepSeconds: number },
) =>
  client.query(
    `insert into velocity_entry (portal_id, scope, subject, kid, kind, entry_id, at, expires_at)
     values ($1, $2, $3, $4, $5, $6, $7, $7::timestamptz + make_interval(secs => $8)) on conflict do nothing`,
    [entry.portalId, entry.scope, entry.subject, entry.kid, entry.kind, entry.entryId, entry.at, entry.keepSeconds],
  );

const entriesSince = async (
  client: Client,
  query: { portalId: string; scope: string; subject: Buffer; kind: string; since: number },
): Promise<number[]> => {
  const { rows } = await client.query<{ at: Date }>(
    `select at from velocity_entry where portal_id = $1 and scope = $2 and subject = $3 and kind = $4 and at > $5 order by at, entry_id`,
    [query.portalId, query.scope, query.subject, query.kind, timestamp(query.since)],
  );
  return rows.map(({ at }) => at.getTime());
};

/** Removes rows that no window needs any more. */
export const purgeVelocity = (pool: Pool, stop?: AbortSignal): Promise<number> =>
  purge(async (limit) => {
    const { rowCount } = await pool.query(
      `delete from velocity_entry where ctid = any(array(
         select ctid from velocity_entry where expires_at < now() limit $1 for update skip locked))`,
      [limit],
    );
    return rowCount ?? 0;
  }, stop);
