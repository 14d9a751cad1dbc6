/**
 * Audit keys: read-only credentials of finance tools and auditors. They open only `/audit/v1/*`.
 *
 * A key may have a scope: the accounts and portals that it may read. Form: `pa_<test|live>_<16 base32>_<43 base62>`. Only a keyed hash of the secret is stored. Each key has a stream `staff-audit-key-<id>`, which
 * records who issued the key, who revoked it, and when.
 */
import { randomBytes, timingSafeEqual } from 'node:crypto';
import { keyEnvironment, newSecret, type Scope, type ScopeLimits } from '#accounts';
import { type Actor, change, type DecidedStreamType, defineEvents, type EventStore, type Position, type ReadModel, type Recorded } from '#eventstore';
import { AuthenticationError, type Clock, type Ids, isUuid, ServiceError } from '#kernel';
import { cardInText, crockford, type KeyRing, type Queryable } from '#platform';

/**
 * A finance key cannot read the reports that are marked `auditorsOnly`: staff actions and idempotency keys. An agency key is for people outside of the
 * operator's house: it always has a scope, and sees no name of staff.
 */
export const AUDIT_ROLES = ['finance', 'auditor', 'agency'] as const;
export type AuditRole = (typeof AUDIT_ROLES)[number];

const PREFIX = 'staff-audit-key-';
const LOOKUP_LENGTH = 16;
const MAX_NAME_CHARACTERS = 200;
/** Most accounts, and most portals, of a scope. */
const MAX_SCOPE_IDS = 100;
const KEY_TEXT = /^pa_(test|live)_([0-9A-HJKMNP-TV-Z]{16})_([0-9A-Za-z]{43})$/;

const TABLE = `
  create table audit_key (
    key_id uuid primary key, lookup_id text not null unique, name text not null, role text not null, scope json, personal boolean not null,
    environment text not null, secret_hash text not null, kid text not null, issued_at timestamptz not null, revoked_at timestamptz)`;

export const auditKeyModel: ReadModel = {
  name: 'audit-keys',
  shape: 2,
  streamPrefixes: [PREFIX],
  tables: ['audit_key'],
  createTables: TABLE,
  createIndexes: '',
  apply: (client, events) => applyKeys(client, events),
};

export interface KeyTerms {
  readonly name: string;
  readonly role: AuditRole;
  /** null: the key reads everything. */
  readonly scope: Scope;
  /** true: the key may ask for personal data. */
  readonly personal: boolean;
}

interface Issued extends KeyTerms {
  readonly keyId: string;
  readonly lookupId: string;
  readonly environment: string;
  /** Base64 of HMAC-SHA256 of the secret, with a key of the key ring. */
  readonly secretHash: string;
  readonly kid: string;
}

type AuditKeyEvent =
  { readonly type: 'AuditKeyIssued'; readonly data: Issued } | { readonly type: 'AuditKeyRevoked'; readonly data: { readonly keyId: string } };

/** Keys of version 1 read everything. */
const fromV1 = (data: Omit<Issued, 'scope' | 'personal'>): Issued => ({ ...data, scope: null, personal: false });

export const auditKeyEvents = defineEvents<AuditKeyEvent>({ AuditKeyIssued: [fromV1], AuditKeyRevoked: [] });

const AUDIT_KEY_STREAM: DecidedStreamType<'absent' | 'valid' | 'revoked', AuditKeyEvent, AuditKeyEvent> = {
  prefix: PREFIX,
  events: auditKeyEvents,
  decider: {
    initial: 'absent',
    evolve: (_, { type }) => (type === 'AuditKeyIssued' ? 'valid' : 'revoked'),
    decide: (state, event) => {
      if (event.type === 'AuditKeyIssued') return [event];
      if (state === 'absent') throw new ServiceError('VALIDATION_ERROR', 'There is no such audit key.', {}, { status: 404 });
      return state === 'revoked' ? [] : [event];
    },
  },
};

const applyKeys = async (client: Queryable, events: readonly Recorded[]): Promise<void> => {
  for (const recorded of events) {
    const { type, data } = auditKeyEvents.read(recorded);
    const { recordedAt } = recorded.meta;
    if (type === 'AuditKeyIssued') {
      const { keyId, lookupId, name, role, scope, personal, environment, secretHash, kid } = data;
      await client.query(
        `insert into audit_key (key_id, lookup_id, name, role, scope, personal, environment, secret_hash, kid, issued_at)
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) on conflict do nothing`,
        [keyId, lookupId, name, role, scope && JSON.stringify(scope), personal, environment, secretHash, kid, recordedAt],
      );
    } else await client.query('update audit_key set revoked_at = $2 where key_id = $1 and revoked_at is null', [data.keyId, recordedAt]);
  }
};

export interface AuditKeyPorts {
  readonly store: EventStore;
  readonly db: Queryable;
  readonly clock: Clock;
  readonly ids: Ids;
  readonly keys: KeyRing;
  readonly environment: 'sandbox' | 'production';
}

export interface AuditKeyRow extends KeyTerms {
  readonly keyId: string;
  readonly issuedAt: string;
  readonly revokedAt: string | null;
}

const changeKey = async (ports: AuditKeyPorts, event: AuditKeyEvent, actor: Actor): Promise<Position> => {
  const busy = () => new ServiceError('INVALID_STATE', 'The audit key is being changed by another command; try again.');
  const { position } = await change(ports, AUDIT_KEY_STREAM, event.data.keyId, event, { actor, correlationId: ports.ids.uuid() }, busy);
  return position!;
};

/** `auditKey` is the key as text. It is stored nowhere. */
export interface IssuedAuditKey {
  readonly keyId: string;
  readonly auditKey: string;
  readonly position: Position;
}

/** Sorted, each id once. A scope of an agency needs a portal, and no scope may be empty: it would read nothing. */
const validScope = (role: AuditRole, scope: Scope): Scope => {
  const refuse = (message: string) => new ServiceError('VALIDATION_ERROR', message);
  if (role === 'agency' && (scope === null || scope.portals.length === 0)) throw refuse('A key of an agency needs a portal.');
  if (scope === null) return null;
  const idsOf = (kind: keyof ScopeLimits): string[] => {
    const ids = [...new Set(scope[kind].map((id) => id.toLowerCase()))].sort();
    if (!ids.every(isUuid)) throw refuse(`${kind} of a scope are UUIDs.`);
    if (ids.length > MAX_SCOPE_IDS) throw refuse(`A scope has at most ${MAX_SCOPE_IDS} ${kind}.`);
    return ids;
  };
  const limits = { accounts: idsOf('accounts'), portals: idsOf('portals') };
  if (limits.accounts.length + limits.portals.length === 0) throw refuse('A scope names an account or a portal.');
  return limits;
};

/** Issues a key. Invalid name or scope → VALIDATION_ERROR. */
export const issueAuditKey = async (ports: AuditKeyPorts, terms: KeyTerms, actor: Actor): Promise<IssuedAuditKey> => {
  const { name, role, personal } = terms;
  if (name.trim() === '' || name.length > MAX_NAME_CHARACTERS || /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Surrogate}]/u.test(name))
    throw new ServiceError('VALIDATION_ERROR', `name must have 1 to ${MAX_NAME_CHARACTERS} characters, none of them a control character.`);
  const card = cardInText(name);
  if (card !== null) throw new ServiceError('VALIDATION_ERROR', `name ${card}.`);
  const scope = validScope(role, terms.scope);
  const { ids, keys } = ports;
  const [keyId, lookupId, secret] = [ids.uuid(), crockford(randomBytes(10), LOOKUP_LENGTH), newSecret()];
  const environment = keyEnvironment(ports.environment);
  const secretHash = keys.mac('audit-key', secret).toString('base64');
  const data = { keyId, name: name.trim(), role, scope, personal, lookupId, environment, secretHash, kid: keys.current };
  const position = await changeKey(ports, { type: 'AuditKeyIssued', data }, actor);
  return { keyId, auditKey: `pa_${environment}_${lookupId}_${secret}`, position };
};

/**
 * Revokes a key. If the key is revoked already, nothing changes. Unknown key → 404. Returns a log position. The key is refused as soon as the read
 * model has passed this position.
 */
export const revokeAuditKey = (ports: AuditKeyPorts, keyId: string, actor: Actor): Promise<Position> =>
  changeKey(ports, { type: 'AuditKeyRevoked', data: { keyId } }, actor);

export const listAuditKeys = async (db: Queryable): Promise<AuditKeyRow[]> => {
  const { rows } = await db.query<KeyTerms & { key_id: string; issued_at: Date; revoked_at: Date | null }>(
    'select key_id, name, role, scope, personal, issued_at, revoked_at from audit_key order by issued_at, key_id',
  );
  return rows.map((row) => ({
    keyId: row.key_id,
    name: row.name,
    role: row.role,
    scope: row.scope,
    personal: row.personal,
    issuedAt: row.issued_at.toISOString(),
    revokedAt: row.revoked_at?.toISOString() ?? null,
  }));
};

export interface AuditCaller extends Omit<KeyTerms, 'name'> {
  readonly keyId: string;
}

const NO_HASH = Buffer.alloc(32);

/**
 * Finds the audit key of a credential. A missing, malformed, unknown or revoked credential → 401. So does a partner's key, or a key of the other
 * environment. An unknown key id costs the same time as a wrong secret (C51).
 */
export const authenticateAudit = async (
  authorization: readonly string[],
  { db, keys, environment }: Pick<AuditKeyPorts, 'db' | 'keys' | 'environment'>,
): Promise<AuditCaller> => {
  const refuse = () => new AuthenticationError(401, 'An audit key is needed.');
  if (authorization.length !== 1) throw refuse();
  const [, kind, lookupId, secret] = KEY_TEXT.exec(authorization[0]!.trim().replace(/^auditkey +/i, '')) ?? [];
  if (lookupId === undefined || secret === undefined) throw refuse();
  const { rows } = await db.query<
    Omit<AuditCaller, 'keyId'> & Record<'key_id' | 'environment' | 'secret_hash' | 'kid', string> & { revoked: boolean }
  >({
    name: 'audit-key',
    text: `select key_id, role, scope, personal, environment, secret_hash, kid, revoked_at is not null as revoked from audit_key where lookup_id = $1`,
    values: [lookupId],
  });
  const found = rows[0];
  const kid = found && keys.kids.includes(found.kid) ? found.kid : null;
  const equal = timingSafeEqual(
    keys.mac('audit-key', secret, kid ?? keys.current),
    kid !== null && found ? Buffer.from(found.secret_hash, 'base64') : NO_HASH,
  );
  const ours = keyEnvironment(environment);
  if (!equal || kid === null || !found || found.revoked || found.environment !== ours || kind !== ours) throw refuse();
  // No command writes such a key. If a row were damaged, its agency would read everything.
  if (found.role === 'agency' && found.scope === null) throw refuse();
  return { keyId: found.key_id, role: found.role, scope: found.scope, personal: found.personal };
};
