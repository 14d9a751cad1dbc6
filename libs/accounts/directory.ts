/**
 * The directory: the read model of accounts, keys, portals, cases and merchant accounts. Requests read its rows by primary key and never cache them. So a deactivation
 * or a rotation takes effect as soon as its row is written (specification, Authentication 3 and 4).
 *
 * The `evolve` of each decider makes the rows. The implementations on Postgres and in memory (for the simulation) pass the same contract spec.
 */
import { isUuid, systemClock } from '#kernel';
import { batched, type Pool, type Queryable, transaction } from '#platform';
import type { DomainEvent, ReadModel, Recorded, StreamType } from '#eventstore';
import type { Account, AccountStatus, KeyEnvironment } from './account.js';
import type { Case, Restriction } from './case-restriction.js';
import { ACCOUNT_STREAM, CASE_STREAM, lookAlikeId, MERCHANT_ACCOUNT_STREAM, PORTAL_STREAM } from './events.js';
import type { MerchantAccount, MerchantAccountStatus } from './merchant-account.js';
import { asNow, type Portal } from './portal.js';

/** The streams that the directory folds. */
export const DIRECTORY_STREAMS = ['account-', 'portal-', 'case-', 'merchant-account-'] as const;

/** A key and the status of its account, for authentication. */
export interface ApiKeyFacts {
  readonly keyId: string;
  readonly accountId: string;
  readonly accountStatus: AccountStatus;
  readonly environment: KeyEnvironment;
  /** HMAC-SHA256 of the secret, 32 bytes. */
  readonly secretHash: Uint8Array;
  readonly kid: string;
  readonly revoked: boolean;
}

export interface AccountFacts {
  readonly accountId: string;
  readonly name: string;
  readonly status: AccountStatus;
}

/** As {@link Account} says it. */
export type AccountForTokens = AccountFacts & Pick<Account, 'deactivations'>;

/** `revoked`: the account had access before and may still read the payments of the portal (C46). null: the account never had access. */
export type PortalAccess = 'granted' | 'revoked' | null;

/** The rows that a charge or a quote depends on, all of the same moment. */
export interface ChargeTerms {
  /** null: no such account. */
  readonly accountStatus: AccountStatus | null;
  readonly access: PortalAccess;
  /** null: no such portal. */
  readonly portal: Portal | null;
  /** The recorded restrictions of the case and its look-alikes. They may have ended ({@link restrictionInForce}). */
  readonly restrictions: readonly Restriction[];
  /** The status of the merchant accounts of the portal's gateway, by id. An account of the simulator has none. */
  readonly merchantAccounts: Readonly<Record<string, MerchantAccountStatus>>;
}

/** A recorded restriction with the reference id of its case, as it was sent. */
export type RestrictedCase = Restriction & { readonly referenceId: string };

/** Reads the present rows. An id that is not a UUID counts as unknown. */
export interface Directory {
  /** Finds a key by the look-up part of its text. */
  findApiKey(lookupId: string): Promise<ApiKeyFacts | null>;
  account(accountId: string): Promise<AccountForTokens | null>;
  /** All accounts, oldest id first. */
  accounts(): Promise<AccountFacts[]>;
  portal(portalId: string): Promise<Portal | null>;
  /** All portals, oldest id first. */
  portals(): Promise<Portal[]>;
  grant(accountId: string, portalId: string): Promise<PortalAccess>;
  /** The recorded restrictions of a case and of all its look-alikes, by reference id. */
  restrictedCases(portalId: string, referenceId: string): Promise<readonly RestrictedCase[]>;
  chargeTerms(accountId: string, portalId: string, referenceId: string | null): Promise<ChargeTerms>;
  /** null: no such merchant account. */
  merchantAccount(id: string): Promise<MerchantAccount | null>;
  /** All merchant accounts, by id. */
  merchantAccounts(): Promise<MerchantAccount[]>;
}

// Folding, shared by both implementations.

interface Row<State> {
  readonly state: State;
  /** Revision of the last event in the state. `advance` skips events up to this revision. */
  readonly revision: bigint;
}

const advance = <State, Event extends DomainEvent>(
  { decider, events }: StreamType<State | null, Event>,
  rows: Map<string, Row<State>>,
  key: string,
  recorded: Recorded,
) => {
  const { stream, revision, type } = recorded;
  const row = rows.get(key);
  if (row && revision <= row.revision) return;
  if (revision !== (row ? row.revision + 1n : 0n))
    throw new Error(`${stream}: revision ${revision} does not follow ${row?.revision ?? 'an empty row'}`);
  const state = decider.evolve(row?.state ?? null, events.read(recorded));
  if (state === null) throw new Error(`${stream}: ${type} leaves nothing`);
  rows.set(key, { state, revision });
};

interface Rows {
  /** By account id. */
  readonly accounts: Map<string, Row<Account>>;
  /** By portal id. */
  readonly portals: Map<string, Row<Portal>>;
  /** By {@link caseKey}. */
  readonly cases: Map<string, Row<Case>>;
  /** By id. */
  readonly merchantAccounts: Map<string, Row<MerchantAccount>>;
}

const noRows = (): Rows => ({ accounts: new Map(), portals: new Map(), cases: new Map(), merchantAccounts: new Map() });

const caseKey = (portalId: string, referenceId: string) => `${portalId} ${referenceId}`;

const keyOf = (recorded: Recorded): { readonly kind: keyof Rows; readonly key: string; readonly data: Readonly<Record<string, string>> } | null => {
  const data = recorded.data as Readonly<Record<string, string>>;
  if (recorded.stream.startsWith('account-')) return { kind: 'accounts', key: data.accountId!, data };
  if (recorded.stream.startsWith('portal-')) return { kind: 'portals', key: data.portalId!, data };
  if (recorded.stream.startsWith('case-')) return { kind: 'cases', key: caseKey(data.portalId!, data.referenceId!), data };
  if (recorded.stream.startsWith('merchant-account-')) return { kind: 'merchantAccounts', key: data.merchantAccount!, data };
  return null;
};

const foldInto = (rows: Rows, recorded: Recorded) => {
  const place = keyOf(recorded);
  if (place?.kind === 'accounts') advance(ACCOUNT_STREAM, rows.accounts, place.key, recorded);
  if (place?.kind === 'portals') advance(PORTAL_STREAM, rows.portals, place.key, recorded);
  if (place?.kind === 'cases') advance(CASE_STREAM, rows.cases, place.key, recorded);
  if (place?.kind === 'merchantAccounts') advance(MERCHANT_ACCOUNT_STREAM, rows.merchantAccounts, place.key, recorded);
};

// Postgres.

const TABLES = `
create table directory_account (
  account_id uuid primary key,
  status     text not null check (status in ('active', 'deactivated')),
  revision   bigint not null,
  state      json not null
);
create table directory_api_key (
  lookup_id   text collate "C" primary key,
  key_id      uuid not null unique,
  account_id  uuid not null,
  environment text not null check (environment in ('test', 'live')),
  secret_hash bytea not null check (octet_length(secret_hash) = 32),
  kid         text not null,
  revoked     boolean not null
);
create table directory_portal (
  portal_id uuid primary key,
  revision  bigint not null,
  state     json not null
);
create table directory_grant (
  account_id   uuid not null,
  portal_id    uuid not null,
  active       boolean not null,
  once_granted boolean not null check (once_granted or not active),
  primary key (account_id, portal_id)
);
create table directory_case (
  portal_id    uuid not null,
  reference_id text collate "C" not null,
  -- Equal for references that look alike: lookAlikeId().
  look_alike   text collate "C" not null,
  revision     bigint not null,
  kind         text check (kind in ('blocked', 'held')),
  until        text,
  primary key (portal_id, reference_id)
);
create table directory_merchant_account (
  merchant_account text collate "C" primary key,
  gateway          text not null,
  environment      text not null check (environment in ('sandbox', 'production')),
  external_id      text collate "C" not null,
  status           text not null check (status in ('active', 'charges_disabled', 'disabled')),
  revision         bigint not null,
  state            json not null,
  -- An account under two names would be settled twice. A lock at the command keeps such an event out of the log.
  unique (gateway, environment, external_id)
)`;

/** Folds a batch into the rows. Skips events that the rows contain already. */
export const applyDirectory = async (client: Queryable, events: readonly Recorded[]): Promise<void> => {
  const rows = noRows();
  const keys = {
    accounts: new Set<string>(),
    portals: new Set<string>(),
    merchantAccounts: new Set<string>(),
    cases: new Map<string, { portalId: string; referenceId: string }>(),
  };
  for (const recorded of events) {
    const place = keyOf(recorded);
    if (place?.kind === 'cases') keys.cases.set(place.key, { portalId: place.data.portalId!, referenceId: place.data.referenceId! });
    else if (place) keys[place.kind].add(place.key);
  }
  if (keys.accounts.size > 0) await readAccounts(client, rows, [...keys.accounts]);
  if (keys.portals.size > 0) await readPortals(client, rows, [...keys.portals]);
  if (keys.cases.size > 0) await readCases(client, rows, [...keys.cases.values()]);
  if (keys.merchantAccounts.size > 0) await readMerchantAccounts(client, rows, [...keys.merchantAccounts]);
  for (const recorded of events) foldInto(rows, recorded);
  if (rows.accounts.size > 0) await writeAccounts(client, [...rows.accounts.values()]);
  if (rows.portals.size > 0) await writePortals(client, [...rows.portals.values()]);
  if (rows.cases.size > 0) await writeCases(client, [...rows.cases.values()]);
  if (rows.merchantAccounts.size > 0) await writeMerchantAccounts(client, [...rows.merchantAccounts.values()]);
};

export const directoryModel: ReadModel = {
  name: 'directory',
  shape: 6,
  streamPrefixes: DIRECTORY_STREAMS,
  tables: ['directory_account', 'directory_api_key', 'directory_portal', 'directory_grant', 'directory_case', 'directory_merchant_account'],
  createTables: TABLES,
  createIndexes: 'create index directory_case_look_alike on directory_case (look_alike) where kind is not null',
  apply: applyDirectory,
};

const readAccounts = async (client: Queryable, rows: Rows, accountIds: readonly string[]) => {
  const found = await client.query<{ account_id: string; revision: string; state: Account }>(
    'select account_id, revision, state from directory_account where account_id = any ($1::uuid[])',
    [accountIds],
  );
  for (const { account_id, revision, state } of found.rows) rows.accounts.set(account_id, { state, revision: BigInt(revision) });
};

const readPortals = async (client: Queryable, rows: Rows, portalIds: readonly string[]) => {
  const found = await client.query<{ portal_id: string; revision: string; state: Portal }>(
    'select portal_id, revision, state from directory_portal where portal_id = any ($1::uuid[])',
    [portalIds],
  );
  for (const { portal_id, revision, state } of found.rows) rows.portals.set(portal_id, { state: asNow(state), revision: BigInt(revision) });
};

interface RestrictionColumns {
  readonly kind: Restriction['kind'] | null;
  readonly until: string | null;
}

const toRestriction = ({ kind, until }: RestrictionColumns): Restriction | null => (kind === null ? null : { kind, until });

const readCases = async (client: Queryable, rows: Rows, cases: readonly { portalId: string; referenceId: string }[]) => {
  const found = await client.query<RestrictionColumns & { portal_id: string; reference_id: string; revision: string }>(
    `select portal_id, reference_id, revision, kind, until
     from directory_case join unnest($1::uuid[], $2::text[]) as asked (portal_id, reference_id) using (portal_id, reference_id)`,
    [cases.map(({ portalId }) => portalId), cases.map(({ referenceId }) => referenceId)],
  );
  for (const row of found.rows) {
    const restriction = toRestriction(row);
    // The reason stays in the log. No later event depends on it.
    const state = { portalId: row.portal_id, referenceId: row.reference_id, restriction: restriction && { ...restriction, personal: null } };
    rows.cases.set(caseKey(row.portal_id, row.reference_id), { state, revision: BigInt(row.revision) });
  }
};

const readMerchantAccounts = async (client: Queryable, rows: Rows, ids: readonly string[]) => {
  const found = await client.query<{ merchant_account: string; revision: string; state: MerchantAccount }>(
    'select merchant_account, revision, state from directory_merchant_account where merchant_account = any ($1::text[])',
    [ids],
  );
  for (const { merchant_account, revision, state } of found.rows) rows.merchantAccounts.set(merchant_account, { state, revision: BigInt(revision) });
};

const writeAccounts = async (client: Queryable, rows: readonly Row<Account>[]) => {
  await client.query(
    `insert into directory_account (account_id, status, revision, state)
     select * from unnest($1::uuid[], $2::text[], $3::bigint[], $4::json[])
     on conflict (account_id) do update set status = excluded.status, revision = excluded.revision, state = excluded.state`,
    [
      rows.map(({ state }) => state.accountId),
      rows.map(({ state }) => state.status),
      rows.map(({ revision }) => String(revision)),
      rows.map(({ state }) => JSON.stringify(state)),
    ],
  );
  const keys = rows.flatMap(({ state }) => state.keys.map((key) => ({ ...key, accountId: state.accountId })));
  if (keys.length === 0) return;
  await client.query(
    `insert into directory_api_key (lookup_id, key_id, account_id, environment, secret_hash, kid, revoked)
     select * from unnest($1::text[], $2::uuid[], $3::uuid[], $4::text[], $5::bytea[], $6::text[], $7::boolean[])
     on conflict (lookup_id) do update set revoked = excluded.revoked where directory_api_key.revoked <> excluded.revoked`,
    [
      keys.map((key) => key.lookupId),
      keys.map((key) => key.keyId),
      keys.map((key) => key.accountId),
      keys.map((key) => key.environment),
      keys.map((key) => Buffer.from(key.secretHash, 'base64')),
      keys.map((key) => key.kid),
      keys.map((key) => key.revoked),
    ],
  );
};

const writePortals = async (client: Queryable, rows: readonly Row<Portal>[]) => {
  await client.query(
    `insert into directory_portal (portal_id, revision, state)
     select * from unnest($1::uuid[], $2::bigint[], $3::json[])
     on conflict (portal_id) do update set revision = excluded.revision, state = excluded.state`,
    [rows.map(({ state }) => state.portalId), rows.map(({ revision }) => String(revision)), rows.map(({ state }) => JSON.stringify(state))],
  );
  const grants = rows.flatMap(({ state }) =>
    Object.entries(state.access).map(([accountId, access]) => ({ accountId, access, portalId: state.portalId })),
  );
  await client.query(
    `insert into directory_grant (account_id, portal_id, active, once_granted)
     select account_id, portal_id, active, true from unnest($1::uuid[], $2::uuid[], $3::boolean[]) as change (account_id, portal_id, active)
     on conflict (account_id, portal_id) do update set active = excluded.active where directory_grant.active <> excluded.active`,
    [grants.map(({ accountId }) => accountId), grants.map(({ portalId }) => portalId), grants.map(({ access }) => access === 'granted')],
  );
};

const writeCases = async (client: Queryable, rows: readonly Row<Case>[]) => {
  await client.query(
    `insert into directory_case (portal_id, reference_id, revision, kind, until, look_alike)
     select * from unnest($1::uuid[], $2::text[], $3::bigint[], $4::text[], $5::text[], $6::text[])
     on conflict (portal_id, reference_id) do update set revision = excluded.revision, kind = excluded.kind, until = excluded.until`,
    [
      rows.map(({ state }) => state.portalId),
      rows.map(({ state }) => state.referenceId),
      rows.map(({ revision }) => String(revision)),
      rows.map(({ state }) => state.restriction?.kind ?? null),
      rows.map(({ state }) => state.restriction?.until ?? null),
      rows.map(({ state }) => lookAlikeId(state.portalId, state.referenceId)),
    ],
  );
};

const writeMerchantAccounts = async (client: Queryable, rows: readonly Row<MerchantAccount>[]) => {
  await client.query(
    `insert into directory_merchant_account (merchant_account, gateway, environment, external_id, status, revision, state)
     select * from unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bigint[], $7::json[])
     on conflict (merchant_account) do update set status = excluded.status, revision = excluded.revision, state = excluded.state`,
    [
      rows.map(({ state }) => state.merchantAccount),
      rows.map(({ state }) => state.gateway),
      rows.map(({ state }) => state.environment),
      rows.map(({ state }) => state.externalId),
      rows.map(({ state }) => state.status),
      rows.map(({ revision }) => String(revision)),
      rows.map(({ state }) => JSON.stringify(state)),
    ],
  );
};

interface GrantColumns {
  readonly active: boolean | null;
  readonly once_granted: boolean | null;
}

const toAccess = ({ active, once_granted }: GrantColumns): PortalAccess => (active ? 'granted' : once_granted ? 'revoked' : null);

/** Two statements of each kind may be in flight, so that a slow statement does not delay all requests. */
const LOOKUPS = { maxItems: 200, inFlight: 2, patience: { ms: 5_000, clock: systemClock } } as const;

interface KeyRow {
  readonly lookup_id: string;
  readonly key_id: string;
  readonly account_id: string;
  readonly status: AccountStatus;
  readonly environment: KeyEnvironment;
  readonly secret_hash: Buffer;
  readonly kid: string;
  readonly revoked: boolean;
}

const findApiKeys = async (db: Queryable, lookupIds: readonly string[]): Promise<(ApiKeyFacts | null)[]> => {
  const { rows } = await db.query<KeyRow>({
    name: 'directory-find-api-keys',
    text: `select k.lookup_id, k.key_id, k.account_id, a.status, k.environment, k.secret_hash, k.kid, k.revoked
           from directory_api_key k join directory_account a using (account_id) where k.lookup_id = any ($1::text[])`,
    values: [[...new Set(lookupIds)]],
  });
  const found = new Map(
    rows.map(({ lookup_id, key_id: keyId, account_id: accountId, status: accountStatus, environment, secret_hash: secretHash, kid, revoked }) => [
      lookup_id,
      { keyId, accountId, accountStatus, environment, secretHash, kid, revoked },
    ]),
  );
  return lookupIds.map((lookupId) => found.get(lookupId) ?? null);
};

/** A key as staff name it: by its id, by the beginning that `keys list` shows, or by its whole text. */
const NAMED_KEY = /^pc_(?:test|live)_([0-9A-HJKMNP-TV-Z]{16})(?:_[0-9A-Za-z]{43})?$/;

/** Finds a key and its account. null: there is no such key. */
export const findNamedKey = async (db: Queryable, name: string): Promise<{ readonly keyId: string; readonly accountId: string } | null> => {
  const lookupId = NAMED_KEY.exec(name)?.[1] ?? null;
  if (lookupId === null && !isUuid(name)) return null;
  const { rows } = await db.query<{ keyId: string; accountId: string }>(
    'select key_id as "keyId", account_id as "accountId" from directory_api_key where key_id = $1::uuid or lookup_id = $2',
    lookupId === null ? [name, null] : [null, lookupId],
  );
  return rows[0] ?? null;
};

interface TermsQuestion {
  readonly accountId: string;
  readonly portalId: string;
  readonly referenceId: string | null;
}

interface TermsColumns {
  readonly status: AccountStatus | null;
  readonly restrictions: readonly Restriction[] | null;
  readonly portal: Portal | null;
  readonly merchant_account: string | null;
  readonly merchant_status: MerchantAccountStatus | null;
  readonly fee_merchant_account: string | null;
  readonly fee_merchant_status: MerchantAccountStatus | null;
}

/**
 * Reads with one statement, so that grant, portal and restriction are of the same moment. The row of a portal is sent only with the first question
 * that names the portal.
 */
const findChargeTerms = async (db: Queryable, questions: readonly TermsQuestion[]): Promise<ChargeTerms[]> => {
  const uuids = (ids: readonly string[]) => ids.map((id) => (isUuid(id) ? id.toLowerCase() : null));
  const portalIds = uuids(questions.map(({ portalId }) => portalId));
  const { rows } = await db.query<GrantColumns & TermsColumns>({
    name: 'directory-charge-terms',
    text: `select a.status, g.active, g.once_granted, p.state as portal,
             (select json_agg(json_build_object('kind', c.kind, 'until', c.until) order by c.reference_id) from directory_case c
              where c.look_alike = asked.look_alike and c.kind is not null) as restrictions,
             m.merchant_account, m.status as merchant_status, f.merchant_account as fee_merchant_account, f.status as fee_merchant_status
           from unnest($1::uuid[], $2::uuid[], $3::text[], $4::uuid[]) with ordinality asked (account_id, portal_id, look_alike, shown_portal_id, number)
           left join directory_account a on a.account_id = asked.account_id
           left join directory_grant g on g.account_id = asked.account_id and g.portal_id = asked.portal_id
           left join directory_portal p on p.portal_id = asked.shown_portal_id
           left join directory_merchant_account m on m.merchant_account = p.state #>> '{gateway,merchantAccount}'
           left join directory_merchant_account f on f.merchant_account = p.state #>> '{gateway,feeMerchantAccount}'
           order by asked.number`,
    values: [
      uuids(questions.map(({ accountId }) => accountId)),
      portalIds,
      questions.map(({ referenceId }, index) => (referenceId !== null && portalIds[index] ? lookAlikeId(portalIds[index], referenceId) : null)),
      portalIds.map((id, index) => (portalIds.indexOf(id) === index ? id : null)),
    ],
  });
  const shown = new Map<string | null, Pick<ChargeTerms, 'portal' | 'merchantAccounts'>>();
  for (const [index, row] of rows.entries())
    if (row.portal) {
      const accounts = [
        [row.merchant_account, row.merchant_status],
        [row.fee_merchant_account, row.fee_merchant_status],
      ].filter(([id]) => id !== null) as [string, MerchantAccountStatus][];
      shown.set(portalIds[index]!, { portal: asNow(row.portal), merchantAccounts: Object.fromEntries(accounts) });
    }
  return rows.map((row, index) => ({
    accountStatus: row.status,
    access: toAccess(row),
    restrictions: row.restrictions ?? [],
    ...(shown.get(portalIds[index]!) ?? { portal: null, merchantAccounts: {} }),
  }));
};

export const postgresDirectory = (db: Queryable): Directory => {
  const findApiKey = batched((lookupIds: readonly string[]) => findApiKeys(db, lookupIds), LOOKUPS);
  const chargeTerms = batched((questions: readonly TermsQuestion[]) => findChargeTerms(db, questions), LOOKUPS);
  return {
    findApiKey,

    account: async (accountId) => {
      if (!isUuid(accountId)) return null;
      const { rows } = await db.query<AccountForTokens>({
        name: 'directory-account',
        text: `select account_id as "accountId", state ->> 'name' as name, status, (state ->> 'deactivations')::int as deactivations
               from directory_account where account_id = $1::uuid`,
        values: [accountId],
      });
      return rows[0] ?? null;
    },

    accounts: async () => {
      const { rows } = await db.query<AccountFacts>(
        `select account_id as "accountId", state ->> 'name' as name, status from directory_account order by account_id`,
      );
      return rows;
    },

    portal: async (portalId) => {
      if (!isUuid(portalId)) return null;
      const { rows } = await db.query<{ state: Portal }>({
        name: 'directory-portal',
        text: 'select state from directory_portal where portal_id = $1::uuid',
        values: [portalId],
      });
      return rows[0] ? asNow(rows[0].state) : null;
    },

    portals: async () => {
      const { rows } = await db.query<{ state: Portal }>('select state from directory_portal order by portal_id');
      return rows.map(({ state }) => asNow(state));
    },

    grant: async (accountId, portalId) => {
      if (!isUuid(accountId) || !isUuid(portalId)) return null;
      const { rows } = await db.query<GrantColumns>({
        name: 'directory-grant',
        text: 'select active, once_granted from directory_grant where account_id = $1::uuid and portal_id = $2::uuid',
        values: [accountId, portalId],
      });
      return rows[0] ? toAccess(rows[0]) : null;
    },

    restrictedCases: async (portalId, referenceId) => {
      const { rows } = await db.query<RestrictedCase>(
        `select reference_id as "referenceId", kind, until from directory_case where look_alike = $1 and kind is not null order by reference_id`,
        [lookAlikeId(portalId.toLowerCase(), referenceId)],
      );
      return rows;
    },

    chargeTerms: (accountId, portalId, referenceId) => chargeTerms({ accountId, portalId, referenceId }),

    merchantAccount: async (id) => {
      const { rows } = await db.query<{ state: MerchantAccount }>({
        name: 'directory-merchant-account',
        text: 'select state from directory_merchant_account where merchant_account = $1',
        values: [id],
      });
      return rows[0]?.state ?? null;
    },

    merchantAccounts: async () => {
      const { rows } = await db.query<{ state: MerchantAccount }>({
        name: 'directory-merchant-accounts',
        text: 'select state from directory_merchant_account order by merchant_account',
      });
      return rows.map(({ state }) => state);
    },
  };
};

/** Any number; other locks of the database have others. */
const ADD_LOCK = 7_205_131;

/** Runs `work` while no other process runs one. Two processes could add one account of a processor under two names. */
export const oneAtATime = <T>(pool: Pool, work: () => Promise<T>): Promise<T> =>
  transaction(pool, async (client) => {
    await client.query('select pg_advisory_xact_lock($1)', [ADD_LOCK]);
    return work();
  });

/** The directory in memory, for the simulation and unit specs. The caller passes the log's events to `apply`. */
export class MemoryDirectory implements Directory {
  private readonly rows = noRows();
  /** Account id by look-up id. A key never moves to another account. */
  private readonly accountOfKey = new Map<string, string>();

  apply(events: readonly Recorded[]): void {
    for (const recorded of events) {
      foldInto(this.rows, recorded);
      const place = keyOf(recorded);
      if (place?.kind === 'accounts') for (const key of this.rows.accounts.get(place.key)!.state.keys) this.accountOfKey.set(key.lookupId, place.key);
    }
  }

  async findApiKey(lookupId: string): Promise<ApiKeyFacts | null> {
    const owner = this.rows.accounts.get(this.accountOfKey.get(lookupId) ?? '')?.state;
    const key = owner?.keys.find((candidate) => candidate.lookupId === lookupId);
    if (!owner || !key) return null;
    const { keyId, environment, kid, revoked } = key;
    return {
      keyId,
      accountId: owner.accountId,
      accountStatus: owner.status,
      environment,
      secretHash: Buffer.from(key.secretHash, 'base64'),
      kid,
      revoked,
    };
  }

  async account(accountId: string): Promise<AccountForTokens | null> {
    const found = this.rows.accounts.get(accountId.toLowerCase())?.state;
    return found ? { ...facts(found), deactivations: found.deactivations } : null;
  }

  async accounts(): Promise<AccountFacts[]> {
    return [...this.rows.accounts.values()].map(({ state }) => facts(state)).sort((a, b) => (a.accountId < b.accountId ? -1 : 1));
  }

  async portal(portalId: string): Promise<Portal | null> {
    return this.rows.portals.get(portalId.toLowerCase())?.state ?? null;
  }

  async portals(): Promise<Portal[]> {
    return [...this.rows.portals.values()].map(({ state }) => state).sort((a, b) => (a.portalId < b.portalId ? -1 : 1));
  }

  async grant(accountId: string, portalId: string): Promise<PortalAccess> {
    return this.rows.portals.get(portalId.toLowerCase())?.state.access[accountId.toLowerCase()] ?? null;
  }

  async restrictedCases(portalId: string, referenceId: string): Promise<readonly RestrictedCase[]> {
    const id = lookAlikeId(portalId.toLowerCase(), referenceId);
    return [...this.rows.cases.values()]
      .filter(({ state }) => state.restriction && lookAlikeId(state.portalId, state.referenceId) === id)
      .map(({ state: { referenceId: sent, restriction } }) => ({ referenceId: sent, kind: restriction!.kind, until: restriction!.until }))
      .sort((a, b) => (a.referenceId < b.referenceId ? -1 : 1));
  }

  async chargeTerms(accountId: string, portalId: string, referenceId: string | null): Promise<ChargeTerms> {
    const portal = await this.portal(portalId);
    const { gateway } = portal ?? {};
    const found = await Promise.all([gateway?.merchantAccount, gateway?.feeMerchantAccount].map((id) => this.merchantAccount(id ?? '')));
    return {
      accountStatus: (await this.account(accountId))?.status ?? null,
      access: await this.grant(accountId, portalId),
      portal,
      restrictions: referenceId === null ? [] : (await this.restrictedCases(portalId, referenceId)).map(({ kind, until }) => ({ kind, until })),
      merchantAccounts: Object.fromEntries(found.filter((one) => one !== null).map(({ merchantAccount, status }) => [merchantAccount, status])),
    };
  }

  async merchantAccount(id: string): Promise<MerchantAccount | null> {
    return this.rows.merchantAccounts.get(id)?.state ?? null;
  }

  async merchantAccounts(): Promise<MerchantAccount[]> {
    return [...this.rows.merchantAccounts.values()].map(({ state }) => state).sort((a, b) => (a.merchantAccount < b.merchantAccount ? -1 : 1));
  }
}

const facts = ({ accountId, name, status }: Account): AccountFacts => ({ accountId, name, status });
