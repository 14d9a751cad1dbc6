/** Runs the code of docs/webhooks.md as written. Each verifier must accept the document's request and refuse requests that are not genuine. */
import { spawn, spawnSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { freePort } from '#platform';
import { headersOf } from '#webhooks';
import { eventually } from './support/eventually.js';

const DOCUMENT = readFileSync(join(import.meta.dirname, '../docs/webhooks.md'), 'utf8');
const block = (heading: RegExp): string => {
  const found = new RegExp(`\`\`\`${heading.source}\n([\\s\\S]*?)\n\`\`\``).exec(DOCUMENT);
  if (!found) throw new Error(`docs/webhooks.md has no block ${heading.source}`);
  return found[1]!;
};
const BODY = block(/text body/);
const SIGNATURE = /^Service-Signature: (.*)$/m.exec(DOCUMENT)![1]!;
const SECRET = 'whsec_test';
const SIGNED_AT = 1_795_168_800;

/** The requests for each verifier. `genuine`: the verifier must accept the request. */
const CASES: readonly { name: string; body?: string; signature?: string; secrets?: string[]; now?: number; genuine: boolean }[] = [
  { name: 'the request of the document', genuine: true },
  { name: 'two secrets while one is being changed', secrets: ['whsec_new', SECRET], genuine: true },
  { name: '299 seconds later', now: SIGNED_AT + 299, genuine: true },
  { name: 'a header with a further field', signature: `${SIGNATURE},v2=abc`, genuine: true },
  { name: 'another body', body: BODY.replace('12500', '12501'), genuine: false },
  { name: 'the body written anew', body: JSON.stringify(JSON.parse(BODY), null, 1), genuine: false },
  { name: 'another secret', secrets: ['whsec_other'], genuine: false },
  { name: 'the secret without its prefix', secrets: ['test'], genuine: false },
  { name: '301 seconds later', now: SIGNED_AT + 301, genuine: false },
  { name: 'no header', signature: '', genuine: false },
];

let folder: string;
beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'payfold-docs-'));
  writeFileSync(join(folder, 'verify.mjs'), block(/js verify/));
  writeFileSync(join(folder, 'receiver.mjs'), block(/js receiver/));
  writeFileSync(join(folder, 'verify.py'), block(/python/));
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

const present = (command: string) =>
  spawnSync(command, ['--version'], { stdio: 'ignore' }).status === 0 || spawnSync(command, ['version'], { stdio: 'ignore' }).status === 0;

test('the vector in the document is ours', () => {
  const headers = headersOf({ id: 'evt_01', type: 'payment.refunded', body: Buffer.from(BODY) }, SECRET, SIGNED_AT);
  expect(headers['Service-Signature']).toBe(SIGNATURE);
});

test('Node', () => {
  const script = `
    import { verify } from './verify.mjs';
    const cases = JSON.parse(process.argv[1]);
    console.log(JSON.stringify(cases.map(({ body, signature, secrets, now }) => {
      try { return verify(Buffer.from(body), signature, secrets, now).id === 'evt_01'; } catch { return false; }
    })));`;
  const cases = CASES.map(({ body = BODY, signature = SIGNATURE, secrets = [SECRET], now = SIGNED_AT }) => ({ body, signature, secrets, now }));
  const { stdout, stderr } = spawnSync(process.execPath, ['--input-type=module', '-e', script, JSON.stringify(cases)], {
    cwd: folder,
    encoding: 'utf8',
  });
  expect(stderr).toBe('');
  expect(JSON.parse(stdout)).toEqual(CASES.map(({ genuine }) => genuine));
});

(present('python3') ? test : test.skip)('Python', () => {
  const script = `
import json, sys
from verify import verify
def genuine(c):
    try:
        return verify(c["body"].encode(), c["signature"], c["secrets"], c["now"])["id"] == "evt_01"
    except ValueError:
        return False
print(json.dumps([genuine(c) for c in json.loads(sys.argv[1])]))`;
  const cases = CASES.map(({ body = BODY, signature = SIGNATURE, secrets = [SECRET], now = SIGNED_AT }) => ({ body, signature, secrets, now }));
  const { stdout, stderr } = spawnSync('python3', ['-c', script, JSON.stringify(cases)], {
    cwd: folder,
    encoding: 'utf8',
    env: { ...process.env, PYTHONPATH: folder },
  });
  expect(stderr).toBe('');
  expect(JSON.parse(stdout)).toEqual(CASES.map(({ genuine }) => genuine));
});

describe('openssl', () => {
  // The openssl example has one secret and no clock. Its user must check the age.
  const cases = CASES.filter(({ secrets = [SECRET], now }) => secrets.length === 1 && now === undefined);
  (present('openssl') ? test.each(cases) : test.skip.each(cases))('$name', ({ body = BODY, signature = SIGNATURE, secrets = [SECRET], genuine }) => {
    writeFileSync(join(folder, 'body.json'), body);
    const { stdout, stderr } = spawnSync('sh', ['-c', block(/sh/)], {
      cwd: folder,
      encoding: 'utf8',
      env: { ...process.env, SIGNATURE: signature, SECRET: secrets[0] },
    });
    expect([stdout, stderr]).toEqual([genuine ? 'genuine\n' : 'wrong\n', '']);
  });
});

test('the receiver: verifies, answers, and shows an event once', async () => {
  const port = await freePort();
  const receiver = spawn(process.execPath, ['receiver.mjs'], {
    cwd: folder,
    env: { ...process.env, SECRET, PORT: String(port) },
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  try {
    let said = '';
    receiver.stdout.setEncoding('utf8').on('data', (text: string) => (said += text));
    await eventually(() => said.includes('listening'));
    const post = async (secret: string) => {
      const headers = headersOf({ id: 'evt_01', type: 'payment.refunded', body: Buffer.from(BODY) }, secret, Math.floor(Date.now() / 1000));
      return (await fetch(`http://127.0.0.1:${port}/hook`, { method: 'POST', headers, body: BODY })).status;
    };
    expect([await post(SECRET), await post(SECRET), await post('whsec_other')]).toEqual([200, 200, 400]);
    await eventually(() => said.includes('payment.refunded'));
    expect(said.match(/payment\.refunded/g)).toHaveLength(1);
  } finally {
    receiver.kill();
  }
});
