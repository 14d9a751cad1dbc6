/**
 * The sample verifiers of docs/checkout, on the test vectors and on addresses that the service signs. A sample runs only if its interpreter is
 * installed.
 */
import { spawnSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, test } from '@jest/globals';
import { signedAddress } from '#checkout';

const FOLDER = join(import.meta.dirname, '../docs/checkout');
const SECRET = 'psec_test_0123456789abcdef0123456789abcdef';
const now = Date.now();
const ADDRESSES = [
  'https://agency.example/pay/done',
  'https://agency.example:8443/pay/done?case=A%26B+7&empty=&flag',
  'https://agency.example/?x=%C3%A9%20%2B&x=2&a.b=1',
];
const signed = ADDRESSES.map((address) =>
  signedAddress(SECRET, 'return', address, { result: 'paid', state: "a b&c='(!)*~é€", reference_id: 'ÄÖ/7' }, now),
);

describe.each([
  ['node', 'verify.mjs'],
  ['python3', 'verify.py'],
  ['php', 'verify.php'],
])('%s %s', (interpreter, file) => {
  const present = spawnSync(interpreter, ['--version']).status === 0;
  const run = (kind: string, address: string, secret = SECRET) =>
    spawnSync(interpreter, [join(FOLDER, file), kind, address], { encoding: 'utf8', env: { ...process.env, PAYFOLD_SIGNING_SECRET: secret } });
  if (!present) {
    test.skip(`${interpreter} is not installed here, so ${file} was not run`, () => undefined);
    return;
  }
  test('explains itself without arguments, and checks the vectors of the guide at their time', () => {
    const plain = (args: string[], env: Record<string, string>) =>
      spawnSync(interpreter, [join(FOLDER, file), ...args], { encoding: 'utf8', env: { PATH: process.env.PATH, ...env } });
    expect(plain([], {})).toMatchObject({ stderr: expect.stringContaining(`${interpreter} ${file} return`) });
    expect(plain([], {}).status).toBeGreaterThan(0);
    const guide = readFileSync(join(FOLDER, '../checkout.md'), 'utf8');
    const vectors = [...guide.matchAll(/^- `(return|cancel)`: `(\S+)` → `([0-9a-f]{64})`$/gm)];
    expect(vectors).toHaveLength(2);
    for (const [, kind, address, sig] of vectors) {
      const asked = [kind!, `${address}&sig=${sig}`];
      expect(plain([...asked, '1795168800'], { PAYFOLD_SIGNING_SECRET: SECRET })).toMatchObject({ status: 0, stderr: '' });
      expect(plain(asked, { PAYFOLD_SIGNING_SECRET: SECRET }).stderr).toContain('too old');
    }
  });
  test.each(signed)('%s is verified', (address) => {
    const { status, stdout, stderr } = run('return', address);
    expect([status, stderr]).toEqual([0, '']);
    expect(JSON.parse(stdout)).toMatchObject({ result: 'paid', state: "a b&c='(!)*~é€", reference_id: 'ÄÖ/7' });
  });
  test('a text that was changed, meant for another purpose, signed by another or old is not', () => {
    const [address] = signed as [string];
    const old = signedAddress(SECRET, 'return', ADDRESSES[0]!, { result: 'paid' }, now - 301_000);
    for (const [kind, wrong, secret, message] of [
      ['return', address.replace('paid', 'unknown'), SECRET, /does not match/],
      ['return', address.replace('/done', '/other'), SECRET, /does not match/],
      ['return', `${address}&added=1`, SECRET, /does not match/],
      ['return', address.replace(/&sig=.*/, ''), SECRET, /does not match/],
      ['cancel', address, SECRET, /does not match/],
      ['return', address, 'psec_test_other', /does not match/],
      ['return', old, SECRET, /too old/],
    ] as const) {
      const { status, stderr } = run(kind, wrong, secret);
      expect([status, stderr]).toEqual([1, expect.stringMatching(message)]);
    }
  });
});
