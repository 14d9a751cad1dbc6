/** `npm run build` in a small copy of the project: the draft beside `dist`, and builds at the same time. */
import { execFile } from 'node:child_process';
import { cp, mkdir, mkdtemp, readdir, readFile, rm, stat, symlink, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, beforeAll, expect, test } from '@jest/globals';

const ROOT = new URL('../../', import.meta.url).pathname;
const LINES = 20_000;
let path: string;
const build = () => promisify(execFile)(process.execPath, [join(path, 'build.mjs')]);
const source = (value: string) =>
  writeFile(join(path, 'apps/one.ts'), `export const lines: string[] = [];\n${`lines.push('${value}');\n`.repeat(LINES)}`);
const built = () => readFile(join(path, 'dist/apps/one.js'), 'utf8');
const isWhole = (text: string, value: string) => text.split(`'${value}'`).length === LINES + 1;

beforeAll(async () => {
  path = await mkdtemp(join(tmpdir(), 'payfold-build-'));
  for (const name of ['build.mjs', 'bundle-packages.mjs', 'package.json', 'package-lock.json', '.swcrc'])
    await cp(join(ROOT, name), join(path, name));
  for (const name of ['apps', 'bench', 'libs', 'test']) await mkdir(join(path, name));
  for (const name of ['bench', 'libs', 'test']) await writeFile(join(path, name, 'nothing.ts'), 'export {};\n');
  // The bundles of this version are made already.
  await cp(join(ROOT, 'dist/node_modules'), join(path, 'dist/node_modules'), { recursive: true });
  await symlink(join(ROOT, 'node_modules'), join(path, 'node_modules'));
  await source('first');
  await build();
});
afterAll(() => rm(path, { recursive: true, force: true }));

test('a reader finds whole files while two builds run at once, and nothing is left over', async () => {
  expect(isWhole(await built(), 'first')).toBe(true);
  await source('second');
  let running = true;
  const read = async () => {
    const torn: string[] = [];
    while (running) {
      // `dist` may be absent for an instant.
      const text = await built().catch(() => null);
      if (text !== null && !isWhole(text, 'first') && !isWhole(text, 'second')) torn.push(text.slice(-40));
      await new Promise((wake) => setImmediate(wake));
    }
    return torn;
  };
  const reading = read();
  await Promise.all([build(), build()]).finally(() => (running = false));
  expect(await reading).toEqual([]);
  expect(isWhole(await built(), 'second')).toBe(true);
  expect((await readdir(path)).filter((name) => name.startsWith('dist'))).toEqual(['dist']);
});

test('if no source has changed, nothing is built, and no compiler is needed', async () => {
  await rm(join(path, 'node_modules'));
  const before = await stat(join(path, 'dist'));
  await build();
  expect((await stat(join(path, 'dist'))).ino).toBe(before.ino);
  await source('third');
  await expect(build()).rejects.toThrow(/swc/);
  expect(isWhole(await built(), 'second')).toBe(true);
});
