/** Production (docs/operations.md#production): every role starts with the settings that it needs, and refuses what would show card data in memory. */
import { chmod, mkdir, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { freePort } from '#platform';
import { eventually } from '../support/eventually.js';
import { freshDatabase } from '../support/postgres.js';
import { DataDir, type Environment, kill, type Role, runToEnd, start, untilReady } from '../support/processes.js';

/** As in a container with `--ulimit core=0`. */
const NO_CORE_DUMPS = 'ulimit -c 0';
const ROLES = ['worker', 'api', 'standalone'] as const satisfies readonly Role[];

let dataDir: DataDir;
let database: Awaited<ReturnType<typeof freshDatabase>>;
let env: Environment;
let keyFile: string;

beforeAll(async () => {
  dataDir = await DataDir.create();
  await mkdir(dataDir.data);
  database = await freshDatabase();
  keyFile = join(dataDir.path, 'master.key');
  await writeFile(keyFile, JSON.stringify({ current: 'k1', keys: { k1: Buffer.alloc(32, 7).toString('base64') } }), { mode: 0o600 });
  env = { ENVIRONMENT: 'production', DATABASE_URL: database.url, MASTER_KEY_FILE: keyFile, PUBLIC_URL: 'https://pay.example', PROXY_HOPS: '1' };
});
afterAll(async () => {
  await dataDir?.remove();
  await database?.drop();
});

/** The line of a start that must be refused. Nothing may have been written to standard output. */
const refusal = async (role: Role, change: Environment = {}, first = NO_CORE_DUMPS): Promise<string> => {
  const { code, stdout, stderr } = await runToEnd(role, dataDir, { ...env, ...change }, first);
  expect([code, stdout]).toEqual([1, '']);
  return stderr.trim();
};

test.each([[['worker', 'api']], [['standalone']]] as const)('starts: %s', async (roles) => {
  const watched = await Promise.all(roles.map(() => freePort()));
  const running = await Promise.all(
    roles.map((role, index) => start(role, dataDir, { ...env, METRICS_PORT: String(watched[index]) }, NO_CORE_DUMPS)),
  );
  const { url } = running.at(-1)!;
  await untilReady({ url });
  expect((await fetch(`${url}/docs`)).headers.get('strict-transport-security')).not.toBeNull();
  // Beside the metrics, clients of the API cannot fill the listener.
  for (const port of watched)
    for (const path of ['/healthz', '/readyz', '/metrics']) await eventually(async () => (await fetch(`http://127.0.0.1:${port}${path}`)).ok);
  for (const process of running) {
    // Without our handler, Node would open its inspector at this signal, and others on this host could read the memory.
    kill(process.pid, 'SIGUSR1');
    await eventually(() => /SIGUSR1 was ignored/.test(process.stdout() + process.stderr()));
    expect(process.stderr()).not.toMatch(/Debugger listening/);
    expect((await process.stop()).code).toBe(0);
  }
});

describe('refuses, in one line', () => {
  test('core dumps', async () => {
    for (const role of ROLES)
      expect(await refusal(role, {}, 'ulimit -c 1')).toBe('core dumps are on; production needs a core file size limit of 0 (ulimit -c 0)');
  });

  test.each([
    ['--inspect=0', /^--inspect=0 is refused in production/],
    ['--heapsnapshot-signal=SIGUSR2', /^--heapsnapshot-signal=SIGUSR2 is refused/],
    ['--heapsnapshot_near_heap_limit=1', /^--heapsnapshot-near-heap-limit=1 is refused/],
    ['--report-on-signal', /^--report-on-signal is refused/],
    ['"--heap\\snapshot-signal=SIGUSR2"', /^--heapsnapshot-signal=SIGUSR2 is refused/],
    ['--trace-tls', /^--trace-tls is refused/],
  ])('NODE_OPTIONS=%s', async (flag, line) => {
    const lines = (await refusal('api', { NODE_OPTIONS: flag })).split('\n').filter((one) => !/^(Debugger|For help)/.test(one));
    expect(lines).toEqual([expect.stringMatching(line)]);
  });

  test('a key file that others can read', async () => {
    for (const mode of [0o640, 0o604]) {
      await chmod(keyFile, mode);
      expect(await refusal('api')).toBe(
        `MASTER_KEY_FILE ${keyFile} can be read by its group or by others; make it private with: chmod 600 ${keyFile}`,
      );
    }
    await chmod(keyFile, 0o600);
    expect(await refusal('api', { MASTER_KEY_FILE: dataDir.data })).toBe(`MASTER_KEY_FILE ${dataDir.data} is not a file`);
  });

  test('unknown proxies, as long as addresses are counted', async () => {
    const [, line] = (await refusal('api', { PROXY_HOPS: '' })).split('\n');
    expect(line).toMatch(/^ {2}PROXY_HOPS: required in production/);
  });

  test('an address for others, unless TLS in front is confirmed', async () => {
    const change = { HOST: '0.0.0.0', AUDIT_HOST: '::' };
    expect((await refusal('api', change)).split('\n').slice(1)).toEqual([
      expect.stringMatching(/^ {2}HOST=0\.0\.0\.0: .*BEHIND_TLS=on$/),
      expect.stringMatching(/^ {2}AUDIT_HOST=::: .*BEHIND_TLS=on$/),
    ]);
    const confirmed = await start('api', dataDir, { ...env, ...change, BEHIND_TLS: 'on', API_DOCS: 'off' }, NO_CORE_DUMPS);
    const port = new URL(confirmed.url).port;
    expect((await fetch(`http://127.0.0.1:${port}/healthz`)).status).toBe(200);
    expect((await fetch(`http://127.0.0.1:${port}/docs`)).status).toBe(404);
    expect((await fetch(`http://127.0.0.1:${port}/openapi.json`)).status).toBe(200);
    await confirmed.stop();
  });
});
