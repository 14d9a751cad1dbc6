/** A settlement file is an ordinary file. The other refusals are in test/e2e/settlement-file.e2e.spec.ts. */
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { execFileSync } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileBatches } from './file.js';

let folder: string;
beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'payfold-file-'));
});
afterAll(() => rmSync(folder, { recursive: true }));

const refusal = (file: string) =>
  fileBatches(file)
    .next()
    .then(
      () => null,
      (error: Error) => error.message,
    );

test('a pipe, a folder and a device are refused at once', async () => {
  const pipe = join(folder, 'pipe');
  execFileSync('mkfifo', [pipe]);
  for (const file of [pipe, folder, '/dev/zero']) expect([file, await refusal(file)]).toEqual([file, 'it is no ordinary file']);
  expect(await refusal(join(folder, 'none'))).toBe('the file cannot be read (ENOENT)');
});
