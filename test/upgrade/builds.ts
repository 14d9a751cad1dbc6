/** Other builds of Payfold: the present sources with small patches, each in a temporary directory. */
import { execFile } from 'node:child_process';
import { cp, mkdtemp, readFile, rm, symlink, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';

const ROOT = new URL('../../', import.meta.url).pathname.replace(/dist\/$/, '');

export interface Patch {
  readonly file: string;
  /** This text must occur exactly once in the file. Otherwise buildOf throws. */
  readonly from: string;
  readonly to: string;
}

export interface Build {
  readonly path: string;
  /** Arguments of Node that run a role. */
  readonly role: (name: 'api' | 'worker') => string[];
  /** Arguments of Node that run the command line. */
  readonly payfold: (...args: string[]) => string[];
  readonly remove: () => Promise<void>;
}

/** Copies the sources, patches them, and compiles them. `compile` false: the copy only runs specs. */
export const buildOf = async (patches: readonly Patch[], { compile = true } = {}): Promise<Build> => {
  const path = await mkdtemp(join(tmpdir(), 'payfold-build-'));
  const remove = () => rm(path, { recursive: true, force: true });
  try {
    for (const name of [
      'apps',
      'libs',
      'test',
      'bench',
      'package.json',
      'package-lock.json',
      'build.mjs',
      'bundle-packages.mjs',
      '.swcrc',
      'tsconfig.json',
      'jest.config.mjs',
      'pure-files.mjs',
      'pure-files.d.mts',
    ])
      await cp(join(ROOT, name), join(path, name), { recursive: true });
    await symlink(join(ROOT, 'node_modules'), join(path, 'node_modules'));
    for (const { file, from, to } of patches) {
      const text = await readFile(join(path, file), 'utf8');
      if (text.split(from).length !== 2) throw new Error(`${file} does not hold this text once: ${from}`);
      await writeFile(
        join(path, file),
        text.replace(from, () => to),
      );
    }
    if (compile) await promisify(execFile)('npm', ['run', 'build', '--silent'], { cwd: path });
    // Specs need the compiled code only in global-setup, so use the present `dist`. Jest compiles the patched sources itself.
    else await symlink(join(ROOT, 'dist'), join(path, 'dist'));
  } catch (error) {
    await remove();
    throw error;
  }
  const run = (entry: string) => ['--enable-source-maps', join(path, entry)];
  return {
    path,
    role: (name) => run(`dist/apps/${name}/main.js`),
    payfold: (...args) => [...run('dist/apps/operator/main.js'), ...args],
    remove,
  };
};
