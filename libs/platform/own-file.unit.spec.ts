/** Files that another user of the machine may have put where we look. */
import { execFileSync } from 'node:child_process';
import { chmod, chown, lchown, link, mkdir, mkdtemp, readdir, readFile, rm, stat, symlink, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import { NotOurs, openOwnFile, readOwnFile, requireOwnFolder, requireOwnFolderOrNone, writeOwnFile } from './own-file.js';
import { newKeyRing, readKeyRing } from './keys.js';

/** Only root can give a file to another user. */
const asRoot = process.getuid?.() === 0 ? test : test.skip;
const OTHER_USER = 54_321;

let folder: string;
beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), 'payfold-own-'));
});
afterEach(() => rm(folder, { recursive: true, force: true }));
const at = (name: string) => join(folder, name);
const thrown = (work: () => unknown): string => {
  try {
    work();
  } catch (error) {
    expect(error).toBeInstanceOf(NotOurs);
    return (error as Error).message;
  }
  throw new Error('nothing was thrown');
};

describe('a file that we read', () => {
  test('is read; an absent one is null', async () => {
    await writeFile(at('file'), 'text', { mode: 0o600 });
    expect(readOwnFile(at('file'), { secret: true })).toBe('text');
    expect(readOwnFile(at('nothing'))).toBeNull();
  });
  test('is no link, not even to a file of ours', async () => {
    await writeFile(at('file'), 'text', { mode: 0o600 });
    await symlink(at('file'), at('link'));
    expect(thrown(() => readOwnFile(at('link')))).toMatch(/link is a link, which is not followed/);
  });
  test('is no pipe, which would never answer, and no folder', async () => {
    execFileSync('mkfifo', [at('pipe')]);
    expect(thrown(() => readOwnFile(at('pipe')))).toMatch(/pipe is not a file/);
    expect(thrown(() => openOwnFile(at('pipe'), { write: true }))).toMatch(/pipe is not a file/);
    expect(thrown(() => readOwnFile(folder))).toMatch(/is not a file/);
  });
  test('has no second name, if it is to be written', async () => {
    await writeFile(at('file'), 'text');
    await link(at('file'), at('second'));
    expect(thrown(() => openOwnFile(at('second'), { write: true }))).toMatch(/second name/);
  });
  test('is private, if it is a secret', async () => {
    await writeFile(at('file'), 'text');
    await chmod(at('file'), 0o640);
    expect(thrown(() => readOwnFile(at('file'), { secret: true }))).toMatch(/chmod 600/);
  });
  asRoot('belongs to us, or to an owner that is named', async () => {
    await writeFile(at('file'), 'text', { mode: 0o600 });
    await chown(at('file'), OTHER_USER, OTHER_USER);
    expect(thrown(() => readOwnFile(at('file')))).toMatch(/^[^\n]*belongs to another user \(uid 54321\)[^\n]*$/);
    expect(readOwnFile(at('file'), { owners: [OTHER_USER] })).toBe('text');
  });
});

test('a file that we write replaces a link, and is never written through it', async () => {
  await writeFile(at('victim'), 'untouched', { mode: 0o644 });
  await symlink(at('victim'), at('file'));
  writeOwnFile(at('file'), 'secret');
  expect([await readFile(at('victim'), 'utf8'), await readFile(at('file'), 'utf8')]).toEqual(['untouched', 'secret']);
  expect((await stat(at('file'))).mode & 0o777).toBe(0o600);
  expect((await readdir(folder)).sort()).toEqual(['file', 'victim']);
});

describe('a folder that we use', () => {
  test('is not one that every user can write', async () => {
    await mkdir(at('data'));
    expect(() => requireOwnFolder(at('data'))).not.toThrow();
    await chmod(at('data'), 0o777);
    expect(thrown(() => requireOwnFolder(at('data')))).toMatch(/every user/);
  });
  asRoot('belongs to us', async () => {
    await mkdir(at('data'));
    await chown(at('data'), OTHER_USER, OTHER_USER);
    expect(thrown(() => requireOwnFolder(at('data')))).toMatch(/belongs to another user/);
  });
  asRoot('may lie behind a link of ours, and not behind one of another user', async () => {
    await mkdir(at('data'));
    await symlink(at('data'), at('link'));
    expect(() => requireOwnFolder(at('link'))).not.toThrow();
    await lchown(at('link'), OTHER_USER, OTHER_USER);
    expect(thrown(() => requireOwnFolder(at('link')))).toMatch(/link belongs to another user/);
  });
});

describe('a folder that we make', () => {
  test('may be missing, and is no link', async () => {
    expect(() => requireOwnFolderOrNone(at('heads'))).not.toThrow();
    await mkdir(at('elsewhere'));
    await symlink(at('elsewhere'), at('heads'));
    expect(thrown(() => requireOwnFolderOrNone(at('heads')))).toBe(`${at('heads')} is a link; replace it by the folder itself`);
    await writeFile(at('marks'), '');
    expect(thrown(() => requireOwnFolderOrNone(at('marks')))).toMatch(/is not a folder/);
  });
});

describe('the key file', () => {
  beforeEach(() =>
    writeFile(at('master.key'), JSON.stringify({ current: 'k1', keys: { k1: Buffer.alloc(32, 1).toString('base64') } }), { mode: 0o600 }),
  );
  test('is read', () => expect(readKeyRing(at('master.key')).kids).toHaveLength(newKeyRing().kids.length));
  test('is no link', async () => {
    await symlink(at('master.key'), at('other.key'));
    expect(() => readKeyRing(at('other.key'))).toThrow(/^MASTER_KEY_FILE [^\n]*is a link[^\n]*$/);
  });
  asRoot('of another user is refused', async () => {
    await chown(at('master.key'), OTHER_USER, OTHER_USER);
    expect(() => readKeyRing(at('master.key'))).toThrow(/^MASTER_KEY_FILE [^\n]*belongs to another user[^\n]*$/);
  });
});
