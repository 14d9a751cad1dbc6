/**
 * API keys and access tokens (specification, Authentication; C50–C52). An access token is a JWT under one pinned algorithm. Its signing key is
 * derived from the master key ring, so every replica with the ring can issue and check tokens.
 */
import { createPrivateKey, createPublicKey, type KeyObject } from 'node:crypto';
import { compactVerify, SignJWT } from 'jose';
import { AuthenticationError, type Clock, isUuid, timestamp } from '#kernel';
import type { KeyRing } from '#platform';
import type { AccountStatus } from './account.js';
import { isRightKey, keyEnvironment, parseApiKey } from './api-key.js';
import type { Directory } from './directory.js';
import type { KeyUse } from './key-use.js';

/** One hour (specification, Limits). */
export const ACCESS_TOKEN_SECONDS = 3_600;
/** Clocks of replicas may differ by this much. Not applied to `exp`. */
export const CLOCK_SKEW_SECONDS = 5;
/** Longest token that is parsed, in characters. */
export const MAX_TOKEN_LENGTH = 2_048;

/** Access tokens are valid only for `/api/partner/v1/*` (specification, Authentication 2). */
const AUDIENCE = 'payfold:partner-v1';
const ALGORITHM = 'EdDSA';
const TYPE = 'at+jwt';

/** The claim that holds {@link Holder.deactivations}. Tokens of release 0.1.0 have no such claim, which counts as 0. */
const DEACTIVATIONS = 'dea';

/** The account of a token. `deactivations`: how often it had been deactivated when the token was issued. */
interface Holder {
  readonly accountId: string;
  readonly deactivations: number;
}

/** Prefix of an Ed25519 private key in PKCS #8. The 32 bytes of the seed follow it (RFC 8410). */
const PKCS8_ED25519 = Buffer.from('302e020100300506032b657004220420', 'hex');

/** Issues and checks access tokens. A process needs only one instance, which keeps the imported keys. */
export class AccessTokens {
  private readonly signing: KeyObject;
  private readonly verifying: ReadonlyMap<string, KeyObject>;
  private readonly issuer: string;

  constructor(
    private readonly keys: KeyRing,
    environment: 'sandbox' | 'production',
    private readonly clock: Pick<Clock, 'realNow'>,
  ) {
    const privateKey = (kid: string) =>
      createPrivateKey({ key: Buffer.concat([PKCS8_ED25519, keys.derive('access-token', kid)]), format: 'der', type: 'pkcs8' });
    this.signing = privateKey(keys.current);
    this.verifying = new Map(keys.kids.map((kid) => [kid, createPublicKey(privateKey(kid))]));
    this.issuer = `payfold:${environment}`;
  }

  /** A token for the account, valid for one hour, or until the account is deactivated once more than `deactivations`. */
  async issue({ accountId, deactivations }: Holder): Promise<{ readonly accessToken: string; readonly expiresAt: string }> {
    const issuedAt = Math.floor(this.clock.realNow() / 1_000);
    const expires = issuedAt + ACCESS_TOKEN_SECONDS;
    const accessToken = await new SignJWT({ [DEACTIVATIONS]: deactivations })
      .setProtectedHeader({ alg: ALGORITHM, typ: TYPE, kid: this.keys.current })
      .setIssuer(this.issuer)
      .setAudience(AUDIENCE)
      .setSubject(accountId)
      .setIssuedAt(issuedAt)
      .setExpirationTime(expires)
      .sign(this.signing);
    return { accessToken, expiresAt: timestamp(expires * 1_000) };
  }

  /** Returns the account that a token was issued to, as it was then. Throws 401 for a token that this service did not issue, or that is not valid now. */
  async verify(token: string): Promise<Holder> {
    if (token.length > MAX_TOKEN_LENGTH) throw badToken();
    const parts = token.split('.');
    if (parts.length !== 3 || !parts.every(isCanonicalBase64url)) throw badToken();
    const header = jsonObject(parts[0]!);
    // Only these three fields may be present. Others (`crit`, `jku`, `x5u`, `jwk`) could select another key.
    if (!header || Object.keys(header).length !== 3 || header.alg !== ALGORITHM || header.typ !== TYPE || typeof header.kid !== 'string')
      throw badToken();
    const key = this.verifying.get(header.kid);
    if (!key) throw badToken();
    try {
      await compactVerify(token, key, { algorithms: [ALGORITHM] });
    } catch {
      throw badToken();
    }
    return this.checkClaims(jsonObject(parts[1]!) ?? {});
  }

  private checkClaims({ iss, aud, sub, iat, exp, nbf, [DEACTIVATIONS]: deactivations = 0 }: Readonly<Record<string, unknown>>): Holder {
    const now = this.clock.realNow() / 1_000;
    const right =
      iss === this.issuer &&
      aud === AUDIENCE &&
      isUuid(sub) &&
      isCount(deactivations) &&
      isCount(iat) &&
      isCount(exp) &&
      exp - iat === ACCESS_TOKEN_SECONDS &&
      iat <= now + CLOCK_SKEW_SECONDS &&
      (nbf === undefined || (isCount(nbf) && nbf <= now + CLOCK_SKEW_SECONDS));
    if (!right) throw badToken();
    if (now >= exp) throw new AuthenticationError(401, 'The access token has expired.');
    return { accountId: sub, deactivations };
  }
}

const isCount = (value: unknown): value is number => Number.isSafeInteger(value) && (value as number) >= 0;

/** True if the text is the canonical base64url of its bytes. Decoders also accept white space, padding and stray bits after the last byte. */
const isCanonicalBase64url = (text: string) => text.length > 0 && Buffer.from(text, 'base64url').toString('base64url') === text;

const jsonObject = (part: string): Readonly<Record<string, unknown>> | null => {
  try {
    const value: unknown = JSON.parse(Buffer.from(part, 'base64url').toString('utf8'));
    return value !== null && typeof value === 'object' && !Array.isArray(value) ? (value as Record<string, unknown>) : null;
  } catch {
    return null;
  }
};

// Authentication.

export interface AuthenticationDeps {
  readonly directory: Pick<Directory, 'findApiKey' | 'account'>;
  readonly keys: KeyRing;
  readonly tokens: AccessTokens;
  readonly environment: 'sandbox' | 'production';
  /** Called for each key that was accepted. */
  readonly keyUse?: KeyUse;
}

/** The authenticated caller. `keyId` is set only for API keys. */
export interface Caller {
  readonly accountId: string;
  readonly via: 'api_key' | 'access_token';
  readonly keyId?: string;
}

type Credential = { readonly kind: 'api_key'; readonly text: string } | { readonly kind: 'access_token'; readonly text: string };

const SCHEME = /^(\S+) +(\S+)$/;

/** Reads the credential. Throws 401 unless there is exactly one line of the form `ApiKey pc_…`, `pc_…` or `Bearer <token>`. */
const credentialOf = (lines: readonly string[]): Credential => {
  // These are the raw header lines, because Node joins or drops duplicates of this header (C14).
  if (lines.length !== 1)
    throw new AuthenticationError(401, lines.length === 0 ? 'An Authorization header is required.' : 'Send one Authorization header.');
  const line = lines[0]!.trim();
  if (line.startsWith('pc_')) return { kind: 'api_key', text: line };
  const [, scheme, text] = SCHEME.exec(line) ?? [];
  if (scheme?.toLowerCase() === 'apikey') return { kind: 'api_key', text: text! };
  // Generated clients send an API key as Bearer by default (C50).
  if (scheme?.toLowerCase() === 'bearer' && text!.startsWith('pc_'))
    throw new AuthenticationError(401, 'This is an API key, not an access token. Send it as "Authorization: ApiKey pc_…".');
  if (scheme?.toLowerCase() === 'bearer') return { kind: 'access_token', text: text! };
  throw new AuthenticationError(401, 'Send an API key as "ApiKey pc_…" or an access token as "Bearer …".');
};

/**
 * Returns the caller that these `Authorization` lines identify. Throws AuthenticationError: 401 for a missing or invalid credential, 403 for a valid
 * credential of a deactivated account.
 */
export const authenticate = async (authorizationHeaderLines: readonly string[], deps: AuthenticationDeps): Promise<Caller> => {
  const credential = credentialOf(authorizationHeaderLines);
  if (credential.kind === 'api_key') return authenticateKey(credential.text, deps);
  const { accountId, deactivations } = await deps.tokens.verify(credential.text);
  // The account is read on every request, so that its tokens are refused as soon as it is deactivated (C52).
  const found = await deps.directory.account(accountId);
  if (!found) throw badToken();
  requireActive(found.status);
  // The account was deactivated since, and is active again.
  if (found.deactivations !== deactivations) throw badToken();
  return { accountId, via: 'access_token' };
};

const authenticateKey = async (text: string, { directory, keys, environment, keyUse }: AuthenticationDeps): Promise<Caller> => {
  const presented = parseApiKey(text);
  if (!presented) throw badKey();
  const found = await directory.findApiKey(presented.lookupId);
  if (!isRightKey(presented, found, keyEnvironment(environment), keys)) throw badKey();
  requireActive(found.accountStatus);
  keyUse?.used(found.keyId);
  return { accountId: found.accountId, via: 'api_key', keyId: found.keyId };
};

/** `data` of `POST /auth/token` (C50). */
export interface TokenGrant {
  readonly accessToken: string;
  readonly tokenType: 'Bearer';
  /** Seconds. */
  readonly expiresIn: number;
  /** RFC 3339. */
  readonly expiresAt: string;
}

/** Exchanges an API key for an access token. Throws as {@link authenticate} does, and 403 for an access token. */
export const exchange = async (authorizationHeaderLines: readonly string[], deps: AuthenticationDeps): Promise<TokenGrant> => {
  const caller = await authenticate(authorizationHeaderLines, deps);
  if (caller.via === 'access_token') throw new AuthenticationError(403, 'An access token cannot obtain another one; send the API key.');
  const holder = await deps.directory.account(caller.accountId);
  if (!holder) throw badKey();
  // It may have been deactivated since the key was read.
  requireActive(holder.status);
  return { ...(await deps.tokens.issue(holder)), tokenType: 'Bearer', expiresIn: ACCESS_TOKEN_SECONDS };
};

const requireActive = (status: AccountStatus) => {
  if (status !== 'active') throw new AuthenticationError(403, 'The account is deactivated.');
};

// All bad keys get the same message, and so do all bad tokens. The caller must not learn whether a key is unknown or rotated.
const badKey = () => new AuthenticationError(401, 'The API key is not valid.');
const badToken = () => new AuthenticationError(401, 'The access token is not valid.');
