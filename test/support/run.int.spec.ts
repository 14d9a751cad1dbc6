import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import { spawn } from 'node:child_process';
import { mkdtemp, realpath, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';

const PASSES = `test('passes', () => undefined);`;
const FAILS = `test('fails', () => expect(1).toBe(2));`;
const FAILS_ONCE = `
const { existsSync, writeFileSync } = require('node:fs');
test('passes the second time', () => {
  const before = existsSync(__filename + '.ran');
  writeFileSync(__filename + '.ran', '');
  expect(before).toBe(true);
});`;
const DOES_NOT_LOAD = `require('./no-such-file.js');`;

let directory: string;
beforeEach(async () => {
  directory = await realpath(await mkdtemp(join(tmpdir(), 'payfold-run-')));
});
afterEach(async () => {
  await rm(directory, { recursive: true, force: true });
});

/** Runs the files, each one `<name>.spec.js`, as `npm test` runs all of Payfold's. */
const run = async (files: Readonly<Record<string, string>>, config: object = {}) => {
  for (const [name, text] of Object.entries(files)) await writeFile(join(directory, `${name}.spec.js`), text);
  const options = { rootDir: directory, testRegex: String.raw`\.spec\.js$`, transform: {}, cacheDirectory: join(directory, 'cache'), ...config };
  const child = spawn(process.execPath, ['test/support/run.mjs', '--config', JSON.stringify(options)], {
    cwd: resolve('.'),
    stdio: ['ignore', 'ignore', 'pipe'],
    env: { ...process.env, FORCE_COLOR: '0', NODE_OPTIONS: '' },
  });
  let output = '';
  child.stderr.setEncoding('utf8').on('data', (text: string) => (output += text));
  const code = await new Promise<number | null>((ended) => child.once('close', ended));
  return { code, output };
};

describe('a run of all spec files', () => {
  test('passes if each file passes, and runs none again', async () => {
    const { code, output } = await run({ one: PASSES, two: PASSES });
    expect({ code, again: output.includes('again alone') }).toEqual({ code: 0, again: false });
  });

  test('passes if the file that failed passes alone, and names it as unstable', async () => {
    const { code, output } = await run({ one: PASSES, two: FAILS_ONCE });
    expect(code).toBe(0);
    expect(output).toContain('UNSTABLE');
    expect(output.trim().split('\n').at(-1)).toContain('two.spec.js');
  });

  test('fails if a file fails both times, although another passed alone', async () => {
    const { code, output } = await run({ one: FAILS, two: FAILS_ONCE });
    expect({ code, unstable: output.includes('UNSTABLE') }).toEqual({ code: 1, unstable: false });
  });

  test('fails if a file cannot be loaded', async () => {
    expect((await run({ one: DOES_NOT_LOAD, two: PASSES })).code).toBe(1);
  });

  test('fails if the end of the run fails although each file passed', async () => {
    const globalTeardown = join(directory, 'teardown.js');
    await writeFile(globalTeardown, `module.exports = () => { throw new Error('a process is left'); };`);
    expect((await run({ one: PASSES }, { globalTeardown })).code).toBe(1);
  });

  test('fails at once if more files fail than a slow machine explains', async () => {
    const { code, output } = await run({ one: FAILS_ONCE, two: FAILS_ONCE, three: FAILS_ONCE, four: FAILS_ONCE });
    expect({ code, again: output.includes('again alone') }).toEqual({ code: 1, again: false });
  });
});
