/**
 * The contents of intakes: lines, payer, texts and addresses. They lie in a table and not in the log, since strangers may send intakes and the log is
 * never deleted. The event of a session holds the hash of its content. A paid payment has its own copy. Each content is in a box; the payments of the
 * session use the same key, so an erasure of a payment closes the content too.
 *
 * A row is written before the event that names it. If a process dies in between, nothing names the row. Every row is purged some time after its
 * session has expired.
 */
import { createHash } from 'node:crypto';
import { ServiceError, timestamp } from '#kernel';
import { batched, boxAsText, boxInText, type Migration, type OpenedKeys, type PersonalKey, type Queryable } from '#platform';
import { type CheckoutContent, SESSION_LIFE_MS } from './checkout.js';

/** Maximum size of one content as JSON, in bytes. */
export const MAX_CONTENT_BYTES = 64 * 1_024;
const DAY_MS = 86_400_000;
/** A content is kept for this long after its session has expired. */
const KEPT_AFTER_EXPIRY_MS = 30 * DAY_MS;
/** A content is kept for at least this long after the `exp` of its request. */
const KEPT_AFTER_EXP_MS = 7 * DAY_MS;

export const checkoutIntakeMigration: Migration = {
  name: '0090-checkout-intake',
  sql: `
    create table checkout_intake (
      checkout_id text collate "C" not null, hash text collate "C" not null, content text not null, purge_at timestamptz not null,
      primary key (checkout_id, hash));
    create index checkout_intake_purge on checkout_intake (purge_at);
  `,
};

export interface IntakeRow {
  readonly checkoutId: string;
  /** SHA-256 of the content as JSON, in hex. */
  readonly hash: string;
  /** The content as JSON, in a box. A row of an earlier release holds the JSON itself. */
  readonly text: string;
  /** RFC 3339: from then on, the row may be purged. */
  readonly purgeAt: string;
}

/** A row that was deleted. `keyId` null: it was not boxed. */
export interface PurgedIntake extends Pick<IntakeRow, 'checkoutId' | 'hash'> {
  readonly keyId: string | null;
}

/** A port with two implementations: Postgres and the simulation. One contract tests both (test/support/intake-rows.contract.ts). */
export interface IntakeRows {
  /**
   * Writes the row durably. Two requests with one nonce may write at the same moment. Each gets a row of its own, and the event of the session names
   * one of them.
   */
  write(row: IntakeRow): Promise<void>;
  /** The texts of a session, by hash. */
  read(checkoutId: string): Promise<ReadonlyMap<string, string>>;
  /** Deletes at most `limit` rows whose `purgeAt` is `now` or earlier, oldest first. Returns the deleted rows. */
  purge(now: string, limit: number): Promise<readonly PurgedIntake[]>;
}

/** The row of a content. `text`: of {@link contentText}. `exp`: unix seconds of the request; null: it has none. */
export const intakeRow = (
  checkoutId: string,
  text: string,
  { key, exp, now }: { readonly key: PersonalKey; readonly exp: string | null; readonly now: number },
): IntakeRow => {
  const purgeAt = timestamp(Math.max(now + SESSION_LIFE_MS + KEPT_AFTER_EXPIRY_MS, Number(exp ?? 0) * 1_000 + KEPT_AFTER_EXP_MS));
  return { checkoutId, hash: hashOf(text), text: boxAsText(key.sealText(text, contextOf(checkoutId))), purgeAt };
};

/**
 * The content as JSON. `salt`: any new id. It is a part of the hashed text, so the log says nothing about the content once the row is purged. Throws
 * VALIDATION_ERROR if the content is too large.
 */
export const contentText = (content: CheckoutContent, salt: string): string => {
  const text = JSON.stringify({ salt, content });
  if (Buffer.byteLength(text) > MAX_CONTENT_BYTES)
    throw new ServiceError('VALIDATION_ERROR', `The parameters are too large: at most ${MAX_CONTENT_BYTES / 1_024} KB as JSON.`);
  return text;
};

const contextOf = (checkoutId: string): string => `checkout-${checkoutId}/content`;

const hashOf = (text: string): string => createHash('sha256').update(text).digest('hex');

/** The id of the key of a row's text. null: it is not boxed. */
export const keyOfContent = (text: string): string | null => boxInText(text)?.key ?? null;

/** The content of a row. `erased`: its key is gone. `changed`: the text is not the one that was hashed. */
export const contentOf = (checkoutId: string, text: string, hash: string, opened: OpenedKeys): CheckoutContent | 'erased' | 'changed' => {
  const box = boxInText(text);
  const key = box && opened.key(box.key);
  if (box && !key) return 'erased';
  try {
    const clear = box ? key!.openText(box, contextOf(checkoutId)) : text;
    return hashOf(clear) === hash ? (JSON.parse(clear) as { readonly content: CheckoutContent }).content : 'changed';
  } catch {
    return 'changed';
  }
};

/** Payers who come at the same time share statements and commits. */
const SHARED = { maxItems: 100, inFlight: 2 } as const;

export const postgresIntakeRows = (db: Queryable): IntakeRows => ({
  write: batched(async (rows: readonly IntakeRow[]) => {
    await db.query({
      name: 'intake-write',
      text: `insert into checkout_intake (checkout_id, hash, content, purge_at)
             select * from unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[])`,
      values: [rows.map((row) => row.checkoutId), rows.map((row) => row.hash), rows.map((row) => row.text), rows.map((row) => row.purgeAt)],
    });
    return rows.map(() => undefined);
  }, SHARED),

  read: batched(async (checkoutIds: readonly string[]) => {
    const { rows } = await db.query<{ checkout_id: string; hash: string; content: string }>({
      name: 'intake-read',
      text: 'select checkout_id, hash, content from checkout_intake where checkout_id = any ($1)',
      values: [checkoutIds],
    });
    const texts = new Map(checkoutIds.map((id) => [id, new Map<string, string>()]));
    for (const { checkout_id: id, hash, content } of rows) texts.get(id)!.set(hash, content);
    return checkoutIds.map((id) => texts.get(id)!);
  }, SHARED),

  purge: async (now, limit) => {
    const { rows } = await db.query<PurgedIntake>(
      `delete from checkout_intake where ctid = any(array(
         select ctid from checkout_intake where purge_at <= $1 order by purge_at limit $2 for update skip locked))
       returning checkout_id as "checkoutId", hash, case when content like 'box %' then split_part(content, ' ', 2) end as "keyId"`,
      [now, limit],
    );
    return rows;
  },
});
