/**
 * Runs every spec file (`npm test`). Three files run at once. On a slow machine, two can take so much time that the third reaches a time limit. So a file
 * that fails runs once more, alone. If it fails again, the run fails. If it passes, the run passes, and its last line names the file as unstable.
 *
 * Arguments: options of jest, for both runs.
 */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtemp, readFile, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join, relative } from 'node:path';

/** If more files fail, a slow machine is hardly the cause. Then none runs again. */
const MOST_AGAIN = 3;

const options = process.argv.slice(2);
const directory = await mkdtemp(join(tmpdir(), 'payfold-results-'));
const results = join(directory, 'results.json');

/** The exit code of jest, and the files that failed. null: jest wrote no results. */
const jest = async (...args) => {
  await rm(results, { force: true });
  const child = spawn(process.execPath, ['--experimental-vm-modules', 'node_modules/jest/bin/jest.js', '--json', '--outputFile', results, ...args], {
    stdio: 'inherit',
  });
  const [code] = await once(child, 'exit');
  const report = await readFile(results, 'utf8').then(JSON.parse, () => null);
  const failed = report?.testResults.filter(({ status }) => status === 'failed').map(({ name }) => relative(process.cwd(), name));
  return { code: code ?? 1, failed: failed ?? null };
};

try {
  const { code, failed } = await jest(...options);
  process.exitCode = code;
  if (code !== 0 && failed?.length > 0 && failed.length <= MOST_AGAIN) {
    console.error(`\nFailed beside other files, and run again alone: ${failed.join(', ')}`);
    const again = await jest(...options, '--runInBand', '--runTestsByPath', ...failed);
    process.exitCode = again.code;
    if (again.code === 0) console.error(`\nUNSTABLE: failed beside other files and passed alone: ${failed.join(', ')}`);
  }
} finally {
  await rm(directory, { recursive: true, force: true });
}
