/**
 * The command line as a child process: accounts, keys, portals, cases. The tests check each change through the directory and through authentication.
 * They run no projection: a change must be in force when the command returns.
 */
import { execFile, spawn } from 'node:child_process';
import { copyFile, mkdtemp, readdir, readFile, rm, stat, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { AccessTokens, authenticate, directoryModel, exchange, openAcceptedSecrets, postgresDirectory } from '#accounts';
import { AuthenticationError, systemClock } from '#kernel';
import { createPool, type Pool, readKeyRing } from '#platform';
import { searchPathOf } from '#eventstore';
import { READ_MODELS } from '../../apps/services.js';
import { freshDatabase } from '../support/postgres.js';

const LAUNCHER = new URL('../../apps/operator/payfold.mjs', import.meta.url).pathname;
const NOBODY = '018f0000-0000-7000-8000-00000000dead';
const UUID = /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/;

let dataDir: string;
let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;

interface Ran {
  readonly code: number;
  readonly stdout: string;
  readonly stderr: string;
}

/** Runs `payfold` with an empty standard input and only this environment. */
const payfold = (args: readonly string[], env: Readonly<Record<string, string>> = { DATABASE_URL: database.url, DATA_DIR: dataDir }): Promise<Ran> =>
  new Promise((done) => {
    const child = execFile(
      process.execPath,
      [LAUNCHER, ...args],
      { env: { PATH: process.env.PATH, HOME: process.env.HOME, ...env }, cwd: tmpdir(), timeout: 60_000 },
      (error, stdout, stderr) => done({ code: error ? Number(error.code ?? 99) : 0, stdout, stderr }),
    );
    child.stdin?.end();
  });

/** Parses the output, which must be one JSON value on one line. */
const valueOf = <T>({ stdout }: Ran): T => {
  expect(stdout).toMatch(/^[^\n]+\n$/);
  return JSON.parse(stdout) as T;
};
const json = async <T = Record<string, unknown>>(...args: string[]): Promise<T> => {
  const ran = await payfold([...args, '--json']);
  expect([ran.code, ran.stderr]).toEqual([0, '']);
  return valueOf<T>(ran);
};
interface Envelope {
  readonly success: boolean;
  readonly message: string;
  readonly details: { readonly code: string };
}
/** Runs a command that must fail with the exit code, an error envelope on stdout, and one line on stderr. */
const refused = async (code: 1 | 2, ...args: string[]): Promise<Envelope> => {
  const ran = await payfold([...args, '--json']);
  expect([ran.code, ran.stderr]).toEqual([code, expect.stringMatching(/^error: [^\n]+\n$/)]);
  const envelope = valueOf<Envelope>(ran);
  expect(envelope.success).toBe(false);
  return envelope;
};

const authentication = () => {
  const keys = readKeyRing(join(dataDir, 'master.key'));
  return { directory: postgresDirectory(pool), keys, environment: 'sandbox', tokens: new AccessTokens(keys, 'sandbox', systemClock) } as const;
};
const statusOf = (line: string) =>
  authenticate([line], authentication()).then(
    () => 200,
    (error: unknown) => (error as AuthenticationError).status,
  );
const anAccount = async (name = 'City') => (await json<{ accountId: string }>('accounts', 'create', '--name', name)).accountId;
const aPortal = async (...more: string[]) => (await json<{ portalId: string }>('portals', 'create', '--name', 'Water', ...more)).portalId;

beforeAll(async () => {
  dataDir = await mkdtemp(join(tmpdir(), 'payfold-operator-'));
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'spec', max: 2, searchPath: searchPathOf(READ_MODELS) });
});
afterAll(async () => {
  await pool.end();
  await database.drop();
  await rm(dataDir, { recursive: true, force: true });
});

describe('paying the agency', () => {
  test('more than the funded part needs --advance; a reference counts once; --reverse takes the payment back', async () => {
    const portalId = await aPortal('--account', await anAccount());
    const by = ['--portal', portalId, '--by', 'Dana Scott'];
    const pay = ['ledger', 'remit', ...by, '--amount-cents', '12500', '--reference', 'WIRE-7'];
    expect(await refused(1, ...pay)).toMatchObject({
      message: expect.stringContaining('more than the funded part: 0 payable, of it 0 settled, of it 0 funded'),
      details: { code: 'INVALID_STATE', payableCents: 0, settledCents: 0, fundedCents: 0 },
    });
    const paid = await json<{ remittanceId: string }>(...pay, '--advance');
    expect(paid).toEqual({
      remittanceId: expect.stringMatching(UUID),
      portalId,
      amountCents: 12_500,
      reference: 'WIRE-7',
      on: new Date().toISOString().slice(0, 10),
      advance: true,
      by: 'Dana Scott',
      payableCents: 0,
      settledCents: 0,
      fundedCents: 0,
    });
    expect((await refused(1, ...pay, '--advance')).message).toBe(`Remittance ${paid.remittanceId} of 12500 cents has the reference WIRE-7 already.`);
    const payable = async () => (await payfold(['audit', 'export', 'payable', '--format', 'ndjson'])).stdout;
    expect(await payable()).toContain(`"funded_cents":0,"remitted_cents":-12500,"adjusted_cents":0,"closing_cents":-12500`);
    const back = ['ledger', 'remit', ...by, '--reverse', paid.remittanceId, '--reason', 'account closed'];
    expect(await json(...back)).toMatchObject({ remittanceId: paid.remittanceId, amountCents: 12_500, reason: 'account closed' });
    expect((await refused(1, ...back)).message).toBe(`Remittance ${paid.remittanceId} was taken back already.`);
    expect(await payable()).toContain(`"remitted_cents":0,"adjusted_cents":0,"closing_cents":0`);
  });
  test('wrong options, an unknown portal, a day to come: refused, and nothing is recorded', async () => {
    const portalId = await aPortal('--account', await anAccount());
    const pay = (portal: string, ...more: string[]) => ['ledger', 'remit', '--portal', portal, '--by', 'Dana', ...more];
    const paid = ['--amount-cents', '1', '--reference', 'W', '--advance'];
    await refused(2, ...pay(portalId, '--amount-cents', '1'));
    await refused(2, ...pay(portalId, '--reverse', NOBODY));
    await refused(2, ...pay(portalId, ...paid, '--on', '2026-02-30'));
    expect((await refused(1, ...pay(NOBODY, ...paid))).details.code).toBe('PORTAL_ACCESS_DENIED');
    expect((await refused(1, ...pay(portalId, ...paid, '--on', '2099-01-01'))).message).toBe('2099-01-01 lies in the future.');
    expect((await refused(1, ...pay(portalId, '--amount-cents', '0', '--reference', 'W'))).details.code).toBe('VALIDATION_ERROR');
    expect((await refused(1, ...pay(portalId, '--reverse', NOBODY, '--reason', 'r'))).message).toBe(`The portal has no remittance ${NOBODY}.`);
    const { rows } = await pool.query('select from es.events where stream_id = $1', [`remittance-${portalId}`]);
    expect(rows).toEqual([]);
  });
  test('audit export --columns says what each column of a report means; audit pack refuses a period that is not over', async () => {
    expect(await json('audit', 'export', '--columns', 'payable')).toContainEqual({
      column: 'remitted_cents',
      meaning: 'paid by us to the agency, negative; taken back, positive (R20)',
    });
    await refused(2, 'audit', 'export');
    await refused(2, 'audit', 'export', 'payable', '--columns', 'payable');
    const out = join(dataDir, 'pack-of-the-future');
    const pack = await refused(1, 'audit', 'pack', '--from', '2026-01-01', '--to', '2099-01-01', '--out', out);
    expect(pack.message).toBe('--to 2099-01-01T00:00:00.000Z lies in the future; the period is not over.');
    await expect(stat(out)).rejects.toThrow('ENOENT');
  });
});

describe('payfold accounts', () => {
  test('create, list, deactivate, reactivate: {accountId, name, status}', async () => {
    const created = await json('accounts', 'create', '--name', 'City of Springfield');
    expect(created).toEqual({ accountId: expect.stringMatching(UUID), name: 'City of Springfield', status: 'active' });
    const accountId = created.accountId as string;
    expect(await json<unknown[]>('accounts', 'list')).toContainEqual(created);
    expect(await json('accounts', 'deactivate', accountId, '--yes')).toEqual({ ...created, status: 'deactivated' });
    expect(await json('accounts', 'deactivate', accountId, '--yes')).toEqual({ ...created, status: 'deactivated' });
    expect((await postgresDirectory(pool).account(accountId))?.status).toBe('deactivated');
    expect(await json('accounts', 'reactivate', accountId.toUpperCase())).toEqual(created);
    expect((await postgresDirectory(pool).account(accountId))?.status).toBe('active');
  });
  test('for people: text, no JSON', async () => {
    const ran = await payfold(['accounts', 'create', '--name', 'Shelbyville']);
    expect(ran).toMatchObject({ code: 0, stderr: '' });
    expect(ran.stdout).toMatch(/^account {2}[0-9a-f-]{36}\nname {5}Shelbyville\nstatus {3}active\n$/);
    expect((await payfold(['accounts', 'list'])).stdout).toMatch(/^ACCOUNT +NAME +STATUS\n/);
  });
  test('an unknown account is refused with the error envelope, exit 1', async () => {
    for (const args of [
      ['deactivate', NOBODY, '--yes'],
      ['reactivate', NOBODY],
    ])
      // prettier-ignore
      expect(await refused(1, 'accounts', ...args)).toMatchObject({ message: 'There is no such account.', details: { code: 'VALIDATION_ERROR' } });
  });
  test('a name that breaks the rules is refused, exit 1', async () => {
    expect((await refused(1, 'accounts', 'create', '--name', ' ')).message).toBe('--name must have 1 to 200 characters.');
    const { message } = await refused(1, 'accounts', 'create', '--name', '4242 4242 4242 4242');
    expect(message).toBe('name seems to hold a card number.');
  });
});

describe('payfold keys (Authentication 3, 4, 6; C50, C51)', () => {
  test('issue: {keyId, apiKey}, good when the command returns', async () => {
    const accountId = await anAccount();
    const { keyId, apiKey, ...rest } = await json<{ keyId: string; apiKey: string }>('keys', 'issue', '--account', accountId);
    expect(rest).toEqual({});
    expect(apiKey).toMatch(/^pc_test_[0-9A-Z]{16}_[0-9A-Za-z]{43}$/);
    expect(await authenticate([`ApiKey ${apiKey}`], authentication())).toEqual({ accountId, via: 'api_key', keyId });
  });
  test('rotate: old keys stop at once, tokens already issued live on, a deactivated account blocks both, and its tokens stay dead', async () => {
    const accountId = await anAccount();
    const old = await json<{ apiKey: string }>('keys', 'issue', '--account', accountId);
    const { accessToken } = await exchange([old.apiKey], authentication());
    const fresh = await json<{ keyId: string; apiKey: string }>('keys', 'rotate', '--account', accountId, '--yes');
    expect([await statusOf(old.apiKey), await statusOf(fresh.apiKey), await statusOf(`Bearer ${accessToken}`)]).toEqual([401, 200, 200]);
    const listed = await json<{ keyId: string; status: string }[]>('keys', 'list', '--account', accountId);
    expect(listed.map(({ status }) => status)).toEqual(['revoked', 'active']);
    expect(listed[1]!.keyId).toBe(fresh.keyId);
    expect(JSON.stringify(listed)).not.toContain(fresh.apiKey);
    await json('accounts', 'deactivate', accountId, '--yes');
    expect([await statusOf(fresh.apiKey), await statusOf(`Bearer ${accessToken}`)]).toEqual([403, 403]);
    await json('accounts', 'reactivate', accountId);
    expect([await statusOf(fresh.apiKey), await statusOf(`Bearer ${accessToken}`)]).toEqual([200, 401]);
  });
  test('issue, then revoke: a rotation without a gap; only the named key stops', async () => {
    const accountId = await anAccount();
    const old = await json<{ keyId: string; apiKey: string }>('keys', 'issue', '--account', accountId);
    const fresh = await json<{ keyId: string; apiKey: string }>('keys', 'issue', '--account', accountId);
    const { accessToken } = await exchange([old.apiKey], authentication());
    expect([await statusOf(old.apiKey), await statusOf(fresh.apiKey)]).toEqual([200, 200]);
    expect(await json('keys', 'revoke', old.keyId, '--yes')).toEqual({ keyId: old.keyId, accountId, status: 'revoked' });
    expect([await statusOf(old.apiKey), await statusOf(fresh.apiKey), await statusOf(`Bearer ${accessToken}`)]).toEqual([401, 200, 200]);
    // A second time changes nothing. A leaked key is named by its beginning, without its account.
    expect(await json('keys', 'revoke', old.keyId, '--yes')).toEqual({ keyId: old.keyId, accountId, status: 'revoked' });
    const prefix = fresh.apiKey.split('_').slice(0, 3).join('_');
    expect(await json('keys', 'revoke', prefix, '--yes')).toEqual({ keyId: fresh.keyId, accountId, status: 'revoked' });
    expect(await statusOf(fresh.apiKey)).toBe(401);
    for (const unknown of [NOBODY, 'pc_test_0000000000000000', 'key'])
      expect(await refused(1, 'keys', 'revoke', unknown, '--yes')).toMatchObject({ message: 'There is no such key.' });
  });
  test('of an unknown account: exit 1', async () => {
    for (const verb of ['issue', 'rotate', 'list'])
      expect((await refused(1, 'keys', verb, '--account', NOBODY, '--yes')).details.code).toBe('VALIDATION_ERROR');
  });
});

describe('payfold portals (C32, C46, C47, C53, C66, C70)', () => {
  test('create with its defaults: {portalId, signingSecret}', async () => {
    const accountId = await anAccount();
    const made = await json<{ portalId: string; signingSecret: string }>('portals', 'create', '--account', accountId, '--name', 'Water');
    expect(made).toEqual({ portalId: expect.stringMatching(UUID), signingSecret: expect.stringMatching(/^psec_test_[0-9A-Za-z]{43}$/) });
    const shown = await json('portals', 'show', made.portalId);
    expect(shown).toEqual({
      portalId: made.portalId,
      name: 'Water',
      ownerAccountId: accountId,
      accounts: [{ accountId, access: 'granted' }],
      gateway: 'simulator',
      fee: { flatCents: 0, percentBps: 0, minCents: 0, maxCents: null, chargeMode: 'separate' },
      feeVersion: 1,
      limits: { card: null, case: null },
      rules: { minCents: null, maxCents: null, brands: null },
      coding: [],
      checkout: { enabled: false, allow: [], requireSignedIntake: false, agencyName: null, colour: null, locale: null },
      secretStaged: false,
    });
    const terms = await postgresDirectory(pool).chargeTerms(accountId, made.portalId, null);
    expect(terms).toMatchObject({ accountStatus: 'active', access: 'granted', portal: { gateway: { gateway: 'simulator' } }, restrictions: [] });
    expect(await json<unknown[]>('portals', 'list')).toContainEqual(shown);
  });
  test('belongs to the first account; further ones are grants; no gateway; a whole fee', async () => {
    const [owner, other] = [await anAccount('A'), await anAccount('B')];
    const fee = '--fee-flat-cents 150 --fee-percent-bps 299 --fee-min-cents 100 --fee-max-cents 5000 --charge-mode combined'.split(' ');
    const portalId = await aPortal('--account', owner, '--account', other, '--gateway', 'none', ...fee);
    expect(await json('portals', 'show', portalId)).toMatchObject({
      ownerAccountId: owner,
      accounts: [{ accountId: owner }, { accountId: other, access: 'granted' }],
      gateway: 'none',
      fee: { flatCents: 150, percentBps: 299, minCents: 100, maxCents: 5000, chargeMode: 'combined' },
    });
    await json('portals', 'set-gateway', portalId, '--gateway', 'simulator');
    expect((await postgresDirectory(pool).portal(portalId))?.gateway?.gateway).toBe('simulator');
  });
  test('set-fee makes a new version of the named parts and keeps the rest', async () => {
    const portalId = await aPortal('--account', await anAccount(), '--fee-flat-cents', '50', '--fee-max-cents', '900');
    expect(await json('portals', 'set-fee', portalId, '--fee-percent-bps', '275', '--fee-max-cents', 'none')).toMatchObject({
      portalId,
      feeVersion: 2,
      fee: { flatCents: 50, percentBps: 275, minCents: 0, maxCents: null, chargeMode: 'separate' },
    });
    expect((await postgresDirectory(pool).portal(portalId))?.feeVersion).toBe(2);
    expect((await refused(1, 'portals', 'set-fee', portalId, '--fee-min-cents', '5', '--fee-max-cents', '4')).message).toBe(
      'maxCents must not be below minCents.',
    );
    expect((await refused(2, 'portals', 'set-fee', portalId)).message).toBe('name at least one part of the fee');
  });
  test('grant and revoke, the owner too; an account that once had access may still read', async () => {
    const [owner, other] = [await anAccount('A'), await anAccount('B')];
    const portalId = await aPortal('--account', owner);
    expect(await postgresDirectory(pool).grant(other, portalId)).toBeNull();
    await json('portals', 'grant', portalId, '--account', other);
    expect(await postgresDirectory(pool).grant(other, portalId)).toBe('granted');
    await json('portals', 'revoke', portalId, '--account', other, '--yes');
    expect(await postgresDirectory(pool).grant(other, portalId)).toBe('revoked');
    expect(await json('portals', 'revoke', portalId, '--account', owner, '--yes')).toMatchObject({
      accounts: [{ access: 'revoked' }, { access: 'revoked' }],
    });
    expect((await refused(1, 'portals', 'revoke', portalId, '--account', NOBODY, '--yes')).details.code).toBe('INVALID_STATE');
    expect((await refused(1, 'portals', 'grant', portalId, '--account', NOBODY)).message).toBe('There is no such account.');
  });
  test('set-limits per scope, and off again', async () => {
    const portalId = await aPortal('--account', await anAccount());
    const card = ['portals', 'set-limits', portalId, '--scope', 'card', '--window-seconds', '600'];
    await json(...card, '--attempts', '5', '--declines', '3', '--block-seconds', '900');
    expect((await postgresDirectory(pool).portal(portalId))?.limits).toEqual({
      card: { attempts: 5, declines: 3, windowSeconds: 600, blockSeconds: 900 },
      case: null,
    });
    expect(await json(...card)).toMatchObject({ limits: { card: null, case: null } });
    expect((await refused(1, ...card, '--block-seconds', '9')).message).toBe('--block-seconds applies to declines of scope card only.');
  });
  test('set-rules: bounds of the amount and an allow-list of brands', async () => {
    const portalId = await aPortal('--account', await anAccount());
    const rules = { minCents: 100, maxCents: 5000, brands: ['visa', 'mastercard'] };
    const args = ['--min-cents', '100', '--max-cents', '5000', '--brands', 'mastercard,Visa'];
    expect(await json('portals', 'set-rules', portalId, ...args)).toMatchObject({ portalId, rules });
    expect((await postgresDirectory(pool).portal(portalId))?.rules).toEqual(rules);
    expect(await json('portals', 'set-rules', portalId, '--brands', 'none')).toMatchObject({ rules: { ...rules, brands: null } });
  });
  test('set-coding: the keys of line metadata for the general ledger, and none again', async () => {
    const portalId = await aPortal('--account', await anAccount());
    expect(await json('portals', 'set-coding', portalId, '--keys', 'fund, gl,fund')).toMatchObject({ portalId, coding: ['fund', 'gl'] });
    expect((await postgresDirectory(pool).portal(portalId))?.coding).toEqual(['fund', 'gl']);
    expect((await payfold(['portals', 'show', portalId])).stdout).toMatch(/coding keys +fund, gl/);
    expect((await refused(1, 'portals', 'set-coding', portalId, '--keys', 'a,b,c,d,e,f')).message).toBe('A portal has at most 5 coding keys.');
    expect((await refused(1, 'portals', 'set-coding', portalId, '--keys', 'general ledger')).details.code).toBe('VALIDATION_ERROR');
    expect(await json('portals', 'set-coding', portalId, '--keys', 'none')).toMatchObject({ coding: [] });
  });
  test('checkout: on with an allow-list and a name, off again with both kept', async () => {
    const portalId = await aPortal('--account', await anAccount());
    const on = [
      '--enable',
      '--allow',
      'https://agency.example/pay/',
      '--allow',
      'https://*.agency.gov',
      '--require-signed-intake',
      '--agency-name',
      'City',
    ];
    const checkout = { enabled: true, allow: ['https://agency.example/pay', 'https://*.agency.gov'], requireSignedIntake: true, agencyName: 'City' };
    expect(await json('portals', 'checkout', portalId, ...on)).toMatchObject({ checkout });
    expect(await json('portals', 'checkout', portalId, '--disable', '--no-require-signed-intake')).toMatchObject({
      checkout: { ...checkout, enabled: false, requireSignedIntake: false },
    });
    expect(await json('portals', 'checkout', portalId, '--colour', '#0B4F6C', '--locale', 'es')).toMatchObject({
      checkout: { enabled: false, agencyName: 'City', colour: '#0b4f6c', locale: 'es' },
    });
    expect(await json('portals', 'checkout', portalId, '--colour', 'none', '--locale', 'none')).toMatchObject({
      checkout: { colour: null, locale: null },
    });
    expect((await refused(1, 'portals', 'checkout', portalId, '--colour', 'blue')).message).toMatch(/^--colour must read #rrggbb/);
    expect((await refused(1, 'portals', 'checkout', portalId, '--enable', '--allow', 'http://agency.example')).message).toMatch(
      /^An allowed address reads/,
    );
  });
  test('checkout: a signing secret is staged, shown once, and takes the place of the first', async () => {
    const portalId = await aPortal('--account', await anAccount());
    const secrets = async () => openAcceptedSecrets(readKeyRing(join(dataDir, 'master.key')), (await postgresDirectory(pool).portal(portalId))!);
    const [first] = await secrets();
    expect((await refused(1, 'portals', 'checkout', portalId, '--activate-secret')).message).toBe('No signing secret is staged.');
    const staged = await json<{ signingSecret: string; secretStaged: boolean }>('portals', 'checkout', portalId, '--enable', '--stage-secret');
    expect(staged).toMatchObject({ secretStaged: true, signingSecret: expect.stringMatching(/^psec_test_\w{43}$/), checkout: { enabled: true } });
    expect(await secrets()).toEqual([first, staged.signingSecret]);
    expect(JSON.stringify(await json('portals', 'show', portalId))).not.toContain('psec_');
    expect(await json('portals', 'checkout', portalId, '--activate-secret')).toMatchObject({ secretStaged: false });
    expect(await secrets()).toEqual([staged.signingSecret]);
  });
  test('checkout: would this address be accepted?', async () => {
    const portalId = await aPortal('--account', await anAccount());
    await json('portals', 'checkout', portalId, '--enable', '--allow', 'https://agency.example/pay');
    const good = 'https://agency.example/pay/done?case=1';
    expect(await json('portals', 'checkout', portalId, '--test-address', good)).toEqual({
      portalId,
      addresses: [{ address: good, accepted: true, entry: 'https://agency.example/pay', reason: null }],
    });
    const evil = 'https://agency.example.evil.com/pay';
    const asked = await payfold(['portals', 'checkout', portalId, '--test-address', good, evil, '--json']);
    expect(asked.code).toBe(1);
    expect(valueOf(asked)).toMatchObject({
      addresses: [{ accepted: true }, { address: evil, accepted: false, reason: "is not on the portal's allow-list" }],
    });
  });
  test('checkout: a command that says nothing, or asks and changes at once, is wrong usage', async () => {
    expect((await refused(2, 'portals', 'checkout', NOBODY)).message).toBe('name at least one setting');
    expect((await refused(2, 'portals', 'checkout', NOBODY, '--enable', '--test-address', 'https://agency.example')).message).toMatch(
      /changes nothing/,
    );
  });
  test('an unknown portal is refused, exit 1', async () => {
    for (const args of [
      ['show', NOBODY],
      ['set-fee', NOBODY, '--fee-flat-cents', '1'],
      ['grant', NOBODY, '--account', await anAccount()],
    ])
      // prettier-ignore
      expect((await refused(1, 'portals', ...args)).details.code).toBe('PORTAL_ACCESS_DENIED');
  });
  test('for people: the whole configuration, without the secret', async () => {
    const accountId = await anAccount();
    const portalId = await aPortal('--account', accountId, '--fee-flat-cents', '50', '--fee-percent-bps', '250');
    const { stdout } = await payfold(['portals', 'show', portalId]);
    expect(stdout).toMatch(/^fee +2\.50 % \+ \$0\.50, separate \(version 1\)$/m);
    expect(stdout).toMatch(new RegExp(`^owner +${accountId}$`, 'm'));
    expect(stdout).not.toMatch(/psec_|ciphertext/);
  });
});

describe('payfold log (C76)', () => {
  const incident = () =>
    pool.query(`insert into store_incident (kind, message, found_by) values ('lost_events', 'it does not hold an event', 'a process')`);

  test('status names the ids, the store, the head, the checkpoints and the marks', async () => {
    await anAccount();
    const status = await json<Record<string, unknown>>('log', 'status');
    const { rows } = await pool.query<{ id: string }>('select id from installation');
    expect(status).toMatchObject({ installationId: rows[0]!.id, installationInLog: rows[0]!.id, generation: 1, incident: null });
    expect(status.store).toMatch(/^DATABASE_URL \(/);
    expect(status.checkpoints).toContainEqual({ name: `directory@${directoryModel.shape}`, position: expect.any(String) });
    // The command that made the account stored its event as a mark, in the database and in a file. Both outlive the process.
    expect((status.marks as { where: string }[]).map(({ where }) => where)).toEqual(
      expect.arrayContaining([expect.stringMatching(/^the acknowledged event of the command on /), expect.stringMatching(/marks\/.*\.json/)]),
    );
    expect(await json('log', 'check')).toMatchObject({ ok: true, listRows: [], storedAnswers: [] });
  });

  test('without an incident there is nothing to resume', async () => {
    expect((await refused(1, 'log', 'resume', '--by', 'Dana', '--reason', 'none')).message).toBe('No incident of the event store is open.');
  });

  test('while one is open, a command that changes something is refused in one line that names payfold log status; resume closes it', async () => {
    await incident();
    const { message } = await refused(1, 'accounts', 'create', '--name', 'Late');
    expect(message).toMatch(/the event store has lost events: it does not hold an event; .* run payfold log status/);
    expect((await refused(1, 'projections', 'rebuild', 'directory')).message).toContain('run payfold log status');
    expect((await refused(1, 'upgrade', 'prepare')).message).toContain('run payfold log status');
    expect(await json('log', 'status')).toMatchObject({ incident: { kind: 'lost_events' } });
    await pool.query(
      `insert into gateway_feed (gateway, merchant_account, feed, next_at, cursor) values ('stripe', 'm', 'settlement', now(), 'po_1')`,
    );
    expect(await json('log', 'resume', '--by', 'Dana', '--reason', 'a wrong address')).toMatchObject({ forgotten: [], abandoned: [] });
    // A batch before this place may have been recorded in the wrong event store only.
    expect((await pool.query(`select from gateway_feed where cursor is not null`)).rows).toEqual([]);
    const { rows } = await pool.query('select closed_by, reason from store_incident');
    expect(rows).toEqual([{ closed_by: 'Dana', reason: 'a wrong address' }]);
    await anAccount('On time');
  });

  test('resume is refused, and says what is lost, while a checkpoint lies beyond the log', async () => {
    await incident();
    await pool.query(`insert into projection_checkpoint (name, position, epoch) values ('a lost one', '00000000000000009999', 1)`);
    const ran = await payfold(['log', 'resume', '--by', 'Dana', '--reason', 'none']);
    expect([ran.code, ran.stderr]).toEqual([1, expect.stringMatching(/does not hold everything that it held[^]*the checkpoint a lost one.*LOST/)]);
    expect((await payfold(['log', 'check'])).code).toBe(1);
    await pool.query(`delete from projection_checkpoint where name = 'a lost one'`);
    await json('log', 'resume', '--by', 'Dana', '--reason', 'none');
  });
});

describe('payfold cases (C70, Errors 2)', () => {
  test('block, hold, allow: {portalId, referenceId, restriction}', async () => {
    const portalId = await aPortal('--account', await anAccount());
    const name = ['--portal', portalId, '--reference', 'CASE 7/2026 é'];
    const found = () => postgresDirectory(pool).restrictedCases(portalId, 'CASE 7/2026 é');
    expect(await json('cases', 'block', ...name, '--reason', 'sold')).toMatchObject({
      portalId,
      referenceId: 'CASE 7/2026 é',
      restriction: 'blocked',
      reason: 'sold',
    });
    // The reason lies in a box of the event, and in no table.
    expect(await found()).toEqual([{ referenceId: 'CASE 7/2026 é', kind: 'blocked', until: null }]);
    expect(await json('cases', 'hold', ...name, '--until', '2999-01-31T12:00:00+02:00')).toMatchObject({
      restriction: 'held',
      until: '2999-01-31T10:00:00.000Z',
    });
    expect(await found()).toEqual([{ referenceId: 'CASE 7/2026 é', kind: 'held', until: '2999-01-31T10:00:00.000Z' }]);
    const other = ['--portal', portalId, '--reference', 'case\u00A07/2026 e\u0301'];
    expect(await json('cases', 'block', ...other)).toMatchObject({ restriction: 'blocked', lookAlikes: ['CASE 7/2026 é'] });
    expect(await found()).toHaveLength(2);
    // One `allow` removes the restrictions of all references that look alike.
    expect(await json('cases', 'allow', ...name)).toMatchObject({ portalId, restriction: 'none', lookAlikes: ['case\u00A07/2026 e\u0301'] });
    expect(await found()).toEqual([]);
  });
  test('impossible input: an end in the past or on no calendar, an end with allow, an unknown portal', async () => {
    const portalId = await aPortal('--account', await anAccount());
    const name = ['--portal', portalId, '--reference', 'c'];
    expect((await refused(1, 'cases', 'hold', ...name, '--until', '2020-01-01')).message).toBe('--until must lie in the future.');
    expect((await refused(2, 'cases', 'hold', ...name, '--until', '2999-02-30')).message).toMatch(/It must be a time like/);
    expect((await refused(2, 'cases', 'allow', ...name, '--until', '2999-01-01')).message).toMatch(/--until does not go with allow/);
    expect((await refused(1, 'cases', 'block', '--portal', NOBODY, '--reference', 'c')).details.code).toBe('PORTAL_ACCESS_DENIED');
  });
});

describe('payfold keyfile', () => {
  const keyFile = (name: string) => join(dataDir, 'keyfile', name);
  // No database listens at this address, and production lacks its settings.
  const production = { ENVIRONMENT: 'production', DATABASE_URL: 'postgres://127.0.0.1:1/none' };
  test('create: mode 600, one random key; an existing file is never changed', async () => {
    const file = keyFile('master.key');
    const made = await json<{ file: string; current: string; keys: { kid: string; current: boolean; check: string }[] }>('keyfile', 'create', file);
    expect(made).toEqual({ file, current: 'k1', keys: [{ kid: 'k1', current: true, check: expect.stringMatching(/^[0-9a-f]{16}$/) }] });
    expect((await stat(file)).mode & 0o777).toBe(0o600);
    const bytes = await readFile(file);
    expect(await refused(1, 'keyfile', 'create', file)).toMatchObject({ message: `${file} exists already; it was not changed.` });
    expect(await readFile(file)).toEqual(bytes);
    expect((await readdir(join(dataDir, 'keyfile'))).sort()).toEqual(['master.key']);
    const other = await json<{ keys: { check: string }[] }>('keyfile', 'create', keyFile('other.key'));
    expect(other.keys[0]!.check).not.toBe(made.keys[0]!.check);
  });
  test('show: ids and checks, no key, the same for a copy; a named file needs no other setting', async () => {
    const { keys } = JSON.parse(await readFile(keyFile('master.key'), 'utf8')) as { keys: Record<string, string> };
    const ring = { current: 'k2', keys: { k1: keys.k1, k2: Buffer.alloc(32, 7).toString('base64') } };
    await writeFile(keyFile('two.key'), JSON.stringify(ring), { mode: 0o600 });
    const shown = await payfold(['keyfile', 'show', keyFile('two.key'), '--json'], production);
    expect(valueOf(shown)).toMatchObject({
      current: 'k2',
      keys: [
        { kid: 'k1', current: false },
        { kid: 'k2', current: true },
      ],
    });
    for (const key of Object.values(ring.keys)) expect(shown.stdout).not.toContain(key);
    const alone = await json<{ keys: { check: string }[] }>('keyfile', 'show', keyFile('master.key'));
    expect(valueOf<typeof alone>(shown).keys[0]!.check).toBe(alone.keys[0]!.check);
  });
  test('without a name: the configured file', async () => {
    const file = keyFile('configured.key');
    expect(await payfold(['keyfile', 'create'], { MASTER_KEY_FILE: file })).toMatchObject({ code: 0, stderr: '' });
    expect((await payfold(['keyfile', 'show'], { MASTER_KEY_FILE: file })).stdout).toContain(file);
  });
  test('a missing file, one that others can read, one that is no ring: exit 1', async () => {
    expect((await refused(1, 'keyfile', 'show', keyFile('none.key'))).message).toMatch(/cannot be read \(ENOENT\)/);
    await writeFile(keyFile('open.key'), '{}', { mode: 0o644 });
    expect((await refused(1, 'keyfile', 'show', keyFile('open.key'))).message).toMatch(/chmod 600/);
    await writeFile(keyFile('bad.key'), '{}', { mode: 0o600 });
    expect((await refused(1, 'keyfile', 'show', keyFile('bad.key'))).message).toMatch(/needs "current" and "keys"/);
  });
});

describe('wrong usage: one line, exit 2, nothing opened', () => {
  // No database listens at this address. None of these commands may connect to it.
  const nowhere = () => ({ DATABASE_URL: 'postgres://127.0.0.1:1/none', DATA_DIR: join(dataDir, 'unused') });
  test.each([
    [['accounts', 'create'], /required option '--name <name>' not specified/],
    [['accounts', 'create', '--name', 'x', '--nmae', 'y'], /unknown option '--nmae'/],
    [['accounts', 'deactivate', 'x', '--yes'], /It must be a UUID/],
    [['accounts', 'deactivate', NOBODY], /add --yes/],
    [['keys', 'rotate', '--account', NOBODY], /Every present key .* add --yes/],
    [['keys', 'revoke', NOBODY], /add --yes/],
    [['portals', 'revoke', NOBODY, '--account', NOBODY], /add --yes/],
    [['accounts', 'delete'], /unknown command 'delete'/],
    [['acounts'], /unknown command 'acounts'/],
    [['portals', 'create', '--account', NOBODY, '--name', 'P', '--fee-flat-cents', '1.5'], /whole number/],
    [['portals', 'create', '--account', NOBODY, '--name', 'P', '--fee-flat-cents', '-5'], /whole number/],
    [['portals', 'create', '--account', NOBODY, '--name', 'P', '--charge-mode', 'both'], /Allowed choices are separate, combined/],
    [['portals', 'create', '--name', 'P'], /required option '--account <account>'/],
    [['portals', 'set-limits', NOBODY, '--scope', 'card'], /--window-seconds/],
    [['portals', 'set-limits', NOBODY, '--scope', 'payer', '--window-seconds', '1'], /Allowed choices are card, case/],
    [['portals', 'set-rules', NOBODY, '--brands', 'visa,maestro'], /Brands are visa/],
    [['portals', 'set-coding', NOBODY], /required option '--keys <keys>'/],
    [['portals', 'checkout', NOBODY, '--enable', '--disable'], /cannot be used with/],
    [['portals', 'checkout', NOBODY, '--stage-secret', '--activate-secret'], /cannot be used with/],
    [['portals', 'checkout', NOBODY, '--locale', 'fr'], /Allowed choices are en, es, none/],
    [['portals', 'show'], /missing required argument 'portal'/],
    [['portals', 'show', NOBODY, 'more'], /too many arguments/],
  ])('%j', async (args, message) => {
    const [plain, asJson] = await Promise.all([payfold(args, nowhere()), payfold([...args, '--json'], nowhere())]);
    expect(plain).toMatchObject({ code: 2, stdout: '' });
    expect(plain.stderr).toMatch(message);
    expect(plain.stderr).toMatch(/^error: [^\n]+\n$/);
    expect(asJson.code).toBe(2);
    expect(valueOf(asJson)).toMatchObject({ success: false, message: expect.stringMatching(message), details: { code: 'VALIDATION_ERROR' } });
  });
  test('no command at all shows the help, exit 2; asked for, it is exit 0', async () => {
    expect(await payfold([], nowhere())).toMatchObject({ code: 2, stdout: '', stderr: expect.stringContaining('Usage: payfold') });
    expect(await payfold(['portals', 'set-fee', '--help'], nowhere())).toMatchObject({
      code: 0,
      stderr: '',
      stdout: expect.stringContaining('--json'),
    });
    expect(await payfold(['--version'], nowhere())).toMatchObject({ code: 0, stdout: expect.stringMatching(/^\d+\.\d+\.\d+\n$/) });
  });
  test('a wrong environment: every fault at once, exit 2', async () => {
    const ran = await payfold(['accounts', 'list', '--json'], { ...nowhere(), PORT: 'x', LOG_LEVEL: 'loud' });
    expect(ran.code).toBe(2);
    expect(valueOf<Envelope>(ran).message).toMatch(/LOG_LEVEL=loud[^]*PORT=x|PORT=x[^]*LOG_LEVEL=loud/);
  });
});

describe('the stores of a command', () => {
  test('a database that does not answer: exit 1, one line, no password', async () => {
    const env = { DATABASE_URL: 'postgres://someone:verysecret@127.0.0.1:1/none', DATA_DIR: dataDir };
    const ran = await payfold(['accounts', 'list', '--json'], env);
    const line = 'the database at DATABASE_URL (127.0.0.1:1) cannot be used: connect ECONNREFUSED 127.0.0.1:1';
    expect(ran.code).toBe(1);
    expect(valueOf(ran)).toEqual({ success: false, message: line, details: { code: 'INTERNAL_ERROR' } });
    expect(ran.stderr).toBe(`error: ${line}\n`);
  });
  test('many first commands at once agree on one master key', async () => {
    const [fresh, directory] = [await freshDatabase(), await mkdtemp(join(dataDir, 'first-'))];
    const env = { DATABASE_URL: fresh.url, DATA_DIR: directory };
    const ran = await Promise.all(['A', 'B', 'C', 'D'].map((name) => payfold(['accounts', 'create', '--name', name, '--json'], env)));
    expect(ran.map(({ code, stderr }) => [code, stderr])).toEqual(ran.map(() => [0, '']));
    await fresh.drop();
  });
  test('a master key that is missing or another one is noticed before anything is written under it', async () => {
    const other = await mkdtemp(join(dataDir, 'other-'));
    const env = { DATABASE_URL: database.url, DATA_DIR: other };
    await aPortal('--account', await anAccount());
    const missing = await payfold(['accounts', 'create', '--name', 'X', '--json'], env);
    expect([missing.code, valueOf<Envelope>(missing).message]).toEqual([
      1,
      expect.stringMatching(/^the database holds data but .*master\.key is missing/),
    ]);
    expect(await readdir(other)).toEqual([]);
    await writeFile(join(other, 'master.key'), JSON.stringify({ current: 'k1', keys: { k1: Buffer.alloc(32, 1).toString('base64') } }), {
      mode: 0o600,
    });
    const wrong = await payfold(['accounts', 'create', '--name', 'X', '--json'], env);
    expect([wrong.code, valueOf<Envelope>(wrong).message]).toEqual([1, expect.stringMatching(/master\.key is not the master key of this database/)]);
  });
  test('a running service is found by its runtime.json', async () => {
    const directory = await mkdtemp(join(dataDir, 'runtime-'));
    await copyFile(join(dataDir, 'master.key'), join(directory, 'master.key'));
    const runtime = { pid: process.pid, apiUrl: 'http://127.0.0.1:1', databaseUrl: database.url, simulatorUrl: 'http://127.0.0.1:1' };
    await writeFile(join(directory, 'runtime.json'), JSON.stringify(runtime), { mode: 0o600 });
    const ran = await payfold(['accounts', 'create', '--name', 'Found', '--json'], { DATA_DIR: directory });
    const { accountId } = valueOf<{ accountId: string }>(ran);
    expect(await postgresDirectory(pool).account(accountId)).toMatchObject({ name: 'Found' });
    expect(await readdir(directory)).not.toContain('postgres');
  });
  test('without service and DATABASE_URL, Postgres is started for the command; two commands at once take turns; nothing is left running', async () => {
    const directory = await mkdtemp(join(dataDir, 'embedded-'));
    const ran = await Promise.all(['A', 'B'].map((name) => payfold(['accounts', 'create', '--name', name, '--json'], { DATA_DIR: directory })));
    expect(ran.map(({ code, stderr }) => [code, stderr])).toEqual([[0, ''], [0, '']]); // prettier-ignore
    const listed = valueOf<{ name: string }[]>(await payfold(['accounts', 'list', '--json'], { DATA_DIR: directory }));
    expect(listed.map(({ name }) => name).sort()).toEqual(['A', 'B']);
    expect(await readdir(directory)).not.toContain('lock');
    expect(await readdir(join(directory, 'postgres'))).not.toContain('postmaster.pid');
  });
  test('an interrupted command stops the Postgres that it started', async () => {
    const directory = await mkdtemp(join(dataDir, 'interrupted-'));
    const child = spawn(process.execPath, [LAUNCHER, 'accounts', 'list'], { env: { PATH: process.env.PATH, DATA_DIR: directory }, stdio: 'ignore' });
    const exited = new Promise<number | null>((done) => child.once('exit', (code) => done(code)));
    for (let waited = 0; child.exitCode === null && waited < 10_000 && !(await readdir(directory)).includes('postgres'); waited += 10)
      await new Promise((wake) => setTimeout(wake, 10));
    child.kill('SIGTERM');
    expect(await exited).toBe(143);
    expect(await readdir(directory)).not.toContain('lock');
    expect(await readdir(join(directory, 'postgres'))).not.toContain('postmaster.pid');
  });
});
