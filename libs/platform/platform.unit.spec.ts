import { describe, expect, test } from '@jest/globals';
import { randomBytes } from 'node:crypto';
import { AuthenticationError, isUuid, ServiceError } from '#kernel';
import { crockford, createLogger, hashedUuid, KeyRing, maskedLines, newKeyRing, readConfig, systemIds, uuidV7 } from './index.js';
import { errorAnswer, internalErrorAnswer, openAnswer, successAnswer } from './http/envelope.js';
import { headerLines, idempotencyKeyOf, refuseOtherContentTypes } from './http/index.js';

describe('ids', () => {
  test('UUID v7 sorts by its time, and says so in version and variant', () => {
    const times = [0, 1, 1_766_000_000_000, 2 ** 47];
    const drawn = times.map((time) => uuidV7(time));
    expect([...drawn].sort()).toEqual(drawn);
    for (const id of drawn) expect(isUuid(id) && /^.{14}7.{4}[89ab]/.test(id)).toBe(true);
    expect(new Set(Array.from({ length: 1_000 }, () => uuidV7(5))).size).toBe(1_000);
  });
  test('hashed ids: same parts, same id; parts do not run into each other', () => {
    expect(hashedUuid('a', 1, 2n)).toBe(hashedUuid('a', 1, 2n));
    expect(hashedUuid('ab', 'c')).not.toBe(hashedUuid('a', 'bc'));
    expect(isUuid(hashedUuid('x'))).toBe(true);
  });
  test('Crockford base32: bits in order, no letters that look like digits', () => {
    expect(crockford(Uint8Array.from([0xff, 0, 0xff]), 4)).toBe('ZW0F');
    expect(crockford(Uint8Array.from([0, 0, 0]), 4)).toBe('0000');
    expect(crockford(randomBytes(64), 100)).toMatch(/^[0-9A-HJKMNP-TV-Z]{100}$/);
  });
  test('confirmation numbers: XXXX-XXXX-XX, never twice (C10)', () => {
    const ids = systemIds(() => 0);
    const drawn = Array.from({ length: 1_000 }, () => ids.confirmationNumber());
    for (const one of drawn) expect(one).toMatch(/^[0-9A-HJKMNP-TV-Z]{4}-[0-9A-HJKMNP-TV-Z]{4}-[0-9A-HJKMNP-TV-Z]{2}$/);
    expect(new Set(drawn).size).toBe(1_000);
  });
});

describe('keys', () => {
  test('each purpose and each ring has a key of its own', () => {
    const ring = newKeyRing();
    const macs = [ring.mac('card', 'x'), ring.mac('fingerprint', 'x'), newKeyRing().mac('card', 'x'), ring.mac('card', 'y')].map((mac) =>
      mac.toString('hex'),
    );
    expect(new Set(macs).size).toBe(4);
    expect(ring.mac('card', 'x')).toEqual(ring.mac('card', 'x'));
    expect(() => ring.mac('card', 'x', 'unknown')).toThrow(/not in the ring/);
  });
  test('a sealed secret opens in its own place only', () => {
    const ring = newKeyRing();
    const sealed = ring.seal('whsec_x', 'portal-1 secret');
    expect(JSON.stringify(sealed)).not.toContain('whsec');
    expect(ring.open(sealed, 'portal-1 secret')).toBe('whsec_x');
    expect(() => ring.open(sealed, 'portal-2 secret')).toThrow();
    expect(() => newKeyRing().open(sealed, 'portal-1 secret')).toThrow();
    expect(ring.seal('whsec_x', 'portal-1 secret').ciphertext).not.toBe(sealed.ciphertext);
  });
  test('an older key still opens after the ring was rotated', () => {
    const old = randomBytes(32);
    const before = new KeyRing('k1', new Map([['k1', old]]));
    const after = new KeyRing('k2', new Map([['k1', old], ['k2', randomBytes(32)]])); // prettier-ignore
    expect(after.open(before.seal('x', 'y'), 'y')).toBe('x');
    expect(after.mac('card', 'x', 'k1')).toEqual(before.mac('card', 'x'));
  });
});

describe('the Idempotency-Key header (C14)', () => {
  const key = (...values: string[]) => idempotencyKeyOf(values.flatMap((value) => ['Idempotency-Key', value]));
  test('absent is none; any visible ASCII up to 255 is one', () => {
    expect(idempotencyKeyOf(['Host', 'x'])).toBeNull();
    for (const value of ['a', 'INV 2026/1', '"quoted"', '~!@', 'x'.repeat(255)]) expect(key(value)).toBe(value);
  });
  test.each([
    ['empty', ['']],
    ['256 characters', ['x'.repeat(256)]],
    ['not ASCII', ['é']],
    ['a control character', ['a\tb']],
    ['sent twice', ['a', 'a']],
  ])('%s → 400', (_, values) => expect(() => key(...values)).toThrow(ServiceError));
  test('lines are counted in any case of their name, and a value is no name', () => {
    expect(headerLines(['IDEMPOTENCY-KEY', 'a', 'idempotency-key', 'b', 'x', 'idempotency-key'], 'idempotency-key')).toEqual(['a', 'b']);
    expect(() => idempotencyKeyOf(['IDEMPOTENCY-KEY', 'a', 'idempotency-key', 'a'])).toThrow(/more than once/);
  });
});

describe('bodies are JSON or empty (C65)', () => {
  const refuse = (type: string | undefined, encoding: string | undefined, body: string) => () =>
    refuseOtherContentTypes(type, encoding, Buffer.from(body));
  test.each([
    ['application/json', undefined, '{}'],
    ['application/json; charset=utf-8', 'identity', '{}'],
    ['Application/JSON', undefined, '{}'],
    [undefined, undefined, ''],
    ['text/plain', undefined, ''],
  ])('%p, %p: accepted', (type, encoding, body) => expect(refuse(type, encoding, body)).not.toThrow());
  test.each([
    [undefined, undefined, '{}'],
    ['text/plain', undefined, '{}'],
    ['application/jsonp', undefined, '{}'],
    ['application/json', 'gzip', '{}'],
    ['application/json', 'gzip', ''],
  ])('%p, %p: refused', (type, encoding, body) => expect(refuse(type, encoding, body)).toThrow(ServiceError));
});

describe('envelopes (C1)', () => {
  test('success, error, and nothing of an internal fault', () => {
    expect(successAnswer({ a: 1 })).toEqual({ status: 200, body: '{"success":true,"data":{"a":1}}' });
    const refused = errorAnswer(new ServiceError('VOID_FAILED', 'no', { retryable: false, suggestedAction: 'refund' }));
    expect(JSON.parse(refused.body)).toEqual({
      success: false,
      message: 'no',
      details: { code: 'VOID_FAILED', retryable: false, suggestedAction: 'refund' },
    });
    expect(refused.status).toBe(422);
    expect(JSON.parse(internalErrorAnswer().body)).toEqual({
      success: false,
      message: 'An unexpected error occurred.',
      details: { code: 'INTERNAL_ERROR' },
    });
  });
  test('a refusal of authentication has a message and no details', () => {
    const refused = errorAnswer(new AuthenticationError(403, 'inactive'));
    expect(refused).toEqual({ status: 403, body: '{"success":false,"message":"inactive"}' });
  });
  test('seconds for Retry-After are there only where the refusal names them', () => {
    expect(errorAnswer(new ServiceError('IDEMPOTENCY_IN_PROGRESS', 'wait', {}, { retryAfterSeconds: 3 })).retryAfterSeconds).toBe(3);
    expect(errorAnswer(new ServiceError('INVALID_STATE', 'no'))).not.toHaveProperty('retryAfterSeconds');
  });
  test('an answer opens to its data, or to its refusal', () => {
    expect(openAnswer(successAnswer({ a: 1, b: null }))).toEqual({ a: 1, b: null });
    const refusal = new ServiceError('VOID_FAILED', 'no', { retryable: false, suggestedAction: 'refund' });
    let opened: unknown;
    try {
      openAnswer(errorAnswer(refusal));
    } catch (error) {
      opened = error;
    }
    expect(opened).toEqual(refusal);
    expect((opened as ServiceError).details).toEqual(refusal.details);
  });
});

describe('the log', () => {
  const write = (work: (log: ReturnType<typeof createLogger>) => void) => {
    const lines: string[] = [];
    work(createLogger('debug', 'spec', { write: (line) => lines.push(line) }));
    return lines.join('');
  };
  test('errors are name, message, code and frames, without their other properties', () => {
    const error = Object.assign(new Error('x'), { code: 'E1', body: 'the whole request', cause: new Error('inner') });
    const line = write((log) => log.error({ err: error }, 'failed'));
    expect(JSON.parse(line)).toMatchObject({ msg: 'failed', err: { name: 'Error', message: 'x', code: 'E1', cause: 'Error: inner' } });
    expect(line).not.toContain('the whole request');
  });
  test('a card number that slipped through is masked, and counted', () => {
    const before = maskedLines.count;
    expect(
      write((log) => log.info({ a: { cvv: '987', cardNumber: 'x' }, authorization: 'ApiKey pc_x' }, 'paid with 4242 4242 4242 4242')),
    ).not.toMatch(/4242|987|pc_x/);
    expect(maskedLines.count).toBe(before + 1);
  });
});

test('signed heads have one folder for all processes, wherever a process was started', () => {
  expect(readConfig({ DATA_DIR: '/data' }).headsDir).toBe('/data/heads');
  expect(readConfig({ DATA_DIR: '/data', HEADS_DIR: '/evidence' }).headsDir).toBe('/evidence');
  expect(() => readConfig({ HEADS_DIR: 'evidence' })).toThrow('HEADS_DIR=evidence: must be an absolute path');
  const faults = (env: Readonly<Record<string, string | undefined>>) => {
    try {
      readConfig({ ENVIRONMENT: 'production', ...env });
    } catch (error) {
      return (error as Error).message;
    }
    return '';
  };
  for (const env of [{}, { DATA_DIR: 'data' }]) expect(faults(env)).toContain('HEADS_DIR: required in production if DATA_DIR is no absolute path');
  for (const env of [{ DATA_DIR: '/data' }, { DATA_DIR: 'data', HEADS_DIR: '/evidence' }]) expect(faults(env)).not.toContain('HEADS_DIR');
});

test('each alert has a setting for its threshold', () => {
  expect(readConfig({}).alerts).toEqual({
    exceptions_old: 7,
    in_transit_old: 5,
    dispute_due: 5,
    unknown_outcome: 900,
    seal: 60,
    erasure_pending: 60,
  });
  const set = { ALERT_EXCEPTIONS_OLD_DAYS: '366', ALERT_SEAL_SECONDS: '86400' };
  expect(readConfig(set).alerts).toMatchObject({ exceptions_old: 366, seal: 86_400 });
  for (const value of ['0', '367', '1.5', 'x'])
    expect(() => readConfig({ ALERT_DISPUTE_DUE_DAYS: value })).toThrow(`ALERT_DISPUTE_DUE_DAYS=${value}: must be a whole number of days, 1 to 366`);
});

test('connections are limited by address, unless a proxy is in front or the operator decides', () => {
  const limit = (env: Record<string, string>) => readConfig(env).connectionsPerAddress;
  expect([limit({}), limit({ PROXY_HOPS: '1' }), limit({ BEHIND_TLS: 'on' })]).toEqual([512, null, null]);
  expect([limit({ CONNECTIONS_PER_ADDRESS: '0' }), limit({ CONNECTIONS_PER_ADDRESS: '64', PROXY_HOPS: '1' })]).toEqual([null, 64]);
  expect(() => readConfig({ CONNECTIONS_PER_ADDRESS: '4097' })).toThrow(/CONNECTIONS_PER_ADDRESS=4097: must be a whole number, 0 to 4096/);
});
