/** A settlement file is an ordinary file. The other refusals are in test/e2e/settlement-file.e2e.spec.ts. */
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { execFileSync } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
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

test('an amount in JSON that would become another one is refused', async () => {
  const file = join(folder, 'lines.ndjson');
  const line = {
    batch_id: 'B',
    closed_at: '2026-01-31T00:00:00Z',
    transaction_id: 't',
    type: 'sale',
    fee_cents: 0,
    net_cents: 1_000,
    funded_on: null,
  };
  for (const [gross, refused] of [
    ['1000', null],
    ['1e3', null],
    ['1000.00000000000000001', 'line 1: gross_cents must be whole cents'],
  ] as const) {
    // prettier-ignore
    writeFileSync(file, `${JSON.stringify(line).slice(0, -1)},"gross_cents":${gross}}\n`);
    expect([gross, await refusal(file)]).toEqual([gross, refused]);
  }
});
