/**
 * A short run of the parser fuzzer (parsers.ts). It must find the planted bug and no other. Coverage is measured in the built files, so the fuzzer
 * runs in its own process.
 */
import { execFile } from 'node:child_process';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, test } from '@jest/globals';

const MAIN = new URL('../../dist/test/fuzz/parsers-main.js', import.meta.url).pathname;
const EXECUTIONS = 300_000;
const FUZZ_MS = 120_000;

test(
  'no parser breaks its promise, and a planted bug is found',
  async () => {
    // The fuzzer writes its report into its current directory.
    const cwd = await mkdtemp(join(tmpdir(), 'payfold-fuzz-'));
    try {
      const { code, stdout } = await new Promise<{ code: number; stdout: string }>((done) => {
        execFile(
          process.execPath,
          [MAIN, '--executions', String(EXECUTIONS), '--seed', '20261121'],
          { cwd, timeout: FUZZ_MS },
          (error, output, errors) => done({ code: error ? Number(error.code ?? 99) : 0, stdout: output + errors }),
        );
      });
      expect(stdout).toMatch(/^planted bug found after \d+ executions$/m);
      expect([code, stdout]).toEqual([0, expect.stringContaining(' 0 violations')]);
    } finally {
      await rm(cwd, { recursive: true, force: true });
    }
  },
  FUZZ_MS + 10_000,
);
