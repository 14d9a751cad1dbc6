import { createHmac, createPublicKey, createPrivateKey } from 'node:crypto';
import { beforeEach, describe, expect, test } from '@jest/globals';
import { importPKCS8, SignJWT } from 'jose';
import { AuthenticationError, type Clock, systemClock } from '#kernel';
import { type KeyRing, KeyRing as Ring, systemIds } from '#platform';
import { type EventStore, memoryEventStore } from '#eventstore';
import { AccessTokens, authenticate, type AuthenticationDeps, exchange } from './access-token.js';
import { Administration } from './administration.js';
import { newApiKey, newSecret, parseApiKey } from './api-key.js';
import { MemoryDirectory } from './directory.js';
import { memoryPersonalKeys } from '../../test/support/personal-keys.js';

const START = Date.parse('2026-01-05T10:00:00.000Z');
const ring = (...kids: string[]) => new Ring(kids.at(-1)!, new Map(kids.map((kid) => [kid, Buffer.alloc(32, kid)])));

/** The dependencies of authentication, with a clock that the test sets. */
const world = async (keys: KeyRing = ring('k1'), environment: 'sandbox' | 'production' = 'sandbox') => {
  const time = { ms: START };
  const clock: Clock = { ...systemClock, realNow: () => time.ms };
  const store: EventStore = memoryEventStore();
  const directory = new MemoryDirectory();
  let seen: Parameters<EventStore['readAll']>[0] = null;
  const administration = new Administration({
    store,
    clock,
    ids: systemIds(() => clock.now()),
    keys,
    personal: memoryPersonalKeys(),
    environment,
    cardInTextCheck: true,
    actor: { type: 'operator', id: 'spec' },
  });
  const project = async () => {
    for await (const events of store.readAll(seen)) {
      directory.apply(events);
      seen = events.at(-1)!.position;
    }
  };
  const deps: AuthenticationDeps = { directory, keys, tokens: new AccessTokens(keys, environment, clock), environment };
  const { accountId } = (await administration.createAccount('City')).state;
  const { apiKey, keyId } = await administration.issueKey(accountId);
  await project();
  return { time, clock, administration, directory, project, deps, keys, accountId, apiKey, keyId };
};
type World = Awaited<ReturnType<typeof world>>;

let w: World;
beforeEach(async () => {
  w = await world();
});

const refused = async (attempt: Promise<unknown>): Promise<AuthenticationError> => {
  const error = await attempt.then(
    () => null,
    (thrown: unknown) => thrown,
  );
  expect(error).toBeInstanceOf(AuthenticationError);
  return error as AuthenticationError;
};
const statusOf = async (...lines: string[]) => (await refused(authenticate(lines, w.deps))).status;

describe('API keys (C51)', () => {
  test('read pc_<test|live>_<16 base32>_<43 base62>', () => {
    expect(w.apiKey).toMatch(/^pc_test_[0-9A-HJKMNP-TV-Z]{16}_[0-9A-Za-z]{43}$/);
    expect(parseApiKey(w.apiKey)).toEqual({ environment: 'test', lookupId: w.apiKey.slice(8, 24), secret: w.apiKey.slice(25) });
  });
  test('a secret holds all of 256 bits', () => {
    expect(newSecret(() => Buffer.alloc(32, 0))).toBe('0'.repeat(43));
    const highest = newSecret(() => Buffer.alloc(32, 255));
    expect(highest).toHaveLength(43);
    const value = [...highest].reduce(
      (sum, digit) => sum * 62n + BigInt('0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz'.indexOf(digit)),
      0n,
    );
    expect(value).toBe(2n ** 256n - 1n);
  });
  test('the record holds a keyed hash and never the secret', () => {
    const { apiKey, record } = newApiKey('id', 'live', w.keys);
    const { secret } = parseApiKey(apiKey)!;
    expect(JSON.stringify(record)).not.toContain(secret);
    expect(record.secretHash).toBe(createHmac('sha256', w.keys.derive('api-key')).update(secret).digest('base64'));
    expect(record).toMatchObject({ environment: 'live', kid: 'k1' });
  });
  test.each(['ApiKey ', 'apikey ', 'APIKEY  ', ''])('are accepted as "%s<key>"', async (scheme) =>
    expect(await authenticate([`${scheme}${w.apiKey}`], w.deps)).toEqual({ accountId: w.accountId, via: 'api_key', keyId: w.keyId }),
  );
  test('no Authorization header: 401 (C50)', async () => expect(await statusOf()).toBe(401));
  test('two Authorization lines, even the same: 401 (C14)', async () => expect(await statusOf(`ApiKey ${w.apiKey}`, `ApiKey ${w.apiKey}`)).toBe(401));
  test.each(['Bearer', 'bearer'])('%s pc_… : 401, and the message says how to send an API key (C50)', async (scheme) => {
    const refusal = await refused(authenticate([`${scheme} ${w.apiKey}`], w.deps));
    expect([refusal.status, refusal.message]).toEqual([401, 'This is an API key, not an access token. Send it as "Authorization: ApiKey pc_…".']);
  });
  test('malformed: 401', async () => {
    const bad = [
      '',
      ' ',
      'pc_',
      'ApiKey',
      'ApiKey ',
      `Basic ${w.apiKey}`,
      `ApiKey ${w.apiKey} x`,
      `ApiKey ${w.apiKey}x`,
      w.apiKey.slice(0, -1),
      w.apiKey.toLowerCase(),
      w.apiKey.replace('pc_test_', 'pc_prod_'),
      `ApiKey: ${w.apiKey}`,
      `"${w.apiKey}"`,
    ];
    for (const line of bad) expect([line, await statusOf(line)]).toEqual([line, 401]);
  });
  test('an unknown look-up id and a wrong secret get the same 401', async () => {
    const other = newApiKey('id', 'test', w.keys).apiKey;
    const wrong = `${w.apiKey.slice(0, 25)}${newSecret()}`;
    const [unknown, mismatch] = [await refused(authenticate([other], w.deps)), await refused(authenticate([wrong], w.deps))];
    expect(unknown.status).toBe(401);
    expect(mismatch).toEqual(unknown);
  });
  test('an unknown key is hashed and compared like a known one', async () => {
    let macs = 0;
    const keys = Object.create(w.keys, { mac: { value: (...args: Parameters<KeyRing['mac']>) => ((macs += 1), w.keys.mac(...args)) } }) as KeyRing;
    const other = newApiKey('id', 'test', w.keys).apiKey;
    await refused(authenticate([other], { ...w.deps, keys }));
    expect(macs).toBe(1);
  });
  test('rotated: 401 on the next request, the new one is good', async () => {
    const { apiKey } = await w.administration.rotateKeys(w.accountId);
    await w.project();
    expect(await statusOf(w.apiKey)).toBe(401);
    expect((await authenticate([apiKey], w.deps)).accountId).toBe(w.accountId);
  });
  test('of a deactivated account: 403; reactivated: good again', async () => {
    await w.administration.deactivateAccount(w.accountId);
    await w.project();
    expect(await statusOf(w.apiKey)).toBe(403);
    await w.administration.reactivateAccount(w.accountId);
    await w.project();
    expect((await authenticate([w.apiKey], w.deps)).accountId).toBe(w.accountId);
  });
  test('a wrong key of a deactivated account is 401: only its holder learns that the account is deactivated', async () => {
    await w.administration.deactivateAccount(w.accountId);
    await w.project();
    expect(await statusOf(`${w.apiKey.slice(0, 25)}${newSecret()}`)).toBe(401);
  });
  test('of one environment never work in the other', async () => {
    expect(await statusOf(w.apiKey.replace('pc_test_', 'pc_live_'))).toBe(401);
    const production = { ...w.deps, environment: 'production' as const };
    expect((await refused(authenticate([w.apiKey], production))).status).toBe(401);
    // Production refuses the key even if it has the sandbox's rows and the text of the key begins with `pc_live_`.
    expect((await refused(authenticate([w.apiKey.replace('pc_test_', 'pc_live_')], production))).status).toBe(401);
  });
  test('outlive a rotation of the master key, and end when their master key leaves the ring', async () => {
    const both = new Ring('k2', new Map([['k1', Buffer.alloc(32, 'k1')], ['k2', Buffer.alloc(32, 'k2')]])); // prettier-ignore
    expect((await authenticate([w.apiKey], { ...w.deps, keys: both })).accountId).toBe(w.accountId);
    expect((await refused(authenticate([w.apiKey], { ...w.deps, keys: ring('k2') }))).status).toBe(401);
  });
  test('that were accepted are reported for their last use, others are not', async () => {
    const used: string[] = [];
    const deps = { ...w.deps, keyUse: { used: (keyId: string) => void used.push(keyId) } };
    const { accessToken } = await exchange([w.apiKey], deps);
    await authenticate([`Bearer ${accessToken}`], deps);
    await refused(authenticate([`${w.apiKey.slice(0, 25)}${newSecret()}`], deps));
    expect(used).toEqual([w.keyId]);
  });
  test('refusals never repeat the request', async () => {
    for (const line of [w.apiKey.replace('pc_test_', 'pc_live_'), `Bearer ${w.apiKey}`, `Basic ${w.apiKey}`])
      expect((await refused(authenticate([line], w.deps))).message).not.toContain(w.apiKey.slice(25));
  });
});

describe('POST /auth/token (C50)', () => {
  test('exchanges an API key for a token of one hour', async () => {
    const grant = await exchange([`ApiKey ${w.apiKey}`], w.deps);
    expect(grant).toEqual({ accessToken: expect.any(String), tokenType: 'Bearer', expiresIn: 3600, expiresAt: '2026-01-05T11:00:00.000Z' });
    expect(await authenticate([`Bearer ${grant.accessToken}`], w.deps)).toEqual({ accountId: w.accountId, via: 'access_token' });
    expect(await authenticate([`bearer ${grant.accessToken}`], w.deps)).toEqual({ accountId: w.accountId, via: 'access_token' });
  });
  test('an access token cannot obtain another: 403', async () => {
    const { accessToken } = await exchange([w.apiKey], w.deps);
    expect((await refused(exchange([`Bearer ${accessToken}`], w.deps))).status).toBe(403);
  });
  test('a bad or expired token is 401, not 403', async () => {
    const { accessToken } = await exchange([w.apiKey], w.deps);
    expect((await refused(exchange([`Bearer ${accessToken}x`], w.deps))).status).toBe(401);
    w.time.ms += 3_600_000;
    expect((await refused(exchange([`Bearer ${accessToken}`], w.deps))).status).toBe(401);
  });
  test('missing, unknown and rotated keys: 401; deactivated account: 403', async () => {
    expect((await refused(exchange([], w.deps))).status).toBe(401);
    expect((await refused(exchange([newApiKey('id', 'test', w.keys).apiKey], w.deps))).status).toBe(401);
    await w.administration.rotateKeys(w.accountId);
    await w.project();
    expect((await refused(exchange([w.apiKey], w.deps))).status).toBe(401);
    const { apiKey } = await w.administration.issueKey(w.accountId);
    await w.administration.deactivateAccount(w.accountId);
    await w.project();
    expect((await refused(exchange([apiKey], w.deps))).status).toBe(403);
  });
});

describe('access tokens (C52)', () => {
  const PREFIX = Buffer.from('302e020100300506032b657004220420', 'hex');
  const privateKeyOf = (keys: KeyRing, kid: string) =>
    createPrivateKey({ key: Buffer.concat([PREFIX, keys.derive('access-token', kid)]), format: 'der', type: 'pkcs8' });
  const now = () => Math.floor(w.time.ms / 1_000);
  const encode = (value: unknown) => Buffer.from(JSON.stringify(value)).toString('base64url');

  /** A token with changed claims and header, signed with the key `signWith`. `undefined` removes a field. */
  const forge = async (claims: Record<string, unknown> = {}, header: Record<string, unknown> = {}, keys: KeyRing = w.keys, signWith = 'k1') => {
    const payload = { dea: 0, iss: 'payfold:sandbox', aud: 'payfold:partner-v1', sub: w.accountId, iat: now(), exp: now() + 3_600, ...claims };
    const { sign } = await import('node:crypto');
    const input = `${encode({ alg: 'EdDSA', typ: 'at+jwt', kid: 'k1', ...header })}.${encode(payload)}`;
    return `${input}.${sign(null, Buffer.from(input), privateKeyOf(keys, signWith)).toString('base64url')}`;
  };
  const good = async (token: string) =>
    expect(await authenticate([`Bearer ${token}`], w.deps)).toEqual({ accountId: w.accountId, via: 'access_token' });
  const bad = async (token: string) => expect([token, await statusOf(`Bearer ${token}`)]).toEqual([token, 401]);

  test('these specs forge tokens of the same form as the service issues', async () => {
    await good(await forge());
    expect((await exchange([w.apiKey], w.deps)).accessToken).toBe(await forge());
  });
  test('are good until, not at, their last second, with no tolerance', async () => {
    const token = await forge();
    w.time.ms = START + 3_599_999;
    await good(token);
    w.time.ms = START + 3_600_000;
    await bad(token);
  });
  test('iat and nbf may be 5 seconds ahead, for the clocks of replicas', async () => {
    await good(await forge({ iat: now() + 5, exp: now() + 3_605 }));
    await bad(await forge({ iat: now() + 6, exp: now() + 3_606 }));
    await good(await forge({ nbf: now() + 5 }));
    await bad(await forge({ nbf: now() + 6 }));
    await bad(await forge({ nbf: 'soon' }));
  });
  test('exp is iat + 3600, exactly', async () => {
    for (const exp of [now() + 3_599, now() + 3_601, now() + 86_400, String(now() + 3_600), undefined]) await bad(await forge({ exp }));
    await bad(await forge({ iat: undefined }));
    await bad(await forge({ iat: now() + 0.5, exp: now() + 3_600.5 }));
  });
  test('issuer and audience are exact', async () => {
    for (const iss of ['payfold:production', 'payfold', '', null, undefined, ['payfold:sandbox']]) await bad(await forge({ iss }));
    for (const aud of ['payfold:payer', 'payfold:partner-v', '', undefined, ['payfold:partner-v1'], ['payfold:partner-v1', 'x']])
      await bad(await forge({ aud }));
  });
  test('the subject is an account that exists', async () => {
    await bad(await forge({ sub: '018f0000-0000-7000-8000-00000000dead' }));
    for (const sub of ['me', '', undefined, 1]) await bad(await forge({ sub }));
  });
  test('typ is at+jwt', async () => {
    for (const typ of ['JWT', 'AT+JWT', 'application/at+jwt', undefined]) await bad(await forge({}, { typ }));
  });
  test('kid is in the ring and names the key that signed', async () => {
    for (const kid of ['k2', '', undefined, '__proto__', 1, null]) await bad(await forge({}, { kid }));
    const both = ring('k1', 'k2');
    w.deps = { ...w.deps, tokens: new AccessTokens(both, 'sandbox', w.clock) };
    await good(await forge({}, {}, both));
    await good(await forge({}, { kid: 'k2' }, both, 'k2'));
    await bad(await forge({}, { kid: 'k2' }, both, 'k1'));
  });
  test('rotation of the signing key: verify-only first, then signing, and gone when the old key leaves the ring', async () => {
    const { accessToken } = await exchange([w.apiKey], w.deps);
    const tokensOf = (...kids: string[]) => new AccessTokens(ring(...kids), 'sandbox', w.clock);
    expect(await tokensOf('k1', 'k2').verify(accessToken)).toEqual({ accountId: w.accountId, deactivations: 0 });
    await refused(tokensOf('k2').verify(accessToken));
  });
  test('alg none, and no signature', async () => {
    const claims = (await forge()).split('.')[1];
    for (const alg of ['none', 'None', 'NONE', '']) {
      await bad(`${encode({ alg, typ: 'at+jwt', kid: 'k1' })}.${claims}.`);
      await bad(`${encode({ alg, typ: 'at+jwt', kid: 'k1' })}.${claims}`);
      await bad(await forge({}, { alg }));
    }
  });
  test('HS256 keyed with the public key is not fooled', async () => {
    const publicKey = createPublicKey(privateKeyOf(w.keys, 'k1'));
    for (const secret of [publicKey.export({ format: 'pem', type: 'spki' }), publicKey.export({ format: 'der', type: 'spki' })]) {
      const input = `${encode({ alg: 'HS256', typ: 'at+jwt', kid: 'k1' })}.${(await forge()).split('.')[1]}`;
      await bad(`${input}.${createHmac('sha256', secret).update(input).digest('base64url')}`);
    }
  });
  test('a token under another key', async () => {
    const pem = privateKeyOf(ring('k9'), 'k9').export({ format: 'pem', type: 'pkcs8' }) as string;
    const token = await new SignJWT({ sub: w.accountId, iss: 'payfold:sandbox', aud: 'payfold:partner-v1', iat: now(), exp: now() + 3_600 })
      .setProtectedHeader({ alg: 'EdDSA', typ: 'at+jwt', kid: 'k1' })
      .sign(await importPKCS8(pem, 'EdDSA'));
    await bad(token);
  });
  test.each(['jku', 'x5u', 'jwk', 'x5c', 'crit', 'b64', 'zip', 'x'])('a header with %s', async (name) =>
    bad(await forge({}, { [name]: name === 'crit' ? ['exp'] : name === 'b64' ? true : 'https://evil.example/keys' })),
  );
  test('truncated, extended, re-dotted and re-spelt', async () => {
    const token = await forge();
    const [header, claims, signature] = token.split('.') as [string, string, string];
    const altered = [
      token.slice(0, -1),
      token.slice(0, -10),
      `${token}A`,
      `${token}=`,
      `${token}.`,
      `.${token}`,
      `${header}.${claims}`,
      `${header}..${claims}.${signature}`,
      `${header}.${claims}..${signature}`,
      `${header}.${claims}.${signature}.${signature}`,
      `..${signature}`,
      '..',
      '...',
      header,
      `${header}.${encode({ sub: w.accountId })}.${signature}`,
      `${claims}.${header}.${signature}`,
      `${header}.${claims}.${signature.slice(0, -1)}${signature.endsWith('A') ? 'B' : 'A'}`,
    ];
    for (const text of altered) await bad(text);
    await bad('eyJhbGciOiJFZERTQSJ9');
    await bad(`${encode('text')}.${claims}.${signature}`);
    await bad(`${encode([1])}.${claims}.${signature}`);
    await bad(`${encode(null)}.${claims}.${signature}`);
  });
  test('stray bits behind the last byte of the signature do not make a second spelling', async () => {
    const token = await forge();
    const alphabet = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_';
    const last = alphabet.indexOf(token.at(-1)!);
    // The signature has 64 bytes. Its last base64url character has four unused bits.
    await bad(`${token.slice(0, -1)}${alphabet[last + 1]!}`);
  });
  test('longer than 2 KB', async () => {
    const token = await forge({ note: 'x'.repeat(1_000) });
    await good(token);
    await bad(await forge({ note: 'x'.repeat(2_000) }));
  });
  test('of a deactivated account: 403 on the next request (Authentication 4)', async () => {
    const token = await forge();
    await good(token);
    await w.administration.deactivateAccount(w.accountId);
    await w.project();
    expect(await statusOf(`Bearer ${token}`)).toBe(403);
  });
  test('of before a deactivation: dead after the account is active again, at every later time; a new one is good', async () => {
    const before = [await forge(), await forge({ dea: undefined }), (await exchange([w.apiKey], w.deps)).accessToken];
    for (const round of [1, 2]) {
      await w.administration.deactivateAccount(w.accountId);
      await w.administration.reactivateAccount(w.accountId);
      await w.project();
      for (const token of before) await bad(token);
      const { accessToken } = await exchange([w.apiKey], w.deps);
      expect(accessToken).toBe(await forge({ dea: round }));
      await good(accessToken);
      before.push(accessToken);
    }
    for (const dea of [3, -1, 0.5, '2', null]) await bad(await forge({ dea }));
  });
  test('outlive a rotation of the API key (Authentication 3)', async () => {
    const { accessToken } = await exchange([w.apiKey], w.deps);
    await w.administration.rotateKeys(w.accountId);
    await w.project();
    await good(accessToken);
  });
  test('of the sandbox are not good in production', async () => {
    const production = { ...w.deps, environment: 'production' as const, tokens: new AccessTokens(w.keys, 'production', w.clock) };
    expect((await refused(authenticate([`Bearer ${await forge()}`], production))).status).toBe(401);
  });
  test('are not accepted under another scheme', async () => {
    const token = await forge();
    for (const line of [token, `ApiKey ${token}`, `Basic ${token}`, `Bearer  `, 'Bearer', `Bearer ${token} ${token}`, `Bearer,${token}`])
      expect(await statusOf(line)).toBe(401);
  });
});
