/**
 * `npm run build`: compiles into a draft beside `dist`, then puts the whole draft in its place. So a command that runs meanwhile never reads a file that
 * is half written, and two builds at once do not disturb each other. If no source has changed, nothing is compiled, and no compiler is needed.
 *
 * Not covered: a process that imports a file for the first time after the exchange gets the new one. For an instant within the exchange, `dist` is
 * absent.
 */
import { spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { cp, readdir, readFile, rename, rm, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

const SOURCES = ['apps', 'bench', 'libs', 'test'];
const INPUTS = ['.swcrc', 'build.mjs', 'bundle-packages.mjs', 'package-lock.json'];
/** Holds the hash of all sources that this build was made from. */
const MADE_FROM = '.made-from';
const DRAFT = `dist.new-${process.pid}`;
const FORMER = `dist.old-${process.pid}`;

const isCompiled = (file) => !file.endsWith('.spec.ts') && !file.endsWith('.mjs');

const hashOfSources = async () => {
  const hash = createHash('sha256').update(process.version.split('.')[0]);
  const files = [...INPUTS];
  for (const folder of SOURCES)
    for (const entry of await readdir(folder, { recursive: true, withFileTypes: true }))
      if (entry.isFile() && isCompiled(entry.name)) files.push(join(entry.parentPath ?? entry.path, entry.name));
  for (const file of files.sort()) hash.update(`\n${file}\n`).update(await readFile(file));
  return hash.digest('hex');
};

const run = (script, ...args) => {
  const { status } = spawnSync(process.execPath, [script, ...args], { stdio: 'inherit' });
  if (status !== 0) throw new Error(`${script} failed`);
};

const removeLeftOver = async () => {
  for (const name of await readdir('.')) {
    const pid = /^dist\.(?:new|old)-(\d+)$/.exec(name)?.[1];
    if (pid !== undefined && !isAlive(Number(pid))) await rm(name, { recursive: true, force: true });
  }
};
const isAlive = (pid) => {
  try {
    return process.kill(pid, 0);
  } catch (error) {
    return error.code === 'EPERM';
  }
};

const exchange = async () => {
  for (;;) {
    await rm(FORMER, { recursive: true, force: true });
    await rename('dist', FORMER).catch((error) => {
      if (error.code !== 'ENOENT') throw error;
    });
    try {
      await rename(DRAFT, 'dist');
      break;
    } catch (error) {
      // Another build was faster. It was made from other sources, or at the same moment.
      if (error.code !== 'ENOTEMPTY' && error.code !== 'EEXIST') throw error;
    }
  }
  await rm(FORMER, { recursive: true, force: true });
};

process.chdir(fileURLToPath(new URL('.', import.meta.url)));
const madeFrom = await hashOfSources();
if ((await readFile(join('dist', MADE_FROM), 'utf8').catch(() => null)) !== madeFrom) {
  await removeLeftOver();
  await rm(DRAFT, { recursive: true, force: true });
  const ignored = '**/*.spec.ts,**/*.mjs,**/events/*.json';
  run('node_modules/@swc/cli/bin/swc.js', ...SOURCES, '--out-dir', DRAFT, '--config-file', '.swcrc', '--ignore', ignored, '--copy-files', '--quiet');
  // The bundles are made anew only if they have changed.
  await cp(join('dist', 'node_modules'), join(DRAFT, 'node_modules'), { recursive: true }).catch((error) => {
    if (error.code !== 'ENOENT') throw error;
  });
  run('bundle-packages.mjs', DRAFT);
  await writeFile(join(DRAFT, MADE_FROM), madeFrom);
  await exchange();
}
