/**
 * The index of personal data: which key is used in which stream, by account, by age and by e-mail address. It is a read model, so it follows the log.
 *
 * It keeps no e-mail address, only a keyed hash of it. A key that was erased has no rows.
 */
import type { ReadModel, Recorded } from '#eventstore';
import { isBox, type Personal } from '#kernel';
import { type PaymentEvent, paymentEvents, paymentIdOf, paymentStream, type PaymentTexts, termsContext } from '#payments';
import { type Client, comparableEmail, type KeyRing, PersonalKey, postgresPersonalKeyRows, type Queryable } from '#platform';
import { ERASURE_STREAMS, erasureEvents, type Subject } from './erasure.js';

const TABLES = `
  create table personal_use (key_id uuid not null, stream text collate "C" not null, account_id uuid, mail_mac bytea, begun_at timestamptz not null)`;
const INDEXES = `
  alter table personal_use add constraint personal_use_pkey primary key (key_id, stream);
  create index personal_use_stream on personal_use (stream);
  create index personal_use_mail on personal_use (mail_mac, stream) where mail_mac is not null;
  create index personal_use_age on personal_use (account_id, begun_at, stream)`;
/** The index may lag by this much. A caller of `runUntil` does not wait for it. */
const GATHER_MS = 5_000;

const PAYMENTS = 'payment-';
export const CHECKOUTS = 'checkout-';
const STREAMS = [PAYMENTS, 'case-', ...ERASURE_STREAMS];

/**
 * `keys` null: for names and tables only. Then events with personal data are refused, since the hash of an e-mail address needs the key ring.
 */
export const personalUseModel = (keys: KeyRing | null): ReadModel => ({
  name: 'personal-use',
  shape: 2,
  streamPrefixes: STREAMS,
  gatherMs: GATHER_MS,
  tables: ['personal_use'],
  createTables: TABLES,
  createIndexes: INDEXES,
  rebuildsAnew: true,
  apply: (client, events) => applyUse(client, keys, events),
});

/** The keyed hash of an e-mail address in its comparable form, under the oldest key of the ring, so that a rotation changes no hash. */
export const mailMac = (keys: KeyRing, address: string): Buffer => keys.mac('personal-mail', comparableEmail(address), keys.kids[0]);

interface Use {
  readonly keyId: string;
  readonly stream: string;
  /** null: the stream is no payment, or the key came after the payment's first event. */
  readonly accountId: string | null;
  readonly mac: Buffer | null;
  /** RFC 3339. */
  readonly begunAt: string;
}

/** The key that an event's personal data is sealed under. null: it has none, or holds it in clear. */
const keyOf = ({ data }: Recorded): string | null => {
  const { personal = null } = data as unknown as { readonly personal?: Personal<unknown> };
  return isBox(personal) ? personal.key : null;
};

/** The keys of a stream's events, each once. */
export const keysOf = (events: readonly Recorded[]): readonly string[] => [...new Set(events.flatMap((event) => keyOf(event) ?? []))];

const applyUse = async (client: Client, keys: KeyRing | null, events: readonly Recorded[]): Promise<void> => {
  const used = events.flatMap((event) => {
    const keyId = keyOf(event);
    return keyId === null ? [] : [{ event, keyId }];
  });
  if (used.length > 0) {
    if (keys === null) throw new Error('the index of personal data needs the key ring');
    const found = await keysFound(
      client,
      keys,
      used.map(({ keyId }) => keyId),
    );
    // An event after the erasure may copy a box that nobody can open. Such a key needs no row.
    const kept = used.filter(({ keyId }) => !found.erased.has(keyId));
    await writeUses(
      client,
      kept.flatMap(({ event, keyId }) => usesOf(event, keyId, keys, found.keys.get(keyId) ?? null)),
    );
  }
  const erased = events.flatMap((event) =>
    event.type === 'PersonalDataErased' ? erasureEvents.read(event).data.subjects.map(({ keyId }) => keyId) : [],
  );
  if (erased.length > 0) await client.query('delete from personal_use where key_id = any ($1::uuid[])', [erased]);
};

const keysFound = async (client: Client, keys: KeyRing, keyIds: readonly string[]) => {
  const rows = await postgresPersonalKeyRows(client).find([...new Set(keyIds)]);
  return {
    keys: new Map(rows.flatMap(({ keyId, key }): [string, PersonalKey][] => (key === null ? [] : [[keyId, PersonalKey.unwrap(keys, key)]]))),
    erased: new Set(rows.flatMap(({ keyId, erasedAt }) => (erasedAt === null ? [] : [keyId]))),
  };
};

const usesOf = (event: Recorded, keyId: string, keys: KeyRing, key: PersonalKey | null): readonly Use[] => {
  const { stream, meta } = event;
  const use = { keyId, stream, accountId: null, mac: null, begunAt: meta.recordedAt };
  if (event.type !== 'PaymentInitiated') return [use];
  const { data } = paymentEvents.read(event) as Extract<PaymentEvent, { readonly type: 'PaymentInitiated' }>;
  const texts = key === null || !isBox(data.personal) ? null : (key.open(data.personal, termsContext(paymentIdOf(stream))) as PaymentTexts);
  const email = texts?.payer?.email ?? null;
  const payment: Use = { ...use, accountId: data.accountId, mac: email === null ? null : mailMac(keys, email) };
  // The payments of a checkout use the key of its content.
  return meta.actor.type === 'payer' ? [payment, { ...use, stream: `${CHECKOUTS}${meta.actor.id}` }] : [payment];
};

const writeUses = async (client: Client, uses: readonly Use[]): Promise<void> => {
  if (uses.length === 0) return;
  await client.query({
    name: 'personal-use-write',
    text: `
      insert into personal_use (key_id, stream, account_id, mail_mac, begun_at)
      select * from unnest($1::uuid[], $2::text[], $3::uuid[], $4::bytea[], $5::timestamptz[]) on conflict do nothing`,
    values: [
      uses.map(({ keyId }) => keyId),
      uses.map(({ stream }) => stream),
      uses.map(({ accountId }) => accountId),
      uses.map(({ mac }) => mac),
      uses.map(({ begunAt }) => begunAt),
    ],
  });
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Reading.

/** Payments of one page. One statement reads their streams. */
export const PAGE_PAYMENTS = 250;

/** Every use of these keys, in every stream. */
export const usesOfKeys = async (db: Queryable, keyIds: readonly string[]): Promise<readonly Subject[]> => {
  const { rows } = await db.query<{ key_id: string; stream: string }>(
    'select key_id, stream from personal_use where key_id = any ($1::uuid[]) order by stream, key_id',
    [keyIds],
  );
  return rows.map(({ key_id: keyId, stream }) => ({ keyId, stream }));
};

/** A page of the payments with this e-mail address, the newest first. `before`: the last payment of the page before. */
export const paymentsOfMail = async (db: Queryable, mac: Buffer, before: string | null, limit: number): Promise<readonly string[]> => {
  const { rows } = await db.query<{ stream: string }>(
    'select distinct stream from personal_use where mail_mac = $1 and stream < $2 order by stream desc limit $3',
    [mac, before === null ? BEYOND_PAYMENTS : paymentStream(before), limit],
  );
  return rows.map(({ stream }) => paymentIdOf(stream));
};

/** SQL: true if the payment has this e-mail address. `paymentId` is a column. */
export const ofMail = (paymentId: string, mac: string): string =>
  `exists (select from personal_use u where u.mail_mac = ${mac} and u.stream = '${PAYMENTS}' || ${paymentId})`;

/** In the order of the index, this text comes after every stream of a payment. */
const BEYOND_PAYMENTS = 'payment.';

export interface AgedPlace {
  /** As text, in the form of the database. */
  readonly begunAt: string;
  readonly stream: string;
}

/** `accountId` null: payments whose key came after their first event, of every account. */
export interface Aged {
  readonly accountId: string | null;
  /** RFC 3339: a payment is old if it began before this time. */
  readonly before: string;
}

/** A page of the payments that began before a time and have personal data, the oldest first. A payment with several keys may come several times. */
export const agedPayments = async (
  db: Queryable,
  { accountId, before }: Aged,
  after: AgedPlace | null,
  limit: number,
): Promise<readonly AgedPlace[]> => {
  const { rows } = await db.query<{ begun_at: string; stream: string }>(
    `select begun_at::text, stream from personal_use
     where ${accountId === null ? `account_id is null and stream >= '${PAYMENTS}' and stream < '${BEYOND_PAYMENTS}'` : 'account_id = $5'}
       and begun_at < $1 and (begun_at, stream) > ($2::timestamptz, $3) order by begun_at, stream limit $4`,
    [before, after?.begunAt ?? '-infinity', after?.stream ?? '', limit, ...(accountId === null ? [] : [accountId])],
  );
  return rows.map(({ begun_at: begunAt, stream }) => ({ begunAt, stream }));
};
